"""Several entries in one: joined along an axis that is there, or stacked along a new one.

`CatTensors` decides which observations are joined, in which order, and which of them stay. What the
env reads back (its states) is never taken away from it. `Stack` does the other, for whole nodes too, and undoes
it on the way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays import elementwise
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, as_path
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    SpecError,
    SpecFitError,
)
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.transforms.core.base import Keys, Transform, as_keys
from envkit.transforms.core.fusable import MomentTransform, take_out
from envkit.transforms.core.leafwise import (
    OUTPUTS,
    require_known,
    require_negative,
    require_regular,
)

__all__ = ["CatTensors", "Stack"]


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
            raise MissingKeyError(
                f"CatTensors joins {self.in_keys}, but {missing} are not among "
                f"{sorted('.'.join(path) for path in leaves)}."
            )
        gone = {as_path(key): None for key in self._deleted()}
        joined = self._joined(list(values.values()), leaves.batch_dims)
        return {as_path(self.out_keys[0]): joined, **gone}

    def transform_observation_spec(self, observation_spec: Any) -> Any:
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
        heads = list(map(as_path, self.in_keys))
        parent = self.parent
        return parent is None or not any(
            as_path(key)[: len(head)] == head for key in parent.done_keys for head in heads
        )

    def _axis(self, batch_dims: int) -> int:
        return self.dim if self.dim < 0 else self.dim + batch_dims

    def _stacked(self, td: TensorDictBase) -> TensorDictBase:
        values = [td.get(key) for key in self.in_keys]
        (target,) = self.out_keys
        for key in self.in_keys if self.del_keys else ():
            take_out(td, as_path(key))
        return td.set(target, torch.stack(values, self._axis(td.batch_dims)))

    def _absent(self, td: TensorDictBase) -> list[Key]:
        return [key for key in self.in_keys if td.get(key, None) is None]

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        absent = self._absent(next_td)
        if absent and not self.missing_tolerance:
            raise MissingKeyError(
                f"Stack stacks {self.in_keys}, but {absent} are not among "
                f"{sorted(map(str, next_td.keys(True, True)))}."
            )
        return next_td if absent else self._stacked(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return td_reset if self._absent(td_reset) else self._stacked(td_reset)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for outer in self.in_keys_inv:
            value = td.get(outer, None)
            if value is not None:
                parts = value.unbind(self._axis(td.batch_dims))
                take_out(td, as_path(outer))
                for key, part in zip(self.out_keys_inv, parts, strict=True):
                    td.set(key, part)
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        (target,) = self.out_keys
        mask = td.get((*as_path(target), rules.RESET), None)
        td = self._inv_call(td)
        if mask is not None and not self.only_adds_done:
            parts = mask.unbind(td.batch_dims if self.dim < 0 else self._axis(td.batch_dims))
            for key, part in zip(self.in_keys, parts, strict=True):
                td.set((*as_path(key), rules.RESET), part)
        return td

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, OUTPUTS, "in_keys=")
        return super().transform_output_spec(output_spec)

    def _merged(self, spec: Composite, parts: list[Key], whole: Key, *, drop: bool) -> Composite:
        leaves = {key: spec.get(key, None) for key in parts}
        found = [leaf for leaf in leaves.values() if leaf is not None]
        if not found or len(found) < len(parts):
            return spec
        shapes = {key: tuple(leaf.shape) for key, leaf in leaves.items() if leaf is not None}
        if len(set(shapes.values())) > 1:
            raise SpecFitError(
                f"Stack stacks entries of shapes {shapes}, which must be one. Pad or reshape them first."
            )
        stacked = torch.stack(found, self._axis(spec.ndim))  # type: ignore[arg-type]
        for key in parts if drop else ():
            take_out(spec, as_path(key))
        spec[whole] = stacked
        return spec

    def _shown(self, spec: Composite) -> Composite:
        return self._merged(spec, self.in_keys, self.out_keys[0], drop=self.del_keys)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._shown(observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._shown(reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        return self._shown(done_spec)

    def _asked_for(self, spec: Composite) -> Composite:
        for outer in self.in_keys_inv:
            spec = self._merged(spec, self.out_keys_inv, outer, drop=True)
        return spec

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        return self._asked_for(action_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._asked_for(state_spec)
