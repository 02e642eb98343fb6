"""Versions of a policy: counted or drawn, shown by an env, and counted by a collector."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import Collector, GymEnv, MultiSyncCollector, PolicyVersion, SerialEnv, TransformedEnv
from envkit.errors import ArgumentError


def policy() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])


@pytest.mark.parametrize("kind", ["int", int, "uuid", str])
def test_an_env_shows_the_version_that_was_told(kind):
    version = PolicyVersion(kind)
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), version)
    first = version.version

    root = env.rand_action(env.reset())
    version.increment_version()
    data = env.step(root)

    shown = root["policy_version"], data["next", "policy_version"]
    if kind in ("int", int):
        assert [one.tolist() for one in shown] == [[0, 0], [1, 1]]
    else:
        assert shown == (first, version.version) and first != version.version
    assert [change.old_version for change in version.version_history] == [None, first]
    env.close()


def test_a_version_is_saved_with_the_transform():
    version, other = PolicyVersion(), PolicyVersion()
    version.increment_version()

    other.load_state_dict(version.state_dict())

    assert other.version == 1


@pytest.mark.parametrize(
    "kind", [Collector, pytest.param(MultiSyncCollector, marks=pytest.mark.slow)]
)
def test_a_collector_counts_updates_and_records_which_version_acted(kind):
    version, workers = PolicyVersion(), {} if kind is Collector else {"num_workers": 1}
    make = partial(GymEnv, "Pendulum-v1")
    options = {"frames_per_batch": 4, "record_for_resume": True, **workers}
    collector = kind(make, policy(), total_frames=12, track_policy_version=version, **options)

    shown = []
    for batch in collector:
        shown.append(batch["policy_version"].flatten().tolist())
        collector.update_policy_weights_()
    state = collector.state_dict()
    collector.shutdown()
    resumed = kind(make, policy(), track_policy_version=PolicyVersion(), **options)
    resumed.load_state_dict(state)
    resumed.shutdown()

    assert shown == [[0] * 4, [1] * 4, [2] * 4]
    assert version.version == collector.policy_version == collector.stats()["policy_version"] == 3
    assert len(version.version_history) == 4
    assert collector.policy_version_tracker is version
    assert resumed.policy_version_tracker.version == 3


@pytest.mark.parametrize(
    "kind", [Collector, pytest.param(MultiSyncCollector, marks=pytest.mark.slow)]
)
def test_a_version_that_is_counted_by_itself_is_that_of_the_collector(kind):
    version, workers = PolicyVersion(), {} if kind is Collector else {"num_workers": 1}
    options = {"frames_per_batch": 4, "total_frames": 16, "track_policy_version": version}
    collector = kind(partial(GymEnv, "Pendulum-v1"), policy(), **options, **workers)

    shown = []
    for batch in collector:
        shown.append(batch["policy_version"].flatten().tolist())
        (version if len(shown) % 2 else collector).increment_version()
    collector.shutdown()

    assert shown == [[0] * 4, [1] * 4, [2] * 4, [3] * 4]
    assert collector.policy_version == version.version == 4


def used() -> PolicyVersion:
    version = PolicyVersion()
    version.increment_version()
    return version


@pytest.mark.parametrize("make", [used, partial(PolicyVersion, "uuid")])
def test_a_collector_refuses_versions_that_it_cannot_count(make):
    with pytest.raises(ArgumentError, match=r"Pass a new PolicyVersion\('int'\)"):
        Collector(GymEnv("Pendulum-v1"), frames_per_batch=4, track_policy_version=make())


def test_another_kind_of_version_is_refused():
    with pytest.raises(ArgumentError, match="version_type is 'date'"):
        PolicyVersion("date")
