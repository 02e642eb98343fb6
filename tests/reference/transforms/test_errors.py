"""What the reference refuses is refused, with an error that its users catch; and what it takes is taken."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.envs.zoo import nested, several
from tests.reference.transforms.worlds import arm, count, leaf_specs, played, rows, teams


def around(make_env, make):
    """Play a few steps in an env behind a transform."""
    return lambda lib: played(lib.TransformedEnv(make_env(lib), make(lib)), 3)


def recorded() -> TensorDict:
    steps = torch.arange(4.0)[:, None]
    following = TensorDict({"x": steps[1:], "done": torch.zeros(3, 1).bool()}, [3])
    return TensorDict({"x": steps[:3], "next": following}, [3])


DISCRETE = {  # of two objectives
    "Categorical": lambda lib: lib.Categorical(3, shape=(2,)),
    "Bounded": lambda lib: lib.Bounded(0, 3, (2,), dtype=torch.int64),
    "Unbounded": lambda lib: lib.Unbounded((2,), dtype=torch.int64),
    "Binary": lambda lib: lib.Binary(2, dtype=torch.int64),
    "OneHot": lambda lib: lib.OneHot(2),
    "MultiCategorical": lambda lib: lib.MultiCategorical([3, 3]),
    "floats": lambda lib: lib.Bounded(0.0, 3.0, (2,)),
}


def counts(lib, make_spec):
    """A count of steps, with rewards of two objectives."""

    class Counts(type(count(lib))):
        def __init__(self):
            super().__init__()
            self.reward_spec = make_spec(lib)

        def _step(self, td):
            return super()._step(td).set("reward", torch.ones(2, dtype=self.reward_spec.dtype))

    return Counts()


def measured(lib, keys, **keywords):
    transform = lib.ObservationNorm(in_keys=keys)
    env = lib.TransformedEnv(arm(lib), transform)
    transform.init_stats(3, **keywords)
    return env


CALLS = {
    "a clip without bounds": lambda lib: lib.ClipTransform(["a"]),
    "a new axis from the front": lambda lib: lib.UnsqueezeTransform(0, in_keys=["a"]),
    "an axis to drop from the front": lambda lib: lib.SqueezeTransform(1, in_keys=["a"]),
    "axes to flatten from the front": lambda lib: lib.FlattenObservation(0, 1, in_keys=["a"]),
    "frames from the front": lambda lib: lib.CatFrames(2, 0, in_keys=["a"]),
    "frames of the future in an env": around(
        count, lambda lib: lib.CatFrames(2, -1, in_keys=["count"], future=True)
    ),
    "statistics of several entries": lambda lib: measured(lib, ["observation", "place"]),
    "statistics of an axis that is not averaged": lambda lib: measured(
        lib, ["observation"], reduce_dim=(0,), cat_dim=1
    ),
    "statistics of an axis that is not averaged, without an env": lambda lib: lib.ObservationNorm(
        in_keys=["observation", "place"]
    ).init_stats(3, reduce_dim=(0,), cat_dim=1),
    "a mask without an env": lambda lib: lib.ActionMask()(TensorDict({"action": torch.ones(())})),
    "the hook of a mask without an env": lambda lib: lib.ActionMask()._call(
        TensorDict({"action_mask": torch.ones(2, dtype=torch.bool)})
    ),
    "random beginnings called by hand": lambda lib: lib.NoopResetEnv(2)(recorded()),
    "a reset by random beginnings without an env": lambda lib: lib.NoopResetEnv(2)._reset(
        TensorDict(), TensorDict()
    ),
    "weights of two axes": lambda lib: lib.LineariseRewards(["reward"], weights=torch.ones(2, 2)),
    "sums of unlike numbers of rewards": lambda lib: lib.RewardSum(["a", "b"], ["c"]),
    "sums by unlike numbers of resets": around(
        count, lambda lib: lib.RewardSum(["reward"], ["sum"], ["_reset", "_other"])
    ),
    "frames without ends": lambda lib: lib.CatFrames(2, -1, in_keys=["x"])(
        TensorDict({"x": torch.ones(3, 1)}, [3], names=["time"])
    ),
    "frames of the future, at the root and under next": lambda lib: lib.CatFrames(
        2, -1, in_keys=["x", ("next", "x")], future=True
    )(recorded()),
    "frames of the future under next": lambda lib: lib.CatFrames(
        2, -1, in_keys=[("next", "x")], future=True
    )(recorded()),
    "frames unfolded by name": lambda lib: lib.CatFrames(
        2, -1, in_keys=["x"], as_inverse=True
    ).unfolding(recorded()),
    "frames of one step": lambda lib: lib.CatFrames(2, -1, in_keys=["x"])(
        TensorDict({"x": torch.ones(1)})
    ),
    "rewards to go given to an env": lambda lib: is_an_env(
        lib.TransformedEnv(count(lib), lib.Reward2GoTransform())
    ),
    "rewards to go given to an env among others": lambda lib: is_an_env(
        lib.TransformedEnv(count(lib), lib.Compose(lib.StepCounter(), lib.Reward2GoTransform()))
    ),
    "rewards to go appended to an env": lambda lib: is_an_env(
        lib.TransformedEnv(count(lib)).append_transform(lib.Reward2GoTransform())
    ),
    "no random beginnings": lambda lib: lib.NoopResetEnv(0).noops,
    "options projected": lambda lib: lib.DiscreteActionProjection(3, 5)(
        TensorDict({"action": torch.eye(3, dtype=torch.int64)[[0, 2, 1]]}, [3])
    ),
    "options left alone": lambda lib: lib.DiscreteActionProjection(3, 5, include_forward=False)(
        TensorDict({"action": torch.eye(3, dtype=torch.int64)[[0, 2, 1]]}, [3])
    ),
    "bins of a number": around(lambda lib: number(lib), lambda lib: lib.ActionDiscretizer(3)),
    "bins of a number, one-hot": lambda lib: leaf_specs(
        lib.TransformedEnv(number(lib), lib.ActionDiscretizer(3, categorical=False))
    ),
    "frames by hand without an env": lambda lib: by_hand(lib.CatFrames(2, -1, in_keys=["x"])),
    "maxima by hand without an env": lambda lib: by_hand(lib.TimeMaxPool(["x"], T=2)),
}


def is_an_env(value):
    return hasattr(value, "rollout")


def number(lib):
    """An arm whose action is one number without an axis."""
    return arm(lib, ())


def binned(lib, make=lambda lib: arm(lib, (3,))):
    env = lib.TransformedEnv(make(lib), lib.ActionDiscretizer(3, out_action_key="bins"))
    root = env.reset()
    return [
        leaf_specs(env),
        env.step(root.set("bins", torch.tensor([0, 1, 2]).expand(*env.batch_size, 3))),
    ]


def by_hand(transform):
    return [transform._call(TensorDict({"x": torch.full((1,), n)})) for n in (3.0, 1.0, 0.0)]


@pytest.mark.parametrize("case", CALLS)
def test_errors_and_limits_are_those_of_the_reference(case):
    check_same(CALLS[case])


@pytest.mark.parametrize("spec", DISCRETE)
@pytest.mark.parametrize("weights", [None, [1.0, 2.0]])
def test_discrete_rewards_of_several_objectives_are_not_added_up(spec, weights):
    def call(lib):
        rewards = lib.LineariseRewards(["reward"], weights=weights)
        return leaf_specs(lib.TransformedEnv(counts(lib, DISCRETE[spec]), rewards))

    check_same(call)


def test_whole_numbers_that_are_cast_or_recorded_are_added_up():
    cast = OURS.DTypeCastTransform(torch.int64, torch.float32, in_keys=["reward"])
    added = OURS.LineariseRewards(["reward"], weights=[1.0, 2.0])
    env = OURS.TransformedEnv(counts(OURS, DISCRETE["Bounded"]), OURS.Compose(cast, added))

    assert played(env, 2)["next", "reward"].flatten().tolist() == [3.0, 3.0]
    check_works_alike(
        lambda lib: lib.LineariseRewards(["reward"], weights=[1.0, 2.0])(
            TensorDict({"reward": torch.ones(4, 2, dtype=torch.int64)}, [4])
        )
    )


def test_recorded_frames_have_a_maximum():
    differs("all-transforms-answer", lambda lib: lib.TimeMaxPool(["x"], T=2)(recorded()))

    assert OURS.TimeMaxPool(["x"], T=2)(recorded())["x"].flatten().tolist() == [0, 1, 2]


SEVERAL_RESETS = {
    "teams of their own": (teams, {}),
    "flags of the root and below": (several, {"in_keys": ["reward"], "out_keys": ["left"]}),
    "flags below": (nested, {"in_keys": [("data", "pay")], "out_keys": [("data", "left")]}),
}


@pytest.mark.parametrize("case", SEVERAL_RESETS)
def test_targets_are_reset_by_the_flags_beside_them(case):
    make, keys = SEVERAL_RESETS[case]

    def left(lib):
        env = lib.TransformedEnv(make(lib), lib.TargetReturn(10.0, **keys))
        return played(env, 2)

    differs("all-transforms-answer", left)
    left(OURS)


def test_what_is_no_double_stays_as_it_is():
    def dtypes(lib):
        env = lib.TransformedEnv(count(lib), lib.DoubleToFloat(["success"], in_keys_inv=[]))
        return leaf_specs(env)

    differs("all-transforms-answer", dtypes)
    assert dtypes(OURS) == leaf_specs(count(OURS))


def test_the_continuous_action_is_recorded_beside_its_bin():
    check_works_alike(binned)
    check_works_alike(lambda lib: binned(lib, lambda lib: rows(lib, lambda lib: arm(lib, (3,)))))


def test_the_recorded_action_is_that_of_the_step_wherever_the_bins_are_cut():
    lib = OURS
    cut = lib.ActionDiscretizer(3, out_action_key="bins")
    inside = lib.TransformedEnv(arm(lib, (3,)), cut.clone())
    envs = [
        lib.TransformedEnv(arm(lib, (3,)), lib.Compose(cut.clone(), lib.StepCounter())),
        lib.TransformedEnv(inside, lib.StepCounter()),
    ]

    for env in envs:
        lib.check_env_specs(env)
        data = env.rollout(3)
        assert (data["action"] == data["bins"] * 2 - 1.0).all()
        _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
        assert "action" not in root.keys()


def test_sub_envs_that_cut_bins_need_no_continuous_action():
    cut = OURS.ActionDiscretizer(3, out_action_key="bins")

    with OURS.SerialEnv(2, lambda: OURS.TransformedEnv(arm(OURS, (3,)), cut.clone())) as env:
        OURS.check_env_specs(env)

        assert "action" not in env.rollout(3).keys()


def test_rows_that_are_skipped_record_their_action_too():
    cut = OURS.ActionDiscretizer(3, out_action_key="bins")
    env = OURS.TransformedEnv(arm(OURS, (3,), (2,)), cut)
    root = env.reset().set("bins", torch.tensor([[0, 1, 2], [2, 2, 2]]))

    step = env.step(root.set("_step", torch.tensor([True, False])))

    assert step["action"].tolist() == [[-1.0, 1.0, 3.0], [3.0, 3.0, 3.0]]
    assert step["next", "observation"].tolist() == [[3.0] * 3, [0.0] * 3]
