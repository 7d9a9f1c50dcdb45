"""RouterFeed: reads the index's events, and has routers told what is stored.

An event names a segment; its blocks' hashes, which vLLM's own events carry, stand in the segment's header
alone. So what is committed costs a read of one header. What was announced is remembered, so that it can be
taken back.

The index is followed by EventReader for each of the model's namespaces. Where one is new, or its ring has a
hole, its segments are listed instead, from a position on that was asked for before: what is committed or
evicted meanwhile comes as events. Nothing of an event is lost to an outage: events that were read and not
published wait, and are tried again.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from kvstore.admin.backends import Cache
from kvstore.admin.feed.reports import FeedReport
from kvstore.admin.feed.sockets import TOGETHER, Sockets
from kvstore.admin.feed.view import Announced, RoutersView
from kvstore.admin.feed.wire import Owner, hash_of
from kvstore.errors import ConfigError, CorruptPayload, KVStoreError, PermissionDenied, UnreadablePayload
from kvstore.events import EventReader, Gap
from kvstore.index.maintenance import Event, FullIndex, Listing
from kvstore.keys import GROUP_BYTES, NamespaceId, SegmentId, payload_name
from kvstore.threads.each import for_each
from kvstore.verify.payloads import read_header
from schemas.namespace import Namespace

log = logging.getLogger(__name__)

#: Headers that are read at a time, and between two looks at the sockets.
_JOBS = 8
_PAGE = 256
#: An empty batch is sent after so many seconds without another: its number tells a router what it missed.
IDLE_S = 5.0
#: Snapshots that are sent to everybody because a router has subscribed are so far apart, or farther: as a
#: share of the time, they take no more than this.
SNAPSHOT_EVERY_S = 10.0
_SNAPSHOT_SHARE = 0.1
#: A feed that has not turned for so long hangs: a page of headers, and the index's calls, take less.
STUCK_S = 120.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is announced, and how."""

    #: The model; None: the only one that is there.
    model: str | None = None
    #: Whole hashes instead of numbers.
    whole_hashes: bool = False
    #: Whether events name the namespace as the owner of blocks.
    ownership: bool = True
    #: Blocks that are held at most.
    most_blocks: int = 1_000_000


class RouterFeed:
    """The feed of one model. One thread's."""

    def __init__(
        self,
        cache: Cache,
        choice: Choice,
        sockets: Sockets | None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sockets` None: nobody is told. Raises ConfigError for settings with which nothing can be told."""
        if not cache.settings.journal.events:
            raise ConfigError("the index keeps no events to follow: journal.events is 0")
        if cache.settings.tiers is not None and cache.settings.tiers.write == "back":
            raise ConfigError(
                "with payloads.write: back the index names what nodes have not uploaded yet, and a feed "
                "can't read it: let routers listen to engines' own events"
            )
        self._cache, self._choice = cache, choice
        self._clock, self._monotonic = clock, monotonic
        self._view = RoutersView(choice.most_blocks)
        self._sockets = sockets
        if sockets is not None:
            sockets.snapshot = self._view.snapshot
        self._model = choice.model
        self._namespaces: dict[NamespaceId, Namespace] = {}
        self._readers: dict[NamespaceId, EventReader] = {}
        #: Events that were read and not yet published.
        self._waiting: dict[NamespaceId, Sequence[Event | Gap]] = {}
        self._published_at = self._snapshot_at = float("-inf")
        self._snapshot_every_s = SNAPSHOT_EVERY_S
        self._events = self._holes = self._unreadable = 0
        self._lag_s: float | None = None
        self._problem = ""
        #: What it had announced and done when a turn ended last. Any thread may read it.
        self.last = self.report()
        self._turned_at = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._sockets is not None:
            self._sockets.close()

    def turning(self) -> bool:
        """Returns whether a turn has ended lately. Any thread may ask."""
        return self._monotonic() - self._turned_at < STUCK_S

    def turn(self, wait_s: float) -> None:
        """Publishes what is new, then answers routers and listens to engines, waiting so long for them.

        Raises ConfigError if there are several models and none was chosen. An index or a payload store that
        can't be read is told once, and tried again the next time.
        """
        more = False
        try:
            more = self._follow()
        except ConfigError:
            raise
        except KVStoreError as exc:
            if not self._problem:
                log.warning("%s; trying again", exc)
            self._problem = str(exc)
        else:
            if self._problem:
                log.info("the index and the payloads answer again")
            self._problem = ""
        end = self._monotonic() + (0.0 if more else wait_s)
        self._serve(end - self._monotonic())
        # The index is asked as often as the caller wants, however much engines say.
        while self._sockets is not None and (left_s := end - self._monotonic()) > 0:
            self._serve(left_s)
        self.last, self._turned_at = self.report(), self._monotonic()

    def _follow(self) -> bool:
        """Publishes a page of each namespace's events; returns whether there may be more at once."""
        more = False
        index = None if self._cache.index_absent else self._cache.index
        self._look_for_namespaces({} if index is None else index.namespaces())
        if index is None:
            return more
        failed: KVStoreError | None = None
        for name in self._namespaces:
            try:
                more |= self._follow_one(index, name)
            except ConfigError:
                raise
            except KVStoreError as exc:
                # The others go on.
                failed = failed or exc
        if failed is not None:
            raise failed
        return more

    def _follow_one(self, index: FullIndex, name: NamespaceId) -> bool:
        if name not in self._readers:
            self._list(index, name)
        reader = self._readers[name]
        began = reader.position
        events = self._waiting.get(name) or reader.read(_PAGE)
        if not events:
            return False
        if not began and len(events) >= min(_PAGE, self._cache.settings.journal.events):
            # From nothing on a reader sees no hole, and a full page may begin after one.
            events = [Gap("", events[0].position), *events]
        self._waiting[name] = events
        self._take(index, name, events)
        self._waiting.pop(name, None)
        return len(events) >= _PAGE

    def _look_for_namespaces(self, registered: Mapping[NamespaceId, str]) -> None:
        found: dict[NamespaceId, Namespace] = {}
        for name, text in registered.items():
            try:
                namespace = Namespace.model_validate_json(text)
            except ValidationError:
                continue  # a newer version's, or damaged: doctor says so
            if namespace.kind == "kv" and self._model in (None, namespace.model):
                found[name] = namespace
        models = sorted({namespace.model for namespace in found.values()})
        if len(models) > 1:
            raise ConfigError(f"--model says which of {', '.join(models)}: a router's stream is one model's")
        self._model = models[0] if models else self._model
        for name in set(self._namespaces) - set(found):
            # The index was emptied, or the namespace dropped.
            self._forget(name)
        self._namespaces = found

    def _forget(self, name: NamespaceId) -> None:
        self._readers.pop(name, None)
        self._waiting.pop(name, None)
        self._begin_anew([(name, segment) for segment in self._view.of(name)])

    def _begin_anew(self, gone: Sequence[tuple[NamespaceId, SegmentId]]) -> None:
        """Tells of a hole: what is known to be gone, that anything else may be, and all that is left."""
        self._holes += 1
        # A router need not take "all is gone" for blocks that it was told belong to nobody.
        self._tell([event for key in gone for event in self._view.drop(key)])
        if self._sockets is not None:
            self._tell_all()

    # ---- what is stored -------------------------------------------------------------------------

    def _list(self, index: FullIndex, name: NamespaceId, *, hole: bool = False) -> None:
        """Reads a namespace's segments, the latest used that there is room for; tells of a hole first, if
        there was one, or something that was announced is gone."""
        reader = EventReader(index, name, after=None)
        found: dict[SegmentId, Listing] = {}
        # Of those used at the same time the deepest go first: no router finds what follows them.
        newest: list[tuple[float, int, SegmentId]] = []
        blocks = 0
        for listing in index.segments(name):
            if listing.segment in found:
                continue  # Redis may list twice what is there while it makes room
            found[listing.segment] = listing
            heapq.heappush(newest, (listing.last_use_s, -listing.record.depth, listing.segment))
            blocks += listing.record.slots
            while blocks > self._choice.most_blocks and len(newest) > 1:
                blocks -= found.pop(heapq.heappop(newest)[-1]).record.slots
        gone = [(name, segment) for segment in self._view.of(name) if segment not in found]
        if hole or gone:
            self._begin_anew(gone)
        # Parents first: routers hang a block below the one before it.
        listings = sorted(found.values(), key=lambda one: one.record.depth)
        for at in range(0, len(listings), _PAGE):
            told: list[dict[str, Any]] = []
            for segment, announced in self._read(name, listings[at : at + _PAGE]).items():
                told += self._view.add((name, segment), announced)
            self._tell(told)
            self._serve(0)
            self.last, self._turned_at = self.report(), self._monotonic()
        self._readers[name] = reader

    def _take(self, index: FullIndex, name: NamespaceId, events: Sequence[Event | Gap]) -> None:
        """Tells of events; where one is a hole, lists the namespace instead."""
        if any(isinstance(event, Gap) for event in events):
            # Until the list is read to its end there is none to follow.
            del self._waiting[name], self._readers[name]
            self._list(index, name, hole=True)
            return
        committed = [
            event.segment
            for event in events
            if isinstance(event, Event) and event.op == "commit" and event.segment is not None
        ]
        read: dict[SegmentId, Announced] = {}
        for at in range(0, len(committed), _PAGE):
            # What is gone again is not listed, and its eviction comes.
            listings = [one for one in index.get(name, committed[at : at + _PAGE]) if one is not None]
            read |= self._read(name, listings)
        told: list[dict[str, Any]] = []

        def drop(segment: SegmentId) -> None:
            # It may be committed again on this page, and what is announced was not read.
            if (announced := self._view.get((name, segment))) is not None:
                read.setdefault(segment, announced)
            told.extend(self._view.drop((name, segment)))

        for event in events:
            assert isinstance(event, Event)
            self._events += 1
            if event.segment is None:
                for segment in self._view.of(name):
                    drop(segment)
            elif event.op != "commit":
                drop(event.segment)
            elif (announced := read.get(event.segment)) is not None:
                told += self._view.add((name, event.segment), announced)
            self._lag_s = max(0.0, self._clock() - event.at_s)
        self._tell(told)

    def _read(self, name: NamespaceId, listings: Sequence[Listing]) -> dict[SegmentId, Announced]:
        """Returns what is to be announced of segments, of which some may be announced already."""
        found: dict[SegmentId, Announced] = {}
        unreadable: list[SegmentId] = []
        denied: list[PermissionDenied] = []

        def read(listing: Listing) -> None:
            segment, part = listing.segment, listing.record.parts[0]
            payload = payload_name(name, segment, 0)
            try:
                header = read_header(self._cache.payloads, self._cache.keyring, payload, part.nbytes, name)
                keys = [bytes.fromhex(one.key) for one in header.meta.slots]
                found[segment] = self._announced(name, listing.record.depth, keys)
            except (CorruptPayload, UnreadablePayload):
                # The scrubber's to find, or another reader's to read.
                unreadable.append(segment)
            except PermissionDenied as exc:
                denied.append(exc)

        for_each(read, [one for one in listings if (name, one.segment) not in self._view], _JOBS)
        if denied and not found and not len(self._view):
            # None may be read, as it seems. One of them is like a damaged one.
            raise denied[0]
        self._unreadable += len(unreadable) + len(denied)
        # In the order that was asked for, whichever header came first.
        return {one.segment: found[one.segment] for one in listings if one.segment in found}

    def _announced(self, name: NamespaceId, depth: int, keys: Sequence[bytes]) -> Announced:
        """Returns what is to be announced of a segment with these content keys. Raises CorruptPayload."""
        namespace = self._namespaces[name]
        group = int.from_bytes(keys[0][-GROUP_BYTES:], "big") if keys else len(namespace.groups)
        if group >= len(namespace.groups):
            raise CorruptPayload(f"its namespace has no group {group}")
        owner = Owner(name if self._choice.ownership else None, group, namespace.groups[group])
        whole = self._choice.whole_hashes
        return Announced(owner, depth, tuple(hash_of(key[:-GROUP_BYTES], whole=whole) for key in keys))

    # ---- who is told ----------------------------------------------------------------------------

    def _tell(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self._sockets is None or not events:
            return
        for at in range(0, len(events), TOGETHER):
            self._sockets.publish(events[at : at + TOGETHER])
        self._published_at = self._monotonic()

    def _tell_all(self) -> None:
        assert self._sockets is not None, "nobody is told"
        began = self._monotonic()
        self._sockets.subscribed = 0
        self._sockets.publish_snapshot()
        self._published_at = self._snapshot_at = self._monotonic()
        self._snapshot_every_s = max(SNAPSHOT_EVERY_S, (self._snapshot_at - began) / _SNAPSHOT_SHARE)

    def _serve(self, wait_s: float) -> None:
        if self._sockets is None:
            return
        self._tell(self._view.learn(self._sockets.serve(max(0.0, wait_s))))
        now = self._monotonic()
        if self._sockets.subscribed and now - self._snapshot_at >= self._snapshot_every_s:
            # Not every router asks for a replay. Those that were there already are told the same again.
            self._tell_all()
        elif now - self._published_at >= IDLE_S:
            self._sockets.publish(())
            self._published_at = now

    def report(self) -> FeedReport:
        """Returns what it has announced and done."""
        sockets = self._sockets
        kept = (0, 0) if sockets is None else sockets.kept
        return FeedReport(
            model=self._model or "",
            namespaces=tuple(sorted(self._namespaces)),
            segments=len(self._view),
            blocks=self._view.blocks,
            bare_blocks=self._view.bare_blocks,
            told_blocks=len(self._view.told),
            batches=sockets.batches if sockets else 0,
            sent_bytes=sockets.sent_bytes if sockets else 0,
            kept_batches=kept[0],
            kept_bytes=kept[1],
            events=self._events,
            holes=self._holes,
            snapshots=sockets.snapshots if sockets else 0,
            replays=sockets.replays if sockets else 0,
            heard=sockets.heard if sockets else 0,
            unheard=sockets.unheard if sockets else 0,
            unreadable=self._unreadable,
            crowded_out=self._view.crowded_out,
            lag_s=self._lag_s,
            problem=self._problem,
        )
