"""Opens and closes a connector's store, the first and the last thing it does, and logs both."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstore.admin.doctor.first_look import look
from kvstore.build import describe, open_store
from kvstore.keys import namespace_id
from kvstore.rules.tiers import Tier
from kvstore.store.store import Store
from schemas.namespace import Namespace
from schemas.settings import Settings

log = logging.getLogger(__name__)


def adopt_logging() -> None:
    """Send the store's messages where vLLM's go: vLLM sets up its own loggers and no others."""
    engine = logging.getLogger("vllm")
    for name in ("kvstore", "connectors"):
        logger = logging.getLogger(name)
        if not logger.handlers and engine.handlers:
            logger.handlers = list(engine.handlers)
            logger.setLevel(engine.level)
            logger.propagate = False


def open_for(
    settings: Settings, what: str, namespace: Namespace | None = None, *, saves: bool = True
) -> Store:
    """Open the store and log that, without secrets. With a namespace, have a first look at the backends: an
    engine that never `saves` may lack the right to."""
    adopt_logging()
    store = open_store(settings)
    name = f", namespace {namespace_id(namespace)} of {namespace.model}" if namespace is not None else ""
    log.info("kvstore %s: %s%s", what, describe(settings), name)
    if namespace is not None:
        look(store, namespace, saves=saves)
    return store


def close(store: Store, what: str) -> None:
    """Let queued saves finish (bounded), close the store, and log what it has counted. Idempotent."""
    store.close()
    counts = {name: value for name, value in store.counters.snapshot().items() if value}
    log.info("kvstore %s closed: %s", what, counts)


def is_remote(settings: Settings) -> bool:
    """Returns whether the store is on other machines, as far as its URLs tell: a folder whose index other
    machines can reach is taken for one that they have mounted."""
    return settings.origin.startswith("s3:") or settings.index_url.startswith("redis")


def hit_sources(settings: Settings) -> Mapping[Tier, str]:
    """Returns what vLLM's statistics call each tier that loads come from: values of its CacheHitSource. A
    remote store is none of those that it names; "unspecified" is its word for one."""
    disk = "external_unspecified" if is_remote(settings) else "disk"
    return {"memory": "host", "folder": "disk", "disk": disk, "bucket": "external_unspecified"}
