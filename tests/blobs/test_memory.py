"""MemoryPayloads passes the contract; objects of one name share their contents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.blobs import memory
from kvstore.blobs.memory import MemoryPayloads
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.keys import parse_payload_name
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


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.nodeid
    memory._STORES.pop(request.node.nodeid, None)


class TestMemoryPayloads(PayloadConformance):
    @pytest.fixture
    def payloads(self, name: str) -> MemoryPayloads:
        return MemoryPayloads(name)

    @pytest.fixture
    def raw(self, name: str, payloads: MemoryPayloads) -> Dictionary:
        return Dictionary(name)


def test_one_name_is_one_store(name: str) -> None:
    one, two = MemoryPayloads(name), MemoryPayloads(name)
    payload = fresh_name()
    one.put(payload, views(b"abc"))
    one.close()
    del one
    assert fetch(two, payload) == b"abc"
    assert fetch(MemoryPayloads(name), payload) == b"abc"


def test_another_name_is_another_store(name: str) -> None:
    one, two = MemoryPayloads(name), MemoryPayloads(name + "/two")
    payload = fresh_name()
    one.put(payload, views(b"abc"))
    assert fetch(two, payload) is None
    del memory._STORES[name + "/two"]


def test_the_clock_is_the_callers(name: str) -> None:
    payloads = MemoryPayloads(name, clock=lambda: 1234.5)
    payloads.put(fresh_name(), views(b"abc"))
    assert [item.modified_s for item in payloads.list()] == [1234.5]


def test_repr_names_it() -> None:
    assert repr(MemoryPayloads("shared")) == "MemoryPayloads('shared')"
