"""Each operator of the table gives what torch gives, in torch's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from envkit_bridges.jax.policy.operators import DRAWING, TABLE
from tests.zoo.half import HAS_FLOAT16

_MAKE = torch.Generator().manual_seed(0)


def real(*shape):
    return torch.randn(*shape, generator=_MAKE)


X = real(3, 4)
Y = real(3, 4)
POSITIVE = X.abs() + 0.1
INSIDE = X.tanh() * 0.9
WHOLE = torch.tensor([[3, -2, 0, 7], [1, 5, -6, 2], [4, 4, 9, -1]])
SIGNS = X > 0
IMAGE = real(2, 4, 6, 5)
WEIGHT = real(6, 2, 3, 2)
TURNED = real(4, 3, 3, 2)
PLACES = torch.tensor([[0, 2], [1, 1], [3, 0]])

NAN, INF = float("nan"), float("inf")
TIES = torch.tensor([[1.0, 3, 3, 2, 5], [2, -1, -1, 2, -4], [-INF, 0, INF, INF, 1]])
GAPS = torch.tensor([[1.0, 3, NAN, 2, NAN, 5], [NAN, 1, 2, 0, 3, 1], [2, 2, 1, 1, 3, 0]])
STEPS = torch.tensor([-1.0, 0.0, 0.5, 0.5, 0.5, 2.0, INF])
SOUGHT = torch.tensor([[0.5, -3.0, 0.0, NAN], [7.0, INF, -INF, 0.4]])
SQUARE = real(2, 3, 3)
DEFINITE = SQUARE @ SQUARE.mT + 0.5 * torch.eye(3)
HALFBAD = torch.stack([DEFINITE[0], DEFINITE[0] - 2 * torch.diag(torch.tensor([0.0, 9.0, 0.0]))])
SINGULAR = torch.stack([DEFINITE[0], torch.tensor([[1.0, 2, 3], [0, 0, 0], [4, 5, 7]])])
TALL = real(2, 4, 3)
FLAT = torch.tensor([[1.0, 2, 3], [2, 4, 6], [1, 0, 1], [0, 2, 2]])  # rank 2
BAGS = torch.tensor([1, 2, 2, 0, 5, 2])
WORDS = real(6, 3)
VOLUME = real(2, 3, 5, 4, 6)

UNARY = {
    "abs neg sign relu sigmoid tanh exp expm1 erf sin cos tan sinh cosh asinh atan": X,
    "floor ceil trunc round": X * 3,
    "sqrt rsqrt log log1p log2 log10 reciprocal lgamma digamma": POSITIVE,
    "asin acos atanh erfinv": INSIDE,
    "acosh": POSITIVE + 1,
    "elu gelu leaky_relu hardtanh": X,
    "clone alias": X,
    "isnan isinf logical_not": torch.tensor([0.0, float("nan"), float("inf"), -1.0]),
    "bitwise_not": WHOLE,
}
SUMS = "sum mean prod"
PAIRS = {
    "maximum minimum atan2 hypot": (X, Y),
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor": (WHOLE, WHOLE.flip(0)),
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar": (WHOLE, 2.5),
    "logical_and logical_or logical_xor": (SIGNS, Y > 0),
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor": (WHOLE, WHOLE.flip(0)),
    "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar": (WHOLE, 3),
    "add.Tensor sub.Tensor mul.Tensor div.Tensor": (WHOLE, X),
    "add.Scalar sub.Scalar mul.Scalar div.Scalar": (WHOLE, 1.5),
    "remainder.Tensor fmod.Tensor": (X, Y),
    "remainder.Scalar fmod.Scalar": (WHOLE, -3),
    "pow.Tensor_Tensor": (POSITIVE, Y),
    "pow.Scalar": (2.5, X),
}
CASES = [
    *((name, (value,), {}) for names, value in UNARY.items() for name in names.split()),
    *((name, args, {}) for names, args in PAIRS.items() for name in names.split()),
    ("add.Tensor", (X, Y), {"alpha": 2}),
    ("sub.Scalar", (X, 3), {"alpha": 2}),
    ("div.Tensor_mode", (WHOLE, WHOLE.flip(1) * 2 + 1), {"rounding_mode": "trunc"}),
    ("div.Tensor_mode", (WHOLE, WHOLE.flip(1) * 2 + 1), {"rounding_mode": "floor"}),
    ("div.Scalar_mode", (X, 0.3), {"rounding_mode": "trunc"}),
    ("pow.Tensor_Scalar", (X, 3), {}),
    ("pow.Tensor_Scalar", (POSITIVE, -0.5), {}),
    ("pow.Tensor_Scalar", (POSITIVE.half(), 2.0), {}),
    ("round.decimals", (X,), {"decimals": 1}),
    ("addcmul", (X, Y, X), {"value": 0.5}),
    ("addcdiv", (X, Y, POSITIVE), {"value": 0.5}),
    ("clamp", (X, -0.5, 0.5), {}),
    ("clamp", (WHOLE, None, 2), {}),
    ("clamp.Tensor", (X, Y, Y + 1), {}),
    ("elu", (X, 1.5, 1.1, 0.7), {}),
    ("gelu", (X,), {"approximate": "tanh"}),
    ("leaky_relu", (X, 0.2), {}),
    ("hardtanh", (X, -0.2, 0.3), {}),
    ("copy", (X, Y[:1]), {}),
    ("where.self", (SIGNS, X, Y), {}),
    ("where.ScalarOther", (SIGNS, X, 0.5), {}),
    ("where.ScalarSelf", (SIGNS, 0.5, X), {}),
    ("where.Scalar", (SIGNS, 1, 0), {}),
    ("_to_copy", (X,), {"dtype": torch.float16}),
    ("_to_copy", (X * 3,), {"dtype": torch.int64}),
    ("_to_copy", (WHOLE,), {"dtype": torch.bool}),
    ("lift_fresh_copy", (X,), {}),
    # ------------------------------------------------------------------------------------ shaping
    ("view", (X, [2, -1]), {}),
    ("reshape", (X, [6, 2]), {}),
    ("_unsafe_view", (X, [12]), {}),
    ("permute", (IMAGE, [0, 2, 3, 1]), {}),
    ("expand", (X[:, :1], [2, -1, 5]), {}),
    ("squeeze", (X[None, :, :1],), {}),
    ("squeeze.dim", (X[None], 0), {}),
    ("squeeze.dim", (X, 0), {}),
    ("squeeze.dims", (X[None, :, None], [0, -2]), {}),
    ("unsqueeze", (X, -1), {}),
    ("cat", ([X, WHOLE, torch.zeros(0)], -1), {}),
    ("split_with_sizes", (X, [1, 3], -1), {}),
    ("slice.Tensor", (X, 1, -3, 2**63 - 1, 2), {}),
    ("slice.Tensor", (X, 0, 1, -1), {}),
    ("select.int", (X, -1, -2), {}),
    ("index.Tensor", (IMAGE, [None, PLACES[:, 0], PLACES[:, 1]]), {}),
    ("index.Tensor", (X, [torch.tensor([0, -1])]), {}),
    ("index_select", (X, -1, torch.tensor([1, 1, 0])), {}),
    ("gather", (X, 1, PLACES), {}),
    ("gather", (X, -1, PLACES[:2, :1]), {}),
    ("flip", (X, [0, -1]), {}),
    ("repeat", (X, [2, 1, 3]), {}),
    ("constant_pad_nd", (X, [1, -1, 0, 2], 0.5), {}),
    ("unfold", (X, -1, 3, 1), {}),
    ("index_put", (X, [torch.tensor([0, 2]), None], Y[:2]), {}),
    ("index_put", (X, [torch.tensor([0, 2, 0]), torch.tensor([1, 3, 1])], X[:, 0], True), {}),
    ("index_put", (X, [SIGNS], torch.tensor(7.0)), {}),
    ("scatter.src", (X, 1, PLACES, Y), {}),
    ("scatter.value", (X, -1, PLACES, 2.0), {}),
    ("slice_scatter", (X, Y[:, :2], 1, 1, 2**63 - 1, 2), {}),
    ("select_scatter", (X, Y[0], 0, -1), {}),
    ("sym_size.int", (X, 1), {}),
    # ----------------------------------------------------------------------------------- reducing
    *((name, (WHOLE if name != "mean" else X,), {}) for name in SUMS.split()),
    ("sum.dim_IntList", (SIGNS, [-1], True), {}),
    ("sum.dim_IntList", (X, []), {}),
    ("mean.dim", (X, [0, 1]), {}),
    ("prod.dim_int", (X, 1, True), {}),
    ("cumsum", (WHOLE, -1), {}),
    ("cumprod", (X, 0), {}),
    ("var.correction", (X, [1]), {"correction": 0, "keepdim": True}),
    ("var.correction", (X,), {}),
    ("var_mean.correction", (X, [0]), {"correction": 1}),
    *(("linalg_vector_norm", (X, order, [1], True), {}) for order in (0, 1, 2, 3)),
    *(("linalg_vector_norm", (X, order), {}) for order in (float("inf"), float("-inf"))),
    ("linalg_vector_norm", (X, 2, None, True), {}),
    ("amax", (X, [1]), {}),
    ("amin", (X, []), {}),
    ("max", (WHOLE,), {}),
    ("min", (X,), {}),
    ("max.dim", (X, 1), {}),
    ("min.dim", (WHOLE, 0, True), {}),
    *((f"{name}.{dims}", (SIGNS, at), {}) for name in ("any", "all") for dims, at in (("dim", 1),)),
    *((f"{name}.dims", (X, [0], True), {}) for name in ("any", "all")),
    ("any", (SIGNS,), {}),
    ("all", (SIGNS,), {}),
    ("argmax", (X, -1), {}),
    ("argmin", (X,), {}),
    ("sort", (WHOLE, -1, True), {}),
    ("sort.stable", (X,), {"stable": True, "dim": 0}),
    ("topk", (X, 2), {}),
    ("topk", (X, 2, 0, False), {}),
    ("median.dim", (X, -1, True), {}),
    ("median.dim", (X, 0), {}),
    # ------------------------------------------------------------------------------------- layers
    ("mm", (X, Y.T), {}),
    ("bmm", (IMAGE[0], IMAGE[0].mT), {}),
    ("addmm", (Y[0, :3], X, Y.T), {"beta": 0.5, "alpha": 2.0}),
    ("baddbmm", (torch.zeros(1), IMAGE[0], IMAGE[0].mT), {}),
    (
        "convolution",
        (IMAGE, WEIGHT, real(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        {},
    ),
    ("convolution", (IMAGE[0], real(3, 6, 2), None, [1], [1], [1], False, [0], 1), {}),
    (
        "convolution",
        (IMAGE, TURNED, real(6), [2, 3], [1, 0], [1, 2], True, [1, 0], 2),
        {},
    ),
    ("native_layer_norm", (IMAGE, [6, 5], real(6, 5), real(6, 5), 1e-5), {}),
    ("native_group_norm", (IMAGE, real(4), None, 2, 4, 30, 2, 1e-5), {}),
    (
        "_native_batch_norm_legit_no_training",
        (IMAGE, real(4), real(4), real(4), POSITIVE[0], 0.1, 1e-5),
        {},
    ),
    ("_native_batch_norm_legit.no_stats", (IMAGE, None, real(4), True, 0.1, 1e-5), {}),
    # Halves whose squares, or whose products with a number, leave their range.
    ("native_layer_norm", (100 * IMAGE.half(), [6, 5], real(6, 5).half(), None, 1e-5), {}),
    ("native_group_norm", (300 * IMAGE.half(), real(4).half(), None, 2, 4, 30, 2, 1e-5), {}),
    ("mul.Tensor", (X.half() / 8, 70000.0), {}),
    ("mean.dim", (torch.full((3, 9), 60000.0).half(), [1]), {}),
    ("_softmax", (12 * X.half(), -1, False), {}),
    ("_softmax", (X, -1, False), {}),
    ("_log_softmax", (X, 0, False), {}),
    ("max_pool2d_with_indices", (IMAGE, [3, 2], [2, 2], [1, 0], [1, 2]), {}),
    ("max_pool2d_with_indices", (IMAGE, [2]), {}),
    ("avg_pool2d", (IMAGE, [2, 2], [1, 2], [1, 1], False, False), {}),
    ("avg_pool2d", (IMAGE, [2]), {}),
    ("avg_pool2d", (IMAGE, [2, 2], [], [0, 0], False, True, 3), {}),
    ("embedding", (X, PLACES.clamp(max=2)), {}),
    (
        "_trilinear",
        (X[:, :2], real(5, 2, 4), X, [1, 3], [0], [1, 2], [2, 3]),
        {},
    ),
    # ------------------------------------------------------------------------ scatters and places
    ("scatter_add", (X, 1, PLACES, Y), {}),
    ("scatter_add", (X, -2, PLACES.clamp(max=2), Y), {}),
    ("scatter_add", (WHOLE, 1, torch.zeros(2, 3, dtype=torch.int64), WHOLE), {}),
    ("scatter_add", (X, 1, torch.zeros(3, 0, dtype=torch.int64), Y), {}),
    ("scatter_add", (torch.tensor(2.0), 0, torch.tensor([0]), torch.tensor([3.0])), {}),
    ("scatter_add", (X.half(), 0, torch.zeros(3, 4, dtype=torch.int64), Y.half()), {}),
    ("scatter.src", (torch.tensor(2.0), -1, torch.tensor(0), torch.tensor(3.0)), {}),
    *(("scatter.reduce", (X, 1, PLACES, Y), {"reduce": how}) for how in ("add", "multiply")),
    *(
        ("scatter.value_reduce", (X, 0, PLACES.T.clamp(max=2), 3.0), {"reduce": how})
        for how in ("add", "multiply")
    ),
    *(
        (
            "scatter_reduce.two",
            (into, 1, torch.tensor([[0, 2, 0], [1, 1, 1], [3, 0, 0]]), source, how),
            {"include_self": kept},
        )
        for into, source in ((X, Y), (WHOLE, WHOLE.flip(0)), (X, GAPS[:, :4]))
        for how in ("sum", "prod", "mean", "amax", "amin")
        for kept in (True, False)
    ),
    ("index_select", (torch.tensor(3.0), 0, torch.tensor([0])), {}),
    *(("diagonal", (IMAGE, *at), {}) for at in ((), (1, -1, 2), (-2, 2, 3), (9, 0, 1))),
    # ------------------------------------------------------------------------- orders and searches
    *(
        (name, (x, dim), {})
        for name in ("cummax", "cummin")
        for x in (TIES, GAPS, WHOLE, SIGNS, TIES.half(), torch.zeros(2, 0), torch.zeros(0, 2))
        for dim in (0, -1)
    ),
    ("cummax", (torch.tensor(3.0), 0), {}),
    ("cummin", (torch.tensor(3), -1), {}),
    *(
        ("logcumsumexp", (x, dim), {})
        for x in (X, GAPS, X.half(), torch.zeros(2, 0))
        for dim in (0, -1)
    ),
    ("logcumsumexp", (torch.tensor(3.0), 0), {}),
    ("kthvalue", (X, 2), {}),
    ("kthvalue", (WHOLE, 3, 0, True), {}),
    ("kthvalue", (torch.tensor(3.0), 1), {}),
    *(("median", (x,), {}) for x in (X, WHOLE, GAPS, X[0])),
    ("median.dim", (GAPS, 1), {}),
    ("median.dim", (GAPS, 0, True), {}),
    ("median.dim", (torch.tensor(3.0), 0), {}),
    *(
        ("searchsorted.Tensor", (ordered, sought), {"right": right})
        for ordered, sought in (
            (STEPS, SOUGHT),
            (STEPS, torch.tensor(0.5)),
            (TIES.sort(-1)[0], torch.tensor([[3.0, NAN], [2.0, 0.0], [INF, 1.0]])),
            (GAPS, GAPS.flip(1)),  # in no order
            (WHOLE[0].sort()[0], WHOLE),
            (torch.zeros(0), SOUGHT),
            (torch.arange(8).half(), SOUGHT.half()),
        )
        for right in (False, True)
    ),
    ("searchsorted.Tensor", (STEPS, SOUGHT), {"side": "right", "out_int32": True}),
    ("searchsorted.Tensor", (GAPS, GAPS), {"sorter": GAPS.argsort(-1)}),
    ("searchsorted.Scalar", (STEPS, 0.5), {}),
    ("searchsorted.Scalar", (WHOLE[0].sort()[0], 2.5), {"side": "right"}),
    *(("bucketize.Tensor", (SOUGHT, STEPS), {"right": right}) for right in (False, True)),
    ("bucketize.Tensor", (WHOLE, torch.tensor([-1, 4, 4, 9])), {"out_int32": True}),
    ("bucketize.Tensor", (torch.zeros(2, 0), STEPS), {}),
    ("bucketize.Scalar", (0.5, STEPS), {"right": True}),
    # ------------------------------------------------------------------------------ linear algebra
    *(
        ("linalg_cholesky_ex", (a,), {"upper": upper})
        for a in (DEFINITE, DEFINITE + SQUARE.triu(1), torch.zeros(2, 0, 0))
        for upper in (False, True)
    ),
    *(
        ("cholesky", (DEFINITE + SQUARE.triu(1), upper), {})
        for upper in (False, True)
        if hasattr(torch.ops.aten, "cholesky")  # newer releases of torch have the one above only
    ),
    *(("cholesky_solve", (TALL[:, :3], DEFINITE[upper], upper), {}) for upper in (False, True)),
    *(("cholesky_inverse", (DEFINITE, upper), {}) for upper in (False, True)),
    *(
        (
            "linalg_solve_triangular",
            (DEFINITE, SQUARE),
            {"upper": upper, "left": left, "unitriangular": unit},
        )
        for upper in (False, True)
        for left in (False, True)
        for unit in (False, True)
    ),
    ("linalg_solve_triangular", (DEFINITE[0], SQUARE[:, :, :1]), {"upper": True}),
    ("triangular_solve", (TALL[:, :3, :2], DEFINITE), {}),
    ("triangular_solve", (SQUARE, DEFINITE, False, True, True), {}),
    *(
        ("_linalg_solve_ex", (SQUARE, b), {"left": left})
        for b, left in ((TALL[:, :3], True), (TALL, False), (SQUARE[:, 0], True))
    ),
    ("_linalg_solve_ex", (SQUARE[0], real(3)), {}),
    ("_linalg_solve_ex", (SQUARE[0], real(5, 3, 1)), {}),
    ("_linalg_solve_ex", (torch.zeros(2, 0, 0), torch.zeros(2, 0, 4)), {}),
    ("linalg_inv_ex", (SQUARE,), {}),
    ("linalg_lu_factor_ex", (SQUARE,), {}),
    ("linalg_lu_factor_ex", (TALL,), {}),
    *(("_linalg_det", (a,), {}) for a in (SQUARE, SQUARE[0], SINGULAR, torch.zeros(2, 0, 0))),
    *(("_linalg_slogdet", (a,), {}) for a in (SQUARE, SINGULAR[1], torch.zeros(0, 0))),
    *(("linalg_qr", (TALL, mode), {}) for mode in ("reduced", "complete", "r")),
    ("linalg_qr", (TALL.mT,), {}),
    *(("linalg_pinv.atol_rtol_tensor", (a,), {}) for a in (TALL, FLAT, FLAT.T)),
    (
        "linalg_pinv.atol_rtol_tensor",
        (TALL,),
        {"atol": torch.tensor(1.0), "rtol": torch.tensor(0.1)},
    ),
    ("linalg_pinv.atol_rtol_tensor", (TALL,), {"atol": torch.tensor([1.0, 0.0])}),
    ("linalg_pinv.atol_rtol_tensor", (SQUARE,), {"hermitian": True}),
    *(
        ("linalg_matrix_exp", (a,), {})
        for a in (SQUARE, 3 * SQUARE[0], torch.zeros(2, 2), SQUARE[:, :1, :1])
    ),
    # ------------------------------------------------------------------------ pools and image sizes
    ("max_pool3d_with_indices", (VOLUME, [2, 1, 3], [2, 2, 1], [1, 0, 1], [2, 1, 1]), {}),
    ("avg_pool3d", (VOLUME, [2, 3, 1], [], [1, 1, 0], False, False), {}),
    *(
        ("_adaptive_avg_pool2d", (IMAGE, sizes), {})
        for sizes in ([2, 3], [6, 5], [9, 7], [4, 1], [0, 2])
    ),
    ("_adaptive_avg_pool2d", (IMAGE[0], [5, 2]), {}),
    ("_adaptive_avg_pool2d", (IMAGE.half(), [5, 2]), {}),
    ("_adaptive_avg_pool2d", (IMAGE[:0], [5, 2]), {}),
    ("_adaptive_avg_pool2d", (IMAGE.where(IMAGE < 2, INF), [4, 3]), {}),
    ("_adaptive_avg_pool3d", (VOLUME, [2, 3, 4]), {}),
    *(("adaptive_max_pool2d", (IMAGE, sizes), {}) for sizes in ([2, 3], [9, 7])),
    ("adaptive_max_pool2d", (IMAGE.where(IMAGE < 2, NAN), [4, 3]), {}),
    ("adaptive_max_pool3d", (VOLUME, [2, 3, 4]), {}),
    *(
        ("upsample_nearest2d.vec", (IMAGE, sizes, None), {})
        for sizes in ([9, 7], [4, 2], [6, 5], [12, 10])
    ),
    *(
        ("upsample_nearest2d.vec", (IMAGE, None, [a, b]), {})
        for a, b in ((2.0, 2.0), (1.7, 0.4), (3.3, 1.1))
    ),
    ("upsample_nearest2d", (IMAGE, [9, 7], 1.7, 1.6), {}),
    ("upsample_nearest2d", (IMAGE.half(), [9, 7]), {}),
    *(
        ("upsample_bilinear2d.vec", (IMAGE, sizes, aligned, None), {})
        for sizes in ([9, 7], [4, 1])
        for aligned in (False, True)
    ),
    ("upsample_bilinear2d.vec", (IMAGE, None, False, [1.7, 0.4]), {}),
    ("upsample_bilinear2d", (IMAGE, [9, 7], False, 1.7, 1.6), {}),
    # ----------------------------------------------------------------------------------- embedding bags
    *(
        (
            "_embedding_bag_forward_only",
            (WORDS, BAGS, torch.tensor(offsets), False, mode, False, None, last, pad),
            {},
        )
        for offsets, last in (([0, 2, 2, 4], False), ([0, 1, 1, 6], True), ([0], False))
        for mode in (0, 1, 2)
        for pad in (-1, 2)
    ),
    ("_embedding_bag", (WORDS, BAGS, torch.tensor([0, 3]), False, 0, False, torch.arange(6.0)), {}),
    ("_embedding_bag", (WORDS, BAGS[:0], torch.tensor([0, 0]), False, 2), {}),
    # ------------------------------------------------------------------------------------- making
    ("full", ([2, 3], 1.5), {"dtype": torch.float32}),
    ("full", ([2], 7), {"dtype": torch.int64}),
    ("full_like", (X, 2), {}),
    ("scalar_tensor", (2.5,), {}),
    ("arange.start_step", (1, 9, 3), {"dtype": torch.int64}),
    ("arange.start_step", (0.0, 1.0, 0.25), {}),
]
NOT_COMPARED = {"empty.memory_format", "empty_permuted.default"}  # torch leaves what is in it open
UP_TO_SIGNS = {"_linalg_eigh.default", "_linalg_svd.default"}


def by_scatter_reduce(x, dim, index, source, *, reduce):
    how = {"add": "sum", "multiply": "prod"}[reduce]
    return torch.scatter_reduce(x, dim, index, source, how)


def by_solve_triangular(b, a, upper=True, transpose=False, unitriangular=False):
    a, upper = (a.mT, not upper) if transpose else (a, upper)
    return torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=unitriangular), a


DEPRECATED = {"scatter.reduce": by_scatter_reduce, "triangular_solve": by_solve_triangular}
"""What torch advises in the place of operators that it warns of, and that may still be in policies."""


def wanted_of(name, args, kwargs):
    if name in DEPRECATED:
        return DEPRECATED[name](*args, **kwargs)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, **kwargs)


def is_half(case):
    leaves, _ = torch.utils._pytree.tree_flatten(case[1:])
    return any(getattr(leaf, "dtype", leaf) is torch.float16 for leaf in leaves)


def computed(cases):
    """Compute cases in one program: compiling is what such tests cost."""
    arrays, build = [], []
    for name, args, kwargs in cases:
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        arrays.append([as_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])
        build.append((entry_of(name), leaves, tree, wanted_of(name, args, kwargs)))

    def compute(arrays):
        return [one(iter(given), *case) for given, case in zip(arrays, build, strict=True)]

    def one(tensors, entry, leaves, tree, like):
        filled = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(filled, tree)
        return entry.apply(args, kwargs, like)

    return jax.jit(compute)(arrays)


FULL = [case for case in CASES if not is_half(case)]
HALF = [case for case in CASES if is_half(case)]


def _first_of_each(cases):
    """Give the number of the first case of each operator."""
    first = {}
    for number, (name, *_) in enumerate(cases):
        first.setdefault(name, number)
    return list(first.values())


FIRST = _first_of_each(FULL)


@pytest.fixture(scope="module")
def results_of_the_first():
    return dict(zip(FIRST, computed([FULL[number] for number in FIRST]), strict=True))


@pytest.fixture(scope="module")
def results():
    return computed(FULL)


@pytest.fixture(scope="module")
def results_in_half_precision():
    if not HAS_FLOAT16:
        pytest.skip("XLA has no float16 where the CPU has no instructions for it (F16C)")
    return computed(HALF)


@pytest.mark.rounding
@pytest.mark.parametrize("case", FIRST, ids=lambda case: FULL[case][0])
def test_an_operator_gives_what_torch_gives(results_of_the_first, case):
    compare_case(results_of_the_first[case], FULL[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(FULL)), ids=[name for name, *_ in FULL])
def test_an_operator_gives_what_torch_gives_whatever_its_arguments(results, case):
    compare_case(results[case], FULL[case])


@pytest.mark.parametrize("case", range(len(HALF)), ids=[name for name, *_ in HALF])
def test_an_operator_gives_what_torch_gives_in_half_precision(results_in_half_precision, case):
    compare(results_in_half_precision[case], wanted_of(*HALF[case]))


def test_every_operator_of_the_table_is_compared_here_or_drawn():
    compared = {name if "." in name else f"{name}.default" for name, _, _ in CASES}

    known = {name for name in TABLE if hasattr(torch.ops.aten, name.partition(".")[0])}
    assert compared | NOT_COMPARED | UP_TO_SIGNS | set(DRAWING) == known


@pytest.mark.parametrize("name", ["full", "full_like", "scalar_tensor", "arange.start_step"])
def test_an_integer_that_jax_cannot_hold_is_refused(name):
    args = {"full": ([2], 2**40), "full_like": (jnp.zeros(2), 2**40), "scalar_tensor": (2**40,)}

    with pytest.raises(OverflowError, match="1099511627776 does not fit into int32"):
        entry_of(name).compute(*args.get(name, (2**40, 2**40)))


BAD_INDEX = {  # what is read or written beyond the end, where torch raises; a negative one is beyond too
    "gather": lambda x, i: (x, 1, i),
    "index_select": lambda x, i: (x, 1, i[0]),
    "embedding": lambda x, i: (x.T, i),
    "scatter.src": lambda x, i: (x, 1, i, x),
    "scatter.value": lambda x, i: (x, 1, i, 2.0),
    "scatter_add": lambda x, i: (x, 1, i, x),
    "scatter_reduce.two": lambda x, i: (x, 1, i, x, "mean"),
    "_embedding_bag": lambda x, i: (x.T, i[0], torch.zeros(1, dtype=torch.int64)),
}


@pytest.mark.parametrize("place", [-1, 4])
@pytest.mark.parametrize("name", BAD_INDEX)
def test_an_index_out_of_range_gives_nan_where_torch_raises(name, place):
    args = BAD_INDEX[name](X, torch.tensor([[0, place]]))
    with pytest.raises((IndexError, RuntimeError)):
        wanted_of(name, args, {})

    arrays = [jnp.asarray(as_array(a)) if isinstance(a, torch.Tensor) else a for a in args]
    out = entry_of(name).compute(*arrays)

    assert jnp.isnan(out[0] if isinstance(out, tuple) else out).any()


def test_an_index_beyond_the_end_gives_the_least_integer_where_there_is_no_nan():
    out = entry_of("scatter_add").compute(
        jnp.asarray(as_array(WHOLE)), 1, jnp.array([[4]]), jnp.ones((1, 1), int)
    )

    assert (out == jnp.iinfo(jnp.int32).min).all()


def test_places_assigned_through_indices_out_of_range_give_nan():
    out = entry_of("index_put").compute(jnp.zeros(3), [jnp.array([0, 3])], jnp.ones(2), True)

    assert jnp.isnan(out).all()


@pytest.mark.parametrize(("offsets", "last"), [([1, 2], False), ([0, 4], True)])
def test_bags_that_leave_some_indices_out_give_nan(offsets, last):
    offsets = jnp.array(offsets)

    (out,) = entry_of("_embedding_bag").compute(
        WORDS.numpy(), BAGS.int().numpy(), offsets, False, 0, False, None, last
    )

    assert jnp.isnan(out).all()


# ------------------------------------------------------------- matrices: what fails, and open signs


def test_a_matrix_that_is_not_positive_definite_gives_nan_and_the_info_of_torch():
    factor, info = entry_of("linalg_cholesky_ex").compute(HALFBAD.numpy())

    assert info.tolist() == torch.linalg.cholesky_ex(HALFBAD).info.tolist() == [0, 2]
    np.testing.assert_allclose(factor[0], torch.linalg.cholesky(HALFBAD[0]), atol=1e-5)
    assert jnp.isnan(factor[1]).any()


@pytest.mark.parametrize("name", ["linalg_inv_ex", "_linalg_solve_ex"])
def test_a_singular_matrix_gives_nan_and_the_info_of_torch(name):
    args = (SINGULAR,) if name == "linalg_inv_ex" else (SINGULAR, torch.ones(2, 3, 1))

    out, *_, info = entry_of(name).compute(*(a.numpy() for a in args))

    wanted = torch.linalg.inv_ex(SINGULAR).info  # where the zero lies is up to the version of torch
    assert (info > 0).tolist() == (wanted > 0).tolist() == [False, True]
    np.testing.assert_allclose(out[0], wanted_of(name, args, {})[0][0], rtol=1e-4, atol=1e-4)
    assert jnp.isnan(out[1]).all()


@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigenvectors_are_those_of_torch_up_to_their_signs(triangle):
    a = DEFINITE + SQUARE.triu(1)

    values, vectors = entry_of("_linalg_eigh").compute(a.numpy(), triangle)

    wanted = torch.linalg.eigh(a, triangle)
    np.testing.assert_allclose(values, wanted.eigenvalues, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.abs(vectors), wanted.eigenvectors.abs(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("full", [False, True])
def test_singular_vectors_put_the_matrix_together_again(full):
    u, sizes, v = entry_of("_linalg_svd").compute(TALL.numpy(), full)
    alone = entry_of("_linalg_svd").compute(TALL.numpy(), compute_uv=False)[1]

    assert u.shape == tuple(torch.linalg.svd(TALL, full).U.shape)
    assert v.shape == (2, 3, 3)
    np.testing.assert_allclose(u[..., :3] * sizes[:, None] @ v, TALL, rtol=1e-4, atol=1e-4)
    for found in (sizes, alone):
        np.testing.assert_allclose(found, torch.linalg.svdvals(TALL), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------- refusals

REFUSED = {
    "avg_pool3d": ((jnp.zeros((1, 1, 4, 4, 4)), [3], [], 0, True), "ceil_mode=True"),
    "linalg_lu_factor_ex": ((jnp.eye(2),), "pivot=False"),
    "random.from": ((jax.random.PRNGKey(0), jnp.zeros(2), 0), "without an upper end"),
    "randint": ((jax.random.PRNGKey(0), 2**40, [2]), "1099511627776 does not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_not_covered_is_refused(name):
    args, message = REFUSED[name]

    with pytest.raises((NotImplementedError, OverflowError), match=message):
        entry_of(name).compute(*args, **({"pivot": False} if "lu_" in name else {}))


@pytest.mark.parametrize("name", DRAWING)
def test_a_generator_of_a_modules_own_is_refused(name):
    with pytest.raises(NotImplementedError, match="draws follow the env's seed"):
        TABLE[name].compute(jax.random.PRNGKey(0), generator=torch.Generator())


def as_array(tensor):
    return tensor.numpy().astype(np.int32) if tensor.dtype == torch.int64 else tensor.numpy()


def entry_of(name):
    return TABLE[name if "." in name else f"{name}.default"]


def compare_case(got, case):
    """Compare what an operator gave with torch; factors are of a matrix, in torch 2.11 and older of its transpose."""
    wanted = wanted_of(*case)
    compare(*((x[0], x[-1]) if case[0] == "_linalg_solve_ex" else x for x in (got, wanted)))


def compare(got, wanted):
    if isinstance(wanted, (list, tuple)):
        assert len(got) <= len(wanted)  # pools give no indices, batch norm no statistics
        for one, other in zip(got, wanted, strict=False):
            compare(one, other)
        return
    if isinstance(wanted, int):
        assert int(got) == wanted
        return
    narrow = {torch.int64: jnp.int32}.get(wanted.dtype, str(wanted.dtype).removeprefix("torch."))
    assert got.dtype == narrow
    assert got.shape == tuple(wanted.shape)
    tolerance = 1e-3 if wanted.dtype == torch.float16 else 1e-5
    np.testing.assert_allclose(np.asarray(got), wanted.numpy(), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------- randomness

ROWS = 4000
DRAWS = [  # operator, arguments for ROWS rows, mean, variance
    ("rand", ([ROWS],), 0.5, 1 / 12),
    ("randn", ([ROWS],), 0.0, 1.0),
    ("rand_like", (jnp.zeros(ROWS),), 0.5, 1 / 12),
    ("randn_like", (jnp.zeros(ROWS),), 0.0, 1.0),
    ("randint.low", (2, 6, [ROWS]), 3.5, 1.25),
    ("rand.generator", ([ROWS],), 0.5, 1 / 12),
    ("randn.generator", ([ROWS],), 0.0, 1.0),
    ("randint", (5, [ROWS]), 2.0, 2.0),
    ("randint.generator", (5, [ROWS]), 2.0, 2.0),
    ("randint.low_generator", (2, 6, [ROWS]), 3.5, 1.25),
    ("randint_like", (jnp.zeros(ROWS), 5), 2.0, 2.0),
    ("randint_like.low_dtype", (jnp.zeros(ROWS), 2, 6), 3.5, 1.25),
    ("random.to", (jnp.zeros(ROWS), 5), 2.0, 2.0),
    ("random.from", (jnp.zeros(ROWS), 2, 6), 3.5, 1.25),
    ("randperm", (ROWS,), (ROWS - 1) / 2, (ROWS**2 - 1) / 12),
    ("randperm.generator", (ROWS,), (ROWS - 1) / 2, (ROWS**2 - 1) / 12),
    ("geometric", (jnp.zeros(ROWS), 0.25), 4.0, 12.0),
    ("poisson", (jnp.full(ROWS, 3.0),), 3.0, 3.0),
    ("binomial", (jnp.full(ROWS, 6.0), jnp.full(ROWS, 0.3)), 1.8, 1.26),
    ("log_normal", (jnp.zeros(ROWS), 0.0, 0.25), 1.0317, 0.0687),
    ("normal_functional", (jnp.zeros(ROWS), 2.0, 3.0), 2.0, 9.0),
    ("normal.Tensor_Tensor", (jnp.full(ROWS, 2.0), jnp.full(ROWS, 3.0)), 2.0, 9.0),
    ("normal.Tensor_float", (jnp.full(ROWS, 2.0), 0.5), 2.0, 0.25),
    ("normal.float_Tensor", (2.0, jnp.full(ROWS, 0.5)), 2.0, 0.25),
    ("uniform", (jnp.zeros(ROWS), -1.0, 3.0), 1.0, 16 / 12),
    ("exponential", (jnp.zeros(ROWS), 0.5), 2.0, 4.0),
    ("bernoulli", (jnp.full(ROWS, 0.3),), 0.3, 0.21),
    ("bernoulli.p", (jnp.zeros(ROWS), 0.3), 0.3, 0.21),
    ("multinomial", (jnp.tile(jnp.array([0.0, 1.0, 3.0]), (ROWS, 1)), 1), 1.75, 0.1875),
    ("_standard_gamma", (jnp.full(ROWS, 2.0),), 2.0, 2.0),
    ("_sample_dirichlet", (jnp.full((ROWS, 2), 1.5),), 0.5, 0.0625),
]


@pytest.mark.parametrize(("name", "args", "mean", "variance"), DRAWS, ids=[d[0] for d in DRAWS])
def test_drawn_numbers_have_the_mean_and_the_spread_of_torchs(name, args, mean, variance):
    entry = entry_of(name)

    drawn = np.asarray(entry.compute(jax.random.PRNGKey(0), *args), dtype=float)

    assert drawn.shape[0] == ROWS
    assert abs(drawn.mean() - mean) < 5 * np.sqrt(variance / ROWS)
    assert drawn.var() == pytest.approx(variance, rel=0.2)


def test_a_draw_without_replacement_gives_each_index_once():
    weights = jnp.tile(jnp.array([0.0, 1.0, 3.0, 2.0]), (50, 1))

    drawn = np.asarray(TABLE["multinomial.default"].compute(jax.random.PRNGKey(1), weights, 3))

    assert drawn.shape == (50, 3)
    assert (np.sort(drawn, -1) == [1, 2, 3]).all()


def test_dropout_drops_what_it_says_and_scales_the_rest():
    out, kept = TABLE["native_dropout.default"].compute(
        jax.random.PRNGKey(0), jnp.ones(ROWS), 0.25, True
    )

    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert ((np.asarray(out) > 0) == kept).all()
    assert 0.7 < kept.mean() < 0.8


def test_cauchys_draws_have_its_quartiles():
    drawn = entry_of("cauchy").compute(jax.random.PRNGKey(0), jnp.zeros(ROWS), 2.0, 3.0)

    np.testing.assert_allclose(np.percentile(drawn, [25, 50, 75]), [-1.0, 2.0, 5.0], atol=0.6)


def test_a_permutation_holds_each_number_once():
    drawn = entry_of("randperm").compute(jax.random.PRNGKey(0), 9)

    assert sorted(drawn.tolist()) == list(range(9))


def test_every_operator_that_draws_is_tested_here():
    tested = {name if "." in name else f"{name}.default" for name, *_ in DRAWS}

    assert tested | {"native_dropout.default", "cauchy.default"} == set(DRAWING)
