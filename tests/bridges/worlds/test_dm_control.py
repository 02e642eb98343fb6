"""`DMControlEnv`: the bits of the bare suite, alone and in batches; seeds, ends, pixels, copies, resuming, errors."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit import (
    AsyncEnvPool,
    Compose,
    DoubleToFloat,
    MixedEnv,
    MultiSyncCollector,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    check_env_specs,
    list_envs,
    make,
)
from envkit.env.seeding import seed_chain
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotResetError,
    OptionError,
    ResumeError,
    UnknownEnvError,
)
from envkit_bridges.worlds.dm_control import DMControlEnv, DMControlWrapper, build, env_names
from tests.zoo.policies import Replay
from tests.zoo.resumed import same, twice

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library finds no window
    from dm_control import composer, mjcf, suite
    from dm_control.rl import control
    from dm_control.suite import cartpole

SEED = 7
NAMES = ["cartpole/swingup", "fish/upright"]  # plain arrays, and a scalar
OF_THE_SUITE = ["/".join(pair) for pair in suite.ALL_TASKS]

SHORT = {"time_limit": 0.6}  # of the suite's tasks all take it


def short(name: str = "cartpole/swingup", **options) -> DMControlEnv:
    return build(name, task_kwargs=SHORT, **options)


def bare(name: str, seed: int):
    env = suite.load(*name.split("/"), dict(SHORT))
    env.task._random = np.random.RandomState(seed)
    env.reset()
    return env


def bare_episodes(env, actions: torch.Tensor) -> list[dict[str, np.ndarray]]:
    """Step an env object of the library by hand; a row is one step."""
    seen, rows = env.reset().observation, []
    for action in actions.numpy():
        step = env.step(action)
        rows.append(
            {
                **{name: np.array(value) for name, value in seen.items()},
                **{f"next {name}": np.array(value) for name, value in step.observation.items()},
                "reward": np.float64(step.reward),
                "terminated": step.last() and step.discount == 0,
                "truncated": step.last() and step.discount == 1,
            }
        )
        seen = env.reset().observation if step.last() else step.observation
    return rows


def assert_same_bits(data: TensorDict, rows: list[dict[str, np.ndarray]]) -> None:
    flags = ("reward", "terminated", "truncated")
    for name in rows[0]:
        key = ("next", name.removeprefix("next ")) if name in flags or "next " in name else name
        found = data[key].numpy()
        expected = np.array([row[name] for row in rows])
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, expected.reshape(found.shape), err_msg=name)
    done = data["next", "terminated"] | data["next", "truncated"]
    assert data["next", "done"].equal(done)


def random_actions(env, steps: int, envs: int | None = None) -> torch.Tensor:
    """Draw actions in and beyond the bounds' corners, float64, shape (envs, steps, *action)."""
    numbers = torch.Generator().manual_seed(3)
    shape = (steps,) if envs is None else (envs, steps)
    return env.single_action_spec.rand(shape, numbers)


# ------------------------------------------------------------------------------------------ same bits


@pytest.mark.parametrize("name", NAMES)
def test_one_env_gives_the_bits_of_the_bare_suite(name, opened):
    env = opened(short(name))
    actions = random_actions(env, 150)
    env.set_seed(SEED)

    data = env.rollout(150, Replay(actions), break_when_any_done=False)

    assert_same_bits(data, bare_episodes(bare(name, SEED), actions))
    assert data["next", "truncated"].sum() >= 2


@pytest.mark.parametrize("name", NAMES)
def test_steps_one_by_one_give_the_bits_of_a_rollout(name, opened):
    env = opened(short(name))
    actions = random_actions(env, 100)
    env.set_seed(SEED)
    at_once = env.rollout(100, Replay(actions), break_when_any_done=False)
    env.set_seed(SEED)

    td, steps = env.reset(), []
    for action in actions:
        step, td = env.step_and_maybe_reset(td.set("action", action))
        steps.append(step)

    assert (torch.stack(steps) == at_once).all()


def test_each_row_of_a_batch_gives_the_bits_of_the_bare_suite(opened):
    env = opened(SerialEnv(2, short))
    actions = random_actions(env, 100, 2)
    env.set_seed(SEED)

    data = env.rollout(100, Replay(actions), break_when_any_done=False)

    for row, seed in enumerate(seed_chain(SEED, 2)[0]):
        assert_same_bits(data[row], bare_episodes(bare("cartpole/swingup", seed), actions[row]))


def test_workers_give_the_bits_of_this_process(opened):
    runs = []

    for kind in (SerialEnv, partial(ParallelEnv, num_processes=1)):
        env = opened(kind(2, partial(DMControlEnv, "cartpole", "swingup", task_kwargs=SHORT)))
        env.set_seed(SEED)
        runs.append(env.rollout(80, break_when_any_done=False, policy=lean))

    assert (runs[0] == runs[1]).all()
    assert runs[0]["next", "done"].any()


def lean(td: TensorDict) -> TensorDict:
    """Act on what is seen."""
    return td.set("action", td["position"][..., 1:2].clamp(-1, 1))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", OF_THE_SUITE)
def test_every_task_gives_the_bits_of_the_bare_suite_copies_and_resumes(name, request, opened):
    if name == "quadruped/escape":  # its terrain is uploaded to the renderer at each reset
        request.getfixturevalue("rendering")
    env = opened(short(name))
    actions = random_actions(env, 100)
    env.set_seed(SEED)

    data = env.rollout(100, Replay(actions), break_when_any_done=False)
    twin = opened(copy.deepcopy(env))

    reference = bare(name, SEED)
    if name.startswith("lqr/"):  # each object has springs of its own, drawn when it is made
        reference.physics.model.jnt_stiffness[:] = env.physics.model.jnt_stiffness
    assert_same_bits(data, bare_episodes(reference, actions))
    assert data["next", "done"].any()
    following = [each.rollout(30, Replay(actions), auto_reset=True) for each in (env, twin)]
    assert (following[0] == following[1]).all()
    check_env_specs(env)
    seeded = {"task_kwargs": {**SHORT, "random": 5}}
    assert same(twice(partial(build, name, **seeded), opened, before=25, after=20))


# ------------------------------------------------------------------------------------- what it declares


def test_specs_are_those_of_the_task(opened):
    env = opened(DMControlEnv("humanoid", "stand"))

    shapes = {key: tuple(spec.shape) for key, spec in env.full_observation_spec.items()}
    assert shapes == {
        "com_velocity": (3,),
        "extremities": (12,),
        "head_height": (1,),
        "joint_angles": (21,),
        "torso_vertical": (3,),
        "velocity": (27,),
    }
    assert {spec.dtype for spec in env.full_observation_spec.values()} == {torch.float64}
    assert env.action_spec.shape == (21,) and env.action_spec.dtype == torch.float64
    assert (env.action_spec.low == -1).all() and (env.action_spec.high == 1).all()
    assert env.reward_spec.shape == (1,) and env.reward_spec.dtype == torch.float64
    assert set(env.done_keys) == {"done", "terminated", "truncated"}
    assert env.batch_size == () and env.batch_locked
    check_env_specs(env)


def test_actions_without_bounds_are_drawn_without_bounds(opened):
    env = opened(DMControlEnv("lqr", "lqr_2_1"))

    assert env.rand_action(env.reset())["action"].isfinite().all()
    check_env_specs(env)


def test_what_it_is_called_is_told(opened):
    env = opened(DMControlEnv("cartpole", task="swingup", frame_skip=2))

    assert (env.libname, env.env_name, env.task_name) == ("dm_control", "cartpole", "swingup")
    assert repr(env).startswith("DMControlEnv('cartpole', 'swingup', frame_skip=2, ")


def test_what_it_lacks_is_looked_up_on_the_env_object(opened):
    env = opened(DMControlEnv("cartpole", "swingup"))
    env.reset()

    assert env.control_timestep() == 0.01
    assert env.task.random is env.np_random
    assert env.physics.cart_position() == env.physics.named.data.qpos["slider"][0]
    with pytest.raises(AttributeError, match="cart_speed"):
        _ = env.cart_speed


def test_all_pairs_of_the_suite_are_listed():
    assert env_names() == sorted(OF_THE_SUITE) and len(env_names()) > 40
    assert dict(DMControlEnv.available_envs)["walker"] == ["stand", "walk", "run"]
    listed = [f"{domain}/{task}" for domain, tasks in DMControlEnv.available_envs for task in tasks]
    assert sorted(listed) == env_names()


def test_it_is_made_by_its_id(opened):
    env = opened(make("dm_control/cartpole/swingup", 2, backend="serial", seed=0))
    one = opened(make("dm_control/cartpole/swingup"))

    assert env.batch_size == (2,) and isinstance(one, DMControlEnv)
    assert len(list_envs("dm_control/*")) == len(env_names())


# ------------------------------------------------------------------------------------- seeds and ends


def test_a_seed_replaces_the_random_state_and_begins_an_episode(opened):
    env = opened(short())
    env.set_seed(3)
    state = env.np_random
    first, second = env.reset(), env.reset()

    env.set_seed(3)

    assert env.np_random is not state
    assert not first["position"].equal(second["position"])
    assert env.reset()["position"].equal(first["position"])
    assert env.reset()["position"].equal(second["position"])


class Falling(cartpole.Balance):
    """Ends by itself after 0.05 s."""

    def get_termination(self, physics):
        return 0.0 if physics.time() > 0.045 else None


class Uneven(cartpole.Balance):
    """Draws three normal numbers an episode; the generator makes two at a time."""

    def initialize_episode(self, physics):
        super().initialize_episode(physics)
        physics.data.qvel[0] = self.random.randn()


def of_cartpole(kind: type[cartpole.Balance], time_limit: float = 1.0) -> control.Environment:
    physics = cartpole.Physics.from_xml_string(*cartpole.get_model_and_assets())
    task = kind(swing_up=False, sparse=False, random=0)
    return control.Environment(physics, task, time_limit=time_limit)


@pytest.mark.parametrize(("time_limit", "flag"), [(1.0, "terminated"), (0.03, "truncated")])
def test_a_last_step_with_discount_is_truncated_and_another_terminated(time_limit, flag, opened):
    env = opened(DMControlWrapper(of_cartpole(Falling, time_limit)))

    last = env.rollout(20)[-1]["next"]

    assert {name: bool(last[name]) for name in ("done", "terminated", "truncated")} == {
        "done": True,
        "terminated": flag == "terminated",
        "truncated": flag == "truncated",
    }


def test_frames_are_skipped_to_the_end_of_the_episode_at_most(opened):
    env, reference = (
        opened(DMControlWrapper(of_cartpole(Falling), frame_skip=3)),
        of_cartpole(Falling),
    )
    env.set_seed(SEED)
    env.reset()
    reference.task._random = np.random.RandomState(SEED)
    reference.reset()
    reference.reset()

    data = env.rollout(
        9, lambda td: td.set("action", torch.ones(1)), auto_reset=False, tensordict=env.reset()
    )
    reference.reset()
    steps = [reference.step([1.0]) for _ in range(len(data) * 3)]

    ends = [index for index, step in enumerate(steps) if step.last()]
    paid = [step.reward for step in steps[: ends[0] + 1]]
    sums = [sum(paid[start : start + 3]) for start in range(0, len(paid), 3)]
    assert data["next", "reward"].flatten().tolist() == pytest.approx(sums, rel=1e-15)
    assert len(paid) % 3 and data["next", "terminated"][-1]


@pytest.mark.parametrize("begun", [False, True])
def test_a_step_outside_of_an_episode_is_refused(begun, opened):
    env = opened(short())
    td = env.fake_tensordict().exclude("next")
    if begun:
        td = env.step_mdp(env.rollout(99)[-1])

    with pytest.raises(
        NotResetError, match="no episode of dm_control's Balance has begun, or the last"
    ):
        env.step(td.set("action", torch.zeros(1, dtype=torch.float64)))


# ---------------------------------------------------------------------------------------------- pixels

SMALL = {"height": 24, "width": 32}


def test_pixels_are_those_the_physics_renders(rendering, opened):
    env = opened(short(from_pixels=True, pixels_only=False, camera_id=1, render_kwargs=SMALL))

    data = env.rollout(3)

    assert data["next", "pixels"].shape == (3, 24, 32, 3)
    assert data["next", "pixels"].dtype == torch.uint8
    assert (data["next", "pixels"][-1].numpy() == env.physics.render(24, 32, camera_id=1)).all()
    assert not data["pixels"][0].equal(data["pixels"][2])
    assert data["position"].dtype == torch.float64
    assert env.render(height=8).shape == (8, 32, 3)
    check_env_specs(env)


def test_pixels_alone_stand_in_rows_too(rendering, opened):
    make = partial(short, from_pixels=True, render_kwargs=SMALL)
    env = opened(SerialEnv(2, make))

    data = env.rollout(2)

    assert set(data.keys()) == {"pixels", "action", "done", "terminated", "truncated", "next"}
    assert data["next", "pixels"].shape == (2, 2, 24, 32, 3)
    assert data["next", "pixels"].float().std() > 0


# ------------------------------------------------------------------------------- copies and resuming


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_where_the_original_stands(copied, opened):
    env = opened(short(environment_kwargs={"legacy_step": False}))
    env.set_seed(2)
    td = env.step_mdp(env.rollout(5)[-1])
    actions = random_actions(env, 70)

    twin = opened(copied(env))

    runs = [
        each.rollout(
            70, Replay(actions), tensordict=td.clone(), auto_reset=False, break_when_any_done=False
        )
        for each in (env, twin)
    ]
    assert (runs[0] == runs[1]).all()
    assert runs[0]["next", "done"].any()
    assert twin.physics is not env.physics and not twin.physics.legacy_step


def test_an_env_is_saved_in_mid_episode_and_goes_on_to_the_same_bits(opened):
    assert same(twice(short, opened, before=75, after=70))


def test_a_normal_number_that_the_generator_keeps_for_later_is_saved_too(opened):
    env = opened(DMControlWrapper(of_cartpole(Uneven)))
    env.set_seed(0)

    assert env.np_random.get_state(legacy=False)["has_gauss"] == 1
    assert same(twice(lambda: DMControlWrapper(of_cartpole(Uneven)), opened, before=5, after=10))


def test_rows_are_saved_and_go_on(opened):
    assert same(twice(partial(SerialEnv, 2, short), opened, before=40, after=40))


def test_another_model_is_told_from_the_one_that_was_saved(opened):
    env, other = (opened(build("lqr/lqr_2_1", task_kwargs={"random": seed})) for seed in (1, 2))
    env.record_for_resume().set_seed(0)
    env.rollout(5)

    with pytest.raises(ResumeError, match="something else came out"):
        other.load_state_dict(env.state_dict())


# ---------------------------------------------------------------------------------------- among others


def test_it_stands_beside_other_envs_and_under_transforms(opened):
    def counted(task: str) -> TransformedEnv:
        chain = Compose(DoubleToFloat(), StepCounter(30), RewardSum())
        return TransformedEnv(DMControlEnv("cartpole", task), chain)

    env = opened(
        MixedEnv(
            [SerialEnv(2, partial(counted, "swingup")), SerialEnv(1, partial(counted, "balance"))]
        )
    )
    env.set_seed(0)

    data = env.rollout(40, break_when_any_done=False)

    assert data["next", "position"].dtype == torch.float32
    assert data["next", "step_count"].max() == 30
    assert data["next", "episode_reward"][2, 29] > data["next", "episode_reward"][0, 29]
    check_env_specs(env)


def test_a_collector_steps_it(opened):
    with SyncDataCollector(
        partial(SerialEnv, 2, short), lean, frames_per_batch=64, total_frames=128
    ) as collector:
        batches = list(collector)

    assert [batch.numel() for batch in batches] == [64, 64]
    assert batches[1]["next", "reward"].dtype == torch.float64


@pytest.mark.slow
def test_pools_and_collectors_build_it_in_their_workers(opened):
    make = partial(DMControlEnv, "cartpole", "swingup", task_kwargs=SHORT)

    pool = opened(AsyncEnvPool([make] * 3, backend="multiprocessing"))
    pooled = pool.rollout(20, break_when_any_done=False)
    with MultiSyncCollector([make] * 2, lean, frames_per_batch=40, total_frames=80) as collector:
        batches = list(collector)

    assert pooled["next", "position"].shape == (3, 20, 3)
    assert [batch.numel() for batch in batches] == [40, 40]


@pytest.mark.slow
def test_pixels_are_drawn_in_workers(rendering, opened):
    make = partial(short, from_pixels=True, render_kwargs=SMALL)
    env = opened(ParallelEnv(2, make))

    data = env.rollout(3)

    assert data["next", "pixels"].float().std() > 0


class Sliding(composer.NullTask):
    """A body that is pushed along a rail."""

    def __init__(self):
        self.root = mjcf.RootElement()
        body = self.root.worldbody.add("body", name="block")
        body.add("geom", type="box", size=[0.1] * 3, mass=1)
        rail = body.add("joint", type="slide", axis=[1, 0, 0])
        self.root.actuator.add("motor", joint=rail, ctrlrange=[-1, 1], ctrllimited=True)
        super().__init__(composer.ModelWrapperEntity(self.root))
        self.seen = {"place": composer.observation.observable.MJCFFeature("qpos", rail)}
        for observable in self.seen.values():
            observable.enabled = True

    @property
    def task_observables(self):
        return self.seen

    def initialize_episode(self, physics, random_state):
        physics.data.qpos[:] = random_state.uniform()


def test_env_objects_of_composer_are_wrapped_too(opened):
    env = opened(DMControlWrapper(composer.Environment(Sliding(), time_limit=0.1)))
    env.set_seed(0)
    first = env.reset()

    data = env.rollout(60, break_when_any_done=False)
    env.set_seed(0)

    assert env.reset()["place"].equal(first["place"])
    assert data["next", "truncated"].any()
    check_env_specs(env)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: DMControlEnv("cartpole"),
            TypeError,
            "needs the name of one task, but was given none",
        ),
        (
            lambda: DMControlEnv("cartpole", "swingup", task="balance"),
            OptionError,
            "and task='balance'",
        ),
        (
            lambda: DMControlEnv("cartpole", "swing"),
            RuntimeError,
            "Did you mean 'cartpole/swingup'",
        ),
        (lambda: build("cartpole"), UnknownEnvError, "Did you mean 'cartpole/"),
        (
            lambda: build("cartpole/swingup", tasks=1),
            OptionError,
            "no keyword 'tasks'. Did you mean 'task",
        ),
        (
            lambda: DMControlWrapper("cartpole"),
            ArgumentTypeError,
            "Use DMControlEnv with domain and task",
        ),
        (lambda: short(frame_skip=0), ValueError, "frame_skip is 0"),
        (
            lambda: short().render(camera_id="side"),
            ArgumentError,
            r"camera_id is 'side'.* 0 \('fixed'\), 1 \('lookatcart'\).*-1, the free",
        ),
        (lambda: short(camera_id=2).render(), ArgumentError, "camera_id is 2, but this model has"),
        (lambda: short(camera_id=1.5).render(), ArgumentTypeError, "camera_id is 1.5"),
        (lambda: short().render(heigth=4), OptionError, "'heigth'. Did you mean 'height'"),
        (lambda: short().render(height=-1), ArgumentError, "height is -1"),
        (lambda: short().render(width=5000), ArgumentError, "at most 640.*offwidth = 5000"),
        (lambda: short(render_kwargs=3), ArgumentTypeError, "render_kwargs is 3.*'height': 84"),
        (
            lambda: DMControlEnv("cartpole", "swingup", task_kwargs={"limit": 3}),
            OptionError,
            "'cartpole/swingup' takes no keyword 'limit'. Did you mean 'time_limit'",
        ),
        (
            lambda: short(environment_kwargs={"flat": True}),
            OptionError,
            "environment_kwargs takes no keyword 'flat'.*flat_observation",
        ),
        (lambda: short(environment_kwargs=3), ArgumentTypeError, "environment_kwargs is 3"),
    ],
)
def test_a_mistake_is_named_with_its_cure(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_several_are_made_as_a_parallel_env(opened):
    env = opened(short(num_workers=2))

    assert isinstance(env, ParallelEnv) and env.num_workers == 2
    assert env.is_closed  # nothing was started
    with pytest.raises(ValueError, match="num_workers is 0"):
        short(num_workers=0)


def test_an_action_of_another_shape_is_refused(opened):
    env = opened(short())
    td = env.reset().set("action", torch.zeros(2, dtype=torch.float64))

    with pytest.raises(ValueError, match=r"\(2,\).*\(1,\)"):
        env.step(td)
