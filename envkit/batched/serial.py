"""Many sub-envs in this process, one after the other.

`SerialEnv` is the tool for tests and for gradients. Sub-envs that step on NumPy rows use the same
buffers as worker processes; all others get and give TensorDicts, which keeps the autograd graph.
"""

from __future__ import annotations

from typing import Any

from envkit.batched.common import BatchedEnv
from envkit.batched.host import COMMAND_NAMES, HostFactory, Maker
from envkit.batched.metadata import EnvMetaData
from envkit.transport import LocalPool, Pool

__all__ = ["SerialEnv"]


class SerialEnv(BatchedEnv):
    """Step ``num_workers`` sub-envs in this process; see `BatchedEnv` for the arguments.

    A loss on its outputs back-propagates to the stacked action where the sub-envs are
    differentiable.
    """

    def _make_pool(self, makers: list[Maker]) -> Pool:
        self._local = LocalPool(HostFactory(makers), self.num_workers, commands=COMMAND_NAMES)
        return self._local

    def _wants_buffers(self, metadata: list[EnvMetaData]) -> bool:
        if any(found.is_dynamic for found in metadata):
            return False
        if self._use_buffers is not None:
            return self._use_buffers
        return all(self._local.call("has_row_core"))

    def _attribute(self, pool: Pool, name: str) -> Any:
        values = [value for part in pool.call("get_attribute", name) for value in part]
        if not callable(values[0]):
            return values
        return lambda *args, **kwargs: [value(*args, **kwargs) for value in values]
