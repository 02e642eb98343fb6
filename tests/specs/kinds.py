"""One spec of every kind, and every dtype a leaf can have, for tests that go through all."""

import torch

from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)

__all__ = ["DTYPES", "KINDS", "TENSOR_KINDS"]

TENSOR_KINDS = {  # all begin with one axis of 4
    "bounded": Bounded(-1, 1, (4, 3)),
    "bounded integers": Bounded([0, -2, 5], [1, 2, 5], (4, 3), dtype=torch.int32),
    "unbounded": Unbounded((4, 3)),
    "unbounded integers": Unbounded((4, 3), dtype=torch.uint8),
    "categorical": Categorical(3, (4,)),
    "masked categorical": Categorical(3, (4,), mask=torch.tensor([True, False, True])),
    "flag": Categorical(2, (4, 1), dtype=torch.bool),
    "one-hot": OneHot(3, (4, 3)),
    "masked one-hot": OneHot(3, (4, 3), mask=torch.tensor([True, False, True])),
    "multi-categorical": MultiCategorical([2, 3], (4, 2)),
    "multi-one-hot": MultiOneHot([2, 3], (4, 5)),
    "binary": Binary(3, (4, 3)),
    "choice": Choice([Bounded(-1, 0, (2,)), Bounded(3, 4, (2,))]).expand(4, 2),
    "choice of numbers": Choice([Categorical(2), Categorical(3)]).expand(4),
    "stack": torch.stack([Bounded(i, i + 1, (3,)) for i in range(4)]),
    "stack of choices": torch.stack([Categorical(i + 1, (2,)) for i in range(4)]),
}

KINDS = {
    **TENSOR_KINDS,
    "object": NonTensor((4,), example_data="a"),
    "composite": Composite(
        pos=Unbounded((4, 3)),
        body=Composite(leg=Categorical(3, (4,)), text=NonTensor((4,), example_data=1), shape=(4,)),
        none=None,
        shape=(4,),
    ),
    "stack of composites": torch.stack(
        [
            Composite(obs=Bounded(-1, 1, (i % 2 + 1,)), n=Composite(x=Categorical(i + 1)))
            for i in range(4)
        ]
    ),
}

DTYPES = (
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)
