"""Inputs and results of a policy while steps are recorded.

Recorded steps hold these tensors themselves until they are stacked. A policy may return its action in the same memory
each time (noise in place, ``out=``, one NumPy array): that is copied. It must leave what it is called with as it is,
also in later calls.

Conventions
    run  steps that are recorded together: a rollout, or a batch of a collector.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from envkit.data.paths import Key, Path, as_key, as_path
from envkit.errors import PolicyError


class PolicyCalls:
    """The calls of a policy in one run. All tensors are kept until its end, so that no address is used twice."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again, where no recorded step holds a tensor of the policy."""
        # flat, since each further container that stays is work for the garbage collector
        self._keys: list[Any] = []
        self._tensors: list[Any] = []
        self._versions: list[int | None] = []
        self._returned: list[Tensor] = []
        self._addresses: dict[Any, dict[int, int | None] | None] = {}

    def called(
        self, keys: Iterable[Any], tensors: Iterable[Any], versions: Iterable[int | None]
    ) -> None:
        """Record what a policy was called with, and how often each tensor had been written to."""
        self._keys += keys
        self._tensors += tensors
        self._versions += versions

    def recordable(self, key: Any, result: Any) -> Any:
        """Return a result as it may be recorded: a copy, if a later one may be written to its memory.

        The first result is copied in any case. So are all where that one does not count all writes: where it shares
        memory with NumPy, or is a tensor of inference mode.

        Raises:
            PolicyError: (a TypeError) it overwrites one that was not copied: memory is used in turns.
        """
        if not isinstance(result, Tensor):
            return result
        try:
            if key not in self._addresses:
                uncounted = result.is_inference() or not result.untyped_storage().resizable()
                self._addresses[key] = None if uncounted else {result.data_ptr(): None}
                self._returned.append(result)
                return result.clone()
            versions = self._addresses[key]
            if versions is None:
                return result.clone()
            address = result.data_ptr()
            if address not in versions:
                versions[address] = result._version
                self._returned.append(result)
                return result
        except RuntimeError:  # under functorch there is no memory to look at
            return result
        version = versions[address]
        if version is None:
            return result.clone()
        if version == result._version:
            return result
        raise PolicyError(
            f"the policy returned {as_key(as_path(key))!r} in memory of an earlier result, which it has overwritten and "
            "which recorded steps hold. Return a new tensor: action.clone()."
        )

    def own_entries(
        self, td: TensorDictBase, tensors_before: Mapping[Key, Tensor], prefix: Path = ()
    ) -> None:
        """Replace entries that a policy has written into a TensorDict as `recordable` does; others are ``tensors_before``."""
        for place, node in _parts(td, prefix):
            for name, value in node.items():
                key = (*place, name) if place else name
                if value is tensors_before.get(key):
                    continue
                if isinstance(value, Tensor):
                    if (recorded := self.recordable(key, value)) is not value:
                        node.set(name, recorded)
                elif _is_node(value):
                    self.own_entries(value, tensors_before, (*place, name))

    def require_unchanged(self) -> None:
        """Check that all that the policy was called with is as it was.

        Raises:
            PolicyError: (a TypeError) it is not.
        """
        if versions_of(self._tensors) != self._versions:
            raise changed_in_place(self._keys, self._tensors, self._versions, " after the call")


_CALLS: ContextVar[PolicyCalls | None] = ContextVar("calls of a run", default=None)


def calls_of_run() -> PolicyCalls | None:
    """Return the calls of the run that is under way; None where no steps are recorded."""
    return _CALLS.get()


@contextmanager
def recorded_calls() -> Generator[PolicyCalls]:
    """Watch the calls of a policy during a run, and check at its end that what it was called with is unchanged."""
    calls = PolicyCalls()
    outside = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(outside)
    calls.require_unchanged()


def tensors_in(td: TensorDictBase, prefix: Path = ()) -> dict[Key, Tensor]:
    """Return the tensors of a TensorDict by key, those of the parts of a lazy stack below their number."""
    tensors: dict[Key, Tensor] = {}
    for place, node in _parts(td, prefix):
        for name, value in node.items():
            if isinstance(value, Tensor):
                tensors[(*place, name) if place else name] = value
            elif _is_node(value):
                tensors.update(tensors_in(value, (*place, name)))
    return tensors


def _parts(td: TensorDictBase, place: Path) -> Iterable[tuple[Path, TensorDictBase]]:
    """Return the TensorDicts that hold the entries: those of which a lazy stack consists, or itself."""
    if type(td) is TensorDict or not isinstance(td, LazyStackedTensorDict):
        return ((place, td),)
    return [((*place, str(number)), part) for number, part in enumerate(td.tensordicts)]


def _is_node(value: object) -> bool:
    return isinstance(value, TensorDictBase) and not is_non_tensor(value)


def versions_of(tensors: Collection[Any]) -> list[int | None]:
    """Return how often each tensor was written to; None of what does not tell."""
    try:
        return [one._version for one in tensors]
    except (AttributeError, RuntimeError):  # other objects, and tensors made in inference mode
        return [
            one._version if isinstance(one, Tensor) and not one.is_inference() else None
            for one in tensors
        ]


def changed_in_place(
    keys: Iterable[Any], tensors: Collection[Any], versions: Sequence[int | None], when: str = ""
) -> PolicyError:
    """Make the error of a policy that wrote to tensors that it was called with.

    Steps that were made before hold some of these, as ``next``: their data would change after it was recorded.

    Args:
        keys: names of the tensors.
        tensors: the tensors.
        versions: what `versions_of` gave before the call.
        when: they were changed, if not in that call.
    """
    pairs = zip(keys, versions, versions_of(tensors), strict=True)
    keys_changed = [as_key(as_path(key)) for key, before, after in pairs if before != after]
    changed = [*dict.fromkeys(keys_changed)]
    return PolicyError(
        f"the policy changed {changed} in place{when}, but what it is called with must stay as it is: recorded data "
        "holds the same tensors. Compute new ones, x = x / 255 and not x /= 255, or change a clone()."
    )
