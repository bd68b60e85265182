"""The bytes of objects: where they lie, what their checksums are, when they are durable."""
