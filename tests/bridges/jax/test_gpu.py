"""JAX and torch on one card. The tests marked ``gpu`` need CUDA in both; the others need none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, StartedError
from envkit_bridges.jax.device_memory import configure_gpu, warn_if_full
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from envkit_bridges.jax.programs import Programs
from envkit_bridges.policy.compiled import compile_policy
from envkit_bridges.worlds.brax import BraxEnv
from tests.bridges.compare import assert_close
from tests.zoo.walkers import Pendulum, Walker, unlike_any

GIB = 2**30


def sees_cuda() -> bool:
    return torch.cuda.is_available() and jax.default_backend() in ("gpu", "cuda")


def on_gpu(test):
    needs = pytest.mark.skipif(not sees_cuda(), reason="needs a CUDA device seen by torch and JAX")
    return pytest.mark.gpu(needs(test))


# ------------------------------------------------------------------------------------ settings


@pytest.mark.slow
def test_jax_is_told_how_much_it_may_take():
    script = """
        import os
        from envkit import configure_gpu
        configure_gpu(0.3)
        print(os.environ["XLA_CLIENT_MEM_FRACTION"], os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
        configure_gpu(fraction=0.6, preallocate=True)
        print(os.environ["XLA_CLIENT_MEM_FRACTION"], os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["0.3", "false", "0.6", "true"]


def test_a_setting_that_comes_too_late_is_an_error():
    jax.devices()

    with pytest.raises(StartedError, match="before the first env"):
        configure_gpu(0.5)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 80])
def test_a_fraction_lies_between_0_and_1(fraction):
    with pytest.raises(ArgumentError, match="above 0 and below 1"):
        configure_gpu(fraction)


@pytest.mark.parametrize(
    ("free", "reserved", "warns"), [(4, 0, True), (30, 0, False), (4, 60, False)]
)
def test_a_card_that_jax_has_taken_is_warned_of(monkeypatch, free, reserved, warns):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * GIB)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_full(torch.device("cuda:0"))

    assert [str(w.message).startswith("only 4.0 of 80.0 GiB") for w in caught] == [True] * warns


class OfPlace(torch.nn.Module):
    """A layer that reads the first observation of several."""

    def __init__(self, device):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, device=device)

    def forward(self, place, *others):
        return self.layer(place)


@pytest.mark.slow
def test_products_have_the_precision_that_jax_is_asked_for_and_those_of_compiled_policies_all(
    monkeypatch,
):
    """A card multiplies float32 in TF32 unless it is told otherwise, see docs/gpu.md."""
    are_highest = []

    def unroll(programs, steps, policy, record_state, *args):
        traced = jax.make_jaxpr(partial(unrolled, programs, steps, policy, record_state))(*args)
        are_highest.append("Precision.HIGHEST" in str(traced))
        return unrolled(programs, steps, policy, record_state, *args)

    unrolled = Programs._unroll
    monkeypatch.setattr(Programs, "_unroll", unroll)
    env = JaxEnv(unlike_any(Walker), batch_size=[3])
    compiled = compile_policy(OfPlace("cpu"))
    in_jax = JaxPolicy(lambda params, shown, key: shown["place"] @ params, jnp.eye(2))

    for policy in (compiled, in_jax):
        for precision in (None, "highest", None):
            with jax.default_matmul_precision(precision):
                env.unroll(env.reset(), 2, policy)

    assert are_highest == [
        True,
        True,
        False,
        True,
    ]  # a program that was asked for before is found again


# ------------------------------------------------------------------------------------ on a card


@pytest.fixture(scope="module")
def walker():
    return JaxEnv(Walker(), batch_size=[64], device="cuda", episode_length=20)


@on_gpu
def test_data_and_simulation_are_on_the_card(walker):
    td = walker.rollout(5, break_when_any_done=False)

    assert td.device.type == "cuda" and td["next", "reward"].is_cuda
    check_env_specs(walker)


@on_gpu
def test_a_card_does_what_a_cpu_does(walker):
    twin = JaxEnv(Walker(), batch_size=[64], device="cpu", episode_length=20)
    for env in (walker, twin):
        env.set_seed(1)
    td, other = walker.reset(), twin.reset()

    for step in range(5):
        td["action"] = torch.full((64, 2), 0.05 * step, device="cuda")
        other["action"] = td["action"].cpu()
        _, td = walker.step_and_maybe_reset(td)
        _, other = twin.step_and_maybe_reset(other)

    assert_close(td.cpu(), other)


def checksum(env, steps: int, *, synchronised: bool) -> float:
    """Step with actions that are overwritten as soon as the step returns."""
    env.set_seed(0)
    td, action = env.reset(), torch.empty(64, 2, device="cuda")
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for step in range(steps):
        td["action"] = action.fill_(0.3 if step % 2 else -0.3).add_(1e-3 * (step % 7))
        data, td = env.step_and_maybe_reset(td)
        action.fill_(1e3)
        total += data["next", "reward"].double().sum() * (1 + step % 5)
        if synchronised:
            torch.cuda.synchronize()
            jax.block_until_ready(jax.live_arrays())
    return total.item()


@on_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", ["default", "other"])
def test_no_step_reads_or_writes_out_of_order(walker, stream):
    expected = checksum(walker, 10_000, synchronised=True)

    with torch.cuda.stream(
        torch.cuda.Stream() if stream == "other" else torch.cuda.default_stream()
    ):
        found = checksum(walker, 10_000, synchronised=False)

    assert found == expected


@on_gpu
def test_a_torch_policy_on_the_card_is_compiled(walker):
    torch.manual_seed(0)
    module = OfPlace("cuda")
    walker.set_seed(0)

    data, _ = walker.unroll(walker.reset(), 5, compile_policy(module))

    expected = module(data["place"]).detach()
    torch.testing.assert_close(data["action"], expected, rtol=1e-5, atol=1e-5)


@on_gpu
def test_a_policy_in_jax_is_as_exact_as_on_a_cpu_where_that_is_asked_for(walker):
    weights = np.random.default_rng(0).random((2, 2), np.float32)
    policy = JaxPolicy(lambda params, shown, key: shown["place"] @ params, jnp.asarray(weights))
    walker.set_seed(0)

    with jax.default_matmul_precision("highest"):
        data, _ = walker.unroll(walker.reset(), 5, policy)

    expected = data["place"].cpu() @ torch.from_numpy(weights)
    torch.testing.assert_close(data["action"].cpu(), expected, rtol=1e-5, atol=1e-5)


@on_gpu
def test_an_env_moves_between_devices():
    env = JaxEnv(Pendulum(), batch_size=[4], device="cpu")
    env.reset()

    assert env.to("cuda").rollout(2).device.type == "cuda"
    assert env.to("cpu").rollout(2).device.type == "cpu"


@on_gpu
@pytest.mark.timeout(300)
def test_brax_steps_on_the_card():
    env = BraxEnv("inverted_pendulum", backend="spring", batch_size=[32], device="cuda")

    td = env.rollout(3, torch.nn.Linear(4, 1, device="cuda").requires_grad_(False))

    assert td.device.type == "cuda" and torch.isfinite(td["next", "observation"]).all()
