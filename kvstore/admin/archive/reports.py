"""Reports of export and import. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from kvstore.admin.inspect.reports import Difference
from kvstore.admin.reports import Amount, Ended, Left
from schemas.base import StrictModel


class PromptLine(StrictModel):
    """One prompt of a pack."""

    name: str
    tokens: int
    blocks: int
    #: Leading tokens that an engine would load now from the store, or, where none is asked, from the archive.
    loadable: int | None = None


class PackReport(StrictModel):
    """The prompts of an archive: what its manifest says, and what became of it."""

    #: Version of kvstore that wrote it, and release of vLLM that computed it.
    version: str
    engine: str
    created_s: int
    namespace: str
    tenant: str
    model: str
    weights: str
    dtype: str
    kv_dtype: str
    tp: int
    pp: int
    #: Id of the key that signed it, as it says itself; "": nothing did.
    key: str
    #: Whether this reader has keys, so that it compared the signature.
    checked: bool = False
    segments: int
    stored_bytes: int
    prompts: tuple[PromptLine, ...]
    #: Whether all that was packed is there, and an engine would load all of each prompt that it can.
    whole: bool = True
    #: Where its namespace differs from the nearest one of the store's engines, unless it is the same.
    differences: tuple[Difference, ...] = ()


class ExportReport(StrictModel):
    """`cache-admin export`; with `dry_run` nothing was read but the index."""

    dry_run: bool
    ended: Ended
    problem: str
    #: The file, or `-`.
    to: str
    namespaces: tuple[str, ...]
    planned: Amount
    #: The amount left out because of `--max-bytes`.
    beyond: Amount
    exported: Amount
    #: Size of the archive so far.
    archive_bytes: int
    #: Segments that were damaged or gone; `left` names the first of them.
    left_out: int
    left: tuple[Left, ...]
    #: With `--prompts`, once it is written.
    pack: PackReport | None = None
    seconds: float


class ImportReport(StrictModel):
    """`cache-admin import`; with `dry_run` nothing was written and the index was not asked."""

    dry_run: bool
    ended: Ended
    problem: str
    #: The file, or `-`.
    source: str
    namespaces: tuple[str, ...]
    #: The number in the manifest. The archive may have fewer: some may have been damaged when it was
    #: exported.
    announced_segments: int
    found_segments: int
    #: The amount in the archive that is good to the last byte.
    verified: Amount
    imported: Amount
    #: The amount that is stored already, as these segments or as other copies of their blocks.
    present: Amount
    #: Segments of other namespaces or tenants than were asked for.
    unwanted: int
    #: Segments that were refused, such as those of namespaces that the store doesn't know; `left` names the
    #: first of them.
    left_out: int
    left: tuple[Left, ...]
    #: (Among those) Segments that are not signed, where that is refused; and those with a key that this
    #: process doesn't have, or of a newer format.
    unsigned: int = 0
    unreadable: int = 0
    #: (Among those) Segments that an erasure here forbids for ever.
    erased: int = 0
    #: (Among those) Segments that the same import may bring a little later.
    later: int = 0
    #: What the archive says of prompts, if it was exported with `--prompts`.
    pack: PackReport | None = None
    seconds: float
