"""An env that steps a learnt world model in its latent state: what a real env is expected to do.

Conventions
    world model  encoder, dynamics and heads, as `torchrl.modules.WorldModel` holds them: ``encode(td)`` writes the
                 latent state of what was observed, ``step_module(td)`` reads that and the action and writes what
                 follows below ``next``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envkit.data.arguments import as_batch_size
from envkit.data.paths import Key
from envkit.env.base import EnvBase
from envkit.envs.model_based.base import ModelBasedEnvBase
from envkit.errors import ArgumentTypeError, MissingKeyError, UnknownStateError
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device

__all__ = ["WorldModelEnv"]


class _WorldModel(Protocol):
    @property
    def step_module(self) -> TensorDictModuleBase: ...

    def encode(self, tensordict: TensorDictBase) -> TensorDictBase: ...


class WorldModelEnv(ModelBasedEnvBase):
    """Roll out a world model in its latent state; of any batch size, and gradients flow through it.

    A reset begins at the latent state in its data: ``env.rollout(5, policy, tensordict=world_model.encode(seen))``. Action,
    reward and done specs are those of the real env; a reward or a flag that no head writes is zero, so without a head
    for flags nothing ends.

    Args:
        world_model: see the module. Its encoder is not run in steps.
        base_env: the real env, of which the specs are read; it is not stepped.
        observation_spec: what is shown beside the latent state, such as the output of a decoder, for one element;
            None shows the latent state alone.
        batch_size: what ``batch_size`` says; data of any other is stepped too. None takes that of the real env.
        device: where the model computes; None takes that of the real env.
        latent_key: the latent state, in the data and in ``next``.

    Raises:
        ArgumentTypeError: (a TypeError) ``world_model`` has no ``encode`` or no ``step_module``.
        MissingKeyError: (a KeyError) the encoder writes no ``latent_key``, or a step does not.
        UnknownStateError: (a RuntimeError) at a reset: the data holds no latent state.
    """

    def __init__(
        self,
        world_model: _WorldModel,
        base_env: EnvBase,
        *,
        observation_spec: Composite | None = None,
        batch_size: int | BatchSize | None = None,
        device: Device | None = None,
        latent_key: Key = "latent",
    ):
        if not (hasattr(world_model, "encode") and hasattr(world_model, "step_module")):
            raise ArgumentTypeError(
                f"world_model is a {type(world_model).__name__}, but must have encode() and step_module, as "
                "torchrl.modules.WorldModel(encoder, dynamics, reward_head) has."
            )
        size = tuple(base_env.batch_size) if batch_size is None else batch_size
        super().__init__(
            world_model.step_module,
            device=base_env.device if device is None else device,
            batch_size=as_batch_size((size,) if isinstance(size, int) else size),
            allow_done_after_reset=True,
        )
        self.latent_key = latent_key
        self.set_specs_from_env(base_env)
        latent = self._latent_spec(world_model, base_env)
        shown = latent.clone()
        if observation_spec is not None:
            shown.update(observation_spec.clone().to(self.device))
        self.full_observation_spec_unbatched = shown
        self.full_state_spec_unbatched = latent

    def _latent_spec(self, world_model: _WorldModel, base_env: EnvBase) -> Composite:
        """Encode an observation of zeros, and declare what comes out."""
        seen: Any = base_env.single_full_observation_spec.clone().to(self.device)
        with torch.no_grad():
            encoded = world_model.encode(seen.zero((1,)))
        latent = encoded.get(self.latent_key, None)
        if latent is None:
            raise MissingKeyError(
                f"the encoder writes no {self.latent_key!r}; the data has {sorted(map(str, encoded.keys(True, True)))}. "
                "Name its out_keys so, or pass latent_key=."
            )
        spec: Any = Composite(device=self.device)
        spec[self.latent_key] = Unbounded(latent.shape[1:], dtype=latent.dtype, device=self.device)
        return spec

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        if td is None or td.get(self.latent_key, None) is None:
            raise UnknownStateError(
                f"WorldModelEnv begins at the latent state {self.latent_key!r} of its data, and there is none. Encode "
                "what was observed: env.reset(world_model.encode(observed)), or rollout(..., tensordict=...)."
            )
        shown = td.select(*self.observation_keys, strict=False).clone()
        unseen: Any = self.single_full_observation_spec.zero(td.batch_size)
        return unseen.update(shown)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        following = self._modelled(td).get("next", None)
        if following is None or following.get(self.latent_key, None) is None:
            raise MissingKeyError(
                f"the world model wrote no {('next', self.latent_key)!r}. Its dynamics must: "
                "TensorDictModule(dynamics, in_keys=['latent', 'action'], out_keys=[('next', 'latent')])."
            )
        keys = [*self.observation_keys, *self.reward_keys, *self.done_keys]
        return following.select(*keys, strict=False)
