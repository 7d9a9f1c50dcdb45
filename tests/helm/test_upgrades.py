"""What upgrades keep, with helm asking a server what is there: `helm template` never does."""

from __future__ import annotations

import base64
from pathlib import Path

from tests.helm.api_server import ApiServer
from tests.helm.chart import CHART

NAME = "cache-kvstore-redis"
BUCKET = ["--set", "payloads.s3.bucket=my-bucket"]
TLS = ["--set", "redis.builtIn.tls.enabled=true,redis.builtIn.tls.selfSigned=true"]


def data(server: ApiServer, name: str = NAME) -> dict[str, str]:
    found = server.get("Secret", name)
    assert found is not None
    return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def test_passwords_and_certificates_outlive_upgrades(tmp_path: Path) -> None:
    with ApiServer(tmp_path) as server:
        server.helm("install", "cache", str(CHART), *BUCKET, *TLS)
        # As docs/vllm-on-kubernetes.md asks for them.
        assert "# metadata.labels" in server.helm("get", "notes", "cache")
        first, certificate = data(server), data(server, f"{NAME}-tls")
        assert set(first) == {"password"} and len(first["password"]) == 40
        reader = ["--set", "capacity=1TiB,redis.builtIn.auth.reader.enabled=true"]
        server.helm("upgrade", "cache", str(CHART), *BUCKET, *TLS, *reader)
        second = data(server)
        assert second["password"] == first["password"] and len(second["reader-password"]) == 40
        assert data(server, f"{NAME}-tls") == certificate
        # Changed by hand, as values.yaml tells.
        mine = {"password": "new: #1", "previous-password": first["password"]}
        patch = {key: base64.b64encode(text.encode()).decode() for key, text in mine.items()}
        server.patch("Secret", NAME, {"data": patch})
        server.helm("upgrade", "cache", str(CHART), *BUCKET, *TLS, *reader)
        assert data(server) == {**second, **mine}
        # What docs/upgrading.md warns of: what is recorded comes back, the Secret with it.
        server.helm("rollback", "cache", "1")
        assert data(server) == first


def test_what_is_left_of_an_uninstalled_release(tmp_path: Path) -> None:
    claim = ["--set", "payloads.type=pvc"]
    with ApiServer(tmp_path) as server:
        server.helm("install", "cache", str(CHART), *claim)
        server.helm("uninstall", "cache")
        left = [(one["kind"], one["metadata"]["name"]) for one in server]
        assert left == [("PersistentVolumeClaim", "cache-kvstore-payloads")]
        # And it is taken over by the next one of that name.
        server.helm("install", "cache", str(CHART), *claim)
