"""Metrics of a command that runs until it is stopped, and whether it still does something: what `--listen` of
such a command serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.admin.serve.listener import Listener, Response, sentence


class _Metrics(Collector):
    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; called by prometheus-client."""
        yield from self._metrics()


def exposed(
    host: str, port: int, metrics: Callable[[], Iterable[Metric]], turning: Callable[[], bool]
) -> Listener:
    """Returns a server of `/metrics`, with those of the process, and of `/healthz`, which is good while
    `turning` says so. Any of its threads may call both. Raises ConfigError if it can't listen there."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(metrics))
    ProcessCollector(registry=registry)

    def text(accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), content_type)

    return Listener(
        host,
        port,
        {"/metrics": lambda request: text(request.accept)},
        {"/healthz": lambda _: sentence("turning") if turning() else sentence("stuck", 503)},
    )
