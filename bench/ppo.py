"""Returns that `envkit.PPO` reaches beside those of single-file PPO and of brax.training, for several seeds at equal frames.

Gymnasium's envs, 8 rows in this process: the peer is a plain loop with CleanRL's algorithm, networks and hyperparameters but rows
and frames; PPO has the same hyperparameters. Their algorithms differ in four ways. PPO normalises advantages over a batch and
not over a minibatch, does not clip the loss of values, brings actions within bounds by tanh and not by clipping, and a time limit does
not end its future. Brax's inverted double pendulum, 2048 rows: the peer is ``brax.training.agents.ppo`` with the hyperparameters
that Brax's notebook has for it; PPO has these and its own two layers of 64.

Recorded for each env: by work and seed the return at the end and wall seconds, and the difference of the means with its 95 %
interval (Welch). The return is the mean of the last 40 episodes of training, or of 128 episodes after it in Brax.

Run: ``python -m bench.ppo ENV [--seeds 5] [--frames N]`` with one of the envs below, or "all"
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from scipy import stats
from torch import nn
from torch.distributions import Independent, Normal

from bench.harness import record
from bench.training import (
    CART_POLE,
    PENDULUM,
    VALUES,
    Agent,
    CartPoleAgent,
    Clock,
    PlainLoop,
    Settings,
    brax_training,
    dense,
)
from envkit import PPO, evaluate, make

LAST = 40
"""Episodes whose mean return is that of a training."""

# Source: CleanRL, ``cleanrl/ppo_continuous_action.py``, with 8 envs of 256 steps in place of one of 2048.
CONTINUOUS = Settings(
    *(8, 256, 64, 3e-4, 0.99, 0.2, 0.0),
    epochs=10,
    max_grad_norm=0.5,
    eps=1e-5,
    clips_value=True,
    anneals=True,
)
FRAMES = {
    "CartPole-v1": 200_000,
    "Pendulum-v1": 400_000,
    "HalfCheetah-v5": 300_000,
    "inverted_double_pendulum": 40 * PENDULUM.frames,
}


@dataclass(frozen=True)
class Run:
    """A training: its return and wall seconds."""

    result: float
    wall_s: float


# ------------------------------------------------------------------------------------------ the peers


class ContinuousAgent(Agent):
    """Networks of CleanRL for continuous actions."""

    def __init__(self, env: gymnasium.Env):
        super().__init__()
        inputs, outputs = map(gymnasium.spaces.flatdim, (env.observation_space, env.action_space))
        begun = partial(partial, nn.init.orthogonal_)
        hidden = begun(gain=2**0.5)
        self.policy = dense((inputs, 64, 64, outputs), nn.Tanh, hidden, begun(gain=0.01))
        self.critic = dense((inputs, 64, 64, 1), nn.Tanh, hidden, begun(gain=1.0))
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def distribution(self, observation: torch.Tensor) -> Independent:
        mean = self.policy(observation)
        normal = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    def judged(self, observation, raw_action):
        distribution = self.distribution(observation)
        log_prob = distribution.log_prob(raw_action)
        return log_prob.unsqueeze(-1), distribution.entropy().unsqueeze(-1)


class Noted(gymnasium.Wrapper):
    """Add the return of each episode to a list."""

    def __init__(self, env: gymnasium.Env, returns: list[float]):
        super().__init__(env)
        self.returns, self.total = returns, 0.0

    def reset(self, **options: Any) -> Any:
        self.total = 0.0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.total += float(reward)
        if terminated or truncated:
            self.returns.append(self.total)
        return observation, reward, terminated, truncated, info


def cleanrl_env(name: str, returns: list[float], gamma: float) -> gymnasium.Env:
    """Build an env in the wrappers that CleanRL puts around it."""
    env: Any = Noted(gymnasium.make(name), returns)
    if not isinstance(env.action_space, gymnasium.spaces.Box):
        return env
    env = wrappers.NormalizeObservation(wrappers.ClipAction(env))
    env = wrappers.TransformObservation(
        env, lambda values: np.clip(values, -10, 10), env.observation_space
    )
    env = wrappers.NormalizeReward(env, gamma=gamma)
    return wrappers.TransformReward(env, lambda reward: float(np.clip(float(reward), -10, 10)))


def cleanrl(name: str, seed: int, frames: int) -> Run:
    """Train by CleanRL's algorithm."""
    settings, returns = _settings(name), list[float]()
    iterations = -(-frames // settings.frames)
    make_env = partial(cleanrl_env, name, returns, settings.gamma)
    make_agent = CartPoleAgent if settings is CART_POLE else lambda: ContinuousAgent(make_env())
    began = time.perf_counter()
    loop = PlainLoop(seed, iterations, settings, make_agent, make_env)
    for _ in range(iterations):
        loop.iterate(Clock())
    loop.close()
    return Run(statistics.fmean(returns[-LAST:]), time.perf_counter() - began)


def brax(name: str, seed: int, frames: int) -> Run:
    """Train by brax.training, with its value network of five layers of 256."""
    iterations = -(-frames // PENDULUM.frames)
    began = time.perf_counter()
    hidden = VALUES["hyperparameters and value network"]
    run = brax_training(seed, iterations, hidden, evaluates=True, name=name)
    return Run(run.curve[-1][1], time.perf_counter() - began)


# ------------------------------------------------------------------------------------------- envkit


def _settings(name: str) -> Settings:
    return CART_POLE if name == "CartPole-v1" else CONTINUOUS


def ppo_on_gym(name: str, seed: int, frames: int) -> Run:
    """Train by `PPO` on 8 rows in this process."""
    settings = _settings(name)
    normalizes = settings is CONTINUOUS
    began = time.perf_counter()
    env = make(f"gym/{name}", settings.rows, backend="serial")
    ppo = _ppo(env, settings, seed, normalize_observations=normalizes, normalize_rewards=normalizes)
    ppo.fit(frames, progress=False)
    ppo.close()
    env.close()
    return Run(statistics.fmean(ppo.returns[-LAST:]), time.perf_counter() - began)


def ppo_on_brax(name: str, seed: int, frames: int) -> Run:
    """Train by `PPO` on 2048 rows in one program."""
    began = time.perf_counter()
    build = partial(make, f"brax/{name}", backend="spring", episode_length=1000)
    env, judged = build(PENDULUM.rows), build(128)
    ppo = _ppo(env, PENDULUM, seed)
    ppo.fit(frames, progress=False)
    result = evaluate(judged, ppo.policy, 128, seed=seed).mean
    ppo.close()
    return Run(result, time.perf_counter() - began)


def _ppo(env: Any, settings: Settings, seed: int, **options: Any) -> PPO:
    return PPO(
        env,
        frames_per_batch=settings.frames,
        minibatch_size=settings.minibatch,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        anneal=settings.anneals,
        gamma=settings.gamma,
        lmbda=settings.lmbda,
        clip=settings.clip,
        entropy=settings.entropy,
        seed=seed,
        **options,
    )


# ----------------------------------------------------------------------------------------- measuring


def compare(name: str, seeds: int, frames: int) -> None:
    """Train by both with each seed, print and record."""
    is_brax = name == "inverted_double_pendulum"
    works: dict[str, Callable[[str, int, int], Run]] = (
        {"brax.training": brax, "envkit.PPO": ppo_on_brax}
        if is_brax
        else {"CleanRL's algorithm": cleanrl, "envkit.PPO": ppo_on_gym}
    )
    runs: dict[str, list[Run]] = {work: [] for work in works}
    for seed in range(seeds):
        for work, train in works.items():
            run = train(name, seed, frames)
            runs[work].append(run)
            print(f"{name}, seed {seed}, {work}: {run.result:.1f}, {run.wall_s:.0f} s", flush=True)
    results = {work: [run.result for run in done] for work, done in runs.items()}
    peer, ours = results.values()
    summary: dict[str, Any] = {
        "frames": frames,
        "at the end": {work: round(statistics.fmean(each), 1) for work, each in results.items()},
        "returns": {work: [round(value, 1) for value in each] for work, each in results.items()},
        "wall_s": {work: [round(run.wall_s, 1) for run in done] for work, done in runs.items()},
    }
    if seeds > 1:
        interval = stats.ttest_ind(ours, peer, equal_var=False).confidence_interval()
        low, high = float(interval.low), float(interval.high)
        summary["difference of means, 95 %"] = [round(low, 1), round(high, 1)]
    print(summary)
    record(f"PPO on {name}, {seeds} seeds", summary)


def main() -> None:
    """Compare in one env or in all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", choices=[*FRAMES, "all"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--frames", type=int, help="of each training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax's own
        for name in FRAMES if options.env == "all" else [options.env]:
            compare(name, options.seeds, options.frames or FRAMES[name])


if __name__ == "__main__":
    main()
