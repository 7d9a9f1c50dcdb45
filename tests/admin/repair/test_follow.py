"""rebuild --follow: the index of a bucket that is a copy of another one names what is there, and no more."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.repair.follow import PayloadFollower, payloads_named
from kvstore.admin.repair.reports import FollowReport
from kvstore.conformance.faulty import Plan, Rule
from kvstore.keys import NamespaceId, SegmentId
from tests.admin.conftest import Admin
from tests.admin.repair.damage import CREATED_S, KV, TWO_RANKS, RawBucket, RawSqlite, World, chain
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.servers import S3Server
from tests.store.world import put_faults
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.servers


class Regions:
    """A region with engines, another with a bucket and an index of its own, and who copies between them."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        self.buckets: list[S3Bucket] = [server.new_bucket(), server.new_bucket()]
        self.here, self.there = (
            World(
                {**bucket.settings, "payloads": bucket.url, "index": f"sqlite://{folder / name}.sqlite"},
                RawBucket(bucket),
                RawSqlite(folder / f"{name}.sqlite"),
            )
            for bucket, name in zip(self.buckets, ("here", "there"), strict=True)
        )
        self.there.written, self.there.chains = self.here.written, self.here.chains

    def copy(self, rng: random.Random, most: int | None = None) -> None:
        """Copies what isn't there yet, in any order, and stops after so many objects."""
        source, target = self.buckets
        left = sorted(set(source.keys()) - set(target.keys()))
        for key in rng.sample(left, len(left))[:most]:
            target.put(key, source.get(key))

    def delete(self, keys: list[str]) -> None:
        for bucket in self.buckets:
            for key in keys:
                bucket.delete(key)


@pytest.fixture
def regions(tmp_path: Path, s3_server: S3Server) -> Regions:
    return Regions(tmp_path, s3_server)


def named(world: World) -> set[SegmentId]:
    """What the index names."""
    with world.cache() as cache:
        index = cache.made_index()
        return {one.segment for name in index.namespaces() for one in index.segments(name)}


def complete(world: World) -> set[SegmentId]:
    return {one.segment for one in world.valid()}


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_that_is_cut_and_goes_on_is_served_as_far_as_it_has_come(regions: Regions, seed: int) -> None:
    rng = random.Random(seed)
    here, there = regions.here, regions.there
    here.fill(rng)
    total = len(regions.buckets[0].keys())
    with there.cache() as cache:
        follower = PayloadFollower(cache)
        assert follower.turn().listed.segments == 0
        # The copier comes as far as it comes, several times, between two ranks of a segment or not.
        for _ in range(3):
            regions.copy(rng, rng.randint(1, total // 3))
            report = follower.turn()
            assert not report.problem and report.behind_s is not None
            assert named(there) == complete(there)
            incomplete = [one for one in here.written if any(map(there.objects.get, one.names))]
            assert report.incomplete == len(incomplete) - len(complete(there))
            there.loads(complete=True)
        regions.copy(rng)
        report = follower.turn()
        assert (report.incomplete, report.left_out, report.listed.segments) == (0, 0, len(here.written))
    assert named(there) == named(here) == {one.segment for one in here.written}
    there.loads(complete=True)


def test_what_is_deleted_there_is_named_no_longer(regions: Regions) -> None:
    here, there = regions.here, regions.there
    here.fill(random.Random(5))
    regions.copy(random.Random(5))
    with there.cache() as cache:
        follower = PayloadFollower(cache)
        follower.turn()
        lost = here.written[::5]
        # Of one only a rank's payload: it is gone as a whole.
        regions.delete([name for one in lost for name in one.names[-1:]])
        report = follower.turn()
        assert report.gone == len(lost) and not report.problem
        assert (
            named(there)
            == complete(there)
            == {one.segment for one in here.written} - {one.segment for one in lost}
        )
        assert follower.turn().gone == len(lost), "not again"
    # Of a block that was stored twice the entry may lead to the one that is gone, until fsck finds the other.
    there.loads()


def test_a_bucket_that_looks_empty_takes_nothing_out_of_the_index(regions: Regions) -> None:
    here, there = regions.here, regions.there
    for number in range(20):
        here.write(TWO_RANKS, chain(number, 3), 0)
    regions.copy(random.Random(1))
    with there.cache() as cache:
        follower = PayloadFollower(cache)
        follower.turn()
        regions.delete(regions.buckets[1].keys())
        report = follower.turn()
        assert (
            "20 of 20 segments were not listed" in report.problem and "fsck --apply --force" in report.problem
        )
        assert report.gone == 0 and len(named(there)) == 20


def test_a_turn_that_fails_is_told_and_the_next_one_goes_on(regions: Regions) -> None:
    regions.here.fill(random.Random(2))
    regions.copy(random.Random(2))
    now = float(CREATED_S)
    with regions.there.cache() as cache:
        follower = PayloadFollower(cache, clock=lambda: now)
        assert follower.last.behind_s is None and follower.is_turning(60.0)
        plan = Plan()
        put_faults(cache.payloads, plan)
        plan.replace(Rule("transient", ("list",)))
        failed = follower.turn()
        assert failed.problem and failed.behind_s is None and failed.listed.segments == 0
        plan.replace()
        now += 30
        assert not follower.turn().problem
        now += 100
        plan.replace(Rule("transient", ("list",)))
        failed = follower.turn()
        assert failed.problem and failed.behind_s == 100
        assert follower.is_turning(60.0)
        now += 2000
        assert not follower.is_turning(60.0)
        follower.advance(0)
        assert follower.is_turning(60.0)


def test_a_namespace_that_is_gone_as_a_whole_goes_while_others_stay(regions: Regions) -> None:
    here, there = regions.here, regions.there
    here.fill(random.Random(3))
    for number in range(20):
        here.write(KV, chain(("kept", number), 2), 0)
    regions.copy(random.Random(3))
    with there.cache() as cache:
        follower = PayloadFollower(cache)
        follower.turn()
        regions.delete([name for one in here.written if one.namespace is TWO_RANKS for name in one.names])
        assert not follower.turn().problem
    assert named(there) == complete(there) != set()


def test_a_message_does_not_hide_what_a_turn_has_found(regions: Regions) -> None:
    for number in range(20):
        regions.here.write(TWO_RANKS, chain(number, 3), 0)
    regions.copy(random.Random(1))
    with regions.there.cache() as cache:
        follower = PayloadFollower(cache)
        follower.turn()
        regions.delete(regions.buckets[1].keys())
        problem = follower.turn().problem
        assert problem and follower.notice(["[" * 100_000, "{}"]).problem == problem


def test_how_long_segments_were_on_their_way_is_told(regions: Regions) -> None:
    here, now = regions.here, CREATED_S + 5000.0
    here.write(TWO_RANKS, chain("old", 3), 0)
    regions.copy(random.Random(1))
    with regions.there.cache() as cache:
        follower = PayloadFollower(cache, clock=lambda: now)
        # What the first turn finds was there already.
        assert (report := follower.turn()).way_s == 0 and report.newest_s == 5000
        here.write(TWO_RANKS, chain("new", 3), 0, created_s=CREATED_S + 4000)
        regions.copy(random.Random(1))
        assert (report := follower.turn()).way_s == 1000 and report.newest_s == 1000
        assert follower.turn().way_s == 0


def event(key: str, what: str = "ObjectCreated:Put") -> dict[str, Any]:
    return {"Records": [{"eventName": what, "s3": {"bucket": {"name": "b"}, "object": {"key": key}}}]}


def test_a_notification_brings_a_segment_in_and_out(regions: Regions) -> None:
    here, there = regions.here, regions.there
    here.fill(random.Random(4))
    regions.copy(random.Random(4))
    one, other = here.written[3], here.written[20]
    root = regions.buckets[1].prefix
    with there.cache() as cache:
        follower = PayloadFollower(cache)
        lines = [json.dumps(event(f"{root}/{name}")) for each in (one, other) for name in each.names]
        report = follower.notice([*lines, *lines, "no JSON", json.dumps(event("elsewhere/x"))])
        assert (report.turns, report.notified, report.listed.segments) == (0, 2, 2) and not report.problem
        assert named(there) == {one.segment, other.segment}
        there.objects.delete(one.names[0])
        report = follower.notice([json.dumps(event(f"{root}/{one.names[0]}", "ObjectRemoved:Delete"))])
        assert report.gone == 1 and named(there) == {other.segment}


def test_only_the_namespaces_that_are_asked_for_are_followed(regions: Regions) -> None:
    here, there = regions.here, regions.there
    here.fill(random.Random(6))
    regions.copy(random.Random(6))
    name = here.written[0].name
    with there.cache() as cache:
        follower = PayloadFollower(cache, [name[:8].upper()])
        follower.turn()
        other = next(one for one in here.written if one.name != name)
        line = json.dumps(event(f"{regions.buckets[1].prefix}/{other.names[0]}"))
        follower.notice([line])
        assert set(cache.made_index().namespaces()) == {name}


_NAME = "8a74e0fa00112233/ab/abcdef0011223344.0"
_NAMED = [(NamespaceId("8a74e0fa00112233"), SegmentId(bytes.fromhex("abcdef0011223344")))]


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (event(f"cache/{_NAME}"), _NAMED),
        (event(f"cache%2F{_NAME}"), _NAMED),
        # As SQS gives it, and as SQS gives what SNS has sent.
        ({"Body": json.dumps(event(f"cache/{_NAME}"))}, _NAMED),
        ({"Body": json.dumps({"Message": json.dumps(event(f"cache/{_NAME}"))})}, _NAMED),
        (event(_NAME), []),
        (event("cache/.probe/00"), []),
        ({"Event": "s3:TestEvent"}, []),
        ({"Records": [None, {}, {"s3": {"object": {"key": 7}}}, {"s3": []}]}, []),
        ([], []), (7, []), ({"Body": "no JSON"}, []), ({"Records": 7}, []),
    ],
)  # fmt: skip
def test_messages_of_buckets_are_read_and_others_passed_over(message: object, found: list[Any]) -> None:
    assert list(payloads_named(json.dumps(message), "cache/")) == found


@pytest.fixture
def following(regions: Regions, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(regions.there.settings))
    command = [
        sys.executable, "-m", "kvstore.cli", "rebuild", "--settings", str(settings), "--apply", "--follow",
        "--every", "0.2", "--listen", "127.0.0.1:0", "--notices", "-", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def test_the_command_follows_until_it_is_stopped(regions: Regions, following: subprocess.Popen[str]) -> None:
    assert following.stdout is not None and following.stderr is not None
    url = following.stderr.readline().split()[-1]
    here = regions.here
    here.write(TWO_RANKS, chain("one", 3), 0)
    regions.copy(random.Random(1))
    last = FollowReport.model_validate_json(following.stdout.readline())
    while last.listed.segments < 1:
        last = FollowReport.model_validate_json(following.stdout.readline())
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert "kvstore_follow_listed_segments_total 1.0" in text
    told = set(re.findall(r"kvstore_follow_\w+", (ROOT / "docs" / "regions.md").read_text()))
    assert {name for name in told if not re.search(rf"^{name} ", text, re.MULTILINE)} == set()
    with urllib.request.urlopen(f"{url}/healthz", timeout=PATIENCE_S) as answer:
        assert answer.status == 200
    following.send_signal(signal.SIGTERM)
    rest, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 0 and all(map(FollowReport.model_validate_json, rest.splitlines()))


def test_what_goes_with_following_only(admin: Admin, tmp_path: Path) -> None:
    options = ["--payloads", f"file://{tmp_path}"]
    for words in (
        ["--follow"],
        ["--shards", "2"],
        ["--follow", "--apply", "--shards", "2"],
        ["--notices", "-"],
        ["--listen", "127.0.0.1:0"],
    ):
        assert admin("rebuild", *words, *options).code == 2
