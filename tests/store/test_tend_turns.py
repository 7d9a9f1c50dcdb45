"""Tidying without a janitor: every namespace has its turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.build import open_store
from kvstore.errors import TransientError
from kvstore.keys import NamespaceId
from tests.store.world import SLOT_BYTES, chain, namespace, slots


def test_a_namespace_that_fails_does_not_keep_the_others_from_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_store({"payloads": "memory://tend-turns", "index": "memory://tend-turns"}) as store:
        catalogue: Any = store.catalogue
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
                store.tend()
        assert [account.bygone for account in catalogue.accounts()] == [1, 0, 0]
