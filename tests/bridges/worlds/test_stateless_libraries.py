"""One contract for the libraries of stateless worlds: the same numbers as by hand, copies, masks, names, errors."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import compile_policy
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, ArgumentTypeError, InputError, OptionError
from tests.bridges.compare import assert_same
from tests.bridges.worlds.libraries import LIBRARIES, shared

SLOW = (pytest.mark.slow, pytest.mark.timeout(900))


def each(*quick: str, of=LIBRARIES):
    """Parametrise over libraries, of which some have small programs."""
    return pytest.mark.parametrize(
        "library", [pytest.param(name, marks=() if name in quick else SLOW) for name in of]
    )


@each("gymnax", "navix", "pgx")
def test_an_env_equals_its_library_stepped_by_hand(library):
    one, env = shared(library)

    ended = one.equals(env, one.steps)

    assert ended > one.ends


def every_env() -> list[tuple[str, str]]:
    found = []
    for library, told in LIBRARIES.items():
        try:
            found += [(library, name) for name in told().module.env_names()]
        except pytest.skip.Exception:
            continue
    return found


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # of bare Jumanji and JaxNav
@pytest.mark.filterwarnings("ignore:MABrax is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("library", "name"), every_env())
def test_every_env_equals_its_library_and_does_what_its_specs_say(library, name):
    one = LIBRARIES[library]()
    if name in one.left_out:
        pytest.skip(one.left_out[name])
    env = one.env(name, **{**one.options, "metrics": False})

    one.equals(env, one.steps_of.get(name, 100))

    check_env_specs(env, seed=0)


@each("jaxmarl", "pgx")
def test_a_twin_and_a_copy_from_another_process_step_alike_and_a_mask_leaves_rows_alone(library):
    one, env = shared(library)
    env.set_seed(0)
    td = env.rand_action(env.reset())
    twin, copy = one.build(), pickle.loads(pickle.dumps(env))
    mask = torch.arange(len(td)) % 2 == 0

    whole, again = (each.step(td.clone())["next"] for each in (env, twin))
    part = copy.step(td.clone().set("_step", mask))["next"]

    assert twin.traces == {}
    assert_same(again, whole)
    assert_same(part[mask], whole[mask])
    left_out = [td.select(*env.observation_keys)[~mask] for td in (part, td)]
    assert_same(*left_out)
    assert not any(part[key][~mask].any() for key in env.reward_keys)


@each(of=[name for name in LIBRARIES if name not in ("pgx", "jaxmarl")])
def test_a_policy_is_compiled_into_the_program(library):
    one, env = shared(library)
    reads, make = one.policy
    policy = TensorDictModule(make(), reads, ["action"])
    env.set_seed(0)

    data = env.rollout(9, compile_policy(policy), break_when_any_done=False)

    assert torch.equal(data["action"], policy(data.select(*reads))["action"])


@each()
def test_an_env_without_a_batch_takes_the_batch_size_of_its_start(library):
    one, _ = shared(library)

    env, start = one.build(batch_size=[]), TensorDict(batch_size=[2])
    data = env.rollout(3, tensordict=start, break_when_any_done=False)

    assert data.shape == (2, 3)


@pytest.mark.parametrize("library", ["gymnax", "jumanji"])
def test_an_action_of_a_wrong_shape_is_refused(library):
    _, env = shared(library)
    action = torch.zeros(4, 3, dtype=torch.int64)

    with pytest.raises(InputError, match=r"'action' has shape \(4, 3\), but the env takes \(4,\)"):
        env.step(env.reset().set("action", action))


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=pytest.mark.row) for name in LIBRARIES]
)
def test_names_are_those_of_the_library_and_others_are_refused_with_the_nearest(library):
    one, env = shared(library)
    nearly = rf"no env called '{one.nearly}'\. Did you mean '"

    assert (env.env_name, env.libname) == (one.name, library)
    assert one.env.available_envs == one.module.env_names() and one.name in one.env.available_envs
    with pytest.raises(ArgumentError, match=nearly):
        one.env(one.nearly)
    with pytest.raises(OptionError, match="'num_envs'"):
        one.env(one.name, num_envs=3)
    with pytest.raises(ArgumentTypeError, match=re.escape(f"{one.prefix}Env('{one.name}')")):
        one.wrapper(one.name)
