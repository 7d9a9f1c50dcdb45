"""RedisIndex over a server whose replies no real one gives: a sensible answer, or an error of the tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError

from kvstore.build import load_settings, open_evidence
from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.port import Claim, CommitState, Outcome, Run
from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.leaf import Layout
from kvstore.index.sharding.names import is_name
from kvstore.keys import NO_SALT, NamespaceId, SegmentId, namespace_id, new_segment_id, session_id
from kvstore.metrics import Counters
from kvstore.payloads.memory import MemoryPayloads
from kvstore.store.backends import Backends
from kvstore.store.store import Store
from kvstore.threads.transfers import Transfers
from schemas.records import pack_record
from tests.index.contract.chains import chain, namespace, record
from tests.index.contract.sessions import ALL, later

NAME = namespace_id(namespace())
SEGMENT = SegmentId(b"12345678")
CHAT = session_id(NO_SALT, "chat")
#: Verbs of many calls.
SLOW = ("expire", "drain", "sweep", "erase")
ASKED = 8
CHAIN = chain(ASKED)
#: A value of `segs`: a segment of 30 slots.
VALUE = b"5120:30:" + bytes(24) + pack_record(record(30))


class Scripted:
    """Answers everything with what `reply` returns, or raises it."""

    def __init__(self, reply: Callable[[], Any]) -> None:
        self._reply = reply

    def execute_command(self, *words: Any, **options: Any) -> Any:
        reply = self._reply()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, **options: Any) -> Scripted:
        return self

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def execute(self, **options: Any) -> Any:
        return self._reply()

    def close(self) -> None:
        pass


def answering(reply: Callable[[], Any]) -> RedisIndex:
    return RedisIndex(RedisClient(Scripted(reply), where="fake"))  # type: ignore[arg-type]


def place(slot: int, count: int) -> int:
    return slot * 65536 + count


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param([[SEGMENT], [place(0, 24)], [VALUE]], id="24 blocks of 8"),
        pytest.param([[SEGMENT] * 3, [place(0, 3)] * 3, [VALUE] * 3], id="9 blocks of 8"),
        pytest.param([[SEGMENT], [place(-1, 2)], [VALUE]], id="slot -1"),
        pytest.param([[SEGMENT], [place(29, 2)], [VALUE]], id="a slot too far"),
        pytest.param([[SEGMENT], [place(3, 0)], [VALUE]], id="no block"),
        pytest.param([[b"1"], [place(0, 2)], [VALUE]], id="an id of a byte"),
        pytest.param([[bytes(1000)], [place(0, 2)], [VALUE]], id="an id of 1000 bytes"),
        pytest.param([["12345678"], [place(0, 2)], [VALUE]], id="an id of text"),
        pytest.param([[SEGMENT], [place(0, 2)], [b""]], id="no record"),
        pytest.param([[SEGMENT], [place(0, 2)], [7]], id="a number as a record"),
        pytest.param([[SEGMENT], [place(0, 2)], [[VALUE]]], id="a list as a record"),
        pytest.param([[SEGMENT], [b"2"], [VALUE]], id="text as a place"),
        pytest.param([[SEGMENT], [None], [VALUE]], id="no place"),
        pytest.param([[SEGMENT], [], []], id="lists that differ"),
        pytest.param([[SEGMENT]], id="one list"),
        pytest.param(None, id="nothing"),
        pytest.param(7, id="a number"),
        pytest.param(b"OK", id="a word"),
        pytest.param(NoScriptError("NOSCRIPT No matching script"), id="no script, again and again"),
        pytest.param(InvalidResponse("what"), id="no protocol"),
        pytest.param(TypeError("of redis-py's own"), id="an error of the client"),
    ],
)
def test_a_match_that_can_not_be(reply: Any) -> None:
    try:
        runs = answering(lambda: reply).match(NAME, CHAIN)
    except KVStoreError as exc:
        assert "fake" in str(exc)
    else:
        assert runs == []


def test_what_makes_no_sense_names_its_namespace_and_the_command_that_mends_it() -> None:
    with pytest.raises(DamagedIndex, match=f"match: namespace {NAME} is damaged .*fsck {NAME} --apply"):
        answering(lambda: 7).match(NAME, CHAIN)


OUTCOME = Outcome(1.0, "r", "match", ASKED, 0, "absent", 0, CHAIN)
VERBS: dict[str, Callable[[RedisIndex], Any]] = {
    "match": lambda index: index.match(NAME, CHAIN),
    "find": lambda index: index.find(NAME, CHAIN),
    "claim": lambda index: index.claim(NAME, CHAIN, SEGMENT, 1.0),
    "commit": lambda index: index.commit(NAME, SEGMENT, CHAIN, record(ASKED), rank=0, ranks=1),
    "touch": lambda index: index.touch(NAME, [SEGMENT], 1.0),
    "evict": lambda index: index.evict(NAME, [SEGMENT], delete_after_s=1.0, rule="bad"),
    "note": lambda index: index.note(NAME, CHAIN, now_s=1.0, window_s=60.0, sketch_bytes=4096),
    "sketch_bits": lambda index: index.sketch_bits(NAME, now_s=1.0, window_s=60.0, sketch_bytes=4096),
    "tell": lambda index: index.tell(NAME, [OUTCOME]),
    "register": lambda index: index.register(namespace(), expected_blocks=10),
    "namespaces": lambda index: index.namespaces(),
    "accounts": lambda index: index.accounts(),
    "usage": lambda index: index.usage(NAME),
    "get": lambda index: index.get(NAME, [SEGMENT]),
    "states": lambda index: index.states(NAME, [SEGMENT]),
    "order": lambda index: index.order(NAME, 9),
    "retained": lambda index: index.retained(NAME),
    "hottest": lambda index: index.hottest(NAME, 9),
    "quotas": lambda index: index.quotas(),
    "memory": lambda index: index.memory(),
    "cull": lambda index: index.cull(NAME, keep_bytes=0, delete_after_s=1.0, limit=9, rule="capacity"),
    "age_out": lambda index: index.age_out(NAME, 60, delete_after_s=1.0),
    "reapable": lambda index: index.reapable(NAME, 1.0, 9),
    "outcomes": lambda index: index.outcomes(NAME, 9),
    "last_position": lambda index: index.last_position(NAME),
    "seen": lambda index: index.seen(NAME),
    "ghosts": lambda index: index.ghosts(NAME),
    "session": lambda index: index.session(NAME, CHAT, [SEGMENT], 1.0, later(60.0), allowance=ALL),
    "owned": lambda index: index.owned(NAME, CHAT),
    "find_sessions": lambda index: index.find_sessions(NAME, [CHAT]),
    "owners": lambda index: index.owners(NAME, [SEGMENT]),
    "expire": lambda index: index.expire(NAME),
    "holdings": lambda index: index.holdings(NAME, 0),
    "forbid": lambda index: index.forbidden(NAME),
    "layout": lambda index: index.layout(NAME),
    "lay_out": lambda index: index.lay_out(namespace(), expected_blocks=10, layout="8"),
    "lay_over": lambda index: index.lay_over(NAME, Layout(), Layout("8")),
    "taken": lambda index: list(index.taken(NAME)),
    "take": lambda index: index.take(NAME, [SEGMENT]),
    "trashed": lambda index: list(index.trashed(NAME)),
    "reachable": lambda index: index.reachable(),
    "sweep": lambda index: index.sweep(NAME, 100),
    "erase": lambda index: index.erase(NAME, 100),
    "drain": lambda index: index.drain(NAME, delete_after_s=1.0, limit=100),
    "invalidate": lambda index: index.invalidate(NAME),
    "pin": lambda index: index.pin(NAME, [SEGMENT], most_bytes=1),
    "unpin": lambda index: index.unpin(NAME, [SEGMENT]),
    "unlist": lambda index: index.unlist(NAME, [SEGMENT]),
    "warnings": lambda index: index.warnings(),
}


def any_reply(chance: random.Random, depth: int = 0) -> Any:
    values: Sequence[Callable[[], Any]] = (
        lambda: None,
        lambda: chance.choice((0, 1, 2, 3, -1, 65538, -(1 << 40), 1 << 70)),
        lambda: chance.choice(
            (b"", b"1", b"x", b"\xff", SEGMENT, VALUE, bytes(10), bytes(1000), b"nan", b"inf")
        ),
        lambda: chance.choice((1.5, float("nan"), float("inf"), True, "text", "")),
        lambda: [any_reply(chance, depth + 1) for _ in range(chance.randrange(4))],
        lambda: [[SEGMENT] * chance.randrange(3), [any_reply(chance, 3)], [VALUE] * chance.randrange(3)],
        lambda: {b"a": any_reply(chance, depth + 1)},
        lambda: chance.choice((NoScriptError("x"), ResponseError("ERR x"), ValueError("x"), KeyError("x"))),
    )
    return chance.choice(values[:4] if depth > 2 else values)()


@pytest.mark.parametrize("verb", VERBS)
def test_any_reply_ends_in_an_answer_or_an_error_of_the_tree(verb: str) -> None:
    chance = random.Random(verb)
    index = answering(lambda: any_reply(chance))
    for _ in range(400 if verb not in SLOW else 40):
        try:
            answer = VERBS[verb](index)
        except KVStoreError:
            continue
        if verb == "match":
            _check_runs(answer)
        elif verb == "find":
            assert len(answer) == ASKED
            for place, run in enumerate(answer):
                assert run is None or (run.start, run.count, len(run.segment)) == (place, 1, 8)
                assert run is None or 0 <= run.slot < run.record.slots
        elif verb == "claim":
            assert isinstance(answer, Claim) and 0 <= answer.present <= ASKED
            assert 0 <= answer.at_s < 1 << 32
        elif verb == "commit":
            assert isinstance(answer, CommitState)
        elif verb == "note":
            assert isinstance(answer, int) and 0 <= answer <= ASKED
        elif verb == "register":
            assert answer == NAME


FAR = (-(1 << 62), -1, 3, 16_384, 1 << 62, b"9" * 5000, b"-1", b"1e400", float("inf"), float("nan"))


@pytest.mark.parametrize("verb", VERBS)
def test_no_number_makes_a_call_endless(verb: str) -> None:
    """Whatever it is that each answer says again: how many are left, how many went, how far it came."""
    for number in (0, 1, *FAR):
        for reply in (
            number,
            *([number] * size for size in range(1, 7)),
            [[], number, number],
            [[], [], number],
        ):
            calls = 0

            def said(reply: Any = reply) -> Any:
                nonlocal calls
                calls += 1
                assert calls < 50_000, f"{verb} goes on for ever if it is told {reply!r:.80}"
                return reply

            try:
                VERBS[verb](answering(said))
            except KVStoreError:
                pass


def test_no_namespace_lies_in_more_shards_than_there_are_tags() -> None:
    """Each is a call: 16,384 of them took minutes, and 4.6e18 don't end."""
    for shards in (257, 16_384, 1 << 62):
        with pytest.raises(DamagedIndex):
            answering(lambda shards=shards: b"%d" % shards).lay_out(  # type: ignore[misc]
                namespace(), expected_blocks=10, layout="8"
            )
        fields = [b"3", b"%d" % shards, b"kv", None, None]
        with pytest.raises(DamagedIndex):
            answering(lambda fields=fields: fields).layout(NAME)  # type: ignore[misc]
        assert not is_name(f"{NAME}.{shards}.0.0")
    assert is_name(f"{NAME}.256.255.0") and not is_name(f"{NAME}.8.8.0")


@pytest.mark.parametrize("evicted", [-(1 << 62), -1, 2, 1 << 62])
def test_no_more_segments_were_evicted_than_were_named(evicted: int) -> None:
    """-4.6e18 of 1: as many were given back to the bound on bad ones, under the lock that matches take."""
    index = answering(lambda: evicted)
    with pytest.raises(DamagedIndex):
        index.evict(NAME, [SEGMENT], delete_after_s=1.0, rule="bad")
    for verb in (index.unpin, index.unlist):
        with pytest.raises(DamagedIndex):
            verb(NAME, [SEGMENT])


def test_a_quota_that_can_not_be_is_none() -> None:
    told = {
        b"tenant/a": b"9" * 5000,
        b"tenant/b": b"-1",
        b"tenant/c": b"\xb2",
        b"tenant/d": b"7",
        b"tenant/e": b"9" * 20,
    }
    assert answering(lambda: told).quotas() == {"tenant/d": 7}


def _check_runs(runs: list[Run]) -> None:
    end = 0
    for run in runs:
        assert run.start == end and len(run.segment) == 8
        assert run.slot >= 0 and 0 < run.count <= run.record.slots - run.slot
        end += run.count
    assert end <= ASKED


@pytest.mark.parametrize(
    "failure", [TypeError("x"), IndexError("x"), NoScriptError("x"), MemoryError("x"), DamagedIndex("x")]
)
def test_what_never_raises_never_raises(failure: Exception) -> None:
    """Not even if the index breaks its contract."""

    class Broken(RedisIndex):
        pass

    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    for verb in ("register", "match", "find", "touch", "evict", "note", "tell"):
        setattr(Broken, verb, fail)
    index = Broken(RedisClient(Scripted(lambda: None), where="fake"))  # type: ignore[arg-type]
    settings = load_settings({"payloads": "memory://broken", "index": "memory://broken"}, environ={})
    backends = Backends(
        settings=settings,
        payloads=MemoryPayloads("broken"),
        index=index,
        maintenance=index,
        transfers=Transfers(settings.transfers),
        counters=Counters(),
        evidence=open_evidence(settings),
    )
    with Store(backends) as store:
        space = store.open(namespace(), block_bytes=1024)
        assert space.match(CHAIN).blocks == 0
        assert space.find(CHAIN) is None
        space.touch([SEGMENT])
        space.abandon(new_segment_id())
        store.quarantine.add(NamespaceId(space.id), SEGMENT)
        assert SEGMENT in store.quarantine
        assert space.note(CHAIN) == 0
        assert not space.tell([OUTCOME])
        space._register_quietly()
