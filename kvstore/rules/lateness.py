"""How long the index and the payload store may disagree on a payload without anything being wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from schemas.records import SegmentRecord
from schemas.settings import Settings

#: Age, in seconds, below which a payload that the index does not know may be about to be committed.
SETTLED_S: Final = 600.0
#: Time after a save, in seconds, from which on a payload that is missing under write-back is lost.
_LATE_S: Final = 600.0


def is_late(record: SegmentRecord, settings: Settings, now_s: Callable[[], float]) -> bool:
    """Tells whether a missing payload may be on a node that has not uploaded it yet.

    `now_s` says what time it is by the clock that the record's time is of, the index's; it is called with
    write-back alone. Raises what that raises.
    """
    tiers = settings.tiers
    if tiers is None or tiers.write != "back":
        return False
    # abs(): a record whose time is yet to come gets the same ten minutes, not its error on top.
    return abs(now_s() - record.created_s) < _LATE_S
