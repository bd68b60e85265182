"""Files to records: WebDataset tars, and folders of files of any kind.

A record is what stands one after another under one key: `a/0017.jpg` and `a/0017.cls` are fields "jpg" and "cls" of the
record "a/0017", as WebDataset has it (the key ends at the first dot of the name). Bytes are kept as they are.

Nothing of a tar is believed. Its members are never unpacked to anywhere; what is no regular file is left out; long
names and headers are bounded, one by one and together, and sparse files refused without a look at their maps: what a
member says of its length is never more than what is read.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from tarfile import BLOCKSIZE, GNUTYPE_SPARSE, HeaderError, ReadError
from typing import Any, BinaryIO, NamedTuple, cast

from headrace.dataset.ingestion.places import open_binary, reason
from headrace.dataset.ingestion.readers import Bad, Portion, Source, opened
from headrace.dataset.records.index import KIND_BYTES, MOST_KEY_BYTES
from headrace.errors import DatasetError
from headrace.units import MIB

#: Read at a time.
BLOCK_BYTES = 1 * MIB
#: Extended headers of a tar, which its reader holds in memory: those of one member together, and those of all members.
_HEADER_BYTES = 1 * MIB
#: And how many one member may have: the reader goes one call deeper for each.
_MOST_HEADERS = 64
_EXTENDED = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip


class Field(NamedTuple):
    """A file of a record, whose bytes are read once, before the next field is asked for."""

    key: bytes
    kind: str
    where: str
    blocks: Iterator[bytes]


def key_of(name: str) -> tuple[bytes, str]:
    """Key and kind of a file of this name."""
    folder, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return os.fsencode(folder + slash + stem), kind.lower()


def read_files(portion: Portion, bad: Bad) -> Iterator[Field]:
    """One file, one field."""
    source = portion.source

    def blocks() -> Iterator[bytes]:
        with open_binary(source.location) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    field = _field(source.name, source.location, blocks, bad)
    if field is not None:
        yield field


def read_tar(portion: Portion, bad: Bad) -> Iterator[Field]:
    """The members of one tar, packed or not, in order."""
    source = portion.source
    try:
        with (
            opened(source) as content,
            _Tar.open(fileobj=content.file, mode="r|", tarinfo=_Member, errorlevel=2) as tar,
        ):
            while (member := tar.next()) is not None:
                # Else it keeps all of them.
                cast(Any, tar).members = []
                tar.of_one = tar.headers = 0
                name = member.name.removeprefix("./")
                where = f"{source.location}, {name}"
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    bad(DatasetError("not a plain file in a tar", where=where, found=f"type {member.type!r}"))
                    continue
                file = tar.extractfile(member)
                if file is not None:
                    field = _field(name, where, partial(_blocks, cast(BinaryIO, file), source), bad)
                    if field is not None:
                        yield field
    except (tarfile.TarError, RecursionError, ValueError, IndexError) as error:
        raise _damage(source, error) from error


class _Tar(tarfile.TarFile):
    #: Bytes of headers that belong to the member that is read, and to all from some place on.
    of_one = of_all = 0
    #: Extended headers of the member that is read.
    headers = 0

    def take(self, count: int, kind: bytes) -> None:
        self.of_one += count
        self.of_all += count if kind == tarfile.XGLTYPE else 0
        if max(self.of_one, self.of_all) > _HEADER_BYTES:
            raise ReadError(f"more than {_HEADER_BYTES} bytes of headers")

    def extended(self) -> None:
        self.headers += 1
        if self.headers > _MOST_HEADERS:
            raise ReadError(f"more than {_MOST_HEADERS} headers for one member")


class _Member(tarfile.TarInfo):
    def _proc_member(self, tarfile: _Tar) -> _Member:
        if self.type in _EXTENDED:
            tarfile.extended()
            tarfile.take(BLOCKSIZE + self.size, self.type)
        elif self.type == GNUTYPE_SPARSE:
            return self._without_map(tarfile)
        return cast(_Member, super()._proc_member(tarfile))  # type: ignore[misc]

    def _without_map(self, tarfile: _Tar) -> _Member:
        """What is left out needs no map of where its data are: that may be as long as the tar."""
        here = cast(Any, self)
        _, more, size = here._sparse_structs
        file = cast(Any, tarfile).fileobj
        while more:
            tarfile.take(BLOCKSIZE, self.type)
            block = file.read(BLOCKSIZE)
            if len(block) < BLOCKSIZE:
                raise ReadError("unexpected end of data")
            more = bool(block[504])
        here.sparse, here.offset_data = [], file.tell()
        tarfile.offset = here.offset_data + here._block(self.size)
        self.size = size
        return self

    def _proc_gnusparse_10(self, next: tarfile.TarInfo, pax_headers: Any, tarfile: _Tar) -> None:
        """The same, of the kind whose map is in the data."""
        cast(Any, next).sparse = []

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                # The zeros at its end.
                raise
            # Behind the first member the reader would take each of the others for a good end, too.
            raise ReadError(f"{error}, {tarfile.offset} bytes from its begin") from error

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        if member.size < 0 or (member.type in _EXTENDED and member.size > _HEADER_BYTES):
            raise HeaderError(f"a header of {member.size} bytes")
        return member


def _blocks(file: BinaryIO, source: Source) -> Iterator[bytes]:
    try:
        with file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except tarfile.TarError as error:
        raise _damage(source, error) from error


def _damage(source: Source, error: Exception) -> DatasetError:
    return DatasetError("a tar is damaged or cut off", where=source.location, found=reason(error))


def _field(name: str, where: str, blocks: Callable[[], Iterator[bytes]], bad: Bad) -> Field | None:
    key, kind = key_of(name)
    if not 1 <= len(key) <= MOST_KEY_BYTES or len(os.fsencode(kind)) > KIND_BYTES or "\0" in name:
        bad(DatasetError("not a name for a record", where=where, expected=f"a key of 1 to {MOST_KEY_BYTES} bytes"))
        return None
    try:
        kind.encode()
    except UnicodeEncodeError:
        bad(DatasetError("not a name for a record", where=where, found="a kind that is not UTF-8"))
        return None
    return Field(key, kind, where, blocks())
