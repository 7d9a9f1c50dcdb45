"""An index that knows the grace time keeps it, whatever time its callers give."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index
from kvstore.conformance.chains import chain, namespace, put_all
from kvstore.keys import NamespaceId

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
    assert index.due(name, began + GRACE_S - 1, 9) == []
    assert len(index.due(name, ended + GRACE_S + 3, 9)) == 3


@pytest.mark.parametrize("way", ["evict", "cull", "drain"])
def test_a_later_time_stands(index: Any, way: str) -> None:
    name = index.register(namespace(), expected_blocks=100)
    trash(index, name, way, time.time() + 2 * GRACE_S)
    assert index.due(name, time.time() + 2 * GRACE_S - 5, 9) == []
    assert len(index.due(name, time.time() + 2 * GRACE_S + 5, 9)) == 3


@pytest.mark.parametrize("way", ["evict", "cull", "drain"])
def test_at_once_is_at_once(index: Any, way: str) -> None:
    name = index.register(namespace(), expected_blocks=100)
    trash(index, name, way, 0)
    assert len(index.due(name, time.time(), 9)) == 3
