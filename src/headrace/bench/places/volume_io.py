"""Flows and writers of a volume: the volume opened once more, with connections of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

from headrace.bench.places.content import CHUNK, Content, number_of
from headrace.bench.places.memory import Pool, aligned
from headrace.bench.places.protocol import U8, Ranges, Shard
from headrace.errors import HeadraceError
from headrace.volume import Grant, ObjectInfo, Parts, Receipt, Ticket, Transaction, Volume, VolumeTransfer

#: Chunks of one writer that are under way at once, about as an unpaced one has them.
_UNDER_WAY = 4


class VolumePending:
    def __init__(self, moves: Sequence[VolumeTransfer], pool: Pool, buffer: U8, total_bytes: int) -> None:
        self._moves, self._pool, self._buffer = moves, pool, buffer
        self.bytes = total_bytes

    def done(self) -> bool:
        return all(move.done() for move in self._moves)

    def wait(self, timeout_s: float | None = None) -> None:
        errors: list[HeadraceError] = []
        for move in self._moves:
            try:
                move.wait(timeout_s)
            except HeadraceError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._pool.give(self._buffer)


class VolumeReader:
    """One flow: the volume opened once more, with connections of its own."""

    def __init__(self, volume: Volume, infos: Sequence[ObjectInfo]) -> None:
        self._volume, self._infos = volume, infos
        self._pool = Pool()
        self._alone = Pool()

    def start(self, ranges: Ranges) -> VolumePending:
        buffer = self._pool.take(ranges.total_bytes)
        places = np.cumsum(ranges.length) - ranges.length
        moves = []
        for item in np.unique(ranges.item).tolist():
            rows = np.flatnonzero(ranges.item == item)
            moves.append(
                self._volume.submit_read(
                    self._infos[item], ranges.offset[rows], ranges.length[rows], [buffer], places[rows]
                )
            )
        return VolumePending(moves, self._pool, buffer, ranges.total_bytes)

    def read(self, item: int, offset: int, length: int) -> None:
        buffer = self._alone.take(length)
        self._volume.submit_read(self._infos[item], [offset], [length], [buffer], [0]).wait()
        self._alone.give(buffer)

    def close(self) -> None:
        self._volume.close()


class VolumeRoom:
    """Grants of one transaction."""

    def __init__(
        self, uris: Sequence[str], shards: Sequence[Shard], grants: Sequence[Grant], transaction: Transaction,
        ticket: Ticket | None, state: str,
    ) -> None:  # fmt: skip
        self.shards = shards
        self._uris, self._grants, self._transaction, self._ticket, self._state = (
            uris,
            grants,
            transaction,
            ticket,
            state,
        )

    def for_writer(self) -> dict[str, Any]:
        return {
            "kind": "volume", "uris": [*self._uris], "grants": [grant.to_json() for grant in self._grants],
            "ticket": None if self._ticket is None else self._ticket.to_json(),
        }  # fmt: skip

    def commit(self, proofs: Iterable[str]) -> None:
        written = {receipt.birth: receipt for receipt in map(Receipt.from_json, proofs)}
        for grant in self._grants:
            receipt = written.get(grant.birth)
            if receipt is None:
                self._transaction.give_up(grant)
            else:
                self._transaction.accept(receipt)
        self._transaction.commit()

    def forget(self) -> None:
        """This machine keeps no bytes of it."""

    def state(self) -> str:
        return self._state


class _Chunks(list[U8]):
    """The chunks of an object: one becomes what it is when it is asked for, about to be sent, in the
    memory of the one that was `_UNDER_WAY` before it, which has been answered by then (`_Told`)."""

    def __init__(self, content: Content, memory: Sequence[U8], name: str, length_bytes: int) -> None:
        self.starts = [*range(0, length_bytes, CHUNK)]
        super().__init__(
            memory[index % len(memory)][: min(CHUNK, length_bytes - start)] for index, start in enumerate(self.starts)
        )
        self._content, self._memory, self._file = content, memory, number_of(name)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> U8: ...

    @overload
    def __getitem__(self, index: slice, /) -> list[U8]: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> U8 | list[U8]:
        if isinstance(index, slice):
            # Of the last one, where that is too short to be written from where it lies.
            return [self[each] for each in range(*index.indices(len(self)))]
        number = int(index)
        self._content.stamp(self._memory[number % len(self._memory)], self._file, self.starts[number])
        return super().__getitem__(number)


class _Told:
    """Of a write, how far it is; no slower than without. An object may be large, and who waits must hear of it. A chunk
    at a time."""

    def __init__(self, seen: Callable[[int], None]) -> None:
        self._seen = seen

    def take(self, under_way_bytes: int) -> int:
        return CHUNK if under_way_bytes <= (_UNDER_WAY - 1) * CHUNK else 0

    def answered(self, length_bytes: int, seconds: float) -> None:
        self._seen(length_bytes)


class VolumeWriter:
    """From `VolumeRoom.for_writer`. What is read again is verified by the volume's own checksums."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        ticket = None if spec["ticket"] is None else Ticket.from_json(spec["ticket"])
        self._grants = [Grant.from_json(text) for text in spec["grants"]]
        self._volume = Volume.open([*spec["uris"]], write=True, ticket=ticket)
        self._content = Content()
        self._memory = [self._content.chunk() for _ in range(_UNDER_WAY)]

    def save(self, shards: Sequence[int], seen: Callable[[int], None]) -> list[str]:
        proofs = []
        for index in shards:
            grant = self._grants[index]
            chunks = _Chunks(self._content, self._memory, grant.name, grant.length_bytes)
            parts = Parts([*list.__iter__(chunks)], chunks.starts, grant.length_bytes)
            parts.views = chunks
            parts.pace = _Told(seen)
            proofs.append(self._volume.write_grant(grant, parts).to_json())
        return proofs

    def restore(self, shards: Sequence[int], seen: Callable[[int], None]) -> int:
        self._volume.refresh()
        total = 0
        buffers = [aligned(CHUNK) for _ in range(3)]
        for index in shards:
            grant = self._grants[index]
            moves: list[tuple[VolumeTransfer, U8, int]] = []
            starts = iter(range(0, grant.length_bytes, CHUNK))
            free = [*buffers]
            while True:
                while free and (start := next(starts, None)) is not None:
                    buffer, length = free.pop(), min(CHUNK, grant.length_bytes - start)
                    moves.append(
                        (self._volume.submit_read(grant.name, [start], [length], [buffer], [0]), buffer, length)
                    )
                if not moves:
                    break
                move, buffer, length = moves.pop(0)
                move.wait()
                free.insert(0, buffer)
                total += length
                seen(length)
        return total

    def close(self) -> None:
        self._volume.close()
