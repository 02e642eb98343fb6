"""Which transforms an env needs for a policy that remembers.

A module that keeps a hidden state says so with a method ``make_tensordict_primer()``. This module
finds such modules inside a policy and adds what is missing to an env: a marker of first steps, and the
hidden states at the root. It goes by specs alone, so what an env shows already, from however deep
inside, is not added again.

Conventions
    recurrent  said of a submodule that has ``make_tensordict_primer``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from envkit.base import EnvBase
from envkit.env_specs import as_path
from envkit.errors import ArgumentError
from envkit.transforms.base import Transform
from envkit.transforms.compose import Compose
from envkit.transforms.episodes import InitTracker
from envkit.transforms.primer import TensorDictPrimer

__all__ = ["get_env_transforms_from_module", "with_policy_transforms"]


def get_env_transforms_from_module(module: Any, init_key: str = "is_init") -> Compose:
    """Give the transforms an env needs for a policy, for wiring by hand.

    Args:
        module: a policy; all its submodules are searched.
        init_key: name of the marker of first steps.

    Returns:
        An `InitTracker` and one `TensorDictPrimer` for each recurrent submodule; nothing when there
        is none, or when ``module`` is no module (a function that makes one, say).

    Raises:
        ArgumentError: ``make_tensordict_primer`` returned something else than a transform.
    """
    primers = _primers_of(module)
    return Compose(InitTracker(init_key), *primers) if primers else Compose()


def with_policy_transforms(env: EnvBase, policy: Any, init_key: str = "is_init") -> EnvBase:
    """Append to an env the transforms a policy needs and the env does not have.

    Nothing happens for a policy without recurrent submodules, and a second call adds nothing.

    Returns:
        ``env`` itself when nothing is missing or when it is a `TransformedEnv`, which is extended in
        place; otherwise a `TransformedEnv` of it.
    """
    primers = _primers_of(policy)
    if not primers:
        return env
    missing: list[Transform] = []
    shown = {as_path(key) for key in (*env.observation_keys, *env.state_keys)}
    if all(path[-1] != init_key for path in map(as_path, env.observation_keys)):
        missing.append(InitTracker(init_key))
    for primer in primers:
        keys = {as_path(key) for key in primer.primers.keys(True, True)}
        if not keys <= shown:
            missing.append(primer)
    for transform in missing:
        env = env.append_transform(transform)
    return env


def _primers_of(module: Any) -> list[TensorDictPrimer]:
    if not isinstance(module, nn.Module):
        return []
    makers = [
        submodule for submodule in module.modules() if hasattr(submodule, "make_tensordict_primer")
    ]
    return [_primer_of(maker) for maker in makers]


def _primer_of(maker: Any) -> TensorDictPrimer:
    primer = maker.make_tensordict_primer()
    if not isinstance(primer, TensorDictPrimer):
        raise ArgumentError(
            f"make_tensordict_primer of {type(maker).__name__} returned a "
            f"{type(primer).__module__}.{type(primer).__name__}, but must return an "
            "envkit.TensorDictPrimer."
        )
    return primer
