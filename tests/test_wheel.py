"""What a wheel and an sdist hold, and that it runs away from the repository."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import envkit

ROOT = Path(__file__).parents[1]

PROGRAM = """
import envkit_bridges
from envkit import GymEnv, ParallelEnv, __version__

def make():
    return GymEnv("CartPole-v1")

if __name__ == "__main__":
    with ParallelEnv(2, make) as env:
        print(tuple(env.rollout(3).batch_size), __version__, envkit_bridges.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Give a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "wheel"]
    subprocess.run(
        [*command, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True, timeout=120
    )
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def tracked(*folders: str) -> set[str]:
    """List the files of the repository, which a clone has."""
    found = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(found.stdout.split())


def test_a_wheel_holds_our_two_packages_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}

    own = tracked("envkit", "bridges")
    assert held == {name.removeprefix("bridges/") for name in own}
    assert {name.partition("/")[0] for name in held} == {"envkit", "envkit_bridges"}


def test_an_sdist_holds_what_a_clone_has(built):
    with tarfile.open(built[1]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}

    assert held - {"PKG-INFO"} == tracked() & held
    assert held >= tracked("envkit", "bridges", "tests", "pyproject.toml", "README.md", "LICENSE")


def ran(folder: Path, **more: str) -> list[str]:
    """Run the program in a folder of its own; give what it prints."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**kept, **more},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rsplit(maxsplit=2)


def test_a_wheel_runs_in_workers_away_from_the_repository(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "site")

    shape, version, place = ran(tmp_path, PYTHONPATH=str(tmp_path / "site"))

    assert (shape, version) == ("(2, 3)", envkit.__version__)
    assert Path(place).is_relative_to(tmp_path)


def test_an_editable_install_runs_in_workers_of_another_folder(tmp_path):
    assert ran(tmp_path)[0] == "(2, 3)"


@pytest.mark.parametrize(
    "named", [b"bridges.gym.env\nGymEnv", b"envkit.specs.leaves.categorical\nCategorical"]
)
def test_a_pickle_of_an_older_version_says_which_one_reads_it(named):
    with pytest.raises(ModuleNotFoundError, match=r"with envkit 0\.1\.0"):
        pickle.loads(b"c" + named + b"\n.")


def test_a_name_that_is_misspelt_is_told_as_ever():
    with pytest.raises(ImportError, match="cannot import name 'GimEnv'"):
        exec("from envkit import GimEnv")
