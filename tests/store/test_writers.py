"""What a process makes of writers: of earlier starts at its own place, of its own failure, of no writer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.index.port import Run
from kvstore.keys import WriterId, digests, place_of
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.store.writers.known import MOST_REFUSED
from kvstore.store.writers.own import Writer
from schemas.records import NO_WRITER
from tests.store.world import chain, make_store, match, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.proves

ACCELERATORS = ["GPU-1", "GPU-2"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path) as made:
        made.backends.writer.computes_on(ACCELERATORS)
        yield made


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


def write(root: Path, accelerators: list[str], number: int) -> tuple[WriterId, list[bytes]]:
    """Another start of an engine stores some blocks."""
    hashes = chain(1000 + number, 1, 2)
    with make_store(root) as other:
        other.backends.writer.computes_on(accelerators)
        open_space(other).save(slots(hashes))
        return other.backends.writer.id, hashes


def settle(space: Space, hashes: list[bytes], opinion: Any) -> None:
    [run] = match(space, hashes).runs
    space.settle(run, opinion)
    assert space.backends.transfers.drain(PATIENCE_S)


def test_all_starts_on_the_same_accelerators_share_a_place_and_nothing_else() -> None:
    one, other, host, elsewhere = Writer(), Writer(), Writer(), Writer()
    one.computes_on(ACCELERATORS)
    other.computes_on(ACCELERATORS[::-1])
    elsewhere.computes_on(ACCELERATORS[:1])
    assert one.id != other.id
    assert one.place == other.place == place_of(one.name)
    assert len({one.place, host.place, elsewhere.place}) == 3
    assert host.place == Writer().place
    assert place_of("another product, 1") != place_of("another product, 2")
    assert max(len(some.name) for some in (one, host)) <= 128


def test_a_container_of_another_name_is_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for host in ("pod-1", "pod-2", "", "a host"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        writer = Writer()
        writer.computes_on(ACCELERATORS)
        places.add(writer.place)
    assert len(places) == 1


def test_a_start_that_agrees_with_an_earlier_one_there_proves_nothing_to_others(
    store: Store, space: Space, tmp_path: Path
) -> None:
    earlier, hashes = write(tmp_path, ACCELERATORS, 1)
    settle(space, hashes, "alike")
    assert space.writers.unproven(match(space, hashes).runs) == set(), "it loads what it has compared"
    assert store.index.verdicts(space.id) == {}
    assert not space.writers.stands
    # Nor does it fail a writer for that.
    other, more = write(tmp_path, ["GPU-3"], 2)
    settle(space, more, "differs")
    assert store.index.verdicts(space.id)[other].state == "disputed"
    # One elsewhere that agrees is another thing.
    good, most = write(tmp_path, ["GPU-4"], 3)
    settle(space, most, "alike")
    found = {writer: one.state for writer, one in store.index.verdicts(space.id).items()}
    assert found == {good: "proven", other: "failed"} and earlier not in found


def test_a_writer_of_which_nobody_can_tell_where_it_is_is_not_proven_to_others(
    store: Store, space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hashes = write(tmp_path, ["GPU-3"], 1)
    monkeypatch.setattr(space, "written_by", lambda run: "")
    settle(space, hashes, "alike")
    assert store.index.verdicts(space.id) == {} and not space.writers.stands


def test_two_starts_at_one_place_are_one_judge(store: Store, space: Space, tmp_path: Path) -> None:
    writer, hashes = write(tmp_path, ["GPU-3"], 1)
    settle(space, hashes, "differs")
    for accelerators, state in ((ACCELERATORS, "disputed"), (["GPU-4"], "failed")):
        with make_store(tmp_path) as restarted:
            restarted.backends.writer.computes_on(accelerators)
            settle(open_space(restarted), hashes, "differs")
        assert store.index.verdicts(space.id)[writer].state == state


def test_a_broken_engine_that_is_started_again_and_again_drives_no_other_away(
    space: Space, tmp_path: Path
) -> None:
    for number in range(MOST_REFUSED + 1):
        settle(space, write(tmp_path, ["GPU-3"], number)[1], "differs")
    assert not space.writers.distrusts_itself()
    for number in range(1, MOST_REFUSED):
        assert not space.writers.distrusts_itself()
        settle(space, write(tmp_path, [f"GPU-{10 + number}"], 100 + number)[1], "differs")
    assert space.writers.distrusts_itself()


def test_one_that_has_failed_can_save_no_more_and_hears_of_it(store: Store, space: Space) -> None:
    assert space.save(slots(chain(1))).outcome == "stored"
    for place in ("one place", "another"):
        store.index.judge(space.id, store.backends.writer.id, "differs", by=place_of(place), stands=False)
    assert not space.writers.distrusts_itself()
    assert space.save(slots(chain(2))).outcome == "refused"
    until(space.writers.distrusts_itself)
    assert match(space, chain(1)).blocks == 0, "it takes its own for absent, too"

    def put(*_: Any) -> None:
        raise AssertionError("its commit would be refused")

    store.payloads.put = put  # type: ignore[method-assign]
    assert space.save(slots(chain(3))).outcome == "refused"


def test_one_whose_commit_was_refused_for_another_reason_goes_on(space: Space) -> None:
    space.was_refused()
    assert space.backends.transfers.drain(PATIENCE_S)
    assert not space.writers.own_failed


def test_what_has_no_writer_is_absent_and_goes(store: Store, space: Space) -> None:
    """As in an index that was brought up to date: any number of engines may have written it."""
    hashes = chain(1, 2)
    commit = store.index.commit

    def without(name: Any, segment: Any, packed: Any, record: Any, **more: Any) -> Any:
        return commit(name, segment, packed, replace(record, writer=NO_WRITER), **more)

    store.index.commit = without  # type: ignore[method-assign]
    space.save(slots(hashes))
    [run] = store.index.match(space.id, digests(hashes))
    assert isinstance(run, Run) and run.record.writer == NO_WRITER
    found = match(space, hashes)
    assert (found.blocks, found.reason) == (0, "writer_failed")
    until(lambda: store.maintenance.usage(space.id).segments == 0)
