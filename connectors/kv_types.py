"""What the KV connector's two halves tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connectors.layout import LocalGroup
from connectors.weights import Naming
from kvstore.keys import SegmentId
from kvstore.ports import Run


@dataclass
class KVStoreHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at the start: what this rank's pages are and what fills them."""

    page_format: str
    groups: list[LocalGroup]


@dataclass(slots=True)
class GroupLoad:
    """Blocks of one group to load. `hashes[i]`, and each table's i-th block id, belong to the group's block
    `first + i`; blocks that no run covers are to be reported as failed."""

    group: int
    first: int
    runs: list[Run]
    hashes: list[bytes]
    tables: dict[int, list[int]]


@dataclass(slots=True)
class Load:
    """Load blocks of one request."""

    request_id: str
    groups: list[GroupLoad]


@dataclass(slots=True)
class Save:
    """Save adjacent blocks of one group as one segment; `first` is its depth, in blocks of the group."""

    group: int
    segment: SegmentId
    created_s: int
    first: int
    hashes: list[bytes]
    tables: dict[int, list[int]]
    #: The request that hands these blocks over to another engine.
    handed_over: str | None = None
    #: They stay as they are until that request has been reported as read.
    blocks_stay: bool = False
    #: What computing these blocks takes, in microseconds; 0: unknown. All ranks say the same.
    cost_us: int = 0


@dataclass
class KVStoreMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    #: Canonical JSON of the namespace; given whenever there is something to do.
    namespace: str | None = None
    loads: list[Load] = field(default_factory=list)
    #: Blocks that this step's forward pass completes.
    saves: list[Save] = field(default_factory=list)
    #: Blocks of requests that are gone, and that nobody has been given since.
    flushes: list[Save] = field(default_factory=list)
    #: The engine's weights or caches were reset: what is being loaded now must not be used.
    abandon_loads: bool = False
    #: Requests that have handed over their prompt -> for how many seconds their blocks are kept, until they
    #: have been read.
    kept: dict[str, float] = field(default_factory=dict)
    #: Requests that hand over their prompt and lose their blocks with this step.
    released: set[str] = field(default_factory=set)


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: what ended since the last step."""

    #: Segments of which this many ranks have ended their part, and whether all of those wrote it.
    ended_saves: dict[SegmentId, tuple[int, bool]] = field(default_factory=dict)
    #: Requests of which some blocks could not be loaded -> group -> the first such block.
    failed_loads: dict[str, dict[int, int]] = field(default_factory=dict)
    #: Segments that failed verification.
    bad_segments: set[SegmentId] = field(default_factory=set)
    #: Ranks for which it has changed -> whether payloads can't be read there.
    payloads_down: dict[int, bool] = field(default_factory=dict)
    #: Requests that hand over their prompt, of which something could not be saved.
    failed_handoffs: set[str] = field(default_factory=set)
    #: Ranks that were told since -> what their weights are called.
    weights: dict[int, Naming] = field(default_factory=dict)
    #: Of `failed_loads`: why, as one of kvstore.metrics.MISS_REASONS.
    load_reasons: dict[str, str] = field(default_factory=dict)
    #: Of `ended_saves` that were not written: why, as one of kvstore.metrics.SAVE_OUTCOMES.
    save_reasons: dict[SegmentId, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStoreWorkerMetadata)
        ended = dict(self.ended_saves)
        for segment, (count, written) in other.ended_saves.items():
            before, all_written = ended.get(segment, (0, True))
            ended[segment] = (before + count, all_written and written)
        failed = {request_id: dict(groups) for request_id, groups in self.failed_loads.items()}
        for request_id, groups in other.failed_loads.items():
            mine = failed.setdefault(request_id, {})
            for group, block in groups.items():
                mine[group] = min(block, mine.get(group, block))
        return KVStoreWorkerMetadata(
            ended,
            failed,
            self.bad_segments | other.bad_segments,
            self.payloads_down | other.payloads_down,
            self.failed_handoffs | other.failed_handoffs,
            self.weights | other.weights,
            other.load_reasons | self.load_reasons,
            other.save_reasons | self.save_reasons,
        )
