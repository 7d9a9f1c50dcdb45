"""What a process remembers of what was stored: an index that remembers passes the contract."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import open_store
from kvstore.errors import BreakerOpen
from kvstore.index import near
from kvstore.index.near import NearRuns
from kvstore.index.port import Run
from kvstore.index.sharding.index import ShardedIndex
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId, namespace_id
from tests.index.contract.admission import NoteConformance
from tests.index.contract.chains import LATER_S, chain, namespace, put, put_all, record, served
from tests.index.contract.index import IndexConformance
from tests.index.memory import Memory
from tests.index.test_state_machine import IndexMachine, run
from tests.servers.redis import RedisServer
from tests.store.world import SLOT_BYTES, slots
from tests.store.world import chain as hashes_of
from tests.store.world import digests as digests_of
from tests.store.world import namespace as space_of
from tests.waiting import PATIENCE_S

NAME = namespace_id(namespace())
#: What makes nothing invisible. All else is told here to what is remembered; in a fleet nobody tells it.
_HARMLESS = {"match", "find", "claim", "commit", "touch", "note", "tell", "session", "owned", "register"}


class Told(NearRuns):
    """Forgets everything when it is told to."""

    def forget_everything(self) -> None:
        with self._lock:
            self._chains.clear()
            self._number = self._blocks = self._runs = 0
            self._forgotten += 1


class RememberingIndex(ShardedIndex):
    """Remembers what was matched until something may have become invisible."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("_") and callable(found) and name not in _HARMLESS:
            told: Told = super().__getattribute__("_near")
            told.forget_everything()
        return found

    def match(self, namespace: NamespaceId, digests: bytes, *, fresh: bool = False) -> list[Run]:
        """Asks twice, so that what is remembered is what is answered, unless another thread took it away."""
        super().match(namespace, digests, fresh=fresh)
        return super().match(namespace, digests, fresh=fresh)


class TestRemembering(IndexConformance, NoteConformance):
    @pytest.fixture
    def index(self) -> Iterator[ShardedIndex]:
        self.server = Memory()
        self.near = Told(3600.0)
        with self.reopen() as index:
            yield index

    def reopen(self) -> ShardedIndex:
        return RememberingIndex(self.server.open(), shards=8, near=self.near)


def test_any_sequence_of_calls() -> None:
    counts: Counter[str] = Counter()

    class Machine(IndexMachine):
        server = Memory()

        def open(self) -> Any:
            return RememberingIndex(Machine.server.open(), near=Machine.near)

        def empty(self) -> None:
            Machine.server = Memory()
            Machine.near = Told(3600.0, count=lambda name, amount: counts.update([name]))
            self.handles = [self.open(), self.open()]

    run(Machine, 60)
    assert counts["near_blocks"] and counts["near_matches"]


class Asked:
    """An index of one chain, all of whose leading `blocks` are stored, in segments of `size`."""

    def __init__(self, digests: bytes, blocks: int, size: int = 4) -> None:
        self.digests, self.blocks, self.size = digests, blocks, size
        self.calls: list[int] = []

    def __call__(self, rest: bytes) -> list[Run]:
        begin = (len(self.digests) - len(rest)) // DIGEST_BYTES
        assert self.digests.endswith(rest)
        self.calls.append(len(rest) // DIGEST_BYTES)
        runs, at = [], begin
        while at < self.blocks:
            count = min(self.size - at % self.size, self.blocks - at)
            segment = SegmentId((at // self.size).to_bytes(8, "big"))
            runs.append(Run(at - begin, segment, at % self.size, count, record(self.size)))
            at += count
        return runs


def spans(runs: list[Run]) -> list[tuple[int, int, int, int]]:
    return [(run.start, run.segment[-1], run.slot, run.count) for run in runs]


def test_what_follows_a_known_beginning_is_asked_for_alone() -> None:
    remembered = NearRuns(5.0, monotonic=lambda: 0.0)
    first, longer = chain(10), chain(16)
    assert spans(remembered.match(NAME, first, Asked(first, 10))) == [
        (0, 0, 0, 4),
        (4, 1, 0, 4),
        (8, 2, 0, 2),
    ]
    ask = Asked(longer, 15)
    # A segment that goes on is one run, as if all had been asked for.
    whole = [(0, 0, 0, 4), (4, 1, 0, 4), (8, 2, 0, 4), (12, 3, 0, 3)]
    assert spans(remembered.match(NAME, longer, ask)) == whole
    assert ask.calls == [6]
    # What was not there then may be there now.
    ask = Asked(longer, 16)
    assert served(remembered.match(NAME, longer, ask)) == 16 and ask.calls == [1]
    ask = Asked(longer, 16)
    assert served(remembered.match(NAME, longer, ask)) == 16 and ask.calls == []
    # A beginning of it, which ends in a segment.
    short = longer[: 6 * DIGEST_BYTES]
    assert spans(remembered.match(NAME, short, Asked(short, 0))) == [(0, 0, 0, 4), (4, 1, 0, 2)]
    # Of another namespace nothing is known.
    ask = Asked(first, 10)
    remembered.match(NamespaceId("0" * 16), first, ask)
    assert ask.calls == [10]


def test_nothing_is_older_than_it_may_be() -> None:
    """However often it is used, and whatever was added to it since."""
    now = [0.0]
    remembered = NearRuns(5.0, monotonic=lambda: now[0])
    first, longer = chain(4), chain(8)
    remembered.match(NAME, first, Asked(first, 4))
    for now[0] in (1.0, 4.9):
        assert served(remembered.match(NAME, longer, Asked(longer, 8))) == 8
    now[0] = 5.0
    ask = Asked(longer, 0)
    assert remembered.match(NAME, longer, ask) == [] and ask.calls == [8]
    assert not remembered._chains and not remembered._blocks and not remembered._number


def test_what_this_process_evicts_it_forgets() -> None:
    remembered = NearRuns(5.0)
    with ShardedIndex(Memory().open(), near=remembered) as index:
        name = index.register(namespace(), expected_blocks=100)
        segments = put_all(index, name, chain(8), [4, 4])
        put_all(index, name, chain(4, seed="other"), [4])
        for seed in ("", "other"):
            assert index.match(name, chain(8, seed=seed) if seed else chain(8))
        index.evict(name, segments[1:], delete_after_s=LATER_S, rule="bad")
        assert served(index.match(name, chain(8))) == 4
        assert [len(one[0].digests) for one in remembered._chains.values()] == [64, 64]


def test_what_grows_too_old_or_is_unlisted_here_is_forgotten() -> None:
    with ShardedIndex(Memory().open(), near=NearRuns(5.0)) as index:
        name = index.register(namespace(), expected_blocks=100)
        first, second = chain(4, seed="first"), chain(4, seed="second")
        segments = put_all(index, name, first, [4]) + put_all(index, name, second, [4])
        assert served(index.match(name, first)) == served(index.match(name, second)) == 4
        index.unlist(name, segments[:1])
        assert not index.match(name, first) and served(index.match(name, second)) == 4
        assert index.age_out(name, 1, delete_after_s=LATER_S)[0] == 1
        assert not index.match(name, second)


def test_zero_seconds_remember_nothing() -> None:
    remembered = NearRuns(0.0)
    # Nobody who evicts waits for anything, nor a child that is forked meanwhile.
    remembered._lock.acquire()
    remembered.forget(NAME, [SegmentId(b"gone")])
    remembered.forget_all(NAME)
    for _ in range(2):
        ask = Asked(chain(4), 4)
        assert served(remembered.match(NAME, chain(4), ask)) == 4 and ask.calls == [4]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "MOST_ALIKE", 4)
    monkeypatch.setattr(near, "MOST_CHAINS", 10)
    monkeypatch.setattr(near, "MOST_BLOCKS", 200)
    monkeypatch.setattr(near, "MOST_RUNS", 40)
    remembered, source = NearRuns(5.0), random.Random(0)
    for _ in range(500):
        beginning = chain(2, seed=str(source.randrange(8)))
        digests = chain(source.randrange(1, 40), seed=str(source.random()), after=beginning)
        remembered.match(NAME, digests, Asked(digests, len(digests) // DIGEST_BYTES))
        chains = [one for some in remembered._chains.values() for one in some]
        assert len(chains) == remembered._number <= 10
        assert sum(len(one.digests) for one in chains) // DIGEST_BYTES == remembered._blocks <= 200
        assert sum(len(one.runs) for one in chains) == remembered._runs <= 40
        assert max((len(some) for some in remembered._chains.values()), default=0) <= 4


def test_what_is_used_stays_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning that everybody asks for, and which is always there, among many that come once."""
    monkeypatch.setattr(near, "MOST_CHAINS", 4)
    remembered, hot = NearRuns(5.0, monotonic=lambda: 0.0), chain(4, seed="hot")
    remembered.match(NAME, hot, Asked(hot, 4))
    for number in range(20):
        once = chain(2, seed=str(number))
        remembered.match(NAME, once, Asked(once, 2))
        ask = Asked(hot, 4)
        assert served(remembered.match(NAME, hot, ask)) == 4 and ask.calls == []


def test_what_went_while_it_was_asked_for_is_not_remembered() -> None:
    remembered, digests = NearRuns(5.0), chain(4)

    def ask(rest: bytes) -> list[Run]:
        found = Asked(digests, 4)(rest)
        remembered.forget(NAME, [found[0].segment])
        return found

    assert served(remembered.match(NAME, digests, ask)) == 4
    again = Asked(digests, 0)
    assert remembered.match(NAME, digests, again) == [] and again.calls == [4]


def test_what_a_failed_match_knew_is_not_counted_as_found() -> None:
    counts: Counter[str] = Counter()
    remembered = NearRuns(5.0, count=lambda name, amount: counts.update({name: amount}))
    remembered.match(NAME, chain(4), Asked(chain(4), 4))

    def fails(rest: bytes) -> list[Run]:
        raise BreakerOpen("index")

    with pytest.raises(BreakerOpen):
        remembered.match(NAME, chain(8), fails)
    assert not counts


@pytest.mark.servers
@pytest.mark.parametrize("shards", [1, 8])
def test_a_store_remembers_for_those_who_rely_on_nothing_newer(tmp_path: Path, shards: int) -> None:
    with RedisServer(tmp_path / "redis") as server:
        tree = {
            "payloads": f"file://{tmp_path}/payloads",
            "index": server.url,
            "redis": {"timeout_s": PATIENCE_S, "near_s": 3600.0, "shards": shards},
            "grace_s": 4000,
        }
        hashes = hashes_of(*range(6))
        digests = digests_of(hashes)
        with open_store(tree) as store, open_store(tree) as other:
            space = store.open(space_of(), block_bytes=SLOT_BYTES)
            space.register()
            assert space.save(slots(hashes)).stored == 6
            assert space.match(digests).blocks == space.match(digests).blocks == 6
            assert store.counters.snapshot()["near_matches"] == 1
            (run,) = space.match(digests).runs
            # Another process takes it away: remembered here, but not for those who ask anew.
            gone = other.maintenance.evict(space.id, [run.segment], delete_after_s=0, rule="admin")
            assert gone == 1
            assert space.match(digests).blocks == 6
            assert space.match(digests, fresh=True).blocks == 0
            # What is taken away here is forgotten here, whether it still was there or not.
            store.maintenance.evict(space.id, [run.segment], delete_after_s=0, rule="admin")
            assert space.match(digests).blocks == 0


def test_any_chains_are_answered_as_by_who_asks_for_all() -> None:
    """A tree of chains of which a random part is stored and stays."""
    source = random.Random(7)
    remembered = NearRuns(1e9)
    with Memory().open() as index:
        name = index.register(namespace(), expected_blocks=1000)
        leaves = [chain(source.randrange(1, 9), seed=f"root {n}") for n in range(3)]
        for step in range(300):
            parent = source.choice(leaves)
            cut = source.randrange(1, len(parent) // DIGEST_BYTES + 1) * DIGEST_BYTES
            one = chain(source.randrange(1, 20), seed=str(step), after=parent[:cut])
            leaves.append(one)
            if source.random() < 0.5:
                for first in range(served(index.match(name, one)), len(one) // DIGEST_BYTES, 3):
                    put(index, name, one, first, min(3, len(one) // DIGEST_BYTES - first))
            asked = source.choice(leaves)
            found = remembered.match(name, asked, lambda rest: index.match(name, rest))
            assert spans(found) == spans(index.match(name, asked))
