"""Every error envkit raises, by what went wrong.

This module decides which built-in class each error also is, so that users may catch either.
It knows nothing else.

Conventions
    A message says what was wrong (with the value), what was expected, and how to fix it.
    Each class is an `EnvkitError` and the built-in exception that TorchRL raises there.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class EnvkitError(Exception):
    """Base of all errors raised by envkit."""


class ArgumentError(EnvkitError, ValueError):
    """An argument has a value that the call cannot use."""


class RowIndexError(ArgumentError, IndexError):
    """An index chooses no sub-env, or one that is not there."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of another type than the call can use."""


class UnknownEnvError(ArgumentError, RuntimeError):
    """A library has no env of the name that was given, or none of the form asked for."""


class DeviceNameError(ArgumentError, RuntimeError):
    """A device is named that torch does not know."""


class DataTypeError(ArgumentTypeError, AttributeError):
    """Something else than a TensorDict was given as the data of an env."""


class OptionError(EnvkitError, TypeError):
    """Options exclude each other, or a class or the installed version of a library lacks one."""


class ArgumentCountError(EnvkitError, RuntimeError):
    """A list has another length than the number of environments it is for."""


class StartedError(EnvkitError, RuntimeError):
    """Something is started, or set before a start, that already runs."""


class MemoryKindError(EnvkitError, RuntimeError):
    """Rows are to lie in two kinds of memory at once."""


class CentredRewardWarning(UserWarning):
    """Warn that a transform subtracts the running mean of a reward, which changes what the best policy is.

    Example:
        >>> import warnings
        >>> from envkit import CentredRewardWarning, PendulumEnv, VecNorm
        >>> env = PendulumEnv().append_transform(VecNorm(["reward"]))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", CentredRewardWarning)
        ...     spec = env.reward_spec
        >>> caught[0].category.__name__
        'CentredRewardWarning'
    """


class EnvSpecWarning(UserWarning):
    """Warn that `check_env_specs` found something unusual in an env whose data is right.

    Example:
        >>> import warnings
        >>> from envkit import EnvSpecWarning, PendulumEnv, check_env_specs
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", EnvSpecWarning)
        ...     check_env_specs(PendulumEnv())
    """


class StaleNextWarning(UserWarning):
    """Warn that data was stepped again with the outcome of an earlier step under ``next``, which was replaced.

    Example:
        >>> import warnings
        >>> from envkit import PendulumEnv, StaleNextWarning
        >>> env = PendulumEnv()
        >>> td = env.rand_step(env.reset())
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     td = env.rand_step(td)
        >>> caught[0].category is StaleNextWarning
        True
    """


class SharedEnvError(EnvkitError, ValueError):
    """Two rows of a batch were given the same env, or the same simulator."""


class NotResetError(EnvkitError, RuntimeError):
    """An env was stepped before its first reset, or after a seed and before the reset that must follow it."""


class UnknownStateError(EnvkitError, RuntimeError):
    """An env that reads its state from the data finds none there, or was built without what says it."""


class StaleDataError(EnvkitError, RuntimeError):
    """Data is to be stepped from which a simulator has moved on."""


class BusyEnvError(EnvkitError, RuntimeError):
    """Sub-envs of an asynchronous pool are asked for something while they still work, or for results that no call is making."""


class NotStartedError(EnvkitError, RuntimeError, AttributeError):
    """An attribute of sub-envs was asked for before they run."""


class NoBufferError(EnvkitError, RuntimeError):
    """A collector is to fill a replay buffer in the background, and has none."""


class BatchCountError(EnvkitError, RuntimeError, TypeError):
    """The number of batches of a collector is asked for, and is not known."""


class NotAMethodError(EnvkitError, AttributeError):
    """An attribute that is to be called by its name cannot be called."""


class SpecError(EnvkitError, ValueError):
    """A spec is declared, shaped or combined in a way that describes no tensor."""


class EmptySpecError(EnvkitError, RuntimeError):
    """A spec holds a Composite without leaves where every node must have data."""


class SpecAxisError(SpecError, IndexError):
    """An axis of a spec does not exist, or spells a value and cannot be touched."""


class SpecFitError(SpecError, RuntimeError):
    """The spec of an entry is of a kind or shape that a transform cannot work with."""


class ReservedKeyError(EnvkitError, AttributeError):
    """An entry of a spec is to bear the name of an attribute that every spec has."""


class AxisNameError(SpecError, RuntimeError):
    """An axis is to be named that has another name already."""


class SpecMaskError(SpecError, RuntimeError):
    """A mask does not fit the options of a spec, or allows none of them."""


class SpecStackError(EnvkitError, RuntimeError):
    """Specs cannot be stacked, or a stack of unlike specs was asked what it cannot do."""


class NotEnumerableError(EnvkitError, NotImplementedError):
    """The values of a spec cannot be listed or counted."""


class NotSelectableError(EnvkitError, NotImplementedError):
    """A stack of unlike specs cannot be selected from the way asked for."""


class EncodingError(EnvkitError, RuntimeError):
    """A raw value cannot become a value of a spec: its elements do not fit."""


class SpecTypeError(EnvkitError, TypeError):
    """Something else than a spec was given where a spec is needed, or a dtype does not fit."""


class NoChoiceError(SpecTypeError, AttributeError):
    """A spec that is no choice among options was asked for another spelling of it."""


class SpecLockedError(EnvkitError, RuntimeError):
    """A locked spec was edited in place."""


class OutOfSpecError(EnvkitError, AssertionError):
    """A value lies outside its spec."""


class InputError(SpecError):
    """An entry given to an env has another shape, dtype, device or value than its spec says.

    ``row`` is the row of which the message speaks, None where it speaks of none.
    """

    row: int | None = None


class MissingKeyError(EnvkitError, KeyError):
    """A key is absent, or does not name exactly one entry."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument; a message is to be read
        return str(self.args[0]) if self.args else ""


class InfoReaderError(EnvkitError, RuntimeError):
    """Infos are to be registered on an env that reads some already."""


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


class OutputShapeError(EnvkitError, RuntimeError):
    """A reward or done flag that an env returned has not one value for each element of its spec."""


class ReadOnlyError(EnvkitError, RuntimeError, AttributeError):
    """An attribute was assigned that follows from something else."""


class DoneError(EnvkitError, RuntimeError):
    """Done flags are contradictory, missing, or set right after a reset."""


class BypassError(EnvkitError, AttributeError):
    """Data of a call would pass by the transforms around the env that has it."""


class TransformIndexError(ArgumentError, IndexError):
    """A place in a sequence of transforms does not exist."""


class TransformOwnerError(EnvkitError, AttributeError):
    """A transform that belongs to one environment was given to another."""


class NoParentError(EnvkitError, RuntimeError):
    """A transform or policy that needs an environment is in none."""


class PositiveAxisError(ArgumentError, RuntimeError):
    """An axis of a transform counts from the front, where it must count from the end."""


class PlacementError(ArgumentError, RuntimeError):
    """A transform stands where it cannot work: in an env instead of a replay buffer, or before what it reads."""


class PrimerError(EnvkitError, RuntimeError):
    """A primer does not fit its environment, or its values do not fit their specs."""


class StatisticsError(EnvkitError, RuntimeError):
    """Numbers a normaliser needs have not been measured, or have been already."""


class BusyError(EnvkitError, RuntimeError):
    """An env is used by two threads at the same time."""


class ClosedEnvError(EnvkitError, RuntimeError):
    """An env was used after `close`, or closed twice."""


class CopyError(EnvkitError, TypeError):
    """An object cannot be copied, pickled or sent to a worker, or not as it is now."""


class NotFiniteError(EnvkitError, ValueError):
    """A number is infinite or NaN where `FiniteTensorDictCheck` looks."""


class UnsupportedError(EnvkitError, NotImplementedError):
    """A way of doing something is asked for that there is none of."""


class NotCallableError(EnvkitError, NotImplementedError):
    """Something was called like a module whose work is done by other methods."""


class RenderingError(EnvkitError, RuntimeError):
    """No picture can be drawn on this machine, or in this process."""


class ResumeError(EnvkitError, NotImplementedError):
    """A saved object could not be restored exactly, or a loaded one did not continue as before."""


class WriteError(EnvkitError, OSError):
    """A file or folder cannot be written, and is not there, or as it was before."""


class MissingFileError(EnvkitError, FileNotFoundError):
    """There is no file, or no dataset, of the name that was given."""


class SetStateError(EnvkitError, NotImplementedError):
    """A reset was to begin at a given state in an env that cannot."""


class RolloutError(EnvkitError, RuntimeError):
    """A rollout has nothing to start from, or its steps cannot be stacked or written where asked."""


class FusionError(EnvkitError, NotImplementedError):
    """A transform or an override cannot run inside a program that was asked for."""


class GradientError(EnvkitError, RuntimeError):
    """A gradient was asked for where none flows."""


class HandoffError(EnvkitError, TypeError):
    """A value cannot cross between JAX and torch as it is."""


class StateStructureError(EnvkitError, RuntimeError):
    """The state of a stateless env changes its structure between reset and step, or is kept in Python beside them."""


class PolicyError(EnvkitError, TypeError):
    """A policy is of another kind than a call can use, or returned something that is no action."""


class TranslationError(EnvkitError, NotImplementedError):
    """A torch policy cannot become part of a JAX program."""


class MissingLibraryError(EnvkitError, ImportError):
    """An optional library is not installed; the message names the extra that brings it."""


class BrokenLibraryError(EnvkitError, ImportError):
    """An optional library is installed and fails when it is imported; the message says with what."""


class FetchError(EnvkitError, OSError):
    """The files that an env is made from could not be fetched from the network."""


class SharedMemoryError(EnvkitError, MemoryError):
    """The machine cannot give the shared memory that a pool of workers needs."""


class OpenFilesError(EnvkitError, OSError):
    """The limit on open files is too low for a pool of workers."""


class WorkerError(EnvkitError, RuntimeError):
    """A worker process raised, died or answered out of turn.

    ``failures`` holds one `envkit.transport.Failure` for each thing that went wrong, ``answers``
    what the rest of a call gave, by worker.
    """

    failures: tuple[Any, ...] = ()
    answers: Mapping[int, Any] = MappingProxyType({})


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process did not answer within its deadline."""


class ResultTimeoutError(EnvkitError, TimeoutError):
    """Fewer results of an asynchronous pool came within ``timeout`` than were asked for; none is lost."""
