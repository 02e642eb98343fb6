"""A small PPO in plain torch: what it takes to train on rollouts of any envkit env.

Conventions
    data    TensorDict [N, T] as `rollout` gives it, with what the policy wrote: ``raw_action``
            (before tanh), ``log_prob``.
    Source  Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributions import Normal

from envkit import gae, minibatches

_READ = ("observation", "raw_action", "log_prob", "advantage", "value_target")


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
        """Add a batch (*batch, size) to the statistics."""
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
        """Return the distribution of the raw action, shape (*batch, action_size)."""
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
        samples = self._with_advantages(data).select(*_READ)
        advantage = samples["advantage"]
        samples["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        size = -(-samples.numel() // self.config.minibatches)
        for part in minibatches(samples, size, epochs=self.config.epochs):
            self._step(part)
        self.schedule.step()
        # Only now: the log-probabilities above belong to the moments the policy acted with.
        self.actor.normalizer.observe(data["observation"])

    def _step(self, samples: TensorDictBase) -> None:
        distribution = self.actor.distribution(samples["observation"])
        log_prob = distribution.log_prob(samples["raw_action"]).sum(-1)
        ratio = (log_prob - samples["log_prob"]).exp()
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        advantage = samples["advantage"].squeeze(-1)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        value_loss = (self.value(samples) - samples["value_target"]).square().mean()
        loss = value_loss - gain.mean()
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.groups:  # apart, or the critic's large gradients would silence the actor
            nn.utils.clip_grad_norm_(group, self.config.max_grad_norm)
        self.optimizer.step()

    def value(self, data: TensorDictBase) -> torch.Tensor:
        """Expected discounted return, shape (*batch, 1)."""
        return self.critic(self.actor.normalizer(data["observation"]))

    def _with_advantages(self, data: TensorDictBase) -> TensorDictBase:
        """Add advantages and value targets, each [N, T, 1]; a time limit does not end the future."""
        config, data = self.config, data.copy()
        reward = (1 - config.gamma) * data["next", "reward"]  # values stay near 1
        data["next", "reward"] = reward
        return gae(data, self.value, gamma=config.gamma, lmbda=config.gae_lambda)
