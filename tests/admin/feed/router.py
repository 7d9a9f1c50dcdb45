"""A router as its feed sees it: it subscribes, asks for what it missed, and decodes with vLLM's own types."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

END = (-1).to_bytes(8, "big", signed=True)
_decoder = msgspec.msgpack.Decoder(KVEventBatch)


class Router:
    """Keeps the set of blocks that it was told of."""

    def __init__(self, publisher: str, replay: str | None = None, topic: bytes = b"") -> None:
        self.context = zmq.Context()
        self.subscription = self.context.socket(zmq.SUB)
        self.subscription.subscribe(topic)
        self.subscription.connect(publisher)
        self.dealer = self.context.socket(zmq.DEALER)
        if replay is not None:
            self.dealer.connect(replay)
        #: (ownership, group, hash) of what is stored.
        self.blocks: set[tuple[Any, ...]] = set()
        self.events: list[Any] = []
        self.batches: dict[int, bytes] = {}
        self.topics: set[bytes] = set()

    def read(self) -> int:
        """Takes what has come; returns how many batches."""
        count = 0
        while self.subscription.poll(0):
            topic, number, batch = self.subscription.recv_multipart()
            self.topics.add(topic)
            self.batches[int.from_bytes(number, "big")] = batch
            self.take(batch)
            count += 1
        return count

    def take(self, batch: bytes) -> None:
        for event in _decoder.decode(batch).events:
            self.events.append(event)
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockStored():
                    self.blocks |= {(event.ownership, event.group_idx, one) for one in event.block_hashes}
                case BlockRemoved():
                    self.blocks -= {(event.ownership, event.group_idx, one) for one in event.block_hashes}

    @property
    def stored(self) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored)]

    @property
    def cleared(self) -> int:
        return sum(isinstance(event, AllBlocksCleared) for event in self.events)

    def ask(self, number: int) -> None:
        """Asks for the batches from one on."""
        self.dealer.send_multipart((b"", number.to_bytes(8, "big")))

    def answered(self) -> list[tuple[int, bytes]]:
        """Returns what has come of an answer that is there to its end."""
        found = []
        while True:
            empty, _, number, batch = self.dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), batch))

    def close(self) -> None:
        self.context.destroy(linger=0)
