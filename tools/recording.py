"""Writes a recording as a fleet makes it that only observes: a working day of chats and agents, in moments.

    python -m tools.recording FOLDER [--requests 4000]

Four engines of an 8B model answer chats that share system prompts, two of a 70B model on four GPUs serve
agents whose prompts grow turn by turn behind long tool definitions. Each engine has a prefix cache of its
own, and a router sends every request to the next one: what one engine has computed, another computes again.
It is invented, but written by the recorder that engines have (kvstore.store.trace).
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.keys import namespace_id
from kvstore.store.trace import TraceRecorder
from schemas.namespace import GroupSpec, Namespace, Parallel
from schemas.settings import TraceSettings

TOKENS = 16
BEGAN_S, DAY_S = 1_790_000_000.0, 8 * 3600.0
#: A turn of a chat follows the one before it after so many seconds, in the mean.
_PAUSE_S = 240.0


@dataclass(frozen=True)
class Fleet:
    """Engines of one model, and what is asked of them."""

    tenant: str
    model: str
    layers: int
    tp: int
    engines: int
    #: Blocks that one engine's own cache holds.
    own_blocks: int
    #: What a token costs, and how much more for each before it, in microseconds.
    token_us: float
    depth_us: float
    #: Share of all requests.
    share: float
    #: Shared heads of prompts, and the most blocks of one, of a turn, and turns.
    heads: int
    head_blocks: int
    turn_blocks: int
    turns: int

    def namespace(self) -> Namespace:
        shape = (self.layers, 8, TOKENS, 256)
        group = GroupSpec(kind="full", block_tokens=TOKENS, dtype="BF16", shape=shape, shards=self.tp)
        return Namespace(
            kind="kv", tenant=self.tenant, model=self.model, weights="invented", dtype="bfloat16",
            block_tokens=TOKENS, hash_algo="sha256", groups=(group,), parallel=Parallel(tp=self.tp),
        )  # fmt: skip


FLEETS = (
    Fleet("chat", "Llama-3.1-8B", 32, 1, 4, 6_000, 100.0, 0.0015, 0.7, 30, 80, 24, 12),
    Fleet("agents", "Llama-3.1-70B", 80, 4, 2, 20_000, 200.0, 0.003, 0.3, 12, 700, 60, 20),
)


@dataclass
class Engine:
    """An engine as its connector sees it, with a prefix cache of its own."""

    trace: TraceRecorder
    own: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    told_s: float = 0.0

    def serve(self, fleet: Fleet, at_s: float, hashes: list[bytes]) -> None:
        local = next((number for number, one in enumerate(hashes) if one not in self.own), len(hashes))
        name = namespace_id(fleet.namespace())
        self.trace.record_hashes(name, hashes, 0, at_s, local=local)
        if at_s - self.told_s > 30:
            self.told_s = at_s
            self.trace.record_cost(name, at_s, fleet.token_us, fleet.depth_us)
        # Heads are used last, so that tails go first.
        for one in reversed(hashes):
            self.own[one] = None
            self.own.move_to_end(one)
        while len(self.own) > fleet.own_blocks:
            self.own.popitem(last=False)


def chain(parent: bytes, blocks: int, draw: random.Random) -> Iterator[bytes]:
    """Yields hashes of blocks that nobody has seen."""
    for _ in range(blocks):
        parent = hashlib.sha256(parent + draw.randbytes(8)).digest()
        yield parent


def prompts(fleet: Fleet, number: int, draw: random.Random) -> list[tuple[float, list[bytes]]]:
    """Returns about so many prompts of a day: of conversations, each of which grows turn by turn."""
    heads = [
        list(chain(b"head", draw.randint(fleet.head_blocks // 4, fleet.head_blocks), draw))
        for _ in range(fleet.heads)
    ]
    weights = [1 / (rank + 1) for rank in range(len(heads))]
    found: list[tuple[float, list[bytes]]] = []
    while len(found) < number:
        at_s = BEGAN_S + draw.random() * DAY_S
        said = list(draw.choices(heads, weights)[0])
        for _ in range(draw.randint(1, fleet.turns)):
            said += chain(said[-1], draw.randint(1, fleet.turn_blocks), draw)
            found.append((at_s, list(said)))
            at_s += draw.expovariate(1 / _PAUSE_S)
    return sorted(found)


def write(folder: Path, requests: int, seed: int = 1) -> None:
    """Writes one file for each engine."""
    draw = random.Random(seed)
    for fleet in FLEETS:
        namespace = fleet.namespace()
        engines = []
        for _ in range(fleet.engines):
            # Nothing is queued: each batch is written when it is due.
            trace = TraceRecorder(TraceSettings(folder=str(folder)), lambda _, job: (job(), True)[1])
            trace.describe(namespace_id(namespace), namespace, namespace.groups[0].slot_bytes, gpus=fleet.tp)
            engines.append(Engine(trace))
        for number, (at_s, hashes) in enumerate(prompts(fleet, round(requests * fleet.share), draw)):
            engines[number % len(engines)].serve(fleet, at_s, hashes)
        for engine in engines:
            engine.trace.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for former in options.folder.glob("*.jsonl"):
        former.unlink()
    write(options.folder, options.requests)


if __name__ == "__main__":
    main()
