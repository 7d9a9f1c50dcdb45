"""What an index promises, as a few dictionaries: the independent oracle of the state machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvstore.conformance.chains import blocks_of, part_of
from kvstore.keys import NamespaceId, SegmentId, split_digests
from kvstore.ports import Claim, CommitState, Run, Usage
from schemas.records import SegmentRecord


@dataclass
class Space:
    """One namespace."""

    #: By digest: where a block is, whoever wrote it last.
    entries: dict[bytes, tuple[SegmentId, int]] = field(default_factory=dict)
    #: By segment: what it holds, visible or not.
    contents: dict[SegmentId, bytes] = field(default_factory=dict)
    records: dict[SegmentId, SegmentRecord] = field(default_factory=dict)
    used: dict[SegmentId, int] = field(default_factory=dict)
    #: By segment: its ranks and the time of its deletion.
    trash: dict[SegmentId, tuple[int, int]] = field(default_factory=dict)
    incomplete: dict[SegmentId, dict[int, SegmentRecord]] = field(default_factory=dict)
    #: By segment: what all of its commits must share, that is blocks, ranks, and all but the parts.
    agreed: dict[SegmentId, tuple[bytes, int, SegmentRecord]] = field(default_factory=dict)
    claims: dict[bytes, SegmentId] = field(default_factory=dict)
    #: By window: the blocks asked for in it.
    uses: dict[int, set[bytes]] = field(default_factory=dict)

    def usage(self) -> Usage:
        records = self.records.values()
        return Usage(sum(one.nbytes for one in records), len(records), sum(one.slots for one in records))

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

    def claim(self, digests: bytes, present: int, segment: SegmentId) -> Claim:
        """The right answer for a chain of which `present` blocks are stored."""
        if present == blocks_of(digests):
            return Claim(present, granted=False)
        return Claim(present, self.claims.setdefault(part_of(digests, present, 1), segment) == segment)

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
        if segment in self.trash or (parts and self.agreed[segment] != this):
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
        return self._released(segment, digests, CommitState.VISIBLE)

    def is_forgotten(self, segment: SegmentId) -> bool:
        """Committed at some time, at least in part, and buried since."""
        known = segment in self.records or segment in self.trash or segment in self.incomplete
        return segment in self.contents and not known

    def _enter(self, segment: SegmentId, digests: bytes) -> None:
        self.entries |= {digest: (segment, slot) for slot, digest in enumerate(split_digests(digests))}

    def _released(self, segment: SegmentId, digests: bytes, state: CommitState) -> CommitState:
        if self.claims.get(digests[:16]) == segment:
            del self.claims[digests[:16]]
        return state

    def evict(self, segments: list[SegmentId], due: int) -> int:
        gone = 0
        for segment in segments:
            if segment in self.records:
                del self.records[segment]
                gone += 1
            elif self.incomplete.pop(segment, None) is None:
                continue
            self.trash[segment] = (self.agreed[segment][1], due)
        return gone

    def oldest_first(self) -> list[SegmentId]:
        """The order of eviction, equals in any order."""
        return sorted(self.records, key=self.age)

    def age(self, segment: SegmentId) -> tuple[int, int]:
        return self.used[segment], -self.records[segment].depth

    def dangling(self) -> int:
        return sum(entry[0] not in self.records for entry in self.entries.values())


@dataclass
class Model:
    spaces: dict[NamespaceId, Space] = field(default_factory=dict)
