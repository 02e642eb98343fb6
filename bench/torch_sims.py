"""Balance of VMAS, many rows at once: envkit against a bare loop that records the same tensors, and TorchRL's wrapper.

All draw random actions, record observations, actions, rewards and flags of each step, and reset rows that have ended. The
bare loop makes the same resets as envkit: one call for all rows, otherwise one call for each.

Run: ``python -m bench.torch_sims [--quick]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
import vmas
from torchrl.envs.libs.vmas import VmasEnv as TheirVmasEnv

from bench.harness import compare
from envkit import VmasEnv

SCENARIO, LIMIT = "balance", 100


def bare(rows: int, steps: int) -> Callable[[], object]:
    """Step the library, and stack what each step gave."""
    env: Any = vmas.make_env(
        SCENARIO, num_envs=rows, max_steps=LIMIT, terminated_truncated=True, seed=0
    )

    def observed() -> torch.Tensor:
        (observations,) = env.get_from_scenario(True, False, False, False)
        return torch.stack(observations, 1)

    def work() -> dict[str, torch.Tensor]:
        env.reset(return_observations=False)
        observation, seen = observed(), []
        for _ in range(steps):
            action = torch.rand(rows, len(env.agents), 2) * 2 - 1
            after, reward, terminated, truncated, infos = env.step([*action.unbind(1)])
            moment = {
                "observation": observation,
                "action": action,
                "after": torch.stack(after, 1),
                "reward": torch.stack(reward, 1)[..., None],
                "terminated": terminated,
                "truncated": truncated,
            }
            for name in infos[0]:
                moment[name] = torch.stack([info[name] for info in infos], 1)
            seen.append(moment)
            over = terminated | truncated
            observation = moment["after"]
            if over.any():
                reset_ended(env, over)
                observation = torch.where(over[:, None, None], observed(), observation)
        return {name: torch.stack([moment[name] for moment in seen], 1) for name in seen[0]}

    return work


def reset_ended(env: Any, over: torch.Tensor) -> None:
    """Begin episodes in the rows of a bare env of the library that have ended, as envkit does."""
    if over.all():
        env.reset(return_observations=False)
        return
    for row in over.nonzero().flatten().tolist():
        env.reset_at(row, return_observations=False)


def rollout(env: Any, steps: int) -> Callable[[], object]:
    """Roll out with random actions."""
    return lambda: env.rollout(steps, break_when_any_done=False)


def by_hand(env: VmasEnv, steps: int) -> Callable[[], None]:
    """Call `step_and_maybe_reset` in a loop."""

    def work() -> None:
        td = env.reset()
        for _ in range(steps):
            _, td = env.step_and_maybe_reset(env.rand_action(td))

    return work


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for rows in (64, 4096):
        steps = 20 if quick else 50
        options: dict[str, Any] = {"num_envs": rows, "max_steps": LIMIT, "seed": 0}
        ours, theirs = VmasEnv(SCENARIO, **options), TheirVmasEnv(SCENARIO, **options)
        compare(
            f"VMAS {SCENARIO} x {rows}, {steps} steps a round",
            {
                "bare loop": bare(rows, steps),
                "envkit rollout": rollout(ours, steps),
                "envkit step_and_maybe_reset": by_hand(ours, steps),
                "TorchRL rollout": rollout(theirs, steps),
            },
            steps=steps * rows,
            reference="bare loop",
            rounds=3 if quick else 7,
        )


if __name__ == "__main__":
    main()
