"""Where collectors are meant to differ from TorchRL's; see `docs/deviations.md`."""

from __future__ import annotations

import pytest

from tests.reference.compare import differs

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own


def test_more_frames_than_were_asked_for_are_refused():
    def frames(library):
        collector = library.Collector(
            lambda: library.GymEnv("CartPole-v1"), None, frames_per_batch=4, total_frames=10
        )
        return sum(batch.numel() for batch in collector)

    assert "no multiple of frames_per_batch" in differs("totals-are-whole", frames)


def test_every_kind_is_a_collector():
    def kinds(library):
        return [
            issubclass(kind, library.Collector)
            for kind in (library.MultiSyncCollector, library.MultiAsyncCollector)
        ]

    assert "True" in differs("kinds-are-collectors", kinds)
