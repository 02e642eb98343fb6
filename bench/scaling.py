"""Steps per second against batch size, as a picture: envkit, bare Brax and TorchRL.

A small network acts. Lines that are called from Python at every step, and lines that are one program.

Run: ``python -m bench.scaling [--quick] [--device cuda]``; writes ``docs/figures/scaling.png``.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.brax_scan import acting_like, bare_scan, envkit_unroll
from bench.brax_step import bare_loop, envkit_loop, policy_for, torchrl_env, torchrl_loop
from bench.harness import Measured, compare, machine
from envkit import BraxEnv, compile_policy

NAME = "inverted_pendulum"
SIZES = (1, 16, 64, 256, 1024, 4096)
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "scaling.png"
COLOURS = {"bare": "0.45", "envkit": "C0", "TorchRL": "C3"}


def measure(rows: int, device: str, rounds: int) -> list[Measured]:
    """Compare all lines at one batch size."""
    steps = 200 if rows <= 64 else 50
    env = BraxEnv(NAME, backend="spring", batch_size=[rows], device=device)
    env.set_seed(0)
    policy = policy_for(4, 1, device)
    act, params = acting_like(policy)
    works: dict[str, Callable[[], Any]] = {
        "bare lax.scan": bare_scan(NAME, rows, steps, act, params),
        "envkit unroll": envkit_unroll(env, env.reset(), steps, compile_policy(policy)),
        "bare jit + dlpack loop": bare_loop(NAME, rows, steps, policy),
        "envkit stepwise": envkit_loop(env, steps, policy),
    }
    if importlib.util.find_spec("torchrl"):
        works["TorchRL stepwise"] = torchrl_loop(torchrl_env(NAME, rows), steps, policy)
    return compare(
        f"{NAME} spring x {rows} on {device}, against batch size",
        works,
        steps=steps * rows,
        reference="bare lax.scan",
        rounds=rounds,
    )


def draw(found: dict[int, list[Measured]], device: str) -> None:
    """Draw steps per second against batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    for name in [row.work for row in found[max(found)]]:
        points = [
            (rows, row.steps_per_s)
            for rows, line in found.items()
            for row in line
            if row.work == name
        ]
        in_program = "scan" in name or "unroll" in name
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=COLOURS[name.split()[0]],
            linestyle="-" if in_program else "--",
            marker="o" if name.startswith("envkit") else "",
            markersize=4,
        )
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="environment steps per second")
    axes.set_xticks(list(found), [f"{rows:,}" for rows in found])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False,
        fontsize=8,
        title="solid: one program, dashed: step by step",
        title_fontsize=8,
    )
    seen = machine()
    where = seen["accelerator"] if device != "cpu" else f"{seen['cores']} CPU cores"
    axes.set_title(f"Brax {NAME} (spring), {where}", fontsize=10)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)
    print(f"\nwrote {FIGURE.name}")


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sizes, rounds = (SIZES[::2], 5) if options.quick else (SIZES, 7)
    draw({rows: measure(rows, options.device, rounds) for rows in sizes}, options.device)


if __name__ == "__main__":
    main()
