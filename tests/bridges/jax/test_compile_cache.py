"""Compiled programs are found again by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from envkit import cache_dir
from envkit.errors import ArgumentError

SCRIPT = """
    import json, sys, jax, torch
    from envkit import BraxEnv, cache_dir, compile_policy

    jax.jit(lambda x: x + 1)(1)  # JAX has compiled before
    heard = []
    jax.monitoring.register_event_listener(lambda name, **_: heard.append(name))
    folder = cache_dir(sys.argv[1])
    env = BraxEnv("fast", batch_size=[3])
    env.rand_step(env.reset())
    env.rollout(4, break_when_any_done=False)
    env.rollout(4)
    policy = torch.nn.Linear(2, 1)
    env.rollout(4, policy, break_when_any_done=False)
    env.rollout(4, compile_policy(policy), break_when_any_done=False)
    asked, found = (
        heard.count(f"/jax/compilation_cache/{what}") for what in ("compile_requests_use_cache", "cache_hits")
    )
    print(json.dumps({"folder": str(folder), "programs": env.traces, "asked": asked, "found": found}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_process_compiles_nothing_that_the_first_has_compiled(tmp_path):
    def run():
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "made" / "here")]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        assert told["folder"] == command[-1]
        return told

    first, second = run(), run()

    assert list((tmp_path / "made" / "here").iterdir())
    assert first["programs"] == second["programs"]
    assert first["found"] < first["asked"]
    assert second["found"] == second["asked"] >= sum(second["programs"].values())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ArgumentError, match=r"cache_dir\(path\)"):
        cache_dir(tmp_path / "file" / "folder")
