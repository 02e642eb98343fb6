"""A Minari dataset as one TensorDict: that of envkit as it was written, those of others by the names of their spaces.

Conventions
    episode  Minari's ``EpisodeData``; observations, and some infos, have a row more than there are steps.
    held     columns by path, all episodes one after the other, with an axis of one row in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from envkit.data.paths import Path
from envkit.data.results import EnvData
from envkit.errors import ArgumentError
from envkit_bridges.exports.columns import TEXT, Column, Layout, data_of
from envkit_bridges.exports.hdf5_file import quoted
from envkit_bridges.exports.minari_roles import Roles

__all__ = ["data_of_dataset"]


def data_of_dataset(dataset: Any) -> EnvData:
    """Read all episodes of a ``minari.MinariDataset``; see `from_minari`."""
    told = dataset.storage.metadata.get("envkit")
    if told is None:
        return _foreign(dataset)
    layout = Layout.from_json(told["layout"], dataset.id)
    roles = Roles.from_dict(told["roles"])
    parts = [dict(_own(episode, layout, roles)) for episode in dataset.iterate_episodes()]
    held = {
        column.path: np.concatenate([part[column.path] for part in parts])[None]
        for column in layout.columns
    }
    return data_of(layout, held)


def _own(episode: Any, layout: Layout, roles: Roles) -> Iterator[tuple[Path, np.ndarray]]:
    """Give the columns of one episode that `to_minari` wrote."""
    columns = {column.path: column for column in layout.columns}
    steps = len(episode.rewards)
    for paths, tree in ((roles.observations, episode.observations), (roles.infos, episode.infos)):
        for path in paths:
            is_only = tree is episode.observations and len(paths) == 1
            values = _coded(roles, columns[path], tree if is_only else _at(tree, path))
            yield path, values[:-1]
            yield ("next", *path), values[1:]
    for path in roles.actions:
        tree = episode.actions
        values = tree if len(roles.actions) == 1 else _at(tree, path)
        yield path, _coded(roles, columns[path], values)
    for path in roles.alone:
        yield path, _text(_at(episode.infos, path))
    flags = _flags(episode)
    for column in layout.columns:
        kind = column.path[-1]
        if column.path == ("next", *roles.reward):
            yield column.path, episode.rewards.reshape(steps, *column.held_shape)
        elif column.path[:-1] == ("next",) and kind in flags:
            shape = (steps, *(1 for _ in column.shape))
            yield column.path, np.broadcast_to(flags[kind].reshape(shape), (steps, *column.shape))
        elif len(column.path) == 1 and kind in flags:
            yield column.path, np.zeros((steps, *column.shape), bool)


def _coded(roles: Roles, column: Column, values: Any) -> np.ndarray:
    return roles.coded(column.path, _text(values), column.held_dtype)


def _text(values: Any) -> np.ndarray:
    """Give an array; text, of which some readers give bytes, as objects."""
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=object)
    if array.dtype != object:
        return array
    texts = [one.decode() if isinstance(one, bytes) else one for one in array.flat]
    return np.array(texts, dtype=object).reshape(array.shape)


def _at(tree: Any, path: Path) -> Any:
    for name in quoted(path):
        tree = tree[name]
    return tree


def _flags(episode: Any) -> dict[str, np.ndarray]:
    terminated, truncated = episode.terminations.astype(bool), episode.truncations.astype(bool)
    return {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}


# ---------------------------------------------------------------------------------------- of others


def _foreign(dataset: Any) -> EnvData:
    parts = [dict(_named(episode)) for episode in dataset.iterate_episodes()]
    paths = sorted(set.intersection(*(set(part) for part in parts)))
    held = {path: np.concatenate([part[path] for part in parts])[None] for path in paths}
    columns = [
        Column(path, ".".join(path), TEXT if one.dtype == object else str(one.dtype), one.shape[2:])
        for path, one in held.items()
    ]
    nodes = sorted({path[:at] for path in paths for at in range(1, len(path))})
    return data_of(
        Layout((), ("time",), tuple(columns), tuple((n, ()) for n in nodes), False), held
    )


def _named(episode: Any) -> Iterator[tuple[Path, np.ndarray]]:
    """Give the columns of one episode by the names of its spaces."""
    steps = len(episode.rewards)
    yield from _carried((), episode.observations, "observation", steps)
    for path, values in _leaves(episode.actions):
        yield path or ("action",), values
    if episode.infos:
        for path, values in _leaves(episode.infos):
            if len(values) == steps + 1:
                yield ("info", *path), values[:-1]
                yield ("next", "info", *path), values[1:]
            elif len(values) == steps:
                yield ("info", *path), values
    yield ("next", "reward"), episode.rewards.reshape(steps, -1)
    yield ("collector", "traj_ids"), np.full(steps, episode.id, np.int64)
    for name, flag in _flags(episode).items():
        yield ("next", name), flag[:, None]
        yield (name,), np.zeros((steps, 1), bool)


def _carried(above: Path, tree: Any, name: str, steps: int) -> Iterator[tuple[Path, np.ndarray]]:
    for path, values in _leaves(tree):
        here = (*above, *(path or (name,)))
        if here[0] in (
            "action",
            "collector",
            "done",
            "info",
            "next",
            "reward",
            "terminated",
            "truncated",
        ):
            raise ArgumentError(
                f"the dataset has an observation {here[0]!r}, which is the name of something else in a TensorDict. "
                "Read it with minari.load_dataset."
            )
        yield here, values[:-1]
        yield ("next", *here), values[1:]


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, np.ndarray]]:
    """Give the arrays of a tree; members of a tuple are named by their place."""
    if isinstance(tree, tuple):
        tree = {str(place): part for place, part in enumerate(tree)}
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from _leaves(part, (*path, name))
    elif np.ndim(tree):
        yield path, _text(tree)
