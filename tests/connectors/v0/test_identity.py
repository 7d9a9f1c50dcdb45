"""Which stages of which v0 engines share: one difference each, and what stands in the namespace."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.v0.identity import Engine, engine_of, namespace_of
from connectors.v0.pages import Pages, Rows
from kvstore.build import load_settings
from kvstore.keys import namespace_id
from schemas.namespace import Namespace

pytestmark = pytest.mark.engine  # the full set-up, not an engine

HIDDEN = Rows.hidden(32, torch.bfloat16)
ENGINE = Engine(16, False, HIDDEN, torch.bfloat16, tp=2, tp_rank=0, pp=2, pp_rank=1)
FIELDS = {"tenant": "t", "model": "m", "weights": "w", "dtype": "bfloat16"}


def made(engine: Engine = ENGINE, **changes: Any) -> Namespace:
    shape = (9, 16, 40) if engine.mla else changes.pop("shape", (2, 9, 16, 4, 8))
    caches = [torch.zeros(shape, dtype=changes.pop("dtype", torch.bfloat16))] * changes.pop("layers", 3)
    pages = Pages(caches, 16, mla=engine.mla)
    settings = load_settings({"payloads": "file:///x", **changes.pop("settings", {})}, environ={})
    rows, first = changes.pop("rows", HIDDEN), changes.pop("first", 3)
    kv_dtype = changes.pop("kv_dtype", "auto")
    assert not changes
    span = range(first, first + pages.layers)
    return namespace_of(engine, settings, FIELDS, kv_dtype, pages, rows, span)


def test_every_difference_is_another_namespace() -> None:
    between = {"hidden_states": torch.zeros(1, 32), "residual": torch.zeros(1, 32)}
    variants = [
        made(),
        made(replace(ENGINE, tp=4)),
        made(replace(ENGINE, tp=1)),
        made(replace(ENGINE, mla=True)),
        made(replace(ENGINE, mla=True, tp=1)),
        made(shape=(2, 9, 16, 8, 8)),
        made(shape=(2, 9, 16, 4, 16)),
        made(dtype=torch.float16),
        made(layers=4),
        made(first=0),
        made(kv_dtype="fp8"),
        made(rows=Rows.hidden(64, torch.bfloat16)),
        made(rows=Rows.hidden(32, torch.float32)),
        made(rows=Rows.between(between)),
        made(settings={"identity": {"epoch": 1}}),
        made(settings={"segment": {"codec": "lz4"}}),
    ]
    assert len({namespace_id(one) for one in variants}) == len(variants)


def test_ranks_and_the_number_of_stages_and_of_pages_are_not_part_of_it() -> None:
    same = [
        made(replace(ENGINE, tp_rank=1)),
        made(replace(ENGINE, pp=3, pp_rank=2)),
        made(shape=(2, 30, 16, 4, 8)),
    ]
    assert {namespace_id(one) for one in same} == {namespace_id(made())}


def test_the_group_says_how_the_heads_are_cut() -> None:
    group = made().groups[0]
    assert (group.kind, group.shape, group.shards, made().parts()) == ("full", (3, 8, 16, 16), 2, 2)
    latent = made(replace(ENGINE, mla=True)).groups[0]
    assert (latent.kind, latent.shape, latent.shards) == ("mla", (3, 1, 16, 40), 1)
    assert made().parallel.tp == made(replace(ENGINE, mla=True)).parallel.tp == 2


@pytest.mark.parametrize(
    ("rank", "tp_rank", "pp_rank"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (5, 1, 0), (6, 0, 1)]
)
def test_a_rank_in_the_world_is_a_place_in_the_engine(rank: int, tp_rank: int, pp_rank: int) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(), dtype=torch.float16, get_hidden_size=lambda: 64
        ),
        cache_config=SimpleNamespace(block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2),
    )
    engine = engine_of(rank, config)
    assert (engine.tp_rank, engine.pp_rank, engine.is_last_stage) == (tp_rank, pp_rank, pp_rank == 1)
    assert (engine.hidden, engine.mla) == (Rows.hidden(64, torch.float16), False)
    config.model_config.hf_config.kv_lora_rank = 512
    assert engine_of(rank, config).mla
