"""Entries that stack unlike shapes, as Tuple spaces of Gymnasium do: no batch and no view holds them, and says so."""

from __future__ import annotations

import gymnasium
import pytest
import torch

import envkit
from envkit import (
    AsyncEnvPool,
    Collector,
    GymEnv,
    GymWrapper,
    SerialEnv,
    episode_stats,
    evaluate,
    make,
    to_gym_vector,
    to_sb3,
    to_torchrl,
)
from envkit.errors import SpecStackError
from tests.reference.envs.zoo import uneven

TOLD = (
    r"^'observation' in the observation spec stacks the unlike shapes \[\(32,\), \(11,\), \(2,\)\], "
    r"which .* cannot hold\. Turn the Tuple .* into a Dict, .*FlattenObservation"
)


def blackjack() -> GymEnv:
    return GymEnv("Blackjack-v1")


def flat() -> GymWrapper:
    return GymWrapper(gymnasium.wrappers.FlattenObservation(gymnasium.make("Blackjack-v1")))


@pytest.mark.parametrize(
    "show",
    [
        lambda: to_gym_vector(SerialEnv(2, blackjack)),
        lambda: to_sb3(SerialEnv(2, blackjack)),
        lambda: to_torchrl(SerialEnv(2, blackjack)),
        lambda: to_torchrl(blackjack()),
        lambda: SerialEnv(2, blackjack).rollout(2),
        lambda: SerialEnv(2, blackjack, use_buffers=False).reset(),
        lambda: make("gym/Blackjack-v1", 2, backend="serial").reset(),
        lambda: AsyncEnvPool([blackjack], backend="threading").reset(),
    ],
)
def test_unlike_shapes_are_refused_in_one_line(show):
    with pytest.raises(SpecStackError, match=TOLD) as caught:
        show()

    assert "\n" not in str(caught.value)


def test_a_flattened_tuple_is_shown_by_every_view():
    vector, theirs = to_gym_vector(SerialEnv(2, flat)), to_sb3(SerialEnv(2, flat))

    shown, _ = vector.reset(seed=0)

    assert shown.shape == theirs.reset().shape == (2, 45)
    assert vector.observation_space.contains(shown)
    assert to_torchrl(flat()).rollout(3)["observation"].shape[-1] == 45


def test_agents_that_are_a_stack_of_nodes_go_into_batches():
    env = SerialEnv(2, lambda: uneven(envkit))

    shown = env.reset()["agents"]

    assert [tuple(part["seen"].shape) for part in shown.unbind(1)] == [(2, 2), (2, 3)]


def test_one_env_of_unlike_shapes_is_evaluated_and_collected():
    outcome = evaluate(blackjack(), None, 5, seed=0)
    batches = list(Collector(blackjack, frames_per_batch=6, total_frames=12))

    assert len(outcome.returns) == 5 and set(outcome.returns.tolist()) <= {-1.0, 0.0, 1.0}
    assert [batch.batch_size for batch in batches] == [(6,), (6,)]
    assert len(batches[0][3]["observation"].unbind()) == 3


def test_episodes_of_unlike_shapes_go_on_in_the_next_batch():
    env = blackjack()
    env.set_seed(0)
    hit = torch.tensor([0, 1])
    data = env.rollout(9, lambda td: td.set("action", hit), break_when_any_done=False)

    whole, cut = episode_stats(data), episode_stats([data[:1], data[1:2], data[2:]])
    apart = episode_stats([data[:1], data[4:]])

    assert whole.lengths.tolist() == cut.lengths.tolist() and max(whole.lengths) > 1
    assert len(apart.lengths) > 1
