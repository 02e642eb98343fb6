"""Recorded steps as a Minari dataset, and Minari's datasets as TensorDicts.

`Roles` says which entries of recorded data are Minari's observations, actions, rewards and infos. Minari's own storage
writes and reads the episodes. A dataset of envkit is read as it was written, others by the names of their spaces.

Conventions
    id       ``(namespace/)name-v(version)``, as Minari writes it; its folder lies in ``MINARI_DATASETS_PATH``.
    carried  entries that are under ``next`` as well: a step's is the next root's. A dataset has a row more of them
             than there are steps.
    held     values as the dataset holds them: one-hot codes as indices, as users of gym write actions.
    start    the first option of a discrete space of Gymnasium. Data counts options from 0, a dataset from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File
from types import ModuleType
from typing import Any, TypedDict

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import Unpack

from envkit.arrays.elementwise import dtype_name
from envkit.data.episodes import EpisodeNumbers
from envkit.data.files import telling, undamaged, whole_folder
from envkit.data.keywords import refuse_unknown
from envkit.data.paths import Path, as_key, infos_in, leaf_paths, nest
from envkit.data.timeline import step_entry
from envkit.env.base import EnvBase
from envkit.env.wrapper_hints import require_env
from envkit.errors import ArgumentError, ArgumentTypeError, MissingFileError, MissingKeyError
from envkit.specs import Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from envkit.specs.annotations import EnvData
from envkit_bridges.exports.columns import (
    TEXT,
    Column,
    Layout,
    arrays_of,
    data_of,
    read_batches,
    tensor_of,
    tuples,
)
from envkit_bridges.exports.hdf5 import FileForHDF5, quoted, require_own_data
from envkit_bridges.exports.recovered import env_spec_of, spaces_inside
from envkit_bridges.exports.shown_spaces import private_entries
from envkit_bridges.gym.codecs import (
    RowLeaf,
    asked_space,
    codec_of,
    dict_space,
    leaf_of,
    shown_space,
)
from envkit_bridges.libraries import require

_FLAGS = {("done",), ("terminated",), ("truncated",)}


@dataclass(frozen=True)
class Roles:
    """Paths of entries by their role in Minari; paths of carried entries and of the reward are without ``next``.

    Attributes:
        observations: carried entries that are observations.
        actions: entries that are actions.
        reward: the entry under ``next``.
        infos: other entries, carried or not; those under ``next`` alone are with it.
        one_hot: observations and actions that are one-hot codes.
    """

    observations: tuple[Path, ...]
    actions: tuple[Path, ...]
    reward: Path
    infos: tuple[Path, ...]
    one_hot: tuple[Path, ...]

    @classmethod
    def from_json(cls, roles: Mapping[str, Any]) -> Roles:
        """Read the roles that a dataset names."""
        roles = tuples(roles)
        # Older datasets list infos that are not carried by themselves, and the sizes of codes.
        return cls(
            observations=roles["observations"],
            actions=roles["actions"],
            reward=roles["reward"],
            infos=(*roles["infos"], *roles.get("alone", ())),
            one_hot=roles.get("one_hot", tuple(path for path, *_ in roles.get("choices", ()))),
        )

    def places(self) -> list[tuple[Path, Path]]:
        """Return the paths of entries, with that of each in an episode; the only one of a space has its place."""
        places = [(path, ("infos", *quoted(path))) for path in self.infos]
        for kind, paths in (("observations", self.observations), ("actions", self.actions)):
            is_only = len(paths) == 1
            places += [(path, (kind, *(() if is_only else quoted(path)))) for path in paths]
        return places


def _kept_layout(layout: Layout) -> Layout:
    """Return the layout of the data that Minari holds: one row, without the state of a stateless env."""

    def is_kept(path: Path) -> bool:
        return path[path[0] == "next" :][:1] != ("state",)

    return replace(
        layout,
        rows=(),
        names=("time",),
        columns=tuple(column for column in layout.columns if is_kept(column.path)),
        nodes=tuple((path, more) for path, more in layout.nodes if is_kept(path)),
    )


def _roles_of(layout: Layout, env: EnvBase | None) -> Roles:
    """Return what each entry is: as the env declares it, or without one as it is named and carried.

    Raises:
        MissingKeyError: (a KeyError) the data lacks an observation, an action, a reward or a done flag.
        ArgumentError: (a ValueError) there are several rewards, entries without elements, or such as the env does
            not give.
    """
    columns = {column.path: column for column in layout.columns}
    root = {path for path in columns if path[0] != "next"}
    following = {path[1:] for path in columns if path[0] == "next"}
    carried = (root & following) - _FLAGS
    if env is None:
        flags = {path for path in carried if path[-1:] in _FLAGS}  # of agents
        shown = carried - flags - infos_in(carried)
        private = {path for path in shown if any(name.startswith("_") for name in path)}
        observations = {path for path in shown - private if path[0] != "collector"}
        actions = {path for path in root - following if path[-1] == "action"}
        rewards: list[Path] = [("reward",)]
    else:
        observations = (
            set(leaf_paths(env.full_observation_spec)) - private_entries(env) - env._facts.infos
        )
        actions = set(leaf_paths(env.full_action_spec))
        rewards = leaf_paths(env.full_reward_spec)
        if len(rewards) != 1:
            raise ArgumentError(f"Minari holds one reward, but the env has {rewards}. Sum them.")
    for kind, wanted, there in (
        ("observations", observations, carried),
        ("actions", actions, root),
        ("reward", {*rewards}, following),
        ("flags", {("done",)}, following),
    ):
        missing = wanted - there
        if missing or not wanted:
            raise MissingKeyError(
                f"{kind} that Minari needs are not in the data: {sorted(map(str, map(as_key, missing))) or 'none is found'}. "
                f"There are {sorted(map(str, map(as_key, there)))}. Pass env=..., the one whose data this is, with its transforms."
            )
    specs = _specs_of(env)
    for path in sorted({*observations, *(("next", *path) for path in observations), *actions}):
        if specs:
            _require_like(specs[path[path[0] == "next" :]], columns[path])
    apart = {*_FLAGS, *(("next", *path) for path in {*_FLAGS, *carried, rewards[0]})}
    for path in sorted(columns.keys() - apart):
        column = columns[path]
        if 0 in column.held_shape or (column.dtype == TEXT and column.shape):
            raise ArgumentError(
                f"the entry {as_key(path)!r} is {column.dtype} of shape {column.shape}, which Minari cannot hold. "
                f"Leave it out: data.exclude({as_key(path)!r})."
            )
    one_hot = {path for path, spec in specs.items() if isinstance(spec, OneHot | MultiOneHot)}
    return Roles(
        observations=tuple(sorted(observations)),
        actions=tuple(sorted(actions)),
        reward=rewards[0],
        infos=tuple(
            sorted((carried - observations) | (columns.keys() - apart - carried - actions))
        ),
        one_hot=tuple(sorted(one_hot & (observations | actions))),
    )


def _require_like(spec: TensorSpec, column: Column) -> None:
    """Check that an observation or an action has the shape and dtype that the env declares."""
    key, is_root = as_key(column.path), column.path[0] != "next"
    sizes = tuple(spec.shape)
    is_alike = len(sizes) == len(column.shape) and all(
        wanted in (-1, size) for wanted, size in zip(sizes, column.shape, strict=True)
    )
    if spec.dtype is None or (is_alike and column.dtype == dtype_name(spec.dtype)):
        return
    fix = "Pass the env whose data this is, with its transforms."
    if is_alike and is_root:
        fix = (
            f"Convert it, as the env did when it took it: data[{key!r}] = data[{key!r}].to({spec.dtype}). Or pass the env "
            "whose data this is, with its transforms."
        )
    raise ArgumentError(
        f"the entry {key!r} is {column.dtype} of shape {column.shape}, but env gives "
        f"{dtype_name(spec.dtype)} of shape {sizes}. {fix}"
    )


def _specs_of(env: EnvBase | None) -> dict[Path, TensorSpec]:
    """Return the specs of actions and observations of one row, by path; none without an env."""
    if env is None:
        return {}
    trees = env.single_full_action_spec, env.single_full_observation_spec
    return {path: tree[as_key(path)] for tree in trees for path in leaf_paths(tree)}


def _at(tree: Any, place: Path) -> Any:
    for name in place:
        tree = tree[name]
    return tree


def _spaces_of(layout: Layout, roles: Roles, env: EnvBase | None) -> tuple[Any, Any]:
    """Return the spaces of observations and of actions, which contain what is written."""
    spaces = require("gymnasium.spaces")
    columns = {column.path: column for column in layout.columns}
    specs, starts = _specs_of(env), {} if env is None else _starts(env)

    def space(path: Path) -> Any:
        column, spec = columns[path], specs.get(path)
        is_flag = column.held_dtype == bool and not column.held_shape
        if spec is not None and path in starts:
            counted: Any = asked_space(spec, spaces)
            if isinstance(counted, spaces.Discrete):
                return spaces.Discrete(int(counted.n), start=int(starts[path].reshape(-1)[0]))
            start = np.broadcast_to(starts[path], counted.nvec.shape)
            return spaces.MultiDiscrete(counted.nvec, counted.dtype, start=start)
        if spec is not None and path in roles.one_hot:
            return asked_space(spec, spaces)
        if spec is not None and column.dtype == str(column.held_dtype) and not is_flag:
            return shown_space(spec, spaces)
        return _space_of_data(column, spaces)

    places = [(path, place) for path, place in roles.places() if place[0] != "infos"]
    trees = nest({place: space(path) for path, place in places})
    return dict_space(trees["observations"], spaces), dict_space(trees["actions"], spaces)


def _starts(env: EnvBase) -> dict[Path, np.ndarray]:
    """Return the first option of each entry whose space in Gymnasium does not count from 0."""
    starts = {}
    for space, key in zip(spaces_inside(env) or (), ("observation", "action"), strict=False):
        for path, (leaf, _) in codec_of(space, categorical=True, key=key).leaves.items():
            if isinstance(leaf.spec, Categorical | MultiCategorical):
                start = np.asarray(leaf.decode(leaf.spec.zero())).reshape(tuple(leaf.spec.shape))
                if start.any():
                    starts[path] = start
    return starts


def _option_leaves(roles: Roles, *spaces: Any) -> dict[Path, RowLeaf]:
    """Return how options are converted which the dataset numbers in another way than the data.

    Args:
        roles: of the data.
        spaces: of observations, and of actions.
    """
    trees = dict(zip(("observations", "actions"), spaces, strict=True))
    leaves = {}
    for path, place in roles.places():
        if place[0] in trees:
            space, is_one_hot = _at(trees, place), path in roles.one_hot
            if is_one_hot or np.any(getattr(space, "start", 0)):
                leaves[path] = leaf_of(space, not is_one_hot, as_key(path))
    return leaves


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


# ---------------------------------------------------------------------------------------- writing


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
    checked = _checked(metadata)
    if env is not None:
        require_env("env", env, "Leave it out, or wrap it: GymWrapper(env).")
    with whole_folder(target) as folder:
        batches = read_batches(data)
        batch, layout = next(batches)
        with closing(_Writer(folder / "data", target, layout, env)) as writer:
            writer.add(batch)
            for batch, _ in batches:
                writer.add(batch)
            writer.finish(
                {"dataset_id": dataset_id, "minari_version": minari.__version__, **checked}
            )
    namespaces = require("minari.namespace")
    with telling(target):
        if namespace is not None and namespace not in namespaces.list_local_namespaces():
            namespaces.create_namespace(namespace)
    return minari.load_dataset(dataset_id)


def _place(dataset_id: str) -> tuple[str | None, File]:
    """Return the namespace of an id, and the folder of its dataset.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) the id is malformed.
        OSError: Minari's folder of datasets is not there and cannot be made.
    """
    if not isinstance(dataset_id, str):
        raise ArgumentTypeError(
            f"dataset_id is {dataset_id!r}, of type {type(dataset_id).__name__}, but must be text. Pass 'ant/random-v0', for "
            "example."
        )
    match = require("minari.dataset.minari_dataset").DATASET_ID_RE.fullmatch(dataset_id)
    if match is None or match["version"] is None:
        raise ArgumentError(
            f"dataset_id is {dataset_id!r}, but must have the form '(namespace/)name-v(version)', of letters, digits, "
            "'_' and '-'. The namespace has two characters or more. Pass 'ant/random-v0', for example."
        )
    root = require("minari.storage.datasets_root_dir")
    return match["namespace"], root.get_dataset_path(dataset_id)


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata in the form that Minari asks for: sets of authors.

    Raises:
        OptionError: (a TypeError) Minari has no such metadata.
        ArgumentTypeError: (a TypeError) one is neither the text, nor the list of texts, nor the number that it must be.
    """
    refuse_unknown("to_minari", metadata, list(MinariMetadata.__annotations__))
    checked = {name: value for name, value in metadata.items() if value is not None}
    for name, value in checked.items():
        if name in ("author", "author_email", "requirements"):
            is_one = isinstance(value, str) or not isinstance(value, Iterable)
            texts = [value] if is_one else list(value)
            is_right, wanted = all(isinstance(text, str) for text in texts), "a list of texts"
            checked[name] = texts if name == "requirements" or not is_right else set(texts)
        elif name in ("ref_min_score", "ref_max_score"):
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
            wanted = "a number"
        else:
            is_right, wanted = isinstance(value, str), "a text"
        if not is_right:
            raise ArgumentTypeError(
                f"{name} is {value!r}, of type {type(value).__name__}, but must be {wanted}, which the dataset's "
                "metadata keeps."
            )
    return checked


class _Writer:
    """Appends steps to the episodes of a dataset.

    The newest step of each open episode waits for the next batch: it is truncated if the data ends there.
    """

    def __init__(self, folder: File, target: File, layout: Layout, env: EnvBase | None):
        self._target = target
        self._layout = _kept_layout(layout)
        self._roles = roles = _roles_of(self._layout, env)
        columns = {column.path for column in self._layout.columns}
        shown = (*roles.observations, *roles.infos)
        self._carried = [path for path in shown if ("next", *path) in columns]
        self._numbers = EpisodeNumbers()
        self._waiting: dict[int, dict[Path, np.ndarray]] = {}
        self._ids: dict[int, int] = {}  # in the dataset, by number of the episode
        self._steps = Counter[int]()  # by id
        spaces = _spaces_of(self._layout, self._roles, env)
        self._leaves = _option_leaves(self._roles, *spaces)
        spec = None if env is None else env_spec_of(env, *spaces)
        storage = require("minari.dataset.minari_storage").MinariStorage
        with telling(target):
            self._storage = storage.new(
                folder, *spaces, env_spec=spec, data_format="hdf5", jpeg_encoding=False
            )
            self._file = FileForHDF5(self._storage._file_path, "r+")
            self._storage._file_path = self._file  # Minari opens it for each of its writes

    def close(self) -> None:
        self._file.close()

    def add(self, batch: TensorDictBase) -> None:
        arrays, buffers = arrays_of(batch, self._layout), []
        for piece in self._numbers.number(batch).pieces:
            steps = {
                path: self._held(path, values[piece.row, piece.start : piece.stop])
                for path, values in arrays.items()
            }
            if piece.episode in self._waiting:
                before = self._waiting.pop(piece.episode)
                steps = {path: np.concatenate([before[path], steps[path]]) for path in steps}
            self._require_carried(steps)
            if not piece.ended:
                self._waiting[piece.episode] = {
                    path: held[-1:].copy() for path, held in steps.items()
                }
                steps = {path: held[:-1] for path, held in steps.items()}
            if len(steps["next", "done"]):
                buffers.append(self._buffer(piece.episode, steps, ended=piece.ended))
        self._write(buffers)

    def finish(self, metadata: dict[str, Any]) -> None:
        """Truncate the episodes that the end of the data cut, and describe the dataset."""
        self._write(
            [self._buffer(*one, ended=True, truncated=True) for one in self._waiting.items()]
        )
        envkit = {"layout": self._layout.to_json(), "roles": asdict(self._roles)}
        with telling(self._target):
            # Minari counts the steps that an episode got last.
            self._storage.update_episode_metadata(
                [{"total_steps": self._steps[number]} for number in sorted(self._steps)]
            )
            self._storage.update_metadata({**metadata, "envkit": envkit})
        self._file.require_written(self._target)

    def _write(self, buffers: list[Any]) -> None:
        with telling(self._target):
            self._storage.update_episodes(buffers)
        self._file.require_written(self._target)

    def _held(self, path: Path, values: np.ndarray) -> np.ndarray:
        """Return values as the dataset holds them.

        Raises:
            ArgumentError: (a ValueError) codes are not one-hot.
        """
        path = path[path[0] == "next" :]
        if path not in self._leaves:
            return values
        held = self._leaves[path].decode_array(values)
        if path in self._roles.one_hot:
            codes = self._leaves[path].encode_array(held).numpy()
            if not np.array_equal(codes.reshape(values.shape), values):
                raise ArgumentError(
                    f"the entry {as_key(path)!r} holds codes that are not one-hot. Pass data as the env took it."
                )
        return held

    def _require_carried(self, steps: Mapping[Path, np.ndarray]) -> None:
        """Check that each step of an episode begins where the one before led.

        Raises:
            ArgumentError: (a ValueError) one does not, so that one row cannot stand for both.
        """
        for path in self._carried:
            begun, led = steps[path][1:], steps["next", *path][:-1]
            if not np.array_equal(led, begun, equal_nan=led.dtype.kind == "f"):
                raise ArgumentError(
                    f"{as_key(path)!r} of a step is not what {as_key(('next', *path))!r} of the step before was, within one "
                    "episode. Minari keeps one of both. Write data as the env gave it, before steps are skipped or joined."
                )

    def _buffer(
        self, number: int, steps: Mapping[Path, np.ndarray], *, ended: bool, truncated: bool = False
    ) -> Any:
        """Return steps of an episode as Minari takes them, with the last observation if the episode has ended."""
        count = len(steps["next", "done"])
        episode_id = self._ids.setdefault(number, len(self._ids))
        self._steps[episode_id] += count

        def flag(name: str) -> np.ndarray | None:
            held = steps.get(("next", name))
            return None if held is None else np.asarray(held.reshape(count, -1).any(-1))

        done, is_terminated, is_truncated = flag("done"), flag("terminated"), flag("truncated")
        assert done is not None
        if is_terminated is None:
            is_terminated = done if is_truncated is None else done & ~is_truncated
        if is_truncated is None:
            is_truncated = done & ~is_terminated
        reward = steps["next", *self._roles.reward]
        trees: dict[Path, Any] = {}
        for path, place in self._roles.places():
            trees[place] = steps[path]
            if ended and path in self._carried and place[0] != "actions":
                trees[place] = np.concatenate([steps[path], steps["next", *path][-1:]])
        return require("minari.data_collector").EpisodeBuffer(
            id=episode_id,
            rewards=reward.reshape(-1) if reward.size == count else reward,
            terminations=is_terminated,
            truncations=is_truncated | truncated,
            **{"infos": {}, **nest(trees)},
        )


# ---------------------------------------------------------------------------------------- reading


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
        dataset = minari.load_dataset(dataset_id)
        own = dataset.storage.metadata.get("envkit")
        return _foreign_data(dataset) if own is None else _own_data(dataset, own)


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


def _own_data(dataset: Any, header: Mapping[str, Any]) -> EnvData:
    """Read a dataset that `to_minari` wrote."""
    layout = Layout.from_json(header["layout"], dataset.id)
    roles = Roles.from_json(header["roles"])
    columns = {column.path: column for column in layout.columns}
    leaves = _option_leaves(roles, dataset.observation_space, dataset.action_space)
    parts, ids = [], []
    for episode in dataset.iterate_episodes():
        parts.append(dict(_own_columns(episode, columns, roles, leaves)))
        ids.append(np.full(len(episode.rewards), episode.id, np.int64))
    arrays = {path: np.concatenate([part[path] for part in parts])[None] for path in columns}
    data = data_of(layout, arrays)
    if step_entry(data, "traj_ids") is None:
        data.set(("collector", "traj_ids"), torch.from_numpy(np.concatenate(ids)))
    return data


def _own_columns(
    episode: Any, columns: Mapping[Path, Column], roles: Roles, leaves: Mapping[Path, RowLeaf]
) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield the columns of one episode that `to_minari` wrote."""
    steps, flags = len(episode.rewards), _flags(episode)
    for path, place in roles.places():
        values = _array(_at(vars(episode), place))
        if path in leaves:
            values = leaves[path].encode_array(values).numpy()
        yield path, values[:steps]
        if len(values) > steps:
            yield ("next", *path), values[1:]
    for path, column in columns.items():
        if path == ("next", *roles.reward):
            yield path, episode.rewards.reshape(steps, *column.held_shape)
        elif path[:-1] == ("next",) and path[-1] in flags:
            flag = flags[path[-1]].reshape(steps, *(1 for _ in column.shape))
            yield path, np.broadcast_to(flag, (steps, *column.shape))
        elif path in _FLAGS:
            yield path, np.zeros((steps, *column.shape), bool)


def _array(values: Any) -> np.ndarray:
    """Return an array; text, of which some readers give bytes, as objects."""
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=object)
    if array.dtype != object:
        return array
    texts = [one.decode() if isinstance(one, bytes) else one for one in array.flat]
    return np.array(texts, dtype=object).reshape(array.shape)


def _flags(episode: Any) -> dict[str, np.ndarray]:
    terminated, truncated = episode.terminations.astype(bool), episode.truncations.astype(bool)
    return {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}


def _foreign_data(dataset: Any) -> EnvData:
    """Read a dataset of others; infos that some episodes lack are left out."""
    parts = [dict(_foreign_columns(episode)) for episode in dataset.iterate_episodes()]
    data = TensorDict({}, [sum(len(part["next", "reward"]) for part in parts)])
    for path in sorted(set.intersection(*(set(part) for part in parts))):
        data.set(as_key(path), tensor_of(np.concatenate([part[path] for part in parts])))
    data.names = ["time"]
    return data


def _foreign_columns(episode: Any) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield the columns of one episode by the names of its spaces."""
    steps = len(episode.rewards)
    for path, values in _leaves(episode.observations):
        path = path or ("observation",)
        if path[0] in _TAKEN:
            raise ArgumentError(
                f"the dataset has an observation {path[0]!r}, which is the name of something else in a TensorDict. "
                "Read it with minari.load_dataset."
            )
        yield path, values[:-1]
        yield ("next", *path), values[1:]
    for path, values in _leaves(episode.actions):
        yield path or ("action",), values
    for path, values in _leaves(episode.infos or {}):
        if len(values) == steps + 1:
            yield ("next", "info", *path), values[1:]
        if len(values) in (steps, steps + 1):
            yield ("info", *path), values[:steps]
    yield ("next", "reward"), episode.rewards.reshape(steps, -1)
    yield ("collector", "traj_ids"), np.full(steps, episode.id, np.int64)
    for name, flag in _flags(episode).items():
        yield ("next", name), flag[:, None]
        yield (name,), np.zeros((steps, 1), bool)


_TAKEN = {*("action", "collector", "done", "info", "next", "reward", "terminated", "truncated")}


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield the arrays of a tree; members of a tuple are named by their place."""
    if isinstance(tree, tuple):
        tree = {str(place): part for place, part in enumerate(tree)}
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from _leaves(part, (*path, name))
    elif np.ndim(tree):
        yield path, _array(tree)
