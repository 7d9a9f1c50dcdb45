"""The lookups of an explanation: one cache, the journals of its namespaces, and what has been read of both.

A `Lookup` answers for single blocks (`block`): what the index has now, what its journal remembers, what
other namespaces have. kvstore.admin.explain.explain asks it about prompts, requests, items and digests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.explain.journal import SCAN_MOST, NamespaceJournal
from kvstore.admin.explain.reports import Block, Chain, ExplainReport, Finding, Subject, Told
from kvstore.admin.inspect.namespaces import diff
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.errors import CorruptPayload, UnreadablePayload
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import Run
from kvstore.index.sessions import SessionListing
from kvstore.keys import NO_SESSION, Digest, NamespaceId, SegmentId, SessionId, payload_name
from kvstore.store.failures import miss_reason
from kvstore.verify.payloads import promised_header, verify_slots
from schemas.records import SegmentRecord

_Problem = CorruptPayload | UnreadablePayload

#: Causes that say what became of a segment that had the block.
_LOST = ("evicted", "invalidated", "expired")
#: Digests looked up with one call.
_STEP = 4096
#: How many other namespaces are asked for what is missing, those registered last.
OTHERS = 50
#: The most outcomes that a report lists.
TOLD = 50


@dataclass
class Lookup:
    """What the four kinds of explanations share: the cache, and what has been read of it."""

    cache: Cache
    now_s: float
    verify: bool = False
    progress: ProgressListener = field(default_factory=Silent)
    remarks: list[str] = field(default_factory=list)
    _journals: dict[NamespaceId, NamespaceJournal] = field(default_factory=dict)
    _texts: dict[NamespaceId, str] = field(default_factory=dict)
    #: What is wrong with each segment that was read; None: nothing.
    _read: dict[tuple[NamespaceId, SegmentId], _Problem | None] = field(default_factory=dict)
    _others: dict[tuple[NamespaceId, Digest], list[Finding]] = field(default_factory=dict)
    #: Blocks that may have to be looked for among all entries, and those that have been.
    _wanted: dict[NamespaceId, set[Digest]] = field(default_factory=lambda: defaultdict(set))
    _searched: dict[NamespaceId, set[Digest]] = field(default_factory=lambda: defaultdict(set))

    @property
    def index(self) -> FullIndex:
        """The index. Raises UnknownName if there is none."""
        if self.cache.index is None:
            raise UnknownName("there is no index yet: the first engine that saves will make it")
        return self.cache.index

    def kinds(self, kind: str, prefix: str | None) -> list[NamespaceId]:
        """Returns the namespace that starts with `prefix`, or all of a kind, those registered last first.

        Raises UnknownName.
        """
        self._texts = self.cache.namespaces()
        accounts = sorted(self.index.accounts(), key=lambda one: (-one.seen_s, one.namespace))
        if prefix is not None:
            return [self.cache.namespace(prefix)]
        return [one.namespace for one in accounts if kind in ("", one.kind)]

    def text(self, namespace: NamespaceId) -> str:
        """Returns the namespace's JSON."""
        return self._texts.get(namespace) or self.cache.namespaces()[namespace]

    def journal(self, namespace: NamespaceId) -> NamespaceJournal:
        """Returns the namespace's journal, which is read once."""
        if namespace not in self._journals:
            [ttl_s] = [one.ttl_s for one in self.cache.accounts(namespace)] or [0]
            self._journals[namespace] = NamespaceJournal(
                self.index, namespace, self.cache.settings, self.now_s, ttl_s
            )
        return self._journals[namespace]

    def present(self, namespace: NamespaceId, names: Sequence[Digest]) -> list[Run | None]:
        """Returns for each block, looked up by itself, where it is stored."""
        found: list[Run | None] = []
        for at in range(0, len(names), _STEP):
            found += self.index.find(namespace, b"".join(names[at : at + _STEP]))
        return found

    def wrong(self, namespace: NamespaceId, segment: SegmentId, record: SegmentRecord) -> _Problem | None:
        """Reads all payloads of a segment, once, and returns what is wrong with the first bad one."""
        if (namespace, segment) not in self._read:
            problem: _Problem | None = None
            payloads, keyring = self.cache.payloads, self.cache.keyring
            self.progress.begin(f"reading segment {segment.hex()}", record.nbytes)
            for rank, part in enumerate(record.parts):
                try:
                    header = promised_header(payloads, keyring, namespace, segment, rank, record)
                    verify_slots(payloads, payload_name(namespace, segment, rank), header)
                except (CorruptPayload, UnreadablePayload) as exc:
                    problem = problem or exc
                self.progress.advance(part.nbytes)
            self._read[namespace, segment] = problem
        return self._read[namespace, segment]

    def here(self, namespace: NamespaceId, run: Run | None) -> list[Finding]:
        """Returns the present state of a block that the index names; nothing if it names none."""
        if run is None:
            return []
        problem = self.wrong(namespace, run.segment, run.record) if self.verify else None
        if problem is not None:
            left = isinstance(problem, UnreadablePayload)
            then = "leaves it where it is" if left else "has it evicted"
            text = f"the index names it, but {problem}; the next load of it computes it and {then}"
            return [
                Finding.model_validate(
                    {"cause": miss_reason(problem), "text": text, "segment": run.segment.hex()}
                )
            ]
        text = f"it is stored{', its payload is whole' if self.verify else ''}"
        [owned] = self.owners(namespace, [run.segment])
        if owned is not None:
            text += f"; only session {owned.session.hex()} has used it{self.fate(owned)}"
        session = "" if owned is None else owned.session.hex()
        return [Finding(cause="stored", text=text, segment=run.segment.hex(), session=session)]

    def owners(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SessionListing | None]:
        """Returns for each segment the session whose own it is; None if there is none."""
        names = [
            one
            for at in range(0, len(segments), _STEP)
            for one in self.index.owners(namespace, segments[at : at + _STEP])
        ]
        known: dict[SessionId, SessionListing | None] = {NO_SESSION: None}
        wanted = [one for one in dict.fromkeys(names) if one]
        for at in range(0, len(wanted), _STEP):
            some = wanted[at : at + _STEP]
            known.update(zip(some, self.index.find_sessions(namespace, some), strict=True))
        return [known[one] for one in names]

    def fate(self, session: SessionListing) -> str:
        """Returns what a session's state means for what it has used, as the end of a sentence."""
        if session.state == "ended":
            return ", which has ended: that goes before all else"
        if session.state == "retained":
            return f", which retains that for {max(0, session.until_s - self.now_s):.0f} s more"
        return ""

    def block(
        self,
        namespace: NamespaceId,
        names: Sequence[Digest],
        at: int,
        run: Run | None,
        *,
        group: int = 0,
        number: int | None = None,
        token: int | None = None,
        others: Sequence[Finding] = (),
    ) -> Block:
        """Returns all that is known of block `at` of `names`."""
        journal, name = self.journal(namespace), names[at]
        findings = self.here(namespace, run)
        known = journal.findings(names, at)
        if not findings and not any(one.cause in _LOST and one.segment for one in known):
            if not self._search(namespace, name):
                self.remarks.append(
                    f"namespace {namespace} has more than {SCAN_MOST:,} entries, which were not looked "
                    "through for evicted blocks; the journal alone was asked"
                )
            known = journal.findings(names, at)
        findings += [*known, *others]
        if not findings or all(one.cause == "elsewhere" for one in findings):
            findings = [_never(journal), *findings]
        return Block(
            namespace=namespace,
            group=group,
            block=number,
            token=token,
            digest=name.hex(),
            findings=tuple(findings),
        )

    def want(self, namespace: NamespaceId, name: Digest) -> None:
        """Notes that this block will be asked for: all noted blocks are looked for at once."""
        self._wanted[namespace].add(name)

    def _search(self, namespace: NamespaceId, name: Digest) -> bool:
        self.want(namespace, name)
        if name in self._searched[namespace]:
            return True
        self._searched[namespace] |= self._wanted[namespace]
        return self.journal(namespace).look_for(self._wanted[namespace], self.progress)

    def others(self, namespace: NamespaceId, kind: str, name: Digest) -> list[Finding]:
        """Returns the other namespaces that have a block or item with this digest."""
        if (namespace, name) not in self._others:
            self._others[namespace, name] = [
                self.elsewhere(namespace, other, "has it")
                for other in self.kinds(kind, None)[:OTHERS]
                if other != namespace and self.present(other, [name])[0] is not None
            ]
        return self._others[namespace, name]

    def elsewhere(self, namespace: NamespaceId, other: NamespaceId, what: str) -> Finding:
        """Returns a finding that another namespace has the block, and in what the two namespaces differ."""
        differences = diff(self.cache, namespace, other).differences
        fields = ", ".join(one.path for one in differences)
        return Finding(
            cause="elsewhere",
            text=f"namespace {other} {what}; the two differ in {fields}",
            namespace=other,
            differences=differences,
        )

    def report(
        self,
        subject: Subject,
        name: str,
        *,
        chain: Chain | None = None,
        blocks: Sequence[Block] = (),
        told: Sequence[Told] = (),
    ) -> ExplainReport:
        """Returns the report, with the newest outcomes of `told`."""
        told = sorted(told, key=lambda one: -one.at_s)
        named = {one.namespace for one in blocks} | {one.namespace for one in told}
        if chain is not None:
            named.add(chain.namespace)
        if len(told) > TOLD:
            self.remarks.append(f"the newest {TOLD} of {len(told)} outcomes are listed")
        return ExplainReport(
            at_s=self.now_s,
            subject=subject,
            name=name,
            chain=chain,
            blocks=tuple(blocks),
            told=tuple(told[:TOLD]),
            reach=tuple(
                journal.reach() for name, journal in self._journals.items() if not named or name in named
            ),
            verified=self.verify,
            damaged=sum(bool(problem) for problem in self._read.values()),
            remarks=tuple(dict.fromkeys(self.remarks)),
        )


def _never(journal: NamespaceJournal) -> Finding:
    reach = journal.reach()
    if not journal.settings.journal.events:
        text = "it is not stored; the journal is off (journal.events = 0), so nobody knows if it ever was"
    elif reach.events_complete:
        text = "never stored: no engine has saved it since the journal began"
    else:
        text = "not stored as far back as the journal reaches"
    return Finding(cause="never_stored", text=text, at_s=None)
