"""fsck: what it finds and what it must never do. Damage at random is in test_damage."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache, Refused
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.reports import FsckReport
from kvstore.build import open_store
from kvstore.cli import exits
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import TransientError
from kvstore.format.segment import Slot
from kvstore.index.maintenance import Listing
from kvstore.keys import NamespaceId, SegmentId, digest, namespace_id
from schemas.records import NO_WRITER
from tests.admin.conftest import Admin
from tests.admin.repair.damage import (
    KV,
    TWO_RANKS,
    RawFolder,
    RawRedis,
    World,
    Written,
    chain,
    content,
)

NOW_S = 1_800_000_000.0


@pytest.fixture
def world(empty_world: World) -> World:
    """Three segments of one chain, one of two ranks."""
    keys = chain("a", 12)
    for depth in (0, 4, 8):
        empty_world.write(KV, keys[depth : depth + 4], depth)
    empty_world.write(TWO_RANKS, chain("b", 3), 0)
    return empty_world


def run(world: World, *, prepare: Callable[[Cache], None] | None = None, **given: Any) -> FsckReport:
    with world.cache() as cache:
        if prepare is not None:
            prepare(cache)
        return fsck(cache, clock=lambda: NOW_S, **given)


def kinds(report: FsckReport) -> list[str]:
    return sorted(fault.kind for fault in report.faults)


def flip(world: World, one: Written, at: int, rank: int = 0) -> None:
    data = one.payloads[rank]
    world.objects.put(one.names[rank], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def known(world: World) -> dict[str, Any]:
    """All that the index says."""
    with world.cache() as cache:
        index = cache.index
        assert index is not None
        return {
            name: (
                index.usage(name),
                sorted(index.segments(name), key=lambda one: one.segment),
                sorted((e.digest, e.segment, e.slot) for e in index.entries(name)),
            )
            for name in index.namespaces()
        }


def test_a_clean_cache(admin: Admin, world: World) -> None:
    before = known(world)
    ran = admin("fsck", "--read-data", "100%", "--json", *world.options)
    assert ran.code == 0, ran.err
    report = FsckReport.model_validate_json(ran.out)
    assert (report.found, report.remaining, report.ended) == (0, None, "complete")
    spaces = {space.id: space for space in report.namespaces}
    one = spaces[namespace_id(KV)]
    assert (one.checked.segments, one.verified.segments, one.entries, one.dangling) == (3, 3, 12, 0)
    assert one.checked.stored_bytes == sum(len(w.payloads[0]) for w in world.written[:3])
    assert spaces[namespace_id(TWO_RANKS)].verified.blocks == 3
    assert known(world) == before
    assert "clean" in admin("fsck", *world.options).out


def test_without_repair_nothing_changes(admin: Admin, world: World) -> None:
    flip(world, world.written[0], 300)
    world.objects.delete(world.written[3].names[1])
    world.raw.remove_entry(world.written[1].name, world.written[1].digests[0])
    world.raw.miscount(world.written[1].name, 7)
    before, files = known(world), {name: world.objects.get(name) for w in world.written for name in w.names}
    ran = admin("fsck", "--json", *world.options)
    assert ran.code == 3
    report = FsckReport.model_validate_json(ran.out)
    assert kinds(report) == ["accounts", "damaged", "hidden", "missing"]
    assert {fault.mended for fault in report.faults} == {"none"}
    assert known(world) == before
    assert files == {name: world.objects.get(name) for w in world.written for name in w.names}


def test_a_repair_ends_clean(admin: Admin, world: World) -> None:
    flip(world, world.written[0], 300)
    world.raw.set_entry(world.written[1].name, world.written[1].digests[0], world.written[2].segment, 1)
    ran = admin("fsck", "--apply", *world.options)
    assert ran.code == 0, ran.out + ran.err
    assert "mended, and clean after that" in ran.out
    assert admin("fsck", *world.options).code == 0


def test_data_is_read_only_if_asked_for(world: World) -> None:
    flip(world, world.written[2], len(world.written[2].payloads[0]) - 1)
    assert run(world).found == 0
    report = run(world, depth=Depth(percent=100.0))
    assert kinds(report) == ["damaged"]
    assert report.faults[0].segment == world.written[2].segment.hex()


def test_a_percentage_is_drawn(tmp_path: Path) -> None:
    world = many(tmp_path, 60)
    verified = [
        run(world, depth=Depth(percent=30.0), seed=seed).namespaces[0].verified.segments for seed in range(5)
    ]
    assert 5 * 60 * 0.15 < sum(verified) < 5 * 60 * 0.45
    assert len(set(verified)) > 1


def many(tmp_path: Path, count: int) -> World:
    """So many segments of one block."""
    folder = tmp_path / "cache"
    world = World.of(folder)
    keys = chain("many", count)
    for depth, key in enumerate(keys):
        world.write(KV, [key], depth)
    return world


@pytest.mark.slow
@pytest.mark.parametrize(("count", "lost"), [(300, 151), (20, 20)])
def test_the_wrong_store_is_no_damage(admin: Admin, tmp_path: Path, count: int, lost: int) -> None:
    world = many(tmp_path, count)
    for one in world.written[:lost]:
        world.objects.delete(one.names[0])
    before = known(world)
    ran = admin("fsck", *world.options)
    assert ran.code == 3 and "likelier" in ran.err
    ran = admin("fsck", "--apply", *world.options)
    assert ran.code == 1, ran.out
    assert f"{lost} of {count} segments" in ran.err and "--force" in ran.err
    assert known(world) == before
    ran = admin("fsck", "--apply", "--force", *world.options)
    assert ran.code == 0, ran.err
    assert known(world)[namespace_id(KV)][0].segments == count - lost


@pytest.mark.slow
def test_damage_of_that_share_is_no_damage_either(tmp_path: Path) -> None:
    world = many(tmp_path, 300)
    for one in world.written[:160]:
        world.objects.put(one.names[0], b"\0" * len(one.payloads[0]))
    with pytest.raises(Refused, match="160 of 300"):
        run(world, apply=True)
    assert run(world, apply=True, force=True).remaining == 0


def faulty(plan: Plan) -> Callable[[Cache], None]:
    def prepare(cache: Cache) -> None:
        cache.__dict__["payloads"] = FaultyPayloads(cache.payloads, plan)

    return prepare


def test_a_store_that_does_not_answer_costs_nothing(world: World) -> None:
    before = known(world)
    for verb in ("read", "list"):
        plan = Plan(Rule("transient", verbs=(verb,), skip=0))
        report = run(world, prepare=faulty(plan), apply=True, depth=Depth(jobs=1))
        # Of four segments that can't be read each might be one that is sick by itself.
        assert report.ended == ("failed" if verb == "list" else "complete")
        assert known(world) == before
    tmp_world = many(Path(world.settings["payloads"].removeprefix("file://")).parent / "many", 30)
    before = known(tmp_world)
    report = run(tmp_world, prepare=faulty(Plan(Rule("transient", verbs=("read",), skip=7))), apply=True)
    assert report.ended == "failed"
    assert exits.of_report(report) == exits.ExitCode.UNREACHABLE
    assert known(tmp_world) == before


def test_one_payload_that_cannot_be_read_is_left_alone(world: World) -> None:
    sick = world.written[1]
    before = known(world)
    for fault in ("transient", "permission"):
        plan = Plan(Rule(fault, verbs=("read",), name=sick.segment.hex()))  # type: ignore[arg-type]
        report = run(world, prepare=faulty(plan), apply=True)
        assert kinds(report) == ["unreadable"]
        assert report.remaining == 1 and report.ended == "complete"
        assert exits.of_report(report) == exits.ExitCode.PROBLEMS
    assert known(world) == before


def test_a_read_that_goes_wrong_once_is_no_damage(world: World) -> None:
    for fault in ("flip", "truncate", "missing"):
        plan = Plan(Rule(fault, verbs=("read",), times=1, at=40))  # type: ignore[arg-type]
        report = run(world, prepare=faulty(plan), apply=True, depth=Depth(jobs=1, percent=100.0))
        assert report.found == 0, fault
        assert sum(plan.injected.values()) == 1


def test_part_of_it_done(world: World) -> None:
    sick = world.written[1]
    flip(world, world.written[0], 300)
    plan = Plan(Rule("permission", verbs=("read",), name=sick.segment.hex()))
    report = run(world, prepare=faulty(plan), apply=True)
    assert kinds(report) == ["damaged", "unreadable"]
    assert report.remaining == 1
    assert exits.of_report(report) == exits.ExitCode.PARTIAL


def test_a_record_that_is_written_anew_keeps_its_use_and_its_pin(world: World) -> None:
    one, used_s = world.written[1], 1_789_000_000.0
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.touch(one.name, [one.segment], used_s)
        cache.index.pin(one.name, [one.segment], most_bytes=1 << 30)
    world.raw.spoil_record(one.name, one.segment, random.Random(3))
    report = run(world, apply=True)
    assert report.remaining == 0 and "record" in kinds(report)
    with world.cache() as cache:
        assert cache.index is not None
        listing = cache.index.get(one.name, [one.segment])[0]
    assert listing is not None
    assert listing.record == one.record
    assert listing.pinned
    assert listing.last_use_s == used_s // 15 * 15


def test_a_record_without_a_writer_gets_that_of_its_headers(world: World) -> None:
    """As one of an index that was brought up to date: nothing of it is loaded until then."""
    one = world.written[1]
    packed, ranks = b"".join(map(digest, one.keys)), len(one.record.parts)
    with world.cache() as cache:
        assert cache.index is not None
        cache.index.unlist(one.name, [one.segment])
        for rank, part in enumerate(one.record.parts):
            made = replace(one.record, parts=(part,), writer=NO_WRITER)
            cache.index.commit(one.name, one.segment, packed, made, rank=rank, ranks=ranks)
    report = run(world, apply=True)
    assert report.remaining == 0 and kinds(report) == ["record"]
    with world.cache() as cache:
        assert cache.index is not None
        listing = cache.index.get(one.name, [one.segment])[0]
    assert listing is not None and listing.record == one.record


def test_what_a_repair_could_not_finish_is_found_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.written[1]
    world.raw.spoil_record(one.name, one.segment, random.Random(3))

    def prepare(cache: Cache) -> None:
        def dies(*args: Any, **given: Any) -> None:
            raise TransientError("the index is gone")

        monkeypatch.setattr(cache.index, "commit", dies)

    report = run(world, prepare=prepare, apply=True)
    assert report.ended == "failed"
    with world.cache() as cache:
        assert cache.index is not None
        assert cache.index.get(one.name, [one.segment]) == [None]
    assert run(world, apply=True, depth=Depth(settled_s=0.0)).remaining == 0
    with world.cache() as cache:
        assert cache.index is not None
        assert cache.index.get(one.name, [one.segment])[0] is not None


def test_what_was_written_a_moment_ago_may_be_about_to_be_committed(world: World) -> None:
    done = world.write(KV, chain("new", 2), 0, listed=False)
    written_s = (Path(world.settings["payloads"].removeprefix("file://")) / done.names[0]).stat().st_mtime
    with world.cache() as cache:
        assert fsck(cache, apply=True, clock=lambda: written_s + 300).found == 0
        assert kinds(fsck(cache, clock=lambda: written_s + 900)) == ["unlisted"]


def test_what_is_on_its_way_is_not_missing(tmp_path: Path, redis_url: str) -> None:
    settings: dict[str, Any] = {
        "payloads": {
            "fast": f"file://{tmp_path / 'fast'}", "slow": f"file://{tmp_path / 'slow'}",
            "fast_capacity": "1GiB", "write": "back",
        },
        "index": redis_url,
    }  # fmt: skip
    world = World(settings, RawFolder(tmp_path / "slow"), RawRedis(redis_url))
    now = int(time.time())
    one = world.write(KV, chain("a", 3), 0, created_s=now)
    world.objects.delete(one.names[0])
    with world.cache() as cache:
        # The tool's clock has no part in it.
        for off_s in (0.0, 3600.0, -3600.0):
            assert fsck(cache, apply=True, clock=lambda off_s=off_s: now + off_s).found == 0
        old = world.write(KV, chain("b", 3), 0, created_s=now - 3600)
        world.objects.delete(old.names[0])
        assert kinds(fsck(cache)) == ["missing"]


def test_ctrl_c(world: World) -> None:
    class Impatient:
        def begin(self, what: str, total_bytes: int | None = None) -> None:
            if what.startswith("compare"):
                raise KeyboardInterrupt

        def advance(self, nbytes: int) -> None: ...

    report = run(world, progress=Impatient())
    assert report.ended == "cancelled"
    assert exits.of_report(report) == exits.ExitCode.CANCELLED


class Before:
    """Does something when a stage begins."""

    def __init__(self, stage: str, work: Callable[[], None]) -> None:
        self._stage, self._work = stage, work

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        if what.startswith(self._stage):
            self._stage = "none"
            self._work()

    def advance(self, nbytes: int) -> None: ...


def test_a_fault_is_looked_at_again_before_it_is_mended(world: World) -> None:
    """What was damaged can't be read any more, is well, or is gone: nothing is evicted for what it was."""
    one = world.written[0]

    def check(work: Callable[[], None], mended: str, **given: Any) -> None:
        world.objects.put(one.names[0], one.payloads[0][:-1])
        report = run(world, apply=True, progress=Before("repair", work), **given)
        assert [(fault.kind, fault.mended) for fault in report.faults][:1] == [("damaged", mended)]

    before, plan = known(world), Plan()
    check(
        lambda: plan.replace(Rule("permission", verbs=("read",), name=one.segment.hex())),
        "failed",
        prepare=faulty(plan),
    )
    assert known(world) == before
    check(lambda: world.objects.put(one.names[0], one.payloads[0]), "none")
    assert known(world) == before

    def evict() -> None:
        with world.cache() as cache:
            assert cache.index is not None
            cache.index.evict(one.name, [one.segment], delete_after_s=NOW_S + 60, rule="admin")

    check(evict, "none")


def test_what_is_evicted_while_it_is_looked_up_is_no_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed after the records were listed, seen to be visible, and evicted before its record is read."""
    one = world.written[0]

    def prepare(cache: Cache) -> None:
        index = cache.made_index()
        segments, get = index.segments, index.get

        def listed(name: NamespaceId) -> Iterator[Listing]:
            return (each for each in segments(name) if each.segment != one.segment)

        def evicted(name: NamespaceId, wanted: Sequence[SegmentId]) -> list[Listing | None]:
            if one.segment in wanted:
                index.evict(name, wanted, delete_after_s=NOW_S + 60, rule="admin")
            return get(name, wanted)

        monkeypatch.setattr(index, "segments", listed)
        monkeypatch.setattr(index, "get", evicted)

    assert "record" not in kinds(run(world, prepare=prepare))
    with world.cache() as cache:
        assert cache.made_index().states(one.name, [one.segment]) == ["trash"]


def test_what_could_never_be_evicted_can_be_again(world: World) -> None:
    one = world.written[0]
    world.raw.forget_order(one.name, one.segment)
    report = run(world, apply=True)
    assert report.remaining == 0
    with world.cache() as cache:
        assert cache.index is not None
        assert len(cache.index.order(one.name, 10)) == 3
    if "index" in world.settings:  # in SQLite the order can't be lost
        assert ("accounts", "corrected") in [(fault.kind, fault.mended) for fault in report.faults]


def test_only_the_namespaces_that_are_named(admin: Admin, world: World) -> None:
    flip(world, world.written[0], 300)
    assert admin("fsck", namespace_id(TWO_RANKS), *world.options).code == 0
    assert admin("fsck", namespace_id(KV), *world.options).code == 3
    ran = admin("fsck", "zz", *world.options)
    assert ran.code == 1 and "no namespace starts with 'zz'" in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ["--read-data", "lots"],
        ["--read-data", "101%"],
        ["--quick", "--read-data", "5%"],
        ["--list", "--quick"],
        ["--force"],
    ],
    ids=" ".join,
)
def test_bad_options(admin: Admin, tmp_path: Path, words: list[str]) -> None:
    assert admin("fsck", *words, "--payloads", f"file://{tmp_path}").code == 2


def test_quick_compares_sizes(world: World) -> None:
    flip(world, world.written[0], 300)
    assert run(world, depth=Depth(quick=True)).found == 0
    world.objects.put(world.written[0].names[0], world.written[0].payloads[0][:-1])
    assert kinds(run(world, depth=Depth(quick=True))) == ["damaged"]


def test_without_an_index(admin: Admin, tmp_path: Path) -> None:
    ran = admin("fsck", "--payloads", f"file://{tmp_path}")
    assert ran.code == 1 and "cache-admin rebuild" in ran.err
    assert not (tmp_path / "index.sqlite").exists()


def test_an_unreachable_index(admin: Admin, world: World) -> None:
    ran = admin("fsck", "--apply", "--payloads", world.settings["payloads"], "--index", "redis://127.0.0.1:1")
    assert ran.code == 5


@pytest.mark.slow
def test_a_cache_that_is_used_meanwhile_has_no_faults(world: World) -> None:
    """Saves, evictions and deletions of payloads beside it: none of them looks like damage."""
    stop, problems = threading.Event(), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with closing(open_store(world.settings)) as store:
                space = store.open(KV, block_bytes=256)
                while not stop.is_set():
                    keys = chain(rng.random(), 3)
                    slots = [Slot(key, memoryview(content(KV, key, 0)), "BF16", (2, 2, 8, 4)) for key in keys]
                    space.save(slots)
                    listings = store.maintenance.sample(space.id, 2)
                    old = [one.segment for one in listings if one.segment not in mine]
                    store.index.evict(space.id, old, delete_after_s=0, rule="admin")
                    store.rounds.housekeeping.reap(space.id)
        except Exception as exc:
            problems.append(exc)

    mine = {one.segment for one in world.written}
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        until, rounds = time.monotonic() + 3.0, 0
        while time.monotonic() < until or rounds <= 3:
            with world.cache() as cache:
                report = fsck(cache, apply=True, depth=Depth(percent=100.0))
            assert report.ended == "complete", report.problem
            assert report.found == 0, report.faults
            rounds += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems
    assert run(world, depth=Depth(percent=100.0)).found == 0
    assert all(world.whole(one) for one in world.written)


def test_a_share_that_comes_back(tmp_path: Path) -> None:
    """Unmounted and mounted again: nothing has happened."""
    world = many(tmp_path, 40)
    folder, away = tmp_path / "cache" / namespace_id(KV), tmp_path / "away"
    before = known(world)
    shutil.move(folder, away)
    with pytest.raises(Refused):
        run(world, apply=True)
    shutil.move(away, folder)
    assert run(world, apply=True).found == 0
    assert known(world) == before


def test_a_record_that_cannot_be_read_is_not_replaced_by_damage(world: World) -> None:
    """Its record goes, and what was found bad on the way is not listed as a segment that nobody knew."""
    one = world.written[0]
    flip(world, one, len(one.payloads[0]) - 1)
    world.raw.break_record(one.name, one.segment)
    everything = Depth(percent=100.0, settled_s=0.0)
    assert run(world, apply=True, depth=everything).remaining == 0
    assert run(world, depth=everything).found == 0
    with world.cache() as cache:
        assert cache.index is not None
        assert cache.index.states(one.name, [one.segment]) == [None]


@pytest.mark.servers
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("HSET", "meta", "bytes", "many"), id="no number"),
        pytest.param(("HSET", "meta", "seen", b"\xff"), id="no time"),
        pytest.param(("HSET", "meta", "tenant", b"\xff"), id="no text"),
        pytest.param(("SET", "lru", "x"), id="another type"),
        pytest.param(("SET", "b:*", "x"), id="a bucket of another type"),
        pytest.param(("ZADD", "pins", "inf", b"abc"), id="a stranger"),
    ],
)
def test_a_namespace_that_makes_no_sense_is_named_and_mended(
    admin: Admin, redis_url: str, tmp_path: Path, words: tuple[str | bytes, ...]
) -> None:
    settings = {"payloads": f"file://{tmp_path / 'cache'}", "index": redis_url}
    raw = RawRedis(redis_url)
    world = World(settings, RawFolder(tmp_path / "cache"), raw)
    world.write(KV, chain("a", 12), 0)
    world.write(TWO_RANKS, chain("b", 3), 0)
    command, part, *rest = words
    asked = f"kvs:{{{namespace_id(KV)}}}:{part!s}"
    key = next(iter(raw.client.keys(asked.replace("{", "[{]").replace("}", "[}]"))), asked)
    if command == "SET":
        raw.client.delete(key)
    raw.client.execute_command(command, key, *rest)  # type: ignore[no-untyped-call]
    found = admin("fsck", *world.options)
    if part != "pins":
        assert found.code == 3
        assert namespace_id(KV) in found.out
    ran = admin("fsck", "--apply", *world.options)
    assert ran.code == 0, ran.out + ran.err
    with world.cache() as cache:
        assert cache.index is not None
        assert not [account for account in cache.index.accounts() if account.problem]
        [hit] = cache.index.match(namespace_id(TWO_RANKS), b"".join(map(digest, chain("b", 3))))
        assert hit.count == 3
        [hit] = cache.index.match(namespace_id(KV), b"".join(map(digest, chain("a", 12))))
        assert hit.count == 12
    assert "clean" in admin("fsck", *world.options).out
