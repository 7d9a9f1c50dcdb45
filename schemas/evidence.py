"""The object beside the payloads that says what of a namespace may not come back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import MAX_NUMBER, StrictModel

_Time = Annotated[float, Field(ge=0, lt=MAX_NUMBER, allow_inf_nan=False)]
_Salt = Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]


class RefusalsObject(StrictModel):
    """Erasures and invalidations of one namespace. They outlive the index. Times are those of the index's
    clock, unix seconds."""

    format: Literal[1] = 1
    #: Id of a salt in hex, or "" for all of the namespace -> segments created up to this time were erased.
    erased_s: dict[_Salt, _Time]
    #: When the whole namespace was invalidated for the last time; 0: never.
    invalidated_s: _Time
