"""What an index promises, as a few dictionaries: the independent oracle of the state machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from kvstore.catalogue import Entry, Erased, SegmentState, Usage
from kvstore.conformance.chains import blocks_of, part_of
from kvstore.eviction import worth
from kvstore.keys import Digest, NamespaceId, SegmentId, split_digests
from kvstore.ports import Claim, CommitState, Outcome, Run
from schemas.records import EvictionRule, SegmentRecord

QUOTAS = ("capacity", "tenant_quota", "namespace_quota")
#: Operation, segment, first and last digest, depth, slots, bytes, rule.
Happening = tuple[str, SegmentId | None, bytes | None, bytes | None, int, int, int, str | None]


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
    used: dict[SegmentId, int] = field(default_factory=dict)
    #: By segment: its ranks and the time of its deletion.
    trash: dict[SegmentId, tuple[int, int]] = field(default_factory=dict)
    incomplete: dict[SegmentId, dict[int, SegmentRecord]] = field(default_factory=dict)
    #: Invalidated: visible ones with their ranks, incomplete ones.
    bygone: dict[SegmentId, int] = field(default_factory=dict)
    stale: set[SegmentId] = field(default_factory=set)
    pinned: set[SegmentId] = field(default_factory=set)
    hot: dict[SegmentId, float] = field(default_factory=dict)
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

    def usage(self) -> Usage:
        records = self.records.values()
        return Usage(
            sum(one.nbytes for one in records),
            len(records),
            sum(one.slots for one in records),
            sum(self.records[segment].nbytes for segment in self.pinned),
            sum(one.cost_us for one in records),
        )

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
        self, segment: SegmentId, digests: bytes, one: SegmentRecord, rank: int, ranks: int
    ) -> CommitState:
        """What becomes of a commit."""
        this = (digests, ranks, replace(one, parts=()))
        if segment in self.records:
            right = self.agreed[segment] == this and self.records[segment].parts[rank] == one.parts[0]
            if right:
                self._enter(segment, digests)
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
        self.used[segment] = one.created_s // 60
        self._enter(segment, digests)
        self._happened("commit", segment, None)
        return self._released(segment, digests, CommitState.VISIBLE)

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

    def _enter(self, segment: SegmentId, digests: bytes) -> None:
        self.entries |= {digest: (segment, slot) for slot, digest in enumerate(split_digests(digests))}

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
        self.hot.pop(segment, None)

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
        for emptied in (self.records, self.incomplete, self.pinned, self.hot):
            emptied.clear()
        return gone

    def erased(self) -> Erased:
        stored = self.records or self.trash or self.bygone or self.incomplete or self.stale
        return "in_use" if stored else "erased"

    def touch(self, segments: list[SegmentId], minute: int) -> None:
        for at, segment in enumerate(segments):
            if segment in self.records and self.used[segment] < minute:
                self.used[segment] = minute
                if not at:
                    self.hot[segment] = self.hot.get(segment, 0.0) + 1

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

    def keep(self, segment: SegmentId) -> int:
        """The minute that eviction orders by."""
        one = self.records[segment]
        return self.used[segment] + (10 * worth(one.cost_us, one.nbytes) if self.items else 0)

    def in_order(self) -> list[SegmentId]:
        """The order of eviction."""

        def age(segment: SegmentId) -> tuple[int, int, int, SegmentId]:
            return self.keep(segment), -self.records[segment].depth, self.used[segment], segment

        return sorted(self.records.keys() - self.pinned, key=age)

    def listed_entries(self) -> set[Entry]:
        return {Entry(Digest(digest), *place) for digest, place in self.entries.items()}

    def dangling(self) -> int:
        return sum(entry[0] not in self.records for entry in self.entries.values())


@dataclass
class Model:
    spaces: dict[NamespaceId, Space] = field(default_factory=dict)
    #: What namespaces that were erased had claimed.
    old_claims: dict[NamespaceId, dict[bytes, SegmentId]] = field(default_factory=dict)
