"""Which transforms an env needs for a policy that remembers.

A module that keeps a hidden state says so with a method ``make_tensordict_primer()``. This module
finds such modules inside a policy and adds what is missing to an env: a marker of first steps, and the
hidden states at the root. It goes by specs alone, so what an env shows already, from however deep
inside, is not added again. Primers of another library (those of the reference API's recurrent modules)
are read by their attributes; their leaves need a shape, a dtype and a device.

Conventions
    recurrent  said of a submodule that has ``make_tensordict_primer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from envkit.data.paths import as_key, as_path
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError
from envkit.specs import Composite, Unbounded
from envkit.transforms.core.base import Transform
from envkit.transforms.core.compose import Compose
from envkit.transforms.episodes import InitTracker
from envkit.transforms.primer import TensorDictPrimer

__all__ = ["get_env_transforms_from_module", "with_policy_transforms"]

_OF_A_PRIMER = ("primers", "default_value", "random", "expand_specs", "single_default_value")
"""What is read of a primer of another library, the reference's for instance."""


def get_env_transforms_from_module(module: nn.Module, init_key: str = "is_init") -> Compose:
    """Give the transforms an env needs for a policy, for wiring by hand.

    Args:
        module: a policy; all its submodules are searched.
        init_key: name of the marker of first steps.

    Returns:
        An `InitTracker` and one `TensorDictPrimer` for each recurrent submodule; nothing when there
        is none, or when ``module`` is no module (a function that makes one, say).

    Raises:
        ArgumentError: ``make_tensordict_primer`` returned something else than a primer.
    """
    primers = _primers_of(module)
    return Compose(InitTracker(init_key), *primers) if primers else Compose()


def with_policy_transforms(env: EnvBase, policy: nn.Module, init_key: str = "is_init") -> EnvBase:
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
    if isinstance(primer, TensorDictPrimer):
        return primer
    if all(hasattr(primer, name) for name in _OF_A_PRIMER):
        return _translated(primer)
    raise ArgumentError(
        f"make_tensordict_primer of {type(maker).__name__} returned a "
        f"{type(primer).__module__}.{type(primer).__name__}, but must return an "
        f"envkit.TensorDictPrimer, or one of another library with the attributes {_OF_A_PRIMER}."
    )


def _translated(primer: Any) -> TensorDictPrimer:
    """Make our primer of another library's, which adds the same entries with the same values."""
    leaves = {as_key(as_path(key)): leaf for key, leaf in primer.primers.items(True, True)}
    specs = {key: Unbounded(leaf.shape, leaf.device, leaf.dtype) for key, leaf in leaves.items()}
    default = primer.default_value
    if primer.random:
        default = {key: leaf.rand for key, leaf in leaves.items()}
    elif isinstance(default, Mapping):
        default = {as_key(as_path(key)): value for key, value in default.items()}
    return TensorDictPrimer(
        Composite(specs, shape=primer.primers.shape),
        default_value=default,
        expand_specs=primer.expand_specs,
        single_default_value=bool(primer.single_default_value) and not primer.random,
    )
