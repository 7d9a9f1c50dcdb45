"""vLLM's KV cache groups, of its own classes, as groups of ours: by kind, block size and page shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connectors.engine.layout import LocalGroup, Page, fails_by_request, layer_order, local_groups, merge
from kvstore.errors import ConfigError
from kvstore.rules.prefix import PrefixRule

pytestmark = pytest.mark.engine

BLOCK = 32


def config(*groups: tuple[Sequence[int], KVCacheSpec], **changes: Any) -> KVCacheConfig:
    """Tables of (numbers of layers, spec)."""
    made = [KVCacheGroupSpec(names(layers), spec, **changes) for layers, spec in groups]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made)


def names(layers: Sequence[int]) -> list[str]:
    return [f"model.layers.{i}.attn" for i in layers]


def attention(**changes: Any) -> dict[str, Any]:
    return {
        "block_size": BLOCK,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.bfloat16,
        **changes,
    }


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**attention(**changes))


def window(tokens: int = 64, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**attention(sliding_window=tokens, **changes))


def mla(**changes: Any) -> MLAAttentionSpec:
    given = {"num_kv_heads": 1, "head_size": 576, "max_tp_shards": 1, **changes}
    return MLAAttentionSpec(**attention(**given))


def mamba(**changes: Any) -> MambaSpec:
    given = {
        "block_size": BLOCK,
        "shapes": ((3, 40), (2, 8, 8)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**given | changes)


def only(groups: Sequence[Any]) -> Any:
    [group] = groups
    return group


def test_full_attention() -> None:
    group = only(local_groups(config(([0, 1, 10, 9], full())), tp=1))
    assert group.tables == ((0, tuple(names([0, 1, 9, 10]))),)
    assert group.shape == (4, 2, BLOCK, 128)
    assert group.slot_bytes == 4 * 2 * BLOCK * 128 * 2
    assert group.page.rule == PrefixRule("prefix", BLOCK)
    spec = only(merge([[group]], any_tp=False)).spec
    assert (spec.kind, spec.dtype, spec.shards, spec.window) == ("full", "BF16", 1, None)
    assert spec.slot_bytes == group.slot_bytes


def test_keys_and_values_of_different_sizes() -> None:
    assert only(local_groups(config(([0], full(head_size_v=32))), tp=1)).shape == (1, 2, BLOCK, 96)


@pytest.mark.parametrize(
    ("spec", "rule", "window"),
    [
        (window(64), PrefixRule("window", BLOCK, 64), 64),
        (window(64, extra_retained_tokens=3), PrefixRule("window", BLOCK, 67), 67),
        (ChunkedLocalAttentionSpec(**attention(attention_chunk_size=96)), PrefixRule("chunk", BLOCK, 96), 96),
        (mla(), PrefixRule("prefix", BLOCK), None),
        (mamba(), PrefixRule("state", BLOCK), None),
        # Where vLLM's own cache keeps every block of a window, so does this one.
        (full(sliding_window=64), PrefixRule("prefix", BLOCK), None),
    ],
)
def test_what_each_kind_needs_of_a_prefix(spec: KVCacheSpec, rule: PrefixRule, window: int | None) -> None:
    group = only(merge([local_groups(config(([0], spec)), tp=1)], any_tp=False))
    assert group.rule == rule
    assert group.spec.window == window
    assert group.offered == (rule.reach == "state")


def test_layers_of_one_kind_are_one_group_whatever_their_tables() -> None:
    """Two tables of windows and one of full attention, as vLLM spreads 2 + 1 layers of each period."""
    found = local_groups(config(([0, 3], window()), ([1, 4], window()), ([2, 5], full())), tp=1)
    assert [group.page.kind for group in found] == ["full", "sliding_window"]
    assert found[0].tables == ((2, tuple(names([2, 5]))),)
    assert found[1].tables == ((0, tuple(names([0, 3]))), (1, tuple(names([1, 4]))))
    assert found[1].shape == (4, 2, BLOCK, 128)
    merged = merge([found], any_tp=False)
    assert [group.tables for group in merged] == [(2,), (0, 1)]


def test_pages_of_several_shapes_in_one_table_are_several_groups() -> None:
    inner = {"model.layers.0.attn": mla(), "model.layers.0.indexer": mla(head_size=132, dtype=torch.uint8)}
    inner |= {"model.layers.1.attn": mla()}
    uniform = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=inner)
    made = KVCacheConfig(8, [], [KVCacheGroupSpec(list(inner), uniform)])
    found = local_groups(made, tp=1)
    assert {(group.page.dtype, group.shape) for group in found} == {
        ("BF16", (2, 1, BLOCK, 576)),
        ("U8", (1, 1, BLOCK, 132)),
    }
    assert all(group.tables[0][0] == 0 for group in found)


@pytest.mark.parametrize(
    "draft", [full(), full(num_kv_heads=1), mla()], ids=["alike", "fewer heads", "other"]
)
def test_a_drafts_layers_are_stored_and_named_with_its_targets(draft: KVCacheSpec) -> None:
    """vLLM numbers the layers of an EAGLE or MTP head after the target's, and puts them into its KV cache."""
    plain = merge([local_groups(config(([0, 1], full())), tp=1)], any_tp=False)
    specs = {"model.layers.0.attn": full(), "model.layers.1.attn": full(), "model.layers.2.attn": draft}
    table = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    local = local_groups(config(([0, 1, 2], table)), tp=1)
    assert sorted(name for group in local for _, layers in group.tables for name in layers) == sorted(specs)
    groups = merge([local], any_tp=False)
    assert all(group.rule == PrefixRule("prefix", BLOCK) and not group.offered for group in groups)
    assert [group.spec for group in groups] != [group.spec for group in plain]
    # An engine without the draft, or with another one's layers, has other names.
    other = merge([local_groups(config(([0, 1, 3], full())), tp=1)], any_tp=False)
    assert [group.spec.layers for group in groups] != [group.spec.layers for group in other]


def test_two_windows_block_sizes_and_dtypes_are_told_apart() -> None:
    specs = [window(64), window(96), window(64, block_size=64), window(64, dtype=torch.float16)]
    found = local_groups(config(*(([i], spec) for i, spec in enumerate(specs))), tp=1)
    assert len(found) == len({group.page for group in found}) == 4


def test_the_order_of_groups_is_the_pages_own() -> None:
    """Ranks must number groups alike: the number is a part of every block's name."""
    specs: list[KVCacheSpec] = [
        window(64), full(), mla(), mamba(), window(96), full(num_kv_heads=4), full(head_size=32),
        full(max_tp_shards=1), mla(tokens_per_state=4, head_size=144), mla(head_size=144),
        mamba(tp_replicated=True), full(num_head_slots=2), full(dtype=torch.float16),
    ]  # fmt: skip
    there = [([i], spec) for i, spec in enumerate(specs)]
    one, other = local_groups(config(*there), tp=2), local_groups(config(*reversed(there)), tp=2)
    assert len(one) == len(specs)
    assert [group.page for group in one] == [group.page for group in other]


@pytest.mark.parametrize(
    ("spec", "tp", "shards", "heads"),
    [
        (full(), 1, 1, 2),
        (full(), 4, 4, 8),
        # vLLM doesn't say that ranks hold copies: each stores its own.
        (full(num_kv_heads=1), 4, 4, 4),
        (full(max_tp_shards=2), 4, 2, 4),
        (mla(), 1, 1, 1),
        (mla(), 4, 1, 1),
        (mamba(), 4, 4, 4),
        (mamba(tp_replicated=True), 4, 1, 1),
    ],
)
def test_shards(spec: KVCacheSpec, tp: int, shards: int, heads: int) -> None:
    local = only(local_groups(config(([0], spec)), tp=tp))
    group = only(merge([[local]], any_tp=False))
    assert (local.page.shards, group.writers) == (shards, shards)
    assert (group.spec.shards, group.spec.shape[1]) == (shards, heads)
    assert group.spec.slot_bytes == shards * local.slot_bytes == shards * group.part_bytes


def test_sizes_of_tensor_parallelism_meet_where_heads_can_be_cut() -> None:
    """One model of 8 KV heads on 1, 2 and 4 ranks."""

    def specs(any_tp: bool, **changes: Any) -> set[Any]:
        found = [
            local_groups(config(([0, 1], full(num_kv_heads=8 // tp, **changes))), tp=tp) for tp in (1, 2, 4)
        ]
        return {only(merge([one], any_tp=any_tp)).spec for one in found}

    assert len(specs(any_tp=True)) == 1
    assert len(specs(any_tp=False)) == 3


@pytest.mark.parametrize(
    "of",
    [
        # Keys of all heads, then values of all heads: a slice of a whole is no rank's part.
        lambda tp: full(num_kv_heads=8 // tp, num_head_slots=16 // tp, state_content_bytes=80),
        lambda tp: full(num_kv_heads=8 // tp, num_head_slots=2, state_content_bytes=1024 // tp),
        lambda tp: mamba(shapes=((3, 48 // tp), (8 // tp, 8, 8))),
        # 2 heads on up to 4 ranks: the last two hold copies, and vLLM doesn't say so.
        lambda tp: full(num_kv_heads=max(1, 2 // tp), head_size=64),
    ],
)
def test_sizes_of_tensor_parallelism_never_meet_elsewhere(of: Any) -> None:
    found = [local_groups(config(([0], of(tp))), tp=tp) for tp in (2, 4)]
    assert len({only(merge([one], any_tp=True)).spec for one in found}) == 2


def test_states_keep_their_shards_for_any_size() -> None:
    group = only(merge([local_groups(config(([0], mamba())), tp=4)], any_tp=True))
    assert (group.spec.shards, group.writers) == (4, 4)


def test_what_all_ranks_hold_is_shared_by_every_size() -> None:
    found = [local_groups(config(([0], mla())), tp=tp) for tp in (1, 2, 8)]
    assert len({only(merge([one], any_tp=True)).spec for one in found}) == 1
    assert {only(merge([one], any_tp=False)).writers for one in found} == {1}


def stage(layers: Sequence[int], tp: int = 1, spec: KVCacheSpec | None = None) -> list[LocalGroup]:
    return local_groups(config((layers, spec or full())), tp=tp)


def test_stages_of_a_pipeline() -> None:
    group = only(merge([stage([0, 1, 2], tp=2), stage([3, 4], tp=2)], any_tp=False))
    assert group.spec.shape == (5, 4, BLOCK, 128)
    assert (group.spec.shards, group.writers) == (2, 4)
    # Segments are cut by what the fullest rank has to hold.
    assert group.part_bytes == 3 * 2 * BLOCK * 128 * 2
    digests = {
        only(merge(stages, any_tp=False)).spec.layers
        for stages in (
            [stage([0, 1, 2]), stage([3, 4])],
            [stage([0, 1]), stage([2, 3, 4])],
            [stage([0, 1, 2, 3, 4])],
            [stage([0, 1, 2]), stage([3, 5])],
        )
    }
    assert len(digests) == 4


def test_stages_of_which_one_lacks_a_table() -> None:
    """vLLM lists every table on every stage, also those of which it has no layer."""
    first = config(([0, 2], window()), ([1], window()), ([3], full()))
    second = config(([4], window()), ([], window()), ([5], full()))
    stages = [local_groups(first, tp=1), local_groups(second, tp=1)]
    merged = merge(stages, any_tp=False)
    assert [(group.spec.shape[0], group.tables) for group in merged] == [(2, (2,)), (4, (0, 1))]
    assert fails_by_request(second, stages[1])
    other_way = merge(list(reversed(stages)), any_tp=False)
    assert [group.tables for group in other_way] == [(2,), (0, 1)]
    # Though a stage has layers of one table only, the others' failures can't be told by block ids.
    lone = config(([0], full()), ([], full()))
    assert fails_by_request(lone, local_groups(lone, tp=1))


def test_stages_with_different_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_PP_LAYER_PARTITION"):
        merge([stage([0, 1]), stage([2, 3], spec=window())], any_tp=False)
    with pytest.raises(ConfigError, match="without KV cache"):
        local_groups(config(([], full())), tp=1)


@pytest.mark.parametrize(
    ("groups", "by_request"),
    [
        ([([0, 1], full())], False),
        ([([0, 1], mla())], False),
        ([([0, 1], window())], True),
        ([([0, 1], ChunkedLocalAttentionSpec(**attention(attention_chunk_size=64)))], True),
        ([([0, 1], mamba())], True),
        ([([0], full()), ([1], full())], True),
        ([([0], full()), ([1], window())], True),
    ],
)
def test_what_can_be_recomputed_from_the_middle(
    groups: list[tuple[list[int], KVCacheSpec]], by_request: bool
) -> None:
    made = config(*groups)
    assert fails_by_request(made, local_groups(made, tp=1)) == by_request


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SinkFullAttentionSpec(**attention(sink_len=4)), "SinkFullAttentionSpec is not supported"),
        (SlidingWindowMLASpec(**attention(sliding_window=64)), "SlidingWindowMLASpec is not supported"),
        (CrossAttentionSpec(**attention()), "CrossAttentionSpec is not supported"),
        (EncoderOnlyAttentionSpec(**attention()), "EncoderOnlyAttentionSpec is not supported"),
        (full(non_causal=True), "non-causal"),
        (full(dtype=torch.complex64), "no safetensors name"),
        (mamba(mamba_cache_mode="none"), "--enable-prefix-caching"),
        (full(max_tp_shards=3), "3 shards on 4"),
    ],
)
def test_what_can_t_be_shared_is_refused_in_words(spec: KVCacheSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        local_groups(config(([0], full()), ([1], spec)), tp=4)


def test_groups_that_vllm_does_not_hand_over_are_refused() -> None:
    for changes in ({"host_resident": True}, {"enable_kv_transfer": False}):
        with pytest.raises(ConfigError, match="FullAttentionSpec can't be found by its content"):
            local_groups(config(([0], full()), **changes), tp=1)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    given = ["l.10.attn", "l.9.attn", "l.9.attn2", "draft.0", "l.9.attn10", "l.0"]
    assert layer_order(given) == ["draft.0", "l.0", "l.9.attn", "l.9.attn2", "l.9.attn10", "l.10.attn"]
    assert layer_order(list(reversed(given))) == layer_order(given)


def test_a_page_travels_between_processes() -> None:
    import pickle

    group = only(stage([0, 1]))
    assert pickle.loads(pickle.dumps(group)) == group
    assert isinstance(group.page, Page) and hash(group) == hash(only(stage([0, 1])))
