"""Small envs as a function of the library that their base class and specs come from.

Conventions
    lib     a `Library`; each function gives an env of it, or a class where its name says so.
    count   what most of these envs observe: the number of steps since the last reset, as a float.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

__all__ = ["ENVS", "UNEVEN"]


def counter_class(lib: Any, **spec_options: Any) -> type:
    """One simulator, or a locked batch of them that honours both masks."""

    class Counter(lib.EnvBase):
        def __init__(self, batch_size=(), end=3, **kwargs):
            super().__init__(batch_size=torch.Size(batch_size), **kwargs)
            self.end = end
            shape = self.batch_size
            self.observation_spec = lib.Composite(count=lib.Unbounded((*shape, 1)), shape=shape)
            self.action_spec = lib.Categorical(3, shape=(*shape, 1))
            self.reward_spec = lib.Unbounded((*shape, 1))
            flag = lib.Categorical(2, shape=(*shape, 1), dtype=torch.bool)
            self.done_spec = lib.Composite(
                done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape
            )
            self.count = torch.zeros(*shape, 1)
            self.resets = 0

        def _reset(self, tensordict=None, **kwargs):
            self.resets += 1
            mask = None if tensordict is None else tensordict.get("_reset", None)
            fresh = torch.full_like(self.count, float(kwargs.get("start", 0)))
            self.count = (
                fresh if mask is None else torch.where(mask.view_as(fresh), fresh, self.count)
            )
            return TensorDict({"count": self.count.clone()}, self.batch_size, device=self.device)

        def _step(self, tensordict):
            mask = tensordict.get("_step", None)
            moved = self.count + 1
            self.count = (
                moved if mask is None else torch.where(mask.view_as(moved), moved, self.count)
            )
            ended = self.count >= self.end
            return TensorDict(
                {
                    "count": self.count.clone(),
                    "reward": tensordict.get("action").float(),
                    "terminated": ended,
                    "truncated": torch.zeros_like(ended),
                    "done": ended.clone(),
                },
                tensordict.batch_size,
                device=self.device,
            )

        def _set_seed(self, seed):
            self.seed = seed

    return Counter


def counter(lib: Any, **kwargs: Any) -> Any:
    return counter_class(lib)(**kwargs)


def batched(lib: Any) -> Any:
    return counter(lib, batch_size=(2,))


def unbatched_class(lib: Any) -> type:
    """Two rows whose specs are those of one, assigned in `__init__`."""

    class Unbatched(lib.EnvBase):
        def __init__(self):
            super().__init__(batch_size=(2,))
            self.observation_spec_unbatched = lib.Composite(seen=lib.Unbounded((3,)))
            self.state_spec_unbatched = lib.Composite(goal=lib.Unbounded((3,)))
            self.action_spec_unbatched = lib.Bounded(-1, 1, (1,))
            self.reward_spec_unbatched = lib.Unbounded((1,))
            self.done_spec_unbatched = lib.Categorical(2, shape=(1,), dtype=torch.bool)

        def _reset(self, tensordict=None):
            return TensorDict({"seen": torch.zeros(2, 3), "goal": torch.ones(2, 3)}, [2])

        def _step(self, tensordict):
            flags = torch.zeros(2, 1, dtype=torch.bool)
            return TensorDict(
                {"seen": tensordict["goal"], "reward": torch.ones(2, 1), "done": flags}, [2]
            )

        def _set_seed(self, seed):
            pass

    return Unbatched


def unlocked(lib: Any) -> Any:
    """Stateless: everything it knows is in the data, so that a batch of any size will do."""

    class Unlocked(lib.EnvBase):
        batch_locked = False

        def __init__(self):
            super().__init__()
            self.observation_spec = lib.Composite(count=lib.Unbounded((1,)))
            self.state_spec = lib.Composite(count=lib.Unbounded((1,)))
            self.action_spec = lib.Bounded(0.0, 1.0, (1,))
            self.reward_spec = lib.Unbounded((1,))
            self.done_spec = lib.Categorical(2, shape=(1,), dtype=torch.bool)

        def _reset(self, tensordict):
            shape = () if tensordict is None else tensordict.batch_size
            return TensorDict({"count": torch.zeros(*shape, 1)}, shape)

        def _step(self, tensordict):
            count = tensordict["count"] + 1
            done = count >= 3
            flags = {"done": done, "terminated": done.clone()}
            reward = tensordict["action"] * 1.0
            return TensorDict({"count": count, "reward": reward, **flags}, tensordict.batch_size)

        def _set_seed(self, seed):
            pass

    return Unlocked()


def placed(lib: Any) -> Any:
    """Stateless, and begins at the state in the data where it is told to."""
    Unlocked = type(unlocked(lib))

    class Placed(Unlocked):
        _supports_set_state = True

        def _reset(self, tensordict, set_state):
            fresh = super()._reset(tensordict)
            return fresh.update(tensordict.select("count", strict=False)) if set_state else fresh

    return Placed()


def nested(lib: Any) -> Any:
    """Everything one level down, and a root that has neither a reward nor flags of its own."""

    class Nested(lib.EnvBase):
        def __init__(self):
            super().__init__()
            Composite, Unbounded = lib.Composite, lib.Unbounded
            self.observation_spec = Composite(data=Composite(count=Unbounded((2, 1)), shape=(2,)))
            self.action_spec = Composite(
                data=Composite(move=lib.Bounded(-1.0, 1.0, (2, 3)), shape=(2,))
            )
            self.reward_spec = Composite(data=Composite(pay=Unbounded((2, 1)), shape=(2,)))
            flag = lib.Categorical(2, shape=(2, 1), dtype=torch.bool)
            self.done_spec = Composite(
                data=Composite(done=flag, terminated=flag.clone(), shape=(2,))
            )
            self.count = torch.zeros(2, 1)

        def _reset(self, tensordict=None):
            mask = None if tensordict is None else tensordict.get(("data", "_reset"), None)
            mask = torch.ones(2, 1, dtype=torch.bool) if mask is None else mask
            self.count = self.count.masked_fill(mask, 0.0)
            flags = torch.zeros(2, 1, dtype=torch.bool)
            data = TensorDict(
                {"count": self.count.clone(), "done": flags, "terminated": flags.clone()}, [2]
            )
            return TensorDict({"data": data})

        def _step(self, tensordict):
            self.count = self.count + torch.tensor([[1.0], [2.0]])
            done = self.count >= 4
            pay = tensordict["data", "move"].sum(-1, keepdim=True)
            data = {
                "count": self.count.clone(),
                "pay": pay,
                "done": done,
                "terminated": done.clone(),
            }
            return TensorDict({"data": TensorDict(data, [2])})

        def _set_seed(self, seed):
            pass

    return Nested()


def groups(lib: Any) -> Any:
    """Two groups of agents, each with rewards of its own, one flag for all and a global state."""

    class Groups(lib.EnvBase):
        def __init__(self):
            super().__init__()
            self.agents = {"sheep": 3, "dogs": 1}
            Composite, Unbounded = lib.Composite, lib.Unbounded
            observations, actions, rewards = Composite(), Composite(), Composite()
            for group, n in self.agents.items():
                observations[group] = Composite(seen=Unbounded((n, 2)), shape=(n,))
                actions[group] = Composite(action=lib.OneHot(4, shape=(n, 4)), shape=(n,))
                rewards[group] = Composite(reward=Unbounded((n, 1)), shape=(n,))
            observations["weather"] = Unbounded((4,))
            self.observation_spec, self.action_spec = observations, actions
            self.reward_spec = rewards
            self.done_spec = lib.Categorical(2, shape=(1,), dtype=torch.bool)

        def _seen(self):
            out = TensorDict({"weather": torch.full((4,), float(self.time))})
            for group, n in self.agents.items():
                out[group] = TensorDict({"seen": torch.full((n, 2), float(self.time))}, [n])
            return out

        def _reset(self, tensordict=None):
            self.time = 0
            return self._seen()

        def _step(self, tensordict):
            self.time += 1
            out = self._seen()
            for group in self.agents:
                action = tensordict[group, "action"]
                out[group, "reward"] = action.float().argmax(-1, keepdim=True).float()
            return out.set("done", torch.tensor([self.time >= 3]))

        def _set_seed(self, seed):
            pass

    return Groups()


def dynamic(lib: Any) -> Any:
    """An observation that grows with each step."""

    class Dynamic(lib.EnvBase):
        def __init__(self):
            super().__init__()
            self.observation_spec = lib.Composite(trace=lib.Unbounded((-1, 2)))
            self.action_spec = lib.Bounded(-1.0, 1.0, (2,))
            self.reward_spec = lib.Unbounded((1,))

        def _reset(self, tensordict=None):
            self.trace = torch.zeros(1, 2)
            return TensorDict({"trace": self.trace})

        def _step(self, tensordict):
            self.trace = torch.cat([self.trace, torch.ones(1, 2)])
            done = torch.tensor([len(self.trace) > 3])
            return TensorDict({"trace": self.trace, "reward": torch.ones(1), "done": done})

        def _set_seed(self, seed):
            pass

    return Dynamic()


def talking(lib: Any) -> Any:
    """Says a word with each observation."""

    class Talking(lib.EnvBase):
        def __init__(self):
            super().__init__()
            self.observation_spec = lib.Composite(
                word=lib.NonTensor(shape=(), example_data="a"), count=lib.Unbounded((1,))
            )
            self.action_spec = lib.OneHot(2)
            self.reward_spec = lib.Unbounded((1,))

        def _said(self):
            return {
                "word": NonTensorData(f"step {self.time}"),
                "count": torch.tensor([float(self.time)]),
            }

        def _reset(self, tensordict=None):
            self.time = 0
            return TensorDict(self._said())

        def _step(self, tensordict):
            self.time += 1
            done = torch.tensor([self.time >= 3])
            return TensorDict({**self._said(), "reward": torch.ones(1), "done": done})

        def _set_seed(self, seed):
            pass

    return Talking()


def several(lib: Any) -> Any:
    """Two actions, two rewards and flags at two levels, of which those of the root decide."""

    class Several(lib.EnvBase):
        def __init__(self):
            super().__init__()
            Composite, Unbounded = lib.Composite, lib.Unbounded
            self.observation_spec = Composite(
                count=Unbounded((1,)), inner=Composite(count=Unbounded((1,)))
            )
            self.action_spec = Composite(
                turn=lib.Bounded(-1.0, 1.0, (1,)), inner=Composite(push=lib.OneHot(3))
            )
            self.reward_spec = Composite(
                reward=Unbounded((1,)), inner=Composite(bonus=Unbounded((1,)))
            )
            flag = lib.Categorical(2, shape=(1,), dtype=torch.bool)
            self.done_spec = Composite(
                done=flag,
                terminated=flag.clone(),
                inner=Composite(done=flag.clone(), terminated=flag.clone()),
            )

        def _seen(self):
            count = torch.tensor([float(self.time)])
            return TensorDict({"count": count, "inner": TensorDict({"count": count * 10})})

        def _reset(self, tensordict=None):
            self.time = 0
            out = self._seen()
            for key in self.done_keys:
                out.set(key, torch.zeros(1, dtype=torch.bool))
            return out

        def _step(self, tensordict):
            self.time += 1
            out = self._seen().set("reward", tensordict["turn"] * 1.0)
            out["inner", "bonus"] = (
                tensordict["inner", "push"].float().argmax(-1, keepdim=True) * 1.0
            )
            for key in self.done_keys:
                limit = 3 if isinstance(key, str) else 2
                out.set(key, torch.tensor([self.time >= limit]))
            return out

        def _set_seed(self, seed):
            pass

    return Several()


def uneven(lib: Any) -> Any:
    """Two agents that see vectors of unlike length: a lazy stack below one name."""

    class Uneven(lib.EnvBase):
        def __init__(self):
            super().__init__()
            Composite, Unbounded = lib.Composite, lib.Unbounded
            agents = [Composite(seen=Unbounded((size,))) for size in (2, 3)]
            self.observation_spec = Composite(agents=torch.stack(agents))
            self.action_spec = Composite(
                agents=Composite(action=lib.Bounded(-1.0, 1.0, (2, 1)), shape=(2,))
            )
            self.reward_spec = lib.Unbounded((1,))

        def _seen(self):
            parts = [TensorDict({"seen": torch.full((size,), float(self.time))}) for size in (2, 3)]
            return TensorDict({"agents": LazyStackedTensorDict(*parts)})

        def _reset(self, tensordict=None):
            self.time = 0
            return self._seen()

        def _step(self, tensordict):
            self.time += 1
            return self._seen().update(
                {
                    "reward": tensordict["agents", "action"].sum(0),
                    "done": torch.tensor([self.time >= 3]),
                }
            )

        def _set_seed(self, seed):
            pass

    return Uneven()


ENVS = {
    made.__name__: made
    for made in (counter, batched, unlocked, placed, nested, groups, dynamic, talking, several)
}
"""Envs whose rollouts are dense, or a lazy stack along time."""

UNEVEN = {"uneven": uneven}
