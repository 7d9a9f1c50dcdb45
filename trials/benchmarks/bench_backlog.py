"""The share of blocks that is stored where an engine computes faster than its bucket takes what is saved.

    python -m trials.benchmarks.bench_backlog [--json FILE]

vLLM's scheduler and both halves of the KV connector, without a model. The KV is that of a Llama of 8 billion
parameters in 16 bits, 128 KiB a token, computed at 20,000 tokens/s, which is 2.6 GB/s. Steps compute 2,048
tokens, two are in flight, and staging is as by default. Prompts come one after the other without a pause, and
each is answered with one token or with a hundred. Then all are asked for once more, each when the one before
it is stored; the engine's own cache has them.

Time is counted, not taken, so that a busy machine changes nothing: with each step the bucket takes as many
bytes as it would while the step runs. It keeps no byte, and all bytes are a 32nd of what they stand for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kvstore.payloads.local import LocalPayloads
from tests.connectors.kv.bed import HEADS, TOKENS, Bed
from tests.waiting import PATIENCE_S

#: Bytes stand for so many; a segment has as many blocks as at full size.
SCALE, SEGMENT_BLOCKS = 32, 16
#: Floats of a head: two layers have the bytes of 32 layers of 8 heads of 128 in 16 bits.
SIZE = (128 << 10) // SCALE // (2 * HEADS * 2 * 4)
TOKEN_US, STEP_S = 50.0, 0.01
PROMPTS = 12


def prompt(tokens: int, seed: int) -> list[int]:
    return [(seed * 977 + i * 31 + i // 990) % 990 + 5 for i in range(tokens)]


class Bucket:
    """It takes what it is granted, payload by payload."""

    def __init__(self) -> None:
        self._turn, self._granted = threading.Lock(), threading.Condition()
        self._bytes = 0.0
        #: Whether it takes everything at once; whether a payload waits for a grant.
        self.open = self.waits = False

    def put(self, payloads: Any, name: str, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(one.nbytes for one in buffers)
        with self._turn, self._granted:
            while not self.open and self._bytes < nbytes:
                self.waits = True
                self._granted.wait(1.0)
            self.waits = False
            self._bytes -= nbytes

    def grant(self, nbytes: float, idle: Callable[[], bool]) -> None:
        """Take so many bytes more, and return when they are taken or nothing is there."""
        with self._granted:
            self._bytes = nbytes + (self._bytes if self.waits else 0.0)
            self.waits = False
            self._granted.notify()
        end = time.monotonic() + 1.0  # what a step in flight computes is not there yet
        while not (self.waits or idle()) and time.monotonic() < end:
            time.sleep(0.001)


def share(bed: Bed, requests: Sequence[Any]) -> float:
    """The share of the blocks of these prompts that is stored."""
    blocks = sum(one.num_prompt_tokens // TOKENS for one in requests)
    return sum(min(bed.stored(one), one.num_prompt_tokens // TOKENS) for one in requests) / blocks


def measure(tokens: int, answers: int, bytes_per_s: float) -> dict[str, float]:
    """One row: shares of all blocks that are stored when all prompts were asked for once, and twice."""
    bucket = Bucket()

    def put(payloads: Any, name: str, buffers: Sequence[memoryview]) -> None:
        bucket.put(payloads, name, buffers)

    blocks = PROMPTS * (tokens + answers + TOKENS) // TOKENS + 2
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(LocalPayloads, "put", put),
        Bed(
            Path(folder),
            blocks=blocks,
            batch_tokens=2048,
            size=SIZE,
            kv={"load": "never"},
            segment={"max_blocks": SEGMENT_BLOCKS},
        ) as bed,
    ):
        memory = bed.ranks[0].worker.memory

        def serve(prompt: list[int]) -> Any:
            request = bed.request(prompt, answers)
            tracked = bed.half._scheduler.requests.get(request.request_id)
            tracked.match.poll(PATIENCE_S)
            while bed.busy:
                before = bed.computed_tokens
                bed.step()
                seconds = max(STEP_S, (bed.computed_tokens - before) * TOKEN_US / 1e6)
                bucket.grant(seconds * bytes_per_s / SCALE, lambda: memory.used_bytes["save"] == 0)
            return request

        def written() -> float:
            bucket.open = True
            bed.drain()
            bucket.open = False
            return share(bed, requests)

        requests = [serve(prompt(tokens, seed)) for seed in range(PROMPTS)]
        row = {"tokens": tokens, "answers": answers, "GB/s": bytes_per_s / 1e9, "once": written()}
        for one in requests:
            serve(list(one.prompt_token_ids))
            row["twice"] = written()
        row["staging MB"] = SCALE * memory.saves.size_bytes / 1e6
        return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for tokens in (4096, 16000):
        for answers in (1, 100):
            for bytes_per_s in (2.5e8, 1e9, 2e9):
                rows.append(row := measure(tokens, answers, bytes_per_s))
                print(
                    f"{tokens:6d} tokens, {answers:3d} answered, {row['GB/s']:5.2f} GB/s: "
                    f"{100 * row['once']:5.1f} % stored, {100 * row['twice']:5.1f} % when asked for twice; "
                    f"staging {row['staging MB']:.0f} MB",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
