"""A compilation that takes long is announced, others are not."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from bridges.jax import compile_note
from bridges.jax.env import JaxEnv
from tests.zoo.walkers import Pendulum, unlike_any


def slow_to_trace(x):
    time.sleep(0.2)
    return x + 1


@pytest.mark.parametrize(
    ("folder", "hint"), [(None, "cache_dir()"), ("programs", "kept on disk")], ids=["off", "on"]
)
def test_a_long_compilation_is_announced_and_its_end_too(
    monkeypatch, caplog, tmp_path, folder, hint
):
    monkeypatch.setattr(compile_note, "NOTE_AFTER_S", 0.05)
    run = compile_note.jit_with_note(slow_to_trace, "the step of Ant")

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder and str(tmp_path / folder))
    try:
        run(jnp.zeros(2))
        run(jnp.zeros(2))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

    first, last = caplog.messages
    assert first.startswith("compiling the step of Ant ...") and hint in first
    assert last.startswith("compiling the step of Ant took ")


def test_a_short_one_is_not(monkeypatch, caplog):
    monkeypatch.setattr(compile_note, "NOTE_AFTER_S", 60.0)
    run = compile_note.jit_with_note(slow_to_trace, "the step of Ant")

    run(jnp.zeros(2))

    assert not caplog.messages


def test_nothing_is_announced_after_an_error(monkeypatch, caplog):
    made, timer = [], threading.Timer
    monkeypatch.setattr(compile_note, "NOTE_AFTER_S", 600.0)
    monkeypatch.setattr(threading, "Timer", lambda *args: made.append(timer(*args)) or made[-1])

    def fails(x):
        raise ValueError("no")

    run = compile_note.jit_with_note(fails, "it")
    with pytest.raises(ValueError, match="no"):
        run(1.0)

    (waiting,) = made
    waiting.join(60.0)
    assert not waiting.is_alive() and not caplog.messages


def test_programs_of_an_env_are_named_after_its_simulator(monkeypatch, caplog):
    monkeypatch.setattr(compile_note, "NOTE_AFTER_S", 0.0)
    env = JaxEnv(unlike_any(Pendulum), batch_size=[3])
    env.rand_step(env.reset())

    said = {message.partition(" ...")[0] for message in caplog.messages}
    assert {"compiling restart of Pendulum", "compiling step of Pendulum"} <= said
