"""What an env declares."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from envkit import (
    BraxEnv,
    EnvBase,
    GymEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import (
    KeyCollisionError,
    MissingKeyError,
    NotCallableError,
    SpecError,
    SpecLockedError,
    SpecTypeError,
)
from envkit.specs import (
    Bounded,
    Categorical,
    Composite,
    TensorSpec,
    Unbounded,
    UnboundedContinuous,
)
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.shaped_envs import FLAG, Groups, Quiet, Several, Wordy

mk = partial(Count, 5)

KINDS = {
    "count": mk,
    "stateless": partial(StatelessCount, 5, batch_size=[3]),
    "gym": partial(GymEnv, "CartPole-v1"),
    "serial": partial(SerialEnv, 4, mk),
    "parallel": partial(ParallelEnv, 2, mk, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(2, mk), SerialEnv(1, mk)]),
    "transformed": lambda: TransformedEnv(Count(5), StepCounter()),
    "brax": partial(BraxEnv, "fast", batch_size=[3], device="cpu"),
    "groups": Groups,
    "several": Several,
    "serial groups": partial(SerialEnv, 2, Groups),
}
FIVE = ("action", "reward", "done", "observation", "state")


@pytest.fixture(scope="module", params=KINDS)
def env(request):
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


@pytest.fixture(scope="module")
def serial():
    env = SerialEnv(4, mk)
    yield env
    env.close(raise_if_closed=False)


class Declared(Quiet):
    """Declares what a test says; steps return nothing but the declared zeros."""

    def __init__(self, *, batch_size=None, device=None, **specs):
        super().__init__(batch_size=batch_size, device=device)
        specs.setdefault("action_spec", Unbounded((*self.batch_size, 1)))
        for name, spec in specs.items():
            setattr(self, name, spec)

    def _out(self):
        return self.full_observation_spec.zero()


# -------------------------------------------------------------------------------- 1. construction


def test_an_env_is_a_module():
    assert issubclass(EnvBase, torch.nn.Module)


def test_the_batch_size_has_two_names_a_length_and_a_product(env):
    assert env.batch_size == env.shape
    assert env.batch_dims == env.ndim == len(env.batch_size)
    assert env.ndimension() == env.batch_dims
    assert env.numel() == env.batch_size.numel()


def test_the_numbers_of_a_batch(serial):
    assert serial.batch_size == (4,)
    assert serial.batch_dims == 1
    assert serial.numel() == 4
    assert Count().numel() == 1


def test_outputs_are_delivered_where_the_env_says():
    env = Count(device="cpu")

    td = env.rand_step(env.reset())

    assert env.reset().device == torch.device("cpu")
    assert td.device == td["next"].device == torch.device("cpu")
    assert Count().reset().device is None


def test_specs_are_brought_to_the_device_of_the_env():
    env = Declared(device="meta", observation_spec=Composite(x=Unbounded((2,), device="cpu")))

    assert {leaf.device.type for leaf in env.specs.values(True, True)} == {"meta"}


@pytest.mark.parametrize("kind", ["count", "groups", "several", "stateless"])
def test_spec_locked_false_leaves_the_specs_open(kind):
    env = KINDS[kind](spec_locked=False)

    assert not env.is_spec_locked
    env.observation_spec.set("x", Unbounded((*env.batch_size, 1)))
    assert "x" in env.observation_keys


def test_an_env_must_write_the_three_hooks():
    class Half(EnvBase):
        def _reset(self, td):
            return TensorDict()

    with pytest.raises(TypeError, match=r"_set_seed.*_step"):
        Half()


class Early(Quiet):
    """Declares what it shows before its base class has begun."""

    def __init__(self, size=(), *, batch_size=(), device=None, begins=True):
        self.observation_spec = Composite(seen=Unbounded((*size, 3)), shape=size)
        self.action_spec = Unbounded((*size, 1))
        self.done_spec = Composite(ended=Categorical(2, shape=(*size, 1), dtype=torch.bool))
        self.state_spec = Composite(kept=Unbounded((*size, 2)), shape=size)
        if begins:
            super().__init__(batch_size=batch_size, device=device)

    def _out(self):
        return self.full_observation_spec.zero()


@pytest.mark.parametrize("size", [(), (4,)])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_specs_may_be_declared_before_the_base_class_begins(size, device):
    env = Early(size, batch_size=size, device=device)

    assert env.observation_keys == ["seen"]
    assert env.state_keys == ["kept"]
    assert "ended" in env.done_keys
    assert env.action_spec.shape == (*size, 1)
    for spec in (env.full_observation_spec, env.full_state_spec, env.full_done_spec):
        assert spec.shape == size
        assert spec.device == env.device
    assert env.is_spec_locked


def test_what_was_declared_early_must_fit_the_batch_size():
    with pytest.raises(SpecError, match=r"shape \(5,\) is not the beginning of .*\(2, 3\).*seen"):
        Early((2,), batch_size=(5,))


def test_an_env_that_never_calls_the_base_class_says_so():
    with pytest.raises(NotCallableError, match=r"Early.*super\(\).__init__"):
        Early(begins=False)


def test_a_missing_reward_spec_is_declared():
    assert Declared(batch_size=[3]).full_reward_spec["reward"] == Unbounded((3, 1))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            {"observation_spec": Composite(reward=Unbounded((1,)))},
            r"'reward' is declared both in the observation spec and in the reward spec",
        ),
        (
            {"observation_spec": Composite(done=FLAG.clone())},
            r"'done' is declared both in the observation spec and in the done spec",
        ),
        (
            {"reward_spec": Composite(terminated=Unbounded((1,)))},
            r"'terminated' is declared both in the reward spec and in the done spec",
        ),
        (
            {"state_spec": Composite(action=Unbounded((1,)))},
            r"'action' is declared both in the state spec and in the action spec",
        ),
        (
            {
                "observation_spec": Composite(a=Composite(b=Unbounded((1,)))),
                "reward_spec": Composite(a=Composite(b=Unbounded((1,)))),
            },
            r"\('a', 'b'\) is declared both",
        ),
        (
            {"observation_spec": Composite(action=Unbounded((1,)))},
            r"'action' is declared both in the observation spec and in the action spec",
        ),
        (
            {"action_spec": Composite(reward=Unbounded((1,)))},
            r"'reward' is declared both in the reward spec and in the action spec",
        ),
        (
            {"action_spec": Composite(done=Unbounded((1,)))},
            r"'done' is declared both in the done spec and in the action spec",
        ),
        (
            {
                "observation_spec": Composite(observation=Unbounded((1,))),
                "action_spec": Composite(observation=Composite(wheel=Unbounded((1,)))),
            },
            r"'observation' of the observation spec is one entry, but the action spec has "
            r"\('observation', 'wheel'\) below",
        ),
        (
            {"observation_spec": Composite(next=Unbounded((1,)))},
            r"observation spec declares 'next', but 'next' is reserved for what a step produces",
        ),
        (
            {"action_spec": Composite(next=Composite(wheel=Unbounded((1,))))},
            r"action spec declares \('next', 'wheel'\), but 'next' is reserved",
        ),
        (
            {"observation_spec": Composite(agents=Composite(_step=Unbounded((1,))))},
            r"\('agents', '_step'\), but '_step' is reserved for a mask",
        ),
        (
            {"state_spec": Composite(_reset=Unbounded((1,)))},
            r"state spec declares '_reset', but '_reset' is reserved for a mask",
        ),
    ],
)
def test_names_of_entries_differ(specs, message):
    with pytest.raises(KeyCollisionError, match=message) as error:
        Declared(**specs)

    assert isinstance(error.value, RuntimeError)


def test_next_is_a_name_like_others_inside_a_node():
    spec = Composite(cards=Composite(next=Unbounded((1,))))

    assert Declared(observation_spec=spec).observation_keys == [("cards", "next")]


def test_a_state_may_also_be_an_observation():
    spec = Composite(x=Unbounded((1,)))

    env = Declared(observation_spec=spec, state_spec=spec)

    assert env.state_keys == env.observation_keys == ["x"]


# ------------------------------------------------------------------------------------- 2. layout


def test_the_composites_hold_the_five_kinds(env):
    assert set(env.input_spec.keys()) == {"full_state_spec", "full_action_spec"}
    assert set(env.output_spec.keys()) == {
        "full_reward_spec",
        "full_observation_spec",
        "full_done_spec",
    }
    for kind in FIVE:
        side = env.input_spec if kind in ("action", "state") else env.output_spec
        full = getattr(env, f"full_{kind}_spec")
        assert isinstance(full, Composite)
        assert side[f"full_{kind}_spec"] == full
        assert full.shape == env.batch_size


def test_observation_and_state_specs_are_the_full_ones(env):
    assert env.observation_spec == env.full_observation_spec
    assert env.state_spec == env.full_state_spec


def test_every_leaf_has_the_batch_in_front(env):
    for leaf in env.specs.values(True, True):
        assert leaf.shape[: env.batch_dims] == env.batch_size


def test_single_specs_lack_the_batch(env):
    index = (0,) * env.batch_dims
    names = [name for kind in FIVE for name in (f"{kind}_spec", f"full_{kind}_spec")]
    for name in (*names, "input_spec", "output_spec"):
        batched, single = getattr(env, name), getattr(env, f"single_{name}")
        assert single == batched[index] == getattr(env, f"{name}_unbatched")
        assert single.shape == batched.shape[env.batch_dims :]
        if not env.batch_dims:
            assert single == batched


def test_the_worked_shapes_of_single_specs(serial):
    assert serial.action_spec.shape == (4, 1)
    assert serial.single_action_spec.shape == (1,)
    assert serial.single_full_action_spec.shape == ()
    assert serial.single_reward_spec.shape == (1,)
    assert serial.single_full_reward_spec.shape == ()
    assert serial.single_full_done_spec["done"].shape == (1,)
    assert serial.single_observation_spec["count"].shape == (1,)
    assert serial.single_input_spec.shape == serial.single_output_spec.shape == ()


def test_the_single_state_of_a_stateless_env():
    env = BraxEnv("fast", batch_size=[3], device="cpu", state_layout="nested")

    assert env.single_state_spec["state", "obs"].shape == (2,)
    assert env.state_keys[0] == ("state", "done")


def test_observation_spec_holds_what_transforms_add():
    env = TransformedEnv(Count(5), StepCounter())

    assert set(env.observation_spec.keys()) == {"count", "step_count"}


def test_the_state_spec_of_a_stateful_env_is_empty():
    assert list(Count(5).state_spec.keys(True, True)) == []
    brax = BraxEnv("fast", device="cpu")
    assert all(key[0] == "state" for key in brax.state_spec.keys(True, True))


def nested(kind: str, *names: str) -> Composite:
    leaf = FLAG if kind == "done" else Unbounded((1,))
    return Composite(nested=Composite({name: leaf.clone() for name in names}))


@pytest.mark.parametrize("kind", ["action", "reward"])
def test_a_spec_of_one_leaf_is_that_leaf(kind):
    env = Count(5)

    setattr(env, f"{kind}_spec", Unbounded((1,)))
    assert isinstance(getattr(env, f"{kind}_spec"), UnboundedContinuous)
    assert list(getattr(env, f"full_{kind}_spec").keys()) == [kind]

    setattr(env, f"{kind}_spec", nested(kind, kind))
    assert getattr(env, f"{kind}_spec").shape == (1,)
    assert isinstance(getattr(env, f"{kind}_spec"), UnboundedContinuous)
    assert getattr(env, f"{kind}_keys") == [("nested", kind)]

    setattr(env, f"{kind}_spec", nested(kind, kind, f"another_{kind}"))
    assert isinstance(getattr(env, f"{kind}_spec"), Composite)


def test_a_done_spec_of_one_declared_leaf_is_that_leaf():
    env = Count(5)

    env.done_spec = Categorical(2, dtype=torch.bool)
    assert isinstance(env.done_spec, Categorical)
    assert list(env.full_done_spec.keys()) == ["done", "terminated"]

    env.done_spec = nested("done", "terminated")
    assert isinstance(env.done_spec, Categorical)
    assert env.done_keys == [("nested", "done"), ("nested", "terminated")]

    env.done_spec = Composite(done=FLAG.clone(), truncated=FLAG.clone())
    assert isinstance(env.done_spec, Composite)
    assert isinstance(Count(5).done_spec, Composite)


@pytest.mark.parametrize("kind", ["observation", "action", "reward", "done"])
def test_a_plain_leaf_is_wrapped_under_the_name_of_its_kind(kind):
    env = Count(5)
    leaf = FLAG if kind == "done" else Unbounded((1,))

    setattr(env, f"{kind}_spec", leaf)

    assert getattr(env, f"full_{kind}_spec")[kind] == leaf


@pytest.mark.parametrize("kind", FIVE)
def test_a_spec_without_the_batch_is_refused(kind):
    env = StatelessCount(5, batch_size=[3])
    leaf = Categorical(2, shape=(2, 1), dtype=torch.bool)

    with pytest.raises(SpecError, match=rf"{kind}_spec has shape \(2.*batch size \(3,\)") as error:
        setattr(env, f"{kind}_spec", Composite({kind: leaf}, shape=(2,)))

    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("kind", FIVE)
@pytest.mark.parametrize("value", [3, "spec", torch.zeros(1), {"x": 1}])
def test_what_is_no_spec_is_refused(kind, value):
    with pytest.raises(SpecTypeError, match=f"{kind}_spec must be") as error:
        setattr(Count(5), f"{kind}_spec", value)

    assert isinstance(error.value, TypeError)


def test_a_state_spec_is_a_composite_or_none():
    env = Count(5)
    env.state_spec = Composite(x=Unbounded((1,)))
    assert env.state_keys == ["x"]

    env.state_spec = None
    assert env.state_keys == []
    with pytest.raises(SpecTypeError, match=r"Composite\(name=leaf"):
        env.state_spec = Unbounded((1,))


def test_assignment_while_locked_refreshes_what_was_read():
    env = Count(5)
    assert env.observation_keys == ["count"]

    env.observation_spec = Composite(other=Unbounded((1,)))

    assert env.is_spec_locked and env.observation_spec.is_locked
    assert env.observation_keys == ["other"]
    assert "other" in env.fake_tensordict().keys()


def test_what_was_assigned_is_not_shared_with_the_env():
    spec = Composite(count=Unbounded((1,), dtype=torch.int64))
    first, second = Count(5), Count(5)

    first.observation_spec = second.observation_spec = spec
    spec["more"] = Unbounded((1,))

    assert first.observation_keys == second.observation_keys == ["count"]


def test_specs_outlive_the_env():
    env = Count(5)
    specs = env.specs
    del env
    gc.collect()

    assert set(specs.keys()) == {"output_spec", "input_spec"}
    assert specs["output_spec", "full_reward_spec", "reward"].shape == (1,)


# ------------------------------------------------------------------------------ 3. keys and flags


def test_keys_are_sorted_by_depth_then_name():
    env = Several()

    assert env.action_keys == ["button", ("deep", "force")]
    assert env.reward_keys == ["gain", ("deep", "cost")]
    assert env.observation_keys == ["count", ("deep", "twice")]
    assert env.done_keys == [
        *("done", "terminated", "truncated"),
        *(("deep", "done"), ("deep", "terminated")),
    ]


def test_the_only_key():
    env = Count(5)

    assert (env.action_key, env.reward_key, env.done_key) == ("action", "reward", "done")


@pytest.mark.parametrize("kind", ["action", "reward", "done"])
def test_several_keys_have_no_only_one(kind):
    with pytest.raises(MissingKeyError, match=rf"{kind}_key needs exactly one.*{kind}_keys"):
        getattr(Several(), f"{kind}_key")


def test_the_done_key_is_the_only_one_called_done():
    env = Declared(done_spec=Composite(done=FLAG.clone(), mine=FLAG.clone()))

    assert env.done_key == "done"
    assert env.done_keys_groups == [["done", "mine", "terminated"]]


def test_one_reset_key_a_level_by_depth():
    env = Groups()

    assert env.reset_keys == ["_reset", ("agent0", "_reset"), ("agent1", "_reset")]
    assert env.done_keys_groups == [
        ["done", "terminated"],
        [("agent0", "done"), ("agent0", "terminated")],
        [("agent1", "done"), ("agent1", "terminated")],
    ]
    assert Count(5).done_keys_groups == [["done", "terminated"]]


def test_an_outer_level_comes_first_however_many_flags_it_has():
    own = {name: FLAG.clone() for name in ("done", "terminated", "truncated")}
    env = Declared(done_spec=Composite({**own, "agent": {"done": FLAG.clone()}}))

    assert env.reset_keys == ["_reset", ("agent", "_reset")]


def test_keys_are_kept_while_specs_are_locked():
    env = Count(5)

    assert env.action_keys == ["action"]
    assert env._declared.cache
    env.empty_cache()
    assert not env._declared.cache
    assert env.action_keys == ["action"]


def test_key_lists_are_read_again_while_specs_are_open():
    env = Count(5, spec_locked=False)
    assert env.observation_keys == ["count"]

    env.observation_spec["x"] = Unbounded((1,))

    assert env.observation_keys == ["count", "x"]


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        (["done"], ["done", "terminated"]),
        (["terminated"], ["done", "terminated"]),
        (["truncated"], ["done", "terminated", "truncated"]),
        (["done", "truncated"], ["done", "terminated", "truncated"]),
        ([], ["done", "terminated"]),
    ],
)
@pytest.mark.parametrize("path", [(), ("agents",), ("a", "b")])
def test_done_and_terminated_come_together(declared, names, path):
    spec = Composite({name: FLAG.clone() for name in declared})
    for name in reversed(path):
        spec = Composite({name: spec})

    env = Declared(done_spec=spec)

    level = env.full_done_spec[path] if path else env.full_done_spec
    assert list(level.keys()) == names
    assert all(leaf.shape == (1,) and leaf.dtype == torch.bool for leaf in level.values())


def test_an_undeclared_done_spec_has_both_twins_of_the_batch():
    assert {name: leaf.shape for name, leaf in Declared(batch_size=[3]).full_done_spec.items()} == {
        "done": (3, 1),
        "terminated": (3, 1),
    }


def test_nodes_of_the_done_spec_keep_their_batch_size():
    assert Groups().full_done_spec["agent0"].shape == (2,)


def test_done_leaves_of_one_level_share_one_shape():
    with pytest.raises(SpecError, match=r"'agents' have different shapes.*\(1,\).*\(2,\)"):
        Declared(
            done_spec=Composite(
                agents=Composite(done=FLAG.clone(), truncated=FLAG.expand(2, 1)[:, 0])
            )
        )


def test_done_leaves_are_boolean():
    with pytest.raises(SpecTypeError, match=r"must be boolean.*int64.*dtype=torch.bool"):
        Declared(done_spec=Categorical(2, shape=(1,)))


def test_truncated_can_be_added_beside_every_done():
    env = Count(5)

    same = env.add_truncated_keys()

    assert same is env
    assert list(env.full_done_spec.keys()) == ["done", "terminated", "truncated"]
    assert env.is_spec_locked
    assert ("agent1", "truncated") in Groups().add_truncated_keys().done_keys
    assert list(env.add_truncated_keys().full_done_spec.keys()) == [
        *("done", "terminated", "truncated")
    ]


def test_a_batched_env_takes_no_truncated_keys(serial):
    with pytest.raises(RuntimeError, match="sub-envs"):
        serial.add_truncated_keys()


# ------------------------------------------------------- 3. completion of what a simulator returns


class Says(Quiet):
    """Returns the end flags a test says."""

    def __init__(self, flags, declared=("done", "terminated", "truncated"), shape=(1,)):
        super().__init__()
        self.flags = flags
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.done_spec = Composite({name: FLAG.clone() for name in declared})
        self.flag_shape = shape

    def _reset(self, td, **kwargs):
        return TensorDict({"x": torch.zeros(1)})

    def _step(self, td):
        flags = {
            name: torch.full(self.flag_shape, value, dtype=torch.bool)
            for name, value in self.flags.items()
        }
        return TensorDict({"x": torch.zeros(1), **flags})


T, F = True, False


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize(
    ("returned", "filled"),
    [
        ({}, {"done": F, "terminated": F, "truncated": F}),
        ({"done": T}, {"done": T, "terminated": T, "truncated": F}),
        ({"done": F}, {"done": F, "terminated": F, "truncated": F}),
        ({"terminated": T}, {"done": T, "terminated": T, "truncated": F}),
        ({"terminated": F, "truncated": T}, {"done": T, "terminated": F, "truncated": T}),
        ({"terminated": T, "truncated": F}, {"done": T, "terminated": T, "truncated": F}),
        ({"truncated": T}, {"done": T, "terminated": F, "truncated": T}),
        (
            {"done": T, "terminated": F, "truncated": T},
            {"done": T, "terminated": F, "truncated": T},
        ),
    ],
)
def test_end_flags_are_completed(returned, filled, shape):
    env = Says(returned, shape=shape)

    following = env.rand_step(env.reset())["next"]

    assert {name: following[name].tolist() for name in filled} == {
        name: [value] for name, value in filled.items()
    }


def test_done_and_truncated_alone_say_too_little():
    env = Says({"done": T, "truncated": F})

    with pytest.raises(RuntimeError, match=r"terminated cannot be inferred.*Return terminated"):
        env.rand_step(env.reset())


def test_flags_are_boolean():
    class Number(Says):
        def _step(self, td):
            return TensorDict({"x": torch.zeros(1), "done": torch.zeros(1)})

    env = Number({})

    with pytest.raises(RuntimeError, match=r"'done' has dtype torch.float32.*boolean"):
        env.rand_step(env.reset())


def test_a_missing_reward_is_zero():
    env = Says({})

    assert env.rand_step(env.reset())["next", "reward"].tolist() == [0.0]


def test_every_level_is_completed_by_itself():
    env = Groups(n=2)
    td = env.rand_step(env.reset())

    following = env.rand_step(env.step_mdp(td))["next"]

    assert td["next", "agent0", "terminated"].all() and not td["next", "agent1", "done"].any()
    assert following["agent1", "done"].tolist() == [[T]] * 3
    assert following["terminated"].tolist() == [T]


def test_what_a_simulator_truncates_is_reported():
    env = GymEnv("Pendulum-v1")

    assert "truncated" in env.rollout(2)["next"].keys()


def test_truncated_episodes_are_reset():
    env = Several(n=2)

    data = env.rollout(5, break_when_any_done=False)

    assert data["count"].flatten().tolist() == [0, 1, 0, 1, 0]
    assert not data["next", "terminated"].any()


# ----------------------------------------------------------------------------------- 4. locking


def test_specs_are_locked_by_default(env):
    assert env.is_spec_locked
    with pytest.raises(SpecLockedError) as error:
        env.observation_spec.set("x", Unbounded((*env.batch_size, 1)))
    assert isinstance(error.value, RuntimeError)
    with pytest.raises(SpecLockedError):
        env.output_spec["full_reward_spec"] = Composite(shape=env.batch_size)


@pytest.mark.parametrize("kind", ["count", "groups", "stateless", "transformed", "serial"])
def test_specs_can_be_unlocked_and_locked_again(kind):
    env = KINDS[kind]()
    spec = Unbounded((*env.batch_size, 1))

    assert env.set_spec_lock_(False) is env
    assert not env.is_spec_locked
    env.observation_spec.set("x", spec)
    env.set_spec_lock_()

    assert "x" in env.observation_keys
    with pytest.raises(SpecLockedError):
        env.observation_spec.set("y", spec)


def test_locking_reaches_the_env_inside():
    env = TransformedEnv(Count(5), StepCounter())

    env.set_spec_lock_(False)
    assert not env.base_env.is_spec_locked

    env.set_spec_lock_()
    assert env.base_env.is_spec_locked


def test_building_an_env_leaves_the_locks_of_one_it_holds_alone():
    class Holder(Quiet):
        def __init__(self, held):
            super().__init__()
            self.held = held
            self.observation_spec = held.observation_spec
            self.action_spec = held.action_spec

        def _out(self):
            return self.full_observation_spec.zero()

    held = Count(5, spec_locked=False)

    assert Holder(held).is_spec_locked
    assert not held.is_spec_locked


# ---------------------------------------------------------------------------------- non-tensor data


def test_data_that_is_no_tensor_has_a_spec():
    env = Wordy()

    check_env_specs(env)
    data = env.rollout(6, break_when_any_done=False)

    assert data["word"] == ["none", "one", "two", "three", "four", "none"]
    assert data["next", "word"] == ["one", "two", "three", "four", "many", "one"]


def test_a_leaf_spec_is_never_lost_in_a_composite():
    env = Several()

    assert isinstance(env.full_action_spec["deep", "force"], Bounded)
    assert all(isinstance(leaf, TensorSpec) for leaf in env.specs.values(True, True))


# ------------------------------------------------------------------------ states and empty rewards


class Winding(EnvBase):
    """Counts in a state that is no observation, and shows ten times it."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.observation_spec = Composite(shown=Unbounded((1,)))
        self.state_spec = Composite(turns=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.dtype = dtype

    def _reset(self, tensordict=None):
        return TensorDict({"shown": torch.zeros(1), "turns": torch.zeros(1)})

    def _step(self, tensordict):
        turns = tensordict["turns"]
        return TensorDict(
            {
                "shown": turns * 10,
                "turns": (turns + 1).to(self.dtype),
                "reward": torch.zeros(1),
                "done": torch.zeros(1, dtype=torch.bool),
            }
        )

    def _set_seed(self, seed):
        pass


def single_and_transformed(kind):
    made = [kind, lambda: TransformedEnv(kind(), StepCounter())]
    return pytest.mark.parametrize("make", made, ids=["single", "transformed"])


@single_and_transformed(Winding)
def test_a_state_that_a_step_gives_is_the_state_of_the_next_step(make):
    env = make()

    check_env_specs(env)
    data = env.rollout(4)
    again = env.reset(data[-1].exclude("next"))

    assert data["turns"].flatten().tolist() == [0, 1, 2, 3]
    assert data["next", "shown"].flatten().tolist() == [0, 10, 20, 30]
    assert again["turns"].tolist() == [0]


class Silent(Winding):
    """Has no reward."""

    def __init__(self):
        super().__init__()
        self.reward_spec = Composite()

    def _step(self, tensordict):
        return super()._step(tensordict).exclude("reward")


@single_and_transformed(Silent)
def test_an_empty_reward_spec_says_that_there_is_no_reward(make):
    env = make()

    check_env_specs(env)

    assert env.reward_keys == []
    assert "reward" not in env.rollout(2)["next"].keys()


def test_a_reward_can_be_declared_after_all():
    env = Silent()
    env.set_spec_lock_(False)
    env.reward_spec = Unbounded((1,))

    assert env.reward_keys == ["reward"]
    assert env.rollout(2)["next", "reward"].shape == (2, 1)


class Unlike(EnvBase):
    """Two agents, of which only the second has an entry ``own``."""

    def __init__(self, value: float | None):
        super().__init__()
        self.value = value
        first = Composite(seen=Unbounded((2,)))
        second = Composite(seen=Unbounded((3,)), own=Bounded(0, 1, (1,)))
        self.observation_spec = Composite(agents=torch.stack([first, second]))
        self.action_spec = Unbounded((1,))

    def _reset(self, tensordict=None):
        exclusive = {} if self.value is None else {"own": torch.full((1,), self.value)}
        first, second = {"seen": torch.zeros(2)}, {"seen": torch.zeros(3), **exclusive}
        return TensorDict({"agents": lazy_stack([TensorDict(first), TensorDict(second)])})

    def _step(self, tensordict):
        flag = torch.zeros(1, dtype=torch.bool)
        return self._reset().update({"reward": torch.zeros(1), "done": flag})

    def _set_seed(self, seed):
        pass


def test_an_entry_of_one_agent_is_checked_against_the_spec_of_that_agent():
    check_env_specs(Unlike(0.5))

    with pytest.raises(AssertionError, match=r"\('agents', 1, 'own'\) has values outside"):
        check_env_specs(Unlike(5.0))
    with pytest.raises(AssertionError, match=r"'own'\) is present in fake but not in real"):
        check_env_specs(Unlike(None))


@pytest.fixture(
    params=[
        KINDS["gym"],
        partial(SerialEnv, 2, KINDS["gym"]),
        lambda: TransformedEnv(KINDS["gym"](), StepCounter()),
    ],
    ids=["gym", "serial", "transformed"],
)
def small_env(request):
    env = request.param()
    yield env
    env.close(raise_if_closed=False)


def test_lists_of_keys_are_the_callers_own(small_env):
    env = small_env
    names = ("action_keys", "observation_keys", "reward_keys", "done_keys", "state_keys")
    before = {name: list(getattr(env, name)) for name in (*names, "done_levels")}

    for name in names:
        getattr(env, name).append("another")
    env.done_levels[()] = ["another"]
    for flags in env.done_levels.values():
        flags.append("another")

    assert {name: list(getattr(env, name)) for name in before} == before
    assert all("another" not in flags for flags in env.done_levels.values())
    env.rollout(2)


@pytest.mark.parametrize("kind", ["full_action_spec", "observation_spec", "done_spec"])
def test_specs_of_an_env_keep_their_device(small_env, kind):
    spec = getattr(small_env, kind)

    with pytest.raises(SpecLockedError, match="drop its device"):
        spec.clear_device_()

    assert spec.clone().clear_device_().device is None
    assert getattr(small_env, kind).device == torch.device("cpu")


def test_a_state_that_a_step_gives_must_fit_its_spec():
    with pytest.raises(AssertionError, match=r"\('next', 'turns'\) has dtype torch.int64"):
        check_env_specs(Winding(torch.int64))
