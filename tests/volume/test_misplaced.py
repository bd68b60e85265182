"""Entries whose checksums are right and that say of bytes that they are where none can be: damage, of which object,
where, and nobody's mistake in using the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.device import BlockDevice, open_device
from headrace.errors import VolumeDamaged
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.layout import Blob, Rows
from headrace.volume.many import read_many
from headrace.volume.repair.check import verify_objects
from tests.volume.support import KIB, STRIPE, content, writing

FAR = 1 << 40
#: With 4 KiB blocks: enough for a checksum table.
DATA = content(1, 300_000)


def changed(rows: Rows, which: int, **fields: int) -> Rows:
    rows = rows.copy()
    for name, value in fields.items():
        rows[name][which] = value
    return rows


def data(**fields: int) -> Callable[[Blob], Blob]:
    return lambda blob: replace(blob, columns=changed(blob.columns, 1, **fields))


def tables(*which: int) -> Callable[[Blob], Blob]:
    def change(blob: Blob) -> Blob:
        columns = blob.table_columns
        for copy in which:
            columns = changed(columns, copy, offset=FAR)
        return replace(blob, table_columns=columns)

    return change


def device(tmp_path: Path, native: bool, number: int) -> BlockDevice:
    return open_device(f"file:{tmp_path / str(number)}?create=8MiB") if native else MemoryDevice(8 * MIB)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (data(offset=FAR), rf"behind the end .*member 1 \(.*\) offset {FAR}"),
        (data(member=9), "a member that there is not .*member 9 offset"),
        (data(offset=MIB + 100), rf"within a block .*member 1 \(.*\) offset {MIB + 100}"),
        (tables(0, 1), rf"behind the end .*checksum table of blob .*, member 0 \(.*\) offset {FAR}"),
        (tables(0), None),
    ],
    ids=["behind-the-end", "no-member", "unaligned", "both-tables", "one-table"],
)
def test_what_lies_where_nothing_can_is_damage(
    tmp_path: Path, native: bool, change: Callable[[Blob], Blob], said: str | None
) -> None:
    devices = [device(tmp_path, native, number) for number in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=512 * KIB)
    with writing(volume) as session, session.transaction() as tx:
        tx.put("whole", DATA, checksum_block_bytes=4096)
        tx.put_many(["pack/a", "pack/b"], DATA, [200_000, 100_000])
        for allocation in tx.allocations.values():
            assert allocation.blob is not None and len(allocation.blob.table_columns) == 2
            allocation.blob = change(allocation.blob)
        tx.put("good", b"good")
    with Volume.open(devices) as volume:
        infos = volume.list()
        want = {"good": b"good", "whole": DATA, "pack/a": DATA[:200_000], "pack/b": DATA[200_000:]}
        into = np.zeros(300_000, np.uint8)
        for info in infos:
            if said is None or info.name == "good":
                assert volume.read(info.name) == want[info.name]
                read_many(volume, [info], [0], into)
                assert into[: info.length_bytes].tobytes() == want[info.name]
                continue
            for read in (lambda: volume.read(info.name), lambda: read_many(volume, [info], [0], into)):  # noqa: B023
                with pytest.raises(VolumeDamaged, match=said) as caught:
                    read()
                assert f"object {info.name!r}" in (caught.value.where or "")
        verdicts = list(verify_objects(volume, infos))
        bad = {info.name for info, _, error in verdicts if error is not None}
        assert bad == (set() if said is None else {*want} - {"good"})
        if said is None:
            assert all("copy 0 of page 0 of its checksum table" in finding for finding in volume.info().warnings)
            assert len(volume.info().warnings) == 2
