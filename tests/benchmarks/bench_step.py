"""The engine's own thread: what a step costs it while the store has nothing to do, and to start a save.

    python -m tests.benchmarks.bench_step [--json FILE]

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
from types import SimpleNamespace
from typing import Any

from connectors.kv_scheduler import KVScheduler
from connectors.kv_worker import KVWorker
from tests.connectors.groups import SCHEDULERS, WORKERS
from tests.store.world import chain, make_store, open_space

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
        self.scheduler = KVScheduler(
            self.store,
            space,
            SCHEDULERS,
            hash_tokens=8,
            segment_blocks=[64],
            prefix_caching=True,
            can_load=True,
            can_save=True,
        )
        self.worker = KVWorker(self.store, WORKERS, segment_blocks=[64])
        self.worker.use(space.namespace)

    def build(self, output: Any) -> None:
        self.scheduler.build_connector_meta(output)

    def start(self) -> None:
        self.worker.start_loads(())
        self.worker.start_saves(())

    def finish(self) -> None:
        self.worker.take_finished()
        self.worker.take_failed_blocks()
        self.worker.take_stats()
        report = self.worker.take_report()
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set())  # type: ignore[arg-type]
        )
        self.scheduler.take_stats()
        self.scheduler.take_events()


def decoding(scheduler: KVScheduler) -> dict[str, int]:
    """256 requests whose prompts are done."""
    for i in range(RUNNING):
        request: Any = SimpleNamespace(
            request_id=f"r{i}", block_hashes=chain(i, 1, 2), num_prompt_tokens=25, num_tokens=26,
            num_computed_tokens=0, skip_reading_prefix_cache=True,
        )  # fmt: skip
        scheduler.get_num_new_matched_tokens(request, 0)
        state = SimpleNamespace(get_block_ids=lambda name: (list(range(3)),), boundary_state_offloads={})
        scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens={f"r{i}": 25}, kv_connector_block_state=state)  # type: ignore[arg-type]
        )
        request.num_computed_tokens = 25
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
        output = SimpleNamespace(num_scheduled_tokens=decoding(ours.scheduler), kv_connector_block_state=None)
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
