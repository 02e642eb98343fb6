"""Docstrings of classes describe the keywords that they take from a table."""

from __future__ import annotations

import inspect
import re
from typing import get_type_hints

from envkit import Collector, SerialEnv
from envkit.batched.settings import PoolOptions
from envkit.collectors.settings import WorkerOptions


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
    arguments = str(inspect.getdoc(cls)).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\S.*?):", arguments, re.MULTILINE)
    return [name for entry in entries for name in entry.split(", ")]


def test_keywords_of_a_table_are_described_once_beside_those_of_the_class():
    names = described(Patient)

    assert {*get_type_hints(PoolOptions), "spec_locked", "auto_reset", "policy"} <= set(names)
    assert len(names) == len(set(names)) and "**options" not in names


def test_a_class_keeps_its_own_words_and_what_follows_them():
    assert "    timeout: an hour is usual.\n" in str(Patient.__doc__)
    assert str(Patient.__doc__).endswith("\n\nRaises:\n    OptionError: a keyword is unknown.")


def test_the_front_door_describes_the_keywords_of_all_collectors():
    names = described(Collector)

    assert set(get_type_hints(WorkerOptions)) <= set(names)
    assert len(names) == len(set(names))


def test_a_class_without_a_docstring_has_none():
    class Bare(SerialEnv):
        pass

    assert Bare.__doc__ is None
