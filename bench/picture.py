"""Draw the animated picture at the top of README: pendulums learn to swing up in JAX and in Gymnasium, under one policy.

The policy trains on 256 pendulums of gymnax. After some updates it plays an episode on 128 of them, and on 8 of
Gymnasium in worker processes, which it never trains on. The picture shows these episodes one after the other.

Run: ``make picture``, or ``python -m bench.picture [--out FILE] [--seed 0]``; takes two minutes on 2 cores
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from envkit import (
    PPO,
    ActionScaling,
    EnvBase,
    GymEnv,
    ParallelEnv,
    TransformedEnv,
    make,
)

FILE = Path(__file__).parents[1] / "docs" / "figures" / "swing_up.gif"
ROWS, STEPS = 256, 50  # of a batch
STAGES = (0, 10, 20, 40)  # updates after which the policy plays
GRID, FEW = (16, 8), (2, 4)  # columns and rows of pendulums, in gymnax and in Gymnasium
EPISODE = 200
SHOWN, LAST_SHOWN = 70, 130  # steps of the episode of a stage, and of the last
EVERY = 2  # steps between two pictures
COLOURS = 24
DOWN, UP, INK = "#b8c4ce", "#1f77c9", "#22303c"


@dataclass(frozen=True)
class Stage:
    """What the policy does after some training.

    Attributes:
        trained: environment steps until then.
        angles: of each kind of env by name, radians from upright, float array [rows, steps].
        returns: mean return of an episode in each kind of env.
    """

    trained: int
    angles: dict[str, np.ndarray]
    returns: dict[str, float]


def stages(train_on: EnvBase, play_on: Mapping[str, EnvBase], seed: int) -> Iterator[Stage]:
    """Train a policy, and have it play whole episodes on the way."""
    ppo = PPO(
        train_on,
        frames_per_batch=ROWS * STEPS,
        epochs=4,
        learning_rate=2e-3,
        gamma=0.95,
        seed=seed,
    )

    def stage() -> Stage:
        played = {name: env.rollout(EPISODE, ppo.policy) for name, env in play_on.items()}
        angles, returns = {}, {}
        for name, data in played.items():
            cos, sin, _ = data["observation"].unbind(-1)
            angles[name] = torch.atan2(sin, cos).numpy()
            returns[name] = float(data["next", "reward"].sum(1).mean())
        return Stage(ppo.frames, angles, returns)

    yield stage()
    for updates in STAGES[1:]:
        ppo.fit(updates * ROWS * STEPS, progress=False)
        yield stage()
    ppo.close()


def draw(episodes: list[Stage], file: Path) -> None:
    """Write the episodes of all stages into an animated GIF."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from PIL import Image

    tint = LinearSegmentedColormap.from_list("swing", [DOWN, UP])
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.color": INK}):
        sheet = Figure(figsize=(9, 4.6), dpi=100, facecolor="white")
        canvas = FigureCanvasAgg(sheet)
        places = {"gymnax": (0.02, 0.1, 0.68, 0.72), "Gymnasium": (0.73, 0.1, 0.25, 0.72)}
        says = {
            "gymnax": f"{GRID[0] * GRID[1]} pendulums in JAX (gymnax)\nthe policy trains on {ROWS} of these",
            "Gymnasium": f"{FEW[0] * FEW[1]} in Gymnasium, in processes\nnever trained on",
        }
        arms, roots, captions = {}, {}, {}
        for name, (columns, rows) in {"gymnax": GRID, "Gymnasium": FEW}.items():
            axes = sheet.add_axes(places[name])
            axes.set(xlim=(-0.6, columns - 0.4), ylim=(-0.6, rows - 0.4), aspect="equal")
            axes.axis("off")
            x, y = np.meshgrid(np.arange(columns), np.arange(rows))
            roots[name] = np.stack([x.ravel(), y.ravel()], -1).astype(float)
            width = 2.2 if name == "gymnax" else 5
            arms[name] = axes.add_collection(LineCollection([], linewidths=width, capstyle="round"))
            axes.scatter(*roots[name].T, s=width * 1.5, color=INK, zorder=3)
            left, _, wide, _ = places[name]
            sheet.text(left + wide / 2, 0.83, says[name], ha="center", fontsize=11)
            captions[name] = sheet.text(left + wide / 2, 0.05, "", ha="center", fontsize=10)
        headline = sheet.text(0.5, 0.95, "", ha="center", fontsize=13, weight="bold")
        pictures = []
        for number, stage in enumerate(episodes):
            headline.set_text(
                f"One torch policy, after {stage.trained:,} environment steps of training"
            )
            for name, caption in captions.items():
                caption.set_text(f"mean return {stage.returns[name]:,.0f}")
            last = number == len(episodes) - 1
            for step in range(0, LAST_SHOWN if last else SHOWN, EVERY):
                for name, angles in stage.angles.items():
                    now = angles[:, step]
                    tips = roots[name] + 0.42 * np.stack([-np.sin(now), np.cos(now)], -1)
                    arms[name].set_segments(np.stack([roots[name], tips], 1))
                    arms[name].set_color(tint((1 + np.cos(now)) / 2))
                canvas.draw()
                pictures.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    palette = pictures[-1].quantize(COLOURS)
    first, *others = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]
    shown_ms = [50] * len(pictures)  # twice as fast as the pendulums, which step 20 times a second
    shown_ms[-1] = 2000
    first.save(file, save_all=True, append_images=others, duration=shown_ms, loop=0, optimize=True)
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB, {len(pictures)} pictures")


def main() -> None:
    """Train, play, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="a GIF; default: that of README")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    with ExitStack() as opened, torch.no_grad():
        scaled = [
            TransformedEnv(env, ActionScaling())
            for env in (
                make("gymnax/Pendulum-v1", batch_size=[ROWS]),
                make("gymnax/Pendulum-v1", batch_size=[GRID[0] * GRID[1]]),
                ParallelEnv(FEW[0] * FEW[1], lambda: GymEnv("Pendulum-v1")),
            )
        ]
        for number, env in enumerate(scaled):
            env.set_seed(options.seed + number)
            opened.callback(env.close)
        with torch.enable_grad():
            played_by = {"gymnax": scaled[1], "Gymnasium": scaled[2]}
            episodes = list(stages(scaled[0], played_by, options.seed))
    for stage in episodes:
        print(f"{stage.trained:9,} steps: {stage.returns}")
    draw(episodes, options.out)


if __name__ == "__main__":
    main()
