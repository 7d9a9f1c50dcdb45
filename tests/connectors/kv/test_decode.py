"""What decoding costs the scheduler's half while it saves what is decoded, and that it misses nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.layout import Group
from connectors.kv.messages import Save
from connectors.kv.planner import SavePlanner
from connectors.kv.scheduler import KVScheduler
from kvstore.rules.prefix import PrefixRule
from kvstore.store.store import Store
from schemas.namespace import GroupSpec
from tests.connectors.groups import TOKENS
from tests.connectors.kv.test_windows import FULL, HASH, SHAPE, STATE, WINDOW
from tests.connectors.kv.world import answer, half, report
from tests.fake_vllm import FakeRequest, scheduled, step
from tests.store.world import chain, make_store, open_space

pytestmark = pytest.mark.engine

REQUESTS = 256


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path, kv={"match_deadline_s": 60.0, "save_decode": True}) as made:
        yield made


class Asked(FakeRequest):
    """A request that tells `told` what is asked of it."""

    told: list[tuple[Any, str]] | None = None

    def __getattribute__(self, name: str) -> Any:
        if Asked.told is not None:
            Asked.told.append((self, name))
        return object.__getattribute__(self, name)


def test_a_request_that_fills_no_block_is_asked_for_one_number(store: Store) -> None:
    scheduler, requests = half(store, open_space(store)), []
    for i in range(REQUESTS):
        # Prompts of different lengths: their blocks fill in different steps.
        request = Asked(f"r{i}", (i, 1))
        request.num_prompt_tokens = request.num_tokens = 2 * TOKENS + i % TOKENS
        answer(scheduler, request)
        step(scheduler, (request, request.num_prompt_tokens))
        requests.append(request)
    for _ in range(3 * TOKENS):
        for request in requests:
            # What the last step has sampled is what this one computes.
            request.num_tokens += 1
            request.block_hashes = chain(*range(request.num_tokens // TOKENS))
        output = scheduled([(request, 1) for request in requests])
        told: list[tuple[Any, str]] = []
        with mock.patch.object(Asked, "told", told):
            scheduler.build_connector_meta(output)
        asked: dict[int, list[str]] = {id(request): [] for request in requests}
        for who, what in told:
            asked[id(who)].append(what)
        for request in requests:
            request.num_computed_tokens += 1
            if request.num_computed_tokens % TOKENS:
                assert asked[id(request)] == ["num_computed_tokens"]
            else:
                assert "block_hashes" in asked[id(request)], "its block is full"


CHUNK = Group(
    GroupSpec(kind="chunked_local", block_tokens=8, dtype="BF16", shape=SHAPE, window=40),
    PrefixRule("chunk", 8, 40),
    (1,),
    offered=False,
    writers=1,
    part_bytes=32,
)
#: Mamba mode "all": a state for every block.
STATES = Group(
    GroupSpec(kind="mamba", block_tokens=16, dtype="I8", shape=SHAPE),
    PrefixRule("state", 16),
    (1,),
    offered=False,
    writers=1,
    part_bytes=32,
)
KINDS = {
    "full": [FULL], "window": [FULL, WINDOW], "chunk": [FULL, CHUNK], "states": [STATES],
    "offered": [FULL, STATE], "window alone": [WINDOW],
}  # fmt: skip


class _Decoding:
    """One request from its prompt to its end, with drafts of which some are rejected, hashes that come steps
    later, and preemptions; all of it follows from the seed."""

    def __init__(self, scheduler: KVScheduler, groups: Sequence[Group], seed: int) -> None:
        self._scheduler, self._groups, self._random = scheduler, groups, random.Random(seed)
        self._names = chain(*range(60))
        #: What each step saves, and the end.
        self.saved: list[list[Any]] = []
        self._request = FakeRequest("r", (), max_tokens=1000)
        self._request.num_prompt_tokens = self._request.num_tokens = self._random.randrange(20, 120)
        self._request.block_hashes = self._names[: self._request.num_tokens // HASH]
        self._decode()

    def _decode(self) -> None:
        request, source = self._request, self._random
        assert answer(self._scheduler, request) == (0, False)
        end = request.num_tokens + 200
        while request.num_computed_tokens < end:
            drafts = 0
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                tokens = min(left, source.choice([7, 30, 200]))
            else:
                tokens = 1 + (drafts := source.randrange(4))
            self._step(request, tokens)
            if left <= tokens:
                request.num_computed_tokens -= source.randint(0, drafts)
                request.num_tokens = max(request.num_tokens, request.num_computed_tokens + 1)
                if source.random() < 0.7:
                    request.block_hashes = self._names[: request.num_tokens // HASH]
            if source.random() < 0.02:
                request.num_computed_tokens = 0
                step(self._scheduler, preempted={"r"})
                assert answer(self._scheduler, request) == (0, False)
        tables = self._tables(request.num_computed_tokens)
        self._scheduler.request_finished(request, tables)
        self._took(step(self._scheduler).flushes)

    def _tables(self, done: int) -> list[list[int]]:
        """As vLLM keeps them: nulls below what the next token needs."""
        tables: dict[int, list[int]] = {}
        for group in self._groups:
            size = group.rule.block_tokens
            gone = group.rule.skipped_tokens(self._request.num_computed_tokens) // size
            for table in group.tables:
                tables[table] = [0 if i < gone else 1000 * (table + 1) + i for i in range(-(-done // size))]
        return [tables.get(table, []) for table in range(5)]

    def _step(self, request: Any, tokens: int) -> None:
        done = request.num_computed_tokens + tokens
        offers = {}
        if done % 16 == 0:
            offers["r"] = [(table, done + table, done) for table in STATE.tables]
        made = step(self._scheduler, (request, tokens), tables=self._tables(done), offers=offers)
        self._took(made.saves)

    def _took(self, saves: Sequence[Save]) -> None:
        self.saved.append([(one.group, one.first, one.hashes, one.tables) for one in saves])
        report(self._scheduler, ended={one.segment for one in saves})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missed_by_steps_that_are_passed_over(store: Store, kind: str, seed: int) -> None:
    """What a scheduler saves in each step is what one saves that looks at every request in every step."""
    made, groups = [], KINDS[kind]
    for every in (False, True):
        with mock.patch.object(SavePlanner, "_idle", lambda *_: 0) if every else contextlib.nullcontext():
            scheduler = half(store, open_space(store), groups=groups, hash_tokens=HASH)
            made.append(_Decoding(scheduler, groups, seed).saved)
    assert made[0] == made[1]
    assert sum(map(len, made[0])) > 3
