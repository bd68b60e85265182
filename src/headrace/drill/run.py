"""The drill: a scratch volume, each accident in its turn, the report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.accidents.processes import ChildFailed, Processes
from headrace.accidents.target import TargetProcess
from headrace.device import FileAddress, parse_address
from headrace.drill import scenarios
from headrace.drill.hooks import Ask, Hook
from headrace.drill.job import NodeError
from headrace.drill.report import NOT_TRIED, TRUSTED, DrillFailed, Finding, Report, lines_of
from headrace.drill.world import Hooks, World
from headrace.errors import HeadraceError, UsageError
from headrace.units import MIB, format_bytes
from headrace.volume import Volume
from headrace.volume.create import plan_volume
from headrace.volume.media.members import close_all, open_all

SCENARIOS: dict[str, Callable[[World, Finding], None]] = {
    "freeze": scenarios.freeze,
    "cut": scenarios.cut,
    "takeover": scenarios.takeover,
    "restart": scenarios.restart,
    "kill": scenarios.kill,
}
#: A volume of this name is the drill's own, and may be made again.
NAME = "headrace drill"
_NQNS = ("nqn.2026-01.io.headrace:drill-a", "nqn.2026-01.io.headrace:drill-b")
#: Steps that are kept, one that a job does not end, one of who takes over, and space that late writes may still hit: of
#: two shards each.
_SHARDS = 12
#: The target of its own has this long to start, also on a busy machine.
_START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class DrillOptions:
    #: Members of the scratch volume. None: a target of the drill's own.
    uris: Sequence[str] = ()
    #: By which the job that has the accidents reaches the same members, in the same order; none: by `uris`.
    writer_uris: Sequence[str] = ()
    scenarios: Sequence[str] = tuple(SCENARIOS)
    rounds: int = 1
    #: Of each of two processes, in each save.
    shard_bytes: int = 8 * MIB
    #: Of every session. A job is followed when it has missed five beats.
    heartbeat_s: float = 1.0
    #: Destroy what the members hold.
    destroy: bool = False
    #: For the shell.
    restart_command: str | None = None
    cut_command: str | None = None
    heal_command: str | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.scenarios if name not in SCENARIOS]
        if unknown or not self.scenarios:
            raise UsageError("no such scenario", expected=", ".join([*SCENARIOS, "all"]), found=", ".join(unknown))
        for name, value, low, high in (
            ("rounds", self.rounds, 1, 10_000),
            ("shard_bytes", self.shard_bytes, 64 << 10, 16 << 30),
            ("heartbeat_s", self.heartbeat_s, 0.05, 60),
        ):
            if not low <= value <= high:
                raise UsageError(f"DrillOptions.{name}", expected=f"{low:g} to {high:g}", found=f"{value:g}")
        if self.writer_uris and len(self.writer_uris) != len(self.uris):
            raise UsageError(
                "the writer's addresses", expected=f"one for each of {len(self.uris)} members",
                found=str(len(self.writer_uris)),
            )  # fmt: skip
        if (self.cut_command is None) != (self.heal_command is None):
            raise UsageError("a command that cuts, and one that heals", expected="both", found="one of them")


def run_drill(
    options: DrillOptions, *, tell: Callable[[str], None], say: Callable[[str], None], ask: Ask | None = None
) -> Report:
    """`tell`: what is being done now. `say`: a line that stays. `ask`: somebody who can restart a target by hand.

    UsageError: the members hold something, or are no members. Else what goes wrong is in the report.
    """
    findings = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-drill-")))
        processes = stack.enter_context(Processes())
        uris, target = [*options.uris], None
        if not uris:
            tell("a target starts on this machine")
            target = TargetProcess(
                processes,
                {nqn: folder / f"{nqn[-1]}.img" for nqn in _NQNS},
                max(24 * MIB, 8 * options.shard_bytes),
                log=folder / "target.log",
                start_timeout_s=_START_S,
            )
            target.start()
            uris = target.uris
        _scratch(uris, options.destroy, options.shard_bytes)
        uris = [_without_create(uri) for uri in uris]
        world = World(
            processes,
            folder,
            uris,
            writer_uris=[_without_create(uri) for uri in options.writer_uris] or uris,
            shard_bytes=options.shard_bytes,
            heartbeat_s=options.heartbeat_s,
            hooks=_hooks(options, target, ask),
            target=target,
            tell=tell,
        )
        #: Why no scenario can be tried any more.
        broken = ""
        for _ in range(options.rounds):
            for name in options.scenarios:
                findings.append(_try(world, name) if not broken else _not_tried(name, broken))
                for line in lines_of(findings[-1]):
                    say(line)
                if findings[-1].verdict != TRUSTED and not broken:
                    # Two may have written, or a commit was left half way: what the next one finds must be its own.
                    broken = _again_scratch(uris, options.shard_bytes)
                    world.forget()
        return Report(uris=uris, fence=world.fence, findings=findings)


def _try(world: World, name: str) -> Finding:
    finding = Finding(scenario=name)
    began = time.monotonic()
    try:
        SCENARIOS[name](world, finding)
    except UsageError:
        raise
    except NodeError as error:
        finding.problem(f"the job failed with {error.kind}: {error}")
    except (ChildFailed, DrillFailed) as error:
        # What was found before stays found.
        finding.verdict = NOT_TRIED if finding.verdict == TRUSTED else finding.verdict
        finding.problems.append(str(error))
    except HeadraceError as error:
        finding.problem(f"it came to {type(error).__name__}: {error}")
    finding.seconds = round(time.monotonic() - began, 3)
    return finding


def _not_tried(name: str, why: str) -> Finding:
    return Finding(scenario=name, verdict=NOT_TRIED, problems=[why])


def _again_scratch(uris: Sequence[str], shard_bytes: int) -> str:
    """The volume, made anew; why that cannot be done, or nothing. What was found before is told all the same."""
    try:
        _scratch(uris, True, shard_bytes)
    except HeadraceError as error:
        return f"the scratch volume cannot be made again: {error}"
    return ""


def _hooks(options: DrillOptions, target: TargetProcess | None, ask: Ask | None) -> Hooks:
    restart = Hook("restart the target", options.restart_command, ask)
    if target is not None:
        restart = Hook(
            "kill the target (SIGKILL: what it had not flushed is gone) and start it again", do=lambda: _again(target)
        )
    return Hooks(
        restart=restart,
        cut=Hook("cut the path of the writer", options.cut_command),
        heal=Hook("heal the path of the writer", options.heal_command),
    )


def _again(target: TargetProcess) -> None:
    target.kill()
    target.start()


def _scratch(uris: Sequence[str], destroy: bool, shard_bytes: int) -> None:
    """Make the volume. UsageError where there is no room for what jobs will save, and where something is there that is
    not the drill's own, unless that is given up: then nothing was written. WriterActive where another drill is at it.
    """
    _room(uris, shard_bytes)
    # They are there now.
    uris = [_without_create(uri) for uri in uris]
    try:
        Volume.create(uris, name=NAME, force=destroy).close()
    except UsageError:
        if destroy or not _own(uris):
            raise
        # Not of a drill that is still going on.
        with Volume.open(uris, write=True) as volume, volume.session(NAME, takeover="if-dead", unfenced=True):
            pass
        Volume.create(uris, name=NAME, force=True).close()


def _room(uris: Sequence[str], shard_bytes: int) -> None:
    """UsageError where it is too little, whatever the members hold."""
    devices = open_all(uris, read_only=False)
    try:
        plan = plan_volume(devices, name=NAME, stripe_bytes=MIB, log_bytes=None, force=True)
    finally:
        close_all(devices)
    free, need = sum(member.data_end - member.data_offset for member in plan[0].members), _SHARDS * shard_bytes
    if free < need:
        raise UsageError(
            "the members are too small for the drill", where=", ".join(uris),
            expected=f"room for {format_bytes(need)}", found=format_bytes(free),
            next_step="give larger ones, or a smaller --size",
        )  # fmt: skip


def _without_create(uri: str) -> str:
    address = parse_address(uri)
    return replace(address, create_bytes=None).uri if isinstance(address, FileAddress) else uri


def _own(uris: Sequence[str]) -> bool:
    try:
        with Volume.open(uris) as volume:
            return volume.name == NAME
    except HeadraceError:
        return False
