"""README's way to a bucket at AWS: what `cache-admin vllm-config` prints, given to engines as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engine import Engine
from tests.e2e.sharing import full_blocks, prompt
from tests.servers.redis import RedisServer
from tests.servers.s3.aws import PATIENT_ENVIRON, Aws
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.servers]

#: As README has them; Redis is the test's.
PRINTS = ["--index", "redis://redis:6379/0", "--payloads", "s3://my-bucket/kvstore"]


def test_an_engine_saves_and_another_loads(
    text_model: Path, tmp_path: Path, aws: Aws, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = aws.make("my-bucket")
    for name, value in aws.user().environ.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "vllm-config", *PRINTS, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)["kv_transfer_config"]
    # A busy machine is no reason to miss.
    waits = {"KVSTORE_KV__MATCH_DEADLINE_S": "20", "KVSTORE_REDIS__TIMEOUT_S": "20"}
    waits |= {"KVSTORE_INDEX": redis_server.url} | PATIENT_ENVIRON
    asked = prompt(1000, 1)
    answers = []
    for number in (1, 2):
        log = tmp_path / f"{number}.log"
        with Engine(text_model, log_path=log, kv={}, kv_config=printed, env=waits) as engine:
            [result] = engine.generate([asked])
            answers.append(result)
            engine.idle(0.1)
            if number == 1:
                until(lambda: any(key.endswith(".0") for key in bucket.keys()), say=log.read_text)
    first, second = answers
    assert first.external_tokens == 0
    assert second.external_tokens == full_blocks(asked)
    assert second.token_ids == first.token_ids
    assert {seen.host for seen in aws.seen} == {"my-bucket.s3.us-east-1.amazonaws.com"}


def test_a_bucket_in_another_region_is_told(
    text_model: Path, tmp_path: Path, aws: Aws, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.make("my-bucket", "eu-central-1")
    for name, value in aws.user().environ.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "engine.log"
    kv = {"index": redis_server.url, "payloads": "s3://my-bucket/kvstore"}
    with Engine(text_model, log_path=log, kv=kv, env=PATIENT_ENVIRON) as engine:
        [result] = engine.generate([prompt(200, 1)])
        assert result.token_ids
        until(lambda: "the bucket is in region eu-central-1" in log.read_text(), say=log.read_text)
        told = [line for line in log.read_text().splitlines() if "is in region eu-central-1" in line]
        assert all("WARNING" in line for line in told)
