"""Random programs over every kind of env, each compared with bare games in plain Python.

A program is a list of calls: seeds, resets, steps with masks and actions of odd types, rollouts, data saved
and gone on from. `tests.zoo.model` says what is right, `tests.zoo.play` compares.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from gymnasium import spaces, wrappers
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from envkit import SerialEnv
from envkit.data.paths import as_path
from envkit.specs import Composite, Unbounded
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.jax_trail import JaxTrail
from tests.zoo.kinds import KINDS, Kind, encoded
from tests.zoo.play import (
    Load,
    MaybeReset,
    Player,
    Refused,
    Reset,
    Rollout,
    Save,
    Seed,
    Step,
    Unroll,
)
from tests.zoo.trail import CHOICES, TrailEnv, TrailGym

LENGTH = 7  # of rollouts of compiled envs: another length is another program to compile


RARER = {  # compile what "transformed jax" and "mixed with jax" compile too
    "jax",
    "jax nested",
    "serial jax, rows",
    "subclass of TransformedEnv over JAX",
}
slow = pytest.mark.slow
on_ray = [slow, pytest.mark.sweep]
kinds = [
    pytest.param(kind, marks=on_ray if kind.startswith("ray") else slow if kind in RARER else ())
    for kind in KINDS
]


@pytest.fixture(scope="module", params=kinds)
def played(request):
    """A kind, one env of it for all programs, and what its seeds have begun with."""
    kind = KINDS[request.param]
    env = kind.make()
    yield kind, env, {}
    env.close(raise_if_closed=False)


def programs(kind: Kind) -> SearchStrategy[list]:
    """Draw programs that make sense for a kind; steps and rollouts come most often."""
    rows = kind.rows
    masks = st.tuples(*[st.booleans()] * rows)
    steps = st.builds(
        Step,
        st.tuples(*[st.integers(0, CHOICES - 1)] * rows),
        mask=st.none() | masks,
        advance=st.booleans(),
        form=st.integers(0, 9),
    )
    rollouts = st.builds(
        Rollout,
        st.just(LENGTH) if "keyed" in kind.worlds else st.integers(1, 9),
        stop=st.sampled_from(["never", "any", "all"]),
        start=st.sampled_from(["root", "data", "nothing"]),
        policy=st.sampled_from(["random", "follow", *["compiled"] * kind.is_jax]),
        lazy=st.booleans(),
    )
    others = [
        st.builds(MaybeReset),
        st.builds(Reset, passes_root=st.booleans()),
        st.builds(Seed, st.integers(0, 3), close=st.just(kind.lives_on)),
    ]
    if rows > 1:
        resets = masks if kind.parts else st.just((False,) * rows)
        others.append(st.builds(Reset, resets, alone=st.just(False) | st.just(kind.recalls)))
    if kind.lenient < rows:
        row = st.integers(kind.lenient, rows - 1)
        others.append(st.builds(Refused, row, advance=st.booleans()))
    if kind.is_jax:
        others.append(st.builds(Unroll, st.just(LENGTH)))
    if kind.keeps_all_in_data:
        others.append(st.builds(Save, on_disk=st.booleans()))
        others.append(st.builds(Load, st.tuples(*[st.integers(0, rows - 1)] * rows)))
    commands = st.sampled_from([*[steps] * 4, *[rollouts] * 3, *others]).flatmap(lambda one: one)
    return st.lists(commands, min_size=1, max_size=10)


def comparison(played, examples: int, **options) -> Callable[[], None]:
    """Give what plays that many programs, in the env and in the model."""
    kind, env, begun = played

    @settings(
        max_examples=examples,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
        **options,
    )
    @given(first=st.integers(0, 3), program=programs(kind))
    def run(first, program):
        player = Player(kind, env, begun)
        player.seed(first)
        for command in program:
            command(player)

    return run


def test_every_program_gives_what_bare_games_give(played):
    comparison(played, 30, derandomize=True)()


@pytest.mark.sweep
@pytest.mark.slow
def test_many_more_programs_give_what_bare_games_give(played):
    """Set ENVKIT_PROGRAMS to a seed that was printed to have the same programs again."""
    number = int(os.environ.get("ENVKIT_PROGRAMS", random.SystemRandom().randrange(2**32)))
    print(f"ENVKIT_PROGRAMS={number}")

    seed(number)(comparison(played, 300))()


# ------------------------------------------------------------------------------------ names of entries


class NamedEnv(TrailEnv):
    """Shows its observation under another name."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.observation_spec = Composite({name: Unbounded((3,))})

    def _reset(self, td, **kwargs):
        return super()._reset(td).rename_key_("observation", self.name)

    def _step(self, td):
        return super()._step(td).rename_key_("observation", self.name)


class NamedJax(JaxTrail):
    def __init__(self, name: str):
        super().__init__()
        object.__setattr__(self, "name", name)

    def _named(self, pair):
        state, timestep = pair
        return state, replace(timestep, observation={self.name: timestep.observation})

    def reset(self, key):
        return self._named(super().reset(key))

    def step(self, state, action):
        return self._named(super().step(state, action))


def named_gym(name: str) -> GymWrapper:
    space = spaces.Dict({name: TrailGym.observation_space, "other": spaces.Discrete(2)})

    def show(observation):
        return {name: observation, "other": 0}

    return GymWrapper(wrappers.TransformObservation(TrailGym(), show, space))


NAMED = {
    "gymnasium": named_gym,
    "serial": lambda name: SerialEnv(1, partial(named_gym, name)),
    "custom": NamedEnv,
    "jax": lambda name: JaxEnv(NamedJax(name), batch_size=[2], device="cpu"),
}
TAKEN = ("action", "next", "_step", "_reset", "reward", "done", "truncated")


@pytest.mark.parametrize("name", ["seen", "state", *TAKEN])
@pytest.mark.parametrize("world", NAMED)
def test_an_observation_of_any_name_is_shown_or_refused(world, name):
    """A name that the data needs for something else is refused when the env is built; Gymnasium's are shown apart."""
    is_apart = world in ("gymnasium", "serial") and name in TAKEN and not name.startswith("_")
    if name in TAKEN and not is_apart:
        with pytest.raises(RuntimeError, match=repr(name)):
            NAMED[world](name).action_spec  # noqa: B018  # a batched env starts then
        return

    env = NAMED[world](name)
    shown = "observation" if name == "state" and world != "custom" else name
    shown = ("observation", name) if is_apart else shown
    action = encoded(env.action_spec, [1] * env.batch_size.numel())
    data = env.step(env.reset().set("action", action.clone()))
    env.close()

    assert data["action"].equal(action)
    steps = [data[place][..., 1].flatten().tolist() for place in (shown, ("next", *as_path(shown)))]
    assert steps == [[0] * env.batch_size.numel(), [1] * env.batch_size.numel()]
