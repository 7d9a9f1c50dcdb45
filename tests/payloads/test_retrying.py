"""RetryingPayloads: what is tried again, how often, and how long it waits."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.breaker import Breaker
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule, Verb
from kvstore.errors import (
    BreakerOpen,
    CapacityExceeded,
    HeldBack,
    PermissionDenied,
    Throttled,
    TransientError,
)
from kvstore.payloads.breaking import BreakingPayloads
from kvstore.payloads.memory import MemoryPayloads
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.retrying import RetryingPayloads
from kvstore.payloads.throttle import Lane, Throttle
from kvstore.testing import PayloadConformance
from schemas.settings import BreakerSettings
from tests.payloads.test_memory import Dictionary
from tests.waiting import PATIENCE_S


def retrying(
    inner: PayloadStore, slept: list[float] | None = None, attempts: int = 3, rng: float = 1.0
) -> RetryingPayloads:
    slept = [] if slept is None else slept
    return RetryingPayloads(
        inner, attempts=attempts, backoff_s=1.0, max_backoff_s=5.0, sleep=slept.append, rng=lambda: rng
    )


class TestRetryingPayloads(PayloadConformance):
    """Over a store that fails every other call, it keeps the contract."""

    @pytest.fixture
    def payloads(self, store_name: str) -> PayloadStore:
        faults = Rule("transient", verbs=("put", "read", "delete"), probability=0.3)
        return retrying(FaultyPayloads(MemoryPayloads(store_name), Plan(faults, seed=7)), attempts=30)

    @pytest.fixture
    def raw(self, store_name: str, payloads: PayloadStore) -> Dictionary:
        return Dictionary(store_name)


@pytest.mark.parametrize("verb", ["put", "read", "delete", "list"])
def test_a_call_is_made_again_until_it_works(store_name: str, verb: Verb) -> None:
    inner = MemoryPayloads(store_name)
    payload = fresh_name()
    inner.put(payload, views(b"abc"))
    plan = Plan(Rule("transient", verbs=(verb,), times=2))
    slept: list[float] = []
    payloads = retrying(FaultyPayloads(inner, plan), slept)
    if verb == "put":
        payloads.put(fresh_name(), views(b"x"))
    elif verb == "read":
        assert fetch(payloads, payload) == b"abc"
    elif verb == "delete":
        assert payloads.delete([payload]) == 1
    else:
        assert [item.name for item in payloads.list()] == [payload]
    assert plan.injected[(verb, "transient")] == 2
    assert slept == [1.0, 2.0]


def test_pauses_double_up_to_a_bound_and_are_random(store_name: str) -> None:
    failing = FaultyPayloads(MemoryPayloads(store_name), Plan(Rule("transient")))
    slept: list[float] = []
    with pytest.raises(TransientError, match="injected"):
        fetch(retrying(failing, slept, attempts=6), fresh_name())
    assert slept == [1.0, 2.0, 4.0, 5.0, 5.0]
    slept.clear()
    with pytest.raises(TransientError):
        fetch(retrying(failing, slept, attempts=3, rng=0.25), fresh_name())
    assert slept == [0.25, 0.5]


class Raising(MemoryPayloads):
    """Raises what it is given, in turn."""

    def __init__(self, name: str, *errors: Exception) -> None:
        super().__init__(name)
        self.errors = list(errors)

    def read(self, *args: object, **options: object) -> int | None:
        raise self.errors.pop(0)


@pytest.mark.parametrize(
    "error", [PermissionDenied("x"), CapacityExceeded("x"), BreakerOpen("x"), ValueError("x")]
)
def test_what_another_attempt_will_not_change_is_raised_at_once(store_name: str, error: Exception) -> None:
    slept: list[float] = []
    with pytest.raises(type(error)):
        fetch(retrying(Raising(store_name, error), slept), fresh_name())
    assert slept == []


def test_a_breaker_that_opens_meanwhile_ends_the_attempts(store_name: str) -> None:
    slept: list[float] = []
    inner = Raising(store_name, TransientError("x"), BreakerOpen("y"), TransientError("z"))
    with pytest.raises(BreakerOpen):
        fetch(retrying(inner, slept), fresh_name())
    assert len(inner.errors) == 1


class Clock:
    """Goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def slowed(clock: Clock, pause_s: float, lane: Lane = "reads", longest_s: float = 5.0) -> Throttle:
    """Returns a throttle of a store that has refused calls until the pause was so long."""
    throttle = Throttle(longest_s=longest_s, clock=clock, draw=lambda: 0.5)
    while throttle.pause_s(lane) < pause_s:
        throttle.refused(lane, clock())
    return throttle


def touchy(clock: Clock) -> Breaker:
    """Returns a breaker that opens when anything is blamed on it."""
    return Breaker("payloads", BreakerSettings(failures=1, backoff_s=1.0), clock, draw=lambda: 0.0)


def test_a_read_that_is_refused_takes_its_turn_again(store_name: str) -> None:
    clock, told = Clock(), list[str]()
    payloads = RetryingPayloads(
        Raising(store_name, *[Throttled("slow down")] * 3),
        attempts=3,
        backoff_s=1.0,
        max_backoff_s=5.0,
        throttle=Throttle(longest_s=5.0, clock=clock, draw=lambda: 0.5),
        breaker=(breaker := touchy(clock)),
        count=told.append,
        sleep=clock.sleep,
    )
    with pytest.raises(Throttled, match="slow down"):
        fetch(payloads, fresh_name())
    # By half of what a process that rarely asks is taken to ask for, and by a quarter of it.
    assert clock.slept == pytest.approx([0.2, 0.4], abs=0.02)
    assert told == ["slow_downs"] * 3
    assert not breaker.is_closed


def test_a_call_whose_turn_comes_too_late_is_not_made(store_name: str) -> None:
    clock, told = Clock(), list[str]()
    payloads = RetryingPayloads(
        inner := Raising(store_name),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        throttle=(throttle := slowed(clock, 4.0)),
        breaker=(breaker := touchy(clock)),
        count=told.append,
    )
    with pytest.raises(HeldBack, match="not tried") as held:
        fetch(payloads, "payload")
    assert held.value.wait_s > 2.0
    throttle.turn("saves", 60.0)
    with pytest.raises(HeldBack, match="not tried"):
        payloads.put(fresh_name(), views(b"x"))
    assert inner.errors == []
    assert told == ["held_back"] * 2
    # Nobody is to blame for calls that nobody has made.
    assert breaker.is_closed


def test_a_burst_of_reads_that_are_held_back_does_not_open_the_breaker(store_name: str) -> None:
    """Some of a load's reads have their turn, and are served; the others are not made."""
    clock, inner, told = Clock(), MemoryPayloads(store_name), list[str]()
    breaker = Breaker("payloads", BreakerSettings(failures=3), clock)
    names = [fresh_name() for _ in range(16)]
    for name in names:
        inner.put(name, views(b"abc"))
    payloads = RetryingPayloads(
        BreakingPayloads(inner, breaker, reads_probe=False),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        throttle=slowed(clock, 0.2, longest_s=2.0),
        breaker=breaker,
        count=told.append,
        sleep=lambda _: None,  # all of them come at one moment
    )
    served = 0
    for name in names:
        try:
            served += fetch(payloads, name) == b"abc"
        except HeldBack:
            assert breaker.is_closed
    assert 0 < served < len(names)
    assert told == ["held_back"] * (len(names) - served)


def test_a_read_whose_next_turn_comes_too_late_blames_nobody(store_name: str) -> None:
    """It was refused once, and would have been served with the next attempt, for all that is known."""
    clock = Clock()
    payloads = RetryingPayloads(
        Raising(store_name, Throttled("slow down")),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        throttle=slowed(clock, 2.0, longest_s=2.0),
        breaker=(breaker := touchy(clock)),
        sleep=clock.sleep,
    )
    with pytest.raises(Throttled, match="slow down") as refused:
        fetch(payloads, fresh_name())
    assert breaker.is_closed
    # What it would have waited is told all the same.
    assert refused.value.wait_s > 0


def test_places_of_calls_that_a_breaker_refuses_are_given_back(store_name: str) -> None:
    clock = Clock()
    throttle = slowed(clock, 0.2)
    clock.now += 0.2

    def opens(seconds: float) -> None:
        """Nine others wait as well, when the breaker opens: none of them is made."""
        for _ in range(9):
            throttle.turn("reads", 5.0)
        breaker.blame()

    payloads = RetryingPayloads(
        BreakingPayloads(MemoryPayloads(store_name), breaker := touchy(clock), reads_probe=False),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=5.0,
        throttle=throttle,
        breaker=breaker,
        sleep=opens,
    )
    throttle.turn("reads", 5.0)
    with pytest.raises(BreakerOpen):
        fetch(payloads, fresh_name())
    assert throttle.turn("reads", 5.0)[0] <= 1.25 * throttle.pause_s("reads")


def test_a_read_that_is_refused_to_the_end_blames_nobody_if_others_are_served(store_name: str) -> None:
    good = fresh_name()

    class Some(MemoryPayloads):
        def read(self, name: str, *args: Any, **options: Any) -> int | None:
            if name == good:
                return 0
            if meanwhile:
                fetch(payloads, good)
            raise Throttled("slow down")

    clock = Clock()
    throttle = Throttle(longest_s=5.0, clock=clock, draw=lambda: 0.5)
    payloads = RetryingPayloads(
        Some(store_name),
        attempts=2,
        backoff_s=1.0,
        max_backoff_s=5.0,
        throttle=throttle,
        breaker=(breaker := touchy(clock)),
        sleep=clock.sleep,
    )
    for meanwhile in (True, False):
        with pytest.raises(Throttled, match="slow down"):
            fetch(payloads, "payload")
        assert breaker.is_closed == meanwhile


def test_what_a_breaker_refuses_does_not_wait_for_its_turn_and_a_probe_goes_first(store_name: str) -> None:
    clock, inner = Clock(), MemoryPayloads(store_name)
    payloads = RetryingPayloads(
        BreakingPayloads(inner, breaker := touchy(clock), reads_probe=False),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        throttle=(throttle := slowed(clock, 4.0)),
        breaker=breaker,
        sleep=clock.sleep,
    )
    breaker.blame()
    for _ in range(3):
        with pytest.raises(BreakerOpen):
            fetch(payloads, fresh_name())
        with pytest.raises(BreakerOpen):
            payloads.put(fresh_name(), views(b"x"))
    clock.now += 1.0
    # Others wait for their turn before it.
    throttle.turn("saves", 60.0)
    assert throttle.turn("saves", 60.0)[0] > 0
    payloads.ping()
    assert breaker.is_closed
    assert clock.slept == []


@pytest.mark.parametrize("verb", ["read", "put"])
def test_who_waits_for_its_turn_is_told_at_once_that_the_breaker_has_opened(
    store_name: str, verb: Verb
) -> None:
    waits = threading.Event()

    class Watched(Breaker):
        def wait(self, seconds: float) -> None:
            assert seconds > 10 * PATIENCE_S
            waits.set()
            super().wait(seconds)

    breaker = Watched("payloads", BreakerSettings(failures=1, backoff_s=1000.0, max_backoff_s=1000.0))
    lane: Lane = "reads" if verb == "read" else "saves"
    throttle = slowed(Clock(), 9000.0, lane, longest_s=10_000.0)
    payloads = RetryingPayloads(
        BreakingPayloads(MemoryPayloads(store_name), breaker, reads_probe=False),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=20_000.0,
        throttle=throttle,
        breaker=breaker,
    )
    told: list[Exception] = []

    def call() -> None:
        try:
            if verb == "read":
                fetch(payloads, fresh_name())
            else:
                payloads.put(fresh_name(), views(b"x"))
        except BreakerOpen as exc:
            told.append(exc)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert waits.wait(PATIENCE_S)
    breaker.blame()
    thread.join(PATIENCE_S)
    assert [type(one) for one in told] == [BreakerOpen]


@pytest.mark.parametrize("jobs", [8, 64])
def test_a_tool_waits_for_its_turn_for_as_long_as_that_takes(store_name: str, jobs: int) -> None:
    clock, inner = Clock(), MemoryPayloads(store_name)
    waits: list[float] = []
    payloads = RetryingPayloads(
        inner,
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        patience_s=math.inf,
        refusals=20,
        throttle=slowed(clock, 0.8, longest_s=2.0),
        sleep=waits.append,  # all of them come at one moment
    )
    name = fresh_name()
    inner.put(name, views(b"abc"))
    assert [fetch(payloads, name) for _ in range(jobs)] == [b"abc"] * jobs
    assert max(waits) > 0.7 * jobs * 0.8


def test_a_tool_bears_more_refusals_than_failures(store_name: str) -> None:
    clock = Clock()
    refusing = Raising(store_name, *[Throttled("slow down")] * 9, TransientError("x"))
    payloads = RetryingPayloads(
        refusing,
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        patience_s=math.inf,
        refusals=20,
        throttle=Throttle(longest_s=2.0, clock=clock),
        sleep=clock.sleep,
    )
    with pytest.raises(TransientError, match="x"):
        fetch(payloads, fresh_name())
    assert refusing.errors == []


@pytest.mark.parametrize("serves", [True, False])
def test_a_tool_bears_refusals_while_other_calls_are_served(store_name: str, serves: bool) -> None:
    """Else each of many jobs would find out by itself, in a row, that the bucket serves nobody."""
    clock, name = Clock(), fresh_name()

    class Some(MemoryPayloads):
        made = 0

        def read(self, *args: Any, **options: Any) -> int | None:
            if args[0] == name:
                return super().read(*args, **options)
            self.made += 1
            raise Throttled("slow down")

    payloads = RetryingPayloads(
        inner := Some(store_name),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        patience_s=math.inf,
        refusals=20,
        throttle=Throttle(longest_s=2.0, clock=clock),
        sleep=clock.sleep,
    )
    inner.put(name, views(b"abc"))
    for _ in range(8):
        with pytest.raises(Throttled, match="slow down"):
            fetch(payloads, fresh_name())
        if serves:
            assert fetch(payloads, name) == b"abc"
    assert inner.made == (8 * 20 if serves else 20 + 7)


def test_a_ping_is_made_once_and_takes_a_turn(store_name: str) -> None:
    class Refusing(MemoryPayloads):
        pings = 0

        def ping(self) -> None:
            self.pings += 1
            raise Throttled("slow down")

    clock = Clock()
    payloads = RetryingPayloads(
        inner := Refusing(store_name),
        attempts=3,
        backoff_s=1.0,
        max_backoff_s=5.0,
        throttle=Throttle(longest_s=5.0, clock=clock),
        sleep=clock.sleep,
    )
    for _ in range(2):
        with pytest.raises(Throttled, match="slow down"):
            payloads.ping()
    assert inner.pings == 2
    assert len(clock.slept) == 1


def test_a_miss_is_an_answer(store_name: str) -> None:
    slept: list[float] = []
    assert fetch(retrying(MemoryPayloads(store_name), slept), fresh_name()) is None
    assert slept == []


def test_a_listing_that_breaks_in_the_middle_is_not_begun_again(store_name: str) -> None:
    class Breaking(MemoryPayloads):
        def list(self, prefix: str = "") -> Iterator[Listed]:
            yield from super().list(prefix)
            raise TransientError("page two")

    payloads = retrying(Breaking(store_name))
    payloads.put(fresh_name(), views(b"x"))
    listing = payloads.list()
    next(listing)
    with pytest.raises(TransientError, match="page two"):
        next(listing)


def test_ping_says_how_it_is_now(store_name: str) -> None:
    payloads = retrying(FaultyPayloads(MemoryPayloads(store_name), Plan(Rule("transient", times=1))))
    with pytest.raises(TransientError):
        payloads.ping()
    payloads.ping()
