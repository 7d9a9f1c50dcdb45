"""A network between clients and a server on loopback in which packets stop coming."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

from tests.waiting import PATIENCE_S

#: How long a connection to a listener may take whose queue has room.
_QUICK_S = 0.1


class Wire:
    """A TCP proxy that can be cut, in both directions or in one of them, and mended.

    While it is cut nothing says so: connections stay open, bytes of that direction don't arrive, and a new
    connection is never answered, because either its first packet or the answer to that is lost. When it is
    mended, what was sent arrives, as TCP sends it again; however late that is.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: How often bytes or a connection did not get through.
        self.stopped = 0
        self._requests, self._replies = threading.Event(), threading.Event()
        self._over = threading.Event()
        self._sockets: list[socket.socket] = []
        self._fillers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.mend()
        self._start(self._accept)

    def cut(self, *, requests: bool = True, replies: bool = True) -> None:
        """From now on these directions carry nothing."""
        if requests:
            self._requests.clear()
        if replies:
            self._replies.clear()
        self._listener.listen(0)
        # The queue of connections that nobody accepts is short, and ours fill it.
        while True:
            filler = socket.socket()
            self._fillers.append(filler)
            filler.settimeout(_QUICK_S)
            try:
                filler.connect(("127.0.0.1", self.port))
            except TimeoutError:
                return

    def mend(self) -> None:
        """From now on everything gets through, and what did not does now."""
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()
        self._listener.listen(128)
        self._requests.set()
        self._replies.set()

    @property
    def _whole(self) -> bool:
        return self._requests.is_set() and self._replies.is_set()

    def _start(self, work: object, *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.wait(0.002):
            if not self._whole or not select.select([self._listener], [], [], 0.05)[0] or not self._whole:
                continue
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets.append(server)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._start(self._pump, client, server, self._requests)
                self._start(self._pump, server, client, self._replies)

    def _pump(self, source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._hold(gate)
                sink.sendall(data)
            self._hold(gate)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _hold(self, gate: threading.Event) -> None:
        if not gate.is_set():
            self.stopped += 1
            gate.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.mend()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in [self._listener, *self._sockets]:
            each.close()
