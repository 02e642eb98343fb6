"""What evaluations refuse, and with which way out."""

from __future__ import annotations

from functools import cache

import gymnasium
from tensordict import TensorDict

from envkit import SerialEnv, episode_stats, evaluate, show_rollout
from envkit.errors import ArgumentError, ArgumentTypeError, DataTypeError, MissingKeyError
from tests.zoo.envs import Count
from tests.zoo.refusals import assert_refused, each_row


@cache
def rows() -> SerialEnv:
    env = SerialEnv(2, Count)
    env.reset()
    return env


@cache
def played() -> TensorDict:
    return rows().rollout(3, break_when_any_done=False)


REFUSALS = [
    # -- arguments
    (
        "an env of another library",
        lambda: evaluate(gymnasium.make("CartPole-v1"), None),
        TypeError,
        r"of type TimeLimit.*Wrap it: GymWrapper\(env\)",
    ),
    (
        "evaluate: of type int",
        lambda: evaluate(3, None, episodes=2),
        ArgumentTypeError,
        "of type int",
    ),
    (
        "evaluate: episodes is 0",
        lambda: evaluate(Count(), None, episodes=0),
        ArgumentError,
        "episodes is 0",
    ),
    (
        "evaluate: empty dict",
        lambda: evaluate(Count(), {}, episodes=1),
        ArgumentError,
        "empty dict",
    ),
    (
        "episode_stats: agents is 'max'",
        lambda: episode_stats(played(), agents="max"),
        ArgumentError,
        "agents is 'max'",
    ),
    (
        "episode_stats: 'score'",
        lambda: episode_stats(played(), reward_key="score"),
        MissingKeyError,
        "'score'",
    ),
    (
        "episode_stats: batch size ()",
        lambda: episode_stats(played()[0, 0]),
        ArgumentError,
        r"batch size \(\)",
    ),
    # -- others
    (
        "what is no tensordict is refused",
        lambda: show_rollout([1, 2]),
        DataTypeError,
        "td is of type list, but must be a TensorDict",
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)
