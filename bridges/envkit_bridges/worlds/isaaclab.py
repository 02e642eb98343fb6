"""Isaac Lab: its envs of many rows as environments, groups of observations as entries.

Its two workflows have the form that `envkit_bridges.gym.torch_vector` takes. This module knows what they do not say: they
reset rows in the step that ends an episode, and do not return last observations.
"""

from __future__ import annotations

from typing import Literal, Unpack

from envkit.env.options import EnvOptions
from envkit.errors import ArgumentTypeError
from envkit.specs.annotations import Device
from envkit_bridges.gym.torch_vector import TorchVectorWrapper
from envkit_bridges.libraries import Simulator


class IsaacLabWrapper(TorchVectorWrapper):
    """Show an env object of Isaac Lab as an env of TensorDicts; batch-locked, batch size ``(num_envs,)``.

    Each group of observations is an entry, e.g. ``policy`` and ``critic``, or a node where the group is not concatenated.
    ``truncated`` is the library's ``time_outs``. It was tested with an env of the same form, not with Isaac Lab itself.

    Args:
        env: a ``ManagerBasedRLEnv`` or ``DirectRLEnv``, or what ``gymnasium.make`` returns for one. Rows of the first can be
            reset at any time, those of the second only where an episode has ended.
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        final: "missing": the library returns no last observations. Where an episode ended, floats in ``next`` are NaN, and
            ``("next", "final_missing")`` is True; `gae` leaves these steps out. None: ``extras["final_obs"]`` holds them,
            groups of all rows, which a recorder term of yours may write.
        info: record the tensors that the extras of a first step hold, see `GymWrapper.set_info_dict_reader`.
        device: where data is delivered; None leaves it on the device of the simulator.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env object of many rows.

    Example:
        >>> import gymnasium
        >>> import torch
        >>> from envkit import IsaacLabWrapper
        >>> class Drift(gymnasium.Env):  # has the form of an env of Isaac Lab
        ...     num_envs, device = 4, "cpu"
        ...     single_observation_space = gymnasium.spaces.Dict(
        ...         policy=gymnasium.spaces.Box(-9, 9, (1,))
        ...     )
        ...     single_action_space = gymnasium.spaces.Box(-1, 1, (1,))
        ...
        ...     def reset(self, seed=None, options=None):
        ...         self.place = torch.zeros(4, 1)
        ...         return {"policy": self.place}, {}
        ...
        ...     def step(self, action):
        ...         self.place = self.place + action
        ...         terminated, reward = self.place[:, 0] > 1, -action[:, 0]
        ...         self.place = self.place * ~terminated[:, None]
        ...         time_outs = torch.zeros_like(terminated)
        ...         return {"policy": self.place}, reward, terminated, time_outs, {}
        >>> env = IsaacLabWrapper(Drift())
        >>> data = env.rollout(3, lambda policy: torch.ones(4, 1), break_when_any_done=False)
        >>> data["next", "policy"][0].flatten()
        tensor([1., nan, 1.])
    """

    def __init__(
        self,
        env: Simulator,
        categorical_action_encoding: bool = False,
        *,
        final: Literal["missing"] | None = "missing",
        info: bool = False,
        device: Device | None = None,
        **options: Unpack[EnvOptions],
    ):
        if not hasattr(env, "step") or isinstance(env, type):
            raise ArgumentTypeError(
                f"env is {env!r}, of type {type(env).__name__}; expected an env object of Isaac Lab. Pass "
                "gymnasium.make(task, cfg=cfg)."
            )
        super().__init__(
            env,
            categorical_action_encoding,
            autoreset_mode="SameStep",
            final=final,
            info=info,
            device=device,
            **options,
        )
        self.libname = "isaaclab"
