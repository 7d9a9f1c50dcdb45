"""Reports of the verbs about packs. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from kvstore.admin.archive.reports import ExportReport, ImportReport
from kvstore.admin.inspect.reports import Difference
from schemas.base import StrictModel


class PromptLine(StrictModel):
    """One prompt of a pack."""

    name: str
    tokens: int
    blocks: int
    #: Leading tokens that an engine would load from the store now; None where no store was asked.
    loadable: int | None = None


class PackReport(StrictModel):
    """`cache-admin pack inspect`: what a pack says of itself."""

    source: str
    pack_bytes: int
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
    #: Id of the key that signed it; "": nothing did.
    key: str
    segments: int
    stored_bytes: int
    prompts: tuple[PromptLine, ...]


class PackBuildReport(StrictModel):
    """`cache-admin pack build`."""

    #: What was written; None if it was not finished.
    pack: PackReport | None
    export: ExportReport
    #: How long the engine took, its start included.
    compute_s: float
    seconds: float


class PackVerifyReport(StrictModel):
    """`cache-admin pack verify`: whether all that was packed is there, and good to the last byte."""

    good: bool
    pack: PackReport
    archive: ImportReport


class PackApplyReport(StrictModel):
    """`cache-admin pack apply`."""

    #: Whether all that was packed is there now, and an engine would load all of each prompt that it can.
    whole: bool
    pack: PackReport
    archive: ImportReport
    #: Where the pack's namespace differs from the latest one that engines here use with these weights, unless
    #: it is the same: what is applied is loaded by engines that differ so.
    differences: tuple[Difference, ...]
