"""Envs of envkit for TorchRL, transforms in its replay buffers, and its primers as transforms of envkit.

`to_torchrl` gives an env TorchRL's class, `for_replay_buffer` a transform, for what asks for that class. A buffer of
TorchRL also takes a transform of ours as it is. Both import TorchRL only then. Of TorchRL's transforms, only the
primers that its recurrent modules make of themselves are rebuilt as ours; the others are refused with the name of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envkit.env.base import EnvBase
from envkit.errors import ArgumentTypeError
from envkit.lazy_imports import is_public
from envkit.specs.stacks import refuse_ragged
from envkit.transforms.core.base import Transform
from envkit.transforms.core.compose import as_transform
from envkit.transforms.primer import TensorDictPrimer
from envkit_bridges.exports.torchrl_specs import from_torchrl_spec
from envkit_bridges.libraries import require

if TYPE_CHECKING:
    from torchrl.envs import EnvBase as TorchRLEnv
    from torchrl.envs.transforms import Transform as TorchRLTransform

__all__ = ["for_replay_buffer", "from_torchrl_transform", "to_torchrl"]


def to_torchrl(env: EnvBase) -> TorchRLEnv:
    """Give an env as one of TorchRL's: for its collectors, transforms, modules and losses.

    Specs, masks, batch size (of any length; an unlocked env stays unlocked) and device are those of ``env``, and so are
    seeds, random actions and the state dict. The state of a stateless env stands in the data, as in TorchRL's own
    stateless envs. Both names are for one env: ``to_torchrl(env).env is env``, and either ``close()`` closes it.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of envkit.
        SpecStackError: (a RuntimeError) an entry stacks unlike shapes, as of a Tuple space: TorchRL stacks steps.
        MissingLibraryError: (an ImportError) TorchRL is not installed.
    """
    if not isinstance(env, EnvBase):
        is_theirs = any(kind.__module__.startswith("torchrl.") for kind in type(env).__mro__)
        fix = "Pass an env: to_torchrl(GymEnv('CartPole-v1'))."
        if is_theirs:
            fix = "TorchRL takes it as it is; TorchRLWrapper(env) makes an env of envkit of it."
        raise ArgumentTypeError(
            f"to_torchrl was given {type(env).__name__} of {type(env).__module__}, but takes an env of envkit. {fix}"
        )
    for kind in ("state", "action", "observation"):
        refuse_ragged(getattr(env, f"full_{kind}_spec"), kind, "to_torchrl")
    require("torchrl.envs")
    from envkit_bridges.exports.torchrl_subclasses import view_of

    return view_of(env)


def for_replay_buffer(transform: Transform) -> TorchRLTransform:
    """Give a transform as one that TorchRL's replay buffers run both ways.

    Pass the result as ``ReplayBuffer(transform=...)``, to ``append_transform`` or to
    ``insert_transform``. What is extended goes through `Transform.inv`, what is sampled through
    `Transform.forward`. Running statistics (`VecNorm`)
    learn from what is sampled too: pass a ``frozen_copy()`` for them to stand still.

    Args:
        transform: a transform, a `Compose`, or a function ``td -> td``.

    Raises:
        ArgumentError: (a ValueError) it is none of these.
        MissingLibraryError: (an ImportError) TorchRL is not installed.
    """
    require("torchrl.envs")
    from envkit_bridges.exports.torchrl_subclasses import BothWays

    return BothWays(as_transform(transform))


def from_torchrl_transform(theirs: Any) -> Transform:
    """Give a primer of TorchRL's as one of envkit's.

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
    raise ArgumentTypeError(
        f"{type(theirs).__name__} is a transform of TorchRL's, and envkit's envs take envkit's. {fix}"
    )


def _primer(theirs: Any) -> TensorDictPrimer:
    return TensorDictPrimer(
        from_torchrl_spec(theirs.primers),
        random=theirs.random,
        default_value=None if theirs.random else theirs.default_value,
        reset_key=theirs._reset_key,
        expand_specs=theirs.expand_specs,
        single_default_value=theirs.single_default_value,
        call_before_env_reset=theirs.call_before_env_reset,
    )
