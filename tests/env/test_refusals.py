"""What no env can do is refused with what was wrong and what to do instead."""

from __future__ import annotations

from contextlib import closing
from functools import cache, partial
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from envkit import (
    AsyncEnvPool,
    BraxEnv,
    EnvBase,
    GymEnv,
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    PendulumEnv,
    PendulumJaxEnv,
    RandomPolicy,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TicTacToeEnv,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    check_marl_grouping,
    split_trajectories,
    step_mdp,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedEnvError,
    DataTypeError,
    DeviceNameError,
    InputError,
    MissingKeyError,
    NoParentError,
    OptionError,
    PolicyError,
    RolloutError,
    SpecError,
    WorkerError,
)
from envkit.specs import Composite
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.jax_envs import Countdown, NoisyWalk, Pendulum
from tests.zoo.refusals import assert_refused, each_row
from tests.zoo.shaped_envs import FLAG, Groups, Growing, Quiet, Several


class Idle(gymnasium.Env):
    """Takes no action at all."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Dict({})


@pytest.mark.parametrize("layout", ["packed", "nested"])
@pytest.mark.parametrize("call", ["step", "reset", "unroll"])
def test_the_state_of_another_env_is_refused(layout, call):
    walk, pendulum = (
        JaxEnv(core(), batch_size=[2], state_layout=layout) for core in (NoisyWalk, Pendulum)
    )
    root = pendulum.rand_action(pendulum.reset()).set("state", walk.reset()["state"])
    calls = {
        "step": lambda: pendulum.step(root),
        "reset": lambda: pendulum.reset(root.set("_reset", torch.tensor([True, False]))),
        "unroll": lambda: pendulum.unroll(root, 3),
    }
    told = {"packed": (InputError, "that of another env"), "nested": (KeyError, "lacks")}
    kind, message = told[layout]

    with pytest.raises(kind, match=message):
        calls[call]()


VECTORISED = {
    "gym": lambda: GymEnv("Pendulum-v1"),
    "serial": lambda: SerialEnv(1, lambda: GymEnv("Pendulum-v1")),
    "jax": lambda: JaxEnv(Pendulum(), batch_size=[1]),
    "mixed": lambda: MixedEnv([JaxEnv(Pendulum(), batch_size=[1])]),
    "transformed": lambda: TransformedEnv(GymEnv("Pendulum-v1")),
}


@pytest.mark.parametrize("name", sorted(VECTORISED))
def test_a_step_under_torch_func_is_refused(name):
    env = VECTORISED[name]()
    root = env.rand_action(env.reset())

    def paid(action):
        return env.step(root.copy().set("action", action))["next", "reward"].sum()

    for transformed, action in (
        (torch.func.grad(paid), root["action"]),
        (torch.vmap(paid), root["action"][None]),
    ):
        with pytest.raises(
            DataTypeError, match=r"'action' is a tensor under .*torch.func.*outside"
        ):
            transformed(action)
    env.step(root)
    env.close(raise_if_closed=False)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_envs": 4}, "takes no keyword 'num_envs'. Did you mean 'batch_size'"),
        ({"batchsize": [4]}, "takes no keyword 'batchsize'. Did you mean 'batch_size'"),
        ({"asymetric_obs": True}, "Did you mean 'asymmetric_obs'"),
        ({"colour": "red"}, "takes no keyword 'colour'. Leave it out"),
    ],
)
def test_a_brax_env_takes_no_keyword_that_it_does_not_know(keywords, message):
    with pytest.raises(OptionError, match=message):
        BraxEnv("fast", device="cpu", **keywords)


class Passing(Count):
    """Hands on what it is given, as subclasses do."""

    def __init__(self, **kwargs):
        EnvBase.__init__(self, **kwargs)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: JaxEnv(Countdown(3), batchsize=[4]),
            "JaxEnv takes no keyword 'batchsize'. Did you mean 'batch_size'",
        ),
        (
            lambda: JaxEnv(Countdown(3), requires_grads=True),
            "JaxEnv takes no keyword 'requires_grads'. Did you mean 'requires_grad'",
        ),
        (
            lambda: GymWrapper(gymnasium.make("CartPole-v1"), frameskip=2),
            "GymWrapper takes no keyword 'frameskip'. Did you mean 'frame_skip'",
        ),
        (
            lambda: Passing(devices="cpu"),
            "Passing takes no keyword 'devices'. Did you mean 'device'",
        ),
        (lambda: Passing(colour="red"), "takes no keyword 'colour'. Leave it out. It takes device"),
    ],
)
def test_a_keyword_that_no_env_has_is_refused_with_the_nearest_one(build, message):
    with pytest.raises(OptionError, match=message):
        build()


@pytest.mark.parametrize("make", [PendulumEnv, lambda: SerialEnv(2, PendulumEnv)])
def test_a_reset_to_a_state_must_be_shown_it(make):
    env = make()
    td = env.reset()

    with pytest.raises(ArgumentError, match=r"set_state=True .* select_reset_only=True leaves out"):
        env.reset(td, set_state=True, select_reset_only=True)
    assert torch.equal(env.reset(td.clone(), set_state=True)["th"], td["th"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(2, Count),
        lambda: ParallelEnv(2, Count),
        lambda: AsyncEnvPool([Count] * 2),
        lambda: GymEnv("CartPole-v1", num_workers=2),
        lambda: TransformedEnv(SerialEnv(2, Count)),
    ],
)
def test_what_never_started_closes_in_silence(make):
    env = make()

    env.close()
    env.close()

    assert env.is_closed


def test_a_batched_env_that_was_started_is_closed_as_often_as_one_likes():
    env = SerialEnv(2, Count)
    env.reset()
    env.close()
    env.close()

    with pytest.raises(ClosedEnvError, match="is not running"):
        env.close(raise_if_closed=True)


def test_the_reason_of_a_failed_start_is_not_hidden_by_closing():
    def fails():
        raise OSError("no licence")

    env = SerialEnv(2, fails)

    with pytest.raises(WorkerError, match="no licence"), closing(env):
        env.reset()


def preset(**entries):
    """A destination of three steps; an entry that is None is not there."""
    out = Count().rollout(3).clone()
    for name, value in entries.items():
        out = out.exclude(name) if value is None else out.set(name, value)
    return out


class Noisy(PendulumJaxEnv):
    def step(self, tensordict):
        return super().step(tensordict)


T, F = True, False


class Custom(Quiet):
    """An env that says and declares what a test gives; ``specs`` by kind."""

    def __init__(self, answer=None, *, specs=None, **kwargs):
        super().__init__(**kwargs)
        bs = self.batch_size
        self.observation_spec = Composite(x=Unbounded((*bs, 1)), shape=bs)
        self.action_spec = Unbounded((*bs, 1))
        for kind, spec in (specs or {}).items():
            setattr(self, f"{kind}_spec", spec)
        self.answer = answer

    def _out(self):
        if self.answer is not None:
            return self.answer
        return TensorDict({"x": torch.zeros(*self.batch_size, 1)}, self.batch_size)


class Echo(Custom):
    """Gives back what it was given."""

    def _reset(self, td, **kwargs):
        return td


def td_of(batch=(), **leaves) -> TensorDict:
    return TensorDict({name: torch.tensor(value) for name, value in leaves.items()}, batch)


def assigned(name, value, make=Count):
    return partial(setattr, make(), name, value)


def after(first, then):
    """Do one thing in preparation of another."""

    def call():
        given = first()
        return then(given)

    return call


def closed():
    env = Count()
    env.close()
    return env


class _Memory(nn.Module):
    """Asks for a primer that is none."""

    def forward(self, td):
        return td

    def make_tensordict_primer(self):
        return SimpleNamespace()


@cache
def one() -> PendulumEnv:
    return PendulumEnv()


@cache
def root() -> TensorDict:
    return one().rand_action(one().reset())


@cache
def rows() -> SerialEnv:
    env = SerialEnv(2, Count)
    env.reset()
    return env


@cache
def pole() -> GymEnv:
    return GymEnv("CartPole-v1")


@cache
def played() -> TensorDict:
    return rows().rollout(3, break_when_any_done=False)


REFUSALS = [
    # -- construction
    (
        "a device that is assigned",
        assigned("device", "cpu"),
        RuntimeError,
        r"device of an env cannot be assigned \(it is None\).*env\.to\(device\)",
    ),
    (
        "a batch size that is assigned",
        assigned("batch_size", [2]),
        RuntimeError,
        r"batch size of an env cannot be assigned \(it is \(\)\).*super\(\).__init__\(batch_size",
    ),
    (
        "a lock that is assigned",
        assigned("batch_locked", False),
        RuntimeError,
        r"batch_locked is read-only \(it is True\).*stateless env",
    ),
    (
        "data of another batch size",
        lambda: Count().reset(TensorDict(batch_size=[3])),
        RuntimeError,
        r"batch size \(3,\).*Count is batch-locked to \(\).*Pass data of that batch size",
    ),
    (
        "one name for two outputs",
        lambda: Custom(specs={"reward": Composite(x=Unbounded((1,)))}),
        RuntimeError,
        "'x' is declared both in the observation spec and in the reward spec.*another name",
    ),
    (
        "one name for two inputs",
        lambda: Custom(specs={"state": Composite(action=Unbounded((1,)))}),
        RuntimeError,
        "'action' is declared both in the state spec and in the action spec.*another name",
    ),
    (
        "a number as batch size",
        lambda: Count(batch_size=3),
        TypeError,
        r"batch_size is 3, .*Pass batch_size=\[3\]",
    ),
    ("words as batch size", lambda: Count(batch_size=["a"]), TypeError, r"Pass batch_size=\[4\]"),
    ("a negative batch", lambda: Count(batch_size=[2, -1]), ValueError, r"\[2, -1\].*negative"),
    (
        "a lock that is None",
        lambda: Count(spec_locked=None),
        TypeError,
        "spec_locked is None.*bool",
    ),
    # -- layout
    (
        "inputs that are assigned",
        assigned("input_spec", Composite()),
        RuntimeError,
        "input_spec of an env cannot be assigned.*action_spec and state_spec",
    ),
    (
        "outputs that are assigned",
        assigned("output_spec", Composite()),
        RuntimeError,
        "output_spec of an env cannot be assigned.*observation_spec, reward_spec",
    ),
    (
        "a spec without the batch",
        lambda: Custom(batch_size=[3], specs={"action": Unbounded((1,))}),
        ValueError,
        r"action_spec has shape \(1,\).*batch size \(3,\).*spec\.expand",
    ),
    (
        "a spec that is none",
        assigned("reward_spec", 3),
        TypeError,
        r"reward_spec must be a spec, got int.*Pass a leaf",
    ),
    (
        "a state that is a leaf",
        assigned("state_spec", Unbounded((1,))),
        TypeError,
        r"state_spec must be a Composite or None, got Unbounded.*Composite\(name=leaf",
    ),
    (
        "a node of two batch sizes",
        lambda: Custom(
            specs={
                "observation": Composite(team=Composite(x=Unbounded((3, 1)), shape=(3,))),
                "reward": Composite(team=Composite(reward=Unbounded((1,)))),
            }
        ),
        ValueError,
        r"'team', 'reward'.*\(1,\).*'team' has batch size \(3,\).*leading dims",
    ),
    # -- keys and done flags
    (
        "the action key of several",
        lambda: Several().action_key,
        KeyError,
        r"exactly one action entry.*'button'.*env\.action_keys",
    ),
    (
        "the done key of several",
        lambda: Several().done_key,
        KeyError,
        r"exactly one done entry.*env\.done_keys",
    ),
    (
        "flags of two shapes",
        lambda: Custom(specs={"done": Composite(done=FLAG.clone(), truncated=FLAG.expand(2, 1))}),
        ValueError,
        r"\(1,\).*\(2, 1\)",
    ),
    (
        "flags that do not say why",
        lambda: Custom(
            td_of(x=[0.0], done=[T], truncated=[F]),
            specs={"done": Composite(done=FLAG.clone(), truncated=FLAG.clone())},
        ).reset(),
        RuntimeError,
        "done and truncated, from which terminated cannot be inferred.*Return terminated",
    ),
    (
        "flags that are numbers",
        lambda: Custom(td_of(x=[0.0], done=[0])).reset(),
        RuntimeError,
        r"'done' has dtype torch\.int64.*boolean.*value\.bool\(\)",
    ),
    # -- locks
    (
        "an edit of a locked spec",
        lambda: Count().observation_spec.set("x", Unbounded((1,))),
        RuntimeError,
        r"locked.*'x'.*unlock_.*set_spec_lock_\(False\)",
    ),
    # -- reset
    (
        "a reset that gives a dict",
        lambda: Custom({"x": 1}).reset(),
        RuntimeError,
        r"Custom._reset returned dict.*new TensorDict.*Build one",
    ),
    (
        "a reset that gives its input",
        lambda: Echo().reset(TensorDict()),
        RuntimeError,
        "Echo._reset returned its input.*Build a new TensorDict",
    ),
    (
        "a reset of another batch size",
        lambda: Custom(td_of(x=[0.0]), batch_size=[3]).reset(),
        RuntimeError,
        r"_reset returned.*batch size \(\).*\(3,\) was expected.*batch_size=\[3\]",
    ),
    (
        "an episode without a step",
        lambda: Custom(td_of(x=[0.0], done=[T])).reset(),
        RuntimeError,
        "'done' is set right after a reset.*at least one step.*allow_done_after_reset=True",
    ),
    (
        "a mask of another shape",
        lambda: Count().reset(td_of(_reset=[F, T])),
        RuntimeError,
        r"'_reset' mask has shape \(2,\).*Pass a boolean mask of shape",
    ),
    (
        "a mask of numbers",
        lambda: Count().reset(td_of(_reset=[1])),
        RuntimeError,
        r"'_reset' mask has dtype torch\.int64.*boolean.*mask\.bool\(\)",
    ),
    (
        "half a simulator",
        after(
            lambda: GymEnv("CartPole-v1"),
            lambda env: env.reset(env.reset().set("_reset", torch.tensor([F]))),
        ),
        RuntimeError,
        r"\[False\].*one simulator cannot be reset in part.*Leave the mask out",
    ),
    # -- steps
    *(
        (name, *row)
        for name, row in {
            f"{call} of a {type(data).__name__}": (
                partial(getattr(Count(), call), data),
                TypeError,
                rf"{call}\(\) was given is of type {type(data).__name__}.*must be a TensorDict.*Pass what",
            )
            for call in ("step", "reset", "step_and_maybe_reset", "rand_action")
            for data in ({"action": 1}, torch.zeros(1))
        }.items()
    ),
    (
        "a step of nothing",
        lambda: Count().step(None),
        AttributeError,
        "is of type NoneType.*Pass what",
    ),
    (
        "an action that is missing",
        lambda: Several().step(TensorDict()),
        KeyError,
        r"no 'button', \('deep', 'force'\), which Several takes.*rand_action\(td\)",
    ),
    (
        "an action that a gym env misses",
        after(lambda: GymEnv("CartPole-v1"), lambda env: env.step(env.reset())),
        KeyError,
        r"no 'action'.*rand_action\(td\)",
    ),
    (
        "a step mask of another shape",
        lambda: Count().step(td_of(action=[0], _step=[T, F])),
        RuntimeError,
        r"'_step' mask has shape \(2,\).*batch size \(\).*shape \(\) or \(1,\)",
    ),
    (
        "a step mask of numbers",
        lambda: StatelessCount().step(td_of([1], action=[[0]], count=[[0]], _step=[1])),
        RuntimeError,
        r"'_step' mask has dtype torch\.int64.*mask\.bool\(\)",
    ),
    (
        "a reward of another size",
        lambda: Custom(td_of(x=[0.0], reward=[1.0, 2.0])).step(td_of(action=[0.0])),
        RuntimeError,
        r"'reward' has shape \(2,\).*asks for \(1,\).*one value for each",
    ),
    (
        "a value of another dtype",
        lambda: Custom(td_of(x=[1]), run_type_checks=True).step(td_of(action=[0.0])),
        TypeError,
        r"'x' has dtype torch\.int64.*torch\.float32.*Cast it in _step",
    ),
    (
        "an env that is called",
        lambda: Count()(TensorDict()),
        NotImplementedError,
        "Count is an environment: call its step or reset.*lambda",
    ),
    (
        "a list of continuous actions",
        lambda: Custom().all_actions(),
        NotImplementedError,
        "'action'.*discrete",
    ),
    (
        "an env that is closed twice, where that is to raise",
        lambda: closed().close(raise_if_closed=True),
        RuntimeError,
        "Count is closed already.*leave raise_if_closed=True out",
    ),
    ("an env that is closed", lambda: closed().reset(), RuntimeError, "is closed.*Build a new one"),
    (
        "the root after no step",
        lambda: Count().step_mdp(Count().reset()),
        KeyError,
        r"no 'next'.*\['count', 'done', 'terminated'\].*env\.step\(td\)",
    ),
    (
        "the same of the function",
        lambda: step_mdp(TensorDict()),
        KeyError,
        r"no 'next'.*it has \[\]",
    ),
    (
        "an action of another dtype",
        lambda: Count(run_type_checks=True).step(Count().reset().set("action", torch.zeros(1))),
        TypeError,
        r"'action' is of type Tensor and dtype torch\.float32.*torch\.int64",
    ),
    (
        "an action of another shape",
        lambda: Count(run_type_checks=True).step(
            Count().reset().set("action", torch.zeros(3, dtype=torch.int64))
        ),
        ValueError,
        r"'action' has shape \(3,\).*takes \(1,\)",
    ),
    # -- rollouts
    ("no step", lambda: Count().rollout(0), ValueError, "max_steps is 0.*at least 1.*Pass"),
    (
        "two stop rules",
        lambda: Count().rollout(2, break_when_any_done=True, break_when_all_done=True),
        TypeError,
        "both True.*exclude each other.*Pass one",
    ),
    (
        "nothing to start from",
        lambda: Count().rollout(2, auto_reset=False),
        RuntimeError,
        r"auto_reset=False\) needs the data to start from.*tensordict=",
    ),
    (
        "steps of unlike shapes",
        lambda: Growing().rollout(3, return_contiguous=True),
        RuntimeError,
        "cannot be stacked.*return_contiguous=False",
    ),
    (
        "too little room",
        lambda: Count().rollout(3, out=TensorDict(batch_size=[2])),
        RuntimeError,
        r"out has batch size \(2,\).*\(3,\).*Allocate at least as many steps",
    ),
    (
        "an end that cannot be told",
        lambda: Count().rollout(3, set_truncated=True),
        RuntimeError,
        r"set_truncated=True needs a 'truncated' entry.*'done'.*add_truncated_keys\(\)",
    ),
    (
        "a policy that is a number",
        lambda: Count().rollout(3, 7),
        TypeError,
        "policy is 7, of type int, but must be callable.*Pass a module",
    ),
    (
        "a policy that gives nothing",
        lambda: Count().rollout(3, lambda td: None),
        TypeError,
        "the policy returned NoneType.*must return one",
    ),
    (
        "a policy that gives too few",
        lambda: Several().rollout(3, lambda count, twice: count),
        TypeError,
        "the policy returned 1 values.*'button'.*Return one tensor for each",
    ),
    # -- seeds
    ("a seed below 0", lambda: Count().set_seed(-1), ValueError, "-1.*0 or"),
    ("a seed that is no integer", lambda: Count().set_seed(1.5), ValueError, r"1\.5.*integer"),
    # -- policies with memory
    (
        "a primer that is none",
        lambda: Count(policy=_Memory()),
        ValueError,
        "make_tensordict_primer of _Memory returned.*must return a primer. Return an envkit.TensorDictPrimer",
    ),
    # -- helpers
    (
        "an env that does not keep its specs",
        lambda: check_env_specs(Custom(td_of(x=[0.0, 0.0]))),
        AssertionError,
        r"'x' has shape \(2,\), its spec says \(1,\).*Correct the specs",
    ),
    (
        "an env of another library, checked",
        lambda: check_env_specs(gymnasium.make("CartPole-v1")),
        TypeError,
        r"of type TimeLimit, but must be an env of envkit. Wrap it: GymWrapper\(env\)",
    ),
    (
        "a class, checked",
        lambda: check_env_specs(Count),
        TypeError,
        r"the class Count, .*Build one: Count\(\.\.\.\)",
    ),
    # -- specs
    (
        "a lock that is a word",
        lambda: Count().set_spec_lock_("no"),
        TypeError,
        "'no'.*True or False",
    ),
    (
        "specs that are assigned",
        lambda: setattr(Count(), "specs", 1),
        AttributeError,
        "specs of an env.*Assign their parts",
    ),
    # -- rollout
    *(
        (name, *row)
        for name, row in {
            f"{steps!r} steps": (
                partial(Count().rollout, steps),
                TypeError,
                f"max_steps is {steps!r}",
            )
            for steps in ("a", None, 3.5)
        }.items()
    ),
    (
        "a callback that is a number",
        lambda: Count().rollout(3, callback=3),
        TypeError,
        r"callback is 3.*callback\(env, td\)",
    ),
    (
        "a start that is a number",
        lambda: Count().rollout(3, tensordict=4),
        TypeError,
        "tensordict is of type int.*must be a TensorDict",
    ),
    (
        "a policy that returns nothing",
        lambda: Count().rollout(3, lambda count: None),
        TypeError,
        "returned None, of type NoneType, as 'action'.*Return a tensor",
    ),
    (
        "a policy that returns too much",
        lambda: Count().rollout(3, lambda count: torch.zeros(3)),
        TypeError,
        r"shape \(3,\) as 'action'.*takes \(1,\).*one value for each",
    ),
    (
        "a destination that is a number",
        lambda: Count().rollout(3, out=3),
        TypeError,
        r"out is of type int.*rollout\(n, policy\)",
    ),
    (
        "a destination of a lazy stack",
        lambda: Count(9).rollout(3, out=preset(), return_contiguous=False),
        TypeError,
        "out is given and return_contiguous is False.*Leave one of them out",
    ),
    (
        "a destination without an entry",
        lambda: Count(9).rollout(3, out=preset(count=None)),
        RuntimeError,
        r"out has no 'count'.*Allocate it",
    ),
    (
        "a destination of another dtype",
        lambda: Count(9).rollout(3, out=preset(count=torch.zeros(3, 1))),
        RuntimeError,
        r"'count' has shape \(3, 1\) and dtype torch\.float32 in out.*torch\.int64 in the rollout",
    ),
    (
        "a destination of another shape",
        lambda: Count(9).rollout(3, out=preset(count=torch.zeros(3, 2, dtype=torch.int64))),
        RuntimeError,
        r"'count' has shape \(3, 2\).*but shape \(3, 1\)",
    ),
    # -- further arguments
    ("one: 'action'", lambda: one().step(one().reset()), MissingKeyError, "'action'"),
    (
        "one: (2,)",
        lambda: one().step(root().copy().set("action", torch.zeros(2))),
        InputError,
        r"\(2,\)",
    ),
    (
        "pole: [0., 0.]",
        lambda: pole().step(pole().reset().set("action", torch.zeros(2))),
        InputError,
        r"\[0\., 0\.\]",
    ),
    (
        "one: policy and actions",
        lambda: one().rollout(2, policy=RandomPolicy(one().full_action_spec), actions=[1]),
        ArgumentError,
        "policy and actions",
    ),
    (
        "one: actions is empty",
        lambda: one().rollout(2, actions=[]),
        RolloutError,
        "actions is empty",
    ),
    (
        "one: check_every is 0",
        lambda: one().rollout(2, check_every=0),
        ArgumentError,
        "check_every is 0",
    ),
    ("one: pipeline=2", lambda: one().rollout(2, pipeline=2), OptionError, "pipeline=2"),
    (
        "one: does not take",
        lambda: one().rollout(2, lambda a, b, c, d: a),
        PolicyError,
        "does not take",
    ),
    (
        "one: ended before",
        lambda: one().rollout(3, actions=iter([torch.zeros(1)])),
        RolloutError,
        "ended before",
    ),
    ("PendulumEnv: colour", lambda: PendulumEnv(colour="red"), OptionError, "colour"),
    (
        "PendulumEnv: device is 3.5",
        lambda: PendulumEnv(device=3.5),
        ArgumentTypeError,
        r"device is 3\.5",
    ),
    ("PendulumEnv: 'warp'", lambda: PendulumEnv(device="warp"), DeviceNameError, "'warp'"),
    (
        "check_env_specs: 'maybe'",
        lambda: check_env_specs(one(), strict="maybe"),
        ArgumentTypeError,
        "'maybe'",
    ),
    (
        "split_trajectories: batch size ()",
        lambda: split_trajectories(root()),
        ArgumentError,
        r"batch size \(\)",
    ),
    (
        "split_trajectories: 'maybe'",
        lambda: split_trajectories(played(), as_nested="maybe"),
        ArgumentTypeError,
        "'maybe'",
    ),
    (
        "check_marl_grouping: agent_names is empty",
        lambda: check_marl_grouping({}, []),
        ArgumentError,
        "agent_names is empty",
    ),
    (
        "check_marl_grouping: more than once",
        lambda: check_marl_grouping({"g": ["a"]}, ["a", "a"]),
        ArgumentError,
        "more than once",
    ),
    (
        "check_marl_grouping: 'g' has no agents",
        lambda: check_marl_grouping({"g": []}, ["a"]),
        ArgumentError,
        "'g' has no agents",
    ),
    (
        "check_marl_grouping: 'b'",
        lambda: check_marl_grouping({"g": ["b"]}, ["a"]),
        ArgumentError,
        "'b'",
    ),
    (
        "check_marl_grouping: 'a' is in 2 groups",
        lambda: check_marl_grouping({"g": ["a"], "h": ["a"]}, ["a"]),
        ArgumentError,
        "'a' is in 2 groups",
    ),
    (
        "RandomPolicy: no action_spec",
        lambda: RandomPolicy()(root()),
        NoParentError,
        "no action_spec",
    ),
    (
        "TicTacToeEnv: cell 0",
        lambda: TicTacToeEnv().step(
            TicTacToeEnv()
            .step(TicTacToeEnv().reset().set("action", torch.tensor(0)))["next"]
            .set("action", torch.tensor(0))
        ),
        InputError,
        "cell 0",
    ),
    (
        "PendulumEnv: td_params",
        lambda: PendulumEnv(td_params=TensorDict({"x": torch.zeros(1)}, [])),
        MissingKeyError,
        "td_params",
    ),
    # -- others
    (
        "steps that may not be dropped name the class that makes them",
        lambda: TransformedEnv(Noisy(batch_size=[2]), StepCounter()).rollout(4, check_every=2),
        OptionError,
        "Noisy changes with each step",
    ),
    (
        "an output named as an entry of the env is refused",
        lambda: TransformedEnv(
            GymEnv("Pendulum-v1"), RenameTransform(["observation"], ["output1"], create_copy=True)
        ).rollout(2, lambda one, other: (one[..., :1], other)),
        PolicyError,
        r"an entry of this name.*TensorDictModule",
    ),
    (
        "a simulator without actions is refused",
        lambda: GymWrapper(Idle()),
        SpecError,
        r"action space of .* is Dict\(\), which holds no action",
    ),
    (
        "an action that nobody wrote is named",
        lambda: GymEnv("CartPole-v1").rollout(3, lambda td: td),
        KeyError,
        "action",
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)


def test_a_refusal_without_a_way_out_is_found():
    def vague():
        raise ArgumentError("bad value 3")

    with pytest.raises(AssertionError, match="bad value 3"):
        assert_refused(vague, ArgumentError, "3")


@pytest.mark.parametrize("name", ["device", "batch_size", "batch_locked", "input_spec"])
@pytest.mark.parametrize(
    "make",
    [Count, Groups, lambda: MixedEnv([SerialEnv(2, Count)]), lambda: TransformedEnv(Count())],
)
def test_what_cannot_be_assigned_is_a_missing_attribute_too(make, name):
    with pytest.raises(AttributeError) as caught:
        assigned(name, None, make)()

    assert isinstance(caught.value, RuntimeError)
