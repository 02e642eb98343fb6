"""Transforms of TorchRL are refused where they are added, with the name of ours."""

from __future__ import annotations

import pytest
import torchrl.envs.transforms as theirs

from envkit import Compose, SerialEnv, TransformedEnv
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
        (lambda: theirs.RewardScaling(0.0, 2.0), "Take envkit.RewardScaling,"),
        (lambda: Doubled(), "Write it as a subclass of envkit.Transform,"),
        (lambda: Slower(2), "Write it as a subclass of envkit.FrameSkipTransform,"),
    ],
    ids=["step counter", "scaling", "own", "derived"],
)
def test_a_transform_of_theirs_is_refused_with_the_name_of_ours(way, make, fix):
    with pytest.raises(TypeError, match=fix):
        WAYS[way](make())
