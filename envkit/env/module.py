"""What an env is as a torch module: moved, listed, saved and left like one, and never called.

`EnvModule` decides which of a module's names are shown, and which state dicts may be loaded. It knows
neither specs nor steps.

Conventions
    resume  go on from a state dict as the env that gave it would; a simulator's own state is not in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch

from envkit.env.listing import shown
from envkit.env.overrides import Overridable
from envkit.errors import NotCallableError, ResumeError

__all__ = ["EnvModule"]


class EnvModule(Overridable):
    """The part of an environment that users of torch modules know."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Environments are not called like modules.

        Raises:
            NotCallableError: (a NotImplementedError) always.
        """
        raise NotCallableError(
            f"{type(self).__name__} is an environment: call its step or reset. If it was passed "
            "where a create function is expected, pass `lambda: env_class(...)` instead."
        )

    def __dir__(self) -> list[str]:
        """List what users use: of the names of `torch.nn.Module` some, see `listing`."""
        return shown(type(self), super().__dir__())

    # ----------------------------------------------------------------------------------- states

    @property
    def _cannot_resume(self) -> str | None:
        """Name the kind of env, here or inside, whose simulator is not in a state dict; or None."""
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what ``state_dict()`` gave: parameters, and what else the env says of itself.

        Raises:
            ResumeError: (a NotImplementedError) a simulator here or inside keeps a state of its own, which
                a state dict does not hold.
        """
        self._require_resumable()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _require_resumable(self) -> None:
        if kind := self._cannot_resume:
            raise ResumeError(
                f"a state dict does not hold the state of the simulator of {kind}, so after loading it the "
                "env would go on in another way than the one that was saved. Load the parts that are "
                "whole, as env.transform.load_state_dict(...) or policy.load_state_dict(...), and begin "
                "new episodes: env.set_seed(seed), env.reset()."
            )

    # ------------------------------------------------------------------------------ place and life

    def cpu(self) -> Self:
        """Move the env to the CPU; returns self."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Move the env to a CUDA device; returns self."""
        return self.to(torch.device("cuda", 0 if device is None else device))

    @abstractmethod
    def close(self, *, raise_if_closed: bool = True) -> None:
        """Release what the env holds; see `EnvBase.close`."""

    def __enter__(self) -> Self:
        """Give the env itself; what follows ``with`` closes it in the end."""
        return self

    def __exit__(self, *failure: object) -> None:
        self.close(raise_if_closed=False)
