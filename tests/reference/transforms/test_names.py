"""Every public name of the reference's transforms is provided, or stands in a table with the reason why not."""

from __future__ import annotations

import inspect

import pytest
import torchrl.envs.transforms as reference

import envkit

OUT = {
    "weights have to be downloaded": {
        "R3MTransform",
        "VC1Transform",
        "VIPRewardTransform",
        "VIPTransform",
    },
    "tokenisers of language and vision-language-action models, which come from other libraries": {
        "ActionTokenizerTransform",
        "Tokenizer",
    },
    "robots": {"MacroAction", "MacroPrimitive", "MacroPrimitiveTransform", "TargetMacroAction"},
    "part of TorchRL's collectors, storages, services or losses, and of no use without them": {
        "DecodeVideoTransform",
        "NextObservationDelta",
        "NextStateReconstructor",
        "PolicyAgeFilter",
        "RNDTransform",
        "RayTransform",
        "RunningMeanStd",
    },
}
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


def test_every_name_is_provided_or_out_for_a_reason():
    out = set().union(*OUT.values())

    missing = {name for name in public_names() if not is_provided(name)}

    assert missing == out


def test_the_tables_name_what_there_is():
    assert OTHER_ARGUMENTS.union(*OUT.values()) <= public_names()


COMPARED = sorted(name for name in public_names() - OTHER_ARGUMENTS if is_provided(name))


@pytest.mark.parametrize("name", COMPARED)
def test_arguments_have_the_names_order_and_kinds_of_the_reference(name):
    own, expected = (
        {
            argument: parameter
            for argument, parameter in inspect.signature(
                getattr(library, name).__init__
            ).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for library in (envkit, reference)
    )

    known = list(own)[: len(expected)]
    assert known == list(expected)
    assert [own[argument].kind for argument in known] == [p.kind for p in expected.values()]
    for argument, parameter in expected.items():
        if parameter.default not in (None, inspect.Parameter.empty):
            assert own[argument].default == parameter.default, argument
