"""evict by a prompt, a request or a session: what goes, what is left because others use it, and what explain
says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.remove.reports import EvictReport
from kvstore.format.segment import Slot
from kvstore.index.port import Outcome
from kvstore.index.sessions import Hint
from kvstore.keys import NO_SALT, SessionId, block_key, digest, digests, namespace_id, salt_id, session_id
from schemas.namespace import Namespace
from tests.admin.conftest import BLOCK_SHAPE, Admin, Filled, fill, kv_slots, opened, snapshot
from tests.admin.curate.test_warm import HASHES, TOKENS, space

MINE = session_id(NO_SALT, "user-81/trip")


class World:
    """A prompt of nine blocks in three segments, beside other things."""

    def __init__(self, root: Path, url: str | None, session: SessionId) -> None:
        self.filled: Filled = fill(root / "cache", url)
        self.root = root
        self.kv: Namespace = space()
        self.name = namespace_id(self.kv)
        data = kv_slots(1)[0].data
        slots = [Slot(block_key(each), data, "BF16", BLOCK_SHAPE) for each in HASHES]
        for first, end in ((0, 3), (3, 6), (6, 9)):
            self.filled.save(self.kv, slots[first:end], depth=first, session=session)
        self.hashes = root / "hashes.json"
        self.hashes.write_text(json.dumps([one.hex() for one in HASHES]))
        self.tokens = root / "tokens.json"
        self.tokens.write_text(json.dumps(TOKENS))

    def stored(self) -> list[bool]:
        with opened(self.filled) as index:
            return [one is not None for one in index.find(self.name, digests(HASHES))]

    def touch(self, block: int, now_s: float) -> None:
        with opened(self.filled) as index:
            [run] = index.find(self.name, digests(HASHES[block : block + 1]))
            assert run is not None
            index.touch(self.name, [run.segment], now_s)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("redis_url") if request.param == "redis" else None


@pytest.fixture
def world(url: str | None, tmp_path: Path) -> World:
    return World(tmp_path, url, SessionId(b""))


@pytest.fixture
def talked(url: str | None, tmp_path: Path) -> World:
    """A session shares the head of its prompt with another."""
    made = World(tmp_path, url, MINE)
    with opened(made.filled) as index:
        [run] = index.find(made.name, digests(HASHES[:1]))
        assert run is not None
        index.session(made.name, session_id(NO_SALT, "another"), [run.segment], time.time())
    return made


def evict(admin: Admin, world: World, *words: str) -> EvictReport:
    ran = admin("evict", *words, "--json", *world.filled.options)
    assert ran.code == 0, ran.err
    return EvictReport.model_validate_json(ran.out)


def why(admin: Admin, world: World, block: int) -> tuple[str, str, str]:
    """The reason that explain gives for a block first."""
    wanted = digest(block_key(HASHES[block])).hex()
    found = admin("explain", "--digest", wanted, "--json", *world.filled.options).json
    first = found["blocks"][0]["findings"][0]
    return first["cause"], first["rule"], first["text"]


def test_a_whole_prompt(admin: Admin, world: World) -> None:
    before = snapshot(world.filled)
    words = ("--tokens", str(world.tokens), "--seed", "7", "--whole")
    planned = evict(admin, world, *words)
    assert (planned.applied, planned.planned.segments, planned.planned.blocks) == (False, 3, 9)
    assert planned.shared.segments == 0
    assert snapshot(world.filled) == before
    done = evict(admin, world, *words, "--apply")
    assert (done.evicted_segments, [one.namespace for one in done.lines]) == (3, [world.name])
    assert world.stored() == [False] * 9
    assert len(world.filled.payload_files()) == 8, "the payloads stay for their grace time"
    with opened(world.filled) as index:
        assert index.usage(namespace_id(world.filled.kv)).segments == 3, "others stay"
        assert {one.rule for one in index.events(world.name) if one.op == "evict"} == {"named"}
    cause, rule, text = why(admin, world, 4)
    assert (cause, rule) == ("evicted", "named")
    assert "deleted by name" in text
    again = evict(admin, world, *words)
    assert again.planned.segments == 0


def test_without_a_session_the_last_segment_goes_and_no_more_by_another_run(
    admin: Admin, world: World
) -> None:
    """Others may have the rest in their engines' memory, and use it untold."""
    planned = evict(admin, world, "--hashes", str(world.hashes))
    assert (planned.planned.segments, planned.shared.segments, planned.shared.blocks) == (1, 2, 6)
    assert any("--whole" in one for one in planned.remarks)
    text = admin("evict", "--hashes", str(world.hashes), *world.filled.options).out
    assert "shared" in text and "--whole" in text
    evict(admin, world, "--hashes", str(world.hashes), "--apply")
    assert world.stored() == [True] * 6 + [False] * 3
    again = evict(admin, world, "--hashes", str(world.hashes), "--apply")
    assert (again.planned.segments, again.shared.segments) == (0, 2)
    whole = evict(admin, world, "--hashes", str(world.hashes), "--whole", "--apply")
    assert (whole.evicted_segments, whole.shared.segments) == (2, 0)
    assert world.stored() == [False] * 9


def test_of_a_prompt_whose_end_is_not_stored_all_is_shared(admin: Admin, talked: World) -> None:
    """Another prompt, that only begins like what is stored."""
    longer = talked.root / "longer.json"
    longer.write_text(json.dumps([one.hex() for one in (*HASHES, bytes(32))]))
    planned = evict(admin, talked, "--hashes", str(longer))
    assert (planned.planned.segments, planned.shared.segments) == (0, 3)
    assert evict(admin, talked, "--hashes", str(longer), "--whole").planned.segments == 3


def test_what_a_session_owns_is_its_prompts_own(admin: Admin, talked: World) -> None:
    # Used later than the rest, and by the session itself.
    with opened(talked.filled) as index:
        [run] = index.find(talked.name, digests(HASHES[3:4]))
        assert run is not None
        index.session(talked.name, MINE, [run.segment], time.time() + 120)
    planned = evict(admin, talked, "--hashes", str(talked.hashes))
    assert (planned.planned.segments, planned.shared.segments) == (2, 1)


def test_a_session_goes_with_what_only_it_has_used(admin: Admin, talked: World) -> None:
    with opened(talked.filled) as index:
        index.session(talked.name, MINE, [], time.time(), Hint(priority="low"))
    planned = evict(admin, talked, "--session", "user-81/trip")
    assert (planned.applied, planned.planned.segments) == (False, 2)
    with opened(talked.filled) as index:
        assert index.find_sessions(talked.name, [MINE]) != [None]
    done = evict(admin, talked, "--session", MINE.hex()[:9], "--apply")
    assert done.evicted_segments == 2
    assert talked.stored() == [True] * 3 + [False] * 6
    assert why(admin, talked, 3)[:2] == ("evicted", "named")
    with opened(talked.filled) as index:
        assert index.find_sessions(talked.name, [MINE]) == [None]
        assert index.find_sessions(talked.name, [session_id(NO_SALT, "another")]) == [None]
    gone = admin("evict", "--session", "user-81/trip", *talked.filled.options)
    assert (gone.code, "is no session" in gone.err) == (1, True)


def test_a_salted_session_is_another(admin: Admin, talked: World) -> None:
    salt = talked.root / "salt"
    salt.write_text("hers")
    ran = admin("evict", "--session", "user-81/trip", "--salt-file", str(salt), *talked.filled.options)
    assert ran.code == 1
    with opened(talked.filled) as index:
        hers = session_id(salt_id("hers"), "user-81/trip")
        index.session(talked.name, hers, [], time.time(), Hint(priority="low"))
    report = evict(admin, talked, "--session", "user-81/trip", "--salt-file", str(salt), "--apply")
    assert report.planned.segments == 0
    with opened(talked.filled) as index:
        assert index.find_sessions(talked.name, [hers]) == [None]


def test_a_request_goes_with_what_it_found_missing(admin: Admin, world: World) -> None:
    with opened(world.filled) as index:
        missing = digests(HASHES[3:])
        told = [
            Outcome(time.time(), "chatcmpl-1", "match", 9, 3, "absent", 3, missing),
            Outcome(time.time(), "chatcmpl-12", "match", 9, 0, "absent", 0, digests(HASHES)),
        ]
        index.tell(world.name, told)
    planned = evict(admin, world, "--request", "chatcmpl-1")
    assert (planned.planned.segments, planned.planned.blocks) == (1, 3)
    evict(admin, world, "--request", "chatcmpl-1", "--apply")
    # Nothing leads to what comes behind.
    assert world.stored() == [True] * 3 + [False] * 3 + [True] * 3
    with opened(world.filled) as index:
        assert sum(run.count for run in index.match(world.name, digests(HASHES))) == 3
    assert why(admin, world, 3)[:2] == ("evicted", "named")
    for request, said in (("chatcmpl-1", "is not stored"), ("nobody", "nothing is remembered")):
        ran = admin("evict", "--request", request, *world.filled.options)
        assert (ran.code, said in ran.err) == (1, True), ran.err


def test_pinned_segments_go_only_if_that_is_said(admin: Admin, world: World) -> None:
    admin("pin", "--namespace", world.name, "--depth", "1", "--apply", *world.filled.options)
    planned = evict(admin, world, "--hashes", str(world.hashes), "--whole")
    assert (planned.planned.segments, planned.pinned.segments) == (2, 1)
    assert evict(admin, world, "--hashes", str(world.hashes), "--whole", "--pinned").planned.segments == 3


def test_a_session_whose_segments_are_pinned_stays_ended(admin: Admin, talked: World) -> None:
    admin("pin", "--namespace", talked.name, "--depth", "9", "--apply", *talked.filled.options)
    with opened(talked.filled) as index:
        index.session(talked.name, MINE, [], time.time(), Hint(end=True))
    done = evict(admin, talked, "--session", "user-81/trip", "--apply")
    assert (done.evicted_segments, done.pinned.segments) == (0, 2)
    assert any("still remembered" in one for one in done.remarks)
    with opened(talked.filled) as index:
        [one] = index.find_sessions(talked.name, [MINE])
        assert one is not None and one.state == "ended"
    done = evict(admin, talked, "--session", "user-81/trip", "--pinned", "--apply")
    assert done.evicted_segments == 2 and not any("still remembered" in one for one in done.remarks)
    with opened(talked.filled) as index:
        assert index.find_sessions(talked.name, [MINE]) == [None]


def test_of_a_request_only_what_it_lacked_goes(admin: Admin, world: World) -> None:
    name = "a" * 200
    with opened(world.filled) as index:
        now, blocks = time.time(), digests(HASHES[3:])
        told = [
            # It lacked the last segment, and had others for another reason.
            Outcome(now, name, "match", 9, 6, "absent", 6, digests(HASHES[6:])),
            Outcome(now, name, "match", 9, 3, "computing_is_faster", 3, blocks),
            Outcome(now, name, "save", 9, 3, "held", 3, blocks),
            # What is stored now is an hour older than this one's miss.
            Outcome(now + 3600, "later", "match", 9, 3, "absent", 3, blocks),
        ]
        index.tell(world.name, told)
    planned = evict(admin, world, "--request", name)
    assert (planned.planned.segments, planned.planned.blocks, planned.shared.segments) == (1, 3, 0)
    planned = evict(admin, world, "--request", "later")
    assert (planned.planned.segments, planned.shared.segments) == (0, 1)
    assert evict(admin, world, "--request", "later", "--whole").planned.segments == 1


@contextmanager
def engine(answer: Any, status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Something that answers what is posted to it, as vLLM's server does, and tells its release."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            body = json.dumps(answer() if callable(answer) else answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"version": "0.32.0"}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_prompts_text_is_what_an_engine_makes_of_it(admin: Admin, world: World) -> None:
    text, chat = world.root / "letter.txt", world.root / "chat.json"
    text.write_text("Dear Anna")
    messages = [{"role": "user", "content": "Dear Anna"}]
    chat.write_text(json.dumps({"messages": messages}))
    with engine({"count": len(TOKENS), "max_model_len": 4096, "tokens": TOKENS}) as (where, asked):
        for file in (text, chat):
            words = ("--prompt", str(file), "--engine", where, "--seed", "7", "--whole")
            assert evict(admin, world, *words).planned.segments == 3
    assert asked == [("/tokenize", {"prompt": "Dear Anna"}), ("/tokenize", {"messages": messages})]
    gone = admin("evict", "--prompt", str(text), "--engine", where, *world.filled.options)
    assert (gone.code, "can't be asked" in gone.err) == (5, True)


@pytest.mark.parametrize(("answer", "status"), [({"tokens": None}, 200), ([1], 200), ({}, 404)])
def test_what_is_no_engine_is_told_so(admin: Admin, world: World, answer: Any, status: int) -> None:
    text = world.root / "letter.txt"
    text.write_text("Dear Anna")
    with engine(answer, status) as (where, _):
        ran = admin("evict", "--prompt", str(text), "--engine", where, *world.filled.options)
    assert (ran.code, "token" in ran.err) == (2, True), ran.err
    assert admin("evict", "--prompt", str(text), "--engine", "here", *world.filled.options).code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "a", "--session", "b"],
        ["--request", "a", "--keep", "1GiB"],
        ["--session", "a", "--whole"],
        ["--hashes", "a", "--seed", "7"],
        ["--request", "a", "--salt-file", "b"],
        ["--tokens", "-", "--salt-file", "-"],
    ],
)
def test_wrong_usage_says_what_to_give(admin: Admin, filled: Filled, words: list[str]) -> None:
    assert admin("evict", *words, *filled.options).code == 2
