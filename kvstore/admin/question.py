"""What an explanation is asked of: one cache, its journals, and what has been read of both.

A `Question` answers for single blocks (`block`): what the index has now, what its journal remembers, what
other namespaces have. kvstore.admin.explain asks it about prompts, requests, items and digests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.admin.cache import Cache, UnknownName
from kvstore.admin.inventory import diff
from kvstore.admin.past import SCAN_MOST, Past
from kvstore.admin.payloads import read_part
from kvstore.admin.progress import Progress, Silent
from kvstore.errors import CorruptPayload
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import Digest, NamespaceId, SegmentId
from kvstore.ports import Run
from schemas.explain import Block, Chain, ExplainReport, Finding, Subject, Told
from schemas.records import SegmentRecord

#: Digests looked up with one call.
_STEP = 4096
#: Other namespaces that are asked for what is missing, the most lately registered ones.
OTHERS = 50
#: Outcomes that a report lists.
TOLD = 50


@dataclass
class Question:
    """What all four have in common: the cache, and what has been read of it."""

    cache: Cache
    now_s: float
    verify: bool = False
    progress: Progress = field(default_factory=Silent)
    remarks: list[str] = field(default_factory=list)
    _pasts: dict[NamespaceId, Past] = field(default_factory=dict)
    _texts: dict[NamespaceId, str] = field(default_factory=dict)
    #: Segments that were read: what is wrong with them, "" if nothing.
    _read: dict[tuple[NamespaceId, SegmentId], str] = field(default_factory=dict)
    _others: dict[tuple[NamespaceId, Digest], list[Finding]] = field(default_factory=dict)
    #: Blocks that may have to be looked for among all entries, and those that were.
    _wanted: dict[NamespaceId, set[Digest]] = field(default_factory=lambda: defaultdict(set))
    _searched: dict[NamespaceId, set[Digest]] = field(default_factory=lambda: defaultdict(set))

    @property
    def index(self) -> RedisIndex | SqliteIndex:
        """The index. Raises UnknownName if there is none."""
        if self.cache.index is None:
            raise UnknownName("there is no index yet: the first engine that saves will make it")
        return self.cache.index

    def kinds(self, kind: str, prefix: str | None) -> list[NamespaceId]:
        """The namespaces of a kind that are meant, those registered last first. Raises UnknownName."""
        self._texts = self.cache.namespaces()
        accounts = sorted(self.index.accounts(), key=lambda one: (-one.seen_s, one.namespace))
        if prefix is not None:
            return [self.cache.namespace(prefix)]
        return [one.namespace for one in accounts if kind in ("", one.kind)]

    def text(self, namespace: NamespaceId) -> str:
        """Its JSON."""
        return self._texts.get(namespace) or self.cache.namespaces()[namespace]

    def past(self, namespace: NamespaceId) -> Past:
        """Its journal."""
        if namespace not in self._pasts:
            self._pasts[namespace] = Past(self.index, namespace, self.cache.settings)
        return self._pasts[namespace]

    def present(self, namespace: NamespaceId, names: Sequence[Digest]) -> list[Run | None]:
        """Each block by itself."""
        found: list[Run | None] = []
        for at in range(0, len(names), _STEP):
            found += self.index.find(namespace, b"".join(names[at : at + _STEP]))
        return found

    def wrong(self, namespace: NamespaceId, segment: SegmentId, record: SegmentRecord) -> str:
        """Read a segment's payloads, all ranks', once: what is wrong with them, "" if nothing."""
        if (namespace, segment) not in self._read:
            problem = ""
            self.progress.begin(f"reading segment {segment.hex()}", record.nbytes)
            for rank, part in enumerate(record.parts):
                buffer = memoryview(bytearray(part.nbytes))
                try:
                    read_part(self.cache.payloads, namespace, segment, rank, record, buffer)
                except CorruptPayload as exc:
                    problem = problem or str(exc)
                self.progress.advance(part.nbytes)
            self._read[namespace, segment] = problem
        return self._read[namespace, segment]

    def here(self, namespace: NamespaceId, run: Run | None) -> list[Finding]:
        """What is so now of a block that the index names."""
        if run is None:
            return []
        problem = self.wrong(namespace, run.segment, run.record) if self.verify else ""
        if problem:
            text = f"the index names it, but {problem}; who loads it computes it, and has it evicted"
            cause = "missing" if "missing" in problem else "corrupt"
            return [Finding.model_validate({"cause": cause, "text": text, "segment": run.segment.hex()})]
        verified = ", its payload is whole" if self.verify else ""
        return [Finding(cause="stored", text=f"it is stored{verified}", segment=run.segment.hex())]

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
        """All that is known of block `at` of `names`."""
        past, name = self.past(namespace), names[at]
        findings = self.here(namespace, run)
        known = past.findings(names, at)
        if not findings and not any(one.cause in ("evicted", "invalidated") and one.segment for one in known):
            if not self._search(namespace, name):
                self.remarks.append(
                    f"namespace {namespace} has more than {SCAN_MOST:,} entries, which were not looked "
                    "through for evicted blocks; the journal alone was asked"
                )
            known = past.findings(names, at)
        findings += [*known, *others]
        if not findings or all(one.cause == "elsewhere" for one in findings):
            findings = [_never(past), *findings]
        return Block(
            namespace=namespace,
            group=group,
            block=number,
            token=token,
            digest=name.hex(),
            findings=tuple(findings),
        )

    def want(self, namespace: NamespaceId, name: Digest) -> None:
        """This block will be asked for: all that are wanted are looked for at once."""
        self._wanted[namespace].add(name)

    def _search(self, namespace: NamespaceId, name: Digest) -> bool:
        self.want(namespace, name)
        if name in self._searched[namespace]:
            return True
        self._searched[namespace] |= self._wanted[namespace]
        return self.past(namespace).look_for(self._wanted[namespace], self.progress)

    def others(self, namespace: NamespaceId, kind: str, name: Digest) -> list[Finding]:
        """Other namespaces that have a block or item of this name."""
        if (namespace, name) not in self._others:
            self._others[namespace, name] = [
                self.elsewhere(namespace, other, "has it")
                for other in self.kinds(kind, None)[:OTHERS]
                if other != namespace and self.present(other, [name])[0] is not None
            ]
        return self._others[namespace, name]

    def elsewhere(self, namespace: NamespaceId, other: NamespaceId, what: str) -> Finding:
        """That another namespace has it, and what differs."""
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
        """All of it."""
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
            reach=tuple(past.reach() for name, past in self._pasts.items() if not named or name in named),
            verified=self.verify,
            damaged=sum(bool(problem) for problem in self._read.values()),
            remarks=tuple(dict.fromkeys(self.remarks)),
        )


def _never(past: Past) -> Finding:
    reach = past.reach()
    if not past.settings.journal.events:
        text = "it is not stored; the journal is off (journal.events = 0), so nobody knows if it ever was"
    elif reach.events_complete:
        text = "never stored: no engine has saved it since the journal began"
    else:
        text = "not stored as far back as the journal reaches"
    return Finding(cause="never_stored", text=text, at_s=None)
