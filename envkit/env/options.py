"""The keywords of every env: type, default and meaning, for signatures, completion and type checkers.

A constructor that hands them on takes ``**options: Unpack[EnvOptions]``. The device is not among them: each
kind of env says what its own means.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from torch import nn

from envkit.data.keywords import Default
from envkit.specs.annotations import BatchSize

__all__ = ["TAKEN_HERE", "EnvOptions"]


class EnvOptions(TypedDict, total=False):
    """Keywords of every env.

    Args:
        batch_size: number of environments along each axis; None means one environment.
        run_type_checks: compare the dtypes of every reset and step, and the actions, with the specs
            (TypeError; ValueError where an action has another shape).
        allow_done_after_reset: accept done flags that are set right after a reset.
        spec_locked: lock the specs after construction.
        auto_reset: the simulator begins a new episode in the step that ends one; the result is an
            `AutoResetEnv`.
        policy: a module; what its recurrent parts need is appended, and the result then is a
            `TransformedEnv`.
    """

    batch_size: Annotated[BatchSize | None, Default(None)]
    run_type_checks: Annotated[bool, Default(False)]
    allow_done_after_reset: Annotated[bool, Default(False)]
    spec_locked: Annotated[bool, Default(True)]
    auto_reset: Annotated[bool, Default(False)]
    policy: Annotated[nn.Module | None, Default(None)]


TAKEN_HERE = ("batch_size", "run_type_checks", "allow_done_after_reset")
"""What ``__init__`` of `EnvBase` takes; the class itself takes the others when it is called."""
