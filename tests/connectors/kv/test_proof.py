"""A writer that nobody has compared: what the scheduler half promises, has compared, and makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.tensors import accelerator_id
from connectors.kv.choosing import Choosing
from connectors.kv.messages import Compared, Wrong
from connectors.kv.scheduler import KVScheduler
from kvstore.index.port import Run
from kvstore.keys import WriterId, chain_like, digests, new_segment_id, place_of, writer_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.store.writers.known import MOST_REFUSED
from kvstore.store.writers.own import Writer
from schemas.records import PartRecord, SegmentRecord
from tests.connectors.groups import TOKENS
from tests.connectors.kv.bed import Bed
from tests.connectors.kv.world import answer, half, tell
from tests.fake_vllm import FakeBlocks, FakeRequest, step
from tests.store.world import chain, make_store, match, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.proves]

HASHES = chain(*range(6))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path, kv={"match_deadline_s": 60.0, "audit_every": 0})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


@pytest.fixture
def half_of(store: Store, space: Space) -> Callable[..., KVScheduler]:
    return lambda **changes: half(store, space, **changes)


@pytest.fixture
def written(tmp_path: Path, space: Space) -> Iterator[Callable[..., WriterId]]:
    """Has another start of an engine store some blocks."""
    stores: list[Store] = []

    def write(name: str, hashes: list[bytes] = HASHES, first: int = 0) -> WriterId:
        other = make_store(tmp_path)
        stores.append(other)
        other.backends.writer.adopt(name)
        segment = new_segment_id(digests(hashes))
        open_space(other).save(slots(hashes[first:]), depth=first, chain=chain_like(segment), segment=segment)
        return writer_id(name)

    yield write
    for one in stores:
        one.close()


def ask(scheduler: KVScheduler, name: str, computed: int = 0) -> tuple[Any, int | None]:
    request = FakeRequest(name, [*range(6), 77])
    scheduler.on_new_request(request)
    return request, answer(scheduler, request, computed)[0]


def say(
    scheduler: KVScheduler, name: str, writer: WriterId, alike: bool, rank: int = 0, steps: int = 1
) -> None:
    """A rank's report of what it has compared of a request."""
    if alike:
        tell(scheduler, compared={name: Compared(steps, {writer: {rank}})})
        return
    record = SegmentRecord((PartRecord(4096, (1,)),), 1, "none", 1, writer=writer)
    run = Run(0, new_segment_id(), 0, 1, record)
    tell(scheduler, compared={name: Compared(steps, {}, {writer: (run, Wrong(name, 0, 0, HASHES[:1]))})})


def prove(scheduler: KVScheduler, name: str, writer: WriterId, *, alike: bool) -> None:
    """A request that computes, and what is found out by that."""
    request, tokens = ask(scheduler, name)
    assert tokens == 0
    step(scheduler, (request, 7 * TOKENS))
    say(scheduler, name, writer, alike)
    scheduler.request_finished(request, [[]])


def test_the_first_hit_is_computed_compared_and_then_believed(
    half_of: Any, store: Store, space: Space, written: Any
) -> None:
    writer = written("a writer")
    scheduler = half_of()
    request, tokens = ask(scheduler, "first")
    assert tokens == 0
    assert store.counters.snapshot()["miss_blocks{unproven}"] == 6
    [audit] = step(scheduler, (request, 7 * TOKENS)).audits
    [group] = audit.groups
    assert audit.proof and [(run.start, run.count) for run in group.runs] == [(0, 6)]
    assert ask(scheduler, "meanwhile")[1] == 0, "nothing is known before the ranks have said so"
    say(scheduler, "first", writer, True)
    assert ask(scheduler, "next")[1] == 6 * TOKENS
    assert store.transfers.drain(PATIENCE_S)
    assert store.index.verdicts(space.id)[writer].state == "proven"


def test_one_request_at_a_time_proves_a_writer(half_of: Any, written: Any) -> None:
    written("a writer")
    scheduler = half_of()
    first, _ = ask(scheduler, "first")
    second, tokens = ask(scheduler, "second")
    assert tokens == 0
    told = step(scheduler, (first, 7 * TOKENS), (second, 7 * TOKENS))
    assert [one.request_id for one in told.audits] == ["first"]


def test_what_this_engine_wrote_is_believed(half_of: Any, space: Space) -> None:
    space.save(slots(HASHES))
    assert ask(half_of(), "own")[1] == 6 * TOKENS


def test_a_proven_writers_blocks_before_an_unproven_ones_are_loaded(
    half_of: Any, space: Space, written: Any
) -> None:
    space.save(slots(HASHES[:4]))
    written("a writer", first=4)
    scheduler = half_of()
    request, tokens = ask(scheduler, "mixed")
    assert tokens == 4 * TOKENS
    request.num_computed_tokens = 4 * TOKENS
    [audit] = step(scheduler, (request, 3 * TOKENS)).audits
    assert [(run.start, run.count) for run in audit.groups[0].runs] == [(4, 2)]


def test_a_writer_that_is_only_near_in_one_step_is_not_proven(half_of: Any, written: Any) -> None:
    writer = written("a writer")
    scheduler = half_of()
    request, _ = ask(scheduler, "first")
    step(scheduler, (request, 3 * TOKENS))
    tell(scheduler, compared={"first": Compared(1, {}, {}, {writer})})
    step(scheduler, (request, 4 * TOKENS))
    say(scheduler, "first", writer, True)
    assert ask(scheduler, "next")[1] == 0


def test_all_ranks_and_all_steps_must_agree(half_of: Any, written: Any) -> None:
    writer = written("a writer")
    scheduler = half_of(ranks=2)
    request, _ = ask(scheduler, "first")
    step(scheduler, (request, 3 * TOKENS))
    for rank in (0, 1):
        say(scheduler, "first", writer, True, rank)
    assert ask(scheduler, "early")[1] == 0, "half of it is still to be computed"
    step(scheduler, (request, 4 * TOKENS))
    say(scheduler, "first", writer, True, 0)
    assert ask(scheduler, "of one rank")[1] == 0
    say(scheduler, "first", writer, True, 1)
    assert ask(scheduler, "next")[1] == 6 * TOKENS


def test_a_rank_that_could_not_compare_proves_nothing(half_of: Any, written: Any) -> None:
    writer = written("a writer")
    scheduler = half_of(ranks=2)
    request, _ = ask(scheduler, "first")
    step(scheduler, (request, 7 * TOKENS))
    say(scheduler, "first", writer, True, 0)
    tell(scheduler, compared={"first": Compared(1)})
    second, tokens = ask(scheduler, "second")
    assert tokens == 0 and len(scheduler._proofs) == 1
    assert step(scheduler, (second, 7 * TOKENS)).audits[0].proof, "the next request compares again"


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_request_that_ends_early_leaves_nothing(half_of: Any, written: Any, how: str) -> None:
    written("a writer")
    scheduler = half_of()
    request, _ = ask(scheduler, "first")
    step(scheduler, (request, 2 * TOKENS))
    if how == "aborted":
        scheduler.request_finished(request, [[]])
    else:
        request.num_computed_tokens = 0
        assert answer(scheduler, request)[0] == 0
        scheduler.request_finished(request, [[]])
    # A comparison from before it ended may still come.
    tell(scheduler, compared={"first": Compared(1)})
    assert (len(scheduler._proofs), len(scheduler._audits)) == (0, 0)


def test_an_engine_computes_where_all_its_ranks_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, place = iter(["GPU-2", "GPU-1"]), Writer()
    monkeypatch.setattr("connectors.kv.connector.accelerator_id", lambda: next(ids))
    place.computes_on(["GPU-1", "GPU-2"])
    with Bed(tmp_path, ranks=2) as bed:
        assert bed.space.backends.writer.place == place.place


def test_an_accelerator_is_asked_for_its_id_only_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(device: int) -> Any:
        asked.append(device)
        return SimpleNamespace(uuid="a uuid")

    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert (accelerator_id(), asked) == ("", [])
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert (accelerator_id(), asked) == ("a uuid", [3])


def test_one_that_differs_is_refused_here_and_disputed_for_others(
    half_of: Any, store: Store, space: Space, written: Any
) -> None:
    writer = written("a writer")
    scheduler = half_of()
    prove(scheduler, "first", writer, alike=False)
    assert store.transfers.drain(PATIENCE_S)
    assert store.index.verdicts(space.id)[writer].state == "disputed"
    # Another engine must still find out by itself, and nothing is evicted.
    assert ask(scheduler, "next")[1] == 0 and not scheduler.requests.retired
    assert store.maintenance.usage(space.id).segments == 1
    # A second engine says the same.
    store.index.judge(space.id, writer, "differs", by=place_of("a second place"), stands=False)
    until(lambda: match(space, HASHES).blocks == store.maintenance.usage(space.id).segments == 0)


def test_an_engine_that_agrees_with_somebody_fails_what_differs(
    half_of: Any, store: Store, space: Space, written: Any
) -> None:
    other = chain(50, 51)
    bad, good = written("bad"), written("good", other)
    scheduler = half_of()
    prove(scheduler, "first", bad, alike=False)
    request = FakeRequest("second", [50, 51, 77])
    scheduler.on_new_request(request)
    assert answer(scheduler, request)[0] == 0
    step(scheduler, (request, 3 * TOKENS))
    say(scheduler, "second", good, True)
    assert store.transfers.drain(PATIENCE_S)
    found = {writer: one.state for writer, one in store.index.verdicts(space.id).items()}
    assert found == {bad: "failed", good: "proven"}, "what it disputed before, it now fails"
    assert match(space, other).blocks == 2, "that costs nobody else's hits"


def test_an_engine_that_differs_from_all_leaves_the_namespace_alone(
    half_of: Any, store: Store, space: Space, written: Any
) -> None:
    scheduler = half_of()
    for number in range(MOST_REFUSED):
        assert not scheduler.requests.retired
        hashes = chain(100 + number, 1)
        writer = written(f"writer {number}", hashes)
        request = FakeRequest(f"request {number}", [100 + number, 1, 77])
        scheduler.on_new_request(request)
        assert answer(scheduler, request)[0] == 0
        step(scheduler, (request, 3 * TOKENS))
        say(scheduler, f"request {number}", writer, False)
    assert scheduler.requests.retired
    assert store.transfers.drain(PATIENCE_S)
    assert {one.state for one in store.index.verdicts(space.id).values()} == {"disputed"}
    assert store.maintenance.usage(space.id).segments == MOST_REFUSED, "it has condemned nobody"


def test_an_engine_whose_own_writer_has_failed_leaves_the_namespace_alone(
    half_of: Any, store: Store, space: Space
) -> None:
    scheduler, own = half_of(), store.backends.writer.id
    request = FakeRequest("first", [*range(6)])
    scheduler.on_new_request(request)
    assert answer(scheduler, request)[0] == 0
    [save] = step(scheduler, (request, 6 * TOKENS)).saves
    for place in ("one place", "another"):
        store.index.judge(space.id, own, "differs", by=place_of(place), stands=False)
    tell(scheduler, save_reasons={save.segment: "refused"}, ended_saves={save.segment: (1, False)})
    until(lambda: scheduler.space.writers.own_failed)
    later = FakeRequest("later", [*range(50, 56)])
    scheduler.on_new_request(later)
    assert answer(scheduler, later)[0] == 0
    assert step(scheduler, (later, 6 * TOKENS)).saves == []
    assert scheduler.requests.retired


def test_a_refused_commit_alone_drives_no_engine_away(half_of: Any, store: Store) -> None:
    scheduler = half_of()
    tell(scheduler, save_reasons={new_segment_id(): "refused"})
    assert store.transfers.drain(PATIENCE_S)
    request = FakeRequest("later", [*range(50, 56)])
    scheduler.on_new_request(request)
    assert answer(scheduler, request)[0] == 0
    assert step(scheduler, (request, 6 * TOKENS)).saves and not scheduler.requests.retired


def test_a_verdict_of_others_is_known_without_a_comparison(
    half_of: Any, store: Store, space: Space, written: Any
) -> None:
    good = written("good")
    store.index.judge(space.id, good, "alike", by=place_of("somebody"), stands=False)
    assert ask(half_of(), "first")[1] == 6 * TOKENS


def test_a_load_declined_for_another_reason_joins_nothing_unproven(half_of: Any, written: Any) -> None:
    writer = written("a writer")
    scheduler = half_of()
    choosing: Any = next(one for one in scheduler.followers if isinstance(one, Choosing))
    decide = choosing.decide
    choosing.decide = lambda *a, **k: replace(decide(*a, **k), tokens=0, why="too_few")
    tokens = ask(scheduler, "first")[1]
    assert tokens == 0 and not scheduler._proofs
    assert not any(scheduler.requests.get("first").progress.runs)
    scheduler.space.writers.believe(writer, "proven")
    ask(scheduler, "second")
    assert any(scheduler.requests.get("second").progress.runs)


def test_a_step_that_finds_out_that_nobody_agrees_begins_nothing(half_of: Any, written: Any) -> None:
    own, other = half_of(), FakeRequest("own", [*range(20, 24)])
    own.on_new_request(other)
    assert answer(own, other)[0] == 0
    own.space.writers.believe(written("a writer"), "proven")
    loaded, tokens = ask(own, "loaded")
    assert tokens == 6 * TOKENS
    written("another", chain(50, 51))
    doubted = FakeRequest("doubted", [50, 51, 77])
    own.on_new_request(doubted)
    assert answer(own, doubted)[0] == 0 and own._proofs
    own.update_state_after_alloc(loaded, FakeBlocks([1, 2, 3, 4, 5, 6]), tokens)
    planned: list[Any] = []
    plan = own.saving.plan

    def plans(*given: Any, **more: Any) -> Any:
        planned.extend(made := plan(*given, **more))
        return made

    own.saving.plan = plans
    own._proofs.distrusts_itself = lambda: True
    own._proofs.planned = lambda _: [Wrong("doubted", 0, 0, HASHES[:1])]
    work = step(own, (other, 4 * TOKENS))
    assert planned and own.requests.retired and work.abandon_loads and work.saves == []
    assert own.saving.under_way == 0 and not own.saving._busy
    assert [group.runs for load in work.loads for group in load.groups] == [[]]
    assert [group.tables for load in work.loads for group in load.groups] == [{0: [1, 2, 3, 4, 5, 6]}]
