"""A stage: copies of blobs on a medium that is nearer, a file or block device of this node.

Nothing in it is believed. Which bytes an object has, and their checksums, come from the volume's catalogue, as always;
a stage only says where a copy of a blob may be read instead. Checksums have the volume and the blob's birth number in
their seed, so bytes of another volume, of an object that was replaced, of a file that was cut or changed do not verify,
and are read from the volume in the same call.

plan.py    which blobs some objects have, and where they go
layout.py  the bytes of a stage: what is in it, and which chunks are there
store.py   a stage, looked at by anybody, held by one
throttle.py a bound on what staging takes of the link
fill.py    the copying
verify.py  what is there, read back
cache.py   past what the kernel keeps in memory
read.py    reads that go to a stage where that has the bytes, else to the volume

Why it is no volume of its own: docs/decisions.
"""
