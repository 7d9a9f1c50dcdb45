"""CatalogueConformance: the contract of kvstore.catalogue.Catalogue as tests."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvstore.catalogue import Entry, Maintenance, Usage
from kvstore.conformance.chains import (
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
from kvstore.conformance.maintained import (
    DELETE_AFTER_S,
    MADE_S,
    MINUTE,
    NOTHING,
    SOON_S,
    Maintained,
    evict,
    fill,
    in_order,
    keep_minute,
    pin,
    usage_of,
)
from kvstore.errors import CapacityExceeded
from kvstore.keys import NamespaceId, SegmentId, canonical_json, new_segment_id, split_digests
from kvstore.ports import Index
from schemas.records import rounded_cost


class CatalogueConformance(Maintained):
    """A part of MaintenanceConformance."""

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
        digests, segment = chain(3), new_segment_id()
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
        digests, segment = chain(3), new_segment_id()
        index.commit(name, segment, digests, record(3), rank=0, ranks=2)
        index.commit(name, segment, digests, record(3, depth=7), rank=1, ranks=2)
        index.evict(name, [segment], delete_after_s=DELETE_AFTER_S, rule="admin")
        index.commit(name, segment, digests, record(3), rank=1, ranks=2)
        assert catalogue.usage(name) == NOTHING

    def test_usage_has_pinned_bytes_and_costs(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        costs = [rounded_cost(cost) for cost in (0, 5, 123_456, 7 * 10**11)]
        one = record(1).nbytes
        segments = [put(index, name, chain(1, seed=str(i)), cost_us=cost) for i, cost in enumerate(costs)]
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, 0, sum(costs))
        pin(catalogue, name, segments[2:])
        put(index, name, chain(1, seed="3"), segment=segments[3], cost_us=costs[3])
        assert catalogue.usage(name) == Usage(4 * one, 4, 4, 2 * one, sum(costs))
        evict(index, name, segments[1:3])
        assert catalogue.usage(name) == Usage(2 * one, 2, 2, one, costs[0] + costs[3])
        catalogue.unpin(name, segments)
        assert catalogue.usage(name) == Usage(2 * one, 2, 2, 0, costs[0] + costs[3])
        catalogue.unlist(name, segments)
        assert catalogue.usage(name) == NOTHING

    def test_usage_stays_exact_under_threads(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        other = self.configured()

        def work(worker: int) -> None:
            source = random.Random(worker)
            mine: list[SegmentId] = []
            handle = other if worker % 2 else index
            for step in range(25):
                digests = chain(40, seed=str(worker % 3))
                mine.append(put(handle, name, digests, step, 1 + step % 7, cost_us=1 << step))
                some = source.sample(mine, min(3, len(mine)))
                handle.touch(name, some, SOON_S + MINUTE * step)
                try:
                    other.pin(name, some, most_bytes=100_000)
                except CapacityExceeded:
                    other.unpin(name, mine)
                if step % 2:
                    evict(handle, name, some[:1])
                if step % 9 == 8:
                    catalogue.unlist(name, some[1:])
                if worker == 0 and step == 12:
                    catalogue.invalidate(name)
                catalogue.cull(
                    name, keep_bytes=60_000, delete_after_s=DELETE_AFTER_S, limit=3, rule="capacity"
                )

        try:
            with ThreadPoolExecutor(4) as pool:
                for future in [pool.submit(work, worker) for worker in range(4)]:
                    future.result()
        finally:
            other.close()
        usage = catalogue.usage(name)
        assert usage == usage_of(catalogue.segments(name)) != NOTHING
        found = catalogue.reconcile(name)
        assert (found.recorded, found.counted, found.mended) == (usage, usage, 0)
        assert catalogue.usage(name) == usage

    # accounts

    def test_accounts_tell_of_every_namespace(self, index: Index, catalogue: Maintenance) -> None:
        assert catalogue.accounts() == []
        spaces = [namespace(), namespace("b").model_copy(update={"tenant": "caf\u00e9"}), items()]
        began = time.time()
        names = [index.register(one, expected_blocks=EXPECTED_BLOCKS) for one in spaces]
        segments = put_all(index, names[1], chain(10), [2] * 5)
        pin(catalogue, names[1], segments[:1])
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
            # The index may have a clock of its own, and whole seconds.
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

    def test_last_use_is_kept_to_the_minute(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        digests = chain(128)
        first, second = put_all(index, name, digests, [64, 64])
        made = CREATED_S // MINUTE * MINUTE

        def uses() -> list[float | None]:
            found = catalogue.get(name, [first, second])
            return [one.last_use_s if one else None for one in found]

        assert uses() == [made, made]
        index.touch(name, [second], SOON_S + 59.9)
        assert uses() == [made, SOON_S]
        # A use that is told late doesn't set a later one back.
        index.touch(name, [first, second], made + 1)
        assert uses() == [made, SOON_S]
        index.touch(name, [first, second], SOON_S + 3600)
        assert uses() == [SOON_S + 3600] * 2
        assert {one.last_use_s for one in catalogue.segments(name)} == {SOON_S + 3600}

    # states

    def test_states(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        old = put(index, name, chain(1, seed="old"))
        catalogue.invalidate(name)
        visible, trashed, buried, pinned = put_all(index, name, chain(8), [2] * 4)
        pin(catalogue, name, [pinned])
        evict(index, name, [buried])
        catalogue.bury(name, [buried])
        incomplete, dropped = new_segment_id(), new_segment_id()
        for segment in (incomplete, dropped):
            index.commit(name, segment, chain(2, seed="i"), record(2), rank=1, ranks=2)
        evict(index, name, [trashed, dropped])
        asked = [visible, trashed, buried, pinned, incomplete, dropped, old, new_segment_id(), visible]
        states = ["visible", "trash", None, "visible", "incomplete", "trash", "bygone", None, "visible"]
        assert catalogue.states(name, asked) == states
        assert catalogue.states(name, []) == []
        assert catalogue.states(UNKNOWN, asked) == [None] * 9
        index.commit(name, incomplete, chain(2, seed="i"), record(2), rank=0, ranks=2)
        catalogue.drain(name, delete_after_s=DELETE_AFTER_S, limit=100)
        assert catalogue.states(name, [incomplete, old]) == ["visible", "trash"]

    # sample

    def test_sample_draws_by_chance(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        assert catalogue.sample(name, 5) == catalogue.sample(UNKNOWN, 5) == []
        segments = put_all(index, name, chain(40), [1] * 40)
        gone = segments[::8]
        evict(index, name, gone)
        pin(catalogue, name, segments[1:3])
        right = {one.segment: one for one in catalogue.segments(name)}
        drawn: set[SegmentId] = set()
        for _ in range(60):
            some = catalogue.sample(name, 8)
            assert len({one.segment for one in some}) == len(some) == 8
            assert all(right[one.segment] == one for one in some)
            drawn |= {one.segment for one in some}
        # That one is never drawn happens once in 10**6.
        assert drawn == set(right)
        assert {one.segment for one in catalogue.sample(name, 1000)} == set(right)
        assert catalogue.sample(name, 0) == []

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

    # order

    def test_order_is_the_order_of_eviction(
        self, index: Index, catalogue: Maintenance, name: NamespaceId, encoder: NamespaceId
    ) -> None:
        assert catalogue.order(name, 10) == catalogue.order(UNKNOWN, 10) == []
        source = random.Random(7)
        for namespace_, worthy in ((name, False), (encoder, True)):
            segments = fill(index, namespace_, source, 150)
            for minutes in range(3):
                index.touch(namespace_, source.sample(segments, 20), SOON_S + MINUTE * minutes)
            pin(catalogue, namespace_, source.sample(segments, 10))
            catalogue.unpin(namespace_, source.sample(segments, 75))
            evict(index, namespace_, source.sample(segments, 15))
            listed = {one.segment: one for one in catalogue.segments(namespace_)}
            assert any(one.pinned for one in listed.values())
            order = catalogue.order(namespace_, 1000)
            assert [one.segment for one in order] == in_order(listed.values(), worthy=worthy)
            for one in order:
                right = listed[one.segment]
                assert (one.nbytes, one.used_s) == (right.record.nbytes, right.last_use_s)
                assert one.keep_s == keep_minute(right, worthy=worthy) * MINUTE
            assert len({one.keep_s - one.used_s for one in order}) == (8 if worthy else 1)
            assert catalogue.order(namespace_, 7) == order[:7]
            assert catalogue.order(namespace_, 0) == []

    def test_order_goes_by_costs_only_if_asked_to(
        self, index: Index, catalogue: Maintenance, encoder: NamespaceId
    ) -> None:
        plain = self.configured(cost_aware=False)
        dear = put(plain, encoder, chain(1, seed="a"), cost_us=10**9)
        plain.close()
        cheap = put(index, encoder, chain(1, seed="b"), created_s=CREATED_S + MINUTE)
        worthy = put(index, encoder, chain(1, seed="c"), created_s=CREATED_S - MINUTE, cost_us=10**9)
        order = catalogue.order(encoder, 10)
        assert [one.segment for one in order] == [dear, cheap, worthy]
        assert [one.used_s for one in order] == [MADE_S, MADE_S + MINUTE, MADE_S - MINUTE]
        assert [one.keep_s - one.used_s for one in order] == [0, 0, 150 * MINUTE]

    # hottest

    def test_hottest_are_those_that_begin_loads(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        a, b, c, d = put_all(index, name, chain(8), [2] * 4)
        assert catalogue.hottest(name, 10) == catalogue.hottest(UNKNOWN, 10) == []
        for minutes, touched in [(0, [a, b]), (0, [a, b]), (1, [a, c]), (1, [b, a]), (2, [a]), (9, [])]:
            index.touch(name, touched, SOON_S + MINUTE * minutes)
        # A use that is told late is of no new minute, and what is not there begins nothing.
        index.touch(name, [a, b], SOON_S)
        index.touch(name, [new_segment_id(), d], SOON_S + MINUTE)
        assert catalogue.hottest(name, 10) == [(a, 3.0), (b, 1.0)]
        assert catalogue.hottest(name, 1) == [(a, 3.0)]
        assert catalogue.hottest(name, 0) == []
        pin(catalogue, name, [a, b])
        index.touch(name, [b], SOON_S + 5 * MINUTE)
        assert catalogue.hottest(name, 10) == [(a, 3.0), (b, 2.0)]
        catalogue.cool(name)
        assert catalogue.hottest(name, 10) == [(a, 1.5), (b, 1.0)]
        evict(index, name, [a])
        assert catalogue.hottest(name, 10) == [(b, 1.0)]
        for _ in range(5):
            catalogue.cool(name)
        assert catalogue.hottest(name, 10) == []
        catalogue.cool(UNKNOWN)
        index.touch(name, [b], SOON_S + 6 * MINUTE)
        catalogue.invalidate(name)
        assert catalogue.hottest(name, 10) == []

    def test_hottest_watches_a_bounded_number(
        self, index: Index, catalogue: Maintenance, name: NamespaceId
    ) -> None:
        segments = put_all(index, name, chain(2060), [1] * 2060)
        often = segments[:20]
        for minutes in range(2):
            for segment in often:
                index.touch(name, [segment], SOON_S + MINUTE * minutes)
        for segment in segments[20:]:
            index.touch(name, [segment], SOON_S)
        found = catalogue.hottest(name, 10_000)
        assert 1000 <= len(found) <= 2048
        assert {segment for segment, minutes in found if minutes == 2.0} == set(often)

    # quotas

    def test_quotas_are_kept_until_they_are_taken_back(self, index: Index, catalogue: Maintenance) -> None:
        assert catalogue.quotas() == {}
        other = self.configured()
        scopes = {"store": 1 << 50, "tenant/caf\u00e9 {x}": 1, f"namespace/{UNKNOWN}": 10**15}
        for scope, nbytes in scopes.items():
            other.set_quota(scope, nbytes)
        assert catalogue.quotas() == scopes
        other.set_quota("store", 7)
        other.set_quota(f"namespace/{UNKNOWN}", None)
        other.set_quota("tenant/nobody", None)
        other.close()
        assert catalogue.quotas() == {"store": 7, "tenant/caf\u00e9 {x}": 1}

    # ping

    def test_ping_changes_nothing(self, index: Index, catalogue: Maintenance, name: NamespaceId) -> None:
        put(index, name, chain(3))
        before = replace(catalogue.usage(name))
        catalogue.ping()
        assert catalogue.usage(name) == before
        assert catalogue.namespaces() == {name: canonical_json(namespace())}
