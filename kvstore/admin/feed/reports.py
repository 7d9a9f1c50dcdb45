"""The report of the router feed. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from pydantic import Field

from schemas.base import StrictModel


class FeedReport(StrictModel):
    """What the feed has announced, and what it did since it started."""

    #: The model whose namespaces it reads; "" while no engine has registered one.
    model: str = ""
    namespaces: tuple[str, ...] = Field(description="no model: none has been registered")
    #: What routers are told is stored now. A block in two segments counts twice.
    segments: int = Field(
        title="stored", description="{:segment}, {blocks:block}, {bare_blocks} of them by hash alone"
    )
    blocks: int = Field(title="")
    #: Blocks announced by their hashes alone: no engine has told of their tokens yet.
    bare_blocks: int = Field(title="")
    #: Blocks that engines told of, whether stored or not.
    told_blocks: int = Field(title="heard", description="{:block} in {heard} batches of engines'")
    #: Batches that were published, and their bytes; those kept for replays, and theirs.
    batches: int = Field(title="published", description="{} batches, {sent_bytes}")
    sent_bytes: int = Field(title="")
    kept_batches: int = Field(title="")
    kept_bytes: int = Field(title="")
    #: Events of the index that were read: commits, evictions, invalidations.
    events: int = Field(title="")
    #: Holes in the index's rings: all was read again.
    holes: int = Field(0, description="{}, after which all was read and told again")
    #: Snapshots that were sent, to everybody and as answers; replays that were asked for.
    snapshots: int = Field(title="")
    replays: int = Field(title="answered", description="{:replay}, {snapshots:snapshot}")
    #: Batches of engines' that were read, and that could not be.
    heard: int = Field(title="")
    unheard: int = Field(0, description="{} batches of engines' could not be read")
    #: Segments that can't be announced: their headers are gone, damaged, or of keys that are not here.
    unreadable: int = Field(0, description="{:segment}, which routers are not told of")
    #: Segments that were taken back because more blocks are stored than the feed may hold.
    crowded_out: int = Field(0, title="taken back", description="{:segment}: more is stored than --blocks")
    #: How old the newest event was when it was published; None: none was yet.
    lag_s: float | None = Field(None, title="behind")
    #: Why the index or the payload store can't be read now.
    problem: str = ""
