"""Reports of fsck, gc and rebuild. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from typing import Final, Literal, get_args

from pydantic import Field

from kvstore.admin.reports import Amount, Ended, Left
from schemas.base import StrictModel

#: The kinds of faults; FAULTS describes each.
FaultKind = Literal["missing", "damaged", "unreadable", "record", "hidden", "astray", "unlisted", "accounts"]

FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)

FAULTS: Final[dict[FaultKind, str]] = {
    "missing": "a payload is not there",
    "damaged": "a payload is cut short, altered, or another's",
    "unreadable": "the store did not give a payload, or no key here can judge it; left alone",
    "record": "the index says otherwise than its valid payloads, or can't be read",
    "hidden": "blocks of a valid segment that no entry leads to",
    "astray": "entries that lead to another block",
    "unlisted": "a valid and complete segment that the index does not know",
    "accounts": "the recorded usage is not what is there",
}

#: The repair of a fault. `none`: nothing was to be done, or it was gone when it was looked at again.
Mended = Literal["none", "evicted", "listed", "unlinked", "corrected", "failed"]


class Fault(StrictModel):
    """One fault, and what was done about it."""

    namespace: str
    #: "" if it is not about a single segment.
    segment: str = ""
    kind: FaultKind = Field(title="fault")
    #: Number of entries or blocks that it concerns; 0 if it concerns a segment as a whole.
    blocks: int = 0
    detail: str
    mended: Mended = Field(default="none", title="done")


class FaultCount(StrictModel):
    """The number of faults of one kind."""

    kind: FaultKind = Field(title="fault")
    faults: int = Field(title="number")
    blocks: int = 0
    mended: int = 0


class CheckedNamespace(StrictModel):
    """How much was checked in one namespace."""

    id: str
    #: "" if neither the index nor a payload says it.
    kind: str = ""
    model: str = ""
    #: Visible segments, with their payloads' bytes by the index.
    checked: Amount
    #: The part of it of which every byte was read.
    verified: Amount = Field(Amount(), title="verified")
    #: Entries in the index, and how many of them dangle: those are misses, and `gc` sweeps them.
    entries: int
    dangling: int = 0
    #: Stray payloads that can't be used; `gc` deletes them.
    leftover_payloads: int = Field(0, title="leftovers")
    leftover_bytes: int = Field(0, title="size")


class FsckReport(StrictModel):
    """`cache-admin fsck`; without `repair` nothing was changed."""

    at_s: float
    repair: bool
    quick: bool
    read_data_percent: float
    ended: Ended
    problem: str
    namespaces: tuple[CheckedNamespace, ...]
    #: One for each kind that there are faults of.
    counts: tuple[FaultCount, ...]
    #: The first faults.
    faults: tuple[Fault, ...]
    #: Faults that another check found after the repair; None if there was none.
    remaining: int | None
    seconds: float

    @property
    def found(self) -> int:
        """The number of faults."""
        return sum(count.faults for count in self.counts)

    @property
    def mended(self) -> int:
        """The number of faults that were repaired."""
        return sum(count.mended for count in self.counts)


#: `probe`: the probe of a ping that never ended. `temporary`: a payload whose writer died. `upload`: parts of
#: an upload that was never completed. `foreign`: an object that kvstore did not write.
StrayKind = Literal["probe", "temporary", "upload", "foreign"]


class Counted(StrictModel):
    """A number of objects and their bytes. The bytes of unfinished uploads are not known and not counted."""

    objects: int = 0
    stored_bytes: int = 0


class StrayCount(StrictModel):
    """Objects of one kind beside the payloads."""

    kind: StrayKind = Field(title="beside the payloads")
    #: Those that are old enough, and younger ones, which are left alone.
    old: Counted
    young: Counted = Field(Counted(), title="too young")


class CollectedNamespace(StrictModel):
    """The waste of one namespace, before `delete`."""

    id: str
    #: "" if the index does not know the namespace.
    model: str
    #: Stray payloads, which the index does not know in any state, and those too young to be sure of it.
    orphans: Counted
    young: Counted = Field(Counted(), title="too young")
    #: Segments in the trash, and how many of them have had their grace time.
    trashed: int = Field(title="in trash")
    due: int
    #: Invalidated segments that are not in the trash yet.
    bygone: int = Field(0, title="invalidated")
    #: (With `delete`) Payloads deleted from the trash, segments put into it, entries swept, and whether the
    #: accounts had to be corrected.
    reaped: int = 0
    drained: int = 0
    swept: int = 0
    corrected: bool = Field(False, title="accounts corrected")


class GcReport(StrictModel):
    """`cache-admin gc`; without `delete` nothing was changed."""

    at_s: float
    delete: bool = Field(title="")
    older_than_s: float = Field(title="")
    ended: Ended
    problem: str
    namespaces: tuple[CollectedNamespace, ...]
    strays: tuple[StrayCount, ...]
    #: Names of the first foreign objects, which are never touched.
    foreign: tuple[str, ...]
    #: Stray payloads and objects that were deleted. Those that could not be deleted, or were no waste any
    #: more, count as `left_out`.
    deleted: Counted = Field(title="")
    left_out: int = Field(0, title="left", description="{:object}: in use after all")
    seconds: float

    @property
    def waste(self) -> Counted:
        """The objects that are old enough to be deleted."""
        parts = [space.orphans for space in self.namespaces]
        parts += [stray.old for stray in self.strays if stray.kind != "foreign"]
        return Counted(
            objects=sum(part.objects for part in parts), stored_bytes=sum(part.stored_bytes for part in parts)
        )


class RebuiltNamespace(StrictModel):
    """Numbers of one namespace's segments, by what became of them."""

    id: str
    model: str
    #: Segments that have payloads.
    stored: int
    #: Those that the index knew already, in whatever state.
    known: int
    #: Those that this run committed.
    listed: Amount = Field(title="listed")
    #: Those of which some rank's payload is missing.
    incomplete: int = 0
    #: Those that are damaged, have another segment's payload, or are of a version that this one can't read.
    unusable: int = 0
    #: Those that the index did not accept.
    refused: int = 0
    #: (Among `refused`) Those that an erasure forbids for ever.
    erased: int = 0
    #: (Among `unusable`) Those that are not signed, where unsigned ones are refused.
    unsigned: int = 0
    #: Those with a key that this process doesn't have, or of a newer format: they may be good, and were left
    #: alone.
    unreadable: int = 0


class RebuildReport(StrictModel):
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


class ReshardReport(StrictModel):
    """`cache-admin reshard`; nothing was changed unless `applied`."""

    at_s: float
    applied: bool
    ended: Ended
    problem: str
    namespace: str
    model: str
    #: Numbers of shards. `before` is what a reshard began with that this one has finished.
    before: int = Field(title="shards", description="{} -> {after}")
    after: int = Field(title="")
    #: What the namespace held when this began.
    visible: Amount = Field(title="holds")
    #: How often what was new was copied; segments that became visible in the shards after, and entries that
    #: were written.
    rounds: int = Field(title="")
    copied: int = Field(0, description="{:segment}, {entries} entries, {rounds:round}")
    entries: int = Field(title="")
    #: Segments that an older release named, and which nobody finds in several shards: they go by age.
    unfindable: int = Field(
        0,
        title="not found",
        description="{:segment}: an older release named them; they go by age",
    )
    #: Segments that were evicted while they were copied.
    withdrawn: int = Field(0, description="{}: evicted while they were copied")
    seconds: float


class FollowReport(StrictModel):
    """A turn of `cache-admin rebuild --follow`, and what was done since it began."""

    at_s: float
    #: Turns that looked at all payloads, and payloads that notifications named.
    turns: int = Field(title="")
    notified: int = Field(title="")
    #: What was committed since it began, and segments that were evicted since their payloads are gone.
    listed: Amount
    gone: int
    #: Segments of which some payload has not come yet, in the last turn; and all that it did not commit.
    incomplete: int = Field(title="")
    left_out: int = Field(0, description="{} left out, {incomplete} of them incomplete", title="left out")
    #: How long ago the last turn began that ended: what was there by then is in the index, and what was gone
    #: by then is not. None: none has ended.
    behind_s: float | None = None
    #: The age of the youngest segment that was ever committed; None: none was.
    newest_s: float | None = Field(title="")
    #: The longest time from when a segment was made to when it was committed here, of those that came since
    #: the turn before the last one; 0: none did. The first turn finds what is old, and tells none.
    way_s: float = Field(0.0, title="on the way")
    #: Why the last turn did not end, or left in the index what may be gone; or why the last notifications
    #: could not be looked at.
    problem: str = Field(title="")
