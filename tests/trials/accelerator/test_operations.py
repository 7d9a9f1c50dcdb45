"""One operation copies pages in every layout of vLLM; without a kernel torch copies what no view joins."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from connectors.engine.layout import local_groups
from connectors.engine.tensors import PagedCache
from tests.connectors.engine.paging.pools import Pool
from tests.connectors.engine.paging.test_pages import GATHER, SCATTER, there_and_back
from tools.models import build
from trials.accelerator.configs import configured
from trials.accelerator.device import Accelerator
from trials.accelerator.engine import MODELS, on
from trials.accelerator.layouts import LAYOUTS
from trials.accelerator.plan import Plan

pytestmark = pytest.mark.engine  # the full set-up, not an engine


def pools(layout: str) -> list[Pool]:
    """A rank's groups as vLLM lays them out."""
    made = LAYOUTS[layout]
    config = configured(build(MODELS, "text"), Plan.of(0), made)
    [cache] = get_kv_cache_configs(config, [dict(made.specs)], [1 << 30])
    cache.kv_cache_layout = made.order
    sizes = [made.kernel_tokens] * len(cache.kv_cache_groups) if made.kernel_tokens else None
    raw = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[made.order], sizes)
    return [
        Pool({table: [raw[name] for name in names] for table, names in group.tables}, cache.num_blocks)
        for group in local_groups(cache, tp=1)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_operation_each_way_for_every_layout_of_vllm(layout: str) -> None:
    for seed, pool in enumerate(pools(layout)):
        assert there_and_back(pool, seed) == (GATHER, SCATTER)


def test_without_a_kernel_torch_copies_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(1, "eager")
    with on(accelerator):
        layers = [accelerator.adopt(torch.zeros(6, 1, 2, 8)) for _ in range(3)]
        assert PagedCache({0: layers[:1]}, 6)._pages.operations == 1
        assert not caplog.records
        assert PagedCache({0: layers}, 6)._pages.operations == 3
    assert "layer by layer" in caplog.text
