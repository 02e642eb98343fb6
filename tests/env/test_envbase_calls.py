"""One reset and one step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, is_leaf_nontensor

from envkit import (
    BraxEnv,
    EnvBase,
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StaleNextWarning,
    StepCounter,
    TransformedEnv,
    step_mdp,
)
from envkit.errors import (
    BatchSizeError,
    DoneError,
    MissingKeyError,
    OutputShapeError,
    SpecTypeError,
)
from envkit.specs import Categorical, Composite, MultiCategorical, OneHot, Unbounded
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.jax_envs import Pendulum
from tests.zoo.shaped_envs import Groups, Quiet, Several, Wordy

mk = partial(Count, 5)
T, F = True, False

KINDS = {
    "count": mk,
    "stateless": partial(StatelessCount, 5, batch_size=[3]),
    "gym": partial(GymEnv, "CartPole-v1"),
    "serial": partial(SerialEnv, 3, mk),
    "parallel": partial(ParallelEnv, 2, mk, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(2, mk), SerialEnv(1, mk)]),
    "transformed": lambda: TransformedEnv(Count(5), StepCounter()),
    "brax": partial(BraxEnv, "fast", batch_size=[3], device="cpu"),
    "groups": Groups,
    "several": Several,
    "serial groups": partial(SerialEnv, 2, Groups),
    "serial several": partial(SerialEnv, 2, Several),
    "words": Wordy,
}


@pytest.fixture(scope="module", params=KINDS)
def env(request):
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


class Custom(Quiet):
    """An env whose reset and step a test gives."""

    def __init__(self, reset=None, step=None, reward_spec=None, **kwargs):
        super().__init__(**kwargs)
        bs = self.batch_size
        self.observation_spec = Composite(x=Unbounded((*bs, 1)), shape=bs)
        self.action_spec = Unbounded((*bs, 1))
        if reward_spec is not None:
            self.reward_spec = reward_spec
        self.answers = {"reset": reset, "step": step}

    def _answer(self, call, td):
        given = self.answers[call]
        if given is None:
            return TensorDict({"x": torch.zeros(*self.batch_size, 1)}, self.batch_size)
        return given(td) if callable(given) else given

    def _reset(self, td, **kwargs):
        return self._answer("reset", td)

    def _step(self, td):
        return self._answer("step", td)


def keys_of(td) -> set:
    """Leaf keys, those of non-tensor data included."""
    return set(td.keys(True, True, is_leaf=is_leaf_nontensor))


def acted(env: EnvBase) -> TensorDict:
    return env.rand_action(env.reset())


# ---------------------------------------------------------------------------------------- 5. reset


def test_the_worked_reset():
    td = Count(3).reset()

    assert {name: value.tolist() for name, value in td.items()} == {
        "count": [0],
        "done": [F],
        "terminated": [F],
    }


def test_a_reset_holds_observations_states_and_flags(env):
    td = env.reset()

    declared = {
        *env.full_observation_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
        *env.full_state_spec.keys(True, True),
    }
    assert keys_of(td) == declared
    assert not any(td[key].any() for key in env.done_keys)


def test_a_reset_writes_into_what_it_is_given(env):
    td = env.rand_step(env.reset())
    td = env.step_mdp(td).set("mine", torch.ones(env.batch_size))

    out = env.reset(td)

    assert out is td
    assert td["mine"].all()
    assert not any("_reset" in key for key in td.keys(True))


def test_reset_keywords_go_to_the_hook():
    seen = {}

    class Asked(Count):
        def _reset(self, td, **kwargs):
            seen.update(kwargs)
            return super()._reset(td)

    Asked().reset(speed=3, options={"a": 1})

    assert seen == {"speed": 3, "options": {"a": 1}}


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_output_has_the_batch_size_of_the_env(call):
    env = Custom(batch_size=[3], **{call: TensorDict({"x": torch.zeros(3, 1)})})

    with pytest.raises(BatchSizeError, match=rf"_{call} returned.*size \(\).*\(3,\)"):
        env.step(env.rand_action(env.reset()))


def test_flags_that_are_set_after_a_reset_are_refused():
    ended = TensorDict({"x": torch.zeros(1), "done": torch.ones(1, dtype=torch.bool)})

    with pytest.raises(DoneError, match=r"'done' is set right after a reset.*allow_done_after"):
        Custom(reset=ended.clone()).reset()
    allowed = Custom(reset=ended.clone(), allow_done_after_reset=True).reset()
    assert allowed["done"].all() and allowed["terminated"].all()


def test_flags_may_be_set_where_no_reset_was_asked_for():
    flags = torch.tensor([[T], [F]])
    out = TensorDict({"x": torch.zeros(2, 1), "done": flags}, [2])
    env = Custom(reset=out, batch_size=[2])
    td = TensorDict({"done": flags, "terminated": flags, "_reset": ~flags}, [2])

    env.reset(td)

    assert td["done"].equal(flags) and td["terminated"].equal(flags)


def test_a_flag_the_input_lacks_is_kept_with_a_warning():
    flags = torch.tensor([[T], [F]])
    out = TensorDict({"x": torch.zeros(2, 1), "done": flags, "terminated": flags}, [2])
    env = Custom(reset=out, batch_size=[2])

    with pytest.warns(UserWarning, match="where nothing was reset") as warned:
        td = env.reset(TensorDict({"_reset": ~flags}, [2]))

    assert len(warned) == 2
    assert td["done"].equal(flags) and td["terminated"].equal(flags)


def test_a_batch_locked_env_refuses_other_batches(env):
    if not env.batch_locked:
        pytest.skip("takes any batch size")
    other = TensorDict(batch_size=(7, *env.batch_size))

    for call in (env.reset, env.step, env.rand_action, env.rand_step):
        with pytest.raises(BatchSizeError, match=r"\(7,") as error:
            call(other.clone())
        assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("size", [(), (1,), (7,), (2, 5)])
@pytest.mark.parametrize("kind", ["stateless", "brax"])
def test_an_unlocked_env_takes_any_batch(kind, size):
    env = KINDS[kind]()

    td = env.rand_step(env.reset(TensorDict(batch_size=size)))

    assert td.batch_size == td["next"].batch_size == size
    assert td["next", "reward"].shape == (*size, 1)
    assert env.reset().batch_size == env.batch_size == (3,)
    assert not env.batch_locked


def test_a_rollout_has_the_batch_that_a_stateless_env_is_given():
    env = BraxEnv("fast", device="cpu")

    assert env.batch_locked is False
    assert env.rollout(2, tensordict=TensorDict(batch_size=[7])).shape == (7, 2)


# ----------------------------------------------------------------------------------------- 6. step


def test_a_step_writes_next_into_what_it_is_given(env):
    td = acted(env)

    out = env.step(td)

    assert out is td
    assert keys_of(td["next"]) == {
        *env.full_observation_spec.keys(True, True),
        *env.full_reward_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
    }


def test_what_is_under_next_wins():
    env = Count(5)
    td = acted(env)
    td["next"] = TensorDict({"count": torch.tensor([77]), "mine": torch.ones(2)})

    env.step(td)

    assert td["next", "count"].item() == 77
    assert td["next", "mine"].tolist() == [1, 1]
    assert td["next", "reward"].item() == 1


def stepped_again(env, handed=lambda td: td):
    """Step twice without going on to the next root, and give what the second step made."""
    return env.step(handed(env.step(acted(env))))["next"]


@pytest.mark.parametrize(
    "handed",
    [
        lambda td: td,
        lambda td: td.copy(),
        lambda td: td.clone(),
        lambda td: td.select("action", ("next", "count"), ("next", "reward")),
    ],
    ids=["same", "copy", "clone", "part"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_an_earlier_step_wrote_under_next_is_replaced(handed, mode):
    with (
        mode(),
        pytest.warns(StaleNextWarning, match=r"replaces.*td = env\.step_mdp\(td\)") as caught,
    ):
        following = stepped_again(Count(5), handed)

    assert following["count"].item() == 2
    assert caught[0].filename == __file__


def test_data_that_is_stepped_again_gives_one_warning_for_each_env():
    env = Count(9)
    td = acted(env)
    with pytest.warns(StaleNextWarning) as caught:
        counts = [env.step(td)["next", "count"].item() for _ in range(5)]

    assert counts == [1, 2, 3, 4, 5]
    assert len(caught) == 1


@pytest.mark.parametrize("kind", ["gym", "serial", "transformed"])
def test_a_rollout_of_data_that_was_stepped_begins_with_a_reset_and_gives_no_warning(kind):
    env = KINDS[kind]()
    td = env.rand_step(env.reset())

    assert env.rollout(2, tensordict=td).batch_size[-1] == 2


@pytest.mark.parametrize("make", [mk, KINDS["transformed"], KINDS["serial"]])
def test_data_that_was_reset_since_is_no_old_root(make):
    env = make()
    td = env.rand_step(env.reset())

    counts = [env.rand_step(env.reset(td))["next", "count"].flatten()[0].item() for _ in range(2)]
    data = env.rollout(2, tensordict=td)  # none gives a warning

    assert (counts, data["next", "count"].flatten()[0].item()) == ([1, 1], 1)


@pytest.mark.filterwarnings("ignore::envkit.StaleNextWarning")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("handed", [lambda td: td, lambda td: td.copy()], ids=["same", "copy"])
def test_what_the_caller_changed_in_an_earlier_outcome_wins(handed, in_place):
    def changed(td):
        if in_place:
            td["next", "reward"].fill_(77)
        else:
            td["next", "reward"] = torch.full((1,), 77.0)
        return handed(td)

    following = stepped_again(Count(5), changed)

    assert (following["count"].item(), following["reward"].item()) == (2, 77)


@pytest.mark.filterwarnings("ignore::envkit.StaleNextWarning")
def test_what_an_env_of_another_kind_wrote_under_next_is_replaced():
    other = Count(5)
    td = other.step(acted(other))
    env = TransformedEnv(Count(5), StepCounter())
    env.rand_step(env.reset())

    following = env.step(td)["next"]

    assert (following["count"].item(), following["step_count"].item()) == (2, 1)


@pytest.mark.filterwarnings("ignore::envkit.StaleNextWarning")
def test_what_a_policy_remembers_stays_where_an_earlier_outcome_is_replaced():
    def remember(td):
        return td.set(("next", "memory"), torch.ones(3))

    following = stepped_again(Count(5), remember)

    assert (following["count"].item(), following["memory"].tolist()) == (2, [1, 1, 1])


def test_what_is_under_a_node_of_next_wins():
    env = Several()
    td = acted(env)
    td["next", "deep", "twice"] = torch.tensor([7.0, 7.0])

    env.step(td)

    assert td["next", "deep", "twice"].tolist() == [7, 7]
    assert ("deep", "cost") in td["next"].keys(True)


def test_rewards_come_in_the_shape_of_their_spec():
    step = TensorDict({"x": torch.zeros(3, 1), "reward": torch.arange(3.0)}, [3])
    env = Custom(step=step, batch_size=[3])

    assert env.rand_step(env.reset())["next", "reward"].tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("key", ["reward", "terminated"])
def test_a_reward_or_flag_has_one_value_an_element(key, size):
    value = torch.zeros(size, dtype=torch.bool if key == "terminated" else torch.float32)
    env = Custom(step=TensorDict({"x": torch.zeros(3, 1), key: value}).set("x", torch.zeros(1)))

    with pytest.raises(
        OutputShapeError, match=rf"'{key}' has shape \({size},\).*asks for \(1,\).*one value"
    ) as error:
        env.step(acted(env))
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize(
    ("make", "lacking"),
    [
        (Several, r"\('deep', 'force'\)"),
        (partial(StatelessCount, 5), "'action', 'count'"),
        (lambda: Custom(step=lambda td: td.get("action") + 1), "'action'"),
    ],
)
def test_an_input_that_is_missing_is_named(make, lacking):
    env = make()
    td = TensorDict({"button": torch.zeros(1), "mine": torch.zeros(1)})

    with pytest.raises(MissingKeyError, match=rf"no {lacking}, which .*'mine'.*rand_action\(td\)"):
        env.step(td)


def test_an_error_that_is_no_missing_input_stays_as_it_is():
    env = Custom(step=lambda td: {}["absent"])

    with pytest.raises(KeyError, match="absent") as caught:
        env.step(env.rand_action(env.reset()))
    assert not isinstance(caught.value, MissingKeyError)


def test_an_env_that_reads_no_action_needs_none():
    assert Count(5).step(TensorDict())["next", "count"].item() == 1


def test_type_checks_name_the_entry():
    step = TensorDict({"x": torch.zeros(1, dtype=torch.float64)})
    strict, lax = Custom(step=step, run_type_checks=True), Custom(step=step)

    with pytest.raises(SpecTypeError, match=r"'x' has dtype torch.float64.*torch.float32") as error:
        strict.step(acted(strict))
    assert isinstance(error.value, TypeError)
    assert lax.step(acted(lax))["next", "x"].dtype == torch.float64


def test_preset_values_are_not_type_checked():
    env = Count(5, run_type_checks=True)
    td = acted(env)
    td["next", "count"] = torch.tensor([7.5])

    assert env.step(td)["next", "count"].item() == 7.5


# ------------------------------------------------------------------------------- the next root


def transition() -> TensorDict:
    return TensorDict(
        {
            "obs": torch.tensor([0]),
            "action": torch.tensor([5]),
            "other": torch.tensor([7]),
            "done": torch.tensor([F]),
            "next": {
                "obs": torch.tensor([1]),
                "reward": torch.tensor([2.0]),
                "done": torch.tensor([T]),
            },
        }
    )


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"obs", "other", "done"}),
        ({"keep_other": False}, {"obs", "done"}),
        ({"exclude_reward": False}, {"obs", "other", "done", "reward"}),
        ({"exclude_done": True}, {"obs", "other"}),
        ({"exclude_action": False}, {"obs", "other", "done", "action"}),
    ],
)
def test_the_table_of_step_mdp(options, keys):
    root = step_mdp(transition(), **options)

    assert set(root.keys()) == keys
    assert root["obs"].item() == 1
    assert "done" not in keys or root["done"].all()
    assert "action" not in keys or root["action"].item() == 5


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("size", [(), (2,), (2, 3)])
@pytest.mark.parametrize("flags", range(16))
def test_step_mdp_in_all_combinations(flags, size, lazy):
    if lazy and not size:
        pytest.skip("a lazy stack has a batch")
    names = ("keep_other", "exclude_reward", "exclude_done", "exclude_action")
    options = {name: bool(flags >> bit & 1) for bit, name in enumerate(names)}
    td = transition().expand(*size).clone()
    if lazy:
        td = LazyStackedTensorDict(*td.unbind(0), stack_dim=0)

    root = step_mdp(td, **options)

    kept = {"obs"}
    kept |= {"other"} if options["keep_other"] else set()
    kept |= set() if options["exclude_action"] else {"action"}
    kept |= set() if options["exclude_reward"] else {"reward"}
    kept |= set() if options["exclude_done"] else {"done"}
    assert set(root.keys()) == kept
    assert root.batch_size == size
    assert isinstance(root, LazyStackedTensorDict) == lazy


def test_step_mdp_writes_into_what_it_is_given():
    into = TensorDict({"mine": torch.ones(1)})

    out = step_mdp(transition(), into)

    assert out is into
    assert set(into.keys()) == {"mine", "obs", "other", "done"}


def test_step_mdp_with_nested_keys():
    td = TensorDict(
        {
            "agents": {"obs": 0, "action": 1, "done": F, "terminated": F},
            "next": {
                "agents": {"obs": 1, "reward": 2.0, "done": T, "terminated": T, "truncated": F}
            },
        }
    )
    keys = {name: ("agents", name) for name in ("reward", "done", "action")}

    root = step_mdp(td, exclude_done=True, **{f"{n}_keys": [key] for n, key in keys.items()})

    assert set(root.keys(True, True)) == {("agents", "obs")}


def test_masks_are_no_part_of_the_next_root():
    td = transition()
    td["_step"] = torch.tensor(T)
    td["_reset"] = torch.tensor([T])
    td["next", "_reset"] = torch.tensor([T])

    assert not {"_step", "_reset"} & set(step_mdp(td).keys())


def test_the_next_root_of_an_env(env):
    td = env.step(acted(env).set("mine", torch.zeros(env.batch_size)))

    root = env.step_mdp(td)

    declared = {*env.full_observation_spec.keys(True, True), *env.full_done_spec.keys(True, True)}
    assert keys_of(root) == declared | {"mine"}
    assert root.batch_size == td.batch_size


def test_the_worked_next_root():
    env = Count(5)

    assert sorted(env.step_mdp(env.rand_step(env.reset())).keys()) == [
        *("count", "done", "terminated")
    ]


def test_a_reward_that_is_a_state_is_carried():
    env = Custom(reward_spec=Composite(gain=Unbounded((1,))))
    env.state_spec = Composite(gain=Unbounded((1,)))
    td = env.step(acted(env).set("gain", torch.ones(1)))

    assert env.step_mdp(td)["gain"].item() == 0


def test_words_are_carried():
    env = Wordy()

    assert env.step_mdp(env.rand_step(env.reset()))["word"] == "one"


# ----------------------------------------------------------------------------- done, then reset


def test_any_done_asks_the_levels_that_decide():
    env = Groups(n=2)
    root = env.step_mdp(env.rand_step(env.reset()))
    assert root["agent0", "done"].all()  # and the root is not

    assert not env.any_done(root)
    assert env.any_done(root.set("done", torch.tensor([T])))

    assert root["_reset"].tolist() == [T]
    assert ("agent0", "_reset") not in root.keys(True)


def test_any_done_writes_nothing_when_nothing_is():
    env = Several()
    root = env.step_mdp(env.rand_step(env.reset()))

    assert not env.any_done(root)
    assert not any("_reset" in key for key in root.keys(True, True))


def test_maybe_reset_leaves_what_goes_on():
    env = Count(5)
    going = TensorDict({"count": torch.tensor([9]), "done": torch.tensor([F])})
    ended = TensorDict({"count": torch.tensor([9]), "done": torch.tensor([T])})

    assert env.maybe_reset(going) is going
    assert going["count"].item() == 9
    assert env.maybe_reset(ended)["count"].item() == 0
    assert not ended["done"].any()


def test_what_is_done_below_a_level_that_goes_on_waits_for_it():
    env = Groups(n=3)
    data, root = None, env.reset()
    for _ in range(2):
        data, root = env.step_and_maybe_reset(env.rand_action(root))
    assert data["next", "agent0", "done"].all()

    assert root["agent0", "done"].all() and not root["done"].any()
    assert env.c == 2
    data, root = env.step_and_maybe_reset(env.rand_action(root))
    assert data["next", "done"].all()
    assert env.c == 0 and not root["agent0", "done"].any()


@pytest.mark.parametrize("make", [Groups, Several])
@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_a_batch_ends_its_rows_as_each_env_alone_does(make, batched):
    alone = make(3).rollout(7, break_when_any_done=False)

    env = batched(2, partial(make, 3))
    rows = env.rollout(7, break_when_any_done=False)
    env.close()

    for key in (*make().observation_keys, *make().done_keys):
        assert rows["next"][key][1].equal(alone["next"][key])
        assert rows[key][0].equal(alone[key])


def test_the_worked_step_and_maybe_reset():
    env = SerialEnv(2, [partial(Count, 1), partial(Count, 3)])

    data, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    env.close()

    assert data["next", "count"].tolist() == [[1], [1]]
    assert root["count"].tolist() == [[0], [1]]


# ------------------------------------------------------------------------------------- actions


def test_a_random_action_is_in_its_spec(env):
    td = env.rand_action()

    assert td.batch_size == env.batch_size
    for key in env.action_keys:
        assert env.full_action_spec[key].is_in(td[key])


def test_a_random_action_is_written_into_what_is_given(env):
    td = env.reset()

    assert env.rand_action(td) is td
    assert set(env.action_keys) <= set(td.keys(True, True))


@pytest.mark.parametrize("size", [(), (5,), (2, 3)])
def test_an_unlocked_env_samples_for_the_data_it_is_given(size):
    env = StatelessCount()

    assert env.rand_action(TensorDict(batch_size=size))["action"].shape == (*size, 1)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (Categorical(3, shape=(1,)), 3),
        (OneHot(4), 4),
        (MultiCategorical([2, 3]), 6),
        (Composite(a=Categorical(2), b=OneHot(3)), 6),
    ],
)
def test_all_actions_are_enumerated(spec, count):
    env = Count(5)
    env.action_spec = spec

    actions = env.all_actions()

    assert env.cardinality() == count
    assert actions.batch_size == (count,)
    for key in env.action_keys:
        leaf = env.full_action_spec[key]
        assert all(leaf.is_in(action[key]) for action in actions)
    rows = torch.cat([actions[key].reshape(count, -1).float() for key in env.action_keys], -1)
    assert rows.unique(dim=0).shape[0] == count


def test_a_fake_step_is_laid_out_like_a_real_one(env):
    fake, real = env.fake_tensordict(), env.rollout(1)[..., 0]

    assert keys_of(fake) == keys_of(real)
    assert fake.batch_size == env.batch_size
    for key in fake.keys(True, True):
        ours, theirs = fake.get(key), real.get(key)
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert not ours.any() or "action" in str(key)


# ------------------------------------------------------------------------- life, and being a module


def test_only_two_hooks_step_and_reset():
    written = set(vars(Count)) & {
        name for name in dir(EnvBase) if "step" in name or "reset" in name
    }

    assert written == {"_reset", "_step"}


def test_the_repr_says_what_an_env_is():
    assert repr(Count(3)) == "Count(batch_size=(), device=None)"


REPRS = {  # U2
    "gym": (
        lambda: GymEnv("CartPole-v1", frame_skip=2),
        "GymEnv('CartPole-v1', frame_skip=2, batch_size=()",
    ),
    "vector": (lambda: GymEnv("CartPole-v1", num_envs=2), "GymEnv('CartPole-v1', batch_size=(2,)"),
    "brax": (
        lambda: BraxEnv("fast", device="cpu", asymmetric_obs=False),
        "BraxEnv('fast', asymmetric_obs=False, batch_size=()",
    ),
    "jax": (lambda: JaxEnv(Pendulum(), episode_length=3), "JaxEnv(Pendulum, batch_size=()"),
    "mixed": (
        lambda: MixedEnv([GymEnv("CartPole-v1", num_envs=2)]),
        "MixedEnv([GymEnv('CartPole-v1', batch_size=(2,)",
    ),
    "transformed": (lambda: TransformedEnv(GymEnv("CartPole-v1")), "env=GymEnv('CartPole-v1', "),
}


@pytest.mark.parametrize("kind", sorted(REPRS))
def test_the_repr_names_the_simulator(kind):
    make, told = REPRS[kind]

    assert told in repr(make())


def test_the_repr_of_a_batch_names_what_it_is_made_of():
    with SerialEnv(2, lambda: GymEnv("CartPole-v1")) as env:
        env.start()

        assert repr(env).startswith(
            "SerialEnv(num_workers=2, batch_size=(2,), envs=GymEnv('CartPole-v1'"
        )
    assert repr(env) == "SerialEnv(num_workers=2, not started)"


@pytest.mark.parametrize("kind", ["count", "transformed", "stateless"])
def test_a_with_statement_closes_the_env_also_when_it_fails(kind):  # U2
    env = KINDS[kind]()

    def fail():
        with env as inside:
            assert inside is env
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert env.is_closed
    with KINDS[kind]() as other:
        other.close()
    assert other.is_closed


def test_words_survive_a_skipped_step():
    env = Wordy()
    td = env.rand_action(env.step_mdp(env.rand_step(env.reset())))

    out = env.step(td.set("_step", torch.tensor(F)))

    assert out["next", "word"] == "one"
    assert isinstance(out["next"].get("word"), NonTensorData)
    assert env.c == 1
