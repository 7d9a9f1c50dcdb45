"""Evidence: what is kept for people and may not be served, under names that no lister takes for payloads'.

    evidence/<payload name>              a payload that was condemned, or the same blocks as another engine
                                         computed them
    evidence/<namespace>/<..>/<id>.256   what of the namespace may not come back (schemas.evidence)
    evidence/<segment's name>.<number>   empty; number - 256: after how many invalidations the segment was
                                         imported
    evidence/<namespace>/<..>/<writer id>.99999
                                         empty: the writer has failed

All are a payload store of their own inside the shared one, so `parse_payload_name` takes none of their
names where payloads are listed. An empty object under a condemned payload's name comes first and says that
the segment may not come back; the copy takes its place, if there is one. Then the segment is evicted and its
payloads are deleted. A crash in between leaves payloads that nobody brings back.

Copies last a week, and as long as there is room for them. Failed writers and refusals last for ever, as an
erasure does, and are small. Each refusal is an object of its own, never changed or deleted: of two erasures
at the same time neither can take the other's away, and no listing can pass both by.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from kvstore.errors import CorruptPayload, KVStoreError
from kvstore.keys import (
    SEGMENT_ID_BYTES,
    NamespaceId,
    SaltId,
    SegmentId,
    WriterId,
    parse_payload_name,
    payload_name,
)
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.threads.each import for_each
from schemas.evidence import RefusalsObject

#: The folder, or the part of a key, below which evidence lies.
EVIDENCE: Final = "evidence"
#: How long copies are kept, in seconds, how many, and how many bytes of them.
KEPT_S: Final = 7 * 86400.0
MOST_COPIES: Final = 1000
MOST_BYTES: Final = 4 << 30

#: The ranks of refusals and of failed writers among the names of payloads. No rank of a segment has these
#: numbers, or one in between.
_REFUSALS_RANK: Final = 256
_WRITER_RANK: Final = 99_999
#: The most bytes of one that are read: some 200,000 salts.
_MOST_REFUSALS_BYTES: Final = 16 << 20
#: Refusals that are read side by side.
_JOBS: Final = 8


@dataclass(frozen=True, slots=True)
class Barred:
    """What of one namespace may not come back from payloads or archives."""

    #: Segments that an audit condemned.
    condemned: frozenset[SegmentId]
    #: Writers that have failed.
    failed: frozenset[WriterId]
    #: Salt, or NO_SALT for all of the namespace -> until when what was erased was created, unix seconds.
    erased_s: Mapping[SaltId, float]
    #: Until when what was invalidated was created, likewise; 0: nothing was.
    invalidated_s: float
    #: How many invalidations there were.
    invalidations: int
    #: Segment -> after how many of them it was imported for the last time.
    readmitted: dict[SegmentId, int]


class Evidence:
    """The evidence beside the payloads of one store. Safe for threads.

    `open_store` opens the payload store that lies at EVIDENCE, when it is asked for something first. Methods
    raise what that store raises.
    """

    def __init__(self, open_store: Callable[[], PayloadStore]) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        # The lock guards the field below it.
        self._opened: PayloadStore | None = None

    @property
    def payloads(self) -> PayloadStore:
        """The payload store that holds it."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def put(
        self, namespace: NamespaceId, segment: SegmentId, rank: int, buffers: Sequence[memoryview]
    ) -> str:
        """Keeps a payload, whose segment may not come back from now on. Returns its name beside the
        payloads."""
        name = payload_name(namespace, segment, rank)
        self.payloads.put(name, buffers)
        return f"{EVIDENCE}/{name}"

    def deny(self, name: str) -> None:
        """From now on what has this name here may not come back. A copy that has the name stays."""
        with contextlib.suppress(KVStoreError):
            if any(one.name == name for one in self.payloads.list(name)):
                return
        self.payloads.put(name, [memoryview(b"")])

    def refuse(
        self, namespace: NamespaceId, erased_s: Mapping[SaltId, float], invalidated_s: float = 0.0
    ) -> None:
        """From now on what was created until then, under these salts or with NO_SALT at all, may not come
        back. What was refused before stays so, and is not said again."""
        barred = self.of(namespace)
        news = {salt: until for salt, until in erased_s.items() if until > barred.erased_s.get(salt, -1.0)}
        if not news and not invalidated_s:
            return
        stored = RefusalsObject(
            erased_s={salt.hex(): until for salt, until in news.items()}, invalidated_s=invalidated_s
        )
        text = stored.model_dump_json().encode()
        name = SegmentId(secrets.token_bytes(SEGMENT_ID_BYTES))
        self.payloads.put(payload_name(namespace, name, _REFUSALS_RANK), [memoryview(text)])
        if invalidated_s:
            numbers = barred.readmitted.items()
            self.payloads.delete([payload_name(namespace, one, _REFUSALS_RANK + n) for one, n in numbers])

    def readmit(self, namespace: NamespaceId, segment: SegmentId, invalidations: int) -> None:
        """From now on none of so many invalidations keeps the segment from coming back."""
        self.payloads.put(payload_name(namespace, segment, _REFUSALS_RANK + invalidations), [memoryview(b"")])

    def of(self, namespace: NamespaceId) -> Barred:
        """Returns what of a namespace may not come back. Raises CorruptPayload if the refusals can't be
        understood: then nothing of it may."""
        condemned, failed, refusals = set(), set(), []
        readmitted: dict[SegmentId, int] = {}
        for one in self.payloads.list(f"{namespace}/"):
            if (parsed := parse_payload_name(one.name)) is None:
                continue
            _, segment, rank = parsed
            if rank < _REFUSALS_RANK:
                condemned.add(segment)
            elif rank == _REFUSALS_RANK:
                refusals.append(one)
            elif rank == _WRITER_RANK:
                failed.add(WriterId(segment))
            else:
                readmitted[segment] = max(rank - _REFUSALS_RANK, readmitted.get(segment, 0))
        erased_s, invalidated_s = dict[SaltId, float](), list[float]()
        lock = threading.Lock()

        def read(one: Listed) -> None:
            said = self._read_refusals(one)
            with lock:
                if said.invalidated_s:
                    invalidated_s.append(said.invalidated_s)
                for salt, until in said.erased_s.items():
                    name = SaltId(bytes.fromhex(salt))
                    erased_s[name] = max(until, erased_s.get(name, until))

        for_each(read, refusals, _JOBS)
        return Barred(
            frozenset(condemned),
            frozenset(failed),
            erased_s,
            max(invalidated_s, default=0.0),
            len(invalidated_s),
            readmitted,
        )

    def copies(self, namespace: NamespaceId) -> list[Listed]:
        """Returns the payloads that are kept of a namespace."""
        return [one for one in self.payloads.list(f"{namespace}/") if _copied(one) is not None]

    def trim(self, live: PayloadStore, now_s: float) -> Iterator[Listed]:
        """Deletes copies that are too old, and the oldest ones where there are too many; yields each of them
        as it has gone.

        `live` are the payloads that are served: what is left there of a segment goes before its copy, which
        has kept it from coming back.
        """
        copies = [one for one in self.payloads.list() if _copied(one) is not None]
        nbytes = 0
        for number, one in enumerate(sorted(copies, key=lambda one: -one.modified_s)):
            nbytes += one.nbytes
            if number >= MOST_COPIES or nbytes > MOST_BYTES or one.modified_s <= now_s - KEPT_S:
                live.delete([left.name for left in live.list(f"{one.name.rpartition('.')[0]}.")])
                self.payloads.delete([one.name])
                yield one

    def close(self) -> None:
        """Releases what was opened. Idempotent."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    def _read_refusals(self, one: Listed) -> RefusalsObject:
        try:
            if one.nbytes > _MOST_REFUSALS_BYTES:
                raise ValueError(f"{one.nbytes} bytes")
            text = bytearray(one.nbytes)
            read = self.payloads.read(one.name, 0, [memoryview(text)])
            return RefusalsObject.model_validate_json(bytes(text[:read]))
        except ValueError as exc:
            problem = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else str(exc)
            raise CorruptPayload(
                f"{EVIDENCE}/{one.name} says what may not come back, and can't be understood ({problem}): "
                "nothing of its namespace comes back until that object is repaired or deleted"
            ) from None


def writer_denial(namespace: NamespaceId, writer: WriterId) -> str:
    """Returns the name of what says that a writer's segments may not come back (Evidence.deny)."""
    return payload_name(namespace, SegmentId(writer), _WRITER_RANK)


def _copied(one: Listed) -> SegmentId | None:
    """Returns the segment that a listed payload is a copy of; None if it is no copy."""
    parsed = parse_payload_name(one.name)
    return parsed[1] if parsed is not None and parsed[2] < _REFUSALS_RANK else None
