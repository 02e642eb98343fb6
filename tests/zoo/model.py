"""What right is: any number of bare games and what envkit must show of them, in plain Python.

`Model` says what each call gives at root and next of every row, and where the rows stand then. It knows
no tensors, masks are lists, and nothing in it is shared between rows or clever. The rules are those of
the behaviour reference: a row that is not stepped shows its root once more, with reward 0; a row that is
done waits until it is reset; the root after a reset is fresh, and `next` holds the true last observation.
A rollout until all rows are done shows of those that wait their last transition once more, with reward 0.

Conventions
    row         number of a game, counted over all batch axes.
    moment      what a row shows at one time: dict of entry to list of numbers.
    choose      function of step and row that gives a choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Moment = dict[str, list[float]]
Stop = Literal["never", "any", "all"]
Choose = Callable[[int, int], int]


class Game(Protocol):
    """A bare game: `tests.zoo.trail.Trail`, or one that draws its beginnings otherwise."""

    observation: list[float]

    def reset(self) -> None: ...

    def step(self, choice: int) -> tuple[float, bool, bool]: ...


@dataclass(frozen=True)
class Around:
    """What stands around the bare game.

    Args:
        factor: the env has a `step` of its own, which multiplies rewards.
        limit: a `StepCounter` adds its entry, and truncates after so many steps.
        summed: a `RewardSum` adds its entry.
        banked: the reward is a state as well, to which each step adds; whoever resets leaves it.
    """

    factor: int = 1
    limit: int | None = None
    summed: bool = False
    banked: bool = False


PLAIN = Around()


@dataclass
class Transition:
    """One step of one row. ``choice`` is None where the row was not stepped."""

    root: Moment
    choice: int | None
    next: Moment


class Row:
    """One game, and what the data shows of it."""

    def __init__(self, game: Game, around: Around = PLAIN):
        self.game = game
        self.around = around
        self.bank = 0.0
        self.begin()

    def begin(self) -> None:
        """Show an episode that has just begun."""
        self.steps, self.total = 0, 0.0
        self.root = self._moment(False, False)

    def reset(self) -> None:
        self.game.reset()
        self.begin()

    def step(self, choice: int) -> Transition:
        """Play on; the root becomes what `step_mdp` makes of the outcome."""
        root = self.root
        reward, terminated, truncated = self.game.step(choice)
        reward *= self.around.factor
        self.steps += 1
        self.total += reward
        if self.around.limit is not None:
            truncated = truncated or self.steps >= self.around.limit
        if self.around.banked:
            self.bank = reward = self.bank + reward
        self.root = self._moment(terminated, truncated)
        return Transition(root, choice, {**self.root, "reward": [reward]})

    def wait(self) -> Transition:
        """Show the root once more."""
        return Transition(self.root, None, {"reward": [0.0], **self.root})

    @property
    def is_done(self) -> bool:
        return bool(self.root["done"][0])

    def _moment(self, terminated: bool, truncated: bool) -> Moment:
        shown: Moment = {
            "observation": self.game.observation,
            "done": [terminated or truncated],
            "terminated": [terminated],
            "truncated": [truncated],
        }
        if self.around.limit is not None:
            shown |= {"step_count": [self.steps]}
        if self.around.summed:
            shown |= {"episode_reward": [self.total]}
        if self.around.banked:
            shown |= {"reward": [self.bank]}
        return shown


class Model:
    """Rows side by side. They do not see each other, but for the stop rules of a rollout."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = list(rows)

    @property
    def root(self) -> list[Moment]:
        return [row.root for row in self.rows]

    @property
    def done(self) -> list[bool]:
        return [row.is_done for row in self.rows]

    def reset(self, mask: Sequence[bool] | None = None) -> None:
        """`env.reset`, of all rows or those of a mask."""
        for number, row in enumerate(self.rows):
            if mask is None or mask[number]:
                row.reset()

    def step(self, choices: Sequence[int], mask: Sequence[bool] | None = None) -> list[Transition]:
        """`env.step`, and `env.step_mdp`."""
        return [
            row.step(choice) if mask is None or mask[number] else row.wait()
            for number, (row, choice) in enumerate(zip(self.rows, choices, strict=True))
        ]

    def advance(
        self, choices: Sequence[int], mask: Sequence[bool] | None = None
    ) -> list[Transition]:
        """`env.step_and_maybe_reset`."""
        made = self.step(choices, mask)
        self.reset(self.done)
        return made

    def rollout(self, steps: int, choose: Choose, stop: Stop) -> list[list[Transition]]:
        """`env.rollout` from the root as it is; what is done there begins anew first."""
        self.reset(self.done)
        record: list[list[Transition]] = []
        for index in range(steps):
            running = [stop != "all" or not done for done in self.done]
            choices = [choose(index, row) for row in range(len(self.rows))]
            step = self.step(choices, running)
            for row, runs in enumerate(running):
                if not runs:
                    step[row].root = record[-1][row].root
            record.append(step)
            if (stop == "any" and any(self.done)) or (stop == "all" and all(self.done)):
                break
            if stop == "never" and index < steps - 1:
                self.reset(self.done)
        return record

    def saved(self, rows: Sequence[int]) -> list[Row]:
        """Copy rows as they stand, in any order and number."""
        return [copy.deepcopy(self.rows[row]) for row in rows]

    def load(self, rows: Sequence[Row]) -> None:
        """Go on from rows that were saved."""
        self.rows = [copy.deepcopy(row) for row in rows]
