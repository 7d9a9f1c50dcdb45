"""Sessions: what clients tell of how they use the cache, as small records in the index.

A session is a client's conversation: requests that go on from each other. The index knows it by an id
(kvstore.keys.session_id), and which segments only it has used:

    owner       a segment that a session's request saves is that session's own, until a request of another
                session, or of none, uses it; from then on it is shared, and no session's. What replaces
                shared blocks (Index.commit) is shared
    record      the session's state, priority and last use

What it is told changes the order of eviction (kvstore.index.eviction), by changing what counts as a segment's
last use, and nothing else. Nothing is deleted, and no answer of a match depends on it:

    end         the session's own segments count as used in ENDED_MINUTE: they go first, tails before heads.
                A request of the session that uses one makes it like any other again
    retain      until a time to come the segments that the request uses, and the session's own, count as used
                then, so all else goes before them; afterwards their true last use counts again, by itself
    priority    low: the session's uses of its own segments count as LOW_S earlier. high: each use retains
                what it uses for HIGH_S more

What is saved afterwards, of a request that was served before, is treated likewise.

A client that lies harms itself: nobody's but its own segments go earlier, and what is retained in a
namespace, under one salt and by one session, is bounded (Allowance), each by a share that leaves some to
others. What goes beyond is not retained, tails first.

Nothing here has to be looked after. A session that is not used for one to two of WINDOW_S is forgotten, as
are those used longest ago, roughly, beyond MOST_SESSIONS in a namespace; then its segments are as any others.
A session that owns nothing, and of which nothing was told, takes no room at all. An index that is lost and
rebuilt has no sessions, until their requests save something again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.keys import NamespaceId, SaltId, SegmentId, SessionId
from schemas.records import SegmentRecord

SessionState = Literal["live", "retained", "ended"]
Priority = Literal["low", "normal", "high"]

#: The unix minute that counts as the last use of what an ended session alone has used.
ENDED_MINUTE = 1
#: Seconds by which uses in a session of low priority count earlier, and for which those of high retain.
LOW_S = 3600
HIGH_S = 3600
#: Nothing is retained for longer than this from the moment on when it is told.
LONGEST_RETAINED_S = 86_400
#: A session that is not used for one to two of these is forgotten.
WINDOW_S = 86_400
#: Most records of sessions in a namespace. In one of several shards a session may have a record in each.
MOST_SESSIONS = 1 << 20
#: Most segments of its own that a session's record lists: of more, those that it saved first are its own no
#: more.
MOST_SEGMENTS = 1024
#: Segments of a request that one step of the index takes.
SESSION_SLICE = 500
#: Minutes; a retained segment that was used longer ago than this before the end counts as used then.
LONGEST_AGO_MINUTES = (1 << 21) - 1


@dataclass(frozen=True, slots=True)
class Hint:
    """What is told of a session; what is left out stays as it was."""

    #: Nothing more will be asked for, as far as is known. A later use, or another hint, revives the session.
    end: bool = False
    #: Seconds from now on, by the index's clock: a fraction counts as a whole one, and at most
    #: LONGEST_RETAINED_S count; 0.0 ends it.
    retain_s: float | None = None
    priority: Priority | None = None


#: A use, and no more.
USE = Hint()


def retained_s(hint: Hint) -> int | None:
    """Returns for how many seconds from now on a session is to retain; None: nothing is told of that."""
    if hint.retain_s is None:
        return None
    return math.ceil(max(0.0, min(hint.retain_s, LONGEST_RETAINED_S)))


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many bytes may be retained at a time: in the namespace, of what was saved under one salt, and of
    one session's own."""

    namespace_bytes: int
    salt_bytes: int
    session_bytes: int


NOTHING_RETAINED = Allowance(0, 0, 0)


@dataclass(frozen=True, slots=True)
class HintEffect:
    """What a hint has done."""

    state: SessionState
    #: The session's own segments, and of those that it ended now the number that moved to the front.
    segments: int
    demoted: int
    #: Bytes of the segments that this call was to retain: of those that are, and of those for which the
    #: allowance had no room, some of which may be retained for as long as they were before.
    retained_bytes: int
    refused_bytes: int


@dataclass(frozen=True, slots=True)
class SessionListing:
    """A session as the index lists it."""

    session: SessionId
    state: SessionState
    #: Unix seconds, of a session that is `retained`; else 0.0.
    until_s: float
    priority: Priority
    #: Unix seconds, to the minute.
    last_use_s: float
    #: The visible segments that only it has used, and their bytes.
    segments: int
    nbytes: int


class SessionUses(ABC):
    """What requests tell an index of their sessions. Every index for engines has it."""

    @abstractmethod
    def session(
        self,
        namespace: NamespaceId,
        session: SessionId,
        segments: Sequence[SegmentId],
        used_s: float | None = None,
        hint: Hint = USE,
        *,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> HintEffect:
        """Notes that a request of a session uses `segments`, heads first, and what is told of the session.

        It is also their `Index.touch`, which a request of a session must not call besides: that is a use by
        nobody's session. A use is to the minute, by the index's own clock, or an earlier one at `used_s`. One
        round trip, for up to SESSION_SLICE segments.

        Segments that are gone are ignored.
        Raises NamespaceUnknown.
        """

    @abstractmethod
    def owned(self, namespace: NamespaceId, session: SessionId) -> dict[SegmentId, SegmentRecord]:
        """Returns the visible segments that only this session has used, at most MOST_SEGMENTS, in no order.

        A session that the index doesn't remember has none. It is no use of them. One round trip.
        """


class Sessions(ABC):
    """Looks at sessions, for people and for evictions."""

    @abstractmethod
    def sessions(self, namespace: NamespaceId) -> Iterator[SessionListing]:
        """Yields every session that the index remembers, in no order and in bounded pages. One that is used
        meanwhile may come twice."""

    @abstractmethod
    def find_sessions(
        self, namespace: NamespaceId, sessions: Sequence[SessionId]
    ) -> list[SessionListing | None]:
        """Returns the named sessions, None where the index remembers none."""

    @abstractmethod
    def owners(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SessionId]:
        """Returns the session whose own each segment is; empty for one that is shared, or gone."""

    @abstractmethod
    def retained(self, namespace: NamespaceId) -> dict[SaltId, int]:
        """Returns how many bytes are retained, and not only until a time that is over: by the salt that they
        were saved under, and under the empty one all together."""

    @abstractmethod
    def expire(self, namespace: NamespaceId) -> int:
        """Lets the true last use count again of what was retained until a time that is over; returns of how
        many segments.

        Who tells of a session or culls in the namespace does some of that. Before an `order` that is compared
        with others', all has to be done.
        """
