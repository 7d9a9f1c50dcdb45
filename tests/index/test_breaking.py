"""BreakingIndex passes the contract, and refuses while its breaker is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.breaker import Breaker
from kvstore.conformance.chains import CREATED_S, chain, namespace, put
from kvstore.errors import BreakerOpen, TransientError
from kvstore.index.breaking import BreakingIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import namespace_id, new_segment_id
from kvstore.ports import Index, Outcome
from kvstore.testing import IndexConformance
from schemas.settings import BreakerSettings


class TestBreakingIndex(IndexConformance):
    @pytest.fixture
    def index(self, fast_path: Path) -> Iterator[BreakingIndex]:
        self.path = str(fast_path / "index.sqlite")
        with self.reopen() as index:
            yield index

    def reopen(self) -> BreakingIndex:
        return BreakingIndex(SqliteIndex(self.path), Breaker("index", BreakerSettings()))


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
    "note": lambda index: index.note(
        namespace_id(namespace()), chain(1), now_s=CREATED_S, window_s=60.0, sketch_bytes=1024
    ),
}


def test_no_verb_is_forgotten() -> None:
    assert set(VERBS) == {name for name in Index.__abstractmethods__ if name != "close"}


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
        now[0] = 5.0
        # Registering is what a caller sends to find out; afterwards every verb works.
        index.register(namespace(), expected_blocks=1)
        VERBS[verb](index)
    assert repr(index) == f"BreakingIndex(SqliteIndex({file}))"
