"""A tiny causal transformer and the loop of a v0 model runner around it, in plain torch.

The loop calls a connector's hooks where vLLM's v0 model runner did (`need_recv_kv`, forward, `need_send_kv`,
logits, sampling), with model inputs of the same fields: prompts first, then decodes, flattened to one row per
token. Keys and values of a token go to the slot that `slot_mapping` names, decodes read them back by block
table. Tensor parallelism cuts the heads and adds up in an all-reduce that waits for every rank, as a real one
does: if one rank leaves a forward pass out and another doesn't, the second one fails here by its time limit.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from tests.waiting import PATIENCE_S

VOCAB, HIDDEN, HEADS, SIZE, LAYERS = 97, 32, 4, 8, 4
LATENT = 24
BLOCK = 8


class Meeting:
    """Ranks in threads: an all-reduce for their models, `least` for their connectors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, once all are here."""
        self._held[rank] = value
        self._barrier.wait()
        held = list(self._held)
        self._barrier.wait()
        return held


@dataclass
class Rank:
    """One tensor-parallel rank: `Peers` for its connector."""

    meeting: Meeting
    rank: int

    def least(self, value: int) -> int:
        return int(min(self.meeting.exchange(self.rank, value)))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        # In the order of the ranks, so that all of them get the same bits.
        first, *others = self.meeting.exchange(self.rank, value)
        return sum(others, first)


class IntermediateTensors:
    """What a stage hands to the next; the fields of vLLM's class of that name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


class Model(torch.nn.Module):
    """One rank's part of one stage. `mla`: a latent vector per token and layer instead of keys and values."""

    def __init__(
        self,
        layers: range = range(LAYERS),
        *,
        rank: Rank | None = None,
        mla: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=drawn) * 0.3

        self.embedding, self.places, self.head = (
            weight(VOCAB, HIDDEN),
            weight(512, HIDDEN),
            weight(HIDDEN, VOCAB),
        )
        self.parts = [
            SimpleNamespace(
                q=weight(HIDDEN, HEADS, SIZE), k=weight(HIDDEN, HEADS, SIZE), v=weight(HIDDEN, HEADS, SIZE),
                o=weight(HEADS, SIZE, HIDDEN), up=weight(HIDDEN, 2 * HIDDEN), down=weight(2 * HIDDEN, HIDDEN),
                latent=weight(HIDDEN, LATENT), k_up=weight(LATENT, HEADS, SIZE),
                v_up=weight(LATENT, HEADS, SIZE),
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.mla, self.rank = mla, rank
        size, number = (rank.meeting.size, rank.rank) if rank else (1, 0)
        self.heads = range(number * HEADS // size, (number + 1) * HEADS // size)
        #: As in vLLM's models: `model_executable.model.start_layer`.
        self.model = SimpleNamespace(start_layer=layers.start, end_layer=layers.stop)
        self.calls = 0

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        return IntermediateTensors(
            {
                name: torch.zeros(batch_size, HIDDEN, dtype=dtype, device=device)
                for name in ("hidden_states", "residual")
            }
        )

    def caches(self, blocks: int) -> list[torch.Tensor]:
        """Paged caches as FlashAttention's and MLA's backends of v0 lay them out; MLA's with padded rows."""
        count = self.model.end_layer - self.model.start_layer
        if self.mla:
            padded = [torch.full((blocks, BLOCK, LATENT + 8), torch.nan) for _ in range(count)]
            return [one[..., :LATENT] for one in padded]
        return [torch.full((2, blocks, BLOCK, len(self.heads), SIZE), torch.nan) for _ in range(count)]

    def forward(
        self, model_input: Any, kv_caches: list[torch.Tensor], intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        self.calls += 1
        meta = model_input.attn_metadata
        if intermediate is None:
            assert self.model.start_layer == 0
            hidden = self.embedding[model_input.input_tokens] + self.places[model_input.input_positions]
            residual = torch.zeros_like(hidden)
        else:
            hidden, residual = intermediate.tensors["hidden_states"], intermediate.tensors["residual"]
        for number in range(self.model.start_layer, self.model.end_layer):
            cache = kv_caches[number - self.model.start_layer]
            residual = residual + hidden
            normed = torch.nn.functional.layer_norm(residual, (HIDDEN,))
            residual = residual + self._all(self._attention(self.parts[number], normed, cache, meta))
            hidden = torch.tanh(residual @ self.parts[number].up) @ self.parts[number].down
        if self.model.end_layer < LAYERS:
            return IntermediateTensors({"hidden_states": hidden, "residual": residual})
        return torch.nn.functional.layer_norm(residual + hidden, (HIDDEN,))

    def _all(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.rank is None else self.rank.sum(value)

    def _attention(self, part: Any, x: torch.Tensor, cache: torch.Tensor, meta: Any) -> torch.Tensor:
        mine = slice(self.heads.start, self.heads.stop)
        query = torch.einsum("nd,dhs->nhs", x, part.q[:, mine])
        self._write(part, x, cache, meta.slot_mapping, mine)
        outputs, starts = [], meta.query_start_loc.tolist()
        for sequence, (first, last) in enumerate(pairwise(starts)):
            table = meta.block_tables[sequence]
            places = torch.arange(meta.seq_lens[sequence])
            key, value = self._read(part, cache, table[places // BLOCK], places % BLOCK, mine)
            scores = torch.einsum("nhs,mhs->hnm", query[first:last], key) / SIZE**0.5
            rows = torch.arange(meta.seq_lens[sequence] - (last - first), meta.seq_lens[sequence])
            scores = scores.masked_fill(places[None, None] > rows[None, :, None], float("-inf"))
            outputs.append(torch.einsum("hnm,mhs->nhs", scores.softmax(-1), value))
        return torch.einsum("nhs,hsd->nd", torch.cat(outputs), part.o[mine])

    def _write(
        self, part: Any, x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, mine: slice
    ) -> None:
        block, offset = slots // BLOCK, slots % BLOCK
        if self.mla:
            cache[block, offset] = x @ part.latent
            return
        cache[0, block, offset] = torch.einsum("nd,dhs->nhs", x, part.k[:, mine])
        cache[1, block, offset] = torch.einsum("nd,dhs->nhs", x, part.v[:, mine])

    def _read(
        self, part: Any, cache: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, mine: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mla:
            latent = cache[block, offset]
            return (
                torch.einsum("nl,lhs->nhs", latent, part.k_up[:, mine]),
                torch.einsum("nl,lhs->nhs", latent, part.v_up[:, mine]),
            )
        return cache[0, block, offset], cache[1, block, offset]


@dataclass
class Sequence:
    """One request in an engine."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    #: Tokens whose KV is in the caches.
    computed: int = 0
    #: Its own log probabilities of the prompt are wanted: the sampler reads every row.
    prompt_logprobs: bool = False
    lora: int = 0
    image: Any = None

    def slots(self, first: int, last: int) -> list[int]:
        return [self.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(first, last)]


class Runner:
    """One worker: a part of the model, its caches and its connector (None: no store)."""

    def __init__(self, model: Model, connector: Any = None, blocks: int = 64, role: str = "kv_both") -> None:
        self.model = model
        self.connector = connector
        self.kv_caches = model.caches(blocks)
        self.role = role
        #: Whether each step with prompts was served.
        self.bypassed: list[bool] = []
        self.hidden: Any = None

    def execute(self, model_input: Any, intermediate: IntermediateTensors | None = None) -> Any:
        """What `ModelRunner.execute_model` does up to the logits: the stage's output."""
        hidden, bypass = None, False
        prompts = model_input.attn_metadata.num_prefills > 0
        if self.connector is not None and prompts and self.role != "kv_producer":
            hidden, bypass, model_input = self.connector.recv_kv_caches_and_hidden_states(
                self.model, model_input, kv_caches=self.kv_caches
            )
            self.bypassed.append(bypass)
        if not bypass:
            hidden = self.model(model_input, self.kv_caches, intermediate)
        if self.connector is not None and prompts and self.role != "kv_consumer":
            self.connector.send_kv_caches_and_hidden_states(self.model, model_input, self.kv_caches, hidden)
        return hidden

    def sample(self, model_input: Any, hidden: torch.Tensor) -> list[int]:
        """Greedy tokens, one per sampled row, in the order of the step's sequences."""
        selected = model_input.sampling_metadata.selected_token_indices
        logits = hidden.index_select(0, selected) @ self.model.head
        ends = torch.isin(selected, model_input.sampling_metadata.last_rows)
        assert torch.isfinite(logits).all()
        return [int(token) for token in logits[ends].argmax(-1)]


def model_input(prompts: list[tuple[Sequence, int]], decodes: list[Sequence], device: str = "cpu") -> Any:
    """A step's input. Of each prompt, how many tokens beyond the computed ones are in this step."""
    tokens, places, slots, seq_lens, starts, selected, lasts = [], [], [], [], [0], [], []
    adapters: list[int] = []
    for sequence, count in [*prompts, *((one, 1) for one in decodes)]:
        first, last = sequence.computed, sequence.computed + count
        tokens += sequence.tokens[first:last]
        places += range(first, last)
        slots += sequence.slots(first, last)
        adapters += [sequence.lora] * count
        seq_lens.append(last)
        starts.append(starts[-1] + count)
        if last == len(sequence.tokens):
            if sequence.prompt_logprobs and count > 1:
                selected += range(starts[-2], starts[-1] - 1)
            selected.append(starts[-1] - 1)
            lasts.append(starts[-1] - 1)
    tables = [torch.tensor(one.blocks) for one in [*(p for p, _ in prompts), *decodes]]
    images = [one.image for one, _ in prompts if one.image is not None]
    count = sum(count for _, count in prompts)
    loras = sorted({one for one in adapters if one})
    return SimpleNamespace(
        input_tokens=torch.tensor(tokens, device=device),
        input_positions=torch.tensor(places, device=device),
        attn_metadata=SimpleNamespace(
            num_prefills=len(prompts), num_prefill_tokens=count, num_decode_tokens=len(decodes),
            slot_mapping=torch.tensor(slots, device=device), seq_lens=seq_lens,
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device), block_tables=tables,
        ),
        sampling_metadata=SimpleNamespace(
            selected_token_indices=torch.tensor(selected, dtype=torch.int64, device=device),
            last_rows=torch.tensor(lasts, dtype=torch.int64),
        ),
        multi_modal_kwargs={"pixel_values": images} if images else {},
        lora_requests=[
            SimpleNamespace(lora_int_id=one, lora_name=f"adapter {one}", lora_path=f"/adapters/{one}")
            for one in loras
        ],
        lora_mapping=SimpleNamespace(index_mapping=tuple(adapters)),
    )  # fmt: skip


class Pool:
    """Free blocks of the caches, in no order, so that a sequence's slots are scattered."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.free = list(range(blocks))
        random.Random(seed).shuffle(self.free)

    def grow(self, sequence: Sequence) -> None:
        while len(sequence.blocks) * BLOCK < len(sequence.tokens):
            sequence.blocks.append(self.free.pop())


def config(extra: dict[str, Any], *, tp: int = 1, pp: int = 1, mla: bool = False, **changes: Any) -> Any:
    """A VllmConfig as far as the v0 factory's connectors look at it."""
    settings: dict[str, Any] = {"identity": {"weights": "w"}, **extra}
    model = {
        "model": "tiny", "revision": None, "dtype": torch.float32, "quantization": None, "max_model_len": 512,
        "hf_config": SimpleNamespace(to_dict=dict, hidden_size=HIDDEN), "use_mla": mla,
        "get_hidden_size": lambda: HIDDEN,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | changes),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings),
        speculative_config=None,
    )


class Cluster:
    """An engine: stages of ranks, one pool of blocks, greedy sampling."""

    def __init__(self, stages: list[list[Runner]], *, blocks: int = 64, seed: int = 0) -> None:
        self.stages = stages
        self.pool = Pool(blocks, seed)

    def step(self, prompts: list[tuple[Sequence, int]], decodes: list[Sequence] = ()) -> None:  # type: ignore[assignment]
        """One step: the next tokens of prompts that end in it, and of the decodes, are appended."""
        decodes = list(decodes)
        for sequence in [*(one for one, _ in prompts), *decodes]:
            self.pool.grow(sequence)
        made = model_input(prompts, decodes)
        output = None
        for ranks in self.stages:
            output = together([lambda r=rank, o=output: r.execute(made, o) for rank in ranks])[0]
        tokens = self.stages[-1][0].sample(made, output)
        ended = [one for one, count in prompts if one.computed + count == len(one.tokens)] + decodes
        for sequence, count in [*prompts, *((one, 1) for one in decodes)]:
            sequence.computed += count
        for sequence, token in zip(ended, tokens, strict=True):
            sequence.tokens.append(token)

    def generate(self, prompts: list[list[int]], tokens: int = 4, **fields: Any) -> list[list[int]]:
        """Greedy continuations of prompts that are computed in one step."""
        running = [Sequence(list(prompt), **fields) for prompt in prompts]
        self.step([(one, len(one.tokens)) for one in running])
        for _ in range(tokens - 1):
            self.step([], running)
        for one in running:
            self._free(one)
        return [one.tokens[len(prompt) :] for one, prompt in zip(running, prompts, strict=True)]

    def _free(self, sequence: Sequence) -> None:
        """Give the blocks back; whoever reads one before it is written again gets no number."""
        for runner in self.runners:
            for cache in runner.kv_caches:
                (cache if runner.model.mla else cache.transpose(0, 1))[sequence.blocks] = torch.nan
        self.pool.free += sequence.blocks

    @property
    def runners(self) -> list[Runner]:
        return [rank for ranks in self.stages for rank in ranks]

    def close(self) -> None:
        """Ends every connector: their saves are written."""
        for runner in self.runners:
            if runner.connector is not None:
                runner.connector.close()


def together(jobs: list[Any]) -> list[Any]:
    """Run the ranks side by side; raises what the first of them raised."""
    if len(jobs) == 1:
        return [jobs[0]()]
    results: list[Any] = [None] * len(jobs)

    def one(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as exc:
            results[number] = exc

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
