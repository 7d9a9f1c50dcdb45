"""The breaker opens, and closes again."""

from __future__ import annotations

import pytest

from kvstore.breaker import Breaker
from kvstore.errors import BreakerOpen, CorruptPayload, DeadlineExceeded, Throttled, TransientError
from schemas.settings import BreakerSettings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker, error: Exception | None = None) -> None:
    with pytest.raises(type(error or TransientError(""))), breaker.guard():
        raise error or DeadlineExceeded("late") if error else TransientError("down")


def probed(breaker: Breaker) -> bool:
    """Whether a call that fails went through."""
    try:
        with breaker.guard():
            raise TransientError("down")
    except BreakerOpen:
        return False
    except TransientError:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(
        "index", BreakerSettings(failures=3, backoff_s=1.0, max_backoff_s=3.0), clock, draw=lambda: 0.0
    )


def test_opens_after_failures_in_a_row_and_refuses_at_once(breaker: Breaker) -> None:
    fail(breaker)
    fail(breaker)
    with breaker.guard():
        pass  # a success in between starts the count anew
    fail(breaker)
    fail(breaker)
    assert breaker.is_closed
    fail(breaker)
    assert not breaker.is_closed
    with pytest.raises(BreakerOpen), breaker.guard():
        pytest.fail("the call went through")


def test_calls_that_have_not_returned_count_too(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        assert breaker.is_closed
        breaker.blame()
    assert not probed(breaker)
    clock.now += 1.0
    with breaker.guard():
        pass
    assert breaker.is_closed


def test_one_probe_after_the_backoff_closes_it(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        fail(breaker)
    clock.now += 1.0
    with breaker.guard():
        # While the probe is out, others are still refused.
        with pytest.raises(BreakerOpen), breaker.guard():
            pytest.fail("two probes")
    assert breaker.is_closed
    with breaker.guard():
        pass


def test_failed_probes_back_off_up_to_the_maximum(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        fail(breaker)
    waits = []
    for _ in range(4):
        start = clock.now
        while not probed(breaker):
            clock.now += 0.25
        waits.append(clock.now - start)
    assert waits == [1.0, 2.0, 3.0, 3.0]


def test_an_answer_that_is_no_outage_does_not_count(breaker: Breaker) -> None:
    for _ in range(5):
        with pytest.raises(CorruptPayload), breaker.guard():
            raise CorruptPayload("bad bytes")
    assert breaker.is_closed


def test_a_probe_that_never_reports_does_not_keep_it_open(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        fail(breaker)
    clock.now += 1.0
    lost = breaker.guard()
    lost.__enter__()  # the thread that held this probe is gone
    clock.now += 1.0
    with breaker.guard():
        pass
    assert breaker.is_closed


def test_a_call_that_may_not_probe_is_refused_until_another_has(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        fail(breaker)
    clock.now += 100.0
    with pytest.raises(BreakerOpen), breaker.guard(may_probe=False):
        pytest.fail("a request paid for the probe")
    with breaker.guard():
        pass
    with breaker.guard(may_probe=False):
        pass


def test_failures_about_one_subject_count_once(breaker: Breaker) -> None:
    """One object that can't be read is not a bucket that is down."""
    for _ in range(10):
        with pytest.raises(TransientError), breaker.guard(subject="bad"):
            raise TransientError("500")
    assert breaker.is_closed
    for subject in ("another", "bad"):
        with pytest.raises(TransientError), breaker.guard(subject=subject):
            raise TransientError("500")
    assert not breaker.is_closed


def test_a_success_in_between_forgets_the_subject(breaker: Breaker) -> None:
    for subject in ("one", "two"):
        with pytest.raises(TransientError), breaker.guard(subject=subject):
            raise TransientError("500")
    with breaker.guard(subject="two"):
        pass
    for subject in ("two", "one", "two"):
        assert breaker.is_closed
        with pytest.raises(TransientError), breaker.guard(subject=subject):
            raise TransientError("500")
    assert not breaker.is_closed


def test_breakers_that_opened_together_do_not_probe_together(clock: Clock) -> None:
    settings = BreakerSettings(failures=1, backoff_s=4.0, max_backoff_s=4.0)
    fleet = [Breaker("index", settings, clock) for _ in range(400)]
    for breaker in fleet:
        fail(breaker)
    clock.now += 1.9
    assert not any(probed(breaker) for breaker in fleet)
    first = clock.now
    came, done = list[int](), list[Breaker]()
    while clock.now < first + 2.2:
        clock.now += 0.1
        waiting = [breaker for breaker in fleet if breaker not in done]
        done += (now := [breaker for breaker in waiting if probed(breaker)])
        came.append(len(now))
    # None waits for longer than what is promised as the longest.
    assert sum(came) == len(fleet)
    assert max(came) < len(fleet) / 5


def test_a_backend_that_asks_for_fewer_calls_has_not_failed(breaker: Breaker) -> None:
    for _ in range(10):
        fail(breaker, Throttled("slow down"))
    assert breaker.is_closed


def test_what_slowing_down_does_not_help_is_blamed_once_for_each_subject(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.blame("one")
    assert breaker.is_closed
    breaker.blame("two")
    breaker.blame("one")
    assert not breaker.is_closed


def test_a_probe_that_is_told_to_come_less_often_has_failed(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        fail(breaker)
    clock.now += 1.0
    fail(breaker, Throttled("slow down"))
    clock.now += 1.9
    assert not probed(breaker)
    clock.now += 0.2
    assert probed(breaker)


@pytest.mark.parametrize("error", [Throttled("slow down"), TransientError("down")])
def test_calls_that_were_under_way_when_it_opened_are_no_probes(
    breaker: Breaker, clock: Clock, error: Exception
) -> None:
    late = [breaker.guard(may_probe=False, subject=str(number)) for number in range(6)]
    for one in late:
        one.__enter__()
    for _ in range(3):
        fail(breaker)
    for one in late:
        assert not one.__exit__(type(error), error, None)
    clock.now += 1.0
    assert probed(breaker)


def test_who_waits_for_its_turn_is_told_before_whether_it_may_call(breaker: Breaker, clock: Clock) -> None:
    assert not breaker.check()
    for _ in range(3):
        fail(breaker)
    with pytest.raises(BreakerOpen):
        breaker.check()
    clock.now += 1.0
    with pytest.raises(BreakerOpen):
        breaker.check(may_probe=False)
    # It takes nobody's place.
    assert breaker.check()
    assert breaker.check()
    assert probed(breaker)


def test_blame_moves_no_probe_of_a_breaker_that_is_open(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        fail(breaker)
    for number in range(12):
        breaker.blame(str(number))
    clock.now += 1.0
    assert probed(breaker)
