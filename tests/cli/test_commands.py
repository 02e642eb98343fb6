"""The command line: what each command prints, and what a mistake costs."""

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import envkit
from envkit.cli import app, bench, doctor
from envkit.cli.app import main

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("command", ["doctor", "list", "info", "rollout", "bench", "demo"])
def test_the_help_of_a_command_shows_how_it_is_called(run, command):
    status, printed, _ = run(command, "--help")

    assert status == 0
    assert f"Usage: envkit {command}" in printed and "Example" in printed
    assert printed.count(f"envkit {command}") >= 2


def test_the_help_tells_the_exit_statuses(run):
    _, printed, _ = run("--help")

    assert "Exit status: 0" in printed and "130" in printed


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
    assert (
        f"{len(returns)} episodes ended: mean return {returns.mean():.2f}" in printed
        and len(returns) > 1
    )
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


def test_a_single_episode_is_told_in_the_singular(run):
    status, printed, _ = run("rollout", "gym/MountainCar-v0", "--steps", "200")

    assert status == 0 and "\n1 episode ended: mean return -200.00, mean length 200.0" in printed


def test_an_episode_that_does_not_end_is_told_as_reward_a_step(run):
    status, printed, _ = run("rollout", "gym/Pendulum-v1", "--steps", "5")

    assert status == 0
    assert "no episode ended" in printed and "reward a step" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rollout", "gym/CartPol-v1"), "'CartPole-v1'"),
        (("info", "no such thing"), "list_envs"),
        (("rollout", "gym/CartPole-v1", "--out", "data.csv"), ".parquet"),
        (("list", "--world", "bra"), "'brax'"),
        (("bench", "chess"), "cartpole, brax"),
        (("rollout", "gym/CartPole-v1", "--steps", "0"), "--steps"),
        (("rollout", "gym/CartPole-v1", "--video", "walk.avi"), ".mp4"),
        (("rollout", "gym/CartPole-v1", "--num-envs", "2.5"), "--num-envs"),
        (("rollout", "gym/CartPole-v1", "--stepps", "3"), "--steps"),
        (("rollout",), "See: envkit rollout --help"),
        (("list", "--world"), "--world"),
        (("nonsense",), "nonsense"),
        (("lst",), "Did you mean 'list'? See: envkit --help"),
        (("list", "nosuch", "--world", "gym"), "no id here matches 'nosuch' in the library 'gym'"),
        (("--nonsense",), "--nonsense"),
        (("demo", "--device", "gpu"), "Pass cpu, cuda"),
    ],
)
def test_a_mistake_ends_with_status_2_and_no_traceback(run, arguments, message):
    status, _, errors = run(*arguments)

    assert status == 2
    assert message in errors
    assert errors.startswith("envkit: ") and errors.count("\n") == 1 and "╭" not in errors


@pytest.mark.parametrize("option", ["--out", "--video"])
@pytest.mark.parametrize("place", ["nowhere/data", "."])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_stepped(
    run, option, place, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ending = {"--out": ".parquet", "--video": ".gif"}[option]
    (tmp_path / f"folder{ending}").mkdir()
    path = f"folder{ending}" if place == "." else f"{place}{ending}"

    status, printed, errors = run("rollout", "gym/no such env", option, path)

    assert status == 2 and not printed
    assert errors.startswith(f"envkit: {path} cannot be written: there is")


def test_a_library_that_writes_is_missed_before_anything_is_stepped(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    out = tmp_path / "data.parquet"

    status, printed, errors = run("rollout", "gym/CartPole-v1", "--out", str(out))

    assert (status, printed) == (2, "") and "'.[parquet]'" in errors
    assert not out.exists()


def test_ctrl_c_ends_a_command_with_the_status_that_shells_expect(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(envkit, "make", interrupted)

    status, printed, errors = run("rollout", "gym/CartPole-v1")

    assert (status, printed, errors) == (130, "", "")


def test_an_env_that_draws_nothing_is_told_before_anything_is_stepped(run, tmp_path):
    file = tmp_path / "walk.gif"

    status, printed, errors = run("rollout", "envkit/Pendulum", "--video", str(file))

    assert status == 2 and not printed and not file.exists()
    assert "cannot be drawn" in errors


def test_what_is_returned_beside_a_video_is_what_is_returned_without(run, tmp_path):
    given = ("rollout", "gym/CartPole-v1", "--num-envs", "1", "--steps", "30", "--out")

    run(*given, str(tmp_path / "alone.h5"))
    run(*given, str(tmp_path / "beside.h5"), "--video", str(tmp_path / "walk.gif"))

    alone, beside = (envkit.from_hdf5(tmp_path / f"{name}.h5") for name in ("alone", "beside"))
    assert (alone == beside).all()


def test_no_command_shows_the_help_and_is_a_mistake(run):
    status, printed, errors = run()

    assert status == 2 and not errors
    assert "rollout" in printed and "doctor" in printed


def called(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run the command as a shell does, by its name or by Python's ``-m``."""
    done = subprocess.run(
        [*arguments], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    return done.returncode, done.stdout, done.stderr


COMMAND = (str(Path(sys.executable).with_name("envkit")),)
MODULE = (sys.executable, "-m", "envkit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [(), ("--version",), ("--help",), ("rollout", "-h"), ("rollout", "--steps", "0")]
)
def test_the_module_is_the_same_as_the_command(arguments):
    assert called(*COMMAND, *arguments) == called(*MODULE, *arguments)


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("bash", {"COMP_WORDS": "envkit roll", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "envkit roll"}),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "envkit roll", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        ),
    ],
)
def test_shells_complete_commands(shell, asked):
    status, printed, errors = called(*COMMAND, _ENVKIT_COMPLETE=f"complete_{shell}", **asked)

    assert (status, errors) == (0, "")
    assert "rollout" in printed and "doctor" not in printed


def test_options_are_completed():
    _, printed, _ = called(
        *COMMAND,
        _ENVKIT_COMPLETE="complete_bash",
        COMP_WORDS="envkit rollout --st",
        COMP_CWORD="2",
    )

    assert printed.split() == ["--steps"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("info env", ["envkit/", "envpool/"]),
        ("list --world gym", ["gym", "gymnax"]),
        ("bench br", ["brax"]),
    ],
)
def test_worlds_and_works_are_completed(words, offered):
    _, printed, errors = called(
        *COMMAND,
        _ENVKIT_COMPLETE="complete_bash",
        COMP_WORDS=f"envkit {words}",
        COMP_CWORD=str(len(words.split())),
    )

    assert (printed.split(), errors) == (offered, "")


def test_ids_of_one_world_are_completed_and_where_several_begin_so_the_worlds(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert app.complete_ids("gym/CartP") == ["gym/CartPole-v0", "gym/CartPole-v1"]
    assert app.complete_ids("envk") == list(envkit.list_envs(world="envkit"))
    assert app.complete_ids("") == [f"{name}/" for name in envkit.world_names()]
    assert app.complete_ids("chess/") == app.complete_ids("gym/no such env") == []


def test_the_worlds_are_named_without_torch():
    code = "import sys, envkit; assert envkit.world_names() and 'torch' not in sys.modules"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_world_that_is_broken_completes_to_nothing(monkeypatch, tmp_path):
    def fails(*args, **kwargs):
        raise envkit.errors.BrokenLibraryError("the library of world 'gym' fails", name="gymnasium")

    monkeypatch.setattr(envkit, "list_envs", fails)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert app.complete_ids("gym/") == []


def test_ids_are_kept_until_something_is_installed(monkeypatch, tmp_path):
    listed = iter([["gym/a"], ["gym/b"], ["gym/c"]])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(envkit, "list_envs", lambda world: next(listed))
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(app.sysconfig, "get_path", lambda name: str(site))

    assert app.complete_ids("gym/") == app.complete_ids("gym/") == ["gym/a"]

    (site / "a_new_package").mkdir()
    assert app.complete_ids("gym/") == ["gym/b"]

    (kept,) = (tmp_path / "cache" / "envkit" / "ids").iterdir()
    kept.write_text('{"of": ')
    assert app.complete_ids("gym/") == ["gym/c"]


@pytest.mark.slow
def test_the_script_that_teaches_a_shell_is_shown():
    for command in (COMMAND, MODULE):
        asked = f"{shlex.join(command)} --show-completion; exit $?"  # whose shell is that it is started from
        status, printed, _ = called("bash", "-c", asked)

        assert status == 0 and "_ENVKIT_COMPLETE=complete_bash" in printed


def test_where_a_mistake_was_found_is_shown_when_asked_for(run):
    alone = run("rollout", "gym/CartPol-v1")

    status, printed, errors = run("--traceback", "rollout", "gym/CartPol-v1")

    assert (status, printed) == alone[:2] == (2, "")
    assert errors.startswith("Traceback") and errors.endswith(alone[2])
    assert "ArgumentError" in errors


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "names"),
    [
        (
            "cartpole",
            [
                *("bare loop", "envkit ParallelEnv", "gymnasium AsyncVectorEnv"),
                *("SB3 SubprocVecEnv", "TorchRL ParallelEnv"),
            ],
        ),
        ("brax", ["bare jitted steps", "envkit rollout", "TorchRL BraxWrapper"]),
    ],
)
def test_a_bench_prints_ratios_to_the_bare_simulator(run, work, names):
    status, printed, _ = run("bench", work, "--seconds", "0.1")

    assert status == 0
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    assert rows[0][-3:] == ["steps/s", "ratio", "spread"]
    assert all(any(name in line for line in printed.splitlines()) for name in names)
    assert all(float(row[-3].replace(",", "")) > 0 for row in rows[1:]) and rows[1][-2] == "1.00"


def test_a_peer_that_is_missing_or_broken_is_left_out_of_a_bench(monkeypatch, tmp_path, capsys):
    (tmp_path / "broken_peer.py").write_text("import no_such_thing_at_all")
    monkeypatch.syspath_prepend(tmp_path)

    assert bench._installed("no_such_peer.envs") is None and not capsys.readouterr().out
    assert bench._installed("broken_peer") is None
    assert "left out: broken_peer" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_of_a_stateless_env_is_described(run):
    status, printed, _ = run("info", "brax/fast", "--num-envs", "3", "--seconds", "0.01")

    assert status == 0
    assert "BraxEnv('fast'" in printed and "batch_size=(3,)" in printed
    assert "(3, 1)" in printed and "steps a second" in printed


def test_speed_is_not_measured_for_no_seconds(run):
    status, printed, _ = run("info", "gym/CartPole-v1", "--num-envs", "1", "--seconds", "0")

    assert status == 0 and "steps a second" not in printed


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
        "library gym",
    ):
        assert what in printed
    assert "broken" not in printed


def bounds_of_the_clone(distribution: str) -> list[str]:
    """Give the requirements of envkit as pyproject.toml states them, of libraries as they were when this was written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    return {
        "envkit-rl": [
            *project["dependencies"],
            *(f"{one}; extra == '{extra}'" for extra, wanted in extras for one in wanted),
        ],
        "gymnax": ["gymnasium<1.4,>=1.1", "flax; python_version < '3.14'"],
        "torchrl": ["tensordict<0.15.0,>=0.14.3", "pytest; extra == 'tests'"],
        "mujoco-mjx": ["mujoco>=3.17.0.dev0"],
    }.get(distribution, [])


@pytest.mark.parametrize(
    ("installed", "message", "fix"),
    [
        (
            {"dm-control": "1.0.50", "gymnasium": "1.3.0", "mujoco": "4.0.1"},
            "mujoco 4.0.1: the extra 'dm-control' needs <4,>=3.17",
            "'mujoco<4,>=3.17'",
        ),
        (
            {"brax": "0.14.2", "mujoco": "4.0.0", "mujoco-mjx": "3.17.0"},
            "mujoco 4.0.0: the extra 'brax' needs <4,>=3.17",
            "'mujoco<4,>=3.17,>=3.17.0.dev0'",
        ),
        (
            {"gymnax": "1.0.1", "six": "1.17", "gymnasium": "1.4.0"},
            "gymnasium 1.4.0: gymnax 1.0.1 needs <1.4,>=1.1",
            "'gymnasium<1.4,>=1.1,>=1.2'",
        ),
        (
            {"torchrl": "0.14.1", "tensordict": "0.15.3"},
            "tensordict 0.15.3: torchrl 0.14.1 needs <0.15.0,>=0.14.3",
            "'tensordict<0.15.0,>=0.14.3'",
        ),
        ({"mujoco": "4.0.0", "gymnasium": "1.4.0"}, None, None),
        ({"mujoco": "3.17.0", "mujoco-mjx": "3.17.0", "brax": "0.14.2"}, None, None),
    ],
)
def test_versions_out_of_bounds_are_broken_with_a_cure_within_them(
    run, monkeypatch, installed, message, fix
):
    monkeypatch.setattr(doctor, "_version_of", installed.get)
    monkeypatch.setattr(doctor.metadata, "requires", bounds_of_the_clone)
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._bounds,))

    status, printed, _ = run("doctor")

    if message is None:
        assert (status, printed) == (0, "")
    else:
        assert status == 1 and printed.count("broken") == 1
        assert f"{message}\n         fix: pip install {fix}\n" in printed


def test_a_library_that_crashes_its_process_does_not_crash_the_doctor():
    works, told = doctor._tried("import os, signal; os.kill(os.getpid(), signal.SIGILL)")

    assert not works and "signal 4" in told


def test_little_shared_memory_is_broken_where_pools_use_it_and_names_the_option_of_docker(
    monkeypatch,
):
    monkeypatch.setattr(doctor, "_LEAST_SHARED_MIB", 10**9)
    (unused,) = doctor._memory()
    monkeypatch.delattr(os, "memfd_create")

    (finding,) = doctor._memory()

    assert unused.state == "ok"
    assert finding.state == "broken" and "--shm-size" in finding.fix


@pytest.mark.parametrize(("cores", "state"), [(1, "ok"), (0, "note")])
def test_more_threads_of_torch_than_cores_are_told_with_the_variable_to_set(
    cores, state, monkeypatch
):
    monkeypatch.setattr(doctor, "count_cores", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    (finding,) = doctor._threads()

    assert (finding.state, finding.report) == (state, f"1, and {cores} cores to run on")
    assert (f"OMP_NUM_THREADS={cores}" in finding.fix) is (state == "note")


@pytest.fixture
def no_opengl(tmp_path, monkeypatch):
    """Replace OpenGL, for processes that are started, by one that fails to load."""
    (tmp_path / "OpenGL").mkdir()
    (tmp_path / "OpenGL" / "__init__.py").write_text("raise ImportError('no library libGL.so')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    return monkeypatch


@pytest.mark.slow
def test_without_opengl_the_doctor_names_the_package_that_brings_it(no_opengl):
    (finding,) = doctor._rendering()

    assert finding.state == "note" and "libosmesa6" in finding.fix
    assert (
        "neither with EGL nor with OSMesa (egl: ImportError: no library libGL.so" in finding.report
    )


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["osmesa", "nonsense"])
def test_a_backend_that_was_chosen_and_does_not_draw_is_broken(no_opengl, chosen):
    no_opengl.setenv("MUJOCO_GL", chosen)

    (finding,) = doctor._rendering()

    assert finding.state == "broken" and finding.report.startswith(f"MUJOCO_GL={chosen}, but ")
    assert "unset MUJOCO_GL" in finding.fix


def test_two_pygames_in_one_folder_are_told(monkeypatch):
    installed = {"pygame-ce": "2.5.8"}
    monkeypatch.setattr(doctor, "_version_of", installed.get)
    assert list(doctor._two_pygames()) == []

    installed["pygame"] = "2.6.1"
    (finding,) = doctor._two_pygames()

    assert finding.state == "note" and "--force-reinstall --no-deps pygame-ce" in finding.fix


# -------------------------------------------------------------------------------- nothing but the core

CORE_ONLY = """
import importlib.machinery, importlib.metadata

CORE = {"envkit-rl", "array-api-compat", "cloudpickle", "numpy", "packaging", "rich", "tensordict", "torch", "typer"}
GONE = {
    *("brax", "chess", "dm_control", "envpool", "gymnasium", "gymnax", "h5py", "imageio", "imageio_ffmpeg", "jax"),
    *("jaxlib", "jumanji", "matplotlib", "minari", "mujoco", "mujoco_playground", "pettingzoo", "pyarrow", "ray"),
    *("craftax", "jaxmarl", "mjlab", "navix", "pgx", "sb3_contrib", "stable_baselines3", "torchrl", "tqdm", "vmas", "xminigrid"),
}
find, version = importlib.machinery.PathFinder.find_spec, importlib.metadata.version

def find_core(name, path=None, target=None):
    return None if name.partition(".")[0] in GONE else find(name, path, target)

def version_of_core(name):
    if name not in CORE:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.machinery.PathFinder.find_spec = find_core
importlib.metadata.version = version_of_core
"""


@pytest.fixture
def core_only(tmp_path):
    """Call the command where nothing but envkit's core can be imported."""
    (tmp_path / "sitecustomize.py").write_text(CORE_ONLY)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return lambda *arguments: called(*MODULE, *arguments, PYTHONPATH=path)


@pytest.mark.slow
def test_the_doctor_works_with_nothing_but_the_core(core_only):
    status, printed, errors = core_only("doctor")

    assert (status, errors) == (0, "")
    assert "ok     worker processes" in printed and "broken" not in printed
    for extra in ("jax", "brax", "gym", "envpool"):
        assert f"pip install -e '.[{extra}]'" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("rollout", "gym/CartPole-v1"), "gym"),
        (("info", "brax/ant"), "brax"),
        (("bench", "cartpole"), "gym"),
        (("bench", "brax"), "brax"),
    ],
)
def test_a_library_that_is_missing_is_told_with_its_extra(core_only, arguments, extra):
    status, _, errors = core_only(*arguments)

    assert status == 2 and errors.count("\n") == 1
    assert errors.endswith(f"pip install -e '.[{extra}]'\n")


@pytest.mark.slow
def test_worlds_that_are_missing_are_listed_with_their_extras(core_only):
    _, printed, _ = core_only("list", "--worlds")

    assert all(f"'.[{name}]'" in printed for name in ("brax", "gym", "dm_control"))


@pytest.mark.slow
def test_only_what_can_be_made_is_listed(core_only):
    _, printed, _ = core_only("list")

    assert printed.split() == [
        f"envkit/{name}" for name in ("FinancialRegime", "LLMHashing", "Pendulum", "TicTacToe")
    ]
