"""An env of several rows as arrays: what vector envs of other libraries have in common.

`BatchView` decides which entries are observations, keeps between calls what the env reads back (a stateless
env's state above all) and the infos of simulators, and turns actions into what the specs hold. `RowOwners` addresses
single rows, through transforms and through the members of a `MixedEnv`. When rows begin again is up to the vector env
that asks.

Conventions
    rows    the only batch axis of the env, of length ``num_envs``; numbers of rows are those of the whole batch.
    shown   observation entries that are neither infos nor private, see `private_entries` and `shown_spaces`.
    moment  what a reset or a step gave, read by key. Where the env has its data in memory anyway it is read there, and
            gone at the next call.
    values  NumPy arrays, or tensors with ``to_numpy=False``: copies, so that neither a caller who changes them nor the
            next step changes the other.
    shared  rows that are one object, as of Brax: it is asked once, and what it answers is the same for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.batched.attributes import (
    attribute_of,
    call_attribute,
    chosen_rows,
    layers_of,
    require_found,
    require_settable,
    set_attribute,
)
from envkit.batched.batched_env import BatchedEnv
from envkit.batched.mixed import MixedEnv
from envkit.data.merging import choose_arrays
from envkit.data.paths import Key, Path, as_key, as_path, info_names, leaf_paths
from envkit.env.base import EnvBase
from envkit.env.runs import InPlace, Moment
from envkit.env.seeding import checked_seed
from envkit.env.thread_lock import InUse
from envkit.env.wrapper_hints import require_env
from envkit.errors import (
    ArgumentError,
    EncodingError,
    InputError,
    NotResetError,
    UnsupportedError,
)
from envkit.specs import Composite, NonTensor, TensorSpec
from envkit_bridges.exports.painters import draws_states, painter_of, without_transforms
from envkit_bridges.exports.shown_spaces import (
    Shown,
    as_tensor,
    part_of,
    private_entries,
    require_whole,
    shown_and_infos,
    shown_as,
    spelled,
)
from envkit_bridges.gym.codecs import (
    NO_SPACE,
    Codec,
    Leaf,
    RowLeaf,
    StackedLeaf,
    codecs_of,
)
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.reports import RESET, STEP, SpacesOfEnv, reports_of


def _vector_episodes(env: EnvBase, ended: list[int]) -> dict[int, dict[str, Any]]:
    """Return the info "episode" of rows that have ended, of envs around a vector env of Gymnasium."""
    env = without_transforms(env)
    if isinstance(env, MixedEnv):
        episodes = {}
        for member in env.members:
            first, stop = member.rows.start, member.rows.stop
            member_rows = [row - first for row in ended if first <= row < stop]
            of_member = _vector_episodes(member.env, member_rows) if member_rows else {}
            episodes |= {row + first: info for row, info in of_member.items()}
        return episodes
    last = getattr(env, "_last_episode", None)
    if isinstance(env, BatchedEnv) or not isinstance(last, Mapping):
        return {}
    masks = [mask for name, mask in last.items() if name.startswith("_")]
    has_one = np.any(masks, axis=0) if masks else np.ones(env.batch_size[0], bool)
    shown = {name: value for name, value in last.items() if not name.startswith("_")}
    return {
        row: {name: value[row] if np.ndim(value) else value for name, value in shown.items()}
        for row in ended
        if has_one[row]
    }


@dataclass(frozen=True)
class _Owner:
    """An env and the rows it has; ``pool`` is the batched env of single ones inside, if it is one."""

    env: EnvBase
    rows: range
    pool: BatchedEnv | None

    def shared(self, fix: str) -> UnsupportedError:
        kind, first, last = type(self.env).__name__, self.rows[0], self.rows[-1]
        return UnsupportedError(
            f"rows {first} to {last} of this {kind} are one object, so some of them cannot be asked apart. Use a pool of "
            f"single envs, e.g. SerialEnv, or {fix}."
        )


class RowOwners:
    """Address the rows of an env one by one.

    Args:
        env: with one batch axis.
        agents: rows that each of the env's stands for, side by side: those of its agents.

    Attributes:
        num_envs: rows of the env.
    """

    def __init__(self, env: EnvBase, agents: int = 1):
        self.num_envs = env.batch_size[0]
        self._agents = agents
        self._owners = list(_owners(env, 0))

    def __iter__(self) -> Iterator[_Owner]:
        return iter(self._owners)

    def get_attr(self, name: str, indices: object = None) -> list[Any]:
        """Return an attribute of each of some rows.

        Raises:
            AttributeError: one of them has none of this name.
        """
        by_row = {}
        for owner, rows in self._chosen(indices):
            if owner.pool is None:
                by_row |= _by_row(owner, getattr(owner.env, name), rows)
            else:
                by_row |= _asked(owner, partial(attribute_of, name), rows)
        return self._in_order(by_row, indices)

    def set_attr(self, name: str, values: Sequence[Any], indices: object = None) -> None:
        """Set an attribute of each of some rows, to one value each.

        Raises:
            AttributeError: rows are one object, which has none of this name.
            UnsupportedError: (a NotImplementedError) rows are one object, and not all of them get the same value.
        """
        value_of: dict[int, Any] = {}
        for row, value in zip(self._envs(indices), values, strict=True):
            first = value_of.setdefault(row, value)
            if first is not value and not np.array_equal(first, value):
                raise ArgumentError(
                    f"{name!r} is {value_of[row]!r} and {value!r} for agents of game {row}, which has one. Pass the same for all."
                )
        chosen = list(self._chosen(indices))
        for owner, rows in chosen:
            first = value_of[rows[0]]
            if owner.pool is None and (
                set(rows) != set(owner.rows) or any(value_of[row] is not first for row in rows)
            ):
                raise owner.shared(f"set {name!r} to one value for all of them")
            if owner.pool is None:
                require_settable(name, owner.env)
        for owner, rows in chosen:
            if owner.pool is None:
                set_attribute(name, value_of[rows[0]], owner.env)
            else:
                for row in rows:
                    _asked(owner, partial(set_attribute, name, value_of[row]), [row])

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of each of some rows; what cannot be called is given as it is.

        Raises:
            AttributeError: one of them has none of this name.
            UnsupportedError: (a NotImplementedError) rows are one object, and some of them are named.
        """
        chosen = list(self._chosen(indices))
        for owner, rows in chosen:
            if owner.pool is None and set(rows) != set(owner.rows):
                raise owner.shared(f"call {name!r} for all of them")
        by_row = {}
        for owner, rows in chosen:
            if owner.pool is None:
                method = getattr(owner.env, name)
                answer = method(*args, **kwargs) if callable(method) else method
                by_row |= _by_row(owner, answer, rows)
            else:
                by_row |= _asked(owner, partial(call_attribute, name, args, kwargs), rows)
        return self._in_order(by_row, indices)

    def is_wrapped(self, kind: type, indices: object = None) -> list[bool]:
        """Return for each of some rows whether a wrapper of a class is around its simulator."""
        by_row = {}
        for owner, rows in self._chosen(indices):
            if owner.pool is None:
                by_row |= dict.fromkeys(rows, False)
            else:
                by_row |= _asked(owner, partial(_has_layer, kind), rows)
        return self._in_order(by_row, indices)

    def _chosen(self, indices: object) -> Iterator[tuple[_Owner, list[int]]]:
        """Yield the owners of some rows, each with its rows of the env among them."""
        rows = list(dict.fromkeys(self._envs(indices)))
        for owner in self._owners:
            if own := [row for row in rows if row in owner.rows]:
                yield owner, own

    def _in_order(self, by_row: dict[int, Any], indices: object) -> list[Any]:
        return [by_row[row] for row in self._envs(indices)]

    def _envs(self, indices: object) -> list[int]:
        """Return which row of the env each of some rows is of."""
        return [row // self._agents for row in chosen_rows(indices, self.num_envs * self._agents)]


def _owners(env: EnvBase, first: int) -> Iterator[_Owner]:
    inner = without_transforms(env)
    if isinstance(inner, MixedEnv):
        for member in inner.members:
            yield from _owners(member.env, first + member.rows.start)
    else:
        pool = inner if isinstance(inner, BatchedEnv) else None
        yield _Owner(env, range(first, first + env.batch_size[0]), pool)


def _asked(owner: _Owner, ask: Callable[[Any], Any], rows: list[int]) -> dict[int, Any]:
    assert owner.pool is not None
    found = owner.pool._ask_rows(ask, [row - owner.rows[0] for row in rows])
    require_found(found, type(owner.pool).__name__)
    return dict(zip(rows, found, strict=True))


def _by_row(owner: _Owner, value: Any, rows: list[int]) -> dict[int, Any]:
    """Return for each row its own of a list with one value a row; anything else is the same for each."""
    is_list = isinstance(value, list | tuple) and len(value) == len(owner.rows)
    return {row: value[row - owner.rows[0]] if is_list else value for row in rows}


def _has_layer(kind: type, env: EnvBase) -> bool:
    return any(isinstance(layer, kind) for layer in layers_of(env))


class BatchView:
    """The rows of an env as arrays.

    Args:
        env: of batch size ``(num_envs,)``, with one reward and done flags at the root. Several actions are a dict.
        spaces: module of spaces of the gym library that is asked for.
        whose: name of the adapter, for messages.
        info_keys: observation entries, or nodes of them, that are infos beside those of the env.
        to_numpy: arrays instead of tensors.

    Attributes:
        observation_space, action_space: of one row.
        owners: addresses single rows.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        ArgumentError: (a ValueError) it has another number of batch axes, several rewards, no root
            flags, or entries that are no arrays.
        MissingKeyError: (a KeyError) ``info_keys`` names what is no observation.
    """

    def __init__(
        self,
        env: EnvBase,
        spaces: ModuleType,
        *,
        whose: str,
        info_keys: Iterable[Key] = (),
        to_numpy: bool = True,
    ):
        self.env = env
        self.to_numpy = to_numpy
        self._find_rows(whose)
        self._observation, self._actions = self._found_spaces(spaces, whose, info_keys)
        self.observation_space = self._observation.space
        self.action_space = self._actions.space
        self._missing: str | None = "the env was not reset yet"
        self._root: TensorDictBase | None = None
        self._in_place: InPlace | None = None
        self._forms: dict[Path, _Form] = {}
        self._stepped: dict[int, Mapping[str, Any]] = {}
        self._begun: dict[int, Mapping[str, Any]] = {}

    def _find_rows(self, whose: str) -> None:
        """Check that the env has the form, and find its rows, whose they are, and their reward."""
        env = self.env
        _require_rows(env, whose)
        self.num_envs = env.batch_size[0]
        (self._reward,) = map(as_path, env.reward_keys)
        self.owners = RowOwners(env)
        self._simulators = [
            (owner.rows, reports_of(owner.pool)) for owner in self.owners if owner.pool is not None
        ]
        self._masked = {as_path(action): as_path(mask) for action, mask in env._facts.action_masks}

    def _found_spaces(
        self, spaces: ModuleType, whose: str, info_keys: Iterable[Key]
    ) -> tuple[Shown, Shown]:
        """Find what is observed, what is an info, and what the rows do."""
        env = self.env
        observed = env.single_full_observation_spec
        paths = [path for path in leaf_paths(observed) if path not in private_entries(env)]
        shown, infos = shown_and_infos(paths, env._facts.infos, info_keys)
        facts = [fact for _, reports in self._simulators for fact in reports.facts]
        # infos that come from all simulators as they are need no copy of them in the data
        recorded = [frozenset() if fact is None else fact.recorded for fact in facts]
        if recorded and len(recorded) == self.num_envs:
            infos = [path for path in infos if any(path not in own for own in recorded)]
        self._infos = info_names(infos)
        specs = {path: observed[as_key(path)] for path in shown}
        require_arrays(Composite({as_key(path): spec for path, spec in specs.items()}), whose)
        codecs = _codecs_of(env, facts)
        names = {path: path for path in shown} if len(shown) > 1 else {shown[0]: ()}
        observation = shown_as(codecs[0], specs, spaces, names=names, root="observation")
        acted = env.single_full_action_spec
        names = _action_names(env)
        specs = {path: acted[as_key(path)] for path in names}
        return observation, shown_as(codecs[1], specs, spaces, names=names, root="action")

    # -------------------------------------------------------------------------------- single rows

    @property
    def pool(self) -> Any:
        """The pool of single envs, behind transforms too; None where all rows are one object."""
        inner = without_transforms(self.env)
        return inner if isinstance(inner, BatchedEnv) else None

    def get_attr(self, name: str, indices: object = None) -> list[Any]:
        """Return an attribute of each of some rows; see `RowOwners`."""
        rows = chosen_rows(indices, self.num_envs)
        if name == "render_mode":  # SB3 asks, and warns of envs that say nothing
            return [self.render_mode] * len(rows)
        if name == _MASKS and self._has_masks:
            return [partial(self._action_mask, row) for row in rows]
        return self.owners.get_attr(name, indices)

    def call(self, name: str, *args: Any, indices: object = None, **kwargs: Any) -> list[Any]:
        """Call a method of each of some rows; see `RowOwners`.

        ``action_masks`` gives what the data says, where the env has masks for all its actions: for each row one flag
        for each option, those of several choices side by side. Source of the name: sb3-contrib, MaskablePPO.
        """
        if name == _MASKS and self._has_masks:
            masks = self._action_masks()
            return [masks[row] for row in chosen_rows(indices, self.num_envs)]
        return self.owners.call(name, *args, indices=indices, **kwargs)

    @property
    def _has_masks(self) -> bool:
        return all(path in self._masked for path in self._actions.paths)

    def _action_masks(self) -> np.ndarray:
        flags = [_array(self._entry(self.root, self._masked[path])) for path in self._actions.paths]
        return np.concatenate([one.reshape(self.num_envs, -1) != 0 for one in flags], -1)

    def _action_mask(self, row: int) -> np.ndarray:
        return self._action_masks()[row]

    # ------------------------------------------------------------------------------------- calls

    def seed(self, seeds: Mapping[int, int | None]) -> None:
        """Seed single rows, each by its `set_seed`, for the reset that follows.

        Raises:
            ArgumentError: (a ValueError) one is no seed, or all rows are one object.
        """
        self._require_single(seeds)
        for row, seed in self._checked(seeds).items():
            self.pool.call("set_seed", seed, indices=row)

    def _require_single(self, seeds: Mapping[int, int | None]) -> None:
        if self.pool is None:
            raise ArgumentError(
                f"seed is {list(seeds.values())}, but the {self.num_envs} rows of this {type(self.env).__name__} are seeded "
                "together. Pass one int and reset all rows, or use a pool of single envs, e.g. SerialEnv."
            )

    @staticmethod
    def _checked(seeds: Mapping[int, int | None]) -> dict[int, int]:
        return {row: checked_seed(seed) for row, seed in seeds.items() if seed is not None}

    def _begun_with(self, seeds: Mapping[int, int | None]) -> dict[int, dict[str, int]]:
        """Return the keywords with which simulators of Gymnasium and PettingZoo begin with a seed; others are seeded now."""
        self._require_single(seeds)
        checked = self._checked(seeds)
        rows = list(checked)
        takes_seed = self.pool._ask_rows(_takes_seed, rows) if rows else []
        taking = [row for row, takes in zip(rows, takes_seed, strict=True) if takes]
        self.seed({row: seed for row, seed in checked.items() if row not in taking})
        return {row: {"seed": checked[row]} for row in taking}

    def reset(
        self,
        mask: np.ndarray | None = None,
        options: Sequence[Mapping[str, Any]] | None = None,
        seeds: Mapping[int, int | None] | None = None,
    ) -> Moment:
        """Begin episodes, in the rows of ``mask`` or in all of them, and return the root.

        Args:
            mask: bool ``(num_envs,)``.
            options: of the simulator's reset, for each row.
            seeds: of single rows, as the ``seed`` of the simulator's reset where it is one of Gymnasium or PettingZoo.

        Raises:
            ArgumentError: (a ValueError) there are options or seeds, and the rows are no single envs that take some.
        """
        self._listen(starts=True)
        keywords: dict[str, Any] = {}
        if options is not None and any(options):
            if self.pool is None:
                raise ArgumentError(
                    f"options are {list(options)}, but {type(self.env).__name__} resets all its rows as one. Use a pool "
                    "of single envs, e.g. SerialEnv, or leave the options out."
                )
            each = self._of_envs(dict(enumerate(options))).values()
            keywords["list_of_kwargs"] = [{"options": dict(one)} if one else {} for one in each]
        if seeds:
            each = keywords.setdefault("list_of_kwargs", [{} for _ in range(self.owners.num_envs)])
            for row, seed in self._begun_with(self._of_envs(seeds)).items():
                each[row] |= seed
        if mask is None:
            self._root = self.env.reset(**keywords)
        else:
            chosen = self._on_device(self._envs_in(mask)).unsqueeze(-1)
            self._root = self.env.reset(self.root.copy().set(rules.RESET, chosen), **keywords)
        self._missing, self._in_place = None, self.env._runs().in_place()
        self._note_begun(mask)
        return self._root

    def _listen(self, *, starts: bool = False) -> None:
        for _, reports in self._simulators:
            reports.refresh(starts=starts)

    def _note_begun(self, mask: np.ndarray | None) -> None:
        """Store the infos of resets, which are shown now or in the next step."""
        if mask is None:
            self._begun = {}
        else:
            self._begun = {row: info for row, info in self._begun.items() if not mask[row]}
        self._begun |= self._reported(RESET, mask)

    def _note_stepped(self, following: Moment, mask: np.ndarray | None, *, advanced: bool) -> None:
        """Store the infos of a step of the rows of ``mask``, and with ``advanced`` those of the resets behind it."""
        if not self._simulators:
            return
        self._listen()
        self._stepped = self._reported(STEP, mask)
        if advanced and (ended := self.ended(following)).any():
            self._note_begun(ended if mask is None else ended & mask)

    def _reported(self, call: int, mask: np.ndarray | None) -> dict[int, Mapping[str, Any]]:
        infos: dict[int, Mapping[str, Any]] = {}
        for place, reports in self._simulators:
            part = None if mask is None else mask[place.start : place.stop]
            for row, info in reports.infos(call, part).items():
                infos[row + place.start] = info
        return infos

    def step(self, action: Any) -> Moment:
        """Advance all rows; gives what follows, and resets nothing."""
        root = self.root
        for path, acted in self._acted(action).items():
            root.set(as_key(path), acted)
        self._listen()
        with self._whole():
            data = self.env.step(root)
            self._root = self.env.step_mdp(data)
        following = data.get("next")
        self._note_stepped(following, None, advanced=False)
        return following

    def advance(self, action: object, mask: np.ndarray | None = None) -> tuple[Moment, Moment]:
        """Advance the rows of ``mask``, or all, and reset those that end; gives what follows and the new root.

        The others keep what they show, with reward 0 and no flag set; their actions are ignored.
        """
        acted = self._acted(action, mask)
        stepped = None if mask is None else self._envs_in(mask)
        self._listen()
        if self._in_place is not None and self._in_place.is_current():
            with self._whole():
                moments = self._in_place.advance(acted, stepped)
            self._root = None
            self._note_stepped(moments[0], mask, advanced=True)
            return moments
        root = self.root
        for path, value in acted.items():
            root.set(as_key(path), value)
        if stepped is not None:
            root = root.copy().set(rules.STEP, self._on_device(stepped))
        with self._whole():
            data, self._root = self.env.step_and_maybe_reset(root)
        following = data.get("next")
        self._note_stepped(following, mask, advanced=True)
        return following, self._root

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Ask for a reset after a step that failed: some rows have moved, and their observations were not returned."""
        try:
            yield
        except InputError:  # it was refused before anything moved
            raise
        except BaseException:
            self._missing = "the step before failed, and what some rows made of it is lost"
            raise

    @property
    def held(self) -> InUse:
        """Keeps other threads from the env while a step is made and what it gave is read."""
        return self.env._in_use

    @property
    def root(self) -> TensorDictBase:
        """State of the env after the last call.

        Raises:
            NotResetError: (a RuntimeError) nothing was reset yet, or the last step failed.
        """
        self._require_begun()
        if self._root is None:
            assert self._in_place is not None
            self._root = self._in_place.root()
        return self._root

    @property
    def is_begun(self) -> bool:
        """Whether the env can be stepped: it was reset, and no step has failed since."""
        return self._missing is None

    def _require_begun(self) -> None:
        if self._missing is not None:
            raise NotResetError(f"{self._missing}. Call reset() first.")

    def env_of(self, row: int) -> int:
        """Return which row of the env a row is of; see `_of_envs`."""
        return row

    def _of_envs(self, by_row: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return what is given for rows for the rows of the env that they are of."""
        return by_row

    def _envs_in(self, mask: np.ndarray) -> np.ndarray:
        """Return a mask of rows as one of the rows of the env that they are of."""
        return mask

    def _on_device(self, mask: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(mask).to(self.env.device)

    def _acted(self, action: object, mask: np.ndarray | None = None) -> dict[Path, torch.Tensor]:
        """Return actions as the specs spell them; numbers that are none of them are refused there or by the env."""
        self._require_begun()
        acted: dict[Path, torch.Tensor] = {}

        def write(path: Path, values: Any, space: Any, leaf: Leaf | None) -> None:
            acted[path] = self._spelled(values, path, space, leaf, mask)

        self._actions.write(action, write, part_of)
        return acted

    def _spelled(
        self, action: object, path: Path, space: Any, leaf: Leaf | None, mask: np.ndarray | None
    ) -> torch.Tensor:
        key, count = as_key(path), self.num_envs
        if path not in self._forms:
            self._forms[path] = _Form.of(self._action_spec(key), space, leaf, count)
        spec, expected, is_held = self._forms[path]
        if isinstance(leaf, StackedLeaf):
            parts = tuple(np.array(part) for part in cast("tuple[Any, ...]", action))
            return self._encoded(leaf, parts, key, space, mask)
        value = as_tensor(action, key, spec)
        if value.shape not in (spec.shape, expected):
            subject = (
                "the actions have" if len(self._actions.paths) == 1 else f"the actions {key!r} have"
            )
            raise InputError(
                f"{subject} shape {tuple(value.shape)}, but {count} rows of {space} have {expected}. Pass one action for "
                "each row."
            )
        if not is_held and value.shape == expected:
            return self._encoded(cast(RowLeaf, leaf), value.numpy(force=True), key, space, mask)
        if mask is not None and value.shape != spec.shape:  # it is encoded, whatever it is
            value = value.clone()
            value[torch.from_numpy(~mask)] = 0
        return spelled(value, key, spec)

    def _action_spec(self, key: Key) -> TensorSpec:
        """Return the spec of an action of all rows."""
        return self.env.full_action_spec[key]

    def _encoded(
        self, leaf: RowLeaf, values: Any, key: Key, space: Any, mask: np.ndarray | None
    ) -> torch.Tensor:
        """Convert values of the simulator's space; those of rows that are not stepped may be anything."""
        if mask is not None:
            valid = leaf.decode_array(leaf.spec.zero(mask.shape))
            values = choose_arrays(mask, values, valid)
        require_whole(values, key, space)
        try:
            found = leaf.encode_array(values)
            return found if self.env.device is None else found.to(self.env.device)
        except EncodingError as error:
            raise EncodingError(
                f"the actions {key!r} are {values}; expected values of {space}. Pass actions as action_space.sample() "
                "returns them."
            ) from error

    # ------------------------------------------------------------------------------------ pictures

    @property
    def render_mode(self) -> str | None:
        """Return how the rows render, if all report the same; "rgb_array" of an env that draws its states."""
        if draws_states(without_transforms(self.env)):
            return "rgb_array"
        mode = self.common("render_mode")
        return mode if isinstance(mode, str) else None

    @property
    def metadata(self) -> dict[str, Any]:
        """The value that all rows agree on, if they do."""
        found = self.common("metadata")
        return dict(found) if isinstance(found, Mapping) else {}

    def common(self, name: str) -> Any:
        """Return an attribute that all rows have in common; None where there is none, or rows differ."""
        try:
            values = self.owners.get_attr(name)
        except AttributeError:
            return None
        return values[0] if all(value == values[0] for value in values) else None

    def render(self) -> list[Any] | None:
        """Draw all rows, one picture each; None where the env shows them itself.

        Raises:
            UnsupportedError: (a NotImplementedError) the env draws nothing.
            NotResetError: (a RuntimeError) there is no state to draw yet.
        """
        inner = without_transforms(self.env)
        if isinstance(inner, MixedEnv) or draws_states(inner):
            painter = painter_of(self.env, range(self.owners.num_envs), {})
            painter.look(self.root)
            return [frames[0].movedim(0, -1).numpy(force=True) for frames in painter.frames()]
        drawn = self.env.render()  # type: ignore[operator]
        if drawn is None:
            return None
        return list(drawn) if isinstance(drawn, list | tuple) else [drawn]

    # ------------------------------------------------------------------------------------- values

    def observations(self, at: Moment) -> Any:
        """Return what is shown of the rows at a moment."""
        values = self._observation.values(lambda path: self._value(self._entry(at, path)))
        return values if self.to_numpy else _tensors(values, self.env.device)

    def infos(self, at: Moment) -> dict[Path, Any]:
        """Return the infos that lie in the data, by path in an info dict; see `envkit.data.paths.info_names`."""
        return {name: self._value(self._entry(at, path)) for path, name in self._infos.items()}

    def _entry(self, at: Moment, path: Path) -> Any:
        """Return an entry of all rows at a moment."""
        return at.get(as_key(path))

    def step_infos(self, ended: np.ndarray) -> dict[int, Mapping[str, Any]]:
        """Return the infos of simulators in the last step, by row, where they have returned any."""
        if not ended.any():
            return self._stepped
        found = _vector_episodes(self.env, np.flatnonzero(ended).tolist())
        return {**self._stepped, **{row: {"episode": info} for row, info in found.items()}}

    def reset_infos(self, rows: np.ndarray) -> dict[int, Mapping[str, Any]]:
        """Return the infos of simulators at the newest reset of some rows."""
        return {row: info for row, info in self._begun.items() if rows[row]} if self._begun else {}

    def rewards(self, at: Moment) -> Any:
        """Return the rewards, shape ``(num_envs,)``: float64 as the simulators gave them, unless it gives tensors."""
        rewards = self._value(self._entry(at, self._reward)).squeeze(-1)
        if not self.to_numpy:
            return rewards
        shown = rewards.astype(np.float64)
        for own, reports in self._simulators:
            part, exact = slice(own.start, own.stop), reports.rewards()
            # the data holds them rounded; what a transform has changed is none of theirs
            with np.errstate(over="ignore", invalid="ignore"):
                is_own = exact.astype(rewards.dtype) == rewards[part]
            shown[part][is_own] = exact[is_own]
        return shown

    def flags(self, at: Moment) -> tuple[Any, Any]:
        """Return ``terminated`` and ``truncated``, bool ``(num_envs,)``; what is done and neither is terminated."""
        truncated = at.get("truncated")
        terminated = at.get("terminated")
        if truncated is None:
            truncated = self._value(at.get("done")) & False
        else:
            truncated = self._value(truncated)
        if terminated is None:
            terminated = self._value(at.get("done")) & ~truncated
        else:
            terminated = self._value(terminated)
        return terminated.squeeze(-1), truncated.squeeze(-1)

    def ended(self, at: Moment) -> np.ndarray:
        """Return the rows whose episode has ended, as an array."""
        return _array(at.get("done")).squeeze(-1)

    def _value(self, value: Any) -> Any:
        if self.to_numpy:
            return _array(value)
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.clone()


_MASKS = "action_masks"


def _takes_seed(env: EnvBase) -> bool:
    inner = without_transforms(env)
    return isinstance(inner, GymWrapper) or getattr(inner, "libname", None) == "pettingzoo"


def _array(value: Any) -> np.ndarray:
    """Copy a tensor or an array."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return np.array(value.numpy(force=True))


def row_of(tree: Any, row: int) -> Any:
    """Take one row out of arrays, which may be nested in dicts."""
    if isinstance(tree, Mapping):
        return {name: row_of(value, row) for name, value in tree.items()}
    return tuple(row_of(value, row) for value in tree) if isinstance(tree, tuple) else tree[row]


def _action_names(env: EnvBase) -> dict[Path, Path]:
    """Return actions by path with their names in the action space: none of the only one, without a common "action"."""
    paths = [as_path(key) for key in env.action_keys]
    if len(paths) == 1:
        return {paths[0]: ()}
    are_below = all(len(path) > 1 and path[0] == "action" for path in paths)
    return {path: path[1:] if are_below else path for path in paths}


class _Form(NamedTuple):
    """The form of one action of all rows.

    Attributes:
        spec: of all rows.
        shape: of values of the space.
        is_held: the data holds values of the space as they are, or they are encoded by the spec.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    is_held: bool

    @classmethod
    def of(cls, spec: TensorSpec, space: Any, leaf: Leaf | None, count: int) -> _Form:
        """Find the form of an action; ``leaf`` is that of the simulator's space."""
        if not isinstance(leaf, RowLeaf) or isinstance(leaf, StackedLeaf):
            return cls(spec, () if leaf else (count, *space.shape), leaf is None)
        shape = (count, *space.shape)
        starts_at_0 = not np.any(leaf.decode_array(leaf.spec.zero((1,))))
        return cls(spec, shape, spec.shape == shape and starts_at_0)


def _tensors(tree: Any, device: torch.device | None) -> Any:
    """Return arrays in dicts and tuples as tensors."""
    if isinstance(tree, Mapping):
        return {name: _tensors(part, device) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_tensors(part, device) for part in tree)
    return torch.as_tensor(tree, device=device)


def _codecs_of(
    env: EnvBase, facts: Sequence[SpacesOfEnv | None]
) -> tuple[Codec | None, Codec | None]:
    """Return the codecs of the spaces that the simulators of all rows have; None where they have none in common."""
    inside = without_transforms(env)
    if isinstance(inside, GymWrapper):
        return inside.core.observation, inside.core.action
    [first, *others] = facts or [None]
    if first is None or len(facts) != env.batch_size[0] or any(one is None for one in others):
        return None, None
    if any(one[:3] != first[:3] for one in others if one is not None):
        return None, None
    return codecs_of(first.observation_space, first.action_space, categorical=first.categorical)


def require_batch(env: EnvBase, whose: str) -> None:
    """Check that something is an env with one batch axis.

    Raises:
        ArgumentTypeError: (a TypeError) it is no env.
        ArgumentError: (a ValueError) it has none or several.
    """
    require_env("env", env, "Pass envkit.make('gym/CartPole-v1', num_envs=8), for example.")
    if len(env.batch_size) != 1:
        raise ArgumentError(
            f"{whose} shows rows of one batch axis, but the batch size of this {type(env).__name__} is "
            f"{tuple(env.batch_size)}. Make it with num_envs=n, or reshape it with BatchSizeTransform."
        )


def _require_rows(env: EnvBase, whose: str) -> None:
    require_batch(env, whose)
    if len(env.reward_keys) != 1:
        raise ArgumentError(
            f"{whose} knows one reward, but this {type(env).__name__} has {env.reward_keys}. Select or join them with "
            'transforms, e.g. ExcludeTransform("name"), or show the agents of a game as rows: agents="rows".'
        )
    reward = env.single_full_reward_spec[env.reward_keys[0]]
    if tuple(reward.shape) != (1,):
        raise ArgumentError(
            f"{whose} takes one number as reward, but {env.reward_keys[0]!r} has shape {tuple(reward.shape)} in "
            'every row. Add its parts up with LineariseRewards, or show the agents of a game as rows: agents="rows".'
        )
    if () not in env.done_levels:
        raise ArgumentError(
            f"{whose} reads the done flags of the root, but this {type(env).__name__} has them in "
            f"{[as_key(level) for level in env.done_levels]} only. Declare them at the root too."
        )


def require_arrays(specs: Composite, whose: str) -> None:
    for key, leaf in specs.items(True, True):
        if isinstance(leaf, NonTensor) or -1 in leaf.shape or not isinstance(leaf, TensorSpec):
            raise ArgumentError(
                f"{whose} shows arrays of one shape, but {key!r} is {type(leaf).__name__} of shape {tuple(leaf.shape)}. "
                "Leave it out with ExcludeTransform, or make it an array in the env."
            )
        if leaf.dtype in NO_SPACE:
            raise ArgumentError(
                f"{whose} shows {key!r}, whose dtype is {leaf.dtype}, and no space has that. Convert it with a "
                "transform, or leave it out with ExcludeTransform."
            )
    if not list(specs.keys(True, True)):
        raise ArgumentError(
            f"{whose} has no observation to show, because all entries are state or infos. Declare one in the env."
        )
