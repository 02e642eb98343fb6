"""Keywords that come from a table are described, by a class or by the table itself, and so are their defaults."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from envkit import Collector, ParallelEnv
from envkit.batched.settings import PoolOptions, PoolSettings
from envkit.collectors.settings import CollectorSettings, WorkerOptions
from envkit.env.options import EnvOptions
from envkit_bridges.jax.options import JaxOptions, JaxSettings


def described(owner: type) -> list[str]:
    """List the names under `Args:`, in order."""
    arguments = str(inspect.getdoc(owner)).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\S.*?):", arguments, re.MULTILINE)
    return [name for entry in entries for name in entry.split(", ")]


@pytest.mark.parametrize(
    ("table", "owners"),
    [
        (WorkerOptions, [Collector]),
        (PoolOptions, [ParallelEnv]),
        (EnvOptions, [EnvOptions]),
        (JaxOptions, [JaxOptions, EnvOptions]),
    ],
)
def test_keywords_of_a_table_are_described_once(table, owners):
    names = [name for owner in owners for name in described(owner)]

    assert set(get_type_hints(table)) <= set(names)
    assert all(len(described(owner)) == len(set(described(owner))) for owner in owners)


@pytest.mark.parametrize(
    ("settings", "owner"),
    [(CollectorSettings, Collector), (PoolSettings, ParallelEnv), (JaxSettings, JaxOptions)],
)
def test_a_default_that_is_not_none_false_or_zero_is_in_the_description(settings, owner):
    text = str(inspect.getdoc(owner))
    said = {
        field.name: re.search(
            rf"^    [^:\n]*\b{field.name}\b[^:\n]*:(.*(?:\n {{5,}}.*)*)", text, re.M
        )
        for field in fields(settings)
        if field.default
    }

    assert said
    assert [name for name, found in said.items() if not found or "efault" not in found[1]] == []
