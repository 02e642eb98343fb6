"""Files of others run no code, workers listen on nothing, and Ray is imported only where it is asked for."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import envkit
from bench.harness import python_path
from envkit import from_hdf5, from_minari, from_parquet, to_hdf5, to_minari, to_parquet
from envkit.errors import ArgumentError, ResumeError
from tests.zoo.envs import Count

ROOT = Path(__file__).parents[1]


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def a_pickle(path, bomb):
    path.write_bytes(pickle.dumps(bomb))


def a_pickle_in_an_archive(path, bomb):
    torch.save({"envkit": 1, "parts": {"w": bomb}}, path)


def a_pickle_in_torchs_old_form(path, bomb):
    torch.save({"envkit": 1, "parts": {"w": bomb}}, path, _use_new_zipfile_serialization=False)


def an_array_of_objects(path, bomb):
    with path.open("wb") as file:
        np.save(file, np.array([bomb], object), allow_pickle=True)


def an_archive_of_arrays_of_objects(path, bomb):
    with path.open("wb") as file:
        np.savez(file, w=np.array([bomb], object))


def _with_member(path, name, content):
    envkit.save(path, w=1)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, content)


def an_archive_that_leaves_its_folder(path, bomb):
    _with_member(path, "archive/../../escaped", b"")


def an_archive_above_its_folder(path, bomb):
    _with_member(path, "../data.pkl", pickle.dumps(bomb))


def a_program_of_torchscript(path, bomb):
    _with_member(path, "archive/constants.pkl", pickle.dumps(bomb))


def half_a_file(path, bomb):
    envkit.save(path, w=torch.ones(300))
    path.write_bytes(path.read_bytes()[:700])


HOSTILE = [
    *(a_pickle, a_pickle_in_an_archive, a_pickle_in_torchs_old_form, an_array_of_objects),
    *(an_archive_of_arrays_of_objects, an_archive_that_leaves_its_folder),
    *(an_archive_above_its_folder, a_program_of_torchscript, half_a_file),
]


@pytest.fixture
def bomb(tmp_path):
    """Give what writes a file when it is unpickled; the test fails if that was done."""
    mark = tmp_path / "ran"
    yield Bomb(mark)
    assert not mark.exists()


def test_the_bomb_of_these_tests_goes_off_where_a_pickle_is_loaded(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran"))).close()

    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("write", HOSTILE)
@pytest.mark.parametrize("forced", [False, True])
def test_a_checkpoint_of_others_runs_nothing(write, forced, bomb, tmp_path, monkeypatch):
    if forced:  # a setting of torch for programs that say nothing of their own
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "a.pt"
    write(path, bomb)

    with pytest.raises(ResumeError, match=r"a\.pt .*(expected|is not a file of)") as raised:
        envkit.load(path, w=None)

    assert "weights_only" not in str(raised.value)  # no advice to run it all the same
    assert not (tmp_path.parent / "escaped").exists()


def test_what_a_checkpoint_names_is_reported(bomb, tmp_path):
    a_pickle_in_an_archive(tmp_path / "a.pt", bomb)

    with pytest.raises(
        ResumeError, match=r"names \w*io\.open, which is code; .*Code in it was not run"
    ):
        envkit.load(tmp_path / "a.pt", w=None)


@pytest.mark.parametrize(
    "state",
    [
        {"__kind__": "os.system", "value": "true"},
        {"__kind__": "array", "dtype": "os.system", "shape": [1], "value": torch.zeros(8).byte()},
        {"__kind__": "array", "dtype": "O", "shape": [1], "value": torch.zeros(8).byte()},
        {"__kind__": "array", "dtype": "O,i8", "shape": [1], "value": torch.zeros(16).byte()},
        {"__kind__": "nested", "dtype": "load", "parts": [torch.ones(2)]},
    ],
)
def test_a_value_of_a_checkpoint_that_names_a_class_is_refused(state, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"envkit": 1, "parts": {"w": {"kind": "value", "state": state}}}, path)

    with pytest.raises(ResumeError, match=r"a\.pt is damaged, or is not a file of envkit.save"):
        envkit.load(path, w=None)


@pytest.mark.parametrize("write", HOSTILE)
@pytest.mark.parametrize("read", [from_parquet, from_hdf5])
def test_a_dataset_of_others_runs_nothing(read, write, bomb, tmp_path):
    write(tmp_path / "a", bomb)

    with pytest.raises(ArgumentError, match=r"/a is damaged, or is not an? "):
        read(tmp_path / "a")


@pytest.mark.parametrize("dtype", ["os.system", "load", "nn"])
def test_a_dtype_of_a_dataset_that_names_something_else_is_refused(dtype, tmp_path):
    data = Count(5).rollout(3)
    parquet, hdf5 = to_parquet(data, tmp_path / "a.parquet"), to_hdf5(data, tmp_path / "a.hdf5")
    table = pyarrow.parquet.read_table(parquet)
    layout = json.loads(table.schema.metadata[b"envkit"])
    layout["columns"][0]["dtype"] = dtype
    del layout["checksum"]
    header = json.dumps(layout)
    pyarrow.parquet.write_table(table.replace_schema_metadata({"envkit": header}), parquet)
    with h5py.File(hdf5, "r+") as file:
        del file["envkit"]
        file["envkit"] = header

    for read, path in ((from_parquet, parquet), (from_hdf5, hdf5)):
        with pytest.raises(ArgumentError, match=rf"is damaged.*{dtype}"):
            read(path)


def _external_array(group, name, other):
    group.create_dataset(name, (3,), "u1", external=[(str(other), 0, 3)])


def _link(group, name, other):
    group[name] = h5py.ExternalLink(str(other), "/x")


def _virtual(group, name, other):
    layout = h5py.VirtualLayout((3,), "u1")
    layout[:] = h5py.VirtualSource(str(other), "x", (3,))
    group.create_virtual_dataset(name, layout)


@pytest.mark.parametrize("point", [_external_array, _link, _virtual])
def test_a_dataset_that_reads_from_another_file_is_refused(point, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data = Count(5).rollout(3)
    path, own = to_hdf5(data, tmp_path / "a.hdf5"), to_minari(data, "mine-v0")
    inside = Path(own.storage.data_path) / "main_data.hdf5"
    for file, group in ((path, "data"), (inside, "episode_0")):
        with h5py.File(file, "r+") as held:
            point(held[group], "secret", tmp_path / "secret")

    with pytest.raises(ArgumentError, match=r"a\.hdf5 has the entry 'data/secret', which names"):
        from_hdf5(path)
    with pytest.raises(ArgumentError, match=r"has the entry 'episode_0/secret', which names"):
        from_minari("mine-v0")


def test_a_minari_dataset_that_names_a_module_does_not_have_it_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "envkit_hostile.py").write_text("raise SystemExit")
    dataset = to_minari(Count(5).rollout(3), "mine-v0")
    file = Path(dataset.storage.data_path) / "metadata.json"
    metadata = json.loads(file.read_text())
    spec = {"id": "Mine-v0", "entry_point": "envkit_hostile:Env", "additional_wrappers": []}
    metadata["env_spec"] = json.dumps(spec)

    file.write_text(json.dumps(metadata))
    assert from_minari("mine-v0").shape == (3,)
    del metadata["action_space"]
    file.write_text(json.dumps(metadata))
    with pytest.raises(ArgumentError, match=r"does not say its action_space; expected both"):
        from_minari("mine-v0")

    assert "envkit_hostile" not in sys.modules


# Modules that load pickles: of messages of our own processes, and of copies of an env in this one.
UNPICKLING = {
    *("envkit/batched/creator.py", "envkit/batched/makers.py", "envkit/transport/answers.py"),
    *("envkit/transport/by_value.py", "envkit/transport/failure.py", "envkit/transport/worker.py"),
    "envkit/transport/processes.py",
    "bridges/envkit_bridges/gym/backend.py",
    "bridges/envkit_bridges/gym/reports.py",
    "bridges/envkit_bridges/gym/gym_copies.py",
    "bridges/envkit_bridges/gym/space_conversions.py",
    "bridges/envkit_bridges/transports/ray.py",
}


def _calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords}


def test_no_other_module_loads_pickles_and_torch_loads_weights_alone():
    loading = set()
    for path in [*(ROOT / "envkit").rglob("*.py"), *(ROOT / "bridges").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        for function, keywords in _calls(path):
            library, _, what = function.partition(".")
            loads = what in ("load", "loads", "Unpickler", "open")
            if loads and library in ("pickle", "cloudpickle", "marshal", "dill", "shelve"):
                loading.add(name)
            assert function not in ("yaml.load", "torch.jit.load", "torch.export.load", "eval"), (
                name
            )
            if function == "torch.load":
                assert ast.unparse(keywords["weights_only"]) == "True", name
            assert "allow_pickle" not in keywords, name

    assert loading <= UNPICKLING


LISTENING = """
import os, pathlib, socket, sys
import psutil
from envkit import AsyncEnvPool, GymEnv, ParallelEnv

def listening():
    own = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for entry in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                own.add(os.readlink(entry))
            except FileNotFoundError:
                continue
    found = []
    for kind, state, inode in (("tcp", 3, 9), ("tcp6", 3, 9), ("udp", 3, 9), ("udp6", 3, 9), ("unix", 3, 6)):
        file = pathlib.Path("/proc/net") / kind
        for line in file.read_text().splitlines()[1:] if file.exists() else []:
            parts = line.split()
            waits = int(parts[state], 16) & 0x10000 if kind == "unix" else kind[:3] == "udp" or parts[state] == "0A"
            if waits and f"socket:[{parts[inode]}]" in own:
                found.append(kind)
    return sorted(found)

make = lambda: GymEnv("CartPole-v1")
env, pool = ParallelEnv(2, make), AsyncEnvPool([make] * 2, backend="multiprocessing")
env.rollout(3)
pool.reset()
print(len(psutil.Process().children(recursive=True)) >= 4, listening(), "ray" in sys.modules)
port, named = socket.socket(), socket.socket(socket.AF_UNIX)
port.bind(("127.0.0.1", 0))
named.bind("\\0envkit-of-a-test-" + str(os.getpid()))
port.listen(), named.listen()
print(listening())
env.close(), pool.close()
"""


def printed(program: str) -> str:
    """Run a program in a process of its own; give what it prints."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow  # four seconds to start its processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_listen_on_nothing_and_import_no_ray():
    assert printed(LISTENING).splitlines() == ["True [] False", "['tcp', 'unix']"]


IMPORTING = """
import importlib, pkgutil, sys
import envkit, envkit_bridges
for package in (envkit, envkit_bridges):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        name = module.name.rpartition(".")[2]
        if module.name != "envkit_bridges.transports.ray" and not name.startswith(("__main__", "torchrl")):
            importlib.import_module(module.name)
print("ray" in sys.modules)
"""


@pytest.mark.slow  # imports every module in a process of its own
def test_no_other_module_imports_ray():
    """Those for TorchRL do, because TorchRL does."""
    assert printed(IMPORTING).split()[-1] == "False"
