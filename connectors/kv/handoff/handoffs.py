"""Handoffs: what the connector calls, with the prefill engine's side; the other is in `receiving`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.engine.guard import bare, otherwise
from connectors.engine.layout import Group
from connectors.engine.names import BlockNames
from connectors.engine.step import RequestView
from connectors.kv.handoff.prompts import PromptNames
from connectors.kv.handoff.receiving import ENGINE, Receiver, Receiving
from connectors.kv.match import Found
from connectors.kv.messages import Save
from connectors.kv.save import Progress, Saving, Tables
from connectors.planning import EVERY_BLOCK
from kvstore.keys import SegmentId
from kvstore.rules.prefix import PrefixRule
from kvstore.store.space import Space

#: A handle has this in place of the host that other connectors name: some routers refuse a handle without a
#: host. Clients that send requests must not learn a host's name.
_NO_HOST = "kvstore"


@dataclass(slots=True, eq=False)
class Sending:
    """A prompt that this engine hands over. Belongs to the scheduler's thread."""

    tokens: int
    #: See `PromptNames.of`.
    names: list[bytes]
    #: Whether its blocks stay where they are until the request is finished, so that a save may wait for room.
    keeps_blocks: bool
    #: Segments in which this request saves its blocks.
    segments: set[SegmentId] = field(default_factory=set)
    #: Segments of other requests that bring blocks of this prompt.
    others: set[SegmentId] = field(default_factory=set)
    #: Whether all of it is stored or is being stored.
    complete: bool = False
    #: Whether some of it could not be saved.
    failed: bool = False

    def restart(self) -> None:
        """Start over: the request has lost its blocks and is computed once more."""
        self.segments.clear()
        self.others.clear()
        self.complete = self.failed = False


class NoHandoffs:
    """The calls that `Handoffs` takes, without effect: for an engine that hands nothing over."""

    def use(self, space: Space) -> None:
        """Use this namespace from now on."""

    @otherwise(lambda: (None, None))
    def begin(
        self, request: RequestView, names: BlockNames, *, sends: bool, receives: bool
    ) -> tuple[Sending | None, Receiving | None]:
        """Returns what this engine sends or receives of a request that has just arrived, if it may do so."""
        return None, None

    def poll(self, receiving: Receiving) -> Found | None:
        """Returns all that was handed over, or None as long as something is missing."""
        return None

    @bare
    def last_saves(
        self,
        sending: Sending,
        saving: Saving,
        progress: Progress,
        tables: Tables | None,
        computed: int,
    ) -> list[Save]:
        """Returns what is left to save when all of the prompt is computed, including the partial block and
        the states. `computed` is how many tokens are computed by the end of this step.
        """
        return []

    def mark(self, sending: Sending, saves: Sequence[Save]) -> None:
        """Mark these saves as part of what a request hands over."""

    def hand_over(self, request: RequestView, sending: Sending) -> dict[str, Any] | None:
        """Returns the parameters of a request that has ended, for the decode engine.

        Returns None if nothing is handed over: the decode engine then computes the prompt at once.
        """
        return None


class Handoffs(NoHandoffs):
    """Hands over the prompts of one engine, and takes those that were handed over to it."""

    def __init__(
        self,
        space: Space,
        groups: Sequence[Group],
        *,
        hash_tokens: int,
        hash_function: Callable[[Any], bytes],
        fits: Callable[[int, int], bool],
        lookahead: int = 0,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        """`fits` is KVEngine's; `lookahead` is how many tokens drafting heads look ahead; `ranks` are the
        sizes of this engine's parallelism, for the handle."""
        self._groups = groups
        self._rules: list[PrefixRule] = [group.rule for group in groups]
        self._hash_tokens = hash_tokens
        self._ranks = dict(ranks or {})
        self._settings = space.backends.settings.kv
        state = any(rule.reach == "state" for rule in self._rules)
        #: Number of prompt tokens at the end that the prefill engine must not compute.
        self._backoff = max(int(state), lookahead - 1)
        # Number of prompt tokens at the end that the decode engine must not load.
        left_out = max(self._backoff, int(any(rule.reach != "prefix" for rule in self._rules)))
        self.names = PromptNames(self._rules, hash_tokens, hash_function)
        self.receiver = Receiver(
            space, self._rules, self.names, fits, backoff=self._backoff, left_out=left_out
        )
        self.use(space)

    def use(self, space: Space) -> None:
        self._engine = ENGINE + space.id
        self.receiver.use(space)

    def begin(
        self, request: RequestView, names: BlockNames, *, sends: bool, receives: bool
    ) -> tuple[Sending | None, Receiving | None]:
        # Sending comes first: it may shorten the prompt.
        sending = self.sending(request, names) if sends else None
        receives = receives and not request.skip_reading_prefix_cache
        receiving = self.receiver.begin(request, names) if receives else None
        if receiving is not None:
            self.poll(receiving)
        return sending, receiving

    def poll(self, receiving: Receiving) -> Found | None:
        return self.receiver.poll(receiving)

    def sending(self, request: RequestView, names: BlockNames) -> Sending | None:
        """Returns the hand-off of a request that has just arrived, or None if its client asked for none or it
        can't be done. Cuts off the end of the prompt if the decode engine must compute it.
        """
        if not request.kv_transfer_params.get("do_remote_decode"):
            return None
        if request.resumable or request.num_prompt_tokens <= self._backoff:
            return None
        if request.num_prompt_tokens - self._backoff > names.named_tokens:
            return None
        if self._backoff and not request.shorten(self._backoff, self._hash_tokens):
            return None
        tokens = request.num_prompt_tokens
        made = self.names.of(names, tokens)
        return Sending(tokens, made, keeps_blocks=request.max_tokens <= 1) if made is not None else None

    def last_saves(
        self,
        sending: Sending,
        saving: Saving,
        progress: Progress,
        tables: Tables | None,
        computed: int,
    ) -> list[Save]:
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
            save.blocks_stay |= sending.keeps_blocks and save.first >= first
        sending.others = saving.carrying(self._blocks(sending)) - {save.segment for save in saves}
        sending.others -= sending.segments
        sending.complete = True
        return saves

    def _blocks(self, sending: Sending) -> list[tuple[int, bytes]]:
        """Returns the blocks that a decode engine needs of the prompt, by group and hash."""
        found = []
        for number, rule in enumerate(self._rules):
            needed = self.names.in_group(sending.names, number, rule.needed(sending.tokens))
            found += [(number, name) for name in needed]
        return found

    def mark(self, sending: Sending, saves: Sequence[Save]) -> None:
        for save in saves:
            save.handed_over = save.insist = True
            sending.segments.add(save.segment)

    def hand_over(self, request: RequestView, sending: Sending) -> dict[str, Any] | None:
        if not sending.complete or sending.failed or not request.finished_well():
            return None
        return self.handle(request, sending)

    def handle(self, request: RequestView, sending: Sending) -> dict[str, Any]:
        """Returns the parameters for the decode engine, under the names that proxies know."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            # Some routers take an empty list for a failure. No engine reads blocks from this engine, though.
            "remote_block_ids": [[] for _ in self._rules],
            "remote_host": _NO_HOST,
            "remote_port": 0,
            "remote_num_tokens": sending.tokens,
            **self._ranks,
        }


def open_handoffs(
    vllm_config: Any,
    space: Space,
    groups: Sequence[Group],
    *,
    hash_tokens: int,
    fits: Callable[[int, int], bool],
) -> Handoffs | None:
    """Returns an engine's hand-offs, or None if the setting `kv.handoff` is off."""
    from vllm.utils.hashing import get_hash_fn_by_name

    if not space.backends.settings.kv.handoff:
        return None
    parallel = vllm_config.parallel_config
    return Handoffs(
        space,
        groups,
        hash_tokens=hash_tokens,
        hash_function=get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo),
        fits=fits,
        lookahead=getattr(vllm_config, "num_prefill_lookahead_tokens", 0),
        ranks={
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        },
    )
