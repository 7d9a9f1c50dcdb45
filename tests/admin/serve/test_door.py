"""`cache-admin serve` answers whom it should: TLS, certificates of clients, a password, files that change."""

from __future__ import annotations

import base64
import http.client
import shutil
import ssl
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.admin.serve import listener as listening
from kvstore.admin.serve.door import Door, Guests
from kvstore.admin.serve.listener import Listener, sentence
from kvstore.admin.serve.probe import probe
from kvstore.errors import ConfigError
from tests.admin.serve.process import ServeProcess
from tests.helm.prometheus import Prometheus, binary
from tests.servers.papers import Papers, openssl
from tests.waiting import PATIENCE_S, until

PASSWORD = "correct horse battery staple"
ROUTES = {"/": lambda _: sentence("the page")}
PROBES = {
    "/healthz": lambda _: sentence("all of s3://the-bucket is well"),
    "/readyz": lambda _: sentence("no answer from s3://the-bucket", 503),
}


@pytest.fixture(autouse=True)
def _a_busy_machine_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_S", PATIENCE_S)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    papers = Papers(tmp_path_factory.mktemp("papers"))
    papers.server()
    papers.client()
    return papers


def tls_folder(papers: Papers, folder: Path, name: str = "server") -> Path:
    """As a Secret is mounted: renewed by one rename for both files."""
    version = folder / f"..{name}"
    version.mkdir(parents=True)
    for end in ("crt", "key"):
        shutil.copy(papers[f"{name}.{end}"], version / f"tls.{end}")
        link = folder / f"tls.{end}"
        if not link.is_symlink():
            link.symlink_to(f"..data/tls.{end}")
    fresh = folder / "..fresh"
    fresh.symlink_to(version.name)
    fresh.replace(folder / "..data")
    return folder


def password_file(folder: Path, password: str = PASSWORD) -> Path:
    file = folder / "password"
    file.write_text(f"{password}\n")
    return file


def serve(access: Guests) -> closing[Listener]:
    return closing(Listener("127.0.0.1", 0, ROUTES, PROBES, access))


def trusting(papers: Papers, *, client: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=papers["ca.crt"])
    if client:
        context.load_cert_chain(papers[f"{client}.crt"], papers[f"{client}.key"])
    return context


def get(
    server: Listener, path: str = "/", context: ssl.SSLContext | None = None, authorization: str = ""
) -> tuple[int, str]:
    """Status and body."""
    host, port = server.address
    connection = (
        http.client.HTTPSConnection(host, port, context=context, timeout=PATIENCE_S)
        if context
        else http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    )
    with closing(connection):
        connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def basic(password: str, user: str = "prometheus") -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def test_the_password_opens_all_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "WRONG_S", 0.01)
    with serve(Guests(password=password_file(tmp_path))) as server:
        for right in (basic(PASSWORD), basic(PASSWORD, ""), f"Bearer {PASSWORD}", f"bearer {PASSWORD}"):
            assert get(server, authorization=right) == (200, "the page\n")
        wrong = [basic(guess) for guess in ("", PASSWORD[:-1], f"{PASSWORD}x", f"x:{PASSWORD}")]
        wrong += ["Basic", "Bearer", "Basic ====", "Basic \xe9", f"Digest {PASSWORD}", PASSWORD]
        wrong.append(f"Bearer {'x' * 8000}")
        for header in wrong:
            status, body = get(server, authorization=header)
            assert status == 401, header
            assert "page" not in body
        assert get(server, "/nothing")[0] == 401
        with closing(http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)) as browser:
            browser.request("GET", "/")
            asks = browser.getresponse()
        assert (asks.status, asks.headers["WWW-Authenticate"]) == (
            401,
            'Basic realm="kvstore", charset="UTF-8"',
        )
        assert server.door.refused() == {"host": 0, "anonymous": 2, "password": len(wrong), "crowded": 0}


def test_guesses_wait_and_what_guesses_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "WRONG_S", PATIENCE_S)
    with serve(Guests(password=password_file(tmp_path))) as server:
        connections = []
        for number in range(listening.CONNECTIONS + 4):
            connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
            connection.request("GET", "/", headers={"Authorization": basic(f"a guess {number}")})
            connections.append(connection)
        # None has an answer, the first have made room, and who knows the password comes in.
        until(lambda: server.door.refused()["password"] >= listening.CONNECTIONS)
        until(lambda: server.door.refused()["crowded"] >= 4)
        assert get(server, authorization=basic(PASSWORD))[0] == 200
        assert get(server, "/healthz")[0] == 200
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("how", ["password", "certificate"])
def test_probes_are_answered_to_everybody_and_tell_nothing(papers: Papers, tmp_path: Path, how: str) -> None:
    access = Guests(
        tls=tls_folder(papers, tmp_path / "tls"),
        client_ca=Path(papers["ca.crt"]) if how == "certificate" else None,
        password=password_file(tmp_path) if how == "password" else None,
    )
    with serve(access) as server:
        context = trusting(papers)
        assert get(server, "/healthz", context) == (200, "ok\n")
        assert get(server, "/readyz", context) == (503, "not ok\n")
        assert get(server, "/", context)[0] == 401
        # Not an oracle that guesses could be tried on without waiting.
        assert get(server, "/readyz", context, basic(PASSWORD)) == (503, "not ok\n")
        told = probe(*server.address, tls=True)
        assert (told.ready, told.found, told.url[:8]) == (False, "not ok", "https://")


def test_a_certificate_of_the_authority_opens_all_and_one_of_another_nothing(
    papers: Papers, tmp_path: Path
) -> None:
    others = Papers(tmp_path / "others")
    others.client()
    access = Guests(tls=tls_folder(papers, tmp_path / "tls"), client_ca=Path(papers["ca.crt"]))
    with serve(access) as server:
        assert server.url.startswith("https://")
        assert get(server, "/", trusting(papers, client="client")) == (200, "the page\n")
        assert get(server, "/", trusting(papers))[0] == 401
        stranger = trusting(papers)
        stranger.load_cert_chain(others["client.crt"], others["client.key"])
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            get(server, "/", stranger)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(server)  # without TLS
        # Without a password it can be neither guessed nor asked for.
        assert get(server, "/", trusting(papers), basic(PASSWORD))[0] == 401


def test_of_a_certificate_and_a_password_either_is_enough(papers: Papers, tmp_path: Path) -> None:
    access = Guests(
        tls=tls_folder(papers, tmp_path / "tls"),
        client_ca=Path(papers["ca.crt"]),
        password=password_file(tmp_path),
    )
    with serve(access) as server:
        assert get(server, "/", trusting(papers, client="client"))[0] == 200
        assert get(server, "/", trusting(papers), basic(PASSWORD))[0] == 200
        assert get(server, "/", trusting(papers))[0] == 401


def shown(server: Listener, papers: Papers) -> str:
    """The certificate that it shows."""
    return ssl.get_server_certificate(server.address, ca_certs=papers["ca.crt"], timeout=PATIENCE_S)


def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(
    papers: Papers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    papers.server("renewed")
    folder = tls_folder(papers, tmp_path / "tls")
    with serve(Guests(tls=folder)) as server:
        assert shown(server, papers) == Path(papers["server.crt"]).read_text()
        tls_folder(papers, folder, "renewed")
        assert shown(server, papers) == Path(papers["renewed.crt"]).read_text()
        # A certificate whose key is still the other one's, half a file, and none.
        for broken in (Path(papers["server.crt"]).read_text(), "-----BEGIN CERTIFICATE-----\nMII", ""):
            (folder / "..data" / "tls.crt").write_text(broken)
            assert shown(server, papers) == Path(papers["renewed.crt"]).read_text()
        assert "what was there before holds" in caplog.text
        shutil.copy(papers["renewed.crt"], folder / "..data" / "tls.crt")
        assert shown(server, papers) == Path(papers["renewed.crt"]).read_text()


def test_an_authority_that_was_replaced_lets_nobody_in_any_more(papers: Papers, tmp_path: Path) -> None:
    others = Papers(tmp_path / "others")
    others.client()
    authority = tmp_path / "ca.crt"
    shutil.copy(papers["ca.crt"], authority)
    with serve(Guests(tls=tls_folder(papers, tmp_path / "tls"), client_ca=authority)) as server:
        assert get(server, "/", trusting(papers, client="client"))[0] == 200
        shutil.copy(others["ca.crt"], authority)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            get(server, "/", trusting(papers, client="client"))
        new = trusting(papers)
        new.load_cert_chain(others["client.crt"], others["client.key"])
        assert get(server, "/", new)[0] == 200


def test_a_changed_password_takes_the_old_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "WRONG_S", 0.01)
    file = password_file(tmp_path)
    with serve(Guests(password=file)) as server:
        assert get(server, authorization=basic(PASSWORD))[0] == 200
        password_file(tmp_path, "another long password")
        assert get(server, authorization=basic(PASSWORD))[0] == 401
        assert get(server, authorization=basic("another long password"))[0] == 200
        file.unlink()
        assert get(server, authorization=basic("another long password"))[0] == 200
        assert get(server)[0] == 401


def test_who_never_ends_a_handshake_keeps_nobody_waiting(papers: Papers, tmp_path: Path) -> None:
    with serve(Guests(tls=tls_folder(papers, tmp_path / "tls"))) as server:
        idle = []
        for number in range(listening.CONNECTIONS + 8):
            connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
            connection.connect()
            if number % 2:
                connection.sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            idle.append(connection)
        assert get(server, "/healthz", trusting(papers))[0] == 200
        until(lambda: server.door.refused()["crowded"] >= 8)
        for connection in idle:
            connection.close()


def locked(papers: Papers, folder: Path) -> Guests:
    made = tls_folder(papers, folder / "tls")
    words = ("-aes256", "-passout", "pass:x", "-out", str(made / "tls.key"))
    openssl("ec", "-in", papers["server.key"], *words)
    return Guests(tls=made)


REFUSED: dict[str, tuple[Callable[[Papers, Path], Guests], str]] = {
    "no folder": (lambda _, folder: Guests(tls=folder / "none"), "none/tls.crt.*No such file"),
    "locked key": (locked, "encrypted"),
    "no authority": (
        lambda papers, folder: Guests(
            tls=tls_folder(papers, folder / "tls"), client_ca=password_file(folder)
        ),
        "in PEM",
    ),
    "authority alone": (lambda papers, _: Guests(client_ca=Path(papers["ca.crt"])), "needs --tls"),
    "short password": (
        lambda _, folder: Guests(password=password_file(folder, "short")),
        "from 12 to 1024",
    ),
    "empty password": (lambda _, folder: Guests(password=password_file(folder, "")), "from 12 to 1024"),
    "two lines": (
        lambda _, folder: Guests(password=password_file(folder, "one line\nand two")),
        "one line",
    ),
    "a folder": (lambda _, folder: Guests(password=folder), "directory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_said_when_it_begins(papers: Papers, tmp_path: Path, case: str) -> None:
    make, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why) as told:
        Door(make(papers, tmp_path))
    assert "and two" not in str(told.value)


@pytest.mark.slow
def test_prometheus_scrapes_it_with_the_password_over_tls(papers: Papers, tmp_path: Path) -> None:
    """The whole process, and a real Prometheus with what the chart's monitor would tell it."""
    binary("prometheus")
    options = ["--payloads", f"file://{tmp_path}/cache", "--tls", str(tls_folder(papers, tmp_path / "tls"))]
    options += ["--password-file", str(password_file(tmp_path))]
    with ServeProcess(tmp_path / "serve", options) as process:
        target = process.url.removeprefix("https://").rstrip("/")
        scrape = {
            "job_name": "kvstore",
            "scheme": "https",
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "tls_config": {"ca_file": papers["ca.crt"]},
            "authorization": {"type": "Bearer", "credentials_file": str(tmp_path / "password")},
            "static_configs": [{"targets": [target]}],
        }
        with Prometheus(tmp_path / "prometheus", [scrape], {}) as prometheus:
            until(lambda: prometheus.query("kvstore_info{job='kvstore'}"))
        assert PASSWORD not in process.log()
