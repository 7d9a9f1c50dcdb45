"""Fixtures and rules for every test.

A test that takes a server gets the marker `servers` by itself, so the quick tier cannot start one by
oversight. Whatever a test asks for and cannot have is a failure, never a silent skip; the one exception,
a GPU, is said again at the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import RedisServer, ServerError

_SERVER_FIXTURES = {"redis_server", "redis_url", "private_redis"}
_skipped_for_gpu: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _SERVER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_gpu():
        _skipped_for_gpu.append(item.nodeid)
        pytest.skip("no CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped_for_gpu:
        terminalreporter.section("NOT TESTED: no CUDA device", red=True)
        for name in _skipped_for_gpu:
            terminalreporter.line(name)


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def _session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = _started(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(_session_redis: RedisServer) -> RedisServer:
    """A real redis-server, empty, shared with the tests before and after: leave it running."""
    _session_redis.flush()
    return _session_redis


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A real redis-server of the test's own, to kill, pause and restart."""
    server = _started(tmp_path / "redis")
    yield server
    server.kill()


def _started(folder: Path) -> RedisServer:
    try:
        return RedisServer(folder).start()
    except ServerError as exc:
        pytest.fail(str(exc), pytrace=False)
