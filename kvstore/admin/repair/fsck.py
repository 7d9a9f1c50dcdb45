"""fsck: what the payload store holds beside what the index says, from both sides.

survey       the payloads page by page, with what the index knows of them
waste        what is held, and what nobody needs
check        that what the index names exists, is what it says, and is found
entries      the comparison of blocks with entries
repair       the repairs
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvstore.admin.backends import Cache, Refused, UnknownName
from kvstore.admin.described import described
from kvstore.admin.operators import among
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.repair.check import Checked, Depth, FoundFault, IndexCheck, Key, is_vanished
from kvstore.admin.repair.repair import Repairs
from kvstore.admin.repair.reports import (
    FAULT_KINDS,
    CheckedNamespace,
    Fault,
    FaultCount,
    FsckReport,
    Held,
    Mended,
)
from kvstore.admin.repair.survey import Stock, take_stock
from kvstore.admin.repair.waste import Waste
from kvstore.admin.reports import NAMED, Ended
from kvstore.admin.selection import chosen, needed_index
from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId, SegmentId
from kvstore.rules.lateness import SETTLED_S
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
    apply: bool = False,
    older_than_s: float = 3600.0,
    force: bool = False,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
    seed: int | None = None,
) -> FsckReport:
    """Lists and checks the namespaces whose ids start with one of `prefixes`, or all. With `apply` repairs
    them; where payloads are only listed, deletes waste of at least the age `older_than_s` instead.

    Ctrl-C and a backend that does not answer end it: the report says so, and what was done until then stays.
    Raises UnknownName, Refused without an index, and, with `apply` and without `force`, Refused if so much
    is missing that the payload store is more likely to be the wrong one; where payloads are only listed, if
    the index looks as if it had been lost. Raises ValueError if `older_than_s` is too short.
    """
    if older_than_s < SETTLED_S:
        raise ValueError(
            f"older_than_s = {older_than_s:g}: what is younger than {SETTLED_S:g} s may still be saved"
        )
    depth = depth or Depth()
    if apply or not depth.only_list:
        needed_index(cache)
    run = _Fsck(cache, tuple(prefixes), depth, older_than_s, progress or Silent(), clock)
    if seed is not None:
        run.draw = random.Random(seed)
    began = time.monotonic()
    try:
        run.all(apply=apply, force=force)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled"
    except (Refused, UnknownName):
        raise
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return run.report(applied=apply, seconds=time.monotonic() - began)


@dataclass
class _Fsck:
    cache: Cache
    prefixes: tuple[str, ...]
    depth: Depth
    older_than_s: float
    progress: ProgressListener
    clock: Callable[[], float]
    draw: random.Random = field(default_factory=random.Random)
    unusable: set[SegmentId] = field(default_factory=set)
    texts: dict[NamespaceId, str] = field(default_factory=dict)
    ended: Ended = "complete"
    problem: str = ""
    remaining: int | None = None
    #: The first listing's sums and its waste.
    held: Held | None = None
    waste: Waste | None = None
    #: Results of the first check.
    checked: dict[NamespaceId, Checked] = field(default_factory=dict)
    #: The latest outcome of each fault.
    outcomes: dict[Key, tuple[FoundFault, Mended]] = field(default_factory=dict)

    def all(self, *, apply: bool, force: bool) -> None:
        self._look(self.depth, self.checked)
        forced = ", by force" if force else ""
        if self.depth.only_list:
            assert self.waste is not None
            lost = self.waste.doubt()
            self.problem = self.waste.problem or lost
            if apply:
                if lost and not force:
                    raise Refused(lost)
                self.problem = self.waste.problem
                self.cache.record("fsck", f"delete what nobody needs for {self.older_than_s:.0f} s{forced}")
                self.waste.delete()
                self.problem = self.waste.problem
            return
        findings = _findings(self.checked)
        doubt = self._doubt()
        if not apply:
            self.problem = doubt
            return
        if doubt and not force:
            raise Refused(f"{doubt}; --force repairs all the same")
        self.remaining = len(findings)
        self.cache.record("fsck", f"repair {len(findings)} faults in {among(self.checked)}{forced}")
        self._repair(findings)

    def _repair(self, findings: list[FoundFault]) -> None:
        """Repairs and checks, until nothing more is found."""
        index = needed_index(self.cache)
        for _ in range(_ROUNDS):
            repairs = Repairs(
                self.cache,
                index,
                Returns(index, self.cache.evidence),
                self.progress,
                self.clock,
                self.depth.jobs,
                self.outcomes,
                self.unusable,
            )
            repairs.all(findings)
            repairs.reconcile(self.checked)
            if all(finding.kind == "unreadable" for finding in findings):
                break
            after: dict[NamespaceId, Checked] = {}
            # No byte is read again: the first check has read what was drawn, and a repair what it commits.
            self._look(replace(self.depth, percent=0.0), after)
            findings = _findings(after)
            self.remaining = len(findings)

    def _look(self, depth: Depth, into: dict[NamespaceId, Checked]) -> None:
        """Lists the payloads, and finds waste or checks what the index names."""
        cache, index = self.cache, self.cache.index
        # The index is read first: a segment that is committed later is in the listing, or is looked at again.
        self.texts = cache.namespaces()
        accounts = cache.accounts()
        stocks = take_stock(cache.payloads, self.progress, [prefix.lower() for prefix in self.prefixes])
        known = {*self.texts, *(account.namespace for account in accounts), *stocks}
        names = chosen(self.prefixes, known)
        if self.held is None:
            beside = depth.only_list and not self.prefixes
            self.waste = Waste(cache, index, self.older_than_s, self.progress, self.clock, everything=beside)
            self.waste.look(names, self.texts, accounts, stocks)
            self.held = self.waste.held
        if index is not None and not depth.only_list:
            damaged = {account.namespace: account.problem for account in accounts}
            self._check(index, depth, names, stocks, damaged, into)

    def _check(
        self,
        index: FullIndex,
        depth: Depth,
        names: Sequence[NamespaceId],
        stocks: Mapping[NamespaceId, Stock],
        damaged: Mapping[NamespaceId, str],
        into: dict[NamespaceId, Checked],
    ) -> None:
        cache = self.cache
        check = IndexCheck(
            cache,
            index,
            Returns(index, cache.evidence),
            depth,
            self.progress,
            self.clock,
            self.draw,
            self.unusable,
        )
        for name in names:
            if name not in self.texts and name not in stocks:
                continue
            into[name] = found = Checked()
            problem, stock = damaged.get(name, ""), stocks.get(name) or Stock()
            try:
                check.namespace(name, stock, found)
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

    def report(self, *, applied: bool, seconds: float) -> FsckReport:
        found: dict[Key, tuple[FoundFault, Mended]] = {}
        for finding in _findings(self.checked):
            found[finding.key] = (finding, "none")
        faults = [_fault(finding, mended) for finding, mended in (found | self.outcomes).values()]
        return FsckReport(
            at_s=self.clock(),
            applied=applied,
            depth="list" if self.depth.only_list else "quick" if self.depth.quick else "headers",
            read_data_percent=self.depth.percent,
            ended=self.ended,
            problem=self.problem,
            held=self.held,
            waste=self.waste.report if self.waste is not None and self.depth.only_list else None,
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
