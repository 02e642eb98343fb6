"""Values standardised by statistics that keep following the data.

Which rows are new is decided in `coupled`. For `VecNorm` every row counts for the statistics of all rows, and of all copies
that share them; it measures them together, once each. `VecNormV2` keeps averages, of each row or of all rows, in the
transform or in the data. The arithmetic is in `arrays.statistics`; what follows is element-wise.

Conventions
    moments   see `arrays.statistics`.
    averages  they have the shape of the entry, or of one row of it where rows are averaged.
    event     axes of a value that have their own statistics; all axes before are rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from array_api_compat import array_namespace
from tensordict import TensorDict, TensorDictBase
from torch import nn

from envkit import rules
from envkit.arrays import elementwise, statistics
from envkit.arrays.integers import as_int
from envkit.arrays.leaves import Changes, Leaves
from envkit.arrays.statistics import Averages, Moments
from envkit.data.arguments import as_bool, as_number, require_rows_of_policies
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.env.input_checks import in_functorch
from envkit.errors import (
    ArgumentError,
    CentredRewardWarning,
    NotCallableError,
    StatisticsError,
    UnsupportedError,
)
from envkit.process_wide import warn
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.specs.lasting import lasting
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.coupled import (
    CoupledTransform,
    LateBuffers,
    SkipsRows,
    by_rows,
    module_name,
)
from envkit.transforms.core.fusable import FusableTransform, MomentTransform
from envkit.transforms.core.leafwise import (
    ArrayTransform,
    as_float,
    float_leaf,
    require_known,
    require_regular,
)
from envkit.transforms.core.transform import Keys, Transform
from envkit.transforms.episodes import EpisodeTransform
from envkit.transforms.values import ObservationNorm

Masks = Callable[[Key], torch.Tensor | None]


class _Kept(LateBuffers):
    """Averages of one entry in the transform."""

    names = ("loc", "var", "count")
    loc: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    @property
    def now(self) -> Averages:
        return self.loc, self.var, self.count


class _Running(SkipsRows):
    """The settings that the transforms here have."""

    in_keys: list[Key]
    out_keys: list[Key]

    learns = True

    def _begin_running(self, decay: float, eps: float, lock: Any) -> None:
        meaning = "the weight of earlier data, 1 to keep all of it"
        self.decay = as_number("decay", decay, above=0, most=1, meaning=meaning)
        self.eps = as_number("eps", eps, least=0, meaning="the least scale, such as 1e-4")
        self.frozen = False  # see `Transform.learns`
        self._has_told = False
        self._begin_count()
        self.shared_lock: AbstractContextManager = nullcontext() if lock is None else lock

    @property
    def lock(self) -> AbstractContextManager:
        """Held while statistics are used."""
        return self.shared_lock

    def _warn_of_centred(self, rewards: Composite) -> None:
        """Warn once if a reward is replaced by what is left when its mean is taken away."""
        centred = [
            key
            for key, out in zip(self.in_keys, self.out_keys, strict=True)
            if as_path(key) == as_path(out) and rewards.get(key, None) is not None
        ]
        if not centred or self._has_told:
            return
        self._has_told = True
        warn(
            f"{type(self).__name__} subtracts the running mean of {centred}, so that a reward loses its sign, and one that is always "
            "the same becomes 0. NormalizeReward() only divides. Pass in_keys=['observation'], and put a "
            "NormalizeReward() behind it.",
            CentredRewardWarning,
        )

    def freeze(self) -> Self:
        """Count nothing from now on; returns self.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNorm
            >>> norm = VecNorm(["x"], decay=1.0)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> norm = norm.freeze()
            >>> norm(TensorDict(x=torch.tensor([[5.0]]), batch_size=[1]))["x"]
            tensor([[3.]])
        """
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Count again; returns self.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNorm
            >>> norm = VecNorm(["x"], decay=1.0)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> norm.freeze().unfreeze().frozen
            False
        """
        self.frozen = False
        return self


class VecNormV2(_Running, EpisodeTransform, FusableTransform):
    """Standardise values by running averages, with a mean and a deviation for each row unless rows are averaged.

    A step updates the averages of the rows that were stepped, a reset those of the rows that were reset; then
    values become ``(value - loc) / scale``. Integers are cast to the default float dtype. A row that holds NaN or an infinite
    number stays as it is, and updates nothing: ``skipped_rows`` counts them, and the first one gives a warning (none
    where the statistics are on a GPU).

    Args:
        in_keys: entries to standardise. A reward in place gives a `CentredRewardWarning`, see `NormalizeReward`.
        out_keys: where they go; in place by default.
        lock: held while averages are read and written back.
        stateful: the averages are buffers of the transform. False: they travel in the data, as ``_vecnorm_loc``,
            ``_vecnorm_var`` and ``_vecnorm_count``, and begin again with each episode.
        decay: weight of what was seen before, at each update; 1 weighs all updates alike.
        eps: least deviation.
        shared_data: ``statistics`` of another VecNormV2, which are shared with it.
        reduce_batch_dims: all rows update averages that they share, each as one update.

    `clone` and `frozen_copy` have their own averages; envs of one `EnvCreator` share theirs, with a lock.

    Raises:
        ArgumentError: (a ValueError) ``decay`` is outside (0, 1], or there are not as many out_keys as in_keys.
        UnsupportedError: (a NotImplementedError) what needs averages in the transform
            is asked of one that has none.
        StatisticsError: (a RuntimeError) there are none yet, or they were kept for rows of another batch size.

    Example:
        >>> from envkit import GymEnv, VecNormV2
        >>> env = GymEnv("CartPole-v1").append_transform(VecNormV2(["observation"]))
        >>> env.rollout(3)["observation"].shape
        torch.Size([3, 4])
        >>> sorted(env.transform.statistics.keys())
        ['count', 'loc', 'var']
        >>> env.close()
    """

    _in_repr = ("stateful", "decay", "eps")
    _twins = (*FusableTransform._twins, ("_normalised", "counted"), ("_update_kept", "counted"))
    _pairs_keys = True

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys = None,
        *,
        lock: Any = None,
        stateful: bool = True,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shared_data: TensorDictBase | None = None,
        reduce_batch_dims: bool = False,
    ):
        super().__init__(in_keys, out_keys)
        self.stateful = as_bool("stateful", stateful)
        self._begin_running(decay, eps, lock)
        self.reduce_batch_dims = as_bool("reduce_batch_dims", reduce_batch_dims)
        self.kept = nn.ModuleDict({module_name(key): _Kept() for key in self._own_keys})
        if reduce_batch_dims:
            self._require_stateful("reduce_batch_dims=True")
        if shared_data is not None:
            self._share(shared_data)

    def _share(self, statistics: TensorDictBase) -> None:
        self._require_stateful("shared_data")
        for key in self.in_keys:
            own = {name: statistics.get((name, *as_path(key))) for name in _Kept.names}
            if len({tuple(tensor.shape) for tensor in own.values()}) > 1:
                shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
                raise ArgumentError(
                    f"loc, var and count of {key!r} in shared_data have the shapes {shapes}, but must have one. "
                    "Pass what `statistics` of another VecNormV2 gave."
                )
            self._kept(key).begin(own)

    @property
    def remembers_rows(self) -> bool:  # type: ignore[override]
        """Whether each row has averages, and these are in the transform."""
        return self.stateful and not self.reduce_batch_dims

    @property
    def _own_keys(self) -> list[Key]:
        """Entries whose averages are in the transform."""
        return self.in_keys if self.stateful else []

    def _kept(self, key: Key) -> _Kept:
        return self.kept[module_name(key)]  # type: ignore[return-value]

    # ----------------------------------------------------------------------------- in an env, on data

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        stepped = td.get(rules.STEP, None)
        return self._normalised(next_td, td, lambda key: stepped)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        self._normalised(td_reset, None, lambda key: self._reset_mask(td, as_path(key)[:-1]))
        for key in () if self.stateful else self.in_keys:
            level = self._level_of(key)
            for path in self._places(key):
                td_reset.set(path, self._kept_elsewhere(td, level, path, td_reset.get(path)))
        return td_reset

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Update the averages by data, all rows, and standardise it."""
        return self._normalised(tensordict, tensordict, lambda key: None)

    def _normalised(
        self, td: TensorDictBase, before: TensorDictBase | None, mask_of: Masks
    ) -> TensorDictBase:
        """Update and standardise the entries that ``td`` has; ``before`` may hold averages, ``td`` will."""
        values = [(key, td.get(key, None)) for key in self.in_keys]
        with self.shared_lock:
            for (key, value), target in zip(values, self.out_keys, strict=True):
                if not self.stateful:
                    own = self._update_carried(key, value, mask_of(key), td, before)
                elif value is not None:
                    own = self._update_kept(key, as_float(value), mask_of(key), td.batch_dims)
                else:
                    continue
                if value is not None:
                    loc, scale = self._loc_and_scale(own)
                    td.set(target, (as_float(value) - loc) / scale)
        return td

    @property
    def fuses(self) -> bool:
        return False

    @property
    def sees_rows(self) -> bool:
        return self.stateful and self._is_written_in_leaves

    def counted(
        self, leaves: Leaves, root: Leaves | None, rows: Sequence[int] | None
    ) -> dict[str, Any]:
        shown = ((key, leaves.get(as_path(key))) for key in self.in_keys)
        with self.shared_lock:
            return {
                module_name(key): self._loc_and_scale(
                    self._update_kept(key, as_float(value), None, leaves.batch_dims, rows)
                )
                for key, value in shown
                if value is not None
            }

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for key, target in zip(self.in_keys, self.out_keys, strict=True):
            value = fresh.get(as_path(key))
            if value is not None:
                loc, scale = constants[module_name(key)]
                changes[as_path(target)] = (as_float(value) - loc) / scale
        return changes

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self.reset_leaves(following, constants)

    def constants(self) -> dict[str, Any]:
        found = ((key, self._kept(key)) for key in self._own_keys)
        return {module_name(key): self._loc_and_scale(one.now) for key, one in found if one.exist}

    @torch.no_grad()
    def _update_kept(
        self,
        key: Key,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        batch_dims: int,
        rows: Sequence[int] | None = None,
    ) -> Averages:
        """Count values in the averages, and return those of the ``rows`` that these are (None: all)."""
        kept, event = self._kept(key), value.shape[batch_dims:]
        if self.frozen and not kept.exist:
            return statistics.no_averages(value)
        self._begin(
            key, event if self.reduce_batch_dims else value.shape, value.dtype, value.device
        )
        some = (
            ...
            if rows is None or self.reduce_batch_dims
            else torch.as_tensor(rows, device=value.device)
        )
        own = kept.loc[some], kept.var[some], kept.count[some]
        if self.frozen:
            return own
        if self.reduce_batch_dims:
            new, is_new = by_rows(value, event, mask, batch_dims)
            new = new if is_new is None else new[is_new]
            is_finite = statistics.are_finite(new)
            self._count_skipped(~is_finite)
            after = statistics.averages_with_rows(own, new[is_finite], self.decay)
        else:
            self._require_rows(key, value, own[0])
            after = self._with_masked(own, value, mask, batch_dims)
        for tensor, values in zip(kept.now, after, strict=True):
            tensor[some] = values.to(tensor.dtype)
        return kept.loc[some], kept.var[some], kept.count[some]

    def _update_carried(
        self,
        key: Key,
        value: torch.Tensor | None,
        mask: torch.Tensor | None,
        td: TensorDictBase,
        before: TensorDictBase | None,
    ) -> Averages:
        places = self._places(key)
        own = None if before is None else _averages_in(before, places)
        if own is None:
            own = statistics.no_averages(
                self._zero_of(key, td) if value is None else as_float(value)
            )
        if value is not None and not self.frozen:
            own = self._with_masked(own, as_float(value).detach(), mask, td.batch_dims)
        for path, tensor in zip(places, own, strict=True):
            td.set(path, tensor)
        return own

    def _zero_of(self, key: Key, td: TensorDictBase) -> torch.Tensor:
        """Return a value of an entry that is absent, a reward at a reset say."""
        env = self._env()
        spec = next(
            spec
            for spec in (env.full_observation_spec, env.full_reward_spec)
            if key in spec.keys(True)
        )
        leaf = spec[key]
        event = leaf.shape[spec.ndim :]
        return as_float(torch.zeros((*td.batch_size, *event), dtype=leaf.dtype, device=leaf.device))

    def _begin(self, key: Key, shape: Sequence[int], dtype: torch.dtype, device: Any) -> None:
        if not self._kept(key).exist:
            with lasting():
                own = statistics.no_averages(torch.zeros(tuple(shape), dtype=dtype, device=device))
            self._kept(key).begin(dict(zip(_Kept.names, own, strict=True)))

    def _require_rows(self, key: Key, value: torch.Tensor, loc: torch.Tensor) -> None:
        known = loc.shape
        if known != value.shape:
            raise StatisticsError(
                f"{key!r} has shape {tuple(value.shape)}, but VecNormV2 keeps averages of shape {tuple(known)}: one "
                "for each row. Pass reduce_batch_dims=True for averages of all rows."
            )

    def _with_masked(
        self, averages: Averages, value: torch.Tensor, mask: torch.Tensor | None, batch_dims: int
    ) -> Averages:
        """Count one value in each row that ``mask`` selects and that is finite."""
        after = statistics.averages_with_values(averages, value, self.decay)
        mask = None if mask is None else rules.reduce_mask(mask, value.shape, batch_dims)
        is_finite = statistics.are_finite(value, batch_dims if mask is None else mask.ndim)
        mask = torch.ones_like(is_finite) if mask is None else mask
        self._count_skipped(mask & ~is_finite)
        chosen = (
            rules.choose(mask & is_finite, new, old)
            for new, old in zip(after, averages, strict=True)
        )
        return tuple(chosen)  # type: ignore[return-value]

    def _loc_and_scale(self, averages: Averages) -> tuple[torch.Tensor, torch.Tensor]:
        return statistics.loc_and_scale_of_averages(averages, self.decay, self.eps)

    # --------------------------------------------------------------------------------------- specs

    def _free_prefix(self) -> str:
        """Return what the names in the data begin with: another one where an earlier VecNormV2 has taken it."""
        if self.container is None:
            return "_vecnorm"
        taken = set(self._env().full_observation_spec.keys())
        names = ("_vecnorm", *(f"_vecnorm{number}" for number in range(2, 2 + len(taken))))
        return next(name for name in names if f"{name}_loc" not in taken)

    def _places(self, key: Key) -> list[Path]:
        """Where the data has the averages of an entry."""
        prefix = self._read_once("prefix", self._free_prefix)
        return [(f"{prefix}_{name}", *as_path(key)) for name in _Kept.names]

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, ("observation", "reward"), "in_keys=")
        return super().transform_output_spec(output_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self._declare_carried(observation_spec)
        return self._written(observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        self._warn_of_centred(reward_spec)
        return self._written(reward_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        self._declare_carried(state_spec)
        return state_spec

    def _written(self, spec: Composite) -> Composite:
        for key in [key for key in self.in_keys if key in spec.keys(True)]:
            leaf = float_leaf(spec[key])
            if self.stateful and self._env().batch_locked:
                shape = leaf.shape[spec.ndim :] if self.reduce_batch_dims else leaf.shape
                self._begin(key, shape, leaf.dtype, leaf.device)  # type: ignore[arg-type]
            spec[self.out_keys[self.in_keys.index(key)]] = leaf
        return spec

    def _declare_carried(self, spec: Composite) -> None:
        env = self._env()
        for key in () if self.stateful else self.in_keys:
            for kind in (env.full_observation_spec, env.full_reward_spec):
                if key in kind.keys(True):
                    leaf = float_leaf(kind[key])
                    count = Unbounded(leaf.shape, leaf.device, torch.int64)
                    for path, own in zip(
                        self._places(key), (leaf, leaf.clone(), count), strict=True
                    ):
                        spec[as_key(path)] = own

    # ---------------------------------------------------------------------------- the statistics

    def _require_stateful(self, what: str) -> None:
        if not self.stateful:
            raise UnsupportedError(
                f"{what} needs averages in the transform, but those of VecNormV2(stateful=False) travel in the "
                "data. Pass stateful=True."
            )

    def _require_kept(self, what: str) -> None:
        self._require_stateful(what)
        unseen = [key for key in self.in_keys if not self._kept(key).exist]
        if unseen:
            raise StatisticsError(
                f"{what} needs averages of {unseen}, but there are none yet. Step its env first."
            )

    @property
    def has_seen_data(self) -> bool:
        """Whether averages are of data; those that are carried in the data begin with each episode."""
        kept = [self._kept(key) for key in self._own_keys]
        return all(one.exist and bool((one.count > 0).any()) for one in kept)

    @property
    def statistics(self) -> TensorDict:
        """The averages themselves below ``loc``, ``var`` and ``count``, to be shared."""
        self._require_kept("statistics")
        return TensorDict(
            {
                (name, *as_path(key)): getattr(self._kept(key), name)
                for key in self.in_keys
                for name in _Kept.names
            }
        )

    @property
    def loc(self) -> TensorDict:
        """Running means by in_key."""
        self._require_kept("loc")
        return self._by_key(0)

    @property
    def scale(self) -> TensorDict:
        """Running deviations by in_key."""
        self._require_kept("scale")
        return self._by_key(1)

    def _by_key(self, which: int) -> TensorDict:
        found = {key: self._loc_and_scale(self._kept(key).now)[which] for key in self.in_keys}
        container = None if self.reduce_batch_dims else self.container
        return TensorDict(found, () if container is None else container.batch_size).clone()

    standard_normal = True  # as ObservationNorm calls the form that it computes

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the values before, from the out_keys of data, in a shallow copy of it.

        Args:
            tensordict: data that this transform has standardised; it is not written to.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNormV2
            >>> norm = VecNormV2(["x"], reduce_batch_dims=True)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> norm.denorm(data)["x"].flatten()
            tensor([1., 3.])
        """
        self._require_kept("denorm")
        data = tensordict.copy()
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            value = data.get(target, None)
            if value is not None:
                loc, scale = self._loc_and_scale(self._kept(source).now)
                data.set(source, value * scale + loc)
        return data

    def clone(self) -> VecNormV2:
        """Copy the transform with its averages; those of the copy go their own way.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNormV2
            >>> norm = VecNormV2(["x"], reduce_batch_dims=True)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> bool((norm.clone().statistics == norm.statistics).all())
            True
        """
        twin = super().clone()
        assert isinstance(twin, VecNormV2)
        twin.skipped_rows = self.skipped_rows.clone()
        own = {module_name(key): self._kept(key).copied() for key in self._own_keys}
        twin.kept = nn.ModuleDict(own)
        return twin

    def frozen_copy(self) -> VecNormV2:
        """Return a clone that standardises by the averages of this moment, and updates nothing.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNormV2
            >>> norm = VecNormV2(["x"], reduce_batch_dims=True)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> norm.frozen_copy().frozen, norm.frozen
            (True, False)
        """
        self._require_kept("frozen_copy()")
        return self.clone().freeze()

    def to_observation_norm(self) -> Transform:
        """Return a transform by the averages of this moment.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNormV2
            >>> norm = VecNormV2(["x"], reduce_batch_dims=True)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> type(norm.to_observation_norm()).__name__
            'ObservationNorm'
        """
        self._require_kept("to_observation_norm()")
        return _as_observation_norm(self, eps=self.eps)


def _as_observation_norm(norm: VecNorm | VecNormV2, eps: float | None = None) -> Transform:
    """Return a transform by the statistics of this moment, which does not follow them."""
    loc, scale = norm.loc, norm.scale
    fixed = [
        ObservationNorm(loc[key], scale[key], [key], [out], standard_normal=True, eps=eps)
        for key, out in zip(norm.in_keys, norm.out_keys, strict=True)
    ]
    return fixed[0] if len(fixed) == 1 else Compose(*fixed)


def _averages_in(td: TensorDictBase, places: Sequence[Path]) -> Averages | None:
    loc, var, count = (td.get(path, None) for path in places)
    return None if loc is None or var is None or count is None else (loc, var, count)


class _Moments(LateBuffers):
    """Moments of one entry, of mean 0 and variance 1 before anything was seen.

    Attributes:
        prior: how much these weigh.
    """

    prior: ClassVar[float] = 0.0

    names = ("weight", "mean", "squares")
    weight: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    @property
    def now(self) -> Moments:
        return self.weight, self.mean, self.squares

    def first(self, name: str) -> float:
        """Return the value that a buffer begins with."""
        return 0.0 if name == "mean" else self.prior

    def begin_like(
        self, groups: Sequence[int], event: Sequence[int], dtype: torch.dtype, device: Any
    ) -> None:
        """Make moments of each group, unless there are some."""
        if not self.exist:
            with lasting():
                mean = torch.zeros((*groups, *event), dtype=dtype, device=device)
                weight = torch.full(groups, self.prior, dtype=torch.float64, device=device)
                squares = torch.full_like(mean, self.prior)
                self.begin({"weight": weight, "mean": mean, "squares": squares})

    @torch.no_grad()
    def add(
        self, rows: torch.Tensor, decay: float, mask: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Count the rows that are finite, in place, so that copies that share them follow; return which are not, if any.

        Args:
            rows: shape ``(n, *groups, *event)``.
            decay: see `arrays.statistics`.
            mask: which count, shape ``(n, *groups)``; None: all, where there are no groups.
        """
        is_plain = mask is None and all(map(_is_memory, (rows, self.mean)))
        if is_plain and bool(torch.isfinite(rows).all()):
            # NumPy takes a third of the time for few rows
            own = float(self.weight), self.mean.numpy(), self.squares.numpy()
            weight, mean, squares = statistics.moments_with_rows(own, rows.numpy(), decay)
            self.weight.fill_(weight)
            # NumPy gives scalars for single numbers
            self.mean.copy_(torch.from_numpy(np.asarray(mean)))
            self.squares.copy_(torch.from_numpy(np.asarray(squares)))
            return None
        is_finite = statistics.are_finite(rows, 1 + self.weight.ndim)
        counts = is_finite if mask is None else mask & is_finite
        after = statistics.moments_with_rows(self.now, rows, decay, counts)
        for tensor, value in zip(self.now, after, strict=True):
            tensor.copy_(value)
        return ~is_finite if mask is None else mask & ~is_finite

    def loc_and_scale(self, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation; 0 and 1 before anything was seen."""
        return statistics.loc_and_scale_of_moments(self.now, eps)

    @lasting()
    def unstacked(self, index: int) -> Self:
        """Return separate moments of one group."""
        twin = type(self)()
        if self.exist:
            twin.begin({name: tensor[index].clone() for name, tensor in self.named_buffers()})
        return twin


class PriorMoments(_Moments):
    """The same, with the prior of Gymnasium and SB3."""

    prior = 1e-4


_SKIPPED = "skipped rows"


@cache
def _names(key: Key) -> tuple[str, ...]:
    """Return the names of the moments of an entry as state of a program."""
    return tuple(f"{module_name(key)}/{name}" for name in _Moments.names)


def _is_memory(value: torch.Tensor) -> bool:
    """Check whether a tensor is memory that NumPy computes with as torch does."""
    is_float = value.dtype in (torch.float32, torch.float64)
    return (
        is_float
        and type(value) is torch.Tensor
        and value.device.type == "cpu"
        and not in_functorch()
    )


def of_state(key: Key, state: Mapping[str, Any]) -> Moments:
    """Return the moments of an entry from the state of a program."""
    weight, mean, squares = (state[name] for name in _names(key))
    return weight, mean, squares


class RunningMoments(_Running, FusableTransform):
    """Base of transforms that keep moments of each in_key, of all rows or of those of each policy, in buffers that copies share."""

    moments: nn.ModuleDict
    policies: int | None

    _kind: type[_Moments] = _Moments
    """The class of the moments."""

    def _begin_moments(
        self,
        decay: float,
        eps: float,
        lock: Any,
        shared_td: TensorDictBase | None,
        policies: int | None,
    ) -> None:
        self._begin_running(decay, eps, lock)
        self.policies = None
        if policies is not None:
            self.policies = as_int("policies", policies, least=1, meaning="how many act")
        self.moments = nn.ModuleDict({module_name(key): self._kind() for key in self.in_keys})
        if shared_td is not None:
            self._share(shared_td)

    def _share(self, statistics: TensorDictBase) -> None:
        for key in self.in_keys:
            own = {name: statistics.get((*as_path(key), name)) for name in _Moments.names}
            self._require_policies("shared_td", own["weight"])
            self._moments_of(key).begin(own)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in self.moments:
            weight = state_dict.get(f"{prefix}moments.{name}.weight")
            if weight is not None:
                self._require_policies("the state", weight)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _require_policies(self, what: str, weight: torch.Tensor) -> None:
        """Check that statistics are of as many policies.

        Raises:
            ArgumentError: they are not.
        """
        if weight.shape != self._groups:
            raise ArgumentError(
                f"{what} has weights of shape {tuple(weight.shape)}; expected {self._groups}, since policies={self.policies}. Build "
                f"{type(self).__name__} with the policies= that the statistics are of."
            )

    def _moments_of(self, key: Key) -> _Moments:
        return self.moments[module_name(key)]  # type: ignore[return-value]

    def _begin_like(
        self, key: Key, batch: Sequence[int], event: Sequence[int], dtype: Any, device: Any
    ) -> None:
        """Make the moments of an entry in a batch of this shape, unless there are some."""
        self._require_groups(batch)
        self._moments_of(key).begin_like(self._groups, event, dtype, device)

    @property
    def _groups(self) -> tuple[int, ...]:
        """Axes in front of the moments of one policy."""
        return () if self.policies is None else (self.policies,)

    def _require_groups(self, batch: Sequence[int]) -> None:
        """Check that each policy has as many rows as the others.

        Raises:
            BatchSizeError: they do not.
        """
        if self.policies is not None:
            require_rows_of_policies(type(self).__name__, batch, self.policies)

    def _grouped(self, rows: Any) -> Any:
        """Show rows ``(n, ...)`` with an axis for the policies behind the first one, if there are several."""
        if self.policies is None:
            return rows
        xp = array_namespace(rows)
        return xp.moveaxis(xp.reshape(rows, (self.policies, -1, *rows.shape[1:])), 1, 0)

    def _of_rows(self, numbers: Any, value: Any) -> Any:
        """Show numbers, an ``event`` for each policy, in the axes of a value; as they are where all rows have one."""
        if self.policies is None:
            return numbers
        xp, event = array_namespace(numbers), numbers.shape[1:]
        lead = value.shape[: value.ndim - len(event)]
        if not lead:
            return numbers[0]
        rows = lead[0]
        each = -(-rows // self.policies)  # programs are traced with one row
        wide = xp.broadcast_to(numbers[:, None], (self.policies, each, *event))
        wide = xp.reshape(wide, (self.policies * each, *event))[:rows]
        return xp.reshape(wide, (rows, *(1,) * (len(lead) - 1), *event))

    def _observe_among(self, key: Key, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Count those of some rows that ``mask`` selects, None means all."""
        if self.policies is None:
            rows = rows if mask is None else rows[mask]
            if len(rows):
                self._observe_rows(key, rows)
            return
        flags = torch.ones(len(rows), dtype=torch.bool) if mask is None else mask
        self._add(key, self._grouped(rows), self._grouped(flags.to(rows.device)))

    def _observe_rows(self, key: Key, rows: torch.Tensor) -> None:
        """Count new rows of an entry, those that are finite."""
        self._add(key, rows, None)

    def _add(self, key: Key, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
        if self.frozen:
            return
        rows, own, groups = as_float(rows), self._moments_of(key), self._groups
        with self.shared_lock:
            own.begin_like(groups, rows.shape[1 + len(groups) :], rows.dtype, rows.device)
            skipped = own.add(rows.detach(), self.decay, mask)
            if skipped is not None:
                self._count_skipped(skipped)

    def _seen(
        self, rows_of: Callable[[Key], tuple[Any, Any] | None], constants: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the state after the rows of each in_key and which of them are new; see `seen_leaves`."""
        changes: dict[str, Any] = {}
        skipped = constants[_SKIPPED]
        for key in self.in_keys:
            rows_and_flags = rows_of(key)
            if rows_and_flags is not None:  # rewards are absent at a reset
                before = of_state(key, constants)
                rows, flags = map(self._grouped, rows_and_flags)
                rows, counts = elementwise.cast(rows, before[1].dtype), flags & constants["counts"]
                is_finite = statistics.are_finite(rows, counts.ndim)
                after = statistics.moments_with_rows(
                    before, rows, constants["decay"], counts & is_finite
                )
                changes |= dict(zip(_names(key), after, strict=True))
                skipped = statistics.increased(skipped, counts & ~is_finite)
        return {**changes, _SKIPPED: skipped}

    # --------------------------------------------------------------------------- inside a program

    @property
    def fuses(self) -> bool:
        """False where others may change the statistics while a program runs."""
        return not self._is_shared and super().fuses

    @property
    def _is_shared(self) -> bool:
        is_locked = not isinstance(self.shared_lock, nullcontext)
        buffers = (self._moments_of(key).now for key in self.in_keys if self._moments_of(key).exist)
        return is_locked or any(t.is_shared() and not t.is_cuda for own in buffers for t in own)

    def constants(self) -> dict[str, Any]:
        return {"decay": self.decay, "eps": self.eps, "counts": not self.frozen}

    def state(self) -> dict[str, torch.Tensor]:
        if self._is_shared:
            raise StatisticsError(
                f"the statistics of {type(self).__name__} of {self.in_keys} are shared since its env has compiled them into "
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

    def _constants_outside(self) -> dict[str, Any]:
        """Return `constants`, and moments with the weights as numbers, which makes arithmetic faster."""
        constants = self.constants()
        for key in self.in_keys:
            own = self._moments_of(key)
            if not own.exist:
                continue
            weight, mean, squares = own.now
            known = weight if weight.ndim else float(weight)
            constants |= zip(_names(key), (known, mean, squares), strict=True)
        return constants

    # ---------------------------------------------------------------------------- the statistics

    @property
    def has_seen_data(self) -> bool:
        """Whether statistics are of data, and not those that they begin with."""
        moments = [self._moments_of(key) for key in self.in_keys]
        return all(one.exist and bool((one.weight > one.prior).all()) for one in moments)

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
    def sees_rows(self) -> bool:
        # Some rows do not say which policy each belongs to.
        return self.policies is None and super().sees_rows

    @property
    def remembers_rows(self) -> bool:  # type: ignore[override]
        """Whether rows have to be shown in their places."""
        return self.policies is not None

    def unstacked(self, index: int) -> Self:
        """Return a transform for one of the policies, with copies of its statistics.

        Raises:
            ArgumentError: (a ValueError) there is no such policy.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNorm
            >>> norm = VecNorm(["x"], decay=1.0, policies=2)
            >>> values = torch.tensor([[1.0, 3.0], [10.0, 20.0]]).unsqueeze(-1)
            >>> norm(TensorDict(x=values, batch_size=[2, 2]))["x"].squeeze(-1)
            tensor([[-1.,  1.],
                    [-1.,  1.]])
            >>> second = norm.unstacked(1).freeze()
            >>> second(TensorDict(x=torch.tensor([[15.0]]), batch_size=[1]))["x"]
            tensor([[0.]])
        """
        policies = self.policies or 0
        if not isinstance(index, int) or not -policies <= index < policies:
            raise ArgumentError(
                f"unstacked({index!r}) of policies={self.policies}; expected the number of a policy. Pass policies= to "
                "keep statistics of several apart."
            )
        twin = self.clone()
        assert isinstance(twin, type(self))
        twin.policies = None
        twin.moments = nn.ModuleDict(
            {module_name(key): self._moments_of(key).unstacked(index) for key in self.in_keys}
        )
        with lasting():
            twin.skipped_rows = torch.zeros_like(self.skipped_rows)
        return twin

    def frozen_copy(self) -> Self:
        """Return a clone that follows these statistics and counts nothing itself.

        Raises:
            StatisticsError: (a RuntimeError) there are none to follow yet.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNorm
            >>> norm = VecNorm(["x"], decay=1.0)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> frozen = norm.frozen_copy()
            >>> frozen(TensorDict(x=torch.tensor([[5.0]]), batch_size=[1]))["x"]
            tensor([[3.]])
        """
        unseen = [key for key in self.in_keys if not self._moments_of(key).exist]
        if unseen:
            raise StatisticsError(
                f"{type(self).__name__} has no statistics of {unseen} yet, which a frozen copy could follow. Step its env "
                "or call it on data first, or use clone() and freeze() the clone later."
            )
        twin = self.clone()
        assert isinstance(twin, type(self))
        return twin.freeze()


class VecNorm(RunningMoments, CoupledTransform, ArrayTransform):
    """Standardise values by their running mean and standard deviation.

    Every step counts the rows that were stepped, every reset those that were reset, and then all values
    are standardised. Statistics are buffers: clones share them, and so do the envs of one `EnvCreator`
    and modules whose memory is shared. Data is not counted after `freeze`; `eval()` changes nothing. It fuses
    unless processes or threads share it: a program changes statistics without asking anybody.

    Args:
        in_keys: entries to standardise, each by its own statistics; ``"observation"`` and ``"reward"``
            by default. A reward in place of which its standardised value goes gives a `CentredRewardWarning`:
            `NormalizeReward` keeps the sign.
        out_keys: where they go; in place by default.
        shared_td: ``statistics`` of another VecNorm, which are shared with it.
        lock: held while statistics are read and written back.
        decay: weight of what was seen before, at each update.
        eps: least variance.
        shapes: event of each entry, its last axes; by default all axes after the batch.
        policies: keep statistics of so many policies apart, as a [population](populations.md) needs them: the first rows
            belong to the first policy. Data that it is called on has the rows in this order.
        new_api: give a `VecNormV2` of the other arguments instead.

    Integers are cast to the default float dtype. A row that holds NaN or an infinite number stays as it is, and is left
    out of the statistics: ``skipped_rows`` counts them, and the first one gives a warning (none
    where the statistics are on a GPU).

    Raises:
        ArgumentError: (a ValueError) ``decay`` is outside (0, 1], or there are not as many ``shapes``
            as in_keys.
        BatchSizeError: (a RuntimeError) the first axis of a batch is no multiple of ``policies``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import VecNorm
        >>> norm = VecNorm(["observation"], decay=1.0)
        >>> data = TensorDict(observation=torch.tensor([[1.0], [3.0]]), batch_size=[2])
        >>> norm(data)["observation"].flatten()
        tensor([-1.,  1.])
    """

    _in_repr = ("decay", "eps")

    _twins = (
        *MomentTransform._twins,
        ("_observe_rows", "seen_leaves"),
        ("_standardised", "moment_leaves"),
    )

    def __new__(cls, *args: Any, new_api: bool = False, **kwargs: Any) -> Any:
        return VecNormV2(*args, **kwargs) if new_api else super().__new__(cls, *args, **kwargs)

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
        policies: int | None = None,
        new_api: bool = False,
    ):
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys)
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise ArgumentError(
                f"shapes has {len(shapes)} entries for in_keys {self.in_keys}. Pass one for each."
            )
        self.shapes = None if shapes is None else [tuple(shape) for shape in shapes]
        self._begin_moments(decay, eps, lock, shared_td, policies)

    # ------------------------------------------------------------------------ what couples the rows

    def _event_of(self, key: Key, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape) if self.shapes is None else self.shapes[self.in_keys.index(key)]

    def _observe(
        self, td: TensorDictBase | Leaves, mask_of: Callable[[Key], torch.Tensor | None]
    ) -> None:
        if isinstance(td, TensorDictBase):
            self._require_groups(td.batch_size)
        super()._observe(td, mask_of)

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
        raise NotCallableError(
            "VecNorm has statistics for each key and works on TensorDicts. Call it on one."
        )

    def _standardised(self, value: torch.Tensor, key: Key) -> torch.Tensor:
        own, value = self._moments_of(key), as_float(value)
        if not own.exist:
            return value
        return elementwise.standardised(value, *self._loc_and_scale_like(own, value))

    def _loc_and_scale_like(
        self, moments: _Moments, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loc, scale = moments.loc_and_scale(self.eps)
        return self._of_rows(loc, value), self._of_rows(scale, value)

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the values before, in a copy of the data, at its root and under ``next``.

        Args:
            tensordict: data that this transform has standardised; it is not written to.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNorm
            >>> norm = VecNorm(["x"], decay=1.0)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> norm.denorm(data)["x"].flatten()
            tensor([1., 3.])
        """
        self._require_groups(tensordict.batch_size)
        data = tensordict.copy()
        following = data.get("next", None)
        for td in [data] if following is None else [data, following]:
            for source, target in zip(self.in_keys, self.out_keys, strict=True):
                value, own = td.get(target, None), self._moments_of(source)
                if value is not None and own.exist:
                    td.set(source, elementwise.scaled(value, *self._loc_and_scale_like(own, value)))
        return data

    def seen_leaves(
        self, leaves: Leaves, mask: object, constants: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        def rows_of(key: Key) -> tuple[Any, Any] | None:
            value = leaves.get(as_path(key))
            if value is None:
                return None
            event = self._event_of(key, value.shape[leaves.batch_dims :])
            return by_rows(value, event, mask, leaves.batch_dims)

        return self._seen(rows_of, constants)

    def counted(
        self, leaves: Leaves, root: Leaves | None, rows: Sequence[int] | None
    ) -> dict[str, Any]:
        self._observe(leaves, lambda key: None)
        return self._constants_outside()

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            value = changes.get(as_path(source), leaves.get(as_path(source)))
            if value is not None:
                own = of_state(source, constants)
                loc, scale = statistics.loc_and_scale_of_moments(own, constants["eps"])
                value = elementwise.cast(value, loc.dtype)
                loc, scale = (self._of_rows(each, value) for each in (loc, scale))
                changes[as_path(target)] = elementwise.standardised(value, loc, scale)
        return changes

    # --------------------------------------------------------------------------------------- specs

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        self._warn_of_centred(reward_spec)
        return super().transform_reward_spec(reward_spec)

    def _spec_after(self, spec: Any) -> Any:
        for key in self.in_keys if isinstance(spec, Composite) else ():
            leaf = spec.get(key, None)
            if leaf is not None:
                require_regular(self, key, leaf)
                event = self._event_of(key, leaf.shape[spec.ndim :])
                dtype = self._leaf_after(leaf).dtype
                self._begin_like(key, spec.shape, event, dtype, leaf.device)
        return super()._spec_after(spec)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return float_leaf(leaf)

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

    def to_observation_norm(self) -> Transform:
        """Return a transform by the statistics of this moment, which does not follow them.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VecNorm
            >>> norm = VecNorm(["x"], decay=1.0)
            >>> data = norm(TensorDict(x=torch.tensor([[1.0], [3.0]]), batch_size=[2]))
            >>> type(norm.to_observation_norm()).__name__
            'ObservationNorm'

        Raises:
            UnsupportedError: (a NotImplementedError) there are ``policies``.
        """
        if self.policies is not None:
            raise UnsupportedError(
                f"an ObservationNorm has one statistic of all rows, but this VecNorm has policies={self.policies}. Take one "
                "policy: norm.unstacked(0).to_observation_norm()."
            )
        return _as_observation_norm(self)
