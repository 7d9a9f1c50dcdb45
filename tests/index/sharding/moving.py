"""A namespace that is brought into other shards, and what others do between any two of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from kvstore.errors import NamespaceUnknown
from kvstore.index.port import CommitState
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.index.sharding.resharding import Moved, Resharding
from kvstore.keys import NamespaceId, SaltId, SegmentId, new_segment_id
from tests.index.contract.chains import CREATED_S, LATER_S, chain, namespace, put, record, served
from tests.servers.redis import PATIENT

WAYS = [(1, 8), (8, 2), (8, 1), (2, 8)]
SALT = SaltId(b"salt" * 4)
BANNED = SaltId(b"bans" * 4)
#: Long before anything was created, and by the server's clock.
TTL_S = 400 * 86_400 * 100
#: Chains of a namespace that is brought elsewhere many times, and what can be matched of them.
FEW = 8
ALL = [4] * 6 + [2] * 2
#: About at so many of its steps something else happens.
STEPS = 24


def step_of(to: str, left: str, then_to: str, then_left: str) -> str:
    """Returns what a reshard does that says how a namespace lies from now on."""
    if then_to:
        return "begin"
    return "turn" if then_left else "end" if left else "undo"


class Stopped(Exception):
    """Somebody was killed."""


class Stepped:
    """Does something between any two requests of one process to its Redis."""

    def __init__(self, url: str) -> None:
        self.leaf = RedisIndex.from_settings(url, PATIENT)
        self.steps = 0
        #: Names of scripts, and of commands.
        self.last = ""
        self.dead = False
        self.between: Callable[[], None] = lambda: None
        client: Any = self.leaf._client
        for verb in ("run", "command", "many"):
            setattr(client, verb, self._stepping(getattr(client, verb)))

    def _stepping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **options: Any) -> Any:
            self.steps += 1
            self.last = str(getattr(args[0], "name", args[0]))
            if self.last == "layout":
                self.last = step_of(*args[3:5], *args[6:8])
            self.between()
            if self.dead:
                raise Stopped
            return call(*args, **options)

        return stepped

    def at(self, step: int, work: Callable[[], None]) -> None:
        """Does some work before request number `step` from now on."""
        first = self.steps

        def between() -> None:
            if self.steps == first + step:
                self.between = lambda: None
                work()

        self.between = between

    def before(self, name: str, work: Callable[[], None]) -> None:
        """Does some work before the next script, command or step (`step_of`) of that name."""

        def between() -> None:
            if self.last == name:
                self.between = lambda: None
                work()

        self.between = between

    def kill(self) -> None:
        """Lets nothing of it come through any more: it cleans nothing up."""
        self.dead = True

    @contextmanager
    def killed(self, *, step: int = 0, before: str = "", surely: bool = True) -> Iterator[None]:
        """Kills it there, or expects that it is killed."""
        if step:
            self.at(step, self.kill)
        elif before:
            self.before(before, self.kill)
        try:
            with pytest.raises(Stopped) if surely else suppress(Stopped):
                yield
        finally:
            self.dead, self.between = False, lambda: None

    def close(self) -> None:
        self.leaf.close()


def stop() -> None:
    """Interrupts it: it may clean up."""
    raise Stopped


def some_steps(count: int, most: int = STEPS) -> range:
    """Returns about so many of that many steps."""
    return range(1, count + 1, max(1, count // most))


def steps_of(stepped: Stepped, name: NamespaceId, after: int) -> int:
    """Returns how many requests a reshard takes, and does it."""
    first = stepped.steps
    resharded(stepped.leaf, name, after)
    return stepped.steps - first


def resharded(
    leaf: Any, name: NamespaceId, shards: int, *, wait: Callable[[float], None] = lambda seconds: None
) -> Moved:
    index = ShardedIndex(leaf)
    return Resharding(index, namespace(), name, shards, expected_blocks=1000, late_s=0.0, wait=wait).run()


def everything(index: ShardedIndex, name: NamespaceId) -> dict[str, Any]:
    """All that a reshard keeps."""
    listed = {one.segment: one for one in index.segments(name)}
    due = index.reapable(name, LATER_S * 2, 1000)
    (account,) = index.accounts()
    return {
        "listed": listed,
        "usage": index.usage(name),
        "account": (account.usage, account.trashed, account.ttl_s, account.problem),
        "order": [one.segment for one in index.order(name, 1000)],
        "entries": sorted((one.digest, one.segment, one.slot) for one in index.entries(name)),
        "due": sorted(due),
        "held": index.holdings(name, 0),
        "of salt": {one.segment for one in index.of_salt(name, SALT)},
        "hot": sorted(index.hottest(name, 100)),
        "forbidden": index.forbidden(name),
        "unlisted": index.reconcile(name).mended,
    }


def filled(index: ShardedIndex, number: int = 40) -> tuple[NamespaceId, list[bytes]]:
    """A namespace with some of everything; its chains that can be matched."""
    name = index.register(namespace(), expected_blocks=1000)
    index.forbid(name, BANNED)
    chains = [chain(4, seed=str(seed)) for seed in range(number)]
    made = []
    for one in chains:
        first = put(index, name, one[:32])
        salted = record(2, depth=2, salt=SALT, created_s=CREATED_S)
        second = new_segment_id(one)
        assert index.commit(name, second, one[32:], salted, rank=0, ranks=1) is CommitState.VISIBLE
        made.append((first, second))
    for turn, (first, second) in enumerate(made):
        index.touch(name, [first, second], CREATED_S + 86_400 + 7200 * (turn * 7 % 40))
    index.pin(name, [first for first, _ in made[:5]], most_bytes=1 << 40)
    index.age_out(name, TTL_S, delete_after_s=LATER_S)
    index.evict(name, [second for _, second in made[-number // 4 :]], delete_after_s=LATER_S, rule="admin")
    while index.sweep(name, 1000):
        pass
    return name, chains


def found(index: Any, name: NamespaceId, chains: list[bytes]) -> list[int]:
    return [served(index.match(name, one)) for one in chains]


class Engine:
    """One that believes what it knew before for as long as it may, and does a bit of everything.

    It keeps the names of all payloads: what can be matched must have one, and what has one must be known,
    unless it was saved while the namespace was brought elsewhere.
    """

    def __init__(self, leaf: Any, name: NamespaceId) -> None:
        self.now = 0.0
        self.index = ShardedRequests(leaf, monotonic=lambda: self.now)
        self.tools = ShardedIndex(leaf, monotonic=lambda: self.now)
        self.name = name
        self.saved: dict[bytes, SegmentId] = {}
        #: What the index may have forgotten, for `fsck` to find.
        self.strays: set[SegmentId] = set()
        tools = ShardedIndex(leaf)
        self.payloads = {one.segment for one in tools.segments(name)}
        self.payloads |= {one for one, _ in tools.reapable(name, 2 * LATER_S, 1000)}

    def save(self, one: bytes) -> SegmentId | None:
        """As a store does: who is told that the namespace is unknown registers it."""
        segment = new_segment_id(one)
        for _ in range(2):
            try:
                state = self.index.commit(self.name, segment, one, record(len(one) // 16), rank=0, ranks=1)
            except NamespaceUnknown:
                self.index.register(namespace(), expected_blocks=1000)
            else:
                assert state is CommitState.VISIBLE
                self.saved[one] = segment
                self.payloads.add(segment)
                return segment
        return None

    def reap(self) -> None:
        """Deletes what is due at once, as a janitor does."""
        while due := [one for one, _ in self.tools.reapable(self.name, CREATED_S, 1000)]:
            self.payloads.difference_update(due)
            self.tools.reaped(self.name, due)

    def segments(self, chains: list[bytes]) -> list[SegmentId]:
        return [run.segment for one in chains for run in self.index.match(self.name, one)]

    def check(self, index: ShardedIndex) -> None:
        """What is visible is stored, what is stored is known, and the accounts are right."""
        visible = {one.segment for one in index.segments(self.name)}
        assert visible <= self.payloads
        due = {one for one, _ in index.reapable(self.name, 2 * LATER_S, 1000)}
        assert self.payloads <= visible | due | set(self.saved.values()) | self.strays
        assert not visible & due
        reconciled = index.reconcile(self.name)
        assert reconciled.counted == reconciled.recorded
        assert reconciled.mended == 0
