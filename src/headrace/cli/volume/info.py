"""`headrace volume info`: what a volume is, how full, and who writes to it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headrace.cli.volume.common import AsJson, Degraded, Members, open_reading, shown

if TYPE_CHECKING:
    from headrace.volume import Volume, VolumeInfo, WriterInfo

#: What keeps out a writer that was taken over from, on the worst member.
FENCES = {
    "persistent": "persistent: reservations that survive the loss of the target's power",
    "until-restart": "until-restart: reservations that a restart of the target forgets, and hosts notice",
    "node": "node: reservations of whole nodes",
    "machine": "machine: a lock on the files, among the processes of this machine",
    "process": "process: memory of this process",
    "none": "none: nothing keeps out a writer that was taken over from",
}
#: Characters of the picture of the space.
_BAR = 48


def info(members: Members = None, degraded: Degraded = False, json: AsJson = False) -> None:
    """What a volume is: members, space, fence, who writes to it, warnings.

    Example: `headrace volume info file:/data/a.img file:/data/b.img`
    """
    with open_reading(members, degraded=degraded) as volume:
        show_info(volume, json)


def when(seconds: float) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def last_beat(writer: WriterInfo) -> str:
    """By its own clock."""
    if not writer.last_beat_s:
        return "which says nothing of its last beat"
    return f"{'last beat' if writer.state == 'active' else 'until'} {when(writer.last_beat_s)}"


def show_info(volume: Volume, json: bool) -> None:
    from dataclasses import asdict

    from headrace.cli.output import print_facts, print_json
    from headrace.units import format_bytes

    info = volume.info()
    if json:
        print_json(asdict(info))
        return
    facts = {
        "name": shown(info.name),
        "id": info.id,
        "created": when(info.created_s),
        "format": f"version {info.version}",
    }
    for member in info.members:
        marks = [format_bytes(member.size_bytes)]
        if member.log_copy:
            marks.append("log copy" if member.log_counts else "a log copy that does not count")
        marks += ["volatile write cache"] if member.volatile_cache else []
        facts[f"member {member.index}"] = f"{member.uri} ({', '.join(marks)})"
    facts["stripe"] = format_bytes(info.stripe_bytes)
    facts["log"] = (
        f"{format_bytes(info.log_bytes)} an area, {info.log_areas} areas on each of two copies; epoch {info.epoch}"
    )
    least, most = ("", "") if info.exact else ("at least ", "at most ")
    space = f"{format_bytes(info.used_bytes)} of {format_bytes(info.capacity_bytes)}"
    space += f", {least}{format_bytes(info.free_bytes)} free"
    if info.quarantined_bytes:
        space += f", {most}{format_bytes(info.quarantined_bytes)} in quarantine"
    if info.unreachable_bytes:
        space += f", {most}{format_bytes(info.unreachable_bytes)} on members that are missing"
    facts["used"] = space
    if sys.stdout.isatty():
        facts[""] = picture(info)
    facts["objects"] = f"{info.object_count:,}, commit {info.sequence}"
    if info.writer is not None:
        writer = info.writer
        facts["writer"] = (
            f"{writer.state}: {shown(writer.run_id)!r}, process {writer.pid} on {shown(writer.host)}, "
            f"since {when(writer.started_s)}, {last_beat(writer)}"
        )
    facts["fence"] = FENCES.get(info.fence, info.fence)
    for number, warning in enumerate(info.warnings, start=1):
        facts[f"warning {number}"] = warning
    print_facts(facts)


def picture(info: VolumeInfo, width: int = _BAR) -> str:
    """The space as a bar: used, in quarantine, free. What is there has at least one character."""
    capacity = max(info.capacity_bytes, 1)
    bar = ""
    for part, sign in ((info.used_bytes, "█"), (info.quarantined_bytes, "▒")):
        share = max(round(part / capacity * width), 1) if part else 0
        bar += sign * min(share, width - len(bar))
    percent = f"{100 * info.used_bytes / capacity:.0f} %"
    legend = "  █ used" + ("  ▒ quarantine" if info.quarantined_bytes else "") + "  ░ free"
    return f"{bar.ljust(width, '░')} {percent}{legend}"
