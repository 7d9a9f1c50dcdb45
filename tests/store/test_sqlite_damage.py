"""A number in the index's file that can't be costs the namespace that it is of, and no other."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.inspect.status import status
from kvstore.build import load_settings, open_store
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Usage
from tests.store.world import chain, match, open_space, slots

CAPACITY = 40_000
QUOTAS = [b"\xff", "9" * 5000, 1e300, -5, "many"]
NUMBERS = [b"\xff", "x", 0.5, -(1 << 63), -1]


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        *(("UPDATE quotas SET nbytes = ? WHERE scope = :scope", value) for value in QUOTAS),
        *(("UPDATE namespaces SET nbytes = ? WHERE id = :id", value) for value in NUMBERS),
        *(("UPDATE namespaces SET cost = ? WHERE id = :id", value) for value in NUMBERS),
        *(("UPDATE namespaces SET seen = ? WHERE id = :id", value) for value in (9e999, "x", b"")),
        *(("UPDATE namespaces SET tenant = ? WHERE id = :id", value) for value in (b"\xff",)),
        *(("INSERT INTO quotas VALUES ('lives/' || :id, ?)", value) for value in NUMBERS),
        *(("INSERT INTO quotas VALUES ('shards/' || :id, ?)", value) for value in NUMBERS[:-1]),
    ],
)
def test_another_namespace_is_saved_and_evicted_as_before(
    tmp_path: Path, statement: str, value: object
) -> None:
    settings = {
        "payloads": f"file://{tmp_path}/payloads",
        "index": f"sqlite://{tmp_path}/index",
        "capacity_bytes": CAPACITY,
        "kv": {"load": "always", "match_deadline_s": 60.0},
    }
    with open_store(settings) as store:
        damaged, other = open_space(store), open_space(store, weights="other")
        damaged.register()
        other.register()
        damaged.save(slots(chain(1, 2)))
        scope = Scope.namespace(damaged.id)
        store.maintenance.set_quota(scope, 10**9)
        with sqlite3.connect(tmp_path / "index") as db:
            statement = statement.replace(":scope", f"'{scope}'").replace(":id", f"'{damaged.id}'")
            for _ in range(2):
                assert db.execute(statement.replace("INSERT INTO q", "REPLACE INTO q"), (value,)).rowcount
        db.close()
        for number in range(20):
            assert other.save(slots(chain(number, number + 1))).outcome == "stored"
        store.transfers.drain(60)
        store.rounds.housekeep()
        assert 0 < store.maintenance.usage(other.id).nbytes <= CAPACITY
        assert any(match(other, chain(number, number + 1)).blocks == 2 for number in range(20))
        (account,) = (one for one in store.maintenance.accounts() if one.namespace == damaged.id)
        assert account.usage.nbytes >= 0 and isinstance(store.maintenance.usage(damaged.id), Usage)
    with Cache(load_settings(settings, environ={})) as cache:
        status(cache, 0.0)
