"""Values cast, clipped, reduced; actions masked, projected, cut into bins; rewards to go."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    ActionDiscretizer,
    ActionMask,
    BinarizeReward,
    Binary,
    Bounded,
    Categorical,
    ClipTransform,
    Compose,
    Composite,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    EnvBase,
    GymEnv,
    Hash,
    LineariseRewards,
    MixedEnv,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    ParallelEnv,
    RenameTransform,
    Reward2GoTransform,
    RewardClipping,
    SerialEnv,
    SignTransform,
    StepCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    DoneError,
    InputError,
    MissingKeyError,
    SpecError,
)
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.shaped_envs import Wordy
from tests.zoo.transform_envs import Cards, masked


class Doubles(EnvBase):
    """Speaks float64 on every side, and is batch-unlocked."""

    _batch_locked = False

    def __init__(self, objectives=1):
        super().__init__()
        self.observation_spec = Composite(
            x=Bounded(-1.0, 1.0, (2,), dtype=torch.float64), n=Unbounded((1,), dtype=torch.int64)
        )
        self.state_spec = Composite(x=Unbounded((2,), dtype=torch.float64))
        self.action_spec = Bounded(-1.0, 1.0, (2,), dtype=torch.float64)
        self.reward_spec = Bounded(-1.0, 2.0, (objectives,), dtype=torch.float64)

    def _shown(self, x):
        return TensorDict(
            {"x": x, "n": torch.zeros((*x.shape[:-1], 1), dtype=torch.int64)}, x.shape[:-1]
        )

    def _reset(self, td, **kwargs):
        return self._shown(torch.zeros((*(td.batch_size if td is not None else ()), 2)).double())

    def _step(self, td):
        assert td["x"].dtype == td["action"].dtype == torch.float64
        reward = td["action"][..., :1].expand(*td.batch_size, *self.reward_spec.shape).clone()
        out = self._shown(td["action"])
        return out.set("reward", reward).set("done", torch.zeros(*td.batch_size, 1).bool())

    def _set_seed(self, seed):
        pass


def rewards(*numbers) -> TensorDict:
    return TensorDict({"reward": torch.tensor(numbers)[:, None]}, [len(numbers)])


# --------------------------------------------------------------------------------------------- cast


def test_all_entries_of_a_dtype_are_cast_on_both_sides():
    env = TransformedEnv(Doubles(), DoubleToFloat())

    data = env.rollout(3)

    assert env.transform.in_keys == ["x", "reward"]
    assert env.transform.in_keys_inv == ["action", "x"]
    floats = {data[key].dtype for key in ["x", "action", ("next", "reward"), ("next", "x")]}
    assert floats == {torch.float32}
    assert data["n"].dtype == torch.int64
    assert env.observation_spec["x"] == Bounded(-1.0, 1.0, (2,))
    check_env_specs(env)


def test_states_that_a_reset_begins_from_are_cast_as_those_of_a_step(opened):
    env = opened(TransformedEnv(ParallelEnv(2, Doubles, num_processes=1), DoubleToFloat()))
    td = env.reset().set("_reset", torch.tensor([True, False]))

    again = env.reset(td.clone())

    assert again["x"].dtype == torch.float32
    assert env.reset(again.clone())["x"].equal(td["x"])
    assert env.step(env.rand_action(again))["next", "x"].dtype == torch.float32


def test_named_entries_are_cast_alone():
    env = TransformedEnv(Doubles(), DoubleToFloat(in_keys=["reward"], out_keys=["r"]))

    data = env.rollout(2)

    assert data["next", "r"].dtype == torch.float32
    assert data["next", "reward"].dtype == data["x"].dtype == torch.float64
    check_env_specs(env)


def test_data_without_an_env_is_searched_for_the_dtype():
    data = TensorDict({"a": torch.ones(2).double(), "n": {"b": torch.ones(2)}})

    cast = DTypeCastTransform(torch.float64, torch.float32)

    assert cast(data.clone())["a"].dtype == torch.float32
    assert cast.inv(data)["n", "b"].dtype == torch.float64
    assert data["n", "b"].dtype == torch.float32
    with pytest.raises(ArgumentError, match="out_keys, but no in_keys"):
        DoubleToFloat(out_keys=["a"])


# --------------------------------------------------------------------------------------------- clip


@settings(max_examples=30)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4),
    ends=st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)),
)
def test_clipped_rewards_lie_between_the_bounds_and_are_else_unchanged(values, ends):
    low, high = min(ends), max(ends)
    if low == high:
        return

    clipped = RewardClipping(low, high)(rewards(*values))["reward"].flatten()

    given_values = torch.tensor(values)
    inside = (given_values >= low) & (given_values <= high)
    assert clipped[inside].equal(given_values[inside])
    assert bool(((clipped >= low) & (clipped <= high)).all())


def test_bounds_of_clipped_entries_are_declared():
    env = TransformedEnv(GymEnv("Pendulum-v1"), ClipTransform(["observation", "reward"], low=-0.5))

    assert env.observation_spec["observation"].low.tolist() == [-0.5, -0.5, -0.5]
    assert env.observation_spec["observation"].high.tolist() == [1, 1, 8]
    assert env.reward_spec.low == -0.5 and env.reward_spec.high == torch.inf
    check_env_specs(env)


def test_actions_are_clipped_on_the_way_in():
    env = TransformedEnv(Doubles(), ClipTransform(in_keys_inv=["action"], low=-0.25, high=0.25))
    td = env.reset().set("action", torch.tensor([1.0, -0.125]).double())

    assert env.step(td)["next", "x"].tolist() == [0.25, -0.125]
    assert td["action"].tolist() == [1, -0.125]


# -------------------------------------------------------------------------------------------- signs


def test_signs_and_binary_rewards():
    data = rewards(3.0, 0.0, -0.5)

    assert SignTransform(["reward"])(data.clone())["reward"].flatten().tolist() == [1, 0, -1]
    binary = BinarizeReward()(data.clone())["reward"]
    assert binary.flatten().tolist() == [1, 0, 0] and binary.dtype == torch.int8
    env = TransformedEnv(Count(3), BinarizeReward())
    assert isinstance(env.reward_spec, Binary)
    check_env_specs(env)
    unsigned = SignTransform(["a"])._leaf_after(Unbounded((1,), dtype=torch.uint8))
    assert unsigned.low == 0 and unsigned.high == 1


def test_several_objectives_become_one():
    env = TransformedEnv(Doubles(3), LineariseRewards(["reward"], weights=[1.0, -1.0, 0.5]))

    assert env.reward_spec.shape == (1,)
    assert (env.reward_spec.low.item(), env.reward_spec.high.item()) == (-3.5, 4.0)
    check_env_specs(env)
    data = TensorDict({"reward": torch.tensor([[1.0, 3.0]])}, [1])
    assert LineariseRewards(["reward"])(data)["reward"].tolist() == [[4.0]]
    with pytest.raises(SpecError, match=r"weights of shape \(2,\).*shape \(3,\)"):
        _ = TransformedEnv(Doubles(3), LineariseRewards("reward", weights=[1.0, 2.0])).reward_spec


def test_a_missing_entry_is_named():
    with pytest.raises(MissingKeyError, match=r"reads \['rewrad'\], but the env has"):
        _ = TransformedEnv(Count(3), RewardClipping(0, 1, in_keys=["rewrad"])).reward_spec
    with pytest.raises(MissingKeyError, match="reads 'reward'"):
        RewardClipping(0, 1)(TensorDict({"a": torch.ones(1)}))


# ------------------------------------------------------------------------------------------ actions


@pytest.mark.parametrize("spec", [Categorical(4), OneHot(4)])
def test_random_actions_are_allowed_ones(spec):
    env = TransformedEnv(Cards(spec), ActionMask())

    data = env.rollout(20)

    assert data.shape == (4,)
    assert data["action_mask"].sum(-1).tolist() == [4, 3, 2, 1]
    env.reset()
    assert env.action_spec.mask.all()


class CardsInData(Cards):
    """The same, with all that a step needs in the data."""

    batch_locked = False

    def __init__(self):
        super().__init__()
        self.state_spec = self.observation_spec.clone()

    def _reset(self, td, **kwargs):
        size = () if td is None else td.batch_size
        return TensorDict({"action_mask": torch.ones(*size, self.cards, dtype=torch.bool)}, size)

    def _step(self, td):
        left = td["action_mask"] & (torch.arange(self.cards) != td["action"].unsqueeze(-1))
        over = ~left.any(-1, keepdim=True)
        return TensorDict(
            {"action_mask": left, "terminated": over, "reward": over.float()}, td.batch_size
        )


def test_masks_of_data_that_is_stepped_anywhere_are_obeyed():
    env = TransformedEnv(CardsInData(), ActionMask())
    check_env_specs(env)

    assert sorted(env.rollout(20)["action"].tolist()) == [0, 1, 2, 3]
    env.step(env.reset().set("action", torch.tensor(2)))
    assert not env.action_spec.is_in(torch.tensor(2))
    assert env.action_spec.is_in(torch.tensor(3))


AROUND = {
    "serial": lambda: SerialEnv(2, masked),
    "serial, transformed": lambda: TransformedEnv(SerialEnv(2, masked), StepCounter()),
    "serial without buffers": lambda: SerialEnv(2, masked, use_buffers=False),
    "parallel": lambda: ParallelEnv(2, masked, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(1, masked), SerialEnv(1, Cards)]),
}


@pytest.mark.parametrize("kind", AROUND)
def test_random_actions_of_an_env_around_are_those_of_a_mask_outside(kind):
    outside, inside = TransformedEnv(SerialEnv(2, Cards), ActionMask()), AROUND[kind]()
    data = []

    for env in (outside, inside):
        env.set_seed(0)
        data.append(env.rollout(8, break_when_any_done=False))

    inside.close()
    assert data[0]["action"].equal(data[1]["action"])
    assert data[1]["next", "done"][:, 3::4].all()


def test_rows_with_unlike_options_draw_from_their_own():
    env = SerialEnv(2, [partial(masked, 4), partial(masked, 3)])

    data = env.rollout(12, break_when_any_done=False, return_contiguous=False)

    assert data["next", "done"][0, 3::4].all() and data["next", "done"][1, 2::3].all()
    env.close()


def test_rows_keep_their_masks_where_nothing_happens():
    env = TransformedEnv(SerialEnv(3, Cards), ActionMask())
    td = env.step_mdp(env.rand_step(env.reset()))
    before = td["action_mask"].clone()

    td = env.rand_action(td).set("_step", torch.tensor([True, False, True]))
    td = env.step_mdp(env.step(td))
    assert env.action_spec.mask.sum(-1).tolist() == [2, 3, 2]
    assert env.action_spec.mask[1].equal(before[1])
    env.reset(td.set("_reset", torch.tensor([False, False, True])))
    assert env.action_spec.mask.sum(-1).tolist() == [2, 3, 4]
    data = env.rollout(6, break_when_any_done=False)
    assert data["next", "done"].sum() == 3


def test_masking_says_what_is_wrong():
    with pytest.raises(SpecError, match="can only mask a choice"):
        _ = TransformedEnv(GymEnv("Pendulum-v1"), ActionMask()).action_spec
    with pytest.raises(MissingKeyError, match="'act'"):
        _ = TransformedEnv(Cards(), ActionMask("act")).action_spec
    with pytest.raises(MissingKeyError, match=r"'mask'.*'action_mask'"):
        TransformedEnv(Cards(), ActionMask(mask_key="mask")).reset()
    env = TransformedEnv(
        StatelessCount(5), Compose(RenameTransform("done", "action_mask", create_copy=True))
    )
    env.append_transform(ActionMask())
    with pytest.raises(BatchSizeError, match=r"batch size \(7,\)"):
        env.reset(TensorDict(batch_size=[7]))


@pytest.mark.parametrize("categorical", [True, False])
def test_options_the_env_does_not_have_become_ones_it_has(categorical):
    base = GymEnv("CartPole-v1", categorical_action_encoding=categorical)
    env = TransformedEnv(base, DiscreteActionProjection(2, 5))

    assert env.action_spec.n == 5
    check_env_specs(env)
    numbers = torch.arange(5)
    given = numbers if categorical else torch.nn.functional.one_hot(numbers, 5)
    taken = env.transform.inv(TensorDict({"action": given}, [5]))["action"]
    taken = taken if categorical else taken.argmax(-1)
    assert taken[:2].tolist() == [0, 1]
    assert bool((taken < 2).all())


def test_projected_actions_follow_the_seed():
    data = TensorDict({"action": torch.eye(9, dtype=torch.int64)[torch.full((50,), 8)]}, [50])
    drawn = []
    for seed in (1, 1, 2):
        env = TransformedEnv(GymEnv("CartPole-v1"), DiscreteActionProjection(2, 9))
        env.set_seed(seed)
        drawn.append(env.transform.inv(data.clone())["action"])

    assert drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])
    assert (
        DiscreteActionProjection(2, 9, include_forward=False)(data.clone())["action"].shape[-1] == 9
    )
    with pytest.raises(ArgumentError, match="max_actions is 1"):
        DiscreteActionProjection(2, 1)
    with pytest.raises(SpecError, match="among 3 options"):
        _ = TransformedEnv(GymEnv("CartPole-v1"), DiscreteActionProjection(3, 9)).action_spec


BINS = {"MEDIAN": [-1.5, -0.5, 0.5, 1.5], "LOW": [-2, -1, 0, 1], "HIGH": [-1, 0, 1, 2]}


@pytest.mark.parametrize("place", BINS)
@pytest.mark.parametrize("categorical", [True, False])
def test_continuous_actions_are_cut_into_bins(place, categorical):
    sampling = ActionDiscretizer.SamplingStrategy[place]
    cut = ActionDiscretizer(4, sampling=sampling, categorical=categorical)
    env = TransformedEnv(GymEnv("Pendulum-v1"), cut)

    check_env_specs(env)
    given = torch.arange(4)[:, None] if categorical else torch.eye(4, dtype=torch.bool)
    taken = cut.inv(TensorDict({"action": given}, [4]))["action"]

    assert taken.flatten().tolist() == BINS[place]
    assert isinstance(env.action_spec, MultiCategorical if categorical else MultiOneHot)


def test_bins_differ_by_element_and_may_have_another_name():
    cut = ActionDiscretizer(torch.tensor([2, 4]), out_action_key=("m", "bin"), sampling=3)
    env = TransformedEnv(Doubles(), cut)

    assert env.action_keys == [("m", "bin")]
    assert env.action_spec.nvec.tolist() == [2, 4]
    check_env_specs(env)
    env.set_seed(0)
    taken = cut.inv(TensorDict({("m", "bin"): torch.tensor([[0, 3]]).expand(9, 2)}, [9]))["action"]
    assert bool((taken[:, 0] < 0).all()) and bool((taken[:, 1] >= 0.5).all())
    assert len(taken.unique()) == 18
    with pytest.raises(SpecError, match=r"num_intervals is \[2, 3, 4\]"):
        _ = TransformedEnv(Doubles(), ActionDiscretizer([2, 3, 4])).action_spec
    with pytest.raises(SpecError, match="bounded and continuous"):
        _ = TransformedEnv(Count(3), ActionDiscretizer(2)).action_spec


def test_bins_of_a_batch():
    env = TransformedEnv(SerialEnv(2, partial(GymEnv, "Pendulum-v1")), ActionDiscretizer(3))

    assert env.action_spec.shape == (2, 1)
    check_env_specs(env)


# ------------------------------------------------------------------------------------ rewards to go


def test_rewards_to_go_stop_at_the_ends_of_episodes():
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]).bool()[..., None]
    data = TensorDict({"next": {"reward": torch.ones(2, 4, 1), "done": done}}, [2, 4])

    out = Reward2GoTransform(0.5, out_keys="to_go").inv(data)

    assert out["to_go"].squeeze(-1).tolist() == [[1.5, 1, 1.5, 1], [1.875, 1.75, 1.5, 1]]
    assert out["next", "reward"].equal(data["next", "reward"])


def test_rewards_to_go_need_whole_episodes():
    open_end = TransformedEnv(Count(9), RewardClipping(0, 1)).rollout(3)

    with pytest.raises(DoneError, match="no episode ends"):
        Reward2GoTransform().inv(open_end)
    with pytest.raises(ArgumentError, match="cannot be in an environment"):
        _ = TransformedEnv(Count(3), Reward2GoTransform()).action_spec


def projected() -> TransformedEnv:
    return TransformedEnv(
        SerialEnv(2, partial(GymEnv, "CartPole-v1")), DiscreteActionProjection(2, 3)
    )


def cut(**kwargs) -> TransformedEnv:
    return TransformedEnv(
        SerialEnv(2, partial(GymEnv, "Pendulum-v1")), ActionDiscretizer(3, **kwargs)
    )


@pytest.mark.parametrize("make", [projected, partial(cut, categorical=False)])
def test_a_float_one_hot_chooses_its_largest_entry_through_transforms(make):
    env, taken = make(), []
    choice = torch.tensor([[0, 1, 0], [1, 0, 0]])

    for action in (choice, choice * 0.99999994, choice.to(torch.bool)):
        env.set_seed(0)
        taken.append(env.step(env.reset().set("action", action))["next"])

    assert (taken[0] == taken[1]).all() and (taken[0] == taken[2]).all()
    assert DiscreteActionProjection(2, 3)(TensorDict({"action": choice * 0.99999994}, [2]))[
        "action"
    ].argmax(-1).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "bad", "message"),
    [
        (
            projected,
            [[0, 1, 0], [1, 0, 1]],
            r"'action' of row 1 is \[1, 0, 1\], but must be one-hot",
        ),
        (cut, [[0], [7]], r"'action' of row 1 is \[7\], but must be integers below \[3\]"),
        (cut, [[-1], [0]], r"'action' of row 0 is \[-1\], but must be integers below \[3\]"),
    ],
)
def test_choices_that_a_transform_does_not_offer_are_refused(make, bad, message):
    env = make()
    td = env.reset().set("action", torch.tensor(bad))

    with pytest.raises(InputError, match=message):
        env.step(td)
    stepped = env.step(td.set("_step", torch.tensor(["row 0" in message, True]).logical_not()))

    assert stepped["next", "observation"].shape == td["observation"].shape


def test_a_hash_of_texts_is_given_one_text_for_each_row():
    seen = []

    def hashes(texts):
        seen.append(texts)
        return torch.stack([Hash.reproducible_hash(text) for text in texts])

    env = TransformedEnv(
        SerialEnv(2, Wordy, use_buffers=False), Hash(["word"], ["hash"], hash_fn=hashes)
    )
    data = env.rollout(2)

    assert env.observation_spec["hash"].shape == (*data["hash"].shape[:1], 32) == (2, 32)
    assert all(isinstance(texts, list) and len(texts) == 2 for texts in seen)
    alone = TransformedEnv(Wordy(), Hash(["word"], ["hash"])).rollout(2)
    assert torch.equal(data["hash"][0], alone["hash"])
