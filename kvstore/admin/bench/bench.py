"""bench: measures this machine, this index and this payload store through the product's own code.

    material   data like KV blocks, in a namespace of its own
    measure    timing of calls, one after the other or side by side
    stages     this machine, the index, the payload store
    loads      whole prompts, verified
    findings   what the numbers mean, in sentences

All that it writes is removed again, also after Ctrl-C and after an error; what a killed run has left is
removed by a run that begins an hour later or more. The namespace itself stays known to the index, empty.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore import __version__
from kvstore.admin.backends import Cache
from kvstore.admin.bench import stages
from kvstore.admin.bench.findings import findings
from kvstore.admin.bench.loads import Loaded, Loader, extrapolated, report
from kvstore.admin.bench.material import Material, Shape, shape_of
from kvstore.admin.bench.measure import latency
from kvstore.admin.bench.pages import drop
from kvstore.admin.bench.reports import BenchReport, Ended, LoadTime, Tier, TransferSpeed
from kvstore.admin.doctor.machine import nearest_folder
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.build import open_store
from kvstore.errors import KVStoreError
from kvstore.rules.units import size
from kvstore.store.store import Store
from schemas.base import redact
from schemas.urls import local_path

__all__ = ["DEFAULT_TOKENS", "bench", "shape_of"]

DEFAULT_TOKENS = (2048, 8192, 32768)
#: Shares of the time for each stage. The rest is for making data, and for removing it.
_MACHINE, _CODECS, _INDEX, _PUT, _GET, _SMALL, _LOAD = 0.02, 0.05, 0.1, 0.24, 0.21, 0.02, 0.25
#: The most bytes written in a minute.
_MOST_BYTES = 4 << 30
#: A transfer that would take longer than this many times its share is not begun.
_OVERRUN = 3
#: Age in seconds from which a segment belongs to no run that is still going on.
_ABANDONED_S = 3600


def bench(
    cache: Cache,
    shape: Shape,
    *,
    seconds: float,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    keep: bool = False,
    progress: ProgressListener | None = None,
) -> BenchReport:
    """Measures for about `seconds`.

    Ctrl-C and a failing backend end it, and the report has what was measured until then.
    """
    began = time.monotonic()
    run = _Bench(cache, shape, seconds, sorted(set(tokens)), progress or Silent())
    try:
        try:
            run.all()
        finally:
            run.clean(keep=keep)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled"
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return run.report(time.monotonic() - began)


@dataclass
class _Bench:
    cache: Cache
    shape: Shape
    seconds: float
    tokens: list[int]
    progress: ProgressListener
    ended: Ended = "complete"
    problem: str = ""
    left_behind: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    transfers: list[TransferSpeed] = field(default_factory=list)
    loads: list[LoadTime] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.material = Material(self.cache.settings, self.shape, self.cache.keyring)

    def all(self) -> None:
        """Runs every stage in turn."""
        self.progress.begin("bench: this machine")
        self.found["machine"] = stages.machine(self.seconds * _MACHINE)
        self.found["codecs"] = stages.codecs(self.seconds * _CODECS)
        self.cache.record("bench", f"in a namespace of its own, {self.material.id}")
        store = self.cache.saving()
        store.open(self.material.namespace, block_bytes=self.shape.block_bytes).register()
        self._remove_abandoned(store)
        self.progress.begin("bench: the index")
        index = self.cache.made_index()
        self.found["index_speed"] = stages.index(index, self.material.id, self.seconds * _INDEX)
        self._payloads(store)
        self._loads()

    def _payloads(self, store: Store) -> None:
        payloads = stages.Payloads(
            store.payloads, self.material, bytes_budget=self._bytes(), folder=self.cache.folder
        )
        put_s, get_s = (self.seconds * share / len(stages.CONCURRENCIES) for share in (_PUT, _GET))
        for concurrency in stages.CONCURRENCIES:
            self.progress.begin(f"bench: payloads, PUT, {concurrency} at a time")
            reason = payloads.too_much(concurrency) or self._too_long("put", concurrency, put_s)
            skipped = payloads.skipped("put", concurrency, reason) if reason else None
            self.transfers.append(skipped or payloads.put(concurrency, put_s))
        for concurrency in stages.CONCURRENCIES:
            self.progress.begin(f"bench: payloads, GET, {concurrency} at a time")
            reason = self._too_long("get", concurrency, get_s)
            skipped = payloads.skipped("get", concurrency, reason) if reason else None
            self.transfers.append(skipped or payloads.get(concurrency, get_s))
        self.found["small_reads"] = latency(payloads.small_reads(self.seconds * _SMALL))

    def _too_long(self, operation: str, concurrency: int, seconds: float) -> str:
        """Returns why one round of transfers would take too long, or ""."""
        known = [t.bytes_s for t in self.transfers if t.operation == operation and t.bytes_s]
        if not known:
            return ""
        takes = concurrency * self.shape.segment_bytes / max(known)
        if takes <= max(1.0, _OVERRUN * seconds):
            return ""
        return f"one round would take {takes:.0f} s; give more --seconds"

    def _loads(self) -> None:
        settings = self.cache.settings
        with open_store(settings) as store:
            loader = Loader(store, self.material)
            loader.commit()
            tiers: list[Tier] = ["shared", "fast"] if settings.tiers else ["shared"]
            end = time.perf_counter() + self.seconds * _LOAD
            for number, tokens in enumerate(self.tokens):
                share = (end - time.perf_counter()) / (len(self.tokens) - number)
                for tier in tiers:
                    self.progress.begin(f"bench: load of {tokens:,} tokens")
                    self.loads.append(self._load(loader, tokens, tier, share / len(tiers)))

    def _load(self, loader: Loader, tokens: int, tier: Tier, seconds: float) -> LoadTime:
        nbytes = self.shape.blocks(tokens) * self.shape.block_bytes
        known = [load for load in self.loads if load.tier == tier and load.measured]
        if known and (tokens > loader.longest or nbytes / known[-1].bytes_s > max(1.0, seconds)):
            return extrapolated(known[-1], tokens, nbytes)
        # The chain may be shorter than the first prompt, or the store too slow for it.
        rate = max((t.bytes_s for t in self.transfers if t.operation == "get"), default=0.0)
        fits = max(self.shape.segment_bytes, rate * seconds * _OVERRUN) // self.shape.kv_bytes_per_token
        shorter = min(tokens, loader.longest, int(fits))
        best: Loaded | None = None
        end = time.perf_counter() + seconds
        # The first one warms up connections, so a second counts if there is time for it.
        while best is None or time.perf_counter() + best.load_s < end:
            self._prepare(loader, shorter, tier)
            loaded = loader.load(shorter)
            best = loaded if best is None or loaded.load_s < best.load_s else best
        measured = report(best, tier)
        return measured if shorter == tokens else extrapolated(measured, tokens, nbytes)

    def _prepare(self, loader: Loader, tokens: int, tier: Tier) -> None:
        """Makes sure that the load reads from `tier`, and not from memory."""
        names, tiers = loader.names(tokens), self.cache.settings.tiers
        if tiers is not None and tier == "shared":
            loader.forget_copies(tokens)
        elif tiers is not None:
            for name, nbytes in names:
                self.cache.fast.fill(name, nbytes)
        folder = Path(local_path(tiers.fast)) if tiers is not None and tier == "fast" else self.cache.folder
        drop(folder, [name for name, _ in names])

    def _bytes(self) -> int:
        """Returns how many bytes may be written."""
        settings = self.cache.settings
        most = min(_MOST_BYTES * self.seconds / 60, _MOST_BYTES, settings.capacity_bytes / 2)
        if self.cache.folder is not None:
            most = min(most, shutil.disk_usage(nearest_folder(self.cache.folder)).free / 4)
        if settings.tiers is not None:
            # The tier should keep what is hot in it.
            most = min(most, settings.tiers.fast_capacity / 8)
        return int(most)

    def _remove_abandoned(self, store: Store) -> None:
        before = time.time() - _ABANDONED_S
        space = self.material.id
        old = [each for each in store.maintenance.segments(space) if each.record.created_s < before]
        stages.forget(self.cache.made_index(), space, [each.segment for each in old])
        names = [listed.name for listed in store.payloads.list(f"{space}/") if listed.modified_s < before]
        store.payloads.delete(names)

    def clean(self, *, keep: bool) -> None:
        """Removes everything that this run has made, unless it is to be kept."""
        names = self.material.names
        if not names:
            return
        where = f"{len(names)} payloads of {size(self.shape.segment_bytes)} in namespace {self.material.id}"
        self.left_behind = where
        if keep:
            return
        self.progress.begin("bench: cleaning up")
        try:
            segments = [stored.segment for stored in self.material.stored]
            stages.forget(self.cache.made_index(), self.material.id, segments)
        finally:
            # Copies in a fast tier are deleted as well.
            everywhere = self.cache.payloads if self.cache.settings.tiers is None else self.cache.fast
            everywhere.delete(names)
        self.left_behind = ""

    def report(self, seconds: float) -> BenchReport:
        """Returns what is known so far."""
        settings, shape = self.cache.settings, self.shape
        measured = BenchReport(
            version=__version__,
            ended=self.ended,
            problem=self.problem,
            index=redact(settings.index_url),
            payloads=redact(settings.origin),
            fast=redact(settings.tiers.fast) if settings.tiers else None,
            seconds=seconds,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            kv_source=shape.source,
            block_tokens=shape.block_tokens,
            segment_blocks=shape.segment_blocks,
            segment_bytes=shape.segment_bytes,
            codec=settings.segment.codec,
            read_threads=settings.transfers.read_threads,
            machine=self.found.get("machine"),
            codecs=self.found.get("codecs", ()),
            index_speed=self.found.get("index_speed"),
            transfers=tuple(self.transfers),
            small_reads=self.found.get("small_reads"),
            loads=tuple(sorted(self.loads, key=lambda load: (load.tier != "shared", load.tokens))),
            findings=(),
            left_behind=self.left_behind,
        )
        return measured.model_copy(update={"findings": tuple(findings(measured))})
