"""Operators of torch that JAX computes, and no other library: `TABLE` holds these and those of every library.

Random numbers: torch's generators are replaced by a JAX key. The distribution is that of torch, the numbers are others.
Each operator of a graph gets its own key; how the keys follow each other is decided in `graph`. A generator that a
module brings along is refused: its state would be the same at every step.

Linear algebra: where torch looks at the outcome and raises (a matrix is singular, or not positive definite), a program
cannot: it gives NaN for that matrix. The ``info`` of torch is computed as torch counts it.

Conventions
    matrix   last two axes; all in front of them are a batch.
    info     int32, 0 where it worked, otherwise the number of the row, from 1, where it did not.
    rank     number of axes that are pooled, the last ones: 2 for images, 3 for volumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.scipy.linalg import expm

from envkit_bridges.jax.policy.jax_library import FULL, JAX, matmul, picked
from envkit_bridges.policy.core_aten import RULES, Op, bound, by_name, in_width


def table(entries: dict[str, Callable[..., Any]], *, draws: bool = False) -> dict[str, Op]:
    """Make operators of functions of JAX arrays; a key may hold several names, separated by spaces.

    Those that draw take a PRNG key before their other arguments.
    """
    return {name: Op(compute, JAX, draws=draws) for name, compute in by_name(entries).items()}


Key = jax.Array


def _draws(entries: dict[str, Callable[..., Any]]) -> dict[str, Op]:
    return table({names: _without_generator(draw) for names, draw in entries.items()}, draws=True)


def _without_generator(draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(
        key: Key, *args: object, generator: torch.Generator | None = None, **kwargs: object
    ) -> jax.Array:
        if generator is not None or any(isinstance(arg, torch.Generator) for arg in args):
            raise NotImplementedError(
                "a generator of the module's own is not covered; leave it out: draws follow the env's seed"
            )
        return draw(key, *args, **kwargs)

    return drawn


def _sized(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, size: draw(key, tuple(size))


def _alike(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda key, x: draw(key, x.shape)


def _normal_in(key: Key, x: jax.Array, mean: float = 0.0, std: float = 1.0) -> jax.Array:
    return mean + std * jax.random.normal(key, x.shape)


def _normal(key: Key, mean: jax.Array | float, std: jax.Array | float = 1.0) -> jax.Array:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    return mean + std * jax.random.normal(key, shape)


def _uniform(key: Key, x: jax.Array, low: float = 0.0, high: float = 1.0) -> jax.Array:
    return jax.random.uniform(key, x.shape, minval=low, maxval=high)


def _exponential(key: Key, x: jax.Array, rate: float = 1.0) -> jax.Array:
    return jax.random.exponential(key, x.shape) / rate


def _multinomial(key: Key, weights: jax.Array, count: int, replacement: bool = False) -> jax.Array:
    """Draw ``count`` indices from each row; without replacement by the Gumbel-top-k trick."""
    logits = jnp.log(weights)
    if replacement or count == 1:
        shape = (count, *weights.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(key, logits, shape=shape), 0, -1)
    noisy = logits + jax.random.gumbel(key, logits.shape)
    return jnp.argsort(-noisy, axis=-1)[..., :count]


def _dropout(
    key: Key, x: jax.Array, rate: float, training: bool | None = True
) -> tuple[jax.Array, jax.Array]:
    if not training:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    return jnp.where(kept, x, 0) * scale, kept


def _dirichlet(key: Key, concentration: jax.Array) -> jax.Array:
    return jax.random.dirichlet(key, concentration, concentration.shape[:-1])


def _integers(key: Key, low: int, high: int, shape: Sequence[int]) -> jax.Array:
    """Draw from ``low`` to one below ``high``."""
    return jax.random.randint(key, tuple(shape), in_width(jnp, low), in_width(jnp, high))


def _from(key: Key, x: jax.Array, low: int, high: int | None = None) -> jax.Array:
    if high is None:
        raise NotImplementedError("random_ without an upper end is not covered; give it one")
    return _integers(key, low, high, x.shape)


def _cauchy(key: Key, x: jax.Array, median: float = 0.0, sigma: float = 1.0) -> jax.Array:
    return median + sigma * jax.random.cauchy(key, x.shape)


def _log_normal(key: Key, x: jax.Array, mean: float = 1.0, std: float = 2.0) -> jax.Array:
    return jnp.exp(_normal_in(key, x, mean, std))


DRAWING = _draws(
    {
        "rand rand.generator": _sized(jax.random.uniform),
        "randn randn.generator": _sized(jax.random.normal),
        "rand_like": _alike(jax.random.uniform),
        "randn_like": _alike(jax.random.normal),
        "randint randint.generator": lambda key, high, size: _integers(key, 0, high, size),
        "randint.low randint.low_generator": _integers,
        "randint_like": lambda key, x, high: _integers(key, 0, high, x.shape),
        "randint_like.low_dtype": lambda key, x, low, high: _integers(key, low, high, x.shape),
        "random.to": lambda key, x, high: _integers(key, 0, high, x.shape),
        "random.from": _from,
        "randperm randperm.generator": lambda key, n: jax.random.permutation(key, n),
        "normal_functional": _normal_in,
        "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor": _normal,
        "uniform": _uniform,
        "exponential": _exponential,
        "cauchy": _cauchy,
        "log_normal": _log_normal,
        "geometric": lambda key, x, p: jax.random.geometric(key, p, x.shape),
        "poisson": lambda key, rate: jax.random.poisson(key, rate),
        "binomial": lambda key, count, p: jax.random.binomial(key, count, p),
        "bernoulli": lambda key, rate: jax.random.bernoulli(key, rate),
        "bernoulli.p": lambda key, x, rate=0.5: jax.random.bernoulli(key, rate, x.shape),
        "multinomial": _multinomial,
        "native_dropout": _dropout,
        "_standard_gamma": lambda key, alpha: jax.random.gamma(key, alpha),
        "_sample_dirichlet": _dirichlet,
    }
)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(x.mT)


def _eye_like(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def _unless(failed: jax.Array, x: jax.Array) -> jax.Array:
    """Return NaN for the matrices of a batch that failed."""
    return jnp.where(failed[..., None, None], jnp.nan, x)


# ------------------------------------------------------------------------------------ positive definite


def _lower_factor(a: jax.Array) -> jax.Array:
    """Read the lower triangle only, as torch does; NaN where it is not positive definite."""
    return jax.lax.linalg.cholesky(a, symmetrize_input=False)


def _cholesky(a: jax.Array, upper: bool = False) -> jax.Array:
    return _adjoint(_lower_factor(_adjoint(a))) if upper else _lower_factor(a)


def _cholesky_ex(
    a: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _cholesky(a, upper), _first_failing_minor(_adjoint(a) if upper else a)


def _first_failing_minor(a: jax.Array) -> jax.Array:
    """Find the size of the smallest leading minor that is not positive definite; 0 if there is none."""
    row = jnp.arange(a.shape[-1])
    inside = row <= row[:, None]  # minor, row
    of_minor = inside[:, :, None] & inside[:, None, :]
    minors = jnp.where(of_minor, a[..., None, :, :], jnp.eye(a.shape[-1], dtype=a.dtype))
    return _first(jnp.isnan(_lower_factor(minors)).any((-2, -1)))


def _cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    lower = _adjoint(factor) if upper else factor
    half = _solve_triangular(lower, b, upper=False)
    return _solve_triangular(_adjoint(lower), half, upper=True)


def _cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    return _cholesky_solve(_eye_like(factor), factor, upper)


# -------------------------------------------------------------------------------------------- triangles


def _solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jax.lax.linalg.triangular_solve(
        jnp.broadcast_to(a, (*batch, *a.shape[-2:])),
        jnp.broadcast_to(b, (*batch, *b.shape[-2:])),
        left_side=left,
        lower=not upper,
        unit_diagonal=unitriangular,
    )


def _triangular_solve(
    b: jax.Array,
    a: jax.Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:
    if transpose:
        a, upper = a.mT, not upper
    return _solve_triangular(a, b, upper=upper, unitriangular=unitriangular), a


# ---------------------------------------------------------------------------------------- square ones


def _first(flags: jax.Array) -> jax.Array:
    """Count the place of the first flag from 1; 0 if none is set."""
    if not flags.shape[-1]:
        return jnp.zeros(flags.shape[:-1], jnp.int32)
    return jnp.where(flags.any(-1), flags.argmax(-1) + 1, 0)


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return both factors in one matrix, pivots from 1, and the order of rows that they make."""
    factors, pivots, rows = jax.lax.linalg.lu(a)
    return factors, pivots + 1, rows


def _diagonal(a: jax.Array) -> jax.Array:
    return jnp.diagonal(a, axis1=-2, axis2=-1)


def _lu_factor_ex(
    a: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not pivot:
        raise NotImplementedError("pivot=False is not covered; leave it out")
    factors, pivots, _ = _lu(a)
    return factors, pivots, _first(_diagonal(factors) == 0)


def _solve_ex(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    factors, pivots, rows = _lu(a)
    info = _first(_diagonal(factors) == 0)
    is_vector = b.ndim == 1 or b.shape == a.shape[:-1]
    x = b[..., None] if is_vector else b
    batch = jnp.broadcast_shapes(a.shape[:-2], x.shape[:-2])
    x = jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
    rows = jnp.broadcast_to(rows, (*batch, rows.shape[-1]))
    if left:
        x = jnp.take_along_axis(x, rows[..., :, None], -2)
        x = _solve_triangular(factors, x, upper=False, unitriangular=True)
        x = _solve_triangular(factors, x, upper=True)
    else:
        x = _solve_triangular(factors, x, upper=True, left=False)
        x = _solve_triangular(factors, x, upper=False, left=False, unitriangular=True)
        x = jnp.take_along_axis(x, jnp.argsort(rows, -1)[..., None, :], -1)
    x = _unless(info > 0, x)
    return (x[..., 0] if is_vector else x), factors, pivots, info


def _inv_ex(a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    inverse, _, _, info = _solve_ex(a, _eye_like(a))
    return inverse, info


def _slogdet(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    factors, pivots, _ = _lu(a)
    diagonal = _diagonal(factors)
    sign = jnp.sign(diagonal).prod(-1) * _parity(pivots)
    # without the factors: asking for them is an error
    return sign, jnp.log(jnp.abs(diagonal)).sum(-1)


def _det(a: jax.Array) -> tuple[jax.Array]:
    factors, pivots, _ = _lu(a)
    return (_diagonal(factors).prod(-1) * _parity(pivots),)


def _parity(pivots: jax.Array) -> jax.Array:
    swaps = (pivots != jnp.arange(1, pivots.shape[-1] + 1)).sum(-1)
    return 1 - 2 * (swaps % 2)


# ----------------------------------------------------------------------------------- orthogonal factors


def _qr(a: jax.Array, mode: str = "reduced") -> tuple[jax.Array, ...]:
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, "r")
    return tuple(jnp.linalg.qr(a, mode))


def _eigh(a: jax.Array, uplo: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues rise; which sign a vector has is as open as in torch."""
    vectors, values = jax.lax.linalg.eigh(a, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, vectors


def _svd(
    a: jax.Array, full: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, ...]:
    if not compute_uv:
        empty = jnp.zeros((0,), a.dtype)
        return empty, jnp.linalg.svd(a, compute_uv=False), empty
    return tuple(jnp.linalg.svd(a, full_matrices=full))


def _pinv(
    a: jax.Array,
    *,
    atol: jax.Array | None = None,
    rtol: jax.Array | None = None,
    hermitian: bool = False,
) -> jax.Array:
    """Invert the singular values above ``max(atol, rtol * the greatest)``, and take the others as 0."""
    atol = jnp.asarray(0.0 if atol is None else atol)
    if rtol is None:
        rtol = jnp.where(atol > 0, 0.0, max(a.shape[-2:]) * jnp.finfo(a.dtype).eps)
    u, sizes, v = jnp.linalg.svd(_hermitian(a) if hermitian else a, full_matrices=False)
    greatest = sizes.max(-1, keepdims=True, initial=0)
    counts = sizes > jnp.maximum(atol[..., None], jnp.asarray(rtol)[..., None] * greatest)
    inverses = jnp.where(counts, 1 / jnp.where(counts, sizes, 1), 0)
    return matmul(_adjoint(v) * inverses[..., None, :], _adjoint(u))


def _hermitian(a: jax.Array) -> jax.Array:
    """Mirror the lower triangle, which is all that torch reads of a matrix said to be symmetric."""
    lower = jnp.tril(a)
    return lower + _adjoint(jnp.tril(a, -1))


LINALG = table(
    {
        "cholesky": _cholesky,
        "linalg_cholesky_ex": _cholesky_ex,
        "cholesky_solve": _cholesky_solve,
        "cholesky_inverse": _cholesky_inverse,
        "linalg_solve_triangular": _solve_triangular,
        "triangular_solve": _triangular_solve,
        "linalg_lu_factor_ex": _lu_factor_ex,
        "_linalg_solve_ex": _solve_ex,
        "linalg_inv_ex": _inv_ex,
        "_linalg_det": _det,
        "_linalg_slogdet": _slogdet,
        "linalg_qr": _qr,
        "_linalg_eigh": _eigh,
        "_linalg_svd": _svd,
        "linalg_pinv.atol_rtol_tensor": _pinv,
        "linalg_matrix_exp": expm,
    }
)


Sizes = int | Sequence[int]


# -------------------------------------------------------------------------------------- sliding windows


def _each(sizes: Sizes, rank: int) -> tuple[int, ...]:
    """Read one number for all axes, or one for each."""
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes * (rank // len(sizes))


def _windows(x: jax.Array, rank: int, size: Sizes, stride: Sizes, padding: Sizes) -> dict[str, Any]:
    front = x.ndim - rank
    around = tuple((pad, pad) for pad in _each(padding, rank))
    return {
        "window_dimensions": (1,) * front + _each(size, rank),
        "window_strides": (1,) * front + _each(stride or size, rank),
        "padding": ((0, 0),) * front + around,
    }


def _refuse_ceil(ceil_mode: bool) -> None:
    if ceil_mode:
        raise NotImplementedError("ceil_mode=True is not covered; pad the input instead")


def _max_pool(rank: int) -> Callable[..., Any]:
    def pool(
        x: jax.Array,
        size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> jax.Array | tuple[jax.Array]:
        _refuse_ceil(ceil_mode)
        least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        pooled = jax.lax.reduce_window(
            x,
            np.asarray(least, x.dtype)[()],
            jax.lax.max,
            window_dilation=(1,) * (x.ndim - rank) + _each(dilation, rank),
            **_windows(x, rank, size, stride, padding),
        )
        return (pooled,)  # without the indices: asking for them is an error

    return pool


def _avg_pool(rank: int) -> Callable[..., Any]:
    def pool(
        x: jax.Array,
        size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array | tuple[jax.Array]:
        _refuse_ceil(ceil_mode)
        windows = _windows(x, rank, size, stride, padding)

        def total(values: jax.Array) -> jax.Array:
            return jax.lax.reduce_window(values, np.zeros((), x.dtype)[()], jax.lax.add, **windows)

        if divisor_override is not None:
            return total(x) / divisor_override
        if count_include_pad:
            return total(x) / float(np.prod(windows["window_dimensions"]))
        return total(x) / total(jnp.ones_like(x))

    return pool


# --------------------------------------------------------------------- windows that follow from the size


def _adaptive(
    x: jax.Array, sizes: Sequence[int], reduce: Callable[[jax.Array, np.ndarray, int], jax.Array]
) -> jax.Array:
    """Reduce, one axis after the other, windows that cover the input; they overlap if it is no multiple.

    Args:
        reduce: takes windows of equal length along an axis, and which of their entries count.
    """
    for axis, wanted in enumerate(sizes, start=x.ndim - len(sizes)):
        has = x.shape[axis]
        number = np.arange(wanted)
        starts, ends = number * has // wanted, -(-(number + 1) * has // wanted)
        places = starts[:, None] + np.arange(max(ends - starts, default=0))
        windows = jnp.take(x, np.minimum(places, has - 1), axis)
        counted = (places < ends[:, None]).reshape(places.shape + (1,) * (x.ndim - axis - 1))
        x = reduce(windows, counted, axis + 1)
    return x


def _mean(windows: jax.Array, counted: np.ndarray, axis: int) -> jax.Array:
    return windows.mean(axis, where=counted)


def _max(windows: jax.Array, counted: np.ndarray, axis: int) -> jax.Array:
    return windows.max(axis, where=counted, initial=-jnp.inf)


# -------------------------------------------------------------------------------------- interpolation


def _steps(
    x: jax.Array, sizes: Sequence[int] | None, factors: Sequence[float | None] | None, rank: int
) -> list[tuple[int, np.float32]]:
    """Return for each axis what size it gets, and how far apart in the input two neighbours lie.

    The distance is computed in float32, as torch does: an image may depend on its last bit.
    """
    steps = []
    factors = factors or [None] * rank
    for axis, factor in enumerate(factors, start=x.ndim - rank):
        has = x.shape[axis]
        size = sizes[axis - x.ndim + rank] if sizes else int(has * (factor or 1))
        if factor and size != has:  # otherwise torch copies, whatever the factor
            steps.append((size, np.float32(1 / factor)))
        else:
            steps.append((size, np.float32(has) / np.float32(size)))
    return steps


def _nearest(x: jax.Array, steps: Sequence[tuple[int, np.float32]]) -> jax.Array:
    for axis, (size, step) in enumerate(steps, start=x.ndim - len(steps)):
        if size == 2 * x.shape[axis]:  # torch doubles, whatever the factor
            step = np.float32(0.5)
        places = np.floor(np.arange(size, dtype=np.float32) * step).astype(int)
        x = jnp.take(x, np.minimum(places, x.shape[axis] - 1), axis)
    return x


def _linear(
    x: jax.Array, steps: Sequence[tuple[int, np.float32]], align_corners: bool
) -> jax.Array:
    for axis, (size, step) in enumerate(steps, start=x.ndim - len(steps)):
        has, number = x.shape[axis], np.arange(size, dtype=np.float32)
        if align_corners:
            places = number * np.float32((has - 1) / max(size - 1, 1))
        else:
            places = np.maximum((number + np.float32(0.5)) * step - np.float32(0.5), 0)
        low = np.minimum(places.astype(int), has - 1)
        high = np.minimum(low + 1, has - 1)
        share = (places - low).reshape(-1, *(1,) * (x.ndim - axis - 1))
        x = jnp.take(x, low, axis) * (1 - share) + jnp.take(x, high, axis) * share
    return x


def _upsample_nearest_vec(
    x: jax.Array, sizes: Sequence[int] | None, factors: Sequence[float | None] | None
) -> jax.Array:
    return _nearest(x, _steps(x, sizes, factors, 2))


def _upsample_nearest(x: jax.Array, sizes: Sequence[int], *factors: float | None) -> jax.Array:
    return _nearest(x, _steps(x, sizes, factors, 2))


def _upsample_linear_vec(
    x: jax.Array,
    sizes: Sequence[int] | None,
    align_corners: bool,
    factors: Sequence[float | None] | None,
) -> jax.Array:
    return _linear(x, _steps(x, sizes, factors, 2), align_corners)


def _upsample_linear(
    x: jax.Array, sizes: Sequence[int], align_corners: bool, *factors: float | None
) -> jax.Array:
    return _linear(x, _steps(x, sizes, factors, 2), align_corners)


POOLING = table(
    {
        "max_pool2d_with_indices": _max_pool(2),
        "max_pool3d_with_indices": _max_pool(3),
        "avg_pool2d": _avg_pool(2),
        "avg_pool3d": _avg_pool(3),
        "_adaptive_avg_pool2d _adaptive_avg_pool3d": lambda x, sizes: _adaptive(x, sizes, _mean),
        "adaptive_max_pool2d adaptive_max_pool3d": lambda x, sizes: (_adaptive(x, sizes, _max),),
        "upsample_nearest2d": _upsample_nearest,
        "upsample_nearest2d.vec": _upsample_nearest_vec,
        "upsample_bilinear2d": _upsample_linear,
        "upsample_bilinear2d.vec": _upsample_linear_vec,
    }
)


def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    axes = weight.ndim - 2
    around = [(pad, pad) for pad in padding]
    spread: Sequence[int] = (1,) * axes
    if transposed:  # a convolution of the input with zeros put between its elements
        weight = _turned(weight, groups)
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        around = [
            (r - pad, r - pad + extra)
            for r, pad, extra in zip(reach, padding, output_padding, strict=True)
        ]
        stride, spread = (1,) * axes, tuple(stride)
    names = "DHW"[-axes:]
    out = jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=tuple(stride),
        padding=around,
        lhs_dilation=spread,
        rhs_dilation=tuple(dilation),
        dimension_numbers=(f"NC{names}", f"OI{names}", f"NC{names}"),
        feature_group_count=groups,
        precision=FULL,
    )
    return out if bias is None else out + bias.reshape(-1, *(1,) * axes)


def _turned(weight: jax.Array, groups: int) -> jax.Array:
    """Convert the kernel of a transposed convolution, (in, out / groups, *size), into that of a plain one."""
    channels, each, *size = weight.shape
    weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
    grouped = weight.reshape(groups, channels // groups, each, *size).swapaxes(1, 2)
    return grouped.reshape(groups * each, channels // groups, *size)


def _embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array]:
    """Sum (mode 0), average (1) or maximise (2) rows of ``weight``; bag i begins at ``offsets[i]``."""
    number, bags = indices.shape[0], offsets.shape[0] - include_last_offset
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(number), side="right") - 1
    if padding_idx >= 0:
        bag = jnp.where(indices == padding_idx, bags, bag)  # no bag: left out
    rows = picked(weight, indices, 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jax.ops.segment_sum(jnp.ones(number), bag, bags)[:, None]
    if mode == 2:
        out = jnp.where(counts > 0, jax.ops.segment_max(rows, bag, bags), 0)
    else:
        out = jax.ops.segment_sum(rows, bag, bags)
        out = out / jnp.maximum(counts, 1) if mode == 1 else out
    proper = (offsets[:1] == 0).all()
    if include_last_offset:
        proper &= offsets[-1] == number
    return (jnp.where(proper, out, jnp.nan),)  # without what only gradients need


LAYERS = table(
    {
        "convolution": _convolution,
        "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
    }
)


TABLE: dict[str, Op] = {**bound(RULES, JAX), **LAYERS, **LINALG, **POOLING, **DRAWING}
