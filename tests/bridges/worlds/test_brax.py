"""`BraxEnv`: the same numbers as Brax stepped by hand, its names, its errors."""

from __future__ import annotations

import inspect

import jax
import mujoco
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit.data.keywords import known_to
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError, UnsupportedError
from envkit.functional import row_keys
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.rendering import require_drawable
from envkit_bridges.worlds.brax import BraxEnv, BraxWrapper, import_brax
from tests.bridges.compare import assert_close, assert_same, replay, replaying


def actions_for(rows, steps, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, steps, size, generator=generator) * 2 - 1


def bare_reset(brax_env, rows):
    """Reset bare Brax from the keys that seed 0 gives the rows of an env of ours."""
    _, now = jax.random.split(jax.random.PRNGKey(0))
    keys = jax.vmap(lambda key: jax.random.split(key)[1])(row_keys(now, rows))
    return jax.jit(jax.vmap(brax_env.reset))(keys)


def filled(like, named):
    """Put the values of an unpacked state into a Brax state of the structure of ``like``."""

    def value(path, leaf):
        key = tuple(entry.name if hasattr(entry, "name") else entry.key for entry in path)
        return named[key].numpy().astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, like)


def assert_equals_bare(env, rows, steps):
    """Compare observation, reward, end and simulator state of every step with bare Brax, bitwise.

    Both step from our reset. Brax's own, another program, is compared up to rounding.
    """
    actions = actions_for(rows, steps, env.action_size) * 0.3
    env.set_seed(0)
    td = env.reset(TensorDict(batch_size=[rows]))
    brax_env = env._env
    step = jax.jit(jax.vmap(brax_env.step))

    fresh = bare_reset(brax_env, rows)
    state = filled(fresh, env.unpack(td["state"]))

    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), state, fresh)
    for action in actions.unbind(1):
        state = step(state, action.numpy())
        td = env.step(td.set("action", action))
        following = td["next"]
        assert np.array_equal(following["observation"], state.obs)
        assert np.array_equal(following["reward"][:, 0], state.reward)
        assert np.array_equal(following["terminated"][:, 0], np.asarray(state.done) > 0.5)
        ours = filled(state, env.unpack(following["state"]))
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, ours, state)))
        td = env.step_mdp(td)


# --------------------------------------------------------------------------------------- same numbers


@pytest.mark.rounding
def test_fast_equals_brax_stepped_by_hand(fast):
    assert_equals_bare(fast, 4, steps=4)


@pytest.mark.rounding
@pytest.mark.more
def test_inverted_pendulum_equals_brax_stepped_by_hand(pendulum):
    assert_equals_bare(pendulum, 8, steps=6)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["spring", "positional", "generalized"])
@pytest.mark.parametrize("name", ["inverted_pendulum", "ant"])
def test_every_backend_equals_brax_stepped_by_hand(name, backend):
    env = BraxEnv(name, backend=backend, batch_size=[4], device="cpu")

    assert_equals_bare(env, 4, steps=4)


@pytest.mark.rounding
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ant_repeats_itself_stepped_and_advanced_and_nearly_so_compiled_or_at_another_size():
    env = BraxEnv("ant", backend="spring", batch_size=[8], device="cpu", episode_length=6)
    env.set_seed(0)
    start = env.reset()

    data, _ = env.unroll(start.clone(), 9)
    advanced, _ = replay(env, start.clone(), data["action"])
    td, stepped = start.clone(), []
    for action in data["action"].unbind(1):
        stepped.append(env.step(td.set("action", action.clone())))
        td = env.maybe_reset(env.step_mdp(stepped[-1]))
    part = env.step(start[:3].clone().set("action", data["action"][:3, 0]))

    assert data["next", "truncated"][:, 5].all()
    assert_same(advanced, torch.stack(stepped, 1))
    # The scan is another program: XLA rounds apart, and an ant amplifies that step by step.
    assert_close(data, advanced.exclude("state", ("next", "state")), atol=1e-3)
    assert_close(part["next"], advanced["next"][:3, 0], atol=1e-4)


@pytest.mark.rounding
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_rollout_of_a_physics_engine_equals_the_python_loop(pendulum):
    pendulum.set_seed(1)
    compiled = pendulum.rollout(30, break_when_any_done=False)

    pendulum.set_seed(1)
    looped = pendulum.rollout(30, replaying(compiled["action"]), break_when_any_done=False)

    assert_same(compiled, looped)
    ended = compiled["next", "terminated"][:, :-1, 0]
    fresh = compiled["observation"][:, 1:][ended]
    assert (fresh.abs() < 0.1).all() and len(fresh.unique(dim=0)) == len(fresh) > 2


@pytest.mark.slow
@pytest.mark.rounding
def test_a_stored_state_steps_to_the_same_bits_and_nearly_so_at_another_size(pendulum):
    pendulum.set_seed(2)
    td = pendulum.rollout(5, lambda td: td.set("action", torch.full((8, 1), 0.2)))
    stored = td[:, 3].select("state", "action").clone()

    again, part = pendulum.step(stored.clone()), pendulum.step(stored[:3].clone())

    wanted = td["next"][:, 3]
    assert_same(again["next"], wanted)
    assert_close(part["next"], wanted[:3])


@pytest.mark.rounding
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["inverted_pendulum", "ant"])
def test_gradients_through_three_steps_equal_those_of_brax_in_jax(name):
    env = BraxEnv(name, backend="spring", batch_size=[4], device="cpu", requires_grad=True)
    env.set_seed(0)
    root = env.reset()
    actions = (actions_for(4, 3, env.action_size) * 0.3).requires_grad_()
    floats = root["state", "floats"].clone().requires_grad_()
    brax_env = env._env
    first = filled(bare_reset(brax_env, 4), env.unpack(root["state"]))

    @jax.jit
    @jax.grad
    def wanted(inputs):
        actions, qd = inputs
        state = first.replace(pipeline_state=first.pipeline_state.replace(qd=qd))
        loss = 0.0
        for step in range(3):
            state = jax.vmap(brax_env.step)(state, actions[:, step])
            loss += (state.obs**2).sum() + state.reward.sum()
        return loss

    root["state", "floats"] = floats
    td, loss = root, 0.0
    for action in actions.unbind(1):
        following = env.step(td.set("action", action))["next"]
        loss = loss + following["observation"].square().sum() + following["reward"].sum()
        td = env.step_mdp(td)
    loss.backward()

    to_actions, to_qd = wanted((actions.detach().numpy(), first.pipeline_state.qd))
    slopes = env.unpack(root["state"].detach().set("floats", floats.grad))
    scale = float(abs(to_actions).max())
    np.testing.assert_allclose(actions.grad, to_actions, rtol=1e-3, atol=1e-4 * scale)
    scale = float(abs(to_qd).max())
    np.testing.assert_allclose(slopes["pipeline_state", "qd"], to_qd, rtol=1e-3, atol=1e-4 * scale)


def test_an_episode_is_cut_by_its_length_and_never_terminated_by_it(fast):
    fast.set_seed(0)

    data = fast.rollout(9, break_when_any_done=False)

    ends = data["next", "truncated"].squeeze(-1)
    assert ends[0].nonzero().squeeze(-1).tolist() == [3, 7]
    assert not data["next", "terminated"].any()
    assert (data["observation"][:, 4] == 0).all()


@pytest.mark.slow
def test_a_falling_pendulum_terminates(pendulum):
    pendulum.set_seed(0)
    td = pendulum.reset()

    ended = torch.zeros(8, 1, dtype=torch.bool)
    for _ in range(12):
        td = pendulum.step(td.set("action", torch.ones(8, 1)))
        following = td["next"]
        ended |= following["terminated"]
        fallen = following["observation"][:, 1:2].abs() > 0.2
        assert torch.equal(following["terminated"], fallen)
        assert not following["truncated"].any()
        td = pendulum.step_mdp(td)

    assert ended.all()


# ------------------------------------------------------------------------------------------- layouts


def test_the_worked_example_has_these_shapes():
    env = BraxEnv("fast", batch_size=[3], device="cpu")
    env.set_seed(0)

    data = env.rollout(4)

    assert data.shape == (3, 4)
    assert data["observation"].shape == (3, 4, 2)
    assert data["next", "reward"].shape == (3, 4, 1)


def test_the_nested_layout_has_the_references_keys(nested_fast):
    nested_fast.set_seed(0)
    root = nested_fast.reset()

    keys = nested_fast.state_keys
    assert keys[0] == ("state", "done")
    assert {("state", "pipeline_state", "q"), ("state", "pipeline_state", "qd")} <= set(keys)
    assert torch.equal(root["state", "obs"], root["observation"])
    assert set(keys) == {
        ("state", *key) if isinstance(key, tuple) else ("state", key)
        for key in root["state"].keys(True, True)
    }


@pytest.mark.rounding
def test_the_layouts_of_a_brax_state_agree(fast, nested_fast):
    fast.set_seed(0)
    nested_fast.set_seed(0)
    action = actions_for(4, 1, 1)[:, 0]

    packed = fast.step(fast.reset().set("action", action))
    nested = nested_fast.step(nested_fast.reset().set("action", action))

    assert_same(packed, nested, without=("state",))
    assert_same(nested_fast.unpack(packed["next", "state"]), nested["next", "state"])
    assert_same(fast.pack(nested["next", "state"]), packed["next", "state"])


@pytest.mark.parametrize(
    "which", ["fast", "nested_fast", pytest.param("pendulum", marks=pytest.mark.slow)]
)
def test_data_agrees_with_the_specs(which, request):
    check_env_specs(request.getfixturevalue(which), seed=0)


def test_actions_lie_between_minus_one_and_one(pendulum):
    spec = pendulum.action_spec

    assert spec.shape == (8, 1) and spec.dtype == torch.float32
    assert (spec.space.low == -1).all() and (spec.space.high == 1).all()


# --------------------------------------------------------------------------------- names and errors


def test_known_envs_are_listed_and_attributes_found_on_the_simulator(fast):
    assert {"ant", "fast", "inverted_pendulum"} <= set(BraxEnv.available_envs)
    assert (fast.env_name, fast.libname) == ("fast", "brax")
    assert fast.action_size == 1
    assert fast.observation_size == 2
    with pytest.raises(
        AttributeError, match=r"neither BraxEnv nor its simulator Fast .*'no_such_thing'"
    ):
        fast.no_such_thing  # noqa: B018


def test_a_wrapped_object_is_the_env_of_that_name(fast):
    env = BraxWrapper(
        import_brax().get_environment("fast"), batch_size=[4], device="cpu", episode_length=4
    )
    env.set_seed(0)
    fast.set_seed(0)

    assert_same(env.reset(), fast.reset())


def test_a_wrapper_of_brax_is_refused():
    from brax.envs.wrappers.training import EpisodeWrapper

    wrapped = EpisodeWrapper(import_brax().get_environment("fast"), 10, 1)

    with pytest.raises(ArgumentError, match=r"EpisodeWrapper.*env\.unwrapped"):
        BraxWrapper(wrapped, device="cpu")


def test_no_device_is_a_warning():
    with pytest.warns(UserWarning, match="device='cpu'"):
        BraxEnv("fast")


def test_every_keyword_of_a_stateless_env_is_one_of_a_brax_env_too():
    assert set(known_to(JaxEnv)) - {"env"} <= set(inspect.signature(BraxEnv).parameters)


@pytest.mark.filterwarnings("error:no device was given")
def test_rows_are_spread_over_the_devices_that_are_named():
    env = BraxEnv("fast", batch_size=[4 * jax.device_count()], devices=jax.devices())

    assert env.rollout(3).shape == (4 * jax.device_count(), 3)
    with pytest.raises(ArgumentTypeError, match=r"devices is 'cpu'.*must be a list"):
        BraxEnv("fast", batch_size=[4], devices="cpu")


# ------------------------------------------------------------------ what all stateless worlds share


def test_stored_states_are_drawn_by_brax(rendering, pendulum):
    pendulum.set_seed(0)
    data = pendulum.rollout(6, lambda td: td.set("action", torch.ones(8, 1)), auto_reset=True)

    frames = pendulum.render_rollout(data, row=1, every=5, height=24, width=32)

    assert frames.shape == (2, 3, 24, 32) and frames.dtype == torch.uint8
    assert frames.float().std() > 0 and not torch.equal(*frames)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"camera": "side"}, ArgumentError, "camera is 'side', but this model has .*-1, the free"),
        ({"camera": 7}, ArgumentError, "camera is 7"),
        ({"height": -1}, ArgumentError, "height is -1"),
        ({"width": 10**5}, ArgumentError, "at most .* for this model"),
        (
            {"heigth": 3},
            OptionError,
            "render of Lying takes no keyword 'heigth'. Did you mean 'height'",
        ),
    ],
)
def test_what_brax_cannot_draw_is_told_before_it_is_drawn(options, error, message):
    class Lying:
        def render(self, trajectory, height=240, width=320, camera=None):
            raise AssertionError

    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><camera name='top'/></worldbody></mujoco>"
    )

    with pytest.raises(error, match=message):
        require_drawable("Lying", Lying().render, model, options)


def test_an_env_without_bodies_has_no_picture(fast):
    with pytest.raises(UnsupportedError, match="Brax's Fast has no system of bodies"):
        fast.render(fast.reset())


def jittered(key, sys):
    """Scale the mass of every link and the friction of every geom."""
    of_mass, of_friction = jax.random.split(key)
    mass, friction = sys.link.inertia.mass, sys.geom_friction
    mass = mass * jax.random.uniform(of_mass, mass.shape, minval=0.5, maxval=1.5)
    scale = jax.random.uniform(of_friction, (friction.shape[0], 1), minval=0.5, maxval=1.5)
    return sys.tree_replace({"link.inertia.mass": mass, "geom_friction": friction * scale})


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "backend"),
    [("inverted_pendulum", "spring"), ("inverted_pendulum", "generalized"), ("ant", "spring")],
)
def test_every_row_steps_as_bare_brax_with_its_own_system(name, backend):
    how = {"randomize": jittered, "metrics": True}
    env = BraxEnv(name, backend=backend, batch_size=[4], device="cpu", **how)
    env.set_seed(0)
    td = env.reset()
    named = env.unpack(td["state"])
    bare = import_brax().get_environment(name, backend=backend)
    system = bare.sys

    def step(state, action, mass, friction):
        bare.sys = system.tree_replace({"link.inertia.mass": mass, "geom_friction": friction})
        return bare.step(state, action)

    drawn = named["model", "link", "inertia", "mass"], named["model", "geom_friction"]
    system_of_rows = [leaf.numpy().copy() for leaf in drawn]
    state, step_rows = filled(bare_reset(env._env, 4), named), jax.jit(jax.vmap(step))
    for _ in range(5):
        td = env.rand_action(td)
        state = step_rows(state, td["action"].numpy(), *system_of_rows)
        following = env.step(td)["next"]
        assert np.array_equal(following["observation"], state.obs)
        assert np.array_equal(following["reward"][:, 0], state.reward)
        for metric, value in state.metrics.items():
            assert np.array_equal(following["metrics", metric], value)
        td = env.step_mdp(td)

    assert len(drawn[0][:, -1].unique()) == 4
    assert set(env.drawn_bytes) == {"link.inertia.mass", "geom_friction"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_function_that_changes_nothing_changes_no_bit_of_a_physics_engine(pendulum):
    same = BraxEnv(
        "inverted_pendulum",
        backend="spring",
        batch_size=[8],
        device="cpu",
        episode_length=20,
        randomize=lambda key, sys: sys,
    )

    runs = []
    for env in (pendulum, same):
        env.set_seed(3)
        runs.append(env.rollout(30, break_when_any_done=False))

    assert same.drawn_bytes == {}
    assert_same(*runs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repeated_actions_sum_rewards_and_count_as_one_step_of_an_episode(pendulum):
    env = BraxEnv(
        "inverted_pendulum",
        backend="spring",
        batch_size=[8],
        device="cpu",
        episode_length=3,
        action_repeat=2,
    )
    env.set_seed(0)
    td = env.reset().set("action", torch.full((8, 1), 0.05))

    data = env.rollout(3, lambda td: td.set("action", torch.full((8, 1), 0.05)))
    again = pendulum.step(td.clone())["next"].set("action", td["action"])
    second = pendulum.step(again)["next"]

    assert data["next", "reward"].eq(2).all() and data["next", "truncated"][:, -1].all()
    torch.testing.assert_close(env.step(td)["next", "observation"], second["observation"])


def test_an_env_of_ones_own_may_name_its_backends_otherwise(monkeypatch):
    envs = import_brax()

    class Own(envs._envs["fast"]):
        def __init__(self, backend="usual"):
            super().__init__()
            self._backend = backend

        @property
        def backend(self):
            return self._backend

    monkeypatch.setitem(envs._envs, "own", Own)

    assert BraxEnv("own", backend="mine", device="cpu")._env.backend == "mine"
