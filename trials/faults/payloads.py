"""The payloads fail: in a bucket, in a folder, and in a folder in front of a bucket."""

from __future__ import annotations

import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tests.servers.redis import RedisServer
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.ceph import CephServer
from tests.servers.s3.proxy import S3Proxy
from tests.servers.s3.servers import MotoServer, S3Server
from trials.faults.bed import PATIENT, Bed, bed, merged
from trials.faults.disks import disk, full, not_mounted, read_only
from trials.faults.index import redis_bed
from trials.faults.row import Result, Row
from trials.faults.trial import AGAIN, AT_ONCE, DOWN, LOAD, TURN, Fault, on

Made = Iterator[Callable[[], int]]


@contextmanager
def bucket_bed() -> Iterator[Bed]:
    """A bucket of a real S3 server, behind a proxy, and Redis."""
    with _bucket() as (parts, settings, direct, top):
        with bed(parts, settings, direct, top / "none") as made:
            yield made


@contextmanager
def tier_bed() -> Iterator[Bed]:
    """The same with a folder in front, on a disk of its own."""
    with _bucket() as (parts, settings, direct, top), disk(top / "fast") as mounted:
        tiers = {"fast": f"file://{top}/fast", "slow": settings["payloads"], "fast_capacity": "128MiB"}
        settings = settings | {"payloads": tiers}
        direct = direct | {"payloads": tiers | {"slow": direct["payloads"]}}
        with bed(parts, settings, direct, top / "fast", mounted=mounted) as made:
            yield made


@contextmanager
def _bucket() -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any], Path]]:
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        redis = stack.enter_context(RedisServer(top / "redis"))
        server: S3Server = stack.enter_context(MotoServer() if CephServer.missing() else CephServer())
        proxy = stack.enter_context(S3Proxy(server.endpoint))
        bucket = server.new_bucket()
        through = replace(bucket, endpoint=proxy.endpoint)
        settings = {"index": redis.url, "payloads": through.url, "s3": bucket.settings["s3"]}
        parts = {"redis": redis, "proxy": proxy, "s3": server, "bucket": bucket}
        direct = merged(PATIENT, {"payloads": bucket.url})
        yield parts, settings, direct, top


# ---- Damage -----------------------------------------------------------------------------------------


class Raw(Protocol):
    """Payloads without the store."""

    def get(self, key: str) -> bytes: ...
    def put(self, key: str, content: bytes) -> None: ...
    def delete(self, key: str) -> None: ...


class Files:
    """Payloads as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()

    def put(self, key: str, content: bytes) -> None:
        (self._folder / key).write_bytes(content)

    def delete(self, key: str) -> None:
        (self._folder / key).unlink()


#: What becomes of the bytes of a payload, given others of its namespace and of another one; None: it is gone.
Change = Callable[[bytes, bytes, bytes], bytes | None]


def damaged(change: Change) -> Fault:
    """Every payload of the victims is changed."""

    @contextmanager
    def fault(one: Bed, names: list[str]) -> Made:
        bucket: S3Bucket | None = one.parts.get("bucket")
        raw: Raw = bucket or Files(one.folder)
        here = sorted(one.names() - set(names))
        contents = {name: raw.get(name) for name in names}
        for name, content in contents.items():
            space = name.partition("/")[0]
            stale = raw.get(next(other for other in here if other.startswith(space)))
            foreign = next(text for other, text in contents.items() if not other.startswith(space))
            changed = change(content, stale, foreign)
            if changed is None:
                raw.delete(name)
            else:
                raw.put(name, changed)
        yield lambda: len(names)

    return fault


def _flipped(content: bytes, at: float) -> bytes:
    data = bytearray(content)
    data[int(at * (len(data) - 1))] ^= 1
    return bytes(data)


#: In words -> the change, and what it is counted as.
DAMAGE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "missing": (lambda content, stale, foreign: None, ("missing",)),
    "empty": (lambda content, stale, foreign: b"", ("corrupt",)),
    "truncated": (lambda content, stale, foreign: content[: len(content) // 2], ("corrupt",)),
    "a bit flipped in a block": (lambda content, stale, foreign: _flipped(content, 0.9), ("corrupt",)),
    "a bit flipped in the header": (lambda content, stale, foreign: _flipped(content, 0.001), ("corrupt",)),
    "foreign: whole, of another namespace": (
        lambda content, stale, foreign: foreign,
        ("corrupt", "namespace_mismatch"),
    ),
    "foreign: no segment at all": (
        lambda content, stale, foreign: random.Random(0).randbytes(len(content)),
        ("corrupt",),
    ),
    "stale: whole, an older one of this namespace": (
        lambda content, stale, foreign: stale,
        ("corrupt",),
    ),
}


@contextmanager
def something_else(one: Bed, names: list[str]) -> Made:
    """In the place of each payload there is a folder with something in it."""
    for name in names:
        path = one.folder / name
        path.unlink()
        path.mkdir()
        (path / "what").write_text("is this")
    yield lambda: len(names)
    for name in names:
        shutil.rmtree(one.folder / name, ignore_errors=True)


# ---- Disks ------------------------------------------------------------------------------------------


def of_disk(fault: Any) -> Fault:
    """The disk with the bed's folder has this fault."""
    return lambda one, names: fault(one.folder, one.mounted)


def slow_disk(seconds: float) -> Fault:
    """Every call of the folder takes so much longer, in the engine's process."""

    @contextmanager
    def fault(one: Bed, names: list[str]) -> Made:
        call = "__import__('trials.faults.inside', fromlist=['x']).slow_disk({})"
        one.engine.evaluate(call.format(seconds))
        yield lambda: 1
        one.engine.evaluate(call.format(0))

    return fault


@contextmanager
def out_of_descriptors(one: Bed, names: list[str]) -> Made:
    """The engine's process may not open anything more."""
    pid, which = one.engine.pid, resource.RLIMIT_NOFILE
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (3, before[1]))
    try:
        yield lambda: 1
    finally:
        resource.prlimit(pid, which, before)


@contextmanager
def out_of_sockets(one: Bed, names: list[str]) -> Made:
    """The same, and the connections that it has to the bucket end."""
    with out_of_descriptors(one, names) as made:
        one.parts["proxy"].refuse()
        one.parts["proxy"].heal()
        yield made


# ---- Buckets ----------------------------------------------------------------------------------------


def injected(fault: str, **options: Any) -> Fault:
    """The proxy does this to requests."""

    @contextmanager
    def make(one: Bed, names: list[str]) -> Made:
        proxy: S3Proxy = one.parts["proxy"]
        before = proxy.injected[fault]
        proxy.inject(fault, **options)
        try:
            yield lambda: proxy.injected[fault] - before
        finally:
            proxy.heal()

    return make


@contextmanager
def refused(one: Bed, names: list[str]) -> Made:
    one.parts["proxy"].refuse()
    try:
        yield lambda: 1
    finally:
        one.parts["proxy"].heal()


@contextmanager
def killed(one: Bed, names: list[str]) -> Made:
    """The server itself, every process of it."""
    one.parts["s3"].kill()
    yield lambda: 1
    one.parts["s3"].start()


@contextmanager
def hung_server(one: Bed, names: list[str]) -> Made:
    one.parts["s3"].pause()
    try:
        yield lambda: 1
    finally:
        one.parts["s3"].resume()


# ---- The fast tier ----------------------------------------------------------------------------------


@contextmanager
def copies_flipped(one: Bed, names: list[str]) -> Made:
    """Every copy in the fast tier has a bit flipped, at its end."""
    made = 0
    for path in one.folder.glob("*/??/*"):
        path.write_bytes(_flipped(path.read_bytes(), 1.0))
        made += 1
    yield lambda: made


@contextmanager
def emptied(one: Bed, names: list[str]) -> Made:
    """Everything in the fast tier's folder is deleted, its ledger too."""
    made = 0
    for path in one.folder.iterdir():
        made += 1
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    yield lambda: made


@contextmanager
def bucket_away_and_copies_flipped(one: Bed, names: list[str]) -> Made:
    with refused(one, names), copies_flipped(one, names) as made:
        yield made


def _row(fault: str, run: Callable[[Path], Result], *, quick: bool = False) -> Row:
    return Row("payloads", fault, "engine", run, quick)


def _damages(make: Any, where: str, quick: tuple[str, ...] = (), **more: Any) -> list[Row]:
    return [
        _row(
            f"{where}: {name}",
            on(make, damaged(change), AT_ONCE, met=met, damages=True, **more),
            quick=name in quick,
        )
        for name, (change, met) in DAMAGE.items()
    ]


#: What is counted where the fast tier takes no copy.
NO_COPY = ("tier_fast_errors", "tier_fills_skipped")

ROWS: list[Row] = [
    *_damages(redis_bed, "folder", quick=("missing", "a bit flipped in a block")),
    _row(
        "folder: something else in the place of a payload",
        on(redis_bed, something_else, AT_ONCE, met=("missing", "corrupt"), damages=True),
    ),
    _row("folder: disk full", on(redis_bed, of_disk(full), AT_ONCE, met=("capacity",))),
    _row("folder: disk read-only", on(redis_bed, of_disk(read_only), AT_ONCE, met=("permission",))),
    _row(
        "folder: not mounted for a while",
        on(redis_bed, of_disk(not_mounted), AT_ONCE, met=("missing",), damages=True),
    ),
    _row("folder: slow, 0.2 s a call", on(redis_bed, slow_disk(0.2), LOAD, first=True)),
    _row("folder: hung", on(redis_bed, slow_disk(600.0), LOAD, met=("deadline",), first=True)),
    _row(
        "folder: the engine is out of descriptors",
        on(redis_bed, out_of_descriptors, AT_ONCE, met=DOWN),
        quick=True,
    ),
    # A gateway that is asked for objects while they are overwritten is another fault: it stalls.
    *_damages(bucket_bed, "bucket", first=True),
    _row("bucket: slow, answers 0.3 s late", on(bucket_bed, injected("delay", seconds=0.3), LOAD)),
    _row("bucket: slow, 8 MB/s", on(bucket_bed, injected("slow", bytes_per_s=8e6), LOAD)),
    _row("bucket: dripping, 20 kB/s", on(bucket_bed, injected("slow", bytes_per_s=2e4), LOAD, met=DOWN)),
    _row("bucket: hung before an answer", on(bucket_bed, injected("hang"), LOAD, met=DOWN)),
    _row("bucket: hung within a body", on(bucket_bed, injected("hang_body"), LOAD, met=DOWN)),
    _row("bucket: the server hung", on(bucket_bed, hung_server, LOAD, met=DOWN)),
    _row("bucket: 503 Slow Down", on(bucket_bed, injected("status503"), TURN, met=("throttled",))),
    _row(
        "bucket: 503 Slow Down beyond 4 reads a second",
        on(bucket_bed, injected("status503", methods=("GET",), beyond_per_s=4.0), LOAD, met=("slow_downs",)),
    ),
    _row("bucket: 500 Internal Error", on(bucket_bed, injected("status500"), AGAIN, met=DOWN)),
    _row("bucket: 403 Forbidden", on(bucket_bed, injected("forbid"), AT_ONCE, met=("permission",))),
    _row("bucket: 404 No Such Bucket", on(bucket_bed, injected("no_bucket"), AGAIN, met=DOWN)),
    _row("bucket: 404 in HTML", on(bucket_bed, injected("html404"), AGAIN, met=DOWN)),
    _row(
        "bucket: 404 No Such Key, for a while",
        on(bucket_bed, injected("no_key", methods=("GET",)), AT_ONCE, met=("missing",), damages=True),
    ),
    _row("bucket: connections reset within a body", on(bucket_bed, injected("reset"), AGAIN, met=DOWN)),
    _row("bucket: answers cut short", on(bucket_bed, injected("truncate"), AGAIN, met=DOWN)),
    _row("bucket: shorter answers that agree", on(bucket_bed, injected("short"), AGAIN, met=DOWN)),
    _row(
        "bucket: a bit flipped on the way",
        on(bucket_bed, injected("flip"), AT_ONCE, met=("corrupt",), damages=True),
    ),
    _row("bucket: one answer in three lost", on(bucket_bed, injected("lost_answer", probability=0.3), AGAIN)),
    _row("bucket: connections refused", on(bucket_bed, refused, AGAIN, met=DOWN)),
    _row("bucket: the server killed, and back", on(bucket_bed, killed, AGAIN, met=DOWN)),
    _row("bucket: the engine is out of descriptors", on(bucket_bed, out_of_sockets, AGAIN, met=DOWN)),
    _row("fast tier: disk full", on(tier_bed, of_disk(full), AT_ONCE, met=NO_COPY)),
    _row("fast tier: disk read-only", on(tier_bed, of_disk(read_only), AT_ONCE, met=NO_COPY)),
    _row(
        "fast tier: a bit of every copy flipped",
        on(tier_bed, copies_flipped, AT_ONCE, met=("dropped_copies",)),
    ),
    _row("fast tier: everything in it deleted", on(tier_bed, emptied, AT_ONCE, met=("tier_hits_slow",))),
    _row("fast tier: bucket refuses connections", on(tier_bed, refused, AT_ONCE, met=DOWN)),
    _row(
        "fast tier: copies flipped, bucket refuses",
        on(tier_bed, bucket_away_and_copies_flipped, AGAIN, met=DOWN),
    ),
    _row("fast tier: bucket hung", on(tier_bed, injected("hang"), AT_ONCE)),
]
