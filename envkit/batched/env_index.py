"""The entry ``env_index``: which env of a pool each row of data belongs to.

It is a non-tensor entry, written into every result of a pool whose envs work at their own pace, and read where
data is sent back. It may also be set by hand: an int for one row, or one for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from envkit.errors import ArgumentError, MissingKeyError

__all__ = ["ENV_INDEX", "env_indices", "envs_of"]

ENV_INDEX = "env_index"


def env_indices(
    envs: Iterable[int], sub_batch: torch.Size, device: torch.device | None = None
) -> Any:
    """Give the entry for rows of some envs, each of batch size ``sub_batch``.

    ``device`` is that of the data it goes into, which would move it there, part by part.
    """
    return NonTensorStack(*(_entry(env, sub_batch, device) for env in envs))  # type: ignore[abstract]


@lru_cache(maxsize=4096)
def _entry(env: int, sub_batch: torch.Size, device: torch.device | None) -> NonTensorData:
    made = NonTensorData(env, batch_size=sub_batch, device=device).lock_()
    _ENVS[id(made)] = env
    weakref.finalize(made, _ENVS.pop, id(made)).atexit = False
    return made


_ENVS: dict[int, int] = {}
"""The env of each entry made here that lives, by its identity: reading one from tensordict takes 15 us."""


def envs_of(
    td: TensorDictBase | None, env_index: int | Sequence[int] | None, num_envs: int
) -> list[int]:
    """Name the envs that data is sent to: those of ``env_index``, by default what the entry says.

    Raises:
        MissingKeyError: (a KeyError) neither says any.
        ArgumentError: (a ValueError) they are not ints of different envs.
    """
    if env_index is None and td is not None and ENV_INDEX in td.keys():
        env_index = _known_envs(td.get(ENV_INDEX)) or cast(Any, td[ENV_INDEX])
    if env_index is None:
        raise MissingKeyError(
            "nothing says which envs are meant: the TensorDict has no entry 'env_index'. Pass what this "
            "pool has given, set td['env_index'], or pass env_index=."
        )
    envs = _flat(env_index)
    wrong = [env for env in envs if type(env) is not int or not 0 <= env < num_envs]
    if wrong or len(set(envs)) != len(envs):
        raise ArgumentError(
            f"env_index is {env_index!r}, but must name different envs of 0 to {num_envs - 1}, "
            "each by an int."
        )
    return envs


def _known_envs(entry: Any) -> list[int] | None:
    """Read an entry all of whose parts `env_indices` has made; None where it is any other."""
    if type(entry) is not NonTensorStack or entry.stack_dim != 0:
        return None
    envs = [_ENVS.get(id(part)) for part in entry.tensordicts]
    return None if None in envs else cast(list[int], envs)


def _flat(env_index: Any) -> list[Any]:
    """Give the envs that an int, a list of ints, or one of lists (of envs with a batch) names."""
    if isinstance(env_index, NonTensorStack | NonTensorData):
        env_index = env_index.tolist()
    if isinstance(env_index, torch.Tensor):
        env_index = env_index.tolist()
    if not isinstance(env_index, list | tuple | range):
        return [env_index]
    return [_first(one) for one in env_index]


def _first(one: Any) -> Any:
    while isinstance(one, list) and one:
        one = one[0]
    return one
