"""Which entries there are, and under which names: renamed, kept, left out, joined, stacked.

Entries that the env reads back (its states) stay in its data. `CatTensors` decides which observations are joined, in
which order, and which of them stay. `Stack` makes a new axis, for whole nodes too, and undoes it on the way in.

Conventions
    path    key as a tuple of strings; a node's path stands for all entries below it.
    pair    (source, target): where an entry is, and where it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays import elementwise
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_key, as_path, take_out
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    SpecError,
    SpecFitError,
)
from envkit.specs import Composite, TensorSpec, Unbounded, stack
from envkit.transforms.core.fusable import MomentTransform
from envkit.transforms.core.kept_memory import can_be_kept
from envkit.transforms.core.leafwise import (
    INPUTS,
    OUTPUTS,
    axis_in,
    require_known,
    require_negative,
    require_regular,
)
from envkit.transforms.core.transform import Keys, Transform, as_keys

Pair = tuple[Key, Key]


def _is_below(path: Path, heads: Iterable[Path]) -> bool:
    return any(path[: len(head)] == head for head in heads)


def _paths(keys: Iterable[Key]) -> list[Path]:
    return [as_path(key) for key in keys]


def _spares_done(transform: Transform, keys: Iterable[Key]) -> bool:
    """Check whether no done flag of the env before is one of some entries, or below one."""
    parent, heads = transform.parent, _paths(keys)
    return parent is None or not any(_is_below(path, heads) for path in _paths(parent.done_keys))


# ------------------------------------------------------------------------------------------- rename


class RenameTransform(MomentTransform):
    """Give entries other names, or copies under other names.

    Observations, rewards, done flags and whole nodes can be renamed, into and out of nodes. Entries that the env
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
        ArgumentError: (a ValueError) lists of two lengths, or a name that is in both.
        MissingKeyError: when specs are read: there is no entry of that name.
        KeyCollisionError: when specs are read: a new name is taken.

    Example:
        >>> from envkit import GymEnv, RenameTransform
        >>> env = GymEnv("CartPole-v1")
        >>> env = env.append_transform(RenameTransform(["observation"], ["pose"]))
        >>> env.observation_keys
        ['pose']
        >>> env.close()
    """

    computes_only = True
    _pairs_keys = True

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
        for end in ("", "_inv"):
            sources, targets = getattr(self, f"in_keys{end}"), getattr(self, f"out_keys{end}")
            both = [key for key in sources if key in targets]
            if both:
                raise ArgumentError(
                    f"{both} are in in_keys{end} and in out_keys{end}, so that the order of renaming "
                    "would matter. Use one RenameTransform after the other."
                )

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags get other names: the env before would not find its own."""
        return _spares_done(self, self.in_keys)

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
                raise self._missing(source, td, "Name an entry that is there.")
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
        """Return where the levels went whose done leaves were all renamed."""
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

    def _spec_after(self, spec: Composite) -> Composite:
        return self._renamed(spec, self._outwards)

    def _spec_before(self, spec: Composite) -> Composite:
        return self._renamed(spec, [(inner, outer) for outer, inner in self._inwards])


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

    Example:
        >>> from envkit import Compose, GymEnv, SelectTransform, Timer
        >>> chosen = Compose(Timer(), SelectTransform("observation"))
        >>> env = GymEnv("CartPole-v1").append_transform(chosen)
        >>> env.observation_keys
        ['observation']
        >>> env.close()
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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ExcludeTransform
        >>> data = TensorDict(observation=torch.zeros(4), pixels=torch.zeros(3, 8, 8))
        >>> list(ExcludeTransform("pixels")(data).keys())
        ['observation']
    """

    def __init__(self, *excluded_keys: Key, inverse: bool = False):
        super().__init__()
        self.excluded_keys = as_keys(list(excluded_keys))
        self.inverse = as_bool("inverse", inverse)

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags are left out."""
        return _spares_done(self, self.excluded_keys)

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

    def _spec_after(self, spec: Composite) -> Composite:
        gone = _paths(self.excluded_keys)
        found = [path for path in _paths(spec.keys(True, True)) if _is_below(path, gone)]
        return self._without(spec, found)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        return _require_done(self, self._spec_after(done_spec))

    def extra_repr(self) -> str:
        return ", ".join(map(repr, self.excluded_keys))


# --------------------------------------------------------------------------------- join and stack


class CatTensors(MomentTransform):
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

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import CatTensors
        >>> data = TensorDict(place=torch.zeros(3), speed=torch.ones(2))
        >>> CatTensors(["place", "speed"], "state")(data)["state"]
        tensor([0., 0., 0., 1., 1.])
    """

    _in_repr = ("dim",)

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
        self._takes_all, self.sort = in_keys is None, as_bool("sort", sort)
        super().__init__(self._ordered(as_keys(in_keys)), [out_key])
        self.dim = require_negative("dim", dim)
        self.del_keys = as_bool("del_keys", del_keys)
        self.unsqueeze_if_oor = as_bool("unsqueeze_if_oor", unsqueeze_if_oor)

    def _ordered(self, keys: Sequence[Key]) -> list[Key]:
        return sorted(keys, key=as_path) if self.sort else list(keys)

    def _joined(self, values: list[Any], batch_dims: int) -> Any:
        if self.unsqueeze_if_oor:
            values = [
                elementwise.unsqueezed(value, self.dim)
                if -self.dim > value.ndim - batch_dims
                else value
                for value in values
            ]
        return elementwise.joined(values, self.dim)

    def _deleted(self) -> list[Key]:
        """Inputs that are taken away."""
        if not self.del_keys:
            return []
        env = self.parent
        kept = set(map(as_path, [*self.out_keys, *([] if env is None else env.state_keys)]))
        return [key for key in self.in_keys if as_path(key) not in kept]

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        if not self.in_keys:
            raise NoParentError(
                "CatTensors has no in_keys and reads them from an environment. Name them, or put it "
                "into a TransformedEnv."
            )
        values = {key: leaves.get(as_path(key)) for key in self.in_keys}
        missing = [key for key, value in values.items() if value is None]
        if missing:
            raise self._missing(missing, leaves, "Name entries that are there with in_keys=.")
        gone = {as_path(key): None for key in self._deleted()}
        joined = self._joined(list(values.values()), leaves.batch_dims)
        return {as_path(self.out_keys[0]): joined, **gone}

    def transform_observation_spec(self, observation_spec: object) -> Any:
        if not isinstance(observation_spec, Composite):  # a leaf alone is joined with no other
            return observation_spec
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
        for key, leaf in leaves.items():
            require_regular(self, key, leaf)  # type: ignore[arg-type]
        (target,) = self.out_keys
        if target not in self.in_keys and observation_spec.get(target, None) is not None:
            raise KeyCollisionError(
                f"CatTensors writes {target!r}, but the env has an observation of that name. Choose "
                "another out_key."
            )
        observation_spec[target] = self._leaf(leaves, observation_spec.ndim)  # type: ignore[arg-type]
        for key in self._deleted():
            take_out(observation_spec, as_path(key))
        return observation_spec

    def _all_of(self, spec: Composite) -> list[Key]:
        read = set() if self.parent is None else set(map(as_path, self.parent.state_keys))
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


class Stack(Transform):
    """Stack entries, or whole nodes, along a new axis; on the way in, take one apart.

    For agents that have names and are alike: ``Stack(["a", "b"], "agents", in_key_inv="agents",
    out_keys_inv=["a", "b"])``. Nodes are stacked along their batch axes.

    Args:
        in_keys: entries to stack, all of one shape.
        out_key: the stack.
        in_key_inv: action or state that the user gives stacked.
        out_keys_inv: the entries of the env's input that it is taken apart into.
        dim: place of the new axis in the stack, negative.
        allow_positive_dim: accept a place that counts from the first axis after the batch.
        del_keys: take the inputs away.

    Raises:
        ArgumentError: (a ValueError) ``dim`` is not negative and that is not allowed, or only one of
            ``in_key_inv`` and ``out_keys_inv``.
        MissingKeyError: an entry is absent.
        SpecFitError: (a RuntimeError) when specs are read: the entries have several shapes.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import Stack
        >>> data = TensorDict(left=torch.zeros(3), right=torch.ones(3))
        >>> Stack(["left", "right"], "both", dim=-2)(data)["both"]
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
    """

    _in_repr = ("dim",)

    def __init__(
        self,
        in_keys: Keys,
        out_key: Key,
        in_key_inv: Key | None = None,
        out_keys_inv: Keys = None,
        dim: int = -1,
        allow_positive_dim: bool = False,
        *,
        del_keys: bool = True,
    ):
        if (in_key_inv is None) != (out_keys_inv is None):
            raise ArgumentError(
                f"Stack has in_key_inv={in_key_inv!r} and out_keys_inv={out_keys_inv!r}. Pass both: what is "
                "taken apart, and into what."
            )
        super().__init__(in_keys, [out_key], in_key_inv, out_keys_inv)
        self.dim = require_negative("dim", dim, allow_positive=allow_positive_dim)
        self.del_keys = as_bool("del_keys", del_keys)

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where done flags are stacked: the env before would not find its own."""
        return _spares_done(self, self.in_keys)

    def _stacked(self, td: TensorDictBase) -> TensorDictBase:
        values = [td.get(key) for key in self.in_keys]
        (target,) = self.out_keys
        for key in self.in_keys if self.del_keys else ():
            take_out(td, as_path(key))
        return td.set(target, torch.stack(values, axis_in(self.dim, td.batch_dims)))

    def _absent(self, td: TensorDictBase) -> list[Key]:
        return [key for key in self.in_keys if td.get(key, None) is None]

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        absent = self._absent(next_td)
        if absent and not self.missing_tolerance:
            raise self._missing(absent, next_td, "Name entries that are there with in_keys=.")
        return next_td if absent else self._stacked(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset if self._absent(td_reset) else self._stacked(td_reset)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for outer in self.in_keys_inv:
            value = td.get(outer, None)
            if value is not None:
                parts = value.unbind(axis_in(self.dim, td.batch_dims))
                take_out(td, as_path(outer))
                for key, part in zip(self.out_keys_inv, parts, strict=True):
                    td.set(key, part)
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        (target,) = self.out_keys
        whole = td.get(target, None)
        mask = whole.get(rules.RESET, None) if isinstance(whole, TensorDictBase) else None
        td = self._inv_call(td)
        if mask is not None and not self.only_adds_done:
            parts = mask.unbind(td.batch_dims if self.dim < 0 else axis_in(self.dim, td.batch_dims))
            for key, part in zip(self.in_keys, parts, strict=True):
                td.set((*as_path(key), rules.RESET), part)
        return td

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, OUTPUTS, "in_keys=")
        return super().transform_output_spec(output_spec)

    def _merged(self, spec: Composite, parts: list[Key], whole: Key, *, drop: bool) -> Composite:
        leaves = {key: spec.get(key, None) for key in parts}
        present = [leaf for leaf in leaves.values() if leaf is not None]
        if not present or len(present) < len(parts):
            return spec
        shapes = {key: tuple(leaf.shape) for key, leaf in leaves.items() if leaf is not None}
        if len(set(shapes.values())) > 1:
            raise SpecFitError(
                f"Stack stacks entries of shapes {shapes}, which must be one. Pad or reshape them first."
            )
        stacked = stack(present, axis_in(self.dim, spec.ndim))
        for key in parts if drop else ():
            take_out(spec, as_path(key))
        spec[whole] = stacked
        return spec

    def _spec_after(self, spec: Composite) -> Composite:
        return self._merged(spec, self.in_keys, self.out_keys[0], drop=self.del_keys)

    def _spec_before(self, spec: Composite) -> Composite:
        for outer in self.in_keys_inv:
            spec = self._merged(spec, self.out_keys_inv, outer, drop=True)
        return spec
