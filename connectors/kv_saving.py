"""What a KV connector saves: which blocks of which group, cut into which segments.

On the scheduler's thread. Full blocks are saved as a segment's worth of them is computed; what remains of a
prompt is saved when the prompt ends. Two things can't wait that long: a block that its window leaves behind
is gone at the next step, so it goes with this one, and so does a state that vLLM offers (Mamba mode "align").

A null block, which stands for one that was left behind, is never saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from connectors.boundary import alignment, most_tokens
from connectors.kv_types import Save
from connectors.layout import Group
from connectors.planning import EVERY_BLOCK, pieces, saves_due
from kvstore.keys import SegmentId, new_segment_id
from kvstore.metrics import Counters
from schemas.records import rounded_cost

#: vLLM's null block.
NULL_BLOCK = 0

#: Block tables of a request: vLLM's KV cache group -> block ids.
Tables = Sequence[Sequence[int]]


@dataclass(slots=True)
class Progress:
    """How far a request's saving has come, per group, in its blocks."""

    #: Leading blocks that are in the store or on their way, or are gone: saving starts here.
    saved: list[int]
    #: Leading blocks that are counted, if they weren't saved, as not worth it.
    passed_over: list[int]
    #: Tokens at which the request may be resumed in any case: windows before them are saved.
    ends: tuple[int, ...] = ()
    #: Blocks that were counted as not worth it, and the first token of the first of them.
    refused: int = 0
    refused_from: int = 0

    def refuse(self, blocks: int, first_token: int) -> None:
        """So many blocks more, from there on, are not worth saving."""
        if blocks > 0:
            self.refused_from = min(self.refused_from, first_token) if self.refused else first_token
            self.refused += blocks


@dataclass(slots=True)
class _Segment:
    hashes: list[tuple[int, bytes]]
    writers: int
    abandon: Callable[[SegmentId], None]
    ended: int = 0
    written: bool = True


@dataclass
class Saving:
    """Of one engine. Owned by the scheduler's thread."""

    groups: Sequence[Group]
    hash_tokens: int
    #: Per group, how many blocks make a segment.
    segment_blocks: Sequence[int]
    counters: Counters
    #: Called with segments of which some rank has not written its part, after all have ended.
    abandon: Callable[[SegmentId], None]
    clock: Callable[[], float] = time.time
    #: Windows are saved only before every so many tokens, and before a request's ends; 0: everywhere.
    window_interval: int = 0
    #: What a token takes to compute, in microseconds, as far as it is known (connectors.pace).
    token_us: float = 0.0
    #: Blocks being saved by this engine, by group and hash, and in which segment, so that requests of a batch
    #: that share a prefix save it once. Emptied as the workers report.
    _busy: dict[tuple[int, bytes], SegmentId] = field(default_factory=dict)
    _segments: dict[SegmentId, _Segment] = field(default_factory=dict)

    def start(self) -> Progress:
        """Of a request of which nothing is known yet."""
        return Progress([0] * len(self.groups), [0] * len(self.groups))

    def ends(self, prompt_tokens: int) -> tuple[int, ...]:
        """Where a prompt may be resumed when it comes again, and when a longer one does."""
        rules = [group.rule for group in self.groups]
        return prompt_tokens, most_tokens(rules, prompt_tokens), most_tokens(rules, prompt_tokens + 1)

    @property
    def under_way(self) -> int:
        """Segments that some rank has not ended."""
        return len(self._segments)

    def is_under_way(self, segment: SegmentId) -> bool:
        """Whether some rank has not ended it."""
        return segment in self._segments

    def carrying(self, blocks: Iterable[tuple[int, bytes]]) -> set[SegmentId]:
        """Segments under way that have some of these blocks, by group and hash."""
        return {self._busy[block] for block in blocks if block in self._busy}

    def plan(
        self,
        progress: Progress,
        hashes: Sequence[bytes],
        done_tokens: int,
        admitted: int,
        tables: Callable[[], Tables | None],
        *,
        computed: int | None = None,
        final: bool,
        partial: bool = False,
    ) -> list[Save]:
        """What to save of a request when `done_tokens` are computed, hashed and wanted.

        `computed` tokens are so by the end of this step, whether wanted or not: windows move on with them.
        `admitted` is how many leading hashes are worth it. `tables` is asked only if something is due.
        `final`: nothing follows that could fill a segment up. `partial`: a last block that isn't full is
        saved too; `hashes` then has a name for it.
        """
        saves: list[Save] = []
        blocks: Tables | None = None
        for number, group in enumerate(self.groups):
            if group.offered:
                continue
            moved_on = group.rule.skipped_tokens(computed or done_tokens) // group.rule.block_tokens
            leaves = final or moved_on > progress.saved[number]
            due = self._due(progress, number, done_tokens, admitted, final=leaves, partial=partial)
            if due and blocks is None and (blocks := tables()) is None:
                break
            for run in due:
                assert blocks is not None
                own = {table: blocks[table] for table in group.tables}
                for piece in self._worth_resuming(group, run, progress.ends):
                    saves += self._cut(number, piece, hashes, own)
        return saves

    def _worth_resuming(self, group: Group, run: range, ends: Sequence[int]) -> list[range]:
        """The blocks of `run` that some token at which a request may be resumed needs of a window."""
        if not self.window_interval or group.rule.reach == "prefix":
            return [run]
        size = group.rule.block_tokens
        align = alignment([one.rule for one in self.groups])
        interval = -(-self.window_interval // align) * align

        def needed(block: int) -> bool:
            # Of the regular places, the first one after the block looks back the furthest.
            regular = -(-(block + 1) * size // interval) * interval
            return any(
                group.rule.skipped_tokens(end) // size <= block < -(-end // size) for end in (regular, *ends)
            )

        return pieces(run, needed)

    def _due(
        self,
        progress: Progress,
        number: int,
        done_tokens: int,
        admitted: int,
        *,
        final: bool,
        partial: bool,
    ) -> list[range]:
        """Runs of blocks that go with this step."""
        group = self.groups[number]
        size = group.rule.block_tokens
        done = -(-done_tokens // size) if partial else done_tokens // size
        worth = done if admitted == EVERY_BLOCK else min(done, admitted * self.hash_tokens // size)
        saved = progress.saved[number]
        if done <= saved:
            return []
        due, progress.saved[number] = saves_due(
            saved,
            worth,
            self.segment_blocks[number],
            # The last block worth it ends a segment: nothing comes after it that could fill one up.
            final=final or worth < done,
        )
        if worth < done:
            over = done - max(progress.saved[number], progress.passed_over[number])
            self.counters.saved("not_admitted", max(0, over))
            progress.refuse(over, (done - over) * size)
            progress.passed_over[number] = max(done, progress.passed_over[number])
        # Decoding fills the partial block, which then has another name.
        progress.saved[number] = min(progress.saved[number], max(saved, done_tokens // size))
        return due

    def take_offers(
        self,
        progress: Progress,
        hashes: Sequence[bytes],
        offers: Iterable[tuple[int, int, int]],
        admitted: int,
        most_tokens: int,
        *,
        partial: bool = False,
    ) -> list[Save]:
        """States that this step's forward pass completes: (block table, block id, tokens before it).

        Only those at a block's end have a name, others if `partial`: those within a block serve vLLM's own
        cache. Those of at most `most_tokens` are wanted.
        """
        found: dict[tuple[int, int], dict[int, int]] = {}
        for table, block, tokens in offers:
            for number, group in enumerate(self.groups):
                if group.offered and table in group.tables:
                    found.setdefault((number, tokens), {})[table] = block
        saves: list[Save] = []
        for (number, tokens), blocks in sorted(found.items()):
            group, size = self.groups[number], self.groups[number].rule.block_tokens
            first = -(-tokens // size) - 1
            if (tokens % size and not partial) or tokens > most_tokens or len(blocks) < len(group.tables):
                continue
            if first < progress.saved[number]:
                continue
            progress.saved[number] = tokens // size
            if admitted != EVERY_BLOCK and tokens > admitted * self.hash_tokens:
                self.counters.saved("not_admitted", 1)
                progress.refuse(1, first * size)
                continue
            alone = {table: {first: block} for table, block in blocks.items()}
            saves += self._cut(number, range(first, first + 1), hashes, alone)
        return saves

    def _cut(
        self,
        number: int,
        run: range,
        hashes: Sequence[bytes],
        tables: Mapping[int, Sequence[int] | Mapping[int, int]],
    ) -> list[Save]:
        """Segments of the blocks of `run` that are there and that nobody is saving just now."""
        ratio = self.groups[number].rule.block_tokens // self.hash_tokens
        names = {block: hashes[(block + 1) * ratio - 1] for block in run}

        def wanted(block: int) -> bool:
            if (number, names[block]) in self._busy:
                return False
            return all(block_ids[block] != NULL_BLOCK for block_ids in tables.values())

        saves = []
        for piece in pieces(run, wanted):
            segment = new_segment_id()
            own = [names[block] for block in piece]
            keys = [(number, name) for name in own]
            self._busy.update(dict.fromkeys(keys, segment))
            self._segments[segment] = _Segment(keys, self.groups[number].writers, self.abandon)
            ids = {table: [blocks[block] for block in piece] for table, blocks in tables.items()}
            cost = self._cost_us(number, len(own))
            saves.append(Save(number, segment, int(self.clock()), piece.start, own, ids, cost_us=cost))
        return saves

    def _cost_us(self, number: int, blocks: int) -> int:
        """What computing so many blocks takes. A token is computed once for all groups: the first one that is
        loaded whole carries it, so that what is loaded adds up to what need not be computed."""
        carrier = next((i for i, group in enumerate(self.groups) if group.rule.reach == "prefix"), 0)
        if number != carrier:
            return 0
        return rounded_cost(blocks * self.groups[number].rule.block_tokens * self.token_us)

    def ended(self, segment: SegmentId, count: int, *, written: bool) -> list[tuple[int, bytes]] | None:
        """So many ranks have ended their parts of a segment; `written`: all of them wrote theirs.

        When the last one has: the segment's blocks by group and hash if all wrote theirs, else none of them.
        None before that.
        """
        state = self._segments.get(segment)
        if state is None:
            return None
        state.ended += count
        state.written &= written
        if state.ended < state.writers:
            return None
        del self._segments[segment]
        self._forget(state)
        if state.written:
            return state.hashes
        if state.writers > 1:
            state.abandon(segment)
        return []

    def drop(self, save: Save) -> None:
        """No rank will hear of this one."""
        state = self._segments.pop(save.segment, None)
        if state is not None:
            self._forget(state)
            self.counters.saved("dropped", len(save.hashes))

    def _forget(self, state: _Segment) -> None:
        for block in state.hashes:
            self._busy.pop(block, None)

    def restart(self, never_sent: Iterable[Save], abandon: Callable[[SegmentId], None]) -> None:
        """Blocks belong to another namespace from now on: what is being saved for the former one is no reason
        to leave them out. `never_sent` are planned saves that no rank will hear of."""
        for save in never_sent:
            self._segments.pop(save.segment, None)
        for state in self._segments.values():
            state.hashes = []
        self._busy.clear()
        self.abandon = abandon
