"""A parallel ingest among enemies: garbage and cut connections, devices that are full, Ctrl-C at moments by chance."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from headrace.errors import DeviceError, VolumeFull
from headrace.testing.serve import serving
from headrace.units import KIB
from headrace.volume import Session, Volume
from tests.dataset.enemy import NQN, check, interrupted, nothing_half, over_a_bad_fabric, read
from tests.dataset.test_ingest_workers import corpus, plainly, tokenizer  # noqa: F401

# ruff: noqa: F811


def test_garbage_and_cut_connections(corpus: Path, tokenizer: Path, plainly: dict[str, bytes]) -> None:
    over_a_bad_fabric(corpus, tokenizer, plainly, seed=7)


def test_a_session_that_becomes_another_host_while_workers_come(
    corpus: Path, tokenizer: Path, plainly: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where writes of lost associations may still land: workers that open the volume then are not lost."""
    monkeypatch.setattr(Session, "_to_be_settled", lambda session: True)
    with serving(NQN, "mem:16MiB") as target:
        Volume.create([target.uri()]).close()
        with Volume.open([target.uri()], write=True) as volume:
            assert read(volume, corpus, tokenizer).direct
        check([target.uri()], plainly)


def test_ctrl_c_at_any_moment(corpus: Path, tokenizer: Path, plainly: dict[str, bytes], tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/a.img"
    Volume.create([f"{uri}?create=64MiB"]).close()
    interrupted(uri, corpus, tokenizer, plainly, rounds=2, seed=3)


def test_a_full_volume(corpus: Path, tokenizer: Path, plainly: dict[str, bytes]) -> None:
    with serving(NQN, "mem:16MiB", "mem:16MiB") as target:
        uris = [target.uri(nsid=nsid) for nsid in (1, 2)]
        Volume.create(uris).close()
        with Volume.open(uris, write=True) as volume:
            with volume.session(run_id="test") as session, session.transaction() as transaction:
                # Some slices fit behind it.
                transaction.put("filler", bytes(volume.info().free_bytes - 96 * KIB))
            with pytest.raises(VolumeFull):
                read(volume, corpus, tokenizer)
            nothing_half(uris)
            with volume.session(run_id="test") as session, session.transaction() as transaction:
                transaction.delete("filler")
            read(volume, corpus, tokenizer)
        check(uris, plainly)


def test_a_full_device(corpus: Path, tokenizer: Path, plainly: dict[str, bytes], tmp_path: Path) -> None:
    """A file of the target that may not grow: what is written behind its end fails."""
    with serving(NQN, f"{tmp_path}/a.img:64MiB") as target:
        with Volume.create([target.uri()]) as volume:
            begin = volume.superblock.members[0].data_offset
        resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE, (begin + 32 * KIB, resource.RLIM_INFINITY))
        with Volume.open([target.uri()], write=True) as volume, pytest.raises(DeviceError) as caught:
            read(volume, corpus, tokenizer)
        assert "\n" not in str(caught.value)
        nothing_half([target.uri()])
        resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with Volume.open([target.uri()], write=True) as volume:
            read(volume, corpus, tokenizer)
        check([target.uri()], plainly)
