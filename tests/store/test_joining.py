"""Short segments that a save replaces: nothing is lost, whatever ends in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.build import load_settings, open_store
from kvstore.index.contract import BadArgument
from kvstore.index.port import MOST_RUNS, Replaced
from kvstore.keys import SegmentId, block_key, digest, digests, new_segment_id, salt_id, tag_of
from kvstore.store.saving import Joins
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.store.growing import grow
from tests.store.world import (
    SLOT_BYTES,
    chain,
    content,
    fetch,
    make_store,
    match,
    namespace,
    open_space,
    slots,
    with_parts,
)

A = chain(*range(60))
SIZE = 16


class Died(BaseException):
    """The process is gone: nothing may catch this."""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "payloads": f"file://{tmp_path}/payloads",
        "index": f"sqlite://{tmp_path}/index",
        "grace_s": 60.0,
        "claim_ttl_s": 0.001,
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path / "payloads", claim_ttl_s=0.001)
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


def served(space: Space, blocks: int) -> list[int]:
    """Asserts that so many blocks are found and right; returns the sizes of their segments."""
    found = match(space, A[:blocks])
    assert fetch(space, A[:blocks], found) == [content(one) for one in A[:blocks]]
    return [run.count for run in found.runs]


def test_turns_of_one_block_end_in_few_segments(space: Space, store: Store) -> None:
    for turn in range(1, 60):
        grow(space, A[:turn], slots, SIZE)
        served(space, turn)
    assert served(space, 59) == [16, 16, 16, 8, 2, 1]
    counted = store.counters.snapshot()
    # A block counts as stored once, however often it is written.
    assert counted["save_blocks{stored}"] == store.maintenance.usage(space.id).blocks == 59
    assert counted["save_bytes"] > 59 * SLOT_BYTES * 2


@pytest.mark.parametrize("step", ["claim", "put", "put whole", "commit", "commit whole"])
def test_a_crash_at_any_step_leaves_every_block_served(settings: dict[str, Any], step: str) -> None:
    died = False

    def dies(call: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal died
            if after:
                call(*args, **kwargs)
            died = True
            raise Died

        return run

    with open_store(settings) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        for turn in (4, 6, 7):
            grow(space, A[:turn], slots, SIZE)
        before = served(space, 7)
        index: Any = store.index
        payloads: Any = store.backends.payloads
        what, verb = {"put": payloads, "put whole": payloads}.get(step, index), step.split()[0]
        setattr(what, verb, dies(getattr(what, verb), after=step.endswith("whole") or step == "claim"))
        with pytest.raises(Died):
            grow(space, A[:11], slots, SIZE)
        delattr(what, verb)
    assert died and before == [4, 2, 1]
    with open_store(settings) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        assert served(space, 7) == ([7] if step == "commit whole" else before)
        assert match(space, A[:11]).blocks == (11 if step == "commit whole" else 7)
    with Cache(load_settings(settings, environ={})) as cache:
        faults = fsck(cache, depth=Depth(percent=100.0, settled_s=0.0)).faults
        # At most a payload that nothing names.
        stray = ["unlisted"] if step in ("put whole", "commit") else []
        assert [fault.kind for fault in faults] == stray
    # The next turn joins what this one has left.
    with open_store(settings) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        grow(space, A[:14], slots, SIZE)
        assert served(space, 14) == ([11, 3] if step == "commit whole" else [14])


def test_joined_blocks_stay_as_old_as_they_were(settings: dict[str, Any]) -> None:
    with open_store(settings) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        made_s = int(time.time()) - 86_400
        space.save(slots(A[:4]), created_s=made_s)
        grow(space, A[:8], slots, SIZE)
        [run] = match(space, A[:8]).runs
        assert abs(run.record.created_s - made_s) <= 1
        [listing] = store.maintenance.segments(space.id)
        assert listing.last_use_s > made_s + 80_000, "the request that joins them uses them"
    with Cache(load_settings(settings, environ={})) as cache:
        assert not fsck(cache, depth=Depth(percent=100.0, settled_s=0.0)).faults


def test_under_write_back_nothing_is_joined(settings: dict[str, Any], tmp_path: Path) -> None:
    tiers = {"fast": f"file://{tmp_path}/fast", "slow": settings["payloads"]}
    settings["payloads"] = {**tiers, "write": "back"}
    with open_store(settings) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        grow(space, A[:4], slots, SIZE)
        grow(space, A[:8], slots, SIZE)
        assert served(space, 8) == [4, 4]


def test_what_another_has_gone_on_from_is_not_replaced(space: Space) -> None:
    grow(space, A[:4], slots, SIZE)
    found = match(space, A[:9])
    # Another engine saves the same turn and one more block before this one does.
    theirs = space.save(slots(A[4:8]), depth=4, chain=digests(A[:1]))
    (mine,) = grow(space, A[:9], slots, SIZE, found=found)
    assert (theirs.stored, mine.present, mine.stored) == (4, 8, 1)
    assert served(space, 9) == [4, 4, 1]


def test_what_was_evicted_meanwhile_is_stored_anew(space: Space, store: Store) -> None:
    grow(space, A[:4], slots, SIZE)
    found = match(space, A[:4])
    store.index.evict(space.id, [found.runs[0].segment], delete_after_s=0, rule="admin")
    grow(space, A[:8], slots, SIZE, found=found)
    assert served(space, 8) == [8]


@pytest.mark.parametrize("write", ["through", "back"])
def test_what_its_request_has_saved_before_an_erasure_comes_back_in_no_longer_one(
    tmp_path: Path, write: str
) -> None:
    """A request that goes on decoding knows of its own segments no age by the index's clock."""
    now, hers = [1_790_000_000.0], salt_id("hers")
    tiers = {"fast": f"file://{tmp_path}/fast", "slow": f"file://{tmp_path}/slow", "write": write}
    tiered = load_settings({"payloads": tiers, "index": f"sqlite://{tmp_path}/none"}, environ={})
    with make_store(tmp_path, clock=lambda: now[0]) as store:
        space = open_space(with_parts(store, settings=tiered))
        space.save(slots(A[:4]), salt=hers)
        (run,) = match(space, A[:4]).runs
        store.maintenance.forbid(space.id, hers)
        store.index.evict(space.id, [run.segment], delete_after_s=0.0, rule="erased")
        now[0] += 120
        joins = Joins((Replaced(run.segment, digests(A[:4])),), 4)
        longer = new_segment_id(digests(A[:1]))
        saved = space.save(slots(A[:8]), created_s=int(now[0]), salt=hers, segment=longer, joins=joins)
        assert (saved.outcome, match(space, A[:8]).blocks) == ("refused", 0)
        # It keeps nobody from saving what is computed since then.
        now[0] += 1
        assert space.save(slots(A[:8]), salt=hers).outcome == "stored"


def test_an_old_match_can_be_read_for_the_grace_time(settings: dict[str, Any]) -> None:
    with open_store(settings) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        grow(space, A[:4], slots, SIZE)
        found = match(space, A[:4])
        grow(space, A[:8], slots, SIZE)
        store.rounds.housekeep()
        assert fetch(space, A[:4], found) == [content(one) for one in A[:4]]
        assert found.runs[0].segment != match(space, A[:4]).runs[0].segment


def test_readers_never_miss_while_a_chain_is_joined(settings: dict[str, Any]) -> None:
    done, stored = threading.Event(), 0

    def read(space: Space) -> int:
        reads = 0
        while not done.is_set():
            least = stored
            found = match(space, A)
            assert found.blocks >= least
            fetch(space, A, found)
            reads += 1
        return reads

    with open_store(settings) as store, open_store(settings) as other, ThreadPoolExecutor(2) as pool:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        space.register()
        reader = pool.submit(read, other.open(namespace(), block_bytes=SLOT_BYTES))
        try:
            for turn in range(1, 60):
                grow(space, A[:turn], slots, SIZE)
                stored = turn
        finally:
            done.set()
        assert reader.result() > 0
        assert not other.counters.snapshot().get("miss_blocks{missing}", 0)
    with Cache(load_settings(settings, environ={})) as cache:
        assert not fsck(cache, depth=Depth(percent=100.0, settled_s=0.0)).faults


def test_an_old_one_that_two_saves_share_goes_with_the_later_one(space: Space, store: Store) -> None:
    """Whichever of the two that is, and not at all if one of them never comes."""
    for which in ((0, 1), (1, 0)):
        hashes = chain(*range(100 * (1 + which[0]), 100 * (1 + which[0]) + 14))
        first = digests(hashes[:1])
        old = new_segment_id(first)
        space.save(slots(hashes[:12]), segment=old)
        olds = (Replaced(old, digests(hashes[:12])),)
        pieces = [(range(8), Joins(olds, 8)), (range(8, 14), Joins(olds, 4))]
        for number, at in enumerate(which):
            blocks, joins = pieces[at]
            space.save(
                slots(hashes[blocks.start : blocks.stop]),
                depth=blocks.start,
                chain=first,
                insist=True,
                joins=joins,
            )
            found = match(space, hashes)
            assert found.blocks == (14 if number else max(12, blocks.stop))
            assert fetch(space, hashes, found) == [content(one) for one in hashes[: found.blocks]]
            visible = {one.segment for one in store.maintenance.segments(space.id)}
            assert (old in visible) == (not number)


def test_a_match_that_ends_for_its_many_segments_says_so(space: Space, store: Store) -> None:
    packed = digests(chain(*range(MOST_RUNS + 1)))
    record = match(space, A).runs
    assert not record
    space.register()
    grow(space, A[:1], slots, SIZE)
    (run,) = match(space, A[:1]).runs
    for block in range(MOST_RUNS + 1):
        segment = SegmentId(block.to_bytes(8, "big"))
        own = packed[16 * block : 16 * block + 16]
        store.index.commit(space.id, segment, own, run.record, rank=0, ranks=1)
    found = space.match(packed)
    assert (found.blocks, found.reason) == (MOST_RUNS, "in_pieces")
    assert store.counters.snapshot()["miss_blocks{in_pieces}"] == 1


def test_a_later_part_of_a_chain_needs_the_chain(space: Space, store: Store) -> None:
    """A shard is asked by the first digest for all of a chain: with another tag nobody finds the part."""
    first, own = digests(A[:1]), digests(A[4:5])
    assert tag_of(first) != tag_of(own)
    wrong: list[dict[str, Any]] = [
        {},
        {"segment": new_segment_id(own)},
        {"segment": new_segment_id(first)},
        {"segment": new_segment_id(own), "chain": first},
    ]
    for one in wrong:
        with pytest.raises(BadArgument, match="first digest"):
            space.save(slots(A[4:8]), depth=4, **one)
    space.save(slots(A[4:8]), depth=4, chain=digests(A))
    # Blocks that begin their chain need none, and no other is believed.
    space.save(slots(A[:4]), chain=own)
    assert {one.segment[-1] for one in store.maintenance.segments(space.id)} == {tag_of(first)}
    assert digest(block_key(A[0])) == first
