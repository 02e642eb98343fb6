"""What an env hands out, as type checkers see it: a TensorDict that is not taken for a tensor.

tensordict ships no types that a checker can follow to the end: one base class of `TensorDictBase` stays
unknown, so any attribute of it passes, and it passes for any other class. `EnvData` names what only a
tensor has. At run time it is `TensorDictBase`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, overload

from tensordict import TensorDictBase

from envkit.specs.annotations import AxisIndex, Key

__all__ = ["EnvData"]

if TYPE_CHECKING:

    class EnvData(TensorDictBase):  # type: ignore[misc]
        """A TensorDict that an env gives or takes; its entries are the tensors: ``td["next", "reward"]``.

        An entry may be anything; what axes are indexed with gives the same kind of data. The other members
        are those of tensors that no TensorDict has; a checker reports their use.
        """

        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: AxisIndex) -> Self: ...
        def __getitem__(self, index: Any) -> Any: ...
        def get(self, key: Key, *default: Any, **options: Any) -> Any: ...

        argmax: None
        argmin: None
        argsort: None
        cumsum: None
        grad_fn: None
        index_select: None
        is_leaf: None
        item: None
        long: None
        matmul: None
        nonzero: None
        relu: None
        sort: None
        square: None
        topk: None

else:
    EnvData = TensorDictBase
