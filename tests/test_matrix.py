"""The core suite is there, its outcomes are counted and shown, and what a root lacks is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import matrix, report


def test_every_part_of_the_core_suite_exists():
    root = Path(__file__).parents[1]

    missing = [part for part in matrix.CORE if not (root / part.removeprefix("--ignore=")).exists()]

    assert not missing


def test_outcomes_are_counted_and_a_test_that_fails_twice_is_one():
    tally = matrix.Tally()
    outcome = {
        "passed": False,
        "skipped": False,
        "failed": False,
        "nodeid": "test_x",
        "when": "call",
    }

    tally.pytest_runtest_logreport(SimpleNamespace(**{**outcome, "passed": True, "when": "setup"}))
    tally.pytest_runtest_logreport(SimpleNamespace(**{**outcome, "passed": True}))
    tally.pytest_runtest_logreport(SimpleNamespace(**{**outcome, "skipped": True, "when": "setup"}))
    tally.pytest_runtest_logreport(SimpleNamespace(**{**outcome, "failed": True}))
    tally.pytest_runtest_logreport(
        SimpleNamespace(**{**outcome, "failed": True, "when": "teardown"})
    )
    tally.pytest_collectreport(SimpleNamespace(failed=True, nodeid="test_file"))

    assert (tally.passed, tally.skipped, tally.failures) == (1, 1, {"test_x", "test_file"})


def test_a_user_without_rights_is_told_what_else_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(
        SystemExit, match=r"run this with sudo\. Or run this module in an environment"
    ):
        matrix.run_in_debian("trixie", tmp_path / "root", [])


def test_a_tool_that_is_missing_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SystemExit, match="apt-get install debootstrap"):
        matrix.run_in_debian("trixie", tmp_path / "root", [])


def test_the_last_line_of_a_python_and_a_choice_of_versions_counts(tmp_path):
    line = {"python": "3.13.5", "versions": {"torch": "2.13.0+cpu"}, "failed": 0, "skipped": 2}
    lines = [
        {**line, "versions_are": "newest", "passed": 3, "date": "2026-01-01T00:00:00"},
        {**line, "versions_are": "newest", "passed": 4, "date": "2026-01-02T00:00:00"},
        {**line, "versions_are": "pinned", "passed": 5, "date": "2026-01-03", "python": "3.9.1"},
    ]
    (tmp_path / "matrix.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))

    head, _, *rows = report.versions_table(tmp_path).splitlines()

    assert head == "| versions | pinned | newest |"
    assert rows[:3] == [
        "| Python | 3.9.1 | 3.13.5 |",
        "| torch | 2.13.0 | 2.13.0 |",
        "| tensordict |  |  |",
    ]
    assert rows[-4:] == [
        "| passed | 5 | 4 |",
        "| failed | 0 | 0 |",
        "| skipped | 2 | 2 |",
        "| tested on | 2026-01-03 | 2026-01-02 |",
    ]


def test_floors_are_the_lowest_versions_that_all_of_pyproject_allows():
    floors = matrix.floors()

    assert len(floors) == len({line.split("==")[0] for line in floors})
    assert "gymnasium==1.2" in floors  # asked for by several extras
    assert "torchrl==0.14.1" in floors  # asked for as >=0.14 and ==0.14.1


def test_an_environment_is_not_written_over(tmp_path):
    with pytest.raises(SystemExit, match="pass another folder"):
        matrix.run_lowest(tmp_path, [])
