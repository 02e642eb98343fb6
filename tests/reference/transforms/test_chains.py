"""Chains of transforms drawn at random, around one tiny env of both libraries."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.compare import check_same
from tests.reference.transforms.worlds import count, leaf_specs, played

LINKS = {
    "StepCounter": lambda lib: lib.StepCounter(),
    "StepCounter with a limit": lambda lib: lib.StepCounter(3),
    "InitTracker": lambda lib: lib.InitTracker(),
    "RewardSum": lambda lib: lib.RewardSum(),
    "TrajCounter": lambda lib: lib.TrajCounter(),
    "TargetReturn": lambda lib: lib.TargetReturn(9.0),
    "RewardScaling": lambda lib: lib.RewardScaling(1.0, 2.0),
    "SignTransform": lambda lib: lib.SignTransform(["success"], ["sign"]),
    "DTypeCastTransform": lambda lib: lib.DTypeCastTransform(
        torch.int64, torch.float32, in_keys=["count"]
    ),
    "UnsqueezeTransform": lambda lib: lib.UnsqueezeTransform(-1, in_keys=["success"]),
    "ExcludeTransform": lambda lib: lib.ExcludeTransform("success"),
    "RenameTransform": lambda lib: lib.RenameTransform(["count"], ["number"], create_copy=True),
    "TensorDictPrimer": lambda lib: lib.TensorDictPrimer({"hidden": lib.Unbounded((3,))}),
}
CHAINS = st.lists(st.sampled_from(sorted(LINKS)), min_size=2, max_size=3, unique=True)


def shapes_and_dtypes(env):
    """What specs say of the data; TorchRL keeps the class of integers in a cast to floats."""
    specs = leaf_specs(env)
    kinds = ("observation", "reward", "done", "action")
    return {kind: {key: leaf[1:] for key, leaf in specs[kind].items()} for kind in kinds}


@settings(max_examples=20, deadline=None)
@given(chain=CHAINS, stops=st.booleans())
def test_a_chain_shows_what_the_chain_of_the_reference_shows(chain, stops):
    def call(lib):
        env = lib.TransformedEnv(count(lib), lib.Compose(*(LINKS[name](lib) for name in chain)))
        return [shapes_and_dtypes(env), played(env, 8, break_when_any_done=stops)]

    check_same(call)
