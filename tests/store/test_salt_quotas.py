"""Quotas of salts: on real indexes, beside what others hold, by the settings and by operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NO_SALT, NamespaceId, SegmentId, salt_id
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from tests.index.contract.chains import chain, namespace, put, record

NOW_S = 1_790_000_000
ALICE, BOB = salt_id("alice"), salt_id("bob")
ONE = record(1, salt=ALICE).nbytes


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullIndex]:
    url = f"sqlite://{tmp_path}/index.sqlite"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    with open_index(load_settings({"payloads": f"file://{tmp_path}", "index": url}, environ={})) as opened:
        yield opened


def housekeeping(index: FullIndex, root: Path, **eviction: Any) -> Housekeeping:
    settings = load_settings({"payloads": f"file://{root}", "eviction": eviction}, environ={})
    return Housekeeping(index, None, settings, Counters(), lambda: NOW_S + 7200.0)  # type: ignore[arg-type]


def fill(index: FullIndex, name: NamespaceId, salt: bytes, count: int) -> list[SegmentId]:
    """Saves segments of one block each, the first ones used longest ago."""
    return [
        put(index, name, chain(1, seed=f"{salt.hex()}/{i}"), created_s=NOW_S + 60 * i, salt=salt)
        for i in range(count)
    ]


def of(index: FullIndex, name: NamespaceId, salt: bytes) -> set[SegmentId]:
    return {one.segment for one in index.segments(name) if one.record.salt == salt}


def test_each_salt_keeps_its_latest(index: FullIndex, tmp_path: Path) -> None:
    name = index.register(namespace(), expected_blocks=1000)
    hers, his = fill(index, name, ALICE, 40), fill(index, name, BOB, 9)
    nobodys = fill(index, name, NO_SALT, 60)
    house = housekeeping(index, tmp_path, salt_bytes=10 * ONE)
    evicted, room = house.evict()
    assert evicted == 31
    assert of(index, name, ALICE) == set(hers[-9:])
    assert of(index, name, BOB) == set(his)
    assert of(index, name, NO_SALT) == set(nobodys)
    assert {one.rule for one in index.events(name) if one.op == "evict"} == {"salt_quota"}
    # Room for no more than may come before the next look.
    assert 0 < room <= 10 * ONE
    assert house.evict()[0] == 0


def test_an_operators_quota_outranks_the_settings(index: FullIndex, tmp_path: Path) -> None:
    name = index.register(namespace(), expected_blocks=1000)
    fill(index, name, ALICE, 20)
    fill(index, name, BOB, 20)
    index.set_quota(Scope.salt(BOB), 4 * ONE)
    house = housekeeping(index, tmp_path)
    house.evict()
    assert (len(of(index, name, ALICE)), len(of(index, name, BOB))) == (20, 3)
    index.set_quota(Scope.salt(BOB), 100 * ONE)
    fill(index, name, BOB, 20)
    housekeeping(index, tmp_path, salt_bytes=10 * ONE).evict()
    assert len(of(index, name, ALICE)) == 9
    assert len(of(index, name, BOB)) > 10


def test_each_namespace_by_itself(index: FullIndex, tmp_path: Path) -> None:
    one = index.register(namespace(), expected_blocks=1000)
    other = index.register(namespace(model="other"), expected_blocks=1000)
    for name in (one, other):
        fill(index, name, ALICE, 9)
    house = housekeeping(index, tmp_path, salt_bytes=10 * ONE)
    assert house.evict()[0] == 0
    fill(index, other, ALICE, 12)
    assert house.evict()[0] == 12
    assert len(of(index, one, ALICE)) == len(of(index, other, ALICE)) == 9


def test_tails_go_before_heads_and_pins_stay(index: FullIndex, tmp_path: Path) -> None:
    name = index.register(namespace(), expected_blocks=1000)
    digests = chain(10)
    segments = [put(index, name, digests, at, 1, created_s=NOW_S, salt=ALICE) for at in range(10)]
    index.pin(name, segments[-1:], most_bytes=1 << 40)
    housekeeping(index, tmp_path, salt_bytes=6 * ONE).evict()
    assert of(index, name, ALICE) == {*segments[:4], segments[-1]}
