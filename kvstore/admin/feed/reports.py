"""The report of the router feed. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from schemas.base import StrictModel


class FeedReport(StrictModel):
    """What the feed has announced, and what it did since it started."""

    #: The model whose namespaces it reads; "" while no engine has registered one.
    model: str
    namespaces: tuple[str, ...]
    #: What routers are told is stored now. A block in two segments counts twice.
    segments: int
    blocks: int
    #: Blocks announced by their hashes alone: no engine has told of their tokens yet.
    bare_blocks: int
    #: Blocks that engines told of, whether stored or not.
    told_blocks: int
    #: Batches that were published, and their bytes; those kept for replays, and theirs.
    batches: int
    sent_bytes: int
    kept_batches: int
    kept_bytes: int
    #: Events of the index that were read: commits, evictions, invalidations.
    events: int
    #: Holes in the index's rings: all was read again.
    holes: int
    #: Snapshots that were sent, to everybody and as answers; replays that were asked for.
    snapshots: int
    replays: int
    #: Batches of engines' that were read, and that could not be.
    heard: int
    unheard: int
    #: Segments that can't be announced: their headers are gone, damaged, or of keys that are not here.
    unreadable: int
    #: Segments that were taken back because more blocks are stored than the feed may hold.
    crowded_out: int
    #: How old the newest event was when it was published; None: none was yet.
    lag_s: float | None
    #: Why the index or the payload store can't be read now.
    problem: str = ""
