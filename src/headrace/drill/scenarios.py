"""The accidents. Each begins with a job that has saved a step, and ends with what was acknowledged being read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.accidents.relay import Relay
from headrace.drill.hooks import Hook
from headrace.drill.job import Job, NodeError, State
from headrace.drill.report import NOT_TRIED, DrillFailed, Finding
from headrace.drill.world import World
from headrace.errors import SessionLost, WriterActive
from headrace.volume.writing.fence import PERSISTENT, UNTIL_RESTART

#: How long a write may take to come into the relay that waits for it.
_HELD_S = 120.0
#: How long a job may take to find that a target has ended that it does not write to just then.
_NOTICED_S = 30.0


def freeze(world: World, finding: Finding) -> None:
    """Stopped by SIGSTOP in the middle of a save, followed, and woken up."""
    with world.job() as job:

        def begin() -> None:
            job.freeze()
            finding.did.append("both processes of a job were stopped (SIGSTOP) while they wrote")

        def end() -> None:
            job.thaw()
            finding.did.append("both went on with what they had begun")

        _followed(world, finding, job, "if-dead", begin, end)


def cut(world: World, finding: Finding) -> None:
    """A link that falls silent with writes in it, and lets them through when another one has taken over."""
    if world.hooks.cut:
        if not world.hooks.heal:
            raise DrillFailed("nothing heals what --cut-command cuts", next_step="give --heal-command, too")
        heal = _told(world.hooks.heal, finding)
        with world.job(world.cut_uris) as job, _healed(heal, finding) as end:
            _followed(world, finding, job, "if-dead", _told(world.hooks.cut, finding), end)
        return
    with world.relayed() as (uris, relays), world.job(uris) as job:

        def hold() -> None:
            _hold(relays)
            finding.did.append(
                "the path of a job fell silent, both ways, with a write in it whose data were on their way"
            )

        def release() -> None:
            for relay in relays:
                relay.release()
            finding.did.append("all that was in the path came through, late, and the job went on")

        _followed(world, finding, job, "if-dead", hold, release)


def takeover(world: World, finding: Finding) -> None:
    """By hand, from a job that lives and writes."""
    with world.job() as job:

        def begin() -> None:
            finding.did.append("a job wrote as fast as it could, and nobody disturbed it")

        def end() -> None:
            finding.did.append("it went on writing all the while")

        _followed(world, finding, job, "now", begin, end)


def kill(world: World, finding: Finding) -> None:
    """SIGKILL in the middle of a save; the next one goes on from the last step."""
    with world.job() as job:
        finding.acknowledged = world.last_step
        world.begin(job)
        job.flood()
        job.kill()
        finding.did.append("both processes of a job were killed (SIGKILL) while they wrote")
        _check(world, finding)
        world.take_over("if-dead")
        finding.did.append(f"another session took over and saved {world.last_step}")
        _check(world, finding)


def restart(world: World, finding: Finding) -> None:
    """The target ends in the middle of a save, and again as soon as that is acknowledged."""
    if not world.hooks.restart:
        raise DrillFailed("nobody restarts the target", next_step="give --restart-command")
    again = _told(world.hooks.restart, finding)
    with world.job() as job:
        finding.acknowledged = world.last_step
        names = world.begin(job)
        job.flood()
        lost = job.losses()
        again()
        job.goes_on(job.states())
        if lost is not None:
            _restarted(world, job, lost)
        try:
            receipts = job.write()
            job.commit(receipts)
        except NodeError as error:
            if error.kind != SessionLost.__name__:
                raise
            finding.did.append(f"the job ended, since the target forgot who held the volume ({error})")
        else:
            world.acknowledge(names)
            finding.did.append(f"the job went on by itself and saved {world.last_step}")
        again()
        _check(world, finding)


def _followed(
    world: World, finding: Finding, job: Job, how: str, begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """A writer that another one follows in the middle of a save, and that then goes on."""
    finding.acknowledged = world.last_step
    world.begin(job)
    receipts = [state.receipt or "" for state in job.flood()]
    begin()
    counted = world.conflicts()
    try:
        finding.left_alone_bytes = world.take_over(how)
    except WriterActive as active:
        finding.verdict = NOT_TRIED
        finding.problems.append(f"nobody can follow it here while its processes are there ({active})")
        return
    finding.did.append(f"another session took over and saved {world.last_step}")
    media = world.media(job)
    picture = media.look()
    end()
    world.tell("the writer that was followed goes on")
    states = _refused(job, finding)
    kind, said = job.late_commit(receipts)
    finding.late_commit = f"{kind}: {said}" if kind else f"acknowledged ({said})"
    last = job.states()
    finding.refused = sum(state.conflicts for state in last)
    finding.held_back = sum(state.fenced for state in last)
    if counted is not None:
        finding.refused_by_target = (world.conflicts() or 0) - counted
    finding.watched_bytes = media.total_bytes
    finding.moved_bytes = media.moved_bytes(picture, media.look())
    if finding.moved_bytes:
        _moved(world, finding)
    finding.refusals = [f"rank {rank}: {state.said}" for rank, state in enumerate(states) if state.error is not None]
    for rank, state in enumerate(states):
        if state.error is None:
            finding.problem(f"rank {rank} of it was answered as if nothing had happened")
        elif state.error != SessionLost.__name__:
            finding.problem(f"rank {rank} of it ended with {state.error}: {state.said}")
    if kind != SessionLost.__name__:
        finding.problem(f"its commit should have failed with SessionLost, and was {finding.late_commit}")
    _check(world, finding)


def _refused(job: Job, finding: Finding) -> list[State]:
    """How the ranks end that go on writing. One that was refused with another status than a conflict writes once more:
    a target that is just shutting it out (Linux) may have answered that it cannot."""
    states = job.goes_on(job.states())
    for rank, state in enumerate(states):
        if state.error is not None and state.error != SessionLost.__name__:
            finding.notes.append(
                f"a write of rank {rank} failed with {state.said}, which does not say that it was followed"
            )
            states[rank] = job.writes_again(rank)
            if states[rank].error == SessionLost.__name__:
                finding.notes[-1] += "; its next one was refused as it must be"
    return states


def _moved(world: World, finding: Finding) -> None:
    text = f"late writes of the writer that was followed changed {finding.moved_bytes} bytes on the media"
    if finding.left_alone_bytes and world.fence in (UNTIL_RESTART, PERSISTENT):
        text += (
            ": the target did not confirm that it had ended what it had let in before it took the reservation away. "
            f"Who followed knew that, and left {finding.left_alone_bytes} bytes alone, where all of it may land"
        )
    finding.problem(text)


def _check(world: World, finding: Finding) -> None:
    wrong = world.verify()
    for text in wrong:
        finding.problem(text)
    finding.whole = finding.whole is not False and not wrong
    finding.last_step = world.last_step


def _told(hook: Hook, finding: Finding) -> Callable[[], None]:
    def do() -> None:
        hook()
        finding.did.append(f"done: {hook.what}")

    return do


@contextmanager
def _healed(heal: Callable[[], None], finding: Finding) -> Iterator[Callable[[], None]]:
    """What heals a path of the user. If nobody has called it, it is called here, however the scenario ends: what was
    cut is in nobody's way when the drill is over."""
    tried = False

    def end() -> None:
        nonlocal tried
        tried = True
        heal()

    try:
        yield end
    finally:
        if not tried:
            try:
                heal()
            except DrillFailed as error:
                # What ended the scenario counts.
                finding.problems.append(f"the path of the writer may still be cut: {error}")


def _restarted(world: World, job: Job, before: int) -> None:
    """DrillFailed where the job still has every association that it had: then no target has ended, whatever the command
    said."""
    world.tell("the job finds that a target has ended")
    deadline = time.monotonic() + _NOTICED_S
    while (job.losses() or 0) <= before:
        if time.monotonic() >= deadline:
            raise DrillFailed(
                "no target was restarted: the job has lost no association",
                expected=f"one lost within {_NOTICED_S:g} s",
                next_step="give a --restart-command that ends the target and returns when it is about to be back",
            )
        time.sleep(0.1)


def _hold(relays: Sequence[Relay]) -> None:
    """Until a write has come into one of them; then all are silent."""
    for relay in relays:
        relay.hold()
    deadline = time.monotonic() + _HELD_S
    while not any(relay.held.is_set() for relay in relays):
        if time.monotonic() >= deadline:
            raise DrillFailed("no write comes into the path", expected=f"one within {_HELD_S:g} s")
        time.sleep(0.001)
    for relay in relays:
        relay.hold_now()
