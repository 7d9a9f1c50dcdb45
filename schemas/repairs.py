"""What `cache-admin` found and mended: the reports of fsck, gc, rebuild, drop and invalidate. Rules as in
schemas.reports.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from schemas.base import Closed
from schemas.reports import Amount
from schemas.transfers import Ended, Left

#: What may be wrong with what the index names. See FAULTS.
FaultKind = Literal["missing", "damaged", "unreadable", "record", "hidden", "astray", "unlisted", "accounts"]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
FAULTS: Final[dict[FaultKind, str]] = {
    "missing": "a payload is not there",
    "damaged": "a payload is cut short, altered, or another's",
    "unreadable": "the store did not give a payload, and may give it later; left alone",
    "record": "the index says otherwise than its valid payloads, or can't be read",
    "hidden": "blocks of a valid segment that no entry leads to",
    "astray": "entries that lead to another block",
    "unlisted": "a valid and complete segment that the index does not know",
    "accounts": "the recorded usage is not what is there",
}
#: What was done about a fault. `none`: nothing was to be done, or it had passed when it was looked at again.
Mended = Literal["none", "evicted", "listed", "unlinked", "corrected", "failed"]


class Fault(Closed):
    """One fault, and what was done about it."""

    namespace: str
    #: "" where it is none of one segment.
    segment: str = ""
    kind: FaultKind
    #: Entries or blocks that it is about; 0 where it is about a segment as a whole.
    blocks: int = 0
    detail: str
    mended: Mended = "none"


class FaultCount(Closed):
    """All faults of one kind."""

    kind: FaultKind
    faults: int
    blocks: int = 0
    mended: int = 0


class CheckedNamespace(Closed):
    """What was looked at in one namespace."""

    id: str
    #: "" where neither the index nor a payload says it.
    kind: str
    model: str
    #: Visible segments, with their payloads' bytes by the index.
    checked: Amount
    #: Of them, those whose every byte was read.
    verified: Amount
    #: Entries in the index, and of them those that lead to nothing: misses, which `gc` sweeps.
    entries: int
    dangling: int
    #: Payloads that nobody names and that can't be used; `gc` deletes them.
    leftover_payloads: int
    leftover_bytes: int


class FsckReport(Closed):
    """`cache-admin fsck`; without `repair` nothing was changed."""

    at_s: float
    repair: bool
    quick: bool
    read_data_percent: float
    ended: Ended
    problem: str
    namespaces: tuple[CheckedNamespace, ...]
    #: Of every kind, those without faults left out.
    counts: tuple[FaultCount, ...]
    #: The first of them.
    faults: tuple[Fault, ...]
    #: Faults that another check found after the repair; None if there was none.
    remaining: int | None
    seconds: float

    @property
    def found(self) -> int:
        """How many faults there were."""
        return sum(count.faults for count in self.counts)

    @property
    def mended(self) -> int:
        """How many of them were mended."""
        return sum(count.mended for count in self.counts)


#: `probe`: of a ping that never ended. `temporary`: a payload whose writer died. `upload`: parts of an upload
#: that was never completed. `foreign`: none of ours.
StrayKind = Literal["probe", "temporary", "upload", "foreign"]


class Counted(Closed):
    """Objects and their bytes; of unfinished uploads the bytes are not known."""

    objects: int = 0
    stored_bytes: int = 0


class StrayCount(Closed):
    """Objects of one kind beside the payloads."""

    kind: StrayKind
    #: Old enough, and younger ones, which are left alone.
    old: Counted
    young: Counted


class CollectedNamespace(Closed):
    """What of one namespace is waste, or was."""

    id: str
    #: "" if the index does not know the namespace.
    model: str
    #: Payloads that the index does not know in any state, and those too young to be sure of it.
    orphans: Counted
    young: Counted
    #: Segments evicted and not deleted yet, and of them those whose grace time has passed.
    trashed: int
    due: int
    #: Invalidated segments that are not in the trash yet.
    bygone: int
    #: With `delete`: payloads deleted from the trash, segments put into it, entries swept, and whether the
    #: accounts had to be corrected.
    reaped: int = 0
    drained: int = 0
    swept: int = 0
    corrected: bool = False


class GcReport(Closed):
    """`cache-admin gc`; without `delete` nothing was changed."""

    at_s: float
    delete: bool
    older_than_s: float
    ended: Ended
    problem: str
    namespaces: tuple[CollectedNamespace, ...]
    strays: tuple[StrayCount, ...]
    #: Names of the first foreign objects, which are never touched.
    foreign: tuple[str, ...]
    #: Orphans and strays that were deleted; what could not be, or was no waste any more, is `left_out`.
    deleted: Counted
    left_out: int
    seconds: float

    @property
    def waste(self) -> Counted:
        """All that is old enough to be deleted."""
        parts = [space.orphans for space in self.namespaces]
        parts += [stray.old for stray in self.strays if stray.kind != "foreign"]
        return Counted(
            objects=sum(part.objects for part in parts), stored_bytes=sum(part.stored_bytes for part in parts)
        )


class RebuiltNamespace(Closed):
    """What was committed again of one namespace."""

    id: str
    model: str
    #: Segments that have payloads.
    stored: int
    #: Known to the index already, in whatever state.
    known: int
    #: Committed by this run.
    listed: Amount
    #: Some rank's payload is not there.
    incomplete: int
    #: Damaged, another's under our name, or of a version that this one can't read.
    unusable: int
    #: The index did not take them.
    refused: int


class RebuildReport(Closed):
    """`cache-admin rebuild`; with `dry_run` nothing was changed."""

    at_s: float
    dry_run: bool
    ended: Ended
    problem: str
    namespaces: tuple[RebuiltNamespace, ...]
    #: Payloads of segments that were not committed; `left` names the first of them.
    left_out: int
    left: tuple[Left, ...]
    seconds: float


class InvalidateReport(Closed):
    """`cache-admin invalidate`; without `applied` nothing was changed."""

    applied: bool
    namespace: str
    model: str
    #: What can be matched, or could be.
    visible: Amount


#: `kept`: nothing was changed. `waiting`: invisible; payloads that may still be read by a load are deleted
#: after the grace time, and the next drop forgets the namespace. `in_use`: an engine has stored
#: something since.
DropState = Literal["kept", "waiting", "in_use", "erased"]


class DropReport(Closed):
    """`cache-admin drop`; without `applied` nothing was changed."""

    at_s: float
    applied: bool
    #: Without a grace time.
    now: bool
    namespace: str
    kind: str
    model: str
    tenant: str
    visible: Amount
    trashed: int
    bygone: int
    #: When an engine registered it last; None: never since the index keeps that.
    seen_s: float | None
    state: DropState
    #: What this run did.
    invalidated: int
    deleted_payloads: int
    #: When the last payload may be deleted, if some still wait.
    due_s: float | None
