"""Whole rollouts over shared rows give the data of single steps, whatever the policy does, and wherever they begin.

Conventions
    ways    envs that record a rollout in rows, with the options of that rollout.
    wanted  the same rollout of `SerialEnv` without rows, which makes one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase

from envkit import GymEnv, ParallelEnv, SerialEnv
from envkit.batched.env import BatchedEnv
from envkit.errors import BusyEnvError, OptionError, RolloutError
from tests.bridges.compare import assert_same
from tests.zoo.envs import Chaos

SEED, ROWS = 3, 4

pytestmark = pytest.mark.usefixtures("warm_fork_server")

together = {"break_when_any_done": False}


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def lean(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 2] > 0).long()


def lean_on_tensordicts(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", lean(td["observation"]))


@pytest.fixture(scope="module")
def envs():
    """Give an env without rows, and envs with rows, by name."""
    made = {
        "slow": SerialEnv(ROWS, cart_pole, use_buffers=False),
        "serial": SerialEnv(ROWS, cart_pole),
        "parallel": ParallelEnv(ROWS, cart_pole, num_processes=2),
    }
    yield made
    for env in made.values():
        env.close(raise_if_closed=False)


WAYS = [("serial", {}), ("parallel", {}), ("parallel", {"pipeline": 2})]
in_all_ways = pytest.mark.parametrize(("name", "options"), WAYS, ids=["serial", "whole", "parts"])
ACTS = {"leaves": lean, "TensorDicts": lean_on_tensordicts, "random": None}


def rolled(
    env: BatchedEnv, policy: object, prepare: Callable = id, steps: int = 40, **options
) -> TensorDictBase:
    """Roll out from a root that was prepared before."""
    env.set_seed(SEED)
    root = env.reset()
    prepare(root)
    start = {"auto_reset": False, "tensordict": root}
    return env.rollout(steps, policy, **start, **together, **options)


# ------------------------------------------------------------------------------- where they begin


@in_all_ways
@pytest.mark.parametrize("policy", ACTS.values(), ids=ACTS)
def test_a_root_with_a_gradient_leaves_none_in_the_rows(envs, name, options, policy):
    def prepare(root):
        root["observation"].requires_grad_()

    data = rolled(envs[name], policy, prepare, **options)
    after = envs[name].rollout(3, policy, **together, **options)

    assert_same(data, rolled(envs["slow"], policy, prepare))
    assert not data["observation"].requires_grad and not after["observation"].requires_grad


def test_a_row_that_is_lost_leaves_no_gradient_in_the_rows(opened):
    env = opened(SerialEnv(2, Chaos, use_buffers=True, on_worker_failure="restart"))
    root = env.reset()
    root["draw"].requires_grad_()
    fault = torch.tensor([[Chaos.FAULTS.index("raise")], [0]])

    lost = env.step(root.set("action", fault))
    after = env.step(env.rand_action(env.reset()).set("action", torch.zeros(2, 1).long()))

    assert lost["next", "truncated"].flatten().tolist() == [True, False]
    assert not after["next", "draw"].requires_grad


def half(root: TensorDictBase) -> None:
    root["_step"] = torch.arange(ROWS) % 2 == 0


def told_before(root: TensorDictBase) -> None:
    root["next"] = root.clone().set("reward", torch.ones(ROWS, 1))


def doubles(root: TensorDictBase) -> None:
    root["observation"] = root["observation"].double() / 3


@pytest.mark.parametrize("prepare", [half, told_before, doubles])
@pytest.mark.parametrize("name", ["serial", "parallel"])
@pytest.mark.parametrize("policy", ACTS.values(), ids=ACTS)
def test_what_a_root_asks_for_is_obeyed(envs, name, prepare, policy):
    data = rolled(envs[name], policy, prepare)

    assert_same(data, rolled(envs["slow"], policy, prepare))


@pytest.mark.parametrize(
    ("prepare", "error", "told"),
    [
        (half, RolloutError, "began from"),
        (told_before, RolloutError, "began from"),
        (doubles, OptionError, "another form"),
    ],
)
def test_parts_refuse_a_root_that_asks_for_single_steps(envs, prepare, error, told):
    with pytest.raises(error, match=told):
        rolled(envs["parallel"], lean, prepare, pipeline=2)


# --------------------------------------------------------------------------------- what policies do


def halve(td: TensorDictBase) -> TensorDictBase:
    return td.set("observation", td["observation"].double() / 2)


def narrow(td: TensorDictBase) -> TensorDictBase:
    return td.set("observation", td["observation"][..., :1] + 1)


def say_as_integers(td: TensorDictBase) -> TensorDictBase:
    return td.set("done", td["done"].long() + 3)


@in_all_ways
@pytest.mark.parametrize("change", [halve, narrow, say_as_integers])
def test_what_a_policy_puts_in_the_place_of_an_entry_keeps_its_form(envs, name, options, change):
    def act(tensordict: TensorDictBase) -> TensorDictBase:
        return change(lean_on_tensordicts(tensordict))

    data = rolled(envs[name], act, **options)

    assert_same(data, rolled(envs["slow"], act))


def one_step(env: BatchedEnv) -> None:
    """Step all rows, as one does that plans ahead."""
    env.step_and_maybe_reset(env.fake_tensordict().exclude("next"))


def a_rollout(env: BatchedEnv) -> None:
    env.rollout(3, lean, **together)


def begin_anew(env: BatchedEnv) -> None:
    env.reset(seed=5)


@in_all_ways
@pytest.mark.parametrize("use", [one_step, a_rollout, begin_anew])
@pytest.mark.parametrize("calls", [{1}, {2, 3}, {32}, {33}, {40}])
@pytest.mark.parametrize("reads", ["leaves", "TensorDicts"])
def test_a_policy_that_uses_the_env_changes_no_step_before(envs, name, options, use, calls, reads):
    def played(env: BatchedEnv, **options) -> TensorDictBase:
        count = 0

        def act(observation: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if count in calls:
                use(env)
            return lean(observation)

        def act_on_tensordict(tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("action", act(tensordict["observation"])).set(
                "turn", tensordict["turn"] + 1
            )

        def prepare(root: TensorDictBase) -> None:
            root["turn"] = torch.arange(ROWS)

        policy = act if reads == "leaves" else act_on_tensordict
        return rolled(env, policy, prepare, **options)

    if options:
        with pytest.raises(BusyEnvError, match="under way"):
            played(envs[name], **options)
    else:
        assert_same(played(envs[name]), played(envs["slow"]))


def test_parts_inside_of_parts_are_refused(envs):
    env = envs["parallel"]
    inner = {"auto_reset": False, "tensordict": env.reset()}

    def act(observation: torch.Tensor) -> torch.Tensor:
        env.rollout(2, lean, pipeline=2, **inner, **together)
        return lean(observation)

    with pytest.raises(BusyEnvError, match="under way"):
        env.rollout(3, act, pipeline=2, **together)
