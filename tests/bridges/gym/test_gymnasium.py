"""GymEnv and GymWrapper: the bits of bare gymnasium, alone and in batched envs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from tensordict import LazyStackedTensorDict, TensorDict

from envkit import JaxEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from envkit.env.seeding import next_seed, seed_chain
from envkit.errors import (
    ArgumentError,
    ClosedEnvError,
    EncodingError,
    OptionError,
    SpecError,
    SpecStackError,
    SpecTypeError,
    WorkerError,
)
from envkit.specs import Binary, Bounded, Categorical, Composite, Unbounded
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.gym_envs import Sampler, same
from tests.zoo.policies import Replay
from tests.zoo.walkers import Pendulum

SEED = 7


# ------------------------------------------------------------------------------------------ parity

# Episodes are cut to 40 steps, so that truncation is met by those that do not end by themselves.
PARITY = {
    "CartPole-v1": 100,
    "Pendulum-v1": 100,
    "MountainCar-v0": 100,
    "Acrobot-v1": 100,
    "FrozenLake-v1": 100,
    "InvertedPendulum-v5": 100,
    "HalfCheetah-v5": 45,
}


def bare_episodes(name: str, seed: int, actions: list) -> dict[str, np.ndarray]:
    """Step gymnasium by hand; a row is one step, ``observation`` what was seen before it."""
    env = gymnasium.make(name, max_episode_steps=40)
    env.reset(seed=seed)
    observation, _ = env.reset()
    rows = []
    for action in actions:
        following, reward, terminated, truncated, _ = env.step(action)
        rows.append((observation, following, np.float32(reward), terminated, truncated))
        observation = env.reset()[0] if terminated or truncated else following
    env.close()
    names = ("observation", "next", "reward", "terminated", "truncated")
    return {
        name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def random_actions(name: str, steps: int, envs: int) -> list[list]:
    space = gymnasium.make(name).action_space
    space.seed(3)
    return [[space.sample() for _ in range(steps)] for _ in range(envs)]


def assert_same_bits(data: TensorDict, bare: dict[str, np.ndarray]) -> None:
    recorded = {
        "observation": data["observation"],
        "next": data["next", "observation"],
        "reward": data["next", "reward"].squeeze(-1),
        "terminated": data["next", "terminated"].squeeze(-1),
        "truncated": data["next", "truncated"].squeeze(-1),
    }
    for name, tensor in recorded.items():
        assert tensor.numpy().dtype == bare[name].dtype, name
        np.testing.assert_array_equal(tensor.numpy(), bare[name], err_msg=name)
    done = data["next", "done"].squeeze(-1)
    assert done.equal(recorded["terminated"] | recorded["truncated"])


@pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=2)], ids=["serial", "parallel"]
)
@pytest.mark.parametrize(("name", "steps"), PARITY.items())
def test_each_row_of_a_batch_gives_the_bits_of_bare_gymnasium(name, steps, batched):
    actions = random_actions(name, steps, 3)
    make = partial(GymEnv, name, categorical_action_encoding=True, max_episode_steps=40)
    env = batched(3, make)
    env.set_seed(SEED)

    data = env.rollout(steps, Replay(torch.tensor(np.array(actions))), break_when_any_done=False)
    env.close()

    seeds, _ = seed_chain(SEED, 3)
    for row, seed in enumerate(seeds):
        assert_same_bits(data[row], bare_episodes(name, seed, actions[row]))


@pytest.mark.filterwarnings("ignore:.*precision lowered")  # gymnasium's, of its own wrapper
def test_a_wrapped_task_has_the_spec_its_wrappers_give():
    env = gymnasium.make("InvertedPendulum-v5")
    env = wrappers.DtypeObservation(wrappers.RescaleAction(env, -1.0, 1.0), np.float32)

    wrapped = GymWrapper(env)

    check_env_specs(wrapped)
    assert wrapped.observation_spec["observation"].dtype == torch.float32
    assert wrapped.action_spec.low.tolist() == [-1.0]
    assert wrapped.action_spec.high.tolist() == [1.0]


# ------------------------------------------------------------------------------- specs and seeds


def test_pendulum_has_the_documented_layout():
    env = GymEnv("Pendulum-v1", g=9.81)

    data = env.rollout(2)

    assert env.batch_size == ()
    assert env.batch_locked
    assert env.device == torch.device("cpu")
    assert data["action"].shape == (2, 1)
    assert data["observation"].shape == (2, 3)
    assert env.done_keys == ["done", "terminated", "truncated"]
    assert env.unwrapped.g == 9.81
    assert env.g == 9.81


def test_a_reset_after_a_seed_repeats_and_later_resets_go_on():
    env = GymEnv("CartPole-v1")

    firsts = []
    for _ in range(2):
        following = env.set_seed(3)
        firsts.append([env.reset()["observation"], env.reset()["observation"]])

    assert following == next_seed(3)
    assert firsts[0][0].equal(firsts[1][0])
    assert firsts[0][1].equal(firsts[1][1])
    assert not firsts[0][0].equal(firsts[0][1])


@pytest.mark.parametrize("form", [np.int64, np.uint8, torch.tensor])
def test_integers_of_any_library_are_seeds(form):
    env, other = GymEnv("Pendulum-v1"), GymEnv("Pendulum-v1")

    assert env.set_seed(form(SEED)) == other.set_seed(SEED)
    assert env.reset()["observation"].equal(other.reset()["observation"])
    env.close(), other.close()


@pytest.mark.parametrize("options", [{}, {"num_envs": 2}], ids=["one", "vector"])
def test_a_reset_takes_seeds_of_numpy_and_refuses_what_is_no_seed(options):
    env = GymEnv("CartPole-v1", **options)

    seeded = env.reset(seed=np.int64(5))["observation"]

    assert seeded.equal(env.reset(seed=5)["observation"])
    for wrong in (-1, "a", 1.5):
        with pytest.raises(ArgumentError, match=f"seed is {wrong!r}.*Pass seed=0"):
            env.reset(seed=wrong)


def test_reset_keywords_reach_gymnasium():
    env = GymEnv("CartPole-v1")
    bare = gymnasium.make("CartPole-v1")

    seeded = env.reset(seed=5)["observation"]
    bounded = env.reset(seed=5, options={"low": 0.0, "high": 0.0})["observation"]

    np.testing.assert_array_equal(seeded.numpy(), bare.reset(seed=5)[0])
    assert bounded.eq(0).all()


# ---------------------------------------------------------------------------- made-up simulators


class Corridor(gymnasium.Env):
    """Walks ``stride`` to the right a step; ends at 10; every space and info is the caller's."""

    def __init__(self, observation_space=None, action_space=None, observe: Callable = np.float64):
        self.observation_space = observation_space or spaces.Box(0, 99, (), np.float64)
        self.action_space = action_space or spaces.Discrete(3, start=1)
        self.observe = observe
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.actions = 0, []
        return self.observe(self.place), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.place += 1
        return self.observe(self.place), float(self.place), self.place >= 10, False, {}


def test_scalar_observations_get_one_axis_and_keep_their_dtype():
    env = GymWrapper(Corridor())

    data = env.rollout(3)

    check_env_specs(env)
    assert data["observation"].dtype == torch.float64
    assert data["next", "observation"].tolist() == [[1.0], [2.0], [3.0]]


def test_the_start_of_a_discrete_space_is_added_on_the_way_to_gymnasium():
    env = GymWrapper(Corridor(), categorical_action_encoding=True)

    env.rollout(3, Replay(torch.tensor([0, 1, 2])))

    assert env.actions == [1, 2, 3]


@pytest.mark.parametrize("batched", [None, SerialEnv])
def test_dict_and_tuple_spaces_travel_leaf_by_leaf(batched):
    observation = spaces.Dict(
        state=spaces.Box(0, 99, (2,)),
        arm=spaces.Dict(
            level=spaces.Discrete(20), pair=spaces.Tuple([spaces.Box(-9, 99, (1,))] * 2)
        ),
    )
    action = spaces.Dict(
        wheel=spaces.Box(-1, 1, (1,)),
        gears=spaces.MultiDiscrete([2, 3]),
        horn=spaces.MultiBinary(2),
    )

    def observe(place):
        here = np.float32([place])
        return {
            "state": np.float32([place, 1]),
            "arm": {"level": place, "pair": (here, -here / 2)},
        }

    def make():
        return GymWrapper(Corridor(observation, action, observe), categorical_action_encoding=True)

    env = make() if batched is None else batched(2, make)
    data = env.rollout(3)
    one = data if batched is None else data[1]

    check_env_specs(env)
    assert one["next", "observation"].tolist() == [[1, 1], [2, 1], [3, 1]]
    assert one["next", "arm", "level"].tolist() == [1, 2, 3]
    assert one["next", "arm", "pair"].squeeze(-1).tolist() == [[1, -0.5], [2, -1], [3, -1.5]]
    assert one["gears"].shape == (3, 2)
    assert one["horn"].dtype == torch.int8


@pytest.mark.parametrize(("frame_skip", "rewards"), [(1, [1, 2, 3]), (4, [10, 26, 19])])
def test_frame_skip_sums_rewards_and_stops_at_the_end(frame_skip, rewards):
    env = GymWrapper(Corridor(), frame_skip=frame_skip)

    data = env.rollout(3)

    assert data["next", "reward"].squeeze(-1).tolist() == rewards
    assert env.place == min(10, 3 * frame_skip)


@pytest.mark.parametrize("make", [lambda env: env, lambda env: SerialEnv(1, env)], ids=["", "rows"])
def test_frame_skip_stops_where_an_episode_is_cut_short(make):
    env = make(lambda: GymEnv("CartPole-v1", max_episode_steps=5, frame_skip=3))
    env = env if isinstance(env, SerialEnv) else env()

    data = env.rollout(9)

    assert data["next", "reward"].flatten().tolist() == [3.0, 2.0]
    assert data["next", "truncated"].flatten().tolist() == [False, True]


class Painted(Corridor):
    """Renders its place as the red channel."""

    render_mode = "rgb_array"

    def render(self):
        return np.full((2, 3, 3), [self.place, 0, 0], np.uint8)


@pytest.mark.parametrize("batched", [None, SerialEnv, partial(ParallelEnv, num_processes=1)])
@pytest.mark.parametrize("only", [True, False])
def test_pixels_are_added_or_replace_the_observation(only, batched):
    def make():
        return GymWrapper(Painted(), from_pixels=True, pixels_only=only)

    env = make() if batched is None else batched(1, make)
    data = env.rollout(2)
    check_env_specs(env)
    env.close()

    assert data["next", "pixels"].dtype == torch.uint8
    assert data["next", "pixels"].shape == (*env.batch_size, 2, 2, 3, 3)
    assert data["next", "pixels"][..., 0].amax((-1, -2)).flatten().tolist() == [1, 2]
    assert ("observation" in data) != only


@pytest.mark.parametrize("how", [{}, {"num_envs": 2}])
def test_a_keyword_that_nobody_knows_is_told_with_the_nearest(how):
    with pytest.raises(OptionError, match=r"'gravty'. .*It takes env_name.*max_episode_steps"):
        GymEnv("CartPole-v1", gravty=3, **how)
    with pytest.raises(OptionError, match="Did you mean 'sutton_barto_reward'"):
        GymEnv("CartPole-v1", sutton_barto=True, **how)


def test_a_mistake_inside_an_env_stays_what_it_is():
    def broken(**kwargs):
        return sorted([], keys=str)

    gymnasium.register("Broken-v0", broken)
    try:
        with pytest.raises(TypeError, match="keys") as caught:
            GymEnv("Broken-v0", size=3)
    finally:
        del gymnasium.registry["Broken-v0"]

    assert not isinstance(caught.value, OptionError)


def test_pixels_of_an_env_that_renders_nothing_are_refused():
    with pytest.raises(ValueError, match="rgb_array"):
        GymWrapper(Corridor(), from_pixels=True)


EVERY_KIND = {
    "text": spaces.Text(5),
    "sequence": spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True),
    "sequence of choices": spaces.Sequence(spaces.Discrete(3), stack=True),
    "sequence of dicts": spaces.Sequence(
        spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)), stack=True
    ),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,))] * 2),
    "tuple of unlike bounds": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(0, 2, (2,))]),
    "tuple of unlike shapes": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(0, 2, (3,))]),
    "tuple of dicts": spaces.Tuple([spaces.Dict(a=spaces.Box(-1, 1, (2,)))] * 2),
    "tuple of tuples": spaces.Tuple([spaces.Tuple([spaces.Discrete(3)] * 2)] * 2),
    "tuple of unlike kinds": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=1)]),
    "tuple of unlike dicts": spaces.Tuple(
        [spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(b=spaces.Box(0, 1, (3,)))]
    ),
    "tuple with text": spaces.Tuple([spaces.Text(5), spaces.Box(-1, 1, (2,))]),
    "sequence of tuples": spaces.Sequence(
        spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]), stack=True
    ),
    "dict with text": spaces.Dict(word=spaces.Text(5), state=spaces.Box(-1, 1, (2,))),
    "dict of tuples": spaces.Dict(a=spaces.Tuple([spaces.Dict(b=spaces.Discrete(2))] * 2)),
    "grid": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.ones((2, 2), int)),
    "scalar": spaces.Box(-1, 1, ()),
    "flags": spaces.MultiBinary([2, 3]),
}


RAGGED = "tuple of unlike shapes"


def decoded(env: GymWrapper, td: TensorDict):
    codec = env.core.observation
    return codec.decode({path: td.get(path) for path in codec.leaves})


@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_observations_of_every_kind_of_space_are_those_of_the_simulator(kind, categorical):
    env = GymWrapper(Sampler(EVERY_KIND[kind]), categorical)
    check_env_specs(env, return_contiguous=False)
    env.seen.clear()

    data = env.rollout(6, break_when_any_done=False, return_contiguous=False)

    shown = [step if index in (0, 4) else None for index, step in enumerate(data.unbind(0))]
    seen = iter(env.seen)
    for step, root in zip(data.unbind(0), shown, strict=True):
        for td in filter(lambda td: td is not None, (root, step["next"])):
            assert same(decoded(env, td), next(seen))
    assert next(seen, None) is None


@pytest.mark.parametrize(
    ("kind", "batched"),
    [
        (kind, batched)
        for kind in EVERY_KIND
        for batched in (None, SerialEnv)
        if (kind, batched) != (RAGGED, SerialEnv)
    ],
)
@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])
def test_actions_of_every_kind_of_space_are_understood(kind, categorical, batched):
    def make():
        return GymWrapper(Sampler(action_space=EVERY_KIND[kind]), categorical)

    env = make() if batched is None else batched(2, make)
    data = env.rollout(6, break_when_any_done=False, return_contiguous=False)
    taken = env.taken if batched is None else env.taken[0]

    assert data.batch_size == (*env.batch_size, 6)
    assert len(taken) == 6
    assert all(EVERY_KIND[kind].contains(action) for action in taken)


def test_tuples_of_unlike_shapes_cannot_be_batched():
    env = SerialEnv(2, lambda: GymWrapper(Sampler(action_space=EVERY_KIND[RAGGED])))

    with pytest.raises(SpecStackError, match=r"^'action' .* cannot hold\. Turn the Tuple .* Dict"):
        env.rollout(3, return_contiguous=False)


@pytest.mark.parametrize("kind", ["text", "sequence", "tuple of dicts", "dict with text"])
def test_entries_that_are_no_rows_go_through_processes(kind):
    env = ParallelEnv(2, lambda: GymWrapper(Sampler(EVERY_KIND[kind])), num_processes=1)
    data = env.rollout(5, break_when_any_done=False, return_contiguous=False)
    check_env_specs(env, return_contiguous=False)
    env.close()

    assert data.batch_size == (2, 5)


def test_steps_that_cannot_be_stacked_say_how_to_get_them():
    env = GymWrapper(Sampler(EVERY_KIND[RAGGED]))

    with pytest.raises(RuntimeError, match="return_contiguous=False"):
        env.rollout(3, return_contiguous=True)
    assert isinstance(env.rollout(3), LazyStackedTensorDict)


@pytest.mark.parametrize(
    ("space", "spec", "reward"),
    [
        (spaces.Box(0, 9, (3,), np.float64), Bounded(0, 9, (3,), dtype=torch.float64), [1.0, 2, 3]),
        (spaces.Box(-np.inf, np.inf, ()), Unbounded((1,)), 2.0),
    ],
)
@pytest.mark.parametrize("batched", [None, SerialEnv])
def test_a_published_reward_space_gives_the_reward_spec(space, spec, reward, batched):
    class Paid(Corridor):
        reward_space = space

        def step(self, action):
            observation, _, *flags, info = super().step(action)
            return observation, np.array(reward, space.dtype), *flags, info

    def make():
        return GymWrapper(wrappers.TimeLimit(Paid(), 5))

    env = make() if batched is None else batched(1, make)
    data = env.rollout(2).reshape(-1)

    check_env_specs(env)
    assert make().reward_spec == spec
    assert data["next", "reward"][-1].tolist() == np.ravel(reward).tolist()


def test_gymnasium_seeds_the_simulator_below():
    class Seeded(Corridor):
        def seed(self, seed):
            self.generator = np.random.default_rng(seed)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.generator.uniform(), {}

    env = GymWrapper(wrappers.TimeLimit(Seeded(), 5))

    firsts = []
    for _ in range(2):
        env.unwrapped.seed(0)
        firsts.append(env.reset()["observation"])

    assert firsts[0].equal(firsts[1])


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_pixels_come_out_of_batches_of_envs(batched):
    env = batched(2, lambda: GymEnv("CartPole-v1", from_pixels=True, pixels_only=False))

    root = env.reset()
    data = env.rollout(2)
    env.close()

    assert root["pixels"].dtype == torch.uint8
    assert root["pixels"].shape == (2, 400, 600, 3)
    assert data["next", "pixels"].shape == (2, 2, 400, 600, 3)
    assert data["next", "pixels"].float().std() > 0
    assert "observation" in data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_an_action_with_a_graph_is_stepped_as_its_value(opened, num_envs, dtype):
    make = partial(GymEnv, "Pendulum-v1")
    env = opened(make() if num_envs is None else SerialEnv(num_envs, make))
    outs = []
    for requires_grad in (False, True):
        env.set_seed(0)
        action = torch.full((*env.batch_size, 1), 0.5, dtype=dtype, requires_grad=requires_grad)
        outs.append(env.step(env.reset().set("action", action * 2))["next"])

    assert (outs[0] == outs[1]).all()
    assert not outs[1]["observation"].requires_grad


# -------------------------------------------------------------------------------- masks and life


def test_a_skipped_step_leaves_the_simulator_alone():
    env = GymWrapper(Corridor())
    td = env.rand_action(env.reset())

    out = env.step(td.set("_step", torch.tensor(False)))

    assert env.place == 0
    assert out["next", "observation"].equal(out["observation"])
    assert out["next", "reward"].item() == 0


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("CartPole-v1", Categorical(2)),
        ("CartPole-v1", Binary(2, dtype=torch.int64)),
        ("Pendulum-v1", Bounded(-2.0, 2.0, (2,))),
        ("Pendulum-v1", Composite(torque=Bounded(-2.0, 2.0, (1,)))),
    ],
    ids=["integers", "flags", "shape", "name"],
)
def test_an_action_spec_of_another_form_is_refused_where_it_is_assigned(name, spec):
    env = GymEnv(name)

    with pytest.raises(
        SpecError, match=r"the same names, shapes and kinds.*categorical_action_encoding="
    ):
        env.action_spec = spec

    assert env.rollout(3).shape == (3,)
    env.close()


def test_random_actions_come_from_narrower_bounds_that_are_assigned():
    env = GymEnv("Pendulum-v1")

    env.action_spec = Bounded(-0.1, 0.1, (1,))

    assert env.rollout(20)["action"].abs().max() <= 0.1
    env.close()


def test_names_are_looked_up_through_gymnasium_wrappers():
    env = GymWrapper(wrappers.TimeLimit(Corridor(), 5))
    env.reset()

    assert env.place == 0
    with pytest.raises(AttributeError):
        _ = env.no_such_name


def test_a_closed_env_closes_gymnasium_and_refuses_to_go_on():
    class Closing(Corridor):
        closed = False

        def close(self):
            self.closed = True

    simulator = Closing()
    env = GymWrapper(simulator)
    td = env.rand_action(env.reset())

    env.close()

    assert simulator.closed
    assert env.is_closed
    with pytest.raises(ClosedEnvError, match="closed"):
        env.step(td)
    env.close()
    with pytest.raises(ClosedEnvError, match="closed already"):
        env.close(raise_if_closed=True)


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_a_subclass_that_changes_how_a_step_is_made_is_heard_in_a_batch(batched):
    class Backwards(GymWrapper):
        def _step(self, td):
            out = super()._step(td)
            return out.set("reward", -out["reward"])

    env = batched(2, lambda: Backwards(Corridor()))
    data = env.rollout(2)
    env.close()

    assert data["next", "reward"].squeeze(-1).tolist() == [[-1, -2], [-1, -2]]


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_sub_envs_of_equal_specs_decode_actions_each_for_their_own_space(batched):
    def make(start):
        space = spaces.Discrete(3, start=start)
        return GymWrapper(Corridor(action_space=space), categorical_action_encoding=True)

    env = batched(2, [partial(make, 0), partial(make, 5)])
    env.rollout(2, Replay(torch.tensor([[0, 1], [0, 1]])))
    actions = list(env.actions)
    env.close()

    assert actions == [[0, 1], [5, 6]]


@pytest.mark.parametrize("kind", ["gym", "vector", "brax", "jax"])
def test_one_training_step_is_written_once_for_every_kind_of_env(kind, fast):
    env = {
        "gym": lambda: GymEnv("Pendulum-v1"),
        "vector": lambda: GymEnv("Pendulum-v1", num_envs=2),
        "brax": lambda: fast,
        "jax": lambda: JaxEnv(Pendulum(), device="cpu"),
    }[kind]()
    env.set_seed(0)
    torch.manual_seed(0)
    sizes = env.single_observation_spec["observation"].shape + env.single_action_spec.shape
    policy = torch.nn.Sequential(torch.nn.Linear(*sizes), torch.nn.Tanh())

    data = env.rollout(8, policy, break_when_any_done=False)
    actions = policy(data["observation"])
    (actions * (data["next", "reward"] + 1)).sum().backward()

    assert data.shape == (*env.batch_size, 8)
    assert policy[0].bias.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", ["rgb", "ansi", 3])
def test_a_render_mode_that_the_env_has_not_is_refused(mode):
    with pytest.raises(
        ArgumentError, match=rf"render_mode of 'CartPole-v1' is {mode!r}.*'human', 'rgb_array'"
    ):
        GymEnv("CartPole-v1", render_mode=mode)


@pytest.mark.parametrize("mode", [None, "rgb_array", "rgb_array_list"])
def test_a_render_mode_that_the_env_or_gymnasium_has_is_taken(mode):
    assert GymEnv("CartPole-v1", render_mode=mode).render_mode == mode


class Answers(gymnasium.Env):
    """Gives the reward and the flags that it was made with."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reward=1.0, terminated=False, truncated=False):
        self.answer = reward, terminated, truncated

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), *self.answer, {}


def stepped(make):
    env = make()
    return env.step(env.rand_action(env.reset()))


USED = {
    "step": stepped,
    "rollout": lambda make: make().rollout(2)[0],
    "rows": lambda make: SerialEnv(2, make).rollout(2)[0, 0],
}


@pytest.mark.parametrize("use", USED)
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"reward": None}, r"returned the reward None, of type NoneType, but must return a number"),
        ({"reward": "1.5"}, r"returned the reward '1.5', of type str, but must return a number"),
        ({"reward": -(10**400)}, r"a whole number as reward that is too large for float32"),
        ({"terminated": "yes"}, r"returned terminated='yes', of type str, but must return a bool"),
        (
            {"terminated": None},
            r"returned terminated=None, of type NoneType, but must return a bool",
        ),
        ({"truncated": 0.5}, r"returned truncated=0.5, of type float, but must return a bool"),
        ({"truncated": []}, r"returned truncated=\[\], of type list, but must return a bool"),
        ({"terminated": np.array([True, False])}, r"of type ndarray, but must return a bool"),
    ],
)
def test_what_is_no_number_or_no_flag_is_refused(use, answers, message):
    with pytest.raises((EncodingError, WorkerError), match=message):
        USED[use](lambda: GymWrapper(Answers(**answers)))


class Sees(Answers):
    """Shows one observation, which may not be of its space."""

    def __init__(self, space, seen):
        super().__init__()
        self.observation_space, self.seen = space, seen

    def reset(self, *, seed=None, options=None):
        return self.seen, {}


UNLIKE = {
    "missing": (spaces.Box(-9, 9, (2,)), [None, 1.0], r"\[None, 1.0\] does not fit"),
    "text": (spaces.Box(-9, 9, (2,)), ["1.5", "2"], r"\['1.5', '2'\] does not fit"),
    "complex": (spaces.Box(-9, 9, (2,)), np.array([1j, 2]), "of dtype complex128 into float32"),
    "huge": (spaces.Box(-9, 9, (2,)), [10**400, 1], "of dtype object into float32"),
    "huge alone": (spaces.Box(-9, 9, (1,)), 10**400, "of dtype object into float32"),
    "dates": (spaces.Box(-9, 9, (1,)), np.array(["2020"], "datetime64[Y]"), "does not fit"),
    "half an option": (spaces.Discrete(4), 1.5, r"is 1.5, which is not in its space Discrete"),
    "no option": (spaces.Discrete(4, start=1), None, "is None, which is not in its space"),
    "half a choice": (spaces.MultiDiscrete([3, 3]), [1.5, 0], "not in its space MultiDiscrete"),
    "named choices": (spaces.MultiDiscrete([3, 4]), ["1", "2"], "not in its space MultiDiscrete"),
}


@pytest.mark.parametrize("encoding", [True, False], ids=["indices", "one-hot"])
@pytest.mark.parametrize("rows", [False, True], ids=["single", "rows"])
@pytest.mark.parametrize("kind", UNLIKE)
def test_observations_that_a_cast_would_change_are_refused(kind, rows, encoding):
    space, seen, message = UNLIKE[kind]
    make = partial(GymWrapper, categorical_action_encoding=encoding)
    env = SerialEnv(1, lambda: make(Sees(space, seen))) if rows else make(Sees(space, seen))

    with pytest.raises((EncodingError, WorkerError), match=message):
        env.reset()


@pytest.mark.parametrize(
    ("space", "seen", "shown"),
    [
        (spaces.Box(-9, 9, (2,)), np.array([1, 2.5], object), [1.0, 2.5]),
        (spaces.Box(-9, 9, (1,)), jnp.ones(1, jnp.bfloat16), [1.0]),
        (spaces.Discrete(4, start=1), np.float32(3), 2),
        (spaces.MultiDiscrete([3, 3]), [1.0, 2.0], [1, 2]),
    ],
    ids=["objects", "bfloat16", "whole float", "whole floats"],
)
def test_observations_that_a_cast_does_not_change_are_taken(space, seen, shown):
    env = GymWrapper(Sees(space, seen), categorical_action_encoding=True)

    assert env.reset()["observation"].tolist() == shown


class Counts(Answers):
    """Says that its rewards are whole numbers."""

    reward_space = spaces.Box(-9, 9, (), np.int32)


@pytest.mark.parametrize("use", USED)
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (0.5, "returned the reward 0.5, but its spec says int32"),
        (np.float32("nan"), "but its spec says int32"),
        (2**40, "but its spec says int32"),
        (10**30, "too large for int32"),
    ],
)
def test_a_reward_that_is_no_whole_number_is_not_cut_to_one(use, reward, message):
    with pytest.raises((EncodingError, WorkerError), match=message):
        USED[use](lambda: GymWrapper(Counts(reward)))


@pytest.mark.parametrize("use", USED)
@pytest.mark.parametrize("reward", [3, 3.0, np.int64(3), np.array([3.0])], ids=repr)
def test_a_whole_reward_may_be_written_in_any_form(use, reward):
    following = USED[use](lambda: GymWrapper(Counts(reward)))["next"]

    assert following["reward"].dtype == torch.int32
    assert following["reward"].flatten()[0].item() == 3


@pytest.mark.parametrize("use", USED)
@pytest.mark.parametrize(
    ("answers", "reward", "terminated"),
    [
        ({"reward": 2, "terminated": 1}, 2.0, True),
        ({"reward": np.float32(0.5), "terminated": np.bool_(True)}, 0.5, True),
        ({"reward": np.array([1.5]), "terminated": np.array(False)}, 1.5, False),
        ({"reward": True, "terminated": 0}, 1.0, False),
    ],
)
def test_numbers_and_flags_of_any_library_are_taken(use, answers, reward, terminated):
    following = USED[use](lambda: GymWrapper(Answers(**answers)))["next"]

    assert following["reward"].flatten()[0].item() == reward
    assert following["terminated"].flatten()[0].item() is terminated


@pytest.mark.parametrize(
    "around", [lambda env: env, lambda env: TransformedEnv(env, StepCounter())]
)
def test_what_is_assigned_between_steps_holds_from_the_next_one_on(around):
    inside = GymEnv("CartPole-v1")
    env = around(inside)

    def rewards():
        stepped = env.step(env.rand_action(env.reset()))["next", "reward"]
        return [*env.rollout(2)["next", "reward"].flatten().tolist(), float(stepped)]

    assert rewards() == [1, 1, 1]
    inside.read_reward = lambda reward: torch.full((1,), 7.0)
    assert rewards() == [7, 7, 7]
    del inside.read_reward
    assert rewards() == [1, 1, 1] and env._row is not None
    inside.run_type_checks = True
    with pytest.raises(SpecTypeError, match=r"torch\.int32"):
        env.step(env.reset().set("action", torch.tensor([0, 1], dtype=torch.int32)))
