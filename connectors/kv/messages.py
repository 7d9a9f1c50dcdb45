"""The messages by which the KV connector's two halves work together, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connectors.choice.cost import Prefill
from connectors.choice.speeds import Measured
from connectors.engine.layout import LocalGroup
from connectors.telemetry.spans import LoadTimes
from connectors.weights import Naming
from kvstore.index.port import Run
from kvstore.keys import NO_SALT, NO_SESSION, SaltId, SegmentId, SessionId, WriterId
from kvstore.rules.tiers import Tier
from kvstore.store.saving import NOTHING_JOINED, Joins

#: The reason of a load that a rank has cut, because computing the rest is faster.
CUT: Final = "computing_is_faster"


@dataclass
class KVStoreHandshake(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler half, once at the start: its groups, what fills their pages, and
    the id of its accelerator, if it has one."""

    page_format: str
    groups: list[LocalGroup]
    #: An engine may wake up on another one.
    accelerator: str = field(default="", compare=False)


@dataclass(slots=True)
class GroupLoad:
    """Blocks of one group that are to be loaded. `hashes[i]` and each table's i-th block id belong to the
    group's block `first + i`; blocks that no run covers are to be reported as failed."""

    group: int
    first: int
    runs: list[Run]
    hashes: list[bytes]
    tables: dict[int, list[int]]
    #: Segments of `runs` -> where their payloads lay when they were promised.
    tiers: dict[SegmentId, Tier] = field(default_factory=dict)
    #: Bytes that a block counts for, on every rank, when reads are measured.
    block_bytes: int = 0


@dataclass(slots=True)
class Load:
    """An order to load blocks of one request."""

    request_id: str
    groups: list[GroupLoad]
    #: Cost of computing it instead, from the token `first` up to `stop`: by it a rank sees when computing is
    #: faster. Without it, the load is made in any case.
    prefill: Prefill | None = None
    first: int = 0
    stop: int = 0
    #: Whether its times are to be reported.
    timed: bool = False
    #: Whether the workers are to touch what they have loaded: else the scheduler half tells of its use.
    touch: bool = True
    #: Whether the comparison of these blocks proves their writers (connectors.kv.proving.proofs).
    proof: bool = False


@dataclass(slots=True)
class Save:
    """An order to save adjacent blocks of one group as one segment.

    `first` is its depth in the chain, in blocks of the group."""

    group: int
    segment: SegmentId
    created_s: int
    first: int
    hashes: list[bytes]
    tables: dict[int, list[int]]
    #: The request whose blocks they are.
    request_id: str = ""
    #: Whether the blocks stay as they are until that request loses them: then the save may wait for room.
    blocks_stay: bool = False
    #: Whether the request hands them over to another engine.
    handed_over: bool = False
    #: Whether they are stored even if another segment is to have them: it will never be whole, or is late.
    insist: bool = False
    #: Cost of computing these blocks, in microseconds; 0: unknown. It is the same for all ranks.
    cost_us: int = 0
    #: Id of the request's salt.
    salt: SaltId = NO_SALT
    #: The request's session.
    session: SessionId = NO_SESSION
    #: The segments that it replaces: it begins with blocks that are stored already.
    joins: Joins = NOTHING_JOINED
    #: The first digest of their chain.
    chain: bytes = b""

    @property
    def added(self) -> list[bytes]:
        """Returns the hashes of those blocks that aren't stored yet."""
        return self.hashes[self.joins.blocks :]


@dataclass(slots=True)
class Wrong:
    """Blocks of one group, from `first` on, in a segment that differs from what an engine has computed."""

    #: The request for which they were computed.
    request_id: str
    group: int
    first: int
    hashes: list[bytes]


@dataclass(slots=True)
class Compared:
    """The outcome of comparing blocks of one request on some ranks, for a proof of their writers."""

    #: How many steps' comparisons have ended, each on each rank.
    steps: int = 0
    #: Writers -> the ranks on which all that could be compared in some step was alike.
    alike: dict[WriterId, set[int]] = field(default_factory=dict)
    #: Writers -> a run of theirs that differs, and the blocks in which it does.
    wrong: dict[WriterId, tuple[Run, Wrong]] = field(default_factory=dict)
    #: Writers of blocks that are near what was computed, and not near enough to prove anything.
    unsure: set[WriterId] = field(default_factory=set)

    def add(self, other: Compared) -> None:
        """Takes over what another rank, or another step, has found out."""
        self.steps += other.steps
        for writer, ranks in other.alike.items():
            self.alike.setdefault(writer, set()).update(ranks)
        self.wrong |= other.wrong
        self.unsure |= other.unsure


@dataclass
class KVStoreMetadata(KVConnectorMetadata):
    """The scheduler half's message to the workers, in every step."""

    #: Canonical JSON of the namespace; given whenever there is something to load or save.
    namespace: str | None = None
    loads: list[Load] = field(default_factory=list)
    #: Saves of blocks that this step's forward pass completes.
    saves: list[Save] = field(default_factory=list)
    #: Saves of blocks that belonged to finished requests and have not been handed out again.
    flushes: list[Save] = field(default_factory=list)
    #: Blocks to read for the sake of measuring, of requests that compute them.
    probes: list[GroupLoad] = field(default_factory=list)
    #: Stored blocks to compare with those that this step's forward pass completes.
    audits: list[Load] = field(default_factory=list)
    #: Whether the engine's weights or caches were reset: what is being loaded now must not be used.
    abandon_loads: bool = False
    #: Requests that lose their blocks with this step: they have ended, or are preempted.
    lost_blocks: set[str] = field(default_factory=set)
    #: Requests that have ended and hand over their prompts -> for how many seconds at most their blocks stay.
    handed_over: dict[str, float] = field(default_factory=dict)
    #: The name of this start of the engine, under which its ranks save; given with the namespace.
    writer: str = ""


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler half: what has ended since the last step."""

    #: Segments -> how many ranks have ended their part, and whether all of those wrote it.
    ended_saves: dict[SegmentId, tuple[int, bool]] = field(default_factory=dict)
    #: Requests with blocks that could not be loaded -> group -> the first such block.
    failed_loads: dict[str, dict[int, int]] = field(default_factory=dict)
    #: Segments that failed verification.
    bad_segments: set[SegmentId] = field(default_factory=set)
    #: Ranks that have begun or ceased to fail at reading payloads -> whether they fail now.
    payloads_down: dict[int, bool] = field(default_factory=dict)
    #: Requests that hand over their prompt and could not save all of it.
    failed_handoffs: set[str] = field(default_factory=set)
    #: Ranks that got a name for their weights -> that name.
    weights: dict[int, Naming] = field(default_factory=dict)
    #: Requests in `failed_loads` -> why, as one of kvstore.rules.reasons.MISS_REASONS.
    load_reasons: dict[str, str] = field(default_factory=dict)
    #: Segments in `ended_saves` that were not written -> why, as one of kvstore.rules.reasons.SAVE_OUTCOMES.
    save_reasons: dict[SegmentId, str] = field(default_factory=dict)
    #: Segments that differ from what was computed -> the blocks in which they do.
    wrong: dict[SegmentId, Wrong] = field(default_factory=dict)
    #: Ranks -> measured speeds of each tier there, as far as they are new.
    speeds: dict[int, dict[Tier, Measured]] = field(default_factory=dict)
    #: Requests whose loads were complete -> the seconds that took, on the slowest rank.
    load_seconds: dict[str, float] = field(default_factory=dict)
    #: Requests whose loads have ended on some rank -> their times, if `timed` asks for them.
    load_times: dict[str, LoadTimes] = field(default_factory=dict)
    #: Ranks whose store has begun or ceased to ask for fewer reads -> whether it asks now.
    reads_scarce: dict[int, bool] = field(default_factory=dict)
    #: Requests that prove writers -> the compared blocks.
    compared: dict[str, Compared] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStoreWorkerMetadata)
        ended = dict(self.ended_saves)
        for segment, (count, written) in other.ended_saves.items():
            before, all_written = ended.get(segment, (0, True))
            ended[segment] = (before + count, all_written and written)
        seconds = dict(self.load_seconds)
        for request_id, took in other.load_seconds.items():
            seconds[request_id] = max(took, seconds.get(request_id, 0.0))
        failed = {request_id: dict(groups) for request_id, groups in self.failed_loads.items()}
        for request_id, groups in other.failed_loads.items():
            mine = failed.setdefault(request_id, {})
            for group, block in groups.items():
                mine[group] = min(block, mine.get(group, block))
        times: dict[str, LoadTimes] = {}
        for one in (self, other):
            for request_id, some in one.load_times.items():
                times.setdefault(request_id, LoadTimes()).add(some)
        compared: dict[str, Compared] = {}
        for one in (self, other):
            for request_id, found in one.compared.items():
                compared.setdefault(request_id, Compared()).add(found)
        return KVStoreWorkerMetadata(
            ended,
            failed,
            self.bad_segments | other.bad_segments,
            self.payloads_down | other.payloads_down,
            self.failed_handoffs | other.failed_handoffs,
            self.weights | other.weights,
            _load_reasons(other.load_reasons, self.load_reasons),
            other.save_reasons | self.save_reasons,
            other.wrong | self.wrong,
            self.speeds | other.speeds,
            seconds,
            times,
            self.reads_scarce | other.reads_scarce,
            compared,
        )


def _load_reasons(one: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """Returns both ranks' reasons. A failure says more than that another rank has cut the load meanwhile."""
    failures = {name: why for reasons in (one, other) for name, why in reasons.items() if why != CUT}
    return one | other | failures
