"""The scheduler half's audits: which loads are declined, what is compared, what a wrong segment leads to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.messages import Wrong
from connectors.kv.scheduler import KVScheduler
from connectors.weights import Naming
from kvstore.keys import new_segment_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS
from tests.connectors.kv.world import answer, half, tell
from tests.fake_vllm import FakeRequest, step
from tests.store.world import chain, make_store, match, open_space, slots
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path, kv={"match_deadline_s": 60.0, "audit_every": 3})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    made = open_space(store)
    made.save(slots(chain(*range(6))))
    return made


@pytest.fixture
def make(store: Store, space: Space) -> Callable[..., KVScheduler]:
    return lambda **changes: half(store, space, **changes)


def ask(scheduler: KVScheduler, name: str, computed: int = 0) -> tuple[Any, int | None]:
    request = FakeRequest(name, [*range(6), 77])
    scheduler.on_new_request(request)
    return request, answer(scheduler, request, computed)[0]


def declined(scheduler: KVScheduler, computed: int = 0) -> Any:
    """A request whose load is declined; those before it are promised theirs."""
    promised = [ask(scheduler, f"before {i}", computed)[1] for i in range(2)]
    assert promised == [6 * TOKENS - computed] * 2
    request, tokens = ask(scheduler, "audited", computed)
    assert tokens == 0
    return request


def wrong(at: int = 0) -> dict[Any, Wrong]:
    return {new_segment_id(): Wrong("audited", 0, at, chain(*range(6))[at : at + 1])}


def test_one_load_in_so_many_is_declined_and_compared_as_it_is_computed(make: Any, store: Store) -> None:
    scheduler = make()
    request = declined(scheduler, computed=TOKENS)
    assert store.counters.snapshot()["miss_blocks{audited}"] == 5
    request.num_computed_tokens = TOKENS
    told = step(scheduler, (request, 2 * TOKENS + 3))
    [audit] = told.audits
    [group] = audit.groups
    assert (audit.request_id, group.first, group.hashes) == ("audited", 1, request.block_hashes[1:3])
    assert [(run.start, run.slot, run.count) for run in group.runs] == [(1, 1, 2)]
    assert len(group.tables[0]) == 2 and told.namespace is not None
    # A block that two steps compute is compared after the second one; blocks that aren't stored never are.
    assert request.num_computed_tokens == 3 * TOKENS + 3
    [audit] = step(scheduler, (request, 4 * TOKENS - 3)).audits
    assert [(run.start, run.count) for run in audit.groups[0].runs] == [(3, 3)]
    assert len(scheduler._audits) == 0
    request.num_computed_tokens = 7 * TOKENS
    assert step(scheduler, (request, 1)).audits == []
    # What is stored already is not saved again.
    assert ask(scheduler, "next")[1] == 6 * TOKENS


def test_with_0_none_is_declined(make: Any, store: Store) -> None:
    object.__setattr__(store.settings.kv, "audit_every", 0)
    scheduler = make()
    assert [ask(scheduler, str(i))[1] for i in range(8)] == [6 * TOKENS] * 8


def test_what_is_not_surely_computed_here_is_not_compared(make: Any) -> None:
    scheduler = make()
    request = declined(scheduler)
    # Another connector brings tokens within the step.
    assert step(scheduler, (request, 2 * TOKENS), has_sync_kv_loads=True).audits == []
    # Another connector has brought some between two steps.
    request.num_computed_tokens = 4 * TOKENS
    [audit] = step(scheduler, (request, 2 * TOKENS)).audits
    assert [(run.start, run.count) for run in audit.groups[0].runs] == [(4, 2)]
    request = declined(scheduler)
    # A preempted request comes back, and may find its blocks in the engine's own cache.
    assert answer(scheduler, request, 3 * TOKENS)[0] == 3 * TOKENS
    request.num_computed_tokens = 3 * TOKENS
    assert step(scheduler, (request, TOKENS)).audits == []
    request = declined(scheduler)
    scheduler.request_finished(request, [[]])
    assert len(scheduler._audits) == 0


def test_a_wrong_segment_is_told_of_and_the_second_ends_the_namespaces_use(
    make: Any, store: Store, space: Space
) -> None:
    scheduler = make()
    tell(scheduler, wrong=wrong(3))
    assert ask(scheduler, "after the first")[1] == 6 * TOKENS
    tell(scheduler, wrong=wrong(5))
    assert ask(scheduler, "after the second")[1] == 0
    assert scheduler.requests.retired
    assert step(scheduler).abandon_loads
    # Nothing is saved either.
    fresh = FakeRequest("fresh", [*range(50, 54)])
    assert answer(scheduler, fresh)[0] == 0
    told = step(scheduler, (fresh, 4 * TOKENS))
    assert (told.saves, told.loads, told.audits) == ([], [], [])
    scheduler._observer.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    outcomes = [one for one in store.maintenance.outcomes(space.id, 10) if one.reason == "wrong"]
    assert [(one.request, one.op, one.position, one.served) for one in outcomes] == [
        ("audited", "save", 5, 0),
        ("audited", "save", 3, 0),
    ]
    assert match(space, chain(*range(6))).blocks == 6, "others go on"


def test_a_name_for_the_weights_leads_back_to_no_namespace_that_is_left_alone(make: Any) -> None:
    scheduler = make(holds_blocks=lambda: False)
    tell(scheduler, wrong=wrong(0) | wrong(1))
    scheduler.reset_cache()
    assert not scheduler.requests.retired, "weights of another name have another namespace"
    tell(scheduler, weights={0: Naming.now("")})
    assert scheduler.space.namespace.weights.startswith("unnamed")
