"""A storm in one engine: requests come, are aborted, are preempted, and the store loses things underneath.

Runs inside the engine's process (`Engine.evaluate`), where every step can be seen and counted.
"""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

#: Requests under way at a time, and tokens that each decodes.
MOST_REQUESTS = 12
MOST_TOKENS = 96
#: A thread of the store opens its connection to SQLite, two or three descriptors, when it first needs it.
_SPARE = {"files": 24}


def run(served: Any, script: str, payloads: str, seconds: float, seed: int) -> dict[str, Any]:
    """Storm for `seconds`, then let everything end. `script`: a JSON file of prompts and their right
    answers; `payloads`: the store's folder.

    Returns what happened, what was wrong, and what was left over when all was quiet.
    """
    return Storm(served, json.loads(Path(script).read_text()), Path(payloads), random.Random(seed)).run(
        seconds
    )


def at_rest(served: Any, payloads: str) -> dict[str, int]:
    """Lets everything that an engine does come to its end, and returns what it still holds."""
    storm = Storm(served, [], Path(payloads), random.Random(0))
    storm._calm()
    return storm._held()


class Storm:
    def __init__(
        self, served: Any, script: list[dict[str, Any]], payloads: Path, source: random.Random
    ) -> None:
        self.served = served
        self.engine = served.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.half = self.scheduler.connector._scheduler
        self.worker = _worker()
        self.script = script
        self.payloads = payloads
        self.random = source
        #: Request -> its prompt's place in the script, and the step at which it is to be aborted.
        self.live: dict[str, tuple[int, int | None]] = {}
        self.happened = dict.fromkeys(("asked", "finished", "aborted", "steps", "evicted", "damaged"), 0)
        self.wrong: list[str] = []

    def run(self, seconds: float) -> dict[str, Any]:
        # What is opened and started with the first request of each kind is not a leak.
        self._until(time.monotonic() + min(3.0, seconds / 4))
        self._calm()
        before = self._held()
        self._until(time.monotonic() + seconds)
        # On a busy machine longer, until it was one.
        end = time.monotonic() + PATIENCE_S
        while not all(self._told().values()) and time.monotonic() < end:
            self._until(time.monotonic() + 1)
        self._calm()
        left = {
            name: (before[name], value)
            for name, value in self._held().items()
            if value > before[name] + _SPARE.get(name, 0)
        }
        counters = {name: value for name, value in self.worker._store.counters.snapshot().items() if value}
        return {
            **self._told(),
            "wrong": self.wrong,
            "left": left,
            "counters": counters,
        }

    def _told(self) -> dict[str, float]:
        """What has happened so far, and how often."""
        counters = self.worker._store.counters.snapshot()
        return {
            **self.happened,
            "preempted": self.served.metrics().get("vllm:num_preemptions_total", 0.0),
            "loaded_blocks": counters.get("load_blocks", 0),
            "stored_blocks": counters.get("save_blocks{stored}", 0),
        }

    def _until(self, end: float) -> None:
        while time.monotonic() < end:
            if len(self.live) < MOST_REQUESTS and self.random.random() < 0.3:
                self._ask()
            if self.random.random() < 0.01:
                self._disturb()
            self._step()

    def _ask(self) -> None:
        from vllm import SamplingParams

        number = self.random.randrange(len(self.script))
        one = self.script[number]
        count = self.random.randint(1, len(one["answer"]))
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        [name] = self.served.llm.enqueue([{"prompt_token_ids": one["prompt"]}], [params], use_tqdm=False)
        # From the very next step, while it is matched or loaded, to when it has nearly ended.
        abort = self.random.choice([None, None, None, 0, 1, 3, 10, 30])
        at = None if abort is None else self.happened["steps"] + abort
        self.live[name.split("-")[0]] = (number, at)
        self.happened["asked"] += 1

    def _step(self) -> None:
        due = [name for name, (_, at) in self.live.items() if at is not None and at <= self.happened["steps"]]
        if due:
            self.engine.abort_request(due)
            self.happened["aborted"] += len(due)
            for name in due:
                del self.live[name]
        finished: dict[str, Any] = {}
        self.served._step(finished)
        self.happened["steps"] += 1
        for name, output in finished.items():
            if name not in self.live:
                continue
            number, _ = self.live.pop(name)
            got = list(output.outputs[0].token_ids)
            self.happened["finished"] += 1
            if got != self.script[number]["answer"][: len(got)] or not got:
                self.wrong.append(f"prompt {number}: {got[:8]}... of {len(got)}")

    def _disturb(self) -> None:
        """What other engines and bad disks do to a store."""
        store, space = self.half.store, self.half.space
        if self.random.random() < 0.7:
            held = store.maintenance.usage(space.id).nbytes
            gone = store.maintenance.cull(
                space.id,
                keep_bytes=int(held * self.random.uniform(0.3, 0.9)),
                # Some at once: their payloads vanish under loads that have been promised.
                delete_after_s=self.random.choice([0, store.clock() + 60]),
                limit=64,
                rule="admin",
            )
            self.happened["evicted"] += len(gone)
            store.rounds.housekeep()
            return
        files = [path for path in self.payloads.glob("*/??/*") if path.is_file()]
        for path in self.random.sample(files, min(2, len(files))):
            try:
                data = bytearray(path.read_bytes())
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                path.write_bytes(data)
            except OSError:
                continue
            self.happened["damaged"] += 1

    def _calm(self) -> None:
        """Every request ends, every load and save ends, nothing is cached in the engine."""
        end = time.monotonic() + PATIENCE_S
        while self.engine.has_unfinished_requests() and time.monotonic() < end:
            self._step()
        self.live.clear()
        # What requests leave behind is saved with the next step, what has ended is reported with the one
        # after that, and an engine without requests takes none.
        for _ in range(2):
            self.served.generate([{"prompt_token_ids": [5, 6, 7]}], 1, PATIENCE_S, {}, {})
            for store in (self.worker._store, self.half.store, *_item_stores(self.scheduler)):
                assert store.transfers.drain(PATIENCE_S)
        self.served.generate([{"prompt_token_ids": [5, 6, 7]}], 1, PATIENCE_S, {}, {})
        assert self.served.reset_prefix_cache(False), "blocks are still in use"
        gc.collect()

    def _held(self) -> dict[str, int]:
        """Everything that could leak, as numbers that a quiet engine brings back to what they were."""
        pool = self.scheduler.kv_cache_manager.block_pool
        half, worker = self.half, self.worker
        saving = half.saving
        sizes: dict[str, Callable[[], int]] = {
            "blocks": lambda: pool.num_gpu_blocks - pool.get_num_free_blocks(),
            "requests": lambda: len(self.scheduler.requests),
            "tracked": lambda: len(half.requests) + len(half.requests.unsaved),
            "planned": lambda: half.loading.held + len(half.save_planner.flushes),
            "saving": lambda: saving.under_way + len(saving._busy),
            "loading": lambda: worker.reads.under_way,
            "staging": lambda: sum(worker.memory.used_bytes.values()),
            "reports": lambda: (
                int(worker.reads.has_news or worker.writes.has_news) + len(worker.reads._failed_blocks)
            ),
            "items": lambda: _items(self.scheduler),
            "threads": threading.active_count,
            "files": lambda: len(os.listdir("/proc/self/fd")),
            "temporary": lambda: sum(1 for path in self.payloads.glob(".tmp/*")),
        }
        return {name: size() for name, size in sizes.items()}


def _items(scheduler: Any) -> int:
    """What an EC connector holds for requests: pins, promises, waits."""
    if scheduler.ec_connector is None:
        return 0
    half = scheduler.ec_connector._scheduler
    promises = half._promises
    held = (half._staging._pins, promises._promised, promises._loading, half._waits, half._unavailable)
    return sum(map(len, held))


def _item_stores(scheduler: Any) -> list[Any]:
    from vllm.distributed.ec_transfer import get_ec_transfer

    if scheduler.ec_connector is None:
        return []
    return [scheduler.ec_connector._scheduler._store, get_ec_transfer()._worker._store]


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker
