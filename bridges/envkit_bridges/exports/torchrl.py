"""Envs of envkit for TorchRL, transforms in its replay buffers, its primers as transforms of envkit, and its envs as ours.

`to_torchrl` gives an env TorchRL's class, `for_replay_buffer` a transform, for what asks for that class. A buffer of
TorchRL also takes a transform of ours as it is. Both import TorchRL only then. Of TorchRL's transforms, only the
primers that its recurrent modules make of themselves are rebuilt as ours; the others are refused with the name of ours.

TorchRL's env defines steps and resets; `TorchRLWrapper` converts its specs once and hands data through.
It imports nothing of TorchRL: who has an env of theirs has done so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit.data.paths import as_key
from envkit.data.transition import leaves, stepped_rows
from envkit.env.base import EnvBase
from envkit.env.deviations import changed_paths
from envkit.env.facts import Facts
from envkit.env.input_checks import in_functorch
from envkit.env.seeding import next_seed
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.lazy_imports import is_public
from envkit.rules import choose
from envkit.specs import Composite
from envkit.specs.annotations import Destination, destination
from envkit.specs.stacks import refuse_ragged
from envkit.transforms.core.compose import as_transform
from envkit.transforms.core.transform import Transform
from envkit.transforms.primer import TensorDictPrimer
from envkit_bridges.exports.torchrl_specs import from_torchrl_spec
from envkit_bridges.libraries import require

if TYPE_CHECKING:
    from torchrl.envs import EnvBase as TorchRLEnv
    from torchrl.envs.transforms import Transform as TorchRLTransform


def to_torchrl(env: EnvBase) -> TorchRLEnv:
    """Return an env as one of TorchRL's: for its collectors, transforms, modules and losses.

    Specs, masks, batch size (of any length; an unlocked env stays unlocked) and device are those of ``env``, and so are
    seeds, random actions and the state dict. The state of a stateless env is in the data, as in TorchRL's own
    stateless envs. Both names are for one env: ``to_torchrl(env).env is env``, and either ``close()`` closes it. Public
    attributes that TorchRL's class does not have are those of ``env``: ``group_map``, ``n_agents``, ...

    Args:
        env: any env of envkit.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of envkit.
        SpecStackError: (a RuntimeError) an entry stacks unlike shapes, as of a Tuple space: TorchRL stacks steps.
        MissingLibraryError: (an ImportError) TorchRL is not installed.

    Example:
        >>> from torchrl.envs import RewardSum, TransformedEnv
        >>> from envkit import GymEnv, to_torchrl
        >>> env = TransformedEnv(to_torchrl(GymEnv("CartPole-v1")), RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
        >>> env.close()
    """
    if not isinstance(env, EnvBase):
        is_theirs = any(kind.__module__.startswith("torchrl.") for kind in type(env).__mro__)
        fix = "Pass GymEnv('CartPole-v1'), for example."
        if is_theirs:
            fix = "Use it as it is: it is an env of TorchRL. TorchRLWrapper(env) makes an env of envkit of it."
        raise ArgumentTypeError(
            f"env is {env!r}, of type {type(env).__name__}, but must be an env of envkit. {fix}"
        )
    for kind in ("state", "action", "observation"):
        refuse_ragged(getattr(env, f"full_{kind}_spec"), kind, "to_torchrl")
    require("torchrl.envs")
    from envkit_bridges.exports.torchrl_subclasses import view_of

    return view_of(env)


def for_replay_buffer(transform: Transform) -> TorchRLTransform:
    """Return a transform as one that TorchRL's replay buffers run both ways.

    Pass the result as ``ReplayBuffer(transform=...)``, to ``append_transform`` or to
    ``insert_transform``. Data that is added goes through `Transform.inv`, what is sampled through
    `Transform.forward`. Running statistics (`VecNorm`)
    learn from what is sampled too: pass a ``frozen_copy()`` to keep them as they are.

    Args:
        transform: a transform, a `Compose`, or a function ``td -> td``.

    Raises:
        ArgumentError: (a ValueError) it is none of these.
        MissingLibraryError: (an ImportError) TorchRL is not installed.

    Example:
        >>> from torchrl.data import ListStorage, ReplayBuffer
        >>> from envkit import GymEnv, RewardScaling, for_replay_buffer
        >>> doubled = for_replay_buffer(RewardScaling(loc=0.0, scale=2.0))
        >>> buffer = ReplayBuffer(
        ...     storage=ListStorage(10), transform=doubled, batch_size=2
        ... )
        >>> env = GymEnv("CartPole-v1")
        >>> indices = buffer.extend(env.rollout(5)["next"])
        >>> buffer.sample()["reward"].flatten()
        tensor([2., 2.])
        >>> env.close()
    """
    require("torchrl.envs")
    from envkit_bridges.exports.torchrl_subclasses import BothWays

    return BothWays(as_transform(transform))


def from_torchrl_transform(theirs: object) -> Transform:
    """Return a primer of TorchRL's as one of envkit's.

    Raises:
        ArgumentTypeError: (a TypeError) it is another transform.
    """
    kinds = [kind for kind in type(theirs).__mro__ if kind.__module__.startswith("torchrl.envs.")]
    if kinds[0] is type(theirs) and kinds[0].__name__ == "TensorDictPrimer":
        return _primer(theirs)
    ours = next(kind for kind in kinds if is_public(kind.__name__))
    fix = f"Write it as a subclass of envkit.{ours.__name__}, with the same hooks."
    if ours is type(theirs):
        fix = f"Take envkit.{ours.__name__}, which takes the same arguments."
        if ours.__name__ == "Compose":
            fix += " For the transforms of a module, take envkit's get_env_transforms_from_module."
    raise ArgumentTypeError(
        f"{type(theirs).__name__} is a transform of TorchRL's, and envkit's envs take envkit's. {fix}"
    )


def _primer(theirs: Any) -> TensorDictPrimer:
    primers = from_torchrl_spec(theirs.primers)
    assert isinstance(primers, Composite)
    return TensorDictPrimer(
        primers,
        random=theirs.random,
        default_value=None if theirs.random else theirs.default_value,
        reset_key=theirs._reset_key,
        expand_specs=theirs.expand_specs,
        single_default_value=theirs.single_default_value,
        call_before_env_reset=theirs.call_before_env_reset,
    )


_IGNORED = "a step whose '_step' mask was ignored"
"""Reason why rows of a `TorchRLWrapper` are no longer where their data is."""


class TorchRLWrapper(EnvBase):
    """Give an env of TorchRL the interface of envkit, for its batched envs, transforms and collectors.

    Specs, batch size and device are those of ``env``, and an env that is not locked to its batch stays so. Random
    actions come from envkit's generator; all else that is drawn, ``env`` draws. Closing closes ``env`` too. An episode of
    an env that is locked to its batch cannot be saved: its class does not say how. Public attributes that this class does
    not have are those of ``env``: ``group_map``, ``n_agents``, ...

    An env may step all rows whatever a ``_step`` mask says, as simulators of many rows do. The data then has the root of the
    rows that the mask leaves out, and these are refused until they are reset: their simulator is one step ahead.

    Args:
        env: any ``torchrl.envs.EnvBase``: a simulator's, a ``ParallelEnv``, a ``TransformedEnv``, ...

    Attributes:
        torchrl_env: ``env``.

    Raises:
        ArgumentTypeError: (a TypeError) it is something else.
        ArgumentError: it resets what is done within a step (``native_autoreset=True``), so the last observation
            of an episode is not there.
        NotResetError: a row is stepped that ``env`` has moved although a mask left it out.
        SpecError: a spec is of no kind that envkit has.

    Example:
        >>> import torchrl.envs
        >>> from envkit import RewardSum, TorchRLWrapper
        >>> env = TorchRLWrapper(torchrl.envs.GymEnv("CartPole-v1"))
        >>> env = env.append_transform(RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
        >>> env.close()
    """

    _ignores_masks = False
    """Whether a row that a mask left out was seen to move."""

    def __new__(cls, env: Any) -> Self:
        """Create the env, locked to its batch if the env inside is."""
        _require_theirs(env)
        return super().__new__(cls, _batch_locked=env.batch_locked)

    def __getnewargs__(self) -> tuple[Any]:
        """Return what `__new__` takes when this env is copied or unpickled."""
        return (self.torchrl_env,)

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

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                theirs = self.__dict__.get("_modules", {}).get("torchrl_env")
                if name.startswith("_") or theirs is None:
                    raise
            if hasattr(theirs, name):
                return getattr(theirs, name)
            raise AttributeError(  # without a full stop: Python puts the nearest name behind
                f"neither {type(self).__name__} nor its {type(theirs).__name__} has an attribute {name!r}"
            )

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

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        """Compute ``next``, and put the root of the rows back that the mask leaves out, whether they were stepped or not."""
        following, left_out = super()._masked_next(td, mask), ~mask
        are_some = bool(mask.any()) and bool(left_out.any())
        if not (self.batch_locked and are_some) or isinstance(following, LazyStackedTensorDict):
            return following
        kept = self._skipped_next(td)
        if not self._ignores_masks:
            known = kept.select(*td.keys(True, True), strict=False)
            found = following.select(*known.keys(True, True), strict=False)
            self._ignores_masks = bool(changed_paths(known[left_out], found[left_out]))
        if self._ignores_masks:
            before = self._unshown
            self._unshown = left_out.cpu() if before is None else before | left_out.cpu()
            self._left_by = _IGNORED
        following = following.copy()
        for path, value in leaves(kept):
            key = as_key(path)
            following.set(key, choose(mask, following.get(key), value))
        return following

    def _why_unshown(self, rows: torch.Tensor) -> str:
        if self._left_by != _IGNORED:
            return super()._why_unshown(rows)
        theirs = type(self.torchrl_env).__name__
        return (
            f"rows {rows.nonzero().squeeze(-1).tolist()} are to be stepped, but {theirs} is one step ahead of their data: it "
            "stepped them although a '_step' mask left them out. Reset these rows, env.reset(td.set('_reset', rows)), or "
            "leave them out of all steps until they are reset."
        )

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

    def _find_facts(self) -> Facts:
        unsaved = type(self.torchrl_env).__name__ if self.batch_locked else None
        return replace(super()._find_facts(), unsaved_state=unsaved)

    def _repr_arguments(self) -> list[str]:
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


def _require_theirs(env: object) -> None:
    if isinstance(env, EnvBase):
        raise ArgumentTypeError(
            f"env is {type(env).__name__}, an env of envkit, but must be one of TorchRL. Use it as it is. "
            "to_torchrl(env) makes an env of TorchRL of it."
        )
    kinds = type(env).__mro__
    if not any(
        kind.__name__ == "EnvBase" and kind.__module__.startswith("torchrl.") for kind in kinds
    ):
        raise ArgumentTypeError(
            f"env is {env!r}, of type {type(env).__name__}, but must be an env of TorchRL. Pass "
            "torchrl.envs.GymEnv('CartPole-v1'), for example."
        )
