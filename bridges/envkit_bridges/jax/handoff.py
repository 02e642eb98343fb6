"""A batch as rows and back: what a stateless env gives its programs, and how it names what they return.

`RowEnv` reads the entries of a TensorDict that a program takes, flattens the batch, pads it to a compiled
size, and names what comes back. Memory and dtypes at the border are decided in `dlpack`, gradients in
`gradients`; when something is computed, and from what, is decided in `stepping`.

Conventions
    rows     the flattened batch. Sizes other than the env's own are padded, see `padded_size`.
    path     tuple of names: of a leaf of the state, or of an entry of the data.
    lent     rows may share the memory of the data; what a caller may refill while a program runs is
             copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Key, Path, as_key, tensordict_of
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.errors import InputError, MissingKeyError
from envkit.rules import DONE_LEAVES
from envkit.specs.devices import reading_waits
from envkit.specs.inputs import ActionInput, action_inputs
from envkit_bridges.dlpack import adopted, to_jit, torch_dtype_of
from envkit_bridges.jax.codecs import action_composite, integers_of, is_choice
from envkit_bridges.jax.gradients import Differentiable, Running, start
from envkit_bridges.jax.options import padded_size
from envkit_bridges.jax.programs import KEY, PACKED, Constants, Programs
from envkit_bridges.jax.tensor_cache import Unchanged

__all__ = ["RowEnv"]

Rows = dict[Path, torch.Tensor]
_FLAGS: tuple[Path, ...] = tuple((name,) for name in DONE_LEAVES)


class RowEnv(EnvBase):
    """The part of a stateless env that hands batches over.

    Attributes:
        requires_grad: gradients flow from what programs return to what they were given.
    """

    requires_grad: bool
    state_layout: str
    categorical_action_encoding: bool
    _programs: Programs
    _state_paths: tuple[Path, ...]  # of the env's own layout
    _root_paths: tuple[Path, ...]  # what a root shows besides the state and done flags
    _memory_paths: tuple[Path, ...] = ()  # what fused transforms read of it
    _wide: Mapping[Path, torch.dtype] = MappingProxyType({})  # declared in dtypes JAX lacks
    _unchanged: Unchanged

    def _lent(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Lend the inputs of a step to a program."""
        return to_jit(inputs, copy=False, detach=True)

    def _keep_arrays(self, root: TensorDictBase, arrays: Mapping[Path, Any]) -> None:
        """Keep the arrays that the tensors of a state are views of, which the next step is given instead of them."""
        if not self.requires_grad and self._is_own_size(root):
            for path, tensor in leaves(root.get("state")):
                self._unchanged.keep(tensor, arrays[path])

    def _start(
        self, program: Differentiable, inputs: tuple[Any, ...], rest: tuple[Any, ...] = ()
    ) -> Running:
        transforms = self._programs.transforms if self.requires_grad else ()
        holders = tuple(transform.container for transform in transforms)
        return start(program, inputs, rest, requires_grad=self.requires_grad, holders=holders)

    # ----------------------------------------------------------------- what programs take beside rows

    @abstractmethod
    def _next_key(self) -> np.ndarray:
        """Give a key that no program was given before."""

    def _next_key_in(self) -> Any:
        """Give the same as an argument of programs."""
        return to_jit(torch.from_numpy(self._next_key()).to(self.device), copy=False)

    def _constants(self, shape: torch.Size, mask: torch.Tensor | None = None) -> Constants:
        """Give what fused transforms compute with, as arguments of a program.

        Args:
            shape: batch of the data.
            mask: parts of it that the program is called for, bool; None: all.
        """
        return (), None, self._model_given()

    def _model_given(self) -> Any:
        """Give the model that programs take as an argument, None if they take none."""
        return None

    def _kept(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Take what fused transforms have seen in a program out of its last outputs, and keep it."""
        return outputs

    # ------------------------------------------------------------------------------ torch -> JAX

    def _first_in(self, rows: int, constants: Constants) -> tuple[Rows, Any, Rows]:
        """Give state, action and memory where no episode has begun: all that is in them is the next key, in every row."""

        def inputs() -> tuple[Rows, Any, Rows]:
            return self._programs.inputs_like(constants)

        def blank(like: Any) -> torch.Tensor:
            shape = (rows, *like.shape[1:])
            return torch.zeros(shape, dtype=torch_dtype_of(like.dtype), device=self.device)

        state, *others = jax.tree.map(blank, self._declared.cached("inputs_like", inputs))
        words = torch.from_numpy(self._next_key().view(np.int32))
        if self.state_layout == "nested":
            state[KEY][:] = words
        else:
            field = next(f for f in self._programs.env.packing.fields if f.name == KEY)
            state["words",][:, field.offset : field.offset + field.size] = words
        return state, *others

    def _rows_in(self, td: TensorDictBase, value: torch.Tensor, copy: bool) -> torch.Tensor:
        """Flatten the batch and pad it to a compiled size; ``copy`` to share no memory with ``value``."""
        batch = td.batch_size
        if len(batch) != 1:
            value = value.flatten(0, len(batch) - 1) if batch else value.unsqueeze(0)
        padded = value if self._is_own_size(td) else self._padded(value)
        return padded.clone() if copy and padded is value else padded

    def _is_own_size(self, td: TensorDictBase) -> bool:
        """Say whether data has the batch size of the env itself, which is a compiled one."""
        return td.batch_size == self._batch_size

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Repeat the first row (zeros if there is none) up to a compiled size."""
        count = rows.shape[0]
        missing = self._size(count) - count
        if not missing:
            return rows
        model = rows[:1].detach() if count else rows.new_zeros(1, *rows.shape[1:])
        return torch.cat([rows, model.expand(missing, *rows.shape[1:])])

    def _size(self, rows: int) -> int:
        shards = self._programs.shards
        return padded_size(rows, self.numel(), 1 if shards is None else len(shards.devices))

    def _state_in(self, td: TensorDictBase) -> Rows:
        """Read the state, after bringing one of the other layout into the env's own, in ``td``."""
        own = self._own_state_in(td)
        return {path: self._rows_in(td, value, copy=False) for path, value in own.items()}

    def _state_or_arrays_in(self, td: TensorDictBase) -> dict[Path, Any]:
        """Read it as a step does: what came from JAX and was not written to since goes back, where handing over takes long."""
        rows: dict[Path, Any] = {}
        for path, value in self._own_state_in(td).items():
            array = self._unchanged.find(value) if reading_waits(value) else None
            given = self._rows_in(td, value, copy=False) if array is None else array
            if array is None and reading_waits(value) and not self.requires_grad:
                given = adopted(to_jit(given, copy=False, detach=True))
            rows[path] = given
        return rows

    def _own_state_in(self, td: TensorDictBase) -> Rows:
        """Give the leaves of the state as they lie in ``td``, in the env's own layout."""
        state = td.get("state", None)
        if not isinstance(state, TensorDictBase):
            raise MissingKeyError(
                f"the TensorDict has no 'state'; it has {sorted(map(str, td.keys()))}. A stateless "
                "env reads its whole state from its input: start from env.reset()."
            )
        batch, shapes = td.batch_size, self._declared.cached("state_shapes", self._state_shapes)
        found = {}
        for path in self._state_paths:
            value = state.get(as_key(path), None)
            if type(value) is not torch.Tensor or value.shape != (*batch, *shapes[path]):
                return self._relaid_or_refused(td, dict(leaves(state)))
            found[path] = value
        return found

    def _relaid_or_refused(self, td: TensorDictBase, found: Rows) -> Rows:
        """Bring a state of the other layout into the env's own, in ``td``; that of another env is an error."""
        self._require_own(found, td)
        paths = self._state_paths
        if not found.keys() >= set(paths):
            found = self._relaid(td, found)
        return {path: found[path] for path in paths}

    def _require_own(self, found: Rows, td: TensorDictBase) -> None:
        """Check that a state has the sizes of this env's, in either layout.

        Raises:
            InputError: it has others, as that of another env has.
        """
        for path, shape in self._declared.cached("state_shapes", self._state_shapes).items():
            value = found.get(path)
            if value is not None and value.shape[td.ndim :] != shape:
                raise InputError(
                    f"{as_key(('state', *path))!r} has shape {tuple(value.shape)}, but the state of "
                    f"{self} has {(*td.batch_size, *shape)} there: it is that of another env. Step what "
                    "reset() or step() of this env gave."
                )

    def _state_shapes(self) -> dict[Path, tuple[int, ...]]:
        packing = self._programs.env.packing
        packed = jax.eval_shape(packing.pack, packing.template)
        nested = jax.eval_shape(self._programs.name_leaves, packing.template)
        shapes = {path: like.shape for path, like in nested.items()}
        return shapes | {(name,): like.shape for name, like in packed.items()}

    def _relaid(self, td: TensorDictBase, found: Rows) -> Rows:
        packing = self._programs.env.packing
        nested = self.state_layout == "nested"
        wanted = PACKED if nested else tuple(field.name for field in packing.fields)
        missing = [as_key(path) for path in wanted if path not in found]
        if missing:
            raise MissingKeyError(
                f"the 'state' of the TensorDict lacks {missing}. Pass the whole state that reset or "
                "step returned, packed or nested."
            )
        given = {path: self._rows_in(td, found[path], copy=False) for path in wanted}
        relaid = self._start(self._programs.relayout, (given,)).result()
        own = self._named(td.batch_size, relaid)
        td.set("state", own)
        return dict(leaves(own))

    def _action_in(self, td: TensorDictBase, stepped: list[int] | None) -> Any:
        space = self._declared.cached("action_space", self._action_space)
        if not isinstance(space, Mapping):
            return self._one_action(td, ("action",), space, stepped)
        return {
            name: self._one_action(td, ("action", name), member, stepped)
            for name, member in space.items()
        }

    def _action_space(self) -> Any:
        return self._programs.env.action_space

    def _one_action(
        self, td: TensorDictBase, path: Path, space: Any, stepped: list[int] | None
    ) -> torch.Tensor:
        key = path[0] if len(path) == 1 else path
        rules = self._declared.cached("action_rules", self._action_rules)
        value = td.get(key, None)
        if not (self.requires_grad or is_choice(space) or stepped) and self._is_own_size(td):
            rows = rules[key].values_of(value, (*td.batch_size, *space.shape))
            if rows is not None:
                return rows.copy()
        value = rules[key].take(value, td.batch_size, rows=stepped)
        if is_choice(space):
            value = value if self.categorical_action_encoding else integers_of(value, space)
            value = value.to(torch.int32)
        return self._rows_in(td, value, copy=True)

    def _require_choices(self, data: TensorDictBase) -> None:
        """Check that floats which a policy wrote as choices in a program are one-hot; the program took their largest.

        Raises:
            InputError: they are not.
        """
        for key, rule in self._declared.cached("action_rules", self._action_rules).items():
            value = data.get(key)
            if rule.spells_choices and value.is_floating_point() and value.device.type == "cpu":
                rule.take(value.detach(), data.batch_size)

    def _action_rules(self) -> dict[Key, ActionInput]:
        """What actions of one row may be: the space says it, whatever batch the specs are of."""
        space, categorical = self._programs.env.action_space, self.categorical_action_encoding
        one = action_composite(space, torch.Size(), None, categorical=categorical)
        return action_inputs(one)

    def _mask_in(self, mask: torch.Tensor) -> torch.Tensor:
        """Flatten a mask; padding is not selected."""
        rows = mask.reshape(-1)
        missing = self._size(rows.shape[0]) - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing)])

    def _flags_in(self, td: TensorDictBase) -> torch.Tensor:
        given = [td.get(name, None) for name in DONE_LEAVES]
        if any(flag is None for flag in given):
            blank = torch.zeros(*td.batch_size, 1, dtype=torch.bool, device=self.device)
            given = [blank if flag is None else flag for flag in given]
        flags = torch.stack(given)
        if td.batch_size and self._is_own_size(td):
            return flags if td.batch_dims == 1 else flags.flatten(1, -2)
        rows = flags.flatten(1, -2) if td.batch_size else flags[:, None]
        return self._padded(rows.transpose(0, 1)).transpose(0, 1)

    def _root_in(self, td: TensorDictBase) -> Rows:
        """Read what a root shows; leaves that are absent are left to the program."""
        return self._found_in(td, self._root_paths, copy=True)

    def _memory_in(self, td: TensorDictBase) -> Rows:
        return self._found_in(td, self._memory_paths, copy=False)

    def _found_in(self, td: TensorDictBase, paths: Iterable[Path], copy: bool) -> Rows:
        found = {}
        for path in paths:
            value = td.get(as_key(path), None)
            if value is not None:
                if path in self._wide:
                    value = self._narrow(value)
                found[path] = self._rows_in(td, value, copy)
        return found

    def _narrow(self, wide: torch.Tensor) -> torch.Tensor:
        """Give the values that ``wide`` was made of, in a dtype JAX has, where looking at them would wait."""
        narrow = self._unchanged.find(wide) if reading_waits(wide) else None
        return wide if narrow is None else narrow

    def _widened(self, narrow: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = narrow.to(dtype)
        if reading_waits(wide):
            self._unchanged.keep(wide, narrow)
        return wide

    # ------------------------------------------------------------------------------ JAX -> torch

    def _out(self, td_shape: torch.Size, outputs: dict[str, Any]) -> TensorDict:
        """Name the tensors of one moment, batch ``td_shape``; padding rows are dropped."""
        return self._named(td_shape, self._by_path(outputs))

    def _by_path(self, outputs: dict[str, Any]) -> Rows:
        """List the tensors of one moment, in the dtypes that are declared."""
        named: Rows = dict(outputs["leaves"])
        for path, dtype in self._wide.items():
            if path in named:
                named[path] = self._widened(named[path], dtype)
        for path, leaf in outputs["state"].items():
            named["state", *path] = leaf
        named.update(zip(_FLAGS, outputs["flags"], strict=True))
        return named

    def _named(self, shape: torch.Size, named: Mapping[Path, torch.Tensor]) -> TensorDict:
        rows, is_flat, entries = shape.numel(), len(shape) == 1, {}
        for path, leaf in named.items():
            leaf = leaf if leaf.shape[0] == rows else leaf[:rows]
            if not is_flat:
                leaf = leaf.reshape((*shape, *leaf.shape[1:])) if shape else leaf.squeeze(0)
            entries[path] = leaf
        return tensordict_of(entries, shape, self._device)
