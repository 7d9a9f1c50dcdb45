"""KV blocks that one engine computed are found and loaded by another: same tokens, fewer computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, EngineError, Result
from tests.e2e.sharing import (
    check_store,
    extended,
    full_blocks,
    promised_blocks,
    prompt,
    scheduler_counters,
    worker_counters,
)
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.servers]

LONG = prompt(1000, 1)
WHOLE = prompt(1024, 2)  # ends with a block
LONGER = extended(LONG, 300, 3)
SHARED = prompt(320, 4)
BATCH = [extended(SHARED, 40 + 8 * i, 10 + i) for i in range(8)] + [
    prompt(200 + 16 * i, 30 + i) for i in range(8)
]
SALTED = prompt(640, 50)


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine without a connector answers."""
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    with Engine(text_model, log_path=log) as engine:
        answers = {
            "long": engine.generate([LONG])[0].token_ids,
            "whole": engine.generate([WHOLE])[0].token_ids,
            "longer": engine.generate([LONGER])[0].token_ids,
            "batch": tokens(engine.generate(BATCH)),
            "salted": engine.generate([SALTED], cache_salt="one")[0].token_ids,
        }
    assert (
        len({tuple(t) for t in [answers["long"], answers["whole"], answers["longer"], *answers["batch"]]})
        == 19
    )
    return answers


@pytest.mark.parametrize("kind", ["sqlite", "s3", "tiered"])
def test_a_second_engine_finds_everything(
    kind: str, text_model: Path, expected: dict[str, Any], tmp_path: Path, store_config: Any
) -> None:
    config = store_config(kind)
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log") as engine:
        [cold] = engine.generate([LONG])
        assert cold.token_ids == expected["long"]
        assert (cold.external_tokens, cold.local_tokens) == (0, 0)
        assert engine.generate([WHOLE])[0].token_ids == expected["whole"]
        assert tokens(engine.generate(BATCH)) == expected["batch"]
        assert engine.generate([SALTED], cache_salt="one")[0].token_ids == expected["salted"]
        engine.idle(0.1)
    assert check_store(config)["blocks"] > 31 + 32

    with Engine(text_model, kv=config, log_path=tmp_path / "2.log") as engine:
        [warm] = engine.generate([LONG])
        assert warm.token_ids == expected["long"]
        assert warm.external_tokens == full_blocks(LONG) == 992
        [whole] = engine.generate([WHOLE])
        assert whole.token_ids == expected["whole"]
        assert whole.external_tokens == 1024
        engine.reset_prefix_cache()
        [longer] = engine.generate([LONGER])
        assert longer.token_ids == expected["longer"]
        assert longer.external_tokens == 992
        batch = engine.generate(BATCH)
        assert tokens(batch) == expected["batch"]
        # What another request of the batch has just loaded is a local hit; together they are everything.
        assert [r.cached_tokens for r in batch] == [full_blocks(one) for one in BATCH]
        assert sum(r.external_tokens for r in batch) < sum(full_blocks(one) for one in BATCH)
        [other] = engine.generate([SALTED], cache_salt="two")
        assert (other.external_tokens, other.local_tokens) == (0, 0)
        [same] = engine.generate([SALTED], cache_salt="one")
        assert same.token_ids == expected["salted"]
        assert same.external_tokens == full_blocks(SALTED)
        counts = worker_counters(engine)
        assert not any(name.startswith(("miss", "save_failures")) for name in counts)
    assert check_store(config)["segments"] > 0


def test_without_prefix_caching_and_in_several_chunks(
    text_model: Path, expected: dict[str, Any], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("tiered")
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log", **options) as engine:
        assert tokens(engine.generate([LONG])) == [expected["long"]]
        assert tokens(engine.generate(BATCH)) == expected["batch"]
        engine.idle(0.1)
        # 31 blocks in chunks of 4 make one segment, not eight.
        assert worker_counters(engine)["save_segments"] < 20
    check_store(config)
    with Engine(text_model, kv=config, log_path=tmp_path / "2.log", **options) as engine:
        for _ in range(2):
            [warm] = engine.generate([LONG])
            assert (warm.token_ids, warm.external_tokens) == (expected["long"], 992)
        [longer] = engine.generate([LONGER])
        assert (longer.token_ids, longer.external_tokens) == (expected["longer"], 992)
        batch = engine.generate(BATCH)
        assert tokens(batch) == expected["batch"]
        assert [r.external_tokens for r in batch] == [full_blocks(one) for one in BATCH]
        engine.idle(0.1)
        # The longer prompt's tail, and nothing that was there.
        assert worker_counters(engine)["save_blocks{stored}"] == (1300 - 992) // 32


def test_an_engine_core_of_its_own_process(
    text_model: Path, expected: dict[str, Any], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log", multiprocess=True) as engine:
        assert tokens(engine.generate([LONG])) == [expected["long"]]
        until(lambda: promised_blocks(config) == 31)
        until(engine.reset_prefix_cache)
        [warm] = engine.generate([LONG])
        assert (warm.token_ids, warm.external_tokens) == (expected["long"], 992)
        # What is saved last is stored before the engine ends.
        assert engine.generate([WHOLE])[0].token_ids == expected["whole"]
    assert check_store(config)["blocks"] == 31 + 32


def test_mla(mla_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("redis")
    with Engine(mla_model, log_path=tmp_path / "0.log") as engine:
        reference = tokens(engine.generate([LONG, SHARED]))
    with Engine(mla_model, kv=config, log_path=tmp_path / "1.log") as engine:
        assert tokens(engine.generate([LONG, SHARED])) == reference
    with Engine(mla_model, kv=config, log_path=tmp_path / "2.log") as engine:
        warm = engine.generate([LONG, SHARED])
        assert tokens(warm) == reference
        assert [r.external_tokens for r in warm] == [992, 320]


def test_roles(text_model: Path, expected: dict[str, Any], tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite")
    with Engine(text_model, kv=config, kv_role="kv_consumer", log_path=tmp_path / "1.log") as engine:
        assert tokens(engine.generate([LONG])) == [expected["long"]]
    assert check_store(config)["segments"] == 0
    with Engine(text_model, kv=config, kv_role="kv_producer", log_path=tmp_path / "2.log") as engine:
        assert tokens(engine.generate([LONG])) == [expected["long"]]
        engine.reset_prefix_cache()
        [again] = engine.generate([LONG])
        assert again.external_tokens == 0

        def found_present() -> bool:
            engine.idle(0.1)
            return worker_counters(engine).get("save_blocks{present}") == 31

        until(found_present)
    assert check_store(config)["blocks"] == 31
    with Engine(text_model, kv=config, kv_role="kv_consumer", log_path=tmp_path / "3.log") as engine:
        [warm] = engine.generate([LONG])
        assert (warm.token_ids, warm.external_tokens) == (expected["long"], 992)
        assert scheduler_counters(engine)["match_blocks_found"] == 31
        # Whoever resets the connector may have changed the weights in place: nothing old is served.
        assert engine.reset_prefix_cache(reset_connector=True)
        [after] = engine.generate([LONG])
        assert (after.token_ids, after.external_tokens) == (expected["long"], 0)


def test_other_weights_of_the_same_shape_never_match(
    model: Any, text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log") as engine:
        [first] = engine.generate([LONG])
    with Engine(model("text", seed=1), kv=config, log_path=tmp_path / "2.log") as engine:
        [other] = engine.generate([LONG])
        assert other.external_tokens == 0
        assert other.token_ids != first.token_ids
    assert check_store(config)["namespaces"] == 2


@pytest.mark.parametrize(
    ("arguments", "overrides", "says"),
    [
        ({}, {"payload": "file:///x"}, "unknown key 'payload'"),
        ({}, {"index": "http://host"}, "unsupported URL"),
        ({"prefix_caching_hash_algo": "xxhash"}, {}, "PYTHONHASHSEED"),
        ({"kv_config": {"kv_load_failure_policy": "fail"}}, {}, "recompute"),
    ],
)
def test_what_can_not_work_is_refused_at_the_start_in_words(
    arguments: dict[str, Any],
    overrides: dict[str, Any],
    says: str,
    text_model: Path,
    tmp_path: Path,
    store_config: Any,
) -> None:
    engine = Engine(
        text_model, kv=store_config("sqlite") | overrides, log_path=tmp_path / "engine.log", **arguments
    )
    with pytest.raises(EngineError) as failure, engine:
        pass
    assert says in str(failure.value) or says in engine.log()
