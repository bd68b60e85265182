"""Makes the image of the current version: `python -m tests.images.make`. An image that was kept is never made again.

`epochs-2.xz` (`python -m tests.images.make epochs`): version 2 with what came later, of three members, of which
member 1 has been away twice: four areas, epochs, checksum tables that stand twice.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout

HERE = Path(__file__).parent
KIB = 1 << 10
STRIPE = 64 * KIB
MEMBERS = 2
#: By version.
MEMBER_BYTES = {1: 1 << 20, 2: 4 << 20}


def pattern(seed: int, length: int) -> bytes:
    """Bytes that compress, and that no other seed has."""
    line = b"".join(b"%06d %03d\n" % (i, seed) for i in range(512))
    return (line * (length // len(line) + 1))[:length]


#: What the image holds; for good.
EXPECTED = {
    "empty": b"",
    "run/step-1/small": pattern(1, 700),
    "run/step-1/striped": pattern(2, 150 * KIB),
    "data/table": pattern(3, 80 * KIB),
    "data/streamed": pattern(4, 70 * KIB + 5),
}
#: What an image has besides, since version 2: many objects in one blob, one out of parts of others, a new name; so many
#: in one commit that it is a table, and so many commits that there are more tables, one of them with deletions.
SINCE_2 = {
    **{f"many/{i}": pattern(5, 600)[100 * i : 100 * i + 90] for i in range(6)},
    "model/composed": b"header" + EXPECTED["run/step-1/striped"][1000:120_000] + EXPECTED["data/table"][5:],
    "model/renamed": pattern(6, 5000),
    **{f"packed/{i:03}": pattern(7, 6600)[10 * i : 11 * i] for i in range(600)},
    **{f"late/{i}": pattern(8, i) for i in range(150)},
}


def expected(version: int) -> dict[str, bytes]:
    """What the image of a version holds."""
    return EXPECTED if version < 2 else {**EXPECTED, **SINCE_2}


def epochs() -> None:
    """Member 1 is away in the second session, back in the third, away in the fourth."""
    path = HERE / "epochs-2.xz"
    if path.exists():
        raise SystemExit(f"{path} is kept for good")
    devices = [MemoryDevice(1 << 20) for _ in range(3)]
    Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB, name="kept")
    for there, name in (
        ((0, 1, 2), "run/step-1/small"),
        ((0, 2), "data/streamed"),
        ((0, 1, 2), "data/table"),
        ((0, 2), "empty"),
    ):
        volume = Volume.open([devices[index] for index in there], write=True, degraded=len(there) < 3)
        with volume.session("image") as session, session.transaction() as tx:
            tx.put(name, EXPECTED[name], checksum_block_bytes=4096)
    path.write_bytes(lzma.compress(b"".join(device.data for device in devices), preset=9))


def main() -> None:
    path = HERE / f"version-{layout.VERSION}.xz"
    if path.exists():
        raise SystemExit(f"{path} is kept for good")
    devices = [MemoryDevice(MEMBER_BYTES[layout.VERSION]) for _ in range(MEMBERS)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB, name="kept")
    with volume.session("image") as session:
        with session.transaction() as tx:
            tx.put("run/step-1/small", EXPECTED["run/step-1/small"], checksum_block_bytes=4096)
            tx.put("run/step-1/striped", EXPECTED["run/step-1/striped"])
            tx.put("gone", pattern(9, 9 * KIB))
            tx.put("empty", b"")
        with session.transaction() as tx:
            tx.put("data/table", EXPECTED["data/table"], checksum_block_bytes=4096)
            tx.write_stream("data/streamed", [EXPECTED["data/streamed"]])
            tx.delete("gone")
            tx.put("model/new", SINCE_2["model/renamed"])
            tx.put_many([f"many/{i}" for i in range(6)], pattern(5, 600), 90, [100 * i for i in range(6)])
        with session.transaction() as tx:
            tx.compose("model/composed", [b"header", ("run/step-1/striped", 1000, 119_000), ("data/table", 5, None)])
            tx.rename("model/new", "model/renamed")
        with session.transaction() as tx:
            numbers = range(600)
            data = pattern(7, 6600)
            tx.put_many([f"packed/{i:03}" for i in numbers], data, [*numbers], [10 * i for i in numbers])
        for i in range(150):
            with session.transaction() as tx:
                tx.put(f"late/{i}", pattern(8, i), checksum_block_bytes=4096)
                tx.put(f"later/{i}", b"")
                if i:
                    tx.delete(f"later/{i - 1}")
        with session.transaction() as tx:
            tx.delete("later/149")
    assert {info.name: volume.read(info.name) for info in volume.list()} == expected(layout.VERSION)
    path.write_bytes(lzma.compress(b"".join(device.data for device in devices), preset=9))


if __name__ == "__main__":
    epochs() if sys.argv[1:] == ["epochs"] else main()
