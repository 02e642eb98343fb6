"""Where semantics are meant to be the same, numbers are those of the reference library.

Both sides are given the same data. The reference is a development dependency.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from tensordict import TensorDict

import envkit
from tests.envs import Count

pytest.importorskip("torchrl")

import torchrl.envs as reference
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.transforms import transforms as reference_transforms

A = ["a"]
CASES = {  # name, keywords, direction
    "affine": ("ObservationNorm", {"loc": 1.0, "scale": 2.0, "in_keys": A}, "out"),
    "standardised": (
        "ObservationNorm",
        {"loc": 1.0, "scale": 2.0, "in_keys": A, "standard_normal": True},
        "out",
    ),
    "affine, inwards": (
        "ObservationNorm",
        {"loc": 1.0, "scale": 2.0, "in_keys": [], "in_keys_inv": A},
        "in",
    ),
    "constant scale": (
        "ObservationNorm",
        {"loc": 0.0, "scale": 0.0, "in_keys": A, "standard_normal": True},
        "out",
    ),
    "RewardScaling": ("RewardScaling", {"loc": 1.0, "scale": 2.0}, "out"),
    "RewardScaling, standardised": (
        "RewardScaling",
        {"loc": 1.0, "scale": 2.0, "standard_normal": True},
        "out",
    ),
    "RewardClipping": ("RewardClipping", {"clamp_min": -0.5, "clamp_max": 0.5}, "out"),
    "BinarizeReward": ("BinarizeReward", {}, "out"),
    "SignTransform": ("SignTransform", {"in_keys": A}, "out"),
    "ClipTransform": ("ClipTransform", {"in_keys": A, "low": 0.0}, "out"),
    "ClipTransform, inwards": ("ClipTransform", {"in_keys_inv": A, "high": 0.0}, "in"),
    "LineariseRewards": (
        "LineariseRewards",
        {"in_keys": A, "weights": [1.0, -2.0, 0.5, 0.0]},
        "out",
    ),
    "CatTensors": ("CatTensors", {"in_keys": ["b", "a"], "out_key": "o"}, "out"),
    "CatTensors, unsorted": (
        "CatTensors",
        {"in_keys": ["b", "a"], "out_key": "o", "sort": False, "del_keys": False},
        "out",
    ),
    "RenameTransform": ("RenameTransform", {"in_keys": A, "out_keys": ["z"]}, "out"),
    "RenameTransform, inwards": (
        "RenameTransform",
        {"in_keys": [], "out_keys": [], "in_keys_inv": ["z"], "out_keys_inv": A},
        "in",
    ),
    "RenameTransform, copied": (
        "RenameTransform",
        {"in_keys": A, "out_keys": [("n", "z")], "create_copy": True},
        "out",
    ),
    "UnsqueezeTransform": ("UnsqueezeTransform", {"dim": -2, "in_keys": A}, "out"),
    "SqueezeTransform": ("SqueezeTransform", {"dim": -1, "in_keys": ["reward"]}, "out"),
    "SqueezeTransform, inwards": ("SqueezeTransform", {"dim": -1, "in_keys_inv": A}, "in"),
    "FlattenObservation": (
        "FlattenObservation",
        {"first_dim": -3, "last_dim": -2, "in_keys": ["pixels"]},
        "out",
    ),
    "PermuteTransform": (
        "PermuteTransform",
        {"dims": (-1, -3, -2), "in_keys": ["pixels"]},
        "out",
    ),
    "PermuteTransform, inwards": (
        "PermuteTransform",
        {"dims": (-1, -3, -2), "in_keys_inv": ["pixels"]},
        "in",
    ),
    "DTypeCastTransform": (
        "DTypeCastTransform",
        {"dtype_in": torch.float32, "dtype_out": torch.float64},
        "out",
    ),
    "DoubleToFloat, inwards": ("DoubleToFloat", {"in_keys_inv": A}, "in"),
    "ToTensorImage": ("ToTensorImage", {}, "out"),
    "ToTensorImage, unscaled": ("ToTensorImage", {"from_int": False}, "out"),
    "Crop": ("Crop", {"w": 2, "h": 1, "top": 1, "left": 1, "in_keys": ["pixels"]}, "out"),
}
NEEDS_TORCHVISION = ("Crop",)


def data() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "a": torch.randn(5, 4, generator=generator),
            "b": torch.randn(5, 2, generator=generator),
            "reward": torch.tensor([[-1.0], [0.0], [0.25], [1.0], [3.0]]),
            "pixels": torch.randint(0, 256, (5, 3, 4, 3), dtype=torch.uint8, generator=generator),
        },
        [5],
    )


def moved(transform, td, direction):
    return transform(td) if direction == "out" else transform.inv(td)


@pytest.mark.parametrize("case", CASES)
def test_data_is_changed_as_by_the_reference(case):
    name, keywords, direction = CASES[case]
    if name in NEEDS_TORCHVISION:
        pytest.importorskip("torchvision")

    own = moved(getattr(envkit, name)(**keywords), data(), direction)
    expected = moved(getattr(reference_transforms, name)(**keywords), data(), direction)

    assert set(own.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        torch.testing.assert_close(own[key], value)


def test_running_statistics_are_those_of_the_reference():
    own = envkit.VecNorm(["a"], decay=0.9)
    with pytest.warns(FutureWarning):
        expected = reference.VecNorm(["a"], decay=0.9, new_api=False)
    generator = torch.Generator().manual_seed(0)

    for rows in (3, 1, 5, 2):
        batch = TensorDict({"a": torch.randn(rows, 4, generator=generator)}, [rows])
        shown, wanted = own(batch.clone()), expected(batch.clone())

        torch.testing.assert_close(shown["a"], wanted["a"])
    torch.testing.assert_close(own.loc["a"], expected.loc["a"])
    torch.testing.assert_close(own.scale["a"], expected.scale["a"])


@pytest.mark.parametrize("padding", ["same", "constant"])
def test_recorded_frames_are_joined_as_by_the_reference(padding):
    raw = envkit.TransformedEnv(Count(3), envkit.DTypeCastTransform(torch.int64, torch.float32))
    raw = raw.rollout(8, break_when_any_done=False)
    keywords = {"N": 3, "dim": -1, "in_keys": ["count", ("next", "count")], "padding": padding}

    own = envkit.CatFrames(**keywords)(raw.clone())
    expected = reference.CatFrames(**keywords)(raw.clone().refine_names("time"))

    for key in keywords["in_keys"]:
        assert own[key].equal(expected[key])


def test_rewards_to_go_are_those_of_the_reference():
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]).bool()[..., None]
    raw = TensorDict({"next": {"reward": torch.rand(2, 4, 1), "done": done}}, [2, 4])

    own = envkit.Reward2GoTransform(0.9, out_keys=["g"]).inv(raw.clone())
    expected = reference.Reward2GoTransform(0.9, out_keys=["g"]).inv(raw.clone())

    torch.testing.assert_close(own["g"], expected["g"])


SAME_SIGNATURE = [
    "ActionDiscretizer",
    "ActionMask",
    "BinarizeReward",
    "CatFrames",
    "CatTensors",
    "CenterCrop",
    "ClipTransform",
    "Crop",
    "DTypeCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "ExcludeTransform",
    "FlattenObservation",
    "GrayScale",
    "LineariseRewards",
    "ObservationNorm",
    "PermuteTransform",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "RewardScaling",
    "SelectTransform",
    "SignTransform",
    "TimeMaxPool",
    "ToTensorImage",
    "UnsqueezeTransform",
]


@pytest.mark.parametrize("name", SAME_SIGNATURE)
def test_arguments_are_those_of_the_reference(name):
    own, expected = (
        inspect.signature(getattr(module, name).__init__).parameters
        for module in (envkit, reference_transforms)
    )

    assert list(own) == list(expected)
    assert [p.kind for p in own.values()] == [p.kind for p in expected.values()]
    for argument, parameter in expected.items():
        if parameter.default not in (None, inspect.Parameter.empty):
            assert own[argument].default == parameter.default, argument


def test_a_replay_buffer_of_the_reference_takes_a_transform():
    transform = envkit.Compose(
        envkit.RewardClipping(0.0, 0.5), envkit.CatTensors(["a", "b"], "o", del_keys=False)
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), transform=transform, batch_size=4)

    buffer.extend(data())
    sample = buffer.sample()

    assert sample["o"].shape == (4, 6)
    assert bool((sample["reward"] <= 0.5).all())
