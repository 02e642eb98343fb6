"""Operators of linear algebra: factors of matrices, inverses, determinants, solved systems.

Where torch looks at the outcome and raises (a matrix is singular, or not positive definite), a program
cannot: it gives NaN for that matrix. What torch reports as ``info`` is computed as torch counts it.

Conventions
    matrix   last two axes; all in front of them are a batch.
    info     int32, 0 where it worked, otherwise the number of the row, from 1, where it did not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import expm

from envkit_bridges.jax.policy.library import matmul
from envkit_bridges.jax.policy.ops.table import table

__all__ = ["LINALG"]


def _adjoint(x: Any) -> Any:
    return jnp.conj(x.mT)


def _eye_like(x: Any) -> Any:
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def _unless(failed: Any, x: Any) -> Any:
    """Give NaN for the matrices of a batch that failed."""
    return jnp.where(failed[..., None, None], jnp.nan, x)


# ------------------------------------------------------------------------------------ positive definite


def _lower_factor(a: Any) -> Any:
    """Read the lower triangle only, as torch does; NaN where it is not positive definite."""
    return jax.lax.linalg.cholesky(a, symmetrize_input=False)


def _cholesky(a: Any, upper: bool = False) -> Any:
    return _adjoint(_lower_factor(_adjoint(a))) if upper else _lower_factor(a)


def _cholesky_ex(a: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    return _cholesky(a, upper), _first_failing_minor(_adjoint(a) if upper else a)


def _first_failing_minor(a: Any) -> Any:
    """Find the size of the smallest leading minor that is not positive definite; 0 if there is none."""
    row = jnp.arange(a.shape[-1])
    inside = row <= row[:, None]  # minor, row
    of_minor = inside[:, :, None] & inside[:, None, :]
    minors = jnp.where(of_minor, a[..., None, :, :], jnp.eye(a.shape[-1], dtype=a.dtype))
    return _first(jnp.isnan(_lower_factor(minors)).any((-2, -1)))


def _cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    lower = _adjoint(factor) if upper else factor
    half = _solve_triangular(lower, b, upper=False)
    return _solve_triangular(_adjoint(lower), half, upper=True)


def _cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    return _cholesky_solve(_eye_like(factor), factor, upper)


# -------------------------------------------------------------------------------------------- triangles


def _solve_triangular(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jax.lax.linalg.triangular_solve(
        jnp.broadcast_to(a, (*batch, *a.shape[-2:])),
        jnp.broadcast_to(b, (*batch, *b.shape[-2:])),
        left_side=left,
        lower=not upper,
        unit_diagonal=unitriangular,
    )


def _triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Any, Any]:
    if transpose:
        a, upper = a.mT, not upper
    return _solve_triangular(a, b, upper=upper, unitriangular=unitriangular), a


# ---------------------------------------------------------------------------------------- square ones


def _first(flags: Any) -> Any:
    """Count the place of the first flag from 1; 0 if none is set."""
    if not flags.shape[-1]:
        return jnp.zeros(flags.shape[:-1], jnp.int32)
    return jnp.where(flags.any(-1), flags.argmax(-1) + 1, 0)


def _lu(a: Any) -> tuple[Any, Any, Any]:
    """Give both factors in one matrix, pivots from 1, and the order of rows that they make."""
    factors, pivots, rows = jax.lax.linalg.lu(a)
    return factors, pivots + 1, rows


def _diagonal(a: Any) -> Any:
    return jnp.diagonal(a, axis1=-2, axis2=-1)


def _lu_factor_ex(a: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if not pivot:
        raise NotImplementedError("pivot=False is not covered; leave it out")
    factors, pivots, _ = _lu(a)
    return factors, pivots, _first(_diagonal(factors) == 0)


def _solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
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


def _inv_ex(a: Any, *, check_errors: bool = False) -> tuple[Any, Any]:
    inverse, _, _, info = _solve_ex(a, _eye_like(a))
    return inverse, info


def _slogdet(a: Any) -> tuple[Any, Any]:
    factors, pivots, _ = _lu(a)
    diagonal = _diagonal(factors)
    sign = jnp.sign(diagonal).prod(-1) * _parity(pivots)
    return sign, jnp.log(jnp.abs(diagonal)).sum(
        -1
    )  # without the factors: asking for them is an error


def _det(a: Any) -> tuple[Any]:
    factors, pivots, _ = _lu(a)
    return (_diagonal(factors).prod(-1) * _parity(pivots),)


def _parity(pivots: Any) -> Any:
    swaps = (pivots != jnp.arange(1, pivots.shape[-1] + 1)).sum(-1)
    return 1 - 2 * (swaps % 2)


# ----------------------------------------------------------------------------------- orthogonal factors


def _qr(a: Any, mode: str = "reduced") -> tuple[Any, ...]:
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, "r")
    return tuple(jnp.linalg.qr(a, mode))


def _eigh(a: Any, uplo: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    """Eigenvalues rise; which sign a vector has is as open as in torch."""
    vectors, values = jax.lax.linalg.eigh(a, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, vectors


def _svd(a: Any, full: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    if not compute_uv:
        empty = jnp.zeros((0,), a.dtype)
        return empty, jnp.linalg.svd(a, compute_uv=False), empty
    return tuple(jnp.linalg.svd(a, full_matrices=full))


def _pinv(a: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """Invert the singular values above ``max(atol, rtol * the greatest)``, and take the others as 0."""
    atol = jnp.asarray(0.0 if atol is None else atol)
    if rtol is None:
        rtol = jnp.where(atol > 0, 0.0, max(a.shape[-2:]) * jnp.finfo(a.dtype).eps)
    u, sizes, v = jnp.linalg.svd(_hermitian(a) if hermitian else a, full_matrices=False)
    greatest = sizes.max(-1, keepdims=True, initial=0)
    counts = sizes > jnp.maximum(atol[..., None], jnp.asarray(rtol)[..., None] * greatest)
    inverses = jnp.where(counts, 1 / jnp.where(counts, sizes, 1), 0)
    return matmul(_adjoint(v) * inverses[..., None, :], _adjoint(u))


def _hermitian(a: Any) -> Any:
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
