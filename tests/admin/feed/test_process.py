"""`cache-admin feed` as a process: it publishes, is asked over HTTP, and ends when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="routers decode with vLLM's types: make setup")

from kvstore.admin.feed.metrics import _COUNTERS, _GAUGES
from tests.admin.conftest import BLOCKS_PER_SEGMENT, Admin, Filled
from tests.admin.feed.router import Router
from tests.servers.redis import end_process, spawn_tied
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
N = BLOCKS_PER_SEGMENT
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def test_it_runs_until_it_is_told_to_end(either: Filled, tmp_path: Path) -> None:
    log = tmp_path / "feed.log"
    any_port = "tcp://127.0.0.1:*"
    words = ["--publish", any_port, "--replay", any_port, "--listen", "127.0.0.1:0", "--every", "0.01"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    command = [sys.executable, "-m", "kvstore.cli", "feed", *words, "--json", *either.options]
    process: subprocess.Popen[bytes] = spawn_tied(command, log, clean)
    router = None
    try:
        found = until(
            lambda: re.search(r"publishing at (\S+), (\S+), (http://\S+)", log.read_text()),
            say=log.read_text,
        )
        publisher, replay, url = found.groups()
        router = Router(publisher, replay)

        def told() -> bool:
            assert router is not None
            router.read()
            return len(router.blocks) == 3 * N

        until(told)

        def counted() -> bool:
            metrics = _OPENER.open(f"{url}metrics", timeout=PATIENCE_S).read().decode()
            return f"kvstore_feed_blocks {3 * N}.0" in metrics and "kvstore_feed_up 1.0" in metrics

        # The turn that publishes counts when it ends.
        until(counted)
        assert _OPENER.open(f"{url}healthz", timeout=PATIENCE_S).read() == b"turning\n"
        router.ask(0)
        assert router.dealer.poll(PATIENCE_S * 1000)
        assert router.answered()
    finally:
        if router is not None:
            router.close()
        end_process(process, signal.SIGTERM)
    assert process.returncode == 0, log.read_text()
    report = json.loads(log.read_text()[log.read_text().index("{") :])
    assert (report["segments"], report["replays"]) == (3, 1)


def test_what_it_would_announce(either: Filled, admin: Admin) -> None:
    ran = admin("feed", "--once", *either.options)
    assert ran.code == 0 and f"3 segments, {3 * N} blocks, {3 * N} of them by hash alone" in ran.out


def test_nothing_is_made_and_nothing_is_told_of_a_cache_that_is_not_there(
    tmp_path: Path, admin: Admin
) -> None:
    ran = admin("feed", "--once", "--payloads", f"file://{tmp_path}/none")
    assert ran.code == 0 and "none has been registered" in ran.out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--hashes", "text"], "neither int nor bytes"),
        (["--publish", "nowhere"], "can't listen at or connect to"),
        (["--publish", "tcp://256.1.1.1:1"], "can't listen at or connect to"),
        (["--engine", "tcp://"], "can't listen at or connect to"),
        (["--publish", "tcp://127.0.0.1:*", "--listen", "here"], "is not HOST:PORT"),
    ],
    ids=str,
)
def test_what_cannot_work_is_a_sentence(filled: Filled, admin: Admin, words: list[str], said: str) -> None:
    ran = admin("feed", *words, *filled.options)
    assert ran.code == 2 and said in ran.err


def test_metrics_are_documented() -> None:
    text = (ROOT / "docs" / "router-feed.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `kvstore_feed_(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows == _GAUGES | {f"{name}_total": meaning for name, meaning in _COUNTERS.items()}
