"""`helm test`: asks a janitor's Service for readiness and metrics, for two minutes at most. Argument: URL."""

import ssl
import sys
import time
import urllib.error
import urllib.request

#: Is 1 in /metrics of a janitor that has seen its index.
METRIC = 'kvstore_up{backend="index"}'
#: The Service is in this namespace: a proxy, which extraEnv may name for the bucket, knows nothing of it.
#: Its certificate is for Prometheus to check: nothing is told to it here, no password either.
TRUST = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TRUST.check_hostname, TRUST.verify_mode = False, ssl.CERT_NONE
OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=TRUST)
)


def get(url):
    """Status and text."""
    try:
        with OPENER.open(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()
    except OSError as exc:
        return 0, str(exc)


def wrong(url):
    """What is wrong, or nothing."""
    status, text = get(url + "/readyz")
    if status != 200:
        return f"/readyz: {status or 'no answer'}: {text.strip()}"
    status, text = get(url + "/metrics")
    if status == 401:
        return ""  # there is a password, or certificates are asked for: as it should be
    if status != 200:
        return f"/metrics: {status or 'no answer'}: {text.strip()[:200]}"
    up = [line.split()[-1] for line in text.splitlines() if line.startswith(METRIC)]
    return "" if up and float(up[0]) == 1 else f"/metrics: {METRIC} is not 1"


def main(url, until):
    while problem := wrong(url):
        print(problem, flush=True)
        if time.monotonic() > until:
            return f"{url} is not what it should be: {problem}"
        time.sleep(2)
    print(f"{url} is ready, and shows its metrics to those who may see them")
    return None


sys.exit(main(sys.argv[1].rstrip("/"), time.monotonic() + 120))
