"""Every exception of headrace, on one page.

An error says what happened, where, what was expected and found, what to do next, and whose fault it is.
The command line prints `str(error)` and exits with `error.exit_status`; no traceback reaches a user.

`fault` is one of:
  "caller"  what was asked for cannot be done (wrong argument, wrong name, corpus empty)
  "peer"    the target or the network did not do its part
  "media"   the bytes at rest are not what they should be
  "host"    this machine lacks something (permission, memory, kernel feature)
  "headrace" a defect of ours: please report it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class HeadraceError(Exception):
    """Base of all. `HeadraceError("what", where="...", expected="...", found="...", next_step="...")`."""

    fault: str = "headrace"
    exit_status: int = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f" at {self.where}"
        if self.expected and self.found:
            text += f": expected {self.expected}, found {self.found}"
        elif self.expected:
            text += f": expected {self.expected}"
        elif self.found:
            text += f": found {self.found}"
        if self.next_step:
            text += f"; {self.next_step}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments need help to cross a process boundary.
        return (_rebuild, (type(self), self.what, self.where, self.expected, self.found, self.next_step))


def _rebuild(
    kind: type[HeadraceError],
    what: str,
    where: str | None,
    expected: str | None,
    found: str | None,
    next_step: str | None,
) -> HeadraceError:
    return kind(what, where=where, expected=expected, found=found, next_step=next_step)


# ---- the caller ---------------------------------------------------------------------------------------------------


class UsageError(HeadraceError):
    """An argument, option, address or setting that cannot be meant."""

    fault = "caller"
    exit_status = 2


# ---- devices and the fabric -----------------------------------------------------------------------------------------


class DeviceError(HeadraceError):
    """A device could not be opened or did not do what it was asked for."""

    fault = "peer"


class ConnectRefused(DeviceError):
    """Nobody listens there, or the target refused: wrong NQN, host not allowed, no such namespace."""


class DeviceTimeout(DeviceError):
    """The deadline of a command or connection passed; a late answer never touches the buffer."""


class DeviceGone(DeviceError):
    """No path to the target is left: the time allowed for reconnecting passed, or every path refused us for good.

    Requests fail so at once until the target is back; the device goes on trying by itself.
    """


class ProtocolError(DeviceError):
    """The peer broke the rules of NVMe/TCP; the connection was closed."""


class CommandFailed(DeviceError):
    """The device completed a command with an error status; the message names the status, namespace and LBA."""


class ReservationConflict(DeviceError):
    """The target refuses this host: another one holds the reservation, or has taken it over.

    Also what every write of a device is told that is fenced (`NativeDevice.guard_writes`).
    """


class OutcomeUnknown(DeviceError):
    """A command was sent and its answer was lost: nobody can say whether it was carried out."""


class DeviceClosed(DeviceError):
    """The device was closed on this side, perhaps while a command was under way."""

    fault = "caller"


class MemberMissing(DeviceError):
    """What is wanted lies on a member of the volume that is not there; the message names it."""


# ---- the volume -----------------------------------------------------------------------------------------------------


class VolumeError(HeadraceError):
    """Something about a volume."""

    fault = "media"


class NotAVolume(VolumeError):
    """The device holds no volume (or not all of its members were given)."""

    fault = "caller"


class VolumeTooNew(VolumeError):
    """The volume was written by a newer headrace, or uses a feature that this one does not know."""

    fault = "caller"


class VolumeTooOld(VolumeError):
    """The volume has a format of an earlier version, which is read but not written any more."""

    fault = "caller"


class ChecksumMismatch(VolumeError):
    """Bytes read do not match their checksum: the message names object, offset and member."""


class VolumeDamaged(VolumeError):
    """A structure of the volume is damaged beyond its copies."""


class VolumeDiverged(VolumeError):
    """Members went on without each other: each has commits that the other does not know."""


class VolumeFull(VolumeError):
    """There is not enough free space; nothing was written."""

    fault = "caller"


class ObjectNotFound(VolumeError):
    """No committed object has this name."""

    fault = "caller"


class ObjectExists(VolumeError):
    """An object of this name is committed already; objects are immutable."""

    fault = "caller"


class CopyFailed(VolumeError):
    """Files or objects were not copied; the message names the first and says what became of the others. `problems`: all
    of them (`headrace.volume.copy.Problem`).
    """

    fault = "caller"

    def __init__(self, what: str, *, problems: Sequence[Any] = (), **facts: str | None) -> None:
        super().__init__(what, **facts)
        self.problems = list(problems)


class WriterActive(VolumeError):
    """Another session holds the volume and its heart beats; the message says who, where, since when."""

    fault = "caller"


class NotFenced(VolumeError):
    """A target cannot keep a writer out that was taken over from, and that was not waived (`unfenced`)."""

    fault = "peer"


class SessionLost(VolumeError):
    """This session no longer holds the volume; nothing more can be committed by it."""

    fault = "peer"


# ---- datasets, checkpoints, models ----------------------------------------------------------------------------------


class DatasetError(HeadraceError):
    """Corpus, tokenizer, token stream or loader state."""

    fault = "caller"


class DecoderLost(DatasetError):
    """A process that decodes records died, or could not be started; another one is started for the next call."""

    fault = "host"


class CorpusUnreadable(DatasetError):
    """The bytes of a file could not be had; nothing says that they are wrong, so it is never left out as damaged."""

    fault = "host"


class CheckpointFailed(HeadraceError):
    """A save or restore did not happen; what was committed before is untouched."""

    fault = "peer"


class CheckpointBusy(CheckpointFailed):
    """The save before this one is under way, and the writer was told not to wait for it."""

    fault = "caller"


class ModelError(HeadraceError):
    """A safetensors header or tensor that is not what it should be."""

    fault = "media"


# ---- measuring -------------------------------------------------------------------------------------------------------


class MeetingFailed(HeadraceError):
    """Ranks that were to measure together did not: one never came, died, or failed; the message names it."""

    fault = "peer"
