"""CatalogueConformance: the contract of Catalogue and Diagnosis of kvstore.index.maintenance as tests."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvstore.index.contract import UNUSED_S
from kvstore.index.maintenance import Entry, Maintenance, Usage
from kvstore.index.port import Index
from kvstore.keys import NamespaceId, canonical_json, new_segment_id, split_digests
from tests.index.contract.chains import (
    CREATED_S,
    EXPECTED_BLOCKS,
    UNKNOWN,
    chain,
    items,
    namespace,
    put,
    put_all,
    record,
)
from tests.index.contract.maintained import (
    DELETE_AFTER_S,
    MINUTE,
    NOTHING,
    SOON_S,
    Maintained,
    evict,
    usage_of,
)


class CatalogueConformance(Maintained):
    """A part of FullIndexConformance."""

    # namespaces, usage

    def test_namespaces_are_listed_with_their_json(self, index: Index, catalogue: Maintenance) -> None:
        assert catalogue.namespaces() == {}
        models = ["one", "two", "caf\u00e9 \U0001f600"]
        ids = [index.register(namespace(model), expected_blocks=1) for model in models]
        assert catalogue.namespaces() == {
            name: canonical_json(namespace(model)) for name, model in zip(ids, models, strict=True)
        }

    def test_usage_is_exact(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        assert catalogue.usage(UNKNOWN) == NOTHING
        assert catalogue.usage(name) == NOTHING
        digests = chain(10)
        segments = put_all(index, name, digests, [4, 6])
        both = Usage(2 * 4096 + 10 * 512, 2, 10)
        assert catalogue.usage(name) == both
        put(index, name, digests, 4, 6, segment=segments[1])
        assert catalogue.usage(name) == both
        copy = put(index, name, digests, 0, 4)
        assert catalogue.usage(name) == Usage(both.nbytes + 4096 + 4 * 512, 3, 14)
        for _ in range(2):
            index.evict(name, [copy, segments[1]], delete_after_s=DELETE_AFTER_S, rule="admin")
            assert catalogue.usage(name) == Usage(4096 + 4 * 512, 1, 4)
        assert catalogue.usage(UNKNOWN) == NOTHING

    def test_usage_counts_all_ranks_once_complete(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(3)
        segment = new_segment_id(digests)
        parts = [record(3, sizes=[2**31, rank, 5], codec="lz4") for rank in range(3)]
        for rank in range(3):
            assert catalogue.usage(name) == NOTHING
            index.commit(name, segment, digests, parts[rank], rank=rank, ranks=3)
        total = Usage(sum(part.nbytes for part in parts), 1, 3)
        assert catalogue.usage(name) == total
        index.commit(name, segment, digests, parts[1], rank=1, ranks=3)
        assert catalogue.usage(name) == total
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert catalogue.usage(name) == NOTHING

    def test_usage_of_refused_commits_is_nothing(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(3)
        segment = new_segment_id(digests)
        index.commit(name, segment, digests, record(3), rank=0, ranks=2)
        index.commit(name, segment, digests, record(3, depth=7), rank=1, ranks=2)
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        index.commit(name, segment, digests, record(3), rank=1, ranks=2)
        assert catalogue.usage(name) == NOTHING

    # accounts

    def test_accounts_tell_of_every_namespace(self, index: Index, catalogue: Maintenance) -> None:
        assert catalogue.accounts() == []
        spaces = [namespace(), namespace("b").model_copy(update={"tenant": "caf\u00e9"}), items()]
        began = time.time()
        names = [index.register(one, expected_blocks=EXPECTED_BLOCKS) for one in spaces]
        segments = put_all(index, names[1], chain(10), [2] * 5)
        self.pin_some(catalogue, names[1], segments[:1])
        evict(index, names[1], segments[3:])
        put(index, names[2], chain(1), cost_us=100)
        bygone = put_all(index, names[0], chain(4), [1] * 4)
        catalogue.invalidate(names[0])
        put(index, names[0], chain(9))
        catalogue.drain(names[0], delete_after_s=DELETE_AFTER_S, limit=1)
        accounts = catalogue.accounts()
        assert catalogue.reachable() == (accounts, None)
        assert [one.namespace for one in accounts] == sorted(names)
        told = {one.namespace: one for one in accounts}
        for name, space in zip(names, spaces, strict=True):
            assert (told[name].kind, told[name].tenant) == (space.kind, space.tenant)
            assert told[name].usage == catalogue.usage(name) == usage_of(catalogue.segments(name))
            # The index may have a clock of its own, and keep whole seconds.
            assert began - 5 < told[name].seen_s < time.time() + 5
        drained = told[names[0]].trashed
        assert 1 <= drained <= len(bygone)
        assert [told[name].trashed for name in names] == [drained, 2, 0]
        assert [told[name].bygone for name in names] == [len(bygone) - drained, 0, 0]

    # segments, get

    def test_segments_lists_every_visible_one(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        assert list(catalogue.segments(name)) == list(catalogue.segments(UNKNOWN)) == []
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        put(index, beside, chain(3))
        segments = put_all(index, name, chain(2200), [1] * 2200)
        index.evict(name, segments[::100], delete_after_s=DELETE_AFTER_S, rule="admin")
        listed = {one.segment: one.record for one in catalogue.segments(name)}
        assert listed == {s: record(1, depth=i) for i, s in enumerate(segments) if i % 100}

    def test_segments_survives_changes_while_it_is_read(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(2200), [1] * 2200)
        seen = set()
        for i, one in enumerate(catalogue.segments(name)):
            seen.add(one.segment)
            if i < 100:
                index.evict(name, [segments[i]], delete_after_s=DELETE_AFTER_S, rule="admin")
        assert seen >= set(segments[100:])

    def test_get_answers_in_order(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        gone, kept = put_all(index, name, chain(5), [2, 3])
        index.evict(name, [gone], delete_after_s=DELETE_AFTER_S, rule="admin")
        found = catalogue.get(name, [gone, kept, new_segment_id(), kept])
        assert [one and (one.segment, one.record) for one in found] == [
            None,
            (kept, record(3, depth=2)),
            None,
            (kept, record(3, depth=2)),
        ]
        assert catalogue.get(name, []) == []
        assert catalogue.get(UNKNOWN, [kept]) == [None]

    def test_last_use_is_kept_to_the_quarter_of_a_minute(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(128)
        first, second = put_all(index, name, digests, [64, 64])
        made = CREATED_S // MINUTE * MINUTE

        def uses() -> list[float | None]:
            found = catalogue.get(name, [first, second])
            return [one.last_use_s if one else None for one in found]

        # What was saved and not used since counts as used earlier.
        assert uses() == [made - UNUSED_S] * 2
        index.touch(name, [second], SOON_S + 44.9)
        assert uses() == [made - UNUSED_S, SOON_S + 30]
        # A use that is told late doesn't replace a later one.
        index.touch(name, [first, second], made + 1)
        assert uses() == [made, SOON_S + 30]
        index.touch(name, [first, second], SOON_S + 3600)
        assert uses() == [SOON_S + 3600] * 2
        assert {one.last_use_s for one in catalogue.segments(name)} == {SOON_S + 3600}

    @pytest.mark.parametrize("verb", ["get", "states", "reaped"])
    def test_a_segment_id_of_another_length_is_an_error(
        self, catalogue: Maintenance, name: NamespaceId, verb: str
    ) -> None:
        with pytest.raises(ValueError, match="segment id of 5 bytes"):
            getattr(catalogue, verb)(name, [new_segment_id(), b"short"])

    # states

    def test_states(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        old = put(index, name, chain(1, seed="old"))
        catalogue.invalidate(name)
        visible, trashed, buried, pinned = put_all(index, name, chain(8), [2] * 4)
        self.pin_some(catalogue, name, [pinned])
        evict(index, name, [buried])
        catalogue.reaped(name, [buried])
        other = chain(2, seed="i")
        incomplete, dropped = new_segment_id(other), new_segment_id(other)
        for segment in (incomplete, dropped):
            index.commit(name, segment, other, record(2), rank=1, ranks=2)
        evict(index, name, [trashed, dropped])
        asked = [visible, trashed, buried, pinned, incomplete, dropped, old, new_segment_id(), visible]
        states = ["visible", "trash", None, "visible", "incomplete", "trash", "bygone", None, "visible"]
        assert catalogue.states(name, asked) == states
        assert catalogue.states(name, []) == []
        assert catalogue.states(UNKNOWN, asked) == [None] * 9
        index.commit(name, incomplete, other, record(2), rank=0, ranks=2)
        catalogue.drain(name, delete_after_s=DELETE_AFTER_S, limit=100)
        assert catalogue.states(name, [incomplete, old]) == ["visible", "trash"]

    # entries

    def test_entries_are_listed_dangling_ones_included(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        assert list(catalogue.entries(name)) == list(catalogue.entries(UNKNOWN)) == []
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        put(index, beside, chain(3))
        digests = chain(2500)
        segments = put_all(index, name, digests, [500] * 5)
        copy = put(index, name, digests, 400, 200)
        evict(index, name, [segments[1], copy])
        assert catalogue.invalidate(name) == 4
        again = put(index, name, digests, 0, 100)
        expected = [
            Entry(digest, segments[i // 500], i % 500) for i, digest in enumerate(split_digests(digests))
        ]
        expected[400:600] = [replace(one, segment=copy, slot=i) for i, one in enumerate(expected[400:600])]
        expected[:100] = [replace(one, segment=again) for one in expected[:100]]

        def listed() -> list[Entry]:
            return sorted(catalogue.entries(name), key=lambda one: one.digest)

        assert listed() == sorted(expected, key=lambda one: one.digest)
        while catalogue.sweep(name, 10_000):
            pass
        assert listed() == sorted(expected[:100], key=lambda one: one.digest)

    def test_entries_survive_changes_while_they_are_read(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(3000)
        segments = put_all(index, name, digests, [1000] * 3)
        evict(index, name, segments[1:2])
        seen = set()
        for i, one in enumerate(catalogue.entries(name)):
            seen.add(one.digest)
            if i % 300 == 0:
                catalogue.sweep(name, 200)
        kept = split_digests(digests)
        assert seen >= {*kept[:1000], *kept[2000:]}

    # ping

    def test_ping_changes_nothing(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        put(index, name, chain(3))
        before = replace(catalogue.usage(name))
        catalogue.ping()
        assert catalogue.usage(name) == before
        assert catalogue.namespaces() == {name: canonical_json(namespace())}
