"""Rows of a pool seen through the transforms around it, so that a whole rollout of both is recorded on rows.

The pool steps its own rows. Their data goes through the transforms once for all rows of a step, into memory that
the recorder reads. The data is that of stepping one by one (`tests/transforms/test_contract.py`).

Conventions
    inner  what the pool shows; shown: the same seen through the transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.batched.exchange.memory import RowMemory, rings_of
from envkit.batched.exchange.recording import recorded
from envkit.batched.exchange.shared_memory import BufferExchange, Round, fill
from envkit.batched.metadata import EnvLeaves
from envkit.data.paths import Path, as_key
from envkit.env.runs import Run
from envkit.specs.inputs import require_input
from envkit.specs.lasting import lasting


class SeenThrough(Protocol):
    """Transforms that show stacked rows.

    Attributes:
        memory: entries of the root that they read.
    """

    memory: list[Path]

    def through(
        self,
        leaves: dict[Path, torch.Tensor],
        root: dict[Path, torch.Tensor] | None,
        rows: Sequence[int] | None,
    ) -> dict[Path, torch.Tensor]:
        """Show all rows of a step from a root, or some rows of a reset (whose root is None)."""
        ...


def recorded_behind(
    env: Any, exchange: BufferExchange, run: Run
) -> TensorDictBase | list[TensorDictBase] | None:
    """Make a rollout of a `TransformedEnv` around the pool of an exchange; None where rows cannot hold it.

    See `Runs.record` for what is promised.
    """
    declared = env._declared
    rows, made_for = declared.cache.get("rows of its pool", (None, None))
    if made_for is not exchange:  # a pool that starts again has another one
        rows = ShownRows.of(env, exchange)
        if declared.remembers:
            declared.cache["rows of its pool"] = rows, exchange
    return None if rows is None else recorded(env, rows, run, ended=lambda following: {})


class ShownRows(RowMemory):
    """The rows of an exchange, and memory for what transforms show of them; see `RowMemory`."""

    def __init__(self, env: Any, exchange: BufferExchange, core: SeenThrough):
        env_leaves = EnvLeaves(env)
        rings = rings_of(env_leaves, exchange.num_slots, "state")
        inputs = {**rings.inputs, **exchange.rings.inputs}
        super().__init__(
            rings._replace(inputs=inputs),
            exchange.actions,
            exchange.slots,
            exchange.batch_size,
            {},
            None,
        )
        self.exchange, self.has_large_rows = exchange, False
        self._through = core.through
        self._remembered = inputs.keys() - exchange.actions
        self._memory = [{path: moment[path] for path in core.memory} for moment in self.inputs]
        self._flags = list(env_leaves.paths("done"))
        self._shown = [_arrays(moment) for moment in self.nexts]
        self._roots, self._fresh = (
            [_arrays(moment) for moment in moments[1:]] for moments in (self.roots, exchange.roots)
        )
        self._resets_inside = (
            False  # whether workers reset what ends: the transforms leave all flags alone
        )

    @classmethod
    @lasting()
    def of(cls, env: Any, exchange: BufferExchange) -> ShownRows | None:
        """Make one, unless steps cannot be recorded on rows, or rows are so large that it would be of no use."""
        has_states = exchange.rings.inputs.keys() != exchange.actions
        if exchange.has_large_rows or exchange.node_axes or has_states:
            return None
        core: SeenThrough | None = env.core_around_rows()
        return None if core is None else cls(env, exchange, core)

    def fill(self, inputs: TensorDictBase | Mapping[Path, Any], mask: None, slot: int) -> None:
        """Write the inputs of a step into a slot; see `BufferExchange.fill`."""
        self.exchange.fill(inputs, None, slot)
        for path in self._remembered:
            fill(self.inputs[slot][path], inputs.get(path, None), path)

    def check_actions(self, rows: Mapping[Path, np.ndarray]) -> None:
        """Check actions that were written into the rows of a slot."""
        self.exchange.check_actions(rows)

    def select_all(self) -> None:
        """Select all rows for the next steps; a run that is under way is ended."""
        self.exchange.select_all()
        self._resets_inside = False  # limits may have been set since the last run

    @contextmanager
    def recording(self, leave: Callable[[], None]) -> Generator[None]:
        """Hold the slots for a run, which a policy that uses the pool meanwhile makes leave them."""
        with self.exchange.recording(leave):
            yield

    def wake(
        self, root: TensorDictBase | None, rows: None, *, advance: bool, slot: int
    ) -> tuple[Round, bool]:
        """Begin the step of a slot."""
        inside = advance and self._resets_inside
        return self.exchange.wake(None, None, advance=inside, slot=slot), advance

    def wait(self, sent: tuple[Round, bool]) -> None:
        """Wait for the step, show it, and begin again what has ended if that was asked for."""
        begun, advances = sent
        inner, slot = self.exchange.wait(begun), self.slot
        shown = self._through(inner, self._memory[slot], None)
        for path, memory in self._shown[slot].items():
            np.copyto(memory, _array_of(shown.get(path), self.nexts[slot][path], path))
        if advances:
            self._advance(slot, inner if begun.advance else None)
            self._resets_inside = all(shown[path] is inner[path] for path in self._flags)

    def _advance(self, slot: int, begun_in: Mapping[Path, torch.Tensor] | None) -> None:
        """Write the root that follows a step: what it showed, and the first of an episode where one has ended.

        ``begun_in``: the outcome whose flags the pool has obeyed already; None if it has reset nothing.
        """
        shown, root = self._shown[slot], self._roots[slot]
        for path, memory in root.items():
            np.copyto(memory, shown[path])
        ended = np.logical_or.reduce([shown[path][:, 0] for path in self._flags])
        rows = ended.nonzero()[0]
        if not len(rows):
            return
        if begun_in is not None:
            flags = [begun_in[path].numpy()[:, 0] for path in self._flags]
            ended &= ~np.logical_or.reduce(flags)
        if ended.any():
            self.exchange.begin_ended(ended.nonzero()[0].tolist())
        fresh = {path: torch.from_numpy(leaf[rows]) for path, leaf in self._fresh[slot].items()}
        first = self._through(fresh, None, rows)
        for path, memory in root.items():
            memory[rows] = _array_of(first.get(path), self.roots[slot + 1][path][: len(rows)], path)


def _arrays(moment: Mapping[Path, torch.Tensor]) -> dict[Path, np.ndarray]:
    return {path: leaf.numpy() for path, leaf in moment.items()}


def _array_of(value: torch.Tensor | None, like: torch.Tensor, path: Path) -> np.ndarray:
    """Show a tensor as an array, or say what is wrong with its form."""
    if value is None or value.dtype != like.dtype or value.shape != like.shape:
        require_input(as_key(path), value, like.shape, like.dtype)
    assert value is not None
    return value.numpy(force=value.requires_grad)
