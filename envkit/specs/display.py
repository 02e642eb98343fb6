"""How a spec is shown: as text in a terminal, as a table in a notebook.

This module decides the layout. What is said of a spec comes from the spec itself: `_facts`, and
`_shown` for the specs it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

__all__ = ["html", "text"]

_COLUMNS = ("entry", "spec", "shape", "dtype", "device", "values")


def text(spec: Any) -> str:
    """Write a leaf on one line, and a tree or a stack with one entry a line."""
    name = type(spec).__name__
    if not spec._shown():
        facts = {"shape": tuple(spec.shape), **spec._facts(), "device": spec.device}
        if spec.dtype is not None:
            facts["dtype"] = _short(spec.dtype)
        return f"{name}({', '.join(f'{key}={fact}' for key, fact in facts.items())})"
    lines = [f"{label}: {part!r}," for label, part in spec._shown()]
    lines += [f"{key}={fact}," for key, fact in spec._facts().items()]
    lines += [f"device={spec.device},", f"shape={tuple(spec.shape)})"]
    body = "\n".join(lines).replace("\n", "\n    ")
    return f"{name}(\n    {body}"


def html(spec: Any) -> str:
    """Make a table with one row for each entry at any depth, for Jupyter."""
    head = "".join(f"<th style='text-align: left'>{column}</th>" for column in _COLUMNS)
    rows = "".join(
        f"<tr>{''.join(_cell(cell, depth * (i == 0)) for i, cell in enumerate(cells))}</tr>"
        for depth, cells in _rows("", spec, 0)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _rows(label: str, spec: Any, depth: int) -> Iterator[tuple[int, list[str]]]:
    if spec is None:
        yield depth, [label, "None", "", "", "", ""]
        return
    facts = ", ".join(f"{key}={fact}" for key, fact in spec._facts().items())
    dtype = "" if spec.dtype is None else _short(spec.dtype)
    device = "" if spec.device is None else str(spec.device)
    yield depth, [label, type(spec).__name__, str(tuple(spec.shape)), dtype, device, facts]
    for name, part in spec._shown():
        yield from _rows(name, part, depth + 1)


def _cell(content: str, depth: int) -> str:
    return (
        f"<td style='text-align: left; padding-left: {0.5 + 1.5 * depth}em'>{escape(content)}</td>"
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
