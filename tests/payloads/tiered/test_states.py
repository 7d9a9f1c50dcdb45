"""Two tiers on one folder against a dictionary: faults of both stores, evictions, crashes, restarts.

Whatever happened before, a read gives the right bytes, or a miss where a miss is allowed, and the folder is
never over its capacity. A crash is an exception out of any step that outlasts the process, after which every
other step fails too; its temporary files are those of test_tiered_crashes.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.conformance.arrange import NAMESPACE, views
from kvstore.conformance.faulty import Fault, Rule
from kvstore.errors import KVStoreError
from tests.payloads.tiered.world import Clock, Died, Queue, Rig, check_ledger, files_in

CAPACITY = 10_000
SIZES = (0, 10, 700, 2500, 4999, 5001, 11_000)
#: Every save takes a name of its own, as the store's do.
NUMBERS = st.integers(0, 60)
WHO = st.integers(0, 1)


def name_of(number: int) -> str:
    return f"{NAMESPACE}/{number:02x}/{number:02x}{number:014x}.0"


def content(number: int) -> bytes:
    size = SIZES[number % len(SIZES)]
    return (b"%d," % number * size)[:size]


class TierMachine(RuleBasedStateMachine):
    """`saved` are payloads whose put has returned and whose delete was not tried; `seen` any ever put."""

    @initialize(write=st.sampled_from(["through", "back"]))
    def start(self, write: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.write = write
        self.clock = Clock()
        self.next = 0
        self.saved: set[int] = set()
        self.seen: set[int] = set()
        self.faulty = False
        self.rigs = [self.open(), self.open()]

    def open(self) -> Rig:
        return Rig(
            self.root,
            capacity=CAPACITY,
            write=self.write,
            later=Queue(),
            clock=self.clock,
            sleep=self.clock.sleep,
            memory_bytes=2 << 20,
        )

    def teardown(self) -> None:
        if not hasattr(self, "rigs"):
            return
        self.heal()
        for _ in range(4):
            for rig in self.rigs:
                self.clock.now += 100
                rig.tend()
                rig.later.run()
        # Everything that was saved is in the shared store, and the books agree with the folder.
        for number in self.saved:
            assert (self.root / "slow" / name_of(number)).read_bytes() == content(number)
        for rig in self.rigs:
            check_ledger(rig.ledger, rig.folder)
            assert rig.tier.usage().dirty_payloads == 0
            assert rig.tier._back._markers.all() == []
            assert rig.tier._fetcher._flights._flights == {}
            assert rig.tier._fetcher._flights._buffers._out == 0
            assert rig.folder.joinpath(".tmp").exists() <= (not list(rig.folder.glob(".tmp/*")))
            rig.tier.close()
        shutil.rmtree(self.root)

    @rule(who=WHO)
    def save(self, who: int) -> None:
        number, self.next = self.next, self.next + 1
        if number > 60:
            return
        self.seen.add(number)
        data = content(number)
        try:
            self.rigs[who].tier.put(name_of(number), views(data[:5], data[5:]))
        except KVStoreError:
            assert self.faulty
            return
        self.saved.add(number)

    @rule(who=WHO, number=NUMBERS, start=st.floats(0, 1), part=st.floats(0, 1), sized=st.booleans())
    def load(self, who: int, number: int, start: float, part: float, sized: bool) -> None:
        data = content(number)
        offset = int(start * len(data))
        into = bytearray(int(part * (len(data) - offset)) + 3)
        size = len(data) if sized else None
        try:
            got = self.rigs[who].tier.read(name_of(number), offset, [memoryview(into)], size=size)
        except KVStoreError:
            assert self.faulty
            return
        if got is None:
            assert number not in self.saved or self.faulty
        else:
            assert number in self.seen
            assert bytes(into[:got]) == data[offset : offset + len(into)]

    @rule(who=WHO, number=NUMBERS)
    def fill(self, who: int, number: int) -> None:
        with suppress(KVStoreError):
            if self.rigs[who].tier.fill(name_of(number), len(content(number))):
                assert (self.root / "fast" / name_of(number)).read_bytes() == content(number)

    @rule(who=WHO, numbers=st.lists(NUMBERS, max_size=5))
    def delete(self, who: int, numbers: list[int]) -> None:
        present = self.saved & set(numbers)
        self.saved.difference_update(numbers)
        try:
            removed = self.rigs[who].tier.delete([name_of(number) for number in numbers])
        except KVStoreError:
            assert self.faulty
            return
        assert removed >= len(present) or self.faulty

    @rule(who=WHO, number=NUMBERS)
    def drop_copy(self, who: int, number: int) -> None:
        # Only of what the shared store has: the last copy would be gone, as it should be.
        if (self.root / "slow" / name_of(number)).exists():
            self.rigs[who].tier.drop_copy(name_of(number))

    @rule(who=WHO)
    def look(self, who: int) -> None:
        try:
            listed = [(one.name, one.nbytes) for one in self.rigs[who].tier.list()]
        except KVStoreError:
            assert self.faulty
            return
        assert len(listed) == len(set(listed))
        assert set(listed) <= {(name_of(number), len(content(number))) for number in self.seen}
        if not self.faulty:
            assert {name_of(number) for number in self.saved} <= {name for name, _ in listed}

    @rule(who=WHO, jobs=st.integers(1, 4))
    def run_jobs(self, who: int, jobs: int) -> None:
        queue = self.rigs[who].later
        for _ in range(min(jobs, len(queue.jobs))):
            queue.jobs.pop(0)()

    @rule(who=WHO, seconds=st.sampled_from([0.5, 3.0, 70.0]))
    def time_passes(self, who: int, seconds: float) -> None:
        self.clock.now += seconds
        self.rigs[who].tend()

    @rule(
        who=WHO,
        tier=st.sampled_from(["fast", "slow"]),
        fault=st.sampled_from(["transient", "unanswered", "permission", "no_space"]),
        skip=st.integers(0, 3),
        times=st.sampled_from([1, 3, None]),
    )
    def fail(self, who: int, tier: str, fault: Fault, skip: int, times: int | None) -> None:
        self.faulty = True
        rig = self.rigs[who]
        plan = rig.fast_plan if tier == "fast" else rig.slow_plan
        plan.replace(Rule(fault, skip=skip, times=times))

    @precondition(lambda self: self.faulty)
    @rule()
    def heal(self) -> None:
        for rig in self.rigs:
            rig.fast_plan.replace()
            rig.slow_plan.replace()
        self.clock.now += 60
        self.faulty = False

    @rule(who=WHO)
    def restart(self, who: int) -> None:
        self.rigs[who].tier.close()
        self.rigs[who] = self.open()

    @rule(who=WHO, at=st.integers(0, 25), work=st.sampled_from(["save", "delete", "jobs", "load", "tend"]))
    def crash(self, who: int, at: int, work: str) -> None:
        """A process dies at its `at`-th step from here."""
        rig, number, left = self.rigs[who], self.next, at

        def step(_what: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died

        rig.announce(step)
        with suppress(Died, KVStoreError):
            if work == "save" and number <= 60:
                self.next += 1
                self.seen.add(number)
                rig.tier.put(name_of(number), views(content(number)))
                self.saved.add(number)
            elif work == "delete" and self.saved:
                self.saved.discard(gone := min(self.saved))
                rig.tier.delete([name_of(gone)])
            elif work == "load" and self.seen:
                one = max(self.seen)
                rig.tier.fill(name_of(one), len(content(one)))
            elif work == "tend":
                self.clock.now += 10
                rig.tend()
            rig.later.run()
        rig.die()
        self.rigs[who] = self.open()

    @rule()
    def lose_the_ledger(self) -> None:
        for path in (self.root / "fast" / ".tier").glob("ledger*"):
            path.unlink()

    @invariant()
    def within_capacity(self) -> None:
        if hasattr(self, "rigs"):
            assert sum(files_in(self.root / "fast").values()) <= CAPACITY


TierMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestTier = TierMachine.TestCase
