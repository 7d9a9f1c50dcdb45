"""The janitor's round, on a clock that the test moves: what is done when, by whom, and what failures do."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvstore.conformance.faulty import Rule
from kvstore.errors import Throttled, TransientError
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Reconciled
from kvstore.index.scripted.values import key
from kvstore.index.sqlite.client import SqliteClient
from kvstore.index.sqlite.file import IndexMemory
from kvstore.janitor import janitor as janitors
from kvstore.janitor import scrub
from kvstore.janitor.janitor import Janitor
from kvstore.janitor.log import Logbook
from kvstore.janitor.reports import DONE, STEPS, ScrubState, Step
from kvstore.keys import NamespaceId, payload_name
from kvstore.payloads import bucket, evidence
from kvstore.store import housekeeping
from kvstore.store.rounds import AT_WORK, is_at_work
from schemas.settings import S3Settings
from tests.janitor.world import CHANGES, READS, Calls, RecordedPayloads, World, step


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.node.name)
    yield made
    made.close()


def quota(world: World, space: Any, segments: int) -> None:
    """Room for so many segments of two blocks."""
    [size] = {listing.record.nbytes for listing in world.index.segments(space.id)}
    # Eviction goes down to nine tenths.
    world.index.set_quota(Scope.namespace(space.id), int(segments * size / 0.9) + 1)


def scrub_all_day(world: World, **changes: Any) -> None:
    """Have janitors read everything once a day; `changes` are more of their settings."""
    changed = world.settings.janitor.model_copy(update={"scrub_percent": 100, **changes})
    world.settings = world.settings.model_copy(update={"janitor": changed})


def fall_due(world: World, janitor: Janitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day passes in which nothing is scrubbed: every segment has its turn in the next round."""
    with monkeypatch.context() as patch:
        patch.setattr(scrub, "ROUND_BYTES", 0)
        for _ in range(24 * 6 + 1):
            world.clock.now += 600
            janitor.round()


def done(janitor: Janitor) -> dict[str, int]:
    return {one.step: one.done for one in janitor.state().steps if one.done}


def test_before_anything_everything_is_zero(world: World) -> None:
    state = world.janitor().state()
    assert state.rounds == 0
    assert tuple(one.step for one in state.steps) == STEPS == tuple(DONE)
    assert {(one.runs, one.failures, one.done, one.failing) for one in state.steps} == {(0, 0, 0, False)}


def test_what_is_over_its_quota_is_evicted_then_reaped_then_swept(world: World) -> None:
    space, janitor = world.space(), world.janitor()
    world.save(space, 0, 10)
    quota(world, space, 6)
    janitor.round()
    assert done(janitor) == {"evict": 4, "sweep": 8}
    left = world.visible(space.id)
    assert (len(left), world.payloads.deleted) == (6, [])
    world.clock.now += world.settings.grace_s - 1
    janitor.round()
    assert world.payloads.deleted == []
    world.clock.now += 2
    janitor.round()
    assert done(janitor) == {"evict": 4, "reap": 4, "sweep": 8}
    assert len(world.payloads.deleted) == len(set(world.payloads.deleted)) == 4
    assert {one.name for one in world.payloads.list()} == {world.payload(space, one) for one in left}
    assert {entry.segment for entry in world.index.entries(space.id)} == left
    assert world.index.accounts()[0].trashed == 0
    state = janitor.state()
    assert (state.rounds, state.last_round_s) == (3, world.clock.now)
    assert [one.runs for one in state.steps] == [3, 3, 3, 3, 0, 1, 3, 3]


def test_what_was_invalidated_is_drained_and_reaped(world: World) -> None:
    space, janitor = world.space(), world.janitor()
    world.save(space, 0, 5)
    world.index.invalidate(space.id)
    kept = world.save(space, 0, 2)
    janitor.round()
    world.clock.now += world.settings.grace_s + 1
    janitor.round()
    assert {name: done(janitor)[name] for name in ("drain", "reap")} == {"drain": 5, "reap": 5}
    assert world.visible(space.id) == set(kept)
    assert len(list(world.payloads.list())) == 2
    account = world.index.accounts()[0]
    assert (account.bygone, account.trashed) == (0, 0)


def test_what_is_too_old_is_evicted_pinned_or_not_and_reaped(world: World) -> None:
    space, janitor = world.space(), world.janitor()
    old = world.save(space, 0, 4)
    world.index.pin(space.id, old[:1], most_bytes=1 << 30)
    world.clock.now += 1800
    young = world.save(space, 10, 3)
    world.index.set_quota(Scope.ttl(Scope.tenant("default")), 3600)
    janitor.round()
    assert world.visible(space.id) == {*old, *young}
    world.clock.now += 1800
    assert world.blocks(space, 0) == 0 and world.blocks(space, 10) == 2
    assert world.visible(space.id) == {*old, *young}, "nobody has been there yet"
    janitor.round()
    assert world.visible(space.id) == set(young)
    assert done(janitor)["evict"] == 4
    world.clock.now += world.settings.grace_s + 1
    janitor.round()
    assert len(set(world.payloads.deleted)) == 4
    assert {one.rule for one in world.index.events(space.id) if one.op == "evict"} == {"ttl"}


STEP_CALLS = {
    "evict": "cull", "drain": "drain", "reap": "reaped", "sweep": "sweep", "cool": "cool",
    "reconcile": "reconcile", "scrub": "sample", "erase": "erase",
}  # fmt: skip


def full_of_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several namespaces with something to do in every batch of every step."""
    monkeypatch.setattr(housekeeping, "_CULL_STEP", 2)
    monkeypatch.setattr(housekeeping, "_DELETE_STEP", 2)
    for number in range(3):
        space = world.space(model=f"m{number}")
        world.save(space, 100 * number, 8)
        past = world.clock.now - 1
        trashed = world.save(space, 100 * number + 50, 6)
        world.index.evict(space.id, trashed, delete_after_s=past, rule="admin")
        world.index.invalidate(space.id)
        world.save(space, 100 * number, 8)
        quota(world, space, 3)
        empty = world.space(model=f"empty{number}")
        world.index.evict(empty.id, [], delete_after_s=past, rule="admin")


@pytest.mark.parametrize("at", STEPS)
def test_two_at_once_do_no_harm(world: World, monkeypatch: pytest.MonkeyPatch, at: Step) -> None:
    """Within a call of any step of the one, the other does a whole round."""
    scrub_all_day(world, forget_after_s=1.0)
    full_of_work(world, monkeypatch)
    a, b = world.janitor(), world.janitor()
    world.clock.now += janitors._COOL_S
    a._scrubbing._last = world.clock.now - 600
    for account in world.index.accounts():
        a._scrubbing._owed[account.namespace] = 3.0
    calls = Calls(monkeypatch, world.index, (*CHANGES, "sample"))

    def between() -> None:
        del calls.at[STEP_CALLS[at]]
        b.round()

    calls.at[STEP_CALLS[at]] = between
    a.round()
    assert not calls.at, "the step has come"
    for _ in range(40):
        world.clock.now += 5
        for janitor in (a, b):
            janitor.round()
    assert not a.state().faults and not b.state().faults
    named = set()
    for account in world.index.accounts():
        assert (account.bygone, account.trashed) == (0, 0)
        assert account.usage.segments == 3
        counted = world.index.reconcile(account.namespace)
        assert counted.recorded == counted.counted
        segments = world.visible(account.namespace)
        assert {entry.segment for entry in world.index.entries(account.namespace)} == segments
        named |= {payload_name(account.namespace, segment, 0) for segment in segments}
    assert len(named) == 9
    assert {one.name for one in world.payloads.list()} == named
    assert not named & set(world.payloads.deleted)


@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("error", [TransientError("the index is tired"), ZeroDivisionError("a mistake")])
def test_a_step_that_fails_is_counted_and_the_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch, at: Step, error: Exception
) -> None:
    space, janitor = world.space(), world.janitor()
    world.save(space, 0, 4)
    original = janitor._steps[at]

    def broken() -> None:
        raise error

    monkeypatch.setitem(janitor._steps, at, broken)
    for _ in range(3):
        world.clock.now += 3600
        janitor.round()
    state = janitor.state()
    for one in state.steps:
        failed = one.step == at
        assert (one.runs, one.failures, one.failing) == (3, 3 if failed else 0, failed), one
    failed_step = step(state, at)
    assert "tired" in failed_step.problem or "mistake" in failed_step.problem
    assert failed_step.problem_s == world.clock.now == failed_step.last_run_s
    [fault] = state.faults
    assert (fault.step, fault.times, fault.at_s) == (at, 3, world.clock.now)
    monkeypatch.setitem(janitor._steps, at, original)
    world.clock.now += 3600
    janitor.round()
    now = step(janitor.state(), at)
    assert (now.failures, now.failing, now.problem) == (3, False, failed_step.problem)


def test_one_namespace_that_fails_does_not_keep_the_others_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = sorted((world.space(model=f"m{i}") for i in range(4)), key=lambda one: one.id)
    for i, space in enumerate(spaces):
        gone = world.save(space, 10 * i, 3)
        world.index.evict(space.id, gone, delete_after_s=world.clock.now - 1, rule="admin")
    janitor = world.janitor()
    world.plan.replace(Rule("permission", ("delete",), name=spaces[1].id))
    janitor.round()
    assert [account.trashed for account in world.index.accounts()] == [0, 3, 0, 0]
    state = janitor.state()
    assert (step(state, "reap").failures, step(state, "reap").done) == (1, 9)
    assert "refused" in step(state, "reap").problem
    assert state.faults[0].namespace == spaces[1].id
    world.plan.replace()
    janitor.round()
    assert [account.trashed for account in world.index.accounts()] == [0] * 4
    assert not step(janitor.state(), "reap").failing


def test_namespaces_that_are_out_of_reach_are_a_fault_and_the_others_are_looked_after(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when one node of a Cluster is down."""
    near, away = world.space(model="near"), world.space(model="away")
    for number, space in enumerate((near, away)):
        world.save(space, 10 * number, 10)
        quota(world, space, 6)
    whole = world.index.reachable
    janitor = world.janitor()
    monkeypatch.setattr(
        world.index,
        "reachable",
        lambda: ([one for one in whole()[0] if one.namespace == near.id], TransientError("a node is down")),
    )
    janitor.round()
    assert (len(world.visible(near.id)), len(world.visible(away.id))) == (6, 10)
    evict = step(janitor.state(), "evict")
    assert (evict.done, evict.failures, evict.problem) == (4, 1, "a node is down")
    monkeypatch.undo()
    janitor.round()
    assert len(world.visible(away.id)) == 6
    assert not step(janitor.state(), "evict").failing


def test_a_payload_store_that_is_down_is_asked_three_times_a_round(world: World) -> None:
    spaces = [world.space(model=f"m{i}") for i in range(8)]
    for i, space in enumerate(spaces):
        world.index.evict(space.id, world.save(space, 10 * i), delete_after_s=0, rule="admin")
    janitor = world.janitor()
    world.plan.replace(Rule("transient", ("delete",)))
    for rounds in range(1, 9):
        janitor.round()
        assert world.plan.injected["delete", "transient"] == 3 * rounds
    assert step(janitor.state(), "reap").failures == 8
    # Not the same three every time.
    assert len({fault.namespace for fault in janitor.state().faults}) == 8
    world.plan.replace()
    janitor.round()
    assert sum(account.trashed for account in world.index.accounts()) == 0


def test_deletes_that_are_refused_do_not_hold_up_a_round_and_the_other_steps_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(RecordedPayloads):
        def delete(self, names: Sequence[str]) -> int:
            raise Throttled("slow down")

    monkeypatch.setattr(bucket, "pause", world.clock.sleep)
    world.open(bucket.for_tools(Refusing(world.name), S3Settings(), patient=False))
    space, janitor = world.space(), world.janitor()
    world.save(space, 0, 4)
    world.index.invalidate(space.id)
    janitor.round()
    world.clock.now += world.settings.grace_s + 1
    for _ in range(3):
        began = world.clock.now
        janitor.round()
        assert world.clock.now - began < 15
        world.clock.now += 10
    state = janitor.state()
    assert step(state, "reap").failing
    assert step(state, "sweep").runs == step(state, "reap").runs == 4
    # What can't be deleted stays for the next round.
    assert world.index.accounts()[0].trashed == 4


def test_halving_and_counting_are_once_an_hour(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.space()
    calls, janitor = Calls(monkeypatch, world.index, ("cool", "reconcile")), world.janitor()
    for _ in range(600):
        janitor.round()
        world.clock.now += 30
    assert (calls.made.count("cool"), calls.made.count("reconcile")) == (4, 5)


def test_a_count_that_takes_long_goes_on_in_the_next_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sorted(world.space(model=f"m{i}").id for i in range(5))
    janitor, counted = world.janitor(), []

    def slow(namespace: Any) -> Reconciled:
        counted.append(namespace)
        world.clock.now += 0.6 * janitors._STEP_S
        return Reconciled(world.index.usage(namespace), None, 0)

    monkeypatch.setattr(world.index, "reconcile", slow)
    for expected in (2, 4, 5, 5):
        janitor.round()
        assert len(counted) == expected
    assert sorted(counted) == ids


def test_without_scrubbing_there_is_no_such_step(request: pytest.FixtureRequest) -> None:
    world = World(request.node.name, {"janitor": {"scrub_percent": 0}})
    janitor = world.janitor()
    janitor.round()
    assert [one.step for one in janitor.state().steps if not one.runs] == ["cool", "scrub"]
    world.close()


def test_a_count_that_fails_is_made_up_for_in_a_minute_where_it_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sorted(world.space(model=f"m{i}").id for i in range(4))
    janitor, counted = world.janitor(), []
    inner, broken = world.index.reconcile, {ids[2]}

    def reconcile(namespace: Any) -> Reconciled:
        counted.append(namespace)
        if namespace in broken:
            raise TransientError("not now")
        return inner(namespace)

    monkeypatch.setattr(world.index, "reconcile", reconcile)
    janitor.round()
    assert counted == ids
    for _ in range(11):
        world.clock.now += 5
        janitor.round()
    assert counted == ids
    broken.clear()
    world.clock.now += 5
    janitor.round()
    assert counted == [*ids, ids[2]]
    world.clock.now += 3599
    janitor.round()
    assert len(counted) == 5
    world.clock.now += 2
    janitor.round()
    assert sorted(counted[5:]) == ids


def test_namespaces_that_fail_for_good_do_not_end_the_turns_of_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sorted(world.space(model=f"model-{number}").id for number in range(6))
    inner, broken, counted = world.index.reconcile, set(ids[:4]), Counter[str]()

    def reconcile(namespace: Any) -> Reconciled:
        counted[namespace] += 1
        if namespace in broken:
            raise TransientError("can't be counted")
        return inner(namespace)

    monkeypatch.setattr(world.index, "reconcile", reconcile)
    janitor, every_s = world.janitor(), world.settings.janitor.reconcile_s
    for _ in range(4):
        for _ in range(10):
            janitor.round()
            world.clock.now += every_s / 10
    for name in ids[4:]:
        assert 3 <= counted[name] <= 4
    for name in broken:
        assert counted[name] > 4


def test_accounts_that_are_wrong_are_corrected_and_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, other, janitor = world.space(), world.space(model="other"), world.janitor()
    world.save(space, 0, 5)
    world.save(other, 50, 5)
    truth = world.index.usage(space.id)
    client = SqliteClient(IndexMemory.named(world.name), world.clock)
    client.command("HINCRBY", key(space.id, "meta"), "bytes", 77)
    assert world.index.usage(space.id) == replace(truth, nbytes=truth.nbytes + 77)
    janitor.round()
    assert world.index.usage(space.id) == truth
    state = janitor.state()
    assert (step(state, "reconcile").done, step(state, "reconcile").failures) == (1, 0)
    [fault] = state.faults
    assert (fault.step, fault.namespace) == ("reconcile", space.id)
    assert str(truth.nbytes + 77) in fault.problem and str(truth.nbytes) in fault.problem


def test_an_empty_namespace_that_nobody_uses_is_forgotten(world: World) -> None:
    janitor = world.janitor()
    names = {
        name: world.space(model=name) for name in ("empty", "used", "full", "trashed", "bygone", "dangling")
    }
    world.save(names["full"], 0)
    trashed = world.save(names["trashed"], 10)
    world.save(names["bygone"], 20)
    dangling = world.save(names["dangling"], 30)
    world.index.evict(names["dangling"].id, dangling, delete_after_s=0, rule="admin")
    janitor.round()  # reaps that one
    week = world.settings.janitor.forget_after_s
    world.clock.now += week - 10
    names["used"].register()
    world.index.evict(names["trashed"].id, trashed, delete_after_s=world.clock.now + 10 * week, rule="admin")
    janitor.round()
    assert len(world.index.namespaces()) == 6
    world.index.invalidate(names["bygone"].id)
    world.clock.now += 11
    janitor.round()
    assert set(world.index.namespaces()) == {names[name].id for name in ("used", "full", "trashed", "bygone")}
    assert step(janitor.state(), "erase").done == 2
    # An engine that was idle all the time registers it again.
    world.save(names["empty"], 40)
    assert world.blocks(names["empty"], 40) == 2


def test_segments_found_bad_are_faults(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    scrub_all_day(world)
    space, janitor = world.space(), world.janitor()
    good, hurt = world.save(space, 0, 2)
    world.payloads.tamper(world.payload(space, hurt), lambda data: data[:-1])
    fall_due(world, janitor, monkeypatch)
    janitor.round()
    state = janitor.state()
    [fault] = state.faults
    assert (fault.step, fault.namespace, fault.segment) == ("scrub", space.id, hurt.hex())
    assert "shorter" in fault.problem
    assert world.visible(space.id) == {good}
    assert (state.scrub.bad, state.scrub.evicted, state.scrub.payloads) == (1, 1, 1)
    assert step(state, "scrub").done == 1 and not step(state, "scrub").failing


def test_an_index_that_is_away_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    space, janitor = world.space(), world.janitor()
    world.save(space, 0, 10)
    janitor.round()
    quota(world, space, 6)
    asked = 0

    def down(*args: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        raise TransientError("nobody there")

    with monkeypatch.context() as outage:
        for name in (
            "set_quota",
            "ping",
            "accounts",
            "quotas",
            "usage",
            "sweep",
            "reapable",
            "reconcile",
            "cool",
        ):
            outage.setattr(world.index, name, down)
        janitor.round()
        # Nothing else is tried once it is clear that the index is away.
        assert asked <= 4
        evict = step(janitor.state(), "evict")
        assert (evict.failing, evict.problem) == (True, "nobody there")
        for _ in range(20):
            world.clock.now += 5
            janitor.round()
    janitor.round()
    state = janitor.state()
    assert step(state, "evict").done == 4 and not step(state, "evict").failing


def test_a_long_step_goes_on_in_the_next_round(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = [world.space(model=f"m{i}") for i in range(4)]
    for i, space in enumerate(spaces):
        gone = world.save(space, 20 * i, 4)
        world.index.evict(space.id, gone, delete_after_s=0, rule="admin")
    janitor = world.janitor()
    calls = Calls(monkeypatch, world.index, ("reaped",))

    def slow() -> None:
        world.clock.now += 0.6 * janitors._STEP_S

    monkeypatch.setattr(housekeeping, "_DELETE_STEP", 4)
    calls.at["reaped"] = slow
    rounds = 0
    while sum(account.trashed for account in world.index.accounts()):
        janitor.round()
        rounds += 1
        # Eviction had its turn in between.
        assert step(janitor.state(), "evict").runs == rounds
        assert len(calls.made) <= 2 * rounds
    assert len(calls.made) == 4 and rounds == 2


def test_a_namespace_with_nothing_to_sweep_is_swept_less_often(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, janitor = world.space(), world.janitor()
    world.save(space, 0, 3)
    calls = Calls(monkeypatch, world.index, ("sweep",))
    for _ in range(200):
        janitor.round()
        world.clock.now += 5
    assert 12 <= len(calls.made) <= 18
    world.index.evict(space.id, list(world.visible(space.id)), delete_after_s=0, rule="admin")
    for _ in range(17):
        janitor.round()
    assert list(world.index.entries(space.id)) == []
    assert step(janitor.state(), "sweep").done == 6


def test_a_round_deletes_all_that_is_due(world: World) -> None:
    space, janitor = world.space(), world.janitor()
    world.index.evict(space.id, world.save(space, 0, 10), delete_after_s=0, rule="admin")
    inner = janitor._housekeeping.reap
    janitor._housekeeping.reap = lambda name: inner(name, most=3)  # type: ignore[method-assign]
    janitor.round()
    assert step(janitor.state(), "reap").done == len(world.payloads.deleted) == 10


def test_a_round_sweeps_so_often_and_the_next_one_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SWEEP_STEP", 2)
    monkeypatch.setattr(janitors, "_SWEEPS", 4)
    left = [20]

    def sweep(name: NamespaceId, limit: int) -> int:
        dropped = min(limit, left[0])
        left[0] -= dropped
        return dropped

    monkeypatch.setattr(world.index, "sweep", sweep)
    janitor = world.janitor()
    world.space()
    swept = []
    for _ in range(4):
        janitor.round()
        swept.append(step(janitor.state(), "sweep").done)
    assert swept == [8, 16, 20, 20]


def test_a_namespace_with_many_entries_is_forgotten_bit_by_bit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitors, "_ERASE_STEP", 3)
    monkeypatch.setattr(world.index, "sweep", lambda name, limit: 0)
    space, janitor = world.space(), world.janitor()
    world.index.evict(space.id, world.save(space, 0, 30, blocks=60), delete_after_s=0, rule="admin")
    janitor.round()
    world.clock.now += world.settings.janitor.forget_after_s + 1
    calls = Calls(monkeypatch, world.index, ("erase",))
    janitor.round()
    assert len(calls.made) >= 6 and world.index.namespaces() == {}
    assert step(janitor.state(), "erase").done == 1


def test_scrubbing_takes_no_longer_than_from_one_round_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrub_all_day(world)
    janitor = world.janitor()
    world.save(world.space(), 0, 10)
    fall_due(world, janitor, monkeypatch)
    assert janitor.state().scrub.behind == 10
    world.plan.replace(Rule("delay", ("read",), delay_s=3 / READS))
    janitor.round()
    assert world.settings.janitor.interval_s == 5.0
    assert step(janitor.state(), "scrub").done == 2


def test_the_last_faults_are_remembered(world: World) -> None:
    book = Logbook(world.clock)
    for number in range(70):
        book.fault("scrub", f"{number} is wrong")
    book.fault("scrub", "30 is wrong")
    state = book.state(ScrubState())
    found = [(fault.problem, fault.times) for fault in state.faults]
    assert found == [
        ("30 is wrong", 2),
        *((f"{number} is wrong", 1) for number in range(69, 19, -1) if number != 30),
    ]


# -- run ----------------------------------------------------------------------------------------------


class Stop(threading.Event):
    """Waiting for it moves the clock; it is set after `seconds`."""

    def __init__(self, world: World, seconds: float, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._clock, self._end, self._meanwhile = world.clock, world.clock.now + seconds, meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout
        self._clock.now += timeout
        self._meanwhile()
        if self._clock.now >= self._end:
            self.set()
        return self.is_set()


@pytest.mark.parametrize(("interval_s", "rounds"), [(1.0, 600), (5.0, 120), (60.0, 10), (400.0, 2)])
def test_it_says_that_it_works_between_rounds_and_no_more_at_the_end(
    request: pytest.FixtureRequest, interval_s: float, rounds: int
) -> None:
    world = World(request.node.name, {"janitor": {"interval_s": interval_s}})
    janitor = world.janitor()

    def meanwhile() -> None:
        assert is_at_work(world.index.quotas(), world.clock())

    janitor.run(Stop(world, 600.0, meanwhile))
    assert janitor.state().rounds == pytest.approx(rounds, abs=1)
    assert janitor.state().faults == () and world.index.quotas() == {}
    world.close()


def test_a_mistake_of_ours_does_not_end_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, from_s, janitor = world.index.set_quota, world.clock.now + 100, world.janitor()

    def broken(*args: Any) -> None:
        if world.clock.now < from_s:
            raise sqlite3.ProgrammingError("a mistake")
        inner(*args)

    monkeypatch.setattr(world.index, "set_quota", broken)
    janitor.run(Stop(world, 200.0, lambda: None))
    # It says so in every third round, and those failed for half of the time.
    assert janitor.state().rounds == 33


def test_one_that_is_to_stop_stops_between_two_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "_CULL_STEP", 1)
    space, janitor, stop = world.space(), world.janitor(), threading.Event()
    world.save(space, 0, 30)
    quota(world, space, 1)
    calls = Calls(monkeypatch, world.index, ("cull",))
    calls.at["cull"] = lambda: stop.set() if len(calls.made) == 5 else None
    janitor.run(stop)
    assert len(calls.made) == 5
    assert AT_WORK not in world.index.quotas()
    assert janitor.state().faults == ()


@pytest.mark.parametrize("later_s", [0, 5])
def test_one_that_ends_leaves_the_word_of_another_that_works(world: World, later_s: int) -> None:
    ending, other, stop = world.janitor(), world.janitor(), threading.Event()
    stop.set()
    other.round()
    world.janitor().run(stop)
    assert is_at_work(world.index.quotas(), world.clock.now), "that one has said nothing"
    world.clock.now += 5
    ending.round()
    world.clock.now += later_s
    if later_s:
        other._say()
    ending.run(stop)
    assert is_at_work(world.index.quotas(), world.clock.now) == bool(later_s)


def test_evidence_is_kept_within_its_bounds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    space, kept = world.space(), world.store.backends.evidence
    segments = world.save(space, 0, segments=4)
    monkeypatch.setattr(evidence, "MOST_COPIES", 2)
    for segment in segments[:3]:
        kept.put(space.id, segment, 0, [memoryview(b"bad")])
    kept.refuse(space.id, {}, 5.0)
    world.clock.now = max(one.modified_s for one in kept.copies(space.id)) + evidence.KEPT_S - 60
    janitor = world.janitor()
    janitor.round()
    left = kept.of(space.id).condemned
    assert len(left) == 2 and left < set(segments)
    # The janitor deletes the segment's payloads before its evidence, and no other payload.
    (gone,) = set(segments[:3]) - left
    assert world.payloads.deleted == [world.payload(space, gone)]
    assert step(janitor.state(), "reap").done == 1
    # The bucket is asked for it once an hour.
    for minutes, left_then in ((2, 2), (60, 0)):
        world.clock.now += 60 * minutes
        janitor.round()
        assert len(kept.copies(space.id)) == left_then
    assert kept.of(space.id).invalidated_s == 5.0


def test_evidence_that_can_not_be_trimmed_is_tried_again_and_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, kept = world.space(), world.store.backends.evidence
    kept.put(space.id, world.save(space, 0)[0], 0, [memoryview(b"bad")])
    world.clock.now = kept.copies(space.id)[0].modified_s + evidence.KEPT_S
    janitor = world.janitor()
    world.plan.replace(Rule("permission", ("delete",)))
    janitor.round()
    assert step(janitor.state(), "reap").failing and kept.copies(space.id)
    world.plan.replace()
    world.clock.now += 61
    janitor.round()
    assert not step(janitor.state(), "reap").failing and not kept.copies(space.id)
