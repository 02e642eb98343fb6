"""Custom envs written as they are for the reference API: only the names they import come from envkit.

`Spring` has its parameters in the data and static dynamics, `Wrapped` stands on a simulator through the
hooks of a wrapper, `Herd` has agents in nodes, and `Older`, `OlderInstance` and `OldestOfAll` declare
specs in `__new__` or in the class.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    EnvBase,
    OneHot,
    Unbounded,
    make_composite_from_td,
)

# ------------------------------------------------------------- parameters in the data, static step


def _step(tensordict):
    x, v = tensordict["x"], tensordict["v"]
    params = tensordict["params"]
    u = tensordict["action"].squeeze(-1).clamp(-params["max_force"], params["max_force"])
    costs = x**2 + 0.1 * v**2 + 0.001 * u**2
    new_v = v + (u - params["k"] * x) / params["m"] * params["dt"]
    new_v = new_v.clamp(-params["max_speed"], params["max_speed"])
    new_x = (x + new_v * params["dt"]).clamp(-10, 10)
    reward = -costs.view(*tensordict.shape, 1)
    done = torch.zeros_like(reward, dtype=torch.bool)
    return TensorDict(
        {"x": new_x, "v": new_v, "params": params, "reward": reward, "done": done},
        tensordict.shape,
    )


def _reset(self, tensordict):
    if tensordict is None or tensordict.is_empty():
        tensordict = self.gen_params(batch_size=self.batch_size)
    x = torch.rand(tensordict.shape, generator=self.rng, device=self.device) * 2 - 1
    v = torch.rand(tensordict.shape, generator=self.rng, device=self.device) * 2 - 1
    return TensorDict({"x": x, "v": v, "params": tensordict["params"]}, batch_size=tensordict.shape)


def _make_spec(self, td_params):
    self.observation_spec = Composite(
        x=Bounded(low=-10.0, high=10.0, shape=(), dtype=torch.float32),
        v=Bounded(
            low=-td_params["params", "max_speed"],
            high=td_params["params", "max_speed"],
            shape=(),
            dtype=torch.float32,
        ),
        params=make_composite_from_td(td_params["params"], unsqueeze_null_shapes=False),
        shape=(),
    )
    self.state_spec = self.observation_spec.clone()
    self.action_spec = Bounded(
        low=-td_params["params", "max_force"],
        high=td_params["params", "max_force"],
        shape=(1,),
        dtype=torch.float32,
    )
    self.reward_spec = Unbounded(shape=(*td_params.shape, 1))


def gen_params(batch_size=None) -> TensorDictBase:
    if batch_size is None:
        batch_size = []
    td = TensorDict(
        {
            "params": TensorDict(
                {"max_speed": 8, "max_force": 2.0, "dt": 0.05, "k": 1.0, "m": 1.0}, []
            )
        },
        [],
    )
    if batch_size:
        td = td.expand(batch_size).contiguous()
    return td


def _set_seed(self, seed):
    self.rng = torch.Generator().manual_seed(seed)


class Spring(EnvBase):
    """A mass on a spring whose parameters travel with the data."""

    metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012
    batch_locked = False

    def __init__(self, td_params=None, seed=None, device="cpu"):
        if td_params is None:
            td_params = self.gen_params()
        super().__init__(device=device, batch_size=[])
        self._make_spec(td_params)
        if seed is None:
            seed = torch.empty((), dtype=torch.int64).random_().item()
        self.set_seed(seed)

    gen_params = staticmethod(gen_params)
    _make_spec = _make_spec
    _reset = _reset
    _step = staticmethod(_step)
    _set_seed = _set_seed


# ------------------------------------------------------------------------- a wrapper of a simulator


class Lift:
    """A simulator that knows nothing of tensors: go up or down until the top floor."""

    def __init__(self, floors=4):
        self.floors = floors
        self.random = np.random.default_rng()

    def restart(self, floor=None):
        self.floor = int(self.random.integers(2)) if floor is None else floor
        return np.array([self.floor], dtype=np.float32)

    def move(self, up):
        self.floor = max(0, self.floor + (1 if up else -1))
        return np.array([self.floor], dtype=np.float32), float(up), self.floor >= self.floors


class WrapperBase(EnvBase):
    """The hooks that wrappers of simulators write."""

    libname = None

    def __init__(self, *args, device="cpu", batch_size=None, **kwargs):
        super().__init__(device=device, batch_size=batch_size)
        self._constructor_kwargs = kwargs
        self._check_kwargs(kwargs)
        self._env = self._build_env(**kwargs)
        self._make_specs(self._env)
        self.is_closed = False
        self._init_env()

    def __getattr__(self, attr):
        if attr in self.__dir__():
            return super().__getattr__(attr)
        if attr.startswith("__"):
            raise AttributeError(attr)
        if "_env" in self.__dir__():
            return getattr(self.__getattribute__("_env"), attr)
        return super().__getattr__(attr)


class Wrapped(WrapperBase):
    """`Lift` behind the interface; its attributes are found on the wrapper too."""

    libname = "lift"

    def __init__(self, env=None, floors=None, **kwargs):
        if env is not None:
            kwargs["env"] = env
        if floors is not None:
            kwargs["floors"] = floors
        super().__init__(**kwargs)

    def _check_kwargs(self, kwargs):
        if "env" in kwargs and not isinstance(kwargs["env"], Lift):
            raise TypeError("env is not of type 'Lift'.")

    def _build_env(self, env=None, floors=4):
        return Lift(floors) if env is None else env

    def _make_specs(self, env):
        self.observation_spec = Composite(observation=Unbounded((1,), device=self.device))
        self.action_spec = Categorical(2, shape=(), device=self.device)
        self.reward_spec = Unbounded((1,), device=self.device)
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool, device=self.device)

    def _init_env(self):
        self._env.restart()

    def _set_seed(self, seed):
        self._env.random = np.random.default_rng(seed)

    def _reset(self, tensordict=None, **kwargs):
        observation = self._env.restart(**kwargs)
        return TensorDict(
            source={"observation": torch.as_tensor(observation, device=self.device)},
            batch_size=self.batch_size,
            device=self.device,
        )

    def _step(self, tensordict):
        observation, reward, done = self._env.move(bool(tensordict.get("action")))
        return TensorDict(
            source={
                "observation": torch.as_tensor(observation),
                "reward": torch.tensor(reward),
                "done": torch.tensor(done),
            },
            batch_size=tensordict.batch_size,
            device=self.device,
        )


# ---------------------------------------------------------------------------------- several agents


class Herd(EnvBase):
    """Three sheep and a dog: two nodes of agents, one root flag, and a global state."""

    def __init__(self, num_sheep=3, max_steps=6, device=None):
        super().__init__(batch_size=torch.Size([]), device=device)
        self.max_steps = max_steps
        self.group_map = {"sheep": [f"sheep_{i}" for i in range(num_sheep)], "dog": ["dog_0"]}
        self._make_specs()

    def _make_specs(self):
        self.unbatched_action_spec = Composite(device=self.device)
        self.unbatched_observation_spec = Composite(device=self.device)
        self.unbatched_reward_spec = Composite(device=self.device)
        for group, agents in self.group_map.items():
            n = len(agents)
            self.unbatched_action_spec[group] = Composite(
                {"action": torch.stack([OneHot(4)] * n)}, shape=torch.Size((n,))
            )
            self.unbatched_observation_spec[group] = Composite(
                {
                    "observation": torch.stack([Unbounded((2,))] * n),
                    "info": Composite({"alone": torch.stack([Binary(1)] * n)}, shape=(n,)),
                },
                shape=torch.Size((n,)),
            )
            self.unbatched_reward_spec[group] = Composite(
                {"reward": Unbounded((n, 1))}, shape=torch.Size((n,))
            )
        self.unbatched_observation_spec["state"] = Unbounded((4,))
        self.action_spec = self.unbatched_action_spec.expand(*self.batch_size)
        self.observation_spec = self.unbatched_observation_spec.expand(*self.batch_size)
        self.reward_spec = self.unbatched_reward_spec.expand(*self.batch_size)
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)

    def _observe(self):
        out = TensorDict({"state": torch.full((4,), float(self.steps))}, self.batch_size)
        for group, agents in self.group_map.items():
            n = len(agents)
            info = TensorDict({"alone": torch.ones(n, 1, dtype=torch.int8)}, [n])
            out.set(group, TensorDict({"observation": self.place[group], "info": info}, [n]))
        return out

    def _reset(self, tensordict=None, **kwargs):
        self.steps = 0
        self.place = {group: torch.zeros(len(a), 2) for group, a in self.group_map.items()}
        return self._observe()

    def _step(self, tensordict):
        self.steps += 1
        moves = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
        rewards = {}
        for group in self.group_map:
            action = tensordict.get((group, "action")).float()
            self.place[group] = self.place[group] + action @ moves
            rewards[group] = -self.place[group].norm(dim=-1, keepdim=True)
        out = self._observe()
        for group, reward in rewards.items():
            out.set((group, "reward"), reward)
        out.set("done", torch.tensor([self.steps >= self.max_steps]))
        return out

    def _set_seed(self, seed):
        torch.manual_seed(seed)


# ------------------------------------------------------------------------- specs set in __new__


class Older(EnvBase):
    """Declares its composites on the class, in `__new__`, for a batch size it is given."""

    def __new__(cls, *args, batch_size=None, observation_spec=None, **kwargs):
        batch_size = torch.Size(batch_size or [])
        if observation_spec is None:
            observation_spec = Composite(observation=Unbounded((*batch_size, 3)), shape=batch_size)
        cls._output_spec = Composite(
            full_observation_spec=observation_spec,
            full_reward_spec=Composite(reward=Unbounded((*batch_size, 1)), shape=batch_size),
            full_done_spec=Composite(
                done=Categorical(2, shape=(*batch_size, 1), dtype=torch.bool), shape=batch_size
            ),
            shape=batch_size,
        )
        cls._input_spec = Composite(
            full_action_spec=Composite(
                action=Bounded(-1.0, 1.0, (*batch_size, 3)), shape=batch_size
            ),
            full_state_spec=Composite(shape=batch_size),
            shape=batch_size,
        )
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, maxstep=5, batch_size=None, observation_spec=None, device=None):
        super().__init__(device=device, batch_size=batch_size)
        self.maxstep = maxstep
        self.counter = 0

    def _set_seed(self, seed):
        self.seed = seed

    def _reset(self, tensordict=None):
        self.counter = 0
        return TensorDict({"observation": torch.zeros(*self.batch_size, 3)}, self.batch_size)

    def _step(self, tensordict):
        self.counter += 1
        done = torch.full((*self.batch_size, 1), self.counter >= self.maxstep)
        return TensorDict(
            {
                "observation": tensordict["action"] * self.counter,
                "reward": tensordict["action"].sum(-1, keepdim=True),
                "done": done,
            },
            self.batch_size,
        )


class OlderInstance(EnvBase):
    """Declares its composites on the instance, in `__new__`, and takes data of any batch size."""

    def __new__(cls, *args, **kwargs):
        env = super().__new__(cls, *args, _batch_locked=False, _inplace_update=False, **kwargs)
        observation = Composite(level=Unbounded((1,)))
        env._output_spec = Composite(full_observation_spec=observation)
        env._input_spec = Composite(
            full_action_spec=Categorical(2, shape=(1,)),
            full_state_spec=observation.clone(),
        )
        return env

    def _set_seed(self, seed):
        pass

    def _reset(self, tensordict=None):
        size = self.batch_size if tensordict is None else tensordict.batch_size
        return TensorDict({"level": torch.zeros(*size, 1)}, size)

    def _step(self, tensordict):
        level = tensordict["level"] + tensordict["action"]
        return TensorDict({"level": level, "terminated": level >= 3}, tensordict.batch_size)


class OldestOfAll(EnvBase):
    """Declares its composites in the body of the class."""

    _output_spec = Composite(
        full_observation_spec=Composite(seen=Unbounded((2,))), full_reward_spec=Unbounded((1,))
    )
    _input_spec = Composite(full_action_spec=Composite(action=OneHot(3)))

    def _set_seed(self, seed):
        pass

    def _reset(self, tensordict=None):
        return TensorDict({"seen": torch.zeros(2)})

    def _step(self, tensordict):
        return TensorDict({"seen": torch.ones(2), "reward": 1.0, "done": False})
