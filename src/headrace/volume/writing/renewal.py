"""A session becomes another host in the middle, so that no command of the one that it was can land any more.

    register     the new key on every member        the old host writes as before: a failure here costs nothing
    take         one member after the other         preempt and abort the old host there, report, guard
    end          the old associations are closed

It may fail between any two commands, and goes on from there when it is asked to. Until its end the session writes
nothing but its beats: where a member is being taken, through the new host, which is registered and is refused by
nobody but a successor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import uuid4

from headrace.device import BlockDevice, new_key
from headrace.errors import HeadraceError
from headrace.volume.data.objects import Range
from headrace.volume.writing import fence
from headrace.volume.writing.fence import Fence


class Renewal:
    """Of a session whose members all keep reservations of hosts (`Fence.reserved`)."""

    def __init__(self, before: Fence, devices: Sequence[BlockDevice]) -> None:
        """`devices`: the volume's own. Registers; where that fails, nothing has changed. DeviceError."""
        self.before = before
        self.after = Fence(uuid4(), new_key())
        self._old = list(before.devices)
        #: Members on which the old host may be refused by now.
        self.begun: set[int] = set()
        self._taken: set[int] = set()
        #: Members that are not missing.
        self._there: list[int] = []
        #: Where a command of the old host may land at any later time, since a target did not confirm its end.
        self.lost: list[Range] = []
        try:
            for index, device in enumerate(devices):
                # Everybody who writes waits for the session's lock meanwhile, and it can be done later.
                self.after.open(device, wait=False)
                if self.after.strengths[index] != fence.ABSENT:
                    self._there.append(index)
                    self.after.register(index)
        except BaseException:
            self.after.step_back()
            raise

    def go_on(self, changed: Callable[[int], None]) -> None:
        """Take the members that are left. `changed` is told of each, when the old fence's devices have the new one's in
        its place. DeviceError: it may go on later; WriterActive, SessionLost: another session was first."""
        first = self._there[0]
        for index in self._there:
            device = self.after.devices[index]
            if index in self._taken:
                continue
            if index != first:
                self.after.still_held(first)
            self.begun.add(index)
            # In place: tables that are being written go on with what the log writes with.
            self.before.devices[index] = device
            changed(index)
            self.after.win(index, self.before.key, first=index == first)
            self.after.guard(index)
            if not self.after.drained_on(index, self.before.key):
                self.lost += [one for one in fence.unsettled(self._old) if one[0] == index]
            self._taken.add(index)
        for index in self._there:
            self.after.still_held(index)

    def end(self) -> Fence:
        """All are taken. The session's fence from now on, with the list of devices that the old one had."""
        self.after.devices = self.before.devices
        with suppress(HeadraceError):
            self.before.close()
        return self.after
