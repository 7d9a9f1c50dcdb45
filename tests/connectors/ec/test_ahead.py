"""Items of requests that wait are fetched to the node's folder, and from there when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ahead.prefetch import NoPrefetch, Prefetch
from connectors.ahead.queued import QueuedItems
from connectors.engine.step import RequestView
from tests.connectors.ec.world import FakeEngine, ItemRequest, put
from tests.connectors.node import Gate, Node
from tests.store.world import open_space
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, ec={"staging_dir": str(tmp_path / "staging"), "fetch_deadline_s": 60.0})
    with made.other() as other:
        for name in ("one", "two", "three"):
            put(open_space(other), name)
    yield made
    made.close()


@pytest.fixture
def engine(node: Node) -> Iterator[Callable[..., FakeEngine]]:
    made: list[FakeEngine] = []

    def scheduler(**changes: Any) -> FakeEngine:
        made.append(FakeEngine(node.store, **changes))
        return made[-1]

    yield scheduler
    for one in made:
        one.half.shutdown()


def waits(request: ItemRequest, tokens: int = 0) -> None:
    """The KV connector says that a request waits."""
    told = QueuedItems()
    told.arrived(RequestView(request), lambda: tokens)  # type: ignore[arg-type]
    told.step()


def ahead(made: FakeEngine) -> Prefetch:
    found = made.half._ahead._prefetch
    assert isinstance(found, Prefetch)
    return found


def test_the_items_of_a_request_that_waits_are_on_the_node_when_it_starts(node: Node, engine: Any) -> None:
    made, request = engine(), ItemRequest("r", ["one", "two", "unknown"])
    waits(request)
    until(lambda: node.counted() == (2, 0, 0, 0))
    assert node.fetched() == node.copies() == 2
    assert made.half._staging.used_bytes == 0, "nothing is staged before the scheduler comes to it"
    step = made.run(request)
    assert set(step.loads) == {"one", "two"} and step.encoded == {"unknown"}
    assert node.fetched() == 2, "they came from the folder"
    assert node.counted() == (2, 2, 0, 0)
    made.finish(request)
    assert ahead(made).held == 0


def test_items_that_will_be_loaded_with_the_prompt_are_not_fetched(node: Node, engine: Any) -> None:
    made, request = engine(), ItemRequest("r", ["one", "two"])
    # Items begin at tokens 0 and 10, and have four.
    waits(request, tokens=4)
    until(lambda: node.counted() == (1, 0, 0, 0))
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 1
    made.finish(request)
    assert node.counted() == (1, 0, 1, 0) and ahead(made).held == 0


def test_a_request_that_the_scheduler_has_come_to_fetches_for_itself(node: Node, engine: Any) -> None:
    made, request = engine(), ItemRequest("r", ["one"])
    gate = Gate(node)
    assert made.step(request) is None
    until(lambda: gate.waiting)
    waits(request)
    # Nor is one that is being staged fetched for another.
    waits(ItemRequest("other", ["one"]))
    gate.open()
    made.run(request)
    assert node.counted() == (0, 0, 0, 0) and ahead(made).held == 0


def test_new_weights_forget_what_waits(node: Node, engine: Any) -> None:
    made = engine()
    gate = Gate(node)
    waits(ItemRequest("r", ["one", "two", "three"]))
    until(lambda: gate.waiting == 2)
    made.half.enter("other weights")
    gate.open()
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.counted() == (2, 0, 2, 0) and ahead(made).held == 0


def test_a_producer_fetches_nothing(node: Node, engine: Any) -> None:
    made = engine(consumer=False)
    waits(ItemRequest("r", ["one"]))
    assert node.store.transfers.drain(PATIENCE_S)
    assert type(made.half._ahead._prefetch) is NoPrefetch and node.fetched() == 0
