"""Ray cluster of several raylets on this machine: `python -m helpers.raylets FOLDER CPUS...`. Runs until it is ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ray.cluster_utils import Cluster


def main() -> None:
    folder, *cpus = sys.argv[1:]
    os.environ["RAY_TMPDIR"] = (
        folder  # otherwise its address is written to a file shared by all clusters of the machine
    )
    Path(folder, "ray").mkdir()
    cluster = Cluster()
    for number, count in enumerate(cpus):
        head = {"include_dashboard": False, "temp_dir": folder} if number == 0 else {}
        cluster.add_node(num_cpus=int(count), object_store_memory=80_000_000, **head)
    cluster.wait_for_nodes()
    nodes = [cluster.head_node, *(node for node in cluster.list_all_nodes() if node is not cluster.head_node)]
    pids = [node.all_processes["raylet"][0].process.pid for node in nodes]
    print("raylets:", cluster.address, *pids, flush=True)
    signal.sigwait({signal.SIGTERM})
    cluster.shutdown()


if __name__ == "__main__":
    main()
