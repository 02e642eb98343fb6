"""Compiled programs are found again by another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from envkit import cache_dir
from envkit.errors import ArgumentError

SCRIPT = """
    import sys, jax, jax.numpy as jnp
    from bridges.jax import compile_cache
    from envkit import JaxEnv, cache_dir
    from tests.zoo.walkers import Pendulum

    jax.jit(lambda x: x + 1)(1)  # JAX has compiled before
    compile_cache._WORTH_S = 0.0
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    folder = cache_dir(sys.argv[1])
    env = JaxEnv(Pendulum(), batch_size=[3])
    env.rand_step(env.reset())
    print(folder, hits.count("/jax/compilation_cache/cache_hits"))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_process_finds_what_the_first_has_compiled(tmp_path):
    def run():
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "made" / "here")]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        folder, hits = done.stdout.split()
        assert folder == command[-1]
        return int(hits)

    first, second = run(), run()

    assert list((tmp_path / "made" / "here").iterdir())
    assert first == 0 and second >= 2  # reset and step, at least


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ArgumentError, match=r"cache_dir\(path\)"):
        cache_dir(tmp_path / "file" / "folder")


def test_what_names_no_folder_is_refused():
    with pytest.raises(ArgumentError, match=r"3 of type int.*Pass a string or a Path"):
        cache_dir(3)
