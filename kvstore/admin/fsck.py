"""fsck: what the index names is there, is what it says, and is found. `gc` is about the reverse.

checking     what is looked at
mending      what is done about it
entries      blocks, held against entries
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.admin.cache import Cache, UnknownName
from kvstore.admin.checking import Check, Checked, Depth, Finding, Key, is_vanished
from kvstore.admin.exports import Refused
from kvstore.admin.mending import Mending
from kvstore.admin.progress import Progress, Silent
from kvstore.admin.recommit import AnyIndex
from kvstore.admin.stock import Stock, take_stock
from kvstore.admin.targets import chosen, described, needed_index
from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceId, SegmentId
from schemas.base import redact
from schemas.repairs import FAULT_KINDS, CheckedNamespace, Fault, FaultCount, FsckReport, Mended
from schemas.transfers import NAMED, Ended

#: A repair may bring other faults to light, such as a block whose entry led into a damaged segment.
_ROUNDS = 3
#: Of a store that lists nothing at all, so many segments in the index are no coincidence.
_FEW = 16


def fsck(
    cache: Cache,
    prefixes: Sequence[str] = (),
    *,
    depth: Depth | None = None,
    repair: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
    seed: int | None = None,
) -> FsckReport:
    """Check the namespaces whose ids start so (none: all), and mend what is wrong with `repair`.

    Ctrl-C and a backend that does not answer end it: the report says so, and what was mended until then stays
    so. Raises Refused without an index, and, with `repair` and without `force`, if so much is missing that
    the payload store is more likely to be the wrong one; UnknownName.
    """
    index = needed_index(cache)
    run = _Fsck(cache, index, tuple(prefixes), depth or Depth(), progress or Silent(), clock)
    if seed is not None:
        run.draw = random.Random(seed)
    began = time.monotonic()
    try:
        run.all(repair=repair, force=force)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled"
    except (Refused, UnknownName):
        raise
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return run.report(repair=repair, seconds=time.monotonic() - began)


@dataclass
class _Fsck:
    cache: Cache
    index: AnyIndex
    prefixes: tuple[str, ...]
    depth: Depth
    progress: Progress
    clock: Callable[[], float]
    draw: random.Random = field(default_factory=random.Random)
    unusable: set[SegmentId] = field(default_factory=set)
    texts: dict[NamespaceId, str] = field(default_factory=dict)
    ended: Ended = "complete"
    problem: str = ""
    remaining: int | None = None
    #: Of the first check.
    checked: dict[NamespaceId, Checked] = field(default_factory=dict)
    #: What became of findings, the latest of each.
    outcomes: dict[Key, tuple[Finding, Mended]] = field(default_factory=dict)

    def all(self, *, repair: bool, force: bool) -> None:
        self._check(self.depth, self.checked)
        findings = _findings(self.checked)
        doubt = self._doubt()
        if not repair:
            self.problem = doubt
            return
        if doubt and not force:
            raise Refused(f"{doubt}; --force repairs all the same")
        self.remaining = len(findings)
        for _ in range(_ROUNDS):
            mending = Mending(
                self.index,
                self.cache.payloads,
                self.cache.settings,
                self.progress,
                self.clock,
                self.depth.jobs,
                self.outcomes,
                self.unusable,
            )
            mending.all(findings)
            mending.reconcile(self.checked)
            if all(finding.kind == "unreadable" for finding in findings):
                return
            after: dict[NamespaceId, Checked] = {}
            # What was to be read has been read; what a repair lists has been read by then.
            self._check(replace(self.depth, percent=0.0), after)
            findings = _findings(after)
            self.remaining = len(findings)

    def _check(self, depth: Depth, into: dict[NamespaceId, Checked]) -> None:
        cache = self.cache
        check = Check(
            self.index,
            cache.payloads,
            cache.settings,
            depth,
            self.progress,
            self.clock,
            self.draw,
            self.unusable,
        )
        # First the index: what is committed after this has its payloads in the listing or is looked at again.
        self.texts = self.index.namespaces()
        stocks = take_stock(cache.payloads, self.progress)
        for name in chosen(self.prefixes, [*{*self.texts, *stocks}]):
            into[name] = Checked()
            check.namespace(name, stocks.get(name) or Stock(), into[name])

    def _doubt(self) -> str:
        """Why this may be the wrong payload store, if it may."""
        where = redact(self.cache.settings.origin)
        segments = sum(each.checked.segments for each in self.checked.values())
        bad = sum(each.bad_segments for each in self.checked.values())
        for name, each in self.checked.items():
            if is_vanished(each.checked.segments, each.bad_segments):
                segments, bad, where = each.checked.segments, each.bad_segments, f"{name} in {where}"
        if is_vanished(segments, bad) or (bad == segments > _FEW):
            return (
                f"{bad} of {segments} segments of {where} are missing or damaged: a share that isn't "
                "mounted, a wrong prefix or another index's payloads are likelier than that"
            )
        return ""

    def report(self, *, repair: bool, seconds: float) -> FsckReport:
        found: dict[Key, tuple[Finding, Mended]] = {}
        for finding in _findings(self.checked):
            found[finding.key] = (finding, "none")
        faults = [_fault(finding, mended) for finding, mended in (found | self.outcomes).values()]
        return FsckReport(
            at_s=self.clock(),
            repair=repair,
            quick=self.depth.quick,
            read_data_percent=self.depth.percent,
            ended=self.ended,
            problem=self.problem,
            namespaces=tuple(self._namespace(name, each) for name, each in self.checked.items()),
            counts=tuple(_counts(faults)),
            faults=tuple(faults[:NAMED]),
            remaining=self.remaining,
            seconds=seconds,
        )

    def _namespace(self, name: NamespaceId, found: Checked) -> CheckedNamespace:
        kind, model = described(self.texts.get(name))
        return CheckedNamespace(
            id=name,
            kind=kind,
            model=model,
            checked=found.checked.amount,
            verified=found.verified.amount,
            entries=found.entries,
            dangling=found.dangling,
            leftover_payloads=found.leftover_payloads,
            leftover_bytes=found.leftover_bytes,
        )


def _findings(checked: dict[NamespaceId, Checked]) -> list[Finding]:
    return [finding for each in checked.values() for finding in each.findings]


def _fault(finding: Finding, mended: Mended) -> Fault:
    return Fault(
        namespace=finding.namespace,
        segment=finding.segment.hex() if finding.segment is not None else "",
        kind=finding.kind,
        blocks=finding.blocks,
        detail=finding.detail,
        mended=mended,
    )


def _counts(faults: Sequence[Fault]) -> list[FaultCount]:
    found, blocks = Counter[str](), Counter[str]()
    mended = Counter[str]()
    for fault in faults:
        found[fault.kind] += 1
        blocks[fault.kind] += fault.blocks
        mended[fault.kind] += fault.mended not in ("none", "failed")
    return [
        FaultCount(kind=kind, faults=found[kind], blocks=blocks[kind], mended=mended[kind])
        for kind in FAULT_KINDS
        if found[kind]
    ]
