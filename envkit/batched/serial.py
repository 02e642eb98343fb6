"""Many sub-envs in this process, one after the other.

`SerialEnv` is the tool for tests and for gradients. Unless ``use_buffers`` says otherwise, sub-envs
that step on NumPy rows use the same buffers as worker processes, and all others get and give
TensorDicts, which keeps the autograd graph.
"""

from __future__ import annotations

from typing import Any, Self

from envkit.batched.attributes import LocalAttribute
from envkit.batched.env_host import COMMAND_NAMES, HostFactory, Maker
from envkit.batched.exchange.shared_memory import BufferExchange
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.indexed import Indexable
from envkit.batched.settings import PoolSettings
from envkit.errors import CopyError, OptionError
from envkit.specs.annotations import Destination
from envkit.transport import Pool, ThisThread


class SerialEnv(Indexable):
    """Step ``num_workers`` sub-envs in this process, one after the other.

    Args:
        num_workers: number of sub-envs.
        create_env_fn: callable that makes one, or a list of one per sub-env.
        **options: those of `ParallelEnv`. Those about threads, processes, backends and time have no effect, and
            ``mp_start_method`` is None.

    A loss on its outputs back-propagates to the stacked action where the sub-envs are
    differentiable. For that, sub-envs that do not step on NumPy rows hand on TensorDicts unless
    ``use_buffers=True`` asks for rows, which carry no graph. ``env.use_buffers`` is True in both cases, and False only
    where the specs have no fixed sizes or the argument says so.

    Raises:
        OptionError: (a TypeError) ``mp_start_method`` or ``metadata_from_workers`` is set.

    Example:
        >>> from envkit import GymEnv, SerialEnv
        >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        >>> env.rollout(5, break_when_any_done=False).shape
        torch.Size([3, 5])
        >>> env.close()
    """

    _attribute_type = LocalAttribute

    def _take(self, settings: PoolSettings) -> None:
        """Check and store settings, none of which is for workers alone.

        Raises:
            OptionError: (a TypeError) one is.
        """
        if settings.mp_start_method is not None:
            raise OptionError(
                f"mp_start_method is {settings.mp_start_method!r}, but a SerialEnv starts no processes. Leave it out, or use "
                "ParallelEnv."
            )
        if settings.metadata_from_workers:
            raise OptionError(
                "metadata_from_workers is True, but a SerialEnv has no workers. Leave it out, or use ParallelEnv."
            )
        super()._take(settings)

    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        factory = HostFactory(makers, described, choices=self._choices)
        return Pool(ThisThread(factory, self.num_workers), commands=COMMAND_NAMES)

    def _prefers_rows(self, pool: Pool) -> bool:
        return all(pool.call("has_row_core"))

    def __getstate__(self) -> Any:
        """Return what a copy starts from; sub-envs that run are part of it.

        Raises:
            CopyError: (a TypeError) they share rows of memory with this env.
        """
        if isinstance(self._exchange, BufferExchange):
            raise CopyError(
                f"{type(self).__name__} cannot be copied or pickled while it shares rows of memory with "
                "its sub-envs. Copy it before its first use or after close(), or make it with "
                "use_buffers=False: it then takes the sub-envs along as they are."
            )
        return super().__getstate__()

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move the sub-envs and what is delivered to another device; returns self."""
        super().to(*args, **kwargs)
        if self._pool is not None and self._device is not None:
            self._pool.call("move", self._device)
            if isinstance(self._exchange, TensorDictExchange):
                self._exchange.sub_envs_are_on(self._device)
        return self
