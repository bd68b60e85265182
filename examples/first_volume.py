"""A target, a volume on it, two objects in one commit, and a reader. All over NVMe/TCP, in this one process.

Run: python examples/first_volume.py
"""

from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.units import MIB
from headrace.volume import Volume

namespace = NamespaceOptions(media=MemoryMedia(size_bytes=64 * MIB))
subsystem = SubsystemOptions(nqn="nqn.2026-01.io.example:disk", namespaces=[namespace])

with Target(TargetOptions(subsystems=[subsystem])) as target:
    members = [target.uri()]
    Volume.create(members, name="first").close()
    with (
        Volume.open(members, write=True) as volume,
        volume.session(run_id="example") as session,
        session.transaction() as transaction,
    ):
        transaction.put("greeting", b"hello, turbine")
        transaction.put("numbers", bytes(range(256)) * 4096)
    with Volume.open(members) as volume:
        for entry in volume.list():
            print(f"{entry.length_bytes:>10} {entry.name}")
        print(volume.read("greeting").decode())
