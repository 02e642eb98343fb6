"""Several observations in one tensor.

`CatTensors` decides which observations are joined, in which order, and which of them stay. What the
env reads back (its states) is never taken away from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envkit.arrays import elementwise
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.paths import Key, as_path
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    SpecError,
)
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.transforms.core.base import Keys, as_keys
from envkit.transforms.core.fusable import MomentTransform, take_out
from envkit.transforms.core.leafwise import require_negative, require_regular

__all__ = ["CatTensors"]


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

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {super().extra_repr()}"
