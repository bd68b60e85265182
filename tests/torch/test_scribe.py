"""Files of a job of one process: what is asked begins no session, and what fails leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DeviceError, VolumeFull
from headrace.torch.ranks.desk import Job
from headrace.torch.ranks.scribe import Scribe
from headrace.units import MIB
from headrace.volume import Volume


@pytest.fixture
def scribe(tmp_path: Path) -> Iterator[Scribe]:
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=64MiB").close()
    scribe = Scribe([uri], "job", Job(), 10.0)
    yield scribe
    scribe.close()


def test_who_asks_what_is_pending_does_not_hold_the_volume(scribe: Scribe, tmp_path: Path) -> None:
    assert scribe.pending("run/step-1") == {} and scribe.volume is None
    with Volume.open(f"file:{tmp_path}/member", write=True) as other, other.session("another job"):
        assert scribe.pending("run/step-1") == {}
    scribe.write("run/step-1/a", b"1", group="run/step-1")
    assert scribe.pending("run/step-1") == {"run/step-1/a": 1}


def test_a_file_that_could_not_be_written_is_given_up(scribe: Scribe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise DeviceError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Volume, "write_grant", fail)
        with pytest.raises(DeviceError, match="it does not answer"):
            scribe.write("file", bytes(MIB))
    with pytest.raises(VolumeFull):
        scribe.write("file", bytes(100 * MIB))
    assert scribe._gathering is not None and not scribe._gathering._groups
    scribe.write("file", b"1")
    assert scribe.volume is not None and scribe.volume.read("file") == b"1"
