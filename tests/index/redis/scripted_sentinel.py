"""A Sentinel that says what a test has told it to say, after it as many milliseconds as the test likes."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tests.waiting import PATIENCE_S

MASTER = "kv-master"


class ScriptedSentinel:
    """Speaks the part of the protocol that a client of Sentinel needs. Its fields may be set at any time."""

    def __init__(self, master: int = 0, *, context: ssl.SSLContext | None = None) -> None:
        """`context`: of a server, to speak TLS."""
        self.master = master
        self.host = "127.0.0.1"
        self.flags = "master"
        #: Answered to everything; without the "-".
        self.error = ""
        #: Answered to everything, as it is.
        self.answer = b""
        self.password = ""
        #: Accepts connections and answers nothing.
        self.hangs = False
        self.asked = 0
        self._let_go = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Conversation)
        self._server.sentinel = self
        self._server.context = context
        self._server.open = set()
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """No longer there: connections are refused."""
        self._let_go.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        for connection in list(self._server.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def reply(self, words: list[bytes], authenticated: bool) -> bytes:
        if self.hangs:
            self._let_go.wait(PATIENCE_S)
        verb = b" ".join(words[:2]).upper()
        if verb.startswith(b"AUTH"):
            return b"+OK\r\n" if words[-1].decode() == self.password else b"-WRONGPASS invalid pair\r\n"
        if self.password and not authenticated:
            return b"-NOAUTH Authentication required.\r\n"
        if verb.startswith(b"CLIENT"):
            return b"+OK\r\n"
        self.asked += 1
        if self.error:
            return b"-%s\r\n" % self.error.encode()
        if self.answer:
            return self.answer
        fields = {"name": MASTER, "ip": self.host, "port": str(self.master), "flags": self.flags}
        fields["num-other-sentinels"] = "2"
        if verb == b"SENTINEL MASTERS":
            return b"*1\r\n" + _flat(fields)
        if verb == b"SENTINEL MASTER" and words[2].decode() == MASTER:
            return _flat(fields)
        return b"-ERR No such master with that name\r\n"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    sentinel: ScriptedSentinel
    context: ssl.SSLContext | None
    open: set[socket.socket]

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_side=True)
        return connection, address


class _Conversation(socketserver.StreamRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        sentinel, authenticated = self.server.sentinel, False
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            reply = sentinel.reply(words, authenticated)
            authenticated = authenticated or (words[0].upper() == b"AUTH" and reply.startswith(b"+"))
            try:
                self.wfile.write(reply)
            except OSError:
                return

    def _word(self) -> bytes:
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:size]


def _flat(fields: Mapping[str, str]) -> bytes:
    words = [word.encode() for pair in fields.items() for word in pair]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
