"""What holds transforms: how they are joined, moved and owned, and what is asked of them by hand."""

from __future__ import annotations

import pytest
import torch

from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.transforms.worlds import count, leaf_specs, played, rows


def names(transforms) -> list[str]:
    return [type(transform).__name__ for transform in transforms]


def specs(lib):
    return lib.Composite(a=lib.Bounded(-3.0, 3.0, (3, 1)), b=lib.Unbounded((2,)))


def both_outwards(lib):
    flattened = lib.FlattenObservation(-3, -1, in_keys=["a"], out_keys=["flat"])
    return lib.Compose(lib.UnsqueezeTransform(-1, in_keys=["a"]), flattened)


def both_inwards(lib):
    return lib.Compose(*(lib.UnsqueezeTransform(-1, in_keys=[], in_keys_inv=["a"]) for _ in "12"))


CHAINS = {
    "observation": both_outwards,
    "reward": lambda lib: lib.Compose(lib.BinarizeReward(["a"]), lib.StepCounter()),
    "done": both_inwards,
    "action": both_inwards,
    "state": both_inwards,
}


@pytest.mark.parametrize("kind", CHAINS)
def test_the_hooks_of_a_compose_chain_over_its_members(kind):
    make = CHAINS[kind]

    check_same(lambda lib: getattr(make(lib), f"transform_{kind}_spec")(specs(lib)))


LEAFWISE = {
    "ObservationNorm": lambda lib: lib.ObservationNorm(1.0, 2.0, in_keys=["a"]),
    "UnsqueezeTransform": lambda lib: lib.UnsqueezeTransform(-1, in_keys=["a"]),
    "SqueezeTransform": lambda lib: lib.SqueezeTransform(-1, in_keys=["a"]),
    "FlattenObservation": lambda lib: lib.FlattenObservation(-2, -1, in_keys=["a"]),
    "PermuteTransform": lambda lib: lib.PermuteTransform((-1, -2), in_keys=["a"]),
    "CatFrames": lambda lib: lib.CatFrames(2, -1, in_keys=["a"]),
    "ToTensorImage": lambda lib: lib.ToTensorImage(in_keys=["a"]),
}


@pytest.mark.parametrize("name", LEAFWISE)
def test_a_hook_given_one_leaf_gives_the_leaf_of_the_outcome(name):
    make = LEAFWISE[name]
    low, high = torch.full((4, 3, 1), -3.0), torch.full((4, 3, 1), 3.0)

    def call(lib):
        leaf = make(lib).transform_observation_spec(lib.Bounded(low, high))
        return [type(leaf).__name__, tuple(leaf.shape), leaf.dtype, leaf.space.low, leaf.space.high]

    check_same(call)


def test_a_reward_hook_given_one_leaf_gives_the_leaf_of_the_outcome():
    check_same(lambda lib: lib.BinarizeReward().transform_reward_spec(lib.Unbounded((1,))))


# -------------------------------------------------------------------------------------------- joining


def counted(lib, **keywords):
    inner = lib.TransformedEnv(count(lib), lib.StepCounter())
    return lib.TransformedEnv(inner, lib.Compose(lib.RewardSum(), lib.InitTracker()), **keywords)


def test_a_transformed_env_in_another_is_unwrapped_where_that_is_asked_for():
    def call(lib, **keywords):
        env = counted(lib, **keywords)
        return [type(env.base_env).__name__, names(env.transform), played(env, 3)]

    check_same(lambda lib: call(lib, auto_unwrap=True))
    check_same(lambda lib: call(lib, auto_unwrap=False))
    differs("nested-envs", call)
    assert type(counted(OURS).base_env).__name__ == "TransformedEnv"


def test_an_unwrapped_env_keeps_its_own_transforms():
    def call(lib):
        inner = lib.TransformedEnv(count(lib), lib.StepCounter())
        outer = lib.TransformedEnv(inner, lib.RewardSum(), auto_unwrap=True)
        return [type(inner.transform).__name__, leaf_specs(inner), len(outer.transform)]

    check_same(call)


def test_an_env_is_moved_when_it_is_wrapped():
    check_same(lambda lib: str(lib.TransformedEnv(count(lib), device="cpu").device))
    check_same(
        lambda lib: str(lib.TransformedEnv(count(lib), lib.StepCounter(), device="meta").device)
    )


@pytest.mark.parametrize("keywords", [{}, {"cache_specs": False}])
def test_specs_are_read_once_or_at_every_use(keywords):
    def call(lib):
        env = lib.TransformedEnv(count(lib), lib.StepCounter(), **keywords)
        same = env.observation_spec is env.observation_spec
        return [env.cache_specs, same, leaf_specs(env), played(env, 3)]

    check_same(call)


def test_an_appended_compose_is_flattened_and_others_are_not():
    def pair(lib):
        return lib.Compose(lib.RewardSum(), lib.InitTracker())

    def call(lib):
        first = lib.TransformedEnv(count(lib), lib.Compose(lib.StepCounter()))
        first.append_transform(pair(lib))
        second = lib.TransformedEnv(count(lib), lib.StepCounter())
        second.append_transform(pair(lib))
        third = lib.Compose(lib.StepCounter())
        third.append(pair(lib))
        fourth = lib.TransformedEnv(count(lib), lib.Compose(lib.StepCounter()))
        fourth.insert_transform(0, pair(lib))
        fifth = lib.Compose(lib.StepCounter(), pair(lib))
        return [names(held) for held in (first.transform, second.transform, third)] + [
            names(fourth.transform),
            names(fifth),
            played(first, 2),
        ]

    check_same(call)


# -------------------------------------------------------------------------------------------- owners


def test_members_of_a_compose_without_an_env_may_move():
    def call(lib):
        given = lib.Compose(lib.StepCounter(), lib.RewardSum())
        moved = lib.Compose(*given)
        env = lib.TransformedEnv(count(lib), moved)
        return [names(env.transform), played(env, 2)]

    check_same(call)


def test_a_transform_of_an_env_may_not_move():
    def call(lib, alive):
        transform = lib.StepCounter()
        env = lib.TransformedEnv(count(lib), lib.Compose(transform))
        held = env if alive else None
        del env
        lib.Compose(transform)
        return held

    check_same(lambda lib: call(lib, alive=True))
    with pytest.raises(AttributeError, match="belongs to an environment already"):
        call(OURS, alive=True)


def test_a_compose_whose_member_was_given_away_is_no_transform_of_an_env():
    member = OURS.StepCounter()
    first = OURS.Compose(member)
    OURS.Compose(member)

    with pytest.raises(AttributeError, match="was given to another one since"):
        OURS.TransformedEnv(count(OURS), first)


def test_what_is_added_to_an_env_in_eval_mode_is_in_eval_mode():
    def call(lib):
        env = lib.TransformedEnv(count(lib))
        env.eval()
        added, inserted = lib.RewardScaling(0.0, 1.0), lib.SignTransform(["count"], ["sign"])
        env.append_transform(added)
        env.insert_transform(0, inserted)
        return [added.training, inserted.training]

    check_same(call)


def test_the_mode_of_an_env_is_that_of_all_in_it():
    def modes(lib):
        env = lib.TransformedEnv(count(lib), lib.StepCounter())
        parts = [env, env.base_env, env.transform]
        env.eval()
        after = [part.training for part in parts]
        env.train()
        return after, [part.training for part in parts]

    differs("nested-envs", modes)
    assert modes(OURS) == ([False] * 3, [True] * 3)


def test_the_parent_is_one_transformed_env_until_the_list_of_transforms_changes():
    def call(lib):
        env = lib.TransformedEnv(count(lib), lib.Compose(lib.StepCounter(), lib.InitTracker()))
        before = [env.transform[i].parent for i in range(2)]
        played(env, 2)
        kept = [env.transform[i].parent is before[i] for i in range(2)]
        env.append_transform(lib.RewardSum())
        after = [env.transform[i].parent for i in range(3)]
        replaced = [after[i] is not before[i] for i in range(2)]
        shown = [sorted(parent.observation_spec.keys()) for parent in after]
        return [kept, replaced, shown, names([*before, *after]), names([after[0].base_env])]

    check_works_alike(call)


def test_counters_and_trackers_name_their_entries():
    def call(lib):
        counter, tracker = lib.StepCounter(step_count_key="age"), lib.InitTracker("begins")
        lib.TransformedEnv(count(lib), lib.Compose(counter, tracker)).reset()
        return

    def keys(lib):
        counter, tracker = lib.StepCounter(step_count_key="age"), lib.InitTracker("begins")
        env = lib.TransformedEnv(count(lib), lib.Compose(counter, tracker))
        env.reset()
        return [counter.step_count_keys, tracker.init_keys]

    check_same(call)
    check_same(keys)
    with pytest.raises(RuntimeError, match="only in one"):
        _ = OURS.StepCounter().step_count_keys


@pytest.mark.parametrize("leaves_out", [True, False])
def test_a_mark_that_a_later_transform_takes_away_stays_away(leaves_out):
    def call(lib):
        without = lib.ExcludeTransform("is_init")
        renamed = lib.RenameTransform(["is_init"], ["begins"])
        tracked = lib.Compose(lib.InitTracker(), without if leaves_out else renamed)
        env = lib.TransformedEnv(rows(lib), tracked)
        root = env.reset().set("_reset", torch.tensor([[True], [False]]))
        return [env.reset(root), env.rollout(7, break_when_any_done=False)["done"].shape]

    check_works_alike(call)
