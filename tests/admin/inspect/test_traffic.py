"""stats, top and events: what becomes of blocks, once and as it goes on, on both indexes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

import pytest

from kvstore.admin.backends import Cache, Sources
from kvstore.admin.inspect.events import follow_events
from kvstore.admin.inspect.reports import EventLine, EventsReport, StatsReport, TopReport
from kvstore.admin.inspect.stats import watch
from kvstore.build import load_settings, open_index
from kvstore.errors import KVStoreError, TransientError
from kvstore.index.port import Outcome
from kvstore.keys import SegmentId, namespace_id
from schemas.namespace import Namespace
from schemas.records import OutcomeOp, PartRecord, SegmentRecord
from tests.admin.conftest import Admin, Filled, kv_slots, kv_space
from tests.admin.inspect.test_status import row
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S


def outcome(op: OutcomeOp, asked: int, served: int, reason: str = "") -> Outcome:
    return Outcome(time.time(), "cmpl-1", op, asked, served, reason, served, b"")


def tell(filled: Filled, space: Namespace, *outcomes: Outcome) -> None:
    with closing(open_index(load_settings(filled.settings, {}))) as index:
        index.tell(namespace_id(space), outcomes)


def stats(admin: Admin, filled: Filled, *words: str) -> StatsReport:
    ran = admin("stats", "--json", *words, *filled.options)
    assert ran.code == 0, ran.err
    return StatsReport.model_validate_json(ran.out)


def test_stats_account_for_every_block(admin: Admin, either: Filled) -> None:
    empty = stats(admin, either)
    assert (empty.total.asked, empty.total.hit_ratio, empty.total.misses) == (0, None, {})
    tell(
        either,
        either.kv,
        outcome("match", 100, 100),
        outcome("match", 50, 20, "absent"),
        outcome("match", 10, 0, "deadline"),
        outcome("save", 40, 30, "not_admitted"),
        outcome("save", 8, 8),
    )
    tell(either, either.ec, outcome("match", 4, 0, "absent"))
    report = stats(admin, either)
    total = report.total
    assert (total.requests, total.asked, total.served) == (4, 164, 120)
    assert total.hit_ratio == pytest.approx(120 / 164)
    assert total.misses == {"absent": 34, "deadline": 10}
    assert total.asked == total.served + sum(total.misses.values())
    assert (total.offered, total.stored, total.unsaved) == (48, 38, {"not_admitted": 10})
    first, second = report.namespaces
    assert (first.id, first.kind, first.model, first.asked) == (either.kv_id, "kv", "tiny-random", 160)
    assert (second.id, second.misses, second.hit_ratio) == (either.ec_id, {"absent": 4}, 0.0)
    only = stats(admin, either, either.ec_id[:6])
    assert [line.id for line in only.namespaces] == [either.ec_id]
    assert only.total.asked == 4
    text = admin("stats", *either.options).out
    assert "164 blocks, 120 served (73.2%)" in text
    assert row(text, either.kv_id)[-1] == "75.0%"
    assert row(text, "absent")[1:] == ["34", "21%", "30", "4"]
    assert row(text, "not_admitted")[1:3] == ["10", "21%"]


def test_watching_shows_what_was_added(either: Filled) -> None:
    tell(either, either.kv, outcome("match", 100, 50, "absent"))
    later = kv_space(tenant="blue")
    troubles: list[KVStoreError] = []
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if steps:
            steps.pop(0)()

    def fail() -> None:
        real = cache.index.accounts  # type: ignore[union-attr]

        def accounts() -> Any:
            cache.index.accounts = real  # type: ignore[union-attr, method-assign]
            raise TransientError("gone for a moment")

        cache.index.accounts = accounts  # type: ignore[union-attr, method-assign]

    def added() -> None:
        tell(either, either.kv, outcome("match", 10, 8, "deadline"))

    def new_one() -> None:
        either.save(later, kv_slots(2, seed=9))
        tell(either, later, outcome("match", 6, 6))

    steps = [added, lambda: None, fail, new_one]
    with Cache(load_settings(either.settings, {})) as cache:
        reports = list(
            watch(cache, None, every_s=5, trouble=troubles.append, rounds=4, clock=lambda: now, sleep=sleep)
        )
    assert [str(each) for each in troubles] == ["gone for a moment"]
    one, nothing, last = reports
    assert (one.seconds, one.total.asked, one.total.misses) == (5, 10, {"deadline": 2})
    assert (nothing.total.asked, nothing.total.hit_ratio) == (0, None)
    # The round that failed is in the one after it, and a namespace that is new is new throughout.
    assert (last.seconds, last.total.asked, last.total.served) == (10, 6, 6)


def test_watching_begins_anew_with_an_index_that_was_emptied(
    admin: Admin, filled: Filled, redis_url: str
) -> None:
    filled.settings["index"] = redis_url
    filled.save(filled.kv, kv_slots(2, seed=3))
    tell(filled, filled.kv, outcome("match", 100, 50, "absent"))

    def emptied(_: float) -> None:
        with closing(open_index(load_settings(filled.settings, {}))) as index:
            index.leaf._client.command("FLUSHDB")  # type: ignore[union-attr]
            index.register(filled.kv, expected_blocks=10)
        tell(filled, filled.kv, outcome("match", 7, 7))

    with Cache(load_settings(filled.settings, {})) as cache:
        [report] = watch(cache, None, every_s=5, trouble=pytest.fail, rounds=1, sleep=emptied)
    assert (report.total.asked, report.total.served, report.total.misses) == (7, 7, {})


@pytest.mark.slow
def test_watch_writes_a_line_at_a_time(admin: Admin, filled: Filled) -> None:
    ran = admin("stats", "--watch", "--every", "0.1", "--count", "3", "--json", *filled.options)
    assert ran.code == 0
    lines = [StatsReport.model_validate_json(line) for line in ran.out.splitlines()]
    assert len(lines) == 3
    assert all(line.seconds is not None and 0.1 <= line.seconds < PATIENCE_S for line in lines)
    text = admin("stats", "--watch", "--every", "0.1", "--count", "2", *filled.options)
    assert text.out.count("requests") == 4, "a line and a column, twice"
    assert admin("stats", "--count", "3", *filled.options).code == 2


@pytest.mark.slow
def test_watch_renews_a_table_on_a_terminal(filled: Filled) -> None:
    tell(filled, filled.kv, outcome("match", 100, 50, "absent"))
    words = ["stats", "--watch", "--every", "0.1", "--count", "2", *filled.options]
    code = "from kvstore.cli import main; main()"
    main, other = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=other,
        stdout=other,
        stderr=other,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(other)
    shown = b""
    try:
        while chunk := read_terminal(main):
            shown += chunk
        assert child.wait(PATIENCE_S) == 0, shown
    finally:
        child.kill()
        child.wait()
        os.close(main)
    # The second one is drawn over the first: the cursor goes up.
    assert shown.count(b"requests") >= 2
    assert b"\x1b[1A" in shown


def read_terminal(descriptor: int) -> bytes:
    """What is written next; nothing when the other side is closed."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_top_is_hottest_and_coldest(admin: Admin, aged: Filled) -> None:
    now = time.time() - 300
    with closing(open_index(load_settings(aged.settings, {}))) as index:
        chain = sorted(index.segments(namespace_id(aged.kv)), key=lambda each: each.record.depth)
        items = list(index.segments(namespace_id(aged.ec)))
        for minute in range(1, 4):
            index.touch(namespace_id(aged.kv), [chain[0].segment], now + 60 * minute)
        index.touch(namespace_id(aged.ec), [items[0].segment], now + 60)
        index.pin(namespace_id(aged.kv), [chain[2].segment], most_bytes=1 << 30)
    ran = admin("top", "--json", *aged.options)
    report = TopReport.model_validate_json(ran.out)
    assert [line.segment for line in report.hottest][:2] == [chain[0].segment.hex(), items[0].segment.hex()]
    first = report.hottest[0]
    assert (first.minutes, first.depth, first.blocks, first.model) == (3, 0, 4, "tiny-random")
    assert first.stored_bytes == chain[0].record.nbytes
    assert first.last_use_s == pytest.approx(now + 180, abs=60)
    # The pinned one would not go; of the others what was used last goes last.
    coldest = [line.segment for line in report.coldest]
    assert chain[2].segment.hex() not in coldest
    assert coldest[-2:] == [items[0].segment.hex(), chain[0].segment.hex()]
    assert len(coldest) == 4
    only = TopReport.model_validate_json(
        admin("top", aged.ec_id, "--limit", "1", "--json", *aged.options).out
    )
    assert [line.segment for line in only.hottest] == [items[0].segment.hex()]
    assert len(only.coldest) == 1
    text = admin("top", *aged.options).out
    assert "3.0" in row(text, chain[0].segment.hex())
    assert "what would be evicted next" in text


def test_top_merges_namespaces_as_eviction_does(admin: Admin, aged: Filled) -> None:
    """Used in the same minute, what took longer to compute for its size goes later."""
    dear = kv_space(tenant="dear")
    record = SegmentRecord((PartRecord(0, (1024,)),), 1, "none", int(time.time()) - 600, cost_us=60_000_000)
    with closing(open_index(load_settings(aged.settings, {}))) as index:
        name = index.register(dear, expected_blocks=10)
        index.commit(name, SegmentId(bytes(8)), bytes(16), record, rank=0, ranks=1)
        later = time.time() - 540
        for listing in index.segments(namespace_id(aged.kv)):
            index.touch(namespace_id(aged.kv), [listing.segment], later)
    coldest = TopReport.model_validate_json(admin("top", "--json", *aged.options).out).coldest
    assert (coldest[-1].namespace, coldest[-1].cost_us // 10**6) == (name, 59)
    env = {"KVSTORE_EVICTION__COST_AWARE": "false"}
    coldest = TopReport.model_validate_json(admin("top", "--json", *aged.options, env=env).out).coldest
    assert coldest[-1].namespace == aged.kv_id


def evict(filled: Filled, space: Namespace, segment: SegmentId) -> None:
    with closing(open_index(load_settings(filled.settings, {}))) as index:
        index.evict(namespace_id(space), [segment], delete_after_s=4e9, rule="capacity")


def events(admin: Admin, filled: Filled, *words: str) -> list[EventLine]:
    ran = admin("events", "--json", *words, *filled.options)
    assert ran.code == 0, ran.err
    return list(EventsReport.model_validate_json(ran.out).events)


def test_events_are_listed_and_gone_on_from(admin: Admin, either: Filled) -> None:
    lines = events(admin, either)
    assert [line.op for line in lines] == ["commit"] * 5
    assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
    mine = events(admin, either, either.kv_id)
    assert [(line.depth, line.blocks) for line in mine] == [(0, 4), (4, 4), (8, 4)]
    assert all(len(line.first or "") == len(line.last or "") == 32 for line in mine)
    evict(either, either.kv, SegmentId(bytes.fromhex(mine[2].segment or "")))
    [gone] = events(admin, either, either.kv_id, "--after", mine[-1].position)
    assert (gone.op, gone.segment, gone.rule) == ("evict", mine[2].segment, "capacity")
    assert [line.op for line in events(admin, either, "--limit", "2")] == ["commit", "evict"]
    text = admin("events", *either.options, env={"COLUMNS": "40"}).out
    assert len(text.splitlines()) == 6, "an event is a line, whatever the width"
    assert row(text, "capacity")[3:5] == ["evict", mine[2].segment]
    bad = admin("events", either.kv_id, "--after", "soon", *either.options)
    assert (bad.code, "no position" in bad.err) == (1, True)
    assert admin("events", "--after", "1", *either.options).code == 2
    [gap, *_] = events(admin, either, either.kv_id, "--after", "1")
    assert gap.op == "gap"
    text = admin("events", either.kv_id, "--after", "1", *either.options).out
    assert "events before this are lost" in text.splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "text"])
def test_events_are_followed_until_ctrl_c(filled: Filled, form: str) -> None:
    """As a process, because it ends with a signal; also a namespace that is new is followed."""
    words = ["events", "--follow", "--every", "0.05", *filled.options]
    words += ["--json"] if form == "json" else []
    # What a shell runs in the background ignores SIGINT, and so do its children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from kvstore.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        # While it is still starting: of what was there before it began it shows nothing.
        shown = b""
        for seed in range(1000):
            filled.save(filled.kv, kv_slots(1, seed=100 + seed))
            if shown := more_of(child, 0.3):
                break
        late = kv_space(tenant="late")
        filled.save(late, kv_slots(1, seed=51))
        while namespace_id(late)[:8].encode() not in shown:
            more = more_of(child, PATIENCE_S)
            assert more, shown
            shown += more
        child.send_signal(signal.SIGINT)
        rest, err = child.communicate(timeout=PATIENCE_S)
        assert (child.returncode, b"Traceback" in err) == (130, False)
    finally:
        child.kill()
        child.communicate()
    lines = (shown + rest).decode().splitlines()
    if form == "json":
        assert {json.loads(line)["op"] for line in lines} == {"commit"}
    else:
        assert [line for line in lines if " commit " not in line] == []


def more_of(child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """What it writes within that time, or nothing."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], timeout_s)
    return os.read(child.stdout.fileno(), 1 << 16) if ready else b""


def test_following_goes_on_when_the_index_comes_back(
    filled: Filled, private_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.settings["index"] = private_redis.url
    filled.save(filled.kv, kv_slots(1, seed=3))
    troubles: list[TransientError] = []
    naps = 0

    def sleep(_: float) -> None:
        nonlocal naps
        naps += 1
        if naps == 1:
            private_redis.pause()
        elif naps == 3:
            private_redis.resume()
            filled.save(filled.kv, kv_slots(1, seed=4))
        assert naps < 50

    sources = Sources(index=private_redis.url, payloads=f"file://{filled.folder}", environ={})
    with Cache(sources.settings()) as cache:
        following = follow_events(cache, None, after=None, every_s=0.1, trouble=troubles.append, sleep=sleep)
        [line] = next(following)
    assert (line.op, len(troubles)) == ("commit", 1)
