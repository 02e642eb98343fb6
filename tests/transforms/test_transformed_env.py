"""Transforms between an env and its user: order of the hooks, specs, masks, ownership.

Checklist rows: T01, T02, T12, M30, M35, P10.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import (
    ActionScaling,
    Bounded,
    Compose,
    Composite,
    ExpandAs,
    GymEnv,
    MixedEnv,
    ModuleTransform,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    ClosedEnvError,
    SpecLockedError,
)
from tests.zoo.envs import Count, StatelessCount

make_count = partial(Count, 5)


def add_100(td):
    return td.set("count", td["count"] + 100)


def double(td):
    return td.set("count", td["count"] * 2)


class Scaled(Transform):
    """Shows the count in float32, ten times as large, under the same name: value-wise."""

    def __init__(self, **kwargs):
        super().__init__(["count"], **kwargs)

    def _apply_transform(self, value):
        return value.float() * 10

    def transform_observation_spec(self, observation_spec):
        model = observation_spec["count"]
        observation_spec["count"] = Unbounded(model.shape, dtype=torch.float32)
        return observation_spec


class Halved(Transform):
    """Takes actions twice as large as those of the env: an inverse pass."""

    def __init__(self):
        super().__init__(in_keys_inv=["action"])

    def _inv_apply_transform(self, value):
        return value / 2

    def transform_action_spec(self, action_spec):
        leaf = action_spec["action"]
        action_spec["action"] = Bounded(leaf.low * 2, leaf.high * 2, leaf.shape, dtype=leaf.dtype)
        return action_spec


class Mean(Transform):
    """Keeps the running sum of the counts it has seen in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0

    def _call(self, next_td):
        self.calls += 1
        self.total += next_td["count"].sum()
        return next_td


class Recorder(Transform):
    """Notes which hook ran, under a name."""

    def __init__(self, name, notes):
        super().__init__()
        self.name, self.notes = name, notes

    def _note(self, hook, td):
        self.notes.append((hook, self.name))
        return td

    def _call(self, next_td):
        return self._note("call", next_td)

    def _reset(self, td, td_reset):
        return self._note("reset", td_reset)

    def _inv_call(self, td):
        return self._note("inv", td)

    def _reset_env_preprocess(self, td):
        return self._note("preprocess", td)


class SkipRows(Transform):
    """Writes a `_step` mask in the inverse pass."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def _inv_call(self, td):
        return td.set("_step", self.mask)

    def _call(self, next_td):
        return next_td


# ------------------------------------------------------------------------------------------- order


def test_the_forward_pass_runs_first_to_last_and_the_way_in_last_to_first():
    notes = []
    env = TransformedEnv(make_count(), Compose(Recorder("a", notes), Recorder("b", notes)))

    env.rand_step(env.reset())

    assert notes == [
        *[("preprocess", "b"), ("preprocess", "a"), ("reset", "a"), ("reset", "b")],
        *[("inv", "b"), ("inv", "a"), ("call", "a"), ("call", "b")],
    ]


def test_a_composed_reset_is_the_later_function_of_the_earlier():
    assert TransformedEnv(make_count(), Compose(add_100, double)).reset()["count"] == 200
    assert TransformedEnv(make_count(), Compose(double, add_100)).reset()["count"] == 100


def test_a_function_sees_resets_and_steps_but_not_inputs():
    env = make_count().append_transform(add_100)

    data = env.rollout(3)

    assert data["count"].flatten().tolist() == [100, 101, 102]
    assert data["next", "count"].flatten().tolist() == [101, 102, 103]
    assert "CallableTransform(add_100)" in repr(env)
    check_env_specs(env)


def test_a_function_on_a_gymnasium_env():
    env = GymEnv("CartPole-v1").append_transform(
        lambda td: td.set("observation", td["observation"] - 1)
    )
    bare = GymEnv("CartPole-v1")
    env.set_seed(0)
    bare.set_seed(0)

    assert env.reset()["observation"].equal(bare.reset()["observation"] - 1)


def test_a_function_must_return_a_tensordict():
    env = make_count().append_transform(lambda td: None)

    with pytest.raises(ArgumentError, match="must return a TensorDict"):
        env.reset()


def test_the_inverse_pass_does_not_change_what_the_caller_passed():
    env = TransformedEnv(GymEnv("Pendulum-v1"), Halved())
    td = env.rand_action(env.reset())
    td["action"] = torch.tensor([3.0])

    out = env.step(td)

    assert out is td
    assert td["action"] == 3.0
    assert env.base_env.action_spec.high == 2.0 and env.action_spec.high == 4.0
    check_env_specs(env)


def test_entries_preset_under_next_win_over_transformed_ones():
    env = make_count().append_transform(add_100)
    td = env.rand_action(env.reset())
    td["next"] = TensorDict({"count": torch.tensor([7])})

    assert env.step(td)["next", "count"] == 7


def test_a_value_wise_transform_needs_no_reset_of_its_own():
    env = TransformedEnv(make_count(), Scaled())

    data = env.rollout(2)

    assert data["count"].flatten().tolist() == [0.0, 10.0]
    check_env_specs(env)


# ------------------------------------------------------------------------------------------- specs


class Undeclared(Transform):
    def __init__(self, **kwargs):
        super().__init__("count", "cuont", **kwargs)

    def _apply_transform(self, value):
        return value


def test_an_entry_that_no_spec_declares_is_named_when_specs_are_read():
    env = TransformedEnv(make_count(), Undeclared())

    with pytest.raises(KeyError, match=r"'cuont'.*no spec declares it"):
        _ = env.observation_spec


def test_a_missing_in_key_is_an_error_unless_it_is_tolerated():
    class Absent(Transform):
        def _apply_transform(self, value):
            return value

    td = TensorDict({"count": torch.tensor([1])})
    transform = Absent("cuont")

    with pytest.raises(KeyError, match=r"reads 'cuont'.*'count'"):
        transform(td)
    transform.missing_tolerance = True
    assert transform(td) is td


def test_specs_are_read_again_when_the_list_changes():
    env = TransformedEnv(make_count())
    assert env.observation_spec["count"].dtype == torch.int64

    env.append_transform(Scaled())

    assert env.observation_spec["count"].dtype == torch.float32
    env.transform.pop()
    assert env.observation_spec["count"].dtype == torch.int64
    assert env.base_env.observation_spec["count"].dtype == torch.int64


def test_what_the_env_lacks_is_asked_of_the_base_env():
    env = TransformedEnv(TransformedEnv(make_count()))

    assert env.n == 5 and env.hello(3) == 8
    with pytest.raises(AttributeError, match="nope"):
        _ = env.nope


def test_a_property_that_fails_is_not_answered_by_the_base_env():
    class Broken(Transform):
        def transform_observation_spec(self, observation_spec):
            return observation_spec.no_such_method()

    env = TransformedEnv(make_count(), Broken())

    with pytest.raises(AttributeError, match="no_such_method"):
        _ = env.observation_spec


# --------------------------------------------------------------------------------------- ownership


def test_a_transform_has_one_parent():
    transform = Scaled()
    TransformedEnv(make_count(), transform)

    with pytest.raises(AttributeError, match="clone"):
        TransformedEnv(make_count(), transform)
    TransformedEnv(make_count(), transform.clone())
    transform.reset_parent()
    TransformedEnv(make_count(), transform)


def test_a_clone_shares_buffers_and_has_no_parent():
    mean = Mean()
    env = TransformedEnv(make_count(), mean)

    twin = mean.clone()
    env.rollout(3)

    assert twin.total is mean.total and twin.total == 6
    assert twin.parent is None and twin.container is None
    assert mean.container is env


def test_the_parent_is_the_env_as_seen_before_the_transform():
    first, second, third = Scaled(), Mean(), Mean()
    env = TransformedEnv(make_count(), Compose(first, Compose(second, third)))

    assert first.parent.base_env is env.base_env and not list(first.parent.transform)
    assert second.parent.observation_spec["count"].dtype == torch.float32
    assert [type(t) for t in third.parent.transform.flat()] == [Scaled, Mean]
    assert third.container is env


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_of_an_env_owns_copies_of_its_transforms(copied):
    env = TransformedEnv(make_count(), Compose(Mean(), add_100))

    twin = copied(env)
    twin.rollout(3)

    assert twin.transform[0].container is twin and env.transform[0].container is env
    assert twin.transform[0].total == 6 and env.transform[0].total == 0


def test_an_env_is_freed_with_its_last_reference():
    mean = Mean()
    env = TransformedEnv(make_count(), mean)
    env.rollout(2)

    del env

    assert mean.container is None


# ----------------------------------------------------------------------------------------- compose


def test_a_compose_is_a_list():
    a, b, c = Mean(), Mean(), Mean()
    both = Compose([a, b])
    both.insert(0, c)

    assert [*both] == [c, a, b] and len(both) == 3 and both[-1] is b
    assert isinstance(both[1:], Compose) and both[1:][0].total is a.total
    assert both.pop(0) is c and c._owner is None and len(both) == 2


@pytest.mark.parametrize(
    ("base", "fix"),
    [(3, "Pass one that is built"), (None, "is built"), (Count, r"Build one: Count\(")],
)
def test_what_is_no_env_cannot_be_wrapped(base, fix):
    with pytest.raises(ArgumentError, match=rf"base_env is .*must be an env of envkit\. .*{fix}"):
        TransformedEnv(base)


def test_a_compose_names_what_is_wrong():
    with pytest.raises(ValueError, match="index is 2, but there are 1 transforms"):
        Compose(Mean())[2]
    with pytest.raises(ValueError, match="index is 5"):
        Compose(Mean()).insert(5, Mean())
    with pytest.raises(ValueError, match="a transform is 3, of type int"):
        Compose(3)
    with pytest.raises(
        ArgumentTypeError, match=r"StepCounter is a class.*Make one: StepCounter\(\)"
    ):
        Compose(StepCounter)


def test_transforms_can_be_assigned_appended_and_inserted():
    env = TransformedEnv(make_count(), Scaled())
    given = env.transform

    assert env.transform[0] is given
    assert env.append_transform(double) is env
    assert env.insert_transform(0, add_100) is env
    assert env.reset()["count"] == 2000
    env.transform = add_100
    assert env.reset()["count"] == 100
    assert given.clone().parent is None


def test_nested_envs_apply_the_inner_transforms_first():
    env = TransformedEnv(TransformedEnv(make_count(), add_100), double)

    assert env.reset()["count"] == 200
    check_env_specs(env)


# ------------------------------------------------------------------------------------------ states


def test_the_state_of_the_transforms_is_saved_and_loaded():
    trained, fresh = (TransformedEnv(make_count(), Compose(Mean())) for _ in range(2))
    trained.rollout(3)

    fresh.load_state_dict(trained.state_dict())

    assert fresh.transform[0].total == 6
    trained.load_state_dict(trained.state_dict())
    assert list(trained.state_dict()) == ["transforms.0.total"]


def test_the_state_of_a_base_env_is_saved_too():
    inside, other = (
        SerialEnv(2, lambda: TransformedEnv(make_count(), Mean())).append_transform(add_100)
        for _ in range(2)
    )
    inside.rollout(3)
    other.reset()

    other.load_state_dict(inside.state_dict())

    states = other.base_env.state_dict()
    assert [states[f"worker{row}"]["total"].item() for row in range(2)] == [6, 6]


def test_training_mode_reaches_the_transforms():
    env = TransformedEnv(make_count(), Compose(Mean()))

    assert not env.eval().transform[0].training
    assert env.train().transform[0].training


def test_moving_an_env_moves_its_transforms():
    env = TransformedEnv(StatelessCount(5, device="cpu"), Mean())

    assert env.transform.total.device.type == "cpu" and env.to("cpu") is env

    assert env.to("meta") is env
    assert {leaf.device.type for leaf in env.specs.values(True, True)} == {"meta"}
    assert env.device.type == env.transform.total.device.type == "meta"


class OneRow(Transform):
    """Shows one env as a batch of one, on a device of that name."""

    def _call(self, next_td):
        return next_td.unsqueeze(0)

    def _reset(self, td, td_reset):
        return td_reset.unsqueeze(0)

    def _inv_call(self, td):
        return td.squeeze(0)

    _reset_env_preprocess = _inv_call

    def transform_input_spec(self, input_spec):
        return input_spec.unsqueeze(0)

    transform_output_spec = transform_input_spec

    def transform_env_batch_size(self, batch_size):
        return torch.Size((1, *batch_size))

    def transform_env_device(self, device):
        return torch.device("cpu")


def test_a_transform_may_change_batch_size_and_device():
    env = TransformedEnv(make_count(), OneRow())

    data = env.rollout(3)

    assert env.base_env.device is None and env.device == data.device == torch.device("cpu")
    assert env.batch_size == (1,) and data.shape == (1, 3)
    assert data["next", "count"].flatten().tolist() == [1, 2, 3]
    check_env_specs(env)


# ------------------------------------------------------------------------------------------- masks


def test_skipped_rows_repeat_their_outer_values_and_pass_no_transform_twice():
    env = SerialEnv(3, make_count).append_transform(add_100)
    td = env.rand_action(env.reset())
    td["_step"] = torch.tensor([True, False, True])

    out = env.step(td)

    assert out["next", "count"].flatten().tolist() == [101, 100, 101]
    assert out["next", "reward"].flatten().tolist() == [1, 0, 1]
    assert "_step" not in out.keys()


def test_a_transform_that_changes_the_dtype_survives_partial_steps_and_resets():
    env = TransformedEnv(SerialEnv(2, make_count), Scaled())
    root = env.step_mdp(env.rand_step(env.reset()))

    stepped = env.step(env.rand_action(root.clone()).set("_step", torch.tensor([True, False])))
    fresh = env.reset(root.clone().set("_reset", torch.tensor([True, False])))

    assert stepped["next", "count"].flatten().tolist() == [20.0, 10.0]
    assert fresh["count"].flatten().tolist() == [0.0, 10.0]
    assert stepped["next", "count"].dtype == fresh["count"].dtype == torch.float32


def test_example_a_holds_behind_a_transform():
    env = StatelessCount(50).append_transform(lambda td: td)
    td = TensorDict(
        {
            "count": [[10], [20], [30]],
            "done": [[False]] * 3,
            "action": [[0]] * 3,
            "_step": [True, False, True],
        },
        [3],
    )

    out = env.step(td)

    assert out["next", "count"].tolist() == [[11], [20], [31]]
    assert out["next", "reward"].tolist() == [[1.0], [0.0], [1.0]]


def test_rows_of_an_unlocked_env_that_are_skipped_reach_no_transform():
    mean = Mean()
    env = TransformedEnv(StatelessCount(50, batch_size=[3]), mean)
    td = env.rand_action(env.reset())
    mean.total.zero_()
    td["_step"] = torch.tensor([True, False, False])

    env.step(td)

    assert mean.total == 1


@pytest.mark.parametrize(
    "make", [make_count, partial(StatelessCount, 5), partial(SerialEnv, 2, make_count)]
)
def test_a_step_of_nothing_calls_neither_base_env_nor_transforms(make):
    env, mean = make(), Mean()
    mask = torch.zeros(env.batch_size, dtype=torch.bool)
    env = TransformedEnv(env, Compose(mean, SkipRows(mask)))
    root = env.reset()
    calls = mean.calls

    out = env.step(env.rand_action(root.clone()))

    assert mean.calls == calls
    assert out["next", "count"].equal(root["count"])
    assert not out["next", "reward"].any()


def test_a_mask_written_by_the_inverse_pass_counts():
    base = SerialEnv(3, make_count)
    env = TransformedEnv(base, SkipRows(torch.tensor([False, True, False])))

    out = env.rand_step(env.reset())

    assert out["next", "count"].flatten().tolist() == [0, 1, 0]
    assert base.steps == [0, 1, 0]


def test_other_batch_sizes_and_closed_envs_are_refused():
    env = TransformedEnv(SerialEnv(2, make_count), add_100)

    with pytest.raises(BatchSizeError):
        env.reset(TensorDict(batch_size=[3]))
    env.reset()
    env.close()
    assert env.is_closed
    closed = TransformedEnv(make_count(), add_100)
    closed.close()
    with pytest.raises(ClosedEnvError):
        closed.step(TensorDict())


def test_an_unlocked_env_takes_any_batch_size_behind_a_transform():
    env = StatelessCount(5).append_transform(lambda td: td)

    assert env.rollout(2, tensordict=TensorDict(batch_size=[7])).shape == (7, 2)


def test_members_of_a_mixed_env_may_be_transformed():
    env = MixedEnv([SerialEnv(2, make_count).append_transform(lambda td: td) for _ in range(2)])

    data = env.rollout(12, break_when_any_done=False)

    bare = SerialEnv(4, make_count).rollout(12, break_when_any_done=False)
    assert data["next", "count"].equal(bare["next", "count"])


# ------------------------------------------------------------------------------- unlike envs, overlap


class Shown(Count):
    """Counts, and shows a vector of its own width."""

    def __init__(self, n, width):
        super().__init__(n)
        self.width = width
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), vector=Unbounded((width,))
        )

    def _out(self):
        return super()._out().set("vector", torch.full((self.width,), float(self.c)))


def make_unlike() -> SerialEnv:
    return SerialEnv(2, [partial(Shown, 3, 2), partial(Shown, 5, 3)])


@pytest.mark.parametrize("transform", [add_100, Scaled, StepCounter])
def test_unlike_envs_may_be_transformed(transform):
    made = transform if transform is add_100 else transform()
    env = TransformedEnv(make_unlike(), made)

    check_env_specs(env, return_contiguous=False)
    data = env.rollout(9, break_when_any_done=False, return_contiguous=False)

    bare = make_unlike().rollout(9, break_when_any_done=False, return_contiguous=False)
    assert data["next", "done"].equal(bare["next", "done"])
    assert data[0]["vector"].shape == (9, 2) and data[1]["vector"].shape == (9, 3)


def test_skipped_rows_of_unlike_envs_repeat_their_outer_values():
    env = make_unlike().append_transform(add_100)

    data = env.rollout(9, break_when_all_done=True, return_contiguous=False)

    assert data["next", "count"].squeeze(-1).tolist() == [
        [101, 102, 103, 103, 103],
        [101, 102, 103, 104, 105],
    ]
    assert data[0]["next", "vector"][:, 0].tolist() == [1, 2, 3, 3, 3]


def test_the_base_env_is_set_going_before_anybody_waits():
    """What makes worker processes and JAX step at the same time under transforms."""
    notes = []

    class Noting(Count):
        def _begin_step(self, ticket):
            notes.append("send")

        def _finish_step(self, ticket):
            notes.append("receive")
            return super()._finish_step(ticket)

    env = TransformedEnv(Noting(9), Recorder("t", notes))
    td = env.rand_action(env.reset())
    notes.clear()

    step = env._send(td, advance=True)
    notes.append("meanwhile")
    step.recv()

    assert notes == [("inv", "t"), "send", "meanwhile", "receive", ("call", "t")]


def test_specs_may_stay_unlocked():
    env = TransformedEnv(make_count(), Compose(Scaled(), StepCounter()), spec_locked=False)

    env.observation_spec["more"] = Unbounded((1,))

    assert "more" in env.observation_keys
    locked = TransformedEnv(make_count(), Scaled())
    with pytest.raises(SpecLockedError):
        locked.observation_spec["more"] = Unbounded((1,))


@pytest.mark.parametrize("how", ["given", "appended", "inserted", "assigned"])
def test_modules_of_transforms_are_in_eval_mode_in_an_env(how):
    dropout = ModuleTransform(
        module=TensorDictModule(torch.nn.Dropout(0.9), in_keys=["count"], out_keys=["count"])
    )
    env = TransformedEnv(Count(3), dropout if how == "given" else None)
    if how == "appended":
        env.append_transform(dropout)
    elif how == "inserted":
        env.insert_transform(0, dropout)
    elif how == "assigned":
        env.transform = dropout

    assert not any(module.training for module in dropout.modules())


def test_numbers_of_a_scaling_never_give_an_action_another_shape():
    scaling = ActionScaling(loc=torch.arange(7.0), scale=torch.ones(7))

    with pytest.raises(ValueError, match=r"loc of shape \(7,\), but the action has shape \(4, 1\)"):
        scaling.normalize(torch.zeros(4, 1))
    assert scaling.denormalize(torch.zeros(4, 7)).shape == (4, 7)


@pytest.mark.parametrize("pool", [False, True])
def test_a_flag_that_is_expanded_under_another_name_is_an_observation(pool):
    def make():
        return TransformedEnv(Count(3), ExpandAs(in_key="done", ref_key="count", out_key="wide"))

    env = SerialEnv(2, make) if pool else make()
    data = env.rollout(3)

    assert "wide" in env.full_observation_spec.keys()
    assert "wide" not in env.full_done_spec.keys()
    assert torch.equal(data["next", "wide"], data["next", "done"].expand_as(data["next", "count"]))
    env.close(raise_if_closed=False)


# ------------------------------------------------------------------ specs that are read at every use


class Growing(Transform):
    """Declares, and gives, one entry more once it is told to."""

    grows = False

    def _call(self, next_td):
        return next_td.set("more", torch.ones(1)) if self.grows else next_td

    def _reset(self, td, td_reset):
        return self._call(td_reset)

    def transform_observation_spec(self, observation_spec):
        if self.grows:
            observation_spec["more"] = Unbounded((1,))
        return observation_spec


def test_without_a_cache_all_that_is_read_from_specs_follows_them():
    env = TransformedEnv(Count(9), Compose(Growing(), StepCounter()), cache_specs=False)
    before = env.observation_keys

    env.transform[0].grows = True

    assert before == ["count", "step_count"]
    assert env.observation_keys == ["count", "more", "step_count"]
    assert "more" in env.rollout(2)["next"].keys() and "more" in env.reset().keys()
    check_env_specs(env)


def test_with_a_cache_specs_are_read_again_when_the_cache_is_emptied():
    env = TransformedEnv(Count(9), Growing())
    assert env.observation_keys == ["count"]

    env.transform.grows = True
    env.transform.empty_cache()

    assert env.observation_keys == ["count", "more"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ActionScaling(loc=torch.zeros(3), scale=torch.ones(2)),
        lambda: ActionScaling.from_stats(mean=torch.zeros(3), std=torch.ones(1)),
        lambda: ActionScaling.from_stats(low=torch.zeros(3), high=torch.ones(2)),
    ],
)
def test_numbers_that_scale_an_action_have_one_shape(make):
    with pytest.raises(ValueError, match="tensors of one shape"):
        make()
    assert ActionScaling(loc=0.0, scale=torch.ones(2)).scale.shape == (2,)
