"""Fixed and running normalisation: what is counted, who shares it, what is declared."""

from __future__ import annotations

import copy
import threading
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    Compose,
    Composite,
    EnvBase,
    GymEnv,
    JaxEnv,
    NormalizeReward,
    ObservationNorm,
    ParallelEnv,
    PendulumEnv,
    RewardScaling,
    SerialEnv,
    TransformedEnv,
    Unbounded,
    VecNorm,
    VecNormV2,
    check_env_specs,
)
from envkit.batched.creator import EnvCreator
from envkit.errors import ArgumentError, MissingKeyError, NoParentError, StatisticsError
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.transform_envs import TwoTeams
from tests.zoo.transforms import pendulum
from tests.zoo.walkers import Pendulum

pytestmark = pytest.mark.rounding

NONSTOP = {"break_when_any_done": False}


def column(*numbers) -> TensorDict:
    return TensorDict({"a": torch.tensor(numbers)[:, None]}, [len(numbers)])


# --------------------------------------------------------------------------------- fixed numbers


@pytest.mark.parametrize("standard_normal", [True, False])
def test_observations_and_actions_are_shifted_and_scaled(standard_normal):
    norm = ObservationNorm(
        1.0, 2.0, ["observation"], in_keys_inv=["action"], standard_normal=standard_normal
    )
    env, bare = TransformedEnv(GymEnv("Pendulum-v1"), norm), GymEnv("Pendulum-v1")
    env.set_seed(0)
    bare.set_seed(0)

    shown, raw = env.reset()["observation"], bare.reset()["observation"]

    assert shown.equal((raw - 1) / 2 if standard_normal else raw * 2 + 1)
    ends = env.action_spec.low.item(), env.action_spec.high.item()
    assert ends == ((-1.5, 0.5) if standard_normal else (-3.0, 5.0))
    inner = norm.inv(TensorDict({"action": env.action_spec.high}))["action"]
    assert inner == bare.action_spec.high
    check_env_specs(env)


def test_rewards_are_scaled_even_with_a_negative_scale():
    env = TransformedEnv(Count(3), RewardScaling(1.0, -2.0, out_keys=["r"]))

    data = env.rollout(2)

    assert data["next", "r"].flatten().tolist() == [-1, -1]
    assert data["next", "reward"].flatten().tolist() == [1, 1]
    check_env_specs(env)
    assert (
        RewardScaling(1.0, 2.0, standard_normal=True)(TensorDict({"reward": torch.tensor([5.0])}))[
            "reward"
        ]
        == 2
    )


@pytest.mark.parametrize("standard_normal", [True, False])
def test_numbers_are_measured_in_the_env(standard_normal):
    norm = ObservationNorm(in_keys=["count"], standard_normal=standard_normal)
    env = TransformedEnv(GymCount(5), norm)

    norm.init_stats(10)

    seen = torch.tensor([0.0, 1, 2, 3, 4] * 2)
    normal = (seen - seen.mean()) / seen.std()
    assert torch.allclose(env.rollout(5)["count"].flatten(), normal[:5])
    check_env_specs(env)
    with pytest.raises(StatisticsError, match="already"):
        norm.init_stats(10)


class GymCount(Count):
    """Counts in float32."""

    def __init__(self, n):
        super().__init__(n)
        self.observation_spec = self.observation_spec.clone().to(torch.float32)

    def _out(self):
        out = super()._out()
        return out.set("count", out["count"].float())


def test_numbers_of_a_batch_are_averaged_over_rows_and_time():
    norm = ObservationNorm(in_keys=["count"], standard_normal=True)
    env = TransformedEnv(SerialEnv(2, partial(GymCount, 4)), norm)

    norm.init_stats(8, reduce_dim=(0, 1), cat_dim=1, keep_dims=(0,))

    assert norm.loc.tolist() == [[1.5]]
    check_env_specs(env)
    assert norm.scale.shape == (1, 1)


def test_what_is_measured_counts_the_steps_of_all_rows():
    norm = ObservationNorm(in_keys=["count"])
    env = TransformedEnv(SerialEnv(4, partial(GymCount, 2)), norm)

    norm.init_stats(8, reduce_dim=(0, 1), cat_dim=1)

    assert list(env.base_env.steps) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "make",
    [lambda loc, scale: ObservationNorm(loc, scale, ["a"]), lambda *n: RewardScaling(*n, ["a"])],
    ids=["ObservationNorm", "RewardScaling"],
)
def test_numbers_are_those_that_were_given_whatever_becomes_of_the_tensors(make):
    loc, scale = torch.tensor([1.0]), torch.tensor([2.0])
    transform = make(loc, scale)

    loc.add_(5), scale.add_(5)

    assert transform(column(3.0))["a"].item() == 7.0


def test_constant_entries_are_divided_by_the_least_scale():
    norm = ObservationNorm(0.0, 0.0, ["a"], standard_normal=True, eps=0.5)

    assert norm(column(2.0))["a"] == 4.0


def test_measured_numbers_travel_by_state_dict():
    trained = TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(in_keys=["observation"]))
    trained.transform.init_stats(20)
    fresh = TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(in_keys=["observation"]))

    fresh.transform.load_state_dict(trained.transform.state_dict())

    assert fresh.transform.loc.equal(trained.transform.loc)
    assert fresh.observation_spec == trained.observation_spec


def test_normalising_says_what_is_missing():
    with pytest.raises(ArgumentError, match="has no keys"):
        ObservationNorm(0.0, 1.0)
    with pytest.raises(ArgumentError, match="Pass both"):
        ObservationNorm(0.0, in_keys=["a"])
    with pytest.raises(StatisticsError, match="init_stats"):
        ObservationNorm(in_keys=["a"])(column(1.0))
    with pytest.raises(StatisticsError, match="init_stats"):
        _ = TransformedEnv(Count(3), ObservationNorm(in_keys=["count"])).observation_spec
    with pytest.raises(NoParentError, match="is in none"):
        ObservationNorm(in_keys=["a"]).init_stats(3)
    env = TransformedEnv(Count(3), ObservationNorm(in_keys=["count", "b"]))
    several = env.transform
    with pytest.raises(StatisticsError, match="with key="):
        several.init_stats(3)
    with pytest.raises(MissingKeyError, match="key is 'c'"):
        several.init_stats(3, key="c")
    for side in ("in_keys", "in_keys_inv"):
        missing = TransformedEnv(Count(), ObservationNorm(**{side: ["nowhere"]}))
        with pytest.raises(MissingKeyError, match=rf"reads \['nowhere'\].*with {side}="):
            missing.transform.init_stats(3)
    with pytest.raises(ArgumentError, match="cat_dim is 0"):
        several.init_stats(3, reduce_dim=1, cat_dim=0, key="count")


class Holes(GymCount):
    """Counts, and sees NaN at the second step of an episode."""

    def _out(self):
        out = super()._out()
        return out.set("count", torch.where(out["count"] == 1, torch.nan, out["count"]))


@pytest.mark.parametrize("make", [partial(Holes, 4), lambda: SerialEnv(2, partial(Holes, 4))])
def test_numbers_that_are_not_finite_are_not_kept(make):
    env = TransformedEnv(make(), ObservationNorm(in_keys=["count"]))

    with pytest.raises(StatisticsError, match=r"both must be finite\. Correct the env"):
        env.transform.init_stats(8)

    assert not env.transform.initialized


def test_one_number_has_no_deviation():
    single = TransformedEnv(GymCount(4), ObservationNorm(in_keys=["count"]))
    rows = TransformedEnv(SerialEnv(2, partial(GymCount, 4)), ObservationNorm(in_keys=["count"]))

    with pytest.raises(StatisticsError, match=r"num_iter is 1\. Take more steps"):
        single.transform.init_stats(1)
    with pytest.raises(ArgumentError, match="num_iter is 0"):
        single.transform.init_stats(0)
    rows.transform.init_stats(1)

    assert rows.rollout(3)["count"].isfinite().all()


def test_numbers_for_each_moment_are_refused_when_they_are_measured():
    env = TransformedEnv(SerialEnv(2, partial(GymCount, 4)), ObservationNorm(in_keys=["count"]))

    with pytest.raises(ArgumentError, match=r"numbers of shape \(4, 1\).*over time, axis 1, too"):
        env.transform.init_stats(8, reduce_dim=0)


# ------------------------------------------------------------------------------ running statistics

batches = st.lists(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(batches=batches, decay=st.sampled_from([1.0, 0.9, 0.5]))
def test_statistics_are_those_of_all_rows_weighted_by_age(batches, decay):
    norm = VecNorm(["a"], decay=decay, eps=1e-12)

    for numbers in batches:
        norm(column(*numbers))

    age = [decay ** (len(batches) - 1 - i) for i, batch in enumerate(batches) for _ in batch]
    weights = torch.tensor(age, dtype=torch.float64)
    values = torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    mean = (weights * values).sum() / weights.sum()
    variance = (weights * (values - mean) ** 2).sum() / weights.sum()
    assert torch.allclose(norm.loc["a"].double(), mean, atol=1e-3)
    assert torch.allclose(norm.scale["a"].double() ** 2, variance, rtol=1e-3, atol=1e-3)


def test_large_offsets_do_not_drown_the_variance():
    norm = VecNorm(["a"], decay=1.0)

    for _ in range(20):
        norm(column(1e6, 1e6 + 2))

    assert norm.scale["a"].item() == pytest.approx(1.0, rel=1e-2)


def counted(env) -> float:
    return env.transform.statistics["count", "weight"].item()


def test_each_row_of_each_step_and_reset_counts_once():
    env = TransformedEnv(
        SerialEnv(2, [partial(Count, 2), partial(Count, 3)]), VecNorm(["count"], ["c"], decay=1.0)
    )

    env.rollout(6, **NONSTOP)

    resets, steps = 2 + 2 + 1, 2 * 6  # the rollout does not reset after its last step
    assert counted(env) == resets + steps


masks = st.lists(st.booleans(), min_size=4, max_size=4).map(torch.tensor)
MASKED = {
    "stateful": partial(SerialEnv, 4, partial(Count, 50)),
    "stateless": partial(StatelessCount, 50, batch_size=[4]),
}


@pytest.mark.parametrize("kind", MASKED)
@settings(max_examples=10)
@given(mask=masks)
def test_only_masked_rows_count(kind, mask):
    env = TransformedEnv(MASKED[kind](), VecNorm(["count"], ["c"], decay=1.0))
    root = env.step_mdp(env.rand_step(env.reset()))

    td = env.step_mdp(env.step(env.rand_action(root).set("_step", mask)))
    assert counted(env) == 8 + mask.sum()
    env.reset(td.set("_reset", mask))
    assert counted(env) == 8 + 2 * mask.sum()


@pytest.mark.parametrize("batch", [(3,), (2, 2)])
def test_each_row_of_a_stateless_env_has_the_averages_of_the_steps_it_made(batch):
    env = TransformedEnv(PendulumEnv(batch_size=batch), VecNormV2(["th"], ["place"], decay=0.9))
    alone = {row: VecNormV2(["th"], decay=0.9) for row in np.ndindex(batch)}
    masks = torch.rand(5, *batch, generator=torch.Generator().manual_seed(0)) < 0.5
    td = env.reset()
    for row, norm in alone.items():
        norm(td[row].select("th"))

    for mask in masks:
        td = env.step(env.rand_action(td).set("_step", mask))["next"]
        for row, norm in alone.items():
            if mask[row]:
                expected = norm(td[row].select("th"))["th"]
                assert td["place"][row].equal(expected)
        td = td.exclude("reward")

    for name, kept in env.transform.statistics.items():
        for row, norm in alone.items():
            assert kept["th"][row].equal(norm.statistics[name, "th"])


def test_agents_share_statistics_where_the_shape_says_so():
    norm = VecNorm([("agents", "x")], decay=1.0, shapes=[(2,)])
    data = TensorDict({"agents": {"x": torch.rand(5, 3, 2)}}, [5])

    out = norm(data.clone())

    assert norm.loc["agents", "x"].shape == (2,)
    assert norm.statistics["agents", "x", "weight"] == 15
    assert out["agents", "x"].mean((0, 1)).abs().max() < 1e-5


def test_groups_have_statistics_by_their_own_resets():
    keys = [("a", "count"), ("b", "count")]
    env = TransformedEnv(TwoTeams(), VecNorm(keys, [("a", "c"), ("b", "c")], decay=1.0))
    root = env.step_mdp(env.rand_step(env.reset()))

    env.reset(
        root.set(("a", "_reset"), torch.tensor([False])).set(("b", "_reset"), torch.tensor([True]))
    )

    weights = [env.transform.statistics[(*key, "weight")].item() for key in keys]
    assert weights == [2, 3]
    check_env_specs(env)


@pytest.mark.filterwarnings("ignore::envkit.CentredRewardWarning")
def test_rewards_and_observations_have_statistics_of_their_own():
    env = TransformedEnv(GymEnv("Pendulum-v1"), VecNorm(decay=1.0))

    data = env.rollout(30)

    assert env.transform.statistics["observation", "weight"] == 31
    assert env.transform.statistics["reward", "weight"] == 30
    restored = env.transform.denorm(data[-1:])["next", "reward"]
    assert restored.item() <= 0
    check_env_specs(env)


def normalised(rows: int, policies: int | None) -> EnvBase:
    """Return pendulums whose observations and rewards are normalised."""
    norms = (
        VecNorm(["observation"], decay=0.9, policies=policies),
        NormalizeReward(gamma=0.5, policies=policies),
    )
    return TransformedEnv(SerialEnv(rows, pendulum), Compose(*norms))


@settings(max_examples=10)
@given(masks=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=5, max_size=5))
def test_policies_have_the_statistics_that_each_would_have_alone(masks):
    together, alone = normalised(6, 3), [normalised(2, None) for _ in range(3)]
    together.set_seed(0)
    seed = 0
    for env in alone:
        seed = env.set_seed(seed)
    roots = [together.reset(), *(env.reset() for env in alone)]

    for number, mask in enumerate(torch.tensor(masks)):
        action = torch.linspace(-2, 2, 6).roll(number).reshape(6, 1)
        parts = [slice(None), *(slice(2 * place, 2 * place + 2) for place in range(3))]
        for place, (env, rows) in enumerate(zip((together, *alone), parts, strict=True)):
            td = roots[place].set("action", action[rows]).set("_step", mask[rows])
            td = env.step_mdp(env.step(td)).set("_reset", ~mask[rows])
            roots[place] = env.reset(td)

        found, wanted = roots[0], torch.cat(roots[1:])
        for key in ("observation", "reward"):
            torch.testing.assert_close(found.get(key, None), wanted.get(key, None))
    for place, env in enumerate(alone):
        for norm, own in zip(together.transform, env.transform, strict=True):
            unstacked = norm.unstacked(place).statistics
            torch.testing.assert_close(unstacked.to_dict(), own.statistics.to_dict())


def test_policies_of_a_program_have_the_statistics_that_each_would_have_alone():
    """The rows of 3 policies, 2 each, along one axis and along two."""
    shown = []
    for batch in ([6], [3, 2]):
        norms = VecNorm(["observation"], ["o"], decay=1.0, policies=3), NormalizeReward(policies=3)
        env = TransformedEnv(JaxEnv(Pendulum(), batch_size=batch, device="cpu"), Compose(*norms))
        env.set_seed(0)
        data = env.rollout(5).reshape(3, 2, 5)
        assert norms[0].fuses
        for place in range(3):
            alone = VecNorm(["observation"], decay=1.0)
            for td in (data[place, :, :1], data[place]["next"]):
                alone(td.select("observation").flatten())
            torch.testing.assert_close(norms[0].loc["observation"][place], alone.loc["observation"])
        shown.append(data["next"].select("o", "reward").to_dict())

    torch.testing.assert_close(*shown)


def test_policies_skip_the_rows_that_are_not_finite():
    norm = VecNorm(["a"], decay=1.0, policies=2)
    data = column(1.0, float("nan"), 3.0, 5.0)

    with pytest.warns(UserWarning, match="NaN or an infinite number"):
        norm(data)

    assert norm.statistics["a", "weight"].tolist() == [1, 2]
    assert norm.loc["a"].flatten().tolist() == [1, 4]
    assert (norm.skipped_rows, norm.unstacked(1).skipped_rows) == (1, 0)
    assert norm.denorm(data)["a"][2:].flatten().tolist() == [3, 5]


def test_frozen_statistics_of_policies_are_saved_and_loaded():
    norm, other = (VecNorm(["a"], decay=1.0, policies=2) for _ in range(2))
    norm(column(1.0, 3.0, 10.0, 20.0))

    other.load_state_dict(norm.state_dict())

    shown = other.freeze()(column(3.0, 3.0, 15.0, 15.0))
    assert shown["a"].flatten().tolist() == [1, 1, 0, 0]
    with pytest.raises(ArgumentError, match=r"the state has weights of shape \(2,\)"):
        VecNorm(["a"], policies=3).load_state_dict(norm.state_dict())
    shared = VecNorm(["a"], policies=2, shared_td=norm.statistics)
    norm(column(1.0, 3.0, 10.0, 20.0))
    assert shared.statistics["a", "weight"].tolist() == [4, 4]


def test_nothing_counts_when_frozen():
    env = TransformedEnv(Count(9), VecNorm(["count"], ["c"], decay=1.0))
    env.rollout(3)
    before = counted(env)

    env.transform.freeze()
    env.rollout(3)
    assert counted(env) == before
    env.transform.unfreeze()
    env.rollout(3)
    assert counted(env) > before


def test_before_anything_was_seen_values_stay():
    assert VecNorm(["a"]).freeze()(column(3.0))["a"] == 3.0
    env = TransformedEnv(Count(9), VecNorm(["count"], ["c"]).freeze())
    assert env.rollout(3)["c"].flatten().tolist() == [0, 1, 2]


def test_copies_that_share_statistics():
    norm = VecNorm(["a"], decay=1.0)
    norm(column(1.0, 3.0))

    clone, frozen = norm.clone(), norm.frozen_copy()
    shared = VecNorm(["a"], shared_td=norm.statistics, decay=1.0)
    for other in (clone, frozen, shared):
        other(column(5.0))

    assert norm.statistics["a", "weight"] == 4
    assert {other.loc["a"].item() for other in (norm, clone, frozen, shared)} == {3.5}


def test_copies_that_do_not_share_statistics():
    norm = VecNorm(["a"], ["b"], decay=1.0)
    norm(column(1.0, 3.0))

    fixed, twin, loaded = norm.to_observation_norm(), copy.deepcopy(norm), VecNorm(["a"], ["b"])
    loaded.load_state_dict(norm.state_dict())
    norm(column(100.0))

    assert fixed(column(3.0))["b"] == twin.freeze()(column(3.0))["b"] == 1.0
    assert loaded.loc["a"] == 2.0
    both = VecNorm(["a", "c"])
    both(TensorDict({"a": torch.ones(2, 1), "c": torch.ones(2, 1)}, [2]))
    assert isinstance(both.to_observation_norm(), Compose)


def test_threads_that_share_statistics_lose_no_count():
    lock = threading.Lock()
    norm = VecNorm(["a"], decay=1.0, lock=lock)

    threads = [
        threading.Thread(target=lambda: [norm(column(1.0)) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert norm.statistics["a", "weight"] == 200


def test_envs_of_one_creator_share_statistics_across_processes():
    creator = EnvCreator(lambda: TransformedEnv(Count(3), VecNorm(["count"], ["c"], decay=1.0)))
    local = creator()
    assert counted(local) == 0
    env = ParallelEnv(2, creator, num_processes=2)

    env.rollout(4, **NONSTOP)

    env.close()
    assert counted(local) == 2 * (1 + 4 + 1)


def test_running_statistics_check_their_arguments():
    with pytest.raises(ArgumentError, match="decay is 0"):
        VecNorm(decay=0)
    with pytest.raises(ArgumentError, match="shapes has 1"):
        VecNorm(["a", "b"], shapes=[(1,)])
    with pytest.raises(MissingKeyError, match=r"reads \['observation'\]"):
        _ = TransformedEnv(Count(3), VecNorm()).observation_spec


def test_statistics_of_a_batch_are_taken_over_rows_and_time():
    env = TransformedEnv(
        SerialEnv(3, partial(GymCount, 4)), ObservationNorm(in_keys=["count"], standard_normal=True)
    )

    env.transform.init_stats(12)

    seen = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(3)
    assert env.transform.loc.shape == env.transform.scale.shape == (1,)
    torch.testing.assert_close(env.transform.loc, seen.mean()[None])
    torch.testing.assert_close(env.transform.scale, seen.std()[None])
    assert env.rollout(3)["count"].shape == (3, 3, 1)


def test_axes_of_statistics_may_be_counted_from_the_end():
    first, second = (
        TransformedEnv(GymCount(4), ObservationNorm(in_keys=["count"])) for _ in range(2)
    )

    first.transform.init_stats(4, reduce_dim=(0, 1), cat_dim=0)
    second.transform.init_stats(4, reduce_dim=(-2, -1), cat_dim=0)

    assert torch.equal(first.transform.loc, second.transform.loc)


# -------------------------------------------------------------------------------- rows without numbers

NAN, INF = float("nan"), float("inf")
RUNNING = {
    "VecNorm": partial(VecNorm, ["a"], decay=0.9),
    "VecNormV2, rows together": partial(VecNormV2, ["a"], reduce_batch_dims=True),
    "VecNormV2, each row": partial(VecNormV2, ["a"]),
}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("make", RUNNING.values(), ids=RUNNING)
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(make, bad):
    norm, clean = make(), make()
    for one in (norm, clean):
        one(column(1.0, 2.0, 5.0))

    with pytest.warns(UserWarning, match=r"VecNorm.* of \['a'\] was given a row .* skipped_rows"):
        shown = norm(column(3.0, bad, 4.0))["a"]
    norm(column(1.0, bad, 2.0))  # warns no more

    assert shown[1].isnan() if bad != bad else shown[1] == bad
    assert shown[[0, 2]].isfinite().all() and norm.loc["a"].isfinite().all()
    assert norm.skipped_rows == 2
    if "each" not in str(make):
        assert norm(column(1.0, 2.0, 3.0))["a"].isfinite().all()


def test_rows_that_are_left_out_count_for_nothing():
    norm, clean = RUNNING["VecNorm"](), RUNNING["VecNorm"]()

    with pytest.warns(UserWarning, match="left out"):
        norm(column(3.0, NAN, 4.0, -INF))
    clean(column(3.0, 4.0))

    assert norm.loc["a"] == clean.loc["a"] and norm.scale["a"] == clean.scale["a"]


@pytest.mark.parametrize("make", RUNNING.values(), ids=RUNNING)
def test_the_number_of_skipped_rows_is_in_the_state_dict(make):
    norm, other, older = make(), make(), make()
    with pytest.warns(UserWarning, match="NaN"):
        norm(column(3.0, NAN, 4.0))
    state = norm.state_dict()

    other.load_state_dict(state)
    del state["skipped_rows"]  # as dicts were that earlier versions saved
    older.load_state_dict(state)

    assert (other.skipped_rows, older.skipped_rows) == (1, 0)


def test_averages_in_the_data_skip_rows_too():
    env = TransformedEnv(Sometimes(), VecNormV2(["a"], stateful=False))

    with pytest.warns(UserWarning, match="NaN"):
        data = env.rollout(6)["next"]

    assert data["a"].isnan().flatten().tolist() == [False, True] * 3
    assert env.transform.skipped_rows == 3


class Sometimes(Count):
    """Shows its count as a float ``a``, and NaN at each second step."""

    def __init__(self):
        super().__init__(50)
        self.observation_spec = Composite(a=Unbounded((1,)))

    def _out(self):
        out = super()._out()
        count = out.pop("count").float()
        return out.set("a", torch.where(count % 2 == 0, count + NAN if count else count, count))


@pytest.mark.parametrize("norm", [VecNorm, VecNormV2])
def test_an_entry_that_the_env_lacks_is_named_with_the_argument(norm):
    with pytest.raises(MissingKeyError, match=rf"{norm.__name__} reads \['place'\].*in_keys="):
        _ = TransformedEnv(Count(3), norm(["place"])).observation_spec
