"""The allow list of vLLM's options: what isn't on it makes another namespace."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import vllm.config
import vllm.envs
from vllm.config import CacheConfig, CompilationConfig, LoadConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from connectors.engine.allowed import harmless
from connectors.engine.allowed.files import NotKnown
from connectors.engine.allowed.options import options
from connectors.engine.version import tried, vllm_release
from tools.models import build

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models"), "text")


def made(model: Path, **more: Any) -> VllmConfig:
    given: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True} | more
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **given).create_engine_config()


def sections() -> dict[str, type]:
    """vLLM's configuration classes by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [VllmConfig]
    while waiting:
        one = waiting.pop()
        if one.__name__ in found:
            continue
        found[one.__name__] = one
        text = " ".join(str(field.type) for field in dataclasses.fields(one))
        module = sys.modules[one.__module__]
        names = {name.rpartition(".")[2] for name in re.findall(r"[\w.]+Config\b", text)}
        names |= set(re.findall(r"\w+Config\b", text))
        for name in names:
            kind = getattr(module, name, None) or getattr(vllm.config, name, None)
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                waiting.append(kind)
    return found


#: Names that only one of the versions that were tried has.
ONLY = {
    "0.32": {
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
        "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
    },
    "0.33": {
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
        "VLLM_CHAT_TEMPLATE_FUEL",
        "VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
        "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES",
        "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
        "VLLM_REQUEST_BODY_LOG_LEVEL",
        "SpeculativeConfig.disable_lookahead_block_hashes",
        "WatchdogConfig",
    },
}


def test_no_name_on_the_list_is_stale() -> None:
    """Else the list speaks of something that vLLM has renamed or removed: look up what became of it."""
    assert sorted(ONLY) == sorted(tried().split(" to "))
    known = sections()
    assert len(known) > 25
    fields = {f"{name}.{one.name}" for name, kind in known.items() for one in dataclasses.fields(kind)}
    gone = harmless.SECTIONS | harmless.NOT_OF_ITEMS
    gone -= known.keys()
    gone |= (harmless.OPTIONS | harmless.OF_RANKS | harmless.VALUES.keys() | harmless.KEYS.keys()) - fields
    gone |= harmless.VARIABLES - vllm.envs.environment_variables.keys()
    elsewhere = set().union(*(names for release, names in ONLY.items() if release != vllm_release()))
    assert not gone - elsewhere, "on the list of harmless options, and not in this vLLM"
    assert not ONLY[vllm_release()] & gone


def fields_of(config: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    for one in dataclasses.fields(config):
        value = getattr(config, one.name, None)
        said = getattr(one.default, "init", None)
        if not (one.init if said is None else said):
            # What can't be given follows from what can.
            continue
        yield config, one, path + one.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from fields_of(value, f"{path}{one.name}.")


def test_every_field_that_is_not_listed_changes_the_namespace(text: Path) -> None:
    """Each of vLLM's fields in turn gets a value that it never has."""
    config = made(text)
    before = options(config, kind="kv")
    harmless_names = harmless.OPTIONS
    counts = {True: 0, False: 0}
    for owner, field, path in list(fields_of(config)):
        section = type(owner).__name__
        value = getattr(owner, field.name, None)
        if dataclasses.is_dataclass(value):
            continue
        object.__setattr__(owner, field.name, "a value that it never has")
        try:
            changed = options(config, kind="kv") != before
        finally:
            object.__setattr__(owner, field.name, value)
        listed = f"{section}.{field.name}" in harmless_names or section in harmless.SECTIONS
        assert changed is not listed, path
        counts[changed] += 1
    assert counts[True] > 80 and counts[False] > 80
    assert options(config, kind="kv") == before


@dataclasses.dataclass
class CacheConfigOfTomorrow(CacheConfig):
    """A newer vLLM's, with one more option."""

    rounds_keys_to: int = 0


def test_an_option_of_a_newer_vllm_makes_another_namespace_once_it_is_used(text: Path) -> None:
    config = made(text)
    before = options(config, kind="kv")
    CacheConfigOfTomorrow.__name__ = "CacheConfig"
    planted = CacheConfigOfTomorrow(
        **{
            one.name: getattr(config.cache_config, one.name)
            for one in dataclasses.fields(CacheConfig)
            if one.init and getattr(one.default, "init", True) is not False
        }
    )
    object.__setattr__(config, "cache_config", planted)
    assert options(config, kind="kv") == before
    planted.rounds_keys_to = 4
    assert options(config, kind="kv") == before | {"cache_config.rounds_keys_to": "4"}
    # It has no part in an encoder's output.
    assert "cache_config.rounds_keys_to" not in options(config, kind="ec")


def test_a_section_of_a_newer_vllm_counts_too(text: Path) -> None:
    @dataclasses.dataclass
    class RotationConfig:
        angle: float = 0.0

    @dataclasses.dataclass
    class Tomorrow:
        rotation_config: RotationConfig | None = None

    assert options(Tomorrow(), kind="kv") == options(Tomorrow(RotationConfig()), kind="kv")
    turned = options(Tomorrow(RotationConfig(0.5)), kind="kv")
    assert turned["rotation_config.angle"] == "0.5"


def test_engines_that_differ_in_sizes_and_names_share(text: Path) -> None:
    one = made(text)
    other = made(
        text,
        max_num_seqs=7,
        max_num_batched_tokens=600,
        max_model_len=600,
        gpu_memory_utilization=0.3,
        served_model_name="x",
        seed=3,
        data_parallel_size=2,
        distributed_executor_backend="mp",
        disable_log_stats=True,
        hf_token="secret",
        load_format="safetensors",
        worker_extension_cls="connectors.weights.NamedWeights",
    )
    assert options(one, kind="kv") == options(other, kind="kv")
    assert options(one, kind="ec") == options(other, kind="ec")


@pytest.mark.parametrize(
    ("given", "path", "shown"),
    [
        ({"attention_backend": "CPU_ATTN"}, "attention_config.backend", "CPU_ATTN"),
        ({"enforce_eager": False}, "compilation_config.mode", "DYNAMO_TRACE_ONCE"),
        ({"additional_config": {"ours": 1}}, "additional_config", "sha256:"),
        ({"compilation_config": {"pass_config": {"eliminate_noops": False}}},
         "compilation_config.pass_config.eliminate_noops", "false"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "cache_config.kv_cache_dtype_skip_layers", '["0"]'),
        ({"disable_sliding_window": True}, "model_config.disable_sliding_window", "true"),
        ({"expert_placement_strategy": "round_robin"}, "parallel_config.expert_placement_strategy",
         "round_robin"),
    ],
)  # fmt: skip
def test_options_are_shown_as_people_know_them(
    text: Path, given: dict[str, Any], path: str, shown: str
) -> None:
    found = options(made(text, **given), kind="kv")
    assert found != options(made(text), kind="kv")
    assert found[path].startswith(shown)


def test_variables_that_change_what_is_computed_count(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(text)
    before = options(config, kind="kv")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    # As Kubernetes sets it for a Service of that name.
    monkeypatch.setenv("VLLM_ROUTER_SERVICE_HOST", "10.0.0.1")
    assert options(config, kind="kv") == before
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert options(config, kind="kv") == before | {"$VLLM_BATCH_INVARIANT": "1"}


def test_no_secret_and_no_path_is_shown(text: Path) -> None:
    config = made(text)
    object.__setattr__(
        config, "additional_config", {"password": "hunter2", "url": "s3://u:p@h/x", "at": "/home/me"}
    )
    text = json.dumps(options(config, kind="kv"))
    assert "hunter2" not in text and "s3://" not in text and "/home/me" not in text


def test_what_cannot_be_written_down_is_not_known(text: Path) -> None:
    config = made(text)
    object.__setattr__(config, "additional_config", {"an": object()})
    with pytest.raises(NotKnown, match="additional_config"):
        options(config, kind="kv")


def test_a_label_for_the_weights_covers_how_they_are_loaded(text: Path) -> None:
    config = made(text)
    object.__setattr__(config, "load_config", LoadConfig(load_format="tensorizer", ignore_patterns=["x"]))
    assert "load_config.ignore_patterns" in options(config, kind="kv")
    assert options(config, kind="kv", labelled=True) == options(made(text), kind="kv")


def test_ranks_sums_count_unless_any_number_of_ranks_may_share(text: Path) -> None:
    config = made(text)
    before = options(config, kind="kv"), options(config, kind="kv", any_tp=True)
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    assert options(config, kind="kv") != before[0]
    assert options(config, kind="kv", any_tp=True) == before[1]


def test_they_are_the_same_in_every_process(text: Path) -> None:
    """Whatever a process draws or counts for itself is in none of them."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from tests.connectors.engine.test_options import made, options\n"
        "print('said', json.dumps([options(made(Path(sys.argv[1])), kind=kind) for kind in ('kv', 'ec')]))"
    )
    said = []
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", code, str(text)],
            capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed},
        )  # fmt: skip
        said.append(re.findall(r"^said (.*)$", ran.stdout, re.MULTILINE)[0])
    assert said[0] == said[1]
    assert json.loads(said[0])[0]["compilation_config.mode"] == "NONE"
    assert CompilationConfig().mode is None, "the default is resolved by vLLM"
