"""Each follower of the KV connector fails in each hook, one at a time: that costs what it does alone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.request import RequestStatus

from connectors.ahead.prefetch import NoPrefetch
from connectors.engine import contents
from connectors.engine.step import RequestView
from connectors.kv import save
from connectors.kv.events import NoEvents
from connectors.kv.namespace import CurrentNamespace
from connectors.kv.planner import SavePlanner
from connectors.kv.proving.proofs import Proofs
from connectors.kv.scheduler import KVScheduler
from connectors.kv.worker.reads import KVReads
from connectors.telemetry.spans import NoSpans
from tests.connectors.broken import How, Planted, break_follower
from tests.connectors.kv.bed import TOKENS, Bed, page
from tests.connectors.kv.world import half
from tests.fake_vllm import FakeRequest
from tests.store.world import make_store, open_space
from tests.waiting import until

pytestmark = pytest.mark.engine

BLOCKS = 12
#: What an engine does without where one is broken; without any other it does not do.
COSTS = {
    "Choosing": {"loads"},
    "SavePlanner": {"saves"},
    "KVWrites": {"saves"},
    "Admission": {"saves"},
    "Outcomes": {"journal"},
    "Observer": {"journal", "statistics"},
}
SETTINGS: dict[str, Any] = {"segment": {"max_blocks": 4}, "kv": {"audit_every": 3}}


@dataclass
class Stored:
    """A store in which another engine has left half of the prompts, and the names of what follows."""

    folder: Path
    followers: dict[str, list[str]]

    def copy(self, to: Path) -> Path:
        """Returns a folder with the same in it."""
        return Path(shutil.copytree(self.folder, to))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    with Bed(folder, **SETTINGS) as bed:
        requests = [bed.request(prompt(seed)) for seed in range(3)]
        bed.run()
        bed.drain()
        assert all(bed.stored(one) == BLOCKS for one in requests)
        followers = {
            "scheduler": [type(one).__name__ for one in bed.half._scheduler.followers],
            "worker": [type(one).__name__ for one in bed.ranks[0].worker.followers],
        }
    return Stored(folder, followers)


@pytest.fixture(autouse=True)
def nobody_listens_on() -> Iterator[None]:
    """A broken engine would be told of what the EC connectors of later tests load."""
    yield
    contents._listeners.clear()


def prompt(seed: int, blocks: int = BLOCKS) -> list[int]:
    return [(seed * 977 + i * 31) % 990 + 5 for i in range(blocks * TOKENS + 3)]


def broken(bed: Bed, side: str, number: int, how: How) -> Counter[str]:
    owner = bed.half._scheduler if side == "scheduler" else bed.ranks[0].worker
    return break_follower(list(owner.followers)[number], how)


def wrong_pages(bed: Bed, request: Any) -> list[int]:
    """Which blocks of a request the engine's own cache has otherwise than their tokens say."""
    pool, bad = bed.scheduler.kv_cache_manager.block_pool, []
    for number, block_hash in enumerate(request.block_hashes):
        if (found := pool.get_cached_block(block_hash, [0])) is None:
            break
        for cache in bed.ranks[0].caches.values():
            if not bool((cache[found[0].block_id] == page(request, number)).all()):
                bad.append(number)
    return bad


def held(scheduler: KVScheduler) -> dict[str, int]:
    """All that is kept of requests, loads and saves."""
    return {
        "requests": len(scheduler.requests),
        "unsaved": len(scheduler.requests.unsaved),
        "keepers": len(scheduler.requests.keepers),
        "loads": scheduler.loading.held,
        "saves": scheduler.saving.under_way,
        "regrets": len(scheduler._regrets._computing)
        + len(scheduler._regrets._loading)
        + len(scheduler._regrets._ending),
        "audits": len(scheduler._audits._under_way),
        "queued": len(scheduler._queued_items._requests),
        "hinted": len(scheduler._hinted._requests),
        "journal": len(scheduler._observer._saves._saving),
        "steps": len(scheduler.cost._sent),
    }


def kept(scheduler: KVScheduler) -> set[str]:
    """What of it there is."""
    return {what for what, count in held(scheduler).items() if count}


def report(bed: Bed) -> None:
    """Let all writes end, and the scheduler hear of them: an idle engine hears with its next request."""
    bed.drain()
    bed.request([5], 2)
    bed.run()


def serve(bed: Bed) -> list[Any]:
    """What an engine meets: loads, prompts that go on, an abort, a reset. Returns the requests."""
    requests = [bed.request(prompt(seed), 20) for seed in range(3)]
    bed.run()
    requests += [bed.request(prompt(seed), 20) for seed in range(3, 6)]
    bed.step()
    bed.step()
    bed.scheduler.finish_requests(requests[-1].request_id, RequestStatus.FINISHED_ABORTED)
    bed.run()
    # A save keeps no block: on a busy machine the next requests would take what is not copied yet.
    bed.drain()
    assert bed.scheduler.reset_prefix_cache(reset_connector=False)
    requests += [bed.request(prompt(seed), 2) for seed in range(6)]
    bed.run()
    return requests


@pytest.mark.parametrize("how", ["always", "once"])
@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_a_broken_follower_costs_what_it_does_and_nothing_else(
    tmp_path: Path, stored: Stored, side: str, how: How, faults: Counter[str]
) -> None:
    fired = 0
    for number, name in enumerate(stored.followers[side]):
        folder = stored.copy(tmp_path / str(number))
        costs = COSTS.get(name, set()) if how == "always" else {"loads", "saves", "journal", "statistics"}
        with Bed(folder, **SETTINGS) as bed:
            scheduler: KVScheduler = bed.half._scheduler
            counted = Counter[str]()
            scheduler._observer._tally.add = lambda name, amount=1: counted.update({name: int(amount)})  # type: ignore[method-assign]
            raised = broken(bed, side, number, how)
            requests = serve(bed)
            report(bed)
            say = f"{name} {how}: {dict(raised)}"
            fired += sum(raised.values())
            assert len(bed.finished) >= len(requests) - 1, say
            assert all(wrong_pages(bed, one) == [] for one in requests), say
            assert all(bed.wrong(one) == [] for one in requests), say
            if "loads" not in costs:
                assert bed.counted("load_blocks") >= BLOCKS, say
            if not costs & {"loads", "statistics"}:
                assert counted["loaded_tokens"] >= BLOCKS * TOKENS, say
            if "saves" not in costs:
                assert all(bed.stored(one) >= BLOCKS for one in requests[3:5]), say
            if "journal" not in costs:
                journal = scheduler.store.maintenance
                until(lambda: journal.outcomes(bed.space.id, 1), say=lambda: say)
            # A rank that never tells of its saves: their number is bounded.
            may = {"saves", "journal"} if (name, how) == ("KVWrites", "always") else set()
            until(
                lambda: report(bed) or not (bed.held or kept(scheduler) - may),
                say=lambda: f"{say} {kept(scheduler)}",
            )
            assert bed.ranks[0].worker.memory.used_bytes == {"load": 0, "save": 0}, say
    assert fired > 10


def test_a_rank_that_never_tells_of_its_saves_costs_bounded_memory(
    tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    monkeypatch.setattr(save, "MOST_UNDER_WAY", 5)
    with Bed(stored.copy(tmp_path / "store"), **SETTINGS) as bed:
        break_follower(
            next(one for one in bed.ranks[0].worker.followers if type(one).__name__ == "KVWrites"), "always"
        )
        requests = [bed.request(prompt(seed), 20) for seed in range(10, 20)]
        bed.run()
        scheduler: KVScheduler = bed.half._scheduler
        assert {one.request_id for one in requests} <= bed.finished
        # What a step plans may come on top of it.
        assert held(scheduler)["saves"] <= 10 and held(scheduler)["journal"] <= 10


def test_a_step_that_can_not_be_planned_sends_its_loads_all_the_same(
    tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    def fails(_: object) -> None:
        raise Planted("ran")

    monkeypatch.setattr(CurrentNamespace, "ran", fails)
    with Bed(stored.copy(tmp_path / "store"), **SETTINGS) as bed:
        requests = serve(bed)
        assert len(bed.finished) >= len(requests) - 1 and faults["KVScheduler._plan_step"] > 1
        assert all(wrong_pages(bed, one) == [] for one in requests)
        assert bed.held == 0 and bed.counted("load_blocks") >= BLOCKS
        bed.drain()
        assert all(bed.wrong(one) == [] for one in requests)
        kept = {what for what, count in held(bed.half._scheduler).items() if count}
        assert kept <= {"audits", "regrets"}, "they wait for steps"


def test_a_load_that_can_not_be_prepared_is_computed(
    tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise Planted("pieces")

    monkeypatch.setattr(KVReads, "_pieces", fails)
    with Bed(stored.copy(tmp_path / "store"), **SETTINGS) as bed:
        requests = serve(bed)
        assert len(bed.finished) >= len(requests) - 1 and faults["KVReads._ticket"] >= 3
        assert all(wrong_pages(bed, one) == [] for one in requests) and bed.held == 0
        report(bed)
        assert {what for what, count in held(bed.half._scheduler).items() if count} == set()


def test_a_request_whose_saves_can_not_be_planned_is_not_saved_and_nobody_else_waits(
    tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    plan = save.Saving.plan

    def fails(self: save.Saving, progress: save.Progress, *given: Any, **more: Any) -> Any:
        made = plan(self, progress, *given, **more)
        if progress.request_id == "bad":
            raise Planted("its segments are planned, and nobody hears of them")
        return made

    monkeypatch.setattr(save.Saving, "plan", fails)
    with Bed(stored.copy(tmp_path / "store"), **SETTINGS) as bed:
        bed.request(prompt(7), 20, name="bad")
        same, other = bed.request([*prompt(7), 5], 20), bed.request(prompt(8), 20)
        bed.run()
        report(bed)
        assert faults["SavePlanner._plan_request"] == 1
        assert bed.stored(other) >= BLOCKS and bed.wrong(other) == bed.wrong(same) == []
        assert {what for what, count in held(bed.half._scheduler).items() if count} == set()


def test_a_step_that_fails_behind_its_saves_keeps_no_block_busy(
    tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    left = [1]

    plan_step = SavePlanner.plan_step

    def plans(self: SavePlanner, step: Any) -> Any:
        saves = plan_step(self, step)
        if saves and left:
            left.pop()
            monkeypatch.setattr(Proofs, "__len__", raises)
        return saves

    def raises(self: Proofs) -> int:
        monkeypatch.undo()
        raise Planted("its saves are planned, and nobody hears of them")

    monkeypatch.setattr(SavePlanner, "plan_step", plans)
    with Bed(stored.copy(tmp_path / "store"), **SETTINGS) as bed:
        bed.request(prompt(7), 20)
        bed.run()
        assert faults["KVScheduler._plan_step"] == 1
        again = bed.request([*prompt(7), 5], 20)
        assert bed.scheduler.reset_prefix_cache(reset_connector=False)
        bed.run()
        report(bed)
        assert bed.stored(again) >= BLOCKS and bed.wrong(again) == []
        assert {what for what, count in held(bed.half._scheduler).items() if count} == set()


def test_blocks_are_lost_whatever_fails_at_a_requests_end(
    tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    def fails(*_: object) -> None:
        raise Planted("forget")

    with Bed(stored.copy(tmp_path / "store"), **SETTINGS) as bed:
        scheduler: KVScheduler = bed.half._scheduler
        request = bed.request(prompt(7), 20)
        bed.step()
        monkeypatch.setattr(scheduler.requests, "forget", fails)
        assert scheduler.request_finished(request, [[]]) == (False, None)
        assert request.request_id in scheduler._lost_blocks


def test_what_a_follower_overrides_is_what_makes_it_forget(tmp_path: Path, faults: Counter[str]) -> None:
    called = []

    class Events(NoEvents):
        def forget(self) -> None:
            called.append("events")

        def take(self) -> Any:
            raise Planted("take")

    class Prefetch(NoPrefetch):
        def restart(self) -> None:
            called.append("prefetch")

        def step(self) -> None:
            raise Planted("step")

    class Spans(NoSpans):
        def restart(self) -> None:
            called.append("spans")

        def finished(self, request_id: str) -> None:
            raise Planted("finished")

    store = make_store(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("connectors.kv.scheduler.open_prefetch", lambda _: Prefetch())
        engine = half(store, open_space(store)).requests._engine
        engine = replace(engine, one_node=True)
        made = KVScheduler(store, open_space(store), engine, events=Events(), spans=lambda _: Spans())
    called.clear()
    made.prefetch.step()
    made._observer.take_events()
    made._observer.finished(RequestView(FakeRequest("r", [1])))
    assert called == ["prefetch", "events", "spans"]
    store.close()
