"""What a planner is worth, on a simulated network: never much slower than the better of computing and loading
all, and soon as good as that after the network has changed."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.choice.cost import Prefill
from connectors.choice.decision import Objective
from tests.connectors.kv.simulated import BYTES, Network, Simulated

pytestmark = pytest.mark.engine

#: Computing all takes 1.56 s; loading all takes as long at 21 MB/s.
PREFILL = Prefill(150.0, 0.01)
COMPUTE_S = PREFILL.seconds(0, 8192)


def engine(mb_s: float, latency_s: float = 0.0, objective: Objective = "ttft") -> Simulated:
    return Simulated(Network(mb_s * 1e6, latency_s), PREFILL, objective)


@pytest.mark.parametrize(
    ("mb_s", "latency_s"),
    [
        (2, 0), (5, 0), (10, 0), (15, 0), (20, 0), (22, 0), (30, 0), (50, 0), (100, 0), (400, 0),
        (400, 0.1), (400, 1.0), (400, 1.4), (400, 1.6), (400, 3.0), (2, 0.1),
    ],
)  # fmt: skip
def test_in_steady_state_it_is_the_better_of_both(mb_s: float, latency_s: float) -> None:
    made = engine(mb_s, latency_s)
    first = [made.seconds() for _ in range(8)]
    # Before anything is known: no load costs more than computing twice and a half.
    assert max(first) < 2.5 * COMPUTE_S
    ratios = sorted(made.request() for _ in range(30))
    assert ratios[15] < 1.02 and ratios[-1] < 1.05
    loads = latency_s + BYTES / (mb_s * 1e6) < COMPUTE_S
    assert made.loaded[-1] == (1.0 if loads else 0.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((100, 0.0), (5, 0.0)), ((100, 0.0), (2, 0.0)), ((400, 0.0), (400, 3.0)), ((40, 0.0), (2, 0.0)),
        ((25, 0.0), (5, 0.0)), ((100, 0.02), None), ((30, 0.0), None),
    ],
)  # fmt: skip
def test_a_network_that_gets_worse_costs_one_request_and_not_its_deadline(
    before: tuple[float, float], after: tuple[float, float] | None
) -> None:
    made = engine(*before)
    for _ in range(8):
        made.request()
    network, changes_at, tick = made.network, made.network.now + 0.05, made.network.tick

    def ticks() -> None:
        if network.now >= changes_at:
            network.stalled = after is None
            if after is not None:
                network.bytes_per_s, network.latency_s = after[0] * 1e6, after[1]
        tick()

    network.tick = ticks  # type: ignore[method-assign]
    planned = before[1] + BYTES / (before[0] * 1e6)
    assert made.seconds() < max(1.6 * COMPUTE_S, planned + 1.5 * COMPUTE_S)
    assert made.seconds() < 1.6 * COMPUTE_S
    assert all(made.seconds() < 1.05 * COMPUTE_S for _ in range(10))


def test_a_network_whose_latency_is_seconds_is_noticed_within_seconds() -> None:
    """At no request's cost: those that compute take no longer for it."""
    made = engine(400, 3.0)
    for _ in range(8):
        made.request()
    network = made.network
    network.latency_s, back = 0.0, made.network.now
    while made.loaded[-1] < 1.0:
        assert made.seconds() < 1.02 * COMPUTE_S or made.loaded[-1]
        assert network.now - back < 5.0
    assert made.request() < 1.05


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 0.0), (400, 0.0)), ((5, 0.0), (100, 0.0)), ((10, 0.0), (40, 0.0)), ((2, 1.0), (100, 0.0)),
        ((400, 1.6), (400, 0.1)), ((400, 2.0), (50, 0.0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0.1, 0.4])
def test_a_network_that_is_back_is_noticed_by_the_next_request(
    before: tuple[float, float], after: tuple[float, float], at: float
) -> None:
    """While one is computed, that is, and at no request's cost."""
    made = engine(*before)
    for _ in range(8):
        made.request()
    network, changes_at, tick = made.network, made.network.now + at, made.network.tick

    def ticks() -> None:
        if network.now >= changes_at:
            network.bytes_per_s, network.latency_s = after[0] * 1e6, after[1]
        tick()

    network.tick = ticks  # type: ignore[method-assign]
    assert made.seconds() < 1.02 * COMPUTE_S
    soon = [made.request() for _ in range(6)]
    assert max(soon) < 1.2 and max(soon[2:]) < 1.05, soon


@pytest.mark.parametrize(
    ("mb_s", "latency_s", "segment", "most_blocks", "rounds"),
    [
        # One round of reads, although segments aren't quite as even as cutting them in four would be.
        (400, 0.9, 64, 64, 1), (100, 0.3, 65, 256, 1), (60, 0.3, 70, 256, 1),
        # Four rounds, since segments are small; of 0.6 s each they don't pay.
        (400, 0.3, 16, 256, 4), (400, 0.6, 16, 256, 4),
        # What fits into staging is small: 16 parts, of which twelve ask for their segment's header first.
        (400, 0.1, 64, 16, 8), (400, 0.3, 64, 16, 7),
    ],
)  # fmt: skip
def test_latency_counts_once_for_each_round_of_reads(
    mb_s: float, latency_s: float, segment: int, most_blocks: int, rounds: int
) -> None:
    network = Network(mb_s * 1e6, latency_s)
    made = Simulated(network, PREFILL, segment=segment, most_blocks=most_blocks)
    for _ in range(8):
        made.seconds()
    loads = rounds * latency_s + BYTES / (mb_s * 1e6)
    took = sorted(made.seconds() for _ in range(10))
    assert took[-1] < 1.06 * min(COMPUTE_S, loads), f"{took[0]:.2f} to {took[-1]:.2f} s"


def test_latency_on_an_uneven_network_is_not_taken_for_a_lack_of_bandwidth() -> None:
    """That would make loads of more rounds of reads, which take the longer for it, and so confirm it."""
    ratios: list[float] = []
    for seed in range(4):
        random, made = Random(seed), engine(100)
        for count in range(14):
            uneven = 1 + 0.3 * random.expovariate(1.0)
            latency_s = 0.0 if count < 4 else 0.3 * uneven
            made.network.bytes_per_s, made.network.latency_s = 400e6 / uneven, latency_s
            ratio = made.request()
            ratios += [ratio] if count >= 8 else []
    ratios.sort()
    assert ratios[len(ratios) * 9 // 10] < 1.1, ratios


def test_with_throughput_a_request_waits_for_what_it_saves() -> None:
    """Twice as slow as computing: worth it for who saves the accelerator, not for the request."""
    patient, hasty = engine(11, objective="throughput"), engine(11)
    for _ in range(6):
        patient.request(), hasty.request()
    assert (patient.loaded[-1], hasty.loaded[-1]) == (1.0, 0.0)
    far = engine(4, objective="throughput")
    for _ in range(6):
        far.request()
    assert far.loaded[-1] == 0.0, "but no longer than four times as long"
