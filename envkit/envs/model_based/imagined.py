"""Imagination under a Gaussian belief: the observation is a mean and a covariance, as a model of moments gives them.

For policy search in a learnt model, as PILCO does it. Source: Deisenroth and Rasmussen, "PILCO: A Model-Based and
Data-Efficient Approach to Policy Search", 2011.

Conventions
    D     number of values of an observation of the real env.
    mean  float, shape (*batch, D); var: its covariance, shape (*batch, D, D).
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envkit.data.arguments import as_batch_size
from envkit.data.paths import Key
from envkit.data.results import EnvData
from envkit.env.base import EnvBase
from envkit.envs.model_based.base import ModelBasedEnvBase
from envkit.errors import MissingKeyError
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device

__all__ = ["ImaginedEnv"]


class ImaginedEnv(ModelBasedEnvBase):
    """Imagine how a belief about the observation moves; reward 0, never done, and it never resets by itself.

    A reset to data with an ``observation`` of the real env is certain: that is the ``mean``, and ``var`` is 0. A belief
    in the data is kept; without either, an observation is drawn from the specs of the real env. A reward is added
    by a transform.

    Args:
        world_model_module: reads the action and the belief under ``observation``, and writes the next belief, ``mean``
            and ``var``, under ``next_observation_key``.
        base_env: the real env, whose specs are taken over; its observation has one axis.
        batch_size: what a reset without data produces; None takes that of the real env, or ``[1]`` where it is
            one env. An int is one axis.
        next_observation_key: see ``world_model_module``.
        device: where the model computes; None takes that of the real env.
        run_type_checks, allow_done_after_reset: see `envkit.env.options.EnvOptions`.

    Raises:
        MissingKeyError: (a KeyError) the real env has no ``observation``; at a step: the model wrote no belief.
    """

    def __init__(
        self,
        world_model_module: TensorDictModuleBase,
        base_env: EnvBase,
        batch_size: int | BatchSize | None = None,
        next_observation_key: Key = ("next", "observation"),
        *,
        device: Device | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
    ):
        if batch_size is None:
            batch_size = tuple(base_env.batch_size) or (1,)
        size = as_batch_size((batch_size,) if isinstance(batch_size, int) else batch_size)
        super().__init__(
            world_model_module,
            device=base_env.device if device is None else device,
            batch_size=size,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )
        self.next_observation_key = next_observation_key
        shown: Any = base_env.single_full_observation_spec
        real = shown.get("observation", None)
        if real is None or len(real.shape) != 1:
            told = "none" if real is None else f"one of shape {tuple(real.shape)}"
            raise MissingKeyError(
                f"ImaginedEnv imagines the entry 'observation' of one axis, but {type(base_env).__name__} has {told}; "
                f"it has {list(base_env.observation_keys)}. Join entries first: CatTensors(out_key='observation')."
            )
        self._real = real.clone().to(self.device)
        self.set_specs_from_env(base_env)
        width, place = real.shape[-1], {"device": self.device, "dtype": real.dtype}
        belief = Composite(
            observation=Composite(
                mean=Unbounded((width,), **place), var=Unbounded((width, width), **place)
            )
        )
        self.full_observation_spec_unbatched = belief
        self.full_state_spec_unbatched = belief.clone()

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> EnvData:
        """Begin at the observation in the data, which becomes a certain belief; see `EnvBase.reset`."""
        seen = None if tensordict is None else tensordict.get("observation", None)
        if tensordict is not None and isinstance(seen, torch.Tensor):
            tensordict.set("observation", self._certain(seen, tensordict.batch_size))
        return super().reset(tensordict, **kwargs)  # type: ignore[arg-type]

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        shape = self.batch_size if td is None else td.batch_size
        belief = None if td is None else td.get("observation", None)
        if belief is None:
            belief = self._certain(self._real.rand(shape, self._action_generator), shape)
        return TensorDict({"observation": belief.clone()}, shape, device=self.device)

    def _certain(self, seen: torch.Tensor, shape: torch.Size) -> TensorDict:
        """Give the belief that an observation is what it is."""
        mean = seen.clone()
        var = mean.new_zeros(*mean.shape, mean.shape[-1])
        return TensorDict({"mean": mean, "var": var}, shape, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        made = self._modelled(td)
        belief = made.get(self.next_observation_key, None)
        if belief is None or not {"mean", "var"} <= set(belief.keys()):
            raise MissingKeyError(
                f"the world model wrote no 'mean' and 'var' under {self.next_observation_key!r}; the data has "
                f"{sorted(map(str, made.keys(True, True)))}. Name its out_keys so, or pass next_observation_key=."
            )
        out: Any = self.single_full_reward_spec.zero(td.batch_size)
        return out.to(self.device).set("observation", belief.select("mean", "var"))

    _passes_by = (
        EnvBase._passes_by
    )  # a loop that resets by itself resets nothing here: no flag is ever set

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Say no: nothing ends here."""
        return False

    def maybe_reset(self, tensordict: TensorDictBase) -> EnvData:
        """Give the root back."""
        return tensordict
