"""Run one call on both libraries, and tell where what comes out differs.

A call takes a `Library` and uses public names only, so that one text builds the same spec, env or
transform twice. Results are compared as plain values: keys, shapes, dtypes, numbers, classes of specs by
name. An error counts by the built-in classes it belongs to: who catches theirs must catch ours.

Where the two are meant to differ, `docs/deviations.md` says so in one line with a name and a reason, and a
test shows it with `differs`; `test_deviations.py` compares the page with the tests.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

import envkit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.collectors
    import torchrl.data
    import torchrl.envs

BUILT_IN = (
    AssertionError,
    AttributeError,
    KeyError,
    IndexError,
    NotImplementedError,
    TypeError,
    ValueError,
    RuntimeError,
)


class Library:
    """Public names of one library, wherever it keeps them."""

    def __init__(self, name: str, *modules: Any) -> None:
        self.name = name
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"{self.name} has no {name}")

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return _library, (self.name,)  # it travels to workers by its name


def _library(name: str) -> Library:
    return OURS if name == OURS.name else THEIRS


OURS = Library("envkit", envkit)
THEIRS = Library("torchrl", torchrl.envs, torchrl.data, torchrl.collectors, torchrl.envs.transforms)
SPECS = (envkit.TensorSpec, torchrl.data.TensorSpec)
COMPOSITES = (envkit.Composite, torchrl.data.Composite)
STACKS = (
    *(envkit.Stacked, envkit.StackedComposite),
    *(torchrl.data.Stacked, torchrl.data.StackedComposite),
)
DOMAIN = {  # what the specs of a class say beside shape, dtype and device
    "BoundedContinuous": ("low", "high"),
    "BoundedDiscrete": ("low", "high"),
    "Categorical": ("n", "mask"),
    "OneHot": ("n", "mask"),
    "MultiCategorical": ("mask",),
    "MultiOneHot": ("mask",),
    "Choice": ("num_choices",),
}

Call = Callable[[Library], Any]


@dataclass(frozen=True)
class Outcome:
    """What a call gave: a plain value, or the built-in classes of the error it raised."""

    value: Any
    errors: frozenset[type[BaseException]]
    message: str = ""


def plain(result: Any) -> Any:
    """Write a result in terms that both libraries share, to be compared with ``==``."""
    if isinstance(result, SPECS):
        return plain_spec(result)
    if isinstance(result, NonTensorData):
        return tuple(result.batch_size), result.data
    if is_non_tensor(result):
        return tuple(result.batch_size), result.tolist()
    if isinstance(result, LazyStackedTensorDict) and not _is_even(result):
        return "stacked along", result.stack_dim, [plain(part) for part in result.tensordicts]
    if is_tensor_collection(result):
        keys = result.keys(is_leaf=lambda kind: False) if isinstance(result, TensorDictBase) else ()
        return tuple(result.batch_size), {key: plain(result.get(key)) for key in keys}
    if isinstance(result, torch.Tensor) and result.is_nested:
        return "nested", [plain(part) for part in torch.unbind(result)]
    if isinstance(result, torch.Tensor):
        if result.is_meta:
            return tuple(result.shape), result.dtype, "no data"
        numbers = result.detach().cpu()
        values = numbers.tolist()
        is_nan = numbers.is_floating_point() and bool(numbers.isnan().any())
        return tuple(numbers.shape), numbers.dtype, str(values) if is_nan else values
    if isinstance(result, np.ndarray):
        return result.shape, result.dtype, result.tolist()
    if isinstance(result, Mapping):
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(item) for item in result]
    return result


def plain_spec(spec: Any) -> Any:
    """Write all that a spec says, under its class's name.

    Left out are the devices of `NonTensor` and of trees, whose leaves have theirs, and the members of `Choice`.
    """
    kind = type(spec).__name__
    if isinstance(spec, STACKS):
        axes = (slice(None),) * spec.dim
        members = [spec[(*axes, i)] for i in range(spec.shape[spec.dim])]
        return kind, spec.dim, [plain(member) for member in members]
    if isinstance(spec, COMPOSITES):
        made = None if spec.data_cls is TensorDict else spec.data_cls
        children = {key: plain(child) for key, child in spec.items()}
        return kind, tuple(spec.shape), spec.names, made, children
    if kind == "NonTensor":
        return kind, tuple(spec.shape), spec.example_data
    domain = {name: plain(getattr(spec, name, None)) for name in DOMAIN.get(kind, ())}
    if kind.startswith("Multi"):  # numbers of options, whatever the dtype of the values
        domain["nvec"] = torch.as_tensor(spec.nvec).int().tolist()
    return kind, tuple(spec.shape), spec.dtype, spec.device, domain


def _is_even(stack: LazyStackedTensorDict) -> bool:
    """Say whether all entries of all parts can be read as one tensor each."""
    first, *others = (set(part.keys(True)) for part in stack.tensordicts)
    try:
        stack.contiguous()
    except (RuntimeError, KeyError):
        return False
    return all(keys == first for keys in others)


def outcome(library: Library, call: Call) -> Outcome:
    """Run a call on one library with the same random numbers each time."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome(plain(call(library)), frozenset())
    except NameError:  # of the call itself: the libraries would seem to agree
        raise
    except Exception as error:
        kinds = frozenset(kind for kind in BUILT_IN if isinstance(error, kind))
        return Outcome(None, kinds or frozenset({type(error)}), f"{type(error).__name__}: {error}")


def difference(call: Call) -> str | None:
    """Say where the two libraries differ on a call; None where they agree."""
    ours, theirs = outcome(OURS, call), outcome(THEIRS, call)
    if bool(ours.errors) != bool(theirs.errors):
        return (
            f"envkit: {ours.message or ours.value!r}\ntorchrl: {theirs.message or theirs.value!r}"
        )
    if not theirs.errors <= ours.errors:
        return f"envkit raises {ours.message}\ntorchrl raises {theirs.message}"
    if ours.value != theirs.value:
        return f"envkit: {ours.value!r}\ntorchrl: {theirs.value!r}"
    return None


def check_same(call: Call) -> None:
    """Fail unless both libraries give the same, or errors that one ``except`` catches."""
    found = difference(call)
    assert found is None, found


def check_works_alike(call: Call) -> None:
    """Fail unless both libraries give the same, and neither raises."""
    check_same(call)
    found = outcome(OURS, call)
    assert not found.errors, f"both libraries raise: {found.message}"


def differs(name: str, call: Call) -> str:
    """Show a difference that ``docs/deviations.md`` documents under ``name``; fail if it is none any more.

    Returns:
        How the two differ, for a test that asserts what ours does.
    """
    found = difference(call)
    assert found is not None, f"{name}: no difference is left. Take its line out of the page."
    return found


# ------------------------------------------------------------------------------------- which names there are

PAGE = Path(__file__).parents[2] / "docs" / "deviations.md"
ROW = re.compile(r"^\| (?P<of>[a-z ]+) \| (?P<names>`.+`) \| (?P<why>.+) \|$", re.M)


def names_out(of: str) -> set[str]:
    """Return the names that the last table of ``docs/deviations.md`` lists as left out, of one kind of things."""
    rows = [row for row in ROW.finditer(PAGE.read_text()) if row["of"] == of]
    assert rows, f"the page has no row of {of!r}"
    return {name for row in rows for name in re.findall("`([^`]+)`", row["names"])}


@cache
def public_members(kind: type, library: str) -> frozenset[str]:
    """Return the public attributes that the classes of one library below ``kind`` define, or assign to ``self``."""
    classes = [base for base in kind.__mro__ if base.__module__.startswith(library)]
    defined = {name for base in classes for name in vars(base)}
    trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in classes]
    assigned = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return frozenset(name for name in defined | assigned if name[0] != "_")
