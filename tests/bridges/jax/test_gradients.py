"""`requires_grad=True`: torch gradients through compiled steps, against `jax.grad` of the same function."""

from __future__ import annotations

import gc
import re
import resource
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import (
    Compose,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    compile_policy,
)
from envkit.errors import GradientError
from envkit.functional import Box, Timestep, unroll
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.zoo.walkers import Pendulum, Walker, unlike_any

pytestmark = pytest.mark.rounding

PAGE = (Path(__file__).parents[3] / "docs" / "gradients.md").read_text()
ROWS, LIMIT = 4, 5


@pytest.fixture(scope="module")
def env():
    return JaxEnv(
        Pendulum(), batch_size=[ROWS], device="cpu", episode_length=LIMIT, requires_grad=True
    )


@pytest.fixture(scope="module")
def nested_env():
    return JaxEnv(
        Walker(), batch_size=[ROWS], device="cpu", requires_grad=True, state_layout="nested"
    )


@pytest.fixture(scope="module")
def packed_env():
    return JaxEnv(Walker(), batch_size=[ROWS], device="cpu", requires_grad=True)


def linear_policy(scale=0.5):
    policy = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(policy.weight, scale)
    return policy


def start(env, seed=0):
    env.set_seed(seed)
    return env.reset()


def state_of(env, td):
    """Give what the functional env starts from, at the same state as ``td``."""
    rows = env._engine.programs.env
    state = rows.packing.unpack(
        {name: jnp.array(leaf.numpy()) for name, leaf in td["state"].items()}
    )
    observation = jnp.array(td["observation"].numpy())
    timestep = jax.tree.map(
        lambda like: jnp.zeros((td.numel(), *like.shape), like.dtype), rows.template[1]
    )
    return state, Timestep(observation, timestep.reward, timestep.terminated, timestep.truncated)


def step_once(env, td, action):
    return env.step(td.copy().set("action", action))


# ------------------------------------------------------------------------------------ same numbers


def test_the_gradient_of_a_rollout_with_resets_is_that_of_jax_grad(env):
    root = start(env)
    carry = state_of(env, root)

    @jax.jit
    @jax.value_and_grad
    def wanted(weight, carry):
        def act(weight, observation, key):
            return observation @ weight.T

        _, made = unroll(
            env._engine.programs.env, carry, act, weight, jax.random.PRNGKey(0), steps=12
        )
        return made.next.reward.sum() + made.next.observation[-1].sum()

    policy = linear_policy()
    data = env.rollout(12, policy, break_when_any_done=False, auto_reset=False, tensordict=root)
    loss = data["next", "reward"].sum() + data["next", "observation"][:, -1].sum()
    loss.backward()

    value, gradient = wanted(jnp.full((1, 3), 0.5), carry)
    assert data["next", "truncated"][:, [4, 9]].all()
    np.testing.assert_allclose(loss.item(), value, rtol=1e-5)
    np.testing.assert_allclose(policy.weight.grad, gradient, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_state_and_equal_finite_differences(env):
    root = start(env)
    action = torch.full((ROWS, 1), 0.3, requires_grad=True)
    floats = root["state", "floats"].clone().requires_grad_()

    def loss(floats, action):
        td = root.clone()
        td["state", "floats"] = floats
        following = step_once(env, td, action)["next"]
        shown = following["observation"].sum() + following["reward"].sum()
        return shown + following["state", "floats"].square().sum()

    loss(floats, action).backward()

    for leaf, place in ((floats, 0), (action, 1)):
        for column in range(leaf.shape[1]):
            ahead, behind = ([x.detach().clone() for x in (floats, action)] for _ in range(2))
            ahead[place][1, column] += 1e-2
            behind[place][1, column] -= 1e-2
            slope = (loss(*ahead) - loss(*behind)) / 2e-2
            torch.testing.assert_close(leaf.grad[1, column], slope, rtol=2e-2, atol=2e-2)


def test_one_backward_program_serves_steps_rollouts_and_episodes():
    env = JaxEnv(unlike_any(Pendulum), batch_size=[2], episode_length=3, requires_grad=True)
    policy = linear_policy()

    for options in ({"break_when_any_done": False}, {}, {"break_when_all_done": True}):
        for steps in (4, 7):
            data = env.rollout(steps, policy, **options)
            data["next", "reward"].sum().backward()

    assert env.traces == {"restart": 1, "step": 1, "step_vjp": 1}


@settings(max_examples=12)
@given(st.lists(st.integers(0, 3), max_size=2), st.data())
def test_any_batch_has_the_gradients_of_its_rows(env, batch, data):
    seed = data.draw(st.integers(0, 99))
    env.set_seed(seed)
    root = env.reset(TensorDict(batch_size=batch))
    rows = root.batch_size.numel()
    action = torch.linspace(-1, 1, rows).reshape(*batch, 1).requires_grad_()

    following = step_once(env, root, action)["next"]
    loss = following["observation"].square().sum() + following["reward"].sum()
    (whole,) = torch.autograd.grad(loss, action)

    assert whole.shape == action.shape
    if rows:
        single = action.detach().reshape(-1, 1)[-1:].clone().requires_grad_()
        following = step_once(env, root.reshape(-1)[-1:], single)["next"]
        (following["observation"].square().sum() + following["reward"].sum()).backward()
        torch.testing.assert_close(whole.reshape(-1, 1)[-1:], single.grad, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------ what carries gradients


def test_floats_carry_a_graph_and_integers_and_flags_do_not(packed_env):
    action = torch.zeros(ROWS, 2, requires_grad=True)

    following = step_once(packed_env, start(packed_env), action)["next"]

    with_graph = {key for key, leaf in following.items(True, True) if leaf.requires_grad}
    assert with_graph == {("state", "floats"), "place", "reward"}


def test_nothing_has_a_graph_unless_it_is_wanted(env):
    root, action = start(env), torch.zeros(ROWS, 1, requires_grad=True)
    plain = JaxEnv(Pendulum(), batch_size=[ROWS], episode_length=LIMIT)

    with torch.no_grad():
        unrecorded = env.step_and_maybe_reset(root.copy().set("action", action))[0]
    by_way = {
        "no_grad": unrecorded,
        "an action without": step_once(env, root, action.detach()),
        "an env without": step_once(plain, start(plain), action),
    }

    for way, td in by_way.items():
        assert not any(leaf.requires_grad for leaf in td["next"].values(True, True)), way
    assert_same(by_way["no_grad"]["next"], step_once(env, root, action)["next"].detach())


def test_a_detached_root_cuts_the_gradient(env):
    first, second = (torch.full((ROWS, 1), 0.2, requires_grad=True) for _ in range(2))

    td = env.step_mdp(step_once(env, start(env), first)).detach()
    step_once(env, td, second)["next", "state", "floats"].sum().backward()

    assert first.grad is None
    assert (second.grad != 0).all()


def test_refilling_the_action_afterwards_changes_no_gradient(env):
    theta = torch.full((ROWS, 1), 0.5, requires_grad=True)
    root = start(env)
    (wanted,) = torch.autograd.grad(step_once(env, root, theta * 2)["next", "reward"].sum(), theta)

    action = theta * 2
    following = step_once(env, root, action)["next"]
    with torch.no_grad():
        action.fill_(100.0)

    (gradient,) = torch.autograd.grad(following["reward"].sum(), theta)
    assert torch.equal(gradient, wanted)


def test_a_state_that_is_overwritten_before_the_backward_pass_is_an_error(env):
    action = torch.zeros(ROWS, 1, requires_grad=True)
    root = start(env)

    following = step_once(env, root, action)["next"]
    root["state", "floats"].zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        following["reward"].sum().backward()


# -------------------------------------------------------------------------------- masks and episodes


@settings(max_examples=10)
@given(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_rows_that_are_not_stepped_hand_the_gradient_to_what_they_keep(env, mask):
    mask = torch.tensor(mask)
    root = start(env)
    floats = root["state", "floats"].clone().requires_grad_()
    action = torch.full((ROWS, 1), 0.3, requires_grad=True)
    root["state", "floats"] = floats
    whole = step_once(env, root, action)["next", "state", "floats"]
    wanted = torch.autograd.grad(whole.sum(), (floats, action))

    masked = step_once(env, root.copy().set("_step", mask), action)["next", "state", "floats"]

    if not mask.any():
        assert torch.autograd.grad(masked.sum(), floats)[0].eq(1).all()
        return
    to_floats, to_action = torch.autograd.grad(masked.sum(), (floats, action))
    assert torch.equal(to_action, wanted[1] * mask[:, None])
    assert torch.equal(to_floats, torch.where(mask[:, None], wanted[0], 1.0))


def test_a_partial_reset_keeps_the_gradient_of_the_other_rows(env):
    action = torch.full((ROWS, 1), 0.3, requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    td = env.step_mdp(step_once(env, start(env), action))
    (whole,) = torch.autograd.grad(td["observation"].sum(), action, retain_graph=True)

    fresh = env.reset(td.set("_reset", mask))
    following = step_once(env, fresh, torch.zeros(ROWS, 1))["next"]

    (gradient,) = torch.autograd.grad(fresh["observation"].sum(), action, retain_graph=True)
    assert torch.equal(gradient, whole * ~mask[:, None])
    (later,) = torch.autograd.grad(following["observation"].sum(), action)
    assert torch.equal(later == 0, mask[:, None])


def test_a_new_episode_has_no_gradient_to_the_old_one(env):
    first, rest = (torch.full((ROWS, 1), 0.3, requires_grad=True) for _ in range(2))
    actions = iter([first] * LIMIT + [rest] * 2)

    data = env.rollout(
        LIMIT + 2, lambda td: td.set("action", next(actions) * 1), break_when_any_done=False
    )
    data["next", "observation"][:, LIMIT:].sum().backward()

    assert data["next", "done"][:, LIMIT - 1].all()
    assert first.grad is None or (first.grad == 0).all()
    assert (rest.grad != 0).all()


class Cone:
    """Its reward is the distance from the origin, where that has no derivative; a goal starts there."""

    action_space = Box(-1.0, 1.0, (2,))

    def reset(self, key):
        return jnp.zeros(2), Timestep(jnp.zeros(2))

    def step(self, state, action):
        place = state + action
        return place, Timestep(place, -jnp.linalg.norm(state))


def test_rows_that_nobody_uses_spoil_no_gradient_where_there_is_no_derivative():
    env = JaxEnv(Cone(), batch_size=[2], requires_grad=True)
    root = env.reset()
    root["state", "floats"][0] = 1.0
    floats = root["state", "floats"].clone().requires_grad_()
    root["state", "floats"] = floats
    root["_step"] = torch.tensor([True, False])

    following = step_once(env, root, torch.zeros(2, 2))["next"]
    (following["reward"].sum() + following["observation"].sum()).backward()

    assert floats.grad.isfinite().all()
    assert (floats.grad[1] == 0).all() and (floats.grad[0] != 0).all()


# ----------------------------------------------------------------------------- layouts, keys, transforms


def test_the_layouts_have_the_same_gradients(packed_env, nested_env):
    gradients = []
    for env, other in (
        (packed_env, packed_env),
        (nested_env, nested_env),
        (packed_env, nested_env),
    ):
        action = torch.full((ROWS, 2), 0.2, requires_grad=True)
        td = other.step_mdp(step_once(other, start(other), action))
        following = step_once(env, td, action)["next"]  # of the other layout: brought into its own
        following["reward"].sum().backward()
        gradients.append(action.grad)

    assert (gradients[0] != 0).all()
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


def test_views_of_a_packed_state_carry_gradients_both_ways(packed_env):
    action = torch.full((ROWS, 2), 0.2, requires_grad=True)
    state = step_once(packed_env, start(packed_env), action)["next", "state"]

    named = packed_env.unpack(state)
    again = packed_env.pack(named)

    assert named["place"].requires_grad and not named["steps"].requires_grad
    (gradient,) = torch.autograd.grad(again["floats"].sum(), action)
    assert (gradient == 1).all()


def test_reseeding_keeps_the_gradient(packed_env):
    action = torch.full((ROWS, 2), 0.2, requires_grad=True)
    td = packed_env.step_mdp(step_once(packed_env, start(packed_env), action))

    packed_env.reseed(td)

    (gradient,) = torch.autograd.grad(td["state", "floats"].sum(), action)
    assert (gradient == 1).all()


def test_gradients_flow_through_transforms_that_run_inside_the_program(env):
    twice = TransformedEnv(env, RewardScaling(loc=0.0, scale=2.0))
    twice.append_transform(RewardSum())
    twice.append_transform(StepCounter())
    gradients = []
    for seen in (env, twice):
        policy = linear_policy()
        seen.set_seed(0)
        data = seen.rollout(LIMIT, TensorDictModule(policy, ["observation"], ["action"]))
        if seen is env:
            data["next", "reward"].sum().backward()
        else:
            data["next", "episode_reward"][:, -1].sum().backward()
        gradients.append(policy.weight.grad)

    torch.testing.assert_close(gradients[1], 2 * gradients[0])


@pytest.mark.parametrize(
    "transform", [lambda: RewardSum(), lambda: Compose(StepCounter(5), RewardSum())]
)
def test_a_graph_keeps_an_env_that_went_out_of_scope(transform):
    weight = torch.ones(1, requires_grad=True)

    def loss():
        inner = JaxEnv(Pendulum(), batch_size=[2], requires_grad=True)
        env = TransformedEnv(inner, transform())
        env.set_seed(0)
        data = env.rollout(3, lambda td: td.set("action", weight.expand(2, 1)))
        return data["next", "episode_reward"].sum(), weakref.ref(env)

    total, env = loss()
    gc.collect()
    total.backward()
    del total
    gc.collect()

    assert weight.grad.abs() > 0
    assert env() is None


def test_sub_envs_of_one_process_give_gradients_and_worker_processes_none():
    def make():
        return JaxEnv(Pendulum(), requires_grad=True)

    actions = [torch.full((2, 1), 0.3, requires_grad=True) for _ in range(2)]
    serial, parallel = SerialEnv(2, make), ParallelEnv(2, make, num_processes=1)
    try:
        inside = step_once(serial, start(serial), actions[0])["next"]
        outside = step_once(parallel, start(parallel), actions[1])["next"]
    finally:
        parallel.close()
        serial.close()

    inside["observation"].sum().backward()
    assert (actions[0].grad != 0).all()
    assert not any(leaf.requires_grad for leaf in outside.values(True, True))
    assert_same(inside.detach(), outside)


# ---------------------------------------------------------------------------- what is compiled, and errors


def test_a_rollout_is_compiled_only_where_no_gradient_is_asked_for(env):
    policy = compile_policy(linear_policy())
    env.set_seed(0)
    stepped = env.rollout(3, policy, break_when_any_done=False)
    assert "unroll" not in env.traces
    stepped["next", "reward"].sum().backward()
    assert (policy.module.weight.grad != 0).any()

    env.set_seed(0)
    with torch.no_grad():
        compiled = env.rollout(3, policy, break_when_any_done=False)
    env.set_seed(0)
    policy.requires_grad_(False)
    frozen = env.rollout(3, policy, break_when_any_done=False)

    assert env.traces["unroll"] == 1
    assert_same(compiled, frozen)
    torch.testing.assert_close(compiled["next", "reward"], stepped["next", "reward"].detach())


def test_random_rollouts_from_a_state_with_a_graph_have_one(env):
    root = start(env)
    floats = root["state", "floats"].clone().requires_grad_()
    root["state", "floats"] = floats

    data = env.rollout(3, auto_reset=False, tensordict=root, break_when_any_done=False)

    data["next", "reward"].sum().backward()
    assert (floats.grad != 0).any()


def test_unroll_says_that_it_gives_no_gradients(env):
    root, policy = start(env), compile_policy(linear_policy())

    with pytest.raises(GradientError, match=r"Use rollout.*torch\.no_grad\(\)"):
        env.unroll(root, 3, policy)
    with torch.no_grad():
        data, _ = env.unroll(root, 3, policy)

    assert not any(leaf.requires_grad for leaf in data.values(True, True))


class Searching(Pendulum):
    """Steps in a loop whose length depends on the data."""

    def step(self, state, action):
        state = jax.lax.while_loop(lambda s: s[0] < 3.0, lambda s: s + 1.0, state + action)
        return state, self.shown(state)


def test_a_step_without_a_derivative_says_so_at_the_backward_pass():
    env = JaxEnv(Searching(), requires_grad=True)
    following = step_once(env, env.reset(), torch.zeros(1, requires_grad=True))["next"]

    with pytest.raises(GradientError, match="cannot differentiate the step of this env"):
        following["observation"].sum().backward()


def test_gradients_of_gradients_are_refused(env):
    action = torch.full((ROWS, 1), 0.3, requires_grad=True)
    loss = step_once(env, start(env), action)["next", "observation"].square().sum()

    (gradient,) = torch.autograd.grad(loss, action, create_graph=True)

    with pytest.raises(GradientError, match=r"gradients of gradients.*create_graph=True"):
        gradient.sum().backward()


def test_the_page_on_gradients_runs_as_printed():
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/gradients.md", "exec"), names)


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize("passes", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_backward_passes_keep_nothing_alive(env, passes):
    policy = linear_policy()

    def train(count):
        td = start(env)
        for _ in range(count):
            data, following = env.step_and_maybe_reset(td.set("action", policy(td["observation"])))
            (data["next", "reward"].sum() + following["observation"].sum()).backward()
            td = following.detach()
        del td, data, following
        policy.zero_grad()
        gc.collect()
        return len(jax.live_arrays()), resident_mib()

    arrays, memory = train(50)
    arrays_after, memory_after = train(passes)

    assert arrays_after <= arrays
    assert memory_after < memory + 20


def resident_mib():
    """Memory this process has in use; elsewhere than on Linux, the most it has had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
