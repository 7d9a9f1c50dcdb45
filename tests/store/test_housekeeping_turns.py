"""Housekeeping without a janitor: every namespace has its turn, and no save looks at all of them for long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import open_store
from kvstore.errors import TransientError
from kvstore.keys import NamespaceId
from kvstore.store.rounds import AT_WORK_S, SIGNS, TIDYING
from tests.store.world import SLOT_BYTES, chain, make_store, namespace, slots


def test_a_namespace_that_fails_does_not_keep_the_others_from_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_store({"payloads": "memory://turns", "index": "memory://turns"}) as store:
        catalogue: Any = store.maintenance
        for model in "abc":
            space = store.open(namespace(model=model), block_bytes=SLOT_BYTES)
            assert space.save(slots(chain(1, 2))).outcome == "stored"
            assert catalogue.invalidate(space.id) == 1
        inner, broken = catalogue.drain, min(catalogue.namespaces())

        def drain(name: NamespaceId, **how: Any) -> int:
            if name == broken:
                raise TransientError("can't be drained")
            return int(inner(name, **how))

        monkeypatch.setattr(catalogue, "drain", drain)
        for _ in range(64):
            with pytest.raises(TransientError):
                store.rounds.housekeep()
        assert [account.bygone for account in catalogue.accounts()] == [1, 0, 0]


def test_what_can_not_go_by_age_keeps_nothing_else_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"payloads": "memory://aged", "index": "memory://aged", "eviction": {"ttl_s": 600}}
    with open_store(tree) as store:
        catalogue: Any = store.maintenance

        def age_out(*_: Any, **how: Any) -> tuple[int, str]:
            raise TransientError("no answer")

        monkeypatch.setattr(catalogue, "age_out", age_out)
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        assert space.save(slots(chain(1, 2))).outcome == "stored"
        assert catalogue.invalidate(space.id) == 1
        store.rounds.housekeep()
        assert [account.bygone for account in catalogue.accounts()] == [0]
        assert isinstance(store.rounds.housekeeping.unreachable, TransientError)


@pytest.mark.parametrize("sign", sorted(SIGNS))
def test_all_but_eviction_is_left_to_a_janitor_that_works_or_an_engine_that_tidies(sign: str) -> None:
    with open_store({"payloads": "memory://left", "index": "memory://left"}) as store:
        catalogue: Any = store.maintenance
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        space.save(slots(chain(1, 2)))
        catalogue.invalidate(space.id)
        for since_s, waits in ((0, 1), (AT_WORK_S / 2, 1), (-AT_WORK_S / 2, 1), (-9e9, 0)):
            catalogue.set_quota(sign, int(time.time() - since_s))
            store.rounds.housekeep()
            assert [account.bygone for account in catalogue.accounts()] == [waits]
        assert TIDYING not in catalogue.quotas()


def test_an_engine_that_tidies_says_so_until_it_has_ended_or_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def reachable() -> Any:
        seen.append(TIDYING in catalogue.quotas())
        if len(seen) % 2:
            return inner()
        raise TransientError("no answer")

    with open_store({"payloads": "memory://says", "index": "memory://says"}) as store:
        catalogue: Any = store.maintenance
        inner = catalogue.reachable
        monkeypatch.setattr(store.rounds.housekeeping, "evict", lambda: (0, 0))
        monkeypatch.setattr(catalogue, "reachable", reachable)
        # Its look at what is too old comes after the tidying.
        monkeypatch.setattr(store.rounds.housekeeping, "age_out", lambda _: 0)
        store.rounds.housekeep()
        assert (seen, catalogue.quotas()) == ([True], {})
        with pytest.raises(TransientError):
            store.rounds.housekeep()
        assert (seen, catalogue.quotas()) == ([True, True], {})


@pytest.mark.parametrize(("look_s", "looks"), [(0.01, 25), (3.0, 2)])
def test_a_long_look_at_the_quotas_is_followed_by_as_long_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float, looks: int
) -> None:
    """Thousands of namespaces at the quota: each save looked at all of them."""
    now, looked = 1000.0, 0

    def evict() -> tuple[int, int]:
        nonlocal now, looked
        now, looked = now + look_s, looked + 1
        return 0, 0

    with make_store(tmp_path, clock=lambda: 1000.0) as store:
        rounds = store.rounds
        monkeypatch.setattr(rounds.housekeeping, "evict", evict)
        monkeypatch.setattr("kvstore.store.rounds.time.monotonic", lambda: now)
        for _ in range(25):
            rounds.committed(1 << 20)
            now += 0.15
    assert looked == looks
