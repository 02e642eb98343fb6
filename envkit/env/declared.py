"""What an environment declares: its specs, whether they are locked, and what was read from them.

`Declared` is held by every env. It decides how specs are checked, completed, locked and remembered. It knows
neither the env nor stepping; how an env shows its specs is in `spec_names`.

Conventions
    side      inputs or outputs: "_input_spec" or "_output_spec", a Composite of ``full_*_spec`` entries.
    kind      "state", "action", "reward", "observation" or "done".
    declared  by assignment to a property, or as older code does by a class, its ``__new__`` or its
              ``__init__`` in ``_input_spec`` and ``_output_spec``; an entry that is None is not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch

from envkit import rules
from envkit.data.paths import Path, as_key, leaf_paths, nodes
from envkit.env.outputs import OutputChecks, SpecTable
from envkit.errors import KeyCollisionError, SpecError, SpecTypeError
from envkit.specs import Composite, TensorSpec
from envkit.specs.lasting import is_traced, lasting
from envkit.specs.tensor_spec import type_and_fix

INPUTS, OUTPUTS = "_input_spec", "_output_spec"
SIDES = {INPUTS: ("state", "action"), OUTPUTS: ("reward", "observation", "done")}
KINDS = ("observation", "reward", "done", "state", "action")


class Declared:
    """The specs of one env.

    Attributes:
        is_locked: in-place edits are refused, and what is read from the specs is remembered.
        is_reread: specs are read again at each use, so that nothing is remembered though they are locked.
        cache: what was read from locked specs, by name; ``table`` and ``checks`` too.
        added_flags: done leaves that were added by the twin rule.
        reward_is_implied: it was not declared.
        sides: what is held; never changed in place.
        around: envs around this one, and rows it was bound to, whose `_changed` is called when this one changes.
    """

    def __init__(self) -> None:
        self.is_locked = False
        self.is_reread = False
        self.added_flags: tuple[Path, ...] = ()
        self.reward_is_implied = False
        self.sides: Mapping[str, Composite] = {}
        self.cache: dict[str, Any] = {}
        self.table: SpecTable | None = None
        self.checks: OutputChecks | None = None
        self.around: WeakSet[Any] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        held = {**vars(self), "cache": {}, "table": None, "checks": None}  # it is read again
        del held["around"]  # a copy is alone
        return held

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, around=WeakSet())

    def report_change(self) -> None:
        """Drop what all that is around has read of this env."""
        for one in list(self.around):
            one._changed()

    # ------------------------------------------------------------------------------------ specs

    def __contains__(self, side: str) -> bool:
        return side in self.sides

    def __getitem__(self, side: str) -> Composite:
        return self.sides[side]

    def hold(self, inputs: Composite, outputs: Composite) -> None:
        """Store these specs in the place of all others."""
        self.put({INPUTS: inputs, OUTPUTS: outputs})

    def put(self, sides: Mapping[str, Composite]) -> None:
        """Store these sides and no other; those that are missing will be declared again."""
        self.sides = sides
        self.forget_what_was_read()

    def take(self, side: str, spec: Composite) -> None:
        """Store one side as it was declared."""
        self.sides = {**self.sides, side: spec}
        self.forget_what_was_read()

    def complete(self, side: str, batch: torch.Size, device: torch.device | None) -> Composite:
        """Return a side, with a Composite for each of its kinds."""
        held = self.sides[side]
        for kind in SIDES[side]:
            name = f"full_{kind}_spec"
            if name not in held.keys() or held[name] is None:
                _write(held, name, Composite(shape=batch, device=device))
            elif not isinstance(held[name], Composite):
                _write(held, name, as_declared(held[name], kind, batch, device))
        return held

    def place(self, batch: torch.Size, device: torch.device | None) -> None:
        """Apply the batch size and the device, now known, to what was declared before.

        Raises:
            SpecError: the shape of a leaf does not begin with the batch size.
        """
        placed = {side: held.clone() for side, held in self.sides.items()}
        for side, held in placed.items():
            held.shape = batch
            placed[side] = held if device is None else held.to(device)
        self.put(placed)

    def store(self, side: str, kind: str, spec: Composite) -> None:
        """Put a spec in the place of that of its kind."""
        _write(self.sides[side], f"full_{kind}_spec", spec)
        self.forget_what_was_read()

    def lock(self, mode: bool) -> None:
        """Refuse in-place edits, or allow them."""
        for spec in self.sides.values():
            spec.lock_() if mode else spec.unlock_()
        self.is_locked = mode
        self.forget_what_was_read()

    def require_side(
        self, side: str, owner: str, batch: torch.Size, device: torch.device | None
    ) -> None:
        """Check what a class or `__new__` declared as that which is assigned is checked.

        Raises:
            SpecError, SpecTypeError: see `as_declared`; or an entry has an unknown name.
        """
        held = self.complete(side, batch, device)
        names = [f"full_{kind}_spec" for kind in SIDES[side]]
        unknown = sorted(name for name in held.keys() if name not in names)
        if unknown:
            raise SpecError(
                f"{side} of {owner} holds {unknown}, but its entries are {names}. "
                "Declare each spec under one of these."
            )
        if held.shape != batch or held.device != device:
            parts = {name: _placed(held[name], name, batch, device) for name in names}
            self.sides = {**self.sides, side: Composite(parts, shape=batch, device=device)}

    def full(self) -> dict[str, Composite]:
        """Return the full spec of every kind."""
        return {
            kind: self.sides[side][f"full_{kind}_spec"]
            for kind in KINDS
            for side, kinds in SIDES.items()
            if kind in kinds
        }

    # ----------------------------------------------------------------------- what was read from them

    @property
    def remembers(self) -> bool:
        """Whether what is read from the specs stays true."""
        return self.is_locked and not self.is_reread

    def cached(self, name: str, build: Callable[[], Any]) -> Any:
        """Return what ``build`` reads from the specs: once where they are locked, else each time."""
        if not self.remembers:
            return build()
        if name not in self.cache:
            with lasting():
                made = build()
            if is_traced():
                return made
            self.cache[name] = made
        return self.cache[name]

    def read(self, env: Any) -> OutputChecks:
        """Read the table of steps, and what checks outputs by it."""
        table = SpecTable.of(env)
        checks = OutputChecks(type(env).__name__, table)
        if self.remembers and not is_traced():
            self.table, self.checks = table, checks
        return checks

    def forget_what_was_read(self) -> None:
        """Read everything again at the next use."""
        self.cache, self.table, self.checks = {}, None, None


def as_declared(spec: Any, kind: str, batch: torch.Size, device: torch.device | None) -> Composite:
    """Check a spec that is declared, wrap a plain leaf under ``kind``, and bring it to the device.

    Raises:
        SpecTypeError: it is no spec.
        SpecError: its leading dims are not the batch size.
    """
    if not isinstance(spec, TensorSpec):
        fix = "Pass a leaf such as Unbounded((1,)) or a Composite."
        raise SpecTypeError(f"{kind}_spec must be a spec, got {type_and_fix(spec, fix)}")
    if tuple(spec.shape[: len(batch)]) != tuple(batch):
        raise SpecError(
            f"{kind}_spec has shape {tuple(spec.shape)}, but its leading dims must be the "
            f"batch size {tuple(batch)} of the env. Expand it: spec.expand(*batch_size, ...)."
        )
    spec = spec.clone() if device is None else spec.clone().to(device)
    if not isinstance(spec, Composite):
        return Composite({kind: spec}, shape=batch, device=device)
    if tuple(spec.shape) != tuple(batch):
        spec.shape = batch
    return spec


def _placed(
    spec: Composite, name: str, batch: torch.Size, device: torch.device | None
) -> Composite:
    if spec.is_empty(recurse=True):
        return Composite(shape=batch, device=device)
    return as_declared(spec, name.removeprefix("full_").removesuffix("_spec"), batch, device)


def _write(owner: Composite, name: str, spec: Composite) -> None:
    locked = owner.is_locked
    if locked:
        owner.unlock_()
    try:
        owner[name] = spec
    finally:
        if locked:
            owner.lock_()


def require_nodes(specs: Mapping[str, Composite]) -> None:
    """Check that entries which lie in one node of the data fit the batch size of that node.

    Args:
        specs: full specs by kind.

    Raises:
        SpecError: one does not.
    """
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


def require_names(specs: Mapping[str, Composite], primed: Collection[Path] = ()) -> None:
    """Check that entries which lie in one TensorDict have their own names.

    A state is shown as an observation too, or as a reward or a flag, under one name. Every other name
    belongs to one kind, is no node where another entry is a leaf, and is none that data has already.

    Args:
        specs: full specs by kind.
        primed: actions that are shown as observations too: the last one that was taken.

    Raises:
        KeyCollisionError: a name is taken, or declared twice.
    """
    paths = {kind: dict.fromkeys(leaf_paths(spec)) for kind, spec in specs.items()}
    for kind, of_kind in paths.items():
        for path in of_kind:
            _refuse_reserved(path, kind)
    for first, second in combinations(paths, 2):
        if {first, second} in _SHOWN_TWICE:
            continue
        shown_again = primed if {first, second} == {"action", "observation"} else ()
        for path in paths[first]:
            if path in paths[second] and path not in shown_again:
                raise KeyCollisionError(
                    f"{as_key(path)!r} is declared both in the {first} spec and in "
                    f"the {second} spec. Give one of them another name."
                )
    of_leaf = {path: kind for kind, of_kind in paths.items() for path in of_kind}
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
