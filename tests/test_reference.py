"""The reference: examples in docstrings print what they show, and public names have an example and describe their arguments."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import envkit
from envkit_bridges.catalogue import ids

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(file.relative_to(root).with_suffix("").parts): file.read_text()
    for root, package in ((ROOT, "envkit"), (ROOT / "bridges", "envkit_bridges"))
    for file in sorted((root / package).rglob("*.py"))
}
WITH_EXAMPLES = [name for name, source in MODULES.items() if ">>> " in source]
SETTING_UP = ["envkit_bridges.jax.device_memory", "envkit_bridges.jax.compilation"]
"""Modules whose examples change settings of JAX for the whole process; in this order they can share one."""


@pytest.mark.parametrize("module", [name for name in WITH_EXAMPLES if name not in SETTING_UP])
def test_examples_print_what_they_show(module, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for those that write files
    monkeypatch.setattr(ids, "_REGISTERED", dict(ids._REGISTERED))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    for library in re.findall(r">>> (?:import|from) (\w+)", MODULES[module]):
        pytest.importorskip(library)
    pool = opened(envkit.SerialEnv(2, lambda: envkit.GymEnv("CartPole-v1")))
    shared = {"GymEnv": envkit.GymEnv, "SerialEnv": envkit.SerialEnv, "pool": pool}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    examples = [
        test
        for test in doctest.DocTestFinder().find(importlib.import_module(module), module)
        if test.examples
    ]

    report: list[str] = []
    for test in examples:
        test.globs = shared | test.globs  # those of its module
        runner.run(test, out=report.append)

    assert examples
    assert not runner.failures, "".join(report)


@pytest.mark.slow  # starts processes
def test_examples_that_set_up_a_process_print_what_they_show(tmp_path):
    pytest.importorskip("jax")
    program = f"""
import doctest, importlib
for name in {SETTING_UP}:
    print(doctest.testmod(importlib.import_module(name)))
"""

    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)

    assert len(re.findall(rb"failed=0, attempted=[1-9]", done.stdout)) == len(SETTING_UP), done


def named() -> list[str]:
    """List the public names but those that tensordict defines, and describes."""
    return [
        name for name in envkit._HOME_OF if getattr(envkit, name).__module__.startswith("envkit")
    ]


def without_example() -> set[str]:
    return {name for name in named() if ">>> " not in (getattr(envkit, name).__doc__ or "")}


def docs_of(values: Iterable[Any]) -> list[str]:
    """Read docstrings, and those of what they name as the place where options are described."""
    docs = {id(value): inspect.cleandoc(value.__doc__ or "") for value in values}
    waiting = list(docs.values())
    while waiting:
        for name in re.findall(r"`([\w.]*(?:Options|Collector|ParallelEnv))`", waiting.pop()):
            value = pydoc.locate(name) or getattr(envkit, name, None)
            if value is not None and id(value) not in docs:
                docs[id(value)] = inspect.cleandoc(value.__doc__ or "")
                waiting.append(docs[id(value)])
    return list(docs.values())


def undescribed(name: str) -> list[str]:
    """List the arguments of a public name that its docstring, or one that it inherits, does not describe."""
    value = getattr(envkit, name)
    if isinstance(value, type) and issubclass(value, (Enum, Warning)):
        return []  # of which Python makes the signature
    docs = "\n".join(docs_of(getattr(value, "__mro__", [value])))
    described = {
        word.strip()
        for words in re.findall(r"^ +([\w ,*]+):", docs, re.M)
        for word in words.split(",")
    }
    parameters = inspect.signature(value).parameters.values()
    named = [
        one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    return [one for one in named if one not in described and not one.startswith("_")]


def test_public_names_have_an_example():
    assert not without_example(), "give the docstring a section `Example:`"


def test_public_names_describe_their_arguments():
    assert not {name: missing for name in named() if (missing := undescribed(name))}
