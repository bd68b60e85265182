"""The sentence: whether storage is what holds the job up, what it costs, and what would help most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.plan import units
from headrace.plan.cures import Cure
from headrace.plan.quantities import Answer, Range

#: From "nothing needs to change" to "storage is the problem".
WORDS = ("no", "hardly", "probably", "yes")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`problem`: one of `WORDS`. `cures`: those worth the while, in order of effect."""

    problem: str
    sentence: str
    share: Range
    cures: Sequence[Cure]
    #: What was asked for and is not reached, a sentence each.
    unmet: Sequence[str]

    @property
    def nothing_to_change(self) -> bool:
        return self.problem == "no" and not self.cures and not self.unmet

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": self.problem, "nothing_to_change": self.nothing_to_change, "sentence": self.sentence,
            "storage_share": self.share.to_json(), "unmet": list(self.unmet),
            "change": [cure.to_json() for cure in self.cures],
        }  # fmt: skip


def judge(
    share: Range, parts: Sequence[tuple[str, float]], cures: Sequence[Cure], *, lost: float, over: str,
    unmet: Sequence[str] = (), money: Answer | None = None, nowhere: str = "",
) -> Verdict:  # fmt: skip
    """`lost`: what is good enough. `parts`: what of `share` is lost to what, as likely. `over`: the storage, in words.
    `money`: an hour. `nowhere`: says why nothing would train over storage that takes no time, either."""
    if nowhere:
        unmet = (nowhere, *unmet)
        worth = [cure for cure in cures if cure.name == "interval" and cure.gain.value.likely >= lost / 4]
        text = " ".join(["Storage is not what holds this job up.", *unmet]) + _helps(worth)
        return Verdict(problem="no", sentence=text, share=share, cures=worth, unmet=unmet)
    ends = (share.high, share.likely, share.low)
    problem = next((word for word, end in zip(WORDS, ends, strict=False) if end < lost), "yes")
    if unmet and problem in ("no", "hardly"):
        problem = "probably"
    worth = [cure for cure in cures if cure.gain.value.likely >= lost / 4]
    if problem == "no":
        worth = [cure for cure in worth if cure.name == "interval"]
    costs = f"it costs {share} of step time {over}"
    if problem == "no":
        text = f"Storage is not your problem: {costs}."
        text += " Nothing needs to change." if not worth else ""
    elif problem == "hardly":
        text = f"Storage is hardly your problem: {costs}."
    else:
        word = "is" if problem == "yes" else "is probably"
        text = f"Storage {word} a problem: {costs}"
        largest = sorted((part for part in parts if part[1] >= lost / 10), key=lambda part: -part[1])
        told = ", ".join(f"{name} {units.show(value, units.SHARE)}" for name, value in largest)
        text += f" ({told})." if told else "."
    if money is not None and problem != "no":
        text += f" Waiting GPUs cost {money.value}."
    text += "".join(f" {sentence}" for sentence in unmet)
    text += _helps(worth)
    return Verdict(problem=problem, sentence=text, share=share, cures=worth, unmet=tuple(unmet))


def _helps(worth: Sequence[Cure]) -> str:
    single = [cure for cure in worth if cure.name != "all"]
    if not single:
        return ""
    text = " What helps: " if len(single) == 1 else " What helps, in order of effect: "
    return text + "; ".join(_says(index, cure, len(single)) for index, cure in enumerate(single, start=1)) + "."


def _says(index: int, cure: Cure, count: int) -> str:
    number = f"{index}. " if count > 1 else ""
    gain = cure.gain.value
    return f"{number}{cure.text}, +{units.significant(100 * gain.likely, 2)} points of the time"
