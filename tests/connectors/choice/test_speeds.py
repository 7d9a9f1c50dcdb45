"""Estimates of what reads take follow what a network does, on a simulated one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.choice.speeds import FIRST, Expected, Measured, Meter, Speed, corrected

MB = 1e6


class Network:
    """A tier of which reads share the bandwidth; time passes by steps."""

    STEP_S = 0.001

    def __init__(self, latency_s: float, bytes_per_s: float, first: Speed = FIRST["bucket"]) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.meter = Meter(first, 4)
        self.now = 100.0
        self._flying: dict[object, list[float]] = {}
        self._waiting: list[tuple[object, int, int]] = []

    def ask(self, nbytes: int, reads: int = 4, requests: int = 1) -> None:
        """A load of so many bytes, as so many reads, of which four are under way at a time, and of so many
        requests each."""
        for _ in range(reads):
            read = object()
            self.meter.ask(read, nbytes // reads, self.now, requests)
            self._waiting.append((read, nbytes // reads, requests))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            while self._waiting and len(self._flying) < 4:
                read, nbytes, requests = self._waiting.pop(0)
                self.meter.begin(read, self.now)
                self._flying[read] = [requests * self.latency_s, float(nbytes)]
            self.now += self.STEP_S
            share = self.bytes_per_s * self.STEP_S / max(1, len(self._flying))
            for read, left in list(self._flying.items()):
                if left[0] > 0:
                    left[0] -= self.STEP_S
                    continue
                left[1] -= share
                if left[1] <= 0:
                    del self._flying[read]
                    self.meter.end(read, self.now, arrived=True)

    def load(self, nbytes: int, reads: int = 4, requests: int = 1) -> float:
        """Returns how long a load takes, which has the tier for itself."""
        began = self.now
        self.ask(nbytes, reads, requests)
        while self._flying or self._waiting:
            self.pass_time(self.STEP_S)
        return self.now - began

    def predicts(self, nbytes: int) -> float:
        return self.meter.speed(self.now).seconds(nbytes)


@pytest.fixture
def network() -> Iterator[Network]:
    yield Network(0.02, 100 * MB)


def near(value: float, expected: float, factor: float = 1.25) -> bool:
    return expected / factor <= value <= expected * factor


@pytest.mark.parametrize("megabytes", [1, 20, 200])
def test_one_load_is_enough_to_predict_the_next(network: Network, megabytes: int) -> None:
    took = network.load(int(megabytes * MB))
    assert near(network.predicts(int(megabytes * MB)), took, 1.1)


def test_loads_of_two_sizes_tell_latency_from_bandwidth(network: Network) -> None:
    for _ in range(8):
        network.load(int(40 * MB))
        network.load(100_000)
        network.pass_time(0.1)
    speed = network.meter.speed(network.now)
    assert near(speed.latency_s, 0.02, 1.5) and near(speed.bytes_per_s, 100 * MB, 1.5)


def test_milliseconds_of_small_reads_say_nothing_of_long_loads() -> None:
    """As when a tier that does not pay is measured by a few blocks, now and then."""
    random, meter, now = Random(1), Meter(FIRST["bucket"], 4), 100.0
    for count in range(60):
        # The first one is a load, which takes 0.8 s; the ones after it a block, or what should take 0.1 s.
        nbytes = int(16 * MB) if not count else (128 << 10, int(2 * MB))[count % 2]
        meter.ask(count, nbytes, now)
        meter.begin(count, now)
        now += nbytes / (20 * MB) + random.uniform(-0.005, 0.005)
        meter.end(count, now, arrived=True)
        assert near(meter.speed(now).seconds(16 * MB), 0.8), count
        now += 0.8


def test_a_read_of_two_requests_has_two_latencies(network: Network) -> None:
    for _ in range(8):
        network.load(int(40 * MB), requests=2)
        network.load(100_000)
        network.pass_time(0.1)
    speed = network.meter.speed(network.now)
    assert near(speed.latency_s, 0.02) and near(speed.bytes_per_s, 100 * MB)


def test_a_read_of_two_requests_is_not_overdue_between_them(network: Network) -> None:
    network.bytes_per_s *= 100
    for _ in range(8):
        network.load(int(40 * MB))
        network.load(100_000)
    network.ask(int(MB), reads=1, requests=2)
    network.pass_time(0.035)
    assert -0.01 < network.meter.behind(network.now) < 0
    network.pass_time(0.1)
    assert network.meter.behind(network.now) == 0, "it has ended"


def test_parts_of_segments_count_their_headers_requests() -> None:
    speed = Speed(1.0, 1e9, threads=4, round_bytes=400, part_requests=2)
    assert round(speed.seconds(300, 1, inside=True)) == 2
    # Four segments that fit; eight of which each has a second part; one in four parts.
    assert [round(speed.seconds(*load)) for load in ((400, 4), (1600, 8), (400, 1))] == [1, 6, 2]


@pytest.mark.parametrize("factor", [0.01, 0.2, 5, 100])
def test_a_network_that_changes_is_followed_within_two_loads(network: Network, factor: float) -> None:
    network.load(int(20 * MB))
    network.bytes_per_s *= factor
    for _ in range(2):
        # A probe of what takes a tenth of a second is all that there may be.
        took = network.load(max(100_000, int(network.meter.speed(network.now).bytes_per_s * 0.1)))
        network.pass_time(0.5)
    assert near(network.predicts(int(20 * MB)), 0.02 + 20 / (100 * factor), 2.0), took


def test_a_read_that_is_overdue_raises_the_estimate_before_it_ends(network: Network) -> None:
    network.load(int(20 * MB))
    before = network.predicts(int(20 * MB))
    network.bytes_per_s /= 100
    network.ask(int(20 * MB))
    network.pass_time(before * 0.9)
    assert network.predicts(int(20 * MB)) == before and network.meter.behind(network.now) < 0
    seen = []
    for _ in range(5):
        network.pass_time(0.2)
        seen.append(network.predicts(int(20 * MB)))
        assert seen[-1] >= network.now - 100.2 - before - 0.3
    assert seen == sorted(seen) and seen[-1] > 4 * before and network.meter.behind(network.now) > 0.5


def test_a_burst_that_goes_on_is_measured_as_it_goes(network: Network) -> None:
    network.load(int(20 * MB))
    network.ask(int(400 * MB), reads=100)
    network.pass_time(0.5)
    network.bytes_per_s *= 4
    network.pass_time(0.8)
    assert network.meter.left_bytes, "this test wants it to go on"
    assert network.meter.speed(network.now).bytes_per_s > 150 * MB


def test_a_read_that_hangs_is_given_up_and_does_not_hide_that_the_tier_is_back(network: Network) -> None:
    network.load(int(20 * MB))
    meter = network.meter
    meter.ask("hangs", int(20 * MB), network.now)
    meter.begin("hangs", network.now)
    network.pass_time(4.0)
    meter.give_up(network.now)
    assert meter.left_bytes == 20 * MB
    network.pass_time(2.0)
    meter.give_up(network.now)
    assert (meter.left_bytes, meter.done_bytes) == (0, 40 * MB)
    assert network.predicts(int(20 * MB)) > 3
    network.pass_time(1.0)
    for _ in range(3):
        network.load(int(5 * MB))
    assert network.predicts(int(20 * MB)) < 0.5
    done = meter.done_bytes
    meter.end("hangs", network.now, arrived=True)
    assert meter.done_bytes == done, "each read counts once"


@pytest.mark.parametrize("threads", [1, 4])
def test_reads_that_all_fail_late_are_no_measurement(threads: int) -> None:
    """In a window that begins within a burst, too, of which nothing would have been expected."""
    meter, now = Meter(FIRST["bucket"], threads), 0.0
    for read in range(12):
        meter.ask(read, 1 << 20, now)
    for first in range(0, 12, threads):
        some = range(first, first + threads)
        for read in some:
            meter.begin(read, now)
        now += 1.0
        for read in some:
            meter.end(read, now, arrived=first == 0)
    assert meter.left_bytes == 0 and meter.speed(now).bytes_per_s > 0


def test_reads_that_fail_bring_no_bytes(network: Network) -> None:
    before = network.meter.speed(0.0)
    network.meter.ask("a", int(20 * MB), 1.0)
    network.meter.begin("a", 1.0)
    network.meter.end("a", 1.001, arrived=False)
    assert network.meter.speed(1.1) == before and network.meter.done_bytes == 20 * MB


quantities = st.floats(1e-4, 1e3)


@given(quantities, st.floats(1e3, 1e11), st.integers(1, 10**10), quantities, st.sampled_from([0.0, 1.0, 7.5]))
def test_what_is_measured_would_have_been_predicted(
    lat: float, rate: float, nbytes: int, seconds: float, rounds: float
) -> None:
    before = Speed(lat, rate)
    predicted = rounds * lat + nbytes / rate
    after = corrected(before, nbytes, seconds, rounds=rounds)
    got = rounds * after.latency_s + nbytes / after.bytes_per_s
    if 1e-3 < seconds / predicted < 1e3 and 2e4 < after.bytes_per_s < 5e11 and 2e-5 < after.latency_s < 5e3:
        assert math.isclose(got, seconds, rel_tol=0.05, abs_tol=0.005)
    slower = after.latency_s >= lat * 0.999 and after.bytes_per_s <= rate * 1.001
    faster = after.latency_s <= lat * 1.001 and after.bytes_per_s >= rate * 0.999
    assert slower if seconds > predicted * 1.1 else faster or seconds >= predicted * 0.9


def test_the_slowest_rank_counts_and_what_no_rank_has_ended_is_ahead() -> None:
    expected = Expected(ranks=2)
    assert expected.speed("bucket") == FIRST["bucket"] and expected.old("bucket", 0.0, 1.0)
    expected.plan("bucket", 1000)
    assert expected.ahead("bucket") == 1000 and expected.ahead("folder") == 0
    expected.take(0, {"bucket": Measured(Speed(0.1, 5e6), 1000, 1)}, 10.0)
    assert expected.ahead("bucket") == 1000, "the other rank has said nothing"
    expected.take(1, {"bucket": Measured(Speed(0.01, 1e6), 400, 1)}, 10.0)
    assert expected.ahead("bucket") == 600 and not expected.old("bucket", 100.0, 1.0)
    assert expected.speed("bucket") == Speed(0.1, 1e6)
    expected.take(1, {"bucket": Measured(Speed(0.01, 1e6), 1000, 1)}, 10.0)
    assert not expected.old("bucket", 10.5, 1.0) and expected.old("bucket", 11.0, 1.0)
    expected.asked("bucket", 11.0)
    assert not expected.old("bucket", 11.5, 1.0)


def test_reads_that_hang_are_believed_before_any_has_ended() -> None:
    expected, meter = Expected(ranks=2), Meter(FIRST["bucket"], 4)
    expected.take(1, {"bucket": Measured(FIRST["bucket"], 0, 0)}, 1.0)
    meter.ask("read", 1 << 20, 1.0)
    meter.begin("read", 1.0)
    expected.take(0, {"bucket": Measured(meter.speed(3.0), meter.done_bytes, meter.count)}, 3.0)
    assert expected.speed("bucket").seconds(1 << 20) >= 1.9


def probed(meter: Meter, began: float, seconds: float, nbytes: int = 1 << 20) -> Speed:
    """Returns the estimate after a probe by itself."""
    meter.begin_probe(began, nbytes, began)
    meter.end_probe(began, began + seconds, arrived=True)
    return meter.speed(began + seconds)


def test_a_probe_is_measured_by_itself() -> None:
    meter = Meter(FIRST["bucket"], 4)
    for began in (100.0, 102.0, 104.0):
        probed(meter, began, 0.3, 128 << 10)
        speed = probed(meter, began + 1, 1.3, 10 << 20)
    assert near(speed.latency_s, 0.287) and near(speed.bytes_per_s, (10 << 20) / 1.013)
    assert (meter.done_bytes, meter.left_bytes, meter.count) == (0, 0, 6)


def test_a_probe_beside_a_load_counts_only_if_the_tier_has_become_better() -> None:
    meter = Meter(FIRST["bucket"], 4)
    before = probed(meter, 100.0, 1.0)
    meter.ask("load", 32 << 20, 101.0)
    meter.begin("load", 101.0)
    probed(meter, 101.1, 4.0)
    assert meter.count == 1 and meter._settled == before
    # A load that begins beside it delays it just as well.
    meter.begin_probe("slow", 1 << 20, 106.0)
    meter.end("load", 106.0, arrived=False)
    meter.ask("load", 32 << 20, 106.0)
    meter.begin("load", 106.0)
    meter.end_probe("slow", 110.0, arrived=True)
    assert meter.count == 1 and meter._settled == before
    faster = probed(meter, 111.0, 0.01)
    assert meter.count == 2 and meter.better and faster.seconds(1 << 20) < before.seconds(1 << 20) / 4


def test_probes_beside_each_other_are_not_taken_for_one_that_is_alone() -> None:
    meter = Meter(FIRST["bucket"], 4)
    before = probed(meter, 100.0, 0.2, 8 << 20)
    # A large one and a block beside it: only the large one tells.
    meter.begin_probe("large", 8 << 20, 110.0)
    meter.begin_probe("small", 128 << 10, 110.1)
    meter.end_probe("small", 110.19, arrived=True)
    assert meter.count == 1
    meter.end_probe("large", 110.2, arrived=True)
    assert meter.count == 2 and near(meter.speed(110.2).seconds(8 << 20), before.seconds(8 << 20))
    # Two of a size share the network: neither does.
    for name in ("one", "other"):
        meter.begin_probe(name, 8 << 20, 120.0)
    for name in ("one", "other"):
        meter.end_probe(name, 120.4, arrived=True)
    assert meter.count == 2


def test_what_began_before_a_tier_became_better_tells_nothing_of_it() -> None:
    meter = Meter(FIRST["bucket"], 4)
    probed(meter, 100.0, 3.0)
    meter.begin_probe("old", 1 << 20, 110.0)
    better = probed(meter, 111.0, 0.01)
    meter.end_probe("old", 113.0, arrived=True)
    assert meter.speed(113.0) == better
    meter.begin_probe("failed", 1 << 20, 120.0)
    meter.end_probe("failed", 150.0, arrived=False)
    assert meter.speed(150.0) == better


def test_few_probes_are_on_their_way_at_a_time() -> None:
    expected = Expected()
    assert expected.old("bucket", 100.0, 0.5) and not expected.asked("bucket", 100.0)
    assert not expected.old("bucket", 100.4, 0.5)
    assert expected.old("bucket", 100.5, 0.5) and expected.asked("bucket", 100.5)
    assert not expected.old("bucket", 104.0, 0.5)
    # Perhaps nothing will be heard of them.
    assert expected.old("bucket", 105.5, 0.5)
    expected.take(0, {"bucket": Measured(FIRST["bucket"], 0, 1)}, 106.0)
    assert not expected.old("bucket", 106.4, 0.5) and expected.old("bucket", 106.5, 0.5)
    # What is better than expected is looked at again at once, as long as no load will tell.
    expected.take(0, {"bucket": Measured(FIRST["bucket"], 0, 2, better=True)}, 107.0)
    assert expected.old("bucket", 107.0, 0.5)
    expected.plan("bucket", 1)
    assert not expected.old("bucket", 200.0, 0.5)


def test_a_read_that_a_bucket_holds_back_tells_how_slow_it_is_at_least() -> None:
    """Five reads that fail for it would otherwise leave the estimate as it was, and be planned again."""
    meter = Meter(FIRST["bucket"], 4)
    before = meter.speed(0.0)
    # It was held back at once, and would have waited for longer than two seconds.
    meter.ask("one", 32 << 20, 10.0)
    meter.begin("one", 10.0)
    meter.held("one", 10.0, 2.0 + before.seconds(32 << 20))
    meter.end("one", 10.0, arrived=False)
    assert meter.speed(10.0).seconds(32 << 20) > 2.0
    assert meter.count == 1
    # What is held back for no longer than planned tells nothing, nor does what was given up.
    meter.ask("two", 32 << 20, 20.0)
    meter.begin("two", 20.0)
    meter.held("two", 20.1, 0.0)
    meter.end("two", 20.1, arrived=False)
    meter.held("two", 20.1, 60.0)
    assert meter.count == 1


def test_a_read_that_is_held_back_is_not_all_that_the_tier_does() -> None:
    meter = Meter(FIRST["bucket"], 16)
    for number in range(16):
        meter.ask(number, 8 << 20, 0.0)
        meter.begin(number, 0.0)
    meter.held(0, 0.0, 2.1)
    # 2.1 seconds are no more than all of them take at this speed.
    assert meter.speed(0.0).bytes_per_s > 0.8 * FIRST["bucket"].bytes_per_s
    meter.held(0, 0.0, 30.0)
    assert meter.speed(0.0).seconds(16 * (8 << 20)) == pytest.approx(30.0, rel=0.2)
