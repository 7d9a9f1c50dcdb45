"""Saves one rank's part of a segment.

Order, so that a crash after any step is harmless (invariants 1, 4 and 8 of docs/format.md):
    1. claim      another engine's copy would be a waste        crash: the claim expires
    2. put        the payload is complete and durable           crash: a stray payload
    3. commit     the index names it, all ranks at once         crash: done

A save may replace the short segments before it, whose blocks it begins with. So a chain that grows by a few
blocks a turn does not lie in as many segments as turns. Replaced segments go in step 3 of their successor, so
that one of both serves a block at any time. A crash before that leaves them as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from kvstore.errors import BreakerOpen, CapacityExceeded, KVStoreError
from kvstore.format.segment import Encoded, Slot, encode
from kvstore.index.port import CommitState, Replaced
from kvstore.index.sessions import Allowance
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    SaltId,
    SegmentId,
    SessionId,
    canonical_json,
    digest,
    namespace_id,
    payload_name,
)
from kvstore.store.backends import Backends
from schemas.namespace import Namespace
from schemas.records import SegmentRecord, rounded_cost

_T = TypeVar("_T")

#: How long a claim that is given back still lasts, in seconds: the shortest time that an index knows.
_AT_ONCE_S = 0.001

#: For how long a save may have waited here before its claim, in seconds. Only this difference of two times on
#: the writer's clock counts, so that an erasure covers what was to be saved before it.
MOST_WAITED_S = 300.0

SaveOutcome = Literal["stored", "present", "held", "refused", "waiting"]


#: Later than all times of a record: it stands for no segment, or for blocks that are not known to be older
#: than their save.
NEVER_CREATED_S = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Joins:
    """Stored segments that a save replaces, and how many of its leading blocks are theirs."""

    olds: tuple[Replaced, ...] = ()
    blocks: int = 0
    #: When the oldest of them was created, by the index's clock: blocks that are written anew stay as old as
    #: they were. That time is unknown if all of them are its own request's.
    created_s: int = NEVER_CREATED_S


NOTHING_JOINED = Joins()


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save: `present` leading blocks were stored already, `stored` new ones take `nbytes`."""

    outcome: SaveOutcome
    present: int
    stored: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a segment; all but `rank` is the same for all ranks."""

    segment: SegmentId
    #: Position in its chain of the first slot.
    depth: int
    #: When it was made, unix seconds: by the index's clock (Claim.at_s), once its blocks are claimed.
    created_s: int
    rank: int = 0
    ranks: int = 1
    #: Microseconds that computing all of it took; 0: unknown.
    cost_us: float = 0
    #: Ids of the requests' salt and session.
    salt: SaltId = NO_SALT
    session: SessionId = NO_SESSION
    joins: Joins = NOTHING_JOINED


class Registered(Protocol):
    """Runs a call of the index, and once more if the index had lost the namespace."""

    def __call__(self, call: Callable[[], _T]) -> _T: ...


class SegmentWriter:
    """Saves parts in one namespace. Raises KVStoreError. Safe for threads."""

    def __init__(
        self,
        backends: Backends,
        namespace: Namespace,
        registered: Registered,
        allowance: Callable[[SessionId, SaltId], Allowance],
    ) -> None:
        self._backends = backends
        self._namespace = namespace
        self._id = namespace_id(namespace)
        self._json = canonical_json(namespace)
        self._registered = registered
        self._allowance = allowance

    def save(self, slots: Sequence[Slot], part: Part, *, insist: bool) -> Saved:
        """Saves those blocks that aren't stored yet; see Space.save."""
        backends, joins = self._backends, part.joins
        tiers = backends.settings.tiers
        if tiers is not None and tiers.write == "back":
            # A record that is born old is never late: other nodes would take the payload, which is on its
            # way, for a lost one.
            part = replace(part, joins=NOTHING_JOINED)
        digests, waited_s = _digests(slots), max(0.0, backends.clock() - part.created_s)
        claim = self._registered(
            lambda: backends.index.claim(self._id, digests, part.segment, backends.settings.claim_ttl_s)
        )
        # A save that adds nothing, because the segments that it replaces are longer, has no rivals.
        left_out, present = 0, part.joins.blocks
        if present < len(slots) and not claim.granted and not (insist and claim.present < len(slots)):
            outcome: SaveOutcome = "held" if claim.present < len(slots) else "present"
            return Saved(outcome, claim.present, 0, 0)
        if claim.present < joins.blocks and joins.created_s == NEVER_CREATED_S:
            # The replaced segments may have been erased. Then nothing would show that these blocks were
            # computed before.
            self._give_back(part, digests)
            return Saved("refused", claim.present, 0, 0)
        # Another engine's segment may become visible between two ranks' claims. A few blocks twice are a
        # waste; ranks that leave out different ones would make the whole segment one that can't be committed.
        # Blocks that are stored beyond the replaced segments leave nothing to join.
        if part.ranks == 1 and claim.present > present:
            left_out = present = claim.present
        rest = slots[left_out:]
        cost = rounded_cost(part.cost_us * len(rest) / len(slots))
        created_s = min(max(0, int(claim.at_s - min(waited_s, MOST_WAITED_S))), part.joins.created_s)
        part = replace(part, depth=part.depth + left_out, created_s=created_s, cost_us=cost)
        if left_out:
            part = replace(part, joins=NOTHING_JOINED)
        try:
            encoded = self.put(rest, part)
        except KVStoreError:
            self._give_back(part, digests)
            raise
        try:
            state = self.commit(rest, part, encoded)
        except (BreakerOpen, CapacityExceeded):
            # Certainly not committed. After any other error it may be (a right that is missing in the middle
            # of a script), and what the index names must stay; fsck finds what the index does not name.
            with contextlib.suppress(KVStoreError):
                backends.payloads.delete([self.name(part)])
            raise
        if state is CommitState.REFUSED:
            backends.payloads.delete([self.name(part)])
            return Saved("refused", present, 0, 0)
        outcome = "stored" if state is CommitState.VISIBLE else "waiting"
        return Saved(outcome, present, len(slots) - present, encoded.part.nbytes)

    def _give_back(self, part: Part, digests: bytes) -> None:
        """Ends a claim, so that the next writer need not wait. That of several ranks belongs to all."""
        if part.ranks == 1:
            with contextlib.suppress(KVStoreError):
                self._backends.index.claim(self._id, digests, part.segment, _AT_ONCE_S)

    def name(self, part: Part) -> str:
        """Returns the name of a part's payload."""
        return payload_name(self._id, part.segment, part.rank)

    def put(self, slots: Sequence[Slot], part: Part) -> Encoded:
        """Encodes a part and stores its payload."""
        encoded = self.encoded(slots, part)
        self._backends.payloads.put(self.name(part), encoded.buffers)
        return encoded

    def encoded(self, slots: Sequence[Slot], part: Part) -> Encoded:
        """Returns the payload of a part."""
        return encode(
            slots,
            namespace_json=self._json,
            kind=self._namespace.kind,
            segment=part.segment,
            rank=part.rank,
            ranks=part.ranks,
            codec=self._namespace.codec,
            depth=part.depth,
            created_s=part.created_s,
            writer=self._backends.writer.name,
            cost_us=int(part.cost_us),
            salt=part.salt,
            keyring=self._backends.keyring,
        )

    def commit(self, slots: Sequence[Slot], part: Part, encoded: Encoded) -> CommitState:
        """Commits a part whose payload is stored."""
        record = SegmentRecord(
            parts=(encoded.part,),
            slots=len(slots),
            codec=self._namespace.codec,
            created_s=part.created_s,
            depth=part.depth,
            raw_bytes=sum(slot.data.nbytes for slot in slots) if part.ranks == 1 else 0,
            cost_us=int(part.cost_us),
            salt=part.salt,
            writer=self._backends.writer.id,
        )
        index, digests = self._backends.index, _digests(slots)
        allowance = self._allowance(part.session, part.salt)
        return self._registered(
            lambda: index.commit(
                self._id,
                part.segment,
                digests,
                record,
                rank=part.rank,
                ranks=part.ranks,
                session=part.session,
                allowance=allowance,
                replaces=part.joins.olds,
            )
        )


def _digests(slots: Sequence[Slot]) -> bytes:
    return b"".join(digest(slot.key) for slot in slots)
