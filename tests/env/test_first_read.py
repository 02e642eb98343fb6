"""Specs, envs and transforms keep nothing of where they are first read: a trace, inference mode, another default."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import jax
import pytest
import torch
from tensordict import TensorDictBase
from torch._subclasses.fake_tensor import FakeTensorMode

from envkit import (
    ActionScaling,
    ClipTransform,
    Compose,
    GymEnv,
    ObservationNorm,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    compile_policy,
)
from envkit.env.base import EnvBase
from envkit.specs import TensorSpec
from tests.specs.kinds import KINDS
from tests.zoo.envs import Count

# ------------------------------------------------------------------------------------------ where

Read = Callable[[], object]


class Reading(torch.nn.Module):
    def __init__(self, read: Read):
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read()
        return x + 1


def exported(read: Read) -> None:
    torch.export.export(Reading(read), (torch.zeros(2),), strict=False)


def compiled(read: Read) -> None:
    torch.compile(Reading(read), backend="eager")(torch.zeros(2))


def with_fake_tensors(read: Read) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        read()


def in_inference_mode(read: Read) -> None:
    with torch.inference_mode():
        read()


def on_the_meta_device(read: Read) -> None:
    with torch.device("meta"):
        read()


def in_vmap(read: Read) -> None:
    torch.func.vmap(Reading(read), randomness="different")(torch.zeros(2))


def in_jax(read: Read) -> None:
    def reading(x: Any) -> Any:
        read()
        return x + 1

    jax.jit(reading)(1.0)


def in_another_thread(read: Read) -> None:
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


PLACES = {
    f.__name__.replace("_", " "): f
    for f in (
        *(exported, compiled, with_fake_tensors, in_inference_mode, on_the_meta_device),
        *(in_vmap, in_jax, in_another_thread),
    )
}


HERE = [place for place in PLACES if place != "compiled"]


def apart(check: Callable[..., None], *arguments: object) -> None:
    """Call a check in a process of its own.

    Where a trace of torch.compile ends early, torch keeps its way of running frames for good. Calls look for Ctrl-C
    once more then, behind their end: other tests of this process would lose what they return.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        executor.submit(check, *arguments).result()


def read_all(holder: object) -> None:
    """Read what a class offers without an argument; not all can be read in a trace."""
    for name in dir(type(holder)):
        if not name.startswith("_") and isinstance(getattr(type(holder), name, None), property):
            with suppress(Exception):
                value = getattr(holder, name)
                if name == "space":
                    _ = value.low, value.high
    for name in ("rand", "zero", "one", "enumerate", "cardinality", "fake_tensordict"):
        with suppress(Exception):
            getattr(holder, name)()


# ------------------------------------------------------------------------------------------ specs


def used(spec: TensorSpec) -> list[Any]:
    """Use a spec, and write into its bounds."""
    torch.manual_seed(0)
    value = spec.rand()
    results = [value, spec.zero(), spec.is_in(value)]
    for bound in (getattr(spec.space, name, None) for name in ("low", "high")):
        if isinstance(bound, torch.Tensor):
            results.append(bound.clone())
            bound.add_(1)
    return [*results, spec.rand(), spec == spec.clone(), repr(spec)]


def is_same(one: Any, other: Any) -> bool:
    same = one == other
    return bool(same.all()) if isinstance(same, torch.Tensor | TensorDictBase) else bool(same)


@pytest.mark.parametrize("place", HERE)
def test_a_spec_is_what_it_was_wherever_it_was_read_first(place):
    check_specs_read_first(place)


@pytest.mark.slow
def test_a_spec_is_what_it_was_where_compiled_code_read_it_first():
    apart(check_specs_read_first, "compiled")


def check_specs_read_first(place: str) -> None:
    specs = {name: spec.clone() for name, spec in KINDS.items()}

    PLACES[place](lambda: [read_all(spec) for spec in specs.values()])

    for name, spec in specs.items():
        found = used(pickle.loads(pickle.dumps(spec))), used(spec)
        wanted = used(KINDS[name].clone())
        for one in found:
            assert all(map(is_same, one, wanted)), name


# ------------------------------------------------------------------------------------------- envs

pendulum = partial(GymEnv, "Pendulum-v1")


def chain() -> Compose:
    observation = ["observation"]
    return Compose(
        ActionScaling(),
        ClipTransform(in_keys=observation, low=-1.0, high=1.0),
        ObservationNorm(0.5, 2.0, in_keys=observation),
        StepCounter(5),
        RewardSum(),
    )


ENVS: dict[str, Callable[[], EnvBase]] = {
    "gym": pendulum,
    "custom": Count,
    "serial": partial(SerialEnv, 2, pendulum),
    "serial, tensordicts": partial(SerialEnv, 2, Count, use_buffers=False),
    "transformed": lambda: TransformedEnv(pendulum(), chain()),
    "transformed serial": lambda: TransformedEnv(SerialEnv(2, pendulum), chain()),
}


def parts_of(env: EnvBase) -> list[Any]:
    chain = getattr(env, "transform", ())
    return [env, *chain]


def run(env: EnvBase) -> list[TensorDictBase]:
    torch.manual_seed(0)
    env.set_seed(0)
    random = env.rollout(3, break_when_any_done=False)
    stepped = env.rollout(3, lambda td: env.rand_action(td), break_when_any_done=False)
    return [random, stepped]


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=pytest.mark.slow if p == "exported" else ()) for p in HERE]
)
def test_an_env_does_what_it_did_wherever_it_was_read_first(place):
    check_envs_read_first(place, list(ENVS))


@pytest.mark.slow
def test_an_env_does_what_it_did_where_compiled_code_read_it_first():
    apart(
        check_envs_read_first, "compiled", ["gym", "custom"]
    )  # tracing each line of all takes minutes


def check_envs_read_first(place: str, names: list[str]) -> None:
    with ExitStack() as stack:
        envs = {name: stack.enter_context(closing(ENVS[name]())) for name in names}

        PLACES[place](lambda: [read_all(part) for env in envs.values() for part in parts_of(env)])

        for name, env in envs.items():
            with closing(ENVS[name]()) as untouched:
                for data, wanted in zip(run(env), run(untouched), strict=True):
                    assert is_same(data, wanted), name
                    assert not any(leaf.is_inference() for leaf in data.values(True, True)), name


def test_a_compiled_policy_may_read_bounds_of_the_action():
    env = pendulum()
    spec = env.full_action_spec["action"]

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 1)

        def forward(self, observation):
            low, high = spec.space.low, spec.space.high
            return low + (high - low) * self.net(observation).sigmoid()

    actor = Scaled()
    env.set_seed(0)
    compiled_data = env.rollout(3, compile_policy(actor))
    env.set_seed(0)

    torch.testing.assert_close(compiled_data["action"], env.rollout(3, actor)["action"].detach())
    assert env.action_spec.is_in(env.rollout(3)["action"])
