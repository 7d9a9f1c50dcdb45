"""A SQLite file of an older release becomes one of this release, and nothing is lost."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.index.maintenance import Usage
from kvstore.index.port import Claim, CommitState
from kvstore.index.sessions import Allowance, Hint
from kvstore.index.sqlite import schema as sqlite_schema
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    NamespaceId,
    SegmentId,
    namespace_id_of_json,
    new_segment_id,
    salt_id,
    session_id,
)
from schemas.namespace import Namespace
from schemas.settings import JournalSettings
from tests.index.contract.admission import use
from tests.index.contract.chains import CREATED_S, chain, items, namespace, part_of, places, put, record

#: Written by the release that knew no newer schema.
GOLDEN = Path(__file__).parent / "golden"
OLD = (GOLDEN / "sqlite_2.sql").read_text()


def stored_id(made: Namespace) -> NamespaceId:
    """Returns the id that a namespace had when the files were made: version 1 had no options."""
    fields = made.model_dump(mode="json") | {"format": 1}
    del fields["options"]
    return namespace_id_of_json(json.dumps(fields, sort_keys=True, separators=(",", ":")))


KV = stored_id(namespace().model_copy(update={"tenant": "acme"}))
EC = stored_id(items())
HEAD, RANKED, OVERTAKEN, COPY, GONE, HALF, CLAIMER, ITEM = (SegmentId(bytes([i]) * 8) for i in range(1, 9))
DIGESTS = chain(12)


def make(path: Path, version: int) -> None:
    """A file as it was left behind. Schema 1 had no table of uses."""
    text = (GOLDEN / f"sqlite_{version}.sql").read_text() if version > 2 else OLD
    if version == 1:
        a, b = text.index("CREATE TABLE uses"), text.index("CREATE INDEX segments_by_use")
        text = text[:a] + text[b:]
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA journal_mode = WAL")
    raw.executescript(text)
    raw.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
    raw.execute(f"PRAGMA user_version = {version}")
    raw.commit()
    raw.close()


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def path(fast_path: Path, version: int) -> Path:
    make(fast_path / "index.sqlite", version)
    return fast_path / "index.sqlite"


@pytest.fixture
def index(path: Path) -> Iterator[SqliteIndex]:
    with SqliteIndex(str(path), clock=lambda: float(CREATED_S)) as index:
        yield index


def schema(path: Path) -> list[tuple[str, ...]]:
    raw = sqlite3.connect(path)
    rows = raw.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name, type").fetchall()
    rows += [("version", *raw.execute("PRAGMA user_version").fetchone())]
    raw.close()
    return rows


def test_a_migrated_file_is_like_a_new_one(index: SqliteIndex, path: Path, fast_path: Path) -> None:
    fresh = fast_path / "fresh.sqlite"
    SqliteIndex(str(fresh)).close()
    assert schema(path) == schema(fresh)
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    raw.close()


def test_everything_that_was_visible_is_visible(index: SqliteIndex) -> None:
    expected = [(segment, slot) for segment in (HEAD, RANKED, OVERTAKEN) for slot in range(4)]
    assert places(index.match(KV, DIGESTS)) == expected
    assert places(index.match(EC, chain(1, seed="item"))) == [(ITEM, 0)]
    found = {one.segment: one for one in index.segments(KV)}
    assert set(found) == {HEAD, RANKED, OVERTAKEN}
    assert [part.slot_sizes for part in found[RANKED].record.parts] == [
        (100, 200, 300, 400),
        (100, 200, 300, 401),
    ]
    assert (
        index.usage(KV) == Usage(2 * 6144 + 8192 + 1000 + 8192 + 1001, 3, 12) == index.reconcile(KV).counted
    )
    assert index.usage(EC) == Usage(4608, 1, 1) == index.reconcile(EC).counted
    # Entries that pointed at nothing are gone; those of the copy were.
    assert {one.segment for one in index.entries(KV)} == {HEAD, RANKED, OVERTAKEN}
    assert len(list(index.entries(KV))) == 10
    assert index.sweep(KV, 1000) == 0


def test_accounts_say_whose_it_is(index: SqliteIndex) -> None:
    told = {one.namespace: (one.kind, one.tenant, one.trashed, one.bygone) for one in index.accounts()}
    assert told == {KV: ("kv", "acme", 2, 0), EC: ("ec", "default", 0, 0)}
    assert all(json.loads(text)["tenant"] == told[name][1] for name, text in index.namespaces().items())
    # As if it had been registered just now: an empty namespace is forgotten a week after.
    assert all(one.seen_s > 1.7e9 for one in index.accounts())


def test_the_order_of_eviction_is_that_of_the_last_uses(index: SqliteIndex) -> None:
    order = index.order(KV, 10)
    assert [one.segment for one in order] == [OVERTAKEN, RANKED, HEAD]
    assert [one.used_s - CREATED_S // 60 * 60 for one in order] == [0, 0, 600]
    assert [one.keep_s for one in order] == [one.used_s for one in order]
    assert index.pin(KV, [OVERTAKEN], most_bytes=1 << 30) == 1
    gone = index.cull(KV, keep_bytes=0, delete_after_s=CREATED_S, limit=9, rule="capacity")
    assert gone == [RANKED, HEAD]


def test_first_digests_are_found_where_entries_tell_them(index: SqliteIndex) -> None:
    put(index, KV, DIGESTS, 8, 4, segment=OVERTAKEN)
    index.evict(KV, [HEAD, RANKED, OVERTAKEN], delete_after_s=CREATED_S, rule="capacity")
    assert [one.first for one in index.events(KV)] == [part_of(DIGESTS, at, 1) for at in (0, 4, 8)]
    assert [(one.depth, one.slots) for one in index.events(KV)] == [(0, 4), (4, 4), (8, 4)]


def test_a_first_digest_that_no_entry_tells_is_unknown(index: SqliteIndex) -> None:
    index.evict(KV, [OVERTAKEN], delete_after_s=CREATED_S, rule="capacity")
    (event,) = index.events(KV)
    assert (event.segment, event.first, event.nbytes) == (OVERTAKEN, None, 6144)
    assert index.ghosts(KV) == []


def test_trash_claims_and_half_commits_go_on(index: SqliteIndex) -> None:
    assert index.reapable(KV, CREATED_S + 10, 10) == [(GONE, 1)]
    assert dict(index.reapable(KV, CREATED_S + 3600, 10)) == {GONE: 1, COPY: 1}
    assert index.states(KV, [HEAD, COPY, HALF, CLAIMER]) == ["visible", "trash", "incomplete", None]
    claimed = chain(1, seed="claimed")
    # It lasts until 2055, which is believed of those who ask for as long.
    assert index.claim(KV, claimed, new_segment_id(), 1e9) == Claim(0, False)
    assert index.claim(KV, claimed, CLAIMER, 1.0) == Claim(0, True)
    half = chain(2, seed="half")
    assert index.commit(KV, HALF, half, record(2), rank=0, ranks=2) is CommitState.VISIBLE
    assert places(index.match(KV, half)) == [(HALF, 0), (HALF, 1)]
    state = index.commit(KV, COPY, part_of(DIGESTS, 8, 2), record(2, depth=8), rank=0, ranks=1)
    assert state is CommitState.REFUSED


def test_uses_are_remembered(index: SqliteIndex, version: int) -> None:
    assert use(index, KV, chain(5)) == (5 if version == 2 else 0)
    assert use(index, KV, chain(5)) == 5


def test_a_migrated_namespace_can_be_invalidated_and_erased(index: SqliteIndex) -> None:
    assert index.invalidate(KV) == 3
    assert index.match(KV, DIGESTS) == []
    assert index.commit(KV, HALF, chain(2, seed="half"), record(2), rank=0, ranks=2) is CommitState.REFUSED
    assert places(index.match(EC, chain(1, seed="item"))) == [(ITEM, 0)]
    put(index, KV, DIGESTS, 0, 2)
    assert index.drain(KV, delete_after_s=CREATED_S, limit=10) == 3
    assert dict(index.reapable(KV, CREATED_S + 3600, 10)) == {
        HEAD: 1,
        RANKED: 2,
        OVERTAKEN: 1,
        GONE: 1,
        COPY: 1,
    }
    index.invalidate(EC)
    index.drain(EC, delete_after_s=CREATED_S, limit=10)
    index.reaped(EC, [ITEM])
    assert index.erase(EC, 100) == "erased"
    assert set(index.namespaces()) == {KV}


def test_a_new_namespace_is_a_stranger_to_the_old_ones(index: SqliteIndex) -> None:
    """Generations have numbers that no older file gave to a namespace."""
    name = index.register(namespace("fresh"), expected_blocks=10)
    assert index.match(name, DIGESTS) == []
    assert index.usage(name) == Usage(0, 0, 0)
    assert list(index.segments(name)) == []
    index.invalidate(KV)
    assert list(index.segments(KV)) == []
    assert len(list(index.segments(EC))) == 1


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"kind": null, "tenant": {}}'])
def test_a_json_that_says_nothing_is_no_hindrance(fast_path: Path, text: str) -> None:
    path = fast_path / "index.sqlite"
    make(path, 1)
    raw = sqlite3.connect(path)
    raw.execute("INSERT INTO namespaces (id, json) VALUES ('0123456789abcdef', ?)", (text,))
    raw.commit()
    raw.close()
    with SqliteIndex(str(path)) as index:
        assert index.namespaces()[NamespaceId("0123456789abcdef")] == text
        assert len(index.accounts()) == 3


def test_several_open_an_old_file_at_once(path: Path) -> None:
    def work(worker: int) -> int:
        with SqliteIndex(str(path), busy_timeout_s=20.0) as index:
            put(index, KV, chain(3, seed=str(worker)))
            return len(index.match(KV, DIGESTS))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [3] * 4
    with SqliteIndex(str(path)) as index:
        assert index.usage(KV).segments == 7


def test_an_older_release_does_not_touch_a_newer_file(path: Path, index: SqliteIndex) -> None:
    """One that has the file open when a newer one migrates it: its statements find no table to write."""
    raw = sqlite3.connect(path)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        raw.execute("INSERT OR REPLACE INTO entries VALUES (1, x'00', 1, 0)")
    raw.close()


def test_a_migration_that_fails_has_changed_nothing(
    path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = schema(path)
    broken = (*sqlite_schema.SCHEMAS[:2], sqlite_schema.SCHEMAS[2] + "DROP TABLE nonsense;\n")
    monkeypatch.setattr(sqlite_schema, "SCHEMAS", broken)
    SqliteIndex(str(path)).close()
    assert schema(path) == before
    monkeypatch.undo()
    with SqliteIndex(str(path)) as index:
        assert index.usage(KV).segments == 3


def test_a_newer_file_is_refused(path: Path, index: SqliteIndex) -> None:
    raw = sqlite3.connect(path)
    raw.execute(f"PRAGMA user_version = {sqlite_schema.SCHEMA_VERSION + 1}")
    raw.close()
    with pytest.raises(ConfigError, match="newer"):
        SqliteIndex(str(path))


def test_events_of_a_release_that_knew_no_names_are_read(fast_path: Path) -> None:
    path = fast_path / "index.sqlite"
    make(path, 3)
    name = stored_id(namespace())
    with SqliteIndex(str(path), by="anna@desk") as index:
        assert index.operations(10) == []
        assert len(index.match(name, chain(2, seed="a"))) == 1
        index.invalidate(name)
        done = [(event.op, event.by) for event in index.events(name)]
        index.record_operation("invalidate", name)
        assert [one.by for one in index.operations(10)] == ["anna@desk"]
    assert done == [("commit", ""), ("commit", ""), ("evict", ""), ("invalidate", "anna@desk")]
    fresh = fast_path / "fresh.sqlite"
    SqliteIndex(str(fresh)).close()
    assert schema(path) == schema(fresh)


def test_what_was_stored_before_salts_has_none_and_stays(fast_path: Path) -> None:
    path = fast_path / "index.sqlite"
    make(path, 4)
    name, salt = stored_id(namespace()), salt_id("tenant-a")
    one, gone, ranked, half = (SegmentId(bytes([i]) * 8) for i in range(1, 5))
    with SqliteIndex(str(path), clock=lambda: float(CREATED_S)) as index:
        assert places(index.match(name, chain(2, seed="a"))) == [(one, 0), (one, 1)]
        assert places(index.match(name, chain(2, seed="c"))) == [(ranked, 0), (ranked, 1)]
        assert {listing.record.salt for listing in index.segments(name)} == {NO_SALT}
        assert index.holdings(name, -1) == index.forbidden(name) == {}
        # An incomplete commit of the old release is completed by the new one, and its salt stays none.
        begun = chain(1, seed="d")
        assert index.commit(name, half, begun, record(1), rank=0, ranks=2) is CommitState.VISIBLE
        # New segments of the same namespace have salts, and so do those that take old blocks' places.
        hers = put(index, name, chain(2, seed="a"), salt=salt)
        assert [listing.segment for listing in index.of_salt(name, salt)] == [hers]
        assert set(index.holdings(name, 0)) == {salt}
        # What is forbidden of a salt leaves alone what has none, what is forbidden of all does not.
        index.forbid(name, salt)
        assert index.commit(name, one, chain(2, seed="a"), record(2), rank=0, ranks=1) is CommitState.VISIBLE
        index.forbid(name, NO_SALT)
        assert index.commit(name, one, chain(2, seed="a"), record(2), rank=0, ranks=1) is CommitState.REFUSED
        assert index.states(name, [one, gone, ranked, half]) == ["visible", "trash", "visible", "visible"]
        assert [done.by for done in index.operations(9)] == ["anna@desk"]
        assert index.reconcile(name).recorded == index.reconcile(name).counted
    fresh = fast_path / "fresh.sqlite"
    SqliteIndex(str(fresh)).close()
    assert schema(path) == schema(fresh)


def test_events_of_a_release_that_told_nothing_of_sessions_are_read(fast_path: Path) -> None:
    path = fast_path / "index.sqlite"
    make(path, 6)
    name = stored_id(namespace())
    gone, ended, waits, nobodys = (SegmentId(bytes([i]) * 8) for i in range(1, 5))
    with SqliteIndex(str(path), clock=lambda: float(CREATED_S)) as index:
        assert index.owners(name, [ended, waits]) == [
            session_id(NO_SALT, "ended"),
            session_id(NO_SALT, "waits"),
        ]
        assert index.evict(name, [ended, waits, nobodys], delete_after_s=CREATED_S, rule="capacity") == 3
        done = [(one.segment, one.fate, one.session) for one in index.events(name) if one.op == "evict"]
    assert done == [
        (gone, None, NO_SESSION),
        (ended, "ended", session_id(NO_SALT, "ended")),
        (waits, "retained", session_id(NO_SALT, "waits")),
        (nobodys, None, NO_SESSION),
    ]
    fresh = fast_path / "fresh.sqlite"
    SqliteIndex(str(fresh)).close()
    assert schema(path) == schema(fresh)


def test_a_release_that_told_nothing_of_sessions_goes_on_beside_one_that_does(fast_path: Path) -> None:
    """One that has the file open when it is brought to schema 7: it writes rows as it knows them."""
    path = fast_path / "index.sqlite"
    make(path, 6)
    name = stored_id(namespace())
    gone, ended, _, nobodys = (SegmentId(bytes([i]) * 8) for i in range(1, 5))
    older = sqlite3.connect(path)
    columns = len(older.execute("SELECT * FROM events").fetchall()[0])
    with SqliteIndex(str(path), clock=lambda: float(CREATED_S)) as index:
        assert index.evict(name, [ended], delete_after_s=CREATED_S, rule="capacity") == 1
        values = older.execute("SELECT * FROM events ORDER BY number DESC LIMIT 1").fetchone()
        again = (values[0], values[1] + 1, values[2], "evict", nobodys, *values[5:])
        older.execute(f"INSERT INTO events VALUES ({', '.join('?' * columns)})", again)
        older.commit()
        done = [(one.segment, one.fate) for one in index.events(name) if one.op == "evict"]
        assert done == [(gone, None), (ended, "ended"), (nobodys, None)]
    older.close()


def test_fates_go_with_their_events(fast_path: Path) -> None:
    path = fast_path / "index.sqlite"
    make(path, 6)
    name, ended = stored_id(namespace()), SegmentId(b"\x02" * 8)
    with SqliteIndex(str(path), journal=JournalSettings(events=3), clock=lambda: float(CREATED_S)) as index:
        assert index.evict(name, [ended], delete_after_s=CREATED_S, rule="capacity") == 1
        assert [one.fate for one in index.events(name)][-1] == "ended"
        for seed in "xyz":
            put(index, name, chain(1, seed=seed))
        assert [one.fate for one in index.events(name)] == [None] * 3
    assert sqlite3.connect(path).execute("SELECT count(*) FROM fates").fetchone() == (0,)


def test_what_was_stored_before_sessions_is_nobodys_and_stays(fast_path: Path) -> None:
    path = fast_path / "index.sqlite"
    make(path, 5)
    name, session = stored_id(namespace()), session_id(NO_SALT, "chat")
    salted, _, ranked, half, pinned = segments = [SegmentId(bytes([i]) * 8) for i in range(1, 6)]
    with SqliteIndex(str(path), clock=lambda: float(CREATED_S)) as index:
        assert index.states(name, segments) == ["visible", "trash", "visible", "incomplete", "visible"]
        assert [one.segment for one in index.order(name, 9)] == [ranked, salted]
        assert set(index.forbidden(name)) == {salt_id("tenant-b")}
        assert index.owners(name, segments) == [NO_SESSION] * 5
        assert list(index.sessions(name)) == []
        assert index.retained(name) == {}
        # They can be used and retained as any others; what the new release completes is its session's.
        allowance = Allowance(1 << 30, 1 << 30, 1 << 30)
        hint = Hint(retain_s=600)
        told = index.session(name, session, [ranked, salted, pinned], CREATED_S, hint, allowance=allowance)
        assert (told.segments, told.retained_bytes) == (0, 3 * record(2).nbytes)
        begun = chain(1, seed="d")
        state = index.commit(
            name, half, begun, record(1), rank=0, ranks=2, session=session, allowance=allowance
        )
        assert state is CommitState.VISIBLE
        assert index.owners(name, [half, ranked]) == [session, NO_SESSION]
        assert index.reconcile(name).recorded == index.reconcile(name).counted
    fresh = fast_path / "fresh.sqlite"
    SqliteIndex(str(fresh)).close()
    assert schema(path) == schema(fresh)
