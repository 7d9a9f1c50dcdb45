"""An index in Redis: what kvstore wrote, read raw; what the second one commits, served by kvstore."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvstore.admin.backends import Cache
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings
from kvstore.errors import PermissionDenied
from kvstore.index.sessions import Hint
from kvstore.keys import SaltId, SegmentId, SessionId, canonical_json, digests
from schemas.namespace import Namespace
from schemas.records import CODECS, Codec
from tests.format import second
from tests.format.world import NOW_S, SHAPES, World, content, ec, kv, path, world
from tests.servers.redis import RedisServer
from tests.store.world import item

HERS, HIS = second.salt_id("hers"), second.salt_id("his")
SCRIPTS = Path(__file__).parents[2] / "kvstore" / "index" / "scripted" / "lua"


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


@pytest.fixture
def theirs(raw: redis.Redis) -> second.RedisStore:
    return second.RedisStore(raw, SCRIPTS)


def packed(hashes: list[bytes], group: int = 0) -> bytes:
    return b"".join(second.digest(second.block_key(one, group)) for one in hashes)


@pytest.mark.parametrize("how", CODECS)
def test_a_filled_index_is_read(
    how: Codec, tmp_path: Path, redis_url: str, theirs: second.RedisStore
) -> None:
    namespace, hashes = kv(how, shards=2), path("a", 11)
    with world(tmp_path, redis_url, namespace) as ours:
        one = ours.save(hashes[:6], ranks=2)
        two = ours.save(hashes[6:], depth=6, ranks=2, cost_us=5_000_000)
        window = ours.save(hashes[4:6], group=1, depth=4)
        gone, pinned = ours.save(path("g", 2), ranks=2), ours.save(path("p", 3), ranks=2)
        ours.index.evict(ours.space.id, [SegmentId(gone)], delete_after_s=NOW_S + 10.0, rule="admin")
        ours.index.pin(ours.space.id, [SegmentId(pinned)], most_bytes=10**9)
        ours.index.touch(ours.space.id, [SegmentId(two)], NOW_S + 600)
        name = ours.space.id
        assert theirs.namespaces() == {name: canonical_json(namespace)}

        records = theirs.records(name)
        assert set(records) == {one, two, window, pinned}
        for listing in ours.index.segments(name):
            record = records[listing.segment]
            assert record.nbytes == listing.record.nbytes
            assert (record.depth, record.cost_us) == (listing.record.depth, listing.record.cost_us)
        usage = ours.index.usage(name)
        assert theirs.account(name) == {
            "bytes": usage.nbytes, "segments": 4, "blocks": usage.blocks, "pinned": usage.pinned_bytes,
            "cost": usage.cost_us,
        }  # fmt: skip
        assert usage.nbytes == sum(record.nbytes for record in records.values())

        assert [(run.segment, run.slot, run.count) for run in theirs.match(name, packed(hashes))] == [
            (one, 0, 6),
            (two, 0, 5),
        ]
        entries = theirs.entries(name)
        assert len(entries) == 6 + 5 + 2 + 2 + 3
        assert entries[packed(hashes[5:6], 1)] == (window, 1)
        assert entries == {entry.digest: (entry.segment, entry.slot) for entry in ours.index.entries(name)}

        (due, ranks), minute = theirs.trash(name)[gone], NOW_S // 15 / 4
        assert (due >= NOW_S + 10, ranks) == (True, 2)
        assert [each for each, _ in theirs.order(name, "pins")] == [pinned]
        order = theirs.order(name)
        assert [each for each, _ in order][-1] == two
        assert dict(order)[one] == (minute - 0.5, 0, 0)
        assert dict(order)[two] == (minute + 10, 6, 0)
        assert [each for each, _ in order] == [each.segment for each in ours.index.order(name, 10)]
        events = theirs.events(name)
        assert [event["op"] for event in events].count(b"commit") == 5
        assert events[-1]["rule"] == b"admin" and events[-1]["segment"] == gone

        for rank in (0, 1):
            for run in theirs.match(name, packed(hashes)):
                some = hashes[run.start : run.start + run.count]
                keys = [second.block_key(each) for each in some]
                loaded = list(second.load(tmp_path, name, run, keys, rank))
                assert loaded == [content(each, rank, "BF16", SHAPES["BF16"]) for each in some]


def test_items_and_their_worth_are_read(tmp_path: Path, redis_url: str, theirs: second.RedisStore) -> None:
    with world(tmp_path, redis_url, ec()) as ours:
        cheap, dear = ours.save_item("a"), ours.save_item("b", cost_us=30_000)
        name, key = ours.space.id, item("b")
        (run,) = theirs.match(name, second.digest(key))
        assert (run.segment, run.count) == (dear, 1)
        (data,) = second.load(tmp_path, name, run, [key])
        assert data == content(key, 0, "F32", (7, 16))
        uses = dict(theirs.order(name))
        assert uses[cheap] == (second.saved_minute(NOW_S), 0, 0)
        worth = second.worth("ec", run.record)
        assert worth > 0
        assert uses[dear] == (second.saved_minute(NOW_S), 0, worth)


def segment_of(
    namespace: Namespace, hashes: list[bytes], *, rank: int = 0, ranks: int = 1, depth: int = 0,
    segment: bytes | None = None, cost_us: int = 0, salt: bytes = b"", created_s: int = NOW_S,
) -> tuple[str, bytes]:  # fmt: skip
    """A segment of the second implementation's: its name and bytes."""
    segment = segment or secrets.token_bytes(8)
    if namespace.kind == "ec":
        key = item(hashes[0].hex())
        tensors = [second.Tensor(key, "F32", (7, 16), content(key, 0, "F32", (7, 16)))]
    else:
        tensors = [
            second.Tensor(
                second.block_key(one), "BF16", SHAPES["BF16"], content(one, rank, "BF16", SHAPES["BF16"])
            )
            for one in hashes
        ]
    text = canonical_json(namespace)
    data = second.write_segment(
        tensors, namespace=text, segment=segment, created_s=created_s, rank=rank, ranks=ranks, depth=depth,
        cost_us=cost_us, salt=salt,
    )  # fmt: skip
    return second.payload_name(second.namespace_id(text), segment, rank), data


def put_and_read(root: Path, name: str, data: bytes) -> second.Header:
    second.put(root, name, data)
    return second.read_header((root / name).read_bytes())


@pytest.mark.parametrize("by", ["script", "hand"])
@pytest.mark.parametrize("how", CODECS)
def test_what_the_second_commits_kvstore_serves(
    how: Codec, by: str, tmp_path: Path, redis_url: str, theirs: second.RedisStore
) -> None:
    namespace, hashes = kv(how), path("c", 9)
    name = theirs.register(canonical_json(namespace), 50_000)
    first = put_and_read(tmp_path, *segment_of(namespace, hashes[:5], cost_us=2048))
    rest = put_and_read(tmp_path, *segment_of(namespace, hashes[5:], depth=5))
    segment = bytes.fromhex(first.meta["segment"])
    assert theirs.claim(name, packed(hashes), segment) == (0, True)
    assert theirs.claim(name, packed(hashes), b"somebody") == (0, False)
    for header in (first, rest):
        if by == "script":
            assert theirs.commit(name, header) == 1
            assert theirs.commit(name, header) == 1
        else:
            assert theirs.commit_by_hand(name, header)
            assert not theirs.commit_by_hand(name, header)
    with world(tmp_path, redis_url, namespace) as ours:
        assert ours.space.id == name
        assert ours.served(hashes) == [content(one, 0, "BF16", SHAPES["BF16"]) for one in hashes]
        assert ours.index.usage(name).segments == 2
        assert ours.index.reconcile(name).recorded == ours.index.reconcile(name).counted
        assert ours.faults() == []
        # Nobody holds the claim any more, and the rest of the chain can be claimed behind what is there.
        more = digests([*hashes, *path("d", 1)])
        assert ours.index.claim(name, more, SegmentId(b"whoever "), 1.0).present == 9
        assert ours.index.last_position(name)


def test_the_sketch_of_uses(tmp_path: Path, redis_url: str, theirs: second.RedisStore) -> None:
    now, day, size = float(NOW_S), 86400.0, 1 << 20
    with world(tmp_path, redis_url, kv()) as ours:
        name, common = ours.space.id, path("u", 50)
        one, two = common + path("v", 40), common + path("w", 3)
        assert theirs.noted(name, packed(one), second.window_name(now, day, size)) == 0

        def note(hashes: list[bytes], at_s: float) -> int:
            return ours.index.note(name, digests(hashes), now_s=at_s, window_s=day, sketch_bytes=size)

        assert note(one, now) == 0
        assert theirs.noted(name, packed(one), second.window_name(now, day, size)) == 90
        assert theirs.noted(name, packed(two), second.window_name(now, day, size)) == 50
        assert theirs.note(name, packed(two), now, day, size) == 50
        assert note(two, now) == 53
        # The next window looks back at this one.
        assert theirs.note(name, packed(two), now + day, day, size) == 53
        assert theirs.noted(name, packed(two), second.window_name(now + day, day, size)) == 53
        assert note(one, now + 3 * day) == 0


def test_by_script_and_by_hand_the_index_is_the_same(
    tmp_path: Path, theirs: second.RedisStore, raw: redis.Redis
) -> None:
    """Every key but for the clock's: what the document lists is all that the script does."""
    for namespace, salt in ((kv("lz4"), b""), (ec(), b""), (kv("lz4"), HERS), (ec(), HERS)):
        name = theirs.register(canonical_json(namespace), 1)
        segment = bytes(range(8))
        header = put_and_read(
            tmp_path,
            *segment_of(namespace, path("e", 3), segment=segment, depth=0, cost_us=99_968, salt=salt),
        )
        ghosts = {header.digests[:16]: 1.0, bytes(16): 2.0}
        raw.zadd(f"kvs:{{{name}}}:ghosts", ghosts)
        theirs.claim(name, header.digests, segment)
        assert theirs.commit(name, header) == 1
        scripted = dump(raw, name)
        raw.flushall()
        theirs.register(canonical_json(namespace), 1)
        raw.zadd(f"kvs:{{{name}}}:ghosts", ghosts)
        theirs.claim(name, header.digests, segment)
        assert theirs.commit_by_hand(name, header)
        assert dump(raw, name) == scripted
        assert scripted[f"kvs:{{{name}}}:ghosts"] == [(bytes(16), 2.0)]
        assert f"kvs:{{{name}}}:lru" in scripted
        assert (f"kvs:{{{name}}}:salts" in scripted) == (f"kvs:{{{name}}}:held" in scripted) == bool(salt)
        raw.flushall()


def dump(raw: redis.Redis, name: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key in raw.keys(f"kvs:{{{name}}}:*"):
        match raw.type(key):
            case b"hash":
                fields = raw.hgetall(key)
                found[key.decode()] = {k: v for k, v in fields.items() if k not in (b"created", b"seen")}
            case b"zset":
                found[key.decode()] = raw.zrange(key, 0, -1, withscores=True)
            case b"stream":
                found[key.decode()] = [fields for _, fields in raw.xrange(key)]
            case _:
                found[key.decode()] = raw.get(key)
    return found


def test_what_the_second_replaces_goes_when_all_of_it_is_elsewhere(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore
) -> None:
    namespace, hashes = kv(), path("j", 9)
    name = theirs.register(canonical_json(namespace), 50_000)
    with world(tmp_path, redis_url, namespace) as ours:
        olds = [ours.save(hashes[:4]), ours.save(hashes[4:6], depth=4)]
        pinned = SegmentId(olds[1])
        ours.index.pin(name, [pinned], most_bytes=10**9)
        header = put_and_read(tmp_path, *segment_of(namespace, hashes))
        replaces = [(olds[0], packed(hashes[:4])), (olds[1], packed(hashes[4:6]))]
        assert theirs.commit(name, header, replaces=replaces) == 1
        segment = bytes.fromhex(header.meta["segment"])
        assert {one.segment for one in ours.index.segments(name)} == {segment, pinned}
        assert ours.served(hashes) == [content(one, 0, "BF16", SHAPES["BF16"]) for one in hashes]
        assert [(one.op, one.rule) for one in ours.index.events(name)][-1] == ("evict", "joined")
        assert dict(ours.index.reapable(name, NOW_S, 9)) == {olds[0]: 1}
        assert ours.faults() == []


def test_several_ranks_become_visible_with_the_last(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore
) -> None:
    namespace, hashes = kv("planes-lz4", shards=2), path("r", 6)
    name, segment = theirs.register(canonical_json(namespace), 100), secrets.token_bytes(8)
    headers = [
        put_and_read(tmp_path, *segment_of(namespace, hashes, rank=rank, ranks=2, segment=segment))
        for rank in (0, 1)
    ]
    with world(tmp_path, redis_url, namespace) as ours:
        assert theirs.commit(name, headers[1]) == 0
        assert ours.served(hashes) == []
        assert theirs.commit(name, headers[0]) == 1
        for rank in (0, 1):
            wanted = [content(one, rank, "BF16", SHAPES["BF16"]) for one in hashes]
            assert ours.served(hashes, rank=rank) == wanted
        assert ours.faults() == []
        assert theirs.evict(name, [segment], at_s=0, grace_s=100) == 1
        assert theirs.trash(name) == {segment: (0, 2)}
        assert theirs.commit(name, headers[0]) == 2, "what is in the trash is refused"
        assert ours.store.rounds.housekeeping.reap(ours.space.id) == 2
        assert not list(tmp_path.glob("*/*/*.?"))


def test_a_claim_is_on_the_first_missing_block(
    tmp_path: Path, theirs: second.RedisStore, raw: redis.Redis
) -> None:
    namespace, hashes = kv(), path("f", 6)
    name = theirs.register(canonical_json(namespace), 100)
    assert theirs.commit(name, put_and_read(tmp_path, *segment_of(namespace, hashes[:4]))) == 1
    assert theirs.claim(name, packed(hashes), b"writer 1") == (4, True)
    assert raw.get(f"kvs:{{{name}}}:claim:{packed(hashes[4:5]).hex()}") == b"writer 1"
    assert theirs.claim(name, packed(hashes[:4]), b"writer 1") == (4, False)


def test_what_was_invalidated_or_evicted_is_refused_for_as_long_as_it_is_there(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore, raw: redis.Redis
) -> None:
    namespace = kv()
    name = theirs.register(canonical_json(namespace), 100)
    bygone, gone = (put_and_read(tmp_path, *segment_of(namespace, path(seed, 2))) for seed in ("x", "y"))
    with world(tmp_path, redis_url, namespace) as ours:
        assert theirs.commit(name, bygone) == 1
        assert ours.index.invalidate(ours.space.id) == 1
        assert set(raw.hgetall(f"kvs:{{{name}}}:old:0")) == {bytes.fromhex(bygone.meta["segment"])}
        assert theirs.commit(name, gone) == 1
        segment, began = bytes.fromhex(gone.meta["segment"]), int(raw.time()[0])
        assert theirs.evict(name, [segment], at_s=1, grace_s=100) == 1
        assert began + 100 < theirs.trash(name)[segment][0] <= began + 110
        for header in (bygone, gone):
            assert theirs.commit(name, header) == 2
            assert not theirs.commit_by_hand(name, header)
        assert theirs.account(name) == dict.fromkeys(("bytes", "segments", "blocks", "pinned", "cost"), 0)


def test_rebuild_takes_what_the_second_wrote(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore
) -> None:
    namespace, hashes = kv("planes-lz4"), path("b", 20)
    for at in range(0, 20, 4):
        second.put(tmp_path, *segment_of(namespace, hashes[at : at + 4], depth=at, cost_us=7))
    settings = load_settings(
        {"payloads": f"file://{tmp_path}", "index": redis_url, "capacity_bytes": "1GiB"}, environ={}
    )
    with Cache(settings) as cache:
        report = rebuild(cache, apply=True)
    (space,) = report.namespaces
    assert (space.listed.segments, space.unusable, space.refused, report.left_out) == (5, 0, 0, 0)
    with world(tmp_path, redis_url, namespace) as ours:
        assert len(ours.served(hashes)) == 20
        assert ours.faults() == []
    assert sum(run.count for run in theirs.match(space.id, packed(hashes))) == 20


def test_what_a_salt_has_stored_both_say_alike(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore, raw: redis.Redis
) -> None:
    namespace = kv("lz4")
    with world(tmp_path, redis_url, namespace) as ours:
        name = ours.space.id
        hers = {ours.save(path(f"a{i}", 2), ranks=1 + i % 2, salt=SaltId(HERS)) for i in range(5)}
        his, plain = ours.save(path("b", 3), salt=SaltId(HIS)), ours.save(path("c", 4))
        assert theirs.records(name)[his].salt == HIS and not theirs.records(name)[plain].salt
        for how in (theirs.commit, theirs.commit_by_hand):
            header = put_and_read(tmp_path, *segment_of(namespace, path(how.__name__, 3), salt=HERS))
            assert how(name, header)
            hers.add(bytes.fromhex(header.meta["segment"]))
        found, after = set(), b""
        while True:
            page, after = theirs.salted(name, HERS, after, 3)
            found |= set(page)
            if not after:
                break
        assert found == hers == theirs.of_salt(name, HERS)
        assert {one.segment for one in ours.index.of_salt(name, SaltId(HERS))} == hers
        records = theirs.records(name)
        held = {HERS: sum(records[one].nbytes for one in hers), HIS: records[his].nbytes}
        assert theirs.held(name) == ours.index.holdings(name, 0) == held
        again = ours.index.reconcile(name)
        assert again.recorded == again.counted
        assert theirs.held(name) == held
        assert ours.faults() == []

        # A release that knows no salts evicts one, and leaves its member and its bytes.
        raw.hdel(f"kvs:{{{name}}}:segs", his)
        assert theirs.of_salt(name, HIS) == set(ours.index.of_salt(name, SaltId(HIS))) == set()
        assert raw.zrangebylex(f"kvs:{{{name}}}:salts", b"[" + HIS, b"[" + HIS + b"\xff" * 8) == []
        ours.index.reconcile(name)
        assert theirs.held(name) == {HERS: held[HERS]}


def test_what_was_told_of_sessions_both_say_alike(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore
) -> None:
    namespace, minute = kv("lz4"), int(time.time() // 60)
    chat, other = second.session_id(b"", "chat"), SessionId(second.session_id(HERS, "chat"))
    with world(tmp_path, redis_url, namespace) as ours:
        name = ours.space.id
        segments = []
        for number in range(4):
            made = segment_of(namespace, path(str(number), 2), salt=HERS if number == 3 else b"")
            header = put_and_read(tmp_path, *made)
            assert theirs.commit(name, header, session=chat) == 1
            segments.append(SegmentId(bytes.fromhex(header.meta["segment"])))
        assert theirs.owner(name) == dict.fromkeys(segments, chat)
        assert theirs.sessions(name)[chat][4] == segments
        assert ours.index.owners(name, segments) == [chat] * 4
        # One is used by both; of the others one is pinned.
        ours.index.session(name, other, segments[:1], minute * 60.0, Hint(priority="low"))
        ours.index.pin(name, segments[1:2], most_bytes=1 << 40)
        sizes = {one: record.nbytes for one, record in theirs.records(name).items()}
        answer = theirs.session(name, chat, segments, minute, retain_s=1807, most=1 << 40)
        retained = [segments[0], *segments[2:]]
        [mine] = ours.index.find_sessions(name, [SessionId(chat)])
        assert mine is not None
        until = int(mine.until_s)
        assert 0 <= until - 1807 - 60 * minute < 600, "by the clock of Redis"
        assert answer == [1, 3, 0, b"%d" % sum(sizes[one] for one in retained), b"0"]
        assert theirs.kept(name) == dict.fromkeys(retained, (until, minute))
        assert {one: place[0] for one, place in theirs.order(name)} == dict.fromkeys(retained, until // 60)
        held = {b"": sum(sizes[one] for one in retained), HERS: sizes[segments[3]]}
        assert theirs.retained(name) == ours.index.retained(name) == held
        again = ours.index.reconcile(name)
        assert again.recorded == again.counted
        assert theirs.retained(name) == held
        assert theirs.sessions(name)[other] == (minute, False, 0, 0, [])
        assert (mine.state, mine.segments) == ("retained", 3)
        assert theirs.session(name, chat, [], minute, end=True) == [2, 3, 2, b"0", b"0"]
        assert [one[0] for _, one in theirs.order(name)] == [1, 1, until // 60]
        assert theirs.sessions(name)[chat] == (minute, True, 1, 0, segments[1:])
        assert ours.faults() == []


def test_what_was_erased_neither_commits_any_more(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore, raw: redis.Redis
) -> None:
    namespace = kv("lz4", shards=2)
    with world(tmp_path, redis_url, namespace) as ours:
        name = ours.space.id
        seen = ours.save(path("a", 2), ranks=2, salt=SaltId(HERS))
        until = int(ours.index.forbid(name, SaltId(HERS)))
        assert theirs.erased(name) == {HERS: until}
        for at in (NOW_S, until, until + 1, until + 86400):
            blocks = path(str(at), 1)
            header = put_and_read(tmp_path, *segment_of(namespace, blocks, salt=HERS, created_s=at))
            assert theirs.commit(name, header) == 2
            assert not theirs.commit_by_hand(name, header)
        assert theirs.of_salt(name, HERS) == {seen}
        # The whole namespace, by the second's hand: what waits for its other rank is given up.
        half = put_and_read(tmp_path, *segment_of(namespace, path("h", 1), ranks=2, salt=HIS))
        assert theirs.commit(name, half) == 0
        assert theirs.forbid(name, b"") >= until
        assert ours.index.forbidden(name) == {SaltId(k): float(v) for k, v in theirs.erased(name).items()}
        assert set(theirs.erased(name)) == {HERS, b""}
        assert theirs.trash(name) == {bytes.fromhex(half.meta["segment"]): (0, 2)}
        for salt in (HERS, HIS, b""):
            header = put_and_read(tmp_path, *segment_of(namespace, path("p", 1), salt=salt))
            assert theirs.commit(name, header) == 2
            assert not theirs.commit_by_hand(name, header)
        # So it is for kvstore, and for a rebuild of what lies there.
        refused = ours.save(path("q", 1), ranks=2)
        assert ours.index.states(name, [SegmentId(refused)]) == [None]
        before = theirs.of_salt(name, HERS)
        with Cache(ours.store.settings) as cache:
            (report,) = rebuild(cache, apply=True).namespaces
        assert report.refused
        assert theirs.of_salt(name, HERS) == before and set(theirs.records(name)) == before


def test_a_newer_schema_is_left_alone(
    tmp_path: Path, redis_url: str, theirs: second.RedisStore, raw: redis.Redis
) -> None:
    namespace = kv()
    with world(tmp_path, redis_url, namespace) as ours:
        ours.save(path("n", 3))
        name = ours.space.id
        # As a newer release would: see the document on versions.
        raw.hset(f"kvs:{{{name}}}:meta", "schema", "5")
        raw.hdel(f"kvs:{{{name}}}:meta", "bucket_bits")
        before = dump(raw, name)
        with pytest.raises(PermissionDenied, match="newer"):
            ours.space.register()
        assert ours.space.match(digests(path("n", 3))).blocks == 0
        assert ours.index.accounts() == []
        ours.store.rounds.housekeep()
        with pytest.raises(PermissionDenied):
            ours.save(path("m", 3))
        assert dump(raw, name) == before
    with pytest.raises(second.Miss):
        theirs.register(canonical_json(namespace), 1)
    assert theirs.namespaces() == {}


def ages(ours: World, theirs: second.RedisStore | second.SqliteStore) -> None:
    """Sets a time to live: what is younger serves both readers, and what is older neither."""
    hashes, now = path("a", 6), int(time.time())
    young = ours.save(hashes[:4], created_s=now - 60)
    ours.save(hashes[4:], depth=4, created_s=now - 7200)
    ours.index.age_out(ours.space.id, 9000, delete_after_s=0)
    assert sum(run.count for run in theirs.match(ours.space.id, packed(hashes))) == 6
    old = ours.save(path("b", 2), created_s=now - 9001)
    assert theirs.match(ours.space.id, packed(path("b", 2))) == []
    assert {young, old} < set(theirs.records(ours.space.id))
    assert ours.space.match(digests(path("b", 2))).blocks == 0


def test_what_is_too_old_serves_neither(tmp_path: Path, redis_url: str, theirs: second.RedisStore) -> None:
    with world(tmp_path, redis_url, kv("none")) as ours:
        ages(ours, theirs)
