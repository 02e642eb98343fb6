"""What rollouts show of rows that are done before others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensordict import TensorDictBase

from envkit.data.paths import Key, as_path


def stays_frozen(
    data: TensorDictBase,
    reward_keys: Iterable[Key],
    is_equal: Callable[[TensorDictBase, TensorDictBase], bool],
) -> bool:
    """Say whether every row repeats the transition that ended it, with rewards of 0 from then on."""
    frozen = data["next", "done"][..., :-1, 0]
    paid = [("next", *as_path(key)) for key in reward_keys]
    after, before = data[..., 1:][frozen], data[..., :-1][frozen]
    return all(bool((after[key] == 0).all()) for key in paid) and is_equal(
        after.exclude(*paid), before.exclude(*paid)
    )
