"""What a storage path is, and how flows read and write it. `protocol` says what every place can do."""

from headrace.bench.places.open import is_folder, open_place, open_writer
from headrace.bench.places.protocol import (
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
    "Item",
    "Pending",
    "Place",
    "Ranges",
    "Reader",
    "Room",
    "Shard",
    "Tell",
    "Writer",
    "is_folder",
    "open_place",
    "open_writer",
]
