"""The model of a shared namespace is true: the same tests run over it and over our target, by NVMe/TCP."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.accidents.relay import Relay
from headrace.device import BlockDevice, NativeDevice, ReservationReport, ReservationType, open_device
from headrace.errors import (
    CommandFailed,
    DeviceTimeout,
    HeadraceError,
    OutcomeUnknown,
    ReservationConflict,
    UsageError,
)
from headrace.testing import Accident, Command, HostDevice, Quirks, SharedNamespace
from headrace.testing.serve import ServeProcess, free_port, serving
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:shared"
SIZE = 4 << 20
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS
OLD, NEW = bytes([1]) * 4096, bytes([2]) * 4096

Device = NativeDevice | HostDevice


class ModelRig:
    """Hosts on the model."""

    def __init__(self) -> None:
        self.namespace = SharedNamespace(SIZE)

    def connect(self, hostid: uuid.UUID | None = None) -> HostDevice:
        return self.namespace.connect(hostid)

    def lose(self, device: Device) -> None:
        assert isinstance(device, HostDevice)
        device.lose(cache_lost=False)

    def restart(self) -> None:
        self.namespace.restart()

    def close(self) -> None:
        pass


class TargetRig:
    """Hosts on our target in a process of its own, over a file, with a volatile cache. Each has a path of its own."""

    def __init__(self, folder: Path) -> None:
        self._media = f"{folder / 'media'}:{SIZE}"
        self._port = free_port()
        self._target = ExitStack()
        self._opened = ExitStack()
        self._relays: dict[int, Relay] = {}
        self._start()

    def _start(self) -> None:
        options = ["--volatile-cache", str(SIZE)]
        self.process: ServeProcess = self._target.enter_context(
            serving(NQN, self._media, port=self._port, options=options)
        )

    def connect(self, hostid: uuid.UUID | None = None) -> NativeDevice:
        relay = self._opened.enter_context(Relay(self._port))
        uri = self.process.uri(loss_timeout=60, keepalive=5).replace(f":{self._port}/", f":{relay.port}/")
        device = self._opened.enter_context(open_device(uri, hostid=hostid or uuid.uuid4()))
        self._relays[id(device)] = relay
        return device

    def lose(self, device: Device) -> None:
        assert isinstance(device, NativeDevice)
        relay = self._relays[id(device)]
        relay.cut()
        until(lambda: device.describe()["state"] != "connected")
        relay.heal()

    def restart(self) -> None:
        self.process.process.kill()
        self._target.close()
        self._target = ExitStack()
        self._start()

    def close(self) -> None:
        self._opened.close()
        self._target.close()


Rig = ModelRig | TargetRig


@pytest.fixture(params=["model", "target"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made: Rig = ModelRig() if request.param == "model" else TargetRig(tmp_path)
    yield made
    made.close()


def block(device: BlockDevice, offset: int = 0) -> bytes:
    found = np.zeros(4096, np.uint8)
    device.read_into(offset, found)
    return found.tobytes()


def test_who_may_write(rig: Rig) -> None:
    one, two = uuid.uuid4(), uuid.uuid4()
    first, second, reader = rig.connect(one), rig.connect(two), rig.connect()
    assert isinstance(first, BlockDevice)
    assert first.reservations.capabilities.types == frozenset(ReservationType)
    assert first.reservations.capabilities.persist and first.volatile_cache
    first.reservations.register(11)
    first.reservations.acquire(11, SHARED)
    first.write(0, OLD)
    for refused in (lambda: second.write(0, NEW), second.flush, lambda: second.deallocate(0, 4096)):
        with pytest.raises(ReservationConflict):
            refused()
    assert block(second) == OLD
    # Another process of the same host is the same registrant.
    rig.connect(one).write(4096, OLD)
    second.reservations.register(22)
    second.write(0, NEW)
    second.reservations.preempt(22, 11, SHARED)
    with pytest.raises(ReservationConflict):
        first.write(0, OLD)
    report = reader.reservations.report()
    assert [(found.hostid, found.key, found.holds) for found in report.registrants] == [(two, 22, True)]
    assert (report.type, report.persistent) == (SHARED, False)
    assert block(reader) == NEW


def test_an_unflushed_write_is_lost_and_a_later_flush_succeeds(rig: Rig) -> None:
    device = rig.connect()
    device.write(0, OLD)
    device.flush()
    before = device.loss_count()
    device.write(0, NEW)
    device.write(4096, NEW, fua=True)
    rig.restart()
    device.flush()
    assert device.loss_count() > before
    assert (block(device), block(device, 4096)) == (OLD, NEW)


def test_a_lost_association_is_counted_and_made_again(rig: Rig) -> None:
    device = rig.connect()
    device.write(0, OLD)
    rig.lose(device)
    device.write(4096, NEW)
    device.flush()
    assert device.loss_count() == 1 and (block(device), block(device, 4096)) == (OLD, NEW)
    assert device.unsettled() == [] and device.settle(1) == 0


@pytest.mark.parametrize("persist", [False, True])
def test_what_a_restart_forgets(rig: Rig, persist: bool) -> None:
    holder, stranger = rig.connect(), rig.connect()
    holder.reservations.register(11, persist=persist)
    holder.reservations.acquire(11, SHARED)
    rig.restart()
    report = stranger.reservations.report()
    assert (report.type, report.persistent, report.registered) == ((SHARED, True, 1) if persist else (None, False, 0))
    if persist:
        with pytest.raises(ReservationConflict):
            stranger.write(0, NEW)
        holder.write(0, OLD)
    else:
        stranger.write(0, NEW)


def test_the_guard_asks_after_a_restart(rig: Rig) -> None:
    """Preempted, then forgotten by the target: the target would let it write, and the guard does not."""
    zombie, taker = rig.connect(), rig.connect()
    zombie.reservations.register(11)
    zombie.reservations.acquire(11, SHARED)
    zombie.guard_writes(11, SHARED)
    zombie.write(0, OLD)
    zombie.flush()
    taker.reservations.register(22)
    taker.reservations.preempt(22, 11, SHARED)
    rig.restart()
    for refused in (lambda: zombie.write(0, NEW), zombie.flush, lambda: zombie.deallocate(0, 4096)):
        with pytest.raises(ReservationConflict, match="fenced"):
            refused()
    assert zombie.describe()["guard"]["state"] == "fenced"
    zombie.reservations.register(33)
    with pytest.raises(ReservationConflict, match="fenced"):
        zombie.write(0, NEW)
    assert block(zombie) == OLD
    zombie.unguard_writes()
    zombie.write(0, NEW)
    assert zombie.describe()["guard"] == {"state": "off"}


def test_the_guard_asks_after_a_new_association(rig: Rig) -> None:
    holder, taker = rig.connect(), rig.connect()
    holder.reservations.register(11)
    holder.reservations.acquire(11, SHARED)
    holder.guard_writes(11, SHARED)
    rig.lose(holder)
    holder.write(0, OLD)
    taker.reservations.register(22)
    # Registered, but the reservation that it wrote under is another's.
    taker.reservations.preempt(22, 11, SHARED)
    holder.reservations.register(11)
    holder.write(0, NEW)
    rig.lose(holder)
    with pytest.raises(ReservationConflict, match="fenced"):
        holder.write(0, OLD)
    assert block(holder) == NEW


@pytest.mark.parametrize("wrong", ["key", "type", "nothing"])
def test_a_guard_that_does_not_pass_at_once(rig: Rig, wrong: str) -> None:
    device = rig.connect()
    if wrong != "nothing":
        device.reservations.register(11)
        device.reservations.acquire(11, SHARED)
    guarded = ReservationType.WRITE_EXCLUSIVE if wrong == "type" else SHARED
    with pytest.raises(ReservationConflict, match="fenced"):
        device.guard_writes(12 if wrong == "key" else 11, guarded)
    with pytest.raises(ReservationConflict, match="fenced"):
        device.write(0, NEW)
    block(device)


# ---- every verb, in any order ----------------------------------------------------------------------------------------

KEYS = (11, 22, 33)


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (ReservationConflict, CommandFailed, UsageError) as error:
        return type(error).__name__
    return "done"


def any_verb(chance: random.Random) -> Callable[[Device], str]:
    key, other, kind = chance.choice(KEYS), chance.choice((0, *KEYS)), chance.choice(list(ReservationType))
    persist = chance.choice((None, None, False, True))
    verbs: list[Callable[[Device], object]] = [
        lambda device: device.reservations.register(key, persist=persist),
        lambda device: device.reservations.register(key, persist=persist),
        lambda device: device.reservations.register(key, ignore_existing=True),
        lambda device: device.reservations.register(key, replace=other or 1),
        lambda device: device.reservations.unregister(key),
        lambda device: device.reservations.acquire(key, kind),
        lambda device: device.reservations.acquire(key, kind),
        lambda device: device.reservations.preempt(key, other, kind),
        lambda device: device.reservations.preempt(key, other, kind, abort=False),
        lambda device: device.reservations.release(key, kind),
        lambda device: device.reservations.clear(key),
        lambda device: device.write(0, OLD),
        lambda device: block(device),
        lambda device: device.flush(),
    ]
    weights = [3, 3, 1, 1, 1, 3, 3, 3, 1, 2, 1, 4, 2, 1]
    verb = chance.choices(verbs, weights)[0]
    return lambda device: outcome(lambda: verb(device))


def said(report: ReservationReport) -> tuple[Any, ...]:
    return report.type, report.persistent, report.registered, sorted(report.registrants, key=lambda r: r.hostid)


def test_every_verb_does_what_the_target_does(tmp_path: Path) -> None:
    target = TargetRig(tmp_path)
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    try:
        model = SharedNamespace(SIZE)
        hosts = [uuid.UUID(int=chance.getrandbits(128)) for _ in range(3)]
        real = [target.connect(host) for host in hosts]
        fake = [model.connect(host) for host in hosts]
        seen = set()
        for step in range(600):
            who, verb = chance.randrange(3), any_verb(chance)
            answers = verb(real[who]), verb(fake[who])
            seen.add(answers[0])
            assert answers[0] == answers[1], f"seed {seed}, step {step}"
            reports = real[0].reservations.report(), fake[0].reservations.report()
            assert said(reports[0]) == said(reports[1]), f"seed {seed}, step {step}"
        assert seen >= {"done", "ReservationConflict", "CommandFailed"}
    finally:
        target.close()


# ---- what no target can be made to do at will ------------------------------------------------------------------------


def accident_at(namespace: SharedNamespace, verb: str, accident: Accident) -> None:
    """The next command of this kind has it."""

    def observe(device: HostDevice, command: Command) -> Accident | None:
        if command.verb != verb:
            return None
        namespace.observer = None
        return accident

    namespace.observer = observe


def test_a_flush_through_another_controller_makes_nothing_durable() -> None:
    namespace = SharedNamespace(SIZE)
    host = uuid.uuid4()
    one, two = namespace.connect(host), namespace.connect(host)
    one.write(0, OLD)
    one.flush()
    one.write(0, NEW)
    one.write(4096, NEW)
    two.write(8192, NEW)
    two.flush()
    assert block(two) == NEW
    one.lose()
    one.flush()
    assert [block(one, offset) for offset in (0, 4096, 8192)] == [OLD, bytes(4096), NEW]
    assert (one.loss_count(), two.loss_count()) == (1, 0)


@pytest.mark.parametrize("ghost", ["admitted", "unchecked"])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_ghost_lands_late_unless_it_is_drained(ghost: str, given_up: bool) -> None:
    namespace = SharedNamespace(SIZE)
    old, new = namespace.connect(), namespace.connect()
    old.reservations.register(11)
    old.reservations.acquire(11, SHARED)
    new.reservations.register(22)
    for abort in (False, True):
        accident_at(namespace, "write", Accident(ghost=ghost, given_up=given_up))
        if given_up:
            with pytest.raises(DeviceTimeout):
                old.write(0, OLD)
        else:
            old.write(0, OLD)
        assert [(one.offset, one.length) for one in old.unsettled()] == [(0, 4096)]
        assert block(old) == (bytes(4096) if given_up else OLD)
        assert len(namespace.ghosts) == 1
        new.reservations.preempt(22, 11, SHARED, abort=abort)
        new.write(0, NEW)
        if abort:
            assert namespace.ghosts == [] and namespace.overwrites == []
        else:
            # It passed the check before: then only an abort would have stopped it.
            assert bool(namespace.overwrites) == (ghost == "admitted")
            assert namespace.land(namespace.ghosts[0]) == (ghost == "admitted")
            assert block(new) == (OLD if ghost == "admitted" else NEW)
        namespace.overwrites.clear()
        old.settle(old.unsettled()[-1].generation)
        assert old.unsettled() == []
        # Once more, the other way round.
        old.reservations.register(11, ignore_existing=True)
        old.reservations.preempt(11, 22, SHARED)
        new.reservations.register(22)
        new.deallocate(0, 4096)


def test_the_same_bytes_again_are_no_harm() -> None:
    namespace = SharedNamespace(SIZE)
    device = namespace.connect()
    accident_at(namespace, "write", Accident(ghost="admitted"))
    device.write(0, OLD + NEW)
    device.write(4096, NEW)
    assert namespace.overwrites == []
    device.write(4096, OLD)
    assert [(found.offset, found.by) for found in namespace.overwrites] == [(4096, device.hostid)]


def test_targets_that_keep_less_than_the_promise() -> None:
    for quirks, error in [
        (Quirks(fences_without_draining=True), CommandFailed),
        (Quirks(refuses_abort=True), CommandFailed),
    ]:
        namespace = SharedNamespace(SIZE, quirks=quirks)
        old, new = namespace.connect(), namespace.connect()
        old.reservations.register(11)
        old.reservations.acquire(11, SHARED)
        new.reservations.register(22)
        accident_at(namespace, "write", Accident(ghost="admitted", given_up=True))
        with suppress(DeviceTimeout):
            old.write(0, OLD)
        with pytest.raises(error):
            new.reservations.preempt(22, 11, SHARED)
        gone = new.reservations.report().of(old.hostid) is None
        assert gone == quirks.fences_without_draining and len(namespace.ghosts) == 1
        new.reservations.preempt(22, 11, SHARED, abort=False) if not gone else None
        with pytest.raises(ReservationConflict):
            old.write(0, NEW)
        assert namespace.land(namespace.ghosts[0]) and block(new) == OLD

    forgets = SharedNamespace(SIZE, quirks=Quirks(forgets=True)).connect()
    assert not forgets.reservations.capabilities.persist
    with pytest.raises(CommandFailed, match="Invalid Field"):
        forgets.reservations.register(11, persist=True)
    none = SharedNamespace(SIZE, quirks=Quirks(no_reservations=True)).connect()
    assert not none.reservations.capabilities
    with pytest.raises(CommandFailed):
        none.reservations.register(11)
    none.write(0, OLD)


def test_an_answer_that_is_lost() -> None:
    namespace = SharedNamespace(SIZE)
    old, new = namespace.connect(), namespace.connect()
    accident_at(namespace, "register", Accident(landed=True))
    old.reservations.register(11)
    old.reservations.acquire(11, SHARED)
    new.reservations.register(22)
    accident_at(namespace, "preempt_and_abort", Accident(landed=True))
    with pytest.raises(OutcomeUnknown):
        new.reservations.preempt(22, 11, SHARED)
    assert [found.key for found in old.reservations.report().registrants] == [22]


def test_a_command_that_fails_does_nothing() -> None:
    namespace = SharedNamespace(SIZE)
    device = namespace.connect()

    def refuse(device: HostDevice, command: Command) -> None:
        if command.verb == "flush":
            raise CommandFailed("flush was refused", where=device.uri)

    device.write(0, OLD)
    namespace.observer = refuse
    with pytest.raises(HeadraceError):
        device.flush()
    namespace.observer = None
    device.lose()
    assert block(device) == bytes(4096)


def test_a_power_cut_leaves_any_state_of_each_block() -> None:
    namespace = SharedNamespace(SIZE)
    device = namespace.connect()
    device.reservations.register(11, persist=True)
    device.reservations.acquire(11, SHARED)
    device.write(0, OLD + OLD)
    device.flush()
    device.write(0, NEW)
    seen = set()
    for seed in range(40):
        left = namespace.power_cut(random.Random(seed).randrange, in_flight=(4096, NEW + NEW))
        host = left.connect(device.hostid)
        assert host.reservations.report().holders[0].key == 11
        seen.add(tuple(block(host, offset)[0] for offset in (0, 4096, 8192)))
    assert seen == {(a, b, c) for a in (1, 2) for b in (1, 2) for c in (0, 2)}
    assert namespace.power_cut(lambda count: 0).read(0, 8192) == OLD + OLD


def test_ranges_that_it_cannot_take() -> None:
    device = SharedNamespace(8192, block_bytes=512).connect()
    for offset, length in [(1, 512), (0, 100), (8192, 512), (-512, 512), (7680, 1024)]:
        with pytest.raises(UsageError):
            device.write(offset, bytes(length))
        with pytest.raises(UsageError):
            device.read_into(offset, bytearray(length))
    device.close()
    with pytest.raises(HeadraceError, match="closed"):
        device.flush()
