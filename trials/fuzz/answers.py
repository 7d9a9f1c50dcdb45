"""Targets over what servers answer: a Redis, and an S3 server that lists. See trials.fuzz.targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import redis
from botocore.awsrequest import AWSResponse

from kvstore.admin.feed.wire import told_by
from kvstore.errors import KVStoreError
from kvstore.index.redis.client import RedisClient
from kvstore.index.redis.connections import _NO_LIBRARY_NAME, TcpConnection
from kvstore.index.redis.index import RedisIndex
from kvstore.index.scripted.values import AGREED_BYTES
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name, salt_id
from kvstore.payloads.s3.clients import Session
from kvstore.payloads.s3.store import S3Payloads
from kvstore.payloads.s3.strays import S3Strays
from schemas.records import unpack_record
from schemas.settings import S3Settings
from schemas.urls import s3_location
from trials.fuzz.formats import control, packed_record, sound

#: Bytes that separate the answers of a server, where one input is several.
NEXT = b"\n%%\n"

# ---- engines ----------------------------------------------------------------------------------------


def engines(data: bytes) -> None:
    """A batch of KV events."""
    for (block_hash, size), told in told_by(data):
        assert isinstance(block_hash, int | bytes) and isinstance(told.parent, int | bytes | None)
        assert size > 0
        assert isinstance(told.lora_name, str | None)
        assert len(told.tokens) <= 4 * len(data)


def engine_seeds() -> Iterator[bytes]:
    stored = {
        "type": "BlockStored", "block_hashes": [1, b"2" * 32], "parent_block_hash": 2**64 - 1,
        "token_ids": [7, 2**32 - 1], "block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": "a",
        "extra_keys": [["a"], None], "group_idx": 0,
    }  # fmt: skip
    gone = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    yield msgspec.msgpack.encode([1.5, [stored, gone, {"type": "AllBlocksCleared"}], 0])
    yield msgspec.msgpack.encode([1.5, []])


# ---- Redis ------------------------------------------------------------------------------------------


class _Wire:
    """A socket on which each request is answered by the next of some bytes, and then the line is dead."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        self._answers = answers
        self._unread = b""

    def sendall(self, _: Any) -> None:
        self._unread = next(self._answers, b"")

    def recv_into(self, buffer: Any, *_: Any) -> int:
        some, self._unread = self._unread[: len(buffer)], self._unread[len(buffer) :]
        memoryview(buffer)[: len(some)] = some
        return len(some)

    def recv(self, count: int, *_: Any) -> bytes:
        some, self._unread = self._unread[:count], self._unread[count:]
        return some

    def settimeout(self, _: Any) -> None: ...

    def setblocking(self, _: Any) -> None: ...

    def shutdown(self, _: Any) -> None: ...

    def close(self) -> None: ...


class _Wired(TcpConnection):
    """The index's connection, its parser included, over such a socket."""

    answers: Iterator[bytes] = iter(())

    def _connect(self) -> Any:
        return _Wire(self.answers)

    def can_read(self, *_: Any, **__: Any) -> bool:
        return False  # the wire has nothing that wasn't asked for


_NAME = NamespaceId("0123456789abcdef")
_DIGESTS = bytes(range(128))
_SALT = salt_id("hers")
#: More than an answer that is not repeated holds.
_MOST_LISTED = 10_000
_IDS = [SegmentId(bytes([i]) * 8) for i in range(3)]
_CLOCK = SimpleNamespace(now=1_763_000_000.0)


def _match(index: RedisIndex) -> None:
    end = 0
    for run in index.match(_NAME, _DIGESTS):
        assert run.start == end and run.count > 0 and len(run.segment) == 8
        assert 0 <= run.slot and run.slot + run.count <= run.record.slots
        end += run.count
        sound(run.record)
    assert end <= len(_DIGESTS) // 16, "more than was asked for"


def _find(index: RedisIndex) -> None:
    found = index.find(_NAME, _DIGESTS)
    assert len(found) == len(_DIGESTS) // 16
    for start, run in enumerate(found):
        if run is not None:
            assert (run.start, run.count, len(run.segment)) == (start, 1, 8)
            assert 0 <= run.slot < run.record.slots
            sound(run.record)


def _claim(index: RedisIndex) -> None:
    claim = index.claim(_NAME, _DIGESTS, _IDS[0], 1.0)
    assert type(claim.present) is int and type(claim.granted) is bool


def _commit(index: RedisIndex) -> None:
    record = unpack_record(packed_record(1))
    assert record is not None
    index.commit(_NAME, _IDS[0], _DIGESTS[:16], record, rank=0, ranks=1)


def _note(index: RedisIndex) -> None:
    noted = index.note(_NAME, _DIGESTS, now_s=_CLOCK.now, window_s=60.0, sketch_bytes=4096)
    assert type(noted) is int


def _of_salt(index: RedisIndex) -> None:
    for number, one in enumerate(index.of_salt(_NAME, _SALT)):
        assert number < _MOST_LISTED, "a listing without an end"
        sound(one.record)


def _holdings(index: RedisIndex) -> None:
    held = index.holdings(_NAME, 0)
    assert all(len(salt) == len(_SALT) and type(nbytes) is int for salt, nbytes in held.items())


#: What is asked, by the first byte of the input.
VERBS: tuple[Callable[[RedisIndex], Any], ...] = (
    _match,
    _find,
    _claim,
    _commit,
    _note,
    lambda index: index.touch(_NAME, _IDS, _CLOCK.now),
    lambda index: index.evict(_NAME, _IDS, delete_after_s=1.0, rule="admin"),
    lambda index: index.namespaces(),
    lambda index: index.accounts(),
    lambda index: index.reachable(),
    lambda index: index.usage(_NAME),
    lambda index: list(index.segments(_NAME)),
    lambda index: index.get(_NAME, _IDS),
    lambda index: index.states(_NAME, _IDS),
    lambda index: index.sample(_NAME, 3),
    lambda index: list(index.entries(_NAME)),
    lambda index: index.order(_NAME, 9),
    lambda index: index.hottest(_NAME, 9),
    lambda index: index.quotas(),
    lambda index: index.memory(),
    lambda index: index.events(_NAME),
    lambda index: index.outcomes(_NAME, 9),
    lambda index: index.seen(_NAME),
    lambda index: index.ghosts(_NAME),
    lambda index: index.last_position(_NAME),
    lambda index: index.reapable(_NAME, _CLOCK.now, 9),
    lambda index: index.cull(_NAME, keep_bytes=0, delete_after_s=1.0, limit=9, rule="capacity"),
    lambda index: index.sweep(_NAME, 9),
    lambda index: index.drain(_NAME, delete_after_s=1.0, limit=9),
    lambda index: index.erase(_NAME, 9),
    lambda index: index.reconcile(_NAME),
    lambda index: index.sketch_bits(_NAME, now_s=_CLOCK.now, window_s=60.0, sketch_bytes=4096),
    lambda index: index.warnings(),
    _of_salt,
    _holdings,
    lambda index: index.forbid(_NAME, _SALT),
    lambda index: index.forbidden(_NAME),
    lambda index: index.age_out(_NAME, 60, delete_after_s=1.0),
)


def replies(data: bytes) -> None:
    """Answers of a Redis, byte by byte, to one of VERBS: u8 verb, then the answers, `NEXT` between them."""
    verb = VERBS[(data[0] if data else 0) % len(VERBS)]
    _Wired.answers = iter(data[1:].split(NEXT))
    pool = redis.ConnectionPool(connection_class=_Wired, protocol=2, retry=_NO_RETRY, **_NO_LIBRARY_NAME)
    with RedisIndex(RedisClient(redis.Redis(connection_pool=pool), where="here")) as index:
        verb(index)


_NO_RETRY = redis.retry.Retry(redis.backoff.NoBackoff(), 0)


def resp(value: Any) -> bytes:
    """A value as Redis sends it."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    if isinstance(value, str):
        return value.encode() + b"\r\n"
    return b"*%d\r\n" % len(value) + b"".join(map(resp, value))


def _value(slots_: int, salt: bytes = b"") -> bytes:
    return b"4160:%d:" % slots_ + bytes(AGREED_BYTES) + packed_record(slots_, salt)


def reply_seeds() -> Iterator[bytes]:
    one, two, value = bytes([1]) * 8, bytes([2]) * 8, _value(4)
    entry, score = one + b"\x00\x01", b"29383333.99999"
    meta = [b"2", b"kv", b"default", b"1763000000.0", b"0", b"4160", b"1", b"4", b"0", b"0"]
    event = [
        b"op",
        b"commit",
        b"segment",
        one,
        b"first",
        b"f" * 16,
        b"last",
        b"l" * 16,
        b"depth",
        b"0",
        b"slots",
    ]
    event += [b"4", b"bytes", b"4160", b"rule", b""]
    outcome = [b"at", b"1763000000.5", b"request", b"r-1", b"op", b"match", b"asked", b"8", b"served", b"2"]
    outcome += [b"reason", b"absent", b"position", b"2", b"first", b"f" * 16]
    position = b"1763000000000-0"
    name = _NAME.encode()
    answers: list[list[Any]] = [
        [[[one, two], [4, (1 << 16) + 3], [value, value]]],
        [[[entry, None, *[None] * 6], [one], [value]]],
        [[2, 1]], [1], [3], [1], [1],
        [[name], [b"2", b'{"kind":"kv"}']],
        [[name], meta, 0],
        [[name], meta, 0],
        [[b"4160", b"1", b"4", b"0", b"0"]],
        [[b"0", [one, value, two, value]], [[score, None], [None, score]]],
        [[value, None, value], [[score, None], [None, score]]],
        [[1, 0, 4]],
        [2, [b"0", [one, value]], [[score], [None]]],
        [[b"10", None, [5], [[b"e" * 15, entry]]]],
        [[[one, score, two, score], [value, None]]],
        [[one, b"3.5"]],
        [[b"tenant/a", b"1024"]],
        [b"used_memory:1000\r\nmaxmemory:0\r\n"],
        [[[position, event]]],
        [[[position, outcome]]],
        [[b"requests", b"3", b"asked", b"12"], b"77"],
        [[b"3", b"12"]],
        [[[position, event]]],
        [[one, b"1762999999.00390625"]],
        [[[one, two], 0, 0]],
        [[3, 9, 2]],
        [[b"0", b"1"], [b"0", [one, value]], 1, [b"1", b"1"]],
        [[2, 0, 9], 1, 0],
        [[], [b"{}", b"kv", b"default"], [b"7", b"1", b"1", b"1", b"0", b"0"], [b"0", [one, value]],
         [b"4160", b"1", b"4", b"0", b"0", 0, [_SALT, 4160]], 1],
        [b"janitor-1"], [12, 40],
        [[b"maxmemory-policy", b"noeviction"], [b"hash-max-listpack-entries", b"128"],
         [b"hash-max-listpack-value", b"64"], [name], [b"2", b"{}"], b"listpack", None, None, None],
        [[[one, two], two], [_value(4, _SALT), value], [[score, None], [None, score]], [[], b""]],
        [[_SALT, b"4160", b"short", b"1"]],
        [b"1763000060"],
        [[_SALT, b"1763000060", b"", b"1763000120"]],
    ]  # fmt: skip
    for number, several in enumerate(answers):
        yield bytes([number]) + NEXT.join(map(resp, several))
    for text in ("-ERR what", "-NOSCRIPT none", "-MOVED 1 other:1", "-LOADING so", "-OOM full", "-NOPERM no"):
        yield b"\x00" + resp(text)
    yield b"\x02" + resp(None)


# ---- S3 ---------------------------------------------------------------------------------------------

_STATUS = (200, 200, 200, 403, 404, 429, 500, 503, 301)
#: More requests than this for a listing whose answers repeat themselves are one without an end.
_MOST_REQUESTS = 64
_PREFIX = "cache"


def listings(data: bytes) -> None:
    """Answers of an S3 server to listings of payloads (bit 0), or of strays, through boto3's own parser: u8
    which, u8 status, then the answers, `NEXT` between them; the last one is repeated."""
    what, status = (data + b"\x00\x00")[:2]
    answers = data[2:].split(NEXT)
    location = s3_location(f"s3://bucket/{_PREFIX}?endpoint=http://127.0.0.1:1")
    asked = 0

    def answer(request: Any, **_: Any) -> AWSResponse:
        nonlocal asked
        asked += 1
        assert asked <= _MOST_REQUESTS, "a listing without an end"
        body = answers[min(asked, len(answers)) - 1]
        code = _STATUS[status % len(_STATUS)] if asked == len(answers) else 200
        return AWSResponse(request.url, code, _Headers(), _Raw(body))

    _SERVER.answer = answer
    client = _client()
    with patch.object(Session, "boto", lambda self: client):
        store: Any = S3Payloads(location, _S3) if what & 1 else S3Strays(location, _S3)
        try:
            for one in store.list():
                assert isinstance(one.name, str) and type(one.nbytes) is int and one.nbytes >= 0
                assert math.isfinite(one.modified_s)
                assert not what & 1 or parse_payload_name(one.name)
        except KVStoreError as exc:
            assert not control(str(exc)), "an error with control characters"
            raise


_S3 = S3Settings.model_validate({"access_key_id": "a", "secret_access_key": "b"})
_SERVER = SimpleNamespace(answer=None, client=None)


class _Headers(dict[str, str]):
    """Headers as botocore reads them: none."""


class _Raw:
    """A body as botocore reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._body


def _client() -> Any:
    """A boto3 client that makes no connection: answers come from `_SERVER`."""
    if _SERVER.client is None:
        location = s3_location("s3://bucket/cache?endpoint=http://127.0.0.1:1")
        _SERVER.client = Session(location, _S3).boto()
        _SERVER.client.meta.events.register("before-send.s3", lambda **more: _SERVER.answer(**more))
    return _SERVER.client


def _listing(*keys: str, more: str = "") -> bytes:
    contents = "".join(
        f"<Contents><Key>{_PREFIX}/{key}</Key><LastModified>2026-11-22T10:00:00.000Z</LastModified>"
        f"<Size>4160</Size></Contents>"
        for key in keys
    )
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    truncated = "true" if more else "false"
    return (
        f'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>{truncated}</IsTruncated>'
        f"{token}{contents}</ListBucketResult>"
    ).encode()


def listing_seeds() -> Iterator[bytes]:
    payload = "0123456789abcdef/01/0123456789abcdef.0"
    yield b"\x01\x00" + NEXT.join((_listing(payload, more="next"), _listing(payload, "stray")))
    uploads = (
        "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
        f"<NextUploadIdMarker>u</NextUploadIdMarker><Upload><Key>{_PREFIX}/{payload}</Key><UploadId>u</UploadId>"
        "<Initiated>2026-11-22T10:00:00.000Z</Initiated></Upload></ListMultipartUploadsResult>"
    ).encode()
    last = uploads.replace(b">true<", b">false<")
    yield b"\x00\x00" + NEXT.join((_listing(f".probe/{'0' * 32}", "stray"), uploads, last))
    for number in range(3, len(_STATUS)):
        error = "<Error><Code>SlowDown</Code><Message>not now</Message></Error>"
        yield bytes([1, number]) + error.encode()
    yield b"\x01\x00" + _listing(payload, more="for ever")
