"""What is there: what the job says of its storage, what a provider claims, or one plain NFS server."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan import network, units
from headrace.plan.catalogue import Offering
from headrace.plan.job import Job
from headrace.plan.quantities import Answer, Formula, Question, Range, least

NODES = Formula(
    result="what all nodes may take together",
    text="nodes * per node",
    unit=units.RATE,
    symbols={"nodes": units.NODES, "per node": units.RATE_PER_NODE},
    source="arithmetic; that it grows with the nodes is to be measured",
    function=lambda nodes, per_node: nodes * per_node,
)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """`read`, `write`: B/s, of all nodes together. `over`: it in words, for the verdict's sentence."""

    read: Range
    write: Range
    answers: tuple[Answer, ...]
    over: str
    #: Of "read" and "write" those of which nothing was said, nor claimed.
    assumed: tuple[str, ...]
    #: Saves go to what ends with its node.
    ends_with_node: bool = False
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(job: Job, nodes: Range, gpus: Range, offering: Offering | None) -> Storage:
        answers: list[Answer] = []
        notes: list[str] = []
        links = network.links(job, nodes)
        if links is not None:
            answers.append(links)
        said = {way: _said(job, way, nodes, answers) for way in ("read", "write")}
        found: dict[str, Range] = {}
        claimed: list[str] = []
        for way in ("read", "write"):
            limits = said[way]
            if not limits and offering is not None:
                claims, left_out = offering.rates(way, nodes=nodes, gpus=gpus, capacity=job.range("storage.capacity"))
                limits = claims
                claimed += [way] if claims else []
                notes += [note for note in left_out if note not in notes]
            if not limits:
                limits = [job.need(f"storage.{way}")]
                if offering is not None:
                    notes.append(f"{offering.key} claims no rate of {way}s that could be used: {limits[0].source}")
            found[way] = least([*limits, *([links.value] if links else [])])
        if offering is not None and offering.kind == "local":
            notes.append("local disks end with their node: a place for copies of data, none for checkpoints")
        assumed = tuple(way for way in said if not said[way] and way not in claimed)
        over = "over one plain NFS server for all nodes"
        if len(assumed) < 2:
            over = "with the storage that is there"
            if claimed and offering is not None:
                over = f"with {offering.key} as claimed"
            over += "".join(f", and one plain NFS server for {way}s" for way in assumed)
        elif offering is not None:
            over += f" ({offering.key} claims no rate that could be used)"
        return Storage(
            read=found["read"], write=found["write"], answers=tuple(answers), over=over, assumed=assumed,
            notes=tuple(notes), ends_with_node="write" in claimed and offering is not None and offering.kind == "local",
        )  # fmt: skip

    def question(self) -> Question:
        """Formulas that only say what is taken, so that a table shows it with its source."""
        taken = [
            Formula(
                result=f"taken for {way}s, in all", text="the least of what limits it", unit=units.RATE,
                symbols={"limit": units.RATE}, source=value.source or value.origin, function=lambda limit: limit,
            ).put({"limit": value})
            for way, value in (("read", self.read), ("write", self.write))
        ]  # fmt: skip
        return Question(
            name="storage", title="What is there?", answers=(*self.answers, *taken), note="; ".join(self.notes)
        )


def _said(job: Job, way: str, nodes: Range, answers: list[Answer]) -> list[Range]:
    limits: list[Range] = []
    per_node = job.range(f"storage.{way}_per_node")
    if per_node is not None:
        answers.append(NODES.put({"nodes": nodes, "per node": per_node}))
        value = answers[-1].value
        limits.append(value.with_origin(per_node.origin, f"given: {per_node} to each node"))
    if job.has(f"storage.{way}"):
        value = job.need(f"storage.{way}")
        limits.append(value.with_origin(value.origin, "given"))
    return limits
