"""Rows of a stateless env, stepped by compiled programs: what a program is given, and how what it gives is named.

A `ProgramEngine` reads the entries of a TensorDict that a program takes, flattens the batch, pads it to a compiled
size, runs the program, and names what comes back. The computation is in `programs`; memory and dtypes at the
border are decided in `dlpack`, gradients in `gradients`. It knows no specs and no done rows: masks, checks and what is
kept of rows that are not stepped are the env's (`jax_env`).

Conventions
    rows       the flattened batch. Sizes other than the env's own are padded, see `padded_size`.
    path       tuple of names: of a leaf of the state, or of an entry of the data.
    lent       rows may share the memory of the data; what a caller may refill while a program runs is
               copied.
    key        see `keys`; who calls has drawn it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict and jax ship them in part)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Key, Path, as_key, tensordict_of
from envkit.data.transition import leaves, selected_rows
from envkit.errors import InputError, MissingKeyError, SpecMaskError
from envkit.functional import BatchedEnv, Discrete
from envkit.rules import DONE_LEAVES
from envkit.specs.annotations import reading_waits
from envkit.specs.inputs import ActionInput, action_inputs
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.kept_memory import memory_of, places_of
from envkit_bridges.dlpack import adopted, number_to_jit, to_jit, to_torch, torch_dtype_of
from envkit_bridges.jax.codecs import (
    action_composite,
    action_path,
    action_tree,
    actions_by_path,
    integers_of,
    is_choice,
)
from envkit_bridges.jax.compilation import simulator_name
from envkit_bridges.jax.gradients import Differentiable, Running, is_wanted, start
from envkit_bridges.jax.options import padded_size
from envkit_bridges.jax.programs import BEGIN, KEY, PACKED, RESTART, Constants, Programs
from envkit_bridges.jax.tensor_cache import Unchanged

if TYPE_CHECKING:
    from envkit.functional.spaces import SpaceTree

Rows = dict[Path, torch.Tensor]
_FLAGS: tuple[Path, ...] = tuple((name,) for name in DONE_LEAVES)


@dataclass(eq=False)
class Settings:
    """Base of an env and of those that run transforms in its programs.

    Attributes:
        batch_size: of the env.
        requires_grad: gradients flow from what programs return to what they were given.
        categorical: actions that are choices come as integers.
        model: what programs take as an argument to step with; None where they take none.
        illegal: entry of ``next`` whose flag is an error, see `ProgramEngine.require_legal`; None where none is.
    """

    batch_size: torch.Size
    requires_grad: bool
    categorical: bool
    model: Any = None
    illegal: Key | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A step under way.

    Attributes:
        inputs: what the program is given.
        has_graph: gradients are wanted. One program makes the step then and another the reset after it, so that one
            backward program serves every kind of step.
        follows: what follows the step, see `Programs.advance`; after `NOTHING` the root is of no use.
        running: a program of a step alone, once it was begun.
        lent: what a program that restarts was given, kept until torch has what it gives.
        outputs: what it gives.
        fresh: the root that follows, once the step was received.
    """

    inputs: tuple[Any, ...]
    has_graph: bool
    follows: int = RESTART
    running: Running | None = field(default=None, init=False)
    lent: Any = field(default=None, init=False)
    outputs: Any = field(default=None, init=False)
    fresh: Any = field(default=None, init=False)


class ProgramEngine:
    """The programs of a stateless env, and the border between them and its data.

    Args:
        programs: what is run.
        settings: shared by all engines of one env.
        device: where the data is.
        shown: what a root shows besides the state and done flags.
        wide: entries that are declared in dtypes which JAX lacks, with these.

    Attributes:
        state_paths: leaves of the state, in the layout that programs give out.
        kept: what was made of tensors that torch has not written to since.
    """

    def __init__(
        self,
        programs: Programs,
        settings: Settings,
        device: torch.device | None,
        shown: Iterable[Path],
        wide: Mapping[Path, torch.dtype] | None = None,
    ):
        self.programs = programs
        self.settings = settings
        self.device = device
        self.shown = tuple(shown)
        self.wide = {} if wide is None else wide
        self.memory = tuple(memory_of(places_of(programs.transforms)))
        self.kept = Unchanged()
        self.state_paths = tuple(self.state_like())

    def behind(
        self,
        transforms: tuple[FusableTransform, ...],
        shown: Iterable[Path],
        wide: Mapping[Path, torch.dtype],
    ) -> ProgramEngine:
        """Return an engine whose programs run transforms too."""
        own = self.programs
        programs = Programs(own.env, transforms, packed=own.packed, shards=own.shards)
        return ProgramEngine(programs, self.settings, self.device, shown, wide)

    def over(self, rows: BatchedEnv, device: torch.device | None) -> Self:
        """Step other rows, on this device; gives the engine itself."""
        self.programs, self.device = self.programs.over(rows), device
        return self

    def state_like(self) -> dict[Path, Any]:
        """Return the leaves of one row's state in form, in the layout that programs give out."""
        packing = self.programs.env.packing
        if self.programs.packed:
            like = jax.eval_shape(packing.pack, packing.template)
            return {(name,): buffer for name, buffer in like.items()}
        return jax.eval_shape(self.programs.name_leaves, packing.template)

    # -------------------------------------------------------------------------------------- resets

    def begin_rows(self, shape: torch.Size, key: np.ndarray) -> TensorDict:
        """Begin an episode in every row of a batch; gives its root.

        A program that resets takes long to compile. So `advance` does it where it can and is compiled, or is about
        to be, and else `restart`: both reset in the same loop, exactly.
        """
        size, constants = self.size(shape.numel()), self.constants(shape)
        first = self._first(size, constants, key)
        state, action, memory = adopted(to_jit(first, copy=False))
        follows, programs = number_to_jit(BEGIN, self.device), self.programs
        if programs.env.chunks.asks_first and size in programs.advancing:
            _, outputs, flags = programs.advance(state, action, memory, constants, follows)
            outputs = to_torch(self.without_shared(outputs)) | {"flags": to_torch(flags)[3:]}
            return self.named(shape, outputs)
        every = to_jit(torch.ones(size, dtype=torch.bool, device=self.device), copy=False)
        outputs = programs.restart(state, every, constants, follows)
        return self.named(shape, to_torch(self.without_shared(outputs)))

    def restart(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDict:
        """Begin an episode in the rows that a mask of the batch selects; what the others show means nothing."""
        shape = td.batch_size
        given = adopted(to_jit((self.state(td), self._mask(mask)), copy=False, detach=True))
        # No gradient is lost: rows that are not selected keep what ``td`` holds, graph included.
        constants, follows = self.constants(shape, mask), number_to_jit(RESTART, self.device)
        outputs = self.programs.restart(*given, constants, follows)
        return self.named(shape, to_torch(self.without_shared(outputs)))

    def reseed(self, td: TensorDictBase, key: np.ndarray) -> TensorDict:
        """Return the state of ``td`` with new keys, under "state"."""
        reseeded = self._start(self.programs.reseed, (self.state(td),), (self.key(key),))
        named = {("state", *path): leaf for path, leaf in reseeded.result().items()}
        return self._tensordict(td.batch_size, named)

    # --------------------------------------------------------------------------------------- steps

    def prepare(self, td: TensorDictBase, mask: torch.Tensor | None = None) -> Step:
        """Read and check what a step of the rows in ``mask`` takes; None: of all."""
        rows = None if mask is None else selected_rows(mask)
        memory = self._in_rows(td.batch_size, self._values(td, self.memory)) if self.memory else {}
        inputs = self._state_of_step(td), self._action(td, rows), memory
        return Step(inputs, self.settings.requires_grad and is_wanted(inputs))

    def begin(
        self, step: Step, shape: torch.Size, mask: torch.Tensor | None, *, restarts: bool
    ) -> None:
        """Call the program; it runs when this returns."""
        constants = self.constants(shape, mask)
        if not restarts:
            step.running = self._start(self.programs.step, step.inputs, (constants,))
            self.without_shared(step.running.outputs)
            return
        given = to_jit(step.inputs, copy=False, detach=True)
        step.lent = given, constants
        follows = number_to_jit(step.follows, self.device)
        step.outputs = self.programs.advance(*given, constants, follows)
        self.without_shared(step.outputs[1])

    def finish(self, step: Step, shape: torch.Size) -> TensorDict:
        """Wait for a step and give its ``next``; one that restarted what ended keeps the root that follows."""
        if step.running is not None:
            return self.named(shape, step.running.result())
        outcome, begun, both = to_torch(step.outputs)
        flags = both.unbind(0)
        outcome["flags"], begun["flags"] = flags[:3], flags[3:]
        step.fresh = self.named(shape, begun)
        if reading_waits(both):
            self._keep_arrays(step.fresh, step.outputs[1]["state"])
        return self.named(shape, outcome)

    def _keep_arrays(self, root: TensorDictBase, arrays: Mapping[Path, Any]) -> None:
        """Store the arrays that the tensors of a state are views of, which the next step gets instead of them."""
        if not self.settings.requires_grad and root.batch_size == self.settings.batch_size:
            for path, tensor in leaves(root.get("state")):
                self.kept.keep(tensor, arrays[path])

    def _start(
        self, program: Differentiable, inputs: tuple[Any, ...], rest: tuple[Any, ...] = ()
    ) -> Running:
        requires_grad = self.settings.requires_grad
        transforms = self.programs.transforms if requires_grad else ()
        holders = tuple(transform.container for transform in transforms)
        return start(program, inputs, rest, requires_grad=requires_grad, holders=holders)

    # ----------------------------------------------------------------- what programs take beside rows

    def key(self, key: np.ndarray) -> np.ndarray | jax.Array:
        """Return a key as an argument of programs."""
        return to_jit(torch.from_numpy(key).to(self.device), copy=False)

    def constants(self, shape: torch.Size, mask: torch.Tensor | None = None) -> Constants:
        """Return what the transforms compute with, as arguments of a program.

        Args:
            shape: batch of the data.
            mask: parts of it that the program is called for, bool; None: all.
        """
        transforms, model = self.programs.transforms, self.settings.model
        if not transforms:
            return (), None, model
        each = [
            {name: self._constant(value) for name, value in transform.constants().items()}
            | {name: self._shared(value) for name, value in transform.state().items()}
            for transform in transforms
        ]
        if not any(transform.state() for transform in transforms):
            return each, None, model
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=self.device)
        return each, to_jit(self._mask(mask), copy=True), model

    def _constant(self, value: object) -> Any:
        """Return a constant as an argument; single numbers do not decide about dtypes."""
        if not isinstance(value, torch.Tensor):
            is_number = isinstance(value, bool | int | float)
            return number_to_jit(value, self.device) if is_number else value
        if value.ndim:
            return to_jit(value.detach(), copy=True)
        if not reading_waits(value):
            return number_to_jit(value.item(), self.device)
        number = self.kept.find(value)
        if number is None:
            number = value.item()
            self.kept.keep(value, number)
        return number_to_jit(number, self.device)

    def _shared(self, value: torch.Tensor) -> Any:
        """Return a tensor that a program changes as an argument, in the dtype it has there."""
        after = self.kept.find(value) if reading_waits(value) else None
        return to_jit(value.detach() if after is None else after, copy=True)

    def without_shared(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Write what transforms have learnt in a program, which is among its last outputs, into their tensors."""
        if "shared" not in outputs:
            return outputs
        shared = to_torch(outputs.pop("shared"))
        for transform, after in zip(self.programs.transforms, shared, strict=True):
            before = transform.state()
            for name, value in after.items():
                before[name].copy_(value)
                if before[name].dtype != value.dtype and reading_waits(before[name]):
                    self.kept.keep(before[name], value)
        return outputs

    # ------------------------------------------------------------------------------ torch -> JAX

    def size(self, rows: int) -> int:
        """Return the compiled size for so many rows."""
        shards, own = self.programs.shards, self.settings.batch_size.numel()
        return padded_size(rows, own, 1 if shards is None else len(shards.devices))

    def rows(self, batch: torch.Size, value: torch.Tensor) -> torch.Tensor:
        """Flatten the batch and pad it to a compiled size."""
        if len(batch) != 1:
            value = value.flatten(0, len(batch) - 1) if batch else value.unsqueeze(0)
        return value if batch == self.settings.batch_size else self._padded(value)

    def _in_rows(self, batch: torch.Size, values: Rows) -> Rows:
        if len(batch) == 1 and batch == self.settings.batch_size:
            return values
        return {path: self.rows(batch, value) for path, value in values.items()}

    def own_rows(self, batch: torch.Size, value: torch.Tensor) -> torch.Tensor:
        """Return the same in memory that is not shared with ``value``."""
        rows = self.rows(batch, value)
        padded = batch != self.settings.batch_size and rows.shape[0] != batch.numel()
        return rows if padded else rows.clone()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Repeat the first row (zeros if there is none) up to a compiled size."""
        count = rows.shape[0]
        missing = self.size(count) - count
        if not missing:
            return rows
        model = rows[:1].detach() if count else rows.new_zeros(1, *rows.shape[1:])
        return torch.cat([rows, model.expand(missing, *rows.shape[1:])])

    def _mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Flatten a mask; padding is not selected."""
        rows = mask.reshape(-1)
        missing = self.size(rows.shape[0]) - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing)])

    def _first(self, rows: int, constants: Constants, key: np.ndarray) -> tuple[Rows, Any, Rows]:
        """Return state, action and memory where no episode has begun: all that is in them is the key, in every row."""

        def blank(like: jax.ShapeDtypeStruct) -> torch.Tensor:
            shape = (rows, *like.shape[1:])
            return torch.zeros(shape, dtype=torch_dtype_of(like.dtype), device=self.device)

        if self._inputs_like is None:
            self._inputs_like = self.programs.inputs_like(constants)
        state, *others = jax.tree.map(blank, self._inputs_like)
        self._write_key(state, key)
        return state, *others

    _inputs_like: Any = None

    def _write_key(self, state: Rows, key: np.ndarray) -> None:
        """Write the key of all rows, or one for each, into the leaves of a state."""
        words = torch.from_numpy(np.ascontiguousarray(key).view(np.int32))
        if self.programs.packed:
            field = next(f for f in self.programs.env.packing.fields if f.name == KEY)
            state["words",][..., field.offset : field.offset + field.size] = words
        else:
            state[KEY][:] = words

    def unbegun(self, root: TensorDict, keys: np.ndarray) -> TensorDict:
        """Write into the blank state of a root the keys that the first episodes of its rows are drawn from, and give it."""
        state = self._state(root)
        self._write_key(state, keys.reshape(*root.batch_size, -1))
        return root

    # ---- states

    def state(self, td: TensorDictBase) -> Rows:
        """Read the state, after bringing one of the other layout into the env's own, in ``td``."""
        return self._in_rows(td.batch_size, self._state(td))

    def _state_of_step(self, td: TensorDictBase) -> dict[Path, Any]:
        """Read it as a step does: what came from JAX and was not written to since goes back, where handing over takes long."""
        state = self._state(td)
        rows: dict[Path, Any] = self._in_rows(td.batch_size, state)
        if not reading_waits(next(iter(state.values()))):
            return rows
        for path, value in state.items():
            array = self.kept.find(value)
            if array is not None:
                rows[path] = array
            elif not self.settings.requires_grad:
                rows[path] = adopted(to_jit(rows[path], copy=False, detach=True))
        return rows

    def _state(self, td: TensorDictBase) -> Rows:
        """Return the leaves of the state as they lie in ``td``, in the env's own layout."""
        state = td.get("state", None)
        if not isinstance(state, TensorDictBase):
            raise MissingKeyError(
                f"the TensorDict has no 'state'; it has {sorted(map(str, td.keys()))}. A stateless "
                "env reads its whole state from its input: start from env.reset()."
            )
        batch, state_leaves = td.batch_size, {}
        for path, key, shape in self._state_entries:
            value = state.get(key, None)
            if type(value) is not torch.Tensor or value.shape != (*batch, *shape):
                return self._relaid_or_refused(td, dict(leaves(state)))
            state_leaves[path] = value
        return state_leaves

    @cached_property
    def _state_entries(self) -> list[tuple[Path, Key, tuple[int, ...]]]:
        """List the leaves of the state: path, key and shape of one row."""
        shapes = self._state_shapes
        return [(path, as_key(path), shapes[path]) for path in self.state_paths]

    def _relaid_or_refused(self, td: TensorDictBase, state: Rows) -> Rows:
        """Convert a state of the other layout into the env's own, in ``td``; that of another env is an error."""
        self.require_own_state(state, td.batch_dims)
        if not state.keys() >= set(self.state_paths):
            state = self._relaid(td, state)
        return {path: state[path] for path in self.state_paths}

    def require_own_state(self, state: Mapping[Path, torch.Tensor], batch_dims: int) -> None:
        """Check that a state has the sizes of this env's, in either layout.

        Raises:
            InputError: it has others, as that of another env has.
        """
        for path, shape in self._state_shapes.items():
            value = state.get(path)
            if value is not None and value.shape[batch_dims:] != shape:
                raise InputError(
                    f"{as_key(('state', *path))!r} has shape {tuple(value.shape)}, but the state of "
                    f"this env has {(*value.shape[:batch_dims], *shape)} there: it is that of another env. Step "
                    "what reset() or step() of this env gave."
                )

    @cached_property
    def _state_shapes(self) -> dict[Path, tuple[int, ...]]:
        """List the leaves of a state of either layout, with the shape of one row."""
        packing = self.programs.env.packing
        packed = jax.eval_shape(packing.pack, packing.template)
        nested = jax.eval_shape(self.programs.name_leaves, packing.template)
        shapes = {path: like.shape for path, like in nested.items()}
        return shapes | {(name,): like.shape for name, like in packed.items()}

    def _relaid(self, td: TensorDictBase, state: Rows) -> Rows:
        names = tuple(field.name for field in self.programs.env.packing.fields)
        wanted = names if self.programs.packed else PACKED
        missing = [as_key(path) for path in wanted if path not in state]
        if missing:
            raise MissingKeyError(
                f"the 'state' of the TensorDict lacks {missing}. Pass the whole state that reset or "
                "step returned, packed or nested."
            )
        state_rows = {path: self.rows(td.batch_size, state[path]) for path in wanted}
        relaid = self._start(self.programs.relayout, (state_rows,)).result()
        node = self._tensordict(td.batch_size, relaid)
        td.set("state", node)
        return dict(leaves(node))

    # ---- actions

    def _action(
        self, td: TensorDictBase, stepped: list[int] | None
    ) -> torch.Tensor | np.ndarray | dict[str, torch.Tensor | np.ndarray]:
        if self._single is not None:
            return self._one_action(td, "action", self._single, stepped)
        return action_tree(
            {
                path: self._one_action(td, as_key(path), member, stepped)
                for path, member in self.action_spaces.items()
            }
        )

    @cached_property
    def action_spaces(self) -> dict[Path, Any]:
        """The spaces of one row's actions, by where they lie in the data."""
        return actions_by_path(self.programs.env.action_space)

    @cached_property
    def _single(self) -> SpaceTree:
        """The space of the only action, None where there are several by name."""
        return self.action_spaces.get(("action",))

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """Agents by the name of their node in the data, whose batch size they are part of."""
        return self.programs.env.groups

    def _one_action(
        self, td: TensorDictBase, key: Key, space: SpaceTree, stepped: list[int] | None
    ) -> torch.Tensor | np.ndarray:
        rule, value, batch = self._action_rules[key], td.get(key, None), td.batch_size
        settings = self.settings
        if not (settings.requires_grad or is_choice(space) or stepped) and batch == (
            settings.batch_size
        ):
            rows = rule.values_of(value, (*batch, *space.shape))
            if rows is not None:
                return rows.copy()
        value = rule.take(value, batch, rows=stepped)
        if is_choice(space):
            value = value if settings.categorical else integers_of(value, space)
            value = value.to(torch.int32)
        return self.own_rows(batch, value)

    def require_actions(self, data: TensorDictBase) -> None:
        """Check actions that a policy wrote in a program, as those of single steps are checked; none on an accelerator.

        The program went on with them: it took the largest of scores, and the nearest option to a number out of range.

        Raises:
            InputError: one is no value of the action space.
        """
        for key, rule in self._action_rules.items():
            value = data.get(key)
            if not value.is_cpu:
                continue
            try:
                rule.take(value.detach(), data.batch_size)
            except InputError as error:
                error.add_note("The last number of the row is the step of the run.")
                raise

    def require_options(self, data: TensorDictBase) -> None:
        """Check the masks that a program drew random actions from, as single steps do; none on an accelerator.

        The program went on with any option.

        Raises:
            SpecMaskError: one allows no option.
        """
        env = self.programs.env
        for action, mask in env.action_masks:
            flags, space = data.get(as_key(mask), None), self.action_spaces[action_path(action)]
            if flags is None or not flags.is_cpu or flags.is_floating_point():
                continue
            sizes = [space.n] if isinstance(space, Discrete) else list(space.nvec)
            options = flags.reshape(*data.batch_size, sum(sizes)) != 0
            left = torch.stack([part.any(-1) for part in options.split(sizes, -1)], -1).all(-1)
            if not bool(left.all()):
                place = tuple((~left).nonzero()[0].tolist())
                raise SpecMaskError(
                    f"the mask {as_key(mask)!r} of {simulator_name(env)} allows no option of "
                    f"{as_key(action_path(action))!r}{_told_place(place, data)}, but random actions are drawn from what it "
                    "allows. Allow at least one, or end the episode."
                )

    def require_legal(
        self, data: TensorDictBase, following: TensorDictBase, mask: torch.Tensor | None = None
    ) -> None:
        """Check that no action was one that the env does not allow, where that is an error; a GPU is waited for.

        Args:
            data: roots of a step or a run, with the actions.
            following: their ``next``.
            mask: rows of ``data`` that were stepped, bool; None: all.

        Raises:
            InputError: one was.
        """
        key = self.settings.illegal
        if key is None:
            return
        flags = following.get(key).squeeze(-1)
        flags = flags if mask is None else flags & mask
        if not bool(flags.any()):
            return
        place = tuple(flags.nonzero()[0].tolist())
        raise InputError(
            f"{self._told_actions(data[place], _told_place(place, data))}. Choose among those that the mask in the data "
            "allows, as env.rand_action(td) does. Or make the env with illegal='library': the library's own rule for "
            f"illegal actions applies then, and next[{key!r}] says where."
        )

    def _told_actions(self, root: TensorDictBase, where: str) -> str:
        """Return what one row chose, and what it might have chosen if its data shows that."""
        choices = []
        for action, shown in self.programs.env.action_masks:
            key = as_key(action_path(action))
            value, mask = root.get(key), root.get(as_key(shown), None)
            chosen = value.tolist() if self.settings.categorical else value.argmax(-1).tolist()
            legal = "" if mask is None else f"; legal are {mask.nonzero().flatten().tolist()}"
            choices.append(f"{key!r}{where} is {chosen}, which is illegal{legal}")
        return " and ".join(choices)

    @cached_property
    def _action_rules(self) -> dict[Key, ActionInput]:
        """Return what actions of one row may be: the space says it, whatever batch the specs are of."""
        categorical = self.settings.categorical
        space = self.programs.env.action_space
        one = action_composite(space, torch.Size(), None, categorical=categorical)
        return action_inputs(one)

    # ---- what a root shows

    def flags(self, td: TensorDictBase) -> torch.Tensor:
        """Read the done flags, bool (3, rows, 1); those that are absent are not set."""
        leaves_read = [td.get(name, None) for name in DONE_LEAVES]
        if any(flag is None for flag in leaves_read):
            blank = torch.zeros(*td.batch_size, 1, dtype=torch.bool, device=self.device)
            leaves_read = [blank if flag is None else flag for flag in leaves_read]
        flags = torch.stack(leaves_read)
        if td.batch_size and td.batch_size == self.settings.batch_size:
            return flags if td.batch_dims == 1 else flags.flatten(1, -2)
        rows = flags.flatten(1, -2) if td.batch_size else flags[:, None]
        return self._padded(rows.transpose(0, 1)).transpose(0, 1)

    def root(self, td: TensorDictBase) -> Rows:
        """Read what a root shows, in its own memory; leaves that are absent are left to the program."""
        batch = td.batch_size
        return {
            path: self.own_rows(batch, value)
            for path, value in self._values(td, self.shown).items()
        }

    def _values(self, td: TensorDictBase, paths: Iterable[Path]) -> Rows:
        found = {path: td.get(as_key(path), None) for path in paths}
        return {
            path: self._narrow(value) if path in self.wide else value
            for path, value in found.items()
            if value is not None
        }

    def _narrow(self, wide: torch.Tensor) -> torch.Tensor:
        """Return the values that ``wide`` was made of, in a dtype JAX has, where looking at them would wait."""
        narrow = self.kept.find(wide) if reading_waits(wide) else None
        return wide if narrow is None else narrow

    # ------------------------------------------------------------------------------ JAX -> torch

    def named(self, shape: torch.Size, outputs: dict[str, Any]) -> TensorDict:
        """Return the tensors of one moment by name, batch ``shape``; padding rows are dropped."""
        return self._tensordict(shape, self.by_path(outputs))

    def by_path(self, outputs: dict[str, Any]) -> Rows:
        """List the tensors of one moment, in the dtypes that are declared."""
        named: Rows = dict(outputs["leaves"])
        for path, dtype in self.wide.items():
            if path in named:
                named[path] = self._widened(named[path], dtype)
        for path, leaf in outputs["state"].items():
            named["state", *path] = leaf
        named.update(zip(_FLAGS, outputs["flags"], strict=True))
        return named

    def _widened(self, narrow: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = narrow.to(dtype)
        if reading_waits(wide):
            self.kept.keep(wide, narrow)
        return wide

    def _tensordict(self, shape: torch.Size, named: Mapping[Path, torch.Tensor]) -> TensorDict:
        rows, is_flat, entries = shape.numel(), len(shape) == 1, {}
        for path, leaf in named.items():
            leaf = leaf if leaf.shape[0] == rows else leaf[:rows]
            if not is_flat:
                leaf = leaf.reshape((*shape, *leaf.shape[1:])) if shape else leaf.squeeze(0)
            entries[path] = leaf
        return self.grouped(tensordict_of(entries, shape, self.device))

    def grouped(self, data: TensorDict) -> TensorDict:
        """Set the batch size of the nodes of groups of agents, in place."""
        for name, agents in self.groups.items():
            if (node := data.get(name, None)) is not None:
                node.batch_size = (*data.batch_size, agents)
        return data


def _told_place(place: tuple[int, ...], data: TensorDictBase) -> str:
    """Return which row of a step or a run an index means; the last axis of a run is time."""
    is_run = bool(data.names) and data.names[-1] == "time"
    rows = place[:-1] if is_run else place
    row = f" of row {rows[0] if len(rows) == 1 else rows}" if rows else ""
    return f"{row} at step {place[-1]}" if is_run else row
