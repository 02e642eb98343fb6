"""A sequence of transforms as a sequence: places, members, and specs that are read by hand."""

from __future__ import annotations

import pytest

from envkit import (
    CatTensors,
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    ExpandAs,
    GymEnv,
    InitTracker,
    JaxEnv,
    RandomTruncationTransform,
    RemoveEmptySpecs,
    RewardClipping,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    VecNormV2,
)
from envkit.errors import ArgumentError
from tests.zoo.walkers import Walker

LETTERS = {StepCounter: "a", RewardSum: "b", InitTracker: "c", RewardClipping: "x"}


def three():
    return Compose(StepCounter(), RewardSum(), InitTracker())


def letters(transforms) -> str:
    return "".join(LETTERS[type(one)] for one in transforms)


@pytest.mark.parametrize("place", [0, 1, 2, 3, -1, -2, -3])
def test_a_transform_is_put_where_a_list_would_put_it(place):
    expected = list("abc")
    expected.insert(place, "x")
    chain, env = three(), TransformedEnv(GymEnv("Pendulum-v1"), three())

    chain.insert(place, RewardClipping(-1, 1))
    env.insert_transform(place, RewardClipping(-1, 1))

    assert letters(chain) == letters(env.transform) == "".join(expected)
    assert env.rollout(2).shape == (2,)


@pytest.mark.parametrize("kind", [IndexError, ValueError])
def test_a_place_that_is_not_there_is_an_index_error(kind):
    chain = three()

    for place in (4, -4):
        with pytest.raises(kind, match=rf"index is {place}, but there are 3 transforms. Pass"):
            chain.insert(place, RewardClipping(-1, 1))
    for place in (3, -4):
        with pytest.raises(kind, match=f"index is {place}"):
            chain[place]
    with pytest.raises(kind, match=r"0 transforms\. Append one first"):
        Compose().pop()
    with pytest.raises(kind, match=r"single StepCounter\. Use 0"):
        StepCounter()[1]


def test_transforms_are_given_by_keyword_too():
    chain = Compose(transforms=[StepCounter(), RewardSum()])

    assert letters(chain) == "ab"
    with pytest.raises(ArgumentError, match="Pass all of them one way"):
        Compose(InitTracker(), transforms=[StepCounter()])


OF_LOCKED_SPECS = {
    "chain": three,
    "alone": StepCounter,
    "averages": lambda: VecNormV2(["observation"], ["normal"]),
    "flags": lambda: Compose(StepCounter(), RandomTruncationTransform(2, 4)),
    "expanded": lambda: ExpandAs("reward", "observation", "wide"),
    "nodes": RemoveEmptySpecs,
    "device": lambda: DeviceCastTransform("cpu", in_keys=["observation"], out_keys=["here"]),
    "dtypes": DoubleToFloat,
}


@pytest.mark.parametrize("name", OF_LOCKED_SPECS)
def test_specs_of_an_env_are_transformed_by_hand_and_stay_as_they_are(name):
    env = TransformedEnv(GymEnv("Pendulum-v1"), OF_LOCKED_SPECS[name]())
    before = env.base_env.output_spec.clone(), env.base_env.input_spec.clone()
    _ = env.output_spec

    outputs = env.transform.transform_output_spec(env.base_env.output_spec)
    inputs = env.transform.transform_input_spec(env.base_env.input_spec)

    assert outputs == env.output_spec and inputs == env.input_spec
    assert (env.base_env.output_spec, env.base_env.input_spec) == before


def test_a_leaf_that_is_joined_with_no_other_stays_a_leaf():
    leaf = Unbounded((2, 3))

    assert CatTensors(["a"], "b", dim=-2).transform_observation_spec(leaf) == leaf


class Raising(Compose):
    """Pays a hundred more than its transforms do."""

    def _step(self, td, next_td):
        next_td = super()._step(td, next_td)
        return next_td.set("reward", next_td["reward"] + 100)


@pytest.mark.parametrize(
    "env",
    [
        lambda: TransformedEnv(GymEnv("Pendulum-v1"), Raising(StepCounter())),
        lambda: TransformedEnv(GymEnv("Pendulum-v1"), Compose(Raising(StepCounter()))),
        lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv("Pendulum-v1"), Raising(StepCounter()))),
        lambda: TransformedEnv(JaxEnv(Walker(), batch_size=[2]), Raising(StepCounter())),
    ],
    ids=["one env", "inside another", "rows of a pool", "programs"],
)
def test_what_a_subclass_does_beside_its_transforms_is_done_on_every_way(env):
    env = env()

    assert (env.rollout(3)["next", "reward"] > 50).all()
    assert (env.step(env.rand_action(env.reset()))["next", "reward"] > 50).all()
