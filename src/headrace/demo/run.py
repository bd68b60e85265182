"""`headrace demo`: its eight steps, in order. Nothing here trains or stores; it starts, watches, breaks, compares."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from headrace.accidents.processes import Processes
from headrace.accidents.target import TargetProcess
from headrace.demo.compare import compare, proofs
from headrace.demo.job import Job
from headrace.demo.options import DemoOptions
from headrace.demo.page import write_page
from headrace.demo.story import Outage, RankKill, Story, ranks
from headrace.demo.summary import print_summary
from headrace.demo.tell import Teller
from headrace.demo.train_config import TrainConfig
from headrace.errors import HeadraceError, UsageError
from headrace.units import format_bytes, format_seconds

DATASET = "corpus"
RUN = "run"
#: How long the target stays dead.
OUTAGE_S = 2.0
#: The kill may come when a checkpoint has nothing unflushed; then the next one is tried, so often in all.
OUTAGE_TRIES = 2

#: Of the demo's target.
NQNS = ("nqn.2026-01.io.headrace:demo-a", "nqn.2026-01.io.headrace:demo-b")


class DemoFailed(HeadraceError):
    """The demo ran to its end and did not show what it set out to show."""


def run_demo(options: DemoOptions) -> None:
    """Run it; raises HeadraceError with one clear sentence, or KeyboardInterrupt; no process is left in any case."""
    check_packages()
    with ExitStack() as stack:
        stack.enter_context(_terminated_like_interrupted())
        directory = stack.enter_context(_work_directory(options))
        teller = stack.enter_context(Teller(to_stderr=options.json))
        # torchrun and torch leave things in the temporary directory when they are killed.
        temporary = directory / "tmp"
        temporary.mkdir()
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        processes = stack.enter_context(Processes({"TMPDIR": str(temporary)}))
        story = Demo(options, directory, teller, processes).run()
        write_page(story, options.report)
        (directory / "summary.json").write_text(json.dumps(story.to_json(), indent=1), encoding="utf-8")
        if options.keep is not None:
            shutil.copy(options.report, directory / "report.html")
        print_summary(story, teller)
        teller.line(f"report: {options.report}" + (f"; everything else: {directory}" if options.keep else ""))
    if options.json:
        print(json.dumps(story.to_json()), flush=True)
    if not story.holds():
        raise DemoFailed(
            "the demo did not show what it set out to show", next_step=f"see the proof in {options.report}"
        )


class Demo:
    def __init__(self, options: DemoOptions, directory: Path, teller: Teller, processes: Processes) -> None:
        self.options = options
        self.scale = options.scale
        self.directory = directory
        self.teller = teller
        self.processes = processes
        (directory / "logs").mkdir(exist_ok=True)
        media = {nqn: directory / f"namespace-{letter}.img" for letter, nqn in zip("ab", NQNS, strict=True)}
        self.target = TargetProcess(processes, media, self.scale.namespace_bytes, log=directory / "logs" / "target.log")
        self.story = Story(options=options, began=time.time())

    def run(self) -> Story:
        self.serve()
        self.create_volume()
        self.ingest()
        self.train_and_break()
        self.resume()
        self.reference()
        self.publish()
        self.target.stop()
        self.story.lives = self.target.lives
        self.story.ended = time.time()
        return self.story

    # ---- 1, 2, 3 ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        self.teller.title(1, "an NVMe/TCP target: two subsystems, a file each, with a volatile write cache")
        self.target.start()
        for uri in self.target.uris:
            self.teller.line(uri)
        self.story.environment = _environment(self.target.io_engine)

    def create_volume(self) -> None:
        from headrace.volume import Volume

        self.teller.title(2, "a volume, striped over both namespaces")
        with Volume.create(self.target.uris, name="headrace demo") as volume:
            info = volume.info()
        self.story.volume = {
            "uris": self.target.uris,
            "stripe_bytes": info.stripe_bytes,
            "member_bytes": self.scale.namespace_bytes,
        }
        self.teller.line(
            f"2 members of {format_bytes(self.scale.namespace_bytes)}, stripe {format_bytes(info.stripe_bytes)}"
        )

    def ingest(self) -> None:
        options, scale = self.options, self.scale
        self.teller.title(3, "text into tokens, in the volume")
        corpus = ["stdlib:", "--limit", str(scale.corpus_bytes)] if options.corpus is None else [str(options.corpus)]
        arguments = ["-m", "headrace", "ingest", corpus[0], DATASET, *corpus[1:], "--json"]
        for uri in self.target.uris:
            arguments += ["--volume", uri]
        if options.tokenizer is not None:
            arguments += ["--tokenizer", str(options.tokenizer)]
        else:
            arguments += ["--vocab-size", str(scale.vocabulary), "--train-size", str(scale.train_bytes)]
        began = time.time()
        child = self.processes.start("ingest", arguments, log=self.directory / "logs" / "ingest.log")
        while child.poll() is None:
            said = "".join(child.tail(1))
            self.teller.live("reading the corpus" if not said or said.startswith("{") else said)
            self.target.check()
            time.sleep(0.1)
        child.check(1.0)
        story = self.story
        story.ingest_s = time.time() - began
        found = json.loads(child.tail(1)[0])
        story.corpus = (
            f"{found['corpus']['description']}: {found['documents']:,} documents, "
            f"{format_bytes(found['corpus']['text_bytes'])} of text"
        )
        story.token_count = found["tokens"]
        story.token_bytes = {"uint16": 2, "int32": 4}[found["dtype"]]
        story.vocabulary = found["vocabulary"]
        self.teller.line(story.corpus)
        self.teller.line(
            f"{story.token_count:,} tokens of {story.token_bytes} bytes, vocabulary {story.vocabulary:,}, "
            f"in {format_seconds(story.ingest_s)}"
        )

    # ---- 4, 5 ------------------------------------------------------------------------------------------------------

    def _config(self, phase: str, *, save: bool, resume: bool) -> TrainConfig:
        scale = self.scale
        return TrainConfig(
            uris=self.target.uris,
            dataset=DATASET,
            run=RUN,
            phase=phase,
            directory=str(self.directory / "train"),
            steps=self.options.step_count,
            save_every=scale.save_every if save else 0,
            resume=resume,
            global_batch=scale.global_batch,
            micro_batch=scale.micro_batch,
            sequence=scale.sequence,
            vocabulary=self.story.vocabulary,
            width=scale.width,
            heads=scale.heads,
            layers=scale.layers,
            device=self.story.device,
            parallel=self.story.parallel,
        )

    def train_and_break(self) -> None:
        options, scale = self.options, self.scale
        self.story.device, self.story.parallel = _choose_device(max(options.ranks, options.resume_ranks))
        self.teller.title(
            4,
            f"training on {ranks(options.ranks)} ({self.story.device}, {self.story.parallel}), "
            f"a checkpoint every {scale.save_every} steps",
        )
        job = Job(self.processes, self._config("first", save=True, resume=False), options.ranks, self.teller.live)
        started = job.wait_for(lambda event: event.event == "started" and event.rank == 0)
        self.story.parameters = started.details["parameters"]
        self.story.environment["training"] = (
            f"{self.story.parameters:,} parameters, {ranks(options.ranks)}, {self.story.parallel}, "
            f"{started.details['device']}"
        )
        self.teller.line(f"{self.story.parameters:,} parameters, {options.step_count} steps")
        step = self.scale.save_every
        for last in range(OUTAGE_TRIES - 1, -1, -1):
            outage = self._kill_target(job, after=step)
            step = outage.step
            self.story.outages.append(outage)
            if outage.rewritten_bytes or last == 0:
                break
            self.teller.line("nothing was lost by it, so once more")
        self._kill_rank(job, after=step)

    def _kill_target(self, job: Job, after: int) -> Outage:
        """SIGKILL while a checkpoint is being written, and back again."""
        begun = job.wait_for(lambda event: event.event == "write-begun" and event.step > after)
        killed = self.target.kill()
        self.teller.title(5, f"target killed (SIGKILL) while checkpoint {begun.step} was being written")
        back_at = time.monotonic() + OUTAGE_S
        while time.monotonic() < back_at:
            job.poll()
            time.sleep(0.02)
        self.target.start()
        back = self.target.lives[-1].began
        self.teller.line(f"target back on its old ports after {back - killed:.1f} s; nobody told the training")
        fates = ("save-committed", "save-failed")
        ended = job.find(fates, begun.step) or job.wait_for(
            lambda event: event.step == begun.step and event.rank == 0 and event.event in fates
        )
        rewritten = 0
        if ended.event == "save-committed":
            # The other ranks hear of the commit a moment later; each tells what it wrote again.
            job.wait_all("save-committed", begun.step)
            rewritten = job.sum("save-committed", begun.step, "rewritten_bytes")
            self.teller.line(
                f"checkpoint {begun.step} is committed, complete; {format_bytes(rewritten)} were written again", "green"
            )
        else:
            self.teller.line(
                f"checkpoint {begun.step} was given up, nothing of it is visible: {ended.details['error']}", "yellow"
            )
        return Outage(
            step=begun.step,
            killed=killed,
            back=back,
            recovered=max(back, ended.t),
            committed=ended.event == "save-committed",
            rewritten_bytes=rewritten,
        )

    def _kill_rank(self, job: Job, after: int) -> None:
        """SIGKILL of the last rank while a checkpoint is being written; the job ends, as it should."""
        rank = self.options.ranks - 1
        begun = job.wait_for(lambda event: event.event == "write-begun" and event.step > after and event.rank == rank)
        try:
            os.kill(begun.pid, signal.SIGKILL)
        except ProcessLookupError:
            raise HeadraceError(f"rank {rank} had ended before it could be killed", next_step="try again") from None
        killed = time.time()
        self.teller.line(f"rank {rank} killed (SIGKILL) while checkpoint {begun.step} was being written", "bold")
        self.story.first = job.wait_broken(60.0)
        checkpoints = self._checkpoints()
        visible = self._objects_of(begun.step)
        if not checkpoints:
            raise HeadraceError("no checkpoint is committed", next_step=f"see {self.directory / 'logs'}")
        self.story.rank_kill = RankKill(
            step=begun.step,
            rank=rank,
            killed=killed,
            committed=begun.step in checkpoints,
            checkpoints=checkpoints,
            visible_objects=visible,
        )
        self.teller.line("torchrun ended the job; committed checkpoints: " + ", ".join(map(str, checkpoints)))

    def _checkpoints(self) -> list[int]:
        from headrace.checkpoint import list_checkpoints
        from headrace.volume import Volume

        with Volume.open(self.target.uris) as volume:
            return [info.step for info in list_checkpoints(volume, RUN)]

    def _objects_of(self, step: int) -> int:
        from headrace.checkpoint import CheckpointId
        from headrace.volume import Volume

        with Volume.open(self.target.uris) as volume:
            return len(volume.list(f"{CheckpointId(RUN, step)}/"))

    # ---- 6, 7 ------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        options = self.options
        kill = self.story.rank_kill
        assert kill is not None
        self.teller.title(6, f"again from checkpoint {kill.resume_step}, on {ranks(options.resume_ranks)}")
        job = Job(
            self.processes, self._config("resumed", save=True, resume=True), options.resume_ranks, self.teller.live
        )
        restored = job.wait_for(lambda event: event.event == "restored" and event.rank == 0)
        self.teller.line(f"restored step {restored.step} in {format_seconds(restored.details['seconds'])}")
        self.story.resumed = job.finish()

    def reference(self) -> None:
        self.teller.line(f"the same run, undisturbed, on {ranks(self.options.ranks)}, to compare with")
        job = Job(
            self.processes, self._config("reference", save=False, resume=False), self.options.ranks, self.teller.live
        )
        self.story.reference = job.finish()
        assert self.story.first is not None and self.story.resumed is not None
        result = compare(
            proofs(self.story.reference.records),
            proofs(self.story.first.records),
            proofs(self.story.resumed.records),
        )
        self.story.comparison = result
        same = "the samples of every step are the same" if result.samples_equal else "SAMPLES DIFFER"
        self.teller.line(
            f"{same}; loss bitwise equal in {result.same_ranks - len(result.same_ranks_differ)} of {result.same_ranks} "
            f"steps on equal ranks, within {result.other_ranks_difference:.1e} in {result.other_ranks} others"
        )

    def publish(self) -> None:
        self.teller.title(7, "the model as safetensors, in the volume and out of it")
        step = self._checkpoints()[-1]
        result = self.directory / "publish.json"
        child = self.processes.start(
            "publish",
            ["-m", "headrace.demo.publish", str(self.directory / "train" / "resumed.json"), str(step), str(result)],
            log=self.directory / "logs" / "publish.log",
        )
        while child.poll() is None:
            self.teller.live("publishing, loading, comparing")
            time.sleep(0.05)
        child.check(1.0)
        self.story.model = json.loads(result.read_text(encoding="utf-8"))
        equal = self.story.model["headrace_bitwise"] and self.story.model["safetensors_bitwise"]
        self.teller.line(
            f"{self.story.model['name']}, {format_bytes(self.story.model['length_bytes'])}: read with headrace and "
            f"with safetensors, {'equal bit for bit' if equal else 'NOT EQUAL'}"
        )


def check_packages(names: Sequence[str] = ("torch", "tokenizers", "safetensors")) -> None:
    """What the demo needs and the library alone does not. Looked for, not imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            next_step="pip install 'headrace[all]'",
        )


# ---- surroundings -------------------------------------------------------------------------------------------------


@contextmanager
def _work_directory(options: DemoOptions) -> Iterator[Path]:
    """The one to keep, or a temporary one that is removed."""
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        yield options.keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="headrace-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that it clears up behind itself."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _choose_device(ranks: int) -> tuple[str, str]:
    """(device, way to spread the model). CUDA where there is one; ranks that share a GPU have no NCCL, so no FSDP2."""
    if not Path("/proc/driver/nvidia/gpus").is_dir() and not Path("/dev/nvidiactl").exists():
        return "cpu", "fsdp2"
    import subprocess

    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    count = int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0
    if count == 0:
        return "cpu", "fsdp2"
    return "cuda", "fsdp2" if count >= ranks else "ddp"


def _environment(io_engine: str) -> dict[str, str]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "headrace": version("headrace"),
        "transport": "NVMe/TCP over loopback, one target process, two subsystems",
        "target I/O engine": io_engine,
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {format_bytes(pages)}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": version("torch"),
    }
