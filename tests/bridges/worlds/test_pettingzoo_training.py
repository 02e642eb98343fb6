"""Two agents of different kinds learn to work together, through a collector.

The speaker sees which of three landmarks is meant and cannot move; the listener moves and hears one of three
words. They are paid alike, for how near the listener is: only if both learn is much to be gained.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from envkit import Collector, PettingZooEnv, RewardSum, SerialEnv, TransformedEnv

STEPS, ROWS, BATCHES, EPOCHS = 25, 16, 40, 4
GROUPS = ("speaker", "listener")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def make_game() -> TransformedEnv:
    """Give each group the sum of its rewards so far."""
    game = PettingZooEnv("mpe/simple_speaker_listener_v4", max_cycles=STEPS)
    rewards = [(group, "reward") for group in GROUPS]
    return TransformedEnv(game, RewardSum(rewards, [(group, "return") for group in GROUPS]))


def layers(*sizes: int) -> nn.Sequential:
    parts = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*parts[:-1])


def actor(env: TransformedEnv, group: str) -> ProbabilisticTensorDictSequential:
    """Act for one group, by its own observations."""
    width = env.full_observation_spec[group, "observation"].shape[-1]
    options = env.full_action_spec[group, "action"].space.n
    net = TensorDictModule(
        layers(width, 64, 64, options),
        in_keys=[(group, "observation")],
        out_keys=[(group, "logits")],
    )
    draw = ProbabilisticTensorDictModule(
        in_keys={"logits": (group, "logits")},
        out_keys=[(group, "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=(group, "log_prob"),
    )
    return ProbabilisticTensorDictSequential(net, draw)


def to_go(reward: torch.Tensor, discount: float = 0.9) -> torch.Tensor:
    """Sum discounted rewards to come, shape (rows, steps)."""
    sums, total = [], torch.zeros(())
    for paid in reward.flip(-1).unbind(-1):
        total = paid + discount * total
        sums.append(total)
    return torch.stack(sums[::-1], -1)


def seen_by_all(data: TensorDictBase) -> torch.Tensor:
    """Give what a central critic sees: all observations, and the time."""
    time = torch.linspace(0, 1, STEPS).expand(ROWS, STEPS).unsqueeze(-1)
    return torch.cat([*(data[group, "observation"].flatten(-2) for group in GROUPS), time], -1)


def loss_of(data: TensorDictBase, actors: dict[str, nn.Module], critic: nn.Module) -> torch.Tensor:
    """PPO, an actor for each group and a critic for all."""
    target = to_go(data["next", "listener", "reward"].flatten(-2).sum(-1))
    value = critic(seen_by_all(data)).squeeze(-1)
    gain = (target - value).detach()
    gain = ((gain - gain.mean()) / gain.std()).unsqueeze(-1)
    loss = (target - value).square().mean()
    for group, act in actors.items():
        dist = act.get_dist(data)
        ratio = (dist.log_prob(data[group, "action"]) - data[group, "log_prob"]).exp()
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        loss = loss - clipped.mean() - 0.01 * dist.entropy().mean()
    return loss


def train(seed: int) -> tuple[float, list[float]]:
    """Give the mean return of an episode of random actions, and of each batch while learning."""
    torch.manual_seed(seed)
    env = SerialEnv(ROWS, make_game)
    actors = {group: actor(env, group) for group in GROUPS}
    critic = layers(
        sum(env.full_observation_spec[g, "observation"].shape[-1] for g in GROUPS) + 1, 64, 1
    )
    optimiser = torch.optim.Adam(
        [
            {"params": [p for act in actors.values() for p in act.parameters()], "lr": 3e-3},
            {"params": critic.parameters(), "lr": 1e-2},
        ]
    )
    collect = partial(Collector, env, frames_per_batch=ROWS * STEPS)
    env.set_seed(seed)
    by_chance = env.rollout(4 * STEPS, break_when_any_done=False)
    collector = collect(TensorDictSequential(*actors.values()), total_frames=BATCHES * ROWS * STEPS)
    curve = []
    for data in collector:
        curve.append(mean_return(data))
        for _ in range(EPOCHS):
            optimiser.zero_grad()
            loss_of(data, actors, critic).backward()
            optimiser.step()
    collector.shutdown()
    return mean_return(by_chance), curve


def mean_return(data: TensorDictBase) -> float:
    """Average the returns of the episodes that ended."""
    return data["next", "listener", "return"][data["next", "done"].squeeze(-1)].mean().item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_agents_learn_to_work_together(seed):
    by_chance, curve = train(seed)

    learned = sum(curve[-5:]) / 5

    assert len(curve) == BATCHES
    assert learned > 0.7 * by_chance  # returns are negative distances
