"""An index in SQLite: what kvstore wrote, read raw; what the second one commits, served by kvstore."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.index.sessions import Allowance, Hint
from kvstore.keys import SaltId, SegmentId, SessionId, canonical_json, digests
from schemas.records import CODECS, Codec
from tests.format import second
from tests.format.second.redis_index import mark
from tests.format.test_redis_index import HERS, HIS, ages, packed
from tests.format.world import NOW_S, SHAPES, content, kv, path, world


@pytest.mark.parametrize("how", CODECS)
def test_a_filled_index_is_read(how: Codec, tmp_path: Path) -> None:
    namespace, hashes = kv(how, shards=2), path("a", 11)
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        bygone = ours.save(path("o", 2), ranks=2)
        ours.index.invalidate(ours.space.id)
        one = ours.save(hashes[:6], ranks=2)
        two = ours.save(hashes[6:], depth=6, ranks=2, cost_us=5_000_000)
        gone, pinned = ours.save(path("g", 2), ranks=2), ours.save(path("p", 3), ranks=2)
        ours.index.evict(ours.space.id, [SegmentId(gone)], delete_after_s=NOW_S + 10.0, rule="admin")
        ours.index.pin(ours.space.id, [SegmentId(pinned)], most_bytes=10**9)
        name = ours.space.id
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        assert theirs.namespaces() == {name: canonical_json(namespace)}
        records = theirs.records(name)
        assert set(records) == {one, two, pinned} and bygone not in records
        usage = ours.index.usage(name)
        assert theirs.account(name) == {
            "bytes": usage.nbytes, "segments": 3, "blocks": usage.blocks, "pinned": usage.pinned_bytes,
            "cost": usage.cost_us,
        }  # fmt: skip
        assert usage.nbytes == sum(record.nbytes for record in records.values())
        assert [one for one, _ in theirs.order(name, "pins")] == [pinned]
        (due, ranks) = theirs.trash(name)[gone]
        assert (due >= NOW_S + 10, ranks) == (True, 2)
        assert theirs.entries(name) == {
            entry.digest: (entry.segment, entry.slot) for entry in ours.index.entries(name)
        }
        runs = theirs.match(name, packed(hashes))
        assert [(run.segment, run.slot, run.count) for run in runs] == [(one, 0, 6), (two, 0, 5)]
        assert theirs.match(name, packed(path("o", 2))) == []
        for rank in (0, 1):
            for run in runs:
                some = hashes[run.start : run.start + run.count]
                loaded = second.load(tmp_path, name, run, [second.block_key(each) for each in some], rank)
                assert list(loaded) == [content(each, rank, "BF16", SHAPES["BF16"]) for each in some]


def test_what_a_salt_has_stored_both_say_alike(tmp_path: Path) -> None:
    namespace = kv("lz4", shards=2)
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        name = ours.space.id
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        hers = {ours.save(path(f"a{i}", 2), ranks=2, salt=SaltId(HERS)) for i in range(3)}
        his = ours.save(path("b", 2), ranks=2, salt=SaltId(HIS))
        ours.save(path("c", 2), ranks=2)
        assert set(theirs.of_salt(name, HERS)) == hers
        assert {one.segment for one in ours.index.of_salt(name, SaltId(HERS))} == hers
        assert theirs.records(name)[his].salt == HIS
        assert ours.index.holdings(name, 0) == theirs.held(name)
        assert ours.faults() == []


def test_what_was_erased_is_read(tmp_path: Path) -> None:
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", kv("lz4")) as ours:
        until = int(ours.index.forbid(ours.space.id, SaltId(HERS)))
        assert second.SqliteStore(tmp_path / "index.sqlite").erased(ours.space.id) == {HERS: until}


def test_the_sketch_of_uses_is_read(tmp_path: Path) -> None:
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", kv("lz4")) as ours:
        one = digests(path("a", 1))
        now_s = time.time()
        ours.index.note(ours.space.id, one, now_s=now_s, window_s=86400, sketch_bytes=1 << 16)
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        window = second.window_name(now_s, 86400, 1 << 16)
        sketch = theirs.client.get(theirs.key(ours.space.id, f"use:{window}"))
        line, bits = mark(one)
        home = sketch[line % 1024 * 64 :][:64]
        assert {at for at in range(512) if home[at // 8] & 0x80 >> at % 8} == bits
        assert len(sketch) == 1 << 16 and sketch.count(0) >= (1 << 16) - 3


def test_what_was_told_of_sessions_is_read(tmp_path: Path) -> None:
    chat, other = SessionId(second.session_id(b"", "chat")), SessionId(second.session_id(HERS, "chat"))
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", kv("lz4")) as ours:
        name, minute = ours.space.id, int(time.time() // 60)
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        segments = [SegmentId(ours.save(path(str(number), 2), session=chat)) for number in range(3)]
        ours.index.session(name, other, segments[:1], minute * 60.0, Hint(priority="low"))
        allowance, hint = Allowance(1 << 40, 1 << 40, 1 << 40), Hint(retain_s=1800)
        ours.index.session(name, chat, segments[:2], minute * 60.0, hint, allowance=allowance)
        [told] = ours.index.find_sessions(name, [chat])
        assert told is not None
        until = int(told.until_s)
        assert theirs.kept(name) == dict.fromkeys(segments, (until, minute))
        assert theirs.sessions(name) == {
            chat: (minute, False, 1, until, segments[1:]),
            other: (minute, False, 0, 0, []),
        }
        ours.index.session(name, chat, [], minute * 60.0, Hint(end=True))
        assert theirs.kept(name) == {segments[0]: (until, minute)}
        assert theirs.sessions(name)[chat] == (minute, True, 1, 0, segments[1:])


def test_another_file_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(second.Miss):
        second.SqliteStore(tmp_path / "new.sqlite")


def test_what_is_too_old_serves_neither(tmp_path: Path) -> None:
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", kv("none")) as ours:
        ages(ours, second.SqliteStore(tmp_path / "index.sqlite"))
