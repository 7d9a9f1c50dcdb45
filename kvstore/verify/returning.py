"""The one rule for what may become visible again from payloads, or from an archive of them.

A listing doesn't tell why a payload is there: it may be bad and known to be, erased, or of a time before an
invalidation, and not deleted yet, or somebody has put it back. So whoever commits what he has not just saved
asks here first. A segment may not come back

    condemned     if there is evidence of it (kvstore.payloads.evidence)
    failed        if its writer has failed (kvstore.index.verdicts)
    erased        if it is of a salt, or a namespace, that was erased, unless it was saved after that for
                  sure: by its header, whose time is that of an index, and not one that is yet to come
    invalidated   if it is of a namespace that was, likewise, and nobody has had it imported since then:
                  whoever names an archive wants what is in it

The index says what was erased and which writers have failed. The evidence beside the payloads says it after
the index was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from kvstore.index.contract import is_forbidden
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NO_SALT, NamespaceId, SaltId, SegmentId
from kvstore.payloads.evidence import Barred, Evidence
from schemas.records import SegmentRecord

Bar = Literal["condemned", "failed", "erased", "invalidated"]

#: Why, for people.
WHY: Final[Mapping[Bar, str]] = {
    "condemned": "an audit found that it is wrong; "
    "`cache-admin fsck --list --apply` deletes what is left of it",
    "failed": "its writer has failed: others compute something else; "
    "`cache-admin fsck --list --apply` deletes it",
    "erased": "its tenant or salt was erased; `cache-admin fsck --list --apply` deletes it",
    "invalidated": "its namespace was invalidated, and nothing proves that it was saved after that; "
    "`cache-admin fsck --list --apply` deletes it",
}


class Returns:
    """Says what may come back, as it was when a namespace was asked about first. Safe for threads."""

    def __init__(self, index: FullIndex | None, evidence: Evidence) -> None:
        self._index = index
        self._evidence = evidence
        self._lock = threading.Lock()
        # The lock guards the field below it.
        #: What is barred, and what time it was by the index's clock.
        self._known: dict[NamespaceId, tuple[Barred, float]] = {}

    def barred(self, namespace: NamespaceId, segment: SegmentId, record: SegmentRecord) -> Bar | None:
        """Returns why a segment of this record may not come back; None: it may.

        Raises what the backends raise, and CorruptPayload if nothing can be said."""
        barred, now_s = self._of(namespace)
        if segment in barred.condemned:
            return "condemned"
        if record.writer in barred.failed:
            return "failed"
        salt, created_s = SaltId(record.salt), record.created_s
        if is_forbidden(barred.erased_s, salt, created_s, now_s):
            return "erased"
        invalidated = {NO_SALT: barred.invalidated_s} if barred.invalidated_s else {}
        if barred.readmitted.get(segment, -1) < barred.invalidations and is_forbidden(
            invalidated, salt, created_s, now_s
        ):
            return "invalidated"
        return None

    def readmit(self, namespace: NamespaceId, segment: SegmentId) -> None:
        """Lets a segment that was invalidated come back, now and later, here and where the evidence is copied
        to. Raises what the backends raise."""
        barred, _ = self._of(namespace)
        self._evidence.readmit(namespace, segment, barred.invalidations)
        with self._lock:
            barred.readmitted[segment] = barred.invalidations

    def _of(self, namespace: NamespaceId) -> tuple[Barred, float]:
        with self._lock:
            if namespace not in self._known:
                barred, now_s = self._evidence.of(namespace), time.time()
                if self._index is not None:
                    erased_s = dict(barred.erased_s)
                    for salt, until in self._index.forbidden(namespace).items():
                        erased_s[salt] = max(until, erased_s.get(salt, until))
                    verdicts = self._index.verdicts(namespace)
                    failed = {one for one, verdict in verdicts.items() if verdict.state == "failed"}
                    barred = replace(barred, erased_s=erased_s, failed=barred.failed | failed)
                    now_s = self._index.now(namespace)
                self._known[namespace] = barred, now_s
            return self._known[namespace]
