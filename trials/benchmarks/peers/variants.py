"""What is compared: each a vLLM engine with a cache, its servers, and what can be done to them. The peers
are in files of their own.

Engines and servers are those of the comparison under faults (trials.faults.peer_systems).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.redis import RedisServer
from tests.servers.s3.servers import S3Server
from trials.faults.peer_faults import World, run
from trials.faults.peer_systems import VLLM, KVStore, System

#: Pool of a cache in memory.
POOL_BYTES = 1 << 30
#: Bytes that a Redis which is full has left.
_LITTLE_REDIS = 256 << 10


class Variant(System):
    """An engine with a cache. `close` ends what `stop` leaves for the next engine."""

    what: ClassVar[str] = "every prompt is computed"
    uses_redis: ClassVar[bool] = False
    uses_s3: ClassVar[bool] = False
    #: Whether the engine's own blocks are forgotten before it is asked again.
    forgets: ClassVar[bool] = True
    #: Whether anything outlives an engine.
    keeps: ClassVar[bool] = True
    #: Why it is not put through a fault.
    cannot: ClassVar[Mapping[str, str]] = {"index killed": "n/a: in the engine"}

    def __init__(self, scratch: Path, s3: S3Server | None) -> None:
        folder, logs = scratch / "store", scratch / "logs"
        folder.mkdir(parents=True)
        redis = RedisServer(scratch / "redis").start() if self.uses_redis else None
        super().__init__(folder, logs, redis)
        self._s3 = s3
        self.bucket = s3.new_bucket() if s3 is not None and self.uses_s3 else None
        self._world = World(self, folder, redis)
        self.open()

    @classmethod
    def missing(cls) -> str:
        """Why it can't be run here; empty if it can."""
        return ""

    def open(self) -> None:
        """Starts what engines need to be there."""

    def close(self) -> None:
        self.stop()
        for steps in (self._world.undo, self._world.clear):
            self._world.put_back(steps)
        if self.redis is not None:
            self.redis.kill()
        if self.bucket is not None:
            for key, _ in self._objects():
                self.bucket.client().delete_object(Bucket=self.bucket.bucket, Key=key)

    def own(self) -> list[int]:
        """The processes of its own servers."""
        return []

    def servers(self) -> list[int]:
        """The processes besides the engine's that store, look up or serve."""
        found = self.own()
        if self.redis is not None and self.redis.running:
            found.append(self.redis.pid)
        if self.bucket is not None and self._s3 is not None:
            found += [process.pid for process in self._s3.processes if process.poll() is None]
        return found

    def stored_bytes(self) -> int | None:
        """What it takes to store, its index in Redis left out; None where nobody tells."""
        if self.bucket is not None:
            return sum(size for _, size in self._objects())
        return sum(path.stat().st_size for path in self.files())

    def signature(self) -> object:
        return super().signature(), self._objects() if self.bucket is not None else None

    def flip(self) -> None:
        """Flips bytes in each file and object while no engine runs."""
        for path in self.files():
            path.write_bytes(flipped(path.read_bytes()))
        for key, _ in self._objects() if self.bucket is not None else ():
            client, where = self.bucket.client(), {"Bucket": self.bucket.bucket, "Key": key}
            client.put_object(**where, Body=flipped(client.get_object(**where)["Body"].read()))

    def kill_index(self) -> None:
        """`kill -9` of what look-ups ask, while the engine runs."""
        assert self.redis is not None
        self.redis.kill()

    def fill(self, nbytes: int) -> None:
        """Leaves room for so much of what is to be stored; in an index in Redis, for next to nothing."""
        if self.redis is None:
            run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", self.folder)
            self._world.clear.append(lambda: run("umount", "--lazy", self.folder))
        else:
            leave(self.redis, _LITTLE_REDIS)

    def _objects(self) -> list[tuple[str, int]]:
        assert self.bucket is not None
        pages = self.bucket.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket.bucket)
        return [(one["Key"], one["Size"]) for page in pages for one in page.get("Contents", ())]


class Nothing(Variant):
    name = "no cache"
    keeps = False


class Local(Nothing):
    name = "vLLM's prefix cache"
    what = "a hit in the engine's own blocks"
    forgets = False


class Folder(Variant, KVStore):
    name = "kvstore, folder"
    what = "a folder with SQLite inside"

    def _arguments(self, number: int) -> dict[str, Any]:
        # With this an engine of the tests leaves kv.load as it comes.
        return {"kv": {"kv": {"load": "adaptive"}, **self._store()}}

    def _store(self) -> dict[str, Any]:
        return {"payloads": f"file://{self.folder}"}


class Bucket(Folder):
    name = "kvstore, S3"
    what = "payloads in S3, index in Redis"
    uses_redis = uses_s3 = True
    cannot: ClassVar[Mapping[str, str]] = {}

    def _store(self) -> dict[str, Any]:
        assert self.bucket is not None and self.redis is not None
        return {"index": self.redis.url, "payloads": self.bucket.url, **self.bucket.settings}


class Fast(Bucket):
    name = "kvstore, folder before S3"
    what = "the same with a folder of the node in front"

    def _store(self) -> dict[str, Any]:
        store = super()._store()
        tiers = {"fast": f"file://{self.folder}", "slow": store["payloads"], "fast_capacity": "1GiB"}
        return store | {"payloads": tiers}


class Tiers(Variant, VLLM):
    name = "vLLM, CPU and fs tier"
    what = "warm from the CPU tier, after a restart from the file system tier"


def flipped(data: bytes) -> bytes:
    """With the bits of a byte in every 4 KiB the other way round: of a float32, sign and exponent."""
    changed = bytearray(data)
    pages = slice(min(2048, len(data) // 2) | 3, None, 4096)
    changed[pages] = bytes(byte ^ 0xFF for byte in changed[pages])
    return bytes(changed)


def leave(redis: RedisServer, nbytes: int) -> None:
    """Lets it take so much more, and refuse what comes then."""
    [used] = re.findall(rb"used_memory:(\d+)", redis.command("INFO", "memory"))
    redis.command("CONFIG", "SET", "maxmemory", str(int(used) + nbytes))


def flip_memory(pid: int) -> None:
    """Does the same to what is in use of a process' mappings that are as large as a pool."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for words in re.findall(r"^(\w+)-(\w+) rw", maps, re.MULTILINE):
            begin, end = (int(word, 16) for word in words)
            for place in range(begin, end, 1 << 20) if end - begin >= POOL_BYTES * 9 // 10 else ():
                memory.seek(place)
                if any(part := memory.read(min(1 << 20, end - place))):
                    memory.seek(place)
                    memory.write(flipped(part))
