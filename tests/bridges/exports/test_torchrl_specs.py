"""Specs as TorchRL's, and back."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from tensordict import TensorDict

from envkit import Composite, SerialEnv
from envkit_bridges.exports.torchrl_specs import from_torchrl_spec, to_torchrl_spec
from tests.specs.kinds import KINDS, TENSOR_KINDS
from tests.specs.strategies import leaves
from tests.zoo.envs import Count

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.data

ROWS_ARE_LOST = ("choice", "choice of numbers")  # theirs do not say which axes are rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_of_every_kind_goes_there_and_back(kind):
    spec = KINDS[kind]

    theirs = to_torchrl_spec(spec)
    ours = from_torchrl_spec(theirs)

    assert isinstance(theirs, torchrl.data.TensorSpec)
    assert (theirs.shape, theirs.device) == (spec.shape, spec.device)
    assert kind not in TENSOR_KINDS or kind.startswith("stack") or theirs.dtype == spec.dtype
    assert type(ours) is type(spec)
    if kind not in ROWS_ARE_LOST:
        assert ours == spec


@settings(max_examples=50)
@given(
    spec=leaves(
        kinds=[
            "cube",
            "box",
            "half-open",
            "integers",
            "integer box",
            "free",
            "bytes",
            "masked",
            "one-hot",
            "numbers",
            "one-hots",
            "binary",
        ]
    )
)
def test_values_of_one_are_values_of_the_other(spec):
    theirs = to_torchrl_spec(spec)

    assert from_torchrl_spec(theirs) == spec
    assert theirs.is_in(spec.rand())
    drawn = theirs.rand().reshape(spec.shape)  # TorchRL drops the axis of a single category
    assert spec.is_in(drawn)


def test_specs_of_an_env_say_of_its_data_what_they_said():
    env = SerialEnv(2, Count)
    data = env.rand_step(env.reset())

    for name in ("full_observation_spec", "full_action_spec"):
        theirs = to_torchrl_spec(getattr(env, name))
        assert theirs.is_in(data.select(*theirs.keys(True, True)))

    env.close()


def test_a_tree_keeps_its_class_of_data_its_gaps_and_its_device():
    tree = Composite(
        {"a": None, "b": Composite(shape=(3,))}, shape=(3,), device="cpu", data_cls=TensorDict
    )

    back = from_torchrl_spec(to_torchrl_spec(tree))

    assert back == tree
    assert back.data_cls is TensorDict and back["a"] is None and back["b"].shape == (3,)


def test_their_specs_in_our_env_are_refused_with_the_way_to_convert_them():
    theirs = torchrl.data.Composite(observation=torchrl.data.Unbounded((1,)))
    env = Count()

    with pytest.raises(TypeError, match=r"Composite of TorchRL\. Import the class from envkit"):
        env.observation_spec = theirs
    with pytest.raises(TypeError, match=r"UnboundedContinuous of TorchRL\. .*from_torchrl_spec"):
        Composite(observation=theirs["observation"])
