"""Whether data travels to sub-envs in rows of memory or as whole TensorDicts.

Conventions
    metadata  of each row.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from envkit.batched.metadata import EnvMetaData

__all__ = ["may_use_rows"]


def may_use_rows(metadata: Sequence[EnvMetaData], *, asked: bool | None, has_memory: bool) -> bool:
    """Say whether rows in memory can carry the data of some sub-envs, and may.

    Args:
        metadata: see the module.
        asked: what the user asked for; None leaves it to ``has_memory``. Asking for what the specs do not
            allow warns.
        has_memory: there is memory that all who hold sub-envs can map.
    """
    model = metadata[0]
    fits = not any(found.is_dynamic for found in metadata) and (
        all(found is model or found.layout() == model.layout() for found in metadata)
    )
    if asked and not fits:
        warnings.warn(
            "use_buffers=True, but a spec has no fixed size, is no tensor or is that of some agents alone, or the "
            "sub-envs differ in keys, shapes or dtypes; TensorDicts are exchanged instead.",
            stacklevel=11,  # the caller of what started: public calls are wrapped
        )
    return fits and (has_memory if asked is None else asked)
