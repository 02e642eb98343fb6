"""Mistakes that both type checkers find, each on a line that says so (`tests/test_types.py`)."""

from __future__ import annotations

from envkit import BraxEnv, GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv


def make() -> GymEnv:
    return GymEnv("CartPole-v1")


env = make()
brax = BraxEnv("fast", batch_size=[4], device="cpu")

env.rolout(3)  # mistake: misspelt method
brax.unrol(brax.reset(), 3)  # mistake: misspelt method
ParallelEnv("two", make)  # mistake: wrong type of num_workers
SerialEnv(2, make, num_proceses=1)  # mistake: misspelt keyword
env.rollout(3, break_when_done=True)  # mistake: misspelt keyword
BraxEnv("fast", batchsize=[4])  # mistake: misspelt keyword
GymEnv("CartPole-v1", frame_skip="2")  # mistake: wrong type of frame_skip
TransformedEnv(env, StepCounter(max_step=3))  # mistake: misspelt keyword
env.rollout(3) + 1  # mistake: a rollout used as a tensor
env.rollout(3).backward()  # mistake: a rollout used as a tensor
print(env.step(env.reset()).foo)  # mistake: no such attribute
brax.set_seed("0")  # mistake: wrong type of seed
