"""A process that saves and restores its part of a checkpoint: `python -m headrace.bench.rank`.

It is told what to do by lines of JSON, and answers each with one: `open` (what `Room.for_writer` said), `save`,
`restore` (which shards), `close`. While it works it says now and then how many bytes it has moved.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from headrace.accidents.processes import die_with_parent
from headrace.bench.places import Writer, open_writer
from headrace.errors import HeadraceError

#: Seconds between two words of how far it is.
_EVERY_S = 0.2


class Rank:
    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._writer: Writer | None = None
        self._moved = 0
        self._said_s = 0.0

    def say(self, said: dict[str, Any]) -> None:
        print(json.dumps(said), file=self._answers, flush=True)

    def seen(self, count: int) -> None:
        self._moved += count
        now = time.monotonic()
        if now - self._said_s >= _EVERY_S:
            self._said_s = now
            self.say({"moved": self._moved})

    def open(self, spec: dict[str, Any]) -> dict[str, Any]:
        self._writer = open_writer(spec)
        return {}

    def save(self, shards: list[int]) -> dict[str, Any]:
        assert self._writer is not None
        self._moved, begun = 0, time.perf_counter()
        proofs = self._writer.save(shards, self.seen)
        return {"seconds": time.perf_counter() - begun, "proofs": proofs, "moved": self._moved}

    def restore(self, shards: list[int]) -> dict[str, Any]:
        assert self._writer is not None
        self._moved, begun = 0, time.perf_counter()
        self._writer.restore(shards, self.seen)
        return {"seconds": time.perf_counter() - begun, "moved": self._moved}

    def close(self) -> dict[str, Any]:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return {}


def main() -> None:
    die_with_parent()
    # What is printed by accident must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    rank = Rank(answers)
    rank.say({"ok": {}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            rank.say({"ok": getattr(rank, request.pop("do"))(**request)})
        except HeadraceError as error:
            rank.say({"error": str(error), "fault": error.fault})


if __name__ == "__main__":
    main()
