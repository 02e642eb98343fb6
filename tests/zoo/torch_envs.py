"""Vector envs whose data is torch tensors, with each kind of autoreset; all write into the tensors that they hand out.

Conventions
    rows   envs of the vector env. Where a row starts depends on the seed, the row and the number of its episode alone, so
           that all modes give the same data.
    limit  steps of an episode of row 0; each further row has one more.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


class TorchPendulum(gymnasium.vector.VectorEnv):
    """Pendulums that are truncated after so many steps, and terminated where they turn too fast.

    Args:
        num_envs: rows.
        mode: autoreset. SAME_STEP hands the last observation on under ``final``, unless that is None.
        limit: steps of an episode of row 0.
        as_dict: observe a dict.
        device: of the tensors.
    """

    def __init__(
        self,
        num_envs: int = 3,
        mode: AutoresetMode = AutoresetMode.DISABLED,
        *,
        limit: int = 4,
        as_dict: bool = False,
        final: str | None = "final_obs",
        device: str = "cpu",
    ):
        self.num_envs, self.mode, self.limit = num_envs, mode, limit
        self.as_dict, self.final, self.device = as_dict, final, device
        self.metadata = {"autoreset_mode": mode}
        angle = spaces.Box(-torch.inf, torch.inf, (2,))
        elapsed = spaces.Box(0, 99, (), dtype="int64")
        self.single_observation_space = (
            spaces.Dict(angle=angle, clock=spaces.Dict(elapsed=elapsed)) if as_dict else angle
        )
        self.single_action_space = spaces.Box(-2, 2, (1,))
        self.seed = 0
        self.episodes = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.angle = torch.zeros(num_envs, 2, device=device)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.limits = limit + torch.arange(num_envs, device=device)
        self.reward = torch.zeros(num_envs, device=device)
        self.actions: list[torch.Tensor] = []
        self.flags = torch.zeros(2, num_envs, dtype=torch.bool, device=device)
        self.waiting = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.resets = 0

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.seed = seed
            self.episodes.zero_()
        mask = (options or {}).get("reset_mask")
        self.resets += 1
        self._begin(torch.ones_like(self.waiting) if mask is None else mask)
        return self._observed(), {}

    def _begin(self, mask: torch.Tensor) -> None:
        self.episodes.add_(mask)
        rows = torch.arange(self.num_envs, device=self.device)
        number = 1.0 + self.seed + 7 * rows + 3 * self.episodes
        start = torch.stack((number.sin(), number.cos()), -1) / 2
        self.angle.copy_(torch.where(mask[:, None], start, self.angle))
        self.elapsed.mul_(~mask)
        self.waiting.mul_(~mask)

    def step(self, action: torch.Tensor) -> Any:
        assert isinstance(action, torch.Tensor) and action.shape == (self.num_envs, 1)
        self.actions.append(action)
        self._move(action)
        infos: dict[str, Any] = {"speed": self.angle[:, 1]}
        if self.mode == AutoresetMode.NEXT_STEP:
            late = self.waiting.clone()
            self._begin(late)
            self.reward.mul_(~late)
            self.flags.mul_(~late)
            self.waiting.copy_(self.flags.any(0))
        elif self.mode == AutoresetMode.SAME_STEP:
            last = self._observed(is_own=True)
            self._begin(self.flags.any(0))
            if self.final is not None:
                infos[self.final] = last
        return self._observed(), self.reward, self.flags[0], self.flags[1], infos

    def _move(self, action: torch.Tensor) -> None:
        theta, speed = self.angle.unbind(-1)
        speed = speed + 0.05 * (15 * theta.sin() + 3 * action[:, 0])
        self.angle.copy_(torch.stack((theta + 0.05 * speed, speed), -1))
        self.elapsed.add_(1)
        self.reward.copy_(-(theta**2) - 0.001 * action[:, 0] ** 2)
        self.flags[0].copy_(speed.abs() > 4)
        self.flags[1].copy_(self.elapsed >= self.limits)

    def _observed(self, *, is_own: bool = False) -> Any:
        angle, elapsed = self.angle, self.elapsed
        if is_own:
            angle, elapsed = angle.clone(), elapsed.clone()
        return {"angle": angle, "clock": {"elapsed": elapsed}} if self.as_dict else angle


class RowNumbers(gymnasium.Env):
    """The same pendulums as an env that is no vector env: it resets nothing by itself, and rows by their numbers."""

    def __init__(self, num_envs: int = 3, **options: Any):
        self.inner = TorchPendulum(num_envs, **options)
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.observation_space = spaces.Box(-torch.inf, torch.inf, (num_envs, 2))
        self.action_space = spaces.Box(-2, 2, (num_envs, 1))

    def step(self, action: torch.Tensor) -> Any:
        return self.inner.step(action)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return self._reset(seed, (options or {}).get("env_idx"))

    def _reset(self, seed: Any, numbers: torch.Tensor | None) -> Any:
        if numbers is None:
            return self.inner.reset(seed=seed)
        mask = torch.zeros(self.num_envs, dtype=torch.bool).index_fill(0, numbers, True)
        return self.inner.reset(seed=seed, options={"reset_mask": mask})


class RowKeyword(RowNumbers):
    """These, reset by a keyword."""

    def reset(self, *, seed: Any = None, options: Any = None, env_ids: Any = None) -> Any:
        return self._reset(seed, env_ids)
