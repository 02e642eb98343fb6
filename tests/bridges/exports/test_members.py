"""Each public member of Gymnasium's and SB3's vector envs does on an adapter what it documents, or is on its page."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, utils
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from envkit import BraxEnv, GymWrapper, ParallelEnv, SerialEnv, to_gym_vector, to_sb3
from envkit.errors import NotResetError, UnsupportedError

PAGE = Path(__file__).parents[3] / "docs" / "interop.md"


class Goal(gymnasium.Env):
    """Shows the distance to a goal, moves by its action, and ends after 3 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 9}  # noqa: RUF012
    observation_space = spaces.Box(-99, 99, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    render_mode = "rgb_array"

    def __init__(self):
        self.goal = 5.0

    def _shown(self):
        return np.array([self.goal - self.place, self.place], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = (options or {}).get("place", float(self.np_random.integers(9)))
        self.steps = 0
        return self._shown(), {}

    def step(self, action):
        self.place += float(action[0])
        self.steps += 1
        return self._shown(), -abs(self.goal - self.place), False, self.steps == 3, {}

    def render(self):
        return np.full((2, 2, 3), int(self.place), np.uint8)

    def away(self, by=1):
        return self.goal + by


def goal():
    return GymWrapper(Monitor(Goal()))


ENVS = {
    "serial": lambda: SerialEnv(2, goal),
    "parallel": lambda: ParallelEnv(2, goal, num_processes=1),
    "brax": lambda: BraxEnv("fast", batch_size=[2], device="cpu"),
}
kinds = pytest.mark.parametrize("kind", sorted(ENVS))


def acts(view):
    space = getattr(view, "single_action_space", view.action_space)
    return np.stack([space.sample(), space.sample()])


def is_pool(kind):
    return kind != "brax"


# ------------------------------------------------------------------------------------------- Gymnasium


def _reset(view, kind):
    first, infos = view.reset(seed=3)
    again, _ = view.reset(seed=3)
    assert view.observation_space.contains(first)
    assert isinstance(infos, dict)
    np.testing.assert_array_equal(first, again)
    view.step(acts(view))
    moved = view.reset(options={"reset_mask": np.array([True, False])})[0]
    assert view.observation_space.contains(moved)
    if is_pool(kind):
        assert view.reset(options={"place": 2.5})[0][:, 1].tolist() == [2.5, 2.5]


def _step(view, kind):
    view.reset(seed=3)
    for _ in range(5):
        shown, rewards, terminated, truncated, infos = view.step(acts(view))
        assert view.observation_space.contains(shown)
        assert rewards.dtype == np.float64 and rewards.shape == (2,)
        assert terminated.dtype == truncated.dtype == np.dtype(bool)
        assert isinstance(infos, dict)


def _render(view, kind):
    if not is_pool(kind):  # it draws its states, of which there are none yet
        with pytest.raises(gymnasium.error.ResetNeeded, match="not reset yet"):
            view.render()
        return
    shown, _ = view.reset(seed=3)
    pictures = view.render()
    assert isinstance(pictures, tuple)
    assert [picture[0, 0, 0] for picture in pictures] == shown[:, 1].astype(int).tolist()


def _close(view, kind):
    view.close()
    view.close()
    assert view.closed
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        view.reset()


def _close_extras(view, kind):
    view.close_extras()
    assert view.envkit_env.is_closed


def _closed(view, kind):
    assert not view.closed


def _metadata(view, kind):
    assert view.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    assert view.metadata.get("render_fps") == (9 if is_pool(kind) else None)


def _render_mode(view, kind):
    assert view.render_mode == "rgb_array"


def _spec(view, kind):
    assert view.spec is None  # the class was not made by an id


def _unwrapped(view, kind):
    assert view.unwrapped is view
    assert RecordEpisodeStatistics(view).unwrapped is view


def _np_random(view, kind):
    if not is_pool(kind):
        with pytest.raises(AttributeError):
            _ = view.np_random
        return
    view.reset(seed=[4, 5])
    drawn = [generator.integers(99) for generator in view.np_random]
    alone = [np.random.default_rng(seed) for seed in (4, 5)]
    for generator in alone:
        generator.integers(9)
    assert drawn == [generator.integers(99) for generator in alone]


def _np_random_seed(view, kind):
    view.reset(seed=[4, 5] if is_pool(kind) else 4)
    assert view.np_random_seed == ((4, 5) if is_pool(kind) else (4, 4))


def _call(view, kind):
    if is_pool(kind):
        assert view.call("away", by=2) == (7.0, 7.0)
        assert view.call("goal") == (5.0, 5.0)
    with pytest.raises(AttributeError):
        view.call("nowhere")


def _get_attr(view, kind):
    assert view.get_attr("goal" if is_pool(kind) else "batch_locked")[0] in (5.0, True, False)
    with pytest.raises(AttributeError):
        view.get_attr("nowhere")


def _set_attr(view, kind):
    if is_pool(kind):
        view.set_attr("mark", [1, 1])
        assert view.get_attr("mark") == (1, 1)
        view.set_attr("goal", (6.0, 7.0))
        assert view.call("away", 0) == (6.0, 7.0)
    else:
        view.set_attr("allow_done_after_reset", [True, True])
        assert view.get_attr("allow_done_after_reset") == (True, True)
        with pytest.raises(AttributeError, match=r"'mark'.*would not reach the simulators"):
            view.set_attr("mark", [1, 1])
    with pytest.raises(ValueError, match="2 rows"):
        view.set_attr("mark", [1, 2, 3])


GYMNASIUM = {
    "reset": _reset,
    "step": _step,
    "render": _render,
    "close": _close,
    "close_extras": _close_extras,
    "closed": _closed,
    "metadata": _metadata,
    "render_mode": _render_mode,
    "spec": _spec,
    "unwrapped": _unwrapped,
    "np_random": _np_random,
    "np_random_seed": _np_random_seed,
    "call": _call,
    "get_attr": _get_attr,
    "set_attr": _set_attr,
}


@kinds
@pytest.mark.parametrize("member", GYMNASIUM)
def test_a_member_of_gymnasiums_vector_env_does_what_it_says(member, kind):
    view = to_gym_vector(ENVS[kind]())

    GYMNASIUM[member](view, kind)

    view.close()


def public(*classes):
    return {name for kind in classes for name in dir(kind) if not name.startswith("_")}


def not_done():
    """Names on the page of adapters, under the lists of what they do not do."""
    text = PAGE.read_text()
    return {name.strip("`") for name in text.replace(",", " ").split() if name.startswith("`")}


def test_members_of_gymnasiums_vector_envs_are_tested_or_on_the_page():
    missing = public(VectorEnv, SyncVectorEnv, AsyncVectorEnv) - set(GYMNASIUM)

    assert missing <= not_done()


@kinds
def test_spaces_fit_gymnasiums_functions_of_spaces(kind):
    view = to_gym_vector(ENVS[kind]())
    one, count = view.single_observation_space, view.num_envs
    shown, _ = view.reset(seed=0)

    rows = list(utils.iterate(view.observation_space, shown))
    joined = utils.concatenate(one, rows, utils.create_empty_array(one, count))
    memory = utils.create_shared_memory(one, count)
    for row, value in enumerate(rows):
        utils.write_to_shared_memory(one, row, value, memory)

    assert view.observation_space == utils.batch_space(one, count)
    assert view.action_space == utils.batch_space(view.single_action_space, count)
    assert utils.batch_differing_spaces([one, one]).shape == view.observation_space.shape
    np.testing.assert_array_equal(joined, shown)
    np.testing.assert_array_equal(utils.read_from_shared_memory(one, memory, count), shown)
    view.close()


# --------------------------------------------------------------------------------- Stable-Baselines3


def _sb3_reset(view, kind):
    view.seed(3)
    first = view.reset()
    view.seed(3)
    np.testing.assert_array_equal(view.reset(), first)
    assert first.shape == (2, *view.observation_space.shape)
    assert len(view.reset_infos) == 2


def _sb3_step(view, kind):
    view.reset()
    ends = 0
    for _ in range(7):
        shown, rewards, done, infos = view.step(acts(view))
        assert shown.shape == (2, *view.observation_space.shape)
        assert rewards.dtype == np.float32 and done.dtype == np.dtype(bool)
        for row in np.flatnonzero(done):
            ends += 1
            assert infos[row]["terminal_observation"].shape == view.observation_space.shape
            assert infos[row]["TimeLimit.truncated"] or not is_pool(kind)
            assert infos[row]["episode"]["l"] == 3 or not is_pool(kind)
    assert ends == 4 or not is_pool(kind)


def _sb3_async(view, kind):
    view.reset()
    view.step_async(acts(view))
    assert len(view.step_wait()) == 4
    with pytest.raises(ValueError, match="step_async"):
        view.step_wait()


def _sb3_close(view, kind):
    view.close()
    view.close()
    assert view.envkit_env.is_closed


def _sb3_get_attr(view, kind):
    name = "goal" if is_pool(kind) else "batch_locked"
    assert len(view.get_attr(name)) == 2
    assert len(view.get_attr(name, indices=1)) == len(view.get_attr(name, indices=[0])) == 1


def _sb3_set_attr(view, kind):
    if is_pool(kind):
        view.set_attr("mark", 8)
        assert view.get_attr("mark") == [8, 8]
        view.set_attr("goal", 9.0, indices=[1])
        assert view.get_attr("goal") == [5.0, 9.0]
    else:
        with pytest.raises(AttributeError, match=r"'mark'.*would not reach the simulators"):
            view.set_attr("mark", 8)
        with pytest.raises(UnsupportedError, match="one object"):
            view.set_attr("mark", 9, indices=[1])


def _sb3_env_method(view, kind):
    if is_pool(kind):
        assert view.env_method("away", 3) == [8.0, 8.0]
        assert view.env_method("away", by=1, indices=[0]) == [6.0]
    else:
        with pytest.raises(UnsupportedError, match="one object"):
            view.env_method("cardinality", indices=[1])


def _sb3_env_is_wrapped(view, kind):
    assert view.env_is_wrapped(Monitor) == [is_pool(kind)] * 2
    assert view.env_is_wrapped(Monitor, indices=0) == [is_pool(kind)]


def _sb3_seed(view, kind):
    assert len(view.seed(3)) == len(view.seed()) == 2


def _sb3_set_options(view, kind):
    if is_pool(kind):
        view.set_options([{"place": 1.5}, {}])
        assert view.reset()[0, 1] == 1.5
        view.seed(0)
        assert view.reset()[0, 1] != 1.5
    else:
        view.set_options({"place": 1.5})
        with pytest.raises(ValueError, match="resets all its rows as one"):
            view.reset()


def _sb3_render(view, kind):
    if is_pool(kind):
        view.reset()
        assert view.render().shape == (4, 2, 3)  # the pictures are tiled


def _sb3_get_images(view, kind):
    if is_pool(kind):
        view.reset()
        assert [image.shape for image in view.get_images()] == [(2, 2, 3)] * 2
    else:
        with pytest.raises(NotResetError, match="Call reset"):
            view.get_images()


def _sb3_has_attr(view, kind):
    assert view.has_attr("goal") == is_pool(kind)
    assert not view.has_attr("nowhere")


def _sb3_unwrapped(view, kind):
    assert view.unwrapped is view is VecNormalize(view).unwrapped


def _sb3_getattr_depth_check(view, kind):
    assert view.getattr_depth_check("view", already_found=False) is None
    assert "SB3View" in view.getattr_depth_check("view", already_found=True)


SB3 = {
    "reset": _sb3_reset,
    "step": _sb3_step,
    "step_async": _sb3_async,
    "step_wait": _sb3_async,
    "close": _sb3_close,
    "get_attr": _sb3_get_attr,
    "set_attr": _sb3_set_attr,
    "env_method": _sb3_env_method,
    "env_is_wrapped": _sb3_env_is_wrapped,
    "seed": _sb3_seed,
    "set_options": _sb3_set_options,
    "render": _sb3_render,
    "get_images": _sb3_get_images,
    "has_attr": _sb3_has_attr,
    "unwrapped": _sb3_unwrapped,
    "getattr_depth_check": _sb3_getattr_depth_check,
}


@kinds
@pytest.mark.parametrize("member", SB3)
def test_a_member_of_sb3s_vector_env_does_what_it_says(member, kind):
    view = to_sb3(ENVS[kind]())

    SB3[member](view, kind)

    view.close()


def test_all_members_of_sb3s_vector_env_are_tested():
    assert public(VecEnv) - {"metadata"} <= set(SB3)
