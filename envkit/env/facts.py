"""Facts about an env that hold while its specs and settings stay: one value that envs around it read, merge and carry.

An env answers `Stepping._facts`; its kind decides them in `_find_facts`, once, until the specs change. A pool merges
those of its sub-envs, which workers send with their specs, a mixed env those of its members; a chain of transforms
replaces what the transforms change.

Where a fact is the name of a class, that is the first one, here or inside, of which it is true; None: of none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envkit.data.paths import Key, Path


@dataclass(frozen=True)
class Facts:
    """Facts about one env; picklable.

    Attributes:
        infos: observations that are infos: recorded, but not shown to policies.
        bookkeeping: observations that transforms have added to count and sum; see `Transform.keeps_books`.
        recorded_inputs: states that each step writes into the data, and that it never reads.
        unrecorded: nodes at root and next that a rollout leaves out with ``record_state=False``.
        action_masks: actions, each with the entry of the data that says which of its options are allowed.
        gives_nan: NaN stands for values that the env cannot know.
        draws_own_actions: random actions come from an override of `rand_action`, or from rules of the env's own.
        leaves_torch: steps are made of numbers outside torch: tensors without their own values cannot be taken.
        works_elsewhere: steps are made outside this process: sending them out first lets both sides work.
        seeds_taken: how many seeds of a chain `set_seed` takes, one for each part that has its own.
        keeps_state: a class whose simulator keeps its own state.
        unsaved_state: a class that may keep an episode where no state dict sees it: a user's own, fixed to its batch,
            without ``get_extra_state``.
        no_start_at_state: a class that cannot begin at a state that it is given.
        steps_all_rows: a class whose simulator steps all its rows together, so that a `_step` mask may leave out those that
            have ended and no others.
        steps_have_effects: a class whose steps change something else than data, so that none may be dropped.
    """

    infos: frozenset[Path] = frozenset()
    bookkeeping: frozenset[Path] = frozenset()
    recorded_inputs: tuple[Key, ...] = ()
    unrecorded: tuple[str, ...] = ()
    action_masks: tuple[tuple[Key, Key], ...] = ()
    gives_nan: bool = False
    draws_own_actions: bool = False
    leaves_torch: bool = False
    works_elsewhere: bool = False
    seeds_taken: int = 1
    keeps_state: str | None = None
    unsaved_state: str | None = None
    no_start_at_state: str | None = None
    steps_all_rows: str | None = None
    steps_have_effects: str | None = None

    @classmethod
    def merged(cls, facts: Iterable[Facts]) -> Facts:
        """Return what is true of envs that are stepped together as one batch.

        What the batch itself decides is left at its default: recorded inputs, what is not recorded, and whether steps
        have effects.
        """
        parts = [*facts]

        def first(name: str) -> str | None:
            return next(filter(None, (getattr(part, name) for part in parts)), None)

        return cls(
            infos=frozenset[Path]().union(*(part.infos for part in parts)),
            bookkeeping=frozenset[Path]().union(*(part.bookkeeping for part in parts)),
            action_masks=tuple(dict.fromkeys(pair for part in parts for pair in part.action_masks)),
            gives_nan=any(part.gives_nan for part in parts),
            draws_own_actions=any(part.draws_own_actions for part in parts),
            leaves_torch=any(part.leaves_torch for part in parts),
            works_elsewhere=any(part.works_elsewhere for part in parts),
            seeds_taken=sum(part.seeds_taken for part in parts),
            keeps_state=first("keeps_state"),
            unsaved_state=first("unsaved_state"),
            no_start_at_state=first("no_start_at_state"),
            steps_all_rows=first("steps_all_rows"),
        )
