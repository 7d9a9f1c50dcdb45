"""What clients say of their sessions, on a real engine: what an ended one alone used goes first, what a
retained one uses goes last, and every answer is the same as before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_store
from kvstore.index.eviction import Scope
from kvstore.index.sessions import SessionListing
from kvstore.keys import NO_SALT, NamespaceId, SegmentId, digests, salt_id, session_id
from kvstore.rules.hashing import block_hashes
from kvstore.store.store import Store
from schemas.namespace import Namespace
from tests.e2e.engine import Engine
from tests.e2e.sharing import BLOCK, check_store, extended, prompt, scheduler_counters
from tests.waiting import until

pytestmark = pytest.mark.engine

#: Two blocks that both sessions begin with, and eight more of each; ten that belong to no session.
SHARED = prompt(2 * BLOCK, 1)
HERS, HIS = extended(SHARED, 8 * BLOCK + 3, 2), extended(SHARED, 8 * BLOCK + 3, 3)
OLD = prompt(10 * BLOCK + 3, 4)
NEW = prompt(10 * BLOCK + 3, 5)


class World:
    """An engine, and its store from outside."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine, self.store, self.index = engine, store, store.maintenance
        self.cold: dict[int, list[int]] = {}

    def ask(self, one: Mapping[str, Any], **more: Any) -> int:
        """Run a prompt from an empty engine cache; returns how many blocks were loaded."""
        self.engine.reset_prefix_cache()
        [result] = self.engine.generate([{**one, **more}])
        # What ended after its last step is told with the next ones.
        self.engine.idle(0.2)
        answer = self.cold.setdefault(one["prompt_token_ids"][-1], result.token_ids)
        assert result.token_ids == answer
        return result.external_tokens // BLOCK

    @property
    def name(self) -> NamespaceId:
        [name] = self.index.namespaces()
        return name

    def stored(self, one: Mapping[str, Any]) -> dict[SegmentId, int]:
        """The segments that hold leading blocks of a prompt, and how many of those they hold."""
        space = Namespace.model_validate_json(self.index.namespaces()[self.name])
        made = block_hashes(
            one["prompt_token_ids"], algorithm=space.hash_algo, block_tokens=space.block_tokens
        )
        return {run.segment: run.count for run in self.index.match(self.name, digests(made))}

    def blocks(self, one: Mapping[str, Any]) -> int:
        return sum(self.stored(one).values())

    def session(self, name: str, salt: str = "") -> SessionListing | None:
        wanted = session_id(salt_id(salt) if salt else NO_SALT, name)
        return self.index.find_sessions(self.name, [wanted])[0]

    def keep(self, segments: int) -> None:
        """Evict by a quota until no more than so many segments are left."""
        scope = Scope.namespace(self.name)
        largest = max(one.record.nbytes for one in self.index.segments(self.name))
        # A hundredth is left free, twice, and the segments are of one size.
        self.index.set_quota(scope, int(segments * largest * 1.03))
        self.store.rounds.housekeep()
        self.index.set_quota(scope, None)
        assert len(list(self.index.segments(self.name))) in (segments - 1, segments)


def test_sessions_say_what_goes_and_what_stays(text_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite") | {"segment": {"max_blocks": 2}, "eviction": {"fresh_s": 0.001}}
    settings = load_settings(config, environ={})
    with (
        open_store(settings) as store,
        Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine,
    ):
        it = World(engine, store)
        for one, more in (
            (OLD, {}),
            (HERS, {"session": "hers"}),
            (HIS, {"session": "his"}),
            (NEW, {}),
        ):
            assert it.ask(one, **more) in (0, 2)
        until(lambda: it.blocks(HIS) == it.blocks(NEW) == 10)
        # What both begin with is nobody's own.
        hers, his = until(lambda: (it.session("hers"), it.session("his")))
        assert hers is not None and his is not None
        assert (hers.state, hers.segments, his.state, his.segments) == ("live", 4, "live", 4)
        total = len(list(it.index.segments(it.name)))
        assert total == 5 + 4 + 5 + 5

        # Nonsense is ignored, and the rest of what is said is not.
        said = {"end": True, "retain": "a while", "forget": True}
        assert it.ask(HERS, session="hers", kv_hints=said) == 10
        assert it.ask(HIS, session="his", actions=[["kv.retain", {"ttl_seconds": 600}]]) == 10
        until(lambda: (one := it.session("hers")) is not None and one.state == "ended")
        his = until(lambda: (one := it.session("his")) is not None and one.state == "retained" and one)
        assert 0 < his.until_s - time.time() < 601
        assert scheduler_counters(engine)["hints_ignored"] == 2
        assert "session_failures" not in scheduler_counters(engine)

        # Hers go first, whatever the order of their use, and of hers not what is his, too.
        it.keep(total - 4)
        assert (it.blocks(OLD), it.blocks(NEW), it.blocks(HIS)) == (10, 10, 10)
        assert it.blocks(HERS) == 2
        # His stay, whatever else has to go.
        it.keep(5)
        assert (it.blocks(OLD), it.blocks(NEW), it.blocks(HIS)) == (0, 0, 10)
        assert it.ask(HERS) == 2 and it.ask(HIS, session="his") == 10
        assert it.ask(OLD) == 0
        # Another salt's session of this name is another one.
        it.ask(NEW, session="his", cache_salt="x", kv_hints={"end": True})
        until(lambda: (one := it.session("his", "x")) is not None and one.state == "ended")
        one = it.session("his")
        assert one is not None and one.state == "retained"
        log = (tmp_path / "engine.log").read_text(errors="replace")
    assert check_store(config)["segments"] >= 10
    assert "the engine goes on without" not in log and "unexpected" not in log
