"""Reports of doctor and vllm-config. The rules are those of kvstore.admin.reports."""

from __future__ import annotations

from typing import Any, Literal

from schemas.base import StrictModel

CheckState = Literal["ok", "warning", "problem"]


class Check(StrictModel):
    """The result of one check of `doctor`."""

    name: str
    state: CheckState
    found: str
    #: What to do about it; "" if nothing is to be done.
    advice: str = ""


class DoctorReport(StrictModel):
    """`cache-admin doctor`; `state` is the worst state of all checks."""

    version: str
    index: str
    payloads: str
    fast: str | None = None
    state: CheckState
    checks: tuple[Check, ...]


class VllmConfigReport(StrictModel):
    """`cache-admin vllm-config`: arguments of `vllm.LLM` and, as JSON, values of `vllm serve` flags."""

    kv_transfer_config: dict[str, Any] | None
    ec_transfer_config: dict[str, Any] | None
    #: Sentences about what else must be done, such as setting a password's environment variable.
    notes: tuple[str, ...]
