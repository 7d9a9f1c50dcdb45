"""What everything here is made of: the one error, codecs and dtypes."""

from __future__ import annotations

CODECS = ("none", "lz4", "planes-lz4")
WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
OPENING = b'{"__metadata__":{"xxh3":"'


class Miss(Exception):
    """What was read is not what it must be."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Miss(what)
