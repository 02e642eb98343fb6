"""A step of a mixed env as a value: begun in all members, received from all, joined into one batch.

When a step may be made is decided in `mixed`, what members show of their states in `members`.

Conventions
    told  what a member gave, under its own names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.resets import collect_reset_masks
from envkit.env.pending import Pending

__all__ = ["MixedStep"]


@dataclass(slots=True, eq=False)
class MixedStep(Pending):
    """A step of all members. Each of them has checked its part when it was made.

    Attributes:
        mask: rows that are stepped, on the CPU; None: all.
        moving: rows whose simulator moves for good.
        resets_too: the members also reset what is done.
        parts: the step of each member by name, in the order in which they begin.
    """

    mask: torch.Tensor | None
    moving: torch.Tensor
    resets_too: bool
    parts: dict[str, Pending] = field(default_factory=dict, init=False)

    def begin(self) -> Self:
        self.env._moments.count(self.moving)
        try:
            for own in self.parts.values():
                own.begin()
        except BaseException:
            self._forget_what_was_told()
            raise
        return self

    def stepped(self) -> TensorDictBase:
        env, (nexts, _) = self.env, self._received()
        following = env._joined(nexts)
        env._moments.tell(following, self.td, self.mask)
        return env._attach_next(self.td.exclude(rules.STEP, inplace=True), following)

    def with_root(self) -> tuple[TensorDictBase, TensorDictBase]:
        if not self.resets_too:
            return Pending.with_root(self)
        env, (nexts, roots) = self.env, self._received()
        following = env._joined(nexts)
        env._moments.tell(following)
        data, root = env._attach_next(self.td, following), env._joined(roots)
        self._count_begun(following, root)
        return data, root

    def _received(self) -> tuple[dict[str, TensorDictBase], dict[str, TensorDictBase]]:
        """Receive from every member, also if one fails.

        Returns:
            What the step of each member made and what it told last, by its name: the root that follows if
            the members have reset what is done.
        """
        nexts: dict[str, TensorDictBase] = {}
        newest: dict[str, TensorDictBase] = {}
        failed: Exception | None = None
        try:
            for member in self.env._in_order_of_waiting:
                name = member.name
                try:
                    outcome = self.parts[name].recv()
                    data, root = outcome if self.resets_too else (outcome, outcome.get("next"))
                    nexts[name], newest[name] = data.get("next"), root
                    member.keep(root, None if self.mask is None else self.mask[member.rows])
                except Exception as error:
                    failed = failed or error
            if failed is not None:
                raise failed
        except BaseException:
            self._forget_what_was_told()
            raise
        return nexts, newest

    def _forget_what_was_told(self) -> None:
        """Say that it is not known any more which of the members have moved."""
        for member in self.env.members:
            member.newest = None

    def _count_begun(self, following: TensorDictBase, root: TensorDictBase) -> None:
        """Count the episodes that members have begun after a step that ended with ``following``."""
        env = self.env
        if not env._moments.are_told:
            return
        flags = following.select(*env.done_keys)
        env.any_done(flags)
        masks = collect_reset_masks(flags, env.done_levels, env.full_done_spec)
        env._moments.count(env._rows_of(masks))
        env._moments.tell(root)
