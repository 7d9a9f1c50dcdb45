"""LMCache in its multiprocess mode: its server's memory, and what can stand behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tests.servers.redis import RedisServer
from trials.benchmarks.peers.variants import Variant, flip_memory, flipped, leave
from trials.faults.peer_systems import LMCache, System


class Native(Variant, LMCache):
    name = "LMCache, fs_native"
    what = "warm from memory, after a restart of its server from a folder"
    cannot: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def missing(cls) -> str:
        try:
            import lmcache.lmcache_native  # noqa: F401
        except ImportError as exc:
            return str(exc)
        return ""

    def own(self) -> list[int]:
        return [self._server.pid] if self.server_alive else []

    def kill_index(self) -> None:
        self._server.kill()
        self._server.wait()


class Memory(Native):
    name = "LMCache, memory"
    what = "its server's memory, which outlives the engine"
    cannot: ClassVar[Mapping[str, str]] = {"full": "n/a: evicts"}

    def stop(self) -> None:
        System.stop(self)

    def close(self) -> None:
        super().close()
        self.end_server()

    def stored_bytes(self) -> int | None:
        return None

    def flip(self) -> None:
        flip_memory(self._server.pid)

    def _behind(self) -> dict[str, Any] | None:
        return None


class Resp(Native):
    name = "LMCache, Redis"
    what = "warm from memory, after a restart of its server from Redis"
    uses_redis = True

    def stored_bytes(self) -> int | None:
        return sum(len(value) for value in _redis_values(self.redis).values())

    def flip(self) -> None:
        assert self.redis is not None
        for key, value in _redis_values(self.redis).items():
            self.redis.command("SET", key, flipped(value))

    def kill_index(self) -> None:
        Variant.kill_index(self)

    def fill(self, nbytes: int) -> None:
        assert self.redis is not None
        leave(self.redis, nbytes)


class S3(Native):
    name = "LMCache, S3"
    what = "warm from memory, after a restart of its server from S3"
    uses_s3 = True
    cannot: ClassVar[Mapping[str, str]] = {"full": "not run"}

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


def _redis_values(redis: RedisServer | None) -> dict[bytes, bytes]:
    from redis import Redis

    assert redis is not None
    with Redis(port=redis.port) as client:
        return {key: client.get(key) for key in client.scan_iter(count=1000) if client.type(key) == b"string"}
