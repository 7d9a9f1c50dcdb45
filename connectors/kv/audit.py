"""Declines one load in so many, so that the engine computes what the store has, and both can be compared.

A checksum says that bytes are as they were written. It can't say that the written bytes were right: an
accelerator may be broken, an update of vLLM may have changed a layout, or the namespace may lack a relevant
property. So one in `kv.audit_every` loads that could be promised is declined. The request computes its
blocks, and each rank compares them with the stored blocks (connectors.kv.worker.audits). A difference beyond
the engine's arithmetic means that one of both sides is wrong. The segment is then evicted, so that no engine
loads it, and its payload is kept for a while. The second wrong segment of a namespace ends this engine's use
of the namespace: the engine itself may be wrong, and must not store more.

Estimates that decline loads may be wrong, too. So one in as many loads that don't seem to pay is made all the
same. It is left out if it is expected to take several times as long as computing. Both measure regret
(connectors.choice.regret).

Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connectors.engine.guard import guarded, otherwise
from connectors.engine.layout import Group
from connectors.engine.names import BlockNames
from connectors.engine.provenance import Origin
from connectors.engine.step import RequestView, StepView
from connectors.kv.match import Found
from connectors.kv.messages import GroupLoad, Load
from connectors.kv.save import NULL_BLOCK
from connectors.planning import slice_runs
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.weighed import Weighed

#: Wrong segments of one namespace after which this engine leaves the namespace alone.
MOST_WRONG = 2
#: A load that is expected to take more times as long as computing is not made: it isn't that wrong.
_MOST_TIMES = 3.0


@dataclass(slots=True)
class _Audit:
    """A request whose load was declined: the stored blocks that it computes now, by group."""

    request: RequestView
    names: BlockNames
    #: Where its blocks come from: blocks that may be wrong themselves can't show that stored blocks are
    #: wrong.
    origin: Origin
    hashes: Sequence[bytes]
    runs: tuple[list[Run], ...]
    #: The tokens from here on up to `done_tokens` were computed here since.
    first_tokens: int
    done_tokens: int
    #: Tokens up to which the store had the request.
    stop_tokens: int
    #: Whether the outcome proves the writers of `runs` (connectors.kv.proving.proofs).
    proof: bool = False


class Audits:
    """Chooses the loads that one engine declines, and plans what its ranks compare."""

    def __init__(self, groups: Sequence[Group], hash_tokens: int, every: int) -> None:
        """One load in `every` is declined; 0: none."""
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._every = every
        #: Loads since one was declined.
        self._loads = 0
        #: Loads that didn't seem to pay since one of them was made.
        self._unpaid = 0
        self._under_way: dict[str, _Audit] = {}
        self._wrong: set[SegmentId] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def restart(self) -> None:
        """Forget what was declined, and what was wrong, in a former namespace."""
        self._under_way.clear()
        self._wrong.clear()

    def drop(self) -> None:
        """Compare none of what was declined up to now."""
        self._under_way.clear()

    @otherwise(bool)
    def declines(
        self, request: RequestView, names: BlockNames, origin: Origin, found: Found, computed: int
    ) -> bool:
        """Returns whether the load of what was found beyond `computed` tokens is declined."""
        self._loads += 1
        if not self._every or self._loads < self._every:
            return False
        self._loads = 0
        self._under_way[request.request_id] = _Audit(
            request, names, origin, list(names.all()), found.runs, computed, computed, found.tokens
        )
        return True

    def proves(
        self,
        request: RequestView,
        names: BlockNames,
        origin: Origin,
        runs: tuple[list[Run], ...],
        first_tokens: int,
        stop_tokens: int,
    ) -> None:
        """Have these runs compared, by group, as far as the request computes what lies between its tokens."""
        self._under_way[request.request_id] = _Audit(
            request,
            names,
            origin,
            list(names.all()),
            runs,
            first_tokens,
            first_tokens,
            stop_tokens,
            proof=True,
        )

    @otherwise(bool)
    def compares(self, request_id: str) -> bool:
        """Returns whether a request computes something that is to be compared."""
        return request_id in self._under_way

    @otherwise(bool)
    def tries(self, weighed: Weighed) -> bool:
        """Returns whether a load is made that does not seem to pay, by what was weighed."""
        if not self._every or weighed.load_s > _MOST_TIMES * weighed.compute_s:
            return False
        self._unpaid += 1
        if self._unpaid < self._every:
            return False
        self._unpaid = 0
        return True

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or starts over: what it computes next may be a local hit."""
        self._under_way.pop(request_id, None)

    @otherwise(list)
    def plan_step(self, step: StepView) -> list[Load]:
        """Returns, by request, stored blocks that this step's forward pass completes in the engine itself."""
        due: list[Load] = []
        for request_id in self._under_way.keys() & step.num_scheduled_tokens.keys():
            audit = self._under_way[request_id]
            groups = self._plan(audit, step.num_scheduled_tokens[request_id], step)
            if groups:
                due.append(Load(request_id, list(groups), proof=audit.proof))
        return due

    @guarded(())
    def _plan(self, audit: _Audit, scheduled: int, step: StepView) -> Sequence[GroupLoad]:
        request = audit.request
        before, computed = audit.done_tokens, request.num_computed_tokens
        if computed > before:
            # Another connector has brought what lies between.
            before = audit.first_tokens = computed
        audit.done_tokens = min(computed + scheduled, audit.stop_tokens)
        if audit.done_tokens >= audit.stop_tokens:
            self.forget(request.request_id)
        if step.has_sync_kv_loads or not step.has_block_ids:
            # Tokens that another connector loads within this step may not arrive.
            audit.first_tokens = audit.done_tokens
            return ()
        if (tables := step.block_ids(request.request_id)) is None:
            return ()
        due = (self._piece(number, group, audit, before, tables) for number, group in enumerate(self._groups))
        return [piece for piece in due if piece is not None]

    def _piece(
        self, number: int, group: Group, audit: _Audit, before: int, tables: Sequence[Sequence[int]]
    ) -> GroupLoad | None:
        # A state is in its block for a moment only, which the scheduler half doesn't know.
        if group.offered:
            return None
        size, ratio = group.rule.block_tokens, group.rule.block_tokens // self._hash_tokens
        certain = audit.origin.certain_tokens if audit.names.items else audit.done_tokens
        # A block that ends in this step may have begun in an earlier one.
        first = max(-(-audit.first_tokens // size), before // size)
        blocks = range(first, min(audit.done_tokens, certain) // size)
        own = {table: tables[table] for table in group.tables}
        runs = [
            run
            for run in slice_runs(audit.runs[number], blocks)
            if not any(NULL_BLOCK in ids[run.start : run.start + run.count] for ids in own.values())
        ]
        if not runs:
            return None
        return GroupLoad(
            number,
            blocks.start,
            runs,
            list(audit.hashes[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio]),
            {table: list(ids[blocks.start : blocks.stop]) for table, ids in own.items()},
        )

    @otherwise(lambda: True)
    def found_wrong(self, segments: Iterable[SegmentId]) -> bool:
        """Record segments that differ from what was computed. Returns whether the engine must leave the
        namespace alone from now on."""
        self._wrong.update(segments)
        return len(self._wrong) >= MOST_WRONG
