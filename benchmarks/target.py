"""Our target in a process of its own: `python -m benchmarks.target SIZE NAMESPACES REACTORS` prints its port."""

from __future__ import annotations

import sys

from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions

NQN = "nqn.2024-01.headrace:benchmark"


def main() -> None:
    size_bytes, namespaces, reactors = map(int, sys.argv[1:])
    options = TargetOptions(
        subsystems=[
            SubsystemOptions(
                nqn=NQN,
                namespaces=[
                    NamespaceOptions(media=MemoryMedia(size_bytes=size_bytes), nsid=number + 1)
                    for number in range(namespaces)
                ],
            )
        ],
        reactor_threads=reactors,
    )
    with Target(options) as target:
        print(target.addresses[0][1], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
