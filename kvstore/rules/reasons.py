"""The reasons why a block was not served or not saved: their names in counters and journals, the sentence
that explains each, and whether it means that something doesn't work.

A new reason is one line here, one in docs/metrics.md, and one in kvstore.admin.explain.reports.Cause, the
type of the reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Reason(NamedTuple):
    """The explanation of one reason."""

    #: A sentence whose "it" is the block or the item.
    text: str
    #: Whether something doesn't work. Other reasons are normal for a cache: absent, held, not admitted.
    fault: bool = False


#: Reasons why a block that was asked for did not come from the store.
MISSES: Final[Mapping[str, Reason]] = {
    # It was never stored, or was evicted.
    "absent": Reason("the index had no entry for it"),
    "deadline": Reason("the index or a read took longer than its deadline", fault=True),
    "breaker_open": Reason(
        "the engine was not asking: the index or the payloads had failed repeatedly just before", fault=True
    ),
    "unavailable": Reason("the index or the payloads failed", fault=True),
    "throttled": Reason("the backend asked for fewer calls", fault=True),
    "closed": Reason("the engine was shutting down"),
    "corrupt": Reason("its payload failed verification", fault=True),
    "namespace_mismatch": Reason(
        "it belongs to another layout, or to weights that the engine no longer has", fault=True
    ),
    "unsigned": Reason("nothing proves who wrote its payload, and the engine demands that", fault=True),
    "unknown_key": Reason("its payload was written with a key that the engine doesn't have", fault=True),
    "newer_format": Reason("its payload is of a format that the engine's version doesn't know", fault=True),
    "missing": Reason("its payload was not there", fault=True),
    "quarantined": Reason("the engine had found its segment unusable before"),
    "permission": Reason("the backend refused", fault=True),
    "other_region": Reason("the bucket is in another region than the settings say", fault=True),
    "capacity": Reason("the engine had no queue space or staging memory for it"),
    "window": Reason("a window or a state that other layers need at that place was not there"),
    "below_threshold": Reason(
        "it was there, but less than kv.min_load_blocks beyond what the engine had itself"
    ),
    "computing_is_faster": Reason(
        "it was there, but computing it was expected to be faster than loading it, or its load fell behind"
    ),
    "in_pieces": Reason("its chain lies in more than 4,096 segments, after which a match ends"),
    "switched_off": Reason("it was there, but kv.load is never"),
    "unnamed": Reason(
        "nothing tells what the image before it is: a name over 1 KiB, an input of an unknown kind or in "
        "shared memory, or a description without its producer's digest"
    ),
    "writer_failed": Reason(
        "the start of an engine that saved it writes what other engines don't compute", fault=True
    ),
    "unproven": Reason(
        "it was there; nobody had compared yet what the start of an engine that saved it writes, so it is "
        "computed and compared"
    ),
    "audited": Reason(
        "it was there; one load in kv.audit_every is computed instead, and compared with what is stored"
    ),
    "error": Reason("an unexpected error; the engine's log has it", fault=True),
}
#: Their names, which are labels of counters.
MISS_REASONS: Final = tuple(MISSES)
#: Reasons in journals why a block or an encoder item did not come.
TOLD_MISSES: Final[Mapping[str, Reason]] = {
    **MISSES,
    "mismatch": Reason("what is stored under this name is not of the size that the request expects"),
}

#: Reasons why blocks that were offered for saving were not stored.
UNSAVED: Final[Mapping[str, Reason]] = {
    "held": Reason("not saved: another engine had claimed it, and was to save it"),
    "dropped": Reason(
        "not saved: no staging memory became free before its request ended, or a queue was full"
    ),
    # The counter `save_failures` says why, with the reason of a miss.
    "failed": Reason("not saved: the index or the payloads failed", fault=True),
    "refused": Reason(
        "not saved: its commit was refused, since ranks disagreed, it was evicted meanwhile, or this engine "
        "writes what others don't compute",
        fault=True,
    ),
    # It was seen for the first time, or its prompt has fewer blocks than admission.min_blocks.
    "not_admitted": Reason("the admission settings kept it out"),
}
#: Labels of the counter of blocks that were offered for saving; "present": they were stored already.
SAVE_OUTCOMES: Final = ("stored", "present", *UNSAVED)
#: Reasons in journals why blocks were not stored, whether they were offered or not.
TOLD_UNSAVED: Final[Mapping[str, Reason]] = {
    **UNSAVED,
    "deadline": Reason(
        "not saved: it was not known in time if a request had asked for it before (second_use)", fault=True
    ),
    "wrong": Reason(
        "what was stored differed from what the engine computed itself (kv.audit_every); it was evicted, and "
        "both payloads are kept for a week: the engine's log names them",
        fault=True,
    ),
}

#: Verdicts of engines about writers (kvstore.index.verdicts).
VERDICTS: Final = ("proven", "disputed", "failed")

#: What becomes of segments that are fetched ahead: "brought" to the node's folder, of that "hinted" because a
#: client said so, and then "used" by a load or "wasted"; or "failed" to come.
PREFETCH_OUTCOMES: Final = ("brought", "hinted", "used", "wasted", "failed")

#: Reasons that mean that something doesn't work.
FAULTS: Final = frozenset(
    name for table in (TOLD_MISSES, TOLD_UNSAVED) for name, reason in table.items() if reason.fault
)


def sentence(table: Mapping[str, Reason], name: str) -> str:
    """Returns the explanation of a reason; its name, if it is one of another version's engine."""
    return table[name].text if name in table else name
