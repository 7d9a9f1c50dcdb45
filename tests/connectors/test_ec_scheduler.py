"""The EC scheduler's half alone: which items are saved, on a real store; vLLM drives it in tests/e2e."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import torch

from connectors.ec_media import Media
from connectors.ec_scheduler import ECScheduler
from kvstore.codec import Slot
from kvstore.errors import TransientError
from kvstore.keys import digest, item_key
from kvstore.store import Space, Store
from tests.store.world import make_store, open_space

pytestmark = pytest.mark.engine

ROWS, WIDTH = 4, 8
MEDIA = Media({"image": {"grid"}})


@dataclass
class FakeRequest:
    request_id: str
    identifiers: list[str]
    mm_features: list[Any] = field(init=False)
    lora_request: Any = None
    ec_transfer_params: Any = None
    #: What each item brings: fields and what is in them.
    brings: dict[str, Any] = field(default_factory=lambda: {"pixels": b"..."})
    rows: int = ROWS

    def __post_init__(self) -> None:
        self.mm_features = [
            SimpleNamespace(
                identifier=one,
                modality="image",
                data={name: SimpleNamespace(data=value) for name, value in self.brings.items()},
                mm_position=SimpleNamespace(offset=10 * i, length=self.rows),
            )
            for i, one in enumerate(self.identifiers)
        ]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.rows


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def store(**settings: Any) -> Store:
        ec = {"staging_dir": str(tmp_path / "staging"), "absent_ttl_s": 0.1}
        made.append(make_store(tmp_path / "store", ec=ec, **settings))
        return made[-1]

    yield store
    for one in made:
        one.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., ECScheduler]]:
    made: list[ECScheduler] = []

    def scheduler(store: Store, space: Space | None = None, **changes: Any) -> ECScheduler:
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "hidden": WIDTH,
            "widths": dict,
            "media": MEDIA,
            "consumer": True,
            "producer": True,
            "tower_lora": False,
        }
        made.append(ECScheduler(store, space or open_space(store), **options | changes))
        return made[-1]

    yield scheduler
    for one in made:
        one.shutdown()


SECOND_USE = {"admission": {"second_use": True}}


def schedule(scheduler: ECScheduler, request: FakeRequest) -> set[str]:
    """A request as the scheduler takes it: what of it the engine encodes and is to save."""
    for _ in range(3000):
        if scheduler.ensure_cache_available(request, 0):  # type: ignore[arg-type]
            break
        time.sleep(0.001)
    else:
        raise AssertionError("not available")
    for index, feature in enumerate(request.mm_features):
        scheduler.has_cache_item(feature.identifier)
        scheduler.update_state_after_alloc(request, index)  # type: ignore[arg-type]
    output = SimpleNamespace(free_encoder_mm_hashes=[])
    return scheduler.build_connector_meta(output).saves  # type: ignore[arg-type]


def forget(scheduler: ECScheduler, *identifiers: str) -> None:
    """The engine's encoder cache drops items."""
    output = SimpleNamespace(free_encoder_mm_hashes=list(identifiers))
    scheduler.build_connector_meta(output)  # type: ignore[arg-type]


def not_admitted(store: Store) -> int:
    return store.counters.snapshot()["save_blocks{not_admitted}"]


def put(space: Space, identifier: str) -> None:
    data = memoryview(bytearray(ROWS * WIDTH * 4))
    space.save([Slot(item_key(identifier), data, "F32", (ROWS, WIDTH))])


def test_everything_is_saved_without_second_use(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(admission={"min_blocks": 100})
    space = open_space(store)
    monkeypatch.setattr(space, "note", lambda packed: pytest.fail("noted"))
    assert schedule(engine(store, space), FakeRequest("r", ["a", "b"])) == {"a", "b"}


def test_an_item_is_saved_on_its_second_use(opened: Any, engine: Any) -> None:
    store, other = opened(**SECOND_USE), opened(**SECOND_USE)
    here, there = engine(store), engine(other)
    assert schedule(here, FakeRequest("r", ["a", "b"])) == set()
    assert not_admitted(store) == 2
    # On another engine; and here, where the first one's output is gone.
    assert schedule(there, FakeRequest("s", ["b", "c"])) == {"b"}
    assert not_admitted(other) == 1
    forget(here, "a", "b")
    time.sleep(0.15)
    assert schedule(here, FakeRequest("t", ["a", "d"])) == {"a"}


def test_a_consumer_notes_though_it_saves_nothing(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    assert schedule(engine(store, producer=False), FakeRequest("r", ["a"])) == set()
    assert not_admitted(store) == 0
    assert schedule(engine(opened(**SECOND_USE)), FakeRequest("s", ["a"])) == {"a"}


def test_a_request_that_waits_is_not_its_own_first_use(opened: Any, engine: Any) -> None:
    """It looks its items up again and again, and again after a preemption."""
    store = opened(**SECOND_USE)
    scheduler, request = engine(store), FakeRequest("r", ["a"])
    for _ in range(20):
        scheduler.ensure_cache_available(request, 0)
        time.sleep(0.02)
    assert store.counters.snapshot()["match_calls"] >= 3
    for _ in range(3):
        assert schedule(scheduler, request) == set()
        forget(scheduler, "a")
        time.sleep(0.15)
    # Another one that waits for it as well is a use of its own.
    assert schedule(scheduler, FakeRequest("s", ["a"])) == {"a"}


def test_what_is_stored_and_damaged_is_saved_anew(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    space = open_space(store)
    put(space, "a")
    for path in Path(store.payloads._root).glob("*/??/*"):  # type: ignore[attr-defined]
        path.unlink()
    assert schedule(engine(store, space), FakeRequest("r", ["a"])) == {"a"}
    assert store.counters.snapshot()["miss_blocks{missing}"] == 1


def test_a_hit_is_a_use(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    space = open_space(store)
    put(space, "a")
    assert schedule(engine(store, space), FakeRequest("r", ["a"])) == set()
    assert not_admitted(store) == 0
    store.transfers.drain(5.0)
    assert space.note(digest(item_key("a"))) == 1


def test_an_index_that_fails_admits_nothing(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(**SECOND_USE)
    space = open_space(store)
    space.note(digest(item_key("a")))

    def broken(*_: Any, **__: Any) -> int:
        raise TransientError("gone")

    monkeypatch.setattr(store.index, "note", broken)
    assert schedule(engine(store, space), FakeRequest("r", ["a"])) == set()
    counts = store.counters.snapshot()
    assert (counts["note_failures"], counts["save_blocks{not_admitted}"]) == (1, 1)
