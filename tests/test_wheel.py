"""What a wheel and an sdist hold, and that the wheel installs and runs away from the repository."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

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


def printed(*command: str | Path, folder: Path, timeout_s: float = 120, **more: str) -> str:
    """Run a command in a folder, without the paths and constraints of this process; give what it prints."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PIP_CONFIG_FILE": os.devnull, **more},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(folder: Path, **more: str) -> list[str]:
    """Run the program in a folder of its own; give what it prints."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    return printed(sys.executable, script, folder=folder, **more).strip().rsplit(maxsplit=2)


@pytest.mark.slow  # starts processes that import everything
def test_a_wheel_runs_in_workers_away_from_the_repository(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "site")

    shape, version, place = ran(tmp_path, PYTHONPATH=str(tmp_path / "site"))

    assert (shape, version) == ("(2, 3)", envkit.__version__)
    assert Path(place).is_relative_to(tmp_path)


@pytest.mark.slow  # the same
def test_an_editable_install_runs_in_workers_of_another_folder(tmp_path):
    assert ran(tmp_path)[0] == "(2, 3)"


EVERY_KIND = """
import sys
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import wrappers

from envkit import BraxEnv, GymEnv, GymWrapper, MixedEnv, ParallelEnv, SerialEnv, check_env_specs

def make():
    env = wrappers.RescaleAction(gymnasium.make("InvertedPendulum-v5", frame_skip=1), -1.0, 1.0)
    return GymWrapper(wrappers.DtypeObservation(env, np.float32))

def brax():
    return BraxEnv("inverted_pendulum", backend="spring", batch_size=[4], device="cpu")

if __name__ == "__main__":
    for env in (
        GymEnv("CartPole-v1"), make(), SerialEnv(2, make), ParallelEnv(2, make), brax(), MixedEnv([brax(), ParallelEnv(2, make)])
    ):
        check_env_specs(env)
        print(type(env).__name__, tuple(env.rollout(3, break_when_any_done=False).batch_size))
        env.close()
    files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
    for place in (*sys.path, *files):
        assert not Path(place).is_relative_to(sys.argv[1]), place
"""


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Install the wheel with ``[brax,gym]`` into an empty venv, without constraints; give the venv.

    All but torch comes from the package index, as pip chooses it. torch is linked from the environment that runs
    the tests, since the one on the index brings gigabytes of CUDA; pip sees it and fetches what it depends on.
    """
    venv = tmp_path_factory.mktemp("venv").resolve()
    printed(sys.executable, "-m", "venv", venv, folder=venv)
    python = venv / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(printed(python, "-c", code, folder=venv).strip())
    of_torch = metadata.distribution("torch")
    for name in {file.parts[0] for file in of_torch.files or ()} - {".."}:
        (site / name).symlink_to(Path(str(of_torch.locate_file(name))).resolve())
    wanted = f"{built[0]}[brax,gym]"
    printed(python, "-m", "pip", "install", "-q", wanted, folder=venv, timeout_s=600)
    return venv


from_the_index = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="torch is a CUDA build here: pip would fetch its libraries, gigabytes of them",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@from_the_index
def test_a_wheel_that_pip_installs_rolls_out_envs_of_each_kind(installed, tmp_path):
    script = tmp_path / "every_kind.py"
    script.write_text(EVERY_KIND)

    python = installed / "bin" / "python"
    shown = printed(python, script, ROOT, folder=tmp_path, timeout_s=600)

    assert shown.splitlines() == [
        "GymEnv (3,)",
        "GymWrapper (3,)",
        "SerialEnv (2, 3)",
        "ParallelEnv (2, 3)",
        "BraxEnv (4, 3)",
        "MixedEnv (6, 3)",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@from_the_index
def test_the_doctor_finds_what_pip_installs_sound(installed, tmp_path):
    shown = printed(installed / "bin" / "envkit", "doctor", folder=tmp_path, timeout_s=300)

    assert "broken" not in shown
    assert "ok     library brax" in shown and "ok     library gym:" in shown
    assert re.search(
        r" mujoco ([\d.]+), mujoco-mjx \1,", shown
    )  # there is no mujoco-mjx 4 beside MuJoCo 4


@pytest.mark.parametrize(
    "named", [b"bridges.gym.env\nGymEnv", b"envkit.specs.leaves.categorical\nCategorical"]
)
def test_a_pickle_of_an_older_version_says_which_one_reads_it(named):
    with pytest.raises(ModuleNotFoundError, match=r"with envkit 0\.1\.0"):
        pickle.loads(b"c" + named + b"\n.")


def test_a_name_that_is_misspelt_is_told_as_ever():
    with pytest.raises(ImportError, match="cannot import name 'GimEnv'"):
        exec("from envkit import GimEnv")
