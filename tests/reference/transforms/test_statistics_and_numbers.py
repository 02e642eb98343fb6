"""Running statistics, numbers of trajectories, and primed entries: what they show and when they change."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.transforms.worlds import count, leaf_specs, ones, played, rows, teams


def normalised(lib, shape, change=lambda norm: norm, updates=4):
    norm = lib.VecNorm(["a"], decay=0.5)
    data = [torch.arange(3.0).reshape(3, *shape) * 2**i for i in range(updates)]
    norm(TensorDict({"a": data[0]}, [3]))
    norm = change(norm) or norm
    shown = [norm(TensorDict({"a": value}, [3]))["a"] for value in data[1:]]
    return [[round(number, 4) for number in value.flatten().tolist()] for value in shown]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_entries_of_any_shape_are_standardised(shape):
    check_works_alike(lambda lib: normalised(lib, shape))


def test_a_single_number_is_standardised_in_its_own_shape():
    norm = OURS.VecNorm(["a"], decay=0.5)

    shown = [norm(TensorDict({"a": torch.tensor(value)}, []))["a"] for value in (0.0, 3.0)]

    assert [value.shape for value in shown] == [(), ()]
    assert shown[0] == 0 and shown[1] > 0


def test_statistics_follow_the_data_in_eval_mode_and_not_when_frozen():
    check_works_alike(lambda lib: normalised(lib, (1,), lambda norm: norm.eval()))
    check_works_alike(lambda lib: normalised(lib, (1,), lambda norm: norm.freeze()))


def test_a_frozen_copy_needs_statistics_to_follow():
    check_same(lambda lib: lib.VecNorm(["a"]).frozen_copy())
    with pytest.raises(RuntimeError, match="no statistics"):
        OURS.VecNorm(["a"]).frozen_copy()


NUMBERED = {
    "a name": (count, "number"),
    "beside the flags of one group": (teams, ("a", "number")),
}


@pytest.mark.parametrize("case", NUMBERED)
def test_trajectories_are_numbered_where_their_key_says(case):
    make, key = NUMBERED[case]

    def call(lib):
        env = lib.TransformedEnv(make(lib), lib.TrajCounter(key))
        return played(env, 8, break_when_any_done=False)

    check_works_alike(call)


def test_a_plain_name_numbers_beside_every_flag_of_groups():
    def call(lib):
        env = lib.TransformedEnv(teams(lib), lib.TrajCounter("number"))
        return played(env, 3, break_when_any_done=False)

    differs("all-transforms-answer", call)
    assert {("a", "number"), ("b", "number")} <= set(call(OURS).keys(True))


@pytest.mark.parametrize("make", [count, teams])
@pytest.mark.parametrize("name", ["all_done_keys", "all_truncated_keys"])
def test_a_counter_names_the_flags_of_all_levels(make, name):
    def call(lib):
        counter = lib.StepCounter(4)
        env = lib.TransformedEnv(make(lib), counter)
        env.reset()
        return getattr(counter, name)

    check_works_alike(call)


def numbers_of_two_creators(lib):
    counter = lib.TrajCounter()

    def counted(end):
        return lib.TransformedEnv(count(lib, end), counter.clone())

    env = lib.SerialEnv(2, [lib.EnvCreator(counted, {"end": end}) for end in (2, 3)])
    return played(env, 8, break_when_any_done=False)["traj_count"]


def test_clones_in_two_creators_give_no_number_twice():
    def from_zero(lib):
        numbers = numbers_of_two_creators(lib)
        return numbers - numbers.min()

    check_works_alike(from_zero)


def test_what_a_creator_tries_out_takes_no_number():
    differs("creators-count-nothing", numbers_of_two_creators)
    assert numbers_of_two_creators(OURS).min() == 0


PRIMERS = {
    "a dict": lambda lib: lib.TensorDictPrimer({"h": lib.Unbounded((3,))}),
    "a Composite": lambda lib: lib.TensorDictPrimer(lib.Composite(h=lib.Unbounded((2, 3)))),
    "a Composite of the batch": lambda lib: lib.TensorDictPrimer(
        lib.Composite(h=lib.Unbounded((2, 3)), shape=(2,))
    ),
}


@pytest.mark.parametrize("case", PRIMERS)
def test_primers_without_batch_axes_gain_those_of_the_env(case):
    def call(lib):
        env = lib.TransformedEnv(rows(lib), PRIMERS[case](lib))
        return [env.reset(), leaf_specs(env)]

    check_works_alike(call)


def test_kinds_of_specs_that_are_not_declared_are_left_alone():
    def outputs(lib):
        output_spec = lib.Composite(full_observation_spec=lib.Composite(a=lib.Unbounded((3,))))
        output_spec["full_reward_spec"] = output_spec["full_done_spec"] = None
        return lib.UnsqueezeTransform(-1, in_keys=["a"]).transform_output_spec(output_spec)

    def inputs(lib):
        given = lib.Composite(full_action_spec=lib.Composite(action=lib.Unbounded((3,))))
        given["full_state_spec"] = None
        return lib.ClipTransform(in_keys_inv=["action"], low=-1.0).transform_input_spec(given)

    check_works_alike(outputs)
    check_works_alike(inputs)


USED_BY_HAND = {
    "NoopResetEnv": lambda lib: lib.NoopResetEnv(3),
    "ActionMask": lambda lib: lib.ActionMask(),
    "TargetReturn": lambda lib: lib.TargetReturn(1.0),
}


@pytest.mark.parametrize("name", USED_BY_HAND)
def test_what_needs_an_env_says_so(name):
    mask = torch.ones(2, dtype=torch.bool)
    data = TensorDict({"action": torch.ones(2), "action_mask": mask, "reward": torch.ones(1)})

    with pytest.raises(RuntimeError, match="env"):
        USED_BY_HAND[name](OURS)._reset(data, data.clone())


def test_a_target_by_hand_takes_batch_and_mask_from_its_arguments():
    flags = torch.tensor([[True], [False], [True], [False]])

    def call(lib):
        target = lib.TargetReturn(
            9.0, in_keys=["reward"], out_keys=["target_return"], reset_key="_reset"
        )
        reward = TensorDict({"reward": torch.ones(4, 1)}, [4])
        everywhere = TensorDict({"_reset": torch.ones_like(flags)}, [4])
        shown = [target._reset(everywhere, TensorDict({}, [4]))]
        shown.append(target._step(shown[0], reward.clone()))
        again = shown[1].exclude("reward")
        shown.append(target._reset(again.clone().set("_reset", flags), again.clone()))
        return shown

    check_works_alike(call)
    assert OURS.TargetReturn(1.0, reset_key="_reset").reset_key == "_reset"


def chunks(lib, sizes):
    left = iter(sizes)
    return lambda td: td.set("action", torch.zeros(*td.shape, next(left), 1, dtype=torch.int64))


def test_chunks_have_any_length():
    def single(lib):
        env = lib.TransformedEnv(count(lib, 50), lib.MultiAction())
        steps = env.rollout(3, chunks(lib, [2, 3, 1])).unbind(0)
        return [env.action_spec.shape, *(step["next", "reward"] for step in steps)]

    def inside(lib):
        env = lib.SerialEnv(2, lambda: lib.TransformedEnv(count(lib, 50), lib.MultiAction()))
        return env.step(chunks(lib, [3])(env.reset()))

    check_works_alike(single)
    check_works_alike(inside)


def test_steps_of_rows_that_a_mask_leaves_out_are_not_counted():
    def counted(lib):
        env = lib.TransformedEnv(rows(lib), lib.StepCounter())
        td = ones(env, env.reset()).set("_step", torch.tensor([True, False]))
        return env.step(td)["next", "step_count"]

    differs("skipped-rows", counted)
    assert counted(OURS).flatten().tolist() == [1, 0]


@pytest.mark.parametrize("name", ["ObservationNorm", "RewardScaling"])
def test_numbers_are_loaded_into_a_transform_of_the_same_form(name):
    def call(lib):
        saved, loaded = (
            getattr(lib, name)(1.0, 2.0, in_keys=["a"], standard_normal=flag)
            for flag in (True, False)
        )
        loaded.load_state_dict({"standard_normal": torch.tensor(True), **saved.state_dict()})
        return bool(loaded.standard_normal)

    differs("one-form-of-numbers", call)
    with pytest.raises(RuntimeError, match="Make it with standard_normal=True"):
        call(OURS)
