"""An export of prompts, with an engine that saves what it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.tokenizer import release
from kvstore.errors import ConfigError
from kvstore.format.segment import Slot
from kvstore.keys import block_key, namespace_id
from kvstore.rules.hashing import DEFAULT_SEED, block_hashes, root_digest
from tests.admin.conftest import BLOCK_SHAPE, Admin, Filled, Ran, kv_space
from tests.admin.remove.test_named import engine

#: Token ids that the engine makes of a prompt, which has two full blocks.
TOKENS = list(range(40))
SPACE = kv_space(hash_root=root_digest(DEFAULT_SEED))
PROMPT = {"name": "a", "text": "b"}
LEAST = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}


def blocks(tokens: Sequence[int] = TOKENS, seed: str = DEFAULT_SEED) -> list[Slot]:
    """What an engine saves of these tokens."""
    hashes = block_hashes(tokens, algorithm="sha256", block_tokens=16, seed=seed, salt="")
    data = memoryview(bytes(BLOCK_SHAPE[0] * BLOCK_SHAPE[1] * BLOCK_SHAPE[2] * BLOCK_SHAPE[3] * 2))
    return [Slot(block_key(one), data, "BF16", BLOCK_SHAPE) for one in hashes]


class Exports:
    """Exports prompts of a cache, of which an engine saves something at each request, one after the other."""

    def __init__(self, root: Path, admin: Admin) -> None:
        url = f"file://{root / 'cache'}"
        self.cache = Filled(root / "cache", ["--payloads", url], {"payloads": url}, kv=SPACE)
        self.archive, self._file, self._admin = root / "base.tar", root / "prompts.json", admin
        self.asked: list[tuple[str, Any]] = []
        self.saves: list[Callable[[], None]] = [lambda: self.cache.save(SPACE, blocks())]

    def __call__(
        self, *words: str, prompts: Sequence[Any] = (PROMPT,), tokens: Any = TOKENS, status: int = 200
    ) -> Ran:
        self._file.write_text(json.dumps({"prompts": prompts}))

        def answer() -> dict[str, Any]:
            if self.saves:
                self.saves.pop(0)()
            return {"prompt_token_ids": tokens, "choices": [{"prompt_token_ids": tokens}]}

        with engine(answer, status) as (url, self.asked):
            given = [
                "--prompts",
                str(self._file),
                "--engine",
                url,
                "--to",
                str(self.archive),
                *words,
                "--json",
            ]
            return self._admin("export", *given, *self.cache.options)


@pytest.fixture
def exports(tmp_path: Path, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> Exports:
    monkeypatch.setattr("kvstore.admin.archive.asked._STILL_S", 0.3)
    return Exports(tmp_path, admin)


def test_what_an_engine_saves_of_a_prompt_is_exported(exports: Exports, admin: Admin, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "Be kind."}], "tools": [{"type": "function"}]}
    ran = exports(prompts=[{"name": "ids", "tokens": TOKENS}, PROMPT, {"name": "chat", **chat}])
    assert ran.code == 0, ran.err
    lines = [(one["name"], one["tokens"], one["blocks"]) for one in ran.json["pack"]["prompts"]]
    assert lines == [("ids", 40, 2), ("a", 40, 2), ("chat", 40, 2)]
    assert (ran.json["pack"]["engine"], ran.json["exported"]["blocks"]) == ("0.32.0", 2)
    assert exports.asked == [
        ("/v1/completions", {"prompt": TOKENS} | LEAST),
        ("/v1/completions", {"prompt": "b"} | LEAST),
        ("/v1/chat/completions", chat | {"add_generation_prompt": False} | LEAST),
    ]
    there = ["--payloads", f"file://{tmp_path / 'there'}"]
    done = admin("import", str(exports.archive), "--json", *there)
    assert (done.code, [one["loadable"] for one in done.json["pack"]["prompts"]]) == (0, [32, 32, 32])


def test_what_is_not_saved_at_once_is_asked_for_again(exports: Exports) -> None:
    save = exports.saves.pop()
    exports.saves += [lambda: exports.cache.save(SPACE, blocks()[:1]), lambda: None, save]
    assert exports().code == 0
    assert [body["prompt"] for _, body in exports.asked] == ["b", TOKENS, TOKENS]


def test_a_prompt_of_which_not_all_is_stored_is_refused(exports: Exports) -> None:
    exports.saves = [lambda: exports.cache.save(SPACE, blocks()[:1])]
    ran = exports()
    assert ran.code == 1 and "prompt 'a': only 16 of 32 tokens are stored" in ran.err
    assert len(exports.asked) == 5 and not exports.archive.exists()


def test_of_several_namespaces_the_engine_s_is_named(exports: Exports) -> None:
    exports.cache.save(SPACE.model_copy(update={"kv_dtype": "fp8"}), blocks())
    ran = exports()
    assert ran.code == 1 and exports.cache.kv_id in ran.err and "name the engine's" in ran.err
    ran = exports(exports.cache.kv_id[:8])
    assert (ran.code, ran.json["namespaces"]) == (0, [exports.cache.kv_id])


def test_an_engine_with_a_seed_of_its_own(exports: Exports) -> None:
    seeded = kv_space(hash_root=root_digest("7"))
    exports.saves = [lambda: exports.cache.save(seeded, blocks(seed="7"))]
    # Another namespace may hold the same prompt.
    exports.cache.save(SPACE, blocks())
    ran = exports()
    assert ran.code == 2 and "--seed" in ran.err
    assert exports(namespace_id(seeded), "--seed", "7").code == 0


@pytest.mark.parametrize(
    ("words", "answer", "code", "said"),
    [
        ([], {"tokens": TOKENS[:15]}, 1, "prompt 'a' has 15 tokens, fewer than a block"),
        ([], {"tokens": None}, 2, "answers /v1/completions without token ids"),
        ([], {"status": 400}, 2, 'refuses /v1/completions: HTTP Error 400: Bad Request {"prompt_token_ids"'),
        (["--engine", "http://127.0.0.1:1"], {}, 5, "can't be asked for /version"),
        (
            ["--index", "sqlite:////nowhere/index.sqlite"],
            {},
            1,
            "no engine has registered one with this index yet",
        ),
        (["--depth", "1"], {}, 2, "--prompts goes without"),
        (["--dry-run"], {}, 2, "--prompts goes without"),
    ],
)
def test_what_can_t_be_exported(
    exports: Exports, words: list[str], answer: dict[str, Any], code: int, said: str
) -> None:
    ran = exports(*words, **answer)
    assert ran.code == code and said in ran.err
    assert not exports.archive.exists()


def test_nothing_is_computed_for_an_archive_that_is_there(exports: Exports) -> None:
    exports.archive.write_bytes(b"")
    ran = exports()
    assert ran.code == 1 and "exists; --force overwrites it" in ran.err
    assert not exports.asked


@pytest.mark.parametrize("url", ["http://me:hunter2@127.0.0.1:9", "ftp://me:hunter2@host"])
def test_a_password_in_the_engine_s_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        release(url)
    assert "hunter2" not in str(caught.value)
