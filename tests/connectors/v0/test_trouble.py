"""The v0 adapter when something fails: never another token, never an error, a bounded wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.v0 import connector as v0
from connectors.v0 import worker as v0_worker
from connectors.v0.connector import KVStoreConnectorV0
from kvstore.conformance.faulty import Plan, Rule
from tests.connectors.v0.model import Sequence, model_input
from tests.connectors.v0.world import PROMPTS, World, bypassed, counters, flip, stored
from tests.store.world import make_store
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine  # the full set-up, not an engine


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    "damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink],
    ids=["flipped", "truncated", "missing"],
)  # fmt: skip
def test_a_damaged_payload_is_computed_and_stored_again(world: World, damage: Callable[[Path], Any]) -> None:
    answers = stored(world)
    before = world.files()
    for number, path in enumerate(before):
        if number % 2:
            damage(path)
    warm = world.engine(seed=1)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False]]
    warm.close()
    assert counters(warm)["quarantined_segments"] > 0
    again = world.engine(seed=2)
    assert again.generate(PROMPTS) == answers
    assert bypassed(again) == [[True]]


def test_a_closed_store_is_a_miss(world: World) -> None:
    answers = stored(world)
    engine = world.engine()
    engine.close()
    engine.close()
    assert engine.generate(PROMPTS) == answers
    assert bypassed(engine) == [[False]]


def test_an_index_that_is_down_costs_its_deadline_once(world: World) -> None:
    engine = world.engine(extra={"index": "redis://127.0.0.1:1/0"})
    plain = world.engine(store=False).generate(PROMPTS)
    began = time.monotonic()
    for _ in range(4):
        assert engine.generate(PROMPTS) == plain
    assert bypassed(engine) == [[False] * 4]
    assert time.monotonic() - began < 60
    assert world.files() == []


@pytest.fixture
def plan(world: World, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Faults of the payload store of every engine that is made from now on."""
    made = Plan()

    def open_for(settings: Any, what: str) -> Any:
        tree = settings.model_dump(mode="python", exclude={"payloads", "index"})
        return make_store(world.root, plan=made, **tree)

    monkeypatch.setattr(v0, "open_for", open_for)
    return made


def test_a_load_that_is_late_is_computed_and_the_next_one_does_not_wait(world: World, plan: Plan) -> None:
    answers = stored(world)
    warm = world.engine(extra={"kv": {"load_deadline_s": 0.3}, "transfers": {"drain_s": 0.1}}, seed=1)
    worker, go = warm.runners[0].connector._worker, threading.Event()
    worker._store.payloads._sleep = lambda seconds: go.wait(PATIENCE_S)
    plan.replace(Rule("delay", ("read",), delay_s=3))

    def hangs() -> bool:
        began = time.monotonic()
        assert warm.generate(PROMPTS) == answers
        assert time.monotonic() - began > 0.25
        # On a machine that stood still it may have been too late before it began.
        return bool(worker._reads.hanging)

    until(hangs)
    steps, tried = len(warm.runners[0].bypassed), plan.injected["read", "delay"]
    for _ in range(3):
        assert warm.generate(PROMPTS) == answers
    assert len(warm.runners[0].bypassed) == steps + 3
    assert plan.injected["read", "delay"] == tried, "as long as reads hang, no step waits for others"
    plan.replace()
    go.set()
    until(lambda: not worker._reads.hanging)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False] * (steps + 3) + [True]]


def test_a_slow_index_costs_the_match_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = stored(world)
    engine = world.engine(extra={"kv": {"match_deadline_s": 0.2}, "transfers": {"drain_s": 0.1}})
    index = engine.runners[0].connector._worker._store.index
    found, goes_on = index.match, threading.Event()

    def slow(*args: Any, **more: Any) -> Any:
        goes_on.wait(PATIENCE_S)
        return found(*args, **more)

    monkeypatch.setattr(index, "match", slow)
    began = time.monotonic()
    assert engine.generate(PROMPTS) == answers
    assert time.monotonic() - began < PATIENCE_S / 2
    goes_on.set()
    assert bypassed(engine) == [[False]]
    assert counters(engine)["miss_blocks{deadline}"] > 0


def test_payloads_that_fail_are_a_miss_and_heal(world: World, plan: Plan) -> None:
    answers = stored(world)
    warm = world.engine(seed=1)
    plan.replace(Rule("transient"))
    assert warm.generate(PROMPTS) == answers
    plan.replace()
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False, True]]


def test_a_save_that_has_no_room_is_dropped_before_it_is_copied(
    world: World, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    real = v0_worker.HostCopy
    monkeypatch.setattr(v0_worker, "HostCopy", lambda one: copied.append(one.numel()) or real(one))
    engine = world.engine(extra={"transfers": {"write_bytes": 20_000}, "segment": {"max_blocks": 2}})
    plan.replace(Rule("delay", ("put",), delay_s=1))
    plain = world.engine(store=False).generate(PROMPTS)
    assert engine.generate(PROMPTS) == plain
    assert counters(engine)["save_blocks{dropped}"] > 0
    assert 0 < sum(copied) <= 20_000
    held = engine.runners[0].connector._worker._store.transfers.queued["write_bytes"]
    assert 0 < held <= 20_000, "and the step has waited for no write"


class Raising(KVStoreConnectorV0):
    """What a mistake in a subclass, or a bug here, looks like to the engine."""

    def extra_keys(self, model_input: Any, prompts: Any) -> Any:
        raise RuntimeError("no")


def test_no_error_reaches_the_engine(world: World, caplog: pytest.LogCaptureFixture, faults: object) -> None:
    answers = stored(world)
    engine = world.engine(kind=Raising)
    assert engine.generate(PROMPTS) == answers
    assert bypassed(engine) == [[False]]
    assert "the engine goes on without" in caplog.text


def test_a_layout_that_is_not_known_is_said_once_and_left_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    engine = world.engine()
    runner = engine.runners[0]
    sequence = Sequence(list(PROMPTS[3]))
    engine.pool.grow(sequence)
    made = model_input([(sequence, 37)], [])
    # PagedAttention's: [2, blocks, tokens * heads * size], the tokens of a block interleaved.
    odd = [cache.reshape(2, cache.shape[1], -1) for cache in runner.kv_caches]
    for _ in range(3):
        answer = runner.connector.recv_kv_caches_and_hidden_states(runner.model, made, odd)
        assert answer == (None, False, made)
        runner.connector.send_kv_caches_and_hidden_states(runner.model, made, odd, torch.zeros(37, 32))
    assert caplog.text.count("is not supported; such steps run without the cache") == 1
    # The run that measures memory before there are caches.
    caplog.clear()
    nothing = [torch.empty(0) for _ in runner.kv_caches]
    assert runner.connector.recv_kv_caches_and_hidden_states(runner.model, made, nothing)[1] is False
    assert not caplog.text
    # An output of another width or with padded rows.
    for wrong in (torch.zeros(37, 31), torch.zeros(40, 32), torch.zeros(37, 32, dtype=torch.bfloat16)):
        runner.connector.send_kv_caches_and_hidden_states(runner.model, made, runner.kv_caches, wrong)
    engine.close()
    assert world.files() == []
