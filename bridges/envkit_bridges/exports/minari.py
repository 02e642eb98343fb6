"""Recorded steps as a Minari dataset, and Minari's datasets as TensorDicts.

A dataset that envkit wrote is read as it was written; those of others by the names of their spaces.

Conventions
    id       ``(namespace/)name-v(version)``, as Minari writes it; its folder lies in ``MINARI_DATASETS_PATH``.
    episode  a group of arrays in Minari's HDF5 file, or Minari's ``EpisodeData``: observations, and some infos, have
             one row more than there are steps.
    held     columns by path, all episodes one after the other, with an axis of one row in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path as File
from typing import Any, TypedDict

import numpy as np
from tensordict import TensorDictBase
from typing_extensions import Unpack

from envkit.data.episodes import EpisodeNumbers, Piece
from envkit.data.files import telling, undamaged, whole_folder
from envkit.data.keywords import refuse_unknown
from envkit.data.paths import Path, as_key
from envkit.data.results import EnvData
from envkit.env.base import EnvBase
from envkit.env.wrapper_hints import wrapping_of
from envkit.errors import ArgumentError, ArgumentTypeError, MissingFileError
from envkit_bridges.exports.columns import TEXT, Column, Layout, arrays_of, data_of, read_batches
from envkit_bridges.exports.hdf5 import append, hdf5_file, quoted
from envkit_bridges.exports.minari_roles import Roles, kept_layout, roles_of, spaces_of
from envkit_bridges.exports.recovered import env_spec_of
from envkit_bridges.libraries import require

__all__ = ["from_minari", "to_minari"]


class MinariMetadata(TypedDict, total=False):
    """What Minari keeps of a dataset beside its steps."""

    author: str | Iterable[str]
    author_email: str | Iterable[str]
    algorithm_name: str
    code_permalink: str
    description: str
    requirements: list[str]
    ref_min_score: float
    ref_max_score: float


def to_minari(
    data: TensorDictBase | Iterable[TensorDictBase],
    dataset_id: str,
    *,
    env: EnvBase | None = None,
    **metadata: Unpack[MinariMetadata],
) -> Any:
    """Write recorded steps as a Minari dataset, which is complete or not there.

    Args:
        data: a rollout, batch size ``(*rows, T)``, or an iterable of such, as a collector. Batches are written as
            they come, and not kept.
        dataset_id: ``(namespace/)name-v(version)``, of no dataset that is there.
        env: whose data it is, its transforms included. It says which entries are observations and actions, and
            their spaces; one-hot codes are written as indices. Without it, entries that are under ``next`` as
            well are observations, those named "action" actions, and spaces hold whatever their dtypes hold.
        **metadata: see `MinariMetadata`.

    Returns:
        The ``minari.MinariDataset``. An episode that the end of the data cut is marked truncated. Entries that are
        neither observations, actions, rewards nor flags are its infos, but for a stateless env's ``state``, which
        is left out. ``recover_environment()`` works where ``env`` is an env of Gymnasium, an open pool of such, or
        made by `make` from numbers and text, no transforms were added, and Gymnasium can make its wrappers
        again; else ``env_spec`` is None. No second env is made to find that out.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed or taken, metadata is of another
            type, told before anything is collected; the data has no steps, no time axis, or what no column can hold.
        OptionError: (a TypeError) Minari has no such metadata.
        MissingKeyError: (a KeyError) observations, actions, rewards or done flags are not found.
        BatchSizeError: (a RuntimeError) batches have unlike rows.
        WriteError: (an OSError) it cannot be written. Nothing has changed then.
        MissingLibraryError: (an ImportError) Minari is not installed.
    """
    minari = require("minari")
    require("h5py")
    with telling(dataset_id):
        namespace, target = _place(dataset_id)
    if target.exists():
        raise ArgumentError(
            f"there is a dataset {dataset_id!r} in {target.parent} already. Choose another name or version, or delete "
            f"it: minari.delete_dataset({dataset_id!r})."
        )
    listed = _listed(metadata)
    if env is not None and not isinstance(env, EnvBase):
        raise ArgumentTypeError(
            f"env is of type {type(env).__name__}, but must be an env of envkit. Wrap it: {wrapping_of(env)}."
        )
    with whole_folder(target) as folder:
        counts, storage = _write(data, folder / "data", target, env)
        with telling(target):
            told = {"dataset_id": dataset_id, "minari_version": minari.__version__}
            storage.update_metadata({**told, **counts, **listed})
            storage.update_metadata({"dataset_size": storage.get_size()})
    with telling(target):
        _name_namespace(namespace)
    return minari.load_dataset(dataset_id)


def from_minari(dataset_id: str) -> EnvData:
    """Read a Minari dataset, of whoever wrote it, that lies on this machine.

    Returns:
        Its steps, batch size ``(steps,)``, one episode after the other; on the CPU. What `to_minari` wrote comes
        back in its keys, shapes and dtypes, ``state`` aside, with the last step of a cut episode truncated. Datasets
        of others have ``observation`` (or the names of their Dict space), ``action``, ``reward``, flags,
        ``("collector", "traj_ids")``, and below ``"info"`` the infos that have a row for each step.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed, the dataset is damaged, or
            holds what no column can.
        MissingFileError: (a FileNotFoundError) there is no such dataset.
        MissingLibraryError: (an ImportError) Minari is not installed.
    """
    minari = require("minari")
    try:
        _, target = _place(dataset_id)
    except OSError as error:
        raise MissingFileError(
            f"there is no dataset {dataset_id!r}: Minari's folder of datasets is not there and cannot be made: "
            f"{error}. Set MINARI_DATASETS_PATH to the folder that holds yours."
        ) from error
    if not target.exists():
        raise MissingFileError(
            f"there is no dataset {dataset_id!r} in {target.parent}. Fetch it: minari.download_dataset({dataset_id!r})."
        )
    with undamaged(target, "a whole Minari dataset"):
        return _data_of(minari.load_dataset(dataset_id))


# ---------------------------------------------------------------------------------------- names


def _place(dataset_id: str) -> tuple[str | None, File]:
    """Give the namespace of an id, and the folder of its dataset.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed.
        OSError: Minari's folder of datasets is not there and cannot be made.
    """
    pattern = require("minari.dataset.minari_dataset").DATASET_ID_RE
    if not isinstance(dataset_id, str):
        raise ArgumentTypeError(
            f"dataset_id is {dataset_id!r}, of type {type(dataset_id).__name__}, but must be text: 'ant/random-v0'."
        )
    match = pattern.fullmatch(dataset_id)
    if match is None or match["version"] is None:
        raise ArgumentError(
            f"dataset_id is {dataset_id!r}, but must be of the form '(namespace/)name-v(version)', of letters, digits, "
            "'_' and '-', the namespace of two or more, as 'ant/random-v0'."
        )
    root = require("minari.storage.datasets_root_dir")
    return match["namespace"], root.get_dataset_path(dataset_id)


def _name_namespace(namespace: str | None) -> None:
    """Have Minari list the namespace."""
    spaces = require("minari.namespace")
    if namespace is not None and namespace not in spaces.list_local_namespaces():
        spaces.create_namespace(namespace)


_TEXTS = ("algorithm_name", "code_permalink", "description")
_LISTS = ("author", "author_email", "requirements")


def _listed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Give the metadata in the form that Minari asks for: sets of authors.

    Raises:
        OptionError: (a TypeError) Minari has no such metadata.
        ArgumentTypeError: (a TypeError) one is neither the text, nor the list of texts, nor the number that it must be.
    """
    refuse_unknown("to_minari", metadata, list(MinariMetadata.__annotations__))
    told = {name: value for name, value in metadata.items() if value is not None}
    for name, value in told.items():
        if name in _LISTS:
            texts = [value] if isinstance(value, str) else _as_list(value)
            is_right, wanted = (
                all(isinstance(one, str) for one in texts),
                "a list of texts",
            )
            told[name] = texts if name == "requirements" else set(texts)
        elif name in _TEXTS:
            is_right, wanted = isinstance(value, str), "a text"
        else:
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
            wanted = "a number"
        if not is_right:
            raise ArgumentTypeError(
                f"{name} is {value!r}, of type {type(value).__name__}, but must be {wanted}, which the dataset's "
                "metadata keeps."
            )
    return told


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) else [value]


# ---------------------------------------------------------------------------------------- writing


def _write(
    data: Any, folder: File, target: File, env: EnvBase | None
) -> tuple[dict[str, Any], Any]:
    """Write all steps; gives what the metadata says of them, and Minari's storage."""
    storage: Any = None
    writer: _Writer | None = None
    with ExitStack() as stack:
        for batch, layout in read_batches(data):
            if writer is None:
                roles = roles_of(layout, env)
                with telling(target):
                    storage = _storage(folder, layout, roles, env)
                    raw = stack.enter_context(open(folder / "main_data.hdf5", "rb+"))
                file, check = stack.enter_context(hdf5_file(raw, target))
                writer = _Writer(file, layout, roles)
            writer.add(batch)
            check()
        assert writer is not None  # data without steps was refused
        writer.finish()
    held = {"layout": kept_layout(writer.layout, writer.roles).to_json()}
    told = {"total_steps": writer.total_steps, "total_episodes": writer.total_episodes}
    return {**told, "envkit": {**held, "roles": writer.roles.to_dict()}}, storage


def _storage(folder: File, layout: Layout, roles: Roles, env: EnvBase | None) -> Any:
    spaces = spaces_of(layout, roles, env, require("gymnasium.spaces"))
    spec = None if env is None else env_spec_of(env, *spaces)
    storage = require("minari.dataset.minari_storage").MinariStorage
    return storage.new(folder, *spaces, env_spec=spec, data_format="hdf5", jpeg_encoding=False)


class _Writer:
    """Appends steps to the groups of their episodes."""

    def __init__(self, file: Any, layout: Layout, roles: Roles):
        self.layout = layout
        self.roles = roles
        self.total_steps = 0
        self._file = file
        self._numbers = EpisodeNumbers()
        self._columns: dict[Path, Column] = {column.path: column for column in layout.columns}
        self._last: dict[
            int, dict[str, np.ndarray]
        ] = {}  # by open episode: the rows it may end with

    @property
    def total_episodes(self) -> int:
        return self._numbers.count

    def add(self, batch: TensorDictBase) -> None:
        arrays = arrays_of(batch, self.layout)
        for piece in self._numbers.number(batch).pieces:
            parts = {
                path: held[piece.row, piece.start : piece.stop] for path, held in arrays.items()
            }
            self._append(piece, parts)
            self.total_steps += piece.stop - piece.start

    def _append(self, piece: Piece, parts: Mapping[Path, np.ndarray]) -> None:
        group = self._file.require_group(f"episode_{piece.episode}")
        group.require_group("infos")
        group.attrs["id"] = piece.episode
        group.attrs["total_steps"] = piece.first + piece.stop - piece.start
        before, last = self._last.pop(piece.episode, {}), {}
        roles = self.roles
        for paths, name in ((roles.observations, "observations"), (roles.infos, "infos")):
            for path in paths:
                place = _place_of(name, path, paths)
                now = roles.held(path, parts[path])
                following = roles.held(path, parts["next", *path])
                _require_carried(path, before.get(place), now, following)
                last[place] = following[-1:]
                append(group, place, np.concatenate([now, last[place]]) if piece.ended else now)
        for path in roles.actions:
            append(group, _place_of("actions", path, roles.actions), roles.held(path, parts[path]))
        for path in roles.alone:
            append(group, _place_of("infos", path, ()), parts[path])
        for name, values in self._flags(parts).items():
            append(group, name, values)
        if not piece.ended:
            self._last[piece.episode] = {place: rows.copy() for place, rows in last.items()}

    def _flags(self, parts: Mapping[Path, np.ndarray]) -> dict[str, np.ndarray]:
        def flag(name: str) -> np.ndarray | None:
            held = parts.get(("next", name))
            return None if held is None else np.asarray(held.reshape(len(held), -1).any(-1))

        done, terminated, truncated = flag("done"), flag("terminated"), flag("truncated")
        assert done is not None
        if terminated is None:
            terminated = done if truncated is None else done & ~truncated
        if truncated is None:
            truncated = done & ~terminated
        reward = parts["next", *self.roles.reward]
        one = reward.size == len(reward)
        return {
            "rewards": reward.reshape(-1) if one else reward,
            "terminations": terminated,
            "truncations": truncated,
        }

    def finish(self) -> None:
        """End the episodes that the end of the data cut."""
        for episode, rows in self._last.items():
            group = self._file[f"episode_{episode}"]
            group["truncations"][-1] = True
            for place, values in rows.items():
                append(group, place, values)


def _require_carried(
    path: Path, before: np.ndarray | None, now: np.ndarray, following: np.ndarray
) -> None:
    """Check that each step of an episode begins where the one before led.

    Raises:
        ArgumentError: (a ValueError) one does not, so that one row cannot stand for both.
    """
    led = following[:-1] if before is None else np.concatenate([before, following[:-1]])
    begun = now[len(now) - len(led) :]
    if not np.array_equal(led, begun, equal_nan=led.dtype.kind == "f"):
        raise ArgumentError(
            f"{as_key(path)!r} of a step is not what {as_key(('next', *path))!r} of the step before was, within one "
            "episode. Minari keeps one of both. Write data as the env gave it, before steps are skipped or joined."
        )


def _place_of(kind: str, path: Path, paths: Iterable[Path]) -> str:
    """Name the array of an entry in the group of its episode; the only entry of a space is that space's own array."""
    is_only = kind != "infos" and len(tuple(paths)) == 1
    return kind if is_only else "/".join([kind, *quoted(path)])


def _data_of(dataset: Any) -> EnvData:
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
    parts = [dict(_columns_named(episode)) for episode in dataset.iterate_episodes()]
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


def _columns_named(episode: Any) -> Iterator[tuple[Path, np.ndarray]]:
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
