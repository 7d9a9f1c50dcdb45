"""Engines whose clocks are wrong: the index's own decides order, age and what an erasure covers."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from connectors.engine.sessions.hints import Hints
from connectors.engine.sessions.telling import SessionTeller
from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.admin.remove.erase import Target, erase
from kvstore.admin.repair.follow import PayloadFollower
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings, open_store
from kvstore.keys import NO_SALT, SaltId, SegmentId, payload_name, salt_id, session_id
from kvstore.store import saving
from kvstore.store.reading import PayloadLate
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.servers.redis import RedisServer
from tests.store.world import chain, fetch, match, open_space, slots, with_parts
from tests.waiting import PATIENCE_S

MONTH_S = 30 * 86400.0
#: What it is where no test has changed it.
MOST_WAITED_S = saving.MOST_WAITED_S
ALICE = salt_id("alice")
WRONG = pytest.mark.parametrize("off_s", [MONTH_S, 300.0, -300.0, -MONTH_S])


class Fleet:
    """Engines on one store, each with a clock of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.stores: list[Store] = []

    def engine(self, off_s: float = 0.0, **parts: Any) -> Space:
        kv = {"load": "always", "match_deadline_s": 60.0}
        store = with_parts(
            open_store({**self.settings, "kv": kv}), clock=lambda: time.time() + off_s, **parts
        )
        self.stores.append(store)
        space = open_space(store)
        space.register()
        return space

    def cache(self) -> Cache:
        return Cache(load_settings(self.settings, environ={}))


@pytest.fixture(params=["sqlite", "redis", "shards"])
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segments_of_any_age: None
) -> Iterator[Fleet]:
    monkeypatch.setattr("kvstore.store.saving.MOST_WAITED_S", MOST_WAITED_S)
    settings: dict[str, Any] = {"payloads": f"file://{tmp_path}/payloads"}
    if request.param == "sqlite":
        settings["index"] = f"sqlite://{tmp_path}/index.sqlite"
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        redis.Redis.from_url(server.url).flushall()
        settings |= {"index": server.url, "redis": {"timeout_s": 60.0, "connect_timeout_s": 60.0}}
        if request.param == "shards":
            settings["redis"]["shards"] = 3
    made = Fleet(settings)
    yield made
    for store in made.stores:
        store.close()


@pytest.mark.parametrize("off_s", [0.0, 3600.0, -3600.0])
def test_what_a_node_has_yet_to_upload_is_late_by_the_clock_of_the_index(
    fleet: Fleet, tmp_path: Path, off_s: float
) -> None:
    segment = save(fleet.engine(), 1, 2)
    tiers = {"fast": f"file://{tmp_path}/fast", "slow": fleet.settings["payloads"], "write": "back"}
    back = load_settings({**fleet.settings, "payloads": tiers}, environ={})
    reader = fleet.engine(off_s, settings=back)
    found = match(reader, chain(1, 2))
    (tmp_path / "payloads" / payload_name(reader.id, segment, 0)).unlink()
    with pytest.raises(PayloadLate):
        fetch(reader, chain(1, 2), found)
    with Cache(back) as cache:
        report = PayloadFollower(cache, clock=lambda: time.time() + off_s).turn()
        assert (report.problem, report.gone) == ("", 0)
    assert match(reader, chain(1, 2)).blocks == match(fleet.engine(), chain(1, 2)).blocks == 2


def save(space: Space, *path: int, salt: SaltId = NO_SALT) -> SegmentId:
    hashes = chain(*path)
    assert space.save(slots(hashes), salt=salt).outcome == "stored"
    (run,) = match(space, hashes).runs
    return run.segment


@WRONG
def test_an_engine_with_a_wrong_clock_is_served_and_served_by_others(fleet: Fleet, off_s: float) -> None:
    right, wrong = fleet.engine(), fleet.engine(off_s)
    save(right, 1, 2)
    save(wrong, 3, 4)
    for space in (right, wrong):
        assert [match(space, chain(*path)).blocks for path in ((1, 2), (3, 4))] == [2, 2]


@WRONG
def test_what_it_saves_is_as_old_as_it_is_by_the_index_and_its_header(fleet: Fleet, off_s: float) -> None:
    wrong, before = fleet.engine(off_s), int(time.time())
    segment = save(wrong, 1, 2)
    with fleet.cache() as cache:
        assert cache.index is not None
        (listing,) = cache.index.get(wrong.id, [segment])
        assert listing is not None and before - 1 <= listing.record.created_s <= time.time() + 1
        assert before - 60 <= listing.last_use_s <= time.time() + 1
        cache.index.unlist(wrong.id, [segment])
        assert rebuild(cache, apply=True).namespaces[0].listed.segments == 1
        assert cache.index.get(wrong.id, [segment]) == [listing]


@WRONG
def test_it_is_evicted_in_the_order_of_use_like_any_other(fleet: Fleet, off_s: float) -> None:
    right, wrong = fleet.engine(), fleet.engine(off_s)
    used = [save(right, 10 + number) for number in range(5)] + [
        save(wrong, 20 + number) for number in range(5)
    ]
    unused = [save(right, 30 + number) for number in range(5)] + [
        save(wrong, 40 + number) for number in range(5)
    ]
    wrong.touch(used[:5])
    wrong.session(session_id(NO_SALT, "a"), used[5:])
    with fleet.cache() as cache:
        assert cache.index is not None
        held = cache.index.usage(right.id).nbytes
        # Both are of this minute, but for half of it by which what nobody has used is older.
        gone = cache.index.cull(
            right.id, keep_bytes=held // 2, delete_after_s=1.0, limit=100, rule="capacity"
        )
    assert set(gone) == set(unused)


@WRONG
def test_a_session_retains_for_as_long_as_its_request_says(fleet: Fleet, off_s: float) -> None:
    wrong, session = fleet.engine(off_s), session_id(NO_SALT, "a")
    (store,) = fleet.stores
    segment, before = save(wrong, 1, 2), int(time.time())
    teller = SessionTeller(store)
    teller.use(wrong)
    teller.ends(Hints(session, retain_s=600.0), NO_SALT, [segment])
    assert store.transfers.drain(PATIENCE_S)
    with fleet.cache() as cache:
        assert cache.index is not None
        (found,) = cache.index.find_sessions(wrong.id, [session])
        assert found is not None and before + 600 <= found.until_s <= time.time() + 600
        assert sum(cache.index.retained(wrong.id).values()) > 0


@WRONG
def test_an_erasure_covers_what_it_has_saved_and_nothing_brings_that_back(
    fleet: Fleet, tmp_path: Path, off_s: float
) -> None:
    wrong, other = fleet.engine(off_s), fleet.engine()
    save(wrong, 1, 2, salt=ALICE)
    save(wrong, 3, 4)
    archive, folder = io.BytesIO(), tmp_path / "payloads"
    with fleet.cache() as cache:
        export(cache, plan(cache, []), archive)
    backup = {path: path.read_bytes() for path in folder.rglob("*.0")}

    def served() -> list[int]:
        return [match(other, chain(*path)).blocks for path in ((1, 2), (3, 4))]

    assert served() == [2, 2]
    with fleet.cache() as cache:
        assert erase(cache, Target(salt=ALICE), apply=True).state == "erased"
    assert served() == [0, 2]
    for path, data in backup.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with fleet.cache() as cache:
        report = rebuild(cache, apply=True)
        assert (report.namespaces[0].erased, report.namespaces[0].listed.segments) == (1, 0)
    assert served() == [0, 2]
    fleet.engine()
    import_archive(io.BytesIO(archive.getvalue()), fleet.stores[-1], source="-", wanted=EVERYTHING)
    assert served() == [0, 2]


@WRONG
def test_what_waited_before_an_erasure_to_be_saved_is_covered(fleet: Fleet, off_s: float) -> None:
    wrong = fleet.engine(off_s)
    with fleet.cache() as cache:
        cache.made_index().forbid(wrong.id, ALICE)
    # It was to be saved before that, or a moment after, by the engine's clock.
    for waited_s in (0, 100):
        created_s = int(time.time() + off_s - waited_s)
        assert wrong.save(slots(chain(1, 2)), salt=ALICE, created_s=created_s).outcome == "refused"


def test_a_scheduler_on_another_machine_makes_its_blocks_five_minutes_older_at_most(fleet: Fleet) -> None:
    worker = fleet.engine(MONTH_S)
    worker.save(slots(chain(1, 2)), created_s=int(time.time()))
    (run,) = match(worker, chain(1, 2)).runs
    assert time.time() - run.record.created_s < MOST_WAITED_S + 60
