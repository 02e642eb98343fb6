"""The main job: simulate on Brax, train with torch, check in Gymnasium, mix both.

Read it as the example it is: `PPO` trains, and each of its batches is one program; `evaluate` is the same for every env.

Conventions
    length  steps until an episode ends. Each has a reward of 1, so it is the return too; MuJoCo gives none for the fall.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from tensordict import TensorDictBase

from envkit import (
    PPO,
    BraxEnv,
    EnvBase,
    Evaluation,
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    cache_dir,
    evaluate,
)
from envkit.data.arguments import as_file
from envkit.data.files import telling
from envkit.demo.display import TrainingBar, announcements_said, draw_curves, say
from envkit.transport.cores import count_cores

EPISODE_LENGTH = 1000
GOAL = 950.0
ROWS = 256
STEPS = 32  # of each row, between two updates
BUDGET = 300 * ROWS * STEPS
EVALUATE_EVERY = 20  # updates


class GoalMissedError(RuntimeError):
    """The policy does not balance after the last iteration."""


@dataclass
class Curve:
    """Mean episode lengths over training.

    Attributes:
        steps: environment steps trained at each evaluation.
        brax, gym: mean lengths there, in each simulator.
        seconds: time from the first rollout to the last evaluation, compilations included.
    """

    steps: list[int] = field(default_factory=list)
    brax: list[float] = field(default_factory=list)
    gym: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_reached(self) -> bool:
        """Whether the last evaluation reached the goal in both simulators."""
        return min(self.brax[-1], self.gym[-1]) >= GOAL


@dataclass(frozen=True)
class Trained:
    """The result of training; ``data`` is the last batch."""

    policy: Any
    curve: Curve
    data: TensorDictBase


def make_gym() -> EnvBase:
    """The same task in MuJoCo, brought to the same spec and to Brax's 50 actions a second."""
    env = gymnasium.make("InvertedPendulum-v5", frame_skip=1)
    env = wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))
    return GymWrapper(wrappers.DtypeObservation(env, np.float32))


def run(
    out: str | Path = "demo_out",
    device: str = "cpu",
    seed: int = 0,
    cache: str | Path | None = None,
    keep_programs: bool = True,
) -> Curve:
    """Run the whole job and write its results to ``out``.

    Args:
        out: folder for the learning curve and the last rollout; made if need be.
        device: where torch and JAX compute.
        seed: of the networks, the policy's draws and the envs.
        cache: folder where compiled programs are kept for the next run, see `cache_dir`.
        keep_programs: False keeps none.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) ``out`` is no path.
        WriteError: (an OSError) the folder cannot be made.
        GoalMissedError: (a RuntimeError) the policy did not balance within the budget.
    """
    out = as_file("out", out)
    with telling(out):
        out.mkdir(parents=True, exist_ok=True)
    with announcements_said():
        if keep_programs:
            say(f"compiled programs are kept in {cache_dir(cache)}")
        brax, gym = make_envs(device, seed)
        with closing(MixedEnv([brax, gym])) as mixed:  # closes its members too
            trained = train(brax, gym, seed)
            compare(trained.policy, {"Gymnasium": gym, "MixedEnv": mixed}, seed)
            compare_speed(brax, trained)
        measure_ant(device)
    curve, picture = trained.curve, out / "learning_curve.png"
    curves = {"Brax (trained here)": curve.brax, "Gymnasium MuJoCo (never seen)": curve.gym}
    draw_curves(picture, curve.steps, curves, goal=GOAL, longest=EPISODE_LENGTH)
    trained.data.memmap(out / "rollout")
    say(f"learning curve: {picture}")
    say(f"last rollout, memory-mapped {tuple(trained.data.shape)}: {out / 'rollout'}")
    if not curve.is_reached:
        raise GoalMissedError(
            f"after {curve.steps[-1]:,} steps the policy balances for {curve.brax[-1]:.0f} steps in Brax and "
            f"{curve.gym[-1]:.0f} in MuJoCo, but {GOAL:.0f} in both is the goal. See {picture}."
        )
    return curve


def make_envs(device: str, seed: int) -> tuple[BraxEnv, ParallelEnv]:
    """Build both simulators, and seed torch and what trains; evaluations have their own seeds."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small, and the cores are for the simulators
    say(f"building {ROWS} Brax envs and 8 MuJoCo envs ...")
    brax = BraxEnv(
        "inverted_pendulum",
        backend="spring",
        batch_size=[ROWS],
        episode_length=EPISODE_LENGTH,
        device=device,
    )
    gym = ParallelEnv(8, make_gym, device=device)
    brax.set_seed(seed)
    return brax, gym


def train(brax: JaxEnv, gym: EnvBase, seed: int) -> Trained:
    """Train on Brax until the pole stays up in both simulators, looking at them as we go.

    Args:
        brax, gym: the simulators, as `make_envs` gives them.
        seed: of the evaluations, which all begin with the same episodes.
    """
    ppo = PPO(
        brax,
        balancing_actor(),
        frames_per_batch=ROWS * STEPS,
        epochs=4,
        learning_rate=1e-3,
        gamma=0.995,
        lmbda=0.98,
        seed=seed,
    )
    bar, curve, batches = TrainingBar(BUDGET), Curve(), deque[TensorDictBase](maxlen=1)

    def look(ppo: PPO, batch: TensorDictBase) -> bool:
        """Evaluate now and then; True ends training."""
        bar.advance(batch.numel())
        batches.append(batch)
        if ppo.frames % (EVALUATE_EVERY * batch.numel()) and ppo.frames < BUDGET:
            return False
        curve.steps.append(ppo.frames)
        curve.brax.append(mean_length(balanced(brax, ppo.policy, seed)))
        curve.gym.append(mean_length(balanced(gym, ppo.policy, seed)))
        bar.evaluated(ppo.frames, {"Brax": curve.brax[-1], "MuJoCo": curve.gym[-1]})
        return curve.is_reached

    start = time.perf_counter()
    ppo.fit(BUDGET, look, progress=False)
    bar.close()
    ppo.close()
    curve.seconds = time.perf_counter() - start
    say(f"trained with {curve.steps[-1]:,} steps in {curve.seconds:.1f} s")
    return Trained(ppo.policy, curve, batches[0])


def balancing_actor() -> torch.nn.Linear:
    """Build an actor that is linear feedback, from no feedback at all.

    Balancing is nearly linear; layers of tanh learn late where the cart drifts slowly (docs/decisions.md says what was tried).
    """
    actor = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(actor.weight)
    torch.nn.init.zeros_(actor.bias)
    return actor


def balanced(env: EnvBase, policy: Any, seed: int) -> Evaluation:
    """Play one episode of every row, with the policy's mean action.

    Args:
        env: any env; it goes on afterwards where it was.
        policy: what acts.
        seed: of the episodes.
    """
    return evaluate(env, policy, env.numel(), seed=seed)


def mean_length(evaluation: Evaluation) -> float:
    """Mean number of steps of the episodes."""
    return float(evaluation.lengths.double().mean())


def compare(policy: Any, envs: dict[str, EnvBase], seed: int) -> None:
    """Evaluate one policy in several envs, through the same code."""
    for name, env in envs.items():
        start = time.perf_counter()
        evaluation = balanced(env, policy, seed)
        seconds = time.perf_counter() - start
        lower, upper = evaluation.ci95
        say(
            f"{name:>10}: {env.numel():4d} rows, mean episode {mean_length(evaluation):6.1f}, "
            f"mean return {evaluation.mean:6.1f} (95 % interval {lower:.1f} to {upper:.1f}; {seconds:.1f} s)"
        )


@torch.no_grad()
def compare_speed(brax: JaxEnv, trained: Trained) -> None:
    """Collect the same number of steps as one program, and one by one with the torch module."""
    root = brax.reset()

    def as_one_program() -> None:
        brax.unroll(root, STEPS, trained.policy)

    def one_by_one() -> None:
        td = root.clone()
        for _ in range(STEPS):
            _, td = brax.step_and_maybe_reset(trained.policy.module(td))

    count = root.numel() * STEPS
    whole, single = (count / _seconds(work) for work in (as_one_program, one_by_one))
    say(
        f"collecting: {whole:,.0f} steps/s by unroll with the compiled policy, "
        f"{single:,.0f} steps/s one by one with the torch module"
    )


def measure_ant(device: str, steps: int = 50) -> None:
    """Step Brax ant with random actions, all steps in one XLA program."""
    batch = 16384 if device.startswith("cuda") else 512 * count_cores()
    say(f"ant, {batch} envs on {device}: compiling ...")
    env = BraxEnv("ant", backend="spring", batch_size=[batch], device=device)
    env.set_seed(0)
    root = env.reset()
    seconds = _seconds(lambda: env.unroll(root, steps), times=1)
    say(f"ant, {batch} envs, random actions: {batch * steps / seconds:,.0f} steps/s")


def _seconds(work: Callable[[], object], times: int = 5) -> float:
    """Time a call, the median of several after one that compiles."""
    work()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
