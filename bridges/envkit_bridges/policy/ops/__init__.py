"""Core ATen operators for every array library, by kind.

`RULES` is all that stands in it; `table.bound` writes them in one library.
"""

from envkit_bridges.policy.ops.elementwise import ELEMENTWISE
from envkit_bridges.policy.ops.layers import LAYERS
from envkit_bridges.policy.ops.making import MAKING
from envkit_bridges.policy.ops.reducing import REDUCING
from envkit_bridges.policy.ops.shaping import SHAPING
from envkit_bridges.policy.ops.table import Rule

__all__ = ["RULES"]

RULES: dict[str, Rule] = {**ELEMENTWISE, **SHAPING, **REDUCING, **LAYERS, **MAKING}
