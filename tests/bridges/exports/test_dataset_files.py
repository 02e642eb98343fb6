"""Recorded steps as Parquet and HDF5 files: read back equal, written whole or not at all, from any data."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import tracemalloc
import weakref
from functools import partial

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, is_non_tensor

from envkit import (
    Collector,
    GymEnv,
    SerialEnv,
    from_hdf5,
    from_parquet,
    split_trajectories,
    to_hdf5,
    to_parquet,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    MissingKeyError,
    WriteError,
)
from tests.zoo.envs import Count
from tests.zoo.shaped_envs import Groups, Wordy

FORMATS = {"parquet": (to_parquet, from_parquet), "hdf5": (to_hdf5, from_hdf5)}


@pytest.fixture(params=list(FORMATS))
def form(request, tmp_path):
    """Write to a file, read from it, and its path."""
    write, read = FORMATS[request.param]
    return write, read, tmp_path / f"data.{request.param}"


def assert_equal(loaded, data):
    """Compare keys, kinds, shapes, dtypes, values to the bit, batch sizes of all nodes, and names."""
    assert loaded.batch_size == data.batch_size and loaded.names == data.names
    assert set(loaded.keys()) == set(data.keys())
    for key in data.keys():
        was, now = data.get(key), loaded.get(key)
        if isinstance(was, torch.Tensor):
            assert now.dtype == was.dtype and now.shape == was.shape
            torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
        elif is_non_tensor(was):
            assert now.tolist() == (was.tolist() if was.batch_dims else was.data)
        else:
            assert_equal(now, was)


def two_rows(steps: int, make=Count) -> TensorDict:
    env = SerialEnv(2, make)
    data = env.rollout(steps, break_when_any_done=False)
    env.close()
    return data


# ---------------------------------------------------------------------------------------- read back


@pytest.mark.parametrize("make", [partial(Count, 5), Wordy, partial(GymEnv, "CartPole-v1")])
def test_a_rollout_is_read_back_as_it_was(form, make):
    write, read, path = form
    data = two_rows(12, make)

    assert write(data, path) == path
    write(data[0], path)
    one = read(path)
    write(data, path)

    assert_equal(read(path), data)
    assert_equal(one, data[0])


def test_agents_with_batch_axes_of_their_own_are_read_back(form):
    write, read, path = form
    data = Groups().rollout(4)

    write(data, path)

    assert_equal(read(path), data)
    assert read(path)["agent1"].batch_size == (4, 3)


DTYPES = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32]
DTYPES += [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]
NAMES = ["a", "b.c", "b/c", "é", ".", "..", "%2F", "%", "step", "cut", "episode", "a|b"]


@settings(max_examples=25)
@given(draw=st.data(), kind=st.sampled_from(sorted(FORMATS)))
def test_entries_of_any_name_shape_and_dtype_are_read_back(draw, kind, tmp_path_factory):
    write, read = FORMATS[kind]
    rows = draw.draw(st.lists(st.integers(1, 2), max_size=2))
    size = (*rows, draw.draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw.draw(st.integers(0, 99)))

    def tensor():
        shape = (*size, *draw.draw(st.lists(st.integers(0, 3), max_size=2)))
        bits = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        dtype = draw.draw(st.sampled_from(DTYPES))
        if dtype == torch.bool:
            return bits[..., 0] > 99
        return bits.view(dtype)[..., 0].contiguous()  # NaN and infinities among them

    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=3)
    data = TensorDict({name: tensor() for name in draw.draw(names)}, size)
    data["deep"] = TensorDict({name: tensor() for name in draw.draw(names)}, size)
    done = torch.rand((*size, 1), generator=generator) > 0.5
    data["next"] = TensorDict({"done": done}, size)
    data.names = [*([None] * len(rows)), "time"]
    path = tmp_path_factory.mktemp("data") / "file"

    write(data, path)

    assert_equal(read(path), data)


def test_batches_of_a_collector_are_joined_along_time(form):
    write, read, path = form
    kept = []

    def make():
        return SerialEnv(2, partial(GymEnv, "CartPole-v1"))

    with Collector(make, frames_per_batch=30, total_frames=120) as collector:
        write((kept.append(batch.clone()) or batch for batch in collector), path)

    assert_equal(read(path), torch.cat(kept, -1))


def test_text_that_is_the_same_in_all_rows_is_read_back(form):
    write, read, path = form
    data = Count(5).rollout(3)
    data["task"] = NonTensorData("räume auf", batch_size=[3])

    write(data, path)

    assert read(path).get("task").tolist() == ["räume auf"] * 3


# ---------------------------------------------------------------------------------------- episodes


def marks(path):
    """Read episode, step and cut with the formats' own readers, by row and time."""
    if path.suffix == ".hdf5":
        with h5py.File(path) as file:
            return [file[name][()].tolist() for name in ("episode", "step", "cut")]
    table = pyarrow.parquet.read_table(path).sort_by([("row", "ascending"), ("time", "ascending")])
    rows = len(set(table["row"].to_pylist()))
    numbers = [table[name].fill_null(-1).to_numpy() for name in ("episode", "step")]
    columns = [*numbers, table["cut"].to_numpy()]
    return [column.reshape(rows, -1).tolist() for column in columns]


def test_episodes_go_on_in_the_next_batch_and_are_cut_where_the_data_ends(form):
    write, _, path = form
    data = two_rows(7, partial(Count, 3))

    write([data[:, :2], data[:, 2:4], data[:, 4:]], path)

    episode, step, cut = marks(path)
    assert episode == [[0, 0, 0, 2, 2, 2, 4], [1, 1, 1, 3, 3, 3, 5]]
    assert step == [[0, 1, 2, 0, 1, 2, 0]] * 2
    assert cut == [[False] * 6 + [True]] * 2


def test_workers_that_take_turns_are_cut_where_each_ended(form):
    write, read, path = form
    data = Count(5).rollout(4)
    turns = [data[:2].clone(), data[:2].clone(), data[2:].clone()]
    for batch, number in zip(turns, (0, 1, 0), strict=True):
        batch["collector", "traj_ids"] = torch.full((2,), number)

    write(turns, path)

    episode, _, cut = marks(path)
    assert np.ravel(episode).tolist() == [0, 0, 1, 1, 0, 0]
    assert np.ravel(cut).tolist() == [False, False, False, True, False, True]
    assert_equal(read(path), torch.cat(turns, -1))


def test_padding_is_in_no_episode(form):
    write, read, path = form
    split = split_trajectories(Count(5).rollout(7, break_when_any_done=False))

    write(split, path)

    assert marks(path)[0] == [[0] * 5, [1, 1, -1, -1, -1]]
    assert marks(path)[2] == [[False] * 5, [False, True, False, False, False]]
    assert_equal(read(path), split)


def test_a_parquet_file_has_a_row_for_each_step_and_columns_by_name(tmp_path):
    data = two_rows(5, partial(GymEnv, "CartPole-v1"))

    table = pyarrow.parquet.read_table(to_parquet(data, tmp_path / "a.parquet"))

    assert table.num_rows == 10
    assert table.column_names[:5] == ["episode", "step", "row", "time", "cut"]
    first = table.slice(0, 1).to_pylist()[0]
    assert first["next.reward"] == 1.0 and first["next.done"] is False
    assert first["observation"] == pytest.approx(data["observation"][0, 0].tolist())


def test_an_hdf5_file_has_an_array_for_each_entry_that_tensordict_opens_too(tmp_path):
    data = two_rows(5, partial(GymEnv, "CartPole-v1"))

    path = to_hdf5([data[:, :2], data[:, 2:]], tmp_path / "a.h5")

    with h5py.File(path) as file:
        assert np.array_equal(file["data/next/reward"][()], data["next", "reward"].numpy())
    stored = TensorDict.from_h5(path)
    assert (stored["data"].to_tensordict() == data).all()
    stored.close()


def test_a_file_of_version_0_2_is_read(tmp_path):
    columns = {"flag": "bool", "half": "bfloat16", "image": "uint8", "wave": "complex64"}
    entries = [
        {"path": [name], "name": name, "dtype": dtype, "shape": [2]}
        for name, dtype in columns.items()
    ]
    entries.append({"path": ["next", "a/b"], "name": "next.a/b", "dtype": "text", "shape": []})
    entries.append({"path": ["none"], "name": "none", "dtype": "int64", "shape": [0]})
    layout = {
        "version": 1,
        "rows": [2],
        "names": [None, "time"],
        "columns": entries,
        "nodes": [[["next"], []]],
        "on_device": True,
    }
    parts = torch.arange(24.0).reshape(2, 3, 2, 2)
    numbers = parts[..., 0]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["envkit"] = json.dumps(layout)
        file["episode"] = np.zeros((2, 3), np.int64)
        for name, dtype in (("flag", bool), ("half", np.float32), ("image", np.uint8)):
            file[f"data/{name}"] = numbers.numpy().astype(dtype)
        file["data/wave"] = parts.numpy()
        file["data/next/a%2Fb"] = [["a", "b", "ä"]] * 2

    data = from_hdf5(tmp_path / "a.h5")

    assert data.device == torch.device("cpu") and data.names == [None, "time"]
    assert data["next", "a/b"] == [["a", "b", "ä"]] * 2 and data["none"].shape == (2, 3, 0)
    assert torch.equal(data["flag"], numbers.bool())
    assert torch.equal(data["half"], numbers.bfloat16())
    assert torch.equal(data["image"], numbers.to(torch.uint8))
    assert torch.equal(data["wave"], torch.view_as_complex(parts))


# ---------------------------------------------------------------------------------------- memory


def test_batches_are_not_kept(form):
    write, _, path = form
    alive, most = weakref.WeakSet(), []

    def batches():
        for _ in range(40):
            batch = Count(5).rollout(4)
            alive.add(batch["action"])
            most.append(len(alive))
            yield batch
            del batch
            gc.collect(0)

    write(batches(), path)

    assert len(most) == 40 and max(most) <= 3


def test_memory_stays_flat_however_long_the_data_is(form):
    write, _, path = form
    size = (4, 500)

    def batches(count):
        for _ in range(count):
            done = torch.rand(*size, 1) > 0.99
            following = TensorDict({"done": done, "pixels": torch.rand(*size, 100)}, size)
            yield TensorDict({"next": following}, size, names=[None, "time"])

    def peak(count):
        tracemalloc.start()
        before = pyarrow.default_memory_pool().max_memory()
        write(batches(count), path)
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return traced, pyarrow.default_memory_pool().max_memory() - before

    peak(2)
    traced, pooled = peak(90)

    assert path.stat().st_size > 60_000_000
    assert traced < 20_000_000 and pooled < 40_000_000


# ---------------------------------------------------------------------------------------- refusals


def test_a_full_disk_leaves_what_was_there_and_nothing_else(form, full_disk):
    write, read, path = form
    data = Count(5).rollout(3)
    write(data, path)
    many = (
        TensorDict(
            {"next": {"done": torch.zeros(1000, 1, dtype=torch.bool)}, "x": torch.rand(1000, 100)},
            [1000],
            names=["time"],
        )
        for _ in range(9)
    )

    with full_disk(200_000), pytest.raises(WriteError, match="cannot be written: File too large"):
        write(many, path)

    assert os.listdir(path.parent) == [path.name]
    assert_equal(read(path), data)


def test_a_path_that_cannot_be_written_is_told_before_anything_is_collected(form, tmp_path):
    write, _, path = form
    asked = []

    def batches():
        asked.append(True)
        yield Count(5).rollout(3)

    with pytest.raises(WriteError, match=r"nowhere/a cannot be written: there is no folder"):
        write(batches(), tmp_path / "nowhere" / "a")
    with pytest.raises(WriteError, match="there is a folder of that name"):
        write(batches(), tmp_path)

    assert not asked and not path.exists()


def test_a_device_or_a_pipe_is_not_replaced_and_a_link_is_followed(form):
    write, read, path = form
    data, pipe, link = two_rows(3), path.with_name("pipe"), path.with_name("link")
    os.mkfifo(pipe)
    link.symlink_to(path)

    with pytest.raises(WriteError, match="pipe cannot be written: there is a device or a pipe"):
        write(data, pipe)
    write(data, link)

    assert pipe.is_fifo() and link.is_symlink() and path.is_file()
    assert_equal(read(path), data)
    assert {one.name for one in path.parent.iterdir()} == {pipe.name, link.name, path.name}


def test_data_that_fails_on_its_way_is_told_as_it_is_and_leaves_nothing(form):
    write, _, path = form

    def batches():
        yield Count(5).rollout(3)
        raise TimeoutError("the simulator hangs")

    with pytest.raises(TimeoutError, match=r"^the simulator hangs$"):
        write(batches(), path)

    assert os.listdir(path.parent) == []


def _unlike_rows():
    return [two_rows(3), Count(5).rollout(3)]


def _unlike_entries():
    data = Count(5).rollout(3)
    return [data, data.clone().set("more", torch.zeros(3, 2))]


def _unlike_dtypes():
    data = Count(5).rollout(3)
    return [data, data.clone().set("action", data["action"].double())]


def _ragged():
    parts = [Count(5).rollout(3).set("x", torch.zeros(3, size)) for size in (1, 2)]
    found = LazyStackedTensorDict(*parts, stack_dim=0)
    found.names = [None, "time"]
    return found


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: 3, ArgumentTypeError, "data is of type int, but must be a TensorDict"),
        (lambda: [None], ArgumentTypeError, "batch 0 .* NoneType.*leave out replay_buffer"),
        (list, ArgumentError, "has no steps"),
        (lambda: Count(5).rollout(3)[:0], ArgumentError, "has no steps"),
        (lambda: Count(5).rollout(3)[0], ArgumentError, "last batch axis must be time"),
        (lambda: two_rows(3).reshape(-1), ArgumentError, "no last axis named 'time'"),
        (
            lambda: Count(5).rollout(3).exclude(("next", "done")),
            MissingKeyError,
            r"no \('next', 'done'\); .*\. Pass steps as rollout and collectors give them",
        ),
        (_unlike_rows, BatchSizeError, r"batch 1 has rows of shape \(\), the first one \(2,\)"),
        (
            _unlike_entries,
            ArgumentError,
            r"'more' of batch 1 is float32 of shape \(2,\), .* missing",
        ),
        (_unlike_dtypes, ArgumentError, r"'action' of batch 1 is float64 .* first one int64"),
        (_ragged, ArgumentError, "'x' has another shape in some rows"),
    ],
)
def test_data_that_cannot_be_written_is_refused(form, make, error, message):
    write, _, path = form

    with pytest.raises(error, match=message):
        write(make(), path)

    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("value", [{"a": 1}, print, "nul\0", "half \ud800"])
def test_what_is_neither_a_tensor_nor_text_is_refused(form, value):
    write, _, path = form
    data = Count(5).rollout(3)
    data["thing"] = NonTensorData(value, batch_size=[3])

    with pytest.raises(ArgumentError, match=r"'thing' holds .*exclude\('thing'\)"):
        write(data, path)


def test_nothing_is_pickled(form, monkeypatch):
    write, read, path = form
    data = two_rows(4, Wordy)
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.delattr(pickle, name)

    write(data, path)

    assert_equal(read(path), data)


def test_files_of_others_are_refused(form, tmp_path):
    write, read, path = form
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = np.zeros(3)
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "other.parquet")
    write(Count(5).rollout(300, break_when_any_done=False), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:10])

    with pytest.raises(ArgumentError, match=r"so to_.* did not write it"):
        read(tmp_path / f"other{path.suffix}")
    with pytest.raises(ArgumentError, match="is damaged, or is not a"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")


def test_a_parquet_file_that_lacks_steps_is_refused(tmp_path):
    table = pyarrow.parquet.read_table(to_parquet(two_rows(4), tmp_path / "a"))
    pyarrow.parquet.write_table(table.slice(1), tmp_path / "b")

    with pytest.raises(ArgumentError, match="has 7 steps, which are not all those of 2 rows"):
        from_parquet(tmp_path / "b")


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_noticed_or_changes_nothing(form, seed):
    write, read, path = form
    data = two_rows(40)
    write(data, path)
    whole, generator = path.read_bytes(), random.Random(seed)
    noticed = 0

    for _ in range(30):
        harmed = bytearray(whole)
        harmed[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(harmed)
        try:
            loaded = read(path)
        except (ArgumentError, MemoryError):  # MemoryError: the bit was in the size of an array
            noticed += 1
        else:
            assert_equal(loaded, data)

    assert noticed


def test_a_number_that_changed_in_an_hdf5_file_is_noticed(tmp_path):
    data = two_rows(40)
    data["next", "reward"][:] = 0.40625
    path = to_hdf5(data, tmp_path / "a.hdf5")
    harmed = bytearray(path.read_bytes())
    harmed[harmed.index(data["next", "reward"][0].numpy().tobytes()[:64]) + 3] ^= 0x80
    path.write_bytes(harmed)

    with pytest.raises(ArgumentError, match=r"a\.hdf5 is damaged, .*filter returned failure"):
        from_hdf5(path)
