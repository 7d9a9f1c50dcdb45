"""Disaggregated prefill: one engine computes a prompt, another goes on from there, through the store alone.

`answers` are a decode engine's own, computed without reading any cache.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index
from kvstore.keys import NO_SALT, session_id
from tests.e2e import engine as engines
from tests.e2e.engine import Engine, Result, random_image
from tests.e2e.http_servers import Server, VllmServer, free_ports
from tests.e2e.sharing import check_store, extended, prompt, scheduler_counters, worker_counters
from tests.e2e.test_ec import ask
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

#: Chunks of a prefill end within prompts.
OPTIONS = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 2048}
SEND = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
WAIT_S = 6.0
#: Shorter than a block, of whole blocks, one more, of several chunks.
LENGTHS = (2, 20, 32, 33, 300, 320, 321, 1000)
_TRANSFERS = (
    "__import__('vllm.distributed.kv_transfer', fromlist=['x'])"
    ".get_kv_transfer_group()._worker._store.transfers"
)
_SCHEDULER = "llm.llm_engine.engine_core.engine_core.scheduler"


def send(engine: Engine, *prompts: dict[str, Any], **more: Any) -> list[Result]:
    return engine.generate(prompts, max_tokens=1, extra_args={"kv_transfer_params": SEND}, **more)


def receive(engine: Engine, one: dict[str, Any], handle: Any) -> Result:
    [result] = engine.generate([one], extra_args={"kv_transfer_params": handle})
    return result


def answers(engine: Engine, *prompts: dict[str, Any]) -> list[list[int]]:
    made = [engine.generate([one], skip_reading_prefix_cache=True)[0] for one in prompts]
    assert all(one.external_tokens == one.local_tokens == 0 for one in made)
    assert len({tuple(one.token_ids) for one in made}) == len(prompts)
    return [one.token_ids for one in made]


def computed(result: Result) -> int:
    """Prompt tokens that the engine computed; at least one is, whatever it was given."""
    return max(1, result.prompt_tokens - result.external_tokens - result.local_tokens)


def leftovers(engine: Engine) -> int:
    """What is left of requests in vLLM's scheduler and in both halves of the connector, blocks included."""
    engine.idle(0.1)
    # With a step of something else the workers' last reports come in.
    engine.generate([prompt(1, 0)], max_tokens=2)
    half = f"{_SCHEDULER}.connector._scheduler"
    names = ("requests", "requests.unsaved", "requests.keepers", "_handed_over")
    parts = [f"len({_SCHEDULER}.requests)", *(f"len({half}.{name})" for name in names)]
    parts += [f"{half}.loading.held", f"{half}.saving.under_way"]
    worker = _TRANSFERS.replace("._store.transfers", "")
    parts += [
        f"{worker}.reads.under_way",
        *(f"len({worker}.writes.{name})" for name in ("_waiting", "_handed_over")),
    ]
    pool = f"{_SCHEDULER}.kv_cache_manager.block_pool"
    parts.append(f"{pool}.num_gpu_blocks - 1 - {pool}.get_num_free_blocks()")
    return int(engine.evaluate(" + ".join(parts)))


def config(folder: Path) -> dict[str, Any]:
    return {
        "payloads": f"file://{folder}/payloads",
        "kv": {"match_deadline_s": 20.0, "match_ttl_s": 30.0, "handoff": True, "handoff_wait_s": WAIT_S},
        # What is handed over is stored whatever else is.
        "admission": {"second_use": True, "min_blocks": 60},
    }


@pytest.fixture(scope="module")
def pair(
    image_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine, Path]]:
    folder = tmp_path_factory.mktemp("pd")
    kv = config(folder)
    prefill = Engine(image_model, kv=kv, kv_role="kv_producer", log_path=folder / "p.log", **OPTIONS)
    decode = Engine(image_model, kv=kv, kv_role="kv_consumer", log_path=folder / "d.log", **OPTIONS)
    with decode:
        prefill.wait_ready()
        try:
            yield prefill, decode, folder
        finally:
            prefill.kill()


def test_a_decode_engine_computes_one_token_of_a_prompt(pair: tuple[Engine, Engine, Path]) -> None:
    prefill, decode, folder = pair
    prompts = [prompt(length, length) for length in LENGTHS]
    expected = answers(decode, *prompts)
    for one, tokens in zip(prompts, expected, strict=True):
        [sent] = send(prefill, one)
        assert sent.kv_params is not None and sent.kv_params["remote_num_tokens"] == sent.prompt_tokens
        got = receive(decode, one, sent.kv_params)
        assert (got.token_ids, computed(got)) == (tokens, 1), sent.prompt_tokens
        # A second time the engine's own cache has the full blocks.
        again = receive(decode, one, sent.kv_params)
        assert (again.token_ids, computed(again)) == (tokens, 1)
        assert again.external_tokens <= engines._ARGUMENTS["block_size"]
        decode.reset_prefix_cache()
    assert "do_remote_prefill" in sent.kv_params

    # All at once, with a common head; what isn't handed over isn't stored.
    head = prompt(200, 1)
    batch = [extended(head, 30 + 20 * i, i) for i in range(8)]
    wanted = answers(decode, *batch)
    handles = [one.kv_params for one in send(prefill, *batch)]
    for one, tokens, handle in zip(batch, wanted, handles, strict=True):
        got = receive(decode, one, handle)
        assert (got.token_ids, computed(got)) == (tokens, 1)
    [plain] = prefill.generate([prompt(500, 7)], max_tokens=1)
    assert plain.kv_params is None
    # Nor waited for, without a handle.
    assert receive(decode, prompt(500, 7), None).external_tokens == 0
    assert leftovers(prefill) == leftovers(decode) == 0
    check_store(config(folder))
    counts = worker_counters(prefill) | scheduler_counters(decode)
    assert not any(name.startswith(("save_failures", "save_blocks{dropped}")) for name in counts), counts


def test_pictures_in_prompts(pair: tuple[Engine, Engine, Path]) -> None:
    prefill, decode, folder = pair
    one, two, three = (ask("image", random_image(400 + number)) for number in range(3))
    more = " ".join(f"w{300 + i}" for i in range(60))
    inside = [{**each, "prompt": f"{each['prompt']} {more}"} for each in (one, two)]
    last = {**three, "prompt": f"{more} <image>"}
    # The same words about both, which their sender calls by one name.
    named = [{**each, "uuids": ["mine"]} for each in inside]

    def forget() -> None:
        """vLLM's own caches go by the name."""
        for engine in (prefill, decode):
            engine.idle(0.05)
            engine.reset_mm_cache()
            assert engine.reset_prefix_cache()

    expected = answers(decode, *inside, last)
    for asked, tokens in zip([*inside, last, named[0]], [*expected, expected[0]], strict=True):
        forget()
        before = decode.encoder_calls()
        [sent] = send(prefill, asked)
        assert sent.kv_params is not None and sent.kv_params["remote_num_tokens"] == sent.prompt_tokens
        got = receive(decode, asked, sent.kv_params)
        assert (got.token_ids, computed(got)) == (tokens, 1)
        # The last token is computed, so the picture that it belongs to is encoded, and no other.
        assert decode.encoder_calls() - before == (asked is last)
    forget()
    [sent] = send(prefill, named[1])
    assert sent.kv_params is None, "its name has stood for another, and might still"
    got = receive(decode, named[1], None)
    assert (got.token_ids, got.external_tokens) == (expected[1], 0)
    assert leftovers(prefill) == leftovers(decode) == 0
    check_store(config(folder))


def test_blocks_stay_until_there_is_room_to_save_them(pair: tuple[Engine, Engine, Path]) -> None:
    prefill, decode, _ = pair
    one = prompt(700, 70)
    [expected] = answers(decode, one)
    # The queue refuses everything for some steps that come after the answer.
    prefill.evaluate(f"setattr({_TRANSFERS}, 'takes_staged', lambda: False)")
    [sent] = send(prefill, one)
    assert sent.kv_params is not None
    assert prefill.evaluate(f"len({_SCHEDULER}.requests)") == 1
    prefill.evaluate(f"delattr({_TRANSFERS}, 'takes_staged')")
    assert leftovers(prefill) == 0
    got = receive(decode, one, sent.kv_params)
    assert (got.token_ids, computed(got)) == (expected, 1)
    # Never any room: the blocks are given back all the same.
    prefill.evaluate(f"setattr({_TRANSFERS}, 'takes_staged', lambda: False)")
    send(prefill, prompt(300, 71))
    prefill.idle(WAIT_S + 0.3)
    prefill.evaluate(f"delattr({_TRANSFERS}, 'takes_staged')")
    assert leftovers(prefill) == 0


def test_aborts_on_either_side(pair: tuple[Engine, Engine, Path]) -> None:
    prefill, decode, _ = pair
    one, other = prompt(1500, 80), prompt(90, 81)
    expected = answers(decode, one, other)
    for steps in (0, 1, 2, 4):
        prefill.idle(0.05)
        assert prefill.reset_prefix_cache()
        aborted, sent = send(prefill, one, other, abort_after={0: steps})
        assert (aborted.finish_reason, aborted.kv_params) == ("abort", None)
        assert sent.kv_params is not None

    # Nobody has promised it: what there is of it is no reason to wait.
    def at_once() -> bool:
        decode.reset_prefix_cache()
        began = time.monotonic()
        assert receive(decode, one, None).token_ids == expected[0]
        return time.monotonic() - began < WAIT_S

    until(at_once)  # a machine that stands still for a moment costs a try
    decode.reset_prefix_cache()
    handle = {**sent.kv_params, "remote_num_tokens": None}
    for steps in (0, 1, 5, 40):
        waiting, going = decode.generate(
            [one, other], extra_args={"kv_transfer_params": handle}, abort_after={0: steps}
        )
        assert waiting.finish_reason == "abort" and going.token_ids == expected[1]
        decode.reset_prefix_cache()
    assert leftovers(prefill) == leftovers(decode) == 0


def test_a_prefill_engine_that_dies_before_its_commit(pair: tuple[Engine, Engine, Path]) -> None:
    """The last of this file: the engine is gone after it."""
    prefill, decode, _ = pair
    one = prompt(400, 90)
    [expected] = answers(decode, one)
    prefill.evaluate(f"setattr({_TRANSFERS}, 'write_staged', lambda nbytes, job, after: True)")
    [sent] = send(prefill, one)
    prefill.kill()
    assert sent.kv_params is not None
    began = time.monotonic()
    got = receive(decode, one, sent.kv_params)
    took = time.monotonic() - began
    assert (got.token_ids, got.external_tokens) == (expected, 0)
    assert WAIT_S <= took < 10 * WAIT_S
    assert leftovers(decode) == 0


@pytest.mark.parametrize("kind", ["sizes", "conv"])
def test_windows_block_sizes_and_states(kind: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """One engine that hands over to itself: the same code on both sides, and only the store between them."""
    kv = config(tmp_path)
    with Engine(model(kind), kv=kv, log_path=tmp_path / "engine.log", **OPTIONS) as engine:
        prompts = [prompt(length, length) for length in LENGTHS]
        expected = answers(engine, *prompts)
        for one, tokens in zip(prompts, expected, strict=True):
            assert engine.reset_prefix_cache()
            [sent] = send(engine, one)
            assert sent.kv_params is not None
            engine.idle(0.02)
            assert engine.reset_prefix_cache()
            got = receive(engine, one, sent.kv_params)
            assert (got.token_ids, got.external_tokens) == (tokens, len(one["prompt_token_ids"]) - 1)
        assert leftovers(engine) == 0
        # States and windows of a prompt that was handed over serve a longer one, up to a boundary.
        engine.reset_prefix_cache()
        longer = extended(prompts[-1], 100, 5)
        [wanted] = answers(engine, longer)
        engine.reset_prefix_cache()
        [got] = engine.generate([longer])
        assert got.token_ids == wanted and got.external_tokens > 900
    check_store(kv)


# ---- servers and the proxy ------------------------------------------------------------------------


@pytest.fixture
def deployment(text_model: Path, tmp_path: Path) -> Iterator[tuple[Server, Server, Server]]:
    """A prefill engine, a decode engine, and the proxy before them."""
    ports = free_ports(3)
    started: list[Server] = []
    for role, port in zip(("kv_producer", "kv_consumer"), ports, strict=False):
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "connectors.kv",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config(tmp_path),
        }
        arguments = (
            f"{text_model} --served-model-name tiny "
            "--skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 2048 --block-size 32 "
            "--kv-cache-memory-bytes 67108864"
        )
        started.append(
            VllmServer(
                [*arguments.split(), "--kv-transfer-config", json.dumps(transfer)],
                port,
                tmp_path / f"{role}.log",
                {"VLLM_SERVER_DEV_MODE": "1"},
            )
        )
    prefill, decode = started
    arguments = ["docs/examples/pd_proxy.py", "--prefill", prefill.url, "--decode", decode.url]
    started.append(Server(arguments, ports[2], tmp_path / "proxy.log", {}))
    try:
        for server in started[:2]:
            server.wait("/health")
        yield prefill, decode, started[2]
    finally:
        for server in started:
            server.kill()


def completion(length: int, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt(length, seed)["prompt_token_ids"],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
        **more,
    }


def test_servers_behind_the_proxy(deployment: tuple[Server, Server, Server], tmp_path: Path) -> None:
    prefill, decode, proxy = deployment
    path = "/v1/completions"

    def tokens(server: Server, body: dict[str, Any]) -> list[int]:
        return list(server.post(path, body)["choices"][0]["token_ids"])

    asked = [completion(length, 200 + length) for length in (20, 300, 321)]
    expected = [tokens(decode, body) for body in asked]
    assert len({tuple(one) for one in expected}) == 3
    decode.post("/reset_prefix_cache")
    for body, one in zip(asked, expected, strict=True):
        assert tokens(proxy, body) == one
    # Counted as vLLM counts: the whole of each prompt.
    assert decode.metric("vllm:external_prefix_cache_hits_total") == 20 + 300 + 321
    streamed = completion(100, 1, stream=True)
    request = urllib.request.Request(
        proxy.url + path, json.dumps(streamed).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.read().decode().strip().endswith("data: [DONE]")
    assert decode.metric("vllm:external_prefix_cache_hits_total") == 20 + 300 + 321 + 100
    # What a client says of its session over HTTP reaches the index, through the proxy as well.
    said = {"kv_hints": {"retain": 600, "forget": True}}
    for server, name in ((decode, "asked"), (proxy, "proxied")):
        tokens(server, completion(130, 3, session_id=name, kv_transfer_params=said))
    with open_index(load_settings(config(tmp_path), environ={})) as index:
        [space] = index.namespaces()
        wanted = [session_id(NO_SALT, name) for name in ("asked", "proxied")]
        until(lambda: [one and one.state for one in index.find_sessions(space, wanted)] == ["retained"] * 2)
    until(lambda: decode.metric("vllm:kvstore_kv_events_total", event="hints_ignored") == 2)
    prefill.kill()
    decode.post("/reset_prefix_cache")
    body = completion(90, 2)
    assert tokens(proxy, body) == tokens(decode, body)
