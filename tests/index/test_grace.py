"""An index that knows the grace time keeps it, whatever time its callers give."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NamespaceId, new_segment_id
from kvstore.metrics import Counters
from kvstore.payloads.memory import MemoryPayloads
from kvstore.store.housekeeping import Housekeeping
from tests.index.contract.chains import chain, namespace, put_all

GRACE_S = 300.0


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    url = f"sqlite://{tmp_path}/index.sqlite"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    tree = {"payloads": f"file://{tmp_path}", "index": url, "grace_s": GRACE_S}
    with open_index(load_settings(tree, environ={})) as index:
        yield index


def trash(index: Any, name: NamespaceId, way: str, delete_after_s: float) -> None:
    segments = put_all(index, name, chain(6, seed=way), [2, 2, 2])
    if way == "evict":
        index.evict(name, segments, delete_after_s=delete_after_s, rule="admin")
    elif way == "cull":
        index.cull(name, keep_bytes=0, delete_after_s=delete_after_s, limit=9, rule="capacity")
    else:
        index.invalidate(name)
        index.drain(name, delete_after_s=delete_after_s, limit=9)


@pytest.mark.parametrize("way", ["evict", "cull", "drain"])
def test_a_caller_that_was_held_up_does_not_cut_it_short(index: Any, way: str) -> None:
    name = index.register(namespace(), expected_blocks=100)
    began = time.time()
    trash(index, name, way, began - 1000)
    ended = time.time()
    assert index.reapable(name, began + GRACE_S - 1, 9) == []
    assert len(index.reapable(name, ended + GRACE_S + 3, 9)) == 3


@pytest.mark.parametrize("way", ["evict", "cull", "drain"])
def test_a_caller_whose_clock_is_ahead_keeps_nothing_for_longer(index: Any, way: str) -> None:
    name = index.register(namespace(), expected_blocks=100)
    began = time.time()
    trash(index, name, way, began + 30 * 86400)
    ended = time.time()
    assert index.reapable(name, began + GRACE_S - 1, 9) == []
    assert len(index.reapable(name, ended + GRACE_S + 3, 9)) == 3


@pytest.mark.parametrize("way", ["evict", "cull", "drain"])
def test_at_once_is_at_once(index: Any, way: str) -> None:
    name = index.register(namespace(), expected_blocks=100)
    trash(index, name, way, 0)
    assert len(index.reapable(name, time.time(), 9)) == 3


def test_who_deletes_asks_by_the_clock_that_the_grace_time_began_by(index: Any, tmp_path: Path) -> None:
    """A node whose clock is ahead deletes nothing early."""
    name = index.register(namespace(), expected_blocks=100)
    segments = put_all(index, name, chain(6), [2, 2, 2])
    made = load_settings({"payloads": f"file://{tmp_path}", "grace_s": GRACE_S}, environ={})
    ahead = Housekeeping(index, MemoryPayloads("grace"), made, Counters(), lambda: time.time() + 3600)
    index.evict(name, segments, delete_after_s=time.time(), rule="admin")
    assert index.reapable(name, None, 9) == []
    assert ahead.reap(name) == 0
    assert index.states(name, segments) == ["trash"] * 3
    assert ahead.forget(name) == 0
    trash(index, name, "evict", 0)
    assert len(index.reapable(name, None, 9)) == 3


def test_a_claim_from_before_a_clock_was_set_back_ends(tmp_path: Path) -> None:
    """Or what somebody was about to save when he died is saved by nobody until the clock is where it was."""
    now = [1_800_000_000.0]
    with SqliteIndex(f"{tmp_path}/index.sqlite", clock=lambda: now[0]) as index:
        name = index.register(namespace(), expected_blocks=10)
        one, two = new_segment_id(), new_segment_id()
        assert index.claim(name, chain(1), one, 30.0).granted
        now[0] -= 250.0
        assert not index.claim(name, chain(1), two, 30.0).granted
        now[0] -= 86_400.0
        assert index.claim(name, chain(1), two, 30.0).granted
        assert not index.claim(name, chain(1), one, 30.0).granted
