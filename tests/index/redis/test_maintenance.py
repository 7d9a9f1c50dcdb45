"""RedisIndex, what is Redis's alone in its maintenance: scores, an older schema, generations, rings, ghosts,
races between processes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import redis
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import CapacityExceeded, NamespaceUnknown
from kvstore.index.eviction import GHOST_LEAST, ghost_bytes, ghost_step, worth
from kvstore.index.maintenance import Usage
from kvstore.index.port import CommitState, Outcome
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id, new_segment_id
from schemas.records import EvictionRule, pack_record, rounded_cost
from schemas.settings import JournalSettings
from tests.index.contract.chains import (
    CREATED_S,
    chain,
    items,
    namespace,
    part_of,
    put,
    put_all,
    record,
    served,
)
from tests.index.redis.racer import KEEP_BYTES
from tests.servers.redis import PATIENT, RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.servers

LATER_S = CREATED_S + 3600.0
QUOTA_RULES: tuple[EvictionRule, ...] = ("capacity", "tenant_quota", "namespace_quota")
SMALL = JournalSettings(events=100, outcomes=100, ghosts=100)
NONE = JournalSettings(events=0, outcomes=0, ghosts=0)


@pytest.fixture
def index(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, PATIENT, clock=lambda: CREATED_S) as index:
        yield index


@pytest.fixture
def small(redis_url: str) -> Iterator[RedisIndex]:
    """Another handle on it, with short rings."""
    with RedisIndex.from_settings(redis_url, PATIENT, journal=SMALL) as index:
        yield index


@pytest.fixture
def name(index: RedisIndex) -> NamespaceId:
    return index.register(namespace(), expected_blocks=1000)


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """The server around the index."""
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


# Scores

#: What is yet to come counts as now.
_LAST_MINUTE = int(time.time()) // 60 - 5
_MINUTES = st.one_of(st.sampled_from([0, 1, _LAST_MINUTE]), st.integers(0, _LAST_MINUTE))
_DEPTHS = st.one_of(
    st.sampled_from([0, 1, 2**20 - 2, 2**20 - 1, 2**20, 2**32 - 1]), st.integers(0, 2**32 - 1)
)
_COSTS = st.one_of(st.sampled_from([0, 4607, 2**42]), st.integers(0, 2**42))


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["kv", "ec"]),
    made=_MINUTES,
    depth=_DEPTHS,
    cost=_COSTS,
    used=st.one_of(st.sampled_from([0, _LAST_MINUTE - 1, _LAST_MINUTE]), st.integers(0, _LAST_MINUTE)),
    pinned=st.booleans(),
)
def test_a_score_holds_the_last_use_depth_and_worth_exactly(
    kind: str,
    made: int,
    depth: int,
    cost: int,
    used: int,
    pinned: bool,
    index: RedisIndex,
    raw: redis.Redis,
) -> None:
    name = index.register(items() if kind == "ec" else namespace(), expected_blocks=1000)
    segment = new_segment_id()
    one = record(1, depth=depth, created_s=min(2**32 - 1, made * 60 + 59), cost_us=rounded_cost(cost))
    index.commit(name, segment, chain(1), one, rank=0, ranks=1)
    extra = worth(one.cost_us, one.nbytes) if kind == "ec" else 0
    fraction = Fraction(min(depth, 2**20 - 1) * 16 + extra, 2**26)
    if pinned:
        assert index.pin(name, [segment], most_bytes=one.nbytes) == 1
    where = f"kvs:{{{name}}}:{'pins' if pinned else 'lru'}"

    def holds(minute: float) -> bool:
        right = Fraction(raw.zscore(where, segment)) == Fraction(minute) + 10 * extra - fraction
        (found,) = index.get(name, [segment])
        assert found is not None
        assert (found.last_use_s, found.pinned) == (minute * 60, pinned)
        if not pinned:
            (candidate,) = [c for c in index.order(name, 10_000) if c.segment == segment]
            assert (candidate.keep_s, candidate.used_s) == ((minute + 10 * extra) * 60, minute * 60)
        return right

    first = max(0, (one.created_s - 30) // 15) / 4
    assert holds(first)
    index.touch(name, [segment], used * 60 + 44.9)
    last = max(first, used + 0.5)
    assert holds(last)
    if pinned:
        assert index.unpin(name, [segment]) == 1
        assert Fraction(raw.zscore(f"kvs:{{{name}}}:lru", segment)) == Fraction(last) + 10 * extra - fraction
    index.unlist(name, [segment])


# An older schema


def old_namespace(raw: redis.Redis, digests: bytes, segment: SegmentId) -> NamespaceId:
    """A namespace with one segment and one incomplete commit as schema 1 had them, in 4 buckets."""
    name = namespace_id(namespace())
    prefix = f"kvs:{{{name}}}:"
    raw.sadd("kvs:ns", name)
    usage = {"bytes": 6144, "segments": 1, "blocks": 4, "cursor": 0}
    raw.hset(
        f"{prefix}meta",
        mapping={"json": canonical_json(namespace()), "bits": 2, "created": CREATED_S, **usage},
    )
    agreement = xxhash.xxh3_64_digest(digests)
    raw.hset(f"{prefix}segs", segment, b"6144:4:" + agreement + pack_record(record(4)))
    raw.zadd(f"{prefix}lru", {segment: CREATED_S // 60})
    raw.zadd(f"{prefix}trash", {b"trashed!": CREATED_S + 1 / 256})
    raw.hset(f"{prefix}part:{b'started!'.hex()}", mapping={"agreement": agreement, "0": b"4608:x"})
    for slot in range(4):
        digest = part_of(digests, slot, 1)
        raw.hset(f"{prefix}b:{digest[0] >> 6:x}", digest, segment + slot.to_bytes(2, "big"))
    return name


def test_a_namespace_of_schema_1_is_unknown_and_begins_anew(index: RedisIndex, raw: redis.Redis) -> None:
    digests, segment = chain(4), new_segment_id()
    name = old_namespace(raw, digests, segment)
    assert index.match(name, digests) == []
    assert index.find(name, digests) == [None] * 4
    assert index.namespaces() == {}
    assert index.accounts() == []
    with pytest.raises(NamespaceUnknown):
        put(index, name, digests)
    with pytest.raises(NamespaceUnknown):
        index.claim(name, digests, segment, 1.0)
    index.tell(name, [Outcome(1.0, "r", "match", 1, 0, "absent", 0, part_of(digests, 0, 1))])

    assert index.register(namespace(), expected_blocks=10**6) == name
    assert index.usage(name) == Usage(0, 0, 0)
    assert index.states(name, [segment]) == [None]
    # What was evicted before is deleted in its time, and entries are found where they were.
    assert index.reapable(name, CREATED_S, 10) == [(b"trashed!", 1)]
    assert raw.hget(f"kvs:{{{name}}}:meta", "bucket_bits") == b"2"
    assert index.commit(name, SegmentId(b"started!"), digests, record(4), rank=1, ranks=2) is (
        CommitState.REFUSED
    )
    assert index.sweep(name, 100) == 4
    # The payload is as good as ever: what rebuild does.
    assert put(index, name, digests, segment=segment) == segment
    assert served(index.match(name, digests)) == 4
    index.register(namespace(), expected_blocks=10)
    assert served(index.match(name, digests)) == 4


def test_registering_again_is_seen(redis_url: str) -> None:
    now_s = float(CREATED_S)
    with RedisIndex.from_settings(redis_url, PATIENT, clock=lambda: now_s) as index:
        name = index.register(namespace(), expected_blocks=10)
        put(index, name, chain(3))
        now_s += 0.5
        index.register(namespace(), expected_blocks=10)
        (account,) = index.accounts()
        assert (account.seen_s, account.usage.blocks) == (CREATED_S + 0.5, 3)


# Generations


def test_parts_of_another_epoch_are_refused_for_every_rank_until_they_expire(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    digests, segment = chain(3), new_segment_id()

    def commit(rank: int) -> CommitState:
        return index.commit(name, segment, digests, record(3), rank=rank, ranks=3)

    assert commit(0) is CommitState.WAITING
    assert index.invalidate(name) == 0
    part = f"kvs:{{{name}}}:part:{segment.hex()}"
    for rank in (1, 2, 0, 1):
        assert commit(rank) is CommitState.REFUSED
        assert raw.hlen(part) == 3
    assert index.states(name, [segment]) == ["incomplete"]
    raw.delete(part)
    assert [commit(rank) for rank in (1, 2, 0)] == [CommitState.WAITING] * 2 + [CommitState.VISIBLE]


def test_what_is_complete_or_gone_is_not_counted_as_incomplete(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    complete, evicted, unlisted, left = (new_segment_id() for _ in range(4))
    for segment in (complete, evicted, unlisted, left):
        index.commit(name, segment, chain(1), record(1), rank=1, ranks=2)
    assert raw.zcard(f"kvs:{{{name}}}:parts") == 4
    index.commit(name, complete, chain(1), record(1), rank=0, ranks=2)
    index.evict(name, [evicted], delete_after_s=LATER_S, rule="abandoned")
    index.unlist(name, [unlisted])
    assert raw.zrange(f"kvs:{{{name}}}:parts", 0, -1) == [left]
    # One whose hour is over doesn't keep its namespace, and the next one forgets it.
    index.evict(name, [complete], delete_after_s=LATER_S, rule="admin")
    index.reaped(name, [complete, evicted])
    assert index.erase(name, 1000) == "in_use"
    raw.zadd(f"kvs:{{{name}}}:parts", {left: 1.0})
    index.commit(name, unlisted, chain(1), record(1), rank=1, ranks=2)
    assert raw.zrange(f"kvs:{{{name}}}:parts", 0, -1) == [unlisted]
    raw.zadd(f"kvs:{{{name}}}:parts", {unlisted: 1.0})
    assert index.erase(name, 1000) == "erased"


def test_generations_are_drained_in_turn(index: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    kept: list[list[SegmentId]] = []
    # Of epochs in which nothing was stored, first, in between and last, nothing is left behind.
    for round_, count in enumerate([0, 300, 0, 3, 0]):
        digests = chain(count, seed=str(round_))
        kept.append(put_all(index, name, digests, [1] * count))
        assert index.invalidate(name) == count
        for segments in kept:
            assert set(index.states(name, segments)) <= {"bygone"}
    assert {key.decode()[-5:] for key in raw.scan_iter(match="*:old:*")} == {"old:1", "old:3"}
    with pytest.raises(AssertionError):  # refused
        put(index, name, chain(300, seed="1"), 7, 1, segment=kept[1][7])
    fresh = put(index, name, chain(300, seed="1"))
    assert index.accounts()[0].bygone == 303
    assert index.drain(name, delete_after_s=LATER_S, limit=299) == 299
    assert index.accounts()[0].bygone == 4
    assert list(raw.scan_iter(match="*:old:3"))
    assert index.drain(name, delete_after_s=LATER_S, limit=299) == 4
    assert index.drain(name, delete_after_s=LATER_S, limit=299) == 0
    assert list(raw.scan_iter(match="*:old:*")) == []
    assert (index.accounts()[0].bygone, index.accounts()[0].trashed) == (0, 303)
    assert index.invalidate(name) == 1
    assert index.states(name, [fresh]) == ["bygone"]
    assert index.drain(name, delete_after_s=LATER_S, limit=1) == 1


def test_invalidating_is_one_rename_however_much_there_is(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    def calls(count: int) -> dict[str, int]:
        put_all(index, name, chain(count, seed=str(count)), [1] * count)
        index.invalidate(name)  # the script is known from now on
        put_all(index, name, chain(count, seed=f"again {count}"), [1] * count)
        raw.config_resetstat()
        assert index.invalidate(name) == count
        stats = raw.info("commandstats")
        return {key: one["calls"] for key, one in stats.items() if not key.startswith("cmdstat_config")}

    assert calls(3) == calls(600)


# Counting


def test_what_is_in_no_order_or_in_both_is_mended(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    segments = put_all(index, name, chain(6), [1] * 6)
    index.pin(name, segments[:2], most_bytes=10**6)
    scores = dict(raw.zrange(f"kvs:{{{name}}}:lru", 0, -1, withscores=True))
    raw.zadd(f"kvs:{{{name}}}:lru", {segments[0]: 5.0})
    raw.zrem(f"kvs:{{{name}}}:lru", *segments[3:5])
    found = index.reconcile(name)
    assert (found.mended, found.counted) == (2, found.recorded)
    assert index.reconcile(name).mended == 0
    assert dict(raw.zrange(f"kvs:{{{name}}}:lru", 0, -1, withscores=True)) == scores
    assert set(raw.zrange(f"kvs:{{{name}}}:pins", 0, -1)) == set(segments[:2])


def test_a_lost_number_of_bygones_is_found_again(
    index: RedisIndex, raw: redis.Redis, name: NamespaceId
) -> None:
    put_all(index, name, chain(6), [1] * 6)
    index.invalidate(name)
    raw.hset(f"kvs:{{{name}}}:meta", "bygone", 77)
    index.reconcile(name)
    assert index.accounts()[0].bygone == 6


# Slices


def test_of_a_touch_in_many_slices_the_first_segment_begins_a_load(
    index: RedisIndex, name: NamespaceId
) -> None:
    segments = put_all(index, name, chain(2500), [1] * 2500)
    index.touch(name, segments, LATER_S)
    assert index.hottest(name, 10) == [(segments[0], 1.0)]
    assert {one.last_use_s for one in index.segments(name)} == {LATER_S // 60 * 60}


def test_pinning_too_much_in_many_slices_pins_none(index: RedisIndex, name: NamespaceId) -> None:
    segments = put_all(index, name, chain(1200), [1] * 1200)
    before, one = index.usage(name), record(1).nbytes
    with pytest.raises(CapacityExceeded):
        index.pin(name, segments, most_bytes=1199 * one)
    assert index.usage(name) == before
    assert len(index.order(name, 2000)) == 1200
    assert index.pin(name, segments, most_bytes=1200 * one) == 1200


def test_pages_of_rings_follow_each_other(index: RedisIndex, name: NamespaceId) -> None:
    put_all(index, name, chain(1300), [1] * 1300)
    events = index.events(name, limit=5000)
    assert [event.depth for event in events] == list(range(1300))
    assert index.events(name, after=events[99].position, limit=1100) == events[100:1200]
    index.tell(name, [Outcome(float(i), "r", "match", 1, 0, "absent", 0, b"") for i in range(1300)])
    assert [one.at_s for one in index.outcomes(name, 1200)] == [float(i) for i in range(1299, 99, -1)]


def test_a_bucket_of_thousands_is_listed_and_swept_whole(index: RedisIndex) -> None:
    name = index.register(namespace(), expected_blocks=1)
    digests = random.Random(2).randbytes(16 * 5000)
    kept, gone = put_all(index, name, digests, [2000, 3000])
    found = {(one.digest, one.segment, one.slot) for one in index.entries(name)}
    assert found == {(digests[16 * i : 16 * i + 16], kept, i) for i in range(2000)} | {
        (digests[16 * i : 16 * i + 16], gone, i - 2000) for i in range(2000, 5000)
    }
    index.evict(name, [gone], delete_after_s=LATER_S, rule="admin")
    # Less than a call looks at, so it stops in the middle of the bucket and goes on from there.
    assert sum(index.sweep(name, 300) for _ in range(20)) == 3000
    assert {one.segment for one in index.entries(name)} == {kept}


# Rings


def test_rings_are_bounded_and_memory_is_flat(small: RedisIndex, raw: redis.Redis, name: NamespaceId) -> None:
    source = random.Random(3)

    def churn(rounds: int) -> dict[str, int]:
        for _ in range(rounds):
            digests = source.randbytes(16)
            segment = put(small, name, digests)
            small.touch(name, [segment], CREATED_S + 60)
            small.evict(name, [segment], delete_after_s=LATER_S, rule="capacity")
            small.tell(name, [Outcome(1.0, "r" * 1000, "match", 2, 1, "absent", 1, digests * 300)] * 3)
            small.reaped(name, [segment])
        small.sweep(name, 10_000)
        keys = [key.decode() for key in raw.keys(f"kvs:{{{name}}}:*")]
        return {key.split(":", 2)[2]: raw.memory_usage(key, samples=0) for key in keys}

    first = churn(400)
    second = churn(1200)
    assert first.keys() == second.keys() == {"meta", "events", "outcomes", "seen", "ghosts", "ghost"}
    # "About": Redis trims whole nodes, of a hundred entries at most.
    assert 100 <= raw.xlen(f"kvs:{{{name}}}:events") <= 200
    assert 100 <= raw.xlen(f"kvs:{{{name}}}:outcomes") <= 200
    assert raw.zcard(f"kvs:{{{name}}}:ghosts") == 100
    for key in first.keys() - {"events", "outcomes"}:
        assert second[key] <= first[key] * 1.1, key
    assert second["events"] / raw.xlen(f"kvs:{{{name}}}:events") < 160
    assert second["outcomes"] / raw.xlen(f"kvs:{{{name}}}:outcomes") < 260
    assert small.seen(name)["requests"] == 3 * 1600


def test_rings_of_no_length_are_not_kept(redis_url: str, raw: redis.Redis, name: NamespaceId) -> None:
    with RedisIndex.from_settings(redis_url, PATIENT, journal=NONE) as index:
        digests = chain(1)
        segment = put(index, name, digests)
        index.evict(name, [segment], delete_after_s=LATER_S, rule="capacity")
        put(index, name, chain(1, seed="x"))
        index.invalidate(name)
        index.tell(name, [Outcome(1.0, "r", "match", 1, 0, "absent", 0, digests)])
        assert index.events(name) == index.outcomes(name, 10) == index.ghosts(name) == []
        assert index.last_position(name) == ""
        assert index.seen(name) == {"requests": 1, "asked": 1, "miss:absent": 1, "evicted": 4608}
    assert not raw.exists(*(f"kvs:{{{name}}}:{ring}" for ring in ("events", "outcomes", "ghosts")))


# Ghosts


@pytest.mark.parametrize("seed", range(4))
def test_ghosts_are_credited_as_reckoned(index: RedisIndex, name: NamespaceId, seed: int) -> None:
    source = random.Random(seed)
    evicted, stamps, chains = 0, {}, []
    for number in range(30):
        # Those of one call are evicted one after the other.
        segments, sizes = [], []
        for place in range(source.randrange(1, 5)):
            slots = source.randrange(1, 20)
            chains.append(chain(slots, seed=f"{seed}/{number}/{place}"))
            # Multiples of 4 KiB, and many of the least step exactly: then powers of two are met.
            size = source.choice([GHOST_LEAST, GHOST_LEAST, 1 << 20, 3 << 28, 5 << 24])
            one = record(slots, sizes=[size - 4096] + [0] * (slots - 1), codec="lz4")
            segments.append(new_segment_id())
            sizes.append((one.nbytes, slots))
            index.commit(name, segments[-1], chains[-1], one, rank=0, ranks=1)
        rule = source.choice((*QUOTA_RULES, "admin", "bad"))
        index.evict(name, segments, delete_after_s=LATER_S, rule=rule)
        if rule in QUOTA_RULES:
            for digests, (nbytes, slots) in zip(chains[-len(sizes) :], sizes, strict=True):
                stamps[digests[:16]] = (evicted, slots)
                evicted += nbytes
    credited: Counter[int] = Counter()
    for _ in range(40):
        blocks = b"".join(source.choice([*chains, source.randbytes(16 * 3)]) for _ in range(4))
        lacking = min(len(blocks) // 16, 256) + source.choice([0, 50])
        asked = lacking + source.choice([0, 7])
        outcome = Outcome(1.0, "r", "match", asked, asked - lacking, "absent", asked - lacking, blocks)
        index.tell(name, [outcome])
        digests = [blocks[i : i + 16] for i in range(0, len(blocks), 16)]
        hits = [(i, *stamps[digest]) for i, digest in enumerate(digests) if digest in stamps]
        ends = [*(hit[0] for hit in hits[1:]), lacking]
        for (at, stamp, slots), after in zip(hits, ends, strict=bool(hits)):
            credited[ghost_step(evicted - stamp)] += min(slots, after - at)
    assert [(one.extra_bytes, one.blocks) for one in index.ghosts(name)] == [
        (ghost_bytes(step), blocks) for step, blocks in sorted(credited.items())
    ]
    assert len(credited) > 5


def test_a_ghost_of_very_many_blocks_is_one_of_4095(index: RedisIndex, name: NamespaceId) -> None:
    source = random.Random(1)
    blocks = source.randbytes(16 * 5000)
    segment = put(index, name, blocks)
    index.evict(name, [segment], delete_after_s=LATER_S, rule="capacity")
    index.tell(name, [Outcome(1.0, "r", "match", 9000, 0, "absent", 0, blocks[: 16 * 256])])
    assert [(one.extra_bytes, one.blocks) for one in index.ghosts(name)] == [(GHOST_LEAST, 4095)]


def test_only_what_was_absent_for_a_match_meets_ghosts(index: RedisIndex, name: NamespaceId) -> None:
    digests = chain(2)
    segment = put(index, name, digests)
    index.evict(name, [segment], delete_after_s=LATER_S, rule="capacity")
    for op, reason in [("match", "deadline"), ("load", "absent"), ("save", "failed"), ("match", "")]:
        index.tell(name, [Outcome(1.0, "r", op, 2, 0, reason, 0, digests)])
    assert index.ghosts(name) == []
    index.tell(name, [Outcome(1.0, "r", "match", 2, 0, "absent", 0, digests)])
    assert [one.blocks for one in index.ghosts(name)] == [2]
    put(index, name, digests)
    index.tell(name, [Outcome(1.0, "r", "match", 2, 0, "absent", 0, digests)])
    assert [one.blocks for one in index.ghosts(name)] == [2]


# Races


def race(url: str, name: NamespaceId) -> list[list[str]]:
    """What four processes got that began at one moment."""
    command = [sys.executable, "-m", "tests.index.redis.racer", url, name]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        return [json.loads(racer.communicate("go\n", timeout=PATIENCE_S)[0]) for racer in _started(racers)]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()


def _started(racers: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return racers


@pytest.mark.slow
def test_many_that_cull_at_once_evict_once(redis_url: str, index: RedisIndex, name: NamespaceId) -> None:
    for i in range(400):
        put(index, name, chain(1, seed=str(i)), created_s=CREATED_S + 60 * (i * 7 % 400))
    order = [one.segment for one in index.order(name, 1000)]
    one = record(1).nbytes
    got = race(redis_url, name)
    gone = [segment for some in got for segment in some]
    assert len(gone) == 400 - KEEP_BYTES // one
    assert set(gone) == {segment.hex() for segment in order[: len(gone)]}
    assert len(set(gone)) == len(gone)
    assert index.usage(name).nbytes <= KEEP_BYTES < index.usage(name).nbytes + one
    assert sum(1 for some in got if some) > 1


def test_a_namespace_that_is_registered_while_it_is_erased_stays_listed(
    redis_url: str, index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the other does between two steps of this one."""
    with RedisIndex.from_settings(redis_url, PATIENT) as other:
        command = index._client.command
        # Erasing, with a registration before and after its look at what it left.
        for moment in ("SREM", "EXISTS", "SADD", ""):

            def step(*words: str, name: str = "", moment: str = moment) -> object:
                if words[0] == moment:
                    other.register(namespace(), expected_blocks=10)
                return command(*words, name=name)

            name = index.register(namespace(), expected_blocks=10)
            monkeypatch.setattr(index._client, "command", step)
            assert index.erase(name, 1000) == "erased"
            monkeypatch.undo()
            assert set(index.namespaces()) == ({name} if moment in ("SREM", "EXISTS") else set())
        # Registering, with an erasing between its steps.
        run = index._client.run

        def erased_before(script: object, key: str, *args: object) -> object:
            other.erase(name, 1000)
            return run(script, key, *args)

        monkeypatch.setattr(index._client, "run", erased_before)
        index.register(namespace(), expected_blocks=10)
        monkeypatch.undo()
        assert set(index.namespaces()) == {name}


def test_an_id_that_a_dead_process_has_left_goes_with_the_next_namespace(
    redis_url: str, index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed when the namespace was gone and its id was not."""

    def die(*words: str, name: str = "") -> object:
        raise KeyboardInterrupt

    kept = index.register(namespace(), expected_blocks=10)
    left, gone = (index.register(items(model=model), expected_blocks=10) for model in ("left", "gone"))
    monkeypatch.setattr(index._client, "command", die)
    with pytest.raises(KeyboardInterrupt):
        index.erase(left, 1000)
    monkeypatch.undo()
    with redis.Redis.from_url(redis_url) as client:
        assert client.scard("kvs:ns") == 3
        assert index.erase(gone, 1000) == "erased"
        assert client.smembers("kvs:ns") == {kept.encode()}
    assert set(index.namespaces()) == {kept}


def test_every_script_says_what_race_it_closes() -> None:
    folder = Path(__file__).parents[3] / "kvstore" / "index" / "scripted" / "lua"
    for path in folder.glob("*.lua"):
        head = path.read_text().split("\n\n")[0].split("\nlocal")[0]
        if not head.startswith("-- Shared by"):
            assert head.startswith(f"-- {path.stem}: KEYS[1] "), path.name
            assert any(words in head for words in ("Race closed:", "Races closed:", "No race")), path.name
