"""Faults put into real loops one at a time, and what `headrace watch explain` says of them.

    python -m tests.measure.faults --rounds 20 [--only "a frozen path"]      # the long grid: a table of what was said

The loops are real: ranks with a `Watch` and a `BlackBox` each; records are read over NVMe/TCP from one target by two
paths, blocks of another target in every step, and saves go there, all through relays. Ranks are threads, and their
collective is a barrier. Each fault lasts a large part of a second, in a loop whose steps take some milliseconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.accidents.relay import Relay
from headrace.dataset import RecordFeed, RecordFeedOptions, Records
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.device import open_device
from headrace.measure import Watch
from headrace.measure.blackbox import BlackBox
from headrace.measure.blackbox.evidence import gather
from headrace.measure.blackbox.explain import explain
from headrace.measure.blackbox.explanation import Explanation
from headrace.measure.blackbox.tell import sentence
from headrace.measure.watch.host import IO_THREAD, own_queue
from headrace.testing.serve import serving
from headrace.volume import Volume

NQN = "nqn.2026-01.io.headrace:test-explain"
RECORD_BYTES = 64 << 10
BLOCK_BYTES = 16 << 10
#: How long a fault lasts; and how long of it CPUs are to be lacking.
FAULT_S, STARVED_S = 0.6, 0.5
#: The step of the fault; those behind it.
AT, AFTER = 10, 3


def burn(cpu_s: float) -> None:
    """Of this thread, whatever else the machine does."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


class Batches:
    """What `RecordLoader` is, without PyTorch. `slow_s`: of CPU that decoding the next record takes."""

    def __init__(self, volume: Volume, prefetch: int) -> None:
        self.slow_s = 0.0
        options = RecordFeedOptions(global_batch=4, prefetch=prefetch, seed=1)
        self.feed = RecordFeed({"a": Records.open(volume, "a")}, options, decode=self._decode)
        self.devices = self.feed.devices

    def _decode(self, record: Any) -> int:
        seconds, self.slow_s = self.slow_s, 0.0
        burn(seconds)
        return len(record)

    @property
    def waited(self) -> tuple[float, float, int]:
        return self.feed.waited

    def __iter__(self) -> Iterator[Any]:
        while (batch := self.feed.acquire()) is not None:
            yield batch.items


class Rig:
    """Targets, relays before them, and processes that want CPUs."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        records = folder / "records"
        records.mkdir(parents=True)
        for number in range(64):
            (records / f"{number:03}.bin").write_bytes(number.to_bytes(4, "little") * (RECORD_BYTES // 4))
        try:
            other = ["--subsystem", f"{NQN}-b=mem:24MiB"]
            target = self._stack.enter_context(serving(f"{NQN}-a", "mem:24MiB", options=other))
            #: By which all goes: two paths of the first target, one of the second; and what the other rank has in
            #: place of the second path.
            self.relays = [self._stack.enter_context(Relay(target.port)) for _ in range(4)]
            with Volume.create([target.uri()]) as volume, volume.session(run_id="test") as session:
                ingest_records(open_records(records), session, "a")
            code = f"import os\nwhile os.getppid() == {os.getpid()}:\n  for _ in range(100000): pass"
            cores = len(os.sched_getaffinity(0))
            self._hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3 * cores)]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._stack.close()
            raise

    def a(self, hit: bool) -> str:
        """Of the rank that the fault hits, or of the other one."""
        ways = (0, 1) if hit else (0, 3)
        return f"nvme+tcp://{','.join(f'127.0.0.1:{self.relays[way].port}' for way in ways)}/{NQN}-a?nsid=1"

    @property
    def b(self) -> str:
        return f"nvme+tcp://127.0.0.1:{self.relays[2].port}/{NQN}-b?nsid=1"

    def close(self) -> None:
        for hog in self._hogs:
            hog.kill()
            hog.wait()
        for relay in self.relays:
            relay.release()
        self._stack.close()

    def _signal(self, which: signal.Signals) -> None:
        for hog in self._hogs:
            hog.send_signal(which)

    def freeze(self, *which: int) -> None:
        """Nothing goes by these relays for a while."""
        for number in which:
            self.relays[number].hold_now()
        _later(FAULT_S, lambda: [self.relays[number].release() for number in which])

    def slow(self, *which: int) -> None:
        """These relays are slow for a while: a batch takes as long."""
        for number in which:
            self.relays[number].limit(4 * RECORD_BYTES / FAULT_S / len(which))
        _later(2 * FAULT_S, lambda: [self.relays[number].limit(None) for number in which])

    def starve_io(self) -> None:
        """The thread that takes answers gets no CPU for a while. Root may give it back what it had."""
        names = {int(path.parent.name): path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
        (thread,) = [number for number, name in names.items() if name == IO_THREAD]
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        self._signal(signal.SIGCONT)

        def give_back() -> None:
            self._signal(signal.SIGSTOP)
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

        _later(2 * FAULT_S, give_back)

    def starve(self) -> None:
        """This thread works, and lacks CPUs."""
        queue = own_queue()
        assert queue is not None, "this kernel does not tell how long threads wait for CPUs"
        begun, deadline = queue.read()[1], time.monotonic() + 20
        self._signal(signal.SIGCONT)
        try:
            while queue.read()[1] - begun < STARVED_S and time.monotonic() < deadline:
                burn(0.005)
        finally:
            self._signal(signal.SIGSTOP)
            queue.close()


def _later(seconds: float, do: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`before`: at the end of the step before; the others in the step, in a part of it. `waited`: in the step that has
    waited for its batch for long. All of the last rank only, but `collective`."""

    name: str
    #: Causes that it may be told as, the first of all; and whether that is storage.
    causes: tuple[str, ...]
    storage: tuple[str, ...] = ("no",)
    ranks: int = 1
    prefetch: int = 2
    #: Numbers of relays of which one is to be named.
    paths: tuple[int, ...] = ()
    scopes: tuple[str, ...] = ()
    #: What is told besides.
    besides: tuple[str, ...] = ()
    unwaited: bool = False
    before: Callable[[Rig], None] | None = None
    compute: Callable[[Rig], None] | None = None
    waited: Callable[[Rig], None] | None = None
    decode_s: float = 0.0
    collective: Callable[[Rig], None] | None = None
    checkpoint: Callable[[Rig], None] | None = None


def _sleep(_: Rig) -> None:
    time.sleep(FAULT_S)


FAULTS = (
    # The host takes reads back from a path that does not answer, and sends them by the other.
    Fault(name="a frozen path", causes=("fetch",), storage=("yes",), paths=(1,), scopes=("path",), ranks=2,
          before=lambda rig: rig.freeze(1)),
    Fault(name="a frozen target", causes=("fetch",), storage=("yes",), paths=(0, 1), scopes=("target",),
          before=lambda rig: rig.freeze(0, 1)),
    Fault(name="a slow target", causes=("fetch",), storage=("yes",), paths=(0, 1), scopes=("target",),
          before=lambda rig: rig.slow(0, 1)),
    Fault(name="a frozen network", causes=("fetch",), storage=("yes",), paths=(0, 1, 2), scopes=("node",),
          before=lambda rig: rig.freeze(0, 1, 2)),
    Fault(name="slow decoding", causes=("preparation", "starved"), decode_s=FAULT_S),
    Fault(name="a slow collective", causes=("collective",), ranks=2, collective=_sleep),
    Fault(name="a straggler", causes=("straggler",), ranks=2, compute=_sleep),
    Fault(name="a save to a frozen target", causes=("checkpoint",), storage=("yes",), paths=(2,),
          checkpoint=lambda rig: rig.freeze(2)),
    Fault(name="a save that packs for long", causes=("checkpoint",), checkpoint=_sleep),
    Fault(name="a lack of CPUs", causes=("starved",), compute=Rig.starve),
    Fault(name="answers that lack a CPU to take them", causes=("starved",), before=Rig.starve_io),
    Fault(name="a frozen target while nobody waits", causes=("compute",), prefetch=4, unwaited=True,
          before=lambda rig: rig.freeze(0, 1), compute=_sleep),
    Fault(name="a frozen target and a lack of CPUs", causes=("fetch", "starved"), storage=("yes", "no"),
          besides=("fetch", "starved"), before=lambda rig: rig.freeze(0, 1), waited=Rig.starve),
)  # fmt: skip


def run(rig: Rig, fault: Fault, folder: Path) -> Explanation:
    """The loop of all ranks with this fault in it, and what is said of their dumps. Where the machine was so busy that
    another step was slower still, or none stands out, the loop is run again."""
    for number in range(4):
        found = _run(rig, fault, folder / str(number))
        if found.stands_out and AT <= found.step <= AT + fault.prefetch + 1:
            break
    return found


def _run(rig: Rig, fault: Fault, folder: Path) -> Explanation:
    barrier = threading.Barrier(fault.ranks)
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            _train(rig, fault, folder, rank, barrier)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    others = [threading.Thread(target=train, args=(rank,)) for rank in range(1, fault.ranks)]
    for thread in others:
        thread.start()
    train(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return explain(gather([folder]))


def _train(rig: Rig, fault: Fault, folder: Path, rank: int, barrier: threading.Barrier) -> None:
    hit = rank == fault.ranks - 1
    block = np.zeros(BLOCK_BYTES, np.uint8)
    with (
        Volume.open(rig.a(hit)) as volume,
        open_device(rig.b) as device,
        Watch(folder, rank=rank, world=fault.ranks, device=None, volumes=[SimpleNamespace(devices=[device])]) as watch,
    ):
        batches = Batches(volume, fault.prefetch)
        with BlackBox(folder, watch=watch, devices=[*volume.devices, device]) as box:
            begun = time.perf_counter()
            for number, _ in enumerate(watch.loader(batches)):
                long = time.perf_counter() - begun > FAULT_S / 2
                now = hit and number == AT
                with watch.fetch():
                    for _ in range(4):
                        device.read_into(0, block)
                with watch.compute():
                    time.sleep(0.002)
                    if now and fault.compute is not None:
                        fault.compute(rig)
                    if hit and long and number and fault.waited is not None:
                        fault.waited(rig)
                with watch.collective():
                    barrier.wait(60)
                    if number == AT and fault.collective is not None:
                        fault.collective(rig)
                if number % 3 == 1:
                    with watch.checkpoint():
                        if now and fault.checkpoint is not None:
                            fault.checkpoint(rig)
                        for _ in range(6):
                            device.write(0, block)
                if number >= AT + AFTER + fault.prefetch:
                    break
                if hit and number == AT - 1:
                    batches.slow_s = fault.decode_s
                    if fault.before is not None:
                        fault.before(rig)
                begun = time.perf_counter()
            box.dump()
        batches.feed.close()


def wrong(rig: Rig, fault: Fault, found: Explanation) -> list[str]:
    """What is not as it should have been said."""
    main, problems = found.main, []
    if main is None:
        return ["nothing was found"]
    if not found.stands_out:
        problems.append("no step stands out")
    if main.cause not in fault.causes:
        problems.append(f"cause {main.cause}, not {' or '.join(fault.causes)}")
    if main.storage not in fault.storage:
        problems.append(f"storage {main.storage}, not {' or '.join(fault.storage)}")
    if "yes" not in fault.storage and found.storage_gpu_s > 0.2 * found.gpu_s:
        problems.append(f"{found.storage_gpu_s:.2f} of {found.gpu_s:.2f} GPU-seconds to storage")
    if fault.ranks > 1 and fault.collective is None and found.rank != fault.ranks - 1:
        problems.append(f"rank {found.rank}")
    if fault.paths:
        names = [f"127.0.0.1:{rig.relays[number].port}" for number in fault.paths]
        if main.path is None or main.path.path not in names:
            problems.append(f"path {None if main.path is None else main.path.path}, not of {names}")
        if fault.scopes and main.scope not in fault.scopes:
            problems.append(f"scope {main.scope}, not {' or '.join(fault.scopes)}")
    told = {each.cause for each in found.findings}
    if not set(fault.besides) <= told:
        problems.append(f"told {sorted(told)}, without {sorted(set(fault.besides) - told)}")
    if fault.unwaited and (found.unwaited is None or found.storage_gpu_s > 0.2 * found.gpu_s):
        problems.append("slow I/O that nobody waited for is not told")
    return problems


@contextmanager
def rigged() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder))
        try:
            yield rig
        finally:
            rig.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.measure.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[fault.name for fault in FAULTS])
    given = parser.parse_args(arguments)
    missed = 0
    with rigged() as rig:
        for fault in FAULTS:
            if given.only in (None, fault.name):
                said: Counter[str] = Counter()
                for _ in range(given.rounds):
                    with tempfile.TemporaryDirectory() as folder:
                        found = run(rig, fault, Path(folder))
                    problems = wrong(rig, fault, found)
                    missed += bool(problems)
                    said["; ".join(problems) or "right"] += 1
                    if problems or given.rounds == 1:
                        print(f"  {sentence(found)}", flush=True)
                print(f"{fault.name:<40} {', '.join(f'{text}: {count}' for text, count in said.items())}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
