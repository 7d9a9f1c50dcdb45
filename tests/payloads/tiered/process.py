"""A process that uses a tier: `python -m tests.payloads.tiered.process VERB ROOT SEED [WRITE]`.

    churn   saves, loads, fills and deletes as fast as it can until it is killed, or `ROOT/stop` exists;
            appends the name of every payload whose save has returned to `ROOT/saved.SEED`
    fetch   waits for `ROOT/go`, then loads every payload of `ROOT/slow` with several threads at once

Contents follow from names, so everybody can check what it reads. A wrong byte ends the process with 3.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from kvstore.conformance.arrange import NAMESPACE
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import KVStoreError
from kvstore.keys import SegmentId, payload_name
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.tiered import fetcher
from kvstore.payloads.tiered.ledger import Ledger
from kvstore.payloads.tiered.store import TieredPayloads
from kvstore.threads.transfers import Transfers
from schemas.settings import TransferSettings
from tests.payloads.tiered.world import Watched
from tests.waiting import PATIENCE_S

CAPACITY = 4 << 20
SIZES = (1000, 30_000, 200_000, 500_000)
THREADS = 4


def size_of(name: str) -> int:
    return SIZES[int(name[-10:-8], 16) % len(SIZES)]


def content(name: str) -> bytes:
    size = size_of(name)
    return (name.encode() * (size // len(name) + 1))[:size]


def new_name(rng: random.Random) -> str:
    return payload_name(NAMESPACE, SegmentId(rng.randbytes(8)), 0)


def open_tier(
    root: Path, slow: PayloadStore, write: Literal["through", "back"] = "through"
) -> tuple[TieredPayloads, Transfers]:
    transfers = Transfers(TransferSettings(write_bytes=16 << 20))
    # That they don't wait for ever is no matter here, and on a busy machine others are late.
    fetcher.FILL_WAIT_S = PATIENCE_S
    ledger = Ledger(root / "fast", CAPACITY, busy_timeout_s=PATIENCE_S)
    tier = TieredPayloads(
        LocalPayloads(root / "fast"),
        slow,
        ledger,
        later=transfers.write,
        write=write,
        memory_bytes=32 << 20,
        wait_s=PATIENCE_S,
    )
    return tier, transfers


def churn(root: Path, seed: str, write: Literal["through", "back"]) -> None:
    # A slow store that is slow, so that fetches overlap; the files of all processes are its payloads.
    plan = Plan(Rule("delay", verbs=("read", "put"), delay_s=0.002))
    tier, transfers = open_tier(root, FaultyPayloads(LocalPayloads(root / "slow"), plan), write)
    # Sooner than in life: the test is short.
    import kvstore.payloads.tiered.store as tiered

    tiered.HOUSEKEEPING_S = 0.3
    saved = os.open(root / f"saved.{seed}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def work(thread: int) -> None:
        rng = random.Random(f"{seed}/{thread}/{time.time_ns()}")
        known: list[str] = []
        while not (root / "stop").exists():
            if rng.random() < 0.2 or not known:
                known = _names(root)[-200:]
            if rng.random() < 0.35 or not known:
                name = new_name(rng)
                tier.put(name, [memoryview(content(name))])
                os.write(saved, name.encode() + b"\n")
            elif rng.random() < 0.03:
                name = rng.choice(known)
                os.write(saved, b"-" + name.encode() + b"\n")
                tier.delete([name])
            else:
                _load(tier, rng.choice(known), rng)

    threads = [threading.Thread(target=_or_die, args=(work, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfers.close()
    tier.close()


def _names(root: Path) -> list[str]:
    folder = root / "slow" / NAMESPACE
    return [f"{NAMESPACE}/{fan.name}/{leaf}" for fan in folder.glob("*") for leaf in os.listdir(fan)]


def _load(tier: TieredPayloads, name: str, rng: random.Random) -> None:
    data = content(name)
    start, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    if rng.random() < 0.6:
        start, end = 0, len(data)
    into = bytearray(end - start)
    got = tier.read(name, start, [memoryview(into)], size=len(data))
    if got is not None and (got != len(into) or into != data[start:end]):
        print(f"wrong bytes of {name}: {got} of {len(into)}", flush=True)
        os._exit(3)


def _or_die(work: object, number: int) -> None:
    try:
        work(number)  # type: ignore[operator]
    except BaseException as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)
        os._exit(4)


def fetch(root: Path) -> None:
    slow = Watched(LocalPayloads(root / "slow"))

    def note(verb: str, name: str) -> None:
        with open(root / "fetched", "a") as file:
            file.write(f"{verb} {name}\n")
        time.sleep(0.03)

    slow.before = note
    tier, transfers = open_tier(root, slow)
    names = _names(root)

    def work(thread: int) -> None:
        while not (root / "go").exists():
            time.sleep(0.001)
        for name in names:
            into = bytearray(size_of(name))
            got = tier.read(name, 0, [memoryview(into)], size=len(into))
            if got != len(into) or into != content(name):
                raise KVStoreError(f"wrong bytes of {name}")

    threads = [threading.Thread(target=_or_die, args=(work, number)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()
    transfers.close()
    tier.close()


def main(verb: str, root: str, seed: str, write: Literal["through", "back"] = "through") -> None:
    if verb == "churn":
        churn(Path(root), seed, write)
    else:
        fetch(Path(root))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
