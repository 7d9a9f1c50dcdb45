"""Engines that end while they save: killed, and told to end. What they leave behind is whole or not there."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.engine import _ARGUMENTS, _ENVIRONMENT, ROOT, Engine, group_members
from tests.e2e.http_servers import Server, free_ports
from tests.e2e.sharing import check_store, prompt, segment_files
from tests.servers.redis import RedisServer
from tests.store.ground import Ground
from tests.waiting import PATIENCE_S, until
from tools.models import build
from trials.faults import kept
from trials.faults.row import Result, Row
from trials.faults.verbs import DUE_S

#: How many engines are killed, one after the other, and how many requests each has under way.
KILLS, BATCH = 6, 3
#: What an engine gets to finish its requests, and then its saves.
REQUESTS_S, DRAIN_S = 20, 3.0
#: A busy machine ends processes late.
ALLOWANCE_S = 3.0
TOKENS = 64


def _config(folder: Path, index: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "payloads": f"file://{folder}/payloads",
        "kv": {"match_deadline_s": 20.0, "match_ttl_s": 30.0},
        "redis": {"timeout_s": 20.0, "connect_timeout_s": 20.0},
        "sqlite": {"busy_timeout_s": 20.0},
        # One save for each block: more of them are under way.
        "segment": {"max_blocks": 1},
        "transfers": {"drain_s": DRAIN_S},
    }
    return made | ({"index": index} if index else {})


def _model() -> Path:
    return build(ROOT / ".cache" / "models", "text", 0)


def _judge(result: Result, folder: Path, config: dict[str, Any], prompts: list[Any], blocks: int) -> None:
    """Another engine finds what was committed: the right tokens from it, and nothing left once it is tidy."""
    with Engine(_model(), kv=config, log_path=folder / "after.log") as engine:
        results = [engine.generate([one])[0] for one in prompts]
        engine.reset_prefix_cache()
        right = [engine.generate([one], skip_reading_prefix_cache=True)[0].token_ids for one in prompts]
    result.requests += len(prompts)
    result.wrong_tokens += sum(a.token_ids != b for a, b in zip(results, right, strict=True))
    served = sum(one.external_tokens for one in results)
    result.lost_blocks += max(0, blocks - check_store(config)["blocks"])
    ground = Ground(config)
    for _ in range(2):
        ground.settle()
        time.sleep(DUE_S)
    leaks = ground.leaks()
    result.leaked += len(leaks)
    result.remark += f"{blocks} blocks committed before, {served} tokens served afterwards"
    result.remark += "".join(f"; {one}" for one in leaks[:5])


def _killed(folder: Path, config: dict[str, Any]) -> Result:
    result, draw, stored = Result(), random.Random(1), 0
    prompts = [prompt(640, 1000 + number) for number in range(BATCH * KILLS)]
    for number in range(KILLS):
        engine = Engine(_model(), kv=config, log_path=folder / f"{number}.log")
        engine.wait_ready()
        files = len(segment_files(folder / "payloads"))
        engine.start_generate(prompts[BATCH * number :][:BATCH], max_tokens=TOKENS)
        # From before the first save to after the last; half of them not before one, however slow it is.
        time.sleep(draw.uniform(0.05, 0.8))
        if number % 2:
            until(lambda files=files: len(segment_files(folder / "payloads")) > files)  # type: ignore[misc]
        engine.kill()
        result.faults += 1
        result.requests += BATCH
        seen = check_store(config)["blocks"]
        result.lost_blocks += max(0, stored - seen)
        stored = seen
    assert 0 < stored < 20 * len(prompts), "the kills came too late or too early"
    _judge(result, folder, config, prompts, stored)
    return result


def killed_on_sqlite(folder: Path) -> Result:
    kept.let_go()
    return _killed(folder, _config(folder))


def killed_on_redis(folder: Path) -> Result:
    kept.let_go()
    with RedisServer(folder / "redis") as server:
        return _killed(folder, _config(folder, server.url))


@contextlib.contextmanager
def _server(folder: Path, name: str, config: dict[str, Any] | None, requests_s: int) -> Iterator[Server]:
    """vLLM's own server, which gives requests so long after it was told to end."""
    arguments = (
        f"-m vllm.entrypoints.openai.api_server --model {_model()} --served-model-name tiny "
        "--skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 4096 --block-size 32 "
        f"--kv-cache-memory-bytes 268435456 --shutdown-timeout {requests_s}"
    ).split()
    # What the engines of the tests compute with is part of the namespace.
    arguments += ["--compilation-config", json.dumps(_ARGUMENTS["compilation_config"])]
    if config is not None:
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "connectors.kv",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config,
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    server = Server(arguments, free_ports(1)[0], folder / f"{name}.log", _ENVIRONMENT)
    try:
        server.wait("/health")
        yield server
    finally:
        server.kill()


def _told_to_end(server: Server, prompts: list[Any], ready: Any) -> tuple[float, list[list[int] | None]]:
    """Seconds from SIGTERM, with these requests under way, to the end of the engine's processes; the answers.

    vLLM's server may go on for as long as clients wait for an engine that it has killed, with a store and
    without, and so they hang up then.
    """
    answers: list[list[int] | None] = [None] * len(prompts)
    place = urlsplit(server.url)
    clients = [http.client.HTTPConnection(place.netloc, timeout=PATIENCE_S) for _ in prompts]

    def request(number: int) -> None:
        body = {
            "model": "tiny",
            "prompt": prompts[number]["prompt_token_ids"],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        headers = {"Content-Type": "application/json"}
        # One that is cut off is the client's to repeat.
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            clients[number].request("POST", "/v1/completions", json.dumps(body), headers)
            answers[number] = json.loads(clients[number].getresponse().read())["choices"][0]["token_ids"]

    threads = [
        threading.Thread(target=request, args=(number,), daemon=True) for number in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    ready()
    process, began = server._process, time.monotonic()
    process.send_signal(signal.SIGTERM)
    until(lambda: not _engine_processes(process.pid))
    took = time.monotonic() - began
    # Answers that are on their way have arrived by then.
    threads[0].join(1.0)
    for client in clients:
        if client.sock is not None:
            with contextlib.suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)
    process.wait(PATIENCE_S)
    until(lambda: not group_members(process.pid))
    for thread in threads:
        thread.join(PATIENCE_S)
    return took, answers


def _engine_processes(group: int) -> list[int]:
    """Those of a server that hold the engine: its core and its workers."""
    found = []
    for pid in group_members(group):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::"):
                found.append(pid)
    return found


def _terminated(folder: Path, requests_s: int) -> Result:
    kept.let_go()
    config = _config(folder)
    prompts = [prompt(1200, 2000 + number) for number in range(6)]
    with _server(folder, "alone", None, requests_s) as alone:
        alone_s, right = _told_to_end(alone, prompts, lambda: time.sleep(0.5))
    with _server(folder, "server", config, requests_s) as server:
        took_s, answers = _told_to_end(
            server, prompts, lambda: until(lambda: len(segment_files(folder / "payloads")) > 80)
        )
    result = Result(faults=1, requests=len(prompts))
    # One that is cut off has fewer tokens, and those are right.
    result.wrong_tokens = sum(
        any(x != y for x, y in zip(a, b, strict=False))
        for a, b in zip(answers, right, strict=True)
        if a is not None and b is not None
    )
    result.added_s, result.bound_s = max(0.0, took_s - alone_s), DRAIN_S + ALLOWANCE_S
    whole = sum(one is not None and len(one) == TOKENS for one in answers)
    result.remark = (
        f"ended after {took_s:.1f} s, without a store after {alone_s:.1f} s; {whole} requests ended; "
    )
    _judge(result, folder, config, prompts, check_store(config)["blocks"])
    return result


ROWS = [
    Row("processes", "kill -9 of engines that save: SQLite and a folder", "engine", killed_on_sqlite),
    Row("processes", "kill -9 of engines that save: Redis and a folder", "engine", killed_on_redis),
    Row(
        "processes",
        "SIGTERM of a server that saves, which ends its requests first",
        "engine",
        lambda folder: _terminated(folder, REQUESTS_S),
    ),
    Row(
        "processes",
        "SIGTERM of a server that saves, and ends at once",
        "engine",
        lambda folder: _terminated(folder, 0),
    ),
]
