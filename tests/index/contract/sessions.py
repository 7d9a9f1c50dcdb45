"""SessionConformance: the contract of kvstore.index.sessions as tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.errors import NamespaceUnknown
from kvstore.index.contract import BadArgument
from kvstore.index.port import CommitState
from kvstore.index.sessions import (
    ENDED_MINUTE,
    HIGH_S,
    LONGEST_RETAINED_S,
    LOW_S,
    MOST_SEGMENTS,
    Allowance,
    Hint,
    SessionListing,
)
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    NamespaceId,
    SegmentId,
    SessionId,
    new_segment_id,
    salt_id,
    session_id,
)
from tests.index.contract.chains import (
    CREATED_S,
    EXPECTED_BLOCKS,
    UNKNOWN,
    blocks_of,
    chain,
    namespace,
    part_of,
    put,
    put_all,
    record,
)
from tests.index.contract.maintained import (
    MADE_S,
    MINUTE,
    SAVED_S,
    Maintained,
    cull,
    drain,
    erased,
    evict,
    reap_all,
)

ALICE, BOB = session_id(NO_SALT, "alice"), session_id(NO_SALT, "bob")
END = Hint(end=True)
ALL = Allowance(1 << 60, 1 << 60, 1 << 60)
ONE = record(2).nbytes


def save(
    index: Any,
    name: NamespaceId,
    digests: bytes,
    session: SessionId,
    *,
    first: int = 0,
    created_s: int = CREATED_S,
    salt: bytes = b"",
    allowance: Allowance = ALL,
) -> list[SegmentId]:
    """Commits a chain from a block on for a session, two blocks a segment; returns their ids, heads first."""
    segments = []
    for at in range(first, blocks_of(digests), 2):
        mine = part_of(digests, at, 2)
        made = record(blocks_of(mine), depth=at, created_s=created_s, salt=salt)
        segments.append(new_segment_id(digests))
        index.commit(name, segments[-1], mine, made, rank=0, ranks=1, session=session, allowance=allowance)
    return segments


def later(seconds: float) -> Hint:
    """A hint to retain for so long from now on."""
    return Hint(retain_s=seconds)


class SessionConformance(Maintained):
    """A part of FullIndexConformance."""

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        """Makes the accounts wrong behind the index's back, if it has any."""

    def allowance(self, namespace_bytes: int, salt_bytes: int, session_bytes: int = 1 << 60) -> Allowance:
        """Returns one of which each shard has so much."""
        return Allowance(*(one * self.shards for one in (namespace_bytes, salt_bytes, session_bytes)))

    def order(self, catalogue: Any, name: NamespaceId) -> list[SegmentId]:
        return [one.segment for one in catalogue.order(name, 10_000)]

    def find(self, catalogue: Any, name: NamespaceId, session: SessionId) -> SessionListing | None:
        found: SessionListing | None = catalogue.find_sessions(name, [session])[0]
        assert [one for one in catalogue.sessions(name) if one.session == session] == (
            [found] if found else []
        )
        return found

    def used(self, catalogue: Any, name: NamespaceId, segments: Sequence[SegmentId]) -> list[float]:
        return [one.last_use_s for one in catalogue.get(name, segments)]

    def ends(self, catalogue: Any, name: NamespaceId, session: SessionId) -> float:
        """The minute of the end of what a session retains, in seconds."""
        found = self.find(catalogue, name, session)
        assert found is not None and found.state == "retained"
        return found.until_s // MINUTE * MINUTE

    # whose own

    def test_what_a_session_saves_is_its_own(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        hers, nobodys = save(index, name, chain(6), ALICE), put(index, name, chain(2, seed="n"))
        assert catalogue.owners(name, [*hers, nobodys, new_segment_id()]) == [ALICE] * 3 + [NO_SESSION] * 2
        assert self.find(catalogue, name, ALICE) == SessionListing(
            ALICE, "live", 0.0, "normal", MADE_S, 3, 3 * ONE
        )
        assert self.find(catalogue, name, BOB) is None

    def test_what_another_uses_is_shared_for_good(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        segments = save(index, name, chain(8), ALICE)
        index.session(name, BOB, segments[:1], CREATED_S)
        index.touch(name, segments[1:2], CREATED_S)
        index.session(name, ALICE, segments, CREATED_S)
        assert catalogue.owners(name, segments) == [NO_SESSION, NO_SESSION, ALICE, ALICE]
        assert self.find(catalogue, name, BOB) is None

    def test_a_use_is_a_touch(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        segments = save(index, name, chain(6), ALICE)
        told = index.session(name, ALICE, [*segments[:2], new_segment_id()], MADE_S + 5 * MINUTE)
        assert (told.state, told.segments, told.demoted, told.retained_bytes) == ("live", 3, 0, 0)
        assert self.used(catalogue, name, segments) == [MADE_S + 300, MADE_S + 300, SAVED_S]
        assert catalogue.hottest(name, 9) == [(segments[0], 1)]
        index.session(name, BOB, segments[:1], MADE_S)
        assert self.used(catalogue, name, segments[:1]) == [MADE_S + 300]
        found = self.find(catalogue, name, ALICE)
        assert found is not None
        assert (found.last_use_s, found.segments) == (MADE_S + 300, 2)

    def test_many_segments_in_one_call(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        segments = put_all(index, name, chain(1203), [1] * 1203)
        told = index.session(name, ALICE, segments, MADE_S + MINUTE, later(900), allowance=ALL)
        assert told.retained_bytes == catalogue.usage(name).nbytes == catalogue.retained(name)[NO_SALT]
        index.session(name, ALICE, segments, MADE_S + MINUTE, END)
        assert set(self.order(catalogue, name)) == set(segments)

    def test_a_record_lists_so_many_segments(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        segments = save(index, name, chain(2 * MOST_SEGMENTS + 6), ALICE)
        assert catalogue.owners(name, segments[:4]) == [NO_SESSION] * 3 + [ALICE]
        assert set(index.owned(name, ALICE)) == set(segments[3:])
        assert index.session(name, ALICE, [], CREATED_S, END).demoted == MOST_SEGMENTS

    def test_what_is_committed_again_is_listed_once(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        digests = chain(6)
        own = save(index, name, digests, ALICE)
        for _ in range(2):
            assert catalogue.unlist(name, own[:1]) == 1
            again = record(2)
            state = index.commit(
                name, own[0], part_of(digests, 0, 2), again, rank=0, ranks=1, session=ALICE, allowance=ALL
            )
            assert state is CommitState.VISIBLE
        found = self.find(catalogue, name, ALICE)
        assert found is not None
        assert (found.segments, found.nbytes) == (3, 3 * ONE)
        told = index.session(name, ALICE, [], CREATED_S, END)
        assert (told.segments, told.demoted) == (3, 3)
        # It counts once against the most that a record lists, as what was saved last.
        most = MOST_SEGMENTS - len(own)
        begin = part_of(digests, 0, 1)
        more = save(index, name, chain(2 * most, seed="more", after=begin), ALICE, first=1)
        assert set(catalogue.owners(name, [*own, *more])) == {ALICE}
        save(index, name, chain(4, seed="over", after=begin), ALICE, first=1)
        assert catalogue.owners(name, own) == [ALICE, NO_SESSION, NO_SESSION]

    def test_nothing_is_remembered_of_a_session_that_owns_nothing(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        segment = put(index, name, chain(2))
        for number in range(50):
            index.session(name, session_id(NO_SALT, str(number)), [segment], CREATED_S)
        assert list(catalogue.sessions(name)) == []

    def test_wrong_arguments_and_unknown_namespaces(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        for wrong in (NO_SESSION, SessionId(b"x")):
            with pytest.raises(BadArgument):
                index.session(name, wrong, [], CREATED_S)
        with pytest.raises(BadArgument):
            index.session(name, ALICE, [SegmentId(b"x")], CREATED_S)
        with pytest.raises(BadArgument):
            save(index, name, chain(2), SessionId(b"x"))
        with pytest.raises(NamespaceUnknown):
            index.session(UNKNOWN, ALICE, [], CREATED_S)
        assert catalogue.find_sessions(UNKNOWN, [ALICE]) == [None]
        assert list(catalogue.sessions(UNKNOWN)) == []
        assert catalogue.owners(UNKNOWN, [new_segment_id()]) == [NO_SESSION]
        assert catalogue.retained(UNKNOWN) == {}

    def test_many_sessions_are_listed_once_each(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        known = [session_id(NO_SALT, str(number)) for number in range(450)]
        for number, session in enumerate(known):
            save(index, name, chain(2, seed=str(number)), session)
        listed = list(catalogue.sessions(name))
        assert {one.session for one in listed} == set(known)
        assert {(one.segments, one.nbytes) for one in listed} == {(1, ONE)}

    def test_what_a_session_owns_is_listed_with_its_records(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        shared, used, gone, *rest = save(index, name, chain(12), ALICE)
        others = save(index, name, chain(2, seed="b"), BOB)
        index.session(name, BOB, [shared], CREATED_S)
        index.touch(name, [used], CREATED_S)
        evict(index, name, [gone])
        right = {one.segment: one.record for one in catalogue.get(name, rest)}
        before = self.find(catalogue, name, ALICE), self.order(catalogue, name)
        assert index.owned(name, ALICE) == right and set(right) == set(rest)
        assert set(index.owned(name, BOB)) == set(others)
        assert (self.find(catalogue, name, ALICE), self.order(catalogue, name)) == before, "it is no use"
        index.session(name, ALICE, [], CREATED_S, END)
        assert index.owned(name, ALICE) == right
        index.session(name, BOB, rest, CREATED_S)
        assert index.owned(name, ALICE) == {}

    def test_what_nobody_owns_is_not_listed(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        put(index, name, chain(2))
        index.session(name, BOB, [], CREATED_S, END)
        assert index.owned(name, ALICE) == index.owned(name, BOB) == index.owned(UNKNOWN, ALICE) == {}
        for wrong in (NO_SESSION, SessionId(b"x")):
            with pytest.raises(BadArgument):
                index.owned(name, wrong)

    # end

    def test_what_only_an_ended_session_used_goes_first(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        old = put(index, name, chain(2, seed="old"), created_s=CREATED_S - 86_400)
        shared, *own = save(index, name, chain(8), ALICE)
        index.session(name, BOB, [shared], CREATED_S)
        told = index.session(name, ALICE, [shared, *own], CREATED_S + 600, END)
        assert (told.state, told.segments, told.demoted) == ("ended", 3, 3)
        assert self.order(catalogue, name) == [*own[::-1], old, shared]
        assert self.used(catalogue, name, own) == [ENDED_MINUTE * MINUTE] * 3
        # Nothing is deleted.
        assert sum(run.count for run in index.match(name, chain(8))) == 8
        assert index.session(name, ALICE, [], CREATED_S, END).demoted == 0
        assert cull(catalogue, name, keep=2 * ONE) == own[::-1]

    def test_nobody_ends_what_is_not_his(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        hers, his = save(index, name, chain(4), ALICE), save(index, name, chain(4, seed="b"), BOB)
        both = put(index, name, chain(2, seed="both"))
        before = self.used(catalogue, name, [*hers, both])
        stranger = session_id(salt_id("another tenant"), "alice")
        for liar in (BOB, stranger):
            index.session(name, liar, [], CREATED_S, END)
        assert self.used(catalogue, name, [*hers, both]) == before
        # Who uses it and ends makes it shared, and no older than it was.
        index.session(name, BOB, [*hers, both], CREATED_S, END)
        assert self.used(catalogue, name, [*hers, both]) == [MADE_S] * 3
        assert self.order(catalogue, name)[:2] == his[::-1]

    def test_a_later_use_revives(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        segments = save(index, name, chain(6), ALICE)
        index.session(name, ALICE, [], CREATED_S, END)
        assert index.session(name, ALICE, segments[:2], SOON := MADE_S + MINUTE).state == "live"
        assert self.used(catalogue, name, segments) == [SOON, SOON, ENDED_MINUTE * MINUTE]
        assert index.session(name, ALICE, [], SOON, END).demoted == 2

    def test_what_is_saved_after_the_end_goes_first_too(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        put(index, name, chain(2, seed="old"), created_s=CREATED_S - 86_400)
        index.session(name, ALICE, [], CREATED_S, END)
        late = save(index, name, chain(4), ALICE)
        assert self.order(catalogue, name)[:2] == late[::-1]
        found = self.find(catalogue, name, ALICE)
        assert found is not None
        assert (found.state, found.segments) == ("ended", 2)

    # retain

    def test_an_eviction_remembers_what_was_told(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        carol, dave = session_id(NO_SALT, "carol"), session_id(NO_SALT, "dave")
        ended, shared = save(index, name, chain(4), ALICE)
        waits = save(index, name, chain(2, seed="waits"), BOB)
        waited = save(index, name, chain(2, seed="waited"), carol)
        live = save(index, name, chain(2, seed="live"), dave)
        nobodys = put(index, name, chain(2, seed="n"))
        index.touch(name, [shared], CREATED_S)
        index.session(name, ALICE, [], CREATED_S, END)
        index.session(name, BOB, [nobodys], CREATED_S, later(600), allowance=ALL)
        while index.session(name, carol, [], CREATED_S, later(1.6), allowance=ALL).state != "retained":
            pass
        while catalogue.find_sessions(name, [carol])[0].state == "retained":
            time.sleep(0.1)
        gone = [ended, shared, *waits, nobodys, *waited, *live]
        assert evict(catalogue, name, gone, rule="capacity") == 6
        told = {one.segment: (one.fate, one.session) for one in catalogue.events(name) if one.op == "evict"}
        assert told == {
            ended: ("ended", ALICE),
            shared: (None, NO_SESSION),
            waits[0]: ("retained", BOB),
            nobodys: ("retained", NO_SESSION),
            waited[0]: ("expired", carol),
            live[0]: (None, NO_SESSION),
        }

    @pytest.mark.parametrize("by", ["cull", "evict"])
    def test_only_evictions_of_quotas_remember_what_was_told(
        self, index: Any, catalogue: Any, name: NamespaceId, by: str
    ) -> None:
        own = save(index, name, chain(6), ALICE)
        index.session(name, ALICE, [], CREATED_S, END)
        assert evict(catalogue, name, own[2:], rule="bad") == 1
        if by == "cull":
            assert cull(catalogue, name) == own[1::-1]
        else:
            assert evict(catalogue, name, own[1::-1], rule="tenant_quota") == 2
        done = [(one.segment, one.fate, one.session) for one in catalogue.events(name) if one.op == "evict"]
        assert done == [
            (own[2], None, NO_SESSION),
            (own[1], "ended", ALICE),
            (own[0], "ended", ALICE),
        ]

    def test_what_is_retained_survives_all_else(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        shared = put(index, name, chain(2))
        own = save(index, name, chain(6), ALICE, first=2)
        told = index.session(name, ALICE, [shared, *own], CREATED_S, later(900), allowance=ALL)
        assert (told.state, told.retained_bytes, told.refused_bytes) == ("retained", 3 * ONE, 0)
        others = [put(index, name, chain(2, seed=str(i)), created_s=int(time.time())) for i in range(20)]
        assert set(cull(catalogue, name, keep=3 * ONE)) == set(others)
        # If nothing else is left it goes, and the accounts know.
        assert cull(catalogue, name, keep=ONE) == own[::-1]
        assert catalogue.retained(name) == {NO_SALT: ONE}
        assert cull(catalogue, name) == [shared]
        assert catalogue.retained(name) == {}

    def test_a_retained_segment_is_spared_as_fresh(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        own = save(index, name, chain(2), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(900), allowance=ALL)
        gone = catalogue.cull(
            name, keep_bytes=0, delete_after_s=0, limit=9, rule="capacity", spare_from_s=time.time() - 120
        )
        assert gone == []
        assert catalogue.order(name, 1)[0].used_s > time.time()

    def test_its_time_ends_by_itself(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        own = save(index, name, chain(4), ALICE)
        others = [put(index, name, chain(2, seed=str(i)), created_s=CREATED_S + 120) for i in range(3)]
        index.session(name, ALICE, own, CREATED_S, later(1.6), allowance=ALL)
        until = time.time() + 2
        index.touch(name, own[:1], MADE_S + MINUTE)
        assert self.order(catalogue, name)[0] in others
        while time.time() < round(until) + 0.2:
            time.sleep(0.1)
        # What is asked for next finds it as it was used, during that time too.
        assert cull(catalogue, name, keep=4 * ONE) == own[1:]
        assert self.order(catalogue, name)[0] == own[0]
        assert self.used(catalogue, name, own[:1]) == [MADE_S + MINUTE]
        assert catalogue.retained(name) == {}
        found = self.find(catalogue, name, ALICE)
        assert found is not None
        assert (found.state, found.until_s) == ("live", 0.0)

    def test_what_nobody_tells_or_culls_is_over_all_the_same(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        salt = salt_id("hers")
        own = [save(index, name, chain(2, seed=str(i)), ALICE, salt=salt)[0] for i in range(450)]
        old = put(index, name, chain(2, seed="old"), created_s=CREATED_S + 60)
        lasting = save(index, name, chain(2, seed="b"), BOB, salt=salt)
        index.session(name, BOB, lasting, CREATED_S, later(900), allowance=ALL)
        index.session(name, ALICE, own, CREATED_S, later(1.6), allowance=ALL)
        until = time.time() + 2
        assert catalogue.expire(name) == 0 or time.time() > until - 1.0
        while time.time() < round(until) + 0.2:
            time.sleep(0.1)
        assert catalogue.retained(name) == {NO_SALT: ONE, salt: ONE}
        assert catalogue.reconcile(name).mended == 0
        assert catalogue.retained(name) == {NO_SALT: ONE, salt: ONE}
        assert catalogue.expire(name) == 450
        assert self.order(catalogue, name)[-2:] == [old, *lasting]
        assert set(self.used(catalogue, name, own)) == {MADE_S}
        assert catalogue.retained(name) == {NO_SALT: ONE, salt: ONE}
        assert catalogue.expire(name) == catalogue.expire(UNKNOWN) == 0

    def test_it_can_be_shortened_and_ended(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        shared = put(index, name, chain(2))
        own = save(index, name, chain(6), ALICE, first=2)
        for seconds in (5000, 600, 9000):
            before = time.time()
            index.session(name, ALICE, [], CREATED_S, later(seconds), allowance=ALL)
            ends = self.ends(catalogue, name, ALICE)
            assert int(before) + seconds - MINUTE < ends <= time.time() + seconds
            assert self.used(catalogue, name, own) == [ends] * 2
        index.session(name, ALICE, [shared], CREATED_S, allowance=ALL)
        assert catalogue.retained(name) == {NO_SALT: 3 * ONE}
        told = index.session(name, ALICE, [], MADE_S + MINUTE, later(0), allowance=ALL)
        assert told.state == "live"
        assert self.used(catalogue, name, own) == [MADE_S + MINUTE] * 2
        # What others may have retained as well stays so for its time.
        assert catalogue.retained(name) == {NO_SALT: ONE}

    def test_an_end_is_the_end_of_it(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        own = save(index, name, chain(4), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL)
        assert index.session(name, ALICE, own, CREATED_S, END).demoted == 2
        assert catalogue.retained(name) == {}
        assert self.used(catalogue, name, own) == [ENDED_MINUTE * MINUTE] * 2

    def test_nobody_shortens_what_another_retains(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        shared = [put(index, name, chain(2))]
        index.session(name, ALICE, shared, CREATED_S, later(9000), allowance=ALL)
        before = self.used(catalogue, name, shared)
        for hint in (later(60), later(0), END):
            index.session(name, BOB, shared, CREATED_S, hint, allowance=ALL)
        assert self.used(catalogue, name, shared) == before
        assert catalogue.retained(name) == {NO_SALT: ONE}

    def test_no_longer_than_a_day(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        own = save(index, name, chain(2), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(9e9), allowance=ALL)
        assert self.used(catalogue, name, own)[0] <= time.time() + LONGEST_RETAINED_S + 2
        index.session(name, ALICE, own, CREATED_S, later(-9e9), allowance=ALL)
        assert self.used(catalogue, name, own) == [MADE_S]

    def test_what_is_saved_meanwhile_is_retained(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        index.session(name, ALICE, [], CREATED_S, later(600), allowance=ALL)
        own = save(index, name, chain(4), ALICE, allowance=self.allowance(ONE, 0))
        assert self.used(catalogue, name, own) == [self.ends(catalogue, name, ALICE), SAVED_S]

    def test_pinned_ones_are_none(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        own = save(index, name, chain(4), ALICE)
        pinned = self.pin_some(catalogue, name, own[:1])
        told = index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL)
        assert told.retained_bytes == ONE * (2 - len(pinned))
        self.unpin_some(catalogue, name, own)
        assert index.session(name, ALICE, own, CREATED_S, END).demoted == 2

    # the share

    def test_who_retains_everything_is_stopped_at_his_share(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        share = self.allowance(5 * ONE + 1, 1 << 60)
        shown = [save(index, name, chain(8, seed=str(i)), session_id(NO_SALT, str(i))) for i in range(10)]
        told = [
            index.session(name, session_id(NO_SALT, str(i)), own, CREATED_S, later(600), allowance=share)
            for i, own in enumerate(shown)
        ]
        assert [(one.retained_bytes // ONE, one.refused_bytes // ONE) for one in told[:3]] == [
            (4, 0),
            (1, 3),
            (0, 4),
        ]
        assert catalogue.retained(name) == {NO_SALT: 5 * ONE}
        # Asking again, and for longer, gains nothing.
        told[1] = index.session(
            name, session_id(NO_SALT, "1"), shown[1], CREATED_S, later(700), allowance=share
        )
        assert (told[1].retained_bytes, told[1].refused_bytes) == (ONE, 3 * ONE)
        kept = {*shown[0], shown[1][0]}
        assert set(self.order(catalogue, name)[-5:]) == kept
        assert kept.isdisjoint(cull(catalogue, name, keep=5 * ONE))

    def test_a_session_has_a_share_of_its_own(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        share = self.allowance(8 * ONE, 0, 4 * ONE)
        greedy = save(index, name, chain(12), ALICE)
        modest = save(index, name, chain(6, seed="other"), BOB)
        told = index.session(name, ALICE, greedy, CREATED_S, later(86_000), allowance=share)
        assert (told.retained_bytes, told.refused_bytes) == (4 * ONE, 2 * ONE)
        # Nor does it get more in parts, by asking again, or for what it saves afterwards.
        for some in ([greedy[5]], greedy, []):
            index.session(name, ALICE, some, CREATED_S, later(86_300), allowance=share)
        save(index, name, chain(16), ALICE, first=12, allowance=share)
        assert catalogue.retained(name) == {NO_SALT: 4 * ONE}
        told = index.session(name, BOB, modest, CREATED_S, later(300), allowance=share)
        assert (told.retained_bytes, told.refused_bytes) == (3 * ONE, 0)

    def test_a_salt_has_a_share_of_its_own(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        salts = [salt_id("greedy"), salt_id("modest")]
        share = self.allowance(6 * ONE, 4 * ONE)
        for salt, blocks in zip(salts, (40, 4), strict=True):
            session = session_id(salt, "chat")
            own = save(index, name, chain(blocks, seed=salt.hex()), session, salt=salt)
            index.session(name, session, own, CREATED_S, later(600), allowance=share)
        assert catalogue.retained(name) == {NO_SALT: 6 * ONE, salts[0]: 4 * ONE, salts[1]: 2 * ONE}
        for one in catalogue.of_salt(name, salts[0]):
            evict(index, name, [one.segment])
        assert catalogue.retained(name) == {NO_SALT: 2 * ONE, salts[1]: 2 * ONE}
        self.miscount(name, 1000)
        assert catalogue.reconcile(name).counted is not None
        assert catalogue.retained(name) == {NO_SALT: 2 * ONE, salts[1]: 2 * ONE}

    def test_nobody_renews_what_is_more_than_the_share_by_now(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        salt = salt_id("hers")
        session = session_id(salt, "chat")
        own = save(index, name, chain(8), session, salt=salt)
        hint = later(600)
        index.session(name, session, own, CREATED_S, hint, allowance=ALL)
        before = self.used(catalogue, name, own)
        for less in (self.allowance(4 * ONE - 1, 1 << 60), self.allowance(1 << 60, 4 * ONE - 1)):
            told = index.session(name, session, own, CREATED_S, later(9000), allowance=less)
            assert (told.retained_bytes, told.refused_bytes) == (0, 4 * ONE)
            assert self.used(catalogue, name, own) == before
            # As is what a use renews of a session that retains, or is of high priority.
            index.session(name, session, own[:1], CREATED_S, allowance=less)
            index.session(name, session, own[:1], CREATED_S, Hint(priority="high"), allowance=less)
            assert self.used(catalogue, name, own) == before
            index.session(
                name, session, [], CREATED_S, Hint(retain_s=hint.retain_s, priority="normal"), allowance=less
            )
        assert catalogue.retained(name) == {NO_SALT: 4 * ONE, salt: 4 * ONE}
        # It may be made shorter, and with room again longer.
        told = index.session(name, session, own, CREATED_S, later(120), allowance=less)
        assert (told.retained_bytes, told.refused_bytes) == (4 * ONE, 0)
        assert self.used(catalogue, name, own) == [self.ends(catalogue, name, session)] * 4
        exact = self.allowance(4 * ONE, 4 * ONE)
        told = index.session(name, session, own, CREATED_S, later(9000), allowance=exact)
        assert (told.retained_bytes, told.refused_bytes) == (4 * ONE, 0)
        assert self.used(catalogue, name, own) == [self.ends(catalogue, name, session)] * 4

    def test_nothing_is_retained_without_an_allowance(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        own = save(index, name, chain(4), ALICE)
        told = index.session(name, ALICE, own, CREATED_S, later(600))
        assert (told.retained_bytes, told.refused_bytes) == (0, 2 * ONE)
        assert self.used(catalogue, name, own) == [MADE_S] * 2

    # priority

    def test_low_goes_earlier_by_so_much(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        low = Hint(priority="low")
        index.session(name, ALICE, [], CREATED_S, low)
        own = save(index, name, chain(4), ALICE)
        assert self.used(catalogue, name, own) == [SAVED_S - LOW_S] * 2
        shared = put(index, name, chain(2, seed="s"))
        index.session(name, ALICE, [shared, *own], MADE_S + MINUTE)
        assert self.used(catalogue, name, [shared, *own]) == [MADE_S + MINUTE, *[MADE_S + MINUTE - LOW_S] * 2]
        index.session(name, ALICE, own, MADE_S + MINUTE, Hint(priority="normal"))
        assert self.used(catalogue, name, own) == [MADE_S + MINUTE] * 2
        assert self.find(catalogue, name, ALICE) is not None

    def test_uses_in_one_minute_are_one_whatever_they_count_as(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        index.session(name, ALICE, [], CREATED_S, Hint(priority="low"))
        own = save(index, name, chain(2), ALICE)
        for minutes in (1, 1, 1, 2, 2):
            index.session(name, ALICE, own, MADE_S + minutes * MINUTE)
        assert catalogue.hottest(name, 9) == [(own[0], 2)]

    def test_high_retains_for_a_while_within_the_share(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        before = time.time()
        share = self.allowance(3 * ONE, 0)
        index.session(name, ALICE, [], before, Hint(priority="high"), allowance=share)
        own = save(index, name, chain(8), ALICE, allowance=share)
        *kept, last = self.used(catalogue, name, own)
        assert all(before + HIGH_S - 60 <= used <= time.time() + HIGH_S for used in kept)
        assert last == SAVED_S
        told = index.session(name, ALICE, own, before, allowance=share)
        assert (told.state, told.retained_bytes, told.refused_bytes) == ("live", 3 * ONE, ONE)

    # what else happens

    def test_what_is_gone_is_nobodys(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        own = save(index, name, chain(8), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL)
        evict(index, name, own[:1])
        catalogue.unlist(name, own[1:2])
        assert catalogue.retained(name) == {NO_SALT: 2 * ONE}
        assert catalogue.owners(name, own) == [NO_SESSION] * 2 + [ALICE] * 2
        assert index.session(name, ALICE, own, CREATED_S, END).demoted == 2

    @pytest.mark.parametrize("how", ["invalidate", "erase"])
    def test_sessions_go_with_their_namespace(
        self, index: Any, catalogue: Any, name: NamespaceId, how: str
    ) -> None:
        own = save(index, name, chain(8), ALICE)
        index.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL)
        catalogue.invalidate(name)
        if how == "erase":
            drain(catalogue, name)
            reap_all(catalogue, name)
            assert erased(catalogue, name)[-1] == "erased"
            index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
            index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)
        assert list(catalogue.sessions(name)) == []
        assert catalogue.retained(name) == {}
        fresh = put(index, name, chain(2, seed="fresh"))
        assert catalogue.owners(name, [*own, fresh]) == [NO_SESSION] * 5

    def test_sessions_go_with_their_salt(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        salts = [salt_id("hers"), salt_id("his"), NO_SALT]
        sessions = [session_id(salt, str(number)) for salt in salts for number in range(5)]
        for session in sessions:
            index.session(name, session, [], CREATED_S, END)
        catalogue.forbid(name, salts[0])
        assert {one.session for one in catalogue.sessions(name)} == set(sessions[5:])
        catalogue.forbid(name, NO_SALT)
        assert list(catalogue.sessions(name)) == []

    def test_other_settings_see_the_same(self, index: Any, catalogue: Any, name: NamespaceId) -> None:
        own = save(index, name, chain(4), ALICE)
        with self.configured() as other:
            assert other.session(name, ALICE, own, CREATED_S, later(600), allowance=ALL).segments == 2
            assert other.retained(name) == catalogue.retained(name) == {NO_SALT: 2 * ONE}
            assert self.find(other, name, ALICE) == self.find(catalogue, name, ALICE)
