"""erase: what a tenant or a salt has stored goes everywhere, is proved gone, and cannot come back."""

from __future__ import annotations

import io
import itertools
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import Wanted
from kvstore.admin.backends import UnknownName
from kvstore.admin.remove.erase import Target, erase
from kvstore.admin.remove.removal import NamespaceRemoval
from kvstore.admin.remove.reports import EraseReport
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import open_store
from kvstore.cli import exits
from kvstore.cli.exits import ExitCode
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import PermissionDenied
from kvstore.format.segment import Slot
from kvstore.index.contract import is_forbidden
from kvstore.index.maintenance import CLOCKS_DIFFER_S
from kvstore.keys import NO_SALT, NamespaceId, SaltId, namespace_id, salt_id
from kvstore.payloads.port import PayloadStore
from schemas.namespace import Namespace
from tests.admin.conftest import Admin, Ran
from tests.admin.repair.damage import (
    ITEMS,
    KV,
    TWO_RANKS,
    RawBucket,
    RawRedis,
    World,
    Written,
    chain,
    content,
    kv,
)
from tests.servers.s3.bucket import S3Bucket
from tests.store.world import item
from tests.waiting import until

#: Words that must stand in no output; nothing else here contains them.
SALT, OTHER_SALT = "alice-7f3e-secret", "bob-11aa-secret"
ALICE, BOB = salt_id(SALT), salt_id(OTHER_SALT)
SEARCH = kv(tenant="search")
SEARCH_ITEMS = Namespace(kind="ec", tenant="search", model="eyes", weights="e", dtype="float32", codec="lz4")


class Erasing(World):
    """A store of two tenants and two salts: in every namespace each salt has a segment, and none has one."""

    def fill_all(self) -> None:
        for space in (KV, TWO_RANKS, ITEMS, SEARCH, SEARCH_ITEMS):
            for salt in (ALICE, BOB, NO_SALT):
                self.one(space, salt)

    def one(self, space: Namespace, salt: SaltId, what: object = "", **how: Any) -> Written:
        seed = f"{namespace_id(space)} {salt.hex()} {what}"
        keys = [item(seed)] if space.kind == "ec" else chain(seed, 3)
        return self.write(space, keys, 0, salt=salt, **how)

    def matched(self, one: Written) -> int:
        """Blocks of a segment that an engine would be given."""
        with closing(open_store(self.settings)) as store:
            return store.open(one.namespace, block_bytes=256).match(b"".join(one.digests)).blocks

    def stored(self, one: Written) -> bool:
        return any(self.objects.get(name) is not None for name in one.names)

    def kept(self, *, but: Callable[[Written], bool]) -> None:
        """Asserts that all that was written is as it was, but for what is said to be gone, all of it."""
        for one in self.written:
            gone = but(one)
            assert self.matched(one) == (0 if gone else len(one.keys)), one.namespace.model
            assert self.stored(one) is not gone
        with self.cache() as cache:
            assert fsck(cache).found == 0


def of_alice(one: Written) -> bool:
    return one.record.salt == ALICE


def of_search(one: Written) -> bool:
    return one.namespace.tenant == "search"


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("redis", marks=pytest.mark.servers),
        pytest.param("redis and s3", marks=pytest.mark.servers),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Erasing:
    world = opened(request, tmp_path, request.param)
    world.fill_all()
    return world


def opened(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Erasing:
    # A busy machine is no reason to miss.
    settings: dict[str, Any] = {"sqlite": {"busy_timeout_s": 20.0}}
    url = None if kind == "sqlite" else request.getfixturevalue("redis_url")
    if kind != "redis and s3":
        return Erasing.of(tmp_path / "cache", url, **settings)
    bucket: S3Bucket = request.getfixturevalue("s3_bucket")
    settings |= {"payloads": bucket.url, "index": url, **bucket.settings}
    return Erasing(settings, RawBucket(bucket), RawRedis(url))


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Erasing:
    world = opened(request, tmp_path, "sqlite")
    world.fill_all()
    return world


def erased(world: World, target: Target, **how: Any) -> EraseReport:
    with world.cache() as cache:
        return erase(cache, target, apply=True, **how)


OF_ALICE, OF_SEARCH = Target(salt=ALICE), Target(tenant="search")


def is_done(report: EraseReport) -> bool:
    assert (report.ended, report.problem) == ("complete", "")
    return (report.state, report.versions.state) == ("erased", "none") and not exits.of_report(report)


# A salt


def test_a_plan_changes_nothing(world: Erasing) -> None:
    with world.cache() as cache:
        plan = erase(cache, OF_ALICE)
    assert (plan.state, plan.applied, plan.salt, plan.tenant) == ("kept", False, ALICE.hex(), "")
    assert (len(plan.namespaces), plan.found.segments, plan.found.blocks) == (5, 5, 11)
    assert (plan.looks, plan.deleted_payloads, plan.versions.state) == (0, 0, "none")
    with world.cache() as cache:
        assert cache.index is not None
        assert cache.index.forbidden(namespace_id(KV)) == {}
        assert cache.index.operations(10) == []
    world.kept(but=lambda _: False)


def test_a_salt_goes_from_every_namespace(world: Erasing) -> None:
    report = erased(world, OF_ALICE)
    assert is_done(report)
    assert (report.found.segments, report.hidden_segments, report.deleted_payloads) == (5, 5, 6)
    assert report.looks == 1, "what was deleted before the look was not found by it"
    world.kept(but=of_alice)
    with world.cache() as cache:
        assert cache.index is not None
        for space in report.namespaces:
            name = NamespaceId(space.id)
            assert cache.index.forbidden(name) == {ALICE: space.forbidden_until_s}
            events = cache.index.events(name)
            assert [one.rule for one in events if one.op == "evict"] == ["erased"]
        [done] = cache.index.operations(10)
        assert (done.verb, f"salt {ALICE.hex()}" in done.what) == ("erase", True)
    again = erased(world, OF_ALICE)
    assert is_done(again) and again.found.segments == again.deleted_payloads == 0


def test_a_salt_in_one_namespace(world: Erasing) -> None:
    report = erased(world, Target(salt=ALICE, prefix=namespace_id(ITEMS)[:8]))
    assert is_done(report) and [space.id for space in report.namespaces] == [namespace_id(ITEMS)]
    world.kept(but=lambda one: of_alice(one) and one.namespace is ITEMS)


def test_a_pinned_segment_goes_too(world: Erasing) -> None:
    [one] = [one for one in world.written if of_alice(one) and one.namespace is KV]
    with world.cache() as cache:
        assert cache.index is not None
        assert cache.index.pin(one.name, [one.segment], most_bytes=1 << 20) == 1
    assert is_done(erased(world, OF_ALICE))
    world.kept(but=of_alice)


def test_what_nobody_can_match_is_found_by_its_header(world: Erasing) -> None:
    """Strays of saves that died a moment ago, what was evicted before, what was invalidated before."""
    strays = [world.one(space, salt, "died", listed=False) for space in (KV, ITEMS) for salt in (ALICE, BOB)]
    evicted = [world.one(TWO_RANKS, salt, "evicted") for salt in (ALICE, BOB)]
    bygone = [world.one(SEARCH, salt, "invalidated") for salt in (ALICE, BOB)]
    with world.cache() as cache:
        assert cache.index is not None
        for one in evicted:
            cache.index.evict(one.name, [one.segment], delete_after_s=time.time() + 1e6, rule="bad")
        assert cache.index.invalidate(bygone[0].name)
    report = erased(world, OF_ALICE)
    assert is_done(report)
    assert report.looks == 2, "the first look found some, and the second one none"
    for one in world.written:
        assert world.stored(one) is not of_alice(one)
    # Those of others have their grace time, and strays that are young may be about to be committed.
    with world.cache() as cache:
        assert cache.index is not None
        for one in (evicted[1], bygone[1]):
            assert cache.index.states(one.name, [one.segment]) == ["trash"]
    assert world.matched(strays[1]) == 0


def test_a_commit_that_waits_for_other_ranks(world: Erasing) -> None:
    waits = [world.one(TWO_RANKS, salt, "waits", listed=1) for salt in (ALICE, BOB)]
    assert is_done(erased(world, OF_ALICE))
    assert [world.stored(one) for one in waits] == [False, True]


def test_a_header_that_cannot_be_read_is_no_proof(world: Erasing) -> None:
    stray = world.one(KV, BOB, "died", listed=False)
    world.objects.put(stray.names[0], bytes(200))
    report = erased(world, OF_ALICE)
    [space] = [space for space in report.namespaces if space.id == stray.name]
    assert (space.state, space.unreadable, report.state) == ("remains", 1, "remains")
    assert exits.of_report(report) is ExitCode.PARTIAL
    assert world.stored(stray)
    assert report.hidden_segments == 5


# A tenant


def test_a_tenant_goes(world: Erasing) -> None:
    stray = world.one(SEARCH, BOB, "died", listed=False)
    waits = world.one(kv(tenant="search", model="other"), NO_SALT, "of an index that is lost", listed=False)
    report = erased(world, OF_SEARCH)
    assert is_done(report)
    assert {space.id for space in report.namespaces} == {
        namespace_id(SEARCH), namespace_id(SEARCH_ITEMS), waits.name
    }  # fmt: skip
    assert (report.tenant, report.salt, report.found.segments) == ("search", "", 6)
    assert (report.hidden_segments, report.deleted_payloads) == (6, 8)
    assert not world.stored(stray) and not world.stored(waits)
    world.kept(but=of_search)
    with world.cache() as cache:
        assert cache.index is not None
        assert {account.tenant for account in cache.accounts()} == {"default"}
        for name in (stray.name, waits.name):
            assert set(cache.index.forbidden(name)) == {NO_SALT}
            assert cache.index.events(name) == []
        with pytest.raises(UnknownName, match="nothing is known of a tenant 'search'"):
            erase(cache, OF_SEARCH)


def test_a_tenant_that_was_invalidated_and_evicted_before(world: Erasing) -> None:
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.invalidate(namespace_id(SEARCH))
        one = next(one for one in world.written if one.namespace is SEARCH_ITEMS)
        cache.index.evict(one.name, [one.segment], delete_after_s=time.time() + 1e6, rule="bad")
    assert is_done(erased(world, OF_SEARCH))
    world.kept(but=of_search)


def a_minute_later() -> int:
    """Now, when a minute is over; with `short_minutes` that is a moment."""
    end = time.time() + 3
    until(lambda: time.time() > end)
    return int(time.time())


@pytest.fixture
def short_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.index.scripted.salts.CLOCKS_DIFFER_S", 1)


def test_engines_that_go_on_are_refused_for_a_minute(world: Erasing) -> None:
    erased(world, OF_ALICE)
    for ahead_s in (0, CLOCKS_DIFFER_S + 30, 86400 * 30):
        one = world.one(SEARCH, ALICE, ahead_s, created_s=int(time.time()) + ahead_s)
        assert world.matched(one) == 0
    assert is_done(erased(world, OF_ALICE))


@pytest.mark.usefixtures("short_minutes")
def test_engines_that_go_on_save_anew_a_minute_later(world: Erasing) -> None:
    def later(salt: SaltId) -> Written:
        return world.one(SEARCH, salt, "later", created_s=a_minute_later())

    erased(world, OF_ALICE)
    assert world.matched(world.one(SEARCH, BOB, "now", created_s=int(time.time()))) == 3
    anew = later(ALICE)
    assert world.matched(anew) == 3
    # What was put and refused is found by its header, and what is new is not touched.
    assert is_done(erased(world, Target(tenant="default")))
    assert world.matched(anew) == 3
    report = erased(world, OF_SEARCH)
    assert world.matched(anew) == 0 and is_done(report), "erased once more: all that there is now"


@pytest.mark.usefixtures("short_minutes")
def test_what_an_engine_saves_meanwhile_stays(world: Erasing) -> None:
    saved: list[Written] = []

    def save() -> None:
        if not saved:
            saved.append(world.one(SEARCH, BOB, "meanwhile", created_s=a_minute_later()))

    with world.cache() as cache:
        cache.__dict__["payloads"] = Hooked(cache.payloads, delete=save)
        report = erase(cache, OF_SEARCH, apply=True)
    assert exits.of_report(report) is ExitCode.PARTIAL
    assert report.state == "in_use"
    # A file's time tells it from what was there before, and its clock is not ahead.
    assert world.matched(saved[0]) == 3


# Saves under way


class Hooked(FaultyPayloads):
    """Does something before or after a verb."""

    def __init__(self, inner: PayloadStore, **hooks: Callable[[], None]) -> None:
        super().__init__(inner, Plan())
        self._hooks = hooks
        #: What was put.
        self.names: list[str] = []

    def put(self, name: str, buffers: Any) -> None:
        self.names.append(name)
        self._hooks.get("before_put", lambda: None)()
        super().put(name, buffers)
        self._hooks.get("put", lambda: None)()

    def delete(self, names: Any) -> int:
        done = super().delete(names)
        self._hooks.get("delete", lambda: None)()
        return done


@pytest.mark.parametrize("target", [OF_ALICE, OF_SEARCH], ids=str)
@pytest.mark.parametrize("verb", ["before_put", "put"])
def test_a_save_under_way_is_refused_and_takes_its_payload_back(
    world: Erasing, target: Target, verb: str
) -> None:
    """The whole erasure comes before its payload is there, or between that and its commit."""
    keys = chain("under way", 2)
    reports: list[EraseReport] = []

    def meanwhile() -> None:
        reports.append(erased(world, target))

    with world.cache() as cache:
        cache.__dict__["payloads"] = Hooked(cache.payloads, **{verb: meanwhile})
        with closing(cache.saving()) as store:
            space = store.open(SEARCH, block_bytes=256)
            slots = [Slot(key, memoryview(content(SEARCH, key, 0)), "BF16", (2, 2, 8, 4)) for key in keys]
            saved = space.save(slots, salt=ALICE)
    assert saved.outcome == "refused"
    assert len(reports) == 1 and is_done(reports[0])
    world.kept(but=of_alice if target is OF_ALICE else of_search)
    names = {name for one in world.written for name in one.names}
    with world.cache() as cache:
        assert {listed.name for listed in cache.payloads.list()} <= names
    assert is_done(erased(world, OF_ALICE))


# Cut off


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Dying:
    """Passes on so many calls, and dies before, or behind, the next one."""

    def __init__(self, inner: Any, count: Iterator[int], at: int, *, behind: bool) -> None:
        self._inner, self._count, self._at, self._behind = inner, count, at, behind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name == "close":
            return found

        def call(*args: Any, **named: Any) -> Any:
            dies = next(self._count) == self._at
            if dies and not self._behind:
                raise Killed
            done = found(*args, **named)
            if dies:
                raise Killed
            return done

        return call


@pytest.mark.slow
@pytest.mark.parametrize("target", [OF_ALICE, OF_SEARCH], ids=str)
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def test_killed_at_any_call_and_run_again(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, target: Target, behind: bool
) -> None:
    at = 0
    while True:
        world = opened(request, tmp_path / str(at), kind)
        if isinstance(world.raw, RawRedis):
            world.raw.client.flushall()
        for space in (KV, SEARCH):
            for salt in (ALICE, BOB):
                world.one(space, salt)
        world.one(SEARCH, ALICE, "died", listed=False)
        count, died = itertools.count(), False
        with world.cache() as cache:
            for part in ("index", "payloads"):
                cache.__dict__[part] = Dying(getattr(cache, part), count, at, behind=behind)
            try:
                erase(cache, target, apply=True)
            except Killed:
                died = True
        if not died:
            break
        try:
            report = erased(world, target)
        except UnknownName:
            assert target is OF_SEARCH, "it had come to its end"
        else:
            assert is_done(report)
        for one in world.written:
            gone = (of_alice if target is OF_ALICE else of_search)(one)
            assert world.stored(one) is not gone, at
            assert (world.matched(one) > 0) is not gone, at
        at += 1
    assert at > 15, "it goes through every call that an erasure makes"


def test_nothing_is_deleted_in_one_namespace_before_all_are_forbidden_and_hidden(local: Erasing) -> None:
    """A store that can't delete: what is to go is out of sight all the same, and a later run deletes it."""
    with local.cache() as cache:
        inner = cache.payloads
        cache.__dict__["payloads"] = FaultyPayloads(inner, Plan(Rule("permission", verbs=("delete",))))
        for target in (OF_ALICE, OF_SEARCH):
            report = erase(cache, target, apply=True)
            assert report.ended == "failed" and "delete refused" in report.problem
            assert exits.of_report(report) is ExitCode.UNREACHABLE
    assert [local.matched(one) > 0 for one in local.written] == [
        not (of_alice(one) or of_search(one)) for one in local.written
    ]
    assert all(local.stored(one) for one in local.written)
    for target in (OF_ALICE, OF_SEARCH):
        assert is_done(erased(local, target))
    local.kept(but=lambda one: of_alice(one) or of_search(one))


def test_what_cannot_be_recorded_is_not_done(local: Erasing, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionDenied("no right to write")

    with local.cache() as cache:
        monkeypatch.setattr(type(cache.index), "record_operation", refuse)
        report = erase(cache, OF_ALICE, apply=True)
    assert (report.ended, report.problem, report.hidden_segments) == ("failed", "no right to write", 0)
    local.kept(but=lambda _: False)


def test_waiting_until_nothing_is_left(local: Erasing) -> None:
    """A payload that nobody can read, until somebody deletes it."""
    stray = local.one(KV, BOB, "died", listed=False)
    local.objects.put(stray.names[0], bytes(200))
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            local.objects.delete(stray.names[0])

    report = erased(local, OF_ALICE, wait_s=600.0, sleep=sleep)
    assert is_done(report) and len(naps) == 3 and report.looks > 3
    naps.clear()
    local.objects.put(stray.names[0], bytes(200))
    assert erased(local, OF_ALICE, sleep=sleep).state == "remains"
    assert naps == [], "it was not told to wait"


# What comes back


def archive_of(world: World) -> bytes:
    from kvstore.admin.archive.export import export
    from kvstore.admin.curate.plan import plan

    made = io.BytesIO()
    with world.cache() as cache:
        assert export(cache, plan(cache, []), made).left_out == 0
    return made.getvalue()


@pytest.mark.parametrize("target", [OF_ALICE, OF_SEARCH], ids=str)
def test_an_archive_of_before_is_refused_and_counted(world: Erasing, target: Target) -> None:
    archive = archive_of(world)
    assert is_done(erased(world, target))
    gone = of_alice if target is OF_ALICE else of_search
    with world.cache() as cache:
        cache.__dict__["payloads"] = puts = Hooked(cache.payloads)
        with closing(cache.saving()) as store:
            wanted = Wanted((), frozenset(), new=True)
            report = import_archive(io.BytesIO(archive), store, source="-", wanted=wanted)
    assert puts.names == [], "not even for a moment"
    refused = sum(map(gone, world.written))
    assert (report.ended, report.erased, report.left_out) == ("complete", refused, refused)
    assert report.present.segments == len(world.written) - refused
    assert report.imported.segments == 0
    assert all("was erased here" in left.reason for left in report.left)
    world.kept(but=gone)
    assert is_done(erased(world, OF_ALICE))


def test_a_rebuild_refuses_and_counts_what_was_erased(world: Erasing) -> None:
    assert is_done(erased(world, OF_ALICE))
    # Somebody restores a bucket from a backup.
    for one in world.written:
        for name, data in zip(one.names, one.payloads, strict=True):
            world.objects.put(name, data)
    with world.cache() as cache:
        for apply in (False, True):
            report = rebuild(cache, apply=apply)
            assert sum(space.erased for space in report.namespaces) == 5
            assert sum(space.refused for space in report.namespaces) == 5
            assert sum(space.listed.segments for space in report.namespaces) == 0
            assert all("was erased" in left.reason for left in report.left)
    assert all((world.matched(one) > 0) is not of_alice(one) for one in world.written)
    report2 = erased(world, OF_ALICE)
    assert is_done(report2) and report2.deleted_payloads == 6
    world.kept(but=of_alice)


# Former versions


@pytest.fixture(params=["Enabled", "Suspended"])
def versioned(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Erasing, S3Bucket]:
    """A bucket of a real S3 server that keeps versions."""
    world = opened(request, tmp_path, "redis and s3")
    bucket = request.getfixturevalue("s3_bucket")

    def switch(state: str) -> None:
        bucket.client().put_bucket_versioning(Bucket=bucket.bucket, VersioningConfiguration={"Status": state})

    switch("Enabled")
    world.fill_all()
    switch(request.param)
    return world, bucket


def versions_under(bucket: S3Bucket, prefix: str = "") -> list[str]:
    answer = bucket.client().list_object_versions(Bucket=bucket.bucket, Prefix=bucket.name(prefix))
    assert not answer["IsTruncated"]
    skip = len(bucket.prefix) + 1
    found = [one["Key"][skip:] for one in (*answer.get("Versions", ()), *answer.get("DeleteMarkers", ()))]
    # What was erased is written down beside the payloads, and stays.
    return [name for name in found if not name.startswith("evidence/")]


@pytest.mark.servers
@pytest.mark.parametrize("target", [OF_ALICE, OF_SEARCH], ids=str)
def test_former_versions_are_left_to_a_rule(versioned: tuple[Erasing, S3Bucket], target: Target) -> None:
    world, bucket = versioned
    gone = of_alice if target is OF_ALICE else of_search
    names = {name for one in world.written if gone(one) for name in one.names}
    report = erased(world, target)
    assert (report.ended, report.looks) == ("complete", 1)
    assert (report.state, report.versions.state) == ("former_versions", "kept")
    assert exits.of_report(report) is ExitCode.PARTIAL
    assert names <= set(versions_under(bucket))
    world.kept(but=gone)
    rule = json.loads(report.versions.rule)
    assert rule["Filter"] == {"Prefix": f"{bucket.prefix}/"}
    # A real server takes the rule as it stands.
    bucket.client().put_bucket_lifecycle_configuration(
        Bucket=bucket.bucket, LifecycleConfiguration={"Rules": [rule]}
    )
    (taken,) = bucket.client().get_bucket_lifecycle_configuration(Bucket=bucket.bucket)["Rules"]
    assert taken["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}
    assert taken["Expiration"] == {"ExpiredObjectDeleteMarker": True}


@pytest.mark.servers
def test_versions_that_may_not_be_asked_about(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.payloads.s3.control import S3Control

    world = opened(request, tmp_path, "redis and s3")
    world.fill_all()
    real = S3Control.ask

    def ask(self: S3Control, about: str, operation: str, **arguments: Any) -> Any:
        if operation == "get_bucket_versioning":
            raise PermissionDenied(f"{about}: AccessDenied")
        return real(self, about, operation, **arguments)

    monkeypatch.setattr(S3Control, "ask", ask)
    report = erased(world, OF_ALICE)
    assert (report.ended, report.state, report.versions.state) == ("complete", "former_versions", "unknown")
    assert "AccessDenied" in report.versions.problem and report.versions.rule
    assert exits.of_report(report) is ExitCode.PARTIAL
    world.kept(but=of_alice)
    monkeypatch.undo()
    assert is_done(erased(world, OF_ALICE))


def test_only_a_bucket_that_was_asked_gets_a_rule(
    world: Erasing, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(world.settings))
    told = ["erase", "--tenant", "search", "--apply", "--settings", str(settings)]
    in_bucket = world.settings["payloads"].startswith("s3://")

    def denied(_: NamespaceRemoval) -> None:
        raise PermissionDenied("no right")

    with monkeypatch.context() as patch:
        patch.setattr(NamespaceRemoval, "hide", denied)
        ran = admin(*told)
    assert "no right" in ran.out and "lifecycle" not in ran.out
    assert ("the bucket was not asked" in ran.out) is in_bucket
    ran = admin(*told)
    assert (ran.code, "lifecycle" in ran.out) == (0, False)
    assert ("the bucket keeps no former versions" in ran.out) is in_bucket


# The command


@pytest.fixture
def salt_file(tmp_path: Path) -> Path:
    path = tmp_path / "salt"
    path.write_text(f"{SALT}\n")
    return path


def test_the_command(local: Erasing, admin: Admin, salt_file: Path) -> None:
    told = ["erase", "--salt-file", str(salt_file), *local.options]
    ran = admin(*told)
    assert ran.code == 0, ran.err
    assert f"salt {ALICE.hex()} (its id)" in ran.out and "5 segments, 11 blocks" in ran.out
    assert "nothing was changed; --apply does it" in ran.err
    local.kept(but=lambda _: False)
    ran = admin(*told, "--apply")
    assert ran.code == 0, ran.err
    assert "erased: the last look found nothing of it" in ran.out
    assert "reset_prefix_cache" in ran.out and "archives" in ran.out
    ran = admin("erase", "--tenant", "search", "--apply", "--json", *local.options)
    assert EraseReport.model_validate_json(ran.out).state == "erased" and ran.code == 0
    local.kept(but=lambda one: of_alice(one) or of_search(one))
    ran = admin("erase", "--tenant", "search", "--apply", *local.options)
    assert ran.code == 1 and "nothing is known of a tenant 'search'" in ran.err


@pytest.mark.parametrize(
    ("text", "salt"),
    [
        (b"alice\n", "alice"),
        (b"alice", "alice"),
        (b"alice\n\n", "alice\n"),
        (b" alice\r\n", " alice\r"),
        ("\N{SNOWMAN}".encode(), "\N{SNOWMAN}"),
        ("\ud800".encode("utf-8", "surrogatepass"), "\ud800"),
    ],
)
def test_a_salt_is_what_is_in_the_file(
    local: Erasing, admin: Admin, tmp_path: Path, text: bytes, salt: str
) -> None:
    path = tmp_path / "salt"
    path.write_bytes(text)
    ran = admin("erase", "--salt-file", str(path), "--json", *local.options)
    assert ran.json["salt"] == salt_id(salt).hex()


@pytest.mark.slow
def test_a_salt_from_stdin_is_in_no_argument(local: Erasing) -> None:
    command = [sys.executable, "-m", "kvstore.cli", "erase", "--salt-file", "-", "--json", *local.options]
    ran = subprocess.run(command, input=f"{SALT}\n".encode(), capture_output=True, check=True)
    assert EraseReport.model_validate_json(ran.stdout).salt == ALICE.hex()
    assert not any(SALT in word for word in command) and SALT.encode() not in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "say what is to go"),
        (["--tenant", "search", "--salt-file", "-"], "say what is to go"),
        (["--tenant", ""], "empty name"),
        (["ab", "--tenant", "search"], "goes with --salt-file"),
        (["--tenant", "search", "--wait", "1m"], "goes with --apply"),
        (["--salt-file", "/nowhere/salt"], "can't be read"),
        (["--salt-file", "EMPTY"], "holds no salt"),
        (["--salt-file", "LATIN"], "is not in UTF-8"),
    ],
)
def test_wrong_usage(local: Erasing, admin: Admin, tmp_path: Path, words: list[str], wrong: str) -> None:
    (tmp_path / "EMPTY").write_bytes(b"\n")
    (tmp_path / "LATIN").write_bytes(b"\xe9")
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    ran = admin("erase", *words, *local.options)
    assert ran.code == 2 and wrong in " ".join(ran.err.replace("│", " ").split()), ran.err
    local.kept(but=lambda _: False)


def test_the_salt_is_shown_nowhere(
    world: Erasing,
    admin: Admin,
    tmp_path: Path,
    salt_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = tmp_path / "settings.yaml"
    import yaml

    settings.write_text(yaml.safe_dump(world.settings))
    runs: list[Ran] = []
    told = ["erase", "--salt-file", str(salt_file), "--settings", str(settings)]
    for more in ([], ["--json"], ["--apply", "--json"], ["--apply"]):
        runs.append(admin(*told, *more))
        assert runs[-1].code == 0, runs[-1].err
    runs.append(admin("--debug", "erase", "--salt-file", str(salt_file), "--index", "nonsense://"))
    assert runs[-1].code == 2
    for verb in (["events", "--operators"], ["events", namespace_id(KV)], ["status"], ["namespaces"]):
        runs.append(admin(*verb, "--json", "--settings", str(settings)))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != salt_file]
    seen = [*(run.out + run.err for run in runs), caplog.text, " ".join(sys.argv)]
    assert any(ALICE.hex() in text for text in seen)
    assert not [text for text in seen if SALT in text or OTHER_SALT in text]
    assert not [data for data in files if SALT.encode() in data]
    if "index" in world.settings:
        client = RawRedis(world.settings["index"]).client
        for key in client.scan_iter("*"):
            assert SALT.encode() not in (client.dump(key) or b"")


def test_what_is_forbidden_is_a_matter_of_when_and_of_whom() -> None:
    assert not is_forbidden({}, NO_SALT, 0) and not is_forbidden({BOB: 9.0}, ALICE, 0)
    both = {NO_SALT: 5.0, ALICE: 9.0}
    assert [is_forbidden(both, ALICE, when) for when in (0, 9, 10)] == [True, True, False]
    assert [is_forbidden(both, NO_SALT, when) for when in (5, 6)] == [True, False]
