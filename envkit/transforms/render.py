"""Frames a simulator draws, as observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.env.base import EnvBase
from envkit.errors import NoParentError, SpecError
from envkit.specs import Bounded, Composite, TensorSpec, Unbounded
from envkit.transforms.core.base import Keys, Transform

__all__ = ["PixelRenderTransform"]


class PixelRenderTransform(Transform):
    """Add what the base env's ``render`` returns after each reset and step.

    The spec is read from one rendered frame; where nothing can be rendered before the first reset, the
    base env is reset for that.

    Args:
        out_keys: where the frames go; one key.
        preproc: function applied to each rendered array, before it becomes a tensor of shape
            ``(*batch, *event)``.
        render_method: name of the method of the base env.
        **kwargs: passed on to it.

    Raises:
        SpecError: the frames do not have the batch size of the env in front.
    """

    only_adds_done = True

    def __init__(
        self,
        out_keys: Keys = None,
        preproc: Callable[[Any], Any] | None = None,
        render_method: str = "render",
        **kwargs: object,
    ):
        super().__init__(out_keys=["pixels"] if out_keys is None else out_keys)
        self.preproc = preproc
        self.render_method = render_method
        self.render_kwargs = kwargs
        self._spec: TensorSpec | None = None

    def _base(self) -> EnvBase:
        if self.container is None:
            raise NoParentError(
                "PixelRenderTransform renders an environment and works only in one: "
                "TransformedEnv(env, PixelRenderTransform())."
            )
        return self.container.base_env

    def _drawn(self) -> Any:
        return getattr(self._base(), self.render_method)(**self.render_kwargs)

    def _frame(self, drawn: Any) -> torch.Tensor:
        """Bring what the env has drawn into the form of the entry."""
        env = self._base()
        if isinstance(drawn, list | tuple):  # one for each sub-env
            drawn = np.stack([np.asarray(part) for part in drawn])
        if self.preproc is not None:
            drawn = self.preproc(drawn)
        frame = torch.as_tensor(np.array(drawn) if isinstance(drawn, np.ndarray) else drawn)
        batch = env.batch_size
        if frame.shape[: len(batch)] != batch:
            raise SpecError(
                f"{self.render_method} of {env} gives shape {tuple(frame.shape)}, but it must begin "
                f"with the batch size {tuple(batch)} of the env. Render each sub-env, e.g. with the "
                "transform inside the create function."
            )
        return frame if env.device is None else frame.to(env.device)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td.set(self.out_keys[0], self._frame(self._drawn()))

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._call(td_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        if self._spec is None:
            self._spec = self._read_spec()
        observation_spec[self.out_keys[0]] = self._spec.clone()
        return observation_spec

    def _read_spec(self) -> TensorSpec:
        try:
            drawn = self._drawn()
        except Exception:  # simulators differ in how they say that there is nothing to draw yet
            self._base().reset()
            drawn = self._drawn()
        frame = self._frame(drawn)
        if frame.dtype == torch.uint8:
            return Bounded(0, 255, frame.shape, dtype=torch.uint8, device=frame.device)
        return Unbounded(frame.shape, dtype=frame.dtype, device=frame.device)
