"""Processes that are killed in the middle of what they do in namespaces of eight shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.repair.reshard import reshard
from tests.servers.redis import RedisServer
from tests.store.ground import HASTY, Ground, ids
from trials.faults.crashing import crash
from trials.faults.verbs import VERBS, Verb

#: Each killed process has a database of its own.
_DATABASES = "4096"
#: About so many steps of each verb are killed: with eight shards it has hundreds.
_KILLS = 4


def _to(shards: int) -> Verb:
    def work(ground: Ground) -> None:
        with ground.cache(**HASTY) as cache:
            name = ids()["one"]
            done = reshard(cache, name, shards, apply=True, wait=lambda seconds: None)
            assert done.ended == "complete", done.problem

    return Verb(f"reshard to {shards}", work)


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.parametrize("verb", [*VERBS, _to(1), _to(3)], ids=lambda verb: verb.name)
def test_who_is_killed_leaves_nothing_that_is_not_mended(verb: Verb, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--databases", _DATABASES) as server:

        def place(number: int, own: Path) -> dict[str, Any]:
            return {
                "payloads": f"file://{own}/payloads",
                "index": f"redis://127.0.0.1:{server.port}/{number}",
                "redis": {"shards": 8},
            }

        result = crash(verb, tmp_path, place, most=_KILLS)
    assert result.holds, result
