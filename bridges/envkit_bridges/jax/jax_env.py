"""Any `StatelessEnv` as a TensorDict env, and the same with transforms inside its programs.

`JaxEnv` decides what is declared of an env, what a reset and a step are, and when a run is one program. `FusedEnv`
decides the same with transforms compiled in, equal to a `TransformedEnv` of them. Which those
are is planned from specs (`_plan_fusion`). How data gets to programs and back is in `engine`, a run of many steps in
`unrolling`.

Conventions
    state      everything of a row that a step needs, its PRNG key and elapsed steps included, under ``("state", ...)``,
               packed or leaf by leaf. Only the key for new rows lives in the env. It is made of the seed, or
               where none was set, of a number from torch's global generator at its first use.
    packed     state as two tensors: ``floats`` and int32 ``words``, each (*batch, width).
    memory     entries at the root of the data that transforms read at a step. They go in and out of the
               programs beside the state.
    constants  numbers and tensors of the transforms. They are read again at every call.
    shared     tensors of the transforms that a program changes. Their values after it are written into
               them as soon as it is called, so that an env that shares them reads the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import jax
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import require_tensordict
from envkit.data.merging import merge_rows
from envkit.data.paths import Key, Path, as_key, as_path, leaf_paths, tensordict_of
from envkit.data.resets import collect_reset_masks
from envkit.data.transition import carry, leaves
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.input_checks import require_actions
from envkit.env.policy import PolicyLike
from envkit.env.runs import Begun, Draws, Record, Run, Runs
from envkit.env.seeding import checked_seed, drawn_seed
from envkit.env.tickets import Ticket
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientError,
    MissingKeyError,
    ResetMaskError,
)
from envkit.functional import BatchedEnv, StatelessEnv, name_of, require_action_masks
from envkit.rules import DONE_LEAVES
from envkit.specs import Composite
from envkit.specs.annotations import (
    Destination,
    Device,
    EnvData,
    as_device,
    destination,
)
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.kept_memory import memory_of, places_of
from envkit.transforms.core.spec_hooks import books_of, infos_behind
from envkit.transforms.core.transform import Transform
from envkit.transforms.core.wrapper import Wrapper
from envkit_bridges.dlpack import jax_device_of, torch_device_of, torch_dtype_of
from envkit_bridges.jax.codecs import (
    action_composite,
    action_path,
    array_leaf,
    done_composite,
    grouped_composite,
    reward_composite,
)
from envkit_bridges.jax.compilation import simulator_name
from envkit_bridges.jax.device_memory import warn_if_full
from envkit_bridges.jax.engine import ProgramEngine, Settings
from envkit_bridges.jax.fused_transforms import observation_leaves
from envkit_bridges.jax.gradients import is_wanted
from envkit_bridges.jax.keys import key_of, row_keys, split, unkeyed_draws
from envkit_bridges.jax.options import (
    JaxOptions,
    ResetRows,
    chunks_on,
    of_every_env,
    parsed_options,
    rows_of,
)
from envkit_bridges.jax.policy.inputs import is_compilable
from envkit_bridges.jax.programs import NOTHING, Programs
from envkit_bridges.jax.rendering import picture, pictures
from envkit_bridges.jax.sharding import AXIS, Shards
from envkit_bridges.jax.side_effects import frozen_values
from envkit_bridges.jax.unrolling import Unrolling, until_spread


class JaxEnv(EnvBase):
    """Give a stateless JAX environment the TensorDict interface, for any batch size.

    Args:
        env: pure ``reset`` and ``step`` of one environment.
        device: where torch data and JAX arrays are; None takes the CPU, or the first of ``devices``.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Envs that are equal run the same compiled programs: where ``env`` is by ``==`` and has a hash, as static arguments of
    `jax.jit` must (e.g. a frozen dataclass), and all options that change a program are. The second one compiles nothing,
    at the batch sizes that the first has used. Envs of the same name and options are equal, copies share programs too.
    An ``env`` of which an attribute is set to something else is compiled again. Arrays and dicts in attributes are not
    looked into: give the env another one, and do not write into the one that it has.

    Actions are converted and refused as `envkit.specs.inputs` says. On an accelerator their values are not
    looked at, since each step would wait for the device: there an index out of range or NaN reaches
    ``step``, which makes of it what JAX does. (Looking without waiting is part of the work on CUDA.)

    Attributes:
        traces: how often each program was traced for this env, by name.
        drawn_bytes: leaves of the model that ``randomize`` draws, and by how many bytes each makes the state of a
            row larger.

    Raises:
        ArgumentError: unknown ``state_layout``, or ``cache_clear_frequency`` is no number of steps.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from envkit import Box, JaxEnv, Timestep
        >>> class Walk:
        ...     action_space = Box(-1.0, 1.0, (1,))
        ...
        ...     def reset(self, key):
        ...         place = jax.random.uniform(key, (1,))
        ...         return place, Timestep(place)
        ...
        ...     def step(self, state, action):
        ...         place = state + action
        ...         return place, Timestep(place, reward=-jnp.abs(place).sum())
        >>> env = JaxEnv(Walk(), batch_size=[1000])
        >>> data = env.rollout(20)
        >>> data["next", "observation"].shape, data["next", "reward"].shape
        (torch.Size([1000, 20, 1]), torch.Size([1000, 20, 1]))
    """

    cache_clear_frequency: int
    _batch_locked = False
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {"_step", "_reset"}
    _steps_since_clear = 0
    _key: np.ndarray | None = None  # where keys for new rows come from; None is not seeded yet
    _engine: ProgramEngine

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
        settings = parsed_options(options)
        shards = None if settings.devices is None else Shards(settings.devices)
        if device is None:
            device = "cpu" if shards is None else torch_device_of(shards.devices[0])
        device = as_device(device)
        super().__init__(device=device, **of_every_env(options))
        if shards is not None:
            shards.check(self.numel(), device, requires_grad=settings.requires_grad)
        self.state_layout = settings.state_layout
        self._shows_metrics = settings.metrics
        self.episode_length = settings.episode_length
        self.categorical_action_encoding = settings.categorical_action_encoding
        self.cache_clear_frequency = settings.cache_clear_frequency
        self._reset_rows: ResetRows = settings.reset_rows
        rows = rows_of(env, settings, device, axis=None if shards is None else AXIS)
        programs = Programs(rows, packed=settings.state_layout == "packed", shards=shards)
        of_steps = Settings(
            self.batch_size, settings.requires_grad, settings.categorical_action_encoding
        )
        shown = observation_leaves(rows.template[1])
        infos = jax.tree_util.tree_flatten_with_path(rows.template[1].info)[0]
        observed = {**shown, **{name_of(path): leaf for path, leaf in infos}}
        masks = getattr(env, "action_masks", ())
        require_action_masks(masks, rows.action_space, observed, simulator_name(rows))
        self._engine = ProgramEngine(programs, of_steps, device, shown)
        jax_device_of(device)  # or say now that JAX does not see it
        warn_if_full(device)
        self._declare()

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move specs and future computation to a device that JAX sees too; returns self."""
        device = destination(*args, **kwargs)
        engine = self._engine
        if device is not None and device != self.device and engine.programs.shards is not None:
            raise ArgumentError(
                f"this env is spread over several devices and cannot move to {device}. Build another one, "
                "with the devices it shall have."
            )
        if device is not None:
            jax_device_of(device)  # or say now that JAX does not see it
        super().to(*args, **kwargs)
        rows, chunks = engine.programs.env, chunks_on(self.device, self._reset_rows)
        if chunks != rows.chunks:
            engine.programs = engine.programs.over(rows.with_chunks(chunks))
        engine.device = self.device
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow from what steps return to what they were given."""
        return self._engine.settings.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._engine.settings.requires_grad = value

    @property
    def traces(self) -> dict[str, int]:
        """How often each program was traced for this env, by name."""
        return dict(self._engine.programs.traces)

    def _find_facts(self) -> Facts:
        rows = self._engine.programs.env
        gives_infos = bool(jax.tree.leaves(rows.template[1].info))
        facts = super()._find_facts()
        infos = facts.infos if gives_infos else frozenset[Path]()
        if self._shows_metrics:
            infos |= {path for path in self._engine.shown if path[0] == "metrics"}
        masks = ((as_key(action_path(action)), as_key(mask)) for action, mask in rows.action_masks)
        return replace(
            facts,
            infos=infos,
            action_masks=tuple(masks),
            unrecorded=("state",),
            leaves_torch=True,
            steps_have_effects=None,
        )

    def _faults(self) -> Iterable[str]:
        env = self._engine.programs.env
        return [*unkeyed_draws(env), *frozen_values(env)]

    def _repr_arguments(self) -> list[str]:
        return [simulator_name(self._engine.programs.env)]

    # ---------------------------------------------------------------------------------- declaration

    def _declare(self) -> None:
        rows, batch, device = self._engine.programs.env, self.batch_size, self.device
        groups = rows.groups
        state, observation = (
            Composite(shape=batch, device=device),
            grouped_composite(groups, batch, device),
        )
        for path, like in self._engine.state_like().items():
            state[("state", *path)] = array_leaf(like.shape, like.dtype, batch, device)
        for path, like in observation_leaves(rows.template[1]).items():
            if path[0] in groups and path[1:] in _FLAGS:
                continue
            observation[as_key(path)] = array_leaf(like.shape, like.dtype, batch, device)
        for key, leaf in state.items(True, True):
            observation[key] = leaf.clone()
        self.state_spec = state
        self.observation_spec = observation
        self.full_action_spec = action_composite(
            rows.action_space,
            batch,
            device,
            categorical=self.categorical_action_encoding,
            groups=groups,
        )
        self.reward_spec = reward_composite(rows.reward_shape, batch, device, groups)
        self.done_spec = done_composite(batch, device, groups)

    # ------------------------------------------------------------------------------ resets

    def _next_key(self) -> np.ndarray:
        """Return a key that no program was given before."""
        key = self._key
        if key is None:
            key = key_of(drawn_seed())
        self._key, now = split(key)
        return now

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            raise ArgumentError(
                "seed is None, but a stateless env needs a number, from which it makes a key. Call set_seed(0), for example."
            )
        self._key = key_of(checked_seed(seed))

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        if kwargs:
            raise ArgumentError(
                f"a stateless env takes no reset keywords, but got {sorted(kwargs)}. A seed is set by "
                "set_seed(3), what to start from is passed in the TensorDict."
            )
        shape = self.batch_size if td is None else td.batch_size
        if td is None or td.get("state", None) is None:
            return self._engine.begin_rows(shape, self._next_key())
        masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        mask = masks.get((), torch.ones(shape, dtype=torch.bool, device=self.device))
        if masks and () not in masks:
            mask = self._wholly_selected(masks)
        return self._engine.restart(td, mask)

    def _wholly_selected(self, masks: Mapping[Path, torch.Tensor]) -> torch.Tensor:
        """Return which rows the masks of groups select, all agents of each.

        Raises:
            ResetMaskError: they select some agents of a row.
        """
        each = torch.cat([mask.flatten(len(self.batch_size)) for mask in masks.values()], -1)
        mask = each.all(-1)
        if len(masks) < len(self._engine.groups) or not torch.equal(mask, each.any(-1)):
            raise ResetMaskError(
                f"the reset masks of {sorted(map(as_key, masks), key=str)} select some agents, but a game cannot be reset in "
                "part. Write '_reset' at the root, of the batch size, or set the masks of all agents alike."
            )
        return mask

    # ------------------------------------------------------------------------------- steps

    def _count_steps(self, steps: int) -> None:
        """Clear the caches of JAX now and then, if that was asked for."""
        self._steps_since_clear += steps
        if self.cache_clear_frequency <= self._steps_since_clear:
            self._steps_since_clear = 0
            jax.clear_caches()

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        td, mask = ticket.td, ticket.mask
        if self._overrides(_PROGRAM) or not (mask is None or bool(mask.any())):
            super()._prepare_step(ticket, is_ahead=is_ahead)
            return
        if self.run_type_checks:
            require_actions(td, self.full_action_spec)
        work = ticket.work = self._engine.prepare(td, mask)
        ticket.restarts = not work.has_graph and self._may_restart(ticket)

    def _begin_step(self, ticket: Ticket) -> None:
        if ticket.work is None:
            return
        if self.cache_clear_frequency:
            self._count_steps(1)
        shape, restarts = ticket.td.batch_size, ticket.restarts
        self._engine.begin(ticket.work, shape, ticket.mask, restarts=restarts)

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        td, mask, work = ticket.td, ticket.mask, ticket.work
        if work is None:
            return super()._finish_step(ticket)
        following: TensorDictBase = self._engine.finish(work, td.batch_size)
        self._engine.require_legal(td, following, mask)
        if not ticket.restarts:
            following = self._accepted(following, td)
        return following if mask is None else self._kept_where_skipped(td, mask, following)

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        fresh = ticket.work.fresh
        if ticket.mask is None:
            return carry(data, (self._declared.table or self._table).carrying, fresh)
        return merge_rows(self.step_mdp(data), fresh, {(): ticket.mask})

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        mask = td.get(rules.STEP, None)
        mask = None if mask is None else rules.step_mask(mask, td.batch_size)
        work = self._engine.prepare(td, mask)
        if self.cache_clear_frequency:
            self._count_steps(1)
        self._engine.begin(work, td.batch_size, mask, restarts=False)
        following = self._engine.finish(work, td.batch_size)
        self._engine.require_legal(td, following, mask)
        return following

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if not bool(mask.any()):
            self._engine.state(td)  # which brings it into the env's own layout
            return self._skipped_next(td).clone()
        return self._kept_where_skipped(td, mask, self._computed_next(td))

    def _kept_where_skipped(
        self, td: TensorDictBase, mask: torch.Tensor, following: TensorDictBase
    ) -> TensorDictBase:
        """Replace the results in rows that ``mask`` leaves out by what was there; their reward is 0."""
        if bool(mask.all()):
            return following
        return merge_rows(self._skipped_next(td), following, {(): mask})

    def _step_last(self, td: TensorDictBase) -> TensorDictBase:
        """Step by the program that has made the steps before, so that none is compiled for this one."""
        if not self._steps_by_itself or self.run_type_checks:
            return self.step(td)
        ticket = self._make_step(td, advance=True)
        if ticket.restarts:
            ticket.work.follows = NOTHING
        self._begin_step(ticket)
        return self._stepped(ticket)

    # --------------------------------------------------------------------------- many steps

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
            td: root to start from: ``state``, observation, done flags; what is done begins again.
            steps: length of the run.
            policy: None for random actions, a `JaxPolicy`, or what `compile_policy` gave. Their draws
                come from the env's seed.
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

        Example:
            >>> from envkit import PendulumJaxEnv
            >>> env = PendulumJaxEnv(batch_size=[4])
            >>> data, root = env.unroll(env.reset(), 3)
            >>> data["next", "reward"].shape, root["th"].shape
            (torch.Size([4, 3, 1]), torch.Size([4]))
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
        return self._begun(td, steps, policy, record_state=record_state)()

    def _begun(
        self,
        td: TensorDictBase,
        steps: int,
        policy: PolicyLike,
        *,
        record_state: bool,
        draws: Draws | None = None,
    ) -> Begun:
        if self.cache_clear_frequency:
            self._count_steps(steps)
        run = Unrolling(self, self._engine, td, policy, self._next_key)
        return run.begin(steps, record_state=record_state, draws=draws or Draws())

    def _gives_gradients(self, td: TensorDictBase, policy: PolicyLike) -> bool:
        """Check whether a run from ``td`` must be made of steps with a graph."""
        if not (self.requires_grad and torch.is_grad_enabled()):
            return False
        given = [leaf for _, leaf in leaves(td) if isinstance(leaf, torch.Tensor)]
        if isinstance(policy, torch.nn.Module):
            given.extend(policy.parameters())
        return is_wanted(given)

    def _runs(self) -> Runs:
        """Return runs as programs."""
        return _JaxRuns(self)

    # ------------------------------------------------------------------------------ transforms

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        fusion = _plan_fusion(self, self._engine, transforms)
        return (self, 0) if fusion is None else (FusedEnv(self, fusion), len(fusion.taken))

    def program_parts(
        self,
    ) -> tuple[BatchedEnv, Sequence[FusableTransform], Sequence[Mapping[str, Any]]]:
        """Return what programs are made of: the env over rows, with the model of now, and its transforms with their constants."""
        each, _, model = self._engine.constants(self.batch_size)
        programs = self._engine.programs
        return programs.env_given(model), programs.transforms, each

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
        """Draw new keys for the rows of ``td``, so that copies of one state part ways; returns ``td``."""
        return td.update(self._engine.reseed(td, self._next_key()))

    @property
    def drawn_bytes(self) -> dict[str, int]:
        """Leaves that ``randomize`` draws for a row, by name of the leaf, and the bytes of its state that it takes."""
        rows = self._engine.programs.env.env
        return {} if rows.randomization is None else rows.randomization.drawn_bytes(rows)

    def unpack(self, state: TensorDictBase) -> TensorDict:
        """Return a packed state as named views: writing a view writes the state.

        Args:
            state: ``td["state"]`` in the packed layout, batch size (*batch,).

        Returns:
            Nested TensorDict by field name, in the dtypes of the buffers: bools and small integers
            as int32, uint32 (keys) reinterpreted as int32, 64-bit integers as pairs of those.

        Raises:
            DataTypeError: ``state`` is no TensorDict.
            MissingKeyError: (a KeyError) it is no packed state.

        Example:
            >>> from envkit import PendulumJaxEnv
            >>> env = PendulumJaxEnv(batch_size=[4])
            >>> root = env.reset()
            >>> named = env.unpack(root["state"])
            >>> bool((named["th"] == root["th"]).all())
            True
        """
        require_tensordict("state", state, 'td["state"], packed')
        fields, tree = self._engine.programs.env.packing.fields, {}
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

        Example:
            >>> from envkit import PendulumJaxEnv
            >>> env = PendulumJaxEnv(batch_size=[4])
            >>> state = env.reset()["state"]
            >>> again = env.pack(env.unpack(state))
            >>> bool((again["floats"] == state["floats"]).all())
            True
        """
        require_tensordict("nested", nested, 'what env.unpack(td["state"]) gave')
        names = [as_key(field.name) for field in self._engine.programs.env.packing.fields]
        _require_entries(nested, names, 'what env.unpack(td["state"]) gave')
        packing, batch = self._engine.programs.env.packing, nested.batch_size
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

    def render(self, td: TensorDictBase, row: int = 0, **options: object) -> torch.Tensor:
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
        return picture(self._engine, td, row, **options)

    def render_rollout(
        self, td: TensorDictBase, row: int = 0, every: int = 1, **options: object
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
        return pictures(self._engine, td, row, every, **options)


class _JaxRuns(Runs):
    """Runs of a stateless env as programs."""

    def __init__(self, env: JaxEnv):
        self._env = env

    def expect(self, stop: rules.Stop, policy: PolicyLike) -> None:
        """Use the program that steps and resets for single steps too, where a rollout needs it anyway."""
        env, engine = self._env, self._env._engine
        may_keep_graph = env.requires_grad and torch.is_grad_enabled()
        steps = env._steps_by_itself and not (is_compilable(policy) or may_keep_graph)
        if stop == "never" and steps:
            engine.programs.advancing.add(engine.size(env.numel()))

    def unbegun_root(self, policy: PolicyLike) -> TensorDict | None:
        """Return one where the program of a run begins episodes from the state alone."""
        env, programs = self._env, self._env._engine.programs
        is_plain = not programs.transforms and programs.shards is None and env.numel()
        if env.run_type_checks or not is_plain or not is_compilable(policy):
            return None
        if env.requires_grad or programs.env.env.randomization is not None:
            return None
        root: Any = env.full_observation_spec.zero().update(env.full_done_spec.one())
        return env._engine.unbegun(root, row_keys(env._next_key(), env.numel()))

    def record(self, run: Run) -> Record:
        """Make a rollout as one program, or as a few where a stop rule is asked between them."""
        env, root, policy = self._env, run.root, run.policy
        if not is_compilable(policy) or env._gives_gradients(root, policy):
            return None
        if run.stop == "never":
            return env.unroll(root, run.steps, policy, record_state=run.record_state)[0]
        if env._engine.programs.shards is not None:
            return until_spread(env, run)
        if env.cache_clear_frequency:
            env._count_steps(run.steps)
        return Unrolling(env, env._engine, root, policy, env._next_key).until(run)

    def is_program(self, policy: PolicyLike) -> bool:
        """Check whether a program can act."""
        return is_compilable(policy) and not (policy is None and self._env._draws_own_actions)

    def begin(self, run: Run) -> Begun:
        """Begin a run, which goes on while others work."""
        return self._env._begun(
            run.root, run.steps, run.policy, record_state=run.record_state, draws=run.draws
        )


class FusedEnv(Wrapper, JaxEnv):  # type: ignore[misc] # a wrapper reads flags of the env inside
    """A stateless env whose programs include transforms.

    Keys for new rows come from ``base_env``, so it and envs made of it draw from one sequence.

    Args:
        env: the env without them.
        fusion: what is fused, planned for ``env``.
    """

    base_env: JaxEnv  # type: ignore[assignment] # only `Wrapper` assigns it, once

    def __init__(self, env: JaxEnv, fusion: _Fusion):
        inputs, outputs = fusion.inputs, fusion.outputs
        Wrapper.__init__(self, env)
        self._batch_size, self._device = env.batch_size, env.device
        self._declared.hold(inputs, outputs)
        self._declared.added_flags = env._declared.added_flags
        self._fusion = fusion
        shown = [*leaf_paths(outputs["full_observation_spec"]), *memory_of(places_of(fusion.taken))]
        self._engine = env._engine.behind(
            fusion.taken,
            [path for path in dict.fromkeys(shown) if path[0] != "state"],
            {**env._engine.wide, **_wide_integers(outputs)},
        )

    def _after_init(self, spec_locked: bool) -> None:
        self._declared.is_locked = True

    def _find_facts(self) -> Facts:
        fusion = self._fusion
        return replace(self.base_env._facts, bookkeeping=fusion.bookkeeping, infos=fusion.infos)

    def _next_key(self) -> np.ndarray:
        return self.base_env._next_key()

    def _set_seed(self, seed: int | None) -> None:
        self.base_env._set_seed(seed)

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        own = self._engine.programs.transforms
        fusion = _plan_fusion(self.base_env, self.base_env._engine, [*own, *transforms])
        more = 0 if fusion is None else len(fusion.taken) - len(own)
        return (FusedEnv(self.base_env, fusion), more) if fusion and more > 0 else (self, 0)


def _require_entries(td: TensorDictBase, keys: Sequence[Key], expected: str) -> None:
    if missing := [key for key in keys if td.get(key, None) is None]:
        raise MissingKeyError(
            f"the TensorDict has no {', '.join(map(repr, missing))}; it has "
            f"{sorted(map(str, td.keys(True, True)))}. Pass {expected}."
        )


_PROGRAM = frozenset(("_step",))
_FLAGS = frozenset((name,) for name in DONE_LEAVES)


_WIDE_FLOATS = (torch.float64, torch.complex128)
_WIDE_INTEGERS = (torch.int64, torch.uint64)


@dataclass(frozen=True)
class _Fusion:
    """The parts inside the programs of an env, and its specs then.

    Attributes:
        taken: transforms that do, first to last.
        inputs, outputs: specs of the env seen through them.
        bookkeeping: observations that are bookkeeping, see `Transform.keeps_books`.
        infos: observations that are infos.
    """

    taken: tuple[FusableTransform, ...]
    inputs: Composite
    outputs: Composite
    bookkeeping: frozenset[Path]
    infos: frozenset[Path]


def _plan_fusion(
    env: EnvBase, engine: ProgramEngine, transforms: Sequence[Transform]
) -> _Fusion | None:
    """Choose the longest leading run of transforms that can be compiled into the programs of an env.

    A run ends where a transform says that it does not fuse (see `FusableTransform.fuses`), or where
    what it declares cannot be what a program gives: other actions or done flags, a state that is
    changed or taken away, 64-bit floats where JAX has none. One with its own state (`VecNorm`) needs
    all rows on one device, and gives no gradients.

    Args:
        env: a stateless env; its specs say what can be given.
        engine: its programs.
        transforms: first to last, each in an env, so that it knows the specs before it.

    Returns:
        None where it could take none of them.
    """
    taken: list[FusableTransform] = []
    bookkeeping, infos = set(env._facts.bookkeeping), set(env._facts.infos)
    inputs, outputs = env.input_spec.clone(), env.output_spec.clone()
    for transform in transforms:
        before = inputs.clone(), outputs.clone()
        inputs = transform.transform_input_spec(inputs)
        outputs = transform.transform_output_spec(outputs)
        if not (
            isinstance(transform, FusableTransform)
            and transform.fuses
            and _runs(engine, transform)
            and _fits(env, engine, inputs, outputs)
        ):
            inputs, outputs = before
            break
        taken.append(transform)
        bookkeeping |= books_of(transform, before[1], outputs)
        infos = infos_behind(infos, before[1], outputs)
    runs_all = len(taken) == len(transforms)  # of no transforms, too
    if not (runs_all or taken):
        return None
    return _Fusion(tuple(taken), inputs, outputs, frozenset(bookkeeping), frozenset(infos))


def _runs(engine: ProgramEngine, transform: FusableTransform) -> bool:
    """Check whether programs can take the state of a transform along, if it has any."""
    keeps = engine.programs.shards is None and not engine.settings.requires_grad
    return keeps or not transform.state()


def _fits(env: EnvBase, engine: ProgramEngine, inputs: Composite, outputs: Composite) -> bool:
    """Check whether programs of ``env`` can take and give what these specs declare."""
    shown, states = outputs["full_observation_spec"], inputs["full_state_spec"]
    kept = [] if engine.settings.illegal is None else [engine.settings.illegal]
    state = [key for key in env.full_state_spec.keys(True, True) if as_path(key)[0] == "state"]
    return (
        inputs["full_action_spec"] == env.full_action_spec
        and any(path[0] != "state" for path in leaf_paths(shown))  # random actions count its rows
        and set(outputs["full_done_spec"].keys(True, True)) == set(env.done_keys)
        and all(shown.get(key, None) == env.full_observation_spec[key] for key in kept)
        and all(
            spec.get(key, None) == env.full_state_spec[key]
            for key in state
            for spec in (shown, states)
        )
        and all(_crosses(leaf.dtype) for _, leaf in outputs.items(True, True))
    )


def _crosses(dtype: torch.dtype | None) -> bool:
    """Check whether a program can compute in a dtype; wide integers are narrowed, floats are not."""
    return dtype is not None and (dtype not in _WIDE_FLOATS or _has_64_bits())


def _has_64_bits() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def _wide_integers(outputs: Composite) -> dict[Path, torch.dtype]:
    """List the outputs that are declared in integers which JAX narrows, with their dtypes."""
    if _has_64_bits():
        return {}
    return {
        as_path(key): leaf.dtype
        for kind in ("observation", "reward")
        for key, leaf in outputs[f"full_{kind}_spec"].items(True, True)
        if leaf.dtype in _WIDE_INTEGERS
    }
