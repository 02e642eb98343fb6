"""mjlab, MuJoCo Warp behind Isaac Lab's interface: its tasks as environments of many rows, observations in groups.

`envkit_bridges.gym.torch_vector` steps and resets it by row numbers. This module turns its spaces into Gymnasium's,
switches its own resets off, and keeps its random numbers apart.

Conventions
    group    observations that are concatenated, e.g. "actor" and "critic"; one entry each.
    numbers  as in `envkit_bridges.gym.global_numbers`, which the library draws from; here each env has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.integers import as_int
from envkit.data.plain import from_plain, plain
from envkit.env.options import EnvOptionsWithoutSeed
from envkit.env.seeding import checked_seed, drawn_seed, seed_of_32_bits
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.process_wide import alone
from envkit.specs.annotations import Device, as_device
from envkit_bridges.gym.backend import GymSpace, gym_backend
from envkit_bridges.gym.global_numbers import numbers_now, set_numbers
from envkit_bridges.gym.torch_vector import TorchVectorWrapper
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require_name,
    require_quietly,
)


class MJLabWrapper(TorchVectorWrapper):
    """Show an env object of mjlab as an env of TensorDicts; batch-locked, batch size ``(num_envs,)``.

    Each group of observations is an entry, e.g. ``actor`` and ``critic``, or a node where the group is not concatenated.
    ``action`` is float32 and unbounded. Terms with ``time_out=True`` truncate.

    Args:
        env: a ``ManagerBasedRlEnv`` whose ``cfg.auto_reset`` is False, so that ``next`` holds the true last observation.
        final: "missing" takes one that resets by itself, see `TorchVectorWrapper`.
        seed: of the resets, and of random actions. None draws one from torch's global generator.
        device: where data is delivered; None leaves it on the device of the simulator.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Random numbers are the env's own, so that envs which are stepped in turns give what each gives alone. A `state_dict`
    holds them. A ``_step`` mask leaves rows out that have ended; the simulator begins an episode in them before that step.
    Unknown public attributes are looked up on the mjlab env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of mjlab.
        ArgumentError: (a ValueError) it resets by itself, and ``final`` is None.

    Example:
        >>> import contextlib
        >>> import io
        >>> from envkit import MJLabWrapper
        >>> from mjlab.envs import ManagerBasedRlEnv
        >>> from mjlab.tasks.cartpole.cartpole_env_cfg import cartpole_balance_env_cfg
        >>> cfg = cartpole_balance_env_cfg()
        >>> cfg.scene.num_envs, cfg.auto_reset = 4, False
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     simulator = ManagerBasedRlEnv(cfg, "cpu")
        >>> env = MJLabWrapper(simulator, seed=0)
        >>> env.rollout(3)["next", "critic"].shape
        torch.Size([4, 3, 5])
        >>> env.close()
    """

    _needs_reset = True

    def __init__(
        self,
        env: Simulator,
        *,
        final: Literal["missing"] | None = None,
        seed: int | None = None,
        device: Device | None = None,
        **options: Unpack[EnvOptionsWithoutSeed],
    ):
        _require_env(env)
        is_automatic = env.unwrapped.cfg.auto_reset
        if is_automatic and final is None:
            raise ArgumentError(
                f"{env} resets rows by itself, so it does not return their last observations, which next must hold. Set "
                "cfg.auto_reset = False before the env is made, or pass final='missing', which leaves them out."
            )
        self._numbers = numbers_now(as_device(env.unwrapped.device))
        super().__init__(
            env,
            autoreset_mode="SameStep" if is_automatic else "Disabled",
            final=final,
            device=device,
            **options,
        )
        self.libname = "mjlab"
        if seed is not None:
            seed = checked_seed(seed)
            self._seed_actions(seed)
        self._set_seed(seed)

    def _space_of(self, name: str) -> GymSpace:
        return _in_gymnasium(getattr(self._env.unwrapped, f"single_{name}_space"))

    # --------------------------------------------------------------------------------- random numbers

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Let the library draw from this env's numbers; all others are as they were afterwards, also where it raises."""
        with alone():
            outside = numbers_now(self._simulator_device)
            set_numbers(self._numbers, self._simulator_device)
            try:
                yield
            finally:
                self._numbers = numbers_now(self._simulator_device)
                set_numbers(outside, self._simulator_device)

    def _set_seed(self, seed: int | None) -> None:
        """Seed the numbers of the env; the simulator stays where it is."""
        if seed is None:
            seed = drawn_seed()
        with self._own_numbers(), quietly():
            self._env.unwrapped.seed(seed_of_32_bits(seed))

    def _simulator_state(self) -> dict[str, Any]:
        return {**super()._simulator_state(), "numbers": plain(self._numbers, "random numbers")}

    def _restore_simulator(self, state: Mapping[str, Any]) -> None:
        super()._restore_simulator(state)
        self._numbers = from_plain(state["numbers"])

    # ------------------------------------------------------------------------------- steps and resets

    def _advance(self, td: TensorDictBase) -> TensorDict:
        if self._frozen is not None:
            self._begin(self._frozen)  # the library steps no row that has ended
        with self._own_numbers():
            return super()._advance(td)

    def _begin(self, rows: torch.Tensor | None, **kwargs: Any) -> TensorDict:
        if kwargs.get("seed") is not None:
            kwargs["seed"] = seed_of_32_bits(checked_seed(kwargs["seed"]))
        with self._own_numbers():
            return super()._begin(rows, **kwargs)


def _require_env(env: Any) -> None:
    bare = require_quietly("mjlab.envs").ManagerBasedRlEnv
    if not isinstance(getattr(env, "unwrapped", env), bare):
        raise no_object_of("a ManagerBasedRlEnv of mjlab", "MJLab", env)


def _in_gymnasium(space: Any) -> GymSpace:
    """Convert a space, of a class of mjlab, into Gymnasium's."""
    spaces = gym_backend("spaces")
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _in_gymnasium(part) for name, part in space.spaces.items()})
    low, high = (np.full(space.shape, bound, space.dtype) for bound in (space.low, space.high))
    return spaces.Box(low, high, dtype=np.dtype(space.dtype).type)


def env_names() -> list[str]:
    """List the tasks that are registered in the library."""
    require_quietly("mjlab.tasks")
    return require_quietly("mjlab.tasks.registry").list_tasks()


class MJLabEnv(MJLabWrapper):
    """Make an env of mjlab by the name of a task; see `MJLabWrapper` for its entries.

    Args:
        task_id: a name, see ``MJLabEnv.available_envs``, or a ``ManagerBasedRlEnvCfg`` of yours, which is copied.
        num_envs: rows, the batch size.
        play: take the settings for watching a policy: hardly an end by time, and no noise. Names only.
        max_steps: truncate episodes after so many steps; None leaves that to the task.
        seed: see `MJLabWrapper`; also of what the library draws where it makes the env.
        device: where the simulator runs and data is; None is the CPU.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    ``auto_reset`` is switched off, so that ``next`` holds the true last observation. Kernels are compiled where the env is
    made and first stepped: that takes a minute, and the library keeps them in the user's cache folder.

    Raises:
        UnknownEnvError: (a ValueError) mjlab has no task of that name.
        ArgumentError: (a ValueError) ``num_envs`` or ``max_steps`` is below 1.

    Example:
        >>> from envkit import MJLabEnv
        >>> env = MJLabEnv("Mjlab-Cartpole-Balance", 4, max_steps=2, seed=0)
        >>> data = env.rollout(4, break_when_any_done=False)
        >>> data["next", "truncated"][0].flatten()
        tensor([False,  True, False,  True])
        >>> env.close()
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        task_id: Any,
        num_envs: int,
        *,
        play: bool = False,
        max_steps: int | None = None,
        seed: int | None = None,
        device: Device | None = None,
        **options: Unpack[EnvOptionsWithoutSeed],
    ):
        count = as_int("num_envs", num_envs, least=1, meaning="the number of rows")
        cfg, self.task_id = _cfg_of(task_id, play=play)
        cfg.scene.num_envs, cfg.auto_reset = count, False
        if max_steps is not None:
            _limit(cfg, as_int("max_steps", max_steps, least=1, meaning="the limit of episodes"))
        cfg.seed = seed_of_32_bits(drawn_seed() if seed is None else checked_seed(seed))
        super().__init__(_build(cfg, as_device(device)), seed=seed, **options)

    def _repr_arguments(self) -> list[str]:
        return [repr(self.task_id)]


def _cfg_of(task_id: Any, *, play: bool) -> tuple[Any, str]:
    """Return a copy of the settings of a task, and what it is called."""
    if isinstance(task_id, str):
        require_name("mjlab", task_id, env_names())
        return require_quietly("mjlab.tasks.registry").load_env_cfg(task_id, play=play), task_id
    if not isinstance(task_id, require_quietly("mjlab.envs").ManagerBasedRlEnvCfg):
        raise ArgumentTypeError(
            f"task_id is {task_id!r}, of type {type(task_id).__name__}, but must be a name or a ManagerBasedRlEnvCfg of mjlab. Pass "
            "'Mjlab-Cartpole-Balance', for example. An env object goes to MJLabWrapper."
        )
    if play:
        raise ArgumentError(
            "play is True, but task_id is a ManagerBasedRlEnvCfg; expected the name of a task. Change the settings themselves."
        )
    return deepcopy(task_id), type(task_id).__name__


def _limit(cfg: Any, steps: int) -> None:
    """Set the steps after which a task ends by time."""
    time_out = require_quietly("mjlab.envs.mdp").time_out
    if not any(term.func is time_out for term in cfg.terminations.values()):
        terms = require_quietly("mjlab.managers.termination_manager")
        cfg.terminations["time_out"] = terms.TerminationTermCfg(func=time_out, time_out=True)
    # half a step less: the library divides and rounds up
    cfg.episode_length_s = (steps - 0.5) * cfg.sim.mujoco.timestep * cfg.decimation


def _build(cfg: Any, device: torch.device) -> Simulator:
    """Make an env of the library; the generators that it seeds and draws from are as they were."""
    with alone():
        outside = numbers_now(device)
        try:
            with quietly():
                return require_quietly("mjlab.envs").ManagerBasedRlEnv(cfg, str(device))
        finally:
            set_numbers(outside, device)


def build(name: str, *, num_workers: int, **kwargs: Any) -> MJLabEnv:
    """Make an env of ``num_workers`` rows.

    Raises:
        UnknownEnvError: (a ValueError) the library has no task of this name.
    """
    return MJLabEnv(name, num_workers, **kwargs)
