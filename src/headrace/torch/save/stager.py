"""`Stager`: the one host copy that an asynchronous save is made from.

    stage(state)                 on the trainer's thread: waits until nobody reads the copy before, and copies
      host memory                copied when it returns
      accelerators               begun when it returns, on a stream of the stager's own for each, behind what the
                                 current stream there has been given so far; `synchronize_staging()`, before the
                                 parameters change
    a thread behind it           checksums the copy, place by place
    the writer                   writes straight from the copy, and compares

The memory is kept for the next save, since fresh pages cost more than the copy into them: as much as the rank's state,
pinned where there is CUDA, made by `prepare` or at first use. A save that DCP hands to its checkpoint process takes
the copy along in shared memory: one file descriptor, whatever the number of tensors.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from headrace.device import crc32c
from headrace.errors import CheckpointFailed
from headrace.torch.save.pacing import Rhythm
from headrace.torch.save.skeleton import Survey, View, build

_PAGE = 4096
_SEE_DEVICE = "does the accelerator still work? The copy waits for what its stream was given before"


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Host memory that the saves of one rank take, beyond the model's own."""

    #: The rank's tensors, memory that several share counted once.
    state_bytes: int
    #: Of the copy that asynchronous saves are made from, kept between them.
    copy_bytes: int
    #: The most that a save takes besides, while it writes.
    writing_bytes: int
    #: The copy is page-locked, for copies from accelerators.
    pinned: bool

    @property
    def total_bytes(self) -> int:
        return self.copy_bytes + self.writing_bytes


class Arena:
    """Host memory, page-aligned, kept until `release`."""

    def __init__(self, length: int, *, shared: bool) -> None:
        self.length = length
        if shared:
            storage = torch.UntypedStorage._new_shared(length + _PAGE)  # type: ignore[no-untyped-call]
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (length + _PAGE,), (1,))
        else:
            # Not by `pin_memory=`: that allocator rounds up to a power of two.
            whole = torch.empty(length + _PAGE, dtype=torch.uint8)
        skip = -whole.data_ptr() % _PAGE
        #: uint8[length]
        self.memory = whole[skip : skip + length]
        #: Why it is not page-locked; empty where it is.
        self.not_pinned = self._pin()

    def _pin(self) -> str:
        if not torch.cuda.is_available():
            return "no CUDA"
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(self.memory.data_ptr(), max(self.length, 1), 0))
        if not status:
            return ""
        _forget_last_error()
        return f"cudaHostRegister failed with {status}"

    def unpin(self) -> None:
        if not self.not_pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.memory.data_ptr())
            self.not_pinned = "let go"

    @property
    def shared(self) -> bool:
        return bool(self.memory.is_shared())  # type: ignore[no-untyped-call]


def _forget_last_error() -> None:
    """CUDA keeps the error of a call that failed, and the next kernel that anybody launches raises it: so that is one
    of ours. (The runtime that torch hands out has no `cudaGetLastError`.)"""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(1)


class Copy:
    """One staged state. The memory is the next one's when this has ended.

    Args:
        memory: uint8[n], of `arena` where this process made it.
    """

    def __init__(self, memory: torch.Tensor, views: list[View], skeleton: Any, arena: Arena | None = None) -> None:
        self.memory = memory
        self.views = views
        self.skeleton = skeleton
        self.arena = arena
        #: CRC32C of each view that was checksummed, by where it lies and how long it is.
        self.seals: dict[tuple[int, int], int] = {}
        #: The memory still has these bytes.
        self.valid = True
        #: Copied, or failed.
        self.copied = threading.Event()
        self.released = threading.Event()
        #: Somebody waits for the save that is made from it.
        self.hurry = threading.Event()
        self._made_by = threading.current_thread()
        self._owner: threading.Thread | None = None
        self._handle: weakref.ref[StagedState] | None = None
        self._behind: threading.Thread | None = None
        self._failed: BaseException | None = None
        with _copies_lock:
            _copies.add(self)

    # ---- its content ----

    def state(self) -> StagedState:
        state = StagedState(build(self.skeleton, self.views, self.memory))
        state.copy = self
        self._handle = weakref.ref(state)
        return state

    def begin(self, events: Sequence[Any], future: Future[Any], state: StagedState, *, seal: bool) -> None:
        """On a thread of its own: wait for the accelerators that there is an event of, then checksum."""

        def behind() -> None:
            try:
                for event in events:
                    event.synchronize()
                self.copied.set()
                future.set_result(state)
                if seal:
                    self.seal()
            except BaseException as error:
                self._failed = error
                self.copied.set()
                if not future.done():
                    future.set_exception(error)

        self._behind = threading.Thread(target=behind, name="headrace-stage", daemon=True)
        self._behind.start()

    def seal(self) -> None:
        memory = self.memory.numpy()
        for view in self.views:
            place = view.offset, view.length
            if view.length and place not in self.seals:
                self.seals[place] = crc32c(memory[view.offset : view.offset + view.length])

    def join(self) -> None:
        """Until nothing works on it any more."""
        if self._behind is not None:
            self._behind.join()

    def complete(self) -> None:
        """Wait until it is copied and checksummed."""
        self.join()
        if self._failed is not None:
            raise CheckpointFailed(
                "the state could not be copied", found=f"{type(self._failed).__name__}: {self._failed}"
            ) from self._failed

    # ---- who reads it ----

    def taken(self) -> None:
        """The calling thread saves it, and reads it at most for as long as it lives."""
        if self._owner is None and threading.current_thread() is not self._made_by:
            self._owner = threading.current_thread()

    def let_go(self) -> None:
        """The calling thread, if it is the one that saves it, needs it no more: its bytes are durable, or it failed."""
        if self._owner is threading.current_thread():
            self.released.set()

    def ended(self) -> bool:
        if self.released.is_set() or self._handle is None or self._handle() is None:
            return True
        return self._owner is not None and not self._owner.is_alive()


_copies: weakref.WeakSet[Copy] = weakref.WeakSet()
#: Writers of one process stage and save in threads of their own: a set that grows is not to be gone through.
_copies_lock = threading.Lock()


def find_copy(tensor: torch.Tensor) -> tuple[Copy, int] | None:
    """The copy in whose memory the bytes of a contiguous host tensor lie, and where in it."""
    start = tensor.data_ptr()
    with _copies_lock:
        copies = list(_copies)
    for copy in copies:
        at = start - copy.memory.data_ptr()
        if copy.valid and 0 <= at <= copy.memory.numel() - tensor.nbytes:
            return copy, at
    return None


class StagedState(dict[str, Any]):
    """The state dict that DCP saves from. Pickles as its memory and a description of it."""

    copy: Copy  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        copy = self.copy
        copy.taken()
        copy.complete()
        if copy.arena is not None and not copy.arena.shared:
            # It moves to shared memory now, from where it is page-locked.
            copy.arena.unpin()
        return _arrive, (copy.memory, copy.views, copy.skeleton, copy.seals)


def _arrive(memory: torch.Tensor, views: list[View], skeleton: Any, seals: dict[tuple[int, int], int]) -> StagedState:
    copy = Copy(memory, views, skeleton)
    copy.seals = seals
    return copy.state()


class Stager(AsyncStager):
    """See the module text. Also as `async_stager` of `dcp.async_save`; ended by `release` alone, whatever torch closes.

    Args:
        limit_s: seconds that `stage` waits for the save before; CheckpointFailed then.
        shared: the copy lies in shared memory from the beginning, for saves from DCP's checkpoint process. It moves
            there by itself at the first such save, which takes the memory twice for a moment.
        seal: "behind" the copy, in the "copy" (before `stage` returns), or "off".
    """

    def __init__(self, *, limit_s: float = 1800.0, shared: bool = False, seal: str = "behind") -> None:
        self._limit_s = limit_s
        self._shared = shared
        self._seal = seal
        self._arena: Arena | None = None
        self._layout: object = None
        self._copy: Copy | None = None
        self._streams: dict[torch.device, Any] = {}
        #: When copies are made, and the next one is due.
        self.rhythm = Rhythm()
        #: In how many seconds from its beginning the save behind the next copy is due, where somebody knows.
        self.next_s: float | None = None

    # ---- torch's protocol ----

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """Copy; the copied state, or where accelerators are involved a future of it. CheckpointFailed."""
        self.wait_until_free()
        self.rhythm.begin(self.next_s)
        self.next_s = None
        survey = Survey(state_dict)
        arena = self._reserve(survey)
        copy = self._copy = Copy(arena.memory[: survey.total_bytes], survey.views, survey.skeleton, arena)
        events: list[Any] = []
        try:
            with torch.no_grad():
                for device in dict.fromkeys(source.device for source in survey.sources):
                    if device.type != "cpu":
                        events.append(self._accelerated(survey, copy, device))
                # Meanwhile.
                survey.copy_into(copy.memory, torch.device("cpu"), non_blocking=False)
                if not events:
                    copy.copied.set()
        except BaseException:
            # Who waits for the copy waits for none.
            copy.copied.set()
            raise
        state = copy.state()
        future: Future[Any] = Future()
        if events:
            copy.begin(events, future, state, seal=self._seal != "off")
            return future
        if self._seal == "copy":
            copy.seal()
        elif self._seal == "behind":
            copy.begin([], future, state, seal=True)
        return state

    def synchronize_staging(self) -> None:
        """Wait until the state is copied: it may change from then on."""
        if self._copy is not None and not self._copy.copied.wait(self._limit_s):
            raise CheckpointFailed(f"the state was not copied within {self._limit_s:.0f} s", next_step=_SEE_DEVICE)

    def close(self) -> None:
        """Nothing: see `release`."""

    # ---- ours ----

    @property
    def copy(self) -> Copy | None:
        """What was staged last, until its memory is needed again."""
        return self._copy

    def prepare(self, state_dict: dict[str, Any]) -> int:
        """Make the memory of the copy, page by page, so that the first save is as fast as the others; its bytes."""
        survey = Survey(state_dict)
        self.wait_until_free()
        self._reserve(survey).memory.zero_()
        return survey.total_bytes

    def wait_until_free(self) -> None:
        """Until nobody reads the copy before any more."""
        end = time.monotonic() + self._limit_s
        if self._copy is not None:
            self._copy.hurry.set()
        while self._copy is not None:
            if self._copy.ended():
                self._copy.join()
                self._copy.valid = False
                self._copy = None
            elif time.monotonic() > end:
                raise CheckpointFailed(f"the save before this one did not end within {self._limit_s:.0f} s")
            else:
                self._copy.released.wait(0.02)

    def release(self) -> None:
        """Give the memory back."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.join()
            copy.valid = False
        if self._arena is not None:
            self._arena.unpin()
        self._arena = None
        self._layout = None

    def describe(self) -> dict[str, Any]:
        """What the copy lies in: bytes, and why it is not page-locked where it is not."""
        # Once: the thread of a save asks, while that of the trainer may take another one.
        arena = self._arena
        if arena is None:
            return {"bytes": 0}
        return {
            "bytes": arena.length,
            "pinned": not arena.not_pinned,
            "why_not_pinned": arena.not_pinned,
            "shared": arena.shared,
        }

    def _reserve(self, survey: Survey) -> Arena:
        if self._arena is None or self._arena.length < survey.total_bytes:
            # Free the old one first: two at a time would double the peak.
            if self._arena is not None:
                self._arena.unpin()
            self._arena = None
            self._arena = Arena(survey.total_bytes, shared=self._shared)
            self._layout = None
        if self._layout != survey.layout:
            # What was there before belongs to nobody else's checkpoint.
            survey.zero_gaps(self._arena.memory)
            self._layout = survey.layout
        return self._arena

    def _accelerated(self, survey: Survey, copy: Copy, device: torch.device) -> Any:
        """The copy from this device, begun on a stream of the stager's own there; the event behind it."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        stream.wait_event(torch.accelerator.current_stream(device).record_event())
        with stream:
            survey.copy_into(copy.memory, device, non_blocking=True)
        for source in survey.sources:
            if source.device == device:
                # The memory is not handed out again before the copy has read it.
                source.record_stream(stream)
        return stream.record_event()
