"""Codecs: what a slot shrinks to, what that costs one core, and below which link speed it pays.

    python -m trials.benchmarks.bench_codec [--train-s 25] [--slots 4] [--json FILE]

Tensors come from networks that are trained here first (codec_tensors.py says on what). Slots have 2 MiB; a
round encodes a segment of them (checksums and header included, as for a save), then decodes each (checksum
included, as after a read). GB are 10^9 bytes of the tensors, seconds those of the thread's own CPU time, so
that other programs on the machine don't count. "busy": by the clock, while another thread of the process
runs a loop in Python, the least patient neighbour there is; means there, because a round either has to wait
for the GIL or not, medians elsewhere.

"pays below": loading n bytes takes n / ratio / link + n / decode, so a codec beats `none` on links slower
than (1 - 1/ratio) / (1/decode - 1/decode of none), counted per core that decodes. What a user gains from
it below that speed is at most the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lz4
import numpy as np
import torch

from kvstore import keys
from kvstore.format import segment as codec
from kvstore.format.segment import Encoded, Slot
from kvstore.keys import SegmentId
from schemas.namespace import Namespace
from schemas.records import CODECS, Codec
from trials.benchmarks import codec_tensors

SLOT_BYTES = 2 << 20
NAMESPACE = Namespace(kind="ec", model="bench", weights="0" * 16, dtype="bfloat16")
JSON = keys.canonical_json(NAMESPACE)
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Row:
    """One codec on one kind of tensor."""

    tensor: str
    codec: Codec
    #: What the slots were stored as.
    used: str
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    encode_busy_gb_s: float
    decode_busy_gb_s: float
    #: None where it never pays.
    pays_below_gb_s: float | None = None


def tensors(train_s: float, slots: int) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any]]:
    """What is measured, and how the networks it comes from were trained."""
    language, spoken = codec_tensors.trained_language(train_s * 2 / 3)
    vision, seen = codec_tensors.trained_vision(train_s / 3)

    def kv(dtype: torch.dtype) -> list[torch.Tensor]:
        return codec_tensors.kv_slots(language, dtype, slots, SLOT_BYTES)

    def encoder(dtype: torch.dtype) -> list[torch.Tensor]:
        return codec_tensors.encoder_slots(vision, dtype, slots, SLOT_BYTES)

    padded = encoder(torch.bfloat16)
    for slot in padded:
        slot[len(slot) * 6 // 10 :] = 0
    cases = {
        "KV, bf16": kv(torch.bfloat16),
        "KV, fp16": kv(torch.float16),
        "KV, fp32": kv(torch.float32),
        # vLLM keeps fp8 caches as bytes.
        "KV, fp8 e4m3": [slot.view(torch.uint8) for slot in kv(torch.float8_e4m3fn)],
        "encoder, bf16": encoder(torch.bfloat16),
        "encoder, fp16": encoder(torch.float16),
        "encoder, bf16, 40% padding": padded,
        "encoder, bf16, after a ReLU": [slot.relu() for slot in encoder(torch.bfloat16)],
    }
    return cases, {"language": asdict(spoken), "vision": asdict(seen)}


class Case:
    """Slots of one tensor, and the two operations that are timed."""

    def __init__(self, given: Sequence[torch.Tensor], how: Codec) -> None:
        self.how = how
        self.slots = [
            Slot(
                keys.block_key(i.to_bytes(32, "big")),
                memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
                NAMES[tensor.dtype],
                tuple(tensor.shape),
            )
            for i, tensor in enumerate(given)
        ]
        self.nbytes = sum(slot.data.nbytes for slot in self.slots)
        self.encoded = self.encode()
        self.metas = codec.parse_header(self.encoded.buffers[0]).meta.slots
        self.into = memoryview(bytearray(max(slot.data.nbytes for slot in self.slots)))
        self.decode(check=True)

    def encode(self) -> Encoded:
        return codec.encode(
            self.slots,
            namespace_json=JSON,
            kind="ec",
            segment=SegmentId(bytes(8)),
            codec=self.how,
            writer="bench",
        )

    def decode(self, check: bool = False) -> None:
        """As the store does: what is not compressed was read straight into place."""
        for slot, meta, stored in zip(self.slots, self.metas, self.encoded.buffers[1:], strict=True):
            into = None if meta.codec == "none" else self.into[: meta.raw_bytes]
            codec.decode_slot(stored, meta, into)
            assert not check or into is None or into == slot.data


def measure(name: str, given: Sequence[torch.Tensor], rounds: int) -> list[Row]:
    """All codecs on one tensor, taking turns."""
    cases = [Case(given, how) for how in CODECS]
    quiet = _rates(cases, rounds, time.thread_time, statistics.median)
    with Busy():
        busy = _rates(cases, rounds, time.perf_counter, statistics.harmonic_mean)
    rows: list[Row] = []
    for case, still, disturbed in zip(cases, quiet, busy, strict=True):
        ratio = case.nbytes / sum(buffer.nbytes for buffer in case.encoded.buffers[1:])
        used = ", ".join(sorted({meta.codec for meta in case.metas}))
        pays = None
        if ratio > 1 and rows:
            pays = (1 - 1 / ratio) / (1 / still[1] - 1 / rows[0].decode_gb_s)
        rows.append(Row(name, case.how, used, ratio, *still, *disturbed, pays))
    return rows


def _rates(
    cases: Sequence[Case],
    rounds: int,
    clock: Callable[[], float],
    average: Callable[[list[float]], float],
) -> list[tuple[float, float]]:
    """GB/s of encode and decode."""
    rates: list[tuple[list[float], list[float]]] = [([], []) for _ in cases]
    for number in range(-1, rounds):
        for case, both in zip(cases, rates, strict=True):
            for operation, kept in zip((case.encode, case.decode), both, strict=True):
                began = clock()
                operation()
                taken = clock() - began
                if number >= 0:  # the first round warms up
                    kept.append(case.nbytes / taken / 1e9)
    return [(average(encode), average(decode)) for encode, decode in rates]


class Busy:
    """A thread that computes in Python and never waits, while the block runs."""

    def __enter__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()

    def _work(self) -> None:
        count = 0
        while not self._stop:
            count += 1


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "cpu": f"{os.cpu_count()} x {models[0].partition(':')[2].strip() if models else 'unknown'}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "lz4": f"{lz4.__version__} ({lz4.library_version_string()})",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':28}{'codec':<12}{'stored as':<12}{'ratio':>6}{'encode':>8}{'decode':>8}{'busy:':>8}{'':>8}"
        f"{'pays below':>12}"
    ]
    for row in rows:
        pays = (
            ""
            if row.codec == "none"
            else "never"
            if row.pays_below_gb_s is None
            else f"{row.pays_below_gb_s:.2f}"
        )
        lines.append(
            f"{row.tensor:28}{row.codec:<12}{row.used:<12}{row.ratio:>6.2f}{row.encode_gb_s:>8.2f}"
            f"{row.decode_gb_s:>8.2f}{row.encode_busy_gb_s:>8.2f}{row.decode_busy_gb_s:>8.2f}{pays:>12}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--train-s", type=float, default=25, help="seconds of training, two thirds for the text"
    )
    parser.add_argument("--slots", type=int, default=4, help="in a segment")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the results there; - for stdout")
    given = parser.parse_args(arguments)

    facts = machine()
    cases, training = tensors(given.train_s, given.slots)
    rows = [row for name, each in cases.items() for row in measure(name, each, given.rounds)]
    document = {
        "machine": facts,
        "training": training,
        "slot_bytes": SLOT_BYTES,
        "results": [asdict(row) for row in rows],
    }
    if given.json == "-":
        print(json.dumps(document, indent=1))
        return
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    for name, one in training.items():
        print(f"{name}: {one['steps']} steps in {one['seconds']:.0f} s, loss {one['loss']:.3f}")
    print(f"GB/s, one core; {given.rounds} rounds of a segment of {given.slots} slots of 2 MiB")
    print(table(rows))
    if given.json:
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
