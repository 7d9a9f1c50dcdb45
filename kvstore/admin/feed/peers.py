"""Closes connections of the feed's ports that send more than routers have to say.

libzmq bounds a frame (ZMQ_MAXMSGSIZE), and neither how many frames a message has nor what is subscribed to:
of 600 MiB in one message it keeps 1.2 GiB, and of 60 MiB of subscriptions 2.9 GiB, for one connection. A
router names a topic and asks for numbers. So what each connection has sent is looked at where it can't be
hidden, in the kernel's own count of it (TCP_INFO), and the connection that sent too much is closed. An honest
router that ever comes so far connects again by itself, and asks for what it missed.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvstore.threads.deadline import in_background

log = logging.getLogger(__name__)

#: Connections to one port at a time: a router has one.
MOST_PEERS: Final = 256
#: Seconds between two looks at what connections have sent, while there are some.
_LOOK_S: Final = 0.02
#: How long the end of the feed waits for the look under way.
_END_S: Final = 5.0
#: The state of a connection and the bytes that it has received, in Linux' struct tcp_info.
_STATE, _RECEIVED = struct.Struct("B"), struct.Struct("=128xQ")
_ESTABLISHED: Final = 1
#: A struct linger that is on, for no time.
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Callers:
    """Looks after who is connected to some sockets that are bound, on a thread of its own."""

    def __init__(self, sockets: Mapping[zmq.Socket[bytes], int]) -> None:
        """Takes each socket with the bytes that one connection may send."""
        self._most = {each.get_monitor_socket(_EVENTS): most for each, most in sockets.items()}
        self._ports = {
            monitor: _port(each.getsockopt_string(zmq.LAST_ENDPOINT))
            for monitor, each in zip(self._most, sockets, strict=True)
        }
        self._open: dict[zmq.Socket[bytes], dict[int, socket.socket]] = {one: {} for one in self._most}
        #: How many connections were closed for what they sent, or because there were too many.
        self.refused = 0
        self._ended = False
        self._looking = in_background(self._look_on)

    def close(self) -> None:
        """Ends looking. To be called before the sockets are closed."""
        self._ended = True
        with suppress(TimeoutError):
            self._looking.exception(_END_S)

    def check(self) -> None:
        """Raises what ended the looking, if anything did: nobody is to be served without it."""
        if self._looking.done():
            self._looking.result()

    def _look_on(self) -> None:
        poller = zmq.Poller()
        for monitor in self._most:
            poller.register(monitor, zmq.POLLIN)
        while not self._ended:
            for monitor, _ in poller.poll(int(_LOOK_S * 1000)):
                self._hear(monitor)
            for monitor, peers in self._open.items():
                for number, peer in list(peers.items()):
                    if _received(peer) > self._most[monitor]:
                        self._refuse(peers.pop(number))
        for monitor, peers in self._open.items():
            monitor.close(linger=0)
            for peer in peers.values():
                peer.close()

    def _hear(self, monitor: zmq.Socket[bytes]) -> None:
        peers = self._open[monitor]
        told: dict[str, Any] = dict(parse_monitor_message(monitor.recv_multipart()))
        number = told["value"]
        if (before := peers.pop(number, None)) is not None:
            before.close()
        if told["event"] != zmq.EVENT_ACCEPTED:
            return
        try:
            peer = socket.socket(fileno=os.dup(number))
        except OSError:
            return  # It has gone again.
        # By now the number may be that of another connection of this process.
        if _place(peer) != self._ports[monitor]:
            peer.close()
        elif len(peers) >= MOST_PEERS:
            self._refuse(peer)
        else:
            peers[number] = peer

    def _refuse(self, peer: socket.socket) -> None:
        if not self.refused:
            log.warning("a connection of a router has sent too much, or is one of too many: it is closed")
        self.refused += 1
        with suppress(OSError):  # It may have gone by itself.
            # Both ends are told at once, also where the other doesn't read: libzmq closes its own at an end.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            peer.shutdown(socket.SHUT_RDWR)
        peer.close()


def _received(peer: socket.socket) -> int:
    """Returns how many bytes came over a connection; 0 once it has ended, or where the system can't say."""
    try:
        told = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    except (OSError, AttributeError):
        return 0
    if len(told) < _RECEIVED.size or _STATE.unpack_from(told)[0] != _ESTABLISHED:
        return 0
    (received,) = _RECEIVED.unpack(told)
    return int(received)


def _place(peer: socket.socket) -> int:
    """Returns the port that a connection came to; 0 of one that is no TCP connection."""
    try:
        return int(peer.getsockname()[1]) if peer.family in (socket.AF_INET, socket.AF_INET6) else 0
    except OSError:
        return 0


def _port(endpoint: str) -> int:
    """Returns the port that a socket listens at; -1 of one that is not reached over TCP."""
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port.isdigit() else -1
