"""Primers of TorchRL become ours where they are added; other transforms are refused with the name of ours.

The numbers that they saved are loaded.
"""

from __future__ import annotations

import pytest
import torch
import torchrl.data
import torchrl.envs.transforms as theirs
from tensordict import TensorDict

import envkit
from envkit import (
    Bounded,
    Compose,
    GymEnv,
    ObservationNorm,
    SerialEnv,
    TensorDictPrimer,
    TransformedEnv,
)
from tests.zoo.envs import Count


class Doubled(theirs.Transform):
    """What a user of TorchRL has written."""


class Slower(theirs.FrameSkipTransform):
    """What a user of TorchRL has derived."""


WAYS = {
    "wrapped": lambda transform: TransformedEnv(Count(), transform),
    "appended": lambda transform: Count().append_transform(transform),
    "in a chain": lambda transform: Compose(transform),
    "around a pool": lambda transform: TransformedEnv(SerialEnv(2, Count), transform),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: theirs.StepCounter(5), "Take envkit.StepCounter, which takes the same arguments."),
        (
            lambda: theirs.Compose(theirs.InitTracker()),
            "take envkit's get_env_transforms_from_module.",
        ),
        (lambda: theirs.RewardScaling(0.0, 2.0), "Take envkit.RewardScaling,"),
        (lambda: Doubled(), "Write it as a subclass of envkit.Transform,"),
        (lambda: Slower(2), "Write it as a subclass of envkit.FrameSkipTransform,"),
    ],
    ids=["step counter", "chain", "scaling", "own", "derived"],
)
def test_a_transform_of_theirs_is_refused_with_the_name_of_ours(way, make, fix):
    with pytest.raises(TypeError, match=fix):
        WAYS[way](make())


@pytest.mark.parametrize("default", [0.0, 3.0, {"hidden": 2.0}])
def test_a_primer_of_theirs_becomes_one_of_ours(default):
    primer = theirs.TensorDictPrimer(
        {"hidden": torchrl.data.Bounded(-9, 9, (4,))}, default_value=default, expand_specs=True
    )
    begins = default if isinstance(default, float) else default["hidden"]

    env = TransformedEnv(SerialEnv(2, Count), primer)

    assert type(env.transform) is TensorDictPrimer
    assert env.observation_spec["hidden"] == Bounded(-9, 9, (2, 4))
    assert (env.reset()["hidden"] == torch.full((2, 4), begins)).all()
    env.close()


def test_a_random_primer_of_theirs_draws_from_its_spec():
    primer = theirs.TensorDictPrimer({"hidden": torchrl.data.Bounded(5, 6, (64,))}, random=True)

    drawn = TransformedEnv(Count(), primer).reset()["hidden"]

    assert ((drawn >= 5) & (drawn <= 6)).all() and drawn.unique().numel() > 1


@pytest.mark.parametrize("name", ["ObservationNorm", "RewardScaling"])
def test_numbers_that_they_saved_are_loaded(name):
    saved, ours = (
        getattr(library, name)(loc=1.0, scale=2.0, in_keys=["a"], standard_normal=True)
        for library in (theirs, envkit)
    )
    saved.loc.fill_(3.0)

    ours.load_state_dict(saved.state_dict())

    assert ours(TensorDict(a=torch.tensor([7.0])))["a"] == 2.0


def test_saved_numbers_of_the_other_form_are_refused():
    env = TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(0.0, 1.0, ["observation"]))
    saved = theirs.ObservationNorm(5.0, 2.0, ["observation"], standard_normal=True).state_dict()

    with pytest.raises(
        RuntimeError, match=r"True in the state dict.*Make it with standard_normal=True"
    ):
        env.transform.load_state_dict(saved)

    assert env.transform.loc == 0
    env.close()
