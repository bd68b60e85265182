"""The restart certificate: what a restore did, for people in one line and for machines as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.device import BlockDevice, paths_of
from headrace.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A step that could not be restored, and why the one before it was."""

    checkpoint: str
    #: Names the tensor.
    error: str


@dataclass(frozen=True, kw_only=True)
class RestartCertificate:
    """What one restore did, all ranks together. The same on every rank, but for `first_step_s`."""

    #: `RUN/step-NNNNNNNN`, the sequence number of its commit, and when that was, by the clock of who saved it.
    checkpoint: str
    step: int
    commit: int
    saved_unix: float
    #: Ranks that wrote it, and ranks that have it now.
    saved_by_ranks: int
    ranks: int
    #: Bytes that some rank wanted, each once; that all ranks wanted together; and that they read of the volume.
    unique_bytes: int
    wanted_bytes: int
    read_bytes: int
    #: `read_bytes / unique_bytes`.
    read_amplification: float
    #: Every byte that was read was compared with its checksum.
    verified: bool
    #: From the call of `restore` to its return, on the rank on which it took longest.
    restore_s: float
    #: Rank that read longest, its seconds, and the path on which its reads took longest.
    slowest_rank: int
    slowest_rank_s: float
    slowest_path: str
    #: What became of the states of random number generators, and of the position in the data.
    rng: str
    data: str
    #: Steps that are damaged and were passed over, newest first.
    damaged: tuple[Damage, ...] = ()
    #: From the start of the process to the end of the restore, on the rank for which it was longest.
    process_to_restored_s: float
    #: From the start of the process to the end of the first step behind the restore. None: not heard of yet.
    first_step_s: float | None = None

    @property
    def line(self) -> str:
        """For people."""
        text = "" if not self.damaged else f"DAMAGED, PASSED OVER: {', '.join(d.checkpoint for d in self.damaged)}; "
        text += (
            f"restarted from {self.checkpoint} (commit {self.commit}, saved by {_ranks(self.saved_by_ranks)}) on "
            f"{_ranks(self.ranks)}: {format_bytes(self.unique_bytes)}, "
            f"read {self.read_amplification:.2f} times in {format_seconds(self.restore_s)}, "
            f"{'every byte verified' if self.verified else 'NOT VERIFIED'}; "
            f"slowest rank {self.slowest_rank}, {format_seconds(self.slowest_rank_s)} by {self.slowest_path}; "
            f"RNG {self.rng}; data {self.data}; "
        )
        if self.first_step_s is None:
            return text + f"{format_seconds(self.process_to_restored_s)} from process start, before the first step"
        return text + f"{format_seconds(self.first_step_s)} from process start to the first step"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "line": self.line}, indent=1)

    def write(self, path: str | os.PathLike[str]) -> None:
        """To a file, whole or not at all."""
        whole = Path(path)
        part = whole.with_name(f"{whole.name}.{os.getpid()}.part")
        try:
            part.write_text(self.to_json() + "\n", encoding="utf-8")
            part.replace(whole)
        except OSError:
            # Every restart has a name of its own for it: on a full disk they would gather.
            part.unlink(missing_ok=True)
            raise


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def process_age_s() -> float:
    """Seconds since this process was started (`proc_pid_stat(5)`: field 22, ticks since boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def slowest_path(devices: Sequence[BlockDevice]) -> str:
    """The path that 99 of 100 answers took longest on; of devices without paths of ours, their addresses."""
    found: list[tuple[float, str]] = []
    for device in devices:
        for path in paths_of(device):
            slow = ", slow beside others" if path.slow else ""
            p99_s = path.latency.p99_s
            found.append((p99_s, f"{path.portal} (p99 {format_seconds(p99_s)}{slow})"))
    if found:
        return max(found)[1]
    return ", ".join(device.uri for device in devices)
