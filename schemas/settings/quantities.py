"""Sizes and times as settings have them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(value: Any) -> Any:
    """Returns the bytes of a size in words: `"32MiB"` -> 33554432. Numbers pass through for pydantic to
    judge.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("not a size; write bytes or a size such as 512MiB, 50GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
