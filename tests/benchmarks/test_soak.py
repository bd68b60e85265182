"""The soak in small: connects and verified traffic leave no descriptor and no thread, and a wrong byte is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import soak
from headrace.device import open_device
from headrace.testing.serve import ServeProcess, serving
from headrace.units import MIB

TINY = soak.Length(cycles=100, soak_s=3, sample_s=0.1)


@pytest.fixture(scope="module")
def target() -> Iterator[ServeProcess]:
    with serving(soak.NQN, f"mem:{soak.MEDIA_BYTES // MIB}MiB") as running:
        yield running


@pytest.mark.parametrize("name", list(soak.FIGURES))
def test_nothing_is_left(target: ServeProcess, name: str) -> None:
    figures = {figure.figure: figure for figure in soak.FIGURES[name](target, TINY)}
    assert figures
    assert all(figure.value == 0 for figure in figures.values() if figure.at_most == 0), figures
    assert name != "soak" or figures["verified"].value > 0


def test_a_wrong_byte_ends_it(target: ServeProcess) -> None:
    writer = soak._Writer(target.uri(), 0, 4, 1)
    writer._write(2)
    with open_device(target.uri()) as device:
        device.write(2 * soak.PIECE_BYTES + 8192, bytes(4096))
    with pytest.raises(AssertionError, match="piece 2"):
        writer._verify(2)
    writer.device.close()
