"""What the KV connector's two halves tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.keys import SegmentId
from kvstore.ports import Run


@dataclass
class KVStoreHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at the start: what fills a page (connectors.identity.page_format)."""

    page_format: str


@dataclass(slots=True)
class Load:
    """Load blocks of one request. `hashes[i]` and `block_ids[i]` belong to chain block `first + i`."""

    request_id: str
    first: int
    runs: list[Run]
    hashes: list[bytes]
    block_ids: list[int]


@dataclass(slots=True)
class Save:
    """Save adjacent blocks of one chain as one segment; `first` is its depth."""

    segment: SegmentId
    first: int
    hashes: list[bytes]
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
    #: The engine's weights or caches were reset: what is being loaded now must not be used.
    abandon_loads: bool = False


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: what ended since the last step."""

    #: Segments whose save ended, well or badly: they are no longer in flight.
    ended_saves: set[SegmentId] = field(default_factory=set)
    #: Requests of which some blocks could not be loaded -> the first such chain block.
    failed_loads: dict[str, int] = field(default_factory=dict)
    #: Segments that failed verification.
    bad_segments: set[SegmentId] = field(default_factory=set)
    #: Whether payloads can be read, if that has changed.
    payloads_down: bool | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStoreWorkerMetadata)
        failed = dict(self.failed_loads)
        for request_id, block in other.failed_loads.items():
            failed[request_id] = min(block, failed.get(request_id, block))
        said = [each for each in (self.payloads_down, other.payloads_down) if each is not None]
        return KVStoreWorkerMetadata(
            self.ended_saves | other.ended_saves,
            failed,
            self.bad_segments | other.bad_segments,
            any(said) if said else None,
        )
