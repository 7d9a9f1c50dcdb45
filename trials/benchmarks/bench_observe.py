"""What an engine's thread pays for a connector that only observes: microseconds a request, and a step.

    python -m trials.benchmarks.bench_observe [--requests 2000] [--json FILE]

The calls that vLLM makes for one request, from its arrival to its end, by the length of its prompt, with the
trace written to a disk by its own thread meanwhile; and those of one step in which 256 requests decode. A row
is the median of its rounds, and the 99th percentile of single requests in all of them: what else the machine
does, and the thread that writes, is in that.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from connectors.engine.step import RequestView, StepView
from connectors.observing.recording import Asked
from kvstore.build import load_settings, open_recording
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.fake_vllm import FakeRequest, scheduled
from tests.store.world import namespace

ROUNDS = 5
#: Blocks of a prompt: of 16 tokens: 2,000 to a million of them.
BLOCKS = (125, 2048, 8192, 65536)
RUNNING = 256


def asked_in(folder: str) -> Asked:
    settings = load_settings({"kv": {"observe": True}, "trace": {"folder": folder}}, {})
    return Asked(open_recording(settings), namespace(), SCHEDULERS, TOKENS, adapters=False)


def serve(asked: Asked, request: Any) -> None:
    """What vLLM's scheduler calls for a request."""
    asked.arrives(RequestView(request))
    asked.comes_to(RequestView(request), 0)
    asked.ends(request.request_id)


def requests_of(blocks: int, count: int, round_: int) -> list[Any]:
    """Requests that share their first half; what they are named by is made before the clock runs."""
    made = []
    head = [b"%032d" % number for number in range(blocks // 2)]
    for number in range(count):
        request = FakeRequest(f"r{number}", [1])
        tail = [b"%08d%08d%016d" % (round_, number, block) for block in range(blocks - blocks // 2)]
        request.block_hashes = head + tail
        made.append(request)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_in(folder)
        for blocks in BLOCKS:
            medians, singles = [], []
            count = max(20, min(options.requests, 4_000_000 // blocks))
            for round_ in range(ROUNDS):
                took = []
                for request in requests_of(blocks, count, round_):
                    before = time.perf_counter()
                    serve(asked, request)
                    took.append((time.perf_counter() - before) * 1e6)
                medians.append(statistics.median(took))
                singles += took
            rows[f"a request of {blocks:,} blocks"] = {
                "median_us": statistics.median(medians),
                "p99_us": statistics.quantiles(singles, n=100)[98],
            }
        running = [FakeRequest(f"r{number}", [1]) for number in range(RUNNING)]
        for request in running:
            asked.arrives(RequestView(request))
        step = scheduled([(request, 1) for request in running])
        # vLLM has the sum at hand; the stand-in adds it up.
        step = type("Step", (), {**vars(step), "total_num_scheduled_tokens": RUNNING})()
        took = []
        for _ in range(20_000):
            before = time.perf_counter()
            asked.step(StepView(step))
            asked.cost.ended()
            took.append((time.perf_counter() - before) * 1e6)
        rows[f"a step of {RUNNING} that decode"] = {
            "median_us": statistics.median(took),
            "p99_us": statistics.quantiles(took, n=100)[98],
        }
        lost = asked.lost
        asked.close()
    for name, row in rows.items():
        print(f"{name:30} {row['median_us']:8.2f} us   p99 {row['p99_us']:8.2f} us")
    print(f"requests lost, of those that came without a pause: {lost:,}")
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows, "lost": lost}, indent=2))


if __name__ == "__main__":
    main()
