"""Checkpoints without a framework: one tensor of bytes, a chunk of it from each rank."""

from __future__ import annotations

import numpy as np

from headrace.checkpoint import CheckpointId, Manifest, Save, Summary, TensorEntry
from headrace.volume import Session


def manifest(save: Save, lengths: list[int]) -> Manifest:
    """Tensor "w" of bytes, one chunk a rank."""
    present = [(rank, length) for rank, length in enumerate(lengths) if length]
    column = [np.array(c, np.uint64) for c in ([0] * len(present), range(len(present)), [0] * len(present))]
    sizes = np.array([length for _, length in present], np.uint64)
    return Manifest(
        summary=Summary(
            run=save.id.run,
            step=save.id.step,
            created_unix=save.created_unix,
            ranks=len(lengths),
            item_count=len(present),
            data_bytes=sum(lengths),
        ),
        objects=tuple(save.objects),
        tensors=(TensorEntry(fqn="w", dtype="uint8", shape=(sum(lengths),), properties={}),),
        blobs=(),
        planner=None,
        key=column[0],
        object=column[1],
        offset=column[2],
        length=sizes,
        chunk_offset=np.array([sum(lengths[:rank]) for rank, _ in present], np.uint64),
        chunk_size=sizes,
    )


def save_step(
    session: Session, step: int, run: str = "run", lengths: tuple[int, ...] = (1000, 0, 70_000), **options: object
) -> int:
    save = Save(session, CheckpointId(run, step), **options)  # type: ignore[arg-type]
    grants = save.allocate(lengths)
    assert [grant is None for grant in grants] == [length == 0 for length in lengths]
    save.accept(
        [None if g is None else session.volume.write_grant(g, bytes([step % 256]) * g.length_bytes) for g in grants]
    )
    return save.commit(manifest(save, list(lengths)))
