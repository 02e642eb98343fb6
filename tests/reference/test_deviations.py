"""Each documented difference is shown by a test, and each shown one is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "deviations.md"
LINE = re.compile(r"^- `(?P<name>[a-z0-9-]+)`: (?P<what>.+) Why: (?P<why>.+)$")


def lines_of_the_page() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if line.startswith("- ")]


def documented() -> list[str]:
    return [match["name"] for line in lines_of_the_page() if (match := LINE.match(line))]


def shown() -> set[str]:
    """First arguments of `differs` in the tests of this folder, read from their source."""
    calls = (
        node
        for file in HERE.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    return {ast.literal_eval(c.args[0]) for c in calls if c.func.id == "differs" and c.args}


def test_each_line_has_a_name_of_its_own_and_a_reason():
    names = documented()

    assert len(names) == len(set(names)) == len(lines_of_the_page())


def test_the_page_names_what_the_tests_show_and_nothing_else():
    assert set(documented()) == shown()
