"""`AsyncEnvPool` over EnvPool: the same numbers as all rows together, its errors, its end."""

import threading
from functools import partial

import pytest
import torch

from envkit import AsyncEnvPool, MultiThreadedEnv, check_env_specs
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyEnvError,
    InputError,
    NotResetError,
    OptionError,
    ResumeError,
    WorkerError,
)
from tests.zoo.envs import Count

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered")

ROWS = 3
KWARGS = {"max_episode_steps": 7}


@pytest.fixture
def pool(opened):
    pool = opened(AsyncEnvPool(["CartPole-v1"] * ROWS, backend="envpool", create_env_kwargs=KWARGS))
    pool.set_seed(0)
    return pool


def action_of(env, step):
    return (step // 3 + env) % 2


def test_rows_at_their_own_pace_give_what_they_give_together(pool):
    steps = {env: [] for env in range(ROWS)}
    with MultiThreadedEnv(ROWS, "CartPole-v1", create_env_kwargs=KWARGS) as together:
        together.set_seed(0)
        actions = [
            torch.tensor([action_of(env, step) for env in range(ROWS)]) for step in range(25)
        ]
        wanted = together.rollout(25, actions=actions, break_when_any_done=False)

    td = pool.reset()
    while min(map(len, steps.values())) < 25:
        envs = td["env_index"]
        chosen = [action_of(env, len(steps[env])) for env in envs]
        pool.async_step_and_maybe_reset_send(td.set("action", torch.tensor(chosen)))
        data, td = pool.async_step_and_maybe_reset_recv()
        for env, row in zip(data["env_index"], data.exclude("env_index").unbind(0), strict=True):
            steps[env].append(row)

    for env, rows in steps.items():
        seen = torch.stack(rows[:25])
        assert (seen.select(*wanted.keys(True, True)) == wanted[env]).all()
    assert wanted["next", "truncated"].any()


def test_all_at_once_it_is_an_env_like_any(pool):
    data = pool.rollout(10, break_when_any_done=False)

    check_env_specs(pool)
    assert data.shape == (ROWS, 10)
    assert data["next", "truncated"][:, 6].all() and not data["done"].any()
    assert pool.env_batch_sizes == [torch.Size([])] * ROWS


def test_steps_and_resets_are_sent_to_single_rows(pool):
    pool.reset()

    pool.async_reset_send(env_index=1)
    root = pool.async_reset_recv(env_index=1)
    pool.async_step_send(root.set("action", torch.tensor(1)), env_index=1)
    with pytest.raises(BusyEnvError, match=r"envs \[1\]"):
        pool.async_reset_send(env_index=1)
    data = pool.async_step_recv(env_index=1)

    assert root.batch_size == data.batch_size == ()
    assert data["next", "reward"] == 1
    assert (data["next", "observation"] != data["observation"]).any()


def test_a_row_that_has_ended_must_be_reset(pool):
    data = pool.rollout(7)
    assert data["next", "done"][:, -1].all()
    td = pool.step_mdp(data[:, -1].clone())
    td["env_index"] = list(range(ROWS))

    pool.async_step_send(pool.rand_action(td)[:1], env_index=[0])
    with pytest.raises(WorkerError, match="the episode of row 0 has ended"):
        pool.async_step_recv()

    assert pool.rollout(3).shape == (ROWS, 3)


def test_what_cannot_be_stepped_is_refused_before_anything_moves(pool):
    with pytest.raises(NotResetError, match="before their first reset"):
        pool.async_step_send(pool.rand_action(), env_index=[0, 1, 2])
    td = pool.reset()
    with pytest.raises(InputError, match="row 2"):
        pool.async_step_send(td.clone().set("action", torch.tensor([0, 1, 5])))

    pool.async_step_send(td.set("action", torch.tensor([0, 1, 1])))
    assert pool.async_step_recv(min_get=ROWS)["next", "reward"].eq(1).all()


def test_its_episodes_begin_again_where_a_state_dict_is_loaded(pool):
    td = pool.reset()
    with pytest.warns(UserWarning, match=r"episodes under way in EnvPool\('CartPole-v1'\)"):
        pool.load_state_dict(pool.state_dict())

    data, root = pool.step_and_maybe_reset(pool.rand_action(td))
    later = pool.step(pool.rand_action(root))

    assert data["next", "truncated"].all() and not root["done"].any()
    assert later["next", "reward"].all() and not later["next", "truncated"].any()


def test_what_the_library_cannot_do_is_told(pool):
    pool.reset()

    state = {**pool.state_dict(), "worker1": {}}
    with pytest.raises(WorkerError, match="episodes of other envs") as caught:
        pool.load_state_dict(state)
    assert isinstance(caught.value.__cause__, ResumeError)
    with pytest.raises(WorkerError, match="take no options"):
        pool.reset(options={})
    with pytest.raises(AttributeError, match="gravity"):
        _ = pool.gravity


def test_no_thread_is_left_when_it_is_closed_with_work_under_way(pool):
    pool.async_step_send(pool.rand_action(pool.reset()))

    pool.close()

    assert not [one for one in threading.enumerate() if one.name == "EnvPool results"]
    assert pool.reset().batch_size == (ROWS,)


make = partial(AsyncEnvPool, backend="envpool")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: make([]), ArgumentTypeError, r"\['CartPole-v1'\] \* 8"),
        (lambda: make([lambda: None]), ArgumentTypeError, "must be the id of an env"),
        (lambda: make(["CartPole-v1", "Pendulum-v1"]), ArgumentError, "envs of one kind"),
        (
            lambda: make(["CartPole-v1"] * 2, create_env_kwargs=[{}, KWARGS]),
            ArgumentError,
            "Pass one dict",
        ),
        (lambda: make("CartPole-v1", use_buffers=False), OptionError, "exchanged in memory"),
        (lambda: make("CartPole-v1", on_worker_failure="restart"), OptionError, "none is built"),
        (
            lambda: make(["CartPole-v1"] * 2, num_thread=1),
            OptionError,
            "'num_thread'. Did you mean",
        ),
        (lambda: make("CartPole-v1", create_env_kwargs={"foo": 1}), OptionError, "EnvPool.*'foo'"),
        (lambda: make(Count(3)), ArgumentTypeError, "must be the id of an env"),
        (lambda: make("CartPole-v9"), ArgumentError, "Did you mean"),
    ],
)
def test_what_cannot_be_a_pool_says_how_to_make_one(build, error, message):
    with pytest.raises(error, match=message):
        build()
