"""The whole store against a dict: whatever happened before, a load gives the right bytes or a miss.

Crashes are steps of a save that never ran: the process ends after the put, or after nothing at all.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.conformance.faulty import Fault, Plan, Rule
from kvstore.errors import KVStoreError
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.keys import digests, new_segment_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.store.growing import grow
from tests.store.world import chain, content, fetch, make_store, match, open_space, slots

SIGNS = Keyring({"a": bytes(32)}, key="a")
ENCRYPTS = Keyring({"a": bytes(32)}, key="a", encrypts=True)
#: Few steps per level, so that chains share prefixes and diverge.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class Died(BaseException):
    """The process is gone: nothing may catch this."""


class StoreMachine(RuleBasedStateMachine):
    """`stored` is the model: every block hash that was ever saved, with its only right content."""

    @initialize(
        codec=st.sampled_from(["none", "lz4"]),
        capacity=st.sampled_from([1 << 16, 1 << 30]),
        keyring=st.sampled_from([NO_KEYS, SIGNS, ENCRYPTS]),
    )
    def start(self, codec: str, capacity: int, keyring: Keyring) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.codec = codec
        self.capacity = capacity
        self.keyring = keyring
        self.now = 1_000_000.0
        self.saved: set[bytes] = set()
        self.clean = True
        self.plan = Plan()
        self.open()

    def open(self) -> None:
        self.store: Store = make_store(
            self.root,
            plan=self.plan,
            clock=lambda: self.now,
            keyring=self.keyring,
            capacity_bytes=self.capacity,
            claim_ttl_s=0.001,
        )
        self.space: Space = open_space(self.store, codec=self.codec)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)

    @rule(path=PATHS)
    def save(self, path: list[int]) -> None:
        hashes = chain(*path)
        self.saved.update(hashes)
        with contextlib.suppress(KVStoreError):
            saved = self.space.save(slots(hashes))
            assert saved.present + saved.stored <= len(hashes)
            if self.clean and saved.outcome == "stored" and self.capacity > 1 << 20:
                assert match(self.space, hashes).blocks == len(hashes)

    @rule(path=PATHS, start=st.integers(0, 7))
    def save_a_tail(self, path: list[int], start: int) -> None:
        """An engine whose earlier blocks were dropped saves only what follows."""
        hashes = chain(*path)[start:]
        if hashes:
            self.saved.update(hashes)
            with contextlib.suppress(KVStoreError):
                self.space.save(slots(hashes), depth=start, chain=digests(chain(*path)[:1]))

    @rule(path=PATHS, size=st.sampled_from([2, 4, 8]))
    def grow(self, path: list[int], size: int) -> None:
        """A turn of a conversation: short segments before what is new are written anew with it."""
        hashes = chain(*path)
        self.saved.update(hashes)
        before = match(self.space, hashes).blocks
        with contextlib.suppress(KVStoreError):
            saved = grow(self.space, hashes, slots, size)
            if self.clean and self.capacity > 1 << 20:
                assert match(self.space, hashes).blocks >= before
                if all(one.outcome == "stored" for one in saved):
                    assert match(self.space, hashes).blocks == len(hashes)

    @rule(path=PATHS, after=st.sampled_from(["claim", "put"]))
    def crash_while_saving(self, path: list[int], after: str) -> None:
        hashes = chain(*path)
        index: Any = self.store.maintenance  # the same index, without the breaker

        def die(*args: object, **kwargs: object) -> None:
            raise Died

        if after == "claim":
            with contextlib.suppress(KVStoreError):
                self.space.register()
                index.claim(self.space.id, digests(hashes), new_segment_id(), 0.001)
        else:
            original, index.commit = index.commit, die
            with contextlib.suppress(Died, KVStoreError):
                self.space.save(slots(hashes))
            index.commit = original
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule(path=PATHS)
    def evict(self, path: list[int]) -> None:
        found = match(self.space, chain(*path))
        if found.runs:
            segment = found.runs[-1].segment
            self.store.index.evict(self.space.id, [segment], delete_after_s=self.now + 120, rule="admin")
            # Given out before, so still readable; the faults below may say otherwise.
            if self.clean:
                assert fetch(self.space, chain(*path), found) == [
                    content(h) for h in chain(*path)[: found.blocks]
                ]

    @rule(seconds=st.sampled_from([1.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        with contextlib.suppress(KVStoreError):
            self.store.rounds.housekeep()

    @rule(
        which=st.integers(0, 1 << 16),
        other=st.integers(0, 1 << 16),
        at=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
        how=st.sampled_from(["flip", "cut", "delete", "swap"]),
    )
    def damage_a_payload(self, which: int, other: int, at: float, bit: int, how: str) -> None:
        # Drawn before looking: what is there depends on random names.
        files = sorted(self.root.glob("*/??/*"))
        if not files:
            return
        self.clean = False
        path = files[which % len(files)]
        blob = bytearray(path.read_bytes())
        position = int(at * len(blob))
        if how == "delete":
            path.unlink()
        elif how == "swap":
            path.write_bytes(files[other % len(files)].read_bytes())
        elif how == "flip" and blob:
            blob[position] ^= 1 << bit
            path.write_bytes(blob)
        else:
            path.write_bytes(blob[:position])

    @rule(
        fault=st.sampled_from(["transient", "unanswered", "permission", "missing", "truncate", "flip"]),
        times=st.integers(1, 3),
    )
    def let_the_next_calls_fail(self, fault: Fault, times: int) -> None:
        self.clean = False
        self.plan.replace(Rule(fault, times=times))

    @rule()
    def lose_the_index(self) -> None:
        self.store.close()
        for name in self.root.glob("index.sqlite*"):
            name.unlink()
        self.open()
        for path in ([0], [1]):
            assert match(self.space, chain(*path)).blocks == 0

    @rule(path=PATHS)
    def load(self, path: list[int]) -> None:
        hashes = chain(*path)
        found = match(self.space, hashes)
        assert found.blocks <= len(hashes)
        assert all(one in self.saved for one in hashes[: found.blocks]), "a block nobody ever saved"
        try:
            got = fetch(self.space, hashes, found)
        except KVStoreError:
            assert not self.clean, "a promise that nothing had disturbed was not kept"
            return
        assert got == [content(one) for one in hashes[: found.blocks]]

    @invariant()
    def within_capacity(self) -> None:
        if hasattr(self, "store"):
            used = self.store.maintenance.usage(self.space.id).nbytes
            # One save beyond the bound, until the next one's tidying.
            assert used <= self.capacity + (1 << 16)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestStore = StoreMachine.TestCase
