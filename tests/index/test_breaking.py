"""BreakingIndex passes the contract, and refuses while its breaker is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.breaker import Breaker
from kvstore.errors import BreakerOpen, TransientError
from kvstore.index.breaking import BreakingIndex
from kvstore.index.port import EngineIndex, Outcome
from kvstore.index.sessions import Allowance, Hint
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SALT, namespace_id, new_segment_id, session_id, writer_id
from schemas.settings import BreakerSettings
from tests.index.contract.admission import NoteConformance
from tests.index.contract.chains import CREATED_S, chain, namespace, put, record
from tests.index.contract.index import IndexConformance
from tests.index.contract.sessions import SessionConformance


class TestBreakingIndex(IndexConformance, NoteConformance):
    @pytest.fixture
    def index(self, fast_path: Path) -> Iterator[BreakingIndex]:
        self.path = str(fast_path / "index.sqlite")
        with self.reopen() as index:
            yield index

    def reopen(self) -> BreakingIndex:
        return BreakingIndex(SqliteIndex(self.path), Breaker("index", BreakerSettings()))


class TestSessionsBehindTheBreaker(SessionConformance):
    @pytest.fixture
    def index(self, fast_path: Path) -> Iterator[BreakingIndex]:
        self.path = str(fast_path / "index.sqlite")
        with BreakingIndex(SqliteIndex(self.path), Breaker("index", BreakerSettings())) as index:
            yield index

    @pytest.fixture
    def catalogue(self, index: BreakingIndex) -> Iterator[SqliteIndex]:
        with self.configured() as catalogue:
            yield catalogue

    def configured(self, **settings: Any) -> SqliteIndex:
        return SqliteIndex(self.path, **settings)


WRITER = writer_id("a start")

VERBS: dict[str, Callable[[BreakingIndex], object]] = {
    "register": lambda index: index.register(namespace(), expected_blocks=1),
    "match": lambda index: index.match(namespace_id(namespace()), chain(1)),
    "find": lambda index: index.find(namespace_id(namespace()), chain(1)),
    "claim": lambda index: index.claim(namespace_id(namespace()), chain(1), new_segment_id(), 1.0),
    "commit": lambda index: put(index, namespace_id(namespace()), chain(1)),
    "touch": lambda index: index.touch(namespace_id(namespace()), [new_segment_id()], CREATED_S),
    "evict": lambda index: index.evict(
        namespace_id(namespace()), [new_segment_id()], delete_after_s=CREATED_S, rule="admin"
    ),
    "tell": lambda index: index.tell(
        namespace_id(namespace()), [Outcome(1.0, "", "match", 1, 0, "absent", 0, b"")]
    ),
    "session": lambda index: index.session(
        namespace_id(namespace()), session_id(NO_SALT, "chat"), [new_segment_id()], CREATED_S, Hint(end=True)
    ),
    "owned": lambda index: index.owned(namespace_id(namespace()), session_id(NO_SALT, "chat")),
    "note": lambda index: index.note(
        namespace_id(namespace()), chain(1), now_s=CREATED_S, window_s=60.0, sketch_bytes=1024
    ),
    "sketch_bits": lambda index: index.sketch_bits(
        namespace_id(namespace()), now_s=CREATED_S, window_s=60.0, sketch_bytes=1024
    ),
    "verdicts": lambda index: index.verdicts(namespace_id(namespace()), [WRITER]),
    "judge": lambda index: index.judge(namespace_id(namespace()), WRITER, "alike", by=WRITER, stands=False),
}


def test_no_verb_is_forgotten() -> None:
    assert set(VERBS) == {name for name in EngineIndex.__abstractmethods__ if name != "close"}


def test_what_is_told_and_why_something_is_evicted_is_passed_on(fast_path: Path) -> None:
    with SqliteIndex(str(fast_path / "index.sqlite")) as inner:
        index = BreakingIndex(inner, Breaker("index", BreakerSettings()))
        name = index.register(namespace(), expected_blocks=1)
        segment = put(index, name, chain(1))
        assert index.evict(name, [segment], delete_after_s=CREATED_S, rule="tenant_quota") == 1
        assert inner.events(name)[-1].rule == "tenant_quota"
        told = Outcome(1.0, "request", "save", 3, 1, "held", 1, b"")
        index.tell(name, [told])
        assert inner.outcomes(name, 2) == [told]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_behind_the_breaker(fast_path: Path, verb: str) -> None:
    now = [0.0]
    file = fast_path / "index.sqlite"
    file.write_bytes(b"damaged" * 1000)
    breaker = Breaker("index", BreakerSettings(failures=2, backoff_s=5.0), clock=lambda: now[0])
    with BreakingIndex(SqliteIndex(str(file)), breaker) as index:
        for _ in range(2):
            with pytest.raises(TransientError, match="not a database"):
                VERBS[verb](index)
        with pytest.raises(BreakerOpen):
            VERBS[verb](index)
        file.unlink()
        now[0] = 7.0
        # Registering is what a caller sends to find out; afterwards every verb works.
        index.register(namespace(), expected_blocks=1)
        VERBS[verb](index)
    assert repr(index) == f"BreakingIndex(SqliteIndex({file}))"


def test_what_is_told_of_a_session_is_passed_on(fast_path: Path) -> None:
    session, allowance = session_id(NO_SALT, "chat"), Allowance(1 << 30, 1 << 30, 1 << 30)
    with SqliteIndex(str(fast_path / "index.sqlite")) as inner:
        index = BreakingIndex(inner, Breaker("index", BreakerSettings()))
        name = index.register(namespace(), expected_blocks=1)
        hint = Hint(retain_s=600, priority="low")
        assert index.session(name, session, [], CREATED_S, hint, allowance=allowance).state == "retained"
        segment = new_segment_id()
        made = record(1)
        index.commit(name, segment, chain(1), made, rank=0, ranks=1, session=session, allowance=allowance)
        assert inner.owners(name, [segment]) == [session]
        told = index.session(name, session, [segment], CREATED_S, hint, allowance=allowance)
        assert told.retained_bytes == made.nbytes
