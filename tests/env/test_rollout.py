"""Rollouts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import GymEnv, SerialEnv, StepCounter, TransformedEnv
from envkit.data.paths import as_path
from envkit.errors import PolicyError
from envkit.specs import Composite, Unbounded
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.shaped_envs import Groups, Growing, Quiet, Several, Wordy
from tests.zoo.transform_envs import TwoTeams

T, F = True, False


@pytest.fixture(scope="module")
def two():
    """Two envs that end after 2 and after 4 steps."""
    env = SerialEnv(2, [partial(Count, 2), partial(Count, 4)])
    yield env
    env.close()


def counts(data: TensorDictBase, *place: str) -> list:
    return data[(*place, "count")].squeeze(-1).tolist()


# ------------------------------------------------------------------------------------ shape and time


def test_time_is_the_last_axis_and_has_a_name(two):
    assert Count(5).rollout(3).names == ["time"]
    assert two.rollout(3).names == [None, "time"]
    assert StatelessCount(9, batch_size=[2, 3]).rollout(4).names == [None, None, "time"]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_lazy_rollout_has_the_same_axes(two, lazy):
    data = two.rollout(4, return_contiguous=not lazy, break_when_any_done=False)

    assert data.shape == (2, 4)
    assert data.names == [None, "time"]


def test_a_rollout_has_at_most_max_steps():
    assert Count(5).rollout(20).shape == (5,)
    assert Count(5).rollout(3).shape == (3,)
    assert Count(5).rollout(1).shape == (1,)


# --------------------------------------------------------------------------------------- stop rules


def test_the_worked_example_of_any(two):
    for stop in ({}, {"break_when_any_done": True}, {"break_when_all_done": False}):
        data = two.rollout(10, **stop)

        assert data.shape == (2, 2)
        assert counts(data, "next") == [[1, 2], [1, 2]]


def test_the_worked_example_of_all(two):
    for stop in ({}, {"break_when_any_done": False}):
        data = two.rollout(10, break_when_all_done=True, **stop)

        assert data.shape == (2, 4)
        assert counts(data, "next") == [[1, 2, 2, 2], [1, 2, 3, 4]]
        assert data["next", "done"].squeeze(-1).tolist() == [[F, T, T, T], [F, F, F, T]]


def test_the_worked_example_of_neither(two):
    data = two.rollout(5, break_when_any_done=False)

    assert counts(data, "next") == [[1, 2, 1, 2, 1], [1, 2, 3, 4, 1]]
    assert counts(data) == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 0]]


def test_the_last_step_resets_nothing():
    env = Count(3)

    env.rollout(3, break_when_any_done=False)

    assert env.c == 3


def test_a_frozen_row_repeats_its_last_transition_unpaid():
    stateless = StatelessCount(4, batch_size=[2])
    root = stateless.reset().set("count", torch.tensor([[0], [2]]))
    data = stateless.rollout(9, auto_reset=False, tensordict=root, break_when_all_done=True)
    env = SerialEnv(2, [partial(Several, 2), partial(Several, 4)])
    several = env.rollout(9, break_when_all_done=True)
    env.close(raise_if_closed=False)

    assert counts(data) == [[0, 1, 2, 3], [2, 3, 3, 3]]
    assert counts(data, "next") == [[1, 2, 3, 4], [3, 4, 4, 4]]
    assert data["next", "done"].squeeze(-1).tolist() == [[F, F, F, T], [F, T, T, T]]
    assert data["next", "reward"].squeeze(-1).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert several["next", "gain"].squeeze(-1).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    for frozen, made, row in ((data, stateless, 1), (several, env, 0)):
        paid = {("next", *as_path(key)) for key in made.reward_keys}
        for key in set(frozen.keys(True, True)) - paid:
            assert all(frozen[key][row, step].equal(frozen[key][row, 1]) for step in (1, 2, 3))
        assert all(frozen[key][row, 2:].eq(0).all() for key in paid)


def test_frozen_rows_of_unlike_envs_pay_nothing_under_any_name():
    class Paid(Count):
        def __init__(self, n, name):
            super().__init__(n)
            self.name = name
            self.reward_spec = Composite({name: Unbounded((1,))})

        def _step(self, td):
            out = super()._step(td)
            return out.set(self.name, out.pop("reward"))

    env = SerialEnv(2, [partial(Paid, 2, "wage"), partial(Paid, 4, "gain")])
    data = env.rollout(9, break_when_all_done=True, return_contiguous=False)
    env.close()

    assert data[0]["next", "wage"].flatten().tolist() == [1, 1, 0, 0]
    assert data[1]["next", "gain"].flatten().tolist() == [1, 1, 1, 1]


def test_the_root_flags_decide_when_there_are_several_levels():
    data = Groups(4).rollout(10)

    assert data.shape == (4,)
    assert data["next", "agent0", "done"][2].all() and not data["next", "done"][2].any()


# ---------------------------------------------------------------------------------------- policies


def test_without_a_policy_actions_are_random():
    env = Count(50)
    env.set_seed(0)

    actions = env.rollout(40)["action"]

    assert env.action_spec.is_in(actions)
    assert actions.unique().tolist() == [0, 1]


class Ordered(Quiet):
    """Observations declared in an order that is not alphabetical."""

    def __init__(self):
        super().__init__(20)
        self.observation_spec = Composite(z=Unbounded((3,)), a=Unbounded((2,)), m=Unbounded((1,)))
        self.action_spec = Unbounded((6,))

    def _out(self):
        return TensorDict(
            {"a": torch.full((2,), 1.0), "m": torch.full((1,), 2.0), "z": torch.full((3,), 3.0)}
        )


@pytest.mark.parametrize("as_module", [False, True])
def test_a_plain_callable_gets_observations_in_declared_order(as_module):
    class Join(nn.Module):
        def forward(self, *values):
            return torch.cat(values, -1)

    policy = Join() if as_module else (lambda *values: torch.cat(values, -1))

    data = Ordered().rollout(2, policy)

    assert data["action"][0].tolist() == [3, 3, 3, 1, 1, 2]


def test_a_plain_module_acts():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    linear = nn.Linear(4, 2)

    class ArgMax(nn.Module):
        def forward(self, observation):
            return linear(observation).argmax(-1)

    data = env.rollout(10, ArgMax())

    assert data["action"].shape == data.shape
    assert data["action"].equal(linear(data["observation"]).argmax(-1))


def test_a_tensordict_module_is_used_as_it_is():
    module = TensorDictModule(
        lambda count: (torch.ones_like(count), count * 2),
        in_keys=["count"],
        out_keys=["action", "hidden"],
    )

    data = Count(9).rollout(3, module)

    assert data["action"].flatten().tolist() == [1, 1, 1]
    assert data["hidden"].flatten().tolist() == [0, 2, 4]


def one_in(td):
    return td.set("action", torch.ones(1, dtype=torch.int64))


def one_in_tensordict(tensordict):
    return one_in(tensordict)


def one_in_annotated(x: TensorDict):
    return one_in(x)


def one_in_quoted(x: TensorDictBase) -> TensorDictBase:
    return one_in(x)


class OneInModule(nn.Module):
    def forward(self, td):
        return one_in(td)


class OneInObject:
    def __call__(self, td, scale=1):
        return one_in(td)


@pytest.mark.parametrize(
    "policy",
    [one_in, one_in_tensordict, one_in_annotated, one_in_quoted, OneInModule(), OneInObject()],
    ids=lambda policy: getattr(policy, "__name__", type(policy).__name__),
)
def test_what_takes_a_tensordict_gets_one(policy):
    assert Count(9).rollout(3, policy)["action"].flatten().tolist() == [1, 1, 1]


def test_a_trusted_policy_is_never_wrapped():
    seen = []

    def act(x):
        seen.append(type(x))
        return x.set("action", torch.ones(1, dtype=torch.int64))

    data = Count(9).rollout(3, policy=act, trust_policy=True)

    assert data["action"].flatten().tolist() == [1, 1, 1]
    assert all(issubclass(kind, TensorDictBase) for kind in seen)


def test_a_policy_may_return_another_tensordict():
    data = Count(9).rollout(3, lambda td: one_in(td.clone()).set("extra", torch.zeros(1)))

    assert counts(data, "next") == [1, 2, 3]
    assert data["extra"].shape == (3, 1)


def test_several_actions_are_returned_as_a_tuple():
    env = Several()
    button, force = torch.ones(1, dtype=torch.int64), torch.full((2,), 0.5)

    data = env.rollout(3, lambda count, twice: (button, force))

    assert data["button"].flatten().tolist() == [1, 1, 1]
    assert data["deep", "force"].unique().tolist() == [0.5]
    with pytest.raises(TypeError, match=r"returned 1 values.*button.*Return one tensor"):
        env.rollout(3, lambda count, twice: button)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.zeros(3, 1), r"holds a tensor of shape \(3, 1\).*takes \(2, 1\).*Pass one value"),
        (torch.zeros(1, 2), r"holds a tensor of shape \(1, 2\).*takes \(2, 1\).*Pass one value"),
        ((torch.zeros(2, 1),) * 2, r"holds 2 values.*\['action'\]\. Pass one tensor"),
        ("left", r"holds 'left', of type str.*Pass a tensor"),
        (TensorDict({"action": torch.zeros(3, 1)}, [3]), r"batch size \(3,\).*\(2,\)\. Pass one"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_actions_that_do_not_fit_are_not_those_of_a_policy(two, item, message, number):
    fitting = torch.zeros(2, 1, dtype=torch.int64)

    with pytest.raises(PolicyError, match=rf"^item {number} of actions .*{message}"):
        two.rollout(3, actions=[fitting] * number + [item] * 2)


# --------------------------------------------------------------------------------- callback and data


@pytest.mark.parametrize(
    "make",
    [partial(GymEnv, "CartPole-v1"), partial(SerialEnv, 2, partial(Count, 9), use_buffers=True)],
    ids=["gym", "rows"],
)
def test_a_callback_is_heard_where_runs_are_made_at_once_without(make):
    env, calls = make(), []

    env.rollout(3, break_when_any_done=False, callback=lambda asked, td: calls.append(td.shape))
    env.close()

    assert calls == [env.batch_size] * 2


def test_a_callback_runs_after_every_step_but_the_last():
    env, calls = Count(50), []

    env.rollout(5, callback=lambda asked, td: calls.append((asked, td["next", "count"].item())))

    assert calls == [(env, 1), (env, 2), (env, 3), (env, 4)]


@pytest.mark.parametrize(
    "stop", [{}, {"break_when_any_done": False}, {"break_when_all_done": True}]
)
def test_what_a_callback_returns_is_dropped(stop):
    data = Count(50).rollout(3, callback=lambda env, td: TensorDict(), **stop)

    assert counts(data, "next") == [1, 2, 3]


def test_what_is_done_at_the_start_is_reset_first():
    env = Count(3)
    last = env.rollout(9)[..., -1]
    assert last["next", "done"].all()

    data = env.rollout(2, auto_reset=False, tensordict=env.step_mdp(last))

    assert counts(data) == [0, 1]


def test_three_rollouts_in_a_chain():
    env, td, seen = Count(1000), Count(1000).reset(), []

    for _ in range(3):
        data = env.rollout(100, break_when_any_done=False, auto_reset=False, tensordict=td)
        td = env.step_mdp(data[..., -1])
        seen += counts(data, "next")

    assert seen == list(range(1, 301))


def test_given_data_says_how_many_rows_an_unlocked_env_has():
    data = StatelessCount(9).rollout(3, tensordict=TensorDict(batch_size=[5]))

    assert data.shape == (5, 3)


@pytest.mark.parametrize("auto_reset", [True, False])
def test_given_data_is_not_written_to(auto_reset):
    env = StatelessCount(9)
    td = env.reset(TensorDict({"mine": torch.ones(5)}, [5]))
    before = td.clone()

    data = env.rollout(3, tensordict=td, auto_reset=auto_reset)

    assert set(td.keys()) == set(before.keys())
    assert (td == before).all()
    assert data["mine"].shape == (5, 3)


# ------------------------------------------------------------------------------------- the result


def test_a_rollout_is_dense_or_a_lazy_stack():
    assert type(Count(9).rollout(4)) is TensorDict
    assert type(Count(9).rollout(4, return_contiguous=False)) is LazyStackedTensorDict


@pytest.mark.parametrize(
    "stop", [{}, {"break_when_any_done": False}, {"break_when_all_done": True}]
)
def test_steps_of_unlike_shapes_make_a_lazy_stack_only(stop):
    env = Growing(4)

    with pytest.raises(RuntimeError, match=r"cannot be stacked.*return_contiguous=False"):
        env.rollout(3, return_contiguous=True, **stop)
    data = env.rollout(3, **stop)

    assert [step["history"].shape[0] for step in data.unbind(0)] == [1, 2, 3]
    assert [step["next", "history"].shape[0] for step in data.unbind(0)] == [2, 3, 4]


def test_words_are_stacked():
    data = Wordy().rollout(3)

    assert data["next", "word"] == ["one", "two", "three"]


def test_a_rollout_fills_what_was_allocated():
    env = Count(50)
    out = env.rollout(3).clone().zero_()

    data = env.rollout(3, out=out)

    assert data is out
    assert counts(out, "next") == [1, 2, 3]
    assert data.names == ["time"]


def test_a_shorter_rollout_fills_the_front():
    out = Count(50).rollout(5).clone().zero_()

    data = Count(2).rollout(5, out=out)

    assert data.shape == (2,)
    assert counts(out, "next") == [1, 2, 0, 0, 0]


def test_a_batch_fills_what_was_allocated(two):
    out = two.rollout(4, break_when_any_done=False).clone().zero_()

    data = two.rollout(4, break_when_any_done=False, out=out)

    assert data is out
    assert counts(out, "next") == [[1, 2, 1, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize("lazy", [False, True])
def test_the_last_step_can_be_marked_as_truncated(lazy):
    env = Count(50).add_truncated_keys()

    data = env.rollout(3, set_truncated=True, return_contiguous=not lazy)

    flags = {name: data["next", name].flatten().tolist() for name in env.done_keys}
    assert flags == {"truncated": [F, F, T], "done": [F, F, T], "terminated": [F, F, F]}


def test_only_levels_that_can_be_truncated_are_marked():
    data = Several(50).rollout(3, set_truncated=True)["next"]

    assert data["done"].flatten().tolist() == [F, F, T]
    assert not data["deep", "done"].any()


def test_the_rollout_of_a_step_counter():
    def make():
        return TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(20))

    batch = SerialEnv(3, make)

    assert make().rollout(1000).shape == (20,)
    assert batch.rollout(1000).shape == (3, 20)
    batch.close()


# ------------------------------------------------------------------------------------------ devices


class OnDevice(nn.Module):
    """A policy that computes where its buffer is, and says where its input was."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("one", torch.ones(1, dtype=torch.int64, device=device))
        self.seen = []

    def forward(self, td):
        self.seen.append(td.device)
        return td.set("action", self.one)


def test_data_goes_to_the_policy():  # without a second device: data of an env may be on none
    cast, as_it_is = OnDevice("cpu"), OnDevice("cpu")

    Count(50).rollout(3, cast, auto_cast_to_device=True)
    Count(50).rollout(3, as_it_is)

    assert cast.seen == [torch.device("cpu")] * 3
    assert as_it_is.seen == [None] * 3


@pytest.mark.parametrize("auto_reset", [False, True])
def test_data_that_names_no_device_is_taken_to_that_of_the_env(auto_reset):
    env = Count(50, device="cpu")
    root = env.reset(TensorDict(batch_size=[]))

    data = env.rollout(2, tensordict=root, auto_reset=auto_reset)

    assert root.device is None
    assert data.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_another_device_acts():
    env = Count(50, device="cpu")
    policy = OnDevice("cuda")

    data = env.rollout(3, policy, auto_cast_to_device=True)

    assert [device.type for device in policy.seen] == ["cuda"] * 3
    assert data.device == data["action"].device == torch.device("cpu")


# ------------------------------------------------------------------------------ what a policy remembers


def remembering(*place: str):
    """Make a policy that counts what it has seen, in an entry that no spec declares."""

    def act(td: TensorDictBase) -> TensorDictBase:
        key = (*place, "seen")
        if td.get(key, None) is None:
            td.set(key, torch.zeros(*td.batch_size, 1))
        return td.set("action", torch.zeros(*td.batch_size, 1, dtype=torch.int64)).set(
            ("next", *key), td.get(key) + 1
        )

    return act


@pytest.mark.parametrize("stepwise", [False, True])
def test_what_a_policy_remembers_is_zero_where_an_episode_begins(two, stepwise):
    callback = (lambda env, td: None) if stepwise else None

    data = two.rollout(6, remembering(), callback=callback, break_when_any_done=False)
    one = Count(2).rollout(5, remembering(), callback=callback, break_when_any_done=False)

    assert data["seen"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1]]
    assert data["next", "seen"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 1, 2]]
    assert one["seen"].squeeze(-1).tolist() == [0, 1, 0, 1, 0]


def test_what_stays_at_the_root_is_left_alone_by_resets(two):
    td = two.reset().set("task", torch.tensor([[3.0], [4.0]]))

    data = two.rollout(5, remembering(), tensordict=td, auto_reset=False, break_when_any_done=False)

    assert data["task"].squeeze(-1).tolist() == [[3.0] * 5, [4.0] * 5]


@pytest.mark.parametrize("batch", [[], [2]])
def test_without_flags_at_the_root_a_rollout_goes_on_until_every_group_is_done(batch):
    assert TwoTeams((2, 3), batch_size=batch).rollout(9).shape == (*batch, 3)


@pytest.mark.parametrize("stop", [{}, {"break_when_any_done": False}], ids=["any", "never"])
@pytest.mark.parametrize(
    "make",
    [partial(GymEnv, "CartPole-v1"), partial(SerialEnv, 2, partial(Count, 9), use_buffers=True)],
    ids=["gym", "rows"],
)
def test_a_policy_acts_once_a_step_also_where_it_writes_under_next(make, stop):
    env, calls = make(), []

    def act(td):
        calls.append(td.copy())
        return env.rand_action(td).set(("next", "note"), torch.ones(*td.batch_size, 1))

    env.rollout(3, act, **stop)
    env.close()

    assert len(calls) == 3


@pytest.mark.parametrize(
    "make",
    [partial(Count, 9), partial(SerialEnv, 2, partial(Count, 9), use_buffers=True)],
    ids=["steps", "rows"],
)
def test_transitions_are_kept_where_the_caller_wants_them(make):
    env = make()

    stored, left = (
        env.rollout(3, break_when_any_done=False, storing_device=device) for device in ("cpu", None)
    )
    env.close()

    assert stored.device == stored["next"].device == torch.device("cpu")
    assert left.device is None
    assert (stored["next", "count"] == left["next", "count"]).all()


class Hollow(Count):
    """Shows a node that holds no entries, and gives one beside its reward."""

    def __init__(self):
        super().__init__(5)
        self.set_spec_lock_(False)
        self.observation_spec["outer"] = Composite(inner=Composite())
        self.reward_spec = Composite(reward=Unbounded((1,)), more=Composite())

    def _reset(self, tensordict=None):
        return super()._reset(tensordict).set("outer", TensorDict({"inner": {}}))

    def _step(self, tensordict):
        made = super()._step(tensordict).set("outer", TensorDict({"inner": {}}))
        return made.set("more", TensorDict({}))


@pytest.mark.parametrize("rule", [True, False])
def test_nodes_without_entries_last_through_a_rollout(rule):
    data = Hollow().rollout(3, break_when_any_done=rule)

    for held in (data, data["next"]):
        assert held["outer", "inner"].is_empty() and held["outer", "inner"].batch_size == (3,)
    assert data["next", "more"].is_empty() and "more" not in data.keys()
