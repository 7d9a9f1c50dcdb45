"""The match boundary against a brute-force oracle, and against what vLLM itself keeps of a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.boundary import Rule, alignment, longest_boundary, most_tokens

TOKENS = 96
RULES = st.lists(
    st.one_of(
        st.builds(Rule, st.just("prefix"), st.sampled_from([2, 4, 8])),
        st.builds(Rule, st.just("window"), st.sampled_from([2, 4, 8]), st.integers(1, 40)),
        st.builds(Rule, st.just("chunk"), st.sampled_from([2, 4, 8]), st.sampled_from([8, 16, 24])),
        st.builds(Rule, st.just("state"), st.sampled_from([2, 4, 8, 16])),
    ),
    min_size=1,
    max_size=4,
)


def can_resume(rule: Rule, there: Sequence[bool], boundary: int) -> bool:
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


@settings(max_examples=600, deadline=None)
@given(RULES, st.data())
def test_the_longest_boundary_is_the_oracles(rules: list[Rule], data: st.DataObject) -> None:
    there = [
        data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        for n in (TOKENS // rule.block_tokens for rule in rules)
    ]
    # A group that needs the whole prefix is asked with one call, from the front, before all others.
    reach = [
        next((i for i, one in enumerate(row) if not one), len(row)) * rule.block_tokens
        for rule, row in zip(rules, there, strict=True)
        if rule.reach == "prefix"
    ]
    limit = min([data.draw(st.integers(0, TOKENS)), *reach])

    def present(group: int, blocks: range) -> list[bool]:
        return [there[group][i] for i in blocks]

    align = alignment(rules)
    oracle = max(
        boundary
        for boundary in range(0, limit + 1, align)
        if all(can_resume(rule, row, boundary) for rule, row in zip(rules, there, strict=True))
    )
    assert longest_boundary(rules, limit, present) == oracle


@given(RULES, st.integers(0, TOKENS))
def test_a_boundary_leaves_the_last_token_to_windows_and_states(rules: list[Rule], total: int) -> None:
    most = most_tokens(rules, total)
    assert most % alignment(rules) == 0
    assert most <= total
    assert total - most <= alignment(rules)
    if total and any(rule.reach != "prefix" for rule in rules):
        assert most < total


def test_what_is_absent_is_asked_for_once() -> None:
    rules = [Rule("prefix", 2), Rule("window", 2, 8), Rule("state", 4)]
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
    rule = Rule(reach, 16, window + extra)  # type: ignore[arg-type]
    for tokens in range(16, 16 * 20, 16):
        assert rule.needed(tokens).start == manager.get_num_skipped_tokens(tokens) // 16
