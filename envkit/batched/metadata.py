"""What a batched env must know of a sub-env that lives elsewhere.

Conventions
    metadata  picklable; holds specs and a fake step, never a simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.base import EnvBase
from envkit.env_specs import Key, as_path
from envkit.specs import Composite

__all__ = ["EnvMetaData"]


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
    """

    tensordict: TensorDictBase
    specs: Composite
    batch_size: torch.Size
    device: torch.device | None
    batch_locked: bool
    device_map: dict[Key, torch.device]
    env_str: str
    auto_done_twins: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def metadata_from_env(cls, env: EnvBase) -> EnvMetaData:
        """Read the metadata of an env; nothing in it is shared with the env."""
        fake = env.fake_tensordict()
        devices = {
            key: value.device
            for key, value in fake.items(True, True)
            if isinstance(value, torch.Tensor)
        }
        return cls(
            tensordict=fake,
            specs=env.specs,
            batch_size=env.batch_size,
            device=env.device,
            batch_locked=env.batch_locked,
            device_map=devices,
            env_str=repr(env),
            auto_done_twins=env._auto_done_twins,
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

    def __getitem__(self, index: Any) -> EnvMetaData:
        fake = self.tensordict[index]
        return replace(self, tensordict=fake, specs=self.specs[index], batch_size=fake.batch_size)

    def clone(self) -> EnvMetaData:
        """Copy everything, tensors included."""
        return replace(self, tensordict=self.tensordict.clone(), specs=self.specs.clone())

    def to(self, device: Any) -> EnvMetaData:
        """Move the fake step and the specs to a device."""
        device = torch.device(device)
        return replace(
            self,
            tensordict=self.tensordict.to(device),
            specs=self.specs.to(device),
            device=device,
            device_map=dict.fromkeys(self.device_map, device),
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether a leaf has a size that only data can tell, or is no tensor at all."""
        for _, leaf in self.specs.items(True, True):
            if leaf.dtype is None or any(size < 0 for size in leaf.shape):
                return True
        return False

    def full_spec(self, kind: str) -> Composite:
        """Give one of the five full specs: action, state, observation, reward or done."""
        side = "input_spec" if kind in ("action", "state") else "output_spec"
        return self.specs[side, f"full_{kind}_spec"]

    def paths(self, *kinds: str) -> dict[tuple[str, ...], Any]:
        """Give the leaves of some of the full specs by path."""
        return {
            as_path(key): leaf
            for kind in kinds
            for key, leaf in self.full_spec(kind).items(True, True)
        }
