"""Another namespace in the place of a member, under a session and a reader that have it open: nothing is written to it,
and the volume is as it was when the right one is back. A real target, changed while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import DeviceGone, HeadraceError, SessionLost
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, state_of

NQN = "nqn.2026-01.io.headrace:replaced"
SIZE = 16 * MIB
UUID = "00112233-4455-6677-8899-aabbccddeeff"


def other(folder: Path, kind: str) -> Path:
    path = folder / "other.img"
    if kind == "of another volume":
        Volume.create([f"file:{folder}/x.img?create={SIZE}", f"file:{path}?create={SIZE}"], stripe_bytes=STRIPE).close()
    else:
        with path.open("wb") as file:
            file.truncate({"larger": 2 * SIZE, "smaller": SIZE // 2}[kind])
    return path


def put(session: Session, name: str, data: bytes) -> None:
    with session.transaction() as tx:
        tx.put(name, data)


@pytest.mark.parametrize("kind", ["larger", "smaller", "of another volume"])
@pytest.mark.parametrize("keeps", ["reservations", "its uuid"])
def test_a_member_is_replaced_while_it_is_open(tmp_path: Path, kind: str, keeps: str) -> None:
    """What tells: a reservation that is not there, or, where none are kept, a uuid of its own."""
    more = {} if keeps == "reservations" else {"no_reservations": True}

    def place(nsid: int, path: Path, users: Sequence[Volume] = (), **options: object) -> None:
        target.ask("remove-namespace", nqn=NQN, nsid=nsid)
        deadline = time.monotonic() + 60
        for volume in users:
            while not volume.devices[nsid - 1].describe()["associations_lost"]:  # type: ignore[attr-defined]
                assert time.monotonic() < deadline, "nobody noticed"
                time.sleep(0.01)
        target.ask("add-namespace", nqn=NQN, namespace={"nsid": nsid, "path": str(path), **more, **options})

    with serving(NQN, *(f"{tmp_path / name}:{SIZE}" for name in ("a.img", "b.img"))) as target:
        for nsid, name in ((1, "a.img"), (2, "b.img")):
            place(nsid, tmp_path / name)
        uris = [target.uri(nsid, loss_timeout=30) for nsid in (1, 2)]
        Volume.create(uris, stripe_bytes=STRIPE, log_bytes=128 * KIB).close()
        expected = {"first": content(1, 700 * KIB)}
        stranger = other(tmp_path, kind)
        before = stranger.read_bytes()
        with Volume.open(uris, write=True) as volume, Volume.open(uris) as reader:
            session = volume.session("run", heartbeat_s=0.5, unfenced=keeps != "reservations")
            put(session, "first", expected["first"])
            assert reader.refresh()
            place(2, stranger, [volume, reader], **({} if keeps == "reservations" else {"uuid": UUID}))
            for _ in range(2):
                with pytest.raises((DeviceGone, SessionLost), match=r"fenced|another namespace"):
                    put(session, "second", content(2, 700 * KIB))
            with pytest.raises(HeadraceError, match="nsid=2"):
                reader.read("first")
            try:
                session.close()
            except HeadraceError as error:
                assert "nsid=2" in str(error)
        assert stranger.read_bytes() == before
        place(2, tmp_path / "b.img")
        with Volume.open(uris, write=True) as volume:
            assert state_of(volume) == expected
            with volume.session("run", takeover="now", unfenced=keeps != "reservations") as session:
                put(session, "after", content(3, 700 * KIB))
            assert state_of(volume) == {**expected, "after": content(3, 700 * KIB)}
            assert scrub(volume.devices).clean
