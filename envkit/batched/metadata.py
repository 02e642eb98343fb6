"""The description of a sub-env that lives elsewhere, as a batched env needs it.

Conventions
    metadata  picklable; holds specs and a fake step, never a simulator.
    kind      action, state, observation, reward or done: one of the five full specs.
    layout    paths, shapes and dtypes of all leaves by kind: what rows in memory depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Axes, Key, Path, as_key, as_path, node_axes
from envkit.data.transition import leaves, skipped_next
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.errors import EmptySpecError
from envkit.specs import Composite, TensorSpec, check_no_exclusive_keys, exclusive_paths
from envkit.specs.annotations import AxisIndex, Device, as_device
from envkit.specs.inputs import ActionInput, action_inputs
from envkit.specs.stacks import refuse_ragged

_SIDES = {
    "action": "input_spec",
    "state": "input_spec",
    "observation": "output_spec",
    "reward": "output_spec",
    "done": "output_spec",
}


class HasLeaves(Protocol):
    """The leaves of the full specs of one env, wherever it lives."""

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the env."""
        ...

    def paths(self, *kinds: str) -> dict[Path, Any]:
        """Return the leaves of some of the full specs by path."""
        ...


class EnvLeaves:
    """The leaves of a living env, read without copying its specs."""

    def __init__(self, env: EnvBase):
        self._env = env
        self.batch_size = env.batch_size

    def paths(self, *kinds: str) -> dict[Path, Any]:
        """Return the leaves of some of the full specs by path."""
        # of no use outside, see `EnvMetaData.metadata_from_env`
        recorded = set(map(as_path, self._env._facts.recorded_inputs))
        return {
            as_path(key): leaf
            for kind in kinds
            for key, leaf in getattr(self._env, f"full_{kind}_spec").items(True, True)
            if kind != "state" or as_path(key) not in recorded
        }


@dataclass(frozen=True)
class EnvMetaData:
    """Specs, one fake step, batch size, device and lock of an env.

    Args:
        tensordict: `EnvBase.fake_tensordict` of the env, batch size ``batch_size``.
        specs: `EnvBase.specs` of the env.
        batch_size: its batch size.
        device: where it delivers data; None sets no constraint.
        batch_locked: whether it is fixed to its batch size.
        device_map: device of each leaf of ``tensordict``.
        env_str: its repr.
        auto_done_twins: done leaves that were added by the twin rule.
        allow_done_after_reset: whether the env accepts done flags right after a reset.
        facts: what else is true of it.

    Example:
        >>> from envkit import EnvMetaData, GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> metadata = EnvMetaData.metadata_from_env(env)
        >>> metadata.env_str
        "GymEnv('CartPole-v1', batch_size=(), device=cpu)"
        >>> metadata.device_map["observation"]
        device(type='cpu')
        >>> env.close()
    """

    tensordict: TensorDictBase
    specs: Composite
    batch_size: torch.Size
    device: torch.device | None
    batch_locked: bool
    device_map: dict[Key, torch.device]
    env_str: str
    auto_done_twins: tuple[Path, ...] = ()
    allow_done_after_reset: bool = False
    facts: Facts = field(default_factory=Facts)

    @classmethod
    def metadata_from_env(cls, env: EnvBase) -> EnvMetaData:
        """Read the metadata of an env; nothing in it is shared with the env.

        Left out are states that a step writes itself and never reads: around the env they are not seen.
        """
        fake, specs = env.fake_tensordict().exclude(*env._facts.recorded_inputs), env.specs
        for key in env._facts.recorded_inputs:
            del specs[("input_spec", "full_state_spec", *as_path(key))]
        devices = {
            as_key(path): value.device
            for path, value in leaves(fake)
            if isinstance(value, torch.Tensor)
        }
        return cls(
            tensordict=fake,
            specs=specs,
            batch_size=env.batch_size,
            device=env.device,
            batch_locked=env.batch_locked,
            device_map=devices,
            env_str=repr(env),
            auto_done_twins=env._declared.added_flags,
            allow_done_after_reset=env.allow_done_after_reset,
            facts=replace(env._facts, draws_own_actions=env._draws_own_actions),
        )

    def expand(self, *sizes: int) -> EnvMetaData:
        """Put batch axes of the given sizes in front of everything."""
        batch_size = torch.Size((*sizes, *self.batch_size))
        return replace(
            self,
            tensordict=self.tensordict.expand(batch_size),
            specs=self.specs.expand(batch_size),
            batch_size=batch_size,
        )

    def __getitem__(self, index: AxisIndex) -> EnvMetaData:
        fake = self.tensordict[index]
        return replace(self, tensordict=fake, specs=self.specs[index], batch_size=fake.batch_size)

    def clone(self) -> EnvMetaData:
        """Copy everything, tensors included."""
        return replace(self, tensordict=self.tensordict.clone(), specs=self.specs.clone())

    def to(self, device: Device | None) -> EnvMetaData:
        """Move the fake step and the specs to a device."""
        device = as_device(device)
        return replace(
            self,
            tensordict=self.tensordict.to(device),
            specs=self.specs.to(device),
            device=device,
            device_map=dict.fromkeys(self.device_map, device),
        )

    @property
    def has_varying_sizes(self) -> bool:
        """Whether a leaf has a size that only data can tell."""
        return any(size < 0 for _, leaf in self.specs.items(True, True) for size in leaf.shape)

    @property
    def is_dynamic(self) -> bool:
        """Whether a leaf has a size that only data can tell, or is no tensor, or only some parts of a stack have it."""
        return (
            self.has_varying_sizes
            or any(leaf.dtype is None for _, leaf in self.specs.items(True, True))
            or not check_no_exclusive_keys(self.specs)
        )

    def node_axes(self) -> dict[Path, Axes]:
        """List the nested entries with their own batch axes, of a step, of its root and of its `next` alone."""
        found = node_axes(self.tensordict)
        below = {path[1:]: more for path, more in found.items() if path[0] == "next"}
        return {**below, **found}

    def full_spec(self, kind: str) -> Composite:
        """Return one of the five full specs."""
        return self.specs[_SIDES[kind], f"full_{kind}_spec"]

    def paths(self, *kinds: str) -> dict[Path, Any]:
        """Return the leaves of some of the full specs by path."""
        return {
            as_path(key): leaf
            for kind in kinds
            for key, leaf in self.full_spec(kind).items(True, True)
        }

    def keys(self, *kinds: str) -> list[Key]:
        """List the leaves of some of the full specs, with those that only some parts of a stack have."""
        return [*map(as_key, self.paths(*kinds)), *self._partial_keys(*kinds)]

    def action_inputs(self) -> dict[Path, ActionInput]:
        """Return the rule of each action."""
        found = action_inputs(self.full_spec("action"))
        return {as_path(key): rule for key, rule in found.items()}

    def _partial_keys(self, *kinds: str) -> list[Key]:
        found = (path for kind in kinds for path in sorted(exclusive_paths(self.full_spec(kind))))
        return [as_key(path) for path in found]

    def layout(self) -> dict[str, dict[Path, tuple[torch.Size, torch.dtype | None]]]:
        """Return shape and dtype of every leaf; envs of one layout can share rows and dense stacks."""
        return {
            kind: {path: (leaf.shape, leaf.dtype) for path, leaf in self.paths(kind).items()}
            for kind in _SIDES
        }

    def refuse_empty_nodes(self) -> None:
        """Check that every nested Composite has a leaf.

        Raises:
            EmptySpecError: one has none.
        """
        for kind in _SIDES:
            for key, spec in self.full_spec(kind).items(True, False):
                if isinstance(spec, Composite) and not len(list(spec.keys(True, True))):
                    raise EmptySpecError(
                        f"{as_key(as_path(key))!r} in the {kind} spec is an empty Composite: there "
                        "is no data to exchange with the sub-envs for it. Remove it from the "
                        "sub-env's specs, e.g. with the transform RemoveEmptySpecs()."
                    )

    def refuse_ragged_leaves(self) -> None:
        """Check that rows of every leaf can be laid together.

        Raises:
            SpecStackError: (a RuntimeError) one stacks unlike shapes.
        """
        for kind in _SIDES:
            refuse_ragged(self.full_spec(kind), kind, "a batch of envs")

    def with_entries(self, entries: Mapping[Path, TensorSpec]) -> EnvMetaData:
        """Declare more entries, each as an observation and as an input of the env."""
        specs, fake = self.specs.clone(), self.tensordict.clone()
        for path, spec in entries.items():
            for kind in ("observation", "state"):
                specs[(_SIDES[kind], f"full_{kind}_spec", *path)] = spec.clone()
            fake.set(as_key(path), spec.zero())
            fake.set(("next", *path), spec.zero())
        return replace(self, specs=specs, tensordict=fake)

    def skipped_next(self, td: TensorDictBase) -> TensorDict:
        """Build ``next`` of an env that is not stepped: its root values where known, else zeros.

        Args:
            td: root of this env alone, batch size ``batch_size``.
        """
        outputs = [
            (path, kind, spec)
            for kind in ("observation", "reward", "done")
            for path, spec in self.paths(kind).items()
        ]
        states = self.paths("state").keys()
        partial_keys = self._partial_keys("observation")
        return skipped_next(
            td,
            outputs,
            batch_dims=len(self.batch_size),
            state_keys=states,
            partial_keys=partial_keys,
        )

    def lost_next(self, td: TensorDictBase) -> TensorDict:
        """Build ``next`` of an env that was lost: its root values, its episode truncated.

        Args:
            td: root of this env alone, batch size ``batch_size``.
        """
        following = self.skipped_next(td)
        for path in self.paths("done"):
            ended = path[-1] in ("done", "truncated")
            following.set(as_key(path), torch.full_like(following.get(as_key(path)), ended))
        return following
