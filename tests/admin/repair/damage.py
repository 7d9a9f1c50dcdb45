"""A cache with known contents, ways to damage it around the product, and an oracle that knows what is valid.

What is valid: a segment all of whose payloads lie in the store byte for byte as they were written, and that
nobody has evicted. Nothing else is known of how the product judges.
"""

from __future__ import annotations

import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import redis

from kvstore.admin.backends import Cache
from kvstore.build import load_settings, open_store
from kvstore.errors import CorruptPayload
from kvstore.format import segment as codec
from kvstore.format.segment import Slot
from kvstore.index.scripted.values import key as key_of
from kvstore.index.sqlite.client import SqliteClient
from kvstore.index.sqlite.file import IndexFile
from kvstore.keys import (
    NO_SALT,
    ContentKey,
    Digest,
    NamespaceId,
    SaltId,
    SegmentId,
    block_key,
    canonical_json,
    digest,
    namespace_id,
    new_segment_id,
    payload_name,
    writer_id,
)
from schemas.namespace import GroupSpec, Namespace, Parallel
from schemas.records import SegmentRecord
from tests.servers.s3.bucket import S3Bucket
from tests.store.world import item
from tests.waiting import PATIENCE_S

#: Old enough for everything, and the time of all writes.
CREATED_S = 1_700_000_000
_SHAPE = (2, 2, 8, 4)
_BYTES = 2 * 2 * 8 * 4 * 2


def kv(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "kind": "kv", "model": "tiny", "weights": "w", "dtype": "bfloat16", "block_tokens": 8,
        "hash_algo": "sha256", "hash_root": "r", "kv_dtype": "auto", "page_order": "LHNC",
        "groups": (GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=_SHAPE, shards=1),),
    }  # fmt: skip
    return Namespace(**fields | changes)


KV = kv()
TWO_RANKS = kv(
    parallel=Parallel(tp=2),
    groups=(GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=_SHAPE, shards=2),),
)
ITEMS = Namespace(kind="ec", model="eyes", weights="e", dtype="float32", codec="lz4")


class RawObjects(ABC):
    """The payload store's storage, reached without it."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def get(self, name: str) -> bytes | None: ...

    @abstractmethod
    def delete(self, name: str) -> None: ...


class RawFolder(RawObjects):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


class RawBucket(RawObjects):
    def __init__(self, bucket: S3Bucket) -> None:
        self.bucket = bucket

    def put(self, name: str, data: bytes) -> None:
        self.bucket.put(name, data)

    def get(self, name: str) -> bytes | None:
        try:
            return self.bucket.get(name)
        except KeyError:
            return None

    def delete(self, name: str) -> None:
        self.bucket.client().delete_object(Bucket=self.bucket.bucket, Key=self.bucket.name(name))


class RawIndex:
    """The index's storage, written to as nobody should, command by command."""

    def __init__(self, command: Callable[..., Any]) -> None:
        self._command = command

    def _place(self, name: NamespaceId, digest: Digest) -> tuple[str, bytes] | None:
        told = self._command("HGET", key_of(name, "meta"), "bucket_bits")
        if told is None:
            return None
        bits = int(told)
        bucket = int.from_bytes(digest[:3], "big") >> (24 - bits)
        return key_of(name, f"b:{bucket:x}"), digest[bits // 8 :]

    def set_entry(self, name: NamespaceId, digest: Digest, segment: SegmentId, slot: int) -> None:
        if place := self._place(name, digest):
            self._command("HSET", *place, segment + slot.to_bytes(2, "big"))

    def remove_entry(self, name: NamespaceId, digest: Digest) -> None:
        if place := self._place(name, digest):
            self._command("HDEL", *place)

    def remove_record(self, name: NamespaceId, segment: SegmentId) -> None:
        self._command("HDEL", key_of(name, "segs"), segment)

    def change_record(self, name: NamespaceId, segment: SegmentId, change: Callable[[bytes], bytes]) -> None:
        value: bytes | None = self._command("HGET", key_of(name, "segs"), segment)
        if value is not None:
            # Behind "<bytes>:<slots>:", the first digest and the checksum.
            at = value.index(b":", value.index(b":") + 1) + 1 + 24
            self._command("HSET", key_of(name, "segs"), segment, value[:at] + change(value[at:]))

    def spoil_record(self, name: NamespaceId, segment: SegmentId, rng: random.Random) -> None:
        self.change_record(name, segment, lambda record: spoilt(record, rng))

    def break_record(self, name: NamespaceId, segment: SegmentId) -> None:
        """Make it one that no version can read."""
        self.change_record(name, segment, lambda record: b"\0" + record[1:])

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        self._command("HINCRBY", key_of(name, "meta"), "bytes", nbytes)

    def expire(self, name: NamespaceId) -> None:
        """Let the grace time of what is in the trash be over."""
        flat = self._command("ZRANGE", key_of(name, "trash"), 0, -1, "WITHSCORES")
        for segment, score in zip(flat[::2], flat[1::2], strict=True):
            self._command("ZADD", key_of(name, "trash"), 1 + float(score) % 1, segment)

    def forget_order(self, name: NamespaceId, segment: SegmentId) -> None:
        """Take it out of the order of eviction."""
        self._command("ZREM", key_of(name, "lru"), segment)


class RawRedis(RawIndex):
    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, protocol=2)
        super().__init__(self.client.execute_command)


class RawSqlite(RawIndex):
    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(SqliteClient(IndexFile(str(path), PATIENCE_S), time.time).command)


def spoilt(record: bytes, rng: random.Random) -> bytes:
    """A packed record that says something else: one byte of its head or of its sizes is another."""
    at = rng.choice([0, 5, 6, 8, 12, 16, 24, len(record) - 1])
    return record[:at] + bytes([record[at] ^ rng.randrange(1, 256)]) + record[at + 1 :]


@dataclass(frozen=True, slots=True, repr=False)
class Written:
    """One segment as it was written."""

    namespace: Namespace
    segment: SegmentId
    keys: tuple[ContentKey, ...]
    #: By rank.
    payloads: tuple[bytes, ...]
    record: SegmentRecord

    @property
    def name(self) -> NamespaceId:
        return namespace_id(self.namespace)

    @property
    def names(self) -> list[str]:
        return [payload_name(self.name, self.segment, rank) for rank in range(len(self.payloads))]

    @property
    def digests(self) -> list[Digest]:
        return [digest(key) for key in self.keys]


def content(namespace: Namespace, key: ContentKey, rank: int) -> bytes:
    """The one right content of a block or item."""
    if namespace.kind == "ec":
        return bytes(64) + hashlib.shake_128(key).digest(192)
    return hashlib.shake_128(key + bytes([rank])).digest(_BYTES // namespace.parts())


def chain(seed: object, count: int, start: Sequence[ContentKey] = ()) -> list[ContentKey]:
    keys, parent = list(start), start[-1] if start else str(seed).encode()
    while len(keys) < count:
        parent = block_key(hashlib.sha256(parent + str(seed).encode()).digest())
        keys.append(parent)
    return keys


@dataclass(repr=False)
class World:
    """`trashed` were evicted by somebody: their payloads are not the index's any more."""

    settings: dict[str, Any]
    objects: RawObjects
    raw: RawIndex
    written: list[Written] = field(default_factory=list)
    chains: list[tuple[Namespace, list[ContentKey]]] = field(default_factory=list)
    trashed: set[SegmentId] = field(default_factory=set)
    #: Objects that are none of the product's business, and must stay as they are.
    foreign: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Blocks of 256 bytes in a store of the default size would be millions of buckets.
        self.settings.setdefault("capacity_bytes", 16 << 20)
        self.settings.setdefault("redis", {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S})

    @classmethod
    def of(cls, folder: Path, redis_url: str | None = None, **settings: Any) -> Self:
        """An empty cache in a folder, its index in SQLite or in Redis."""
        settings["payloads"] = f"file://{folder}"
        if redis_url is None:
            return cls(settings, RawFolder(folder), RawSqlite(folder / "index.sqlite"))
        return cls({**settings, "index": redis_url}, RawFolder(folder), RawRedis(redis_url))

    @property
    def options(self) -> list[str]:
        """What names it on a command line."""
        index = ["--index", self.settings["index"]] if "index" in self.settings else []
        return ["--payloads", self.settings["payloads"], *index]

    def cache(self) -> Cache:
        return Cache(load_settings(self.settings, environ={}))

    def write(
        self,
        namespace: Namespace,
        keys: Sequence[ContentKey],
        depth: int,
        *,
        listed: bool | int = True,
        salt: SaltId = NO_SALT,
        created_s: int = CREATED_S,
    ) -> Written:
        """One segment: its payloads and, unless it is not to be listed, the commits of its ranks, or of so
        many of them."""
        ranks, segment = namespace.parts(), new_segment_id()
        encoded = [
            codec.encode(
                [self._slot(namespace, key, rank) for key in keys],
                namespace_json=canonical_json(namespace),
                kind=namespace.kind,
                segment=segment,
                rank=rank,
                ranks=ranks,
                codec=namespace.codec,
                depth=depth,
                created_s=created_s,
                writer="a test",
                cost_us=1024 * len(keys),
                salt=salt,
            )
            for rank in range(ranks)
        ]
        one = SegmentRecord(
            parts=tuple(each.part for each in encoded),
            slots=len(keys),
            codec=namespace.codec,
            created_s=created_s,
            depth=depth,
            raw_bytes=sum(len(content(namespace, key, 0)) for key in keys) if ranks == 1 else 0,
            cost_us=1024 * len(keys),
            salt=salt,
            writer=writer_id("a test"),
        )
        payloads = tuple(b"".join(each.buffers) for each in encoded)
        done = Written(namespace, segment, tuple(keys), payloads, one)
        for name, data in zip(done.names, payloads, strict=True):
            self.objects.put(name, data)
        if listed:
            with self.cache() as cache:
                index = cache.made_index()
                index.register(namespace, expected_blocks=10_000)
                packed = b"".join(done.digests)
                for rank, each in enumerate(encoded[: None if listed is True else listed]):
                    part = replace(one, parts=(each.part,))
                    index.commit(done.name, segment, packed, part, rank=rank, ranks=ranks)
        self.written.append(done)
        return done

    def _slot(self, namespace: Namespace, key: ContentKey, rank: int) -> Slot:
        data = memoryview(content(namespace, key, rank))
        if namespace.kind == "ec":
            return Slot(key, data, "F32", (4, 16))
        return Slot(key, data, "BF16", (2, 2 // namespace.parts(), 8, 4))

    def fill(self, rng: random.Random) -> None:
        """Two namespaces of chains that share their beginnings, some of it stored twice, and one of items."""
        for namespace in (KV, TWO_RANKS):
            trunk = chain("trunk", 6)
            for number in range(3):
                keys = chain(number, 18, trunk)
                self.chains.append((namespace, keys))
                depth = 0 if number == 0 or rng.random() < 0.5 else 6
                while depth < len(keys):
                    step = rng.randint(2, 6)
                    self.write(namespace, keys[depth : depth + step], depth)
                    depth += step
        for number in range(4):
            key = item(f"picture {number}")
            self.write(ITEMS, [key], 0)
            self.chains.append((ITEMS, [key]))

    # The oracle

    def whole(self, one: Written) -> bool:
        """Whether its payloads are what was written."""
        return all(self.objects.get(name) == data for name, data in zip(one.names, one.payloads, strict=True))

    def valid(self) -> list[Written]:
        return [one for one in self.written if one.segment not in self.trashed and self.whole(one)]

    def loads(self, *, complete: bool = False) -> None:
        """Every chain, as an engine loads it: right bytes or a miss. `complete`: no miss of what is valid."""
        held: dict[NamespaceId, set[ContentKey]] = {}
        for one in self.valid():
            held.setdefault(one.name, set()).update(one.keys)
        with closing(open_store(self.settings)) as store:
            # What is found bad here stays: the repair is to find it as it is.
            store.quarantine.tell = lambda namespace: None  # type: ignore[method-assign]
            for namespace, keys in self.chains:
                space = store.open(namespace, block_bytes=_BYTES)
                there = held.get(space.id, set())
                want = next((i for i, key in enumerate(keys) if key not in there), len(keys))
                for rank in range(namespace.parts()):
                    good = self._load(space, namespace, keys, rank)
                    assert not complete or good >= want, f"{good} of {want} blocks of {namespace.model}"

    def _load(self, space: Any, namespace: Namespace, keys: list[ContentKey], rank: int) -> int:
        found = space.match(b"".join(digest(key) for key in keys))
        good = 0
        for run in found.runs:
            wanted = keys[run.start : run.start + run.count]
            into = [memoryview(bytearray(len(content(namespace, key, rank)))) for key in wanted]
            try:
                space.load(run, wanted, into, rank=rank)
            except CorruptPayload:
                return good
            for key, view in zip(wanted, into, strict=True):
                assert bytes(view) == content(namespace, key, rank), "wrong bytes"
            good += run.count
        return good


Damage = Callable[[World, random.Random], None]


def _payload(world: World, rng: random.Random) -> tuple[str, bytes]:
    one = rng.choice(world.written)
    rank = rng.randrange(len(one.payloads))
    return one.names[rank], one.payloads[rank]


def delete(world: World, rng: random.Random) -> None:
    world.objects.delete(_payload(world, rng)[0])


def truncate(world: World, rng: random.Random) -> None:
    name, data = _payload(world, rng)
    world.objects.put(name, data[: rng.choice([0, 7, 4096, len(data) - 1, rng.randrange(len(data))])])


def lengthen(world: World, rng: random.Random) -> None:
    name, data = _payload(world, rng)
    world.objects.put(name, data + rng.randbytes(rng.randint(1, 50)))


def flip_header(world: World, rng: random.Random) -> None:
    name, data = _payload(world, rng)
    _flip(world, name, data, rng.randrange(4096), rng)


def flip_data(world: World, rng: random.Random) -> None:
    name, data = _payload(world, rng)
    _flip(world, name, data, rng.randrange(4096, len(data)), rng)


def _flip(world: World, name: str, data: bytes, at: int, rng: random.Random) -> None:
    world.objects.put(name, data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :])


def garbage(world: World, rng: random.Random) -> None:
    world.objects.put(_payload(world, rng)[0], rng.randbytes(rng.choice([0, 100, 9000])))


def anothers(world: World, rng: random.Random) -> None:
    """The whole payload of another segment under this one's name."""
    world.objects.put(_payload(world, rng)[0], _payload(world, rng)[1])


def stranger(world: World, rng: random.Random) -> None:
    """A segment's name that nobody has given, and no segment behind it."""
    name = payload_name(rng.choice(world.written).name, new_segment_id(), rng.randrange(3))
    world.objects.put(name, rng.randbytes(500))


def foreign(world: World, rng: random.Random) -> None:
    folder = world.written[0].names[0].rpartition("/")[0]
    name = rng.choice(["README.txt", "backup/old.tar", f"{folder}/notes.txt", f"{folder}/00.0.bak"])
    world.foreign[name] = rng.randbytes(100)
    world.objects.put(name, world.foreign[name])


def unlisted(world: World, rng: random.Random) -> None:
    """A writer that died between its put and its commit."""
    namespace = rng.choice([KV, TWO_RANKS])
    keys = chain(rng.random(), rng.randint(1, 5))
    world.write(namespace, keys, 0, listed=False)
    world.chains.append((namespace, keys))


def half_written(world: World, rng: random.Random) -> None:
    """One of two ranks died before its put."""
    done = world.write(TWO_RANKS, chain(rng.random(), 3), 0, listed=False)
    world.objects.delete(done.names[rng.randrange(2)])


def no_entry(world: World, rng: random.Random) -> None:
    one = rng.choice(world.written)
    for key in rng.sample(one.digests, rng.randint(1, len(one.digests))):
        world.raw.remove_entry(one.name, key)


def wrong_entry(world: World, rng: random.Random) -> None:
    """A block's entry leads to some other block, or nowhere."""
    one = rng.choice(world.written)
    other = rng.choice([each for each in world.written if each.name == one.name])
    target = rng.choice([other.segment, other.segment, new_segment_id()])
    world.raw.set_entry(one.name, rng.choice(one.digests), target, rng.choice([0, 1, 2, 60_000]))


def invented_entry(world: World, rng: random.Random) -> None:
    """An entry of a block that nobody has stored."""
    one = rng.choice(world.written)
    target = rng.choice([one.segment, new_segment_id()])
    world.raw.set_entry(one.name, Digest(rng.randbytes(16)), target, rng.randrange(len(one.keys)))


def no_record(world: World, rng: random.Random) -> None:
    one = rng.choice(world.written)
    world.raw.remove_record(one.name, one.segment)


def wrong_record(world: World, rng: random.Random) -> None:
    one = rng.choice(world.written)
    world.raw.spoil_record(one.name, one.segment, rng)


def miscount(world: World, rng: random.Random) -> None:
    world.raw.miscount(rng.choice(world.written).name, rng.choice([-4096, 1, 123_456]))


def out_of_order(world: World, rng: random.Random) -> None:
    one = rng.choice(world.written)
    world.raw.forget_order(one.name, one.segment)


def evicted(world: World, rng: random.Random) -> None:
    """No damage: it waits for its grace time, and must not come back."""
    one = rng.choice(world.written)
    with world.cache() as cache:
        assert cache.index is not None
        if cache.index.evict(one.name, [one.segment], delete_after_s=2e9, rule="admin"):
            world.trashed.add(one.segment)


PAYLOADS: list[Damage] = [
    delete, truncate, lengthen, flip_header, flip_data, garbage, anothers, stranger, foreign, unlisted,
    half_written,
]  # fmt: skip
INDEX: list[Damage] = [
    no_entry, wrong_entry, invented_entry, no_record, wrong_record, miscount, out_of_order, evicted,
]  # fmt: skip
