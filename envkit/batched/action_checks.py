"""How the actions of a batch become those of the sub-envs that get them.

A sub-env may trust what it is given: this is asked before anybody steps. What an action may be is
decided in `specs.inputs`, here which spec is that of which row.

Conventions
    row   number of a sub-env, 0 .. num_rows - 1.
    rows  tensor of shape (num_rows, *leaf): the values of one action for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from envkit.batched.metadata import EnvMetaData
from envkit.data.paths import Path, as_path
from envkit.specs.inputs import ActionInput, action_inputs

__all__ = ["ActionRows", "inputs_by_path"]


class ActionRows:
    """Write actions into the rows of the sub-envs, each as the spec of its row says.

    Args:
        metadata: of each row; they share one layout.
        first: what the first row is called in messages.
    """

    def __init__(self, metadata: Sequence[EnvMetaData], *, first: int = 0):
        self._first = first
        self._runs = [(inputs_by_path(found), rows) for found, rows in _runs(metadata)]

    @property
    def paths(self) -> set[Path]:
        """The actions that have a rule."""
        return set(self._runs[0][0])

    def rule_of_all(self, path: Path) -> ActionInput | None:
        """Give the rule of an action, if it is the same in all rows and takes what fits as it is."""
        rule = self._runs[0][0].get(path) if self.are_alike else None
        return rule if rule is not None and rule.takes_as_is else None

    def write(
        self,
        path: Path,
        value: torch.Tensor | np.ndarray | None,
        rows: torch.Tensor,
        stepped: Sequence[int] | None = None,
    ) -> None:
        """Convert one action of all rows and write it; those that are not ``stepped`` (None steps all) hold anything.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
        """
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        for inputs, run in self._runs:
            rule = inputs[path]
            rule.require_form(value, (len(rows),))  # told as the caller sees it
            assert value is not None
            own = None if stepped is None else [row - run.start for row in stepped if row in run]
            part = value[run.start : run.stop].detach().to(rows.device)
            taken = rule.converted(part, (len(run),), rows=own, first=self._first + run.start)
            rows[run.start : run.stop].copy_(taken)

    def check(self, path: Path, rows: np.ndarray) -> None:
        """Check, and convert, rows that hold an action of all sub-envs already; see `write`."""
        for inputs, run in self._runs:
            own = rows[run.start : run.stop] if len(self._runs) > 1 else rows
            if inputs[path].values_of(own, own.shape) is None:
                taken = inputs[path].take(
                    torch.from_numpy(own), (len(run),), first=self._first + run.start
                )
                own[...] = taken.numpy()

    def write_one(
        self, path: Path, value: torch.Tensor | None, rows: torch.Tensor, row: int
    ) -> None:
        """Write one action of one row; ``value`` has no axis of rows.

        Raises:
            InputError, MissingKeyError: see `ActionInput.take`.
        """
        rule = self.require_form(path, value, row)
        assert value is not None
        rows[row].copy_(rule.take(value.detach().to(rows.device), first=row))

    def require_form(self, path: Path, value: torch.Tensor | None, row: int) -> ActionInput:
        """Check one action of one row but for its numbers, which may be anything, and give its rule; see `write_one`."""
        rule = next(inputs[path] for inputs, run in self._runs if row in run)
        rule.require_form(value, ())
        return rule

    @property
    def are_alike(self) -> bool:
        """Whether all rows take the same actions."""
        return len(self._runs) == 1

    def taken(self, path: Path, value: torch.Tensor, count: int) -> torch.Tensor:
        """Give one action of ``count`` of the rows, which are alike, in the form of its spec.

        Raises:
            InputError: see `ActionInput.take`; it counts the rows from 0.
        """
        return self._runs[0][0][path].take(value, (count,))


def inputs_by_path(metadata: EnvMetaData) -> dict[Path, ActionInput]:
    """Give the rule of each action of one env."""
    found = action_inputs(metadata.full_spec("action"))
    return {as_path(key): rule for key, rule in found.items()}


def _runs(metadata: Sequence[EnvMetaData]) -> Iterator[tuple[EnvMetaData, range]]:
    """Part the rows into runs of equal action specs."""
    kinds: list[EnvMetaData] = []

    def kind_of(found: EnvMetaData) -> int:
        for number, known in enumerate(kinds):
            if found is known or found.full_spec("action") == known.full_spec("action"):
                return number
        kinds.append(found)
        return len(kinds) - 1

    start = 0
    for kind, run in groupby(map(kind_of, metadata)):
        stop = start + len(list(run))
        yield kinds[kind], range(start, stop)
        start = stop
