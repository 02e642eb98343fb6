"""The rules of episodes: which rows are done or selected, and what survives a step or a reset.

This module alone decides these things. It works on leaves of any array namespace (NumPy, torch,
JAX, also inside `jax.jit`) and on key paths; it does not know TensorDict, processes or simulators.
Walking a tree is the caller's job. Every other module asks here.

Conventions
    leaf        array of shape (*batch, *event); masks cover its leading axes.
    reset mask  bool, shape of the level's done leaf, or that shape without its trailing singleton;
                True means "start a new episode here".
    step mask   bool, shape (*batch,), or (*batch, 1); True means "advance this row".
    level       a node of the data tree that owns done leaves, named by its path: () is the root.
    path        tuple of strings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from array_api_compat import array_namespace

from envkit.errors import DoneError, ResetMaskError, StepMaskError

Path = tuple[str, ...]
Array = Any  # of any namespace; no one type has them all

STEP = "_step"
RESET = "_reset"
DONE_LEAVES = ("done", "terminated", "truncated")
FINAL_MISSING = "final_missing"
"""Entry of `next`, bool: an episode ended there, and the simulator did not return its last observation."""

Stop = Literal["never", "any", "all"]
"""When a run ends: never before its last step, and what is done is reset; after the first step in which
any row is done; when all rows are, those done before frozen."""


# ------------------------------------------------------------------------------------ done flags


def twins(names: Collection[str]) -> tuple[str, ...]:
    """Return the done leaves a level has once its twins are added, in the order they are shown.

    ``done`` and ``terminated`` always come together; ``truncated`` and leaves of other names
    (a custom end flag) are kept as declared.
    """
    others = tuple(name for name in names if name not in DONE_LEAVES)
    standard = ("done", "terminated") + (("truncated",) if "truncated" in names else ())
    return standard + others


def done_from(terminated: Array, truncated: Any | None = None) -> Array:
    """Return where an episode has ended for any reason: ``terminated | truncated``, same shape."""
    return terminated if truncated is None else terminated | truncated


def complete_done(
    returned: Mapping[str, Any], declared: Collection[str], level: Path = ()
) -> dict[str, Any]:
    """Infer the done leaves of one level that a simulator did not return.

    A single end-of-episode value is read as *terminated*.

    Args:
        returned: bool leaves the simulator returned, by name, all of one shape.
        declared: names in the done spec of this level.
        level: path of the level, for the message.

    Returns:
        The inferred leaves by name; empty when nothing is missing. Leaves that must be filled
        with False are given as None, since only the caller knows their shape when ``returned`` is empty.

    Raises:
        DoneError: ``done`` and ``truncated`` were given without ``terminated``.
    """
    missing = [name for name in declared if name not in returned]
    if not missing:
        return {}
    done, terminated, truncated = (returned.get(name) for name in DONE_LEAVES)
    if terminated is None and done is not None and truncated is not None:
        place = f" at {'.'.join(level)!r}" if level else ""
        raise DoneError(
            f"the simulator returned done and truncated{place}, from which terminated cannot be "
            "inferred. Return terminated (and truncated) from _step and _reset, or done alone."
        )
    inferred: dict[str, Any] = dict.fromkeys(missing)
    if "done" in missing:
        inferred["done"] = truncated if terminated is None else done_from(terminated, truncated)
    if "terminated" in missing and done is not None:
        inferred["terminated"] = done
    return inferred


# ------------------------------------------------------------------------------------------ masks


def step_mask(mask: Array, batch_shape: Sequence[int]) -> Array:
    """Reshape a `_step` mask to ``(*batch,)``.

    Raises:
        StepMaskError: it is not boolean, or has neither the batch shape nor that plus a singleton.
    """
    batch_shape = tuple(batch_shape)
    shape = tuple(mask.shape)
    _require_bool(mask, STEP, StepMaskError)
    if shape == batch_shape:
        return mask
    if shape == (*batch_shape, 1):
        return mask[..., 0]
    raise StepMaskError(
        f"the {STEP!r} mask has shape {shape}, but the data has batch size {batch_shape}. "
        f"Pass a boolean mask of shape {batch_shape} or {(*batch_shape, 1)}."
    )


def reset_mask(mask: Array, done_shape: Sequence[int], batch_ndim: int, level: Path = ()) -> Array:
    """Reshape a `_reset` mask to the shape of its level's done leaf without the trailing singleton.

    Args:
        mask: bool array beside the done leaf.
        done_shape: shape of that done leaf.
        batch_ndim: number of batch axes of the data; these are never dropped.
        level: path of the level, for the message.

    Raises:
        ResetMaskError: it is not boolean or has another shape.
    """
    done_shape, shape = tuple(done_shape), tuple(mask.shape)
    _require_bool(mask, ".".join((*level, RESET)), ResetMaskError)
    bare_shape = bare_mask_shape(done_shape, batch_ndim)
    if shape == bare_shape:
        return mask
    if shape == done_shape:
        return mask[..., 0]
    raise ResetMaskError(
        f"the {'.'.join((*level, RESET))!r} mask has shape {shape}, but the done leaf beside it has "
        f"shape {done_shape}. Pass a boolean mask of shape {done_shape} or {bare_shape}."
    )


def bare_mask_shape(done_shape: tuple[int, ...], batch_ndim: int) -> tuple[int, ...]:
    """Return the shape of a done leaf without its trailing singleton, if it has one behind the batch axes."""
    droppable = len(done_shape) > batch_ndim and done_shape[-1:] == (1,)
    return done_shape[:-1] if droppable else done_shape


def governing_level(path: Path, masked: Iterable[Path]) -> Path | None:
    """Return the level whose mask decides for the entry (or level) at ``path``.

    A mask supersedes the masks of all levels below it, so the highest one wins.

    Returns:
        The shortest of ``masked`` that is ``path`` or lies above it; None when there is none, and
        then everything at ``path`` is reset.
    """
    above = [level for level in masked if path[: len(level)] == level]
    return min(above, key=len, default=None)


def reduce_mask(mask: Array, leaf_shape: Sequence[int], batch_ndim: int) -> Array:
    """Fit a mask to a leaf: collapse with `any` the axes that the leaf does not have.

    Per-agent flags next to an entry all agents share are the case in point.
    """
    if tuple(leaf_shape[: mask.ndim]) == tuple(mask.shape):
        return mask
    xp = array_namespace(mask)
    return xp.any(mask, axis=tuple(range(batch_ndim, mask.ndim)))


def choose(mask: Array, fresh: Array, kept: Array) -> Array:
    """Take ``fresh`` where ``mask`` is set and ``kept`` elsewhere.

    Args:
        mask: rows that are replaced, shape ``(*batch,)``, bool.
        fresh: new leaf, shape ``(*batch, *event)``, any dtype.
        kept: old leaf, same shape, dtype and device as ``fresh``.

    Returns:
        A new leaf of that shape and dtype. Neither input is written to.

    Raises:
        ResetMaskError: the axes of ``mask`` are not the leading axes of ``kept``.
    """
    if tuple(mask.shape) != tuple(kept.shape[: mask.ndim]):
        raise ResetMaskError(
            f"mask has shape {tuple(mask.shape)}, but must match the leading axes of a leaf of "
            f"shape {tuple(kept.shape)}. Pass a mask of shape {tuple(kept.shape[: mask.ndim])}."
        )
    xp = array_namespace(mask, fresh, kept)
    event_axes = (1,) * (kept.ndim - mask.ndim)
    return xp.where(xp.reshape(mask, (*mask.shape, *event_axes)), fresh, kept)


def still_to_reset(mask: Array, begun: Any | None) -> Array:
    """Return what of a reset is left to do once some rows have begun again by themselves.

    Args:
        mask: what is to be reset, bool, shape ``(*batch, *event)``.
        begun: what has begun again, bool; its axes are the leading ones of ``mask``. None: nothing.

    Returns:
        Bool, in the shape of ``mask``.

    Raises:
        ResetMaskError: the axes of ``begun`` are not the leading axes of ``mask``.
    """
    if begun is None:
        return mask
    return choose(begun, array_namespace(mask).zeros_like(mask), mask)


def kept_shape(previous: Any | None, wanted: Sequence[int]) -> bool:
    """Check whether a root value can stand in for a `next` value of a row that was not stepped.

    A size of -1 in ``wanted`` is any.
    """
    if previous is None or len(previous.shape) != len(wanted):
        return False
    return all(size in (-1, own) for size, own in zip(wanted, previous.shape, strict=True))


# --------------------------------------------------------------------------- from a step to the next


def is_at_root(
    path: Path, *, reward_keys: Collection[Path], state_keys: Collection[Path] = ()
) -> bool:
    """Check whether an output of a step also is at the root: all do but rewards.

    A reward that is an input of the env as well does. The next step carries on the value
    there, and `next` of a row that is not stepped repeats it; another reward is 0 there.
    """
    return path not in reward_keys or path in state_keys


def is_carried(
    path: Path,
    *,
    from_next: bool,
    reward_keys: Collection[Path],
    done_keys: Collection[Path],
    action_keys: Collection[Path],
    state_keys: Collection[Path] = (),
    kept_keys: Collection[Path] = (),
    keep_other: bool = True,
) -> bool:
    """Check whether an entry of a transition is at the root of the next one.

    Args:
        path: where the entry is, relative to the root or to ``next``.
        from_next: the entry was produced by the step; otherwise it was at the root before.
        reward_keys, done_keys, action_keys: leaves to drop (pass none to keep that kind).
        state_keys: inputs of the env; a reward that is also one of them is carried.
        kept_keys: root entries that are carried whatever ``keep_other`` says.
        keep_other: carry root entries that the step did not produce.
    """
    if path[-1] in (STEP, RESET):
        return False
    if not is_at_root(path, reward_keys=reward_keys, state_keys=state_keys):
        return False
    if path in done_keys or path in action_keys:
        return False
    return from_next or keep_other or path in kept_keys


def _require_bool(mask: Array, name: str, error: type[Exception]) -> None:
    if "bool" not in str(mask.dtype):
        raise error(
            f"the {name!r} mask has dtype {mask.dtype}, but must be boolean. "
            "Convert it, e.g. with mask.bool()."
        )
