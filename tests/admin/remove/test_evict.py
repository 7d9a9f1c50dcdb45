"""evict: what is named, what was not used, and what goes first until a size is reached."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.remove import evict as evictions
from kvstore.admin.remove.reports import EvictReport
from kvstore.build import load_settings, open_index
from kvstore.errors import TransientError
from kvstore.index.eviction import MINUTE_S, WORTH_MINUTES, shift_s, worth
from kvstore.index.sessions import Hint
from kvstore.keys import NO_SALT, SegmentId, namespace_id, new_segment_id, session_id
from schemas.records import PartRecord, SegmentRecord
from tests.admin.conftest import (
    Admin,
    Filled,
    chain,
    ec_space,
    ids,
    kv_slots,
    kv_space,
    opened,
    snapshot,
)
from tests.index.contract.chains import chain as digests
from tests.index.contract.chains import record


def evict(admin: Admin, filled: Filled, *words: str, code: int = 0) -> EvictReport:
    ran = admin("evict", *words, "--json", *filled.options)
    assert ran.code == code, ran.err
    report = EvictReport.model_validate_json(ran.out)
    assert ("nothing was changed" in ran.err) == (not report.applied and report.planned.segments > 0)
    return report


def test_evict_named_segments(admin: Admin, either: Filled) -> None:
    [head, middle, tail] = ids(chain(either))
    before = snapshot(either)
    planned = evict(admin, either, tail, middle[:10])
    assert (planned.applied, planned.planned.segments, planned.evicted_segments) == (False, 2, 0)
    assert planned.delete_after_s is None
    assert snapshot(either) == before
    done = evict(admin, either, tail, middle[:10], "--apply")
    assert (done.applied, done.evicted_segments, done.spared_segments) == (True, 2, 0)
    assert done.delete_after_s == pytest.approx(time.time() + 120, abs=20)
    assert ids(chain(either)) == [head]
    with opened(either) as index:
        states = index.states(namespace_id(either.kv), [SegmentId(bytes.fromhex(x)) for x in (middle, tail)])
        events = index.events(namespace_id(either.kv))
    assert states == ["trash", "trash"]
    assert [event.rule for event in events[-2:]] == ["admin", "admin"]
    assert len(either.payload_files()) == 5, "the payloads stay for their grace time"
    assert admin("evict", "0123456789abcdef", *either.options).code == 1
    assert "--apply" in admin("evict", head, *either.options).err


def test_pinned_segments_are_evicted_only_if_that_is_said(admin: Admin, either: Filled) -> None:
    [head, *_] = chain(either)
    with opened(either) as index:
        index.pin(namespace_id(either.kv), [head.segment], most_bytes=1 << 30)
    for words in ([head.segment.hex()], ["--unused-for", "0s", "--namespace", either.kv_id]):
        spared = evict(admin, either, *words)
        assert (spared.pinned.segments, spared.pinned.stored_bytes) == (1, head.record.nbytes)
        assert head.segment.hex() not in json.dumps(spared.model_dump())
    assert evict(admin, either, head.segment.hex(), "--apply").evicted_segments == 0
    assert evict(admin, either, head.segment.hex(), "--pinned", "--apply").evicted_segments == 1
    with opened(either) as index:
        assert index.usage(namespace_id(either.kv)).pinned_bytes == 0


def test_evict_what_was_not_used(admin: Admin, either: Filled) -> None:
    hour = 3600
    [head, middle, tail] = chain(either)
    with opened(either) as index:
        # All were made a moment ago; this makes the tail one that was made before.
        index.unlist(namespace_id(either.kv), [tail.segment])
    first = tail.record.depth
    either.save(either.kv, kv_slots(tail.record.slots, first=first), depth=first, ago_s=hour // 2)
    [head, middle, tail] = chain(either)
    none = evict(admin, either, "--unused-for", "1h")
    assert (none.planned.segments, none.why) == (0, "not used for 3600 s")
    made = time.time()
    plan = None
    with Cache(load_settings(either.settings, {})) as cache:
        plan = evictions.plan_unused(
            cache, either.kv_id[:5], unused_for_s=hour, pinned=False, now_s=made + 0.75 * hour
        )
        assert [entry.segment for entry in plan.segments] == [tail.segment]
        everything = evictions.plan_unused(
            cache, None, unused_for_s=hour, pinned=False, now_s=made + 4 * hour
        )
        order = [entry.segment for entry in everything.segments if entry.namespace == either.kv_id]
        assert order == [tail.segment, middle.segment, head.segment], "tails before heads"
        # Used between plan and turn: spared.
        assert cache.index is not None
        cache.index.touch(namespace_id(either.kv), [tail.segment])
        report = evictions.evict(cache, plan, applied=True, now_s=made)
    assert (report.evicted_segments, report.spared_segments) == (0, 1)
    assert len(chain(either)) == 3


def test_what_an_ended_session_used_is_as_old_as_it_was_made(admin: Admin, either: Filled) -> None:
    session, name, segment = session_id(NO_SALT, "chat"), namespace_id(either.kv), new_segment_id()
    with open_index(load_settings(either.settings, {})) as index:
        made = record(1, created_s=int(time.time()) - 2 * 3600)
        index.commit(name, segment, digests(1), made, rank=0, ranks=1, session=session)
        index.session(name, session, [], time.time(), Hint(end=True))
    with Cache(load_settings(either.settings, {})) as cache:
        for hours, planned in ((3, []), (1, [segment])):
            plan = evictions.plan_unused(
                cache, either.kv_id, unused_for_s=hours * 3600, pinned=False, now_s=time.time()
            )
            assert [entry.segment for entry in plan.segments] == planned
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
    assert (report.evicted_segments, report.spared_segments) == (1, 0)


def test_a_segment_that_is_pinned_after_the_plan_is_spared(either: Filled) -> None:
    with Cache(load_settings(either.settings, {})) as cache:
        plan = evictions.plan_keep(cache, either.kv_id, keep_bytes=1, now_s=time.time())
        assert len(plan.segments) == 3
        assert cache.index is not None
        cache.index.pin(namespace_id(either.kv), [chain(either)[0].segment], most_bytes=1 << 30)
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
    assert (report.evicted_segments, report.spared_segments) == (2, 1)


def oracle(filled: Filled, excess: int, now_s: float) -> list[SegmentId]:
    """Returns who should go first: of all, what was not used just now, then the rest."""
    found = []
    with opened(filled) as index:
        for account in index.accounts():
            for listing in index.segments(account.namespace):
                record = listing.record
                keep = listing.last_use_s + shift_s(account.kind, account.usage)
                if account.kind == "ec":
                    keep += worth(record.cost_us, record.nbytes) * WORTH_MINUTES * MINUTE_S
                fresh = listing.last_use_s >= now_s - 120
                if not listing.pinned:
                    order = (fresh, keep, -record.depth, listing.last_use_s, listing.segment)
                    found.append((order, listing.segment, record.nbytes))
    gone = []
    for _, segment, nbytes in sorted(found):
        if excess <= 0:
            break
        gone.append(segment)
        excess -= nbytes
    return gone


@pytest.mark.parametrize("seed", range(4))
def test_evict_down_to_a_size_takes_what_the_order_says(filled: Filled, seed: int) -> None:
    """Against an oracle: several namespaces, costs, pins, uses then and now."""
    noise = random.Random(seed)
    now = 60.0 * (int(time.time()) // 60 - 240)
    spaces = [kv_space(tenant=name) for name in ("a", "b")] + [ec_space(tenant="c")]
    with opened(filled) as index:
        for space in spaces:
            name = index.register(space, expected_blocks=100)
            for number in range(30):
                size, cost = noise.randint(1000, 90_000), noise.choice([0, 10**4, 10**7])
                record = SegmentRecord(
                    (PartRecord(64, (size,)),),
                    1,
                    "none",
                    int(now) - 9000,
                    depth=0 if space.kind == "ec" else noise.randint(0, 40),
                    cost_us=cost,
                )
                segment = SegmentId(noise.randbytes(8))
                index.commit(name, segment, noise.randbytes(16), record, rank=0, ranks=1)
                if noise.random() < 0.1:
                    index.pin(name, [segment], most_bytes=1 << 30)
                if number % 3:
                    index.touch(name, [segment], now + 60 * noise.randint(1, 200))
        held = sum(account.usage.nbytes for account in index.accounts())
    at = now + 60 * 150
    for keep in (held, int(held * 0.7), int(held * 0.3), 1):
        with Cache(load_settings(filled.settings, {})) as cache:
            plan = evictions.plan_keep(cache, None, keep_bytes=keep, now_s=at)
        assert [entry.segment for entry in plan.segments] == oracle(filled, held - keep, at), keep
    with Cache(load_settings(filled.settings, {})) as cache:
        assert cache.index is not None
        for space in spaces:
            plan = evictions.plan_keep(cache, namespace_id(space), keep_bytes=1, now_s=at + 86400)
            order = cache.index.order(namespace_id(space), 100)
            assert [entry.segment for entry in plan.segments] == [each.segment for each in order]
        plan = evictions.plan_keep(cache, None, keep_bytes=int(held * 0.4), now_s=at)
        report = evictions.evict(cache, plan, applied=True, now_s=at)
    with opened(filled) as index:
        left = sum(account.usage.nbytes for account in index.accounts())
    assert report.evicted_segments == report.planned.segments == len(plan.segments)
    assert held - left == report.planned.stored_bytes
    assert left <= held * 0.4 < left + 90_064


def test_evict_to_a_size_by_hand(admin: Admin, either: Filled) -> None:
    one = chain(either)[0].record.nbytes
    done = evict(admin, either, "--keep", str(2 * one), "--namespace", either.kv_id, "--apply")
    assert (done.held.stored_bytes, done.evicted_segments) == (3 * one, 1)
    assert [listing.record.depth for listing in chain(either)] == [0, 4]
    assert evict(admin, either, "--keep", "1GiB").planned.segments == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--keep", "1GiB", "--unused-for", "1d"],
        ["abcd", "--keep", "1GiB"],
        ["--keep", "some"],
        ["--keep", "0"],
        ["--unused-for", "1y"],
        ["--unused-for", "-1"],
        ["--keep", "1GiB", "--pinned"],
    ],
)
def test_evict_wants_to_be_told_what(admin: Admin, filled: Filled, words: list[str]) -> None:
    ran = admin("evict", *words, *filled.options)
    assert (ran.code, ran.out) == (2, "")
    assert len(chain(filled)) == 3


def test_an_eviction_that_the_index_ends_says_how_far_it_came(
    either: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions, "_STEP", 1)
    with Cache(load_settings(either.settings, {})) as cache:
        plan = evictions.plan_unused(cache, None, unused_for_s=-1e6, pinned=False, now_s=time.time())
        assert cache.index is not None
        real, calls = cache.index.evict, 0

        def failing(*args: Any, **options: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise stop
            return real(*args, **options)

        monkeypatch.setattr(cache.index, "evict", failing)
        stop: BaseException = TransientError("gone")
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
        assert (report.ended, report.problem, report.evicted_segments) == ("failed", "gone", 2)
        calls, stop = 0, KeyboardInterrupt()
        plan = evictions.plan_unused(cache, None, unused_for_s=-1e6, pinned=False, now_s=time.time())
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
        assert (report.ended, report.evicted_segments) == ("cancelled", 2)
