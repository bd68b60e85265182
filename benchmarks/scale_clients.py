"""Many idle devices in one process: `python -m benchmarks.scale_clients URI COUNT`; answers `{}` with how many live."""

from __future__ import annotations

import json
import sys

from headrace.device import open_device


def main() -> None:
    devices = [open_device(sys.argv[1]) for _ in range(int(sys.argv[2]))]
    print("ready", flush=True)
    for _ in sys.stdin:
        described = [device.describe() for device in devices]
        answer = {
            "live": sum(about["state"] == "connected" for about in described),
            "reconnects": sum(about["reconnects"] for about in described),
            "attempts": sum(about["reconnect_attempts"] for about in described),
        }
        print(json.dumps(answer), flush=True)
    for device in devices:
        device.close()


if __name__ == "__main__":
    main()
