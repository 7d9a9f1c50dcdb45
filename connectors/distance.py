"""How far what is stored lies from what is computed, and how far is too far.

Two computations of one block differ: batches are cut otherwise, and floating-point sums are made in another
order. The distance of a block is the largest, over its layers and heads, of the median over its tokens of

    |computed - stored| / (|stored| + a tenth of the head's mean |stored|)

with |x| as the Euclidean norm over the content. The second summand keeps tokens whose state is almost nothing
from deciding. The median keeps single tokens from deciding: in a model with experts rounding can send a token
to another expert, and its state is then far off and right all the same. So a comparison misses a single wrong
token, and finds a wrong head of a single layer. Blocks of other tokens are about 1 to 1.4 apart. Rounding
makes a few thousandths (bf16) or millionths (float32). So the bounds by dtype leave room on either side.
Within the bounds the tolerance is learned, once enough blocks of a group have been compared: `_MARGIN` times
the largest distance among the blocks that were alike, if that is less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from connectors.engine.tensors import TORCH_DTYPES

#: Distances by dtype, in safetensors' names: what is always tolerated, and what never is. Dtypes without a
#: line are opaque bytes in a format of the engine's own; their distance is that of the bytes as numbers.
_BOUNDS = {
    "F64": (1e-6, 0.01),
    "F32": (1e-4, 0.05),
    "F16": (5e-3, 0.15),
    "BF16": (2e-2, 0.2),
    "F8_E4M3": (8e-2, 0.35),
    "F8_E5M2": (0.15, 0.4),
}
_OPAQUE_BOUNDS = (0.1, 0.35)
#: Number of blocks of a group that must have been alike before their distances set the tolerance, and how far
#: above the largest of them it lies.
_ENOUGH = 64
_MARGIN = 16.0
#: How many times the distance that is always tolerated a proof may be apart.
_PROOF = 5.0


class Tolerance:
    """The distance of blocks of one group that is taken for rounding. For one thread at a time."""

    def __init__(self, dtype: str) -> None:
        self._least, self._most = _BOUNDS.get(dtype, _OPAQUE_BOUNDS)
        self._alike = 0
        self._largest = 0.0

    @property
    def limit(self) -> float:
        """Returns the largest distance that is tolerated now."""
        if self._alike < _ENOUGH:
            return self._most
        return min(self._most, max(self._least, _MARGIN * self._largest))

    def proves(self, distances: Sequence[float]) -> bool:
        """Returns whether blocks at these distances show that a writer computes what this rank computes. They
        must be closer than what is merely tolerated: a coarser dtype, too, is close."""
        return max(distances) <= min(self.limit, _PROOF * self._least)

    def judge(self, distances: Sequence[float]) -> bool:
        """Returns whether blocks at these distances are alike, and learns from them if they are."""
        largest = max(distances)
        # A distance that isn't a number is not within any limit.
        if not largest <= self.limit:
            return False
        self._alike += len(distances)
        self._largest = max(self._largest, largest)
        return True


def distances(
    computed: torch.Tensor, stored: torch.Tensor, dtype: str, shape: tuple[int, int, int, int]
) -> list[float]:
    """Returns the distance of each block.

    Both are uint8 [blocks, slot bytes], each slot [layers, heads, tokens, content] of `dtype`, a safetensors
    name. A distance is infinite where a number of one side only isn't one. In a block's last token that
    counts for this token alone: in a draft model's layers it follows from the next token, too, which the
    block's name doesn't cover.
    """
    kind = TORCH_DTYPES.get(dtype, torch.uint8) if dtype in _BOUNDS else torch.uint8
    layers, heads, tokens, _ = shape
    worst = []
    # A block at a time: all of a segment as float32 would take more memory than staging has.
    for mine, theirs in zip(computed, stored, strict=True):
        one, other = (side.view(kind).view(layers, heads, tokens, -1).float() for side in (mine, theirs))
        if not torch.equal(one[:, :, :-1].isnan(), other[:, :, :-1].isnan()):
            worst.append(math.inf)
            continue
        gap, size = (one - other).norm(dim=3), other.norm(dim=3)
        mean = torch.where(size.isfinite(), size, math.nan).nanmean(dim=2, keepdim=True)
        apart = gap / (size + 0.1 * mean).clamp_min(torch.finfo(torch.float32).tiny)
        # The same bits are the same, whatever they stand for.
        same = (mine == theirs).view(layers, heads, tokens, -1).all(dim=3)
        apart = torch.where(same, 0.0, apart).nan_to_num(nan=math.inf)
        worst.append(float(apart.median(dim=2).values.max()))
    return worst
