"""Where collectors are meant to differ from TorchRL's; see `docs/deviations.md`."""

from __future__ import annotations

import pytest

from tests.reference.compare import differs

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
