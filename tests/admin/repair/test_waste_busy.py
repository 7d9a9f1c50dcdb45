"""fsck --list --apply on a store that is in use: what engines do meanwhile doesn't keep it from ending."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.build import load_settings
from kvstore.index.sqlite.index import SqliteIndex
from tests.index.contract.chains import chain, namespace, put_all


def test_it_ends_while_evictions_leave_more_to_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"payloads": "memory://gc-busy", "index": "memory://gc-busy"}
    with Cache(load_settings(tree, environ={})) as cache:
        index: Any = cache.index
        name = index.register(namespace(), expected_blocks=1000)
        inner, sweeps = SqliteIndex.sweep, []

        def sweep(self: SqliteIndex, *args: Any) -> int:
            sweeps.append(args)
            assert len(sweeps) < 100, "it goes on for as long as the store is in use"
            segments = put_all(index, name, chain(2, seed=str(len(sweeps))), [2])
            index.evict(name, segments, delete_after_s=time.time() + 300, rule="capacity")
            return inner(self, *args)

        monkeypatch.setattr(SqliteIndex, "sweep", sweep)
        assert fsck(cache, depth=Depth(only_list=True), apply=True).ended == "complete"
