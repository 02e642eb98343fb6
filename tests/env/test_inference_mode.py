"""An env that was first used under ``torch.inference_mode()`` works outside of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from envkit import (
    ActionScaling,
    Compose,
    GymEnv,
    JaxEnv,
    MixedEnv,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TrajCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from envkit.env.base import EnvBase
from tests.zoo.envs import Count
from tests.zoo.walkers import Pendulum

pendulum = partial(GymEnv, "Pendulum-v1")


def transformed(base: EnvBase) -> EnvBase:
    in_keys = ["observation"]
    chain = RewardSum(), StepCounter(), TrajCounter(), VecNorm(in_keys=in_keys)
    return TransformedEnv(base, Compose(*chain))


def transformed_one() -> EnvBase:
    return transformed(pendulum())


KINDS: dict[str, Callable[[], EnvBase]] = {
    "gym": pendulum,
    "vector": partial(GymEnv, "Pendulum-v1", num_envs=2),
    "jax": partial(JaxEnv, Pendulum(), batch_size=[2]),
    "torch": Count,
    "serial": partial(SerialEnv, 2, pendulum),
    "serial, tds": partial(SerialEnv, 2, pendulum, use_buffers=False),
    "serial, torch in rows": partial(SerialEnv, 2, Count, use_buffers=True),
    "serial, transforms inside": partial(SerialEnv, 2, transformed_one),
    "parallel": partial(ParallelEnv, 2, pendulum, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(1, pendulum), SerialEnv(1, pendulum)]),
    "transformed": lambda: transformed(SerialEnv(2, pendulum)),
    "averaged": lambda: TransformedEnv(SerialEnv(2, pendulum), VecNormV2(in_keys=["observation"])),
    "fused": lambda: transformed(JaxEnv(Pendulum(), batch_size=[2])),
}


CELLS = [
    pytest.param(kind, inside, marks=pytest.mark.slow if is_rare else ())
    for kind in KINDS
    for inside in (False, True)
    for is_rare in [kind == "jax" or (kind == "fused" and not inside)]
]


@pytest.mark.parametrize(("kind", "built_inside"), CELLS)
def test_an_env_works_outside_of_inference_mode_after_its_first_use_inside(kind, built_inside):
    env = None if built_inside else KINDS[kind]()
    with torch.inference_mode():
        env = KINDS[kind]() if env is None else env
        env.rollout(3, break_when_any_done=False)
        env.rollout(2)
        env.set_seed(0)

    data = env.rollout(3, break_when_any_done=False)
    stepped = env.rollout(3, lambda td: env.rand_action(td))
    root = env.step_and_maybe_reset(env.rand_action(env.reset()))[1]
    if env.batch_dims:
        first = torch.tensor([True, False])
        root = env.reset(root.clone().set("_reset", first.clone()))
        root = env.step_mdp(env.step(env.rand_action(root).set("_step", first)))
    env.close()

    for td in (data, stepped, root):
        assert not any(leaf.is_inference() for leaf in td.values(True, True))


def test_statistics_measured_under_inference_mode_take_part_in_gradients():
    env = TransformedEnv(SerialEnv(2, pendulum), ObservationNorm(in_keys=["observation"]))
    with torch.inference_mode():
        env.transform.init_stats(3, reduce_dim=(0, 1), cat_dim=1)

    shown = torch.ones(2, 3, requires_grad=True)
    env.transform._apply_transform(shown).square().sum().backward()

    assert bool(shown.grad.isfinite().all())


def test_numbers_read_from_bounds_under_inference_mode_take_part_in_gradients():
    env = TransformedEnv(pendulum(), ActionScaling())
    with torch.inference_mode():
        env.rollout(3)

    policy = torch.nn.Linear(3, 1)
    env.rollout(3, policy)["action"].sum().backward()
    scaled = env.transform.inv(env.rollout(3, policy))["action"]
    scaled.sum().backward()

    assert bool(policy.weight.grad.isfinite().all())
    assert not any(buffer.is_inference() for buffer in env.transform.buffers())
