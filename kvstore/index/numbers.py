"""Reads numbers that a server tells, each within bounds, or raises ValueError.

What Redis answers may be a damaged field, another program's value, or a server's that is none. Later a number
is a length, a count of rounds or a divisor, where nobody asks any more whether it can be. So each is read
here, once, and nowhere else (tests/test_house.py).
"""

from __future__ import annotations

import re
from math import inf

#: The greatest whole number up to which Lua counts exactly.
MOST = 1 << 53
#: The end of time: of the year 36812.
MOST_S = float(1 << 40)

_WHOLE = re.compile(r"-?[0-9]{1,20}")
#: Characters of the longest number that is written with all of its digits.
_CHARS = 32
#: No bound is as far; beyond it, an int may be too large for a float.
_FAR = 1 << 200


def whole(value: object, *, least: int = 0, most: int = MOST) -> int:
    """Returns a whole number from `least` to `most`, of a number or its digits."""
    if type(value) is int:
        found = value
    elif isinstance(value, bytes | str) and _WHOLE.fullmatch(text := _text(value)):
        found = int(text)
    else:
        raise ValueError(f"{_shown(value)} is no whole number")
    if not least <= found <= most:
        raise ValueError(f"{_shown(found)} is not between {least} and {most}")
    return found


def real(value: object, *, least: float = -inf, most: float = inf) -> float:
    """Returns a number from `least` to `most`, of a number or its text; never NaN."""
    if type(value) is float:
        found = value
    elif type(value) is int:
        found = float(max(-_FAR, min(value, _FAR)))
    elif isinstance(value, bytes | str):
        found = float(_text(value))
    else:
        raise ValueError(f"{_shown(value)} is no number")
    if not least <= found <= most:
        raise ValueError(f"{_shown(found)} is not between {least:g} and {most:g}")
    return found


def _text(value: bytes | str) -> str:
    if len(value) > _CHARS:
        raise ValueError(f"a number of {len(value)} characters")
    return value if isinstance(value, str) else value.decode("ascii")


def _shown(value: object) -> str:
    return f"{value!r:.40}" if isinstance(value, int | float | bytes | str | None) else type(value).__name__
