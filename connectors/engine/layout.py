"""Derives groups from vLLM's KV cache configuration: which layers form a block, and which part a rank holds.

vLLM splits layers into KV cache groups so that their pages fill one pool evenly; layers of one kind may be
spread over several of them, each with a block table of its own, and layers of one of them may differ in page
shape. Storage goes by kind instead: a group here is all layers of one kind, one block size and one page
shape. So a block of it is one slot, from one or several tables.

A worker sees its own layers and its own heads. It tells the scheduler half (`LocalGroup`), which puts
stages and shards together (`merge`) into the groups that the namespace names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

from connectors.engine.tensors import SAFETENSORS_DTYPES
from kvstore.errors import ConfigError
from kvstore.rules.prefix import PrefixRule, rule_of
from schemas.namespace import DTYPE_BYTES, GroupKind, GroupSpec

_KINDS: dict[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "mamba",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one layer's block; all layers of a group have the same."""

    kind: GroupKind
    block_tokens: int
    #: How many tokens a window reaches back, or a chunk's length; 0 for the other kinds.
    window: int
    dtype: str
    #: Shape on one rank: [heads, tokens, content].
    heads: int
    tokens: int
    content: int
    #: Number of different parts that tensor parallelism cuts it into; further ranks hold copies.
    shards: int
    #: Whether vLLM offers the blocks that may be saved; the block table doesn't name them then.
    offered: bool
    #: Whether a backend packs a block's bytes as it likes (all keys, then all values, for instance): no slice
    #: of it is a head's or a token's then.
    packed: bool = False

    @property
    def rule(self) -> PrefixRule:
        """Returns the rule that says which blocks of such layers a prefix needs."""
        return rule_of(self.kind, self.block_tokens, self.window)


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """The part of a group that one rank holds. Picklable."""

    page: Page
    #: Pairs of a block table's number and the names of its layers in slot order, sorted by number.
    tables: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of this rank's part of a slot: (layers, heads, tokens, content)."""
        layers = sum(len(names) for _, names in self.tables)
        return layers, self.page.heads, self.page.tokens, self.page.content

    @property
    def slot_bytes(self) -> int:
        """Returns how many bytes this rank's part of a block has."""
        return prod(self.shape) * DTYPE_BYTES[self.page.dtype]


@dataclass(frozen=True, slots=True)
class Group:
    """One group as the scheduler half sees it: all ranks together."""

    spec: GroupSpec
    rule: PrefixRule
    #: Numbers of vLLM's block tables that a slot is made of.
    tables: tuple[int, ...]
    offered: bool
    #: Number of ranks that each write a part of a segment.
    writers: int
    #: Largest part of a block that any rank holds, in bytes.
    part_bytes: int


def local_groups(kv_cache_config: Any, tp: int) -> list[LocalGroup]:
    """Returns the groups of one rank, in an order that all ranks share. Raises ConfigError if its KV cache
    can't be stored."""
    cacheable = set(kv_cache_config.prefix_cacheable_group_ids)
    found: dict[Page, dict[int, list[str]]] = {}
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        if table not in cacheable or group.host_resident:
            kind = type(group.kv_cache_spec).__name__
            raise ConfigError(f"kvstore: KV cache kind {kind} can't be found by its content; not supported")
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in layer_order(group.layer_names):
            page = _page(group.kv_cache_spec if inner is None else inner[name], tp)
            found.setdefault(page, {}).setdefault(table, []).append(name)
    if not found:
        raise ConfigError("kvstore: a pipeline's stage without KV cache of its own; not supported")
    groups = [
        LocalGroup(page, tuple((table, tuple(names)) for table, names in sorted(tables.items())))
        for page, tables in found.items()
    ]
    return sorted(groups, key=lambda group: _order(group.page))


def fails_by_request(kv_cache_config: Any, groups: Sequence[LocalGroup]) -> bool:
    """Returns whether a failed load must be reported by its request, which is then computed from the start.

    vLLM can't tell whose a failed block is once there are several tables, of some of which a pipeline's stage
    may have no layers. And it would go on from the first failed block, before which a window or a state has
    nothing.
    """
    tables = len(kv_cache_config.kv_cache_groups)
    return tables > 1 or len(groups) > 1 or groups[0].page.rule.reach != "prefix"


def _order(page: Page) -> tuple[Any, ...]:
    # Every field counts, so that no two pages are in the order in which some rank happened to come upon them.
    return (list(_KINDS.values()).index(page.kind), *astuple(page))


def layer_order(names: Sequence[str]) -> list[str]:
    """Returns layer names in slot order: by their numbers, so that `layers.10` follows `layers.9`."""
    return sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def _page(spec: Any, tp: int) -> Page:
    name = type(spec).__name__
    if name not in _KINDS:
        raise ConfigError(f"kvstore: KV cache kind {name} is not supported yet")
    kind = _KINDS[name]
    if getattr(spec, "non_causal", False):
        raise ConfigError("kvstore: a block of a non-causal model depends on what follows it; not shareable")
    if kind == "mamba":
        return _state_page(spec, tp)
    dtype = SAFETENSORS_DTYPES.get(spec.dtype)
    if dtype is None:
        raise ConfigError(f"kvstore: KV cache dtype {spec.dtype} has no safetensors name; not supported")
    # Ranks beyond `max_tp_shards` hold copies of what other ranks hold. Where vLLM doesn't give that number,
    # no copies are assumed: vLLM knows the number of KV heads for the model only, and layers may differ in
    # it. So a rank with a single head may or may not hold the same as another rank.
    shards = min(tp, spec.max_tp_shards or tp)
    if tp % shards:
        raise ConfigError(
            f"kvstore: KV heads in {shards} shards on {tp} tensor-parallel ranks; not supported"
        )
    window = 0
    if kind == "sliding_window":
        window = spec.sliding_window + spec.extra_retained_tokens
    elif kind == "chunked_local":
        window = spec.attention_chunk_size
    return Page(
        kind,
        spec.block_size,
        window,
        dtype,
        spec.num_heads,
        spec.num_states,
        spec.state_content_size_bytes // spec.dtype.itemsize,
        shards,
        offered=False,
        packed=spec.num_head_slots is not None or getattr(spec, "cache_role", None) == "indexer",
    )


def _state_page(spec: Any, tp: int) -> Page:
    if spec.mamba_cache_mode not in ("all", "align"):
        raise ConfigError(
            "kvstore: this model's linear-attention states are kept for the running request only (Mamba "
            f"cache mode {spec.mamba_cache_mode!r}), so no prefix could be resumed; start vLLM with "
            "--enable-prefix-caching"
        )
    # vLLM hands states out as bytes: several tensors of different dtypes, back to back.
    shards = 1 if getattr(spec, "tp_replicated", False) else tp
    size, offered = spec.state_content_size_bytes, spec.mamba_cache_mode == "align"
    return Page("mamba", spec.block_size, 0, "I8", 1, 1, size, shards, offered, packed=True)


def merge(stages: Sequence[Sequence[LocalGroup]], *, any_tp: bool) -> list[Group]:
    """Returns the engine's groups, merged from those of one rank per pipeline stage.

    With `any_tp` engines of any tensor-parallel size share them. Raises ConfigError if the stages differ in
    more than their layers.
    """
    first = stages[0]
    for stage in stages[1:]:
        if [group.page for group in stage] != [group.page for group in first]:
            raise ConfigError(
                "kvstore: the pipeline's stages hold layers of different kinds or page sizes; not supported. "
                "A layer partition (VLLM_PP_LAYER_PARTITION) that gives each stage all kinds helps"
            )
    return [_merged([stage[i] for stage in stages], any_tp) for i in range(len(first))]


def _merged(parts: list[LocalGroup], any_tp: bool) -> Group:
    page = parts[0].page
    names = [name for part in parts for _, layers in part.tables for name in layers]
    # The digest separates stages, because a pipeline that is cut elsewhere has different parts.
    text = "\n\n".join("\n".join(n for _, layers in part.tables for n in layers) for part in parts)
    spec = GroupSpec(
        kind=page.kind,
        block_tokens=page.block_tokens,
        dtype=page.dtype,
        shape=(len(names), page.heads * page.shards, page.tokens, page.content),
        layers=hashlib.sha256(text.encode()).hexdigest()[:16],
        shards=1 if any_tp and not page.packed else page.shards,
        window=page.window or None,
    )
    return Group(
        spec,
        page.rule,
        tuple(sorted({table for part in parts for table, _ in part.tables})),
        page.offered,
        page.shards * len(parts),
        max(part.slot_bytes for part in parts),
    )
