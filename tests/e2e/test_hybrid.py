"""Models whose layers need different parts of a prefix: windows, chunks, states at a boundary.

Of each, an engine without a connector, one that computes and saves, and one that finds it all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, Result
from tests.e2e.sharing import check_store, extended, prompt, segment_files, worker_counters

pytestmark = pytest.mark.engine

LONG = prompt(1000, 1)
LONGER = extended(LONG, 300, 2)
SHORT = prompt(200, 3)
#: The same head, different tails: what they share ends inside a chunk of the prefill.
SHARED = prompt(320, 4)
BATCH = [extended(SHARED, 90 + 40 * i, 10 + i) for i in range(4)]
PROMPTS = [LONG, SHORT, *BATCH]
#: Several chunks per prompt, and not whole windows.
OPTIONS = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 2048}

#: Model -> tokens of LONG that a second engine loads, and of a batch's other request after the first's.
#: A window or a state needs the last token computed, and boundaries are multiples of the largest block.
HITS = {"window": 992, "sizes": 960, "local": 992, "chunked": 992, "conv": 992, "mamba": 960}


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("kind", HITS)
def test_groups_agree_on_a_boundary(
    kind: str, model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    folder, config = model(kind), store_config("sqlite")
    reference = Engine(folder, log_path=tmp_path / "0.log", **OPTIONS)
    cold = Engine(folder, kv=config, log_path=tmp_path / "1.log", **OPTIONS)
    with reference as engine:
        expected = tokens(engine.generate(PROMPTS))
        [longer] = tokens(engine.generate([LONGER]))
        assert len({tuple(one) for one in [*expected, longer]}) == len(expected) + 1
    with cold as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        engine.idle(0.1)
        counts = worker_counters(engine)
        assert not any(name.startswith("save_failures") for name in counts), counts
    check_store(config)

    with Engine(folder, kv=config, log_path=tmp_path / "2.log", **OPTIONS) as engine:
        [warm] = engine.generate([LONG])
        assert (warm.token_ids, warm.external_tokens) == (expected[0], HITS[kind])
        engine.reset_prefix_cache()
        [more] = engine.generate([LONGER])
        assert (more.token_ids, more.external_tokens) == (longer, HITS[kind])
        rest = engine.generate(PROMPTS[1:])
        assert tokens(rest) == expected[1:]
        assert all(result.cached_tokens > 0 for result in rest)
        counts = worker_counters(engine)
        assert not any(name.startswith(("miss", "save_failures")) for name in counts), counts

        # A second time nothing is read well any more: every request is computed, none of them wrongly.
        engine.reset_prefix_cache()
        for file in segment_files(tmp_path / "payloads"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        assert tokens(engine.generate([LONG, *PROMPTS[1:]])) == expected
        assert worker_counters(engine)["miss_blocks{corrupt}"] > 0
