"""A job of two processes, from outside: it saves, and is stopped, cut off, killed in the middle of a save."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.accidents.processes import Child, Processes
from headrace.accidents.stopping import stop
from headrace.drill.report import DrillFailed
from headrace.errors import HeadraceError
from headrace.units import format_bytes
from headrace.volume import Grant

RANKS = 2
#: A process of the job has this long for an answer, and for the next `SOME_BYTES` of what it writes: also while its
#: target is away, and on a machine under load. However long all of it takes.
ANSWER_S = 300.0
#: More than the beats of its session write in that time, which are counted with the rest.
SOME_BYTES = 64 << 20
#: Writes that are answered after an accident, so many on each rank, show that nobody refuses them.
ENOUGH_WRITES = 3
_LOOK_S = 0.02


@dataclass(frozen=True)
class State:
    """Of one rank: what it knows of its writes."""

    writes: int
    error: str | None
    said: str | None
    receipt: str | None
    #: It writes, or waits for the answers.
    busy: bool
    written_bytes: int
    conflicts: int
    fenced: int


class NodeError(DrillFailed):
    """A process of the job answered with an error; `kind` is its class."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


class Node:
    """One process."""

    def __init__(self, processes: Processes, name: str, setup: dict[str, Any], log: Path) -> None:
        arguments = ["-m", "headrace.drill.node", json.dumps(setup)]
        self.child: Child = processes.start(name, arguments, log=log, talk=True)

    def hear(self) -> Any:
        line = self.child.hear(ANSWER_S)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NodeError(answer["error"], answer["said"])
        return answer["ok"]

    def ask(self, do: str, **request: Any) -> Any:
        self.child.tell(json.dumps({"do": do, **request}))
        return self.hear()

    def state(self) -> State:
        return State(**self.ask("state"))


class Job:
    """Started when it is made: rank 0 has a session on the volume, the others write for it."""

    def __init__(
        self, processes: Processes, folder: Path, run: str, uris: Sequence[str], *, heartbeat_s: float
    ) -> None:
        self.nodes: list[Node] = []
        self.grants: list[Grant] = []
        setup = {"uris": [*uris], "run": run, "heartbeat_s": heartbeat_s, "coordinator": True, "ticket": None}
        try:
            for rank in range(RANKS):
                node = Node(processes, f"rank {rank} of the job", setup, folder / f"{run}-{rank}.log")
                self.nodes.append(node)
                said = node.hear()
                if rank == 0:
                    #: How well the volume is fenced, as the session says.
                    self.fence = str(said["fence"])
                    setup = {**setup, "coordinator": False, "ticket": said["ticket"]}
        except BaseException:
            # A session that nobody ends would be in the next one's way.
            self.kill()
            raise

    # ---- saving ----

    def begin(self, names: Sequence[str], length_bytes: int, delete: Sequence[str]) -> None:
        """A save: space for the shard of each rank."""
        texts = self.nodes[0].ask("begin", names=[*names], length_bytes=length_bytes, delete=[*delete])
        self.grants = [Grant.from_json(text) for text in texts]
        for node, text in zip(self.nodes, texts, strict=True):
            node.ask("take", grant=text)

    def flood(self) -> list[State]:
        """Every rank writes to its space again and again, and has had answers when this returns."""
        for node in self.nodes:
            node.ask("flood")
        return self.goes_on(self.states(), 1)

    def write(self) -> list[str]:
        """Every rank writes its shard as it is to be; the receipts."""
        self._halt()
        for node in self.nodes:
            node.ask("write")
        self._idle()
        return [str(node.ask("receipt")) for node in self.nodes]

    def commit(self, receipts: Sequence[str]) -> int:
        return int(self.nodes[0].ask("commit", receipts=[*receipts]))

    def states(self) -> list[State]:
        return [node.state() for node in self.nodes]

    def losses(self) -> int | None:
        """Associations that the session has lost so far; None where a member hides them (`BlockDevice.loss_count`)."""
        said = self.nodes[0].ask("losses")
        return None if said is None else int(said)

    def goes_on(self, before: Sequence[State], writes: int = ENOUGH_WRITES) -> list[State]:
        """Until each rank was refused, or has had so many answers more than before."""
        return self._until(lambda rank, state: state.error is not None or state.writes >= before[rank].writes + writes)

    def writes_again(self, rank: int) -> State:
        """One whose writing has ended with an error."""
        self.nodes[rank].ask("flood")
        return self.goes_on([replace(state, writes=0) for state in self.states()], 1)[rank]

    def _halt(self) -> None:
        """No rank writes any more."""
        for node in self.nodes:
            node.ask("halt")
        self._idle()

    def _idle(self) -> None:
        self._until(lambda rank, state: not state.busy)

    def _until(self, done: Callable[[int, State], bool]) -> list[State]:
        """Until every rank is; DrillFailed where one that is not writes too little in `ANSWER_S`."""
        written = [0] * len(self.nodes)
        since = [time.monotonic()] * len(self.nodes)
        while True:
            states = self.states()
            waiting = [rank for rank, state in enumerate(states) if not done(rank, state)]
            if not waiting:
                return states
            for rank in waiting:
                if states[rank].written_bytes >= written[rank] + SOME_BYTES:
                    written[rank], since[rank] = states[rank].written_bytes, time.monotonic()
                elif time.monotonic() >= since[rank] + ANSWER_S:
                    raise DrillFailed(
                        f"rank {rank} of the job does not go on",
                        expected=f"an end, or {format_bytes(SOME_BYTES)} written, within {ANSWER_S:g} s",
                    )
            time.sleep(_LOOK_S)

    def late_commit(self, receipts: Sequence[str]) -> tuple[str, str]:
        """What a commit of the job ends with: the class of the error, or "" where it was acknowledged."""
        self._halt()
        try:
            return "", f"commit {self.commit(receipts)}"
        except NodeError as error:
            return error.kind, str(error)

    # ---- accidents ----

    def freeze(self) -> None:
        """DrillFailed where a process cannot be stopped: that is not the storage's fault."""
        for node in self.nodes:
            try:
                stop(node.child.pid)
            except HeadraceError as error:
                raise DrillFailed(str(error)) from error

    def thaw(self) -> None:
        for node in self.nodes:
            os.kill(node.child.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL of every rank."""
        for node in self.nodes:
            node.child.kill()
