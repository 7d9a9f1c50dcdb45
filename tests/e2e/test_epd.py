"""Encoder and language model apart: one engine encodes, another answers, with or without the image."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_store
from tests.e2e.engine import Engine, random_image
from tests.e2e.http_servers import Server, VllmServer, free_ports
from tests.e2e.sharing import check_store, segment_files
from tests.waiting import PATIENCE_S
from tools.models import IMAGE_TOKEN

pytestmark = pytest.mark.engine

PROMPT = f"w20 w30 {IMAGE_TOKEN['deepstack']} w40 w50"
SIDE = 112
#: Of an image of that size: temporal, height and width in patches.
DESCRIPTION = {"image_grid_thw": [1, 8, 8]}
SHORT_S = 1.0

_HALF = "llm.llm_engine.engine_core.engine_core.scheduler.ec_connector._scheduler"


def image(seed: int) -> bytes:
    return random_image(seed, side=SIDE)


def sent(seed: int, name: str) -> dict[str, Any]:
    """A prompt with an image that has a name of the client's."""
    return {"prompt": PROMPT, "images": [image(seed)], "uuids": [name]}


def described(name: str) -> dict[str, Any]:
    """The same prompt with only the image's name and size."""
    return {"prompt": PROMPT, "descriptions": [DESCRIPTION], "uuids": [name]}


def leftovers(engine: Engine) -> list[Any]:
    """What is left of requests, in vLLM's scheduler and in the connector's."""
    state = ["_waits", "_unavailable", "_loads", "_saves", "_staging._pins"]
    state += [f"_promises.{name}" for name in ("_promised", "_loading")]
    counts = "+".join(f"len({_HALF}.{name})" for name in state)
    requests = "len(llm.llm_engine.engine_core.engine_core.scheduler.requests)"
    return [engine.evaluate(counts), engine.evaluate(requests)]


def passed_on(*said: Any) -> dict[str, Any]:
    """What a proxy passes on of producers' answers."""
    params = {name: entry for one in said for name, entry in one.ec_params.items()}
    return {"extra_args": {"ec_transfer_params": params}}


def unstage(folder: Path) -> None:
    """Remove what an engine has fetched, as a cleaner of temporary files would."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            path.unlink()


def test_an_engine_answers_from_what_another_encoded(
    deepstack_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    hasty = config | {"ec": {"fetch_deadline_s": SHORT_S}}
    producer = Engine(deepstack_model, ec=config, ec_role="ec_producer", log_path=tmp_path / "e.log")
    consumer = Engine(deepstack_model, ec=config, ec_role="ec_consumer", log_path=tmp_path / "pd.log")
    with producer, consumer:
        expected = [consumer.generate([sent(seed, f"own {seed}")])[0].token_ids for seed in range(4)]
        assert len({tuple(tokens) for tokens in expected}) == 4
        assert consumer.encoder_calls() == 4

        # In turn: the producer's answer names the item and describes it.
        [said] = producer.generate([sent(0, "zero")], max_tokens=1)
        assert (said.token_ids, said.finish_reason) == ([], "stop")
        assert said.ec_params is not None
        assert {"item_indices": [0], "metadata": DESCRIPTION}.items() <= said.ec_params["zero"].items()
        announced = passed_on(said)
        assert consumer.generate([described("zero")], **announced)[0].token_ids == expected[0]
        assert consumer.generate([sent(0, "zero")], **announced)[0].token_ids == expected[0]

        # The name alone says nothing of what the image is.
        assert consumer.generate([described("zero")])[0].finish_reason == "error"

        # The consumer first: it waits.
        [one] = producer.generate([sent(1, "one")], max_tokens=1)
        check_store(config)
        for path in segment_files(tmp_path / "payloads"):
            path.unlink()
        with open_store(load_settings(config, environ={})) as store:
            [account] = store.maintenance.accounts()
            store.maintenance.invalidate(account.namespace)
        consumer.start_generate([described("one"), sent(2, "own 2"), described("one")], **passed_on(one))
        time.sleep(0.3)
        producer.generate([sent(1, "one")], max_tokens=1)
        assert [one.token_ids for one in consumer.finish_generate()] == [
            expected[1], expected[2], expected[1]
        ]  # fmt: skip

        # Evicted: the producer still holds it, and saves it once more without encoding it.
        check_store(config)
        for path in segment_files(tmp_path / "payloads"):
            path.unlink()
        consumer.reset_mm_cache()
        consumer.reset_prefix_cache()
        unstage(Path(consumer.evaluate(f"str({_HALF}._staging._root)")))
        # The index names what is gone: the request fails, alone, and the index learns of it.
        [failed, other] = consumer.generate([described("one"), sent(3, "own 3")], **passed_on(one))
        assert (failed.finish_reason, failed.token_ids) == ("error", [])
        assert other.token_ids == expected[3]
        producer.generate([sent(1, "one")], max_tokens=1)
        assert consumer.generate([described("one")], **passed_on(one))[0].token_ids == expected[1]
        assert producer.encoder_calls() == 2
        # "own 3" was encoded again after the reset; nothing else was.
        assert consumer.encoder_calls() == 5

        # Aborted while it waits, is fetched, or is loaded.
        [never] = producer.generate([sent(99, "never")], max_tokens=1)
        never.ec_params["never"]["kvstore_item"] = "00" * 32
        for steps in (0, 1, 2, 3, 5, 8, 50):
            [told] = producer.generate([sent(steps + 10, f"{steps}")], max_tokens=1)
            prompts = [described(f"{steps}"), described("never"), sent(2, "own 2")]
            aborted = consumer.generate(
                prompts, abort_after={0: steps, 1: steps + 50}, **passed_on(told, never)
            )
            assert aborted[1].finish_reason == "abort"
            assert aborted[2].token_ids == expected[2]
        assert leftovers(consumer) == [0, 0]
        metrics = consumer.metrics()
        assert metrics["vllm:kvstore_ec_unavailable_requests_total"] == 2
        assert metrics["vllm:kvstore_ec_fetch_seconds_count"] >= 3
        assert metrics["vllm:kvstore_ec_loaded_bytes_total"] >= 3 * 16 * 768 * 4

    # An engine without its encoder, and a model whose DeepStack levels it then can't take.
    limits = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    with Engine(
        deepstack_model, ec=hasty, ec_role="ec_consumer", log_path=tmp_path / "d.log", **limits
    ) as bare:
        prompts = [described("one"), {"prompt": PROMPT.split()[0]}, described("never")]
        results = bare.generate(prompts, **passed_on(one, never))
        assert [one.finish_reason for one in results] == ["error", "length", "error"]
        assert leftovers(bare) == [0, 0]


# ---- servers and the proxy ------------------------------------------------------------------------


@pytest.fixture
def deployment(
    deepstack_model: Path, tmp_path: Path, store_config: Any
) -> Iterator[tuple[Server, Server, Server]]:
    """An encoder, an engine for the rest with two API servers, and the proxy before them."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    ports = free_ports(3)
    config = store_config("sqlite")
    config["ec"]["staging_dir"] = str(tmp_path / "staging")
    started: list[Server] = []
    for role, port, servers in zip(("ec_producer", "ec_consumer"), ports, (1, 2), strict=False):
        transfer = {
            "ec_connector": "ECStoreConnector",
            "ec_connector_module_path": "connectors.ec",
            "ec_role": role,
            "ec_connector_extra_config": config,
        }
        arguments = (
            f"{deepstack_model} --served-model-name tiny --api-server-count {servers} "
            f"--chat-template {template} --dtype float32 --enforce-eager --max-model-len 2048 "
            "--block-size 32 --kv-cache-memory-bytes 67108864"
        )
        started.append(
            VllmServer(
                [*arguments.split(), "--ec-transfer-config", json.dumps(transfer)],
                port,
                tmp_path / f"{role}.log",
                {"VLLM_SERVER_DEV_MODE": "1"},
            )
        )
    encode, rest = started
    proxy = ["docs/examples/epd_proxy.py", "--encode", encode.url, "--decode", rest.url]
    started.append(Server(proxy, ports[2], tmp_path / "proxy.log", {}))
    try:
        for server in started[:2]:
            server.wait("/health")
        yield encode, rest, started[2]
    finally:
        for server in started:
            server.kill()


def chat(*seeds: int) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": "w20 w30"}]
    for seed in seeds:
        url = "data:image/png;base64," + base64.b64encode(image(seed)).decode("ascii")
        # A name of the client's, the same for every image, is not what the store goes by.
        parts.append({"type": "image_url", "image_url": {"url": url}, "uuid": "mine"})
    parts.append({"type": "text", "text": "w40"})
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def tokens(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def without_uuids(body: dict[str, Any]) -> dict[str, Any]:
    for part in body["messages"][0]["content"]:
        part.pop("uuid", None)
    return body


def test_servers_behind_the_proxy(deployment: Any, tmp_path: Path) -> None:
    encode, rest, proxy = deployment
    prompts = [(1,), (2, 3), (), (3, 1, 3)]
    expected = [tokens(rest.post("/v1/chat/completions", without_uuids(chat(*seeds)))) for seeds in prompts]
    assert len({tuple(one) for one in expected}) == len(prompts)
    encoded = rest.metric("vllm:kvstore_ec_items_total", source="encoder")
    assert encoded == 3
    for cache in ("mm", "encoder", "prefix"):
        rest.post(f"/reset_{cache}_cache")

    for seeds, one in zip(prompts, expected, strict=True):
        assert tokens(proxy.post("/v1/chat/completions", chat(*seeds))) == one
    assert rest.metric("vllm:kvstore_ec_items_total", source="encoder") == encoded
    assert rest.metric("vllm:kvstore_ec_items_total", source="store") == 3
    assert encode.metric("vllm:kvstore_ec_items_total", source="encoder") == 3

    # In the index and gone: the engine can't encode what is only described to it, and the proxy sends it.
    fresh = tokens(proxy.post("/v1/chat/completions", chat(4)))
    for cache in ("mm", "encoder", "prefix"):
        rest.post(f"/reset_{cache}_cache")
    unstage(tmp_path / "staging")
    for path in segment_files(tmp_path / "payloads"):
        path.unlink()
    assert tokens(proxy.post("/v1/chat/completions", chat(4))) == fresh

    # No encoder at all.
    encode.kill()
    assert tokens(proxy.post("/v1/chat/completions", chat(2, 3))) == expected[1]
    streamed = {**chat(5), "stream": True}
    request = urllib.request.Request(
        proxy.url + "/v1/chat/completions",
        data=json.dumps(streamed).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.read().decode().strip().endswith("data: [DONE]")
