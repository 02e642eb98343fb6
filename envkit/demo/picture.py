"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

__all__ = ["curves_figure", "draw_curves"]

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
