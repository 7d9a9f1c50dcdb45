"""What is loaded is what the estimates say is best."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.choice.cost import Prefill
from connectors.choice.decision import MOST_STRETCHES, Decision, Stretch, choose, stretches_of
from connectors.choice.speeds import Speed
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.tiers import TIERS, Tier
from schemas.records import EqualSizes, PartRecord, SegmentRecord

SIZE = 16


def segment(number: int) -> SegmentId:
    return SegmentId(number.to_bytes(16, "big"))


def stretches(blocks: Sequence[int], nbytes: int, *, anywhere: bool = True) -> list[Stretch]:
    """Stretches of so many blocks each, of so many bytes a block."""
    made, at = [], 0
    for number, count in enumerate(blocks):
        stop = at + count * SIZE
        boundary = anywhere or number == len(blocks) - 1
        made.append(Stretch(segment(number), at, stop, count * nbytes, 1, boundary))
        at = stop
    return made


speeds = st.builds(Speed, st.floats(1e-4, 1.0), st.floats(1e5, 1e10))
prefills = st.builds(Prefill, st.floats(1.0, 1e4), st.floats(0.0, 1.0))
worlds = st.fixed_dictionaries(
    {
        "blocks": st.lists(st.integers(1, 64), min_size=1, max_size=12),
        "nbytes": st.integers(1, 1 << 24),
        "places": st.lists(st.sampled_from(TIERS), min_size=12, max_size=12),
        "speeds": st.fixed_dictionaries(dict.fromkeys(TIERS, speeds)),
        "ahead": st.fixed_dictionaries({tier: st.integers(0, 1 << 30) for tier in TIERS}),
        "prefill": prefills,
        "wait": st.sampled_from([1.0, 0.25]),
        "detour_s": st.floats(0.0, 0.1),
        "more": st.integers(1, 1000),
        "computed": st.integers(0, 20),
        "anywhere": st.booleans(),
    }
)


def decided(world: dict, **changes: object) -> tuple[Decision, list[Stretch], int, int]:  # type: ignore[type-arg]
    world = world | changes
    made = stretches(world["blocks"], world["nbytes"], anywhere=world["anywhere"])
    tiers = {segment(number): place for number, place in enumerate(world["places"])}
    found = made[-1].stop
    computed = min(world["computed"] * SIZE, found - SIZE)
    prompt = found + world["more"]
    speed = world["speeds"].__getitem__
    got = choose(
        made, tiers, computed, prompt,
        speed=speed, ahead=world["ahead"].__getitem__, prefill=world["prefill"], wait=world["wait"],
        detour_s=world["detour_s"],
    )  # fmt: skip
    return got, made, computed, prompt


@given(worlds)
def test_it_is_never_worse_than_either_pure_policy_by_its_own_estimates(world: dict) -> None:  # type: ignore[type-arg]
    got, made, computed, prompt = decided(world)
    prefill, wait = world["prefill"], world["wait"]
    time = (wait * got.load_s if got.tokens else 0.0) + prefill.seconds(computed + got.tokens, prompt)
    everything = wait * got.load_all_s + prefill.seconds(made[-1].stop, prompt)
    nothing = prefill.seconds(computed, prompt)
    assert time <= min(everything, nothing) * (1 + 1e-9)
    assert got.found == made[-1].stop - computed and 0 <= got.tokens <= got.found
    assert got.load_s <= got.load_all_s and got.compute_s == prefill.seconds(computed, made[-1].stop)
    ends = {one.stop - computed for one in made if one.boundary}
    assert got.tokens == 0 or got.tokens in ends
    assert (got.why == "faster") == (got.tokens == got.found) and (got.tokens == 0) == (
        got.why == "computing_is_faster"
    )


@given(worlds, st.floats(1.0, 100.0))
def test_a_slower_tier_never_makes_it_load_more(world: dict, factor: float) -> None:  # type: ignore[type-arg]
    slower = {
        tier: Speed(one.latency_s * factor, one.bytes_per_s / factor) for tier, one in world["speeds"].items()
    }
    more, *_ = decided(world)
    less, *_ = decided(world, speeds=slower, ahead={tier: n * factor for tier, n in world["ahead"].items()})
    assert less.tokens <= more.tokens


@given(worlds, st.floats(1.0, 100.0))
def test_dearer_computing_never_makes_it_load_less(world: dict, factor: float) -> None:  # type: ignore[type-arg]
    before: Prefill = world["prefill"]
    less, *_ = decided(world)
    more, *_ = decided(world, prefill=Prefill(before.token_us * factor, before.depth_us * factor))
    assert more.tokens >= less.tokens


def simply(places: Sequence[Tier], **changes: object) -> Decision:
    """A prompt of 1,600 tokens and one more, of which all blocks are stored; 1 ms a token, 64 KB a block."""
    world = {
        "blocks": [100 // len(places)] * len(places),
        "nbytes": 64_000,
        "places": places,
        "speeds": {tier: Speed(0.01, 1e9) for tier in TIERS} | {"bucket": Speed(0.1, 2e6)},
        "ahead": dict.fromkeys(TIERS, 0),
        "prefill": Prefill(1000.0),
        "wait": 1.0,
        "detour_s": 0.0,
        "more": 1,
        "computed": 0,
        "anywhere": True,
    }
    return decided(world, **changes)[0]


def test_a_slow_bucket_is_declined_and_what_lies_in_the_folder_is_not_judged_by_it() -> None:
    assert (simply(["bucket"]).tokens, simply(["folder"]).tokens) == (0, 1600)
    part = simply(["folder", "bucket"])
    assert (part.tokens, part.why) == (800, "part")
    assert simply(["folder", "bucket"], anywhere=False).tokens == 0, "all or nothing"


def test_with_throughput_a_request_waits_longer_for_what_it_saves() -> None:
    assert simply(["bucket"], wait=0.25).tokens == 1600


def test_what_is_queued_before_it_counts() -> None:
    assert simply(["folder"], ahead=dict.fromkeys(TIERS, 2 * 10**9)).tokens == 0


def test_deep_tokens_are_worth_more() -> None:
    dear = simply(["bucket"], prefill=Prefill(1000.0, 5.0))
    assert dear.tokens == 1600 and dear.compute_s == pytest.approx(1.6 + 5e-6 * 1600**2 / 2)


def record(slots: int) -> SegmentRecord:
    return SegmentRecord((PartRecord(0, EqualSizes(8, slots)),), slots, "none", 0)


def test_the_stretches_of_a_long_match_are_bounded_and_lose_no_byte() -> None:
    runs = [Run(at * 4, segment(at), 0, 4, record(4)) for at in range(1000)]
    tiers: dict[SegmentId, Tier] = {segment(at): "folder" if at < 300 else "bucket" for at in range(1000)}
    made = stretches_of([runs], [SIZE], [10], 1000 * 4 * SIZE, tiers, anywhere=True)
    assert MOST_STRETCHES - 1 <= len(made) <= MOST_STRETCHES + 2
    assert sum(one.nbytes for one in made) == 40_000 and all(one.boundary for one in made)
    assert [one.start for one in made[1:]] == [one.stop for one in made[:-1]]
    assert 300 * 4 * SIZE in {one.stop for one in made}, "a change of tier is a place to stop"


def test_with_several_groups_only_the_end_counts_and_what_lies_behind_it_does_not() -> None:
    full = [Run(0, segment(0), 0, 8, record(8)), Run(8, segment(1), 0, 8, record(8))]
    window = [Run(5, segment(2), 0, 3, record(3))]
    made = stretches_of(
        [full, window], [SIZE, SIZE], [10, 1], 8 * SIZE, dict.fromkeys([], "disk"), anywhere=False
    )
    assert [(one.stop, one.nbytes, one.boundary) for one in made] == [(128, 80, False), (128, 3, True)]
