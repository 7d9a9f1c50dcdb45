"""doctor: tries everything that can be wrong with a store, and says what to do about it.

Each check is a generator of findings. A check that depends on something that has failed already is left out:
one broken thing is one problem, not ten.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Literal

from kvstore import __version__
from kvstore.admin.backends import Cache, Sources
from kvstore.admin.described import fields_of
from kvstore.admin.doctor.first_look import too_small
from kvstore.admin.doctor.machine import check_disk, check_file_systems, check_redis, check_versions
from kvstore.admin.doctor.maintenance import (
    check_contents,
    check_maintenance,
    check_quotas,
    check_sketch,
    check_writers,
)
from kvstore.admin.doctor.payloads import (
    check_access,
    check_bucket,
    check_fast_tier,
    check_payloads,
    to_be_made,
)
from kvstore.admin.doctor.reports import Check, CheckState, DoctorReport
from kvstore.admin.doctor.signing import check_signatures, check_signing
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    TransientError,
)
from kvstore.index.maintenance import FullIndex
from kvstore.keys import DIGEST_BYTES, NamespaceId
from kvstore.verify.payloads import are_there
from schemas.base import redact

_PINGS = 21
#: A match slower than this, in seconds, is reported: it is on the path of every request.
_SLOW_S = 0.005
_SAMPLE = 8
_NO_NAMESPACE = NamespaceId("0" * 16)
#: Advice for a backend's error; the first kind that fits counts.
_ADVICE: dict[str, dict[type[KVStoreError], str]] = {
    "redis": {
        PermissionDenied: "check KVSTORE_REDIS__USERNAME, KVSTORE_REDIS__PASSWORD and that user's rights: "
        "keys kvs:*, reading, writing, scripts",
        CapacityExceeded: "Redis is full: raise its maxmemory, or lower capacity_bytes",
        DeadlineExceeded: "nothing answers in time: check host, port, network policies and Redis' load",
        TransientError: "check that it runs and that host and port are right; engines meanwhile compute "
        "everything themselves",
    },
    "sqlite": {
        PermissionDenied: "give the engines' user the right to write the file and its folder, or run as it",
        CapacityExceeded: "the disk is full: make room, or lower capacity_bytes",
        DeadlineExceeded: "another process keeps the file locked; who has it open? (fuser FILE)",
        TransientError: "check the disk and its mount; the file may be deleted, the cache then refills",
    },
}
_RANKING: dict[CheckState, int] = {"ok": 0, "warning": 1, "problem": 2}


def doctor(
    cache: Cache,
    sources: Sources,
    *,
    clock: Callable[[], float] = time.time,
    mounts: str | None = None,
    progress: ProgressListener | None = None,
) -> DoctorReport:
    """Runs all checks. An error of a backend is reported as a problem. `mounts` replaces /proc/mounts."""
    if mounts is None:
        mounts = _read_mounts()
    checks = tuple(_checks(cache, sources, clock, mounts, progress or Silent()))
    return DoctorReport(
        version=__version__,
        index=redact(cache.settings.index_url),
        payloads=redact(cache.settings.origin),
        fast=redact(cache.settings.tiers.fast) if cache.settings.tiers else None,
        state=max((check.state for check in checks), key=lambda state: _RANKING[state]),
        checks=checks,
    )


def _checks(
    cache: Cache,
    sources: Sources,
    clock: Callable[[], float],
    mounts: str,
    progress: ProgressListener,
) -> Iterator[Check]:
    yield from check_settings(cache, sources)
    progress.begin("asking the index")
    index = list(check_index(cache))
    yield from index
    index_works = all(check.state != "problem" for check in index)
    progress.begin("asking the payload store")
    payloads = list(check_payloads(cache, clock))
    yield from payloads
    yield from _or_problem("fast tier", check_fast_tier(cache))
    yield from _or_problem("access", check_access(cache))
    payloads_work = all(check.state != "problem" for check in payloads)
    signing = list(_or_problem("signing", check_signing(cache)))
    yield from signing
    signing_works = all(check.state != "problem" for check in signing)
    if payloads_work:
        yield from _or_problem("bucket", check_bucket(cache))
    progress.begin("looking at what is stored")
    yield from check_file_systems(cache, mounts)
    yield from check_versions()
    if index_works:
        yield from _or_problem("index", check_redis(cache, clock))
        yield from _or_problem("disk", check_disk(cache))
        yield from _or_problem("namespaces", check_hashing(cache, sources.environ))
        yield from _or_problem("writers", check_writers(cache))
        yield from _or_problem("capacity", check_quotas(cache, clock))
        yield from _or_problem("upkeep", check_maintenance(cache, clock))
        yield from _or_problem("admission", check_sketch(cache, clock))
    if index_works and payloads_work:
        yield from _or_problem("contents", check_contents(cache))
        yield from _or_problem("agreement", check_agreement(cache))
    if index_works and payloads_work and signing_works:
        yield from _or_problem("signatures", check_signatures(cache))


def _or_problem(name: str, checks: Iterator[Check]) -> Iterator[Check]:
    try:
        yield from checks
    except (KVStoreError, OSError) as exc:
        yield Check(name=name, state="problem", found=str(exc), advice="run `cache-admin doctor` again")


def check_settings(cache: Cache, sources: Sources) -> Iterator[Check]:
    """Checks for values that can hardly be meant, and says where the settings come from."""
    settings = cache.settings
    found = f"from {sources.describe() or 'defaults'}"
    if small := too_small(settings):
        yield Check(
            name="settings",
            state="problem",
            found="; ".join(small.values()),
            advice=f"every save would evict the one before: raise {' and '.join(small)}",
        )
    elif settings.index_url.startswith("memory:"):
        yield Check(
            name="settings",
            state="warning",
            found=f"{found}; memory:// lasts as long as one process",
            advice="it is for tests: give --payloads file:///DIR",
        )
    elif settings.origin.startswith("s3:") and settings.index_url.startswith("sqlite:"):
        yield Check(
            name="settings",
            state="warning",
            found=f"{found}; payloads are in a bucket, and the index is a file of this machine",
            advice="other machines find nothing in the bucket: give all of them one redis:// index",
        )
    else:
        yield Check(name="settings", state="ok", found=found)


def check_index(cache: Cache) -> Iterator[Check]:
    """Checks whether the index can be read and written, how fast it answers, and what it warns of."""
    if cache.index_file is not None and cache.index_absent:
        yield to_be_made("index", cache.index_file.parent, "the index")
        return
    try:
        index = cache.index
        assert index is not None
        index.ping()
        times = sorted(_timed(index) for _ in range(_PINGS))
    except KVStoreError as exc:
        yield Check(
            name="index",
            state="problem",
            found=str(exc),
            advice=_advice(exc, "sqlite" if cache.index_file else "redis"),
        )
        return
    middle = statistics.median(times)
    slow = middle > _SLOW_S
    yield Check(
        name="index",
        state="warning" if slow else "ok",
        found=f"read and written; answers in {middle * 1e3:.2f} ms (median of {_PINGS}; "
        f"the slowest {times[-1] * 1e3:.2f} ms)",
        advice="every request asks the index once, and takes longer than kv.match_deadline_s "
        f"({cache.settings.kv.match_deadline_s:g} s) for a miss: bring the two closer together"
        if slow
        else "",
    )
    yield from _or_problem("index configuration", _warnings(index))


def _timed(index: FullIndex) -> float:
    began = time.perf_counter()
    index.match(_NO_NAMESPACE, bytes(DIGEST_BYTES))
    return time.perf_counter() - began


def _warnings(index: FullIndex) -> Iterator[Check]:
    for text in index.warnings():
        found, _, advice = text.partition("; ")
        yield Check(name="index configuration", state="warning", found=found, advice=advice)


def check_hashing(cache: Cache, environ: Mapping[str, str]) -> Iterator[Check]:
    """Checks whether engines start their block hashes from different seeds, and so never share."""
    seed = environ.get("PYTHONHASHSEED")
    here = "PYTHONHASHSEED is not set here" if seed is None else f"PYTHONHASHSEED is {seed!r} here"
    alike: dict[str, list[str]] = defaultdict(list)
    algorithms = set()
    for name, text in cache.namespaces().items():
        fields = fields_of(text)
        if fields.get("kind") == "kv":
            fields.pop("hash_root", None)
            algorithms.add(str(fields.get("hash_algo")))
            alike[json.dumps(fields, sort_keys=True)].append(name)
    apart = [names for names in alike.values() if len(names) > 1]
    for first, second, *_ in apart:
        yield Check(
            name="hashing",
            state="warning",
            found=f"namespaces {first} and {second} differ in hash_root only; {here}",
            advice="their engines run with different PYTHONHASHSEED and share nothing: set it alike in all, "
            "or in none",
        )
    if not apart:
        used = f"; in use: {', '.join(sorted(algorithms))}" if algorithms else ""
        yield Check(name="hashing", state="ok", found=f"{here}; it must be alike in every engine{used}")


def check_agreement(cache: Cache) -> Iterator[Check]:
    """Checks whether a sample of the index's segments is in this payload store, by size."""
    if cache.index is None:
        return
    looked, lost = 0, []
    for name in cache.namespaces():
        for listing in islice(cache.index.segments(name), _SAMPLE):
            looked += 1
            there = are_there(cache.payloads, name, listing.segment, listing.record.parts)
            # A segment that was evicted meanwhile may have lost its payloads.
            if not there and cache.index.get(name, [listing.segment])[0]:
                lost.append(listing.segment.hex())
    if lost:
        back = cache.settings.tiers is not None and cache.settings.tiers.write == "back"
        waiting = "with write: back another node may still have to upload them; if they stay missing: "
        yield Check(
            name="agreement",
            state="warning" if back else "problem",
            found=f"{len(lost)} of {looked} sampled segments have no payload, or one of another size, such "
            f"as {lost[0]}",
            advice=f"{waiting if back else ''}do this index and these payloads belong together? `cache-admin "
            f"show {lost[0]}` says what is wrong with it",
        )
    elif looked:
        yield Check(name="agreement", state="ok", found=f"{looked} sampled segments have their payloads")


def _advice(exc: KVStoreError, what: Literal["redis", "sqlite"]) -> str:
    for kind, advice in _ADVICE[what].items():
        if isinstance(exc, kind):
            return advice
    return "correct the settings" if isinstance(exc, ConfigError) else ""


def _read_mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux: the checks that need it have nothing to say
