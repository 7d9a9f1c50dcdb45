"""A connector's view of vLLM's model runners, V1 and V2, with a model that checks every KV that it reads.

A forward pass is three operations on the engine's stream: check the states from which its requests go on,
write what they compute, check all the KV that they look at. As in a real layer, keys and values are written
before any are read: a request may share blocks that another one computes in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache

from trials.accelerator.contents import Chain, pattern
from trials.accelerator.device import Accelerator, Event
from trials.accelerator.items import Encoder
from trials.accelerator.layouts import Layout


@dataclass
class _Layer:
    """One layer's paged cache, as bytes [kernel blocks, heads, tokens, content]."""

    name: str
    spec: Any
    table: int
    pages: np.ndarray
    #: The model's heads that this rank has.
    heads: range
    #: See Layout.
    scales: int = 0
    drafts: bool = False
    #: Where its bytes are, and which of a position's content.
    areas: list[tuple[np.ndarray, slice]] = field(init=False)

    def __post_init__(self) -> None:
        self.areas = [(self.pages, slice(None))]
        if self.scales:
            blocks, heads, tokens, content = self.pages.shape
            flat, values = self.pages.reshape(blocks, -1), content - self.scales
            assert np.shares_memory(flat, self.pages), "a packed block that isn't in one piece"
            cut = heads * tokens * values
            self.areas = [
                (flat[:, :cut].reshape(blocks, heads, tokens, values), slice(values)),
                (flat[:, cut:].reshape(blocks, heads, tokens, self.scales), slice(values, None)),
            ]

    def read_from(self, computed: int) -> int:
        """The first position that the token after `computed` others looks at."""
        if isinstance(self.spec, SlidingWindowSpec):
            return max(0, computed - int(self.spec.sliding_window) + 1)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            return computed - computed % int(self.spec.attention_chunk_size)
        return 0

    def cells(self, table: list[int], start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the positions from `start` to `end - 1` are: kernel blocks, and tokens in them."""
        size, kernel = self.spec.block_size, self.pages.shape[2]
        positions = np.arange(start, end)
        blocks = np.array(table)[positions // size]
        return blocks * (size // kernel) + positions % size // kernel, positions % kernel

    def expected(self, states: np.ndarray) -> np.ndarray:
        """[positions, heads, content]"""
        return pattern(states, self.name, self.heads, self.pages.shape[3]).transpose(1, 0, 2)


@dataclass
class _Running:
    """A request as the model runner knows it."""

    chain: Chain
    tables: list[list[int]]
    prompt: int
    #: How many tokens are computed, and how many known, before the step.
    computed: int
    known: int
    #: The column of its tables in which its running state is; None if that follows from what is computed.
    state_column: int | None = None
    #: How many of the drafts in the step were wrong.
    rejected: int = 0


@dataclass
class Launched:
    """A step that was launched."""

    output: Any
    result: ModelRunnerOutput
    #: Passed when its tokens are on the host, which says nothing of what was queued later; by rank.
    sampled: list[Event]


@dataclass
class Runner:
    """One rank's model runner. `v2`: in the order of calls of vLLM's second one."""

    accelerator: Accelerator
    config: KVCacheConfig
    connector: Any
    v2: bool
    chains: dict[str, Chain]
    encoder: Encoder | None = None
    drafts: bool = False
    layout: Layout = field(default_factory=lambda: Layout({}))
    rank: int = 0
    #: Whether drafts are verified; how many of a request's are right follows from its length.
    speculates: bool = False
    #: The engine's stream on this rank.
    stream: Any = None
    #: Number of drafts that were wrong.
    rejected: int = 0
    #: Number of reads that were checked, and of bytes in them that were wrong.
    checked: int = 0
    wrong_bytes: int = 0
    _running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order, kernel = KVCacheLayout[self.config.kv_cache_layout or "LBNHC"], self.layout.kernel_tokens
        sizes = [kernel] * len(self.config.kv_cache_groups) if kernel else None
        raw = allocate_kv_cache(self.config, torch.device("cpu"), order, sizes)
        self._layers: list[_Layer] = []
        for table, group in enumerate(self.config.kv_cache_groups):
            for name in group.layer_names:
                spec: Any = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                pages = raw[name].view(torch.uint8).numpy()
                shared = getattr(spec, "max_tp_shards", None) == 1
                first = 0 if shared else self.rank * pages.shape[1]
                heads, drafts = range(first, first + pages.shape[1]), name in self.layout.drafts
                self._layers.append(_Layer(name, spec, table, pages, heads, self.layout.scales, drafts))
        self.connector.register_kv_caches({name: self.accelerator.adopt(one) for name, one in raw.items()})

    def launch(self, output: Any) -> Launched:
        """Queue one step, with the calls to the connector in the order of vLLM's runner."""
        connector, meta = self.connector, output.kv_connector_metadata
        if not self.v2:
            connector.handle_preemptions(meta)
        self._prepare(output)
        if self.v2:
            connector.handle_preemptions(meta)
        # The first runner leaves before it comes to the items of a step without tokens.
        items = None
        if self.encoder is not None and (self.v2 or output.num_scheduled_tokens):
            items = self.encoder.step(output)
        connector.bind_connector_metadata(meta)
        result, sampled = self._forward(output), Event(self.accelerator)
        if self.v2:
            sampled.put(self.accelerator.current)
        connector.start_load_kv(None)
        early = connector_output(connector, output.finished_req_ids) if self.drafts else None
        self._draft(output)
        connector.wait_for_save()
        if not self.v2:
            sampled.put(self.accelerator.current)
        told = early or connector_output(connector, output.finished_req_ids)
        connector.clear_connector_metadata()
        if not told.is_empty():
            result.kv_connector_output = told
        if getattr(told.kv_connector_worker_meta, "wrong", None):
            self.accelerator.report("an audit has found a stored block wrong")
        result.ec_connector_output = items
        return Launched(output, result, [sampled])

    # ---- what precedes a forward pass -----------------------------------------------------------

    def _prepare(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        if self.encoder is not None:
            self.encoder.prepare(output)
        if zeroed := output.new_block_ids_to_zero:
            self.accelerator.run(lambda: self._zero(zeroed))
        if copies := output.kv_cache_block_copies:
            self.accelerator.run(lambda: self._copy(copies))
        for new in output.scheduled_new_reqs:
            known = len(new.prefill_token_ids if self.v2 else new.prompt_token_ids)
            tables = [list(ids) for ids in new.block_ids]
            self._running[new.req_id] = _Running(
                self.chains[new.req_id], tables, len(new.prompt_token_ids), new.num_computed_tokens, known
            )
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            running, blocks = self._running[name], cached.new_block_ids[i]
            running.computed = cached.num_computed_tokens[i]
            running.known = running.prompt + cached.num_output_tokens[i]
            if name in cached.resumed_req_ids:
                running.tables, running.state_column = [list(ids) for ids in blocks], None
            elif blocks is not None:
                for table, ids in zip(running.tables, blocks, strict=True):
                    table.extend(ids)

    def _kernel_blocks(self, layer: _Layer, blocks: Sequence[int]) -> np.ndarray:
        ratio = layer.pages.shape[0] // self.config.num_blocks
        made: np.ndarray = (np.array(blocks)[:, None] * ratio + np.arange(ratio)).ravel()
        return made

    def _zero(self, blocks: Sequence[int]) -> None:
        for layer in self._layers:
            if not isinstance(layer.spec, MambaSpec):
                layer.pages[self._kernel_blocks(layer, blocks)] = 0

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*copies, strict=True)
        for layer in self._layers:
            moved = layer.pages[self._kernel_blocks(layer, sources)]
            layer.pages[self._kernel_blocks(layer, targets)] = moved

    # ---- the model ------------------------------------------------------------------------------

    def _forward(self, output: Any) -> ModelRunnerOutput:
        """Queue the model's three operations."""
        states: list[_Access] = []
        writes: list[_Access] = []
        reads: list[_Access] = []
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)})
        for name in names:
            running, count = self._running[name], output.num_scheduled_tokens[name]
            start, end = running.computed, running.computed + count
            wrong = running.rejected = self._rejected(name, output, end)
            end, self.rejected = end - wrong, self.rejected + wrong
            if self.encoder is not None:
                self.encoder.read(name, start, end)
            for layer in self._layers:
                if isinstance(layer.spec, MambaSpec):
                    self._states(name, layer, running, end, states, writes)
                elif not layer.drafts:
                    writes.append(_Access(name, layer, running, start, end))
                    if wrong:
                        writes.append(_Access(name, layer, running, end, end + wrong, rejected=True))
                    reads.append(_Access(name, layer, running, layer.read_from(start), end))
            running.state_column = -(-end // self._state_tokens) - 1 if self._state_tokens else None
            right = len(output.scheduled_spec_decode_tokens.get(name, ())) - wrong if self.speculates else 0
            sampled = range(end - right, end + 1) if end >= running.known else ()
            result.sampled_token_ids.append([running.chain.sample(at) for at in sampled])
        if names:
            self.accelerator.run(lambda: self._check(states))
            self.accelerator.run(lambda: self._write(writes))
            self.accelerator.run(lambda: self._check(reads))
        return result

    def _rejected(self, name: str, output: Any, end: int) -> int:
        """How many of the drafts in a step are wrong."""
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ())) if self.speculates else 0
        return int(self._running[name].chain.states(end - 1, end)[0] >> np.uint64(7)) % (drafts + 1)

    def _draft(self, output: Any) -> None:
        """Queue what a draft model with layers of its own does after sampling: a position's KV follows from
        the token after it, too. That of a block's last position is another's if the block was loaded."""
        writes: list[_Access] = []
        reads: list[_Access] = []
        for layer in self._layers:
            for name, count in output.num_scheduled_tokens.items() if layer.drafts else ():
                running = self._running[name]
                start, end = running.computed, running.computed + count - running.rejected
                writes.append(_Access(name, layer, running, start, end))
                size = layer.spec.block_size
                for first in range(0, end, size):
                    reads.append(_Access(name, layer, running, first, min(first + size - 1, end)))
        if writes:
            self.accelerator.run(lambda: self._write(writes))
            self.accelerator.run(lambda: self._check(reads))

    def write_now(self, name: str, tables: list[list[int]], start: int, end: int) -> None:
        """Write positions of a request at once, as a device of the network does."""
        running = _Running(self.chains[name], tables, 0, 0, 0)
        self._write([_Access(name, layer, running, start, end) for layer in self._layers])

    @property
    def _state_tokens(self) -> int:
        return next((one.spec.block_size for one in self._layers if isinstance(one.spec, MambaSpec)), 0)

    @staticmethod
    def _states(
        name: str, layer: _Layer, running: _Running, end: int, reads: list[_Access], writes: list[_Access]
    ) -> None:
        """A layer with one state per block: it goes on from the last one, and leaves it at each block's end
        (mode "all"), or at the end of what it computes (mode "align")."""
        start, size = running.computed, layer.spec.block_size
        if start:
            column = (start - 1) // size if running.state_column is None else running.state_column
            reads.append(_Access(name, layer, running, start - 1, start, column))
        last = -(-end // size) - 1
        for column in range(start // size if layer.spec.mamba_cache_mode == "all" else last, last + 1):
            after = min((column + 1) * size, end)
            writes.append(_Access(name, layer, running, after - 1, after, column))

    def _check(self, reads: Sequence[_Access]) -> None:
        for one in reads:
            wrong = one.wrong()
            self.checked += 1
            if wrong:
                self.wrong_bytes += wrong
                self.accelerator.report(f"a forward pass has read wrong KV: {one}: {wrong} bytes")

    @staticmethod
    def _write(writes: Sequence[_Access]) -> None:
        for one in writes:
            one.write()


class _Access:
    """Positions of one request in one layer: where they are, and what is to be there."""

    def __init__(
        self,
        name: str,
        layer: _Layer,
        running: _Running,
        start: int,
        end: int,
        column: int | None = None,
        *,
        rejected: bool = False,
    ) -> None:
        """`column` is that of a state; the tables may grow later, so all is taken down now. `rejected`: of
        other tokens than the request's."""
        self._what = f"request {name}, {layer.name}, positions {start} to {end - 1}"
        table = running.tables[layer.table]
        states = running.chain.states(start + layer.drafts, end + layer.drafts)
        expected = layer.expected(~states if rejected else states)
        self._areas = [(pages, expected[..., content]) for pages, content in layer.areas]
        if column is not None:
            self._at: Any = np.array([table[column]]), np.array([0])
        else:
            self._at = layer.cells(table, start, end)

    def __str__(self) -> str:
        return self._what

    def wrong(self) -> int:
        """How many bytes are not what they must be."""
        blocks, tokens = self._at
        return sum(int((pages[blocks, :, tokens] != right).sum()) for pages, right in self._areas)

    def write(self) -> None:
        blocks, tokens = self._at
        for pages, right in self._areas:
            pages[blocks, :, tokens] = right


def connector_output(connector: Any, finished: set[str]) -> KVConnectorOutput:
    """What a step tells the scheduler of the connector's half here."""
    results = connector.get_transfer_results(finished)
    output = KVConnectorOutput()
    output.finished_sending = results.finished_sending or None
    output.finished_recving = results.finished_recving or None
    output.failed_recving = results.failed_recving
    output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    output.kv_connector_stats = connector.get_kv_connector_stats()
    output.kv_connector_worker_meta = connector.build_connector_worker_meta()
    return output
