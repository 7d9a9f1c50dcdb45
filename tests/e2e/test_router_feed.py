"""Two real engines, the feed of their store, and routers: all events name the same blocks alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the full set-up: make setup")

from vllm.distributed.kv_events import BlockStored

from tests.admin.feed.conftest import Feeding
from tests.admin.feed.router import Router
from tests.e2e.engine import Engine
from tests.e2e.sharing import prompt

pytestmark = pytest.mark.engine

LONG = prompt(1000, 7)
#: Tokens of a block, and the full blocks of the prompt.
SIZE, BLOCKS = 32, 31


class Pair:
    """Two engines that publish as vLLM does, and the feed, which listens to both."""

    def __init__(self, model: Path, config: dict[str, Any], folder: Path, stack: ExitStack) -> None:
        self.addresses = [f"ipc://{folder}/engine-{number}" for number in (1, 2)]
        self.first, self.second = (
            stack.enter_context(
                Engine(
                    model,
                    kv=config,
                    log_path=folder / f"{number}.log",
                    kv_events_config={
                        "enable_kv_cache_events": True,
                        "publisher": "zmq",
                        "endpoint": self.addresses[number],
                    },
                )
            )
            for number in (0, 1)
        )
        self.feeding = stack.enter_context(closing(Feeding(config, tuple(self.addresses), ownership=False)))

    def compute(self, engine: Router, router: Router) -> set[Any]:
        """Has the first engine compute the prompt; returns its blocks' hashes when `engine`, which listens to
        it, and `router`, which the feed tells, know of all of them, the latter with tokens."""
        for seed in range(1000):
            # Who has subscribed too late hears nothing of what was said.
            self.first.generate([prompt(40, seed)])
            self.feeding.feed.turn(0.2)
            if engine.read() and self.feeding.feed.last.heard:
                break
        assert [one.external_tokens for one in self.first.generate([LONG])] == [0]
        self.first.idle(0.2)

        def told() -> set[Any]:
            engine.read()
            router.read()
            computed = {name for event in longest(engine) for name in event.block_hashes}
            known = {name for event in router.stored if event.token_ids for name in event.block_hashes}
            return computed if len(computed) >= BLOCKS and computed <= known else set()

        self.feeding.until(told)
        return told()


def longest(engine: Router) -> list[BlockStored]:
    """The events of the longest chain that an engine has in its GPU."""
    chains: dict[Any, list[BlockStored]] = {}
    for event in engine.stored:
        if event.medium == "GPU":
            chains[event.block_hashes[-1]] = [*chains.get(event.parent_block_hash, []), event]
    return max(chains.values(), key=lambda chain: sum(len(event.block_hashes) for event in chain), default=[])


@pytest.fixture
def pair(
    model: Callable[..., Path], store_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    monkeypatch.setattr("kvstore.admin.feed.feed.SNAPSHOT_EVERY_S", 0.0)
    monkeypatch.setattr("kvstore.admin.feed.feed.IDLE_S", 0.2)
    with ExitStack() as stack:
        yield Pair(model("text"), store_config("sqlite"), tmp_path, stack)


def test_engines_and_the_feed_name_the_same_blocks(pair: Pair) -> None:
    with ExitStack() as stack:
        own, others = (stack.enter_context(closing(Router(address))) for address in pair.addresses)
        router = pair.feeding.router()
        shared = pair.compute(own, router)
        assert len(shared) == BLOCKS
        tokens = {
            name: event.token_ids[i * SIZE : (i + 1) * SIZE]
            for events in (own.stored, router.stored)
            for event in events
            if event.token_ids
            for i, name in enumerate(event.block_hashes)
        }
        for event in router.stored:
            if event.token_ids:
                assert event.token_ids == [n for name in event.block_hashes for n in tokens[name]]
                assert event.parent_block_hash is None or event.parent_block_hash in tokens
        # The other engine loads what the feed says that it can, and says itself that its GPU has it now.
        [loaded] = pair.second.generate([LONG])
        assert loaded.external_tokens == BLOCKS * SIZE

        def said() -> bool:
            others.read()
            return {name for _, _, name in others.blocks} >= shared

        pair.feeding.until(said)


def test_dynamos_router_routes_by_both(pair: Pair) -> None:
    dynamo = pytest.importorskip(
        "dynamo._core", reason="ai-dynamo-runtime 1.6.1 is not installed (tests/admin/feed/test_dynamo.py)"
    )

    async def run() -> None:
        service = dynamo.SelectionService(indexer_threads=1)
        common = {"model_name": "text", "block_size": SIZE}
        publisher, replay = pair.feeding.addresses
        workers = [
            {"worker_id": n, "endpoint": f"http://{n}", "kv_events_endpoint": address}
            for n, address in enumerate(pair.addresses, 1)
        ]
        workers.append(
            {"worker_id": 9, "endpoint": "store", "routing_group": "shared", "kv_events_endpoint": publisher}
            | {"replay_endpoint": replay}
        )
        for worker in workers:
            await service.upsert_worker(common | worker)
        await asyncio.sleep(1.0)
        with closing(Router(pair.addresses[0])) as engine:
            pair.compute(engine, pair.feeding.router())
            tokens = [token for event in longest(engine) for token in event.token_ids][: BLOCKS * SIZE]

        async def overlap(group: str) -> dict[int, tuple[int, int]]:
            asked = {"model_name": "text", "routing_group": group, "token_ids": tokens}
            found = (await service.overlap_scores(asked))["workers"]
            return {one["worker_id"]: (one["device_blocks"], one["disk_blocks"]) for one in found}

        async def chosen() -> int:
            return int((await service.select({"model_name": "text", "token_ids": tokens}))["worker_id"])

        for _ in range(2000):
            pair.feeding.feed.turn(0.01)
            await asyncio.sleep(0.01)
            if (await overlap("shared"))[9][1] == BLOCKS:
                break
        try:
            assert await overlap("shared") == {9: (0, BLOCKS)}
            found = await overlap("default")
            assert found[1][0] == BLOCKS and found[2][0] == 0
            assert await chosen() == 1
            # That engine goes; the other one has not computed the prompt, and loads all of it.
            await service.delete_worker(1)
            assert await chosen() == 2
            [loaded] = pair.second.generate([LONG])
            assert loaded.external_tokens == BLOCKS * SIZE
        finally:
            service.shutdown()

    asyncio.run(run())
