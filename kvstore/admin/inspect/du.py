"""du: the payloads that the payload store itself lists, with what the index says of each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvstore.admin.backends import Cache
from kvstore.admin.counting import amount_of
from kvstore.admin.described import described
from kvstore.admin.inspect.reports import DuLine, DuReport, PayloadState
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name
from kvstore.payloads.port import Listed

#: Payloads whose segments are looked up together; no more of the listing is held at once.
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


def du(cache: Cache, prefix: str | None, now_s: float, progress: ProgressListener | None = None) -> DuReport:
    """Lists the payload store and returns its payloads by namespace and state, for one namespace or for all.

    Payloads of a save that is under way count as `orphan` until its commit. Raises UnknownName and what the
    backends raise.
    """
    began = time.monotonic()
    progress = progress or Silent()
    chosen = None if prefix is None else cache.namespace(prefix)
    known = cache.namespaces()
    indexed = amount_of(cache.accounts(chosen))
    progress.begin("list payloads", None if chosen is None else indexed.stored_bytes or None)
    sums: dict[tuple[str, PayloadState], _Sum] = defaultdict(_Sum)
    for listed, name, state in _states(cache, known, "" if chosen is None else f"{chosen}/"):
        sums[name, state].add(listed)
        progress.advance(listed.nbytes)
    lines = [
        DuLine(
            namespace=name,
            model=described(known.get(NamespaceId(name)))[1],
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
    """Yields every payload with its namespace and state; asks the index a page at a time."""
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
