"""Many stateful envs behind one: what SerialEnv and ParallelEnv share, which is all but the pool.

`BatchedEnv` starts the sub-envs at the first use, reads their metadata, routes masks to rows, and
looks up attributes on the sub-envs. It does not know processes (the pool does) nor bytes (the
exchange does).

Conventions
    row      number of a sub-env, 0 .. num_workers - 1.
    worker   what hosts a range of rows: a process, or this process.
    batch    ``(num_workers, *sub_batch)``; every spec is a sub spec with that axis in front.
"""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.base import EnvBase
from envkit.batched.exchange import BufferExchange, TensorDictExchange, call_by_row
from envkit.batched.host import Maker
from envkit.batched.metadata import EnvMetaData
from envkit.batched.recording import record_random, record_rollout
from envkit.env_specs import as_key, as_path
from envkit.errors import (
    ArgumentCountError,
    BatchSizeError,
    ClosedEnvError,
    NotStartedError,
    SpecError,
)
from envkit.policy import Policy
from envkit.rollout import nonstop
from envkit.seeding import seed_chain
from envkit.specs import Composite
from envkit.transition import collect_reset_masks, leaves, merge_reset
from envkit.transport import Pool

__all__ = ["BatchedEnv"]


class BatchedEnv(EnvBase):
    """Base of SerialEnv and ParallelEnv.

    Args:
        num_workers: number of sub-envs.
        create_env_fn: callable that makes one, or a list of one callable per sub-env.
        create_env_kwargs: keywords for it: a dict, or a list of one dict per sub-env.
        device: where data is delivered; None takes the device of the sub-envs.
        use_buffers: exchange rows in memory. None: where the specs allow it.
    """

    keeps_last_output = True

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        device: Any = None,
        use_buffers: bool | None = None,
        **kwargs: Any,
    ):
        super().__init__(device=device, **kwargs)
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, but at least 1 sub-env is needed.")
        self.num_workers = num_workers
        self._use_buffers = use_buffers
        self._makers = _as_makers(num_workers, create_env_fn)
        self._kwargs = _as_kwargs(num_workers, create_env_kwargs)
        self._given_device = self._device
        self._pool: Pool | None = None
        self._exchange: BufferExchange | TensorDictExchange | None = None
        self._seed: int | None = None

    # ---------------------------------------------------------------------------------- life cycle

    @abstractmethod
    def _make_pool(self, makers: list[Maker]) -> Pool:
        """Build the pool that hosts the sub-envs; it is not started yet."""

    @abstractmethod
    def _wants_buffers(self, metadata: list[EnvMetaData]) -> bool:
        """Say whether rows in memory shall carry the data, specs permitting."""

    def _after_init(self, spec_locked: bool) -> None:
        self._lock_when_started = spec_locked

    @property
    def is_closed(self) -> bool:
        """True before the first use and after `close`."""
        return self._pool is None

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        """The pool decides; assignments of the base class are not needed."""

    def start(self) -> None:
        """Build the sub-envs now instead of at the first use.

        Raises:
            RuntimeError: they are running already.
        """
        if self._pool is not None:
            raise RuntimeError(f"{type(self).__name__} has been started already.")
        self._start()

    def _started(self) -> Pool:
        if self._pool is None:
            self._start()
        assert self._pool is not None
        return self._pool

    def _start(self) -> None:
        makers: list[Maker] = list(zip(self._makers, self._kwargs, strict=True))
        pool = self._make_pool(makers)
        try:
            metadata = [found for described in pool.start() for found in cast(list, described)]
            self._read_metadata(metadata)
            if self._buffered:
                self._exchange = BufferExchange(pool, metadata[0], self.num_workers, self._device)
            else:
                self._exchange = TensorDictExchange(pool, metadata, self._device)
        except BaseException:
            pool.close()
            raise
        self._pool = pool
        self._finalizer = weakref.finalize(self, pool.close)
        if self._seed is not None:
            self._set_seeds(self._seed, static=self._seed_is_static)

    def _read_metadata(self, metadata: list[EnvMetaData]) -> None:
        sizes = {found.batch_size for found in metadata}
        if len(sizes) > 1:
            raise SpecError(
                f"the sub-envs have different batch sizes {sorted(map(tuple, sizes))}, but must "
                "agree on one."
            )
        devices = {found.device for found in metadata}
        if self._given_device is None and len(devices) > 1:
            raise ValueError(
                f"the sub-envs deliver to different devices {sorted(map(str, devices))}. "
                "Say where the batch shall go: device=..."
            )
        device = self._given_device if self._given_device is not None else next(iter(devices))
        first = metadata[0]
        alike = all(found.specs == first.specs for found in metadata[1:])
        if alike:
            specs = first.specs.expand(self.num_workers, *first.batch_size)
        else:
            specs = cast(Composite, torch.stack([found.specs for found in metadata], 0))
        if device is not None:
            specs = specs.to(device)
        self._buffered = alike and self._wants_buffers(metadata)
        self._device = device
        self._batch_size = torch.Size((self.num_workers, *first.batch_size))
        self._auto_done_twins = first.auto_done_twins
        self._input_spec, self._output_spec = specs["input_spec"], specs["output_spec"]
        self.set_spec_lock_(self._lock_when_started)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the sub-envs and free what they share; the next `reset` starts new ones."""
        if self._pool is None:
            if raise_if_closed:
                raise ClosedEnvError(f"{type(self).__name__} is not running.")
            return
        pool, self._pool, self._exchange = self._pool, None, None
        self._finalizer.detach()
        pool.close()

    # ----------------------------------------------------------------- specs are read from workers

    @property
    def batch_size(self) -> torch.Size:
        """``(num_workers, *sub_batch)``; reading it starts the sub-envs."""
        if "_batch_size" not in self.__dict__ or not self._has_specs:
            self._started()
        return self._batch_size

    @property
    def device(self) -> torch.device | None:
        """Where data is delivered; reading it starts the sub-envs unless it was given."""
        if self._given_device is None and not self._has_specs:
            self._started()
        return self._device

    @property
    def _has_specs(self) -> bool:
        return self.__dict__.get("_output_spec") is not None

    @property
    def input_spec(self) -> Composite:
        """State and action specs, stacked over the sub-envs; reading it starts them."""
        if not self._has_specs:
            self._started()
        return super().input_spec

    @property
    def output_spec(self) -> Composite:
        """Reward, observation and done specs, stacked over the sub-envs; reading it starts them."""
        if not self._has_specs:
            self._started()
        return super().output_spec

    def add_truncated_keys(self) -> EnvBase:
        """Refused: the sub-envs decide what they report."""
        raise RuntimeError(
            "truncated keys cannot be added to a batched env. Add them to the sub-envs: "
            "lambda: make_env().add_truncated_keys()."
        )

    # --------------------------------------------------------------------------------------- reset

    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Start new episodes; see `EnvBase.reset`.

        Args:
            tensordict: current data and masks.
            list_of_kwargs: reset keywords of each sub-env, over those in ``kwargs``.
            **kwargs: reset keywords of every sub-env.
        """
        self._started()
        given = None
        if list_of_kwargs is not None:
            if len(list_of_kwargs) != self.num_workers:
                raise ArgumentCountError(
                    f"list_of_kwargs has {len(list_of_kwargs)} entries for {self.num_workers} "
                    "sub-envs. Pass one dict for each."
                )
            given = [{**kwargs, **own} for own in list_of_kwargs]
        elif kwargs:
            given = [dict(kwargs) for _ in range(self.num_workers)]
        return super().reset(tensordict, sub_kwargs=given)

    def _reset(
        self, td: TensorDictBase | None, sub_kwargs: list[dict[str, Any]] | None = None
    ) -> TensorDictBase:
        masks = {}
        if td is not None:
            masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        return self._the_exchange.reset(td, masks, sub_kwargs)

    @property
    def _the_exchange(self) -> BufferExchange | TensorDictExchange:
        if self._exchange is None:
            raise ClosedEnvError(
                f"{type(self).__name__} is not running. Call reset() first: it starts the sub-envs."
            )
        return self._exchange

    # ---------------------------------------------------------------------------------------- step

    def _check_batch(self, td: TensorDictBase) -> None:
        if td.batch_size != self.batch_size:
            raise BatchSizeError(
                f"the TensorDict has batch size {tuple(td.batch_size)}, but {type(self).__name__} "
                f"has {self.num_workers} sub-envs: pass batch size {tuple(self.batch_size)}."
            )

    def _step_send(self, td: TensorDictBase) -> None:
        self._send(td, advance=False)

    def _step_recv(self) -> TensorDictBase:
        td, mask = self._sent
        return self._attach_next(td, self._received(td, mask))

    def _advance_send(self, td: TensorDictBase) -> None:
        # Entries the caller put under `next` may change what is done, and the workers
        # cannot know: then the reset waits for the outcome.
        self._send(td, advance=td.get("next", None) is None)

    def _advance_recv(self) -> tuple[TensorDictBase, TensorDictBase]:
        td, mask = self._sent
        had_next = td.get("next", None) is not None
        data = self._attach_next(td, self._received(td, mask))
        following = self.step_mdp(data)
        if had_next:
            return data, self.maybe_reset(following)
        if self.any_done(following):
            following = self._take_fresh(following, mask)
        return data, following

    def _take_fresh(
        self, following: TensorDictBase, stepped: torch.Tensor | None
    ) -> TensorDictBase:
        """Put the roots of the episodes the workers have begun where old ones ended."""
        masks = collect_reset_masks(following, self.done_levels, self.full_done_spec)
        if stepped is not None and not bool(stepped.all()):
            return self.reset(following)  # a row done before, and not stepped now, waits for this
        fresh = self._the_exchange.fresh_rows()
        return merge_reset(following, fresh, masks, keeps_last=True)

    def _send(self, td: TensorDictBase, *, advance: bool) -> None:
        exchange = self._the_exchange
        self._check_batch(td)
        mask = td.get(rules.STEP, None)
        if mask is not None:
            mask = rules.step_mask(mask, td.batch_size)
            td.exclude(rules.STEP, inplace=True)
            advance = advance and bool(mask.all())
            mask = None if bool(mask.all()) else mask
        exchange.send(td, mask, advance=advance)
        self._sent = td, mask

    def _received(self, td: TensorDictBase, mask: torch.Tensor | None) -> TensorDictBase:
        following = self._the_exchange.recv()
        if mask is None:
            return following
        merged = self._skipped_next(td)
        for path, value in leaves(following):
            kept = merged.get(path, None)
            if isinstance(value, torch.Tensor) and kept is not None:
                value = rules.choose(mask, value, kept)
            merged.set(path, value)
        return merged

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError("batched envs step through _step_send and _step_recv.")

    def _fast_rollout(
        self, root: TensorDictBase, steps: int, policy: Any, act: Policy
    ) -> TensorDictBase | list[TensorDictBase] | None:
        exchange = self._exchange
        if not isinstance(exchange, BufferExchange) or len(self.done_levels) > 1:
            return None
        if any(root.get(as_key(path), None) is None for path in exchange.roots[0]):
            return None
        actions = frozenset(as_path(key) for key in self.action_keys)
        if policy is None and actions == exchange.inputs[0].keys():
            drawn = self.full_action_spec.rand((steps,), self._action_generator)
            return record_random(exchange, root, drawn, device=self._device)
        out = record_rollout(exchange, root, act, steps, action_paths=actions, device=self._device)
        if out.batch_size == root.batch_size:  # the policy writes under `next`
            return list(nonstop(self, out, act, steps, acted=True))
        return out

    # ---------------------------------------------------------------------------------------- seed

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed sub-env i with the i-th seed of the chain, and return the one after the last.

        With ``static_seed`` every sub-env gets ``seed``, which is returned.
        """
        self._started()
        self._seed, self._seed_is_static = seed, static_seed
        self._seed_actions(seed)
        return self._set_seeds(seed, static=static_seed)

    def _set_seeds(self, seed: int | None, *, static: bool) -> int:
        seeds, following = seed_chain(seed, self.num_workers, static=static)
        call_by_row(self._started(), "set_seed", dict(enumerate(seeds)))
        return following

    def _set_seed(self, seed: int | None) -> None:
        self._set_seeds(seed, static=False)

    # ---------------------------------------------------------------------------------- attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "num_workers" not in self.__dict__:
                raise
        pool = self.__dict__.get("_pool")
        if pool is None:
            raise NotStartedError(
                f"{type(self).__name__} has no attribute {name!r} of its own, and its sub-envs are "
                "not running to be asked. Start them first, e.g. with reset()."
            )
        if not all(pool.call("has_attribute", name)):
            raise AttributeError(
                f"neither {type(self).__name__} nor its sub-envs have an attribute {name!r}."
            )
        return self._attribute(pool, name)

    @abstractmethod
    def _attribute(self, pool: Pool, name: str) -> Any:
        """Give the attribute ``name`` of all sub-envs."""

    # -------------------------------------------------------------------------------------- states

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give ``{"worker0": {...}, ...}``, the state dict of every sub-env."""
        states = [state for part in self._started().call("state_dicts") for state in part]
        return {f"worker{row}": state for row, state in enumerate(states)}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load what `state_dict` gave, or one sub-env's state dict into all of them."""
        names = [f"worker{row}" for row in range(self.num_workers)]
        if "worker0" not in state_dict:
            state_dict = dict.fromkeys(names, state_dict)
        states = {row: state_dict[name] for row, name in enumerate(names)}
        call_by_row(self._started(), "load_state_dicts", states)

    def update_kwargs(self, kwargs: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Merge keywords into those of every sub-env; they count when sub-envs are built next."""
        for own, new in zip(self._kwargs, _as_kwargs(self.num_workers, kwargs), strict=True):
            own.update(new)

    def __repr__(self) -> str:
        state = "not started" if self._pool is None else f"batch_size={tuple(self._batch_size)}"
        return f"{type(self).__name__}(num_workers={self.num_workers}, {state})"


def _as_makers(count: int, create_env_fn: Any) -> list[Callable[..., Any]]:
    if isinstance(create_env_fn, EnvBase):
        return [_Copies(create_env_fn)] * count
    if callable(create_env_fn):
        return [create_env_fn] * count
    makers = list(create_env_fn)
    if len(makers) != count:
        raise ArgumentCountError(
            f"create_env_fn has {len(makers)} entries for {count} sub-envs. "
            "Pass one callable for all of them, or one for each."
        )
    return [_Copies(maker) if isinstance(maker, EnvBase) else maker for maker in makers]


class _Copies:
    """Make copies of an env instance."""

    def __init__(self, env: EnvBase):
        self.env = env

    def __call__(self, **kwargs: Any) -> EnvBase:
        return copy.deepcopy(self.env)


def _as_kwargs(count: int, kwargs: Any) -> list[dict[str, Any]]:
    if kwargs is None:
        kwargs = {}
    if isinstance(kwargs, dict):
        return [copy.deepcopy(kwargs) for _ in range(count)]
    if len(kwargs) != count:
        raise ArgumentCountError(
            f"{len(kwargs)} dicts of keywords were given for {count} sub-envs. "
            "Pass one dict for all of them, or one for each."
        )
    return [dict(own) for own in kwargs]
