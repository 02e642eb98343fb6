"""What a user can do wrong with an env: the class of the error, and what its message says.

Each message names what was got, what was expected and a way out; `tests/specs/test_misuse.py` does the
same for specs.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from envkit import (
    Compose,
    GymEnv,
    InitTracker,
    MixedEnv,
    MultiStep,
    ParallelEnv,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)
from envkit.errors import EnvkitError
from envkit.specs import Composite
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.shaped_envs import FLAG, Groups, Growing, Quiet, Several

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


def acted(env):
    return env.rand_action(env.reset())


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


def serial(**options):
    return SerialEnv(2, Count, **options)


def owned():
    counter = StepCounter()
    TransformedEnv(Count(), counter)
    return counter


BATCHES = {
    # arguments, keywords, class and message of what cannot be built
    "an unknown keyword": (
        (2, Count),
        {"num_proceses": 3},
        TypeError,
        r"no keyword 'num_proceses'\. Did you mean 'num_processes'\?.*create_env_kwargs=",
    ),
    "a maker that is a number": ((2, 3), {}, TypeError, "create_env_fn is 3, of type int.*Pass a"),
    "a maker that is a name": (
        (2, "CartPole-v1"),
        {},
        TypeError,
        "create_env_fn is 'CartPole-v1', of type str.*lambda: GymEnv",
    ),
    "makers that are numbers": ((2, [Count, 3]), {}, TypeError, "create_env_fn holds 3.*Pass a"),
    "a text of sub-envs": (("2", Count), {}, TypeError, "num_workers is '2'.*int.*Pass the number"),
    **{
        f"{what} that is {value!r}": (
            (2, Count),
            {what: value},
            kind,
            rf"{what}.*{value!r}.*{cure}",
        )
        for what, value, kind, cure in [
            ("create_env_kwargs", "n=3", TypeError, "Pass one dict for all of them, or a list"),
            ("create_env_kwargs", 3, TypeError, "Pass one dict for all of them, or a list"),
            ("timeout", "x", TypeError, "positive number of seconds, or None"),
            ("num_threads", -1, ValueError, "at least 1.*leave it out"),
            ("num_threads", 1.5, TypeError, "at least 1.*leave it out"),
            ("num_sub_threads", 0, ValueError, "at least 1.*Pass the torch threads"),
            ("num_processes", 1.5, TypeError, "at least 1.*leave it out"),
            ("num_processes", 0, ValueError, "at least 1.*leave it out"),
            ("num_processes", 3, ValueError, r"between 1 and num_workers \(2\).*leave it out"),
            ("max_restarts", "x", TypeError, "at least 0.*Pass the most restarts"),
            ("use_buffers", "yes", TypeError, "True, False or None.*leave it out"),
            ("share_individual_td", 3, TypeError, "True, False or None.*leave it out"),
        ]
    },
}

MISUSES = {
    # -- 1. construction
    "a device that is assigned": (
        assigned("device", "cpu"),
        RuntimeError,
        r"device of an env cannot be assigned \(it is None\).*env\.to\(device\)",
    ),
    "a batch size that is assigned": (
        assigned("batch_size", [2]),
        RuntimeError,
        r"batch size of an env cannot be assigned \(it is \(\)\).*super\(\).__init__\(batch_size",
    ),
    "a lock that is assigned": (
        assigned("batch_locked", False),
        RuntimeError,
        r"batch_locked is read-only \(it is True\).*stateless env",
    ),
    "data of another batch size": (
        lambda: Count().reset(TensorDict(batch_size=[3])),
        RuntimeError,
        r"batch size \(3,\).*Count is batch-locked to \(\).*Pass data of that batch size",
    ),
    "data of another batch size for a batch": (
        after(serial, lambda env: env.reset(TensorDict(batch_size=[3]))),
        RuntimeError,
        r"batch size \(3,\).*2 sub-envs.*pass batch size \(2,\)",
    ),
    "one name for two outputs": (
        lambda: Custom(specs={"reward": Composite(x=Unbounded((1,)))}),
        RuntimeError,
        "'x' is declared both in the observation spec and in the reward spec.*another name",
    ),
    "one name for two inputs": (
        lambda: Custom(specs={"state": Composite(action=Unbounded((1,)))}),
        RuntimeError,
        "'action' is declared both in the state spec and in the action spec.*another name",
    ),
    # -- 2. layout
    "inputs that are assigned": (
        assigned("input_spec", Composite()),
        RuntimeError,
        "input_spec of an env cannot be assigned.*action_spec and state_spec",
    ),
    "outputs that are assigned": (
        assigned("output_spec", Composite()),
        RuntimeError,
        "output_spec of an env cannot be assigned.*observation_spec, reward_spec",
    ),
    "a spec without the batch": (
        lambda: Custom(batch_size=[3], specs={"action": Unbounded((1,))}),
        ValueError,
        r"action_spec has shape \(1,\).*batch size \(3,\).*spec\.expand",
    ),
    "a spec that is none": (
        assigned("reward_spec", 3),
        TypeError,
        r"reward_spec must be a spec, got int.*Pass a leaf",
    ),
    "a state that is a leaf": (
        assigned("state_spec", Unbounded((1,))),
        TypeError,
        r"state_spec must be a Composite or None, got Unbounded.*Composite\(name=leaf",
    ),
    "a node of two batch sizes": (
        lambda: Custom(
            specs={
                "observation": Composite(team=Composite(x=Unbounded((3, 1)), shape=(3,))),
                "reward": Composite(team=Composite(reward=Unbounded((1,)))),
            }
        ),
        ValueError,
        r"'team', 'reward'.*\(1,\).*'team' has batch size \(3,\).*leading dims",
    ),
    # -- 3. keys and done flags
    "the action key of several": (
        lambda: Several().action_key,
        KeyError,
        r"exactly one action entry.*'button'.*env\.action_keys",
    ),
    "the done key of several": (
        lambda: Several().done_key,
        KeyError,
        r"exactly one done entry.*env\.done_keys",
    ),
    "flags of two shapes": (
        lambda: Custom(specs={"done": Composite(done=FLAG.clone(), truncated=FLAG.expand(2, 1))}),
        ValueError,
        r"\(1,\).*\(2, 1\)",
    ),
    "flags that do not say why": (
        lambda: Custom(
            td_of(x=[0.0], done=[T], truncated=[F]),
            specs={"done": Composite(done=FLAG.clone(), truncated=FLAG.clone())},
        ).reset(),
        RuntimeError,
        "done and truncated, from which terminated cannot be inferred.*Return terminated",
    ),
    "flags that are numbers": (
        lambda: Custom(td_of(x=[0.0], done=[0])).reset(),
        RuntimeError,
        r"'done' has dtype torch\.int64.*boolean.*value\.bool\(\)",
    ),
    "truncated keys of a mix": (
        lambda: MixedEnv([serial()]).add_truncated_keys(),
        RuntimeError,
        r"mixed env.*Add them to each: MixedEnv\(\[member",
    ),
    # -- 4. locks
    "an edit of a locked spec": (
        lambda: Count().observation_spec.set("x", Unbounded((1,))),
        RuntimeError,
        r"locked.*'x'.*unlock_.*set_spec_lock_\(False\)",
    ),
    # -- 5. reset
    "a reset that gives a dict": (
        lambda: Custom({"x": 1}).reset(),
        RuntimeError,
        r"Custom._reset returned dict.*new TensorDict.*Build one",
    ),
    "a reset that gives its input": (
        lambda: Echo().reset(TensorDict()),
        RuntimeError,
        "Echo._reset returned its input.*Build a new TensorDict",
    ),
    "a reset of another batch size": (
        lambda: Custom(td_of(x=[0.0]), batch_size=[3]).reset(),
        RuntimeError,
        r"_reset returned.*batch size \(\).*\(3,\) was expected.*batch_size=\[3\]",
    ),
    "an episode without a step": (
        lambda: Custom(td_of(x=[0.0], done=[T])).reset(),
        RuntimeError,
        "'done' is set right after a reset.*at least one step.*allow_done_after_reset=True",
    ),
    "a mask of another shape": (
        lambda: Count().reset(td_of(_reset=[F, T])),
        RuntimeError,
        r"'_reset' mask has shape \(2,\).*Pass a boolean mask of shape",
    ),
    "a mask of numbers": (
        lambda: Count().reset(td_of(_reset=[1])),
        RuntimeError,
        r"'_reset' mask has dtype torch\.int64.*boolean.*mask\.bool\(\)",
    ),
    "half a simulator": (
        after(
            lambda: GymEnv("CartPole-v1"),
            lambda env: env.reset(env.reset().set("_reset", torch.tensor([F]))),
        ),
        RuntimeError,
        r"\[False\].*one simulator cannot be reset in part.*Leave the mask out",
    ),
    "a part before the whole": (
        lambda: MixedEnv([serial()]).reset(td_of([2], _reset=[[T], [F]])),
        RuntimeError,
        r"partial reset came before the first full one.*reset\(\) once without a mask",
    ),
    # -- 6. steps
    **{
        f"{call} of a {type(data).__name__}": (
            partial(getattr(Count(), call), data),
            TypeError,
            rf"{call}\(\) was given is of type {type(data).__name__}.*must be a TensorDict.*Pass what",
        )
        for call in ("step", "reset", "step_and_maybe_reset", "rand_action")
        for data in ({"action": 1}, torch.zeros(1))
    },
    "a step of nothing": (
        lambda: Count().step(None),
        AttributeError,
        "is of type NoneType.*Pass what",
    ),
    "an action that is missing": (
        lambda: Several().step(TensorDict()),
        KeyError,
        r"no 'button', \('deep', 'force'\), which Several takes.*rand_action\(td\)",
    ),
    "an action that a gym env misses": (
        after(lambda: GymEnv("CartPole-v1"), lambda env: env.step(env.reset())),
        KeyError,
        r"no 'action'.*rand_action\(td\)",
    ),
    "an action that a batch misses": (
        after(serial, lambda env: env.step(env.reset())),
        KeyError,
        r"no 'action'.*rand_action\(td\)",
    ),
    "a step mask of another shape": (
        lambda: Count().step(td_of(action=[0], _step=[T, F])),
        RuntimeError,
        r"'_step' mask has shape \(2,\).*batch size \(\).*shape \(\) or \(1,\)",
    ),
    "a step mask of numbers": (
        lambda: StatelessCount().step(td_of([1], action=[[0]], count=[[0]], _step=[1])),
        RuntimeError,
        r"'_step' mask has dtype torch\.int64.*mask\.bool\(\)",
    ),
    "a reward of another size": (
        lambda: Custom(td_of(x=[0.0], reward=[1.0, 2.0])).step(td_of(action=[0.0])),
        RuntimeError,
        r"'reward' has shape \(2,\).*asks for \(1,\).*one value for each",
    ),
    "a value of another dtype": (
        lambda: Custom(td_of(x=[1]), run_type_checks=True).step(td_of(action=[0.0])),
        TypeError,
        r"'x' has dtype torch\.int64.*torch\.float32.*Cast it in _step",
    ),
    "an env that is called": (
        lambda: Count()(TensorDict()),
        NotImplementedError,
        "Count is an environment: call its step or reset.*lambda",
    ),
    "a list of continuous actions": (
        lambda: Custom().all_actions(),
        NotImplementedError,
        "'action'.*discrete",
    ),
    "an env that is closed twice, where that is to raise": (
        lambda: closed().close(raise_if_closed=True),
        RuntimeError,
        "Count is closed already.*leave raise_if_closed=True out",
    ),
    "an env that is closed": (
        lambda: closed().reset(),
        RuntimeError,
        "is closed.*Build a new one",
    ),
    # -- 7. rollouts
    "no step": (
        lambda: Count().rollout(0),
        ValueError,
        "max_steps is 0.*at least 1.*Pass",
    ),
    "two stop rules": (
        lambda: Count().rollout(2, break_when_any_done=True, break_when_all_done=True),
        TypeError,
        "both True.*exclude each other.*Pass one",
    ),
    "nothing to start from": (
        lambda: Count().rollout(2, auto_reset=False),
        RuntimeError,
        r"auto_reset=False\) needs the data to start from.*tensordict=",
    ),
    "steps of unlike shapes": (
        lambda: Growing().rollout(3, return_contiguous=True),
        RuntimeError,
        "cannot be stacked.*return_contiguous=False",
    ),
    "too little room": (
        lambda: Count().rollout(3, out=TensorDict(batch_size=[2])),
        RuntimeError,
        r"out has batch size \(2,\).*\(3,\).*Allocate at least as many steps",
    ),
    "an end that cannot be told": (
        lambda: Count().rollout(3, set_truncated=True),
        RuntimeError,
        r"set_truncated=True needs a 'truncated' entry.*'done'.*add_truncated_keys\(\)",
    ),
    "a policy that is a number": (
        lambda: Count().rollout(3, 7),
        TypeError,
        "policy is 7, of type int, but must be callable.*Pass a module",
    ),
    "a policy that gives nothing": (
        lambda: Count().rollout(3, lambda td: None),
        TypeError,
        "the policy returned NoneType.*must return one",
    ),
    "a policy that gives too few": (
        lambda: Several().rollout(3, lambda count, twice: count),
        TypeError,
        "the policy returned 1 values.*'button'.*Return one tensor for each",
    ),
    # -- 8. seeds
    "a seed below 0": (lambda: Count().set_seed(-1), ValueError, "-1.*0 or"),
    "a seed that is no integer": (lambda: Count().set_seed(1.5), ValueError, r"1\.5.*integer"),
    # -- 9. policies with memory
    "a primer that is none": (
        lambda: Count(policy=_Memory()),
        ValueError,
        "make_tensordict_primer of _Memory returned.*must return a primer. Return an envkit.TensorDictPrimer",
    ),
    # -- 10. helpers
    "an env that does not keep its specs": (
        lambda: check_env_specs(Custom(td_of(x=[0.0, 0.0]))),
        AssertionError,
        r"'x' has shape \(2,\), its spec says \(1,\).*Correct the specs",
    ),
    "an env of another library, checked": (
        lambda: check_env_specs(gymnasium.make("CartPole-v1")),
        TypeError,
        r"of type TimeLimit, but must be an env of envkit. Wrap it: GymWrapper\(env\)",
    ),
    "a class, checked": (
        lambda: check_env_specs(Count),
        TypeError,
        r"the class Count, .*Build one: Count\(\.\.\.\)",
    ),
    # -- batches
    **{
        f"{what}, {batched.__name__}": (partial(batched, *given, **options), kind, message)
        for batched in (SerialEnv, ParallelEnv)
        for what, (given, options, kind, message) in BATCHES.items()
    },
    "a start method without processes": (
        lambda: serial(mp_start_method="spawn"),
        TypeError,
        "mp_start_method is 'spawn', but a SerialEnv starts no processes.*use ParallelEnv",
    ),
    "no member": (lambda: MixedEnv([]), ValueError, "empty list.*at least one env.*Pass envs"),
    "a member without a batch": (
        lambda: MixedEnv([Count()]),
        ValueError,
        r"member 0 has batch size \(\).*one batch axis.*SerialEnv\(1",
    ),
    "members that differ": (
        lambda: MixedEnv([serial(), SerialEnv(1, Several)]),
        ValueError,
        "action 'action': member 0 has Categorical.*member 1 has absent.*Put transforms around members",
    ),
    "members on two devices": (
        lambda: MixedEnv([Custom(batch_size=[1], device=name) for name in ("cpu", "meta")]),
        ValueError,
        r"\['cpu', 'meta'\].*delivers to one.*device='cpu'",
    ),
    "a state of members that is None": (
        lambda: MixedEnv([serial()]).load_state_dict(None),
        TypeError,
        r"state dict is of type NoneType.*Pass what state_dict\(\) gave",
    ),
    "the state of other members": (
        lambda: MixedEnv([serial()]).load_state_dict({}),
        KeyError,
        r"entries \[\].*\['member0'\].*as many members",
    ),
    # -- transforms
    "a transform of two envs": (
        lambda: TransformedEnv(Count(), owned()),
        AttributeError,
        r"StepCounter.*clone\(\)",
    ),
    "a transform that is a number": (
        lambda: TransformedEnv(Count(), 3),
        ValueError,
        "of type int, but must be a Transform or a function",
    ),
    "a list of transforms": (
        lambda: TransformedEnv(Count(), [StepCounter(), InitTracker()]),
        ValueError,
        r"of type list, .*Put several into one: Compose\(t1, t2\)",
    ),
    "an index out of range": (
        lambda: Compose(StepCounter()).insert(7, InitTracker()),
        ValueError,
        "index is 7, but there are 1 transforms",
    ),
    "a limit of no step": (
        lambda: StepCounter(0),
        ValueError,
        "max_steps is 0.*None for no limit",
    ),
    "a random default": (
        lambda: TensorDictPrimer(m=Unbounded((1,)), random=True, default_value=1.0),
        ValueError,
        "random=True and default_value are both given. Pass one",
    ),
    "names of unequal number": (
        lambda: RenameTransform(["a", "b"], ["c"]),
        ValueError,
        r"2 in_keys \['a', 'b'\].*1 out_keys \['c'\].*Pass one for each",
    ),
    "a return over no step": (lambda: MultiStep(0.9, 0), ValueError, "n_steps is 0.*at least 1"),
}


class _Memory(nn.Module):
    """Asks for a primer that is none."""

    def forward(self, td):
        return td

    def make_tensordict_primer(self):
        return SimpleNamespace()


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_raises_the_documented_class_with_advice(misuse):
    call, kind, message = MISUSES[misuse]

    with pytest.raises(kind, match=f"(?s){message}") as caught:
        call()

    assert isinstance(caught.value, EnvkitError)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("name", ["device", "batch_size", "batch_locked", "input_spec"])
@pytest.mark.parametrize(
    "make", [Count, Groups, lambda: MixedEnv([serial()]), lambda: TransformedEnv(Count())]
)
def test_what_cannot_be_assigned_is_a_missing_attribute_too(make, name):
    with pytest.raises(AttributeError) as caught:
        assigned(name, None, make)()

    assert isinstance(caught.value, RuntimeError)
