"""Spaces: the values that a stateless environment accepts and returns, and how to draw them.

This module decides the distribution of random actions. It does not know specs: the bridge turns
spaces into those.

Conventions
    space      `Box`, `Discrete`, `MultiDiscrete`, or a dict, tuple or list of spaces.
    bounds     inclusive on both sides, for integers too.
    path       tuple of names of a space within a tree of spaces; () where it is alone.
    mask       bool, shape (*batch, options): which options of a choice are allowed; those of several side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from envkit.arrays.integers import as_int
from envkit.errors import ArgumentError, StateStructureError
from envkit.functional.structure import PyTree, name_of

SpaceTree = Any
"""A `Box`, a `Discrete`, a `MultiDiscrete` or another space with ``sample``, or a dict, tuple or list of them."""


@dataclass(frozen=True, eq=False)
class Box:
    """Describe arrays of one shape and dtype between two bounds.

    Args:
        low, high: bounds, inclusive: numbers or arrays that broadcast to ``shape``. They are stored as read-only
            NumPy arrays of that shape.
        shape: sizes of the array; None takes the shape to which ``low`` and ``high`` broadcast together.
        dtype: float32 by default.

    Raises:
        ArgumentError: (a ValueError) a lower bound is above its upper bound.

    Example:
        >>> import jax
        >>> from envkit import Box
        >>> space = Box(-1.0, 1.0, shape=(2,))
        >>> space.low, space.dtype
        (array([-1., -1.], dtype=float32), dtype('float32'))
        >>> space.sample(jax.random.key(0), batch=(5,)).shape
        (5, 2)
    """

    low: Any
    high: Any
    shape: tuple[int, ...] | None = None
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        low, high = np.asarray(self.low), np.asarray(self.high)
        shape = np.broadcast_shapes(low.shape, high.shape) if self.shape is None else self.shape
        if (low > high).any():
            raise ArgumentError(
                f"a Box needs low <= high everywhere, but got low={self.low}, high={self.high}. "
                "Swap them."
            )
        for name, value in (("low", low), ("high", high)):
            object.__setattr__(self, name, np.broadcast_to(value.astype(dtype), shape))
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", dtype)

    def sample(self, key: jax.Array, batch: tuple[int, ...] = ()) -> jax.Array:
        """Draw uniformly; Gaussian where no bound is finite, exponential where only one is."""
        shape = (*batch, *self.low.shape)
        if jnp.issubdtype(self.dtype, jnp.integer):
            return _sample_integers(key, self, shape)
        return _sample_floats(key, self, shape)

    def _identity(self) -> tuple[Any, ...]:
        return (self.low.tobytes(), self.high.tobytes(), self.shape, self.dtype.str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


@dataclass(frozen=True)
class Discrete:
    """Describe the integers from 0 to ``n - 1``, int32, shape ().

    Args:
        n: how many integers there are, at least 1.

    Raises:
        ArgumentError: (a ValueError) ``n`` is below 1.

    Example:
        >>> import jax
        >>> from envkit import Discrete
        >>> space = Discrete(3)
        >>> drawn = space.sample(jax.random.key(0), batch=(5,))
        >>> drawn.shape, drawn.dtype, int(drawn.max()) < 3
        ((5,), dtype('int32'), True)
    """

    n: int
    shape = ()
    dtype = np.dtype(np.int32)

    def __post_init__(self) -> None:
        n = as_int("n of Discrete", self.n, least=1, meaning="how many integers there are")
        object.__setattr__(self, "n", n)

    def sample(self, key: jax.Array, batch: tuple[int, ...] = ()) -> jax.Array:
        """Draw one of the integers with equal probability."""
        return jax.random.randint(key, batch, 0, self.n, dtype=jnp.int32)


@dataclass(frozen=True)
class MultiDiscrete:
    """Describe vectors of integers, entry ``i`` from 0 to ``nvec[i] - 1``: int32, shape ``(len(nvec),)``.

    Args:
        nvec: how many integers each entry has, at least 1.

    Raises:
        ArgumentError: (a ValueError) there is no entry, or one below 1.

    Example:
        >>> import jax
        >>> from envkit import MultiDiscrete
        >>> space = MultiDiscrete((3, 2))
        >>> space.shape, space.sample(jax.random.key(0), batch=(5,)).shape
        ((2,), (5, 2))
    """

    nvec: tuple[int, ...]
    dtype = np.dtype(np.int32)

    def __post_init__(self) -> None:
        meaning = "how many integers the entry has"
        entries = (
            as_int(f"nvec[{index}] of MultiDiscrete", n, least=1, meaning=meaning)
            for index, n in enumerate(self.nvec)
        )
        object.__setattr__(self, "nvec", tuple(entries))
        if not self.nvec:
            raise ArgumentError(
                "nvec is empty, but must have an entry for each choice. Pass (3, 2), for example."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    def sample(self, key: jax.Array, batch: tuple[int, ...] = ()) -> jax.Array:
        """Draw every entry by itself, each of its integers with equal probability."""
        above = jnp.array(self.nvec, jnp.int32)
        return jax.random.randint(key, (*batch, *self.shape), 0, above, dtype=jnp.int32)


@dataclass(frozen=True)
class AgentsDiscrete(MultiDiscrete):
    """One of ``n`` integers for each of several agents that are alike: int32, shape ``(agents,)``."""

    @classmethod
    def of(cls, n: int, agents: int) -> Self:
        """Return the space of so many agents, each with ``n`` options."""
        return cls((n,) * agents)

    @property
    def n(self) -> int:
        """The options of one agent."""
        return self.nvec[0]


def as_space(space: SpaceTree) -> SpaceTree:
    """Take a Box, Discrete, MultiDiscrete or Dict of Gymnasium for the space of envkit that holds the same; others stay.

    Raises:
        ArgumentError: it counts from another number than 0, or its choices lie on more axes than one.
    """
    if type(space).__module__.partition(".")[0] not in ("gymnasium", "gym"):
        return space
    kind = type(space).__name__
    if kind == "Dict":
        return {name: as_space(member) for name, member in space.spaces.items()}
    if np.any(getattr(space, "start", 0)) or (kind == "MultiDiscrete" and space.nvec.ndim != 1):
        raise ArgumentError(
            f"the action space is {space}, but a stateless env counts options from 0, on one axis. Declare "
            "envkit.functional.Discrete(n) or MultiDiscrete(nvec), and shift the number in step."
        )
    if kind == "Box":
        return Box(space.low, space.high, space.shape, space.dtype)
    if kind == "Discrete":
        return Discrete(int(space.n))
    return MultiDiscrete(tuple(space.nvec.tolist())) if kind == "MultiDiscrete" else space


def sample_space(
    space: SpaceTree,
    key: jax.Array,
    batch: tuple[int, ...] = (),
    masked: Collection[tuple[str, ...]] = (),
) -> PyTree:
    """Draw from a space or from every space of a tree, each from its own key.

    Spaces whose path is in ``masked`` give 32 random bits for each choice, of which `choose_allowed` makes one.

    With ``batch=(n,)`` n times, of which the first are the same for every n. Each number is hashed from the key and
    its place, as JAX does with ``jax_threefry_partitionable``, so here it is on. See
    https://docs.jax.dev/en/latest/jep/263-prng.html.
    """
    parts, treedef = jax.tree_util.tree_flatten_with_path(space, is_leaf=_is_space)
    is_single = treedef == jax.tree.structure(0)
    drawn = []
    with jax.threefry_partitionable(True):
        for number, (path, leaf) in enumerate(parts):
            space_key = key if is_single else jax.random.fold_in(key, number)
            drawn.append(
                jax.random.bits(space_key, (*batch, *leaf.shape), jnp.uint32)
                if name_of(path) in masked
                else leaf.sample(space_key, batch)
            )
    return jax.tree.unflatten(treedef, drawn)


def choose_allowed(
    space: SpaceTree, drawn: PyTree, masks: Mapping[tuple[str, ...], jax.Array]
) -> PyTree:
    """Choose among the options that masks allow, each with equal probability.

    An option of n is chosen by 32 bits: some are likelier than others by n / 2^32 at most. Where a mask allows none,
    all of them may be chosen: `JaxEnv` looks at masks on a CPU.

    Args:
        space: a space, or a tree of spaces.
        drawn: what `sample_space` gave, with the keys of ``masks`` as ``masked``.
        masks: by path; shape (rows, options), or any of as many elements a row.

    Raises:
        StateStructureError: a mask has not one flag for each option.
    """
    if not masks:
        return drawn

    def chosen(path: Any, member: SpaceTree, value: jax.Array) -> jax.Array:
        mask = masks.get(name_of(path))
        return value if mask is None else _chosen(member, value, mask)

    return jax.tree_util.tree_map_with_path(chosen, space, drawn, is_leaf=_is_space)


def require_action_masks(
    declared: Any, space: SpaceTree, observed: Mapping[tuple[str, ...], Any], owner: str
) -> None:
    """Check that masks are declared as pairs of paths, each of an action with an observation.

    Args:
        declared: ``action_masks`` of an env.
        space: its action space.
        observed: what it observes, infos included: leaves with a dtype by path.
        owner: the env, for messages.

    Raises:
        StateStructureError: they are of another form, a path names none, or a mask holds floats.
    """
    found = jax.tree_util.tree_flatten_with_path(space, is_leaf=_is_space)[0]
    actions = [name_of(path) for path, _ in found]
    line = f"action_masks = (({actions[0]!r}, ('action_mask',)),)"
    is_listed = isinstance(declared, tuple | list)
    for pair in declared if is_listed else [declared]:
        is_pair = is_listed and isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(path, tuple) for path in pair):
            raise StateStructureError(
                f"action_masks of {owner} is {declared!r}, but must be pairs of paths, which are tuples of names: an action "
                f"and the observation that is its mask. Write {line}, for example."
            )
        action, mask = pair
        if action not in actions:
            raise StateStructureError(
                f"action_masks of {owner} names the action {action!r}, but its action space has {actions}. Name one of "
                f"these: {line}, for example."
            )
        if mask not in observed:
            raise StateStructureError(
                f"action_masks of {owner} names the mask {mask!r}, but its observations are {sorted(observed)}. Name one "
                "of these, or return a Timestep that observes the mask."
            )
        if jnp.issubdtype(observed[mask].dtype, jnp.inexact):
            raise StateStructureError(
                f"the mask {mask!r} of {owner} has dtype {observed[mask].dtype}, but must hold bools or integers. Return "
                "mask != 0."
            )


def _is_space(node: object) -> bool:
    return hasattr(node, "sample")


def _chosen(space: Discrete | MultiDiscrete, bits: jax.Array, mask: jax.Array) -> jax.Array:
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    rows = mask.shape[0]
    if mask.size != rows * sum(sizes):
        raise StateStructureError(
            f"the mask of an action has shape {mask.shape[1:]} in each row, but the action has {sum(sizes)} options. "
            "Observe one flag for each option."
        )
    parts = jnp.split(mask.reshape(rows, sum(sizes)), list(accumulate(sizes))[:-1], -1)
    most = max(sizes)
    filled = [
        jnp.pad(part | ~part.any(-1, keepdims=True), ((0, 0), (0, most - part.shape[-1])))
        for part in parts
    ]
    allowed = jnp.cumsum(jnp.stack(filled, 1), -1, dtype=jnp.int32)  # (rows, choices, options)
    number = bits.reshape(rows, len(sizes)) % allowed[..., -1].astype(jnp.uint32)
    # The option that has so many allowed ones before it: as many as do not exceed that number come before it.
    choice = (allowed <= number[..., None].astype(jnp.int32)).sum(-1, dtype=jnp.int32)
    return choice.reshape(bits.shape)


def _sample_integers(key: jax.Array, box: Box, shape: tuple[int, ...]) -> jax.Array:
    wide = jnp.promote_types(box.dtype, jnp.int32)
    # randint excludes its upper bound; the largest integer of the dtype has none above it.
    above = np.minimum(box.high.astype(object), np.iinfo(wide).max - 1) + 1
    drawn = jax.random.randint(key, shape, box.low.astype(wide), above.astype(wide), dtype=wide)
    return drawn.astype(box.dtype)


def _sample_floats(key: jax.Array, box: Box, shape: tuple[int, ...]) -> jax.Array:
    has_low, has_high = np.isfinite(box.low), np.isfinite(box.high)
    low, high = np.where(has_low, box.low, 0), np.where(has_high, box.high, 1)
    bounded = jax.random.uniform(key, shape)
    with np.errstate(over="ignore"):
        wide = np.isinf(high - low)  # halves of such bounds have a difference that is a float
    half = np.where(wide, 0.5, 1.0).astype(low.dtype)
    drawn = (low * half + (high * half - low * half) * bounded) / half
    if not (has_low & has_high).all():
        tail = jax.random.exponential(key, shape)
        free = jax.random.normal(key, shape)
        drawn = jnp.where(has_low & ~has_high, low + tail, drawn)
        drawn = jnp.where(has_high & ~has_low, high - tail, drawn)
        drawn = jnp.where(has_low | has_high, drawn, free)
    # Rounding may carry low + (high - low) * u past the bound.
    return jnp.clip(drawn, box.low, box.high).astype(box.dtype)
