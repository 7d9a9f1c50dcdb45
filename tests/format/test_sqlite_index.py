"""An index in SQLite: what kvstore wrote, read raw; what the second one commits, served by kvstore."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.index.sessions import Allowance, Hint
from kvstore.keys import SaltId, SegmentId, SessionId, canonical_json, digests
from schemas.records import CODECS, Codec
from tests.format import second
from tests.format.test_redis_index import HERS, HIS, ages, packed, put_and_read, segment_of
from tests.format.world import NOW_S, SHAPES, content, ec, kv, path, world


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
        assert theirs.pinned(name) == {pinned}
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


def test_what_the_second_commits_kvstore_serves(tmp_path: Path) -> None:
    namespace, hashes = kv("planes-lz4"), path("c", 9)
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        name = ours.space.id
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        for at, end in ((0, 5), (5, 9)):
            header = put_and_read(tmp_path, *segment_of(namespace, hashes[at:end], depth=at, cost_us=2048))
            assert theirs.commit(name, header)
            assert not theirs.commit(name, header)
        assert ours.served(hashes) == [content(one, 0, "BF16", SHAPES["BF16"]) for one in hashes]
        assert ours.faults() == []
        again = ours.index.reconcile(name)
        assert again.recorded == again.counted
        assert [event.op for event in ours.index.events(name)] == ["commit", "commit"]
        (first, *_) = theirs.records(name)
        ours.index.evict(name, [SegmentId(first)], delete_after_s=0, rule="admin")
        assert theirs.trash(name) == {first: (0, 1)}
        assert ours.space.match(digests(hashes)).blocks in (0, 5)


def test_a_commit_of_theirs_is_row_by_row_one_of_ours(tmp_path: Path) -> None:
    """But for the clock's columns: what the document lists is all that kvstore writes."""
    for namespace, salt in ((kv("lz4"), b""), (ec(), b""), (kv("lz4"), HERS), (ec(), HERS)):
        found = []
        for who in ("ours", "theirs"):
            root = tmp_path / f"{namespace.kind}{len(salt)}" / who
            with world(root, f"sqlite://{root}/index.sqlite", namespace) as ours:
                header = put_and_read(
                    root,
                    *segment_of(namespace, path("e", 3), segment=bytes(range(8)), cost_us=99_968, salt=salt),
                )
                store = second.SqliteStore(root / "index.sqlite")
                if who == "theirs":
                    assert store.commit(ours.space.id, header)
                else:
                    commit(ours.index, header)
                found.append(dump(store))
        assert found[0] == found[1]
        assert found[0]["segments"] and found[0]["events"]


def test_what_a_salt_has_stored_both_say_alike(tmp_path: Path) -> None:
    namespace = kv("lz4", shards=2)
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        name = ours.space.id
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        hers = {ours.save(path(f"a{i}", 2), ranks=2, salt=SaltId(HERS)) for i in range(3)}
        his = ours.save(path("b", 2), ranks=2, salt=SaltId(HIS))
        ours.save(path("c", 2), ranks=2)
        header = put_and_read(tmp_path, *segment_of(namespace, path("d", 3), salt=HERS))
        assert theirs.commit(name, header)
        hers.add(bytes.fromhex(header.meta["segment"]))
        assert set(theirs.of_salt(name, HERS)) == hers
        assert {one.segment for one in ours.index.of_salt(name, SaltId(HERS))} == hers
        assert theirs.records(name)[his].salt == HIS
        held = {salt: sum(theirs.of_salt(name, salt).values()) for salt in (HERS, HIS)}
        assert ours.index.holdings(name, 0) == held
        assert ours.faults() == []


def test_what_was_erased_the_second_does_not_commit(tmp_path: Path) -> None:
    namespace = kv("lz4")
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        name = ours.space.id
        theirs = second.SqliteStore(tmp_path / "index.sqlite")
        until = int(ours.index.forbid(name, SaltId(HERS)))
        assert theirs.forbidden_until(name, HERS) == until and theirs.forbidden_until(name, HIS) == -1
        for at in (NOW_S, until, until + 1, until + 86400):
            header = put_and_read(tmp_path, *segment_of(namespace, path(str(at), 1), salt=HERS, created_s=at))
            assert not theirs.commit(name, header)
        assert theirs.commit(name, put_and_read(tmp_path, *segment_of(namespace, path("b", 1), salt=HIS)))
        ours.index.forbid(name, SaltId(b""))
        for salt in (b"", HERS, HIS):
            header = put_and_read(tmp_path, *segment_of(namespace, path("x", 1), salt=salt))
            assert not theirs.commit(name, header)


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
        # One that the second one commits, knowing of no session, is nobody's.
        header = put_and_read(tmp_path, *segment_of(kv("lz4"), path("theirs", 2)))
        assert theirs.commit(name, header)
        assert ours.index.owners(name, [SegmentId(bytes.fromhex(header.meta["segment"]))]) == [b""]


def commit(index: object, header: second.Header) -> None:
    """By kvstore's own code, from the header."""
    from kvstore.format.segment import parse_header
    from kvstore.index.sqlite.index import SqliteIndex
    from kvstore.keys import NamespaceId
    from kvstore.verify.headers import digests_of, record_of

    assert isinstance(index, SqliteIndex)
    root = Path(str(index._database.where)).parent
    namespace, segment = header.meta["namespace_id"], bytes.fromhex(header.meta["segment"])
    ours = parse_header((root / second.payload_name(namespace, segment, 0)).read_bytes())
    index.commit(
        NamespaceId(namespace), SegmentId(segment), digests_of(ours), record_of([ours]), rank=0, ranks=1
    )


def dump(store: second.SqliteStore) -> dict[str, list[object]]:
    tables = [
        name for (name,) in store.db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")
    ]
    found: dict[str, list[object]] = {}
    for table in tables:
        columns = [row[1] for row in store.db.execute(f"PRAGMA table_info({table})")]
        shown = [one for one in columns if (table, one) not in CLOCKS]
        found[table] = store.db.execute(f"SELECT {', '.join(shown)} FROM {table} ORDER BY 1, 2").fetchall()
    return found


CLOCKS = {("namespaces", "seen"), ("events", "number"), ("events", "at")}


def test_another_file_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(second.Miss):
        second.SqliteStore(tmp_path / "new.sqlite")


def test_what_is_too_old_serves_neither(tmp_path: Path) -> None:
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", kv("none")) as ours:
        ages(ours, second.SqliteStore(tmp_path / "index.sqlite"))
