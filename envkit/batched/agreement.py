"""What sub-envs have in common, read off their metadata: specs of all rows, batch size, device, layout.

This module says what a batched env declares, and refuses sub-envs that cannot stand in one batch. It does
not know when they are built.

Conventions
    metadata  one for each task, a kind of sub-env; ``tasks`` gives the number of each row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from envkit.batched.metadata import EnvMetaData
from envkit.batched.stacking import has_own_rows
from envkit.data.paths import Key
from envkit.errors import SpecError
from envkit.specs import Composite

__all__ = ["Agreement", "agreement_of", "specs_of_rows"]


@dataclass(frozen=True)
class Agreement:
    """What holds for the batch.

    Attributes:
        batch_size: ``(rows, *sub_batch)``.
        device: where data is delivered.
        has_own_rows: each sub-env has a TensorDict of its own in the results.
        allows_done_after_reset: some sub-env accepts done flags right after a reset.
        action_masks: of all sub-envs.
    """

    batch_size: torch.Size
    device: torch.device | None
    has_own_rows: bool
    allows_done_after_reset: bool
    action_masks: tuple[tuple[Key, Key], ...]


def agreement_of(
    metadata: Sequence[EnvMetaData], rows: int, *, device: Any, share_individual_td: bool | None
) -> Agreement:
    """Find what sub-envs agree on.

    Args:
        metadata: of each task.
        rows: number of sub-envs.
        device: what the user asked for; None takes that of the sub-envs.
        share_individual_td: what the user asked for, see `has_own_rows`.

    Raises:
        EmptySpecError: a node of a spec has no leaf.
        SpecStackError: a leaf stacks unlike shapes within one sub-env.
        SpecError: done flags stand in different places, or batch sizes or devices differ.
        ArgumentError: dense results were asked for and the layouts differ.
    """
    for found in metadata:
        found.refuse_empty_nodes()
        found.refuse_ragged_leaves()
    _require_common_level(metadata)
    masks = [pair for found in metadata for pair in found.action_masks]
    return Agreement(
        batch_size=torch.Size((rows, *_sub_batch(metadata))),
        device=_delivery_device(metadata) if device is None else device,
        has_own_rows=has_own_rows(metadata, share_individual_td),
        allows_done_after_reset=any(found.allow_done_after_reset for found in metadata),
        action_masks=tuple(dict.fromkeys(masks)),
    )


def specs_of_rows(
    metadata: Sequence[EnvMetaData], tasks: Sequence[int], device: torch.device | None
) -> Composite:
    """Put the specs of all rows into one: expanded where all are equal, else stacked."""
    first = metadata[0]
    if all(found.specs == first.specs for found in metadata[1:]):
        specs = first.specs.expand(len(tasks), *first.batch_size)
    else:
        specs = cast(Composite, torch.stack([metadata[task].specs for task in tasks], 0))
    return specs if device is None else specs.to(device)


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
            "agree on one."
        )
    return sizes.pop()


def _delivery_device(metadata: Sequence[EnvMetaData]) -> torch.device | None:
    devices = {found.device for found in metadata}
    if len(devices) > 1:
        raise SpecError(
            f"the sub-envs deliver to different devices {sorted(map(str, devices))}. "
            "Say where the batch shall go: device=..."
        )
    return devices.pop()
