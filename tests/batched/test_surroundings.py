"""What a batched env takes over from the process that makes it, and what it leaves alone there."""

from __future__ import annotations

import itertools
import sys
import threading
import types
from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from tensordict import TensorDict

from envkit import EnvCreator, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, VecNorm
from envkit.env.torch_threads import ThreadLimit
from envkit.errors import ArgumentError, EnvkitError, MissingKeyError, WorkerError
from envkit.specs import Composite, Unbounded
from envkit.transport.launch import choose_start_method
from envkit_bridges.gym.backend import gym_backend, set_gym_backend
from tests.zoo.envs import Count

both = pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=1)], ids=["serial", "parallel"]
)


class Draws(Count):
    """Observes a number of torch's global generator, of this process."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(draw=Unbounded((1,)))

    def _out(self):
        return super()._out().exclude("count").set("draw", torch.rand(1))


# ---------------------------------------------------------------------------------- random numbers


def test_workers_draw_different_numbers_from_torch_too(opened):
    env = opened(ParallelEnv(3, Draws, num_processes=3))

    drawn = env.reset()["draw"].flatten().tolist()
    env.close()
    again = env.reset()["draw"].flatten().tolist()

    assert len({*drawn, *again}) == 6


def test_a_serial_env_leaves_the_generator_of_its_process_alone():
    torch.manual_seed(3)
    env = SerialEnv(1, Draws)

    env.start()
    first = torch.rand(1)

    torch.manual_seed(3)
    env = Draws()
    _ = env.fake_tensordict()
    assert torch.equal(first, torch.rand(1))


# ------------------------------------------------------------------------------------ gym backends


def library() -> types.ModuleType:
    """A gym library whose CartPole begins at its right end."""
    module = types.ModuleType("made")

    def make(name, **kwargs):
        class Moved(gymnasium.ObservationWrapper):
            def observation(self, observation):
                return observation + 1

        return Moved(gymnasium.make(name, **kwargs))

    module.make, module.spaces = make, gymnasium.spaces
    return module


@both
@pytest.mark.parametrize("started_inside", [True, False])
def test_sub_envs_are_made_by_the_gym_library_that_is_chosen(opened, batched, started_inside):
    with set_gym_backend(library()):
        single = GymEnv("CartPole-v1")
        env = opened(batched(1, lambda: GymEnv("CartPole-v1")))
        if started_inside:
            env.start()

    single.set_seed(0)
    env.set_seed(0)
    td = env.reset()

    assert gym_backend() is gymnasium
    assert (td["observation"] > 0.9).all()
    assert torch.equal(td["observation"][0], single.reset()["observation"])


@both
def test_a_gym_library_chosen_when_sub_envs_are_built_serves_too(opened, batched):
    env = opened(batched(1, lambda: GymEnv("CartPole-v1")))

    with set_gym_backend(library()):
        env.start()

    assert (env.reset()["observation"] > 0.9).all()


# ---------------------------------------------------------------------------------- registered ids

ids = itertools.count()


@pytest.fixture
def id():
    """A name of its own; after the test the registry is as before."""
    before = dict(gymnasium.registry)
    yield f"Carried{next(ids)}-v0"
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def by_class(id, cls):
    gymnasium.register(id, entry_point=cls)


def by_function(id, cls):
    gymnasium.register(id, entry_point=lambda **kwargs: cls(**kwargs))


def by_name_in_the_script(id, cls):
    script = sys.modules["__main__"]
    script.CarriedEnv = cls  # type: ignore[attr-defined]
    gymnasium.register(id, entry_point="__main__:CarriedEnv")


def by_envkit(id, cls):
    GymEnv.register_gym(id, entry_point=lambda **kwargs: Count(7, **kwargs))


@pytest.mark.parametrize("register", [by_class, by_function, by_name_in_the_script, by_envkit])
@pytest.mark.parametrize("method", [None, pytest.param("spawn", marks=pytest.mark.slow)])
def test_ids_that_the_caller_registered_are_known_in_workers(opened, id, register, method):  # B2
    class Mine(CartPoleEnv):
        n = 7

    env = opened(ParallelEnv(2, lambda: GymEnv(id), num_processes=1, mp_start_method=method))
    opened(ParallelEnv(1, Count)).start()  # so the fork server runs, which never sees the id
    register(id, Mine)

    data = env.rollout(2)

    assert data.shape == (2, 2)
    of_class = env.unwrapped.n if register is not by_envkit else env.unwrapped.envkit_env.n
    assert list(of_class) == [7, 7]


def test_an_id_that_the_caller_registered_anew_means_the_same_in_workers(opened, id):
    entry = gymnasium.spec("CartPole-v1")
    del gymnasium.registry[entry.id]
    gymnasium.register(entry.id, entry_point=entry.entry_point, max_episode_steps=3)

    data = opened(ParallelEnv(1, lambda: GymEnv("CartPole-v1"))).rollout(50)

    assert data.shape == (1, 3)


@pytest.mark.parametrize("where", ["entry point", "keywords"])
def test_an_id_that_cannot_be_carried_says_what_to_do(opened, id, where):
    lock = threading.Lock()

    def locked(held=lock, **kwargs):
        return CartPoleEnv(**kwargs)

    if where == "entry point":
        gymnasium.register(id, entry_point=locked)
    else:
        gymnasium.register(id, entry_point=CartPoleEnv, kwargs={"lock": lock})
    opened(ParallelEnv(1, Count)).start()  # others do not mind
    env = opened(ParallelEnv(1, lambda: GymEnv(id)))

    with pytest.raises(
        WorkerError, match=rf"(?s){id}.*cannot be sent here.*lock.*Register it inside"
    ):
        env.start()


def test_what_an_id_was_registered_with_is_imported_only_by_envs_that_need_it(
    opened, id, tmp_path, monkeypatch
):
    (tmp_path / "carried_module.py").write_text(
        "import os, pathlib\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Mine(CartPoleEnv): pass\n"
        "(pathlib.Path(__file__).parent / f'imported by {os.getpid()}').touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    gymnasium.register(id, entry_point=__import__("carried_module").Mine)
    importers = []

    for name in ("Pendulum-v1", id):
        env = opened(ParallelEnv(1, partial(GymEnv, name)))
        assert env.rollout(1).shape == (1, 1)
        importers.append(len(list(tmp_path.glob("imported by *"))))

    assert importers == [1, 2]


# ----------------------------------------------------------------------------------- default dtype


@pytest.fixture
def doubles():
    """Floats of torch are doubles meanwhile."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@both
@pytest.mark.usefixtures("doubles")
def test_floats_of_workers_have_the_dtype_that_the_caller_chose(opened, batched):  # B5
    env = opened(batched(1, Draws))

    assert env.reset()["draw"].dtype == torch.float64


# ----------------------------------------------------------------------------------------- threads


def test_the_threads_before_the_first_limit_come_back_after_the_last(opened):
    before = torch.get_num_threads()
    first, second = (opened(ParallelEnv(1, Count, num_threads=before + more)) for more in (1, 2))
    seen = []

    for act in (first.start, second.start, first.close, second.close):
        act()
        seen.append(torch.get_num_threads() - before)

    assert seen == [1, 2, 2, 0]


def test_the_newest_limit_that_is_left_holds():
    before = torch.get_num_threads()
    limits = [ThreadLimit(before + more) for more in (1, 2, 3)]
    seen = []

    for number in (2, 0, 1):
        limits[number].end()
        seen.append(torch.get_num_threads() - before)

    assert seen == [2, 2, 0]


# --------------------------------------------------------------------------------------- processes


def test_a_serial_env_starts_no_process(holdings):
    _, children, _ = holdings()

    SerialEnv(3, lambda: GymEnv("CartPole-v1")).rollout(5)

    assert holdings()[1] == children


def test_a_fork_server_is_the_default_where_there_is_one(monkeypatch):
    assert choose_start_method(None) == "forkserver"

    monkeypatch.delattr("os.fork")
    assert choose_start_method(None) == "spawn"


@pytest.mark.parametrize("more", [{}, {"serial_for_single": True}])
def test_an_unknown_start_method_is_told_when_the_env_is_made(more):
    with pytest.raises(ArgumentError, match="'nonsense' is unknown; use 'forkserver', 'spawn'"):
        ParallelEnv(1, Count, mp_start_method="nonsense", **more)


def test_fork_is_refused_once_jax_is_there():
    pytest.importorskip("jax")

    with pytest.raises(ArgumentError, match=r"'fork' was asked for, but JAX has been imported"):
        ParallelEnv(2, Count, mp_start_method="fork")


def test_moving_a_closed_env_starts_nothing():
    env = ParallelEnv(1, Count)
    env.set_seed(4)
    env.close()

    env.to("cpu")

    assert env.is_closed
    assert env.device == torch.device("cpu")


def test_specs_of_a_start_that_failed_are_forgotten(tmp_path):
    class Unequal(Count):
        """Observes another number of entries whenever it is built."""

        def __init__(self):
            sizes = tmp_path / "sizes"
            size = 1 + len(sizes.read_text()) if sizes.exists() else 1
            sizes.write_text("." * size)
            super().__init__()
            self.observation_spec = Composite(count=Unbounded((size,), dtype=torch.int64))

    env = SerialEnv(2, Unequal, use_buffers=True)

    for _ in range(2):
        with pytest.raises(EnvkitError, match="does not look like the first of its kind"):
            _ = env.observation_spec
    assert env.is_closed


# ------------------------------------------------------------------------------ states and keywords


def make_normed():
    return TransformedEnv(Count(50), VecNorm(["count"]))


@both
def test_what_a_transform_has_learned_is_saved_and_loaded(opened, batched):
    trained, fresh = opened(SerialEnv(2, make_normed)), opened(batched(2, make_normed))
    trained.rollout(20)

    fresh.load_state_dict(trained.state_dict())

    learned, loaded = trained.state_dict(), fresh.state_dict()
    assert learned["worker0"]
    for row in ("worker0", "worker1"):
        assert all(torch.equal(value, learned[row][name]) for name, value in loaded[row].items())
    other = SerialEnv(2, make_normed).state_dict()
    assert any(not torch.equal(other["worker0"][name], v) for name, v in learned["worker0"].items())


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_dict_of_another_number_of_envs_is_refused(count):
    state = SerialEnv(count, make_normed).state_dict()

    with pytest.raises(MissingKeyError, match=r"2 sub-envs need \['worker0', 'worker1'\].*as many"):
        SerialEnv(2, make_normed).load_state_dict(state)


@both
def test_new_keywords_win_over_those_of_a_creator(opened, batched):
    env = opened(batched(2, EnvCreator(Count, {"n": 3})))
    seen = []

    for kwargs in ({}, {"n": 9}, [{"n": 1}, {"n": 2}]):
        env.update_kwargs(kwargs)
        env.start()
        seen.append(list(env.maxs))
        env.close()

    assert seen == [[3, 3], [9, 9], [1, 2]]


# -------------------------------------------------------------------- entries that nobody declared


class Talks(Count):
    """Returns an entry that its specs do not name."""

    def _step(self, td):
        return super()._step(td).set("word", torch.ones(1))


@pytest.mark.parametrize(
    "make",
    [
        Talks,
        partial(SerialEnv, 2, Talks),
        partial(SerialEnv, 2, Talks, use_buffers=True),
        partial(SerialEnv, 2, [partial(Talks, 5), partial(Talks, 6)], share_individual_td=True),
        partial(ParallelEnv, 2, Talks, use_buffers=False, num_processes=1),
    ],
    ids=["one", "tds", "rows", "own rows", "parallel tds"],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_rollout_holds_what_is_declared(opened, make, steps):
    data = opened(make()).rollout(steps)

    seen = {str(key) for key in data.keys(True, True) if key[0] == "next"}
    assert "word" not in str(seen)
    assert "word" not in data.keys()
    assert data.shape[-1] == steps


def test_all_ways_of_a_step_drop_what_is_not_declared():
    for use_buffers in (True, False):
        env = SerialEnv(2, Talks, use_buffers=use_buffers)
        td = env.rand_action(env.reset()).set("_step", torch.tensor([True, False]))
        assert set(env.step(td)["next"].keys()) == {"count", "done", "terminated", "reward"}


# --------------------------------------------------------------------- policies that do more than act


class Half:
    """Steps the first row only, from call ``since`` on."""

    def __init__(self, since: int):
        self.calls, self.since = 0, since

    def __call__(self, td):
        self.calls += 1
        td = td.set("action", torch.ones((*td.batch_size, 1), dtype=torch.int64))
        if self.calls > self.since:
            td = td.set("_step", torch.tensor([True, False]))
        return td


@pytest.mark.parametrize("since", [0, 1, 3, 70])
@pytest.mark.parametrize("use_buffers", [True, False])
@both
def test_a_policy_may_mask_steps(opened, batched, use_buffers, since):
    env = opened(batched(2, partial(Count, 100), use_buffers=use_buffers))

    data = env.rollout(since + 3, Half(since), break_when_any_done=False)
    after = env.rollout(3, break_when_any_done=False)

    stepped = [*range(1, since + 1), *[since] * 3]
    assert data["next", "count"][0, :, 0].tolist() == list(range(1, since + 4))
    assert data["next", "count"][1, :, 0].tolist() == stepped
    assert data["count"][1, :, 0].tolist() == [0, *stepped[:-1]]
    assert data["next", "reward"][1, :, 0].tolist() == [1.0] * since + [0.0] * 3
    assert "_step" not in data.keys()
    assert after["count"][:, :, 0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_policy_may_write_under_next_from_any_step_on(use_buffers):
    def policy(td):
        td = td.set("action", torch.ones(2, 1, dtype=torch.int64))
        late = td["count"][0] >= 2
        return td.set(("next", "reward"), torch.full((2, 1), 7.0)) if late else td

    env = SerialEnv(2, Count, use_buffers=use_buffers)

    data = env.rollout(4, policy, break_when_any_done=False)

    assert data["next", "reward"][..., 0].tolist() == [[1.0, 1.0, 7.0, 7.0]] * 2
    assert data["next", "count"][..., 0].tolist() == [[1, 2, 3, 4]] * 2


def remember(td):
    hidden = td.get("hidden", torch.zeros(2, 1))
    return td.set("action", torch.ones(2, 1, dtype=torch.int64)).set("hidden", hidden + 1)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_writing_into_what_a_policy_wrote_changes_nothing_else(use_buffers):
    env = SerialEnv(2, Count, policy_proof=remember, use_buffers=use_buffers)
    td = env.step(remember(env.reset()))
    following = env.step_mdp(td)

    td["hidden"].zero_()
    kept = td["next", "hidden"].tolist()
    td["next", "hidden"].zero_()
    fresh = env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))

    assert kept == [[1.0], [1.0]]
    assert fresh["hidden"].tolist() == [[0.0], [1.0]]
    assert following["count"].tolist() == [[1], [1]]
