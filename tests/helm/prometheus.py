"""A real Prometheus on loopback, configured by what the chart renders, and what it is asked over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml

from tests.servers.redis import end_process, spawn_tied
from tests.waiting import PATIENCE_S

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
START_TIMEOUT_S = PATIENCE_S


def binary(name: str) -> str:
    """`prometheus` or `promtool` from PATH; a test without it is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: the Debian package prometheus has it")
    return found


def job(
    name: str,
    targets: Sequence[str],
    endpoint: Mapping[str, Any],
    labels: Mapping[str, str],
    *,
    interval: str = "1s",
    honor_labels: bool = False,
) -> dict[str, Any]:
    """A scrape configuration, as the Prometheus Operator makes one of a monitor's `endpoint`: what it finds
    in the cluster stands in `labels`. The interval is the test's."""
    return {
        "job_name": name,
        "metrics_path": endpoint["path"],
        "scrape_interval": interval,
        "scrape_timeout": interval,
        "honor_labels": honor_labels,
        "static_configs": [{"targets": [target], "labels": dict(labels)} for target in targets],
        "relabel_configs": _relabelings(endpoint, "relabelings"),
        "metric_relabel_configs": _relabelings(endpoint, "metricRelabelings"),
    }


def _relabelings(endpoint: Mapping[str, Any], which: str) -> list[dict[str, Any]]:
    """The same in Prometheus' own spelling."""
    return [
        {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): value for key, value in one.items()}
        for one in endpoint.get(which, ())
    ]


@dataclass(frozen=True)
class Sample:
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """Scrapes `jobs`, evaluates `rules` (a file's content) every second."""

    def __init__(self, folder: Path, jobs: Sequence[Mapping[str, Any]], rules: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True)
        (folder / "rules.yml").write_text(yaml.safe_dump(dict(rules)))
        config = {
            "global": {"evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": list(jobs),
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] = spawn_tied(
            [
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            self._log,
        )

    def __enter__(self) -> Self:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                self._get("/-/ready")
            except (OSError, urllib.error.URLError):
                time.sleep(0.05)
            else:
                return self
        end_process(self._process, signal.SIGKILL)
        raise AssertionError(f"Prometheus did not start:\n{self._log.read_text(errors='replace')}")

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_process(self._process, signal.SIGKILL)

    def query(self, expr: str) -> list[Sample]:
        """An instant vector, or a scalar as one without labels. Fails the test with Prometheus' words."""
        found = self.api("/api/v1/query", query=expr)
        if found["resultType"] == "scalar":
            return [Sample({}, float(found["result"][1]))]
        return [Sample(one["metric"], float(one["value"][1])) for one in found["result"]]

    def api(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            answer = json.loads(self._get(path + query))
        except urllib.error.HTTPError as exc:
            with exc:
                raise AssertionError(f"{parameters}: {exc.read().decode()}") from exc
        assert answer["status"] == "success", answer
        return answer["data"]

    def _get(self, path: str) -> str:
        with _OPENER.open(self.url + path, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())


# -- what an expression asks for -----------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on|without|group_left|group_right|ignoring)\s*\(([^)]*)\)")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def selectors(expr: str) -> set[str]:
    """Every selector of series in it. All of kvstore's have braces, so what has none is no metric."""
    return {f"{name}{{{matchers}}}" for name, matchers in _SELECTOR.findall(expr)}


def metrics(expr: str) -> set[str]:
    """The names of the metrics in it, however they are spelled."""
    bare = _STRING.sub("", expr)
    named = {name for name, _ in _SELECTOR.findall(expr)}
    # What looks like one and has no braces would not be selected by the release.
    loose = {word for word in _NAME.findall(bare) if word.startswith(("kvstore", "vllm:", "kube_"))}
    assert loose <= named, f"without matchers: {loose - named}"
    return named


def grouped(expr: str) -> set[str]:
    """The labels that it groups or joins by."""
    found = _GROUPING.findall(_STRING.sub("", expr))
    return {label.strip() for labels in found for label in labels.split(",") if label.strip()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
