"""What the demo shows: a progress bar on a terminal or a few plain lines elsewhere, and the learning curve as a picture.

Everything is said through `say`, which puts a line above a running bar. Announcements of envkit itself,
long compilations, comes the same way within `announcements_said`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm


def say(text: str) -> None:
    """Print a line at once; a bar that is on the screen moves below it."""
    tqdm.write(text)
    sys.stdout.flush()


class TrainingBar:
    """How far training is: a bar if stderr is a terminal, else a line for each evaluation."""

    def __init__(self, budget: int):
        self._bar = tqdm(
            total=budget, desc="training", unit=" steps", unit_scale=True, disable=None
        )

    def advance(self, steps: int) -> None:
        """Count environment steps."""
        self._bar.update(steps)

    def evaluated(self, steps: int, lengths: Mapping[str, float]) -> None:
        """Show mean episode lengths by simulator after ``steps`` steps."""
        text = ", ".join(f"{name} {length:.0f}" for name, length in lengths.items())
        if self._bar.disable:
            say(f"{steps:>11,} steps: {text}")
        else:
            self._bar.set_postfix_str(text)

    def close(self) -> None:
        """Stop the bar; what it shows stays."""
        self._bar.close()


@contextmanager
def announcements_said() -> Iterator[None]:
    """Send what the logger "envkit" announces to `say`, and to no other handler."""
    logger, handler = logging.getLogger("envkit"), _Sayer()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Sayer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"  {self.format(record)}")


# Curves that coincide stay apart for the eye: a wide pale line with rings below, a thin dashed one above.
_STYLES = (
    {
        "color": "#f2a65a",
        "linewidth": 5,
        "marker": "o",
        "markersize": 11,
        "markerfacecolor": "white",
    },
    {"color": "#1f4e8c", "linewidth": 1.5, "linestyle": "--", "marker": "s", "markersize": 4.5},
)


def draw_curves(
    path: Path,
    steps: Sequence[int],
    lengths: Mapping[str, Sequence[float]],
    *,
    goal: float,
    longest: float,
) -> None:
    """Write the figure of `curves_figure` to ``path``, as a PNG."""
    curves_figure(steps, lengths, goal=goal, longest=longest).savefig(path)


def curves_figure(
    steps: Sequence[int],
    lengths: Mapping[str, Sequence[float]],
    *,
    goal: float,
    longest: float,
) -> Figure:
    """Draw mean episode lengths of two simulators against environment steps.

    Args:
        steps: steps trained at each evaluation.
        lengths: by simulator, as many as ``steps``; their last values are written beside the curves.
        goal: mean length that counts as success.
        longest: the length at which a time limit ends episodes.
    """
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="tight")
    axes = figure.add_subplot()
    for style, (name, values) in zip(_STYLES, lengths.items(), strict=True):
        axes.plot(steps, values, label=f"{name}: {values[-1]:.0f} at the end", **style)
    axes.axhspan(goal, longest, color="#3a9d5d", alpha=0.15, linewidth=0)
    axes.axhline(goal, color="#3a9d5d", linewidth=1.2, label=f"goal: {goal:.0f} of {longest:.0f}")
    is_reached = min(values[-1] for values in lengths.values()) >= goal
    axes.set(
        xlabel="environment steps",
        ylabel="mean episode length (steps)",
        xlim=(-0.02 * max(steps), 1.03 * max(steps)),
        ylim=(0, longest * 1.05),
        title="Inverted pendulum, one policy in two simulators: "
        + (f"goal reached after {steps[-1]:,} steps" if is_reached else "goal NOT reached"),
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f} k")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.9))
    return figure
