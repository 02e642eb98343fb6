"""Two agents, each with a network and rewards of its own, learn to work together, through a collector.

The speaker sees a sign, the listener hears a word and guesses it: what words mean they have to find out together,
and where one of them acts at random, nothing can be gained by the other.
"""

from __future__ import annotations

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

from envkit import (
    Collector,
    ExplorationType,
    PettingZooWrapper,
    RewardSum,
    SerialEnv,
    TransformedEnv,
    set_exploration_type,
)
from tests.zoo.pettingzoo_games import Signals

STEPS, ROWS, BATCHES, EPOCHS = 9, 32, 40, 4
GROUPS = ("speaker", "listener")

pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(300)]


def make_env() -> TransformedEnv:
    """Make games whose groups have the sums of their rewards so far."""
    games = SerialEnv(ROWS, lambda: PettingZooWrapper(Signals(STEPS)))
    rewards = [(group, "reward") for group in GROUPS]
    return TransformedEnv(games, RewardSum(rewards, [(group, "return") for group in GROUPS]))


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


def to_go(reward: torch.Tensor, discount: float = 0.5) -> torch.Tensor:
    """Sum discounted rewards to come, shape (rows, steps)."""
    sums, total = [], torch.zeros(())
    for paid in reward.flip(-1).unbind(-1):
        total = paid + discount * total
        sums.append(total)
    return torch.stack(sums[::-1], -1)


def loss_of(data: TensorDictBase, group: str, act: nn.Module) -> torch.Tensor:
    """PPO of one group, by its own rewards, actions and observations."""
    gain = to_go(data["next", group, "reward"].flatten(-2).sum(-1))
    gain = gain - gain.mean(0)  # what is usual at that time
    gain = (gain / (gain.std() + 1e-3)).unsqueeze(-1)
    dist = act.get_dist(data)
    ratio = (dist.log_prob(data[group, "action"]) - data[group, "log_prob"]).exp()
    clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -clipped.mean() - 0.01 * dist.entropy().mean()


def train(seed: int) -> dict[str, nn.Module]:
    """Train an actor for each group."""
    torch.manual_seed(seed)
    env = make_env()
    env.set_seed(seed)
    actors = {group: actor(env, group) for group in GROUPS}
    optimisers = {g: torch.optim.Adam(act.parameters(), lr=1e-2) for g, act in actors.items()}
    frames = ROWS * STEPS
    policy = TensorDictSequential(*actors.values())
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=BATCHES * frames)
    for data in collector:
        for _ in range(EPOCHS):
            for group, act in actors.items():
                optimisers[group].zero_grad()
                loss_of(data, group, act).backward()
                optimisers[group].step()
    collector.shutdown()
    return actors


def mean_return(*acting: nn.Module) -> float:
    """Average the returns of 4 games in each row, where other agents act at random."""

    env = make_env()
    env.set_seed(99)

    def act(td: TensorDictBase) -> TensorDictBase:
        td = env.rand_action(td)
        for actor in acting:
            td = actor(td)
        return td

    with set_exploration_type(ExplorationType.RANDOM):
        data = env.rollout(4 * STEPS, act, break_when_any_done=False)
    return data["next", "listener", "return"][data["next", "done"].squeeze(-1)].mean().item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_agents_learn_to_work_together(seed):
    actors = train(seed)

    by_chance, together = mean_return(), mean_return(*actors.values())
    alone = [mean_return(act) for act in actors.values()]

    assert by_chance < 0.45 * (STEPS - 1)
    assert max(alone) < 0.45 * (STEPS - 1)  # what one has learned is of no use without the other
    assert together > 0.6 * (STEPS - 1)
