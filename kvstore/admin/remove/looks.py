"""Looks for what an erasure must not leave behind, beside what the index shows.

payloads that nobody can match    strays, and the trash: their headers say under which salt they were saved
former versions of payloads       whether the bucket keeps them; a lifecycle rule deletes them
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvstore.admin.backends import Cache
from kvstore.admin.counting import paged
from kvstore.admin.progress import Silent
from kvstore.admin.remove.reports import VersionsReport, VersionsState
from kvstore.admin.repair.survey import Stock, StoredSegment, take_stock
from kvstore.build import keeps_versions
from kvstore.errors import CorruptPayload, KVStoreError, UnreadablePayload
from kvstore.format.segment import Header
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId, SaltId, SegmentId, payload_name
from kvstore.threads.each import for_each
from kvstore.verify.payloads import read_header
from schemas.settings import Settings
from schemas.urls import s3_location

#: Headers read side by side.
_JOBS = 8


def header_at(cache: Cache, name: NamespaceId, stored: StoredSegment) -> Header | None:
    """Returns the header of a segment's first payload; None if it can't be read, or is gone. Raises what the
    store raises."""
    rank = min(stored.sizes)
    try:
        return read_header(
            cache.payloads, cache.keyring, payload_name(name, stored.segment, rank), stored.sizes[rank], name
        )
    except (CorruptPayload, UnreadablePayload):
        return None


class LookForSalt:
    """Looks for what was saved in a namespace under a salt, created up to `until_s`. Reads a header once."""

    def __init__(
        self, cache: Cache, index: FullIndex, name: NamespaceId, salt: SaltId, until_s: float
    ) -> None:
        self._cache = cache
        self._index = index
        self._name = name
        self._salt = salt.hex()
        self._until_s = until_s
        self._others: set[SegmentId] = set()
        #: Segments that the last look found out of sight and whose headers can't be read.
        self.unreadable = 0

    def again(self) -> list[StoredSegment]:
        """Returns those that are there now, and can't be matched. Raises what the backends raise."""
        found: list[StoredSegment] = []
        unknown: list[StoredSegment] = []

        def judge(stored: StoredSegment) -> None:
            header = header_at(self._cache, self._name, stored)
            if header is None:
                unknown.append(stored)
            elif header.meta.salt == self._salt and header.meta.created_s <= self._until_s:
                found.append(stored)
            else:
                self._others.add(stored.segment)

        for_each(judge, self._hidden(), _JOBS)
        # One whose payload has gone meanwhile is no trouble.
        self.unreadable = sum(self._is_there(stored) for stored in unknown)
        return found

    def _hidden(self) -> Iterator[StoredSegment]:
        stock = take_stock(self._cache.payloads, Silent(), [f"{self._name}/"]).get(self._name, Stock())
        for page in paged(stock.segments()):
            ids = [stored.segment for stored in page]
            states, listed = self._index.states(self._name, ids), self._index.get(self._name, ids)
            for stored, state, one in zip(page, states, listed, strict=True):
                # A record that can't be read says nothing of its salt.
                unseen = state not in ("visible", "incomplete") or (state == "visible" and one is None)
                if unseen and stored.segment not in self._others:
                    yield stored

    def _is_there(self, stored: StoredSegment) -> bool:
        name = payload_name(self._name, stored.segment, min(stored.sizes))
        return self._cache.payloads.read(name, 0, []) is not None


def unasked_versions(settings: Settings) -> VersionsReport:
    """Returns what is known of former versions before the payload store is asked."""
    if not settings.origin.startswith("s3://"):
        return VersionsReport(state="none")
    return VersionsReport(state="unknown", bucket=s3_location(settings.origin).bucket)


def former_versions(settings: Settings) -> VersionsReport:
    """Asks whether the payload store keeps former versions of what was deleted. The report says so if the
    store refuses the answer."""
    bucket = unasked_versions(settings).bucket
    try:
        if not keeps_versions(settings):
            return VersionsReport(state="none", bucket=bucket)
        problem = ""
    except KVStoreError as exc:
        problem = str(exc)
    rule = {
        "ID": "kvstore-former-versions",
        "Status": "Enabled",
        "Filter": {"Prefix": s3_location(settings.origin).root},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        # Marks of deletion that hide no version any more.
        "Expiration": {"ExpiredObjectDeleteMarker": True},
    }
    state: VersionsState = "unknown" if problem else "kept"
    return VersionsReport(state=state, bucket=bucket, rule=json.dumps(rule), problem=problem)
