"""The scratch volume: who saves to it, who takes it over, and what was acknowledged and must be there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.accidents.processes import Processes
from headrace.accidents.relay import Relay
from headrace.accidents.target import TargetProcess
from headrace.device import NvmeTcpAddress, Portal, parse_address
from headrace.drill.content import content
from headrace.drill.hooks import Hook
from headrace.drill.job import RANKS, Job
from headrace.drill.media import Media
from headrace.drill.report import DrillFailed
from headrace.errors import ConnectRefused, DeviceGone, DeviceTimeout, HeadraceError, ObjectNotFound, WriterActive
from headrace.volume import Session, Volume
from headrace.volume.writing.fence import MACHINE, NODE

PREFIX = "drill/"
#: Steps that a job keeps.
KEPT_STEPS = 2
#: How long a target that was restarted may take to be back, in seconds.
BACK_S = 300.0
_RETRY_S = 0.1
#: To take over, before its refusal is the answer.
_TRIES = 3
#: No keep alive of the target ends the associations of a writer that is stopped, so that it wakes up with commands that
#: it can send at once, and no time-out of its own does. So many beats, too: who follows it waits for five that are
#: missing, and may have to try again.
_LONG_S = 120.0
_LONG_BEATS = 20
#: Whose path is cut lives for a shorter time: there are targets (Linux) that abort nothing, and wait until the
#: association ends that a write is to come from.
_CUT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What only the user can do; each is false where it cannot be done."""

    restart: Hook
    cut: Hook
    heal: Hook


class World:
    def __init__(
        self,
        processes: Processes,
        folder: Path,
        uris: Sequence[str],
        *,
        writer_uris: Sequence[str],
        shard_bytes: int,
        heartbeat_s: float,
        hooks: Hooks,
        target: TargetProcess | None,
        tell: Callable[[str], None],
    ) -> None:
        """`writer_uris`: by which the job reaches the members that is stopped, cut off or killed; all others use
        `uris`. `target`: where it is ours."""
        self.uris = [*uris]
        long_s = max(_LONG_S, _LONG_BEATS * heartbeat_s)
        self.writer_uris = [_living(uri, long_s) for uri in writer_uris]
        #: The same, where its path is cut.
        self.cut_uris = [_living(uri, _CUT_SHARE * long_s) for uri in writer_uris]
        # A target may answer a preemption only when the last association of the writer has ended, which it may find
        # out after twice the keep alive.
        self._taker_uris = [_waiting(uri, 3 * long_s) for uri in uris]
        self.hooks = hooks
        self.tell = tell
        #: As the last session of a job said it.
        self.fence = ""
        self._processes = processes
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._heartbeat_s = heartbeat_s
        self._target = target
        self._jobs = self._steps = 0
        #: The shards of each step that was acknowledged and not deleted since, oldest first.
        self._acknowledged: list[list[str]] = []

    # ---- jobs, and who takes over from them ----

    @contextmanager
    def job(self, uris: Sequence[str] | None = None) -> Iterator[Job]:
        """A job that has saved a step. None of its processes is left."""
        self._jobs += 1
        self.tell("a job of two processes starts, and saves a step")
        job = Job(
            self._processes, self._folder, f"job-{self._jobs}", uris or self.writer_uris, heartbeat_s=self._heartbeat_s
        )
        try:
            self.fence = job.fence
            names, old = self.next_step()
            job.begin(names, self._shard_bytes, old)
            job.commit(job.write())
            self.acknowledge(names)
            yield job
        finally:
            job.kill()

    def next_step(self) -> tuple[list[str], list[str]]:
        """The names of its shards, and of those that it replaces."""
        self._steps += 1
        names = [f"{PREFIX}step-{self._steps:06d}/rank-{rank}" for rank in range(RANKS)]
        return names, [name for step in self._acknowledged[: -KEPT_STEPS + 1] for name in step]

    def acknowledge(self, names: Sequence[str]) -> None:
        self._acknowledged = [*self._acknowledged[-KEPT_STEPS + 1 :], [*names]]

    def forget(self) -> None:
        """The volume was made again, and holds nothing."""
        self._acknowledged = []

    def begin(self, job: Job) -> list[str]:
        """A save of the job that will not end; its shards."""
        names, old = self.next_step()
        job.begin(names, self._shard_bytes, old)
        return names

    def take_over(self, how: str) -> int:
        """Another session, here: it saves a step, and ends. The bytes that it leaves alone, since the targets do not
        say that what the last one had under way has ended. WriterActive where that cannot be followed."""
        self.tell("another session takes over, and saves a step")
        with self.open(write=True) as volume, self._session(volume, how) as session:
            alone = session.quarantined_bytes
            names, old = self.next_step()
            with session.transaction() as tx:
                for name in old:
                    tx.delete(name)
                for name in names:
                    tx.put(name, content(name, self._shard_bytes))
            self.acknowledge(names)
        return alone

    def _session(self, volume: Volume, how: str) -> Session:
        """A last beat may have been under way when its heart was stopped, and a busy machine answers late: neither says
        that the writer lives."""
        for _ in range(_TRIES - 1):
            try:
                return self._session_once(volume, how)
            except (WriterActive, DeviceTimeout):
                # A lock of this machine is not let go while a process lives.
                if self.fence in (MACHINE, NODE):
                    raise
        return self._session_once(volume, how)

    def _session_once(self, volume: Volume, how: str) -> Session:
        return volume.session("headrace drill", takeover=how, heartbeat_s=self._heartbeat_s, unfenced=True)

    @property
    def last_step(self) -> str:
        """The last one that was acknowledged."""
        return self._acknowledged[-1][0].split("/")[1] if self._acknowledged else ""

    # ---- what is there ----

    def open(self, *, write: bool = False) -> Volume:
        """Over new connections; waits for a target that was restarted."""
        deadline = time.monotonic() + BACK_S
        while True:
            try:
                return Volume.open(self._taker_uris if write else self.uris, write=write)
            except (ConnectRefused, DeviceTimeout, DeviceGone):
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    def verify(self) -> list[str]:
        """What is wrong with the steps that were acknowledged, each read whole and held against what it must be."""
        self.tell("every step that was acknowledged is read and compared")
        wrong = []
        expected = {name for step in self._acknowledged for name in step}
        with self.open() as volume:
            there = {info.name for info in volume.list(PREFIX)}
            wrong += [f"{name} was never committed, and is there" for name in sorted(there - expected)]
            for name in sorted(expected):
                try:
                    found = volume.read(name)
                except ObjectNotFound:
                    wrong.append(f"{name} was acknowledged, and is not there")
                    continue
                except HeadraceError as error:
                    wrong.append(f"{name} cannot be read: {error}")
                    continue
                if found != content(name, self._shard_bytes).tobytes():
                    wrong.append(f"{name} holds other bytes than were saved")
        return wrong

    def media(self, job: Job) -> Media:
        with self.open() as volume:
            return Media(self.uris, volume.superblock, job.grants)

    def conflicts(self) -> int | None:
        """What the target has refused for a reservation since it started, where it is ours."""
        return None if self._target is None else sum(_numbers(self._target.status(), "conflicts"))

    # ---- a path that is cut ----

    @contextmanager
    def relayed(self) -> Iterator[tuple[list[str], list[Relay]]]:
        """The job's addresses through relays of ours. DrillFailed where a member is not reached over TCP."""
        with ExitStack() as stack:
            relays: list[Relay] = []
            uris = []
            for uri in self.cut_uris:
                address = parse_address(uri)
                if not isinstance(address, NvmeTcpAddress):
                    raise DrillFailed(
                        "a relay can stand before NVMe/TCP only",
                        where=uri,
                        next_step="give --cut-command and --heal-command",
                    )
                portals = []
                for portal in address.portals:
                    relays.append(stack.enter_context(Relay(portal.port, host=portal.host)))
                    portals.append(Portal("127.0.0.1", relays[-1].port))
                options = replace(address.options, host_traddr=None, host_iface=None)
                uris.append(replace(address, portals=tuple(portals), options=options).uri)
            yield uris, relays


def _living(uri: str, long_s: float) -> str:
    """Its associations live for so long with nothing heard from the host, and nothing of it times out before."""
    address = parse_address(uri)
    if not isinstance(address, NvmeTcpAddress):
        return uri
    options = replace(address.options, keep_alive_s=long_s, io_timeout_s=long_s, loss_timeout_s=BACK_S)
    return replace(address, options=options).uri


def _waiting(uri: str, long_s: float) -> str:
    """A command may take so long."""
    address = parse_address(uri)
    if not isinstance(address, NvmeTcpAddress):
        return uri
    return replace(
        address, options=replace(address.options, io_timeout_s=max(long_s, address.options.io_timeout_s))
    ).uri


def _numbers(said: Any, name: str) -> list[int]:
    """Every count of that name, wherever it stands in a status."""
    if isinstance(said, dict):
        own = [value for key, value in said.items() if key == name and isinstance(value, int)]
        return own + [one for value in said.values() for one in _numbers(value, name)]
    return [one for value in said for one in _numbers(value, name)] if isinstance(said, list) else []
