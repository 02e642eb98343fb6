"""Environments written from scratch: a pendulum whose parameters are data, counters, chains, bandits."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import (
    Bounded,
    Categorical,
    CatTensors,
    Compose,
    Composite,
    EnvBase,
    ObservationNorm,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    apply_to_composite,
    check_env_specs,
    make_composite_from_td,
    step_mdp,
)

# ------------------------------------------------------------------------- a pendulum, differentiable


def angle_normalize(x):
    return ((x + math.pi) % (2 * math.pi)) - math.pi


class PendulumEnv(EnvBase):
    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 30}  # noqa: RUF012
    batch_locked = False

    def __init__(self, td_params=None, seed=None, device="cpu"):
        if td_params is None:
            td_params = self.gen_params()
        super().__init__(device=device, batch_size=[])
        self._make_spec(td_params)
        if seed is None:
            seed = torch.empty((), dtype=torch.int64).random_().item()
        self.set_seed(seed)

    @staticmethod
    def gen_params(g=10.0, batch_size=None) -> TensorDictBase:
        if batch_size is None:
            batch_size = []
        params = TensorDict(
            {"max_speed": 8, "max_torque": 2.0, "dt": 0.05, "g": g, "m": 1.0, "l": 1.0}, []
        )
        td = TensorDict({"params": params}, [])
        if batch_size:
            td = td.expand(batch_size).contiguous()
        return td

    def _make_spec(self, td_params):
        self.observation_spec = Composite(
            th=Bounded(low=-torch.pi, high=torch.pi, shape=(), dtype=torch.float32),
            thdot=Bounded(
                low=-td_params["params", "max_speed"],
                high=td_params["params", "max_speed"],
                shape=(),
                dtype=torch.float32,
            ),
            params=self.make_composite(td_params["params"]),
            shape=(),
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(
            low=-td_params["params", "max_torque"],
            high=td_params["params", "max_torque"],
            shape=(1,),
            dtype=torch.float32,
        )
        self.reward_spec = Unbounded(shape=(*td_params.shape, 1))

    def make_composite(self, td):
        return Composite(
            {
                key: self.make_composite(tensor)
                if isinstance(tensor, TensorDictBase)
                else Unbounded(dtype=tensor.dtype, device=tensor.device, shape=tensor.shape)
                for key, tensor in td.items()
            },
            shape=td.shape,
        )

    def _reset(self, tensordict):
        if tensordict is None or tensordict.is_empty():
            tensordict = self.gen_params(batch_size=self.batch_size)
        high_th = torch.tensor(math.pi, device=self.device)
        th = torch.rand(tensordict.shape, generator=self.rng) * 2 * high_th - high_th
        thdot = torch.rand(tensordict.shape, generator=self.rng) * 2 - 1
        return TensorDict(
            {"th": th, "thdot": thdot, "params": tensordict["params"]},
            batch_size=tensordict.shape,
        )

    @staticmethod
    def _step(tensordict):
        th, thdot = tensordict["th"], tensordict["thdot"]
        g, mass, length, dt = (tensordict["params", name] for name in ("g", "m", "l", "dt"))
        u = tensordict["action"].squeeze(-1)
        limit = tensordict["params", "max_torque"]
        u = u.clamp(-limit, limit)
        costs = angle_normalize(th) ** 2 + 0.1 * thdot**2 + 0.001 * (u**2)
        speed = thdot + (3 * g / (2 * length) * th.sin() + 3.0 / (mass * length**2) * u) * dt
        top = tensordict["params", "max_speed"]
        speed = speed.clamp(-top, top)
        reward = -costs.view(*tensordict.shape, 1)
        return TensorDict(
            {
                "th": angle_normalize(th + speed * dt),
                "thdot": speed,
                "params": tensordict["params"],
                "reward": reward,
                "done": torch.zeros_like(reward, dtype=torch.bool),
            },
            tensordict.shape,
        )

    def _set_seed(self, seed):
        self.rng = torch.manual_seed(seed)


class SinTransform(Transform):
    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.sin()

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    @apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return Bounded(
            low=-1,
            high=1,
            shape=observation_spec.shape,
            dtype=observation_spec.dtype,
            device=observation_spec.device,
        )


class CosTransform(SinTransform):
    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.cos()


def pendulum_with_transforms():
    env = TransformedEnv(
        PendulumEnv(),
        UnsqueezeTransform(dim=-1, in_keys=["th", "thdot"], in_keys_inv=["th", "thdot"]),
    )
    env.append_transform(SinTransform(in_keys=["th"], out_keys=["sin"]))
    env.append_transform(CosTransform(in_keys=["th"], out_keys=["cos"]))
    env.append_transform(
        CatTensors(in_keys=["sin", "cos", "thdot"], dim=-1, out_key="observation", del_keys=False)
    )
    return env


def test_a_pendulum_from_scratch_obeys_its_specs():
    env = PendulumEnv()

    check_env_specs(env)

    td = env.rand_step(env.reset())
    assert set(td["next"].keys()) >= {"th", "thdot", "params", "reward", "done", "terminated"}
    assert env.reward_spec.shape == (1,)


def test_its_transformed_version_obeys_its_specs_and_keeps_its_state():
    env = pendulum_with_transforms()

    check_env_specs(env)

    td = env.rollout(3)
    assert td["observation"].shape == (3, 3)
    torch.testing.assert_close(td["observation"][..., 1:2], td["th"].sin())
    assert td["th"].shape == (3, 1)


def test_a_batch_of_pendulums_is_rolled_out_from_parameters():
    env, batch_size = pendulum_with_transforms(), 10

    td = env.reset(env.gen_params(batch_size=[batch_size]))
    rollout = env.rollout(3, auto_reset=False, tensordict=td)

    assert rollout.shape == (batch_size, 3)
    assert rollout.names[-1] == "time"


@pytest.mark.slow
def test_a_policy_learns_by_gradients_through_the_dynamics():
    torch.manual_seed(0)
    env = pendulum_with_transforms()
    env.set_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    optim = torch.optim.Adam(policy.parameters(), lr=2e-3)
    logs = defaultdict(list)

    for _ in range(15):
        env.set_seed(0)
        init_td = env.reset(env.gen_params(batch_size=[16]))
        rollout = env.rollout(20, policy, tensordict=init_td, auto_reset=False)
        traj_return = rollout["next", "reward"].mean()
        (-traj_return).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        logs["return"].append(traj_return.item())

    assert all(math.isfinite(value) for value in logs["return"])
    assert sum(logs["return"][-5:]) > sum(logs["return"][:5])


def test_specs_are_read_off_data():
    params = PendulumEnv.gen_params(batch_size=[4])

    spec = make_composite_from_td(params)

    assert spec.shape == (4,)
    assert spec.is_in(params)


# ------------------------------------------------------------------------------------------ counters


class CountingEnv(EnvBase):
    def __init__(self, max_steps: int = 5, start_val: int = 0, **kwargs):
        self.max_steps = max_steps
        super().__init__(**kwargs)
        self.observation_spec = Composite(
            observation=Unbounded((*self.batch_size, 1), dtype=torch.int32, device=self.device),
            shape=self.batch_size,
            device=self.device,
        )
        self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        self.done_spec = Categorical(
            2, dtype=torch.bool, shape=(*self.batch_size, 1), device=self.device
        )
        self.action_spec = Bounded(0, 1, (*self.batch_size, 1), dtype=torch.int32)
        self.register_buffer("count", torch.zeros((*self.batch_size, 1), dtype=torch.int))
        self.start_val = start_val

    def _set_seed(self, seed):
        torch.manual_seed(seed)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += tensordict.get("action").to(torch.int)
        return TensorDict(
            source={
                "observation": self.count.clone(),
                "done": self.count > self.max_steps,
                "terminated": self.count > self.max_steps,
                "reward": torch.zeros_like(self.count, dtype=torch.float),
            },
            batch_size=self.batch_size,
            device=self.device,
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        if tensordict is not None and "_reset" in tensordict.keys():
            _reset = tensordict.get("_reset")
            self.count[_reset] = self.start_val
        else:
            self.count[:] = self.start_val
        return TensorDict(
            {
                "observation": self.count.clone(),
                "done": self.count > self.max_steps,
                "terminated": self.count > self.max_steps,
            },
            batch_size=self.batch_size,
            device=self.device,
        )


def count_up(td):
    return td.set("action", torch.ones((*td.batch_size, 1), dtype=torch.int32))


def test_a_counting_env_obeys_its_specs():
    check_env_specs(CountingEnv(max_steps=2))


@pytest.mark.parametrize("batch_size", [[], [3], [2, 2]])
def test_a_counting_env_of_any_batch_size(batch_size):
    env = CountingEnv(max_steps=2, batch_size=batch_size)

    rollout = env.rollout(20, policy=count_up)

    assert rollout.shape == (*batch_size, 3)
    assert rollout["next", "observation"][..., 0].flatten().tolist()[:3] == [1, 2, 3]


def test_rows_of_a_counting_env_are_reset_by_their_own_mask():
    env = CountingEnv(max_steps=10, batch_size=[3])
    td = env.reset()
    for _ in range(2):
        td = step_mdp(env.step(count_up(td)))
    td["_reset"] = torch.tensor([[True], [False], [False]])

    td = env.reset(td)

    assert td["observation"].flatten().tolist() == [0, 2, 2]


def test_stepping_goes_on_without_resets_if_told_to():
    env = CountingEnv(max_steps=1)

    rollout = env.rollout(7, policy=count_up, break_when_any_done=False)

    assert rollout.shape == (7,)
    assert rollout["observation"].flatten().tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_a_counter_in_a_serial_env_is_counted_beside():
    env = TransformedEnv(
        SerialEnv(2, lambda: CountingEnv(max_steps=3)), Compose(StepCounter(max_steps=2))
    )

    rollout = env.rollout(10, policy=count_up, break_when_any_done=False)

    assert rollout["step_count"][0].flatten().tolist() == [0, 1] * 5
    assert rollout["next", "truncated"][0].flatten().tolist() == [False, True] * 5


def test_observations_are_normalised_by_what_random_rollouts_gave():
    env = TransformedEnv(PendulumEnv(seed=1), ObservationNorm(in_keys=["thdot"]))
    env.transform[0].init_stats(num_iter=64, key="thdot")

    rollout = env.rollout(64, break_when_any_done=False)

    assert rollout["thdot"].mean().abs() < 2.0
    assert env.transform[0].loc.shape == env.transform[0].scale.shape


# ------------------------------------------------------------------------------------------- a bandit


class Bandit(EnvBase):
    """One step an episode, a pull of one of several arms."""

    def __init__(self, arms):
        super().__init__()
        self.means = torch.as_tensor(arms)
        self.observation_spec = Composite(ones=Unbounded(shape=(1,)))
        self.action_spec = Categorical(len(arms))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"ones": torch.ones(1)})

    def _step(self, tensordict):
        reward = self.means[tensordict["action"]].reshape(1)
        return TensorDict(
            {"ones": torch.ones(1), "reward": reward, "done": torch.ones(1, dtype=torch.bool)}
        )

    def _set_seed(self, seed):
        pass


def test_a_bandit_ends_after_each_pull():
    env = Bandit([0.0, 1.0, 2.0])
    env.set_seed(0)

    rollout = env.rollout(30, break_when_any_done=False)

    assert rollout["next", "done"].all()
    assert (rollout["next", "reward"].squeeze(-1) == rollout["action"]).all()
    assert env.action_spec.n == 3
