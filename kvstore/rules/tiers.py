"""Names of the places where a payload may lie, from the nearest to the farthest.

What reading costs depends on the place far more than on anything else, so estimates, counters and spans are
kept by it.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

#: This process's memory; the node's folder of a tiered store; a disk or a share; a bucket.
Tier = Literal["memory", "folder", "disk", "bucket"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
