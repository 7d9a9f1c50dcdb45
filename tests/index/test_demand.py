"""How many different blocks are asked for: the estimate against the truth, and what an engine tells."""

from __future__ import annotations

import random

import pytest

from kvstore.index.contract import BadArgument
from kvstore.index.demand import (
    BUCKETS_S,
    RAISED_BYTES,
    REGISTERS,
    WINDOWS,
    Bucket,
    Demand,
    OwnDemand,
    Raised,
    buckets,
    demands,
    estimate,
    in_windows,
    kept_s,
    merged,
    together,
)

NOW_S = 1_790_000_123.0


def some(count: int, seed: int) -> bytes:
    """Packed digests, all different."""
    return random.Random(seed).randbytes(16 * count)


@pytest.mark.parametrize("count", [0, 1, 10, 500, 4096, 20_000, 400_000])
def test_the_estimate_is_within_four_standard_errors(count: int) -> None:
    for seed in range(3):
        registers = merged(b"", OwnDemand().add(some(count, seed), NOW_S).registers)
        assert estimate([registers]) == pytest.approx(count, rel=4 * 0.0163, abs=0.5)


def test_what_two_engines_tell_in_any_order_is_the_union() -> None:
    one, other, both = some(3000, 1), some(3000, 2), some(2000, 3)
    a, b = OwnDemand(), OwnDemand()
    told = [a.add(one, NOW_S), b.add(both, NOW_S), a.add(both, NOW_S), b.add(other, NOW_S)]
    for order in (told, told[::-1]):
        registers = b""
        for raised in order:
            raised.check()
            registers = merged(registers, raised.registers)
        assert registers == merged(b"", OwnDemand().add(one + other + both, NOW_S).registers)
    assert estimate([registers]) == pytest.approx(8000, rel=0.065)


def test_what_was_asked_for_before_is_not_told_again() -> None:
    asked = OwnDemand()
    first = asked.add(some(5000, 1), NOW_S)
    assert 0 < len(first.registers) <= REGISTERS * RAISED_BYTES
    assert asked.add(some(5000, 1), NOW_S + 1) == Raised(NOW_S + 1)
    # Until another bucket begins, or the index was not told.
    assert asked.add(some(5000, 1), NOW_S + BUCKETS_S[0]).registers == first.registers
    asked.forget()
    assert asked.add(some(5000, 1), NOW_S + BUCKETS_S[0]).registers == first.registers


def test_windows_are_unions_of_their_buckets() -> None:
    assert list(WINDOWS) == [900, 3600, 86400]
    found: dict[tuple[int, int], Bucket] = {}

    def told(at_s: float, digests: bytes, served: int) -> None:
        raised = OwnDemand().add(digests, at_s)
        for name in buckets(at_s):
            old = found.get(name, Bucket(0, 0, b""))
            asked = old.asked + len(digests) // 16
            found[name] = Bucket(asked, old.served + served, merged(old.registers, raised.registers))

    told(NOW_S - 20 * 3600, some(4000, 1), 1)
    told(NOW_S - 3000, some(1000, 2), 10)
    told(NOW_S, some(1000, 2), 1000)
    quarter, hour, day = demands(found, NOW_S)
    assert [one.asked for one in (quarter, hour, day)] == [1000, 2000, 6000]
    assert [one.served for one in (quarter, hour, day)] == [1000, 1010, 1011]
    assert quarter.ceiling_ratio == pytest.approx(0, abs=0.07) and quarter.hit_ratio == 1.0
    assert hour.ceiling_ratio == pytest.approx(0.5, abs=0.04)
    assert day.ceiling_ratio == pytest.approx(1 / 6, abs=0.06)
    assert demands(found, NOW_S + 2 * 86400)[2] == Demand(86400, 0, 0, 0)
    assert 0 < quarter.seconds <= 300 and 3000 < hour.seconds <= 3300 and 20 * 3600 < day.seconds <= 21 * 3600
    # What is kept lasts for as long as any window needs it.
    for length, number in in_windows(NOW_S):
        assert number * length + kept_s(length) > NOW_S
    both = together([(quarter, hour, day), (quarter, hour, day)])
    assert [one.asked for one in both] == [2000, 4000, 12000]
    assert both[1].seconds == hour.seconds
    assert both[1].ceiling_ratio == pytest.approx(hour.ceiling_ratio)


@pytest.mark.parametrize(
    "raised", [Raised(NOW_S, b"ab"), Raised(-1.0), Raised(float("nan")), Raised(float("inf"))]
)
def test_what_cannot_be_is_refused(raised: Raised) -> None:
    with pytest.raises(BadArgument):
        raised.check()


def test_what_makes_no_sense_counts_for_nothing() -> None:
    good = OwnDemand().add(some(100, 1), NOW_S).registers
    assert merged(b"short", good) == merged(b"", good)
    # A number that no register has, and a rank that no digest has.
    assert merged(b"", b"\xff\xff\x01" + b"\x00\x00\xff") == bytes(REGISTERS)
    assert estimate([b"short", b"\xff" * REGISTERS]) == 2**52
