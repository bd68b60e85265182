"""Checkpoints out of folders that `torch.distributed.checkpoint` wrote, into a volume: seen whole or not at all.

The metadata, a pickle, is read by an interpreter of our own (`headrace.checkpoint.pickled`), and each tensor by
`torch.load(weights_only=True)`, once it is certain that its archive unpacks to no more than it is long. So nothing of
the folder is ever carried out. Items that are bytes stay as they are: pickles, of which DCP makes objects when somebody
loads them, as it would from the folder.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from headrace.checkpoint import CheckpointId
from headrace.checkpoint.foreign import ForeignItem, opened, read_folder
from headrace.checkpoint.manifest import encode
from headrace.checkpoint.retention import objects_of
from headrace.checkpoint.save import CHECKSUM_BLOCK_BYTES
from headrace.device.protocol import Buffer
from headrace.errors import CheckpointFailed, ObjectExists
from headrace.torch.metadata import dtype_of, encode_plain
from headrace.torch.tensors import as_bytes
from headrace.units import MIB
from headrace.volume import Session

#: Bytes of items that are no tensors, at a time.
_PIECE_BYTES = 8 * MIB
#: Entries of the archive of one tensor; there are six or so.
_ENTRY_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What one import did."""

    checkpoint_id: str
    tensors: int
    others: int
    files: int
    data_bytes: int
    sequence: int


def import_dcp(
    session: Session, folder: Path, id: CheckpointId, *, heard: Callable[[int, int], None] | None = None
) -> ImportReport:
    """Make checkpoint `id` of a folder, in one commit. One tensor's shard is in memory at a time, twice.

    `heard(done, total)`: bytes so far. ObjectExists where the checkpoint is there; VolumeFull before anything is
    written; CheckpointFailed for a folder that is not what it should be, with the name of the item.
    """
    found = read_folder(folder)
    if objects_of(session.volume, id):
        raise ObjectExists(f"checkpoint {id} is committed already", next_step="import it as another step")
    manifest = found.manifest(id, encode_plain)
    # A dtype that this torch does not know is found out before the first byte.
    dtypes = {tensor.fqn: dtype_of(tensor.dtype) for tensor in found.tensors}
    layout = found.laid_out()
    total = sum(length for _, length in layout.values())
    done = 0

    def stream(name: str) -> Iterator[Buffer]:
        nonlocal done
        offsets, length = layout[name]
        at = 0
        with opened(folder, name) as file:
            for item, offset in zip(found.items[name], offsets, strict=True):
                if offset > at:
                    yield bytes(offset - at)
                at = offset + item.length_bytes
                for data in _item(file, item, dtypes.get(item.fqn)):
                    yield data
                    done += memoryview(data).nbytes  # type: ignore[arg-type]
                    if heard is not None:
                        heard(done, total)
        if length > at:
            yield bytes(length - at)

    encoded = encode(manifest)
    with session.reserve(total + len(encoded) + (len(layout) + 1) * CHECKSUM_BLOCK_BYTES, f"{id}/"):
        with session.transaction() as tx:
            for entry, name in zip(manifest.objects, layout, strict=True):
                tx.write_stream(
                    entry.name,
                    stream(name),
                    length_bytes=entry.length_bytes,
                    checksum_block_bytes=CHECKSUM_BLOCK_BYTES,
                )
            tx.put(id.manifest, encoded, checksum_block_bytes=4096)
        sequence = tx.sequence
    return ImportReport(
        checkpoint_id=str(id),
        tensors=len(found.tensors),
        others=len(found.blobs),
        files=len(layout),
        data_bytes=manifest.summary.data_bytes,
        sequence=sequence,
    )


def _item(file: BinaryIO, item: ForeignItem, dtype: torch.dtype | None) -> Iterator[Buffer]:
    file.seek(item.at)
    if item.dtype is None:
        for start in range(0, item.stored_bytes, _PIECE_BYTES):
            yield _read(file, item, min(_PIECE_BYTES, item.stored_bytes - start))
        return
    tensor = _tensor(_read(file, item, item.stored_bytes), item)
    if tensor.dtype != dtype or tuple(tensor.shape) != item.sizes or tensor.layout != torch.strided:
        raise CheckpointFailed(
            f"a shard of tensor {item.fqn!r} is not what the metadata says",
            where=item.file,
            expected=f"{item.dtype}{list(item.sizes)}",
            found=f"{tensor.dtype}{list(tensor.shape)}",
        )
    if tensor.numel():
        yield as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _read(file: BinaryIO, item: ForeignItem, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = file.read(length - len(data))
        if not piece:
            raise CheckpointFailed(f"a file became shorter in the middle of {item.fqn!r}", where=item.file)
        data += piece
    return bytes(data)


def _tensor(data: bytes, item: ForeignItem) -> torch.Tensor:
    """What `torch.save` wrote, and nothing else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if len(entries) > _ENTRY_LIMIT or packed or sum(entry.file_size for entry in entries) > len(data):
                raise ValueError("its archive unpacks to more than it is long")
            # DCP and torch.load never look at these sums.
            bad = archive.testzip()
            if bad is not None:
                raise ValueError(f"bytes of {bad} do not match their CRC-32")
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor):
            raise ValueError(f"it is a {type(found).__name__}")
    except Exception as error:
        raise CheckpointFailed(
            f"a shard of tensor {item.fqn!r} cannot be read",
            where=item.file,
            expected="a tensor, as torch.save writes it",
            found=str(error).partition("\n")[0][:200],
        ) from error
    return found
