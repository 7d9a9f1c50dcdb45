"""The v0 adapter on several ranks: each its part, one decision."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from tests.connectors.v0.world import (
    PROMPTS,
    World,
    bypassed,
    calls,
    counters,
    flip,
    namespaces,
    prompts,
    stored,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine  # the full set-up, not an engine


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


@pytest.mark.parametrize("kind", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "mla": True}], ids=str)
def test_every_rank_keeps_its_part_and_all_are_served(world: World, kind: dict[str, Any]) -> None:
    answers = stored(world, **kind)
    warm = world.engine(seed=1, **kind)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[True]] * len(warm.runners)
    assert calls(warm) == [3] * len(warm.runners)
    warm.close()
    if kind.get("mla"):
        new = world.engine(**kind)
        new.generate(prompts(30, seed=8))
        new.close()
        offered = [
            sum(value for name, value in counters(new, rank).items() if name.startswith("save_blocks"))
            for rank in (0, 1)
        ]
        assert offered == [4, 0], "the second has nothing to add"
    parts = {path.suffix for path in world.files()}
    assert parts == ({".0", ".1"} if kind == {"tp": 2} or kind == {"tp": 2, "pp": 2} else {".0"})
    assert len({path.parts[-3] for path in world.files()}) == kind.get("pp", 1), "a namespace per stage"


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_rank_cannot_load_all_of_them_compute(
    world: World, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = stored(world, tp=2)
    for path in world.files():
        if path.suffix == f".{rank}":
            flip(path)
    warm = world.engine(tp=2, seed=1)
    # The good one has loaded everything before the bad one tells the index.
    good, bad = (warm.runners[number].connector._worker for number in (1 - rank, rank))
    loaded, load, fail = threading.Event(), good.load, bad.load
    monkeypatch.setattr(good, "load", lambda *args: (load(*args), loaded.set())[0])
    monkeypatch.setattr(bad, "load", lambda *args: loaded.wait(PATIENCE_S) and fail(*args))
    assert warm.generate(PROMPTS) == answers
    assert counters(warm, 1 - rank)["load_blocks"] == counters(warm, 1 - rank)["match_blocks_asked"]
    assert bypassed(warm) == [[False], [False]]
    assert calls(warm) == [4, 4]
    warm.close()
    again = world.engine(tp=2, seed=2)
    assert again.generate(PROMPTS) == answers
    assert bypassed(again) == [[True], [True]], "what was bad is stored anew, by both"


def test_ranks_with_different_clocks_agree_on_when(world: World) -> None:
    engine = world.engine(tp=2)
    now = time.time()
    engine.runners[0].connector._clock = lambda: now + 100
    answers = engine.generate(PROMPTS)
    engine.close()
    warm = world.engine(tp=2, seed=1)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[True], [True]]
    catalogue = warm.runners[0].connector._worker._store.maintenance
    [name] = namespaces(warm.runners[0])
    assert all(abs(one.record.created_s - now) < 50 for one in catalogue.segments(name))


def test_a_part_that_one_rank_could_not_write_is_never_served(world: World) -> None:
    engine = world.engine(tp=2)
    engine.runners[1].connector._worker._store.transfers.close(0)
    answers = engine.generate(PROMPTS)
    engine.close()
    assert {path.suffix for path in world.files()} == {".0"}
    warm = world.engine(tp=2, seed=1)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False], [False]]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_cannot_load_computes_from_what_the_other_has_handed_on(
    world: World, stage: int
) -> None:
    answers = stored(world, pp=2)
    probe = world.engine(pp=2)
    probe.generate([PROMPTS[0]])
    for path in world.files():
        if path.parts[-3] in namespaces(probe.runners[stage]):
            flip(path)
    warm = world.engine(pp=2, seed=1)
    assert warm.generate(PROMPTS) == answers
    expected = [[True], [True]]
    expected[stage] = [False]
    assert bypassed(warm) == expected
