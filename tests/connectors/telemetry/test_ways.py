"""Every token of a prompt is counted once, by where it came from."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from connectors.telemetry.ways import SOURCES, Way
from kvstore.rules.tiers import TIERS, Tier


def test_a_prompt_is_split_where_its_parts_end() -> None:
    way = Way()
    way.begin(32)
    way.loads = [(64, "folder"), (128, "bucket"), (160, "folder")]
    assert way.loading() == {"folder": 64, "bucket": 64}
    assert way.runs(160, 200) == {"engine": 32, "folder": 64, "bucket": 64, "computed": 40}
    assert way.runs(200, 200) == {}, "a second time, after a preemption"


def test_what_a_load_did_not_bring_is_computed() -> None:
    way = Way()
    way.begin(32)
    way.loads = [(64, "folder"), (160, "bucket")]
    # The last token is computed in any case, and of a failed load all behind the first bad block is.
    assert way.runs(96, 160) == {"engine": 32, "folder": 32, "bucket": 32, "computed": 64}


def test_one_that_starts_over_is_counted_as_it_was_the_last_time() -> None:
    way = Way()
    way.begin(0)
    way.loads = [(160, "bucket")]
    way.begin(48)
    assert way.runs(48, 160) == {"engine": 48, "computed": 112}


def test_what_another_connector_brought_is_the_engines() -> None:
    way = Way()
    way.begin(16)
    assert way.runs(100, 160) == {"engine": 100, "computed": 60}


def test_a_session_counts_what_each_of_its_inputs_adds() -> None:
    way = Way()
    way.begin(0)
    way.loads = [(64, "disk")]
    assert way.runs(64, 100) == {"disk": 64, "computed": 36}
    # Ten tokens that were decoded belong to the prompt now, and are there.
    assert way.runs(110, 150) == {"engine": 10, "computed": 40}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 200),
            st.lists(st.tuples(st.integers(1, 90), st.sampled_from(TIERS)), max_size=5),
            st.integers(0, 400),
            st.integers(0, 300),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_counts_always_add_up_to_the_prompt(
    turns: list[tuple[int, list[tuple[int, Tier]], int, int, bool]],
) -> None:
    """Whatever the engine had, whatever a load was to bring and did, however often it starts over."""
    way, prompt, counted = Way(), 1, Counter[str]()
    for hit, loads, computed, more, starts_over in turns:
        prompt += more
        if starts_over:
            way.begin(hit)
            at, parts = hit, []
            for size, tier in loads:
                parts.append((at := at + size, tier))
            way.loads = parts
            assert sum(way.loading().values()) == at - hit
        counts = way.runs(computed, prompt)
        assert set(counts) <= set(SOURCES) and all(count > 0 for count in counts.values())
        assert counts.get("computed", 0) <= max(0, prompt - computed)
        counted.update(counts)
        assert counted.total() == prompt
