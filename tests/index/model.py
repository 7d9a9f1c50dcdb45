"""What an index promises, as a few dictionaries: the independent oracle of the state machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.index.contract import saved_minute
from kvstore.index.eviction import worth
from kvstore.index.maintenance import Entry, Erased, SegmentState, Usage
from kvstore.index.port import Claim, CommitState, Outcome, Run
from kvstore.index.sessions import (
    ENDED_MINUTE,
    LONGEST_AGO_MINUTES,
    NOTHING_RETAINED,
    Allowance,
    Hint,
    HintEffect,
    SessionListing,
    SessionState,
)
from kvstore.keys import (
    NO_SESSION,
    Digest,
    NamespaceId,
    SaltId,
    SegmentId,
    SessionId,
    sessions_of_salt,
    split_digests,
)
from schemas.records import EvictionRule, SegmentRecord
from tests.index.contract.chains import blocks_of, part_of

QUOTAS = ("capacity", "tenant_quota", "namespace_quota", "salt_quota")
#: Operation, segment, first and last digest, depth, slots, bytes, rule.
Happening = tuple[str, SegmentId | None, bytes | None, bytes | None, int, int, int, str | None]


@dataclass
class Session:
    """What is remembered of a session."""

    used: int = 0
    until: int = 0
    priority: str = "normal"
    ended: bool = False


@dataclass
class Space:
    """One namespace."""

    #: Of encoder items: what they cost counts.
    items: bool = False
    #: By digest: where a block is, whoever wrote it last.
    entries: dict[bytes, tuple[SegmentId, int]] = field(default_factory=dict)
    #: By segment: what it holds, visible or not.
    contents: dict[SegmentId, bytes] = field(default_factory=dict)
    records: dict[SegmentId, SegmentRecord] = field(default_factory=dict)
    used: dict[SegmentId, float] = field(default_factory=dict)
    #: By segment: its ranks and the time of its deletion.
    trash: dict[SegmentId, tuple[int, int]] = field(default_factory=dict)
    incomplete: dict[SegmentId, dict[int, SegmentRecord]] = field(default_factory=dict)
    #: Invalidated: visible ones with their ranks, incomplete ones.
    bygone: dict[SegmentId, int] = field(default_factory=dict)
    stale: set[SegmentId] = field(default_factory=set)
    pinned: set[SegmentId] = field(default_factory=set)
    hot: dict[SegmentId, float] = field(default_factory=dict)
    #: Whose own a segment is; until when it is retained, and the minute of its true last use.
    owner: dict[SegmentId, SessionId] = field(default_factory=dict)
    kept: dict[SegmentId, tuple[int, int]] = field(default_factory=dict)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    events: list[Happening] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    #: By segment: what all of its commits must share, that is blocks, ranks, and all but the parts.
    agreed: dict[SegmentId, tuple[bytes, int, SegmentRecord]] = field(default_factory=dict)
    claims: dict[bytes, SegmentId] = field(default_factory=dict)
    #: Claims from before the namespace was erased: they may hold until they expire.
    old_claims: dict[bytes, SegmentId] = field(default_factory=dict)
    #: By window: the blocks asked for in it.
    uses: dict[int, set[bytes]] = field(default_factory=dict)
    #: By salt, or b"" for all: until when what was created must not become visible. It is the Model's, and
    #: outlives this.
    forbidden: dict[bytes, float] = field(default_factory=dict)

    def usage(self) -> Usage:
        records = self.records.values()
        return Usage(
            sum(one.nbytes for one in records),
            len(records),
            sum(one.slots for one in records),
            sum(self.records[segment].nbytes for segment in self.pinned),
            sum(one.cost_us for one in records),
        )

    def of_salt(self, salt: bytes) -> set[SegmentId]:
        return {segment for segment, one in self.records.items() if one.salt == salt}

    def holdings(self, over_bytes: int) -> dict[bytes, int]:
        held: Counter[bytes] = Counter()
        for one in self.records.values():
            held[one.salt] += one.nbytes if one.salt else 0
        return {salt: nbytes for salt, nbytes in held.items() if nbytes > over_bytes and salt}

    def present(self, digests: bytes) -> int:
        """The longest prefix of blocks whose own entries name visible segments."""
        for i, digest in enumerate(split_digests(digests)):
            if self.at(digest) is None:
                return i
        return blocks_of(digests)

    def at(self, digest: bytes) -> tuple[SegmentId, int] | None:
        entry = self.entries.get(digest)
        return entry if entry and entry[0] in self.records else None

    def check_match(self, digests: bytes, runs: list[Run]) -> int:
        """A match is right if it is true and long enough; returns its length."""
        position = 0
        for run in runs:
            assert run.start == position
            assert run.count > 0
            assert run.record == self.records[run.segment]
            held = part_of(self.contents[run.segment], run.slot, run.count)
            assert held == part_of(digests, position, run.count)
            position += run.count
        assert self.present(digests) <= position <= blocks_of(digests)
        return position

    def check_claim(self, digests: bytes, present: int, segment: SegmentId, claim: Claim) -> None:
        """Whether that is the right answer for a chain of which `present` blocks are stored."""
        assert claim.present == present
        if present == blocks_of(digests):
            assert not claim.granted
            return
        missing = part_of(digests, present, 1)
        before = self.old_claims.pop(missing, segment)
        if missing not in self.claims and before != segment and not claim.granted:
            self.claims[missing] = before
        assert claim.granted == (self.claims.setdefault(missing, segment) == segment)

    def note(self, digests: bytes, window: int) -> int:
        """How many leading blocks were asked for in this window or the one before, until now."""
        asked = split_digests(digests)
        known = self.uses.get(window, set()) | self.uses.get(window - 1, set())
        noted = next((i for i, one in enumerate(asked) if one not in known), len(asked))
        self.uses.setdefault(window, set()).update(asked)
        return noted

    def commit(
        self,
        segment: SegmentId,
        digests: bytes,
        one: SegmentRecord,
        rank: int,
        ranks: int,
        session: SessionId = NO_SESSION,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> CommitState:
        """What becomes of a commit."""
        this = (digests, ranks, replace(one, parts=()))
        if self.is_forbidden(one):
            self.give_up(segment)
            return self._released(segment, digests, CommitState.REFUSED)
        if segment in self.records:
            right = self.agreed[segment] == this and self.records[segment].parts[rank] == one.parts[0]
            if right:
                # A block that another visible segment serves stays with that segment.
                taken = {d for d, (of, _) in self.entries.items() if of != segment and of in self.records}
                self._enter(segment, digests, taken)
            return self._released(segment, digests, CommitState.VISIBLE if right else CommitState.REFUSED)
        parts = self.incomplete.get(segment, {})
        gone = segment in self.trash or segment in self.bygone or segment in self.stale
        if gone or (parts and self.agreed[segment] != this):
            return self._released(segment, digests, CommitState.REFUSED)
        parts[rank] = one
        self.agreed[segment], self.contents[segment] = this, digests
        if len(parts) < ranks:
            self.incomplete[segment] = parts
            return CommitState.WAITING
        self.incomplete.pop(segment, None)
        whole = tuple(part for rank in range(ranks) for part in parts[rank].parts)
        self.records[segment] = replace(one, parts=whole)
        self.used[segment] = saved_minute(one.created_s)
        self._enter(segment, digests)
        self._happened("commit", segment, None)
        if session:
            self._adopt(session, segment, allowance)
        return self._released(segment, digests, CommitState.VISIBLE)

    def is_forbidden(self, one: SegmentRecord) -> bool:
        return any(one.created_s <= self.forbidden.get(salt, -1) for salt in (b"", one.salt))

    def give_up(self, segment: SegmentId) -> None:
        """What waits for its other ranks goes into the trash."""
        if self.incomplete.pop(segment, None) is not None or segment in self.stale:
            self.stale.discard(segment)
            self.trash[segment] = (self.agreed[segment][1], 0)

    def forbid(self, salt: bytes, until: float) -> None:
        self.forbidden[salt] = until
        self.forget_sessions(SaltId(salt))
        for segment in {*self.incomplete, *self.stale}:
            one = self.agreed[segment][2]
            if salt in (b"", one.salt) and one.created_s <= until:
                self.give_up(segment)

    def state(self, segment: SegmentId) -> SegmentState | None:
        if segment in self.records:
            return "visible"
        if segment in self.incomplete or segment in self.stale:
            return "incomplete"
        if segment in self.bygone:
            return "bygone"
        return "trash" if segment in self.trash else None

    def is_forgotten(self, segment: SegmentId) -> bool:
        """Committed at some time, at least in part, and buried since."""
        return segment in self.contents and self.state(segment) is None

    def _happened(self, op: str, segment: SegmentId, rule: str | None) -> None:
        one, digests = self.records[segment], self.contents[segment]
        last = digests[-16:] if op == "commit" else None
        self.events.append((op, segment, digests[:16], last, one.depth, one.slots, one.nbytes, rule))

    def _enter(self, segment: SegmentId, digests: bytes, taken: Collection[bytes] = ()) -> None:
        slots = enumerate(split_digests(digests))
        self.entries |= {digest: (segment, slot) for slot, digest in slots if digest not in taken}

    def _released(self, segment: SegmentId, digests: bytes, state: CommitState) -> CommitState:
        if self.claims.get(digests[:16]) == segment:
            del self.claims[digests[:16]]
        return state

    def evict(self, segments: list[SegmentId], due: int, rule: EvictionRule) -> int:
        gone = 0
        for segment in segments:
            if segment in self.records:
                if rule in QUOTAS:
                    self.seen["evicted"] += self.records[segment].nbytes
                self._hide(segment, rule)
                gone += 1
            elif segment in self.stale:
                self.stale.remove(segment)
            elif self.incomplete.pop(segment, None) is None:
                continue
            self.trash[segment] = (self.agreed[segment][1], due)
        return gone

    def _hide(self, segment: SegmentId, rule: str) -> None:
        self._happened("evict", segment, rule)
        del self.records[segment]
        self.pinned.discard(segment)
        for gone in (self.hot, self.owner, self.kept):
            gone.pop(segment, None)

    def unlist(self, segments: list[SegmentId]) -> int:
        gone = 0
        for segment in segments:
            if segment in self.records:
                self._hide(segment, "repair")
                gone += 1
            for states in (self.incomplete, self.bygone, self.trash):
                states.pop(segment, None)
            self.stale.discard(segment)
        return gone

    def invalidate(self) -> int:
        gone, usage = len(self.records), self.usage()
        if gone:
            whole = (0, usage.blocks, usage.nbytes)
            self.events.append(("invalidate", None, None, None, *whole, "invalidated"))
        self.bygone |= {segment: self.agreed[segment][1] for segment in self.records}
        self.stale |= set(self.incomplete)
        for emptied in (
            self.records,
            self.incomplete,
            self.pinned,
            self.hot,
            self.owner,
            self.kept,
            self.sessions,
        ):
            emptied.clear()
        return gone

    def erased(self) -> Erased:
        stored = self.records or self.trash or self.bygone or self.incomplete or self.stale
        return "in_use" if stored else "erased"

    def touch(self, segments: list[SegmentId], minute: float) -> None:
        for at, segment in enumerate(segments):
            if segment in self.records:
                self._use(segment, minute, minute, begins=not at)
                self.owner.pop(segment, None)

    def _use(self, segment: SegmentId, minute: float, counts: float, *, begins: bool) -> None:
        if begins and self.used[segment] < int(counts):
            self.hot[segment] = self.hot.get(segment, 0.0) + 1
        self.used[segment] = max(self.used[segment], counts)
        if segment in self.kept:
            until, used = self.kept[segment]
            self.kept[segment] = (until, max(used, min(int(minute), until // 60)))

    # sessions

    def own(self, session: SessionId) -> list[SegmentId]:
        return [segment for segment, owner in self.owner.items() if owner == session]

    def session(
        self,
        session: SessionId,
        segments: list[SegmentId],
        minute: float,
        hint: Hint,
        allowance: Allowance,
        until_s: float,
    ) -> HintEffect:
        """Applies a hint to a session. If it retains, `until_s` is the end, by the index's clock."""
        one = self.sessions.get(session) or Session()
        hinted = hint.retain_s is not None and not hint.end
        if hinted:
            one.until = int(until_s)
        one.priority = hint.priority or one.priority
        one.ended = hint.end
        if hint.end:
            one.until = 0
        asked = list(dict.fromkeys(segments))
        passed = [segment for segment in asked if segment in self.records]
        some = passed + [each for each in self.own(session) if hinted and each not in passed]
        for segment in some:
            early = 60 if one.priority == "low" and self.owner.get(segment) == session else 0
            self._use(segment, minute, max(0, minute - early), begins=segment == asked[0] if asked else False)
        for segment in passed:
            if self.owner.get(segment) != session:
                self.owner.pop(segment, None)
        demoted = retained = refused = 0
        if one.ended:
            for segment in self.own(session):
                self._restore(segment)
                demoted += self._demote(segment)
        elif one.until:
            retained, refused = self._retain(session, some, one.until, allowance)
        elif hinted:
            for segment in self.own(session):
                self._restore(segment)
        one.used = max(one.used, int(minute))
        own = self.own(session)
        if one.until or one.ended or one.priority != "normal" or own:
            self.sessions[session] = one
        else:
            self.sessions.pop(session, None)
        state: SessionState = "ended" if one.ended else "retained" if one.until else "live"
        return HintEffect(state, len(own), demoted, retained, refused)

    def _adopt(self, session: SessionId, segment: SegmentId, allowance: Allowance) -> None:
        one = self.sessions.setdefault(session, Session())
        self.owner[segment] = session
        one.used = max(one.used, int(self.used[segment] + 0.5))
        if one.ended:
            self._demote(segment)
        elif one.priority == "low":
            self.used[segment] = max(0, self.used[segment] - 60)
        elif one.until:
            self._retain(session, [segment], one.until, allowance)

    def retained(self) -> dict[bytes, int]:
        held: Counter[bytes] = Counter()
        for segment in self.kept:
            for salt in {b"", self.records[segment].salt}:
                held[salt] += self.records[segment].nbytes
        return dict(held)

    def _retain(
        self, session: SessionId, segments: list[SegmentId], until: int, allowance: Allowance
    ) -> tuple[int, int]:
        done = refused = 0
        mine = sum(self.records[one].nbytes for one in self.own(session) if one in self.kept)
        for segment in segments:
            if segment in self.pinned:
                continue
            one, used, upto = self.records[segment], self.used[segment], until
            if segment in self.kept:
                before, true = self.kept[segment]
                used = true if used <= before // 60 else used
                held = self.retained()
                salted = held[one.salt] if one.salt else 0
                over = held[b""] > allowance.namespace_bytes or salted > allowance.salt_bytes
                over = over or mine > allowance.session_bytes
                if over and until > before:
                    refused += one.nbytes
                    continue
                if self.owner.get(segment) != session:
                    upto = max(until, before)
            else:
                held = self.retained()
                salted = held.get(one.salt, 0) + one.nbytes if one.salt else 0
                in_all = held.get(b"", 0) + one.nbytes
                over = in_all > allowance.namespace_bytes or salted > allowance.salt_bytes
                if refused or over or mine + one.nbytes > allowance.session_bytes:
                    refused += one.nbytes
                    continue
                mine += one.nbytes
            done += one.nbytes
            last = upto // 60
            self.kept[segment] = (upto, min(last, max(int(used), last - LONGEST_AGO_MINUTES)))
            self.used[segment] = max(last, used)
        return done, refused

    def _restore(self, segment: SegmentId) -> None:
        if segment in self.kept:
            until, used = self.kept.pop(segment)
            if self.used[segment] <= until // 60:
                self.used[segment] = used

    def _demote(self, segment: SegmentId) -> int:
        if segment in self.pinned or self.used[segment] == ENDED_MINUTE:
            return 0
        self.used[segment] = ENDED_MINUTE
        return 1

    def forget_sessions(self, salt: SaltId) -> None:
        begin = sessions_of_salt(salt) if salt else b""
        gone = {session for session in self.sessions if session.startswith(begin)}
        self.sessions = {session: one for session, one in self.sessions.items() if session not in gone}
        self.owner = {segment: owner for segment, owner in self.owner.items() if owner not in gone}

    def listing(self, session: SessionId) -> SessionListing | None:
        one = self.sessions.get(session)
        if one is None:
            return None
        own = self.own(session)
        state: SessionState = "ended" if one.ended else "retained" if one.until else "live"
        nbytes = sum(self.records[segment].nbytes for segment in own)
        priority: Any = one.priority
        return SessionListing(session, state, float(one.until), priority, one.used * 60.0, len(own), nbytes)

    def cool(self) -> None:
        self.hot = {segment: minutes / 2 for segment, minutes in self.hot.items() if minutes >= 0.2}

    def tell(self, outcomes: list[Outcome]) -> None:
        for one in outcomes:
            lost = one.asked - one.served
            if one.op == "match":
                self.seen.update(requests=1, asked=one.asked, served=one.served)
            elif one.op == "load":
                self.seen["served"] -= lost
            else:
                self.seen.update(offered=one.asked, stored=one.served)
            if one.reason:
                self.seen[("unsaved:" if one.op == "save" else "miss:") + one.reason] += lost
                self.outcomes.append(replace(one, missing=one.missing[:16]))

    def keep(self, segment: SegmentId) -> float:
        """The minute that eviction orders by."""
        one = self.records[segment]
        return self.used[segment] + (10 * worth(one.cost_us, one.nbytes) if self.items else 0)

    def in_order(self) -> list[SegmentId]:
        """The order of eviction."""

        def age(segment: SegmentId) -> tuple[float, int, float, SegmentId]:
            return self.keep(segment), -self.records[segment].depth, self.used[segment], segment

        return sorted(self.records.keys() - self.pinned, key=age)

    def listed_entries(self) -> set[Entry]:
        return {Entry(Digest(digest), *place) for digest, place in self.entries.items()}

    def dangling(self) -> int:
        return sum(entry[0] not in self.records for entry in self.entries.values())


@dataclass
class Model:
    spaces: dict[NamespaceId, Space] = field(default_factory=dict)
    #: What is forbidden in each namespace, registered or not.
    forbidden: dict[NamespaceId, dict[bytes, float]] = field(default_factory=dict)
    #: What namespaces that were erased had claimed.
    old_claims: dict[NamespaceId, dict[bytes, SegmentId]] = field(default_factory=dict)
