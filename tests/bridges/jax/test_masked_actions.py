"""Random actions of stateless envs that mask their actions, in programs and step by step, and rewards by name."""

from __future__ import annotations

import pytest
import torch

from envkit import ExcludeTransform, StepCounter, TransformedEnv, evaluate
from envkit.env.checks import check_env_specs
from envkit.errors import SpecMaskError
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.zoo.jax_envs import Nim

ROWS = 16


class Blocked(Nim):
    """Allows nothing below four stones, though the game goes on."""

    def observe(self, state):
        shown = super().observe(state)
        takes = shown["allowed"]["takes"] & (state["left"] > 3)
        return {**shown, "allowed": {"takes": takes}}


@pytest.fixture(scope="module")
def nim():
    return JaxEnv(Nim(stones=7), batch_size=[ROWS], categorical_action_encoding=True)


def is_allowed(data):
    return data["allowed", "takes"].gather(-1, data["action"][..., None]).squeeze(-1)


def takes(data):
    return set(data["action"].flatten().tolist())


def test_runs_as_one_program_draw_allowed_actions(nim):
    nim.set_seed(0)

    data = nim.rollout(30, break_when_any_done=False)
    waited = nim.rollout(8, break_when_all_done=True)

    assert is_allowed(data).all() and takes(data) == {0, 1, 2}
    assert (data["left"] < 3).any()
    over = torch.nn.functional.pad(waited["next", "done"][:, :-1, 0], (1, 0))
    assert is_allowed(waited)[~over].all()
    assert not (data["next", "reward"] < 0).any()


def test_actions_of_single_steps_are_allowed_and_the_same_run_steps_alike(nim):
    nim.set_seed(0)
    td = nim.reset()
    data, _ = nim.unroll(td.clone(), 12)
    stepped = []

    for action in data["action"].unbind(1):
        drawn = nim.rand_action(td.clone())
        assert is_allowed(drawn).all()
        step, td = nim.step_and_maybe_reset(td.set("action", action.clone()))
        stepped.append(step)

    assert_same(data, torch.stack(stepped, 1).exclude("state", ("next", "state")))


@pytest.mark.parametrize("rule", [{"break_when_any_done": False}, {"break_when_all_done": True}])
def test_a_mask_that_allows_nothing_is_refused_in_programs_as_in_single_steps(rule):
    env = JaxEnv(Blocked(stones=7), batch_size=[2])
    env.set_seed(0)

    with pytest.raises(
        SpecMaskError, match=r"mask \('allowed', 'takes'\) of Blocked allows no option"
    ):
        env.rollout(20, **rule)
    with pytest.raises(SpecMaskError, match="allows no option"):
        env.rollout(20, callback=lambda env, td: None, **rule)


@pytest.mark.slow
def test_fused_transforms_keep_draws_allowed_and_one_that_takes_the_mask_away_allows_all(nim):
    counted = TransformedEnv(nim, StepCounter())
    blind = TransformedEnv(nim, ExcludeTransform(("allowed", "takes")))
    counted.set_seed(0)

    data = counted.rollout(30, break_when_any_done=False)
    free = blind.rollout(30, break_when_any_done=False)

    assert data["step_count"].max() > 1
    assert is_allowed(data).all() and takes(data) == {0, 1, 2}
    assert (free["next", "reward"] < 0).any()


@pytest.mark.slow
def test_each_named_reward_is_an_entry_of_its_shape_and_a_return_is_of_one_of_them(nim):
    nim.set_seed(0)

    data = nim.rollout(30, break_when_any_done=False)
    won = evaluate(nim, None, episodes=50, seed=0, reward_key="reward")

    assert nim.reward_keys == ["reward", ("paid", "player")]
    assert nim.full_reward_spec["paid", "player"].shape == (ROWS, 2)
    assert data["next", "reward"].shape == (ROWS, 30, 1)
    paid = data["next", "paid", "player"]
    assert (paid.sum(-1) == 0).all()
    assert torch.equal(paid.amax(-1, keepdim=True), data["next", "reward"])
    assert "paid" not in data and "reward" not in data
    assert won.mean == 1  # who takes the last stone is paid
    check_env_specs(nim, seed=0)
