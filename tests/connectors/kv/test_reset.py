"""Resets and new weights: nothing old is served, and nothing old is saved under a new name."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.messages import KVStoreMetadata, Save
from connectors.kv.namespace import CurrentNamespace
from connectors.kv.scheduler import KVScheduler
from connectors.weights import (
    UNNAMED,
    AgreedName,
    NamedWeights,
    Naming,
    agreed,
    check_name,
    this_machine,
    unnamed,
)
from kvstore.format.segment import Slot
from kvstore.keys import block_key
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import Namespace
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.connectors.kv.world import answer, half, tell
from tests.fake_vllm import FakeRequest, step
from tests.store.world import SHAPE, chain, content, make_store, match, open_space
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


class Pool:
    """The engine's own cache, as far as a reset is concerned."""

    def __init__(self) -> None:
        self.used = False

    def holds_blocks(self) -> bool:
        return self.used


def request(name: str, *steps: int) -> FakeRequest:
    return FakeRequest(name, steps)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def make(tmp_path: Path, pool: Pool) -> Iterator[Callable[..., KVScheduler]]:
    stores: list[Store] = []

    def scheduler(writers: int = 1, ranks: int = 1, **settings: Any) -> KVScheduler:
        store = make_store(tmp_path, kv={"match_deadline_s": 60.0, "save_decode": True}, **settings)
        stores.append(store)
        groups = [replace(group, writers=writers) for group in SCHEDULERS]
        return half(store, open_space(store), groups=groups, ranks=ranks, holds_blocks=pool.holds_blocks)

    yield scheduler
    for store in stores:
        store.close()


def matched(scheduler: KVScheduler, one: Any, computed: int = 0, *, arrives: bool = True) -> int:
    if arrives:
        scheduler.on_new_request(one)
    return answer(scheduler, one, computed)[0] or 0


def name(scheduler: KVScheduler, label: str, *, at_ns: int | None = None, ranks: int = 1) -> None:
    naming = Naming.now(label) if at_ns is None else Naming(label, at_ns, this_machine())
    for rank in range(ranks):
        tell(scheduler, weights={rank: naming})


def weights_of(metadata: KVStoreMetadata) -> str:
    assert metadata.namespace is not None
    return str(json.loads(metadata.namespace)["weights"])


def compute(scheduler: KVScheduler, one: Any) -> KVStoreMetadata:
    """All of a prompt in one step, all of it missed."""
    assert matched(scheduler, one) == 0
    return step(scheduler, (one, one.num_prompt_tokens))


def write(scheduler: KVScheduler, metadata: KVStoreMetadata) -> Space:
    """Do what a worker does with a step's saves."""
    namespace = Namespace.model_validate_json(metadata.namespace or "")
    space = open_space(scheduler.store, weights=namespace.weights)
    for save in metadata.saves:
        blocks = [Slot(block_key(one), memoryview(content(one)), "BF16", SHAPE) for one in save.hashes]
        space.save(
            blocks,
            depth=save.first,
            chain=save.chain,
            segment=save.segment,
            created_s=save.created_s,
        )
        tell(scheduler, ended_saves={save.segment: (1, True)})
    return space


def blocks_in(store: Store, weights: str) -> int:
    return store.maintenance.usage(open_space(store, weights=weights).id).blocks


def drained(store: Store) -> None:
    assert store.transfers.drain(PATIENCE_S)


# ---- the scheduler's half ---------------------------------------------------------------------------


def test_after_a_reset_it_goes_on_under_a_name_of_its_own(make: Any) -> None:
    scheduler = make()
    first = write(scheduler, compute(scheduler, request("a", *range(8))))
    assert matched(scheduler, request("b", *range(8))) == 64
    assert scheduler.reset_cache() is True
    assert matched(scheduler, request("c", *range(8))) == 0
    second = compute(scheduler, request("d", *range(8)))
    assert weights_of(second).startswith(UNNAMED)
    assert sum(len(save.hashes) for save in second.saves) == 8
    space = write(scheduler, second)
    assert space.id != first.id
    assert matched(scheduler, request("e", *range(8))) == 64
    assert len(match(first, chain(*range(8))).runs) > 0  # others go on with it


def named_in_stats(scheduler: KVScheduler) -> list[str]:
    """The namespaces that the half has reported since it was asked last, in order."""
    stats = scheduler.take_stats()
    names = [] if stats is None else list(stats.data["gauges"])
    return [name.removeprefix("namespace{").rstrip("}") for name in names if name.startswith("namespace{")]


def test_metrics_say_which_namespace_it_is(make: Any, pool: Pool) -> None:
    scheduler = make()
    first = write(scheduler, compute(scheduler, request("a", *range(8))))
    assert named_in_stats(scheduler) == [first.id]
    assert named_in_stats(scheduler) == []
    scheduler.reset_cache()
    [second] = named_in_stats(scheduler)
    assert second not in (first.id, "")
    pool.used = True
    scheduler.reset_cache()
    assert named_in_stats(scheduler) == [""]


def test_a_match_that_was_asked_before_the_reset_is_void(make: Any) -> None:
    scheduler = make()
    write(scheduler, compute(scheduler, request("a", *range(8))))
    waiting = request("b", *range(8))
    assert matched(scheduler, waiting) == 64
    scheduler.reset_cache()
    assert matched(scheduler, waiting, arrives=False) == 0


def test_while_blocks_are_in_use_a_reset_leaves_the_store_alone(make: Any, pool: Pool) -> None:
    scheduler = make()
    write(scheduler, compute(scheduler, request("a", *range(8))))
    running = request("r", *range(20, 28))
    assert matched(scheduler, running) == 0
    step(scheduler, (running, 16))
    pool.used = True
    scheduler.reset_cache()
    # What the running request has computed is of the old weights, and what follows depends on it.
    assert step(scheduler, (running, running.num_prompt_tokens - 16)).saves == []
    assert matched(scheduler, request("b", *range(8))) == 0
    assert compute(scheduler, request("c", *range(30, 38))).saves == []
    scheduler.request_finished(running, [list(range(100, 200))])
    assert step(scheduler).flushes == []
    name(scheduler, "step-1")
    assert compute(scheduler, request("d", *range(40, 48))).saves == []
    pool.used = False
    scheduler.reset_cache()
    assert weights_of(compute(scheduler, request("e", *range(50, 58)))).startswith(UNNAMED)


def test_if_the_engines_cache_can_not_be_seen_a_reset_is_never_clean(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        current = CurrentNamespace(store, open_space(store))
        current.reset()
        assert current.space is None
        assert not current.name(AgreedName("step-1", time.monotonic_ns()))


def test_saves_under_way_belong_to_the_weights_they_were_computed_with(make: Any) -> None:
    scheduler = make(writers=2)
    abandoned: list[tuple[str, Any]] = []
    scheduler.space.abandon = lambda segment: abandoned.append(("old", segment))
    planned = compute(scheduler, request("a", *range(4)))
    [save] = planned.saves
    assert weights_of(planned) == "w"
    scheduler.reset_cache()
    # Of the same prompt: what is being saved elsewhere is no reason to leave it out here.
    again = compute(scheduler, request("b", *range(4)))
    assert [len(one.hashes) for one in again.saves] == [4]
    scheduler.space.abandon = lambda segment: abandoned.append(("new", segment))
    tell(scheduler, ended_saves={save.segment: (2, False)})
    drained(scheduler.store)
    assert abandoned == [("old", save.segment)]
    # The end of the old one's save does not make room for a third.
    assert compute(scheduler, request("c", *range(4))).saves == []


def test_what_was_to_be_read_at_the_next_step_is_dropped(make: Any) -> None:
    scheduler = make()
    one = request("a", *range(6))
    compute(scheduler, one)
    one.block_hashes = chain(*range(8))
    one.num_tokens = 8 * TOKENS + 1
    step(scheduler, (one, 2 * TOKENS - 3))
    scheduler.request_finished(one, [list(range(100, 200))])
    under_way = scheduler.saving.under_way
    scheduler.reset_cache()
    assert step(scheduler).flushes == []
    assert scheduler.saving.under_way < under_way


def test_names_are_believed_once_after_a_clean_reset(make: Any) -> None:
    scheduler = make()
    name(scheduler, "step-1")
    assert scheduler.space.namespace.weights == "w"  # no reset before
    scheduler.reset_cache()
    name(scheduler, "old", at_ns=time.monotonic_ns() - 60 * 10**9)
    assert scheduler.space.namespace.weights.startswith(UNNAMED)  # said before the reset
    waiting = request("a", *range(4))
    assert matched(scheduler, waiting) == 0
    name(scheduler, "step-1")
    assert weights_of(step(scheduler, (waiting, waiting.num_prompt_tokens))) == "step-1"
    name(scheduler, "step-2")
    assert scheduler.space.namespace.weights == "step-1"  # no reset since
    scheduler.reset_cache()
    name(scheduler, "")
    assert scheduler.space.namespace.weights == "w"


def test_all_ranks_have_to_say_the_same(make: Any) -> None:
    scheduler = make(ranks=2)
    scheduler.reset_cache()
    name(scheduler, "step-1", ranks=1)
    assert scheduler.space.namespace.weights.startswith(UNNAMED)
    tell(scheduler, weights={1: Naming.now("step-2")})
    assert scheduler.space.namespace.weights.startswith(UNNAMED)
    tell(scheduler, weights={1: Naming.now("step-1")})
    assert scheduler.space.namespace.weights == "step-1"
    assert agreed({}, 1) is None
    early, late = Naming("x", 1, this_machine()), Naming("x", 2, this_machine())
    assert agreed({0: late, 1: early}, 2) == AgreedName("x", 1)


def elsewhere(label: str, at_ns: int) -> Naming:
    return Naming(label, at_ns, "another machine")


def test_clocks_of_other_machines_order_nothing(make: Any) -> None:
    """A rank whose clock is ahead would make a name of former weights look as if it came after the reset."""
    ahead = time.monotonic_ns() + 10**15
    scheduler = make(ranks=2)
    scheduler.reset_cache()
    tell(scheduler, weights={0: elsewhere("step-1", ahead), 1: elsewhere("step-1", ahead)})
    assert scheduler.space.namespace.weights.startswith(UNNAMED)
    scheduler.reset_cache()
    former = Naming("step-1", time.monotonic_ns() - 60 * 10**9, this_machine())
    tell(scheduler, weights={0: former, 1: elsewhere("step-1", ahead)})
    assert scheduler.space.namespace.weights.startswith(UNNAMED)
    # One rank beside the scheduler is enough: all are told in one call.
    tell(scheduler, weights={0: Naming.now("step-2"), 1: elsewhere("step-2", 1)})
    assert scheduler.space.namespace.weights == "step-2"


def test_weights_without_a_name_get_another_one_when_they_are_kept(tmp_path: Path) -> None:
    """What was stored under the first is emptied once it is left."""
    with make_store(tmp_path) as store:
        first = open_space(store, weights=unnamed())
        current = CurrentNamespace(store, first, holds_blocks=lambda: False)
        current.reset()
        assert current.name(AgreedName("", time.monotonic_ns() + 1))
        assert current.space is not None
        assert current.space.namespace.weights.startswith(UNNAMED)
        assert current.space.id != first.id


def test_the_same_name_is_the_same_namespace_on_every_engine(make: Any) -> None:
    one, other = make(), make()
    for scheduler in (one, other):
        scheduler.reset_cache()
        name(scheduler, "step-1")
    write(one, compute(one, request("a", *range(8))))
    assert matched(other, request("b", *range(8))) == 64
    one.reset_cache()
    other.reset_cache()
    write(one, compute(one, request("c", *range(8))))
    assert matched(other, request("d", *range(8))) == 0  # nobody knows whether they are the same


def test_left_alone_until_the_weights_are_named_if_that_is_wanted(make: Any) -> None:
    scheduler = make(identity={"after_reset": "nothing"})
    scheduler.reset_cache()
    assert compute(scheduler, request("a", *range(8))).saves == []
    # What was computed since may be of weights that were there before the named ones.
    name(scheduler, "step-1")
    assert compute(scheduler, request("b", *range(8))).saves == []
    scheduler.reset_cache()
    name(scheduler, "step-1")
    assert weights_of(compute(scheduler, request("c", *range(8)))) == "step-1"


def test_who_wakes_up_with_other_pages_leaves_the_store_alone_for_good(make: Any, tmp_path: Path) -> None:
    scheduler = make()
    write(scheduler, compute(scheduler, request("a", *range(8))))
    scheduler.reset_cache()
    private = write(scheduler, compute(scheduler, request("b", *range(8)))).namespace.weights
    running = request("r", *range(20, 28))
    assert matched(scheduler, running) == 0
    step(scheduler, (running, 16))
    waiting = request("w", *range(8))
    assert matched(scheduler, waiting) == 64
    scheduler.give_up("other pages")
    assert matched(scheduler, waiting, arrives=False) == 0
    metadata = step(scheduler, (running, running.num_prompt_tokens - 16))
    assert metadata.saves == [] and metadata.abandon_loads
    # Neither a reset nor a name gives it a namespace again: each of them would be that of the old pages.
    for label in ("step-1", ""):
        scheduler.reset_cache()
        name(scheduler, label)
        assert compute(scheduler, request(f"c{label}", *range(8))).saves == []
    assert named_in_stats(scheduler)[-1] == ""
    drained(scheduler.store)
    assert blocks_in(scheduler.store, private) == 0


def test_what_nobody_has_named_is_emptied_when_it_is_left(make: Any, tmp_path: Path) -> None:
    scheduler = make()
    store = scheduler.store
    write(scheduler, compute(scheduler, request("a", *range(8))))
    scheduler.reset_cache()
    private = write(scheduler, compute(scheduler, request("b", *range(8)))).namespace.weights
    late = compute(scheduler, request("c", *range(20, 24)))
    assert blocks_in(store, private) == 8
    scheduler.reset_cache()
    drained(store)
    assert blocks_in(store, private) == 0
    # A rank that was still writing commits after that; the next time it is gone, too.
    write(scheduler, late)
    assert blocks_in(store, private) == 4
    second = write(scheduler, compute(scheduler, request("d", *range(8)))).namespace.weights
    scheduler.reset_cache()
    name(scheduler, "step-1")
    write(scheduler, compute(scheduler, request("e", *range(8))))
    drained(store)
    assert (blocks_in(store, private), blocks_in(store, second)) == (0, 0)
    scheduler.shutdown()
    assert {folder.name for folder in tmp_path.glob("*/*/*") if folder.is_file()}
    with make_store(tmp_path) as again:
        assert (blocks_in(again, "w"), blocks_in(again, "step-1")) == (8, 8)
        assert not list(tmp_path.glob(f"{open_space(again, weights=private).id}/*/*"))


def test_an_engine_that_ends_takes_its_unnamed_blocks_along(make: Any, tmp_path: Path) -> None:
    scheduler = make()
    scheduler.reset_cache()
    private = write(scheduler, compute(scheduler, request("a", *range(8)))).namespace.weights
    scheduler.shutdown()
    with make_store(tmp_path) as again:
        assert blocks_in(again, private) == 0


# ---- names ------------------------------------------------------------------------------------------


def test_names_that_can_not_be() -> None:
    check_name("")
    check_name("runs/42 step 1200")
    for bad in (" x", "x ", "a\nb", "ä", "x" * 129, unnamed()):
        with pytest.raises(ValueError, match="printable"):
            check_name(bad)
    assert unnamed() != unnamed()


def test_the_worker_extension_tells_every_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.distributed.kv_transfer as transfer

    told: list[str] = []
    ours = SimpleNamespace(name_weights=told.append)
    monkeypatch.setattr(transfer, "has_kv_transfer_group", lambda: True)
    for connector, count in (
        (ours, 1),
        (SimpleNamespace(sub_connectors=[SimpleNamespace(), ours, ours]), 2),
        (SimpleNamespace(), 0),
    ):
        told.clear()
        monkeypatch.setattr(transfer, "get_kv_transfer_group", lambda c=connector: c)
        assert NamedWeights().name_weights("step-1") == count == len(told)
    with pytest.raises(ValueError, match="printable"):
        NamedWeights().name_weights("\n")
    monkeypatch.setattr(transfer, "has_kv_transfer_group", lambda: False)
    assert NamedWeights().name_weights("step-1") == 0


# ---- the worker's half ------------------------------------------------------------------------------


def test_a_worker_keeps_the_namespace_of_what_it_has_gathered(tmp_path: Path) -> None:
    import torch

    from connectors.kv.worker.worker import KVWorker
    from tests.connectors.groups import LAYERS, WORKERS

    store = make_store(tmp_path, transfers={"write_threads": 1})
    worker = KVWorker(store, WORKERS, segment_blocks=[4])
    _, heads, tokens, width = SHAPE
    caches = {name: torch.zeros((16, heads, tokens, width), dtype=torch.bfloat16) for name in LAYERS}
    worker.register(caches, 16)
    old, new = open_space(store), open_space(store, weights="step-1")
    hold, hashes = threading.Event(), chain(*range(2))
    store.transfers.write(0, lambda: void(hold.wait(PATIENCE_S)))
    worker.use(old.namespace)
    worker.writes.start([Save(0, b"12345678", 1, 0, hashes, {0: [3, 4]})])
    worker.use(new.namespace)
    hold.set()
    drained(store)
    assert (match(old, hashes).blocks, match(new, hashes).blocks) == (2, 0)
    worker.name_weights("step-1")
    reported = worker.take_report()
    assert reported is not None and reported.weights[0].name == "step-1"
    assert worker.take_report() is None
    store.close()


def void(_: Any) -> None: ...


# ---- any order of events ----------------------------------------------------------------------------


class World:
    """An engine, as far as it matters which weights a block was computed with.

    Known of every block: with which weights it and all before it were computed. The connector isn't told.
    """

    def __init__(self, scheduler: KVScheduler, pool: Pool) -> None:
        self.scheduler, self.pool = scheduler, pool
        self.weights = 0
        self.count = 0
        #: The engine's own cache: block hash -> versions of the weights.
        self.cached: dict[bytes, frozenset[int]] = {}
        self.running: list[tuple[Any, list[frozenset[int]]]] = []
        #: What the store holds: (namespace, hash) -> versions.
        self.stored: dict[tuple[str, bytes], frozenset[int]] = {}
        #: Name -> version of the weights that it was used for.
        self.meant: dict[str, int] = {}
        self.loads = self.saves = 0

    def arrive(self, prompt: int) -> None:
        self.count += 1
        one = request(f"r{self.count}", *(prompt * 10 + step for step in range(6)))
        one.prompt = prompt
        blocks: list[frozenset[int]] = []
        for block_hash in one.block_hashes:
            if block_hash not in self.cached:
                break
            blocks.append(self.cached[block_hash])
        local = len(blocks) * TOKENS
        found = matched(self.scheduler, one, local) // TOKENS
        label = self.scheduler.space.namespace.weights
        for block_hash in one.block_hashes[len(blocks) : len(blocks) + found]:
            versions = self.stored[label, block_hash]
            assert versions == {self.weights}, "an old block is served"
            blocks.append(versions)
            self.loads += 1
        one.num_computed_tokens = len(blocks) * TOKENS
        self.running.append((one, blocks))

    def step(self) -> None:
        """One chunk of every running request; what was planned to be saved is written."""
        left = [(one, one.num_prompt_tokens - one.num_computed_tokens) for one, _ in self.running]
        metadata = step(self.scheduler, *[(one, min(24, tokens)) for one, tokens in left if tokens])
        for one, blocks in self.running:
            while len(blocks) < min(one.num_computed_tokens // TOKENS, len(one.block_hashes)):
                blocks.append((blocks[-1] if blocks else frozenset()) | {self.weights})
            self.cached.update(zip(one.block_hashes, blocks, strict=False))
        for save in (*metadata.saves, *metadata.flushes):
            for block_hash in save.hashes:
                versions = self.cached[block_hash]
                assert versions == {self.weights}, "an old block gets a new name"
                label = weights_of(metadata)
                assert self.meant.setdefault(label, self.weights) == self.weights, "a name is used twice"
                self.stored[label, block_hash] = versions
                self.saves += 1
        if metadata.saves:
            write(self.scheduler, metadata)

    def finish(self) -> None:
        for one, _ in self.running:
            self.scheduler.request_finished(one, [list(range(100, 200))])
        self.running.clear()

    def serve(self, prompt: int) -> None:
        """A request from its arrival to its end, and whatever else is running a few steps further."""
        self.arrive(prompt)
        for _ in range(3):
            self.step()
        one, _ = self.running.pop()
        self.scheduler.request_finished(one, [list(range(100, 200))])

    def forget(self) -> None:
        """vLLM's own prefix cache is reset, and the connector's isn't."""
        if not self.running:
            self.cached.clear()

    def change(self, *, first: bool, preempt: bool, label: bool) -> None:
        """New weights, and a reset before or after them, as vLLM does it."""
        if first:
            self.weights += 1
        if preempt:
            waiting, self.running = self.running, []
        else:
            waiting = []
        if not self.running:
            self.cached.clear()
        self.pool.used = bool(self.running)
        self.scheduler.reset_cache()
        if not first:
            self.weights += 1
        if label:
            name(self.scheduler, f"v{self.weights}", at_ns=time.monotonic_ns() + 10**9)
        for one, _ in waiting:
            self.scheduler.request_finished(one, [[]])
        for one, _ in waiting:
            self.arrive(one.prompt)


OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 1)),
    st.tuples(st.just("serve"), st.integers(0, 1), st.booleans()),
    st.tuples(st.sampled_from(["step", "finish"])),
    st.tuples(st.just("change"), st.booleans(), st.booleans(), st.booleans()),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATIONS, min_size=8, max_size=30))
def test_whatever_happens_every_block_has_the_name_of_its_weights(tmp_path: Path, operations: Any) -> None:
    pool = Pool()
    with make_store(tmp_path / secrets.token_hex(4), kv={"match_deadline_s": 60.0}) as store:
        facts = {"segment_blocks": [2], "prefix_caching": False, "holds_blocks": pool.holds_blocks}
        world = World(half(store, open_space(store), **facts), pool)
        for operation in operations:
            match operation:
                case ("arrive", prompt):
                    world.arrive(prompt)
                case ("change", first, preempt, label):
                    world.change(first=first, preempt=preempt, label=label)
                case ("serve", prompt, afresh):
                    if afresh:
                        world.forget()
                    world.serve(prompt)
                case ("step",):
                    world.step()
                case ("finish",):
                    world.finish()
        event(f"saves: {world.saves > 0}, loads: {world.loads > 0}")
