"""Questions of a v0 engine's step to the store: pure functions, no torch, no I/O.

The names of KV in v0 are ours, because that engine's workers have no block hashes. A prompt of n tokens is
a chain of n // block_tokens blocks and one end:

    root    SHA-256("kvstore v0 chain\\0" + key)     key: what else identifies the prompt, b"" if nothing
    block   SHA-256(parent + "\\0" + its tokens)     block_tokens of them, 8 bytes each, little endian
    end     SHA-256(parent + "\\1" + the rest)       0 to block_tokens - 1 tokens

So a chain that is there to its end is there for exactly these tokens, and a prefix of it serves every
prompt that begins alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from connectors.planning import slice_runs
from kvstore.index.port import Run
from kvstore.keys import SEGMENT_ID_BYTES, SegmentId, tag_of
from kvstore.store.space import Match

#: The name of this rule in the namespace: blocks named by another rule are never found by this one.
HASH_ALGO = "kvstore-v0-sha256"
_ROOT = b"kvstore v0 chain\x00"

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that a step computes from its first token on: which rows of the step's input it has."""

    start: int
    tokens: int

    @property
    def last(self) -> int:
        """Returns the row whose hidden state the next token is sampled from."""
        return self.start + self.tokens - 1


def prompts_of(
    seq_lens: Sequence[int], num_prefills: int, num_prefill_tokens: int, query_start: Sequence[int] | None
) -> list[Prompt | None]:
    """Returns the prompts of a step in its order, None for one whose first tokens are not in it.

    Those are later pieces of a chunked prefill and prompts that begin in the engine's own prefix cache: a
    sequence's length counts what was computed before, its query what the step computes. `query_start` has
    the queries' first rows and the end of the last one. It is None from backends that don't say: then no
    tokens can have been computed before if the lengths add up to the step's tokens. Decodes come after the
    prompts; they are left out.
    """
    lengths = list(seq_lens[:num_prefills])
    none: list[Prompt | None] = [None] * num_prefills
    if len(lengths) != num_prefills or any(length < 1 for length in lengths):
        return none
    if query_start is None:
        if sum(lengths) != num_prefill_tokens:
            return none
        query_start = [0, *np.cumsum(lengths).tolist()]
    starts = list(query_start[: num_prefills + 1])
    if len(starts) != num_prefills + 1 or starts[0] != 0 or starts[-1] != num_prefill_tokens:
        return none
    queries = [b - a for a, b in pairwise(starts)]
    if any(query < 0 for query in queries):
        return none
    return [
        Prompt(start, length) if query == length else None
        for start, query, length in zip(starts, queries, lengths, strict=False)
    ]


def hash_root() -> str:
    """Returns a digest of what chains start from, for the namespace."""
    return hashlib.sha256(_ROOT).hexdigest()[:16]


def chain(tokens: Tokens, block_tokens: int, key: bytes) -> list[bytes]:
    """Returns the hashes of a prompt's blocks and, last, of its end."""
    parent = hashlib.sha256(_ROOT + key).digest()
    packed = np.ascontiguousarray(tokens, dtype="<i8").tobytes()
    step, hashes = 8 * block_tokens, []
    full = len(packed) // step * step
    for at in range(0, full, step):
        parent = hashlib.sha256(parent + b"\x00" + packed[at : at + step]).digest()
        hashes.append(parent)
    hashes.append(hashlib.sha256(parent + b"\x01" + packed[full:]).digest())
    return hashes


def joined(matches: Sequence[Match], lengths: Sequence[int]) -> Match:
    """Returns complete matches as one, block after block, so that all of them are loaded side by side."""
    runs, offset = [], 0
    for match, length in zip(matches, lengths, strict=True):
        runs += [Run(offset + run.start, run.segment, run.slot, run.count, run.record) for run in match.runs]
        offset += length
    return Match(runs, offset, "complete")


def part(whole: Match, blocks: range) -> Match:
    """Returns some consecutive blocks of a complete match, counted from the first of them."""
    runs = [
        Run(run.start - blocks.start, run.segment, run.slot, run.count, run.record)
        for run in slice_runs(whole.runs, blocks)
    ]
    return Match(runs, len(blocks), "complete")


def windows(sizes: Sequence[int], most: int) -> list[range] | None:
    """Returns ranges of consecutive slots of at most `most` bytes each, or None if a single slot is
    larger."""
    out, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        if size > most:
            return None
        if held + size > most:
            out.append(range(first, number))
            first, held = number, 0
        held += size
    if first < len(sizes):
        out.append(range(first, len(sizes)))
    return out


def segments(slots: int, segment_blocks: int) -> list[range]:
    """Returns a chain of `slots` (its end included) as segments of `segment_blocks` blocks.

    Cut at multiples of that from the chain's start, so that prompts which begin alike are cut alike. The end
    goes with the last blocks: a segment of its own would cost a request.
    """
    blocks = slots - 1
    cuts = [*range(0, blocks, segment_blocks), slots] if blocks else [0, slots]
    return [range(a, b) for a, b in pairwise(cuts)]


def segment_id(nonce: int, step: int, prompt: int, number: int, chain: bytes) -> SegmentId:
    """Returns what every rank calls the same segment of the same save, without a word between them.

    `nonce` is drawn at random for the engine's lifetime and `step` counts its saves, so an id belongs to one
    save for ever. `chain` is the name of its chain's first block (kvstore.keys.new_segment_id).
    """
    text = f"{nonce} {step} {prompt} {number}".encode()
    return SegmentId(hashlib.sha256(text).digest()[: SEGMENT_ID_BYTES - 1] + bytes([tag_of(chain)]))


def rows_suffice(selected: Sequence[int], prompts: Sequence[Prompt]) -> bool:
    """Returns whether the hidden states of the prompts' last rows are all that the sampler will read.

    A request for the prompt's own log probabilities reads every row, and those are not stored.
    """
    return set(selected) <= {prompt.last for prompt in prompts}


def adapter_key(ids: Sequence[int], adapters: Mapping[int, str]) -> bytes | None:
    """Returns what the LoRA adapter adds to a prompt's identity. `ids` is the adapter of each of its tokens.

    Returns b"" without an adapter (id 0), or None if the adapter is unknown or changes within the prompt.
    """
    if len(set(ids)) != 1:
        return None
    if ids[0] == 0:
        return b""
    name = adapters.get(ids[0])
    return None if name is None else b"lora\x00" + name.encode("utf-8", "surrogatepass")
