"""Stand-ins for what vLLM hands to a connector's scheduler half, with the attributes that are read.

tests/connectors/test_vllm_contract.py compares their attributes with vLLM's own classes (STANDS_FOR), so a
name that vLLM has changed fails there, and is corrected here and in connectors/engine/step.py.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Final

from tests.store.world import chain

#: Tokens per block of the fakes' requests.
TOKENS: Final = 8

Tables = Sequence[Sequence[int]]
#: Enough blocks for any request, in two tables.
TABLES: Final[Tables] = (range(100, 200), range(200, 300))


@dataclass
class FakeRequest:
    """A request. `steps` names its chain of blocks; equal steps are equal prefixes."""

    request_id: str
    steps: InitVar[Sequence[int]]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    resumable: bool = False
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    cache_salt: str | None = None
    trace_headers: Any = None
    session_id: Any = None
    kv_hints: Any = None
    max_tokens: int = 16
    block_hashes: list[bytes] = field(init=False)
    all_token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self, steps: Sequence[int]) -> None:
        self.block_hashes = chain(*steps)
        self.num_prompt_tokens = self.num_tokens = len(steps) * TOKENS + 3
        self.all_token_ids = list(range(self.num_tokens))

    def get_num_encoder_embeds(self, index: int) -> int:
        return int(self.mm_features[index].mm_position.length)


@dataclass
class FakeAction:
    """One action of an envelope of hints."""

    action_type: Any
    payload: Any = field(default_factory=dict)
    action_version: Any = "1.0"


@dataclass
class FakeEnvelope:
    """What an orchestrator says of a request's session."""

    actions: list[FakeAction] = field(default_factory=list)


@dataclass
class FakeAdapter:
    """A LoRA adapter."""

    name: str = "adapter"
    adapter_id: int = 1


@dataclass
class FakePlace:
    """The place of an image's placeholders in its prompt."""

    offset: int
    length: int


@dataclass
class FakeField:
    """One field of an image's processed data."""

    data: Any


class FakeData(UserDict[str, FakeField]):
    """The fields of an image: one object for as long as vLLM caches it."""

    def get_data(self) -> dict[str, Any]:
        return {name: field.data for name, field in self.items()}


@dataclass
class FakeFeature:
    """An image of a request."""

    identifier: str
    modality: str = "image"
    data: FakeData | None = None
    mm_position: FakePlace = field(default_factory=lambda: FakePlace(0, 1))


class FakeBlocks:
    """Blocks that were allocated for a load, one list per KV cache group."""

    def __init__(self, *ids: Sequence[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> Tables:
        return self._ids


class FakeBlockState:
    """The block tables of a step's requests, and the states that the step completes."""

    def __init__(self, tables: Tables = TABLES, offers: Mapping[str, Any] | None = None) -> None:
        self._tables = tables
        self.boundary_state_offloads = dict(offers or {})

    def get_block_ids(self, request_id: str) -> Tables:
        return self._tables


@dataclass
class FakeNewRequest:
    """A request that is scheduled for the first time."""

    block_ids: Tables
    req_id: str = ""


@dataclass
class FakeCachedRequests:
    """The requests that were scheduled before."""

    new_block_ids: list[Tables | None] = field(default_factory=list)


@dataclass
class FakeStep:
    """A step as the scheduler has decided it: empty, unless told otherwise."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    kv_connector_block_state: FakeBlockState | None = None
    preempted_req_ids: set[str] | None = None
    scheduled_new_reqs: list[FakeNewRequest] = field(default_factory=list)
    scheduled_cached_reqs: FakeCachedRequests = field(default_factory=FakeCachedRequests)
    new_block_ids_to_zero: list[int] | None = None
    has_sync_kv_loads: bool = False
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class FakeReport:
    """The workers' report of one step."""

    kv_connector_worker_meta: Any = None
    finished_recving: set[str] | None = None
    finished_sending: set[str] | None = None


#: Stand-ins by the class whose place they take, named as in tests/connectors/vllm_contract.py.
STANDS_FOR: Final[Mapping[str, Any]] = {
    "Request": FakeRequest("r", [1]),
    "KvHintsEnvelope": FakeEnvelope(),
    "KvHintAction": FakeAction("kv.evict"),
    "LoRARequest": FakeAdapter(),
    "MultiModalFeatureSpec": FakeFeature("image"),
    "KVCacheBlocks": FakeBlocks(),
    "KVConnectorBlockState": FakeBlockState(),
    "NewRequestData": FakeNewRequest(()),
    "CachedRequestData": FakeCachedRequests(),
    "PlaceholderRange": FakePlace(0, 1),
    "SchedulerOutput": FakeStep(),
    "KVConnectorOutput": FakeReport(),
}


def scheduled(
    requests: Iterable[tuple[Any, int]],
    *,
    tables: Tables = TABLES,
    offers: Mapping[str, Any] | None = None,
    preempted: set[str] | None = None,
    **changes: Any,
) -> FakeStep:
    """Returns a step that computes the given number of tokens of each request."""
    numbers = {request.request_id: tokens for request, tokens in requests}
    return FakeStep(numbers, FakeBlockState(tables, offers), preempted, **changes)


def step(half: Any, *requests: tuple[Any, int], **changes: Any) -> Any:
    """Do one step as vLLM's scheduler does; the requests move on. Returns what `half` has for the workers."""
    metadata = half.build_connector_meta(scheduled(requests, **changes))
    for request, tokens in requests:
        request.num_computed_tokens += tokens
    return metadata
