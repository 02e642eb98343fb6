"""A training loop that saves itself, and that can be killed: ``python -m tests.zoo.training KIND FILE``.

Policy gradient in its shortest form; whether it learns does not matter, that it is the same to the bit does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import envkit
from envkit import GymEnv, MixedEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv, VecNorm
from envkit.env.base import EnvBase
from tests.zoo.drift import make_gym

ITERATIONS, STEPS, SAVED_EVERY, KILLED_IN = 9, 6, 2, 5


def cartpole() -> TransformedEnv:
    env = GymEnv("CartPole-v1", max_episode_steps=11)
    return TransformedEnv(env, envkit.Compose(StepCounter(), VecNorm(["observation"])))


def pendulums() -> EnvBase:
    return envkit.BraxEnv("inverted_pendulum", batch_size=[2], device="cpu", episode_length=7)


def fast() -> EnvBase:
    return envkit.BraxEnv("fast", batch_size=[2], device="cpu", episode_length=7)


def mixed() -> EnvBase:
    from tests.zoo.jax_drift import jax_rows

    return MixedEnv([jax_rows(limit=5), SerialEnv(2, partial(make_gym, 6))])


KINDS: dict[str, Callable[[], EnvBase]] = {
    "serial": lambda: SerialEnv(2, cartpole),
    "parallel": lambda: ParallelEnv(2, cartpole),
    "mixed": mixed,
    "fast": fast,
    "inverted_pendulum": pendulums,
}


def train(kind: str, path: Path | None, *, dies: bool = False) -> list[torch.Tensor]:
    """Train, from what ``path`` holds if it is there, and give the parameters.

    Args:
        kind: of env, see `KINDS`.
        path: where the loop saves itself; None saves nothing.
        dies: end by SIGKILL in the middle of iteration `KILLED_IN`.
    """
    torch.manual_seed(7)
    env = KINDS[kind]().record_for_resume()
    env.set_seed(7)
    td = env.reset()
    seen = "place" if "place" in td.keys() else "observation"
    policy = torch.nn.Linear(td[seen].shape[-1], 2 * env.action_spec.shape[-1])
    optimiser = torch.optim.Adam(policy.parameters(), 0.05)
    first = 0
    if path is not None and path.exists():
        parts = {"env": env, "policy": policy, "optimiser": optimiser, "torch": torch}
        found = envkit.load(path, **parts, td=None, iteration=None)
        td, first = found["td"], found["iteration"]
    for iteration in range(first, ITERATIONS):
        if path is not None and iteration % SAVED_EVERY == 0:
            envkit.save(
                path,
                env=env,
                policy=policy,
                optimiser=optimiser,
                torch=torch,
                td=td,
                iteration=iteration,
            )
        gain = torch.zeros(())
        for step in range(STEPS):
            if dies and (iteration, step) == (KILLED_IN, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            scores, spread = policy(td[seen].float()).chunk(2, -1)
            drawn = (scores + torch.rand_like(scores) * spread).detach()
            discrete = env.action_spec.dtype == torch.int64
            td["action"] = (
                torch.nn.functional.one_hot(drawn.argmax(-1), drawn.shape[-1])
                if discrete
                else drawn.tanh()
            )
            data, td = env.step_and_maybe_reset(td)
            gain = gain + (data["next", "reward"] * (scores - drawn).square()).mean()
        optimiser.zero_grad()
        (-gain).backward()
        optimiser.step()
    env.close()
    return [parameter.detach() for parameter in policy.parameters()]


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), dies=True)
