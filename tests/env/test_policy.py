"""What a policy that is a plain function is given."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from envkit import (
    Collector,
    Compose,
    DoubleToFloat,
    GymEnv,
    GymWrapper,
    InitTracker,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TrajCounter,
    TransformedEnv,
    UnsqueezeTransform,
    evaluate,
)
from envkit.env.policy import RandomPolicy, observation_inputs
from envkit.errors import BatchSizeError, PolicyError
from envkit.specs import Composite, Unbounded
from tests.zoo.envs import Count
from tests.zoo.jax_envs import Pendulum
from tests.zoo.shaped_envs import Groups


def counters():
    return Compose(StepCounter(), RewardSum(), InitTracker(), TrajCounter())


def counted_pendulum():
    return TransformedEnv(GymEnv("Pendulum-v1"), counters())


WAYS = {
    "single": counted_pendulum,
    "twice": lambda: TransformedEnv(counted_pendulum(), StepCounter(step_count_key="again")),
    "around a batch": lambda: TransformedEnv(
        SerialEnv(2, partial(GymEnv, "Pendulum-v1")), counters()
    ),
    "inside a batch": lambda: SerialEnv(2, counted_pendulum),
    "mixed": lambda: MixedEnv([SerialEnv(2, counted_pendulum)]),
    "in a program": lambda: TransformedEnv(
        JaxEnv(Pendulum(), batch_size=[2]), Compose(StepCounter(), RewardSum())
    ),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_layer_is_not_given_what_transforms_keep_count_of(way):
    env = WAYS[way]()

    data = env.rollout(3, nn.Linear(3, 1))
    env.close(raise_if_closed=False)

    assert data.shape[-1] == 3
    assert (data["next", "step_count"][..., -1, :] == 3).all()


def test_a_program_sees_what_a_step_sees():
    env = WAYS["in a program"]()

    assert observation_inputs(env._route.stepper) == observation_inputs(env) == ["observation"]


def test_what_counts_is_who_added_an_entry_and_not_its_name():
    class Named(Count):
        """Shows its own count under the name that `StepCounter` uses."""

        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(step_count=Unbounded((1,), dtype=torch.int64))

        def _out(self):
            out = super()._out()
            return out.set("step_count", out.pop("count"))

    renamed = TransformedEnv(
        Count(), Compose(StepCounter(), RenameTransform(["step_count"], ["clock"]))
    )

    assert observation_inputs(Named()) == ["step_count"]
    assert observation_inputs(TransformedEnv(Named(), InitTracker())) == ["step_count"]
    assert set(observation_inputs(renamed)) == {"count", "clock"}


def test_a_function_that_takes_fewer_entries_is_told_which_there_are():
    wide = UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["wide"])
    env = TransformedEnv(GymEnv("Pendulum-v1"), wide)

    with pytest.raises(
        PolicyError,
        match=r"\['observation', 'wide'\].*Linear.*2 arguments.*policy\(td\).*TensorDictModule.*in_keys",
    ):
        env.rollout(3, nn.Linear(3, 1))
    with pytest.raises(PolicyError, match=r"<lambda>\(one\) does not take 2 arguments"):
        env.rollout(3, lambda one: one[..., :1])
    env.rollout(3, lambda one, two, three=0: one[..., :1])


def test_random_actions_of_the_env_are_a_policy_like_any_other():
    env = Groups()
    torch.manual_seed(0)
    drawn = env.rollout(3, env.rand_action)
    torch.manual_seed(0)

    assert (drawn == env.rollout(3)).all()


@pytest.mark.parametrize("name", ["action_spec", "full_action_spec"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_random_policy_with_the_spec_of_another_batch_says_which_to_pass(name, rows):
    env, other = SerialEnv(3, Count), SerialEnv(rows, Count)
    policy = RandomPolicy(getattr(other, name))
    message = rf"shape \({rows},.* batch size \(3,\)\. .*RandomPolicy\(env.full_action_spec\)"

    with pytest.raises(BatchSizeError, match=message):
        env.rollout(2, policy)
    with pytest.raises(BatchSizeError, match=message):
        next(iter(Collector(env, policy, frames_per_batch=6, total_frames=6)))
    env.rollout(2, RandomPolicy(getattr(env, name)))


def test_a_random_policy_takes_over_the_spec_of_the_env_that_a_collector_gives_it():
    env, policy = Count(), RandomPolicy()
    assert policy.action_spec is None
    collector = Collector(env, policy, frames_per_batch=2, total_frames=2)
    collector.shutdown()
    assert policy.action_spec == env.full_action_spec

    policy.set_action_spec_from_env(Groups())  # it has one already
    assert policy.action_spec == Count().full_action_spec


def test_a_random_policy_draws_from_the_spec_that_it_took_over():
    policy = RandomPolicy()
    policy.set_action_spec_from_env(env := Groups())

    acted = policy(env.reset())

    assert all(env.full_action_spec[key].is_in(acted[key]) for key in env.action_keys)


class Torque(torch.nn.Module):
    """Acts, and tells what it thinks of the observation."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, observation):
        return self.linear(observation).tanh(), observation.sum(-1), observation[..., :2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("Pendulum-v1"),
        lambda: TransformedEnv(GymEnv("Pendulum-v1"), StepCounter()),
        lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        lambda: ParallelEnv(2, lambda: GymEnv("Pendulum-v1")),
    ],
    ids=["single", "transformed", "serial", "parallel"],
)
def test_outputs_after_the_action_are_recorded_by_number(make):
    env = make()
    try:
        data = env.rollout(3, Torque())
    finally:
        env.close()

    assert torch.equal(data["output1"], data["observation"].sum(-1))
    assert torch.equal(data["output2"], data["observation"][..., :2])
    assert "output1" not in data["next"].keys()


def test_a_collector_records_them_too():
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"), Torque(), frames_per_batch=4, total_frames=8
    )

    batches = list(collector)
    collector.shutdown()

    assert all(torch.equal(one["output1"], one["observation"].sum(-1)) for one in batches)


def test_an_output_without_the_batch_axes_or_that_is_no_tensor_is_refused():
    env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))

    with pytest.raises(PolicyError, match=r"shape \(\) as 'output1'.*batch axes \(2,\)"):
        env.rollout(2, lambda observation: (observation[..., :1], observation.sum()))
    with pytest.raises(PolicyError, match="None as 'output1'"):
        env.rollout(2, lambda observation: (observation[..., :1], None))
    with pytest.raises(PolicyError, match="holds 2 values"):
        env.rollout(2, actions=[(torch.zeros(2, 1), torch.zeros(2))] * 2)


# ----------------------------------------------------------------------------------- advice in errors


class Doubles(gymnasium.Env):
    """Shows three zeros of float64."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3), {}

    def step(self, action):
        return np.zeros(3), 0.0, False, False, {}


NETWORKS = {
    "module": lambda net: net,
    "function": lambda net: lambda observation: net(observation),
    "TensorDictModule": lambda net: TensorDictModule(net, ["observation"], ["action"]),
    "Sequential": lambda net: TensorDictSequential(
        [TensorDictModule(net, ["observation"], ["action"])]
    ),
}


@pytest.mark.parametrize("kind", sorted(NETWORKS))
@pytest.mark.parametrize("rows", [None, 2])
def test_float64_for_a_network_of_float32_names_the_cast(kind, rows):
    env = GymWrapper(Doubles()) if rows is None else SerialEnv(rows, lambda: GymWrapper(Doubles()))

    with pytest.raises(RuntimeError) as raised:
        env.rollout(2, NETWORKS[kind](nn.Linear(3, 1)))

    assert any("DoubleToFloat()" in note for note in raised.value.__notes__)
    cast = TransformedEnv(GymWrapper(Doubles()), DoubleToFloat())
    assert cast.rollout(2, NETWORKS[kind](nn.Linear(3, 1))).shape == (2,)


@pytest.mark.parametrize(
    "policy",
    [
        lambda data: data.set("action", torch.tensor([0.0])),
        lambda data: data["observation"] * 0,
        lambda data: RandomPolicy(Unbounded((1,)))(data),
    ],
)
def test_a_function_that_expects_the_tensordict_is_told_how_to_get_it(policy):
    with pytest.raises((AttributeError, IndexError)) as raised:
        GymEnv("Pendulum-v1").rollout(2, policy)

    (note,) = raised.value.__notes__
    assert "called with the observations ['observation'], and not" in note
    assert "policy(observation)" in note and "named `td` or `tensordict`" in note


def on_observations(td):
    return torch.tanh(td)[..., :1]


def annotated(place: TensorDict | None):
    return nn.functional.linear(place, torch.ones(1, 3))


@pytest.mark.parametrize("policy", [on_observations, annotated])
def test_a_function_that_expects_observations_is_told_why_it_gets_the_tensordict(policy):
    with pytest.raises((TypeError, AttributeError)) as raised:
        GymEnv("Pendulum-v1").rollout(2, policy)

    (note,) = raised.value.__notes__
    assert "called with the TensorDict, and not with the observations" in note
    assert "policy(observation)" in note and "named `td` or `tensordict`" in note


def test_a_trusted_function_that_expects_observations_is_told_why_it_gets_the_tensordict():
    with pytest.raises(TypeError) as raised:
        GymEnv("Pendulum-v1").rollout(2, nn.Linear(3, 1), trust_policy=True)

    assert "because of trust_policy=True" in raised.value.__notes__[-1]


@pytest.mark.parametrize(
    "hint", [TensorDict, TensorDict | None, "TensorDict", Annotated[TensorDict, "root"]]
)
def test_an_annotation_says_that_a_function_takes_the_tensordict(hint):
    def policy(place):
        return place.set("action", torch.zeros(1))

    policy.__annotations__["place"] = hint

    assert (GymEnv("Pendulum-v1").rollout(2, policy)["action"] == 0).all()


def test_other_errors_of_a_policy_get_no_advice():
    def policy(observation):
        raise ValueError("none of ours")

    with pytest.raises(ValueError, match="none of ours") as raised:
        GymEnv("Pendulum-v1").rollout(2, policy)

    assert not hasattr(raised.value, "__notes__")


# ------------------------------------------------------------------------- what a policy is called with


def scales(observation):
    observation /= 2
    return observation[..., :1]


def scales_in_the_root(td):
    td["observation"] /= 2
    return td.set("action", td["observation"][..., :1])


class Scales(nn.Module):
    def forward(self, observation):
        return scales(observation)


IN_PLACE = {
    "a function": scales,
    "a function of the TensorDict": scales_in_the_root,
    "a module": Scales(),
    "a TensorDictModule": TensorDictModule(Scales(), ["observation"], ["action"]),
    "a sequence": TensorDictSequential(
        TensorDictModule(Scales(), ["observation"], ["action"]),
        TensorDictModule(nn.Identity(), ["action"], ["copy"]),
    ),
}
PENDULUMS = {
    "one": partial(GymEnv, "Pendulum-v1"),
    "transformed": lambda: GymEnv("Pendulum-v1").append_transform(StepCounter()),
    "rows": lambda: SerialEnv(2, partial(GymEnv, "Pendulum-v1")),
    "TensorDicts": lambda: SerialEnv(2, partial(GymEnv, "Pendulum-v1"), use_buffers=False),
}
USES = {
    "rollout": lambda env, policy: env.rollout(3, policy),
    "callback": lambda env, policy: env.rollout(3, policy, callback=lambda *_: None),
    "collector": lambda env, policy: next(
        iter(Collector(env, policy, frames_per_batch=6, total_frames=6))
    ),
    "evaluate": lambda env, policy: evaluate(env, policy, 1, max_steps=3),
}


@pytest.mark.parametrize(
    ("use", "env"),
    [*(("rollout", env) for env in PENDULUMS), *((use, "TensorDicts") for use in list(USES)[1:])],
)
@pytest.mark.parametrize("policy", IN_PLACE)
def test_a_policy_that_writes_to_what_it_is_called_with_is_refused(policy, env, use):
    env_used = PENDULUMS[env]()

    with pytest.raises(PolicyError, match=r"changed \['observation'\] in place.*clone"):
        USES[use](env_used, IN_PLACE[policy])
    env_used.close(raise_if_closed=False)


def test_what_a_policy_carries_is_not_written_to_either():
    def counts(td):
        td["turn"] += 1
        return td.set("action", torch.zeros(1))

    env = GymEnv("Pendulum-v1")
    root = env.reset().set("turn", torch.zeros(1))

    with pytest.raises(PolicyError, match=r"changed \['turn'\] in place"):
        env.rollout(3, counts, auto_reset=False, tensordict=root)


@pytest.mark.parametrize("env", PENDULUMS)
def test_a_policy_may_change_copies_and_put_new_tensors(env):
    def policy(td):
        td["observation"] = td["observation"].clone().div_(2)
        return td.set("action", td["observation"][..., :1])

    with PENDULUMS[env]() as opened, torch.inference_mode():
        data = opened.rollout(3, policy)

    assert (data["observation"] != 0).any()
    assert not torch.equal(
        data["observation"][..., 1:, :], data["next", "observation"][..., :-1, :]
    )
