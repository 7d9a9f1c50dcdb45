"""The cost of a proof: the time to the first token of the first hit from a writer that nobody has compared.

    python -m trials.benchmarks.bench_proof [--tokens 1024] [--writers 60] [--json FILE]

Real engines on the CPU, one at a time. A first engine stores a prompt for each of many writers. Three times
are taken of each prompt, to its first token:

    computed    the same tokens under another salt, of which nothing is stored
    first hit   nothing is known of the writer: it is computed and compared
    next hit    the same, when the writer is proven: it loads

All three come from one engine, the first two in turn. The cost of a proof is the first hit less the computing
right before it.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.believing import PROVE
from tests.e2e.engine import ROOT, Engine
from tests.e2e.sharing import full_blocks, prompt
from tools.models import build

#: Makes what the engine saves from now on the work of another writer.
_WRITER = (
    "llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler"
    ".store.backends.writer.adopt({name!r})"
)


def _seconds(engine: Engine, one: dict[str, Any], loaded: int) -> float:
    engine.reset_prefix_cache()
    [result] = engine.generate([one], max_tokens=2)
    assert result.external_tokens == loaded, f"{result.external_tokens} tokens were loaded, expected {loaded}"
    assert result.ttft_s is not None
    # A comparison meanwhile is told with a later step.
    engine.idle(0.2)
    return result.ttft_s


def measured(tokens: int, writers: int) -> dict[str, list[float]]:
    """Seconds of each prompt, by what was done."""
    model = build(ROOT / ".cache" / "models", "text")
    prompts = [prompt(tokens, 1000 + number) for number in range(writers)]
    full = full_blocks(prompts[0])
    with tempfile.TemporaryDirectory(prefix="kvstore-proof-") as made:
        folder = Path(made)
        config = {"payloads": f"file://{folder}/cache", "kv": {"load": "always", "audit_every": 0}}
        with Engine(model, kv=config, env={PROVE: "1"}, log_path=folder / "writers.log") as engine:
            for number, one in enumerate(prompts):
                engine.evaluate(_WRITER.format(name=f"writer {number}"))
                engine.generate([one], max_tokens=2)
                engine.idle(0.2)
        with Engine(model, kv=config, env={PROVE: "1"}, log_path=folder / "reader.log") as engine:
            _seconds(engine, prompt(tokens, 2), 0)
            computed, first = [], []
            for number, one in enumerate(prompts):
                computed.append(_seconds(engine, {**one, "cache_salt": f"salt {number}"}, 0))
                first.append(_seconds(engine, one, 0))
            after = [_seconds(engine, one, full) for one in prompts]
    return {"computed": computed, "first hit": first, "next hit": after}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.benchmarks.bench_proof")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--writers", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds = measured(options.tokens, options.writers)
    cost = [hit - base for hit, base in zip(seconds["first hit"], seconds["computed"], strict=True)]
    rows = {name: _cut(values) for name, values in {**seconds, "cost of a proof": cost}.items()}
    print(f"{options.tokens} tokens, {options.writers} writers, ms to the first token")
    print(f"{'':16}{'p50':>10}{'p99':>10}")
    for name, (p50, p99) in rows.items():
        print(f"{name:16}{p50:10.1f}{p99:10.1f}")
    if options.json:
        told = {
            "machine": platform.processor(),
            "tokens": options.tokens,
            "writers": options.writers,
            "ms": rows,
        }
        options.json.write_text(json.dumps(told, indent=2))
    return 0


def _cut(values: list[float]) -> tuple[float, float]:
    cuts = quantiles([1e3 * value for value in values], n=100, method="inclusive")
    return cuts[49], cuts[98]


if __name__ == "__main__":
    raise SystemExit(main())
