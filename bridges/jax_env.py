"""Any `StatelessEnv` as a TensorDict env: compiled over rows, any batch size.

`JaxEnv` flattens and pads batches, hands arrays over the border, and names them. What is computed
stands in `jax_programs`; how arrays cross stands in `dlpack`.

Conventions
    state    everything of a row that a step needs, its PRNG key and elapsed steps included, under
             ``("state", ...)``; nothing but the key for new rows lives in the env.
    packed   state as two tensors: ``floats`` and int32 ``words``, each (*batch, width).
    rows     the flattened batch. Sizes other than the env's own are padded, see `padded_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import torch
from tensordict import TensorDict, TensorDictBase

from bridges.dlpack import jax_device_of, to_jit, to_torch, torch_dtype_of
from bridges.jax_programs import PACKED, Programs, padded_size
from bridges.jax_specs import action_composite, array_leaf, done_composite
from bridges.named_rows import observation_leaves
from bridges.nesting import nest, tensordict_of
from bridges.torch_policy.acting import is_compilable
from bridges.unrolling import unroll, unroll_until
from envkit import rules
from envkit.base import EnvBase
from envkit.env_specs import as_key
from envkit.errors import ArgumentError, InputError, MissingKeyError
from envkit.functional import BatchedEnv, Discrete, StatelessEnv, TimeLimit
from envkit.rules import DONE_LEAVES, STEP
from envkit.specs import Composite, Unbounded
from envkit.transforms.base import Transform
from envkit.transition import collect_reset_masks, leaves

__all__ = ["JaxEnv"]

Path = tuple[str, ...]


class JaxEnv(EnvBase):
    """A stateless JAX environment behind the TensorDict interface.

    Args:
        env: pure ``reset`` and ``step`` of one environment.
        batch_size: what `reset` without data produces; any other size is accepted too.
        device: where torch data and JAX arrays are; None takes the CPU.
        episode_length: truncate episodes after this many steps; None never does.
        state_layout: "packed" (two tensors) or "nested" (one tensor a leaf, slower). Data of
            either layout is accepted as input.
        categorical_action_encoding: discrete actions as integers instead of one-hot.
        **kwargs: of `EnvBase`.

    Attributes:
        traces: how often each program was traced, by name.

    Raises:
        ArgumentError: unknown ``state_layout``.
    """

    _batch_locked = False
    _programs: Programs
    _state_paths: tuple[Path, ...]  # of the env's own layout
    _root_paths: tuple[Path, ...]  # what a root shows besides the state and done flags
    _memory_paths: tuple[Path, ...] = ()  # what fused transforms read of it
    _wide: Mapping[Path, torch.dtype] = MappingProxyType({})  # declared in dtypes JAX lacks

    def __init__(
        self,
        env: StatelessEnv,
        *,
        batch_size: Any = None,
        device: Any = None,
        episode_length: int | None = None,
        state_layout: str = "packed",
        categorical_action_encoding: bool = False,
        **kwargs: Any,
    ):
        if state_layout not in ("packed", "nested"):
            raise ArgumentError(
                f"state_layout is {state_layout!r}, but must be 'packed' or 'nested'."
            )
        device = torch.device("cpu" if device is None else device)
        super().__init__(batch_size=batch_size, device=device, **kwargs)
        self.state_layout = state_layout
        self.episode_length = episode_length
        self.categorical_action_encoding = categorical_action_encoding
        rows = BatchedEnv(TimeLimit(env, episode_length))
        self._programs = Programs(rows, packed=state_layout == "packed")
        self._jax_device = jax_device_of(device)
        self._set_seed(0)
        self._declare()
        self._root_paths = tuple(observation_leaves(rows.template[1]))

    @property
    def traces(self) -> dict[str, int]:
        """How often each program was traced, by name."""
        return dict(self._programs.traces)

    def to(self, *args: Any, **kwargs: Any) -> JaxEnv:
        """Move specs and future computation to a device that JAX sees too; returns self."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        if device is not None:
            self._jax_device = jax_device_of(device)
            self._key = jax.device_put(self._key, self._jax_device)
        return super().to(*args, **kwargs)  # type: ignore[return-value]

    # ---------------------------------------------------------------------------------- declaration

    def _declare(self) -> None:
        rows, batch, device = self._programs.env, self.batch_size, self.device
        state, observation = (Composite(shape=batch, device=device) for _ in range(2))
        state_like = self._state_like()
        self._state_paths = tuple(state_like)
        for path, like in state_like.items():
            state[("state", *path)] = array_leaf(like.shape, like.dtype, batch, device)
        for path, like in observation_leaves(rows.template[1]).items():
            observation[as_key(path)] = array_leaf(like.shape, like.dtype, batch, device)
        for key, leaf in state.items(True, True):
            observation[key] = leaf.clone()
        self.state_spec = state
        self.observation_spec = observation
        self.full_action_spec = action_composite(
            rows.action_space, batch, device, categorical=self.categorical_action_encoding
        )
        self.reward_spec = Unbounded((*batch, 1), device=device)
        self.done_spec = done_composite(batch, device)

    def _state_like(self) -> dict[Path, Any]:
        packing = self._programs.env.packing
        if self.state_layout == "packed":
            like = jax.eval_shape(packing.pack, packing.template)
            return {(name,): buffer for name, buffer in like.items()}
        return jax.eval_shape(self._programs.name_leaves, packing.template)

    # ------------------------------------------------------------------------------ torch -> JAX

    def _rows_in(self, td: TensorDictBase, value: torch.Tensor, copy: bool) -> Any:
        """Flatten the batch, pad it to a compiled size, and hand it over."""
        value = value.flatten(0, len(td.batch_size) - 1) if td.batch_size else value[None]
        padded = self._padded(value)
        return to_jit(padded.detach(), copy=copy and padded is value)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Repeat the first row (zeros if there is none) up to a compiled size."""
        count = rows.shape[0]
        missing = self._size(count) - count
        if not missing:
            return rows
        model = rows[:1] if count else rows.new_zeros(1, *rows.shape[1:])
        return torch.cat([rows, model.expand(missing, *rows.shape[1:])])

    def _size(self, rows: int) -> int:
        return padded_size(rows, self.numel())

    def _state_in(self, td: TensorDictBase) -> dict[Path, Any]:
        """Read the state, after bringing one of the other layout into the env's own, in ``td``."""
        state = td.get("state", None)
        if not isinstance(state, TensorDictBase):
            raise MissingKeyError(
                f"the TensorDict has no 'state'; it has {sorted(map(str, td.keys()))}. A stateless "
                "env reads its whole state from its input: start from env.reset()."
            )
        found = dict(leaves(state))
        if any(path not in found for path in self._state_paths):
            found = self._relaid(td, found)
        return {path: self._rows_in(td, found[path], copy=False) for path in self._state_paths}

    def _relaid(
        self, td: TensorDictBase, found: dict[Path, torch.Tensor]
    ) -> dict[Path, torch.Tensor]:
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
        own = self._named(td.batch_size, to_torch(self._programs.relayout(given)))
        td.set("state", own)
        return dict(leaves(own))

    def _action_in(self, td: TensorDictBase) -> Any:
        space = self._programs.env.action_space
        if isinstance(space, Mapping):
            return {name: self._one_action(td, ("action", name), space[name]) for name in space}
        return self._one_action(td, ("action",), space)

    def _one_action(self, td: TensorDictBase, path: Path, space: Any) -> jax.Array:
        key = as_key(path)
        value = td.get(key, None)
        if value is None:
            raise MissingKeyError(
                f"the TensorDict has no {key!r}. Write it first, e.g. with env.rand_action(td)."
            )
        spec = self.full_action_spec[key]
        event = spec.shape[len(self.batch_size) :]
        if value.shape != (*td.batch_size, *event):
            raise InputError(
                f"{key!r} has shape {tuple(value.shape)}, but the env takes "
                f"{(*td.batch_size, *event)}. env.rand_action() shows what it takes."
            )
        if isinstance(space, Discrete):
            if not self.categorical_action_encoding:
                value = value.to(torch.uint8).argmax(-1)
            return self._rows_in(td, value.to(torch.int32), copy=True)
        dtype = torch_dtype_of(space.dtype)
        return self._rows_in(td, value if value.dtype == dtype else value.to(dtype), copy=True)

    def _flags_in(self, td: TensorDictBase) -> jax.Array:
        blank = torch.zeros(*td.batch_size, 1, dtype=torch.bool, device=self.device)
        flags = torch.stack([td.get(name, blank) for name in DONE_LEAVES])
        rows = flags.flatten(1, -2) if td.batch_size else flags[:, None]
        return to_jit(self._padded(rows.transpose(0, 1)).transpose(0, 1), copy=False)

    def _root_in(self, td: TensorDictBase) -> dict[Path, Any]:
        """Read what a root shows; leaves that are absent are left to the program."""
        return self._found_in(td, self._root_paths, copy=True)

    def _memory_in(self, td: TensorDictBase) -> dict[Path, Any]:
        return self._found_in(td, self._memory_paths, copy=False)

    def _found_in(self, td: TensorDictBase, paths: Iterable[Path], copy: bool) -> dict[Path, Any]:
        found = {path: td.get(as_key(path), None) for path in paths}
        return {
            path: self._rows_in(td, value, copy)
            for path, value in found.items()
            if value is not None
        }

    # ------------------------------------------------------------------------------ JAX -> torch

    def _out(self, td_shape: torch.Size, outputs: Any) -> TensorDict:
        """Name what a program gave, batch ``td_shape``; padding rows are dropped."""
        return self._named(td_shape, self._by_path(to_torch(outputs)))

    def _by_path(self, outputs: dict[str, Any]) -> dict[Path, torch.Tensor]:
        """List tensors of one moment, in the dtypes that are declared."""
        named: dict[Path, torch.Tensor] = dict(outputs["leaves"])
        for path, dtype in self._wide.items():
            if path in named:
                named[path] = named[path].to(dtype)
        named.update({("state", *path): leaf for path, leaf in outputs.get("state", {}).items()})
        named.update(zip(((n,) for n in DONE_LEAVES), outputs["flags"].unbind(0), strict=True))
        return named

    def _named(self, shape: torch.Size, named: Mapping[Path, torch.Tensor]) -> TensorDict:
        rows = shape.numel()
        tree: dict[str, Any] = {}
        for path, leaf in named.items():
            node = tree
            for name in path[:-1]:
                node = node.setdefault(name, {})
            if leaf.shape[0] != rows:
                leaf = leaf[:rows]
            node[path[-1]] = leaf if len(shape) == 1 else leaf.reshape((*shape, *leaf.shape[1:]))
        return tensordict_of(tree, shape, self.device)

    # ------------------------------------------------------------------------------------ calls

    def _next_key(self) -> jax.Array:
        self._key, now = jax.random.split(self._key)
        return now

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            raise ArgumentError(
                "a stateless env needs a seed: set_seed(0), say. None makes no key."
            )
        self._key = jax.device_put(jax.random.PRNGKey(int(seed) % 2**32), self._jax_device)

    def _constants(self) -> list[dict[str, Any]]:
        """Give what fused transforms compute with, as arguments of a program."""
        return []

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        shape = self.batch_size if td is None else td.batch_size
        if td is None or td.get("state", None) is None:
            size = self._size(shape.numel())
            return self._out(shape, self._programs.init(self._next_key(), size, self._constants()))
        masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        mask = masks.get((), torch.ones(shape, dtype=torch.bool, device=self.device))
        outputs = self._programs.restart(self._state_in(td), self._mask_in(mask), self._constants())
        return self._out(shape, outputs)

    def _mask_in(self, mask: torch.Tensor) -> Any:
        rows = mask.reshape(-1)
        missing = self._size(rows.shape[0]) - rows.shape[0]
        return to_jit(torch.cat([rows, rows.new_zeros(missing)]), copy=False)

    def _inputs(self, td: TensorDictBase) -> tuple[Any, ...]:
        return self._state_in(td), self._action_in(td), self._memory_in(td), self._constants()

    def _step_send(self, td: TensorDictBase) -> None:
        self._check_batch(td)
        mask = td.get(STEP, None)
        self._sent = td
        self._running = None
        if mask is None or bool(mask.any()):
            self._running = self._programs.step(*self._inputs(td))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        outputs, self._running = self._running, None
        if outputs is None:
            outputs = self._programs.step(*self._inputs(td))
        return self._out(td.batch_size, outputs)

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        """Step all rows and keep what was there in those ``mask`` leaves out; their reward is 0."""
        if bool(mask.all()):
            return self._computed_next(td)
        if not bool(mask.any()):
            self._state_in(td)  # which brings it into the env's own layout
            return self._skipped_next(td).clone()
        skipped = self._skipped_next(td)
        following = self._computed_next(td)
        for path, value in leaves(following):
            key = as_key(path)
            following.set(key, rules.choose(mask, value, skipped.get(key)))
        return following

    def _advance_send(self, td: TensorDictBase) -> None:
        if td.get(STEP, None) is not None or td.get("next", None) is not None:
            self._step_send(td)
            self._advancing = None
            return
        self._check_batch(td)
        self._sent = td
        self._advancing = self._programs.advance(*self._inputs(td))

    def _advance_recv(self) -> tuple[TensorDictBase, TensorDictBase]:
        outputs, self._advancing = self._advancing, None
        if outputs is None:
            return super()._advance_recv()
        td = self._sent
        data = self._attach_next(td, self._out(td.batch_size, outputs[0]))
        fresh = self._out(td.batch_size, outputs[1])
        return data, self.step_mdp(data).update(fresh)

    # ------------------------------------------------------------------------------ many steps

    def unroll(
        self,
        td: TensorDictBase,
        steps: int,
        policy: Any = None,
        *,
        record_state: bool = False,
    ) -> tuple[TensorDict, TensorDict]:
        """Take ``steps`` steps as one program, new episodes begun inside.

        Args:
            td: root to start from: ``state``, observation, done flags; what is done begins anew.
            steps: length of the run.
            policy: None for random actions, a `JaxPolicy`, or what `compile_policy` gave. What they draw
                comes from the env's seed.
            record_state: record ``state`` at root and next of every step, as `rollout` does.

        Returns:
            ``(data, td_next)``: transitions of batch size (*batch, steps), which lie time-major in
            memory, and the root after the last step, from which the next call goes on.

        Raises:
            PolicyError: (a TypeError) ``policy`` is of another kind.
            TranslationError: (a NotImplementedError) the policy cannot be translated.
        """
        return unroll(self, td, steps, policy, record_state=record_state)

    def _fast_rollout(
        self, root: TensorDictBase, steps: int, policy: Any, act: Any
    ) -> TensorDictBase | None:
        if not is_compilable(policy):
            return None
        return self.unroll(root, steps, policy, record_state=True)[0]

    def _fast_episode(
        self, root: TensorDictBase, steps: int, policy: Any, act: Any
    ) -> TensorDictBase | None:
        return unroll_until(self, root, steps, policy, "any") if is_compilable(policy) else None

    def _fast_episodes(
        self, root: TensorDictBase, steps: int, policy: Any, act: Any
    ) -> TensorDictBase | None:
        return unroll_until(self, root, steps, policy, "all") if is_compilable(policy) else None

    # ------------------------------------------------------------------------------ transforms

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        from bridges.fused import fuse

        return fuse(self, transforms)

    # ------------------------------------------------------------------------------------ state

    def reseed(self, td: TensorDictBase) -> TensorDictBase:
        """Give the rows of ``td`` new keys, so that copies of one state part ways; returns ``td``."""
        state = self._programs.reseed(self._state_in(td), self._next_key())
        named = {("state", *path): leaf for path, leaf in to_torch(state).items()}
        return td.update(self._named(td.batch_size, named))

    def unpack(self, state: TensorDictBase) -> TensorDict:
        """Give a packed state as named views: writing a view writes the state.

        Args:
            state: ``td["state"]`` in the packed layout, batch size (*batch,).

        Returns:
            Nested TensorDict by field name, in the dtypes of the buffers: bools and small integers
            as int32, uint32 (keys) as int32 of the same bits, 64-bit integers as pairs of those.
        """
        tree = {}
        for field in self._programs.env.packing.fields:
            part = state.get(field.buffer)[..., field.offset : field.offset + field.size]
            part = part.unflatten(-1, field.stored_shape) if field.stored_shape else part[..., 0]
            tree[field.name] = part
        return tensordict_of(nest(tree), state.batch_size, state.device)

    def pack(self, nested: TensorDictBase) -> TensorDict:
        """Build a packed state from what `unpack` gave; the inverse, copied."""
        packing, batch = self._programs.env.packing, nested.batch_size
        dtypes = {"floats": torch_dtype_of(packing.float_dtype), "words": torch.int32}
        parts: dict[str, list[torch.Tensor]] = {
            name: [torch.empty(*batch, 0, dtype=dtype, device=nested.device)]
            for name, dtype in dtypes.items()
        }
        for field in packing.fields:
            leaf = nested.get(as_key(field.name))
            stored = leaf.reshape(*batch, field.size).to(dtypes[field.buffer])
            parts[field.buffer].append(stored)
        built = {name: torch.cat(found, -1) for name, found in parts.items()}
        return TensorDict(built, batch, device=nested.device)
