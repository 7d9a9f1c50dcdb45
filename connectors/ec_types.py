"""What the EC connector's two halves tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from connectors.stats import Report, merge


@dataclass(frozen=True, slots=True)
class StagedItem:
    """A verified encoder output in this node's staging folder: raw bytes of a [rows, width] tensor."""

    path: str
    dtype: str
    rows: int
    width: int
    nbytes: int
    #: What encoding it took, in microseconds; 0: unknown.
    cost_us: int = 0


@dataclass
class ECStoreMetadata(ECConnectorMetadata):
    """Scheduler to workers, every step."""

    #: Canonical JSON of the namespace; given whenever there is something to do.
    namespace: str | None = None
    #: Items to put into the encoder cache before this step, by identifier.
    loads: dict[str, StagedItem] = field(default_factory=dict)
    #: Identifiers that the store lacks: this step computes their output, or the workers have it already.
    saves: set[str] = field(default_factory=set)


@dataclass
class ECStoreWorkerMetadata(ECConnectorWorkerMetadata):
    """Workers to scheduler."""

    #: Staged items that are no longer needed.
    loaded: set[str] = field(default_factory=set)
    #: What happened since the last one.
    stats: Report | None = None
    #: Saves that have ended, by identifier: as what (kvstore.metrics.SAVE_OUTCOMES).
    saved: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        """Of two ranks, one. Every rank of a step has loaded the same items."""
        assert isinstance(other, ECStoreWorkerMetadata)
        stats = [one for one in (self.stats, other.stats) if one is not None]
        if len(stats) == 2:
            merge(*stats)
        return ECStoreWorkerMetadata(
            self.loaded | other.loaded, stats[0] if stats else None, self.saved | other.saved
        )
