"""One-line changes of a module's source, made by cosmic-ray's operators, and those known to change nothing.

Operators change comparisons, arithmetic, ``and``/``or``, ``not``, constants, ``break``/``continue``, decorators,
exceptions, and make loops run no time. A place in the source gives one mutant, by an operator that is drawn;
what changes annotations or the text of messages alone gives none.

Conventions
    change      the changed line before and after, stripped, as ``old -> new``.
    equivalent  no caller could tell the mutant from the source. ``bench/equivalent_mutants.toml`` holds those
                that were read, by module and change, each with the reason.
"""

from __future__ import annotations

import ast
import difflib
import random
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.ast  # pyright: ignore[reportMissingImports]
import cosmic_ray.mutating  # pyright: ignore[reportMissingImports]
import cosmic_ray.plugins  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
_EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
_SAME_BUT_FOR_IDENTITY = {"Eq", "Is"}, {"NotEq", "IsNot"}


@dataclass(frozen=True)
class Mutant:
    """One changed source."""

    module: str  # path from the root of the repository
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The lines that differ."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:])

    @property
    def change(self) -> str:
        """What was changed into what, without indentation or place."""
        lines = self.diff.splitlines()[1:]
        old, new = (
            " ".join(line[1:].strip() for line in lines if line[0] == mark) for mark in "-+"
        )
        return f"{old} -> {new}"

    @property
    def lines(self) -> set[int]:
        """Marks of the lines of the statement that was changed: of a loop or branch those of its head.

        Decorators, and what a class says outside of its methods, concern all that they stand for.
        """
        lines = self.before.splitlines()
        pairs = zip(lines, self.after.splitlines(), strict=False)
        first = next(n for n, (old, new) in enumerate(pairs, 1) if old != new and old.strip())
        marked = range(first, first + 1)
        for node in ast.walk(ast.parse(self.before)):
            if not isinstance(node, ast.stmt):
                continue
            last = node.end_lineno or node.lineno
            decorators = getattr(node, "decorator_list", [])
            held = node.body if isinstance(node, ast.ClassDef) else []
            said = [part for part in held if not hasattr(part, "body")]
            is_above = decorators and decorators[0].lineno <= first < node.lineno
            if is_above or any(part.lineno <= first <= (part.end_lineno or 0) for part in said):
                marked = range(node.lineno, last + 1)
                break
            if node.lineno <= first <= last:
                body = None if isinstance(node, ast.FunctionDef) else getattr(node, "body", None)
                end = max(body[0].lineno, node.lineno + 1) if body else last + 1
                marked = range(node.lineno, end) if first < end else marked
        return {mark_of(lines[number - 1]) for number in marked}


def mark_of(line: str) -> int:
    """Give what a line is known by, wherever edits move it: a number for its text."""
    return zlib.crc32(line.strip().encode())


def reasons() -> dict[str, dict[str, str]]:
    """Read why mutants change nothing, by module and change."""
    return tomllib.loads(_EQUIVALENT.read_text())


class _Meaning(ast.NodeTransformer):
    """Leaves of a syntax tree what decides: no annotations, docstrings or messages."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        value = None if node.value is None else self.visit(node.value)
        return ast.AnnAssign(node.target, ast.Constant(None), value, node.simple)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        return self.generic_visit(node)


def _meaning(source: str) -> str | None:
    """Give what a source does, as text to compare; None if it is no Python."""
    try:
        return ast.dump(_Meaning().visit(ast.parse(source)))
    except SyntaxError:
        return None


def mutants_of(module: str, draw: random.Random) -> Iterator[Mutant]:
    """Make one mutant of each place of a module that some operator can change.

    Args:
        module: path of the module from the root of the repository.
        draw: chooses the operator where several could be used.
    """
    before = (ROOT / module).read_text()
    tree, meaning = cosmic_ray.ast.get_ast(before), _meaning(before)
    places: dict[tuple, list] = {}
    for name in cosmic_ray.plugins.operator_names():
        make = cosmic_ray.plugins.get_operator(name)
        exchanged = set(name.rpartition("/")[2].split("_")[1:])
        if make.arguments() or exchanged in _SAME_BUT_FOR_IDENTITY:
            continue
        operator, occurrence = make(), 0
        for node in cosmic_ray.ast.ast_nodes(tree):
            for place in operator.mutation_positions(node):
                places.setdefault(place, []).append((operator, occurrence))
                occurrence += 1
    for place in sorted(places):
        operator, occurrence = draw.choice(places[place])
        after = cosmic_ray.mutating.mutate_code(before, operator, occurrence)
        if after is not None and _meaning(after) not in (None, meaning):
            yield Mutant(module, before, after)
