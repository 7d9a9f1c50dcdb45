"""du: what the payload store itself lists, beside what the index says of it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvstore.admin.cache import Cache
from kvstore.admin.inventory import amount_of
from kvstore.admin.progress import Progress, Silent
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name
from kvstore.ports import Listed
from schemas.usage import DuLine, DuReport, PayloadState

#: Payloads whose segments are looked up together, and what is held of the listing at once.
_PAGE = 2048
_ORDER: tuple[PayloadState, ...] = ("visible", "incomplete", "bygone", "trash", "orphan", "foreign")


@dataclass(slots=True)
class _Sum:
    payloads: int = 0
    nbytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = float("-inf")

    def add(self, listed: Listed) -> None:
        self.payloads += 1
        self.nbytes += listed.nbytes
        self.oldest_s = min(self.oldest_s, listed.modified_s)
        self.newest_s = max(self.newest_s, listed.modified_s)


def du(cache: Cache, prefix: str | None, now_s: float, progress: Progress | None = None) -> DuReport:
    """Payloads by namespace and state, of one namespace or of all, by listing the payload store.

    What is being saved counts as orphans until its commit. Raises UnknownName and what the backends raise.
    """
    began = time.monotonic()
    progress = progress or Silent()
    chosen = None if prefix is None else cache.namespace(prefix)
    index = cache.index
    known = cache.namespaces()
    accounts = [] if index is None else [a for a in index.accounts() if chosen in (None, a.namespace)]
    indexed = amount_of(accounts)
    progress.begin("list payloads", None if chosen is None else indexed.stored_bytes or None)
    sums: dict[tuple[str, PayloadState], _Sum] = defaultdict(_Sum)
    for listed, name, state in _states(cache, known, "" if chosen is None else f"{chosen}/"):
        sums[name, state].add(listed)
        progress.advance(listed.nbytes)
    lines = [
        DuLine(
            namespace=name,
            model=str(json.loads(known[NamespaceId(name)]).get("model", "")) if name in known else "",
            state=state,
            payloads=held.payloads,
            stored_bytes=held.nbytes,
            oldest_s=held.oldest_s,
            newest_s=held.newest_s,
        )
        for (name, state), held in sums.items()
    ]
    largest: dict[str, int] = defaultdict(int)
    for line in lines:
        largest[line.namespace] += line.stored_bytes
    lines.sort(key=lambda line: (-largest[line.namespace], line.namespace, _ORDER.index(line.state)))
    return DuReport(
        at_s=now_s,
        payloads=sum(line.payloads for line in lines),
        stored_bytes=sum(line.stored_bytes for line in lines),
        lines=tuple(lines),
        indexed=indexed,
        seconds=time.monotonic() - began,
    )


def _states(
    cache: Cache, known: dict[NamespaceId, str], prefix: str
) -> Iterator[tuple[Listed, str, PayloadState]]:
    """Every payload with its namespace and state, a page at a time."""
    listing = cache.payloads.list(prefix)
    while page := list(islice(listing, _PAGE)):
        wanted: dict[NamespaceId, list[SegmentId]] = defaultdict(list)
        parsed = [(listed, parse_payload_name(listed.name)) for listed in page]
        for _, name in parsed:
            if name is not None and name[0] in known:
                wanted[name[0]].append(name[1])
        found: dict[tuple[NamespaceId, SegmentId], PayloadState] = {}
        for space, segments in wanted.items():
            assert cache.index is not None, "a namespace is known, so there is an index"
            unique = list(dict.fromkeys(segments))
            for segment, state in zip(unique, cache.index.states(space, unique), strict=True):
                found[space, segment] = state or "orphan"
        for listed, name in parsed:
            if name is None:
                yield listed, "", "foreign"
            else:
                yield listed, name[0], found.get((name[0], name[1]), "orphan")
