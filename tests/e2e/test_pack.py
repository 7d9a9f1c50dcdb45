"""What one engine has computed of prompts, imported into an empty store, serves another's first request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.admin.archive.asked import ask
from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.prompts import read_prompts
from kvstore.admin.archive.wanted import Wanted
from kvstore.admin.backends import Cache
from kvstore.admin.progress import Silent
from kvstore.build import load_settings
from tests.e2e import engine as harness
from tests.e2e.engine import Engine
from tests.e2e.http_servers import VllmServer, free_ports
from tests.e2e.sharing import BLOCK, check_store, extended, full_blocks, prompt

pytestmark = pytest.mark.engine

#: One prompt shares the beginning of another, and one has a chat template's words around it.
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


def words_of(model: Path, config: dict[str, str], **more: str) -> list[str]:
    """What follows `vllm serve` for the engines of these tests."""
    arguments = harness._ARGUMENTS
    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.kv",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": config,
    }
    words = [str(model), "--enforce-eager", "--distributed-executor-backend", "uni"]
    words += ["--compilation-config", json.dumps(arguments["compilation_config"])]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    for name in ("dtype", "max_model_len", "block_size", "kv_cache_memory_bytes", "seed"):
        words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    return [*words, *(word for pair in more.items() for word in pair if word)]


def test_the_first_request_of_a_new_engine_is_loaded(image_model: Path, tmp_path: Path) -> None:
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
        "--default-chat-template-kwargs": json.dumps({"mark": "w303"}),
        "--enable-auto-tool-choice": "",
        "--tool-call-parser": "pythonic",
    }
    (tmp_path / "prompts.json").write_text(json.dumps({"prompts": prompts}))
    scratch = {"payloads": f"file://{tmp_path}/scratch"}
    archive = tmp_path / "base.tar"
    [port] = free_ports(1)
    server = VllmServer(words_of(image_model, scratch, **chat), port, tmp_path / "server.log", {})
    try:
        server.wait("/health")
        with Cache(load_settings(scratch, {})) as cache:
            made = read_prompts(tmp_path / "prompts.json")
            pack, planned = ask(cache, server.url, made, progress=Silent())
            exported = export(cache, planned, archive, pack=pack)
    finally:
        server.kill()
    assert exported.pack is not None and exported.ended == "complete"
    tokens = {one.name: one.tokens for one in exported.pack.prompts}
    assert tokens == {"agent": 960, "agent/tools": 1290, "words": 150, "chat": 155}

    config = {"payloads": f"file://{tmp_path}/cache"}
    with Cache(load_settings(config, {})) as cache, archive.open("rb") as stream:
        wanted = Wanted(weights=exported.pack.weights)
        done = import_archive(stream, cache, source=str(archive), wanted=wanted)
    assert done.imported == exported.exported
    assert done.pack is not None and done.pack.whole and not done.pack.differences
    assert [one.loadable for one in done.pack.prompts] == [one.blocks * BLOCK for one in done.pack.prompts]
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
