"""Envs that are wrong in one way or several, and the whole report that `check_env_specs` gives of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import gymnasium
import jax
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import nn

from envkit import (
    EnvBase,
    EnvSpecWarning,
    GymEnv,
    GymWrapper,
    JaxEnv,
    ModuleTransform,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)
from envkit.env.deviations import deviations
from envkit.errors import OutOfSpecError
from envkit.specs import Bounded, Categorical, Composite, NonTensor, OneHot, Unbounded
from tests.zoo.jax_envs import Countdown, NoisyWalk

INTS = torch.int64


class Sound(EnvBase):
    """A counter that does what its specs say; the envs below break it."""

    batch: tuple[int, ...] = ()

    def __init__(self):
        super().__init__(batch_size=self.batch)
        bs = self.batch
        self.observation_spec = Composite(count=Unbounded((*bs, 1), dtype=INTS), shape=bs)
        self.action_spec = Categorical(2, shape=(*bs, 1))
        self.reward_spec = Unbounded((*bs, 1))
        self.declare()

    def declare(self):
        pass

    def out(self, **entries):
        return TensorDict({"count": self.count.clone(), **entries}, self.batch)

    def _reset(self, td):
        self.count = torch.zeros(*self.batch, 1, dtype=INTS)
        return self.out()

    def _step(self, td):
        self.count = self.count + 1
        return self.out(reward=torch.ones(*self.batch, 1), terminated=self.count >= 9)

    def _set_seed(self, seed):
        pass


@dataclass(frozen=True)
class Broken:
    """A class and the lines of its report, as far as they are golden."""

    make: Callable[[], EnvBase]
    lines: list[str]


BROKEN: dict[str, Broken] = {}


def broken(*lines: str):
    """Register an env with every line of its report."""

    def register(make):
        name = make.__name__.strip("_").replace("_", " ")
        BROKEN[name] = Broken(make, list(lines))
        return make

    return register


TOO_MANY = "is present in real but not in fake: declare it in a spec, or do not return it"


def too_few(hook):
    return f"is present in fake but not in real: return it from {hook}, or do not declare it"


@broken(f"'extra' {TOO_MANY}", f"('next', 'extra') {TOO_MANY}")
class An_entry_nobody_declared(Sound):
    def out(self, **entries):
        return super().out(extra=torch.zeros(1), **entries)


@broken(f"'speed' {too_few('_reset')}", f"('next', 'speed') {too_few('_step')}")
class An_entry_nobody_returns(Sound):
    def declare(self):
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), speed=Unbounded((2,)))


@broken(f"'speed' {too_few('_reset')}")
class An_entry_that_only_steps_return(Sound):
    def declare(self):
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), speed=Unbounded((2,)))

    def _step(self, td):
        return super()._step(td).set("speed", torch.zeros(2))


@broken(f"('agents', 'goal') {too_few('_reset')}", f"('next', 'agents', 'goal') {too_few('_step')}")
class A_nested_entry_nobody_returns(Sound):
    def declare(self):
        agents = Composite(place=Unbounded((2, 3)), goal=Unbounded((2, 1)), shape=(2,))
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), agents=agents)

    def out(self, **entries):
        return super().out(agents=TensorDict({"place": torch.zeros(2, 3)}, [2]), **entries)


@broken(f"'weight' {too_few('_reset')}")
class A_state_that_a_reset_does_not_give(Sound):
    def declare(self):
        self.state_spec = Composite(weight=Unbounded((1,)))


@broken(
    "'count' has shape (2,), its spec says (1,)",
    "('next', 'count') has shape (2,), its spec says (1,)",
)
class An_observation_of_another_shape(Sound):
    def out(self, **entries):
        return super().out(**entries).set("count", self.count.expand(2))


@broken(
    "'count' has dtype torch.float32, its spec says torch.int64",
    "('next', 'count') has dtype torch.float32, its spec says torch.int64",
)
class An_observation_of_another_dtype(Sound):
    def out(self, **entries):
        return super().out(**entries).set("count", self.count.float())


@broken("('next', 'reward') has dtype torch.float64, its spec says torch.float32")
class A_reward_of_another_dtype(Sound):
    def _step(self, td):
        return super()._step(td).set("reward", torch.ones(1, dtype=torch.float64))


@broken(
    "'count' has values outside its spec BoundedDiscrete(shape=(1,), low=0, high=1, device=cpu, "
    "dtype=int64): found 0 to 7",
    "('next', 'count') has values outside its spec BoundedDiscrete(shape=(1,), low=0, high=1, "
    "device=cpu, dtype=int64): found 7 to 7",
)
class Bounds_that_are_too_narrow(Sound):
    def declare(self):
        self.observation_spec = Composite(count=Bounded(0, 1, (1,), dtype=INTS))

    def _step(self, td):
        return super()._step(td).set("count", torch.tensor([7]))


@broken(
    "'kind' has values outside its spec OneHot(shape=(3,), n=3, device=cpu, dtype=int64): found 0 to 1",
    "('next', 'kind') has values outside its spec OneHot(shape=(3,), n=3, device=cpu, dtype=int64): "
    "found 0 to 1",
)
class A_one_hot_value_with_two_ones(Sound):
    def declare(self):
        kind = OneHot(3, dtype=INTS)
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), kind=kind)

    def out(self, **entries):
        return super().out(kind=torch.tensor([1, 1, 0]), **entries)


@broken(
    "'count' is non-tensor data, its spec says a tensor",
    "'word' is a tensor, its spec says non-tensor data",
    "('next', 'count') is non-tensor data, its spec says a tensor",
    "('next', 'word') is a tensor, its spec says non-tensor data",
)
class Words_and_numbers_mixed_up(Sound):
    def declare(self):
        word = NonTensor(example_data="one")
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), word=word)

    def out(self, **entries):
        return TensorDict({"word": torch.zeros(1), "count": NonTensorData("one"), **entries})


@broken(
    "reset: 'done' is set right after a reset of {env}. An episode must have at least one step: fix "
    "_reset, or pass allow_done_after_reset=True."
)
class An_episode_that_begins_done(Sound):
    def _reset(self, td):
        return super()._reset(td).set("done", torch.ones(1, dtype=torch.bool))


@broken(
    "step: the simulator returned done and truncated, from which terminated cannot be inferred. "
    "Return terminated (and truncated) from _step and _reset, or done alone.",
)
class Flags_that_say_too_little(Sound):
    def declare(self):
        self.add_truncated_keys()

    def _step(self, td):
        flag = torch.zeros(1, dtype=torch.bool)
        return self.out(done=flag, truncated=flag.clone())


@broken(
    "step: 'done' has dtype torch.float32, but done flags are boolean. Return a comparison, or "
    "value.bool()."
)
class A_flag_that_is_a_number(Sound):
    def _step(self, td):
        return self.out(done=torch.zeros(1))


@broken(f"('next', 'truncated') {TOO_MANY}", f"'truncated' {TOO_MANY}")
class A_flag_nobody_declared(Sound):
    def _step(self, td):
        return super()._step(td).set("truncated", torch.zeros(1, dtype=torch.bool))


@broken(
    "step: 'reward' has shape (2,), but its spec asks for (1,). Return one value for each "
    "environment of the batch.",
    f"('next', 'extra') {TOO_MANY}",
    "('next', 'count') has dtype torch.int32, its spec says torch.int64",
)
class A_reward_of_two_numbers_and_more(Sound):
    def _step(self, td):
        return self.out(reward=torch.ones(2), extra=torch.zeros(1), count=self.count.int())

    def out(self, **entries):
        return TensorDict({"count": self.count, **entries})


@broken(
    "reset: A_batch_without_its_axis._reset returned a TensorDict of batch size (), but (3,) was "
    "expected: that of the env. Pass it to the TensorDict: TensorDict({...}, batch_size=[3])."
)
class A_batch_without_its_axis(Sound):
    batch = (3,)

    def out(self, **entries):
        return TensorDict({"count": self.count, **entries})


@broken(
    "step: A_step_that_returns_its_input._step returned its input. Build a new TensorDict with the "
    "outputs; the input holds the caller's data."
)
class A_step_that_returns_its_input(Sound):
    def _step(self, td):
        return td.set("reward", torch.ones(1))


@broken(
    "reset: A_reset_that_returns_a_dict._reset returned dict, but must return a new TensorDict with "
    "the outputs. Build one: TensorDict({...}, batch_size=env.batch_size)."
)
class A_reset_that_returns_a_dict(Sound):
    def _reset(self, td):
        return {"count": torch.zeros(1, dtype=INTS)}


@broken(
    "'count' of the reset was written to by a later step: return a copy, value.clone()",
    "'count' of the first step was written to by a later step: return a copy, value.clone()",
    "'count' of the second step was written to by a later step: return a copy, value.clone()",
)
class A_tensor_that_is_written_into(Sound):
    def out(self, **entries):
        return TensorDict({"count": self.count, **entries})

    def _step(self, td):
        self.count += 1
        return self.out(reward=torch.ones(1), terminated=torch.zeros(1, dtype=torch.bool))


@broken(f"'note' {too_few('_reset')}", f"('next', 'note') {too_few('_step')}")
class A_text_nobody_returns(Sound):
    def declare(self):
        note = NonTensor(example_data="a")
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), note=note)


@broken(
    "('body', 'leg') has dtype torch.float64, its spec says torch.float32",
    "('next', 'body', 'leg') has dtype torch.float64, its spec says torch.float32",
)
class A_nested_entry_of_another_dtype(Sound):
    def declare(self):
        body = Composite(leg=Unbounded((1,)))
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), body=body)

    def out(self, **entries):
        return super().out(**entries, body=TensorDict({"leg": torch.ones(1).double()}))


@broken(
    "'action' has values outside its spec Categorical(shape=(1,), n=2, device=cpu, dtype=int64): "
    "found 5 to 5"
)
class An_action_that_its_spec_does_not_have(Sound):
    def rand_action(self, tensordict=None):
        return super().rand_action(tensordict).update({"action": torch.tensor([5])})


@broken(
    f"'speed' {too_few('_reset')}",
    f"('next', 'speed') {too_few('_step')}",
    "'count' has dtype torch.int32, its spec says torch.int64",
    "('next', 'count') has dtype torch.int32, its spec says torch.int64",
    "('next', 'reward') has values outside its spec BoundedContinuous(shape=(1,), low=-1.0, high=0.0, "
    "device=cpu, dtype=float32): found 1 to 1",
    f"('next', 'extra') {TOO_MANY}",
    f"'extra' {TOO_MANY}",
)
class Everything_at_once(Sound):
    def declare(self):
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), speed=Unbounded((2,)))
        self.reward_spec = Bounded(-1.0, 0.0, (1,))

    def out(self, **entries):
        return super().out(**entries).set("count", self.count.int())

    def _step(self, td):
        return super()._step(td).set("extra", torch.zeros(1))


# ------------------------------------------------------- right data, wrong conduct


@broken("'place' holds NaN", "('next', 'place') holds NaN")
class An_observation_that_is_no_number(Sound):
    def declare(self):
        self.observation_spec = Composite(count=Unbounded((1,), dtype=INTS), place=Unbounded((2,)))

    def out(self, **entries):
        return super().out(**entries).set("place", torch.tensor([1.0, torch.nan]))


@broken("_step returns no 'reward', so it is 0 in every step: return it, or zeros")
class A_reward_left_out(Sound):
    def _step(self, td):
        return super()._step(td).exclude("reward")


@broken(
    "_step writes 'action' into its input, which is the caller's: return it in a new TensorDict"
)
class A_step_that_writes_into_its_input(Sound):
    def _step(self, td):
        return super()._step(td.set("action", 1 - td["action"]))


@broken("'done' is False where 'terminated' is True: leave it out, and it is made of the others")
class A_flag_that_denies_another(Sound):
    def _step(self, td):
        out = super()._step(td)
        return out.set("terminated", ~out["terminated"]).set("done", torch.tensor([False]))


MASK = (
    "of rows that the '_step' mask leaves out is not that of their root: a batched env must honour the mask "
    "in _step"
)


RESET_MASK = "of rows that a '_reset' mask leaves out changes after the reset: a batched env must honour the mask in _reset"


@broken(f"'count' {MASK}", f"'reward' {MASK}", f"'count' {RESET_MASK}")
class A_batch_that_ignores_masks(Sound):
    batch = (3,)


@broken(
    "set_seed(3) raises OSError: the device is gone. Seed the simulator in _set_seed, or let it do "
    "nothing where there is nothing random"
)
class A_seed_that_fails(Sound):
    _action_seed = 3

    def _set_seed(self, seed):
        raise OSError("the device is gone")


class OfTheClass(Sound):
    """Counts in an attribute of its class."""

    @property
    def count(self):
        return type(self).counted

    @count.setter
    def count(self, value):
        type(self).counted = value


SHARED = (
    "of sub-envs that are not stepped changes with steps or resets of others: they share state, such as an attribute of "
    "their class or a variable of a module. Keep it in attributes of self, set in __init__"
)


@broken(f"'count' {SHARED}")
def Rows_that_share_an_attribute_of_their_class():
    return SerialEnv(2, OfTheClass)


class SharedGym(gymnasium.Env):
    """Moves a place that all of its kind have."""

    observation_space = gymnasium.spaces.Box(-99, 99, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    places: ClassVar[list[float]] = [0.0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.places[0] = 0.0
        return np.float32(self.places), {}

    def step(self, action):
        self.places[0] += 1
        return np.float32(self.places), -self.places[0], False, False, {}


@broken(f"'observation' {SHARED}", f"'reward' {SHARED}")
def Simulators_that_share_an_attribute_of_their_class():
    return SerialEnv(3, lambda: GymWrapper(SharedGym()))


def global_draws(library):
    return (
        f"a reset or a step draws from the global generator of {library}, which set_seed does not touch: draw "
        "from a generator of the env's own, made again in _set_seed"
    )


class Draws_that_no_seed_decides(Sound):
    def _reset(self, td):
        torch.rand(1), np.random.rand()
        return super()._reset(td)

    def _step(self, td):
        random.random()
        return super()._step(td)


class Draws_from_a_hidden_generator(Sound):
    """Its seed does nothing."""

    def declare(self):
        self.hidden = torch.Generator()

    def _reset(self, td):
        self.count = -torch.randint(10**9, (1,), generator=self.hidden)
        return self.out()


SEEDED_IN_VAIN = "a reset and a step after set_seed(3) give other data than the ones after set_seed(3) before, in 'count': seed"


class Pays_in_float64(Sound):
    def declare(self):
        self.reward_spec = Unbounded((1,), dtype=torch.float64)

    def out(self, **entries):
        entries = {name: v.double() if name == "reward" else v for name, v in entries.items()}
        return super().out(**entries)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (Draws_that_no_seed_decides, [*map(global_draws, ("torch", "NumPy", "Python"))]),
        (Draws_from_a_hidden_generator, [SEEDED_IN_VAIN]),
        (Pays_in_float64, ["the reward 'reward' is float64, and most losses take float32"]),
    ],
)
def test_what_is_unusual_is_one_warning_and_an_error_if_that_is_asked_for(kind, lines):
    with pytest.warns(EnvSpecWarning) as caught:
        check_env_specs(kind(), seed=3)
    with pytest.raises(OutOfSpecError) as refused:
        kind().check_env_specs(seed=3, strict=True)

    assert len(caught) == 1
    for text in (str(caught[0].message), str(refused.value)):
        assert [line in text for line in lines] == [True] * len(lines)


@dataclass(frozen=True)
class Stuck(NoisyWalk):
    """Draws its beginning from a key of its own."""

    def reset(self, key):
        return super().reset(jax.random.PRNGKey(7))


@broken(
    "reset of Stuck draws random numbers from another key than it is given, so all episodes begin alike: "
    "draw from that, split where several are needed"
)
def Beginnings_that_no_key_decides():
    return JaxEnv(Stuck(), batch_size=[2])


@pytest.mark.parametrize("core", [NoisyWalk(), Countdown(5)])
def test_a_reset_may_use_its_key_or_draw_nothing(core):
    check_env_specs(JaxEnv(core, batch_size=[2]))


def test_a_batch_that_honours_masks_passes():
    class Honest(A_batch_that_ignores_masks):
        def _step(self, td):
            moves = td.get("_step", torch.ones(3, dtype=torch.bool))[:, None]
            self.count = self.count + moves
            return self.out(reward=moves.float(), terminated=self.count >= 9)

        def _reset(self, td):
            mask = None if td is None else td.get("_reset", None)
            if mask is None:
                return super()._reset(td)
            self.count = torch.where(mask, 0, self.count)
            return self.out()

    check_env_specs(Honest())


def test_a_batch_whose_reset_ignores_its_mask_is_found_though_its_steps_honour_theirs():
    class Forgets(A_batch_that_ignores_masks):
        def _step(self, td):
            moves = td.get("_step", torch.ones(3, dtype=torch.bool))[:, None]
            self.count = self.count + moves
            return self.out(reward=moves.float(), terminated=self.count >= 9)

    with pytest.raises(OutOfSpecError) as caught:
        check_env_specs(Forgets())

    assert f"'count' {RESET_MASK}" in str(caught.value)
    assert "'_step' mask" not in str(caught.value)


def test_a_check_leaves_a_seeded_env_as_its_seed_does():
    runs = []
    for _ in range(2):
        env = GymEnv("CartPole-v1")
        env.set_seed(3)
        check_env_specs(env)
        runs.append(env.rollout(5)["observation"])

    assert torch.equal(*runs)
    assert "_step" not in vars(env)


def test_a_transform_may_draw_from_the_global_generator():
    noise = ModuleTransform(module=nn.Dropout(), in_keys=["place"], out_keys=["place"])

    check_env_specs(TransformedEnv(JaxEnv(NoisyWalk(), batch_size=[2]), noise))


def test_the_envs_below_break_something_sound():
    check_env_specs(Sound())
    Sound().check_env_specs(seed=0)


@pytest.mark.parametrize("name", BROKEN)
def test_the_report_names_everything_that_is_wrong(name):
    env = BROKEN[name].make()

    with pytest.raises(OutOfSpecError) as error:
        check_env_specs(env)

    head, *lines, cure = str(error.value).splitlines()
    assert head == f"{env} does not do what its specs say:"
    assert lines == [f"  - {line.replace('{env}', str(env))}" for line in BROKEN[name].lines]
    assert cure == "Correct the specs, or what _reset and _step return."
    assert isinstance(error.value, AssertionError)


def test_dtypes_are_compared_on_request_only():
    check_env_specs(An_observation_of_another_dtype(), check_dtype=False)
    check_env_specs(A_reward_of_another_dtype(), check_dtype=False)


def test_data_elsewhere_than_the_env_says_is_named():
    """`step` delivers what an env returns, so only data of other makers can be elsewhere."""
    env = Sound().to("cpu")
    real = env.rollout(1).clear_device_()
    real["next", "count"] = real["next", "count"].to("meta")
    compare = partial(deviations, env.specs, env.fake_tensordict(), real, check_dtype=True)

    lines = compare(device=env.device)

    assert lines == ["('next', 'count') is on meta, its spec says cpu"]


def test_episodes_after_the_first_are_looked_at_on_request():
    class Third_episode_differs(Sound):
        episodes = 0

        def declare(self):
            self.observation_spec = Composite(count=Bounded(0, 1, (1,), dtype=INTS))

        def _reset(self, td):
            self.episodes += 1
            return super()._reset(td)

        def _step(self, td):
            self.count = torch.full((1,), 7 if self.episodes > 2 else 1)
            return self.out(reward=torch.ones(1), terminated=torch.ones(1, dtype=torch.bool))

    for stop in (None, True):
        check_env_specs(Third_episode_differs(), break_when_any_done=stop)
    with pytest.raises(OutOfSpecError, match="found 1 to 7"):
        check_env_specs(Third_episode_differs(), break_when_any_done=False)


def test_an_error_of_the_env_itself_is_not_a_report():
    class Crashes(Sound):
        def _step(self, td):
            raise ZeroDivisionError("in the physics")

    with pytest.raises(ZeroDivisionError, match="in the physics"):
        check_env_specs(Crashes())


def test_a_check_can_start_from_data_and_a_seed():
    class Needs(Sound):
        def _reset(self, td):
            if td is None:
                raise RuntimeError("needs data")
            return super()._reset(td)

        def _set_seed(self, seed):
            self.seed = seed

    env = Needs()

    check_env_specs(env, tensordict=TensorDict(), seed=3)

    assert env.seed == 3
    with pytest.raises(RuntimeError, match="needs data"):
        check_env_specs(env)


@pytest.mark.parametrize("name", ["An entry nobody declared", "Bounds that are too narrow"])
def test_a_lazy_check_reports_the_same(name):
    env = BROKEN[name].make()

    with pytest.raises(OutOfSpecError) as lazy:
        check_env_specs(env, return_contiguous=False)

    assert {line[4:] for line in str(lazy.value).splitlines()[1:-1]} >= {
        line for line in BROKEN[name].lines if "found" not in line
    }


def test_an_env_in_a_batch_is_reported_by_entry():
    env = SerialEnv(2, An_entry_nobody_returns, use_buffers=False)

    with pytest.raises(OutOfSpecError, match="no 'speed'"):
        check_env_specs(env)
    env.close()


def test_values_are_compared_whatever_their_dtype():
    with pytest.raises(OutOfSpecError, match="found 0 to 7"):
        check_env_specs(Bounds_that_are_too_narrow(), check_dtype=False)
