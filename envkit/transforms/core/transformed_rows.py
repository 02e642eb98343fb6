"""Sub-envs behind transforms, stepped on rows: the envs row by row, the transforms once for all rows of a host.

A batched env hosts sub-envs on rows of memory where they can be stepped without TensorDicts (`row_core`).
`TransformedCore` lets a `TransformedEnv` take part: the rows of the env inside are stepped bare, and what
they show goes through the transforms stacked. `TransformedRows` is taken when all transforms of all envs of a
host `stacks` and are set up alike, and what they declare is what they give. The data, and the errors, are
those of each env stepping by itself, to the bit (`tests/transforms/test_contract.py`).

Conventions
    row        global row number; index: its place among the rows of this host.
    inner      what the env inside shows; shown: the same seen through the transforms.
    root, next regions of shared memory, arrays of shape (slots, rows, *leaf), see `envkit.batched.exchange.memory`.
    own        memory of this host for inner leaves that are shown otherwise, or not at all: one moment of it.
    settings   attributes of a transform. Numbers and tensors that it calls `constants` are read at every
               step. Where another one is set, the env says that it `_changed`, and its chain is read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from envkit.arrays.leaves import Leaves
from envkit.data.forms import require_form
from envkit.data.paths import Path, as_key, as_path
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.kept_memory import memory_of, places_of, through, uncounted
from envkit.transforms.core.transform import OWNERSHIP
from envkit.transport.host import RowCursor

Tensors = dict[Path, torch.Tensor]
Arrays = Mapping[str, Mapping[Path, np.ndarray]]
Chain = tuple[FusableTransform, ...]

_SHOWN = {"root": ("observation", "done"), "next": ("observation", "reward", "done")}


def transformed_core(env: Any) -> TransformedCore | None:
    """Return the core that steps a `TransformedEnv` on rows, or None where it cannot be stepped so."""
    make = getattr(type(env.base_env), "row_core", None)
    base = None if make is None or not env._steps_by_itself else make(env.base_env)
    return None if base is None else _stacking_core(env, base, of_rows=False)


def core_around_rows(env: Any) -> TransformedCore | None:
    """Return what shows the rows of a pool through the transforms of a `TransformedEnv` around it, or None.

    It is not bound: the pool steps its rows.
    """
    make = getattr(type(env.base_env), "core_around_rows", None)
    inner = None if make is None else make(env.base_env)
    if not env._steps_by_itself or (make is not None and inner is None):
        return None
    return _stacking_core(env, inner, of_rows=True)


def _stacking_core(env: Any, base: Any, *, of_rows: bool) -> TransformedCore | None:
    if not env.is_spec_locked or list(env.done_levels) != [()] or not env.transform.is_flat:
        return None
    chain, inside = tuple(env._chain), env.base_env
    for leaf in chain:
        if not isinstance(leaf, FusableTransform) or not (
            leaf.sees_rows if of_rows else leaf.stacks
        ):
            return None
    if isinstance(base, TransformedCore):  # an env behind transforms inside another one: one chain
        if not all(leaf.stacks for leaf in base.chain) and not _leaves_flags_alone(env, chain):
            return None  # the env inside counts its resets and those from here one after the other
        chain, inside, base = base.chain + chain, base.inside, base.base
    core = TransformedCore(env, inside, base, chain, of_rows=of_rows)
    return core if core.gives_what_it_declares() else None


def _leaves_flags_alone(env: Any, chain: Chain) -> bool:
    """Check whether all rows end where the env inside a `TransformedEnv` says, so that it alone resets them."""
    core = TransformedCore(env, env.base_env, None, chain, of_rows=True)
    return core.gives_what_it_declares() and core.untouched["next"] >= {*_leaves(env, "done")}


class TransformedCore:
    """One env behind transforms, as a host of rows sees it.

    Args:
        env: the `TransformedEnv`.
        inside: the env before the first transform, which is no `TransformedEnv` that stacks too.
        base: core of that env.
        chain: the transforms around it, first to last; all of them stack.
        of_rows: the first axis of the env are the rows.
    """

    def __init__(self, env: Any, inside: Any, base: Any, chain: Chain, *, of_rows: bool):
        self.env, self.inside, self.base, self.chain = env, inside, base, chain
        self._of_rows = of_rows
        self.inner = {region: self._leaves(inside, *kinds) for region, kinds in _SHOWN.items()}
        self.inputs = list(_leaves(inside, "action", "state"))
        self.places = places_of(chain)
        self.memory = memory_of(self.places)
        self.untouched: dict[str, set[Path]] = {}

    def is_like(self, other: Any) -> bool:
        """Check whether another core shows the same simulator through the same transforms."""
        return (
            isinstance(other, TransformedCore)
            and self.base.is_like(other.base)
            and _alike(self.chain, other.chain)
        )

    def bind(
        self, cores: list[TransformedCore], rows: range, arrays: Arrays, slot: np.ndarray
    ) -> TransformedRows:
        """Fix the rows of some cores that are alike; see `envkit.batched.bound_envs.bind_rows`."""
        return TransformedRows(cores, rows, arrays, slot)

    def gives_what_it_declares(self) -> bool:
        """Check whether moments of zeros come out with the keys, shapes and dtypes that the specs say.

        Notes which leaves come out as they went in.
        """
        declared = {region: self._leaves(self.env, *kinds) for region, kinds in _SHOWN.items()}
        inputs = self._leaves(self.env, "action", "state")
        if not all(path in inputs for path in self.memory):
            return False
        for leaves in (*self.inner.values(), *declared.values(), inputs):
            if not all(map(_has_rows, leaves.values())):
                return False
        rows = self.env.batch_size[0] if self._of_rows else 2  # a hook that mixes two shows
        root = _zeros({path: inputs[path] for path in self.memory}, rows)
        for region, leaves in self.inner.items():
            blank = _zeros(leaves, rows)
            try:
                shown = through(
                    self.chain, self.places, blank, None if region == "root" else root, uncounted
                )
            except Exception:
                return False  # the env by itself tells, when it comes to that
            if _forms(shown) != _forms(_zeros(declared[region], rows)):
                return False
            self.untouched[region] = {path for path in blank if shown.get(path) is blank[path]}
        return True

    def through(self, leaves: Tensors, root: Tensors | None, rows: Sequence[int] | None) -> Tensors:
        """Show the leaves of some rows of one env (None: all) through the transforms, which count them; see `through`."""

        def counted(
            transform: FusableTransform, seen: Leaves, memory: Leaves | None
        ) -> dict[str, Any]:
            return transform.counted(seen, memory, rows)

        return through(self.chain, self.places, leaves, root, counted)

    def _leaves(self, env: Any, *kinds: str) -> dict[Path, Any]:
        """Return the leaves of one row."""
        leaves = _leaves(env, *kinds)
        return {path: leaf[0] for path, leaf in leaves.items()} if self._of_rows else leaves


class TransformedRows:
    """Cores that are alike, bound to their rows; see `envkit.batched.bound_envs.RowEnvs`."""

    def __init__(self, cores: list[TransformedCore], rows: range, arrays: Arrays, slot: np.ndarray):
        model = cores[0]
        self._first, self._slot = rows.start, slot.data
        self._cores = list(cores)
        self._untouched = model.untouched
        flags = _leaves(model.env, "done")
        slots = len(arrays["next"][next(iter(flags))])
        moments = {"root": slots + 1, "next": slots}
        inner: dict[str, Any] = {
            "in": {path: arrays["in"][path] for path in model.inputs},
            "mask": arrays["mask"],
        }
        here = slice(rows.start, rows.stop)
        for region, leaves in model.inner.items():
            inner[region] = {
                path: arrays[region][path]
                if path in model.untouched[region]
                else _one_moment(like, moments[region], len(slot))
                for path, like in leaves.items()
            }
        self._base = model.base.bind([core.base for core in cores], rows, inner, slot)
        self._inner = {region: _by_slot(inner[region], here, n) for region, n in moments.items()}
        self._shown = {region: _by_slot(arrays[region], here, n) for region, n in moments.items()}
        memory = {path: arrays["in"][path] for path in model.memory}
        self._memory = _by_slot(memory, here, slots)
        self._ended = [arrays["next"][path][:, here] for path in flags]
        self._carried = [
            (arrays["next"][path][:, here], root[:, here])
            for path, root in arrays["root"].items()
            if not (path in flags and path in model.untouched["root"])  # never set, never written
        ]
        self._errors: dict[int, Exception] = {}
        self._behind: list[int] = []
        self._places = model.places
        for core in cores:
            core.env._declared.around.add(self)
        self._read_chains()

    def replace(self, row: int, env: EnvBase) -> None:
        """Put another env, made by the same function, in the place of a row's env."""
        core: Any = env.row_core()  # type: ignore[attr-defined]
        self._cores[row - self._first] = core
        core.env._declared.around.add(self)
        self._base.replace(row, core.inside)
        self._read_chains()

    def _read_chains(self) -> None:
        self._chains = [core.chain for core in self._cores]
        self._constants = _SharedConstants(self._chains)
        self._is_outdated = False

    def _changed(self) -> None:
        """Note that the transforms of an env are set in another way, or are other ones."""
        self._is_outdated = True

    def _follow(self) -> None:
        """Take the transforms as they are now.

        Raises:
            ArgumentError: rows cannot show what they show.
        """
        cores = [core.env.row_core() for core in self._cores]
        if any(core is None or core.places != self._places for core in cores):
            names = [type(leaf).__name__ for leaf in self._cores[0].env.transform.flat()]
            raise ArgumentError(
                f"a setting of the transforms {names} was changed after their env was bound to the rows of a pool, "
                "which cannot show what they do now. Set it where the env is made, e.g. in the create function of the pool."
            )
        self._cores = cores
        self._read_chains()

    # ------------------------------------------------------------------------------- steps and resets

    @torch.no_grad()
    def reset(self, row: int, states: Collection[Path] = (), /, **kwargs: Any) -> None:
        """Start an episode and write the root row; a simulator takes no ``states`` for that."""
        self._behind = []
        if self._is_outdated:
            self._follow()
        self._base.reset(row, (), **kwargs)
        self._write("root", self._chains[row - self._first], [row - self._first])

    @torch.no_grad()
    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step some rows and write their next rows; with ``advance`` also their next roots.

        All rows are stepped before the first error is raised. The pool then asks for the rows behind
        it, see `envkit.transport.Host.run`: these are done already.
        """
        if not self._behind or self._behind != rows[:]:
            self._errors = self._stepped(rows, advance=advance)
        self._behind = []
        if self._errors:
            self._tell(rows)

    def _tell(self, rows: Sequence[int]) -> None:
        for place, row in enumerate(rows, 1):  # the pool blames the row where this stops
            error = self._errors.pop(row, None)
            if error is not None:
                self._behind = list(rows[place:])
                raise error

    def _stepped(self, rows: Sequence[int], *, advance: bool) -> dict[int, Exception]:
        """Step all of some rows, and give what those raised that did."""
        if self._is_outdated:
            self._follow()
        errors: dict[int, Exception] = {}
        left = RowCursor(rows)
        while left:
            try:
                self._base.step(left, advance=False)
                break
            except Exception as error:
                blamed, left = left.split()
                errors.update(dict.fromkeys(blamed, error))
        errors |= self._show("next", [row - self._first for row in rows[:] if row not in errors])
        return errors | self._begin_where_done(rows, errors) if advance else errors

    def _begin_where_done(
        self, rows: Sequence[int], failed: Collection[int]
    ) -> dict[int, Exception]:
        """Write the roots after a step: what it showed, and a fresh episode where one has ended."""
        slot = self._slot[self._first]
        ended = np.logical_or.reduce([flags[slot, ..., 0] for flags in self._ended])
        if len(rows) == len(self._chains):
            for following, root in self._carried:
                root[slot + 1] = following[slot]
        else:
            chosen = [row - self._first for row in rows]
            for following, root in self._carried:
                root[slot + 1][chosen] = following[slot][chosen]
        if not ended.any():
            return {}
        errors: dict[int, Exception] = {}
        fresh = []
        for row in rows[:]:
            if ended[row - self._first] and row not in failed:
                try:
                    self._base.reset(row)
                    fresh.append(row - self._first)
                except Exception as error:
                    errors[row] = error
        return errors | self._show("root", fresh)

    # ------------------------------------------------------------------------------------ transforms

    def _show(self, region: str, chosen: Sequence[int]) -> dict[int, Exception]:
        """Write what is seen of some rows through the transforms, and give what raised, by row.

        All of them at once where the transforms compute with the same constants. If that raises, each by
        itself, to learn which raise.
        """
        together = len(chosen) > 1 and self._constants.are_equal()
        groups = [chosen] if together else [[index] for index in chosen]
        errors: dict[int, Exception] = {}
        while groups:
            group = groups.pop()
            try:
                self._write(region, self._chains[group[0]], group)
            except Exception as error:
                if len(group) == 1:
                    errors[self._first + group[0]] = error
                else:
                    groups += [[index] for index in group]
        return errors

    def _write(self, region: str, chain: Chain, chosen: Sequence[int]) -> None:
        slot = self._slot[self._first]
        at = slot + (region == "root")
        inner, root, rows = self._inner[region][at], self._memory[slot], self._shown[region][at]
        if len(chosen) != len(self._chains):
            place = _place(chosen)
            inner, root = (
                {path: leaf[place] for path, leaf in part.items()} for part in (inner, root)
            )
        else:
            place = slice(None)
        shown = through(chain, self._places, inner, root if region == "next" else None, uncounted)
        untouched = self._untouched[region]
        for path, into in rows.items():
            value = shown.get(path)
            if value is not None and value is inner.get(path) and path in untouched:
                continue  # the env inside has written it there
            event = into.shape[1:]
            if value is None or value.shape[1:] != event or value.dtype != into.dtype:
                require_form(as_key(path), None if value is None else value[0], event, into.dtype)
            assert value is not None
            into[place] = value


def _leaves(env: EnvBase, *kinds: str) -> dict[Path, Any]:
    return {
        as_path(key): leaf
        for kind in kinds
        for key, leaf in getattr(env, f"full_{kind}_spec").items(True, True)
    }


def _has_rows(leaf: Any) -> bool:
    """Check whether rows of memory can hold the values of a spec; NumPy has no bfloat16."""
    return leaf.dtype not in (None, torch.bfloat16) and -1 not in leaf.shape


def _forms(leaves: Tensors) -> dict[Path, tuple[torch.Size, torch.dtype]]:
    return {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()}


def _zeros(leaves: Mapping[Path, Any], rows: int) -> Tensors:
    """Make the leaves of some rows."""
    return {
        path: torch.zeros((rows, *leaf.shape), dtype=leaf.dtype, device="cpu")
        for path, leaf in leaves.items()
    }


def _one_moment(like: Any, slots: int, rows: int) -> np.ndarray:
    """Make memory for one leaf of all rows that is the same in all slots."""
    memory = torch.zeros((rows, *like.shape), dtype=like.dtype).numpy()
    return np.lib.stride_tricks.as_strided(
        memory, (slots, *memory.shape), (0, *memory.strides), writeable=True
    )


def _by_slot(arrays: Mapping[Path, np.ndarray], rows: slice, slots: int) -> list[Tensors]:
    """View the rows of one host as tensors, one dict for each slot."""
    return [
        {path: torch.from_numpy(array[slot, rows]) for path, array in arrays.items()}
        for slot in range(slots)
    ]


def _place(chosen: Sequence[int]) -> Any:
    """Index some of the rows along the first axis: one as a view, several as a copy."""
    return slice(chosen[0], chosen[0] + 1) if len(chosen) == 1 else torch.tensor(chosen)


class _SharedConstants:
    """Watches the constants of chains, which have equal settings or none in common."""

    def __init__(self, chains: Sequence[Sequence[FusableTransform]]):
        self._are_alike = all(_alike(chain, chains[0]) for chain in chains)
        self._counterparts = [
            transforms
            for transforms in zip(*chains, strict=self._are_alike)
            if type(transforms[0]).constants is not FusableTransform.constants
        ]

    def are_equal(self) -> bool:
        """Check whether all chains compute with the same constants now.

        Values of tensors are compared each time: what NumPy or ``tensor.data`` writes leaves no other trace.
        """
        if not self._are_alike:
            return False
        for transforms in self._counterparts:
            first, *others = (transform.constants() for transform in transforms)
            if not all(_alike(own, first) for own in others):
                return False
        return True


def _alike(one: Any, other: Any) -> bool:
    """Check whether two values are equal, transforms by their settings and tensors element by element."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, nn.Module):
        return _alike(_settings(one), _settings(other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _settings(module: nn.Module) -> dict[str, Any]:
    unread = (*OWNERSHIP, "_edits")
    return {name: value for name, value in vars(module).items() if name not in unread}
