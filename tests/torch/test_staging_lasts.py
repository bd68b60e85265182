"""The copy behind an asynchronous save: made once, kept, whatever torch does to the stager it was handed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager

from headrace.errors import CheckpointFailed
from headrace.torch.save.skeleton import Survey
from headrace.torch.save.stager import Arena, Copy, Stager, find_copy
from headrace.torch.save.staging import Staging, lay_out
from tests.torch.states import awkward_state, leaves


class _Plain:
    """An object that is copied by its parts, its class among them."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.kind = type(self)


@pytest.fixture(params=["as torch is", "as torch 2.11 is"])
def stager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stager]:
    if request.param == "as torch 2.11 is":
        kept = DefaultStager._stage

        def once(self: DefaultStager, *arguments: Any, **options: Any) -> Any:
            staged = kept(self, *arguments, **options)
            self._state_dict_stager.close()
            return staged

        monkeypatch.setattr(DefaultStager, "_stage", once)
    stager = Stager(limit_s=20)
    yield stager
    stager.release()


def test_a_stager_that_was_closed_after_a_save_serves_the_next_from_the_same_memory(stager: Stager) -> None:
    weight = torch.zeros(1000)
    addresses = set()
    for step in range(3):
        weight.fill_(step)
        copy = stager.stage({"weight": weight, "plain": _Plain(step)})
        stager.close()
        weight.fill_(-1)
        assert isinstance(copy, dict)
        assert torch.equal(copy["weight"], torch.full((1000,), float(step)))
        assert (copy["plain"].step, copy["plain"].kind) == (step, _Plain)
        addresses.add(copy["weight"].data_ptr())
        # As DCP does when the save has ended, well or not.
        del copy
    assert len(addresses) == 1


def test_every_tensor_is_copied_as_it_is_and_shared_memory_once() -> None:
    stager = Stager()
    state = awkward_state()
    before = leaves(state)
    copy = stager.stage(state)
    for tensor in state["model"].values():
        if tensor.numel() and not tensor.is_conj() and tensor.is_contiguous():
            tensor.view(torch.uint8).fill_(0xFF) if tensor.dim() else tensor.fill_(-1)
    state["optimizer"]["steps"][0].fill_(99)
    state["optimizer"]["lr"] = 9
    assert leaves(copy) == before
    model = copy["model"]
    weight = model["weight"].data_ptr()
    assert model["tied"].data_ptr() == weight
    assert model["rows"].data_ptr() == weight + 10 * 300 * 4
    # The copy takes what the tensors take, those that share memory once: besides gaps, no more.
    distinct = 700 * 300 * 4 * 2 + 700 * 4 + 100_003 * 4 + 700 * 300 * 2 + 3 * 300 + 72 + 4 + 5000 * 4 + 72 + 16
    assert distinct <= stager.describe()["bytes"] <= distinct + 64 * 20
    found = find_copy(model["rows"])
    assert found is not None and found[0] is copy.copy
    stager.release()
    assert find_copy(model["rows"]) is None


def test_what_was_there_before_is_not_in_the_gaps() -> None:
    stager = Stager()
    stager.stage({"a": torch.full((500,), 255, dtype=torch.uint8)})
    copy = stager.stage({name: torch.zeros(1, dtype=torch.uint8) for name in "abcdefg"})
    assert not copy.copy.memory.any()
    stager.release()


def test_the_next_copy_waits_until_nobody_reads_the_one_before() -> None:
    stager = Stager(limit_s=0.05)
    first = stager.stage({"a": torch.zeros(10)})
    with pytest.raises(CheckpointFailed, match="did not end"):
        stager.stage({"a": torch.ones(10)})
    # Taken by a thread that ended without a word, as a save that failed early does; its exception may keep the state.
    thread = threading.Thread(target=first.copy.taken)
    thread.start()
    thread.join()
    second = stager.stage({"a": torch.ones(10)})
    # Let go by the thread that saves it, which lives on, for its commit.
    hold, taken = threading.Event(), threading.Event()

    def save() -> None:
        second.copy.taken()
        second.copy.let_go()
        taken.set()
        hold.wait(20)

    thread = threading.Thread(target=save)
    thread.start()
    assert taken.wait(20)
    third = stager.stage({"a": torch.full((10,), 2.0)})
    hold.set()
    thread.join()
    # Nobody knows it any more; the thread that checksums it knew it, too.
    third.copy.complete()
    del third
    gc.collect()
    stager.stage({"a": torch.zeros(10)})
    stager.release()


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("bad", [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), freed()])
def test_what_has_no_bytes_is_refused_by_name(bad: torch.Tensor) -> None:
    with pytest.raises(CheckpointFailed, match=r"'model\.odd' is not a dense tensor"):
        Stager().stage({"model": {"odd": bad}})
    assert bad.layout != torch.strided or bad.is_meta or not bad.untyped_storage().nbytes(), "it is as it was"


def test_a_synchronous_save_refuses_memory_that_was_let_go() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"odd": freed()}, None, True)
    with pytest.raises(CheckpointFailed, match="'odd' has its memory let go"):
        Staging().gather(lay_out(planner.create_local_plan(), planner), planner, seal="off")


def test_two_storages_of_one_address_are_one_place() -> None:
    long = torch.arange(100.0)
    short = torch.from_numpy(long.numpy()[:50])
    stager = Stager()
    copy = stager.stage({"short": short, "long": long[25:]})
    assert torch.equal(copy["short"], short) and torch.equal(copy["long"], long[25:])
    stager.release()


def test_another_writer_may_stage_while_a_save_looks_for_its_copy() -> None:
    made: list[Copy] = []

    class Meanwhile(Copy):
        """As the other writer's thread would, when it happens to run between two looks."""

        @property
        def valid(self) -> bool:
            made.append(Copy(torch.zeros(16, dtype=torch.uint8), [], {}))
            return True

        @valid.setter
        def valid(self, value: bool) -> None:
            pass

    others = [Meanwhile(torch.zeros(16, dtype=torch.uint8), [], {}) for _ in range(3)]
    assert find_copy(torch.zeros(10)) is None
    assert len(made) >= len(others)


def test_who_waits_for_a_copy_that_failed_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no more")

    stager = Stager()
    with monkeypatch.context() as patched:
        patched.setattr(Survey, "copy_into", fail)
        with pytest.raises(MemoryError):
            stager.stage({"a": torch.zeros(10)})
    waiting = threading.Thread(target=stager.synchronize_staging, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert stager.stage({"a": torch.ones(10)})["a"][0] == 1
    stager.release()


class Arriving(torch.Tensor):
    """Like torch's `AsyncCollectiveTensor`: what it wraps has its content when it was waited for, and not before."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, elem.size(), dtype=elem.dtype)  # type: ignore[attr-defined]
        made.elem = elem
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return Arriving(inner["elem"])

    def trigger_wait(self) -> torch.Tensor:
        return self.elem.fill_(5.0)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def test_what_a_collective_is_under_way_into_is_waited_for() -> None:
    assert callable(AsyncCollectiveTensor.trigger_wait) and AsyncCollectiveTensor.__tensor_flatten__
    stager = Stager()
    copy = stager.stage({"sum": Arriving(torch.zeros(10))})
    assert torch.equal(copy["sum"], torch.full((10,), 5.0))
    stager.release()


def test_a_failed_registration_is_not_left_to_the_next_kernel_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gives the error of a call that failed to whoever asks next, which the launch of a kernel does."""

    class Cuda:
        last = 0

        def cudaHostRegister(self, *_: int) -> int:
            self.last = 2
            return self.last

        def fill_(self, _: int) -> None:
            last, self.last = self.last, 0
            if last:
                raise RuntimeError("CUDA error: out of memory")

    cuda, empty = Cuda(), torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: cuda if k.get("device") == "cuda" else empty(*a, **k))
    arena = Arena(1000, shared=False)
    assert arena.not_pinned == "cudaHostRegister failed with 2"
    cuda.fill_(1)


class Accelerators:
    """Two devices, as far as copies from them are told apart: which stream each runs on, and what is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.current: str = "no stream"
        accelerators = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = f"ours on {device}"

            def wait_event(self, event: Any) -> None:
                accelerators.done.append(f"{self.name} waits for {event.name}")

            def record_event(self) -> Any:
                return Event(self.name)

            def __enter__(self) -> None:
                accelerators.current = self.name

            def __exit__(self, *_: object) -> None:
                accelerators.current = "no stream"

        class Event:
            def __init__(self, name: str) -> None:
                self.name = name

            def synchronize(self) -> None:
                accelerators.done.append(f"host waits for {self.name}")

        class Current(Stream):
            def __init__(self, device: torch.device) -> None:
                self.name = f"current on {device}"

        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch.accelerator, "current_stream", Current)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda d=None: self.done.append(f"host waits for {d}"))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def test_copies_from_several_accelerators_are_each_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream orders and ends what is on its own device, and no other: the rest would be read before it has come."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensors = [torch.empty(10, device=device) for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1")]
    accelerators = Accelerators(monkeypatch)
    ran: list[str] = []

    class Fixed:
        """What `Survey` found."""

        total_bytes, views, skeleton, layout, sources = 0, (), (), (), tensors

        def zero_gaps(self, memory: torch.Tensor) -> None:
            pass

        def copy_into(self, memory: torch.Tensor, device: torch.device, *, non_blocking: bool) -> None:
            ran.extend(f"{s.device} on {accelerators.current}" for s in self.sources if s.device == device)

    monkeypatch.setattr("headrace.torch.save.stager.Survey", lambda _: Fixed())
    monkeypatch.setattr("headrace.torch.save.stager.build", lambda *_: {})
    stager = Stager()
    stager.stage({}).result(20)
    assert stager.copy is not None
    stager.copy.complete()
    assert ran == [f"cuda:{n} on ours on cuda:{n}" for n in (0, 0, 1, 1)]
    for kind in ("ours on cuda:{0} waits for current on cuda:{0}", "host waits for ours on cuda:{0}"):
        assert {kind.format(n) for n in (0, 1)} <= set(accelerators.done)
    stager.release()


def test_a_synchronous_save_waits_for_each_accelerator_that_it_copies_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = {f"on {device}": torch.empty(10, device=device) for device in ("cuda:0", "cuda:1")}
    accelerators = Accelerators(monkeypatch)
    monkeypatch.setattr("headrace.torch.save.staging._copy", lambda *_: True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    Staging().gather(lay_out(planner.create_local_plan(), planner), planner, seal="off")
    assert sorted(accelerators.done) == ["host waits for cuda:0", "host waits for cuda:1"]
