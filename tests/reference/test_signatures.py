"""Parameters of public classes, their methods and functions: each of TorchRL's is there, or out for a reason."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import envkit
from tests.reference.compare import names_out, torchrl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.data.utils
    import torchrl.envs.batched_envs
    import torchrl.envs.utils

MODULES = (
    torchrl.envs,
    torchrl.envs.utils,
    torchrl.envs.batched_envs,
    torchrl.collectors,
    torchrl.data.utils,
)


def keywords_of(function: Any, annotation: Any) -> set[str]:
    """Names in the table that ``**kwargs: Unpack[Table]`` is annotated with."""
    if "Unpack[" not in str(annotation):
        return set()
    told = eval(annotation, inspect.unwrap(function).__globals__)
    (table,) = typing.get_args(told)
    return set(typing.get_type_hints(table))


def parameters(function: Any) -> set[str]:
    """Names of parameters, those of a table of keywords too."""
    names, parameters_of = set(), inspect.signature(function).parameters
    for name, parameter in parameters_of.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            names |= keywords_of(function, parameter.annotation)
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL and name[0] != "_":
            names.add(name)
    return names - {"self"}


def forwards(function: Any) -> bool:
    """Say whether a function hands on whatever it is given."""
    given = [str(parameter) for parameter in inspect.signature(function).parameters.values()]
    return {"*args: Any", "**kwargs: Any"} <= {text.replace("'", "") for text in given}


def functions_of(name: str, value: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Constructor and public methods that a class of theirs writes, or a function, beside ours."""
    if inspect.isfunction(value):
        yield name, value, ours
    elif inspect.isclass(value):
        yield f"{name}()", value.__init__, ours.__init__
        for member, function in vars(value).items():
            mine = inspect.getattr_static(ours, member, None)
            if inspect.isfunction(function) and inspect.isfunction(mine) and member[0] != "_":
                yield f"{name}.{member}", function, mine


def missing() -> set[str]:
    lacking = set()
    for module in MODULES:
        for name, value in vars(module).items():
            if (
                name[0] == "_"
                or not hasattr(envkit, name)
                or "spec" in getattr(value, "__module__", "")
            ):
                continue
            for where, theirs, ours in functions_of(name, value, getattr(envkit, name)):
                if forwards(ours):
                    continue
                lacking |= {f"{where}.{p}" for p in parameters(theirs) - parameters(ours)}
    return lacking


def test_every_parameter_is_there_or_out():
    patterns = names_out("parameters")  # of class(), class.method or function, and parameter
    found = missing()

    assert [name for name in found if not any(fnmatch(name, p) for p in patterns)] == []
    assert [p for p in patterns if not any(fnmatch(name, p) for name in found)] == []
