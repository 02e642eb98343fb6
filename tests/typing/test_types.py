"""What pyright and mypy see of envkit in a user's script: no error in a right one, each mistake in a wrong one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from envkit.specs import annotations

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPTS = ("user.py", "mistakes.py")

pytestmark = pytest.mark.timeout(400)  # without their caches, checkers read all of torch and JAX

Errors = dict[tuple[str, int], str]


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert done.returncode == 1, done.stdout + done.stderr  # they ran, and found mistakes
    return done.stdout


@cache
def mypy() -> Errors:
    """Run mypy over both scripts; its errors by script and line."""
    scripts = [str((HERE / script).relative_to(ROOT)) for script in SCRIPTS]
    out = output_of([sys.executable, "-m", "mypy", *scripts])
    found = re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: (.*)$", out, re.MULTILINE)
    return {(script, int(line)): message for script, line, message in found}


@cache
def pyright() -> Errors:
    """Run pyright over both scripts; its errors by script and line."""
    where = ["--project", str(HERE), "--pythonpath", sys.executable]
    report = json.loads(output_of([sys.executable, "-m", "pyright", *where, "--outputjson"]))
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"]
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    }


CHECKERS = pytest.mark.parametrize(
    "checker",
    [pytest.param(run, id=run.__name__, marks=pytest.mark.slow) for run in (mypy, pyright)],
)


@CHECKERS
def test_a_checker_finds_the_types_that_a_users_script_says_and_no_error_in_it(
    checker: Callable[[], Errors],
):
    errors = checker()

    assert {at: message for at, message in errors.items() if at[0] == "user.py"} == {}


@CHECKERS
def test_a_checker_finds_each_planted_mistake_on_its_line_and_no_other(
    checker: Callable[[], Errors],
):
    lines = (HERE / "mistakes.py").read_text().splitlines()
    planted = {
        number: line.strip() for number, line in enumerate(lines, 1) if "# mistake: " in line
    }

    lines_found = {line for script, line in checker() if script == "mistakes.py"}

    assert len(planted) > 20
    assert [planted[number] for number in planted if number not in lines_found] == []
    assert sorted(lines_found - planted.keys()) == []


def test_what_marks_a_tensor_for_checkers_no_tensordict_has():
    source = Path(annotations.__file__).read_text()
    names = re.findall(r"^        (\w+): None$", source, re.MULTILINE)
    data = TensorDict({"x": torch.zeros(2)}, [2])

    assert len(names) > 10
    assert [name for name in names if hasattr(data, name)] == []
    assert [name for name in names if not hasattr(torch.zeros(2), name)] == []
