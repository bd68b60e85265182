"""The processes of the world: what they do with a volume, and what they hold it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from headrace.device import BlockDevice
from headrace.errors import (
    DeviceError,
    HeadraceError,
    ObjectNotFound,
    SessionLost,
    VolumeDamaged,
    VolumeFull,
    WriterActive,
)
from headrace.testing import Quirks, SharedNamespace
from headrace.units import KIB
from headrace.volume import Grant, Receipt, Session, Transaction, Volume
from headrace.volume.layout import ALIGN
from headrace.volume.repair.scrub import scrub
from tests.volume.simulation.actor import Actor
from tests.volume.simulation.chain import State, Violation, content
from tests.volume.simulation.weather import Weather
from tests.volume.simulation.world import World

STRIPE = 64 * KIB
#: A beat, and how many missed ones mean death, in the world's time: a step takes a millisecond.
BEAT_S = 0.05
MISSED = 3


def state_of(volume: Volume) -> State:
    return {info.name: info.length_bytes for info in volume.list()}


@contextmanager
def allowed(*kinds: type[HeadraceError]) -> Iterator[None]:
    """What may happen to who does nothing wrong: devices fail, sessions are lost, volumes are full."""
    with suppress(DeviceError, SessionLost, VolumeFull, WriterActive, *kinds):
        yield


@dataclass
class Job:
    """What a writer and its ranks share, as a training job does by its process group."""

    over: bool = False
    grants: list[tuple[Grant, int]] | None = None
    receipts: list[Receipt] | None = None

    def __post_init__(self) -> None:
        self.grants, self.receipts = [], []


def writer(actor: Actor, job: Job, transactions: int) -> None:
    """A session, from its opening to its end: it commits `transactions`, unless it is lost."""
    try:
        with allowed():
            actor.world.opening.add(actor)
            since = actor.world.chain.last
            devices, degraded = actor.devices(), actor.chance.random() < actor.world.weather.absent
            if degraded:
                del devices[actor.world.fragile]
            volume = Volume.open(devices, write=True, degraded=degraded)
            # By hand, of a session that may live: whoever asks for that where nothing keeps it out is on his own.
            by_hand = actor.world.fenced and actor.chance.random() < actor.world.weather.by_hand
            session = volume.session(
                actor.name,
                takeover="now" if by_hand else "if-dead",
                heartbeat_s=BEAT_S,
                missed_beats=MISSED,
                unfenced=True,
            )
            actor.world.degraded = degraded
            actor.world.count("session without a member" if degraded else "session with all members")
            _work(actor, job, volume, session, since, transactions)
    finally:
        job.over = True
        actor.world.opening.discard(actor)


def _work(actor: Actor, job: Job, volume: Volume, session: Session, since: int, transactions: int) -> None:
    chain = actor.world.chain
    state = state_of(volume)
    base = chain.opened(actor.name, state, since)
    actor.world.opened(actor.job)
    actor.world.opening.discard(actor)
    actor.world.count("session")
    _space(actor, volume, session)
    for _ in range(transactions):
        chosen = _plan(actor, session, state)
        session.check()
        tx = session.transaction()
        try:
            _fill(actor, job, tx, chosen)
            after = {name: length for name, length in state.items() if name not in chosen[1]} | dict(chosen[0])
            if actor.chance.random() < 0.1:
                tx.abort()
                actor.world.count("abort")
                continue
            attempt = chain.attempt(actor.name, base, after)
            tx.commit()
        except (VolumeFull, DeviceError):
            # There or not: the session can tell, and where it cannot write its log any more, the next one will.
            tx.abort()
            actor.world.count("failed transaction")
            state = state_of(volume)
            base = chain.observed(actor.name, state, base)
            if actor.chance.random() < 0.5:
                session.close()
                return
            continue
        chain.acknowledged(attempt)
        actor.world.count("commit")
        assert attempt.index is not None
        base, state = attempt.index, after
        if actor.chance.random() < 0.3:
            _read_some(actor, volume, state, base)
        if actor.chance.random() < 0.2:
            _space(actor, volume, session)
    if actor.chance.random() < 0.7:
        session.close()


def _plan(actor: Actor, session: Session, state: State) -> tuple[list[tuple[str, int]], list[str]]:
    """(name, length) of what comes, names of what goes."""
    chance = actor.chance
    names = sorted(state)
    gone = chance.sample(names, min(len(names), chance.choice((0, 0, 1, 2))))
    if len(names) > 12 or session.free_bytes < 512 * KIB:
        gone = names[: len(names) // 2]
    come: list[tuple[str, int]] = []
    for _ in range(chance.choice((1, 1, 2, 3)) if not gone or chance.random() < 0.8 else 0):
        name = (
            chance.choice(gone) if gone and chance.random() < 0.3 else f"{chance.choice('abc')}/{chance.randrange(40)}"
        )
        if (name not in state or name in gone) and name not in dict(come):
            come.append((name, actor.world.fresh_length(chance, chance.choice((5, 40, 200)) * KIB)))
    if not come and not gone:
        come.append((f"d/{len(state)}", actor.world.fresh_length(chance, 5 * KIB)))
    return [one for one in come if one[0] not in state or one[0] in gone], gone


def _fill(actor: Actor, job: Job, tx: Transaction, chosen: tuple[list[tuple[str, int]], list[str]]) -> None:
    come, gone = chosen
    for name in gone:
        tx.delete(name)
    waiting = 0
    for name, length in come:
        block = actor.chance.choice((4, 64)) * KIB
        kind = actor.chance.random()
        if kind < 0.4 and any(rank for rank in actor.world.alive("rank") if rank.name.endswith(actor.name)):
            assert job.grants is not None
            job.grants.append((tx.allocate(name, length, checksum_block_bytes=block), length))
            waiting += 1
        elif kind < 0.6:
            data = content(length)
            cut = actor.chance.randrange(length + 1)
            tx.write_stream(name, [data[:cut], data[cut:]], checksum_block_bytes=block)
        else:
            tx.put(name, content(length), checksum_block_bytes=block)
    patience = 200
    while waiting:
        assert job.receipts is not None
        while job.receipts:
            receipt = job.receipts.pop()
            if receipt.transaction == tx.number:
                tx.accept(receipt)
                waiting -= 1
        patience -= 1
        if patience == 0:
            raise DeviceError("a rank does not answer")
        if waiting:
            actor.pause()


def _space(actor: Actor, volume: Volume, session: Session) -> None:
    """I7 of `docs/volume-format.md`: free + live + quarantined is all there is."""
    if volume.degraded:
        return  # What is missing is neither.
    with session.lock:
        info = volume.info()
        together = session.free_bytes + info.used_bytes + session.quarantined_bytes + session.deallocating_bytes
    if together != info.capacity_bytes:
        raise Violation(f"{actor.name}: space leaks: {info.capacity_bytes} bytes, and {together} are accounted for")


def rank(actor: Actor, job: Job, hostid_of: Actor) -> None:
    """Writes what its job's writer grants, through devices of its own."""
    with allowed():
        volume = Volume.open(actor.devices(hostid_of.hostid), write=True)
        assert job.grants is not None and job.receipts is not None
        while not (job.over or hostid_of.done) or job.grants:
            if not job.grants:
                actor.pause()
                continue
            grant, length = job.grants.pop(0)
            job.receipts.append(volume.write_grant(grant, content(length)))
            actor.world.count("grant")


def reader(actor: Actor, rounds: int) -> None:
    """Follows the log and reads, with reading alone: one looks as those do that look seldom, the next one as those that
    look often."""
    chain = actor.world.chain
    look = (Volume.refresh, Volume.poll)[(actor.world.seed + actor.job) % 2]
    volume: Volume | None = None
    seen = since = 0
    for _ in range(rounds):
        before, since, actor.disturbed = since, chain.last, False
        acknowledged = chain.last_acknowledged
        try:
            if volume is None or actor.chance.random() < 0.05:
                # A new reader; what an older one saw of a commit that nobody acknowledged it may find in a moment.
                seen = min(seen, acknowledged)
                volume = Volume.open(actor.devices())
            else:
                actor.world.count("news" if look(volume) else "no news")
            state = state_of(volume)
        except DeviceError:
            volume = None
            continue
        except VolumeDamaged as error:
            if "faster" not in error.what:
                raise
            continue
        # A marker that another reader met before it was durable may be lost; and who cannot read every log copy may
        # miss what is durable on the other one only.
        certain = not actor.disturbed and not actor.world.weather.early
        floor = since if certain else acknowledged
        if actor.disturbed and actor.world.weather.absent:
            # The one copy that counts cannot be read, and the other one does not know that it was left behind.
            floor = 0
        elif actor.world.weather.absent and look is Volume.poll:
            # It looks at one copy, where it is the one that was left behind, and at the other the next time.
            floor = min(floor, before)
        seen = chain.observed(actor.name, state, max(seen, floor))
        actor.world.count("look")
        _read_some(actor, volume, state, seen)
        actor.pause()


def _read_some(actor: Actor, volume: Volume, state: State, seen: int) -> None:
    for name in actor.chance.sample(sorted(state), min(len(state), actor.chance.randrange(4))):
        length = state[name]
        start = actor.chance.randrange(length)
        count = actor.chance.choice((length - start, min(100, length - start)))
        try:
            found = volume.read(name, start, count)
        except ObjectNotFound:
            if not actor.world.chain.may_be_gone(name, length, seen):
                raise Violation(f"{actor.name}: {name!r} of {length} bytes is gone, and nobody deleted it") from None
            continue
        except DeviceError:
            continue
        except HeadraceError as error:
            # A refresh on the way may have made it another object of that name.
            if actor.world.chain.may_be_gone(name, length, seen) and "leaves" in error.what:
                continue
            raise
        if found != content(length)[start : start + count] and not actor.world.chain.may_be_gone(name, length, seen):
            raise Violation(f"{actor.name}: wrong bytes of {name!r}, {start}+{count} of {length}")
        actor.world.count("read")


def recover(namespaces: list[SharedNamespace]) -> list[State]:
    """What a reader finds, and then a session, once all of that is read and it has committed something of its own."""
    readers: list[BlockDevice] = [namespace.connect() for namespace in namespaces]
    seen = state_of(Volume.open(readers))
    devices: list[BlockDevice] = [namespace.connect() for namespace in namespaces]
    volume = Volume.open(devices, write=True)
    session = volume.session("after", takeover="if-dead", heartbeat_s=60.0, unfenced=True)
    state = state_of(volume)
    for name, length in state.items():
        if volume.read(name) != content(length):
            raise Violation(f"after a power cut: wrong bytes of {name!r}")
    info = volume.info()
    if session.free_bytes + info.used_bytes + session.quarantined_bytes != info.capacity_bytes:
        raise Violation("after a power cut: space leaks")
    try:
        with session.transaction() as tx:
            tx.put("after", b"the cut")
    except VolumeFull:
        if not state and not session.quarantined_bytes:
            raise Violation("after a power cut: full, and there is no object") from None
    else:
        if state_of(Volume.open(readers)) != {**state, "after": 7}:
            raise Violation("after a power cut: a commit does not show")
    session.close()
    report = scrub(devices)
    fatal = [finding for finding in report.findings if finding.fatal]
    if fatal:
        raise Violation(f"after a power cut: {fatal[0]}")
    return [seen, state]


def world(seed: int, *, trace: bool = False, storm: tuple[Weather, Quirks] | None = None) -> World:
    """A world with a volume on it."""
    made = World(seed, trace=trace, storm=storm)
    devices: list[BlockDevice] = [namespace.connect() for namespace in made.namespaces]
    Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=made.weather.log_bytes)
    # A beat is a place that changes all the time, and a late one does no harm (`heartbeat.py`).
    superblock = made.superblock = Volume.open(devices).superblock
    for member, offset in zip(superblock.log_member, superblock.log_offset, strict=True):
        made.namespaces[member].volatile_places.append((offset, offset + ALIGN))
        if made.weather.data_only:
            areas = superblock.area_offset(superblock.log_member.index(member), 0)
            made.namespaces[member].volatile_places.append(
                (areas, areas + superblock.area_count * superblock.area_bytes)
            )
    made.after_cut = lambda left, since: made.chain.after_cut(recover(left), since)
    return made
