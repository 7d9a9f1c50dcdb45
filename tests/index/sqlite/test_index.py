"""SqliteIndex: the contract, the schema, many processes, and what becomes of failures."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    PermissionDenied,
    StoreClosed,
    TransientError,
)
from kvstore.index.maintenance import Usage
from kvstore.index.port import CommitState, Outcome
from kvstore.index.scripted.values import key
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from schemas.settings import JournalSettings
from tests.index.contract.admission import DAY_S, NOON_S, use
from tests.index.contract.chains import CREATED_S, chain, namespace, put, put_all, record, served
from tests.index.contract.maintained import DELETE_AFTER_S, SOON_S, usage_of
from tests.index.contract.whole import FullIndexConformance
from tests.index.writer import STEPS
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden" / "sqlite_schema.sql"
LATER_S = CREATED_S + 3600.0


class TestSqliteIndex(FullIndexConformance):
    @pytest.fixture
    def index(self, fast_path: Path) -> Iterator[SqliteIndex]:
        self.path = str(fast_path / "made" / "for" / "it" / "index.sqlite")
        with SqliteIndex(self.path) as index:
            yield index

    def reopen(self) -> SqliteIndex:
        return self.configured()

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> SqliteIndex:
        # Threads of a suite take turns, and a machine may be busy.
        return SqliteIndex(
            self.path, journal=journal or JournalSettings(), cost_aware=cost_aware, by=by, busy_timeout_s=20.0
        )

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        with self.configured() as index:
            _miscount(index, name, nbytes)


def _miscount(index: SqliteIndex, name: NamespaceId, nbytes: int) -> None:
    index._client.command("HINCRBY", key(name, "meta"), "bytes", nbytes)


@pytest.fixture
def path(fast_path: Path) -> str:
    return str(fast_path / "index.sqlite")


@pytest.fixture
def index(path: str) -> Iterator[SqliteIndex]:
    with SqliteIndex(path, busy_timeout_s=0.2) as index:
        yield index


@pytest.fixture
def patient(path: str) -> Iterator[SqliteIndex]:
    """Another one of the same file: whoever waits for a lock here is found out."""
    with SqliteIndex(path, busy_timeout_s=PATIENCE_S) as index:
        yield index


@pytest.fixture
def name(index: SqliteIndex) -> NamespaceId:
    return index.register(namespace(), expected_blocks=1000)


def check(path: str, name: NamespaceId) -> Usage:
    """The file is sound and its counters are right."""
    raw = sqlite3.connect(path)
    try:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        raw.close()
    with SqliteIndex(path) as index:
        usage = index.usage(name)
        assert usage == usage_of(index.segments(name)) == index.reconcile(name).counted
    return usage


# The schema


def test_the_schema_is_pinned(index: SqliteIndex, path: str) -> None:
    """A change needs a new SCHEMA_VERSION: the file outlives the release that made it."""
    raw = sqlite3.connect(path)
    rows = raw.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    numbers = [raw.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    mode = raw.execute("PRAGMA journal_mode").fetchone()[0]
    raw.close()
    dump = f"-- application_id {numbers[0]:#x}, user_version {numbers[1]}, journal_mode {mode}\n"
    dump += "".join(f"{sql};\n" for (sql,) in rows)
    assert dump == GOLDEN.read_text(), f"the schema is now:\n{dump}"


def test_a_file_of_a_newer_release_is_a_config_error(index: SqliteIndex, path: str) -> None:
    index.close()
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA user_version = 12")
    raw.close()
    with pytest.raises(ConfigError, match=r"schema 12.*knows 11.*delete"):
        SqliteIndex(path)


def test_another_programs_file_is_a_config_error_and_is_left_alone(path: str) -> None:
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE precious (x)")
    raw.close()
    with pytest.raises(ConfigError, match="another program"):
        SqliteIndex(path)
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT name FROM sqlite_master").fetchall() == [("precious",)]
    assert raw.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    raw.close()


@pytest.mark.slow
def test_many_processes_may_open_a_new_file_at_once(path: str) -> None:
    writers = [_writer(path, str(seed)) for seed in range(4)]
    for writer in writers:
        assert writer.communicate(timeout=PATIENCE_S)[1] == b""
        assert writer.returncode == 0
    with SqliteIndex(path) as index:
        (name,) = index.namespaces()
    kept = 4 * (STEPS + 1 - (STEPS + 1) // 3)
    assert check(path, name).segments == kept


# Processes


def _writer(path: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.index.writer", path, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_a_killed_writer_leaves_a_sound_file(path: str) -> None:
    chance = random.Random(3)
    with SqliteIndex(path) as index:
        name = index.register(namespace(), expected_blocks=1000)
        before = 0
        for attempt in range(6):
            with _writer(path, f"victim {attempt}", "forever") as writer:
                assert writer.stdout and writer.stdout.readline() == b"under way\n"
                time.sleep(chance.uniform(0.0, 0.05))
                writer.kill()
            # The next writer needs no repair and no wait, and sees whole transactions.
            digests = chain(3, seed=str(attempt))
            put(index, name, digests)
            assert served(index.match(name, digests)) == 3
            segments = check(path, name).segments
            assert segments > before
            before = segments


@pytest.mark.slow
def test_killed_upkeep_leaves_exact_accounts(path: str) -> None:
    chance = random.Random(4)
    with SqliteIndex(path) as index:
        name = index.register(namespace(), expected_blocks=1000)
        for attempt in range(8):
            with _writer(path, f"victim {attempt}", "upkeep") as writer:
                assert writer.stdout and writer.stdout.readline() == b"under way\n"
                time.sleep(chance.uniform(0.0, 0.15))
                writer.kill()
            check(path, name)
            (account,) = index.accounts()
            olds = "SELECT id FROM keys WHERE CAST(name AS TEXT) LIKE '%:old:%'"
            bygone = _rows(path, f"SELECT count(*) FROM fields WHERE key IN ({olds})")
            assert bygone == [(account.bygone,)]
        # What was left half done is done by whoever comes next.
        index.invalidate(name)
        while index.drain(name, delete_after_s=1.0, limit=1000):
            pass
        index.reaped(name, [segment for segment, _ in index.reapable(name, CREATED_S, 100_000)])
        assert index.erase(name, 1_000_000) == "erased"


def test_a_writer_killed_inside_a_transaction_has_changed_nothing(path: str) -> None:
    with SqliteIndex(path, busy_timeout_s=0.2) as index:
        name = index.register(namespace(), expected_blocks=1000)
        with _writer(path, "victim", "hang") as writer:
            assert writer.stdout and writer.stdout.readline() == b"under way\n"
            usage = index.usage(name)
            assert usage.segments > 0
            with pytest.raises(DeadlineExceeded):
                put(index, name, chain(3))
            writer.kill()
        assert index.usage(name) == usage == check(path, name)
        put(index, name, chain(3))


def test_a_forked_child_has_connections_of_its_own(
    patient: SqliteIndex, path: str, name: NamespaceId
) -> None:
    index = patient
    digests = chain(10)
    put(index, name, digests)
    inherited = list(index._database._idle)  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for i in range(50):
                put(index, name, chain(2, seed=f"child {i}"))
                assert served(index.match(name, digests)) == 10
            mine = index._database._idle  # type: ignore[attr-defined]
            code = 0 if not set(map(id, mine)) & set(map(id, inherited)) else 2
        finally:
            os._exit(code)
    for i in range(50):
        put(index, name, chain(2, seed=f"parent {i}"))
        assert served(index.match(name, digests)) == 10
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert check(path, name).segments == 101


# Threads and connections


def test_threads_use_connections_of_their_own_and_all_are_closed(path: str) -> None:
    made: list[sqlite3.Connection] = []
    index = SqliteIndex(path, busy_timeout_s=PATIENCE_S)
    name = index.register(namespace(), expected_blocks=1000)
    barrier = threading.Barrier(8)

    def work(worker: int) -> None:
        barrier.wait()
        for step in range(25):
            digests = chain(4, seed=f"{worker}/{step}")
            put(index, name, digests)
            assert served(index.match(name, digests)) == 4

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    made += index._database._idle  # type: ignore[attr-defined]
    assert 1 <= len(made) <= 8
    assert check(path, name).segments == 200
    index.close()
    index.close()
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")
    with pytest.raises(StoreClosed):
        index.match(name, chain(1))


def test_a_connection_in_use_while_closing_is_closed_afterwards(index: SqliteIndex) -> None:
    with index._database.reading("test") as connection:
        index.close()
        connection.execute("SELECT 1")
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


def test_a_failure_inside_a_transaction_undoes_it(index: SqliteIndex, name: NamespaceId) -> None:
    put(index, name, chain(3))
    usage = index.usage(name)
    with pytest.raises(ZeroDivisionError), index._database.writing("test") as db:
        db.execute("DELETE FROM fields")
        raise ZeroDivisionError
    with pytest.raises(TransientError, match="no such table"), index._database.writing("test") as db:
        db.execute("DELETE FROM fields")
        db.execute("DELETE FROM nonsense")
    assert index.usage(name) == usage
    assert served(index.match(name, chain(3))) == 3


def test_reading_does_not_wait_for_a_writer(
    index: SqliteIndex, patient: SqliteIndex, path: str, name: NamespaceId
) -> None:
    digests = chain(5)
    segment = put(index, name, digests)
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    raw.execute("DELETE FROM fields")
    began = time.monotonic()
    assert served(patient.match(name, digests)) == 5
    assert patient.usage(name).segments == 1
    patient.touch(name, [segment], CREATED_S - 30)
    assert time.monotonic() - began < PATIENCE_S / 2
    for call in (
        lambda: put(index, name, chain(1)),
        lambda: index.claim(name, chain(9), segment, 1.0),
        lambda: index.touch(name, [segment], LATER_S),
        index.ping,
    ):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"index\.sqlite"):
            call()
        assert 0.15 < time.monotonic() - began < PATIENCE_S / 2
    raw.execute("ROLLBACK")
    raw.close()
    index.ping()


def test_a_use_that_is_noted_already_does_not_wait_for_a_writer(
    index: SqliteIndex, patient: SqliteIndex, path: str, name: NamespaceId
) -> None:
    use(index, name, chain(50))
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    assert use(patient, name, chain(50)) == 50
    assert use(patient, name, chain(50)[:160]) == 10
    assert time.monotonic() - began < PATIENCE_S / 2
    with pytest.raises(DeadlineExceeded):
        use(index, name, chain(51))
    raw.execute("ROLLBACK")
    raw.close()


def test_uses_take_no_more_rows_than_two_sketches(path: str) -> None:
    now = [NOON_S]
    index = SqliteIndex(path, clock=lambda: now[0])
    name = index.register(namespace(), expected_blocks=1000)
    for day in range(5):
        now[0] = NOON_S + day * DAY_S
        for i in range(100):
            use(index, name, chain(40, seed=f"{day} {i}"), sketch_bytes=2048, at_s=NOON_S + day * DAY_S)
    # Those of days that are over go as new ones come.
    assert _rows(path, "SELECT count(*), sum(length(value)) FROM chunks") == [(4, 4096)]


# Time


def test_an_incomplete_commit_is_forgotten_after_an_hour(path: str) -> None:
    now = [float(CREATED_S)]
    with SqliteIndex(path, clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        digests, segment = chain(2), new_segment_id()

        def commit(rank: int, ranks: int = 3) -> CommitState:
            return index.commit(name, segment, digests, record(2), rank=rank, ranks=ranks)

        assert commit(0) is CommitState.WAITING
        now[0] += 3599
        assert commit(1) is CommitState.WAITING
        now[0] += 3599
        assert commit(2) is CommitState.VISIBLE
        segment = new_segment_id()
        assert commit(0) is CommitState.WAITING
        now[0] += 3600
        assert [commit(rank, 2) for rank in (1, 0)] == [CommitState.WAITING, CommitState.VISIBLE]


def test_claims_expire_by_the_clock(path: str) -> None:
    now = [1000.0]
    with SqliteIndex(path, clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        mine, theirs = new_segment_id(), new_segment_id()
        assert index.claim(name, chain(1), mine, 30.0).granted
        now[0] = 1029.9
        assert not index.claim(name, chain(1), theirs, 30.0).granted
        now[0] = 1030.0
        assert index.claim(name, chain(1), theirs, 30.0).granted


def test_half_commits_end_by_the_clock(path: str) -> None:
    now = [1000.0]
    with SqliteIndex(path, clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        segment = new_segment_id()
        index.commit(name, segment, chain(2), record(2), rank=0, ranks=2)
        now[0] = 1014.9
        assert index.states(name, [segment]) == ["incomplete"]
        now[0] = 1000.0 + 3600
        assert index.states(name, [segment]) == [None]
        assert index.erase(name, 10) == "erased"


def test_what_was_invalidated_half_done_is_remembered_until_it_expires(path: str) -> None:
    now = [1000.0]
    with SqliteIndex(path, clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        segment = new_segment_id()

        def commit(rank: int) -> CommitState:
            return index.commit(name, segment, chain(2), record(2), rank=rank, ranks=2)

        assert commit(0) is CommitState.WAITING
        for _ in range(3):
            index.invalidate(name)
            assert index.drain(name, delete_after_s=1.0, limit=10) == 0
        now[0] += 3599
        assert commit(1) is CommitState.REFUSED
        now[0] += 1
        assert index.drain(name, delete_after_s=1.0, limit=10) == 0
        assert commit(1) is CommitState.WAITING


def test_registering_again_is_noted(path: str) -> None:
    now = [1000.0]
    with SqliteIndex(path, clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        segment = put(index, name, chain(1))
        now[0] = 5000.25
        assert [one.seen_s for one in index.accounts()] == [1000.0]
        index.register(namespace(), expected_blocks=10)
        assert [(one.seen_s, one.usage.segments) for one in index.accounts()] == [(5000.25, 1)]
        now[0] = 6000.5
        index.evict(name, [segment], delete_after_s=LATER_S, rule="admin")
        assert [one.at_s for one in index.events(name)] == [1000.0, 6000.5]


def _rows(path: str, query: str) -> list[tuple[int | bytes, ...]]:
    raw = sqlite3.connect(path)
    found = raw.execute(query).fetchall()
    raw.close()
    return found


# Maintenance


def test_a_readers_position_survives_the_file(path: str) -> None:
    """A router that reads on after the index was lost misses nothing of what comes then."""
    now = [1000.0]
    with SqliteIndex(path, clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        for i in range(50):
            put(index, name, chain(1, seed=str(i)))
        position = index.last_position(name)
        _delete(path)
        now[0] += 1.0
        index.register(namespace(), expected_blocks=10)
        segment = put(index, name, chain(1))
        assert [one.segment for one in index.events(name, after=position)] == [segment]


def test_samples_of_a_large_namespace_are_drawn_by_chance(index: SqliteIndex, name: NamespaceId) -> None:
    chance = random.Random(5)
    segments = [SegmentId(chance.randbytes(8)) for _ in range(300)]
    for i, segment in enumerate(segments):
        put(index, name, chain(1, seed=str(i)), segment=segment)
    pinned = segments[:30]
    index.pin(name, pinned, most_bytes=1 << 30)
    drawn: Counter[SegmentId] = Counter()
    for _ in range(200):
        some = index.sample(name, 15)
        assert len({one.segment for one in some}) == len(some) == 15
        drawn.update(one.segment for one in some)
    # 10 are expected of each; were the first after a random id drawn, some would never be.
    assert set(drawn) == set(segments)
    assert max(drawn.values()) < 40
    assert len(index.sample(name, 75)) == 75
    for one in index.sample(name, 20):
        assert one.pinned == (one.segment in pinned)


def test_long_work_lets_writers_in_between(
    index: SqliteIndex, name: NamespaceId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No write transaction moves more rows than a few milliseconds allow."""
    changed: list[int] = []
    transaction = index._database._transaction

    @contextmanager
    def counted(verb: str, begin: str) -> Iterator[sqlite3.Connection]:
        with transaction(verb, begin) as connection:
            before = connection.total_changes
            yield connection
            changed.append(connection.total_changes - before)

    digests = chain(6000)
    segments = put_all(index, name, digests, [10] * 600)
    use(index, name, digests)
    monkeypatch.setattr(index._database, "_transaction", counted)
    assert len(index.cull(name, keep_bytes=0, delete_after_s=1.0, limit=200, rule="capacity")) == 200
    assert index.evict(name, segments[:200], delete_after_s=1.0, rule="admin") == 200
    assert index.unlist(name, segments[200:300]) == 100
    assert index.invalidate(name) == 100
    assert index.drain(name, delete_after_s=1.0, limit=1000) == 100
    assert index.sweep(name, 4000) >= 4000
    index.reaped(name, [segment for segment, _ in index.reapable(name, 10, 1000)])
    assert index.erase(name, 100_000) == "erased"
    assert max(changed) <= 4096
    assert len(changed) > 15


def test_nothing_is_left_of_what_is_gone(index: SqliteIndex, path: str, name: NamespaceId) -> None:
    """Rows that no verb would ever show or drop again would pile up."""
    segments = put_all(index, name, chain(20), [5] * 4)
    index.touch(name, segments, SOON_S)
    index.evict(name, segments[:1], delete_after_s=1.0, rule="admin")
    index.unlist(name, segments[1:2])
    index.cull(name, keep_bytes=0, delete_after_s=1.0, limit=1, rule="capacity")
    index.tell(name, [Outcome(1.0, "", "match", 5, 0, "absent", 0, chain(20)[15 * 16 :])])
    half = new_segment_id()
    index.commit(name, half, chain(2), record(2), rank=0, ranks=2)
    assert all(
        _rows(path, f"SELECT count(*) FROM {table}") > [(0,)] for table in ("fields", "members", "entries")
    )
    index.invalidate(name)
    index.drain(name, delete_after_s=1.0, limit=100)
    index.reaped(name, [segment for segment, _ in index.reapable(name, 10, 100)])
    index.unlist(name, [half])
    assert index.erase(name, 1000) == "erased"
    assert _rows(path, "SELECT name FROM keys") == []
    assert all(
        _rows(path, f"SELECT * FROM {table}") == [] for table in ("fields", "members", "chunks", "entries")
    )


def test_a_cull_of_nothing_and_a_noted_touch_do_not_wait_for_a_writer(
    index: SqliteIndex, patient: SqliteIndex, path: str, name: NamespaceId
) -> None:
    segment = put(index, name, chain(5))
    index.touch(name, [segment], SOON_S)
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    assert patient.cull(name, keep_bytes=10**9, delete_after_s=DELETE_AFTER_S, limit=9, rule="capacity") == []
    patient.touch(name, [segment], SOON_S + 14)
    assert len(patient.accounts()) == 1
    assert time.monotonic() - began < PATIENCE_S / 2
    raw.execute("ROLLBACK")
    raw.close()


# Failures


def damaged_header(path: Path) -> None:
    path.write_bytes(b"this is not a database, whatever its name says" * 1000)


def damaged_pages(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[4096:] = os.urandom(len(whole) - 4096)
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", [damaged_header, damaged_pages])
def test_a_damaged_file_says_what_to_do_and_deleting_it_helps(
    path: str, damage: Callable[[Path], None]
) -> None:
    with SqliteIndex(path) as index:
        name = index.register(namespace(), expected_blocks=10)
        put_all(index, name, chain(1000), [10] * 100)
    damage(Path(path))
    with SqliteIndex(path) as index:
        for verb in (
            lambda: index.match(name, chain(1000)),
            lambda: put(index, name, chain(3)),
            lambda: list(index.segments(name)),
        ):
            with pytest.raises(TransientError, match="delete it with its -wal and -shm"):
                verb()
        _delete(path)
        assert index.match(name, chain(1000)) == []
        index.register(namespace(), expected_blocks=10)
        put(index, name, chain(3))
        assert served(index.match(name, chain(3))) == 3
    check(path, name)


def _delete(path: str) -> None:
    for file in Path(path).parent.glob(Path(path).name + "*"):
        file.unlink()


def test_running_handles_follow_when_the_file_is_deleted(path: str) -> None:
    handles = [SqliteIndex(path) for _ in range(3)]
    for round_ in range(3):
        digests = chain(3, seed=str(round_))
        for handle in handles:
            name = handle.register(namespace(), expected_blocks=10)
            assert handle.match(name, digests) == []
        put(handles[0], name, digests)
        assert [served(handle.match(name, digests)) for handle in handles] == [3, 3, 3]
        _delete(path)
    for handle in handles:
        handle.close()


def test_a_connection_to_a_deleted_file_is_not_used_again(path: str) -> None:
    with SqliteIndex(path) as index:
        name = index.register(namespace(), expected_blocks=10)
        with index._database.reading("test"):
            _delete(path)
            index.register(namespace(), expected_blocks=10)
            put(index, name, chain(3))
        # The connection just given back still has the deleted file open.
        for _ in range(3):
            assert served(index.match(name, chain(3))) == 3


def test_a_full_disk_is_capacity(
    index: SqliteIndex, name: NamespaceId, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = chain(20)
    put(index, name, digests)
    usage = index.usage(name)
    (connection,) = index._database._idle  # type: ignore[attr-defined]
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(CapacityExceeded, match="full"):
        put_all(index, name, chain(20_000, seed="x"), [1000] * 20)
    connection.execute("PRAGMA max_page_count = 1000000")
    assert served(index.match(name, digests)) == 20
    assert index.usage(name).segments < usage.segments + 20
    put(index, name, chain(1000, seed="y"))


@pytest.mark.parametrize("where", ["/proc/kvstore/index.sqlite", "{path}/file/index.sqlite", "{path}"])
def test_a_place_that_cannot_be_written_is_permission(fast_path: Path, where: str) -> None:
    (fast_path / "file").write_text("")
    with SqliteIndex(where.format(path=fast_path)) as index:
        with pytest.raises(PermissionDenied):
            index.ping()
        with pytest.raises(PermissionDenied):
            index.register(namespace(), expected_blocks=1)


def test_a_read_only_file_is_permission(index: SqliteIndex, path: str, name: NamespaceId) -> None:
    (connection,) = index._database._idle  # type: ignore[attr-defined]
    connection.execute(
        "PRAGMA query_only = ON"
    )  # what SQLite answers then is what a mount read-only makes it answer
    with pytest.raises(PermissionDenied, match="readonly"):
        put(index, name, chain(1))
    with pytest.raises(PermissionDenied, match="readonly"):
        index.ping()
    assert index.match(name, chain(1)) == []


# In memory


def test_one_name_is_one_database_and_outlives_its_handles(request: pytest.FixtureRequest) -> None:
    base = request.node.nodeid
    with SqliteIndex.in_memory(base) as one:
        name = one.register(namespace(), expected_blocks=1)
        put(one, name, chain(2))
    with SqliteIndex.in_memory(base) as again, SqliteIndex.in_memory(base + "/other") as other:
        assert served(again.match(name, chain(2))) == 2
        assert other.namespaces() == {}
        assert repr(again) == f"SqliteIndex(memory://{base})"


def test_repr_names_the_file(index: SqliteIndex, path: str) -> None:
    assert repr(index) == f"SqliteIndex({path})"
