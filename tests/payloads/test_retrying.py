"""RetryingPayloads: what is tried again, how often, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule, Verb
from kvstore.errors import BreakerOpen, CapacityExceeded, PermissionDenied, Throttled, TransientError
from kvstore.payloads.memory import MemoryPayloads
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.retrying import RetryingPayloads
from kvstore.payloads.throttle import Throttle
from kvstore.testing import PayloadConformance
from tests.payloads.test_memory import Dictionary


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


def test_a_read_that_is_refused_takes_its_turn_again(store_name: str) -> None:
    slept, told, given_up = list[float](), list[str](), list[str]()
    payloads = RetryingPayloads(
        Raising(store_name, *[Throttled("slow down")] * 3),
        attempts=3,
        backoff_s=1.0,
        max_backoff_s=5.0,
        throttle=Throttle(longest_s=5.0, draw=lambda: 0.5),
        given_up=given_up.append,
        count=told.append,
        sleep=slept.append,
    )
    name = fresh_name()
    with pytest.raises(Throttled, match="slow down"):
        fetch(payloads, name)
    # By half of what a process that rarely asks is taken to ask for, and by a quarter of it.
    assert slept == pytest.approx([0.2, 0.4], abs=0.05)
    assert (told, given_up) == (["slow_downs"] * 3, [name])


def test_a_call_whose_turn_comes_too_late_is_not_made(store_name: str) -> None:
    told, given_up = list[str](), list[str]()
    throttle = Throttle(longest_s=5.0)
    payloads = RetryingPayloads(
        inner := Raising(store_name),
        attempts=3,
        backoff_s=0.1,
        max_backoff_s=2.0,
        throttle=throttle,
        given_up=given_up.append,
        count=told.append,
    )
    while throttle.pause_s("reads") < 4.0:
        throttle.refused("reads", throttle.turn("reads", 1e9)[1])
    with pytest.raises(Throttled, match="not tried"):
        fetch(payloads, "payload")
    with pytest.raises(Throttled, match="not tried"):
        payloads.put(fresh_name(), views(b"x"))
    assert inner.errors == []
    # Nothing but a read blames the store: a save that isn't made costs no request its hit.
    assert (told, given_up) == (["held_back"] * 2, ["payload"])


def test_a_ping_is_made_once_and_takes_a_turn(store_name: str) -> None:
    class Refusing(MemoryPayloads):
        pings = 0

        def ping(self) -> None:
            self.pings += 1
            raise Throttled("slow down")

    slept: list[float] = []
    payloads = retrying(inner := Refusing(store_name), slept)
    for _ in range(2):
        with pytest.raises(Throttled, match="slow down"):
            payloads.ping()
    assert inner.pings == 2
    assert len(slept) == 1


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
