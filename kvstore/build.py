"""The composition root: settings from their sources, and the stack that they describe.

    index     BreakingIndex(RedisIndex | SqliteIndex)
    payloads  origin, or TieredPayloads(BreakingPayloads(LocalPayloads), origin)
    origin    BreakingPayloads(LocalPayloads | MemoryPayloads), or
              RangedPayloads(RetryingPayloads(BreakingPayloads(S3Payloads)))

Nothing else constructs backends.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import yaml
from pydantic import BaseModel, ValidationError

from kvstore.blobs.breaking import BreakingPayloads
from kvstore.blobs.ledger import Ledger
from kvstore.blobs.local import LocalPayloads
from kvstore.blobs.memory import MemoryPayloads
from kvstore.blobs.ranged import RangedPayloads
from kvstore.blobs.retrying import RetryingPayloads
from kvstore.blobs.strays import LocalStrays, NoStrays, Strays
from kvstore.blobs.tiered import TieredPayloads
from kvstore.breaker import Breaker
from kvstore.errors import ConfigError
from kvstore.index.breaking import BreakingIndex
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.metrics import Counters
from kvstore.ports import PayloadStore
from kvstore.store import Store
from kvstore.trace import Trace
from kvstore.transfers import Crew, Transfers
from schemas.base import explain, model_of, redact
from schemas.settings import JournalSettings, Settings, Tiers
from schemas.urls import local_path, s3_location

PREFIX = "KVSTORE_"


class _Options(TypedDict):
    """What every index is told."""

    journal: JournalSettings
    cost_aware: bool
    grace_s: float
    clock: Callable[[], float]


#: Kubernetes puts these into every pod when a Service is called "kvstore"; they are not settings.
_SERVICE_LINK = re.compile(
    r"(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_.*)?)?)"
)


def load_settings(
    given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from a mapping (or the YAML file that its `settings` key names) and the environment.

    Raises ConfigError with one sentence per problem.
    """
    tree = _from_file(given) if given and "settings" in given else dict(given or {})
    environ = os.environ if environ is None else environ
    if not given and (path := environ.get(PREFIX + "SETTINGS")):
        tree = _from_file({"settings": path})
    _overlay(tree, environ)
    try:
        return Settings.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError("kvstore settings: " + "; ".join(explain(exc, Settings))) from None


def _from_file(given: Mapping[str, Any]) -> dict[str, Any]:
    others = sorted(set(given) - {"settings"})
    if others:
        raise ConfigError(f"'settings' names the whole tree; move {', '.join(others)} into that file")
    path = Path(str(given["settings"]))
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"settings file {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"settings file {path} is not YAML: {str(exc).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"settings file {path} must hold a mapping at the top, such as payloads: file:///DIR"
        )
    return tree


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    known = settings_keys()
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name == PREFIX + "SETTINGS":
            continue
        rest = name[len(PREFIX) :]
        if rest not in known:
            if _SERVICE_LINK.fullmatch(rest):
                continue
            close = difflib.get_close_matches(rest, known, n=1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else "; see the settings reference"
            raise ConfigError(f"environment variable {name} is not a setting{hint}")
        *path, leaf = rest.lower().split("__")
        node = tree
        for part in path:
            child = node.get(part)
            node[part] = node = dict(child) if isinstance(child, dict) else {}
        node[leaf] = value


def settings_keys() -> set[str]:
    """Every setting as its environment variable spells it, without the prefix."""
    return set(_leaves(Settings, ""))


def _leaves(model: type[BaseModel], prefix: str) -> list[str]:
    names: list[str] = []
    for name, info in model.model_fields.items():
        inner = model_of(info.annotation)
        if inner is not None:
            names += _leaves(inner, f"{prefix}{name.upper()}__")
        if inner is None or inner is not info.annotation:
            names.append(prefix + name.upper())
    return names


def open_index(settings: Settings, *, clock: Callable[[], float] = time.time) -> RedisIndex | SqliteIndex:
    """The index leaf of these settings, for reading, writing and maintenance. No I/O for Redis."""
    url = settings.index_url
    options: _Options = {
        "journal": settings.journal,
        "cost_aware": settings.eviction.cost_aware,
        "grace_s": settings.grace_s,
        "clock": clock,
    }
    if url.startswith("sqlite://"):
        busy_timeout_s = settings.sqlite.busy_timeout_s
        return SqliteIndex(url.removeprefix("sqlite://"), busy_timeout_s=busy_timeout_s, **options)
    if url.startswith("memory://"):
        return SqliteIndex.in_memory(url.removeprefix("memory://"), **options)
    return RedisIndex.from_settings(url, settings.redis, **options)


def open_payloads(settings: Settings) -> PayloadStore:
    """The payload store that all nodes share, for tools: no breaker, no local tier. No I/O for S3."""
    return _retrying(_leaf(settings), settings)


def open_strays(settings: Settings) -> Strays:
    """What lies beside the payloads of the store that all nodes share, for gc. No I/O."""
    url = settings.origin
    if url.startswith("memory://"):
        return NoStrays()
    if url.startswith("s3://"):
        from kvstore.blobs.s3_strays import S3Strays

        return S3Strays(s3_location(url), settings.s3)
    root, index = Path(local_path(url)), Path(settings.index_url.removeprefix("sqlite://"))
    inside = index.name if index.parent.absolute() == root.absolute() else "index.sqlite"
    return LocalStrays(str(root), [f"{inside}{end}" for end in ("", "-wal", "-shm", "-journal")])


def _leaf(settings: Settings) -> PayloadStore:
    url = settings.origin
    if url.startswith("memory://"):
        return MemoryPayloads(local_path(url))
    if url.startswith("s3://"):
        # Its libraries take a third of a second to import.
        from kvstore.blobs.s3 import S3Payloads

        return S3Payloads(s3_location(url), settings.s3)
    return LocalPayloads(local_path(url), fsync=settings.local.fsync)


def _retrying(inner: PayloadStore, settings: Settings) -> PayloadStore:
    s3 = settings.s3
    if not settings.origin.startswith("s3://"):
        return inner  # a disk that fails once fails again
    return RetryingPayloads(
        inner, attempts=s3.attempts, backoff_s=s3.backoff_s, max_backoff_s=s3.max_backoff_s
    )


def _origin(settings: Settings, breaker: Breaker, crew: Crew) -> PayloadStore:
    """The shared payload store as engines use it."""
    s3 = settings.s3
    stack = _retrying(BreakingPayloads(_leaf(settings), breaker, reads_probe=False), settings)
    if not settings.origin.startswith("s3://"):
        return stack
    return RangedPayloads(
        stack, range_bytes=s3.range_bytes, concurrency=s3.concurrency, together=crew.together
    )


def open_tier(settings: Settings) -> TieredPayloads:
    """Both tiers, for tools: no breaker, and nothing in the background. Raises ConfigError without tiers."""
    if settings.tiers is None:
        raise ConfigError("payloads is one URL, not {fast: file:///DIR, slow: URL, fast_capacity: SIZE}")
    fast = LocalPayloads(local_path(settings.tiers.fast), fsync=settings.local.fsync)
    return TieredPayloads(fast, open_payloads(settings), _ledger(settings, settings.tiers), later=_at_once())


def _tiered(
    settings: Settings, tiers: Tiers, origin: PayloadStore, transfers: Transfers, counters: Counters
) -> TieredPayloads:
    fast = LocalPayloads(local_path(tiers.fast), fsync=settings.local.fsync)
    return TieredPayloads(
        BreakingPayloads(fast, Breaker("fast tier", settings.breaker)),
        origin,
        _ledger(settings, tiers),
        later=transfers.errand,
        write=tiers.write,
        memory_bytes=settings.transfers.errand_bytes,
        count=lambda name, amount: counters.add(f"tier_{name}", amount),
    )


def _ledger(settings: Settings, tiers: Tiers) -> Ledger:
    return Ledger(local_path(tiers.fast), tiers.fast_capacity, breaker=settings.breaker)


def _at_once() -> Callable[[int, Callable[[], None]], bool]:
    """A queue without threads: runs a job at once, one that a job queues after it, and none with bytes."""
    own = threading.local()

    def later(nbytes: int, job: Callable[[], None]) -> bool:
        if nbytes:
            return False
        jobs = getattr(own, "jobs", None)
        if jobs is not None:
            jobs.append(job)
            return True
        own.jobs = deque([job])
        try:
            while own.jobs:
                own.jobs.popleft()()
        finally:
            own.jobs = None
        return True

    return later


def open_store(settings: Settings | Mapping[str, Any]) -> Store:
    """Build the stack. Raises ConfigError; an unreachable Redis is not an error, only misses."""
    if not isinstance(settings, Settings):
        settings = load_settings(settings)
    index = open_index(settings)
    breaker, crew = Breaker("payloads", settings.breaker), Crew(settings.s3.concurrency)
    index_breaker = Breaker("index", settings.breaker)
    transfers, counters = Transfers(settings.transfers), Counters()
    origin = _origin(settings, breaker, crew)
    tiers = settings.tiers
    tier = _tiered(settings, tiers, origin, transfers, counters) if tiers else None
    return Store(
        settings=settings,
        payloads=tier or origin,
        tier=tier,
        index=BreakingIndex(index, index_breaker),
        catalogue=index,
        transfers=transfers,
        counters=counters,
        crew=crew,
        # With a tier in front, much can be read while the origin is down.
        breaker=None if tiers else breaker,
        index_breaker=index_breaker,
        trace=_trace(settings, transfers, counters),
    )


def _trace(settings: Settings, transfers: Transfers, counters: Counters) -> Trace | None:
    if settings.trace.folder is None:
        return None
    return Trace(settings.trace, transfers.errand, lost=lambda count: counters.add("trace_lost", count))


def describe(settings: Settings) -> str:
    """One line for a log: what these settings open, without secrets."""
    front = f"{settings.tiers.fast} in front of " if settings.tiers else ""
    return f"index {redact(settings.index_url)}, payloads {front}{redact(settings.origin)}"
