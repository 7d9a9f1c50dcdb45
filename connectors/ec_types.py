"""What the EC connector's two halves tell each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class StagedItem:
    """A verified encoder output in this node's staging folder: raw bytes of a [rows, width] tensor."""

    path: str
    dtype: str
    rows: int
    width: int


@dataclass
class ECStoreMetadata(ECConnectorMetadata):
    """Scheduler to workers, every step."""

    #: Canonical JSON of the namespace; given whenever there is something to do.
    namespace: str | None = None
    #: Items to put into the encoder cache before this step, by identifier.
    loads: dict[str, StagedItem] = field(default_factory=dict)
    #: Identifiers whose output this step computes and the store lacks.
    saves: set[str] = field(default_factory=set)


@dataclass
class ECStoreWorkerMetadata(ECConnectorWorkerMetadata):
    """Workers to scheduler: staged items that are no longer needed."""

    loaded: set[str] = field(default_factory=set)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, ECStoreWorkerMetadata)
        return ECStoreWorkerMetadata(self.loaded | other.loaded)
