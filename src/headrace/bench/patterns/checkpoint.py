"""Ranks save a checkpoint together, and restore it: processes that write the files of MLPerf Storage's layouts."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.bench.figures import SECONDS, Figure, Outcome, rate
from headrace.bench.layouts import layout, total_bytes
from headrace.bench.patterns.options import Options
from headrace.bench.places.protocol import Place, Room, Shard, Tell
from headrace.bench.ranks import Done, Ranks
from headrace.units import format_bytes


def run(place: Place, options: Options, tell: Tell, ranks: Ranks | None = None) -> Outcome:
    """One save and one restore. Times are from the word to begin to the last rank's end; that of the save with the
    commit, where there is one. `ranks`: as many processes as are wanted, which go on living."""
    if ranks is None:
        with Ranks(options.ranks) as started:
            return run(place, options, tell, started)
    files = layout(options.model, options.ranks, options.scale)
    total = total_bytes(files)
    with place.room(shards_of(files), options.cache) as room:
        ranks.open(room.for_writer())
        try:
            saved, save_s = save(ranks, room, files, lambda moved: told(tell, "saving", moved, total, 0.0))
            room.forget()
            cache = room.state()
            restored = ranks.restore(numbers(files), lambda moved: told(tell, "restoring", moved, total, 0.5))
        except BaseException:
            # They may be in the middle of it: none is waited for, and none writes while the room is cleared.
            ranks.close()
            raise
        ranks.leave()
    figures = [
        rate("save", total, save_s, note="slowest " + _slowest(saved)),
        rate("restore", total, restored.seconds, note="slowest " + _slowest(restored)),
        Figure(name="save time", value=save_s, unit=SECONDS),
        Figure(name="restore time", value=restored.seconds, unit=SECONDS),
    ]
    return Outcome(
        pattern="checkpoint", path=place.name, work=work_of(options), flows=options.ranks, bytes=total,
        seconds=save_s + restored.seconds, figures=figures, cache=cache, durable=place.durable,
        notes=(f"{format_bytes(total)} in {sum(map(len, files))} files; what was restored is what was saved",),
    )  # fmt: skip


def save(ranks: Ranks, room: Room, files: list[list[Shard]], moved: Callable[[int], None]) -> tuple[Done, float]:
    """All ranks, and the commit: what they did, and the seconds of it all."""
    begun = time.perf_counter()
    done = ranks.save(numbers(files), moved)
    room.commit(done.proofs)
    return done, time.perf_counter() - begun


def shards_of(files: list[list[Shard]]) -> list[Shard]:
    return [shard for mine in files for shard in mine]


def numbers(files: list[list[Shard]]) -> list[list[int]]:
    """Of each rank, its shards by their place in all of them."""
    found, at = [], 0
    for mine in files:
        found.append([*range(at, at + len(mine))])
        at += len(mine)
    return found


def work_of(options: Options) -> str:
    scaled = "" if options.scale == 1 else f" at {options.scale:.3g}"
    return f"llama {options.model.lower()}{scaled}, {options.ranks} ranks"


def told(tell: Tell, what: str, moved: int, total: int, base: float) -> None:
    tell(base + 0.5 * moved / max(1, total), f"{what}: {format_bytes(moved)} of {format_bytes(total)}")


def _slowest(done: Done) -> str:
    return f"rank {done.slowest}, {done.each_s[done.slowest]:.2f} s"
