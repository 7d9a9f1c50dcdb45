"""Fixtures of the payload stores' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.payloads import memory


@pytest.fixture
def store_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a MemoryPayloads of the test's own."""
    yield request.node.nodeid
    memory._STORES.pop(request.node.nodeid, None)
