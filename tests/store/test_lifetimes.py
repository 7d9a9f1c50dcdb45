"""Times to live: which holds, what it hides from a store's requests, and what housekeeping makes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index, open_store
from kvstore.errors import TransientError
from kvstore.format.segment import Slot
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId, digest, digests
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from kvstore.store.rounds import AT_WORK
from kvstore.store.store import Store
from schemas.namespace import Namespace
from tests.index.contract.chains import chain as chained
from tests.index.contract.chains import namespace as spaced
from tests.index.contract.chains import put, served
from tests.store.world import chain, fetch, item, match, open_space, slots
from tests.waiting import until

HOUR_S, DAY_S = 3600, 86_400
A = chain(*range(6))
EC = Namespace(kind="ec", model="eye", weights="w", dtype="float32")


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    return f"sqlite://{tmp_path}/index.sqlite"


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[Store]:
    tree = {"payloads": f"file://{tmp_path}/payloads", "index": url, "grace_s": 0.5}
    deadlines = {"match_ttl_s": 0.2, "load_deadline_s": 0.2, "load": "always"}
    made = load_settings({**tree, "kv": deadlines}, environ={})
    with open_store(made) as opened:
        # Nobody does housekeeping but the test.
        opened.maintenance.set_quota(AT_WORK, int(time.time()))
        yield opened


@pytest.fixture
def index(url: str, tmp_path: Path) -> Iterator[FullIndex]:
    with open_index(load_settings({"payloads": f"file://{tmp_path}", "index": url}, environ={})) as opened:
        yield opened


def housekeeping(index: FullIndex, root: Path, **eviction: Any) -> Housekeeping:
    settings = load_settings({"payloads": f"file://{root}", "eviction": eviction}, environ={})
    return Housekeeping(index, None, settings, Counters(), time.time)  # type: ignore[arg-type]


def test_what_was_too_old_is_computed_and_saved_again(store: Store) -> None:
    """In the time between its end and the janitor's round, which is never here."""
    space, now = open_space(store), int(time.time())
    space.register()
    store.maintenance.age_out(space.id, HOUR_S, delete_after_s=0)
    space.save(slots(A[:3]), created_s=now - 60)
    old = space.save(slots(A[3:]), depth=3, chain=digests(A[:1]), created_s=now - 2 * HOUR_S)
    assert old.stored == 3
    found = match(space, A)
    assert (found.blocks, found.reason) == (3, "absent")
    assert len(fetch(space, A, found)) == 3
    again = space.save(slots(A[2:]), depth=2, chain=digests(A[:1]))
    assert (again.present, again.stored) == (1, 3)
    found = match(space, A)
    assert (found.blocks, found.reason, len(fetch(space, A, found))) == (6, "complete", 6)
    assert store.maintenance.usage(space.id).segments == 3


def test_an_old_item_is_not_found(store: Store) -> None:
    space = store.open(EC, block_bytes=4096)
    space.register()
    key, data = item("a cat"), memoryview(bytes(1024))
    space.save([Slot(key, data, "F32", (8, 32))], created_s=int(time.time()) - 2 * HOUR_S)
    assert space.find(digest(key)) != [None]
    store.maintenance.age_out(space.id, HOUR_S, delete_after_s=0)
    assert space.find(digest(key)) == [None]
    assert store.maintenance.usage(space.id).segments == 0


def test_the_payload_goes_with_the_next_rounds(store: Store, tmp_path: Path) -> None:
    space = open_space(store)
    space.register()
    store.maintenance.set_quota(Scope.ttl(Scope.tenant("default")), HOUR_S)
    space.save(slots(A), created_s=int(time.time()) - 2 * HOUR_S)
    house = store.rounds.housekeeping
    house.age_out()
    assert match(space, A).blocks == 0
    assert store.maintenance.usage(space.id).segments == 0
    [event] = [one for one in store.maintenance.events(space.id) if one.op == "evict"]
    assert event.rule == "ttl"
    # The trash counts whole seconds.
    until(lambda: house.reap(space.id))
    assert [path for path in (tmp_path / "payloads").glob("*/??/*.*") if path.is_file()] == []


def test_the_shortest_of_all_holds(index: FullIndex, tmp_path: Path) -> None:
    mine, others = (index.register(spaced(model), expected_blocks=1000) for model in ("a", "b"))
    theirs = index.register(spaced("c").model_copy(update={"tenant": "t"}), expected_blocks=1000)
    index.set_quota(Scope.ttl(Scope.STORE), 9 * DAY_S)
    index.set_quota(Scope.ttl(Scope.namespace(mine)), 3 * DAY_S)
    index.set_quota(Scope.ttl(Scope.tenant("t")), 40 * DAY_S)
    index.set_quota(Scope.ttl(Scope.tenant("nobody")), 60)
    index.set_quota(Scope.tenant("t"), 1 << 40)

    def held() -> list[int]:
        known = {one.namespace: one.ttl_s for one in index.accounts()}
        return [known[name] for name in (mine, others, theirs)]

    housekeeping(index, tmp_path).age_out()
    assert held() == [3 * DAY_S, 9 * DAY_S, 9 * DAY_S]
    housekeeping(index, tmp_path, ttl_s=5.9 * DAY_S).age_out()
    assert held() == [3 * DAY_S, int(5.9 * DAY_S), int(5.9 * DAY_S)]
    index.set_quota(Scope.ttl(Scope.STORE), None)
    housekeeping(index, tmp_path).age_out()
    assert held() == [3 * DAY_S, 0, 40 * DAY_S]


def test_a_round_evicts_what_is_too_old_in_every_namespace(index: FullIndex, tmp_path: Path) -> None:
    now = int(time.time())
    names = [index.register(spaced(model), expected_blocks=1000) for model in ("a", "b")]
    for name in names:
        for number in range(4):
            put(index, name, chained(2, seed=str(number)), created_s=now - number * DAY_S - 60)
    assert housekeeping(index, tmp_path, ttl_s=1.5 * DAY_S).age_out() == 4
    for name in names:
        assert index.usage(name).segments == 2
        assert [served(index.match(name, chained(2, seed=str(n)))) for n in range(4)] == [2, 2, 0, 0]
    assert housekeeping(index, tmp_path, ttl_s=1.5 * DAY_S).age_out() == 0


def test_without_a_time_to_live_a_round_changes_nothing(index: FullIndex, tmp_path: Path) -> None:
    name = index.register(spaced(), expected_blocks=1000)
    put(index, name, chained(2), created_s=1)
    assert housekeeping(index, tmp_path).age_out() == 0
    assert served(index.match(name, chained(2))) == 2
    assert index.quotas() == {}


def pages(index: FullIndex, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the namespace of each page from now on."""
    inner, looked = index.age_out, []

    def age_out(name: NamespaceId, ttl_s: int | None, **how: Any) -> tuple[int, str]:
        looked.append(name)
        return inner(name, ttl_s, **how)

    monkeypatch.setattr(index, "age_out", age_out)
    return looked


def test_a_namespace_that_fails_keeps_no_other_from_its_turn(
    index: FullIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [index.register(spaced(model), expected_blocks=1000) for model in "abc"]
    for name in names:
        put(index, name, chained(2), created_s=1)
    house, inner = housekeeping(index, tmp_path, ttl_s=DAY_S), index.age_out

    def age_out(name: NamespaceId, ttl_s: int | None, **how: Any) -> tuple[int, str]:
        if name == names[1]:
            raise TransientError("no answer")
        return inner(name, ttl_s, **how)

    monkeypatch.setattr(index, "age_out", age_out)
    assert house.age_out() == 2
    assert isinstance(house.unreachable, TransientError)
    assert [index.usage(name).segments for name in names] == [0, 1, 0]


def test_a_round_ends_in_time_and_the_next_goes_on(
    index: FullIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [index.register(spaced(model), expected_blocks=1000) for model in "abc"]
    house, looked = housekeeping(index, tmp_path, ttl_s=DAY_S), pages(index, monkeypatch)
    house.age_out(lambda: not looked)
    assert len(looked) == 1
    house.age_out(lambda: len(looked) < 3)
    assert sorted(looked) == sorted(names), "those that were told no time yet come first"


def test_what_was_gone_through_rests_until_another_time_is_set(
    index: FullIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = index.register(spaced(), expected_blocks=1000)
    settings = load_settings({"payloads": f"file://{tmp_path}", "eviction": {"ttl_s": DAY_S}}, environ={})
    now, looked = time.time(), pages(index, monkeypatch)
    house = Housekeeping(index, None, settings, Counters(), lambda: now)  # type: ignore[arg-type]
    for _ in range(3):
        house.age_out()
        now += DAY_S / 400
    assert looked == [name]
    now += DAY_S / 200
    house.age_out()
    assert looked == [name] * 2
    index.set_quota(Scope.ttl(Scope.STORE), HOUR_S)
    house.age_out()
    assert looked == [name] * 3
    assert [one.ttl_s for one in index.accounts()] == [HOUR_S]


def test_what_is_set_during_a_round_holds(
    index: FullIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a round knew when it began is not told any more."""
    index.register(spaced(), expected_blocks=1000)
    index.set_quota(Scope.ttl(Scope.STORE), 9 * DAY_S)
    given, asked = index.quotas, []

    def quotas() -> Any:
        asked.append(1)
        if len(asked) == 2:
            index.set_quota(Scope.ttl(Scope.STORE), DAY_S)
        return given()

    monkeypatch.setattr(index, "quotas", quotas)
    housekeeping(index, tmp_path).age_out()
    assert [one.ttl_s for one in index.accounts()] == [DAY_S]
