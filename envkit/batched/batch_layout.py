"""The layout of several sub-envs as one batch, read from their metadata: specs, batch size, device, and how data is
laid out.

This module says what a batched env declares, refuses sub-envs that cannot be in one batch, and decides whether
results are dense or lazy stacks and whether rows of memory can carry them. It does not know when sub-envs are built.

Conventions
    metadata  one for each task, a kind of sub-env; ``tasks`` gives the number of each row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from envkit.batched.metadata import EnvMetaData
from envkit.data.paths import as_key
from envkit.errors import ArgumentError, SpecError
from envkit.process_wide import warn
from envkit.specs import Composite, stack


@dataclass(frozen=True)
class BatchLayout:
    """Specs and layout of the batch.

    Attributes:
        batch_size: ``(rows, *sub_batch)``.
        device: where data is delivered.
        has_own_rows: each sub-env has its own TensorDict in the results.
        allows_done_after_reset: some sub-env accepts done flags right after a reset.
    """

    batch_size: torch.Size
    device: torch.device | None
    has_own_rows: bool
    allows_done_after_reset: bool


def layout_of(
    metadata: Sequence[EnvMetaData], rows: int, *, device: Any, share_individual_td: bool | None
) -> BatchLayout:
    """Find what sub-envs agree on.

    Args:
        metadata: of each task.
        rows: number of sub-envs.
        device: what the user asked for; None takes that of the sub-envs.
        share_individual_td: what the user asked for, see `_has_own_rows`.

    Raises:
        EmptySpecError: a node of a spec has no leaf.
        SpecStackError: a leaf stacks unlike shapes within one sub-env.
        SpecError: done flags are in different places, or batch sizes or devices differ.
        ArgumentError: dense results were asked for and the layouts differ.
    """
    for one in metadata:
        one.refuse_empty_nodes()
        one.refuse_ragged_leaves()
    _require_common_level(metadata)
    return BatchLayout(
        batch_size=torch.Size((rows, *_sub_batch(metadata))),
        device=_delivery_device(metadata) if device is None else device,
        has_own_rows=_has_own_rows(metadata, share_individual_td),
        allows_done_after_reset=any(one.allow_done_after_reset for one in metadata),
    )


def specs_of_rows(
    metadata: Sequence[EnvMetaData], tasks: Sequence[int], device: torch.device | None
) -> Composite:
    """Put the specs of all rows into one: expanded where all are equal, else stacked."""
    first = metadata[0]
    if all(found.specs == first.specs for found in metadata[1:]):
        specs = first.specs.expand(len(tasks), *first.batch_size)
    else:
        specs = stack([metadata[task].specs for task in tasks], 0)
    return specs if device is None else specs.to(device)


def _has_own_rows(metadata: Sequence[EnvMetaData], share_individual_td: bool | None) -> bool:
    """Check whether each sub-env has its own TensorDict in the results.

    Args:
        metadata: of each task.
        share_individual_td: what the user asked for; None leaves it to the layouts. Sizes that only
            data can tell may differ at any step, so such rows are their own then, too.

    Raises:
        ArgumentError: dense results were asked for and the layouts differ.
    """
    layouts = [one.layout() for one in metadata]
    alike = all(layout == layouts[0] for layout in layouts)
    if share_individual_td is False and not alike:
        raise ArgumentError(
            "share_individual_td=False asks for dense results, but the sub-envs differ in keys, "
            f"shapes or dtypes: {_difference(layouts)}. Pass share_individual_td=None (or True) to "
            "get lazy stacks."
        )
    if share_individual_td is not None:
        return share_individual_td
    return not alike or any(one.has_varying_sizes for one in metadata)


def _difference(layouts: Sequence[dict[str, dict[Any, Any]]]) -> str:
    """Return the name of the first entry in which a layout differs from the first one."""
    first, other = layouts[0], next(layout for layout in layouts if layout != layouts[0])
    for kind, entries in first.items():
        for path in {**entries, **other[kind]}:
            left, right = entries.get(path), other[kind].get(path)
            if left != right:
                return (
                    f"{kind} {as_key(path)!r} is {_shown(left)} in one, {_shown(right)} in another"
                )
    raise AssertionError("the layouts are equal")


def _shown(entry: tuple[torch.Size, torch.dtype | None] | None) -> str:
    return "missing" if entry is None else f"{tuple(entry[0])} {entry[1]}"


def _require_common_level(metadata: Sequence[EnvMetaData]) -> None:
    """Check that one level of done flags speaks for every sub-env: equal levels, or the root."""
    levels = [{path[:-1] for path in found.paths("done")} for found in metadata]
    if any(own != levels[0] for own in levels) and not all(() in own for own in levels):
        raise SpecError(
            "the sub-envs have done flags in different places and not all at the root: "
            f"{[sorted(own) for own in levels]}. Add a done flag at the root to each of them."
        )


def _sub_batch(metadata: Sequence[EnvMetaData]) -> torch.Size:
    sizes = {found.batch_size for found in metadata}
    if len(sizes) > 1:
        raise SpecError(
            f"the sub-envs have different batch sizes {sorted(map(tuple, sizes))}, but must "
            "agree on one. Make all of them with the same batch_size."
        )
    return sizes.pop()


def _delivery_device(metadata: Sequence[EnvMetaData]) -> torch.device | None:
    devices = {found.device for found in metadata}
    if len(devices) > 1:
        raise SpecError(
            f"the sub-envs deliver to different devices {sorted(map(str, devices))}, but a batch is on one. "
            "Pass it as device=."
        )
    return devices.pop()


def may_use_rows(metadata: Sequence[EnvMetaData], *, asked: bool | None, has_memory: bool) -> bool:
    """Check whether rows in memory can carry the data of some sub-envs, and may.

    Args:
        metadata: see the module.
        asked: what the user asked for; None leaves it to ``has_memory``. Asking for what the specs do not
            allow warns.
        has_memory: there is memory that all who hold sub-envs can map.
    """
    model = metadata[0]
    fits = not any(found.is_dynamic for found in metadata) and (
        all(found is model or found.layout() == model.layout() for found in metadata)
    )
    if asked and not fits:
        warn(
            "use_buffers=True, but a spec has no fixed size, is no tensor or is that of some agents alone, or the "
            "sub-envs differ in keys, shapes or dtypes; TensorDicts are exchanged instead.",
        )
    return fits and (has_memory if asked is None else asked)
