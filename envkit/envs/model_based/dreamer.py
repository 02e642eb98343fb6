"""Imagination of Dreamer: rollouts in the latent state of a world model, and what they look like.

Source: Hafner et al., "Dream to Control", 2020.

Conventions
    state   sample of the stochastic latent, shape (*batch, *prior_shape).
    belief  deterministic part, the memory of the recurrent model, shape (*batch, *belief_shape).
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envkit.data.paths import as_path
from envkit.data.results import EnvData
from envkit.env.base import EnvBase
from envkit.envs.model_based.base import ModelBasedEnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, NoParentError
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device
from envkit.transforms.core.base import Keys, Transform

__all__ = ["DreamerDecoder", "DreamerEnv"]


class DreamerEnv(ModelBasedEnvBase):
    """Imagine what follows from a latent state; it never ends, and never resets by itself.

    A reset begins with the ``state`` and ``belief`` that the data holds, and shows what else it holds of the
    observations; without either it draws all from the specs.

    Args:
        world_model: reads ``state``, ``belief`` and the action, writes the next ones and the reward.
        prior_shape: of ``state``, for one element.
        belief_shape: of ``belief``, for one element.
        obs_decoder: module that writes what ``state`` and ``belief`` look like.
        device, batch_size: see `ModelBasedEnvBase`.
    """

    def __init__(
        self,
        world_model: TensorDictModuleBase,
        prior_shape: tuple[int, ...],
        belief_shape: tuple[int, ...],
        obs_decoder: TensorDictModuleBase | None = None,
        device: Device | None = "cpu",
        batch_size: BatchSize | None = None,
    ):
        super().__init__(world_model, device=device, batch_size=batch_size)
        self.obs_decoder = None if obs_decoder is None else obs_decoder.to(self.device)
        place = {"device": self.device, "dtype": torch.float32}
        latent = Composite(
            state=Unbounded(prior_shape, **place), belief=Unbounded(belief_shape, **place)
        )
        self.observation_spec_unbatched = latent
        self.state_spec_unbatched = latent.clone()
        self.reward_spec_unbatched = Unbounded((1,), **place)

    def set_specs_from_env(self, env: EnvBase) -> None:
        """Declare what ``env`` declares, and ``state`` and ``belief`` beside its observations; they alone are read."""
        latent = self.single_full_state_spec.clone()
        super().set_specs_from_env(env)
        shown: Any = self.single_full_observation_spec.clone()
        shown.update(latent.clone())
        self.full_observation_spec_unbatched = shown
        self.full_state_spec_unbatched = latent

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        shape = self.batch_size if td is None else td.batch_size
        out = TensorDict(batch_size=shape, device=self.device)
        known = {} if td is None else td.select(*self.observation_keys, strict=False).clone()
        begins = any(key in known.keys() for key in self.state_keys)
        drawn: Any = self.single_full_state_spec if begins else self.single_full_observation_spec
        return out.update(drawn.rand(shape, self._action_generator)).update(known)

    _passes_by = (
        EnvBase._passes_by
    )  # a loop that resets by itself resets nothing here: no flag is ever set

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Say no: nothing ends here, and nobody waits for a device to learn that."""
        return False

    def maybe_reset(self, tensordict: TensorDictBase) -> EnvData:
        """Give the root back."""
        return tensordict

    def decode_obs(self, tensordict: TensorDictBase, compute_latents: bool = False) -> EnvData:
        """Write what a latent state looks like into its data, and give that back.

        Args:
            tensordict: holds ``state`` and ``belief``.
            compute_latents: run the world model first, so that what follows the action is decoded.

        Raises:
            ArgumentError: (a ValueError) the env has no decoder.
        """
        if self.obs_decoder is None:
            raise ArgumentError(
                "No observation decoder provided: this DreamerEnv cannot say what its states look like. Build it with "
                "obs_decoder=."
            )
        if compute_latents:
            tensordict.update(self._modelled(tensordict))
        return self.obs_decoder(tensordict)


class DreamerDecoder(Transform):
    """Add what the latent states of a `DreamerEnv` look like, at resets and steps, for recordings of imagination.

    Args:
        in_keys, out_keys, in_keys_inv, out_keys_inv: as for all transforms; the decoder has keys of its own.

    Raises:
        ArgumentTypeError: (a TypeError) when attached: the env inside is no `DreamerEnv`.
        ArgumentError: it has no decoder.
    """

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return self._dreamer().decode_obs(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare what the decoder writes, by a trial on zeros."""
        zeros: Any = observation_spec.zero()
        known = {as_path(key) for key in zeros.keys(True, True)}
        with torch.no_grad():
            decoded = self._dreamer().decode_obs(zeros)
        for key, value in decoded.items(True, True):
            if as_path(key) not in known:
                observation_spec[key] = Unbounded(value.shape, value.device, value.dtype)
        return observation_spec

    def _dreamer(self) -> DreamerEnv:
        holder = self.container
        if holder is None:
            raise NoParentError(
                "DreamerDecoder decodes by the decoder of the env it is in, and is in none. Put it into one: "
                "TransformedEnv(DreamerEnv(...), DreamerDecoder())."
            )
        env: Any = holder.base_env
        while not isinstance(env, DreamerEnv) and hasattr(env, "base_env"):
            env = env.base_env
        if not isinstance(env, DreamerEnv):
            raise ArgumentTypeError(
                f"DreamerDecoder is in an env around {type(env).__name__}, but decodes states of a DreamerEnv. Put it "
                "around one."
            )
        return env
