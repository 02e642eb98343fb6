"""How much of envkit's public signatures says nothing: parameters and results that may be `Any`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import envkit

MOST = 0.05


def says_nothing(annotation: object, names: dict[str, Any]) -> bool:
    """Tell whether an annotation is missing, is `Any`, a name for it, or a union with it."""
    if annotation is inspect.Parameter.empty:
        return True
    if not isinstance(annotation, str):
        return annotation is Any
    return any(
        isinstance(part, ast.Name) and (part.id == "Any" or names.get(part.id) is Any)
        for part in members(ast.parse(annotation, mode="eval").body)
    )


def members(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from members(node.left)
        yield from members(node.right)
    else:
        yield node


def written_here(value: object) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """List a public function, or the constructors and public methods of a class and its bases in envkit.

    Each with its name, and whether its first parameter is what it belongs to.
    """
    if inspect.isfunction(value):
        yield f"{value.__module__}.{value.__qualname__}", value, False
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        if base.__module__.partition(".")[0] not in ("envkit", "envkit_bridges"):
            continue
        for name, member in vars(base).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            is_shown = not name.startswith("_") or name in ("__init__", "__call__", "__getitem__")
            if is_shown and inspect.isfunction(function):
                owned = not isinstance(member, staticmethod)
                yield f"{base.__module__}.{base.__qualname__}.{name}", function, owned


def test_less_than_five_percent_of_public_signatures_say_nothing():
    functions = {
        function: (name, owned)
        for public in envkit.__all__
        for name, function, owned in written_here(getattr(envkit, public))
    }
    count, silent = 0, []

    for function, (name, owned) in functions.items():
        signature = inspect.signature(function)
        names = inspect.unwrap(function).__globals__
        taken = [*signature.parameters.values()][int(owned) :]
        annotations = {one.name: one.annotation for one in taken}
        if not name.endswith(".__init__"):
            annotations["return"] = signature.return_annotation
        count += len(annotations)
        silent += [
            f"{name}: {one}" for one, said in annotations.items() if says_nothing(said, names)
        ]

    assert count > 1000
    share = len(silent) / count
    assert share < MOST, f"{share:.1%} of {count}:\n" + "\n".join(sorted(silent))
