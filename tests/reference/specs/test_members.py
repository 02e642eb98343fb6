"""Everything that TorchRL's specs have is there: names, members of each class, parameters of each method."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch

import envkit
from tests.reference.compare import OURS, THEIRS, check_same, names_out
from tests.reference.test_their_modules import KINDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.data
    import torchrl.data.tensor_specs
    import torchrl.data.utils
    import torchrl.envs.utils


def names_of_their_specs() -> set[str]:
    """Classes of specs and of what they hold, and functions that take a spec or make one."""
    classes = {
        name
        for module in (torchrl.data, torchrl.data.tensor_specs)
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == torchrl.data.tensor_specs.__name__
        and not name.startswith("_")
    }
    functions = {
        name
        for module in (torchrl.data.utils, torchrl.envs.utils)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and ("spec" in inspect.signature(value).parameters or "composite" in name)
    }
    return classes | functions


def test_every_name_of_their_specs_is_provided_or_out():
    names = names_of_their_specs()

    assert len(names) > 20
    assert {name for name in names if not hasattr(envkit, name)} == names_out("classes of specs")


def public_members(value: Any) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def missing_members() -> set[str]:
    """Members that a spec of theirs has and ours lacks; with the class's name where others have it."""
    missing: dict[str, set[str]] = {}
    for kind in KINDS.values():
        ours, theirs = kind(OURS), kind(THEIRS)
        for name in public_members(theirs):
            has = name in public_members(type(ours)) or name in vars(ours)
            missing.setdefault(name, set()).update(() if has else {type(theirs).__name__})
    everywhere = {name for name, kinds in missing.items() if len(kinds) > 1}
    once = {f"{kind}.{name}" for name, kinds in missing.items() for kind in kinds}
    return everywhere | {name for name in once if name.split(".")[1] not in everywhere}


def test_every_member_of_their_specs_is_there_or_out():
    assert missing_members() == names_out("specs")


def parameters(function: Any) -> Iterable[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in kinds and not name.startswith("_")
    ]


def missing_parameters() -> set[str]:
    """Parameters that a method of theirs has and ours lacks; of constructors, with the class's name."""
    missing = set()
    for name in names_of_their_specs():
        ours, theirs = (getattr(m, name, None) for m in (envkit, torchrl.data.tensor_specs))
        if not (inspect.isclass(theirs) and issubclass(theirs, torchrl.data.TensorSpec)):
            continue
        members = public_members(theirs) & public_members(ours)
        if ours is not envkit.TensorSpec:  # of which nothing is made
            members.add("__init__")
        for member in members:
            function, mine = getattr(theirs, member), getattr(ours, member)
            if inspect.isfunction(function) and inspect.isfunction(mine):
                where = f"{name}.{member}" if member == "__init__" else member
                lacking = set(parameters(function)) - set(parameters(mine))
                missing |= {f"{where}.{parameter}" for parameter in lacking}
    return missing


def test_every_parameter_of_their_methods_is_there_or_out():
    assert missing_parameters() == names_out("parameters of specs")


def test_torch_functions_that_take_their_specs_take_ours():
    for call in (
        lambda n: torch.unsqueeze(n.Unbounded((2, 3)), 1),
        lambda n: torch.squeeze(n.Unbounded((1, 3, 1))),
        lambda n: torch.squeeze(n.Unbounded((1, 3)), dim=0),
        lambda n: torch.stack([n.Unbounded(2), n.Unbounded(2)], dim=1),
        lambda n: torch.index_select(n.Unbounded((2, 3)), 1, torch.tensor([2])),
    ):
        check_same(call)
    handled = torchrl.data.TensorSpec.SPEC_HANDLED_FUNCTIONS
    assert set(handled) <= {torch.stack, torch.index_select, torch.squeeze, torch.unsqueeze}
