"""Asks a running `cache-admin serve` whether it is ready, for health checks. Changes nothing."""

from __future__ import annotations

import http.client
import ssl
import threading

from kvstore.admin.serve.reports import ProbeReport
from schemas.urls import place

#: The server answers from memory, so one that takes longer than this, in seconds, is not ready.
_TIMEOUT_S = 4.0
_MOST = 4096
#: A server that listens on all addresses listens on this one, too.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def probe(host: str, port: int, *, tls: bool = False) -> ProbeReport:
    """Asks the server at `host`:`port` for /readyz, and waits for a few seconds at most.

    Its certificate is not checked: nothing is told to it, and its name is not that of an address here.
    """
    host = _HERE.get(host, host)
    url = f"{'https' if tls else 'http'}://{place(host, port)}/readyz"
    told: list[ProbeReport] = []
    # A socket's timeout begins anew with every byte, and the lookup of a name has none: so a thread is
    # awaited.
    asking = threading.Thread(
        target=lambda: told.append(_ask(_connection(host, port, tls=tls), url)), daemon=True
    )
    asking.start()
    asking.join(_TIMEOUT_S)
    return told[0] if told else ProbeReport(url=url, ready=False, found="no answer: timed out")


def _connection(host: str, port: int, *, tls: bool) -> http.client.HTTPConnection:
    # http.client uses no proxy of the environment, and follows no redirection.
    if not tls:
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)


def _ask(connection: http.client.HTTPConnection, url: str) -> ProbeReport:
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        text = answer.read(_MOST).decode("utf-8", "replace").strip()
    except http.client.HTTPException:
        return ProbeReport(url=url, ready=False, found="no answer: what listens there does not speak HTTP")
    except (OSError, ValueError) as exc:
        return ProbeReport(url=url, ready=False, found=f"no answer: {exc}")
    finally:
        connection.close()
    return ProbeReport(url=url, ready=answer.status == 200, found=text or f"{answer.status} {answer.reason}")
