"""An env whose steps a model computes, a learnt one as a rule: data like that of the env it has learnt.

Conventions
    world model  a module from TensorDict to TensorDict that reads the state and the action of a root and writes what
                 follows, observation, reward and flags, under the same names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from envkit.env.base import EnvBase
from envkit.envs.undrawn import Undrawn
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.specs.annotations import BatchSize, Device
from envkit.specs.devices import require_memory

__all__ = ["ModelBasedEnvBase"]

KINDS = ("observation", "reward", "done", "action", "state")


class ModelBasedEnvBase(Undrawn, EnvBase):
    """Base class of envs that step by a world model; of any batch size, and gradients flow through them.

    A subclass declares specs, or takes them over with `set_specs_from_env`, and writes ``_reset``. A step runs the
    model on a copy of its data and keeps what the observation, reward and done specs name; what the model does
    not write stays as it was at the root, and rewards and flags that nobody writes are zero.

    Args:
        world_model: see above.
        params: used in the place of the model's own, which stay as they are: a TensorDict as
            ``TensorDict.from_module(world_model)`` gives it, or tensors in the order of its ``parameters()``.
        buffers: likewise, in the order of its ``buffers()``.
        device: where the model computes; data is brought there.
        batch_size: what a reset without data produces.
        run_type_checks, allow_done_after_reset: see `envkit.env.options.EnvOptions`.

    Raises:
        ArgumentTypeError: (a TypeError) ``world_model`` is no module on TensorDicts.
        ArgumentError: (a ValueError) there are more or fewer parameters than the model has, or under other names.
    """

    _batch_locked = False

    def __init__(
        self,
        world_model: TensorDictModuleBase,
        params: TensorDictBase | Sequence[torch.Tensor] | None = None,
        buffers: TensorDictBase | Sequence[torch.Tensor] | None = None,
        device: Device | None = "cpu",
        batch_size: BatchSize | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
    ):
        super().__init__(
            device=device,
            batch_size=batch_size,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )
        require_memory(self.device, type(self).__name__)
        if not isinstance(world_model, nn.Module) or not hasattr(world_model, "in_keys"):
            raise ArgumentTypeError(
                f"world_model is a {type(world_model).__name__}, but must be a module on TensorDicts. Wrap it: "
                "TensorDictModule(module, in_keys=['observation', 'action'], out_keys=['observation'])."
            )
        self.world_model = world_model.to(self.device)
        self._given = {
            **_by_name("params", params, dict(world_model.named_parameters())),
            **_by_name("buffers", buffers, dict(world_model.named_buffers())),
        }

    def set_specs_from_env(self, env: EnvBase) -> None:
        """Declare what ``env`` declares, for elements of this env's batch, on this env's device."""
        for kind in KINDS:
            spec = getattr(env, f"single_full_{kind}_spec").clone()
            setattr(self, f"full_{kind}_spec_unbatched", spec.to(self.device))

    def _modelled(self, td: TensorDictBase) -> TensorDictBase:
        """Run the world model on a copy of the data."""
        given = td.exclude("next").copy()
        given = given if self.device is None else given.to(self.device)
        if not self._given:
            return self.world_model(given)
        return torch.func.functional_call(self.world_model, self._given, (given,))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        made = self._modelled(td)
        keys = [*self.observation_keys, *self.reward_keys, *self.done_keys]
        return made.select(*keys, strict=False)

    def _set_seed(self, seed: int) -> None:
        warnings.warn(
            f"set_seed() of {type(self).__name__} seeds random actions, and beginnings that are drawn from specs: a "
            "model draws from torch's global generator, if at all.",
            stacklevel=4,
        )


def _by_name(
    what: str, given: TensorDictBase | Sequence[torch.Tensor] | None, own: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Give tensors by the names they have in the module."""
    if given is None:
        return {}
    if isinstance(given, TensorDictBase):
        flat = TensorDict(given.to_dict(), given.batch_size).flatten_keys(".")
        missing = sorted(set(own).difference(map(str, flat.keys())))
        if missing:
            raise ArgumentError(
                f"{what} hold {sorted(map(str, flat.keys()))}, but the world model also has {missing}. Pass what "
                "TensorDict.from_module(world_model) gives, with other numbers in it."
            )
        return {name: flat[name] for name in own}
    if len(given) != len(own):
        raise ArgumentError(
            f"{what} are {len(given)} tensors, but the world model has {len(own)}: {', '.join(own) or 'none'}. Pass one "
            "for each, in this order."
        )
    return dict(zip(own, given, strict=True))
