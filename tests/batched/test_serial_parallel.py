"""SerialEnv and ParallelEnv: one behaviour, whatever hosts the sub-envs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from envkit import (
    GymEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.env.base import EnvBase
from envkit.errors import ReadOnlyError
from envkit.specs import Composite, OneHot, Unbounded
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.policies import Replay
from tests.zoo.shaped_envs import Groups

F, T = False, True
make_count = partial(Count, 5)
make_cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=12)


both = pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=2)], ids=["serial", "parallel"]
)


def equal(left: TensorDict, right: TensorDict) -> bool:
    return set(left.keys(True, True)) == set(right.keys(True, True)) and bool((left == right).all())


def private_keys(td: TensorDict) -> list:
    return [key for key in td.keys(True, True) if "_step" in key or "_reset" in key]


# ------------------------------------------------------------------------------- serial = parallel

SHAPES = [(3, 1), (3, 2), (3, 3), (5, 1), (5, 2), (5, 3)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "{}in{}".format(*shape))
def twins(request) -> Iterator[tuple[SerialEnv, ParallelEnv]]:
    count, processes = request.param
    serial = SerialEnv(count, make_cartpole)
    parallel = ParallelEnv(count, make_cartpole, num_processes=processes)
    yield serial, parallel
    serial.close()
    parallel.close()


def scenario_rollout(env):
    return [env.rollout(40, policy_of(env, 40), break_when_any_done=False)]


def scenario_until_any(env):
    return [env.rollout(40, policy_of(env, 40))]


def scenario_until_all(env):
    return [env.rollout(40, policy_of(env, 40), break_when_all_done=True)]


def scenario_stepwise(env):
    act, td, seen = policy_of(env, 30), env.reset(), []
    for _ in range(30):
        data, td = env.step_and_maybe_reset(act(td))
        seen += [data.clone(), td.clone()]
    return seen


def scenario_partial_steps(env):
    generator = torch.Generator().manual_seed(3)
    act, td, seen = policy_of(env, 30), env.reset(), []
    for _ in range(30):
        mask = torch.rand(env.batch_size, generator=generator) < 0.6
        td = env.step(act(td).set("_step", mask))
        seen.append(td.clone())
        td = env.maybe_reset(env.step_mdp(td))
    return seen


def scenario_masked_steps_that_reset(env):
    generator = torch.Generator().manual_seed(5)
    act, td, seen = policy_of(env, 30), env.reset(), []
    for _ in range(30):
        mask = torch.rand(env.batch_size, generator=generator) < 0.6
        data, td = env.step_and_maybe_reset(act(td).set("_step", mask))
        seen += [data.clone(), td.clone()]
    return seen


def scenario_partial_resets(env):
    generator = torch.Generator().manual_seed(4)
    act, td, seen = policy_of(env, 20), env.reset(), []
    for _ in range(20):
        td = env.step_mdp(env.step(act(td)))
        mask = torch.rand((*env.batch_size, 1), generator=generator) < 0.4
        td = env.reset(td.set("_reset", mask))
        seen.append(td.clone())
        seen.append(env.reset(TensorDict({"_reset": ~mask}, env.batch_size)))
        td.update(seen[-1])
    return seen


def scenario_reset_keywords(env):
    of_rows = [{"options": {"low": row / 100, "high": row / 50}} for row in range(env.num_workers)]
    mask = torch.arange(env.num_workers) % 2 == 0
    first = env.reset(seed=3)
    second = env.reset(seed=4, list_of_kwargs=of_rows)
    third = env.reset(second.clone().set("_reset", mask), list_of_kwargs=of_rows[::-1])
    return [first, second, third]


def policy_of(env, steps: int) -> Replay:
    choices = torch.rand(*env.batch_size, steps, generator=torch.Generator().manual_seed(1)) < 0.5
    return Replay(torch.nn.functional.one_hot(choices.long(), 2))


SCENARIOS = [value for name, value in list(globals().items()) if name.startswith("scenario_")]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__[9:])
def test_parallel_gives_the_bits_of_serial(twins, scenario):
    results = []
    for env in twins:
        env.set_seed(11)
        results.append(scenario(env))

    assert len(results[0]) == len(results[1])
    assert all(map(equal, *results))
    assert not any(map(private_keys, results[0]))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__[9:])
@both
def test_data_is_the_same_without_buffers(opened, batched, scenario):
    results = []
    for use_buffers in (True, False):
        env = opened(batched(3, make_cartpole, use_buffers=use_buffers))
        env.set_seed(11)
        results.append(scenario(env))

    assert all(map(equal, *results))


# ----------------------------------------------------------------------------------------- layout


@both
def test_done_sub_envs_begin_anew_and_the_others_go_on(opened, batched):
    env = opened(batched(2, [partial(Count, 2), partial(Count, 4)]))

    data = env.rollout(5, break_when_any_done=False)

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 4, 1]]
    assert data["count"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 0]]


@both
def test_done_sub_envs_wait_until_all_are_done(opened, batched):
    env = opened(batched(2, [partial(Count, 2), partial(Count, 4)]))

    data = env.rollout(9, break_when_all_done=True)

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 2, 2], [1, 2, 3, 4]]
    assert list(env.steps) == [2, 4]
    assert not private_keys(data)


@both
def test_sub_envs_with_a_batch_of_their_own_get_their_part_of_a_mask(opened, batched):
    env = opened(batched(2, partial(StatelessCount, 3, batch_size=[2]), use_buffers=True))
    td = env.reset()
    td["count"] = torch.tensor([[[0], [2]], [[0], [1]]])
    td["action"] = torch.zeros_like(td["count"])

    _, following = env.step_and_maybe_reset(td)
    fresh = env.reset()

    assert env.batch_size == (2, 2)
    assert following["count"].flatten().tolist() == [1, 0, 1, 2]
    assert fresh["count"].flatten().tolist() == [0, 0, 0, 0]


@both
def test_sub_envs_with_a_batch_of_their_own_can_be_stepped_in_part(opened, batched):
    env = opened(batched(2, partial(StatelessCount, 9, batch_size=[2]), use_buffers=True))
    td = env.rand_action(env.reset())

    out = env.step(td.set("_step", torch.tensor([[T, F], [F, F]])))
    following = env.step(env.rand_action(env.step_mdp(out)))

    assert out["next", "count"].flatten().tolist() == [1, 0, 0, 0]
    assert following["next", "count"].flatten().tolist() == [2, 1, 1, 1]


# ------------------------------------------------------------------------------------------ masks


@both
def test_skipped_values_are_zero_where_the_input_lacks_them(opened, batched):
    env = opened(batched(3, make_count))
    td = env.step_mdp(env.rand_step(env.reset()))

    out = env.step(env.rand_action(td).exclude("count").set("_step", torch.tensor([[T], [F], [T]])))

    assert out["next", "count"].tolist() == [[2], [0], [2]]


def short_pole(steps: int) -> GymEnv:
    return GymEnv("CartPole-v1", max_episode_steps=steps)


unlike_ends = pytest.mark.parametrize("make", [Count, short_pole], ids=["tensordicts", "arrays"])


def newest(env) -> TensorDict:
    """Ask with a mask alone for what the sub-envs show now."""
    none = torch.zeros(*env.batch_size, 1, dtype=torch.bool)
    return env.reset(TensorDict({"_reset": none}, env.batch_size))


@both
@unlike_ends
def test_a_mask_alone_shows_what_followed_an_episode_that_ended(opened, batched, make):
    env = opened(batched(2, [partial(make, 2), partial(make, 4)], use_buffers=True))
    td = env.reset()
    for _ in range(2):
        data, td = env.step_and_maybe_reset(env.rand_action(td))

    assert data["next", "done"].flatten().tolist() == [T, F]
    assert equal(newest(env), td.exclude("action"))


@both
@unlike_ends
def test_a_mask_alone_shows_what_a_step_of_some_rows_made(opened, batched, make):
    env = opened(batched(2, [partial(make, 5), partial(make, 1)], use_buffers=True))
    _, td = env.step_and_maybe_reset(env.rand_action(env.reset()))  # which ends the second

    out = env.step(env.rand_action(td).set("_step", torch.tensor([T, F])))

    assert equal(newest(env), env.step_mdp(out))


@both
@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_mask_alone_shows_nothing_of_what_the_caller_preset(opened, batched, use_buffers):
    env = opened(batched(2, make_count, use_buffers=use_buffers))
    td = env.rand_action(env.reset())
    td["next", "count"] = torch.full((2, 1), 77)

    out = env.step(td)

    assert out["next", "count"].flatten().tolist() == [77, 77]
    assert newest(env)["count"].flatten().tolist() == [1, 1]


class Keeper(Count):
    """Keeps the actions that it was given, as they were given."""

    def __init__(self):
        super().__init__()
        self.taken: list[torch.Tensor] = []

    def _step(self, td):
        self.taken.append(td["action"])
        return super()._step(td)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_action_that_a_sub_env_keeps_is_its_own(use_buffers):
    env = SerialEnv(1, Keeper, use_buffers=use_buffers)
    td = env.reset()

    for action in (1, 0, 1):
        td = env.step_mdp(env.step(td.set("action", torch.tensor([[action]]))))

    assert [action.item() for action in env.taken[0]] == [1, 0, 1]


@both
def test_a_mask_alone_gives_the_newest_data_of_all(opened, batched):
    env = opened(batched(4, make_count))
    env.rand_step(env.reset())

    out = env.reset(TensorDict({"_reset": torch.tensor([[T], [F], [T], [T]])}, [4]))

    assert out["count"].tolist() == [[0], [1], [0], [0]]
    assert sorted(out.keys()) == ["count", "done", "terminated"]


@both
def test_preset_next_entries_decide_what_is_done(opened, batched):
    env = opened(batched(2, make_count))
    td = env.rand_action(env.reset())
    td["next", "done"] = torch.tensor([[T], [F]])

    data, following = env.step_and_maybe_reset(td)

    assert data["next", "done"].tolist() == [[T], [F]]
    assert following["count"].tolist() == [[0], [1]]
    assert list(env.c) == [0, 1]


# ----------------------------------------------------------------------------------- bad requests


# -------------------------------------------------------------------------- gradients and threads


class Mover(EnvBase):
    """x' = x + action, reward x'."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.state_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Unbounded((1,))

    def _reset(self, td, **kwargs):
        return TensorDict({"x": torch.zeros(1)}, [])

    def _step(self, td):
        x = td["x"] + td["action"]
        return TensorDict({"x": x, "reward": x}, [])

    def _set_seed(self, seed):
        pass


def test_gradients_flow_through_serial_env(opened):
    env = opened(SerialEnv(2, Mover))
    action = torch.ones(2, 1, requires_grad=True)

    first = env.step(env.reset().set("action", action))
    second = env.step(env.step_mdp(first).set("action", action))
    second["next", "reward"].sum().backward()

    assert action.grad is not None
    assert action.grad.tolist() == [[2.0], [2.0]]


class Learned(Mover):
    """A Mover with a parameter of its own in the reward."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def _step(self, td):
        out = super()._step(td)
        return out.set("reward", out["x"] * self.scale)


@pytest.mark.parametrize(
    "options", [{}, {"use_buffers": False}, {"share_individual_td": True}], ids=str
)
@pytest.mark.parametrize("make", [Mover, Learned])
def test_parallel_env_gives_no_gradients(opened, make, options):
    env = opened(ParallelEnv(2, make, num_processes=1, **options))
    action = torch.ones(2, 1, requires_grad=True)

    stepped = env.step(env.reset().set("action", action))
    data, following = env.step_and_maybe_reset(env.reset().set("action", action))

    for td in (stepped["next"], data["next"], following):
        assert not any(leaf.requires_grad for leaf in td.values(True, True))


class Chooser(EnvBase):
    """Shows which of three options was chosen, spelled one-hot in floats."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.action_spec = OneHot(3, dtype=torch.float32)
        self.observation_spec = Composite(chosen=Unbounded((3,)))

    def _reset(self, td, **kwargs):
        return TensorDict({"chosen": torch.zeros(3)})

    def _step(self, td):
        return TensorDict({"chosen": td["action"].clone()})

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("use_buffers", [T, F], ids=["rows", "tensordicts"])
def test_choices_spelled_in_floats_reach_sub_envs_as_ones_and_zeros(opened, use_buffers):
    env = opened(SerialEnv(2, Chooser, use_buffers=use_buffers))
    action = torch.tensor([[1e-7, 0.9999999, 0.0], [0.0, 1e-7, 0.9999999]])

    stepped = env.step(env.reset().set("action", action))

    assert stepped["next", "chosen"].tolist() == [[0, 1, 0], [0, 0, 1]]


def test_rows_in_this_process_carry_no_gradients(opened):
    env = opened(SerialEnv(2, Learned, use_buffers=True))

    data = env.rollout(3)

    assert not any(leaf.requires_grad for leaf in data.values(True, True))


def test_workers_use_one_torch_thread_and_the_parent_keeps_its_own(opened):
    class Threads(Count):
        def threads(self):
            return torch.get_num_threads()

    before = torch.get_num_threads()
    env = opened(ParallelEnv(2, Threads))
    env.start()

    assert env.threads() == [1, 1]
    assert torch.get_num_threads() == before


# -------------------------------------------------------------------------- heterogeneous sub-envs


class Features(Count):
    """A Count that shows ``width`` features and one key of its own."""

    def __init__(self, width: int, name: str, n: int = 9):
        super().__init__(n)
        self.width, self.name = width, name
        self.observation_spec = Composite({"obs": Unbounded((width,)), name: Unbounded((1,))})

    def _out(self):
        td = super()._out().exclude("count")
        return td.update(
            {"obs": torch.full((self.width,), float(self.c)), self.name: torch.ones(1)}
        )


@both
def test_unlike_sub_envs_give_lazy_stacks_of_their_own_keys(opened, batched):
    env = opened(batched(2, [partial(Features, 2, "a"), partial(Features, 3, "b")]))

    data = env.rollout(4)

    assert isinstance(data, LazyStackedTensorDict)
    assert data.shape == (2, 4)
    assert "a" not in data
    assert data[0]["obs"].shape == (4, 2)
    assert data[1]["obs"].shape == (4, 3)
    assert "a" in data[0]
    assert "b" in data[1]


@both
def test_unlike_sub_envs_begin_anew_each_for_itself(opened, batched):
    env = opened(batched(2, [partial(Features, 2, "a", 2), partial(Features, 3, "b", 3)]))

    data = env.rollout(5, break_when_any_done=False)

    assert data[0]["next", "obs"][:, 0].tolist() == [1, 2, 1, 2, 1]
    assert data[1]["next", "obs"][:, 0].tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_random_rollouts_draw_what_single_steps_draw(kind):
    env = kind(2, partial(GymEnv, "CartPole-v1"), num_processes=2)
    env.set_seed(5)
    at_once = env.rollout(70, break_when_any_done=False)
    env.set_seed(5)
    td, steps = env.reset(), []
    for _ in range(70):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        steps.append(step)
    env.close()

    one_by_one = torch.stack(steps, 1)
    for key in at_once.keys(True, True):
        assert torch.equal(at_once[key], one_by_one[key]), key


@pytest.mark.parametrize("key", ["note", ("deep", "note")])
def test_a_policy_that_writes_an_entry_late_is_told_so(key):
    def act(td):
        act.calls += 1
        if act.calls > 1:
            td.set(key, torch.zeros(2, 1))
        return td.set("action", torch.zeros(2, 1, dtype=torch.int64))

    act.calls = 0
    env = ParallelEnv(2, make_count, num_processes=1)
    with pytest.raises(RuntimeError, match=re.escape(f"{key!r} is in 3 of 4 steps")):
        env.rollout(4, act, break_when_any_done=False)
    env.close()


def test_what_a_policy_writes_is_carried_on_but_for_reset_masks(opened):
    def run(use_buffers):
        env = opened(SerialEnv(2, partial(Count, 9), use_buffers=use_buffers))
        env.set_seed(0)

        def act(td):
            assert not private_keys(td)
            mask = torch.zeros(2, 1, dtype=torch.bool)
            td = env.rand_action(td).set("memory", td.get("memory", torch.zeros(2, 1)) + 1)
            return td.set(("agents", "_reset"), mask).set("_reset", mask.clone())

        return env.rollout(3, act, break_when_any_done=False)

    in_rows, one_by_one = run(True), run(False)

    assert equal(in_rows, one_by_one)
    assert in_rows["memory"].squeeze(-1).tolist() == [[1, 2, 3]] * 2
    assert len(private_keys(in_rows)) == 2


def cartpole():
    return GymEnv("CartPole-v1")


@pytest.mark.parametrize("masked_at", [None, 3, 70, 100])
def test_runs_longer_than_memory_has_moments_go_on_as_they_would_one_by_one(opened, masked_at):
    def run(use_buffers):
        env = opened(SerialEnv(2, cartpole, use_buffers=use_buffers))
        env.set_seed(0)
        if masked_at is None:
            return env.rollout(150, break_when_any_done=False)
        calls = []

        def act(td):
            calls.append(1)
            if len(calls) == masked_at:  # what records ends, and the rest goes step by step
                td.set("_step", torch.tensor([True, False]))
            return td.set("action", torch.tensor([[0, 1], [1, 0]]))

        return env.rollout(150, act, break_when_any_done=False)

    rows, tds = run(True), run(False)

    assert rows.shape == (2, 150)
    assert set(rows.keys(True, True)) == set(tds.keys(True, True))
    for key in rows.keys(True, True):
        assert torch.equal(rows[key], tds[key]), key


@pytest.mark.parametrize("first", [0, 1])
def test_rows_carry_data_only_where_all_sub_envs_look_alike(opened, first):
    makers = [partial(Count, 3), StatelessCount]
    env = opened(SerialEnv(2, [makers[first], makers[1 - first]], use_buffers=None))

    assert env.reset().batch_size == (2,)
    assert env.use_buffers is False


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_rollout_of_groups_is_that_of_stepping_them(use_buffers):
    rolled, stepped = (SerialEnv(2, partial(Groups, 4), use_buffers=use_buffers) for _ in range(2))
    actions = []

    def act(td):
        actions.append(rolled.rand_action(td))
        return actions[-1]

    whole = rolled.rollout(11, act, break_when_any_done=False)
    td, steps = stepped.reset(), []
    for acted in actions:
        data, td = stepped.step_and_maybe_reset(td.update(acted.select(*stepped.action_keys)))
        steps.append(data)

    assert_same(whole, torch.stack(steps, 1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batch_size", "Pass batch_size="),
        ("device", r"env\.to\(device\)"),
        ("input_spec", "action_spec and state_spec"),
        ("output_spec", "observation_spec"),
    ],
)
def test_what_cannot_be_assigned_says_what_to_do(name, message):
    env = SerialEnv(2, Count)

    with pytest.raises(ReadOnlyError, match=message):
        setattr(env, name, None)


@pytest.mark.parametrize(
    "make",
    [
        partial(SerialEnv, 2, Count),
        lambda: TransformedEnv(Count(), StepCounter()),
        lambda: MixedEnv([SerialEnv(1, Count), SerialEnv(1, Count)]),
    ],
)
def test_a_state_dict_is_loaded_with_the_arguments_of_a_module(make):
    env = make()
    env.rollout(3)
    saved = env.state_dict()

    env.load_state_dict(saved, True, False)
    env.load_state_dict(saved, strict=True, assign=False)

    assert env.rollout(2).shape[-1] == 2
    env.close()
