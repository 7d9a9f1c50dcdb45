"""Cuts the blocks that a KV connector saves into segments, group by group.

Full blocks are saved whenever enough for a segment are computed; the rest of a prompt is saved when the
prompt ends. Two kinds can't wait that long. A block that its window leaves behind is gone at the next step,
so this step saves it. The same holds for a state that vLLM offers (Mamba mode "align").

A segment that is cut after short ones replaces those if they are no larger (connectors.planning.joins_due):
their blocks are in the request's table, loaded or computed. So a chain that grows turn by turn does not lie
in as many segments as turns.

A null block, which stands for a block left behind, is never saved.

A save may have to wait in a worker (connectors.kv.worker.writes), and is dropped there once its request has
lost its blocks. A request that counts a block as saved which then isn't counts it as unsaved again. A later
request starts where the store's match ends, whatever the engine's own cache has: it closes such a hole.

Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from connectors.engine.layout import Group
from connectors.kv.messages import Save
from connectors.planning import EVERY_BLOCK, joins_due, joins_of, ranges, saves_due, tail_of
from kvstore.index.port import Run
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    SaltId,
    SegmentId,
    SessionId,
    block_key,
    digest,
    digests,
    new_segment_id,
)
from kvstore.metrics import Counters
from kvstore.rules.prefix import alignment, most_tokens
from schemas.records import SegmentRecord, rounded_cost

#: The id of vLLM's null block.
NULL_BLOCK = 0

#: How often a request that keeps its blocks saves again what was dropped: something fails again and again.
_MOST_AGAIN = 3

#: How many blocks are remembered that some rank has dropped.
_MOST_CLAIMED = 1 << 16
#: Most segments under way: more than staging and waiting blocks can hold.
MOST_UNDER_WAY = 1 << 16

#: Most segments that are remembered because a save was to replace them; about 100 bytes each.
_MOST_JOINED = 1 << 14

#: Block tables of a request: the block ids in each KV cache group of vLLM's.
Tables = Sequence[Sequence[int]]


@dataclass(slots=True)
class Progress:
    """How far the saving of a request has come; lists are by group, in blocks of the group."""

    #: Leading blocks that are in the store, on their way there or gone: saving starts after them.
    saved: list[int]
    #: Leading blocks among which those that weren't saved have been counted as not worth it.
    passed_over: list[int]
    request_id: str = ""
    #: Id of the request's salt.
    salt: SaltId = NO_SALT
    #: Its session, whose own its segments are.
    session: SessionId = NO_SESSION
    #: Whether a save was dropped that it counted on; how often it has saved again while it had its blocks.
    lost: bool = False
    again: int = 0
    #: Numbers of tokens at which the request may be resumed in any case: windows before them are saved.
    ends: tuple[int, ...] = ()
    #: Number of blocks that were counted as not worth saving, and the first token of the first of them.
    refused: int = 0
    refused_from: int = 0
    #: Its stored runs, by group, as far as they are known; [] if none of them may be replaced.
    runs: list[Sequence[Run]] = field(default_factory=list)

    def found(self, stored: Sequence[int], runs: Sequence[Sequence[Run]]) -> None:
        """Go on from what a match has found, by group."""
        self.saved, self.runs = list(stored), list(runs)

    def stored(self, group: int, run: Run, most: int) -> None:
        """Record a segment of its own that is stored; the last `most` blocks may be replaced some time."""
        if not self.runs:
            return
        end = run.start + run.count
        others = [
            one for one in self.runs[group][-most:] if one.start >= end or one.start + one.count <= run.start
        ]
        self.runs[group] = sorted([*others, run], key=lambda one: one.start)

    def refuse(self, blocks: int, first_token: int) -> None:
        """Count `blocks` more blocks, from `first_token` on, as not worth saving."""
        if blocks > 0:
            self.refused_from = min(self.refused_from, first_token) if self.refused else first_token
            self.refused += blocks


@dataclass(slots=True)
class _Segment:
    """A segment that some rank has not ended."""

    #: The blocks that it adds, by group and hash; empty if they belong to a former namespace.
    hashes: list[tuple[int, bytes]]
    writers: int
    abandon: Callable[[SegmentId], None]
    group: int
    #: The requests that count its blocks as saved, its own first -> the first of them.
    counted: list[tuple[Progress, int]]
    ended: int = 0
    written: bool = True
    #: Whether it counts as dropped, so that its blocks may be saved in another one.
    lost: bool = False
    #: Segments that it is to replace.
    olds: tuple[SegmentId, ...] = ()
    #: The run of its own request's chain that it holds.
    run: Run | None = None


@dataclass
class Saving:
    """Plans the saves of one engine's requests, and follows them until all ranks have ended."""

    groups: Sequence[Group]
    hash_tokens: int
    #: Number of blocks that make a segment, by group.
    segment_blocks: Sequence[int]
    counters: Counters
    #: Called with a segment of which some rank has not written its part, after all ranks have ended.
    abandon: Callable[[SegmentId], None]
    clock: Callable[[], float] = time.time
    #: Distance, in tokens, of the places before which windows are saved, besides `Progress.ends`; 0: all of
    #: them are saved.
    window_interval: int = 0
    #: Cost of computing a token, in microseconds; 0 while it isn't known (connectors.choice.cost).
    token_us: float = 0.0
    #: Blocks that this engine is saving, by group and hash -> their segment. So requests of a batch that
    #: share a prefix save it once. Emptied as the workers report.
    _busy: dict[tuple[int, bytes], SegmentId] = field(default_factory=dict)
    _segments: dict[SegmentId, _Segment] = field(default_factory=dict)
    #: Blocks, by group and hash, that some rank has dropped and another may have claimed in the index.
    _claimed: set[tuple[int, bytes]] = field(default_factory=set)
    #: Segments that a save under way is to replace.
    _joining: set[SegmentId] = field(default_factory=set)
    #: Segments that a save was to replace, the last one met at the end. A segment that is still there stays:
    #: it is pinned, retained, or another session's own, and each request would write a copy of it.
    _joined: OrderedDict[SegmentId, None] = field(default_factory=OrderedDict)

    def start(
        self, request_id: str = "", salt: SaltId = NO_SALT, session: SessionId = NO_SESSION
    ) -> Progress:
        """Returns the progress of a new request: nothing is saved yet."""
        return Progress([0] * len(self.groups), [0] * len(self.groups), request_id, salt, session)

    def ends(self, prompt_tokens: int) -> tuple[int, ...]:
        """Returns the numbers of tokens at which a prompt may be resumed, by itself or by a longer one."""
        rules = [group.rule for group in self.groups]
        return prompt_tokens, most_tokens(rules, prompt_tokens), most_tokens(rules, prompt_tokens + 1)

    @property
    def under_way(self) -> int:
        """Returns how many segments some rank has not ended."""
        return len(self._segments)

    def carrying(self, blocks: Iterable[tuple[int, bytes]]) -> set[SegmentId]:
        """Returns the segments under way that hold some of these blocks, given by group and hash."""
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
        """Returns what to save of a request when `done_tokens` tokens are computed, hashed and wanted.

        `computed` is how many tokens are computed by the end of this step, whether wanted or not: windows
        move on with them. `admitted` is how many leading hashes are worth saving. `tables` is called only if
        something is due. `final`: nothing follows that could fill a segment up. `partial`: a last block that
        isn't full is saved too; `hashes` then has a name for it.
        """
        saves: list[Save] = []
        blocks: Tables | None = None
        if progress.lost:
            progress.lost = False
            progress.again += 1
        if progress.again > _MOST_AGAIN:
            return saves
        for number, group in enumerate(self.groups):
            if group.offered:
                continue
            moved_on = group.rule.skipped_tokens(computed or done_tokens) // group.rule.block_tokens
            leaves = final or moved_on > progress.saved[number]
            stored = progress.saved[number]
            due, olds = self._due(progress, number, done_tokens, admitted, final=leaves, partial=partial)
            if due and blocks is None and (blocks := tables()) is None:
                break
            for run in due:
                assert blocks is not None
                own = {table: blocks[table] for table in group.tables}
                for piece in self._worth_resuming(group, run, progress.ends):
                    saves += self._cut(progress, number, piece, hashes, own, olds, stored)
        return saves

    def _worth_resuming(self, group: Group, run: range, ends: Sequence[int]) -> list[range]:
        """Returns the blocks of `run` that lie in the window before a place where a request may resume."""
        if not self.window_interval or group.rule.reach == "prefix":
            return [run]
        size = group.rule.block_tokens
        align = alignment([one.rule for one in self.groups])
        interval = -(-self.window_interval // align) * align

        def needed(block: int) -> bool:
            # The first regular place after the block has the window that reaches back the furthest.
            regular = -(-(block + 1) * size // interval) * interval
            return any(
                group.rule.skipped_tokens(end) // size <= block < -(-end // size) for end in (regular, *ends)
            )

        return ranges(run, needed)

    def _due(
        self,
        progress: Progress,
        number: int,
        done_tokens: int,
        admitted: int,
        *,
        final: bool,
        partial: bool,
    ) -> tuple[list[range], list[Run]]:
        """Returns the runs of one group's blocks that are saved with this step, and what they replace."""
        group = self.groups[number]
        size = group.rule.block_tokens
        done = -(-done_tokens // size) if partial else done_tokens // size
        worth = done if admitted == EVERY_BLOCK else min(done, admitted * self.hash_tokens // size)
        saved = progress.saved[number]
        if done <= saved:
            return [], []
        most = self.segment_blocks[number]
        # The last block worth saving ends a segment: nothing comes after it that could fill one up.
        final = final or worth < done
        olds = [] if partial else self._olds(progress, number, worth)
        due, end = saves_due(olds[0].start if olds else saved, worth, most, final=final)
        if end < saved:
            # Not all that they have would be written anew yet.
            olds = []
            due, end = saves_due(saved, worth, most, final=final)
        progress.saved[number] = end
        if worth < done:
            over = done - max(progress.saved[number], progress.passed_over[number])
            self.counters.saved("not_admitted", max(0, over))
            progress.refuse(over, (done - over) * size)
            progress.passed_over[number] = max(done, progress.passed_over[number])
        # A partial block isn't counted: decoding fills it, and it then has another name.
        progress.saved[number] = min(progress.saved[number], max(saved, done_tokens // size))
        return due, olds

    def _olds(self, progress: Progress, number: int, worth: int) -> list[Run]:
        """Returns the segments before a request's unsaved blocks that are written anew with those."""
        if not progress.runs or self.groups[number].rule.reach != "prefix":
            return []
        saved, most = progress.saved[number], self.segment_blocks[number]
        tail = tail_of(progress.runs[number], saved, most, progress.salt)
        for at in reversed(range(len(tail))):
            if tail[at].segment in self._joined:
                self._joined.move_to_end(tail[at].segment)
                tail = tail[at + 1 :]
                break
        olds = joins_due(worth - saved, tail, most)
        return olds if self._joining.isdisjoint(old.segment for old in olds) else []

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
        """Returns saves of offered states: those that this step's forward pass completes.

        `offers` are (block table, block id, number of tokens before it). A state at a block's end has a name;
        one within a block only has one if `partial`, and else serves vLLM's own cache only. States after more
        than `most_tokens` tokens aren't wanted.
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
            saves += self._cut(progress, number, range(first, first + 1), hashes, alone)
        return saves

    def _cut(
        self,
        progress: Progress,
        number: int,
        run: range,
        hashes: Sequence[bytes],
        tables: Mapping[int, Sequence[int] | Mapping[int, int]],
        olds: Sequence[Run] = (),
        stored: int = 0,
    ) -> list[Save]:
        """Returns saves of the blocks of `run` that are there and that this engine isn't saving just now.

        They replace `olds`, the last of the chain's first `stored` blocks."""
        ratio = self.groups[number].rule.block_tokens // self.hash_tokens
        names = {block: hashes[(block + 1) * ratio - 1] for block in run}
        chain = digest(block_key(hashes[ratio - 1], number))

        def wanted(block: int) -> bool:
            if (busy := self._busy.get((number, names[block]))) is not None:
                self._segments[busy].counted.append((progress, block))
                return False
            return all(block_ids[block] != NULL_BLOCK for block_ids in tables.values())

        def packed(blocks: range) -> bytes:
            return digests(hashes[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio], number)

        saves = []
        for piece in ranges(run, wanted):
            joins = joins_of(olds, piece, stored, packed)
            if joins.blocks == len(piece) != len(run):
                # Another request is saving the blocks behind them.
                continue
            segment = new_segment_id(chain)
            own = [names[block] for block in piece]
            keys = [(number, name) for name in own[joins.blocks :]]
            replaced = tuple(old.segment for old in joins.olds)
            self._busy.update(dict.fromkeys(keys, segment))
            self._joining.update(replaced)
            counted = [(progress, piece.start + joins.blocks)]
            ids = {table: [blocks[block] for block in piece] for table, blocks in tables.items()}
            cost = self._cost_us(number, len(keys)) + _cost_of(olds, piece)
            chained = self.groups[number].rule.reach == "prefix"
            # It is as old as the segments that it joins. Without them, its age by the index's clock is
            # unknown here.
            aged_s = joins.created_s
            made = SegmentRecord((), len(own), "none", aged_s, piece.start, 0, cost, progress.salt)
            self._segments[segment] = _Segment(
                keys, self.groups[number].writers, self.abandon, number, counted, olds=replaced,
                run=Run(piece.start, segment, 0, len(own), made) if chained else None,
            )  # fmt: skip
            saves.append(
                Save(
                    number, segment, int(self.clock()), piece.start, own, ids, progress.request_id,
                    # Blocks before a window, and states, go back to the pool while the request runs.
                    blocks_stay=chained, insist=not self._claimed.isdisjoint(keys), cost_us=cost,
                    salt=progress.salt, session=progress.session, joins=joins, chain=chain,
                )
            )  # fmt: skip
        return saves

    def _cost_us(self, number: int, blocks: int) -> int:
        """Returns the cost of computing `blocks` blocks, in microseconds.

        A token is computed once for all groups, so only the first group that is loaded whole carries its
        cost: then the costs of what is loaded add up to what need not be computed."""
        carrier = next((i for i, group in enumerate(self.groups) if group.rule.reach == "prefix"), 0)
        if number != carrier:
            return 0
        return rounded_cost(blocks * self.groups[number].rule.block_tokens * self.token_us)

    def lost(self, segment: SegmentId) -> list[Progress]:
        """Count the blocks of a segment that some rank has dropped, or will, as not saved.

        Returns the progress of those requests that counted on it."""
        state = self._segments.get(segment)
        if state is None or state.lost:
            return []
        state.lost = True
        self._forget(segment, state)
        if state.writers > 1 and len(self._claimed) < _MOST_CLAIMED:
            self._claimed.update(state.hashes)
        for progress, first in state.counted:
            progress.saved[state.group] = min(progress.saved[state.group], first)
            # Blocks that a window or a state leaves behind can't be saved again in any case.
            progress.lost |= self.groups[state.group].rule.reach == "prefix"
        return [progress for progress, _ in state.counted]

    def ended(self, segment: SegmentId, count: int, *, written: bool) -> list[tuple[int, bytes]] | None:
        """Follow a segment of which `count` more ranks have ended their parts; `written`: all wrote theirs.

        Returns None until the last rank has ended; then the segment's blocks, by group and hash, if all ranks
        wrote theirs, else an empty list.
        """
        state = self._segments.get(segment)
        if state is None:
            return None
        state.ended += count
        state.written &= written
        if state.ended < state.writers:
            return None
        del self._segments[segment]
        self._forget(segment, state)
        self._joining.difference_update(state.olds)
        if state.written:
            self._claimed.difference_update(state.hashes)
            self._joined.update(dict.fromkeys(state.olds))
            while len(self._joined) > _MOST_JOINED:
                self._joined.popitem(last=False)
            if state.run is not None and state.hashes:
                state.counted[0][0].stored(state.group, state.run, 2 * self.segment_blocks[state.group])
            return state.hashes
        if state.writers > 1:
            state.abandon(segment)
        return []

    def surplus(self) -> list[tuple[SegmentId, int]]:
        """Returns the oldest segments that are one too many, and how many ranks save a part of each: a rank
        whose saves are broken ends none, and so many are never on their way."""
        many = len(self._segments) - MOST_UNDER_WAY
        return [(one, state.writers) for one, state in islice(self._segments.items(), max(0, many))]

    def forget(self, progress: Progress) -> None:
        """Forget the segments under way of a request. Others that count on them count them as lost."""
        for segment in [key for key, one in self._segments.items() if one.counted[0][0] is progress]:
            self.lost(segment)
            if (state := self._segments.pop(segment, None)) is not None:
                self._joining.difference_update(state.olds)

    def drop(self, save: Save) -> None:
        """Give up a planned save, which is `lost`, before any rank gets it."""
        if (state := self._segments.pop(save.segment, None)) is not None:
            self._joining.difference_update(state.olds)
            self.counters.saved("dropped", len(save.added))

    def _forget(self, segment: SegmentId, state: _Segment) -> None:
        for block in state.hashes:
            if self._busy.get(block) == segment:
                del self._busy[block]

    def restart(self, never_sent: Iterable[Save], abandon: Callable[[SegmentId], None]) -> None:
        """Make all blocks belong to another namespace from now on: blocks that are being saved for the former
        one may be saved again. `never_sent` are planned saves that no rank will get."""
        for save in never_sent:
            self._segments.pop(save.segment, None)
        for state in self._segments.values():
            state.hashes = []
        self._busy.clear()
        self._claimed.clear()
        self._joining.clear()
        self.abandon = abandon


def _cost_of(olds: Sequence[Run], blocks: range) -> int:
    """Returns what computing those of `blocks` took that `olds` have, in microseconds, as far as is known."""
    cost = 0.0
    for old in olds:
        common = min(old.start + old.count, blocks.stop) - max(old.start, blocks.start)
        cost += old.record.cost_us * max(0, common) / old.record.slots
    return rounded_cost(cost)
