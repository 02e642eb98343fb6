"""Steps read where the sub-envs wrote them, beside the same steps as TensorDicts."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import AsyncEnvPool, GymWrapper, SerialEnv, StepCounter, TransformedEnv
from envkit.errors import ClosedEnvError, InputError

LENGTHS = (2, 3, 5)


class Sums(gymnasium.Env):
    """Adds up its actions; cut after ``length`` steps, ends beyond 6; raises at its step number ``fatal``."""

    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length=5, fatal=None):
        self.length, self.fatal, self.count = length, fatal, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sum, self.steps = 0, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == self.fatal:
            raise RuntimeError("broken")
        self.sum, self.steps = self.sum + int(action), self.steps + 1
        ended = self.sum > 6, self.steps >= self.length
        return np.array([self.sum], np.float32), float(action), *ended, {}


def rows(**options):
    makers = [partial(lambda length: GymWrapper(Sums(length)), length) for length in LENGTHS]
    return SerialEnv(len(LENGTHS), makers, **options)


def encoded(env, actions):
    return env.full_action_spec["action"].encode(torch.tensor(actions))


def by_key(moment):
    return {str(key): np.array(value) for key, value in moment.items()}


def flat(td):
    return {str(key): value.numpy() for key, value in td.items(True, True) if key != "action"}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and np.array_equal(got[key], value), key


ACTIONS = st.tuples(*[st.integers(0, 2)] * len(LENGTHS))
MASKS = st.none() | st.tuples(*[st.booleans()] * len(LENGTHS))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["in place", "alike", "step", "reset"]), ACTIONS, MASKS),
        max_size=12,
    )
)
def test_they_give_what_step_and_maybe_reset_gives_whatever_comes_between(program):
    env, twin = rows(), rows()
    env.reset()
    root, place = twin.reset(), env._runs().in_place()
    for kind, actions, chosen in program:
        action = encoded(env, actions)
        mask = None if chosen is None else np.array(chosen)
        masks = {} if mask is None else {"_step": torch.from_numpy(mask)}
        if kind == "reset":
            begun = torch.tensor(chosen or [True] * 3)[:, None]
            if begun.any():
                env.reset(place.root().set("_reset", begun))
                root = twin.reset(root.set("_reset", begun))
        elif kind == "step":
            td = env.step(place.root().update({"action": action, **masks}))
            env.maybe_reset(env.step_mdp(td))
            td = twin.step(root.update({"action": action, **masks}))
            root = twin.maybe_reset(twin.step_mdp(td))
        else:
            data, root = twin.step_and_maybe_reset(root.update({"action": action, **masks}))
            if kind == "in place":
                following, _ = place.advance({("action",): action}, mask)
                assert_same(by_key(following), flat(data["next"]))
            else:
                env.step_and_maybe_reset(place.root().update({"action": action, **masks}))

        assert_same(flat(place.root()), flat(root))


def test_actions_of_rows_that_are_not_stepped_may_be_anything():
    env = rows()
    env.reset()
    wild = np.array([[0, 1, 0], [7, 7, 7], [0, 0, 1]])

    following, _ = (
        env._runs().in_place().advance({("action",): wild}, np.array([True, False, True]))
    )

    assert following["observation"][:, 0].tolist() == [1, 0, 2]
    with pytest.raises(InputError, match="row 1"):
        env._runs().in_place().advance({("action",): wild}, None)
    assert env._runs().in_place().root()["observation"][:, 0].tolist() == [1, 0, 2]


def test_a_row_that_was_lost_is_cut_and_begins_anew():
    env = SerialEnv(
        2,
        [partial(GymWrapper, Sums(9)), lambda: GymWrapper(Sums(9, fatal=3))],
        on_worker_failure="restart",
        max_restarts=1,
    )
    env.reset()
    place, steps = env._runs().in_place(), []

    for _ in range(3):
        following, root = place.advance({("action",): encoded(env, [1, 2])}, None)
        steps.append(
            [
                following["observation"][1, 0],
                following["truncated"][1, 0],
                root["observation"][1, 0],
            ]
        )

    assert steps == [[2, False, 2], [4, False, 4], [4, True, 0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: rows(use_buffers=False),
        lambda: rows(share_individual_td=True),
        lambda: TransformedEnv(rows(), StepCounter()),
        lambda: AsyncEnvPool([lambda: GymWrapper(Sums())] * 2, backend="threading"),
    ],
    ids=["TensorDicts", "rows of their own", "transforms", "asynchronous"],
)
def test_where_data_is_not_in_rows_there_are_only_tensordicts(make, opened):
    env = opened(make())
    env.reset()

    assert env._runs().in_place() is None


def test_they_end_with_the_pool():
    env = rows()
    env.reset()
    place = env._runs().in_place()

    env.close()

    assert not place.is_current()
    env.reset()
    assert not place.is_current() and env._runs().in_place().is_current()


def test_what_they_were_asked_for_says_that_the_env_is_closed():
    env = rows()
    env.reset()
    place = env._runs().in_place()
    action = encoded(env, [0, 0, 0])
    env.close()

    with pytest.raises(ClosedEnvError):
        place.advance({("action",): action}, None)
