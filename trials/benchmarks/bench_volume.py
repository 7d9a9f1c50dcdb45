"""A real engine at a GPU's volume: what saving and loading cost beside bare copies of the same bytes.

    python -m trials.benchmarks.bench_volume [--tokens 4096] [--prompts 2] [--rounds 1] [--json FILE]

The model is small, its KV cache is that of a Llama of 8 billion parameters (32 layers, 8 heads of 128), in
float32: 256 KiB a token. Prompts are computed in steps of 2,048 tokens, 512 MiB each. Three engines in turn:
one without a store, one that saves and is asked twice, and a fresh one that loads what it saved.

    bare save   the same bytes copied to memory of a segment's size, and written to files of that size
    bare load   these files read to memory of that size, and copied once more

"stored" ends when nothing is under way any more; what is computed meanwhile is part of it. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.engine import ROOT, Engine
from tests.e2e.sharing import BLOCK, check_store, full_blocks, prompt, worker_counters
from tools.models import build

TOKEN_BYTES = 32 * 8 * 128 * 2 * 4
SEGMENT_BYTES = 32 << 20


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def bare_copies(folder: Path, nbytes: int) -> tuple[float, float]:
    """Seconds to save and to load so many bytes by nothing but copies, reads and writes."""
    source = np.random.default_rng(0).integers(0, 256, SEGMENT_BYTES, dtype=np.uint8)
    staged, target = np.zeros_like(source), np.zeros_like(source)
    files = [folder / str(number) for number in range(-(-nbytes // SEGMENT_BYTES))]

    def save() -> None:
        for file in files:
            np.copyto(staged, source)
            file.write_bytes(staged.data)

    def load() -> None:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                opened.readinto(staged.data)
            np.copyto(target, staged)

    return timed(save)[0], timed(load)[0]


def measure(model: Path, folder: Path, prompts: list[dict[str, Any]]) -> dict[str, float]:
    """One round, in seconds; "first" and "blocks" are the shares of full blocks that were stored after all
    prompts had been asked for once, and twice."""
    store = {"payloads": f"file://{folder}/store", "kv": {"match_deadline_s": 20.0}}
    tokens = sum(len(one["prompt_token_ids"]) for one in prompts)
    arguments = {
        "max_num_batched_tokens": 2048,
        "max_model_len": max(len(one["prompt_token_ids"]) for one in prompts) + BLOCK,
        "kv_cache_memory_bytes": 2 * tokens * TOKEN_BYTES,
    }
    row: dict[str, float] = {}
    with Engine(model, log_path=folder / "plain.log", **arguments) as engine:
        row["cold"], plain = timed(lambda: engine.generate(prompts, max_tokens=1))
    with Engine(model, kv=store, log_path=folder / "saving.log", **arguments) as engine:
        row["cold, saving"], _ = timed(lambda: engine.generate(prompts, max_tokens=1))
        row["stored"] = row["cold, saving"] + timed(lambda: engine.idle(0.0))[0]
        blocks = sum(full_blocks(one) for one in prompts) // BLOCK
        row["first"] = worker_counters(engine)["save_blocks{stored}"] / blocks
        engine.generate(prompts, max_tokens=1)
        engine.idle(0.0)
        counters = worker_counters(engine)
    row["blocks"] = check_store(store)["blocks"] / blocks
    with Engine(model, kv=store, log_path=folder / "loading.log", **arguments) as engine:
        row["warm"], warm = timed(lambda: engine.generate(prompts, max_tokens=1))
    row["loaded"] = sum(one.external_tokens for one in warm) / (blocks * BLOCK)
    assert [one.token_ids for one in warm] == [one.token_ids for one in plain], "a wrong token"
    (folder / "bare").mkdir()
    row["bare save"], row["bare load"] = bare_copies(folder / "bare", counters["save_bytes"])
    row["MB"] = counters["save_bytes"] / 1e6
    return row


def run(tokens: int, count: int, rounds: int) -> dict[str, Any]:
    model = build(ROOT / ".cache" / "models", "volume")
    prompts = [prompt(tokens, seed) for seed in range(count)]
    rows = []
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="kvstore-volume-"))
        try:
            rows.append(measure(model, folder, prompts))
        finally:
            shutil.rmtree(folder)
    row = {name: statistics.median(one[name] for one in rows) for name in rows[0]}
    ratios = {
        "saving, to the same engine without a store": row["cold, saving"] / row["cold"],
        "stored, to bare copies and to computing, one after the other": row["stored"]
        / (row["cold"] + row["bare save"]),
        "warm, to bare copies": row["warm"] / row["bare load"],
        "warm, to computing": row["warm"] / row["cold"],
    }
    return {
        "machine": f"{platform.machine()}, {platform.python_version()}",
        "prompts": count,
        "tokens": tokens,
        "rounds": rounds,
        "seconds": row,
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run(options.tokens, options.prompts, options.rounds)
    seconds = report["seconds"]
    print(f"{options.prompts} prompts of {options.tokens} tokens, {seconds['MB']:.0f} MB of KV stored")
    print(
        f"  {100 * seconds['first']:.1f} % of blocks stored when asked for once, "
        f"{100 * seconds['blocks']:.1f} % when asked for twice, {100 * seconds['loaded']:.1f} % loaded"
    )
    for name in ("cold", "cold, saving", "stored", "warm", "bare save", "bare load"):
        print(f"  {name:14s} {seconds[name]:8.2f} s")
    for name, ratio in report["ratios"].items():
        print(f"  {name}: {ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
