"""What a collector must give, made one step at a time with public calls of the env alone.

`collected` is slow and obviously right; tests compare collectors with it.
"""

from __future__ import annotations

import torch

from envkit.env.base import EnvBase


def collected(env: EnvBase, act, steps: int, batches: int) -> list:
    """Give batches as one-step TensorDicts stacked along time, with ``("collector", "traj_ids")``."""
    root, rows = env.reset(), env.batch_size.numel()
    ids, following = torch.arange(rows), rows
    batches_made = []
    for _ in range(batches):
        taken = []
        for _ in range(steps):
            done, root = env.step_and_maybe_reset(act(root))
            done = done.copy().set(("collector", "traj_ids"), ids.reshape(env.batch_size).clone())
            taken.append(done.clone())
            for row, ended in enumerate(done["next", "done"].reshape(rows, -1).any(-1)):
                if ended:
                    ids[row] = following
                    following += 1
        batches_made.append(torch.stack(taken, len(env.batch_size)))
    return batches_made


def assert_same(batch, wanted) -> None:
    """Compare two batches: entries, values and dtypes, but for private entries."""
    hidden = [
        key
        for key in wanted.keys(True)
        if str(key[-1] if isinstance(key, tuple) else key).startswith("_")
    ]
    wanted = wanted.exclude(*hidden)
    assert set(batch.keys(True, True)) == set(wanted.keys(True, True))
    assert batch.batch_size == wanted.batch_size
    for key in wanted.keys(True, True):
        assert torch.equal(batch[key], wanted[key]), key
        assert batch[key].dtype == wanted[key].dtype
