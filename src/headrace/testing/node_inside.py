"""What runs inside of the rig's namespaces (`headrace.testing.nodes` is the outside).

Standard library only: it is run as a file, before anything of the project can be imported.

```
owner ---- control socket ---- guard            in the owner's namespaces; ends when the owner does
                                 |
                               switch           pid 1 of the rig: a network namespace with the bridge, nothing else
                                 |
                               node 0 .. n-1    each pid 1 of its own: network, mounts, hostname, IPC, processes
```

Nothing here has a name on disk. A namespace lives while a process or a descriptor of it does, and the kernel kills
every process of a pid namespace with its pid 1: so all of it goes when the guard ends, and the guard ends when the
owner closes the socket or dies in whatever way. There is nothing to sweep.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MS_NODIRATIME, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_RELATIME = 2048, 4096, 8192, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1

#: One message of the control socket.
CONFIG_BYTES_MAX = 1 << 18
#: What a node joins, in the order in which it has to be joined.
KINDS = ("user", "pid", "net", "ipc", "uts", "mnt")
#: Directories that each node has for itself. What of them is passed in is bound into the new ones.
PRIVATE = ("/tmp", "/var/tmp", "/run")  # and /dev/shm
#: Signals that the process which entered a node passes on to the command.
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class Unavailable(RuntimeError):
    """The machine does not let this user make what the rig is made of."""


def unshare(flags: int) -> None:
    try:
        _check(_libc.unshare(flags), "unshare")
    except OSError as error:
        raise Unavailable(f"namespaces are not allowed here ({error})") from error


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    kind_bytes, data_bytes = kind.encode() if kind else None, data.encode() if data else None
    _check(_libc.mount(source.encode(), target.encode(), kind_bytes, flags, data_bytes), f"mount {target}")


def die_with_parent(parent: int) -> None:
    """For a child just forked by `parent`: go when it goes, also when it went before this call."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):  # 0: the parent is outside of this pid namespace.
        os._exit(1)


def run_batch(program: str, lines: list[str]) -> None:
    """`ip` or `tc` with many commands; the first one that fails ends it."""
    answer = subprocess.run(
        [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise RuntimeError(f"{program}: {answer.stderr.strip()} (of: {'; '.join(lines)})")


# ---- the guard and the switch -------------------------------------------------------------------------------------


def guard(control: socket.socket, owner: int) -> NoReturn:
    config: dict[str, Any] = json.loads(control.recv(CONFIG_BYTES_MAX))
    if os.getppid() != owner:
        os._exit(1)
    owner_ended = os.pidfd_open(owner)
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
    except Unavailable:
        if uid != 0:
            raise
        # Root needs none.
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC)
    # Ignored, and so inherited: Ctrl-C at a terminal is the owner's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _report_failure(control, lambda: switch(control, config, me))
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(owner_ended, select.POLLIN)
    poll.register(ended, select.POLLIN)
    # Only its end: what the switch and the nodes say goes the other way.
    poll.register(control, select.POLLHUP)
    poll.poll()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os._exit(0)


def switch(control: socket.socket, config: dict[str, Any], parent: int) -> None:
    die_with_parent(parent)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        run_batch("ip", ["link set lo up", "link add switch type bridge", "link set switch up"])
        run_batch("ip", ["link add try type veth peer name again", "link del try"])
    except (OSError, RuntimeError) as error:
        raise Unavailable(str(error)) from error
    nodes = []
    for number, node in enumerate(config["nodes"]):
        ours, theirs = socket.socketpair()
        me = os.getpid()
        child = os.fork()
        if child == 0:
            ours.close()
            _report_failure(control, lambda it=node, sock=theirs, pid=me: enter_node(control, sock, config, it, pid))
        theirs.close()
        if ours.recv(1) != b"1":
            os._exit(1)  # It has said why.
        nodes.append((number, child, ours))
    lines = []
    for number, child, _ in nodes:
        lines += [
            f"link add port{number} mtu {config['mtu']} type veth peer name eth0 mtu {config['mtu']} netns {child}",
            f"link set port{number} master switch up",
        ]
    run_batch("ip", lines)
    for _, _, sock in nodes:
        sock.sendall(b"2")
    for _, _, sock in nodes:
        if sock.recv(1) != b"3":
            os._exit(1)
        sock.close()
    send_namespaces(control, {"switch": True})
    control.close()
    idle()


def send_namespaces(control: socket.socket, message: dict[str, Any]) -> None:
    descriptors = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in KINDS]
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def idle() -> NoReturn:
    """As pid 1: children that lost their parent end here, and nothing else happens."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def _report_failure(control: socket.socket, body: Any) -> NoReturn:
    try:
        body()
    except BaseException as error:
        # The owner may be gone: then nobody asks.
        with control:
            unavailable = isinstance(error, Unavailable)
            control.send(json.dumps({"error": str(error) or repr(error), "unavailable": unavailable}).encode())
    finally:
        os._exit(1)


# ---- a node -------------------------------------------------------------------------------------------------------


def enter_node(
    control: socket.socket, sock: socket.socket, config: dict[str, Any], node: dict[str, Any], parent: int
) -> None:
    die_with_parent(parent)
    unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC)
    sock.sendall(b"1")
    if sock.recv(1) != b"2":
        os._exit(1)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _report_failure(control, lambda: node_init(control, sock, config, node, me))
    sock.close()
    control.close()
    os.waitpid(child, 0)
    os._exit(1)


def node_init(
    control: socket.socket, sock: socket.socket, config: dict[str, Any], node: dict[str, Any], parent: int
) -> None:
    die_with_parent(parent)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    socket.sethostname(node["name"])
    address = f"{node['address']}/{config['prefix']}"
    lines = ["link set lo up", f"addr add {address} dev eth0 noprefixroute", "link set eth0 up"]
    route = f"route add {config['network']} dev eth0 src {node['address']}"
    # By route: the kernel lets a namespace choose among more algorithms so than by its sysctl.
    lines.append(f"{route} congctl {config['congestion']}" if config["congestion"] else route)
    run_batch("ip", lines)
    private_files(config, node)
    send_namespaces(control, {"node": node["number"]})
    sock.sendall(b"3")
    sock.close()
    control.close()
    idle()


def private_files(config: dict[str, Any], node: dict[str, Any]) -> None:
    """Fresh temporary directories, the passed directories in them, everything else read-only."""
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    stage = Path("/dev/shm/.stage")
    fresh = [directory for directory in PRIVATE if Path(directory).is_dir()]
    for directory in fresh:
        place = stage / directory[1:]
        place.mkdir(parents=True)
        mount("tmpfs", str(place), "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    writable = set()
    for path, write in [*((path, False) for path in config["visible"]), *((path, True) for path in config["shared"])]:
        inside = any(Path(path).is_relative_to(directory) for directory in fresh)
        place = stage / path[1:] if inside else Path(path)
        if inside:
            place.mkdir(parents=True, exist_ok=True)
        mount(path, str(place), None, MS_BIND | MS_REC)
        if write:
            writable.add(path)
    for directory in fresh:
        mount(str(stage / directory[1:]), directory, None, MS_BIND | MS_REC)
        writable.add(directory)
    for directory in fresh:
        place = stage / directory[1:]
        _check(_libc.umount2(str(place).encode(), MNT_DETACH), f"umount {place}")
        # Also what leads to it; `stage` goes with the last.
        os.removedirs(place)
    own = Path("/run/node")
    own.mkdir()
    for path, text in {**config["files"], **node["files"]}.items():
        if Path(path).exists():
            file = own / Path(path).name
            file.write_text(text)
            mount(str(file), path, None, MS_BIND)
    read_only(writable)


def read_only(but: set[str]) -> None:
    """Every mount but these, the kernel's own file systems and devices."""
    names = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC, "noatime": MS_NOATIME}
    names |= {"nodiratime": MS_NODIRATIME, "relatime": MS_RELATIME}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        target = fields[4].encode().decode("unicode_escape")
        kernel = any(Path(target).is_relative_to(root) for root in ("/proc", "/sys", "/dev"))
        if target in but or kernel:
            continue
        flags = sum(names.get(option, 0) for option in fields[5].split(","))
        try:
            mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
        except FileNotFoundError:
            # Another mount lies over it: nobody can reach it here.
            continue


# ---- a command in a node --------------------------------------------------------------------------------------------


def enter(descriptors: list[int], directory: str, command: list[str]) -> NoReturn:
    """Run `command` in the namespaces of `descriptors`, pass signals on to it, and end as it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
    user_before = Path("/proc/self/ns/user").stat().st_ino
    for kind, descriptor in zip(KINDS, descriptors, strict=True):
        if kind == "user" and os.fstat(descriptor).st_ino == user_before:
            continue  # The rig of a root that may not make user namespaces.
        _check(_libc.setns(descriptor, 0), f"setns {kind}")
        os.close(descriptor)
    child = os.fork()
    if child == 0:
        try:
            _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
            if os.getppid() != 0:
                raise RuntimeError("the pid namespace was not entered")
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.chdir(directory)
            os.execvp(command[0], command)
        except BaseException as error:
            print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    while True:
        number = signal.sigwait(FORWARDED | {signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        # Not that this process dumps core, too.
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def main(arguments: list[str]) -> NoReturn:
    if arguments[0] == "guard":
        control = socket.socket(fileno=int(arguments[1]))
        _report_failure(control, lambda: guard(control, int(arguments[2])))
    descriptors = [int(number) for number in arguments[1].split(",")]
    try:
        enter(descriptors, arguments[2], arguments[3:])
    except OSError as error:
        # The rig ended meanwhile: a pid namespace without its pid 1 takes no process any more.
        print(f"cannot enter the node: {error}", file=sys.stderr, flush=True)
        os._exit(126)


if __name__ == "__main__":
    main(sys.argv[1:])
