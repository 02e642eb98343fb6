"""Nodes of a cluster come and go: Ray's own cluster for tests has several on this machine.

A process can be connected to one cluster only, so these run in one of their own, each after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import Collector, ParallelEnv
from envkit.errors import WorkerError
from tests.zoo.envs import Chaos
from tests.zoo.ray_cluster import Gated, bytes_in_stores, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STORE_BYTES = 150 * 2**20
_HEALTH = {  # so that a lost node is noticed within 2 s, and not 15
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
FAR = {"num_cpus": 0, "resources": {"far": 1}}  # what an actor asks for, on a node that has two


class Nodes:
    """A cluster of a head, where the caller is, and of far nodes."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
        head = {**options, "include_dashboard": False, "_system_config": _HEALTH}
        self._options = {**options, "resources": {"far": 2}}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False)
        self.far: list[Any] = []

    def add(self) -> None:
        self.far.append(self._cluster.add_node(**self._options))

    def kill(self) -> None:
        self._cluster.remove_node(self.far.pop(), allow_graceful=False)

    def end(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def gated_collector(folder: Path, **options: Any) -> tuple[Collector, Gated]:
    """Build a collector in two far actors."""
    policy = Gated(folder, 2**21)
    options = {"backend": "ray", "backend_options": FAR, "frames_per_batch": 12, **options}
    module = TensorDictModule(policy, ["count"], ["action"])
    return Collector([partial(Chaos, 10**9)] * 2, module, **options), policy


def batch_begun(collector: Collector, policy: Gated, pool: ThreadPoolExecutor) -> Future[Any]:
    """Ask for a batch, and return when both actors are in its first step, the gate being shut."""
    calls = sum(policy.calls())
    policy.shut()
    batch = pool.submit(collector.next)
    wait_until(lambda: sum(policy.calls()) == calls + 2)
    return batch


def rows_of_a_lost_node_go_to_another(nodes: Nodes, folder: Path) -> None:
    options = {"backend": "ray", "backend_options": FAR, "on_worker_failure": "restart"}
    env = ParallelEnv(2, partial(Chaos, 10**9), num_processes=1, **options)
    root = env.reset()

    nodes.kill()
    nodes.add()
    steps, cut = 0, False
    while not cut:
        root.set("action", torch.zeros(2, 1, dtype=torch.int64))
        data, root = env.step_and_maybe_reset(root)
        steps, cut = steps + 1, data["next", "truncated"].any()

    assert data["next", "truncated"].all() and (data["next", "count"] == steps - 1).all()
    assert (root["count"] == 0).all()
    env.close()


def a_batch_goes_on_where_its_node_is_lost_and_another_comes(nodes: Nodes, folder: Path) -> None:
    collector, policy = gated_collector(folder, on_worker_failure="restart")
    with collector, ThreadPoolExecutor() as pool:
        collector.next()
        policy.say(0.4)  # which rounds to 0, and is not what it was built with
        collector.update_policy_weights_()
        pids = collector.worker_pids

        batch = batch_begun(collector, policy, pool)
        nodes.kill()
        nodes.add()
        wait_until(lambda: len(policy.calls()) > 2, 120)  # the first new actor tries its policy
        policy.open()

        lost, following = batch.result(120), collector.next()
        assert lost.shape == following.shape == (2, 6)
        assert lost["next", "truncated"].squeeze(-1).tolist() == [[True] + [False] * 5] * 2
        assert not following["next", "truncated"].any()
        assert following["count"][:, :, 0].tolist() == [[5, 6, 7, 8, 9, 10]] * 2
        assert not set(pids) & set(collector.worker_pids)


def a_batch_on_a_lost_node_is_an_error_that_names_its_workers(nodes: Nodes, folder: Path) -> None:
    collector, policy = gated_collector(folder)
    with collector, ThreadPoolExecutor() as pool:
        collector.next()

        batch = batch_begun(collector, policy, pool)
        nodes.kill()

        with pytest.raises(WorkerError, match=r"worker \d of 2, which held row \d, was lost"):
            batch.result(120)
    nodes.add()


def actors_wait_for_a_node_that_has_room(nodes: Nodes, folder: Path) -> None:
    import ray

    nodes.kill()
    wait_until(lambda: "far" not in ray.cluster_resources())
    with ThreadPoolExecutor() as pool:
        built = pool.submit(gated_collector, folder, start_timeout=120)
        nodes.add()
        collector, _ = built.result(120)

    with collector:
        assert collector.next().shape == (2, 6)


def new_weights_are_stored_once_for_all_nodes(nodes: Nodes, folder: Path) -> None:
    nodes.add()  # an actor on each
    options = {"num_cpus": 0, "resources": {"far": 2}}
    collector, policy = gated_collector(folder, backend_options=options)
    with collector, ThreadPoolExecutor() as pool:
        collector.next()
        policy.say(0.4)
        collector.update_policy_weights_()

        batch = batch_begun(collector, policy, pool)
        held = bytes_in_stores()
        policy.open()
        batch.result(120)

        assert held == pytest.approx(policy.weight.nbytes, rel=0.1)


SCENES = (
    rows_of_a_lost_node_go_to_another,
    a_batch_goes_on_where_its_node_is_lost_and_another_comes,
    a_batch_on_a_lost_node_is_an_error_that_names_its_workers,
    actors_wait_for_a_node_that_has_room,
    new_weights_are_stored_once_for_all_nodes,
)


def play_all(results: Path) -> None:
    """Play the scenes in this process, and write what was raised in each, or nothing."""
    nodes, raised = Nodes(), dict[str, str]()
    nodes.add()
    for scene in SCENES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                scene(nodes, Path(folder))
        except BaseException:
            raised[scene.__name__] = traceback.format_exc()
            break
        raised[scene.__name__] = ""
    nodes.end()
    results.write_text(json.dumps(raised))


@pytest.fixture(scope="module")
def raised(tmp_path_factory) -> dict[str, str]:
    results = tmp_path_factory.mktemp("nodes") / "raised.json"
    program = f"from {__name__} import play_all, Path; play_all(Path({str(results)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=360)
    return json.loads(results.read_text())


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_nodes_come_and_go(raised, scene):
    assert raised.get(scene, "an earlier scene failed") == ""
