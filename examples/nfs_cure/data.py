"""The same samples twice: as files on an ext4 file system, and as a volume of headrace; each an image of a disk."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from examples.nfs_cure.world import CAPTION_BYTES, IMAGE_BYTES, SEQUENCE, World
from headrace.dataset import WorkOptions, import_megatron, ingest_records
from headrace.dataset.tokens.idx import encode_idx
from headrace.units import MIB
from headrace.volume import Volume

#: Tokens of a document: windows are cut across them.
_DOCUMENT = 1024


def make_data(folder: Path, world: World) -> tuple[Path, Path]:
    """The images of the two disks, `files.img` and `volume.img`, of one size."""
    content = folder / "content"
    images = content / "images"
    images.mkdir(parents=True)
    chance = np.random.default_rng(7)
    for number in range(world.samples):
        (images / f"{number:06}.jpg").write_bytes(chance.bytes(IMAGE_BYTES))
        (images / f"{number:06}.txt").write_bytes(chance.bytes(CAPTION_BYTES))
    tokens = world.text_samples * SEQUENCE + 1
    documents = np.full(-(-tokens // _DOCUMENT), _DOCUMENT, np.int32)
    chance.integers(0, 128_256, int(documents.sum()), np.int32).tofile(content / "text.bin")
    (content / "text.idx").write_bytes(b"".join(encode_idx(np.dtype("<i4"), documents)))
    size = 2 * sum(path.stat().st_size for path in content.rglob("*") if path.is_file()) + 64 * MIB
    size -= size % MIB
    disks = folder / "files.img", folder / "volume.img"
    with disks[0].open("wb") as file:
        file.truncate(size)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-d", content, disks[0]], check=True)
    with (
        Volume.create(f"file:{disks[1]}?create={size}", name="nfs-cure") as volume,
        volume.session(run_id="example") as session,
    ):
        ingest_records(images, session, "images", WorkOptions(workers=1))
        import_megatron(str(content / "text"), session, "text", WorkOptions(workers=1))
    return disks
