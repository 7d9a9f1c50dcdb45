"""What is too old is computed again: the same tokens, nothing loaded, and explain says why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.explain.explain import explain_request
from kvstore.admin.explain.lookup import Lookup
from kvstore.build import load_settings, open_index
from kvstore.index.eviction import Scope
from tests.e2e.engine import Engine
from tests.e2e.sharing import full_blocks, prompt
from tests.waiting import until

pytestmark = pytest.mark.engine

ASKED = prompt(160 + 5, 71)


def test_what_is_too_old_is_computed_again(text_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite")
    settings = load_settings(config, environ={})
    with (
        Engine(text_model, kv=config, log_path=tmp_path / "0.log") as engine,
        open_index(settings) as index,
    ):

        def ask() -> tuple[list[int], int]:
            engine.reset_prefix_cache()
            [result] = engine.generate([ASKED])
            engine.idle(0.3)
            return result.token_ids, result.external_tokens

        cold, loaded = ask()
        assert loaded == 0
        [name] = index.namespaces()
        until(lambda: index.usage(name).blocks == full_blocks(ASKED) // 32)
        assert ask() == (cold, full_blocks(ASKED))
        [old, *_] = segments = sorted(index.segments(name), key=lambda one: one.record.created_s)
        # It holds from now on, and everything is too old a moment later.
        ttl_s = max(1, int(time.time() - old.record.created_s) + 2)
        index.set_quota(Scope.ttl(Scope.STORE), ttl_s)
        assert index.age_out(name, ttl_s, delete_after_s=0)[0] < len(segments)
        until(lambda: time.time() > max(one.record.created_s for one in segments) + ttl_s)
        assert ask() == (cold, 0)

        def told() -> list[Any]:
            engine.idle(0.2)
            with Cache(settings) as cache:
                report = explain_request(Lookup(cache, time.time()), "2-")
            return [one for one in report.told if one.op == "match"]

        until(lambda: bool(told()))
        [one] = told()
        assert (one.reason, one.served) == ("absent", 0)
        assert one.because is not None and one.because.rule == "ttl"
        # What was computed instead serves for as long again.
        index.set_quota(Scope.ttl(Scope.STORE), 3600)
        index.age_out(name, 3600, delete_after_s=0)
        until(lambda: ask() == (cold, full_blocks(ASKED)))
