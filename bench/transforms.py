"""What five transforms cost a Brax env: inside its programs, outside of them, and in TorchRL.

Stepwise: a small torch policy acts on every observation, as in `bench.brax_step`. Unroll: random
actions, all steps in one program, transforms included. Every ratio is to the same env without transforms;
"outside" puts a transform in front that does nothing and cannot be fused.

Run: ``python -m bench.transforms [--quick] [--device cuda]``
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from types import ModuleType
from typing import Any

import torch

import envkit
from bench.brax_scan import envkit_unroll
from bench.brax_step import envkit_loop, policy_for, torchrl_env, torchrl_loop
from bench.harness import compare
from envkit import BraxEnv, Compose, Transform, TransformedEnv

WORKS = (
    ("inverted_pendulum", 1024, 100),
    ("ant", 1024, 10),
)


class Opaque(Transform):
    """Does nothing; what follows it stays outside of programs."""

    only_adds_done = True

    def _call(self, next_td):
        return next_td


def five(library: ModuleType, size: int) -> list[Any]:
    """Make five transforms of a library for observations of one size."""
    return [
        library.ObservationNorm(
            torch.full((size,), 0.1),
            torch.full((size,), 2.0),
            ["observation"],
            standard_normal=True,
        ),
        library.RewardScaling(0.0, 0.1),
        library.StepCounter(500),
        library.RewardSum(),
        library.InitTracker(),
    ]


def measure(name: str, rows: int, steps: int, *, device: str, quick: bool) -> None:
    """Compare one env at one batch size with and without transforms."""
    bare = BraxEnv(name, backend="spring", batch_size=[rows], device=device, episode_length=1000)
    bare.set_seed(0)
    size = bare.observation_spec["observation"].shape[-1]
    policy = policy_for(size, bare.action_spec.shape[-1], device)
    inside = TransformedEnv(bare, Compose(*five(envkit, size)))
    outside = TransformedEnv(bare, Compose(Opaque(), *five(envkit, size)))
    works = {
        "envkit, no transforms": envkit_loop(bare, steps, policy),
        "envkit, five inside": envkit_loop(inside, steps, policy),
        "envkit, five outside": envkit_loop(outside, steps, policy),
    }
    if importlib.util.find_spec("torchrl") and not quick:
        from torchrl import envs as peer

        theirs = torchrl_env(name, rows)
        works["TorchRL, no transforms"] = torchrl_loop(theirs, steps, policy)
        five_of_theirs = peer.TransformedEnv(theirs, peer.Compose(*five(peer, size)))
        works["TorchRL, five"] = torchrl_loop(five_of_theirs, steps, policy)
    options = {"steps": steps * rows, "reference": "envkit, no transforms", "rounds": 9}
    compare(f"{name} spring x {rows} on {device}, torch policy, transforms", works, **options)
    compare(
        f"{name} spring x {rows} on {device}, random actions, transforms",
        {
            "envkit, no transforms": envkit_unroll(bare, bare.reset(), steps, None),
            "envkit, five inside": envkit_unroll(inside, inside.reset(), steps, None),
        },
        **options,
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="no TorchRL, no ant")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    begin = time.perf_counter()
    for name, rows, steps in WORKS:
        if not (options.quick and name == "ant"):
            measure(name, rows, steps, device=options.device, quick=options.quick)
    print(f"\ndone in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
