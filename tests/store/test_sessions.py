"""Sessions through the whole store: saved, retained within a share of the quotas, evicted, rebuilt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings, open_store
from kvstore.errors import TransientError
from kvstore.index.eviction import Scope, watermarks
from kvstore.index.sessions import NOTHING_RETAINED, USE, Allowance, Hint, HintEffect
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    SaltId,
    SegmentId,
    SessionId,
    chain_like,
    new_segment_id,
    salt_id,
    session_id,
)
from kvstore.store import sessions as sessions_module
from kvstore.store.sessions import SpaceSessions
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.settings import Settings
from tests.index.contract.sessions import END, later
from tests.servers.redis import RedisServer
from tests.store.world import chain, make_store, match, namespace, open_space, slots
from tests.waiting import until

ALICE, BOB = session_id(NO_SALT, "alice"), session_id(NO_SALT, "bob")
#: All that may be retained is a salted client's to ask for.
HIS = salt_id("his")
CAPACITY = 1 << 20


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def server(request: pytest.FixtureRequest) -> RedisServer | None:
    found: RedisServer | None = None
    if request.param == "redis":
        found = request.getfixturevalue("redis_server")
    return found


@pytest.fixture
def settings(server: RedisServer | None, tmp_path: Path) -> Settings:
    url = server.url if server else f"sqlite://{tmp_path}/index.sqlite"
    given: dict[str, Any] = {"payloads": f"file://{tmp_path}/payloads", "index": url}
    return load_settings(given | {"capacity_bytes": CAPACITY, "sessions": {"retain_share": 0.25}}, environ={})


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with open_store(settings) as opened:
        yield opened


@pytest.fixture
def space(store: Store) -> Space:
    space = open_space(store)
    space.register()
    return space


def hashes(number: int, blocks: int = 6) -> list[bytes]:
    return chain(number, *range(blocks - 1))


def save(space: Space, number: int, session: SessionId = NO_SESSION, **options: Any) -> list[SegmentId]:
    """Saves a chain as segments of two blocks, heads first."""
    segments = []
    for at in range(0, 6, 2):
        segments.append(new_segment_id())
        some = slots(hashes(number)[at : at + 2])
        space.save(
            some, depth=at, chain=chain_like(segments[-1]), segment=segments[-1], session=session, **options
        )
    return segments


def fill(space: Space, first: int) -> None:
    """Saves more than the store holds, of nobody's and later than what was done `before`."""
    written, created_s = 0, int(time.time()) - 120
    for number in range(first, first + 10_000):
        save(space, number, created_s=created_s)
        written += 3 * 8192
        if written > 2 * CAPACITY:
            return


def before() -> int:
    """Five minutes ago."""
    return int(time.time()) - 300


def told_before(space: Space, session: SessionId, segments: list[SegmentId], hint: Hint = USE) -> HintEffect:
    """What Space.session tells, five minutes ago."""
    index, allowance = space.backends.index, space._sessions.allowance(session)
    return index.session(space.id, session, segments, float(before()), hint, allowance=allowance)


def there(space: Space, number: int) -> int:
    return match(space, hashes(number)).blocks


def test_retained_ones_survive_a_load_that_evicts_all_else(store: Store, space: Space) -> None:
    kept = save(space, 0, ALICE, created_s=before())
    other = save(space, 1, BOB, created_s=before())
    assert told_before(space, ALICE, kept, later(600)).refused_bytes == 0
    told_before(space, BOB, other)
    fill(space, 100)
    assert (there(space, 0), there(space, 1)) == (6, 0)
    # And go like others when their time is over.
    ends = time.time() + 1.0
    told_before(space, ALICE, [], later(1.0))
    until(lambda: time.time() > ends + 1.6)
    fill(space, 100_000)
    assert there(space, 0) == 0
    assert store.maintenance.retained(space.id) == {}


def test_a_client_that_retains_everything_is_stopped_at_its_share(store: Store, space: Space) -> None:
    share = CAPACITY // 4 * 3 // 4
    for number in range(60):
        greedy = session_id(NO_SALT, f"greedy {number}")
        told_before(space, greedy, save(space, number, greedy, created_s=before()), later(3600))
        held = store.maintenance.retained(space.id).get(NO_SALT, 0)
        assert held <= share
    assert held > share - 3 * 12_288
    # What others ask for now is kept by the order of its use, in all the rest of the store.
    fill(space, 10_000)
    mine = save(space, 1000, BOB)
    used = store.maintenance.usage(space.id).nbytes
    assert used <= watermarks(CAPACITY)[0] + 12_288
    assert {one.segment for one in store.maintenance.segments(space.id)} >= set(mine)


def test_an_idle_namespaces_retentions_end_before_others_are_evicted(tmp_path: Path) -> None:
    """Nobody tells or culls there: its older segments go before what others have used since."""
    clock = Clock()
    with make_store(tmp_path, clock=clock) as store:
        idle, busy = (open_space(store, model=model) for model in ("idle", "busy"))
        for space in (idle, busy):
            space.register()
        began = int(clock.now)
        told = idle.session(ALICE, save(idle, 0, ALICE, created_s=began), later(600))
        assert told is not None and told.refused_bytes == 0
        clock.now += 300
        younger = save(busy, 1)
        clock.now += 900
        store.maintenance.set_quota(Scope.STORE, 5 * told.retained_bytes // 3)
        assert store.rounds.housekeep() > 0
        assert {one.segment for one in store.maintenance.segments(busy.id)} == set(younger)


def test_what_only_an_ended_session_used_makes_room(store: Store, space: Space) -> None:
    old, ended = save(space, 0), save(space, 1, ALICE)
    space.session(ALICE, ended, END)
    # Its request is still being saved.
    late = save(space, 2, ALICE)
    first = [one.segment for one in store.maintenance.order(space.id, 6)]
    assert set(first) == {*ended, *late}
    assert not set(first) & set(old)


def test_a_lost_index_is_rebuilt_without_sessions(
    settings: Settings, server: RedisServer | None, store: Store, space: Space, tmp_path: Path
) -> None:
    kept = save(space, 0, ALICE)
    space.session(ALICE, kept, later(600))
    if server is not None:
        server.flush()
        lost = store
    else:
        store.close()
        for file in tmp_path.glob("index.sqlite*"):
            file.unlink()
        lost = open_store(settings)
    with lost, Cache(settings) as cache:
        again = open_space(lost)
        # A session whose index is lost is told of again, in a namespace that is made again.
        told = again.session(ALICE, kept, later(600))
        assert told is not None and (told.state, told.retained_bytes) == ("retained", 0)
        rebuild(cache, apply=True)
        assert there(again, 0) == 6
        assert lost.maintenance.owners(again.id, kept) == [NO_SESSION] * 3
        told = again.session(ALICE, kept, later(600))
        assert told is not None and told.retained_bytes == lost.maintenance.usage(again.id).nbytes
        assert not fsck(cache, depth=Depth(percent=100.0, settled_s=0.0)).faults


def test_nobody_is_told_of_an_index_that_fails(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        space = open_space(store)
        space.register()
        store.index.close()
        assert space.session(ALICE, [new_segment_id()], END) is None


# the share


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def allowance(store: Store, salt: SaltId = NO_SALT, **changes: Any) -> Allowance:
    sessions = SpaceSessions(store.backends, namespace(**changes), lambda call: call())
    return sessions.allowance(ALICE, salt)


def test_the_share_is_of_every_quota_that_bounds_a_namespace(tmp_path: Path) -> None:
    hers, his = salt_id("hers"), salt_id("his")
    with make_store(tmp_path, capacity_bytes=1000_000) as store:
        assert allowance(store, his) == Allowance(100_000, 50_000, 50_000)
        # Those without a salt leave some to those with one.
        assert allowance(store) == Allowance(75_000, 0, 50_000)
        index = store.maintenance
        index.set_quota(Scope.STORE, 500_000)
        assert allowance(store, his).namespace_bytes == 50_000
        index.set_quota(Scope.tenant("acme"), 400_000)
        assert allowance(store, his).namespace_bytes == 50_000
        assert allowance(store, his, tenant="acme").namespace_bytes == 40_000
        index.set_quota(Scope.namespace(open_space(store, tenant="acme").id), 300_000)
        assert allowance(store, his, tenant="acme").namespace_bytes == 30_000
        index.set_quota(Scope.salt(hers), 10_000)
        assert allowance(store, hers, tenant="acme") == Allowance(30_000, 1_000, 15_000)
        assert allowance(store, his, tenant="acme") == Allowance(30_000, 15_000, 15_000)


def test_settings_bound_it_too(tmp_path: Path) -> None:
    bounds = {"namespace_bytes": 600_000, "tenant_bytes": 500_000, "salt_bytes": 20_000}
    made = make_store(tmp_path, capacity_bytes=1000_000, eviction=bounds, sessions={"retain_share": 0.5})
    with made as store:
        assert allowance(store, salt_id("hers")) == Allowance(250_000, 10_000, 125_000)
        assert allowance(store) == Allowance(187_500, 0, 125_000)


@pytest.mark.parametrize("greedy", [NO_SALT, salt_id("hers")], ids=["without a salt", "with one"])
@pytest.mark.parametrize("modest", [NO_SALT, salt_id("his")], ids=["beside one without", "beside one with"])
def test_who_retains_everything_leaves_some_to_others(space: Space, greedy: SaltId, modest: SaltId) -> None:
    session = session_id(greedy, "greedy")
    refused = 0
    for path in range(20):
        segments = save(space, path, session, salt=greedy)
        told = space.session(session, segments, later(86_000), salt=greedy)
        assert told is not None
        refused += told.refused_bytes
    assert refused, "it has not tried to take everything"
    waits = session_id(modest, "modest")
    told = space.session(waits, save(space, 99, waits, salt=modest), later(300), salt=modest)
    assert told is not None and told.retained_bytes > 0 and not told.refused_bytes


def test_nothing_is_asked_for_who_has_no_session_or_no_share(tmp_path: Path) -> None:
    with make_store(tmp_path, sessions={"retain_share": 0}) as store:
        store.maintenance.close()
        assert allowance(store) == NOTHING_RETAINED
        sessions = SpaceSessions(store.backends, namespace(), lambda call: call())
        assert sessions.allowance(NO_SESSION) == NOTHING_RETAINED


def test_a_tenants_namespaces_share_what_is_the_tenants(tmp_path: Path) -> None:
    clock = Clock()
    quotas: dict[str, Any] = {"capacity_bytes": "1GiB", "eviction": {"tenant_bytes": 1_000_000}}
    with make_store(tmp_path, clock=clock, sessions={"retain_share": 0.1}, **quotas) as store:
        one, other = (open_space(store, tenant="acme", model=model) for model in ("one", "other"))
        stranger = open_space(store, tenant="someone else")
        for space in (one, other, stranger):
            space.register()
        told = other.session(ALICE, save(other, 0, ALICE), later(600))
        assert told is not None and told.retained_bytes > 0
        of_one = SpaceSessions(store.backends, one.namespace, lambda call: call())
        right = 100_000 - told.retained_bytes
        assert of_one.allowance(ALICE, HIS).namespace_bytes == right
        more = other.session(BOB, save(other, 1, BOB), later(600))
        assert more is not None
        # It is asked for once a minute.
        assert of_one.allowance(ALICE, HIS).namespace_bytes == right
        clock.now += 61
        assert of_one.allowance(ALICE, HIS).namespace_bytes == right - more.retained_bytes
        elsewhere = SpaceSessions(store.backends, stranger.namespace, lambda call: call())
        assert elsewhere.allowance(ALICE, HIS).namespace_bytes == 100_000


def test_an_index_that_does_not_answer_leaves_what_was_known(tmp_path: Path) -> None:
    clock = Clock()
    with make_store(tmp_path, clock=clock, capacity_bytes=1000_000) as store:
        store.maintenance.set_quota(Scope.STORE, 500_000)
        sessions = SpaceSessions(store.backends, namespace(), lambda call: call())
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 50_000
        store.maintenance.close()
        clock.now += 61
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 50_000


class Failing:
    """An index's maintenance of which single calls fail."""

    def __init__(self, index: Any, *verbs: str) -> None:
        self._index = index
        self.verbs = set(verbs)
        #: The namespaces that fail, or all of them.
        self.names: set[str] | None = None
        self.asked: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any) -> Any:
            self.asked += args if verb == "retained" else ()
            if verb in self.verbs and (self.names is None or args[0] in self.names):
                raise TransientError("not now")
            return getattr(self._index, verb)(*args)

        return call


def test_quotas_hold_whatever_another_namespace_answers(tmp_path: Path) -> None:
    clock = Clock()
    with make_store(tmp_path, clock=clock, capacity_bytes=1000_000) as store:
        spaces = [open_space(store, model=model) for model in ("one", "other", "third")]
        for space in spaces:
            space.register()
        mine, other, third = spaces
        held = []
        for space in (other, third):
            told = space.session(ALICE, save(space, 0, ALICE), later(600))
            assert told is not None and told.retained_bytes > 0
            held.append(told.retained_bytes)
        failing = Failing(store.maintenance)
        backends = replace(store.backends, maintenance=failing)  # type: ignore[arg-type]
        sessions = SpaceSessions(backends, mine.namespace, lambda call: call())
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 100_000 - sum(held)
        failing.verbs, failing.names = {"retained"}, {other.id}
        store.maintenance.set_quota(Scope.STORE, 900_000)
        clock.now += 61
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 90_000 - sum(held)
        # What does not answer is what it was, also where nobody lists it.
        failing.verbs, failing.names = {"reachable"}, None
        store.maintenance.set_quota(Scope.STORE, 800_000)
        clock.now += 61
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 80_000 - sum(held)


@pytest.mark.parametrize("verb", ["quotas", "reachable"])
def test_nothing_is_retained_before_the_bounds_are_known(tmp_path: Path, verb: str) -> None:
    clock = Clock()
    with make_store(tmp_path, clock=clock, capacity_bytes=1000_000) as store:
        failing = Failing(store.maintenance, verb)
        backends = replace(store.backends, maintenance=failing)  # type: ignore[arg-type]
        sessions = SpaceSessions(backends, namespace(), lambda call: call())
        assert sessions.allowance(ALICE) == NOTHING_RETAINED
        failing.verbs = set()
        clock.now += 61
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 100_000


def test_more_namespaces_than_are_asked_at_once_are_asked_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "_OTHERS", 4)
    clock = Clock()
    with make_store(tmp_path, clock=clock, capacity_bytes=10_000_000) as store:
        one = open_space(store, tenant="acme", model="one")
        one.register()
        others = [open_space(store, tenant="acme", model=f"other {i}") for i in range(3)]
        others += [open_space(store, tenant=f"tenant {i}") for i in range(5)]
        held = 0
        for space in others:
            space.register()
            told = space.session(ALICE, save(space, 0, ALICE), later(600))
            assert told is not None and told.retained_bytes > 0
            held += told.retained_bytes
        failing = Failing(store.maintenance)
        backends = replace(store.backends, maintenance=failing)  # type: ignore[arg-type]
        sessions = SpaceSessions(backends, one.namespace, lambda call: call())
        # Each holds the same, so the estimate is right at once.
        assert sessions.allowance(ALICE, HIS).namespace_bytes == 1_000_000 - held
        assert len(failing.asked) == 4
        for _ in range(2):
            clock.now += 61
            assert sessions.allowance(ALICE, HIS).namespace_bytes == 1_000_000 - held
        assert len(failing.asked) == 12
        assert set(failing.asked) == {space.id for space in others}
