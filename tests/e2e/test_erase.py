"""A salt is erased beside a living engine: it computes and encodes the same, another salt still hits, and
what it saves afterwards is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from kvstore.admin.remove.reports import EraseReport
from kvstore.build import load_settings, open_payloads
from kvstore.keys import salt_id
from tests.e2e.engine import Engine, random_image
from tests.e2e.sharing import check_store, full_blocks, prompt, segment_files, worker_counters
from tests.e2e.test_ec import ask as about
from tests.e2e.test_ec import forget
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.servers]

#: Its blocks are what it needs, and the picture's encoder output: that prompt is shorter than a block.
ASKED, PICTURE = prompt(640, 60), about("image", random_image(90))
ALICE, BOB = "alice-7f3e-secret", "bob-11aa-secret"


def cache_admin(settings: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As an operator runs it: a process, with the salt in no argument of it."""
    command = [sys.executable, "-m", "kvstore.cli", *words, "--settings", str(settings)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def make_it_a_minute_later(config: dict[str, Any]) -> None:
    """What was forbidden was so an hour ago."""
    client = redis.Redis.from_url(config["index"], protocol=2)
    for key in client.scan_iter("kvs:{*}:erased"):
        for salt, when in client.hgetall(key).items():  # type: ignore[union-attr]
            client.hset(key, salt, int(when) - 3600)


def test_a_salt_is_erased_beside_an_engine(image_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("tiered")
    config["ec"]["staging_dir"] = str(tmp_path / "staging")
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(config))
    with Engine(image_model, log_path=tmp_path / "0.log") as engine:
        answers = [engine.generate([one], cache_salt=ALICE)[0].token_ids for one in (ASKED, PICTURE)]

    computed, loaded = (0, 1), (full_blocks(ASKED), 0)
    log = tmp_path / "1.log"
    with Engine(image_model, kv=config, ec=config, log_path=log) as engine:

        def ask(salt: str) -> tuple[int, int]:
            """Prompt tokens that came from the store, and pictures that did not."""
            forget(engine)
            encoded = engine.encoder_calls()
            got = [engine.generate([one], cache_salt=salt)[0] for one in (ASKED, PICTURE)]
            engine.idle(0.1)
            assert [one.token_ids for one in got] == answers
            assert got[1].external_tokens == 0
            return got[0].external_tokens, engine.encoder_calls() - encoded

        def staged() -> int:
            return len([*(tmp_path / "staging").glob("*/[0-9a-f]*")])

        for salt in (ALICE, BOB):
            assert ask(salt) == computed
        for salt in (ALICE, BOB):
            assert ask(salt) == loaded
        assert staged() == 2
        before, copies = check_store(config), len(segment_files(tmp_path / "fast"))

        ran = cache_admin(settings, "erase", "--salt-file", "-", "--apply", "--json", stdin=f"{ALICE}\n")
        assert ran.returncode == 0, ran.stderr
        report = EraseReport.model_validate_json(ran.stdout)
        assert (report.state, report.salt) == ("erased", salt_id(ALICE).hex())
        assert 0 < report.hidden_segments == before["segments"] / 2

        def fewer_staged() -> bool:
            ask(BOB)
            return staged() < 2

        until(fewer_staged)
        assert ask(ALICE) == computed, "none of it is left"
        assert ask(BOB) == loaded, "it is another's"
        # What it computed just now might as well have been computed before.
        assert worker_counters(engine)["save_blocks{refused}"] == full_blocks(ASKED) // 32
        assert worker_counters(engine, "ec")["save_blocks{refused}"] == 1
        assert check_store(config)["segments"] == before["segments"] / 2
        with open_payloads(load_settings(config, environ={})) as payloads:
            assert len(list(payloads.list())) == before["segments"] / 2

        def fewer_copies() -> bool:
            ask(BOB)
            return len(segment_files(tmp_path / "fast")) <= copies / 2

        until(fewer_copies)

        make_it_a_minute_later(config)
        assert ask(ALICE) == computed
        assert ask(ALICE) == loaded, "saved anew"
        assert check_store(config)["segments"] == before["segments"]
    for secret in (ALICE, BOB):
        assert secret not in ran.stdout + ran.stderr + log.read_text(errors="replace")
    operations = cache_admin(settings, "events", "--operators", "--json").stdout
    assert salt_id(ALICE).hex() in operations and ALICE not in operations
