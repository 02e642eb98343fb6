"""Sub-envs that differ: other keys, shapes, actions or bounds, in one batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule

from envkit import (
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    ObservationNorm,
    ParallelEnv,
    SelectTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    check_env_specs,
    compile_policy,
)
from envkit.env.base import EnvBase
from envkit.errors import InputError, OutOfSpecError, SpecError, WorkerError
from envkit.specs import (
    Bounded,
    Composite,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
)
from tests.zoo.envs import Count, StatelessCount

F, T = False, True
ON_BOTH = {"serial": SerialEnv, "parallel": partial(ParallelEnv, num_processes=2)}


class Features(Count):
    """A Count that shows ``width`` features, one entry of its own, and takes ``actions`` numbers."""

    def __init__(self, width: int, name: str, n: int = 9, actions: int = 1, high: float = 1.0):
        super().__init__(n)
        self.width, self.name = width, name
        self.observation_spec = Composite(
            {"obs": Unbounded((width,)), name: Unbounded((1,)), "deep": {"c": Unbounded((width,))}}
        )
        self.action_spec = Bounded(0.0, high, (actions,))
        self.action = torch.zeros(actions)

    def _out(self):
        td = super()._out().exclude("count")
        seen = torch.full((self.width,), float(self.c))
        return td.update({"obs": seen, self.name: torch.ones(1), "deep": {"c": seen + 0.5}})

    def _step(self, td):
        self.action = td["action"]
        return super()._step(td).set("reward", td["action"].sum().reshape(1))


OTHER_KEYS = [partial(Features, 2, "a", 2), partial(Features, 3, "b", 4)]
OTHER_ACTIONS = [partial(Features, 2, "a", 2, 1), partial(Features, 2, "a", 4, 3)]
OTHER_BOUNDS = [partial(Features, 2, "a", 2, 1, 1.0), partial(Features, 2, "a", 4, 1, 9.0)]


@pytest.fixture(scope="module", params=ON_BOTH)
def unlike(request):
    env = ON_BOTH[request.param](2, OTHER_KEYS)
    yield env
    env.close()


@pytest.fixture(scope="module", params=ON_BOTH)
def unlike_actions(request):
    env = ON_BOTH[request.param](2, OTHER_ACTIONS)
    yield env
    env.close()


@pytest.fixture(scope="module", params=ON_BOTH)
def unlike_bounds(request):
    env = ON_BOTH[request.param](2, OTHER_BOUNDS, use_buffers=True)
    yield env
    env.close()


@pytest.fixture(scope="module")
def twins():
    pair = [make(3, [*OTHER_KEYS, OTHER_KEYS[0]]) for make in ON_BOTH.values()]
    yield pair
    for env in pair:
        env.close()


def is_equal(left: LazyStackedTensorDict, right: LazyStackedTensorDict) -> bool:
    """Compare the rows of lazy stacks, key by key and bit by bit."""
    return len(left) == len(right) and all(
        set(one.keys(True, True)) == set(other.keys(True, True)) and bool((one == other).all())
        for one, other in zip(left.unbind(0), right.unbind(0), strict=True)
    )


def private_keys(td: TensorDict) -> list:
    return [
        key for row in td.unbind(0) for key in row.keys(True) if {"_step", "_reset"} & {key, *key}
    ]


# -------------------------------------------------------------------------------- specs and layout


def test_specs_are_stacks_of_those_of_the_sub_envs(unlike):
    assert isinstance(unlike.observation_spec, StackedComposite)
    assert set(unlike.observation_spec.keys()) == {"obs", "deep"}
    assert unlike.observation_spec["obs"].shape == (2, -1)
    assert "a" in unlike.observation_spec[0].keys()
    assert unlike.batch_size == (2,)
    assert unlike.share_individual_td is True
    assert unlike.use_buffers is False


def test_the_specs_say_what_comes_out(unlike, unlike_actions, unlike_bounds):
    for env in (unlike, unlike_actions, unlike_bounds):
        check_env_specs(env, seed=0)


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_a_wrong_spec_is_reported_for_the_env_that_has_it(make):
    class Liar(Features):
        def _out(self):
            return super()._out().set("obs", torch.zeros(3, dtype=torch.float64))

    env = make(2, [partial(Features, 2, "a"), partial(Liar, 3, "b")])

    with pytest.raises(OutOfSpecError, match=r"'obs' has dtype torch.float64.*\(env 1\)") as info:
        check_env_specs(env)
    env.close()

    assert "(env 0)" not in str(info.value)


def test_the_fake_step_has_the_layout_of_a_rollout(unlike):
    fake, real = unlike.fake_tensordict(), unlike.rollout(1)[:, 0]

    assert isinstance(fake, LazyStackedTensorDict)
    for row in range(2):
        assert set(fake[row].keys(True, True)) == set(real[row].keys(True, True))
        assert all(
            fake[row][key].shape == real[row][key].shape for key in fake[row].keys(True, True)
        )


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_dense_results_of_unlike_sub_envs_are_refused(make):
    with pytest.raises(ValueError, match=r"'obs' is \(2,\).*share_individual_td=None"):
        make(2, OTHER_KEYS, share_individual_td=False).reset()


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_asking_for_rows_for_unlike_sub_envs_warns(make):
    env = make(2, OTHER_KEYS, use_buffers=True)

    with pytest.warns(UserWarning, match="differ in keys, shapes or dtypes"):
        env.start()
    env.close()


# --------------------------------------------------------------------------------------- rollouts


def test_a_rollout_shows_shared_keys_and_each_row_its_own(unlike):
    data = unlike.rollout(4, break_when_any_done=False)

    assert isinstance(data, LazyStackedTensorDict)
    assert data.shape == (2, 4)
    assert {"obs", "action", "done", "terminated", "next", "deep"} == set(data.keys())
    assert data[0]["obs"].shape == (4, 2)
    assert data[0]["a"].shape == (4, 1)
    assert data[1]["obs"].shape == (4, 3)
    assert "a" not in data[1].keys()
    assert data[1]["next", "deep", "c"].shape == (4, 3)


def test_a_rollout_ends_with_the_first_episode(unlike):
    assert unlike.rollout(9).shape == (2, 2)


def test_finished_sub_envs_repeat_their_last_transition(unlike):
    data = unlike.rollout(9, break_when_all_done=True)

    assert data.shape == (2, 4)
    assert data[0]["next", "obs"][:, 0].tolist() == [1, 2, 2, 2]
    assert data[1]["next", "obs"][:, 0].tolist() == [1, 2, 3, 4]
    assert data[0]["obs"][:, 0].tolist() == [0, 1, 1, 1]
    assert list(unlike.c) == [2, 4]
    assert not private_keys(data)


def test_finished_sub_envs_begin_anew_each_for_itself(unlike):
    data = unlike.rollout(5, break_when_any_done=False)

    assert data[0]["next", "obs"][:, 0].tolist() == [1, 2, 1, 2, 1]
    assert data[1]["next", "obs"][:, 0].tolist() == [1, 2, 3, 4, 1]
    assert data[0]["obs"][:, 0].tolist() == [0, 1, 0, 1, 0]
    assert data[1]["deep", "c"][:, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 0.5]


def test_a_lazy_rollout_holds_one_stack_for_each_step(unlike):
    data = unlike.rollout(3, break_when_any_done=False, return_contiguous=False)

    assert data.shape == (2, 3)
    assert data[..., 1][1]["obs"].tolist() == [1, 1, 1]


# -------------------------------------------------------------------------------- masks and resets


def test_only_selected_sub_envs_step(unlike):
    td = unlike.step_mdp(unlike.rand_step(unlike.reset()))

    out = unlike.step(unlike.rand_action(td).set("_step", torch.tensor([F, T])))
    nothing = unlike.step(
        unlike.rand_action(unlike.step_mdp(out)).set("_step", torch.tensor([F, F]))
    )

    assert out[0]["next", "obs"].tolist() == [1, 1]
    assert out[1]["next", "obs"].tolist() == [2, 2, 2]
    assert out["next", "reward"][0].item() == 0
    assert nothing[1]["next", "obs"].tolist() == [2, 2, 2]
    assert list(unlike.c) == [1, 2]
    assert not private_keys(out)


def test_skipped_values_are_zero_where_the_input_lacks_them(unlike):
    td = unlike.step_mdp(unlike.rand_step(unlike.reset()))
    td[0].del_("obs")

    out = unlike.step(unlike.rand_action(td).set("_step", torch.tensor([F, T])))

    assert out[0]["next", "obs"].tolist() == [0, 0]
    assert out[0]["next", "deep", "c"].tolist() == [1.5, 1.5]


def test_only_selected_sub_envs_are_reset(unlike):
    td = unlike.step_mdp(unlike.rand_step(unlike.reset()))

    out = unlike.reset(td.set("_reset", torch.tensor([[T], [F]])))

    assert out is td
    assert out[0]["obs"].tolist() == [0, 0]
    assert out[1]["obs"].tolist() == [1, 1, 1]
    assert list(unlike.c) == [0, 1]
    assert not private_keys(out)


def test_a_mask_alone_gives_the_newest_data_of_all(unlike):
    unlike.rand_step(unlike.reset())

    out = unlike.reset(TensorDict({"_reset": torch.tensor([[F], [T]])}, [2]))

    assert isinstance(out, LazyStackedTensorDict)
    assert out[0]["obs"].tolist() == [1, 1]
    assert out[0]["a"].tolist() == [1]
    assert out[1]["deep", "c"].tolist() == [0.5] * 3


def test_what_a_caller_writes_into_given_data_stays_his_own(unlike):
    mask = torch.tensor([[F], [T]])
    root = unlike.reset()
    root.set("mine", torch.zeros(2))
    newest = unlike.reset(TensorDict({"_reset": mask}, [2]))

    following = unlike.rand_step(root.exclude("mine"))["next"]
    for row in following.unbind(0):
        row["done"].fill_(True)
    again = unlike.reset(TensorDict({"_reset": mask}, [2]))

    assert "mine" not in newest[0].keys()
    assert not again[0]["done"]


@pytest.mark.parametrize("masked", [False, True])
def test_parallel_gives_the_bits_of_serial(twins, masked):
    results = []
    for env in twins:
        env.set_seed(4)
        generator = torch.Generator().manual_seed(1)
        td, seen = env.reset(), []
        for _ in range(12):
            td = env.rand_action(td)
            if masked:
                td.set("_step", torch.rand(3, generator=generator) < 0.6)
            data, td = env.step_and_maybe_reset(td)
            seen += [data.clone(), td.clone()]
        results.append(seen)

    assert all(map(is_equal, *results))


# ----------------------------------------------------------------------------- actions and bounds


def test_actions_of_other_shapes_reach_their_sub_envs(unlike_actions):
    env = unlike_actions
    td = env.rand_action(env.reset())
    td[0]["action"], td[1]["action"] = torch.tensor([0.25]), torch.tensor([0.5, 0.75, 1.0])

    out = env.step(td)

    assert isinstance(env.action_spec, Stacked)
    assert env.action_spec.shape == (2, -1)
    assert out["next", "reward"].tolist() == [[0.25], [2.25]]
    assert [action.tolist() for action in env.action] == [[0.25], [0.5, 0.75, 1.0]]


def test_random_actions_of_other_shapes_need_no_data(unlike_actions):
    drawn = unlike_actions.rand_action()

    assert drawn[0]["action"].shape == (1,)
    assert drawn[1]["action"].shape == (3,)
    assert unlike_actions.rollout(3, break_when_any_done=False)[1]["action"].shape == (3, 3)


def test_a_policy_may_give_a_lazy_stack_of_actions(unlike_actions):
    env = unlike_actions

    data = env.rollout(2, lambda td: td.update(env.full_action_spec.one()))

    assert data["next", "reward"][:, 0].tolist() == [[1.0], [3.0]]


def test_other_bounds_alone_leave_the_data_dense(unlike_bounds):
    env = unlike_bounds

    data = env.rollout(60, break_when_any_done=False)

    assert env.use_buffers is True
    assert env.share_individual_td is False
    assert type(data) is TensorDict
    assert isinstance(env.action_spec, Stacked)
    assert env.action_spec.shape == (2, 1)
    assert type(env.observation_spec) is Composite
    assert data["action"][0].max() <= 1 < data["action"][1].max()


# ---------------------------------------------------------------------------- other combinations


class Deep(EnvBase):
    """Batch-unlocked, of ``width`` features; the state is in the data."""

    _batch_locked = False

    def __init__(self, width: int, batch_size=(2,)):
        super().__init__(batch_size=batch_size)
        bs = self.batch_size
        self.observation_spec = Composite(x=Unbounded((*bs, width)), shape=bs)
        self.state_spec = Composite(x=Unbounded((*bs, width)), shape=bs)
        self.action_spec = Unbounded((*bs, 1))
        self.width = width

    def _reset(self, td, **kwargs):
        batch = self.batch_size if td is None else td.batch_size
        return TensorDict({"x": torch.zeros(*batch, self.width)}, batch)

    def _step(self, td):
        x = td["x"] + 1
        return TensorDict({"x": x, "terminated": x[..., :1] > 2}, td.batch_size)

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_unlike_sub_envs_may_have_a_batch_of_their_own(make):
    env = make(2, [partial(Deep, 1), partial(Deep, 3)])

    td = env.rand_action(env.reset())
    out = env.step(td.set("_step", torch.tensor([[T, F], [F, F]])))
    following = env.rollout(4, tensordict=None, break_when_any_done=False)
    check_env_specs(env)
    env.close()

    assert env.batch_size == (2, 2)
    assert out[0]["next", "x"].tolist() == [[1], [0]]
    assert out[1]["next", "x"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert following.shape == (2, 2, 4)
    assert following[1]["next", "x"][0, :, 2].tolist() == [1, 2, 3, 1]


def test_masks_of_unlike_sub_envs_with_a_batch_pass_transforms():
    env = TransformedEnv(SerialEnv(2, [partial(Deep, 1), partial(Deep, 3)]), lambda td: td)

    out = env.step(env.rand_action(env.reset()).set("_step", torch.tensor([[T, F], [T, T]])))

    assert out["next"].batch_size == (2, 2)
    assert out[0]["next", "x"].tolist() == [[1], [0]]
    assert out[1]["next", "x"].tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("where", ON_BOTH)
def test_gradients_flow_through_unlike_sub_envs_in_this_process_only(where):
    env = ON_BOTH[where](2, OTHER_KEYS)
    action = torch.full((2, 1), 0.5, requires_grad=True)

    data, following = env.step_and_maybe_reset(env.reset().set("action", action))
    env.close()

    assert data["next", "reward"].requires_grad is (where == "serial")
    assert not any(row["obs"].requires_grad for row in following.unbind(0))


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_an_unlike_sub_env_that_raises_is_named(make):
    class Broken(Features):
        def _step(self, td):
            raise ArithmeticError("broke")

    env = make(2, [OTHER_KEYS[0], partial(Broken, 3, "b")])

    with pytest.raises(WorkerError, match=r"row 1\b.*broke"):
        env.rollout(2)
    env.close(raise_if_closed=False)


def test_sub_envs_of_one_task_among_others_share_its_metadata():
    env = SerialEnv(3, [partial(StatelessCount, 5), OTHER_KEYS[0], OTHER_KEYS[0]])

    assert env.rollout(2)[2]["obs"].shape == (2, 2)
    assert env.observation_spec[1] == env.observation_spec[2]


class Takes(Count):
    """A Count that takes actions of a spec."""

    def __init__(self, spec):
        super().__init__()
        self.action_spec = spec


@pytest.mark.parametrize("choice_row", [0, 1])
def test_an_action_is_held_to_the_kind_of_its_row_where_rows_share_a_form(choice_row):
    specs = [Bounded(0, 5, (3,), dtype=torch.int64)] * 2
    specs[choice_row] = OneHot(3, dtype=torch.int64)
    env = SerialEnv(2, [partial(Takes, spec) for spec in specs], use_buffers=True)
    td = env.reset()
    td["action"] = torch.tensor([[0.0, 2.0, 0.0]] * 2)

    with pytest.raises(InputError, match=rf"'action' of row {choice_row} .* must be one-hot"):
        env.step(td)
    td["action"][choice_row] = torch.tensor([0.0, 1.0, 0.0])
    env.step(td)
    td["action"][1 - choice_row] = 0.5
    with pytest.raises(InputError, match=r"the env takes torch\.int64"):
        env.step(td)
    env.close()


class Seated(Takes):
    """Takes actions of a spec, and shows ``seat``."""

    def __init__(self, seat, spec):
        self.seat = torch.tensor([float(seat)])
        super().__init__(spec)
        self.observation_spec = Composite(
            count=self.observation_spec["count"], seat=Unbounded((1,))
        )

    def _out(self):
        return super()._out().set("seat", self.seat)


class BySeat(torch.nn.Module):
    """Gives a row of integers, in one-hot form where the seat is 1."""

    def forward(self, seat):
        return torch.cat([torch.zeros_like(seat), 3 - 2 * seat, torch.zeros_like(seat)], -1).long()


@pytest.mark.parametrize("choice_row", [0, 1])
def test_what_a_compiled_policy_writes_is_held_to_the_kind_of_its_row(choice_row):
    specs = [Bounded(0, 5, (3,), dtype=torch.int64)] * 2
    specs[choice_row] = OneHot(3, dtype=torch.int64)
    policy = compile_policy(TensorDictModule(BySeat(), ["seat"], ["action"]))

    def rolled(seats):
        env = SerialEnv(2, [*map(partial(partial, Seated), seats, specs)], use_buffers=True)
        return env.rollout(3, policy, break_when_any_done=False)["action"]

    seats = [float(row == choice_row) for row in range(2)]
    actions = rolled(seats)
    assert actions[choice_row].tolist() == [[0, 1, 0]] * 3
    assert actions[1 - choice_row].tolist() == [[0, 3, 0]] * 3
    with pytest.raises(InputError, match=rf"'action' of row {choice_row} .* must be one-hot"):
        rolled([0.0, 0.0])


class Own(EnvBase):
    """Two agents that see the count, and each of them under a name of its own too."""

    def __init__(self, end: int = 4):
        super().__init__()
        seen = [
            Composite({"count": Unbounded((1,)), f"of_{i}": Unbounded((i + 1,))}) for i in range(2)
        ]
        self.observation_spec = Composite(agents=torch.stack(seen, 0))
        self.action_spec = Composite(agents=Composite(action=Unbounded((2, 1)), shape=(2,)))
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        self.count, self.end = 0, end

    def _seen(self):
        parts = [
            {
                "count": torch.full((1,), 1.0 * self.count),
                f"of_{i}": torch.full((i + 1,), 1.0 * self.count),
            }
            for i in range(2)
        ]
        return LazyStackedTensorDict(*(TensorDict(part, []) for part in parts), stack_dim=0)

    def _reset(self, td, **kwargs):
        self.count = 0
        return TensorDict({"agents": self._seen()}, [])

    def _step(self, td):
        self.count += 1
        agents = self._seen()
        agents["reward"] = torch.ones(2, 1)
        ended = torch.tensor([self.count >= self.end])
        return TensorDict({"agents": agents, "done": ended, "terminated": ended.clone()}, [])

    def _set_seed(self, seed):
        pass


def own_counts(td) -> list[list[float]]:
    """Give what each agent sees under its own name, first number, by flattened rows."""
    agents = td.get("agents")
    parts = agents.unbind(agents.batch_dims - 1)
    return [part.get(f"of_{i}")[..., 0].flatten().tolist() for i, part in enumerate(parts)]


@pytest.mark.parametrize("make", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_entries_of_one_agent_alone_are_in_all_that_a_pool_gives(make):
    with make(2, [partial(Own, 2), Own]) as env:
        check_env_specs(env)
        root = env.reset()
        held = env.step(env.rand_action(root.clone()).set("_step", torch.tensor([True, False])))
        data = env.rollout(4, break_when_any_done=False)
        counted = TransformedEnv(env, StepCounter()).rollout(2)

    assert own_counts(root) == [[0, 0]] * 2
    assert own_counts(held["next"]) == [[1, 0]] * 2
    assert own_counts(data) == [[0, 1, 0, 1, 0, 1, 2, 3]] * 2
    assert own_counts(data["next"]) == [[1, 2, 1, 2, 1, 2, 3, 4]] * 2
    assert own_counts(counted) == [[0, 1] * 2] * 2


def test_entries_of_one_agent_alone_have_no_rows_in_memory():
    env = SerialEnv(2, Own, use_buffers=True)

    with pytest.warns(UserWarning, match="is that of some agents alone"):
        root = env.reset()

    assert own_counts(root) == [[0, 0]] * 2 and env.use_buffers is False
    env.close()


def test_an_env_that_stands_still_shows_the_entries_of_one_agent_alone():
    env = Own()
    root = env.step_mdp(env.step(env.rand_action(env.reset())))

    held = env.step(env.rand_action(root).set("_step", torch.tensor(False)))

    assert own_counts(held["next"]) == [[1]] * 2


def wide(size: int) -> TransformedEnv:
    """A count of another size in each env, beside one of the same size."""
    repeated = CatFrames(size, -1, ["count"], ["wide"])
    return TransformedEnv(Count(5), Compose(repeated, SelectTransform("count", "wide")))


def test_entries_of_unlike_shapes_are_changed_inside_their_envs():
    makers = [partial(wide, 2), partial(wide, 3)]
    scaled = TransformedEnv(SerialEnv(2, makers), ObservationNorm(0.0, 2.0, ["count"]))
    check_env_specs(scaled, return_contiguous=False)

    for transform in (
        CatFrames(3, -1, ["wide"], ["out"], padding="constant"),
        ClipTransform(["wide"], ["out"], low=-0.5, high=0.5),
        ObservationNorm(0.5, 2.0, ["wide"], ["out"]),
        UnsqueezeTransform(-1, in_keys=["wide"], out_keys=["out"]),
        VecNorm(["wide", "reward"], ["out", "r"]),
    ):
        env = TransformedEnv(SerialEnv(2, makers), transform)
        with pytest.raises(SpecError, match=r"'wide', whose shape differs.*into each of them"):
            _ = env.observation_spec
    joined = CatTensors(["wide", "count"], "out")
    with pytest.raises(SpecError, match="'wide', whose shape differs"):
        _ = TransformedEnv(SerialEnv(2, makers), joined).observation_spec
