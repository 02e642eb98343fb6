"""An env of TorchRL as one of envkit's.

What a step or a reset is stays with TorchRL's env; `TorchRLWrapper` converts its specs once and hands data through.
It imports nothing of TorchRL: who has an env of theirs has done so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase

from envkit.data.transition import stepped_rows
from envkit.env.base import EnvBase
from envkit.env.input_checks import in_functorch
from envkit.env.seeding import next_seed
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.specs import Composite
from envkit.specs.annotations import Destination
from envkit.specs.devices import destination
from envkit_bridges.exports.torchrl_specs import from_torchrl_spec

__all__ = ["TorchRLWrapper"]


class TorchRLWrapper(EnvBase):
    """A TorchRL env behind envkit's interface: in its batched envs, under its transforms, in its collectors.

    Specs, batch size and device are those of ``env``, and an env that is not locked to its batch stays so. Random
    actions come from envkit's generator; all else that is drawn, ``env`` draws. Closing closes ``env`` too. An episode of
    an env that is locked to its batch cannot be saved: its class does not say how.

    Args:
        env: any ``torchrl.envs.EnvBase``: a simulator's, a ``ParallelEnv``, a ``TransformedEnv``, ...

    Attributes:
        torchrl_env: ``env``.

    Raises:
        ArgumentTypeError: (a TypeError) it is something else.
        ArgumentError: it resets what is done within a step (``native_autoreset=True``), so the last observation
            of an episode is not there.
        SpecError: a spec is of no kind that envkit has.
    """

    if not TYPE_CHECKING:

        def __new__(cls, env: Any) -> Any:
            """Take over whether the env is locked to its batch."""
            _require_theirs(env)
            return super().__new__(cls, _batch_locked=env.batch_locked)

    def __init__(self, env: Any):
        if env.__dict__.get("_torchrl_native_autoreset", False):
            raise ArgumentError(
                f"{type(env).__name__} resets what is done within a step (native_autoreset=True), so the last "
                "observation of an episode is lost. Build it without, and envkit resets it."
            )
        super().__init__(
            device=env.device,
            batch_size=env.batch_size,
            allow_done_after_reset=env._allow_done_after_reset,
        )
        self.torchrl_env = env
        self._supports_set_state = env._supports_set_state
        self.full_observation_spec = from_torchrl_spec(env.full_observation_spec)
        self.full_state_spec = cast(Composite, from_torchrl_spec(env.full_state_spec))
        self.full_action_spec = from_torchrl_spec(env.full_action_spec)
        self.full_reward_spec = from_torchrl_spec(env.full_reward_spec)
        self.full_done_spec = from_torchrl_spec(env.full_done_spec)

    # --------------------------------------------------------------------------- steps and resets

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return self.torchrl_env.step(self._with_actions(td.exclude("next"))).get("next")

    def _with_actions(self, td: TensorDictBase) -> TensorDictBase:
        """Refuse actions of another form, and floats that are none; what integers and bools mean, TorchRL's env says.

        Raises:
            InputError: see `ActionInput.take`.
        """
        if in_functorch() is not None:
            return td
        for key, rule in self._action_inputs.items():
            given = td.get(key, None)
            rule.require_form(given, td.batch_size)
            if given.is_floating_point():
                td = td.copy().set(key, rule.take(given, td.batch_size, rows=stepped_rows(td)))
        return td

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        return self.torchrl_env.reset(None if td is None else td.copy(), **kwargs)

    def _reset_anew(self, root: TensorDictBase) -> TensorDictBase:
        """Reset what is done as TorchRL does: its env is shown the masks alone."""
        start = {"set_state": False} if self._supports_set_state else {}
        return self.reset(root, select_reset_only=True, **start)

    def _drawn_actions(
        self, td: TensorDictBase, generator: torch.Generator | None, part: Any = ()
    ) -> TensorDictBase:
        """Draw from the options that the env allows now: its transforms write those into its spec."""
        theirs = self.torchrl_env.full_action_spec
        for key in self.action_keys:
            mask = getattr(theirs[key], "mask", None)
            if mask is not None:
                self.full_action_spec[key].update_mask(mask)
        return super()._drawn_actions(td, generator, part)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the env as TorchRL does, and the generator of random actions; see `EnvBase.set_seed`.

        Returns:
            The seed for the next one, by TorchRL's count.
        """
        next_seed(seed)  # or say what is wrong with it
        self._seed_actions(seed)
        return self.torchrl_env.set_seed(seed, static_seed=static_seed)

    def _set_seed(self, seed: int | None) -> None:
        self.torchrl_env.set_seed(seed)

    def _movable_objects(self) -> Iterator[object]:
        yield from super()._movable_objects()
        if self.batch_locked:
            yield self.torchrl_env

    # ------------------------------------------------------------------------------ place and life

    @property
    def _says_no_state(self) -> str | None:
        return type(self.torchrl_env).__name__ if self.batch_locked else None

    def _told_first(self) -> list[str]:
        return [type(self.torchrl_env).__name__]

    def to(self, *args: Destination, **kwargs: Destination) -> TorchRLWrapper:
        """Move the env, and with it specs and future data; returns self."""
        device = destination(*args, **kwargs)
        if device is not None:
            self.torchrl_env = self.torchrl_env.to(device)
        return super().to(*args, **kwargs)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the env."""
        was_open = not self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if was_open:
            self.torchrl_env.close(raise_if_closed=False)

    def render(self, *args: object, **kwargs: object) -> Any:
        """Render the env, if it can be rendered."""
        return self.torchrl_env.render(*args, **kwargs)


def _require_theirs(env: Any) -> None:
    if isinstance(env, EnvBase):
        raise ArgumentTypeError(
            f"TorchRLWrapper was given {type(env).__name__}, which is an env of envkit already: use it as it is. "
            "to_torchrl(env) makes an env of TorchRL of it."
        )
    kinds = type(env).__mro__
    if not any(
        kind.__name__ == "EnvBase" and kind.__module__.startswith("torchrl.") for kind in kinds
    ):
        raise ArgumentTypeError(
            f"TorchRLWrapper was given {env!r}, of type {type(env).__name__}, but takes an env of TorchRL: "
            'TorchRLWrapper(torchrl.envs.GymEnv("CartPole-v1")).'
        )
