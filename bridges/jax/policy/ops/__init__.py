"""Core ATen operators in JAX, by kind.

`TABLE` is all that the rest of the package reads. An operator is covered when it stands in it.
"""

from bridges.jax.policy.ops.drawing import DRAWING
from bridges.jax.policy.ops.elementwise import ELEMENTWISE
from bridges.jax.policy.ops.layers import LAYERS
from bridges.jax.policy.ops.linalg import LINALG
from bridges.jax.policy.ops.making import MAKING
from bridges.jax.policy.ops.pooling import POOLING
from bridges.jax.policy.ops.reducing import REDUCING
from bridges.jax.policy.ops.shaping import SHAPING
from bridges.jax.policy.ops.table import Op

__all__ = ["TABLE", "Op"]

TABLE: dict[str, Op] = {
    **ELEMENTWISE,
    **SHAPING,
    **REDUCING,
    **LAYERS,
    **LINALG,
    **POOLING,
    **MAKING,
    **DRAWING,
}
