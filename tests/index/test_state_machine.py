"""Any sequence of calls, by two handles, against a model in dictionaries: SQLite and Redis, and
over them namespaces in eight shards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.errors import CapacityExceeded, NamespaceUnknown
from kvstore.index.maintenance import Listing
from kvstore.index.port import CommitState, Outcome
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance, Hint
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    Digest,
    NamespaceId,
    SaltId,
    SegmentId,
    SessionId,
    canonical_json,
    namespace_id,
    salt_id,
    session_id,
    split_digests,
    tag_of,
)
from schemas.records import rounded_cost
from tests.index.contract.chains import CREATED_S, blocks_of, chain, items, namespace, part_of, record
from tests.index.model import Model, Space
from tests.servers.redis import PATIENT, RedisServer

FullIndex = RedisIndex | SqliteIndex | ShardedIndex
#: Claims and incomplete commits outlive an example: expiry has tests of its own.
LONG_S = 3600.0
#: A window of uses, in seconds.
WINDOW_S = 600.0
NAMESPACES = [namespace("one"), items("two")]
RULES = st.sampled_from(["capacity", "tenant_quota", "salt_quota", "erased", "admin", "bad"])
SALTS = (NO_SALT, salt_id("hers"), salt_id("his"))
#: The first two are under the same salt.
SESSIONS = [session_id(SALTS[0], "a"), session_id(SALTS[0], "b"), session_id(SALTS[1], "a")]
#: No retention ends before the test does.
_SECONDS = st.sampled_from([None, None, 0.0, *(hour * 3600.0 for hour in (1, 2, 9))])
#: High is a matter of the moment, and tested elsewhere.
HINTS = st.builds(
    Hint,
    end=st.sampled_from([False, False, True]),
    retain_s=_SECONDS,
    priority=st.sampled_from([None, None, "low", "normal"]),
)


class IndexMachine(RuleBasedStateMachine):
    """Subclasses open handles on one storage, and empty it."""

    chains = Bundle("chains")
    #: Not st.randoms: a shuffle would draw so much that Hypothesis gives the example up.
    orders = st.integers(0, 1000).map(random.Random)
    fresh = st.binary(min_size=8, max_size=8).map(SegmentId)
    segments = Bundle("segments")
    #: In how many shards namespaces lie. What one is told of a session bounds what it retains, and the others
    #: don't know it: sessions have tests of their own there.
    shards = 1
    sessions = len(SESSIONS)

    def open(self) -> FullIndex:
        raise NotImplementedError

    def empty(self) -> None:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.empty()
        self.handles = [self.open(), self.open()]
        self.turn = 0
        self.minute = CREATED_S // 60
        self.window = 1000
        self.known: list[bytes] = []
        self.firsts: dict[Digest, Digest] = {}

    def teardown(self) -> None:
        try:
            for name in self.model.spaces:
                for digests in self.known:
                    self.check_match(name, digests)
                    self.check_find(name, split_digests(digests))
        finally:
            for handle in self.handles:
                handle.close()

    @property
    def index(self) -> FullIndex:
        """The two handles take turns."""
        self.turn += 1
        return self.handles[self.turn % 2]

    def space(self, name: NamespaceId) -> Space:
        return self.model.spaces.get(name, Space())

    # The first one more often, or nothing ever gets crowded.
    names = st.sampled_from([namespace_id(one) for one in [*NAMESPACES[:1] * 3, *NAMESPACES]])

    # chains

    @initialize(target=chains, blocks=st.integers(1, 150))
    def first_chain(self, blocks: int) -> bytes:
        self.register(NAMESPACES[0], 100)
        return self.remember(chain(blocks))

    def remember(self, digests: bytes) -> bytes:
        self.known.append(digests)
        self.firsts |= dict.fromkeys(split_digests(digests), Digest(digests[:16]))
        return digests

    @staticmethod
    def of_chain(segment: SegmentId, digests: bytes) -> SegmentId:
        """Returns an id that a segment of the chain may have."""
        return SegmentId(segment[:-1] + bytes([tag_of(digests)]))

    @rule(
        target=chains,
        parent=chains,
        common=st.integers(0, 150),
        more=st.integers(1, 80),
        seed=st.sampled_from("ab"),
    )
    def branch(self, parent: bytes, common: int, more: int, seed: str) -> bytes:
        return self.remember(chain(more, seed=seed, after=part_of(parent, 0, common)))

    # the request's path

    @rule(which=st.sampled_from(NAMESPACES), expected=st.sampled_from([1, 500, 50_000]))
    def register(self, which: Any, expected: int) -> None:
        name = self.index.register(which, expected_blocks=expected)
        assert name == namespace_id(which)
        left = self.model.old_claims.pop(name, {})
        forbidden = self.model.forbidden.setdefault(name, {})
        space = Space(items=which.kind == "ec", old_claims=left, forbidden=forbidden)
        self.model.spaces.setdefault(name, space)

    @rule(
        name=names,
        digests=chains,
        sizes=st.lists(st.sampled_from([1, 2, 13, 64, 100]), min_size=1, max_size=6),
        ids=st.lists(fresh, min_size=6, max_size=6, unique=True),
        ranks=st.sampled_from([1, 1, 2]),
    )
    def save(
        self, name: NamespaceId, digests: bytes, sizes: list[int], ids: list[SegmentId], ranks: int
    ) -> None:
        """What a store does: ask what is there, store the rest in pieces."""
        ranks = self.ranks(name, ranks)
        first = self.check_match(name, digests)
        for size, segment in zip(sizes, ids, strict=False):
            mine, segment = part_of(digests, first, size), self.of_chain(segment, digests)
            if mine:
                for rank in range(ranks):
                    self.commit_rank(name, segment, mine, first, rank, ranks)
            first += size
        self.check_match(name, digests)

    @rule(name=names, order=orders)
    def look(self, name: NamespaceId, order: random.Random) -> None:
        asked = split_digests(b"".join(self.known))
        order.shuffle(asked)
        self.check_find(name, asked[:200])
        for digests in self.known:
            self.check_match(name, digests)

    def check_match(self, name: NamespaceId, digests: bytes) -> int:
        return self.space(name).check_match(digests, self.index.match(name, digests))

    def check_find(self, name: NamespaceId, asked: list[Digest]) -> None:
        space = self.space(name)
        chain = b""
        if space.items and asked:
            # Only here are items in chains.
            chain = self.firsts[asked[0]]
            asked = [digest for digest in asked if self.firsts[digest] == chain]
        found = self.index.find(name, b"".join(asked), chain)
        assert [run and (run.segment, run.slot) for run in found] == [space.at(digest) for digest in asked]
        for position, run in enumerate(found):
            assert run is None or (run.start, run.count) == (position, 1)
            assert run is None or run.record == space.records[run.segment]

    @rule(name=names, digests=chains, blocks=st.integers(0, 150), later=st.sampled_from([0, 0, 0, 1, 2, 9]))
    def note(self, name: NamespaceId, digests: bytes, blocks: int, later: int) -> None:
        asked = part_of(digests, 0, blocks)
        self.window += later
        space = self.model.spaces.get(name)

        def noted() -> int:
            at_s = self.window * WINDOW_S + 1.0
            return self.index.note(name, asked, now_s=at_s, window_s=WINDOW_S, sketch_bytes=1 << 16)

        if space is None and asked:
            with pytest.raises(NamespaceUnknown):
                noted()
            return
        # Too many is an accident of the sketch, which has tests of its own.
        right = space.note(asked, self.window) if space else 0
        assert right <= noted() <= blocks_of(asked)

    @rule(target=segments, name=names, digests=chains, segment=segments | fresh)
    def claim(self, name: NamespaceId, digests: bytes, segment: SegmentId) -> SegmentId:
        space, segment = self.model.spaces.get(name), self.of_chain(segment, digests)
        if space is None:
            with pytest.raises(NamespaceUnknown):
                self.index.claim(name, digests, segment, LONG_S)
            return segment
        present = self.check_match(name, digests)
        claim = self.index.claim(name, digests, segment, LONG_S)
        space.check_claim(digests, present, segment, claim)
        return segment

    @rule(
        target=segments,
        name=names,
        digests=chains,
        first=st.integers(0, 150),
        count=st.sampled_from([1, 2, 7, 30, 64, 150]),
        segment=segments | fresh,
        ranks=st.sampled_from([1, 1, 2, 3]),
        order=orders,
        missing=st.sampled_from([0, 0, 0, 1]),
    )
    def commit(
        self,
        name: NamespaceId,
        digests: bytes,
        first: int,
        count: int,
        segment: SegmentId,
        ranks: int,
        order: random.Random,
        missing: int,
    ) -> SegmentId:
        ranks, segment = self.ranks(name, ranks), self.of_chain(segment, digests)
        mine = part_of(digests, first % blocks_of(digests), count)
        depth = first % blocks_of(digests)
        some = list(range(ranks))
        order.shuffle(some)
        for rank in some[missing:]:
            self.commit_rank(name, segment, mine, depth, rank, ranks)
        return segment

    @rule(
        name=names,
        digests=chains,
        segment=segments,
        rank=st.integers(0, 2),
        salt=st.sampled_from([None, None, *SALTS]),
    )
    def commit_straggler(
        self, name: NamespaceId, digests: bytes, segment: SegmentId, rank: int, salt: SaltId | None
    ) -> None:
        """A rank of a segment that may be complete, incomplete, evicted, or of other blocks or another
        salt."""
        space = self.space(name)
        if segment not in space.contents:
            segment = self.of_chain(segment, digests)
        mine = space.contents.get(segment, part_of(digests, 0, 5))
        _, ranks, known = space.agreed.get(segment, (mine, self.ranks(name, 3), record(5)))
        self.commit_rank(name, segment, mine, known.depth, rank % ranks, ranks, salt)

    def ranks(self, name: NamespaceId, ranks: int) -> int:
        """An encoder item is one rank's."""
        return 1 if self.space(name).items else ranks

    def commit_rank(
        self,
        name: NamespaceId,
        segment: SegmentId,
        mine: bytes,
        depth: int,
        rank: int,
        ranks: int,
        salt: SaltId | None = None,
    ) -> None:
        space = self.model.spaces.get(name)
        if space and space.is_forgotten(segment) and space.contents[segment] != mine:
            return  # a segment id is of one save: nobody comes back with other blocks
        blocks = blocks_of(mine)
        # The same whenever it is committed, and worth more or less.
        cost_us = rounded_cost(10 ** (segment[0] % 7) * blocks)
        salt = SALTS[segment[1] % len(SALTS)] if salt is None else salt
        created_s = (0, CREATED_S, CREATED_S, CREATED_S + 3600)[segment[2] % 4]
        one = record(
            blocks,
            depth=depth,
            data_start=4096 * (rank + 1),
            cost_us=cost_us,
            salt=salt,
            created_s=created_s,
        )
        if space is None:
            with pytest.raises(NamespaceUnknown):
                self.index.commit(name, segment, mine, one, rank=rank, ranks=ranks)
            return
        # Of half of them the segment says whose session's they are.
        session = SESSIONS[segment[3] % 8] if segment[3] % 8 < self.sessions else NO_SESSION
        allowance = Allowance(20_000 + 100 * segment[4], 20_000, 20_000 + 100 * segment[2])
        expected = space.commit(segment, mine, one, rank, ranks, session, allowance)
        state = self.index.commit(
            name, segment, mine, one, rank=rank, ranks=ranks, session=session, allowance=allowance
        )
        assert state is expected

    @rule(name=names, some=st.lists(segments, max_size=4), later=st.integers(-2, 5))
    def touch(self, name: NamespaceId, some: list[SegmentId], later: int) -> None:
        now = max(0, self.minute + later)
        self.minute = max(self.minute, now)
        self.index.touch(name, some, now * 60 + 59.5)
        self.space(name).touch(some, now + 0.75)

    @precondition(lambda self: self.sessions)
    @rule(
        name=names,
        session=st.sampled_from(SESSIONS),
        some=st.lists(segments, max_size=2),
        which=st.lists(st.integers(0, 7), max_size=5),
        later=st.integers(-2, 5),
        hint=HINTS,
        share=st.floats(0, 1.1),
        salt_share=st.floats(0, 1.1),
        session_share=st.floats(0, 1.1),
    )
    def session(
        self,
        name: NamespaceId,
        session: SessionId,
        some: list[SegmentId],
        which: list[int],
        later: int,
        hint: Hint,
        share: float,
        salt_share: float,
        session_share: float,
    ) -> None:
        now = max(0, self.minute + later)
        self.minute = max(self.minute, now)
        some = self.recent(name, which) + some
        space = self.model.spaces.get(name)
        if space is None:
            with pytest.raises(NamespaceUnknown):
                self.index.session(name, session, some, now * 60.0, hint)
            return
        used = space.usage().nbytes
        allowance = Allowance(*(int(used * one) for one in (share, salt_share, session_share)))
        told = self.index.session(name, session, some, now * 60 + 30.5, hint, allowance=allowance)
        until_s = 0.0
        if hint.retain_s and not hint.end:
            [listing] = self.index.find_sessions(name, [session])
            assert listing is not None
            until_s = listing.until_s
            assert abs(until_s - hint.retain_s - self.index.now(name)) < 60
        assert told == space.session(session, some, now + 0.5, hint, allowance, until_s)

    @rule(
        name=names,
        which=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        due=st.integers(1000, 1010),
        why=RULES,
    )
    def evict_recent(self, name: NamespaceId, which: list[int], due: int, why: Any) -> None:
        self.evict(name, self.recent(name, which), due, why)

    def recent(self, name: NamespaceId, which: list[int]) -> list[SegmentId]:
        visible = list(self.space(name).records)[::-1]
        return [visible[i] for i in which if i < len(visible)]

    @rule(name=names, some=st.lists(segments, max_size=3), due=st.integers(1000, 1010), why=RULES)
    def evict(self, name: NamespaceId, some: list[SegmentId], due: int, why: Any) -> None:
        gone = self.index.evict(name, some, delete_after_s=due, rule=why)
        assert gone == self.space(name).evict(some, due, why)

    @rule(
        name=names,
        op=st.sampled_from(["match", "load", "save"]),
        asked=st.integers(1, 100),
        share=st.floats(0, 1),
        reason=st.sampled_from(["absent", "deadline", "held"]),
        digests=chains,
    )
    def tell(self, name: NamespaceId, op: Any, asked: int, share: float, reason: str, digests: bytes) -> None:
        served = int(asked * share)
        reason = reason if served < asked else ""
        told = [Outcome(1.5, "request", op, asked, served, reason, served, digests)] * 2
        self.index.tell(name, told)
        if name in self.model.spaces:
            self.space(name).tell(told)

    # maintenance

    @rule(
        name=names,
        keep=st.floats(0, 1.1),
        limit=st.integers(0, 20),
        due=st.integers(1000, 1010),
        why=RULES,
        spare=st.none() | st.integers(-2, 3),
    )
    def cull(self, name: NamespaceId, keep: float, limit: int, due: int, why: Any, spare: int | None) -> None:
        space = self.space(name)
        left = space.usage().nbytes
        keep_bytes = int(left * keep)
        spare_from = None if spare is None else self.minute - spare
        expected: list[SegmentId] = []
        for segment in space.in_order():
            if left <= keep_bytes or len(expected) == limit:
                break
            if spare_from is None or space.used[segment] < spare_from:
                expected.append(segment)
                left -= space.records[segment].nbytes
        gone = self.index.cull(
            name,
            keep_bytes=keep_bytes,
            delete_after_s=due,
            limit=limit,
            rule=why,
            spare_from_s=None if spare_from is None else spare_from * 60.0,
        )
        assert gone == expected
        space.evict(gone, due, why)

    @rule(name=names, which=st.lists(st.integers(0, 5), min_size=1, max_size=4), share=st.floats(0, 1.2))
    def pin(self, name: NamespaceId, which: list[int], share: float) -> None:
        space, some = self.space(name), self.recent(name, which)
        most = int(space.usage().nbytes * share)
        fresh = set(some) - space.pinned
        together = space.usage().pinned_bytes + sum(space.records[one].nbytes for one in fresh)
        if fresh and together > most:
            with pytest.raises(CapacityExceeded):
                self.index.pin(name, some, most_bytes=most)
            return
        assert self.index.pin(name, [*some, SegmentId(b"unknown!")], most_bytes=most) == len(fresh)
        space.pinned |= fresh

    @rule(name=names, some=st.lists(segments, max_size=3), which=st.lists(st.integers(0, 5), max_size=3))
    def unpin(self, name: NamespaceId, some: list[SegmentId], which: list[int]) -> None:
        space, some = self.space(name), some + self.recent(name, which)
        assert self.index.unpin(name, some) == len(space.pinned & set(some))
        space.pinned -= set(some)

    @rule(name=names, salt=st.sampled_from(SALTS), over=st.sampled_from([-1, 0, 5000, 40_000]))
    def look_at_salts(self, name: NamespaceId, salt: SaltId, over: int) -> None:
        space = self.space(name)
        assert self.index.holdings(name, over) == space.holdings(over)
        if salt:
            found = list(self.index.of_salt(name, salt))
            assert {one.segment: one.record for one in found} == {
                segment: space.records[segment] for segment in space.of_salt(salt)
            }
            assert len({one.segment for one in found}) == len(found)

    # Not at once, and of all seldom: nothing old could be saved any more.
    @precondition(lambda self: self.turn > 40)
    @rule(
        name=names,
        salt=st.sampled_from([*SALTS[1:] * 3, NO_SALT]),
        digests=chains,
        fresh=fresh,
        known=segments,
        ranks=st.sampled_from([1, 2]),
    )
    def forbid(
        self, name: NamespaceId, salt: SaltId, digests: bytes, fresh: SegmentId, known: SegmentId, ranks: int
    ) -> None:
        """What comes afterwards, new or known, visible or waiting for a rank, is met at once."""
        until = self.index.forbid(name, salt)
        assert CREATED_S + 3600 < until
        forbidden = self.model.forbidden.setdefault(name, {})
        assert until >= forbidden.get(salt, 0)
        forbidden[salt] = until
        if name in self.model.spaces:
            self.space(name).forbid(salt, until)
        assert self.index.forbidden(name) == forbidden
        mine, ranks = part_of(digests, 0, 5), self.ranks(name, ranks)
        fresh = self.of_chain(fresh, digests)
        self.commit_rank(name, fresh, mine, 0, 0, ranks, salt)
        self.commit_rank(name, fresh, mine, 0, ranks - 1, ranks)
        self.commit_straggler(name, digests, known, ranks - 1, None)

    @rule(name=names)
    def invalidate(self, name: NamespaceId) -> None:
        assert self.index.invalidate(name) == self.space(name).invalidate()

    @rule(name=names, limit=st.sampled_from([1, 3, 1000]), due=st.integers(1000, 1010))
    def drain(self, name: NamespaceId, limit: int, due: int) -> None:
        space = self.space(name)
        before = list(space.bygone)
        moved = self.index.drain(name, delete_after_s=due, limit=limit)
        states = dict(zip(before, self.index.states(name, before), strict=True))
        gone = [segment for segment, state in states.items() if state == "trash"]
        assert moved == len(gone) >= min(limit, len(before))
        for segment in gone:
            space.trash[segment] = (space.bygone.pop(segment), due)

    @rule(name=names, limit=st.sampled_from([1, 100_000]))
    def erase(self, name: NamespaceId, limit: int) -> None:
        while (erased := self.index.erase(name, limit)) == "more":
            pass
        assert erased == self.space(name).erased()
        if erased == "erased" and (space := self.model.spaces.pop(name, None)):
            self.model.old_claims[name] = space.old_claims | space.claims

    @rule(name=names, some=st.lists(segments, max_size=3), which=st.lists(st.integers(0, 5), max_size=3))
    def unlist(self, name: NamespaceId, some: list[SegmentId], which: list[int]) -> None:
        some = some + self.recent(name, which)
        assert self.index.unlist(name, some) == self.space(name).unlist(some)

    @rule(name=names, order=orders)
    def unlink(self, name: NamespaceId, order: random.Random) -> None:
        space = self.space(name)
        listed = list(self.index.entries(name))
        assert len(listed) == len(space.entries)
        assert set(listed) == space.listed_entries()
        some = order.sample(listed, len(listed) // 20)
        assert self.index.unlink(name, some) == len(some)
        assert self.index.unlink(name, some) == 0
        for one in some:
            del space.entries[one.digest]

    @rule(name=names)
    def cool(self, name: NamespaceId) -> None:
        self.index.cool(name)
        self.space(name).cool()

    @rule(name=names)
    def read_the_journal(self, name: NamespaceId) -> None:
        space = self.space(name)
        found = self.index.events(name, limit=4000)
        fields = [
            (one.op, one.segment, one.first, one.last, one.depth, one.slots, one.nbytes, one.rule)
            for one in found
        ]
        # Shards' clocks don't tell which came first, and each is invalidated by itself.
        if self.shards == 1:
            assert fields == space.events
        else:
            assert Counter(one for one in fields if one[1]) == Counter(one for one in space.events if one[1])
        assert self.index.last_position(name) == (found[-1].position if found else "")
        if found:
            middle = len(found) // 2
            assert self.index.events(name, after=found[middle].position) == found[middle + 1 :]
        told_of = self.index.outcomes(name, 4000)
        assert told_of == space.outcomes[::-1] or self.shards > 1
        assert Counter(told_of) == Counter(space.outcomes)
        told = {what: count for what, count in self.index.seen(name).items() if count}
        assert told == {what: count for what, count in space.seen.items() if count}
        hottest = self.index.hottest(name, 4000)
        # In each shard one begins the load.
        assert dict(hottest) == space.hot or self.shards > 1
        assert [minutes for _, minutes in hottest] == sorted(dict(hottest).values(), reverse=True)

    @rule(name=names, now=st.integers(999, 1011), limit=st.integers(0, 5), done=st.booleans())
    def delete(self, name: NamespaceId, now: int, limit: int, done: bool) -> None:
        space = self.space(name)
        due = self.index.reapable(name, now + 0.5, limit)
        right = {s: ranks for s, (ranks, when) in space.trash.items() if when <= now}
        assert len(due) == min(limit, len(right))
        assert all(right[segment] == ranks for segment, ranks in due)
        if done:
            self.index.reaped(name, [segment for segment, _ in due])
            for segment, _ in due:
                del space.trash[segment]

    @rule(name=names)
    def sweep(self, name: NamespaceId) -> None:
        space = self.space(name)
        assert self.index.sweep(name, 100_000) == space.dangling()
        space.entries = {d: entry for d, entry in space.entries.items() if entry[0] in space.records}

    @rule(name=names)
    def reopen_and_list(self, name: NamespaceId) -> None:
        self.index.close()
        self.handles[self.turn % 2] = self.open()
        space = self.space(name)
        right = {s: Listing(s, r, space.used[s] * 60.0, s in space.pinned) for s, r in space.records.items()}
        assert {one.segment: one for one in self.index.segments(name)} == right
        asked = [*space.contents]
        assert self.index.get(name, asked) == [right.get(segment) for segment in asked]
        assert self.index.states(name, asked) == [space.state(segment) for segment in asked]
        drawn = self.index.sample(name, 5)
        assert len({one.segment for one in drawn}) == len(drawn) == min(5, len(right))
        assert all(right[one.segment] == one for one in drawn)
        order = self.index.order(name, 10_000)
        assert [one.segment for one in order] == space.in_order()
        assert [one.keep_s for one in order] == [space.keep(one.segment) * 60.0 for one in order]
        assert self.index.owners(name, asked) == [space.owner.get(one, NO_SESSION) for one in asked]
        assert self.index.find_sessions(name, SESSIONS) == [space.listing(one) for one in SESSIONS]
        for one in SESSIONS:
            known = {s: r for s, r in space.records.items() if space.owner.get(s) == one}
            assert self.index.owned(name, one) == (known if one in space.sessions else {})
        assert {one.session for one in self.index.sessions(name)} == set(space.sessions)
        found = self.index.reconcile(name)
        assert found.recorded == found.counted == space.usage()

    # accidents

    @precondition(lambda self: sum(len(space.records) for space in self.model.spaces.values()) > 10)
    @rule()
    def lose_everything(self) -> None:
        self.empty()
        self.model = Model()
        self.register(NAMESPACES[0], 100)

    # always

    @invariant()
    def usage_is_exact(self) -> None:
        for one in NAMESPACES:
            name = namespace_id(one)
            assert self.index.usage(name) == self.space(name).usage()
            assert self.index.retained(name) == self.space(name).retained()
        told = {one.namespace: (one.usage, one.trashed, one.bygone) for one in self.index.accounts()}
        assert told == {
            name: (space.usage(), len(space.trash), len(space.bygone))
            for name, space in self.model.spaces.items()
        }

    @invariant()
    def what_is_forbidden_stays_so(self) -> None:
        for one in NAMESPACES:
            name = namespace_id(one)
            assert self.index.forbidden(name) == self.model.forbidden.get(name, {})

    @invariant()
    def namespaces_are_known(self) -> None:
        texts = {namespace_id(one): canonical_json(one) for one in NAMESPACES}
        assert self.index.namespaces() == {name: texts[name] for name in self.model.spaces}


def run(make: Callable[[], IndexMachine], examples: int, steps: int = 40) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        make,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_sqlite(fast_path: Path) -> None:
    class Machine(IndexMachine):
        def open(self) -> SqliteIndex:
            return SqliteIndex(str(fast_path / "index.sqlite"))

        def empty(self) -> None:
            for file in fast_path.iterdir():
                file.unlink()

    run(Machine, 250)


def test_sqlite_in_memory() -> None:
    class Machine(IndexMachine):
        count = 0

        def open(self) -> SqliteIndex:
            return SqliteIndex.in_memory(f"state machine {Machine.count}")

        def empty(self) -> None:
            Machine.count += 1
            self.handles = [self.open(), self.open()]

    run(Machine, 100)


def test_redis(redis_server: RedisServer) -> None:
    class Machine(IndexMachine):
        def open(self) -> RedisIndex:
            return RedisIndex.from_settings(redis_server.url, PATIENT)

        def empty(self) -> None:
            redis_server.flush()

    run(Machine, 250)


class ShardedMachine(IndexMachine):
    """Every verb of eight shards over a leaf, without sessions."""

    shards = 8
    sessions = 0


def test_eight_shards_in_redis(redis_server: RedisServer) -> None:
    class Machine(ShardedMachine):
        def open(self) -> ShardedIndex:
            return ShardedIndex(RedisIndex.from_settings(redis_server.url, PATIENT), shards=8)

        def empty(self) -> None:
            redis_server.flush()

    run(Machine, 12)


def test_states_are_three() -> None:
    """The model decides on all of them."""
    assert {state.value for state in CommitState} == {"visible", "waiting", "refused"}
