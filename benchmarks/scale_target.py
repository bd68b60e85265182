"""Our target on a port of choice: `python -m benchmarks.scale_target PORT` prints it, then tells who is there."""

from __future__ import annotations

import json
import sys

from benchmarks.target import NQN
from headrace.fabric import ListenOptions, MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.units import MIB


def main() -> None:
    options = TargetOptions(
        listen=[ListenOptions(port=int(sys.argv[1]))],
        subsystems=[
            SubsystemOptions(nqn=NQN, namespaces=[NamespaceOptions(media=MemoryMedia(size_bytes=16 * MIB), nsid=1)])
        ],
    )
    with Target(options) as target:
        print(target.addresses[0][1], flush=True)
        for _ in sys.stdin:
            queues = [len(controller["queues"]) for controller in target.status()["controllers"]]
            print(json.dumps({"queues": queues}), flush=True)


if __name__ == "__main__":
    main()
