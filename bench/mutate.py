"""Change one line of the core at a time, and count how many of the changes the tests notice.

Mutants are made by cosmic-ray's operators: comparisons, arithmetic, ``and``/``or``, ``not``, constants,
``break``/``continue``, decorators, exceptions, loops that run no time. A place in the source gives one
mutant, by an operator that is drawn; what changes annotations or the text of messages alone gives none.
A sample of places, drawn over all modules, estimates the share that is noticed.

Conventions
    killed    a test failed, or ran out of time: tests that hang have noticed too.
    survived  all tests that concern the module passed. The mutant may be equivalent, that is no bug at all:
              those stand in the result with their diff, to be read.

Run: ``make mutate``, or ``python -m bench.mutate [--sample 100] [--seed 0] [--modules rules outputs]``
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins

from bench.harness import record

ROOT = Path(__file__).parents[1]
_LIMIT_S = 600
_COPIED = (
    "pyproject.toml",
    "README.md",
    "envkit",
    "bridges",
    "tests",
    "bench",
    "docs",
    "notebooks",
)
_SAME_BUT_FOR_IDENTITY = {"Eq", "Is"}, {"NotEq", "IsNot"}

ENV = "tests/env/test_partial.py tests/env/test_rollout.py tests/env/test_envbase_calls.py tests/test_programs.py"
ENV += " tests/test_contract.py tests/transforms/test_transformed_env.py tests/transforms/test_episodes.py"
POOLS = "tests/batched/test_serial_parallel.py tests/batched/test_sub_envs.py tests/batched/test_keywords.py"
POOLS += (
    " tests/batched/test_heterogeneous.py tests/batched/test_bad_input.py tests/test_programs.py"
)
JAX = "tests/bridges/jax/test_jax_env.py tests/transforms/test_fused.py tests/bridges/jax/policy/test_unroll.py"
GUARDS: dict[str, str] = {
    "envkit/rules.py": f"tests/test_rules.py {ENV}",
    "envkit/data/transition.py": f"tests/data/test_helpers.py {ENV} {POOLS}",
    "envkit/env/stepping.py": f"tests/env/test_overrides.py {ENV} {POOLS} tests/batched/test_mixed.py",
    "envkit/env/outputs.py": f"tests/env/test_broken_envs.py {ENV}",
    "envkit/env/rollout.py": f"tests/env/test_rollout.py {ENV}",
    "envkit/batched/exchange": f"{POOLS} tests/batched/test_recovery.py",
    "envkit/batched/recovery.py": "tests/batched/test_recovery.py tests/batched/test_faults.py",
    "envkit/functional": f"tests/functional {JAX} tests/bridges/jax/test_reset_modes.py",
    "bridges/dlpack.py": "tests/bridges/test_dlpack.py",
    "bridges/jax/programs.py": f"{JAX} tests/bridges/jax/test_gradients.py tests/bridges/jax/test_sharding.py",
}
"""Modules, or folders of them, and the tests that concern them, those that are likely to notice first."""


@dataclass(frozen=True)
class Mutant:
    """One changed source, and the command that should notice."""

    module: str
    before: str
    after: str
    tests: str

    @property
    def diff(self) -> str:
        """The lines that differ."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:])


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


def mutants_of(module: str, tests: str, draw: random.Random) -> Iterator[Mutant]:
    """Make one mutant of each place of a module that some operator can change.

    Args:
        module: path of the module from the root of the repository.
        tests: what pytest is to run.
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
            yield Mutant(module, before, after, tests)


def all_mutants(names: list[str], draw: random.Random) -> list[Mutant]:
    """Make the mutants of all modules, or of those whose path holds one of ``names``."""
    made: list[Mutant] = []
    for place, tests in GUARDS.items():
        files = sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
        for file in files:
            module = str(file.relative_to(ROOT))
            if not names or any(name in module for name in names):
                made += mutants_of(module, tests, draw)
    return made


def is_killed(mutant: Mutant, folder: Path) -> bool:
    """Run the tests that concern a mutant in a copy of the repository, and say whether one noticed.

    Raises:
        RuntimeError: pytest could not run them.
    """
    file = folder / mutant.module
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
    ]
    file.write_text(mutant.after)
    try:
        done = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(mutant.before)
    if done.returncode not in (
        0,
        1,
        2,
        4,
    ):  # passed, failed, not imported in a test, not in a conftest
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode != 0


def judge(mutants: list[Mutant], workers: int) -> list[Mutant]:
    """Give the mutants that survive, trying ``workers`` of them at a time."""
    survived = []
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(workers) as threads:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(workers):
            folder = Path(place) / str(number)
            for name in _COPIED:
                source = ROOT / name
                copy = shutil.copytree if source.is_dir() else shutil.copy
                folder.mkdir(exist_ok=True)
                copy(source, folder / name)
            folders.put(folder)

        def judged(mutant: Mutant) -> bool:
            folder = folders.get()
            try:
                return is_killed(mutant, folder)
            finally:
                folders.put(folder)

        for mutant, killed in zip(mutants, threads.map(judged, mutants), strict=True):
            print(
                f"{'killed  ' if killed else 'SURVIVED'} {mutant.module}\n{mutant.diff}", flush=True
            )
            if not killed:
                survived.append(mutant)
    return survived


def main() -> None:
    """Draw a sample, judge it and record the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=100, help="how many mutants are tried")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--modules", nargs="*", default=[], help="parts of the paths of modules")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    found = all_mutants(given.modules, draw)
    sample = draw.sample(found, min(given.sample, len(found)))
    survived = judge(sample, given.workers)
    share = 1 - len(survived) / len(sample)
    print(f"\n{share:.0%} of {len(sample)} mutants killed, drawn from {len(found)}")
    record(
        "mutants",
        {
            "seed": given.seed,
            "modules": given.modules or "all",
            "mutants": len(found),
            "tried": len(sample),
            "killed": len(sample) - len(survived),
            "share": round(share, 3),
            "survived": [f"{mutant.module}: {mutant.diff}" for mutant in survived],
        },
    )


if __name__ == "__main__":
    main()
