"""What may not be served is not served again: by no listing, in no region, and by no archive."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.admin.remove import drop, evict
from kvstore.admin.remove.erase import Target, erase
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.follow import PayloadFollower
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings, open_store
from kvstore.conformance.faulty import Plan, Rule, Verb
from kvstore.errors import CorruptPayload
from kvstore.index.maintenance import Listing
from kvstore.keys import (
    NamespaceId,
    PlaceId,
    SaltId,
    SegmentId,
    WriterId,
    namespace_id,
    parse_payload_name,
    payload_name,
    salt_id,
)
from kvstore.payloads.evidence import KEPT_S
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.verify.returning import Returns
from tests.servers.redis import RedisServer
from tests.store.world import chain, match, namespace, open_space, put_faults, slots
from tests.waiting import until

A = chain(*range(4))
ALICE, BOB = salt_id("alice"), salt_id("bob")
NAME = namespace_id(namespace())
#: Old enough to be looked at, and too young to be waste.
HALF_AN_HOUR_S = 1800.0


class Region:
    """A folder of payloads, and an index of its own: a file in it, or the database `url` of Redis."""

    def __init__(self, folder: Path, url: str = "", shards: int = 1) -> None:
        self.folder = folder
        self.url = url
        self.engines: list[Store] = []
        self.payloads = folder / "payloads"
        self.settings: dict[str, Any] = {"payloads": f"file://{self.payloads}"}
        self.settings["index"] = url or f"sqlite://{folder}/index.sqlite"
        if url:
            self.settings["redis"] = {"timeout_s": 60.0, "connect_timeout_s": 60.0, "shards": shards}

    def open(self) -> Space:
        """The space of a new engine, which remembers nothing."""
        self.engines.append(open_store({**self.settings, "kv": {"load": "always", "match_deadline_s": 60.0}}))
        return open_space(self.engines[-1])

    def served(self, hashes: Sequence[bytes] = A) -> int:
        space = self.open()
        space.register()
        return match(space, hashes).blocks

    def cache(self) -> Cache:
        return Cache(load_settings(self.settings, environ={}))

    def lose_the_index(self) -> None:
        if self.url:
            redis.Redis.from_url(self.url).flushdb()
        for end in ("", "-wal", "-shm"):
            Path(f"{self.folder}/index.sqlite{end}").unlink(missing_ok=True)

    def rebuild(self) -> None:
        with self.cache() as cache:
            assert rebuild(cache, apply=True).ended == "complete"

    def follow(self) -> None:
        with self.cache() as cache:
            assert not PayloadFollower(cache).turn().problem

    def names(self) -> set[str]:
        return {str(path.relative_to(self.payloads)) for path in self.payloads.rglob("*.*") if path.is_file()}

    def copy_to(self, other: Region) -> None:
        """As a bucket is copied: what is there, evidence as well, and nothing is deleted."""
        shutil.copytree(self.payloads, other.payloads, dirs_exist_ok=True)


@pytest.fixture(
    params=["sqlite", *(pytest.param(kind, marks=pytest.mark.servers) for kind in ("redis", "shards"))]
)
def regions(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Region]]:
    made = []
    for number, name in enumerate(("here", "there")):
        url = ""
        if request.param != "sqlite":
            server: RedisServer = request.getfixturevalue("redis_server")
            url = f"{server.url.rpartition('/')[0]}/{number}"
        (tmp_path / name).mkdir()
        made.append(Region(tmp_path / name, url, 3 if request.param == "shards" else 1))
        made[-1].lose_the_index()
    yield made
    for region in made:
        for engine in region.engines:
            engine.close()


@pytest.fixture
def here(regions: list[Region]) -> Region:
    return regions[0]


@pytest.fixture
def there(regions: list[Region]) -> Region:
    return regions[1]


def save(region: Region, salt: SaltId = SaltId(b"")) -> SegmentId:
    space = region.open()
    space.save(slots(A), salt=salt)
    (run,) = match(space, A).runs
    return run.segment


def condemn(region: Region, plan: Plan | None = None) -> Space:
    """As an audit does that finds something else than it has computed. Returns its engine's space."""
    space = region.open()
    (run,) = match(space, A).runs
    if plan is not None:
        put_faults(space.backends.payloads, plan)
        put_faults(space.backends.evidence.payloads, plan)
    space.condemn(run.segment, run.record, rank=0, computed=slots(chain(7, 8)), depth=0)
    return space


def test_what_an_audit_condemned_is_served_by_no_index_that_is_made_of_the_payloads(
    here: Region, there: Region
) -> None:
    save(here)
    here.copy_to(there)
    there.follow()
    assert here.served() == there.served() == 4
    condemn(here)
    assert here.served() == 0
    here.rebuild()
    assert here.served() == 0
    here.lose_the_index()
    here.rebuild()
    assert here.served() == 0
    # The other region's copier brings what is new, and no deletions.
    here.copy_to(there)
    there.follow()
    assert there.served() == 0
    there.lose_the_index()
    there.follow()
    assert there.served() == 0


@pytest.mark.parametrize("verbs", [("read",), ("put",), ("delete",), ("read", "put", "delete")], ids="+".join)
def test_what_is_condemned_while_the_payload_store_refuses_is_served_nowhere(
    here: Region, there: Region, verbs: tuple[Verb, ...]
) -> None:
    segment = save(here)
    here.copy_to(there)
    there.follow()
    faults = Plan(Rule("transient", verbs))
    space = condemn(here, faults)
    assert here.served() == 0
    faults.replace()
    # The engine goes on, and the store answers again.
    assert space.save(slots(chain(20, 21))).outcome == "stored"
    here.copy_to(there)
    there.follow()
    here.lose_the_index()
    here.rebuild()
    assert here.served() == there.served() == 0
    there.lose_the_index()
    there.follow()
    assert there.served() == 0
    assert f"evidence/{payload_name(NAME, segment, 0)}" in here.names()


@pytest.mark.parametrize("refused", [0, 1])
def test_what_a_failed_writer_wrote_is_served_by_no_index_that_is_made_of_the_payloads(
    here: Region, there: Region, refused: int
) -> None:
    save(here)
    archive = io.BytesIO()
    with here.cache() as cache:
        export(cache, plan(cache, []), archive)
    here.copy_to(there)
    there.follow()
    assert there.served() == 4
    space = here.open()
    (run,) = match(space, A).runs
    by, index = PlaceId(b"one more"), space.backends.index
    assert index.judge(NAME, WriterId(run.record.writer), "differs", by=by, stands=False) == "disputed"
    faults = Plan(Rule("transient", ("put",), times=refused))
    put_faults(space.backends.evidence.payloads, faults)
    space.settle(run, "differs")
    space.backends.transfers.drain(60.0)
    assert faults.injected.total() == refused
    other = chain(20, 21)
    assert space.save(slots(other)).outcome == "stored"
    here.lose_the_index()
    here.rebuild()
    with here.cache() as cache:
        fsck(cache, apply=True, clock=lambda: time.time() + HALF_AN_HOUR_S)
    assert (here.served(), here.served(other)) == (0, 2)
    here.copy_to(there)
    there.follow()
    assert (there.served(), there.served(other)) == (0, 2)
    archive.seek(0)
    report = import_archive(archive, there.engines[-1], source="-", wanted=EVERYTHING)
    assert report.ended == "complete" and there.served() == 0


def test_a_writer_that_only_the_index_knows_to_have_failed_comes_back_neither(here: Region) -> None:
    save(here)
    space = here.open()
    (run,) = match(space, A).runs
    writer, index = WriterId(run.record.writer), space.backends.index
    for place in (b"one more", b"and one."):
        index.judge(NAME, writer, "differs", by=PlaceId(place), stands=False)
    with here.cache() as cache:
        returns = Returns(cache.index, cache.evidence)
        assert returns.barred(NAME, run.segment, run.record) == "failed"
    # An engine that reads the verdict denies the writer: the judge may have ended before it could.
    until(lambda: match(space, A).blocks == 0)
    space.backends.transfers.drain(60.0)
    here.lose_the_index()
    here.rebuild()
    assert here.served() == 0


def test_a_denial_leaves_a_copy_alone(here: Region) -> None:
    segment = save(here)
    name = payload_name(NAME, segment, 0)
    with here.cache() as cache:
        cache.evidence.put(NAME, segment, 0, [memoryview(b"a copy")])
        cache.evidence.deny(name)
        (kept,) = cache.evidence.copies(NAME)
        assert (kept.name, kept.nbytes) == (name, 6)


def waste_goes(cache: Cache, ahead_s: float) -> bool:
    only_list, later = Depth(only_list=True), time.time() + ahead_s
    return fsck(cache, depth=only_list, apply=True, clock=lambda: later).ended == "complete"


def test_both_payloads_are_kept_as_evidence_and_nothing_else_lists_them(here: Region) -> None:
    segment = save(here)
    stored = (here.payloads / payload_name(NAME, segment, 0)).read_bytes()
    condemn(here)
    found = {name for name in here.names() if name.startswith("evidence/")}
    parsed = [parse_payload_name(name.removeprefix("evidence/")) for name in found]
    assert len(found) == 2 and not [name for name in here.names() if parse_payload_name(name)]
    assert segment in {one[1] for one in parsed if one is not None}
    assert (here.payloads / f"evidence/{payload_name(NAME, segment, 0)}").read_bytes() == stored
    with here.cache() as cache:
        assert list(cache.payloads.list()) == []
        waste = fsck(cache, depth=Depth(only_list=True)).waste
        assert waste is not None and not waste.strays and not waste.foreign
        assert fsck(cache).found == 0


def test_a_payload_that_can_not_be_deleted_is_not_served_either(here: Region) -> None:
    segment = save(here)
    condemn(here, Plan(Rule("permission", ("delete",))))
    assert payload_name(NAME, segment, 0) in here.names()
    here.lose_the_index()
    here.rebuild()
    assert here.served() == 0
    with here.cache() as cache:
        # It can be read, and the index doesn't know it: a repair must leave it alone.
        fsck(cache, apply=True, clock=lambda: time.time() + HALF_AN_HOUR_S)
    assert here.served() == 0
    # What is left goes before its evidence does.
    with here.cache() as cache:
        assert waste_goes(cache, KEPT_S - 3600)
        condemned = cache.evidence.of(NAME).condemned
        assert segment in condemned
        assert waste_goes(cache, KEPT_S + 3600)
    assert here.names() == set()


def test_what_was_invalidated_comes_back_from_no_listing(here: Region, there: Region) -> None:
    save(here)
    here.copy_to(there)
    there.follow()
    with here.cache() as cache:
        assert evict.evict_all(cache, NAME, applied=True, now_s=time.time()).applied
    here.copy_to(there)
    there.follow()
    assert here.served() == there.served() == 0
    for region, again in ((here, here.rebuild), (there, there.follow)):
        region.lose_the_index()
        again()
        assert region.served() == 0
        # What is saved afterwards is served, and comes back.
        with region.cache() as cache:
            last_s = cache.evidence.of(NAME).invalidated_s
        until(lambda: time.time() > last_s + 1)
        save(region)
        region.lose_the_index()
        again()
        assert region.served() == 4


def test_what_is_imported_after_an_invalidation_stays_and_comes_back_like_any_other(
    here: Region, there: Region
) -> None:
    save(here)
    archive = io.BytesIO()
    with here.cache() as cache:
        export(cache, plan(cache, []), archive)

    def invalidate() -> None:
        with here.cache() as cache:
            assert evict.evict_all(cache, NAME, applied=True, now_s=time.time()).applied
            assert drop.drop(cache, NAME, apply=True, now=True).state == "erased"
        assert here.served() == 0

    invalidate()
    for _ in range(2):
        here.open()
        archive.seek(0)
        report = import_archive(archive, here.engines[-1], source="-", wanted=EVERYTHING)
        assert report.ended == "complete" and here.served() == 4
        here.follow()
        assert here.served() == 4
        here.copy_to(there)
        there.follow()
        assert there.served() == 4
        here.lose_the_index()
        here.rebuild()
        assert here.served() == 4
        # The next invalidation covers it, even within the same second.
        invalidate()
        assert {name[-3:] for name in here.names()} == {"256"}
        here.copy_to(there)
        there.follow()
        assert there.served() == 0
        there.copy_to(here)
        here.rebuild()
        assert here.served() == 0
        there.lose_the_index()


def test_what_is_imported_while_a_follower_looks_stays(here: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    save(here)
    archive = io.BytesIO()
    with here.cache() as cache:
        export(cache, plan(cache, []), archive)
        assert evict.evict_all(cache, NAME, applied=True, now_s=time.time()).applied
        assert drop.drop(cache, NAME, apply=True, now=True).state == "erased"
        last_s = cache.evidence.of(NAME).invalidated_s
    until(lambda: time.time() > last_s + 1)
    here.open().save(slots(chain(7, 8)))
    with here.cache() as cache:
        index = cache.made_index()
        segments = index.segments

        def imported_meanwhile(name: NamespaceId) -> Iterator[Listing]:
            yield from segments(name)
            archive.seek(0)
            import_archive(archive, here.engines[-1], source="-", wanted=EVERYTHING)
            yield from segments(name)

        monkeypatch.setattr(index, "segments", imported_meanwhile)
        PayloadFollower(cache).turn()
    assert here.served() == 4


def test_what_was_erased_is_not_brought_back_after_the_index_was_lost(here: Region, there: Region) -> None:
    save(here, ALICE)
    here.copy_to(there)
    with here.cache() as cache:
        assert erase(cache, Target(salt=ALICE), apply=True).state == "erased"
    # From a backup.
    there.copy_to(here)
    for lost in (False, True):
        if lost:
            here.lose_the_index()
        here.rebuild()
        here.follow()
        assert here.served() == 0


def test_of_two_erasures_at_the_same_time_neither_is_forgotten(
    here: Region, there: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(here, ALICE)
    others = chain(*range(10, 14))
    here.open().save(slots(others), salt=BOB)
    here.copy_to(there)
    with here.cache() as cache:
        put = cache.evidence.payloads.put

        def late(name: str, buffers: Sequence[memoryview]) -> None:
            """The other one begins and ends between what this one has read and what it puts."""
            monkeypatch.undo()
            with here.cache() as other:
                assert erase(other, Target(salt=BOB), apply=True).state == "erased"
            put(name, buffers)

        monkeypatch.setattr(cache.evidence.payloads, "put", late)
        assert erase(cache, Target(salt=ALICE), apply=True).state == "erased"
    # From a backup.
    there.copy_to(here)
    here.lose_the_index()
    here.rebuild()
    assert here.served() == here.served(others) == 0


def test_of_two_invalidations_at_the_same_time_neither_lets_in_what_was_imported_between_them(
    here: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(here)
    archive = io.BytesIO()
    with here.cache() as cache:
        export(cache, plan(cache, []), archive)
        put = cache.evidence.payloads.put

        def late(name: str, buffers: Sequence[memoryview]) -> None:
            """The other one, and an import, come between what this one has read and what it puts."""
            monkeypatch.undo()
            with here.cache() as other:
                assert drop.drop(other, NAME, apply=True, now=True).state == "erased"
            archive.seek(0)
            import_archive(archive, here.engines[-1], source="-", wanted=EVERYTHING)
            assert here.served() == 4
            put(name, buffers)

        monkeypatch.setattr(cache.evidence.payloads, "put", late)
        assert evict.evict_all(cache, NAME, applied=True, now_s=time.time()).applied
    here.lose_the_index()
    here.rebuild()
    assert here.served() == 0


def test_an_erasure_takes_what_is_kept_as_evidence(here: Region) -> None:
    save(here, ALICE)
    condemn(here)
    with here.cache() as cache:
        assert erase(cache, Target(salt=BOB), apply=True).state == "erased"
        assert len(cache.evidence.copies(NAME)) == 2
        assert erase(cache, Target(salt=ALICE), apply=True).state == "erased"
        assert cache.evidence.copies(NAME) and not any(one.nbytes for one in cache.evidence.copies(NAME))


def test_refusals_that_nobody_understands_let_nothing_in(here: Region) -> None:
    save(here)
    with here.cache() as cache:
        cache.evidence.refuse(NAME, {ALICE: 5.0})
        cache.evidence.refuse(NAME, {ALICE: 4.0, SaltId(b""): 1.0}, 7.0)
        cache.evidence.refuse(NAME, {}, 6.0)
        cache.evidence.refuse(NAME, {ALICE: 5.0})
        barred = cache.evidence.of(NAME)
        assert (barred.erased_s, barred.invalidated_s) == ({ALICE: 5.0, SaltId(b""): 1.0}, 7.0)
        assert barred.invalidations == 2
    said = sorted(name for name in here.names() if name.endswith(".256"))
    assert len(said) == 3
    (here.payloads / said[0]).write_text('{"format": 2}')
    with here.cache() as cache, pytest.raises(CorruptPayload, match="nothing of its namespace comes back"):
        cache.evidence.of(NAME)
    here.lose_the_index()
    here.rebuild()
    assert here.served() == 0
