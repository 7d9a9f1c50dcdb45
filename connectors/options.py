"""What both connectors do first: open a store, say so in the log, size their segments."""

from __future__ import annotations

import logging

from kvstore.build import describe, open_store
from kvstore.keys import namespace_id
from kvstore.store import Store
from schemas.namespace import Namespace
from schemas.settings import Settings

log = logging.getLogger(__name__)


def _adopt_logging() -> None:
    """Let the store's messages go where vLLM's go: vLLM sets up its own loggers and no others."""
    engine = logging.getLogger("vllm")
    for name in ("kvstore", "connectors"):
        logger = logging.getLogger(name)
        if not logger.handlers and engine.handlers:
            logger.handlers = list(engine.handlers)
            logger.setLevel(engine.level)
            logger.propagate = False


def open_for(settings: Settings, what: str, namespace: Namespace | None = None) -> Store:
    """Open the store and say so in the log, without secrets."""
    _adopt_logging()
    store = open_store(settings)
    name = f", namespace {namespace_id(namespace)} of {namespace.model}" if namespace is not None else ""
    log.info("kvstore %s: %s%s", what, describe(settings), name)
    return store


def segment_blocks(settings: Settings, slot_bytes: int) -> int:
    """Blocks per segment: the target size, the maximum count, or what staging holds, if that is less."""
    fits = min(settings.segment.target_bytes, settings.kv.staging_bytes) // slot_bytes
    return max(1, min(settings.segment.max_blocks, fits))


def is_remote(settings: Settings) -> bool:
    """Whether the store is elsewhere than this machine, as far as its URLs tell: a folder whose index other
    machines can reach is taken for one that they have mounted."""
    return settings.origin.startswith("s3:") or settings.index_url.startswith("redis")


def hit_source(settings: Settings) -> str:
    """What vLLM's statistics call the place that loads come from: a value of its CacheHitSource.

    It asks when a load has been planned. Of a store with a local tier it isn't known by then which of the two
    will answer, and that of a remote store is none of its tiers: both are "unspecified", as vLLM says of a
    remote store. The metrics of the connector tell the tiers apart after the load.
    """
    if settings.tiers is not None or is_remote(settings):
        return "external_unspecified"
    return "host" if settings.origin.startswith("memory:") else "disk"
