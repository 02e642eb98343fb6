"""A module as a transform: an encoder of observations, a decoder of actions, a reward model.

`ModuleTransform` decides when the module runs and what its outputs are declared as. The rule by which the module
computes, and on which entries, is its own business.

Conventions
    module  takes and gives a TensorDict; its ``in_keys`` and ``out_keys`` are those of the pass it
            is in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from envkit.data.arguments import as_bool
from envkit.data.paths import Key, as_path
from envkit.env.policy import policy_device
from envkit.errors import ArgumentError, MissingKeyError
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.specs.annotations import Device
from envkit.transforms.core.leafwise import OUTPUTS
from envkit.transforms.core.transform import Keys, Transform, as_keys, editable

SpecChange = TensorSpec | Callable[[Composite], TensorSpec] | None


class ModuleTransform(Transform):
    """Run a module on what the env produces, or on what the user gives.

    Args:
        module: a TensorDictModule; or an ``nn.Module`` on tensors, with ``in_keys`` and ``out_keys``.
        module_factory: makes the module instead, in the process where the env lives.
        in_keys, out_keys: entries that a module on tensors reads and writes.
        no_grad: run it without gradients.
        inverse: run it on the input of each step; what it writes is what the base env reads.
        device: move the module there. Data is brought to the module's device and back.
        observation_spec_transform: the spec as it is after the transform, or a function that makes it
            from the one before. Without any of the five, entries the module writes are declared from a
            trial on zeros: in place where they are known, else as observations.
        reward_spec_transform, done_spec_transform: the same for these specs.
        state_spec_transform, action_spec_transform: the same for these specs.

    Raises:
        ArgumentError: not exactly one of ``module`` and ``module_factory``; a module on tensors
            without keys.
        MissingKeyError: an entry the module reads is absent, or not declared.

    Example:
        >>> import torch
        >>> from envkit import GymEnv, ModuleTransform
        >>> encoder = torch.nn.Linear(4, 8)
        >>> features = ModuleTransform(
        ...     encoder, in_keys=["observation"], out_keys=["features"], no_grad=True
        ... )
        >>> env = GymEnv("CartPole-v1").append_transform(features)
        >>> env.rollout(3)["features"].shape
        torch.Size([3, 8])
        >>> env.close()
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        module_factory: Callable[[], nn.Module] | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        no_grad: bool = False,
        inverse: bool = False,
        device: Device | None = None,
        observation_spec_transform: SpecChange = None,
        reward_spec_transform: SpecChange = None,
        done_spec_transform: SpecChange = None,
        state_spec_transform: SpecChange = None,
        action_spec_transform: SpecChange = None,
    ):
        if (module is None) == (module_factory is None):
            raise ArgumentError(
                f"ModuleTransform was given {'neither' if module is None else 'both'} of module and module_factory, but takes "
                "one of them. Pass one."
            )
        made = module_factory() if module is None and module_factory is not None else module
        wrapped = _on_tensordicts(cast(nn.Module, made), as_keys(in_keys), as_keys(out_keys))
        reads, writes = as_keys(wrapped.in_keys), as_keys(wrapped.out_keys)  # type: ignore[arg-type]
        self.no_grad = as_bool("no_grad", no_grad)
        self.inverse = as_bool("inverse", inverse)
        if inverse:
            super().__init__(in_keys_inv=writes, out_keys_inv=reads)
        else:
            super().__init__(in_keys=reads, out_keys=writes)
        self.module = wrapped if device is None else wrapped.to(device)
        self._changes: dict[str, SpecChange] = {
            "observation": observation_spec_transform,
            "reward": reward_spec_transform,
            "done": done_spec_transform,
            "state": state_spec_transform,
            "action": action_spec_transform,
        }

    # ------------------------------------------------------------------------------------- passes

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td if self.inverse else self._run(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        """Run the module, unless it reads what a reset does not give, a reward for instance."""
        known = all(td_reset.get(key, None) is not None for key in self.in_keys)
        return self._call(td_reset) if known else td_reset

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return self._run(td) if self.inverse else td

    def _run(self, td: TensorDictBase) -> TensorDictBase:
        reads = as_keys(self.module.in_keys)  # type: ignore[arg-type]
        values = {key: td.get(key, None) for key in reads}
        missing = [key for key, value in values.items() if value is None]
        if missing:
            if self.missing_tolerance:
                return td
            raise self._missing(missing, td, "Name entries that are there.")
        there = policy_device(self.module)
        here = next((v.device for v in values.values() if isinstance(v, torch.Tensor)), there)
        with torch.no_grad() if self.no_grad else nullcontext():
            if there is None or there == here:
                return self.module(td)
            given = td.select(*reads).to(there)
            return td.update(self.module(given).select(*as_keys(self.module.out_keys)).to(here))  # type: ignore[arg-type]

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare what the module writes among the outputs."""
        if self.inverse or any(self._changes[kind] is not None for kind in OUTPUTS):
            return super().transform_output_spec(output_spec)
        output_spec = editable(output_spec)
        kinds = [f"full_{kind}_spec" for kind in OUTPUTS]
        zeros = TensorDict(batch_size=output_spec.shape)
        for kind in kinds:
            zeros.update(output_spec[kind].zero())
        self._require_declared(zeros)
        trial = copy.deepcopy(self)  # whose dropout, statistics and lazy parameters are not seen
        with torch.no_grad():
            tried = trial.eval()._run(zeros)
        for key in self.out_keys:
            kind = next((kind for kind in kinds if _holds(output_spec[kind], key)), kinds[0])
            _declare(output_spec[kind], key, tried.get(key))
        return output_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._said("observation", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._said("reward", reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        return self._said("done", done_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._said("state", state_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        return self._said("action", action_spec)

    def _said(self, kind: str, spec: Composite) -> Composite:
        change = self._changes[kind]
        if change is None:
            return spec
        changed = change.clone() if isinstance(change, TensorSpec) else change(spec)
        if isinstance(changed, Composite):
            return changed
        return Composite({kind: changed}, shape=spec.shape, device=spec.device)

    def _require_declared(self, zeros: TensorDictBase) -> None:
        missing = [key for key in self.in_keys if zeros.get(key, None) is None]
        if missing:
            raise MissingKeyError(
                f"the module of ModuleTransform reads {missing}, but the env declares "
                f"{sorted(map(str, zeros.keys(True, True)))}. Name entries of the env."
            )


def _on_tensordicts(
    module: nn.Module, in_keys: list[Key], out_keys: list[Key]
) -> TensorDictModuleBase:
    if isinstance(module, TensorDictModuleBase):
        return module
    if not isinstance(module, nn.Module) or not in_keys or not out_keys:
        raise ArgumentError(
            f"{type(module).__name__} does not say which entries it reads and writes. Pass a "
            "TensorDictModule, or an nn.Module with in_keys= and out_keys=."
        )
    return TensorDictModule(module, in_keys=list(in_keys), out_keys=list(out_keys))


def _holds(spec: Composite, key: Key) -> bool:
    return as_path(key) in {as_path(known) for known in spec.keys(True, True)}


def _declare(spec: Composite, key: Key, value: torch.Tensor) -> None:
    """Declare a value as what it is, unless it fits what is declared already."""
    if _holds(spec, key) and spec[key].shape == value.shape and spec[key].dtype == value.dtype:
        return
    spec[key] = Unbounded(value.shape, dtype=value.dtype, device=spec.device)
