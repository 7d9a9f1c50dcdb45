"""Engines whose bytes aren't those of another share nothing with it, whatever makes the difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.weights import UNNAMED
from kvstore.admin.inspect.namespaces import differences
from schemas.namespace import Namespace
from tests.e2e.engine import Engine
from tests.e2e.sharing import check_store, full_blocks, prompt

pytestmark = pytest.mark.engine

LONG = prompt(320, 1)
_NAMESPACE = "llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.space.namespace"


class Asked:
    """What one engine answered, and who it is."""

    def __init__(self, model: Path, log_path: Path, **engine: Any) -> None:
        with Engine(model, log_path=log_path, **engine) as started:
            [result] = started.generate([LONG])
            self.tokens, self.external = result.token_ids, result.external_tokens
            self.log = log_path.read_text()
            if engine.get("kv") is not None:
                text = started.evaluate(f"{_NAMESPACE}.model_dump_json()")
                self.namespace = Namespace.model_validate_json(text)


def test_what_was_not_loaded_from_the_folder_shares_with_nobody(
    text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    alone = Asked(text_model, tmp_path / "alone.log")
    dummy = Asked(text_model, tmp_path / "dummy.log", kv=config, load_format="dummy")
    assert dummy.external == 0 and dummy.tokens != alone.tokens
    assert dummy.namespace.weights.startswith(UNNAMED)
    assert "with --load-format dummy the weights are random numbers" in dummy.log
    # Nor does a label name random numbers.
    labelled = config | {"identity": {"weights": "mine"}}
    assert Asked(
        text_model, tmp_path / "label.log", kv=labelled, load_format="dummy"
    ).namespace.weights.startswith(UNNAMED)

    first = Asked(text_model, tmp_path / "first.log", kv=config)
    assert (first.external, first.tokens) == (0, alone.tokens)
    assert "have no name" not in first.log
    # Other sizes and another way to read the same files are the same bytes.
    second = Asked(
        text_model,
        tmp_path / "second.log",
        kv=config,
        max_num_seqs=3,
        max_model_len=2048,
        load_format="auto",
        safetensors_load_strategy="eager",
        served_model_name="another",
    )
    assert second.namespace == first.namespace
    assert (second.external, second.tokens) == (full_blocks(LONG), alone.tokens)

    # Another dtype, and an option that nobody has called harmless.
    half = Asked(text_model, tmp_path / "half.log", kv=config, dtype="bfloat16")
    other = Asked(
        text_model, tmp_path / "other.log", kv=config, compilation_config={"custom_ops": ["-silu_and_mul"]}
    )
    assert (half.external, other.external) == (0, 0)
    [difference] = differences(*(one.namespace.model_dump(mode="json") for one in (first, other)))
    assert difference.path == "options.compilation_config.custom_ops"
    assert "-silu_and_mul" in difference.b and "-silu_and_mul" not in difference.a
    check_store(config)


def test_a_folder_that_is_replaced_while_the_engine_starts(
    model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite") | {"identity": {"model": "text"}}
    old, new, link = model("text"), model("text", seed=1), tmp_path / "current"
    link.symlink_to(old)
    replaced = Asked(
        link,
        tmp_path / "replaced.log",
        kv=config,
        kv_config={"kv_connector": "ReplacingConnector", "kv_connector_module_path": "tests.e2e.replacing"},
        env={"REPLACE": f"{link}:{new}"},
    )
    assert link.resolve() == new.resolve()
    assert replaced.namespace.weights.startswith(UNNAMED)
    assert "has changed since the engine's process began" in replaced.log
    # The engine had the old weights, and its blocks are under nobody's name.
    started = Asked(link, tmp_path / "new.log", kv=config)
    assert started.external == 0 and started.tokens != replaced.tokens
    again = Asked(link, tmp_path / "again.log", kv=config)
    assert (again.external, again.tokens) == (full_blocks(LONG), started.tokens)


def with_code(folder: Path, target: Path, theta: float) -> Path:
    """A copy of a model whose configuration is made by code in its folder."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "ours", "auto_map": {"AutoConfig": "ours.OursConfig"}}
    (target / "config.json").write_text(json.dumps(config))
    (target / "ours.py").write_text(
        "from transformers import LlamaConfig\n\n\n"
        "class OursConfig(LlamaConfig):\n"
        '    model_type = "ours"\n\n'
        "    def __init__(self, **given):\n"
        f"        super().__init__(**given | {{'rope_parameters': {{'rope_type': 'default', "
        f"'rope_theta': {theta}}}}})\n"
    )
    return target


def test_code_that_comes_with_a_model_is_part_of_it(
    text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite") | {"identity": {"model": "text"}}
    one = with_code(text_model, tmp_path / "one", 10000.0)
    same = with_code(text_model, tmp_path / "same", 10000.0)
    other = with_code(text_model, tmp_path / "other", 50.0)
    asked = {
        folder.name: Asked(folder, tmp_path / f"{folder.name}.log", kv=config, trust_remote_code=True)
        for folder in (one, same, other)
    }
    assert not asked["one"].namespace.weights.startswith(UNNAMED)
    assert asked["same"].external == full_blocks(LONG)
    assert asked["same"].tokens == asked["one"].tokens
    assert asked["other"].external == 0 and asked["other"].tokens != asked["one"].tokens
