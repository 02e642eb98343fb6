"""Keywords that are taken because programs for TorchRL pass them: what becomes of each, in one place.

Every one is checked, so that nothing is dropped without a look at it. Pages for users: `docs/from_torchrl.md`.

Conventions
    ignored     the keyword has no effect; the table says why none is needed.
    false only  the keyword may be passed, but only as False; the table says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from envkit.data.arguments import as_bool
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError

IGNORED = {
    "return_same_td": "batches are always new",
    "no_cuda_sync": "a collector does not synchronise devices itself",
    "weight_sync_schemes": "weights travel through shared memory when update_policy_weights_() is called",
    "consolidate": "data travels as use_buffers says",
    "daemon": "workers always end with this process",
    "metadata_from_workers": "metadata is always read in the workers",
}

FALSE_ONLY = {
    "pin_memory": "rows of sub-envs cannot be pinned; expected False. Append PinMemoryTransform() to the env to pin what "
    "it returns",
    "allow_step_when_done": "a finished episode cannot be stepped; expected False. Reset the rows that are done, e.g. "
    "with step_and_maybe_reset",
}


def without_ignored(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords, those left out that have no effect."""
    return {name: value for name, value in options.items() if name not in IGNORED}


def as_false(name: str, value: Any) -> bool:
    """Return a keyword that may only be False.

    Raises:
        ArgumentError: it is True.
        ArgumentTypeError: it is no bool.
    """
    if as_bool(name, value):
        raise ArgumentError(f"{name} is True, but {FALSE_ONLY[name]}.")
    return False


def as_weight_sync_schemes(name: str, value: Any) -> Mapping[str, Any]:
    """Return TorchRL's schemes that say how weights travel, which they do here through shared memory.

    Raises:
        ArgumentTypeError: they are no mapping.
        OptionError: (a TypeError) they are for something else than the policy, or forbid what a collector does.
    """
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"{name} is of type {type(value).__name__}, but must be a dict. Pass "
            "{'policy': MultiProcessWeightSyncScheme()}, for example, or leave it out."
        )
    schemes = cast(Mapping[str, Any], value)
    if others := [model for model in schemes if model != "policy"]:
        raise OptionError(
            f"{name} has {others}, but a collector sends the weights of its policy alone; expected 'policy'. Change "
            "transforms of the envs with collector.call() or set_attr()."
        )
    if type(schemes.get("policy")).__name__ == "NoWeightSyncScheme":
        raise OptionError(
            f"{name} has a NoWeightSyncScheme, but update_policy_weights_() always sends weights. Leave it out, and do "
            "not call that method."
        )
    return schemes
