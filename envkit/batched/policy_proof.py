"""Entries of a policy that travel with the data of a batched env: hidden states above all.

A policy may write root entries that no spec of the env knows. Those are found by calling it once on
zeros. They are then declared as observations and inputs of the batched env, sent to the sub-envs
with each step, and shown by every reset and step: under ``next`` as the policy wrote them, zero
where an episode begins.

Conventions
    entry  root leaf that the policy writes and the env does not declare; shape (*batch, *event).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.paths import Path, as_key
from envkit.data.transition import leaves
from envkit.env.bound_policy import bind_policy
from envkit.specs import TensorSpec, Unbounded

if TYPE_CHECKING:
    from envkit.env.base import EnvBase


def policy_entries(env: EnvBase, policy: Any) -> dict[Path, TensorSpec]:
    """Find what a policy writes at the root that the env does not declare.

    Args:
        env: gives the zeros it is called on, batch size ``(rows, *sub_batch)``.
        policy: see `envkit.env.bound_policy.bind_policy`.

    Returns:
        For each entry an unbounded spec of one row, shape ``(*sub_batch, *event)``.
    """
    root = env.fake_tensordict().exclude("next")
    declared = {path for path, _ in leaves(root)}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        acted = bind_policy(env, policy)(root)
    return {
        path: Unbounded(value.shape[1:], dtype=value.dtype, device=value.device)
        for path, value in leaves(acted)
        if path not in declared and path[0] != "next" and isinstance(value, torch.Tensor)
    }


class PolicyEntries:
    """The newest value of each entry for all rows; zeros at first.

    ``specs`` are those that `policy_entries` found.
    """

    def __init__(self, specs: Mapping[Path, TensorSpec], num_rows: int):
        self.specs = specs
        self._newest = {path: spec.zero((num_rows,)) for path, spec in specs.items()}

    def complete(self, td: TensorDictBase) -> None:
        """Put the newest values where ``td``, the input of a step, has none."""
        for path, value in self._newest.items():
            if td.get(as_key(path), None) is None:
                td.set(as_key(path), value.clone())

    def after_step(self, td: TensorDictBase, following: TensorDictBase) -> None:
        """Put into ``following`` what the policy wrote into ``td``, the input of the step."""
        for path in self._newest:
            value = td.get(as_key(path))
            value = value if torch.is_grad_enabled() else value.detach()
            self._newest[path] = value.clone()  # what is handed out may be written to
            following.set(as_key(path), value.clone())

    def after_reset(self, fresh: TensorDictBase, masks: Mapping[Path, torch.Tensor]) -> None:
        """Put zeros into ``fresh`` where an episode begins, and the newest values elsewhere."""
        for path, value in self._newest.items():
            zeros = torch.zeros_like(value)
            level = rules.governing_level(path[:-1], masks)
            if level is not None:
                mask = rules.reduce_mask(masks[level], value.shape, len(fresh.batch_size))
                zeros = rules.choose(mask.to(value.device), zeros, value)
            self._newest[path] = zeros
            fresh.set(as_key(path), zeros.clone())

    def state(self) -> list[torch.Tensor]:
        """Return all values."""
        return [value.detach().clone() for value in self._newest.values()]

    def take(self, values: list[torch.Tensor]) -> None:
        """Load what `state` returned."""
        self._newest = dict(zip(self._newest, (v.clone() for v in values), strict=True))

    def to(self, device: torch.device) -> None:
        """Move all values."""
        self._newest = {path: value.to(device) for path, value in self._newest.items()}
