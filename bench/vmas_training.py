"""MAPPO of TorchRL's losses on balance of VMAS: fed by envkit's collector, and by a plain loop over the bare simulator.

Both have the same networks, losses, seeds and optimiser steps. The plain loop makes the same resets as envkit: one call for
all rows, otherwise one call for each. Nothing else draws, so the curves of a seed should be equal to the last bit.

Recorded: mean returns of episodes against steps for several seeds, how many seeds have equal curves, and the CPU time of
collecting.

Run: ``python -m bench.vmas_training [--seeds N] [--iterations N]``
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from typing import Any

import torch
import vmas
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from bench.torch_sims import reset_ended
from bench.training import Clock, Returns, report_curves
from envkit import Collector, ExplorationType, VmasEnv, minibatches, set_exploration_type

SCENARIO, AGENTS, LIMIT = "balance", 3, 100
ROWS, STEPS, MINIBATCH, EPOCHS = 256, 100, 3200, 10
OBSERVED, ACTED, HIDDEN = (
    16,
    2,
    64,
)  # numbers that an agent observes, of its action, and of a hidden layer
FLAGS = ("done", "terminated")


def networks() -> tuple[ProbabilisticActor, TensorDictModule]:
    """Build an actor that each agent has of its own observation, and a critic that sees all; agents share weights."""

    def layers(outputs: int, *, central: bool) -> MultiAgentMLP:
        return MultiAgentMLP(
            OBSERVED,
            outputs,
            AGENTS,
            centralised=central,
            share_params=True,
            depth=2,
            num_cells=HIDDEN,
            activation_class=nn.Tanh,
        )

    body = nn.Sequential(layers(2 * ACTED, central=False), NormalParamExtractor())
    between: list[Any] = [("agents", "loc"), ("agents", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(body, [("agents", "observation")], between),
        in_keys=between,
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        return_log_prob=True,
        log_prob_key=("agents", "sample_log_prob"),
    )
    head = layers(1, central=True)
    critic = TensorDictModule(head, [("agents", "observation")], [("agents", "state_value")])
    return actor, critic


class Learner:
    """Optimiser steps of MAPPO, the same for both works."""

    def __init__(self) -> None:
        self.actor, critic = networks()
        self.loss = ClipPPOLoss(self.actor, critic, clip_epsilon=0.2, entropy_coeff=1e-3)
        flags = {name: ("agents", name) for name in FLAGS}
        self.loss.set_keys(
            reward=("agents", "reward"),
            action=("agents", "action"),
            value=("agents", "state_value"),
            sample_log_prob=("agents", "sample_log_prob"),
            **flags,
        )
        self.loss.make_value_estimator(ValueEstimators.GAE, gamma=0.99, lmbda=0.9)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), 5e-4)

    def learn(self, batch: TensorDictBase) -> None:
        """Take the steps of a batch of shape (rows, steps)."""
        for name in FLAGS:
            each = batch.get(("next", name)).unsqueeze(-2).expand(*batch.shape, AGENTS, 1)
            batch.set(("next", "agents", name), each)
        weights = {"params": self.loss.critic_network_params}
        with torch.no_grad():
            self.loss.value_estimator(
                batch, **weights, target_params=self.loss.target_critic_network_params
            )
        for part in minibatches(batch.reshape(-1), MINIBATCH, epochs=EPOCHS):
            losses = self.loss(part)
            total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            self.optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
            self.optimizer.step()


class EnvkitWork:
    """Batches of envkit's collector."""

    def __init__(self, actor: nn.Module, seed: int):
        env = VmasEnv(SCENARIO, ROWS, max_steps=LIMIT, n_agents=AGENTS, seed=seed)
        self.collector = Collector(env, actor, frames_per_batch=ROWS * STEPS)

    def collect(self) -> TensorDictBase:
        """Collect a batch of shape (ROWS, STEPS)."""
        batch = self.collector.next()
        assert batch is not None
        return batch

    def close(self) -> None:
        """End the collector and its env."""
        self.collector.shutdown(close_env=True)


class PlainWork:
    """Batches of a loop that steps the library and stacks what each step gave."""

    def __init__(self, actor: nn.Module, seed: int):
        self.actor = actor
        self.env: Any = vmas.make_env(
            SCENARIO,
            num_envs=ROWS,
            max_steps=LIMIT,
            terminated_truncated=True,
            n_agents=AGENTS,
        )
        self.env.seed(seed)
        self.env.reset(return_observations=False)
        self.observation = self._observed()

    def _observed(self) -> torch.Tensor:
        (observations,) = self.env.get_from_scenario(True, False, False, False)
        return torch.stack(observations, 1)

    def collect(self) -> TensorDictBase:
        """Collect a batch of shape (ROWS, STEPS)."""
        steps: list[Any] = []
        for _ in range(STEPS):
            agents = TensorDict({"observation": self.observation}, [ROWS, AGENTS])
            step = TensorDict({"agents": agents}, [ROWS])
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                self.actor(step)
            after, reward, terminated, truncated, _ = self.env.step(
                [*step["agents", "action"].unbind(1)]
            )
            last, over = torch.stack(after, 1), terminated | truncated
            told = {"observation": last, "reward": torch.stack(reward, 1)[..., None]}
            following = {"done": over[:, None], "terminated": terminated[:, None]}
            following["agents"] = TensorDict(told, [ROWS, AGENTS])
            step["next"] = TensorDict(following, [ROWS])
            steps.append(step)
            self.observation = last
            if over.any():
                reset_ended(self.env, over)
                self.observation = torch.where(over[:, None, None], self._observed(), last)
        batch: Any = torch.stack(steps, 1)
        return batch

    def close(self) -> None:
        """Hold nothing: the library has nothing to close."""


WORKS = {"plain loop over VMAS": PlainWork, "envkit": EnvkitWork}


def trained(work: str, seed: int, iterations: int) -> tuple[list[Returns], list[float]]:
    """Train, and return the mean return of the episodes of every tenth of the training, and CPU seconds of each batch."""
    torch.manual_seed(seed)
    learner = Learner()
    source = WORKS[work](learner.actor, seed)
    curve: list[Returns] = []
    seconds: list[float] = []
    returns: list[float] = []
    running = torch.zeros(ROWS)
    for iteration in range(1, iterations + 1):
        clock = Clock()
        with clock("collecting"):
            batch = source.collect()
        seconds.append(clock.cpu["collecting"])
        rewards = batch["next", "agents", "reward"].mean((-2, -1))
        for reward, ended in zip(rewards.T, batch["next", "done"].squeeze(-1).T, strict=True):
            running += reward
            returns += running[ended].tolist()
            running[ended] = 0
        learner.learn(batch)
        if iteration % (iterations // 10) == 0:
            curve.append((iteration * ROWS * STEPS, statistics.fmean(returns)))
            returns = []
    source.close()
    return curve, seconds


def main() -> None:
    """Train with each seed, the works in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40, help="of a curve, a multiple of 10")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[Returns]]] = {work: [] for work in WORKS}
    cpu: dict[str, list[float]] = {work: [] for work in WORKS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchRL
        for seed in range(options.seeds):
            for work in WORKS:
                curve, seconds = trained(work, seed, options.iterations)
                curves[work].append(curve)
                cpu[work] += seconds
                print(f"  seed {seed}, {work}: {curve[-1]}", flush=True)
    one, other = curves.values()
    further = {
        "seeds": options.seeds,
        "seeds with equal curves": sum(map(list.__eq__, one, other)),
        "CPU s of a batch": {work: round(statistics.median(cpu[work]), 3) for work in WORKS},
    }
    print(f"  {further}")
    report_curves(f"MAPPO on VMAS {SCENARIO} x {ROWS}", curves, further)


if __name__ == "__main__":
    main()
