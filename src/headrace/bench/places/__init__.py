"""What a storage path is, and how flows read and write it. `protocol` says what every place can do."""

from headrace.bench.places.protocol import (
    CACHES,
    DIRECT,
    DROPPED,
    WARM,
    Item,
    Pending,
    Place,
    Ranges,
    Reader,
    Room,
    Shard,
    Tell,
    Writer,
)

__all__ = [
    "CACHES",
    "DIRECT",
    "DROPPED",
    "WARM",
    "Item",
    "Pending",
    "Place",
    "Ranges",
    "Reader",
    "Room",
    "Shard",
    "Tell",
    "Writer",
]
