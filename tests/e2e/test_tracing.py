"""A server as users start it: prompts' tokens by tier, and spans beside vLLM's, in the client's trace."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from connectors.telemetry.ways import SOURCES
from tests.e2e.collector import Received, collecting
from tests.e2e.http_servers import Server, VllmServer, free_ports
from tests.e2e.sharing import prompt
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

PARENT = "b7ad6b7169203331"


def trace_of(number: int) -> str:
    return f"{0xAF7651916CD43DD8 + number:032x}"


def ask(server: Server, number: int, tokens: list[int]) -> None:
    """A client asks for two tokens, and traces that."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "temperature": 0, "detokenize": False}
    headers = {
        "Content-Type": "application/json",
        "traceparent": f"00-{trace_of(number)}-{PARENT}-01",
        "X-Request-Id": f"mine{number}",
    }
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        answer.read()


def told(span: Received) -> dict[str, int]:
    """The tokens by source of a request's span."""
    found = {one: span.attributes.get(f"kvstore.tokens.{one}") for one in SOURCES}
    return {source: count for source, count in found.items() if count is not None}


def test_a_client_sees_where_its_tokens_came_from(
    text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.kv",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": store_config("sqlite"),
    }
    arguments = (
        f"{text_model} --served-model-name tiny "
        "--skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 2048 --block-size 32 "
        "--kv-cache-memory-bytes 67108864 --max-num-batched-tokens 2048"
    )
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    tokens = prompt(320, 60)["prompt_token_ids"]
    prompts = [tokens, tokens, [*tokens, *prompt(70, 61)["prompt_token_ids"]]]
    with collecting() as collector:
        [port] = free_ports(1)
        traced = ["--otlp-traces-endpoint", collector.url]
        server = VllmServer(
            [*arguments.split(), *traced, "--kv-transfer-config", json.dumps(transfer)],
            port,
            tmp_path / "server.log",
            environment,
        )
        try:
            server.wait("/health")
            ask(server, 0, prompts[0])
            saved = "vllm:kvstore_kv_saved_tokens_total"
            # What is reported of a save comes with a later step, so some request must bring one.
            until(lambda: ask(server, 9, [1, 2, 3]) or server.metric(saved) >= 320)
            server.post("/reset_prefix_cache")
            ask(server, 1, prompts[1])
            ask(server, 2, prompts[2])
            for name in ("kvstore.request", "llm_request"):
                until(lambda n=name: len({one.trace for one in collector.spans if one.name == n}) == 4)
            totals = {
                source: int(server.metric("vllm:kvstore_kv_prompt_tokens_total", tier=source))
                for source in SOURCES
            }
            assert sum(totals.values()) == server.metric("vllm:prompt_tokens_total")
            # vLLM counts what was promised: the last token too, which is computed in any case.
            assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == 320
        finally:
            server.kill()
    requests = {span.trace: span for span in collector.spans if span.name == "kvstore.request"}
    mine = [requests[trace_of(number)] for number in range(3)]
    assert [told(span) for span in mine] == [
        {"computed": 320},
        {"disk": 319, "computed": 1},
        {"engine": 320, "computed": 70},
    ]
    for number, span in enumerate(mine):
        [vllms] = [one for one in collector.spans if (one.name, one.trace) == ("llm_request", span.trace)]
        assert span.parent == vllms.parent == PARENT
        assert span.attributes["kvstore.request.id"].startswith(vllms.attributes["gen_ai.request.id"])
        assert (
            vllms.attributes["gen_ai.usage.prompt_tokens"] == sum(told(span).values()) == len(prompts[number])
        )
        # Two clocks' readings of one machine, in two processes.
        assert vllms.began_ns <= span.began_ns + 10**7
    load = [one for one in collector.spans if one.parent == mine[1].span and one.name == "kvstore.load"]
    assert [one.attributes["kvstore.tokens.disk"] for one in load] == [320]
    parts = {one.name for one in collector.spans if one.parent == load[0].span}
    assert parts == {"kvstore.read", "kvstore.verify", "kvstore.copy"}
    saves = [one for one in collector.spans if one.parent == mine[0].span and one.name == "kvstore.save"]
    assert sum(one.attributes["kvstore.blocks"] for one in saves) == 10
