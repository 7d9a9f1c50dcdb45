"""The index over TLS, to a server that asks its clients for certificates."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError, TransientError
from kvstore.index.redis.index import RedisIndex
from schemas.settings import RedisSettings
from tests.index.contract.chains import chain, namespace, put, served
from tests.index.redis.scripted_sentinel import MASTER, ScriptedSentinel
from tests.servers.papers import Papers, openssl
from tests.servers.redis import RedisServer, ServerError, _free_port, patient
from tests.waiting import until

pytestmark = pytest.mark.servers


class RedisPapers(Papers):
    """A server's certificate, a client's, and the client's key behind a password."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server()
        self.client()
        openssl("ec", "-in", self["client.key"], "-aes256", "-passout", "pass:x", "-out", self["locked.key"])

    @property
    def trusting(self) -> RedisSettings:
        """Knows the authority, and has nothing to show."""
        return patient(tls_ca=self["ca.crt"])

    @property
    def known(self) -> RedisSettings:
        """Shows its certificate."""
        return patient(tls_ca=self["ca.crt"], tls_cert=self["client.crt"], tls_key=self["client.key"])


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> RedisPapers:
    return RedisPapers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def port(papers: RedisPapers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where a server speaks TLS with those whose certificate it can verify."""
    number = _free_port()
    options = ["--tls-port", str(number), "--tls-auth-clients", "yes", "--tls-ca-cert-file", papers["ca.crt"]]
    options += ["--tls-cert-file", papers["server.crt"], "--tls-key-file", papers["server.key"]]
    server = RedisServer(tmp_path_factory.mktemp("tls"), *options)
    try:
        server.start()
    except ServerError as exc:
        if "tls-port" in str(exc) or "TLS support" in str(exc):
            pytest.skip("the redis-server here is built without TLS")
        raise
    yield number
    server.kill()


def test_a_client_certificate_is_shown(papers: RedisPapers, port: int) -> None:
    with RedisIndex.from_settings(f"rediss://127.0.0.1:{port}/0", papers.known) as index:
        name = index.register(namespace(), expected_blocks=10)
        put(index, name, chain(3))
        assert served(index.match(name, chain(3))) == 3
    with RedisIndex.from_settings(f"rediss://127.0.0.1:{port}/0", papers.trusting) as index:
        with pytest.raises(TransientError):
            index.ping()


def test_every_connection_is_good_at_once(papers: RedisPapers, port: int) -> None:
    """Session tickets arrive on it before anything has been asked."""
    with RedisIndex.from_settings(f"rediss://127.0.0.1:{port}/0", papers.known) as index:
        for _ in range(40):
            index.ping()
            index._client._first.connection_pool.disconnect()


def test_every_connection_to_a_cluster_is_good_at_once(
    papers: RedisPapers, port: int, tmp_path: Path
) -> None:
    """Without a password nothing else is read from it before the first command."""
    number, bus = _free_port(), _free_port()
    options = ["--tls-port", str(number), "--tls-auth-clients", "no", "--tls-cluster", "yes"]
    options += ["--tls-ca-cert-file", papers["ca.crt"], "--tls-cert-file", papers["server.crt"]]
    options += [
        "--tls-key-file",
        papers["server.key"],
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        str(bus),
    ]
    with RedisServer(tmp_path / "node", *options) as node:
        assert node.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK"
        until(lambda: b"cluster_state:ok" in node.command("CLUSTER", "INFO"))
        url = f"rediss://127.0.0.1:{number},localhost:{number}/0"
        careless = papers.trusting.model_copy(update={"tls_verify": False})
        with RedisIndex.from_settings(url, careless) as index:
            for _ in range(40):
                index.ping()
                client: Any = index._client._current
                for each in client.get_nodes():
                    each.redis_connection.connection_pool.disconnect()


def test_a_server_is_verified(papers: RedisPapers, port: int) -> None:
    stranger = papers.known.model_copy(update={"tls_ca": None})
    for url, settings, words in [
        (f"rediss://127.0.0.1:{port}/0", stranger, "certificate verify failed"),
        (f"rediss://localhost:{port}/0", papers.known, "Hostname mismatch"),
    ]:
        with RedisIndex.from_settings(url, settings) as index, pytest.raises(TransientError, match=words):
            index.ping()
    careless = stranger.model_copy(update={"tls_verify": False})
    with RedisIndex.from_settings(f"rediss://localhost:{port}/0", careless) as index:
        index.ping()


@pytest.mark.parametrize("both", [True, False])
def test_sentinels_and_master_over_tls(papers: RedisPapers, port: int, both: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(papers["server.crt"], papers["server.key"])
    context.load_verify_locations(papers["ca.crt"])
    context.verify_mode = ssl.CERT_REQUIRED
    with ScriptedSentinel(port, context=context if both else None) as sentinel:
        url = f"rediss+sentinel://127.0.0.1:{sentinel.port}/{MASTER}/0"
        with RedisIndex.from_settings(url, papers.known) as index:
            if both:
                index.ping()
                assert index.register(namespace(), expected_blocks=10)
            else:
                with pytest.raises(TransientError, match=f"127.0.0.1:{sentinel.port}"):
                    index.ping()


BAD_PAPERS = [
    ({"tls_cert": "none.crt", "tls_key": "client.key"}, "redis.tls_cert = .*no such file"),
    ({"tls_cert": "client.crt", "tls_key": "none.key"}, "redis.tls_key = .*no such file"),
    ({"tls_cert": "client.crt", "tls_key": "server.key"}, "not a certificate and its key"),
    ({"tls_cert": "client.crt", "tls_key": "locked.key"}, "not encrypted"),
    ({"tls_cert": "client.key", "tls_key": "client.key"}, "not a certificate and its key"),
    ({"tls_ca": "client.key"}, "redis.tls_ca = .*no certificate"),
]


@pytest.mark.parametrize(("files", "words"), BAD_PAPERS)
@pytest.mark.parametrize("url", ["rediss://h/0", "rediss://a,b/0", "rediss+sentinel://h/m/0"])
def test_papers_that_are_no_use_are_refused_at_once(
    papers: RedisPapers, files: dict[str, str], words: str, url: str
) -> None:
    settings = RedisSettings.model_validate({name: papers[file] for name, file in files.items()})
    with pytest.raises(ConfigError, match=words):
        RedisIndex.from_settings(url, settings)
