"""Every public name of the reference's transforms is provided, or stands in a table with the reason why not."""

from __future__ import annotations

import inspect

import pytest
import torch
import torchrl.envs.transforms as reference
import torchrl.modules
from tensordict.nn import TensorDictModule

import envkit
from tests.reference.compare import names_out, public_members

OTHER_ARGUMENTS = {  # *args there and names here, or arguments whose features are listed in the docstrings
    "AutoResetEnv",
    "Compose",
    "ModuleTransform",
    "SqueezeTransform",
    "TrajCounter",
    "TransformedEnv",
    "VecGymEnvTransform",
    "VecNorm",
}


def public_names() -> set[str]:
    return {
        name
        for name, value in vars(reference).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def is_provided(name: str) -> bool:
    return hasattr(envkit, name)


def test_every_name_is_provided_or_in_the_table():
    missing = {name for name in public_names() if not is_provided(name)}

    assert missing == names_out("classes of transforms")


def test_the_lists_name_what_there_is():
    assert public_names() >= OTHER_ARGUMENTS


COMPARED = sorted(name for name in public_names() - OTHER_ARGUMENTS if is_provided(name))


@pytest.mark.parametrize("name", COMPARED)
def test_arguments_have_the_names_order_and_kinds_of_the_reference(name):
    ours, expected = (
        {
            argument: parameter
            for argument, parameter in inspect.signature(
                getattr(library, name).__init__
            ).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for library in (envkit, reference)
    )

    names = list(ours)[: len(expected)]
    assert names == list(expected)
    assert [ours[argument].kind for argument in names] == [p.kind for p in expected.values()]
    for argument, parameter in expected.items():
        if parameter.default not in (None, inspect.Parameter.empty):
            assert ours[argument].default == parameter.default, argument


ARGUMENTS = {  # of transforms that cannot be made without
    "ActionChunkTransform": (2,),
    "ActionDiscretizer": (3,),
    "AutoResetEnv": lambda: (envkit.PendulumEnv(),),
    "BatchSizeTransform": {"batch_size": [2]},
    "BurnInTransform": lambda: ([torchrl.modules.LSTMModule(2, 3, in_key="x", out_key="y")], 2),
    "CatFrames": (2, -1),
    "CenterCrop": (2,),
    "ClipTransform": {"low": 0.0},
    "ConditionalPolicySwitch": (lambda td: td, lambda td: True),
    "ConditionalSkip": (lambda td: True,),
    "Crop": (2,),
    "DTypeCastTransform": (torch.float32, torch.float64),
    "DeviceCastTransform": ("cpu",),
    "DiscreteActionProjection": (2, 4),
    "ExpandAs": ("a", "b"),
    "FlattenObservation": (-2, -1),
    "Hash": (["a"], ["b"]),
    "LineariseRewards": (["reward"],),
    "ModuleTransform": lambda: (TensorDictModule(torch.nn.Identity(), ["a"], ["b"]),),
    "MultiStepTransform": (2, 0.9),
    "ObservationNorm": (0.0, 1.0, ["a"]),
    "PermuteTransform": ((-1, -2), ["a"]),
    "RNDTransform": lambda: (torch.nn.Identity(), torch.nn.Identity()),
    "RandomCropTensorDict": (2,),
    "RandomTruncationTransform": (2, 3),
    "RenameTransform": (["a"], ["b"]),
    "Resize": (2,),
    "RewardClipping": (0.0, 1.0),
    "RewardScaling": (0.0, 1.0),
    "SqueezeTransform": (-1,),
    "Stack": (["a", "b"], "c"),
    "TargetReturn": (1.0,),
    "TerminateTransform": (lambda td: False,),
    "TransformedEnv": lambda: (envkit.PendulumEnv(),),
    "UnaryTransform": {"in_keys": ["a"], "out_keys": ["b"], "fn": torch.neg},
    "UnsqueezeTransform": (-1,),
    "VecNormV2": (["a"],),
}


def members(name: str) -> set[str]:
    """List what TorchRL's class adds to a module of torch."""
    return set(public_members(getattr(reference, name), "torchrl") - set(dir(torch.nn.Module())))


CLASSES = sorted(
    name
    for name in public_names()
    if is_provided(name) and inspect.isclass(getattr(reference, name))
)


def test_every_member_of_a_transform_is_provided_or_in_the_table():
    missing, count = set(), 0
    for name in CLASSES:
        arguments = ARGUMENTS.get(name, ())
        arguments = arguments() if callable(arguments) else arguments
        transform = getattr(envkit, name)(
            *([] if isinstance(arguments, dict) else arguments),
            **(arguments if isinstance(arguments, dict) else {}),
        )
        missing |= members(name) - public_members(type(transform), "envkit") - set(dir(transform))
        count += len(members(name))

    assert missing == names_out("transforms") | names_out("environments") & missing
    assert count > 2000
