"""Rules of every test of a connector: nothing fails unseen, and models are older than their engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from connectors.engine import guard
from connectors.engine.allowed import files


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


@pytest.fixture(autouse=True)
def began_after_its_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that begins when its engine is made, as an engine's process does."""
    monkeypatch.setattr(files, "process_began_s", time.time)
    yield
