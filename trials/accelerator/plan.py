"""How one run goes, and what was found in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trials.accelerator.device import MODES


@dataclass(frozen=True)
class Plan:
    """How one run goes. All of it follows from the seed, unless it is given."""

    seed: int
    mode: str
    v2: bool
    #: Batches in flight.
    depth: int
    save_decode: bool
    #: Share of reads of payloads that take longer than a load may.
    late: float
    requests: int = 24
    delay_s: float = 0.004
    #: Share of allocations by transfer threads that fail.
    refused: float = 0.0
    #: Share of segments that take long to be written.
    slow: float = 0.0
    #: Whether computing may be faster than loading, so that loads are declined, tried and cut.
    adaptive: bool = False
    resets: bool = False
    #: Share of steps at which a request is aborted, and at which one is that is being loaded.
    aborts: float = 0.03
    aborts_loading: float = 0.0
    #: Whether requests bring pictures, and an EC connector keeps what the encoder makes of them.
    items: bool = False
    #: Whether a draft model runs last: the first runner then collects results before it saves. With one batch
    #: in flight its drafts are verified, and some are wrong.
    drafts: bool = False
    #: Number of tensor-parallel ranks.
    ranks: int = 1
    #: Whether half of the prompts are handed over: computed for another request, which then loads them.
    handoffs: bool = False
    #: Whether MultiConnector has another connector, which loads by RDMA. For one batch in flight and the
    #: first runner: only there is all that is gathered in a step behind when the next one is scheduled.
    beside: bool = False
    #: Number of blocks that each direction's staging holds; 0: as many as by default.
    staged: int = 0
    #: One load in so many is compared with what the engine computes instead; 0: none.
    audited: int = 0
    #: The run ends with the first report that has this in it; None: with its last request.
    until_found: str | None = None

    @classmethod
    def of(cls, seed: int, **given: Any) -> Plan:
        """The plan of a seed: every third is lazy, random or eager, every second V2, and so on."""
        made: dict[str, Any] = {
            "mode": MODES[seed % 3] if seed % 3 < 2 or seed % 4 == 0 else "random",
            "v2": seed % 2 == 1,
            "depth": seed // 2 % 3 + 1,
            "save_decode": seed // 3 % 2 == 0,
            "late": 0.15 if seed % 5 == 4 else 0.0,
            "slow": 0.4 if seed % 3 == 1 else 0.0,
            "adaptive": seed % 5 in (1, 4),
            "resets": seed % 4 in (2, 3),
            "aborts_loading": 0.2 if seed % 4 in (1, 2) else 0.0,
            "drafts": seed % 8 in (1, 6),
            "ranks": 2 if seed % 7 in (2, 3) else 1,
            "handoffs": seed % 5 == 3,
            "staged": 12 if seed % 4 == 3 else 4 if seed % 8 == 6 else 0,
            "audited": 4 if seed % 7 == 5 else 0,
        }
        made |= given
        if made.get("items"):
            made |= {"ranks": 1, "handoffs": False}
        elif "beside" not in made:
            made["beside"] = made["depth"] == 1 and not made["v2"] and made["ranks"] == 1
        return cls(seed, **made)


@dataclass
class Found:
    """What a run did, and what was wrong."""

    loads: int = 0
    blocks_loaded: int = 0
    blocks_saved: int = 0
    items_loaded: int = 0
    items_saved: int = 0
    reads_checked: int = 0
    preemptions: int = 0
    aborts: int = 0
    #: Aborts of requests that were being loaded.
    aborts_loading: int = 0
    #: Resets that worked, of the engine's cache and of the connector's.
    resets: int = 0
    #: Loads that were cut, and blocks whose saves were dropped.
    cuts: int = 0
    blocks_dropped: int = 0
    #: Prompts that were handed over, and drafts that were wrong.
    handed_over: int = 0
    rejected: int = 0
    wrong_bytes: int = 0
    deaths: int = 0
    finished: int = 0
    #: What was wrong, in words.
    reports: tuple[str, ...] = ()

    def __add__(self, other: Found) -> Found:
        mine, theirs = asdict(self), asdict(other)
        return Found(**{name: mine[name] + theirs[name] for name in mine})
