"""What the journal of one namespace says of a block: who had it, when it went, why it was not saved.

The journal names few digests: of an eviction the segment's first, of a commit the first and the last, of an
outcome that of the first block that was not served. Who knows a prompt knows the names of all its blocks, so
each of these places a whole run of them: `Past.findings` is asked for a block and the chain that it is in.
Of a block alone it finds what begins with it; for the rest the index's own entry, which dangles for a while
after an eviction, still says in which segment the block was (`dangling`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.admin.progress import Progress
from kvstore.catalogue import Event, Maintenance
from kvstore.keys import DIGEST_BYTES, Digest, NamespaceId, SegmentId
from kvstore.ports import Outcome
from schemas.explain import Cause, Finding, Reach, Told
from schemas.settings import Settings

_PAGE = 1000
#: Entries that are looked through for a block that the journal doesn't know; a minute of Redis' idle time.
SCAN_MOST = 2_000_000

_RULES = {
    "capacity": "evicted to keep the store within its quota (capacity_bytes)",
    "tenant_quota": "evicted to keep its tenant within its quota",
    "namespace_quota": "evicted to keep its namespace within its quota",
    "bad": "evicted because its payload was missing or failed verification",
    "abandoned": "evicted because a rank did not write its part",
    "admin": "evicted by an administrator",
    "invalidated": "invalidated with all that the namespace held",
    "repair": "taken out by a repair, which found it damaged",
}

#: Of match and load outcomes.
MISSES: Mapping[str, str] = {
    "absent": "the index had no entry for it",
    "below_threshold": "it was there, but less than kv.min_load_blocks beyond what the engine had itself",
    "breaker_open": "the engine was not asking: the index or the payloads had failed repeatedly just before",
    "deadline": "the index or a read took longer than its deadline",
    "unavailable": "the index or the payloads failed",
    "throttled": "the backend asked for fewer calls",
    "permission": "the backend refused",
    "capacity": "the engine had no queue space or staging memory for it",
    "closed": "the engine was shutting down",
    "error": "an unexpected error; the engine's log has it",
    "corrupt": "its payload failed verification",
    "missing": "its payload was not there",
    "mismatch": "what is stored under this name is not of the size that the request expects",
    "namespace_mismatch": "it belongs to another layout, or to weights that the engine no longer has",
    "quarantined": "the engine had seen its segment fail verification before",
    "window": "a window or a state that other layers need at that place was not there",
}

#: Of save outcomes.
UNSAVED: Mapping[str, str] = {
    "not_admitted": "the admission settings kept it out",
    "held": "not saved: another engine had claimed it, and was to save it",
    "dropped": "not saved: the engine's queue or staging memory was full",
    "failed": "not saved: the index or the payloads failed",
    "deadline": "not saved: it was not known in time if a request had asked for it before (second_use)",
    "refused": "not saved: its commit was refused, since ranks disagreed or it was evicted meanwhile",
}
_CAUSES: frozenset[str] = frozenset(Cause.__args__)  # type: ignore[attr-defined]


@dataclass
class Past:
    """Of one namespace; read when it is made. Raises what the index raises."""

    index: Maintenance
    namespace: NamespaceId
    settings: Settings
    events: list[Event] = field(init=False)
    #: The newest first.
    outcomes: list[Outcome] = field(init=False)
    _gone: dict[SegmentId, Event] = field(init=False)
    _dangling: dict[Digest, set[SegmentId]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.events = list(_all(self.index, self.namespace))
        # A ring may hold somewhat more than it is set to.
        self.outcomes = self.index.outcomes(self.namespace, 2 * self.settings.journal.outcomes + _PAGE)
        self._gone = {
            one.segment: one for one in self.events if one.op == "evict" and one.segment is not None
        }

    def reach(self) -> Reach:
        """How far back it goes."""
        oldest = min((one.at_s for one in self.outcomes), default=None)
        return Reach(
            namespace=self.namespace,
            events=len(self.events),
            events_since_s=self.events[0].at_s if self.events else None,
            events_complete=len(self.events) < self.settings.journal.events,
            outcomes=len(self.outcomes),
            outcomes_since_s=oldest,
        )

    def look_for(self, wanted: Iterable[Digest], progress: Progress) -> bool:
        """Look through all entries for those of some blocks, dangling ones included. False if there are too
        many."""
        looked = set(wanted)
        if self.index.usage(self.namespace).blocks > SCAN_MOST:
            return False
        progress.begin(f"looking through the entries of namespace {self.namespace}")
        for entry in self.index.entries(self.namespace):
            progress.advance(DIGEST_BYTES)
            if entry.digest in looked:
                self._dangling[entry.digest].add(entry.segment)
        return True

    def findings(self, names: Sequence[Digest], block: int) -> list[Finding]:
        """What is known of block `block` of a chain with these names, the newest first."""
        place = {name: i for i, name in enumerate(names)}
        found = [*self._departures(place, block), *self._offers(place, block), *self._misses(names[block])]
        found += self._entries(names[block], {one.segment for one in found if one.segment})
        if not any(one.cause in ("evicted", "invalidated") for one in found):
            found += self._wholesale()
        return sorted(found, key=lambda one: -(one.at_s or 0.0))

    def _departures(self, place: Mapping[Digest, int], block: int) -> Iterator[Finding]:
        """Segments that had the block, and how they went."""
        seen: set[SegmentId] = set()
        for event in reversed(self.events):
            if event.segment is None or event.segment in seen or not _covers(event, place, block):
                continue
            seen.add(event.segment)
            yield from self._departure(event)

    def _departure(self, event: Event) -> Iterator[Finding]:
        assert event.segment is not None
        if (gone := self._gone.get(event.segment)) is not None:
            yield self._evicted(gone)
            return
        for later in self.events:
            if later.op == "invalidate" and later.at_s >= event.at_s:
                yield _finding("invalidated", _RULES["invalidated"], later.at_s, "invalidated", event.segment)
                return
        yield from self._by_state(event.segment)

    def _evicted(self, event: Event) -> Finding:
        segment = event.segment or SegmentId(b"")
        rule = str(event.rule or "")
        text = _RULES.get(rule, f"evicted ({rule or 'no rule is given'})")
        return _finding("evicted", text, event.at_s, rule, segment)

    def _by_state(self, segment: SegmentId) -> Iterator[Finding]:
        """A segment whose end the journal doesn't know."""
        match self.index.states(self.namespace, [segment])[0]:
            case "bygone":
                yield _finding("invalidated", _RULES["invalidated"], None, "invalidated", segment)
            case "trash":
                yield _finding("evicted", "evicted; by which rule is no longer known", None, "", segment)
            case None:
                text = "evicted and deleted; when and by which rule is no longer known"
                yield _finding("evicted", text, None, "", segment)
            case "visible" | "incomplete":
                return

    def _entries(self, name: Digest, known: set[str]) -> Iterator[Finding]:
        for segment in self._dangling.get(name, ()):
            if segment.hex() in known:
                continue
            if (gone := self._gone.get(segment)) is not None:
                yield self._evicted(gone)
            else:
                yield from self._by_state(segment)

    def _wholesale(self) -> Iterator[Finding]:
        for event in reversed(self.events):
            if event.op == "invalidate":
                text = "all that the namespace held was invalidated; if this was among it is not known"
                yield _finding("invalidated", text, event.at_s, "invalidated", SegmentId(b""))
                return

    def _offers(self, place: Mapping[Digest, int], block: int) -> Iterator[Finding]:
        """Saves that did not come about; of each kind the newest."""
        seen: set[str] = set()
        for one in self.outcomes:
            at = place.get(Digest(one.missing[:DIGEST_BYTES]))
            if one.op != "save" or one.reason in seen or at is None or not at <= block < at + one.asked:
                continue
            seen.add(one.reason)
            rule, text = self.unsaved(one)
            yield _finding(_cause(one.reason), text, one.at_s, rule, SegmentId(b""), one.request)

    def _misses(self, name: Digest) -> Iterator[Finding]:
        """Requests that did not get it though it may have been there; of each kind the newest."""
        seen: set[str] = {"absent"}
        for one in self.outcomes:
            if one.op == "save" or one.reason in seen or one.missing[:DIGEST_BYTES] != name:
                continue
            seen.add(one.reason)
            text = f"a request went without: {MISSES.get(one.reason, one.reason)}"
            yield _finding(_cause(one.reason), text, one.at_s, "", SegmentId(b""), one.request)

    def unsaved(self, one: Outcome) -> tuple[str, str]:
        """Of a save that did not come about: the setting, if it is one and can be told, and a sentence."""
        text = UNSAVED.get(one.reason, one.reason)
        if one.reason != "not_admitted":
            return "", text
        admission = self.settings.admission
        if one.position == 0 and one.asked < admission.min_blocks:
            few = f"its prompt has fewer full blocks than admission.min_blocks = {admission.min_blocks}"
            return "min_blocks", f"{text}: {few}"
        if admission.second_use:
            return "second_use", f"{text}: no request had asked for it before (admission.second_use)"
        unknown = "its prompt was too short (min_blocks) or new (second_use); these settings say neither"
        return "", f"{text}: {unknown}"

    def told(self, one: Outcome) -> Told:
        """An outcome in words, without its block."""
        text = self.unsaved(one)[1] if one.op == "save" else MISSES.get(one.reason, one.reason)
        return Told(
            namespace=self.namespace,
            at_s=one.at_s,
            request=one.request,
            op=one.op,
            asked=one.asked,
            served=one.served,
            reason=one.reason,
            position=one.position,
            text=text,
        )


def _all(index: Maintenance, namespace: NamespaceId) -> Iterator[Event]:
    after = ""
    while page := index.events(namespace, after=after, limit=_PAGE):
        yield from page
        after = page[-1].position


def _covers(event: Event, place: Mapping[Digest, int], block: int) -> bool:
    """Whether the event's segment had the block, by what it says of its own blocks.

    Who knows the name of its last block and not that of its first knows no other block of it either.
    """
    if event.first is not None and (at := place.get(event.first)) is not None:
        return at <= block < at + event.slots
    if event.last is not None and (at := place.get(event.last)) is not None:
        return at == block
    return False


def _cause(reason: str) -> Cause:
    # An engine of another version may have reasons of its own.
    return reason if reason in _CAUSES else "error"  # type: ignore[return-value]


def _finding(
    cause: Cause, text: str, at_s: float | None, rule: str, segment: SegmentId, request: str = ""
) -> Finding:
    return Finding(cause=cause, text=text, at_s=at_s, rule=rule, segment=segment.hex(), request=request)
