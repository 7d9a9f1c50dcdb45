"""events: commits, evictions and invalidations, as the index remembers them and as they happen."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.inspect.reports import EventLine, EventsReport
from kvstore.admin.operators import written
from kvstore.errors import TransientError
from kvstore.events import EventReader, Gap
from kvstore.index.maintenance import Event
from kvstore.keys import NamespaceId


def events(
    cache: Cache, prefix: str | None, *, after: str | None, limit: int | None, now_s: float
) -> EventsReport:
    """Returns the newest `limit` (None: all) events of one namespace or of all, the oldest first.

    With `after`, which needs a namespace, these are only events after that position. Raises UnknownName and
    what the index raises.
    """
    kept: deque[EventLine] = deque(maxlen=limit)
    names = _names(cache, prefix)
    lines: list[EventLine] = []
    for name in names:
        reader = _reader(cache, name, after or "")
        kept.clear()
        while found := _read(reader, name):
            kept.extend(event_lines(name, found))
        lines += kept
    if len(names) > 1:
        lines.sort(key=lambda line: line.at_s)
    newest = lines if limit is None else lines[max(0, len(lines) - limit) :]
    return EventsReport(at_s=now_s, events=tuple(newest))


def follow_events(
    cache: Cache,
    prefix: str | None,
    *,
    after: str | None,
    every_s: float,
    trouble: Callable[[TransientError], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[EventLine]]:
    """Yields events as they happen, asking every `every_s`, for one namespace or for all, new ones included.

    Without `after` it begins now. When the index stops answering, `trouble` is called once with the reason,
    and asking goes on. Raises as `events` does before the first answer.
    """
    readers = {name: _reader(cache, name, after) for name in _names(cache, prefix)}
    failing = False
    while True:
        found: list[EventLine] = []
        try:
            if prefix is None:
                for name in _names(cache, None):
                    # A namespace that was registered meanwhile is read from its first event.
                    readers.setdefault(name, _reader(cache, name, ""))
            for name, reader in readers.items():
                found += event_lines(name, _read(reader, name))
            failing = False
        except TransientError as exc:
            if not failing:
                trouble(exc)
            failing = True
        if found:
            found.sort(key=lambda line: line.at_s)
            yield found
        else:
            sleep(every_s)


def event_lines(name: NamespaceId, found: Sequence[Event | Gap]) -> Iterator[EventLine]:
    """Yields the events as a report has them. A gap takes the time of the event after it."""
    at_s = next((event.at_s for event in found if isinstance(event, Event)), 0.0)
    for event in found:
        if isinstance(event, Gap):
            yield EventLine(namespace=name, position=event.position, at_s=at_s, op="gap")
            continue
        yield EventLine(
            namespace=name,
            position=event.position,
            at_s=event.at_s,
            op=event.op,
            segment=event.segment.hex() if event.segment is not None else None,
            first=event.first.hex() if event.first is not None else None,
            last=event.last.hex() if event.last is not None else None,
            depth=event.depth,
            blocks=event.slots,
            stored_bytes=event.nbytes,
            rule=event.rule,
            by=written(event.by),
        )


def _names(cache: Cache, prefix: str | None) -> list[NamespaceId]:
    return sorted(cache.namespaces()) if prefix is None else [cache.namespace(prefix)]


def _reader(cache: Cache, name: NamespaceId, after: str | None) -> EventReader:
    assert cache.index is not None, "a namespace is known, so there is an index"
    return EventReader(cache.index, name, after=after)


def _read(reader: EventReader, name: NamespaceId) -> list[Event | Gap]:
    try:
        return reader.read()
    except ValueError:
        raise UnknownName(
            f"{reader.position!r} is no position; `cache-admin events {name} --json` shows them"
        ) from None
