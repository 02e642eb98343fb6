"""A script as users write it: both type checkers find nothing to say (`tests/test_types.py`)."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import (
    BraxEnv,
    Compose,
    Composite,
    EnvBase,
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    step_mdp,
)


def make() -> GymEnv:
    return GymEnv("CartPole-v1", device="cpu")


class Counting(EnvBase):
    def __init__(self, limit: int, **kwargs: object) -> None:
        super().__init__()
        self.limit = limit
        self.observation_spec = Composite(count=Unbounded((1,)))

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        return TensorDict({"count": torch.zeros(1)}, [])

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"count": td["count"] + 1, "reward": torch.ones(1)}, [])

    def _set_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def collect(env: EnvBase, steps: int) -> float:
    td = env.reset()
    total = 0.0
    for _ in range(steps):
        data, td = env.step_and_maybe_reset(env.rand_action(td))
        total += float(data["next", "reward"].sum())
    return total


def main() -> None:
    brax = BraxEnv("inverted_pendulum", backend="spring", batch_size=[8], device="cpu")
    serial = SerialEnv(2, make)
    parallel = ParallelEnv(2, make, num_processes=2, timeout=30.0)
    counting = Counting(3)
    env = TransformedEnv(make(), Compose(StepCounter(max_steps=100), RewardSum()))
    transform: Compose | object = env.transform
    both = MixedEnv([serial, parallel])
    check_env_specs(counting)

    data = brax.rollout(10, break_when_any_done=False)
    rewards: torch.Tensor = data["next", "reward"]
    run, root = brax.unroll(brax.reset(), 10)
    following = step_mdp(run[:, -1])
    size: torch.Size = both.batch_size
    pieces: TensorDictBase = serial.rollout(5, torch.nn.Linear(4, 2), break_when_all_done=True)
    print(rewards.mean(), root.shape, following.shape, size, pieces.shape, transform)
    print(collect(counting, 3), JaxEnv, brax.action_spec.rand(), brax.observation_spec.keys())
    parallel.close()
    parallel.close(raise_if_closed=False)


if __name__ == "__main__":
    main()
