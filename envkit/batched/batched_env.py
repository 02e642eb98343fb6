"""Many stateful envs behind one: what SerialEnv and ParallelEnv share, which is all but the pool.

`BatchedEnv` routes masks to rows, and resets, steps, seeds and saves the sub-envs. It does not know when they are
built (`pool_owner`), processes (the pool) nor bytes (the exchange). The saved state nests the state dicts of the
sub-envs beside where the batch's own random actions are, which rows were lost, and the newest data of all rows, which
partial resets show again.

Conventions
    row      number of a sub-env, 0 .. num_workers - 1; its state dict is under ``"worker{row}"``.
    worker   what hosts a range of rows: a process, or this process.
    batch    ``(num_workers, *sub_batch)``; every spec is a sub spec with that axis in front.
    gave up  of a row: its episode could not be restored, and the load was not strict. It counts as lost, see
             `recovery`: the next step tells it truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.batched.attributes import AttributeLookup
from envkit.batched.exchange.behind_transforms import recorded_behind
from envkit.batched.exchange.checks import rows_of
from envkit.batched.exchange.recording import recorded
from envkit.batched.exchange.shared_memory import BufferExchange, RowsInPlace
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.lazy_stacks import by_row, empty_rows, stack_rows
from envkit.batched.makers import as_own_kwargs
from envkit.batched.pool_owner import PoolOwner
from envkit.data.arguments import as_bool, require_state_dict
from envkit.data.merging import merge_reset, merge_rows
from envkit.data.paths import Path, as_path
from envkit.data.resets import collect_reset_masks
from envkit.env.base import EnvBase
from envkit.env.input_checks import in_functorch, require_values
from envkit.env.learning import ALL
from envkit.env.own_state import OWN, loading, loads_strictly
from envkit.env.runs import InPlace, Record, Run, Runs
from envkit.env.seeding import reset_keywords, seeds_of_parts
from envkit.env.set_state import refuse_start, refuse_state_left_out
from envkit.env.tickets import Ticket
from envkit.errors import (
    BatchSizeError,
    ClosedEnvError,
    MissingKeyError,
    NotResetError,
    ResumeError,
    WorkerError,
)
from envkit.specs.annotations import EnvData
from envkit.transport import Pool
from envkit.transport.pool import call_by_row, merged


class BatchedEnv(AttributeLookup, PoolOwner):
    """Base of SerialEnv and ParallelEnv; see `ParallelEnv` for the keywords.

    A public name that it does not have is looked up on the sub-envs, see `attributes`.
    """

    keeps_last_output = True
    _rows_are_envs = True
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {"_reset"}

    # --------------------------------------------------------------------------------------- reset

    def reset(
        self,
        tensordict: TensorDictBase | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
        *,
        set_state: bool | None = None,
        select_reset_only: bool = False,
        **kwargs: Any,
    ) -> EnvData:
        """Start new episodes; see `EnvBase.reset`.

        Args:
            tensordict: current data and masks.
            set_state, select_reset_only: see `EnvBase.reset`.
            list_of_kwargs: reset keywords of each sub-env, over those in ``kwargs``.
            **kwargs: reset keywords of every sub-env. With ``seed=s``, row i gets ``s + i``, as in
                Gymnasium's vector envs; `set_seed` gives them a chain of seeds.

        Returns:
            ``tensordict`` itself, completed; where results are lazy stacks and it is not one, the
            same data as a lazy stack.
        """
        refuse_state_left_out(set_state=set_state, select_reset_only=select_reset_only)
        self._started()
        if set_state is not None:
            kwargs["set_state"] = set_state
        if set_state:
            refuse_start(self)
        of_rows = None
        if kwargs or list_of_kwargs is not None:
            width = self.batch_size[1:].numel()
            of_rows = reset_keywords(kwargs, [row * width for row in range(self.num_workers)])
            if list_of_kwargs is not None:
                own_kwargs = as_own_kwargs(self.num_workers, list_of_kwargs, "list_of_kwargs")
                of_rows = [
                    {**common, **of_row} for common, of_row in zip(of_rows, own_kwargs, strict=True)
                ]
        if isinstance(tensordict, TensorDictBase) and self.share_individual_td:
            self._check_batch(tensordict)
            tensordict = by_row(tensordict)
        return super().reset(tensordict, select_reset_only=select_reset_only, sub_kwargs=of_rows)

    def _reset(
        self, td: TensorDictBase | None, sub_kwargs: list[dict[str, Any]] | None = None
    ) -> TensorDictBase:
        masks = {}
        if td is not None:
            masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        fresh = self._laid_out(self._the_exchange.reset(td, masks, sub_kwargs))
        if self._entries is not None:
            self._entries.after_reset(fresh, masks)
        return fresh

    _completes_outputs = True  # as the sub-envs have

    def _laid_out(self, td: TensorDictBase) -> TensorDictBase:
        return by_row(td) if self._share_individual_td else td

    @property
    def _the_exchange(self) -> BufferExchange | TensorDictExchange:
        if self._exchange is None:
            if self._was_closed:
                raise ClosedEnvError(
                    f"{type(self).__name__} was closed. Call reset() first: it starts new sub-envs."
                )
            self._started()
        assert self._exchange is not None
        return self._exchange

    # ---------------------------------------------------------------------------------------- step

    def _check_batch(self, td: TensorDictBase) -> None:
        table = self._declared.table or self._table
        if td.batch_size != table.batch_size:
            raise BatchSizeError(
                f"the TensorDict has batch size {tuple(td.batch_size)}, but {type(self).__name__} "
                f"has {self.num_workers} sub-envs: pass batch size {tuple(self.batch_size)}."
            )
        if in_functorch() and self._facts.leaves_torch:
            require_values(td, table.inputs, type(self).__name__)

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        exchange, mask = self._exchange or self._the_exchange, ticket.mask
        if not exchange.has_begun:
            raise NotResetError(
                f"{type(self).__name__} was stepped before its first reset, so its sub-envs are in no "
                "episode. Call reset() first, and step from what it returns."
            )
        if mask is not None and bool(mask.all()):
            mask = None
        if self._recovery.given_up:
            rows = None if mask is None else rows_of(mask, self.num_workers)
            self._recovery.require_reset(rows)
        if self._share_individual_td:
            ticket.td = by_row(ticket.td)
        if self._entries is not None:
            self._entries.complete(ticket.td)
        # A sub-env that resets by itself writes its root too, mostly a copy of `next`.
        ticket.restarts = not exchange.has_large_rows and self._may_restart(ticket)
        ticket.work = _PoolWork(exchange, mask, exchange.fill(ticket.td, mask))

    def _begin_step(self, ticket: Ticket) -> None:
        work = ticket.work
        work.round = work.exchange.wake(ticket.td, work.inputs, advance=ticket.restarts)

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        work, td = ticket.work, ticket.td
        exchange, mask = work.exchange, work.mask
        following = exchange.deliver(exchange.wait(work.round))
        if mask is not None and not exchange.keeps_unstepped:
            if exchange.lost:
                mask = mask.clone()
                mask[sorted(exchange.lost)] = True
            following = merge_rows(self._skipped_next(td), following, {(): mask})
        if self._share_individual_td:
            following = by_row(following)
        if self._entries is not None:
            self._entries.after_step(td, following)
        return following

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        root = self.step_mdp(data)
        return self._take_fresh(root) if self.any_done(root) else root

    def _take_fresh(self, following: TensorDictBase) -> TensorDictBase:
        """Put the roots of the episodes the workers have begun where old ones ended."""
        masks = collect_reset_masks(following, self.done_levels, self.full_done_spec)
        fresh = self._laid_out(self._the_exchange.fresh_rows())
        if self._entries is not None:
            self._entries.after_reset(fresh, masks)
        return merge_reset(following, fresh, masks, keeps_last=True)

    def _skipped_next(self, td: TensorDictBase) -> TensorDict | TensorDictBase:  # type: ignore[override]
        if not self._share_individual_td:
            return super()._skipped_next(td)
        rows = zip(td.unbind(0), self._metadata, strict=True)
        return stack_rows([found.skipped_next(row) for row, found in rows], individual=True)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError("batched envs step through their workers.")

    def _runs(self) -> Runs:
        """Return runs in the rows of this pool, where they carry its data."""
        return _PoolRuns(self)

    def _rows_for_run(self) -> BufferExchange | None:
        """Return the exchange, if a whole run can be recorded in its rows."""
        exchange = self._exchange
        if not isinstance(exchange, BufferExchange):
            return None
        if len(self.done_levels) > 1 and () not in self.done_levels:
            return None  # parts of a row begin again by themselves
        if self._share_individual_td or self._entries is not None:
            return None
        if not set(self.reward_keys).isdisjoint(self.state_keys):
            return None  # what is carried from `next` must have a root row
        is_whole = exchange.has_begun and self._unshown is None and not self._recovery.unstarted
        return exchange if is_whole else None

    @property
    def _delivers_here(self) -> bool:
        """Whether data is delivered in the memory of this process."""
        return self._device is None or self._device.type == "cpu"

    def _ended(self, following: TensorDictBase) -> dict[Path, torch.Tensor]:
        """Return masks of what is to be reset, by level; none where nothing is done."""
        if not self.any_done(following):
            return {}
        return collect_reset_masks(following, self.done_levels, self.full_done_spec)

    # -------------------------------------------------------------------------- actions and layout

    def rand_action(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Sample every action from its spec; see `EnvBase.rand_action`.

        Where results are lazy stacks, so is what this returns.
        """
        self._started_specs()
        if self._share_individual_td:
            if tensordict is None:
                tensordict = empty_rows(self.num_workers, self.batch_size[1:], self.device)
            if isinstance(tensordict, TensorDictBase):
                tensordict = by_row(tensordict)
        if self._facts.draws_own_actions:
            rows, own = range(self.num_workers), bool(self._share_individual_td)
            td = self._drawn_into(tensordict)
            return drawn_inside(self, self._started(), rows, td, individual=own)
        return super().rand_action(tensordict)

    def fake_tensordict(self) -> TensorDict | TensorDictBase:  # type: ignore[override]
        """Return zeros in exactly the layout of one rollout step, batch size ``batch_size``."""
        self._started_specs()
        if not self._share_individual_td:
            return super().fake_tensordict()
        parts = [found.tensordict.clone() for found in self._metadata]
        fake = stack_rows(parts, individual=True)
        return fake if self.device is None else fake.to(self.device)

    # ---------------------------------------------------------------------------------------- seed

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed sub-env i with the i-th seed of the chain, and return the one after the last.

        A sub-env of several rows takes a seed for each row that has its own. With ``static_seed`` every sub-env
        gets ``seed``, which is returned.
        """
        self._started()
        following = self._set_seeds(seed, static=static_seed)
        self._seed_actions(seed)
        self._after_seed()
        self._seed, self._seed_is_static = seed, static_seed
        return following

    @property
    def _seeded_parts(self) -> list[tuple[Any, int | None]]:
        if self._seed is None:
            return [(row, None) for row in range(self.num_workers)]
        seeds, _ = self._seeds_of_rows(self._seed, static=self._seed_is_static)
        return list(enumerate(seeds))

    def _seeds_of_rows(self, seed: int | None, *, static: bool) -> tuple[list[int], int]:
        """Return the seeds of the sub-envs, each of which may take several of the chain, and the one that follows."""
        return seeds_of_parts(
            seed, [found.facts.seeds_taken for found in self._metadata], static=static
        )

    def _visit_transforms(self, visit: Any, earlier: Any) -> Any:
        rows = range(self.num_workers)
        asked = {
            row: partial(_visited, visit, ALL if earlier == ALL else earlier[row]) for row in rows
        }
        return call_by_row(self._started(), "apply", asked)

    def _set_seeds(self, seed: int | None, *, static: bool) -> int:
        seeds, following = self._seeds_of_rows(seed, static=static)
        pool, of_row = self._started(), dict(enumerate(seeds))
        pool.seeds.update(of_row)
        self._recovery.begin_seeds(seeds[0])
        try:
            call_by_row(pool, "set_seed", of_row)
        except WorkerError as error:
            if any(failure.kind == "raised" for failure in error.failures):
                raise
            self._recovery.repair(error)
            pool.seeds.update(of_row)
            call_by_row(pool, "set_seed", of_row)
        return following

    def _set_seed(self, seed: int | None) -> None:
        self._set_seeds(seed, static=False)

    # ------------------------------------------------------------------------------------- resuming

    def _require_idle(self) -> None:
        """Check that no sub-env works on something."""

    def record_for_resume(self, mode: bool = True) -> Self:
        """Record the episodes of all sub-envs, those that are built later too; see `EnvBase`."""
        self._records = as_bool("mode", mode)
        if self._pool is not None:
            self._require_idle()
            self._recovery.record(self._records)
        return self

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """Return ``{"worker0": {...}, ...}``, the state dict of every sub-env, and what the batch adds to them.

        With a ``prefix``, which a module passes that holds this env, all of it is one entry of the dict of that module.

        Raises:
            WorkerError: (a RuntimeError) a sub-env records its episodes and this one cannot be restored exactly, or it
                failed otherwise.
            BusyEnvError: (a RuntimeError) a sub-env of an asynchronous pool works on something.
        """
        if prefix:
            return super().state_dict(*args, prefix=prefix, **kwargs)
        self._require_idle()
        pool = self._started()
        rows = merged(pool.call("states"))
        states = {f"worker{row}": told["env"] for row, told in sorted(rows.items())}
        beside = {name: [rows[row][name] for row in sorted(rows)] for name in ("root", "numbers")}
        return {**states, OWN: {**self._own_state(), **beside}}

    def _own_state(self) -> dict[str, Any]:
        return {
            **super()._own_state(),
            "seed_of_rows": self._seed,
            "static": self._seed_is_static,
            "records": self._records,
            "recovery": self._recovery.state(),
            "newest": self._the_exchange.state(),
            "entries": None if self._entries is None else self._entries.state(),
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Load what `state_dict` gave, or one sub-env's state dict into all of them.

        Args:
            state_dict: of a batched env of as many sub-envs, `SerialEnv` or `ParallelEnv`.
            strict: False: rows whose recorded episode does not go on as it did are truncated by the next step, and
                begin a new one.
            assign: of ``torch.nn.Module.load_state_dict``, and of no use here.

        Raises:
            ArgumentTypeError: it is no dict.
            MissingKeyError: it is that of another number of sub-envs.
            ResumeError: (a RuntimeError) it holds what sub-envs gave, and not what the batch did.
            WorkerError: (a RuntimeError) a sub-env did not get where it was.
        """
        require_state_dict(state_dict)
        names = [f"worker{row}" for row in range(self.num_workers)]
        if "worker0" not in state_dict:
            state_dict = dict.fromkeys(names, state_dict)
        if state_dict.keys() - {OWN} != set(names):
            raise MissingKeyError(
                f"the state dict has entries {sorted(state_dict)}, but {self.num_workers} sub-envs "
                f"need {names}. Pass what state_dict() of an env of as many gave, or the state dict "
                "of one sub-env for all."
            )
        self._require_idle()
        own_state = state_dict.get(OWN)
        if own_state is not None and len(own_state.get("newest", ())) != self.num_workers:
            raise ResumeError(
                f"the state dict holds no data of {self.num_workers} rows, but {list(own_state)}: it was not saved by a "
                f"batched env of as many. Load what state_dict() of {type(self).__name__} gave."
            )
        if own_state is None and (kind := self._facts.keeps_state):
            raise ResumeError(
                f"the state dict holds what sub-envs gave by themselves, and simulators of {kind} are among them: "
                f"what this {type(self).__name__} has shown of them is not in it. Load what its own "
                "state_dict() gave, or load transforms alone and begin new episodes."
            )
        states = {
            row: {"env": state_dict[name], **_of_row(own_state, row)}
            for row, name in enumerate(names)
        }
        with loading(state_dict, strict=strict):
            are_lost = call_by_row(self._started(), "load_states", states, strict)
            if own_state is not None:
                self._resume(own_state, strict=strict)
            self._recovery.give_up({row for row, is_lost in are_lost.items() if is_lost})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + OWN] = self.state_dict()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = state_dict.pop(prefix + OWN, None)
        if state is None:
            missing_keys.append(prefix + OWN)
        else:
            self.load_state_dict(state, strict=loads_strictly())

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        self._seed, self._seed_is_static = state["seed_of_rows"], state["static"]
        self._recovery.take(state["recovery"])
        if state["records"]:
            self.record_for_resume()
        self._the_exchange.take(state["newest"])
        if self._entries is not None and state["entries"] is not None:
            self._entries.take(state["entries"])


def rows_for_others(env: EnvBase) -> BufferExchange | None:
    """Return the rows of a pool, if what is around it can record a whole run in them."""
    if not isinstance(env, BatchedEnv) or not env._steps_by_itself or not env._delivers_here:
        return None
    is_plain = len(env._batch_size) == 1 and env.on_worker_failure != "restart"
    return env._rows_for_run() if is_plain else None


class _PoolRuns(Runs):
    """Runs in the rows that carry the data of a pool."""

    def __init__(self, env: BatchedEnv):
        self._env = env

    def record(self, run: Run) -> Record:
        """Record a rollout in the rows."""
        env, rows = self._env, self._env._rows_for_run()
        return None if rows is None else recorded(env, rows, run, ended=env._ended)

    def record_behind(self, env: Any, run: Run) -> Record:
        """Record a rollout of a `TransformedEnv` around the pool in the rows."""
        rows = rows_for_others(self._env)
        return None if rows is None else recorded_behind(env, rows, run)

    def in_place(self) -> InPlace | None:
        """Return steps that are read in the rows."""
        env = self._env
        exchange, device = env._exchange, env._device
        if type(exchange) is not BufferExchange or not exchange.has_begun:
            return None
        has_parts = len(env._batch_size) > 1  # which may be masked
        if has_parts or env._unshown is not None or not env._steps_by_itself:
            return None
        if env._share_individual_td or env._entries is not None or not env._delivers_here:
            return None
        if {as_path(key) for key in env.action_keys} != exchange.inputs[0].keys():
            return None
        if not RowsInPlace.can_show(exchange):
            return None
        return RowsInPlace(
            exchange,
            lambda: env._exchange is exchange and env._device == device,
            may_lose=env.on_worker_failure == "restart",
        )


@dataclass(slots=True, eq=False)
class _PoolWork:
    """State of a step under way in a pool.

    Attributes:
        exchange: how data gets to the sub-envs, as it was when the step was made.
        mask: what is stepped; None: all.
        inputs: what the exchange's ``fill`` gave.
        round: what it gave when the step was begun.
    """

    exchange: Any
    mask: torch.Tensor | None
    inputs: Any
    round: Any = field(default=None, init=False)


def drawn_inside(
    env: EnvBase, pool: Pool, rows: Sequence[int], td: TensorDictBase, *, individual: bool
) -> TensorDictBase:
    """Draw the actions of some rows in their sub-envs, which may override that; ``td`` is the data of these rows."""
    given = td.exclude("next").unbind(0)
    parts = {row: part.to("cpu") for row, part in zip(rows, given, strict=True)}
    drawn = call_by_row(pool, "rand_action", parts)
    actions = stack_rows([drawn[row] for row in rows], individual=individual)
    return td.update(actions if env.device is None else actions.to(env.device))


def _visited(visit: Any, earlier: Any, env: EnvBase) -> Any:
    return env._visit_transforms(visit, earlier)


def _of_row(own_state: Mapping[str, Any] | None, row: int) -> dict[str, Any]:
    """Return what is held of a row beside its env's state dict.

    A row that remembers no root where it was saved goes on here, where it does, from what was shown of it.
    """
    if own_state is None:
        return {"root": None, "numbers": None}
    return {
        "root": own_state["root"][row] or own_state["newest"][row],
        "numbers": own_state["numbers"][row],
    }
