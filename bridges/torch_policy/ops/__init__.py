"""Core ATen operators in JAX, by kind.

`TABLE` is all that the rest of the package reads. An operator is covered when it stands in it.
"""

from bridges.torch_policy.ops.drawing import DRAWING
from bridges.torch_policy.ops.elementwise import ELEMENTWISE
from bridges.torch_policy.ops.layers import LAYERS
from bridges.torch_policy.ops.linalg import LINALG
from bridges.torch_policy.ops.making import MAKING
from bridges.torch_policy.ops.pooling import POOLING
from bridges.torch_policy.ops.reducing import REDUCING
from bridges.torch_policy.ops.shaping import SHAPING
from bridges.torch_policy.ops.table import Op

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
