"""A TCP proxy that can lose a request: the connection ends after the server side was never asked."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self


class LossyProxy:
    """Passes bytes on between clients and one server on loopback."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: How many connections are yet to be ended when their next request comes.
        self.losses = 0
        #: How long a request is held before it is lost.
        self.delay_s = 0.0
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for source, sink, lossy in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, lossy), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, lossy: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if lossy and self.losses:
                    self.losses -= 1
                    time.sleep(self.delay_s)
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in [self._listener, *self._sockets]:
            each.close()
