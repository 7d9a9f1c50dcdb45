"""A pack that one engine has computed, applied to an empty store, serves another engine's first request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.pack import build as building
from kvstore.admin.pack.pack import Intended, apply, inspect
from kvstore.admin.pack.prompts import read_prompts
from kvstore.admin.progress import Silent
from kvstore.build import load_settings
from schemas.settings import Settings
from tests.e2e import engine as harness
from tests.e2e.engine import Engine
from tests.e2e.sharing import BLOCK, check_store, extended, full_blocks, prompt

pytestmark = pytest.mark.engine

#: Prompts of a pack: one shares the beginning of another, and one has a chat template's words around it.
AGENT = prompt(960, 90)
TOOLS = extended(AGENT, 330, 91)
WORDS = " ".join(f"w{20 + i % 400}" for i in range(150))
TEMPLATE = (
    # The server names what a definition leaves out, and drops what it knows nothing of.
    "{% for tool in tools or [] %}{{ tool.function.name }} "
    "{% if tool.function.description is none %}w301 {% endif %}"
    "{% if tool.function.other is defined %}w302 {% endif %}{% endfor %}"
    "{{ mark }} "
    "{% for message in messages %}w11 {{ message.content }} w12 {% endfor %}"
    "{% if add_generation_prompt %}w13{% endif %}"
)


def words_of(model: Path, **more: str) -> list[str]:
    """What follows `vllm serve` for the engines of these tests."""
    arguments = harness._ARGUMENTS
    words = [
        str(model),
        "--enforce-eager",
        "--compilation-config",
        json.dumps(arguments["compilation_config"]),
    ]
    for name in ("dtype", "max_model_len", "block_size", "kv_cache_memory_bytes", "seed"):
        words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    return [
        *words,
        "--distributed-executor-backend",
        "uni",
        *(word for pair in more.items() for word in pair),
    ]


def test_the_first_request_of_a_new_engine_is_loaded(
    image_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in harness._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "words.txt").write_text(WORDS)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    prompts = [
        {"name": "agent", "tokens": AGENT["prompt_token_ids"]},
        {"name": "agent/tools", "tokens": TOOLS["prompt_token_ids"]},
        {"name": "words", "file": "words.txt"},
        {
            "name": "chat",
            "messages": [{"role": "system", "file": "words.txt"}],
            "tools": [{"type": "function", "function": {"name": "w300", "other": 1}}],
        },
    ]
    chat = {
        "--chat-template": str(tmp_path / "chat.jinja"),
        "--chat-template-content-format": "string",
        # Words of one replica of several.
        "--data-parallel-size": "2",
        "--data-parallel-rank": "1",
        "--default-chat-template-kwargs": json.dumps({"mark": "w303"}),
    }
    (tmp_path / "prompts.json").write_text(json.dumps({"prompts": prompts}))
    made = building.build(
        read_prompts(tmp_path / "prompts.json"),
        words_of(image_model, **chat),
        Settings(payloads="memory://pack", index="memory://pack"),
        str(tmp_path / "base.tar"),
        progress=Silent(),
    )
    assert made.pack is not None and made.export.ended == "complete"
    assert {path.name for path in tmp_path.iterdir()} == {
        "base.tar", "prompts.json", "words.txt", "chat.jinja",
    }  # fmt: skip
    tokens = {one.name: one.tokens for one in made.pack.prompts}
    assert tokens == {"agent": 960, "agent/tools": 1290, "words": 150, "chat": 155}

    config = {"payloads": f"file://{tmp_path}/cache"}
    with Cache(load_settings(config, {})) as cache:
        applied = apply(str(tmp_path / "base.tar"), cache, Intended(model=image_model.name), Silent())
    assert applied.archive.imported == made.export.exported and not applied.differences
    assert [one.loadable for one in applied.pack.prompts] == [one.blocks * BLOCK for one in made.pack.prompts]
    # What the two share is there once.
    held = full_blocks(TOOLS) + 150 // BLOCK * BLOCK + 153 // BLOCK * BLOCK
    assert check_store(config)["blocks"] == held // BLOCK

    with Engine(image_model, kv=config, log_path=tmp_path / "engine.log") as engine:
        first = extended(AGENT, 50, 92)
        [answer] = engine.generate([first], max_tokens=8)
        assert (answer.external_tokens, answer.local_tokens) == (960, 0)
        asked = {"prompt": f"w300 w301 w303 w11 {WORDS} w12 w11 w400 w12 w13"}
        for one, loaded in ((TOOLS, full_blocks(TOOLS)), ({"prompt": WORDS}, 128), (asked, 128)):
            engine.reset_prefix_cache()
            [result] = engine.generate([one], max_tokens=8)
            assert (result.external_tokens, result.local_tokens) == (loaded, 0)
        # Another salt: computed from scratch.
        [computed] = engine.generate([first], max_tokens=8, cache_salt="computed")
        assert computed.external_tokens == 0
        assert answer.token_ids == computed.token_ids != result.token_ids
    assert inspect(str(tmp_path / "base.tar"), load_settings(config, {})).namespace == made.pack.namespace
