"""What this process may use, and the kernel under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.finding import ERROR, MACHINE, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage
from headrace.units import GIB, format_bytes

#: Open files: fewer are too few for a rank with its loader; 1024 is what Linux gives, and enough for most.
_FILES_FEW, _FILES_NOTE = 512, 4096
#: Of the limit: beyond it the kernel takes back what it had cached of files.
_NEARLY = 0.9
#: Of the memory.
_HUGE_SHARE = 0.1
_ABOUT = (MACHINE,)


def check_limits(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    yield from _memory(facts)
    yield from _processors(facts)
    yield from _ulimits(facts)
    yield from _io_uring(facts)
    yield from _huge_pages(facts)
    yield from _kernel(facts)


def _memory(facts: Facts) -> Iterator[Finding]:
    limits, whole = facts.limits, facts.host.memory_bytes
    most, used = limits.memory_max_bytes, limits.memory_used_bytes
    if limits.killed:
        yield Finding(
            id="cgroup-killed",
            severity=ERROR,
            about=_ABOUT,
            title=f"{limits.killed} processes of this cgroup were killed for want of memory",
            evidence=f"memory.events of {limits.cgroup}: oom_kill {limits.killed}",
            why="ranks and loader workers disappear so, without a message of their own",
            what_to_do="ask for more memory, or keep less in flight (workers, prefetch, pinned buffers)",
            command="cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/memory.events",
        )
    if limits.memory_slowed and limits.memory_high_bytes is not None:
        yield Finding(
            id="cgroup-slowed",
            severity=WARNING,
            about=_ABOUT,
            title=f"this cgroup was slowed down {limits.memory_slowed} times, for having too much memory",
            evidence=f"memory.events of {limits.cgroup}: high {limits.memory_slowed}; memory.high: "
            f"{limits.memory_high_bytes}",
            why="whoever wants memory sleeps while files are thrown out of it: loaders and saves stand still, and it "
            "looks like slow storage",
            what_to_do="ask for more (memory.high), or keep less in flight (workers, prefetch, pinned buffers)",
            command="cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/memory.events",
        )
    if most is None or (whole is not None and most >= whole):
        return
    full = used is not None and used > most * _NEARLY
    yield Finding(
        id="cgroup-memory",
        severity=WARNING if full else NOTE,
        about=_ABOUT,
        title=f"the cgroup allows {format_bytes(most)} of memory" + (", and it is nearly used up" if full else ""),
        evidence=f"limit of {limits.cgroup}: {most}"
        + (f", used: {used}" if used is not None else "")
        + (f", of it cached files: {limits.memory_file_bytes}" if limits.memory_file_bytes is not None else ""),
        why="cached files count: where it is full, what was just read is thrown away, and reading again costs the same",
        what_to_do="ask for more, or read past the page cache (headrace does)",
        command="cat /proc/self/cgroup; systemd-cgtop -m",
    )


def _processors(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    throttled, periods = limits.cpu_throttled, limits.cpu_periods
    if throttled and periods and throttled > periods / 100:
        yield Finding(
            id="cgroup-throttled",
            severity=WARNING,
            about=_ABOUT,
            title=f"this cgroup was stopped in {throttled / periods:.0%} of all periods, for want of processor time",
            evidence=f"cpu.stat of {limits.cgroup}: nr_throttled {throttled}, nr_periods {periods}"
            + (f"; quota {limits.cpu_quota:g} processors" if limits.cpu_quota else ""),
            why="loader and I/O threads stand still for up to 100 ms at a time: it looks like slow storage",
            what_to_do="raise or drop the quota; pin by cpuset instead",
            command="cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/cpu.stat",
        )
    elif limits.cpu_quota is not None and limits.cpu_quota < (facts.host.cpus or 0):
        yield Finding(
            id="cgroup-cpu",
            severity=NOTE,
            about=_ABOUT,
            title=f"the cgroup allows {limits.cpu_quota:g} of {facts.host.cpus} processors",
            evidence=f"cpu quota of {limits.cgroup}",
            why="NVMe/TCP costs some 0.1 to 0.3 of a core for each GB/s, decoding far more",
            what_to_do="count loader workers against the quota, not against the machine",
        )


def _ulimits(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if limits.files is not None and limits.files < _FILES_NOTE:
        few = limits.files < _FILES_FEW
        yield Finding(
            id="ulimit-files",
            severity=WARNING if few else NOTE,
            about=_ABOUT,
            title=f"a process may have {limits.files} files open",
            evidence=f"/proc/self/limits, Max open files: {limits.files} (hard: {limits.files_hard})",
            why="a rank with a few connections, shards and loader workers may run out: Too many open files"
            if few
            else "headrace needs a handful; PyTorch's loader workers hand tensors over as open files, hundreds of them "
            "where many batches are ahead",
            what_to_do="raise it" if few else "nothing, until it says: Too many open files; then raise it",
            command="ulimit -n 65536  # for all: nofile in /etc/security/limits.conf, or LimitNOFILE=",
        )
    locks = any(not one.software for one in facts.rdma.devices)
    if limits.memlock_bytes is not None and locks and limits.memlock_bytes < GIB:
        yield Finding(
            id="ulimit-memlock",
            severity=WARNING,
            about=_ABOUT,
            title=f"a process may lock {format_bytes(limits.memlock_bytes)} of memory",
            evidence=f"/proc/self/limits, Max locked memory: {limits.memlock_bytes}",
            why="RDMA registers its buffers by locking them: NCCL and GPUDirect fail, with Cannot allocate memory",
            what_to_do="lift it",
            command="ulimit -l unlimited  # for all: memlock in /etc/security/limits.conf, or LimitMEMLOCK=",
        )


def _io_uring(facts: Facts) -> Iterator[Finding]:
    """What the kernel answered counts; where nobody asked it, its setting, and whether a filter is in force."""
    value, said = facts.limits.io_uring_disabled, facts.limits.io_uring
    why = (
        "local files and block devices are then read by threads that wait, at more processor time each; NVMe/TCP by "
        "headrace's host does not use it"
    )
    if value in (1, 2) and said != "allowed":
        yield Finding(
            id="io-uring-off",
            severity=WARNING if value == 2 else NOTE,
            about=_ABOUT,
            title="io_uring is switched off" + ("" if value == 2 else " but for a group"),
            evidence=f"kernel.io_uring_disabled: {value}" + (f"; io_uring_setup: {said}" if said else ""),
            why=why,
            what_to_do="allow it where the disks are local and fast",
            command="sysctl -w kernel.io_uring_disabled=0",
        )
    elif said not in (None, "allowed"):
        filtered = facts.limits.seccomp == 2
        yield Finding(
            id="io-uring-refused",
            severity=NOTE,
            about=_ABOUT,
            title="the kernel refuses io_uring to this process",
            evidence=f"io_uring_setup: {said}"
            + (
                f"; a filter of system calls is in force (Seccomp: 2), {facts.host.container or 'no container seen'}"
                if filtered
                else ""
            ),
            why=why,
            what_to_do="nothing, unless disks are local and fast; then a profile that allows io_uring's three calls"
            if filtered
            else "a kernel that has it (5.1 or later, with CONFIG_IO_URING), where disks are local and fast",
        )
    elif said is None and facts.limits.seccomp == 2 and facts.host.container:
        yield Finding(
            id="io-uring-filtered",
            severity=NOTE,
            about=_ABOUT,
            title="a filter of system calls is in force",
            evidence=f"/proc/self/status, Seccomp: 2; {facts.host.container}",
            why="the usual profiles of containers forbid io_uring: `engine` of a device says which way is in use",
            what_to_do="nothing, unless disks are local and fast; then a profile that allows io_uring's three calls",
        )


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    """headrace needs none; SPDK does. Those that nobody has are missing elsewhere."""
    free, whole = facts.host.huge_free_bytes, facts.host.memory_bytes
    if free and whole and free > whole * _HUGE_SHARE:
        yield Finding(
            id="huge-pages-idle",
            severity=NOTE,
            about=_ABOUT,
            title=f"{format_bytes(free)} of memory are set aside as huge pages, and nobody has them",
            evidence=f"/proc/meminfo: HugePages_Total {format_bytes(facts.host.huge_bytes or 0)}, HugePages_Free "
            f"{format_bytes(free)}, of {format_bytes(whole)}",
            why="the page cache and loaders cannot use them: what was read is forgotten sooner. headrace needs none; "
            "SPDK and DPDK do",
            what_to_do="set fewer aside, unless something that wants them is yet to start",
            command="sysctl vm.nr_hugepages",
        )


def _kernel(facts: Facts) -> Iterator[Finding]:
    version = facts.host.kernel_version
    if version is None:
        return
    by_kernel = any(one.fabrics for one in facts.nvme.controllers)
    for least, needed, what in (
        ((5, 0), by_kernel, "NVMe/TCP"),
        ((6, 5), by_kernel, "reservations for users other than root"),
    ):
        if needed and version < least:
            yield Finding(
                id="kernel-old",
                severity=NOTE,
                about=_ABOUT,
                title=f"Linux {version[0]}.{version[1]} has no {what}",
                evidence=f"/proc/sys/kernel/osrelease: {facts.host.kernel}; it came with {least[0]}.{least[1]}",
                why="what needs it falls back or fails",
                what_to_do="a newer kernel, where that matters",
            )
