"""Metrics as text for Prometheus, and the server behind `--listen` of a command that runs until it is ended:
its metrics, and whether it still does something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.admin.serve.listener import HttpRequest, Listener, Response, sentence


class Exposition(Collector):
    """The text of `metrics`, and of those of the process: made once in `kept_s`, however many ask. Any thread
    may call it."""

    def __init__(
        self,
        metrics: Callable[[], Iterable[Metric]],
        *,
        kept_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._kept_s = kept_s
        self._monotonic = monotonic
        #: When the text was made last, and the text.
        self._written = (float("-inf"), Response(b"", ""))
        self._lock = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def __call__(self, request: HttpRequest) -> Response:
        """Returns all metrics in the format that a request's Accept header asks for."""
        encode, content_type = choose_encoder(request.accept)
        with self._lock:
            written_at, text = self._written
            if text.content_type != content_type or self._monotonic() - written_at >= self._kept_s:
                text = Response(encode(self._registry), content_type)
                self._written = (self._monotonic(), text)
        return text

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; called by prometheus-client."""
        yield from self._metrics()


def exposed(
    host: str, port: int, metrics: Callable[[], Iterable[Metric]], turning: Callable[[], bool]
) -> Listener:
    """Returns a server of `/metrics` and of `/healthz`, which is good while `turning` says so. Any of its
    threads may call both. Raises ConfigError if it can't listen there."""
    return Listener(
        host,
        port,
        {"/metrics": Exposition(metrics)},
        {"/healthz": lambda _: sentence("turning") if turning() else sentence("stuck", 503)},
    )
