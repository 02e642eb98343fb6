"""How a batched env is saved and goes on: its sub-envs, and what it keeps of them itself.

`ResumablePool` nests the state dicts of sub-envs, one for each row, beside where its own random actions are, which
rows were lost, and the newest data of all rows, which partial resets show again. What a sub-env's state is, that
env says.

Conventions
    row      number of a sub-env; its state dict stands under ``"worker{row}"``.
    gave up  of a row: its episode could not be restored, and the load was not strict. It counts as lost, see
             `recovery`: the next step tells it truncated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from envkit.batched.exchange.rows import BufferExchange
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.pool_owner import PoolOwner
from envkit.data.arguments import as_bool, require_state_dict
from envkit.env.own_state import OWN
from envkit.errors import MissingKeyError, ResumeError
from envkit.transport.pool import call_by_row

__all__ = ["ResumablePool"]


class ResumablePool(PoolOwner):
    """The part of a batched env that saves it and goes on from what was saved."""

    @property
    @abstractmethod
    def _the_exchange(self) -> BufferExchange | TensorDictExchange:
        """How data gets to the sub-envs, which are started for it."""

    def _require_idle(self) -> None:
        """Check that no sub-env works on something."""

    @property
    def _keeps_state(self) -> str | None:
        self._started_specs()
        return next((found.keeps_state for found in self._metadata if found.keeps_state), None)

    @property
    def _says_no_state(self) -> str | None:
        self._started_specs()
        return next((found.says_no_state for found in self._metadata if found.says_no_state), None)

    @property
    def _writes_down(self) -> bool:
        return self._records

    def record_for_resume(self, mode: bool = True) -> Self:
        """Have all sub-envs write down their episodes, those that are built later too; see `EnvBase`."""
        self._records = as_bool("mode", mode)
        if self._pool is not None:
            self._require_idle()
            self._recovery.record(self._records)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give ``{"worker0": {...}, ...}``, the state dict of every sub-env, and what the batch adds to them.

        Raises:
            WorkerError: (a RuntimeError) a sub-env cannot be saved so that it could be restored exactly, or
                failed otherwise.
            BusyEnvError: (a RuntimeError) a sub-env of an asynchronous pool works on something.
        """
        self._require_idle()
        pool = self._started()
        rows = {row: told for part in pool.call("states") for row, told in part.items()}
        states = {f"worker{row}": told["env"] for row, told in sorted(rows.items())}
        beside = {name: [rows[row][name] for row in sorted(rows)] for name in ("root", "numbers")}
        return {**states, OWN: {**self._own_state(), **beside}}

    def _own_state(self) -> dict[str, Any]:
        return {
            **super()._own_state(),
            "seed_of_rows": self._seed,
            "static": self._seed_is_static,
            "recovery": self._recovery.state(),
            "newest": self._the_exchange.state(),
            "entries": None if self._entries is None else self._entries.state(),
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any
    ) -> None:
        """Load what `state_dict` gave, or one sub-env's state dict into all of them.

        Args:
            state_dict: of a batched env of as many sub-envs, `SerialEnv` or `ParallelEnv`.
            strict: False: rows whose episode does not go on as it did are truncated by the next step, and
                begin a new one.
            **kwargs: of ``torch.nn.Module.load_state_dict``.

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
        own = state_dict.get(OWN)
        if own is not None and len(own.get("newest", ())) != self.num_workers:
            raise ResumeError(
                f"the state dict holds no data of {self.num_workers} rows, but {list(own)}: it was not saved by a "
                f"batched env of as many. Load what state_dict() of a {type(self).__name__} gave."
            )
        if own is None and (kind := self._keeps_state):
            raise ResumeError(
                f"the state dict holds what sub-envs gave by themselves, and simulators of {kind} are among them: "
                f"what this {type(self).__name__} has shown of them is not in it. Load what its own "
                "state_dict() gave, or load transforms alone and begin new episodes."
            )
        states = {
            row: {"env": state_dict[name], **_of_row(own, row)} for row, name in enumerate(names)
        }
        replies = call_by_row(self._started(), "load_states", states, strict)
        if own is not None:
            self._resume(own, strict=strict)
        gave_up = {row for reply in replies for row, gave in reply.items() if gave}
        self._recovery.give_up(gave_up)

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        self._seed, self._seed_is_static = state["seed_of_rows"], state["static"]
        self._recovery.take(state["recovery"])
        if self._keeps_state:
            self.record_for_resume()
        self._the_exchange.take(state["newest"])
        if self._entries is not None and state["entries"] is not None:
            self._entries.take(state["entries"])


def _of_row(own: Mapping[str, Any] | None, row: int) -> dict[str, Any]:
    """Give what is held of a row beside its env's state dict.

    A row that remembers no root where it was saved goes on here, where it does, from what was shown of it.
    """
    if own is None:
        return {"root": None, "numbers": None}
    return {"root": own["root"][row] or own["newest"][row], "numbers": own["numbers"][row]}
