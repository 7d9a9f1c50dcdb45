"""A writer proves itself before it is believed: the first load from it is computed, and both are compared.

A checksum says that bytes are as they were written, and the namespace that writer and reader are configured
alike. Neither says that the writer computes the same as this engine: there may be a broken accelerator,
build, dtype or kernel that no list knows. So an engine does not promise blocks of an unproven writer (one
start of one engine). The request computes those blocks, and each rank compares them with the stored blocks,
as an audit does (connectors.kv.audit, connectors.kv.worker.audits). No request waits for the outcome, and no
token depends on the compared blocks.

All ranks alike: the writer is proven, for all engines (kvstore.index.verdicts). Different on a rank: this
engine refuses the writer. That condemns the writer's segments only if some writer computes what this engine
does, or if a second engine says the same: a broken reader differs from every honest writer. A reader that
differs from several writers, and agrees with no writer, leaves the namespace alone
(`KnownWriters.distrusts_itself`).

Another way would be to load all but the last block, compute that, and compare it at the end of the step. vLLM
would drop the step's tokens if it differs. But vLLM can drop only the tokens of the step that is reported on.
With asynchronous scheduling the next step has been scheduled by then, and its tokens are delivered
(docs/adr/0050).

One request at a time proves a writer; other requests that find the same writer meanwhile compute. A
comparison that fails or is dropped proves nothing, and the next request compares again. A state, which lies
in its block for a moment only, is not compared: where a model has nothing else, writers are believed.

Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from connectors.engine.layout import Group
from connectors.kv.audit import Audits
from connectors.kv.match import Found
from connectors.kv.messages import Compared, Load, Wrong
from connectors.kv.requests import Tracked
from connectors.planning import slice_runs
from kvstore.index.port import Run
from kvstore.keys import WriterId
from kvstore.store.space import Space

#: Proofs that are remembered at a time, and for how long one keeps others from proving the same writers, in
#: seconds.
_MOST = 64
_UNDER_WAY_S = 60.0


@dataclass(slots=True)
class _Proof:
    """A request that computes what writers have stored, to compare it."""

    #: Each with one of its runs.
    writers: dict[WriterId, Run]
    began: float
    #: Steps whose comparisons the ranks were sent.
    planned: int = 0
    #: Whether no further step has anything to compare.
    over: bool = False
    compared: Compared = field(default_factory=Compared)


class Proofs:
    """Decides what one engine may load of what it finds, and follows the comparisons. Call `use` first."""

    def __init__(
        self,
        groups: Sequence[Group],
        hash_tokens: int,
        ranks: int,
        audits: Audits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._ranks = ranks
        self._audits = audits
        self._clock = clock
        self._comparable = any(not group.offered for group in groups)
        self._by_block = [group.rule.reach for group in groups] == ["prefix"]
        self._under_way: dict[str, _Proof] = {}

    def use(self, space: Space) -> None:
        """Load from this namespace from now on."""
        self._space = space
        self._under_way.clear()

    def __len__(self) -> int:
        return len(self._under_way)

    def believed(self, tracked: Tracked, found: Found, computed: int, tokens: int) -> int:
        """Returns how many of the `tokens` beyond `computed` may be loaded. Has the rest compared, if no
        other request does that."""
        if not self._comparable:
            return tokens
        stop = computed + tokens
        beyond = [self._beyond(number, found, computed, stop) for number in range(len(self._groups))]
        doubted = self._space.writers.unproven(run for runs in beyond for run in runs)
        if not doubted:
            return tokens
        believed = 0
        if self._by_block:
            first = next(run.start for run in beyond[0] if run.record.writer in doubted)
            believed = max(0, first * self._groups[0].rule.block_tokens - computed)
        if not doubted <= self._being_proven():
            self._begin(tracked, found, computed + believed, doubted)
        return believed

    def _beyond(self, number: int, found: Found, computed: int, stop: int) -> list[Run]:
        size = self._groups[number].rule.block_tokens
        return slice_runs(found.runs[number], range(computed // size, -(-stop // size)))

    def _being_proven(self) -> set[WriterId]:
        since = self._clock() - _UNDER_WAY_S
        return {one for proof in self._under_way.values() if proof.began >= since for one in proof.writers}

    def _begin(self, tracked: Tracked, found: Found, first_tokens: int, writers: set[WriterId]) -> None:
        name = tracked.request.request_id
        runs = tuple([run for run in group if run.record.writer in writers] for group in found.runs)
        self._audits.proves(tracked.request, tracked.names, tracked.origin, runs, first_tokens, found.tokens)
        self._under_way.pop(name, None)
        while len(self._under_way) >= _MOST:
            del self._under_way[next(iter(self._under_way))]
        some = {WriterId(run.record.writer): run for group in runs for run in group}
        self._under_way[name] = _Proof(some, self._clock())

    def forget(self, request_id: str) -> list[Wrong]:
        """Compare nothing more for a request that has ended, or starts over. Returns what `reported` does."""
        proof = self._under_way.get(request_id)
        if proof is None:
            return []
        proof.over = True
        return self._concluded(request_id, proof)

    def planned(self, loads: Iterable[Load]) -> list[Wrong]:
        """Record what this step has the ranks compare. Returns what `reported` does."""
        for load in loads:
            if load.proof and (proof := self._under_way.get(load.request_id)) is not None:
                proof.planned += 1
        wrong: list[Wrong] = []
        for name, proof in list(self._under_way.items()):
            # The request has begun, or it would have started over.
            proof.over = proof.over or not self._audits.compares(name)
            wrong += self._concluded(name, proof)
        return wrong

    def reported(self, compared: dict[str, Compared]) -> list[Wrong]:
        """Take what ranks have compared. Returns the blocks that are not what this engine computes,
        of the proofs that have ended by that."""
        wrong: list[Wrong] = []
        for name, some in compared.items():
            if (proof := self._under_way.get(name)) is not None:
                proof.compared.add(some)
                wrong += self._concluded(name, proof)
        return wrong

    def _concluded(self, name: str, proof: _Proof) -> list[Wrong]:
        if not proof.over or proof.compared.steps < proof.planned * self._ranks:
            return []
        del self._under_way[name]
        wrong: list[Wrong] = []
        for writer in proof.writers:
            if (differs := proof.compared.wrong.get(writer)) is not None:
                run, one = differs
                wrong.append(one)
                self._space.settle(run, "differs")
            elif writer in proof.compared.unsure:
                continue
            elif len(proof.compared.alike.get(writer, ())) == self._ranks:
                self._space.settle(proof.writers[writer], "alike")
        return wrong

    def distrusts_itself(self) -> bool:
        """Returns whether this engine differs from so many writers, and agrees with none, that it may be the
        one that is wrong."""
        return self._space.writers.distrusts_itself()
