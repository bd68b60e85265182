"""What a comparison runs on each path, and what that costs: said before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headrace.bench.compare import MOST_ROUNDS, counted
from headrace.bench.figures import Outcome
from headrace.bench.patterns import ingest, latency, load, random, sequential
from headrace.bench.patterns.options import Options
from headrace.bench.places.protocol import Place, Tell
from headrace.bench.suite import READ_MOST
from headrace.errors import UsageError
from headrace.units import format_bytes, format_seconds

WORKS: Mapping[str, Callable[[Place, Options, Tell], Outcome]] = {
    "sequential": sequential.run, "random": random.run, "latency": latency.run, "load": load.run,
    "ingest": ingest.run,
}  # fmt: skip
#: Of small reads one by one; more of them at once are another question.
_ALONE = ("latency",)


@dataclass(frozen=True, kw_only=True)
class Works:
    """`patterns` on `places`, each with its options."""

    places: Sequence[Place]
    patterns: Mapping[str, Options]
    size_bytes: int

    @property
    def reads(self) -> bool:
        return any(name != "ingest" for name in self.patterns)

    def lines(self, rounds: int) -> list[str]:
        """What it will write, read and take, in words. UsageError where that cannot be: nothing was done yet."""
        room = self.size_bytes if "ingest" in self.patterns else 0
        said = []
        for place in self.places:
            said += [f"{place.name}: {line}" for line in place.plan(self.size_bytes if self.reads else 0, room)]
        seconds = rounds * len(self.places) * sum(options.seconds for options in self.patterns.values())
        written = rounds * room
        said.append(
            f"{counted(len(self.patterns), 'kind')} of work on {len(self.places)} paths in "
            f"{counted(rounds, 'round')}: about "
            f"{format_seconds(seconds)}" + (f"; ingest writes at most {format_bytes(written)} to each" if room else "")
        )
        return said

    def prepare(self, tell: Tell) -> None:
        for place in self.places if self.reads else ():
            place.prepare(self.size_bytes, tell=lambda fraction, text, of=place: tell(0.0, f"{of.name}: {text}"))  # type: ignore[misc]

    def works(self) -> list[Callable[[int, int], Outcome]]:
        """For `compare.run`: each measures one kind of work, in a round, on the path of this number."""
        return [partial(self._one, name, options) for name, options in self.patterns.items()]

    def _one(self, name: str, options: Options, number: int, path: int) -> Outcome:
        # On all paths the same samples, in each round others: what a server kept of the last is not what is compared.
        options = replace(options, seed=options.seed * MOST_ROUNDS + number)
        return WORKS[name](self.places[path], options, lambda fraction, text: None)


def plan_of(
    places: Sequence[Place], patterns: Sequence[str], *, flows: int, depth: int, sample: int, seconds: float,
    size_bytes: int, cache: str, seed: int,
) -> Works:  # fmt: skip
    """UsageError where an option cannot be meant, or a path cannot do what is asked for."""
    found: dict[str, Options] = {}
    for name in patterns:
        if name == "ingest":
            for place in places:
                if place.why_read_only is not None:
                    raise UsageError(place.why_read_only, where=place.name, next_step="leave out --pattern ingest")
        found[name] = Options(
            flows=1 if name in _ALONE else flows, depth=depth, seconds=seconds, cache=cache, seed=seed,
            request_bytes=sample if name == "random" else None,
            budget_bytes=size_bytes if name in ("ingest", "load") else READ_MOST,
        )  # fmt: skip
    return Works(places=places, patterns=found, size_bytes=size_bytes)
