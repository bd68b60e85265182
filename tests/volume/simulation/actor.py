"""A process of the world, a thread at a time: it stops before each device command until the world lets it go on."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.testing import Accident, Command, HostDevice
from tests.volume.simulation.chain import Violation

if TYPE_CHECKING:
    from tests.volume.simulation.world import World

#: Real time that a step may take: more means that an actor waits for something that is not a device.
STEP_S = 60.0


class Killed(BaseException):
    """SIGKILL, as a process would not feel it: whatever it does to clean up reaches no device."""


class Actor:
    """A thread of a process; the first one is its `main`. `script(actor)` runs when the world lets it."""

    def __init__(self, world: World, name: str, script: Callable[[Actor], None], main: Actor | None = None) -> None:
        self.world = world
        self.name = name
        self.main = main or self
        #: Threads that it started; they are stopped with it, and end with it.
        self.threads: list[Actor] = []
        if main is not None:
            main.threads.append(self)
        #: What it waits for, and the world's time at which it does not any more.
        self._until: Callable[[], bool] | None = None
        self.due: float | None = None
        #: Another session has claimed the volume, and since then it has done nothing but write to the log.
        self.unaware = False
        self.chance = random.Random(world.chance.getrandbits(64))
        self.hostid = uuid.UUID(int=self.chance.getrandbits(128))
        #: The command that it is about to do; None before the first and at a pause.
        self.command: tuple[HostDevice, Command] | None = None
        self.done = False
        self.killed = False
        #: Step until which it is stopped.
        self.asleep_until = 0
        #: A read of it failed since it set this to false.
        self.disturbed = False
        self.failure: BaseException | None = None
        #: All devices that it ever used.
        self._used: set[HostDevice] = set()
        #: Number of its job.
        self.job = int(name.rpartition(" ")[2])
        self._script = script
        self._fate: Accident | BaseException | None = None
        self._gate = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def devices(self, hostid: uuid.UUID | None = None) -> list[HostDevice]:
        """Handles of its own on all members."""
        return [namespace.connect(hostid or self.hostid) for namespace in self.world.namespaces]

    def _run(self) -> None:
        self._gate.acquire()
        try:
            if not self.killed:
                self.world.current[threading.get_ident()] = self
                self._script(self)
        except Killed:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self.world.current.pop(threading.get_ident(), None)
            self.done = True
            self.command = None
            self.world.back.release()

    def writing(self) -> tuple[HostDevice, Command] | None:
        """The write that it is about to do, and that would be let to the medium."""
        if (
            self.command is None
            or self.command[1].verb not in ("write", "deallocate")
            or not self.command[0].may_write()
        ):
            return None
        return self.command

    def arrive(self, device: HostDevice, command: Command) -> Accident | None:
        """Before a device command, on the actor's thread: stop until it is this one's turn."""
        self.command = (device, command)
        self.main._used.add(device)
        self.world.job_of[device] = self.job
        self.world.job_of_host[device.hostid] = self.job
        fate = self._wait()
        if isinstance(fate, BaseException):
            raise fate
        return fate

    def pause(self) -> None:
        """Time passes without a device command."""
        self.command = None
        self._wait()

    def wait(self, until: Callable[[], bool], due: float | None) -> None:
        """Until something is so, which somebody else does, or it is so late; without a device command."""
        self.command = None
        self._until, self.due = until, due
        try:
            self._wait()
        finally:
            self._until = self.due = None

    @property
    def ready(self) -> bool:
        """Has it anything to do, where its process is not stopped?"""
        return self._until is None or self._until() or (self.due is not None and self.due <= self.world.now)

    def _wait(self) -> Accident | BaseException | None:
        if not self.killed:
            self.world.back.release()
            self._gate.acquire()
        if self.killed:
            raise Killed
        fate, self._fate = self._fate, None
        return fate

    def step(self, fate: Accident | BaseException | None = None) -> None:
        """On the world's thread: let it do its command, up to the next one."""
        self._fate = fate
        self._gate.release()
        if not self.world.back.acquire(timeout=STEP_S):
            raise Violation(f"{self.name} waits for something that is no device")

    def kill(self) -> None:
        """Its process."""
        for one in (self.main, *self.main.threads):
            one.end()
        self.main.leave()

    def end(self) -> None:
        if not self.done:
            self.killed = True
            self.step()

    def leave(self) -> None:
        for device in sorted(self._used, key=lambda one: (one.uri, one.hostid)):
            device.lose(cache_lost=self.chance.random() < 0.5)
