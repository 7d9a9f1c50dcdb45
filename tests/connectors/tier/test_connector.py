"""KVStoreTier under vLLM's own manager of tiers, on a real store: what it finds, loads and stores."""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium

from connectors.tier import lookups as tier_lookups
from connectors.tier.connector import KVStoreTier
from connectors.tier.metrics import definitions
from kvstore.conformance.faulty import Plan, Rule
from kvstore.errors import ConfigError
from kvstore.keys import digests
from tests.connectors.tier.world import FULL, TOKENS, WINDOW, Engine, engine, keys
from tests.store.world import chain, put_faults
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

A = keys(chain(*range(12)))
B = keys(chain(*range(100, 112)))


class Watched:
    """Counts what is asked of an index, notes on which threads, and can hold it up."""

    def __init__(self, index: Any) -> None:
        self._find, index.find = index.find, self.find
        self.finds: list[int] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def find(self, namespace: Any, digests: bytes, chain: bytes = b"") -> Any:
        self.gate.wait(PATIENCE_S)
        self.finds.append(len(digests) // 16)
        self.threads.add(threading.current_thread().name)
        return self._find(namespace, digests)


def watch(one: Engine) -> Watched:
    return Watched(one.tier._store.index)


def stored(root: Path, *chains: list[Any]) -> None:
    """Another engine has computed these."""
    with engine(root) as one:
        for number, wanted in enumerate(chains):
            assert one.serve(f"w{number}", wanted) == 0
        one.settle()


# ---- finding and loading ------------------------------------------------------------------------


def test_what_one_engine_computed_another_loads(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as other:
        longer = A + keys(chain(*range(15)))[12:]
        assert other.serve("r1", longer) == 12
        other.settle()
        # The rest went to the store, and what came from there did not go back.
        assert other.counts()["save_blocks{stored}"] == 3
        assert other.pinned() == 0
    with engine(tmp_path) as third:
        assert third.serve("r1", longer) == 15


def test_an_index_in_memory_serves_too(tmp_path: Path) -> None:
    with engine(tmp_path, payloads="memory://tier", index="memory://tier") as one:
        assert one.serve("r1", A) == 0
        one.settle()
        one.forget()
        assert one.serve("r2", A) == 12


def test_groups_of_one_hash_are_different_chunks(tmp_path: Path) -> None:
    hashes = chain(*range(6))
    full, window = keys(hashes, FULL), keys(hashes, WINDOW)
    stored(tmp_path, full)
    with engine(tmp_path) as one:
        assert one.serve("r1", window) == 0
        assert one.serve("r2", full) == 6
        one.settle()
        one.forget()
        request = one.arrive("r3", full, window)
        assert one.lookup(request, full + window) == 12
        one.load(request, full + window)


def test_all_that_is_asked_in_a_step_is_one_call_of_the_index_on_another_thread(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path, chunks=64) as one:
        index = watch(one)
        requests = [one.arrive("r1", A), one.arrive("r2", B)]
        assert [one.look(r, w) for r, w in zip(requests, (A, B), strict=True)] == [None, None]
        assert one.look(requests[1], B) is None  # asked again in the same step
        assert not index.finds
        assert [one.lookup(r, w) for r, w in zip(requests, (A, B), strict=True)] == [12, 0]
        assert index.finds == [24]
        assert all("call" in name for name in index.threads)


def test_a_long_prompt_is_asked_in_calls_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_lookups, "_CALL_DIGESTS", 5)
    mixed = A[:7] + keys(chain(*range(7)), WINDOW)
    stored(tmp_path, mixed)
    with engine(tmp_path) as one:
        index = watch(one)
        request = one.arrive("r1", A[:7], keys(chain(*range(7)), WINDOW))
        assert one.lookup(request, mixed) == 14
        one.load(request, mixed)
        assert index.finds == [5, 5, 4]


def test_a_slow_index_is_later_then_a_miss_and_never_waited_for(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        index, lookups = watch(one), one.tier._lookups
        now = lookups._clock()
        lookups._clock = lambda: now
        index.gate.clear()
        request = one.arrive("r1", A)
        began = time.monotonic()
        for _ in range(3):
            assert one.look(request, A) is None
            one.step()
        assert time.monotonic() - began < PATIENCE_S / 2
        now += lookups._deadline_s
        assert one.look(request, A) == 0
        assert one.counts()["miss_blocks{deadline}"] == 1
        # The answer that comes after all is for nobody: what has been called a miss stays one.
        index.gate.set()
        one.tier._store.transfers.drain(PATIENCE_S)
        assert one.look(request, A[:1]) == 0
        one.finish(request)
        assert one.serve("r2", A) == 12


def test_answers_are_asked_again_when_they_are_old(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        index, lookups = watch(one), one.tier._lookups
        request = one.arrive("r1", B)
        assert one.lookup(request, B[:1]) == 0
        assert one.look(request, B[:1]) == 0
        stored(tmp_path, B)
        lookups._clock = lambda: time.monotonic() + lookups._ttl_s
        assert one.lookup(request, B) == 12
        assert index.finds == [1, 12]


def test_a_request_that_is_over_leaves_nothing(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        index = watch(one)
        index.gate.clear()
        first, second = one.arrive("r1", A), one.arrive("r2", A)
        assert one.look(first, A) is one.look(second, A) is None
        one.step()
        one.finish(first)  # while its question is out
        assert len(one.tier._lookups) == 12
        index.gate.set()
        assert one.lookup(second, A) == 12
        one.finish(second)
        assert len(one.tier._lookups) == 0
        one.settle()
        assert one.serve("r3", A) == 12
        assert index.finds == [12]  # what is in the CPU tier is not asked for


def test_own_saves_are_found_by_requests_that_saw_them_missing(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        watcher = one.arrive("watcher", A)
        assert one.lookup(watcher, A) == 0
        assert one.serve("r1", A) == 0
        one.settle()
        one.forget()
        assert one.lookup(watcher, A) == 12


def test_a_prefix_that_the_cpu_tier_can_not_hold_ends_where_it_is_full(tmp_path: Path) -> None:
    """vLLM would fetch the next chunk over the first, then the first over the next, for ever."""
    stored(tmp_path, A)
    with engine(tmp_path, chunks=8) as one:
        request = one.arrive("r1", A)
        assert one.lookup(request, A) == 8
        one.load(request, A[:8])
        one.settle()
        assert one.pinned() == 0


def test_two_requests_that_evict_each_other_end(tmp_path: Path) -> None:
    stored(tmp_path, A, B)
    with engine(tmp_path, chunks=16) as one:
        first, second = one.arrive("r1", A), one.arrive("r2", B)
        hits: list[Any] = [None, None]
        until = time.monotonic() + PATIENCE_S
        while None in hits:
            assert time.monotonic() < until
            # Each of them looks while the other's chunks may be evicted, and loads only when both know.
            hits = [one.look(first, A), one.look(second, B)]
            one.step()
            time.sleep(0.002)
        assert one.counts()["load_blocks"] <= 2 * 24


def test_any_of_a_segments_chunks_load_alone(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        some = [A[11], A[2], A[0], A[5], A[4]]
        assert one.serve("r1", some) == 5
        assert one.serve("r2", A) == 12
        one.settle()
        assert one.counts()["load_runs"] == 4 + 3  # 0, 2, 4-5, 11; then 1, 3, 6-10
        assert one.counts()["load_blocks"] == 12


def test_a_load_is_a_use(tmp_path: Path) -> None:
    """Eviction takes what has not been used for longest."""
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        store, space = one.tier._store, one.tier._lookups._space
        [listing] = store.maintenance.segments(space.id)
        used, touch = [], store.index.touch

        def watched(namespace: Any, segments: Any) -> None:
            touch(namespace, segments)
            used.extend(segments)

        store.index.touch = watched
        one.serve("r1", A)
        assert store.transfers.drain(PATIENCE_S)
        assert used == [listing.segment]


def test_a_tier_filter_leaves_the_store_alone(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import TierFilter, TierMatcher

    stored(tmp_path, A)
    with engine(tmp_path, locality="REMOTE") as one:
        index = watch(one)
        request = one.arrive("r1", A)
        request.load_tier_filter = TierFilter((TierMatcher(locality=Locality.LOCAL),))
        assert one.lookup(request, A) == 0
        assert not index.finds
        request.load_tier_filter = TierFilter((TierMatcher(Medium.STORAGE, Locality.REMOTE),))
        assert one.lookup(request, A) == 12


# ---- saving -------------------------------------------------------------------------------------


def segments(one: Engine) -> list[int]:
    catalogue, space = one.tier._store.maintenance, one.tier._lookups._space
    return sorted(listing.record.slots for listing in catalogue.segments(space.id))


def test_chunks_of_many_steps_are_one_segment(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        request = one.arrive("r1", A, B)
        for key in A:
            one.compute(request, [key])
            one.step()
        assert one.counts().get("save_segments", 0) == 0
        one.finish(request)
        # At once: no step has passed, and no time.
        assert one.tier._store.transfers.drain(PATIENCE_S)
        assert segments(one) == [12]
        one.settle()
        assert one.counts()["save_segments"] == 1


def test_a_segment_closes_when_it_is_full_or_has_waited(tmp_path: Path) -> None:
    with engine(tmp_path, segment={"max_blocks": 5}) as one:
        gather_s, one.tier._saves._gather_s = one.tier._saves._gather_s, PATIENCE_S
        request = one.arrive("r1", A)
        one.compute(request, A[:7])
        one.step()
        one.tier._store.transfers.drain(PATIENCE_S)
        assert segments(one) == [5]
        assert one.pinned() == 7  # one job's chunks are reported together
        one.tier._saves._gather_s = gather_s
        one.settle()
        assert segments(one) == [2, 5]
        one.compute(request, A[7:])
        one.settle()
        assert segments(one) == [2, 5, 5]
        assert one.pinned() == 0


def test_only_chunks_that_follow_each_other_share_a_segment(tmp_path: Path) -> None:
    """Of a sliding window vLLM stores the chunks that a hit can need, and `match` relies on chains."""
    with engine(tmp_path) as one:
        request = one.arrive("r1", A, B)
        one.compute(request, A[:3] + A[5:7] + A[11:])
        one.compute(request, keys(chain(*range(4)), WINDOW))
        one.finish(request)
        one.settle()
        # The window's keys have no known position, so nothing says that they follow each other.
        assert segments(one) == [1, 1, 1, 1, 1, 2, 3]
        one.forget()
        request = one.arrive("r2", A)
        assert one.lookup(request, A) == 3
        assert one.lookup(request, A[5:7]) == 2
        one.load(request, A[:3] + A[5:7])


def test_depth_orders_tails_before_heads(tmp_path: Path) -> None:
    with engine(tmp_path, segment={"max_blocks": 4}) as one:
        one.serve("r1", A)
        one.settle()
        catalogue, space = one.tier._store.maintenance, one.tier._lookups._space
        assert sorted(each.record.depth for each in catalogue.segments(space.id)) == [0, 4, 8]
        assert TOKENS == 64


def test_two_engines_with_the_same_chunks_store_them_once(tmp_path: Path) -> None:
    with engine(tmp_path) as one, engine(tmp_path) as other:
        first, second = one.arrive("r1", A), other.arrive("r1", A)
        one.compute(first, A)
        other.compute(second, A)
        one.finish(first)
        other.finish(second)
        one.settle()
        other.settle()
        assert sum(segments(one)) == 12
        outcomes = [c.get("save_blocks{stored}", 0) for c in (one.counts(), other.counts())]
        assert sorted(outcomes) == [0, 12]
        assert one.pinned() == other.pinned() == 0


def test_saves_that_find_no_room_are_dropped_and_pin_nothing(tmp_path: Path) -> None:
    limits = {"write_threads": 1, "write_bytes": 8192 * 4}
    with engine(tmp_path, transfers=limits, segment={"max_blocks": 3}) as one:
        store = one.tier._store
        busy = threading.Event()
        assert store.transfers.write(8192, lambda: busy.wait(PATIENCE_S) and None)
        request = one.arrive("r1", A)
        for at in range(0, 12, 3):
            one.compute(request, A[at : at + 3])
        one.finish(request)
        one.step()
        one.step()
        assert one.counts()["save_blocks{dropped}"] == 9
        assert one.pinned() == 3
        busy.set()
        one.settle()
        assert one.pinned() == 0
        assert segments(one) == [3]


# ---- what else vLLM asks ------------------------------------------------------------------------


def test_events_of_what_was_stored(tmp_path: Path) -> None:
    with engine(tmp_path, enable_kv_events=True, locality="REMOTE") as one:
        one.serve("r1", A)
        one.settle()
        [event] = one.manager.take_events()
        assert set(event.keys) == set(A)
        assert (event.medium, event.removed, event.locality) == (Medium.STORAGE, False, Locality.REMOTE)
        assert not list(one.manager.take_events())
        # What another engine has claimed may never come.
        request = one.arrive("r2", B)
        store, space = one.tier._store, one.tier._lookups._space
        packed = digests([key[:-4] for key in B], FULL)
        assert store.index.claim(space.id, packed, b"somebody", 30.0).granted
        one.compute(request, B)
        one.settle()
        assert one.counts()["save_blocks{held}"] == 12
        assert not list(one.manager.take_events())
        # Nor is it a failure.
        stats = one.manager.get_stats()
        assert stats is not None
        assert "vllm:kv_offload_tiering_cascade_job_failures" not in stats.data["data"]
    with engine(tmp_path) as silent:
        silent.serve("r1", keys(chain(5, 6)))
        silent.settle()
        assert not list(silent.manager.take_events())


def test_statistics_are_what_changed_under_declared_names(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        one.serve("r1", A)
        one.settle()
        one.tier.get_stats()
        one.forget()
        assert one.serve("r2", A) == 12
        one.settle()
        time.sleep(0.05)
        stats = one.tier.get_stats()
        assert stats is not None
        assert stats.data["data"]["vllm:kvstore_tier_events"][("load_blocks",)] == 12
        assert one.tier.get_stats() is None
        assert one.serve("r3", B) == 0
        one.settle()
        data = one.tier.get_stats().data["data"]
        assert data["vllm:kvstore_tier_miss_chunks"] == {("absent",): 12}
        assert data["vllm:kvstore_tier_save_chunks"] == {("stored",): 12}
        known = definitions()
        assert all(len(labels) == len(known[name].labelnames) for name in data for labels in data[name])


def test_backpressure_sees_how_long_saves_take(tmp_path: Path) -> None:
    detector = {"backpressure_cls": "EMABackpressureDetector", "warmup_completions": 1}
    with engine(tmp_path, backpressure=detector) as one:
        put_faults(one.tier._store.payloads, Plan(Rule("delay", ("put",), delay_s=0.3)))
        request = one.arrive("r1", A)
        began = time.monotonic()
        one.compute(request, A)
        one.step()  # ends the waiting for more chunks, which would look like a slow store
        one.settle()
        most_s = time.monotonic() - began
        seconds = one.tier.bp_detector.stats["store_latency_ema"] * 12 * 8192 / (1 << 20)
        assert 0.3 <= seconds <= most_s
        [tiering] = [s for s in [one.manager.get_stats()] if s is not None]
        assert tiering.data["data"]["vllm:kv_offload_tiering_write_bytes"] == {("1:KVStoreTier",): 12 * 8192}


def test_a_reset_ends_the_use_of_the_store(tmp_path: Path) -> None:
    """Whoever resets may have changed the weights in place."""
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        request = one.arrive("r1", A, B)
        assert one.look(request, A) is None
        one.compute(request, B[:3])
        one.manager.reset_cache()
        assert one.look(request, A) == 0
        one.compute(request, B)
        one.settle()
        assert one.pinned() == 0
        assert one.tier.lookup(A[0], request) is LookupResult.MISS
    with engine(tmp_path) as other:
        assert other.serve("r1", B) == 0


def test_an_engine_says_which_store_it_uses(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        info = one.tier.config_info()
        assert tuple(info) == KVStoreTier.config_info_keys({})
        assert info["kvstore_payloads"] == f"file://{tmp_path}/payloads"
        assert re.fullmatch("[0-9a-f]{16}", info["kvstore_namespace"])
        if hasattr(one.manager, "config_info"):  # vLLM 0.33
            assert info.items() <= one.manager.config_info()[1].items()
    with engine(tmp_path, index="redis://:secret@localhost:1/0") as one:
        assert "secret" not in one.tier.config_info()["kvstore_index"]


def test_it_is_entered_from_two_threads_under_vllms_lock(tmp_path: Path) -> None:
    """From 0.33 on, beside a tier that is polled between steps: what that one is asked it asks others."""
    stored(tmp_path, A)
    with engine(tmp_path, chunks=30) as one:
        lock, over, answers = getattr(one.manager, "lock", threading.Lock()), threading.Event(), []
        peer = one.arrive("peer", A)

        def poll() -> None:
            while not over.wait(0.001):
                with lock:
                    one.manager._process_finished_jobs()
                    answers.append(one.look(peer, A))

        def forgotten() -> bool:
            with lock:
                one.step()
                if one.pinned():
                    return False
                one.forget()
                return True

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            for number in range(20):
                wanted = (A, B)[number % 2]
                with lock:
                    request = one.arrive(f"r{number}", wanted)
                hits = None
                while hits is None:
                    with lock:
                        if (hits := one.look(request, wanted)) is not None:
                            one.load(request, wanted[:hits])
                            if wanted[hits:]:
                                one.compute(request, wanted[hits:])
                            one.finish(request)
                        one.step()
                    time.sleep(0.001)
                if number == 4:
                    until(forgotten)
            until(lambda: len(A) in answers)
        finally:
            over.set()
            thread.join(PATIENCE_S)
        one.finish(peer)
        one.settle()
        assert one.pinned() == 0 and len(one.tier._lookups) == 0
        assert not one.tier._jobs._live and not one.tier._saves._open
        assert one.counts()["load_blocks"] >= len(A)


def test_requests_at_random(tmp_path: Path) -> None:
    """Prefixes shared and not, a CPU tier that is too small, aborts: right bytes, and nothing left over."""
    draw = random.Random(3)
    chains = [keys(chain(*[7] * draw.randrange(3), *range(n, n + 9)), draw.choice([0, 1])) for n in range(6)]
    for number in range(2):
        with engine(tmp_path, chunks=14, segment={"max_blocks": 4}) as one:
            for step in range(60):
                wanted = draw.choice(chains)[: draw.randrange(1, 10)]
                request = one.arrive(f"{number}.{step}", wanted)
                if draw.random() < 0.2:
                    one.look(request, wanted)
                else:
                    hits = one.lookup(request, wanted)
                    one.load(request, wanted[:hits])
                    if wanted[hits:] and len(wanted) - hits <= 14 - one.pinned():
                        one.compute(request, wanted[hits:])
                one.finish(request)
                one.step()
            one.settle()
            assert one.pinned() == 0
            assert len(one.tier._lookups) == 0
            assert not one.tier._jobs._live and not one.tier._saves._open
            if number:
                assert one.counts()["load_blocks"] > 50


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"payload": "file:///x"}, "unknown key 'payload'"),
        ({"locality": "NEAR"}, "allowed: LOCAL or REMOTE"),
        ({"kv": {"save_decode": True}}, "offload_prompt_only"),
        ({"kv": {"min_load_blocks": 4}}, "min_load_blocks"),
        ({"kv": {"observe": True}, "trace": {"folder": "/nowhere"}}, "kv.observe"),
        ({"kv": {"load": "never"}}, "kv.load"),
        ({"kv": {"objective": "throughput"}}, "kv.objective"),
        ({"admission": {"second_use": True}}, "admission"),
        ({"identity": {"any_tp": True}}, "any_tp"),
        ({"kv": {"staging_bytes": 4096}}, "kv.staging_bytes = 4096 is less than one chunk (8192 bytes)"),
        ({"payloads": "memory://x"}, "index may only be left out"),
    ],
)
def test_settings_that_can_not_work_are_refused_in_words(
    entry: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as failure:
        Engine(tmp_path, **entry)
    assert says in str(failure.value)
