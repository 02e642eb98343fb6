"""What envs say of themselves: specs, keys, fake data, locks, seeds, beside the reference library."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.envs import zoo
from tests.reference.envs.zoo import ENVS, UNEVEN

ALL = {**ENVS, **UNEVEN}
KINDS = ("action", "reward", "done", "observation", "state")
of_each_env = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
held = pytest.mark.parametrize("batched", [False, True], ids=["alone", "in a SerialEnv"])


def built(lib, make, batched):
    return lib.SerialEnv(2, lambda: make(lib)) if batched else make(lib)


@of_each_env
@held
def test_specs_of_each_kind(make, batched):
    names = [f"full_{kind}_spec{end}" for kind in KINDS for end in ("", "_unbatched")]
    names += ["observation_spec", "state_spec"]
    if not (make is zoo.nested or make is zoo.uneven):  # see the tests of only leaves
        names += ["action_spec", "reward_spec"]
    sides = ["input_spec", "output_spec", "input_spec_unbatched", "output_spec_unbatched"]

    def read(lib):
        env = built(lib, make, batched)
        is_stack = batched and make is zoo.uneven  # see the test of stacks without their batch
        kept = [name for name in [*names, *sides] if not (is_stack and name.endswith("unbatched"))]
        return {name: getattr(env, name) for name in kept}

    check_works_alike(read)


@pytest.mark.parametrize("name", ["action_spec", "reward_spec"])
def test_an_only_leaf_is_given_however_deep_it_is(name):
    differs("only-leaf", lambda lib: getattr(zoo.nested(lib), name))
    assert getattr(zoo.nested(OURS), name) is not None
    assert getattr(zoo.nested(OURS), name).shape[0] == 2


def test_stacked_specs_lose_their_batch_too():
    def unbatched(lib):
        env = lib.SerialEnv(2, lambda: zoo.uneven(lib))
        return env.full_observation_spec_unbatched["agents"].shape

    differs("unlike-agents", unbatched)
    assert unbatched(OURS) == (2,)


@of_each_env
@held
def test_keys_of_each_kind(make, batched):
    def read(lib):
        env = built(lib, make, batched)
        keys = {kind: sorted(map(str, getattr(env, f"{kind}_keys"))) for kind in KINDS}
        groups = [sorted(map(str, group)) for group in env.done_keys_groups]
        return keys, list(map(str, env.reset_keys)), groups

    check_works_alike(read)


@of_each_env
@pytest.mark.parametrize("name", ["action_key", "reward_key"])
def test_the_only_key_of_a_kind(make, name):
    check_same(lambda lib: getattr(make(lib), name))


@of_each_env
@held
def test_batch_size_device_and_lock(make, batched):
    def read(lib):
        env = built(lib, make, batched)
        size = env.batch_size, env.shape, env.batch_dims, env.ndim, env.ndimension(), env.numel()
        return size, env.device, env.batch_locked, env.is_spec_locked

    check_works_alike(read)


@of_each_env
@held
def test_zeros_in_the_layout_of_a_step(make, batched):
    def read(lib):
        fake = built(lib, make, batched).fake_tensordict()
        return list(fake.unbind(0)) if batched else fake

    check_works_alike(read)


@of_each_env
@held
def test_random_actions_obey_their_spec(make, batched):
    def drawn(lib):
        env = built(lib, make, batched)
        actions = env.rand_action().select(*env.action_keys)
        return all(bool(env.full_action_spec[key].is_in(actions[key])) for key in env.action_keys)

    check_works_alike(drawn)


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_random_actions_are_written_into_what_is_given(make):
    def drawn(lib):
        env = make(lib)
        td = env.reset()
        return env.rand_action(td) is td, td

    check_works_alike(drawn)


def test_random_actions_of_an_unlocked_env_are_of_the_given_batch():
    check_works_alike(lambda lib: zoo.unlocked(lib).rand_action(TensorDict(batch_size=[3])))


@pytest.mark.parametrize("make", [zoo.counter, zoo.batched])
def test_actions_are_counted_and_listed(make):
    check_works_alike(lambda lib: make(lib).all_actions())


def masked(lib, wrapped=False):
    """A counter whose second action is forbidden, by its spec or by an `ActionMask`."""

    class Masked(type(zoo.counter(lib))):
        def __init__(self):
            super().__init__()
            allowed = torch.tensor([True, False, True])
            self.action_spec = lib.Categorical(3, mask=None if wrapped else allowed)
            if wrapped:
                self.observation_spec["action_mask"] = lib.Binary(3, dtype=torch.bool)

        def _reset(self, tensordict=None):
            td = super()._reset(tensordict)
            return td.set("action_mask", torch.tensor([True, False, True])) if wrapped else td

    env = Masked()
    return lib.TransformedEnv(env, lib.ActionMask()) if wrapped else env


@pytest.mark.parametrize("wrapped", [False, True], ids=["in the spec", "in the data"])
def test_actions_that_a_mask_forbids_are_not_listed(wrapped):
    def listed(lib):
        env = masked(lib, wrapped)
        td = env.reset()
        return env.all_actions(), env.all_actions(td), env.cardinality()

    check_works_alike(listed)
    assert masked(OURS).all_actions()["action"].tolist() == [0, 2]


@pytest.mark.parametrize(("make", "count"), [(zoo.talking, 2), (zoo.groups, 16)])
def test_one_hot_actions_are_listed_also_of_groups(make, count):
    differs("all-specs-answer", lambda lib: make(lib).all_actions())
    env = make(OURS)

    actions = env.all_actions()

    assert len(actions) == count == len({str(row.to_dict()) for row in actions})
    assert env.full_action_spec.is_in(actions[1])


@pytest.mark.parametrize("make", [zoo.counter, zoo.talking, zoo.groups])
def test_actions_are_counted(make):
    check_works_alike(lambda lib: make(lib).cardinality())


def test_infinitely_many_actions_are_not_listed():
    check_same(lambda lib: zoo.dynamic(lib).all_actions())
    check_works_alike(lambda lib: zoo.dynamic(lib).cardinality())


@pytest.mark.parametrize("make", [m for m in ALL.values() if m is not zoo.batched])
@held
def test_envs_do_what_their_specs_say(make, batched):
    check_works_alike(lambda lib: lib.check_env_specs(built(lib, make, batched), seed=0))


def test_a_batch_that_pays_rows_which_it_was_told_to_leave_alone_is_found():
    def check(lib):
        return lib.check_env_specs(zoo.batched(lib))

    differs("check-finds-more", check)
    with pytest.raises(AssertionError, match="'reward' of rows that the '_step' mask leaves out"):
        check(OURS)


def wrong(lib, **changed):
    """A counter whose step gives other entries than its specs say; those that are None are left out."""

    class Wrong(zoo.counter_class(lib)):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            for name, value in changed.items():
                out = out.exclude(name) if value is None else out.set(name, value)
            return out

    return Wrong()


WRONG = {
    "an entry too many": {"other": torch.zeros(1)},
    "an entry too few": {"count": None},
    "another dtype": {"count": torch.zeros(1, dtype=torch.float64)},
    "another shape": {"count": torch.zeros(2)},
}


@pytest.mark.parametrize("changed", WRONG.values(), ids=WRONG)
def test_envs_that_do_otherwise_are_found(changed):
    compare = (
        partial(differs, "check-finds-more") if changed is WRONG["another shape"] else check_same
    )
    compare(lambda lib: lib.check_env_specs(wrong(lib, **changed)))
    with pytest.raises(AssertionError):
        OURS.check_env_specs(wrong(OURS, **changed))


@pytest.mark.parametrize("kind", ["observation", "action", "reward", "done"])
def test_specs_are_assigned_while_they_are_locked(kind):
    def assigned(lib):
        env = zoo.counter(lib)
        spec = getattr(env, f"full_{kind}_spec").clone()
        setattr(env, f"{kind}_spec", spec)
        return env.is_spec_locked, getattr(env, f"full_{kind}_spec")

    check_works_alike(assigned)


def test_specs_are_edited_where_they_are_unlocked():
    def edit(lib, lock):
        env = zoo.counter(lib).set_spec_lock_(lock)
        env.observation_spec["more"] = lib.Unbounded((2,))
        env.empty_cache()
        return sorted(map(str, env.observation_keys)), env.fake_tensordict()

    check_works_alike(lambda lib: edit(lib, False))
    check_same(lambda lib: edit(lib, True))


@pytest.mark.parametrize("kind", ["observation", "action", "reward", "done"])
def test_specs_without_the_batch_are_refused(kind):
    def assign(lib):
        setattr(zoo.batched(lib), f"{kind}_spec", lib.Composite(a=lib.Unbounded((1,))))

    with pytest.raises((ValueError, TypeError, RuntimeError)):
        assign(OURS)
    check_same(assign)


@pytest.mark.parametrize("static", [False, True])
@held
def test_seeds_follow_each_other(static, batched):
    check_works_alike(lambda lib: built(lib, zoo.counter, batched).set_seed(3, static_seed=static))


def test_flags_that_cut_an_episode_short_are_added():
    def keys(lib):
        env = zoo.nested(lib).add_truncated_keys()
        return env.full_done_spec, env.rollout(3)["next", "data", "truncated"]

    check_works_alike(keys)


def test_a_device_is_where_data_is_delivered():
    check_works_alike(lambda lib: zoo.counter(lib, device="cpu").rollout(2).device)
    check_works_alike(lambda lib: zoo.counter(lib).to("cpu").rollout(2).device)


def test_words_of_sub_envs_that_were_not_stepped_stay():
    def stay(lib, device):
        env = lib.SerialEnv(2, lambda: zoo.talking(lib), device=device)
        td = env.rand_action(env.reset()).set("_step", torch.tensor([True, False]))
        return env.step(td)["next"].exclude("terminated", "done")

    check_works_alike(lambda lib: stay(lib, None))
    check_works_alike(lambda lib: stay(lib, "cpu"))


def test_listed_actions_are_those_that_the_mask_allows():
    def listed(lib):
        env = lib.TransformedEnv(lib.TicTacToeEnv(), lib.ActionMask(mask_key="mask"))
        env.step(env.reset().set("action", torch.tensor(3)))
        return env.all_actions(), env.cardinality()

    check_works_alike(listed)
