"""The match boundary against a brute-force oracle, and against what vLLM itself keeps of a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.rules.prefix import PrefixRule, alignment, leading, longest_boundary, most_tokens, stops

TOKENS = 96
RULES = st.lists(
    st.one_of(
        st.builds(PrefixRule, st.just("prefix"), st.sampled_from([2, 4, 8])),
        st.builds(PrefixRule, st.just("window"), st.sampled_from([2, 4, 8]), st.integers(1, 40)),
        st.builds(PrefixRule, st.just("chunk"), st.sampled_from([2, 4, 8]), st.sampled_from([8, 16, 24])),
        st.builds(PrefixRule, st.just("state"), st.sampled_from([2, 4, 8, 16])),
    ),
    min_size=1,
    max_size=4,
)


def can_resume(rule: PrefixRule, there: Sequence[bool], boundary: int) -> bool:
    """From the definition, token by token: are the blocks there that token `boundary` looks at?"""
    if boundary == 0:
        return True
    match rule.reach:
        case "prefix":
            tokens = range(boundary)
        case "window":
            tokens = range(max(0, boundary - rule.window + 1), boundary)
        case "chunk":
            tokens = range(boundary - boundary % rule.window, boundary)
        case "state":
            tokens = range(boundary - 1, boundary)
    return all(there[token // rule.block_tokens] for token in tokens)


def draw_blocks(data: st.DataObject, rules: Sequence[PrefixRule], tokens: int) -> list[list[bool]]:
    sizes = [tokens // rule.block_tokens for rule in rules]
    return [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes]


def oracle(rules: Sequence[PrefixRule], there: Sequence[Sequence[bool]], most: int) -> int:
    return max(
        boundary
        for boundary in range(0, most + 1, alignment(rules))
        if all(can_resume(rule, row, boundary) for rule, row in zip(rules, there, strict=True))
    )


@given(RULES, st.integers(0, 20))
def test_a_block_is_left_at_the_first_number_of_tokens_that_does_without_it(
    rules: list[PrefixRule], block: int
) -> None:
    for rule in rules:
        left = (at for at in range(400) if rule.skipped_tokens(at) // rule.block_tokens > block)
        assert rule.leaves_at(block) == next(left, None)


@settings(max_examples=600)
@given(RULES, st.data())
def test_the_longest_boundary_is_the_oracles(rules: list[PrefixRule], data: st.DataObject) -> None:
    there = draw_blocks(data, rules, TOKENS)
    # A group that needs the whole prefix is asked with one call, from the front, before all others.
    reach = [
        leading(row) * rule.block_tokens
        for rule, row in zip(rules, there, strict=True)
        if rule.reach == "prefix"
    ]
    limit = min([data.draw(st.integers(0, TOKENS)), *reach])

    def present(group: int, blocks: range) -> list[bool]:
        return [there[group][i] for i in blocks]

    assert longest_boundary(rules, limit, present) == oracle(rules, there, limit)


@settings(max_examples=300)
@given(RULES, st.integers(0, 60), st.data())
def test_a_prompt_is_resumed_where_the_oracle_says_and_stops_at_what_is_not_there(
    rules: list[PrefixRule], tokens: int, data: st.DataObject
) -> None:
    there = draw_blocks(data, rules, tokens)
    possible = min(
        most_tokens(rules, tokens),
        *(len(row) * rule.block_tokens for rule, row in zip(rules, there, strict=True)),
    )
    stopped, resumable = stops(rules, there, tokens)
    assert resumable == oracle(rules, there, possible)
    assert all(stop is None or not there[group][stop] for group, stop in enumerate(stopped))
    if resumable < possible // alignment(rules) * alignment(rules):
        assert any(stop is not None for stop in stopped)
    else:
        assert all(stop is None for stop in stopped)


@pytest.mark.parametrize(
    ("there", "stopped", "resumable"),
    [
        # Token 20 needs the window's blocks 3 and 4, token 16 its blocks 2 and 3, and so on.
        ([[True] * 5, [False, False, False, True, True]], [None, None], 20),
        ([[True] * 5, [False, False, True, False, True]], [None, 3], 0),
        ([[True] * 5, [True, True, True, False, True]], [None, 3], 12),
        # The window is asked for what resuming would need where the whole prefix ends.
        ([[True, True, False, True, True], [True, False, True, True, True]], [2, 1], 4),
        ([[True, True, False, True, True], [True] * 5], [2, None], 8),
    ],
)
def test_each_group_says_which_block_stops_it(
    there: list[list[bool]], stopped: list[int | None], resumable: int
) -> None:
    rules = [PrefixRule("prefix", 4), PrefixRule("window", 4, 9)]
    assert stops(rules, there, 22) == (stopped, resumable)


@given(RULES, st.integers(0, TOKENS))
def test_a_boundary_leaves_the_last_token_to_windows_and_states(rules: list[PrefixRule], total: int) -> None:
    most = most_tokens(rules, total)
    assert most % alignment(rules) == 0
    assert most <= total
    assert total - most <= alignment(rules)
    if total and any(rule.reach != "prefix" for rule in rules):
        assert most < total


def test_what_is_absent_is_asked_for_once() -> None:
    rules = [PrefixRule("prefix", 2), PrefixRule("window", 2, 8), PrefixRule("state", 4)]
    asked: list[tuple[int, int]] = []

    def present(group: int, blocks: range) -> list[bool]:
        asked.extend((group, block) for block in blocks)
        return [False] * len(blocks)

    assert longest_boundary(rules, 96, present) == 0
    assert len(asked) <= 2 * (96 // 2) + 96 // 4


@pytest.mark.parametrize(
    ("reach", "window", "extra"), [("window", 20, 0), ("window", 33, 3), ("chunk", 32, 0), ("state", 0, 0)]
)
def test_vllm_keeps_the_blocks_that_the_rule_needs(reach: str, window: int, extra: int) -> None:
    """The scheduler nulls the blocks below `get_num_skipped_tokens`; the others are to be filled."""
    managers = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager")
    kind = {
        "window": managers.SlidingWindowManager,
        "chunk": managers.ChunkedLocalAttentionManager,
        "state": managers.MambaManager,
    }[reach]
    manager = kind.__new__(kind)
    manager.sliding_window, manager.extra_retained_tokens, manager.attention_chunk_size = (
        window,
        extra,
        window,
    )
    rule = PrefixRule(reach, 16, window + extra)  # type: ignore[arg-type]
    for tokens in range(16, 16 * 20, 16):
        assert rule.needed(tokens).start == manager.get_num_skipped_tokens(tokens) // 16
