"""Mooncake Store: its master, and a client of its own that holds the pool, both on loopback."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.redis import end_process, spawn_tied
from trials.benchmarks.peers.variants import POOL_BYTES, Variant, flip_memory
from trials.faults.peer_systems import _free_port, _wait_for_http


class Mooncake(Variant):
    name = "Mooncake Store"
    what = "vLLM's MooncakeStoreConnector over TCP; a client of its own holds the pool in memory"

    cannot: ClassVar[Mapping[str, str]] = {"full": "n/a: evicts"}

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
        pool += ["--metadata_server", "P2PHANDSHAKE", "--global_segment_size", f"{POOL_BYTES >> 20}MB"]
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

    def flip(self) -> None:
        flip_memory(self._processes[1].pid)

    def kill_index(self) -> None:
        self._processes[0].kill()
        self._processes[0].wait()

    def _arguments(self, number: int) -> dict[str, Any]:
        return {
            "kv": {},
            "kv_config": {
                "kv_connector": "MooncakeStoreConnector",
                "kv_connector_module_path": "trials.benchmarks.peers.mooncake_connector",
            },
            "env": {"MOONCAKE_CONFIG_PATH": str(self._config), "VLLM_RPC_BASE_PATH": str(self.folder)},
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
