"""The throttle: one process's pace, and that of many that don't know of each other."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from kvstore.errors import Throttled
from kvstore.payloads.throttle import Lane, Throttle

LONGEST_S = 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> Throttle:
    return Throttle(longest_s=LONGEST_S, clock=clock, draw=lambda: 0.5)


def go(throttle: Throttle, lane: Lane = "reads") -> float:
    """Makes a request now, however long it would have to wait."""
    return throttle.turn(lane, 1e9)[1]


def test_there_is_no_throttle_before_a_refusal(throttle: Throttle) -> None:
    assert {throttle.turn("reads", 0.0)[0] for _ in range(10_000)} == {0.0}
    assert throttle.pause_s("reads") == throttle.pause_s("saves") == 0.0


def test_a_refusal_halves_what_was_asked_for(throttle: Throttle, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 0.01
        taken = go(throttle)
    throttle.refused("reads", taken)
    assert throttle.pause_s("reads") == pytest.approx(2 / 100, rel=0.05)


def test_who_rarely_asks_is_not_stopped(throttle: Throttle) -> None:
    throttle.refused("reads", go(throttle))
    assert throttle.pause_s("reads") == pytest.approx(0.2)


def test_requests_of_before_a_refusal_halve_nothing_more(throttle: Throttle, clock: Clock) -> None:
    taken = [go(throttle) for _ in range(16)]
    clock.now += 0.01
    for one in taken:
        throttle.refused("reads", one)
    pause = throttle.pause_s("reads")
    clock.now += 0.01
    throttle.refused("reads", go(throttle))
    assert throttle.pause_s("reads") == pytest.approx(2 * pause, rel=0.05)


def test_requests_follow_each_other_at_the_pace(throttle: Throttle) -> None:
    throttle.refused("reads", go(throttle))
    waits = [throttle.turn("reads", 10.0)[0] for _ in range(5)]
    assert waits == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_who_would_wait_too_long_takes_no_place(throttle: Throttle) -> None:
    throttle.refused("reads", go(throttle))
    throttle.turn("reads", 0.5)
    throttle.turn("reads", 0.5)
    for _ in range(10):
        with pytest.raises(Throttled, match="others go before"):
            throttle.turn("reads", 0.5)
    assert throttle.turn("reads", 1.0)[0] == pytest.approx(0.6)


def test_a_pause_grows_to_a_bound_and_is_gone_in_less_than_a_minute(throttle: Throttle, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 0.001
        throttle.refused("reads", go(throttle))
    assert throttle.pause_s("reads") == pytest.approx(LONGEST_S)
    pauses = []
    for _ in range(60):
        clock.now += 1.0
        pauses.append(throttle.pause_s("reads"))
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] == 0.0
    # Whoever comes back after an hour is not held back for what was then.
    assert [throttle.turn("reads", 0.0)[0] for _ in range(3)] == [0.0] * 3


def test_saves_give_way_to_reads(throttle: Throttle, clock: Clock) -> None:
    throttle.refused("saves", go(throttle, "saves"))
    assert throttle.pause_s("saves") > 0
    assert throttle.pause_s("reads") == 0
    clock.now += 0.1
    throttle.refused("reads", go(throttle))
    assert throttle.pause_s("saves") > throttle.pause_s("reads") > 0


def test_refused_reads_do_not_put_off_the_next_save_again_and_again(clock: Clock) -> None:
    throttle = Throttle(longest_s=LONGEST_S, clock=clock, draw=lambda: 1.0)
    made = [clock.now]
    for _ in range(1200):
        clock.now += 0.5
        throttle.refused("reads", clock.now)
        if clock.now >= made[-1]:
            made.append(clock.now + throttle.turn("saves", LONGEST_S)[0])
    assert max(later - one for one, later in pairwise(made)) <= 2 * LONGEST_S


def test_a_pause_is_never_longer_than_its_bound(clock: Clock) -> None:
    throttle = Throttle(longest_s=LONGEST_S, clock=clock, draw=lambda: 1.0)
    for _ in range(100):
        throttle.refused("reads", clock.now)
    waits = [throttle.turn("reads", 1e9)[0] for _ in range(5)]
    assert all(later - one <= LONGEST_S for one, later in pairwise([0.0, *waits]))


@dataclass
class Fleet:
    """Processes that each make requests as fast as they may, so many at a time, of one server that takes so
    many a second: time is what the events say, so that minutes of it take none."""

    processes: int
    per_s: float
    at_once: int = 4
    lanes: tuple[Lane, ...] = ("reads",)
    seed: int = 1
    seconds: float = 80.0
    #: The figures are those of the second half.
    served: dict[Lane, list[int]] = field(default_factory=dict)
    refused: int = 0
    first_refused: int = 0

    def run(self) -> Fleet:
        rng, clock = random.Random(self.seed), Clock()
        began, count = clock.now, itertools.count()
        fleet = [Throttle(longest_s=LONGEST_S, clock=clock, draw=rng.random) for _ in range(self.processes)]
        self.served = {lane: [0] * self.processes for lane in self.lanes}
        tokens, full, last = self.per_s / 10, self.per_s / 10 + 1, began
        events = [
            (began + rng.random() / 10, next(count), number, lane, "asks", 0.0)
            for number in range(self.processes)
            for lane in self.lanes
            for _ in range(self.at_once)
        ]
        heapq.heapify(events)
        while events and events[0][0] < began + self.seconds:
            clock.now, _, number, lane, what, taken = heapq.heappop(events)
            after, then = 0.0, "asks"
            if what == "asks":
                try:
                    after, taken = fleet[number].turn(lane, LONGEST_S)
                    then = "arrives"
                except Throttled:
                    after = 0.5
            elif what == "arrives":
                tokens, last = min(full, tokens + (clock.now - last) * self.per_s), clock.now
                settled = clock.now > began + self.seconds / 2
                if tokens >= 1:
                    tokens -= 1
                    after = 0.05
                    self.served[lane][number] += settled
                else:
                    after, then = 0.01, "is refused"
                    self.refused += settled
                    self.first_refused += clock.now < began + 1
            else:
                fleet[number].refused(lane, taken)
            heapq.heappush(events, (clock.now + after, next(count), number, lane, then, taken))
        return self

    def rate(self, lane: Lane) -> float:
        return sum(self.served[lane]) / (self.seconds / 2)

    @property
    def total(self) -> int:
        return sum(map(sum, self.served.values()))


@pytest.mark.parametrize(
    ("processes", "per_s", "refused"),
    [(4, 20.0, 0.05), (20, 200.0, 0.03), (100, 1000.0, 0.03), (100, 200.0, 0.08), (100, 100.0, 0.13)],
)
def test_a_fleet_settles_at_what_the_server_takes(processes: int, per_s: float, refused: float) -> None:
    fleet = Fleet(processes, per_s).run()
    reads = fleet.served["reads"]
    assert fleet.rate("reads") > (0.8 if processes < 20 else 0.95) * per_s
    assert fleet.refused < refused * (fleet.refused + fleet.total)
    # Nobody starves, and nobody has it all.
    assert min(reads) > 0.1 * fleet.total / processes
    assert max(reads) < 5 * fleet.total / processes


def test_without_a_throttle_most_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fleet above is worth."""
    monkeypatch.setattr(Throttle, "refused", lambda *_: None)
    fleet = Fleet(20, 200.0, seconds=20.0).run()
    assert fleet.refused > 5 * fleet.total


def test_of_a_server_that_is_full_reads_have_the_most() -> None:
    fleet = Fleet(50, 500.0, lanes=("reads", "saves")).run()
    assert fleet.rate("reads") > 0.8 * 500
    assert fleet.rate("reads") > 5 * fleet.rate("saves")
    # What saves get is little, but something, in every process.
    assert min(fleet.served["saves"]) > 0
