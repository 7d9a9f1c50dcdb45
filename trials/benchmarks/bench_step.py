"""The engine's own thread: what a step costs it while the store has nothing to do, and to start a save.

    python -m trials.benchmarks.bench_step [--json FILE]

256 running requests; the scheduler's half and the worker's half of the KV connector, called as vLLM calls
them. Beside it, in the same loop, a connector that does nothing, so that what remains is ours.
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

from connectors.kv.scheduler import KVScheduler
from connectors.kv.worker.worker import KVWorker
from tests.connectors.groups import WORKERS
from tests.connectors.kv.world import half
from tests.fake_vllm import FakeReport, FakeRequest, FakeStep, step
from tests.store.world import make_store, open_space

RUNNING = 256
STEPS = 2000


class Idle:
    """A connector without a store."""

    def build(self, output: Any) -> None: ...

    def start(self) -> None: ...

    def finish(self) -> None: ...


class Ours:
    """Both halves of the KV connector."""

    def __init__(self, root: Path) -> None:
        self.store = make_store(root)
        space = open_space(self.store)
        self.scheduler = half(self.store, space, segment_blocks=[64])
        self.worker = KVWorker(self.store, WORKERS, segment_blocks=[64])
        self.worker.use(space.namespace)

    def build(self, output: Any) -> None:
        self.scheduler.build_connector_meta(output)

    def start(self) -> None:
        self.worker.reads.start(())
        self.worker.writes.start(())

    def finish(self) -> None:
        self.worker.reads.take_finished()
        self.worker.reads.take_failed_blocks()
        self.worker.take_stats()
        report = self.worker.take_report()
        self.scheduler.update_connector_output(FakeReport(report, set()))
        self.scheduler.take_stats()
        self.scheduler.take_events()


def decoding(scheduler: KVScheduler) -> dict[str, int]:
    """256 requests whose prompts are done."""
    for i in range(RUNNING):
        request = FakeRequest(f"r{i}", (i, 1, 2), skip_reading_prefix_cache=True)
        scheduler.get_num_new_matched_tokens(request, 0)
        step(scheduler, (request, request.num_prompt_tokens))
    return {f"r{i}": 1 for i in range(RUNNING)}


def measure(connector: Idle | Ours, output: Any) -> float:
    began = time.perf_counter()
    connector.build(output)
    connector.start()
    connector.finish()
    return time.perf_counter() - began


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ours, idle = Ours(Path(folder)), Idle()
        output = FakeStep(decoding(ours.scheduler))
        times: dict[str, list[float]] = {"idle": [], "kvstore": []}
        for _ in range(STEPS):
            times["idle"].append(measure(idle, output))
            times["kvstore"].append(measure(ours, output))
        ours.store.close()
    return {
        "machine": f"{platform.machine()}, {platform.python_version()}",
        "running_requests": RUNNING,
        "step_us": {
            name: {"p50": statistics.median(v) * 1e6, "p99": sorted(v)[int(len(v) * 0.99)] * 1e6}
            for name, v in times.items()
        },
        "goal_us": 300,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = run()
    print(f"one step with nothing to do, {RUNNING} running requests (goal: under {report['goal_us']} us)")
    for name, value in report["step_us"].items():
        print(f"  {name:8s} p50 {value['p50']:7.1f} us   p99 {value['p99']:7.1f} us")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
