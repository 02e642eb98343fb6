"""The environment interface: TensorDict in, TensorDict out.

`EnvBase` is what users subclass: construction and life, random actions, transforms. A rollout is in
`rollout`, one reset and one step in `stepping`, what an output must be in `outputs`, what is declared in
`declared`, what an env is as a torch module in `module`. A new kind of env writes `_reset`, `_step`,
`_set_seed` and its specs, nothing else. It does not know JAX, Gymnasium or processes.

Conventions
    td      TensorDict whose root is what was known before the action; ``td["next"]`` is what the
            step produced.
    flags   rewards and done leaves carry a trailing singleton: shape (*batch, 1).
    masks   `_step` and `_reset`, see `rules`. They never survive in an output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Self, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from envkit.data.arguments import as_batch_size, as_bool, require_tensordict
from envkit.data.keywords import known_to, refuse_unknown
from envkit.data.paths import Key
from envkit.data.plain import from_plain, plain
from envkit.env.declared import Declared
from envkit.env.drawing import allow_options, fake_step
from envkit.env.facts import Facts
from envkit.env.from_data import Keys, specs_of_a_step
from envkit.env.html import EnvReport, html, report_of
from envkit.env.options import TAKEN_HERE, EnvMeta, EnvOptions
from envkit.env.own_state import LOADED, WITHOUT_EPISODE
from envkit.env.policy import PolicyLike
from envkit.env.rollout import rollout
from envkit.env.seeding import checked_seed, next_seed
from envkit.env.stepping import Stepping
from envkit.env.thread_lock import InUse
from envkit.errors import ClosedEnvError, NotCallableError
from envkit.lazy_imports import late
from envkit.specs.annotations import Destination, Device, EnvData, as_device, destination


class EnvBase(Stepping, metaclass=EnvMeta):
    """Base class of all environments.

    Args:
        device: where inputs are expected and outputs delivered; None sets no constraint.
        **options: see `envkit.env.options.EnvOptions`. Every subclass takes ``spec_locked``, ``auto_reset``, ``policy`` and ``seed``,
            whatever its own ``__init__`` takes.

    Any thread may use an env, one at a time: a call while another thread's runs raises `BusyError`.

    Raises:
        OptionError: (a TypeError) a keyword is unknown.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import Categorical, Composite, EnvBase, Unbounded
        >>> class Count(EnvBase):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.observation_spec = Composite(count=Unbounded((1,)))
        ...         self.action_spec = Categorical(2, shape=(1,))
        ...
        ...     def _reset(self, td):
        ...         self.count = torch.zeros(1)
        ...         return TensorDict(count=self.count)
        ...
        ...     def _step(self, td):
        ...         self.count = self.count + 1
        ...         return TensorDict(count=self.count, reward=torch.ones(1))
        ...
        ...     def _set_seed(self, seed):
        ...         pass
        >>> Count().rollout(3)["next", "count"].flatten()
        tensor([1., 2., 3.])
    """

    _fast_path_bypasses = frozenset(
        ("step", "reset", "step_mdp", "maybe_reset", "any_done", "step_and_maybe_reset")
    )

    def __new__(cls, *args: object, _batch_locked: bool | None = None, **kwargs: object) -> Self:
        """Accept what a subclass's own ``__new__`` hands on; ``_batch_locked`` is one env's own.

        Specs may be declared from here on, also before ``super().__init__()``.
        """
        env = super().__new__(cls)
        vars(env).update(_in_use=InUse(cls.__name__), _declared=Declared())
        vars(env).update(_batch_size=torch.Size(()), _device=None)
        if _batch_locked is not None:
            env._batch_locked = _batch_locked
        return env

    def __init__(self, *, device: Device | None = None, **options: Unpack[EnvOptions]):
        super().__init__()
        unknown = [name for name in options if name not in TAKEN_HERE]
        if unknown:
            known = known_to(type(self)) or ["device", *TAKEN_HERE]
            refuse_unknown(type(self).__name__, unknown, [n for n in known if n not in unknown])
        self._device = None if device is None else as_device(device)
        self._batch_size = as_batch_size(options.get("batch_size"))
        self._declared.place(self._batch_size, self._device)
        self.run_type_checks = as_bool("run_type_checks", options.get("run_type_checks", False))
        allows_done = options.get("allow_done_after_reset", False)
        self.allow_done_after_reset = as_bool("allow_done_after_reset", allows_done)
        self.is_closed = False

    def _after_init(self, spec_locked: bool) -> None:
        if "is_closed" not in vars(self):
            raise NotCallableError(
                f"{type(self).__name__}.__init__ never calls that of its base class. Call "
                "super().__init__() in it, with batch_size= and device= where it has them."
            )
        self._finish_specs(lock=spec_locked)

    rollout = rollout

    # ------------------------------------------------------------------------------------ actions

    def rand_action(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Sample every action from its spec; written into ``tensordict``, which is returned.

        Without one, a new TensorDict of the env's batch size is made. The samples come from the
        env's own generator, see `set_seed`. Where an `ActionMask`, of this env or inside of it, says
        which entry of the data holds the allowed options, they are drawn from those.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv(batch_size=[4])
            >>> env.rand_action(env.reset())["action"].shape
            torch.Size([4, 1])
        """
        td = self._drawn_into(tensordict)
        return td.update(self._drawn_actions(td, self._action_generator))

    def _drawn_into(self, td: TensorDictBase | None) -> TensorDictBase:
        """Return what random actions are written into: what was given, checked, or a new TensorDict."""
        if td is None:
            return TensorDict({}, batch_size=self.batch_size, device=self.device)
        require_tensordict("what rand_action() was given", td)
        self._check_batch(td)
        return td

    def _drawn_actions(
        self, td: TensorDictBase, generator: torch.Generator | None, part: Any = ()
    ) -> TensorDictBase:
        """Sample the actions of the whole batch of ``td``, or of a part of it, given as an index."""
        if not self.batch_locked and td.batch_size != self.batch_size:
            spec = self.single_full_action_spec
            masks = self._facts.action_masks
            if not masks:
                return spec.rand(td.batch_size, generator)
            spec = spec.expand(td.batch_size)
            allow_options(spec, td, masks)
            return spec.rand((), generator)
        spec = self.full_action_spec
        allow_options(spec, td, self._facts.action_masks)
        return (spec if part == () else spec[part]).rand((), generator)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Take one step with random actions: ``step(rand_action(tensordict))``.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> sorted(env.rand_step(env.reset())["next"].keys())
            ['done', 'params', 'reward', 'terminated', 'th', 'thdot']
        """
        return self.step(self.rand_action(tensordict))

    def all_actions(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Enumerate the actions that a mask of the action spec allows, stacked on a new first axis.

        Those of one position: all rows, and all agents of a group, do the same. Discrete specs only.

        Example:
            >>> from envkit import GymEnv
            >>> env = GymEnv("CartPole-v1")
            >>> env.all_actions()["action"]
            tensor([[1, 0],
                    [0, 1]])
            >>> env.close()
        """
        return self.full_action_spec.enumerate(use_mask=True)

    def cardinality(self, tensordict: TensorDictBase | None = None) -> float | int:
        """Count the actions; infinitely many where they are continuous.

        Example:
            >>> from envkit import GymEnv, PendulumEnv
            >>> PendulumEnv().cardinality()
            inf
            >>> env = GymEnv("CartPole-v1")
            >>> env.cardinality()
            2
            >>> env.close()
        """
        return self.full_action_spec.cardinality()

    def fake_tensordict(self) -> TensorDict:
        """Return zeros in exactly the layout of one rollout step, batch size ``batch_size``.

        Example:
            >>> from envkit import GymEnv
            >>> env = GymEnv("CartPole-v1")
            >>> td = env.fake_tensordict()
            >>> td["observation"], td["next", "reward"]
            (tensor([0., 0., 0., 0.]), tensor([0.]))
            >>> env.close()
        """
        return fake_step(self.input_spec, self.output_spec)

    def auto_specs_(
        self,
        policy: PolicyLike,
        *,
        tensordict: TensorDictBase | None = None,
        action_key: Keys = "action",
        done_key: Keys | None = None,
        observation_key: Keys = "observation",
        reward_key: Keys = "reward",
    ) -> Self:
        """Declare the specs by what a reset, the policy and a step give; returns self.

        All are unbounded: say more where random actions are to be drawn, `action_spec` for one.

        Args:
            policy: called with the TensorDict.
            tensordict: a root to begin with, instead of a reset.
            action_key, done_key, observation_key, reward_key: entries of each kind, a key or a list of keys;
                None takes what is called done, terminated or truncated.

        Raises:
            MissingKeyError: (a KeyError) one of these is not in the data.
            ResetOutputError: (a RuntimeError) the step gave entries that are none of these.
        """
        kinds = {"action": action_key, "done": done_key}
        kinds |= {"observation": observation_key, "reward": reward_key}
        found = specs_of_a_step(self, policy, tensordict, **kinds)
        for kind, spec in found.items():
            setattr(self, f"full_{kind}_spec", spec)
        self.full_state_spec = found["state"].update(self.full_done_spec)  # every root holds them
        self._declared.reward_is_implied = False
        return self

    def _faults(self) -> Iterable[str]:
        """Return what is wrong with this kind of env that no data can show, for `check_env_specs`."""
        return ()

    def check_env_specs(
        self,
        return_contiguous: bool | None = None,
        check_dtype: bool = True,
        seed: int | None = None,
        tensordict: TensorDictBase | None = None,
        break_when_any_done: bool | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Compare a few steps with the specs; see `envkit.check_env_specs`."""
        late("check_env_specs")(
            self,
            return_contiguous,
            check_dtype,
            seed,
            tensordict,
            break_when_any_done,
            strict=strict,
        )

    def _find_facts(self) -> Facts:
        made = next(kind for kind in type(self).__mro__ if "_step" in vars(kind))
        is_ours = made.__module__.split(".")[0] in ("envkit", "envkit_bridges")
        is_saved = type(self).get_extra_state is not nn.Module.get_extra_state
        may_lose = self.batch_locked and not is_ours and not is_saved
        return replace(
            super()._find_facts(), unsaved_state=type(self).__name__ if may_lose else None
        )

    # --------------------------------------------------------------------------------- transforms

    def append_transform(
        self, transform: nn.Module | Callable[[TensorDictBase], TensorDictBase]
    ) -> EnvBase:
        """Wrap this env in a transform.

        Args:
            transform: a `Transform`, or a function ``td -> td``, which is run on what each reset
                and each step produces.

        Returns:
            A `TransformedEnv` of this env. One that is a `TransformedEnv` already is extended in
            place and returned.

        Example:
            >>> from envkit import GymEnv, StepCounter
            >>> env = GymEnv("CartPole-v1").append_transform(StepCounter(max_steps=2))
            >>> env.rollout(10)["next", "step_count"].flatten()
            tensor([1, 2])
            >>> env.close()
        """
        return late("TransformedEnv")(self, transform)

    def _fuse(self, transforms: Sequence[Any]) -> tuple[EnvBase, int]:
        """Offer to run the first of some transforms inside this env.

        Returns:
            An env that acts like a `TransformedEnv` of them, and how many it has taken.
        """
        return self, 0

    # ----------------------------------------------------------------------------- gym's registry

    @classmethod
    def register_gym(
        cls,
        id: str,
        *,
        entry_point: Callable[..., EnvBase] | str | None = None,
        transform: nn.Module | Callable[[TensorDictBase], TensorDictBase] | list[Any] | None = None,
        info_keys: list[Key] | str | None = None,
        observation_key: Key | None = None,
        backend: str | ModuleType | None = None,
        to_numpy: bool = False,
        reward_threshold: float | None = None,
        nondeterministic: bool = False,
        max_episode_steps: int | None = None,
        order_enforce: bool = True,
        autoreset: bool = False,
        disable_env_checker: bool = False,
        apply_api_compatibility: bool = False,
        **kwargs: Any,
    ) -> None:
        """Register this class in gym or gymnasium, so that ``gymnasium.make(id)`` builds it.

        The object obeys the gym protocol: ``reset(seed=None, options=None)`` gives an observation and
        infos, ``step(action)`` observation, reward, terminated, truncated and infos. Observations are
        nested dicts with sorted keys; of an env of Gymnasium, spaces, order and infos are the simulator's. The state of a
        stateless env is kept between calls, and not shown. ``make(id).unwrapped.envkit_env`` is the env itself.

        Args:
            id: name in the registry, e.g. "MyEnv-v0".
            entry_point: what is built instead of this class: a class or callable, or
                "module:attribute".
            transform: a `Transform`, a function ``td -> td``, or a list of them.
            info_keys: observation entries that go to the infos; a node takes along what is below.
            observation_key: the entry that is the observation, for programs that read no dict; of an env of
                Gymnasium with one observation, "observation". Other entries are left out, unless ``info_keys`` names them. None gives a dict.
            backend: "gymnasium", "gym" or a module like them; None takes the current one. If the class has a keyword
                of this name too, as `BraxEnv`, give that one in ``make``.
            to_numpy: give arrays instead of tensors, and Python numbers as rewards and end flags.
            reward_threshold, nondeterministic, max_episode_steps, order_enforce: of the library's ``register``.
            autoreset, disable_env_checker, apply_api_compatibility: of ``register`` too. Its checker,
                which looks at arrays, is left out unless ``to_numpy`` is set.
            **kwargs: of the class; these, ``transform``, ``info_keys``, ``observation_key`` and ``to_numpy``
                may also be given, or given again, in ``make``.

        Raises:
            OptionError: (a TypeError) the installed version lacks an option that is set.
            ArgumentError: the class is abstract and ``entry_point`` is not given.
        """
        options = {
            "reward_threshold": reward_threshold,
            "nondeterministic": nondeterministic,
            "max_episode_steps": max_episode_steps,
            "order_enforce": order_enforce,
            "autoreset": autoreset,
            "disable_env_checker": disable_env_checker,
            "apply_api_compatibility": apply_api_compatibility,
        }
        late("register_gym")(
            cls,
            id,
            entry_point=entry_point,
            backend=backend,
            options=options,
            transform=transform,
            info_keys=info_keys,
            observation_key=observation_key,
            to_numpy=to_numpy,
            **kwargs,
        )

    # ------------------------------------------------------------------------------ seed and life

    @abstractmethod
    def _set_seed(self, seed: int) -> None:
        """Seed the simulator and nothing else."""

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed this env only, and return the seed for the next one (see `envkit.env.seeding`).

        With ``static_seed`` the same seed is returned. The global generators are never touched.

        Raises:
            ArgumentError: the seed is no integer of 0 or more.

        Example:
            >>> from envkit import PendulumEnv
            >>> env = PendulumEnv()
            >>> following = env.set_seed(0)
            >>> first = env.reset()["th"]
            >>> _ = env.set_seed(0)
            >>> bool(env.reset()["th"] == first)
            True
        """
        seed = None if seed is None else checked_seed(seed)  # simulators take a Python int only
        following = next_seed(seed)
        self._set_seed(seed)  # type: ignore[arg-type]
        self._seed_actions(seed)
        self._after_seed()
        return seed if static_seed else following

    def _seed_actions(self, seed: int | None) -> None:
        """Random actions come from a generator of the env's own, begun again by each seed.

        An env that was never seeded draws from torch's global generator.
        """
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device or "cpu").manual_seed(int(seed))
        self._action_seed, self._action_generator = seed, generator

    @property
    def _seeded_parts(self) -> list[tuple[Any, int | None]]:
        """The parts of the batch that have their own seed, as indices, each with that seed."""
        return [((), self._action_seed)]

    _action_seed: int | None = None
    _action_generator: torch.Generator | None = None

    def _own_state(self) -> dict[str, Any]:
        """Return where the random actions of this env are, if it was seeded; classes add what else they hold."""
        state: dict[str, Any] = {}
        if self._action_seed is not None or self._action_generator is not None:
            state |= {"seed": self._action_seed, "actions": plain(self._action_generator)}
        if self._unshown is not None:
            state |= {"unshown": plain(self._unshown), "left_by": self._left_by}
            state["to_truncate"] = plain(self._to_truncate)
        return state

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        self._action_seed = state.get("seed")
        self._action_generator = from_plain(state.get("actions"))
        self._unshown, self._has_begun = from_plain(state.get("unshown")), True
        self._left_by = state.get("left_by", Stepping._left_by)
        self._to_truncate = from_plain(state.get("to_truncate"))
        if WITHOUT_EPISODE in state:
            self._leave_episodes(LOADED)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Release the simulator. Closing it again does nothing, so that ``finally: env.close()`` is always right.

        Raises:
            ClosedEnvError: the env is closed already and ``raise_if_closed`` is set.

        Example:
            >>> from envkit import GymEnv
            >>> env = GymEnv("CartPole-v1")
            >>> env.close()
            >>> env.is_closed
            True
        """
        if self.is_closed and raise_if_closed:
            raise ClosedEnvError(
                f"{type(self).__name__} is closed already. Build a new one to go on, or leave "
                "raise_if_closed=True out."
            )
        self.is_closed = True

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move specs, parameters and future outputs to a device; returns self."""
        device = destination(*args, **kwargs)
        if device is not None:
            moved = self.input_spec.to(device), self.output_spec.to(device)
            self._device = device
            self._declared.hold(*moved)
            self._lock_own(self._declared.is_locked)
            self._seed_actions(self._action_seed)  # a generator cannot be moved
        return super().to(*args, **kwargs)  # type: ignore[return-value]

    def _repr_arguments(self) -> list[str]:
        """Return which simulator this is, as arguments of the constructor, for ``repr``."""
        return []

    def __repr__(self) -> str:
        parts = [
            *self._repr_arguments(),
            f"batch_size={tuple(self.batch_size)}",
            f"device={self.device}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _report(self) -> EnvReport:
        """Return what a notebook shows."""
        return report_of(self)

    def _repr_html_(self) -> str:
        return html(self)
