"""Synthetic requests: system prompts shared by Zipf's law, chats of several turns, scans nobody repeats."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

#: (unix seconds, names of the chain's blocks)
Asked = tuple[float, list[int]]


def requests(seed: int, number: int, *, scale: int = 1, gap_s: float = 2.0) -> list[Asked]:
    """So many requests, in the order of time. `scale`: blocks of a turn, roughly."""
    draw = random.Random(seed)
    names = count()
    prompts = [[next(names) for _ in range(draw.randrange(2, 9) * scale)] for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    chats: list[list[int]] = []
    found: list[Asked] = []
    now = 1_790_000_000.0

    def new(most: int) -> Iterator[int]:
        return (next(names) for _ in range(draw.randrange(1, most + 1) * scale))

    while len(found) < number:
        now += draw.expovariate(1 / gap_s)
        kind = draw.random()
        if kind < 0.1:
            chain = [*new(20)]
        elif kind < 0.6 and chats:
            # A turn: what was said so far, and something new. Most chats that go on are recent ones.
            chat = chats[-min(len(chats), 1 + int(draw.expovariate(1 / 20)))]
            chat += new(4)
            chain = list(chat)
        else:
            chain = [*draw.choices(prompts, weights)[0], *new(6)]
            chats.append(list(chain))
        found.append((now, chain))
    return found


def write(path: Path, asked: list[Asked]) -> None:
    """In Mooncake's form, with blocks of 16 tokens."""
    with path.open("w", encoding="utf-8") as out:
        for at_s, chain in asked:
            line = {
                "timestamp": round(at_s * 1000),
                "input_length": 16 * len(chain) + 3,
                "output_length": 10,
                "hash_ids": chain,
            }
            out.write(json.dumps(line) + "\n")
