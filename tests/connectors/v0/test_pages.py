"""v0's paged caches and rows against indexing by hand. The tests marked `gpu` run them on CUDA."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.v0.pages import Pages, Rows, Unsupported
from connectors.v0.planning import Prompt
from connectors.v0.stage import Stage, Step

pytestmark = pytest.mark.engine  # the full set-up, not an engine

L, B, N, H, S = 3, 10, 4, 2, 5

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="NO CUDA DEVICE: the CUDA paths are not tested"
        ),
    ],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Any bits: also the ones that are no number."""
    drawn = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=drawn)
    return flat.view(dtype).view(shape).to(device)


def caches(mla: bool, dtype: torch.dtype, device: str, seed: int) -> list[torch.Tensor]:
    """FlashAttention's layout, or MLA's with padded rows."""
    if mla:
        return [noise((B, N, S + 3), dtype, device, seed + layer)[..., :S] for layer in range(L)]
    return [noise((2, B, N, H, S), dtype, device, seed + layer) for layer in range(L)]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().cpu().view(torch.uint8).flatten().numpy())


def by_hand(layers: list[torch.Tensor], slots: list[int], mla: bool) -> bytes:
    """[layer, head, token, key then value] of one run of tokens."""
    out = b""
    for cache in layers:
        for head in range(1 if mla else H):
            for slot in slots:
                block, offset = slot // N, slot % N
                if mla:
                    out += bits(cache[block, offset])
                else:
                    out += bits(cache[0, block, offset, head]) + bits(cache[1, block, offset, head])
    return out


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]


@DEVICES
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_token_is_read_from_its_slot_and_written_to_its_slot(
    dtype: torch.dtype, mla: bool, device: str
) -> None:
    source, target = caches(mla, dtype, device, 1), caches(mla, dtype, device, 9)
    slots = torch.randperm(B * N, generator=torch.Generator().manual_seed(3))[: 6 * N].to(device)
    pages = Pages(source, N, mla=mla)
    assert pages.slots == B * N and pages.token_bytes == L * (S if mla else 2 * H * S) * dtype.itemsize
    read = pages.read(slots, N)
    numbers = slots.tolist()
    assert [bits(run) for run in read] == [
        by_hand(source, numbers[at : at + N], mla) for at in range(0, 6 * N, N)
    ]
    before = [cache.clone() for cache in target]
    # From the middle of a larger buffer in host memory, at an odd offset.
    held = torch.zeros(read.numel() + 2, dtype=torch.uint8)
    held[1:-1] = read.flatten().cpu()
    Pages(target, N, mla=mla).write(slots, held[1:-1].view(read.shape), N)
    for slot in range(B * N):
        expected = source if slot in numbers else before
        assert by_hand(target, [slot], mla) == by_hand(expected, [slot], mla)


@given(st.integers(1, 30), st.integers(1, 5), st.booleans(), st.booleans(), st.data())
def test_a_chain_that_was_gathered_is_placed_where_it_came_from(
    tokens: int, block: int, last: bool, mla: bool, data: st.DataObject
) -> None:
    """Any prompt, at any row of a step, in any pieces."""
    before = data.draw(st.integers(0, 5))
    rows = (
        Rows.hidden(3, torch.bfloat16)
        if last
        else Rows.between({"b": torch.empty(1, 3, dtype=torch.float16), "a": torch.empty(1, 2, 2)})
    )
    shape = (40, block, S) if mla else (2, 40, block, H, S)
    kinds = [torch.randn(shape) for _ in range(L)], [torch.zeros(shape) for _ in range(L)]
    total = before + tokens
    if total > 40 * block:
        return
    outputs = [
        [noise((total, *inner), dtype, "cpu", seed) for inner, dtype in zip(rows.shapes, rows.dtypes)]
        for seed in (1, 2)
    ]
    slots = torch.randperm(40 * block)[:total]
    step = Step(total, [Prompt(before, tokens)], True, None, slots)  # type: ignore[arg-type]
    prompt = Prompt(before, tokens)
    source, target = (Stage(Pages(one, block, mla=mla), rows, None, block) for one in kinds)  # type: ignore[arg-type]
    sizes = source.sizes(prompt)
    assert len(sizes) == len(source.formats(prompt)) == tokens // block + 1
    cuts = sorted({0, len(sizes), *data.draw(st.lists(st.integers(0, len(sizes)), max_size=3))})
    for first, stop in pairwise(cuts):
        span = range(first, stop)
        held = source.gather(step, prompt, span, outputs[0])
        assert held.numel() == sum(sizes[first:stop])
        target.place(step, prompt, span, held, outputs[1])
    mine = slots[before:].tolist()
    places = [(slot // block, slot % block) for slot in mine]
    for one, other in zip(*kinds):
        for place in places:
            index = place if mla else (slice(None), *place)
            assert torch.equal(one[index], other[index])
    kept = range(total - 1, total) if last else range(before, total)
    for one, other in zip(*outputs):
        assert bits(one[kept.start : kept.stop]) == bits(other[kept.start : kept.stop])


def test_an_end_of_another_length_is_refused() -> None:
    rows, prompt = Rows.hidden(3, torch.float32), Prompt(0, 6)
    stage = Stage(Pages(caches(False, torch.float32, "cpu", 1), N, mla=False), rows, None, N)  # type: ignore[arg-type]
    step = Step(6, [prompt], True, None, torch.arange(6))  # type: ignore[arg-type]
    hidden = [torch.zeros(6, 3)]
    held = stage.gather(step, prompt, range(1, 2), hidden)
    stage.place(step, prompt, range(1, 2), held, hidden)
    held[-8] = 7
    with pytest.raises(Unsupported, match="another length"):
        stage.place(step, prompt, range(1, 2), held, hidden)


@pytest.mark.parametrize(
    ("shapes", "mla"),
    [
        ([], False),
        ([(2, B, N * H * S)], False),  # PagedAttention: a block's tokens are interleaved
        ([(2, B, H, N, S)], False),  # heads before tokens
        ([(B, 2, N, H, S)], False),  # FlashInfer
        ([(2, B, N, H, S)], True),
        ([(B, 2 * N, S)], True),
        ([(2, B, N, H, S), (2, B, N, H, S + 1)], False),
    ],
    ids=str,
)
def test_other_layouts_are_refused(shapes: list[tuple[int, ...]], mla: bool) -> None:
    with pytest.raises(Unsupported):
        Pages([torch.zeros(shape) for shape in shapes], N, mla=mla)


def test_an_output_that_is_not_as_expected_is_refused() -> None:
    hidden = Rows.hidden(3, torch.float32)
    assert len(hidden.of(torch.zeros(4, 3), 4)) == 1
    for wrong in (torch.zeros(5, 3), torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.float16), None, [1]):
        with pytest.raises(Unsupported):
            hidden.of(wrong, 4)
    between = Rows.between({"a": torch.zeros(1, 2), "b": torch.zeros(1, 3)})
    for wrong in ({"a": torch.zeros(4, 2)}, {"a": torch.zeros(4, 2), "c": torch.zeros(4, 3)}, {}):
        with pytest.raises(Unsupported):
            between.of(type("Output", (), {"tensors": wrong})(), 4)
    assert hidden.describe() != Rows.hidden(4, torch.float32).describe() != between.describe()
