"""The native engine (Rust, `native/py`). One class or function a verb; only `headrace.device` (and `fabric`) import it.

Raises the exceptions of `headrace.errors`, with where, expected, found and next step filled in.
"""

from collections.abc import Sequence

from headrace.device.protocol import U32, U64, Buffer
from headrace.device.ranges import I64, Rows

class Device:
    """An open device. All methods release the GIL while they wait."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def max_transfer_bytes(self) -> int: ...
    @property
    def volatile_cache(self) -> bool: ...
    @property
    def read_only(self) -> bool: ...
    def loss_count(self) -> int: ...
    def read_into(self, offset: int, buffer: Buffer) -> None: ...
    def write(self, offset: int, data: Buffer, fua: bool) -> None: ...
    def flush(self) -> None: ...
    def deallocate(self, offset: int, length: int) -> None: ...
    def close(self, timeout_s: float = 5.0) -> None: ...
    def describe(self) -> str:
        """JSON: transport, engine, address, digests, queues, depth, state, associations_lost, counters."""

class Transfer:
    """A batch under way. Dropping it waits for nothing and frees nothing early: buffers live until the last segment."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None) -> bool:
        """True when complete, False when the time passed; raises the batch's first error once all segments ended."""
    def waiting(self) -> tuple[int, int, int, int] | None:
        """Member, offset, length of a request that it waits for; how many it has under way."""
    def failed_segment(self) -> int | None: ...
    def failed_range(self) -> tuple[int, int, int, int, int] | None:
        """Of `submit_ranges`: the range, where in it, bytes, member, offset."""

class Source:
    """Bytes dealt out over devices, with their checksums, or with a table of these (page size, rows) and its roots."""

    def __init__(
        self,
        birth: int,
        length_bytes: int,
        block_bytes: int,
        stripe_bytes: int,
        rows: Rows,
        sums: U32,
        table: tuple[int, Rows] | None,
    ) -> None: ...

class ChecksumPages:
    """Pages of checksum tables that were read; the ones not used for longest go beyond the limit."""

    def __init__(self, limit_bytes: int) -> None: ...
    def keep(self, birth: int, page: int, sums: U32) -> None:
        """A page that was read and verified elsewhere."""
    @property
    def kept_bytes(self) -> int: ...

class Beat:
    """A thread that writes one block each interval to the same places of several devices. Dropping it stops it."""

    def __init__(
        self, devices: Sequence[Device], offsets: Sequence[int], first: bytes, *, interval_s: float, confirm: bool
    ) -> None:
        """`first`: what the places hold now. `confirm`: look before each beat that they hold what was written last."""
    def feed(self, blocks: Sequence[bytes]) -> None: ...
    def news(self, timeout_s: float) -> str | None:
        """ "low": feed it. "changed": a place holds something else, and it waits for `resume`. "ended". None: the time
        passed. Raises ReservationConflict where the device is fenced, and beats no more."""
    def resume(self) -> None: ...
    def stop(self, timeout_s: float) -> bool:
        """False where the beat under way has not ended within the time."""
    def written(self) -> int:
        """Beats begun, `first` not counted."""
    def trouble(self) -> str | None: ...

def open_nvme_tcp(
    portals: list[tuple[str, int]],
    subsysnqn: str,
    nsid: int,
    *,
    uuid: bytes | None,
    nguid: bytes | None,
    hostnqn: str,
    hostid: bytes,
    header_digest: bool,
    data_digest: bool,
    queues: int,
    depth: int,
    policy: str,
    host_traddr: str | None,
    host_iface: str | None,
    tos: int | None,
    hpda: int,
    maxr2t: int,
    poll_us: int,
    inflight_bytes: int | None,
    keep_alive_s: float,
    connect_timeout_s: float,
    io_timeout_s: float,
    loss_timeout_s: float,
    events: int = ...,
) -> Device:
    """`uuid`, `nguid`: in place of `nsid`. `inflight_bytes`: of reads on this node; None adapts, 0 is off.
    `io_timeout_s`: deadline of one command while connected. `loss_timeout_s`: how long I/O waits for a lost target to
    come back (reconnecting all the while; infinity: for ever) before it fails with DeviceGone; from then on every call
    fails at once until it is back. `events`: of the ring of what it did, 32 bytes each; 0: none."""

def open_block(path: str, *, block_bytes: int | None, read_only: bool, io_engine: str, events: int = ...) -> Device:
    """A block device of the kernel; `block_bytes`: None is what it says itself. `io_engine`: as for a file."""

def open_file(path: str, *, block_bytes: int, read_only: bool, io_engine: str, events: int = ...) -> Device:
    """An existing file. `io_engine`: "auto", "io_uring" or "pread"."""

def create_file(path: str, size_bytes: int) -> None:
    """A new sparse file; an existing one is an error."""

def open_memory(size_bytes: int, *, block_bytes: int, events: int = ...) -> Device: ...
def events(device: Device) -> tuple[bytearray, int, int, str] | None:
    """`headrace.device.events.EVENT`; how many there were, and of them are not here; why it is not known what is under
    way. None: this device records nothing."""

def flush(devices: Sequence[Device]) -> None:
    """All at once; raises the first error when every flush has ended."""

def submit_read(
    devices: Sequence[Device],
    member: U32,
    offset: U64,
    length: U64,
    skip: U64,
    take: U64,
    buffer: U32,
    buffer_offset: U64,
    birth: U64,
    first_block: U64,
    checksum_block_bytes: int,
    volume_id: bytes,
    buffers: Sequence[Buffer],
    checksums: U32 | None,
) -> Transfer:
    """Columns as in `headrace.device.batch`. With `checksums` (checksum_block_bytes > 0) every block is verified."""

def submit_ranges(
    devices: Sequence[Device],
    volume_id: bytes,
    sources: Sequence[Source],
    source: U32 | None,
    start: I64,
    length: I64,
    buffers: Sequence[Buffer],
    buffer: U32 | None,
    buffer_offset: I64,
    pages: ChecksumPages | None,
    room: int,
) -> Transfer:
    """Ranges of sources, cut into segments natively; with `pages` every block is verified. `room` bytes around the
    place of each in its buffer may be overwritten."""

def submit_write(
    devices: Sequence[Device],
    member: U32,
    offset: U64,
    length: U64,
    buffer: U32,
    buffer_offset: U64,
    birth: U64,
    first_block: U64,
    checksum_block_bytes: int,
    volume_id: bytes,
    buffers: Sequence[Buffer],
    checksums: U32 | None,
) -> Transfer:
    """`checksums` (writable) receives the checksum of every block; it is complete when the transfer is."""

def discover(
    portals: list[tuple[str, int]],
    *,
    referrals: bool,
    hostnqn: str,
    hostid: bytes,
    host_traddr: str | None,
    host_iface: str | None,
    connect_timeout_s: float,
) -> str:
    """What the discovery controllers offer, as JSON: {"controllers": [{address, generation, via}], "records":
    [{trtype, adrfam, subtype, traddr, ..., problem, controller}], "failures": [{address, via, error}]}."""

def crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, going on from `seed` (0 to start; crc32c(b, crc32c(a)) == crc32c(a + b))."""

class Target:
    """The embedded NVMe/TCP target, its threads in this process."""

    def __init__(self, config: str) -> None:
        """JSON: see `headrace.fabric.options.TargetOptions`. Binds its ports; raises UsageError or DeviceError."""
    @property
    def addresses(self) -> list[tuple[str, int]]: ...
    def status(self) -> str: ...
    def add_namespace(self, nqn: str, namespace: str) -> None:
        """JSON: see `headrace.fabric.options.NamespaceOptions`. Raises UsageError, DeviceError, as do the following."""
    def remove_namespace(self, nqn: str, nsid: int, timeout_s: float) -> bool: ...
    def resize_namespace(self, nqn: str, nsid: int, size_bytes: int, force: bool) -> None: ...
    def set_ana_state(self, nqn: str, group: int, portal: str | None, state: str) -> None: ...
    def disconnect_host(self, hostnqn: str) -> int: ...
    def allow_host(self, nqn: str, hostnqn: str | None, read_only: bool) -> None: ...
    def deny_host(self, nqn: str, hostnqn: str | None) -> int: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stop(self, timeout_s: float) -> None: ...

def command(
    device: Device,
    *,
    admin: bool,
    opcode: int,
    nsid: int | None,
    cdw: tuple[int, int, int, int, int, int],
    data_out: bytes | None,
    read_bytes: int,
    timeout_s: float,
) -> tuple[int, int, bool, str, int, int, bytes]:
    """Status type, status code, do not retry, status in words, DW0, DW1, data. `nsid` None: the device's own."""

def reservation_register(
    device: Device,
    action: str,
    *,
    key: int,
    new_key: int,
    ignore_existing: bool,
    persist: bool | None,
    timeout_s: float,
) -> None: ...
def reservation_acquire(device: Device, action: str, *, key: int, victim: int, type: int, timeout_s: float) -> None: ...
def reservation_release(device: Device, *, key: int, type: int | None, timeout_s: float) -> None:
    """Without a type: clear."""

def reservation_report(
    device: Device, *, timeout_s: float
) -> tuple[int, int, bool, int, list[tuple[int, bool, bytes, int]]]:
    """GEN, RTYPE, PTPLS, REGCTL, and CNTLID, holds, host identifier, key of each registrant."""

def paths(device: Device) -> str:
    """JSON: a list of objects, one for each path; `UsageError` where this is no nvme+tcp: device, here and below."""

def unsettled(device: Device) -> list[tuple[int, int, str, int, float]]:
    """Offset, length, path, generation, seconds since."""

def under_way(device: Device, offset: int, length: int) -> list[tuple[str | None, bool, int, int, float, int]]:
    """Commands that touch these bytes, the oldest first: path (None: it waits to be sent), whether it reads, offset,
    length, seconds since it was sent, how often."""

def settle(device: Device, generation: int) -> int: ...
def reconnect(device: Device) -> None: ...
def lane(device: Device, name: str) -> Device:
    """The same device for "feed", "checkpoint" or "metadata"; closing it ends nothing."""

def guard_writes(device: Device, *, key: int, type: int, timeout_s: float) -> None: ...
def unguard_writes(device: Device) -> None: ...
