"""Signing and encryption: what they cost a save and a load, beside neither, in one run.

    python -m trials.benchmarks.bench_signing [--rounds 15] [--slots 16] [--folder DIR] [--json FILE]

Segments have `--slots` slots of 2 MiB of noise. "encode" lays a segment out, "verify" is a load without its
read: header parsed, every slot verified, and decrypted where it is. GB are 10^9 bytes of slots; "core s/GB"
is the thread's own CPU time, so that other programs on the machine don't count. "save" and "load" go through
a store on a folder (by the clock, on one thread, the files in the page cache), index and header included.
The modes take turns in every round, and each number is the best of its rounds: what else runs only adds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import blake3
import cryptography

from kvstore import keys
from kvstore.build import open_store
from kvstore.format import segment as codec
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.format.segment import Slot
from kvstore.keys import SegmentId, digests
from schemas.namespace import GroupSpec, Namespace

SLOT_BYTES = 2 << 20
NAMESPACE = Namespace(
    kind="kv",
    model="bench",
    weights="0" * 16,
    dtype="bfloat16",
    block_tokens=16,
    hash_algo="sha256",
    page_order="LHNC",
    groups=(GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=(1, 1, 16, SLOT_BYTES // 32)),),
)
KEY = bytes(range(32))
MODES = {
    "none": NO_KEYS,
    "signed": Keyring({"a": KEY}, key="a"),
    "encrypted": Keyring({"a": KEY}, key="a", encrypts=True),
}


@dataclass(frozen=True)
class Row:
    """One mode."""

    mode: str
    encode_core_s_gb: float
    verify_core_s_gb: float
    save_gb_s: float
    load_gb_s: float
    #: Bytes of the header of a segment.
    header_bytes: int


class Mode:
    """What is timed of one mode."""

    def __init__(self, name: str, slots: Sequence[Slot], folder: Path) -> None:
        self.name, self.slots, self.keyring = name, slots, MODES[name]
        self.nbytes = sum(slot.data.nbytes for slot in slots)
        settings: dict[str, Any] = {"payloads": f"file://{folder / name}"}
        if self.keyring.key is not None:
            keys_folder = folder / f"keys-{name}"
            keys_folder.mkdir()
            (keys_folder / "a").write_text(KEY.hex())
            settings["signing"] = {"keys": str(keys_folder), "key": "a", "encrypt": self.keyring.encrypts}
        self.store = open_store(settings)
        self.space = self.store.open(NAMESPACE)
        self.times: dict[str, list[float]] = {"encode": [], "verify": [], "save": [], "load": []}
        self.header = 0

    def round(self) -> None:
        encoded = self._timed("encode", time.thread_time, self._encode)
        stored = [memoryview(bytearray(buffer)) for buffer in encoded.buffers[1:]]
        self.header = len(encoded.buffers[0])
        self._timed("verify", time.thread_time, lambda: self._verify(encoded.buffers[0], stored))
        hashes = [os.urandom(32) for _ in self.slots]
        fresh = [
            Slot(keys.block_key(one), slot.data, slot.dtype, slot.shape)
            for one, slot in zip(hashes, self.slots, strict=True)
        ]
        saved = self._timed("save", time.perf_counter, lambda: self.space.save(fresh))
        assert saved.outcome == "stored"
        into = [memoryview(bytearray(SLOT_BYTES)) for _ in fresh]
        [run] = self.space.match(digests(hashes)).runs
        self._timed(
            "load", time.perf_counter, lambda: self.space.load(run, [slot.key for slot in fresh], into)
        )
        assert all(view == slot.data for view, slot in zip(into, fresh, strict=True))
        self.space.forget()

    def _encode(self) -> codec.Encoded:
        return codec.encode(
            self.slots,
            namespace_json=keys.canonical_json(NAMESPACE),
            kind="kv",
            segment=SegmentId(bytes(8)),
            writer="bench",
            keyring=self.keyring,
        )

    def _verify(self, head: memoryview, stored: Sequence[memoryview]) -> None:
        header = codec.parse_header(head, keyring=self.keyring)
        for number, (data, slot) in enumerate(zip(stored, header.meta.slots, strict=True)):
            codec.decode_slot(data, slot, None, header.opener(number))

    def _timed(self, what: str, clock: Callable[[], float], call: Callable[[], Any]) -> Any:
        began = clock()
        answer = call()
        self.times[what].append(clock() - began)
        return answer

    def row(self) -> Row:
        gb = self.nbytes / 1e9
        best = {what: min(times) for what, times in self.times.items()}
        return Row(
            self.name, best["encode"] / gb, best["verify"] / gb, gb / best["save"], gb / best["load"],
            self.header,
        )  # fmt: skip


def measure(rounds: int, slots: int, folder: Path) -> list[Row]:
    shape = NAMESPACE.groups[0].shape
    made = [
        Slot(keys.block_key(os.urandom(32)), memoryview(os.urandom(SLOT_BYTES)), "BF16", shape)
        for _ in range(slots)
    ]
    modes = [Mode(name, made, folder) for name in MODES]
    try:
        for number in range(rounds):
            for mode in modes[number % 3 :] + modes[: number % 3]:
                mode.round()
        return [mode.row() for mode in modes]
    finally:
        for mode in modes:
            with closing(mode.store):
                pass


def machine() -> dict[str, Any]:
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.processor(),
    )  # fmt: skip
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "blake3": blake3.__version__,
        "cryptography": cryptography.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="bench-signing-", dir=args.folder))
    try:
        rows = measure(args.rounds, args.slots, folder)
    finally:
        shutil.rmtree(folder)
    found = machine()
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    print(
        f"{'':<10}{'encode, core s/GB':>19}{'verify, core s/GB':>19}{'save, GB/s':>12}{'load, GB/s':>12}"
        f"{'header':>9}"
    )
    for row in rows:
        print(
            f"{row.mode:<10}{row.encode_core_s_gb:>19.3f}{row.verify_core_s_gb:>19.3f}{row.save_gb_s:>12.2f}"
            f"{row.load_gb_s:>12.2f}{row.header_bytes:>9}"
        )
    if args.json is not None:
        args.json.write_text(
            json.dumps({"machine": found, "results": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
