"""A network between clients and a server on loopback that is as fast and as far as it is told to be."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.servers.wire import Wire

#: Most bytes that leave at once: after so many another speed counts.
_PIECE = 32 << 10
#: For what is shorter nobody sleeps, and so much later than asked for a sleep may end, in seconds.
_SHORTEST_S, _LATE_S = 0.0005, 0.01


class Link(Wire):
    """A TCP proxy whose replies share `bytes_per_s`, and whose requests arrive `latency_s` late.

    Set either at any time; a speed of None is as fast as it goes. A request is what a client sends after a
    reply, which comes late once, however large its body is. `cut` and `mend` stall both ways.
    """

    def __init__(self, port: int) -> None:
        self.bytes_per_s: float | None = None
        self.latency_s = 0.0
        #: Bytes of replies that have arrived.
        self.passed = 0
        self._turn = threading.Lock()
        #: `time.monotonic` time at which all that was let through has left.
        self._free_at = 0.0
        #: Clients' ends of connections whose request is on its way.
        self._asked: set[socket.socket] = set()
        super().__init__(port)

    def _pump(self, source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if gate is self._replies:
                    self._asked.discard(sink)
                    self._leave(len(data))
                elif source not in self._asked:
                    self._asked.add(source)
                    time.sleep(self.latency_s)
                self._hold(gate)
                sink.sendall(data)
            self._hold(gate)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _leave(self, nbytes: int) -> None:
        """Returns when so many bytes have left, after those of other connections."""
        with self._turn:
            self.passed += nbytes
            if (speed := self.bytes_per_s) is None:
                return
            now = time.monotonic()
            # Time in which nobody sent is lost, but for that by which the last sleep was too long.
            self._free_at = max(self._free_at, now - _LATE_S) + nbytes / speed
            if self._free_at - now > _SHORTEST_S:
                time.sleep(self._free_at - now)
