"""What an environment declares: its specs, the views of them, and the key lists read from them.

`SpecHolder` stores two composites, inputs and outputs, and decides how they are completed, locked
and read. It does not know stepping.

Conventions
    full_*_spec   always a Composite, shape (*batch,).
    single_*      the same spec with the env's batch axes removed.
    key           a string when it is not nested, else a tuple of strings.
    key lists     leaf keys, sorted by depth, then by dot-joined name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from envkit import rules
from envkit.errors import KeyCollisionError, MissingKeyError, SpecError, SpecTypeError
from envkit.specs import Categorical, Composite, TensorSpec, Unbounded

__all__ = ["Key", "SpecHolder", "as_key", "as_path"]

Key = str | tuple[str, ...]

_INPUTS = ("full_state_spec", "full_action_spec")
_OUTPUTS = ("full_reward_spec", "full_observation_spec", "full_done_spec")


def as_path(key: Key) -> tuple[str, ...]:
    """Write a key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(key)


def as_key(path: Iterable[str]) -> Key:
    """Write a path as a plain string when it has one part."""
    path = tuple(path)
    return path[0] if len(path) == 1 else path


def leaf_paths(spec: Composite) -> list[tuple[str, ...]]:
    """List the leaves of a composite by depth, then name."""
    paths = [as_path(key) for key in spec.keys(True, True)]
    return sorted(paths, key=lambda path: (len(path), ".".join(path)))


class SpecHolder(nn.Module):
    """The declared side of an environment: specs, locks, batch size, device and key lists."""

    _batch_size: torch.Size
    _device: torch.device | None
    _batch_locked = True
    _input_spec: Composite | None = None
    _output_spec: Composite | None = None
    _spec_locked = False
    _auto_done_twins: tuple[tuple[str, ...], ...] = ()

    # ------------------------------------------------------------------------- composites and locks

    @property
    def input_spec(self) -> Composite:
        """State and action specs: ``Composite(full_state_spec, full_action_spec)``; read-only."""
        return self._specs_of("_input_spec", _INPUTS)

    @property
    def output_spec(self) -> Composite:
        """Reward, observation and done specs in one Composite; read-only."""
        return self._specs_of("_output_spec", _OUTPUTS)

    @property
    def specs(self) -> Composite:
        """Both of them in one Composite that outlives the env."""
        output_spec, input_spec = self.output_spec.clone(), self.input_spec.clone()
        return Composite(output_spec=output_spec, input_spec=input_spec, shape=self.batch_size)

    def _specs_of(self, side: str, names: tuple[str, ...]) -> Composite:
        spec = getattr(self, side, None)
        if spec is None:
            spec = Composite(shape=self.batch_size, device=self.device)
            setattr(self, side, spec)
        if any(name not in spec.keys() for name in names):
            locked = spec.is_locked
            if locked:
                spec.unlock_()
            for name in names:
                if name not in spec.keys():
                    spec[name] = Composite(shape=self.batch_size, device=self.device)
            if locked:
                spec.lock_()
        return spec

    @property
    def is_spec_locked(self) -> bool:
        """True while in-place edits of the specs are refused."""
        return self._spec_locked

    def set_spec_lock_(self, mode: bool = True) -> SpecHolder:
        """Lock the specs against in-place edits, or unlock them; returns self."""
        for spec in (self.input_spec, self.output_spec):
            spec.lock_() if mode else spec.unlock_()
        self._spec_locked = mode
        self.empty_cache()
        return self

    def _store(self, side: str, name: str, spec: Composite) -> None:
        owner = self.input_spec if side == "_input_spec" else self.output_spec
        locked = owner.is_locked
        if locked:
            owner.unlock_()
        try:
            owner[name] = spec
        finally:
            if locked:
                owner.lock_()
        self.empty_cache()

    def _as_composite(self, spec: Any, name: str) -> Composite:
        """Check a spec that is assigned, and wrap a plain leaf under ``name``."""
        if not isinstance(spec, TensorSpec):
            raise SpecTypeError(
                f"{name}_spec must be a spec, got {type(spec).__name__}. "
                f"Pass a leaf such as Unbounded((1,)) or a Composite."
            )
        batch = self.batch_size
        if tuple(spec.shape[: len(batch)]) != tuple(batch):
            raise SpecError(
                f"{name}_spec has shape {tuple(spec.shape)}, but its leading dims must be the "
                f"batch size {tuple(batch)} of the env. Expand it: spec.expand(*batch_size, ...)."
            )
        if isinstance(spec, Composite):
            spec = spec.clone()
            if tuple(spec.shape) != tuple(batch):
                spec.shape = batch
            return spec
        return Composite({name: spec.clone()}, shape=batch, device=self.device)

    # ---------------------------------------------------------------------------- the five kinds

    @property
    def full_action_spec(self) -> Composite:
        """All actions, as a Composite."""
        return self.input_spec["full_action_spec"]

    @full_action_spec.setter
    def full_action_spec(self, spec: TensorSpec) -> None:
        self._store("_input_spec", "full_action_spec", self._as_composite(spec, "action"))

    @property
    def full_state_spec(self) -> Composite:
        """All inputs that are not actions, as a Composite."""
        return self.input_spec["full_state_spec"]

    @full_state_spec.setter
    def full_state_spec(self, spec: Composite | None) -> None:
        if spec is None:
            spec = Composite(shape=self.batch_size, device=self.device)
        if not isinstance(spec, Composite):
            raise SpecTypeError(
                f"state_spec must be a Composite or None, got {type(spec).__name__}. "
                "Wrap the leaf: Composite(name=leaf, shape=env.batch_size)."
            )
        self._store("_input_spec", "full_state_spec", self._as_composite(spec, "state"))

    @property
    def full_observation_spec(self) -> Composite:
        """All outputs that are neither reward nor done, as a Composite."""
        return self.output_spec["full_observation_spec"]

    @full_observation_spec.setter
    def full_observation_spec(self, spec: TensorSpec) -> None:
        composite = self._as_composite(spec, "observation")
        self._store("_output_spec", "full_observation_spec", composite)

    @property
    def full_reward_spec(self) -> Composite:
        """All rewards, as a Composite."""
        return self.output_spec["full_reward_spec"]

    @full_reward_spec.setter
    def full_reward_spec(self, spec: TensorSpec) -> None:
        self._store("_output_spec", "full_reward_spec", self._as_composite(spec, "reward"))

    @property
    def full_done_spec(self) -> Composite:
        """All done leaves, twins included, as a Composite."""
        return self.output_spec["full_done_spec"]

    @full_done_spec.setter
    def full_done_spec(self, spec: TensorSpec) -> None:
        composite, added = _complete_done_spec(self._as_composite(spec, "done"))
        self._auto_done_twins = added
        self._store("_output_spec", "full_done_spec", composite)

    observation_spec = full_observation_spec
    state_spec = full_state_spec

    @property
    def action_spec(self) -> TensorSpec:
        """The action leaf when there is exactly one, however nested, else the Composite."""
        return _only_leaf(self.full_action_spec)

    @action_spec.setter
    def action_spec(self, spec: TensorSpec) -> None:
        self.full_action_spec = spec

    @property
    def reward_spec(self) -> TensorSpec:
        """The reward leaf when there is exactly one, however nested, else the Composite."""
        return _only_leaf(self.full_reward_spec)

    @reward_spec.setter
    def reward_spec(self, spec: TensorSpec) -> None:
        self.full_reward_spec = spec

    @property
    def done_spec(self) -> TensorSpec:
        """The done leaf when exactly one was declared (added twins apart), else the Composite."""
        return _only_leaf(self.full_done_spec, ignore=self._auto_done_twins)

    @done_spec.setter
    def done_spec(self, spec: TensorSpec) -> None:
        self.full_done_spec = spec

    # ------------------------------------------------------------------------- without batch axes

    def _single(self, spec: TensorSpec) -> TensorSpec:
        return spec[(0,) * len(self.batch_size)] if len(self.batch_size) else spec

    @property
    def single_action_spec(self) -> TensorSpec:
        """`action_spec` of one element of the batch."""
        return self._single(self.action_spec)

    @property
    def single_full_action_spec(self) -> TensorSpec:
        """`full_action_spec` of one element of the batch."""
        return self._single(self.full_action_spec)

    @property
    def single_reward_spec(self) -> TensorSpec:
        """`reward_spec` of one element of the batch."""
        return self._single(self.reward_spec)

    @property
    def single_full_reward_spec(self) -> TensorSpec:
        """`full_reward_spec` of one element of the batch."""
        return self._single(self.full_reward_spec)

    @property
    def single_done_spec(self) -> TensorSpec:
        """`done_spec` of one element of the batch."""
        return self._single(self.done_spec)

    @property
    def single_full_done_spec(self) -> TensorSpec:
        """`full_done_spec` of one element of the batch."""
        return self._single(self.full_done_spec)

    @property
    def single_observation_spec(self) -> TensorSpec:
        """`observation_spec` of one element of the batch."""
        return self._single(self.full_observation_spec)

    single_full_observation_spec = single_observation_spec

    @property
    def single_state_spec(self) -> TensorSpec:
        """`state_spec` of one element of the batch."""
        return self._single(self.full_state_spec)

    single_full_state_spec = single_state_spec

    @property
    def single_input_spec(self) -> TensorSpec:
        """`input_spec` of one element of the batch."""
        return self._single(self.input_spec)

    @property
    def single_output_spec(self) -> TensorSpec:
        """`output_spec` of one element of the batch."""
        return self._single(self.output_spec)

    # ------------------------------------------------------------------------------------- batch

    @property
    def batch_size(self) -> torch.Size:
        """Number of environments along each batch axis; ``[]`` for one environment."""
        return self._batch_size

    @property
    def shape(self) -> torch.Size:
        """Alias of `batch_size`."""
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        """Number of batch axes."""
        return len(self.batch_size)

    ndim = batch_dims

    def numel(self) -> int:
        """Number of environments in a batch; 1 when the batch size is empty."""
        return self.batch_size.numel()

    @property
    def device(self) -> torch.device | None:
        """Where inputs are expected and outputs delivered; None sets no constraint."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise RuntimeError(
            f"the device of an env cannot be assigned (it is {self._device}). "
            "Use env.to(device), which moves specs, parameters and future outputs."
        )

    @property
    def batch_locked(self) -> bool:
        """True when every TensorDict passed in must have exactly this env's batch size."""
        return self._batch_locked

    @batch_locked.setter
    def batch_locked(self, value: bool) -> None:
        raise RuntimeError(
            f"batch_locked is read-only (it is {self.batch_locked}): it is a property of the "
            "simulator. Choose a stateless env to step batches of any size."
        )

    # -------------------------------------------------------------------------------------- caches

    def empty_cache(self) -> None:
        """Drop the key lists read from the specs; they are read again at the next use."""
        self._cache.clear()

    @property
    def _cache(self) -> dict[str, Any]:
        return self.__dict__.setdefault("_key_cache", {})

    def _cached(self, name: str, build: Any) -> Any:
        if not self._spec_locked:
            return build()
        cache = self._cache
        if name not in cache:
            cache[name] = build()
        return cache[name]

    # ------------------------------------------------------------------------------- finishing up

    def _finish_specs(self, *, lock: bool) -> None:
        """Complete the declared specs, check names, and lock: the last act of construction."""
        completed, added = _complete_done_spec(self.full_done_spec)
        if added:
            self._auto_done_twins = added
            self._store("_output_spec", "full_done_spec", completed)
        if self.full_reward_spec.is_empty():
            device = self.device
            self.full_reward_spec = Unbounded((*self.batch_size, 1), device=device)
        self._check_names_differ()
        self.set_spec_lock_(lock)

    def _check_names_differ(self) -> None:
        groups = (("observation", "reward", "done"), ("state", "action"))
        for kinds in groups:
            seen: dict[tuple[str, ...], str] = {}
            for kind in kinds:
                for path in leaf_paths(getattr(self, f"full_{kind}_spec")):
                    if path in seen:
                        raise KeyCollisionError(
                            f"{as_key(path)!r} is declared both in the {seen[path]} spec and in "
                            f"the {kind} spec. Give one of them another name."
                        )
                    seen[path] = kind

    def add_truncated_keys(self) -> SpecHolder:
        """Declare ``truncated`` beside every ``done``; returns self."""
        spec, _ = _complete_done_spec(self.full_done_spec)  # in a constructor it may be empty
        paths = leaf_paths(spec)
        for level in {path[:-1] for path in paths} - {
            path[:-1] for path in paths if path[-1] == "truncated"
        }:
            spec[(*level, "truncated")] = spec[(*level, "done")].clone()
        self.full_done_spec = spec
        return self
