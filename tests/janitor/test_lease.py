"""Who works: never two at once, and never nobody for longer than a lease. On a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.errors import TransientError
from kvstore.janitor.lease import Leadership, LeaseLost

LEASE_S = 9.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Leases:
    """What an index does about leases, and how long its answer takes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.held: dict[str, tuple[str, float]] = {}
        self.down = False
        self.calls = 0
        #: Before and after the lease is looked at.
        self.there_s = self.back_s = 0.0

    def lease(self, name: str, holder: str, ttl_s: float) -> bool:
        self.calls += 1
        self.clock.now += self.there_s
        if self.down:
            raise TransientError("down")
        has = self.leaseholder(name)
        if has in (None, holder):
            self.held[name] = (holder, self.clock.now + ttl_s)
        self.clock.now += self.back_s
        return has in (None, holder)

    def release(self, name: str, holder: str) -> None:
        if self.down:
            raise TransientError("down")
        if self.leaseholder(name) == holder:
            del self.held[name]

    def leaseholder(self, name: str) -> str | None:
        holder, until = self.held.get(name, ("", 0.0))
        return holder if self.clock.now < until else None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(clock)


def candidate(leases: Leases, holder: str) -> Leadership:
    made: Any = leases
    return Leadership(made, "janitor", holder, LEASE_S, monotonic=leases.clock)


def test_the_first_one_works_and_the_second_one_waits(leases: Leases) -> None:
    a, b = candidate(leases, "a"), candidate(leases, "b")
    assert a.campaign() and not b.campaign()
    assert (a.leads, a.elections, b.leads, b.other) == (True, 1, False, "a")
    with pytest.raises(LeaseLost):
        b.proceed()


def test_going_on_asks_the_index_three_times_in_a_lease(leases: Leases, clock: Clock) -> None:
    a = candidate(leases, "a")
    a.campaign()
    for _ in range(900):
        clock.now += 0.1
        a.proceed()
    assert 29 <= leases.calls - 1 <= 31
    assert a.leads and (a.elections, a.losses) == (1, 0)


def test_a_lease_that_ran_out_while_nothing_moved_is_noticed_before_the_next_piece(
    leases: Leases, clock: Clock
) -> None:
    a, b = candidate(leases, "a"), candidate(leases, "b")
    a.campaign()
    clock.now += LEASE_S  # stopped, suspended or stuck in one call
    assert not a.leads
    assert b.campaign()
    with pytest.raises(LeaseLost, match="b is the janitor now"):
        a.proceed()
    assert (a.losses, a.other, b.leads) == (1, "b", True)
    with pytest.raises(LeaseLost):
        a.proceed()
    assert a.losses == 1


def test_a_lease_that_ran_out_and_that_nobody_took_is_taken_again(leases: Leases, clock: Clock) -> None:
    a = candidate(leases, "a")
    a.campaign()
    clock.now += 5 * LEASE_S
    a.proceed()
    assert a.leads and (a.elections, a.losses) == (1, 0)


def test_a_lease_counts_from_before_it_was_asked_for(leases: Leases, clock: Clock) -> None:
    a = candidate(leases, "a")
    leases.back_s = 4.0  # the answer took so long
    a.campaign()
    clock.now += LEASE_S - 4.0
    assert not a.leads
    leases.back_s = 0.0
    assert candidate(leases, "b").campaign()


def test_an_index_that_is_silent_for_less_than_a_lease_changes_nothing(leases: Leases, clock: Clock) -> None:
    a = candidate(leases, "a")
    a.campaign()
    clock.now += 0.4 * LEASE_S
    leases.down = True
    a.proceed()
    assert a.problem == "down" and a.leads
    leases.down = False
    clock.now += 0.4 * LEASE_S
    a.proceed()
    assert a.problem == "" and a.leads
    assert leases.leaseholder("janitor") == "a"


def test_an_index_that_is_silent_for_a_lease_makes_it_stop(leases: Leases, clock: Clock) -> None:
    a = candidate(leases, "a")
    a.campaign()
    leases.down = True
    with pytest.raises(LeaseLost, match="did not answer"):
        for _ in range(1000):
            clock.now += 0.1
            a.proceed()
    assert clock.now == pytest.approx(100.0 + LEASE_S, abs=LEASE_S / 10)
    assert not a.leads and a.losses == 1
    assert not a.campaign()
    leases.down = False
    assert a.campaign() and a.elections == 2


def test_what_failed_is_asked_about_at_once(leases: Leases) -> None:
    a = candidate(leases, "a")
    a.campaign()
    leases.held["janitor"] = ("b", leases.clock.now + 99)  # an index that was emptied meanwhile
    a.proceed()
    a.recheck()
    with pytest.raises(LeaseLost):
        a.proceed()


def test_who_resigns_is_followed_at_once(leases: Leases) -> None:
    a, b = candidate(leases, "a"), candidate(leases, "b")
    a.campaign()
    b.resign()
    assert leases.leaseholder("janitor") == "a"
    a.resign()
    assert not a.leads and b.campaign()
    with pytest.raises(LeaseLost):
        a.proceed()
    assert (a.losses, leases.leaseholder("janitor")) == (0, "b")


class Rivals(RuleBasedStateMachine):
    """Three candidates whose calls take time, fail, or don't come for long."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.leases = Leases(self.clock)
        self.all = [candidate(self.leases, name) for name in "abc"]

    @rule(who=st.integers(0, 2), there=st.floats(0, 4), back=st.floats(0, 4))
    def campaign(self, who: int, there: float, back: float) -> None:
        self.leases.there_s, self.leases.back_s = there, back
        try:
            won = self.all[who].campaign()
        except LeaseLost:
            won = False
        assert not won or self.leases.held["janitor"][0] == "abc"[who] or self.leases.down

    @rule(who=st.integers(0, 2))
    def proceed(self, who: int) -> None:
        self.leases.there_s = self.leases.back_s = 0.0
        try:
            self.all[who].proceed()
        except LeaseLost:
            assert not self.all[who].leads

    @rule(who=st.integers(0, 2))
    def resign(self, who: int) -> None:
        self.all[who].resign()

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(down=st.booleans())
    def index(self, down: bool) -> None:
        self.leases.down = down

    @invariant()
    def one_at_most(self) -> None:
        leading = [one.holder for one in self.all if one.leads]
        assert len(leading) <= 1
        # Who thinks that it leads has the lease in the index as well.
        assert not leading or self.leases.leaseholder("janitor") == leading[0]


Rivals.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestRivals = Rivals.TestCase
