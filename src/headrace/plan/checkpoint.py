"""How often to save, how fast a save must be written, and how fast a restart must read.

The interval is `headrace.checkpoint.interval`'s, Young's and Daly's. What is *needed* of storage is asked the other way
round: the slowest that still costs no more than `goals.lost`. The best interval of a very fast save is very short, and
asking for storage by it would ask for far too much: around the optimum the loss hardly changes.
"""

from __future__ import annotations

from headrace.checkpoint.interval import best_interval
from headrace.plan import units
from headrace.plan.job import Job
from headrace.plan.model import Model
from headrace.plan.quantities import Answer, Formula, Question, Range, least

YOUNG = "Young 1974: lost = sqrt(2 * blocked / mtbf) at the best interval"

MTBF = Formula(
    result="a failure of the job every",
    text="GPU hours / gpus",
    unit=units.SECONDS,
    symbols={"GPU hours": units.GPU_TIME, "gpus": units.GPUS},
    source="failures come with the number of GPUs",
    function=lambda GPU_hours, gpus: GPU_hours / gpus,
)

COMMITTED = Formula(
    result="a save is committed after",
    text="size / write rate",
    unit=units.SECONDS,
    symbols={"size": units.BYTES, "write rate": units.RATE},
    source="arithmetic",
    function=lambda size, write_rate: size / write_rate,
)

BLOCKED_COPY = Formula(
    result="training stands for",
    text="share of a rank / copy rate",
    unit=units.SECONDS,
    symbols={"share of a rank": units.SHARE_OF_GPU, "copy rate": units.RATE_PER_GPU},
    source="an asynchronous save: only while it is copied out of the GPUs",
    function=lambda share_of_a_rank, copy_rate: share_of_a_rank / copy_rate,
)

BLOCKED_WRITE = Formula(
    result="training stands for",
    text="size / write rate",
    unit=units.SECONDS,
    symbols=COMMITTED.symbols,
    source="a synchronous save: until it is written",
    function=COMMITTED.function,
)

BEST = Formula(
    result="best interval",
    text="Daly(blocked, mtbf), at least committed",
    unit=units.SECONDS,
    symbols={"blocked": units.SECONDS, "committed": units.SECONDS, "mtbf": units.SECONDS},
    source="Daly 2006; Young: sqrt(2 * blocked * mtbf)",
    function=lambda blocked, committed, mtbf: (
        best_interval(blocked_s=blocked, committed_s=committed, mtbf_s=mtbf).seconds
    ),
)

LONGEST = Formula(
    result="longest interval that is good enough",
    text="lost * mtbf / (1/2 + part)",
    unit=units.SECONDS,
    symbols={"lost": units.SHARE, "mtbf": units.SECONDS, "part": units.SHARE},
    source="a failure loses half an interval, and what was not committed yet",
    function=lambda lost, mtbf, part: lost * mtbf / (0.5 + part),
)

WRITE_ASYNCHRONOUS = Formula(
    result="needed to write, in all",
    text="size / (part * longest interval)",
    unit=units.RATE,
    symbols={"size": units.BYTES, "part": units.SHARE, "lost": units.SHARE, "mtbf": units.SECONDS},
    source="a save is committed within a part of the longest interval that loses so much",
    function=lambda size, part, lost, mtbf: size / (part * LONGEST.function(lost, mtbf, part)),
)

WRITE_SYNCHRONOUS = Formula(
    result="needed to write, in all",
    text="size / (lost^2 * mtbf / 2)",
    unit=units.RATE,
    symbols={"size": units.BYTES, "lost": units.SHARE, "mtbf": units.SECONDS},
    source=YOUNG,
    function=lambda size, lost, mtbf: 2 * size / (lost * lost * mtbf),
)

WRITE_INTERVAL = Formula(
    result="needed to write, in all",
    text="size / (part * interval)",
    unit=units.RATE,
    symbols={"size": units.BYTES, "part": units.SHARE, "interval": units.SECONDS},
    source="a save is committed within this part of the interval",
    function=lambda size, part, interval: size / (part * interval),
)

WRITE_INTERVAL_SYNCHRONOUS = Formula(
    result="needed to write, in all",
    text="size / (lost * interval)",
    unit=units.RATE,
    symbols={"size": units.BYTES, "lost": units.SHARE, "interval": units.SECONDS},
    source="a save stops training for this share of the time",
    function=lambda size, lost, interval: size / (lost * interval),
)

WRITE_PER_NODE = Formula(
    result="needed to write, per node",
    text="in all / nodes",
    unit=units.RATE_PER_NODE,
    symbols={"in all": units.RATE, "nodes": units.NODES},
    source="all nodes write",
    function=lambda in_all, nodes: in_all / nodes,
)

LOAD = Formula(
    result="a restart loads for",
    text="bytes / read rate",
    unit=units.SECONDS,
    symbols={"bytes": units.BYTES, "read rate": units.RATE},
    source="arithmetic",
    function=lambda bytes, read_rate: bytes / read_rate,
)

LOAD_ALLOWED = Formula(
    result="a restart may load for",
    text="lost * mtbf",
    unit=units.SECONDS,
    symbols={"lost": units.SHARE, "mtbf": units.SECONDS},
    source="what restarts may cost",
    function=lambda lost, mtbf: lost * mtbf,
)

READ_NEEDED = Formula(
    result="needed to read in a restart, in all",
    text="bytes / time",
    unit=units.RATE,
    symbols={"bytes": units.BYTES, "time": units.SECONDS},
    source="arithmetic",
    function=lambda bytes, time: bytes / time,
)

READ_PER_NODE = Formula(
    result="needed to read in a restart, per node",
    text="in all / nodes",
    unit=units.RATE_PER_NODE,
    symbols=WRITE_PER_NODE.symbols,
    source="all nodes read",
    function=WRITE_PER_NODE.function,
)


class Checkpoints:
    """What saves and restarts ask for. All of it is in Ranges of SI units."""

    def __init__(self, job: Job, model: Model, nodes: Range, *, read: Range, write: Range) -> None:
        """`read`, `write`: what is there, B/s in all."""
        self.synchronous = job.flag("checkpoint.synchronous")
        self.interval = job.range("checkpoint.interval")
        self.size = model.size().value
        self.share = model.share().value
        self.copy = job.need("checkpoint.copy")
        self.part = job.need("checkpoint.part")
        self.lost = job.need("goals.lost")
        self.other = job.need("failures.other")
        self.restart_bytes = model.restart_bytes()
        mtbf = job.range("failures.mtbf")
        self._mtbf_answer: tuple[Answer, ...] = ()
        if mtbf is None:
            gpus = Range.point(model.gpus, units.GPUS)
            self._mtbf_answer = (MTBF.put({"GPU hours": job.need("failures.gpu_hours"), "gpus": gpus}),)
            mtbf = self._mtbf_answer[0].value
        self.mtbf = mtbf
        self._saves(nodes, write)
        self._restarts(job, nodes, read)

    def _saves(self, nodes: Range, write: Range) -> None:
        self.committed = COMMITTED.put({"size": self.size, "write rate": write})
        if self.synchronous:
            self.blocked = BLOCKED_WRITE.put({"size": self.size, "write rate": write})
        else:
            self.blocked = BLOCKED_COPY.put({"share of a rank": self.share, "copy rate": self.copy})
        put = {"blocked": self.blocked.value, "committed": self.committed.value, "mtbf": self.mtbf}
        self.best = BEST.put(put)
        if self.interval is not None and self.synchronous:
            put = {"size": self.size, "lost": self.lost, "interval": self.interval}
            self.write_needed = WRITE_INTERVAL_SYNCHRONOUS.put(put)
        elif self.interval is not None:
            put = {"size": self.size, "part": self.part, "interval": self.interval}
            self.write_needed = WRITE_INTERVAL.put(put)
        elif self.synchronous:
            self.write_needed = WRITE_SYNCHRONOUS.put({"size": self.size, "lost": self.lost, "mtbf": self.mtbf})
        else:
            put = {"size": self.size, "part": self.part, "lost": self.lost, "mtbf": self.mtbf}
            self.write_needed = WRITE_ASYNCHRONOUS.put(put)
        self.longest = LONGEST.put({"lost": self.lost, "mtbf": self.mtbf, "part": self.part})
        self.write_per_node = WRITE_PER_NODE.put({"in all": self.write_needed.value, "nodes": nodes})

    def _restarts(self, job: Job, nodes: Range, read: Range) -> None:
        self.load = LOAD.put({"bytes": self.restart_bytes, "read rate": read})
        self.allowed = LOAD_ALLOWED.put({"lost": self.lost, "mtbf": self.mtbf})
        #: In what time a restart is to be loaded: what is allowed, or less where that is asked for.
        self.restart_goal = job.range("failures.restart")
        time = least([self.restart_goal, self.allowed.value] if self.restart_goal else [self.allowed.value])
        self.read_needed = READ_NEEDED.put({"bytes": self.restart_bytes, "time": time})
        self.read_per_node = READ_PER_NODE.put({"in all": self.read_needed.value, "nodes": nodes})

    def questions(self) -> tuple[Question, Question]:
        longest = () if self.synchronous or self.interval is not None else (self.longest,)
        saves = (
            *self._mtbf_answer, self.blocked, self.committed, self.best, *longest, self.write_needed,
            self.write_per_node,
        )  # fmt: skip
        loads = (self.load, self.allowed, self.read_needed, self.read_per_node)
        return (
            Question(name="saves", title="How often to save, and how fast?", answers=saves),
            Question(name="restarts", title="How fast must a restart load?", answers=loads),
        )
