"""A Ray cluster of a head and three nodes on this machine, as a program: one JSON object a line, until stdin closes.

The first line has the head's address, and the process ids of its store (GCS) and of each node's raylet. `free` is
answered with the resources that nobody has reserved, `add` with the raylet of one more node.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
NODE = {"num_cpus": 3, "num_gpus": 2, "object_store_memory": 80 << 20}


def tell(content: Any) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    head = {"num_cpus": 1, "object_store_memory": 80 << 20, "_system_config": FAST_HEALTH_CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    nodes = [raylet(cluster.add_node(**NODE)) for _ in range(3)]
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    ray.init(address=cluster.address, log_to_driver=False)
    tell({"address": cluster.address, "gcs": gcs, "raylets": nodes})
    for line in sys.stdin:
        tell(ray.available_resources() if line.strip() == "free" else {"raylet": raylet(cluster.add_node(**NODE))})


if __name__ == "__main__":
    main()
