"""Each transform around a small env: what it declares, and what resets, steps and rollouts show.

That it shows the same around rows, inside them and in copies is asked by `tests/transforms/test_contract.py`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.transforms.worlds import arm, count, leaf_specs, ones, played, rows, teams
from tests.zoo.gym_envs import Lives

endless = partial(count, n=99)


def opponent(td):
    return td.set("action", torch.zeros_like(td["count"]))


CASES = {  # the env, and what stands around it
    "ActionScaling": (arm, lambda lib: lib.ActionScaling()),
    "ActionScaling from 0 to 1": (arm, lambda lib: lib.ActionScaling(standard_normal=False)),
    "ActionScaling by numbers": (arm, lambda lib: lib.ActionScaling(loc=1.0, scale=-2.0)),
    "ActionScaling, renamed": (arm, lambda lib: lib.ActionScaling(["action"], ["wish"])),
    "FlattenAction": (arm, lambda lib: lib.FlattenAction()),
    "FlattenAction, positive": (
        arm,
        lambda lib: lib.FlattenAction(0, 1, ["action"], ["flat"], allow_positive_dim=True),
    ),
    "DeviceCastTransform": (count, lambda lib: lib.DeviceCastTransform("cpu")),
    "RandomTruncationTransform": (
        partial(count, n=99),
        lambda lib: lib.Compose(lib.StepCounter(), lib.RandomTruncationTransform(3, 3, 1.0)),
    ),
    "TerminateTransform": (count, lambda lib: lib.TerminateTransform(lambda td: td["count"] >= 3)),
    "TerminateTransform by a bool": (
        count,
        lambda lib: lib.TerminateTransform(lambda td: bool(td["count"].max() >= 3)),
    ),
    "Stack": (
        teams,
        lambda lib: lib.Stack(["a", "b"], "both", in_key_inv="both", out_keys_inv=["a", "b"]),
    ),
    "Stack of leaves": (
        teams,
        lambda lib: lib.Stack([("a", "seen"), ("b", "seen")], "seen", dim=-2, del_keys=False),
    ),
    "Stack, inputs gone": (teams, lambda lib: lib.Stack([("a", "seen"), ("b", "seen")], "seen")),
    "EndOfLifeTransform": (
        lambda lib: lib.GymWrapper(Lives()),
        lambda lib: lib.EndOfLifeTransform(),
    ),
    "EndOfLifeTransform of a number": (
        lambda lib: lib.GymWrapper(Lives()),
        lambda lib: lib.EndOfLifeTransform("eol", "left", eol_attribute="unwrapped.ale.left"),
    ),
    "FiniteTensorDictCheck": (count, lambda lib: lib.FiniteTensorDictCheck()),
    "ExpandAs": (count, lambda lib: lib.ExpandAs("count", "success", "counts")),
    "ExpandAs of a reward": (count, lambda lib: lib.ExpandAs("reward", "success", "rewards")),
    "ExpandAs of done": (count, lambda lib: lib.ExpandAs("done", "success")),
    "UnaryTransform": (
        count,
        lambda lib: lib.UnaryTransform(["count"], ["half"], fn=lambda value: value.float() / 2),
    ),
    "UnaryTransform of a reward": (
        count,
        lambda lib: lib.UnaryTransform(["reward"], ["reward"], fn=lambda value: value * 2),
    ),
    "UnaryTransform of done": (
        count,
        lambda lib: lib.UnaryTransform(["done"], ["goes_on"], fn=lambda value: ~value),
    ),
    "UnaryTransform to a string": (
        count,
        lambda lib: lib.UnaryTransform(["count"], ["text"], fn=lambda value: str(value.tolist())),
    ),
    "Hash": (count, lambda lib: lib.Hash(["count"], ["hash"])),
    "Hash of a string": (
        count,
        lambda lib: lib.Compose(
            lib.UnaryTransform(["count"], ["text"], fn=lambda value: str(value.tolist())),
            lib.Hash(["text"], ["hash"]),
        ),
    ),
    "ConditionalPolicySwitch": (
        count,
        lambda lib: lib.Compose(
            lib.StepCounter(step_count_key="all"),
            lib.ConditionalPolicySwitch(opponent, lambda td: td["count"][..., 0] % 2 == 1),
            lib.StepCounter(step_count_key="main"),
        ),
    ),
    "ConditionalPolicySwitch after a reset": (
        count,
        lambda lib: lib.ConditionalPolicySwitch(opponent, lambda td: td["count"].max() == 0),
    ),
    "CatFrames": (endless, lambda lib: lib.CatFrames(3, -1, ["count"], ["last"])),
    "CatFrames, in place": (
        count,
        lambda lib: lib.CatFrames(2, -1, ["count"], padding="constant", padding_value=-1),
    ),
    "TimeMaxPool": (count, lambda lib: lib.TimeMaxPool(["count"], ["most"], T=2)),
    "SuccessReward": (endless, lambda lib: lib.SuccessReward(scale=2.0)),
    "SuccessReward, renamed": (endless, lambda lib: lib.SuccessReward(reward_key="prize")),
    "ActionChunkTransform": (arm, lambda lib: lib.ActionChunkTransform(3)),
    "BatchSizeTransform": (
        count,
        lambda lib: lib.BatchSizeTransform(reshape_fn=lambda data: data.reshape(1, 1)),
    ),
    "BatchSizeTransform of any batch": (
        partial(arm, shape=(3,)),
        lambda lib: lib.BatchSizeTransform(batch_size=[4]),
    ),
    "gSDENoise": (count, lambda lib: lib.gSDENoise(shape=(2,))),
    "MultiAction": (count, lambda lib: lib.MultiAction()),
    "MultiAction, last reward": (count, lambda lib: lib.MultiAction(stack_rewards=False)),
    "TargetReturn of all rewards": (teams, lambda lib: lib.TargetReturn(9.0, reset_key="_reset")),
    "TargetReturn of another name": (
        count,
        lambda lib: lib.Compose(lib.RenameTransform(["reward"], ["prize"]), lib.TargetReturn(9.0)),
    ),
    "MultiAction, renamed": (count, lambda lib: lib.MultiAction(chunk_key=("vla", "chunk"))),
}
FRAMES = {"CatFrames", "CatFrames, in place", "TimeMaxPool"}
STATES = {"EndOfLifeTransform", "EndOfLifeTransform of a number"}
GROWN = {"MultiAction", "MultiAction, last reward", "MultiAction, renamed"}


def built(case):
    make, transform = CASES[case]
    return lambda lib: lib.TransformedEnv(make(lib), transform(lib))


@pytest.mark.parametrize("case", CASES)
def test_a_transform_declares_and_shows_what_that_of_the_reference_does(case):
    make = built(case)

    if case not in GROWN | FRAMES | STATES:
        check_same(lambda lib: leaf_specs(make(lib)))
    check_same(lambda lib: played(make(lib), 4))
    check_same(lambda lib: played(make(lib), 7, break_when_any_done=False))


@pytest.mark.parametrize("case", sorted(FRAMES))
def test_frames_that_are_remembered_are_declared(case):
    make = built(case)

    differs("frames-in-the-data", lambda lib: leaf_specs(make(lib)))
    private = [key for key in make(OURS).observation_spec if key.startswith("_")]
    assert len(private) == 1
    differs("frames-in-the-data", lambda lib: private[0] in make(lib).rollout(2).keys())


# -------------------------------------------------------------------------------- more about some of them


def chunked(lib, *, ends=(2, 9), length=3, **keywords):
    env = lib.TransformedEnv(
        lib.SerialEnv(2, [partial(count, lib, n) for n in ends]), lib.MultiAction(**keywords)
    )
    chunk = torch.ones(2, length, 1, dtype=torch.int64)
    return env.step(env.reset().set("action", chunk))["next"]


def test_every_action_of_a_chunk_is_a_step():
    check_same(lambda lib: chunked(lib, ends=(9, 9)))
    check_same(lambda lib: chunked(lib, ends=(9, 9), length=1))
    check_same(lambda lib: chunked(lib, ends=(9, 9), stack_rewards=False, stack_observations=True))
    check_same(lambda lib: chunked(lib, ends=(2, 2), length=5))
    check_same(lambda lib: chunked(lib, stack_rewards=False))


def test_steps_after_the_end_of_an_episode_earn_nothing():
    differs("chunk-rewards", chunked)

    assert chunked(OURS)["reward"].flatten(1).tolist() == [[1, 2, 0], [1, 2, 3]]
    assert chunked(OURS)["count"].tolist() == [[2], [3]]


def skipping(lib, ends=(2, 9)):
    env = lib.TransformedEnv(
        lib.SerialEnv(2, [partial(count, lib, n) for n in ends]), lib.FrameSkipTransform(3)
    )
    return env.step(ones(env, env.reset()))["next"]


def test_frames_after_the_end_of_an_episode_are_not_stepped():
    check_same(lambda lib: skipping(lib, (9, 9)))
    differs("chunk-rewards", skipping)

    assert skipping(OURS)["reward"].flatten().tolist() == [3, 6]
    assert skipping(OURS)["count"].flatten().tolist() == [2, 3]


def test_transforms_before_a_chunk_run_at_every_action_and_those_after_it_once():
    def call(lib):
        counters = [lib.StepCounter(step_count_key=name) for name in ("inner", "outer")]
        chain = lib.Compose(counters[0], lib.ActionScaling(), lib.MultiAction(), counters[1])
        env = lib.TransformedEnv(arm(lib, (3,)), chain)
        return env.step(env.reset().set("action", torch.ones(4, 3)))["next"]

    check_same(call)


def test_a_belief_is_acted_on_by_its_mean():
    def call(lib):
        env = lib.TransformedEnv(lib.GymEnv("Pendulum-v1"), lib.MeanActionSelector())
        env.set_seed(0)

        def policy(td):
            action = {"mean": td["observation", "mean"][..., :1], "var": torch.ones(1, 1)}
            return td.set("action", TensorDict(action))

        return [leaf_specs(env), env.rollout(3, policy)]

    check_same(call)


@pytest.mark.parametrize("low", [None, float("-inf")])
def test_an_action_without_finite_bounds_is_scaled_by_numbers_only(low):
    def call(lib, **numbers):
        env = arm(lib)
        unbounded = lib.Unbounded((2, 3)) if low is None else lib.Bounded(low, 1.0, (2, 3))
        env.action_spec = unbounded
        return leaf_specs(lib.TransformedEnv(env, lib.ActionScaling(**numbers)))

    check_same(call)
    check_same(lambda lib: call(lib, loc=1.0, scale=2.0))


def test_a_random_truncation_says_which_counter_it_misses():
    def call(lib, *transforms):
        return played(lib.TransformedEnv(count(lib), lib.Compose(*transforms)), 2)

    check_same(lambda lib: call(lib, lib.RandomTruncationTransform(1, 2)))
    check_same(
        lambda lib: call(lib, lib.RandomTruncationTransform(1, 2), lib.StepCounter()),
    )
    check_same(
        lambda lib: call(
            lib,
            lib.StepCounter(step_count_key="age"),
            lib.RandomTruncationTransform(2, 2, step_count_key="age"),
        )
    )


def test_masks_reach_rows_of_another_batch():
    def masked(lib, kind):
        env = lib.SerialEnv(4, partial(count, lib, 99))
        reshaped = lib.BatchSizeTransform(reshape_fn=lambda data: data.unflatten(0, (2, 2)))
        env = lib.TransformedEnv(env, reshaped)
        root = env.step_mdp(env.step(ones(env, env.reset())))
        mask = torch.tensor([[True, False], [False, True]])
        if kind == "step":
            return env.step(ones(env, root).set("_step", mask))["next", "count"]
        return env.reset(root.set("_reset", mask[..., None]))["count"]

    check_same(lambda lib: masked(lib, "step"))
    differs("all-transforms-answer", lambda lib: masked(lib, "reset"))
    assert masked(OURS, "reset").flatten().tolist() == [0, 1, 1, 0]


def test_another_batch_is_refused_where_the_env_is_fixed_to_its_own():
    def call(lib, make, **keywords):
        return played(lib.TransformedEnv(make(lib), lib.BatchSizeTransform(**keywords)), 2)

    check_same(lambda lib: call(lib, count, batch_size=[5]))
    check_same(lambda lib: call(lib, partial(arm, shape=(3,), batch=(2,)), batch_size=[5]))
    check_same(lambda lib: call(lib, partial(arm, shape=(3,), batch=(2,)), batch_size=[5, 2]))
    check_same(lambda lib: call(lib, count))
    check_same(lambda lib: call(lib, count, batch_size=[1], reshape_fn=lambda data: data))


def test_a_function_makes_the_root_of_another_batch():
    def root(td, fresh, env=None):
        assert fresh.shape == ()
        return fresh.expand(3).clone().set("observation", torch.ones(3, 3) * (2 if env else 1))

    def call(lib, **keywords):
        transform = lib.BatchSizeTransform(batch_size=[3], reset_func=root, **keywords)
        return played(lib.TransformedEnv(arm(lib, (3,)), transform), 2)

    check_same(call)
    check_same(lambda lib: call(lib, env_kwarg=True))


def test_another_policy_steps_the_rows_that_meet_the_condition():
    def call(lib, ends=(3, 9)):
        env = lib.SerialEnv(2, [partial(count, lib, n) for n in ends])
        switch = lib.ConditionalPolicySwitch(
            opponent, lambda td: (td["count"][..., 0] == 1) & torch.tensor([True, False])
        )
        return played(lib.TransformedEnv(env, switch), 4, break_when_any_done=False)

    assert call(OURS)["next", "count"][..., 0].tolist() == [[2, 3, 2, 3], [1, 2, 3, 4]]
    assert call(OURS)["next", "done"][..., 0].sum(1).tolist() == [2, 0]


def test_a_number_that_is_not_finite_stops_the_run():
    def call(lib):
        env = lib.TransformedEnv(
            count(lib),
            lib.Compose(
                lib.UnaryTransform(["count"], ["inverse"], fn=lambda value: 1 / (value - 2)),
                lib.FiniteTensorDictCheck(),
            ),
        )
        return played(env, 4)

    check_same(call)
    with pytest.raises(ValueError, match="'inverse'"):
        call(OURS)


def test_a_timer_shows_which_of_its_times_passed():
    def call(lib, make=count, **keywords):
        env = lib.TransformedEnv(make(lib), lib.Timer(**keywords))
        data = played(env, 7, break_when_any_done=False)
        names = env.transform.out_keys
        passed = [[key, data[key] > 0, data["next", key] > 0] for key in names]
        return [names, leaf_specs(env), passed]

    check_same(call)
    check_same(lambda lib: call(lib, rows))
    check_same(lambda lib: call(lib, time_key="clock"))
    check_same(lambda lib: call(lib, out_keys=["a", "b"]))


def grid(lib, shape=(3,)):
    """A count that is observed on the points of a grid, in a node of its own."""

    class Grid(type(count(lib))):
        def __init__(self):
            super().__init__()
            point = lib.Composite(a=lib.Unbounded((*shape, 2)), shape=shape)
            self.observation_spec = lib.Composite(grid=point)

        def _shown(self):
            root = super()._shown()
            points = TensorDict({"a": torch.full((*shape, 2), float(root["count"]))}, shape)
            return root.exclude("count", "success").set("grid", points)

    return Grid()


@pytest.mark.parametrize(
    ("name", "shape"), [("UnsqueezeTransform", (3,)), ("SqueezeTransform", (3, 1))]
)
def test_an_entry_that_is_a_tensordict_gets_other_axes(name, shape):
    def behind(lib):
        view = getattr(lib, name)(-1, in_keys=["grid"])
        return lib.TransformedEnv(grid(lib, shape), view)

    check_works_alike(lambda lib: played(behind(lib), 2))
    differs("node-specs", lambda lib: behind(lib).observation_spec)
    OURS.check_env_specs(behind(OURS))
    assert not behind(OURS).transform.fuses  # programs know leaves alone


@pytest.mark.parametrize("name", ["UnsqueezeTransform", "SqueezeTransform"])
def test_axes_from_the_front_begin_behind_the_batch_of_the_data(name):
    def call(lib, batch):
        view = getattr(lib, name)(0, in_keys=["a"], allow_positive_dim=True)
        return view(TensorDict({"a": torch.zeros(*batch, 1, 2)}, batch))

    check_works_alike(lambda lib: call(lib, ()))
    differs("node-specs", lambda lib: call(lib, (3,)))
    assert call(OURS, (3,))["a"].shape[1:] == call(OURS, ())["a"].shape


def moved_on_a_grid(lib, shape=(3,)):
    """A count whose action is given on the points of a grid, in a node of its own."""

    class Moved(type(count(lib))):
        def __init__(self):
            super().__init__()
            move = lib.Composite(by=lib.Unbounded((*shape, 2)), shape=shape)
            self.action_spec = lib.Composite(move=move)

        def _step(self, td):
            assert td["move"].batch_size == shape
            self.number += int(td["move", "by"].sum())
            return self._shown().set("reward", torch.ones(1))

    return Moved()


@pytest.mark.parametrize(
    ("name", "shape", "dim", "batch_size"),
    [
        ("UnsqueezeTransform", (3,), -1, (3, 1)),
        ("UnsqueezeTransform", (3,), 0, (1, 3)),
        ("SqueezeTransform", (3, 1), 1, (3,)),
        ("SqueezeTransform", (1, 3), -2, (3,)),
    ],
)
def test_an_action_that_is_a_tensordict_gets_other_axes(name, shape, dim, batch_size):
    def view(lib, **keys):
        return getattr(lib, name)(dim, allow_positive_dim=True, **keys)

    def behind(lib):
        keys = {"in_keys": [], "in_keys_inv": ["move"]}
        return lib.TransformedEnv(moved_on_a_grid(lib, shape), view(lib, **keys))

    def by_hand(lib):
        move = TensorDict({"by": torch.ones(*batch_size, 2)}, batch_size)
        return view(lib, in_keys=[], in_keys_inv=["move"]).inv(TensorDict({"move": move}))

    check_works_alike(by_hand)
    differs("node-specs", lambda lib: leaf_specs(behind(lib)))
    OURS.check_env_specs(behind(OURS))
    env = behind(OURS)
    step = env.step(env.reset().set("move", env.full_action_spec["move"].zero() + 1))
    assert step["move"].batch_size == batch_size and step["next", "count"].item() == 6


def test_axes_of_nodes_count_from_behind_the_batch_of_the_data():
    def call(lib, batch):
        node = TensorDict({"a": torch.zeros(*batch, 3, 2)}, (*batch, 3))
        view = lib.UnsqueezeTransform(0, in_keys=["node"], allow_positive_dim=True)
        return view(TensorDict({"node": node}, batch))

    check_works_alike(lambda lib: call(lib, ()))
    differs("node-specs", lambda lib: call(lib, (4,)))
    assert call(OURS, (4,))["node"].batch_size == (4, 1, 3)


def test_frames_below_next_are_refused_in_an_env():
    def call(lib):
        stack = lib.CatFrames(2, -1, in_keys=["count", ("next", "count")])
        return leaf_specs(lib.TransformedEnv(count(lib), stack))

    differs("frames-in-the-data", call)
    with pytest.raises(NotImplementedError, match="without 'next'"):
        call(OURS)


def test_beginnings_take_up_to_so_many_actions():
    def begun(lib, noops, random=True, make=endless):
        env = lib.TransformedEnv(make(lib), lib.NoopResetEnv(noops, random))
        return {int(number) for _ in range(20) for number in env.reset()["count"].flatten()}

    check_works_alike(lambda lib: begun(lib, 3, random=False))
    check_works_alike(lambda lib: begun(lib, 0, random=False))
    differs("draws-reach-the-end", lambda lib: begun(lib, 3))
    differs("draws-reach-the-end", lambda lib: begun(lib, 0))
    differs("draws-reach-the-end", lambda lib: begun(lib, 3, False, partial(rows, make=endless)))
    assert begun(OURS, 3) == {1, 2, 3} and begun(OURS, 0) == {0}


@pytest.mark.parametrize("none", [[], ()], ids=str)
def test_no_keys_rename_nothing(none):
    def call(lib):
        return played(lib.TransformedEnv(count(lib), lib.RenameTransform(none, none)), 2)

    if none == ():
        differs("all-transforms-answer", call)
        assert call(OURS).keys() == played(count(OURS), 2).keys()
    else:
        check_works_alike(call)


@pytest.mark.parametrize("case", sorted(STATES))
def test_what_is_read_back_is_declared_as_a_state(case):
    make = built(case)

    differs("memory-is-own", lambda lib: leaf_specs(make(lib)))
    assert len(make(OURS).state_keys) == 1


def test_a_count_that_is_renamed_goes_on():
    def counts(lib):
        chain = lib.Compose(lib.StepCounter(), lib.RenameTransform(["step_count"], ["age"]))
        env = lib.TransformedEnv(lib.GymEnv("Pendulum-v1"), chain)
        return env.rollout(3)["next", "age"].flatten().tolist()

    differs("memory-is-own", counts)
    assert counts(OURS) == [1, 2, 3]


def test_a_copied_action_is_not_asked_for_twice():
    def asked(lib):
        copy = lib.RenameTransform([], [], ["action"], ["act"], create_copy=True)
        return sorted(lib.TransformedEnv(lib.GymEnv("Pendulum-v1"), copy).action_keys)

    differs("acted-is-recorded", asked)
    assert asked(OURS) == ["act"]
