"""Compare TensorDicts bit for bit, and replay recorded actions."""

from __future__ import annotations

from itertools import pairwise

import torch
from tensordict import TensorDictBase

from envkit.data.transition import leaves


def assert_same(left: TensorDictBase, right: TensorDictBase, *, without: tuple[str, ...] = ()):
    """Same keys, shapes, dtypes and bits; entries below the names in ``without`` are not looked at."""
    here, there = (
        {path: leaf for path, leaf in leaves(td) if not set(path) & set(without)}
        for td in (left, right)
    )
    assert here.keys() == there.keys()
    for path, leaf in here.items():
        assert leaf.dtype == there[path].dtype, path
        assert torch.equal(leaf, there[path]), (path, leaf, there[path])


def assert_close(left: TensorDictBase, right: TensorDictBase, *, atol: float = 1e-5):
    """Same keys; floats within ``atol``, everything else equal."""
    here, there = dict(leaves(left)), dict(leaves(right))
    assert here.keys() == there.keys()
    for path, leaf in here.items():
        if leaf.dtype.is_floating_point:
            torch.testing.assert_close(leaf, there[path], atol=atol, rtol=1e-5)
        else:
            assert torch.equal(leaf, there[path]), path


def replaying(actions: torch.Tensor):
    """Make a policy that plays ``actions``, shape (*batch, time, act), one after the other."""
    turns = iter(actions.unbind(-2))
    return lambda td: td.set("action", next(turns).clone())


def replay(env, td: TensorDictBase, actions: torch.Tensor):
    """Step with recorded actions from Python; gives the stacked transitions and the last root."""
    policy, steps = replaying(actions), []
    for _ in range(actions.shape[-2]):
        data, td = env.step_and_maybe_reset(policy(td))
        steps.append(data)
    return torch.stack(steps, len(actions.shape) - 2), td


def write_into_all(td: TensorDictBase) -> None:
    """Overwrite every leaf in place."""
    for _, leaf in leaves(td):
        if leaf.numel():
            leaf.copy_(torch.full_like(leaf, 1 if leaf.dtype == torch.bool else 77))


def shared_memory(*tds: TensorDictBase) -> list[set[tuple]]:
    """List the groups of leaves of different places that overlap in memory."""
    spans = []
    for index, td in enumerate(tds):
        for path, leaf in leaves(td):
            if leaf.numel():
                start = leaf.data_ptr()
                last = sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
                size = leaf.element_size()
                spans.append((start, start + (last + 1) * size, (index, *path)))
    spans.sort()
    return [{one[2], two[2]} for one, two in pairwise(spans) if two[0] < one[1]]
