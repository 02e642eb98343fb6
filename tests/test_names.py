"""The distribution name stands in one constant, and no text sends people to another project's package."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from envkit.cli import doctor
from envkit.installing import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pyproject_and_its_extras_use_the_distribution_name():
    wanted = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    own = [one.partition("[")[0] for one in wanted if "envkit" in one]

    assert PROJECT["name"] == DISTRIBUTION != "envkit"
    assert own and set(own) == {DISTRIBUTION}


def test_the_command_that_adds_extras_names_extras_that_exist():
    assert install_command("brax", "gym") == "pip install -e '.[brax,gym]'"
    assert {"brax", "gym", "viz"} <= PROJECT["optional-dependencies"].keys()


def test_no_text_says_to_install_the_stranger_called_envkit():
    files = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("notebooks/*.ipynb")]
    for folder, kind in (
        ("envkit", "*.py"),
        ("bridges", "*.py"),
        ("docs", "*.md"),
        ("bench", "*.py"),
    ):
        files += (ROOT / folder).rglob(kind)

    lines = [
        f"{file.name}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if re.search(r"\benvkit\[|(?<!un)install (-\S+ )*'?envkit\b(?!-)", line)
        and "Do not run" not in line
    ]

    assert not lines


@pytest.mark.parametrize("stranger", [None, "0.7.1"])
def test_the_doctor_reports_the_stranger_called_envkit(monkeypatch, stranger):
    installed = {"envkit": stranger, DISTRIBUTION: "0.1.0"}

    def version(name: str) -> str:
        if found := installed.get(name):
            return found
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", version)

    broken = [finding for finding in doctor._versions() if finding.state == "broken"]

    assert [finding.report.partition(" is installed")[0] for finding in broken] == (
        ["the distribution 'envkit' 0.7.1"] if stranger else []
    )
    assert all(finding.fix.startswith("pip uninstall envkit") for finding in broken)
