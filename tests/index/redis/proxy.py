"""A TCP proxy that can lose a request, so that the server is never asked, and that can let replies come late,
drip, or be other ones."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

from tests.waiting import PATIENCE_S


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
        #: Seconds from one byte of a reply to the next; 0: replies come as they are.
        self.drip_s = 0.0
        #: Seconds by which replies come late.
        self.late_s = 0.0
        #: What clients get for replies, whatever the server says; None: the replies.
        self.garbage: bytes | None = None
        #: How many requests were lost and how many pieces of replies were not passed on as they came.
        self.spoiled = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()  # there is no server: a client's connection ends as soon as it is made
                    continue
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
                    self.spoiled += 1
                    time.sleep(self.delay_s)
                    break
                self._pass(sink, data, slowly=not lossy)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, sink: socket.socket, data: bytes, *, slowly: bool) -> None:
        if slowly and (self.late_s or self.drip_s or self.garbage is not None):
            self.spoiled += 1
            time.sleep(self.late_s)
            data = data if self.garbage is None else self.garbage
        while slowly and self.drip_s and data:
            sink.sendall(data[:1])
            data = data[1:]
            time.sleep(self.drip_s)
        sink.sendall(data)

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
            thread.join(PATIENCE_S)
        for each in [self._listener, *self._sockets]:
            each.close()
