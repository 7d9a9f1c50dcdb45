"""A real router reads the feed: NVIDIA Dynamo's KV router, in Rust, of the wheel ai-dynamo-runtime 1.6.1.

It is not among the development tools (75 MB, for these tests alone):

    pip download --no-deps ai-dynamo-runtime==1.6.1, unpack it into FOLDER
    PYTHONPATH=FOLDER python -m pytest tests/admin/feed/test_dynamo.py

Two engines publish as vLLM does, with its own publisher; the feed reads their store. The router subscribes to
all three. The store is a worker of a routing group of its own, where nobody is sent a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

dynamo = pytest.importorskip(
    "dynamo._core", reason="no real router to try: ai-dynamo-runtime 1.6.1 is not installed (see this file)"
)

pytest.importorskip("vllm", reason="routers decode with vLLM's types: make setup")

from vllm.distributed.kv_events import BlockStored, EventBatch, ZmqEventPublisher

from kvstore.format.segment import Slot
from kvstore.keys import block_key
from kvstore.rules.hashing import block_hashes
from tests.admin.conftest import BLOCK_SHAPE, Filled, kv_slots, kv_space
from tests.admin.feed.conftest import Feeding, Start
from tests.admin.feed.test_feed import evict

TOKENS = list(range(5000, 5000 + 12 * 16))
HASHES = block_hashes(TOKENS, algorithm="sha256", block_tokens=16)
MODEL, STORE, GROUP = "tiny-random", 9, "shared"


def external(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1)


def computed(blocks: range) -> EventBatch:
    """What an engine publishes that has these blocks of the prompt in its GPU."""
    return EventBatch(
        ts=1.0,
        events=[
            BlockStored(
                block_hashes=[external(HASHES[block]) for block in blocks],
                parent_block_hash=external(HASHES[blocks.start - 1]) if blocks.start else None,
                token_ids=TOKENS[blocks.start * 16 : blocks.stop * 16],
                block_size=16,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        ],
    )


class Fleet:
    """Two engines, their store and its feed; routers are Dynamo's."""

    def __init__(self, folder: Path, feeding: Start, stack: ExitStack) -> None:
        self.filled = Filled(folder / "cache", [], {"payloads": f"file://{folder}/cache"}, kv=kv_space())
        self.addresses = [f"ipc://{folder}/engine-{number}" for number in (1, 2)]
        self.engines = [ZmqEventPublisher(0, endpoint=address) for address in self.addresses]
        for each in self.engines:
            stack.callback(each.shutdown)
        self.feeding: Feeding = feeding(self.filled.settings, tuple(self.addresses), ownership=False)

    def save(self, blocks: range) -> None:
        data = [slot.data for slot in kv_slots(len(blocks))]
        slots = [
            Slot(block_key(HASHES[block]), one, "BF16", BLOCK_SHAPE)
            for block, one in zip(blocks, data, strict=True)
        ]
        self.filled.save(self.filled.kv, slots, depth=blocks.start)

    async def router(self) -> Any:
        """A selection service that knows of both engines and of the store."""
        service = dynamo.SelectionService(indexer_threads=1)
        common = {"model_name": MODEL, "block_size": 16}
        for number, address in enumerate(self.addresses, 1):
            own = {"worker_id": number, "endpoint": f"http://engine-{number}", "kv_events_endpoint": address}
            await service.upsert_worker({**common, **own})
        publisher, replay = self.feeding.addresses
        own = {"worker_id": STORE, "endpoint": "store", "routing_group": GROUP}
        own |= {"kv_events_endpoint": publisher, "replay_endpoint": replay}
        await service.upsert_worker({**common, **own})
        return service

    async def until(self, what: Callable[[], Awaitable[object]]) -> None:
        """Lets the feed turn until it is so."""
        end = asyncio.get_running_loop().time() + 60
        while not await what():
            assert asyncio.get_running_loop().time() < end, self.feeding.feed.last
            self.feeding.feed.turn(0.01)
            await asyncio.sleep(0.01)


@pytest.fixture
def fleet(tmp_path: Path, feeding: Start) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, feeding, stack)


async def overlap(service: Any, group: str = "default") -> dict[int, tuple[int, int]]:
    """Blocks of the prompt by worker: in its GPU, and that it can load or has."""
    asked = {"model_name": MODEL, "routing_group": group, "token_ids": TOKENS}
    found = await service.overlap_scores(asked)
    return {one["worker_id"]: (one["device_blocks"], one["disk_blocks"]) for one in found["workers"]}


async def chosen(service: Any) -> set[int]:
    asked = {"model_name": MODEL, "token_ids": TOKENS}
    return {(await service.select(asked))["worker_id"] for _ in range(10)}


def test_a_router_prefers_the_engine_that_has_it_and_knows_that_all_can_load_it(fleet: Fleet) -> None:
    async def run() -> None:
        service = await fleet.router()
        try:
            # Engine 1 has computed 8 blocks, all 8 of which were saved; engine 2 has seen another prompt.
            fleet.save(range(4))
            fleet.save(range(4, 8))

            async def told() -> bool:
                fleet.engines[0].publish(computed(range(8)))
                fleet.engines[1].publish(EventBatch(ts=1.0, events=[]))
                return (await overlap(service, GROUP))[STORE] == (0, 8)

            await fleet.until(told)
            found = await overlap(service)
            assert found[1][0] == 8 and found[2] == (0, 0)
            assert await chosen(service) == {1}
            # What is evicted can't be loaded any more.
            evict(fleet.filled, 1)

            async def less() -> bool:
                return (await overlap(service, GROUP))[STORE] == (0, 4)

            await fleet.until(less)
            assert await chosen(service) == {1}
            # Engine 1 goes. The prompt is sent to engine 2, and 4 of its blocks need not be computed.
            await service.delete_worker(1)
            assert await chosen(service) == {2}
            assert (await overlap(service, GROUP))[STORE] == (0, 4)
        finally:
            service.shutdown()

    asyncio.run(run())


def test_a_router_that_starts_late_or_missed_something_asks(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.admin.feed.feed.IDLE_S", 0.05)
    # Nothing is told to all: what it knows, it has asked for.
    monkeypatch.setattr("kvstore.admin.feed.feed.SNAPSHOT_EVERY_S", 1e9)

    async def run() -> None:
        fleet.save(range(4))
        fleet.save(range(4, 12))
        fleet.engines[0].publish(computed(range(12)))

        async def learned() -> bool:
            fleet.engines[0].publish(computed(range(12)))
            return fleet.feeding.feed.last.blocks == 12 and not fleet.feeding.feed.last.bare_blocks

        await fleet.until(learned)
        fleet.feeding.feed._snapshot_every_s = 1e9
        fleet.feeding.feed._snapshot_at = fleet.feeding.feed._monotonic()
        service = await fleet.router()
        try:

            async def told() -> bool:
                return (await overlap(service, GROUP))[STORE] == (0, 12)

            await fleet.until(told)
            last = fleet.feeding.feed.last
            assert last.replays >= 1
        finally:
            service.shutdown()

    asyncio.run(run())
