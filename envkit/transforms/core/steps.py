"""A step on its way through transforms: what the stepper made of it is shown, and what ended begins anew.

How a step comes to its stepper, and which transforms run where, is decided in `stepping` and `route`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Key, as_key
from envkit.data.resets import collect_reset_masks, mark_done, merge_reset
from envkit.data.transition import leaves
from envkit.env.pending import Pending
from envkit.specs.devices import reading_waits
from envkit.transforms.core.route import Route, kept_where_skipped

__all__ = ["TransformedStep"]


@dataclass(slots=True, eq=False)
class TransformedStep(Pending):
    """A step on its way through transforms.

    Attributes:
        route: how it goes.
        given: ``td`` after the inverse pass, without masks; what the stepper is given.
        mask: which rows move; None: all.
        inner: the step of the stepper; None where no row moves.
        resets_too: that one also resets what is done.
    """

    env: Any
    route: Route
    given: TensorDictBase
    mask: torch.Tensor | None
    inner: Pending | None = field(default=None, init=False)
    resets_too: bool = field(default=False, init=False)

    def check(self) -> Self:
        if self.inner is not None:
            self.inner.check()
        return self

    def begin(self) -> Self:
        if self.inner is not None:
            self.inner.begin()
        return self

    def stepped(self) -> TensorDictBase:
        done = None if self.inner is None else self.inner.stepped()
        if self.mask is not None:
            return self.attached(self._masked_next(self.mask, done), done)
        assert done is not None
        return self.attached(self.route.shown_next(self.given, done), done)

    def attached(self, following: TensorDictBase, done: TensorDictBase | None) -> TensorDictBase:
        """Give the data with its ``next``, and with the inputs of the stepper's step, ``done``, that are recorded."""
        env, td = self.env, self.td
        if td.get(rules.STEP, None) is not None:
            td = td.exclude(rules.STEP, inplace=True)
        for key in (env._declared.table or env._table).recorded:
            value = None if done is None else done.get(key, None)
            value = self.given.get(key, None) if value is None else value
            if value is not None:  # reshaped behind transforms of batch size
                td.set(key, value.reshape((*td.batch_size, *value.shape[self.given.batch_dims :])))
        return env._attach_next(td, following)

    def _masked_next(self, mask: torch.Tensor, done: TensorDictBase | None) -> TensorDictBase:
        """Show the rows that moved, if any did, among the others."""
        env, route, given = self.env, self.route, self.given
        skipped = env._skipped_next(self.td)
        if done is None:
            return skipped
        shown = mask.reshape(self.td.batch_size).to(skipped.device)  # which transforms may change
        if not env.batch_locked and given.batch_size == self.td.batch_size:
            stepped = route.shown_next(given[mask], done[mask])  # type: ignore[arg-type]
            return env._checks.scatter(shown, stepped, skipped)
        stepped = route.shown_next(given.set(rules.STEP, mask), done)
        return kept_where_skipped(shown, stepped, skipped)

    def with_root(self) -> tuple[TensorDictBase, TensorDictBase]:
        return self._both_shown() if self.resets_too else Pending.with_root(self)

    def _both_shown(self) -> tuple[TensorDictBase, TensorDictBase]:
        """Receive a step whose stepper has reset what is done, and show both; reset the rest."""
        assert self.inner is not None
        env = self.env
        done, root = self.inner.recv()
        ended = done.get("next").copy()  # as the stepper shows it
        data = self.attached(self.route.shown_next(self.given, done), done)
        following = env.step_mdp(data)
        if self._needs_no_answer(ended, data.get("next")):
            mark_done(following, env.done_levels)
        elif env.any_done(following):
            root = self._also_reset(root, following, ended)
        else:
            return data, following
        masks = collect_reset_masks(following, env.done_levels, env.full_done_spec)
        begun = root.copy()
        fresh = env._shown_root(following, root)
        same = []
        if self._is_pure and not isinstance(fresh, LazyStackedTensorDict):
            same = _the_same(fresh, begun, _the_same(data.get("next"), ended))
        if not (env.allow_done_after_reset or set(env.done_keys) <= set(same)):
            env._checks.refuse_done(fresh, following, masks, env)
        untouched = [(key, fresh.pop(key)) for key in same]  # the stepper has kept what goes on
        root = merge_reset(following, fresh, masks, keeps_last=env.keeps_last_output)
        for key, leaf in untouched:
            root.set(key, leaf)
        return data, root

    def _needs_no_answer(self, ended: TensorDictBase, shown: TensorDictBase) -> bool:
        """Say whether transforms may be told of resets without asking whether there are any, which waits for a card.

        So it is where the stepper has begun all anew that ended, and a reset of nothing leaves no trace.
        """
        keys = self.route.stepper.done_keys
        if not any(reading_waits(ended.get(key)) for key in keys):
            return False
        is_theirs = set(keys) == set(self.env.done_keys) == set(_the_same(shown, ended, keys))
        return is_theirs and self._is_pure

    @property
    def _is_pure(self) -> bool:
        """Whether the transforms outside of the stepper write to no tensor in place, and leave no trace of a call."""
        return all(leaf.is_pure for part in self.route.outside for leaf in part.flat())

    def _also_reset(
        self, root: TensorDictBase, asked: TensorDictBase, ended: TensorDictBase
    ) -> TensorDictBase:
        """Reset in the stepper what ``asked`` wants reset and the stepper has not begun anew."""
        stepper = self.route.stepper
        stepper.any_done(ended)
        late = {}
        for key in stepper.reset_keys:
            mask = asked.get(key, None)
            if mask is not None:
                late[key] = rules.still_to_reset(mask, ended.get(key, None))
        if not any(bool(mask.any()) for mask in late.values()):
            return root
        return stepper._reset_anew(root.update(late))


def _the_same(
    first: TensorDictBase, second: TensorDictBase, keys: Iterable[Key] | None = None
) -> list[Key]:
    """List the keys, of those given or all, under which both hold the very same tensor."""
    keys = [as_key(path) for path, _ in leaves(first)] if keys is None else keys
    found = ((key, first.get(key, None)) for key in keys)
    return [key for key, leaf in found if leaf is not None and leaf is second.get(key, None)]
