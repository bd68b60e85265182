"""Who this host is: its names in /etc/nvme, and those under which the kernel connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.facts.host import uuid_of
from headrace.doctor.finding import ERROR, MACHINE, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage

#: Identifiers that firmware has where nobody wrote one: `nvme gen-hostnqn` gives all such machines one name.
_PLACEHOLDERS = (
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "03000200-0400-0500-0006-000700080009",
    "12345678-1234-5678-90ab-cddeefaabbcc",
)
#: Another name and identifier for this host, in place of those that it has.
NEW_PAIR = (
    "uuid=$(uuidgen); echo $uuid > /etc/nvme/hostid; "
    "echo nqn.2014-08.org.nvmexpress:uuid:$uuid > /etc/nvme/hostnqn"
)  # fmt: skip


def check_identity(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    identity = facts.host.identity
    connected = [one for one in facts.nvme.controllers if one.fabrics and not one.discovery]
    targets = any(one.kind == "target" for one in storage) and not identity.in_environment
    nqn, hostid = identity.nqn_uuid, uuid_of(identity.hostid)
    if (connected or targets) and (identity.hostnqn is None or identity.hostid is None):
        missing = [name for name in ("hostnqn", "hostid") if getattr(identity, name) is None]
        yield Finding(
            id="identity-missing",
            severity=WARNING,
            about=(MACHINE,),
            title=f"this host has no {' and no '.join(missing)} of its own",
            evidence=", ".join(f"/etc/nvme/{name}: not there, or not readable" for name in missing),
            why="targets admit hosts by name, and give reservations to identifiers; what is made up at each start is "
            "another host each time",
            what_to_do="look as root whether it is there; if not, give each node one pair, once, not in the image",
            # What is there stays: targets know this host by it.
            command="mkdir -p /etc/nvme; cd /etc/nvme; [ -e hostid ] || sed -n 's/.*:uuid://p' hostnqn 2>/dev/null | "
            "grep . > hostid || uuidgen > hostid; "
            "[ -e hostnqn ] || echo nqn.2014-08.org.nvmexpress:uuid:$(cat hostid) > hostnqn",
        )
    if identity.hostid is not None and (hostid is None or hostid.int == 0):
        yield Finding(
            id="identity-hostid",
            severity=ERROR,
            about=(MACHINE,),
            title="the host identifier is none",
            evidence="/etc/nvme/hostid is not a UUID, or all zeros",
            why="NVMe over Fabrics forbids it, and targets refuse it",
            what_to_do="make one for this node" + ("" if nqn is None else ": the one that its name has"),
            command="uuidgen > /etc/nvme/hostid" if nqn is None else f"echo {nqn} > /etc/nvme/hostid",
        )
    if nqn is not None and str(nqn) in _PLACEHOLDERS:
        yield Finding(
            id="identity-placeholder",
            severity=ERROR,
            about=(MACHINE,),
            title="the host's name is made of an identifier that many machines have",
            evidence=f"/etc/nvme/hostnqn: ...:uuid:{nqn}",
            why="to a target all of them are one host: it mixes up who is allowed, and who holds a reservation",
            what_to_do="make a random one for each node, and allow it on the targets",
            command=NEW_PAIR,
        )
    if nqn is not None and hostid is not None and nqn != hostid:
        yield Finding(
            id="identity-pair",
            severity=NOTE,
            about=(MACHINE,),
            title="name and identifier of this host are of two origins",
            evidence="the UUID in /etc/nvme/hostnqn is not the one in /etc/nvme/hostid",
            why="allowed; but so look images of which one file was made anew and the other one copied, and the copies "
            "then share what was copied",
            what_to_do="compare with another node: `headrace doctor --json` on each, `--nodes` over all",
            command="cat /etc/nvme/hostnqn /etc/nvme/hostid",
        )
    dmi = uuid_of(identity.dmi_uuid)
    if nqn is not None and dmi is not None and str(dmi) not in _PLACEHOLDERS and nqn != dmi and nqn != hostid:
        yield Finding(
            id="identity-cloned",
            severity=WARNING,
            about=(MACHINE,),
            title="the host's name may be that of another machine",
            evidence="the UUID in /etc/nvme/hostnqn is neither DMI's product_uuid nor /etc/nvme/hostid",
            why="a name that came with the image is the name of every clone: to a target they are one host",
            what_to_do="make a new pair on each node at its first start, and allow it on the targets",
            command="nvme gen-hostnqn  # prints one, and changes nothing",
        )
    yield from _pairs(facts)


def _pairs(facts: Facts) -> Iterator[Finding]:
    pairs: dict[str, set[str]] = {}
    names: dict[str, set[str]] = {}
    for one in facts.nvme.controllers:
        if one.fabrics and one.hostnqn and one.hostid:
            pairs.setdefault(one.hostnqn, set()).add(one.hostid)
            names.setdefault(one.hostid, set()).add(one.hostnqn)
    about = tuple(one.name for one in facts.nvme.controllers if one.fabrics)
    mixed = [hostnqn for hostnqn, hostids in pairs.items() if len(hostids) > 1]
    mixed += [hostid for hostid, hostnqns in names.items() if len(hostnqns) > 1]
    if mixed:
        yield Finding(
            id="identity-mixed",
            severity=WARNING,
            about=about,
            title="the kernel has connected with names and identifiers crosswise",
            evidence=f"{len(mixed)} names or identifiers go with more than one of the other",
            why="newer kernels refuse such a connection (Invalid argument), and reservations belong to the identifier: "
            "connections of one host do not share them",
            what_to_do="once nothing uses their disks, disconnect, and connect all with the one pair of /etc/nvme",
            command="grep . /sys/class/nvme/*/hostnqn /sys/class/nvme/*/hostid",
        )
    own = facts.host.identity
    other = tuple(
        one.name for one in facts.nvme.controllers
        if one.fabrics and own.hostid and one.hostid and uuid_of(one.hostid) != uuid_of(own.hostid)
    )  # fmt: skip
    if other and not mixed:
        yield Finding(
            id="identity-other",
            severity=NOTE,
            about=other,
            title="the kernel has connected as another host than /etc/nvme says",
            evidence=f"hostid of {', '.join(other)} is not /etc/nvme/hostid",
            why="after the next start it connects as somebody else, to whom the target allows other things",
            what_to_do="make both the same",
            command="grep . /sys/class/nvme/*/hostid /etc/nvme/hostid",
        )
