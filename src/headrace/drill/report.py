"""What the drill found: a finding for each scenario, and what all of them together say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import HeadraceError

#: Of one scenario.
TRUSTED, NOT_TRUSTED, NOT_TRIED = "trusted", "not trusted", "not tried"

#: What each scenario shows, as the end of "this storage can be trusted with ...".
WITH = {
    "freeze": "a writer that is stopped, followed by another one, and wakes up",
    "cut": "writes that come late out of a network that was cut",
    "takeover": "a job that is shut out while it writes",
    "restart": "a target that is killed in the middle of a save",
    "kill": "a job that is killed in the middle of a save",
}

#: By the strength of the fence, as `headrace volume info` tells it.
FENCES = {
    "persistent": "by reservations of the target that survive its restart",
    "until-restart": "by reservations of the target, which it forgets when it restarts: a job that runs then ends, "
    "with nothing wrong on the media",
    "node": "by reservations of this node: they keep other nodes out; jobs of one node are kept apart by a lock",
    "machine": "by a lock of this machine: nothing keeps out another one that reaches the same bytes",
    "process": "by nothing but this process",
    "none": "by time alone: the target keeps no reservations, so that it refuses nobody. A writer that wakes up finds "
    "out at its next look that it was followed, and commits nothing; but until then it writes to the space that it "
    "had, which its successor therefore leaves alone. Nobody refers to what it overwrites, as long as every writer is "
    "headrace, and looks",
}


class DrillFailed(HeadraceError):
    """The drill could not be carried out: that says nothing about the storage."""


@dataclass(kw_only=True)
class Finding:
    """Of one scenario, once."""

    scenario: str
    verdict: str = TRUSTED
    #: Why it is not trusted, or was not tried.
    problems: list[str] = field(default_factory=list)
    #: What was done, in order.
    did: list[str] = field(default_factory=list)
    #: The last step that was acknowledged before the accident, and the last one of all.
    acknowledged: str = ""
    last_step: str = ""
    #: Every step that was acknowledged is there, bit for bit, and no other; None: nobody looked.
    whole: bool | None = None
    #: Commands of the writer that was followed which the target answered with Reservation Conflict, or aborted for the
    #: preemption: by the statuses that came back, and as the target counts, where it is ours.
    refused: int = 0
    #: The first one of each process, with its address, or what ended its writing instead.
    refusals: list[str] = field(default_factory=list)
    refused_by_target: int | None = None
    #: Members that showed that writer another holder before it sent anything more.
    held_back: int = 0
    #: What the storage did in another way than it should, with no harm.
    notes: list[str] = field(default_factory=list)
    #: Space that who followed left alone, since the targets did not say that nothing of that writer may land there.
    left_alone_bytes: int = 0
    #: Bytes on the media that its late writes changed, of so many that were looked at.
    moved_bytes: int = 0
    watched_bytes: int = 0
    #: What its commit ended with.
    late_commit: str = ""
    seconds: float = 0.0

    def problem(self, text: str) -> None:
        self.verdict = NOT_TRUSTED
        self.problems.append(text)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of it. `fence`: as a session of the volume said it."""

    uris: list[str]
    fence: str
    findings: list[Finding]

    def verdict_of(self, scenario: str) -> str:
        """The worst of all rounds."""
        found = [finding.verdict for finding in self.findings if finding.scenario == scenario]
        return next(verdict for verdict in (NOT_TRUSTED, NOT_TRIED, TRUSTED) if verdict in found)

    def _scenarios(self, verdict: str) -> list[str]:
        names = dict.fromkeys(finding.scenario for finding in self.findings)
        return [name for name in names if self.verdict_of(name) == verdict]

    @property
    def verdicts(self) -> set[str]:
        """One of each scenario."""
        return {self.verdict_of(finding.scenario) for finding in self.findings}

    @property
    def trusted(self) -> bool:
        """Something was tried, and nothing of it went wrong."""
        return TRUSTED in self.verdicts and NOT_TRUSTED not in self.verdicts

    @property
    def sentence(self) -> str:
        good, bad, rest = (self._scenarios(verdict) for verdict in (TRUSTED, NOT_TRUSTED, NOT_TRIED))
        said = []
        if bad:
            moved = sum(finding.moved_bytes for finding in self.findings)
            said.append(f"This storage can NOT be trusted with {_several([WITH[name] for name in bad])}.")
            if moved:
                said.append(
                    f"Late writes of a writer that was followed were NOT refused: they changed {moved} bytes on the "
                    "media. Do not let a job take over from another one here before that one's processes are known to "
                    "have ended."
                )
            whole = [finding.whole for finding in self.findings if finding.verdict != NOT_TRIED]
            if False in whole:
                said.append("Not every step that was acknowledged could be read as it was saved.")
            elif None in whole:
                said.append("A scenario ended before the steps that were acknowledged had been read.")
            else:
                said.append("Every step that was acknowledged is what was saved, all the same.")
        if good:
            said.append(f"This storage can be trusted with {_several([WITH[name] for name in good])}.")
        if rest:
            said.append(f"Not tried: {', '.join(rest)}.")
        return " ".join(said)

    def to_json(self) -> dict[str, Any]:
        return {
            "trusted": self.trusted,
            "verdict": self.sentence,
            "uris": self.uris,
            "fence": self.fence,
            "fenced_by": FENCES.get(self.fence, self.fence),
            "scenarios": [asdict(finding) for finding in self.findings],
        }


def rows_of(finding: Finding) -> list[tuple[str, list[str]]]:
    """For people: what it is, and lines of it."""
    rows = [("because", finding.problems)]
    if finding.verdict != NOT_TRIED:
        rows.append(("did", finding.did))
        if finding.acknowledged:
            rows.append(("before", [f"{finding.acknowledged} was acknowledged"]))
        if finding.watched_bytes:
            own = finding.refused_by_target
            counted = "" if own is None else f"; the target counts {own}"
            rows.append(("refused", [f"{finding.refused} commands, by their statuses{counted}", *finding.refusals]))
            if finding.held_back:
                text = f"{finding.held_back} members showed another holder: nothing more was sent there"
                rows.append(("asked", [text]))
            rows.append(("but", finding.notes))
            moved = f"{finding.moved_bytes} of {finding.watched_bytes} bytes changed after the take-over"
            rows.append(("media", [moved]))
        if finding.late_commit:
            rows.append(("commit", [finding.late_commit]))
        if finding.whole:
            rows.append(("found", [f"{finding.last_step} is there, bit for bit, read over a new connection"]))
    return [(name, texts) for name, texts in rows if texts]


def lines_of(finding: Finding) -> list[str]:
    """For a terminal or a log; the first one stands alone."""
    lines = [f"{finding.scenario}: {finding.verdict}"]
    for name, texts in rows_of(finding):
        lines += [f"  {name if number == 0 else '':<7}  {text}" for number, text in enumerate(texts)]
    return lines


def _several(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{'; '.join(texts[:-1])}; and {texts[-1]}"
