"""What a step asks of the specs of an env, read once and frozen: batch, device, keys, shapes.

An env whose specs are locked makes its table at the first use and drops it when they are unlocked or
replaced; one whose specs are open reads them anew each time. This module knows specs, not steps.

Conventions
    scalar  a reward or a done flag.
    event   shape of a leaf beyond the batch.
    level   a node of the data tree that owns done leaves, named by its path: () is the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from envkit.data.paths import Key, Path, as_key, as_path, leaf_paths
from envkit.data.transition import Carrying, OutputLeaf
from envkit.specs import Composite, exclusive_paths

__all__ = ["Scalar", "SpecTable", "levels_of"]


class Scalar(NamedTuple):
    """A reward or a done flag that a step gives."""

    key: Key
    is_reward: bool
    event: tuple[int, ...]
    spec: Any


@dataclass(frozen=True)
class SpecTable:
    """The specs of an env as a step reads them.

    Attributes:
        batch_size: of the specs.
        device: where outputs are delivered; None sets no constraint.
        batch_locked: data must have that batch size.
        inputs: leaf keys of actions and states, but for those that a step writes itself.
        outputs: all that a step gives.
        shown: leaf keys of what a root shows: observations and done flags.
        own: those of them that only some members of a stack have; they are no outputs.
        scalars: rewards and done flags.
        levels: names of the done leaves of each level, by depth.
        rewards, actions, states: paths of these kinds; actions, too, what a step records of them.
        known: paths of all kinds.
        recorded: inputs that a step writes itself, into the root.
        carrying: which entries of a step stand at the next root.
    """

    batch_size: torch.Size
    device: torch.device | None
    batch_locked: bool
    inputs: tuple[Key, ...]
    outputs: tuple[OutputLeaf, ...]
    shown: tuple[Key, ...]
    own: tuple[Key, ...]
    scalars: tuple[Scalar, ...]
    levels: dict[Path, list[str]]
    rewards: frozenset[Path]
    actions: frozenset[Path]
    states: frozenset[Path]
    known: frozenset[Path]
    recorded: tuple[Key, ...]
    carrying: Carrying

    @classmethod
    def of(cls, env: Any) -> SpecTable:
        """Read the specs of an env."""
        batch_size = env.batch_size
        specs: dict[str, Composite] = {
            kind: getattr(env, f"full_{kind}_spec")
            for kind in ("action", "state", "observation", "reward", "done")
        }
        paths = {kind: leaf_paths(spec) for kind, spec in specs.items()}
        recorded = frozenset(map(as_path, env._recorded_inputs))
        rewards, states = frozenset(paths["reward"]), frozenset(paths["state"])
        actions = frozenset(paths["action"]) | recorded
        outputs = tuple(
            (path, kind, specs[kind][as_key(path)])
            for kind in ("observation", "reward", "done")
            for path in paths[kind]
        )
        own = sorted(exclusive_paths(specs["observation"]))
        scalars = (
            Scalar(as_key(path), kind == "reward", tuple(leaf.shape[len(batch_size) :]), leaf)
            for path, kind, leaf in outputs
            if kind != "observation"
        )
        return cls(
            batch_size=batch_size,
            device=env.device,
            batch_locked=env.batch_locked,
            inputs=tuple(
                as_key(path)
                for kind in ("action", "state")
                for path in paths[kind]
                if path not in recorded
            ),
            outputs=outputs,
            shown=tuple(
                as_key(path)
                for path in (*(path for path, kind, _ in outputs if kind != "reward"), *own)
            ),
            own=tuple(map(as_key, own)),
            scalars=tuple(scalars),
            levels=levels_of(paths["done"]),
            rewards=rewards,
            actions=actions,
            states=states,
            known=frozenset(path for found in paths.values() for path in found),
            recorded=tuple(env._recorded_inputs),
            carrying=Carrying(
                keeps_empty_nodes=True,
                reward_keys=rewards,
                action_keys=actions.difference(paths["observation"]),
                state_keys=states,
            ),
        )


def levels_of(flags: list[Path]) -> dict[Path, list[str]]:
    """Name the done leaves of each level, by the level's path, by depth."""
    levels: dict[Path, list[str]] = {}
    for path in flags:
        levels.setdefault(path[:-1], []).append(path[-1])
    return dict(sorted(levels.items(), key=lambda item: (len(item[0]), ".".join(item[0]))))
