"""fsck: checks that what the index names exists, is what it says, and is found. `gc` is about the reverse.

check        the checks
entries      the comparison of blocks with entries
repair       the repairs
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.admin.backends import Cache, Refused, UnknownName
from kvstore.admin.described import described
from kvstore.admin.operators import among
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.repair.check import Checked, Depth, FoundFault, IndexCheck, Key, is_vanished
from kvstore.admin.repair.survey import Stock, take_stock
from kvstore.admin.repair.repair import Repairs
from kvstore.admin.repair.reports import FAULT_KINDS, CheckedNamespace, Fault, FaultCount, FsckReport, Mended
from kvstore.admin.reports import NAMED, Ended
from kvstore.admin.selection import chosen, needed_index
from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId, SegmentId
from kvstore.verify.returning import Returns
from schemas.base import redact

#: Rounds of repair and check: a repair may reveal other faults, such as a block whose entry led into a
#: damaged segment.
_ROUNDS = 3
#: If all segments are bad and there are more than this, it is no coincidence.
_FEW = 16


def fsck(
    cache: Cache,
    prefixes: Sequence[str] = (),
    *,
    depth: Depth | None = None,
    repair: bool = False,
    force: bool = False,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
    seed: int | None = None,
) -> FsckReport:
    """Checks the namespaces whose ids start with one of `prefixes`, or all, and with `repair` repairs them.

    Ctrl-C and a backend that does not answer end it: the report says so, and repairs done until then stay.
    Raises UnknownName, Refused without an index, and, with `repair` and without `force`, Refused if so much
    is missing that the payload store is more likely to be the wrong one.
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
    index: FullIndex
    prefixes: tuple[str, ...]
    depth: Depth
    progress: ProgressListener
    clock: Callable[[], float]
    draw: random.Random = field(default_factory=random.Random)
    unusable: set[SegmentId] = field(default_factory=set)
    texts: dict[NamespaceId, str] = field(default_factory=dict)
    ended: Ended = "complete"
    problem: str = ""
    remaining: int | None = None
    #: Results of the first check.
    checked: dict[NamespaceId, Checked] = field(default_factory=dict)
    #: The latest outcome of each fault.
    outcomes: dict[Key, tuple[FoundFault, Mended]] = field(default_factory=dict)

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
        forced = ", by force" if force else ""
        self.cache.record("fsck", f"repair {len(findings)} faults in {among(self.checked)}{forced}")
        for _ in range(_ROUNDS):
            repairs = Repairs(
                self.index,
                self.cache.payloads,
                self.cache.keyring,
                self.cache.settings,
                Returns(self.index, self.cache.evidence),
                self.progress,
                self.clock,
                self.depth.jobs,
                self.outcomes,
                self.unusable,
            )
            repairs.all(findings)
            repairs.reconcile(self.checked)
            if all(finding.kind == "unreadable" for finding in findings):
                return
            after: dict[NamespaceId, Checked] = {}
            # No byte is read again: the first check has read what was drawn, and a repair what it commits.
            self._check(replace(self.depth, percent=0.0), after)
            findings = _findings(after)
            self.remaining = len(findings)

    def _check(self, depth: Depth, into: dict[NamespaceId, Checked]) -> None:
        cache = self.cache
        check = IndexCheck(
            self.index,
            cache.payloads,
            cache.keyring,
            cache.settings,
            Returns(self.index, cache.evidence),
            depth,
            self.progress,
            self.clock,
            self.draw,
            self.unusable,
        )
        # The index is read first: a segment that is committed later is in the listing, or is looked at again.
        self.texts = self.index.namespaces()
        damaged = {account.namespace: account.problem for account in self.index.accounts()}
        stocks = take_stock(cache.payloads, self.progress)
        for name in chosen(self.prefixes, [*{*self.texts, *stocks}]):
            into[name] = found = Checked()
            problem = damaged.get(name, "")
            try:
                check.namespace(name, stocks.get(name) or Stock(), found)
            except DamagedIndex as exc:
                # The others are checked; `reconcile`, which repairs accounts, puts this right first.
                problem = problem or str(exc)
            if problem:
                found.findings.append(FoundFault(name, "accounts", problem))

    def _doubt(self) -> str:
        """Returns why this may be the wrong payload store, or ""."""
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
        found: dict[Key, tuple[FoundFault, Mended]] = {}
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
            leftover_payloads=found.stray_payloads,
            leftover_bytes=found.stray_bytes,
        )


def _findings(checked: dict[NamespaceId, Checked]) -> list[FoundFault]:
    return [finding for each in checked.values() for finding in each.findings]


def _fault(finding: FoundFault, mended: Mended) -> Fault:
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
