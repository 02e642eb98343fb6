"""evaluate(): unbiased, on every kind of env, which is left where it was; policies compared on the same seeds."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.record.loggers.csv import CSVLogger

from envkit import (
    Collector,
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    ExplorationType,
    GymEnv,
    GymWrapper,
    JaxPolicy,
    LineariseRewards,
    MixedEnv,
    NormalizeReward,
    ParallelEnv,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    TransformedEnv,
    VecNorm,
    compile_policy,
    episode_stats,
    evaluate,
    exploration_type,
)
from envkit.env.base import EnvBase
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    MissingKeyError,
    RolloutError,
)
from envkit.evaluation import evaluate as module
from envkit.evaluation.outcome import Comparison, Evaluation
from envkit.specs import Categorical, Composite, Unbounded
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count
from tests.zoo.jax_drift import jax_rows
from tests.zoo.shaped_envs import Several


class Scripted(EnvBase):
    """Episodes whose lengths are said beforehand, over and over; a seed begins the list anew.

    The reward of a step is the action.
    """

    def __init__(self, *lengths: int):
        super().__init__()
        self.lengths, self.episode, self.c = lengths, -1, 0
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), success=Categorical(2, (1,), dtype=torch.bool)
        )
        self.action_spec = Categorical(5, shape=(1,))

    def _out(self):
        is_last = torch.tensor([self.c == self.lengths[self.episode % len(self.lengths)]])
        return {"count": torch.tensor([self.c]), "success": is_last & (self.c > 2), "done": is_last}

    def _reset(self, td, **kwargs):
        self.c, self.episode = 0, self.episode + 1
        return TensorDict(self._out())

    def _step(self, td):
        self.c += 1
        return TensorDict({**self._out(), "reward": td["action"].float()})

    def _set_seed(self, seed):
        self.episode = -1

    def get_extra_state(self):
        return [self.episode, self.c]

    def set_extra_state(self, state):
        self.episode, self.c = state


def do(choice: int):
    def act(tensordict):
        shape = (*tensordict.batch_size, 1)
        return tensordict.set("action", torch.full(shape, choice))

    return act


def make_cart_pole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def lean(tensordict):
    """Push a cart to where its pole leans."""
    return tensordict.set("action", (tensordict["observation"][..., 2] > 0).long())


# ---------------------------------------------------------------------------------- what is counted


def test_short_episodes_are_not_counted_more_often_than_long_ones():
    env = SerialEnv(2, [partial(Scripted, 2), partial(Scripted, 90)])

    evaluation = evaluate(env, do(3), 3)

    assert len(evaluation) == 4  # two of each row
    assert evaluation.lengths.tolist() == [2, 2, 90, 90]
    assert evaluation.returns.tolist() == [6.0, 6.0, 270.0, 270.0]
    assert evaluation.terminated.all() and evaluation.cut == 0
    assert evaluation.mean == 138.0
    assert evaluation.last["count"].flatten().tolist() == [2, 2, 90, 90]


@pytest.mark.parametrize("lengths", [(3, 1, 70), (65, 64, 1), (1,)])
@pytest.mark.parametrize("max_steps", [None, 3, 64, 65])
def test_each_row_plays_its_own_first_episodes(lengths, max_steps):
    env = Scripted(*lengths)

    evaluation = evaluate(env, do(1), 5, max_steps=max_steps)

    whole = [lengths[i % len(lengths)] for i in range(5)]
    limit = max_steps or 1000
    assert evaluation.lengths.tolist() == [min(length, limit) for length in whole]
    assert evaluation.returns.tolist() == evaluation.lengths.tolist()
    assert evaluation.is_cut.tolist() == [length > limit for length in whole]
    assert evaluation.terminated.tolist() == [length <= limit for length in whole]
    assert evaluation.cut == sum(length > limit for length in whole)


def test_the_share_of_successes_is_read_at_the_last_step():
    evaluation = evaluate(Scripted(2, 4, 9, 1), do(1), 4)

    assert evaluation.success("success") == 0.5
    with pytest.raises(MissingKeyError, match=r"have no 'won'; they have .*'success'"):
        evaluation.success("won")


def test_the_interval_of_many_episodes_is_that_of_a_normal_mean():
    returns = torch.arange(100, dtype=torch.float64)
    evaluation = Evaluation(returns, *[returns] * 3, TensorDict({}, [100]), 1, 0)

    low, high = evaluation.ci95

    normal = 1.96 * evaluation.std / 10
    assert low == pytest.approx(evaluation.mean - normal, rel=0.05)
    assert high == pytest.approx(evaluation.mean + normal, rel=0.05)
    assert evaluation.ci95 == Evaluation(returns, *[returns] * 3, TensorDict({}, [100]), 1, 0).ci95


def interval_of(returns):
    returns = returns.double()
    rest = torch.zeros(len(returns))
    return Evaluation(returns, *[rest] * 3, TensorDict({}, [len(returns)]), 1, 0).ci95


def test_the_interval_of_few_episodes_is_students():
    low, high = interval_of(torch.tensor([1.0, 2.0, 6.0]))

    assert [low, high] == pytest.approx(
        [3 - 4.3027 * 7**0.5 / 3**0.5, 3 + 4.3027 * 7**0.5 / 3**0.5]
    )


def test_equal_returns_have_an_interval_of_no_width():
    assert interval_of(torch.full((40,), 7.0)) == (7.0, 7.0)


def test_the_interval_reaches_further_to_the_side_of_rare_large_returns():
    returns = -torch.linspace(0.95, 0.05, 10).log()

    low, high = interval_of(returns)

    assert high - returns.mean() > 1.2 * (returns.mean() - low)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("episodes", [2, 4, 8, 32, 96])
@pytest.mark.parametrize("kind", ["normal", "uniform", "exponential"])
def test_intervals_cover_the_true_mean_about_as_often_as_they_say(kind, episodes):
    generator = torch.Generator().manual_seed(episodes)
    shape, runs = (episodes,), 400
    draw, mean = {
        "normal": (lambda: torch.randn(shape, generator=generator), 0.0),
        "uniform": (lambda: torch.rand(shape, generator=generator), 0.5),
        "exponential": (lambda: torch.rand(shape, generator=generator).log().neg(), 1.0),
    }[kind]

    intervals = [interval_of(draw()) for _ in range(runs)]

    covered = sum(low <= mean <= high for low, high in intervals) / runs
    least = 0.84 if kind == "exponential" and episodes < 8 else 0.92  # Student knows no skew
    assert covered >= least


def test_one_episode_has_no_interval():
    found = evaluate(Scripted(4), do(1), 1)

    assert math.isnan(found.std)
    assert all(math.isnan(end) for end in found.ci95)


def test_it_is_shown_in_a_line_and_as_a_table():
    evaluation = evaluate(Scripted(4, 5, 9), do(1), 3, max_steps=6)

    assert repr(evaluation) == (
        "Evaluation(3 episodes: return 5 ± 1, 95% interval of the mean [2.516, 7.484], length 5, "
        "terminated 67%, cut 1)"
    )
    assert (
        "<th>cut</th>" in evaluation._repr_html_() and "<td>5 ± 1</td>" in evaluation._repr_html_()
    )


# ------------------------------------------------------------------------- kinds of env and of policy


def test_the_same_call_takes_single_batched_and_mixed_envs():
    single, rows = make_cart_pole(), SerialEnv(2, make_cart_pole)
    mixed = MixedEnv([SerialEnv(2, make_cart_pole), SerialEnv(1, make_cart_pole)])

    alone, first, second = (evaluate(env, lean, 3, seed=7) for env in (single, rows, mixed))

    assert first.rows == 2 and len(first) == 4
    assert second.rows == 3 and len(second) == 3
    assert alone.returns[0] == first.returns[0]
    rows.close()
    mixed.close()


@pytest.mark.slow
def test_processes_play_what_one_process_plays():
    here, there = (kind(2, make_cart_pole) for kind in (SerialEnv, ParallelEnv))

    one, other = (evaluate(env, lean, 6, seed=1) for env in (here, there))

    assert torch.equal(one.returns, other.returns)
    here.close()
    there.close()


@pytest.mark.slow
def test_the_program_of_a_training_by_64_steps_plays_the_episodes_too():
    def halves(params, observation, key):
        return params * observation

    env, policy = jax_rows(2, limit=5), JaxPolicy(halves, jnp.float32(-0.5))
    collector = Collector(env, policy, frames_per_batch=128)
    collector.next()
    before = env.traces["unroll"]

    found = [evaluate(env, policy, 4, seed=3, deterministic=kind) for kind in (True, False)]

    assert env.traces["unroll"] == before == 1
    assert torch.equal(found[0].returns, found[1].returns) and len(found[0]) == 4


def test_a_compiled_policy_plays_the_episodes_that_its_module_plays():
    torch.manual_seed(0)
    env = jax_rows()
    size, actions = (
        spec.shape[-1] for spec in (env.observation_spec["observation"], env.action_spec)
    )
    module = TensorDictModule(torch.nn.Linear(size, actions), ["observation"], ["action"])

    step_by_step, at_once = (
        evaluate(env, policy, 9, seed=3) for policy in (module, compile_policy(module))
    )
    cut = evaluate(env, compile_policy(module), 9, seed=3, max_steps=3)

    assert torch.equal(step_by_step.lengths, at_once.lengths)
    torch.testing.assert_close(step_by_step.returns, at_once.returns)
    first = slice(None, None, 3)  # of each row; where one was cut, the next begins elsewhere
    assert torch.equal(cut.lengths[first], at_once.lengths[first].clamp(max=3))
    assert torch.equal(cut.is_cut[first], at_once.lengths[first] > 3)
    assert cut.cut > 0 and cut.lengths.max() == 3


@pytest.mark.parametrize(
    ("deterministic", "kind"),
    [(True, ExplorationType.DETERMINISTIC), (False, ExplorationType.RANDOM)],
)
def test_a_policy_acts_by_the_exploration_that_is_asked_for_and_without_gradients(
    deterministic, kind
):
    seen = set()

    def act(tensordict):
        seen.add((exploration_type(), torch.is_grad_enabled()))
        return do(1)(tensordict)

    evaluate(Scripted(3), act, 1, deterministic=deterministic)

    assert seen == {(kind, False)}


# ----------------------------------------------------------------------------- seeds, and what is left


def test_a_seed_gives_the_same_episodes_and_no_seed_gives_others_and_says_which():
    env = SerialEnv(2, make_cart_pole)

    def drawing(tensordict):
        return tensordict.set("action", torch.randint(2, tensordict.batch_size))

    one, two, other = (evaluate(env, drawing, 4, seed=seed) for seed in (5, 5, None))
    again = evaluate(env, drawing, 4, seed=other.seed)

    assert torch.equal(one.returns, two.returns)
    assert torch.equal(other.returns, again.returns)
    assert not torch.equal(other.returns, one.returns)
    env.close()


class SeedsNumpy(CartPoleEnv):
    """Draws from a generator of NumPy's older kind."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.older = np.random.RandomState(seed)
        return super().reset(seed=int(self.older.randint(9)), options=options)


def test_a_seed_that_is_drawn_is_one_that_numpy_takes():
    env = GymWrapper(TimeLimit(SeedsNumpy(), 3))

    assert len(evaluate(env, None, 2).returns) == 2


def test_an_env_goes_on_where_it_was_and_so_do_the_generators():
    env, other = (SerialEnv(2, make_cart_pole).record_for_resume() for _ in range(2))
    roots = []
    for each in (env, other):
        each.set_seed(2)
        roots.append(each.step_mdp(each.rand_step(each.reset())))
    before = torch.get_rng_state()

    evaluate(env, lean, 5, seed=1)

    assert torch.equal(torch.get_rng_state(), before)
    for _ in range(60):
        one, roots[0] = env.step_and_maybe_reset(env.rand_action(roots[0]))
        two, roots[1] = other.step_and_maybe_reset(other.rand_action(roots[1]))
        assert_same(one, two)
    env.close()
    other.close()


def test_an_env_that_cannot_go_on_is_told():
    env = make_cart_pole()
    env.reset()

    with pytest.warns(
        UserWarning, match=r"ends the episodes under way in GymEnv.*not recorded.*nothing else\."
    ):
        evaluate(env, lean, 1)


def test_a_class_of_ones_own_that_does_not_say_where_it_is_is_told():
    env = SerialEnv(1, Count)
    env.reset()

    with pytest.warns(
        UserWarning, match=r"under way in SerialEnv.*Count does not save.*get_extra_state"
    ):
        evaluate(env, None, 1)


@pytest.mark.filterwarnings("ignore::envkit.CentredRewardWarning", "ignore:evaluate.. sums")
def test_statistics_that_a_transform_keeps_are_put_back():
    env = TransformedEnv(Scripted(3), VecNorm(in_keys=["reward"]))
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(do(1)(td))
    held = {name: value.clone() for name, value in env.transform.state_dict().items()}

    evaluate(env, do(4), 20)

    now = env.transform.state_dict()
    assert held and all(torch.equal(now[name], value) for name, value in held.items())
    assert env.base_env.c == 2


def test_an_env_is_put_back_when_the_policy_fails():
    env = Scripted(9)
    env.set_seed(3)
    held = env.state_dict()

    def failing(tensordict):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(env, failing, 1, seed=8)

    assert env.state_dict()["_state"]["seed"] == held["_state"]["seed"] == 3


# ---------------------------------------------------------------------------------- several policies


def test_policies_are_compared_on_the_same_seeds():
    env = SerialEnv(2, [partial(Scripted, 2, 8), partial(Scripted, 5)])

    comparison = evaluate(env, {"more": do(3), "less": do(1), "same": do(3)}, 4)

    assert isinstance(comparison, Comparison) and list(comparison) == ["more", "less", "same"]
    difference = comparison.difference("more", "less")
    assert difference.mean == 2 * comparison["less"].mean == 10.0
    assert difference.ci95[0] <= 10.0 <= difference.ci95[1]
    assert comparison.difference("more", "same").ci95 == (0.0, 0.0)
    assert repr(difference).startswith("Difference(more - less: return +10, 95% interval")
    assert repr(comparison).count("Evaluation(4 episodes") == 3
    assert comparison._repr_html_().count("<tr>") == 4
    with pytest.raises(MissingKeyError, match="there is no policy 'most'"):
        comparison.difference("most", "less")
    with pytest.raises(BatchSizeError, match="cannot be paired"):
        Comparison({"a": comparison["more"], "b": evaluate(env, do(1), 1)}).difference("a", "b")
    env.close()


# -------------------------------------------------------------------------------------------- errors


class Rewarded(Count):
    """Pays several numbers a step: for objectives, or for agents."""

    def __init__(self, shape):
        super().__init__()
        self.reward_spec = Unbounded(shape)

    def _step(self, td):
        return super()._step(td).set("reward", self.reward_spec.one())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"episodes": 0}, r"episodes is 0, but must be an int of at least 1"),
        ({"max_steps": 0}, r"max_steps is 0"),
        ({"policy": {}}, r"policy is an empty dict"),
        ({"seed": -1}, r"-1"),
        ({"deterministic": "yes"}, r"deterministic is 'yes', but must be a bool"),
        ({"env": Several()}, r"Several gives the rewards .*'gain': 1.*Name one: reward_key='"),
        ({"env": Rewarded((3,))}, r"'reward': 3.*LineariseRewards\(\['reward'\]\)"),
        ({"env": Rewarded((3, 1))}, r"'reward': 3.*agents='mean' or agents='sum'"),
        (
            {"env": Rewarded((3, 1)), "agents": "best"},
            r"agents is 'best', but must be 'sum', 'mean' or None",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        evaluate(**{"env": Count(), "policy": None, **arguments})


@pytest.mark.filterwarnings("ignore:.*ends the episodes under way")
def test_objectives_that_are_weighed_make_one_reward():
    found = evaluate(TransformedEnv(Rewarded((3,)), LineariseRewards(["reward"])), None, 2)

    assert torch.equal(found.returns, 3.0 * found.lengths)


class Team(Count):
    """Pays two agents 1 and 3 in each step."""

    def __init__(self):
        super().__init__()
        self.reward_spec = Unbounded((2, 1))

    def _step(self, td):
        return super()._step(td).set("reward", torch.tensor([[1.0], [3.0]]))


@pytest.mark.filterwarnings("ignore:.*ends the episodes under way")
@pytest.mark.parametrize(("agents", "paid"), [("sum", 4.0), ("mean", 2.0)])
def test_what_agents_are_paid_becomes_one_number(agents, paid):
    evaluation = evaluate(Team(), None, 2, agents=agents)
    data = Team().rollout(5, break_when_any_done=False)
    recorded = episode_stats(data, agents=agents)

    assert torch.equal(evaluation.returns, paid * evaluation.lengths)
    assert torch.equal(recorded.returns, paid * recorded.lengths)


@pytest.mark.filterwarnings("ignore:.*ends the episodes under way")
def test_a_reward_is_chosen_by_its_name():
    env = Several()
    for key in env.reward_keys:
        chosen = evaluate(env, None, 2, seed=0, reward_key=key)
        others = [other for other in env.reward_keys if other != key]
        alone = evaluate(TransformedEnv(Several(), ExcludeTransform(*others)), None, 2, seed=0)
        assert torch.equal(chosen.returns, alone.returns)
    with pytest.raises(MissingKeyError, match="reward_key is 'luck', but Several has the rewards"):
        evaluate(env, None, 2, reward_key="luck")


@pytest.mark.parametrize("count", [1, 8, 40])
def test_the_interval_of_a_share_holds_it_and_is_no_point(count):
    last = TensorDict({"won": torch.ones(count, 1)}, [count])
    flags = torch.ones(count, dtype=torch.bool)
    evaluation = Evaluation(flags.double(), flags.long(), flags, ~flags, last, 1, 0)

    low, high = evaluation.success_ci95("won")

    assert 0 < low < high == evaluation.success("won") == 1.0
    # Wilson's interval for n of n successes begins at n / (n + z ** 2).
    assert low == pytest.approx(count / (count + 1.959964**2), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*ends the episodes under way")
def test_one_of_several_rewards_counts_where_the_others_are_left_out():
    env = Several()
    first, *others = env.reward_keys

    found = evaluate(TransformedEnv(env, ExcludeTransform(*others)), None, 2)

    assert len(found) == 2 and first in found.last.keys(True, True)


def test_an_episode_without_an_end_is_told_with_the_cure(monkeypatch):
    monkeypatch.setattr(module, "_ENDLESS", 200)

    with pytest.raises(RolloutError, match=r"has not ended in 256 steps.*max_steps=1000"):
        evaluate(Scripted(10**6), do(1), 1)


def test_a_logger_is_told_numbers_by_name(tmp_path):
    returns = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    flags = torch.tensor([True, False, False])
    lengths = torch.tensor([2, 4, 6])
    evaluation = Evaluation(returns, lengths, flags, ~flags, TensorDict({}, [3]), 1, 0)
    logger = CSVLogger("run", log_dir=str(tmp_path))

    for step in (100, 200):
        for name, value in evaluation.scalars().items():
            logger.log_scalar(f"eval-{name}", value, step=step)

    scalars = evaluation.scalars()
    assert (scalars["return"], scalars["length"], scalars["terminated"]) == (3.0, 4.0, 1 / 3)
    assert (scalars["episodes"], scalars["cut"]) == (3.0, 2.0)
    assert (scalars["return_low"], scalars["return_high"]) == evaluation.ci95
    (curve,) = tmp_path.rglob("eval-return.csv")
    assert curve.read_text().split() == ["100,3.0", "200,3.0"]


def test_the_result_names_the_transforms_that_changed_the_reward():
    def row():
        return TransformedEnv(Scripted(3), RewardScaling(0.0, 2.0))

    inner = SerialEnv(2, row)
    env = TransformedEnv(inner, Compose(RewardSum(), RewardClipping(-5.0, 5.0), DoubleToFloat()))

    found = evaluate(env, do(1), 2, seed=0)

    assert found.changed_by == ("RewardScaling", "RewardClipping")
    assert evaluate(Scripted(3), do(1), 2, seed=0).changed_by == ()


def test_the_reward_of_the_env_is_summed_where_a_transform_that_learns_writes_another_entry():
    env = TransformedEnv(Scripted(3), NormalizeReward(out_keys=["normal_reward"]))
    plain = evaluate(Scripted(3), do(1), 4, seed=0)

    found = evaluate(env, do(1), 4, seed=0, reward_key="reward")

    assert found.returns.equal(plain.returns) and found.changed_by == ()
