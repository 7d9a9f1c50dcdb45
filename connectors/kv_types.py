"""What the KV connector's two halves tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstore.keys import ContentKey, SegmentId
from kvstore.ports import Run


@dataclass(slots=True)
class Load:
    """Load blocks of one request. `keys[i]` and `block_ids[i]` belong to chain block `first + i`."""

    request_id: str
    first: int
    runs: list[Run]
    keys: list[ContentKey]
    block_ids: list[int]


@dataclass(slots=True)
class Save:
    """Save adjacent blocks of one request's chain as one segment; `first` is its depth."""

    request_id: str
    segment: SegmentId
    first: int
    keys: list[ContentKey]
    block_ids: list[int]


@dataclass
class KVStoreMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    #: Canonical JSON of the namespace; given whenever there is something to do.
    namespace: str | None = None
    loads: list[Load] = field(default_factory=list)
    #: Blocks that this step's forward pass completes.
    saves: list[Save] = field(default_factory=list)
    #: Blocks of requests that are gone: to be read before this step's forward pass overwrites them.
    flushes: list[Save] = field(default_factory=list)


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: what ended since the last step."""

    #: Segments whose save ended, well or badly: they are no longer in flight.
    ended_saves: set[SegmentId] = field(default_factory=set)
    #: Requests of which some blocks could not be loaded -> the first such chain block.
    failed_loads: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStoreWorkerMetadata)
        failed = dict(self.failed_loads)
        for request_id, block in other.failed_loads.items():
            failed[request_id] = min(block, failed.get(request_id, block))
        return KVStoreWorkerMetadata(self.ended_saves | other.ended_saves, failed)
