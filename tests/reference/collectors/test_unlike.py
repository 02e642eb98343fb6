"""Where collectors are meant to differ from TorchRL's; see `docs/deviations.md`."""

from __future__ import annotations

import pytest

from tests.reference.compare import OURS, differs
from tests.zoo.jax_drift import jax_rows

pytestmark = pytest.mark.filterwarnings(  # of TorchRL and what it calls
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"
)


def test_every_kind_is_a_collector():
    def kinds(library):
        return [
            issubclass(kind, library.Collector)
            for kind in (library.MultiSyncCollector, library.MultiAsyncCollector)
        ]

    assert "True" in differs("kinds-are-collectors", kinds)


def test_a_rollout_that_was_one_program_is_contiguous_on_request():
    def flat(library, **options):
        env = jax_rows() if library is OURS else library.PendulumEnv(batch_size=[3])
        rollout = env.rollout(5, break_when_any_done=False, **options)
        return tuple(rollout.view(-1)["next", "reward"].shape)

    assert "view" in differs("programs-lie-time-first", flat)
    assert flat(OURS, return_contiguous=True) == (15, 1)


@pytest.mark.filterwarnings("ignore:.*begins new trajectories:UserWarning")
def test_an_env_that_is_rolled_out_between_two_batches_begins_new_trajectories():
    def jumps(library):
        env = library.GymEnv("Pendulum-v1")
        env.set_seed(0)
        collector = library.Collector(env, frames_per_batch=5, total_frames=10)
        batches = iter(collector)
        next(batches)
        env.rollout(3)
        batch = next(batches)
        collector.shutdown()
        turned = batch["next", "observation"] - batch["observation"]
        return float(turned[0].norm()) > 1, float(turned[1:].norm(dim=-1).max()) > 1

    differs("envs-of-a-collector", jumps)
    assert jumps(OURS) == (False, False)
