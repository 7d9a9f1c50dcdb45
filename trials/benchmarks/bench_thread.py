"""The engine's own thread beside 256 requests that decode: what a step of the KV connector costs it, while
nothing moves, while 4 GiB/s are saved and while 4 GiB/s are loaded.

    python -m trials.benchmarks.bench_thread [--against FOLDER] [--rounds 3] [--seconds 6] [--json FILE]

vLLM's own scheduler over both halves of the connector in one process, as an engine of one rank has them.
There is no model: a step takes 20 ms, in which the thread sleeps and those of transfers run. What is timed is
every call that vLLM makes to the connector, summed up by step.

The KV cache is that of a Llama of 8 billion parameters in the number of its layers, heads and blocks, and in
128 segments of 16 blocks a second, which are 4 GiB. Its heads are 128 times narrower: what costs the
engine's thread is what is done by chunk in Python, beside threads that hold the interpreter's lock; copies of
4 GiB/s are a GPU's, or would take all of a small machine's memory bandwidth. On the CPU gathers run in the
engine's thread.

With `--against`, another checkout of this project is measured by the same program, in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNNING, STEP_S, SEGMENTS_PER_S = 256, 0.02, 128
TOKENS, LAYERS, HEADS, SIZE, SEGMENT_BLOCKS = 16, 32, 8, 1, 16
#: Bytes of a segment of the model that this stands for, and of one here.
SEGMENT_BYTES, SHRUNK = 32 << 20, 128
MODES = ("idle", "idle, save_decode", "saving", "loading")
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "head_dim": SIZE,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 16,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1 << 16,
    "max_position_embeddings": 1 << 16,
}


class Engine:
    """One engine without a model over a store in `folder`."""

    def __init__(self, folder: Path, blocks: int, *, save_decode: bool) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            get_kv_cache_configs,
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.worker.utils import allocate_kv_cache

        from schemas.settings import KVSettings

        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(_MODEL))
        # Another checkout may be from before it.
        always = {"load": "always"} if "load" in KVSettings.model_fields else {}
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, max_model_len=1 << 15, seed=0
            ),
            cache_config=CacheConfig(block_size=TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=8192,
                max_num_seqs=2 * RUNNING,
                max_model_len=1 << 15,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path="connectors.kv",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "payloads": f"file://{folder / 'payloads'}",
                    "index": f"sqlite://{folder / 'index.db'}",
                    "identity": {"weights": "w"},
                    "segment": {"max_blocks": SEGMENT_BLOCKS},
                    "kv": {"save_decode": save_decode, "match_deadline_s": 1.0, **always},
                },
            ),
        )
        # The CPU platform turns it off.
        config.scheduler_config.async_scheduling = True
        config.cache_config.num_gpu_blocks_override = blocks
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16)
        specs = {f"model.layers.{i}.self_attn.attn": spec for i in range(LAYERS)}
        made = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        layout = made.get_required_kvcache_layout(config) or "LBNHC"
        config.cache_config.kv_cache_layout = layout
        [cache] = get_kv_cache_configs(config, [dict(specs)], [8 << 30])
        cache.kv_cache_layout = layout
        config.cache_config.num_gpu_blocks = blocks
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(TOKENS, hash_function)
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=TOKENS,
            hash_block_size=TOKENS,
            log_stats=False,
        )
        self._worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        pages = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout], None)
        self._worker.register_kv_caches(pages)
        half: Any = self.scheduler.connector
        half.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        #: Seconds of each step, by clock and by the thread's own processor time.
        self.steps: list[tuple[float, float]] = []
        self._spent = self._spent_cpu = 0.0
        self._depth = 0
        for one in (half, self._worker):
            for name in dir(type(one)):
                if not name.startswith("_") and callable(method := getattr(one, name)):
                    setattr(one, name, self._timed(method))
        self._launched: deque[tuple[Any, Any]] = deque()
        self.saves = self.loads = 0

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return method(*args, **kwargs)
            self._depth, began, cpu = 1, time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._spent += time.perf_counter() - began
                self._spent_cpu += time.thread_time() - cpu
                self._depth = 0

        return call

    def request(self, name: str, tokens: list[int], answers: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=answers, ignore_eos=True)
        self.scheduler.add_request(Request(name, tokens, params, None, block_hasher=self._hasher))

    def step(self) -> None:
        """One step, as long as a step takes."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        end = time.perf_counter() + STEP_S
        output = self.scheduler.schedule()
        meta, worker = output.kv_connector_metadata, self._worker
        self.saves += len(meta.saves)
        self.loads += sum(len(group.runs) for one in meta.loads for group in one.groups)
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        told = KVConnectorOutput()
        results = worker.get_transfer_results(output.finished_req_ids)
        told.finished_sending = results.finished_sending or None
        told.finished_recving = results.finished_recving or None
        told.failed_recving = results.failed_recving
        told.invalid_block_ids = worker.get_block_ids_with_load_errors()
        told.kv_connector_stats = worker.get_kv_connector_stats()
        told.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            names,
            {name: i for i, name in enumerate(names)},
            [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names],
        )
        result.kv_connector_output = None if told.is_empty() else told
        self._launched.append((output, result))
        if len(self._launched) > 1:
            self.scheduler.update_from_output(*self._launched.popleft())
        self.steps.append((self._spent, self._spent_cpu))
        self._spent = self._spent_cpu = 0.0
        time.sleep(max(0.0, end - time.perf_counter()))

    def close(self) -> None:
        self._worker.shutdown()
        self.scheduler.connector.shutdown()


def prompt(number: int, segments: int) -> list[int]:
    """A prompt of whole segments, and one token that is computed in any case."""
    return [1 + number, *range(100, 100 + segments * SEGMENT_BLOCKS * TOKENS)]


def measure(mode: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Steps of one engine. What is saved is what another one then loads: a prompt before each step, of the
    segments that are due by then."""
    made = folder / "prompts.json"
    left = deque(json.loads(made.read_text()) if mode == "loading" else [])
    # Prompts of different lengths: their blocks fill in different steps.
    held = sum((16 + i + int(seconds / STEP_S) + 100) // TOKENS + 2 for i in range(RUNNING))
    engine = Engine(folder, held + 8192, save_decode=mode == "idle, save_decode")
    for i in range(RUNNING):
        engine.request(f"d{i}", [50000 + i] * (16 + i), 1 << 14)
    for _ in range(10):
        engine.step()
    engine.steps.clear()
    engine.saves = engine.loads = issued = 0
    lengths: list[int] = []
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        due = int(took * SEGMENTS_PER_S) - issued
        if mode == "saving":
            left = deque([min(due, 8)])
        if left and 0 < left[0] <= due:
            issued += left[0]
            engine.request(f"{mode} {len(lengths)}", prompt(len(lengths), left[0]), 1)
            lengths.append(left.popleft())
        engine.step()
    moved = {"saving": engine.saves, "loading": engine.loads}.get(mode, 0)
    wall, cpu = (sorted(one) for one in zip(*engine.steps, strict=True))
    # What is under way ends, so that all of it is there to be loaded.
    for _ in range(50):
        engine.step()
    engine.close()
    if mode == "saving":
        made.write_text(json.dumps(lengths))

    def at(values: list[float], share: float) -> float:
        return values[int(len(values) * share)] * 1e6

    return {
        "p50": at(wall, 0.5),
        "p99": at(wall, 0.99),
        "cpu_p50": at(cpu, 0.5),
        "cpu_p99": at(cpu, 0.99),
        "gib_per_s": moved * SEGMENT_BYTES / took / (1 << 30),
    }


def one_round(root: Path, seconds: float) -> dict[str, dict[str, float]]:
    """All modes on one checkout, each in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-thread-") as folder:
        for mode in MODES:
            command = [sys.executable, str(Path(__file__).resolve()), "--measure", mode]
            command += ["--folder", folder, "--seconds", str(seconds)]
            env = {**os.environ, "PYTHONPATH": str(root), "VLLM_LOGGING_LEVEL": "ERROR"}
            done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{mode} on {root}:\n{done.stderr[-3000:]}")
            found[mode] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(against: Path | None, rounds: int, seconds: float) -> dict[str, Any]:
    places = {**({"before": against.resolve()} if against else {}), "now": ROOT}
    made: dict[str, list[Any]] = {name: [] for name in places}
    for _ in range(rounds):
        for name, root in places.items():
            made[name].append(one_round(root, seconds))
    return {
        "machine": f"{platform.machine()}, {platform.python_version()}, {os.cpu_count()} cores",
        "running_requests": RUNNING,
        "step_ms": STEP_S * 1e3,
        "rounds": rounds,
        "shrunk": SHRUNK,
        # Microseconds; the median over rounds.
        "modes": {
            mode: {
                name: {key: statistics.median(one[mode][key] for one in rows) for key in rows[0][mode]}
                for name, rows in made.items()
            }
            for mode in MODES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each mode in each round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder, options.seconds)))
        return
    report = run(options.against, options.rounds, options.seconds)
    print(f"the connector's share of the engine's thread per step of {report['step_ms']:.0f} ms, in us; "
          f"{RUNNING} requests decode")  # fmt: skip
    print(f"  {'':18s} {'':6s} {'p50':>8s} {'p99':>8s}   {'cpu p50':>8s} {'cpu p99':>8s}   GiB/s")
    for mode, rows in report["modes"].items():
        for name, row in rows.items():
            print(f"  {mode:18s} {name:6s} {row['p50']:8.0f} {row['p99']:8.0f}   {row['cpu_p50']:8.0f} "
                  f"{row['cpu_p99']:8.0f}   {row['gib_per_s']:.1f}")  # fmt: skip
        if len(rows) > 1:
            ratios = (rows["now"][key] / rows["before"][key] for key in ("p50", "p99", "cpu_p50", "cpu_p99"))
            print(f"  {'':18s} {'ratio':6s} {next(ratios):8.2f} {next(ratios):8.2f}   "
                  f"{next(ratios):8.2f} {next(ratios):8.2f}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
