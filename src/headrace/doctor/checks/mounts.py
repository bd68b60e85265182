"""File systems: how they are mounted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from headrace.doctor.facts import Facts
from headrace.doctor.facts.mounts import Mount
from headrace.doctor.finding import ERROR, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage, seen
from headrace.doctor.verdict import PRESENTED, verdict_of_mount
from headrace.units import format_bytes

_LARGE = 1 << 20
#: Of Lustre: requests under way at each target, pages of each, MiB ahead in a file.
_RPCS, _PAGES, _READ_AHEAD_MIB = 8, 1024, 64
_MANY_CPUS = 64
#: Of `extX`, XFS, btrfs.
_BARRIERS_OFF = ("nobarrier",)


def check_mounts(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    points = {point for one in storage for point in one.mounted}
    for mount in seen(facts.mounts):
        if mount.point not in points:
            continue
        if mount.kind in ("nfs", "nfs4"):
            yield from _nfs(mount)
        elif mount.kind in ("cifs", "smb3"):
            yield from _smb(mount)
        elif mount.kind == "lustre":
            yield from _lustre(mount)
            yield from _lustre_client(facts, mount)
        elif not mount.network:
            yield from _local(facts, mount)
        yield from _all(mount)


def _nfs(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    rdma = options.get("proto", "").startswith("rdma")
    if "soft" in options or "softerr" in options:
        yield _about(
            mount, "nfs-soft", ERROR, "gives up on I/O when its server is slow",
            evidence="soft" if "soft" in options else "softerr",
            why="a write that was given up may be lost without the program noticing: a checkpoint with a hole",
            what_to_do="unmount it, and mount it hard, with its other options: a remount cannot change that",
            command=_again(mount, "hard"),
        )  # fmt: skip
    if "nconnect" not in options and not rdma:
        yield _about(
            mount, "nfs-nconnect", WARNING, "has one TCP connection",
            evidence="no nconnect among its options, proto=" + options.get("proto", "?"),
            why="one connection is one core and one flow: about 1 to 2 GB/s, whatever the link",
            what_to_do="unmount it, and all mounts of that server, for they share connections; mount it with "
            "nconnect=8 or 16 beside its other options",
            command=_again(mount, "nconnect=16"),
        )  # fmt: skip
    small = [f"{name}={size}" for name in ("rsize", "wsize") if (size := mount.number_option(name) or _LARGE) < _LARGE]
    if small:
        yield _about(
            mount, "nfs-small-requests", WARNING, "asks for little at a time",
            evidence=", ".join(small),
            why="each request is a round trip: large files want 1 MiB",
            what_to_do="mount it with rsize=1048576,wsize=1048576; the server may allow less",
            command=f"nfsstat -m {quote(mount.point)}",
        )  # fmt: skip
    if options.get("vers", "").startswith("3") and "nolock" not in options:
        yield _about(
            mount, "nfs-version-3", NOTE, "is NFS version 3",
            evidence=f"vers={options['vers']}",
            why="no trunking, locks by a protocol of their own, one more round trip to open a file",
            what_to_do="try 4.1 or 4.2 where the server has it",
        )  # fmt: skip
    if "noac" in options or options.get("actimeo") == "0":
        yield _about(
            mount, "nfs-no-attribute-cache", WARNING, "asks the server for attributes each time",
            evidence="noac" if "noac" in options else "actimeo=0",
            why="every open and stat is a round trip, and writes are synchronous: data sets of many files crawl",
            what_to_do="where nobody else changes the files, keep attributes for some seconds: unmount it, mount it so",
            command=_again(mount, "actimeo=60"),
        )  # fmt: skip


def _smb(mount: Mount) -> Iterator[Finding]:
    small = [f"{name}={size}" for name in ("rsize", "wsize") if (size := mount.number_option(name) or _LARGE) < _LARGE]
    if small:
        yield _about(
            mount, "smb-small-requests", WARNING, "asks for little at a time", evidence=", ".join(small),
            why="each request is a round trip", what_to_do="mount it with rsize=4194304,wsize=4194304",
        )  # fmt: skip
    if "soft" in mount.options:
        yield _about(
            mount, "smb-soft", WARNING, "gives up on I/O when its server is slow", evidence="soft",
            why="programs see errors that a restart of the server would not have caused", what_to_do="mount it hard",
        )  # fmt: skip
    if "multichannel" not in mount.options:
        yield _about(
            mount, "smb-one-channel", NOTE, "has one TCP connection", evidence="no multichannel among its options",
            why="one connection is one core and one flow",
            what_to_do="mount it with multichannel,max_channels=4 where the server has several interfaces",
        )  # fmt: skip


def _lustre(mount: Mount) -> Iterator[Finding]:
    if "flock" not in mount.options and "localflock" not in mount.options:
        yield _about(
            mount, "lustre-flock", NOTE, "has no file locks", evidence="neither flock nor localflock among its options",
            why="libraries that lock their files (HDF5, SQLite, caches of Hugging Face) fail there",
            what_to_do="unmount it, and mount it with flock beside its other options",
            command=_again(mount, "flock"),
        )  # fmt: skip


def _lustre_client(facts: Facts, mount: Mount) -> Iterator[Finding]:
    """What is under way is bounded for each target; what is read ahead, for each file and in all."""
    name = mount.source.rpartition(":/")[2].partition("/")[0]
    client = next((one for one in facts.lustre if one.name == name), None)
    if client is None:
        return
    few, small = client.rpcs_in_flight, client.pages_per_rpc
    slow = few is not None and few <= _RPCS and (facts.host.cpus or 0) >= _MANY_CPUS
    if slow or (small is not None and small < _PAGES):
        under_way = f"{format_bytes(client.targets * few * small * 4096)} in all" if few and small else "little"
        yield _about(
            mount, "lustre-requests", NOTE, f"may have {few or '?'} requests under way at each target",
            evidence=f"{client.place}/{name}-OST*: max_rpcs_in_flight {few}, max_pages_per_rpc {small} (of 4 KiB), the "
            f"least of {client.targets} targets; {facts.host.cpus or '?'} processors",
            why=f"{under_way} is under way at most: what a node gets is that over the round trip",
            what_to_do="raise both on nodes with many processors, where the servers keep up",
            command=f"lctl set_param osc.{name}-OST*.max_rpcs_in_flight=32 osc.{name}-OST*.max_pages_per_rpc=1024",
        )  # fmt: skip
    ahead = client.read_ahead_file
    if ahead is not None and ahead < _READ_AHEAD_MIB:
        yield _about(
            mount, "lustre-read-ahead", NOTE, f"reads {ahead} MiB of a file ahead",
            evidence=f"max_read_ahead_per_file_mb {ahead}, max_read_ahead_mb {client.read_ahead}",
            why="one reader of a checkpoint or a shard has no more than that under way"
            if ahead else "each read waits for its own round trip",
            what_to_do="raise it, for files that are read from one end to the other",
            command=f"lctl set_param llite.{name}-*.max_read_ahead_mb=1024 "
            f"llite.{name}-*.max_read_ahead_per_file_mb=256",
        )  # fmt: skip


def _local(facts: Facts, mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if any(one in options for one in _BARRIERS_OFF) or options.get("barrier") == "0":
        yield _about(
            mount, "fs-no-barriers", ERROR, "does not flush the disk's cache", evidence="nobarrier",
            why="what was said to be durable is lost with the power, and the file system with it",
            what_to_do="mount it with barriers, unless every cache below is backed by a battery",
            command=f"mount -o remount,{'barrier=1' if mount.kind[:3] == 'ext' else 'barrier'} {quote(mount.point)}",
        )  # fmt: skip
    if options.get("data") == "journal":
        yield _about(
            mount, "fs-data-journal", WARNING, "writes data twice", evidence="data=journal",
            why="checkpoints go to the journal first: half of the bandwidth, and no O_DIRECT",
            what_to_do="mount it with data=ordered",
        )  # fmt: skip
    if "discard" in options and mount.kind != "btrfs" and mount.point != "/":
        yield _about(
            mount, "fs-discard", NOTE, "discards while it deletes", evidence="discard",
            why="deleting an old checkpoint makes others' I/O wait on some devices",
            what_to_do="trim once a week instead (fstrim.timer)",
            command=f"mount -o remount,nodiscard {quote(mount.point)}",
        )  # fmt: skip
    verdict = verdict_of_mount(facts, mount)
    if verdict.ephemeral and verdict.word == PRESENTED and mount.point not in ("/", "/boot", "/boot/efi"):
        yield _about(
            mount, "fs-ephemeral", NOTE, "is gone when the instance stops", evidence=verdict.why,
            why="a checkpoint that is nowhere else is lost with the instance: fine for copies and caches",
            what_to_do="keep checkpoints on storage that outlives the instance",
        )  # fmt: skip


def _again(mount: Mount, option: str) -> str:
    """Looks only: among the options that the kernel shows are those of its own (`sec=`, `ro`), and ones it made."""
    kind = "lustre" if mount.kind == "lustre" else "nfs"
    return (
        f"findmnt -no OPTIONS {quote(mount.point)}  # umount it, then "
        f"mount -t {kind} -o THESE,{option} {quote(mount.source)} {quote(mount.point)}"
    )


def _all(mount: Mount) -> Iterator[Finding]:
    options = mount.options
    if "sync" in options or "dirsync" in options:
        yield _about(
            mount, "fs-sync", WARNING, "writes every byte through", evidence="sync" if "sync" in options else "dirsync",
            why="each write waits for the storage: a checkpoint takes many times as long",
            what_to_do="mount it async; programs that need durability ask for it (fsync)",
            command=f"mount -o remount,async {quote(mount.point)}",
        )  # fmt: skip
    if "strictatime" in options:
        yield _about(
            mount, "fs-atime", WARNING, "writes at each read", evidence="strictatime",
            why="every sample that is read changes its inode", what_to_do="mount it relatime or noatime",
            command=f"mount -o remount,noatime {quote(mount.point)}",
        )  # fmt: skip


def _about(
    mount: Mount, id: str, severity: str, title: str, *, evidence: str, why: str, what_to_do: str,
    command: str | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        id=id, severity=severity, about=(mount.point,), title=f"{mount.point} {title}",
        evidence=f"/proc/self/mountinfo, {mount.kind} of {mount.source}: {evidence}", why=why, what_to_do=what_to_do,
        command=command,
    )  # fmt: skip
