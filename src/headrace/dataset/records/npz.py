"""One array of an `.npz` file that is in memory, without copying it.

NumPy's own reader copies the file, reads it in pieces and sums it up again with CRC-32. Here the bytes have been
verified already, and an array that is stored as it is (`numpy.savez`) is a view of them.
"""

from __future__ import annotations

import errno
import io
import math
import struct
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DatasetError

#: Of a local header: its signature, then 22 bytes, lengths of name and extra field (APPNOTE.TXT, section 4.3.7).
_LOCAL = struct.Struct("<4s22xHH")
#: Of the text that says shape and type.
_MOST_HEADER_BYTES = 1 << 16
#: What an array may unpack to without a question, and how many times the file's bytes beyond that; DEFLATE can 1032.
_FREE_BYTES = 256 << 20
_MOST_RATIO = 64


def npz_array(data: memoryview, name: str, where: str, *, most_bytes: int | None = None) -> npt.NDArray[Any]:
    """The array `name`: a view of `data` where it is stored as it is, else a copy. DatasetError where there is none.

    A file of few bytes may unpack to many: no more than `most_bytes` of memory are taken, which are 64 times the file,
    and at least 256 MiB, where nothing is said.
    """
    if most_bytes is None:
        most_bytes = max(_FREE_BYTES, _MOST_RATIO * len(data))
    try:
        with zipfile.ZipFile(_View(data)) as archive:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                return _array(_unpacked(archive, member, most_bytes))
        signature, name_bytes, extra_bytes = _LOCAL.unpack_from(data, member.header_offset)
        begin = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
        body = data[begin : begin + member.file_size]
        if signature != b"PK\x03\x04" or len(body) != member.file_size:
            raise ValueError("it is cut off")
        return _array(body)
    # What zipfile, zlib and NumPy raise for bytes that are no archive, or no array, is not told.
    except Exception as error:
        expected, found = f"an .npz file with an array {name!r}", f"{type(error).__name__}: {error}"
        raise DatasetError("a record is no such file", where=where, expected=expected, found=found) from error


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most_bytes: int) -> bytes:
    # Readers of the other methods of a zip file unpack without a bound; NumPy writes none of them.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"it is compressed by method {member.compress_type}")
    if member.file_size > most_bytes:
        raise ValueError(f"it unpacks to {member.file_size:,} bytes, and {most_bytes:,} are allowed")
    with archive.open(member) as file:
        # With a length: else all is unpacked that is there, whatever was declared.
        return file.read(member.file_size)


def _array(body: memoryview | bytes) -> npt.NDArray[Any]:
    """A view of the `.npy` file `body`."""
    head = io.BytesIO(body[:_MOST_HEADER_BYTES])
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(head)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    count = math.prod(shape)
    if count * dtype.itemsize != len(body) - head.tell():
        raise ValueError(f"{len(body) - head.tell()} bytes are no {shape} of {dtype}")
    found = np.frombuffer(body, dtype, count, head.tell())
    return found.reshape(shape, order="F" if fortran else "C")


class _View(io.RawIOBase):
    """Bytes in memory as a file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at
