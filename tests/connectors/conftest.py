"""What is true of every test of a connector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from connectors.engine import guard


@pytest.fixture
def faults() -> Counter[str]:
    """How often what has failed in this process, by the name of the method. A test that takes this wants some
    to fail."""
    guard.faults.clear()
    return guard.faults


@pytest.fixture(autouse=True)
def nothing_fails_unseen(request: pytest.FixtureRequest) -> Iterator[None]:
    """A guard keeps a fault from the engine, and would keep it from the tests."""
    guard.faults.clear()
    yield
    if "faults" not in request.fixturenames:
        assert not guard.faults, "something failed that costs a miss in an engine"
