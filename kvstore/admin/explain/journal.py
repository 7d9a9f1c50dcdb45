"""What the journal of one namespace says of a block: which segment had it, when it was evicted, why it was
not saved.

The journal names few digests: the first of an evicted segment, the first and the last of a commit, and that
of the first block that was not served for an outcome. From a prompt the digests of all its blocks are known,
so each of these places a whole run of them: `NamespaceJournal.findings` takes a block and the chain that it
is in. For a block alone it finds only what begins with that block. For the rest the index's own entry, which
dangles for a while after an eviction, still says in which segment the block was (`look_for`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.admin.explain.reports import Cause, Finding, Reach, Told
from kvstore.admin.operators import written
from kvstore.admin.progress import ProgressListener
from kvstore.index.contract import is_fault
from kvstore.index.maintenance import Event, FullIndex
from kvstore.index.port import Outcome
from kvstore.keys import DIGEST_BYTES, Digest, NamespaceId, SegmentId
from kvstore.rules.reasons import TOLD_MISSES, TOLD_UNSAVED, sentence
from kvstore.rules.weighed import Weighed
from schemas.settings import Settings

_PAGE = 1000
#: The most entries that are looked through for a block that the journal doesn't know; a minute of Redis' idle
#: time.
SCAN_MOST = 2_000_000

_RULES = {
    "capacity": "evicted to keep the store within its quota (capacity_bytes)",
    "tenant_quota": "evicted to keep its tenant within its quota",
    "namespace_quota": "evicted to keep its namespace within its quota",
    "salt_quota": "evicted to keep what its salt has stored within a quota",
    "bad": "evicted because its payload was missing, failed verification or differed in an audit",
    "abandoned": "evicted because a rank did not write its part",
    "admin": "evicted by an administrator",
    "named": "deleted by name: an operator named its prompt, its request or its session",
    "ttl": "expired: it was older than its time to live",
    "erased": "erased: all that its tenant or its salt had stored was to go",
    "invalidated": "invalidated with all that the namespace held",
    "repair": "taken out by a repair, which found it damaged",
    "joined": "replaced by a longer segment, which was evicted since",
}

_FATES: dict[str, str] = {
    "ended": "its session had ended: what only that had used goes before all else",
    "expired": "it was to be retained until a time that was over, and nobody had used it since",
    "retained": "it was still retained, but all else had gone",
}

_CAUSES: frozenset[str] = frozenset(Cause.__args__)  # type: ignore[attr-defined]


@dataclass
class NamespaceJournal:
    """The journal of one namespace, read from the index when this is made. Raises what the index raises."""

    index: FullIndex
    namespace: NamespaceId
    settings: Settings
    now_s: float
    #: The namespace's time to live; 0: none.
    ttl_s: int = 0
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

    def was_gone(self, finding: Finding, at_s: float) -> bool:
        """Whether what a finding tells of is why a block was missed at a time.

        What goes for its age is missed before somebody evicts it; and what was stored only later can't have
        been too old by then.
        """
        before = finding.at_s is not None and finding.at_s <= at_s
        if finding.rule != "ttl":
            return before
        segment = SegmentId(bytes.fromhex(finding.segment))
        commits = (one.at_s for one in self.events if one.op == "commit" and one.segment == segment)
        made = next(commits, None)
        return before if made is None else made <= at_s and (before or finding.cause == "evicted")

    def reach(self) -> Reach:
        """Returns how far back it goes."""
        # Faults are kept for longer than the rest.
        oldest = min((one.at_s for one in self.outcomes if not is_fault(one)), default=None)
        return Reach(
            namespace=self.namespace,
            events=len(self.events),
            events_since_s=self.events[0].at_s if self.events else None,
            events_complete=len(self.events) < self.settings.journal.events,
            outcomes=len(self.outcomes),
            outcomes_since_s=oldest,
        )

    def look_for(self, wanted: Iterable[Digest], progress: ProgressListener) -> bool:
        """Looks through all entries, dangling ones included, for those of some blocks.

        Returns False, and does nothing, if there are more than SCAN_MOST blocks.
        """
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
        """Returns what is known of block `block` of a chain with these digests, the newest first."""
        place = {name: i for i, name in enumerate(names)}
        found = [*self._departures(place, block), *self._offers(place, block), *self._misses(names[block])]
        found += self._entries(names[block], {one.segment for one in found if one.segment})
        if not any(one.cause in ("evicted", "invalidated", "expired") for one in found):
            found += self._invalidations()
        return sorted(found, key=lambda one: -(one.at_s or 0.0))

    def _departures(self, place: Mapping[Digest, int], block: int) -> Iterator[Finding]:
        """Yields for each segment that had the block how it was evicted or invalidated."""
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
                yield _finding("invalidated", _told(later), later.at_s, "invalidated", event.segment)
                return
        yield from self._by_state(event.segment)

    def _evicted(self, event: Event) -> Finding:
        segment = event.segment or SegmentId(b"")
        found = _finding("evicted", _told(event), event.at_s, str(event.rule or ""), segment)
        return found.model_copy(update={"session": event.session.hex()})

    def _by_state(self, segment: SegmentId) -> Iterator[Finding]:
        """Yields what the index says of a segment whose eviction the journal doesn't know."""
        match self.index.states(self.namespace, [segment])[0]:
            case "bygone":
                yield _finding("invalidated", _RULES["invalidated"], None, "invalidated", segment)
            case "trash":
                yield _finding("evicted", "evicted; by which rule is no longer known", None, "", segment)
            case None:
                text = "evicted and deleted; when and by which rule is no longer known"
                yield _finding("evicted", text, None, "", segment)
            case "visible" if self.ttl_s:
                yield from self._expired(segment)
            case "visible" | "incomplete":
                return

    def _expired(self, segment: SegmentId) -> Iterator[Finding]:
        """Yields since when a segment that is not evicted yet is older than its time to live, if it is."""
        [listing] = self.index.get(self.namespace, [segment])
        over_s = 0 if listing is None else listing.record.created_s + self.ttl_s
        if 0 < over_s <= self.now_s:
            text = f"{_RULES['ttl']} ({self.ttl_s:,} s): it is not served, and a janitor is to evict it"
            yield _finding("expired", text, float(over_s), "ttl", segment)

    def _entries(self, name: Digest, known: set[str]) -> Iterator[Finding]:
        for segment in self._dangling.get(name, ()):
            if segment.hex() in known:
                continue
            if (gone := self._gone.get(segment)) is not None:
                yield self._evicted(gone)
            else:
                yield from self._by_state(segment)

    def _invalidations(self) -> Iterator[Finding]:
        for event in reversed(self.events):
            if event.op == "invalidate":
                text = "all that the namespace held was invalidated; if this was among it is not known"
                text += f" ({written(event.by)} did it)" if event.by else ""
                yield _finding("invalidated", text, event.at_s, "invalidated", SegmentId(b""))
                return

    def _offers(self, place: Mapping[Digest, int], block: int) -> Iterator[Finding]:
        """Yields the block's saves that did not come about, the newest for each reason."""
        seen: set[str] = set()
        for one in self.outcomes:
            at = place.get(Digest(one.missing[:DIGEST_BYTES]))
            if one.op != "save" or one.reason in seen or at is None or not at <= block < at + one.asked:
                continue
            seen.add(one.reason)
            rule, text = self.unsaved(one)
            yield _finding(_cause(one.reason), text, one.at_s, rule, SegmentId(b""), one.request)

    def _misses(self, name: Digest) -> Iterator[Finding]:
        """Yields requests that missed the block though it may have been there, the newest per reason."""
        seen: set[str] = {"absent"}
        for one in self.outcomes:
            if one.op == "save" or one.reason in seen or one.missing[:DIGEST_BYTES] != name:
                continue
            seen.add(one.reason)
            text = f"a request went without: {_missed(one)}"
            yield _finding(_cause(one.reason), text, one.at_s, "", SegmentId(b""), one.request)

    def unsaved(self, one: Outcome) -> tuple[str, str]:
        """Returns the setting that prevented a save ("" if none or unknown), and a sentence."""
        text = sentence(TOLD_UNSAVED, one.reason)
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
        """Returns an outcome in words, without its block."""
        text = self.unsaved(one)[1] if one.op == "save" else _missed(one)
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


def _missed(one: Outcome) -> str:
    """Returns why a block did not come, with what the engine weighed if that was the reason."""
    text, weighed = sentence(TOLD_MISSES, one.reason), Weighed.read(one.detail)
    return text if weighed is None else f"{text}: {weighed}"


def _all(index: FullIndex, namespace: NamespaceId) -> Iterator[Event]:
    after = ""
    while page := index.events(namespace, after=after, limit=_PAGE):
        yield from page
        after = page[-1].position


def _covers(event: Event, place: Mapping[Digest, int], block: int) -> bool:
    """Whether the event's segment had the block, going by the first and the last digest that the event names.

    A chain that has the segment's last block and not its first has no other block of it either.
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


def _told(event: Event) -> str:
    """Returns why something went, and who did it if the journal has a name."""
    rule = str(event.rule or "")
    text = _RULES.get(rule, f"evicted ({rule or 'no rule is given'})")
    if event.fate:
        text += f"; {_FATES.get(event.fate, event.fate)}"
        text += f" (session {event.session.hex()})" if event.session else ""
    return f"{text}; {written(event.by)} did it" if event.by else text
