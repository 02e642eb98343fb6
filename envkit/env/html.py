"""How an env shows itself in a notebook: what it is, its specs folded below, and the envs inside it.

This module decides the layout. The facts about an env come from the env itself, see `EnvReport`; how a spec is shown, from
the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

_SPECS = ("observation", "action", "reward", "done")
"""Specs that are shown; that of the state of a stateless env is not for people."""


class EnvReport(NamedTuple):
    """The facts about an env that a notebook shows.

    Attributes:
        facts: name to value, the first rows of the table.
        specs: name to spec; there are none before the env knows them.
        inside: label to env inside of it.
    """

    facts: Mapping[str, str]
    specs: Mapping[str, Any]
    inside: Mapping[str, Any]


def report_of(env: Any) -> EnvReport:
    """Return what all envs have."""
    facts = {
        "env": ", ".join(env._repr_arguments()),
        "kind": "simulator with a fixed batch" if env.batch_locked else "stateless",
        "batch size": str(tuple(env.batch_size)),
        "device": str(env.device),
    }
    specs = {name: getattr(env, f"full_{name}_spec") for name in _SPECS}
    return EnvReport({name: fact for name, fact in facts.items() if fact}, specs, {})


def html(env: Any) -> str:
    """Make a light table, with the specs and the envs inside to be unfolded; no scripts, no files."""
    report = env._report()
    rows = "".join(
        f"<tr><th style='text-align: left'>{escape(name)}</th>"
        f"<td style='text-align: left'>{escape(value)}</td></tr>"
        for name, value in report.facts.items()
    )
    specs = "".join(
        f"<tr><th style='text-align: left' colspan='6'>{escape(name)}</th></tr><tr><td colspan='6'>{spec._repr_html_()}</td></tr>"
        for name, spec in report.specs.items()
    )
    folded = _folded("specs", f"<table>{specs}</table>") if specs else ""
    inside = "".join(
        _folded(f"{label}: {type(one).__name__}", html(one)) for label, one in report.inside.items()
    )
    return f"<div><b>{escape(type(env).__name__)}</b><table>{rows}</table>{folded}{inside}</div>"


def _folded(summary: str, content: str) -> str:
    return (
        f"<details style='margin-left: 1em'><summary>{escape(summary)}</summary>{content}</details>"
    )
