"""The network that pods have on this machine: a bridge, an address for each pod, and Services in between.

Every pod is in a network namespace of its own, so that two may listen on one port of `0.0.0.0`. This machine
is the bridge's first address and reaches every pod, as a node does. There is no route to anywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tests.servers.redis import end_process, spawn_tied
from tests.waiting import PATIENCE_S

#: Who answers for a Service at this moment: host and port of each pod.
Endpoints = Callable[[], Sequence[tuple[str, int]]]
_ABANDONED = "kvstore tests of "


class Network:
    """One bridge with 10.217.N.0/24, for one test's pods; use it from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Needs root and iproute2. Logs go to `folder`."""
        self._folder = folder
        _sweep()
        for number in random.sample(range(1, 255), 254):
            if _ip(f"link add kvs{number} type bridge", check=False):
                break
        else:
            raise OSError("no free bridge: 254 tests at once, or the kernel has no bridges")
        self.bridge, self._prefix = f"kvs{number}", f"10.217.{number}"
        self._hosts = itertools.count(10)
        self._lock = threading.Lock()
        _ip(
            f"link set {self.bridge} alias '{_ABANDONED}{os.getpid()}'",
            # Left to itself it would take over the lowest of its pods', and change with them.
            f"link set {self.bridge} address 02:6b:76:73:00:{number:02x}",
            f"addr add {self.gateway}/24 dev {self.bridge}",
            f"link set {self.bridge} up",
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.bridge, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def gateway(self) -> str:
        """This machine, as pods see it."""
        return f"{self._prefix}.1"

    def address(self) -> str:
        """One that nobody had before."""
        with self._lock:
            return f"{self._prefix}.{next(self._hosts)}"

    def namespace(self, address: str) -> subprocess.Popen[bytes]:
        """The process that holds a fresh network namespace with this address; it ends with this thread."""
        log = self._folder / "network.log"
        holder = spawn_tied(["unshare", "--net", "sleep", "infinity"], log)
        until = time.monotonic() + PATIENCE_S
        while _network_of(holder.pid) in (None, _network_of(os.getpid())):
            if holder.poll() is not None or time.monotonic() > until:
                raise OSError(f"no network namespace: {log.read_text()}")
            time.sleep(0.002)
        outside = self._cable(address)
        _ip(
            f"link add {outside} type veth peer name eth0 netns {holder.pid}",
            f"link set {outside} master {self.bridge} up",
        )
        _ip(
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            within=holder.pid,
        )
        return holder

    def release(self, address: str, holder: subprocess.Popen[bytes]) -> None:
        """Ends a namespace, in which no process is left."""
        # By itself it would go with the last connection that still waits for an answer.
        _ip(f"link del {self._cable(address)}", check=False)
        end_process(holder, signal.SIGKILL)

    def _cable(self, address: str) -> str:
        return f"{self.bridge}-{address.rpartition('.')[2]}"

    def serve(self, port: int, endpoints: Endpoints, address: str | None = None) -> None:
        """Pass connections to `address`, by default the gateway's, on to one of the endpoints.

        Who finds no endpoint is refused, by a reset.
        """
        if address is not None:
            # A second port of one Service finds the address there.
            _ip(f"addr add {address}/32 dev {self.bridge}", check=False)

        async def listen() -> asyncio.Server:
            return await asyncio.start_server(
                lambda reader, writer: self._take(_relay(reader, writer, endpoints)),
                address or self.gateway,
                port,
            )

        self._servers.append(asyncio.run_coroutine_threadsafe(listen(), self._loop).result(PATIENCE_S))

    def expose(self, port: int) -> None:
        """Let pods reach what listens on this machine's loopback, under the same port of the gateway."""
        self.serve(port, lambda: [("127.0.0.1", port)])

    def close(self) -> None:
        """Ends every connection through a Service, and takes the bridge away."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        _ip(f"link del {self.bridge}", check=False)

    def _take(self, relay: Coroutine[Any, Any, None]) -> None:
        # The loop itself would let go of one whose two sides are silent.
        task = self._loop.create_task(relay)
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # Transports that are being torn down want one more turn of the loop each.
        for _ in range(3):
            await asyncio.sleep(0)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoints: Endpoints) -> None:
    there: asyncio.StreamWriter | None = None
    try:
        for host, port in random.sample(found := list(endpoints()), len(found)):
            with contextlib.suppress(OSError, TimeoutError):
                back, forth = await asyncio.wait_for(asyncio.open_connection(host, port), 3)
                there = forth
                await asyncio.gather(_pump(reader, forth), _pump(back, writer))
                return
    except (OSError, asyncio.CancelledError):
        return
    finally:
        for end in (writer, there):
            if end is not None:
                end.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(1 << 18):
        sink.write(chunk)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _ip(*commands: str, within: int | None = None, check: bool = True) -> bool:
    """Whether `ip` did all of it, in the network namespace of a process if one is named."""
    enter = [] if within is None else ["nsenter", f"--net=/proc/{within}/ns/net"]
    done = subprocess.run(
        [*enter, "ip", "-batch", "-"],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if check and done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")
    return done.returncode == 0


def _sweep() -> None:
    """Takes away the bridges of test runs that were killed."""
    for alias in Path("/sys/class/net").glob("kvs*/ifalias"):
        with contextlib.suppress(OSError):
            owner = alias.read_text().strip().removeprefix(_ABANDONED)
            if owner.isdigit() and not Path("/proc", owner).exists():
                _ip(f"link del {alias.parent.name}", check=False)
