"""A segment of several ranks is visible when the last rank has written its part, or never.

Workers of several ranks with stores of their own, as in processes of their own, on one folder; the
scheduler's account of their reports; what becomes of what only some of them wrote.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.layout import Group, LocalGroup, Page, merge
from connectors.engine.shards import Place
from connectors.kv.messages import GroupLoad, KVStoreWorkerMetadata, Load, Save
from connectors.kv.save import Saving
from connectors.kv.worker.worker import KVWorker
from connectors.planning import EVERY_BLOCK
from kvstore.conformance.faulty import Plan, Rule
from kvstore.format import segment as codec
from kvstore.keys import block_key, new_segment_id
from kvstore.metrics import Counters
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import Namespace, Parallel
from tests.store.world import chain, make_store, match, namespace, with_parts
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

TOKENS, CONTENT, BLOCKS, COUNT = 8, 16, 24, 6
A = chain(*range(COUNT))
#: Clocks of machines differ.
NOW = 1_700_000_000
GRACE_S = 500.0


@dataclass
class Clock:
    now: float

    def __call__(self) -> float:
        return self.now


@dataclass
class Rank:
    """One worker process."""

    place: Place
    group: LocalGroup
    store: Store
    plan: Plan
    clock: Clock
    worker: KVWorker = field(init=False)
    caches: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        shape = (BLOCKS, *self.group.shape[1:])
        numbers = torch.Generator().manual_seed(self.place.number)
        self.caches = {
            name: torch.randint(-9, 9, shape, generator=numbers).to(torch.bfloat16)
            for _, names in self.group.tables
            for name in names
        }
        self.worker = KVWorker(self.store, [self.group], segment_blocks=[COUNT], place=self.place)
        self.worker.register(self.caches, BLOCKS)

    def run(self, saves: Sequence[Save]) -> None:
        self.worker.writes.start(saves)
        # What found no room would wait for it.
        self.worker.writes.give_up()
        assert self.store.transfers.drain(PATIENCE_S)


@dataclass
class Ranks:
    """An engine's ranks, and its scheduler's half as far as saving goes."""

    all: list[Rank]
    groups: list[Group]
    store: Store
    space: Space
    saving: Saving
    abandoned: list[bytes]

    def plan(self, hashes: Sequence[bytes] = A) -> list[Save]:
        ids = list(range(1, 1 + len(hashes)))
        return self.saving.plan(
            self.saving.start(), hashes, len(hashes) * TOKENS, EVERY_BLOCK, lambda: [ids], final=True
        )

    def report(self, *ranks: Rank) -> None:
        """One step: what these ranks have to say arrives together."""
        told = [one for rank in ranks if (one := rank.worker.take_report()) is not None]
        if told:
            for segment, (count, written) in reduce(
                KVStoreWorkerMetadata.aggregate, told
            ).ended_saves.items():
                self.saving.ended(segment, count, written=written)

    @property
    def seen(self) -> int:
        return match(self.space, A).blocks

    def payloads(self, folder: Path) -> int:
        return sum(path.is_file() for path in folder.glob("*/??/*"))


def groups_of(kind: str) -> list[tuple[Place, LocalGroup]]:
    """Two ranks: a head each (`heads`), three and two layers (`stages`), both the same (`copies`)."""
    names = [f"layers.{i}" for i in range(5)]
    if kind == "stages":
        page = Page("full", TOKENS, 0, "BF16", 2, TOKENS, CONTENT, 1, offered=False)
        cuts = [tuple(names[:3]), tuple(names[3:])]
        return [(Place(0, 1, i, 2), LocalGroup(page, ((0, cut),))) for i, cut in enumerate(cuts)]
    shards = 2 if kind == "heads" else 1
    page = Page("full", TOKENS, 0, "BF16", 1, TOKENS, CONTENT, shards, offered=False)
    return [(Place(i, 2), LocalGroup(page, ((0, tuple(names)),))) for i in range(2)]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[str], Ranks]]:
    #: The index's, whoever opens it; and of the store that is not a rank's.
    shared = Clock(NOW)
    with ExitStack() as stack:

        def make(kind: str = "heads") -> Ranks:
            places = groups_of(kind)
            stages = [[group] for place, group in places if place.tp_rank == 0]
            groups = merge(stages, any_tp=False)
            place = places[0][0]
            spaced: Namespace = namespace(
                groups=(groups[0].spec,), parallel=Parallel(tp=place.tp, pp=place.pp)
            )

            def store(clock: Clock, plan: Plan | None = None) -> Store:
                options: dict[str, Any] = {
                    "claim_ttl_s": 0.05,
                    "grace_s": GRACE_S,
                    "kv": {"staging_bytes": 1 << 17},
                }
                opened = stack.enter_context(make_store(tmp_path, plan=plan, clock=shared, **options))
                return with_parts(opened, clock=clock)

            ranks = []
            for number, (place, group) in enumerate(places):
                clock, plan = Clock(NOW + 100 * (number + 1)), Plan()
                rank = Rank(place, group, store(clock, plan), plan, clock)
                rank.worker.use(spaced, "one start of one engine")
                ranks.append(rank)
            own = store(shared)
            space = own.open(spaced, block_bytes=groups[0].spec.slot_bytes)
            abandoned: list[bytes] = []

            def abandon(segment: Any) -> None:
                abandoned.append(segment)
                space.abandon(segment)

            saving = Saving(groups, TOKENS, [COUNT], own.counters, abandon, clock=lambda: NOW + 0.9)
            return Ranks(ranks, groups, own, space, saving, abandoned)

        yield make


@pytest.mark.parametrize("kind", ["heads", "stages"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nothing_is_visible_before_the_last_rank_has_written(
    kind: str, order: tuple[int, int], made: Any, tmp_path: Path
) -> None:
    ranks = made(kind)
    first, last = (ranks.all[i] for i in order)
    [save] = ranks.plan()
    first.run([save])
    assert ranks.payloads(tmp_path) == 1
    ranks.report(*ranks.all)
    assert (ranks.seen, ranks.saving.under_way) == (0, 1)
    assert ranks.plan() == [], "they are being saved"
    last.run([save])
    assert ranks.seen == COUNT
    ranks.report(*ranks.all)
    assert (ranks.saving.under_way, ranks.abandoned) == (0, [])
    # By the index's clock, less what the rank had waited that waited least.
    [run] = match(ranks.space, A).runs
    assert (run.record.created_s, len(run.record.parts)) == (NOW - 100, 2)
    for rank in range(2):
        [path] = tmp_path.glob(f"*/??/*.{rank}")
        header = codec.parse_header(memoryview(path.read_bytes()), namespace=ranks.space.id)
        assert header.meta.created_s == NOW - 100 * (rank + 1)
    # And each reads back what it wrote, into other blocks.
    for rank in ranks.all:
        before = {name: cache[1 : 1 + COUNT].clone() for name, cache in rank.caches.items()}
        ids = list(range(10, 10 + COUNT))
        rank.worker.reads.start([Load("r", [GroupLoad(0, 0, [run], A, {0: ids})])])
        end = time.monotonic() + PATIENCE_S
        while not (over := rank.worker.reads.take_finished()[0]) and time.monotonic() < end:
            time.sleep(0.001)
        assert over == {"r"} and rank.worker.reads.take_failed_blocks() == set()
        assert all(torch.equal(rank.caches[name][10 : 10 + COUNT], old) for name, old in before.items())


def drop(rank: Rank) -> None:
    """No staging is free."""
    staging = rank.worker.memory.saves
    while staging.try_acquire(rank.group.slot_bytes) is not None:
        pass


FAILURES: dict[str, Callable[[Rank], None]] = {
    "dropped": drop,
    "no space": lambda rank: rank.plan.replace(Rule("no_space")),
    "not permitted": lambda rank: rank.plan.replace(Rule("permission", ("put",))),
    "failed": lambda rank: rank.plan.replace(Rule("transient", ("put",))),
    "answer lost": lambda rank: rank.plan.replace(Rule("unanswered", ("put",))),
}


def heal(rank: Rank) -> None:
    rank.plan.replace()
    rank.worker.register(rank.caches, BLOCKS)


@pytest.mark.parametrize("kind", ["heads", "stages"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("how", FAILURES)
def test_what_one_rank_has_not_written_is_abandoned(
    kind: str, bad: int, how: str, made: Any, tmp_path: Path
) -> None:
    ranks = made(kind)
    FAILURES[how](ranks.all[bad])
    [save] = ranks.plan()
    for rank in ranks.all:
        rank.run([save])
    assert ranks.seen == 0
    # The ranks report at different steps.
    ranks.report(ranks.all[bad])
    assert (ranks.saving.under_way, ranks.abandoned) == (1, [])
    ranks.report(*ranks.all)
    assert (ranks.saving.under_way, ranks.abandoned) == (0, [save.segment])

    # What the other has written stays for the grace time, then it goes; no rank's part is left behind.
    written = ranks.payloads(tmp_path)
    assert written == (2 if how == "answer lost" else 1)
    store = ranks.store
    store.clock.now += GRACE_S - 1
    store.rounds.housekeep()
    assert ranks.payloads(tmp_path) == written
    store.clock.now += 2
    store.rounds.housekeep()
    assert ranks.payloads(tmp_path) == 0

    # Nothing is in the way of the next request with these blocks, once the claim has expired.
    heal(ranks.all[bad])
    store.clock.now += 1
    [again] = ranks.plan()
    assert again.segment != save.segment
    for rank in ranks.all:
        rank.run([again])
    ranks.report(*ranks.all)
    assert (ranks.seen, len(ranks.abandoned)) == (COUNT, 1)


@pytest.mark.parametrize("stored", [True, False])
def test_who_loses_the_claim_between_two_ranks_leaves_no_half_behind(
    stored: bool, made: Any, tmp_path: Path
) -> None:
    """Another engine stores the blocks, or begins to, after the first rank's claim on them has expired."""
    ours, theirs = made(), made()
    [save], [other] = ours.plan(), theirs.plan()
    ours.all[0].run([save])
    ours.store.clock.now += 1
    for rank in theirs.all[: 1 + stored]:
        rank.run([other])
    assert ours.seen == (COUNT if stored else 0)
    ours.all[1].run([save])
    ours.report(*ours.all)
    assert ours.abandoned == [save.segment]
    if not stored:
        theirs.all[1].run([other])
    theirs.report(*theirs.all)
    assert (theirs.seen, theirs.abandoned) == (COUNT, [])
    ours.store.clock.now += GRACE_S + 1
    ours.store.rounds.housekeep()
    assert ours.payloads(tmp_path) == 2


def test_ranks_save_the_same_blocks_whatever_they_find_stored(made: Any) -> None:
    """Another engine stores some of the blocks between two ranks: leaving them out would spoil the rest."""
    ours, theirs = made(), made()
    [save] = ours.plan()
    [other] = theirs.plan(A[:2])
    ours.all[0].run([save])
    ours.store.clock.now += 1
    for rank in theirs.all:
        rank.run([other])
    assert ours.seen == 2
    ours.all[1].run([save])
    ours.report(*ours.all)
    assert (ours.seen, ours.abandoned) == (COUNT, [])


def test_a_part_that_comes_after_the_end_is_refused(made: Any, tmp_path: Path) -> None:
    """Of a rank that was thought to have failed, whose commit was only late."""
    ranks = made()
    [save] = ranks.plan()
    ranks.all[0].run([save])
    ranks.space.abandon(save.segment)
    ranks.all[1].run([save])
    assert ranks.payloads(tmp_path) == 1, "what was refused is deleted at once"
    ranks.report(*ranks.all)
    assert ranks.seen == 0
    assert ranks.abandoned == [save.segment]
    ranks.store.clock.now += GRACE_S + 1
    ranks.store.rounds.housekeep()
    assert ranks.payloads(tmp_path) == 0


def test_ranks_that_hold_copies_neither_write_nor_are_waited_for(made: Any, tmp_path: Path) -> None:
    ranks = made("copies")
    [save] = ranks.plan()
    ranks.all[1].run([save])
    assert ranks.all[1].worker.take_report() is None
    ranks.all[0].run([save])
    ranks.report(*ranks.all)
    assert (ranks.seen, ranks.saving.under_way, ranks.payloads(tmp_path)) == (COUNT, 0, 1)
    # A failure of the only writer leaves nothing that needs to be abandoned.
    drop(ranks.all[0])
    [save] = ranks.plan(chain(*range(50, 53)))
    for rank in ranks.all:
        rank.run([save])
    ranks.report(*ranks.all)
    assert (ranks.saving.under_way, ranks.abandoned) == (0, [])


SEGMENTS = [new_segment_id() for _ in range(4)]


@given(
    ranks=st.integers(1, 4),
    failures=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))),
    seed=st.integers(0, 1 << 16),
)
def test_reports_may_be_spread_over_steps_in_any_way(
    ranks: int, failures: set[tuple[int, int]], seed: int
) -> None:
    """Each rank reports each segment once; which of them arrive together is chance."""
    source, abandoned = random.Random(seed), []
    saving = Saving([_group(ranks)], TOKENS, [1], Counters(), abandoned.append)
    hashes = chain(*range(4))
    saves = saving.plan(saving.start(), hashes, 4 * TOKENS, EVERY_BLOCK, lambda: [[1, 2, 3, 4]], final=True)
    told = [(rank, i) for rank in range(ranks) for i in range(4)]
    source.shuffle(told)
    left = {save.segment: ranks for save in saves}
    while told:
        step, told = told[: (cut := source.randint(1, 4))], told[cut:]
        reports = [
            KVStoreWorkerMetadata({saves[i].segment: (1, (rank, i) not in failures)}) for rank, i in step
        ]
        merged = reduce(KVStoreWorkerMetadata.aggregate, reports)
        for segment, (count, written) in merged.ended_saves.items():
            left[segment] -= count
            blocks = saving.ended(segment, count, written=written)
            assert (blocks is None) == (left[segment] > 0)
    assert saving.under_way == 0
    broken = {saves[i].segment for rank, i in failures if rank < ranks}
    assert sorted(abandoned) == sorted(broken if ranks > 1 else set())
    # All of them may be saved again, and a report that comes twice is nobody's.
    assert saving.ended(saves[0].segment, 1, written=False) is None
    assert (
        len(saving.plan(saving.start(), hashes, 4 * TOKENS, EVERY_BLOCK, lambda: [[1] * 4], final=True)) == 4
    )


def _group(writers: int) -> Group:
    page = Page("full", TOKENS, 0, "BF16", 1, TOKENS, CONTENT, writers, offered=False)
    [group] = merge([[LocalGroup(page, ((0, ("layers.0",)),))]], any_tp=False)
    assert group.writers == writers
    return group


@given(st.data())
def test_reports_of_loads_add_up(data: st.DataObject) -> None:
    """The first block that some rank lacks is the first that all compute; in any order of ranks."""
    names = st.sampled_from(["a", "b", "c"])
    one = st.builds(
        KVStoreWorkerMetadata,
        failed_loads=st.dictionaries(names, st.dictionaries(st.integers(0, 2), st.integers(0, 9))),
        bad_segments=st.sets(st.sampled_from(SEGMENTS)),
    )
    reports = data.draw(st.lists(one, min_size=1, max_size=4))
    merged = reduce(KVStoreWorkerMetadata.aggregate, reports)
    for name, group in itertools.product("abc", range(3)):
        blocks = [
            report.failed_loads[name][group]
            for report in reports
            if group in report.failed_loads.get(name, {})
        ]
        assert merged.failed_loads.get(name, {}).get(group) == min(blocks, default=None)
    assert merged.bad_segments == set().union(*(report.bad_segments for report in reports))
    assert reduce(KVStoreWorkerMetadata.aggregate, reversed(reports)) == merged


def test_blocks_have_one_name_on_all_ranks(made: Any) -> None:
    ranks = made()
    [save] = ranks.plan()
    for rank in ranks.all:
        rank.run([save])
    [run] = match(ranks.space, A).runs
    group = ranks.all[1].group
    into = [memoryview(bytearray(group.slot_bytes)) for _ in A]
    for number in range(2):
        slots = ranks.space.load(run, [block_key(one, 0) for one in A], into, rank=number)
        assert [slot.shape for slot in slots] == [group.shape] * COUNT
