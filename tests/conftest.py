"""Fixtures and rules for every test.

A test that takes a server gets the marker `servers` by itself, so the quick tier cannot start one by
oversight. Whatever a test asks for and cannot have is a failure, never a silent skip. Exceptions, which the
end of the run says again: a GPU, and where they cannot be installed a real S3 server, a browser and what pods
run with.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvstore.index.redis.client import RedisClient
from kvstore.store.writers.known import KnownWriters
from schemas.settings import RedisSettings
from tests.believing import nobody
from tests.helm import running
from tests.servers.browser import Browser, BrowserError, find_browser
from tests.servers.redis import RedisServer, ServerError, patient
from tests.servers.s3.aws import Aws
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.ceph import CephServer, can_install
from tests.servers.s3.proxy import S3Proxy
from tests.servers.s3.servers import MotoServer, S3Server

_S3_FIXTURES = {"aws", "s3_server", "s3_bucket", "s3_proxy", "private_s3"}
_SERVER_FIXTURES = {"redis_server", "redis_url", "private_redis", "browser", "pods"}
_SERVER_FIXTURES |= _S3_FIXTURES
#: What the end of the run says once more, and how a test's report says that it belongs there.
_GPU, _IMITATION, _BROWSER, _PODS = "needs a GPU", "imitation", "needs a browser", "needs pods"
_SUMMARY = {
    _GPU: "NOT TESTED: no CUDA device",
    _BROWSER: "NOT TESTED: Chromium is not here and cannot be installed",
    _PODS: "NOT TESTED: pods run as root only, with bubblewrap, iproute2 and util-linux",
    _IMITATION: "TESTED AGAINST AN IMITATION: Ceph is not here and cannot be installed",
}

#: Beginnings of the ids of tests that are `slow`, too. What a conformance suite asks of thousands takes
#: an imitation of a server seconds, and a real one is asked as well; Helm renders a chart in tenths of a
#: second, a thousand times.
_SLOW = (
    "tests/helm/",
    "tests/payloads/s3/test_store.py::TestMoto::test_delete_of_a_large_batch",
    "tests/payloads/s3/test_store.py::TestMoto::test_threads_put_read",
)

#: Where the tests start engines.
_ENGINES = Path(__file__).parent / "e2e"

# How long an example takes says how busy the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def segments_of_any_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test saves may have waited for as long as it says, so that a segment is as old as it is to be.
    tests/store/test_clocks.py has the bound again."""
    monkeypatch.setattr("kvstore.store.saving.MOST_WAITED_S", 1e12)


@pytest.fixture(autouse=True)
def writers_are_believed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first hit is a hit: see tests.believing."""
    if request.node.get_closest_marker("proves") is None:
        monkeypatch.setattr(KnownWriters, "unproven", nobody)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _SERVER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)
        if item.nodeid.startswith(_SLOW):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> None:
    """Orders files for processes that take one after the other: what is left for the end is short.

    First the files with engines, which are few tests and minutes, then those with servers, then by number.
    """
    counts = Counter(item.path for item in items)
    kinds = dict.fromkeys(counts, 2)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        starts = "engine" in marks and (_ENGINES in item.path.parents or item.path.stem == "test_next_vllm")
        kinds[item.path] = min(kinds[item.path], 0 if starts else 1 if marks & {"servers", "slow"} else 2)
    items.sort(key=lambda item: (kinds[item.path], -counts[item.path], item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_gpu():
        item.user_properties.append((_GPU, True))
        pytest.skip("no CUDA device")
    fixtures = set(getattr(item, "fixturenames", ()))
    if "browser" in fixtures and find_browser() is None and not can_install():
        item.user_properties.append((_BROWSER, True))
        pytest.skip("no Chromium")
    reason = running.missing() if "pods" in fixtures else None
    if reason and (running.forbidden() or not can_install()):
        item.user_properties.append((_PODS, True))
        pytest.skip(reason)
    if _S3_FIXTURES & fixtures and not _has_real_s3():
        item.user_properties.append((_IMITATION, True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # By way of the reports, which also come from other processes.
    reports = [one for kind in terminalreporter.stats.values() for one in kind if hasattr(one, "nodeid")]
    for mark, title in _SUMMARY.items():
        names = sorted(
            {one.nodeid for one in reports if (mark, True) in map(tuple, getattr(one, "user_properties", ()))}
        )
        if names:
            terminalreporter.section(title, red=True)
            for name in names:
                terminalreporter.line(name)


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _has_real_s3() -> bool:
    """True as well where there should be one: its absence is then a failure."""
    return not CephServer.missing() or can_install()


@pytest.fixture(scope="session")
def _session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = _started(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(_session_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """A real redis-server, empty, shared with the tests before and after: leave it running.

    What this process asks of it may take as long as on a busy machine, where settings don't say otherwise.
    """
    _session_redis.flush()
    opened = RedisClient.from_settings

    def patiently(url: str, settings: RedisSettings, **more: Any) -> RedisClient:
        return opened(url, patient(**settings.model_dump(include=settings.model_fields_set)), **more)

    monkeypatch.setattr(RedisClient, "from_settings", patiently)
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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Ceph's S3 gateway, shared with the tests before and after: leave it running, in buckets of your own.

    Where it can neither be found nor installed, moto's imitation, of `kind` "moto".
    """
    yield from _started_s3()


@pytest.fixture
def private_s3() -> Iterator[S3Server]:
    """As `s3_server`, but the test's own, to kill, pause and restart."""
    yield from _started_s3()


@pytest.fixture
def s3_bucket(request: pytest.FixtureRequest) -> S3Bucket:
    """A fresh bucket of a real S3 server."""
    # The collection sees the fixtures in a test's signature, not those it asks for by name.
    if request.node.get_closest_marker("servers") is None:
        pytest.fail("mark this test `servers`: it asks for s3_bucket by name", pytrace=False)
    server: S3Server = request.getfixturevalue("s3_server")
    return server.new_bucket()


@pytest.fixture
def s3_proxy(s3_bucket: S3Bucket, s3_server: S3Server) -> Iterator[tuple[S3Bucket, S3Proxy]]:
    """A fresh bucket of a real S3 server whose URL goes through a proxy of the test's own."""
    with S3Proxy(s3_server.endpoint) as proxy:
        yield replace(s3_bucket, endpoint=proxy.endpoint), proxy


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real headless Chromium with one window, shared with the tests before and after: set its size and its
    colours."""
    window = Browser(tmp_path_factory.mktemp("browser"))
    try:
        window.start()
    except BrowserError as exc:
        pytest.fail(str(exc), pytrace=False)
    yield window
    window.close()


@pytest.fixture(scope="session")
def pods() -> None:
    """For tests that run the chart's pods as processes of this machine (tests/helm/running.py)."""
    if reason := running.missing():
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="session")
def _session_moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture
def moto_server(_session_moto: MotoServer) -> MotoServer:
    """moto's imitation of S3, empty, for the quick tier: leave it running."""
    _session_moto.reset()
    return _session_moto


@pytest.fixture
def moto_bucket(moto_server: MotoServer) -> S3Bucket:
    """As `s3_bucket`, in the quick tier: no signatures, no permissions."""
    return moto_server.new_bucket()


@pytest.fixture
def moto_proxy(moto_bucket: S3Bucket, moto_server: MotoServer) -> Iterator[tuple[S3Bucket, S3Proxy]]:
    """As `s3_proxy`, in the quick tier."""
    with S3Proxy(moto_server.endpoint) as proxy:
        yield replace(moto_bucket, endpoint=proxy.endpoint), proxy


@pytest.fixture
def aws(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """A server that takes itself for AWS, over a real S3 server. This process has its network, no key yet."""
    yield from _aws(s3_server, tmp_path, monkeypatch)


@pytest.fixture
def moto_aws(moto_server: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """As `aws`, in the quick tier."""
    yield from _aws(moto_server, tmp_path, monkeypatch)


def _aws(server: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    with Aws(server, folder / "aws") as aws:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in aws.environ.items():
            monkeypatch.setenv(name, value)
        yield aws


def _started(folder: Path) -> RedisServer:
    try:
        return RedisServer(folder).start()
    except ServerError as exc:
        pytest.fail(str(exc), pytrace=False)


def _started_s3() -> Iterator[S3Server]:
    try:
        server: S3Server = CephServer() if _has_real_s3() else MotoServer()
        server.start()
    except ServerError as exc:
        pytest.fail(str(exc), pytrace=False)
    yield server
    server.close()
