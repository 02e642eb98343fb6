"""Some sub-envs of a batched env as their own env: ``env[0]``, ``env[1:3]``, ``env[[0, 2]]``.

An `IndexedEnv` holds no simulators. It steps and resets those of the batched env that it was taken from, with a mask
that leaves the other sub-envs out. This module decides which index means which rows; it does not know workers.

Conventions
    row    number of a sub-env of the batched env.
    place  number of the same sub-env within the part, 0 .. len(rows) - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.attributes import AttributeLookup, CallsOfRows, chosen_rows
from envkit.batched.batch_layout import specs_of_rows
from envkit.batched.batched_env import BatchedEnv, drawn_inside
from envkit.batched.lazy_stacks import by_row, stack_rows
from envkit.data.paths import as_key
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.seeding import reset_keywords, seeds_of_parts
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    ClosedEnvError,
    NotSelectableError,
    ResumeError,
    RowIndexError,
    UnsupportedError,
)
from envkit.specs.annotations import EnvData
from envkit.transport import Pool
from envkit.transport.pool import call_by_row


class Indexable(BatchedEnv):
    """A batched env whose sub-envs can be taken out by an index."""

    def __getitem__(self, index: Any) -> IndexedEnv:
        """Return some sub-envs as one env, which steps and resets them alone; starts the sub-envs.

        Args:
            index: an int, a slice, or a sequence of different ints; negative ones count from the end.

        Returns:
            An `IndexedEnv` of batch size ``(number of sub-envs, *sub_batch)``; an int gives one of 1 row.

        Raises:
            RowIndexError: (an IndexError) there is no such sub-env, or none is chosen.
            NotSelectableError: (a NotImplementedError) the index is a mask of bools.

        Example:
            >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
            >>> env[1:].rollout(2).batch_size
            torch.Size([2, 2])
        """
        return IndexedEnv(self, rows_of(index, self.num_workers))

    def __setitem__(self, index: Any, source: EnvBase | Sequence[EnvBase]) -> None:
        """Replace the envs inside of sub-envs: each runs ``sub_env[:] = source``.

        Args:
            index: see ``env[index]``.
            source: an env, or a sequence of one for each sub-env that is chosen.

        Raises:
            UnsupportedError: (a NotImplementedError) the sub-envs do not define ``__setitem__``.
            ArgumentCountError: there are more or fewer sources than sub-envs.
            ArgumentTypeError: (a TypeError) a source is no env.
        """
        rows = rows_of(index, self.num_workers)
        sources = [source] if isinstance(source, EnvBase) else list(source)
        if wrong := [one for one in sources if not isinstance(one, EnvBase)]:
            raise ArgumentTypeError(
                f"a source is of type {type(wrong[0]).__name__}, but sub-envs take over envs. Pass an env for each."
            )
        if len(sources) != len(rows):
            raise ArgumentCountError(
                f"there are {len(sources)} sources for {len(rows)} sub-envs. Pass one env for each."
            )
        asked = {row: partial(_written, one) for row, one in zip(rows, sources, strict=True)}
        for row, kind in call_by_row(self._started(), "apply", asked).items():
            if kind is not None:
                raise UnsupportedError(
                    f"sub-env {row} is of type {kind}, which takes over no other env. Write __setitem__(self, "
                    "index, source) in its class, or make it with another create function."
                )


def rows_of(index: Any, count: int) -> list[int]:
    """Return the rows that an index of ``count`` rows chooses."""
    if isinstance(index, slice):
        rows = list(range(count))[index]
    else:
        numbers = np.asarray(index.tolist() if isinstance(index, torch.Tensor) else index)
        if numbers.dtype == bool:
            raise NotSelectableError(
                f"the index is {index!r}, but sub-envs are not chosen by bools. Pass their numbers, e.g. "
                "mask.nonzero().flatten()."
            )
        if numbers.ndim > 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise RowIndexError(
                f"the index is {index!r}, but must be an int, a slice, or a sequence of ints from 0 to {count - 1}. Write "
                "env[0], env[0:2] or env[[0, 1]], for example."
            )
        rows = [int(row) for row in numbers.reshape(-1)]
    if wrong := [row for row in rows if not -count <= row < count]:
        raise RowIndexError(
            f"the index has {wrong}, but there are {count} sub-envs. Pass numbers from 0 to {count - 1}."
        )
    rows = [row % count for row in rows]
    if not rows:
        raise RowIndexError(f"the index {index!r} chooses none of {count} sub-envs. Choose one.")
    if len(set(rows)) < len(rows):
        raise ArgumentError(
            f"the index chooses {rows}, so one simulator would be stepped twice. Name each sub-env once."
        )
    return rows


def _written(source: EnvBase, env: Any) -> str | None:
    if not hasattr(type(env), "__setitem__"):
        return type(env).__name__
    env[:] = source
    return None


class IndexedEnv(AttributeLookup, EnvBase):
    """Some sub-envs of a `SerialEnv` or a `ParallelEnv`, stepped and reset without the others.

    ``env[index]`` makes one. The simulators stay those of the batched env: what moves one moves the other. It ends
    with the batched env, which `close` of this one leaves running. Before the batched env was reset, the first
    `reset` of this one resets all of its sub-envs.

    Example:
        >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        >>> last = env[-1]
        >>> last.reset()["observation"].shape
        torch.Size([1, 4])
        >>> last.get_attr("gravity")
        [9.8]
    """

    _fast_path_bypasses = EnvBase._fast_path_bypasses

    def __init__(self, batched: BatchedEnv, rows: list[int]):
        pool = batched._started()
        metadata = [batched._metadata[row] for row in rows]
        super().__init__(
            device=batched.device,
            batch_size=(len(rows), *batched.batch_size[1:]),
            allow_done_after_reset=batched.allow_done_after_reset,
        )
        self._of = (batched,)  # in a tuple: an env would become a part of this one
        self._rows, self.num_workers = rows, len(rows)
        self._pool: tuple[Pool, ...] = (pool,)
        merged = Facts.merged(found.facts for found in metadata)
        name = type(self).__name__  # it hands no state on
        self._facts_of_rows = replace(
            merged, leaves_torch=True, steps_have_effects=name, no_start_at_state=name
        )
        specs = specs_of_rows(metadata, range(len(rows)), self.device)
        self._declared.added_flags = batched._declared.added_flags
        self._declared.hold(specs["input_spec"], specs["output_spec"])

    def __getitem__(self, index: Any) -> IndexedEnv:
        """Return some of its sub-envs as one env; see `Indexable`."""
        return IndexedEnv(
            self._batched(), [self._rows[place] for place in rows_of(index, self.num_workers)]
        )

    def _find_facts(self) -> Facts:
        return self._facts_of_rows

    def _batched(self) -> BatchedEnv:
        """Return the batched env, if it still runs the sub-envs that this one was made of."""
        batched = self._of[0]
        if self.is_closed:
            raise ClosedEnvError(
                "this part of a batched env was closed. Take it again: env[index]."
            )
        if batched._pool is not self._pool[0]:
            raise ClosedEnvError(
                f"the {type(batched).__name__} of which this is a part was closed. Reset it, and take the part "
                "again: env[index]."
            )
        return batched

    # ----------------------------------------------------------------------------- resets and steps

    def _check_batch(self, td: TensorDictBase) -> None:
        self._batched()
        super()._check_batch(td)

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        batched = self._batched()
        if kwargs:
            width = self.batch_size[1:].numel()
            keywords_of = reset_keywords(kwargs, [row * width for row in range(self.num_workers)])
            of_rows: list[dict[str, Any]] = [{} for _ in range(batched.num_workers)]
            for row, keywords in zip(self._rows, keywords_of, strict=True):
                of_rows[row] = keywords
            kwargs = {"list_of_kwargs": of_rows}
        if not batched._has_begun:
            return batched.reset(**kwargs)[self._rows]
        whole = self._whole(td)
        masked_keys = [
            key for key in self.reset_keys if td is not None and td.get(key, None) is not None
        ]
        flags = dict(zip(self.reset_keys, self.done_keys_groups, strict=True))
        for key in masked_keys or self.reset_keys:
            like = batched.full_done_spec[flags[key][0]]
            mask = torch.zeros(like.shape, dtype=torch.bool, device=self.device)
            mask[self._rows] = (
                True
                if td is None or not masked_keys
                else td.get(key).reshape(mask[self._rows].shape)
            )
            whole.set(key, mask)
        return batched.reset(whole, **kwargs)[self._rows]

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        batched = self._batched()
        mask = torch.zeros(batched.batch_size, dtype=torch.bool, device=self.device)
        given = td.get(rules.STEP, None)
        mask[self._rows] = True if given is None else rules.step_mask(given, td.batch_size)
        whole = self._whole(td).set(rules.STEP, mask)
        return batched.step(whole).get("next")[self._rows]

    def _whole(self, td: TensorDictBase | None) -> TensorDictBase:
        """Put data of these rows among zeros for the others."""
        batched = self._batched()
        if td is None:
            return batched.fake_tensordict().exclude("next")
        td = td.exclude("next", rules.STEP, *self.reset_keys)
        if batched._share_individual_td:
            parts = [found.tensordict.exclude("next").clone() for found in batched._metadata]
            for row, own in zip(self._rows, by_row(td).unbind(0), strict=True):
                parts[row] = own
            return stack_rows(parts, individual=True)
        whole = TensorDict({}, batched.batch_size, device=td.device)
        for path, value in leaves(td):
            whole.set(as_key(path), self._among_others(value))
        return whole

    def _among_others(self, value: Any) -> Any:
        count = self._of[0].num_workers
        if isinstance(value, torch.Tensor):
            whole = value.new_zeros((count, *value.shape[1:]))
            return whole.index_copy(0, torch.tensor(self._rows, device=value.device), value)
        parts = list(value.unbind(0))
        places = {row: place for place, row in enumerate(self._rows)}
        return torch.stack([parts[places.get(row, 0)] for row in range(count)], 0)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Sample every action from its spec; see `EnvBase.rand_action`."""
        if not self._facts.draws_own_actions:
            return super().rand_action(tensordict)
        self._batched()
        td = self._drawn_into(tensordict)
        return drawn_inside(self, self._pool[0], self._rows, td, individual=False)

    # ---------------------------------------------------------------------------------------- seed

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed its i-th sub-env with the i-th seed of the chain, and return the one after the last.

        With ``static_seed`` every one of them gets ``seed``, which is returned. The others are not seeded.
        """
        batched = self._batched()
        links = [batched._metadata[row].facts.seeds_taken for row in self._rows]
        seeds, following = seeds_of_parts(seed, links, static=static_seed)
        of_row = dict(zip(self._rows, seeds, strict=True))
        self._pool[0].seeds.update(of_row)
        call_by_row(self._pool[0], "set_seed", of_row)
        self._seed_actions(seed)
        if batched._has_begun:
            self._leave_episodes("set_seed()")
        return following

    def _leave_episodes(self, call: str) -> None:
        batched = self._batched()
        unshown = batched._unshown
        if unshown is None:
            unshown = torch.zeros(batched.batch_size, dtype=torch.bool)
        batched._unshown = unshown.index_fill(0, torch.tensor(self._rows), True)
        batched._left_by = call
        batched._in_use.moves += 1

    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError("set_seed seeds the sub-envs.")

    # ---------------------------------------------------------------------------------- attributes

    def _attributes_of_all(self, name: str) -> tuple[type, CallsOfRows]:
        batched = self._batched()
        return batched._attribute_type, CallsOfRows(batched, self._rows)

    def _ask_rows(
        self, ask: Any, indices: int | Iterable[int] | None, *, wants_all: bool = True
    ) -> list[Any]:
        rows = [self._rows[place] for place in chosen_rows(indices, self.num_workers)]
        return self._batched()._ask_rows(ask, rows, wants_all=wants_all)

    # ---------------------------------------------------------------------------------------- life

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Release this part; the batched env goes on. Closing it again does nothing."""
        self.is_closed = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: data comes where the batched env delivers it.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a part of a batched env has the device of that. Call to() of the batched env, and take the part again."
        )

    def _own_state(self) -> dict[str, Any]:
        raise ResumeError(
            "a part of a batched env holds no separate state. Save the batched env: env.state_dict()."
        )
