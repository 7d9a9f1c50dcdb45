"""What is compared: each a vLLM engine with a cache, its servers, and what can be done to them.

Engines and servers are those of the comparison under faults (tests.faults.peer_systems).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from tests.faults.peer_faults import World, _fill, _small_disk
from tests.faults.peer_systems import VLLM, KVStore, LMCache, System, _free_port, _wait_for_http
from tests.servers.redis import RedisServer, end_process, spawn_tied
from tests.servers.s3.servers import S3Server

#: Pool of a cache in memory.
_POOL_BYTES = 1 << 30
_MEMORY = "n/a: memory"
#: Bytes that a Redis which is full has left, and a folder's file system in all: less than two prompts.
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

    def flip(self) -> str:
        """Flips a byte in the middle of each file and object while no engine runs. Returns why it can't."""
        for path in self.files():
            path.write_bytes(_flipped(path.read_bytes()))
        for key, _ in self._objects() if self.bucket is not None else ():
            client, where = self.bucket.client(), {"Bucket": self.bucket.bucket, "Key": key}
            client.put_object(**where, Body=_flipped(client.get_object(**where)["Body"].read()))
        return ""

    def kill_index(self) -> str:
        """`kill -9` of what look-ups ask, while the engine runs. Returns why it can't."""
        if self.redis is None:
            return "n/a: in the engine"
        self.redis.kill()
        return ""

    def fill(self) -> str:
        """Leaves room for less than what is to be stored. Returns why it can't."""
        if self.redis is not None:
            used = int(re.search(rb"used_memory:(\d+)", _redis_info(self.redis))[1])  # type: ignore[index]
            self.redis.command("CONFIG", "SET", "maxmemory", str(used + _LITTLE_REDIS))
            return ""
        if os.geteuid():
            return "not run: needs root to mount"
        _small_disk(self._world)
        return ""

    def _objects(self) -> list[tuple[str, int]]:
        assert self.bucket is not None
        pages = self.bucket.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket.bucket)
        return [(one["Key"], one["Size"]) for page in pages for one in page.get("Contents", ())]


class Nothing(Variant):
    name = "no cache"
    keeps = False

    def fill(self) -> str:
        return "n/a"

    flip = kill_index = fill


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


class Memory(Variant, LMCache):
    name = "LMCache, memory"
    what = "its server's memory, which outlives the engine"

    @classmethod
    def missing(cls) -> str:
        try:
            import lmcache.lmcache_native  # noqa: F401
        except ImportError as exc:
            return str(exc)
        return ""

    def stop(self) -> None:
        System.stop(self)

    def close(self) -> None:
        super().close()
        self.end_server()

    def own(self) -> list[int]:
        return [self._server.pid] if self.server_alive else []

    def stored_bytes(self) -> int | None:
        return None

    def kill_index(self) -> str:
        self._server.kill()
        self._server.wait()
        return ""

    def fill(self) -> str:
        return "n/a: evicts"

    def flip(self) -> str:
        return _MEMORY

    def _behind(self) -> dict[str, Any] | None:
        return None


class _Behind(Memory):
    """A tier behind the server's memory; the server is restarted with the engine."""

    def stop(self) -> None:
        super().stop()
        self.end_server()

    def stored_bytes(self) -> int | None:
        return Variant.stored_bytes(self)

    def flip(self) -> str:
        return Variant.flip(self)

    def fill(self) -> str:
        return Variant.fill(self)


class Native(_Behind):
    name = "LMCache, fs_native"
    what = "warm from memory, after a restart of its server from a folder"

    def _behind(self) -> dict[str, Any] | None:
        return LMCache._behind(self)


class Resp(Native):
    name = "LMCache, Redis"
    what = "warm from memory, after a restart of its server from Redis"
    uses_redis = True

    def stored_bytes(self) -> int | None:
        return sum(len(value) for value in _redis_values(self.redis).values())

    def flip(self) -> str:
        for key, value in _redis_values(self.redis).items():
            assert self.redis is not None
            self.redis.command("SET", key, _flipped(value))
        return ""

    def kill_index(self) -> str:
        return Variant.kill_index(self)

    def fill(self) -> str:
        assert self.redis is not None
        self.redis.command("CONFIG", "SET", "maxmemory", "32mb")
        return ""


class S3(_Behind):
    name = "LMCache, S3"
    what = "warm from memory, after a restart of its server from S3"
    uses_s3 = True

    def fill(self) -> str:
        return "n/a"

    def _behind(self) -> dict[str, Any] | None:
        assert self.bucket is not None and self._s3 is not None
        return {
            "type": "s3",
            # It knows buckets as part of the host's name only.
            "s3_endpoint": f"{self.bucket.bucket}.localhost:{self._s3.port}",
            "s3_region": self.bucket.region,
            "aws_access_key_id": self.bucket.credentials.access_key,
            "aws_secret_access_key": self.bucket.credentials.secret_key,
            "disable_tls": True,
            "s3_prefer_http2": False,
        }


class Mooncake(Variant):
    name = "Mooncake Store"
    what = "vLLM's MooncakeStoreConnector over TCP; a client of its own holds the pool in memory"

    @classmethod
    def missing(cls) -> str:
        try:
            import mooncake.store  # noqa: F401
        except ImportError as exc:
            return str(exc)
        return ""

    def open(self) -> None:
        import mooncake

        self.logs.mkdir(parents=True)
        programs = Path(mooncake.__path__[0])
        rpc, self._http, port, health = (_free_port() for _ in range(4))
        master = ["--rpc_address", "127.0.0.1", "--rpc_port", str(rpc), "--metrics_host", "127.0.0.1"]
        self._processes = [
            self._daemon(programs / "mooncake_master", *master, "--metrics_port", str(self._http))
        ]
        _wait_for_http(f"http://127.0.0.1:{self._http}/metrics", self._processes[0], self._log)
        pool = ["--host", "127.0.0.1", "--port", str(port), "--master_server_address", f"127.0.0.1:{rpc}"]
        pool += ["--metadata_server", "P2PHANDSHAKE", "--global_segment_size", f"{_POOL_BYTES >> 20}MB"]
        pool += ["--protocol", "tcp", "--enable_http_server", "--http_port", str(health)]
        self._processes.append(self._daemon(programs / "mooncake_client", *pool))
        _wait_for_http(f"http://127.0.0.1:{health}/health", self._processes[1], self._log)
        self._config = self.logs / "mooncake.json"
        config = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{rpc}",
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": 128 << 20,
        }
        self._config.write_text(json.dumps(config))

    def close(self) -> None:
        super().close()
        for process in self._processes:
            end_process(process, signal.SIGKILL)

    def own(self) -> list[int]:
        return [process.pid for process in self._processes if process.poll() is None]

    def stored_bytes(self) -> int | None:
        return int(self._metric("master_allocated_bytes"))

    def signature(self) -> object:
        return self._metric("master_key_count"), self._metric("master_allocated_bytes")

    def flip(self) -> str:
        return _MEMORY

    def kill_index(self) -> str:
        self._processes[0].kill()
        self._processes[0].wait()
        return ""

    def fill(self) -> str:
        return "n/a: evicts"

    def _arguments(self, number: int) -> dict[str, Any]:
        return {
            "kv": {},
            "kv_config": {
                "kv_connector": "MooncakeStoreConnector",
                "kv_connector_module_path": "tests.benchmarks.peers.mooncake_connector",
            },
            "env": {"MOONCAKE_CONFIG_PATH": str(self._config)},
        }

    @property
    def _log(self) -> Path:
        return self.logs / "mooncake.log"

    def _daemon(self, *words: object) -> Any:
        return spawn_tied([*map(str, words), "--logtostderr"], self._log, dict(os.environ))

    def _metric(self, name: str) -> float:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._http}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        return 0.0


VARIANTS: list[type[Variant]] = [
    *(Nothing, Local, Folder, Bucket, Fast, Tiers, Memory, Native, Resp, S3, Mooncake),
]


def _flipped(data: bytes) -> bytes:
    """With the bits of one byte in the middle the other way round: of a float32, sign and exponent."""
    changed = bytearray(data)
    changed[len(changed) // 2 | 3] ^= 0xFF
    return bytes(changed)


def _redis_info(redis: RedisServer) -> bytes:
    return redis.command("INFO", "memory")


def _redis_values(redis: RedisServer | None) -> dict[bytes, bytes]:
    from redis import Redis

    assert redis is not None
    with Redis(port=redis.port) as client:
        return {key: client.get(key) for key in client.scan_iter(count=1000) if client.type(key) == b"string"}
