"""Whole runs with policies in them: the same as stepping from Python with the same actions."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal

from envkit.batched.serial import SerialEnv
from envkit.data.transition import leaves
from envkit.env.spec_names import SpecNames
from envkit.errors import (
    ArgumentError,
    InputError,
    KeyCollisionError,
    MissingKeyError,
    PolicyError,
    TranslationError,
)
from envkit.functional import Discrete, Timestep
from envkit.specs import Unbounded
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import InitTracker, StepCounter
from envkit.transforms.primer import TensorDictPrimer
from envkit.transforms.returns import RewardSum
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.jax import unrolling
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from envkit_bridges.policy.compiled import CompiledPolicy, compile_policy
from tests.bridges.compare import assert_close, assert_same, replay, replaying
from tests.bridges.jax.policy.policies import (
    choosing,
    counting,
    drawing,
    remembering,
    steering,
    uniform_noise,
)
from tests.zoo.walkers import Chooser, Lottery, Pendulum, Steered

STEPS = 15  # each length is a program of its own
TOLERANCE = 1e-4  # over a few steps of a walker, from 1e-6 of one call


def seeded(env, seed=0):
    env.set_seed(seed)
    return env


@pytest.fixture(scope="module")
def steered():
    return compile_policy(steering())


@pytest.fixture(scope="module")
def drawn():
    return compile_policy(drawing())


# ------------------------------------------------------------------------- the same as step by step


@pytest.mark.rounding
def test_a_compiled_rollout_is_the_stepwise_one_with_the_same_actions(walker, drawn):
    compiled = seeded(walker).rollout(STEPS, drawn, break_when_any_done=False)

    given = iter(compiled.select("action", "loc", "scale", "action_log_prob").unbind(1))
    stepped = seeded(walker).rollout(
        STEPS, lambda td: td.update(next(given)), break_when_any_done=False
    )

    assert compiled["next", "done"].any()
    assert_same(compiled, stepped)
    assert compiled.names == stepped.names


@pytest.mark.rounding
def test_a_deterministic_policy_does_what_its_module_does(walker, steered):
    compiled = seeded(walker).rollout(STEPS, steered, break_when_any_done=False)

    stepped = seeded(walker).rollout(STEPS, steered.module, break_when_any_done=False)

    assert_close(compiled, stepped.detach(), atol=TOLERANCE)


@pytest.mark.rounding
@pytest.mark.parametrize("chunk", [pytest.param(64, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("rule", ["any", pytest.param("all", marks=pytest.mark.slow)])
def test_a_run_that_stops_early_is_the_stepwise_one(walker, drawn, monkeypatch, rule, chunk):
    monkeypatch.setattr(unrolling, "_CHUNK", chunk)
    stop = {f"break_when_{rule}_done": True}
    compiled = seeded(walker, 1).rollout(STEPS, drawn, **stop)

    keys = ("action", "loc", "scale", "action_log_prob")
    given = iter(compiled.select(*keys).unbind(1))
    stepped = seeded(walker, 1).rollout(STEPS, lambda td: td.update(next(given)), **stop)

    assert 2 < compiled.shape[1] <= 6  # the time limit
    assert_same(compiled, stepped)


@pytest.mark.rounding
@pytest.mark.parametrize("batch", [pytest.param([3], marks=pytest.mark.slow), [1, 3]])
def test_rows_that_only_fill_up_a_batch_stop_nothing(walker, drawn, batch):
    td = TensorDict(batch_size=batch)

    for seed in range(3):
        one = seeded(walker, seed).rollout(STEPS, drawn, tensordict=td.clone())
        all_ = seeded(walker, seed).rollout(
            STEPS, drawn, tensordict=td.clone(), break_when_all_done=True
        )

        done = one["next", "done"].reshape(-1, one.shape[-1])
        assert done[:, -1].any() and not done[:, :-1].any()
        assert all_["next", "done"][..., -1, :].all()
        assert_same(all_[..., : one.shape[-1]], one)


def test_rows_that_only_fill_up_a_batch_draw_actions_and_still_stop_nothing():
    env, lengths = JaxEnv(Lottery(), batch_size=[8], device="cpu"), []

    for seed in range(8):
        td = TensorDict(batch_size=[5])  # compiled for 8 rows
        data = seeded(env, seed).rollout(40, tensordict=td)
        over = (data["action"] > 0.9).any(0).squeeze(-1)  # by time
        assert over.tolist() == [False] * (len(over) - 1) + [True]
        lengths.append(len(over))

    assert len(set(lengths)) > 2


@pytest.mark.rounding
def test_a_row_that_was_truncated_waits_for_the_others():
    env = JaxEnv(Pendulum(), batch_size=[3], device="cpu", episode_length=5)
    policy = compile_policy(nn.Linear(3, 1))
    td = seeded(env).reset()
    for moves in ([True, True, False], [True, False, False]):
        td = env.step_mdp(env.step(env.rand_action(td).set("_step", torch.tensor(moves))))

    compiled, stepped = (
        env.rollout(9, act, tensordict=td.clone(), auto_reset=False, break_when_all_done=True)
        for act in (policy, policy.module)
    )

    ends = compiled["next", "done"].squeeze(-1)
    assert ends.sum(1).tolist() == [3, 2, 1] and compiled.shape == (3, 5)
    assert (compiled["next", "observation"][0, 2:] == compiled["next", "observation"][0, 2]).all()
    assert_close(compiled, stepped.detach(), atol=TOLERANCE)


@pytest.mark.rounding
def test_random_actions_stop_where_the_stepwise_run_does(walker):
    compiled = seeded(walker, 2).rollout(STEPS)

    stepped = seeded(walker, 2).rollout(STEPS, replaying(compiled["action"]))

    assert_same(compiled, stepped)


@pytest.mark.rounding
def test_unroll_goes_on_where_it_stopped_and_the_policy_with_it(walker, steered):
    root = seeded(walker).reset()

    first, middle = walker.unroll(root.clone(), STEPS, steered)
    second, last = walker.unroll(middle, STEPS, steered)
    data = torch.cat([first, second], 1)
    looped, end = replay(walker, root.clone(), data["action"])

    assert_same(data, looped, without=("state",))
    assert_same(walker.maybe_reset(last), end)


def test_a_rollout_is_written_into_storage_that_is_there(walker, drawn):
    new = seeded(walker).rollout(STEPS, drawn, break_when_any_done=False)
    out = torch.zeros_like(new)

    result = seeded(walker).rollout(STEPS, drawn, break_when_any_done=False, out=out)

    assert_same(out, new)
    assert result["place"].data_ptr() == out["place"].data_ptr()


@pytest.mark.rounding
def test_entries_nobody_knows_stay_at_the_roots(walker, steered):
    td = seeded(walker).reset().set("task", torch.arange(4))

    compiled, stepped = (
        walker.rollout(
            STEPS, policy, tensordict=td.clone(), auto_reset=False, break_when_any_done=False
        )
        for policy in (steered, steered.module)
    )

    assert_close(compiled, stepped.detach(), atol=TOLERANCE)
    assert compiled["task"].tolist() == [[row] * STEPS for row in range(4)]


# ------------------------------------------------------------------------------- what draws


def test_what_a_policy_draws_follows_the_seed(walker, drawn):
    runs = [
        seeded(walker, seed).rollout(STEPS, drawn, break_when_any_done=False) for seed in (3, 3, 4)
    ]

    assert_same(runs[0], runs[1])
    actions = runs[0]["action"]
    assert not torch.equal(actions, runs[2]["action"])
    assert len(actions.reshape(-1, 2).unique(dim=0)) == 4 * STEPS


@pytest.mark.rounding
def test_recorded_log_probs_are_those_of_the_recorded_actions(walker, drawn):
    data = seeded(walker).rollout(STEPS, drawn, break_when_any_done=False)

    wanted = torch.distributions.Normal(data["loc"], data["scale"]).log_prob(data["action"])

    torch.testing.assert_close(data["action_log_prob"], wanted, rtol=1e-4, atol=1e-5)
    noise = (data["action"] - data["loc"]) / data["scale"]
    assert abs(noise.mean()) < 0.5 and 0.6 < noise.std() < 1.4


@pytest.fixture(params=[False, True], ids=["one-hot", "categorical"], scope="module")
def chooser(request):
    return JaxEnv(Chooser(), batch_size=[3], categorical_action_encoding=request.param)


def test_discrete_actions_are_recorded_as_the_policy_writes_them(chooser):
    categorical = chooser.categorical_action_encoding
    kinds = torch.distributions.OneHotCategorical, torch.distributions.Categorical
    module = choosing(kinds[categorical])

    data = seeded(chooser).rollout(STEPS, compile_policy(module))

    wanted = module(data[:, 0].select("observation").clone())
    assert data["action"].dtype == wanted["action"].dtype
    assert data["action"].shape == ((3, STEPS) if categorical else (3, STEPS, 3))
    chosen = data["action"] if categorical else data["action"].argmax(-1)
    assert torch.equal(data["next", "observation"].argmax(-1), chosen)
    assert len(chosen.unique()) == 3


class Writes(nn.Module):
    """Writes a number wherever there is an action, in a dtype."""

    def __init__(self, number, dtype, *, is_index):
        super().__init__()
        self.number, self.dtype, self.is_index = number, dtype, is_index

    def forward(self, shown):
        action = torch.full_like(shown, self.number).to(self.dtype)
        return action[..., 0] if self.is_index else action


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("number", [3, -1])
def test_a_choice_that_there_is_not_is_refused_as_in_single_steps(chooser, number, stops):
    categorical = chooser.categorical_action_encoding
    dtype = torch.int64 if categorical or number > 0 else torch.float32
    writes = Writes(number, dtype, is_index=categorical)
    module = TensorDictModule(writes, ["observation"], ["action"])
    with pytest.raises(InputError, match=r"'action' of row \d is .*, but"):
        chooser.step(module(chooser.reset()))

    with pytest.raises(InputError, match=r"'action' of row \(0, 0\) is .*, but") as caught:
        chooser.rollout(3, compile_policy(module), break_when_any_done=stops)

    assert caught.value.__notes__ == ["The last number of the row is the step of the run."]


@dataclass(frozen=True)
class Fuse:
    """Burns down from a random length."""

    action_space = Discrete(2)

    def reset(self, key):
        left = jax.random.randint(key, (), 3, 150)
        return left, Timestep(left.astype(jnp.float32)[None])

    def step(self, state, action):
        return state - 1, Timestep((state - 1).astype(jnp.float32)[None], 1.0, state <= 1)


class OneHotOf(nn.Module):
    """Writes an option in one-hot form, and no option where fewer than ``least`` are left."""

    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, left):
        hot = nn.functional.one_hot((left[..., 0] > 5).long(), 2)
        return torch.where(left < self.least, 0, hot)


def test_rows_that_ended_programs_ago_have_no_choice_to_be_checked():
    env = seeded(JaxEnv(Fuse(), batch_size=[3]))

    def burnt(least):
        module = TensorDictModule(OneHotOf(least), ["observation"], ["action"])
        return seeded(env).rollout(200, compile_policy(module), break_when_all_done=True)

    data = burnt(0)
    ends = data["next", "done"].squeeze(-1).int().argmax(-1)
    assert ends.min() < 64 < ends[0]  # a program makes 64 steps
    with pytest.raises(InputError, match=rf"of row \(0, {int(ends[0]) - 8}\)"):
        burnt(10)


def test_an_action_that_is_no_number_is_refused_as_in_single_steps(walker):
    def act(params, observation, key):
        return observation["place"] * jnp.nan

    with pytest.raises(InputError, match="NaN and infinity come from the policy"):
        walker.rollout(3, JaxPolicy(act), break_when_any_done=False)


@pytest.mark.rounding
def test_a_dict_of_actions_is_written_by_one_module():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.wheel, self.gear = nn.Linear(1, 2), nn.Linear(1, 4)

        def forward(self, x):
            return self.gear(x).argmax(-1), self.wheel(x).tanh()

    env = JaxEnv(Steered(), batch_size=[2], categorical_action_encoding=True)
    assert env.action_keys == [("action", "gear"), ("action", "wheel")]
    module = Both()

    compiled = seeded(env).rollout(5, compile_policy(module))
    stepped = seeded(env).rollout(5, module)

    assert_close(compiled, stepped.detach(), atol=1e-3)


# -------------------------------------------------------------------------------- live parameters


@pytest.mark.rounding
def test_an_optimiser_step_is_seen_without_tracing_again(walker):
    policy = compile_policy(steering(seed=3))
    optimiser = torch.optim.SGD(policy.parameters(), lr=0.5)
    root = seeded(walker).reset()
    traced = []

    for _ in range(3):
        data, _ = walker.unroll(root.clone(), STEPS, policy)
        wanted = policy.module(root.select("place"))["action"]
        torch.testing.assert_close(data["action"][:, 0], wanted.detach())
        traced.append(walker.traces["unroll"])
        optimiser.zero_grad()
        wanted.square().sum().backward()
        optimiser.step()

    assert len(set(traced)) == 1
    assert policy.translations == 1


def test_a_compiled_policy_is_the_module_elsewhere(walker, steered):
    td = seeded(walker).reset()

    copied, pickled = copy.deepcopy(steered), pickle.loads(pickle.dumps(steered))

    for policy in (copied, pickled):
        assert isinstance(policy, CompiledPolicy) and not policy._translations
        assert_same(policy(td.clone()), steered.module(td.clone()))
    assert compile_policy(steered) is steered
    assert set(steered.state_dict()) == {f"module.{name}" for name in steered.module.state_dict()}


def test_a_callback_makes_a_compiled_policy_step_from_python(walker, steered):
    before, seen = dict(walker.traces), []

    data = seeded(walker).rollout(3, steered, callback=lambda env, td: seen.append(td))

    assert len(seen) == data.shape[1] - 1
    assert walker.traces.get("until") == before.get("until")


# ------------------------------------------------------------------------------- policies in JAX


@pytest.mark.rounding
def test_a_policy_in_jax_is_compiled_once_for_all_its_parameters(walker):
    policy = JaxPolicy(uniform_noise, {"gain": jnp.float32(0.5)})
    data = seeded(walker).rollout(STEPS, policy, break_when_any_done=False)
    looped, _ = replay(walker, seeded(walker).reset(), data["action"])
    before = walker.traces["unroll"]

    other = replace(policy, params={"gain": jnp.float32(-2.0)})
    moved = seeded(walker).rollout(STEPS, other, break_when_any_done=False)

    assert_same(data, looped)
    assert walker.traces["unroll"] == before
    assert moved["action"].mean() < data["action"].mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JaxPolicy(3), "made of a function, got 3"),
        (lambda: JaxPolicy(lambda params, shown: shown), r"\(params, observation, key\): too many"),
        (lambda: JaxPolicy(uniform_noise, {"a": torch.ones(2)}), r"params\['a'\].*jax\.numpy"),
    ],
)
def test_what_is_no_policy_in_jax_is_refused_when_it_is_made(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


@pytest.mark.parametrize("callback", [None, lambda env, td: None])
def test_a_policy_in_jax_that_returns_nothing_is_refused(walker, callback):
    policy = JaxPolicy(lambda params, shown, key: None)

    with pytest.raises(PolicyError, match=r"returned None.*\['action'\].*Return the action"):
        seeded(walker).rollout(3, policy, callback=callback)


def test_a_policy_in_jax_speaks_the_encoding_of_the_env(chooser):
    policy = JaxPolicy(lambda params, shown, key: (jnp.argmax(shown, -1) + 1) % 3)

    compiled = seeded(chooser).rollout(6, policy)
    stepped = seeded(chooser).rollout(6, policy, callback=lambda env, td: None)

    assert_same(compiled, stepped)
    assert compiled["action"].dtype == chooser.action_spec.dtype
    categorical = chooser.categorical_action_encoding
    chosen = compiled["action"] if categorical else compiled["action"].argmax(-1)
    assert chosen[0].tolist() == [1, 2, 0, 1, 2, 0]


def test_a_policy_in_jax_draws_from_the_seed_step_by_step_too(walker):
    policy = JaxPolicy(uniform_noise, {"gain": 0.1})

    one, two, other = (
        seeded(walker, seed).rollout(3, policy, callback=lambda env, td: None) for seed in (0, 0, 1)
    )

    assert_same(one, two)
    assert not torch.equal(one["action"], other["action"])


def test_a_policy_in_jax_that_steps_is_traced_once(walker):
    traces = []

    def function(params, shown, key):
        traces.append(None)
        return jnp.zeros((8, 2))

    env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    policy = JaxPolicy(lambda params, shown, key: function(params, shown, key)[: len(shown), :1])
    for params in (None, None, {"gain": jnp.float32(1)}, {"gain": jnp.float32(2)}):
        env.rollout(3, replace(policy, params=params))

    assert len(traces) == 2  # with and without parameters


@pytest.mark.parametrize("callback", [None, lambda env, td: None], ids=["compiled", "stepped"])
def test_a_policy_in_jax_sees_the_same_compiled_and_stepped(walker, callback):
    shown = []

    def function(params, observation, key):
        shown.append(sorted(observation))
        return jnp.zeros((len(observation["place"]), 2))

    env = TransformedEnv(walker, RewardSum(reward_spec=True))
    env.rollout(2, JaxPolicy(function), callback=callback)

    assert set(map(tuple, shown)) == {("place", "sight")}


@pytest.mark.parametrize("callback", [None, lambda env, td: None], ids=["compiled", "stepped"])
@pytest.mark.parametrize("names", [["wheel"], ["wheel", "gears"], None])
def test_a_policy_in_jax_that_names_other_actions_is_told_which_there_are(names, callback):
    def function(params, shown, key):
        rows = jnp.zeros((len(shown), 2))
        return rows if names is None else dict.fromkeys(names, rows)

    env = JaxEnv(Steered(), batch_size=[2])
    with pytest.raises(PolicyError, match=r"the actions \['gear', 'wheel'\]\. Return a dict"):
        env.rollout(2, JaxPolicy(function), callback=callback)


def telling(params, shown, key):
    """Walk outwards, and tell more than the action."""
    place = shown["place"]
    return {
        "action": 0.9 * jnp.sign(place),
        "log_prob": -jnp.sum(place**2, -1),
        "stats": {"loc": place * 2, "seen": shown["sight"]["lamps"]},
        ("stats", "level"): shown["sight"]["level"][:, None],
    }


def test_all_that_a_policy_in_jax_returns_is_recorded_compiled_and_stepped(walker):
    run = {"break_when_any_done": False}
    compiled = seeded(walker).rollout(STEPS, JaxPolicy(telling), **run)
    stepped = seeded(walker).rollout(
        STEPS, JaxPolicy(telling), callback=lambda env, td: None, **run
    )

    assert compiled["next", "done"].any()
    assert_close(compiled, stepped)
    assert {path: leaf.dtype for path, leaf in leaves(compiled)} == {
        path: leaf.dtype for path, leaf in leaves(stepped)
    }
    torch.testing.assert_close(compiled["log_prob"], -compiled["place"].square().sum(-1))
    assert compiled["stats", "seen"].equal(compiled["sight", "lamps"])
    assert compiled["stats", "level"].shape == (4, STEPS, 1)


def test_what_a_policy_in_jax_returns_wins_over_what_the_data_held(walker):
    td = seeded(walker).reset().set("log_prob", torch.full((4,), 7.0))

    data, following = walker.unroll(td, STEPS, JaxPolicy(telling))

    assert (data["log_prob"] <= 0).all()
    assert "log_prob" not in following.keys()


def test_a_policy_in_jax_may_return_its_actions_under_their_own_keys():
    def function(params, shown, key):
        rows = len(shown)
        actions = {"wheel": jnp.full((rows, 2), 0.5), "gear": jnp.full(rows, 3)}
        return {"action": actions, "value": shown[:, 0]}

    env = JaxEnv(Steered(), batch_size=[2])
    compiled = seeded(env).rollout(3, JaxPolicy(function))
    stepped = seeded(env).rollout(3, JaxPolicy(function), callback=lambda env, td: None)

    assert_same(compiled, stepped)
    assert compiled["value"].tolist() == [[0.0, 31.0, 62.0]] * 2
    assert compiled["action", "gear"].argmax(-1).eq(3).all()


def remembering_in_jax(params, shown, key):
    memory = shown["memory"] + jnp.array([1.0, 0.5])
    return {"action": 0.2 * jnp.sign(shown["place"]) * memory, ("next", "memory"): memory}


def test_a_policy_in_jax_remembers_within_an_episode(walker):
    env, policy = primed(walker, 0.25), JaxPolicy(remembering_in_jax)
    root = seeded(env, 1).reset()

    data, following = env.unroll(root.clone(), STEPS, policy)
    stepped, _ = looped(env, root.clone(), policy.bound_to(env), STEPS)

    begun = data["next", "done"].squeeze(-1)[:, :-1]
    assert begun.any() and (data["memory"][:, 1:][begun] == 0.25).all()
    assert (data["memory"][:, 1:][~begun] > 0.25).all()
    assert_alike(data, stepped)
    assert following["memory"].equal(data["next", "memory"][:, -1])


@pytest.mark.parametrize("callback", [None, lambda env, td: None], ids=["compiled", "stepped"])
@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ({"act": "action"}, PolicyError, r"returned \['act'\].*or a dict with 'action'"),
        ({"place": "action"}, KeyCollisionError, "'place', which the env writes itself"),
        (
            {("next", "reward"): "rows"},
            KeyCollisionError,
            r"\('next', 'reward'\).*TensorDictPrimer",
        ),
        (
            {("next", "hidden"): "rows"},
            KeyCollisionError,
            r"\('next', 'hidden'\).*TensorDictPrimer",
        ),
        ({"value": "one"}, PolicyError, r"'value' with shape \(1,\).*for 4 rows.*\(4, \.\.\.\)"),
        ({"value": "number"}, PolicyError, r"'value' with shape \(\).*for 4 rows"),
        ({"value": "text"}, PolicyError, r"str as 'value'"),
        ({3: "rows"}, PolicyError, "the key 3"),
    ],
)
def test_what_a_policy_in_jax_may_not_return_is_told(walker, outputs, error, message, callback):
    def function(params, shown, key):
        kinds = {"rows": jnp.zeros(4), "one": jnp.zeros(1), "number": 0.0, "text": "high"}
        kinds["action"] = shown["place"]
        given = {name: kinds[kind] for name, kind in outputs.items()}
        return given if "act" in given else {"action": shown["place"], **given}

    with pytest.raises(error, match=message):
        seeded(walker).rollout(3, JaxPolicy(function), callback=callback)


def test_infos_are_not_given_to_a_plain_policy(walker):
    data = walker.rollout(2, lambda place, lamps, level: torch.zeros(*place.shape[:-1], 2))

    assert ("info", "steps") in data.keys(True)


def test_an_action_of_another_shape_is_refused(walker):
    policy = JaxPolicy(lambda params, shown, key: shown["place"][:, :1])

    with pytest.raises(ArgumentError, match=r"'action' with shape \(4, 1\).*\(rows, 2\)"):
        walker.unroll(seeded(walker).reset(), 3, policy)


# --------------------------------------------------------------------------- memory and transforms


@pytest.mark.rounding
def test_a_recurrent_policy_forgets_where_an_episode_ends(walker):
    env = TransformedEnv(walker, InitTracker())
    env.append_transform(TensorDictPrimer(hidden=Unbounded((3,)), expand_specs=True))
    module = remembering()

    compiled = seeded(env).rollout(STEPS, compile_policy(module), break_when_any_done=False)
    stepped = seeded(env).rollout(STEPS, module, break_when_any_done=False)

    assert_close(compiled, stepped.detach(), atol=TOLERANCE)
    begun = compiled["is_init"].squeeze(-1)
    assert begun[:, 1:].any()
    assert (compiled["hidden"][begun] == 0).all() and (compiled["hidden"][~begun] != 0).any()


@pytest.mark.slow
@pytest.mark.rounding
def test_what_a_policy_remembers_may_come_in_the_data(walker):
    env = TransformedEnv(walker, InitTracker())
    module = remembering()
    td = seeded(env).reset().set("hidden", torch.ones(4, 3))

    data, following = env.unroll(td.clone(), STEPS, compile_policy(module))
    stepped = env.rollout(STEPS, module, tensordict=td, auto_reset=False, break_when_any_done=False)

    assert_close(data, stepped.detach().exclude("state", ("next", "state")), atol=TOLERANCE)
    assert torch.equal(following["hidden"], data["next", "hidden"][:, -1])


def primed(env, value=0.0):
    primer = TensorDictPrimer(memory=Unbounded((2,)), expand_specs=True, default_value=value)
    return TransformedEnv(env, primer)


def looped(env, td, policy, steps):
    """Act and step from Python; gives the stacked transitions and the last root."""
    transitions = []
    for _ in range(steps):
        data, td = env.step_and_maybe_reset(policy(td))
        transitions.append(data)
    return torch.stack(transitions, 1), td


def assert_alike(unrolled, stepped):
    shared = stepped.select(*unrolled.keys(True, True))
    assert_close(unrolled, shared.detach(), atol=TOLERANCE)


@pytest.mark.parametrize(
    "out_key", [("next", "memory"), pytest.param("memory", marks=pytest.mark.slow)]
)
def test_what_a_policy_remembers_begins_with_what_its_primer_says(walker, out_key):
    env, module = primed(walker, 0.25), counting(out_key)
    td = seeded(env, 1).reset()
    before, runs = td.clone(), []

    for _ in range(3):
        data, td = env.unroll(td, STEPS, compile_policy(module))
        runs.append(data)
    stepped, _ = looped(env, before, module, 3 * STEPS)

    data = torch.cat(runs, 1)
    ends = data["next", "done"].squeeze(-1)
    assert len({tuple(row.tolist()) for row in ends}) > 1, "all rows end at the same times"
    begun = torch.cat([torch.ones(4, 1, dtype=torch.bool), ends[:, :-1]], 1)
    first = 0.25 if out_key != "memory" else 1.25  # what it has written there is shown
    assert (data["memory"][begun][:, 0] == first).all()
    assert (data["memory"][~begun][:, 0] > first).all()
    assert env.traces.keys() >= {"unroll"} and not env._route.outside
    assert_alike(data, stepped)


@pytest.mark.slow
def test_what_a_policy_remembers_is_zero_in_a_new_episode_if_nobody_says_otherwise(walker):
    module = counting()
    td = seeded(walker, 1).reset().set("memory", torch.full((4, 2), 0.5))
    before, runs = td.clone(), []

    for _ in range(2):
        data, td = walker.unroll(td, STEPS, compile_policy(module))
        runs.append(data)
    stepped, _ = looped(walker, before, module, 2 * STEPS)

    data = torch.cat(runs, 1)
    begun = data["next", "done"].squeeze(-1)[:, :-1]
    assert begun.any() and (data["memory"][:, 1:][begun] == 0).all()
    assert (data["memory"][:, 1:][~begun] > 0).all()
    assert_alike(data, stepped)


def test_what_a_policy_is_told_of_a_row_and_does_not_write_stays_with_the_row(walker):
    module = TensorDictModule(
        lambda place, task: place.sign() * task, in_keys=["place", "task"], out_keys=["action"]
    )
    td = seeded(walker).reset().set("task", torch.tensor([[0.1], [0.3], [0.5], [1.0]]))

    data, _ = walker.unroll(td.clone(), STEPS, compile_policy(module))
    stepped, _ = looped(walker, td.clone(), module, STEPS)

    assert data["next", "done"].any()
    assert (data["task"] == td["task"][:, None]).all()
    assert_alike(data, stepped)


def test_memory_that_no_reset_reaches_is_refused(walker):
    td = seeded(walker).reset().set("memory", torch.zeros(4, 2))

    with pytest.raises(PolicyError, match=r"\['memory'\].*under 'next'.*TensorDictPrimer"):
        walker.unroll(td, STEPS, compile_policy(counting("memory")))


@pytest.mark.rounding
def test_transforms_that_fuse_are_part_of_the_run(walker, drawn):
    env = TransformedEnv(walker, StepCounter(max_steps=4))
    compiled = seeded(env).rollout(STEPS, drawn, break_when_any_done=False)

    given = iter(compiled.select("action", "loc", "scale", "action_log_prob").unbind(1))
    stepped = seeded(env).rollout(
        STEPS, lambda td: td.update(next(given)), break_when_any_done=False
    )

    assert_same(compiled, stepped)
    assert compiled["next", "step_count"].max() == 4


# ------------------------------------------------------------------------------------------ errors


def test_a_compiled_plain_module_acts_when_it_is_called_with_a_root_or_with_leaves():
    module = nn.Linear(3, 2)
    policy, observation = compile_policy(module), torch.randn(4, 3)

    acted = policy(TensorDict({"observation": observation}, [4]))

    assert torch.equal(acted["action"], module(observation))
    assert torch.equal(policy(observation), module(observation))


def test_a_compiled_plain_module_that_cannot_know_its_keys_says_how_to_bind_it(walker):
    class Here(nn.Module):
        def forward(self, place, *others):
            return place / 2

    policy, root = compile_policy(Here()), seeded(walker).reset()

    with pytest.raises(PolicyError, match=r"'place'.*policy\.bound_to\(env\).*TensorDictModule"):
        policy(root)
    assert torch.equal(policy.bound_to(walker)(root.clone())["action"], root["place"] / 2)


def test_a_plain_module_is_stepped_by_rollout_and_refused_by_unroll(walker):
    module = steering()
    before = dict(walker.traces)

    seeded(walker).rollout(3, module)

    assert walker.traces.get("until") == before.get("until")
    with pytest.raises(PolicyError, match=r"got TensorDictModule.*compile_policy\(module\)"):
        walker.unroll(walker.reset(), 3, module)


def test_a_policy_that_reads_what_a_root_lacks_is_told_where_to_put_it(walker):
    with pytest.raises(MissingKeyError, match=r"reads \['hidden', 'is_init'\].*TensorDictPrimer"):
        walker.unroll(seeded(walker).reset(), 3, compile_policy(remembering()))


def test_a_policy_that_writes_no_action_is_refused(walker):
    module = TensorDictModule(nn.Linear(2, 2), in_keys=["place"], out_keys=["move"])

    with pytest.raises(MissingKeyError, match=r"writes \['move'\], but not \['action'\]"):
        walker.unroll(seeded(walker).reset(), 3, compile_policy(module))


def test_a_translation_error_reaches_the_caller_of_rollout(walker):
    module = TensorDictModule(
        lambda place: place @ torch.linalg.ldl_factor(torch.eye(2))[0],
        in_keys=["place"],
        out_keys=["action"],
    )

    with pytest.raises(TranslationError, match="has no translation to JAX"):
        seeded(walker).rollout(3, compile_policy(module))


@pytest.mark.parametrize("acting", ["nobody", "jax", "torch"])
def test_a_run_like_the_last_one_reads_no_spec(walker, steered, monkeypatch, acting):
    """What specs say of policies is read once: to read it takes as long as hundreds of steps of a small env."""
    in_jax = JaxPolicy(uniform_noise, {"gain": jnp.float32(1.0)})
    policy = {"nobody": None, "jax": in_jax, "torch": steered}[acting]
    _, root = walker.unroll(seeded(walker).reset(), STEPS, policy)
    specs_of, read = SpecNames._specs_of, []
    monkeypatch.setattr(
        SpecNames, "_specs_of", lambda env, side: read.append(side) or specs_of(env, side)
    )

    walker.unroll(root, STEPS, policy)

    assert read == []


@pytest.mark.slow
def test_a_forward_that_is_replaced_by_one_on_tensordicts_is_given_the_tensordict(walker):
    class Halves(nn.Module):
        def forward(self, place, lamps, level):
            return place / 2

    def forward(self, tensordict):
        return tensordict.set("action", -tensordict["place"])

    policy, begin = compile_policy(Halves()), seeded(walker).reset()
    halved, _ = walker.unroll(begin, 1, policy)

    Halves.forward = forward
    turned, _ = walker.unroll(begin, 1, policy)

    torch.testing.assert_close(halved["action"], halved["place"] / 2)
    torch.testing.assert_close(turned["action"], -turned["place"])


# --------------------------------------------------------------- one translation in several programs


class Held(nn.Module):
    """Adds a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.shift = torch.tensor([0.25])

    def forward(self, observation):
        return torch.tanh(observation[..., [0]] + self.shift)


class MadeInside(nn.Module):
    """Multiplies by a tensor that its forward makes."""

    def forward(self, observation):
        return torch.tanh(observation[..., :1] * torch.tensor([0.5]))


def bounded_normal():
    """An actor whose distribution holds the bounds of the actions, as recipes of PPO and SAC have it."""
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": torch.tensor([-2.0]), "high": torch.tensor([2.0])},
        return_log_prob=True,
    )


@pytest.mark.parametrize("make", [Held, MadeInside, bounded_normal])
@pytest.mark.slow
def test_one_compiled_policy_serves_several_programs(make):
    policy = compile_policy(make())
    small = JaxEnv(Pendulum(), batch_size=[3])
    large = JaxEnv(Pendulum(), batch_size=[5], episode_length=4)

    runs = [
        env.unroll(seeded(env).reset(), steps, policy)[0]
        for env, steps in ((small, 3), (small, 4), (large, 3))
    ]
    rollout = seeded(small).rollout(4, policy, break_when_any_done=False)

    assert all(run["action"].abs().max() <= 2 for run in runs)
    if make is not bounded_normal:
        for run in (*runs, rollout):
            torch.testing.assert_close(run["action"], policy.module(run["observation"]))
