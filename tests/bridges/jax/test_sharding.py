"""One batch over four devices: the same rows as on one, and no shard waits for another."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envkit import Box, Timestep
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, ArgumentTypeError, HandoffError, PolicyError
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import StepCounter
from envkit_bridges.dlpack import to_torch
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from envkit_bridges.policy.compiled import compile_policy
from envkit_bridges.worlds.gymnax import GymnaxEnv
from tests.bridges.compare import assert_close, assert_same
from tests.zoo.jax_envs import Nim
from tests.zoo.walkers import Pendulum, Steered, Walker

pytestmark = pytest.mark.rounding

SHARDS = 4
on_four = pytest.mark.skipif(
    len(jax.devices()) < SHARDS,
    reason="needs four devices; test_all_of_this_on_four_host_devices runs it on parts of a CPU",
)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(len(jax.devices()) >= SHARDS, reason="there are four devices already")
def test_all_of_this_on_four_host_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={SHARDS}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not all_of_this",
        __file__,
    ]

    done = subprocess.run(
        command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout


@pytest.fixture(scope="module")
def pair():
    """The same env on one device and on four."""
    options = {"batch_size": [8], "episode_length": 5}
    return (
        JaxEnv(Walker(), **options),
        JaxEnv(Walker(), devices=jax.devices()[:SHARDS], **options),
    )


class Countdowns:
    """Counts down from a number that is drawn, and adds up actions."""

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        left = jax.random.randint(key, (), 2, 90)
        return (left, jnp.zeros(1)), Timestep(jnp.zeros(1))

    def step(self, state, action):
        left, total = state[0] - 1, state[1] + action
        return (left, total), Timestep(total, total[0], left <= 0)


def seeded(env, seed=3):
    env.set_seed(seed)
    return env


@on_four
def test_runs_are_those_of_one_device(pair):
    one, four = (seeded(env).rollout(12, break_when_any_done=False) for env in pair)

    assert one["next", "done"].any()
    assert_same(one.select("action", "done"), four.select("action", "done"))
    assert_close(one, four)


@on_four
def test_steps_and_masks_are_those_of_one_device(pair):
    moved = []
    for env in pair:
        td = seeded(env).reset()
        for step in range(7):
            td["action"] = torch.full((8, 2), 0.1 * step)
            td["_step"] = torch.arange(8) % 3 != step % 3
            _, td = env.step_and_maybe_reset(td)
        td["_reset"] = (torch.arange(8) < 3)[:, None]
        moved.append(env.reset(td))

    assert_close(*moved)


@on_four
def test_random_actions_that_a_mask_allows_are_those_of_one_device():
    runs = [
        seeded(JaxEnv(Nim(stones=7), batch_size=[8], devices=devices)).rollout(
            20, break_when_any_done=False
        )
        for devices in (None, jax.devices()[:SHARDS])
    ]

    assert not (runs[0]["next", "reward"] < 0).any()
    assert_same(*runs)


@on_four
def test_assigned_params_of_a_world_reach_every_device():
    moved = []
    for devices in (None, jax.devices()[:SHARDS]):
        env = GymnaxEnv("CartPole-v1", batch_size=[8], devices=devices, params_per_row=True)
        env.params = env.params.replace(gravity=20.0)
        moved.append(seeded(env).rollout(12, break_when_any_done=False))

    assert (env.unpack(moved[1]["state"])["params", "gravity"] == 20).all()
    assert_same(moved[0].select("action", "done"), moved[1].select("action", "done"))
    assert_close(*moved)


@on_four
@pytest.mark.parametrize("batch", [[], [3], [2, 5]])
def test_any_batch_size_is_accepted(pair, batch):
    one, four = (
        env.rollout(
            3,
            tensordict=env.reset(seeded(env).reset()[:1].expand(*batch, 1)[..., 0].clone()),
            auto_reset=False,
            break_when_any_done=False,
        )
        for env in pair
    )

    assert four.shape == (*batch, 3)
    assert_close(one.exclude("action", "next"), four.exclude("action", "next"))


@on_four
def test_specs_hold(pair):
    check_env_specs(pair[1])


@on_four
@pytest.mark.parametrize("rule", ["any", "all"])
@pytest.mark.parametrize("steps", [3, 100])
def test_runs_that_stop_are_those_of_one_device(rule, steps):
    """The episodes end at other steps in each row, and some are longer than a piece."""
    stop = {f"break_when_{rule}_done": True}
    one, four = (
        seeded(JaxEnv(Countdowns(), batch_size=[2, 4], devices=devices)).rollout(steps, **stop)
        for devices in (None, jax.devices()[:SHARDS])
    )

    assert one.shape == four.shape and one.names == four.names
    assert_same(one.exclude("state", ("next", "state")), four.exclude("state", ("next", "state")))


@on_four
def test_transforms_fuse_and_policies_compile_as_on_one_device():
    def function(params, observation, key):
        return params * observation[:, :1]

    runs = []
    for devices in (None, jax.devices()[:SHARDS]):
        env = TransformedEnv(JaxEnv(Pendulum(), batch_size=[8], devices=devices), StepCounter(4))
        runs.append(seeded(env).unroll(env.reset(), 10, JaxPolicy(function, jnp.float32(0.5)))[0])

    assert runs[1]["next", "step_count"].max() == 4
    assert_close(*runs)


@on_four
def test_policies_draw_other_numbers_on_every_shard():
    env = JaxEnv(Pendulum(), batch_size=[8], devices=jax.devices()[:SHARDS])
    policy = JaxPolicy(lambda params, shown, key: jax.random.uniform(key, (len(shown), 1)))

    data, _ = env.unroll(env.reset(), 5, policy)

    assert len(torch.unique(data["action"])) == 8 * 5


@on_four
def test_a_dict_of_actions_is_spread():
    env = JaxEnv(Steered(), batch_size=[4], devices=jax.devices()[:SHARDS])

    assert env.rollout(3, break_when_any_done=False)["action", "wheel"].shape == (4, 3, 2)


@on_four
def test_results_come_to_the_first_device_part_by_part(pair, monkeypatch):
    """A part of one device goes from card to card, an array of several would go through the host."""
    env, moved, device_put = pair[1], [], jax.device_put

    def put(tree, target=None, **how):
        if target == jax.devices()[0]:
            moved.extend(jax.tree.leaves(tree))
        return device_put(tree, target, **how)

    monkeypatch.setattr(jax, "device_put", put)
    env.step_and_maybe_reset(env.rand_action(env.reset()))

    assert {next(iter(leaf.devices())) for leaf in moved} == set(jax.devices()[:SHARDS])
    assert all(len(leaf.devices()) == 1 for leaf in moved)


@on_four
@pytest.mark.parametrize(
    "spread", [PartitionSpec("rows"), PartitionSpec()], ids=["split", "copied"]
)
def test_an_array_of_several_devices_is_no_tensor(spread):
    mesh = Mesh(jax.devices()[:SHARDS], ("rows",))

    with pytest.raises(HandoffError, match="gather an array"):
        to_torch(jax.device_put(jnp.arange(8.0), NamedSharding(mesh, spread)))


@on_four
@pytest.mark.parametrize("name", ["step", "advance", "restart", "unroll"])
def test_programs_communicate_nothing(pair, name):
    env = pair[1]
    td = env.rand_action(env.reset())
    inputs = jax.tree.map(np.asarray, env._engine.prepare(td).inputs)
    constants = env._engine.constants(td.batch_size)
    arguments = {
        "step": (*inputs, constants),
        "advance": (*inputs, constants, True),
        "restart": (inputs[0], np.ones(8, bool), constants, 1),
        "unroll": (
            3,
            None,
            True,
            (
                inputs[0],
                {path: np.asarray(leaf) for path, leaf in env._engine.root(td).items()},
                np.zeros((3, 8, 1), bool),
                {},
            ),
            None,
            np.zeros(3, np.uint32),
            constants,
        ),
    }[name]
    program = getattr(env._engine.programs, name)
    program = getattr(program, "run", program)

    text = program.lower(*arguments).compile().as_text()

    assert "HloModule" in text
    for collective in (
        "all-reduce",
        "all-gather",
        "all-to-all",
        "collective-permute",
        "reduce-scatter",
    ):
        assert collective not in text


@on_four
def test_what_cannot_be_spread_is_refused():
    devices = jax.devices()[:SHARDS]

    with pytest.raises(ArgumentError, match="multiple of 4"):
        JaxEnv(Pendulum(), batch_size=[6], devices=devices)
    with pytest.raises(ArgumentError, match="requires_grad=False"):
        JaxEnv(Pendulum(), batch_size=[8], devices=devices, requires_grad=True)
    with pytest.raises(ArgumentError, match="cannot move"):
        JaxEnv(Pendulum(), batch_size=[8], devices=devices).to("meta")
    population = compile_policy([torch.nn.Linear(3, 1) for _ in range(2)])
    with pytest.raises(PolicyError, match=r"population of 2 policies.*on one device"):
        JaxEnv(Pendulum(), batch_size=[8], devices=devices).rollout(2, population)


@pytest.mark.parametrize("devices", [[], [jax.devices()[0]] * 2])
def test_devices_are_given_once_each(devices):
    with pytest.raises(ArgumentError, match="different devices"):
        JaxEnv(Pendulum(), batch_size=[8], devices=devices)


def test_numbers_and_devices_of_other_processes_are_refused(monkeypatch):
    with pytest.raises(
        ArgumentTypeError, match=r"holds 0 of type int.*jax\.local_devices\(\)\[:2\]"
    ):
        JaxEnv(Walker(), batch_size=[2], devices=[0, 1])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ArgumentError, match=r"of another process.*Pass jax\.local_devices\(\)"):
        JaxEnv(Walker(), batch_size=[2], devices=jax.devices()[:1])


@pytest.mark.parametrize("devices", [4, "cpu"])
def test_devices_are_a_list(devices):
    with pytest.raises(ArgumentError, match=r"devices is .*must be a list.*jax\.local_devices\(\)"):
        JaxEnv(Pendulum(), batch_size=[8], devices=devices)
