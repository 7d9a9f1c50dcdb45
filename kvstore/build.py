"""The composition root: settings from their sources, and the stack that they describe.

    index     BreakingIndex(SqliteIndex), or ShardedRequests(RedisIndex) with a breaker for each shard
    payloads  origin, or TieredPayloads(BreakingPayloads(LocalPayloads), origin)
    origin    BreakingPayloads(LocalPayloads | MemoryPayloads), or
              RangedPayloads(RetryingPayloads(BreakingPayloads(S3Payloads)))

Nothing else constructs backends; kvstore.payloads.bucket puts the wrappers around a bucket.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import yaml
from pydantic import BaseModel, ValidationError

from kvstore.breaker import Breaker
from kvstore.errors import ConfigError
from kvstore.files import access_of
from kvstore.index.breaking import BreakingIndex
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import EngineIndex
from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.breakers import ShardBreakers
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keyfiles import open_keyring
from kvstore.metrics import Counters
from kvstore.payloads.breaking import BreakingPayloads
from kvstore.payloads.bucket import for_engines, for_tools
from kvstore.payloads.evidence import EVIDENCE, Evidence
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.memory import MemoryPayloads
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.strays import LocalStrays, NoStrays, Strays
from kvstore.payloads.throttle import Throttle
from kvstore.payloads.tiered.ledger import Ledger
from kvstore.payloads.tiered.store import TieredPayloads
from kvstore.store.backends import Backends
from kvstore.store.store import Store
from kvstore.store.trace import TraceRecorder
from kvstore.threads.transfers import Crew, Transfers
from schemas.base import explain, model_of, redact
from schemas.settings import JournalSettings, Settings, Tiers, TransferSettings
from schemas.urls import local_path, s3_location

PREFIX = "KVSTORE_"
#: Seconds that a request of a probe may take: the bytes are few, and somebody waits for the answer.
PROBE_S = 5.0
#: The variable that names the operator (kvstore.admin.operators); it is no setting.
OPERATOR = f"{PREFIX}OPERATOR"


class _Options(TypedDict):
    """The options that every kind of index takes."""

    journal: JournalSettings
    cost_aware: bool
    grace_s: float
    by: str
    clock: Callable[[], float]


#: Kubernetes puts these into every pod when a Service is called "kvstore"; they are not settings.
_SERVICE_LINK = re.compile(
    r"(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_.*)?)?)"
)


def load_settings(
    given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Returns the settings of a mapping (or the YAML file named by its `settings` key) and the environment.

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
        if not name.startswith(PREFIX) or name in (PREFIX + "SETTINGS", OPERATOR):
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
    """Returns every setting as its environment variable spells it, without the prefix."""
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


def open_index(
    settings: Settings,
    *,
    by: str = "",
    clock: Callable[[], float] = time.time,
) -> FullIndex:
    """Returns the leaf index of these settings, for reading, writing and maintenance. No I/O for Redis.

    `by` says in the journal who does what is done with it; "" is for engines.
    """
    url = settings.index_url
    if settings.nowhere:
        raise ConfigError(
            "no payloads are named, so there is no store; only a connector that observes does without one"
        )
    options: _Options = {
        "journal": settings.journal,
        "cost_aware": settings.eviction.cost_aware,
        "grace_s": settings.grace_s,
        "by": by,
        "clock": clock,
    }
    if url.startswith("sqlite://"):
        busy_timeout_s = settings.sqlite.busy_timeout_s
        access = access_of(settings.local.share)
        path = url.removeprefix("sqlite://")
        return SqliteIndex(path, busy_timeout_s=busy_timeout_s, access=access, **options)
    if url.startswith("memory://"):
        return SqliteIndex.in_memory(url.removeprefix("memory://"), **options)
    leaf = RedisIndex.from_settings(url, settings.redis, **options)
    return ShardedIndex(leaf, shards=settings.redis.shards)


def open_redis(settings: Settings) -> RedisClient | None:
    """Returns the Redis under the index, for questions that no index answers; None if the index is elsewhere.
    No I/O."""
    if not settings.index_url.startswith(("redis", "unix")):
        return None
    return RedisClient.from_settings(settings.index_url, settings.redis)


def open_payloads(settings: Settings, *, patient: bool = True) -> PayloadStore:
    """Returns the payload store that all nodes share, for tools: no breaker, no fast tier. No I/O for S3.
    `patient` is for_tools'.
    """
    leaf = _leaf(settings)
    return for_tools(leaf, settings.s3, patient=patient) if settings.origin.startswith("s3://") else leaf


def open_evidence(settings: Settings, *, patient: bool = True) -> Evidence:
    """Returns the evidence beside the payloads that all nodes share. `patient` is for_tools'. No I/O."""

    def opened() -> PayloadStore:
        url = settings.origin
        if url.startswith("memory://"):
            return MemoryPayloads(f"{local_path(url)}/{EVIDENCE}")
        if url.startswith("s3://"):
            from kvstore.payloads.s3.store import S3Payloads

            location = s3_location(url)
            inside = replace(location, prefix=f"{location.root}{EVIDENCE}")
            return for_tools(S3Payloads(inside, settings.s3), settings.s3, patient=patient)
        access = access_of(settings.local.share)
        return LocalPayloads(f"{local_path(url)}/{EVIDENCE}", fsync=settings.local.fsync, access=access)

    return Evidence(opened)


def open_probe(settings: Settings) -> PayloadStore:
    """Returns the payload store that all nodes share, for a probe: each request is made once, and ends within
    PROBE_S. No I/O for S3.
    """
    s3 = settings.s3
    names = ("connect_timeout_s", "read_timeout_s", "write_timeout_s")
    brief = s3.model_copy(update={name: min(getattr(s3, name), PROBE_S) for name in names})
    return _leaf(settings.model_copy(update={"s3": brief}))


def open_object(url: str, settings: Settings) -> tuple[Callable[[], int | None], PayloadStore]:
    """Returns what tells the size of one object of a bucket (None: there is none), and what reads and puts
    it under any name, for tools. No I/O.
    """
    from kvstore.payloads.s3.file import S3File

    file = S3File(s3_location(url), settings.s3)
    return file.size, for_tools(file, settings.s3)


def ask_encryption(settings: Settings) -> tuple[str, str]:
    """Returns how the bucket of these settings encrypts what is put now, and with which key, for tools."""
    from kvstore.payloads.s3.store import S3Payloads

    with S3Payloads(s3_location(settings.origin), settings.s3) as payloads:
        return payloads.encryption()


def may_list_as_of(settings: Settings, owner: str | None) -> bool:
    """Returns whether the bucket can be listed as that account's, or without saying whose, for tools."""
    from kvstore.payloads.s3.store import S3Payloads

    s3 = settings.s3.model_copy(update={"expected_bucket_owner": owner})
    with S3Payloads(s3_location(settings.origin), s3) as payloads:
        return payloads.may_list()


def open_strays(settings: Settings) -> Strays:
    """Returns what finds strays beside the payloads of the store that all nodes share, for fsck. No I/O."""
    url = settings.origin
    if url.startswith("memory://"):
        return NoStrays()
    if url.startswith("s3://"):
        from kvstore.payloads.s3.strays import S3Strays

        return S3Strays(s3_location(url), settings.s3)
    root, index = Path(local_path(url)), Path(settings.index_url.removeprefix("sqlite://"))
    inside = index.name if index.parent.absolute() == root.absolute() else "index.sqlite"
    ours = [f"{inside}{end}" for end in ("", "-wal", "-shm", "-journal")]
    return LocalStrays(str(root), [*ours, EVIDENCE])


def keeps_versions(settings: Settings) -> bool:
    """Returns whether the store that all nodes share keeps former versions of deleted payloads, or ever did.
    Raises what its payload store raises."""
    if not settings.origin.startswith("s3://"):
        return False
    from kvstore.payloads.s3.clients import Session

    session = Session(s3_location(settings.origin), settings.s3)
    with closing(session.control()) as control:
        return control.keeps_versions()


def _leaf(settings: Settings) -> PayloadStore:
    url = settings.origin
    if url.startswith("memory://"):
        return MemoryPayloads(local_path(url))
    if url.startswith("s3://"):
        # Its libraries take a third of a second to import.
        from kvstore.payloads.s3.store import S3Payloads

        return S3Payloads(s3_location(url), settings.s3)
    return _local(url, settings)


def _local(url: str, settings: Settings) -> LocalPayloads:
    access = access_of(settings.local.share)
    return LocalPayloads(local_path(url), fsync=settings.local.fsync, access=access)


def _origin(
    settings: Settings, breaker: Breaker, throttle: Throttle, crew: Crew, counters: Counters
) -> PayloadStore:
    """Returns the payload store that all nodes share, as engines use it."""
    leaf = _leaf(settings)
    if not settings.origin.startswith("s3://"):
        # A disk that fails once fails again.
        return BreakingPayloads(leaf, breaker, reads_probe=False)
    return for_engines(leaf, settings.s3, breaker, throttle, together=crew.together, count=counters.add)


def open_tier(settings: Settings) -> TieredPayloads:
    """Returns both tiers, for tools: no breaker, and nothing in the background. Raises ConfigError if the
    settings have no tiers.
    """
    if settings.tiers is None:
        raise ConfigError("payloads is one URL, not {fast: file:///DIR, slow: URL, fast_capacity: SIZE}")
    fast = _local(settings.tiers.fast, settings)
    return TieredPayloads(fast, open_payloads(settings), _ledger(settings, settings.tiers), later=_at_once())


def _tiered(
    settings: Settings,
    tiers: Tiers,
    origin: PayloadStore,
    throttle: Throttle,
    transfers: Transfers,
    counters: Counters,
) -> TieredPayloads:
    fast = _local(tiers.fast, settings)
    return TieredPayloads(
        BreakingPayloads(fast, Breaker("fast tier", settings.breaker)),
        origin,
        _ledger(settings, tiers),
        later=transfers.errand,
        write=tiers.write,
        memory_bytes=settings.transfers.errand_bytes,
        count=lambda name, amount: counters.add(f"tier_{name}", amount),
        scarce=throttle.reads_are_scarce,
    )


def _ledger(settings: Settings, tiers: Tiers) -> Ledger:
    access = access_of(settings.local.share)
    return Ledger(local_path(tiers.fast), tiers.fast_capacity, breaker=settings.breaker, access=access)


def _at_once() -> Callable[[int, Callable[[], None]], bool]:
    """Returns a queue without threads. It runs a job at once, or after the job that queued it, and refuses
    jobs that hold bytes.
    """
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
    """Builds the stack and starts its threads. Raises ConfigError, also if the process can't have so many. An
    unreachable Redis is not an error: all is a miss meanwhile."""
    if not isinstance(settings, Settings):
        settings = load_settings(settings)
    keyring = open_keyring(settings.signing)
    transfers, counters = Transfers(settings.transfers), Counters()
    index = open_index(settings)
    requests, index_breaker = _for_requests(index, settings)
    breaker, crew = Breaker("payloads", settings.breaker), Crew(settings.s3.concurrency)
    throttle = Throttle(longest_s=settings.s3.max_backoff_s)
    origin = _origin(settings, breaker, throttle, crew, counters)
    tiers = settings.tiers
    tier = _tiered(settings, tiers, origin, throttle, transfers, counters) if tiers else None
    store = Store(
        Backends(
            settings=settings,
            payloads=tier or origin,
            index=requests,
            maintenance=index,
            transfers=transfers,
            counters=counters,
            evidence=open_evidence(settings, patient=False),
            keyring=keyring,
            gap_bytes=settings.s3.gap_bytes if settings.origin.startswith("s3://") else 0,
            drop_copy=tier.drop_copy if tier else None,
            tier=tier,
            crew=crew,
            # With a tier in front, much can be read while the origin is down.
            breaker=None if tiers else breaker,
            throttle=throttle,
            index_breaker=index_breaker,
            trace=_trace(settings, transfers, counters),
        )
    )
    try:
        transfers.start()
    except ConfigError:
        store.close()
        raise
    return store


def _for_requests(index: FullIndex, settings: Settings) -> tuple[EngineIndex, Breaker | ShardBreakers]:
    """Returns the index as engines use it, and what refuses their calls while it fails."""
    if isinstance(index, ShardedIndex):
        breakers = ShardBreakers(lambda name: Breaker(name, settings.breaker))
        shards = settings.redis.shards
        return ShardedRequests(index.leaf, shards=shards, guard=breakers.guard), breakers
    breaker = Breaker("index", settings.breaker)
    return BreakingIndex(index, breaker), breaker


def _trace(settings: Settings, transfers: Transfers, counters: Counters) -> TraceRecorder | None:
    if settings.trace.folder is None:
        return None
    return TraceRecorder(
        settings.trace,
        transfers.errand,
        lost=lambda count: counters.add("trace_lost", count),
        access=access_of(settings.local.share),
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace without a store, for a connector that only observes."""

    trace: TraceRecorder
    transfers: Transfers
    counters: Counters

    def close(self) -> None:
        """Writes what waits. Idempotent."""
        self.transfers.close(drain_s=1.0)
        self.trace.close()


def open_recording(settings: Settings) -> Recording:
    """Opens the trace alone: no index, no payloads. `trace.folder` must be given. No I/O."""
    transfers, counters = Transfers(TransferSettings(read_threads=1, write_threads=1)), Counters()
    trace = _trace(settings, transfers, counters)
    assert trace is not None, "the settings demand a folder of those that observe"
    return Recording(trace, transfers, counters)


def describe(settings: Settings) -> str:
    """Returns one line for a log: what these settings open, without secrets."""
    front = f"{settings.tiers.fast} in front of " if settings.tiers else ""
    return f"index {redact(settings.index_url)}, payloads {front}{redact(settings.origin)}{_signed(settings)}"


def _signed(settings: Settings) -> str:
    signing = settings.signing
    if signing.key is None:
        return ""
    how = "signed and encrypted" if signing.encrypt else "signed"
    return f", {how} with key {signing.key} (unsigned: {signing.unsigned})"
