"""The environment interface: TensorDict in, TensorDict out.

`EnvBase` checks what comes in, calls `_reset` or `_step` of the concrete env, completes what comes
out, and applies `rules` through `transition`. A new kind of env writes `_reset`, `_step`,
`_set_seed` and its specs, nothing else. It does not know JAX, Gymnasium or processes.

Conventions
    td      TensorDict whose root is what was known before the action; ``td["next"]`` is what the
            step produced.
    flags   rewards and done leaves carry a trailing singleton: shape (*batch, 1).
    masks   `_step` and `_reset`, see `rules`. They never survive in an output.
"""

from __future__ import annotations

import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.env_specs import Key, SpecHolder, as_key, as_path, leaf_paths
from envkit.errors import (
    BatchSizeError,
    ClosedEnvError,
    DoneError,
    MissingKeyError,
    ResetOutputError,
)
from envkit.rollout import rollout
from envkit.seeding import next_seed
from envkit.transition import (
    any_done,
    carry,
    collect_reset_masks,
    empty_like,
    leaves,
    merge_reset,
)

__all__ = ["EnvBase"]


class _EnvMeta(ABCMeta):
    """Take out the keywords every env accepts, and finish the specs after ``__init__``."""

    def __call__(
        cls,
        *args: Any,
        spec_locked: bool = True,
        auto_reset: bool = False,
        policy: Any = None,
        **kwargs: Any,
    ) -> Any:
        env = super().__call__(*args, **kwargs)
        if not isinstance(env, EnvBase):  # __new__ may return something else
            return env
        env._after_init(spec_locked)
        if auto_reset:
            from envkit.transforms.autoreset import AutoResetEnv

            env = AutoResetEnv(env)
        if policy is not None:
            from envkit.transforms.recurrent import with_policy_transforms

            env = with_policy_transforms(env, policy)
        return env


class EnvBase(SpecHolder, metaclass=_EnvMeta):
    """Base class of all environments.

    Args:
        device: where inputs are expected and outputs delivered; None sets no constraint.
        batch_size: number of environments along each axis; None means one environment.
        run_type_checks: compare the dtypes of every step with the specs (TypeError).
        allow_done_after_reset: accept done flags that are set right after a reset.

    Every subclass also accepts

    - ``spec_locked=True``: lock the specs after construction;
    - ``auto_reset=False``: the simulator begins a new episode in the step that ends one; the result is
      an `AutoResetEnv`;
    - ``policy=None``: a module; what its recurrent parts need is appended, and the result then is a
      `TransformedEnv`.
    """

    keeps_last_output = False
    """`_reset` returns the last known values of the parts that were not selected."""

    works_elsewhere = False
    """Steps are made outside this process: sending them out first lets both sides work."""

    def __init__(
        self,
        *,
        device: Any = None,
        batch_size: Any = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
    ):
        super().__init__()
        self._device = None if device is None else torch.device(device)
        self._batch_size = torch.Size(() if batch_size is None else batch_size)
        self.run_type_checks = run_type_checks
        self.allow_done_after_reset = allow_done_after_reset
        self.is_closed = False

    def _after_init(self, spec_locked: bool) -> None:
        self._finish_specs(lock=spec_locked)

    # -------------------------------------------------------------------------- for concrete envs

    @abstractmethod
    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        """Start new episodes where ``td``'s `_reset` masks ask for it.

        Returns:
            A new TensorDict with observations, states and done flags. What it holds of parts that
            were not selected is ignored.
        """

    @abstractmethod
    def _step(self, td: TensorDictBase) -> TensorDictBase:
        """Advance by one step.

        Returns:
            A new TensorDict with observations, states, rewards and done flags of the new moment.
        """

    @abstractmethod
    def _set_seed(self, seed: int) -> None:
        """Seed the simulator and nothing else."""

    # ------------------------------------------------------------------------------------- reset

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Start new episodes, in all of the env or where `_reset` masks say so.

        Args:
            tensordict: current data; gives the batch size (of an unlocked env), the masks, and the
                values kept where nothing is reset. It is written to and returned.
            **kwargs: passed on to the simulator.

        Returns:
            Observations, states and done flags, batch size ``(*batch,)``.

        Raises:
            BatchSizeError: the env is batch-locked and ``tensordict`` has another batch size.
            ResetMaskError: a mask does not fit.
            DoneError: a done flag is set where a reset was requested.
        """
        if tensordict is None:
            fresh = self._checked(self._reset(None, **kwargs), None, "_reset")
            self._complete(fresh, rewards=False)
            self._refuse_done(fresh, None, {})
            return fresh
        self._check_batch(tensordict)
        masks = collect_reset_masks(tensordict, self.done_levels, self.full_done_spec)
        fresh = self._checked(self._reset(tensordict, **kwargs), tensordict, "_reset")
        self._complete(fresh, rewards=False)
        self._refuse_done(fresh, tensordict, masks)
        return merge_reset(tensordict, fresh, masks, keeps_last=self.keeps_last_output)

    def _refuse_done(
        self,
        fresh: TensorDictBase,
        td: TensorDictBase | None,
        masks: dict[tuple[str, ...], torch.Tensor],
    ) -> None:
        if self.allow_done_after_reset:
            return
        for level, names in self.done_levels.items():
            governing = rules.governing_level(level, masks)
            for name in names:
                key = as_key((*level, name))
                flags = fresh.get(key)
                if not bool(flags.any()):
                    continue
                if governing is None:
                    selected = torch.ones_like(flags)
                else:
                    mask = rules.reduce_mask(masks[governing], flags.shape, len(fresh.batch_size))
                    selected = mask.reshape(*mask.shape, *(1,) * (flags.ndim - mask.ndim))
                if bool((flags & selected).any()):
                    raise DoneError(
                        f"{key!r} is set right after a reset of {self}. An episode must have at "
                        "least one step: fix _reset, or pass allow_done_after_reset=True."
                    )
                if td is not None and td.get(key, None) is None:
                    warnings.warn(
                        f"{key!r} is set after a partial reset where nothing was reset and the "
                        "input does not hold it; the flag is kept. Pass the current data.",
                        stacklevel=3,
                    )

    # -------------------------------------------------------------------------------------- step

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Advance by one step and write the outcome under ``"next"``.

        Args:
            tensordict: root with the action (and state of a stateless env), batch size
                ``(*batch,)``. A `_step` mask limits the step to its rows. Entries already under
                ``"next"`` win over computed ones.

        Returns:
            ``tensordict`` itself.

        Raises:
            BatchSizeError: the env is batch-locked and ``tensordict`` has another batch size.
            StepMaskError: the mask does not fit.
            TypeError: ``run_type_checks`` is set and a dtype differs from its spec.
        """
        self._step_send(tensordict)
        return self._step_recv()

    _sent: Any

    def _step_send(self, td: TensorDictBase) -> None:
        """Begin a step; between this and `_step_recv` other work may be done."""
        self._check_batch(td)
        self._sent = td

    def _step_recv(self) -> TensorDictBase:
        td = self._sent
        mask = td.get(rules.STEP, None)
        if mask is not None:
            mask = rules.step_mask(mask, td.batch_size)
        if mask is None:
            following = self._computed_next(td)
        else:
            following = self._masked_next(td, mask)
            td = td.exclude(rules.STEP, inplace=True)
        return self._attach_next(td, following)

    def _attach_next(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        preset = td.get("next", None)
        if preset is not None:
            following.update(preset)
        td.set("next", following)
        return td

    def _computed_next(self, td: TensorDictBase) -> TensorDictBase:
        following = self._checked(self._step(td), td, "_step")
        self._complete(following, rewards=True)
        if self.run_type_checks:
            self._check_dtypes(following)
        return following

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        """Compute ``next`` when a `_step` mask is given; batched envs have ways of their own."""
        if bool(mask.all()):
            return self._computed_next(td.exclude(rules.STEP))
        if self.batch_locked and len(self.batch_size):
            return self._computed_next(td)  # trusted to honour the mask: see docs/custom_envs.md
        skipped = self._skipped_next(td)
        if not bool(mask.any()):
            return skipped
        stepped = self._computed_next(td.exclude(rules.STEP)[mask])
        return self._scatter(mask, stepped, skipped)

    def _skipped_next(self, td: TensorDictBase) -> TensorDict:
        """Build ``next`` of rows that are not stepped: their root values where known, else zeros."""
        following = empty_like(td)
        for path, kind, spec in self._output_leaves:
            shape = (*td.batch_size, *spec.shape[len(self.batch_size) :])
            known = kind != "reward" or as_key(path) in self.state_keys
            previous = td.get(as_key(path), None) if known else None
            if not hasattr(previous, "shape") or not rules.kept_shape(previous, shape):
                previous = self._zeros(spec, td)
            following.set(as_key(path), previous)
        return following

    def _zeros(self, spec: Any, td: TensorDictBase) -> Any:
        """Make zeros of one output leaf for the batch of ``td``."""
        single = spec[(0,) * len(self.batch_size)] if len(self.batch_size) else spec
        return single.zero(td.batch_size)

    def _scatter(
        self, mask: torch.Tensor, stepped: TensorDictBase, skipped: TensorDictBase
    ) -> TensorDictBase:
        following = empty_like(skipped)
        for path, value in leaves(stepped):
            key = as_key(path)
            kept = skipped.get(key, None)
            if kept is None:
                kept = torch.zeros(
                    *mask.shape, *value.shape[1:], dtype=value.dtype, device=value.device
                )
            full = kept.clone()
            full[mask] = value
            following.set(key, full)
        return following

    # -------------------------------------------------------------------------- what comes out

    @property
    def _output_leaves(self) -> list[tuple[tuple[str, ...], str, Any]]:
        def build():
            return [
                (path, kind, spec[as_key(path)])
                for kind in ("observation", "reward", "done")
                for spec in [getattr(self, f"full_{kind}_spec")]
                for path in leaf_paths(spec)
            ]

        return self._cached("output_leaves", build)

    def _checked(self, out: Any, given: TensorDictBase | None, method: str) -> TensorDictBase:
        if not isinstance(out, TensorDictBase):
            raise ResetOutputError(
                f"{type(self).__name__}.{method} returned {type(out).__name__}, but must return a "
                "new TensorDict with the outputs."
            )
        if out is given:
            raise ResetOutputError(
                f"{type(self).__name__}.{method} returned its input. Build a new TensorDict "
                "with the outputs; the input holds the caller's data."
            )
        return out

    def _complete(self, out: TensorDictBase, *, rewards: bool) -> None:
        """Bring rewards and done flags to their shapes and fill what is missing, in place."""
        batch = out.batch_size
        for key, kind, spec, event in self._cached("scalars", self._scalar_leaves):
            if kind == "reward" and not rewards:
                continue
            value = out.get(key, None)
            shape = (*batch, *event)
            if value is None:
                if kind == "reward":
                    out.set(key, self._zeros(spec, out))
            elif tuple(value.shape) != shape:
                out.set(key, _reshaped(value, shape, key))
        for level, names in self.done_levels.items():
            self._complete_done(out, level, names)

    def _scalar_leaves(self) -> list[tuple[Key, str, Any, torch.Size]]:
        """List rewards and done flags, with their shape beyond the batch."""
        return [
            (as_key(path), kind, spec, spec.shape[len(self.batch_size) :])
            for path, kind, spec in self._output_leaves
            if kind != "observation"
        ]

    def _complete_done(self, out: TensorDictBase, level: tuple[str, ...], names: list[str]) -> None:
        given = {}
        for name in names:
            value = out.get(as_key((*level, name)), None)
            if value is not None:
                given[name] = value
        if len(given) == len(names):
            return
        for name, value in rules.complete_done(given, names, level).items():
            if value is None:
                value = self._zeros(self.full_done_spec[as_key((*level, name))], out)
            out.set(as_key((*level, name)), value)

    def _check_dtypes(self, out: TensorDictBase) -> None:
        for path, _, spec in self._output_leaves:
            value = out.get(as_key(path), None)
            if value is not None and spec.dtype is not None and value.dtype != spec.dtype:
                raise TypeError(
                    f"{as_key(path)!r} has dtype {value.dtype}, but its spec says {spec.dtype}. "
                    "Cast it in _step, or declare the dtype it has."
                )

    def _check_batch(self, td: TensorDictBase) -> None:
        if self.is_closed:
            raise ClosedEnvError(f"{self} is closed. Build a new one.")
        if self.batch_locked and td.batch_size != self.batch_size:
            raise BatchSizeError(
                f"the TensorDict has batch size {tuple(td.batch_size)}, but {type(self).__name__} "
                f"is batch-locked to {tuple(self.batch_size)}. Pass data of that batch size."
            )

    def _rows_done(self, following: TensorDictBase) -> torch.Tensor:
        """Say which rows have ended, shape ``(*batch,)``: by the root's flags when it has some."""
        batch_ndim = len(following.batch_size)
        levels = [()] if () in self.done_levels else list(self.done_levels)
        ended = None
        for level in levels:
            flags = following.get(as_key((*level, "done")))
            flags = flags.flatten(batch_ndim).any(-1) if flags.ndim > batch_ndim else flags
            ended = flags if ended is None else ended & flags
        assert ended is not None  # every env has a done level
        return ended

    # ---------------------------------------------------------------------------- the next input

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Give the root of the next step: ``next`` over root, rewards and actions dropped."""
        paths = self._cached(
            "carry_paths",
            lambda: {
                kind: {as_path(key) for key in getattr(self, f"{kind}_keys")}
                for kind in ("reward", "action", "state")
            },
        )
        return carry(
            tensordict,
            reward_keys=paths["reward"],
            action_keys=paths["action"],
            state_keys=paths["state"],
        )

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Say whether any done leaf is set, and if so write the `_reset` masks into ``tensordict``."""
        return any_done(tensordict, self.done_levels)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset what is done in a root (the output of `step_mdp`); the rest is returned unchanged."""
        return self.reset(tensordict) if self.any_done(tensordict) else tensordict

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, and reset what is done.

        Returns:
            ``(data, data_)``: the transition, whose ``next`` keeps the true last observation, and
            the root of the following transition, fresh where an episode ended.
        """
        self._advance_send(tensordict)
        return self._advance_recv()

    def _advance_send(self, td: TensorDictBase) -> None:
        """Begin a step that is followed by a reset of what is done; see `_step_send`."""
        self._step_send(td)

    def _advance_recv(self) -> tuple[TensorDictBase, TensorDictBase]:
        data = self._step_recv()
        return data, self.maybe_reset(self.step_mdp(data))

    # ------------------------------------------------------------------------------------ actions

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Sample every action from its spec; written into ``tensordict``, which is returned.

        Without one, a new TensorDict of the env's batch size is made. The samples come from the
        env's own generator, see `set_seed`.
        """
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size, device=self.device)
        else:
            self._check_batch(tensordict)
        batch = tensordict.batch_size
        spec = self.full_action_spec
        if not self.batch_locked and batch != self.batch_size:
            sample = self.single_full_action_spec.rand(batch, self._action_generator)
        else:
            sample = spec.rand((), self._action_generator)
        return tensordict.update(sample)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Take one step with random actions: ``step(rand_action(tensordict))``."""
        return self.step(self.rand_action(tensordict))

    def all_actions(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Enumerate the actions, stacked on a new first axis (discrete specs only)."""
        return self.full_action_spec.enumerate()

    def fake_tensordict(self) -> TensorDict:
        """Give zeros in exactly the layout of one rollout step, batch size ``batch_size``."""
        root = self.full_state_spec.zero()
        for spec in (self.full_observation_spec, self.full_action_spec, self.full_done_spec):
            root.update(spec.zero())
        following = self.full_observation_spec.zero()
        following.update(self.full_reward_spec.zero())
        following.update(self.full_done_spec.zero())
        root.set("next", following)
        return root

    # ------------------------------------------------------------------------------------ rollout

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool | None = None,
        break_when_all_done: bool | None = None,
        return_contiguous: bool = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        trust_policy: bool = False,
    ) -> TensorDictBase:
        """Run a policy for up to ``max_steps`` steps.

        Args:
            max_steps: most steps taken.
            policy: see `envkit.policy.as_policy`; None takes random actions.
            callback: called as ``callback(env, td)`` after each step except the last, with the
                transition just completed; what it returns is dropped.
            auto_reset: reset first; ``tensordict`` then gives batch size, parameters and state.
                False: ``tensordict`` is required, and what is done in it is reset.
            auto_cast_to_device: move data to the policy's device and back.
            break_when_any_done: stop after the first step in which any env is done (the default).
                With both rules False, done envs are reset and collection goes on.
            break_when_all_done: freeze done envs and stop when all are done.
            return_contiguous: stack densely; False gives a lazy stack along time.
            tensordict: what to start from.
            set_truncated: mark the last step ``truncated`` and ``done``.
            out: preallocated destination, at least as long as the result.
            trust_policy: call ``policy`` with the TensorDict whatever its signature.

        Returns:
            Transitions, batch size ``(*batch, T)``; T is the number of steps really taken.

        Raises:
            TypeError: both stop rules are True.
            RuntimeError: ``auto_reset=False`` without ``tensordict``; steps that cannot be stacked.
            DoneError: ``set_truncated`` without a ``truncated`` leaf.
        """
        return rollout(
            self,
            max_steps,
            policy,
            callback,
            auto_reset=auto_reset,
            auto_cast_to_device=auto_cast_to_device,
            break_when_any_done=break_when_any_done,
            break_when_all_done=break_when_all_done,
            return_contiguous=return_contiguous,
            tensordict=tensordict,
            set_truncated=set_truncated,
            out=out,
            trust_policy=trust_policy,
        )

    def _fast_rollout(
        self, root: TensorDictBase, steps: int, policy: Any, act: Callable
    ) -> TensorDictBase | list[TensorDictBase] | None:
        """Do a whole non-stop rollout at once, or None to have it done step by step.

        ``policy`` is what the user passed, ``act`` the same as a callable on TensorDicts. A list
        of transitions is stacked like those of any rollout.
        """
        return None

    def _fast_episode(
        self, root: TensorDictBase, steps: int, policy: Any, act: Callable
    ) -> TensorDictBase | list[TensorDictBase] | None:
        """Do at once a rollout that stops after the first step in which any env is done, or None.

        Arguments and result are those of `_fast_rollout`.
        """
        return None

    # --------------------------------------------------------------------------------- transforms

    def append_transform(self, transform: Any) -> EnvBase:
        """Wrap this env in a transform.

        Args:
            transform: a `Transform`, or a function ``td -> td``, which is run on what each reset
                and each step produces.

        Returns:
            A `TransformedEnv` of this env. One that is a `TransformedEnv` already is extended in
            place and returned.
        """
        from envkit.transforms.env import TransformedEnv

        return TransformedEnv(self, transform)

    # ------------------------------------------------------------------------------ seed and life

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed this env only, and return the seed for the next one (see `envkit.seeding`).

        With ``static_seed`` the same seed is returned. The global generators are never touched.
        """
        self._set_seed(seed)  # type: ignore[arg-type]
        self._seed_actions(seed)
        return seed if static_seed else next_seed(seed)

    def _seed_actions(self, seed: int | None) -> None:
        """Random actions come from a generator of the env's own, begun anew by each seed.

        An env that was never seeded draws from torch's global generator.
        """
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device or "cpu").manual_seed(seed)
        self._action_generator = generator

    _action_generator: torch.Generator | None = None

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Release the simulator.

        Raises:
            ClosedEnvError: the env is closed already and ``raise_if_closed`` is set.
        """
        if self.is_closed and raise_if_closed:
            raise ClosedEnvError(f"{type(self).__name__} is closed already.")
        self.is_closed = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Environments are not called like modules."""
        raise NotImplementedError(
            f"{type(self).__name__} is an environment: call its step or reset. If it was passed "
            "where a create function is expected, pass `lambda: env_class(...)` instead."
        )

    def to(self, *args: Any, **kwargs: Any) -> EnvBase:
        """Move specs, parameters and future outputs to a device; returns self."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        if device is not None:
            locked = self._spec_locked
            self._device = device
            self._input_spec = self.input_spec.to(device)
            self._output_spec = self.output_spec.to(device)
            self.set_spec_lock_(locked)
        return super().to(*args, **kwargs)  # type: ignore[return-value]

    def cpu(self) -> EnvBase:
        """Move the env to the CPU; returns self."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> EnvBase:
        """Move the env to a CUDA device; returns self."""
        return self.to(torch.device("cuda", 0 if device is None else device))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device}, "
            f"batch_locked={self.batch_locked})"
        )


def _reshaped(value: torch.Tensor, shape: tuple[int, ...], key: Key) -> torch.Tensor:
    if value.numel() != torch.Size(shape).numel():
        raise MissingKeyError(
            f"{key!r} has shape {tuple(value.shape)}, but its spec asks for {shape}. "
            "Return one value for each environment of the batch."
        )
    return value.reshape(shape)
