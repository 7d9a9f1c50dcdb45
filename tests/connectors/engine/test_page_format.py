"""The name of what fills a page: engines that would read each other's bytes wrongly have different ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.distributed.kv_transfer.kv_connector import utils as vllm_connectors
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from connectors.engine.identity import page_format
from connectors.engine.layout import local_groups
from connectors.engine.tensors import PagedCache, Staging

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 32, 4
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
FP8 = replace(FULL, dtype=torch.uint8)
#: As FlashInfer's `customize_spec` makes it: [K data | K scale | V data | V scale], head by head.
NVFP4 = replace(FP8, num_head_slots=4, state_content_bytes=36)
INDEXER = MLAAttentionSpec(
    block_size=BLOCK,
    num_kv_heads=1,
    max_tp_shards=1,
    head_size=132,
    head_size_v=0,
    dtype=torch.uint8,
    cache_role=SparseCacheRole.INDEXER,
)
STATE = MambaSpec(block_size=BLOCK, shapes=((3, 40),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
#: Layouts and the tokens of a kernel's block; vLLM splits only blocks that are one dense page.
SHAPES = [
    *((layout, kernel) for layout in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC) for kernel in (32, 16, 8)),
    *((layout, BLOCK) for layout in KVCacheLayout),
]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = SimpleNamespace(get_name=lambda: "KERNELS")
    monkeypatch.setattr(vllm_connectors, "get_current_attn_backends", lambda *_: [attention])


class Engine:
    """A rank's groups and paged caches, as vLLM allocates them."""

    def __init__(self, spec: KVCacheSpec, layout: KVCacheLayout, kernel: int = BLOCK) -> None:
        names = ["layers.0", "layers.1"]
        strides = compute_layout_strides(spec, BLOCKS, len(names), layout)
        size = len(names) * BLOCKS * spec.page_size_bytes
        config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[KVCacheTensor(size, names, strides[0], strides[1])],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )
        self.groups = local_groups(config, tp=1)
        self.layers = list(allocate_kv_cache(config, torch.device("cpu"), layout, [kernel]).values())
        self.cache = PagedCache({0: self.layers}, BLOCKS)

    @property
    def name(self) -> str:
        config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
        return page_format(config, self.groups, [self.cache])

    def page(self, block: int) -> bytes:
        """A block's bytes in the first layer, kernel block by kernel block, in the order of memory, by which
        kernels of packed pages go."""
        layer = self.layers[0]
        kernels = layer.shape[0] // BLOCKS
        pages = layer[block * kernels : (block + 1) * kernels]
        order = sorted(range(1, 4), key=lambda dim: -layer.stride(dim))
        return pages.permute(0, *order).contiguous().view(torch.uint8).numpy().tobytes()


def moved(source: Engine, target: Engine) -> bool:
    """Whether a block that goes from one engine to the other by the store is byte for byte what it was."""
    staging = Staging(source.cache.slot_bytes, source.cache.slot_bytes, pin=False)
    chunk = staging.try_acquire(source.cache.slot_bytes)
    assert chunk is not None
    for layer in source.layers:
        layer.view(torch.uint8).random_(0, 256)
    source.cache.gather({0: [1]}, chunk).wait()
    target.cache.scatter({0: [2]}, chunk, None)
    return source.page(1) == target.page(2)


def test_packed_pages_that_differ_have_names_that_differ() -> None:
    engines = [Engine(NVFP4, layout, kernel) for layout, kernel in SHAPES]
    wrong = 0
    for one in engines:
        for other in engines:
            if one.name == other.name:
                assert moved(one, other)
            wrong += not moved(one, other)
    assert wrong > 0, "no two of them differ, so nothing was shown"
    # Equal bytes of another kernel block mean something else: where its scales are.
    assert {engine.name for engine in engines} == {
        f"cpu/KERNELS/{kernel}{order}/unknown" for kernel in (32, 16, 8) for order in ("HN", "NH")
    }


def test_the_kernel_block_of_an_indexer_is_in_its_name() -> None:
    named = {Engine(INDEXER, layout, kernel).name for layout, kernel in SHAPES}
    assert named == {f"cpu/KERNELS/{kernel}HN/unknown" for kernel in (32, 16, 8)}


@pytest.mark.parametrize("spec", [FULL, FP8, STATE], ids=["bf16", "fp8", "state"])
def test_names_of_plain_pages_are_what_they_were(spec: KVCacheSpec) -> None:
    shapes = SHAPES[:1] if spec is STATE else SHAPES
    assert {Engine(spec, layout, kernel).name for layout, kernel in shapes} == {"cpu/KERNELS/unknown"}


@pytest.mark.parametrize(
    ("spec", "same"), [(FULL, True), (STATE, True), (FP8, False), (NVFP4, False), (INDEXER, False)]
)
def test_two_vendors_share_what_means_the_same(
    spec: KVCacheSpec, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(spec, KVCacheLayout.LBHNC)
    name = engine.name
    # MI300's numbers of 8 bits are e4m3fnuz: the same bits mean half of what they mean elsewhere.
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    monkeypatch.setattr(type(current_platform), "device_name", "rocm")
    assert (engine.name == name) is same


def test_a_vendor_packs_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    # MI350 has the numbers of 8 bits that everybody else has.
    engine = Engine(NVFP4, KVCacheLayout.LBHNC)
    name = engine.name
    monkeypatch.setattr(type(current_platform), "device_name", "rocm")
    assert engine.name == name.replace("cpu/", "rocm/", 1) != name
