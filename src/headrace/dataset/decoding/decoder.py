"""Who decodes records: the thread that asks for them, threads, or processes (`processes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias, TypeVar

#: Fields of a record by kind.
Record: TypeAlias = "dict[str, memoryview]"
T = TypeVar("T")


class Decoder(Protocol[T]):
    """Something that decodes beside its caller."""

    def begin(self, names: Sequence[str], records: Sequence[Record]) -> Sequence[Future[Sequence[T]]]:
        """Start to decode these: together, in their order, the futures have what becomes of all of them. `names`: what
        they are called in messages. Futures may be cancelled."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that it holds between two calls."""
        ...

    def close(self) -> None:
        """No more of it. Safe to call again."""


def decode_one(decode: Callable[[Record], T], name: str, record: Record) -> T:
    """What `decode` raises says which record it was raised for."""
    try:
        return decode(record)
    except StopIteration as error:
        # To whoever iterates over batches it would be their end.
        raise RuntimeError(f"StopIteration while {name} was decoded") from error
    except BaseException as error:
        # As `add_note` of Python 3.11 does. An earlier one does not print it, but it is there for who looks.
        vars(error).setdefault("__notes__", []).append(f"while {name} was decoded")
        raise


class Threads(Decoder[T]):
    """Of this process: for functions that let others run while they work, as decompressors and NumPy do."""

    def __init__(self, decode: Callable[[Record], T], count: int) -> None:
        self._decode = decode
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-decode")

    def begin(self, names: Sequence[str], records: Sequence[Record]) -> list[Future[Sequence[T]]]:
        return [self._pool.submit(self._one, name, record) for name, record in zip(names, records, strict=True)]

    @property
    def held_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """A record that is being decoded is decoded to its end."""
        self._pool.shutdown(cancel_futures=True)

    def _one(self, name: str, record: Record) -> list[T]:
        return [decode_one(self._decode, name, record)]
