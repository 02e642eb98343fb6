"""Every error envkit raises, by what went wrong.

This module decides which built-in class each error also is, so that users may catch either.
It knows nothing else.

Conventions
    A message says what was wrong (with the value), what was expected, and how to fix it.
    Each class is an `EnvkitError` and the built-in exception that the reference API raises there.
"""

__all__ = [
    "ArgumentError",
    "BatchSizeError",
    "ClosedEnvError",
    "DoneError",
    "EnvkitError",
    "HandoffError",
    "KeyCollisionError",
    "MissingKeyError",
    "MissingLibraryError",
    "OutOfSpecError",
    "ResetMaskError",
    "ResetOutputError",
    "SpecError",
    "SpecLockedError",
    "SpecTypeError",
    "StateStructureError",
    "StepMaskError",
    "WorkerError",
    "WorkerTimeoutError",
]


class EnvkitError(Exception):
    """Base of all errors raised by envkit."""


class ArgumentError(EnvkitError, ValueError):
    """An argument has a value that the call cannot use."""


class SpecError(EnvkitError, ValueError):
    """A spec is declared, shaped or combined in a way that describes no tensor."""


class SpecTypeError(EnvkitError, TypeError):
    """Something else than a spec was given where a spec is needed, or a dtype does not fit."""


class SpecLockedError(EnvkitError, RuntimeError):
    """A locked spec was edited in place."""


class OutOfSpecError(EnvkitError, AssertionError):
    """A value lies outside its spec."""


class MissingKeyError(EnvkitError, KeyError):
    """A key is absent, or does not name exactly one entry."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument; a message is to be read
        return str(self.args[0]) if self.args else ""


class KeyCollisionError(EnvkitError, RuntimeError):
    """Two entries of an env that must differ carry the same name."""


class BatchSizeError(EnvkitError, RuntimeError):
    """A TensorDict has another batch size than a batch-locked env."""


class StepMaskError(EnvkitError, RuntimeError):
    """A `_step` mask does not fit the data or the env."""


class ResetMaskError(EnvkitError, RuntimeError):
    """A `_reset` mask does not fit the data or the env."""


class ResetOutputError(EnvkitError, RuntimeError):
    """`_reset` or `_step` of an env returned something that is not a new TensorDict."""


class DoneError(EnvkitError, RuntimeError):
    """Done flags are contradictory, missing, or set right after a reset."""


class ClosedEnvError(EnvkitError, RuntimeError):
    """An env was used after `close`, or closed twice."""


class HandoffError(EnvkitError, TypeError):
    """A value cannot cross between JAX and torch as it is."""


class StateStructureError(EnvkitError, RuntimeError):
    """The state of a stateless env changes its structure between reset and step."""


class MissingLibraryError(EnvkitError, ImportError):
    """An optional library is not installed; the message names the extra that brings it."""


class WorkerError(EnvkitError, RuntimeError):
    """A worker process raised, died or answered out of turn."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process did not answer within its deadline."""
