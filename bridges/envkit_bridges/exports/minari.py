"""Recorded steps as a Minari dataset, and Minari's datasets as TensorDicts.

`Roles` says which entries of recorded data are what Minari calls observations, actions, rewards and infos. A dataset that
envkit wrote is read as it was written; those of others by the names of their spaces.

Conventions
    id       ``(namespace/)name-v(version)``, as Minari writes it; its folder lies in ``MINARI_DATASETS_PATH``.
    episode  a group of arrays in Minari's HDF5 file, or Minari's ``EpisodeData``: observations, and some infos, have
             one row more than there are steps.
    held     columns by path, all episodes one after the other, with an axis of one row in front.
    carried  entries that are under ``next`` as well: a step's is the next root's. They have a row more than steps.
    choice   one-hot codes, held as indices, as users of gym write actions.
    start    the first option of a discrete space of Gymnasium. Data counts options from 0, a dataset from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from types import ModuleType
from typing import Any, TypedDict

import numpy as np
import torch
from tensordict import TensorDictBase
from typing_extensions import Unpack

from envkit.arrays.elementwise import dtype_name
from envkit.data.episodes import EpisodeNumbers, Piece
from envkit.data.files import telling, undamaged, whole_folder
from envkit.data.keywords import refuse_unknown
from envkit.data.paths import Path, as_key, infos_in, leaf_paths, nest
from envkit.data.timeline import step_entry
from envkit.env.as_gym import private_entries
from envkit.env.base import EnvBase
from envkit.env.wrapper_hints import require_env
from envkit.errors import ArgumentError, ArgumentTypeError, MissingFileError, MissingKeyError
from envkit.specs import Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from envkit.specs.annotations import EnvData
from envkit_bridges.exports.columns import TEXT, Column, Layout, arrays_of, data_of, read_batches
from envkit_bridges.exports.hdf5 import append, hdf5_file, quoted, require_own_data
from envkit_bridges.exports.recovered import env_spec_of, spaces_inside
from envkit_bridges.gym.codecs import asked_space, codec_of, dict_space, shown_space
from envkit_bridges.libraries import require

_FLAGS = {("done",), ("terminated",), ("truncated",)}


@dataclass(frozen=True)
class Choice:
    """One-hot codes, one or several side by side.

    Attributes:
        sizes: of each.
        is_single: whether there is one, whose index has no separate axis.
    """

    sizes: tuple[int, ...]
    is_single: bool

    def indices(self, codes: np.ndarray, path: Path) -> np.ndarray:
        """Return the index of each code.

        Raises:
            ArgumentError: (a ValueError) a code has not one entry that is set.
        """
        parts = np.split(codes, np.cumsum(self.sizes)[:-1], -1)
        if not all(((part != 0).sum(-1) == 1).all() for part in parts):
            raise ArgumentError(
                f"the entry {as_key(path)!r} holds codes that are not one-hot. Pass data as the env took it."
            )
        found = np.stack([part.argmax(-1) for part in parts], -1)
        return found[..., 0] if self.is_single else found

    def codes(self, indices: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Undo `indices`."""
        indices = indices[..., None] if self.is_single else indices
        parts = [np.eye(size, dtype=dtype)[indices[..., at]] for at, size in enumerate(self.sizes)]
        return np.concatenate(parts, -1)


@dataclass(frozen=True)
class Roles:
    """Paths of entries by what they are to Minari; what is under ``next`` as well is here without that.

    Attributes:
        observations: carried entries that are observations.
        actions: entries that are actions.
        reward: the entry under ``next``.
        infos: carried entries that are no observations.
        alone: entries that are not carried, ``next`` included.
        choices: paths of one-hot codes.
        starts: paths of options that are not counted from 0 in the dataset, with the first option of each.
    """

    observations: tuple[Path, ...]
    actions: tuple[Path, ...]
    reward: Path
    infos: tuple[Path, ...]
    alone: tuple[Path, ...]
    choices: Mapping[Path, Choice]
    starts: Mapping[Path, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Write the roles down as lists and text."""
        choices = [[path, one.sizes, one.is_single] for path, one in self.choices.items()]
        starts = [[path, np.asarray(one).tolist()] for path, one in self.starts.items()]
        return {**vars(self), "choices": choices, "starts": starts}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Roles:
        """Read what `to_dict` wrote."""
        choices = {
            tuple(path): Choice(tuple(sizes), is_single)
            for path, sizes, is_single in told["choices"]
        }
        paths = {
            name: tuple(map(tuple, told[name]))
            for name in ("observations", "actions", "infos", "alone")
        }
        starts = {tuple(path): np.array(start) for path, start in told.get("starts", ())}
        return cls(**paths, reward=tuple(told["reward"]), choices=choices, starts=starts)

    def held(self, path: Path, values: np.ndarray) -> np.ndarray:
        """Write values as the dataset holds them: options as numbers, counted as Gymnasium counts them."""
        if path in self.choices:
            values = self.choices[path].indices(values, path)
        return values + self.starts[path] if path in self.starts else values

    def coded(self, path: Path, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Undo `held`."""
        if path in self.starts:
            values = values - self.starts[path]
        return self.choices[path].codes(values, dtype) if path in self.choices else values


def roles_of(layout: Layout, env: EnvBase | None) -> Roles:
    """Return what each entry is: as the env declares it, or without one as it is named and carried.

    Raises:
        MissingKeyError: (a KeyError) the data lacks an observation, an action, a reward or a done flag.
        ArgumentError: (a ValueError) there are several rewards, entries without elements, or such as the env does
            not give.
    """
    columns = {column.path: column for column in layout.columns}
    root = {path for path in columns if path[0] != "next"}
    following = {path[1:] for path in columns if path[0] == "next"}
    carried = {path for path in root & following if path not in _FLAGS and path[0] != "state"}
    if env is None:
        flags = {path for path in carried if path[-1:] in _FLAGS}  # of agents
        known = carried - flags - infos_in(carried)
        private = {path for path in known if any(name.startswith("_") for name in path)}
        observations = {path for path in known - private if path[0] != "collector"}
        actions = {path for path in root - following if path[-1] == "action"}
        reward: Path = ("reward",)
    else:
        observations = (
            set(leaf_paths(env.full_observation_spec)) - private_entries(env) - env._facts.infos
        )
        actions = set(leaf_paths(env.full_action_spec))
        rewards = leaf_paths(env.full_reward_spec)
        if len(rewards) != 1:
            raise ArgumentError(f"Minari holds one reward, but the env has {rewards}. Sum them.")
        reward = rewards[0]
    _require("observations", observations, carried)
    _require("actions", actions, root)
    _require("reward", {reward}, following)
    _require("flags", {("done",)}, following)
    if env is not None:
        shown = {*observations, *(("next", *path) for path in observations)}
        _require_of_env(env, [columns[path] for path in sorted({*shown, *actions})])
    left = {path for path in columns if path[0] == "state" or path[:2] == ("next", "state")}
    left |= {*_FLAGS, *(("next", *path) for path in {*_FLAGS, *carried, reward})}
    kept = {path: column for path, column in columns.items() if path not in left}
    for column in kept.values():
        _require_elements(column)
    return Roles(
        observations=tuple(sorted(observations)),
        actions=tuple(sorted(actions)),
        reward=reward,
        infos=tuple(sorted(carried - observations)),
        alone=tuple(sorted(set(kept) - carried - actions)),
        choices={} if env is None else _choices(env, observations | actions),
        starts={} if env is None else _starts(env, observations, actions),
    )


def _require(kind: str, wanted: set[Path], there: set[Path]) -> None:
    missing = wanted - there
    if missing or not wanted:
        raise MissingKeyError(
            f"{kind} that Minari needs are not in the data: {sorted(map(str, map(as_key, missing))) or 'none is found'}. "
            f"There are {sorted(map(str, map(as_key, there)))}. Pass env=..., the one whose data this is, with its transforms."
        )


def _require_of_env(env: EnvBase, found: Iterable[Column]) -> None:
    """Check that observations and actions have the shapes and dtypes that the env declares."""
    for column in found:
        spec = _spec_of(env, column.path[column.path[0] == "next" :])
        sizes = tuple(spec.shape)
        is_alike = len(sizes) == len(column.shape) and all(
            wanted in (-1, size) for wanted, size in zip(sizes, column.shape, strict=True)
        )
        if spec.dtype is not None and not (is_alike and column.dtype == dtype_name(spec.dtype)):
            raise ArgumentError(
                f"the entry {as_key(column.path)!r} is {column.dtype} of shape {column.shape}, but env gives "
                f"{dtype_name(spec.dtype)} of shape {sizes}. {_fix(column, spec, is_alike)}"
            )


def _fix(column: Column, spec: TensorSpec, is_alike: bool) -> str:
    key = as_key(column.path)
    if is_alike and column.path[0] != "next" and spec.dtype is not None:
        return (
            f"Convert it, as the env did when it took it: data[{key!r}] = data[{key!r}].to({spec.dtype}). Or pass the env "
            "whose data this is, with its transforms."
        )
    return "Pass the env whose data this is, with its transforms."


def _require_elements(column: Column) -> None:
    if 0 in column.held_shape or (column.dtype == TEXT and column.shape):
        raise ArgumentError(
            f"the entry {as_key(column.path)!r} is {column.dtype} of shape {column.shape}, which Minari cannot hold. "
            f"Leave it out: data.exclude({as_key(column.path)!r})."
        )


def _choices(env: EnvBase, paths: Iterable[Path]) -> dict[Path, Choice]:
    found = {}
    for path in paths:
        spec = _spec_of(env, path)
        if isinstance(spec, OneHot):
            found[path] = Choice((spec.n,), True)
        elif isinstance(spec, MultiOneHot):
            found[path] = Choice(tuple(int(size) for size in spec.nvec), False)
    return found


def _starts(env: EnvBase, observations: set[Path], actions: set[Path]) -> dict[Path, Any]:
    """Return the first option of each entry whose space in Gymnasium does not count from 0."""
    inside = spaces_inside(env)
    found = {}
    for space, key, paths in zip(
        inside or (), ("observation", "action"), (observations, actions), strict=False
    ):
        for path, (leaf, _) in codec_of(space, categorical=True, key=key).leaves.items():
            if path in paths and isinstance(leaf.spec, Categorical | MultiCategorical):
                start = np.asarray(leaf.decode(leaf.spec.zero())).reshape(tuple(leaf.spec.shape))
                if start.any():
                    found[path] = start
    return found


def _spec_of(env: EnvBase, path: Path) -> TensorSpec:
    is_shown = path in leaf_paths(env.full_observation_spec)
    specs = env.single_full_observation_spec if is_shown else env.single_full_action_spec
    return specs[as_key(path)]


def kept_layout(layout: Layout, roles: Roles) -> Layout:
    """Return the layout of what Minari holds: one row, without what is left out."""
    carried = {*roles.observations, *roles.infos}
    kept = {*carried, *(("next", *path) for path in carried), *roles.actions, *roles.alone}
    kept |= {("next", *roles.reward), *_FLAGS, *(("next", *path) for path in _FLAGS)}
    gone = {("state",), ("next", "state")}
    return replace(
        layout,
        rows=(),
        names=("time",),
        columns=tuple(column for column in layout.columns if column.path in kept),
        nodes=tuple(
            node for node in layout.nodes if not any(node[0][: len(at)] == at for at in gone)
        ),
    )


# ---------------------------------------------------------------------------------------- spaces


def spaces_of(
    layout: Layout, roles: Roles, env: EnvBase | None, spaces: ModuleType
) -> tuple[Any, Any]:
    """Return the spaces of observations and of actions, which contain what is written."""
    columns = {column.path: column for column in layout.columns}

    def space(path: Path) -> Any:
        spec: Any = None if env is None else _spec_of(env, path)
        if path in roles.starts:
            return _from(roles.starts[path], asked_space(spec, spaces), spaces)
        if spec is not None and path in roles.choices:
            return asked_space(spec, spaces)
        column = columns[path]
        is_flag = column.held_dtype == bool and not column.held_shape
        if spec is not None and column.dtype == str(column.held_dtype) and not is_flag:
            return shown_space(spec, spaces)
        return _space_of_data(column, spaces)

    return tuple(
        _tree({path: space(path) for path in paths}, spaces)
        for paths in (roles.observations, roles.actions)
    )  # type: ignore[return-value]


def _from(start: np.ndarray, counted: Any, spaces: ModuleType) -> Any:
    """Return a space of options that counts from ``start`` instead of 0."""
    if isinstance(counted, spaces.Discrete):
        return spaces.Discrete(int(counted.n), start=int(start.reshape(-1)[0]))
    return spaces.MultiDiscrete(
        counted.nvec, counted.dtype, start=np.broadcast_to(start, counted.nvec.shape)
    )


def _tree(members: Mapping[Path, Any], spaces: ModuleType) -> Any:
    """One space stands for itself, several are a Dict, nested as the entries are."""
    if len(members) == 1:
        return next(iter(members.values()))
    return dict_space(nest({quoted(path): space for path, space in members.items()}), spaces)


def _space_of_data(column: Column, spaces: ModuleType) -> Any:
    """Return the space of all values that a column can have."""
    if column.dtype == TEXT:
        return spaces.Text(max_length=4096)
    dtype, shape = column.held_dtype, column.held_shape
    if dtype == bool:
        return spaces.MultiBinary(shape) if shape else spaces.Box(0, 1, (), bool)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    bounds = np.iinfo(dtype)
    return spaces.Box(bounds.min, bounds.max, shape, dtype)


class MinariMetadata(TypedDict, total=False):
    """Metadata that Minari keeps of a dataset beside its steps."""

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
        is left out. ``recover_environment()`` works for an env of Gymnasium, an open pool of such, and an env that
        `make` made from numbers and text. It needs an env without added transforms, whose wrappers Gymnasium can make
        again; else ``env_spec`` is None. No second env is made to find that out.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed or taken, metadata is of another
            type, reported before anything is collected; the data has no steps, no time axis, or what no column can
            hold.
        OptionError: (a TypeError) Minari has no such metadata.
        MissingKeyError: (a KeyError) observations, actions, rewards or done flags are not found.
        BatchSizeError: (a RuntimeError) batches have unlike rows.
        WriteError: (an OSError) it cannot be written; no file has changed then.
        MissingLibraryError: (an ImportError) Minari is not installed.

    Example:
        >>> import minari
        >>> from envkit import GymEnv, to_minari
        >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
        >>> data = env.rollout(10, break_when_any_done=False)
        >>> dataset = to_minari(data, "cartpole/random-v0", env=env)
        >>> minari.load_dataset("cartpole/random-v0").total_episodes
        2
        >>> env.close()
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
    if env is not None:
        require_env("env", env, "Leave it out, or wrap it: GymWrapper(env).")
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
    """Read a Minari dataset, from any writer, that is on this machine.

    Args:
        dataset_id: ``(namespace/)name-v(version)``, of a dataset that `to_minari` or another program has written.

    Returns:
        Its steps, batch size ``(steps,)``, one episode after the other; on the CPU. Data that `to_minari` wrote comes
        back in its keys, shapes and dtypes, ``state`` aside, with the last step of a cut episode truncated. Where it had no
        trajectory ids, ``("collector", "traj_ids")`` are the numbers of the episodes. Datasets
        of others have ``observation`` (or the names of their Dict space), ``action``, ``reward``, flags,
        ``("collector", "traj_ids")`` too, and below ``"info"`` the infos that have a row for each step.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed, the dataset is damaged, or
            holds what no column can, or names other files to read data from.
        MissingFileError: (a FileNotFoundError) there is no such dataset.
        MissingLibraryError: (an ImportError) Minari is not installed.

    Example:
        >>> import minari
        >>> from envkit import GymEnv, from_minari, to_minari
        >>> env = GymEnv("CartPole-v1")
        >>> dataset = to_minari(env.rollout(5), "cartpole/short-v0", env=env)
        >>> minari.load_dataset("cartpole/short-v0").total_steps
        5
        >>> from_minari("cartpole/short-v0")["observation"].shape
        torch.Size([5, 4])
        >>> env.close()
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
        if (held := target / "data" / "main_data.hdf5").exists():  # Minari has another form too
            with require("h5py").File(held, "r") as file:
                require_own_data(file, held)
        _require_spaces(target / "data")
        return _data_of(minari.load_dataset(dataset_id))


def _require_spaces(data: File) -> None:
    """Check that the metadata says which spaces there are: without, Minari makes the env that it names, which runs code.

    Raises:
        ArgumentError: (a ValueError) it does not.
    """
    storage = require("minari.dataset.minari_storage").MinariStorage
    missing = {"observation_space", "action_space"} - storage.read_raw_metadata(data).keys()
    if missing:
        raise ArgumentError(
            f"the dataset {data.parent} does not say its {' and '.join(sorted(missing))}; expected both in its "
            "metadata.json, since Minari would import and make an env to find out. If you trust who wrote it, read it "
            "with minari.load_dataset."
        )


# ---------------------------------------------------------------------------------------- names


def _place(dataset_id: str) -> tuple[str | None, File]:
    """Return the namespace of an id, and the folder of its dataset.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed.
        OSError: Minari's folder of datasets is not there and cannot be made.
    """
    pattern = require("minari.dataset.minari_dataset").DATASET_ID_RE
    if not isinstance(dataset_id, str):
        raise ArgumentTypeError(
            f"dataset_id is {dataset_id!r}, of type {type(dataset_id).__name__}, but must be text. Pass 'ant/random-v0', for "
            "example."
        )
    match = pattern.fullmatch(dataset_id)
    if match is None or match["version"] is None:
        raise ArgumentError(
            f"dataset_id is {dataset_id!r}, but must have the form '(namespace/)name-v(version)', of letters, digits, "
            "'_' and '-'. The namespace has two characters or more. Pass 'ant/random-v0', for example."
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
    """Return the metadata in the form that Minari asks for: sets of authors.

    Raises:
        OptionError: (a TypeError) Minari has no such metadata.
        ArgumentTypeError: (a TypeError) one is neither the text, nor the list of texts, nor the number that it must be.
    """
    refuse_unknown("to_minari", metadata, list(MinariMetadata.__annotations__))
    told = {name: value for name, value in metadata.items() if value is not None}
    for name, value in told.items():
        if name in _LISTS:
            one_only = isinstance(value, str) or not isinstance(value, Iterable)
            texts = [value] if one_only else list(value)
            is_right, wanted = all(isinstance(one, str) for one in texts), "a list of texts"
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


# ---------------------------------------------------------------------------------------- writing


def _write(
    data: Any, folder: File, target: File, env: EnvBase | None
) -> tuple[dict[str, Any], Any]:
    """Write all steps; gives what the metadata says of them, and Minari's storage."""
    storage: Any = None
    check: Any = None
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
        # by open episode: the rows it may end with
        self._last: dict[int, dict[str, np.ndarray]] = {}

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
    parts, ids = [], []
    for episode in dataset.iterate_episodes():
        parts.append(dict(_own(episode, layout, roles)))
        ids.append(np.full(len(episode.rewards), episode.id, np.int64))
    held = {
        column.path: np.concatenate([part[column.path] for part in parts])[None]
        for column in layout.columns
    }
    data = data_of(layout, held)
    if step_entry(data, "traj_ids") is None:
        data.set(("collector", "traj_ids"), torch.from_numpy(np.concatenate(ids)))
    return data


def _own(episode: Any, layout: Layout, roles: Roles) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield the columns of one episode that `to_minari` wrote."""
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
    """Return an array; text, of which some readers give bytes, as objects."""
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
    """Yield the columns of one episode by the names of its spaces."""
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


_TAKEN = {*("action", "collector", "done", "info", "next", "reward", "terminated", "truncated")}


def _carried(above: Path, tree: Any, name: str, steps: int) -> Iterator[tuple[Path, np.ndarray]]:
    for path, values in _leaves(tree):
        here = (*above, *(path or (name,)))
        if here[0] in _TAKEN:
            raise ArgumentError(
                f"the dataset has an observation {here[0]!r}, which is the name of something else in a TensorDict. "
                "Read it with minari.load_dataset."
            )
        yield here, values[:-1]
        yield ("next", *here), values[1:]


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield the arrays of a tree; members of a tuple are named by their place."""
    if isinstance(tree, tuple):
        tree = {str(place): part for place, part in enumerate(tree)}
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from _leaves(part, (*path, name))
    elif np.ndim(tree):
        yield path, _text(tree)
