"""Writers that are stopped, taken over from and woken up, as real processes over our target (`zombies`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.errors import WriterActive
from headrace.testing.serve import ServeProcess, serving
from headrace.volume import Volume
from tests.volume import zombies
from tests.volume.support import STRIPE
from tests.volume.zombies import BEAT, WRITER, running

NQN = "nqn.2026-01.io.headrace:zombies"


class World(zombies.World):
    fence = "persistent"
    takeover = "if-dead"

    def __init__(self, folder: Path) -> None:
        self._images = [folder / name for name in ("a.img", "b.img")]
        self._stack = ExitStack()
        self._target = self._serve(None)
        self.port = self._target.port
        self.uris = [self._target.uri(nsid, keepalive=120, loss_timeout=60) for nsid in (1, 2)]

    def _serve(self, port: int | None) -> ServeProcess:
        return self._stack.enter_context(serving(NQN, *(f"{image}:16MiB" for image in self._images), port=port))

    def media(self) -> list[bytes]:
        return [image.read_bytes() for image in self._images]

    def conflicts(self) -> int:
        return sum(_numbers(self._target.ask("status"), "conflicts"))

    def restart(self) -> None:
        self._stack.close()
        self._target = self._serve(self.port)

    def close(self) -> None:
        self._stack.close()


def _numbers(said: object, name: str) -> list[int]:
    if isinstance(said, dict):
        own = [value for key, value in said.items() if name in key and isinstance(value, int)]
        return own + [one for value in said.values() for one in _numbers(value, name)]
    if isinstance(said, list):
        return [one for value in said for one in _numbers(value, name)]
    return []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    try:
        Volume.create(made.uris, stripe_bytes=STRIPE).close()
        yield made
    finally:
        made.close()


def test_who_holds_the_gil_is_alive_and_who_is_stopped_is_not(world: World) -> None:
    with running(WRITER, *world.uris) as writer, world.open() as volume:
        writer.tell("hold")
        assert writer.hear() == "holding"
        with pytest.raises(WriterActive, match="its heart beats"):
            volume.session("other", takeover="if-dead", heartbeat_s=BEAT)
        assert writer.hear() == "held"
        writer.signal(signal.SIGSTOP)
        began = time.monotonic()
        with volume.session("other", takeover="if-dead", heartbeat_s=BEAT):
            assert time.monotonic() - began >= 4 * BEAT
        writer.signal(signal.SIGCONT)


@pytest.mark.parametrize("late", ["commit", "put"])
def test_a_stopped_writer_wakes_up_after_a_takeover(world: World, late: str) -> None:
    refused = zombies.is_stopped(world, late)
    assert refused.conflicts > 0 and refused.fenced == 0, refused


def test_a_writer_that_stands_between_r2t_and_its_data(world: World) -> None:
    """Whoever takes over waits for none of it: the target gives the command up, says that it drained, and what comes
    late reaches no medium."""
    refused = zombies.stands_between_r2t_and_data(world, lives=True)
    assert refused.conflicts > 0 and refused.fenced == 0, refused


def test_a_taker_that_registers_late_does_not_write(world: World) -> None:
    zombies.registers_late(world)


def test_a_rank_that_writes_after_the_end_of_its_session(world: World) -> None:
    refused = zombies.writes_after_the_end(world)
    assert refused.conflicts > 0 and refused.fenced == 0, refused


@pytest.mark.parametrize("taken", ["before", "after"])
def test_the_target_is_restarted_under_a_zombie(world: World, taken: str) -> None:
    refused = zombies.is_stopped_while_the_target_restarts(world, taken)
    assert refused.conflicts == 0 and refused.fenced > 0, refused


def test_files_are_locked_by_their_writer(tmp_path: Path) -> None:
    uris = [f"file:{tmp_path / name}?create=16MiB" for name in "ab"]
    with Volume.create(uris, stripe_bytes=STRIPE) as volume:
        uris = volume.uris
    with running(WRITER, *uris) as writer, Volume.open(uris, write=True) as volume:
        writer.signal(signal.SIGSTOP)
        with pytest.raises(WriterActive, match="only stopped"):
            volume.session("run", heartbeat_s=BEAT)
        writer.signal(signal.SIGKILL)
        writer.end()
        with volume.session("run", heartbeat_s=BEAT) as session:
            assert session.fence == "machine" == volume.info().fence
