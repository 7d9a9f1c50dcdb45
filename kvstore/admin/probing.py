"""What a running `cache-admin serve` answers when it is asked whether it is ready: for health checks. Changes
nothing."""

from __future__ import annotations

import http.client
import threading

from schemas.serving import ProbeReport
from schemas.urls import place

#: It answers from memory, so it is not well if it takes longer.
_TIMEOUT_S = 4.0
_MOST = 4096
#: Whoever listens everywhere listens here too.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def probe(host: str, port: int) -> ProbeReport:
    """Ask what listens at `host`:`port` for /readyz, for a few seconds at most."""
    host = _HERE.get(host, host)
    url = f"http://{place(host, port)}/readyz"
    told: list[ProbeReport] = []
    # A socket's timeout begins anew with every byte, and looking up a name has none.
    asking = threading.Thread(target=lambda: told.append(_ask(host, port, url)), daemon=True)
    asking.start()
    asking.join(_TIMEOUT_S)
    return told[0] if told else ProbeReport(url=url, ready=False, found="no answer: timed out")


def _ask(host: str, port: int, url: str) -> ProbeReport:
    # Neither through a proxy of the environment nor to where a redirection leads.
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
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
