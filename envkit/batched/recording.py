"""A whole non-stop rollout over shared rows, written straight into its result.

What the sub-envs make is copied once, from the shared rows into memory that lies time-major; no
TensorDict is built for a step but the one the policy sees.

Conventions
    time    leading axis in memory; the result shows it last.
    others  root entries that neither env nor action keys account for: what the policy writes beside
            its action, or what the caller put there. They are carried as `step_mdp` would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.exchange import BufferExchange, tensordict_of
from envkit.env_specs import as_key
from envkit.transition import leaves

if TYPE_CHECKING:
    from envkit.policy import Policy

__all__ = ["record_rollout"]

Path = tuple[str, ...]
Leaves = dict[Path, torch.Tensor]


def record_rollout(
    exchange: BufferExchange,
    root: TensorDictBase,
    act: Policy,
    steps: int,
    *,
    action_paths: frozenset[Path],
    done_path: Path,
    device: Any,
) -> TensorDict | TensorDictBase:
    """Act and step ``steps`` times, resetting what is done but after the last step.

    Args:
        exchange: rows shared with the sub-envs.
        root: where to start, nothing in it done; it is not changed.
        act: the policy.
        steps: length of the rollout.
        action_paths: entries that are not carried from one step to the next.
        done_path: the done leaf that says which sub-envs begin anew.
        device: where the result is.

    Returns:
        Transitions of batch size (*batch, steps). If the policy writes under ``next`` at the first
        step, the acted root comes back instead and nothing has been stepped: preset entries win
        over computed ones, which this way of recording cannot do.
    """
    batch = root.batch_size
    roots, nexts = (
        {path: _timeline(rows, steps, device) for path, rows in region.items()}
        for region in (exchange.root, exchange.next)
    )
    recorded: dict[Path, list[torch.Tensor]] = {}
    others = {path: value for path, value in leaves(root) if path not in roots}
    for path, timeline in roots.items():
        timeline[0].copy_(root.get(as_key(path)))
    for step in range(steps):
        current = {path: timeline[step] for path, timeline in roots.items()}
        td = act(tensordict_of({**current, **others}, batch, device, clone=False))
        if step == 0 and td.get("next", None) is not None:
            return td
        last = step == steps - 1
        exchange.send(td, None, advance=not last)
        others = _record(td, roots, recorded, action_paths)
        exchange.receive_into({path: timeline[step] for path, timeline in nexts.items()})
        if not last:
            _carry(exchange, nexts, roots, step, done_path)
    tree = {path: _time_last(stack, batch) for path, stack in _stacked(roots, recorded).items()}
    following = {("next", *path): _time_last(t.stack, batch) for path, t in nexts.items()}
    return tensordict_of({**tree, **following}, torch.Size((*batch, steps)), device, clone=False)


class _Timeline:
    """One leaf over time: memory (time, *batch, *event) and its views by step."""

    def __init__(self, stack: torch.Tensor):
        self.stack = stack
        self._views = stack.unbind(0)

    def __getitem__(self, step: int) -> torch.Tensor:
        return self._views[step]


def _timeline(rows: torch.Tensor, steps: int, device: Any) -> _Timeline:
    return _Timeline(torch.empty(steps, *rows.shape, dtype=rows.dtype, device=device))


def _record(
    td: TensorDictBase,
    roots: dict[Path, _Timeline],
    recorded: dict[Path, list[torch.Tensor]],
    action_paths: frozenset[Path],
) -> Leaves:
    """Keep what the policy wrote, and give the part of it that the next root carries."""
    others = {}
    for path, value in leaves(td):
        if path in roots or path[-1] in (rules.STEP, rules.RESET):
            continue
        recorded.setdefault(path, []).append(value)
        if path not in action_paths:
            others[path] = value
    return others


def _carry(
    exchange: BufferExchange,
    nexts: dict[Path, _Timeline],
    roots: dict[Path, _Timeline],
    step: int,
    done_path: Path,
) -> None:
    """Write the next root: what the step made, and a fresh episode where one has ended."""
    done = nexts[done_path][step]
    if not bool(done.any()):
        for path, timeline in roots.items():
            timeline[step + 1].copy_(nexts[path][step])
        return
    rows = done.reshape(len(done), -1).any(-1)
    exchange.were_reset(rows.cpu())
    for path, timeline in roots.items():
        fresh, target = exchange.root[path], timeline[step + 1]
        if fresh.device != target.device:
            fresh = fresh.to(target.device)
        mask = rows.reshape(-1, *(1,) * (target.ndim - 1))
        torch.where(mask, fresh, nexts[path][step], out=target)  # `rules.choose`, in place


def _stacked(
    roots: dict[Path, _Timeline], recorded: dict[Path, list[torch.Tensor]]
) -> dict[Path, torch.Tensor]:
    stacks = {path: timeline.stack for path, timeline in roots.items()}
    stacks.update({path: torch.stack(values) for path, values in recorded.items()})
    return stacks


def _time_last(stack: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    return stack.movedim(0, len(batch))
