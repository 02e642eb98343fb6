"""Groups of agents keep batch axes of their own, whichever way data of a pool takes."""

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    AsyncEnvPool,
    Collector,
    MixedEnv,
    MultiSyncDataCollector,
    ParallelEnv,
    SerialEnv,
    Stack,
    TransformedEnv,
    check_env_specs,
)
from envkit.data.paths import node_axes
from tests.reference.compare import OURS
from tests.reference.transforms.worlds import teams
from tests.zoo.shaped_envs import Groups

AXES = {path: (size,) for name, size in Groups.SIZES.items() for path in (name, ("next", name))}


def axes_of(td):
    return {path if len(path) > 1 else path[0]: more for path, more in node_axes(td).items()}


def at_root(axes):
    return {path: more for path, more in axes.items() if isinstance(path, str)}


@pytest.fixture(params=[True, False], ids=["rows", "tensordicts"])
def pool(request):
    with SerialEnv(2, Groups, use_buffers=request.param) as env:
        yield env


def test_of_steps_resets_and_rollouts(pool):
    root = pool.reset()
    step, following = pool.step_and_maybe_reset(pool.rand_action(root.clone()))
    mask = torch.tensor([[True], [False]])

    assert axes_of(root) == axes_of(following) == at_root(AXES)
    assert axes_of(step) == AXES
    assert axes_of(pool.reset(TensorDict({"_reset": mask}, [2]))) == at_root(AXES)
    for options in ({}, {"break_when_any_done": False}, {"policy": pool.rand_action}):
        assert axes_of(pool.rollout(3, **options)) == AXES
    assert pool.rollout(3, break_when_any_done=False)["agent0"].batch_size == (2, 3, 2)


def test_of_a_single_env_that_is_reset_in_part():
    env = Groups()
    env.reset()

    assert axes_of(env.reset(TensorDict({"_reset": torch.tensor([True])}))) == at_root(AXES)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_of_asynchronous_envs(use_buffers):
    with AsyncEnvPool([Groups] * 2, backend="threading", use_buffers=use_buffers) as env:
        env.async_reset_send(env_index=[0, 1])
        root = env.async_reset_recv(min_get=2)
        env.async_step_and_maybe_reset_send(env.rand_action(root))
        step, following = env.async_step_and_maybe_reset_recv(min_get=2)

    assert axes_of(root) == axes_of(following) == at_root(AXES)
    assert axes_of(step) == AXES


def test_of_collectors_in_workers():
    collector = MultiSyncDataCollector([Groups] * 2, None, frames_per_batch=8, total_frames=16)
    for batch in collector:  # the second one lies in shared memory
        assert axes_of(batch) == AXES
    collector.shutdown()
    for batch in Collector(Groups(), None, frames_per_batch=4, total_frames=4):
        assert axes_of(batch) == AXES


@pytest.mark.parametrize("pool", [SerialEnv, ParallelEnv])
def test_of_agents_that_a_transform_joins(pool):
    def make():
        joined = Stack(["a", "b"], "both", in_key_inv="both", out_keys_inv=["a", "b"])
        return TransformedEnv(teams(OURS), joined)

    alone = make()
    with pool(2, make) as env:
        data = env.rollout(3)

    assert axes_of(data) == axes_of(alone.rollout(3)) == {"both": (2,), ("next", "both"): (2,)}


def test_of_masked_steps(pool):
    """What a step gives of rows that stand still has the axes of the others, so that steps stack."""
    pool.set_seed(0)
    root = pool.rand_action(pool.reset())
    masks = torch.tensor([[True, False], [False, False], [True, True]])

    steps = [pool.step(root.copy().set("_step", mask)) for mask in masks]

    assert all(axes_of(step) == AXES for step in steps)
    assert torch.stack(steps, 1)["next", "agent0"].batch_size[:2] == (2, 3)


def test_of_members_of_a_mixed_env():
    members = [SerialEnv(2, Groups), SerialEnv(1, Groups)]
    with MixedEnv(members) as env:
        specs = env.specs.items(True, False)
        shapes = {key[1:]: node.shape for key, node in specs if key[-1] in Groups.SIZES}

        assert len(shapes) == 8
        assert all(shape == (3, Groups.SIZES[key[-1]]) for key, shape in shapes.items())
        assert axes_of(env.rollout(3)) == AXES
        assert axes_of(env.fake_tensordict()) == AXES
        check_env_specs(env)
