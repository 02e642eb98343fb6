"""Transforms written for the reference API work once the names they import come from envkit.

The four are written as its tutorials write theirs: argument names, decorators and calls are not ours.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from envkit import (
    BoundedContinuous,
    Categorical,
    CatFrames,
    Compose,
    Composite,
    GymEnv,
    ObservationNorm,
    SerialEnv,
    ToTensorImage,
    Transform,
    TransformedEnv,
    Unbounded,
    _apply_to_composite,
    _apply_to_composite_inv,
    check_env_specs,
)
from envkit.errors import SpecTypeError
from tests.zoo.envs import Count


class SinTransform(Transform):
    """Value-wise, with a spec hook for one leaf."""

    def _apply_transform(self, obs):
        return obs.sin()

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    @_apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return BoundedContinuous(
            low=-1.0,
            high=1.0,
            shape=observation_spec.shape,
            dtype=observation_spec.dtype,
            device=observation_spec.device,
        )


class Novelty(Transform):
    """Reads the step's input beside its output, and adds to the reward."""

    def __init__(self, scale=0.5):
        super().__init__(in_keys=["observation"], out_keys=["novelty"])
        self.register_buffer("scale", torch.tensor(scale))

    def _call(self, next_tensordict):
        next_tensordict["reward"] = next_tensordict["reward"] + next_tensordict["novelty"]
        return next_tensordict

    def _step(self, tensordict, next_tensordict):
        change = next_tensordict["observation"] - tensordict["observation"]
        next_tensordict["novelty"] = self.scale * change.abs().sum(-1, keepdim=True)
        return self._call(next_tensordict)

    def _reset(self, tensordict, tensordict_reset):
        tensordict_reset["novelty"] = torch.zeros(*tensordict_reset.batch_size, 1)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec):
        shape = (*observation_spec.shape, 1)
        observation_spec["novelty"] = Unbounded(shape=shape, device=observation_spec.device)
        return observation_spec


class Halved(Transform):
    """Inwards, value-wise: the user gives twice the torque."""

    def __init__(self):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self.calls = 0

    def _inv_apply_transform(self, action):
        return action / 2

    def _inv_call(self, tensordict):
        self.calls += 1
        return super()._inv_call(tensordict)

    @_apply_to_composite_inv
    def transform_action_spec(self, action_spec):
        space = action_spec.space
        return BoundedContinuous(space.low * 2, space.high * 2, action_spec.shape)


class Relabelled(Transform):
    """Changes all inputs and all outputs in one hook each."""

    def __init__(self):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["choice"])

    def _inv_call(self, tensordict):
        return tensordict.set("action", 1 - tensordict["choice"].long())

    def _call(self, next_tensordict):
        return next_tensordict.set("parity", next_tensordict["count"] % 2 == 0)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    @_apply_to_composite_inv
    def transform_input_spec(self, input_spec):
        return Categorical(2, shape=input_spec.shape, dtype=torch.bool)

    def transform_output_spec(self, output_spec):
        shown = output_spec["full_observation_spec"]
        shape = (*shown.shape, 1)
        shown["parity"] = Categorical(2, shape=shape, dtype=torch.bool)
        output_spec["full_observation_spec"] = shown
        return output_spec


class Squashed(Transform):
    """Inwards: the user gives any number, the env gets one within its bounds; declares it in all inputs at once."""

    def __init__(self):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

    def _inv_apply_transform(self, action):
        return 2 * action.tanh()

    def transform_input_spec(self, input_spec):
        spec = input_spec["full_action_spec", "action"]
        input_spec["full_action_spec", "action"] = Unbounded(
            shape=spec.shape, dtype=spec.dtype, device=spec.device
        )
        return input_spec


class PreviousAction(Transform):
    """Reads the env that it stands around, and observes the last action."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("previous", tensordict["action"].clone())

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("previous", torch.zeros(self.parent.action_spec.shape))

    def transform_observation_spec(self, observation_spec):
        observation_spec["previous"] = self.parent.action_spec.clone()
        return observation_spec


class OneMore(Transform):
    """Value-wise, of rewards."""

    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])

    def _apply_transform(self, reward):
        return reward + 1


pendulum = partial(GymEnv, "Pendulum-v1")
CASES = {
    "value-wise": (pendulum, partial(SinTransform, in_keys=["observation"], out_keys=["sine"])),
    "in place": (pendulum, partial(SinTransform, in_keys=["observation"])),
    "with the input": (pendulum, Novelty),
    "inwards": (pendulum, Halved),
    "whole specs": (partial(Count, 3), Relabelled),
    "inwards, whole specs": (pendulum, Squashed),
    "with the env": (pendulum, PreviousAction),
    "rewards": (partial(Count, 3), OneMore),
}


@pytest.mark.parametrize("case", CASES)
def test_it_works_inside_sub_envs_and_around_them(case):
    make, transform = CASES[case]
    inside = SerialEnv(2, lambda: TransformedEnv(make(), transform()))
    outside = TransformedEnv(SerialEnv(2, make), transform())

    for env in (inside, outside):
        check_env_specs(env, seed=0)
    data = []
    for env in (inside, outside):
        env.set_seed(1)
        data.append(env.rollout(4, break_when_any_done=False))

    assert sorted(map(str, data[0].keys(True, True))) == sorted(map(str, data[1].keys(True, True)))
    assert all(torch.equal(data[0][key], data[1][key]) for key in data[0].keys(True, True))


def test_a_hook_for_one_leaf_declares_every_out_key():
    env = TransformedEnv(pendulum(), SinTransform(["observation"], ["sine"]))

    spec = env.observation_spec["sine"]
    data = env.rollout(3)

    assert (spec.low == -1).all() and (spec.high == 1).all()
    assert data["sine"].equal(data["observation"].sin())
    assert data["next", "sine"].equal(data["next", "observation"].sin())


def test_a_hook_for_one_leaf_declares_what_the_user_gives():
    halved = Halved()
    env = TransformedEnv(pendulum(), halved)
    env.set_seed(0)
    twice = env.rollout(3, lambda td: td.set("action", torch.full((1,), 3.0)))
    bare = pendulum()
    bare.set_seed(0)

    expected = bare.rollout(3, lambda td: td.set("action", torch.full((1,), 1.5)))

    assert env.action_spec.high.item() == 4.0 and halved.calls == 3
    assert twice["next", "observation"].equal(expected["next", "observation"])


def test_the_action_goes_by_the_name_that_the_user_sees():
    env = TransformedEnv(Count(3), Relabelled())

    assert env.action_keys == ["choice"] and env.action_spec.dtype == torch.bool
    assert env.rollout(2)["next", "parity"].flatten().tolist() == [False, True]


def test_an_action_is_recorded_as_it_was_given():
    env = TransformedEnv(pendulum(), Squashed())

    out = env.step(env.reset().set("action", torch.tensor([50.0])))

    assert out["action"].item() == 50.0
    assert isinstance(env.action_spec, Unbounded)


def test_the_last_action_is_observed():
    data = TransformedEnv(pendulum(), PreviousAction()).rollout(4)

    assert (data["previous"][0] == 0).all()
    assert data["previous"][1:].equal(data["action"][:-1])


def test_a_reward_is_changed_by_its_key():
    assert (TransformedEnv(Count(5), OneMore()).rollout(5)["next", "reward"] == 2).all()


def test_data_goes_through_as_in_a_module():
    data = pendulum().rollout(3)

    shown = Compose(SinTransform(["observation"], ["sine"]))(data.copy())

    assert shown["sine"].equal(data["observation"].sin())


class Leafy(SinTransform):
    """Forgets the decorator."""

    def transform_observation_spec(self, observation_spec):
        return Unbounded((3,))


def test_a_hook_that_returns_a_leaf_is_told_what_to_return():
    env = TransformedEnv(pendulum(), Leafy(["observation"]))

    with pytest.raises(
        SpecTypeError, match=r"of Leafy returned .*must return the Composite.*apply_to"
    ):
        _ = env.observation_spec


def test_specs_that_change_later_are_read_again():
    transform = SinTransform(["observation"], ["sine"])
    env = TransformedEnv(pendulum(), transform)
    assert "sine" in env.observation_spec.keys()

    transform.out_keys = ["wave"]
    transform.empty_cache()

    assert "wave" in env.observation_spec.keys() and "sine" not in env.observation_spec.keys()
    check_env_specs(env)


def test_an_absent_entry_is_tolerated_when_that_is_set():
    transform = SinTransform(["nothing"])
    transform.set_missing_tolerance(True)

    assert isinstance(TransformedEnv(Count(3), transform).observation_spec, Composite)
    assert TransformedEnv(Count(3), transform.clone()).rollout(2).shape == (2,)


class Holder(SinTransform):
    """Holds something open."""

    closed = 0

    def close(self):
        self.closed += 1


def test_a_transform_is_closed_with_its_env():
    first, second = Holder(["count"]), Holder(["count"])
    env = TransformedEnv(Count(3), Compose(first, second))

    env.close()

    assert first.closed == second.closed == 1


class Renewed(Transform):
    """Returns another Composite than it was given."""

    def _apply_transform(self, obs):
        return obs.cos()

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec):
        entries = dict(observation_spec.items())
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            entries[target] = BoundedContinuous(-1.0, 1.0, entries[source].shape)
        return Composite(entries, shape=observation_spec.shape)


@pytest.mark.parametrize(
    "make", [partial(GymEnv, "Pendulum-v1"), partial(SerialEnv, 2, partial(GymEnv, "Pendulum-v1"))]
)
def test_a_spec_hook_may_return_a_new_composite(make):
    env = TransformedEnv(make(), Renewed(["observation"], ["cosine"]))

    check_env_specs(env)

    data = env.rollout(2)
    assert torch.equal(data["cosine"], data["observation"].cos())


def test_statistics_of_pictures_are_measured_as_the_reference_writes_it():
    pictures = GymEnv("CartPole-v1", from_pixels=True, pixels_only=True)
    env = TransformedEnv(
        pictures,
        Compose(ToTensorImage(), CatFrames(4, dim=-3), ObservationNorm(in_keys=["pixels"])),
    )

    env.transform[-1].init_stats(num_iter=8, cat_dim=0, reduce_dim=(-1, -2, -4), keep_dims=(-1, -2))

    assert env.transform[-1].loc.shape == (12, 1, 1)
    assert env.rollout(2)["pixels"].shape[1:] == env.observation_spec["pixels"].shape
