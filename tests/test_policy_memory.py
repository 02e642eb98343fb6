"""A policy that returns its results in memory that it uses again is recorded as one that returns new tensors.

One that changes what it was called with is refused, also if it does so in a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from envkit import (
    AsyncEnvPool,
    Collector,
    GymEnv,
    MultiSyncDataCollector,
    SerialEnv,
    compile_policy,
)
from envkit.env.base import EnvBase
from envkit.errors import PolicyError
from tests.zoo.kinds import KINDS, Follow

STEPS = 5

Reuse = Callable[[torch.Tensor], Any]
"""Returns what it is given, in memory of its own."""

See = Callable[[torch.Tensor], Any]
"""Is called with each observation that the policy is called with."""

# ------------------------------------------------------------------------------------- how a result is returned


def fresh() -> Reuse:
    return torch.clone


def in_place() -> Reuse:
    memory: list[torch.Tensor] = []

    def write(value: torch.Tensor) -> torch.Tensor:
        if not memory:
            memory.append(torch.zeros_like(value))
        return memory[0].copy_(value)

    return write


def with_out() -> Reuse:
    memory: list[torch.Tensor] = []

    def write(value: torch.Tensor) -> torch.Tensor:
        if not memory:
            memory.append(torch.zeros_like(value))
        return torch.stack([value], out=memory[0].unsqueeze(0))[0]

    return write


def in_one_array() -> Reuse:
    memory: list[np.ndarray] = []

    def write(value: torch.Tensor) -> torch.Tensor:
        if not memory:
            memory.append(np.zeros_like(value.numpy()))
        memory[0][...] = value.numpy()
        return torch.from_numpy(memory[0])

    return write


REUSES = {f.__name__: f for f in (in_place, with_out, in_one_array)}

# ------------------------------------------------------------------------------------- how a policy is called


def chosen(env: EnvBase, observation: torch.Tensor) -> torch.Tensor:
    td = TensorDict({"observation": observation}, batch_size=observation.shape[:-1])
    return Follow(env)(td)["action"]


def on_td(env: EnvBase, reuse: Reuse, see: See) -> Any:
    def act(td: TensorDictBase) -> TensorDictBase:
        see(td["observation"])
        td["action"] = reuse(Follow(env)(td.copy())["action"])
        return td

    return act


def on_td_as_a_new_one(env: EnvBase, reuse: Reuse, see: See) -> Any:
    def act(td: TensorDictBase) -> TensorDictBase:
        see(td["observation"])
        action = reuse(Follow(env)(td.copy())["action"])
        return TensorDict({"action": action}, batch_size=td.batch_size, device=td.device)

    return act


def on_observation(env: EnvBase, reuse: Reuse, see: See) -> Any:
    """Return an action and something else."""
    module, more = Module(env, reuse, see), fresh() if reuse is torch.clone else in_place()
    return lambda observation, *_: (module(observation), more(observation * 2))


class Module(torch.nn.Module):
    def __init__(self, env: EnvBase, reuse: Reuse, see: See):
        super().__init__()
        self.env, self.reuse, self.see = env, reuse, see

    def forward(self, observation: torch.Tensor, *_: torch.Tensor) -> Any:
        self.see(observation)
        return self.reuse(chosen(self.env, observation))


def in_tensordict_module(env: EnvBase, reuse: Reuse, see: See) -> Any:
    return TensorDictModule(Module(env, reuse, see), in_keys=["observation"], out_keys=["action"])


def in_hooked_module(env: EnvBase, reuse: Reuse, see: See) -> Any:
    module = in_tensordict_module(env, reuse, see)
    module.register_forward_hook(lambda self, args, td: td)
    return module


CALLED = {
    "function of a TensorDict": on_td,
    "function that returns a new TensorDict": on_td_as_a_new_one,
    "function of the observation": on_observation,
    "module": Module,
    "TensorDictModule": in_tensordict_module,
    "TensorDictModule with a hook": in_hooked_module,
}

# ------------------------------------------------------------------------------------- how steps are made


def rollout(env: EnvBase, policy: Any, **options: Any) -> TensorDictBase:
    env.set_seed(5)
    return env.rollout(STEPS, policy, **options)


QUICK = (
    "gymnasium",
    "gymnasium vector",
    "custom",
    "custom stateless",
    "jax",
    "serial",
    "serial, tensordicts",
    "serial custom, lazy",
    "mixed with stateless",
    "transformed",
    "transformed serial",
    "transformed batch",
)
RUNS = {
    "rollout": partial(rollout, break_when_any_done=False),
    "until all are done": partial(rollout, break_when_all_done=True),
    "lazy rollout": partial(rollout, break_when_any_done=False, return_contiguous=False),
}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in KINDS
        if not kind.startswith(("ray", "reward as state"))  # the latter wants it in the first root
    ]
)
def env(request: pytest.FixtureRequest) -> Iterator[EnvBase]:
    made = KINDS[request.param].make()
    yield made
    made.close(raise_if_closed=False)


def test_results_in_memory_that_is_used_again_are_recorded_as_new_tensors_are(env):
    unlike = []
    for run, play in RUNS.items():
        for called, make in CALLED.items():
            wanted = play(env, make(env, fresh(), id))
            for name, reuse in REUSES.items():
                data = play(env, make(env, reuse(), id))
                if not bool((data == wanted).all()):
                    unlike.append((run, called, name))
    assert not unlike


def changing_what_was_seen() -> See:
    """Add to the observation of one call in the next one."""
    seen: list[torch.Tensor] = []

    def see(observation: torch.Tensor) -> None:
        if seen:
            seen[-1].add_(1)
        seen.append(observation)

    return see


def test_what_was_seen_and_is_changed_in_a_later_call_is_refused_or_recorded_as_it_was(env):
    refused, unlike = 0, []
    for run, play in RUNS.items():
        for called, make in CALLED.items():
            wanted = play(env, make(env, fresh(), id))
            try:
                data = play(env, make(env, fresh(), changing_what_was_seen()))
            except PolicyError:
                refused += 1
                continue
            if not bool((data == wanted).all()):
                unlike.append((run, called))
    assert refused and not unlike


# ------------------------------------------------------------------------------------------- beside these


class Noise(torch.nn.Module):
    """Correlated noise, in place."""

    def __init__(self, rows: tuple[int, ...] = ()):
        super().__init__()
        self.noise = torch.nn.Buffer(torch.zeros(*rows, 1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.noise.mul_(0.8).add_(observation.mean(-1, keepdim=True))


class NewNoise(Noise):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return Noise.forward(self, observation).clone()


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


COLLECTED = {
    "one env": (Collector, pendulum, ()),
    "rows": (Collector, partial(SerialEnv, 2, pendulum), (2,)),
    "asynchronous rows": (
        Collector,
        partial(AsyncEnvPool, [pendulum] * 2, backend="threading"),
        (2,),
    ),
    "workers": (MultiSyncDataCollector, [pendulum] * 2, ()),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k == "workers" else ()) for k in COLLECTED]
)
def test_batches_of_a_collector_hold_the_noise_of_each_step(kind):
    kind_of_collector, make, rows = COLLECTED[kind]

    def batches(policy: Noise) -> list[torch.Tensor]:
        torch.manual_seed(0)
        collector = kind_of_collector(make, policy, frames_per_batch=12, total_frames=36)
        collector.set_seed(0)
        actions = [batch["action"] for batch in collector]
        collector.shutdown()
        return actions

    for batch, wanted in zip(batches(Noise(rows)), batches(NewNoise(rows)), strict=True):
        torch.testing.assert_close(batch, wanted, rtol=0, atol=0)


def test_a_compiled_module_may_return_its_noise_in_place():
    env = pendulum()
    first, second = (rollout(env, compile_policy(policy)) for policy in (Noise(), NewNoise()))
    assert torch.equal(first["action"], second["action"])


def test_given_actions_may_come_in_one_tensor():
    env, memory = pendulum(), torch.zeros(1)
    env.set_seed(0)

    data = env.rollout(3, actions=(memory.fill_(number) for number in range(3)))
    nested = env.rollout(
        3, actions=(TensorDict({"action": memory.fill_(number)}) for number in range(3))
    )

    assert data["action"].flatten().tolist() == [0, 1, 2]
    assert nested["action"].flatten().tolist() == [0, 1, 2]


def test_a_policy_may_return_constants_in_turns_but_not_overwrite_them():
    env, turns = pendulum(), iter(range(99))

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), -1.0), torch.full((1,), 1.0)

    forces = two()
    data = env.rollout(6, lambda observation: forces[next(turns) % 2])
    assert data["action"].flatten().tolist() == [-1, 1] * 3
    forces = two()
    with pytest.raises(PolicyError, match="'action' in memory of an earlier result"):
        env.rollout(6, lambda observation: forces[next(turns) % 2].add_(0.1))
