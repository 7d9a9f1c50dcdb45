"""The sockets between the feed, routers and engines, with the protocol of vLLM's publisher.

    XPUB      to routers     topic, number (8 bytes, big endian), batch; to whoever subscribes
    ROUTER    for replays    asked: "", number; answered: "", topic, number, batch for all batches from that
                             number on that are kept; then "", "", -1, ""
    SUB       from engines   what their publishers send

A router that asks for batches that are no longer kept is sent a snapshot in their stead: that all is gone,
then all that is there, under the last numbers before the next batch's. Nothing here waits for a peer: who
does not read loses messages, which the numbers tell it, and what waits to be read is bounded. One thread's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil
from typing import Any, Final

import zmq

from kvstore.admin.feed.peers import Callers
from kvstore.admin.feed.wire import CLEARED, BlockTokens, SizedHash, encode, told_by
from kvstore.errors import ConfigError

#: Batches that are kept for replays, and their bytes.
KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 64 << 20
#: Events in a batch, as a rule: with tokens, about 400 kB.
TOGETHER: Final = 64
#: Messages that wait for one router.
_WAITING = 1_000
#: Messages that are read at a time.
_READ = 1000
#: Bytes of a message: of a router, which subscribes or names a number, and of an engine.
_ASKED_BYTES = 4 << 10
#: Bytes that a connection may send: a router's subscriptions, and some thousand requests for replays.
_SUBSCRIBED_BYTES = 16 << 10
_REQUESTED_BYTES = 256 << 10
#: A connection has so long to shake hands.
_HANDSHAKE_MS = 10_000
_HEARD_BYTES = 64 << 20
_END = (-1).to_bytes(8, "big", signed=True)

_Events = Sequence[Mapping[str, Any]]


class Sockets:
    """Publishes, answers routers and listens to engines."""

    def __init__(
        self,
        publish: str,
        replay: str | None = None,
        engines: Sequence[str] = (),
        *,
        topic: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Binds `publish` and `replay`, and connects to what engines publish; one with a `*` is bound,
        for engines that connect. Raises ConfigError."""
        self._clock, self._topic = clock, topic.encode()
        #: Yields the events that tell of all that is there.
        self.snapshot: Callable[[], Iterator[Mapping[str, Any]]] = lambda: iter(())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: Callers | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        #: The number of the next batch. The first is a time in milliseconds: after a restart numbers go on
        #: farther up, so that a router sees that it missed something, and asks.
        self._first = self.number = int(clock() * 1000)
        #: How often a router has subscribed since this was set to 0.
        self.subscribed = 0
        #: Totals: bytes published, replays answered, those with a snapshot, engines' batches read, and those
        #: that could not be.
        self.sent_bytes = self.replays = self.snapshots = self.heard = self.unheard = 0
        try:
            self._publisher = self._socket(zmq.XPUB, publish, _WAITING)
            # Each subscription is told of, also a second one of the same topic.
            self._publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._replay = (
                None if replay is None else self._socket(zmq.ROUTER, replay, KEPT_BATCHES + _WAITING)
            )
            self._engines = [self._socket(zmq.SUB, one, _WAITING) for one in engines]
            bound = {self._publisher: _SUBSCRIBED_BYTES}
            if self._replay is not None:
                bound[self._replay] = _REQUESTED_BYTES
            self._peers = Callers(bound)
        except (zmq.ZMQError, ValueError, OSError) as exc:
            self.close()
            raise ConfigError(f"can't listen at or connect to the addresses given: {exc}") from exc
        for engine in self._engines:
            engine.setsockopt(zmq.SUBSCRIBE, b"")
        self._poller = zmq.Poller()
        for each in (self._publisher, self._replay, *self._engines):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)

    def _socket(self, kind: int, address: str, waiting: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        made.set_hwm(waiting)
        if kind == zmq.SUB:
            # Of an engine whose node has vanished nothing comes, not even an end
            made.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
            made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        made.setsockopt(zmq.MAXMSGSIZE, _HEARD_BYTES if kind == zmq.SUB else _ASKED_BYTES)
        binds = kind != zmq.SUB or "*" in address
        made.setsockopt(zmq.IPV6, int(not binds or "[" in address or "//*" in address))
        if binds:
            made.bind(address)
        else:
            made.connect(address)
        return made

    @property
    def addresses(self) -> list[str]:
        """Where it listens for routers: for subscriptions, and for replays if it does."""
        bound = [each for each in (self._publisher, self._replay) if each is not None]
        return [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in bound]

    @property
    def refused(self) -> int:
        """How many connections were closed because they sent what no router sends."""
        return 0 if self._peers is None else self._peers.refused

    @property
    def batches(self) -> int:
        """How many batches were published."""
        return self.number - self._first

    @property
    def kept(self) -> tuple[int, int]:
        """How many batches are kept for replays, and their bytes."""
        return len(self._kept), self._kept_bytes

    def publish(self, events: _Events) -> None:
        """Sends events as one batch, which may be empty: its number tells routers what they have missed."""
        batch = encode(self._clock(), events)
        self._publisher.send_multipart((self._topic, self.number.to_bytes(8, "big"), batch))
        self._kept.append((self.number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        self.number += 1
        self.sent_bytes += len(batch)

    def publish_snapshot(self) -> None:
        """Sends everything to everybody: that all is gone, then all that is there."""
        events = self.snapshot()
        batch: list[Mapping[str, Any]] = [CLEARED, *islice(events, TOGETHER)]
        while batch:
            self.publish(batch)
            batch = list(islice(events, TOGETHER))
        self.snapshots += 1

    def serve(self, wait_s: float) -> list[tuple[SizedHash, BlockTokens]]:
        """Answers what routers ask, and returns what engines tell; waits so long for either."""
        found: list[tuple[SizedHash, BlockTokens]] = []
        if self._peers is not None:
            self._peers.check()
        for ready, _ in self._poller.poll(int(wait_s * 1000)):
            if ready is self._publisher:
                self._subscriptions()
            elif ready is self._replay:
                self._answer()
            else:
                found += self._hear(ready)
        return found

    def _subscriptions(self) -> None:
        for _ in range(_READ):
            if (message := _read(self._publisher)) is None:
                break
            self.subscribed += message[0][:1] == b"\x01"

    def _answer(self) -> None:
        assert self._replay is not None, "it was polled"
        asked = _read(self._replay)
        if asked is None or len(asked) != 3 or len(asked[2]) != 8:
            return
        router, first = asked[0], int.from_bytes(asked[2], "big")
        self.replays += 1
        batches = [(number, batch) for number, batch in self._kept if number >= first]
        if first < self.number and (not self._kept or first < self._kept[0][0]):
            self.snapshots += 1
            batches = self._as_batches(self.number - first)
        for number, batch in batches:
            self._replay.send_multipart((router, b"", self._topic, number.to_bytes(8, "big"), batch))
        self._replay.send_multipart((router, b"", b"", _END, b""))

    def _as_batches(self, most: int) -> list[tuple[int, bytes]]:
        """Returns the snapshot in at most so many batches, of which the last has the last number given."""
        events = [CLEARED, *self.snapshot()]
        size = max(TOGETHER, ceil(len(events) / min(most, KEPT_BATCHES)))
        at_s = self._clock()
        batches = [encode(at_s, events[at : at + size]) for at in range(0, len(events), size)]
        return list(zip(range(self.number - len(batches), self.number), batches, strict=True))

    def _hear(self, engine: zmq.Socket[bytes]) -> list[tuple[SizedHash, BlockTokens]]:
        found: list[tuple[SizedHash, BlockTokens]] = []
        for _ in range(_READ):
            message = _read(engine)
            if message is None:
                break
            try:
                found += told_by(message[-1])
                self.heard += 1
            except ValueError:
                self.unheard += 1
        return found

    def close(self) -> None:
        """Closes all sockets, and drops what was not sent."""
        if self._peers is not None:
            self._peers.close()
        self._context.destroy(linger=0)


def _read(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
