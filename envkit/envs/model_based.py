"""Envs whose steps a model computes, a learnt one as a rule: data like that of the env it has learnt.

`ModelBasedEnvBase` steps by a model of observations, `WorldModelEnv` by one of a latent state, which says what a real env is
expected to do, and `DreamerEnv` by the recurrent one of Dreamer. `ImaginedEnv` moves a Gaussian belief, as PILCO does for
policy search: the observation is a mean and a covariance.
Sources: Hafner et al., "Dream to Control", 2020; Deisenroth and Rasmussen, "PILCO: A Model-Based and Data-Efficient
Approach to Policy Search", 2011.

Conventions
    world model  a module from TensorDict to TensorDict that reads the state and the action of a root and writes what
                 follows, observation, reward and flags, under the same names. That of `WorldModelEnv` holds encoder,
                 dynamics and heads, as `torchrl.modules.WorldModel` does: ``encode(td)`` writes the latent state of
                 what was observed, ``step_module(td)`` reads that and the action and writes what follows below ``next``.
    mean, var    of a belief over the D values of an observation: float, shape (*batch, D); its covariance,
                 shape (*batch, D, D).
    state        of Dreamer: sample of the stochastic latent, shape (*batch, *prior_shape).
    belief       of Dreamer: deterministic part, the memory of the recurrent model, shape (*batch, *belief_shape).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from envkit.data.arguments import as_batch_size
from envkit.data.paths import Key, as_path
from envkit.env.base import EnvBase
from envkit.envs.seeded_env import Undrawn
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    NoParentError,
    UnknownStateError,
)
from envkit.process_wide import warn
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device, EnvData, require_memory
from envkit.transforms.core.transform import Transform

KINDS = ("observation", "reward", "done", "action", "state")


class ModelBasedEnvBase(Undrawn, EnvBase):
    """Base class of envs that step by a world model; of any batch size, and gradients flow through them.

    A subclass declares specs, or takes them over with `set_specs_from_env`, and writes ``_reset``. A step runs the
    model on a copy of its data and keeps the entries of the observation, reward and done specs. Observations that the
    model does not write stay as they were at the root; rewards and flags that are not written are zero.

    Args:
        world_model: module on TensorDicts that reads the state and the action of a root and writes what follows.
        params: used in the place of the model's own, which stay as they are: a TensorDict as
            ``TensorDict.from_module(world_model)`` gives it, or tensors in the order of its ``parameters()``.
        buffers: likewise, in the order of its ``buffers()``.
        device: where the model computes; data is brought there.
        batch_size: what a reset without data produces.

    Raises:
        ArgumentTypeError: (a TypeError) ``world_model`` is no module on TensorDicts.
        ArgumentError: (a ValueError) there are more or fewer parameters than the model has, or under other names.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from envkit import Composite, ModelBasedEnvBase, Unbounded
        >>> class Line(ModelBasedEnvBase):
        ...     def __init__(self, model):
        ...         super().__init__(model)
        ...         self.observation_spec = Composite(place=Unbounded((1,)))
        ...         self.state_spec = self.observation_spec.clone()
        ...         self.action_spec = Unbounded((1,))
        ...
        ...     def _reset(self, td):
        ...         return td.select("place").clone()
        >>> model = TensorDictModule(
        ...     lambda place, action: (place + action, -place.abs()),
        ...     in_keys=["place", "action"],
        ...     out_keys=["place", "reward"],
        ... )
        >>> start = TensorDict(place=torch.ones(64, 1), batch_size=[64])
        >>> Line(model).rollout(20, tensordict=start)["next", "reward"].shape
        torch.Size([64, 20, 1])
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
                f"world_model is of type {type(world_model).__name__}, but must be a module on TensorDicts. Wrap it: "
                "TensorDictModule(module, in_keys=['observation', 'action'], out_keys=['observation'])."
            )
        self.world_model = world_model.to(self.device)
        self._replaced = {
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
        inputs = td.exclude("next").copy()
        inputs = inputs if self.device is None else inputs.to(self.device)
        if not self._replaced:
            return self.world_model(inputs)
        return torch.func.functional_call(self.world_model, self._replaced, (inputs,))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        made = self._modelled(td)
        keys = [*self.observation_keys, *self.reward_keys, *self.done_keys]
        return made.select(*keys, strict=False)

    def _set_seed(self, seed: int) -> None:
        warn(
            f"set_seed() of {type(self).__name__} seeds random actions, and beginnings that are drawn from specs: a "
            "model draws from torch's global generator, if at all.",
        )


def _by_name(
    what: str, tensors: TensorDictBase | Sequence[torch.Tensor] | None, named: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return tensors by the names they have in the module."""
    if tensors is None:
        return {}
    if isinstance(tensors, TensorDictBase):
        flat = TensorDict(tensors.to_dict(), tensors.batch_size).flatten_keys(".")
        missing = sorted(set(named).difference(map(str, flat.keys())))
        if missing:
            raise ArgumentError(
                f"{what} hold {sorted(map(str, flat.keys()))}, but the world model also has {missing}. Pass what "
                "TensorDict.from_module(world_model) gives, with other numbers in it."
            )
        return {name: flat[name] for name in named}
    if len(tensors) != len(named):
        raise ArgumentError(
            f"{what} are {len(tensors)} tensors, but the world model has {len(named)}: {', '.join(named) or 'none'}. Pass one "
            "for each, in this order."
        )
    return dict(zip(named, tensors, strict=True))


class _NeverEnding(ModelBasedEnvBase):
    """An environment whose episodes do not end."""

    # A loop that resets by itself resets nothing here: no flag is ever set.
    _fast_path_bypasses = EnvBase._fast_path_bypasses

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Return False: no episode ends here, and the device need not be asked."""
        return False

    def maybe_reset(self, tensordict: TensorDictBase) -> EnvData:
        """Return the root itself."""
        return tensordict


class ImaginedEnv(_NeverEnding):
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
        next_observation_key: where the model writes the next belief; ``("next", "observation")`` by default.
        device: where the model computes; None takes that of the real env.

    Raises:
        MissingKeyError: (a KeyError) the real env has no ``observation``; at a step: the model wrote no belief.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from envkit import GymEnv, ImaginedEnv
        >>> mean, var = ("observation", "mean"), ("observation", "var")
        >>> model = TensorDictModule(
        ...     lambda mean, var, action: (mean + action, var + 0.01 * torch.eye(3)),
        ...     in_keys=[mean, var, "action"],
        ...     out_keys=[("next", *mean), ("next", *var)],
        ... )
        >>> real = GymEnv("Pendulum-v1")
        >>> env = ImaginedEnv(model, real)
        >>> data = env.rollout(5, tensordict=real.reset().unsqueeze(0))
        >>> data["next", "observation", "mean"].shape
        torch.Size([1, 5, 3])
        >>> data["next", "observation", "var"][0, :, 0, 0]
        tensor([0.0100, 0.0200, 0.0300, 0.0400, 0.0500])
        >>> real.close()
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

    # `reset` only completes data that begins a rollout; a loop makes no other.
    _fast_path_bypasses = EnvBase._fast_path_bypasses

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
        """Return the belief that an observation is what it is."""
        mean = seen.clone()
        var = mean.new_zeros(*mean.shape, mean.shape[-1])
        return TensorDict({"mean": mean, "var": var}, shape, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        outputs = self._modelled(td)
        belief = outputs.get(self.next_observation_key, None)
        if belief is None or not {"mean", "var"} <= set(belief.keys()):
            raise MissingKeyError(
                f"the world model wrote no 'mean' and 'var' under {self.next_observation_key!r}; the data has "
                f"{sorted(map(str, outputs.keys(True, True)))}. Name its out_keys so, or pass next_observation_key=."
            )
        out: Any = self.single_full_reward_spec.zero(td.batch_size)
        return out.to(self.device).set("observation", belief.select("mean", "var"))


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
        world_model: has ``encode(td)``, which writes the latent state of what was observed, and ``step_module``, which
            reads that and the action and writes what follows below ``next``, as ``torchrl.modules.WorldModel``. Its
            encoder is not run in steps.
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

    Example:
        >>> from torch import nn
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import WorldModel
        >>> from envkit import GymEnv, WorldModelEnv
        >>> model = WorldModel(
        ...     TensorDictModule(nn.Linear(3, 1), ["observation"], ["latent"]),
        ...     TensorDictModule(
        ...         lambda latent, action: latent + action,
        ...         ["latent", "action"],
        ...         [("next", "latent")],
        ...     ),
        ...     TensorDictModule(nn.Linear(1, 1), [("next", "latent")], [("next", "reward")]),
        ... )
        >>> real = GymEnv("Pendulum-v1")
        >>> env = WorldModelEnv(model, real)
        >>> data = env.rollout(5, tensordict=model.encode(real.reset()))
        >>> data["next", "latent"].shape, data["next", "reward"].shape
        (torch.Size([5, 1]), torch.Size([5, 1]))
        >>> real.close()
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
                f"world_model is of type {type(world_model).__name__}, but must have encode() and step_module, as "
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


class DreamerEnv(_NeverEnding):
    """Imagine what follows from a latent state; it never ends, and never resets by itself.

    A reset begins with the ``state`` and ``belief`` that the data holds, and shows what else it holds of the
    observations; without either it draws all from the specs.

    Args:
        world_model: reads ``state``, ``belief`` and the action, writes the next ones and the reward.
        prior_shape: shape of ``state``, for one element.
        belief_shape: shape of ``belief``, for one element.
        obs_decoder: module that writes what ``state`` and ``belief`` look like.
        device: where the model computes, "cpu" by default; data is brought there.
        batch_size: what a reset without data produces; any other size is accepted too.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from envkit import DreamerEnv, PendulumEnv
        >>> model = TensorDictModule(
        ...     lambda state, belief, action: (state + action, 0.5 * belief, -action.abs()),
        ...     in_keys=["state", "belief", "action"],
        ...     out_keys=["state", "belief", "reward"],
        ... )
        >>> env = DreamerEnv(model, prior_shape=(3,), belief_shape=(2,), batch_size=[4])
        >>> env.set_specs_from_env(PendulumEnv())
        >>> data = env.rollout(5)
        >>> data["next", "belief"].shape, data["next", "reward"].shape
        (torch.Size([4, 5, 2]), torch.Size([4, 5, 1]))
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
        in_keys, out_keys, in_keys_inv, out_keys_inv: as for all transforms; the decoder has its own keys.

    Raises:
        ArgumentTypeError: (a TypeError) when attached: the env inside is no `DreamerEnv`.
        ArgumentError: it has no decoder.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from envkit import DreamerDecoder, DreamerEnv, PendulumEnv
        >>> model = TensorDictModule(
        ...     lambda state, action: (state + action, -action.abs()),
        ...     in_keys=["state", "action"],
        ...     out_keys=["state", "reward"],
        ... )
        >>> decoder = TensorDictModule(torch.nn.Linear(3, 12), ["state"], ["reco_pixels"])
        >>> env = DreamerEnv(model, (3,), (2,), obs_decoder=decoder)
        >>> env.set_specs_from_env(PendulumEnv())
        >>> env = env.append_transform(DreamerDecoder())
        >>> env.rollout(5)["next", "reco_pixels"].shape
        torch.Size([5, 12])
    """

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return self._dreamer().decode_obs(next_td)

    _reset = Transform._reset_like_step

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare what the decoder writes, by a trial on zeros."""
        zeros: Any = observation_spec.zero()
        before = {as_path(key) for key in zeros.keys(True, True)}
        with torch.no_grad():
            decoded = self._dreamer().decode_obs(zeros)
        for key, value in decoded.items(True, True):
            if as_path(key) not in before:
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
