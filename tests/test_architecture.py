"""The tree shows the architecture: which modules there are, and that imports point one way.

The graph is read from the source alone. An import counts wherever it stands: at the top, in a
function, for type checkers only, or as the name of a module in a string. Two modules may name
others freely: the front door, which reads a table of where things are, and `lazy_imports`, which looks up there.

No test counts lines. A module with one importer, in its own folder, has tests of its own or is part
of that importer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import envkit

ROOT = Path(__file__).parents[1]
PACKAGES = ("envkit", "bridges/envkit_bridges")
LOOKS_UP = {"envkit", "envkit.lazy_imports"}
MAY_LOOK_UP = {
    "envkit.batched.async_pool",
    "envkit.env.base",
    "envkit.env.options",
    "envkit.batched.workers",
    "envkit.collectors.settings",
    "envkit.transforms.core.compose",
    "envkit.transforms.frames",
    "envkit_bridges.exports.torchrl",
    "envkit.collectors",
    "envkit.envs",
    "envkit.transforms",
}


def modules(root: Path) -> dict[str, Path]:
    """List the modules of the packages below ``root`` by dotted name."""
    modules_by_name = {}
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            parts = file.relative_to((root / package).parent).with_suffix("").parts
            modules_by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules_by_name


def imports(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Name the modules that a source imports, in whatever way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from {full, str(node.module)} & names if full not in names else {full}
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & names
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield from {node.value} & names


def import_graph(root: Path) -> dict[str, set[str]]:
    """Read which module imports which; those that look up by name are left out."""
    files = modules(root)
    known = set(files)
    return {
        name: set(imports(ast.parse(file.read_text()), known)) - {name}
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
    assert {name for name, used in graph.items() if "envkit.lazy_imports" in used} == MAY_LOOK_UP


def test_the_roots_hold_few_modules_and_folders_say_the_rest():
    of_envkit = {file.stem for file in (ROOT / "envkit").glob("[!_]*.py")}
    of_bridges = {file.stem for file in (ROOT / "bridges" / "envkit_bridges").glob("*.py")} - {
        "__init__"
    }
    folders = {
        folder.name
        for folder in (ROOT / "bridges" / "envkit_bridges").iterdir()
        if (folder / "__init__.py").exists()
    }

    below_all = {"errors", "installing", "lazy_imports", "process_wide", "rules"}
    assert of_envkit == below_all | {"checkpoint", "ppo"}
    assert of_bridges == {"dlpack", "libraries", "offscreen"}
    assert {"jax", "gym", "policy", "worlds", "exports"} <= folders


def test_worlds_do_not_know_each_other_and_jax_does_not_know_gym(graph):
    for name, used in graph.items():
        if name.startswith("envkit_bridges.worlds."):
            world = ".".join(name.split(".")[:3])  # a file, or a package
            others = {other for other in used if other.startswith("envkit_bridges.worlds.")}
            assert not {other for other in others if not f"{other}.".startswith(f"{world}.")}, name
        if name.startswith("envkit_bridges.jax."):
            assert not {other for other in used if other.startswith("envkit_bridges.gym.")}, name


# Modules that are only read together with their one importer, and still stand apart. This list may
# only get shorter: merge the module into its importer, or write tests of it.
STAND_APART = {
    # envkit.collectors
    "envkit.collectors.worker_pool",
    # envkit.env
    "envkit.env.from_data",
    "envkit.env.module",
    # envkit.transforms.core
    "envkit.transforms.core.transformed_rows",
}


def pieces(root: Path) -> set[str]:
    """Name the modules with one importer, in their own folder, that no test imports or is called after.

    A face (``__init__``) is no importer; a test that imports a public name imports the module behind it.
    """
    files = modules(root)
    faces = {name for name, file in files.items() if file.stem == "__init__"}
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, used in import_graph(root).items():
        for other in used - {name} if name not in faces else ():
            importers[other].add(name)
    tests = set((root / "tests").rglob("*.py")) - {Path(__file__)}  # names them for another reason
    tested, known = set[str](), set(files)
    for file in tests:
        tree = ast.parse(file.read_text())
        tested |= set(imports(tree, known)) | {envkit._HOME_OF[name] for name in _taken(tree)}
    return {
        name
        for name, by in importers.items()
        if len(by) == 1
        and {other.rpartition(".")[0] for other in by} == {name.rpartition(".")[0]}
        and name not in faces | tested
        and not _test_files(root, name) & tests
    }


def _taken(tree: ast.Module) -> Iterator[str]:
    """Name what a source imports from the front door."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "envkit":
            yield from {alias.name for alias in node.names} & set(envkit._HOME_OF)


def _test_files(root: Path, module: str) -> set[Path]:
    """Name the files that may hold the tests of a module: below the mirror of its folder, or of one above."""
    package, *folders, stem = module.split(".")
    top = root / "tests" / ("bridges" if package == "envkit_bridges" else "")
    return {top.joinpath(*folders[:depth], f"test_{stem}.py") for depth in range(len(folders) + 1)}


def test_a_piece_that_only_its_neighbour_imports_is_part_of_it_or_has_tests_of_its_own():
    assert pieces(ROOT) == STAND_APART


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tests/test_b.py", ""),
        ("tests/test_more.py", "from envkit.b import B"),
        ("envkit/c.py", "from envkit.b import B"),
    ],
    ids=["test file", "imported by a test", "two importers"],
)
def test_a_piece_is_a_module_with_one_importer_and_no_tests(tmp_path, path, source):
    (tmp_path / "envkit").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "envkit" / "__init__.py").write_text("from envkit.b import B")
    (tmp_path / "envkit" / "a.py").write_text("from envkit.b import B")
    (tmp_path / "envkit" / "b.py").write_text("B = 1")

    assert pieces(tmp_path) == {"envkit.b"}
    (tmp_path / path).write_text(source)
    assert pieces(tmp_path) == set()


# Private names that are read from another module, beside the hooks of envs, which are in docs/architecture.md. pyright's
# reportPrivateUsage would refuse these hooks too: they are private so that users' envs are free to use the plain names.
PRIVATE = {
    "of Python": "_asdict _current_frames _exit _fields _getframe _replace _run_exitfuncs _args_from_interpreter_flags",
    "of torch and tensordict": "_C _buffers _cdata _fast_apply _forward_hooks _forward_pre_hooks _global_forward_hooks "
    "_global_forward_pre_hooks _modules _new_unsafe _nn _ops _overloadname _parameters _parse_to _schema _validate_args _version",
    "of other libraries": "_allow_done_after_reset _bit_generator _envs _platform_make_current _registry _reset_key _viewers "
    "_DOMAINS",
    "of transforms": "_belong_to _declared_keys _edits _inv_call _require_unowned _reset_env_preprocess "
    "_reset_like_step",
    "of chains": "_chain _reads_specs",
    "of specs": "_choices _each _encoding_ndim _free_axis _free_shape _is_tree _map _map_shape _shape",
    "of pools": "_batch_size _device _entries _exchange _looked_up _metadata _recovery _require_shown _share_individual_td "
    "_started _the_exchange _was_closed",
    "of wrappers and adapters": "_action_inputs _env _owner _pool",
    "of other parts": "_HOME_OF _action_seed _has_varying_sizes _kind _repr_html_",
}


def private_reads(tree: ast.Module) -> set[str]:
    """Return the private attributes that a module reads of others: those that nothing in it defines or assigns."""
    defined = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
    read = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store() | ast.Del())
            ):
                defined.add(name)
            case ast.Attribute(
                value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))
            ):
                pass
            case ast.Attribute(attr=name) if re.match("_[^_]", name):
                read.add(name)
    return read - defined


def test_private_names_that_other_modules_read_are_listed():
    hooks = set(re.findall(r"\b_[a-z]\w+\b", (ROOT / "docs/architecture.md").read_text()))
    read = set()
    for file in modules(ROOT).values():
        read |= private_reads(ast.parse(file.read_text()))

    listed = {name for names in PRIVATE.values() for name in names.split()}
    assert read - hooks == listed


# Private names that tests read, and why nothing public shows the same. This list may only get shorter.
READ_BY_TESTS = {
    "hooks that a user may write": "_apply_transform _apply_to_composite _apply_to_composite_inv _call _repr_html_ _send",
    "of Python and other libraries": "_buffers _disable_current_modes _dynamo _envs _err_compile_safetanh _exit _horizons "
    "_local_scalar_dense _optim_count _python_dispatch _pytree _randomizer _to_copy _validate_args _config",
    "the bare simulator, and the fields of its state": "_core _engine _env _library _menagerie _require_menagerie _shows_metrics",
    "which of several ways a step or a run takes": "_action_of_a_row _advance _in_order_of_waiting _leaf_after _translations "
    "_OnModule _defined_since _functions _name _next_key _number_on _route _row _rows_for_run _set_str _unroll",
    "memory and workers, to fill, hold or kill them": "_ask_envs _exchange _idle _lent_bytes _next_raw _owner _pool _queues "
    "_received _recovery _started _worker_pool",
    "the tables of names, envs and libraries": "_HOME_OF _OTHER_NAMES _REGISTERED _all_worlds _encoding_ndim _single_task "
    "_versions _worlds",
    "parts of commands and scripts, one by one": "_array_of _bounds _installed _log _memory _rendering _threads _tried _two_pygames",
    "what PPO learns from": "_by_policy _learners _samples",
    "other tests' helpers": "_seen _trained",
}


def test_private_names_that_tests_read_are_listed():
    hooks = set(re.findall(r"\b_[a-z]\w+\b", (ROOT / "docs/architecture.md").read_text()))
    read = set()
    for file in (ROOT / "tests").rglob("*.py"):
        read |= private_reads(ast.parse(file.read_text()))

    listed = {name for names in READ_BY_TESTS.values() for name in names.split()}
    assert read - hooks == listed


def test_a_private_name_is_read_where_nothing_defines_it():
    source = "class A:\n  _b = 1\n  def _c(self): return self._d\nx._b, x._c, x._e, x.f\n"

    assert private_reads(ast.parse(source)) == {"_e"}


def test_every_module_says_what_it_does():
    for name, file in modules(ROOT).items():
        source = file.read_text()
        assert not source.strip() or ast.get_docstring(ast.parse(source)), name


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").glob("*.md")), ROOT / "pyproject.toml"],
    ids=lambda page: page.name,
)
def test_what_pages_and_settings_name_is_there(page):
    named = set(
        re.findall(r"\b(?:envkit|bridges/envkit_bridges)(?:/\w+)+\.pyi?\b", page.read_text())
    )

    assert not {path for path in named if not (ROOT / path).exists()}
