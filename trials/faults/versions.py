"""Two engines on one store that must not share: weights, configurations, dtypes, layouts, hash seeds or
versions of vLLM differ; and stores that an older or a newer version of kvstore has written."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.engine import ROOT, Engine, Result
from tests.e2e.sharing import check_store, full_blocks, prompt, scheduler_counters, worker_counters
from tools.models import build
from trials.faults import formats, kept
from trials.faults import row as rows
from trials.faults.row import Row

FAMILY = "versions"
PROMPTS = [prompt(300 + 70 * number, 40 + number) for number in range(4)]
TOKENS = 8
#: Its workers are in processes of their own, where nobody can ask them.
_TWO_RANKS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}


@dataclass(frozen=True)
class Home:
    """An engine whose blocks are stored, and that goes on while others come and go."""

    engine: Engine
    config: dict[str, Any]
    folder: Path
    #: What it answers without a store.
    right: list[list[int]]

    def lost(self) -> tuple[int, int]:
        """Wrong answers, and blocks that the store does not serve any more."""
        results = ask(self.engine)
        wrong = sum(got.token_ids != right for got, right in zip(results, self.right, strict=True))
        missing = sum(
            (full_blocks(one) - got.external_tokens) // 32 for one, got in zip(PROMPTS, results, strict=True)
        )
        return wrong, missing


def ask(engine: Engine, **sampling: Any) -> list[Result]:
    """All prompts one by one, from an empty cache of the engine."""
    assert engine.reset_prefix_cache()
    results = [engine.generate([one], max_tokens=TOKENS, **sampling)[0] for one in PROMPTS]
    engine.idle(0.2)
    return results


@contextlib.contextmanager
def home() -> Iterator[Home]:
    """One in float32 with blocks of 32 tokens, on SQLite and a folder."""
    with tempfile.TemporaryDirectory(prefix="kvs-versions-") as place:
        folder = Path(place)
        # Nothing here is about being late.
        config = {
            "payloads": f"file://{folder}/payloads",
            "kv": {"match_deadline_s": 20.0, "match_ttl_s": 30.0},
            "sqlite": {"busy_timeout_s": 20.0},
        }
        model = build(ROOT / ".cache" / "models", "text", 0)
        with Engine(model, kv=config, log_path=folder / "home.log") as engine:
            right = [one.token_ids for one in ask(engine, skip_reading_prefix_cache=True)]
            yield Home(engine, config, folder, right)


def stranger(model: str = "text", seed: int = 0, **arguments: Any) -> Callable[[Path], rows.Result]:
    """A row's run: an engine that differs in these, on the same store."""

    def run(place: Path) -> rows.Result:
        kept.let_go("bed")
        one: Home = kept.keep("versions", home)
        result = rows.Result(faults=1)
        assert one.lost() == (0, 0), "the store was not well before"
        folder = build(ROOT / ".cache" / "models", model, seed)
        with Engine(folder, kv=one.config, log_path=place / "other.log", **arguments) as other:
            cold, warm = ask(other), ask(other)
            right = ask(other, skip_reading_prefix_cache=True)
            quarantined = scheduler_counters(other).get("quarantined_segments", 0)
            if arguments != _TWO_RANKS:
                quarantined += worker_counters(other).get("quarantined_segments", 0)
        for got in (cold, warm):
            result.wrong_tokens += sum(a.token_ids != b.token_ids for a, b in zip(got, right, strict=True))
        foreign = sum(got.external_tokens for got in cold)
        # Not one block of the other's: it would be a promise that only luck keeps.
        result.wrong_tokens += foreign > 0
        wrong, result.lost_blocks = one.lost()
        result.wrong_tokens += wrong
        result.lost_blocks += quarantined
        result.requests = len(cold + warm + right) + len(PROMPTS)
        seen = check_store(one.config)
        own = sum(got.external_tokens for got in warm)
        result.remark = (
            f"{foreign} tokens of the first one's served, {own} of its own; "
            f"{seen['namespaces']} namespaces by now"
        )
        if not own:
            result.faults = 0
            result.remark += "; the other one stored nothing"
        return result

    return run


def _row(difference: str, run: Callable[[Path], rows.Result], *, reach: rows.Reach = "engine") -> Row:
    return Row(FAMILY, difference, reach, run, quick=reach == "store")


_SEED = {"PYTHONHASHSEED": "7"}

ROWS = [
    _row("another engine with other weights", stranger(seed=1)),
    _row(
        "another engine with another configuration: rope",
        stranger(hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}),
    ),
    _row("another engine in bfloat16", stranger(dtype="bfloat16")),
    _row("another engine with a KV cache in fp8", stranger(kv_cache_dtype="fp8_e5m2")),
    _row("another engine with blocks of 64 tokens", stranger(block_size=64)),
    _row("another engine with another hash algorithm", stranger(prefix_caching_hash_algo="sha256_cbor")),
    _row("another engine with another PYTHONHASHSEED", stranger(env=_SEED)),
    _row(
        "another engine with a hash that is seeded",
        stranger(env=_SEED, prefix_caching_hash_algo="xxhash"),
    ),
    _row("another engine with two ranks", stranger(**_TWO_RANKS)),
    _row(
        "another engine with a later vLLM",
        stranger(worker_extension_cls="trials.faults.other_vllm.EncoderCounter"),
    ),
    *(_row(fault, run, reach="store") for fault, run in formats.RUNS.items()),
]
