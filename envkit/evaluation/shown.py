"""A table of a rollout for notebooks: how its episodes went, and what entries it has.

A rollout is a plain TensorDict, a class of another library, whose own way to show itself is left as it is.
`show_rollout` wraps one to be looked at, and ``%load_ext envkit`` has a notebook show each as that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.arrays.elementwise import dtype_name
from envkit.data.arguments import require_tensordict
from envkit.data.transition import leaves
from envkit.errors import ArgumentError
from envkit.evaluation.outcome import EpisodeStats, episode_stats

_LEFT = "style='text-align: left'"
_WIDTH, _HEIGHT = 240, 40
_POINTS = 240
"""The most returns that are plotted, evenly chosen; more would be no points to tell apart."""


class ShownRollout:
    """A rollout to be looked at; see `show_rollout`.

    Attributes:
        data: the rollout itself.
        episodes: its episodes, None where the data does not tell them.

    Example:
        >>> from envkit import GymEnv, show_rollout
        >>> env = GymEnv("CartPole-v1", max_episode_steps=3)
        >>> shown = show_rollout(env.rollout(3))
        >>> shown.data.batch_size, shown.episodes.returns
        (torch.Size([3]), tensor([3.], dtype=torch.float64))
        >>> env.close()
    """

    def __init__(self, data: TensorDictBase):
        require_tensordict("td", data, "what rollout gave")
        self.data = data
        self.episodes: EpisodeStats | None = _episodes(data)

    def __repr__(self) -> str:
        return f"Rollout({', '.join(f'{name}={fact}' for name, fact in self._facts().items())})"

    def _repr_html_(self) -> str:
        facts = "".join(
            f"<tr><th {_LEFT}>{escape(name)}</th><td {_LEFT}>{escape(fact)}</td></tr>"
            for name, fact in self._facts().items()
        )
        entries = "".join(
            f"<tr>{''.join(f'<td {_LEFT}>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._entries()
        )
        title = type(self.data).__name__ if self.episodes is None else "Rollout"
        head = "".join(f"<th {_LEFT}>{name}</th>" for name in ("entry", "shape", "dtype", "device"))
        return (
            f"<div><b>{title}</b><table>{facts}</table>{self._plot()}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{entries}</tbody></table></div>"
        )

    def _facts(self) -> dict[str, str]:
        data, episodes = self.data, self.episodes
        facts = {"batch size": str(tuple(data.batch_size)), "device": str(data.device)}
        if any(name is not None for name in data.names):
            facts["names"] = str(data.names)
        if episodes is None:
            return facts
        ended = episodes.ended
        facts["episodes"] = f"{int(ended.sum())} ended, {int((~ended).sum())} cut by the end"
        if bool(ended.any()):
            facts["mean return"] = f"{float(episodes.returns[ended].mean()):.4g}"
            facts["mean length"] = f"{float(episodes.lengths[ended].double().mean()):.4g}"
        return facts

    def _entries(self) -> list[tuple[str, str, str, str]]:
        entries: list[tuple[str, str, str, str]] = []
        for path, value in leaves(self.data):
            name = ".".join(path)
            if isinstance(value, torch.Tensor):
                dtype = dtype_name(value.dtype)
                entries.append((name, str(tuple(value.shape)), dtype, str(value.device)))
            else:
                entries.append((name, "", type(value).__name__, ""))
        return entries

    def _plot(self) -> str:
        """Draw the returns of the episodes that ended, in order; nothing where they are fewer than two."""
        if self.episodes is None:
            return ""
        returns = self.episodes.returns[self.episodes.ended]
        chosen = returns[:: max(1, -(-len(returns) // _POINTS))].tolist()
        return _line(chosen) if len(chosen) > 1 else ""


def show_rollout(td: TensorDictBase) -> ShownRollout:
    """Show a rollout as a table: its episodes, then each entry with shape, dtype and device.

    Episodes are counted as by `episode_stats`, and shown where the data has one reward a step, done flags, and an axis
    of time or trajectory ids, and is in the order of time. Means are of episodes that ended. The data is not copied.

    Args:
        td: what `rollout` gave, or a batch of a collector; any TensorDict is shown with its entries.

    Returns:
        An object that shows itself in Jupyter, its returns as a small plot, and prints as one line.

    Raises:
        DataTypeError: (a TypeError) ``td`` is no TensorDict.

    Example:
        >>> from envkit import GymEnv, show_rollout
        >>> env = GymEnv("CartPole-v1", max_episode_steps=3)
        >>> show_rollout(env.rollout(3))
        Rollout(batch size=(3,), device=cpu, names=['time'],
                episodes=1 ended, 0 cut by the end, mean return=3, mean length=3)
        >>> env.close()
    """
    return ShownRollout(td)


def load_ipython_extension(shell: object) -> None:
    """Show every TensorDict as `show_rollout` does, in this notebook; ``%load_ext envkit`` calls it.

    Nothing else is changed: ``print`` and ``repr`` are TensorDict's own. ``%unload_ext envkit`` takes it back.

    Args:
        shell: IPython's, as ``get_ipython()`` gives it.

    Example:
        >>> from types import SimpleNamespace
        >>> from IPython.core.formatters import DisplayFormatter
        >>> from tensordict import TensorDict
        >>> from envkit import load_ipython_extension
        >>> shell = SimpleNamespace(display_formatter=DisplayFormatter())
        >>> load_ipython_extension(shell)
        >>> html = shell.display_formatter.formatters["text/html"](TensorDict())
        >>> html.startswith("<div><b>TensorDict</b>")
        True
    """
    _formatter(shell).for_type(TensorDictBase, _html)


def unload_ipython_extension(shell: object) -> None:
    """Show TensorDicts as they show themselves again; ``%unload_ext envkit`` calls it.

    Args:
        shell: IPython's, as ``get_ipython()`` gives it.

    Example:
        >>> from types import SimpleNamespace
        >>> from IPython.core.formatters import DisplayFormatter
        >>> from tensordict import TensorDict
        >>> from envkit import load_ipython_extension, unload_ipython_extension
        >>> shell = SimpleNamespace(display_formatter=DisplayFormatter())
        >>> load_ipython_extension(shell)
        >>> unload_ipython_extension(shell)
        >>> shell.display_formatter.formatters["text/html"](TensorDict()) is None
        True
    """
    _formatter(shell).pop(TensorDictBase, None)


def _formatter(shell: Any) -> Any:
    return shell.display_formatter.formatters["text/html"]


def _html(data: TensorDictBase) -> str:
    return ShownRollout(data)._repr_html_()


def _episodes(data: Any) -> EpisodeStats | None:
    try:
        return episode_stats(data) if _tells_episodes(data) else None
    except ArgumentError:  # steps that were shuffled
        return None


def _tells_episodes(data: Any) -> bool:
    reward, done = data.get(("next", "reward"), None), data.get(("next", "done"), None)
    if reward is None or done is None or not data.ndim:
        return False
    ids = data.get(("collector", "traj_ids"), None)
    return (data.names[-1] == "time" or ids is not None) and reward.numel() == data.numel()


def _line(values: Sequence[float]) -> str:
    """Draw numbers from left to right as a line of SVG."""
    low, high = min(values), max(values)
    across, scale = _WIDTH / (len(values) - 1), (_HEIGHT - 4) / ((high - low) or 1.0)
    points = " ".join(
        f"{number * across:.1f},{_HEIGHT - 2 - (value - low) * scale:.1f}"
        for number, value in enumerate(values)
    )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}'><title>returns, {low:.4g} to {high:.4g}</title>"
        f"<polyline points='{points}' fill='none' stroke='#1f4e8c'></polyline></svg>"
    )
