"""Gym-style simulators as environments: what is asked of them, in methods that can be overridden.

`GymLikeEnv` decides the order in which a simulator's results are read, and the state after a load that fails. Methods
that a subclass may override say what a simulator's values mean; the defaults follow Gymnasium's API and the declared
specs.

Conventions
    simulator   object with ``reset(**kwargs) -> (observation, info)`` and
                ``step(action) -> (observation, reward, terminated, truncated, info)``. One that
                answers in another form is brought to it by `_output_transform` and
                `_reset_output_transform`.
    entries     dict of tensors (or of what the entry's spec encodes) by name; dicts nest.
    given up    of an episode: what was loaded does not go on as it did, and the load was not strict. The next step
                tells it, truncated, with what was known before; the reset that follows begins another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, Unpack

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, as_key
from envkit.data.transition import stepped_rows
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.options import EnvOptions
from envkit.env.own_state import LOADED, NEVER_SAVED, WITHOUT_EPISODE
from envkit.env.wrapper_hints import called_here
from envkit.errors import (
    EncodingError,
    MissingKeyError,
    OptionError,
    ResetMaskError,
    ResumeError,
    SpecError,
)
from envkit.specs.annotations import (
    Destination,
    Device,
    Numbers,
    Value,
    destination,
    require_memory,
)
from envkit.specs.inputs import ActionInput
from envkit_bridges.gym.answers import reset_answer, step_answer
from envkit_bridges.gym.gym_copies import deep_copy, pack, unpack
from envkit_bridges.gym.info import InfoReading, Outcome
from envkit_bridges.gym.resume import is_without_episode, recorded, restored, saved
from envkit_bridges.gym.simulator_rows import repeated, require_flags

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue
    from envkit_bridges.libraries import Simulator


class _StepForms(NamedTuple):
    """Facts of the specs about a step.

    Attributes:
        action: entry that is the action of the simulator; None where several are.
        actions: the rule of each action.
        rewards: their keys.
        flags: shapes of the done flags of the root.
    """

    action: Key | None
    actions: list[tuple[Key, ActionInput | None]]
    rewards: list[Key]
    flags: dict[str, torch.Size]


_ASKED = frozenset(
    ("_reset", "_step", "_reset_simulator", "_repeated_step", "_set_seed", "_simulator")
)


class GymLikeEnv(InfoReading):
    """Base class of environments over a gym-style simulator; unbatched and batch-locked.

    Args:
        env: the simulator.
        frame_skip: simulator steps per step; rewards are summed, and a finished episode stops them.
        convert_actions_to_numpy: give the simulator what `read_action` makes of an action; False
            hands it the tensor (or the TensorDict of several actions) that the spec describes.
        device: where data is delivered, "cpu" by default.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    A subclass declares its specs in `_make_specs`, or after ``super().__init__(simulator)``. Public attributes that it
    lacks are looked up on the simulator, through the simulator's own wrappers.

    Raises:
        ArgumentError: (a ValueError) ``frame_skip`` is below 1, or not an int.

    Example:
        >>> import numpy as np
        >>> from envkit import Bounded, Composite, GymLikeEnv, Unbounded
        >>> class Slope:
        ...     def reset(self, seed=None):
        ...         self.height = np.array([5.0])
        ...         return self.height, {}
        ...
        ...     def step(self, action):
        ...         self.height = self.height + action - 1.0
        ...         return self.height, 1.0, self.height[0] <= 0, False, {}
        >>> class SlopeEnv(GymLikeEnv):
        ...     def __init__(self):
        ...         super().__init__(Slope())
        ...         self.observation_spec = Composite(observation=Unbounded((1,)))
        ...         self.action_spec = Bounded(-1.0, 1.0, (1,))
        >>> env = SlopeEnv()
        >>> env.rollout(2)["next", "reward"].flatten()
        tensor([1., 1.])
        >>> env.close()
    """

    # the last two once their encoding is remembered
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {"read_obs", "read_reward"}
    available_envs: ClassVar[Sequence[str]] = []
    libname: str | None = None
    env_name: str | None = None
    _env: Any

    def __init__(
        self,
        env: Simulator,
        *,
        frame_skip: int = 1,
        convert_actions_to_numpy: bool = True,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptions],
    ):
        super().__init__(device=device, **options)
        require_memory(self.device, type(self).__name__)
        meaning = "the steps of the simulator for each step of the env"
        frame_skip = as_int("frame_skip", frame_skip, least=1, meaning=meaning)
        object.__setattr__(self, "_env", env)  # no submodule, even if the simulator is a module
        self.frame_skip = frame_skip
        self.convert_actions_to_numpy = as_bool(
            "convert_actions_to_numpy", convert_actions_to_numpy
        )
        self._make_specs(env)

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Deliver data to another device from now on; returns self.

        Raises:
            ArgumentError: (a ValueError) it is the meta device, which holds no data.
        """
        require_memory(destination(*args, **kwargs), type(self).__name__)
        return super().to(*args, **kwargs)

    def _make_specs(self, env: Simulator) -> None:
        """Declare the specs of simulator ``env``, for a subclass to override; called last."""

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                simulator = self.__dict__.get("_env")
                if name.startswith("_") or simulator is None:
                    raise
            if hasattr(simulator, name):
                return getattr(simulator, name)
            cause = None
            if hasattr(simulator, "get_wrapper_attr"):
                try:
                    return simulator.get_wrapper_attr(name)
                except AttributeError as error:  # names a wrapper that the user has never heard of
                    cause = error
            raise AttributeError(  # without a full stop: Python puts the nearest name behind
                f"neither {type(self).__name__} nor its simulator {type(simulator).__name__} has an "
                f"attribute {name!r}{called_here(name)}"
            ) from cause

    def __deepcopy__(self, memo: dict[int, Any]) -> GymLikeEnv:
        return deep_copy(self, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, pack(self)

    # ---------------------------------------------------------------- what subclasses may override

    def read_action(self, action: Value) -> SpaceValue:
        """Turn an action into what the simulator takes.

        Args:
            action: the tensor of the only action, or a TensorDict of several.
        """
        spec = self.full_action_spec if isinstance(action, TensorDictBase) else self.action_spec
        return spec.to_numpy(action, safe=False)

    def read_obs(self, observations: object) -> Mapping[str, Any]:
        """Turn an observation of the simulator into entries.

        A value that is no dict belongs to the first observation that is declared. An entry
        ``state`` is called ``observation`` where nothing else is.
        """
        if isinstance(observations, TensorDictBase):
            return dict(observations.items())
        if not isinstance(observations, Mapping):
            name = next(iter(self.full_observation_spec.keys()), None)
            if name is None:
                raise SpecError(
                    f"{type(self).__name__} declares no observation spec, so an observation of its "
                    "simulator has no name. Declare one after super().__init__(simulator), or in "
                    "_make_specs: self.observation_spec = Composite(observation=...)."
                )
            return {name: observations}
        if "state" in observations and "observation" not in observations:
            return {
                "observation" if name == "state" else name: value
                for name, value in observations.items()
            }
        return observations

    def read_reward(self, reward: object) -> Value | Mapping[str, Any]:
        """Turn the summed reward of a step into a tensor, or into a dict of several."""
        return self.reward_spec.encode(reward)

    def read_done(
        self,
        terminated: Numbers | None = None,
        truncated: Numbers | None = None,
        done: Numbers | None = None,
    ) -> tuple[Any, Any, Any, bool]:
        """Complete the end flags of a step.

        Returns:
            ``(terminated, truncated, done, stop)``: flags, or None for one that is not known, and
            whether frames are no longer repeated. A lone ``done`` is read as termination.
        """
        if done is None:
            if terminated is not None and truncated is not None:
                done = rules.done_from(terminated, truncated)
            else:
                done = truncated if terminated is None else terminated
                done = False if done is None else done
        if terminated is None and truncated is None:
            terminated = done
        return terminated, truncated, done, done if isinstance(done, bool) else _any(done)

    def _output_transform(self, result: Any) -> Outcome:
        """Turn a step of the simulator into (obs, reward, terminated, truncated, done, info).

        Flags that the simulator does not report are None.
        """
        observation, reward, terminated, truncated, info = step_answer(result)
        if terminated is not False or truncated is not False:
            require_flags(terminated, truncated, one_each=not self.batch_size)
        return observation, reward, terminated, truncated, None, {} if info is None else info

    def _reset_output_transform(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """Turn a reset of the simulator into (obs, info)."""
        observation, info = reset_answer(result)
        return observation, {} if info is None else info

    # ----------------------------------------------------------------------------- steps and resets

    resets_on_empty_mask = True  # and refuses them

    @property
    def _simulator(self) -> Simulator:
        """The simulator that is stepped and reset."""
        return self._env if self._recorded is None else self._recorded

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        mask = None if td is None else td.get(rules.RESET, None)
        result = self._reset_simulator(mask, **kwargs)
        observation, info = self._reset_output_transform(result)
        return self._to_tensordict(self.read_obs(observation), info)

    def _reset_simulator(self, mask: torch.Tensor | None, **kwargs: object) -> Any:
        if mask is not None and not bool(mask.all()):
            raise ResetMaskError(
                f"the reset mask of {type(self).__name__} is {mask.tolist()}, but one simulator "
                "cannot be reset in part. Leave the mask out, or do not call reset."
            )
        return self._simulator.reset(**kwargs)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        action = self._action_in(td, stepped_rows(td) if self._batch_size else None)
        if self.convert_actions_to_numpy:
            action = self.read_action(action)
        return self._next_of(self._repeated_step(action))

    def _next_of(self, outcome: Outcome) -> TensorDict:
        """Build the ``next`` of a step, whose flags are complete."""
        forms = self._declared.cached("step_forms", self._step_forms)
        observation, reward, terminated, truncated, done, info = outcome
        entries: dict[Any, Any] = dict(self.read_obs(observation))
        reward = self.read_reward(reward)
        if isinstance(reward, Mapping):
            entries.update(reward)
        else:
            entries[forms.rewards[0] if len(forms.rewards) == 1 else self.reward_key] = reward
        flags = {"terminated": terminated, "truncated": truncated, "done": done}
        for name, shape in forms.flags.items():
            if flags.get(name) is not None:
                entries[name] = torch.as_tensor(
                    flags[name], dtype=torch.bool, device="cpu"
                ).reshape(shape)
        return self._to_tensordict(entries, info)

    def _step_forms(self) -> _StepForms:
        flags = {name: self.full_done_spec[name].shape for name in self.done_levels.get((), ())}
        actions = [(key, self._action_inputs.get(key)) for key in self.action_keys]
        return _StepForms(self._action_entry(), actions, self.reward_keys, flags)

    def _action_entry(self) -> Key | None:
        keys = self.action_keys
        return keys[0] if len(keys) == 1 else None

    def _repeated_step(self, action: SpaceValue) -> Outcome:
        simulator = self._simulator

        def step(action: SpaceValue) -> tuple[Any, ...]:
            result = self._output_transform(simulator.step(action))
            observation, reward, terminated, truncated, done, info = result
            *flags, stop = self.read_done(terminated, truncated, done)
            return observation, reward, stop, False, (*flags, info)

        observation, reward, _, _, rest = repeated(step, self.frame_skip, action)
        return (observation, reward, *rest)

    def _action_in(self, td: TensorDictBase, rows: list[int] | None = None) -> SpaceValue:
        """Return the action in a root, as its spec says: a tensor, or a TensorDict of several.

        Only those of ``rows`` are looked at, see `ActionInput.take`.
        """
        forms = self._declared.cached("step_forms", self._step_forms)
        for key, rule in forms.actions:
            value = td.get(key, None)
            if value is None:
                raise MissingKeyError(
                    f"the TensorDict has no {key!r}; it has {sorted(map(str, td.keys(True)))}. "
                    "Write the action first, e.g. with env.rand_action(td)."
                )
            taken = value if rule is None else rule.take(value, self._batch_size, rows=rows)
            if key == forms.action:
                return taken
            if taken is not value:
                td = td.copy().set(key, taken)
        if forms.action is None:
            return td.select(*(key for key, _ in forms.actions))
        return td.get(forms.action)

    def _check_inputs(self, td: TensorDictBase) -> None:
        self._action_in(td, stepped_rows(td))

    def _to_tensordict(self, entries: Mapping[str, Any], info: dict[str, Any]) -> TensorDict:
        td = self._packed(entries, ())
        for reader in self.info_dict_reader:
            reader(info, td)
        return td

    def _packed(self, entries: Mapping[str, Any], path: tuple[str, ...]) -> TensorDict:
        """Build a TensorDict, encoding by their specs the values that are not data yet."""
        packed: dict[str, Any] = {}
        device = self._device
        for name, value in entries.items():
            if isinstance(value, torch.Tensor | TensorDictBase):
                packed[name] = value if device is None else value.to(device)
            elif is_non_tensor(value):
                packed[name] = value
            elif isinstance(value, Mapping):
                packed[name] = self._packed(value, (*path, name))
            else:
                packed[name] = self._spec_at((*path, name)).encode(value)
        return TensorDict._new_unsafe(packed, batch_size=self._batch_size, device=device)

    def _spec_at(self, path: tuple[str, ...]) -> Any:
        for spec in (self.full_observation_spec, self.full_reward_spec, self.full_done_spec):
            if as_key(path) in spec.keys(True):
                return spec[as_key(path)]
        raise MissingKeyError(
            f"the simulator gave {as_key(path)!r}, which no spec declares; declared are "
            f"{self.observation_keys}. Declare it in the observation spec, or leave it out in read_obs."
        )

    def _set_seed(self, seed: int | None) -> None:
        try:
            self._simulator.reset(seed=seed)
        except TypeError as error:
            if "unexpected keyword argument 'seed'" not in str(error):
                raise
            raise OptionError(
                f"reset of the simulator takes no seed ({error}), but is seeded by it. Correct the env's reset: "
                "def reset(self, *, seed=None, options=None), which calls super().reset(seed=seed)."
            ) from error

    def _movable_objects(self) -> Iterator[object]:
        yield from super()._movable_objects()
        yield getattr(self._env, "unwrapped", self._env)

    # ------------------------------------------------------------------------------------- resuming

    _own_state_is_needed = True
    _records = False
    """Whether `state_dict` must hold the episode under way."""

    _recorded: Simulator | None = None
    """The object that is stepped and reset for the simulator; None: the simulator itself."""

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), leaves_torch=True, keeps_state=type(self).__name__)

    def record_for_resume(self, mode: bool = True) -> Self:
        """Record episodes from the next reset on, see `EnvBase.record_for_resume`."""
        self._records = as_bool("mode", mode)
        self._take(recorded(self._simulator, self._records))
        return self

    def _take(self, env: Simulator) -> None:
        """Reset and step ``env`` from now on: the simulator, or what records its episodes."""
        self._recorded = env

    @property
    def _is_recordable(self) -> bool:
        """Whether `record_for_resume` makes a state dict hold the episode under way."""
        return True

    def _own_state(self) -> dict[str, Any]:
        """Add the state of the simulator.

        Raises:
            ResumeError: episodes are recorded, and this one cannot be restored exactly.
        """
        if self._records and self._overrides(_ASKED):
            raise ResumeError(
                f"{type(self).__name__} overrides one of {sorted(_ASKED)}, so what its simulator was asked for is "
                "not known, and cannot be asked for again. Put the change into a gymnasium wrapper."
            )
        simulator = self._simulator_state()
        own = {**super()._own_state(), "records": self._records, "simulator": simulator}
        if is_without_episode(simulator):
            name = f"{type(self).__name__}({', '.join(self._repr_arguments())})"
            own[WITHOUT_EPISODE] = name
            if not self._is_recordable:
                own[NEVER_SAVED] = name
        return own

    def _simulator_state(self) -> dict[str, Any]:
        return saved(self._simulator, exact=self._records)

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        if state["records"]:
            self.record_for_resume()
        try:
            self._restore_simulator(state["simulator"])
        except ResumeError:
            if strict:
                raise
            self._leave_episodes(LOADED)

    def _restore_simulator(self, state: Mapping[str, Any]) -> None:
        self._take(restored(self._simulator, state))

    # ---------------------------------------------------------------------------------------- rest

    def fast_encoding(self, mode: bool = True) -> None:
        """Store how observations and rewards are encoded, instead of looking it up at each step.

        Raises:
            EncodingError: `read_obs` or `read_reward` is overridden, and may encode in other ways.
        """
        self._memoize_encoding(mode)

    def _memoize_encoding(self, mode: bool) -> None:
        for name in ("read_obs", "read_reward"):
            if self._overrides(frozenset((name,))):
                raise EncodingError(
                    f"{type(self).__name__} overrides {name}, so how its values are encoded cannot "
                    "be remembered. Leave fast_encoding out."
                )
        self.full_observation_spec.memoize_encode(mode)
        self.full_reward_spec.memoize_encode(mode)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the simulator, if it can be closed."""
        was_open = not self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if was_open and hasattr(self._env, "close"):
            self._env.close()

    def render(self, *args: object, **kwargs: object) -> Any:
        """Render the simulator as it was made to."""
        return self._env.render(*args, **kwargs)


def _any(flag: Any) -> bool:
    return bool(flag.any()) if hasattr(flag, "any") else bool(flag)
