"""Which version of the policy has made a step, as an entry of the data."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDictBase

from envkit.errors import ArgumentError
from envkit.specs import Composite, NonTensor, Unbounded
from envkit.transforms.core.transform import Transform

_KEY = "policy_version"


@dataclass(frozen=True)
class VersionChange:
    """One change of the version, and when it was; the first has no old version."""

    timestamp: datetime
    old_version: str | int | None
    new_version: str | int


class PolicyVersion(Transform):
    """Show the version of the policy, ``policy_version``, at resets and steps.

    It counts when you call `increment_version`, after each update. A collector does, if it is passed as
    ``track_policy_version=``, and records itself which version acted: then leave it out of the environment.

    Args:
        version_type: ``int`` or "int" counts from 0, int64 of the batch's shape. ``str`` or "uuid" draws a random UUID each
            time, which travels as a `NonTensorData`.

    Attributes:
        version_type: as it was passed.
        version_history: a `VersionChange` for each version, the first included.

    Raises:
        ArgumentError: (a ValueError) ``version_type`` is something else.

    Example:
        >>> from envkit import GymEnv, PolicyVersion
        >>> version = PolicyVersion()
        >>> env = GymEnv("CartPole-v1").append_transform(version)
        >>> version.increment_version()
        >>> env.rollout(3)["next", "policy_version"]
        tensor([1, 1, 1])
        >>> env.close()
    """

    keeps_books = True
    only_adds_done = True

    def __init__(self, version_type: type | Literal["uuid", "int"] = int):
        super().__init__([], [_KEY])
        if version_type not in (int, "int", str, "uuid"):
            raise ArgumentError(
                f"version_type is {version_type!r}, but must be 'int' or 'uuid'. Pass one of these."
            )
        self.version_type = version_type
        self.version_history: list[VersionChange] = []
        self._current = self._following(None)
        self._note(None)

    @property
    def counts(self) -> bool:
        """Whether versions are numbers."""
        return self.version_type in (int, "int")

    @property
    def version(self) -> str | int:
        """The version of the policy; can be assigned."""
        return self._current

    @version.setter
    def version(self, value: str | int) -> None:
        self._current = value

    def increment_version(self) -> None:
        """Begin the next version.

        Example:
            >>> from envkit import PolicyVersion
            >>> version = PolicyVersion("int")
            >>> version.increment_version()
            >>> version.version, len(version.version_history)
            (1, 2)
        """
        before = self._current
        self._current = self._following(before)
        self._note(before)

    def _following(self, before: Any) -> str | int:
        if not self.counts:
            return str(uuid.uuid4())
        return 0 if before is None else before + 1

    def _note(self, before: str | int | None) -> None:
        self.version_history.append(VersionChange(datetime.now(), before, self._current))

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        shape = next_td.batch_size
        if not self.counts:
            return next_td.set(_KEY, NonTensorData(self._current, batch_size=shape))
        version = torch.full(shape, int(self._current), dtype=torch.int64, device=next_td.device)
        return next_td.set(_KEY, version)

    _reset = Transform._reset_like_step

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape, device = observation_spec.shape, observation_spec.device
        if self.counts:
            observation_spec[_KEY] = Unbounded(shape, device, torch.int64)
        else:
            observation_spec[_KEY] = NonTensor(shape, device, example_data=self._current)
        return observation_spec

    def get_extra_state(self) -> dict[str, Any]:
        """Return the version, for state dicts."""
        return {"version": self._current}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the version of a state dict."""
        self._current = state["version"]
