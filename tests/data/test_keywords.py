"""Docstrings of classes describe the keywords that they take from a table."""

from __future__ import annotations

import inspect
import re
from typing import get_type_hints

from envkit import Collector, MultiSyncDataCollector, SerialEnv
from envkit.batched.settings import PoolOptions


class Patient(SerialEnv):
    """Step envs that take their time.

    Args:
        timeout: an hour is usual.
        **options: see `envkit.batched.settings.PoolOptions`.

    Raises:
        OptionError: a keyword is unknown.
    """


def described(cls: type) -> list[str]:
    """List the names under `Args:`, in order."""
    arguments = str(cls.__doc__).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\S.*?):", arguments, re.MULTILINE)
    return [name for entry in entries for name in entry.split(", ")]


def test_keywords_of_a_table_are_described_once_beside_those_of_the_class():
    names = described(Patient)

    assert {*get_type_hints(PoolOptions), "spec_locked", "auto_reset", "policy"} <= set(names)
    assert len(names) == len(set(names)) and "**options" not in names


def test_a_class_keeps_its_own_words_and_what_follows_them():
    assert "    timeout: an hour is usual.\n" in str(Patient.__doc__)
    assert str(Patient.__doc__).endswith("\n\nRaises:\n    OptionError: a keyword is unknown.")


def test_collectors_describe_the_keywords_of_their_kind():
    assert set(inspect.signature(Collector).parameters) <= set(described(Collector))
    assert "num_workers" in described(MultiSyncDataCollector)


def test_a_class_without_a_docstring_has_none():
    class Bare(SerialEnv):
        pass

    assert Bare.__doc__ is None
