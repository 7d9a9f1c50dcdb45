"""Engines of the tiny model over one store, and what the tests ask of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Self

import torch

from connectors.v0.connector import KVStoreConnectorV0
from tests.connectors.v0.model import LAYERS, VOCAB, Cluster, Meeting, Model, Rank, Runner, config, together


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(VOCAB) for _ in range(length)] for length in lengths]


#: Shorter than a block, one block, two, blocks and a rest, many.
PROMPTS = prompts(5, 8, 16, 37, 64)


class World:
    """Engines over one folder, each with connectors of its own; all are closed at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[Cluster] = []

    def engine(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        mla: bool = False,
        store: bool = True,
        seed: int = 0,
        role: str = "kv_both",
        kind: type[KVStoreConnectorV0] = KVStoreConnectorV0,
        model_seed: int = 0,
        extra: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Cluster:
        settings = {"payloads": f"file://{self.root}", **(extra or {})}
        # A busy machine is no reason to miss: what a deadline does has tests of its own.
        settings["kv"] = {"match_deadline_s": 60.0, **settings.get("kv", {})}
        stages: list[list[Runner]] = []
        for stage in range(pp):
            layers = range(LAYERS * stage // pp, LAYERS * (stage + 1) // pp)
            meeting = Meeting(tp)
            ranks = [Rank(meeting, number) if tp > 1 else None for number in range(tp)]
            models = [Model(layers, rank=rank, mla=mla, seed=model_seed) for rank in ranks]
            connectors: list[Any] = [None] * tp
            if store:
                made = config(settings, tp=tp, pp=pp, mla=mla, **changes)
                jobs = [
                    lambda n=number: kind(stage * tp + n, n, made, peers=ranks[n]) for number in range(tp)
                ]
                connectors = together(jobs)
            stages.append(
                [Runner(model, one, role=role) for model, one in zip(models, connectors, strict=True)]
            )
        cluster = Cluster(stages, seed=seed)
        self._open.append(cluster)
        return cluster

    def files(self) -> list[Path]:
        return sorted(self.root.glob("*/??/*"))

    def __enter__(self) -> Self:
        # For tensors as small as these, and ranks in threads of their own.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *exc: object) -> None:
        for cluster in self._open:
            cluster.close()
        torch.set_num_threads(self._threads)


def calls(cluster: Cluster) -> list[int]:
    """Forward passes of each runner."""
    return [runner.model.calls for runner in cluster.runners]


def bypassed(cluster: Cluster) -> list[list[bool]]:
    return [runner.bypassed for runner in cluster.runners]


def counters(cluster: Cluster, which: int = 0) -> dict[str, int]:
    return cluster.runners[which].connector._worker._store.counters.snapshot()


def namespaces(runner: Runner) -> list[str]:
    return [space.id for space in runner.connector._worker._spaces.values()]


def stored(world: World, texts: list[list[int]] = PROMPTS, **kind: Any) -> list[list[int]]:
    """Have an engine compute and store prompts; returns what an engine without a store answers."""
    cold = world.engine(**kind)
    answers = cold.generate(texts)
    cold.close()
    plain = {name: value for name, value in kind.items() if name in ("tp", "pp", "mla", "model_seed")}
    assert answers == world.engine(store=False, **plain).generate(texts)
    assert bypassed(cold) == [[False]] * len(cold.runners)
    return answers


def flip(path: Path) -> None:
    """Damage a payload, near its end."""
    data = bytearray(path.read_bytes())
    data[-20] ^= 0x40
    path.write_bytes(data)
