"""The command line: what each command prints, and what a mistake costs."""

import subprocess
import sys

import pytest
import torch

import envkit
from envkit.cli import doctor
from envkit.cli.app import main


@pytest.fixture
def run(capfd):
    """Run a command in this process; gives its exit status and what it printed."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        return status, *capfd.readouterr()

    return call


def test_help_names_every_command_and_loads_neither_torch_nor_jax():
    code = (
        "import sys\nfrom envkit.cli.app import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'jax', 'gymnasium'} & set(sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    for command in ("doctor", "list", "info", "rollout", "bench", "demo", "--version"):
        assert command in done.stdout


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"envkit {envkit.__version__}\n", "")


def test_ids_are_listed_one_a_line(run):
    status, printed, _ = run("list", "cartpole", "--world", "gym")

    assert status == 0
    assert printed.split() == list(envkit.list_envs("cartpole", world="gym"))


@pytest.mark.slow
def test_worlds_are_a_table(run):
    status, printed, _ = run("list", "--worlds")

    assert status == 0
    assert all(world.name in printed for world in envkit.worlds())


def test_an_env_is_described_with_its_entries_and_its_speed(run):
    status, printed, _ = run("info", "gym/CartPole-v1", "--seconds", "0.01")

    assert status == 0
    assert "GymEnv('CartPole-v1'" in printed
    for entry in ("observation", "action", "reward", "truncated", "float32", "OneHot"):
        assert entry in printed
    assert "steps a second" in printed


def test_a_rollout_says_what_it_returned_and_is_written(run, tmp_path):
    file = tmp_path / "data.parquet"

    status, printed, _ = run(
        "rollout", "gym/CartPole-v1", "--steps", "60", "--seed", "1", "--out", str(file)
    )

    torch.manual_seed(1)
    env = envkit.make("gym/CartPole-v1", seed=1)
    env.reset()
    data = env.rollout(60, break_when_any_done=False)
    stats = envkit.episode_stats(data)
    returns = stats.returns[stats.ended]
    assert status == 0
    assert f"{len(returns)} episodes ended: mean return {returns.mean():.2f}" in printed
    back = envkit.from_parquet(file)
    assert (back["next", "observation"].reshape(-1, 4) == data["next", "observation"]).all()


@pytest.mark.parametrize("name", ["walk.gif", "walk.mp4"])
def test_a_rollout_is_drawn(run, tmp_path, name):
    file = tmp_path / name

    status, printed, _ = run(
        "rollout", "gym/CartPole-v1", "--num-envs", "1", "--steps", "3", "--video", str(file)
    )

    assert status == 0 and f"wrote {file}" in printed
    assert file.stat().st_size > 0


def test_an_episode_that_does_not_end_is_told_as_reward_a_step(run):
    status, printed, _ = run("rollout", "gym/Pendulum-v1", "--steps", "5")

    assert status == 0
    assert "no episode ended" in printed and "reward a step" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("rollout", "gym/CartPol-v1"), "'CartPole-v1'"),
        (("info", "no such thing"), "list_envs"),
        (("rollout", "gym/CartPole-v1", "--out", "data.csv"), ".parquet"),
        (("list", "--world", "bra"), "'brax'"),
        (("bench", "chess"), "cartpole, brax"),
        (("rollout", "gym/CartPole-v1", "--steps", "0"), "--steps"),
        (("rollout", "gym/CartPole-v1", "--out", "/no/such/folder/x.parquet", "--steps", "3"), "/no/such/folder"),
        (("nonsense",), "nonsense"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_status_2_and_no_traceback(run, arguments, told):
    status, _, errors = run(*arguments)

    assert status == 2
    assert told in errors and "Traceback" not in errors
    if errors.startswith("envkit:"):
        assert errors.count("\n") == 1


def test_where_a_mistake_was_found_is_shown_when_asked_for(run):
    with pytest.raises(envkit.errors.ArgumentError):
        run("--traceback", "rollout", "gym/CartPol-v1")


@pytest.mark.slow
def test_a_bench_prints_ratios_to_the_bare_simulator(run):
    status, printed, _ = run("bench", "cartpole", "--seconds", "0.1")

    assert status == 0
    for name in ("bare loop", "envkit ParallelEnv", "gymnasium AsyncVectorEnv"):
        assert name in printed


# ---------------------------------------------------------------------------------------- doctor


@pytest.mark.slow
def test_the_doctor_finds_a_sound_machine_sound(run):
    status, printed, _ = run("doctor")

    assert status == 0
    for what in (
        "Python",
        "versions",
        "torch",
        "JAX",
        "shared memory",
        "worker processes",
        "world gym",
    ):
        assert what in printed
    assert "broken" not in printed


def test_what_is_broken_is_told_with_its_cure_and_status_1(run, monkeypatch):
    versions = {
        "dm-control": "1.0.50",
        "mujoco": "4.0.1",
        "mujoco-mjx": "3.17.0",
        "torch": "2.13.0",
    }
    monkeypatch.setattr(doctor, "_version_of", versions.get)
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._versions, doctor._unequal_mujocos))

    status, printed, _ = run("doctor")

    assert status == 1
    assert "dm-control 1.0.50 with mujoco 4.0.1" in printed and "pip install 'mujoco<4'" in printed
    assert "they belong together" in printed


def test_a_library_that_crashes_its_process_does_not_crash_the_doctor():
    works, told = doctor._tried("import os, signal; os.kill(os.getpid(), signal.SIGILL)")

    assert not works and "signal 4" in told


def test_little_shared_memory_is_broken_and_names_the_option_of_docker(monkeypatch):
    monkeypatch.setattr(doctor, "_LEAST_SHARED_MIB", 10**9)

    (finding,) = doctor._memory()

    assert finding.state == "broken" and "--shm-size" in finding.cure
