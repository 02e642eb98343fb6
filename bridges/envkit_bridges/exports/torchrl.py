"""Envs of envkit for TorchRL, and transforms in the replay buffers of TorchRL.

`to_torchrl` gives an env TorchRL's class, `for_replay_buffer` a transform, for what asks for that class. A buffer of
TorchRL also takes a transform of ours as it is. Both import TorchRL only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envkit.env.base import EnvBase
from envkit.errors import ArgumentTypeError
from envkit.specs.stacks import refuse_ragged
from envkit.transforms.core.base import Transform
from envkit.transforms.core.compose import as_transform
from envkit_bridges.libraries import require

if TYPE_CHECKING:
    from torchrl.envs import EnvBase as TorchRLEnv
    from torchrl.envs.transforms import Transform as TorchRLTransform

__all__ = ["for_replay_buffer", "to_torchrl"]


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
    from envkit_bridges.exports.torchrl_view import view_of

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
    from envkit_bridges.exports.replay_transform import BothWays

    return BothWays(as_transform(transform))
