"""State dicts of transforms: those of other transforms, damaged or empty ones, and what is held beside buffers.

That a run goes on in a fresh env is part of `test_contract`.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    ActionDiscretizer,
    CatFrames,
    Compose,
    DiscreteActionProjection,
    GymEnv,
    Hash,
    MultiStepTransform,
    NoopResetEnv,
    PendulumEnv,
    RandomTruncationTransform,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    VideoRecorder,
)
from envkit.errors import ArgumentTypeError, InputError
from envkit.transforms.actions import SamplingStrategy
from tests.zoo.resumed import as_read_again, equal_states, same


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", max_episode_steps=9)


CHOSEN = {
    "projection": (cartpole, lambda: DiscreteActionProjection(2, 5)),
    "discretizer": (
        lambda: GymEnv("Pendulum-v1", max_episode_steps=9),
        lambda: ActionDiscretizer(4, sampling=SamplingStrategy.RANDOM),
    ),
}


def test_frames_by_hand_videos_and_hashes_are_kept():
    frames, video, hashes = (
        CatFrames(3, -1, ["x"]),
        VideoRecorder(None, in_keys=["p"]),
        Hash(["n"], ["h"], repertoire={}),
    )
    td = TensorDict({"x": torch.rand(2), "p": torch.zeros(3, 4, 4, dtype=torch.uint8)})
    frames._call(td.clone())
    video(td.clone())
    number = hashes.call_hash_fn("seven")
    others = (
        CatFrames(3, -1, ["x"]),
        VideoRecorder(None, in_keys=["p"]),
        Hash(["n"], ["h"], repertoire={}),
    )

    for one, other in zip((frames, video, hashes), others, strict=True):
        other.load_state_dict(as_read_again(one.state_dict()))

    assert frames._call(td.clone())["x"].equal(others[0]._call(td.clone())["x"])
    assert others[1].frames.equal(video.frames) and others[1]._seen == 1
    assert others[2].get_input_from_hash(number) == "seven"


def test_one_that_holds_nothing_says_nothing():
    assert list(Compose(StepCounter(), NoopResetEnv(), CatFrames(2, -1)).state_dict()) == []


@pytest.mark.parametrize("name", CHOSEN)
def test_an_env_whose_actions_are_chosen_is_copied_by_pickle(name):
    make, transform = CHOSEN[name]
    env = TransformedEnv(make(), transform())
    env.rollout(2)
    wrong = env.reset().set("action", torch.full_like(env.action_spec.rand(), 77))

    copied = TransformedEnv(make(), pickle.loads(pickle.dumps(env.transform)))

    assert copied.action_spec == env.action_spec
    assert copied.rollout(3).shape == (3,)
    with pytest.raises(InputError):
        copied.step(wrong)


def test_a_dict_of_windows_that_hold_nothing_empties_others():
    def written(first):
        flags = torch.zeros(5, 1, dtype=torch.bool)
        following = {"x": torch.arange(first, first + 5.0), "reward": flags.float(), "done": flags}
        x = torch.arange(first, first + 5.0)
        return TensorDict({"x": x, "next": following}, [5], names=["time"])

    fresh, used = MultiStepTransform(2, 1.0), MultiStepTransform(2, 1.0)
    used.inv(written(100.0))

    used.load_state_dict(as_read_again(fresh.state_dict()))

    assert same(([fresh.inv(written(0.0))], [used.inv(written(0.0))]))


def test_a_dict_without_it_is_loaded_loosely_and_leaves_it():
    env = TransformedEnv(cartpole(), Compose(StepCounter(), RandomTruncationTransform(2, 6)))
    env.rollout(3)
    horizons = {**env.transform[1]._horizons}

    env.transform.load_state_dict({}, strict=False)

    assert horizons and env.transform[1]._horizons == horizons


@pytest.mark.parametrize("norm", [VecNorm, VecNormV2])
def test_an_empty_dict_is_not_that_of_statistics(norm):
    env = TransformedEnv(PendulumEnv(), norm(["th"]))
    env.rollout(3)

    with pytest.raises(RuntimeError, match=r"Missing key.*skipped_rows"):
        env.transform.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Missing key.*skipped_rows"):
        env.load_state_dict({})


def wrong_shape(state):
    return {**state, "moments.th.mean": torch.zeros(2)}


def without_one(state):
    return {name: value for name, value in state.items() if not name.endswith("squares")}


@pytest.mark.parametrize(
    "spoilt",
    [lambda state: {}, lambda state: {**state, "odd": torch.zeros(1)}, wrong_shape, without_one],
    ids=["nothing", "one more", "wrong shape", "one less"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["transform", "env"])
def test_a_dict_that_does_not_fit_changes_nothing(spoilt, whole):
    def new():
        return TransformedEnv(PendulumEnv(), Compose(VecNorm(["th"]), StepCounter()))

    def held(env):
        return {"transform": dict(env.transform.state_dict()), "base": env.base_env.state_dict()}

    other, env = new(), new()
    other.rollout(7)
    env.rollout(5)
    before = as_read_again(held(env))
    loaded = spoilt(dict(other.transform[0].state_dict()))
    loaded = {f"transforms.0.{name}": value for name, value in loaded.items()}
    if whole:
        state = other.base_env.state_dict().items()
        loaded |= {f"base_env.{name}": value for name, value in state}

    with pytest.raises(RuntimeError, match="loading state_dict"):
        (env if whole else env.transform).load_state_dict(loaded)

    assert equal_states(held(env), before)


def test_a_dict_that_does_not_fit_leaves_new_statistics_without_a_shape():
    new = VecNorm(["th"])
    bad = {"skipped_rows": torch.zeros(3), "moments.th.weight": torch.zeros(())}
    bad |= {f"moments.th.{name}": torch.zeros(9) for name in ("mean", "squares")}

    with pytest.raises(RuntimeError, match="size mismatch for skipped_rows"):
        new.load_state_dict(bad)

    assert list(new.state_dict()) == ["skipped_rows"]
    assert TransformedEnv(PendulumEnv(), new).rollout(4)["th"].isfinite().all()


def test_what_draws_and_counts_is_as_it_was_where_loading_fails():
    transforms = StepCounter(), VecNorm(["th"]), RandomTruncationTransform(2, 6)
    env = TransformedEnv(PendulumEnv(), Compose(*transforms))
    env.set_seed(1)
    env.rollout(9, break_when_any_done=False)
    before = as_read_again(env.state_dict())
    bad = {**before, "transforms.1.skipped_rows": torch.zeros(3)}
    env.set_seed(1)
    again = as_read_again(env.state_dict())

    with pytest.raises(RuntimeError, match="size mismatch"):
        env.load_state_dict(bad)

    assert equal_states(env.state_dict(), again)


@pytest.mark.parametrize("state", [5, None, "a file", [("a", 1)]])
@pytest.mark.parametrize(
    "make",
    [
        lambda: StepCounter(),
        lambda: Compose(StepCounter()),
        cartpole,
        lambda: TransformedEnv(cartpole(), StepCounter()),
    ],
    ids=["transform", "several", "env", "transformed env"],
)
def test_what_is_loaded_must_be_a_dict(make, state):
    with pytest.raises(ArgumentTypeError, match=r"must be a dict. Pass what state_dict\(\) gave"):
        make().load_state_dict(state)
