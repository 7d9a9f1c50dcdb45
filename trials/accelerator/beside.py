"""Another connector of MultiConnector's, which loads by RDMA: no stream of a device holds its writes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class _Writes(KVConnectorMetadata):  # type: ignore[misc]
    """Requests, their block tables, and the tokens to bring."""

    due: list[tuple[str, list[list[int]], int, int]] = field(default_factory=list)


class Rdma(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Brings whole blocks of every second request, in the step that hands them out."""

    #: Writes a request's KV into its blocks: (request, block tables, first token, end).
    writes: Callable[[str, list[list[int]], int, int], None]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tokens = self._vllm_config.cache_config.block_size
        self._from: dict[str, int] = {}
        self._due = _Writes()
        self._done: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if int(request.request_id[1:]) % 2:
            return 0, False
        self._from[request.request_id] = num_computed_tokens
        tokens = (request.num_tokens - 1) // self._tokens * self._tokens - num_computed_tokens
        return max(0, tokens), tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            name = request.request_id
            first = self._from[name]
            tables = [list(ids) for ids in blocks.get_block_ids()]
            self._due.due.append((name, tables, first, first + num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        due, self._due = self._due, _Writes()
        return due

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        for one in metadata.due:
            self.writes(*one)
            self._done.add(one[0])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, self._done = self._done, set()
        return KVConnectorTransferResults(finished_recving=done)

    def register_kv_caches(self, kv_caches: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
