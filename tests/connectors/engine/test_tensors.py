"""Gather and scatter against indexing by hand, for every layout that vLLM may give.

The tests marked `gpu` run the CUDA side: pinned staging, side streams, events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.tensors import Chunk, HostCopy, PagedCache, Staging
from kvstore.errors import CapacityExceeded
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine  # the full set-up, not an engine

B, L, H, N, C = 12, 3, 2, 4, 6

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="NO CUDA DEVICE: the CUDA paths are not tested"
        ),
    ],
)


def whole(order: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """All layers as [B, H, N, C] views of one buffer in a physical order such as BLHNC."""
    sizes = {"L": L, "B": B, "H": H, "N": N, "C": C}
    raw = torch.zeros([sizes[d] for d in order], dtype=dtype, device=device)
    logical = raw.permute([order.index(d) for d in "LBHNC"])
    return [logical[i] for i in range(L)]


def separate(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(B, H, N, C, dtype=dtype, device=device) for _ in range(L)]


def kernel_blocks(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Each block split into two kernel blocks of half the tokens."""
    return [torch.zeros(B * 2, H, N // 2, C, dtype=dtype, device=device) for _ in range(L)]


LAYOUTS: dict[str, Callable[..., list[torch.Tensor]]] = {
    **{order: (lambda device, dtype, order=order: whole(order, device, dtype)) for order in
       ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")},
    "separate": separate,
    "kernel blocks": kernel_blocks,
}  # fmt: skip


def logical(caches: list[torch.Tensor]) -> torch.Tensor:
    """[B, L, H, N, C], computed without the code under test."""
    layers = []
    for cache in caches:
        if cache.shape[0] != B:
            cache = torch.stack([torch.cat([cache[2 * b], cache[2 * b + 1]], dim=1) for b in range(B)])
        layers.append(cache)
    return torch.stack(layers, dim=1)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_are_canonical_and_come_back(layout: str, dtype: torch.dtype, device: str) -> None:
    caches = LAYOUTS[layout](device, dtype)
    for i, cache in enumerate(caches):
        values = torch.arange(cache.numel(), dtype=torch.float32).remainder(61) + i
        cache.copy_(values.view(cache.shape).to(dtype))
    before = logical(caches).clone()
    cache = PagedCache({3: caches}, B)
    staging = Staging(10 * cache.slot_bytes, 5 * cache.slot_bytes, pin=device == "cuda")
    chunk = staging.acquire(4 * cache.slot_bytes, time.monotonic() + 1)
    blocks = [7, 2, 11, 0]

    copied = cache.gather({3: blocks}, chunk)
    copied.wait()
    for view, block in zip(chunk.views(4, cache.slot_bytes), blocks, strict=True):
        expected = before[block].cpu().contiguous().view(torch.uint8).flatten().numpy().tobytes()
        assert bytes(view) == expected

    targets = [1, 3, 5, 8]
    cache.scatter({3: targets}, chunk, cache.mark())
    after = logical(caches)
    for target, block in zip(targets, blocks, strict=True):
        assert torch.equal(after[target].view(torch.uint8), before[block].view(torch.uint8))
    untouched = [b for b in range(B) if b not in targets]
    assert torch.equal(after[untouched].view(torch.uint8), before[untouched].view(torch.uint8))
    assert cache.layers_hold({3: [1]}, chunk.tensor)
    assert not cache.layers_hold({3: [1]}, chunk.tensor[cache.slot_bytes :])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_slot_takes_a_block_of_every_table(device: str) -> None:
    first, second = separate(device, torch.float32), separate(device, torch.float32)[:2]
    for i, layer in enumerate([*first, *second]):
        layer.copy_(torch.arange(layer.numel(), dtype=torch.float32).view(layer.shape) + 1000 * i)
    before = [layer.clone() for layer in (*first, *second)]
    cache = PagedCache({1: first, 4: second}, B)
    assert cache.shape == (L + 2, H, N, C)
    chunk = Staging(4 * cache.slot_bytes, cache.slot_bytes, pin=device == "cuda").acquire(
        4 * cache.slot_bytes, 0.0
    )
    cache.gather({1: [7, 2], 4: [5, 5]}, chunk).wait()
    slots = chunk.tensor[: 2 * cache.slot_bytes].view(torch.float32).view(2, L + 2, H, N, C)
    for slot, (one, other) in zip(slots, [(7, 5), (2, 5)], strict=True):
        for i, layer in enumerate(before):
            assert torch.equal(slot[i], layer[one if i < L else other].cpu())
    cache.scatter({1: [0, 1], 4: [2, 3]}, chunk, cache.mark())
    assert torch.equal(first[1][1], before[1][2])
    assert torch.equal(second[0][3], before[L][5])
    assert torch.equal(second[1][0], before[L + 1][0])
    assert cache.layers_hold({1: [0], 4: [2]}, chunk.tensor)
    assert not cache.layers_hold({1: [0], 4: [1]}, chunk.tensor)
    with pytest.raises(ValueError, match="differ"):
        PagedCache({0: first, 1: [torch.zeros(B, H, N, C + 1, device=device)]}, B)


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        PagedCache({0: [torch.zeros(B, H, N, C), torch.zeros(B, H, N, C + 1)]}, B)


def test_staging_is_bounded_and_waits_only_as_told() -> None:
    staging = Staging(1000, 400, pin=False)
    assert (staging.size_bytes, staging.used_bytes) == (1024, 0)
    held = [staging.try_acquire(512), staging.try_acquire(300)]
    assert all(held) and staging.try_acquire(300) is None
    assert staging.used_bytes == 512 + 320, "as much as is asked for, rounded up"
    with pytest.raises(CapacityExceeded):
        staging.acquire(300, time.monotonic() + 0.02)
    with pytest.raises(CapacityExceeded):
        staging.acquire(2000, time.monotonic() + PATIENCE_S)
    got: list[tuple[str, Chunk]] = []

    def wait(name: str, nbytes: int) -> None:
        got.append((name, staging.acquire(nbytes, time.monotonic() + PATIENCE_S)))

    # Who asks for less doesn't overtake who asked first.
    threads = [threading.Thread(target=wait, args=args) for args in (("much", 700), ("little", 64))]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda n=number: len(staging._waiting) == n + 1)
    assert held[1] is not None and held[0] is not None
    staging.release(held[1])
    assert not got
    staging.release(held[0])
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [name for name, _ in got] == ["much", "little"]
    for _, chunk in got:
        chunk.tensor.fill_(1)
        staging.release(chunk)
    assert staging.used_bytes == 0
    with pytest.raises(ValueError, match="staging_bytes"):
        Staging(99, 100, pin=False)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_host_copy_is_of_the_view_alone(device: str) -> None:
    storage = torch.arange(600, dtype=torch.bfloat16, device=device).view(100, 6)
    item = storage[10:13]
    copy = HostCopy(item)
    expected = item.cpu().view(torch.uint8).numpy().tobytes()
    data, dtype, shape = copy.wait()
    assert (bytes(data), dtype, shape) == (expected, "BF16", (3, 6))
    assert data.nbytes == 36
    if device == "cpu":
        storage.zero_()
        assert bytes(data) == expected
    transposed, _, shape = HostCopy(storage.T[:2]).wait()
    assert (transposed.nbytes, shape) == (2 * 100 * 2, (2, 100))
