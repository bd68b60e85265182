"""Dumps of PyTorch's Flight Recorder: which collective was under way, and who had not come to it.

A dump is a pickle or JSON (`torch._C._distributed_c10d._dump_fr_trace`, `_dump_fr_trace_json`; on a time-out the
process group writes one to `TORCH_FR_DUMP_TEMP_FILE` and the rank). Of it is read (format 2.x, `FlightRecorder.hpp`):

    version           "2.10"
    pg_config         by group: its ranks, as text
    pg_status         by group's number: the last collective that was asked for (last_enqueued_collective)
    entries[]         the last collectives that the rank has asked for, oldest first
      process_group   [name, description]
      collective_seq_id, p2p_seq_id, is_p2p     every member counts the collectives of a group alike
      profiling_name  "nccl:all_reduce"
      time_created_ns                           by the system's clock: it was asked for
      time_discovered_started_ns, time_discovered_completed_ns     null (JSON: 0) where nobody saw it
      state           scheduled, started, completed; with gloo it stays "scheduled"
      retired         it is not waited for any more: over, or given up
      frames          where it was asked for, innermost first

Whoever has asked for fewer collectives of a group than others had not come to the next one: that holds for every
backend, and whatever the states say.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.measure.blackbox.plain import load_plain
from headrace.measure.watch.record import printable

#: Of one dump.
MOST_BYTES = 64 << 20
MOST_ENTRIES = 200_000
#: Largest number of ranks that is taken from a dump.
MOST_RANKS = 1 << 20
#: Members of all groups of a dump together, and frames of a collective: a pickle may name one list a million times.
_MOST_MEMBERS, _MOST_FRAMES = 16 * MOST_RANKS, 256
_LONGEST_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One that a rank has asked for."""

    group: str
    description: str
    #: Which one of its group; the first is 1.
    sequence: int
    #: "all_reduce"
    name: str
    #: By the system's clock of the node, nanoseconds; 0: not seen.
    created_ns: int
    started_ns: int
    completed_ns: int
    state: str
    retired: bool
    #: Between two ranks: its numbers are of those two.
    is_p2p: bool
    #: "train.py:41"; empty where it was not recorded.
    where: str

    @property
    def under_way(self) -> bool:
        return not self.retired and self.state != "completed"


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """The dump of one rank."""

    rank: int
    path: str
    version: str
    collectives: tuple[Collective, ...]
    #: Ranks of the groups that the dump names, by name.
    members: dict[str, tuple[int, ...]]
    #: By name, the last collective that was asked for: where only those under way were dumped, entries do not tell.
    last: dict[str, int]

    def between(self, start_ns: int, end_ns: int) -> list[Collective]:
        """Those that were asked for in this time, by the system's clock."""
        return [each for each in self.collectives if start_ns <= each.created_ns <= end_ns]


@dataclass(frozen=True, kw_only=True)
class Lacking:
    """A collective to which some ranks came and others had not when they were dumped."""

    group: str
    description: str
    sequence: int
    name: str
    joined: tuple[int, ...]
    #: Had not come; and those of which there is no dump.
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    #: Of the first that came, by the system's clock of its node.
    since_ns: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Ranks that asked for different collectives under one number: they will wait for ever."""

    description: str
    sequence: int
    #: By name, the ranks that asked for it.
    names: dict[str, tuple[int, ...]]


# ---- reading -------------------------------------------------------------------------------------------------------


def read_flight_recorder(path: Path) -> FlightRecord:
    """`UsageError` for anything that is no dump of a Flight Recorder, or is too large."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UsageError(
                "a Flight Recorder dump is too large", where=str(path), expected=f"at most {MOST_BYTES} bytes",
                found=str(size),
            )  # fmt: skip
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            "a Flight Recorder dump cannot be read", where=str(path), found=error.strerror or str(error)
        ) from None
    return parse_flight_recorder(data, path)


def parse_flight_recorder(data: bytes, path: Path) -> FlightRecord:
    """`path`: the number at its end is the rank."""
    try:
        found = json.loads(data) if data.lstrip()[:1] == b"{" else load_plain(data)
        if not isinstance(found, dict) or not isinstance(found.get("version"), str):
            raise ValueError("it has no version")
        if not found["version"].startswith("2."):
            raise UsageError(
                "a Flight Recorder dump of another format", where=str(path), expected="version 2.x",
                found=_text(found["version"]),
            )  # fmt: skip
        entries = found.get("entries", [])
        if not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
            raise ValueError("entries")
        members = _members(found.get("pg_config", {}))
        collectives = tuple(_collective(each) for each in entries)
        last = _last(found.get("pg_status", {}), entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            "not a Flight Recorder dump", where=str(path),
            expected="the pickle or JSON that PyTorch writes, of plain containers", found=_text(str(error)),
        ) from error  # fmt: skip
    return FlightRecord(
        rank=_rank(path), path=str(path), version=found["version"], members=members, collectives=collectives, last=last
    )


def _rank(path: Path) -> int:
    numbers = re.findall(
        r"\d{1,7}", path.name.removesuffix(path.suffix) if not path.suffix[1:].isdigit() else path.name
    )
    if not numbers:
        raise UsageError(
            "whose Flight Recorder dump is it", where=str(path), expected="a name that ends with the rank",
            found=path.name, next_step="name it as PyTorch does: nccl_trace_rank_3",
        )  # fmt: skip
    return int(numbers[-1])


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, group in config.items():
        ranks = json.loads(group["ranks"]) if isinstance(group["ranks"], str) else group["ranks"]
        size += len(ranks) + len(group["ranks"])
        if size > _MOST_MEMBERS:
            raise ValueError(f"more than {_MOST_MEMBERS} members of groups")
        if not all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in ranks):
            raise ValueError("ranks of a group")
        found[_text(name)] = tuple(ranks)
    return found


def _last(status: Any, entries: Any) -> dict[str, int]:
    # Numbers and names of groups are the same for the first ones, and else where an entry says so.
    names = {str(_whole(each["pg_id"])): _text(each["process_group"][0]) for each in entries if "pg_id" in each}
    found = {}
    for number, said in status.items():
        last = said.get("last_enqueued_collective")
        if isinstance(last, int) and last >= 0:
            found[names.get(_text(number), _text(number))] = _whole(last)
    return found


def _collective(entry: Any) -> Collective:
    group, description = entry["process_group"]
    frames = entry.get("frames") or ()
    where = next(
        (
            f"{Path(_text(frame['filename'])).name}:{_whole(frame['line'])}"
            for frame in islice(frames, _MOST_FRAMES)
            if "/torch/" not in frame["filename"]
        ),
        "",
    )
    is_p2p = entry.get("is_p2p") is True
    return Collective(
        group=_text(group), description=_text(description),
        sequence=_whole(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        name=_text(entry["profiling_name"]).rpartition(":")[2],
        created_ns=_whole(entry["time_created_ns"]), started_ns=_whole(entry.get("time_discovered_started_ns")),
        completed_ns=_whole(entry.get("time_discovered_completed_ns")), state=_text(entry["state"]),
        retired=entry.get("retired") is True, is_p2p=is_p2p, where=_text(where),
    )  # fmt: skip


def _whole(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number")
    if not 0 <= value < 1 << 63:
        raise ValueError("a number out of range")
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return printable(value[:_LONGEST_TEXT])


# ---- the ranks put together ----------------------------------------------------------------------------------------


def lacking(records: Sequence[FlightRecord], world: int) -> list[Lacking]:
    """The collectives that somebody had not come to, those that were waited for first."""
    found = []
    for group, of_rank in _by_group(records).items():
        said = {record.rank: record.last.get(group[0], 0) for record in records}
        last = {rank: max(said[rank], *(each.sequence for each in asked), 0) for rank, asked in of_rank.items()}
        furthest = max(last.values())
        behind = min(last.values())
        members = _members_of(group, records, world)
        if behind == furthest:
            # All that were dumped have come: only one of which there is no dump may be missing.
            pending = [each for each in _at(of_rank, furthest).values() if each.under_way]
            absent = sorted(set(members) - set(of_rank))
            if pending and absent:
                found.append(_lacking(_at(of_rank, furthest), (), absent))
            continue
        joined = _at(of_rank, behind + 1)
        if joined:
            missing = tuple(sorted(rank for rank in of_rank if last[rank] <= behind))
            found.append(_lacking(joined, missing, sorted(set(members) - set(of_rank))))
    return sorted(found, key=lambda each: each.since_ns)


def mismatches(records: Sequence[FlightRecord]) -> list[Mismatch]:
    """Of each group the first number under which ranks asked for different things."""
    found = []
    for of_rank in _by_group(records).values():
        names: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, asked in of_rank.items():
            for each in asked:
                names[each.sequence][each.name].append(rank)
        first = min((number for number, by_name in names.items() if len(by_name) > 1), default=None)
        if first is not None:
            told = {name: tuple(sorted(set(ranks))) for name, ranks in names[first].items()}
            if len(set(told.values())) > 1:
                some = next(each for asked in of_rank.values() for each in asked)
                found.append(Mismatch(description=some.description, sequence=first, names=told))
    return found


def _by_group(records: Sequence[FlightRecord]) -> dict[tuple[str, str], dict[int, list[Collective]]]:
    """By name and description, and by rank; of those that have dumps."""
    found: dict[tuple[str, str], dict[int, list[Collective]]] = defaultdict(dict)
    for record in records:
        for each in record.collectives:
            if not each.is_p2p:
                found[each.group, each.description].setdefault(record.rank, []).append(each)
    for (name, description), of_rank in found.items():
        # Members that have asked for none of it.
        for record in records:
            if record.rank in _members_of((name, description), records, 0):
                of_rank.setdefault(record.rank, [])
    return found


def _members_of(group: tuple[str, str], records: Sequence[FlightRecord], world: int) -> Iterable[int]:
    name, description = group
    for record in records:
        if name in record.members:
            return record.members[name]
    if description == "default_pg":
        # gloo names no group in its dumps.
        named = next((record.members[""] for record in records if "" in record.members), ())
        return named or range(min(world, MOST_RANKS))
    return sorted({record.rank for record in records if any(each.group == name for each in record.collectives)})


def _at(of_rank: dict[int, list[Collective]], sequence: int) -> dict[int, Collective]:
    return {rank: each for rank, asked in of_rank.items() for each in asked if each.sequence == sequence}


def _lacking(joined: dict[int, Collective], missing: Sequence[int], unknown: Sequence[int]) -> Lacking:
    first = min(joined.values(), key=lambda each: each.created_ns)
    return Lacking(
        group=first.group, description=first.description, sequence=first.sequence, name=first.name,
        joined=tuple(sorted(joined)), missing=tuple(missing), unknown=tuple(unknown), since_ns=first.created_ns,
        where=first.where,
    )  # fmt: skip
