"""A compilation that takes long is announced, others are not."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from envkit_bridges.jax import compilation
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.walkers import Pendulum, unlike_any


@pytest.fixture
def keep_in():
    """Set the folder in which JAX keeps all programs, or None for none, until the test ends."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]

    def keep(*values):
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # else JAX keeps to the folder that it has opened

    yield lambda folder: keep(folder and str(folder), 0.0)
    keep(*before)


def slow_to_trace(x):
    time.sleep(0.2)
    return x + 1


@pytest.mark.parametrize(
    ("folder", "verb", "hint"),
    [(None, "compiling", "cache_dir()"), ("programs", "preparing", "kept on disk")],
    ids=["off", "on"],
)
def test_a_long_compilation_is_announced_and_its_end_too(
    monkeypatch, caplog, tmp_path, keep_in, folder, verb, hint
):
    monkeypatch.setattr(compilation, "NOTE_AFTER_S", 0.05)
    keep_in(folder and tmp_path / folder)
    run = compilation.jit_with_note(slow_to_trace, "the step of Ant")

    run(jnp.zeros(2))
    run(jnp.zeros(2))

    first, last = caplog.messages
    assert first.startswith(f"{verb} the step of Ant ...") and hint in first
    assert last.startswith("compiling the step of Ant took ")


def test_a_program_that_is_found_on_disk_is_not_said_to_be_compiled(
    monkeypatch, caplog, tmp_path, keep_in
):
    monkeypatch.setattr(compilation, "NOTE_AFTER_S", 0.05)
    keep_in(tmp_path)
    compilation.jit_with_note(slow_to_trace, "the step of Ant")(jnp.zeros(3))
    jax.clear_caches()
    caplog.clear()

    compilation.jit_with_note(slow_to_trace, "the step of Ant")(jnp.zeros(3))

    first, last = caplog.messages
    assert first.startswith("preparing") and last.startswith(
        "loading the step of Ant from disk took"
    )


def test_a_short_one_is_not(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "NOTE_AFTER_S", 60.0)
    run = compilation.jit_with_note(slow_to_trace, "the step of Ant")

    run(jnp.zeros(2))

    assert not caplog.messages


def test_nothing_is_announced_after_an_error(monkeypatch, caplog):
    timers, timer = [], threading.Timer
    monkeypatch.setattr(compilation, "NOTE_AFTER_S", 600.0)
    monkeypatch.setattr(threading, "Timer", lambda *args: timers.append(timer(*args)) or timers[-1])

    def fails(x):
        raise ValueError("no")

    run = compilation.jit_with_note(fails, "it")
    with pytest.raises(ValueError, match="no"):
        run(1.0)

    (waiting,) = timers
    waiting.join(60.0)
    assert not waiting.is_alive() and not caplog.messages


def test_programs_of_an_env_are_named_after_its_simulator(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "NOTE_AFTER_S", 0.0)
    env = JaxEnv(unlike_any(Pendulum), batch_size=[3])
    env.rand_step(env.reset())

    said = {message.partition(" ...")[0].partition(" ")[2] for message in caplog.messages}
    assert {"restart of Pendulum", "step of Pendulum"} <= said
