"""Every public name of the reference's environments is provided, or is out for a reason."""

from __future__ import annotations

import inspect

import pytest
import torch
import torchrl.envs
import torchrl.envs.transforms

import envkit
from tests.reference.compare import names_out, public_members


def public_names() -> set[str]:
    return set(torchrl.envs.__all__) - set(vars(torchrl.envs.transforms))


def test_every_name_is_provided_or_in_the_table():
    missing = {name for name in public_names() if not hasattr(envkit, name)}

    assert missing == names_out("classes of environments")


CLASSES = ("EnvBase", "TransformedEnv", "GymEnv", "GymWrapper", "VmasEnv")


def members_of(name: str) -> set[str]:
    return set(public_members(getattr(torchrl.envs, name), "torchrl") - set(dir(torch.nn.Module())))


@pytest.mark.parametrize("name", CLASSES)
def test_every_member_of_an_env_is_provided_or_in_the_table(name):
    theirs, ours = members_of(name), getattr(envkit, name)

    missing = theirs - public_members(ours, "envkit") - set(dir(ours))

    assert missing == names_out("environments") & theirs


def test_the_table_names_what_there_is():
    assert names_out("environments") <= set().union(*map(members_of, CLASSES))


CALLS = [
    *(
        "reset",
        "step",
        "rollout",
        "rand_action",
        "rand_step",
        "step_and_maybe_reset",
        "maybe_reset",
    ),
    *("set_seed", "any_done", "all_actions", "auto_specs_", "close", "append_transform"),
    *("add_truncated_keys", "fake_tensordict", "set_spec_lock_", "empty_cache", "step_mdp"),
]


@pytest.mark.parametrize("name", CALLS)
def test_calls_take_the_arguments_of_the_reference(name):
    ours, expected = (
        inspect.signature(inspect.unwrap(getattr(library.EnvBase, name))).parameters
        for library in (envkit, torchrl.envs)
    )

    named = [key for key, found in expected.items() if found.kind is not found.VAR_KEYWORD]
    positional = [key for key in named if expected[key].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert set(named) <= ours.keys()
    assert list(ours)[: len(positional)] == positional


FUNCTIONS = [
    *("check_env_specs", "step_mdp", "terminated_or_truncated", "make_composite_from_td"),
    *("make_tensordict", "check_marl_grouping", "SerialEnv", "ParallelEnv", "EnvCreator", "GymEnv"),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_classes_take_the_first_argument_by_position(name):
    first, second = (
        next(iter(inspect.signature(getattr(library, name)).parameters.values()))
        for library in (envkit, torchrl.envs)
    )

    assert first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    assert second.kind in (*{first.kind}, second.VAR_POSITIONAL, second.POSITIONAL_OR_KEYWORD)
