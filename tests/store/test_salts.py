"""A salt on its way through the whole store: into headers and records, and back out of the payloads."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings, open_store
from kvstore.format import segment as codec
from kvstore.index.maintenance import FullIndex
from kvstore.janitor.janitor import Janitor
from kvstore.keys import NO_SALT, SaltId, SegmentId, digests, new_segment_id, payload_name, salt_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.settings import Settings
from tests.servers.redis import RedisServer
from tests.store.world import chain, content, fetch, match, open_space, slots
from tests.waiting import until

HERS, HIS = salt_id("hers"), salt_id("his")
SALTS = (HERS, HIS, NO_SALT)
ALL = Depth(percent=100.0, settled_s=0.0)


class World:
    """A store whose index can be emptied and opened again."""

    def __init__(self, root: Path, redis: RedisServer | None) -> None:
        self.root, self.redis = root, redis
        self.settings = self.at("payloads")

    def at(self, folder: str) -> Settings:
        root = self.root / folder
        url = self.redis.url if self.redis else f"sqlite://{root}/index.sqlite"
        made: dict[str, Any] = {"payloads": f"file://{root}", "index": url, "capacity_bytes": "1GiB"}
        return load_settings(made | {"janitor": {"scrub_percent": 100}}, environ={})

    def flush(self) -> None:
        """The index is lost."""
        if self.redis is not None:
            self.redis.flush()
        else:
            for file in (self.root / "payloads").glob("index.sqlite*"):
                file.unlink()


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, request.getfixturevalue("redis_server") if request.param == "redis" else None)


@pytest.fixture
def store(world: World) -> Iterator[Store]:
    with open_store(world.settings) as opened:
        yield opened


def hashes(number: int) -> list[bytes]:
    return chain(number, *range(3))


def fill(space: Space) -> dict[SegmentId, SaltId]:
    """Segments of every salt and of none, of one rank and of two."""
    made: dict[SegmentId, SaltId] = {}
    for number, salt in enumerate(SALTS * 2):
        segment = new_segment_id()
        for rank in range(1 + number // len(SALTS)):
            ranks = 1 + number // len(SALTS)
            space.save(
                slots(hashes(number)),
                segment=segment,
                created_s=1_763_000_000,
                rank=rank,
                ranks=ranks,
                salt=salt,
            )
        made[segment] = salt
    return made


def named(index: FullIndex, space: Space) -> dict[SegmentId, SaltId]:
    """What the index says: by the records, and the same by each salt's own list."""
    said = {one.segment: SaltId(one.record.salt) for one in index.segments(space.id)}
    for salt in (HERS, HIS):
        assert {one.segment for one in index.of_salt(space.id, salt)} == {s for s in said if said[s] == salt}
    sums = {salt: 0 for salt in said.values() if salt}
    for one in index.segments(space.id):
        if one.record.salt:
            sums[SaltId(one.record.salt)] += one.record.nbytes
    assert index.holdings(space.id, 0) == sums
    return said


def served(space: Space) -> bool:
    """Whether every chain is there; a salt is no part of a block's name, so it hides nothing."""
    found = [match(space, hashes(number)) for number in range(2 * len(SALTS))]
    assert [content(one) for one in hashes(0)] == fetch(space, hashes(0), found[0])
    return all(one.blocks == 4 for one in found)


def test_headers_and_records_name_the_salt(store: Store, world: World) -> None:
    space = open_space(store)
    made = fill(space)
    assert named(store.maintenance, space) == made
    assert served(space)
    for segment, salt in made.items():
        for rank in range(2):
            file = world.root / "payloads" / payload_name(space.id, segment, rank)
            if rank and not file.exists():
                continue
            meta = codec.parse_header(file.read_bytes()).meta
            assert (meta.salt or "", meta.format) == (salt.hex(), 2 if salt else 1)


def test_ranks_that_name_another_salt_are_refused_and_leave_nothing(store: Store, world: World) -> None:
    space, segment = open_space(store), new_segment_id()

    def save(rank: int, salt: SaltId) -> str:
        return space.save(
            slots(hashes(0)), segment=segment, created_s=1_763_000_000, rank=rank, ranks=2, salt=salt
        ).outcome

    assert [save(0, HERS), save(1, HIS), save(1, NO_SALT)] == ["waiting", "refused", "refused"]
    assert not (world.root / "payloads" / payload_name(space.id, segment, 1)).exists()
    assert save(1, HERS) == "stored"
    assert named(store.maintenance, space) == {segment: HERS}


def test_a_lost_index_is_made_again_with_its_salts(world: World) -> None:
    with open_store(world.settings) as store:
        made = fill(open_space(store))
    world.flush()
    with Cache(world.settings) as cache:
        (report,) = rebuild(cache, apply=True).namespaces
        assert (report.listed.segments, report.refused, report.unusable) == (len(made), 0, 0)
        assert fsck(cache, depth=ALL).faults == ()
    with open_store(world.settings) as store:
        space = open_space(store)
        assert named(store.maintenance, space) == made
        assert served(space)


def test_fsck_finds_what_is_under_the_wrong_salt_and_puts_it_right(store: Store, world: World) -> None:
    space, index = open_space(store), store.maintenance
    made = fill(space)
    hers, unlisted = [one for one in made if made[one] == HERS], [one for one in made if made[one] == HIS]
    [wrong] = [one for one in hers if len(index.get(space.id, [one])[0].record.parts) == 1]  # type: ignore[union-attr]
    listing = index.get(space.id, [wrong])[0]
    assert listing is not None
    index.unlist(space.id, [wrong, *unlisted])
    moved = replace(listing.record, salt=HIS)
    index.commit(space.id, wrong, digests(hashes(list(made).index(wrong))), moved, rank=0, ranks=1)
    assert [one.segment for one in index.of_salt(space.id, HIS)] == [wrong]
    with Cache(world.settings) as cache:
        told = [fault.detail for fault in fsck(cache, depth=ALL).faults if fault.segment == wrong.hex()]
        assert told == [f"salt id {HIS.hex()} by the index, {HERS.hex()} by the header"]
        fsck(cache, depth=ALL, apply=True)
        assert fsck(cache, depth=ALL).faults == ()
    assert named(index, space) == made


def test_archives_keep_salts(store: Store, world: World) -> None:
    made = fill(open_space(store))
    archive = io.BytesIO()
    with Cache(world.settings) as cache:
        export(cache, plan(cache, []), archive)
    store.close()
    world.flush()
    with closing(open_store(world.at("elsewhere"))) as there:
        report = import_archive(io.BytesIO(archive.getvalue()), there, source="-", wanted=EVERYTHING)
        assert report.ended == "complete", report.problem
        space = open_space(there)
        assert named(there.maintenance, space) == made
        assert served(space)


def test_a_janitor_leaves_them_as_they_are(store: Store) -> None:
    space = open_space(store)
    made = fill(space)
    janitor = Janitor(store.maintenance, store.payloads, store.backends.evidence, store.settings)
    for _ in range(3):
        janitor.round()
    assert janitor.state().faults == ()
    assert named(store.maintenance, space) == made


def test_what_is_erased_does_not_come_back_by_any_way(
    store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.index.scripted.salts.CLOCKS_DIFFER_S", 5)
    space, index = open_space(store), store.maintenance
    made = fill(space)
    archive = io.BytesIO()
    with Cache(world.settings) as cache:
        export(cache, plan(cache, []), archive)
    index.forbid(space.id, HERS)
    hers = [one.segment for one in index.of_salt(space.id, HERS)]
    index.evict(space.id, hers, delete_after_s=0.0, rule="erased")
    left = {segment: salt for segment, salt in made.items() if salt != HERS}

    # An engine that computed it before.
    again = space.save(slots(hashes(0)), created_s=1_763_000_000, salt=HERS)
    assert again.outcome == "refused"
    # Its payloads, which nothing has deleted yet, and which a rebuild finds.
    with Cache(world.settings) as cache:
        rebuild(cache, apply=True)
        fsck(cache, depth=ALL, apply=True)
    assert named(index, space) == left
    # An archive that was made before.
    import_archive(io.BytesIO(archive.getvalue()), store, source="-", wanted=EVERYTHING)
    assert named(index, space) == left
    # What is computed afterwards is stored as ever.
    last_s = index.forbidden(space.id)[HERS] + 1
    until(lambda: index.now(space.id) > last_s)
    assert space.save(slots(hashes(0)), salt=HERS).outcome == "stored"
    assert [event.rule for event in index.events(space.id) if event.op == "evict"] == ["erased"] * len(hers)
