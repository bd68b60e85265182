"""What a step's time went to. Every second of a step is in one of these, and in one only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: In the order in which they are drawn and told. The key of each second of a step that was not compute -> what it is.
LOST = {
    "fetch": "the loader waited for reads",
    "blocked": "the loader waited for something, with nothing of it at work on a CPU: storage, network or a lock",
    "preparation": "the loader decoded, or otherwise worked on a CPU",
    "starved": "what could run waited for a CPU",
    "copy": "batches were copied to the device",
    "collective": "ranks exchanged, or waited for each other",
    "straggler": "the slowest rank computed longer than the others, which waited for it",
    "checkpoint": "training stood still for a save",
    "restart": "state was loaded, the job was down, or did steps again that it had done",
    "other": "none of these: between them, in Python, in logging",
}
#: What one rank can say of itself.
OF_A_RANK = tuple(name for name in LOST if name != "straggler")
CAUSES = (*OF_A_RANK[:6], "compute", *OF_A_RANK[6:])
#: Where a step is while it waits for a batch: what of the others that was is said when the batch is there.
WAIT = "wait"
#: Of these it is known that storage is in them; of `blocked` it may be.
STORAGE = ("fetch", "checkpoint", "restart")

#: As they stand in a sentence.
SHORT = {
    "fetch": "waiting for reads",
    "blocked": "a loader that was blocked",
    "preparation": "preparing data on the CPU",
    "starved": "CPU starvation",
    "copy": "copies to the device",
    "collective": "collectives",
    "straggler": "a rank that computes more slowly than the others",
    "checkpoint": "checkpoints that training waited for",
    "restart": "restarts",
    "other": "what is none of the watched parts",
}
#: Of these, those that are several.
PLURAL = ("copy", "collective", "checkpoint", "restart")


def compute_marked(spent: Iterable[Mapping[str, float]]) -> bool:
    """Of steps, by cause: a job says in one of them what computes (`Watch.compute`)."""
    return any(each.get("compute", 0.0) > 0 for each in spent)


def rest_computes(spent: Mapping[str, float]) -> dict[str, float]:
    """A step of a job that never says what computes: all that is in no other part does. Whoever tells of steps (`show`,
    `explain`, their pages, metrics) asks for it here; files and dumps have what was measured."""
    found = dict(spent)
    if (rest := found.pop("other", 0.0)) > 0:
        found["compute"] = found.get("compute", 0.0) + rest
    return found
