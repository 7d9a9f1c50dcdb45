"""Disaggregated prefill through the store: one engine computes a prompt, another goes on from there.

The request parameters are those of vLLM's NIXL connector, so that its proxies work with this one:

    prefill engine   {"do_remote_decode": true}: stores all of the prompt, and answers with a handle
    decode engine    {"do_remote_prefill": true, ...}, which is that handle: waits until all of it is in the
                     index, loads it and computes the last token; if it doesn't come, computes what is missing

What is handed over are ordinary blocks under their ordinary names, so a prompt that is stored already is
handed over without a byte, and one that no decode engine asks for is evicted like any other. Only the last
block may be partial. Its name is vLLM's hash of it as if it were full, but of fewer tokens and with a mark,
so it differs from that of every full block and says how many tokens count; what else is in its page is read
by nobody, because the engine writes each of these positions before it attends to it.

How much of N prompt tokens is handed over:

    full attention            N; vLLM computes the last token once more
    windows, chunks           N, of which N - 1 are loaded: for less, a window would need one more on its left
    states (Mamba, ...)       N - 1: a state can't be taken back by a token, so the prefill engine drops the
                              prompt's last one, as vLLM's own P/D connectors do
    drafting heads that look  likewise, one less than they look ahead
    ahead more than a token

Nothing here blocks: the index is asked on call threads, one question at a time, seldomer as time goes by.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connectors.boundary import Rule, alignment
from connectors.kv_match import Found
from connectors.kv_saving import Progress, Saving, Tables
from connectors.kv_types import Save
from connectors.layout import Group
from connectors.planning import EVERY_BLOCK, joined
from kvstore.keys import SegmentId, digests
from kvstore.ports import Run
from kvstore.store import Space

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Says in a handle that the prompt is in a store, and in which namespace.
_ENGINE = "kvstore:"
#: Between two questions to the index, at first and at most.
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
#: So many failures of the index or the payloads in a row, and waiting on is of no use.
_MOST_FAILURES = 3

_MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

#: Name of a prompt's partial last block, if it has that many tokens.
TailName = Callable[["Request", int], bytes]


@dataclass(slots=True, eq=False)
class Sending:
    """A prompt that this engine hands over. Owned by the scheduler's thread."""

    tokens: int
    #: Block hashes of the prompt, the last one for the partial block, repeated so that every group finds it.
    names: list[bytes]
    #: Its blocks stay where they are until the request is finished, so what finds no room now may wait.
    keeps_blocks: bool
    segments: set[SegmentId] = field(default_factory=set)
    #: Segments of other requests that bring blocks of it.
    others: set[SegmentId] = field(default_factory=set)
    #: All of it is stored or is being stored.
    complete: bool = False
    failed: bool = False

    def restart(self) -> None:
        """The request has lost its blocks and is computed once more."""
        self.segments.clear()
        self.others.clear()
        self.complete = self.failed = False


@dataclass(slots=True, eq=False)
class Receiving:
    """A prompt that this engine waits for. Owned by the scheduler's thread, but for `_answer`.

    `found` is all of it, once it is there.
    """

    #: How many tokens are loaded.
    tokens: int
    names: list[bytes]
    #: `time.monotonic` time at which the wait ends.
    end: float
    found: Found | None = None
    _found_at: float = 0.0
    _next: float = 0.0
    _pause: float = _PAUSE_S
    _asking: bool = False
    _failures: int = 0
    #: Set on a call thread, once per question.
    _answer: Found | str | None = None

    def forget(self) -> None:
        """What was found may be gone or bad by now: ask again."""
        self.found = None
        self._next = 0.0


class Handoffs:
    """Of one engine."""

    def __init__(
        self,
        space: Space,
        groups: Sequence[Group],
        *,
        hash_tokens: int,
        tail_name: TailName,
        fits: Callable[[int, int], bool],
        lookahead: int = 0,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        """`fits`: see kv_match.Matcher. `lookahead`: tokens that drafting heads look ahead. `ranks`: sizes of
        this engine's parallelism, for the handle."""
        self.use(space)
        self._groups = groups
        self._rules: list[Rule] = [group.rule for group in groups]
        self._hash_tokens = hash_tokens
        self._align = alignment(self._rules)
        self._tail_name = tail_name
        self._fits = fits
        self._ranks = dict(ranks or {})
        self._settings = space.store.settings.kv
        state = any(rule.reach == "state" for rule in self._rules)
        #: Prompt tokens that the prefill engine must not compute.
        self._backoff = max(int(state), lookahead - 1)
        #: Prompt tokens that the decode engine must not load.
        self._left_out = max(self._backoff, int(any(rule.reach != "prefix" for rule in self._rules)))

    def use(self, space: Space) -> None:
        """What is asked and answered from now on is about this namespace."""
        self._space = space
        self._engine = _ENGINE + space.id

    # ---- prefill engine -------------------------------------------------------------------------

    def sending(self, request: Request) -> Sending | None:
        """What to hand over of a request that has just arrived; None if that wasn't asked for or can't be.

        Cuts off the end of the prompt where the decode engine must compute it.
        """
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_decode"):
            return None
        if getattr(request, "resumable", False) or request.num_prompt_tokens <= self._backoff:
            return None
        if self._backoff and not _shorten(request, self._backoff, self._hash_tokens):
            return None
        tokens = request.num_prompt_tokens
        return Sending(tokens, self._names(request, tokens), keeps_blocks=request.max_tokens <= 1)

    def last_saves(
        self,
        sending: Sending,
        saving: Saving,
        progress: Progress,
        tables: Tables | None,
        computed: int,
    ) -> list[Save]:
        """What is left to save when all of the prompt is computed, with the partial block and the states.

        `computed` tokens are so by the end of this step.
        """
        if tables is None:
            return []
        tokens, names = sending.tokens, sending.names
        states = [
            (table, tables[table][-(-tokens // group.rule.block_tokens) - 1], tokens)
            for group in self._groups
            if group.offered
            for table in group.tables
        ]
        if states and computed != tokens:
            return []
        saves = saving.plan(
            progress, names, tokens, EVERY_BLOCK, lambda: tables, computed=computed, final=True, partial=True
        )
        saves += saving.take_offers(progress, names, states, EVERY_BLOCK, tokens, partial=True)
        for save in saves:
            skipped = self._rules[save.group].skipped_tokens(tokens)
            first = skipped // self._rules[save.group].block_tokens
            save.blocks_stay = sending.keeps_blocks and save.first >= first
        sending.others = saving.carrying(self._blocks(sending)) - {save.segment for save in saves}
        sending.others -= sending.segments
        sending.complete = True
        return saves

    def _blocks(self, sending: Sending) -> list[tuple[int, bytes]]:
        """What a decode engine needs of it, by group and hash."""
        found = []
        for number in self._numbers:
            ratio = self._rules[number].block_tokens // self._hash_tokens
            needed = self._needed(number, sending.tokens)
            found += [(number, sending.names[(block + 1) * ratio - 1]) for block in needed]
        return found

    def mark(self, request_id: str, sending: Sending, saves: Sequence[Save]) -> None:
        """These saves are part of what a request hands over."""
        for save in saves:
            save.handed_over = request_id
            # Such blocks stay whatever else is computed. Of windows and states only the last ones do.
            if self._rules[save.group].reach == "prefix":
                save.blocks_stay = sending.keeps_blocks
            sending.segments.add(save.segment)

    def handle(self, request: Request, sending: Sending) -> dict[str, Any]:
        """What the decode engine must be told, under the names that proxies know."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            # Not empty, since some routers take that for a failure; but nobody reads blocks from this engine.
            "remote_block_ids": [[] for _ in self._rules],
            "remote_host": socket.gethostname(),
            "remote_port": 0,
            "remote_num_tokens": sending.tokens,
            **self._ranks,
        }

    # ---- decode engine --------------------------------------------------------------------------

    def receiving(self, request: Request) -> Receiving | None:
        """What to wait for, for a request that has just arrived; None if nothing was handed over to it."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return None
        engine = params.get("remote_engine_id")
        if isinstance(engine, str) and engine != self._engine:
            log.warning(
                "request %s was prefilled by %.64r; this engine can only load from %r and computes it",
                request.request_id, engine, self._engine,
            )  # fmt: skip
            return None
        prompt = request.num_prompt_tokens
        tokens = prompt - self._backoff
        told = params.get("remote_num_tokens")
        if tokens <= 0 or (isinstance(told, int) and told != tokens):
            return None
        end = time.monotonic() + self._settings.handoff_wait_s
        return Receiving(min(tokens, prompt - self._left_out), self._names(request, tokens), end)

    def poll(self, receiving: Receiving) -> Found | None:
        """All that was handed over, or None as long as something is missing. Scheduler's thread."""
        now = time.monotonic()
        if receiving.found is not None:
            if now - receiving._found_at <= self._settings.match_ttl_s:
                return receiving.found
            # The request has waited for blocks of the engine meanwhile.
            receiving.forget()
            receiving.end = max(receiving.end, now + self._settings.match_deadline_s)
        if (answer := receiving._answer) is not None:
            receiving._answer, receiving._asking = None, False
            if isinstance(answer, Found):
                receiving.found, receiving._found_at = answer, now
                return answer
            receiving._failures = receiving._failures + 1 if answer == "failed" else 0
            receiving._next = now + receiving._pause
            receiving._pause = min(2 * receiving._pause, _LONGEST_PAUSE_S)
        if not receiving._asking and now >= receiving._next and not self.over(receiving):
            receiving._asking = True
            if not self._space.store.transfers.call(lambda: self._ask(receiving)):
                receiving._answer = "failed"
        return None

    def over(self, receiving: Receiving) -> bool:
        """Whether waiting on is of no use."""
        return time.monotonic() >= receiving.end or receiving._failures >= _MOST_FAILURES

    def _ask(self, receiving: Receiving) -> None:
        """Call thread."""
        answer: Found | str = "failed"
        try:
            answer = self.look(receiving.names, receiving.tokens)
        except Exception:
            log.exception("looking for a prompt that was handed over failed unexpectedly")
        finally:
            receiving._answer = answer

    def look(self, names: Sequence[bytes], tokens: int) -> Found | str:
        """All that `tokens` leading tokens need, or "missing", or "failed". Call thread."""
        last = [self._packed(names, number, self._needed(number, tokens)[-1:]) for number in self._numbers]
        found = self._space.find(b"".join(last))
        if found is None:
            return "failed"
        if None in found:
            # They come last, as a rule, and one call tells that they haven't.
            return "missing"
        runs: list[list[Run]] = []
        for number in self._numbers:
            blocks = self._needed(number, tokens)
            got = self._runs(number, blocks, self._packed(names, number, blocks))
            if got is None or not all(self._fits(number, len(run.record.parts)) for run in got):
                return "missing"
            runs.append(got)
        stored = tuple(tokens // rule.block_tokens for rule in self._rules)
        return Found(tokens, tuple(runs), stored, "complete")

    @property
    def _numbers(self) -> range:
        return range(len(self._rules))

    def _needed(self, number: int, tokens: int) -> range:
        return self._rules[number].needed(tokens)

    def _runs(self, number: int, blocks: range, packed: bytes) -> list[Run] | None:
        """Runs that cover `blocks`, or None if some are missing."""
        if self._rules[number].reach == "prefix":
            match = self._space.match(packed)
            return match.runs if match.blocks == len(blocks) else None
        found = self._space.find(packed)
        if found is None:
            return None
        runs = []
        for block, run in zip(blocks, found, strict=True):
            if run is None:
                return None
            runs.append(Run(block, run.segment, run.slot, 1, run.record))
        return joined(runs)

    # ---- both -----------------------------------------------------------------------------------

    def _packed(self, names: Sequence[bytes], number: int, blocks: range) -> bytes:
        ratio = self._rules[number].block_tokens // self._hash_tokens
        return digests([names[(block + 1) * ratio - 1] for block in blocks], number)

    def _names(self, request: Request, tokens: int) -> list[bytes]:
        full = tokens // self._hash_tokens
        units = -(-tokens // self._align) * (self._align // self._hash_tokens)
        names = list(request.block_hashes[:full])
        return names if units == full else [*names, *[self._tail_name(request, tokens)] * (units - full)]


def open_handoffs(
    vllm_config: Any,
    space: Space,
    groups: Sequence[Group],
    *,
    hash_tokens: int,
    fits: Callable[[int, int], bool],
) -> Handoffs | None:
    """Of an engine; None if it is not to hand over anything (settings: `kv.handoff`)."""
    from vllm.utils.hashing import get_hash_fn_by_name

    wanted = space.store.settings.kv.handoff
    # Where it has been imported there are several connectors, and two that answer a request's parameters
    # end the engine.
    if not (_MULTI_CONNECTOR not in sys.modules if wanted is None else wanted):
        return None
    parallel = vllm_config.parallel_config
    return Handoffs(
        space,
        groups,
        hash_tokens=hash_tokens,
        tail_name=tail_name(
            get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo), hash_tokens
        ),
        fits=fits,
        lookahead=getattr(vllm_config, "num_prefill_lookahead_tokens", 0),
        ranks={
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        },
    )


def finished_well(request: Request) -> bool:
    """Whether a request has ended by itself, with all of its prompt computed."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _shorten(request: Request, tokens: int, hash_tokens: int) -> bool:
    """Drop so many tokens from the end of a prompt that only this connector's decode engine goes on with."""
    prompt = request.prompt_token_ids
    if prompt is None or getattr(request, "prompt_embeds", None) is not None:
        return False
    # Prompt logprobs would lose the last ones.
    if request.get_skip_reading_prefix_cache():
        return False
    rest = request.num_prompt_tokens - tokens
    features = getattr(request, "mm_features", None) or ()
    if any(one.mm_position.offset + one.mm_position.length > rest for one in features):
        return False
    # Samples of one request share their prompt's list; the other one is the request's own, and looked at.
    request.prompt_token_ids = prompt[:rest]
    del request._all_token_ids[rest:]
    del request.block_hashes[rest // hash_tokens :]
    request.num_prompt_tokens = rest
    # What would follow the shortened prompt is not what follows the prompt.
    request.max_tokens = 1
    return True


def tail_name(hash_function: Callable[[Any], bytes], hash_tokens: int) -> TailName:
    """Names of partial blocks, by vLLM's own means; a block hash stands for `hash_tokens` tokens."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

    def name(request: Request, tokens: int) -> bytes:
        start = tokens // hash_tokens * hash_tokens
        parent = request.block_hashes[start // hash_tokens - 1] if start else None
        extra = generate_block_hash_extra_keys(request, start, tokens, 0)[0] if tokens > start else None
        rest = request.all_token_ids[start:tokens]
        # A full block's extra keys never start with this.
        return bytes(hash_block_tokens(hash_function, parent, rest, ("kvstore tail", extra)))

    return name
