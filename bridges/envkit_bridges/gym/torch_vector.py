"""Gymnasium's vector envs whose data is torch tensors, and single env objects that step many rows in torch.

`is_torch_vector` decides which env objects are of this kind. `TorchVectorWrapper` reads their spaces, their way to reset
single rows, and what their autoreset does to the data. `torch_rows` decides about steps and resets.

Conventions
    mode     what the simulator does with a row that has ended, as Gymnasium's `AutoresetMode` names it. SAME_STEP begins the
             next episode in the step that ends one: what it returns is the first observation, and infos hold the last one.
             NEXT_STEP does so in the step after it, in which the action is ignored. DISABLED leaves it to the caller.
    way      how the reset of a simulator takes rows: by a mask in ``options``, by numbers there, or by a keyword.
    final    the last observation of an episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from tensordict import TensorDict

from envkit import rules
from envkit.data.arguments import as_bool, require_option
from envkit.data.paths import Key, as_key, leaf_paths, nest
from envkit.env.facts import Facts
from envkit.env.options import EnvOptions
from envkit.env.wrapper_hints import known_wrapping_of
from envkit.errors import ArgumentError, ArgumentTypeError, EncodingError
from envkit.specs import (
    Categorical,
    Composite,
    TensorSpec,
    Unbounded,
)
from envkit.specs.annotations import Device, reading_waits
from envkit_bridges.gym.answers import reset_answer, step_answer
from envkit_bridges.gym.backend import GymSpace, library_of
from envkit_bridges.gym.codecs import codecs_of
from envkit_bridges.gym.torch_leaves import TorchLeaves, form_of
from envkit_bridges.gym.torch_rows import First, TorchRowsEnv, chosen
from envkit_bridges.libraries import Simulator, no_object_of

Way = Literal["reset_mask", "env_idx", "env_ids"]


def is_torch_vector(env: Any) -> bool:
    """Check whether an env object steps many rows at once and its data is torch tensors.

    It names a ``device``, or its reset returns tensors: where it is a vector env that is not Gymnasium's own, it is reset.
    """
    own = getattr(env, "unwrapped", env)
    if not (hasattr(own, "num_envs") and hasattr(own, "single_observation_space")):
        return False
    vector = library_of(own).vector
    if isinstance(own, vector.SyncVectorEnv | vector.AsyncVectorEnv):
        return False
    if isinstance(getattr(own, "device", None), torch.device | str):
        return True
    return _any_tensor(env.reset()) is not None


class TorchVectorWrapper(TorchRowsEnv):
    """Show a vector env whose data is torch tensors as an env of TensorDicts; batch-locked. `GymWrapper` makes one of such an env.

    Data stays on the device of the simulator, and a rollout without a stop rule does not wait for it. All entries are
    copied, since most simulators write into the tensors that they have handed out. ``next`` holds the true last observation.

    Args:
        env: a ``gymnasium.vector.VectorEnv``, or an env with ``num_envs``, ``single_observation_space`` and
            ``single_action_space``. Observations, rewards and flags are tensors with the rows in front.
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        autoreset_mode: what the simulator does with rows that have ended, "SameStep", "NextStep" or "Disabled", or Gymnasium's
            ``AutoresetMode``. None reads ``metadata["autoreset_mode"]``.
        partial_reset: how its ``reset`` takes row numbers or a mask: "reset_mask", ``options={"reset_mask": mask}``; "env_idx",
            ``options={"env_idx": numbers}``; "env_ids", ``env_ids=numbers``. The mask is bool, shape ``(num_envs,)``, and the
            numbers are int64. None takes "env_ids" where ``reset`` has that keyword, and otherwise "reset_mask" without
            autoreset. To find numbers waits for a GPU, a mask does not.
        final: "missing" takes a simulator that resets in the same step and returns no last observations. Where an episode
            ended, floats in ``next`` are then NaN and other entries 0, or the nearest that their space has, and
            ``("next", "final_missing")``, bool, shape ``(num_envs, 1)``, is True. `gae` leaves these steps out.
        info: record the tensors that the info of a first step holds, see `GymWrapper.set_info_dict_reader`.
        device: where data is delivered; None leaves it on the device of the simulator.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env object of this kind.
        ArgumentError: (a ValueError) the simulator does not say what it does with rows that have ended, or hides what is needed.
        SpecError: a space has no counterpart in tensors of fixed shape.

    Example:
        >>> import gymnasium
        >>> import torch
        >>> from envkit import GymWrapper
        >>> class Drift(gymnasium.vector.VectorEnv):
        ...     metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        ...     num_envs = 4
        ...     single_observation_space = gymnasium.spaces.Box(-9, 9, (1,))
        ...     single_action_space = gymnasium.spaces.Box(-1, 1, (1,))
        ...
        ...     def reset(self, *, seed=None, options=None):
        ...         mask = (options or {}).get("reset_mask")
        ...         place = torch.zeros(4, 1)
        ...         if mask is not None:
        ...             place = torch.where(mask[:, None], place, self.place)
        ...         self.place = place
        ...         return self.place, {}
        ...
        ...     def step(self, action):
        ...         self.place = self.place + action
        ...         over = self.place[:, 0] > 1
        ...         return self.place, -action[:, 0], over, torch.zeros_like(over), {}
        >>> env = GymWrapper(Drift())
        >>> type(env).__name__, env.batch_size
        ('TorchVectorWrapper', torch.Size([4]))
        >>> ahead = lambda observation: torch.ones(4, 1)
        >>> data = env.rollout(5, ahead, break_when_any_done=False)
        >>> data["next", "observation"][0].flatten()
        tensor([1., 2., 1., 2., 1.])
    """

    libname = "gymnasium"

    def __init__(
        self,
        env: Simulator,
        categorical_action_encoding: bool = False,
        *,
        autoreset_mode: Any = None,
        partial_reset: Way | None = None,
        final: Literal["missing"] | None = None,
        info: bool = False,
        device: Device | None = None,
        **options: Unpack[EnvOptions],
    ):
        own = _require_rows(env)
        if type(self) is TorchVectorWrapper:
            _require_gymnasium(own)
        categorical = as_bool("categorical_action_encoding", categorical_action_encoding)
        require_option("final", final, ["missing", None])
        require_option("partial_reset", partial_reset, [*_WAYS, None])
        info = as_bool("info", info)
        simulator = _without_checkers(env)
        super().__init__(
            simulator,
            num_envs=own.num_envs,
            simulator_device=_device_of(own, simulator),
            device=device,
            **options,
        )
        self.libname = library_of(own).__name__
        self._lacks_final = final == "missing"
        self._modes = library_of(own).vector.AutoresetMode
        self.autoreset_mode = self._mode_of(own, autoreset_mode)
        self.partial_reset = partial_reset or self._known_way(own)
        if self.autoreset_mode != self._modes.DISABLED:
            self._needs_reset = True
        self._require_sense()
        observed, acted = (self._space_of(name) for name in ("observation", "action"))
        observation, action = codecs_of(observed, acted, categorical=categorical)
        assert observation is not None
        self._observed, self._acted = TorchLeaves(observation), TorchLeaves(action)
        self._declare()
        if info:
            self.set_info_dict_reader()

    def _space_of(self, name: Literal["observation", "action"]) -> GymSpace:
        """Return a space of one row, as wrappers of vector envs show it."""
        name_of_row = f"single_{name}_space"
        inner = getattr(self._env, "unwrapped", self._env)
        return getattr(self._env, name_of_row, getattr(inner, name_of_row))

    def _mode_of(self, simulator: Any, mode: Any) -> Any:
        """Read what the simulator does with rows that have ended.

        Raises:
            ArgumentError: (a ValueError) it does not say so, or nothing of that name is known.
        """
        if mode is None:
            metadata = getattr(simulator, "metadata", None) or {}
            mode = getattr(simulator, "autoreset_mode", metadata.get("autoreset_mode"))
        if mode is None and self._lacks_final:
            return self._modes.SAME_STEP
        names = [one.value for one in self._modes]
        if mode is None:
            raise ArgumentError(
                f"{simulator} does not say what it does with rows that have ended: it has no metadata['autoreset_mode']. Pass "
                f"autoreset_mode=, one of {names}. 'Disabled' is a simulator that resets a row only where it is asked to."
            )
        try:
            return self._modes(mode)
        except ValueError as error:
            raise ArgumentError(
                f"autoreset_mode is {mode!r}; expected one of {names}. Pass one of them."
            ) from error

    def _known_way(self, simulator: Any) -> Way | None:
        if "env_ids" in inspect.signature(simulator.reset).parameters:
            return "env_ids"
        return "reset_mask" if self.autoreset_mode == self._modes.DISABLED else None

    def _require_sense(self) -> None:
        env, mode = self._env, self.autoreset_mode
        if self._lacks_final and mode != self._modes.SAME_STEP:
            raise ArgumentError(
                f"final is 'missing', but {env} resets rows in mode {mode.value!r}, which returns last observations. Leave "
                "final out."
            )
        if mode == self._modes.NEXT_STEP and self.partial_reset is None:
            raise ArgumentError(
                f"{env} resets rows in the step after their last, in which their action is ignored, so they must be reset "
                f"before it. Pass partial_reset=, one of {list(_WAYS)}, if its reset takes single rows and no second reset "
                "follows; or make it with another autoreset_mode."
            )
        if self.partial_reset == "env_ids" and env is not env.unwrapped:
            raise ArgumentError(
                f"rows of {env} are reset by the keyword env_ids, which wrappers of Gymnasium do not hand on. Wrap "
                "env.unwrapped, and put transforms around the result."
            )

    def _declare(self) -> None:
        batch, device = self.batch_size, self.device
        spec = self._observed.codec.spec(device)
        self._nearest: dict[Key, torch.Tensor] = {}
        if self._lacks_final:
            spec = spec._map(_with_nan)
            zeros = {as_key(path): spec[as_key(path)].zero() for path in leaf_paths(spec)}
            self._nearest = {
                key: spec[key].project(zero)
                for key, zero in zeros.items()
                if not spec[key].is_in(zero)
            }
            spec[rules.FINAL_MISSING] = Categorical(2, shape=(1,), dtype=torch.bool, device=device)
        self.observation_spec = spec.expand(batch)
        self.action_spec = self._acted.codec.spec(device).expand(batch)
        self.reward_spec = Unbounded((*batch, 1), dtype=torch.float32, device=device)
        self.done_spec = self._flag_specs()

    def _find_facts(self) -> Facts:
        """Find its facts; what an observation space holds are observations, whatever they are called."""
        infos = self._read_infos
        if self._lacks_final:
            infos |= {(rules.FINAL_MISSING,)}
        return replace(super()._find_facts(), gives_nan=self._lacks_final, infos=infos)

    @property
    def _resets_rows(self) -> bool:
        return self.partial_reset is not None

    # ----------------------------------------------------------------------------- what is asked of it

    def read_action(self, action: Any) -> Any:
        """Turn an action, or a TensorDict of several, into what the simulator takes, in separate tensors."""
        is_one = isinstance(action, torch.Tensor)
        return self._acted.taken(
            {
                path: self._for_simulator(action if is_one else action.get(as_key(path)))
                for path in self._acted.leaves
            }
        )

    def _action_entry(self) -> Key | None:
        leaves = self._acted.leaves
        return as_key(*leaves) if len(leaves) == 1 else None

    def _advance(self, td: Any) -> TensorDict:
        action = self.read_action(self._actions_in(td))
        result = step_answer(self._simulator.step(action))
        observation, reward, terminated, truncated, info = result
        flags = [
            self._flag(name, value)
            for name, value in (("terminated", terminated), ("truncated", truncated))
        ]
        over = rules.done_from(*flags)
        made = self._shown(observation, info or {}, "step")
        if self.autoreset_mode == self._modes.SAME_STEP:
            made = self._with_last(made, over[:, 0], info or {})
        entries = {"reward": self._reward(reward), "done": over}
        entries |= {"terminated": flags[0], "truncated": flags[1]}
        return made.update({name: value.to(self.device) for name, value in entries.items()})

    def _with_last(self, following: TensorDict, over: torch.Tensor, info: Mapping[str, Any]) -> Any:
        """Put last observations in the place of first ones, and keep these.

        Raises:
            EncodingError: infos hold no last observations.
        """
        if not (reading_waits(over) or bool(over.any())):
            return following
        self._first = First(over, following.copy())
        if self._lacks_final:
            last: Any = following.apply(_missing)
            for key, value in self._nearest.items():
                last.set(key, value.expand_as(last.get(key)))
            return chosen(over, last, following).set(
                rules.FINAL_MISSING, over[:, None].to(self.device)
            )
        last = next((info[name] for name in _FINAL if info.get(name) is not None), None)
        if last is not None:
            last = self._shown(last, info.get("final_info") or info, "step", used=over)
            return chosen(over, last, following)
        if bool(over.any()):
            raise EncodingError(
                f"step of {self._env} ended the episodes of rows {over.nonzero().flatten().tolist()} and reset them, but "
                f"infos hold no 'final_obs' with their last observations, which next must hold. Return it, tensors of all "
                f"{len(over)} rows; make the simulator without autoreset; or pass final='missing', which leaves them out."
            )
        return following

    def _begin(self, rows: torch.Tensor | None, **kwargs: Any) -> TensorDict:
        if rows is not None and self.partial_reset == "reset_mask":
            kwargs["options"] = {**(kwargs.get("options") or {}), "reset_mask": rows.clone()}
        elif rows is not None:
            numbers = rows.nonzero().squeeze(-1)
            if not len(numbers):
                return self.full_observation_spec.zero()
            if self.partial_reset == "env_ids":
                kwargs["env_ids"] = numbers
            else:
                kwargs["options"] = {**(kwargs.get("options") or {}), "env_idx": numbers}
        observation, info = reset_answer(self._simulator.reset(**kwargs))
        return self._shown(observation, info or {}, "reset", used=rows)

    # ----------------------------------------------------------------------------------------- values

    def _shown(
        self,
        observation: Any,
        info: Mapping[str, Any],
        method: str,
        *,
        used: torch.Tensor | None = None,
    ) -> TensorDict:
        entries = self._observed.shown(observation, self.numel(), self._env, method, used=used)
        if self._lacks_final:
            entries[(rules.FINAL_MISSING,)] = torch.zeros(
                (self.numel(), 1), dtype=torch.bool, device=self._simulator_device
            )
        info = _copied(info) if self.info_dict_reader else {}
        return self._to_tensordict(nest(entries), info)

    def _flag(self, name: str, value: Any) -> torch.Tensor:
        """Return flags of all rows, bool of shape ``(num_envs, 1)``.

        Raises:
            EncodingError: they are no tensor of bools or integers, or not one for each row.
        """
        self._require_one_each(name, value)
        if value.is_floating_point():
            raise EncodingError(
                f"step of {self._env} returned {name} of dtype {value.dtype}; expected bools. Return value.bool()."
            )
        return value.reshape(-1, 1).to(torch.bool, copy=True)

    def _reward(self, value: Any) -> torch.Tensor:
        self._require_one_each("reward", value)
        return value.reshape(-1, 1).to(torch.float32, copy=True)

    def _require_one_each(self, name: str, value: Any) -> None:
        rows = self.numel()
        if not isinstance(value, torch.Tensor) or tuple(value.shape) not in ((rows,), (rows, 1)):
            raise EncodingError(
                f"step of {self._env} returned {name} as {form_of(value)}; expected a tensor of shape ({rows},), one value for "
                "each row. Correct its step."
            )


def _with_nan(spec: TensorSpec) -> TensorSpec:
    """Declare floats unbounded, so that NaN may be among them; a Composite leaf by leaf."""
    if isinstance(spec, Composite):
        return spec._map(_with_nan)
    assert spec.dtype is not None
    if not spec.dtype.is_floating_point:
        return spec
    return Unbounded(spec.shape, dtype=spec.dtype, device=spec.device)


def _missing(value: torch.Tensor) -> torch.Tensor:
    """Return what stands for a value that is not there."""
    return torch.full_like(value, torch.nan if value.is_floating_point() else 0)


# ----------------------------------------------------------------------------------------- env objects

_WAYS: tuple[Way, ...] = ("reset_mask", "env_idx", "env_ids")
_FINAL = ("final_obs", "final_observation")
_CHECKERS = ("OrderEnforcing", "PassiveEnvChecker")


def _require_rows(env: Any) -> Any:
    """Return the bare env object.

    Raises:
        ArgumentTypeError: (a TypeError) it is no env object of many rows.
    """
    if not (hasattr(env, "step") and hasattr(env, "reset")) or isinstance(env, type):
        raise no_object_of("a vector env whose data is torch tensors", "Gym", env)
    own = getattr(env, "unwrapped", env)
    lacking = [name for name in _ROWS if not hasattr(own, name)]
    if lacking:
        raise ArgumentTypeError(
            f"env is of type {type(own).__name__}, which has no {' and no '.join(lacking)}; expected an env of many rows. Set "
            "these in its __init__, or wrap a single env by GymWrapper(env)."
        )
    return own


def _require_gymnasium(env: Any) -> None:
    """Check that no other class wraps the env objects of a library.

    Raises:
        ArgumentTypeError: (a TypeError) one does.
    """
    wrapping = known_wrapping_of(env)
    if wrapping not in (None, "GymWrapper(env)"):
        raise ArgumentTypeError(
            f"env is {env}, but TorchVectorWrapper takes envs with spaces of Gymnasium. Wrap it by the class of its library: {wrapping}."
        )


_ROWS = ("num_envs", "single_observation_space", "single_action_space")


def _without_checkers(env: Any) -> Any:
    """Take off the wrappers that ``gymnasium.make`` adds, which look at arrays or hand on no keywords."""
    while type(env).__name__ in _CHECKERS and type(env).__module__.startswith("gymnasium."):
        env = env.env
    return env


def _device_of(inner: Any, env: Any) -> torch.device:
    """Return where the tensors of a simulator are."""
    device = getattr(inner, "device", None)
    if isinstance(device, torch.device | str):
        return torch.device(device)
    found = _any_tensor(env.reset())
    if found is None:
        raise ArgumentTypeError(
            f"reset of {inner} returned no torch tensor, so its data is not torch's. Wrap it by GymWrapper(env)."
        )
    return found.device


def _any_tensor(value: Any) -> torch.Tensor | None:
    """Find a tensor in dicts and tuples, however deep."""
    if isinstance(value, torch.Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | tuple | list):
        return None
    return next((tensor for tensor in map(_any_tensor, parts) if tensor is not None), None)


def _copied(info: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors of infos, which the simulator may write into."""
    return {
        name: _copied(value)
        if isinstance(value, Mapping)
        else value.clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in info.items()
    }
