"""FullIndexConformance: the contract of kvstore.index.maintenance.FullIndex as tests.

An index passes if a subclass with one fixture and three methods passes:

    class TestMine(FullIndexConformance):
        @pytest.fixture
        def index(self): ...            an empty index, opened

        def reopen(self): ...           a second handle on the storage of `index`
        def configured(self, *, journal=None, cost_aware=True, by=""): ...  the same with other settings
        def miscount(self, name, nbytes): ...       makes the accounts wrong behind the index's back

An index that runs in another place, or behind a wrapper, passes IndexConformance and NoteConformance: what
engines ask of it on the path of requests.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from kvstore.errors import CapacityExceeded
from kvstore.index.maintenance import FullIndex, Usage
from kvstore.index.port import Outcome
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from tests.index.contract.abilities import (
    AgeConformance,
    HeatConformance,
    OperationsConformance,
    PinConformance,
    QuotaConformance,
)
from tests.index.contract.admission import NoteConformance, VerdictConformance
from tests.index.contract.catalogue import CatalogueConformance
from tests.index.contract.chains import EXPECTED_BLOCKS, chain, namespace, put, put_all, record
from tests.index.contract.culling import CullConformance
from tests.index.contract.index import IndexConformance
from tests.index.contract.invalidation import InvalidationConformance
from tests.index.contract.joining import JoinConformance
from tests.index.contract.journal import JournalConformance
from tests.index.contract.maintained import (
    DELETE_AFTER_S,
    MINUTE,
    NOTHING,
    SOON_S,
    drain,
    erased,
    evict,
    pin,
    reap_all,
    usage_of,
)
from tests.index.contract.repair import RepairConformance
from tests.index.contract.salts import SaltConformance
from tests.index.contract.sessions import SessionConformance


class FullIndexConformance(
    PinConformance,
    QuotaConformance,
    AgeConformance,
    HeatConformance,
    SaltConformance,
    SessionConformance,
    RepairConformance,
    JournalConformance,
    JoinConformance,
    OperationsConformance,
    NoteConformance,
    VerdictConformance,
    CatalogueConformance,
    CullConformance,
    InvalidationConformance,
    IndexConformance,
):
    """All suites, and tests of what the abilities promise together. Subclass it, name the subclass Test...,
    and define the fixture and the methods."""

    def test_usage_stays_exact_under_threads(
        self, index: FullIndex, catalogue: FullIndex, name: NamespaceId
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

    def test_unlisting_is_an_event(self, index: FullIndex, catalogue: FullIndex, name: NamespaceId) -> None:
        """A reader that follows what can be matched must hear of everything that can't be matched any
        more."""
        catalogue.invalidate(name)
        segment = put(index, name, chain(4))
        assert catalogue.unlist(name, [segment, new_segment_id(), segment]) == 1
        catalogue.invalidate(name)
        assert [(one.op, one.segment, one.rule, one.slots) for one in catalogue.events(name)] == [
            ("commit", segment, None, 4),
            ("evict", segment, "repair", 4),
        ]

    def test_pinned_segments_are_unlisted_with_their_bytes(
        self, index: FullIndex, catalogue: FullIndex, name: NamespaceId
    ) -> None:
        segments = [put(index, name, chain(2, seed=seed), cost_us=5) for seed in "ab"]
        pin(catalogue, name, segments)
        assert catalogue.unlist(name, segments[1:]) == 1
        assert catalogue.usage(name) == Usage(record(2).nbytes, 1, 2, record(2).nbytes, 5)
        catalogue.unlist(name, segments)
        assert catalogue.usage(name) == NOTHING

    def test_erase_forgets_what_was_remembered(
        self, index: FullIndex, catalogue: FullIndex, name: NamespaceId
    ) -> None:
        evict(index, name, put_all(index, name, chain(900), [300] * 3), "capacity")
        reap_all(catalogue, name)
        assert index.note(name, chain(9), now_s=1e9, window_s=1e6, sketch_bytes=1024) == 0
        assert erased(catalogue, name, 100).count("more") > 2 // self.shards
        assert not any((catalogue.outcomes(name, 10), catalogue.ghosts(name), catalogue.events(name)))
        assert (catalogue.last_position(name), dict(catalogue.seen(name))) == ("", {})

    def test_an_erased_namespace_is_remembered_by_nothing(
        self, index: FullIndex, catalogue: FullIndex, name: NamespaceId
    ) -> None:
        segment, ghost = put(index, name, chain(20)), chain(1, seed="g")
        index.touch(name, [segment], SOON_S)
        evict(index, name, [put(index, name, ghost)], "capacity")
        for _ in range(2):
            index.tell(name, [Outcome(1.5, "", "match", 1, 0, "absent", 0, ghost)])
        catalogue.invalidate(name)
        drain(catalogue, name)
        reap_all(catalogue, name)
        assert erased(catalogue, name)[-1] == "erased"
        # Another namespace is registered first, and must not inherit anything.
        for other in ("another", "model"):
            fresh = index.register(namespace(other), expected_blocks=EXPECTED_BLOCKS)
            assert not any((catalogue.events(fresh), catalogue.outcomes(fresh, 9)))
            assert not any((catalogue.ghosts(fresh), catalogue.hottest(fresh, 9)))
            assert dict(catalogue.seen(fresh)) == {}
            index.tell(fresh, [Outcome(1.5, "", "match", 1, 0, "absent", 0, ghost)])
            assert catalogue.ghosts(fresh) == []
            put(index, fresh, chain(20), segment=new_segment_id(chain(20)))
            assert [event.op for event in catalogue.events(fresh)] == ["commit"]
