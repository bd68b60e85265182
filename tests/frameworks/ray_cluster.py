"""A Ray cluster of two nodes on this machine, for `test_ray.py`; ends with its standard input.

-> "kill"            the raylet of the second node is killed
-> "other FOLDER"    a node comes that takes headrace from there
<- the address; then a line for each command that was carried out
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def main() -> None:
    # Its sockets' names are bounded: no folder of the tests.
    folder = tempfile.mkdtemp(prefix="hr-ray-")
    # Where Ray notes the address of the machine's last cluster, whatever folder it is given; it makes no such folder.
    os.environ["RAY_TMPDIR"] = folder
    Path(folder, "ray").mkdir()
    cluster = None
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "temp_dir": folder})
        second = cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        print(cluster.address, flush=True)
        for line in sys.stdin:
            command, _, rest = line.strip().partition(" ")
            if command == "kill":
                second.kill_raylet(check_alive=False)
            elif command == "other":
                cluster.add_node(**NODE, env_vars={"PYTHONPATH": rest}, wait=True)
            print(command, flush=True)
    finally:
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
