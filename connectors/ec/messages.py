"""Messages between the EC connector's two halves, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import FileIO

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from connectors.telemetry.metrics import Report, merge
from kvstore.keys import NO_SALT, NO_SESSION, ContentKey, SaltId, SessionId


@dataclass(frozen=True, slots=True)
class User:
    """The user of an item: the ids of a request's session and of its salt, if it has them."""

    session: SessionId = NO_SESSION
    salt: SaltId = NO_SALT


#: A request with neither.
NOBODY = User()


@dataclass(frozen=True, slots=True)
class StagedItem:
    """A verified encoder output in this node's staging folder: raw bytes of a [rows, width] tensor."""

    #: The item's content key.
    key: ContentKey
    path: str
    dtype: str
    rows: int
    width: int
    nbytes: int
    #: How long encoding it took, in microseconds; 0 if that is unknown.
    cost_us: int = 0
    #: Where its bytes are still found when its file is gone, as long as its load is under way; "": nowhere.
    spare: str = ""

    def open(self) -> FileIO:
        """Opens it for reading. Raises OSError."""
        try:
            return FileIO(self.path)
        except FileNotFoundError:
            if not self.spare:
                raise
            return FileIO(self.spare)


@dataclass
class ECStoreMetadata(ECConnectorMetadata):
    """The scheduler's orders to the workers, with every step."""

    #: Canonical JSON of the namespace; given whenever there is something to do.
    namespace: str | None = None
    #: Items to put into the encoder cache before this step, by identifier.
    loads: dict[str, StagedItem] = field(default_factory=dict)
    #: Items that the store lacks and this step encodes: under which key the output of each identifier goes.
    saves: dict[str, ContentKey] = field(default_factory=dict)
    #: The same, of items that an earlier step encoded and the workers still have.
    held: dict[str, ContentKey] = field(default_factory=dict)
    #: Users of items in `saves` and `held`, if their requests have a salt or a session.
    users: dict[ContentKey, User] = field(default_factory=dict)
    #: Staged items that this step encodes all the same, to be compared: by identifier.
    proofs: dict[str, StagedItem] = field(default_factory=dict)
    #: The name of this start of the engine, under which its workers save.
    writer: str = ""


@dataclass
class ECStoreWorkerMetadata(ECConnectorWorkerMetadata):
    """The workers' report to the scheduler."""

    #: Keys of items that were loaded, so that they need not stay staged.
    loaded: set[ContentKey] = field(default_factory=set)
    #: Statistics since the last report.
    stats: Report | None = None
    #: Outcomes (kvstore.rules.reasons.SAVE_OUTCOMES) of the saves that have ended, by key.
    saved: dict[ContentKey, str] = field(default_factory=dict)
    #: Compared items -> whether this engine encodes the same, or None if that can't be told.
    compared: dict[ContentKey, bool | None] = field(default_factory=dict)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        """Returns the reports of two ranks as one. Every rank of a step has loaded the same items."""
        assert isinstance(other, ECStoreWorkerMetadata)
        stats = [one for one in (self.stats, other.stats) if one is not None]
        if len(stats) == 2:
            merge(*stats)
        return ECStoreWorkerMetadata(
            self.loaded | other.loaded,
            stats[0] if stats else None,
            self.saved | other.saved,
            self.compared | other.compared,
        )
