"""Engines that compute something else under one namespace, and an honest one: what a reader takes of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index
from tests.believing import PLACE, PROVE
from tests.e2e.broken import WEIGHTS, folder_of
from tests.e2e.engine import Engine
from tests.e2e.sharing import full_blocks, prompt, scheduler_counters
from tests.waiting import until

pytestmark = pytest.mark.engine

LENGTH = 200
#: The honest writer is not the first: before it the reader agrees with nobody.
WRITERS = ("replaced", "honest", *WEIGHTS, "other_attention")
#: Those that differ so much that they fail. A coarser dtype and a slightly wrong kernel are nearer: they
#: prove nothing, and nothing of theirs is loaded. An audit would tolerate both.
FAIL = ("replaced", "quantised", "dead_lane")
PROVES = {PROVE: "1"}


OTHER_ATTENTION = "llm.apply_model(__import__('tests.e2e.broken', fromlist=['x']).other_attention)"


def config_of(store_config: Any, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = store_config(kind)
    # One label for whatever weights there are: only the measurement can tell them apart. No audits: what is
    # found is found before a token leaves.
    made["identity"] = {"weights": "one label"}
    made["kv"] = made["kv"] | {"audit_every": 0, "load": "always"}
    return made


def verdicts(config: dict[str, Any]) -> dict[str, int]:
    """How many writers are in each state."""
    found: dict[str, int] = {}
    with open_index(load_settings(config, environ={})) as index:
        for name in index.namespaces():
            for one in index.verdicts(name).values():
                found[one.state] = found.get(one.state, 0) + 1
    return found


def test_no_token_comes_from_an_engine_that_computes_something_else(
    model: Any, tmp_path: Path, store_config: Any
) -> None:
    config = config_of(store_config, "sqlite")
    text = model("text")
    prompts = {name: prompt(LENGTH, 70 + number) for number, name in enumerate(WRITERS)}
    with Engine(text, log_path=tmp_path / "none.log") as engine:
        expected = {name: engine.generate([one])[0].token_ids for name, one in prompts.items()}
    for name, one in prompts.items():
        folder = text
        if name == "replaced":
            folder = folder_of(model("text", 1), name, tmp_path / name, text.name)
        elif name in WEIGHTS:
            folder = folder_of(text, name, tmp_path / name)
        env = PROVES | {PLACE: name}
        with Engine(folder, kv=config, env=env, log_path=tmp_path / f"{name}.log") as engine:
            if name == "other_attention":
                engine.evaluate(OTHER_ATTENTION)
            engine.generate([one])
            engine.idle(0.5)
    with Engine(text, kv=config, env=PROVES, log_path=tmp_path / "reader.log") as engine:

        def served(name: str) -> tuple[bool, int]:
            """Whether the tokens are right, and how many of the prompt came from the store."""
            engine.reset_prefix_cache()
            [one] = engine.generate([prompts[name]])
            engine.idle(0.5)
            return one.token_ids == expected[name], one.external_tokens

        full = full_blocks(prompts["honest"])
        # The first load from each writer is computed, whoever it is.
        assert {name: served(name) for name in WRITERS} == dict.fromkeys(WRITERS, (True, 0))
        until(lambda: "writes what other engines don't compute" in engine.log(), say=engine.log)
        # From the honest one all is loaded, and from the others nothing.
        assert served("honest") == (True, full)
        again = {name: served(name) for name in WRITERS if name != "honest"}
        assert set(again.values()) == {(True, 0)}, again
        # Their segments are gone, and the reader stores and loads its own.
        for name in FAIL:
            until(lambda name=name: served(name) == (True, full))
        assert [served(name)[0] for name in WRITERS] == [True] * len(WRITERS)
        counts = scheduler_counters(engine)
        assert counts["miss_blocks{unproven}"] >= len(WRITERS) * full // 32
    found = verdicts(config)
    assert found["proven"] == 1 and found["failed"] >= len(FAIL), found


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("text", {"async_scheduling": True}, id="asynchronous scheduling"),
        pytest.param(
            "text", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, id="two ranks"
        ),
        pytest.param("window", {}, id="several groups"),
    ],
)
def test_a_proof_holds_wherever_it_is_made(
    model: Any, tmp_path: Path, store_config: Any, kind: str, more: dict[str, Any]
) -> None:
    config = config_of(store_config, "sqlite")
    folder = model(kind)
    prompts = [prompt(LENGTH, 90 + number) for number in range(2)]
    with Engine(folder, log_path=tmp_path / "none.log", **more) as engine:
        expected = [engine.generate([one])[0].token_ids for one in prompts]
    other = folder_of(model(kind, 1), "replaced", tmp_path / "other", folder.name)
    for place, one in zip((other, folder), prompts, strict=True):
        log_path = tmp_path / f"{place.parent.name}.log"
        with Engine(place, kv=config, env=PROVES, log_path=log_path, **more) as engine:
            engine.generate([one])
            engine.idle(0.5)
    with Engine(folder, kv=config, env=PROVES, log_path=tmp_path / "reader.log", **more) as engine:
        served = []
        for _ in range(2):
            for number, one in enumerate(prompts):
                engine.reset_prefix_cache()
                [result] = engine.generate([one])
                engine.idle(0.5)
                served.append((result.token_ids == expected[number], result.external_tokens))
    assert [right for right, _ in served] == [True] * 4
    assert [tokens for _, tokens in served[:3]] == [0, 0, 0]
    assert served[3][1] > 0, "the honest one is loaded"
