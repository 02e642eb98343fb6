"""Names of `torchrl.envs` beside the envs themselves: what they give, and what they refuse."""

from __future__ import annotations

import gymnasium
import pytest
import torch
import torchrl.envs
from tensordict import TensorDict

import envkit
from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.envs import zoo

GROUPINGS = [
    ({"g": ["a", "b"]}, ["a", "b"]),
    ({"g": ["a"]}, ["a", "b"]),
    ({"g": ["a", "b"], "h": ["b"]}, ["a", "b"]),
    ({"g": ["a", "c"]}, ["a", "b"]),
    ({"g": []}, ["a"]),
    ({"g": ["a", "a"]}, ["a"]),
    ({}, []),
    ({"g": ["a"]}, ["a", "a"]),
    ({"b": ["a"], "a": ["b"]}, ["a", "b"]),
]


@pytest.mark.parametrize(("group_map", "names"), GROUPINGS, ids=str)
def test_each_agent_is_in_exactly_one_group(group_map, names):
    check_same(lambda lib: lib.check_marl_grouping(group_map, names))


def test_group_maps_follow_from_the_names_of_agents():
    check_works_alike(
        lambda lib: {m.name: m.get_group_map(["a", "b"]) for m in lib.MarlGroupMapType}
    )


@pytest.mark.parametrize("source", ["env", "function", "creator", "with keywords"])
def test_metadata_is_read_from_an_env_or_from_what_makes_one(source):
    def read(lib):
        call = {
            "env": lambda: lib.get_env_metadata(zoo.batched(lib)),
            "function": lambda: lib.get_env_metadata(lambda: zoo.batched(lib)),
            "creator": lambda: lib.get_env_metadata(lib.EnvCreator(lambda: zoo.batched(lib))),
            "with keywords": lambda: lib.get_env_metadata(
                lambda **kwargs: zoo.counter(lib, **kwargs), {"batch_size": (2,)}
            ),
        }[source]
        metadata = call()
        return (
            metadata.tensordict.exclude("_reset"),
            metadata.batch_size,
            metadata.batch_locked,
            metadata.device,
        )

    check_works_alike(read)


def test_a_step_of_zeros_holds_what_a_policy_writes():
    def act(td):
        return td.set("action", td["count"].long() + 1).set("hidden", td["count"] + 2)

    check_works_alike(lambda lib: lib.make_tensordict(zoo.counter(lib), act))
    check_works_alike(lambda lib: lib.make_tensordict(zoo.counter(lib)))


def test_the_library_of_a_gym_env_is_named():
    env = gymnasium.make("CartPole-v1")

    assert envkit.GymWrapper.get_library_name(env) == "gymnasium"
    assert torchrl.envs.GymWrapper.get_library_name(env) == "gymnasium"


def test_a_gym_env_with_workers_is_a_parallel_env(opened):
    env = opened(envkit.GymEnv("CartPole-v1", num_workers=2))

    assert isinstance(env, envkit.ParallelEnv)
    assert env.num_workers == 2
    assert env.is_closed  # nothing was started
    assert isinstance(envkit.GymEnv("CartPole-v1", num_workers=1), envkit.GymEnv)


def test_a_serial_env_is_built_like_a_parallel_one():
    check_works_alike(
        lambda lib: lib.SerialEnv(2, lambda: zoo.counter(lib), mp_start_method=None).reset()
    )
    check_same(
        lambda lib: lib.SerialEnv(2, lambda: zoo.counter(lib), mp_start_method="spawn").reset()
    )


def test_attributes_of_the_base_env_show_through_transforms():
    def seen(lib):
        class Hiding(zoo.counter_class(lib)):
            def __init__(self):
                super().__init__()
                self._hidden, self.shown = 5, 6

        env = lib.TransformedEnv(lib.TransformedEnv(Hiding(), lib.StepCounter()), lib.InitTracker())
        return env._hidden, env.shown, env.end

    check_works_alike(seen)


def test_specs_of_one_element_hold_for_the_batch_when_they_are_assigned():
    class_of = zoo.unbatched_class

    def specs(lib):
        env = class_of(lib)()
        kinds = ("observation", "action", "reward", "done", "state")
        names = [
            f"{full}{kind}_spec{end}"
            for full in ("", "full_")
            for kind in kinds
            for end in ("", "_unbatched")
        ]
        return {
            name: getattr(env, name)
            for name in [*names, "input_spec_unbatched", "output_spec_unbatched"]
            if not name.startswith("done_spec")
        }

    check_works_alike(specs)
    check_works_alike(lambda lib: class_of(lib)().rollout(2))


def test_a_done_flag_that_is_declared_alone_is_read_back_as_it_was():
    differs("only-leaf", lambda lib: zoo.unbatched_class(lib)().done_spec)
    assert zoo.unbatched_class(OURS)().done_spec.shape == (2, 1)


def test_one_done_flag_is_named_beside_its_twin():
    differs("only-leaf", lambda lib: zoo.counter(lib).done_key)
    assert zoo.counter(OURS).done_key == "done"


def test_specs_of_one_element_can_be_assigned_as_composites_too():
    def keys(lib):
        env = zoo.unbatched_class(lib)()
        env.full_action_spec_unbatched = lib.Composite(turn=lib.OneHot(3))
        env.full_reward_spec_unbatched = lib.Composite(pay=lib.Unbounded((1,)))
        return env.full_action_spec, env.action_keys, env.full_reward_spec, env.reward_keys

    check_works_alike(keys)


def test_sides_cannot_be_assigned_for_one_element_either():
    env = zoo.unbatched_class(OURS)()

    with pytest.raises(RuntimeError, match="Assign its parts"):
        env.input_spec_unbatched = env.input_spec_unbatched


FLAGS = [[False, False], [True, False], [False, True]]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("write_full_false", [True, False])
@pytest.mark.parametrize("key", ["_reset", "other", None])
@pytest.mark.parametrize("declared", [True, False])
def test_end_flags_are_put_together_and_stale_masks_removed(flags, write_full_false, key, declared):
    def put_together(lib):
        root, inner = torch.tensor(flags[:1]), torch.tensor(flags[1:])
        stale = torch.ones(1, dtype=torch.bool)
        below = TensorDict({"done": inner, "_reset": stale})
        td = TensorDict({"done": root, "terminated": root.clone(), "_reset": stale, "below": below})
        spec = None
        if declared:
            flag = lib.Categorical(2, shape=(1,), dtype=torch.bool)
            spec = lib.Composite(
                done=flag, terminated=flag.clone(), below=lib.Composite(done=flag.clone())
            )
        options = {"key": key, "write_full_false": write_full_false, "full_done_spec": spec}
        return bool(lib.terminated_or_truncated(td, **options)), td

    check_works_alike(put_together)


def test_whether_an_end_was_found_is_a_plain_bool():
    def flagged(lib):
        return lib.terminated_or_truncated(TensorDict({"done": torch.ones(1, dtype=torch.bool)}))

    differs("plain-bools", flagged)
    assert flagged(OURS) is True


SPECS = {
    "one leaf": lambda env: {"action_spec": env.action_spec},
    "one leaf of another name": lambda env: {"action_spec": env.action_spec, "action_key": "turn"},
    "all entries": lambda env: {"action_spec": env.full_action_spec},
}


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize("make", [zoo.counter, zoo.batched])
def test_a_random_policy_draws_what_its_spec_says(make, case):
    def drawn(lib):
        policy = lib.RandomPolicy(**SPECS[case](make(lib)))
        return policy(make(lib).reset())

    check_works_alike(drawn)


def test_a_random_policy_acts_in_rollouts():
    check_works_alike(
        lambda lib: zoo.several(lib).rollout(3, lib.RandomPolicy(zoo.several(lib).full_action_spec))
    )


def test_a_random_policy_without_a_spec_draws_for_the_env_it_runs_in():
    data = zoo.groups(OURS).rollout(3, OURS.RandomPolicy())

    assert data["sheep", "action"].sum(-1).eq(1).all()
    check_same(lambda lib: lib.RandomPolicy()(TensorDict()))
    with pytest.raises(RuntimeError, match=r"RandomPolicy\(env.full_action_spec\)"):
        OURS.RandomPolicy()(TensorDict())


def test_closing_again_is_silent():
    def closed_twice(lib):
        env = lib.SerialEnv(2, zoo.counter_class(lib))
        env.reset()
        env.close()
        env.close()
        return env.is_closed

    assert "True" in differs("closing-again", closed_twice)


def test_parts_begin_together():
    def begun(lib):
        resets = []

        class Noting(zoo.counter_class(lib)):
            def _reset(self, *args, **kwargs):
                resets.append(1)
                return super()._reset(*args, **kwargs)

        env = lib.SerialEnv(4, Noting)
        env[1:3].reset()
        return len(resets)

    assert "envkit: 4" in differs("parts-begin-together", begun)


def test_a_part_names_each_sub_env_once():
    def twice(lib):
        env = lib.SerialEnv(3, zoo.counter_class(lib))
        env.reset()
        return env[[1, 1]].reset()["count"]

    assert "Name each sub-env once" in differs("parts-begin-together", twice)
