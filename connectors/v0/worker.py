"""The v0 connector's worker, which looks prompts up before a step and saves them after it.

Everything public runs on the engine's thread. v0's interface is synchronous: a look-up holds the step for at
most kv.match_deadline_s + kv.load_deadline_s; a save costs the step the copy to host memory and nothing else,
writing is the business of the store's threads.

A step is served whole or not at all: the engine leaves out its forward pass only if every row that somebody
reads afterwards is there. A load for a step that is computed after all does no harm, because computing it
writes the same slots before anything reads them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from connectors.engine.opening import close
from connectors.engine.tensors import HostCopy
from connectors.v0.identity import Engine, namespace_of
from connectors.v0.pages import Pages, Rows, Unsupported
from connectors.v0.planning import Prompt, joined, part, rows_suffice, segment_id, segments, windows
from connectors.v0.reads import Reads
from connectors.v0.stage import Stage, Step
from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.keys import SegmentId, block_key, digests
from kvstore.rules.segments import segment_blocks, staging_bytes
from kvstore.store.space import Match, Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)


class V0Worker:
    """Loads and saves the prompts of one rank's steps."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        fields: dict[str, Any],
        kv_dtype: str,
        *,
        unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        """`fields` are the namespace's fields that name the model, from before the engine has read its
        weights; `unchanged` returns whether they are still the same."""
        self._store = store
        self._engine = engine
        self._fields = fields
        self._unchanged = unchanged
        self._kv_dtype = kv_dtype
        self._reads = Reads(store)
        self._spaces: dict[str, Space] = {}
        #: Number of slots that this step's look-up found, by the chain's end: they need not be saved again.
        self._found: dict[bytes, int] = {}

    # ---- before the step ------------------------------------------------------------------------

    def load(
        self,
        model_executable: Any,
        model_input: Any,
        kv_caches: Sequence[torch.Tensor],
        step: Step,
        keys: Sequence[bytes | None],
    ) -> Any:
        """Put the step's KV into the caches and return what its forward pass would, or None if that must run.

        `keys[i]` identifies prompt i besides its tokens; it is None if the store must not be asked for the
        prompt. Raises Unsupported.
        """
        self._found = {}
        prompts = [prompt for prompt in step.prompts if prompt is not None]
        named = [key for key in keys if key is not None]
        if not step.only_prompts or not len(step.prompts) == len(prompts) == len(named):
            return None
        if self._engine.is_last_stage and not _only_last_rows(model_input, prompts):
            return None
        stage = self._stage(model_executable, kv_caches)
        chains = [
            step.chain(prompt, stage.block_tokens, key) for prompt, key in zip(prompts, named, strict=True)
        ]
        blocks = sum(len(one) - 1 for one in chains)
        if max(blocks, 1) < self._store.settings.kv.min_load_blocks:
            self._store.counters.miss("below_threshold", blocks)
            return None
        found = self._match(stage.space, chains)
        if found is None:
            return None
        self._found = {one[-1]: match.blocks for one, match in zip(chains, found, strict=True)}
        if any(match.blocks < len(one) for one, match in zip(chains, found, strict=True)):
            return None
        output, tensors = self._output(model_executable, stage, step.rows)
        whole = joined(found, [len(one) for one in chains])
        if not self._load(stage, step, prompts, chains, whole, tensors):
            # Something is not as the index says: all must be written again.
            self._found = {}
            return None
        self._store.transfers.call(lambda: stage.space.touch([run.segment for run in whole.runs]))
        return output

    def decided(self, *, served: bool) -> None:
        """The ranks have decided. If the step runs, all of them must save what this one alone has found."""
        if not served and self._engine.tp > 1:
            self._found = {}

    def _match(self, space: Space, chains: Sequence[list[bytes]]) -> list[Match] | None:
        """Ask for every chain at once. Returns None if not all answers came in time."""
        results: list[Match | None] = [None] * len(chains)
        ended = threading.Semaphore(0)

        def ask(number: int, packed: bytes) -> None:
            try:
                results[number] = space.match(packed)
            finally:
                ended.release()

        end = time.monotonic() + self._store.settings.kv.match_deadline_s
        for number, one in enumerate(chains):
            packed = digests(one)
            if not self._store.transfers.call(lambda n=number, p=packed: ask(n, p)):  # type: ignore[misc]
                self._store.counters.miss("capacity", len(one))
                return None
        for _ in chains:
            if not ended.acquire(timeout=max(0.0, end - time.monotonic())):
                late = [one for one, answer in zip(chains, results, strict=True) if answer is None]
                self._store.counters.miss("deadline", sum(map(len, late)))
                return None
        found = [answer for answer in results if answer is not None]
        return found if len(found) == len(chains) else None

    def _load(
        self,
        stage: Stage,
        step: Step,
        prompts: Sequence[Prompt],
        chains: Sequence[list[bytes]],
        whole: Match,
        tensors: Sequence[torch.Tensor],
    ) -> bool:
        """Read every slot of every chain, verified, and put it where it belongs; False if one isn't there."""
        end = time.monotonic() + self._store.settings.kv.load_deadline_s
        sizes = [size for prompt in prompts for size in stage.sizes(prompt)]
        places = [(number, at) for number, one in enumerate(chains) for at in range(len(one))]
        pieces = windows(sizes, staging_bytes(self._store.settings.kv))
        if pieces is None or self._reads.hanging:
            self._store.counters.miss("capacity", len(sizes))
            return False
        for piece in pieces:
            here = places[piece.start : piece.stop]
            keys = [block_key(chains[number][at]) for number, at in here]
            widths = sizes[piece.start : piece.stop]
            held = torch.empty(sum(widths), dtype=torch.uint8, pin_memory=stage.pages.device.type == "cuda")
            into = _cut(held.numpy().data, widths)
            found = part(whole, piece)
            if not self._reads.load(stage.space, found, keys, into, rank=self._engine.part, end=end):
                return False
            at = 0
            for number in dict(here):
                slots = [slot for one, slot in here if one == number]
                span = range(slots[0], slots[-1] + 1)
                nbytes = sum(stage.sizes(prompts[number])[span.start : span.stop])
                stage.place(step, prompts[number], span, held[at : at + nbytes], tensors)
                at += nbytes
        return True

    def _output(self, model_executable: Any, stage: Stage, rows: int) -> tuple[Any, Sequence[torch.Tensor]]:
        """Returns what a forward pass of `rows` tokens returns, still empty, and its tensors."""
        engine, device = self._engine, stage.pages.device
        if engine.is_last_stage:
            hidden = torch.zeros((rows, *stage.rows.shapes[0]), dtype=engine.dtype, device=device)
            return hidden, [hidden]
        between = model_executable.make_empty_intermediate_tensors(rows, engine.dtype, device)
        return between, stage.rows.of(between, rows)

    # ---- after the step -------------------------------------------------------------------------

    def save(
        self,
        model_executable: Any,
        kv_caches: Sequence[torch.Tensor],
        output: Any,
        step: Step,
        keys: Sequence[bytes | None],
        *,
        nonce: int,
        number: int,
        created_s: int,
    ) -> None:
        """Copy the step's prompts to host memory and queue their writes; what doesn't fit is dropped.

        All ranks agree on `nonce`, which names the engine, `number`, which names this save, and its time.
        Raises Unsupported.
        """
        found, self._found = self._found, {}
        if self._engine.mla and self._engine.tp_rank:
            return  # rank 0 saves the same bytes
        counters, least = self._store.counters, self._store.settings.admission.min_blocks
        stage = self._stage(model_executable, kv_caches)
        tensors = stage.rows.of(output, step.rows)
        most = segment_blocks(self._store.settings, stage.block_bytes)
        for place, (prompt, key) in enumerate(zip(step.prompts, keys, strict=True)):
            if prompt is None or key is None:
                continue
            hashes = step.chain(prompt, stage.block_tokens, key)
            if max(len(hashes) - 1, 1) < least:
                counters.saved("not_admitted", len(hashes))
                continue
            for count, span in enumerate(segments(len(hashes), most)):
                if span.stop > found.get(hashes[-1], 0):
                    segment = segment_id(nonce, number, place, count, hashes[0])
                    if not self._queue(stage, step, prompt, hashes, span, tensors, segment, created_s):
                        counters.saved("dropped", len(span))

    def _queue(
        self,
        stage: Stage,
        step: Step,
        prompt: Prompt,
        hashes: Sequence[bytes],
        span: range,
        tensors: Sequence[torch.Tensor],
        segment: SegmentId,
        created_s: int,
    ) -> bool:
        """Copy one segment and queue its write; False if there is no room for it."""
        transfers = self._store.transfers
        sizes = stage.sizes(prompt)[span.start : span.stop]
        formats = stage.formats(prompt)[span.start : span.stop]
        keys = [block_key(one) for one in hashes[span.start : span.stop]]
        nbytes = sum(sizes)
        if transfers.queued["write_bytes"] + nbytes > self._store.settings.transfers.write_bytes:
            return False  # before the copy, which the step would wait for
        copy = HostCopy(stage.gather(step, prompt, span, tensors))

        def write() -> None:
            views = _cut(copy.wait()[0], sizes)
            slots = [Slot(key, view, *form) for key, view, form in zip(keys, views, formats, strict=True)]
            part, parts = self._engine.part, self._engine.parts
            try:
                stage.space.save(
                    slots,
                    depth=span.start,
                    chain=hashes[0],
                    segment=segment,
                    created_s=created_s,
                    rank=part,
                    ranks=parts,
                )
            except KVStoreError as exc:
                log.debug("%d blocks are not cached: %s", len(slots), exc)

        return transfers.write(nbytes, write, copy.wait if copy.under_way else None)

    # ---- both -----------------------------------------------------------------------------------

    def _stage(self, model_executable: Any, kv_caches: Sequence[torch.Tensor]) -> Stage:
        """Returns this worker's stage, with these caches. Raises Unsupported."""
        engine = self._engine
        pages = Pages(kv_caches, engine.block_tokens, mla=engine.mla)
        if engine.is_last_stage:
            rows = engine.hidden
        else:
            between = model_executable.make_empty_intermediate_tensors(1, engine.dtype, pages.device)
            rows = Rows.between(between.tensors)
        layers = self._layers(model_executable, pages.layers)
        name = f"{pages.describe()} {rows.describe()} {layers}"
        if name not in self._spaces:
            if not self._unchanged():
                raise Unsupported("a model whose files have changed since the engine's start")
            namespace = namespace_of(
                engine, self._store.settings, self._fields, self._kv_dtype, pages, rows, layers
            )
            nbytes = engine.block_tokens * pages.token_bytes * engine.parts
            space = self._spaces[name] = self._store.open(namespace, block_bytes=nbytes)
            space.register_soon()
            log.info("kvstore v0: %s, layers %d to %d", space, layers.start, layers.stop)
        return Stage(pages, rows, self._spaces[name], engine.block_tokens)

    def _layers(self, model_executable: Any, count: int) -> range:
        model = getattr(model_executable, "model", model_executable)
        start = getattr(model, "start_layer", 0 if self._engine.pp == 1 else None)
        if start is None or getattr(model, "end_layer", start + count) != start + count:
            raise Unsupported(f"a model that doesn't say which layers its {count} KV caches belong to")
        return range(start, start + count)

    def close(self) -> None:
        """Let queued saves finish (bounded), then close the store. Idempotent."""
        close(self._store, "v0")


def _only_last_rows(model_input: Any, prompts: Sequence[Prompt]) -> bool:
    """Returns whether the sampler reads no hidden state but those that are stored."""
    selected = getattr(model_input.sampling_metadata, "selected_token_indices", None)
    return selected is not None and rows_suffice(selected.tolist(), prompts)


def _cut(flat: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Returns consecutive parts of `flat`, of these sizes."""
    out, at = [], 0
    for size in sizes:
        out.append(flat[at : at + size])
        at += size
    return out
