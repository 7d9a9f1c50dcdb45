"""What `cache-admin` moved: the reports of export, import and warm. Rules as in schemas.reports."""

from __future__ import annotations

from typing import Literal

from schemas.base import Closed
from schemas.reports import Amount

#: `cancelled`: Ctrl-C. `broken`: the archive can't be read on. `failed`: a backend or a disk did not do
#: what it was asked, and `problem` says which. What was done until then stays done, except that a file
#: that could not be finished is removed.
Ended = Literal["complete", "cancelled", "broken", "failed"]

#: So many segments are named in a report; the number of all of them is in it as well.
NAMED = 100


class Left(Closed):
    """A segment that was left out, and why."""

    namespace: str
    segment: str
    reason: str


class ExportReport(Closed):
    """`cache-admin export`; with `dry_run` nothing was read but the index."""

    dry_run: bool
    ended: Ended
    problem: str
    #: The file, or `-`.
    to: str
    namespaces: tuple[str, ...]
    planned: Amount
    #: What fell to `--max-bytes`.
    beyond: Amount
    exported: Amount
    #: Size of the archive so far.
    archive_bytes: int
    #: Segments that were damaged or gone; `left` names the first of them.
    left_out: int
    left: tuple[Left, ...]
    seconds: float


class ImportReport(Closed):
    """`cache-admin import`; with `dry_run` nothing was written and the index was not asked."""

    dry_run: bool
    ended: Ended
    problem: str
    #: The file, or `-`.
    source: str
    namespaces: tuple[str, ...]
    #: By its manifest. There may be fewer: what was damaged when it was exported.
    announced_segments: int
    found_segments: int
    #: Of the archive, good to the last byte.
    verified: Amount
    imported: Amount
    #: Stored already, this segment or other copies of its blocks.
    present: Amount
    #: Segments that were refused; `left` names the first of them.
    left_out: int
    left: tuple[Left, ...]
    seconds: float


class WarmReport(Closed):
    """`cache-admin warm`; with `dry_run` nothing was fetched."""

    dry_run: bool
    ended: Ended
    problem: str
    #: URL of the fast tier.
    fast: str
    capacity_bytes: int
    #: Of all namespaces, before and after.
    used_before_bytes: int
    used_bytes: int
    namespaces: tuple[str, ...]
    planned: Amount
    #: What fell to the tier's capacity or to `--max-bytes`.
    beyond: Amount
    #: In the fast tier now, those included that were there before.
    warm: Amount
    left_out: int
    left: tuple[Left, ...]
    seconds: float
