"""A GPU day goes on where it was cut, marks what is rehearsed, and tells rollouts that do not agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from bench import gpu_day, gpu_parity, harness, report
from bench.gpu_day import Day, Part

ROOT = Path(__file__).parents[1]


def saying(text: str, *, code: int = 0, limit_s: float = 60) -> Part:
    return Part(("-c", f"print({text!r}); raise SystemExit({code})"), limit_s)


ENDLESS = Part(("-c", "print('begun', flush=True); import time; time.sleep(600)"), 1.0)


def log_of(folder: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, (folder / gpu_day.LOG).read_text().splitlines())
    return [(line["part"], line.get("outcome", line["event"])) for line in lines]


# ------------------------------------------------------------------------------------- the plan


def test_the_parts_fit_into_calls_and_calls_into_a_day():
    limits = [part.limit_s for part in gpu_day.PARTS.values()]

    calls, left = 0, 0.0
    for limit in limits:
        if limit > left:
            calls, left = calls + 1, gpu_day.CALL_S
        left -= limit

    assert max(limits) <= gpu_day.CALL_S == 540
    assert sum(limits) + calls * gpu_day.START_S <= gpu_day.DAY_S == 1500


def test_every_file_with_a_gpu_test_is_in_a_part_once():
    files = gpu_day.marked_files("envs") + gpu_day.marked_files("transforms")
    command = ["git", "grep", "-lE", r"mark\.gpu\b", "--", "tests/**/test_*.py", "tests/test_*.py"]
    marked = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)

    assert sorted(files) == sorted(set(marked.stdout.split()))


# --------------------------------------------------------------------------------- what was cut


def test_a_new_machine_goes_on_where_the_log_ends(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    parts = {"one": saying("1"), "two": saying("2")}
    Day(first, parts={"one": parts["one"]}).run()
    day = Day(second, parts=parts)

    day.take(first)
    has_passed = day.run()

    assert has_passed
    assert log_of(second) == [
        ("one", "begin"),
        ("one", "passed"),
        ("two", "begin"),
        ("two", "passed"),
    ]
    assert (second / gpu_day.OUTPUT).read_text() == "[one] 1\n[two] 2\n"


def test_a_part_that_runs_past_its_limit_twice_is_given_up(tmp_path):
    day = Day(tmp_path, parts={"endless": ENDLESS, "other": saying("done")})

    outcomes = [(day.run(), day.outcome("endless"), day.outcome("other")) for _ in range(3)]

    assert outcomes == [
        (False, "cut", "passed"),
        (False, "given up", "passed"),
        (False, "given up", "passed"),
    ]
    assert len(log_of(tmp_path)) == 6  # the third call ran nothing
    assert "begun" in (tmp_path / gpu_day.REPORT).read_text()


def test_a_part_whose_call_was_killed_counts_as_cut(tmp_path):
    day = Day(tmp_path, parts={"one": saying("1")})
    day._log("one", "begin", **harness.machine())

    assert day.outcome("one") == "cut"
    assert day.run()
    assert day.outcome("one") == "passed"


def test_a_part_is_not_begun_in_a_call_that_has_no_time_for_it(tmp_path, capsys):
    day = Day(tmp_path, parts={"long": saying("1", limit_s=gpu_day.CALL_S + 1)})

    assert not day.run()
    assert day.outcome("long") == "" and "call again" in capsys.readouterr().out


def test_a_part_that_failed_is_reported_and_run_again_only_by_name(tmp_path):
    day = Day(tmp_path, parts={"bad": saying("oh no", code=3)})

    assert not day.run()
    assert not day.run()
    once = len(log_of(tmp_path))
    day.run(["bad"])

    assert (once, len(log_of(tmp_path))) == (2, 4)
    shown = (tmp_path / gpu_day.REPORT).read_text()
    assert "| bad | failed |" in shown and "oh no" in shown.partition("## Last lines of bad")[2]


@pytest.mark.parametrize("mark", [False, True])
def test_a_rehearsal_and_a_day_do_not_continue_each_other(tmp_path, mark):
    Day(tmp_path, rehearsal=mark, parts={"one": saying("1")}).run()

    with pytest.raises(SystemExit, match="not continued as the other"):
        Day(tmp_path, rehearsal=not mark).take(tmp_path)
    with pytest.raises(SystemExit, match="pass the folder that an earlier call wrote"):
        Day(tmp_path).take(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------ the marks

RECORDING = """
from bench.harness import record
record("work", {"reference": "a", "works": [{"work": "a", "steps_per_s": 1.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}]})
"""


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("mark", [False, True])
def test_lines_go_to_the_folder_and_the_report_of_speeds_reads_no_rehearsal(tmp_path, mark):
    before = {file: file.stat().st_size for file in harness.RESULTS.iterdir()}
    variables = {"PYTHONPATH": harness.python_path(ROOT)}
    variables |= {harness.REHEARSAL: "1"} if mark else {}
    parts = {"one": Part(("-c", RECORDING), 60)}

    has_passed = Day(tmp_path, variables=variables, rehearsal=mark, parts=parts).run()

    assert has_passed
    assert {file: file.stat().st_size for file in harness.RESULTS.iterdir()} == before
    assert len(report.read(tmp_path)) == (0 if mark else 1)
    (line,) = (tmp_path / "bench.jsonl").read_text().splitlines()
    assert json.loads(line).get("rehearsal", False) == mark


def test_a_rehearsal_marks_every_line(tmp_path):
    parts = {"one": saying("1\n\n2"), "bad": saying("oh no", code=3)}

    Day(tmp_path, rehearsal=True, parts=parts).run()

    files = [gpu_day.LOG, gpu_day.OUTPUT, gpu_day.REPORT]
    assert sorted(os.listdir(tmp_path)) == sorted(files)
    for file in files:
        assert all("rehearsal" in line for line in (tmp_path / file).read_text().splitlines())


# --------------------------------------------------------------------------------- what travels


def test_wheels_and_tree_that_are_too_large_are_named(tmp_path):
    (tmp_path / "small-1.whl").write_bytes(b"1" * 10)
    (tmp_path / "large-1.whl").write_bytes(b"1" * (1 << 20))
    tree = tmp_path / "code.py"
    tree.write_bytes(b"1" * (1 << 19))

    gpu_day.check_size(tmp_path, [tree], limit_bytes=2 << 20)
    with pytest.raises(SystemExit, match=r"1\.0 MiB and the working tree 0\.5 MiB.*large-1\.whl"):
        gpu_day.check_size(tmp_path, [tree], limit_bytes=1 << 20)
    with pytest.raises(SystemExit, match="pass an empty folder"):
        gpu_day.gather(tmp_path)


def test_a_rehearsal_has_the_packages_of_the_machine_and_no_others():
    names = ("torch", "tensordict", "brax", "ray", "torchrl")
    code = f"from importlib.util import find_spec; print([find_spec(one) is not None for one in {names}])"

    with gpu_day.environment_like_the_machine() as python:
        done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, env={})

    assert done.stdout.strip() == "[True, True, True, False, False]"


def test_without_a_gpu_a_day_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    variables = {**os.environ, "PYTHONPATH": harness.python_path(ROOT)}
    command = [sys.executable, "-m", "bench.gpu_day"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)

    assert done.returncode == 1 and "pass --rehearse" in done.stderr


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_part(tmp_path):
    variables = {**os.environ, "PYTHONPATH": harness.python_path(ROOT)}
    command = [sys.executable, "-m", "bench.gpu_day", "--rehearse", "--into", str(tmp_path)]
    for _ in range(2):  # a slow machine needs a second call
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)

    shown = (tmp_path / gpu_day.REPORT).read_text()
    assert done.returncode == 0, shown
    assert re.findall(r"\| ([\w-]+) \| (?:passed) \|", shown) == list(gpu_day.PARTS)
    assert shown.count("| 0 | yes |") == len(gpu_parity.COMPARISONS)
    assert len(os.listdir(tmp_path)) <= 8  # as many files as come back
    assert report.read(tmp_path) == []


# ---------------------------------------------------------------------------------------- parity


def test_rollouts_that_are_apart_do_not_agree():
    there = TensorDict(
        {
            "observation": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "done": torch.tensor([[False, False], [False, True]]),
            "empty": torch.zeros(2, 2, 0),
        },
        [2, 2],
    )
    moved, parted, lost = there.clone(), there.clone(), there.clone()
    moved["observation"][0, 1] += 0.3
    parted["done"][1, 0] = True
    parted["observation"][1] = 100.0
    lost["observation"][0, 0] = float("nan")

    assert gpu_parity.compared(there.clone(), there) == {"difference": 0.0, "parted": 0}
    found = gpu_parity.compared(moved, there)
    assert found == {"difference": pytest.approx(0.1), "parted": 0}
    assert gpu_parity.compared(parted, there) == {"difference": 0.0, "parted": 1}
    assert not gpu_parity.compared(lost, there)["difference"] <= 1e9
    with pytest.raises(SystemExit, match="rollouts record"):
        gpu_parity.compared(there.exclude("done"), there)
