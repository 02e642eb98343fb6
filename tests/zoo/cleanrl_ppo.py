"""PPO on a vector env of Gymnasium, as those write it who keep an algorithm in one file.

Source: Schulman et al., Proximal Policy Optimization Algorithms, 2017 (clipped objective, generalised advantage
estimation). Written for discrete actions and flat observations.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn
from torch.distributions import Categorical

__all__ = ["train"]

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Agent(nn.Module):
    def __init__(self, envs: VectorEnv):
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape))
        self.actor = nn.Sequential(
            nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, int(envs.single_action_space.n))
        )
        self.critic = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 1))

    def choices(self, observation: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(observation))


def train(envs: VectorEnv, steps: int, *, horizon: int = 128, seed: int = 0) -> list[float]:
    """Train for ``steps`` steps of all rows; gives the returns of the episodes that ended, in their order."""
    torch.manual_seed(seed)
    agent = Agent(envs)
    optimiser = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    resets_later = envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    shown, _ = envs.reset(seed=seed)
    running, returns = np.zeros(envs.num_envs), []
    ended = np.zeros(envs.num_envs, bool)
    while steps > 0:
        seen, acts, logs, rewards, ends, values, live = [], [], [], [], [], [], []
        for _ in range(horizon):
            observation = torch.as_tensor(shown, dtype=torch.float32)
            with torch.no_grad():
                choices = agent.choices(observation)
                action = choices.sample()
                values.append(agent.critic(observation).squeeze(-1))
                logs.append(choices.log_prob(action))
            live.append(torch.as_tensor(~ended if resets_later else np.ones_like(ended)))
            shown, reward, terminated, truncated, _ = envs.step(action.numpy())
            ended = terminated | truncated
            seen.append(observation)
            acts.append(action)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            ends.append(torch.as_tensor(ended, dtype=torch.float32))
            running += reward
            returns += running[ended].tolist()
            running[ended] = 0.0
        with torch.no_grad():
            values.append(agent.critic(torch.as_tensor(shown, dtype=torch.float32)).squeeze(-1))
        advantage, carried = [], torch.zeros(envs.num_envs)
        for t in reversed(range(horizon)):
            goes_on = 1 - ends[t]
            delta = rewards[t] + GAMMA * values[t + 1] * goes_on - values[t]
            carried = delta + GAMMA * LAMBDA * goes_on * carried
            advantage.insert(0, carried)
        batch = torch.stack(live).flatten()
        flat = [torch.stack(part).flatten(0, 1)[batch] for part in (seen, acts, logs, advantage)]
        wanted = (torch.stack(advantage) + torch.stack(values[:-1])).flatten()[batch]
        for _ in range(4):
            for rows in torch.randperm(len(wanted)).split(256):
                observation, action, before, gain = (part[rows] for part in flat)
                choices = agent.choices(observation)
                ratio = (choices.log_prob(action) - before).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                kept = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                error = (agent.critic(observation).squeeze(-1) - wanted[rows]).square().mean()
                loss = -kept + 0.5 * error - 0.01 * choices.entropy().mean()
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimiser.step()
        steps -= horizon
    return returns
