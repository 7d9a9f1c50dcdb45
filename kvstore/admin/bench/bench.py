"""bench: measures put, match and get of this index and this payload store, through the product's own code.

All that it writes is removed again, also after Ctrl-C and after an error; what a killed run has left is
removed by a run that begins an hour later or more. The namespace itself stays known to the index, empty.
"""

from __future__ import annotations

import os
import queue
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore import __version__
from kvstore.admin.backends import Cache
from kvstore.admin.bench.material import BenchSegment, Material, Shape
from kvstore.admin.bench.reports import BenchReport, BenchSpeed, Ended, Operation, Tier
from kvstore.admin.doctor.machine import nearest_folder
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.build import open_store
from kvstore.errors import KVStoreError
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.segments import staging_bytes
from kvstore.rules.units import size
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.threads.each import for_each
from schemas.base import redact
from schemas.urls import local_path

#: Shares of the time. The rest is for making data, and for removing it.
_PUT, _MATCH, _GET = 0.4, 0.05, 0.4
_MOST_MATCHES = 2000
#: A match answers 4,096 segments of a chain at most.
_MOST_SEGMENTS = 1024
#: The most bytes written in a minute.
_MOST_BYTES = 4 << 30
#: Age in seconds from which a segment belongs to no run that is still going on.
_ABANDONED_S = 3600


def bench(
    cache: Cache, shape: Shape, *, seconds: float, progress: ProgressListener | None = None
) -> BenchReport:
    """Measures for about `seconds`.

    Ctrl-C and a failing backend end it, and the report has what was measured until then.
    """
    began = time.monotonic()
    run = _Bench(cache, shape, seconds, progress or Silent())
    try:
        try:
            run.all()
        finally:
            run.clean()
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
    progress: ProgressListener
    ended: Ended = "complete"
    problem: str = ""
    left_behind: str = ""
    speeds: list[BenchSpeed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.material = Material(self.cache.settings, self.shape, self.cache.keyring)

    def all(self) -> None:
        """Writes, and then reads as an engine does."""
        self.cache.record("bench", f"in a namespace of its own, {self.material.id}")
        saving = self.cache.saving()
        saving.open(self.material.namespace, block_bytes=self.shape.block_bytes).register()
        self._remove_abandoned(saving)
        self.progress.begin("bench: put")
        self._put(saving)
        stored = self.material.stored
        with open_store(self.cache.settings) as store:
            space = store.open(self.material.namespace, block_bytes=self.shape.block_bytes)
            for one in stored:
                store.index.commit(space.id, one.segment, one.digests, one.record, rank=0, ranks=1)
            self.progress.begin("bench: match")
            runs = self._match(space, stored)
            tiers: list[Tier] = ["shared", "fast"] if self.cache.settings.tiers else ["shared"]
            for tier in tiers:
                self.progress.begin(f"bench: get from the {tier} tier")
                self._get(store, space, runs, tier, self.seconds * _GET / len(tiers))

    def _put(self, store: Store) -> None:
        material, calls = self.material, _Calls()
        jobs, most = self.cache.settings.transfers.write_threads, self._most_segments()
        end = time.perf_counter() + self.seconds * _PUT

        def turns() -> Iterator[int]:
            for number in range(most):
                if number and time.perf_counter() >= end:
                    return
                yield number

        def put(_: int) -> None:
            stored, buffers = material.segment()
            with calls.timed():
                store.payloads.put(material.name(stored), buffers)
            material.stored.append(stored)

        for_each(put, turns(), jobs)
        # Engines have their bytes when they save; making them takes a part of each turn here.
        jobs = min(jobs, len(calls.times))
        self._add("put", "shared", jobs, self.shape.segment_blocks, calls.times, sum(calls.times) / jobs)

    def _match(self, space: Space, stored: Sequence[BenchSegment]) -> Sequence[Run]:
        digests, blocks = b"".join(one.digests for one in stored), len(stored) * self.shape.segment_blocks
        calls, end = _Calls(), time.perf_counter() + self.seconds * _MATCH
        while True:
            with calls.timed():
                found = space.match(digests)
            if found.blocks != blocks:
                raise KVStoreError(f"a match found {found.blocks} of {blocks} blocks ({found.reason})")
            if time.perf_counter() >= end or len(calls.times) >= _MOST_MATCHES:
                break
        self._add("match", "shared", 1, blocks, calls.times)
        return found.runs

    def _get(self, store: Store, space: Space, runs: Sequence[Run], tier: Tier, seconds: float) -> None:
        """Reads and verifies the chain, into memory that is mapped already, as a connector does it: again and
        again, each time from `tier`."""
        settings, shape, keys = self.cache.settings, self.shape, self.material.keys()
        # As many runs may be under way as there is staging memory for.
        room = max(1, staging_bytes(settings.kv) // shape.segment_bytes)
        jobs = min(settings.transfers.read_threads, room, len(runs))
        staging: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(jobs):
            staging.put(memoryview(np.ones(shape.segment_bytes, np.uint8).data))
        calls, best_s, end = _Calls(), float("inf"), time.perf_counter() + seconds

        def get(run: Run) -> None:
            memory = staging.get()
            views = [memory[i * shape.block_bytes :][: shape.block_bytes] for i in range(run.count)]
            with calls.timed():
                space.load(run, keys[run.start : run.start + run.count], views)
            staging.put(memory)

        # The first time warms up connections, so a second one counts if there is time for it.
        while not calls.times or time.perf_counter() + best_s < end:
            self._prepare(store, tier)
            began = time.perf_counter()
            for_each(get, runs, jobs)
            best_s = min(best_s, time.perf_counter() - began)
        self._add("get", tier, jobs, shape.segment_blocks, calls.times, best_s, len(runs))

    def _prepare(self, store: Store, tier: Tier) -> None:
        """Makes sure that reads come from `tier`, and not from memory."""
        settings, names = self.cache.settings, self.material.names
        folder = self.cache.folder
        if settings.tiers is not None and tier == "fast":
            for one in self.material.stored:
                self.cache.fast.fill(self.material.name(one), one.nbytes)
            folder = Path(local_path(settings.tiers.fast))
        elif (drop_copy := store.backends.drop_copy) is not None:
            for name in names:
                drop_copy(name)
        _drop(folder, names)

    def _add(
        self,
        operation: Operation,
        tier: Tier,
        at_a_time: int,
        blocks: int,
        times: Sequence[float],
        elapsed_s: float = 0.0,
        calls: int = 0,
    ) -> None:
        """Notes the speed of calls that took `times`; all of them, or `calls` of them, took `elapsed_s`."""
        nbytes = (calls or len(times)) * blocks * self.shape.block_bytes
        ordered = sorted(times)
        self.speeds.append(
            BenchSpeed(
                operation=operation,
                tier=tier,
                at_a_time=at_a_time,
                calls=len(times),
                blocks=blocks,
                p50_s=statistics.median(ordered),
                p99_s=ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
                bytes_s=nbytes / elapsed_s if elapsed_s else 0.0,
            )
        )

    def _most_segments(self) -> int:
        """Returns how many segments may be written: at least one."""
        settings = self.cache.settings
        most = min(_MOST_BYTES * self.seconds / 60, _MOST_BYTES, settings.capacity_bytes / 2)
        if self.cache.folder is not None:
            most = min(most, shutil.disk_usage(nearest_folder(self.cache.folder)).free / 4)
        if settings.tiers is not None:
            # The tier should keep what is hot in it.
            most = min(most, settings.tiers.fast_capacity / 8)
        return max(1, min(_MOST_SEGMENTS, int(most // self.shape.segment_bytes)))

    def _remove_abandoned(self, store: Store) -> None:
        before = time.time() - _ABANDONED_S
        space = self.material.id
        old = [each for each in store.maintenance.segments(space) if each.record.created_s < before]
        self._forget([each.segment for each in old])
        names = [listed.name for listed in store.payloads.list(f"{space}/") if listed.modified_s < before]
        store.payloads.delete(names)

    def _forget(self, segments: list[SegmentId]) -> None:
        """Removes segments from the index as if they had never been there, and leaves their payloads."""
        index, space = self.cache.made_index(), self.material.id
        index.evict(space, segments, delete_after_s=0, rule="admin")
        index.reaped(space, segments)
        # All entries of this namespace dangle, but a sweep may begin anywhere.
        idle = 0
        while idle < 2:
            idle = 0 if index.sweep(space, 4096) else idle + 1

    def clean(self) -> None:
        """Removes everything that this run has made."""
        names = self.material.names
        if not names:
            return
        where = f"{len(names)} payloads of {size(self.shape.segment_bytes)} in namespace {self.material.id}"
        self.left_behind = where
        self.progress.begin("bench: cleaning up")
        try:
            self._forget([stored.segment for stored in self.material.stored])
        finally:
            # Copies in a fast tier are deleted as well.
            everywhere = self.cache.payloads if self.cache.settings.tiers is None else self.cache.fast
            everywhere.delete(names)
        self.left_behind = ""

    def report(self, seconds: float) -> BenchReport:
        """Returns what is known so far."""
        settings, shape = self.cache.settings, self.shape
        return BenchReport(
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
            speeds=tuple(self.speeds),
            left_behind=self.left_behind,
        )


@dataclass
class _Calls:
    """The times of calls, from any thread."""

    times: list[float] = field(default_factory=list)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times what is done within, if it succeeds."""
        began = time.perf_counter()
        yield
        self.times.append(time.perf_counter() - began)


def _drop(folder: Path | None, names: Iterable[str]) -> None:
    """Drops these files of a payload folder from the page cache, as far as their file system can.

    It never fails: at worst they are read from memory.
    """
    if folder is None or not hasattr(os, "posix_fadvise"):
        return
    for name in names:
        with suppress(OSError):
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Only what is on the disk can be dropped.
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
