"""An export of prompts, with an engine that saves what it is asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore.format.segment import Slot
from kvstore.keys import block_key
from kvstore.rules.hashing import DEFAULT_SEED, block_hashes, root_digest
from schemas.namespace import Namespace
from tests.admin.conftest import BLOCK_SHAPE, Admin, Filled, kv_space

#: Token ids that the engine makes of a prompt, which has two full blocks.
TOKENS = list(range(40))
SPACE = kv_space(hash_root=root_digest(DEFAULT_SEED))


def blocks(tokens: Sequence[int], seed: str = DEFAULT_SEED) -> list[Slot]:
    """What an engine saves of these tokens."""
    hashes = block_hashes(tokens, algorithm="sha256", block_tokens=16, seed=seed, salt="")
    data = memoryview(bytes(BLOCK_SHAPE[0] * BLOCK_SHAPE[1] * BLOCK_SHAPE[2] * BLOCK_SHAPE[3] * 2))
    return [Slot(block_key(one), data, "BF16", BLOCK_SHAPE) for one in hashes]


class Engine:
    """Something that answers as vLLM's server does, and saves into a cache when it is asked."""

    def __init__(self, root: Path) -> None:
        folder = root / "cache"
        self.cache = Filled(
            folder, ["--payloads", f"file://{folder}"], {"payloads": f"file://{folder}"}, kv=SPACE
        )
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.tokens = TOKENS
        #: What is saved at each request, one after the other.
        self.saves: list[Callable[[], None]] = [lambda: self.cache.save(SPACE, blocks(self.tokens))]
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/version":
            return {"version": "0.32.0"}
        self.asked.append((path, body))
        if self.saves:
            self.saves.pop(0)()
        told = {"prompt_token_ids": self.tokens}
        return told if "messages" in body else {"choices": [told]}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine(tmp_path)
    monkeypatch.setattr("kvstore.admin.archive.asked._STILL_S", 0.3)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond({})

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body: dict[str, Any]) -> None:
            refused = "refused" in json.dumps(body)
            told = {"message": "no such \x1b template"} if refused else made.answer(self.path, body)
            self.send_response(400 if refused else 200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def words(engine: Engine, prompts: list[dict[str, Any]], *more: str) -> list[str]:
    """The export of prompts that a file beside the cache names."""
    root = engine.cache.folder.parent
    (root / "prompts.json").write_text(json.dumps({"prompts": prompts}))
    given = ["--prompts", str(root / "prompts.json"), "--engine", engine.url, "--to", str(root / "base.tar")]
    return ["export", *given, *more, *engine.cache.options]


def test_what_an_engine_saves_of_a_prompt_is_exported(engine: Engine, admin: Admin, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    message = {"role": "system", "content": "Be kind."}
    prompts = [
        {"name": "ids", "tokens": TOKENS},
        {"name": "text", "text": "You are kind."},
        {"name": "chat", "messages": [message], "tools": [tool]},
    ]
    ran = admin(*words(engine, prompts), "--json")
    assert ran.code == 0, ran.err
    lines = [(one["name"], one["tokens"], one["blocks"]) for one in ran.json["pack"]["prompts"]]
    assert lines == [("ids", 40, 2), ("text", 40, 2), ("chat", 40, 2)]
    assert (ran.json["pack"]["engine"], ran.json["exported"]["blocks"]) == ("0.32.0", 2)
    least = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
    assert engine.asked == [
        ("/v1/completions", {"prompt": TOKENS} | least),
        ("/v1/completions", {"prompt": "You are kind."} | least),
        (
            "/v1/chat/completions",
            {"messages": [message], "tools": [tool], "add_generation_prompt": False} | least,
        ),
    ]
    there = ["--payloads", f"file://{tmp_path / 'there'}"]
    done = admin("import", str(tmp_path / "base.tar"), "--json", *there)
    assert (done.code, [one["loadable"] for one in done.json["pack"]["prompts"]]) == (0, [32, 32, 32])


def test_what_is_not_saved_at_once_is_asked_for_again(engine: Engine, admin: Admin) -> None:
    save = engine.saves.pop()
    engine.saves += [lambda: engine.cache.save(SPACE, blocks(TOKENS)[:1]), lambda: None, save]
    assert admin(*words(engine, [{"name": "a", "text": "b"}])).code == 0
    assert [body["prompt"] for _, body in engine.asked] == ["b", TOKENS, TOKENS]


def test_a_prompt_of_which_not_all_is_stored_is_refused(engine: Engine, admin: Admin, tmp_path: Path) -> None:
    engine.saves = [lambda: engine.cache.save(SPACE, blocks(TOKENS)[:1])]
    ran = admin(*words(engine, [{"name": "a", "text": "b"}]))
    assert ran.code == 1 and "prompt 'a': only 16 of 32 tokens are stored" in ran.err
    assert len(engine.asked) == 5 and not (tmp_path / "base.tar").exists()


def test_a_prompt_shorter_than_a_block_is_refused(engine: Engine, admin: Admin) -> None:
    engine.cache.save(SPACE, blocks(TOKENS))
    engine.tokens, engine.saves = TOKENS[:15], []
    ran = admin(*words(engine, [{"name": "a", "text": "b"}]))
    assert ran.code == 1 and "prompt 'a' has 15 tokens, fewer than a block" in ran.err


def test_of_several_namespaces_the_engine_s_is_named(engine: Engine, admin: Admin) -> None:
    other: Namespace = SPACE.model_copy(update={"kv_dtype": "fp8"})
    engine.cache.save(other, blocks(TOKENS))
    ran = admin(*words(engine, [{"name": "a", "text": "b"}]))
    assert ran.code == 1 and engine.cache.kv_id in ran.err and "name the engine's" in ran.err
    ran = admin(*words(engine, [{"name": "a", "text": "b"}], engine.cache.kv_id[:8]), "--json")
    assert (ran.code, ran.json["namespaces"]) == (0, [engine.cache.kv_id])


def test_an_engine_with_a_seed_of_its_own(engine: Engine, admin: Admin) -> None:
    seeded = kv_space(hash_root=root_digest("7"))
    engine.saves = [lambda: engine.cache.save(seeded, blocks(TOKENS, "7"))]
    prompt = [{"name": "a", "text": "b"}]
    ran = admin(*words(engine, prompt))
    assert ran.code == 2 and "--seed" in ran.err
    assert admin(*words(engine, prompt), "--seed", "7").code == 0


def test_an_engine_that_saves_elsewhere(engine: Engine, admin: Admin) -> None:
    engine.saves = []
    ran = admin(*words(engine, [{"name": "a", "text": "b"}]))
    assert ran.code == 1 and "no engine has registered one with this index yet" in ran.err


def test_what_an_engine_refuses_is_said(engine: Engine, admin: Admin) -> None:
    ran = admin(*words(engine, [{"name": "a", "text": "refused"}]))
    assert ran.code == 2 and "refuses /v1/completions: HTTP Error 400" in ran.err
    assert "no such \\u001b template" in ran.err


def test_an_engine_that_is_not_there(engine: Engine, admin: Admin) -> None:
    ran = admin(*words(engine, [{"name": "a", "text": "b"}]), "--engine", "http://127.0.0.1:1")
    assert ran.code == 5 and "can't be asked for /version" in ran.err


def test_nothing_is_computed_for_an_archive_that_is_there(
    engine: Engine, admin: Admin, tmp_path: Path
) -> None:
    (tmp_path / "base.tar").write_bytes(b"")
    ran = admin(*words(engine, [{"name": "a", "text": "b"}]))
    assert ran.code == 1 and "exists; --force overwrites it" in ran.err
    assert not engine.asked


@pytest.mark.parametrize(
    "more", [["--depth", "1"], ["--segment", "ab"], ["--max-bytes", "1GiB"], ["--dry-run"]]
)
def test_prompts_choose_what_is_exported(engine: Engine, admin: Admin, more: list[str]) -> None:
    ran = admin(*words(engine, [{"name": "a", "text": "b"}], *more))
    assert ran.code == 2 and "--prompts goes without" in ran.err
