"""Classes of envkit that subclass TorchRL's: an env, a transform and a sampler.

Importing this module imports TorchRL, which changes the process (e.g. how it starts others), so `to_torchrl`,
`for_replay_buffer` and `CatFrames.make_rb_transform_and_sampler` import it when they are called. The work is
done by the envkit object inside; these hand data through, in TorchRL's calls.

Conventions
    env   the env of envkit. It checks its own input, so its errors are what the caller sees.
    data  a stateless env's state is in it, as TorchRL's own stateless envs have it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, SliceSampler
from torchrl.envs import EnvBase as TorchRLBase
from torchrl.envs import transforms as torchrl

from envkit import rules
from envkit.data.paths import Key, as_key, as_path
from envkit.env.base import EnvBase
from envkit.errors import OptionError
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.transform import Transform
from envkit.transforms.frames import CatFrames
from envkit.transforms.keys import ExcludeTransform
from envkit_bridges.exports.torchrl_specs import to_torchrl_spec


class TorchRLView(TorchRLBase):
    """A TorchRL env whose steps and resets are those of an env of envkit, ``view.env``.

    Both are one env: what one does, the other has done; closing one closes the other. Public attributes that TorchRL's class
    does not have are those of the env.
    """

    def __init__(self, env: EnvBase):
        inputs = _together(env, "full_state_spec", "full_action_spec")
        outputs = _together(env, "full_observation_spec", "full_reward_spec", "full_done_spec")
        vars(self).update(_input_spec=inputs, _output_spec=outputs)
        super().__init__(
            device=env.device,
            batch_size=env.batch_size,
            allow_done_after_reset=env.allow_done_after_reset,
        )
        self.env = env
        self._batch_locked = env.batch_locked
        self._supports_set_state = env._facts.no_start_at_state is None
        # Random actions are the env's. Were this said in the class, `TransformedEnv` would refuse transforms of actions.
        self.rand_action = env.rand_action

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                env = self.__dict__.get("_modules", {}).get("env")
                if name.startswith("_") or env is None:
                    raise
            if hasattr(env, name):
                return getattr(env, name)
            raise AttributeError(  # without a full stop: Python puts the nearest name behind
                f"neither {type(self).__name__} nor its {type(env).__name__} has an attribute {name!r}"
            )

    # ------------------------------------------------------------------------------ one step

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.env.step(tensordict.exclude("next")).get("next")

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.env.reset(None if tensordict is None else tensordict.copy(), **kwargs)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset what is done, as the env does in its own rollout."""
        return self.env.maybe_reset(tensordict)

    def _step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step and reset at once where the env can, as one program say.

        Not where the data says what to step or what comes out, nor with a hook between: TorchRL has separate rules for
            its
        own for these. Its roots keep the action.
        """
        decided = {"next", rules.STEP} & set(tensordict.keys())
        if decided or self._post_step_mdp_hooks is not None:
            return super()._step_and_maybe_reset(tensordict)
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        data, root = self.env.step_and_maybe_reset(tensordict)
        for key in self.env.action_keys:
            root.set(key, data.get(key))
        return data, root

    # ------------------------------------------------------- what the env has checked and completed

    def _assert_tensordict_shape(self, tensordict: TensorDictBase) -> None:
        self.env._check_batch(tensordict)

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        return next_tensordict_out

    @classmethod
    def _complete_done(cls, done_spec: object, data: TensorDictBase) -> TensorDictBase:
        return data

    # -------------------------------------------------------------------------- seed, place, life

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the env, and give the seed for the next one; the chain is the same in both libraries."""
        return self.env.set_seed(seed, static_seed)

    def _set_seed(self, seed: int | None) -> None:
        self.env.set_seed(seed)

    def to(self, device: Any) -> TorchRLView:
        """Move the env, and with it specs and future data."""
        self.env = self.env.to(device)
        super().to(device)
        return self

    @property
    def is_closed(self) -> bool:
        """Whether the env is closed; TorchRL's transformed envs say so when they have closed it."""
        return self.env.is_closed

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        if value:
            self.env.close(raise_if_closed=False)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the env."""
        self.env.close(raise_if_closed=raise_if_closed)

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """Render the env, if it can be rendered."""
        return self.env.render(*args, **kwargs)  # type: ignore[operator]

    def __repr__(self) -> str:
        return f"to_torchrl({self.env!r})"


class RulingView(TorchRLView):
    """A view of an env whose random actions no spec tells: masks in the data say what is allowed, or a subclass does."""

    def __init__(self, env: EnvBase):
        super().__init__(env)
        del self.rand_action

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions as the env does, below transforms of TorchRL's too."""
        return self.env.rand_action(tensordict)


def view_of(env: EnvBase) -> TorchRLView:
    """Return the adapter that draws as the env does."""
    rules_itself = bool(env._facts.action_masks) or env._draws_own_actions
    return RulingView(env) if rules_itself else TorchRLView(env)


def _together(env: EnvBase, *names: str) -> Composite:
    """Convert specs of an env; those of unlike rows are stacks, below a node that is none."""
    specs = {name: to_torchrl_spec(getattr(env, name)) for name in names}
    return Composite(specs, shape=env.batch_size, device=env.device)


class BothWays(torchrl.Transform):
    """A transform of TorchRL whose passes are those of one of ours."""

    def __init__(self, transform: Transform):
        super().__init__()
        self.transform = transform

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform.inv(tensordict)


class WindowSampler(SliceSampler):
    """Draw a slice for each row of the batch that is asked for."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict]:
        return super().sample(storage, batch_size * cast(int, self.slice_len))


def transform_and_sampler(frames: CatFrames, **options: Any) -> tuple[Compose, WindowSampler]:
    """Build both as `CatFrames.make_rb_transform_and_sampler` does; ``options`` are those of `SliceSampler`."""
    span = options.get("span", False)
    if not options.get("strict_length", True) or (
        any(span) if isinstance(span, list | tuple) else span
    ):
        raise OptionError(
            f"strict_length=False and span= draw fewer than {frames.N} steps of an episode, but each window has {frames.N}: "
            "frames of other episodes would fill it. Leave them out."
        )
    written = _and_next(frames.out_keys)
    joined = CatFrames(
        N=frames.N,
        dim=frames.dim,
        in_keys=_and_next(frames.in_keys),
        out_keys=written,
        padding=frames.padding,
        padding_value=frames.padding_value,
        done_key=frames.done_key,
        future=frames.future,
        mask_key=frames.mask_key,
    )
    in_rows = partial(_in_rows, length=frames.N)
    stored = ExcludeTransform(*written, inverse=True)
    return Compose(in_rows, joined, _last, stored), WindowSampler(slice_len=frames.N, **options)


def _and_next(keys: list[Key]) -> list[Key]:
    return [*keys, *(as_key(("next", *as_path(key))) for key in keys)]


def _in_rows(td: TensorDictBase, length: int) -> TensorDictBase:
    return td.reshape(-1, length)


def _last(td: TensorDictBase) -> TensorDictBase:
    return td[:, -1]
