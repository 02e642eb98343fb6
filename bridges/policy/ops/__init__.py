"""Core ATen operators for every array library, by kind.

`RULES` is all that stands in it; `table.bound` writes them in one library.
"""

from bridges.policy.ops.elementwise import ELEMENTWISE
from bridges.policy.ops.layers import LAYERS
from bridges.policy.ops.making import MAKING
from bridges.policy.ops.reducing import REDUCING
from bridges.policy.ops.shaping import SHAPING
from bridges.policy.ops.table import Rule

__all__ = ["RULES"]

RULES: dict[str, Rule] = {**ELEMENTWISE, **SHAPING, **REDUCING, **LAYERS, **MAKING}
