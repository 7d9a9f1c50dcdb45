"""Engines of several ranks over one store: every rank its part, one commit, all of them or none.

Worker processes of two ranks on the CPU. Tokens are compared with those of an engine of one rank without a
connector: the prompts are such that rounding sums over ranks otherwise makes no difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.faulty import Rule
from tests.e2e.engine import Engine, Result
from tests.e2e.sharing import check_store, full_blocks, prompt, segment_files
from tests.e2e.worker_faults import EXTENSION, counters, set_deadline, set_faults, settle
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300 + 70 * i, 40 + i) for i in range(8)]
ONE = {"worker_extension_cls": EXTENSION}
TP = ONE | {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
PP = ONE | {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}
LOAD_DEADLINE_S, SHORT_S = 30.0, 2.0


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A store in `folder`. A busy machine is no reason to miss."""
    return {
        "payloads": f"file://{folder}",
        "kv": {"match_deadline_s": 20.0, "match_ttl_s": 30.0, "load_deadline_s": LOAD_DEADLINE_S},
        "claim_ttl_s": 0.1,
        "segment": {"max_blocks": 4},
        **changes,
    }


def ask(engine: Engine, one: Mapping[str, Any]) -> Result:
    """One prompt, from an empty engine cache; what it saves has been saved when this returns."""
    engine.reset_prefix_cache()
    [result] = engine.generate([one])
    settle(engine)
    return result


def parts(folder: Path) -> set[int]:
    """How many payloads the segments in a folder have."""
    return set(Counter(path.stem for path in segment_files(folder)).values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def started(text_model: Path, folder: Path) -> Iterator[tuple[Engine, list[list[int]]]]:
    """Two tensor-parallel ranks, whose blocks engines of other sizes may use; and what one rank without a
    store answers to PROMPTS."""
    reference = Engine(text_model, log_path=folder / "reference.log")
    kv = config(folder / "store", identity={"any_tp": True})
    pair = Engine(text_model, kv=kv, log_path=folder / "pair.log", **TP)
    with reference as engine:
        expected = [result.token_ids for result in engine.generate(PROMPTS)]
    with pair as engine:
        yield engine, expected


@pytest.fixture(scope="module")
def pair(started: tuple[Engine, list[list[int]]]) -> Engine:
    return started[0]


@pytest.fixture(scope="module")
def expected(started: tuple[Engine, list[list[int]]]) -> list[list[int]]:
    return started[1]


def test_cold_and_warm(pair: Engine, folder: Path, expected: list[list[int]]) -> None:
    for one, tokens in zip(PROMPTS[:2], expected, strict=False):
        cold = ask(pair, one)
        assert (cold.token_ids, cold.external_tokens) == (tokens, 0)
    assert parts(folder / "store") == {2}
    for one, tokens in zip(PROMPTS[:2], expected, strict=False):
        warm = ask(pair, one)
        assert (warm.token_ids, warm.external_tokens) == (tokens, full_blocks(one))
    each = [found["load_blocks"] for found in counters(pair)]
    assert each == [sum(full_blocks(one) for one in PROMPTS[:2]) // 32] * 2
    # Both ranks' payloads are counted, and all that is counted is there.
    seen = check_store(config(folder / "store"))
    assert seen["blocks"] == each[0]


def test_one_ranks_damage_is_recomputed_by_all(pair: Engine, folder: Path, expected: list[list[int]]) -> None:
    one, tokens = PROMPTS[2], expected[2]
    before = set(segment_files(folder / "store"))
    assert ask(pair, one).token_ids == tokens
    mine = sorted(set(segment_files(folder / "store")) - before)
    assert len(mine) > 2
    for path in mine:
        if path.suffix == ".1":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    assert ask(pair, one).token_ids == tokens
    first, second = counters(pair)
    assert "miss_blocks{corrupt}" not in first and second["miss_blocks{corrupt}"] > 0
    # It was saved again by both, and is good now.
    third = ask(pair, one)
    assert (third.token_ids, third.external_tokens) == (tokens, full_blocks(one))
    assert counters(pair)[1]["miss_blocks{corrupt}"] == second["miss_blocks{corrupt}"]
    check_store(config(folder / "store"))


def test_one_slow_rank_is_waited_for_within_the_deadline(pair: Engine, expected: list[list[int]]) -> None:
    one, tokens = PROMPTS[3], expected[3]
    assert ask(pair, one).token_ids == tokens
    try:
        set_faults(pair, 1, Rule("delay", ("read",), delay_s=0.5))
        before = counters(pair)
        slow = ask(pair, one)
        assert (slow.token_ids, slow.external_tokens) == (tokens, full_blocks(one))
        assert counters(pair)[1]["load_blocks"] - before[1]["load_blocks"] == full_blocks(one) // 32

        set_faults(pair, 1, Rule("delay", ("read",), delay_s=PATIENCE_S))
        set_deadline(pair, 1, SHORT_S)
        pair.reset_prefix_cache()
        began = time.monotonic()
        [late] = pair.generate([one])
        assert SHORT_S * 0.9 < time.monotonic() - began < PATIENCE_S / 2
        assert late.token_ids == tokens
        after = counters(pair)
        assert after[1]["miss_blocks{deadline}"] == full_blocks(one) // 32
        assert "miss_blocks{deadline}" not in after[0]
    finally:
        set_faults(pair, 1)
        set_deadline(pair, 1, LOAD_DEADLINE_S)
        settle(pair)


def test_what_one_rank_does_not_write_nobody_sees(
    pair: Engine, folder: Path, expected: list[list[int]]
) -> None:
    one, tokens = PROMPTS[4], expected[4]
    blocks = check_store(config(folder / "store"))["blocks"]
    try:
        set_faults(pair, 0, Rule("no_space", ("put",)))
        assert ask(pair, one).token_ids == tokens
    finally:
        set_faults(pair, 0)
    assert counters(pair)[0]["save_blocks{failed}"] > 0
    assert check_store(config(folder / "store"))["blocks"] == blocks
    time.sleep(0.2)  # the claim expires
    again = ask(pair, one)
    assert (again.token_ids, again.external_tokens) == (tokens, 0)
    assert check_store(config(folder / "store"))["blocks"] == blocks + full_blocks(one) // 32
    warm = ask(pair, one)
    assert (warm.token_ids, warm.external_tokens) == (tokens, full_blocks(one))


def test_other_sizes_share_it_if_asked_to(
    pair: Engine, text_model: Path, folder: Path, expected: list[list[int]]
) -> None:
    store, known, new = folder / "store", 5, 6
    assert ask(pair, PROMPTS[known]).token_ids == expected[known]
    kv = config(store, identity={"any_tp": True})
    any_size = Engine(text_model, kv=kv, log_path=folder / "any.log", **ONE)
    own_size = Engine(text_model, kv=config(store), log_path=folder / "own.log", **ONE)
    with any_size as single:
        found = ask(single, PROMPTS[known])
        assert (found.token_ids, found.external_tokens) == (expected[known], full_blocks(PROMPTS[known]))
        assert ask(single, PROMPTS[new]).external_tokens == 0
    assert parts(store) == {1, 2}
    back = ask(pair, PROMPTS[new])
    assert (back.token_ids, back.external_tokens) == (expected[new], full_blocks(PROMPTS[new]))
    with own_size as single:
        alone = ask(single, PROMPTS[known])
        assert (alone.token_ids, alone.external_tokens) == (expected[known], 0)


def test_a_pipeline_of_uneven_stages(text_model: Path, folder: Path, expected: list[list[int]]) -> None:
    one, store = PROMPTS[7], folder / "stages"
    env = {"VLLM_PP_LAYER_PARTITION": "3,1"}
    with Engine(text_model, kv=config(store), log_path=folder / "pp.log", env=env, **PP) as engine:
        cold = ask(engine, one)
        assert (cold.token_ids, cold.external_tokens) == (expected[7], 0)
        warm = ask(engine, one)
        assert (warm.token_ids, warm.external_tokens) == (expected[7], full_blocks(one))
        assert [found["load_blocks"] for found in counters(engine)] == [full_blocks(one) // 32] * 2
    assert parts(store) == {2}
    sizes = {path.suffix: path.stat().st_size for path in segment_files(store)}
    assert sizes[".0"] > 2 * sizes[".1"]
    check_store(config(store))


@pytest.mark.parametrize(("kind", "payloads"), [("mla", 1), ("window", 2)])
def test_other_kinds_of_layers(kind: str, payloads: int, model: Callable[..., Path], tmp_path: Path) -> None:
    """Warm as cold; that cold is as without a store, other tests show of these models on one rank."""
    batch, store = PROMPTS[:3], tmp_path / "store"
    with Engine(model(kind), kv=config(store), log_path=tmp_path / "engine.log", **TP) as engine:
        cold = [ask(engine, one) for one in batch]
        assert [result.external_tokens for result in cold] == [0, 0, 0]
        assert len({tuple(result.token_ids) for result in cold}) == 3
        assert parts(store) == {payloads}
        for one, before in zip(batch, cold, strict=True):
            warm = ask(engine, one)
            # Of an MLA model the whole prompt can be loaded; a window needs the last token computed.
            most = len(one["prompt_token_ids"]) - (kind == "window")
            size = engine.block_size
            assert (warm.token_ids, warm.external_tokens) == (before.token_ids, most // size * size)
        for found in counters(engine):
            assert found["load_blocks"] > 0 and not any(name.startswith("miss") for name in found)
    check_store(config(store))
