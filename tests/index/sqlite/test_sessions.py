"""Sessions in SQLite: how many there may be, and how they are forgotten."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvstore.index.sessions import WINDOW_S, Hint
from kvstore.index.sqlite import sessions as sqlite_sessions
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SALT, session_id
from tests.index.contract.chains import CREATED_S, chain, namespace, put
from tests.index.contract.sessions import ALL, END, ONE, later, save

ALICE, BOB = session_id(NO_SALT, "alice"), session_id(NO_SALT, "bob")


def test_there_are_so_many_at_most(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago goes."""
    monkeypatch.setattr(sqlite_sessions, "MOST_SESSIONS", 5)
    now = [float(CREATED_S)]
    with SqliteIndex(str(fast_path / "index.sqlite"), clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=1000)
        sessions = [session_id(NO_SALT, str(number)) for number in range(20)]
        for session in sessions:
            now[0] += 1
            index.session(name, session, [], CREATED_S, END)
            index.session(name, sessions[0], [], CREATED_S, END)
        assert {one.session for one in index.sessions(name)} == {sessions[0], *sessions[-4:]}


def test_idle_sessions_are_forgotten(fast_path: Path) -> None:
    now = [float(CREATED_S)]
    with SqliteIndex(str(fast_path / "index.sqlite"), clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=1000)
        save(index, name, chain(2), ALICE)
        now[0] += WINDOW_S
        save(index, name, chain(2, seed="b"), BOB)
        now[0] += WINDOW_S
        index.session(name, BOB, [], CREATED_S)
        assert [one.session for one in index.sessions(name)] == [BOB]


def test_its_time_ends_by_the_indexs_clock(fast_path: Path) -> None:
    now = [float(CREATED_S)]
    with SqliteIndex(str(fast_path / "index.sqlite"), clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=1000)
        own = save(index, name, chain(8), ALICE)
        index.session(name, ALICE, own, CREATED_S, Hint(retain_s=90), allowance=ALL)
        for seconds, left in ((89, 4), (1, 0)):
            now[0] += seconds
            index.session(name, BOB, [], CREATED_S)
            assert sum(one.last_use_s > CREATED_S for one in index.segments(name)) == left


def test_one_that_comes_back_after_long_is_counted_once(fast_path: Path) -> None:
    now = [float(CREATED_S)]
    path = fast_path / "index.sqlite"
    with SqliteIndex(str(path), clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=1000)
        index.session(name, ALICE, [], CREATED_S, END)
        for come_back in (
            lambda: index.session(name, ALICE, [], CREATED_S, END),
            lambda: save(index, name, chain(2), ALICE),
        ):
            now[0] += 3 * WINDOW_S
            come_back()
            with sqlite3.connect(path) as raw:
                assert raw.execute("SELECT sessions FROM namespaces").fetchone() == (1,)
            # As in Redis: it is a new one.
            assert [one.session for one in index.sessions(name)] == [ALICE]


def test_what_an_older_process_evicted_is_retained_until_a_reconciliation(fast_path: Path) -> None:
    path = fast_path / "index.sqlite"
    with SqliteIndex(str(path)) as index:
        name = index.register(namespace(), expected_blocks=1000)
        own = save(index, name, chain(8), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL)
        with sqlite3.connect(path) as raw:
            raw.execute("DELETE FROM segments WHERE id = ?", own[3:])
        # SQLite gives its key to the next one.
        put(index, name, chain(1, seed="next"))
        assert index.retained(name) == {NO_SALT: 4 * ONE}
        index.reconcile(name)
        assert index.retained(name) == {NO_SALT: 3 * ONE}
        assert index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL).retained_bytes == 3 * ONE
