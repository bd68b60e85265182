"""The client of suite `fabric-nodes`: reads of 1 MiB from every target given, a fixed number under way of each.

`python -m benchmarks.node_client DEPTH WARM_S MEASURE_S URI...` prints one JSON object. A read counts for the rate when
it ends within the measured time, and for the latencies when it begins there.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np

from headrace.device import open_device
from headrace.units import MIB

#: What `benchmarks.fabric_nodes` serves of each target.
SIZE_BYTES = 8 * MIB


def main(depth: int, warm_s: float, measure_s: float, uris: list[str]) -> None:
    devices = [open_device(uri) for uri in uris]
    begin = time.perf_counter() + warm_s
    end = begin + measure_s
    latencies: list[float] = []
    ended: list[float] = []

    def read(target: int, lane: int) -> None:
        buffer = np.empty(MIB, np.uint8)
        number = lane
        while (sent := time.perf_counter()) < end:
            devices[target].read_into(number * MIB % SIZE_BYTES, buffer)
            now = time.perf_counter()
            number += 1
            if begin <= now < end:
                ended.append(now)
            if sent >= begin:
                latencies.append(now - sent)

    # Threads wait without the GIL, and at some ten reads a second each, Python costs nothing that could be seen.
    threads = [
        threading.Thread(target=read, args=(target, lane)) for target in range(len(devices)) for lane in range(depth)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flow = devices[0].describe()["flow"]
    for device in devices:
        device.close()
    answer = {
        "bytes_per_s": len(ended) * MIB / measure_s,
        "p50_s": float(np.percentile(latencies, 50)),
        "p99_s": float(np.percentile(latencies, 99)),
        "flow": flow,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
