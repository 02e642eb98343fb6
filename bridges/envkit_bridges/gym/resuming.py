"""How an env on a gym-style simulator resumes: what its state dict holds, and what a load that fails leaves behind.

`ResumableEnv` puts the state of the simulator into the state dict, and tells the data where an episode had to be
given up. How a simulator's state is read and restored is known to `simulator_state`.

Conventions
    given up  of an episode: what was loaded does not go on as it did, and the load was not strict. The next step
              tells it, truncated, with what was known before; the reset that follows begins another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_bool
from envkit.data.paths import as_path
from envkit.errors import ResumeError
from envkit_bridges.gym.episode_log import EpisodeLog
from envkit_bridges.gym.info_reading import InfoReading
from envkit_bridges.gym.simulator_state import recorded, restored, saved

__all__ = ["ResumableEnv"]

_ASKED = frozenset(
    ("_reset", "_step", "_reset_simulator", "_repeated_step", "_set_seed", "_simulator")
)


class ResumableEnv(InfoReading):
    """The part of an env on a gym-style simulator that saves it, and goes on from what was saved."""

    _own_state_is_needed = True
    _log: EpisodeLog | None = None
    """What takes the resets and steps of the simulator and writes them down; None where nothing does."""

    @property
    def _keeps_state(self) -> str | None:
        return type(self).__name__

    @property
    def _writes_down(self) -> bool:
        return self._log is not None

    def record_for_resume(self, mode: bool = True) -> Self:
        """Write down episodes from the next reset on, see `EnvBase.record_for_resume`."""
        self._take_log(recorded(self._simulator, as_bool("mode", mode)))
        return self

    def _take_log(self, env: Any) -> None:
        self._log = env if isinstance(env, EpisodeLog) else None

    def _own_state(self) -> dict[str, Any]:
        """Add the state of the simulator.

        Raises:
            ResumeError: it cannot be saved so that it could be restored exactly.
        """
        if self._overrides(_ASKED):
            raise ResumeError(
                f"{type(self).__name__} overrides one of {sorted(_ASKED)}, so what its simulator was asked for is "
                "not known, and cannot be asked for again. Put the change into a gymnasium wrapper."
            )
        return {
            **super()._own_state(),
            "simulator": self._simulator_state(),
            "gave_up": self._gave_up,
        }

    def _simulator_state(self) -> Any:
        return saved(self._simulator)

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        try:
            self._restore_simulator(state["simulator"])
            self._gave_up = state["gave_up"]
        except ResumeError:
            if strict:
                raise
            self._begin_log()
            self._gave_up = True

    def _restore_simulator(self, state: Any) -> None:
        self._take_log(restored(self._simulator, state))

    def _begin_log(self) -> None:
        """Write down the episode that begins next, whatever was before."""
        self.record_for_resume()
        if self._log is not None:
            self._log.forget(None)

    def _has_told(self) -> None:
        if self._gave_up:
            self._gave_up = False

    def _truncated_next(self, td: TensorDictBase) -> TensorDictBase:
        """Tell that an episode was given up: what was known, truncated."""
        self._has_told()
        following = self._skipped_next(td)
        for key in self.done_keys:
            if as_path(key)[-1] in ("done", "truncated"):
                following.set(key, torch.ones_like(following.get(key)))
        return following
