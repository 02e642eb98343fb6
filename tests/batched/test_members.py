"""What members of a MixedEnv must have in common, and the specs of all their rows."""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest
from gymnasium import spaces

from envkit import (
    ExcludeTransform,
    MixedEnv,
    RenameTransform,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import ReadOnlyError, SpecError
from envkit.specs import Bounded, Unbounded
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.drift import make_gym
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.jax_drift import jax_rows


def test_bounds_are_joined_row_by_row():
    env = MixedEnv([jax_rows(1), SerialEnv(2, lambda: make_gym(low=-0.5))])

    assert isinstance(env.action_spec, Bounded)
    assert env.action_spec.low.tolist() == [[-1.0], [-0.5], [-0.5]]
    assert env.action_spec.high.tolist() == [[1.0], [1.0], [1.0]]
    assert isinstance(env.full_observation_spec["observation"], Unbounded)
    check_env_specs(env)


def test_all_differences_between_members_are_listed():
    def other():
        return GymWrapper(gymnasium.make("CartPole-v1"))

    with pytest.raises(SpecError) as caught:
        MixedEnv([jax_rows(), SerialEnv(2, other), SerialEnv(2, lambda: Count(3))])

    message = str(caught.value)
    assert "observation 'observation': member 0 has torch.float32 (1,)" in message
    assert "member 1 has torch.float32 (4,)" in message
    assert "member 2 has absent" in message
    assert "observation 'count': member 0 has absent" in message
    assert "action 'action'" in message
    assert "done 'truncated'" in message
    assert "DoubleToFloat" in message


def test_actions_of_unlike_choices_are_a_difference():
    def make(n):
        env = gymnasium.make("CartPole-v1")
        env = gymnasium.wrappers.TransformAction(env, lambda a: a % 2, spaces.Discrete(n))
        return GymWrapper(env, categorical_action_encoding=True)

    with pytest.raises(SpecError, match=r"of 2, member 1 has .* of 3"):
        MixedEnv([SerialEnv(1, lambda: make(2)), SerialEnv(1, lambda: make(3))])


def test_done_flags_are_declared_by_the_members():
    with pytest.raises(ReadOnlyError, match=r"MixedEnv\(\[member.add_truncated_keys\(\)"):
        MixedEnv([SerialEnv(2, lambda: Count(3))]).add_truncated_keys()

    env = MixedEnv([StatelessCount(batch_size=[2]).add_truncated_keys()])
    assert env.done_keys == ["done", "terminated", "truncated"]
    check_env_specs(env)


DROPPED = {
    "renamed": lambda: RenameTransform(["done"], ["ended"]),
    "left out": lambda: ExcludeTransform("done"),
    "reasons left out": lambda: ExcludeTransform("terminated"),
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("how", DROPPED)
def test_members_whose_transforms_rename_or_drop_done_flags_are_joined(how, inside):
    def rows():
        if inside:
            return SerialEnv(1, lambda: TransformedEnv(Count(3), DROPPED[how]()))
        return TransformedEnv(SerialEnv(1, partial(Count, 3)), DROPPED[how]())

    env = MixedEnv([rows(), rows()])
    single = TransformedEnv(Count(3), DROPPED[how]())

    data = env.rollout(5, break_when_any_done=False)

    assert set(env.done_keys) == set(single.done_keys)
    assert data["count"].squeeze(-1).tolist() == [[0, 1, 2, 0, 1]] * 2
    check_env_specs(env)


def test_flags_that_a_member_may_set_after_a_reset_are_accepted():
    env = MixedEnv(
        [
            SerialEnv(2, lambda: Count(3), allow_done_after_reset=True),
            SerialEnv(2, lambda: Count(3)),
        ]
    )

    assert env.allow_done_after_reset
