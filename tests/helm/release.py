"""The chart as `helm install` would install it, running on this machine against a real S3 server."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from kvstore.build import open_store
from kvstore.format.segment import Slot
from schemas.namespace import Namespace
from tests.helm.chart import pick, render
from tests.helm.kubelet import Pod
from tests.helm.running import Cluster, fetch, secret
from tests.servers.s3.servers import S3Server
from tests.waiting import PATIENCE_S

NAMESPACE = "inference"
#: The Secret that the administrator makes.
KEYS = "bucket-keys"


class Release:
    """`helm install NAME` with a bucket, its keys in a Secret, and what `values` say besides.

    A context manager; `start` makes the pods of its workloads.
    """

    def __init__(
        self,
        folder: Path,
        s3: S3Server,
        values: Mapping[str, Any] | None = None,
        *,
        name: str = "kvstore",
    ) -> None:
        self.name, self.cluster = name, Cluster(folder, (), namespace=NAMESPACE)
        try:
            self.bucket = s3.new_bucket()
            self.cluster.network.expose(s3.port)
            #: The bucket, as pods and this machine both reach it.
            self.endpoint = f"http://{self.cluster.network.gateway}:{s3.port}"
            self.keys = {"access-key-id": s3.access_key, "secret-access-key": s3.secret_key}
            self.manifests = self.render(values or {})
            self.cluster.add(*self.manifests, secret(KEYS, self.keys))
        except BaseException:
            self.cluster.close()
            raise

    def render(self, values: Mapping[str, Any], name: str | None = None) -> list[dict[str, Any]]:
        """The manifests with these values over those that say where the bucket is."""
        bucket = {
            "bucket": self.bucket.bucket,
            "prefix": self.bucket.prefix,
            "endpoint": self.endpoint,
            "region": self.bucket.region,
            "existingSecret": KEYS,
        }
        payloads = {"s3": bucket} | values.get("payloads", {})
        return render({**values, "payloads": payloads}, name=name or self.name, namespace=NAMESPACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.close()

    def start(self, timeout_s: float = PATIENCE_S) -> float:
        """Seconds until all of its pods were ready."""
        self.cluster.start()
        return self.cluster.until_ready(timeout_s)

    @property
    def redis(self) -> Pod:
        [pod] = self.cluster.of(f"{self.name}-redis")
        return pod

    @property
    def janitors(self) -> list[Pod]:
        return self.cluster.of(self.name)

    def metrics(self, pod: Pod) -> dict[str, float]:
        """Sample -> value, asked of one janitor."""
        status, text = fetch(f"http://{pod.address}:9464/metrics")
        assert status == 200, text
        samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def get(self, path: str) -> tuple[int, str]:
        """Through the janitors' Service."""
        return self.cluster.get(self.name, 9464, path)

    def password(self) -> str:
        """The one that the chart made for the store."""
        made = pick(self.manifests, "Secret", f"{self.name}-redis")
        return base64.b64decode(made["data"]["password"]).decode()

    def settings(self) -> dict[str, Any]:
        """What the chart gives to engines, for one on this machine, where Services have no names."""
        config = pick(self.manifests, "ConfigMap", self.name)
        tree: dict[str, Any] = yaml.safe_load(config["data"]["settings.yaml"])
        service = f"{self.name}-redis"
        name = f"{service}.{NAMESPACE}.svc"
        assert name in tree["index"], tree["index"]
        tree["index"] = tree["index"].replace(name, self.cluster.address(service))
        tree["redis"]["password"] = self.password()
        keys = {name.replace("-", "_"): value for name, value in self.keys.items()}
        return tree | {"s3": tree.get("s3", {}) | keys}

    def save(self, namespace: Namespace, slots: list[Slot], *, depth: int = 0) -> None:
        """Stores one segment, as an engine does."""
        with closing(open_store(self.settings())) as store:
            space = store.open(namespace, block_bytes=4096)
            space.save(slots, depth=depth, chain=bytes(16), created_s=int(time.time()))
