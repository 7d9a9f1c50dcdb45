"""A Redis that says how many elements it will send, and lies: nothing is made ready for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import hiredis
import pytest
import redis

from kvstore.errors import TransientError
from kvstore.index.redis.counted import CountedReader
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import namespace_id
from schemas.settings import RedisSettings
from tests.index.contract.chains import chain, namespace
from tests.waiting import PATIENCE_S

#: Of each kind that hiredis makes ready for. On RESP3's pushes it spends most: they take 8 GB at once.
KINDS = b"*~>%|"
NOT_YET = object()


def reader() -> CountedReader:
    return CountedReader(hiredis.Reader(notEnoughData=NOT_YET, protocolError=redis.InvalidResponse))


def feed(into: CountedReader, pieces: list[bytes]) -> list[Any]:
    """What comes out of these pieces, as redis-py reads: it asks after every piece."""
    found = []
    for piece in pieces:
        into.feed(bytearray(piece) + b"left from before", 0, len(piece))
        while (reply := into.gets()) is not NOT_YET:
            found.append(reply)
    return found


def in_two(data: bytes) -> Iterator[list[bytes]]:
    """All ways to cut it, and byte by byte."""
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data[at : at + 1] for at in range(len(data))]


@pytest.fixture(params=[bytes([kind]) for kind in KINDS], ids=[chr(kind) for kind in KINDS])
def answer(request: pytest.FixtureRequest) -> bytes:
    return bytes(request.param) + b"1000000000\r\n"


def test_a_forged_number_ends_the_call_at_once(answer: bytes) -> None:
    """Without it the call would wait for its deadline, and then the list be taken down."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            with suppress(OSError):
                client, _ = listener.accept()
                with client:
                    client.recv(1 << 16)
                    client.sendall(answer)
                    client.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        patient = RedisSettings(timeout_s=PATIENCE_S)
        with RedisIndex.from_settings(f"redis://127.0.0.1:{port}/0", patient) as index:
            with pytest.raises(TransientError, match="an answer of 1000000000 elements"):
                index.match(namespace_id(namespace()), chain(8))
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("before", [b"", b"*2\r\n:1\r\n", b"*1\r\n*1\r\n*3\r\n$4\r\nabcd\r\n", b"+OK\r\n"])
def test_wherever_it_stands_and_however_it_comes(answer: bytes, before: bytes) -> None:
    for pieces in in_two(before + answer):
        with pytest.raises(redis.InvalidResponse, match="1000000000 elements"):
            feed(reader(), pieces)


def test_a_string_that_looks_like_it_is_a_string(answer: bytes) -> None:
    text = b"a\r\n" + answer + answer + b"*12"
    replies = b"*2\r\n$%d\r\n%b\r\n:7\r\n$%d\r\n%b\r\n+OK\r\n" % (len(text), text, len(answer), answer)
    for pieces in in_two(replies):
        one = reader()
        assert feed(one, pieces) == [[text, 7], answer, b"OK"]
        assert not one.has_data()


def test_what_an_honest_server_sends_is_read() -> None:
    honest = b"*999999\r\n" + b":1\r\n" * 999_999
    pieces = [honest[at : at + 65536] for at in range(0, len(honest), 65536)]
    assert feed(reader(), pieces) == [[1] * 999_999]
