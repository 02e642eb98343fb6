"""Entries that exist from a reset on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    Bounded,
    BraxEnv,
    Categorical,
    Compose,
    Composite,
    GymEnv,
    JaxEnv,
    SerialEnv,
    TensorDictPrimer,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)
from envkit.errors import PrimerError
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.transform_envs import TwoTeams
from tests.zoo.walkers import Pendulum

make_count = partial(Count, 3)
NONSTOP = {"break_when_any_done": False}


def remember(td):
    """Act, and add one to the memory of the next moment."""
    return td.update({"action": torch.zeros(*td.batch_size, 1, dtype=torch.int64)}).set(
        ("next", "mem"), td["mem"] + 1
    )


def test_a_primed_entry_is_zero_at_first_and_carried_over():
    env = TransformedEnv(make_count(), TensorDictPrimer(mem=Unbounded((2,))))

    data = env.rollout(3)

    assert env.reset()["mem"].tolist() == [0, 0]
    assert data["next", "mem"].shape == (3, 2) and not data["next", "mem"].any()
    assert "mem" in env.observation_keys and "mem" in env.state_keys
    check_env_specs(env)


def test_a_policy_that_writes_the_entry_is_obeyed_until_the_next_reset():
    env = TransformedEnv(make_count(), TensorDictPrimer(mem=Unbounded((1,))))

    data = env.rollout(7, remember, **NONSTOP)

    assert data["mem"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert data["next", "mem"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_a_value_the_env_writes_stays():
    env = TransformedEnv(
        make_count(), TensorDictPrimer(count=Unbounded((1,), dtype=torch.int64), default_value=7)
    )

    data = env.rollout(3)

    assert data["count"].flatten().tolist() == [0, 1, 2]


def test_the_batch_axes_are_put_in_front():
    env = TransformedEnv(
        SerialEnv(2, make_count), TensorDictPrimer(mem=Unbounded((2,)), expand_specs=True)
    )

    assert env.reset()["mem"].shape == (2, 2)
    check_env_specs(env)


def test_specs_that_have_the_batch_axes_are_taken_as_they_are():
    whole = Composite(mem=Unbounded((2, 3)), shape=[2])
    for primer in (
        TensorDictPrimer(whole),
        TensorDictPrimer(mem=Unbounded((2, 3)), expand_specs=False),
    ):
        env = TransformedEnv(SerialEnv(2, make_count), primer)

        assert env.reset()["mem"].shape == (2, 3)
        check_env_specs(env)


@pytest.mark.parametrize(
    ("primers", "expand"),
    [
        (Composite(mem=Unbounded((1, 3)), shape=(1,)), None),
        (Composite(mem=Unbounded((3,))), False),
    ],
)
def test_specs_that_do_not_fit_the_batch_are_refused(primers, expand):
    env = TransformedEnv(SerialEnv(2, make_count), TensorDictPrimer(primers, expand_specs=expand))

    with pytest.raises(RuntimeError, match="expand_specs=True"):
        _ = env.observation_spec


def test_an_unlocked_env_is_primed_at_any_batch_size():
    env = TransformedEnv(StatelessCount(5), TensorDictPrimer(mem=Unbounded((2,)), default_value=3))

    assert env.reset(TensorDict(batch_size=[4]))["mem"].tolist() == [[3, 3]] * 4
    assert env.rollout(2, tensordict=TensorDict(batch_size=[4]))["mem"].shape == (4, 2, 2)


# ------------------------------------------------------------------------------------------- values


def test_defaults_are_numbers_functions_or_one_of_these_by_key():
    env = TransformedEnv(
        SerialEnv(2, make_count),
        TensorDictPrimer(
            Composite(a=Unbounded((1,)), b=Unbounded((1,)), n=Composite(c=Unbounded((1,)))),
            default_value={"a": 4, ("n", "c"): lambda: torch.tensor([5.0])},
            expand_specs=True,
        ),
    )

    root = env.reset()

    assert root["a"].flatten().tolist() == [4, 4]
    assert root["b"].flatten().tolist() == [0, 0]
    assert root["n", "c"].flatten().tolist() == [5, 5]


def test_one_function_may_give_all_values():
    env = TransformedEnv(
        make_count(),
        TensorDictPrimer(
            mem=Unbounded((2,)),
            default_value=lambda: TensorDict({"mem": torch.tensor([1.0, 2.0])}),
            single_default_value=True,
        ),
    )

    assert env.reset()["mem"].tolist() == [1, 2]


def test_random_values_come_from_the_spec_and_the_seed_of_the_env():
    spec = Bounded(2.0, 3.0, (4,))
    env = TransformedEnv(make_count(), TensorDictPrimer(mem=spec, random=True))
    torch_state = torch.random.get_rng_state()

    runs = []
    for _ in range(2):
        env.set_seed(1)
        runs.append((env.reset()["mem"], env.reset()["mem"]))

    (first, second), again = runs
    assert spec.is_in(first) and not first.equal(second)
    assert first.equal(again[0]) and second.equal(again[1])
    assert torch.random.get_rng_state().equal(torch_state)


def test_new_values_are_drawn_only_where_an_episode_begins():
    env = TransformedEnv(
        SerialEnv(2, make_count),
        TensorDictPrimer(mem=Bounded(0.0, 1.0, (1,)), random=True, expand_specs=True),
    )
    td = env.reset()
    before = td["mem"].clone()

    env.reset(td.set("_reset", torch.tensor([True, False])))

    assert td["mem"][1] == before[1] and td["mem"][0] != before[0]


def test_values_are_checked_against_their_specs():
    env = TransformedEnv(
        make_count(), TensorDictPrimer(mem=Bounded(0.0, 1.0, (1,)), default_value=2)
    )
    with pytest.raises(PrimerError, match=r"'mem'.*is not in its spec"):
        env.reset()

    wrong_shape = TensorDictPrimer(mem=Unbounded((2,)), default_value=lambda: torch.zeros(3))
    with pytest.raises(PrimerError, match=r"'mem' has shape \(3,\)"):
        TransformedEnv(make_count(), wrong_shape).reset()


# -------------------------------------------------------------------------------------------- resets


def test_with_several_resets_the_one_to_obey_must_be_named():
    with pytest.raises(RuntimeError, match="reset_key="):
        TransformedEnv(TwoTeams(), TensorDictPrimer(mem=Unbounded((1,)))).reset()

    env = TransformedEnv(
        TwoTeams((2, 3)), TensorDictPrimer(mem=Unbounded((1,)), reset_key=("b", "_reset"))
    )

    def act(td):
        return env.rand_action(td).set(("next", "mem"), td["mem"] + 1)

    assert env.rollout(5, act, **NONSTOP)["mem"].flatten().tolist() == [0, 1, 2, 0, 1]


def test_what_no_primer_declares_obeys_the_reset_of_its_group_and_without_one_it_is_refused():
    def remembering(*place):
        def act(td):
            seen = td.get((*place, "seen"), torch.zeros(1))
            td.set((*place, "seen"), seen)
            return TwoTeams.rand_action(env, td).set(("next", *place, "seen"), seen + 1)

        return act

    env = TwoTeams((2, 3))

    assert env.rollout(5, remembering("b"), **NONSTOP)["b", "seen"].flatten().tolist() == [
        0,
        1,
        2,
        0,
        1,
    ]
    with pytest.raises(PrimerError, match=r"'seen'.*\['a', 'b'\].*reset_key="):
        env.rollout(5, remembering(), **NONSTOP)


@pytest.mark.slow
def test_numbers_run_inside_programs_and_other_values_around_them():
    specs = {"mem": Unbounded((2,)), "flag": Categorical(2, dtype=torch.bool, shape=(1,))}
    fusing = TensorDictPrimer(specs, default_value={"mem": 0.5, "flag": True}, expand_specs=True)
    others = [
        TensorDictPrimer(specs, random=True),
        TensorDictPrimer(specs, default_value={"mem": lambda: torch.ones(2)}),
        TensorDictPrimer(specs, call_before_env_reset=True),
        OwnFresh(specs),
    ]
    env = TransformedEnv(BraxEnv("fast", batch_size=[3], device="cpu", episode_length=2), fusing)

    data, _ = env.unroll(env.reset(), 3)

    assert (data["mem"] == 0.5).all() and data["flag"].all() and data["flag"].dtype == torch.bool
    assert not any(primer.fuses for primer in others)
    check_env_specs(env)


class OwnFresh(TensorDictPrimer):
    """A subclass that makes values in its own way."""

    def _fresh(self, like):
        return super()._fresh(like)


def test_a_primer_named_like_an_action_changes_the_action():
    env = TransformedEnv(make_count(), TensorDictPrimer(action=Categorical(5, shape=(1,))))

    assert env.action_spec == Categorical(5, shape=(1,))
    assert env.reset()["action"].tolist() == [0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("Pendulum-v1"),
        lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        lambda: JaxEnv(Pendulum(), batch_size=[2], device="cpu"),
    ],
    ids=["single", "serial", "jax"],
)
def test_a_primed_action_shows_the_last_one_until_the_next_is_written(make):
    base = make()
    env = TransformedEnv(base, TensorDictPrimer(action=base.action_spec_unbatched.clone()))
    seen = []

    def policy(td):
        seen.append(td["action"].clone())
        return td.set("action", td["action"] + 0.25)

    check_env_specs(env)
    data = env.rollout(3, policy)

    assert torch.stack(seen, -2).flatten().tolist() == [0, 0.25, 0.5] * base.numel()
    assert data["next", "action"].equal(data["action"])
    assert data["action"].flatten().tolist() == [0.25, 0.5, 0.75] * base.numel()


class Resumes(StatelessCount):
    """Begins at the count it is given."""

    def _reset(self, td, **kwargs):
        given = None if td is None else td.get("count", None)
        out = super()._reset(td)
        return out if given is None else out.set("count", given.clone())


def test_values_can_be_given_to_the_reset_of_the_env():
    primer = TensorDictPrimer(
        count=Unbounded((1,), dtype=torch.int64), default_value=2, call_before_env_reset=True
    )
    env = TransformedEnv(Resumes(5), Compose(primer))

    data = env.rollout(9)

    assert data["count"].flatten().tolist() == [2, 3, 4]


def test_a_call_writes_the_entries_into_data():
    primer = TensorDictPrimer(mem=Unbounded((2,)), default_value=1)

    assert primer(TensorDict(batch_size=[3]))["mem"].tolist() == [[1, 1]] * 3
    given = TensorDict({"mem": torch.zeros(2)})
    assert primer(given)["mem"].tolist() == [1, 1]
