"""What befalls storage and clocks while a job saves: no room, silence, a crawl, damage, a wall clock that jumps. One
error that says what, or none; the steps that were committed before it are there, to the bit."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.accidents.relay import Relay
from headrace.checkpoint import list_checkpoints
from headrace.errors import ChecksumMismatch, DeviceError, HeadraceError, WriterActive
from headrace.testing.serve import ServeProcess, serving
from headrace.torch import Checkpointer, VolumeReader, VolumeWriter, WriterOptions
from headrace.units import MIB
from headrace.volume import Volume
from tests.stopping import stop, stopped

NQN = "nqn.2026-01.io.headrace:trouble"
ELEMENTS = 300_000


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ServeProcess]:
    with serving(NQN, *(f"{tmp_path / name}.img:64MiB" for name in "ab")) as target:
        Volume.create([target.uri(nsid) for nsid in (1, 2)]).close()
        yield target


def uris_of(target: ServeProcess, **options: object) -> list[str]:
    return [target.uri(nsid, **options) for nsid in (1, 2)]


def state(step: int, elements: int = ELEMENTS) -> dict[str, Any]:
    return {"w": torch.arange(elements, dtype=torch.float32) + step, "step": step}


def check(uris: list[str], steps: dict[int, int]) -> None:
    """These steps are there, of so many elements, and no other."""
    with Volume.open(uris) as volume:
        assert [each.step for each in list_checkpoints(volume, "run")] == sorted(steps)
        for step, elements in steps.items():
            found = {"w": torch.zeros(elements), "step": -1}
            VolumeReader(volume, f"run/step-{step}").load(found)
            assert torch.equal(found["w"], state(step, elements)["w"]) and found["step"] == step


def test_a_disk_below_the_target_is_full_in_the_middle_of_a_save(target: ServeProcess) -> None:
    """Its files may not become longer: the same answer as from a full disk."""

    def room(size: int) -> None:
        resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    uris = uris_of(target)
    with VolumeWriter(uris, "run") as writer:
        writer.save(state(1), "run/step-1")
        room(8 * MIB)
        with pytest.raises(DeviceError, match="Capacity Exceeded"):
            writer.async_save(state(2, 10_000_000), "run/step-2").result()
        check(uris, {1: ELEMENTS})
        room(resource.RLIM_INFINITY)
        # The same writer goes on.
        writer.save(state(3, 10_000_000), "run/step-3")
    check(uris, {1: ELEMENTS, 3: 10_000_000})


def test_a_target_that_is_silent_for_longer_than_it_may(target: ServeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    uris, silent = uris_of(target), []
    with VolumeWriter(uris, "run") as writer:
        writer.save(state(1), "run/step-1")
    write = Volume.write_grant

    def write_to_nobody(*arguments: Any) -> Any:
        stop(target.process.pid)
        silent.append(True)
        return write(*arguments)

    monkeypatch.setattr(Volume, "write_grant", write_to_nobody)
    try:
        # So little patience that it may end before it gets there, on a machine that stands still.
        while not silent:
            with (
                pytest.raises(HeadraceError) as caught,
                VolumeWriter(
                    uris_of(target, io_timeout=1, loss_timeout=1), "run", options=WriterOptions(takeover="if-dead")
                ) as writer,
            ):
                writer.save(state(2), "run/step-2")
        assert f"127.0.0.1:{target.port}" in str(caught.value)
    finally:
        os.kill(target.process.pid, signal.SIGCONT)
    monkeypatch.undo()
    check(uris, {1: ELEMENTS})
    with VolumeWriter(uris, "run", options=WriterOptions(takeover="if-dead")) as writer:
        writer.save(state(3), "run/step-3")
    check(uris, {1: ELEMENTS, 3: ELEMENTS})


def test_a_target_that_stands_still_and_one_that_crawls_hold_up_the_save_and_nobody_else(target: ServeProcess) -> None:
    with Relay(target.port, bytes_per_s=4e6) as relay:
        uris = [uri.replace(f":{target.port}/", f":{relay.port}/") for uri in uris_of(target)]
        with VolumeWriter(uris, "run") as writer:
            # Through the relay, at a hundredth of what a loopback carries at the least.
            assert writer.save(state(1), "run/step-1").rewritten_bytes == 0
            training = state(2)
            with stopped(target.process.pid):
                future = writer.async_save(training, "run/step-2")
                training["w"].zero_()
                assert not future.done()
            assert future.result().rewritten_bytes == 0
    check(uris_of(target), {1: ELEMENTS, 2: ELEMENTS})


class Clock:
    """The wall clock goes a day forward, two back, to a year from now, as often as somebody looks at it."""

    def __init__(self) -> None:
        self.looks = 0
        self._jumps = itertools.cycle((86_400, -86_400, 0, 365 * 86_400))
        self._now = time.time_ns

    def time_ns(self) -> int:
        self.looks += 1
        return self._now() + next(self._jumps) * 10**9

    def time(self) -> float:
        return self.time_ns() / 1e9


def test_nothing_depends_on_the_wall_clock(target: ServeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, what is kept, which one is the latest, who is dead, and when a save is due."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock.time)
    monkeypatch.setattr(time, "time_ns", clock.time_ns)
    # A dead predecessor is found dead, and one that lives is not.
    monkeypatch.setitem(Volume.session.__kwdefaults__, "heartbeat_s", 0.2)
    uris, model = uris_of(target), torch.nn.Linear(300, 300)
    volume = Volume.open(uris, write=True)
    volume.session("run")._beat.halt()
    with Checkpointer(uris, "run", interval="auto", mtbf_s=1e9, options=WriterOptions(keep_last=2)) as checkpointer:
        assert checkpointer.restore("latest", model) is None
        for step in range(1, 5):
            assert checkpointer.due(step) == (step == 1), "the first is due at once, the next one hours later"
            model.weight.data.fill_(step)
            checkpointer.save(step, model)
        checkpointer.wait()
        with Volume.open(uris, write=True) as other, pytest.raises(WriterActive, match="its heart beats"):
            other.session("other", takeover="if-dead", missed_beats=30)
        model.weight.data.zero_()
        assert checkpointer.restore("latest", model) == 4 and bool((model.weight == 4).all())
        certificate = checkpointer.certificate
        assert certificate is not None and 0 < certificate.restore_s < certificate.process_to_restored_s
    with suppress(HeadraceError):
        volume.close()
    assert clock.looks > 10
    with Volume.open(uris) as volume:
        assert [each.step for each in list_checkpoints(volume, "run")] == [3, 4]


def test_a_bit_flipped_in_any_tensor_is_named_and_the_step_before_it_is_whole(tmp_path: Path) -> None:
    paths = [tmp_path / f"member{i}" for i in range(2)]
    uris = [f"file:{path}" for path in paths]
    Volume.create([f"{uri}?create=32MiB" for uri in uris]).close()
    # In the middle of a tensor of so many bytes nothing else shares its checksum block.
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer(uris, "run") as checkpointer:
        for step in (1, 2):
            model(torch.randn(3, 200)).sum().backward()
            optimizer.step()
            for moments in optimizer.state.values():
                moments["exp_avg"].normal_(), moments["exp_avg_sq"].uniform_()
            checkpointer.save(step, model, optimizer)
            if step == 1:
                before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": tensor for tensor, name in names.items()}
    for parameter, moments in optimizer.state.items():
        tensors |= {f"optimizer.state.{names[parameter]}.{key}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
    assert len(tensors) == 12
    # A restore changes them: where each lies is looked up first.
    media = [(path, path.read_bytes()) for path in paths]
    places = {name: _middle(media, tensor.detach().numpy().tobytes()) for name, tensor in tensors.items()}
    with Checkpointer(uris, "run") as checkpointer:
        for name, (path, at, byte) in places.items():
            _put(path, at, byte ^ 0x10)
            # What shares a checksum block is as suspect: of a small one, its neighbour may be named.
            named = f"'{name}'" if "weight" in name else "(tensor|item) '"
            with pytest.raises(ChecksumMismatch, match=named.replace(".", r"\.")):
                checkpointer.restore("latest", model, optimizer)
            assert checkpointer.restore("latest", model, optimizer, on_damage="previous") == 1, name
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key]), (name, key)
            _put(path, at, byte)
        assert checkpointer.restore("latest", model, optimizer) == 2


def _middle(media: list[tuple[Path, bytes]], pattern: bytes) -> tuple[Path, int, int]:
    """The one place where these bytes lie: the file, where their middle is in it, and the byte there."""
    [(path, at, data)] = [(path, data.find(pattern), data) for path, data in media if pattern in data]
    at += len(pattern) // 2
    return path, at, data[at]


def _put(path: Path, at: int, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))
