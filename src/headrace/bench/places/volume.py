"""A volume: its objects are read, verified as always; what is written are objects of its own, which are deleted at the
end.

It is written to only where `--scratch` asks for it: that takes the volume's one session, so no job can save meanwhile.
Ranks write as the ranks of a checkpoint do: the session grants the space, each writes its part and flushes, one commit
makes all of it visible.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from headrace.bench.cache import DROPPED, READ_BEFORE, WARM
from headrace.bench.places.content import CHUNK
from headrace.bench.places.filling import write_all
from headrace.bench.places.protocol import Item, Shard, Tell
from headrace.bench.places.volume_io import VolumeReader, VolumeRoom, VolumeWriter
from headrace.device import NativeDevice
from headrace.errors import DeviceError, HeadraceError, UsageError
from headrace.units import format_bytes
from headrace.volume import ObjectInfo, Session, Volume
from headrace.volume.data.absent import present

#: Names of what is written begin so.
PREFIX = "headrace-bench/"
#: Smaller objects are left out of what is read, and more than so many, too.
_LEAST = 4096
_MOST = 20_000
_FILES = 16


class VolumePlace:
    """`scratch`: objects may be written and deleted again. `unfenced`: also where a target has no reservations."""

    kind = "volume"
    keeps = False

    def __init__(self, name: str, uris: Sequence[str], *, scratch: bool = False, unfenced: bool = False) -> None:
        self.name = name
        self._uris = [*uris]
        self._scratch = self.makes = scratch
        self._unfenced = unfenced
        self._prefix = f"{PREFIX}{secrets.token_hex(4)}/"
        self._volume = Volume.open(self._uris, write=scratch)
        self._session: Session | None = None
        self._infos: list[ObjectInfo] = []
        self._items: list[Item] = []
        self._warm = False
        self._wrote = False
        self.why_read_only = None if scratch else "a volume is written to only where that is asked for"
        self.durable = "a flush on the association that wrote, and one commit of all writers"
        self.size_bytes = self._volume.info().capacity_bytes

    @property
    def items(self) -> Sequence[Item]:
        return self._items

    def describe(self) -> Mapping[str, str]:
        info = self._volume.info()
        devices = [device for device in present(self._volume.devices) if isinstance(device, NativeDevice)]
        transports = sorted({str(device.describe().get("transport")) for device in devices})
        return {
            "volume": info.name or info.id, "members": str(len(info.members)),
            "on": ", ".join(self._uris), "transport": ", ".join(transports),
            "free": format_bytes(info.free_bytes), "objects": str(info.object_count), "fence": info.fence,
        }  # fmt: skip

    def plan(self, read_bytes: int, room_bytes: int) -> list[str]:
        if not self._scratch:
            self._check_room(room_bytes)
            self._look(read_bytes)
            found = sum(item.length_bytes for item in self._items)
            return [f"reads {format_bytes(found)} of {len(self._items)} objects that are there; writes nothing"]
        self._check_room(read_bytes + room_bytes)
        return [
            f"writes {format_bytes(read_bytes + room_bytes)} at a time of objects below {PREFIX}, and deletes them",
            "holds the volume's session: no job can save to it meanwhile",
        ]

    def _check_room(self, length: int) -> None:
        if length and not self._scratch:
            raise UsageError(
                self.why_read_only or "", where=self.name,
                next_step="give --scratch: objects are written beside its own, and deleted at the end",
            )  # fmt: skip
        free = self._volume.info().free_bytes
        if length > free:
            raise UsageError(
                "too little space", where=self.name, expected=format_bytes(length), found=format_bytes(free),
                next_step="give less to write (--size, --save, --scale)",
            )  # fmt: skip

    def prepare(self, total_bytes: int, *, tell: Tell) -> None:
        if self._items:
            return
        if not self._scratch:
            self._look(total_bytes)
            return
        each = max(_LEAST, total_bytes // _FILES)
        shards = [Shard(f"data/{number:02}", each) for number in range(min(_FILES, max(1, total_bytes // each)))]
        with ExitStack() as stack:
            room = stack.enter_context(self._granted(shards))
            spec = room.for_writer()
            room.commit(write_all(lambda: VolumeWriter(spec), [shard.length_bytes for shard in shards], tell))
        self._infos = [self._volume.stat(self._prefix + shard.name) for shard in shards]
        self._items = [Item(info.name, info.length_bytes) for info in self._infos]

    def forget(self, cache: str) -> str:
        said = "no cache of bytes on this machine; what the targets have in memory cannot be controlled from here"
        if cache != WARM:
            return said
        if self._warm:
            return f"{READ_BEFORE}; {said}"
        self._warm = True
        reader = self.reader(depth=1)
        try:
            for index, item in enumerate(self._items):
                for at in range(0, item.length_bytes, CHUNK):
                    reader.read(index, at, min(CHUNK, item.length_bytes - at))
        finally:
            reader.close()
        return f"{READ_BEFORE}; {said}"

    def reader(self, *, depth: int, cache: str = DROPPED) -> VolumeReader:
        return VolumeReader(Volume.open(self._uris), self._infos)

    @contextmanager
    def room(self, shards: Sequence[Shard], cache: str = DROPPED) -> Iterator[VolumeRoom]:
        self._check_room(sum(shard.length_bytes for shard in shards))
        folder = f"room-{secrets.token_hex(2)}/"
        with self._granted([Shard(folder + shard.name, shard.length_bytes) for shard in shards]) as room:
            yield room
        self._delete(folder)

    @contextmanager
    def _granted(self, shards: Sequence[Shard]) -> Iterator[VolumeRoom]:
        if self._session is None:
            self._session = self._volume.session("headrace bench", takeover="if-dead", unfenced=self._unfenced)
        transaction = self._session.transaction()
        try:
            grants = [transaction.allocate(self._prefix + name, length) for name, length in shards]
            self._wrote = True
            yield VolumeRoom(self._uris, shards, grants, transaction, self._session.ticket, self.forget(DROPPED))
        finally:
            # One that was committed cannot be aborted any more.
            with suppress(UsageError):
                transaction.abort()

    def _delete(self, folder: str = "") -> None:
        if self._session is not None:
            with self._session.transaction() as transaction:
                transaction.delete_prefix(self._prefix + folder)

    def _look(self, total_bytes: int) -> None:
        if self._items:
            return
        total = 0
        for piece in self._volume.listings():
            for info in piece.infos():
                if info.length_bytes >= _LEAST and not info.name.startswith(PREFIX):
                    self._infos.append(info)
                    total += info.length_bytes
                if total >= total_bytes or len(self._infos) >= _MOST:
                    break
            if total >= total_bytes or len(self._infos) >= _MOST:
                break
        if not self._infos:
            raise UsageError(
                "the volume has no objects to be read", where=self.name, next_step="give --scratch to write some"
            )
        self._items = [Item(info.name, info.length_bytes) for info in self._infos]

    def close(self) -> None:
        try:
            if self._wrote:
                try:
                    self._delete()
                except HeadraceError as error:
                    raise DeviceError(
                        f"what was written could not be deleted: {error.what}", where=self.name,
                        found=f"objects below {self._prefix}",
                        next_step=f"when it can be reached, delete them: headrace volume rm --prefix {self._prefix}",
                    ) from error  # fmt: skip
        finally:
            self._volume.close()

    def __enter__(self) -> VolumePlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
