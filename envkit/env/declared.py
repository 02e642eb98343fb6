"""What an environment declares: its specs, the views of them, batch size and device.

`SpecHolder` stores two composites, inputs and outputs, and decides how they are completed, locked
and read. It does not know stepping.

Conventions
    full_*_spec   always a Composite, shape (*batch,).
    single_*      the same spec with the env's batch axes removed; older name ``*_unbatched``.
    key           a string when it is not nested, else a tuple of strings.
    declared      by assignment to a property, or as older code does by a class or its ``__new__`` in
                  ``_input_spec`` and ``_output_spec``, composites of ``full_*_spec`` entries; one
                  that is None is not declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch

from envkit import rules
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_key, leaf_paths, nodes
from envkit.env.done_specs import complete_done_spec
from envkit.env.overrides import Overridable
from envkit.errors import KeyCollisionError, ReadOnlyError, SpecError, SpecTypeError
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.specs.inputs import ActionInput, action_inputs

__all__ = ["SpecHolder", "require_names"]

_READ_FROM_SPECS = ("_key_cache", "_held_table")
"""Attributes in which an env remembers what it has read from locked specs."""

_SIDES = {
    "_input_spec": ("state", "action"),
    "_output_spec": ("reward", "observation", "done"),
}


class SpecHolder(Overridable):
    """The declared side of an environment: specs, locks, batch size and device."""

    _batch_size: torch.Size
    _device: torch.device | None
    _batch_locked = True
    _input_spec: Composite | None = None
    _output_spec: Composite | None = None
    _spec_locked = False
    _auto_done_twins: tuple[Path, ...] = ()
    _reward_is_implied = False  # nobody has declared one

    # ------------------------------------------------------------------------- composites and locks

    @property
    def input_spec(self) -> Composite:
        """State and action specs: ``Composite(full_state_spec, full_action_spec)``; read-only."""
        return self._specs_of("_input_spec")

    @input_spec.setter
    def input_spec(self, value: Any) -> None:
        raise ReadOnlyError(
            "input_spec of an env cannot be assigned. Assign its parts: action_spec and state_spec."
        )

    @property
    def output_spec(self) -> Composite:
        """Reward, observation and done specs in one Composite; read-only."""
        return self._specs_of("_output_spec")

    @output_spec.setter
    def output_spec(self, value: Any) -> None:
        raise ReadOnlyError(
            "output_spec of an env cannot be assigned. Assign its parts: observation_spec, "
            "reward_spec and done_spec."
        )

    @property
    def specs(self) -> Composite:
        """Both of them in one Composite that outlives the env."""
        output_spec, input_spec = self.output_spec.clone(), self.input_spec.clone()
        return Composite(output_spec=output_spec, input_spec=input_spec, shape=self.batch_size)

    @specs.setter
    def specs(self, value: Any) -> None:
        raise ReadOnlyError(
            "specs of an env cannot be assigned. Assign their parts: action_spec, state_spec, "
            "observation_spec, reward_spec and done_spec."
        )

    def _specs_of(self, side: str) -> Composite:
        held = self.__dict__.get(side)
        if held is None:
            declared = getattr(type(self), side, None)
            blank = Composite(shape=self.batch_size, device=self.device)
            held = blank if declared is None else declared.clone()  # a class is shared, this is not
            setattr(self, side, held)
        for kind in _SIDES[side]:
            name = f"full_{kind}_spec"
            if name not in held.keys() or held[name] is None:
                self._write(held, name, Composite(shape=self.batch_size, device=self.device))
            elif not isinstance(held[name], Composite):
                self._write(held, name, self._as_composite(held[name], kind))
        return held

    @staticmethod
    def _write(owner: Composite, name: str, spec: Composite) -> None:
        locked = owner.is_locked
        if locked:
            owner.unlock_()
        try:
            owner[name] = spec
        finally:
            if locked:
                owner.lock_()

    @property
    def is_spec_locked(self) -> bool:
        """True while in-place edits of the specs are refused."""
        return self._spec_locked

    def set_spec_lock_(self, mode: bool = True) -> SpecHolder:
        """Lock the specs against in-place edits, or unlock them, inner envs too; returns self.

        Raises:
            ArgumentTypeError: ``mode`` is no bool.
        """
        as_bool("mode of set_spec_lock_", mode)
        for child in self.children():
            if isinstance(child, SpecHolder):
                child.set_spec_lock_(mode)
        self._lock_own(mode)
        return self

    def _lock_own(self, mode: bool) -> None:
        for spec in (self.input_spec, self.output_spec):
            spec.lock_() if mode else spec.unlock_()
        self._spec_locked = mode
        self.empty_cache()

    def _store(self, side: str, kind: str, spec: Composite) -> None:
        self._write(self._specs_of(side), f"full_{kind}_spec", spec)
        self.empty_cache()

    def _as_composite(self, spec: Any, kind: str) -> Composite:
        """Check a spec that is declared, wrap a plain leaf under ``kind``, and bring it to the device.

        Raises:
            SpecTypeError: it is no spec.
            SpecError: its leading dims are not the batch size.
        """
        if not isinstance(spec, TensorSpec):
            raise SpecTypeError(
                f"{kind}_spec must be a spec, got {type(spec).__name__}. "
                f"Pass a leaf such as Unbounded((1,)) or a Composite."
            )
        batch = self.batch_size
        if tuple(spec.shape[: len(batch)]) != tuple(batch):
            raise SpecError(
                f"{kind}_spec has shape {tuple(spec.shape)}, but its leading dims must be the "
                f"batch size {tuple(batch)} of the env. Expand it: spec.expand(*batch_size, ...)."
            )
        spec = spec.clone() if self.device is None else spec.clone().to(self.device)
        if not isinstance(spec, Composite):
            return Composite({kind: spec}, shape=batch, device=self.device)
        if tuple(spec.shape) != tuple(batch):
            spec.shape = batch
        return spec

    # ---------------------------------------------------------------------------- the five kinds

    @property
    def full_action_spec(self) -> Composite:
        """All actions, as a Composite."""
        return self.input_spec["full_action_spec"]

    @full_action_spec.setter
    def full_action_spec(self, spec: TensorSpec) -> None:
        self._store("_input_spec", "action", self._as_composite(spec, "action"))

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
        self._store("_input_spec", "state", self._as_composite(spec, "state"))

    @property
    def full_observation_spec(self) -> Composite:
        """All outputs that are neither reward nor done, as a Composite."""
        return self.output_spec["full_observation_spec"]

    @full_observation_spec.setter
    def full_observation_spec(self, spec: TensorSpec) -> None:
        composite = self._as_composite(spec, "observation")
        self._store("_output_spec", "observation", composite)

    @property
    def full_reward_spec(self) -> Composite:
        """All rewards, as a Composite."""
        return self.output_spec["full_reward_spec"]

    @full_reward_spec.setter
    def full_reward_spec(self, spec: TensorSpec) -> None:
        self._store("_output_spec", "reward", self._as_composite(spec, "reward"))

    @property
    def full_done_spec(self) -> Composite:
        """All done leaves, twins included, as a Composite."""
        return self.output_spec["full_done_spec"]

    @full_done_spec.setter
    def full_done_spec(self, spec: TensorSpec) -> None:
        composite, added = complete_done_spec(self._as_composite(spec, "done"))
        self._auto_done_twins = added
        self._store("_output_spec", "done", composite)

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

    action_spec_unbatched = single_action_spec
    full_action_spec_unbatched = single_full_action_spec
    reward_spec_unbatched = single_reward_spec
    full_reward_spec_unbatched = single_full_reward_spec
    done_spec_unbatched = single_done_spec
    full_done_spec_unbatched = single_full_done_spec
    observation_spec_unbatched = single_observation_spec
    full_observation_spec_unbatched = single_full_observation_spec
    state_spec_unbatched = single_state_spec
    full_state_spec_unbatched = single_full_state_spec
    input_spec_unbatched = single_input_spec
    output_spec_unbatched = single_output_spec

    # ------------------------------------------------------------------------------------- batch

    @property
    def batch_size(self) -> torch.Size:
        """Number of environments along each batch axis; ``[]`` for one environment."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        raise ReadOnlyError(
            f"the batch size of an env cannot be assigned (it is {tuple(self.batch_size)}): its specs "
            "follow from it. Pass batch_size= to the constructor: super().__init__(batch_size=...)."
        )

    @property
    def shape(self) -> torch.Size:
        """Alias of `batch_size`."""
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        """Number of batch axes."""
        return len(self.batch_size)

    ndim = batch_dims

    def ndimension(self) -> int:
        """Give the number of batch axes, as `batch_dims` does."""
        return self.batch_dims

    def numel(self) -> int:
        """Number of environments in a batch; 1 when the batch size is empty."""
        return self.batch_size.numel()

    @property
    def device(self) -> torch.device | None:
        """Where inputs are expected and outputs delivered; None sets no constraint."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise ReadOnlyError(
            f"the device of an env cannot be assigned (it is {self.device}). "
            "Use env.to(device), which moves specs, parameters and future outputs."
        )

    @property
    def batch_locked(self) -> bool:
        """True when every TensorDict passed in must have exactly this env's batch size."""
        return self._batch_locked

    @batch_locked.setter
    def batch_locked(self, value: bool) -> None:
        raise ReadOnlyError(
            f"batch_locked is read-only (it is {self.batch_locked}): it is a property of the "
            "simulator. Choose a stateless env to step batches of any size."
        )

    @property
    def _action_inputs(self) -> dict[Key, ActionInput]:
        """What actions of one element of the batch may be, by key; see `specs.inputs`."""
        return self._cached("action_inputs", lambda: action_inputs(self.single_full_action_spec))

    # -------------------------------------------------------------------------------------- caches

    def empty_cache(self) -> None:
        """Drop the key lists read from the specs; they are read again at the next use."""
        for name in _READ_FROM_SPECS:
            self.__dict__.pop(name, None)

    def _cached(self, name: str, build: Any) -> Any:
        if not self._spec_locked:
            return build()
        cache = self.__dict__.get("_key_cache")
        if cache is None:
            cache = self.__dict__["_key_cache"] = {}
        if name not in cache:
            cache[name] = build()
        return cache[name]

    # ------------------------------------------------------------------------------- finishing up

    def _finish_specs(self, *, lock: bool) -> None:
        """Complete the declared specs, check names, and lock: the last act of construction."""
        self._check_declared()
        completed, added = complete_done_spec(self.full_done_spec)
        if added:
            self._auto_done_twins = added
            self._store("_output_spec", "done", completed)
        self._reward_is_implied = self.full_reward_spec.is_empty()
        if self._reward_is_implied:
            self.full_reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        self._check_names_differ()
        self._check_nodes_agree()
        self._lock_own(lock)

    def _check_declared(self) -> None:
        """Check what a class or `__new__` declared as that which is assigned is checked."""
        for side, kinds in _SIDES.items():
            held = self._specs_of(side)
            known = [f"full_{kind}_spec" for kind in kinds]
            unknown = sorted(name for name in held.keys() if name not in known)
            if unknown:
                raise SpecError(
                    f"{side} of {type(self).__name__} holds {unknown}, but its entries are {known}. "
                    "Declare each spec under one of these."
                )
            if held.shape != self.batch_size or held.device != self.device:
                parts = {f"full_{kind}_spec": self._declared(held, kind) for kind in kinds}
                setattr(self, side, Composite(parts, shape=self.batch_size, device=self.device))

    def _declared(self, held: Composite, kind: str) -> Composite:
        spec = held[f"full_{kind}_spec"]
        if spec.is_empty(recurse=True):
            return Composite(shape=self.batch_size, device=self.device)
        return self._as_composite(spec, kind)

    def _check_names_differ(self) -> None:
        kinds = ("observation", "reward", "done", "state", "action")
        require_names({kind: getattr(self, f"full_{kind}_spec") for kind in kinds})

    def _check_nodes_agree(self) -> None:
        """Check that entries which lie in one node of the data fit the batch size of that node."""
        kinds = [kind for side in _SIDES.values() for kind in side]
        specs = {kind: getattr(self, f"full_{kind}_spec") for kind in kinds}
        shapes: dict[Path, tuple[tuple[int, ...], str]] = {}
        for kind, spec in specs.items():
            for path, node in nodes(spec):
                known, _ = shapes.get(path, ((), ""))
                if len(node.shape) > len(known):
                    shapes[path] = tuple(node.shape), kind
        for kind, spec in specs.items():
            for path in leaf_paths(spec):
                shape, owner = shapes.get(path[:-1], ((), ""))
                own = tuple(spec[as_key(path)].shape)
                if own[: len(shape)] != shape:
                    raise SpecError(
                        f"{as_key(path)!r} of the {kind} spec has shape {own}, but its node "
                        f"{as_key(path[:-1])!r} has batch size {shape} in the {owner} spec. Give the "
                        f"leaf these leading dims, or the node a smaller batch size."
                    )

    def add_truncated_keys(self) -> SpecHolder:
        """Declare ``truncated`` beside every ``done``; returns self."""
        spec, _ = complete_done_spec(self.full_done_spec)  # in a constructor it may be empty
        paths = leaf_paths(spec)
        for level in {path[:-1] for path in paths} - {
            path[:-1] for path in paths if path[-1] == "truncated"
        }:
            spec[(*level, "truncated")] = spec[(*level, "done")].clone()
        self.full_done_spec = spec
        return self


def require_names(specs: Mapping[str, Composite]) -> None:
    """Check that entries which lie in one TensorDict have names of their own.

    A state is shown as an observation too, or as a reward or a flag, under one name. Every other name
    belongs to one kind, is no node where another entry is a leaf, and is none that data has already.

    Args:
        specs: full specs by kind.

    Raises:
        KeyCollisionError: a name is taken, or declared twice.
    """
    paths = {kind: dict.fromkeys(leaf_paths(spec)) for kind, spec in specs.items()}
    for kind, own in paths.items():
        for path in own:
            _refuse_reserved(path, kind)
    for first, second in combinations(paths, 2):
        if {first, second} in _SHOWN_TWICE:
            continue
        for path in paths[first]:
            if path in paths[second]:
                raise KeyCollisionError(
                    f"{as_key(path)!r} is declared both in the {first} spec and in "
                    f"the {second} spec. Give one of them another name."
                )
    of_leaf = {path: kind for kind, own in paths.items() for path in own}
    for path, kind in of_leaf.items():
        for node in (path[:end] for end in range(1, len(path))):
            if node in of_leaf:
                raise KeyCollisionError(
                    f"{as_key(node)!r} of the {of_leaf[node]} spec is one entry, but the {kind} spec "
                    f"has {as_key(path)!r} below that name. Give one of them another name."
                )


def _refuse_reserved(path: Path, kind: str) -> None:
    """Check that no part of the data that is not the env's own has the name of an entry."""
    taken = next((name for name in path if name in _MASKS), None)
    if path[0] == "next":
        taken = "next"
    if taken is not None:
        use = "a mask" if taken in _MASKS else "what a step produces"
        raise KeyCollisionError(
            f"the {kind} spec declares {as_key(path)!r}, but {taken!r} is reserved for {use}. Give the "
            "entry another name."
        )


_MASKS = (rules.STEP, rules.RESET)
_SHOWN_TWICE = [{"state", kind} for kind in ("observation", "reward", "done")]


def _only_leaf(spec: Composite, ignore: tuple[Path, ...] = ()) -> TensorSpec:
    leaves = [path for path in leaf_paths(spec) if path not in ignore]
    return spec[as_key(leaves[0])] if len(leaves) == 1 else spec
