"""The chart's Redis as rendered, running, and what the chart gives to those who use it."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Self

import redis
import yaml
from pydantic import SecretStr

from kvstore.index.redis.index import RedisIndex
from schemas.settings import JournalSettings, RedisSettings, Settings
from tests.helm.chart import Manifest, pick, render
from tests.helm.kubelet import Pod
from tests.helm.running import Cluster
from tests.waiting import PATIENCE_S

NAME = "cache-kvstore-redis"
_TESTER = "tester"


class RedisRelease:
    """A release's Redis pod, started on entry. Its passwords can be changed, as with kubectl.

    Tests arrange and look with a user of theirs, which is added to the ConfigMap's; all else is as rendered.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any], namespace: str = "inference") -> None:
        """Two at a time have different namespaces: their hosts' names are the process's."""
        self.host = f"{NAME}.{namespace}.svc"
        values = {"payloads": {"s3": {"bucket": "my-bucket"}}} | dict(values)
        self.manifests = render(values, namespace=namespace)
        users = pick(self.manifests, "ConfigMap", NAME)
        text = f"{users['data']['users']}\nuser {_TESTER} on nopass ~* &* +@all\n"
        theirs = {**users, "data": {**users["data"], "users": text}}
        self._folder = folder
        self.cluster = Cluster(
            folder / "cluster",
            [theirs if one is users else one for one in self.manifests],
            namespace=namespace,
        )
        self._secrets: dict[str, Manifest] = {
            one["metadata"]["name"]: one for one in self.manifests if one["kind"] == "Secret"
        }
        self._asked = socket.getaddrinfo

    def __enter__(self) -> Self:
        try:
            self.cluster.start(NAME)
            self.pod.until_ready()
        except BaseException:
            self.cluster.close()
            raise
        socket.getaddrinfo = self._names
        return self

    def __exit__(self, *_: object) -> None:
        socket.getaddrinfo = self._asked
        self.cluster.close()

    def _names(self, host: Any, *args: Any, **kwargs: Any) -> Any:
        """The Service's name is found, as in the cluster."""
        return self._asked(self.pod.address if host == self.host else host, *args, **kwargs)

    @property
    def pod(self) -> Pod:
        [pod] = self.cluster.of(NAME)
        return pod

    def execute(self, *command: str) -> CompletedProcess[str]:
        """`kubectl exec`."""
        return self.pod.container.sandbox.execute(command, PATIENCE_S)

    def kill(self) -> None:
        """`kill -9`; returns once the kubelet has it running and ready again."""
        lives = self.pod.restarts
        self.pod.container.sandbox.signal(9)
        self.pod.wait(lambda pod: pod.restarts > lives and pod.ready)

    def secret(self, key: str, name: str = NAME) -> str:
        return base64.b64decode(self._secrets[name]["data"][key]).decode()

    def patch(self, values: Mapping[str, str | None], name: str = NAME) -> None:
        """`kubectl patch secret`, None takes a key away; returns once the pod has it."""
        data = dict(self._secrets[name]["data"])
        for key, value in values.items():
            data.pop(key, None)
            if value is not None:
                data[key] = base64.b64encode(value.encode()).decode()
        self._secrets[name] = {**self._secrets[name], "data": data}
        self.cluster.add(self._secrets[name])
        self.pod._volumes.make()

    def settings(self, **changes: Any) -> Settings:
        """What the chart gives to whatever opens the store, with files where they lie here."""
        config = pick(self.manifests, "ConfigMap", "cache-kvstore")
        tree = yaml.safe_load(config["data"]["settings.yaml"])
        if "tls_ca" in tree["redis"]:
            held = self._folder / "ca.crt"
            held.write_text(self.secret("ca.crt", f"{NAME}-tls"))
            tree["redis"]["tls_ca"] = str(held)
        tree["redis"]["password"] = self.secret("password")
        return Settings.model_validate(tree | changes)

    def settings_file(self, folder: Path, payloads: str) -> Path:
        """The same without the password, as the ConfigMap has it, with payloads of the test's."""
        tree = self.settings().model_dump(mode="json", exclude_unset=True)
        del tree["redis"]["password"]
        made = folder / "settings.yaml"
        made.write_text(yaml.safe_dump(tree | {"payloads": payloads}))
        return made

    def user(self, name: str, password: str) -> RedisSettings:
        """Settings of another user."""
        return self.settings().redis.model_copy(update={"username": name, "password": SecretStr(password)})

    def index(
        self,
        user: RedisSettings | None = None,
        *,
        journal: JournalSettings | None = None,
        cost_aware: bool = True,
        by: str = "",
    ) -> RedisIndex:
        """As the chart's pods open it, or as that user."""
        settings = self.settings()
        return RedisIndex.from_settings(
            settings.index_url,
            user or settings.redis,
            journal=journal or settings.journal,
            cost_aware=cost_aware,
            by=by,
        )

    @contextmanager
    def raw(self, user: RedisSettings | None = None) -> Iterator[redis.Redis]:
        """A client around the store: the tests' own user, or that one."""
        options: dict[str, Any] = {
            "host": self.host,
            "port": 6379,
            "protocol": 2,
            "socket_timeout": PATIENCE_S,
        }
        options |= {"username": _TESTER, "password": "any"}
        if user is not None and user.password is not None:
            options |= {"username": user.username, "password": user.password.get_secret_value()}
        if ca := self.settings().redis.tls_ca:
            options |= {"ssl": True, "ssl_ca_certs": ca}
        with redis.Redis(**options) as client:
            yield client

    def denied(self) -> list[str]:
        """What users were denied since the last time, as "USER COMMAND"."""
        with self.raw() as client:
            entries = client.execute_command("ACL", "LOG")  # type: ignore[no-untyped-call]
            client.execute_command("ACL", "LOG", "RESET")  # type: ignore[no-untyped-call]
        found = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in entries]
        return sorted(f"{one[b'username'].decode()} {one[b'object'].decode()}" for one in found)
