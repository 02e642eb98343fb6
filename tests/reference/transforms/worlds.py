"""Small envs that are built of either library's names, and what is asked of them behind a transform."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tests.reference.compare import Library


def count(lib: Library, n: int = 5) -> Any:
    """Counts its steps from 0 to ``n``; the reward is the count."""

    class Count(lib.EnvBase):
        def __init__(self):
            super().__init__()
            self.observation_spec = lib.Composite(
                count=lib.Unbounded((1,), dtype=torch.int64), success=lib.Unbounded((1, 3))
            )
            self.action_spec = lib.Categorical(2, shape=(1,))
            self.reward_spec = lib.Unbounded((1,))
            self.number, self.taken = 0, []

        def _shown(self):
            done = torch.tensor([self.number >= n])
            return TensorDict(
                {
                    "count": torch.tensor([self.number]),
                    "success": torch.full((1, 3), float(self.number == 2)),
                    "done": done,
                    "terminated": done.clone(),
                }
            )

        def _reset(self, td, **kwargs):
            self.number = 0
            return self._shown()

        def _step(self, td):
            self.number += 1
            self.taken.append(td["action"].tolist())
            return self._shown().set("reward", torch.tensor([float(self.number)]))

        def _set_seed(self, seed):
            pass

    return Count()


def arm(lib: Library, shape=(2, 3), batch=()) -> Any:
    """Adds a bounded action to what it observes; reads that back, so that any batch steps."""

    class Arm(lib.EnvBase):
        _batch_locked = False

        def __init__(self):
            super().__init__(batch_size=batch)
            place = lib.Composite(observation=lib.Unbounded((*batch, 3)), shape=batch)
            self.observation_spec, self.state_spec = place, place.clone()
            self.action_spec = lib.Bounded(-2.0, 4.0, (*batch, *shape))
            self.reward_spec = lib.Unbounded((*batch, 1))

        def _reset(self, td, **kwargs):
            lead = self.batch_size if td is None else td.batch_size
            return TensorDict({"observation": torch.zeros(*lead, 3)}, lead)

        def _step(self, td):
            shift = td["action"].flatten(td.batch_dims)
            place = td["observation"] + shift.sum(-1, keepdim=True)
            done = place[..., :1] > 99
            out = {"observation": place, "reward": shift[..., :1], "done": done}
            return TensorDict({**out, "terminated": done.clone()}, td.batch_size)

        def _set_seed(self, seed):
            pass

    return Arm()


def teams(lib: Library) -> Any:
    """Two agents with names of their own that are alike."""
    names = ("a", "b")

    class Teams(lib.EnvBase):
        def __init__(self):
            super().__init__()

            def each(**leaves):
                return lib.Composite(
                    {
                        name: lib.Composite({k: v.clone() for k, v in leaves.items()})
                        for name in names
                    }
                )

            flag = lib.Categorical(2, shape=(1,), dtype=torch.bool)
            self.observation_spec = each(seen=lib.Unbounded((2,)))
            self.action_spec = each(action=lib.Unbounded((3,)))
            self.reward_spec = each(reward=lib.Unbounded((1,)))
            self.done_spec = each(done=flag, terminated=flag)

        def _shown(self, seen):
            flag = torch.zeros(1, dtype=torch.bool)
            return TensorDict(
                {
                    name: {"seen": seen[name], "done": flag.clone(), "terminated": flag.clone()}
                    for name in names
                }
            )

        def _reset(self, td, **kwargs):
            return self._shown({name: torch.full((2,), float(i)) for i, name in enumerate(names)})

        def _step(self, td):
            out = self._shown({name: td[name, "action"][:2] for name in names})
            for name in names:
                out[name, "reward"] = td[name, "action"][:1]
            return out

        def _set_seed(self, seed):
            pass

    return Teams()


def rows(lib: Library, make=count) -> Any:
    return lib.SerialEnv(2, partial(make, lib))


def ones(env: Any, td: TensorDictBase) -> TensorDictBase:
    """Act with ones, or the first option."""
    for key, leaf in env.full_action_spec.items(True, True):
        action = torch.ones([abs(size) for size in leaf.shape], dtype=leaf.dtype)
        if type(leaf).__name__ == "OneHot":
            action[..., 1:] = 0
        td.set(key, action)
    return td


def played(env: Any, steps: int, **keywords: Any) -> Any:
    """Give a rollout of ones, without the frames that ours remember in it (`frames-in-the-data`)."""
    data = env.rollout(steps, partial(ones, env), **keywords)
    names = {key: key[-1] if isinstance(key, tuple) else key for key in data.keys(True)}
    memory = [key for key, name in names.items() if name.startswith(("_cat_frames_", "_time_max_"))]
    return data.exclude(*memory) if memory else data


def leaf_specs(env: Any) -> dict:
    """Give class, shape and dtype of every leaf of the specs, by kind."""
    kinds = ("observation", "reward", "done", "action", "state")
    return {
        kind: {
            key: (type(leaf).__name__, tuple(leaf.shape), leaf.dtype)
            for key, leaf in getattr(env, f"full_{kind}_spec").items(True, True)
        }
        for kind in kinds
    }
