"""One step of a v0 engine, one stage of its model, and the bytes of a prompt's chain between the two.

block   KV of its tokens; on all stages but the last, then what the stage hands on for them, token by token
end     the same for the tokens after the last whole block (on the last stage, only the prompt's last row of
        all that it hands on), then the prompt's number of tokens, 8 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from connectors.v0.pages import Pages, Rows, Unsupported
from connectors.v0.planning import Prompt, Tokens, chain, prompts_of
from kvstore.store.space import Space

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Step:
    """A step's computation, as far as the store cares."""

    #: Number of rows of the step's input: its prompts' tokens, then one per decode.
    rows: int
    prompts: list[Prompt | None]
    #: Whether the step has nothing but prompts.
    only_prompts: bool
    #: The tokens of the prompts' rows, in host memory.
    tokens: Tokens
    #: The slots of the prompts' rows in the KV caches, on the caches' device.
    slots: torch.Tensor

    def chain(self, prompt: Prompt, block_tokens: int, key: bytes) -> list[bytes]:
        """Returns the hashes of a prompt's blocks and its end."""
        return chain(self.tokens[prompt.start : prompt.start + prompt.tokens], block_tokens, key)


def read_step(model_input: Any) -> Step | None:
    """Returns the step in a v0 model input, or None if it has no prompt. Raises Unsupported.

    Only fields that vLLM broadcasts to every rank are used, so all ranks read the same. A prompt whose tokens
    are not at positions 0, 1, 2, ... or have no slot of their own is None.
    """
    meta, tokens = model_input.attn_metadata, model_input.input_tokens
    if meta is None or tokens is None or not meta.num_prefills:
        return None
    if tokens.dim() != 1:
        raise Unsupported(f"input tokens of shape {list(tokens.shape)}")
    if meta.seq_lens is None:
        raise Unsupported(f"{type(meta).__name__} without seq_lens")
    count, query_start = meta.num_prefill_tokens, getattr(meta, "query_start_loc", None)
    starts = None if query_start is None else query_start.tolist()
    slots = meta.slot_mapping.flatten()[:count].to(torch.int64)
    prompts = prompts_of(meta.seq_lens, meta.num_prefills, count, starts)
    # With rotary sections an image's tokens share positions; text has the same in every row.
    positions = model_input.input_positions[..., :count].cpu().numpy()
    written = (slots >= 0).cpu().numpy()
    for number, prompt in enumerate(prompts):
        if prompt is not None:
            rows = slice(prompt.start, prompt.start + prompt.tokens)
            if not written[rows].all() or (positions[..., rows] != np.arange(prompt.tokens)).any():
                prompts[number] = None
    only = tokens.shape[0] == count and not meta.num_decode_tokens
    return Step(tokens.shape[0], prompts, only, tokens[:count].cpu().numpy().astype(np.int64), slots)


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's part of the model, made for each call: virtual engines have caches of their own."""

    pages: Pages
    rows: Rows
    space: Space
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Returns how many bytes a whole block has."""
        return self.block_tokens * (self.pages.token_bytes + (0 if self.rows.last else self.rows.row_bytes))

    def sizes(self, prompt: Prompt) -> list[int]:
        """Returns how many bytes each slot of a prompt's chain has."""
        blocks, rest = divmod(prompt.tokens, self.block_tokens)
        rows = 1 if self.rows.last else rest
        end = rest * self.pages.token_bytes + rows * self.rows.row_bytes + _COUNT_BYTES
        return [self.block_bytes] * blocks + [end]

    def formats(self, prompt: Prompt) -> list[tuple[str, tuple[int, ...]]]:
        """Returns each slot's safetensors dtype and shape; a block of KV alone is as in any KV namespace."""
        pages = self.pages
        block = pages.dtype_name, (pages.layers, pages.heads, self.block_tokens, pages.content)
        *sizes, end = self.sizes(prompt)
        made: list[tuple[str, tuple[int, ...]]]
        made = [block if self.rows.last else ("U8", (size,)) for size in sizes]
        return [*made, ("U8", (end,))]

    def gather(
        self, step: Step, prompt: Prompt, span: range, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Returns some slots of a prompt's chain back to back: a fresh uint8 tensor on the caches' device.

        `tensors` are what the stage has handed on in this step.
        """
        blocks = prompt.tokens // self.block_tokens
        parts, full = [], min(span.stop, blocks) - span.start
        if full > 0:
            rows = self._rows(prompt, span.start, full)
            data = self.pages.read(step.slots[rows.start : rows.stop], self.block_tokens)
            if not self.rows.last:
                data = torch.cat([data, self.rows.pack(tensors, rows, full)], dim=1)
            parts.append(data.view(-1))
        if span.stop > blocks:
            rest = self._rest(prompt)
            if rest:
                slots = step.slots[rest.start : rest.stop]
                parts.append(self.pages.read(slots, len(rest)).view(-1))
            parts.append(self.rows.pack(tensors, self._kept(prompt, rest), 1).view(-1))
            count = torch.tensor([prompt.tokens], dtype=torch.int64).view(torch.uint8)
            parts.append(count.to(self.pages.device))
        return torch.cat(parts)

    def place(
        self,
        step: Step,
        prompt: Prompt,
        span: range,
        data: torch.Tensor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Puts what `gather` returns, here in host memory, into the caches and the step's output.

        Raises Unsupported if the end belongs to a prompt of another length.
        """
        blocks = prompt.tokens // self.block_tokens
        full, kv = max(0, min(span.stop, blocks) - span.start), self.block_tokens * self.pages.token_bytes
        if full:
            rows = self._rows(prompt, span.start, full)
            runs = data[: full * self.block_bytes].view(full, self.block_bytes)
            self.pages.write(step.slots[rows.start : rows.stop], runs[:, :kv], self.block_tokens)
            if not self.rows.last:
                for number, run in enumerate(runs):
                    self.rows.unpack(run[kv:], tensors, self._rows(prompt, span.start + number, 1))
        if span.stop > blocks:
            end, rest = data[full * self.block_bytes :], self._rest(prompt)
            if int.from_bytes(end[-_COUNT_BYTES:].numpy().tobytes(), "little") != prompt.tokens:
                raise Unsupported("a prompt's end that was stored for another length")
            kv = len(rest) * self.pages.token_bytes
            if rest:
                self.pages.write(step.slots[rest.start : rest.stop], end[:kv].view(1, kv), len(rest))
            self.rows.unpack(end[kv:-_COUNT_BYTES], tensors, self._kept(prompt, rest))

    def _rows(self, prompt: Prompt, block: int, count: int) -> range:
        first = prompt.start + block * self.block_tokens
        return range(first, first + count * self.block_tokens)

    def _rest(self, prompt: Prompt) -> range:
        return range(prompt.last + 1 - prompt.tokens % self.block_tokens, prompt.last + 1)

    def _kept(self, prompt: Prompt, rest: range) -> range:
        return range(prompt.last, prompt.last + 1) if self.rows.last else rest
