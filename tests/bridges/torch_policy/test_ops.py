"""Each operator of the table gives what torch gives, in torch's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridges.torch_policy.ops import TABLE
from bridges.torch_policy.ops.drawing import DRAWING

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
    # ------------------------------------------------------------------------------------- making
    ("full", ([2, 3], 1.5), {"dtype": torch.float32}),
    ("full", ([2], 7), {"dtype": torch.int64}),
    ("full_like", (X, 2), {}),
    ("scalar_tensor", (2.5,), {}),
    ("arange.start_step", (1, 9, 3), {"dtype": torch.int64}),
    ("arange.start_step", (0.0, 1.0, 0.25), {}),
]
NOT_COMPARED = {"empty.memory_format"}  # torch leaves what is in it open


def wanted_of(name, args, kwargs):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, **kwargs)


@pytest.fixture(scope="module")
def results():
    """Compute all cases in one program: compiling is what such tests cost."""
    arrays, build = [], []
    for name, args, kwargs in CASES:
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        arrays.append([as_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])
        build.append((entry_of(name), leaves, tree, wanted_of(name, args, kwargs)))

    def compute(arrays):
        return [one(iter(given), *case) for given, case in zip(arrays, build, strict=True)]

    def one(given, entry, leaves, tree, like):
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(filled, tree)
        return entry.apply(args, kwargs, like)

    return jax.jit(compute)(arrays)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_an_operator_gives_what_torch_gives(results, case):
    compare(results[case], wanted_of(*CASES[case]))


def test_every_operator_of_the_table_is_compared_here_or_drawn():
    compared = {name if "." in name else f"{name}.default" for name, _, _ in CASES}

    assert compared | NOT_COMPARED | set(DRAWING) == set(TABLE)


@pytest.mark.parametrize("name", ["full", "full_like", "scalar_tensor", "arange.start_step"])
def test_an_integer_that_jax_cannot_hold_is_refused(name):
    args = {"full": ([2], 2**40), "full_like": (jnp.zeros(2), 2**40), "scalar_tensor": (2**40,)}

    with pytest.raises(OverflowError, match="1099511627776 does not fit into int32"):
        entry_of(name).compute(*args.get(name, (2**40, 2**40)))


def as_array(tensor):
    return tensor.numpy().astype(np.int32) if tensor.dtype == torch.int64 else tensor.numpy()


def entry_of(name):
    return TABLE[name if "." in name else f"{name}.default"]


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


def test_every_operator_that_draws_is_tested_here():
    tested = {name if "." in name else f"{name}.default" for name, *_ in DRAWS}

    assert tested | {"native_dropout.default"} == set(DRAWING)
