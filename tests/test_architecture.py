"""The tree shows the architecture: which modules there are, and that imports point one way.

The graph is read from the source alone. An import counts wherever it stands: at the top, in a
function, for type checkers only, or as the name of a module in a string. Two modules may name
others freely: the front door, which is a table of where things are, and `late`, which looks up there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("envkit", "bridges/envkit_bridges")
LOOKS_UP = {"envkit", "envkit.late"}
MAY_LOOK_UP = {
    "envkit.batched.async_pool",
    "envkit.env.base",
    "envkit.env.construction",
    "envkit.batched.workers",
    "envkit.collectors.kinds",
    "envkit.transforms.core.compose",
    "envkit.transforms.frames",
    "envkit_bridges.exports.torchrl_transforms",
    "envkit.collectors",
    "envkit.envs",
    "envkit.transforms",
}


def modules(root: Path) -> dict[str, Path]:
    """List the modules of the packages below ``root`` by dotted name."""
    found = {}
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            parts = file.relative_to((root / package).parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(source: str, known: set[str]) -> Iterator[str]:
    """Name the modules that a source imports, in whatever way."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from {full, str(node.module)} & known if full not in known else {full}
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield from {node.value} & known


def import_graph(root: Path) -> dict[str, set[str]]:
    """Read which module imports which; those that look up by name are left out."""
    files = modules(root)
    return {
        name: set(imports(file.read_text(), set(files))) - {name}
        for name, file in files.items()
        if name not in LOOKS_UP
    }


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(ROOT)


def test_no_module_reaches_itself_through_what_it_imports(graph):
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "upward",
    [
        "from envkit.b import B",
        "from envkit import b",
        "import envkit.b",
        "def f():\n    from envkit.b import B",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from envkit.b import B",
        "from importlib import import_module\nimport_module('envkit.b')",
    ],
    ids=["from", "module", "import", "lazy", "type-only", "string"],
)
def test_a_cycle_of_any_kind_is_found(tmp_path, upward):
    (tmp_path / "envkit").mkdir()
    (tmp_path / "envkit" / "__init__.py").write_text("")
    (tmp_path / "envkit" / "a.py").write_text(upward)
    (tmp_path / "envkit" / "b.py").write_text("from envkit.a import A")

    with pytest.raises(CycleError):
        list(TopologicalSorter(import_graph(tmp_path)).static_order())


def test_only_those_named_here_look_up(graph):
    assert {name for name, used in graph.items() if "envkit.late" in used} == MAY_LOOK_UP


def test_the_roots_hold_few_modules_and_folders_say_the_rest():
    of_envkit = {file.name for file in (ROOT / "envkit").glob("*.py")}
    of_bridges = {file.stem for file in (ROOT / "bridges" / "envkit_bridges").glob("*.py")} - {
        "__init__"
    }
    folders = {
        folder.name
        for folder in (ROOT / "bridges" / "envkit_bridges").iterdir()
        if (folder / "__init__.py").exists()
    }

    assert len(of_envkit) <= 8
    assert of_bridges == {"dlpack", "dtypes", "figures", "libraries", "offscreen"}
    assert {"jax", "gym", "policy", "worlds", "exports"} <= folders


def test_worlds_do_not_know_each_other_and_jax_does_not_know_gym(graph):
    for name, used in graph.items():
        if name.startswith("envkit_bridges.worlds."):
            world = ".".join(name.split(".")[:3])  # a file, or a package
            others = {other for other in used if other.startswith("envkit_bridges.worlds.")}
            assert not {other for other in others if not f"{other}.".startswith(f"{world}.")}, name
        if name.startswith("envkit_bridges.jax."):
            assert not {other for other in used if other.startswith("envkit_bridges.gym.")}, name


def test_every_module_says_what_it_does():
    for name, file in modules(ROOT).items():
        source = file.read_text()
        assert not source.strip() or ast.get_docstring(ast.parse(source)), name
