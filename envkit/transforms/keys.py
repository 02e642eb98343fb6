"""Which entries there are, and what they are called: renamed, kept, left out.

These transforms move entries and compute nothing. What the env reads back (its states) is never
taken away from it.

Conventions
    path    key as a tuple of strings; a node's path stands for all entries below it.
    pair    (source, target): where an entry is, and where it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.errors import ArgumentError, KeyCollisionError, MissingKeyError
from envkit.specs import Composite
from envkit.transforms.core.base import Keys, Transform, as_keys
from envkit.transforms.core.fusable import MomentTransform, take_out
from envkit.transforms.core.leafwise import INPUTS, OUTPUTS, require_known
from envkit.transforms.core.memory import can_be_kept

__all__ = ["ExcludeTransform", "RenameTransform", "SelectTransform"]

Pair = tuple[Key, Key]


def _is_below(path: Path, heads: Iterable[Path]) -> bool:
    return any(path[: len(head)] == head for head in heads)


def _paths(keys: Iterable[Key]) -> list[Path]:
    return [as_path(key) for key in keys]


# ------------------------------------------------------------------------------------------- rename


class RenameTransform(MomentTransform):
    """Give entries other names, or copies under other names.

    Observations, rewards, done flags and whole nodes can be renamed, into and out of nodes. What the env
    also reads (a state) is renamed on both sides:
    ``RenameTransform(["state"], ["s"], ["state"], ["s"])``.

    Args:
        in_keys: names the env gives.
        out_keys: names the user sees, parallel to ``in_keys``.
        in_keys_inv: names of actions and states the env reads.
        out_keys_inv: names the user gives, parallel to ``in_keys_inv``.
        create_copy: keep the entry under its own name as well. On the way in the user gives an action under
            its new name alone; each step records the copy, which is what acted, under the old one.

    Raises:
        ArgumentError: (a ValueError) lists of two lengths, or a name that stands in both.
        MissingKeyError: when specs are read: there is no entry of that name.
        KeyCollisionError: when specs are read: a new name is taken.
    """

    computes_only = True

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = as_bool("create_copy", create_copy)
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

    def _moved(
        self, td: TensorDictBase, pairs: Iterable[Pair], *, all_there: bool
    ) -> TensorDictBase:
        for source, target in pairs:
            value = td.get(source, None)
            if value is not None:
                td.set(target, value.copy() if isinstance(value, TensorDictBase) else value)
                if not self.create_copy:
                    take_out(td, as_path(source))
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

    @property
    def _is_forward(self) -> bool:
        return not self.in_keys_inv  # renamed done flags, which a reset looks for, fit no program

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        moved = {path: self._new_path(path) for path in leaves}
        moved = {old: new for old, new in moved.items() if old != new}
        gone = {} if self.create_copy else dict.fromkeys(moved)
        return {**gone, **{new: leaves[old] for old, new in moved.items()}}

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
        require_known(self, self.in_keys, output_spec, OUTPUTS, "in_keys=")
        self._require_free(self.out_keys, output_spec, OUTPUTS)
        return super().transform_output_spec(output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        require_known(self, self.in_keys_inv, input_spec, INPUTS, "in_keys_inv=")
        self._require_free(self.out_keys_inv, input_spec, INPUTS)
        actions = input_spec["full_action_spec"].clone()
        input_spec = super().transform_input_spec(input_spec)
        for key in self.recorded_inputs:
            take_out(input_spec["full_action_spec"], as_path(key))
            input_spec["full_state_spec"][key] = actions[key]
        return input_spec

    @property
    def recorded_inputs(self) -> list[Key]:  # type: ignore[override]
        """Actions that are copies of the user's."""
        parent = self.parent
        if parent is None or not self.create_copy:
            return []
        actions = set(map(as_path, parent.action_keys))
        return [key for key in self.in_keys_inv if as_path(key) in actions]

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
                    take_out(spec, as_path(source))
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


class _Choosing(MomentTransform):
    """Base of transforms that leave entries out."""

    def _without(self, spec: Composite, gone: Iterable[Path]) -> Composite:
        for path in gone:
            take_out(spec, path)
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
        self.keep_rewards = as_bool("keep_rewards", keep_rewards)
        self.keep_dones = as_bool("keep_dones", keep_dones)
        self.only_adds_done = keep_dones

    def _kept(self) -> list[Key]:
        env = self.parent
        kept = [*self.selected_keys, *self._read_back()]
        if self.keep_rewards:
            kept += ["reward"] if env is None else env.reward_keys
        if self.keep_dones:
            kept += ["done"] if env is None else env.done_keys
        return kept

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        kept = _paths(self._kept())
        return {path: None for path in leaves if not _is_below(path, kept)}

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td.select(*self._kept(), strict=False)

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
        ArgumentError: (a ValueError) when specs are read: the entry is the state of a stateless env, or no
            done flag is left.
    """

    def __init__(self, *excluded_keys: Key, inverse: bool = False):
        super().__init__()
        self.excluded_keys = as_keys(list(excluded_keys))
        self.inverse = as_bool("inverse", inverse)

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags are left out."""
        parent, gone = self.parent, _paths(self.excluded_keys)
        return parent is None or not any(_is_below(path, gone) for path in _paths(parent.done_keys))

    @property
    def _is_forward(self) -> bool:
        return not self.inverse

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        gone = _paths(self.excluded_keys)
        return {path: None for path in leaves if _is_below(path, gone)}

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td if self.inverse else next_td.exclude(*self.excluded_keys)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return td.exclude(*self.excluded_keys) if self.inverse else td

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        if self.inverse:
            return output_spec
        require_known(self, self.excluded_keys, output_spec, OUTPUTS, "excluded_keys")
        gone = _paths(self.excluded_keys)
        read = [as_path(key) for key in self._read_back()]
        needed = [path for path in read if _is_below(path, gone) and not can_be_kept(path)]
        if needed:
            raise ArgumentError(
                f"ExcludeTransform leaves out {list(map(as_key, needed))}, which the env reads at its "
                "next step. Keep them."
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
