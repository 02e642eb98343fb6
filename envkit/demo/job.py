"""The main job: simulate on Brax, train with torch, check in Gymnasium, mix both.

Read it as the example it is: every env below is used through the same four lines.

Conventions
    length  steps until an episode ends; both tasks give reward 1 a step, so it is the return too.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import matplotlib
import numpy as np
import torch
from gymnasium import wrappers
from tensordict import TensorDictBase
from tqdm import tqdm

from envkit import BraxEnv, EnvBase, GymWrapper, MixedEnv, ParallelEnv
from envkit.demo.ppo import PPO, Actor

__all__ = ["run"]

EPISODE_LENGTH = 1000
GOAL = 950.0
MAX_ITERATIONS = 300
EVALUATE_EVERY = 20


def make_gym() -> EnvBase:
    """The same task in MuJoCo, brought to the same spec and to Brax's 50 actions a second."""
    env = gymnasium.make("InvertedPendulum-v5", frame_skip=1)
    env = wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))
    return GymWrapper(wrappers.DtypeObservation(env, np.float32))


@dataclass
class Curve:
    """Mean episode lengths over training."""

    steps: list[int] = field(default_factory=list)
    brax: list[float] = field(default_factory=list)
    gym: list[float] = field(default_factory=list)


def run(out: str | Path = "demo_out", device: str = "cpu", seed: int = 0) -> Curve:
    """Run the whole job and write its results to ``out``.

    Raises:
        RuntimeError: the policy did not balance within the budget.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small, and the cores are for the simulators
    measure_throughput(device)

    brax = BraxEnv(
        "inverted_pendulum",
        backend="spring",
        batch_size=[256],
        episode_length=EPISODE_LENGTH,
        device=device,
    )
    gym = ParallelEnv(8, make_gym)
    brax.set_seed(seed)
    gym.set_seed(seed)
    mixed = MixedEnv([brax, gym])
    try:
        actor, curve, rollout = train(brax, gym)
        compare(actor, {"Brax": brax, "Gymnasium": gym, "MixedEnv": mixed})
    finally:
        mixed.close()  # closes its members too

    plot(curve, out / "learning_curve.png")
    rollout.memmap(out / "rollout")
    print(f"learning curve: {out / 'learning_curve.png'}")
    print(f"last rollout, memory-mapped {tuple(rollout.shape)}: {out / 'rollout'}")
    if curve.brax[-1] < GOAL:
        raise RuntimeError(
            f"the policy balances for {curve.brax[-1]:.0f} steps on average, but {GOAL:.0f} were "
            f"expected after {MAX_ITERATIONS} iterations. Try another --seed."
        )
    return curve


def measure_throughput(device: str, steps: int = 100) -> None:
    """Step Brax ant with random actions, all steps in one XLA program."""
    batch = 16384 if device.startswith("cuda") else 512 * (os.cpu_count() or 1)
    print(f"ant, {batch} envs on {device}: compiling ...", flush=True)
    env = BraxEnv("ant", backend="spring", batch_size=[batch], device=device)
    env.set_seed(0)
    _, td = env.unroll(env.reset(), steps)
    start = time.perf_counter()
    env.unroll(td, steps)
    seconds = time.perf_counter() - start
    print(f"ant, {batch} envs: {batch * steps / seconds:,.0f} steps/s")


def train(brax: EnvBase, gym: EnvBase) -> tuple[Actor, Curve, TensorDictBase]:
    """Train on Brax until the pole stays up, looking at both simulators as we go."""
    size = brax.observation_spec["observation"].shape[-1]
    actor = Actor(size, brax.action_spec.shape[-1]).to(brax.device)
    ppo, curve = PPO(actor, size), Curve()
    td = brax.reset()
    bar = tqdm(range(1, MAX_ITERATIONS + 1), desc="training", unit="rollout")
    for iteration in bar:
        with torch.no_grad():
            data = brax.rollout(
                32, actor, tensordict=td, auto_reset=False, break_when_any_done=False
            )
        td = brax.step_mdp(data[:, -1])
        ppo.update(data)
        if iteration % EVALUATE_EVERY and iteration != MAX_ITERATIONS:
            continue
        curve.steps.append(iteration * data.numel())
        curve.brax.append(episode_length(brax, actor))
        curve.gym.append(episode_length(gym, actor))
        bar.set_postfix(brax=f"{curve.brax[-1]:.0f}", gym=f"{curve.gym[-1]:.0f}")
        if min(curve.brax[-1], curve.gym[-1]) >= GOAL:
            break
    bar.close()
    return actor, curve, data


@torch.no_grad()
def episode_length(env: EnvBase, actor: Actor) -> float:
    """Mean length of one episode of every row, with the policy's mean action."""
    actor.eval()
    data = env.rollout(EPISODE_LENGTH, actor, break_when_all_done=True)
    actor.train()
    ended: torch.Tensor = data.get(("next", "done")).squeeze(-1)
    first = torch.where(ended.any(-1), ended.int().argmax(-1) + 1, ended.shape[-1])
    return first.float().mean().item()


def compare(actor: Actor, envs: dict[str, EnvBase]) -> None:
    """Evaluate one policy in several envs, through the same code."""
    for name, env in envs.items():
        start = time.perf_counter()
        length = episode_length(env, actor)
        seconds = time.perf_counter() - start
        print(f"{name:>10}: {env.numel():4d} rows, mean episode {length:6.1f} ({seconds:.1f} s)")


def plot(curve: Curve, path: Path) -> None:
    """Draw mean episode length against environment steps."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150)
    axes.plot(curve.steps, curve.brax, marker="o", label="Brax (trained here)")
    axes.plot(curve.steps, curve.gym, marker="s", label="Gymnasium MuJoCo (never seen)")
    axes.axhline(GOAL, color="0.6", linestyle="--", linewidth=1, label=f"goal: {GOAL:.0f}")
    axes.set(
        xlabel="environment steps",
        ylabel="mean episode length",
        ylim=(0, EPISODE_LENGTH * 1.05),
        title="Inverted pendulum: one policy, two simulators",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
