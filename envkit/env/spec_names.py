"""The names under which an env shows what it declares: specs, keys, batch size, device.

`SpecNames` is thin: what specs are is decided in `declared`. This module adds which done leaves an env has: those that
were declared and the twins that every level needs. It also gives a spec in part: one element of the batch, its leaf
    keys, its only leaf.

Conventions
    full_*_spec   always a Composite, shape (*batch,).
    single_*      the same spec with the env's batch axes removed; older name ``*_unbatched``.
    key           a string when it is not nested, else a tuple of strings.
    lists         leaf keys, sorted by depth, then by dot-joined name; read again after specs have changed.
    level         a node of the data tree that owns done leaves, named by its path: () is the root. A node without any
                  entry is a level too, which has only twins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import torch

from envkit import rules
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_key, as_path, leaf_paths
from envkit.env.declared import INPUTS, OUTPUTS, Declared, as_declared, require_names, require_nodes
from envkit.env.module import EnvModule
from envkit.env.outputs import OutputChecks, SpecTable, levels_of
from envkit.errors import MissingKeyError, ReadOnlyError, SpecError, SpecTypeError
from envkit.specs import Categorical, Composite, StackedComposite, TensorSpec, Unbounded
from envkit.specs.in_torchrl import register_in_torchrl
from envkit.specs.inputs import ActionInput, action_inputs


def _complete_done_spec(spec: Composite) -> tuple[Composite, tuple[Path, ...]]:
    """Add the missing twins at every level.

    Returns:
        The completed spec, a copy, and the paths that were added.

    Raises:
        SpecError: the leaves of a level differ in shape.
        SpecTypeError: a leaf is not boolean.
    """
    added: list[Path] = []
    return _completed(spec, (), added), tuple(added)


def _completed(node: Composite, path: Path, added: list[Path]) -> Composite:
    completed = Composite(shape=node.shape, device=node.device)
    leaves = {name: leaf for name, leaf in node.items() if not isinstance(leaf, Composite)}
    if leaves or node.is_empty():
        _check_flags(path, leaves)
        blank = Categorical(2, shape=(*node.shape, 1), dtype=torch.bool, device=node.device)
        model = next(iter(leaves.values()), blank)
        for name in rules.twins(leaves):
            if name not in leaves:
                added.append((*path, name))
            completed[name] = leaves.get(name, model).clone()
    for name, below in node.items():
        if isinstance(below, Composite):
            completed[name] = _completed(below, (*path, name), added)
    return completed


def _check_flags(level: Path, leaves: dict[str, TensorSpec]) -> None:
    place = f"level {'.'.join(level)!r}" if level else "the root"
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    if len(set(shapes.values())) > 1:
        raise SpecError(
            f"the done leaves of {place} have different shapes: {shapes}. Give all of them one shape."
        )
    others = {name: leaf.dtype for name, leaf in leaves.items() if leaf.dtype != torch.bool}
    if others:
        raise SpecTypeError(
            f"the done leaves of {place} must be boolean, but have dtypes {others}. "
            "Declare them as Categorical(2, shape=..., dtype=torch.bool)."
        )


def _with_truncated(spec: Composite) -> Composite:
    """Return a done spec in which every level has ``truncated``; a copy, completed."""
    spec, _ = _complete_done_spec(spec)
    paths = leaf_paths(spec)
    for level in {path[:-1] for path in paths}:
        if (*level, "truncated") not in paths:
            spec[(*level, "truncated")] = spec[(*level, "done")].clone()
    return spec


Spec = TypeVar("Spec", bound=TensorSpec)


class _SingleSpec(property, Generic[Spec]):
    """A property that shows a spec without the batch axes."""

    def __init__(self, name: str):
        def read(env: Any) -> TensorSpec:
            spec, axes = getattr(env, name), len(env.batch_size)
            return spec[(0,) * axes] if axes else spec

        def write(env: Any, spec: TensorSpec) -> None:
            setattr(env, name, spec.expand(*env.batch_size, *spec.shape))

        doc = f"`{name}` of one element of the batch; what is assigned holds for each element."
        super().__init__(read, write, doc=doc)

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type, /) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> Spec: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> Self | Spec: ...


class _LeafKeys(property):
    """A property that lists the leaf keys of a full spec."""

    def __init__(self, kind: str):
        name = f"full_{kind}_spec"

        def read(env: Any) -> list[Key]:
            keys = env._declared.cached(
                f"{kind}_keys", lambda: tuple(map(as_key, leaf_paths(getattr(env, name))))
            )
            return [*keys]

        super().__init__(read, doc=f"Leaf keys of the {kind} spec.")

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type, /) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> list[Key]: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> Self | list[Key]: ...


def _only_key(kind: str, keys: list[Key]) -> Key:
    """Return the only one of the keys of a kind.

    Raises:
        MissingKeyError: (a KeyError) there are several, or none.
    """
    if len(keys) != 1:
        raise MissingKeyError(
            f"env.{kind}_key needs exactly one {kind} entry, but the env has {keys}. "
            f"Use env.{kind}_keys, or name the key you mean."
        )
    return keys[0]


def _only_leaf(spec: Composite, ignore: tuple[Path, ...] = ()) -> TensorSpec:
    """Return the leaf of a composite that has only one, those to ``ignore`` apart; else the composite."""
    leaves = [path for path in leaf_paths(spec) if path not in ignore]
    return spec[as_key(leaves[0])] if len(leaves) == 1 else spec


def _varies_in_size(spec: TensorSpec) -> bool:
    """Check whether a leaf leaves a size open, -1; composites in a stack may differ from each other."""
    if isinstance(spec, StackedComposite):
        return any(map(_varies_in_size, spec.members))
    if isinstance(spec, Composite):
        return any(map(_varies_in_size, spec.values()))
    return spec is not None and -1 in spec.shape


class SpecNames(EnvModule):
    """The declared side of an environment."""

    _batch_size: torch.Size
    _device: torch.device | None
    _batch_locked = True
    _declared: Declared

    # ------------------------------------------------------------------------- composites and locks

    @property
    def input_spec(self) -> Composite:
        """State and action specs: ``Composite(full_state_spec, full_action_spec)``; read-only."""
        return self._specs_of(INPUTS)

    @input_spec.setter
    def input_spec(self, value: Any) -> None:
        raise ReadOnlyError(
            "input_spec of an env cannot be assigned. Assign its parts: action_spec and state_spec."
        )

    @property
    def output_spec(self) -> Composite:
        """Reward, observation and done specs in one Composite; read-only."""
        return self._specs_of(OUTPUTS)

    @output_spec.setter
    def output_spec(self, value: Any) -> None:
        raise ReadOnlyError(
            "output_spec of an env cannot be assigned. Assign its parts: observation_spec, "
            "reward_spec and done_spec."
        )

    @property
    def specs(self) -> Composite:
        """Both of them in one Composite that outlives the env.

        Example:
            >>> from envkit import PendulumEnv
            >>> specs = PendulumEnv().specs
            >>> list(specs.keys())
            ['output_spec', 'input_spec']
            >>> specs["input_spec", "full_action_spec", "action"].shape
            torch.Size([1])
        """
        output_spec, input_spec = self.output_spec.clone(), self.input_spec.clone()
        return Composite(output_spec=output_spec, input_spec=input_spec, shape=self.batch_size)

    @specs.setter
    def specs(self, value: Any) -> None:
        raise ReadOnlyError(
            "specs of an env cannot be assigned. Assign their parts: action_spec, state_spec, "
            "observation_spec, reward_spec and done_spec."
        )

    def _specs_of(self, side: str) -> Composite:
        register_in_torchrl()
        held = self._declared
        if side in held.cache and side not in self.__dict__:
            return held.cache[side]
        batch, device = self.batch_size, self.device
        declared = self.__dict__.pop(side, None)  # as older code declares it
        if declared is None and side not in held:
            of_class = getattr(type(self), side, None)  # which is shared; what is held is not
            declared = (
                Composite(shape=batch, device=device) if of_class is None else of_class.clone()
            )
        if declared is not None:
            held.take(side, declared)
        complete = held.complete(side, batch, device)
        if held.remembers and not torch.compiler.is_compiling():
            held.cache[side] = complete
        return complete

    def _store(self, side: str, kind: str, spec: Composite) -> None:
        self._specs_of(side)
        self._declared.store(side, kind, spec)
        self._declared.report_change()

    def _as_composite(self, spec: Any, kind: str) -> Composite:
        return as_declared(spec, kind, self.batch_size, self.device)

    @property
    def is_spec_locked(self) -> bool:
        """True while in-place edits of the specs are refused."""
        return self._declared.is_locked

    def set_spec_lock_(self, mode: bool = True) -> SpecNames:
        """Lock the specs against in-place edits, or unlock them, inner envs too; returns self.

        Raises:
            ArgumentTypeError: ``mode`` is no bool.
        """
        mode = as_bool("mode of set_spec_lock_", mode)
        for child in self.children():
            if isinstance(child, SpecNames):
                child.set_spec_lock_(mode)
        self._lock_own(mode)
        return self

    def _lock_own(self, mode: bool) -> None:
        _ = self.input_spec, self.output_spec  # now, if they were not read before
        self._declared.lock(mode)

    # ---------------------------------------------------------------------------- the five kinds

    @property
    def full_action_spec(self) -> Composite:
        """All actions, as a Composite.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> list(env.full_action_spec.keys()), env.full_action_spec["action"].shape
            (['action'], torch.Size([1]))
        """
        return self.input_spec["full_action_spec"]

    @full_action_spec.setter
    def full_action_spec(self, spec: TensorSpec) -> None:
        self._store(INPUTS, "action", self._as_composite(spec, "action"))

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
        self._store(INPUTS, "state", self._as_composite(spec, "state"))

    @property
    def full_observation_spec(self) -> Composite:
        """All outputs that are neither reward nor done, as a Composite."""
        return self.output_spec["full_observation_spec"]

    @full_observation_spec.setter
    def full_observation_spec(self, spec: TensorSpec) -> None:
        composite = self._as_composite(spec, "observation")
        self._store(OUTPUTS, "observation", composite)

    @property
    def full_reward_spec(self) -> Composite:
        """All rewards, as a Composite."""
        return self.output_spec["full_reward_spec"]

    @full_reward_spec.setter
    def full_reward_spec(self, spec: TensorSpec) -> None:
        composite = self._as_composite(spec, "reward")
        self._has_no_reward = composite.is_empty()
        self._store(OUTPUTS, "reward", composite)

    @property
    def full_done_spec(self) -> Composite:
        """All done leaves, twins included, as a Composite."""
        return self.output_spec["full_done_spec"]

    @full_done_spec.setter
    def full_done_spec(self, spec: TensorSpec) -> None:
        composite, added = _complete_done_spec(self._as_composite(spec, "done"))
        self._declared.added_flags = added
        self._store(OUTPUTS, "done", composite)

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
        return _only_leaf(self.full_done_spec, ignore=self._declared.added_flags)

    @done_spec.setter
    def done_spec(self, spec: TensorSpec) -> None:
        self.full_done_spec = spec

    # ------------------------------------------------------------------------- without batch axes

    single_action_spec = _SingleSpec[TensorSpec]("action_spec")
    single_full_action_spec = _SingleSpec[Composite]("full_action_spec")
    single_reward_spec = _SingleSpec[TensorSpec]("reward_spec")
    single_full_reward_spec = _SingleSpec[Composite]("full_reward_spec")
    single_done_spec = _SingleSpec[TensorSpec]("done_spec")
    single_full_done_spec = _SingleSpec[Composite]("full_done_spec")
    single_observation_spec = _SingleSpec[Composite]("full_observation_spec")
    single_state_spec = _SingleSpec[Composite]("full_state_spec")
    single_input_spec = _SingleSpec[Composite]("input_spec")
    single_output_spec = _SingleSpec[Composite]("output_spec")
    single_full_observation_spec = single_observation_spec
    single_full_state_spec = single_state_spec

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

    # -------------------------------------------------------------------------------------- keys

    action_keys = _LeafKeys("action")
    reward_keys = _LeafKeys("reward")
    observation_keys = _LeafKeys("observation")
    state_keys = _LeafKeys("state")
    done_keys = _LeafKeys("done")

    @property
    def action_key(self) -> Key:
        """The only action key; KeyError when there are several."""
        return _only_key("action", self.action_keys)

    @property
    def reward_key(self) -> Key:
        """The only reward key; KeyError when there are several."""
        return _only_key("reward", self.reward_keys)

    @property
    def done_key(self) -> Key:
        """The only key whose last part is ``"done"``; KeyError when several levels have one."""
        return _only_key("done", [key for key in self.done_keys if as_path(key)[-1] == "done"])

    @property
    def done_levels(self) -> dict[tuple[str, ...], list[str]]:
        """Names of the done leaves of each level, by the level's path, by depth."""
        if not self._declared.is_locked:
            return levels_of(leaf_paths(self.full_done_spec))
        return {level: [*names] for level, names in self._table.levels.items()}

    @property
    def reset_keys(self) -> list[Key]:
        """One ``(*level, "_reset")`` for each level that has done leaves."""
        return [as_key((*level, rules.RESET)) for level in self.done_levels]

    @property
    def done_keys_groups(self) -> list[list[Key]]:
        """The done leaves of each level, parallel to `reset_keys`."""
        return [
            [as_key((*level, name)) for name in names] for level, names in self.done_levels.items()
        ]

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
        """Return the number of batch axes, as `batch_dims` does."""
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

    # --------------------------------------------------------------------------- read from specs

    def empty_cache(self) -> None:
        """Drop the key lists read from the specs; they are read again at the next use."""
        self._declared.forget_what_was_read()

    @property
    def _table(self) -> SpecTable:
        """Facts about the specs that steps need; see `table`."""
        held = self._declared
        return held.table or held.read(self).table

    @property
    def _checks(self) -> OutputChecks:
        """Requirements on outputs; see `outputs`."""
        held = self._declared
        return held.checks or held.read(self)

    @property
    def _has_varying_sizes(self) -> bool:
        """Whether a spec leaves a size open, -1, so that steps may differ in shape."""
        return self._declared.cached(
            "has_varying_sizes",
            lambda: any(map(_varies_in_size, (self.input_spec, self.output_spec))),
        )

    @property
    def _action_inputs(self) -> dict[Key, ActionInput]:
        """Allowed actions of one element of the batch, by key; see `specs.inputs`."""
        return self._declared.cached(
            "action_inputs", lambda: action_inputs(self.single_full_action_spec)
        )

    # ------------------------------------------------------------------------------- finishing up

    _has_no_reward = False
    """A step gives no reward: an empty reward spec was assigned. A transform around this env may give one.

    Where none was assigned, one reward is declared.
    """

    def _finish_specs(self, *, lock: bool) -> None:
        """Complete the declared specs, check names, and lock: the last act of construction."""
        held = self._declared
        for side in (INPUTS, OUTPUTS):
            self._specs_of(side)
            held.require_side(side, type(self).__name__, self.batch_size, self.device)
        completed, added = _complete_done_spec(self.full_done_spec)
        if added:
            held.added_flags = added
            self._store(OUTPUTS, "done", completed)
        held.reward_is_implied = self.full_reward_spec.is_empty() and not self._has_no_reward
        if held.reward_is_implied:
            self.full_reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        require_names(held.full())
        require_nodes(held.full())
        self._lock_own(lock)

    def add_truncated_keys(self) -> SpecNames:
        """Declare ``truncated`` beside every ``done``; returns self.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> _ = env.set_spec_lock_(False).add_truncated_keys()
            >>> env.done_keys
            ['done', 'terminated', 'truncated']
        """
        self.full_done_spec = _with_truncated(self.full_done_spec)
        return self
