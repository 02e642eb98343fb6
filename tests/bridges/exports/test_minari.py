"""Recorded steps as Minari datasets: Minari's loader works on all of them, and they come back equal."""

from __future__ import annotations

import gc
import json
import os
import pickle
import weakref
from functools import partial

import gymnasium
import minari
import numpy as np
import pytest
import torch
from minari.data_collector import EpisodeBuffer
from tensordict import TensorDict

import envkit
from envkit import (
    Collector,
    GymEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    from_minari,
    from_parquet,
    to_minari,
    to_parquet,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingFileError,
    MissingKeyError,
    OptionError,
    WriteError,
)
from tests.bridges.exports.test_dataset_files import assert_equal
from tests.zoo.envs import Count
from tests.zoo.shaped_envs import Groups, Wordy

cartpole = partial(GymEnv, "CartPole-v1")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Set the folder of Minari's datasets to one of the test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def played(env, steps: int):
    torch.manual_seed(0)
    env.set_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def one_by_one(data):
    """Give the steps row after row, with the last of each row truncated as the end of the data does."""
    rows = data.clone().reshape(-1, data.shape[-1])
    done = rows["next", "done"][:, -1]
    if "truncated" in rows["next"].keys():
        rows["next", "truncated"][:, -1] |= ~done
    rows["next", "done"][:, -1] = True
    flat = rows.reshape(-1)
    flat.names = ["time"]
    return flat


IDS = ("collector", "traj_ids")


def assert_comes_back(dataset_id: str, written: TensorDict) -> None:
    """Compare what is read with what was written; where that had no trajectory ids, they count the episodes."""
    loaded = from_minari(dataset_id)
    if IDS not in written.keys(True):
        last = loaded["next", "done"].flatten().int()
        assert loaded[IDS].equal((last.cumsum(0) - last).to(torch.int64))
        loaded = loaded.exclude(IDS[0])
    assert_equal(loaded, written)


@pytest.mark.parametrize("make", [cartpole, Count, Wordy])
@pytest.mark.parametrize("knows_env", [True, False])
def test_a_rollout_comes_back_as_it_was(make, knows_env):
    env = make()
    data = played(env, 30)

    to_minari(data, "mine-v0", env=env if knows_env else None)

    assert_comes_back("mine-v0", one_by_one(data))


def test_minari_reads_episodes_as_gym_wrote_them(opened):
    env = opened(SerialEnv(2, cartpole))
    data = played(env, 60)

    dataset = to_minari(data, "cart/random-v3", env=env, author="me", algorithm_name="random")

    episodes = list(minari.load_dataset("cart/random-v3").iterate_episodes())
    lengths = [len(episode) for episode in episodes]
    assert sum(lengths) == dataset.total_steps == 120
    assert sum(one.truncations.sum() for one in episodes) == 2  # one cut in each row
    assert all(one.terminations[-1] or one.truncations[-1] for one in episodes)
    first = episodes[0]
    assert first.observations.shape == (lengths[0] + 1, 4)
    assert np.array_equal(first.actions, data["action"][0, : lengths[0]].argmax(-1).numpy())
    assert dataset.observation_space.contains(first.observations[-1])
    assert dataset.action_space == gymnasium.spaces.Discrete(2)
    assert len(dataset.sample_episodes(2)) == 2
    assert dataset.storage.metadata["author"] == {"me"}
    assert "cart/random-v3" in minari.list_local_datasets()
    assert "cart" in minari.namespace.list_local_namespaces()


def test_a_collector_is_written_as_it_comes(opened):
    kept = []

    def make():
        return SerialEnv(2, cartpole)

    with Collector(make, frames_per_batch=24, total_frames=240) as collector:
        batches = (kept.append(batch.clone()) or batch for batch in collector)
        dataset = to_minari(batches, "cart-v0", env=opened(make()))

    data = torch.cat(kept, -1)
    ids = data["collector", "traj_ids"].unique(return_counts=True)
    assert sorted(map(len, dataset)) == sorted(ids[1].tolist())
    assert sum(one.rewards.sum() for one in dataset) == data["next", "reward"].sum()
    for one in dataset:
        assert one.observations.shape == (len(one) + 1, 4)
    assert dataset.filter_episodes(lambda one: True).total_steps == 240  # by the metadata of each


def test_what_else_the_data_holds_is_among_the_infos():
    env = TransformedEnv(cartpole(), StepCounter())
    data = played(env, 30)
    data["chance"] = torch.rand(30)

    dataset = to_minari(data, "cart-v0", env=cartpole())

    assert dataset[0].infos["step_count"].shape == (len(dataset[0]) + 1, 1)
    assert dataset[0].infos["chance"].shape == (len(dataset[0]),)
    assert_comes_back("cart-v0", one_by_one(data))


def test_indices_stand_for_one_hot_observations():
    env = GymEnv("FrozenLake-v1")
    data = played(env, 30)

    dataset = to_minari(data, "lake-v0", env=env)

    assert dataset.observation_space == gymnasium.spaces.Discrete(16)
    assert dataset.recover_environment().observation_space == dataset.observation_space
    assert_comes_back("lake-v0", one_by_one(data))


def test_nothing_is_pickled(monkeypatch):
    env = cartpole()
    data = played(env, 30)
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.delattr(pickle, name)

    to_minari(data, "mine-v0", env=env)

    assert_comes_back("mine-v0", one_by_one(data))


# ---------------------------------------------------------------------------------------- spaces


class Counted(gymnasium.Env):
    """Shows which action was taken last, counted from where its spaces begin."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def _first(self):
        return np.asarray(self.action_space.start) + 0

    def reset(self, *, seed=None, options=None):
        return self._first(), {}

    def step(self, action):
        return np.asarray(action), 0.0, False, False, {}


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Discrete(4, start=-3),
        gymnasium.spaces.MultiDiscrete([2, 3], start=[5, -1]),
        gymnasium.spaces.MultiDiscrete([3, 3], start=[5, -1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("is_pool", [False, True])
def test_options_are_counted_as_gymnasium_counts_them(space, categorical, is_pool):
    def make():
        return envkit.GymWrapper(Counted(space), categorical_action_encoding=categorical)

    env = SerialEnv(2, make) if is_pool else make()
    data = played(env, 12)

    dataset = to_minari(data, "mine-v0", env=env)

    episode = dataset[0]
    assert dataset.action_space == dataset.observation_space == space
    assert all(np.asarray(one) in space for one in episode.actions)
    assert np.array_equal(episode.observations[1:], episode.actions)
    assert_comes_back("mine-v0", one_by_one(data))


def test_an_action_of_another_dtype_is_told_how_to_convert():
    env = GymEnv("Pendulum-v1")
    data = env.rollout(3)
    data["action"] = data["action"].double()

    with pytest.raises(
        ArgumentError, match=r"'action' is float64 .* float32.*\.to\(torch.float32\)"
    ):
        to_minari(data, "swing-v0", env=env)


def test_the_state_of_a_simulator_is_left_out():
    data = Count().rollout(5)
    with_state = data.clone()
    with_state["state", "floats"] = with_state["next", "state", "floats"] = torch.zeros(5, 2)

    to_minari(with_state, "mine-v0")

    assert_comes_back("mine-v0", one_by_one(data))


# ---------------------------------------------------------------------------------------- of others


def episode(env, seed):
    """Play one episode with random actions, as Minari gathers it."""
    observations, infos = [env.reset(seed=seed)[0]], [0]
    actions, rewards, terminations, truncations = [], [], [], []
    while not terminations or not terminations[-1]:
        actions.append(env.action_space.sample())
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        for values, value in (
            (observations, observation),
            (rewards, reward),
            (terminations, terminated),
            (truncations, truncated),
            (infos, len(infos)),
        ):
            values.append(value)
    return EpisodeBuffer(
        observations=observations,
        actions=actions,
        rewards=rewards,
        terminations=terminations,
        truncations=truncations,
        infos={"clock": infos},
    )


def test_a_dataset_of_minari_itself_is_read():
    env = gymnasium.make("CartPole-v1")
    names = ("algorithm_name", "author", "author_email", "code_permalink", "description")
    told = dict.fromkeys(names, "me")
    dataset = minari.create_dataset_from_buffers(
        "theirs-v0", [episode(env, seed) for seed in (0, 1)], env, env, **told
    )
    env.close()

    data = from_minari("theirs-v0")

    assert data.shape == (dataset.total_steps,) and data.names == ["time"]
    first, length = dataset[0], len(dataset[0])
    assert np.array_equal(data["observation"][:length].numpy(), first.observations[:-1])
    assert np.array_equal(data["next", "observation"][:length].numpy(), first.observations[1:])
    assert np.array_equal(data["action"][:length].numpy(), first.actions)
    assert data["next", "done"].sum() == 2 and not data["done"].any()
    assert data["collector", "traj_ids"].unique().tolist() == [0, 1]
    assert torch.equal(data["next", "info", "clock"], data["info", "clock"] + 1)


def test_a_dataset_of_version_0_2_is_read():
    layout = {"version": 1, "rows": [], "names": ["time"], "nodes": [[["next"], []]]}
    shapes = {"action": [3], "count": [], "chance": []}
    shapes |= {"next.count": [], "next.reward": [1], "next.done": [1], "done": [1]}
    dtypes = {"action": "int64", "chance": "float32", "next.reward": "float32"}
    dtypes |= {"next.done": "bool", "done": "bool"}
    layout["columns"] = [
        {"path": name.split("."), "name": name, "dtype": dtypes.get(name, "int64"), "shape": shape}
        for name, shape in shapes.items()
    ]
    roles = {
        "observations": [["count"]],
        "actions": [["action"]],
        "reward": ["reward"],
        "infos": [],
        "alone": [["chance"]],
        "choices": [[["action"], [3], True]],
        "starts": [[["count"], 5]],
    }
    metadata = dict.fromkeys(
        ("algorithm_name", "author", "author_email", "code_permalink", "description"), "me"
    )
    buffer = EpisodeBuffer(
        observations=np.array([5, 6, 7]),
        actions=np.array([2, 0]),
        rewards=np.array([1, 2], np.float32),
        terminations=np.array([False, True]),
        truncations=np.array([False, False]),
        infos={"chance": np.array([0.5, 0.25], np.float32)},
    )
    spaces = {
        "observation_space": gymnasium.spaces.Discrete(9, start=5),
        "action_space": gymnasium.spaces.Discrete(3),
    }
    written = minari.create_dataset_from_buffers(
        "mine-v0", [buffer], "CartPole-v1", "CartPole-v1", **spaces, **metadata
    )
    written.storage.update_metadata(
        {"envkit": {"layout": json.dumps({**layout, "on_device": False}), "roles": roles}}
    )

    data = from_minari("mine-v0")

    assert data["action"].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert data["count"].tolist() == [0, 1] and data["next", "count"].tolist() == [1, 2]
    assert data["chance"].tolist() == [0.5, 0.25] and data.names == ["time"]
    assert data["next", "reward"].tolist() == [[1.0], [2.0]]
    assert data["next", "done"].tolist() == [[False], [True]] and not data["done"].any()


# ---------------------------------------------------------------------------------------- streams


def test_batches_are_not_kept():
    alive, most = weakref.WeakSet(), []

    def batches():
        for _ in range(30):
            batch = Count(5).rollout(4)  # cut by the reset that follows
            alive.add(batch["action"])
            most.append(len(alive))
            yield batch
            del batch
            gc.collect(0)

    dataset = to_minari(batches(), "mine-v0")

    assert dataset.total_episodes == len(most) == 30 and max(most) <= 3
    assert all(one.truncations.tolist() == [False] * 3 + [True] for one in dataset)


@pytest.mark.slow
def test_asynchronous_workers_and_their_env_are_written(tmp_path, opened):
    kept = []
    env = opened(ParallelEnv(2, cartpole))
    options = {"backend": "process", "num_collectors": 2, "sync": False}

    with Collector(cartpole, frames_per_batch=50, total_frames=600, **options) as collector:
        batches = (kept.append(batch.clone()) or batch for batch in collector)
        dataset = to_minari(batches, "cart-v0", env=env)
    to_parquet(kept, tmp_path / "cart.parquet")

    data = torch.cat(kept, -1)
    ids = data["collector", "traj_ids"]
    assert_equal(from_parquet(tmp_path / "cart.parquet"), data)
    assert dataset.total_steps == 600 and dataset.total_episodes == len(ids.unique())
    assert sorted(map(len, dataset)) == sorted(ids.unique(return_counts=True)[1].tolist())
    assert dataset.recover_environment().spec.id == "CartPole-v1"


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("dataset_id", "error"),
    [
        ("cart", ArgumentError),
        ("cart-0", ArgumentError),
        ("../cart-v0", ArgumentError),
        ("a b-v0", ArgumentError),
        ("", ArgumentError),
        (3, ArgumentTypeError),
    ],
)
def test_an_id_of_another_form_is_told_before_anything_is_collected(folder, dataset_id, error):
    def batches():
        pytest.fail("collected")
        yield

    with pytest.raises(error, match=r"dataset_id is .*, but must (be|have)"):
        to_minari(batches(), dataset_id)
    with pytest.raises(error, match=r"dataset_id is .*, but must (be|have)"):
        from_minari(dataset_id)

    assert not folder.exists()


def test_an_id_that_is_there_is_told_before_anything_is_collected():
    data = Count().rollout(3)
    to_minari(data, "mine-v0")

    with pytest.raises(ArgumentError, match=r"'mine-v0' in .* already.*delete_dataset"):
        to_minari((pytest.fail("collected") for _ in range(1)), "mine-v0")

    assert_comes_back("mine-v0", one_by_one(data))
    with pytest.raises(FileNotFoundError, match=r"no dataset 'mine-v1'.*download_dataset"):
        from_minari("mine-v1")


def test_a_full_disk_leaves_nothing(folder, full_disk):
    env = cartpole()
    rollouts = (played(env, 500) for _ in range(9))

    with full_disk(100_000), pytest.raises(WriteError, match=r"cannot be written: File too large"):
        to_minari(rollouts, "deep/er/cart-v0", env=env)

    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_collected(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "file" / "below"))

    with pytest.raises(WriteError, match=r"mine-v0 cannot be written: Not a directory"):
        to_minari((pytest.fail("collected") for _ in range(1)), "mine-v0")
    with pytest.raises(
        MissingFileError, match=r"no dataset 'mine-v0': .* cannot be made: .*Set MINARI"
    ):
        from_minari("mine-v0")


def test_a_collector_that_fails_leaves_nothing(folder):
    def batches():
        yield Count().rollout(3)
        raise TimeoutError("the simulator hangs")

    with pytest.raises(TimeoutError, match=r"^the simulator hangs$"):
        to_minari(batches(), "deep/mine-v0")

    assert os.listdir(folder) == []


def test_data_of_another_env_is_refused(folder):
    data = cartpole().rollout(3)
    wide, double = data.clone(), data.clone()
    for key in ("observation", ("next", "observation")):
        wide[key] = torch.zeros(3, 5)
        double[key] = data[key].double()

    for wrong, told in ((wide, r"float32 of shape \(5,\)"), (double, r"float64 of shape \(4,\)")):
        with pytest.raises(
            ArgumentError, match=f"'observation'.* is {told}, but env gives float32"
        ):
            to_minari(wrong, "mine-v0", env=cartpole())

    assert not folder.exists() or os.listdir(folder) == []


def test_what_minari_cannot_hold_is_refused(folder):
    data = Count().rollout(3)
    skipped = data.clone()
    skipped["next", "count"] += 10
    env = cartpole()
    played_wrong = env.rollout(3)
    twice = played_wrong.clone()
    twice["action"] *= 2
    played_wrong["action"].zero_()

    with pytest.raises(MissingKeyError, match="actions that Minari needs are not in the data"):
        to_minari(data.exclude("action"), "mine-v0")
    with pytest.raises(MissingKeyError, match="'observation'"):
        to_minari(data, "mine-v0", env=env)
    with pytest.raises(MissingKeyError, match="reward that Minari needs"):
        to_minari(Groups().rollout(3), "mine-v0")
    with pytest.raises(ArgumentError, match="'count' of a step is not what"):
        to_minari(skipped, "mine-v0")
    for wrong in (played_wrong, twice):
        with pytest.raises(ArgumentError, match="'action' holds codes that are not one-hot"):
            to_minari(wrong, "mine-v0", env=env)
    with pytest.raises(OptionError, match="Did you mean 'author'"):
        to_minari(data, "mine-v0", autor="me")
    with pytest.raises(ArgumentTypeError, match=r"env is .*, of type TimeLimit.*GymWrapper"):
        to_minari(data, "mine-v0", env=gymnasium.make("CartPole-v1"))

    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"author": 3}, "author is 3, .* a list of texts"),
        ({"author_email": ["a@b.c", None]}, "author_email is .* a list of texts"),
        ({"requirements": [1]}, "requirements is .* a list of texts"),
        ({"description": print}, "description is .* a text"),
        ({"code_permalink": 3}, "code_permalink is 3, .* a text"),
        ({"ref_min_score": "low"}, "ref_min_score is 'low', .* a number"),
    ],
)
def test_metadata_of_another_type_is_told_before_anything_is_collected(metadata, message):
    with pytest.raises(ArgumentTypeError, match=message):
        to_minari((pytest.fail("collected") for _ in range(1)), "mine-v0", **metadata)


def test_metadata_is_kept():
    given = {"author": ["b", "a"], "requirements": ["envkit"], "ref_max_score": 9.5}

    dataset = to_minari(Count().rollout(3), "mine-v0", description="Counted.", **given)

    kept = dataset.storage.metadata
    assert set(kept["author"]) == {"a", "b"} and kept["requirements"] == ["envkit"]
    assert (kept["description"], kept["ref_max_score"]) == ("Counted.", 9.5)


@pytest.mark.parametrize("name", ["main_data.hdf5", "metadata.json"])
@pytest.mark.parametrize("left", [None, 0, 0.5])
def test_a_damaged_dataset_is_told_with_its_folder(folder, name, left):
    to_minari(Count().rollout(3), "mine-v0")
    file = folder / "mine-v0" / "data" / name
    held = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(held[: int(left * len(held))])

    with pytest.raises(
        ArgumentError, match=r"mine-v0 is damaged, or is not a whole Minari dataset"
    ):
        from_minari("mine-v0")
