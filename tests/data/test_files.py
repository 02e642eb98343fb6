"""Files that are whole or absent: what killed writers leave, and which paths are taken."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import envkit
from envkit.data.files import file_to_read, telling, whole_file, whole_folder
from envkit.errors import ArgumentError, ArgumentTypeError, MissingFileError, WriteError

LEFT = f".data.{'0a' * 16}.partial"


# ---------------------------------------------------------------------------------------- left over


def left_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".partial"))


def test_the_next_write_of_a_name_removes_what_a_killed_one_left(tmp_path):
    (tmp_path / LEFT).write_bytes(b"half")

    with whole_file(tmp_path / "data") as file:
        file.write(b"whole")

    assert (tmp_path / "data").read_bytes() == b"whole" and os.listdir(tmp_path) == ["data"]


def test_the_next_folder_of_a_name_removes_what_a_killed_one_left(tmp_path):
    (tmp_path / LEFT).mkdir()
    (tmp_path / LEFT / "part").write_bytes(b"half")

    with whole_folder(tmp_path / "data") as folder:
        (folder / "part").write_bytes(b"whole")

    assert (tmp_path / "data" / "part").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["data"]


def test_what_another_still_writes_stays(tmp_path):
    with whole_file(tmp_path / "data") as slow:
        slow.write(b"first")
        with whole_file(tmp_path / "data") as quick:
            quick.write(b"second")
        read = (tmp_path / "data").read_bytes()

    assert read == b"second" and (tmp_path / "data").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["data"]


def test_a_folder_that_another_still_writes_stays(tmp_path):
    slow = whole_folder(tmp_path / "data")
    is_written = slow.__enter__()
    with whole_folder(tmp_path / "data") as quick:
        (quick / "part").write_bytes(b"second")

    assert is_written.is_dir()
    with pytest.raises(WriteError, match="cannot be written"):
        slow.__exit__(None, None, None)
    assert (tmp_path / "data" / "part").read_bytes() == b"second" and not left_in(tmp_path)


@pytest.mark.parametrize(
    "name", [".other" + LEFT[5:], LEFT[1:], ".data.12.partial", ".data.partial"]
)
def test_files_of_other_names_stay(tmp_path, name):
    (tmp_path / name).touch()

    with whole_file(tmp_path / "data"):
        pass

    assert sorted(os.listdir(tmp_path)) == sorted(["data", name])


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks here")

    (tmp_path / LEFT).touch()
    monkeypatch.setattr(fcntl, "flock", refuse)

    with whole_file(tmp_path / "data") as file:
        file.write(b"whole")

    assert (tmp_path / "data").read_bytes() == b"whole" and left_in(tmp_path) == [LEFT]


KILLED = """
import os, signal, sys
import envkit
from tests.zoo.envs import Count

def batches():
    yield Count(5).rollout(3)
    os.kill(os.getpid(), signal.SIGKILL)

def save_slowly(_, path):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = die
    envkit.save(path, a=1)

write = {"save": save_slowly}.get(sys.argv[1]) or getattr(envkit, sys.argv[1])
write(batches(), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["to_parquet", "to_hdf5", "to_minari", "save"])
def test_a_killed_write_is_absent_and_the_next_one_clears_up(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    target = "data-v0" if kind == "to_minari" else str(tmp_path / "data-v0")
    data = TensorDict(
        {"observation": torch.zeros(2, 1), "action": torch.zeros(2, 1)}, [2], names=["time"]
    )
    flag = torch.ones(2, 1, dtype=torch.bool)
    data["next"] = TensorDict({"observation": flag * 0.0, "reward": flag * 1.0, "done": flag}, [2])

    killed = subprocess.run([sys.executable, "-c", KILLED, kind, target], check=False)
    left = left_in(tmp_path)
    envkit.save(target, a=1) if kind == "save" else getattr(envkit, kind)(data, target)

    assert killed.returncode == -signal.SIGKILL
    assert len(left) == 1 and left_in(tmp_path) == []
    assert "data-v0" in os.listdir(tmp_path)


# ---------------------------------------------------------------------------------------- paths

WRITERS = {
    "to_parquet": lambda path: envkit.to_parquet([], path),
    "to_hdf5": lambda path: envkit.to_hdf5([], path),
    "save": lambda path: envkit.save(path, part=1),
    "Video.save": lambda path: envkit.Video(torch.zeros(1, 3, 2, 2).byte(), 9).save(path),
    "record": lambda path: envkit.record(envkit.GymEnv("CartPole-v1"), None, path),
}
READERS = {
    "from_parquet": envkit.from_parquet,
    "from_hdf5": envkit.from_hdf5,
    "load": lambda path: envkit.load(path, part=None),
}
OTHERS = {"cache_dir": lambda path: envkit.cache_dir(path or False)}


@pytest.mark.parametrize("name", [*WRITERS, *READERS, *OTHERS])
@pytest.mark.parametrize("path", [None, 3, True, b"data"])
def test_what_is_no_path_is_told_alike_everywhere(name, path):
    call = {**WRITERS, **READERS, **OTHERS}[name]

    with pytest.raises(ArgumentTypeError, match=r"^path is .* must be a path: text or a pathlib"):
        call(path)


@pytest.mark.parametrize("name", [*WRITERS, *READERS])
@pytest.mark.parametrize("path", ["", "nul\0"])
def test_a_path_without_a_name_is_told_alike_everywhere(name, path):
    with pytest.raises(ArgumentError, match=r"^path is .*, but must name something"):
        {**WRITERS, **READERS}[name](path)


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_folder_is_not_written_over(name, tmp_path):
    folder = tmp_path / "folder.mp4"
    folder.mkdir()

    with pytest.raises(WriteError, match=r"folder\.mp4 cannot be written: there is a folder of"):
        WRITERS[name](folder)

    assert os.listdir(tmp_path) == ["folder.mp4"] and not os.listdir(folder)


@pytest.mark.parametrize("path", [".", "/", ".."])
def test_folders_without_a_name_of_their_own_are_not_written_over(path):
    with pytest.raises(WriteError, match="there is a folder of that name"), whole_file(path):
        pass


@pytest.mark.parametrize("name", list(READERS))
def test_a_folder_is_not_read_as_a_file(name, tmp_path):
    with pytest.raises(ArgumentError, match=r"is a folder, but must be a file\. Pass the path"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", list(READERS))
def test_a_file_that_is_not_there_is_named(name, tmp_path):
    with pytest.raises(MissingFileError, match=r"there is no file .*nowhere") as caught:
        READERS[name](tmp_path / "nowhere")

    assert isinstance(caught.value, FileNotFoundError)


def test_a_pipe_and_a_name_that_no_disk_takes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ArgumentError, match="is a device or a pipe, but must be a file"):
        file_to_read(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="cannot be read: File name too long"):
        file_to_read("x" * 300)


def test_what_is_to_be_saved_is_not_asked_for_before_its_place_is_found_good(tmp_path):
    asked = []

    class Part:
        def state_dict(self):
            asked.append(True)
            return {}

        def load_state_dict(self, state):
            raise AssertionError("never called")

    with pytest.raises(WriteError, match=r"there is no folder .*nowhere"):
        envkit.save(tmp_path / "nowhere" / "a", part=Part())

    assert not asked


@pytest.mark.parametrize("held", [b"", b"text", b"PK\x03\x04aaaa", b"\x80\x02}q\x00."])
def test_a_damaged_save_is_told_by_name(held, tmp_path):
    (tmp_path / "a.pt").write_bytes(held)

    with pytest.raises(
        envkit.errors.ResumeError, match=r"a\.pt is damaged, or is not a file of envkit\.save"
    ):
        envkit.load(tmp_path / "a.pt", part=None)


# ---------------------------------------------------------------------------------------- full disks

FULL = """
import os, sys
import torch
from tensordict import TensorDict
import envkit
from envkit.errors import WriteError

def steps(count):
    flag = torch.ones(count, 1, dtype=torch.bool)
    seen = torch.rand(count, 500)
    following = TensorDict({"observation": seen, "reward": flag * 1.0, "done": flag}, [count])
    return TensorDict({"observation": seen, "action": seen[:, :1], "next": following}, [count], names=["time"])

folder = sys.argv[1]
os.environ["MINARI_DATASETS_PATH"] = folder
small, large = steps(2), [steps(200) for _ in range(9)]
place = os.path.join(folder, "a")
writers = {
    "to_parquet": lambda data: envkit.to_parquet(data, place),
    "to_hdf5": lambda data: envkit.to_hdf5(data, place),
    "save": lambda data: envkit.save(place, data=torch.zeros(1) if data is small else [one["observation"] for one in data]),
    "to_minari": lambda data: envkit.to_minari(data, "a-v0"),
}
for name, write in writers.items():
    if name != "to_minari":
        write(small)
        before = open(place, "rb").read()
    try:
        write(large)
    except WriteError as error:
        assert "cannot be written: No space left on device" in str(error), error
    else:
        raise AssertionError(name + " wrote more than there is room for")
    if name == "to_minari":
        assert os.listdir(folder) == ["a"], os.listdir(folder)
        write(small)
    else:
        assert os.listdir(folder) == ["a"] and open(place, "rb").read() == before, name
print("whole")
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_and_nothing_is_lost(tmp_path):
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}"'
    if subprocess.run([*unshare, "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip(
            "no file system may be mounted here; the limit on sizes of files is tried instead"
        )

    done = subprocess.run(
        [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", FULL, tmp_path],
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.stdout == "whole\n", done.stderr


def fails_while_it_closes() -> None:
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        raise RuntimeError("cannot close")


def test_a_library_that_fails_once_more_while_it_closes_hides_no_full_disk(tmp_path):
    with pytest.raises(WriteError, match="cannot be written: No space left"), telling(tmp_path):
        fails_while_it_closes()
    with pytest.raises(ZeroDivisionError), telling(tmp_path):
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="of another kind"), telling(tmp_path):
        raise RuntimeError("of another kind")
