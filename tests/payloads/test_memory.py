"""MemoryPayloads passes the contract; objects of one name share their contents."""

from __future__ import annotations

import pytest

from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.keys import parse_payload_name
from kvstore.payloads import memory
from kvstore.payloads.memory import MemoryPayloads
from kvstore.testing import PayloadConformance, RawPayloads


class Dictionary(RawPayloads):
    """The dictionary behind a MemoryPayloads."""

    def __init__(self, name: str) -> None:
        self._contents = memory._STORES[name]

    def put(self, name: str, data: bytes) -> None:
        # Nothing else writes to that dictionary, so there are no strangers to arrange.
        if parse_payload_name(name):
            self._contents[name] = (data, 0.0)

    def get(self, name: str) -> bytes | None:
        found = self._contents.get(name)
        return found and found[0]

    def names(self) -> set[str]:
        return set(self._contents)


class TestMemoryPayloads(PayloadConformance):
    @pytest.fixture
    def payloads(self, store_name: str) -> MemoryPayloads:
        return MemoryPayloads(store_name)

    @pytest.fixture
    def raw(self, store_name: str, payloads: MemoryPayloads) -> Dictionary:
        return Dictionary(store_name)


def test_one_name_is_one_store(store_name: str) -> None:
    one, two = MemoryPayloads(store_name), MemoryPayloads(store_name)
    payload = fresh_name()
    one.put(payload, views(b"abc"))
    one.close()
    del one
    assert fetch(two, payload) == b"abc"
    assert fetch(MemoryPayloads(store_name), payload) == b"abc"


def test_another_name_is_another_store(store_name: str) -> None:
    one, two = MemoryPayloads(store_name), MemoryPayloads(store_name + "/two")
    payload = fresh_name()
    one.put(payload, views(b"abc"))
    assert fetch(two, payload) is None
    del memory._STORES[store_name + "/two"]


def test_the_clock_is_the_callers(store_name: str) -> None:
    payloads = MemoryPayloads(store_name, clock=lambda: 1234.5)
    payloads.put(fresh_name(), views(b"abc"))
    assert [item.modified_s for item in payloads.list()] == [1234.5]


def test_repr_names_it() -> None:
    assert repr(MemoryPayloads("shared")) == "MemoryPayloads('shared')"
