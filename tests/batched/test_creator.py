"""EnvCreator and EnvMetaData: makers that carry metadata, and state that copies share."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch

from envkit import EnvCreator, EnvMetaData, ParallelEnv, SerialEnv, check_env_specs, env_creator
from envkit.batched.shared_state import SharedState
from envkit.errors import MissingKeyError, SharedMemoryError
from tests.zoo.envs import Count

ON_BOTH = {"serial": SerialEnv, "parallel": partial(ParallelEnv, num_processes=2)}


class Tally(Count):
    """Counts, over all copies, the steps that were ever taken; each step takes a number."""

    def __init__(self, n: int = 50):
        super().__init__(n)
        self.shared_lock = contextlib.nullcontext()
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))
        self.register_buffer("part", torch.zeros(2, dtype=torch.bfloat16))
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.numbers: list[int] = []
        self.built = False

    def _step(self, td):
        with self.shared_lock:
            self.numbers.append(int(self.total))
            self.total += 1
        return super()._step(td)

    def add_part(self):
        with self.shared_lock:
            self.part += 0.5


class Born(Count):
    """Refuses to be built in the process that it names."""

    built_here = 0

    def __init__(self, n: int = 5):
        super().__init__(n)
        type(self).built_here += 1


# -------------------------------------------------------------------------------------- metadata


def test_metadata_can_be_pickled_expanded_and_indexed():
    metadata = EnvMetaData.metadata_from_env(Count(5))

    loaded = pickle.loads(pickle.dumps(metadata))
    expanded = loaded.expand(2)

    assert loaded.specs == metadata.specs
    assert loaded.batch_locked is True
    assert loaded.env_str == repr(Count(5))
    assert expanded.batch_size == (2,)
    assert expanded.tensordict["next", "count"].shape == (2, 1)
    assert expanded.specs["output_spec", "full_observation_spec", "count"].shape == (2, 1)
    assert expanded[0].batch_size == ()
    assert expanded[0].specs == metadata.specs


def test_metadata_can_be_copied_and_moved():
    metadata = EnvMetaData.metadata_from_env(Count(5))

    cloned, moved = metadata.clone(), metadata.to("meta")
    cloned.tensordict["count"] += 1

    assert metadata.tensordict["count"].item() == 0
    assert moved.device == torch.device("meta")
    assert moved.tensordict["count"].device == torch.device("meta")
    assert set(moved.device_map.values()) == {torch.device("meta")}
    assert metadata.device_map["count"] == torch.device("cpu")


# --------------------------------------------------------------------------------------- creator


def test_a_creator_builds_one_env_to_learn_its_metadata():
    Born.built_here = 0

    creator = EnvCreator(Born, n=3)
    specs = creator.meta_data.specs

    assert Born.built_here == 1
    assert specs == Count(3).specs
    assert creator().n == 3


def test_stored_keywords_win_over_those_of_the_call():
    creator = EnvCreator(Count, {"n": 3})

    assert creator(n=9, device="cpu").n == 3
    assert creator(device="cpu").device == torch.device("cpu")


def test_a_variant_has_other_keywords_and_the_same_metadata_and_state():
    creator = EnvCreator(Tally, n=3)

    variant = creator.make_variant(n=8)
    variant().total += 4

    assert (creator().n, variant().n) == (3, 8)
    assert variant.meta_data is creator.meta_data
    assert creator.state_dict()["total"] == 4


def test_the_shorthand_is_a_decorator():
    @env_creator
    def make():
        return Count(4)

    assert isinstance(make, EnvCreator)
    assert make().n == 4


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_batched_envs_trust_the_metadata_of_a_creator(make):
    class Told(Count):
        described = 0

        def __repr__(self):
            self.described += 1
            return "Told"

    creators = [EnvCreator(lambda: Told(5)), EnvCreator(Told, n=7)]
    env = make(3, [creators[0], creators[1], creators[0]])

    check_env_specs(env)
    described, limits = list(env.described), list(env.n)
    env.close()

    assert limits == [5, 7, 5]
    assert described == [0, 0, 0]


@pytest.mark.slow
def test_a_creator_of_a_lambda_works_under_spawn():
    env = ParallelEnv(2, EnvCreator(lambda: Tally(5)), num_processes=1, mp_start_method="spawn")

    assert env.rollout(3).shape == (2, 3)
    assert list(env.total) == [6, 6]
    env.close()


def test_a_creator_can_be_pickled_and_copied():
    creator = EnvCreator(lambda n: Tally(n), n=6)

    loaded, copied = pickle.loads(pickle.dumps(creator)), copy.deepcopy(creator)
    loaded().total += 2

    assert loaded().n == 6
    assert copied().total == 2
    assert creator.state_dict()["total"] == 2


# ----------------------------------------------------------------------------------------- state


def test_construction_leaves_statistics_as_in_a_fresh_env():
    assert EnvCreator(Tally).state_dict()["total"] == 0


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_what_one_copy_updates_the_others_see(make):
    creator = EnvCreator(Tally)
    env = make(4, creator)

    env.rollout(25, break_when_any_done=False)
    numbers = [number for own in env.numbers for number in own]
    env.add_part()
    parts = [part.tolist() for part in env.part]
    env.close()

    assert sorted(numbers) == list(range(100))
    assert creator.state_dict()["total"] == 100
    assert parts == [[2.0, 2.0]] * 4
    assert creator().total == 100


def test_loading_a_state_shows_in_all_copies():
    creator = EnvCreator(Tally)
    env = ParallelEnv(2, creator, num_processes=1)
    env.start()
    state = creator.state_dict()
    state["total"] += 7
    state["weight"] *= 3

    creator.load_state_dict(state)
    totals, weights = list(env.total), [weight.tolist() for weight in env.weight]
    env.close()

    assert totals == [7, 7]
    assert weights == [[3.0] * 3] * 2


def test_a_state_of_other_entries_is_refused():
    creator = EnvCreator(Tally)

    with pytest.raises(MissingKeyError, match=r"'part', 'total', 'weight'"):
        creator.load_state_dict({"total": torch.zeros(())})


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_a_state_that_is_not_shared_is_where_each_copy_begins(make):
    creator = EnvCreator(Tally, share_memory=False)
    creator.load_state_dict({**creator.state_dict(), "total": torch.tensor(10)})
    env = make(2, creator)

    env.rollout(3)
    totals = list(env.total)
    env.close()

    assert totals == [13, 13]
    assert creator.state_dict()["total"] == 10


def test_an_env_without_state_is_made_as_it_is():
    creator = EnvCreator(Count, n=3)

    assert creator.state_dict() == {}
    assert creator().rollout(3)["next", "count"].flatten().tolist() == [1, 2, 3]


def test_a_state_outlives_no_maker():
    state = SharedState({"x": torch.zeros(1)})
    pickled = pickle.dumps(state)
    other = pickle.loads(pickled)
    other.tensors["x"] += 1
    seen = state.tensors["x"].item()
    del state, other

    with pytest.raises(SharedMemoryError, match=r"must still run.*share_memory=False"):
        pickle.loads(pickled)
    assert seen == 1


@pytest.mark.parametrize("lies_there", [b"", b"x" * 4096], ids=["less", "as much"])
def test_what_lies_where_a_state_was_is_not_taken_for_it(tmp_path, lies_there):
    """As on another machine, where the path of the maker's memory leads to anything."""
    attach, (_, *arguments) = SharedState({"x": torch.zeros(1)}).__reduce__()
    path = tmp_path / "other"
    path.write_bytes(lies_there)

    with pytest.raises(SharedMemoryError, match=r"on this machine.*share_memory=False"):
        attach(str(path), *arguments)

    assert path.read_bytes() == lies_there


def test_a_lock_may_be_taken_twice_by_its_holder():
    state = SharedState({})

    with state.lock, state.lock:
        pass
    with state.lock:
        pass


class Nested(Tally):
    """Parameters in a module of its own, and a buffer that appears at the first step."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.BatchNorm1d(2)

    def _step(self, td):
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(2))
        self.late += 1
        return super()._step(td)


def test_nested_and_late_state_is_shared_too():
    creator = EnvCreator(Nested)
    one, other = creator(), creator()

    one.rollout(3)
    one.net.running_mean += 2

    assert other.net.running_mean.tolist() == [2.0, 2.0]
    assert creator.state_dict()["late"].tolist() == [4.0, 4.0]


def test_where_open_files_have_no_path_a_file_serves_and_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr("envkit.batched.shared_state._OPEN_FILES", "/nowhere/{pid}/{fd}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    state = SharedState({"x": torch.zeros(3)})
    other = pickle.loads(pickle.dumps(state))
    other.tensors["x"] += 2
    seen, files = state.tensors["x"].tolist(), list(tmp_path.iterdir())
    del state

    assert seen == [2, 2, 2]
    assert len(files) == 1
    assert not list(tmp_path.iterdir())
