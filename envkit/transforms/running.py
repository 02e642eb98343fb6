"""Values standardised by statistics that keep following the data.

Every row counts for the statistics of all rows, and of all copies that share them. This is the one
thing here that cannot be computed row by row. Which rows are new is decided in `coupled`; `VecNorm`
measures them together, once each; what follows is element-wise.

Conventions
    moments  see the module of that name.
    event    axes of a value that have statistics of their own; all axes before are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from envkit.arrays import elementwise, moments
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.inference import lasting
from envkit.data.paths import Key, Path, as_path
from envkit.errors import ArgumentError, StatisticsError
from envkit.specs import Composite, TensorSpec
from envkit.transforms.averages import VecNormV2
from envkit.transforms.core.base import Keys, Transform
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.coupled import (
    CoupledTransform,
    LateBuffers,
    SkipsRows,
    by_rows,
    module_name,
)
from envkit.transforms.core.fusable import MomentTransform
from envkit.transforms.core.leafwise import ArrayTransform, as_float, float_leaf, require_regular
from envkit.transforms.normalise import ObservationNorm

__all__ = ["VecNorm"]


class _Moments(LateBuffers):
    """Moments of one entry."""

    names = ("weight", "mean", "squares")
    weight: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    @property
    def now(self) -> moments.Moments:
        return self.weight, self.mean, self.squares

    def begin_like(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> None:
        """Make moments of nothing, unless there are some."""
        if not self.exist:
            with lasting():
                mean = torch.zeros(tuple(shape), dtype=dtype, device=device)
                weight = torch.zeros((), dtype=torch.float64, device=device)
                self.begin({"weight": weight, "mean": mean, "squares": mean.clone()})

    @torch.no_grad()
    def add(self, rows: torch.Tensor, decay: float, mask: torch.Tensor) -> None:
        """Count the rows of ``mask``, in place, so that copies that share them follow."""
        after = moments.with_rows(self.now, rows, decay, mask)
        for tensor, value in zip(self.now, after, strict=True):
            tensor.copy_(value)

    def loc_and_scale(self, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Give mean and standard deviation; 0 and 1 before anything was seen."""
        return moments.loc_and_scale(self.now, eps)


class VecNorm(SkipsRows, CoupledTransform, ArrayTransform):
    """Standardise values by their running mean and standard deviation.

    Every step counts the rows that were stepped, every reset those that were reset, and then all values
    are standardised. Statistics are buffers: clones share them, and so do the envs of one `EnvCreator`
    and modules whose memory is shared. Nothing is counted after `freeze`; `eval()` changes nothing. It fuses
    unless processes or threads share it: a program changes statistics without asking anybody.

    Args:
        in_keys: entries to standardise, each by its own statistics; ``"observation"`` and ``"reward"``
            by default.
        out_keys: where they go; in place by default.
        shared_td: ``statistics`` of another VecNorm, which are shared with it.
        lock: held while statistics are read and written back.
        decay: weight of what was seen before, at each update.
        eps: least variance.
        shapes: event of each entry, its last axes; by default all axes after the batch.
        new_api: give a `VecNormV2` of the other arguments instead.

    Integers are cast to the default float dtype. A row that holds NaN or an infinite number stays as it is, and is left
    out of the statistics: ``skipped_rows`` counts them, and the first one gives a warning (none
    where the statistics are on a GPU).

    Raises:
        ArgumentError: (a ValueError) ``decay`` is outside (0, 1], or there are not as many ``shapes``
            as in_keys.
    """

    _twins = (
        *MomentTransform._twins,
        ("_observe_rows", "seen_leaves"),
        ("_standardised", "moment_leaves"),
    )

    def __new__(cls, *args: Any, new_api: bool = False, **kwargs: Any) -> Any:
        return VecNormV2(*args, **kwargs) if new_api else super().__new__(cls, *args, **kwargs)

    learns = True

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        shared_td: TensorDictBase | None = None,
        lock: Any = None,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        new_api: bool = False,
    ):
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys)
        if not 0 < decay <= 1:
            raise ArgumentError(f"decay is {decay}, but must lie in (0, 1]; 1 forgets nothing.")
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise ArgumentError(
                f"shapes has {len(shapes)} entries for in_keys {self.in_keys}. Pass one for each."
            )
        self.decay = decay
        self.eps = eps
        self.shapes = None if shapes is None else [tuple(shape) for shape in shapes]
        self.frozen = False  # see `Transform.learns`
        self._begin_count()
        self.shared_lock: AbstractContextManager = nullcontext() if lock is None else lock
        self.moments = nn.ModuleDict({module_name(key): _Moments() for key in self.in_keys})
        if shared_td is not None:
            self._share(shared_td)

    def _share(self, statistics: TensorDictBase) -> None:
        for key in self.in_keys:
            for name in _Moments.names:
                tensor = statistics.get((*as_path(key), name))
                self._moments_of(key).register_buffer(name, tensor)

    def _moments_of(self, key: Key) -> _Moments:
        return self.moments[module_name(key)]  # type: ignore[return-value]

    # ------------------------------------------------------------------------ what couples the rows

    def _observe_rows(self, key: Key, rows: torch.Tensor) -> None:
        if self.frozen:
            return
        rows, own = as_float(rows), self._moments_of(key)
        with self.shared_lock:
            own.begin_like(rows.shape[1:], rows.dtype, rows.device)
            is_finite = moments.are_finite(rows)
            own.add(rows, self.decay, is_finite)
            self._count_skipped(~is_finite)

    def _event_of(self, key: Key, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape) if self.shapes is None else self.shapes[self.in_keys.index(key)]

    # ----------------------------------------------------------------------------------- row by row

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            self._convert(
                next_td,
                [source],
                [target],
                lambda value, key=source: self._standardised(value, key),
            )
        return next_td

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "VecNorm has statistics for each key and works on TensorDicts. Call it on one."
        )

    def _standardised(self, value: torch.Tensor, key: Key) -> torch.Tensor:
        own, value = self._moments_of(key), as_float(value)
        if not own.exist:
            return value
        return elementwise.standardised(value, *own.loc_and_scale(self.eps))

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the values before, in a copy of the data, at its root and under ``next``."""
        data = tensordict.copy()
        following = data.get("next", None)
        for td in [data] if following is None else [data, following]:
            for source, target in zip(self.in_keys, self.out_keys, strict=True):
                value, own = td.get(target, None), self._moments_of(source)
                if value is not None and own.exist:
                    td.set(source, elementwise.scaled(value, *own.loc_and_scale(self.eps)))
        return data

    # --------------------------------------------------------------------------- inside a program

    @property
    def fuses(self) -> bool:
        """False where others may change the statistics while a program runs."""
        return not self._is_shared and super().fuses

    @property
    def _is_shared(self) -> bool:
        is_locked = not isinstance(self.shared_lock, nullcontext)
        return is_locked or any(
            tensor.is_shared() and not tensor.is_cuda for tensor in self.moments.buffers()
        )

    def constants(self) -> dict[str, Any]:
        return {"decay": self.decay, "eps": self.eps, "counts": not self.frozen}

    def state(self) -> dict[str, torch.Tensor]:
        if self._is_shared:
            raise StatisticsError(
                f"the statistics of VecNorm of {self.in_keys} are shared since its env has compiled them into "
                "its programs, which change them without asking anybody. Share them before the env is used."
            )
        self._warn_of_skipped()
        known = [key for key in self.in_keys if self._moments_of(key).exist]
        tensors = {
            name: tensor
            for key in known
            for name, tensor in zip(_names(key), self._moments_of(key).now, strict=True)
        }
        return {**tensors, _SKIPPED: self.skipped_rows} if known else {}

    def seen_leaves(
        self, leaves: Leaves, mask: Any, constants: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        changes: dict[str, Any] = {}
        skipped = constants[_SKIPPED]
        for key in self.in_keys:
            value = leaves.get(as_path(key))
            if value is not None:  # rewards are absent at a reset
                event = self._event_of(key, value.shape[leaves.batch_dims :])
                rows, counts = by_rows(value, event, mask, leaves.batch_dims)
                before = _of_state(key, constants)
                rows, counts = elementwise.cast(rows, before[1].dtype), counts & constants["counts"]
                is_finite = moments.are_finite(rows)
                after = moments.with_rows(before, rows, constants["decay"], counts & is_finite)
                changes |= dict(zip(_names(key), after, strict=True))
                skipped = moments.increased(skipped, counts & ~is_finite)
        return {**changes, _SKIPPED: skipped}

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            value = changes.get(as_path(source), leaves.get(as_path(source)))
            if value is not None:
                own = _of_state(source, constants)
                loc, scale = moments.loc_and_scale(own, constants["eps"])
                value = elementwise.cast(value, loc.dtype)
                changes[as_path(target)] = elementwise.standardised(value, loc, scale)
        return changes

    # --------------------------------------------------------------------------------------- specs

    def _written(self, spec: Any) -> Any:
        for key in self.in_keys if isinstance(spec, Composite) else ():
            leaf = spec.get(key, None)
            if leaf is not None:
                require_regular(self, key, leaf)
                event = self._event_of(key, leaf.shape[spec.ndim :])
                dtype = self._leaf_after(leaf).dtype
                self._moments_of(key).begin_like(event, dtype, leaf.device)  # type: ignore[arg-type]
        return super()._written(spec)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return float_leaf(leaf)

    # ---------------------------------------------------------------------------- the statistics

    @property
    def statistics(self) -> TensorDict:
        """Weight, mean and squares below each in_key: the buffers themselves, to be shared."""
        return TensorDict(
            {
                key: dict(self._moments_of(key).named_buffers())
                for key in self.in_keys
                if self._moments_of(key).exist
            }
        )

    @property
    def loc(self) -> TensorDict:
        """Running means by in_key."""
        return self._loc_and_scale(0)

    @property
    def scale(self) -> TensorDict:
        """Running standard deviations by in_key."""
        return self._loc_and_scale(1)

    def _loc_and_scale(self, which: int) -> TensorDict:
        found = {key: self._moments_of(key) for key in self.in_keys}
        return TensorDict(
            {key: m.loc_and_scale(self.eps)[which].clone() for key, m in found.items() if m.exist}
        )

    def freeze(self) -> VecNorm:
        """Count nothing from now on; returns self."""
        self.frozen = True
        return self

    def unfreeze(self) -> VecNorm:
        """Count again; returns self."""
        self.frozen = False
        return self

    def frozen_copy(self) -> VecNorm:
        """Give a clone that follows these statistics and counts nothing itself.

        Raises:
            StatisticsError: (a RuntimeError) there are none to follow yet.
        """
        unseen = [key for key in self.in_keys if not self._moments_of(key).exist]
        if unseen:
            raise StatisticsError(
                f"VecNorm has no statistics of {unseen} yet, which a frozen copy could follow. Step its env "
                "or call it on data first, or use clone() and freeze() the clone later."
            )
        twin = self.clone()
        assert isinstance(twin, VecNorm)
        return twin.freeze()

    def to_observation_norm(self) -> Transform:
        """Give a transform by the statistics of this moment, which does not follow them."""
        fixed = [
            ObservationNorm(
                self.loc[source],
                self.scale[source],
                in_keys=[source],
                out_keys=[target],
                standard_normal=True,
            )
            for source, target in zip(self.in_keys, self.out_keys, strict=True)
        ]
        return fixed[0] if len(fixed) == 1 else Compose(*fixed)

    def extra_repr(self) -> str:
        return f"decay={self.decay}, eps={self.eps}, {super().extra_repr()}"


_SKIPPED = "skipped rows"


def _names(key: Key) -> list[str]:
    """Name the moments of an entry as state of a program."""
    return [f"{module_name(key)}/{name}" for name in _Moments.names]


def _of_state(key: Key, state: Mapping[str, Any]) -> moments.Moments:
    weight, mean, squares = (state[name] for name in _names(key))
    return weight, mean, squares
