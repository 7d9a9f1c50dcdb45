"""Peers of the feed's ports that send what no router sends lose their connection, and fill no memory."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest
import zmq

from kvstore.admin.feed import peers
from kvstore.admin.feed.sockets import Sockets
from tests.waiting import PATIENCE_S, until

#: Far more than one connection may send, with what the kernel takes meanwhile; and little memory.
MOST_SENT = 192 << 20
MORE, LONG, COMMAND = 1, 2, 4


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with closing(Sockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")) as made:
        yield made


def bare(address: str) -> socket.socket:
    """Returns a connection that says nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def connected(address: str, kind: bytes) -> socket.socket:
    """Returns a connection that has shaken hands as a ZeroMQ socket of some kind does."""
    peer = bare(address)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    received(peer, 64)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    peer.sendall(bytes([COMMAND, len(ready)]) + ready)
    received(peer, received(peer, 2)[1])
    return peer


def received(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        assert more, "it shook no hands"
        data += more
    return data


def frame(flags: int, body: bytes) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(body)) + body


def sent(sockets: Sockets, peer: socket.socket, frames: Iterator[bytes]) -> int:
    """Sends until the connection is closed, or all of MOST_SENT is sent; returns how much that was."""
    count = 0
    with peer, suppress(ConnectionError):
        while count < MOST_SENT:
            data = b"".join(itertools.islice(frames, 64))
            peer.sendall(data)
            count += len(data)
            sockets.serve(0)
    return count


@pytest.mark.parametrize("place", [0, 1], ids=["publisher", "replay"])
def test_a_message_without_an_end(sockets: Sockets, place: int) -> None:
    """libzmq keeps every frame until the last one comes, each of a size that it allows."""
    peer = connected(sockets.addresses[place], [b"SUB", b"DEALER"][place])
    assert sent(sockets, peer, itertools.repeat(frame(MORE, bytes(1000)))) < MOST_SENT
    until(lambda: sockets.refused == 1)


def test_subscriptions_without_an_end(sockets: Sockets) -> None:
    """Each byte of one takes fifty of memory, for as long as its connection lasts."""
    many = (frame(0, b"\x01" + b"%016d" % number * 250) for number in itertools.count())
    assert sent(sockets, connected(sockets.addresses[0], b"SUB"), many) < MOST_SENT
    until(lambda: sockets.refused == 1)


def test_more_connections_than_there_are_routers(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_PEERS", 4)
    with ExitStack() as made:
        for _ in range(9):
            with suppress(ConnectionError):  # It may be closed before it is made.
                made.enter_context(bare(sockets.addresses[0]))
        until(lambda: sockets.refused == 5)
    with subscribed(sockets) as router:
        until(lambda: told(sockets, router))


def subscribed(sockets: Sockets) -> zmq.Socket[bytes]:
    router = zmq.Context.instance().socket(zmq.SUB)
    router.linger = 0
    router.subscribe(b"")
    router.connect(sockets.addresses[0])
    return router


def told(sockets: Sockets, router: zmq.Socket[bytes]) -> bool:
    sockets.publish(())
    sockets.serve(0)
    return bool(router.poll(10))


def test_others_are_served_meanwhile_and_afterwards(sockets: Sockets) -> None:
    with subscribed(sockets) as router, zmq.Context.instance().socket(zmq.REQ) as asking:
        until(lambda: told(sockets, router))
        for _ in range(3):
            peer = connected(sockets.addresses[0], b"SUB")
            assert sent(sockets, peer, itertools.repeat(frame(MORE, bytes(1000)))) < MOST_SENT
        until(lambda: told(sockets, router))
        asking.linger = 0
        asking.connect(sockets.addresses[1])
        asking.send((0).to_bytes(8, "big"))

        def answered() -> bool:
            sockets.serve(0)
            return bool(asking.poll(10))

        until(answered)
    assert sockets.refused == 3
