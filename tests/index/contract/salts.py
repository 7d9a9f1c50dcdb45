"""SaltConformance: the contract of kvstore.index.maintenance.Salts as tests."""

from __future__ import annotations

import secrets
import time
from typing import Any

import pytest

from kvstore.index.maintenance import CLOCKS_DIFFER_S
from kvstore.index.port import CommitState, Index
from kvstore.keys import NO_SALT, NamespaceId, SegmentId, new_segment_id, salt_id
from tests.index.contract.chains import (
    CREATED_S,
    EXPECTED_BLOCKS,
    UNKNOWN,
    chain,
    namespace,
    put,
    record,
    served,
)
from tests.index.contract.maintained import Maintained, drain, erased, evict, reap_all

ALICE, BOB = salt_id("alice"), salt_id("bob")


class SaltConformance(Maintained):
    """A part of FullIndexConformance."""

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        """See RepairConformance."""
        raise NotImplementedError

    def test_segments_are_found_by_their_salt(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        put(index, name, chain(3))
        hers = [put(index, name, chain(2, seed=f"a{i}"), salt=ALICE) for i in range(4)]
        his = put(index, name, chain(2, seed="b"), salt=BOB)
        listed = {one.segment: one for one in catalogue.of_salt(name, ALICE)}
        assert set(listed) == set(hers)
        assert listed[hers[0]] == catalogue.get(name, hers[:1])[0]
        assert listed[hers[0]].record.salt == ALICE
        assert [one.segment for one in catalogue.of_salt(name, BOB)] == [his]
        assert (
            list(catalogue.of_salt(name, salt_id("carol"))) == list(catalogue.of_salt(UNKNOWN, ALICE)) == []
        )

    def test_many_segments_of_a_salt_come_once_each(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        segments = [put(index, name, chain(1, seed=str(i)), salt=ALICE) for i in range(1203)]
        assert sorted(one.segment for one in catalogue.of_salt(name, ALICE)) == sorted(segments)

    def test_holdings_are_exact(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        made = record(2, salt=ALICE)
        hers = [put(index, name, chain(2, seed=f"a{i}"), salt=ALICE) for i in range(5)]
        his = put(index, name, chain(2, seed="b"), salt=BOB)
        put(index, name, chain(40))
        assert catalogue.holdings(name, 0) == {ALICE: 5 * made.nbytes, BOB: made.nbytes}
        assert catalogue.holdings(name, made.nbytes) == {ALICE: 5 * made.nbytes}
        assert catalogue.holdings(name, 5 * made.nbytes) == catalogue.holdings(UNKNOWN, 0) == {}
        # Committed again: nothing is counted twice.
        index.commit(name, hers[0], chain(2, seed="a0"), made, rank=0, ranks=1)
        self.pin_some(catalogue, name, hers[1:2])
        evict(index, name, [hers[1], his])
        catalogue.unlist(name, hers[2:3])
        assert catalogue.holdings(name, 0) == {ALICE: 3 * made.nbytes}
        catalogue.cull(name, keep_bytes=0, delete_after_s=0, limit=100, rule="capacity")
        assert catalogue.holdings(name, 0) == {}
        assert list(catalogue.of_salt(name, ALICE)) == []

    def test_an_invalidated_namespace_holds_nothing(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        put(index, name, chain(2), salt=ALICE)
        catalogue.invalidate(name)
        assert catalogue.holdings(name, 0) == {}
        assert list(catalogue.of_salt(name, ALICE)) == []
        drain(catalogue, name)
        after = put(index, name, chain(2), salt=ALICE)
        assert [one.segment for one in catalogue.of_salt(name, ALICE)] == [after]

    def test_ranks_of_one_segment_have_one_salt(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        digests, hers = chain(2), record(2, salt=ALICE)
        segment = new_segment_id(digests)
        assert index.commit(name, segment, digests, hers, rank=0, ranks=2) is CommitState.WAITING
        theirs = index.commit(name, segment, digests, record(2, salt=BOB), rank=1, ranks=2)
        assert theirs is CommitState.REFUSED
        assert index.commit(name, segment, digests, hers, rank=1, ranks=2) is CommitState.VISIBLE
        assert catalogue.holdings(name, 0) == {ALICE: 2 * hers.nbytes}
        assert served(index.match(name, digests)) == 2

    def test_reconciling_counts_holdings_again(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        for seed, salt in (("a", ALICE), ("b", BOB), ("c", ALICE)):
            put(index, name, chain(2, seed=seed), salt=salt)
        right = catalogue.holdings(name, 0)
        self.miscount(name, 1000)
        assert catalogue.reconcile(name).counted is not None
        assert catalogue.holdings(name, 0) == right

    # forbid

    def _commit(self, index: Index, name: NamespaceId, salt: bytes, created_s: float) -> CommitState:
        digests = chain(1, seed=secrets.token_hex(8))
        made = record(1, salt=salt, created_s=int(created_s))
        return index.commit(name, new_segment_id(digests), digests, made, rank=0, ranks=1)

    def test_what_is_forbidden_is_refused(self, index: Index, catalogue: Any, name: NamespaceId) -> None:
        before = time.time()
        assert catalogue.forbidden(name) == {}
        assert self._commit(index, name, ALICE, 0) is CommitState.VISIBLE
        until = catalogue.forbid(name, ALICE)
        assert before + CLOCKS_DIFFER_S - 2 <= until <= time.time() + CLOCKS_DIFFER_S + 2
        assert catalogue.forbidden(name) == {ALICE: until}
        # A writer's clock proves nothing, however far it is ahead.
        for created_s in (
            before - 3600,
            before,
            until,
            until + 1,
            until + 300,
            2**32 - 1,
        ):
            assert self._commit(index, name, ALICE, created_s) is CommitState.REFUSED
        for salt in (BOB, NO_SALT):
            assert self._commit(index, name, salt, before) is CommitState.VISIBLE
            assert self._commit(index, name, salt, until + 300) is CommitState.VISIBLE

    def test_what_is_saved_after_that_is_visible(
        self, index: Index, catalogue: Any, name: NamespaceId, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.index.scripted.salts.CLOCKS_DIFFER_S", 1)
        forbidden = {salt: catalogue.forbid(name, salt) for salt in (ALICE, NO_SALT)}
        until = max(forbidden.values())
        assert catalogue.forbidden(name) == forbidden
        while catalogue.now(name) < until + 1:
            time.sleep(0.05)
        for salt in (ALICE, BOB):
            assert self._commit(index, name, salt, until) is CommitState.REFUSED
            assert self._commit(index, name, salt, until + 1) is CommitState.VISIBLE

    def test_a_whole_namespace_can_be_forbidden(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        until = catalogue.forbid(name, NO_SALT)
        for salt in (ALICE, NO_SALT):
            assert self._commit(index, name, salt, until) is CommitState.REFUSED
            assert self._commit(index, name, salt, until + 300) is CommitState.REFUSED
        assert catalogue.forbid(name, ALICE) >= until
        assert self._commit(index, name, ALICE, until) is CommitState.REFUSED
        assert set(catalogue.forbidden(name)) == {ALICE, NO_SALT}

    def test_what_was_visible_does_not_come_back(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(4)
        segment, made = put(index, name, digests, salt=ALICE), record(4, salt=ALICE)
        catalogue.forbid(name, ALICE)
        assert served(index.match(name, digests)) == 4
        # An answer got lost, or a rebuild: the same commit again.
        assert index.commit(name, segment, digests, made, rank=0, ranks=1) is CommitState.REFUSED
        index.evict(name, [segment], delete_after_s=0, rule="erased")
        assert served(index.match(name, digests)) == 0
        reap_all(catalogue, name)
        assert index.commit(name, segment, digests, made, rank=0, ranks=1) is CommitState.REFUSED
        assert [one.rule for one in catalogue.events(name) if one.op == "evict"] == ["erased"]

    def test_what_waits_for_other_ranks_goes_at_once(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        chains = {new_segment_id(digests): digests for digests in (chain(2, seed=seed) for seed in "abc")}
        hers, his, later = chains
        future = int(time.time()) + 3600

        def commit(segment: SegmentId, salt: bytes, rank: int) -> CommitState:
            made = record(2, salt=salt, created_s=future if segment == later else CREATED_S)
            return index.commit(name, segment, chains[segment], made, rank=rank, ranks=2)

        for segment, salt in ((hers, ALICE), (his, BOB), (later, ALICE)):
            assert commit(segment, salt, 0) is CommitState.WAITING
        catalogue.forbid(name, ALICE)
        # Whatever the writer's clock says.
        assert dict(catalogue.reapable(name, 1.0, 10)) == {hers: 2, later: 2}
        assert commit(hers, ALICE, 1) is commit(later, ALICE, 1) is CommitState.REFUSED
        assert commit(his, BOB, 1) is CommitState.VISIBLE

    def test_what_is_forbidden_outlives_the_namespace(
        self, index: Index, catalogue: Any, name: NamespaceId
    ) -> None:
        until = catalogue.forbid(name, NO_SALT)
        assert catalogue.forbid(UNKNOWN, ALICE) >= until
        assert erased(catalogue, name)[-1] == "erased"
        assert catalogue.forbidden(name) == {NO_SALT: until}
        assert index.register(namespace(), expected_blocks=EXPECTED_BLOCKS) == name
        assert self._commit(index, name, NO_SALT, until) is CommitState.REFUSED
