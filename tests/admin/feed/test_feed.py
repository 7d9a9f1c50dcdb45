"""The feed: routers know what the index has, whatever they or the feed have missed. On both indexes."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import zmq

pytest.importorskip("vllm", reason="routers decode with vLLM's types: make setup")

from vllm.distributed.kv_events import BlockStored, EventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvstore.admin.backends import Cache
from kvstore.admin.feed.feed import Choice, RouterFeed
from kvstore.build import load_settings
from kvstore.errors import ConfigError, DamagedIndex, PermissionDenied, TransientError
from kvstore.keys import NamespaceId
from tests.admin.conftest import BLOCKS_PER_SEGMENT, Admin, Filled, chain, fill, kv_slots, kv_space, opened
from tests.admin.feed.conftest import Start
from tests.servers.redis import RedisServer
from tests.waiting import until

N = BLOCKS_PER_SEGMENT


def names(filled: Filled, *blocks: int) -> set[tuple[Any, ...]]:
    """What a router knows of these blocks of the chain, by the hashes that an engine's events have."""
    hashes = {kv_slots(1, first=block)[0].key[:-2] for block in blocks}
    return {(filled.kv_id, 0, maybe_convert_block_hash(BlockHash(one))) for one in hashes}


def evict(filled: Filled, *numbers: int) -> None:
    """Evicts segments of the chain, counted from its head."""
    segments = [listing.segment for listing in chain(filled)]
    with opened(filled) as index:
        gone = [segments[number] for number in numbers]
        index.evict(NamespaceId(filled.kv_id), gone, delete_after_s=4e9, rule="admin")


def save(filled: Filled, number: int) -> None:
    filled.save(filled.kv, kv_slots(N, first=number * N), depth=number * N)


def test_what_is_stored_is_told_by_the_hashes_of_engines(either: Filled, feeding: Start) -> None:
    feed = feeding(either.settings)
    router = feed.router()
    assert router.blocks == names(either, *range(3 * N)), "and no item: routers know none"
    assert router.topics == {b"kv@kvstore@tiny-random"}
    [first, *_] = router.stored
    assert (first.medium, first.block_size, first.kv_cache_spec_kind) == ("STORAGE", 16, "full_attention")
    assert (first.token_ids, first.parent_block_hash) == ([], None), "nobody has told"
    assert feed.feed.last.model == either.kv.model


def test_whole_hashes_and_no_owner(filled: Filled, feeding: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    router = feeding(filled.settings, whole_hashes=True, ownership=False).router()
    expected = {(None, 0, name) for _, _, name in names(filled, *range(3 * N))}
    assert router.blocks == expected and all(len(name) == 32 for _, _, name in router.blocks)


def test_commits_and_evictions_are_told_as_they_happen(either: Filled, feeding: Start) -> None:
    feed = feeding(either.settings)
    router = feed.router()
    cleared = router.cleared
    evict(either, 1)
    save(either, 3)
    feed.until(lambda: feed.feed.last.events == 2)
    feed.settle()
    assert router.blocks == names(either, *range(N), *range(2 * N, 4 * N))
    assert router.cleared == cleared and feed.feed.last.holes == 0
    lag_s = feed.feed.last.lag_s
    assert lag_s is not None and 0 <= lag_s < 3600


def test_an_invalidation_takes_all_of_it(either: Filled, feeding: Start) -> None:
    feed = feeding(either.settings)
    router = feed.router()
    with opened(either) as index:
        index.invalidate(NamespaceId(either.kv_id))
    feed.until(lambda: feed.feed.last.events == 1)
    feed.settle()
    assert router.blocks == set() and feed.feed.last.segments == 0


def test_what_is_taken_back_and_committed_again_at_once_is_told(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    router = feed.router()
    name = NamespaceId(filled.kv_id)
    with opened(filled) as index:
        *_, commit = index.events(name)
    pages = [[dataclasses.replace(commit, op="evict"), commit], []]
    feed.feed._readers[name].read = lambda limit: pages.pop(0)  # type: ignore
    feed.feed.turn(0)
    feed.sockets.publish(())
    until(lambda: router.read() and feed.sockets.number - 1 in router.batches)
    assert router.blocks == names(filled, *range(3 * N)) and feed.feed.last.events == 2


def test_a_first_page_that_is_full_may_begin_after_a_hole(
    filled: Filled, feeding: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.admin.feed.feed._PAGE", 3)
    feed = feeding(filled.settings)
    router = feed.router()
    feed.feed._readers[NamespaceId(filled.kv_id)].position = ""
    feed.until(lambda: feed.feed.last.holes == 1)
    feed.settle()
    assert router.blocks == names(filled, *range(3 * N))


def test_a_block_goes_with_the_last_of_its_segments(filled: Filled, feeding: Start) -> None:
    # The same prompts in an engine of other weights: other blocks by the same hashes, told without an owner.
    other = dataclasses.replace(filled, kv=kv_space(weights="ffff"))
    save(other, 0)
    feed = feeding(filled.settings, ownership=False)
    router = feed.router()

    def known() -> set[Any]:
        return {name for _, _, name in router.blocks}

    both = {name for _, _, name in names(filled, *range(3 * N))}
    assert known() == both and feed.feed.last.segments == 4
    evict(filled, 0)
    feed.until(lambda: feed.feed.last.events == 1)
    feed.settle()
    assert known() == both
    evict(other, 0)
    feed.until(lambda: feed.feed.last.events == 2)
    feed.settle()
    assert known() == {name for _, _, name in names(filled, *range(N, 3 * N))}


def test_a_router_that_starts_late_is_sent_a_snapshot_and_then_what_comes(
    either: Filled, feeding: Start
) -> None:
    feed = feeding(either.settings)
    early = feed.router()
    evict(either, 0)
    feed.until(lambda: feed.feed.last.events == 1)
    feed.settle()
    late = feed.router()
    late.blocks.clear()
    late.events.clear()
    answer = feed.asked(late, 0)
    assert answer[-1][0] == feed.sockets.number - 1, "what is published next is the next that it expects"
    for _, batch in answer:
        late.take(batch)
    assert late.cleared == 1 and type(late.events[0]).__name__ == "AllBlocksCleared"
    assert late.blocks == early.blocks == names(either, *range(N, 3 * N))


def test_a_router_that_missed_batches_is_sent_these(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    router = feed.router()
    first = feed.sockets.number
    for number in (3, 4, 5):
        save(filled, number)
        feed.until(lambda number=number: feed.feed.last.events == number - 2)
    feed.settle()
    answer = feed.asked(router, first + 1)
    assert answer == [(number, router.batches[number]) for number in range(first + 1, feed.sockets.number)]
    assert len(answer) >= 2
    assert feed.asked(router, feed.sockets.number) == [], "nothing was missed"


def test_what_is_kept_for_replays_is_bounded(
    filled: Filled, feeding: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.admin.feed.sockets.KEPT_BATCHES", 4)
    feed = feeding(filled.settings)
    router = feed.router()
    for _ in range(10):
        feed.sockets.publish(())
    assert feed.sockets.kept[0] == 4
    monkeypatch.setattr("kvstore.admin.feed.sockets.KEPT_BYTES", 30)
    feed.sockets.publish(())
    count, nbytes = feed.sockets.kept
    assert 0 < count < 4 and nbytes <= 30
    [*_, (number, batch)] = feed.asked(router, feed.sockets.number - 8)
    assert number == feed.sockets.number - 1
    router.take(batch)
    assert router.blocks == names(filled, *range(3 * N))


def test_a_router_that_asks_nothing_is_told_all_when_it_subscribes(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    for _ in range(2):
        router = feed.router()
        assert router.blocks == names(filled, *range(3 * N))


def test_an_empty_batch_tells_an_idle_router_that_it_missed_something(
    filled: Filled, feeding: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.admin.feed.feed.IDLE_S", 0.05)
    feed = feeding(filled.settings)
    router = feed.router()
    events, number = len(router.events), feed.sockets.number
    feed.until(lambda: feed.sockets.number > number + 2)
    feed.settle()
    assert len(router.events) == events
    assert set(range(number, number + 2)) <= set(router.batches)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def test_a_hole_in_the_ring_is_told(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, feeding: Start
) -> None:
    filled = fill(tmp_path / "cache", request.getfixturevalue("redis_url") if kind == "redis" else None)
    filled.settings["journal"] = {"events": 4}
    feed = feeding(filled.settings)
    router = feed.router()
    cleared = router.cleared
    # A ring loses a hundred at a time.
    end = 240
    for number in range(3, end):
        save(filled, number)
    feed.until(lambda: feed.feed.last.holes == 1)
    feed.settle()
    assert router.cleared == cleared + 1
    assert router.blocks == names(filled, *range(end * N))
    save(filled, end)
    evict(filled, 0, 1)
    feed.until(lambda: feed.feed.last.segments == end - 1)
    feed.settle()
    assert router.blocks == names(filled, *range(2 * N, (end + 1) * N)) and feed.feed.last.holes == 1


def test_a_namespace_that_is_dropped_is_gone_and_one_that_comes_is_told(
    either: Filled, feeding: Start, admin: Admin
) -> None:
    feed = feeding(either.settings)
    router = feed.router()
    assert admin("drop", either.kv_id, "--now", "--apply", *either.options).code == 0
    feed.until(lambda: feed.feed.last.namespaces == ())
    feed.settle()
    assert router.blocks == set()
    either.kv = kv_space(weights="ffff")
    save(either, 0)
    feed.until(lambda: feed.feed.last.namespaces == (either.kv_id,) and feed.feed.last.segments)
    feed.settle()
    assert router.blocks == names(either, *range(N))


@pytest.mark.servers
def test_an_index_that_dies_and_comes_back_empty(
    tmp_path: Path, private_redis: RedisServer, feeding: Start, caplog: pytest.LogCaptureFixture
) -> None:
    filled = fill(tmp_path / "cache", private_redis.url)
    feed = feeding(filled.settings)
    router = feed.router()
    private_redis.kill()
    feed.until(lambda: feed.feed.last.problem)
    feed.feed.turn(0)
    assert router.blocks and len([r for r in caplog.records if "trying again" in r.message]) == 1
    late = feed.router()
    assert late.blocks == router.blocks, "what is known is told meanwhile"
    private_redis.start()
    feed.until(lambda: not feed.feed.last.problem)
    feed.settle()
    assert router.blocks == late.blocks == set()
    save(filled, 1)
    feed.until(lambda: feed.feed.last.segments == 1)
    feed.settle()
    assert router.blocks == late.blocks == names(filled, *range(N, 2 * N))


def test_an_index_in_a_file_that_is_deleted(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    router = feed.router()
    assert router.blocks
    for path in filled.folder.glob("index.sqlite*"):
        path.unlink()
    feed.until(lambda: feed.feed.last.namespaces == ())
    feed.settle()
    assert router.blocks == set() and feed.feed.last.holes == 1
    save(filled, 1)
    feed.until(lambda: feed.feed.last.segments)
    feed.settle()
    assert router.blocks == names(filled, *range(N, 2 * N))


@pytest.mark.servers
def test_who_may_only_read_may_feed(tmp_path: Path, private_redis: RedisServer, feeding: Start) -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    [rule] = re.findall(r"^user kvstore-reader on >PASSWORD (.*)$", text, re.MULTILINE)
    filled = fill(tmp_path / "cache", private_redis.url)
    with redis.Redis(port=private_redis.port, protocol=2) as owner:
        owner.execute_command("ACL", "SETUSER", "kvstore-reader", "on", ">secret", *rule.split())
    reader = {"redis": {"username": "kvstore-reader", "password": "secret"}}
    feed = feeding(filled.settings | reader)
    router = feed.router()
    evict(filled, 0)
    feed.until(lambda: feed.feed.last.events == 1)
    feed.settle()
    assert router.blocks == names(filled, *range(N, 3 * N)) and not feed.feed.last.problem


def test_payloads_that_cannot_be_read_for_a_while_lose_nothing(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    router = feed.router()
    evict(filled, 0)
    save(filled, 3)
    working = feed.cache.payloads

    class Failing:
        def read(self, *args: Any, **options: Any) -> int:
            raise TransientError("gone for a moment")

        def close(self) -> None:
            pass

    feed.cache.__dict__["payloads"] = Failing()
    feed.until(lambda: "gone for a moment" in feed.feed.last.problem)
    feed.cache.__dict__["payloads"] = working
    feed.until(lambda: feed.feed.last.events == 2)
    feed.settle()
    assert router.blocks == names(filled, *range(N, 4 * N)) and not feed.feed.last.problem


def test_a_damaged_payload_is_left_out(filled: Filled, feeding: Start) -> None:
    victim = chain(filled)[1].segment.hex()
    [path] = [path for path in filled.payload_files() if path.name == f"{victim}.0"]
    path.write_bytes(b"\0" * 100)
    feed = feeding(filled.settings)
    router = feed.router()
    assert router.blocks == names(filled, *range(N), *range(2 * N, 3 * N))
    assert feed.feed.last.unreadable == 1


def test_payloads_that_may_not_be_read(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    working, denied = feed.cache.payloads, {f"{listing.segment.hex()}.0" for listing in chain(filled)}

    class Denying:
        def read(self, name: str, *args: Any, **options: Any) -> int | None:
            if name.rsplit("/", 1)[-1] in denied:
                raise PermissionDenied("not yours")
            return working.read(name, *args, **options)

        def close(self) -> None:
            working.close()

    feed.cache.__dict__["payloads"] = Denying()
    feed.feed.turn(0)
    assert feed.feed.last.problem == "not yours", "none may be: an operator's to mend"
    denied.pop()
    feed.feed.turn(0)
    assert not feed.feed.last.problem and (feed.feed.last.segments, feed.feed.last.unreadable) == (1, 2)


def test_a_namespace_that_fails_stops_no_other(filled: Filled, feeding: Start) -> None:
    other = dataclasses.replace(filled, kv=kv_space(weights="ffff"))
    save(other, 0)
    for failed, left in ((filled.kv_id, 1), (other.kv_id, 3)):
        feed = feeding(filled.settings)
        index = feed.cache.index
        assert index is not None

        def failing(name: NamespaceId, failed: str = failed, working: Any = index.segments) -> Any:
            if name == failed:
                raise DamagedIndex("makes no sense")
            return working(name)

        index.segments = failing  # type: ignore
        feed.feed.turn(0)
        assert feed.feed.last.problem == "makes no sense" and feed.feed.last.segments == left


def test_an_index_that_lists_a_segment_twice(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings, most_blocks=N)
    index = feed.cache.index
    assert index is not None
    working = index.segments
    index.segments = lambda name: [one for one in working(name) for _ in "12"]  # type: ignore
    assert feed.router().blocks == names(filled, *range(N))


def test_more_than_may_be_held_is_taken_back(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings, most_blocks=3 * N)
    router = feed.router()
    save(filled, 3)
    feed.until(lambda: feed.feed.last.events == 1)
    feed.settle()
    assert router.blocks == names(filled, *range(3 * N)), "the deepest goes"
    assert (feed.feed.last.crowded_out, feed.feed.last.blocks) == (1, 3 * N)
    fewer = feeding(filled.settings, most_blocks=2 * N)
    assert fewer.router().blocks == names(filled, *range(2 * N))


def test_a_restart_makes_routers_ask(filled: Filled, feeding: Start) -> None:
    before = feeding(filled.settings)
    router = before.router()
    evict(filled, 0)
    after = feeding(filled.settings)
    again = after.router()
    numbers = sorted(again.batches)
    assert numbers[0] > max(router.batches) + 1, "or a router would take the new ones for old ones"
    for _, batch in after.asked(again, max(router.batches) + 1):
        router.take(batch)
    assert router.blocks == names(filled, *range(N, 3 * N))


def test_settings_with_which_nothing_can_be_told(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    back = {"fast": f"file://{tmp_path}/fast", "slow": store, "fast_capacity": "1GiB", "write": "back"}
    later: dict[str, Any] = {"index": f"sqlite:///{tmp_path}/index", "payloads": back}
    nothing: dict[str, Any] = {"payloads": store, "journal": {"events": 0}}
    for settings, said in ((later, "payloads.write: back"), (nothing, "journal.events is 0")):
        with Cache(load_settings(settings, {})) as cache, pytest.raises(ConfigError, match=said):
            RouterFeed(cache, Choice(), None)


def test_a_model_must_be_named_where_there_are_several(filled: Filled, feeding: Start, admin: Admin) -> None:
    other = dataclasses.replace(filled, kv=kv_space(model="another"))
    save(other, 0)
    ran = admin("feed", "--once", *filled.options)
    assert ran.code == 2 and "--model says which of another, tiny-random" in ran.err
    assert feeding(filled.settings, model="another").router().blocks == names(other, *range(N))
    told = admin("feed", "--once", "--json", "--model", "another", *filled.options).json
    assert (told["model"], told["blocks"], told["bare_blocks"]) == ("another", N, N)


# ---- what engines tell ------------------------------------------------------------------------------

msgpack = msgspec.msgpack.encode


def stored_event(**changes: Any) -> dict[str, Any]:
    fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": list(range(16)), "block_size": 16}
    return {"type": "BlockStored", **fields, **changes}


def engine(blocks: range) -> EventBatch:
    """The batch of an engine that has computed these blocks of the chain: token n of block b is 100 b + n."""
    hashes = [maybe_convert_block_hash(BlockHash(one.key[:-2])) for one in kv_slots(blocks.stop)]
    return EventBatch(
        ts=1.0,
        events=[
            BlockStored(
                block_hashes=hashes[blocks.start : blocks.stop],
                parent_block_hash=hashes[blocks.start - 1] if blocks.start else None,
                token_ids=[100 * block + n for block in blocks for n in range(16)],
                block_size=16,
                lora_id=None,
                medium="GPU",
                lora_name="tuned",
                group_idx=0,
            )
        ],
    )


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[ZmqEventPublisher]:
    """vLLM's own."""
    made = ZmqEventPublisher(0, endpoint=f"ipc://{tmp_path}/engine")
    yield made
    made.shutdown()


def test_tokens_and_parents_are_engines(
    filled: Filled, feeding: Start, publisher: ZmqEventPublisher, tmp_path: Path
) -> None:
    feed = feeding(filled.settings, (f"ipc://{tmp_path}/engine",))
    router = feed.router()
    assert feed.feed.last.bare_blocks == 3 * N
    router.events.clear()

    def told(blocks: range) -> None:
        # Until the feed has subscribed nobody hears it.
        publisher.publish(engine(blocks))

    def hears(blocks: range, bare: int) -> None:
        def said() -> bool:
            told(blocks)
            return feed.feed.last.bare_blocks == bare

        feed.until(said)
        feed.settle()

    hears(range(2 * N), N)
    assert [len(event.block_hashes) for event in router.stored] == [N, N], "each segment again"
    first, second = router.stored
    assert first.parent_block_hash is None and second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == [100 * block + n for block in range(N, 2 * N) for n in range(16)]
    assert second.lora_name == "tuned"
    # Of a segment of which a part is known this part is told again.
    router.events.clear()
    hears(range(2 * N, 2 * N + 1), N - 1)
    assert [(len(event.block_hashes), len(event.token_ids)) for event in router.stored] == [(1, 16)]
    # So is what waits for it; and a snapshot has all tokens.
    publisher.publish(engine(range(3 * N, 4 * N)))
    feed.until(lambda: feed.feed.last.told_blocks == 3 * N + 1)
    router.events.clear()
    save(filled, 3)
    feed.until(lambda: feed.feed.last.events == 1)
    feed.settle()
    [event] = router.stored
    assert (event.token_ids, event.parent_block_hash) == ([], None), "nor are all before it known"
    router.events.clear()
    hears(range(2 * N, 3 * N), 0)
    assert [len(event.token_ids) for event in router.stored] == [(N - 1) * 16, N * 16]
    late = feed.router()
    assert sum(len(event.token_ids) for event in late.stored) == 4 * N * 16
    assert feed.feed.last.heard >= 3 and feed.feed.last.unheard == 0


def test_all_segments_of_a_block_are_told_again(
    filled: Filled, feeding: Start, publisher: ZmqEventPublisher, tmp_path: Path
) -> None:
    other = dataclasses.replace(filled, kv=kv_space(weights="ffff"))
    save(other, 0)
    feed = feeding(filled.settings, (f"ipc://{tmp_path}/engine",))
    router = feed.router()
    router.events.clear()

    def said() -> bool:
        publisher.publish(engine(range(N)))
        return feed.feed.last.bare_blocks == 2 * N

    feed.until(said)
    feed.settle()
    assert {event.ownership for event in router.stored if event.token_ids} == {filled.kv_id, other.kv_id}
    # One of them goes before anything is told of the rest, and the other stays as it was.
    evict(other, 0)
    feed.until(lambda: feed.feed.last.events == 1)
    assert feed.feed.last.bare_blocks == 2 * N


def test_the_index_is_asked_no_more_often_for_what_engines_say(
    filled: Filled, feeding: Start, publisher: ZmqEventPublisher, tmp_path: Path
) -> None:
    feed = feeding(filled.settings, (f"ipc://{tmp_path}/engine",))

    def said() -> bool:
        publisher.publish(engine(range(1)))
        return feed.feed.last.heard > 0

    feed.until(said)
    heard = feed.feed.last.heard
    publisher.publish(engine(range(1)))
    began = time.monotonic()
    feed.feed.turn(0.3)
    assert time.monotonic() - began >= 0.29
    feed.until(lambda: feed.feed.last.heard > heard)


def test_what_engines_told_is_bounded(
    filled: Filled, feeding: Start, publisher: ZmqEventPublisher, tmp_path: Path
) -> None:
    feed = feeding(filled.settings, (f"ipc://{tmp_path}/engine",), most_blocks=2 * N)

    def said() -> bool:
        publisher.publish(engine(range(5 * N)))
        return feed.feed.last.told_blocks > 0

    feed.until(said)
    assert feed.feed.last.told_blocks == 4 * N, "those that are announced, and 2 N others"
    assert feed.feed.last.bare_blocks == 0


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"\xc1",
        msgpack([1.0]),
        msgpack([1.0, [{"type": "Unheard"}]]),
        msgpack([1.0, [{"type": "BlockStored", "block_hashes": [[1]]}]]),
        msgpack([1.0, [stored_event(token_ids=[1 << 32] * 16)]]),
        msgpack([1.0, [stored_event(block_hashes=["text"])]]),
    ],
    ids=str,
)
def test_what_is_no_batch_of_an_engine_is_counted(
    filled: Filled, feeding: Start, tmp_path: Path, batch: bytes
) -> None:
    address = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.bind(address)
        feed = feeding(filled.settings, (address,))

        def said() -> bool:
            engine.send_multipart((b"", bytes(8), batch))
            return feed.feed.last.unheard > 0

        feed.until(said)
        assert feed.feed.last.heard == feed.feed.last.told_blocks == 0


def test_a_request_that_is_none_is_not_answered(filled: Filled, feeding: Start) -> None:
    feed = feeding(filled.settings)
    router = feed.router()
    for frames in ([b""], [b"", b"1"], [b"", bytes(8), b""], [b"", b"", b"", b""]):
        router.dealer.send_multipart(frames)
    answer = feed.asked(router, feed.sockets.number - 1)
    assert len(answer) == 1 and feed.feed.last.replays == 1
