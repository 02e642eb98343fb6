"""The border between JAX and torch where there is a card: order, alignment, several cards, CPU tensors beside one.

The tests marked ``gpu`` need CUDA in both libraries; the others play the part that matters on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from envkit_bridges import dlpack
from envkit_bridges.dlpack import jax_device_of, to_jax, to_jit, to_torch, torch_device_of
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.walkers import Pendulum

ROOT = Path(__file__).parents[2]


def cards() -> int:
    seen = torch.cuda.is_available() and jax.default_backend() in ("gpu", "cuda")
    return torch.cuda.device_count() if seen else 0


def needs_cards(count: int):
    reason = f"needs {count} CUDA device(s) seen by torch and JAX"
    return [pytest.mark.gpu, pytest.mark.skipif(cards() < count, reason=reason)]


on_card = pytest.param("cuda", marks=needs_cards(1))


# ----------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize("device", ["cpu", on_card])
@pytest.mark.parametrize("first", range(6))
def test_memory_that_begins_between_two_multiples_of_16_bytes_is_copied(first, device, monkeypatch):
    tensor = torch.arange(64, dtype=torch.float32, device=device)[first:]
    places, from_dlpack = [], jnp.from_dlpack
    monkeypatch.setattr(
        jnp, "from_dlpack", lambda lent: places.append(lent.data_ptr()) or from_dlpack(lent)
    )

    array = to_jax(tensor, copy=False)

    assert [place % 16 for place in places] == [0]
    assert (places == [tensor.data_ptr()]) == (first % 4 == 0)
    assert jax.jit(lambda x: x * 2)(array).tolist() == (tensor * 2).tolist()


# ------------------------------------------------------------------------------------- waiting


def test_the_host_waits_for_no_array_of_a_card(monkeypatch):
    """Torch's stream does, of which JAX is told; on a CPU there is none."""
    array = jnp.ones(3)
    waited, handed = [], []
    monkeypatch.setattr(type(array), "block_until_ready", lambda array: waited.append(array))
    monkeypatch.setattr(torch, "from_dlpack", handed.append)

    monkeypatch.setattr(type(array), "platform", lambda self: "gpu")
    to_torch(array)
    assert len(handed) == 1 and not waited

    monkeypatch.setattr(type(array), "platform", lambda self: "cpu")
    to_torch(array)
    assert len(waited) == 1


@pytest.mark.parametrize("device", [on_card])
def test_a_result_is_handed_over_before_it_is_there(device):
    matrix = to_jit(torch.full((8192, 8192), 1 / 8192, device=device), copy=False)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: y @ x, x))
    product(matrix).block_until_ready()

    result = product(matrix)
    tensor = to_torch(result)

    assert not result.is_ready()
    torch.testing.assert_close(tensor, to_torch(matrix), rtol=1e-2, atol=0)


# ------------------------------------------------------------------------------- several cards


def test_a_tensor_is_lent_while_its_own_card_is_the_current_one(monkeypatch):
    tensor, current, lent_under = torch.ones(4), [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(jnp, "from_dlpack", lambda lent: lent_under.append(list(current)))

    dlpack._array_of(tensor, copy=False)

    (found,) = lent_under
    assert len(found) == 1 and found[0].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("device", [pytest.param("cuda:1", marks=needs_cards(2))])
def test_an_env_on_the_second_card_keeps_to_it(device):
    env = JaxEnv(Pendulum(), batch_size=[4], device=device)

    data = env.rollout(3, lambda td: td.set("action", torch.ones(4, 1, device=device)))
    run, _ = env.unroll(env.reset(), 3)

    found = {leaf.device for one in (data, run) for leaf in one.values(True, True)}
    assert found == {torch.device(device)}
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("device", [on_card])
def test_devices_of_a_card_match_both_ways(device):
    tensor = torch.ones(3, device=device)

    array = to_jax(tensor)

    assert torch_device_of(array) == tensor.device == to_torch(array).device
    assert array.devices() == {jax_device_of(device)}


# ---------------------------------------------------------------------------- CPU beside a card

BESIDE = """
import jax, torch
first, other = jax.devices("cpu")
jax.config.update("jax_default_device", other)  # where arrays go that nobody places
jax.default_backend = lambda: "cuda"

from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.shared_programs import Program
from envkit.functional import Box, Timestep
from tests.zoo.walkers import Walker

class Undrawn:
    # It uses no key, so that a part of the state takes no part in a step.

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return jax.numpy.int32(0), Timestep(jax.numpy.zeros(2))

    def step(self, state, action):
        return state + 1, Timestep(jax.numpy.ones(2) * state, action.sum())

found, called = set(), Program.__call__

def call(program, *args):
    given = called(program, *args)
    found.update(device for leaf in jax.tree.leaves(given) for device in leaf.devices())
    return given

Program.__call__ = call
for made, limit in ((Walker(), 3), (Undrawn(), None)):
    env = JaxEnv(made, batch_size=[4], device="cpu", episode_length=limit)
    td = env.rand_action(env.reset())
    _, td = env.step_and_maybe_reset(td)
    env.step(env.rand_action(td))
    env.rollout(3, break_when_any_done=False)
    env.rollout(3)
print(found == {first})
"""


@pytest.mark.slow  # compiles in a process of its own
def test_an_env_on_the_cpu_runs_there_whatever_jax_prefers():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BESIDE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
    )

    assert done.stdout.split() == ["True"], done.stderr[-2000:]


@pytest.mark.parametrize("device", [on_card])
def test_an_env_on_the_cpu_stays_there_beside_a_card(device):
    env = JaxEnv(Pendulum(), batch_size=[4], device="cpu")

    given = to_jit(env._engine.prepare(env.rand_action(env.reset())).inputs, copy=False)
    state = env._engine.programs.step.run(*given, env._engine.constants(env.batch_size))

    assert jax_device_of(device).platform == "gpu"
    assert {leaf.platform() for leaf in jax.tree.leaves(state)} == {"cpu"}
