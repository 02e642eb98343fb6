"""What each work is to reach, in one table; `bench.report` holds what was measured against it.

Conventions
    bench     module that measures it: the name of its file in ``bench/results``, without ending.
    title     of the comparison, as a pattern (``*`` for any text); counts of steps are left out.
    work      whose ratio to the comparison's reference counts, or the field of a line that compares nothing.
    over      works of the same comparison that it is divided by instead, by the fastest of them.
    rows      where given, what counts is the microseconds a step of so many rows takes more than the reference.
    bound     what is to be reached, ``"least"`` or ``"most"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """One figure that is to be reached."""

    bench: str
    title: str
    work: str
    value: float
    bound: Literal["least", "most"] = "least"
    over: tuple[str, ...] = ()
    rows: int = 0


def _unrolls() -> list[Target]:
    acting = ("envkit unroll, JaxPolicy", "envkit unroll, compile_policy")
    return [
        Target("brax_scan", f"{env} x {rows} on cpu, {how}", work, 0.95)
        for env in ("fast", "inverted_pendulum spring", "ant spring")
        for rows in (64, 4096)
        for how, work in (
            ("random actions", "envkit unroll"),
            *(("a small network acts", work) for work in acting),
        )
    ]


_WORKERS = "2 workers x 16 CartPole-v1, policy in the workers"
_CHEETAHS = "2 workers x 4 HalfCheetah-v5, policy in the workers"
_POOL = "8 CartPoles, min_get=8, "
_PEERS = ("TorchRL, dense", "TorchRL, lazy")
_VIEWS = "views as arrays, "
_FIXED = ("one thread", "all threads, no rule")
_LOOP = "CPU s for 122,880 steps: envkit"
_CART_POLES, _PENDULUMS = _VIEWS + "CartPole-v1 x 32", _VIEWS + "Brax inverted_pendulum x 1024"

TARGETS = [
    # Beside busy processes: of the better fixed number of threads; a large network of all threads
    *(
        Target("busy", f"*, beside {busy} more busy processes", "the rule", 0.8, over=_FIXED)
        for busy in (1, 2)
    ),
    *(
        Target("busy", f"{work}, beside 0 more busy processes", "the rule", 0.8, over=_FIXED)
        for work in ("one CartPole", "*Env*")
    ),
    Target("busy", "three layers of 1024 *", "the rule", 0.95),
    # Small batches, one program, first calls
    Target(
        "brax_step", "inverted_pendulum spring x 1 on cpu, torch policy", "envkit stepwise", 0.7
    ),
    Target(
        "brax_step", "inverted_pendulum spring x 64 on cpu, torch policy", "envkit stepwise", 0.85
    ),
    Target(
        "brax_step", "inverted_pendulum spring x 4096 on cpu, torch policy", "envkit stepwise", 0.97
    ),
    Target("brax_step", "ant spring x 64 on cpu, torch policy", "envkit stepwise", 0.95),
    *_unrolls(),
    Target("cold", "first rollout of inverted_pendulum * without the cache", "call_s", 12, "most"),
    Target("cold", "first rollout of ant * without the cache", "call_s", 20, "most"),
    Target("cold", "first step of ant * with the cache", "call_s", 2.0, "most"),
    Target("memory", "memory of a rollout, ant spring x 4096 on cpu*", "ratio", 1.15, "most"),
    *(
        Target("devices", f"{batch} over virtual devices", f"{count} devices", 0.9)
        for batch in ("inverted_pendulum spring x 4096", "ant spring x 1024")
        for count in (2, 4)
    ),
    # Ray
    Target("ray_weights", "new weights of 40 MB, then a batch", "Ray, 4", 0.5),
    # Populations
    *(
        Target(
            "population",
            f"8 policies x 32 rows of gymnax CartPole, {width} hidden units, rollouts of {steps} steps",
            "envkit unroll, compile_policy",
            0.9,
        )
        for width in (16, 64)
        for steps in (32, 500)
    ),
    # Pools
    Target("gym_pool", "CartPole-v1 x 32", "envkit ParallelEnv", 0.8),
    Target("gym_pool", "HalfCheetah-v5 x 8", "envkit ParallelEnv", 0.8),
    *(
        Target("pool_policy", f"{pool} under a policy", f"ParallelEnv, {way}", least)
        for pool, way, least in (
            ("CartPole-v1 x 32", "a plain module", 0.8),
            ("CartPole-v1 x 32", "compile_policy", 1.1),
            ("HalfCheetah-v5 x 8", "a plain module", 0.8),
            ("HalfCheetah-v5 x 8", "compile_policy", 0.9),
        )
    ),
    Target("gym_pool", "one CartPole-v1, a policy acts", "envkit GymEnv", 0.7),
    Target("gym_pool", "one CartPole-v1, a policy acts", "envkit GymEnv, compile_policy", 0.7),
    Target("gym_pool", "start of 32 CartPole envs", "first_pool_s", 2.5, "most"),
    Target("async_pool", "16 envs of 1-20 ms a step", "AsyncEnvPool, processes", 0.95),
    Target("async_pool", "16 envs of 1-20 ms a step", "AsyncEnvPool, threads", 0.95),
    Target("async_pool", _POOL + "multiprocessing", "envkit", 20, over=_PEERS),
    Target("async_pool", _POOL + "threading", "envkit", 5, over=_PEERS),
    Target("multithreaded", "CartPole-v1 x 256", "envkit rollout", 0.6),
    # Collectors
    Target("collect", "Brax inverted_pendulum x4096, compiled policy", "SyncDataCollector", 0.97),
    Target("collect", "Brax ant x64, compiled policy", "SyncDataCollector", 0.97),
    Target("collect", "ParallelEnv CartPole x32, torch policy", "SyncDataCollector", 0.95),
    Target("collect", _WORKERS, "MultiSyncDataCollector", 0.8),
    Target(
        "collect", _WORKERS, "MultiSyncDataCollector", 14, over=("TorchRL's MultiSyncCollector",)
    ),
    Target("collect", _WORKERS, "the same, compile_policy", 1.0),
    Target("collect", _CHEETAHS, "MultiSyncDataCollector", 0.9),
    Target("collect", "a batch and its training, MultiaSync*", "ratio_to_longer", 1.25, "most"),
    Target("collect", "a batch and its training, *prefetch=1", "ratio_to_longer", 1.25, "most"),
    Target("collect", "* parameters to 2 workers", "seconds", 0.005, "most"),
    # Worlds
    Target("worlds", "gymnax CartPole x4096, random actions", "envkit unroll", 0.9),
    Target("worlds", "Jumanji Snake x1024, random actions", "envkit unroll", 0.9),
    Target("worlds", "Craftax-Classic symbolic x256, random actions", "envkit unroll", 0.9),
    Target("worlds", "XLand-MiniGrid Empty-8x8 x1024, random actions", "envkit unroll", 0.9),
    Target("worlds", "JaxMARL simple_spread x1024, random actions", "envkit unroll", 0.9),
    Target("worlds", "JaxMARL simple_spread x1024, a torch policy*", "envkit unroll", 0.9),
    Target("worlds", "pgx connect_four x4096, random legal actions", "envkit unroll", 0.9),
    Target("worlds", "pgx connect_four x4096, a small network*", "envkit unroll", 0.9),
    Target("worlds", "Playground CartpoleBalance x256, random actions", "envkit unroll", 0.9),
    Target("worlds", "dm_control cartpole swingup, one env", "envkit rollout", 0.5),
    Target("worlds", "dm_control cartpole swingup x8", "envkit ParallelEnv, rollout", 0.8),
    Target(
        "worlds", "Pistonball x8, 20 agents, random actions", "envkit ParallelEnv, rollout", 0.8
    ),
    Target("worlds", "Brax ant spring x1024, mass of links*", "a model a row", 0.8),
    # Views
    Target("views", _PENDULUMS, "to_gym_vector(env, 'next_step')", 0.9),
    Target("views", _PENDULUMS, "to_sb3(env)", 0.9),
    Target("views", "to_torchrl, Brax *", "to_torchrl(env).step_and_maybe_reset", 0.9),
    Target("views", _CART_POLES, "to_gym_vector(env, 'next_step')", 60, "most", rows=32),
    Target("views", _CART_POLES, "to_sb3(env)", 60, "most", rows=32),
    Target(
        "views",
        _CART_POLES,
        "to_gym_vector(env, 'next_step')",
        5,
        over=("gymnasium AsyncVectorEnv",),
    ),
    Target("views", _CART_POLES, "to_sb3(env)", 3, over=("SB3 SubprocVecEnv",)),
    # Whole training loops: what is not the learner's
    *(
        Target("training", "PPO on 2048 Brax pendulums, *", f"{_LOOP}: {what}", most, "most")
        for what, most in (("all but learning", 1.2), ("share but learning", 0.25))
    ),
    # The card
    *(
        Target("gpu", f"ant spring x {rows} on *", work, least)
        for rows in (4096, 16384)
        for work, least in (
            ("envkit stepwise, torch policy", 0.8),
            ("envkit unroll, JaxPolicy", 0.95),
            ("envkit unroll, compile_policy", 0.95),
        )
    ),
    Target("gpu", "hand-off of a step, * rows on *", "total_us", 100, "most"),
]
