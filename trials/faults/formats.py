"""Stores that another version of kvstore has written, and namespaces that differ in one thing.

What is of an older version is served, or comes back with `rebuild`. What is of a newer one is refused in
words and left alone, so that the newer one finds all of it again.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.index.scripted.values import SCHEMA, SHARDED_SCHEMA
from kvstore.index.sqlite.file import SCHEMA_VERSION
from schemas.namespace import Parallel
from tests.format.test_signing import rewritten
from tests.servers.redis import RedisServer
from tests.store.ground import CHAINS, NEW, ONE, Ground, ids, open_space
from tests.store.world import SHAPE, SLOT_BYTES, chain, content, fetch, keys, match
from trials.faults.row import Result
from trials.faults.verbs import rebuild_index

#: All that a ground holds: blocks by chain.
FULL = {f"{which} {number}": 4 for which, number in CHAINS} | {
    f"{which} {number}": 2 for which, number in NEW
}
_KEY = "ab" * 32


def _seen(result: Result, seen: dict[str, Any], expected: dict[str, int]) -> None:
    """Counts a look that must find what is expected, all of it readable."""
    result.requests += len(expected)
    result.wrong_tokens += seen["wrong"]
    result.lost_blocks += seen["unreadable"]
    result.lost_blocks += sum(max(0, most - seen["blocks"][name]) for name, most in expected.items())
    result.wrong_tokens += sum(max(0, seen["blocks"][name] - most) for name, most in expected.items())


def _tidy(ground: Ground) -> None:
    """What a janitor and fsck do that don't know what this is."""
    for _ in range(2):
        with contextlib.suppress(KVStoreError):
            ground.settle()


@contextmanager
def _words(logger: str) -> Iterator[list[str]]:
    """What is logged meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    found = logging.getLogger(logger)
    found.addHandler(handler)
    try:
        yield said
    finally:
        found.removeHandler(handler)


def one_field(place: Path) -> Result:
    """The same block hashes are saved in namespaces that differ in one field each, with other bytes."""
    ground, result, blocks = Ground({"payloads": f"file://{place}/payloads"}), Result(), chain(1, 2, 3, 4)
    more = {"tp": {"parallel": Parallel(tp=2)}, "pp": {"parallel": Parallel(dcp=2)}}
    fields: dict[str, dict[str, Any]] = {
        name: {name: value}
        for name, value in {
            "tenant": "other", "model": "other", "revision": "other", "weights": "other", "config": "other",
            "dtype": "float16", "quantization": "fp8", "block_tokens": 16, "hash_algo": "sha256_cbor",
            "hash_root": "other", "kv_dtype": "fp8_e5m2", "page_order": "LNHC", "page_format": "cuda",
            "epoch": 1, "codec": "lz4",
        }.items()
    }  # fmt: skip
    spaces = {"same": ONE} | {name: ONE.model_copy(update=change) for name, change in (fields | more).items()}

    def bytes_of(name: str, block: bytes) -> bytes:
        return content(name.encode() + block)

    with ground.store() as store:
        opened = {name: store.open(made, block_bytes=SLOT_BYTES) for name, made in spaces.items()}
        assert len({space.id for space in opened.values()}) == len(spaces), "two of them have one name"
        for name, space in opened.items():
            result.wrong_tokens += match(space, blocks).blocks
            made = [
                Slot(key, memoryview(bytes_of(name, block)), "BF16", SHAPE)
                for key, block in zip(keys(blocks), blocks, strict=True)
            ]
            space.save(made)
            result.faults += 1
        gone = spaces.keys() - {"same"}
        for name, space in opened.items():
            got = fetch(space, blocks, match(space, blocks))
            result.lost_blocks += len(blocks) - len(got)
            result.wrong_tokens += sum(a != bytes_of(name, b) for a, b in zip(got, blocks, strict=False))
            result.requests += 2
        for name in gone:
            opened[name].forget()
        got = fetch(opened["same"], blocks, match(opened["same"], blocks))
        result.lost_blocks += len(blocks) - len(got)
    result.leaked = len(ground.leaks())
    result.remark = f"{len(gone)} fields"
    return result


def older_segments(place: Path) -> Result:
    """Segments of format 1 are read by a process that signs, and so writes format 2."""
    plain = Ground({"payloads": f"file://{place}/payloads"})
    folder, result = place / "keys", Result()
    folder.mkdir()
    (folder / "a").write_text(_KEY)
    (folder / "a").chmod(0o600)
    more = {"signing": {"key": "a", "keys": str(folder), "unsigned": "accept"}}
    signing = replace(plain, settings=plain.settings | more)
    plain.fill()
    _seen(result, signing.look(), FULL)
    with signing.store() as store:
        for which, number in NEW:
            signing.save(store, which, number)
    all_of_it = dict.fromkeys(FULL, 4)
    _seen(result, signing.look(), all_of_it)
    _tidy(signing)
    _seen(result, signing.look(), all_of_it)
    result.faults, result.leaked = len(CHAINS + NEW), len(signing.leaks())
    return result


def newer_segments(place: Path) -> Result:
    """Segments of a format that this version doesn't know: misses, which nobody evicts or deletes."""
    ground, result = Ground({"payloads": f"file://{place}/payloads"}), Result()
    ground.fill()
    files = [path for path in (place / "payloads").glob("*/??/*") if path.name.endswith(".0")]
    before = {path: path.read_bytes() for path in files}

    def newer(document: dict[str, Any]) -> None:
        document["__metadata__"] |= {"format": "3"}

    for path, data in before.items():
        path.write_bytes(rewritten(data, newer))
        result.faults += 1
    with _words("kvstore") as said:
        seen = ground.look()
    result.wrong_tokens += seen["wrong"]
    if not any("reads up to 2: upgrade" in text for text in said):
        result.faults = 0
    _tidy(ground)
    result.leaked += sum(not path.exists() for path in files)
    for path, data in before.items():
        path.write_bytes(data)
    _seen(result, ground.look(), FULL)
    result.remark = "refused in words: of format 3, and this version reads up to 2: upgrade"
    return result


def older_sqlite(place: Path) -> Result:
    """An index of an older schema begins anew, and `rebuild` brings back what it held."""
    ground, result = Ground({"payloads": f"file://{place}/payloads"}), Result(faults=1)
    ground.fill()
    _stamp(place / "payloads" / "index.sqlite", SCHEMA_VERSION - 1)
    with _words("kvstore.index.sqlite") as said:
        _seen(result, ground.look(), {})
    if not any("`cache-admin rebuild --apply`" in one for one in said):
        result.faults = 0
    rebuild_index(ground)
    _seen(result, ground.look(), FULL)
    _tidy(ground)
    result.leaked = len(ground.leaks())
    result.remark = f"empty after schema {SCHEMA_VERSION - 1}; rebuild brings it back"
    return result


def newer_sqlite(place: Path) -> Result:
    """An index of a newer schema is refused in words, and stays as it is."""
    ground, result = Ground({"payloads": f"file://{place}/payloads"}), Result(faults=1)
    ground.fill()
    index = place / "payloads" / "index.sqlite"
    _stamp(index, SCHEMA_VERSION + 1)
    before, said = index.read_bytes(), ""
    try:
        with ground.store() as store:
            ground.save(store, *NEW[0])
    except KVStoreError as exc:
        said = str(exc)
    if "made by a newer kvstore" not in said:
        result.faults = 0
    _tidy(ground)
    result.leaked += index.read_bytes() != before
    _stamp(index, SCHEMA_VERSION)
    _seen(result, ground.look(), FULL)
    result.remark = f"refused in words: {said.partition(': ')[2]}"
    return result


def _stamp(index: Path, version: int) -> None:
    with closing(sqlite3.connect(index)) as db:
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.commit()


@contextmanager
def _on_redis(place: Path) -> Iterator[tuple[Ground, redis.Redis]]:
    with RedisServer(place / "redis") as server, redis.Redis.from_url(server.url, protocol=2) as client:
        ground = Ground({"payloads": f"file://{place}/payloads", "index": server.url})
        ground.fill()
        yield ground, client


def older_redis(place: Path) -> Result:
    """A namespace of schema 1 begins anew, and `rebuild` brings back what it held."""
    result = Result(faults=len(ids()))
    with _on_redis(place) as (ground, client):
        for name in ids().values():
            meta = f"kvs:{{{name}}}:meta"
            # As it was called then.
            client.hset(meta, mapping={"schema": "1", "bits": client.hget(meta, "bucket_bits") or b""})
            client.hdel(meta, "bucket_bits")
        seen = ground.look()
        result.wrong_tokens += seen["wrong"] + sum(seen["blocks"].values())
        # An engine of this version comes.
        with ground.store() as store:
            for which in ids():
                open_space(store, which).register()
        rebuild_index(ground)
        _seen(result, ground.look(), FULL)
        _tidy(ground)
        _seen(result, ground.look(), FULL)
        result.leaked = len(ground.leaks())
    return result


def newer_redis(place: Path) -> Result:
    """A namespace of a newer schema is nothing to this release: no match, no save, no waste."""
    result = Result(faults=len(ids()))
    with _on_redis(place) as (ground, client):
        payloads = set((place / "payloads").glob("*/??/*"))
        bits = {name: client.hget(f"kvs:{{{name}}}:meta", "bucket_bits") for name in ids().values()}
        for name in bits:
            client.hset(f"kvs:{{{name}}}:meta", "schema", SHARDED_SCHEMA + 1)
            client.hdel(f"kvs:{{{name}}}:meta", "bucket_bits")
        seen, said = ground.look(), ""
        result.wrong_tokens += seen["wrong"] + sum(seen["blocks"].values())
        try:
            with ground.store() as store:
                ground.save(store, *NEW[0])
        except KVStoreError as exc:
            said = str(exc)
        if "newer" not in said:
            result.faults = 0
        _tidy(ground)
        result.leaked += len(payloads - set((place / "payloads").glob("*/??/*")))
        for name, number in bits.items():
            client.hset(f"kvs:{{{name}}}:meta", mapping={"schema": SCHEMA, "bucket_bits": number or b""})
        _seen(result, ground.look(), FULL)
        result.remark = f"refused in words: {said.partition('register: ')[2]}"
    return result


RUNS: dict[str, Callable[[Path], Result]] = {
    "namespaces that differ in one field, with the same block hashes": one_field,
    "kvstore's segments of an older format": older_segments,
    "kvstore's segments of a newer format": newer_segments,
    "kvstore's index in SQLite, of an older schema": older_sqlite,
    "kvstore's index in SQLite, of a newer schema": newer_sqlite,
    "kvstore's index in Redis, of an older schema": older_redis,
    "kvstore's index in Redis, of a newer schema": newer_redis,
}
