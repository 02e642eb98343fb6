"""Mistakes that type checkers find: each stands on a line that says which (`test_types`)."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envkit import (
    AsyncEnvPool,
    Bounded,
    BraxEnv,
    BraxWrapper,
    Collector,
    Composite,
    EnvBase,
    GymEnv,
    JaxEnv,
    MultiSyncDataCollector,
    MultiThreadedEnv,
    ParallelEnv,
    SerialEnv,
    StatelessEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    step_mdp,
)


def make() -> GymEnv:
    return GymEnv("CartPole-v1")


def mistaken(
    env: GymEnv, brax: BraxEnv, task: StatelessEnv, pool: ParallelEnv, several: AsyncEnvPool
) -> None:
    env.rolout(3)  # mistake: misspelt method
    brax.unrol(brax.reset(), 3)  # mistake: misspelt method
    pool.worker_pid  # mistake: misspelt property # noqa: B018
    make().to("cpu").rollouts(3)  # mistake: misspelt method of what a method gave
    TransformedEnv(env).insert_transforms(0, StepCounter())  # mistake: misspelt method
    StepCounter().reset_parents()  # mistake: misspelt method of a transform
    ParallelEnv("two", make)  # mistake: wrong type of num_workers
    SerialEnv(num_workers=2.5, create_env_fn=make)  # mistake: wrong type of num_workers
    SerialEnv(2, make, num_proceses=1)  # mistake: misspelt keyword
    ParallelEnv(2, make, time_out=1.0)  # mistake: misspelt keyword
    ParallelEnv(2, make, on_worker_failure="restarts")  # mistake: misspelt choice
    JaxEnv(task, state_layout="pakced")  # mistake: misspelt choice
    BraxWrapper(task, batchsize=[4])  # mistake: misspelt keyword
    JaxEnv(task, batchsize=[4])  # mistake: misspelt keyword
    BraxEnv("fast", batchsize=[4])  # mistake: misspelt keyword
    TransformedEnv(env, transforms=StepCounter())  # mistake: misspelt keyword
    TransformedEnv(env, StepCounter(max_step=3))  # mistake: misspelt keyword
    Composite(shap=(3,))  # mistake: misspelt keyword
    Bounded(0, 1, (3,), device=torch.float32)  # mistake: a dtype for a device
    GymEnv("CartPole-v1", frame_skip="2")  # mistake: wrong type of frame_skip
    MultiThreadedEnv(4, "CartPole-v1", frameskip=2)  # mistake: misspelt keyword
    env.rollout(3, break_when_done=True)  # mistake: misspelt keyword
    env.rollout("3")  # mistake: wrong type of max_steps
    env.rollout(3, policy=3)  # mistake: a policy that cannot be called
    env.rollout(3).item()  # mistake: a rollout used as a tensor
    env.rollout(3).matmul(torch.ones(3))  # mistake: a rollout used as a tensor
    env.step(env.reset()).argmax(-1)  # mistake: a step used as a tensor
    pool.reset().argmax(-1)  # mistake: a root used as a tensor
    step_mdp(env.rand_step()).item()  # mistake: data used as a tensor
    several.async_step_send(env.reset())["next"]  # mistake: results are received, not sent
    several.async_step_recv["next"]  # mistake: a recv that is not called
    several.async_step_and_maybe_reset_recv()["next"]  # mistake: a pair used as one
    AsyncEnvPool([make], stack="loose")  # mistake: misspelt choice
    AsyncEnvPool([make], min_gets=1)  # mistake: misspelt keyword
    Collector(make, frames_per_bach=4)  # mistake: misspelt keyword
    Collector(make, frames_per_batch="4")  # mistake: wrong type of frames_per_batch
    Collector(make, frames_per_batch=4, backend="proces")  # mistake: misspelt choice
    Collector(make, 3, frames_per_batch=4)  # mistake: a policy that cannot be called
    Collector(make).next().item()  # mistake: a batch used as a tensor
    SyncDataCollector(make, frames_per_batch=4, num_workers=2)  # mistake: a keyword of another kind
    MultiSyncDataCollector([make], cat_results="pile")  # mistake: misspelt choice
    env.set_seed("0")  # mistake: wrong type of seed
    env.append_transform(3)  # mistake: no transform
    env.action_spec.sampel()  # mistake: misspelt method of a spec


class Own(EnvBase):
    def __init__(self) -> None:
        super().__init__(batchsize=[3])  # mistake: misspelt keyword

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        return self.observation_specs.zero()  # mistake: misspelt property

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def _set_seed(self, seed: int) -> None:
        pass
