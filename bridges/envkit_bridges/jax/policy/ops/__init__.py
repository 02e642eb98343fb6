"""Core ATen operators in JAX: those of every library, and those that only JAX has.

`TABLE` is all that the rest of the package reads. An operator is covered when it stands in it.
"""

from envkit_bridges.jax.policy.library import JAX
from envkit_bridges.jax.policy.ops.drawing import DRAWING
from envkit_bridges.jax.policy.ops.layers import LAYERS
from envkit_bridges.jax.policy.ops.linalg import LINALG
from envkit_bridges.jax.policy.ops.pooling import POOLING
from envkit_bridges.policy.ops import RULES
from envkit_bridges.policy.ops.table import Op, bound

__all__ = ["TABLE", "Op"]

TABLE: dict[str, Op] = {**bound(RULES, JAX), **LAYERS, **LINALG, **POOLING, **DRAWING}
