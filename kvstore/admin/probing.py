"""What a running `cache-admin serve` answers when it is asked whether it is ready: for health checks. Changes
nothing."""

from __future__ import annotations

import urllib.error
import urllib.request

from schemas.serving import ProbeReport
from schemas.urls import place

#: It answers from memory, so it is not well if it takes longer.
_TIMEOUT_S = 4.0
_MOST = 4096
#: Whoever listens everywhere listens here too.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
#: Not through a proxy of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def probe(host: str, port: int) -> ProbeReport:
    """Ask what listens at `host`:`port` for /readyz, for a few seconds at most."""
    url = f"http://{place(_HERE.get(host, host), port)}/readyz"
    try:
        with _OPENER.open(url, timeout=_TIMEOUT_S) as answer:
            return ProbeReport(url=url, ready=True, found=_text(answer.read(_MOST)))
    except urllib.error.HTTPError as exc:
        with exc:
            return ProbeReport(url=url, ready=False, found=_text(exc.read(_MOST)))
    except (OSError, ValueError) as exc:  # ValueError: what answers does not speak HTTP
        reason = getattr(exc, "reason", exc)
        return ProbeReport(url=url, ready=False, found=f"no answer: {reason}")


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace").strip()
