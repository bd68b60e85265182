"""Who does the next device command, and what happens to it.

Every process of the world is an `Actor`: a thread with devices of its own, that stops before each device command until
the world lets it go on. One runs at a time, so a seed gives the same run again. What a world does between two commands:
stop an actor for a while (a zombie), kill it, lose a controller, restart a target, let a ghost land, cut the power (in
a copy: the world goes on).
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from headrace.errors import CommandFailed, DeviceGone
from headrace.testing import Accident, Command, HostDevice, Quirks, SharedNamespace
from headrace.units import MIB
from headrace.volume.layout import ALIGN, AreaHeader, RecordHead, Superblock
from tests.volume.simulation.actor import Actor
from tests.volume.simulation.chain import Chain, Violation
from tests.volume.simulation.weather import TARGETS, Weather

#: Time that a step takes, in the world.
STEP_TIME_S = 0.001


def quiet_s(seed: int) -> float:
    """So long after a host was shut out something of it may land: some worlds are short for it, others are not."""
    return (0.5, 2.0)[seed % 2]


@dataclass
class World:
    seed: int
    members: int = 2
    block_bytes: int = 4096
    trace: bool = False
    #: In place of what the seed would choose.
    storm: tuple[Weather, Quirks] | None = None

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.quirks = self.chance.choice(TARGETS)
        self.weather = Weather.of(self.chance)
        if self.storm is not None:
            self.weather, self.quirks = self.storm
        self.weather = replace(self.weather)
        # Small, so that space is used again.
        size_bytes = self.chance.choice((1, 1, 2)) * MIB + 2 * self.weather.log_bytes
        self.namespaces = [
            SharedNamespace(size_bytes, block_bytes=self.block_bytes, quirks=self.quirks) for _ in range(self.members)
        ]
        for namespace in self.namespaces:
            namespace.observer = self._observe
            namespace.on_write = partial(self._wrote, namespace)
        self.chain = Chain()
        self.actors: list[Actor] = []
        self.current: dict[int, Actor] = {}
        self.back = threading.Semaphore(0)
        self.steps = 0
        #: Seconds.
        self.now = 0.0
        #: Of the volume: where its structures are.
        self.superblock: Superblock | None = None
        #: Jobs that said in the heartbeat block that the volume is theirs, in that order, and when.
        self.claims: dict[int, float] = {}
        #: Of each of these: the members that it has.
        self.there: dict[int, set[int]] = {}
        self.quiet_s = quiet_s(self.seed)
        #: Session -> when its beats were written.
        self.beats: dict[int, list[float]] = {}
        #: Step until which a member does not answer.
        self._away = [0] * self.members
        #: The member, thus the copy, that bytes are flipped on, or that is missing.
        self.fragile = self.chance.randrange(self.members)
        #: The last session goes on without it.
        self.degraded = False
        self._rotten_nodes = 0
        #: What was written to the log: (member, offset) -> a record.
        self._records: dict[tuple[int, int], bytes] = {}
        #: Sessions that are on their way in.
        self.opening: set[Actor] = set()
        #: Of sessions, in the order in which they opened.
        self._sessions: list[int] = []
        self.calm = False
        self.log = [f"targets: {self.quirks}"]
        #: What happened, to see that a run was worth something.
        self.counts: dict[str, int] = {}
        #: Called with copies of the namespaces as a power cut leaves them, and the last state that must be there.
        self.after_cut: Callable[[list[SharedNamespace], int], None] | None = None
        self.job_of: dict[HostDevice, int] = {}
        self.job_of_host: dict[uuid.UUID, int] = {}
        self._late: int | None = None
        self._lengths: set[int] = set()

    # ---- for actors ----

    def spawn(self, name: str, script: Callable[[Actor], None], main: Actor | None = None) -> Actor:
        actor = Actor(self, name, script, main)
        self.actors.append(actor)
        return actor

    def fresh_length(self, chance: random.Random, most: int) -> int:
        while True:
            length = chance.randrange(1, most)
            if length not in self._lengths:
                self._lengths.add(length)
                return length

    def opened(self, number: int) -> None:
        """Job `number` has a session."""
        oldest = self._sessions[-1] if self._sessions else 0
        self._sessions.append(number)
        if self.weather.data_only:
            # Rules about data are needed soon: late writes live as long as they may, but for one session.
            for namespace in self.namespaces:
                namespace.ghosts = [ghost for ghost in namespace.ghosts if self.job_of.get(ghost.device, 0) >= oldest]

    def _expire(self) -> None:
        """What was let to a medium ends there, or has landed, some time after its host was shut out, also where no
        target says so (`docs/volume-format.md`, "Ghosts")."""
        if self.weather.data_only:
            return
        for index, namespace in enumerate(self.namespaces):
            # Who goes on without a member shuts nobody out there.
            quiet = [
                job
                for job, since in self.claims.items()
                if self.now - since > self.quiet_s and index in self.there[job]
            ]
            namespace.ghosts = [
                ghost for ghost in namespace.ghosts if self.job_of.get(ghost.device, 0) >= max(quiet, default=0)
            ]

    def _wrote(self, namespace: SharedNamespace, host: uuid.UUID) -> None:
        job = self.job_of_host.get(host)
        if self.degraded and namespace is self.namespaces[self.fragile]:
            return  # Who goes on without a member keeps nobody out there.
        # Without reservations nobody is kept out: what may come of that is looked at (`_excused`).
        if self.fenced and job in self._sessions[:-1]:
            self._late = job

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def say(self, text: str) -> None:
        line = f"{self.steps:5} {text}"
        self.log.append(line)
        if self.trace:
            print(line, flush=True)

    def _observe(self, device: HostDevice, command: Command) -> Accident | None:
        actor = self.current.get(threading.get_ident())
        return None if actor is None else actor.arrive(device, command)

    @property
    def fenced(self) -> bool:
        return not self.quirks.no_reservations

    @property
    def _ghosts(self) -> bool:
        drains = self.fenced and not (self.quirks.fences_without_draining or self.quirks.refuses_abort)
        return self.weather.ghosts and (drains or self.weather.undrained_ghosts)

    # ---- one step ----

    def alive(self, prefix: str = "") -> list[Actor]:
        return [actor for actor in self.actors if not actor.done and actor.name.startswith(prefix)]

    def _stopped(self, actor: Actor) -> bool:
        return not self.calm and actor.main.asleep_until > self.steps

    def _awake(self) -> list[Actor]:
        return [actor for actor in self.alive() if actor.ready and not self._stopped(actor)]

    def _pass_time(self) -> list[Actor]:
        """Nobody has anything to do: it becomes so late that somebody has."""
        for _ in range(2):
            due = [one.due for one in self.alive() if one.due is not None and not self._stopped(one)]
            if due:
                self.now = max(self.now, min(due))
            if awake := self._awake():
                return awake
            for actor in self.alive():
                actor.asleep_until = 0
        return self._awake()

    def step(self, last: Actor | None = None) -> Actor | None:
        """One command of somebody, and perhaps a misfortune before it. Returns who it was."""
        self.steps += 1
        self.now += STEP_TIME_S
        self._expire()
        if not self.calm:
            self._misfortune()
        awake = self._awake() or self._pass_time()
        if not awake:
            if left := self.alive():
                raise Violation(f"these wait for each other: {[actor.name for actor in left]}")
            return None
        # Who waited for a time gets its turn soon. Mostly the same again, so that the others see it at every distance,
        # and not only in lockstep.
        late = [actor for actor in awake if actor.due is not None]
        if late and self.chance.random() < 0.5:
            actor = late[0]
        else:
            actor = last if last in awake and self.chance.random() < 0.8 else self.chance.choice(awake)
        assert actor is not None
        if self._excused(actor):
            return actor
        fate = self._fate_of(actor)
        done = actor.command
        self.say(f"{actor.name} {_words(self, actor.command)}{'' if fate is None else f'   !! {fate!r}'}")
        actor.step(fate)
        self._look_at(actor, done)
        self._check(actor)
        if actor.done and actor.main is actor:
            for one in actor.threads:
                one.end()
                self._check(one)
        return actor

    def _fate_of(self, actor: Actor) -> Accident | BaseException | None:
        if self.calm or actor.command is None:
            return None
        device, command = actor.command
        chance, weather = self.chance, self.weather
        if self._away[self.namespaces.index(device.namespace)] > self.steps:
            actor.main.disturbed |= command.verb == "read"
            return DeviceGone(f"{command.verb} failed", where=device.uri, found="nobody answers")
        if chance.random() < weather.fail_command and command.verb in ("read", "write", "flush"):
            self.count("failed command")
            actor.main.disturbed |= command.verb == "read"
            return CommandFailed(f"{command.verb} failed", where=device.uri, found="Internal Error")
        if chance.random() < weather.lose_answer:
            self.count("lost answer")
            ghost = chance.choice((None, "admitted", "unchecked")) if self._ghosts else None
            given_up = chance.random() < weather.given_up
            if not given_up and not weather.resent_ghosts:
                ghost = None
            actor.main.disturbed |= given_up and command.verb == "read"
            return Accident(
                landed=chance.random() < 0.5,
                ghost=ghost,
                given_up=given_up,
                cache_lost=chance.random() < 0.7,
            )
        return None

    def _misfortune(self) -> None:
        chance, weather = self.chance, self.weather
        if chance.random() < weather.stop and (awake := self._awake()):
            actor = chance.choice(awake).main
            actor.asleep_until = self.steps + chance.choice((3, 30, 300, 1000))
            self.say(f"{actor.name} is stopped until {actor.asleep_until}")
        if weather.stop_in_log:
            for actor in self._awake():
                if self._writes_log(actor) and chance.random() < weather.stop_in_log:
                    actor.main.asleep_until = self.steps + 1000
                    self.say(f"{actor.main.name} is stopped before {_words(self, actor.command)}")
        if chance.random() < weather.kill and (alive := self.alive()):
            actor = chance.choice(alive).main
            self.say(f"{actor.name} is killed before {_words(self, actor.command)}")
            self.count("killed")
            for one in (actor, *actor.threads):
                self.leave_behind(one)
            actor.kill()
            self._check(actor)
        if chance.random() < weather.restart:
            several = chance.choice((chance.sample(self.namespaces, 1), self.namespaces))
            for namespace in several:
                self.say(f"target of member {self.namespaces.index(namespace)} restarts")
                self.count("restart")
                namespace.restart(caches_lost=chance.random() < 0.8, ghosts_lost=chance.random() < 0.7)
        if chance.random() < weather.early:
            # A write under way may be read before it is durable, and be lost after all.
            for actor in self.alive():
                if (write := actor.writing()) is not None:
                    device, command = write
                    self.say(f"{actor.name}: what it writes is seen already")
                    device.show_early(command)
        if chance.random() < weather.land:
            for index, namespace in enumerate(self.namespaces):
                if namespace.ghosts:
                    ghost = chance.choice(namespace.ghosts)
                    landed = namespace.land(ghost)
                    self.count("ghost landed" if landed else "ghost refused")
                    self.say(f"ghost at member {index} {ghost.offset}+{len(ghost.data)} landed: {landed}")
        if weather.away and chance.random() < weather.away:
            index = chance.randrange(self.members)
            self._away[index] = self.steps + chance.choice((30, 300))
            self.say(f"member {index} is away until {self._away[index]}")
            self.count("away")
        if weather.rot and chance.random() < weather.rot:
            self._rot()
        if chance.random() < weather.cut and self.after_cut is not None:
            self.count("power cut")
            self.cut()

    # ---- structures ----

    def _in_log(self, member: int, offset: int) -> int | None:
        """In which area of a log copy, if any."""
        assert self.superblock is not None
        for copy in range(2):
            if self.superblock.log_member[copy] == member:
                for area in range(self.superblock.area_count):
                    start = self.superblock.area_offset(copy, area)
                    if start <= offset < start + self.superblock.area_bytes:
                        return area
        return None

    def _area_in_force(self) -> int:
        assert self.superblock is not None
        best = (-1, 0)
        for area in range(self.superblock.area_count):
            for copy in range(2):
                namespace = self.namespaces[self.superblock.log_member[copy]]
                data = namespace.read(self.superblock.area_offset(copy, area), ALIGN)
                header = AreaHeader.decode(data, self.superblock.volume_id, area)
                if header is not None:
                    best = max(best, (header.generation, area))
        return best[1]

    def _excused(self, actor: Actor) -> bool:
        """Without reservations two things are not safe (`docs/volume-format.md`, 6.1): a write to the log by a session
        that was stopped between its look and the write, for so long that the log moved back to there; and a write of
        data after two sessions. They do not happen here: the process dies before."""
        if self.fenced or actor.command is None or actor.command[1].verb not in ("write", "deallocate"):
            return False
        device, command = actor.command
        area = self._in_log(self.namespaces.index(device.namespace), command.offset)
        later = sum(actor.job < job for job in self.claims)
        if area is None:
            unsafe = later > 1 and not self._is_beat(device, command)
        else:
            unsafe = bool(later) and actor.unaware and area == self._area_in_force()
        if unsafe:
            self.count("excused")
            self.say(f"{actor.name} would do what is not safe, and dies: {_words(self, actor.command)}")
            actor.kill()
        return unsafe

    def _writes_log(self, actor: Actor) -> bool:
        if actor.command is None or actor.command[1].verb != "write" or actor.main is not actor:
            return False
        device, command = actor.command
        return self._in_log(self.namespaces.index(device.namespace), command.offset) is not None

    @property
    def _volume_id(self) -> bytes:
        assert self.superblock is not None
        return self.superblock.volume_id

    def _block_of(self, index: int, area: int, offset: int) -> int:
        assert self.superblock is not None
        copy = self.superblock.log_member.index(index)
        return (offset - self.superblock.area_offset(copy, area)) // ALIGN

    def _is_beat(self, device: HostDevice, command: Command) -> bool:
        assert self.superblock is not None
        places = zip(self.superblock.log_member, self.superblock.log_offset, strict=True)
        return (self.namespaces.index(device.namespace), command.offset) in places

    def _look_at(self, actor: Actor, done: tuple[HostDevice, Command] | None) -> None:
        """What somebody just did: who claims, and who has not seen it yet."""
        if done is None or self.superblock is None:
            return
        device, command = done
        if command.verb == "write" and self._is_beat(device, command):
            if not self.claims or actor.job > max(self.claims):
                self.claims[actor.job] = self.now
                self.there[actor.job] = {self.namespaces.index(used.namespace) for used in actor.main._used}
                for other in self.alive():
                    other.unaware |= other.job < actor.job
            return
        index = self.namespaces.index(device.namespace)
        if command.verb != "write" or (area := self._in_log(index, command.offset)) is None:
            actor.unaware = False
        elif not self.weather.fail_command and not self.weather.away and not self.weather.rot:
            self._check_log(actor, index, area, command)

    def _check_log(self, actor: Actor, index: int, area: int, command: Command) -> None:
        """I1: what stands in the log once is not changed before the log comes back to that area."""
        head = RecordHead.decode(command.data, self._volume_id, self._block_of(index, area, command.offset))
        if head is None or self.namespaces[index].read(command.offset, command.length) != command.data:
            return
        # A copy is rebuilt many records at once.
        record = command.data[: head.blocks * ALIGN]
        before = self._records.get((index, command.offset))
        if before is not None and before != record and before[32:40] == record[32:40]:
            raise Violation(f"{actor.name} changed a record of the log: member {index} offset {command.offset}")
        self._records[index, command.offset] = record

    def _rot(self) -> None:
        """One byte of a copy of a structure that stands on another member, too."""
        assert self.superblock is not None
        chance, index = self.chance, self.fragile
        namespace, superblock = self.namespaces[index], self.superblock
        copy = superblock.log_member.index(index)
        area = superblock.area_offset(copy, self._area_in_force())
        row = superblock.members[index]
        nodes = range(row.data_offset, row.data_end, ALIGN)
        kind = chance.choice(("superblock", "heartbeat", "header", "record", "record", "node"))
        if kind == "node":
            # Where space is short both copies of a table are on one member.
            found = [at for at in nodes if namespace.read(at, 4) == b"HRTN"]
            if not found or self._rotten_nodes:
                return
            self._rotten_nodes += 1
            block = chance.choice(found)
        else:
            block = {
                "superblock": (0, superblock.members[index].size_bytes - ALIGN)[self.seed % 2],
                "heartbeat": superblock.log_offset[copy],
                "header": area,
                "record": area + ALIGN * chance.randrange(1, 24),
            }[kind]
        if namespace.rot(block + chance.randrange(ALIGN), 1 << chance.randrange(8)):
            self.count(f"rot of a {kind}")
            self.say(f"a byte of a {kind} is flipped: member {index}, block at {block}")

    def leave_behind(self, actor: Actor) -> None:
        """What a dead process had under way may still land."""
        if (write := actor.writing()) is None or not self._ghosts:
            return
        device, command = write
        if self.chance.random() < 0.5:
            device.leave_ghost(command, admitted=self.chance.random() < 0.5)

    def cut(self) -> None:
        """Look at what is left if the power fails now, whatever was under way having done any part of its work."""
        assert self.after_cut is not None
        in_flight: dict[int, list[tuple[int, bytes]]] = {}
        for actor in self.alive():
            if (write := actor.writing()) is not None:
                device, command = write
                in_flight.setdefault(self.namespaces.index(device.namespace), []).append((command.offset, command.data))
        choose = self.chance.choice((lambda count: 0, lambda count: count - 1, self.chance.randrange))
        left = []
        for index, namespace in enumerate(self.namespaces):
            writes = in_flight.get(index, [])
            left.append(namespace.power_cut(choose, in_flight=self.chance.choice([None, *writes])))
        self.after_cut(left, self.chain.last)

    def _check(self, actor: Actor) -> None:
        if actor.failure is not None:
            raise actor.failure
        if self._late is not None:
            raise Violation(f"session of job {self._late} wrote after {self._sessions[-1]} had taken over")
        for index, namespace in enumerate(self.namespaces):
            if namespace.overwrites:
                found = namespace.overwrites[0]
                raise Violation(
                    f"{actor.name} wrote other bytes to member {index} offset {found.offset}, "
                    f"where an older command of host {found.ghost.host} may still land"
                )

    # ---- the end ----

    def end(self) -> None:
        """Kill whoever is left."""
        for actor in self.alive():
            if not actor.done:
                actor.kill()
        for namespace in self.namespaces:
            namespace.observer = None

    def settle(self, limit: int) -> None:
        """No more misfortune: everybody wakes up and comes to an end."""
        self.calm = True
        for _ in range(limit):
            if self.step() is None:
                return
        raise Violation(f"these do not come to an end: {[actor.name for actor in self.alive()]}")


def _words(world: World, what: tuple[HostDevice, Command] | None) -> str:
    if what is None:
        return "goes on"
    device, command = what
    member = world.namespaces.index(device.namespace)
    fua = " fua" if command.fua else ""
    return f"{command.verb}{fua} member {member} {command.offset}+{command.length}"
