"""A small PPO in plain torch: what it takes to train on rollouts of any envkit env.

Conventions
    data    TensorDict [N, T] as `rollout` gives it, with what the policy wrote: ``raw_action``
            (before tanh), ``log_prob``.
    Source  Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7;
            advantages: Schulman et al., "High-Dimensional Continuous Control Using Generalized
            Advantage Estimation" (2016), eq. 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.distributions import Normal

__all__ = ["PPO", "Actor", "PPOConfig"]


def mlp(inputs: int, outputs: int, hidden: int = 64) -> nn.Sequential:
    """Two hidden layers with tanh."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


class Normalizer(nn.Module):
    """Shift and scale observations to mean 0 and deviation 1, by what was seen so far.

    Source of the merge: Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances" (1979), eq. 2.1.
    """

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("squares", torch.full((size,), 1e-4))  # sum of squared deviations

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Normalise; shape (*batch, size) in and out."""
        return (observation - self.mean) / (self.squares / self.count).sqrt().clamp(min=1e-4)

    @torch.no_grad()
    def observe(self, observation: torch.Tensor) -> None:
        """Take in a batch (*batch, size)."""
        rows = observation.flatten(0, -2)
        shift = rows.mean(0) - self.mean
        total = self.count + len(rows)
        self.squares += rows.var(0, correction=0) * len(rows)
        self.squares += shift.square() * self.count * len(rows) / total
        self.mean += shift * len(rows) / total
        self.count.copy_(total)


class Actor(nn.Module):
    """A Gaussian policy squashed into (-1, 1); reads ``observation``, writes ``action``.

    In training mode it samples, in evaluation mode it takes the mean. The mean is one linear layer:
    balancing is nearly linear feedback, which a network of tanh layers learns late where the cart drifts
    slowly (docs/decisions.md says what was tried).
    """

    def __init__(self, observation_size: int, action_size: int):
        super().__init__()
        self.normalizer = Normalizer(observation_size)
        self.mean = nn.Linear(observation_size, action_size)
        nn.init.zeros_(self.mean.weight)  # random feedback would first have to be unlearned
        nn.init.zeros_(self.mean.bias)
        self.log_std = nn.Parameter(torch.full((action_size,), -0.5))

    def distribution(self, observation: torch.Tensor) -> Normal:
        """Give the distribution of the raw action, shape (*batch, action_size)."""
        mean = self.mean(self.normalizer(observation))
        return Normal(mean, self.log_std.exp(), validate_args=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act: the form every env takes as a policy."""
        distribution = self.distribution(tensordict["observation"])
        raw = distribution.sample() if self.training else distribution.mean
        tensordict["action"] = raw.tanh()
        tensordict["raw_action"] = raw
        tensordict["log_prob"] = distribution.log_prob(raw).sum(-1)
        return tensordict


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters."""

    gamma: float = 0.995
    gae_lambda: float = 0.98
    clip: float = 0.2
    epochs: int = 4
    minibatches: int = 8
    learning_rate: float = 1e-3
    max_grad_norm: float = 0.5
    rollouts: int = 300  # over which the learning rate falls to a twentieth


class PPO:
    """Improve an actor from rollouts."""

    def __init__(self, actor: Actor, observation_size: int, config: PPOConfig | None = None):
        self.config = PPOConfig() if config is None else config
        self.actor = actor
        self.critic = mlp(observation_size, 1).to(actor.log_std.device)
        self.groups = [list(actor.parameters()), list(self.critic.parameters())]
        self.optimizer = torch.optim.Adam(
            [{"params": group} for group in self.groups], lr=self.config.learning_rate
        )

        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.05, total_iters=self.config.rollouts
        )

    def update(self, data: TensorDictBase) -> None:
        """Take the optimiser steps for one rollout, ``data`` [N, T]."""
        advantage, value_target = self._advantages(data)
        samples = TensorDict(
            {
                "observation": data["observation"],
                "raw_action": data["raw_action"],
                "log_prob": data["log_prob"],
                "advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8),
                "value_target": value_target,
            },
            batch_size=data.batch_size,
        ).reshape(-1)
        size = -(-len(samples) // self.config.minibatches)
        for _ in range(self.config.epochs):
            order = torch.randperm(len(samples), device=data["observation"].device)
            for rows in order.split(size):
                self._step(samples[rows])
        self.schedule.step()
        # Only now: the log-probabilities above belong to the moments the policy acted with.
        self.actor.normalizer.observe(data["observation"])

    def _step(self, samples: TensorDictBase) -> None:
        distribution = self.actor.distribution(samples["observation"])
        log_prob = distribution.log_prob(samples["raw_action"]).sum(-1)
        ratio = (log_prob - samples["log_prob"]).exp()
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        gain = torch.minimum(ratio * samples["advantage"], clipped * samples["advantage"])
        value = self.value(samples["observation"])
        value_loss = (value - samples["value_target"]).square().mean()
        loss = value_loss - gain.mean()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.groups:  # apart, or the critic's large gradients would silence the actor
            nn.utils.clip_grad_norm_(group, self.config.max_grad_norm)
        self.optimizer.step()

    def value(self, observation: torch.Tensor) -> torch.Tensor:
        """Expected discounted return, shape (*batch,)."""
        return self.critic(self.actor.normalizer(observation)).squeeze(-1)

    @torch.no_grad()
    def _advantages(self, data: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and value targets, each [N, T]; a time limit does not end the future."""
        following: Any = data["next"]
        value = self.value(data["observation"])
        next_value = self.value(following["observation"])
        alive = (~following["terminated"]).squeeze(-1).float()
        same_episode = (~following["done"]).squeeze(-1).float()
        config = self.config
        reward = (1 - config.gamma) * following["reward"].squeeze(-1)  # values stay near 1
        error = reward + config.gamma * alive * next_value - value
        advantage = torch.zeros_like(error)
        carried = torch.zeros_like(error[:, 0])
        for t in reversed(range(error.shape[1])):
            carried = error[:, t] + config.gamma * config.gae_lambda * same_episode[:, t] * carried
            advantage[:, t] = carried
        return advantage, advantage + value
