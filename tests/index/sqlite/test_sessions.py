"""Sessions by a clock that the test sets: how they end and are forgotten."""

from __future__ import annotations

from pathlib import Path

from kvstore.index.sessions import WINDOW_S, Hint
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SALT, session_id
from tests.index.contract.chains import CREATED_S, chain, namespace
from tests.index.contract.sessions import ALL, END, save

ALICE, BOB = session_id(NO_SALT, "alice"), session_id(NO_SALT, "bob")


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
            assert [one.session for one in index.sessions(name)] == [ALICE]
