"""A lost node is a lost worker: Ray's own cluster for tests has two nodes on this machine, and one of them dies."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ray
import torch
from ray.cluster_utils import Cluster

from envkit import ParallelEnv
from tests.zoo.envs import Chaos

MEMORY = 80 * 2**20
head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
far = {"num_cpus": 1, "object_store_memory": MEMORY, "resources": {"far": 1}}
node = cluster.add_node(**far)
ray.init(address=cluster.address, log_to_driver=False)
env = ParallelEnv(
    2, lambda: Chaos(10**9), backend="ray", num_processes=1, on_worker_failure="restart",
    backend_options={"address": cluster.address, "num_cpus": 0, "resources": {"far": 1}},
)
root = env.reset()

cluster.remove_node(node, allow_graceful=False)
cluster.add_node(**far)
steps, cut = 0, False
while not cut:
    data, root = env.step_and_maybe_reset(root.set("action", torch.zeros(2, 1, dtype=torch.int64)))
    steps, cut = steps + 1, data["next", "truncated"].any()

assert data["next", "truncated"].all() and (data["next", "count"] == steps - 1).all()
assert (root["count"] == 0).all()
env.close()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_node_is_a_lost_worker_and_another_takes_its_rows():
    subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], check=True, timeout=360)
