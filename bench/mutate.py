"""Change one line of the core at a time, and count how many of the changes the tests notice.

Mutants are those of ``bench/mutants.py``; a sample of places, drawn over all modules, estimates the share
that is noticed. A survey first runs each file of tests once and writes to ``.cache/mutate`` how long each test
takes and which lines of the core it runs. A mutant is then shown to the tests that run its statement, the
quickest first, until one fails or their budget is spent: a larger budget finds more. Tests run in children
forked from a process that has imported the libraries, each over a copy of the repository.

Conventions
    killed      a test failed, or ran out of time: tests that hang have noticed too.
    survived    all tests of the plan passed. To be read: a gap in the tests, a line that does nothing, or
    equivalent  no bug at all, and listed as such: counted apart.

Run: ``make mutate``, or ``python -m bench.mutate [--sample 150] [--seed 0] [--modules rules outputs]``
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from bench.harness import record
from bench.mutants import ROOT, Mutant, mark_of, mutants_of, reasons

T = TypeVar("T")
MODULES = (
    "envkit/rules.py",
    "envkit/data/transition.py",
    "envkit/env/stepping.py",
    "envkit/env/outputs.py",
    "envkit/env/rollout.py",
    "envkit/env/on_row.py",
    "envkit/env/tickets.py",
    "envkit/batched/exchange",
    "envkit/batched/bound_envs.py",
    "envkit/batched/recovery.py",
    "envkit/functional",
    "bridges/envkit_bridges/dlpack.py",
    "bridges/envkit_bridges/jax/engine.py",
    "bridges/envkit_bridges/jax/programs.py",
)
"""Modules, or folders of them, that are changed."""

TRACED = ("envkit/rules.py", "envkit/functional", "bridges/envkit_bridges/jax")
"""Run once to make a program of them, by the first test of a file; its others hang on them too."""

TESTS = ("test_rules.py", "data", "env", "functional", "bridges/test_dlpack.py", "test_programs.py")
TESTS += ("batched", "bridges/jax", "test_contract.py", "test_every_way.py", "reference/envs")
TESTS += ("bridges/gym/test_gym_recording.py", "transforms/test_stacked_rows.py")
TESTS += ("transforms/test_transformed_env.py", "transforms/test_episodes.py")
TESTS += ("transforms/test_contract.py",)
TESTS += ("transforms/test_autoreset.py", "transforms/test_programs.py")
"""Files of tests, or folders of them, that may notice."""

LEFT_OUT = ("gpu", "stress", "growth", "surroundings", "threads", "compile", "inference")
LEFT_OUT += ("policy/test_ops", "policy/test_net", "policy/test_mod", "policy/test_page")
"""Parts of the names of those that take long, or follow no function, and notice little that others do not."""

_PACKAGES = ("envkit", "bridges", "tests", "bench")
_COPIED = (*_PACKAGES, "docs", "notebooks", "README.md", "pyproject.toml")
_LIBRARIES = ("torch", "tensordict", "jax", "jax.export", "brax.envs", "gymnasium", "hypothesis")
_LIBRARIES += ("hypothesis.extra.numpy", "psutil", "cloudpickle", "pytest_timeout")
_LIBRARIES += ("pytest.__main__",)
_SURVEY = ROOT / ".cache" / "mutate"
_FIRST = 20  # tests that are tried before the others are looked for
_LIMIT_S = 600  # of a child
_BROKEN = 70  # a child that did not come to run pytest
_NOTICED = {1, 2, 4}  # pytest: a test failed; could not be imported in a test; in a conftest
_OPTIONS = ("-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", "60")
_OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins came before the fork


class Surveyor:
    """A pytest plugin that notes for each test its seconds, its outcome and the lines of the core it runs."""

    def __init__(self, folder: Path, modules: Iterable[str]):
        self.tests: dict[str, dict] = {}
        self._modules = {str(folder / module): module for module in modules}
        self._marks = {
            module: [mark_of(line) for line in (folder / module).read_text().splitlines()]
            for module in modules
        }
        self._lines: dict[str, set[int]] = {}
        self._passed = True

    def trace(self, frame, event, arg):
        """Follow the functions of the modules of the core, see ``sys.settrace``."""
        module = self._modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self._lines.setdefault(module, set())

        def line(frame, event, arg):
            lines.add(frame.f_lineno)
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._lines, self._passed, start = {}, True, time.perf_counter()
        result = yield
        seconds = round(time.perf_counter() - start, 3)
        lines = {
            module: sorted({self._marks[module][number - 1] for number in found if number})
            for module, found in self._lines.items()
        }
        self.tests[item.nodeid] = {"seconds": seconds, "passed": self._passed, "lines": lines}
        return result

    def pytest_runtest_logreport(self, report):
        self._passed &= report.passed


class Plan:
    """A pytest plugin that runs the tests of a list, in its order, and names the first that fails."""

    def __init__(self, tests: list[str], folder: Path):
        self._order = {test: place for place, test in enumerate(tests)}
        self._folder = folder

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        planned = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(planned, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            (self._folder / "noticed").write_text(report.nodeid)


def files_below(names: Iterable[str]) -> list[str]:
    """List files, and those in folders, by path from the root of the repository."""
    files: list[Path] = []
    for name in names:
        files += sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name]
    return [str(file.relative_to(ROOT)) for file in files]


def in_children(
    items: Iterable[T], work: Callable[[T, Path], int], workers: int
) -> Iterator[tuple[T, int, Path]]:
    """Do work for each item in a forked child, ``workers`` at a time, each in a copy of the repository.

    Args:
        items: what is worked on, one child each.
        work: gets the item and the folder of the copy; gives the exit code.
        workers: how many children run at a time.

    Yields:
        An item, what its child ended with (negative: the signal that killed it), and the folder, which
        the next child gets when the caller goes on.
    """
    for library in _LIBRARIES:
        importlib.import_module(library)
    running: dict[int, tuple[T, Path, float]] = {}
    waiting = iter(items)
    with tempfile.TemporaryDirectory() as place:
        free = [_copy_of_repository(Path(place) / str(number)) for number in range(workers)]
        while True:
            while free and (item := next(waiting, None)) is not None:
                folder = free.pop()
                running[_fork(work, item, folder)] = item, folder, time.monotonic() + _LIMIT_S
            if not running:
                return
            time.sleep(0.1)
            for pid, (item, folder, deadline) in list(running.items()):
                if time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del running[pid]
                    yield item, os.waitstatus_to_exitcode(status), folder
                    free.append(folder)


def _copy_of_repository(folder: Path) -> Path:
    folder.mkdir()
    for name in _COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def _fork(work: Callable[[T, Path], int], item: T, folder: Path) -> int:
    """Start a child that is to the work what ``python -m pytest`` in ``folder`` would be; give its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = _BROKEN
    try:
        os.setsid()
        with (folder / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(folder)
        own = [str(folder), str(folder / "bridges")]
        os.environ["PYTHONPATH"] = os.pathsep.join(own)
        sys.path[:] = [*own, *(entry for entry in sys.path if Path(entry) != ROOT)]
        for name in [
            name for name in sys.modules if name.partition(".")[0] in (*_PACKAGES, "envkit_bridges")
        ]:
            del sys.modules[name]
        sys.modules["__main__"] = sys.modules["pytest.__main__"]  # what spawned processes look at
        code = work(item, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def survey(workers: int) -> dict[str, dict]:
    """Give what is known of the tests, by their ids; run those files that changed since they were surveyed."""
    modules = files_below(MODULES)
    files = [
        file
        for file in files_below(f"tests/{name}" for name in TESTS)
        if "/test_" in file and not any(part in file for part in LEFT_OUT)
    ]

    def work(file: str, folder: Path) -> int:
        surveyor = Surveyor(folder, modules)
        threading.settrace(surveyor.trace)
        sys.settrace(surveyor.trace)
        pytest.main([*_OPTIONS, file], plugins=[surveyor])
        sys.settrace(None)
        noted = _noted(file)
        noted.with_suffix(".part").write_text(json.dumps(surveyor.tests))
        noted.with_suffix(".part").rename(noted)
        return 0

    _SURVEY.mkdir(parents=True, exist_ok=True)
    old = [file for file in files if not _noted(file).exists()]
    old += [
        f for f in files if f not in old and _noted(f).stat().st_mtime < (ROOT / f).stat().st_mtime
    ]
    for file, code, folder in in_children(old, work, workers) if old else ():
        print(f"surveyed {file}" if not code else (folder / "output").read_text(), flush=True)
    tests: dict[str, dict] = {}
    for file in files:
        tests |= json.loads(_noted(file).read_text()) if _noted(file).exists() else {}
    return {name: test for name, test in tests.items() if test["passed"]}


def _noted(file: str) -> Path:
    return _SURVEY / (file.replace("/", ".") + ".json")


def plan(mutant: Mutant, tests: dict[str, dict], budget_s: float) -> list[str]:
    """Choose tests for a mutant: those that run its statement, the quickest first, while the budget lasts.

    The budget is of seconds as the survey took them. Files of tests that are called like the module come first.

    A statement that runs at import alone concerns all tests that run the module.
    """
    lines = mutant.lines
    running = [
        name for name, test in tests.items() if lines & set(test["lines"].get(mutant.module, ()))
    ]
    running = running or [name for name, test in tests.items() if mutant.module in test["lines"]]
    own = f"test_{Path(mutant.module).stem}.py"
    running.sort(key=lambda name: (own not in name, tests[name]["seconds"]))
    if mutant.module.startswith(TRACED):
        files = {name.partition("::")[0] for name in running}
        beside = [name for name in tests if name.partition("::")[0] in files]
        running += sorted(set(beside) - set(running), key=lambda name: tests[name]["seconds"])
    chosen, seconds = [], 0.0
    for name in running:
        seconds += tests[name]["seconds"]
        if chosen and seconds > budget_s:
            break
        chosen.append(name)
    return chosen


def judge(
    mutants: list[Mutant], tests: dict[str, dict], workers: int, budget_s: float
) -> list[Mutant]:
    """Give the mutants that survive. What a test noticed counts if it passes where nothing is changed."""
    survived: list[Mutant] = []
    while mutants:
        noticed: dict[str, list[Mutant]] = {}
        for mutant, by in tried(mutants, tests, workers, budget_s):
            verdict = "killed  " if by else "SURVIVED"
            print(f"{verdict} {mutant.module} {by}\n{mutant.diff}", flush=True)
            survived += [] if by else [mutant]
            noticed.setdefault(by, []).append(mutant)
        failing = failing_unchanged(noticed.keys() & tests.keys())
        print(*(f"fails by itself: {name}" for name in failing), sep="\n", flush=True)
        tests = {name: test for name, test in tests.items() if name not in failing}
        mutants = [mutant for name in failing for mutant in noticed[name]]
    return survived


def tried(
    mutants: list[Mutant], tests: dict[str, dict], workers: int, budget_s: float
) -> Iterator[tuple[Mutant, str]]:
    """Give each mutant with the test that noticed it, or an empty string."""
    plans = {id(mutant): plan(mutant, tests, budget_s) for mutant in mutants}

    def work(mutant: Mutant, folder: Path) -> int:
        _write(folder / mutant.module, mutant.after)
        names, code = plans[id(mutant)], 0
        for part in (names[:_FIRST], names[_FIRST:]):  # most need not have all files imported
            code = code or _run(part, ["-x"], Plan(part, folder))
        return code

    for mutant, code, folder in in_children(mutants, work, workers):
        _write(folder / mutant.module, mutant.before)
        noticed = folder / "noticed"
        by = noticed.read_text() if noticed.exists() else f"ended with {code}" if code else ""
        noticed.unlink(missing_ok=True)
        if code > 0 and code not in _NOTICED:
            raise RuntimeError(f"pytest ended with {code}:\n{(folder / 'output').read_text()}")
        yield mutant, by


def failing_unchanged(names: Iterable[str]) -> list[str]:
    """Give those of some tests that fail where nothing is changed."""
    names = sorted(names)

    def work(names: list[str], folder: Path) -> int:
        seen = Surveyor(folder, ())
        _run(names, [], Plan(names, folder), seen)
        passed = [name for name, test in seen.tests.items() if test["passed"]]
        (folder / "passed").write_text(json.dumps(passed))
        return 0

    for _, _, folder in in_children([names], work, 1):
        return sorted(set(names) - set(json.loads((folder / "passed").read_text())))
    return []


def _run(names: list[str], options: list[str], *plugins: object) -> int:
    """Run tests in this process, and give what pytest ends with; 0 if there are none."""
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return int(pytest.main([*_OPTIONS, *options, *files], plugins=plugins)) if files else 0


def _write(file: Path, source: str) -> None:
    """Write a module; what was compiled of it counts as fresh within the same second, so it goes."""
    file.write_text(source)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def main() -> None:
    """Draw a sample, judge it and record the share that was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=150, help="how many mutants are tried")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--modules", nargs="*", default=[""], help="parts of the paths of modules")
    parser.add_argument(
        "--budget", type=float, default=60, help="seconds of tests a mutant is shown"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    tests = survey(options.workers)
    draw = random.Random(options.seed)
    modules = [
        name for name in files_below(MODULES) if any(part in name for part in options.modules)
    ]
    mutants = [mutant for module in modules for mutant in mutants_of(module, draw)]
    sample = draw.sample(mutants, min(options.sample, len(mutants)))
    known = reasons()
    equivalent = [m for m in sample if m.change in known.get(m.module, ())]
    survived = judge(
        [m for m in sample if m not in equivalent], tests, options.workers, options.budget
    )
    killed = len(sample) - len(equivalent) - len(survived)
    share = killed / max(1, len(sample) - len(equivalent))
    print(
        f"\n{share:.1%} killed: {killed} of {len(sample)} mutants drawn from {len(mutants)},",
        end=" ",
    )
    print(f"{len(survived)} survived, {len(equivalent)} are known to be equivalent")
    record(
        "mutants",
        {
            "seed": options.seed,
            "budget_s": options.budget,
            "modules": modules,
            "mutants": len(mutants),
            "sample": len(sample),
            "killed": killed,
            "share": round(share, 3),
            "survived": [f"{mutant.module}: {mutant.diff}" for mutant in survived],
            "equivalent": [f"{mutant.module}: {mutant.change}" for mutant in equivalent],
        },
    )


if __name__ == "__main__":
    main()
