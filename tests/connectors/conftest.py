"""Models of these tests are made by the process in which their engines run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from connectors.engine.allowed import files


@pytest.fixture(autouse=True)
def began_after_its_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that begins when its engine is made, as an engine's process does."""
    monkeypatch.setattr(files, "process_began_s", time.time)
    yield
