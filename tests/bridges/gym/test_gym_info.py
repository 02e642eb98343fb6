"""Info dictionaries: what readers keep of them, at the root and in next."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import TensorDict

from envkit import (
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    EncodingError,
    KeyCollisionError,
    OutOfSpecError,
    WorkerError,
)
from envkit.specs import Bounded, Composite, NonTensor, Unbounded
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.info import default_info_dict_reader
from tests.bridges.compare import assert_same
from tests.zoo.gym_envs import Informed


def informed(reader=None, info=None, **kwargs) -> GymWrapper:
    return GymWrapper(Informed(info)).set_info_dict_reader(reader, **kwargs)


def writes_steps_only(info, td):
    """A reader of the user's: no spec, and silent at resets."""
    return td.set("x", torch.tensor(info["x"])) if "x" in info else td


def with_spec(reader, **specs):
    reader.info_spec = Composite(specs)
    return reader


# ------------------------------------------------------------------------------------ what is read


def test_infos_are_ignored_without_a_reader():
    data = GymWrapper(Informed()).rollout(3)

    assert "x" not in data["next"].keys()


def test_a_wrapper_records_infos_on_request_as_well():
    data = GymWrapper(Informed(), info=True).rollout(3)

    assert "x" in data["next"].keys()
    with pytest.raises(ValueError, match="info is 'yes', but must be a bool"):
        GymWrapper(Informed(), info="yes")


@pytest.mark.parametrize("num_envs", [0, 2])
def test_infos_are_recorded_on_request(num_envs):  # U3
    env = GymEnv("FrozenLake-v1", num_envs=num_envs, info=True)

    data = env.rollout(3, break_when_any_done=False)

    assert "prob" in env.observation_keys
    assert data["next", "prob"].shape[: data.ndim] == data.shape
    assert torch.allclose(data["next", "prob"], torch.tensor(1 / 3).double(), atol=1e-3)
    check_env_specs(env)
    assert "prob" not in GymEnv("FrozenLake-v1", num_envs=num_envs).rollout(2).keys(True)


def test_the_default_reader_takes_what_the_first_step_holds():
    env = informed()

    data = env.rollout(3)

    check_env_specs(env)
    assert data["next", "x"].tolist() == [1, 2, 3]
    assert data["next", "x"].dtype == torch.float64
    assert data["next", "y"].tolist() == [[1, -1], [2, -2], [3, -3]]
    assert data["next", "y"].dtype == torch.int64
    assert data["x"].tolist() == [0, 1, 2]  # zeros after the reset
    assert "_p" not in data["next"].keys()


@pytest.mark.parametrize("nested", [False, True])
def test_a_reader_that_is_added_after_specs_were_read_is_seen_through_transforms(nested):
    env = inner = TransformedEnv(GymWrapper(Informed()), StepCounter())
    if nested:
        env = TransformedEnv(inner, RewardSum())
    before = env.rollout(2)

    env.set_info_dict_reader()

    assert "x" in env.observation_keys and "x" not in before.keys()
    assert "x" in env.rollout(2)["next"].keys()
    check_env_specs(env)


def test_private_names_are_read_on_request():
    assert informed(ignore_private=False).rollout(2)["next", "_p"].tolist() == [1, 2]


def test_given_keys_are_plain_numbers_unless_described():
    reader = default_info_dict_reader(["x", "_p"])
    described = default_info_dict_reader(["y", "x"], [Bounded(-9, 9, (2,)), Unbounded(())])

    assert reader.info_spec == Composite(x=Unbounded(()))
    assert described.info_spec["y"].shape == (2,)
    assert informed(reader).rollout(2)["next", "x"].dtype == torch.float32
    assert informed(described).rollout(2)["next", "y"].tolist() == [[1, -1], [2, -2]]


@pytest.mark.parametrize(
    "spec",
    [Composite(x=Unbounded((1,)), z=Unbounded(())), {"x": Unbounded((1,)), "z": Unbounded(())}],
)
def test_specs_may_come_by_name(spec):
    assert default_info_dict_reader(["x"], spec).info_spec == Composite(x=Unbounded((1,)))
    assert set(default_info_dict_reader(spec=spec).info_spec.keys()) == {"x", "z"}


@settings(max_examples=50)
@given(
    value=st.one_of(
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False),
        hnp.arrays(
            st.sampled_from([np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64]),
            hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
        ),
    )
)
def test_numbers_and_arrays_keep_their_dtype_and_bits(value):
    env = informed(info=lambda count: {"v": value})

    found = env.rollout(1)["next", "v"][0].numpy()

    assert found.dtype == np.asarray(value).dtype
    np.testing.assert_array_equal(found, value)


def test_nested_infos_are_nested_entries_and_other_objects_are_left_out():
    def info(count):
        return {"deep": {"a": count, "_b": 1, "c": {"d": 2.0}}, "word": "hi", "none": None, "e": {}}

    env = informed(info=info)
    data = env.rollout(2)

    check_env_specs(env)
    assert data["next", "deep", "a"].tolist() == [1, 2]
    assert data["next", "deep", "c", "d"].tolist() == [2, 2]
    assert set(data["next", "deep"].keys()) == {"a", "c"}
    assert {"word", "none", "e"}.isdisjoint(data["next"].keys())


def test_objects_are_read_where_a_spec_says_so():
    reader = default_info_dict_reader(["word"], [NonTensor(shape=(), example_data="")])
    env = informed(reader, lambda count: {"word": "a" * count})

    data = env.rollout(2)

    assert [step["next"]["word"] for step in data.unbind(0)] == ["a", "aa"]


def test_a_value_that_does_not_fit_is_named():
    env = informed(info=lambda count: {"y": np.zeros(count)})
    td = env.step_mdp(env.rand_step(env.reset()))

    with pytest.raises(EncodingError, match="the info 'y' is"):
        env.rand_step(td)


def test_info_keys_without_a_spec_are_plain_numbers():  # wrappers.md, info dictionaries
    reader = default_info_dict_reader(["x", "y"], {"y": Unbounded((2,))})

    assert reader.info_spec == Composite(x=Unbounded(()), y=Unbounded((2,)))


def test_private_keys_keep_their_place_among_specs():
    reader = default_info_dict_reader(["_a", "x"], [Unbounded((1,)), Unbounded((2,))])

    assert reader.info_spec == Composite(x=Unbounded((2,)))


def test_a_reader_called_by_hand_takes_what_the_first_info_holds():
    read = default_info_dict_reader()

    silent = read({}, TensorDict())
    first = read({"x": 1.5, "_p": 3}, TensorDict())
    later = read({"x": 2.5, "y": 1}, TensorDict())

    assert silent.is_empty()
    assert first.to_dict() == {"x": torch.tensor(1.5)}
    assert later.to_dict() == {"x": torch.tensor(2.5)}


def test_several_readers_may_be_added():
    env = informed(default_info_dict_reader(["x"]))
    env.set_info_dict_reader(default_info_dict_reader(["y"], [Unbounded((2,))]))

    data = env.rollout(2)

    check_env_specs(env)
    assert data["next", "x"].tolist() == [1, 2]
    assert data["next", "y"].tolist() == [[1, -1], [2, -2]]


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_infos_are_read_in_batches(batched):
    env = batched(2, informed)
    data = env.rollout(3, break_when_any_done=False)
    env.close()

    assert data["next", "x"].tolist() == [[1, 2, 3]] * 2
    assert data["x"].tolist() == [[0, 1, 2]] * 2


def many_kinds(count: int) -> dict:
    """Infos of every form, some missing at times."""
    infos = {
        "float": count / 3,
        "double": np.float64(count) / 7,
        "single": np.float32(count) / 7,
        "whole": count,
        "flag": count % 2 == 0,
        "array": np.array([count, -count], np.int32),
        "nested": {"speed": 0.1 * count, "deep": {"at": np.full((2, 2), count, np.float32)}},
    }
    for name in (["float"] if count % 3 == 0 else []) + (["nested"] if count % 4 == 3 else []):
        del infos[name]
    return infos


@pytest.mark.parametrize("keys", [None, ["float", "whole", "array"]])
@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_infos_in_rows_of_memory_are_those_of_a_single_env(batched, keys):
    def make(length: int) -> GymWrapper:
        env = GymWrapper(Informed(many_kinds, length), categorical_action_encoding=True)
        return env.set_info_dict_reader(default_info_dict_reader(keys))

    lengths = (3, 5)
    wanted = torch.stack([stepped(make(length)) for length in lengths])
    with batched(2, [partial(make, length) for length in lengths]) as pool:
        assert_same(stepped(pool), wanted)
        assert_same(pool.rollout(12, still, break_when_any_done=False), wanted)
    for row, length in enumerate(lengths):  # whose rollout has a way of its own
        assert_same(make(length).rollout(12, still, break_when_any_done=False), wanted[row])


def still(td):
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


def stepped(env):
    """Step by hand; an env alone goes through TensorDicts."""
    steps, root = [], env.reset()
    for _ in range(12):
        step, root = env.step_and_maybe_reset(still(root))
        steps.append(step.clone())
    return torch.stack(steps, env.batch_dims)


@pytest.mark.parametrize("odd", [np.zeros(2), 2**70])
def test_an_info_that_changes_its_form_is_named_in_rows_too(odd):
    def grows(count):
        return {"seen": odd if count >= 3 else 0 if isinstance(odd, int) else np.zeros(1)}

    with (
        SerialEnv(2, lambda: informed(info=grows)) as env,
        pytest.raises(WorkerError, match=r"the info 'seen' is .*does not fit"),
    ):
        env.rollout(5, break_when_any_done=False)


TAKEN = ["observation", "reward", "done", "action", "next"]


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("rows", [0, 2])
def test_an_info_named_like_another_entry_is_left_out_and_the_others_are_read(name, rows):
    def make():
        return GymWrapper(Informed(lambda count: {name: 1.0, "fuel": 9.0 - count}), info=True)

    with pytest.warns(UserWarning, match=rf"the infos \['{name}'\] of GymWrapper.*not recorded"):
        data = (SerialEnv(rows, make) if rows else make()).rollout(3)

    assert data["next", "fuel"].reshape(-1, 3).tolist() == [[8, 7, 6]] * max(rows, 1)
    assert not data.is_empty() and "info" not in data.keys()


@pytest.mark.parametrize("name", TAKEN)
def test_an_info_that_is_asked_for_by_the_name_of_another_entry_is_refused(name):
    env = GymWrapper(Informed(lambda count: {name: 1.0}))

    with pytest.raises(KeyCollisionError, match=name):
        env.set_info_dict_reader(default_info_dict_reader([name]))


@pytest.mark.parametrize(
    ("keys", "spec"),
    [(["x"], []), (None, [Unbounded(())]), (["x"], {"y": Unbounded(())})],
)
def test_specs_that_do_not_belong_to_the_keys_are_refused(keys, spec):
    with pytest.raises(ArgumentError, match="spec"):
        default_info_dict_reader(keys, spec)


# -------------------------------------------------------------------------------- registering infos


@pytest.mark.parametrize(
    "reader",
    [
        None,
        default_info_dict_reader(["x"]),
        writes_steps_only,
        with_spec(partial(writes_steps_only), x=Unbounded(())),
    ],
    ids=["default", "keys", "function", "function with spec"],
)
@pytest.mark.parametrize("batched", [None, SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_registered_infos_are_at_the_root_from_the_reset_on(reader, batched):
    def make():
        return GymWrapper(Informed()).auto_register_info_dict(info_dict_reader=reader)

    env = make() if batched is None else batched(1, make)
    data = env.rollout(3).reshape(-1)

    check_env_specs(env)
    assert data["x"].tolist() == [0, 1, 2]
    assert data["next", "x"].tolist() == [1, 2, 3]
    assert "_p" not in data["next"].keys()
    env.close()


def test_nothing_is_added_where_nothing_is_missing():
    env = GymWrapper(Informed())

    assert env.auto_register_info_dict() is env


def test_a_primer_of_the_info_spec_works():
    env = informed()
    primed = TransformedEnv(env, TensorDictPrimer(env.info_dict_reader[0].info_spec))

    data = primed.rollout(3)

    check_env_specs(primed)
    assert data["x"].tolist() == [0, 1, 2]
    assert data["next", "y"].tolist() == [[1, -1], [2, -2], [3, -3]]


def test_infos_are_registered_once():
    env = informed()

    with pytest.raises(RuntimeError, match="info reader already"):
        env.auto_register_info_dict()


def test_mujoco_infos_pass_the_checks():
    env = GymEnv("HalfCheetah-v5").auto_register_info_dict()

    check_env_specs(env)
    assert env.rollout(2)["next", "x_position"].dtype == torch.float64


def test_a_reader_that_is_silent_at_resets_fails_the_check():
    env = informed(with_spec(partial(writes_steps_only), x=Unbounded(())))

    with pytest.raises(OutOfSpecError, match="'x' is present in fake but not in real"):
        check_env_specs(env, break_when_any_done=False)
