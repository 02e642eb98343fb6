"""A script as users write it, in which type checkers find nothing to say (`test_types`).

`assert_type` fails where a checker has another idea of a type, no idea included.
"""

from __future__ import annotations

from typing import assert_type

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import (
    AsyncEnvPool,
    Bounded,
    BraxEnv,
    Categorical,
    CatFrames,
    Collector,
    Comparison,
    Compose,
    Composite,
    EnvBase,
    Evaluation,
    GymEnv,
    JaxEnv,
    MixedEnv,
    MultiThreadedEnv,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StatelessEnv,
    StepCounter,
    TensorSpec,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    compile_policy,
    evaluate,
    step_mdp,
)
from envkit.specs.annotations import EnvData


def make() -> GymEnv:
    return GymEnv(
        "CartPole-v1", device="cpu", render_mode="rgb_array", categorical_action_encoding=True
    )


class Counting(EnvBase):
    """An env of one's own."""

    def __init__(self, limit: int = 10, device: str | None = None) -> None:
        super().__init__(device=device, batch_size=[], run_type_checks=True)
        self.limit = limit
        self.observation_spec = Composite(count=Unbounded((1,)), shape=self.batch_size)
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        return TensorDict({"count": torch.zeros(1)}, [])

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"count": td["count"] + 1, "reward": torch.ones(1)}, [])

    def _set_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def specs() -> None:
    box = Bounded(-1.0, torch.ones(3), (3,), device="cpu", dtype=torch.float32)
    tree = Composite(seen=box, flag=Categorical(2, dtype=torch.bool), shape=[], device="cpu")
    tree["more", "deep"] = Unbounded(4)
    assert_type(tree, Composite)
    assert_type(tree.expand(3), Composite)
    assert_type(box.expand(2, 3), Bounded)
    assert_type(tree.to("cpu"), Composite)
    value = box.rand((5,)) * 2 + 1
    assert_type(box.is_in(value), bool)
    print(tree.rand()["seen"] + 1, tree.zero().shape, box.project(value).sum(), box.space)
    print(box.to_numpy(value).mean(), tree.keys(True, True), len(tree), "seen" in tree)


def collect(env: EnvBase, steps: int) -> float:
    td = env.reset()
    total = 0.0
    for _ in range(steps):
        data, td = env.step_and_maybe_reset(env.rand_action(td))
        total += float(data["next", "reward"].sum())
    return total


def act(observation: torch.Tensor) -> torch.Tensor:
    return observation.argmax(-1)


def gather() -> None:
    pool = AsyncEnvPool([make] * 4, backend="threading", min_get=2)
    collector = Collector(make, torch.nn.Linear(4, 2), frames_per_batch=10, total_frames=20)

    assert_type(pool, AsyncEnvPool)
    pool.async_step_send(pool.rand_action(pool.reset()))
    assert_type(pool.async_step_recv(min_get=1), EnvData)
    assert_type(collector.next(), EnvData | None)
    for batch in collector:
        assert_type(batch, EnvData)
        print(batch["next", "reward"].mean().item())


def run(task: StatelessEnv) -> None:
    brax = BraxEnv(
        "inverted_pendulum", backend="spring", batch_size=[8], device="cpu", episode_length=100
    )
    mine = JaxEnv(
        task, batch_size=[4], reset_mode="pool", requires_grad=True, allow_done_after_reset=True
    )
    serial = SerialEnv(2, make, seed=0)
    parallel = ParallelEnv(2, [make, make], num_processes=2, timeout=30.0, create_env_kwargs={})
    counting = Counting(3)
    env = TransformedEnv(
        make(), Compose(StepCounter(max_steps=100), RewardSum(), CatFrames(4, -1)), seed=1
    )
    norm = ObservationNorm(0.0, 1.0, in_keys=["observation"])
    both = MixedEnv([serial, parallel], seed=2)
    threads = MultiThreadedEnv(
        4, "CartPole-v1", create_env_kwargs={"max_episode_steps": 9}, frame_skip=2
    )

    assert_type(make(), GymEnv)
    assert_type(brax, BraxEnv)
    assert_type(mine, JaxEnv)
    assert_type(serial, SerialEnv)
    assert_type(parallel, ParallelEnv)
    assert_type(counting, Counting)
    assert_type(env, TransformedEnv)
    assert_type(both, MixedEnv)
    assert_type(threads, MultiThreadedEnv)
    assert_type(norm, ObservationNorm)
    assert_type(counting.rollout(3), EnvData)
    assert_type(counting.rollout(3)[:, 0], EnvData)
    assert_type(env.reset(), EnvData)
    assert_type(parallel.reset(list_of_kwargs=[{}, {}]), EnvData)
    assert_type(both.rand_action(), EnvData)
    assert_type(env.step(env.reset()), EnvData)
    assert_type(env.step_and_maybe_reset(env.rand_action()), tuple[EnvData, EnvData])
    assert_type(make().action_spec, TensorSpec)
    assert_type(env.observation_spec, Composite)
    assert_type(env.batch_size, torch.Size)
    assert_type(env.append_transform(norm), TransformedEnv)
    assert_type(brax.to("cpu"), BraxEnv)
    assert_type(parallel.cpu(), ParallelEnv)
    assert_type(counting.is_closed, bool)
    assert_type(evaluate(counting, act, 3), Evaluation)
    assert_type(evaluate(counting, {"mine": act, "random": None}, 3), Comparison)
    check_env_specs(counting)

    pieces = serial.rollout(5, torch.nn.Linear(4, 2), break_when_all_done=True)
    again: TensorDictBase = env.rollout(
        5, act, callback=lambda env, td: None, tensordict=pieces[:, 0]
    )
    data, root = brax.unroll(brax.reset(), 10, compile_policy(torch.nn.Linear(4, 1)))
    loss = (data["next", "reward"] * again["next", "reward"]).mean()
    loss.backward()
    print(data["next"].get("reward").argmax().item() + pieces.get(("next", "reward"), None).item())
    print(
        root.shape,
        step_mdp(data[:, -1]),
        brax.observation_spec.keys(),
        env.transform[0],
        loss.item(),
    )
    print(
        collect(counting, 3), env.base_env, brax.action_spec.rand() + 1, again.get("action").shape
    )
    with counting as inside:
        inside.set_seed(0)
    parallel.close(raise_if_closed=False)
    brax.train().eval().state_dict()
