"""One key or field at a time that holds what nobody wrote: its own namespace has misses, others nothing.

The table goes through every kind of key of the schema, and every field of `meta`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

import kvstore.index.scripted.index as schema
from kvstore.admin.backends import Cache
from kvstore.admin.serve.exporter import Exporter
from kvstore.admin.serve.monitor import Monitor
from kvstore.build import load_settings, open_store
from kvstore.errors import KVStoreError
from kvstore.index.port import Outcome
from kvstore.janitor.janitor import Janitor
from kvstore.keys import NO_SALT, NO_SESSION, WriterId, digests, new_segment_id, salt_id, session_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.index.contract.chains import record
from tests.index.contract.sessions import ALL, later
from tests.servers.redis import RedisServer
from tests.store.world import chain, content, fetch, match, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.servers

#: Blocks of each chain; and bytes that fit into the store: a dozen of them.
BLOCKS = 4
CAPACITY = 75_000
HUGE = b"9" * 30
HERS, HIS = salt_id("hers"), salt_id("his")
CHAT = session_id(NO_SALT, "chat")


class Poison(NamedTuple):
    #: The kind of key, as the schema names it, or a field of meta.
    kind: str
    what: str
    do: Callable[[redis.Redis, str], object]


def _first(raw: redis.Redis, prefix: str, pattern: str) -> bytes:
    return sorted(raw.keys(f"{prefix}{pattern}"))[0]


def _wrong_type(pattern: str) -> Callable[[redis.Redis, str], object]:
    def do(raw: redis.Redis, prefix: str) -> None:
        key = _first(raw, prefix, pattern)
        other = "hash" if raw.type(key) != b"hash" else "list"
        raw.delete(key)
        raw.hset(key, "a", "b") if other == "hash" else raw.lpush(key, "a")

    return do


def _field(name: str, value: bytes | None) -> Poison:
    def do(raw: redis.Redis, prefix: str) -> object:
        key = f"{prefix}meta"
        return raw.hdel(key, name) if value is None else raw.hset(key, name, value)

    return Poison(f"meta {name}", "gone" if value is None else repr(value), do)


def _hash(kind: str, pattern: str, what: str, field: bytes | None, value: bytes) -> Poison:
    """A field of a hash, its first one if `field` is None."""

    def do(raw: redis.Redis, prefix: str) -> object:
        key = _first(raw, prefix, pattern)
        return raw.hset(key, raw.hkeys(key)[0] if field is None else field, value)

    return Poison(kind, what, do)


def _score(kind: str, what: str, member: bytes | None, score: float) -> Poison:
    """A member of a sorted set, its first one if `member` is None."""

    def do(raw: redis.Redis, prefix: str) -> object:
        key = f"{prefix}{kind}"
        return raw.zadd(key, {raw.zrange(key, 0, 0)[0] if member is None else member: score})

    return Poison(kind, what, do)


def _raw(kind: str, what: str, *words: str | bytes | int) -> Poison:
    def do(raw: redis.Redis, prefix: str) -> object:
        return raw.execute_command(words[0], f"{prefix}{kind}", *words[1:])

    return Poison(kind, what, do)


def _whole(kind: str, what: str, *words: str | bytes) -> Poison:
    """A key of no namespace."""
    return Poison(kind, what, lambda raw, _: (raw.delete(words[1]), raw.execute_command(*words)))


def _quota_of_5000_digits(raw: redis.Redis, prefix: str) -> object:
    # More than the interpreter makes a number of.
    name = prefix.removeprefix("kvs:{").removesuffix("}:")
    return raw.hset("kvs:quotas", f"namespace/{name}", b"9" * 5000)


def _holder(kind: str, what: str, *more: str | int) -> Poison:
    def do(raw: redis.Redis, prefix: str) -> object:
        return raw.execute_command("SET", _first(raw, prefix, f"{kind}:*"), b"stranger", *more)

    return Poison(f"{kind}:", what, do)


USAGE = ("bytes", "segments", "blocks", "pinned", "cost")
NUMBERS = (*USAGE, "changes", "evicted", "epoch", "drained", "bygone", "created", "seen", "window", "ttl")
TEXTS = ("schema", "json", "kind", "tenant", "bucket_bits")
LAST = "18446744073709551615-18446744073709551615"
#: (kind, where one of it is found)
TYPED = [
    *((one, one) for one in ("meta", "segs", "lru", "pins", "trash", "parts", "hot", "events", "outcomes")),
    *((one, one) for one in ("faults", "seen", "ghosts", "ghost", "salts", "held", "erased")),
    *((one, one) for one in ("owner", "kept", "retained", "writers")),
    *((f"{one}:", f"{one}:*") for one in ("sessions", "b", "old", "part", "claim", "use")),
]

POISONS = [
    *(Poison(kind, "of another type", _wrong_type(pattern)) for kind, pattern in TYPED),
    *(_field(name, bad) for name in NUMBERS for bad in (b"x", b"-5", HUGE)),
    *(_field(name, None) for name in (*TEXTS, "bytes", "seen", "epoch")),
    *(_field(name, b"\xff\x00") for name in (*TEXTS, "cursor", "erased")),
    *(_field("bucket_bits", bad) for bad in (b"-1", b"60", HUGE, b"1.5")),
    *(_field("seen", bad) for bad in (b"nan", b"inf", b"-inf")),
    *(_field("shards", bad) for bad in (b"x", b"-5", b"0", b"8", b"1.5", HUGE)),
    *(_field("erasing", bad) for bad in (b"1", b"\xff")),
    *(
        _field(name, bad)
        for name in ("to", "from")
        for bad in (b"x", b"\xff", b"-5", b"0", b"1", b"8", b"1.5", b"8.x", b"1000000", HUGE)
    ),
    _field("epoch", b"1000000000000"),
    _field("cursor", b"0:" + HUGE),
    _field("erased", HUGE + b":" + HUGE),
    _field("json", b"[]"),
    _field("json", b"[" * 100_000)._replace(what="nested deeper than the interpreter recurses"),
    _hash("writers", "writers", "short verdict", None, b"\x00"),
    _hash("writers", "writers", "unknown verdict", None, b"\xff" * 13),
    _hash("writers", "writers", "long name", None, b"\x00" * 13 + b"\xff" * 4096),
    _hash("writers", "writers", "short writer", b"abc", b"\x00" * 13),
    _hash("b:", "b:*", "short entry", None, b"x"),
    _hash("b:", "b:*", "entry without a slot", None, b"12345678"),
    _hash("b:", "b:*", "long entry", None, bytes(40)),
    _hash("b:", "b:*", "entry of a stranger", None, b"stranger\x00\x01"),
    _hash("b:", "b:*", "short digest", b"abc", b"stranger\x00\x01"),
    _hash("segs", "segs", "empty value", None, b""),
    _hash("segs", "segs", "other value", None, b"damaged"),
    _hash("segs", "segs", "cut value", None, b"5120:2:" + bytes(30)),
    _hash("segs", "segs", "many bytes", None, HUGE + b":2:" + bytes(60)),
    _hash("segs", "segs", "short id", b"abc", b"1:1:"),
    _hash("segs", "segs", "long id", bytes(13), b"1:1:"),
    *(
        _score(kind, f"{what} of {score}", member, score)
        for kind in ("lru", "pins", "trash", "parts", "hot", "ghosts")
        for what, member, scores in (
            ("a first one", None, (float("inf"), float("-inf"), -1.7e308, -5.0)),
            ("a short one", b"abc", (1.0,)),
        )
        for score in scores
    ),
    _hash("segs", "segs", "salt cut off", None, b"5120:2:" + bytes(25) + b"\x03" + bytes(22)),
    *(
        _score("salts", f"{what} of {score}", member, score)
        for what, member in (
            ("a first one", None),
            ("a short one", b"abc"),
            ("one of nothing visible", HERS + b"stranger"),
        )
        for score in (0.0, 5.0, float("inf"), float("-inf"))
    ),
    *(
        _score("held", f"{what} of {score}", member, score)
        for what, member in (("a first one", None), ("a short one", b"abc"), ("a stranger", bytes(16)))
        for score in (0.5, -5.0, 1e300, float("inf"), float("-inf"))
    ),
    *(
        _hash("erased", "erased", f"{bad!r} for {who!r}", who, bad)
        for who in (b"", None, b"abc")
        for bad in (b"", b"x", b"-5", b"nan", b"inf", b"-inf", b"1.5", HUGE)
    ),
    _hash("old:", "old:*", "other value", None, b"x"),
    _hash("old:", "old:*", "short id", b"abc", b"x"),
    _hash("part:", "part:*", "other agreement", b"agreement", b"x"),
    _hash("part:", "part:*", "other epoch", b"epoch", b"x"),
    _hash("part:", "part:*", "other part", b"0", b"x"),
    _holder("claim", "for good"),
    _holder("claim", "for very long", "EX", 10**9),
    Poison("use:", "short", lambda raw, prefix: raw.set(_first(raw, prefix, "use:*"), b"x")),
    _raw("events", "other entry", "XADD", "*", b"\xff", b"\xff"),
    _raw("events", "entry of no numbers", "XADD", "*", "op", b"\xff", "segment", "x", "depth", "y"),
    _raw("events", "last entry of all", "XADD", LAST, "op", "x"),
    _raw("outcomes", "other entry", "XADD", "*", b"\xff", b"\xff"),
    _raw(
        *("outcomes", "entry of no numbers", "XADD", "*", "at", "nan", "request", b"\xed\xff", "op", "match"),
        *("asked", "x", "served", "1", "reason", b"\xff", "position", "0", "first", ""),
    ),
    _raw("outcomes", "last entry of all", "XADD", LAST, "op", "x"),
    _raw("faults", "other entry", "XADD", "*", b"\xff", b"\xff"),
    _raw("faults", "last entry of all", "XADD", LAST, "op", "x"),
    _hash("seen", "seen", "no number", None, b"x"),
    _hash("seen", "seen", "huge number", None, HUGE),
    _hash("seen", "seen", "other name", b"\xff", b"1"),
    _hash("ghost", "ghost", "no number", None, b"x"),
    _hash("ghost", "ghost", "no step", b"x", b"1"),
    _hash("ghost", "ghost", "huge step", HUGE, b"1"),
    *(
        Poison("kvs:ns", f"member {name!r}", lambda raw, _, name=name: raw.sadd("kvs:ns", name))  # type: ignore[misc]
        for name in (b"\xff\xfe", b"", b"nothing", b"0" * 16, b"0" * 17)
    ),
    _whole("kvs:quotas", "of another type", "SET", "kvs:quotas", "x"),
    _whole("kvs:quotas", "no number", "HSET", "kvs:quotas", b"tenant/\xff", "x"),
    Poison("kvs:quotas", "of 5,000 digits", _quota_of_5000_digits),
    _whole("kvs:operations", "of another type", "SET", "kvs:operations", "x"),
    _whole("kvs:operations", "other entry", "XADD", "kvs:operations", "*", b"\xff", b"\xff"),
    _whole("kvs:ping", "of another type", "LPUSH", "kvs:ping", "x"),
]


def test_the_table_has_every_key_and_field_of_the_schema() -> None:
    text, fields = (schema.__doc__ or "").split("meta's field", 1)
    kinds = {
        re.sub(r"<.*", "", name).removeprefix("kvs:{ns}:")
        for name in re.findall(r"^    (kvs:\S+) ", text, re.MULTILINE)
    }
    named = fields.split("\n\nA bucket's number", 1)[0]
    found = re.findall(r"^    ((?:[a-z_]+)(?:, [a-z_]+)*) {2,}\S", named, re.MULTILINE)
    kinds |= {f"meta {name}" for line in found for name in line.split(", ")}
    assert len(kinds) >= 40
    assert {poison.kind for poison in POISONS} == kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("poison")


class World:
    """A store of two namespaces that have everything a namespace can have."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index = store.maintenance
        self.good, self.bad = (open_space(store, model=name) for name in ("good", "bad"))
        for number, space in enumerate((self.good, self.bad)):
            space.register()
            self._fill(space, number)

    def _fill(self, space: Space, number: int) -> None:
        index, now = self.index, time.time()
        space.save(slots(chain(9000 + number, 1)))
        index.invalidate(space.id)
        for path in range(4):
            owner = CHAT if path == 2 else NO_SESSION
            # Older than all that tests save later.
            aged = {"created_s": int(now) - 7200, "salt": HERS if path % 2 else NO_SALT, "session": owner}
            space.save(slots(self.chain(number, path)), **aged)  # type: ignore[arg-type]
        index.session(space.id, CHAT, [], now, later(PATIENCE_S), allowance=ALL)
        first, second, third, _ = [one.segment for one in index.order(space.id, 9)]
        index.pin(space.id, [first], most_bytes=1 << 40)
        index.touch(space.id, [second], now - 3600)
        index.evict(space.id, [third], delete_after_s=now, rule="capacity")
        gone = next(one for one in range(4) if not match(space, self.chain(number, one)).blocks)
        missing = digests(self.chain(number, gone))
        told = [Outcome(now, "r", "match", BLOCKS, 0, "absent", 0, missing)]
        index.tell(space.id, told)
        index.tell(space.id, [Outcome(now, "r", "load", BLOCKS, 0, "corrupt", 0, missing)])
        index.note(space.id, missing, now_s=now, window_s=3600.0, sketch_bytes=4096)
        index.claim(space.id, digests(chain(9100 + number)), new_segment_id(), 600.0)
        begun = digests(chain(9200 + number))
        index.commit(space.id, new_segment_id(), begun, record(1), rank=0, ranks=2)
        index.forbid(space.id, HIS)
        index.judge(space.id, WriterId(b"a writer"), "alike", by=WriterId(b"somebody"), stands=False)

    def chain(self, number: int, path: int) -> list[bytes]:
        return chain(1000 * number + path, *range(BLOCKS - 1))

    def held(self, space: Space) -> int:
        return self.index.usage(space.id).nbytes


@pytest.fixture
def world(redis_server: RedisServer, folder: Path) -> Iterator[World]:
    settings = {
        "index": redis_server.url,
        "payloads": f"file://{folder}",
        "capacity_bytes": CAPACITY,
        "eviction": {"fresh_s": 0.001},
        "kv": {"match_ttl_s": 0.2, "load_deadline_s": 0.5},
        # Nothing here is about deadlines: a busy machine is in time.
        "redis": {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S},
        "janitor": {"scrub_percent": 100},
        "grace_s": 1,
    }
    with open_store(load_settings(settings, environ={})) as store:
        yield World(store)


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        yield client


@pytest.mark.parametrize("poison", POISONS, ids=lambda one: f"{one.kind}-{one.what}")
def test_it_costs_its_own_namespace_misses_and_others_nothing(
    world: World, raw: redis.Redis, poison: Poison
) -> None:
    prefix = f"kvs:{{{world.bad.id}}}:"
    poison.do(raw, prefix)

    # Whatever it says is right, or a miss; and it does not open the breaker that both stand behind.
    for path in range(4):
        hashes = world.chain(1, path)
        found = match(world.bad, hashes)
        try:
            assert fetch(world.bad, hashes, found) == [content(one) for one in hashes[: found.blocks]]
        except KVStoreError:
            pass
    for path in (4, 5):
        try:
            world.bad.save(slots(world.chain(1, path)))
        except KVStoreError:
            pass
        world.bad.note(digests(world.chain(1, path)))
        missing = digests(world.chain(1, path))
        world.bad.tell([Outcome(1.0, "r", "match", BLOCKS, 0, "absent", 0, missing)])
        world.bad.touch([new_segment_id()])
    for verb in (
        lambda: list(world.index.of_salt(world.bad.id, HERS)),
        lambda: world.index.holdings(world.bad.id, 0),
        lambda: world.index.forbidden(world.bad.id),
    ):
        try:
            verb()
        except KVStoreError:
            pass

    # The other one saves, at the quota, which holds for it.
    for path in range(10, 14):
        hashes = world.chain(0, path)
        # Later than all others, or it might be the first to go.
        created_s = int(time.time()) - 60 * (20 - path)
        assert world.good.save(slots(hashes), created_s=created_s).outcome == "stored"
        found = match(world.good, hashes)
        assert fetch(world.good, hashes, found) == [content(one) for one in hashes]
        assert world.held(world.good) <= CAPACITY
    world.store.rounds.housekeep()

    # The janitor does all of its steps there, and names the one that is damaged.
    janitor = Janitor(
        world.index,
        world.store.payloads,
        world.store.backends.evidence,
        world.store.settings,
    )
    janitor.round()
    faults = janitor.state().faults
    assert not [fault for fault in faults if fault.namespace != world.bad.id]
    account = next(one for one in world.index.accounts() if one.namespace == world.good.id)
    assert (account.problem, account.bygone) == ("", 0)
    [line] = [step for step in janitor.state().steps if step.step == "sweep"]
    assert line.runs == 1
    assert world.index.reconcile(world.good.id).replaced == ()

    # So do page and metrics.
    with Cache(world.store.settings) as cache:
        monitor = Monitor(cache)
        monitor.look()
        monitor.ask_payloads()
        assert monitor.ready().ok
        report, metrics = monitor.report(3600, janitor.state()), Exporter(monitor, janitor.state).metrics()
        assert world.good.id in {one.id for one in report.status.namespaces}
        names = {sample.labels.get("cache_namespace") for one in metrics for sample in one.samples}
        assert world.good.id in names

    # What the janitor met it has put right; what it never meets, fsck does with the same call.
    janitor.round()
    world.index.reconcile(world.bad.id)
    world.bad.register()
    assert not [one for one in world.index.accounts() if one.problem]
    assert set(world.index.namespaces()) == {world.good.id, world.bad.id}
    janitor.round()
    # Use counts are halved in a minute again.
    steps = [step for step in janitor.state().steps if step.step != "cool"]
    failing = {step.step: step.problem for step in steps if step.failing}
    assert not failing
    hashes = world.chain(1, 50)
    # What is forbidden until this second is saved in the next.
    until(lambda: world.bad.save(slots(hashes)).outcome == "stored")
    assert fetch(world.bad, hashes, match(world.bad, hashes)) == [content(one) for one in hashes]
