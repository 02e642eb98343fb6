"""Plots of returns and of one row of a rollout, on axes of matplotlib.

This module decides what is drawn and how it is labelled. It makes figures with pyplot where it is given no axes, so that
notebooks show them.

Conventions
    curve  what has one return for each episode, in order: an `Evaluation`, `EpisodeStats`, recorded data, or numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor

from envkit.arrays.integers import as_int
from envkit.data.arguments import require_tensordict
from envkit.data.paths import Path, as_path
from envkit.errors import ArgumentError, MissingKeyError
from envkit.evaluation.outcome import EpisodeStats, Evaluation, episode_stats
from envkit_bridges.libraries import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Evaluation | EpisodeStats | TensorDictBase | torch.Tensor | np.ndarray | Sequence[float]
Curves = Curve | Mapping[str, Curve]

_WIDEST = 16
"""Numbers a step of an entry that is plotted; more would be no lines to tell apart."""
_HIDDEN = frozenset({"next", "state", "done", "terminated", "truncated", "collector"})


def plot_returns(*curves: Curves, ax: Axes | None = None) -> Axes:
    """Plot the return of each episode, faint, and the mean of the last ones, strong.

    Args:
        *curves: each an `Evaluation`, an `EpisodeStats` or a rollout (of which the episodes that ended count), numbers
            of one axis, or a dict of these by name: ``{"ours": ours, "random": random}``.
        ax: axes of matplotlib to draw on; None makes some.

    Returns:
        The axes.

    Raises:
        ArgumentError: (a ValueError) there is no curve, or one without episodes, or numbers of several axes.
        MissingLibraryError: (an ImportError) matplotlib is not installed.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> from envkit import plot_returns
        >>> figure, ax = plt.subplots()
        >>> returns = {"ours": [1.0, 3.0, 4.0], "random": [1.0, 0.0, 2.0]}
        >>> plot_returns(returns, ax=ax).get_ylabel()
        'return'
        >>> plt.close(figure)
    """
    named = list(_named(curves))
    if not named:
        raise ArgumentError("plot_returns got no curves. Pass evaluate(env, policy), or returns.")
    shown: Any = _axes(1)[0] if ax is None else ax
    for name, values in named:
        window = max(1, len(values) // 20)
        episodes = np.arange(1, len(values) + 1)
        (faint,) = shown.plot(episodes, values, alpha=0.3, linewidth=0.8)
        sums = np.cumsum(np.concatenate([[0.0], values]))
        means = (sums[window:] - sums[:-window]) / window
        shown.plot(episodes[window - 1 :], means, color=faint.get_color(), label=name)
    shown.set(xlabel="episode", ylabel="return")
    _finish(shown, legend=any(name is not None for name, _ in named))
    return shown


def plot_rollout(
    td: TensorDictBase, row: int = 0, *, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """Plot what one row did: the reward, then the actions, and all else that changes and has few numbers a step.

    Dotted lines mark the ends of episodes.

    Args:
        td: a rollout, batch size ``(*batch, T)``.
        row: which one, counted through the batch without time.
        axes: axes of matplotlib, as many as there are entries; None makes a figure.

    Returns:
        Array of the axes, one for each entry.

    Raises:
        ArgumentError: (a ValueError) there is no such row, no time, or ``axes`` are too few.
        MissingKeyError: (a KeyError) no entry can be plotted.
        MissingLibraryError: (an ImportError) matplotlib is not installed.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> from envkit import GymEnv, plot_rollout
        >>> env = GymEnv("Pendulum-v1")
        >>> [axes.get_ylabel() for axes in plot_rollout(env.rollout(5))]
        ['reward', 'action', 'observation']
        >>> plt.close()
        >>> env.close()
    """
    run = _row_of(td, row)
    entries = dict(_plotted(run))
    if not entries:
        raise MissingKeyError(
            f"the data has no entry with 1 to {_WIDEST} numbers a step to plot; it has "
            f"{sorted(map(str, td.keys(True, True)))}. Pass a rollout with such an entry, e.g. the reward."
        )
    drawn_on: Any = _axes(len(entries)) if axes is None else axes
    shown = np.atleast_1d(drawn_on)
    if len(shown) < len(entries):
        raise ArgumentError(
            f"axes are {len(shown)}, but {len(entries)} entries are plotted: {sorted(entries)}. Pass one for each."
        )
    done = run.get(("next", "done"), None)
    ends = [] if done is None else np.flatnonzero(_numbers(done).any(1))
    for ax, (name, values) in zip(shown, entries.items(), strict=False):
        ax.plot(np.arange(len(values)), values, linewidth=1)
        for end in ends:
            ax.axvline(end, color="0.6", linewidth=0.8, linestyle=":")
        ax.set_ylabel(name)
        _finish(ax, legend=False)
    shown[len(entries) - 1].set_xlabel("step")
    return shown


def _named(curves: Any) -> Iterator[tuple[str | None, np.ndarray]]:
    for curve in curves:
        if isinstance(curve, Mapping) and not isinstance(curve, TensorDictBase):
            yield from ((str(name), _returns(one)) for name, one in curve.items())
        else:
            yield None, _returns(curve)


def _returns(curve: object) -> np.ndarray:
    if isinstance(curve, TensorDictBase):
        curve = episode_stats(curve)
    if isinstance(curve, EpisodeStats):
        curve = curve.returns[curve.ended]
    elif isinstance(curve, Evaluation):
        curve = curve.returns
    values = curve.detach().cpu().numpy() if isinstance(curve, torch.Tensor) else np.asarray(curve)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "buif":
        raise ArgumentError(
            f"a curve has shape {values.shape} and dtype {values.dtype}, but must have one return for each of at least "
            "one episode that ended. Pass several curves as several arguments, or in a dict by name."
        )
    return values.astype(np.float64)


def _row_of(td: TensorDictBase, row: int) -> Any:
    require_tensordict("td", td, "what rollout gave")
    if not td.ndim:
        raise ArgumentError(
            "td has no time axis. Pass what rollout gave, of batch size (*batch, T)."
        )
    rows: Any = td.flatten(0, -2) if td.ndim > 1 else [td]
    row = as_int("row", row, least=0, meaning="the number of a row of the batch")
    if row >= len(rows):
        raise ArgumentError(
            f"row is {row}, but the data has {len(rows)} rows. Pass 0 to {len(rows) - 1}."
        )
    return rows[row]


def _plotted(run: TensorDictBase) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the entries with few numbers a step: rewards, actions, then what changes of the rest of the root."""
    following = run.get("next", None)
    for path, value in [] if following is None else _stacked(following):
        if path[-1] == "reward":
            yield ".".join(path), _numbers(value)
    for path, value in sorted(_stacked(run.exclude("next")), key=_actions_first):
        hidden = any(part in _HIDDEN or part.startswith("_") for part in as_path(path))
        if isinstance(value, torch.Tensor) and not hidden and path[-1] != "reward":
            numbers = _numbers(value)
            changes = len(numbers) == 1 or path[-1] == "action" or (numbers != numbers[:1]).any()
            if 0 < numbers.shape[1] <= _WIDEST and changes:
                yield ".".join(path), numbers


def _stacked(run: TensorDictBase, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Visit the entries that have one shape at all steps."""
    for name in run.keys():
        try:
            value: Any = run.get(name)
        except RuntimeError:  # a lazy stack of unlike shapes
            continue
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            yield from _stacked(value, (*above, name))
        else:
            yield (*above, name), value


def _actions_first(leaf: tuple[Any, Any]) -> bool:
    return leaf[0][-1] != "action"


def _numbers(value: Any) -> np.ndarray:
    """Return what is at each step: float64, shape (T, n)."""
    return value.detach().cpu().double().reshape(len(value), -1).numpy()


def _axes(count: int) -> Any:
    pyplot = require("matplotlib.pyplot")
    size = (6.4, 1.0 + (2.6 if count == 1 else 1.4 * count))
    _, axes = pyplot.subplots(count, sharex=True, squeeze=False, figsize=size, layout="constrained")
    return axes[:, 0]


def _finish(ax: Any, *, legend: bool) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(alpha=0.25)
    if legend:
        ax.legend(frameon=False)
