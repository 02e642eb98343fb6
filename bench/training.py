"""Whole training loops: PPO through envkit against PPO as its users run it.

CartPole, 8 envs, hyperparameters of CleanRL's ``ppo.py``: the peer is a plain loop over Gymnasium's `SyncVectorEnv`. It has the
same torch networks and takes the same optimiser steps as the loop on envkit, so collecting and preparing differ.
Inverted pendulum, 2048 Brax envs, hyperparameters that brax.training gives for it. Once with four layers of 32 for the value as
for the policy, where the learner is quick, and once with its five layers of 256: the peer is ``brax.training.agents.ppo``, whose loop is one JAX program. With envkit, torch learns.
Both differ from their peers where those cut corners: a time limit does not end the future, and pendulums that fell begin new
episodes of their own.

Recorded: steps per second of wall time and CPU time of the process, by part, for 122,880 steps; and mean returns of
episodes against steps for several seeds. The machine may be busy, so trust CPU time.

Conventions
    collecting  acting and stepping, with what is normalised on the way.
    preparing   advantages and minibatches.
    learning    forward, backward and optimiser of the networks, values for the advantages too.

Run: ``python -m bench.training [--only cartpole|pendulum|pendulum-large] [--seeds N] [--iterations N]``
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn.functional import softplus

from bench.harness import record
from envkit import (
    BraxEnv,
    GymEnv,
    RewardScaling,
    SerialEnv,
    SyncDataCollector,
    TransformedEnv,
    VecNorm,
    compile_policy,
    evaluate,
    gae,
    minibatches,
)
from envkit_bridges.worlds.brax import import_brax

STEPS = 122_880  # whose CPU time is reported
ROUNDS = 5
PARTS = ("collecting", "preparing", "learning")
Hidden = tuple[int, ...]  # widths of layers of the value network
Returns = tuple[int, float]  # steps so far, mean return
Paid = tuple[torch.Tensor, torch.Tensor]  # rewards, and whether an episode ended, (rows, steps)


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a loop."""

    rows: int
    steps: int  # of each row, between two updates
    minibatch: int
    learning_rate: float
    gamma: float
    clip: float
    entropy: float
    epochs: int = 4
    lmbda: float = 0.95
    value_weight: float = 0.5
    max_grad_norm: float = math.inf
    eps: float = 1e-8  # of Adam
    clips_value: bool = False
    anneals: bool = False

    @property
    def frames(self) -> int:
        """Steps of one iteration."""
        return self.rows * self.steps


# Source: CleanRL, ``cleanrl/ppo.py``, with 8 envs in place of 4.
CART_POLE = Settings(
    *(8, 128, 256, 2.5e-4, 0.99, 0.2, 0.01),
    max_grad_norm=0.5,
    eps=1e-5,
    clips_value=True,
    anneals=True,
)
# Source: Brax, ``notebooks/training.ipynb``: 16 unrolls of 5 steps in 2048 envs, minibatches of 1024 unrolls.
UNROLL, UNROLLS = 5, 16
PENDULUM = Settings(2048, UNROLL * UNROLLS, 1024 * UNROLL, 3e-4, 0.97, 0.3, 1e-2, value_weight=0.25)
POLICY = (32,) * 4  # hidden layers
VALUES = {"hyperparameters": (32,) * 4, "hyperparameters and value network": (256,) * 5}
REWARD_SCALE = 10.0


@dataclass
class Clock:
    """CPU time of the process by part, and wall time."""

    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    wall: float = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu[part] += time.process_time() - cpu
        self.wall += time.perf_counter() - wall


# ------------------------------------------------------------------------------------- the networks


class Agent(nn.Module):
    """A policy and its value; as a module it acts."""

    policy: nn.Module
    critic: nn.Module

    def value(self, observation: torch.Tensor) -> torch.Tensor:
        """Expected discounted return, shape (*batch, 1)."""
        return self.critic(observation)

    def judged(
        self, observation: torch.Tensor, raw_action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of recorded actions, and entropies, each (*batch, 1)."""
        raise NotImplementedError


def dense(sizes: tuple[int, ...], activation: type[nn.Module], first: Callable, last: Callable):
    """Layers with an activation in between, weights begun by ``first``, those of the last layer by ``last``."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        linear = nn.Linear(inputs, outputs)
        (last if number == len(sizes) - 2 else first)(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


class CartPoleAgent(Agent):
    """Networks of CleanRL."""

    def __init__(self) -> None:
        super().__init__()
        begun = partial(partial, nn.init.orthogonal_)
        hidden = begun(gain=math.sqrt(2))
        self.policy = dense((4, 64, 64, 2), nn.Tanh, hidden, begun(gain=0.01))
        self.critic = dense((4, 64, 64, 1), nn.Tanh, hidden, begun(gain=1.0))

    def distribution(self, observation: torch.Tensor) -> Categorical:
        return Categorical(logits=self.policy(observation), validate_args=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        distribution = self.distribution(td["observation"])
        action = distribution.sample()
        td["action"] = action
        td["log_prob"] = distribution.log_prob(action).unsqueeze(-1)
        return td

    def judged(self, observation, raw_action):
        distribution = self.distribution(observation)
        log_prob = distribution.log_prob(raw_action)
        return log_prob.unsqueeze(-1), distribution.entropy().unsqueeze(-1)


def _lecun_uniform(weight: torch.Tensor) -> None:
    bound = math.sqrt(3 / weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)


class PendulumAgent(Agent):
    """Networks of brax.training: a Gaussian behind tanh, whose mean and deviation depend on the observation."""

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self.policy = dense((4, *POLICY, 2), nn.SiLU, _lecun_uniform, _lecun_uniform)
        self.critic = dense((4, *hidden, 1), nn.SiLU, _lecun_uniform, _lecun_uniform)

    def distribution(self, observation: torch.Tensor) -> Normal:
        mean, scale = self.policy(observation).chunk(2, -1)
        return Normal(mean, softplus(scale) + 0.001, validate_args=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        distribution = self.distribution(td["observation"])
        raw = distribution.sample()
        td["action"] = raw.tanh()
        td["raw_action"] = raw
        td["log_prob"] = distribution.log_prob(raw)
        return td

    def judged(self, observation, raw_action):
        distribution = self.distribution(observation)
        drawn = distribution.rsample()
        volume = 2 * (math.log(2) - drawn - softplus(-2 * drawn))  # of tanh, at a draw
        # What tanh adds to a log-probability cancels in the ratio to the recorded one.
        return distribution.log_prob(raw_action), distribution.entropy() + volume


class Learner:
    """Optimiser steps of PPO; the peer on CartPole takes the same."""

    def __init__(self, agent: Agent, settings: Settings, iterations: int):
        self.agent, self.settings = agent, settings
        rate = settings.learning_rate
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=rate, eps=settings.eps)
        total = iterations if settings.anneals else 1
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.0 if settings.anneals else 1.0, total
        )

    def step(self, part: Any) -> None:
        """Take one step.

        Args:
            part: by name ``observation``, ``action`` (``raw_action`` where there is one), ``log_prob``, ``advantage``,
                ``value_target`` and ``state_value``.
        """
        settings = self.settings
        raw = part["raw_action"] if "raw_action" in part.keys() else part["action"]
        log_prob, entropy = self.agent.judged(part["observation"], raw)
        advantage = part["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_prob - part["log_prob"]).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
        value, target = self.agent.value(part["observation"]), part["value_target"]
        error = (value - target).square()
        if settings.clips_value:
            old = part["state_value"]
            near = old + (value - old).clamp(-settings.clip, settings.clip)
            error = torch.maximum(error, (near - target).square())
        value_loss = (0.5 if settings.clips_value else 1.0) * error.mean()
        loss = settings.value_weight * value_loss - gain - settings.entropy * entropy.mean()
        self.optimizer.zero_grad()
        loss.backward()
        if math.isfinite(settings.max_grad_norm):
            nn.utils.clip_grad_norm_(self.agent.parameters(), settings.max_grad_norm)
        self.optimizer.step()


# ------------------------------------------------------------------------------------------- envkit


class EnvkitLoop:
    """PPO with a collector, `gae` and `minibatches`.

    Args:
        env: the envs.
        agent: what acts and learns.
        settings: hyperparameters.
        iterations: how many there will be at most, for the schedule.
        pieces: into how many runs each row of a batch is cut, over which advantages are summed.
    """

    def __init__(self, env: Any, agent: Agent, settings: Settings, iterations: int, pieces: int):
        self.agent, self.settings, self.pieces = agent, settings, pieces
        self.learner = Learner(agent, settings, iterations)
        self.policy = compile_policy(agent)
        self.collector = SyncDataCollector(env, self.policy, frames_per_batch=settings.frames)

    def iterate(self, clock: Clock) -> Paid:
        """Collect a batch and learn from it; gives what was paid."""
        settings = self.settings
        with clock("collecting"):
            batch = self.collector.next()
            assert batch is not None
        with clock("learning"), torch.no_grad():
            for moment in (batch, batch["next"]):
                moment["state_value"] = self.agent.value(moment["observation"])
        with clock("preparing"):
            data = batch.reshape(settings.rows, self.pieces, -1)
            data = gae(data, gamma=settings.gamma, lmbda=settings.lmbda)
            data = data.exclude("next", "collector", "done", "terminated", "truncated")
            parts = minibatches(data, settings.minibatch, epochs=settings.epochs)
        while True:
            with clock("preparing"):
                part = next(parts, None)
            if part is None:
                break
            with clock("learning"):
                self.learner.step(part)
        self.learner.schedule.step()
        return batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)

    def close(self) -> None:
        """End the collector and its env."""
        self.collector.shutdown()


def envkit_cart_pole(seed: int, iterations: int) -> EnvkitLoop:
    """PPO on 8 CartPoles in this process."""
    torch.manual_seed(seed)
    make = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    env = SerialEnv(CART_POLE.rows, make)
    env.set_seed(seed)
    return EnvkitLoop(env, CartPoleAgent(), CART_POLE, iterations, pieces=1)


def pendulums(rows: int, *transforms: Any) -> TransformedEnv:
    """Brax's inverted pendulum behind transforms."""
    env: Any = BraxEnv(
        "inverted_pendulum",
        backend="spring",
        batch_size=[rows],
        episode_length=1000,
        device="cpu",
    )
    for transform in transforms:
        env = TransformedEnv(env, transform)
    return env


def envkit_pendulum(seed: int, iterations: int, hidden: Hidden) -> tuple[EnvkitLoop, VecNorm]:
    """PPO on Brax, and what normalises its observations."""
    torch.manual_seed(seed)
    norm = VecNorm(["observation"], decay=1.0)
    env = pendulums(PENDULUM.rows, norm, RewardScaling(0.0, REWARD_SCALE))
    env.set_seed(seed)
    return EnvkitLoop(env, PendulumAgent(hidden), PENDULUM, iterations, pieces=UNROLLS), norm


# ------------------------------------------------------------------------------------------ the peers


class PlainLoop:
    """PPO over Gymnasium's own vector env, as in a script of one file: steps are written into tensors one by one.

    Args:
        seed: of networks, envs and draws.
        iterations: how many there will be at most, for the schedule.
        settings: hyperparameters.
        make_agent: what acts and learns.
        make_env: one env of a row.
    """

    def __init__(
        self,
        seed: int,
        iterations: int,
        settings: Settings = CART_POLE,
        make_agent: Callable[[], Any] = CartPoleAgent,
        make_env: Callable[[], gymnasium.Env] = lambda: gymnasium.make("CartPole-v1"),
    ):
        torch.manual_seed(seed)
        self.agent, self.settings = make_agent(), settings
        self.learner = Learner(self.agent, settings, iterations)
        self.envs = SyncVectorEnv(
            [make_env] * settings.rows, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self.observation = torch.as_tensor(self.envs.reset(seed=seed)[0], dtype=torch.float32)
        self.done = torch.zeros(settings.rows)

    def iterate(self, clock: Clock) -> Paid:
        """Collect a batch and learn from it; gives what was paid."""
        settings, agent = self.settings, self.agent
        shape = settings.steps, settings.rows
        stored = {
            name: torch.zeros(shape) for name in ("log_prob", "state_value", "reward", "done")
        }
        stored["observation"] = torch.zeros(*shape, *self.observation.shape[1:])
        drawn = agent.distribution(self.observation).sample()
        stored["action"] = torch.zeros(*shape, *drawn.shape[1:], dtype=drawn.dtype)
        with clock("collecting"), torch.no_grad():
            for t in range(settings.steps):
                distribution = agent.distribution(self.observation)
                action = distribution.sample()
                stored["observation"][t] = self.observation
                stored["done"][t] = self.done
                stored["action"][t] = action
                stored["log_prob"][t] = distribution.log_prob(action)
                stored["state_value"][t] = agent.value(self.observation).flatten()
                observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
                stored["reward"][t] = torch.as_tensor(reward)
                self.observation = torch.as_tensor(observation, dtype=torch.float32)
                self.done = torch.as_tensor(terminated | truncated).float()
        with clock("learning"), torch.no_grad():
            value = agent.value(self.observation).flatten()
        with clock("preparing"):
            self._advantages(stored, value)
            flat = {name: tensor.flatten(0, 1) for name, tensor in stored.items()}
            flat = {k: v if k in ("observation", "action") else v[:, None] for k, v in flat.items()}
        for _ in range(settings.epochs):
            with clock("preparing"):
                orders = torch.randperm(settings.frames).split(settings.minibatch)
            for rows in orders:
                with clock("preparing"):
                    part = {name: tensor[rows] for name, tensor in flat.items()}
                with clock("learning"):
                    self.learner.step(part)
        self.learner.schedule.step()
        ended = torch.cat([stored["done"][1:], self.done[None]])
        return stored["reward"].T, ended.T.bool()

    def _advantages(self, stored: dict[str, torch.Tensor], value: torch.Tensor) -> None:
        settings, carried = self.settings, torch.zeros(self.settings.rows)
        advantage, alive = torch.zeros_like(stored["reward"]), 1 - self.done
        for t in reversed(range(settings.steps)):
            delta = stored["reward"][t] + settings.gamma * value * alive - stored["state_value"][t]
            carried = delta + settings.gamma * settings.lmbda * alive * carried
            advantage[t] = carried
            value, alive = stored["state_value"][t], 1 - stored["done"][t]
        stored["advantage"], stored["value_target"] = advantage, advantage + stored["state_value"]

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()


@dataclass
class BraxRun:
    """A run of brax.training: CPU and wall seconds of each iteration but the first two, which compile, and its curve."""

    cpu: list[float]
    wall: list[float]
    curve: list[Returns]


def brax_training(
    seed: int,
    iterations: int,
    hidden: Hidden,
    *,
    evaluates: bool,
    name: str = "inverted_pendulum",
) -> BraxRun:
    """Run brax.training's PPO."""
    from brax.training.agents.ppo import networks, train

    if not hasattr(
        jax, "device_put_replicated"
    ):  # Brax 0.14.2 calls it; the JAX of today has it no more
        jax.device_put_replicated = lambda tree, devices: jax.tree.map(  # type: ignore[attr-defined]
            lambda leaf: jnp.stack([leaf] * len(devices)), tree
        )
    stamps: list[tuple[float, float]] = []
    curve: list[Returns] = []
    sizes = {"policy_hidden_layer_sizes": POLICY, "value_hidden_layer_sizes": hidden}
    train.train(
        environment=import_brax().get_environment(name, backend="spring"),
        num_timesteps=iterations * PENDULUM.frames,
        num_evals=iterations + 1,
        episode_length=1000,
        num_envs=PENDULUM.rows,
        batch_size=PENDULUM.minibatch // UNROLL,
        num_minibatches=PENDULUM.frames // PENDULUM.minibatch,
        unroll_length=UNROLL,
        num_updates_per_batch=PENDULUM.epochs,
        learning_rate=PENDULUM.learning_rate,
        entropy_cost=PENDULUM.entropy,
        discounting=PENDULUM.gamma,
        reward_scaling=REWARD_SCALE,
        normalize_observations=True,
        network_factory=partial(networks.make_ppo_networks, **sizes),
        seed=seed,
        run_evals=evaluates,
        policy_params_fn=lambda *_: stamps.append((time.process_time(), time.perf_counter())),
        progress_fn=lambda steps, metrics: curve.append(
            (steps, float(metrics.get("eval/episode_reward", math.nan)))
        ),
    )
    spent = [
        (later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(stamps[2:])
    ]
    return BraxRun([cpu for cpu, _ in spent], [wall for _, wall in spent], curve)


def brax_collecting(iterations: int) -> float:
    """CPU seconds that brax.training's own unroll takes for the steps of an iteration, the median."""
    from brax.training import acting
    from brax.training.agents.ppo import networks

    envs = import_brax()
    pole = envs.get_environment("inverted_pendulum", backend="spring")
    env = envs.training.wrap(pole, episode_length=1000)
    made = networks.make_ppo_networks(4, 1, policy_hidden_layer_sizes=POLICY)
    params = (None, made.policy_network.init(jax.random.PRNGKey(0)))
    policy = networks.make_inference_fn(made)(params)
    state = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(1), PENDULUM.rows))

    @jax.jit
    def collect(state: Any, key: jax.Array) -> Any:
        def one(carry: Any, _: None) -> Any:
            state, key = carry
            key, own = jax.random.split(key)
            state, data = acting.generate_unroll(
                env, state, policy, own, UNROLL, extra_fields=("truncation",)
            )
            return (state, key), data

        return jax.lax.scan(one, (state, key), length=UNROLLS)

    spent = []
    for number in range(iterations + 1):
        began = time.process_time()
        (state, _), data = collect(state, jax.random.PRNGKey(number))
        jax.block_until_ready(data)
        spent.append(time.process_time() - began)
    return statistics.median(spent[1:])


# ------------------------------------------------------------------------------------------ measuring


def summed(clocks: list[Clock], frames: int) -> dict[str, float]:
    """CPU seconds for `STEPS` steps by part, the median over rounds."""
    scale = STEPS / frames
    parts = {
        part: round(scale * statistics.median(clock.cpu[part] for clock in clocks), 3)
        for part in PARTS
    }
    whole = statistics.median(sum(clock.cpu.values()) for clock in clocks) * scale
    beside = parts["collecting"] + parts["preparing"]
    return {
        **parts,
        "all": round(whole, 3),
        "all but learning": round(beside, 3),
        "share but learning": round(beside / whole, 3),
    }


def report(title: str, result: dict[str, Any], walls: dict[str, list[float]], frames: int) -> None:
    """Print and record one comparison; ratios are those of wall time, round by round, to the peer, which comes first."""
    reference = next(iter(walls))
    works = []
    for work, seconds in walls.items():
        ratios = [peer / own for peer, own in zip(walls[reference], seconds, strict=True)]
        works.append(
            {
                "work": work,
                "steps_per_s": frames / statistics.median(seconds),
                "ratio": statistics.median(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
            }
        )
    print(f"\n{title}")
    for row in works:
        print(f"  {row['work']:30s} {row['steps_per_s']:10,.0f} steps/s  {row['ratio']:.2f}")
    for name, value in result.items():
        print(f"  {name}: {value}")
    record(title, {"reference": reference, "rounds": ROUNDS, "works": works, **result})


def cpu_ratio(peer: dict[str, float], ours: dict[str, float]) -> float:
    """Say how often envkit's loop runs in the CPU time that the peer's takes once."""
    return round(peer["all"] / ours["all"], 3)


def report_curves(
    title: str, curves: dict[str, list[list[Returns]]], further: Mapping[str, Any] | None = None
) -> None:
    """Print and record returns by work and seed: steps once, and of the last point the mean, least and greatest.

    Args:
        title: what is compared.
        curves: by work, one for each seed.
        further: what else is recorded beside them.
    """
    ends = {work: [round(run[-1][1], 1) for run in runs] for work, runs in curves.items()}
    end = {
        work: {"mean": round(statistics.fmean(found), 1), "low": min(found), "high": max(found)}
        for work, found in ends.items()
    }
    print(f"  returns at the end: {end}")
    by_seed = {
        work: [[round(value, 1) for _, value in run] for run in runs]
        for work, runs in curves.items()
    }
    steps = [steps for steps, _ in next(iter(curves.values()))[0]]
    result = {**(further or {}), "at the end": end, "steps": steps, "returns": by_seed}
    record(f"{title}: returns", result)


def cart_pole(seeds: int, iterations: int) -> None:
    """Time the loops round by round, then train with each seed."""
    name = "SyncVectorEnv, plain loop"
    loops = {name: PlainLoop(0, iterations), "envkit": envkit_cart_pole(0, iterations)}
    clocks: dict[str, list[Clock]] = {work: [] for work in loops}
    for number in range(ROUNDS + 1):
        for work, loop in loops.items():
            clock = Clock()
            for _ in range(10):
                loop.iterate(clock)
            if number:  # the first round warms up
                clocks[work].append(clock)
    frames = 10 * CART_POLE.frames
    cpu = {work: summed(clocks_of, frames) for work, clocks_of in clocks.items()}
    for loop in loops.values():
        loop.close()
    result: dict[str, Any] = {f"CPU s for {STEPS:,} steps": cpu}
    result["CPU time of the peer over envkit's"] = cpu_ratio(cpu[name], cpu["envkit"])
    walls = {work: [clock.wall for clock in clocks_of] for work, clocks_of in clocks.items()}
    title = "PPO on 8 CartPoles, CleanRL's hyperparameters"
    report(title, result, walls, frames)
    if seeds:
        makers = {name: PlainLoop, "envkit": envkit_cart_pole}
        curves = {
            work: [_curve(make(seed, iterations), iterations) for seed in range(seeds)]
            for work, make in makers.items()
        }
        report_curves(title, curves)


def _curve(loop: PlainLoop | EnvkitLoop, iterations: int) -> list[Returns]:
    """Train, and give the mean return of the episodes of every tenth of the training."""
    curve: list[Returns] = []
    returns: list[float] = []
    running = torch.zeros(CART_POLE.rows)
    for iteration in range(1, iterations + 1):
        for reward, ended in zip(*(paid.T for paid in loop.iterate(Clock())), strict=True):
            running += reward
            returns += running[ended].tolist()
            running[ended] = 0
        if iteration % (iterations // 10) == 0:
            curve.append((iteration * CART_POLE.frames, statistics.fmean(returns)))
            returns = []
    loop.close()
    return curve


def pendulum(value: str, seeds: int, iterations: int) -> None:
    """Time brax.training's loop and envkit's one after the other, then train with each seed."""
    name, hidden = "brax.training", VALUES[value]
    run = brax_training(0, ROUNDS + 2, hidden, evaluates=False)
    collecting = brax_collecting(ROUNDS)
    loop, _ = envkit_pendulum(0, iterations, hidden)
    loop.iterate(Clock())  # compiles
    clocks = [Clock() for _ in range(ROUNDS)]
    for clock in clocks:
        loop.iterate(clock)
    loop.close()
    frames, scale = PENDULUM.frames, STEPS / PENDULUM.frames
    ours = summed(clocks, frames)
    peer = {
        "all": round(scale * statistics.median(run.cpu), 3),
        "collecting, as a program of its own": round(scale * collecting, 3),
    }
    result: dict[str, Any] = {
        f"CPU s for {STEPS:,} steps": {name: peer, "envkit": ours},
        "CPU time of the peer over envkit's": cpu_ratio(peer, ours),
    }
    walls = {name: run.wall, "envkit": [clock.wall for clock in clocks]}
    title = f"PPO on 2048 Brax pendulums, brax.training's {value}"
    report(title, result, walls, frames)
    if seeds:
        runs = [brax_training(seed, iterations, hidden, evaluates=True) for seed in range(seeds)]
        ours = [_pendulum_curve(seed, iterations, hidden) for seed in range(seeds)]
        report_curves(title, {name: [run.curve for run in runs], "envkit": ours})


def _pendulum_curve(seed: int, iterations: int, hidden: Hidden) -> list[Returns]:
    """Train, and give the mean return of 128 episodes before the first iteration and after each."""
    loop, norm = envkit_pendulum(seed, iterations, hidden)
    judged = pendulums(128, norm.clone())  # which shares the statistics
    curve = []
    for iteration in range(iterations + 1):
        if iteration:
            loop.iterate(Clock())
        found = evaluate(judged, loop.policy, 128, seed=seed)
        curve.append((iteration * PENDULUM.frames, found.mean))
    loop.close()
    return curve


def main() -> None:
    """Run both, or the one that was named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["cartpole", "pendulum", "pendulum-large"])
    parser.add_argument("--seeds", type=int, default=3, help="of the curves; 0 leaves them out")
    parser.add_argument("--iterations", type=int, help="of a curve")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax's own
        if options.only in (None, "cartpole"):
            cart_pole(options.seeds, options.iterations or 150)
        if options.only in (None, "pendulum"):
            pendulum("hyperparameters", options.seeds, options.iterations or 8)
        if options.only in (None, "pendulum-large"):
            pendulum(
                "hyperparameters and value network", 0, 1
            )  # whose learner takes most of the time, curves too


if __name__ == "__main__":
    main()
