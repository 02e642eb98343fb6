"""Scenarios of VMAS give the same specs, names and data in both libraries, but where the page says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.reference.compare import Library, check_same, differs

LIMIT = 3
FLAGS = ("done", "terminated", "truncated")


def env(library: Library, scenario: str = "balance", **kwargs: Any) -> Any:
    made = library.VmasEnv(scenario, num_envs=3, seed=0, **kwargs)
    made.set_seed(4)
    return made


class Drawn:
    """Draws actions that depend on the number of the call alone; several choices, which the libraries draw in other ways, are 0."""

    def __init__(self, env: Any):
        self.spec, self.calls = env.full_action_spec, 0
        self.draws = not any(
            "Multi" in type(leaf).__name__ for leaf in self.spec.values(True, True)
        )

    def __call__(self, tensordict: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.calls)
            self.calls += 1
            return tensordict.update(self.spec.rand() if self.draws else self.spec.zero())


def played(env: Any, steps: int = LIMIT) -> Any:
    return env.rollout(steps, Drawn(env), break_when_any_done=False)


def without_flags(data: Any) -> Any:
    return data.exclude(*FLAGS, *(("next", flag) for flag in FLAGS))


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "one group": ("balance", {}),
    "groups by name": ("simple_adversary", {}),
    "names with a space": ("het_mass", {}),
    "choices": ("balance", {"continuous_actions": False}),
    "one-hot": ("balance", {"continuous_actions": False, "categorical_actions": False}),
    "several choices": (
        "simple_reference",
        {"continuous_actions": False, "multidiscrete_actions": True},
    ),
    "keywords of a scenario": ("balance", {"n_agents": 2}),
    "a dict of them": ("balance", {"scenario_kwargs": {"n_agents": 2}}),
    "a map of groups": ("simple", {"group_map": {"mine": ["agent_0"]}}),
}


@pytest.mark.parametrize("options", list(OPTIONS))
def test_specs_and_data_are_the_same(options):
    name, kwargs = OPTIONS[options]

    check_same(lambda library: env(library, name, **kwargs).full_action_spec)
    check_same(lambda library: env(library, name, **kwargs).full_reward_spec)
    check_same(lambda library: env(library, name, **kwargs).group_map)
    check_same(lambda library: env(library, name, **kwargs).agent_names)
    check_same(lambda library: set(env(library, name, **kwargs).full_observation_spec.keys(True)))

    def first(library: Library) -> Any:
        data = played(env(library, name, **kwargs), 1)
        shown = without_flags(data)
        for group in env(library, name, **kwargs).group_map:  # roots of ours have none yet
            shown = shown.exclude((group, "info"))
        return shown

    check_same(first)


def test_ends_are_the_same_but_a_limit_truncates():
    def flags(*names: str) -> Callable[[Library], Any]:
        return lambda library: played(env(library, max_steps=LIMIT)).get("next").select(*names)

    check_same(flags("done"))
    differs("vmas", flags("terminated"))


def test_infos_are_zero_where_an_episode_begins():
    def infos(library: Library) -> Any:
        made = env(library)
        played(made)
        return made.reset()["agents", "info"]

    differs("vmas", infos)


def test_envs_in_turns_do_not_share_random_numbers():
    def second(library: Library) -> Any:
        one, other = env(library), env(library)
        one.reset()
        return other.reset()["agents", "observation"]

    differs("vmas", second)


def test_unlike_agents_are_no_stack():
    def stacked(library: Library) -> Any:
        everybody = library.MarlGroupMapType.ALL_IN_ONE_GROUP
        return list(env(library, "simple_tag", group_map=everybody).group_map)

    differs("vmas", stacked)


def test_keywords_that_a_scenario_does_not_know_are_refused():
    differs("vmas", lambda library: env(library, agents=2).batch_size)
