"""Any `StatelessEnv` as a TensorDict env, and the same with transforms inside its programs.

`JaxEnv` decides what is declared of an env and how its state is shown; `FusedEnv` what it declares, takes and
gives once transforms are compiled in: what a `TransformedEnv` of them would. Which program runs when is
decided in `stepping`, what fuses in `fusing`.

Conventions
    state      under ``("state", ...)``, packed or leaf by leaf.
    packed     state as two tensors: ``floats`` and int32 ``words``, each (*batch, width).
    memory     entries at the root of the data that transforms read at a step. They go in and out of the
               programs beside the state.
    constants  numbers and tensors of the transforms. They are read anew at every call.
    shared     tensors of the transforms that a program changes. What they are after it is written into
               them as soon as it is called, so that whoever shares them reads the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

import jax
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.arguments import completed, require_tensordict
from envkit.data.paths import Key, Path, as_key, leaf_paths, tensordict_of
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from envkit.functional import (
    StatelessEnv,
)
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import Destination, Device, EnvData
from envkit.specs.devices import as_device, destination
from envkit.transforms.core.base import Transform
from envkit.transforms.core.memory import memory_of
from envkit.transforms.core.wrapper import Wrapper
from envkit_bridges.dlpack import jax_device_of, to_jit, to_torch, torch_device_of, torch_dtype_of
from envkit_bridges.jax.codecs import action_composite, array_leaf, done_composite
from envkit_bridges.jax.compilation import simulator_name
from envkit_bridges.jax.fusing import Fusion, arguments_of, plan_fusion, share, wide_integers
from envkit_bridges.jax.keys import unkeyed_draws
from envkit_bridges.jax.memory import warn_if_full
from envkit_bridges.jax.options import (
    JaxOptions,
    ResetRows,
    chunks_on,
    of_every_env,
    require_sense,
    rows_of,
)
from envkit_bridges.jax.programs import Constants, Programs
from envkit_bridges.jax.rendering import picture, pictures
from envkit_bridges.jax.sharding import AXIS, Shards
from envkit_bridges.jax.stepping import ProgramEnv
from envkit_bridges.jax.tensor_cache import Unchanged
from envkit_bridges.jax.transformed_rows import observation_leaves

__all__ = ["FusedEnv", "JaxEnv"]


class JaxEnv(ProgramEnv):
    """A stateless JAX environment behind the TensorDict interface.

    Args:
        env: pure ``reset`` and ``step`` of one environment.
        device: where torch data and JAX arrays are; None takes the CPU, or the first of ``devices``.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Envs that are equal run the same compiled programs: of the same class, with the same attributes of ``env`` by
    value, the same ``episode_length``, ``reset_mode``, ``pool_size``, ``reset_rows``, ``state_layout``, ``devices``,
    ``metrics``, ``action_repeat``, ``randomize`` and ``randomize_at``. The second one compiles nothing, at the batch sizes that the first has used. Functions, and objects that are not
    made in Python, count by identity, and so do fused transforms.

    Actions are converted and refused as `envkit.specs.inputs` says. On an accelerator their values are not
    looked at, since each step would wait for the device: there an index out of range or NaN reaches
    ``step``, which makes of it what JAX does. (Looking without waiting is part of the work on CUDA.)

    Attributes:
        traces: how often each program was traced for this env, by name.
        drawn_bytes: leaves of the model that ``randomize`` draws, and by how many bytes each makes the state of a
            row larger.

    Raises:
        ArgumentError: unknown ``state_layout``, or ``cache_clear_frequency`` is no number of steps.
    """

    def __init__(
        self,
        env: StatelessEnv,
        *,
        device: Device | None = None,
        **options: Unpack[JaxOptions],
    ):
        if isinstance(env, type):
            raise ArgumentTypeError(
                f"{type(self).__name__} was given the class {env.__name__}, but takes an object of it. Make one: "
                f"{type(self).__name__}({env.__name__}(), ...)."
            )
        given = completed(JaxOptions, options)
        require_sense(given)
        shards = None if given.devices is None else Shards(given.devices)
        if device is None:
            device = "cpu" if shards is None else torch_device_of(shards.devices[0])
        device = as_device(device)
        super().__init__(device=device, **of_every_env(options))
        if shards is not None:
            shards.check(self.numel(), device, requires_grad=given.requires_grad)
        self.requires_grad = given.requires_grad
        self.state_layout = given.state_layout
        self._shows_metrics = given.metrics
        self.episode_length = given.episode_length
        self.categorical_action_encoding = given.categorical_action_encoding
        self.cache_clear_frequency = given.cache_clear_frequency
        self._reset_rows: ResetRows = given.reset_rows
        rows = rows_of(env, given, device, axis=None if shards is None else AXIS)
        self._unchanged = Unchanged()
        self._programs = Programs(rows, packed=given.state_layout == "packed", shards=shards)
        jax_device_of(device)  # or say now that JAX does not see it
        warn_if_full(device)
        self._declare()
        self._root_paths = tuple(observation_leaves(rows.template[1]))

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move specs and future computation to a device that JAX sees too; returns self."""
        device = destination(*args, **kwargs)
        if device is not None and device != self.device and self._programs.shards is not None:
            raise ArgumentError(
                f"this env is spread over several devices and cannot move to {device}. Build another one, "
                "with the devices it shall have."
            )
        if device is not None:
            jax_device_of(device)  # or say now that JAX does not see it
        super().to(*args, **kwargs)
        rows, chunks = self._programs.env, chunks_on(self.device, self._reset_rows)
        if chunks != rows.chunks:
            self._programs = self._programs.over(rows.with_chunks(chunks))
        return self

    @property
    def _infos(self) -> frozenset[Path]:
        gives_infos = bool(jax.tree.leaves(self._programs.env.template[1].info))
        infos = super()._infos if gives_infos else frozenset()
        if not self._shows_metrics:
            return infos
        return infos | {path for path in self._root_paths if path[0] == "metrics"}

    def _faults(self) -> Iterable[str]:
        return unkeyed_draws(self._programs.env)

    def _told_first(self) -> list[str]:
        return [simulator_name(self._programs.env)]

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
        reward = (*batch, *(rows.reward_shape or (1,)))
        self.reward_spec = Unbounded(reward, device=device, dtype=torch.float32)
        self.done_spec = done_composite(batch, device)

    def _state_like(self) -> dict[Path, Any]:
        packing = self._programs.env.packing
        if self.state_layout == "packed":
            like = jax.eval_shape(packing.pack, packing.template)
            return {(name,): buffer for name, buffer in like.items()}
        return jax.eval_shape(self._programs.name_leaves, packing.template)

    # ------------------------------------------------------------------------------ transforms

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        fusion = plan_fusion(self, transforms)
        return (self, 0) if fusion is None else (FusedEnv(self, fusion), len(fusion.taken))

    # ------------------------------------------------------------------------------------ state

    _own_state_is_needed = True

    def _own_state(self) -> dict[str, Any]:
        """Add the key that new rows are drawn from. The states of rows are in the data."""
        key = None if self._key is None else torch.tensor(self._key, device=self.device)
        return {**super()._own_state(), "key": key}

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        key = state["key"]
        self._key = None if key is None else key.cpu().numpy().copy()

    def reseed(self, td: TensorDictBase) -> EnvData:
        """Give the rows of ``td`` new keys, so that copies of one state part ways; returns ``td``."""
        reseed = self._start(self._programs.reseed, (self._state_in(td),), (self._next_key_in(),))
        named = {("state", *path): leaf for path, leaf in reseed.result().items()}
        return td.update(self._named(td.batch_size, named))

    @property
    def drawn_bytes(self) -> dict[str, int]:
        """What ``randomize`` draws for a row, by name of the leaf, and the bytes of its state that it takes."""
        rows = self._programs.env.env
        return {} if rows.randomization is None else rows.randomization.drawn_bytes(rows)

    def unpack(self, state: TensorDictBase) -> TensorDict:
        """Give a packed state as named views: writing a view writes the state.

        Args:
            state: ``td["state"]`` in the packed layout, batch size (*batch,).

        Returns:
            Nested TensorDict by field name, in the dtypes of the buffers: bools and small integers
            as int32, uint32 (keys) as int32 of the same bits, 64-bit integers as pairs of those.

        Raises:
            DataTypeError: ``state`` is no TensorDict.
            MissingKeyError: (a KeyError) it is no packed state.
        """
        require_tensordict("state", state, 'td["state"], packed')
        fields, tree = self._programs.env.packing.fields, {}
        _require_entries(state, sorted({field.buffer for field in fields}), 'td["state"], packed')
        for field in fields:
            part = state.get(field.buffer)[..., field.offset : field.offset + field.size]
            part = part.unflatten(-1, field.stored_shape) if field.stored_shape else part[..., 0]
            tree[field.name] = part
        return tensordict_of(tree, state.batch_size, state.device)

    def pack(self, nested: TensorDictBase) -> TensorDict:
        """Build a packed state from what `unpack` gave; the inverse, copied.

        Raises:
            DataTypeError: ``nested`` is no TensorDict.
            MissingKeyError: (a KeyError) it lacks a field of the state.
        """
        require_tensordict("nested", nested, 'what env.unpack(td["state"]) gave')
        names = [as_key(field.name) for field in self._programs.env.packing.fields]
        _require_entries(nested, names, 'what env.unpack(td["state"]) gave')
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

    # -------------------------------------------------------------------------------------- pictures

    def render(self, td: TensorDictBase, row: int = 0, **options: Any) -> torch.Tensor:
        """Draw one row of stored states with the library's own renderer.

        Args:
            td: data with "state", of any batch size.
            row: which one, counted through the batch.
            **options: for the renderer, such as ``height``, ``width`` and ``camera`` of MuJoCo's.

        Returns:
            uint8 (H, W, 3).

        Raises:
            MissingKeyError: (a KeyError) ``td`` has no state.
            ArgumentError: there is no such row.
            UnsupportedError: (a NotImplementedError) the env cannot be drawn.
            OptionError: (a TypeError) its renderer does not know a keyword.
            RenderingError: (a RuntimeError) nothing works here that draws without a display.
        """
        return picture(self, td, row, **options)

    def render_rollout(
        self, td: TensorDictBase, row: int = 0, every: int = 1, **options: Any
    ) -> torch.Tensor:
        """Draw the roots of one row of a rollout; see `render`.

        Args:
            td: data with "state", batch size (*batch, T).
            row: which one, counted through the batch without time.
            every: draw one step of so many.
            **options: see `render`.

        Returns:
            uint8 (T', 3, H, W), T' = ceil(T / every).
        """
        return pictures(self, td, row, every, **options)


class FusedEnv(Wrapper, JaxEnv):
    """A stateless env whose programs include transforms.

    Keys for new rows come from ``base_env``, so it and envs made of it draw from one sequence.

    Args:
        env: the env without them.
        fusion: what is fused, planned for ``env``.
    """

    base_env: JaxEnv

    def __init__(self, env: JaxEnv, fusion: Fusion):
        transforms, inputs, outputs = fusion.taken, fusion.inputs, fusion.outputs
        Wrapper.__init__(self, env)
        self._batch_size, self._device = env.batch_size, env.device
        self._declared.hold(inputs, outputs)
        self._declared.added_flags = env._declared.added_flags
        self._transforms = transforms
        self._own_books, self._own_infos = fusion.books, fusion.infos
        self._unchanged = Unchanged()
        self._programs = Programs(
            env._programs.env,
            self._transforms,
            packed=env.state_layout == "packed",
            shards=env._programs.shards,
        )
        memory = memory_of(transforms)
        observed = leaf_paths(outputs["full_observation_spec"])
        self._memory_paths = tuple(memory)
        self._state_paths = env._state_paths
        self._root_paths = tuple(
            path for path in dict.fromkeys([*observed, *memory]) if path[0] != "state"
        )
        self._wide = wide_integers(outputs)

    def _after_init(self, spec_locked: bool) -> None:
        self._declared.is_locked = True

    @property
    def _books(self) -> frozenset[Path]:
        return self._own_books

    @property
    def _infos(self) -> frozenset[Path]:
        return self._own_infos

    def _next_key(self) -> np.ndarray:
        return self.base_env._next_key()

    def _set_seed(self, seed: int | None) -> None:
        self.base_env._set_seed(seed)

    def _constants(self, shape: torch.Size, mask: torch.Tensor | None = None) -> Constants:
        each = arguments_of(self._transforms, self._unchanged, self.device)
        if not any(transform.state() for transform in self._transforms):
            return each, None, self._model_given()
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=self.device)
        return each, to_jit(self._mask_in(mask), copy=True), self._model_given()

    def _kept(self, outputs: dict[str, Any]) -> dict[str, Any]:
        shared = to_torch(outputs.pop("shared", ()))
        for transform, after in zip(self._transforms, shared, strict=bool(shared)):
            before = transform.state()
            for name, value in after.items():
                share(before[name], value, self._unchanged)
        return outputs

    def _model_given(self) -> Any:
        return self.base_env._model_given()

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        own = len(self._transforms)
        fusion = plan_fusion(self.base_env, [*self._transforms, *transforms])
        more = 0 if fusion is None else len(fusion.taken) - own
        return (FusedEnv(self.base_env, fusion), more) if fusion and more > 0 else (self, 0)


def _require_entries(td: TensorDictBase, keys: Sequence[Key], expected: str) -> None:
    if missing := [key for key in keys if td.get(key, None) is None]:
        raise MissingKeyError(
            f"the TensorDict has no {', '.join(map(repr, missing))}; it has "
            f"{sorted(map(str, td.keys(True, True)))}. Pass {expected}."
        )
