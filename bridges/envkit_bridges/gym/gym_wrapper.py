"""Env objects of Gymnasium as envkit environments; `gym_env` makes them by name.

`GymWrapper` decides which specs a gymnasium env gets and which way its steps take. How a single env
is stepped on rows is known to `simulator_rows`, what autoreset does to vector envs to `vector`, and
how a whole rollout is recorded to `recording`.

Conventions
    batch   () for a single env, (num_envs,) for one of gymnasium's vector envs.
    done    ``terminated | truncated``, each bool of shape (*batch, 1); rewards float32 of that shape
            unless the simulator publishes a ``reward_space``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, Unpack, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.exchange.one_env import OneRow
from envkit.data.arguments import as_batch_size, as_bool
from envkit.data.merging import merge_rows
from envkit.data.paths import Key, Path, as_key, as_path, nest
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.on_row import OnRow
from envkit.env.options import EnvOptions
from envkit.env.seeding import seed_chain
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    KeyCollisionError,
    SpecError,
)
from envkit.specs import Bounded, Categorical, Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device, Value
from envkit.specs.lasting import lasting
from envkit_bridges.gym.backend import GymSpace, SpaceValue, library_of
from envkit_bridges.gym.codecs import Codec, codec_of, codecs_of
from envkit_bridges.gym.frames import draw, require_frames, shape_of_frame
from envkit_bridges.gym.info import Outcome, default_info_dict_reader
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.gym.simulator_rows import DONE, GymCore, reward_array
from envkit_bridges.gym.torch_vector import TorchVectorWrapper, is_torch_vector
from envkit_bridges.gym.vector import VectorCore, VectorRows, is_vector
from envkit_bridges.libraries import Simulator, no_object_of


class GymWrapper(OnRow, GymLikeEnv):
    """Give an env object of Gymnasium the TensorDict interface; batch-locked.

    Args:
        env: a gymnasium env, unbatched here, or one of gymnasium's vector envs, which has batch
            size ``(num_envs,)``. Autoreset of the latter is undone: ``next`` holds the true last
            observation, and no step ignores its action. Of one whose data is torch tensors the result is a
            `TorchVectorWrapper`, which takes other keywords and leaves data on the simulator's device.
            An action in a Dict space is an entry of its name, as an observation in a Dict is. Where names of
            both clash, all actions lie below "action"; if an observation is called "action", "reward", "next" or as a
            done flag, all observations lie below "observation".
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        frame_skip: inner steps per step, rewards summed, stopping at the end of an episode.
        from_pixels: add ``pixels``, uint8 (height, width, 3); the env must render rgb arrays.
        pixels_only: with ``from_pixels``, leave the state observation out.
        convert_actions_to_numpy: False hands actions to the simulator as tensors.
        info: record what the info of a first step holds, see `set_info_dict_reader`. By default infos are
            left out.
        device: where data is delivered, "cpu" by default.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Raises:
        ValueError: ``frame_skip`` is not a positive int, or pixels are asked of an env that does
            not render them.
        ArgumentTypeError: (a TypeError) ``env`` is no env object.
        SpecError: a space has no counterpart in specs: Graph, OneOf, a Sequence that is not stacked
            or holds Text.

    Example:
        >>> import gymnasium
        >>> from envkit import GymWrapper
        >>> env = GymWrapper(gymnasium.make("CartPole-v1"))
        >>> env.rollout(3)["action"].shape
        torch.Size([3, 2])
        >>> env.close()
    """

    libname = "gymnasium"
    _vector_kind = VectorCore
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {
        *("_step", "_reset", "_reset_simulator", "_repeated_step", "_to_tensordict"),
        *("_action_in", "read_action", "read_obs", "read_reward", "read_done"),
        *("_output_transform", "_reset_output_transform"),
    }

    def __new__(cls, env: Simulator = None, *args: Any, **kwargs: Any) -> Self:
        if cls is GymWrapper and is_torch_vector(env):
            return cast(Self, TorchVectorWrapper(env, *args, **kwargs))
        return super().__new__(cls)

    def __init__(
        self,
        env: Simulator,
        categorical_action_encoding: bool = False,
        *,
        frame_skip: int = 1,
        from_pixels: bool = False,
        pixels_only: bool = True,
        convert_actions_to_numpy: bool = True,
        info: bool = False,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptions],
    ):
        encoding = as_bool("categorical_action_encoding", categorical_action_encoding)
        from_pixels = as_bool("from_pixels", from_pixels)
        pixels_only, info = as_bool("pixels_only", pixels_only), as_bool("info", info)
        self._require_arrays(env)
        options["batch_size"] = batch = _batch_of(env, options.get("batch_size"))
        super().__init__(
            env,
            frame_skip=frame_skip,
            convert_actions_to_numpy=convert_actions_to_numpy,
            device=device,
            **options,
        )
        self.libname = self.get_library_name(env)
        self.categorical_action_encoding = encoding
        self.from_pixels = from_pixels
        self.pixels_only = pixels_only
        if from_pixels:
            require_frames(env)
        observed = None
        if not (from_pixels and pixels_only):
            observed = _space_of_one(env, "observation_space")
        acted = _space_of_one(env, "action_space")
        observation, action = codecs_of(observed, acted, categorical=encoding)
        if not action.leaves:
            raise SpecError(
                f"the action space of {env} is {acted}, which holds no action, so there is nothing a "
                "policy could decide. Give it an action, one that is ignored if need be: "
                "gymnasium.spaces.Discrete(1)."
            )
        self._vector: VectorCore | None = None
        if batch:
            self._vector = self._vector_kind(env, observation, action, pixels=from_pixels)
            self._check_single_frames()
        self.core = GymCore(env, observation, action, frame_skip=frame_skip, pixels=from_pixels)
        self._declare(observation, action)
        if info:
            self.set_info_dict_reader()

    def _require_arrays(self, env: Simulator) -> None:
        """Check that a subclass was not given an env whose data is torch tensors.

        Raises:
            ArgumentError: (a ValueError) it was.
        """
        is_ours = type(self) is GymWrapper or type(self)._vector_kind is not VectorCore
        if not is_ours and is_torch_vector(env):
            raise ArgumentError(
                f"the data of {env} is torch tensors, but {type(self).__name__} reads arrays. Pass the env object to "
                "GymWrapper, or derive from TorchVectorWrapper."
            )

    def _check_single_frames(self) -> None:
        if self.frame_skip > 1:
            raise ArgumentError(
                f"frame_skip is {self.frame_skip}, but rows of a vector env end at different frames. "
                "Let GymEnv(..., num_envs=n, frame_skip=k) build it, or skip frames in each env."
            )

    def _declare(self, observation: Codec | None, action: Codec) -> None:
        device, batch = self.device, self.batch_size
        spec = Composite(device=device) if observation is None else observation.spec(device)
        if self.from_pixels:
            _require_free("pixels", spec)
            self._simulator.reset()
            shape = shape_of_frame(self._env)
            spec["pixels"] = Unbounded(shape, dtype=torch.uint8, device=device)
        self.observation_spec = _expanded(spec, batch)
        self.action_spec = _expanded(action.spec(device), batch)
        self.reward_spec = _expanded(self._reward_of_one(), batch)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch, device=device
        )

    def _store(self, side: str, kind: str, spec: Composite) -> None:
        core = vars(self).get("core")
        if kind == "action" and core is not None and not self._passed_by_override:
            taken = _expanded(core.action.spec(self.device), self.batch_size)
            if _forms(spec) != _forms(taken):
                raise SpecError(
                    f"action_spec is {dict(spec.items(True, True))}, but the simulator takes "
                    f"{dict(taken.items(True, True))}. Assign the same names, shapes and kinds; build the env with "
                    "categorical_action_encoding= for integers or one-hot rows, or add a transform."
                )
        super()._store(side, kind, spec)

    def _reward_of_one(self) -> Composite:
        space = _published(self._env, "reward_space")
        if space is None:
            reward = Unbounded((1,), device=self.device, dtype=torch.float32)
            return Composite(reward=reward, device=self.device)
        return codec_of(space, categorical=True, key="reward").spec(self.device)

    def _repr_arguments(self) -> list[str]:
        id = getattr(getattr(self._env, "spec", None), "id", None)
        told = [repr(id) if id else str(self._env)]
        return told if self.frame_skip == 1 else [*told, f"frame_skip={self.frame_skip}"]

    # -------------------------------------------------------------------------- values and simulator

    @property
    def _simulator(self) -> Simulator:
        return self.core.env if self._vector is None else self._vector

    def read_action(self, action: Value) -> SpaceValue:
        """Turn an action into a value of the gymnasium action space, by its codec."""
        codec = self.core.action
        if len(codec.leaves) == 1:
            data: dict[Path, Any] = dict.fromkeys(codec.leaves, action)
        else:
            actions = cast(TensorDictBase, action)
            data = {path: actions.get(as_key(path)) for path in codec.leaves}
        return codec.decode(data) if self._vector is None else self._vector.decode(data)

    def _action_entry(self) -> Key | None:
        leaves = self.core.action.leaves
        return as_key(*leaves) if len(leaves) == 1 else None

    def read_obs(self, observations: SpaceValue) -> Mapping[str, Any]:
        """Turn a value of the gymnasium observation space into entries, by its codec.

        Of a vector env: a list of one value for each row.
        """
        core = self.core
        if self._vector is not None:
            return nest(self._vector.encode(observations))
        entries = {} if core.observation is None else core.observation.encode_nested(observations)
        if core.pixels:
            entries["pixels"] = torch.from_numpy(np.array(self.render()))
        return entries

    def read_reward(self, reward: object) -> torch.Tensor:
        """Turn the summed reward of a step into a tensor of the shape and dtype of its spec."""
        shape, dtype = self._declared.cached("reward_form", self._reward_form)
        return torch.from_numpy(reward_array(reward, shape, dtype).copy())

    def _reward_form(self) -> tuple[tuple[int, ...], np.dtype]:
        spec = self.reward_spec
        return tuple(spec.shape), torch.empty(0, dtype=spec.dtype, device="cpu").numpy().dtype

    def _next_of(self, outcome: Outcome) -> TensorDict:
        self.core.end(outcome[-1])
        if self.core.listener is not None:
            self.core.listener.note_step(outcome[1], outcome[-1])
        return super()._next_of(outcome)

    @property
    def _last_episode(self) -> Any:
        """Info of the last step about the episode that ended there; of a vector env, of all rows.

        None of wrappers around a vector env: a reset of some rows has Gymnasium's forget the counts of all.
        """
        is_wrapped = self._vector is not None and self._env is not self._env.unwrapped
        return None if is_wrapped else self.core.episode

    def _reset_simulator(self, mask: torch.Tensor | None, **kwargs: object) -> Any:
        if self._vector is not None:
            return self._vector.reset(mask, **kwargs)
        result = super()._reset_simulator(mask, **kwargs)
        if self.core.listener is not None:
            self.core.listener.reset(lambda: result)
        return result

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if self._vector is None or bool(mask.all()):
            return super()._masked_next(td, mask)
        skipped = self._skipped_next(td)
        if not bool(mask.any()):
            return skipped
        acted = td.exclude(rules.STEP).copy()
        for key in self.action_keys:  # of rows that do not act, anything may be there
            action = acted.get(key, None)
            if action is not None and action.shape[:1] == mask.shape:
                others = action[mask][:1].expand_as(action)
                acted.set(key, rules.choose(mask, action, others))
        with self._vector.freezing(~mask.cpu().numpy()):
            row = self._row
            stepped = self._computed_next(acted) if row is None else row.step(acted)
        return merge_rows(skipped, stepped, {(): mask})

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the simulator; see `EnvBase.set_seed`.

        Row i of a vector env gets the i-th seed of the chain; the one after the last is returned.
        """
        if self._vector is None:
            return super().set_seed(seed, static_seed)
        following = self._vector.seed(seed, static=static_seed)
        self._seed_actions(seed)
        self._after_seed()
        self._seed_is_static = static_seed
        return following

    _seed_is_static = False

    def _find_facts(self) -> Facts:
        """Find its facts; what an observation space holds are observations, whatever they are called."""
        seeds = 1 if self._vector is None else self.numel()
        steps_all = self._vector is not None and self._vector.steps_all_rows
        return replace(
            super()._find_facts(),
            infos=self._read_infos,
            seeds_taken=seeds,
            steps_all_rows=type(self).__name__ if steps_all else None,
        )

    @property
    def _is_recordable(self) -> bool:
        return self._vector is None or self._vector.is_recordable

    @property
    def _seeded_parts(self) -> list[tuple[Any, int | None]]:
        if self._vector is None or self._action_seed is None:
            return super()._seeded_parts
        seeds, _ = seed_chain(self._action_seed, self.numel(), static=self._seed_is_static)
        return list(enumerate(seeds))

    def render(self, *args: object, **kwargs: object) -> Any:
        """Render the simulator as it was made to; MuJoCo's draw without a display too.

        Raises:
            RenderingError: MuJoCo cannot render on this machine; the message says what to install.
        """
        return draw(self._env, *args, **kwargs)

    @staticmethod
    def get_library_name(env: Simulator) -> str:
        """Return the name of the gym library that an env is an object of: "gymnasium", or "gym"."""
        return library_of(env).__name__

    def fast_encoding(self, mode: bool = True) -> None:
        """Accepted for the sake of `GymLikeEnv`: codecs have decided everything beforehand.

        Raises:
            EncodingError: `read_obs` or `read_reward` is overridden.
        """
        self._memoize_encoding(mode)

    # --------------------------------------------------------------------------------- fast ways

    _read_by_rows = OnRow._read_by_rows | {"convert_actions_to_numpy", "_readers"}

    def _find_plain(self) -> bool:
        """Check whether the core makes all of a step.

        It does not where entries have no form in rows, readers of infos are not ours, data goes to another device, or a
        subclass changes how a step is made.
        """
        core, vector = self.core, self._vector
        if self.run_type_checks or not self.convert_actions_to_numpy:
            return False
        if self.device != torch.device("cpu") or not self._steps_by_itself:
            return False
        if vector is not None:
            has_infos = bool(self.info_dict_reader)
            return not has_infos and vector.has_rows and self._declares_what_is_given(vector)
        codecs = [codec for codec in (core.observation, core.action) if codec is not None]
        has_rows = all(codec.has_rows for codec in codecs) and self.reward_spec.shape == (1,)
        return has_rows and all(map(_writes_rows, self.info_dict_reader))

    def row_core(self) -> GymCore | None:
        """Return the core that steps this env on NumPy rows; None where it does not make all of a step, and of a vector env."""
        if self._vector is not None or not self._is_plain:
            return None
        self.core.read_infos(self.info_dict_reader)
        return self.core

    def _readers_changed(self) -> None:
        if "core" in vars(self):
            self.core.read_infos(self.info_dict_reader)

    @lasting()
    def _made_row(self) -> OneRow | None:
        if self._vector is None:
            return cast("OneRow | None", super()._made_row())
        return OneRow(self, VectorRows(self._vector, self.core.end))

    def _declares_what_is_given(self, vector: VectorCore) -> bool:
        """Check whether the specs are those of the simulator, which may be assigned to others."""
        assert vector.observation is not None
        one_each = (*self.batch_size, 1)
        shown = _expanded(vector.observation.spec(self.device), self.batch_size)
        return (
            _arrays(self.full_observation_spec) == _arrays(shown)
            and _arrays(self.full_done_spec) == dict.fromkeys(DONE, (one_each, torch.bool))
            and [*_arrays(self.full_reward_spec)] == [("reward",)]
            and self.full_reward_spec["reward"].shape == one_each
        )

    def _row_on(self, core: Any, env: EnvBase) -> OneRow:
        return OneRow(env, core)

    # -------------------------------------------------------------------------------------- resuming

    def record_for_resume(self, mode: bool = True) -> Self:
        """Record episodes from the next reset on, see `EnvBase.record_for_resume`."""
        if self._vector is None:
            return super().record_for_resume(mode)
        self._records = as_bool("mode", mode)
        self._vector.record(self._records)
        return self

    def _take(self, env: Simulator) -> None:
        self.core.take(env)

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "static": self._seed_is_static}

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        self._seed_is_static = state["static"]

    def _simulator_state(self) -> dict[str, Any]:
        if self._vector is None:
            return super()._simulator_state()
        return self._vector.state(exact=self._records)

    def _restore_simulator(self, state: Mapping[str, Any]) -> None:
        if self._vector is None:
            super()._restore_simulator(state)
        else:
            self._vector.restore(state)


def _writes_rows(reader: object) -> bool:
    """Check whether a reader of infos can write into rows of memory."""
    return (
        type(reader) is default_info_dict_reader
        and reader.is_complete
        and all(leaf.dtype is not None for leaf in reader.info_spec.values(True, True))
    )


def _batch_of(env: Simulator, batch_size: BatchSize | None) -> tuple[int, ...]:
    """Read the batch of an env object of a gym library, which ``batch_size`` may repeat."""
    _require_gym_env(env)
    batch = (env.num_envs,) if is_vector(env) else ()
    if batch_size is not None and (size := as_batch_size(batch_size)) != torch.Size(batch):
        raise BatchSizeError(
            f"batch_size is {tuple(size)}, but the simulator has batch size {batch}. "
            "Leave it out; SerialEnv, ParallelEnv and GymEnv(..., num_envs=n) make batches."
        )
    return batch


def _require_gym_env(env: Any) -> None:
    name = env.__name__ if isinstance(env, type) else type(env).__name__
    if isinstance(env, type):
        raise ArgumentTypeError(
            f"env is the class {name}, but GymWrapper wraps an object of it. Write GymWrapper({name}())."
        )
    if not (hasattr(env, "step") and hasattr(env, "reset")):
        raise no_object_of("an env object of a gym library", "Gym", env)
    if not hasattr(env, "unwrapped"):
        raise ArgumentTypeError(
            f"env is of type {name}, which is no gymnasium.Env: it lacks the attribute unwrapped. Derive it, "
            f"class {name}(gymnasium.Env), with reset(self, *, seed=None, options=None) that returns (observation, info), and "
            "step(self, action) that returns (observation, reward, terminated, truncated, info)."
        )
    if type(env.unwrapped).__module__.startswith("vmas."):
        raise ArgumentTypeError(
            f"env is of type {name}, which shows an env of VMAS as one of Gymnasium. Wrap the env of VMAS, whose rows are a "
            "batch: VmasWrapper(env.unwrapped)."
        )
    for space in ("observation_space", "action_space"):
        if not (is_vector(env) or hasattr(env, space)):
            raise ArgumentTypeError(
                f"env is of type {name}, which has no {space}. Set it in __init__: "
                f"self.{space} = gymnasium.spaces.Box(-1, 1, (3,))."
            )


def _space_of_one(env: Simulator, name: str) -> GymSpace:
    """Return a space of a single env, or that of one row of a vector env."""
    return getattr(env, f"single_{name}" if is_vector(env) else name)


def _require_free(name: str, observed: Composite) -> None:
    if name in observed.keys():
        raise KeyCollisionError(
            f"the env observes {name!r}, and so are its rendered frames called. Leave from_pixels=True "
            "out, or rename the observation with a gymnasium wrapper."
        )


def _expanded(spec: Composite, batch: torch.Size) -> Composite:
    return spec.expand(batch) if batch else spec


def _forms(spec: Composite) -> dict[Key, tuple[torch.Size, type]]:
    """Return the shape and the kind of each leaf; bounds and dtypes may differ."""
    boxes = (Bounded, Unbounded)
    return {
        key: (leaf.shape, Bounded if isinstance(leaf, boxes) else type(leaf))
        for key, leaf in spec.items(True, True)
    }


def _arrays(spec: Composite) -> dict[Path, tuple[torch.Size, torch.dtype | None]]:
    """Return the shape and dtype of each leaf."""
    return {as_path(key): (leaf.shape, leaf.dtype) for key, leaf in spec.items(True, True)}


def _published(env: Simulator, name: str) -> Any:
    """Return an attribute of the env, or of what its wrappers hold; None when there is none."""
    return getattr(env, name, getattr(env.unwrapped, name, None))
