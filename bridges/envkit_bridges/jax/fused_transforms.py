"""Rows of a stateless env that show leaves by path, seen through transforms.

`NamedRows` is what the programs run: a `BatchedEnv` whose timesteps are named and changed by the hooks
of fused transforms. When something begins again, and in which order, is decided elsewhere (`functional`);
what a transform computes is in the transform. No torch here.

Conventions
    path      tuple of names; a leaf has shape (rows, *event), done flags (rows, 1), rewards that are one number too.
    memory    leaves that transforms read at the root of a step, see `FusableTransform`.
    shared    one mapping for each transform, by name: what all rows share and what is seen of them changes,
              such as running statistics (the `state` of a `FusableTransform`).
    counted   bool (rows,): rows that are seen so. Rows that fill up a batch, or are not stepped, are not.
    timestep  a `Timestep` whose ``observation`` holds by path what roots show, and whose ``reward``
              what only a step shows; done is ``terminated | truncated``.
    carried   entries of the root that neither the env nor a transform knows. They stay as they are,
              until a policy writes them.
    remembered  those of them that the policy writes. They are zero where an episode begins, see
              `transition.forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.arrays.leaves import Leaves, nest
from envkit.errors import KeyCollisionError
from envkit.functional import BatchedEnv, Origin, Timestep, done_of, name_of, sample_space
from envkit.functional.core import choose_rows
from envkit.functional.structure import PyTree
from envkit.transforms.core.kept_memory import memory_of, places_of, through

if TYPE_CHECKING:
    from envkit.transforms.core.fusable import FusableTransform

Path = tuple[str, ...]
ByPath = dict[Path, Any]
Shared = tuple[Mapping[str, Any], ...]

_DONE, _TERMINATED, _TRUNCATED = FLAGS = tuple((name,) for name in rules.DONE_LEAVES)
_REWARD: Path = ("reward",)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """The state of rows, and what transforms remember of each row and of all rows."""

    inner: Any
    memory: ByPath
    shared: Shared = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Acted:
    """Results of a policy that writes more than an action.

    ``action``: what the env is stepped with. ``written``: all that it wrote, by path, to be recorded;
    what is at the root is what transforms read there. ``following``: entries of the next moment,
    which win over what the step shows there.
    """

    action: object
    written: ByPath
    following: ByPath


class NamedRows:
    """A batched env behind transforms.

    Args:
        env: the env over rows.
        transforms: what it is seen through, first to last.
        constants: what the transforms' `constants` and `state` gave, one mapping each.
        counted: see the module; needed if a transform has state.
        roots: entries that roots show; those that are not the env's are carried.
        remembered: see the module.
    """

    def __init__(
        self,
        env: BatchedEnv,
        transforms: Sequence[FusableTransform] = (),
        constants: Sequence[Mapping[str, Any]] = (),
        counted: jax.Array | None = None,
        roots: Collection[Path] = (),
        remembered: Collection[Path] = (),
    ):
        self.env = env
        self._transforms, self._constants = transforms, constants
        self._places = places_of(transforms)
        self._counted = counted
        self._carried = {*roots, *remembered} - self._shown_by_reset
        self._remembered = set(remembered)
        self._memory = {*memory_of(self._places), *self._carried}

    # ------------------------------------------------------------------------ what a rollout needs

    def sample_action(self, key: jax.Array, num_rows: int, observation: ByPath) -> PyTree:
        """Draw one action a row; see `BatchedEnv.sample_action`. A mask that a transform has taken away allows all."""
        return self.env.sample_action(key, num_rows, nest(observation))

    def pack(self, state: RowState) -> dict[str, jax.Array]:
        """Lay the state of the env out in its buffers."""
        return self.env.pack(state.inner)

    def begin(self, inner: object, memory: ByPath) -> RowState:
        """Return a state of the env, and what is remembered, as a state of rows."""
        return RowState(inner, memory, self._initial_shared)

    def begun(self, inner: object, fresh: Timestep) -> tuple[RowState, Timestep]:
        """Return what rows show that have all been reset, to this state of the env and this timestep of it."""
        return self._moment(inner, *self._through(_named(fresh), self._initial_shared))

    def unstepped(self, state: RowState, rows: int) -> tuple[RowState, Timestep]:
        """Return what `step` gives in form, but no step is made: the state stays, what is shown means nothing."""
        blank = _named(self._blank(rows)) | self._unpaid(rows)
        following, shared = self._through(blank, state.shared, memory=state.memory)
        following |= {path: state.memory[path] for path in self._carried}
        return self._moment(state.inner, following, shared)

    def step(self, state: RowState, action: object) -> tuple[RowState, Timestep]:
        """Advance every row by its action."""
        return self._step(state, action, self._counted)

    def step_where(
        self, mask: jax.Array, state: RowState, timestep: Timestep, action: object
    ) -> tuple[RowState, Timestep]:
        """Advance the rows of ``mask``; the others keep every bit."""
        after, shown = self._step(state, action, self._counted_in(mask))
        made, kept = (after.inner, after.memory, shown), (state.inner, state.memory, timestep)
        inner, memory, shown = choose_rows(mask, made, kept)
        return RowState(inner, memory, after.shared), shown

    def restart_where(
        self, mask: jax.Array, state: RowState, timestep: Timestep
    ) -> tuple[RowState, Timestep]:
        """Start new episodes in the rows of ``mask``; the others keep what they show."""
        return self.restart_written(mask, state.inner.origin, state, timestep, lambda inner: inner)

    # ------------------------------------------------------------------------- other ways to begin

    def blank_inputs(self, rows: int) -> tuple[Any, ByPath]:
        """Return an action and the memory of a step in form; what they hold means nothing."""
        shown, shared = self._through(_named(self._blank(rows)), self._initial_shared)
        action = sample_space(self.env.action_space, jnp.zeros(2, jnp.uint32), (rows,))
        return action, self._moment(None, shown, shared)[0].memory

    def restart_written(
        self,
        mask: jax.Array,
        origins: Origin,
        state: RowState,
        timestep: Timestep,
        write: Callable[[Any], Any],
    ) -> tuple[RowState, Timestep]:
        """Restart as `restart_where` does, the state of the env being as ``write`` writes it.

        Where no row restarts, everything stays as it is, and transforms see nothing.
        """
        kept = _leaves(timestep)

        def begun() -> tuple[Any, ByPath, Shared]:
            inner, fresh, shared = self._restarted(mask, origins, state, write)
            fresh |= {path: jnp.zeros_like(kept[path]) for path in self._remembered}
            return inner, choose_rows(mask, fresh, {path: kept[path] for path in fresh}), shared

        def unchanged() -> tuple[Any, ByPath, Shared]:
            shown = self._shown_by_reset | self._remembered
            return state.inner, {path: kept[path] for path in shown}, state.shared

        inner, root, shared = self.env.chunks.where_any(mask, begun, unchanged)
        return self._moment(inner, {path: kept[path] for path in self._carried} | root, shared)

    def restart(
        self, mask: jax.Array, origins: Origin, inner: object, write: Callable[[Any], Any]
    ) -> tuple[RowState, Timestep]:
        """Start new episodes in the rows of ``mask``; what the others show means nothing."""
        state = self.begin(write(inner), {})
        return self._moment(*self._restarted(mask, origins, state, write))

    def resume(
        self, inner: object, root_leaves: ByPath, flags: jax.Array
    ) -> tuple[RowState, Timestep]:
        """Build the state of rows from a root of which some leaves are known; the others begin as after a reset.

        Args:
            root_leaves: leaves of the root by path.
            flags: bool (3, rows, 1): done, terminated, truncated.
        """
        blank, shared = _named(self._blank(flags.shape[1])), self._initial_shared
        begun = self._through(blank, shared)[0]
        leaves = begun | root_leaves | dict(zip(FLAGS, flags, strict=True))
        state, root = self._moment(inner, leaves, shared)
        following = self._through(blank | self._unpaid(flags.shape[1]), shared, memory=state.memory)
        _, shown = self._moment(inner, *following)
        return state, Timestep(root.observation, shown.reward, root.terminated, root.truncated)

    # -------------------------------------------------------------------------------------- leaves

    @property
    def _initial_shared(self) -> Shared:
        """Values that rows share, as they were given."""
        return tuple(
            {name: constants[name] for name in transform.state()}
            for transform, constants in zip(self._transforms, self._constants, strict=True)
        )

    def _counted_in(self, mask: jax.Array) -> jax.Array | None:
        return None if self._counted is None else self._counted & mask

    def _step(
        self, state: RowState, action: object, mask: jax.Array | None
    ) -> tuple[RowState, Timestep]:
        acted = action if isinstance(action, Acted) else Acted(action, {}, {})
        inner, timestep = self.env.step(state.inner, acted.action)
        following = _named(timestep) | _rewards(timestep.reward)
        memory = _overwritten(state.memory, acted.written)
        following, shared = self._through(following, state.shared, mask, memory)
        following |= {path: memory[path] for path in self._carried}
        return self._moment(inner, _overwritten(following, acted.following), shared)

    def _restarted(
        self, mask: jax.Array, origins: Origin, state: RowState, write: Callable[[Any], Any]
    ) -> tuple[Any, ByPath, Shared]:
        blank = self._blank(mask.shape[0])
        written, fresh = self.env.restart_written(mask, origins, state.inner, blank, write)
        return written, *self._through(_named(fresh), state.shared, self._counted_in(mask))

    def _through(
        self,
        leaves: ByPath,
        shared: Shared,
        mask: jax.Array | None = None,
        memory: ByPath | None = None,
    ) -> tuple[ByPath, Shared]:
        """Return what the transforms show after a step from ``memory`` (None: after a reset), and what rows share then.

        They count the rows of ``mask`` (None: none). Of a step they also count the memory at its root, if the step produced none.
        """
        before, after = iter(zip(self._constants, shared, strict=True)), []

        def constants_of(transform: FusableTransform, seen: Leaves, root: Leaves | None) -> Any:
            constants, values = next(before)
            if values and mask is not None:
                rows_seen = Leaves({**(root or {}), **seen}, 1)
                values = {
                    **values,
                    **transform.seen_leaves(rows_seen, mask, {**constants, **values}),
                }
            after.append(values)
            return {**constants, **values}

        return through(self._transforms, self._places, leaves, memory, constants_of), tuple(after)

    def _blank(self, rows: int) -> Timestep:
        like = self.env.template[1]
        return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), like)

    def _unpaid(self, rows: int) -> ByPath:
        return _rewards(self._blank(rows).reward)

    @cached_property
    def _shown_by_reset(self) -> set[Path]:
        return set(
            jax.eval_shape(lambda: self._through(_named(self._blank(1)), self._initial_shared)[0])
        )

    def _moment(self, inner: object, leaves: ByPath, shared: Shared) -> tuple[RowState, Timestep]:
        memory = {path: leaf for path, leaf in leaves.items() if path in self._memory}
        shown = {path: leaf for path, leaf in leaves.items() if path not in FLAGS}
        at_root = self._shown_by_reset | self._carried
        root = {path: leaf for path, leaf in shown.items() if path in at_root}
        return RowState(inner, memory, shared), Timestep(
            root,
            {path: leaf for path, leaf in shown.items() if path not in root},
            leaves[_TERMINATED][..., 0],
            leaves[_TRUNCATED][..., 0],
        )


def _overwritten(leaves: ByPath, written: ByPath) -> ByPath:
    """Return ``leaves``, those that are in ``written`` from there, in their own dtypes."""
    return {
        path: written[path].astype(leaf.dtype) if path in written else leaf
        for path, leaf in leaves.items()
    }


def flags_of(timestep: Timestep) -> jax.Array:
    """Stack the done flags of rows, bool (3, rows), time in front of rows: as one array they are handed over once."""
    return jnp.stack([done_of(timestep), timestep.terminated, timestep.truncated])


def _leaves(timestep: Timestep) -> ByPath:
    """List what a timestep of named rows shows at a root."""
    flags = done_of(timestep), timestep.terminated, timestep.truncated
    return {
        **timestep.observation,
        **{path: flag[..., None] for path, flag in zip(FLAGS, flags, strict=True)},
    }


def _rewards(reward: PyTree) -> ByPath:
    """Return the rewards of rows by name, "reward" where there is one; single numbers are given a trailing axis."""
    found = jax.tree_util.tree_flatten_with_path(reward)[0]
    return {
        name_of(path) or _REWARD: leaf if leaf.ndim > 1 else leaf[..., None] for path, leaf in found
    }


def _named(timestep: Timestep) -> ByPath:
    """Return by name what a timestep of the env shows, but for its reward."""
    flags = done_of(timestep), timestep.terminated, timestep.truncated
    named = {path: flag[..., None] for path, flag in zip(FLAGS, flags, strict=True)}
    return {**observation_leaves(timestep), **named}


def observation_leaves(timestep: Timestep) -> ByPath:
    """Return the leaves of an observation by name; a bare array is called "observation".

    So is an entry "state", since that name stands for the state of the env.

    Raises:
        KeyCollisionError: there is an entry "observation" as well, or one named like the infos.
    """
    shown = jax.tree_util.tree_flatten_with_path(timestep.observation)[0]
    infos = jax.tree_util.tree_flatten_with_path(timestep.info)[0]
    names = [name_of(path) or ("observation",) for path, _ in shown]
    if {"state", "observation"} <= {name[0] for name in names}:
        raise KeyCollisionError(
            "the env observes both 'state' and 'observation', but 'state' is where a stateless env "
            "keeps its own state. Give that observation another name."
        )
    if infos and any(name[0] == "info" for name in names):
        raise KeyCollisionError(
            "the env observes 'info' and gives infos, which lie under that name. Give that observation "
            "another name, or leave Timestep(info=...) out."
        )
    names = [("observation", *name[1:]) if name[0] == "state" else name for name in names]
    return {
        **{name: leaf for name, (_, leaf) in zip(names, shown, strict=True)},
        **{("info", *name_of(path)): leaf for path, leaf in infos},
    }
