"""Which entries there are, and what they are called: renamed, kept, left out, joined.

These transforms move entries and compute nothing. What the env reads back (its states) is never
taken away from it.

Conventions
    path    key as a tuple of strings; a node's path stands for all entries below it.
    pair    (source, target): where an entry is, and where it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.env_specs import Key, as_key, as_path
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    SpecError,
)
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.transforms.base import Keys, Transform, as_keys
from envkit.transforms.leafwise import require_negative

__all__ = ["CatTensors", "ExcludeTransform", "RenameTransform", "SelectTransform"]

Path = tuple[str, ...]
Pair = tuple[Key, Key]

_OUTPUTS = ("observation", "reward", "done")
_INPUTS = ("action", "state")


def _take_out(tree: Any, key: Key) -> None:
    """Delete an entry of a TensorDict or Composite, and the nodes it leaves empty."""
    path = as_path(key)
    del tree[path]
    for end in range(len(path) - 1, 0, -1):
        if len(list(tree.get(path[:end]).keys())):
            return
        del tree[path[:end]]


def _is_below(path: Path, heads: Iterable[Path]) -> bool:
    return any(path[: len(head)] == head for head in heads)


def _paths(keys: Iterable[Key]) -> list[Path]:
    return [as_path(key) for key in keys]


def _require_known(transform: Transform, keys: list[Key], specs: Composite, kinds: tuple) -> None:
    composites = {kind: specs[f"full_{kind}_spec"] for kind in kinds}
    missing = [key for key in keys if all(c.get(key, None) is None for c in composites.values())]
    if missing and not transform.missing_tolerance:
        known = {kind: list(spec.keys(True, True)) for kind, spec in composites.items()}
        raise MissingKeyError(
            f"{type(transform).__name__} names {missing}, but the env has {known}. Name entries that "
            "exist."
        )


# ------------------------------------------------------------------------------------------- rename


class RenameTransform(Transform):
    """Give entries other names, or copies under other names.

    Observations, rewards, done flags and whole nodes can be renamed, into and out of nodes. What the env
    also reads (a state) is renamed on both sides:
    ``RenameTransform(["state"], ["s"], ["state"], ["s"])``.

    Args:
        in_keys: names the env gives.
        out_keys: names the user sees, parallel to ``in_keys``.
        in_keys_inv: names of actions and states the env reads.
        out_keys_inv: names the user gives, parallel to ``in_keys_inv``.
        create_copy: keep the entry under its own name as well.

    Raises:
        ArgumentError: (a ValueError) lists of two lengths, or a name that stands in both.
        MissingKeyError: when specs are read: there is no entry of that name.
        KeyCollisionError: when specs are read: a new name is taken.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = create_copy
        self._require_distinct(self.in_keys, self.out_keys, "")
        self._require_distinct(self.in_keys_inv, self.out_keys_inv, "_inv")

    def _require_distinct(self, sources: list[Key], targets: list[Key], end: str) -> None:
        if len(sources) != len(targets):
            raise ArgumentError(
                f"in_keys{end} {sources} has {len(sources)} names, but out_keys{end} {targets} has "
                f"{len(targets)}. Pass one new name for each."
            )
        both = [key for key in sources if key in targets]
        if both:
            raise ArgumentError(
                f"{both} stand in in_keys{end} and in out_keys{end}, so that the order of renaming "
                "would matter. Use one RenameTransform after the other."
            )

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags get other names: the env before would not find its own."""
        parent = self.parent
        renamed = _paths(self.in_keys)
        return parent is None or not any(
            _is_below(path, renamed) for path in _paths(parent.done_keys)
        )

    # ---------------------------------------------------------------------------------------- data

    def _moved(self, td: TensorDictBase, pairs: Iterable[Pair], *, all_there: bool) -> Any:
        for source, target in pairs:
            value = td.get(source, None)
            if value is not None:
                td.set(target, value.copy() if isinstance(value, TensorDictBase) else value)
                if not self.create_copy:
                    _take_out(td, source)
            elif all_there and not self.missing_tolerance:
                raise MissingKeyError(
                    f"RenameTransform renames {source!r}, but the TensorDict has "
                    f"{sorted(map(str, td.keys(True, True)))}. Name an entry that is there."
                )
        return td

    @property
    def _outwards(self) -> list[Pair]:
        return list(zip(self.in_keys, self.out_keys, strict=True))

    @property
    def _inwards(self) -> list[Pair]:
        return list(zip(self.out_keys_inv, self.in_keys_inv, strict=True))

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return self._moved(next_td, self._outwards, all_there=True)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._moved(td_reset, self._outwards, all_there=False)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return self._moved(td, self._inwards, all_there=True)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        for inner, outer in self._moved_levels().items():
            mask = td.get((*outer, rules.RESET), None)
            if mask is not None and td.get((*inner, rules.RESET), None) is None:
                td.set((*inner, rules.RESET), mask)
        return self._moved(td, self._inwards, all_there=False)

    def _moved_levels(self) -> dict[Path, Path]:
        """Say where the levels went whose done leaves were all renamed."""
        parent = self.parent
        moved: dict[Path, Path] = {}
        for level, names in {} if parent is None else parent.done_levels.items():
            places = {self._new_path((*level, name))[:-1] for name in names}
            if level not in places and not self.create_copy:
                moved[level] = min(places, key=len)
        return moved

    def _new_path(self, path: Path) -> Path:
        for source, target in self._outwards:
            head = as_path(source)
            if path[: len(head)] == head:
                return (*as_path(target), *path[len(head) :])
        return path

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        _require_known(self, self.in_keys, output_spec, _OUTPUTS)
        self._require_free(self.out_keys, output_spec, _OUTPUTS)
        return super().transform_output_spec(output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        _require_known(self, self.in_keys_inv, input_spec, _INPUTS)
        self._require_free(self.out_keys_inv, input_spec, _INPUTS)
        return super().transform_input_spec(input_spec)

    def _require_free(self, keys: list[Key], specs: Composite, kinds: tuple[str, ...]) -> None:
        for key in keys:
            for kind in kinds:
                if specs[f"full_{kind}_spec"].get(key, None) is not None:
                    raise KeyCollisionError(
                        f"RenameTransform gives the name {key!r}, but the env has an entry of that "
                        f"name in its {kind} spec. Choose another name, or rename that one first."
                    )

    def _renamed(self, spec: Composite, pairs: Iterable[Pair]) -> Composite:
        for source, target in pairs:
            found = spec.get(source, None)
            if found is not None:
                spec[target] = found.clone()
                if not self.create_copy:
                    _take_out(spec, source)
        return spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._renamed(observation_spec, self._outwards)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._renamed(reward_spec, self._outwards)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        return self._renamed(done_spec, self._outwards)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        return self._renamed(action_spec, [(inner, outer) for outer, inner in self._inwards])

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._renamed(state_spec, [(inner, outer) for outer, inner in self._inwards])


# -------------------------------------------------------------------------------- select and exclude


class _Choosing(Transform):
    """Base of transforms that leave entries out."""

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)

    def _without(self, spec: Composite, gone: Iterable[Path]) -> Composite:
        for path in gone:
            _take_out(spec, as_key(path))
        return spec

    def _read_back(self) -> list[Key]:
        """Entries that the env before reads."""
        return [] if self.parent is None else self.parent.state_keys


def _require_done(transform: Transform, done_spec: Composite) -> Composite:
    if done_spec.is_empty(recurse=True):
        raise ArgumentError(
            f"{type(transform).__name__}({transform.extra_repr()}) leaves no done flag, and an env "
            "needs one. Keep at least 'done'."
        )
    return done_spec


class SelectTransform(_Choosing):
    """Keep some observations, with rewards, done flags and what the env reads back.

    Names that do not exist are ignored. Without an env only the named entries are kept.

    Args:
        *selected_keys: observations to keep, or nodes of them.
        keep_rewards: keep all rewards; False: only those that are named.
        keep_dones: keep all done flags; False: only those that are named.
    """

    def __init__(self, *selected_keys: Key, keep_rewards: bool = True, keep_dones: bool = True):
        super().__init__()
        self.selected_keys = as_keys(list(selected_keys))
        self.keep_rewards = keep_rewards
        self.keep_dones = keep_dones
        self.only_adds_done = keep_dones

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        env = self.parent
        kept = [*self.selected_keys, *self._read_back()]
        if env is not None and self.keep_rewards:
            kept += env.reward_keys
        if env is not None and self.keep_dones:
            kept += env.done_keys
        return next_td.select(*kept, strict=False)

    def _unselected(self, spec: Composite, also: Iterable[Key] = ()) -> list[Path]:
        kept = _paths([*self.selected_keys, *also])
        return [path for path in _paths(spec.keys(True, True)) if not _is_below(path, kept)]

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        gone = self._unselected(observation_spec, self._read_back())
        return self._without(observation_spec, gone)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        gone = [] if self.keep_rewards else self._unselected(reward_spec)
        return self._without(reward_spec, gone)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        gone = [] if self.keep_dones else self._unselected(done_spec)
        return _require_done(self, self._without(done_spec, gone))

    def extra_repr(self) -> str:
        return ", ".join(map(repr, self.selected_keys))


class ExcludeTransform(_Choosing):
    """Leave some observations, rewards or done flags out.

    Args:
        *excluded_keys: entries, or nodes of them.
        inverse: leave them out on the way in instead: from the input of the env, or from data that goes
            into a replay buffer.

    Raises:
        MissingKeyError: when specs are read: there is no entry of that name.
        ArgumentError: (a ValueError) when specs are read: the env reads the entry back, or no done flag
            is left.
    """

    def __init__(self, *excluded_keys: Key, inverse: bool = False):
        super().__init__()
        self.excluded_keys = as_keys(list(excluded_keys))
        self.inverse = inverse

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags are left out."""
        parent, gone = self.parent, _paths(self.excluded_keys)
        return parent is None or not any(_is_below(path, gone) for path in _paths(parent.done_keys))

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td if self.inverse else next_td.exclude(*self.excluded_keys)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return td.exclude(*self.excluded_keys) if self.inverse else td

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        if self.inverse:
            return output_spec
        _require_known(self, self.excluded_keys, output_spec, _OUTPUTS)
        gone = _paths(self.excluded_keys)
        needed = [key for key in self._read_back() if _is_below(as_path(key), gone)]
        if needed:
            raise ArgumentError(
                f"ExcludeTransform leaves out {needed}, which the env reads at its next step. Keep "
                "them."
            )
        return super().transform_output_spec(output_spec)

    def _excluded(self, spec: Composite) -> Composite:
        gone = _paths(self.excluded_keys)
        found = [path for path in _paths(spec.keys(True, True)) if _is_below(path, gone)]
        return self._without(spec, found)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._excluded(observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._excluded(reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        return _require_done(self, self._excluded(done_spec))

    def extra_repr(self) -> str:
        return ", ".join(map(repr, self.excluded_keys))


# --------------------------------------------------------------------------------------------- join


class CatTensors(Transform):
    """Join observations into one tensor.

    Args:
        in_keys: observations to join; None takes all with one axis besides the batch, but for those the
            env reads back.
        out_key: the joined entry, whose spec is unbounded.
        dim: axis along which they are joined, negative; -1 where ``in_keys`` is None.
        del_keys: take the inputs away, but for those the env reads back.
        unsqueeze_if_oor: insert the axis ``dim`` in inputs that have fewer axes.
        sort: join in the order of the names, not in that of ``in_keys``.

    Inputs of several dtypes are joined in the one torch promotes them to.

    Raises:
        ArgumentError: (a ValueError) ``dim`` is not negative, or not -1 where ``in_keys`` is None.
        MissingKeyError: an input is absent, in the specs or in data.
        SpecError: when specs are read: the shapes do not fit each other.
    """

    only_adds_done = True

    def __init__(
        self,
        in_keys: Keys = None,
        out_key: Key = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ):
        if in_keys is None and dim != -1:
            raise ArgumentError(
                f"dim is {dim}, but without in_keys must be -1: entries with one axis are joined. "
                "Name the entries."
            )
        self._takes_all, self.sort = in_keys is None, sort
        super().__init__(self._ordered(as_keys(in_keys)), [out_key])
        self.dim = require_negative("dim", dim)
        self.del_keys = del_keys
        self.unsqueeze_if_oor = unsqueeze_if_oor

    def _ordered(self, keys: Sequence[Key]) -> list[Key]:
        return sorted(keys, key=as_path) if self.sort else list(keys)

    def _joined(self, values: list[torch.Tensor], batch_dims: int) -> torch.Tensor:
        if self.unsqueeze_if_oor:
            values = [
                value.unsqueeze(self.dim) if -self.dim > value.ndim - batch_dims else value
                for value in values
            ]
        return torch.cat(values, self.dim)

    def _deleted(self) -> list[Key]:
        """Inputs that are taken away."""
        if not self.del_keys:
            return []
        env = self.parent
        kept = set(_paths([*self.out_keys, *([] if env is None else env.state_keys)]))
        return [key for key in self.in_keys if as_path(key) not in kept]

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        if not self.in_keys:
            raise NoParentError(
                "CatTensors has no in_keys and reads them from an environment. Name them, or put it "
                "into a TransformedEnv."
            )
        values = [next_td.get(key, None) for key in self.in_keys]
        missing = [key for key, value in zip(self.in_keys, values, strict=True) if value is None]
        if missing:
            raise MissingKeyError(
                f"CatTensors joins {self.in_keys}, but {missing} are not among "
                f"{sorted(map(str, next_td.keys(True, True)))}."
            )
        next_td.set(self.out_keys[0], self._joined(values, next_td.batch_dims))
        for key in self._deleted():
            _take_out(next_td, key)
        return next_td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        if self._takes_all:
            self.in_keys = self._all_of(observation_spec)
        leaves = {key: observation_spec.get(key, None) for key in self.in_keys}
        missing = [key for key, leaf in leaves.items() if leaf is None]
        if missing or not leaves:
            raise MissingKeyError(
                f"CatTensors joins {missing or 'all entries with one axis'}, but the env has the "
                f"observations {list(observation_spec.keys(True, True))}, and reads back "
                f"{[] if self.parent is None else self.parent.state_keys}. Name entries that exist "
                "with in_keys=."
            )
        (target,) = self.out_keys
        if target not in self.in_keys and observation_spec.get(target, None) is not None:
            raise KeyCollisionError(
                f"CatTensors writes {target!r}, but the env has an observation of that name. Choose "
                "another out_key."
            )
        observation_spec[target] = self._leaf(leaves, observation_spec.ndim)  # type: ignore[arg-type]
        for key in self._deleted():
            _take_out(observation_spec, key)
        return observation_spec

    def _all_of(self, spec: Composite) -> list[Key]:
        read = set() if self.parent is None else set(_paths(self.parent.state_keys))
        return self._ordered(
            [
                key
                for key, leaf in spec.items(True, True)
                if leaf.dtype is not None
                and leaf.ndim == spec.ndim + 1
                and as_path(key) not in read
            ]
        )

    def _leaf(self, leaves: dict[Key, TensorSpec], batch_dims: int) -> TensorSpec:
        shapes = {key: tuple(leaf.shape[batch_dims:]) for key, leaf in leaves.items()}
        try:
            short = [key for key, shape in shapes.items() if len(shape) < -self.dim]
            if short and not self.unsqueeze_if_oor:
                raise RuntimeError(f"{short} have no axis {self.dim} besides the batch")
            joined = self._joined([leaf.zero() for leaf in leaves.values()], batch_dims)
        except (RuntimeError, IndexError) as error:
            raise SpecError(
                f"entries of shapes {shapes} cannot be joined along axis {self.dim}: {error}. Reshape "
                "them first, or pass another dim, or unsqueeze_if_oor=True."
            ) from error
        return Unbounded(joined.shape, joined.device, joined.dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {super().extra_repr()}"
