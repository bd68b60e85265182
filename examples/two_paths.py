"""A volume by two portals of one target; one of them is lost while it is written to, and comes back.

Run: python examples/two_paths.py
"""

from headrace.device import NativeDevice
from headrace.fabric import ListenOptions, MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.volume import Volume

NQN = "nqn.2024-01.example:two-paths"
options = TargetOptions(
    listen=[ListenOptions(name="a"), ListenOptions(name="b")],
    subsystems=[SubsystemOptions(nqn=NQN, namespaces=[NamespaceOptions(media=MemoryMedia(size_bytes=64 << 20))])],
)

with Target(options) as target:
    address = target.uri()  # nvme+tcp://127.0.0.1:PORT,127.0.0.1:PORT/NQN?nsid=1: every portal is a path
    print(address)
    Volume.create(address, name="example").close()
    with Volume.open(address, write=True) as volume, volume.session(run_id="example") as session:
        for step in range(20):
            if step == 5:
                target.set_ana_state(NQN, 1, "inaccessible", portal="a")
            if step == 15:
                target.set_ana_state(NQN, 1, "optimized", portal="a")
            with session.transaction() as transaction:
                transaction.put(f"step-{step:06}/weights", bytes(1_000_000))
            device = volume.devices[0]
            assert isinstance(device, NativeDevice)  # over the fabric: it has paths
            usable = [path.portal for path in device.paths() if path.usable]
            print(f"step {step}: usable {', '.join(usable)}")
    with Volume.open(address) as volume:
        assert len(list(volume.list("step-"))) == 20
