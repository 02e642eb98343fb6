"""Any `StatelessEnv` as a TensorDict env: compiled over rows, any batch size.

`JaxEnv` decides which program runs when, and what it starts from. What is computed stands in
`programs`, how a batch becomes rows in `handoff`, where gradients flow in `gradients`.

Conventions
    state    everything of a row that a step needs, its PRNG key and elapsed steps included, under
             ``("state", ...)``; nothing but the key for new rows lives in the env. It is made of the
             seed, or where none was set, of a number from torch's global generator at its first use.
    packed   state as two tensors: ``floats`` and int32 ``words``, each (*batch, width).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self, Unpack

import jax
import torch
from tensordict import TensorDict, TensorDictBase

from bridges.dlpack import jax_device_of, to_jit, to_torch, torch_device_of, torch_dtype_of
from bridges.jax.draws import unkeyed_draws
from bridges.jax.gradients import is_wanted
from bridges.jax.handoff import RowEnv
from bridges.jax.memory import warn_if_full
from bridges.jax.policy.inputs import is_compilable
from bridges.jax.programs import BEGIN, NOTHING, Programs, simulator_name
from bridges.jax.sharding import AXIS, Shards
from bridges.jax.specs import action_composite, array_leaf, done_composite
from bridges.jax.steps import ProgramAdvance, ProgramStep
from bridges.jax.transformed_rows import observation_leaves
from bridges.jax.unrolling import unroll, unroll_until
from envkit import rules
from envkit.data.arguments import as_int, require_tensordict
from envkit.data.paths import Key, Path, as_key, tensordict_of
from envkit.data.results import EnvData
from envkit.data.transition import collect_reset_masks, leaves
from envkit.env.base import EnvBase
from envkit.env.input_checks import require_actions
from envkit.env.options import EnvOptions
from envkit.env.pending import LocalStep, Pending
from envkit.env.policy import PolicyLike
from envkit.env.seeding import checked_seed, drawn_seed
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientError,
    MissingKeyError,
)
from envkit.functional import BatchedEnv, ResetMode, StatelessEnv, TimeLimit
from envkit.rules import STEP
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import Destination, Device
from envkit.transforms.core.base import Transform

__all__ = ["JaxEnv"]


class JaxEnv(RowEnv):
    """A stateless JAX environment behind the TensorDict interface.

    Args:
        env: pure ``reset`` and ``step`` of one environment.
        device: where torch data and JAX arrays are; None takes the CPU, or the first of ``devices``.
        devices: JAX devices (or torch's names of them) over which rows are spread evenly. Data
            stays on ``device``. What a policy draws in `unroll` depends on how many there are, all else does not.
        requires_grad: let torch gradients flow from state, observation and reward of a step to the state
            and the action that it was given. They are computed by JAX, and only where autograd
            records and an input requires grad. Otherwise what is returned has no graph.
        episode_length: truncate episodes after this many steps; None never does.
        reset_mode: where episodes begin: "fresh" draws each anew, "pool" takes one of ``pool_size``
            beginnings, "cached" the one of the row's first episode. All cost the same.
        pool_size: see ``reset_mode``.
        cache_clear_frequency: forget all that JAX has compiled, in this process, after this many steps, as
            the reference API does by default; False never does.
        state_layout: "packed" (two tensors) or "nested" (one tensor a leaf, slower). Data of
            either layout is accepted as input.
        categorical_action_encoding: discrete actions as integers instead of one-hot.
        **options: of every env, see `EnvOptions`. ``batch_size`` is what `reset` without data produces;
            any other size is accepted too.

    Envs that are equal run the same compiled programs: of the same class, with the same attributes of ``env`` by
    value, the same ``episode_length``, ``reset_mode``, ``pool_size``, ``state_layout`` and ``devices``. The second
    one compiles nothing, at the batch sizes that the first has used. Functions, and objects that are not
    made in Python, count by identity, and so do fused transforms.

    Actions are converted and refused as `envkit.specs.inputs` says. On an accelerator their values are not
    looked at, since each step would wait for the device: there an index out of range or NaN reaches
    ``step``, which makes of it what JAX does. (Looking without waiting is part of the work on CUDA.)

    Attributes:
        traces: how often each program was traced for this env, by name.

    Raises:
        ArgumentError: unknown ``state_layout``, or ``cache_clear_frequency`` is no number of steps.
    """

    _batch_locked = False
    leaves_torch = True
    _passes_by = EnvBase._passes_by | {"_step", "_reset"}
    _steps_since_clear = 0
    _key: jax.Array | None = None  # where keys for new rows come from; None is not seeded yet

    def __init__(
        self,
        env: StatelessEnv,
        *,
        device: Device | None = None,
        devices: Sequence[Any] | None = None,
        requires_grad: bool = False,
        episode_length: int | None = None,
        reset_mode: ResetMode = "fresh",
        pool_size: int = 64,
        cache_clear_frequency: int | bool = False,
        state_layout: str = "packed",
        categorical_action_encoding: bool = False,
        **options: Unpack[EnvOptions],
    ):
        if state_layout not in ("packed", "nested"):
            raise ArgumentError(
                f"state_layout is {state_layout!r}, but must be 'packed' or 'nested'."
            )
        shards = None if devices is None else Shards(devices)
        if device is None:
            device = "cpu" if shards is None else torch_device_of(shards.devices[0])
        device = torch.device(device)
        super().__init__(device=device, **options)
        if shards is not None:
            shards.check(self.numel(), device, requires_grad=requires_grad)
        self.requires_grad = requires_grad
        self.state_layout = state_layout
        self.episode_length = episode_length
        self.categorical_action_encoding = categorical_action_encoding
        self.cache_clear_frequency = _clearing(cache_clear_frequency)
        limited = TimeLimit(env, episode_length)
        axis = None if shards is None else AXIS
        rows = BatchedEnv(limited, reset_mode=reset_mode, pool_size=pool_size, axis=axis)
        self._programs = Programs(rows, packed=state_layout == "packed", shards=shards)
        jax_device_of(device)  # or say now that JAX does not see it
        warn_if_full(device)
        self._declare()
        self._root_paths = tuple(observation_leaves(rows.template[1]))

    @property
    def traces(self) -> dict[str, int]:
        """How often each program was traced, by name."""
        return dict(self._programs.traces)

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move specs and future computation to a device that JAX sees too; returns self."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        if device is not None and device != self.device and self._programs.shards is not None:
            raise ArgumentError(
                f"this env is spread over several devices and cannot move to {device}. Build another one, "
                "with the devices it shall have."
            )
        if device is not None and self._key is not None:
            self._key = jax.device_put(self._key, jax_device_of(device))
        return super().to(*args, **kwargs)  # type: ignore[return-value]

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
        self.reward_spec = Unbounded((*batch, 1), device=device, dtype=torch.float32)
        self.done_spec = done_composite(batch, device)

    def _state_like(self) -> dict[Path, Any]:
        packing = self._programs.env.packing
        if self.state_layout == "packed":
            like = jax.eval_shape(packing.pack, packing.template)
            return {(name,): buffer for name, buffer in like.items()}
        return jax.eval_shape(self._programs.name_leaves, packing.template)

    # ------------------------------------------------------------------------------------ calls

    def _next_key(self) -> jax.Array:
        if self._key is None:
            self._set_seed(drawn_seed())
        self._key, now = jax.random.split(self._key)
        return now

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            raise ArgumentError(
                "a stateless env needs a seed: set_seed(0), say. None makes no key."
            )
        device = jax_device_of(self.device or "cpu")
        self._key = jax.device_put(_key_of(checked_seed(seed)), device)

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        if kwargs:
            raise ArgumentError(
                f"a stateless env takes no reset keywords, but got {sorted(kwargs)}. A seed is set by "
                "set_seed(3), what to start from is passed in the TensorDict."
            )
        shape = self.batch_size if td is None else td.batch_size
        if td is None or td.get("state", None) is None:
            return self._out(shape, to_torch(self._kept(self._begun(shape))))
        masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        mask = masks.get((), torch.ones(shape, dtype=torch.bool, device=self.device))
        given = to_jit((self._state_in(td), self._mask_in(mask)), copy=False, detach=True)
        # No gradient is lost: rows that are not selected keep what ``td`` holds, graph included.
        outputs = self._programs.restart(*given, self._constants(shape, mask))
        return self._out(shape, to_torch(self._kept(outputs)))

    def _begun(self, shape: torch.Size) -> dict[str, Any]:
        """Begin an episode in every row.

        A program that resets takes long to compile. So `advance` does it where that is compiled, or is about to
        be, and else `restart`: both reset in the same loop, bit for bit.
        """
        size, constants = self._size(shape.numel()), self._constants(shape)
        inputs = to_torch(self._programs.unstarted(size, self._next_key(), constants))
        state, action, memory = to_jit(inputs, copy=False)
        if size in self._programs.advancing:
            return self._programs.advance(state, action, memory, constants, BEGIN)[1]
        every = to_jit(torch.ones(size, dtype=torch.bool, device=self.device), copy=False)
        return self._programs.restart(state, every, constants)

    def _inputs(self, td: TensorDictBase) -> tuple[Any, ...]:
        return self._state_in(td), self._action_in(td), self._memory_in(td)

    def _count_steps(self, steps: int) -> None:
        """Clear the caches of JAX now and then, if that was asked for."""
        if not self.cache_clear_frequency:
            return
        self._steps_since_clear += steps
        if self.cache_clear_frequency <= self._steps_since_clear:
            self._steps_since_clear = 0
            jax.clear_caches()

    def _make_step(self, td: TensorDictBase, *, advance: bool) -> Pending:
        self._check_batch(td)
        mask = td.get(STEP, None)
        mask = None if mask is None else rules.step_mask(mask, td.batch_size)
        if self._overrides(_PROGRAM) or not (mask is None or bool(mask.any())):
            return LocalStep(self, td, advance)
        if self.run_type_checks:
            require_actions(td, self.full_action_spec)
        inputs = self._inputs(td)
        if advance and self._resets_in_program(td, inputs):
            return ProgramAdvance(self, td, True, inputs)
        return ProgramStep(self, td, advance, inputs, mask)

    def _resets_in_program(self, td: TensorDictBase, inputs: tuple[Any, ...]) -> bool:
        """Say whether one program may make a step and the reset after it.

        Not with a mask or preset outcomes, which decide what is done; nor with a graph, so that one
        backward program serves every kind of step.
        """
        is_free = td.get(STEP, None) is None and td.get("next", None) is None
        return is_free and not (self.requires_grad and is_wanted(inputs))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        mask = td.get(STEP, None)
        mask = None if mask is None else rules.step_mask(mask, td.batch_size)
        step = ProgramStep(self, td, False, self._inputs(td), mask).begin()
        return self._out(td.batch_size, step.running.result())

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if not bool(mask.any()):
            self._state_in(td)  # which brings it into the env's own layout
            return self._skipped_next(td).clone()
        return self._kept_where_skipped(td, mask, self._computed_next(td))

    def _kept_where_skipped(
        self, td: TensorDictBase, mask: torch.Tensor, following: TensorDictBase
    ) -> TensorDictBase:
        """Keep what was there in rows that ``mask`` leaves out; their reward is 0."""
        if bool(mask.all()):
            return following
        skipped = self._skipped_next(td)
        for path, value in leaves(following):
            key = as_key(path)
            following.set(key, rules.choose(mask, value, skipped.get(key)))
        return following

    def _step_last(self, td: TensorDictBase) -> TensorDictBase:
        """Step by the program that has made the steps before, so that none is compiled for this one."""
        if not self._steps_by_itself or self.run_type_checks:
            return self.step(td)
        self._check_batch(td)
        inputs = self._inputs(td)
        if not self._resets_in_program(td, inputs):
            return self._make_step(td, advance=False).begin().recv()
        return ProgramAdvance(self, td, True, inputs, follows=NOTHING).begin().recv()[0]

    # ------------------------------------------------------------------------------ many steps

    def unroll(
        self,
        td: TensorDictBase,
        steps: int,
        policy: PolicyLike = None,
        *,
        record_state: bool = False,
    ) -> tuple[EnvData, EnvData]:
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
            ArgumentError: ``steps`` is no integer above 0.
            DataTypeError: ``td`` is no TensorDict.
            PolicyError: (a TypeError) ``policy`` is of another kind.
            TranslationError: (a NotImplementedError) the policy cannot be translated.
            FusionError: (a NotImplementedError) a subclass steps or resets in its own way.
            GradientError: gradients would be asked for, see `requires_grad`.
        """
        require_tensordict("td", td)
        steps = as_int("steps", steps, least=1, meaning="the number of steps to take")
        self._require_no_override(draws=policy is None)
        if self._gives_gradients(td, policy):
            raise GradientError(
                "no gradient flows through unroll, but the env has requires_grad=True, and the policy or "
                "the data to start from requires grad. Use rollout(steps, break_when_any_done=False), or "
                "call unroll under torch.no_grad()."
            )
        self._count_steps(steps)
        return unroll(self, td, steps, policy, record_state=record_state)

    def _gives_gradients(self, td: TensorDictBase, policy: Any) -> bool:
        """Say whether a run from ``td`` must be made of steps with a graph."""
        if not (self.requires_grad and torch.is_grad_enabled()):
            return False
        given = [leaf for _, leaf in leaves(td) if isinstance(leaf, torch.Tensor)]
        if isinstance(policy, torch.nn.Module):
            given.extend(policy.parameters())
        return is_wanted(given)

    def _expect_run(self, stop: rules.Stop, policy: Any) -> None:
        may_keep_graph = self.requires_grad and torch.is_grad_enabled()
        steps = self._steps_by_itself and not (is_compilable(policy) or may_keep_graph)
        if stop == "never" and steps:
            self._programs.advancing.add(self._size(self.numel()))

    def _fast_rollout(
        self, stop: rules.Stop, root: TensorDictBase, steps: int, policy: Any, act: Any
    ) -> TensorDictBase | None:
        if not is_compilable(policy) or self._gives_gradients(root, policy):
            return None
        if stop == "never":
            return self.unroll(root, steps, policy, record_state=True)[0]
        if self._programs.shards is not None:
            return None
        self._count_steps(steps)
        return unroll_until(self, root, steps, policy, stop)

    # ------------------------------------------------------------------------------ transforms

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        from bridges.jax.fusing import fuse

        return fuse(self, transforms)

    # ------------------------------------------------------------------------------------ state

    def get_extra_state(self) -> dict[str, Any]:
        """Give what a state dict holds beside parameters: where the random numbers of this env are.

        The states of rows are in the data. With both, a run goes on as if it had not been cut.
        """
        generator = self._action_generator
        return {
            "key": to_torch(self._key).clone(),
            "actions": None if generator is None else generator.get_state(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_extra_state` gave."""
        key = to_jit(state["key"], copy=True)
        self._key = jax.device_put(key, jax_device_of(self.device or "cpu"))
        self._action_generator = None
        if state["actions"] is not None:
            self._action_generator = torch.Generator(self.device or "cpu")
            self._action_generator.set_state(state["actions"])

    def reseed(self, td: TensorDictBase) -> EnvData:
        """Give the rows of ``td`` new keys, so that copies of one state part ways; returns ``td``."""
        reseed = self._start(self._programs.reseed, (self._state_in(td),), (self._next_key(),))
        named = {("state", *path): leaf for path, leaf in reseed.result().items()}
        return td.update(self._named(td.batch_size, named))

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


def _key_of(seed: int) -> jax.Array:
    """Make a key of a seed: other seeds, other keys. JAX alone would drop the upper 32 bits."""
    upper, lower = divmod(seed, 2**32)
    key = jax.random.PRNGKey(lower)
    return jax.random.fold_in(key, upper) if upper else key


def _require_entries(td: TensorDictBase, keys: Sequence[Key], expected: str) -> None:
    if missing := [key for key in keys if td.get(key, None) is None]:
        raise MissingKeyError(
            f"the TensorDict has no {', '.join(map(repr, missing))}; it has "
            f"{sorted(map(str, td.keys(True, True)))}. Pass {expected}."
        )


def _clearing(frequency: Any) -> int:
    """Check after how many steps caches are cleared; 0 is never."""
    if frequency is None or frequency is False:
        return 0
    if frequency is True:
        raise ArgumentTypeError(
            "cache_clear_frequency is True, which does not say how often. Pass a number of steps, or "
            "False to keep what is compiled."
        )
    meaning = "the number of steps after which JAX forgets what it compiled, or False for never"
    return as_int("cache_clear_frequency", frequency, least=0, meaning=meaning)


_PROGRAM = frozenset(("_step",))
