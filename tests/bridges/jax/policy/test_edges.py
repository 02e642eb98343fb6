"""Operators of compiled policies at the ends of the numbers: NaN, infinities, zeros of both signs, huge and tiny ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from envkit_bridges.jax.policy.operators import TABLE
from tests.bridges.jax.policy.test_ops import wanted_of
from tests.bridges.policy.test_numpy_library import TABLE as IN_NUMPY

NAN, INF = float("nan"), float("inf")
ENDS = torch.tensor(
    [NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30, 3e38, -3e38, 1e-30, -1e-30, 1e-20, 88.8, -104.0]
    + [sign * value for value in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0) for sign in (1, -1)]
)
SPREAD = torch.tensor(
    [[1e20, 2e20, -3e20, 4e20], [1.0, INF, 2.0, 3.0], [1.0, NAN, 2.0, 3.0], [0.0, -0.0, 0.0, 0.0]]
)
OF_ONE = [
    *("abs", "neg", "sign", "reciprocal", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "log2"),
    *(
        "log10",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
    ),
    *("atanh", "erf", "erfinv", "lgamma", "digamma", "sigmoid", "relu", "floor", "ceil", "trunc"),
    *("round", "isnan", "isinf", "logical_not", "gelu", "elu", "leaky_relu"),
]
OF_TWO = [
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "atan2"),
    *("hypot", "fmod.Tensor", "remainder.Tensor", "lt.Tensor", "ge.Tensor", "eq.Tensor"),
]
EXPONENTS = [0.5, -0.5, 0.0, 1.5, 2.0, 2, 3, -1.0, -2.0]
CASES = {
    **{name: (name, (ENDS,), {}) for name in OF_ONE},
    "gelu by tanh": ("gelu", (ENDS,), {"approximate": "tanh"}),
    **{name: (name, (ENDS[:, None].expand(-1, len(ENDS)), ENDS), {}) for name in OF_TWO},
    **{f"pow {power}": ("pow.Tensor_Scalar", (ENDS, power), {}) for power in EXPONENTS},
    **{
        name: (name, (SPREAD, [1]), {})
        for name in ("sum.dim_IntList", "mean.dim", "amax", "amin", "any.dims", "all.dims")
    },
    "argmax": ("argmax", (SPREAD, 1), {}),
    "cumsum": ("cumsum", (SPREAD, 1), {}),
    "sort": ("sort", (SPREAD, 1), {}),
    "softmax": ("_softmax", (SPREAD, -1, False), {}),
    "log_softmax": ("_log_softmax", (SPREAD, -1, False), {}),
    "layer_norm": ("native_layer_norm", (SPREAD, [4], None, None, 1e-5), {}),
    "var": ("var.correction", (SPREAD, [1]), {"correction": 1}),
    "var_mean": ("var_mean.correction", (SPREAD, [1]), {"correction": 1}),
}
HUGE = "torch rounds the quotient, and its remainder is no longer one"
DIFFERENT = {
    "div.Tensor": dict.fromkeys((1, 2, 7, 8), "XLA takes 1 / 3e38 for 0"),
    "fmod.Tensor": dict.fromkeys((5, 6, 7, 8), HUGE),
    "remainder.Tensor": dict.fromkeys((5, 6, 7, 8), HUGE),
    "gelu": {1: "inf in place of NaN, as some processors give it", 7: "3e38 in place of inf"},
    "sinh": {12: "1.8e38 in place of inf, as some processors give it"},
    "cosh": {12: "1.8e38 in place of inf, as some processors give it"},
    "layer_norm": {0: "0 in place of NaN", 1: "the mean is inf in place of NaN"},
    "var_mean": {1: "the mean is inf in place of NaN"},
}
"""Places, along the first axis, where another number comes out; docs/compiled_policies.md names them."""
LIBRARIES = {"JAX": TABLE, "NumPy": IN_NUMPY}


def entry(library, name):
    return LIBRARIES[library].get(name if "." in name else f"{name}.default")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_operator_gives_at_the_ends_what_torch_gives(library, case):
    name, args, kwargs = CASES[case]
    op = entry(library, name)
    if op is None:
        pytest.skip(f"{library} has no {name}")
    wanted = wanted_of(name, args, kwargs)

    def compute(arrays):
        given = iter(arrays)
        return op.apply(
            [next(given) if torch.is_tensor(arg) else arg for arg in args], kwargs, wanted
        )

    arrays = [arg.numpy() for arg in args if torch.is_tensor(arg)]
    with np.errstate(all="ignore"):
        got = jax.jit(compute)(arrays) if library == "JAX" else compute(arrays)

    parts = zip(got, wanted, strict=False) if isinstance(wanted, tuple) else [(got, wanted)]
    for one, other in parts:
        one, other = np.asarray(one), other.numpy()
        same = np.isclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
        rows = set(np.argwhere(~same)[:, 0].tolist())
        assert rows <= set(DIFFERENT.get(case, {})), [
            (one[row], other[row]) for row in sorted(rows - set(DIFFERENT.get(case, {})))
        ]
