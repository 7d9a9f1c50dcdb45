"""What the KV of every position must be: bytes that follow from the tokens up to it, the layer and the head.

Two requests agree in a position's bytes exactly if they agree in all tokens up to there, as in a real model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_STEP, _HEAD, _MIX = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0xD6E8FEB86659FD93),
)


class Chain:
    """The states of one request's positions, which is all that its KV depends on."""

    def __init__(self, prompt: Sequence[int], vocabulary: int) -> None:
        self.tokens = list(prompt)
        self._vocabulary = vocabulary
        self._states: list[int] = []

    def states(self, start: int, end: int) -> np.ndarray:
        """The states after the positions `start` to `end - 1`, as uint64; what follows the known tokens is
        what the model samples."""
        while len(self._states) < end:
            at = len(self._states)
            if at == len(self.tokens):
                self.tokens.append(self.sample(at))
            state = ((self._states[-1] if at else 1) ^ (self.tokens[at] + 1)) * 0xBF58476D1CE4E5B9 & _MASK
            self._states.append(state ^ state >> 31)
        return np.array(self._states[start:end], np.uint64)

    def sample(self, length: int) -> int:
        """The token that the model samples after `length` tokens."""
        if length < len(self.tokens):
            return self.tokens[length]
        self.states(length - 1, length)
        return self._states[length - 1] % self._vocabulary


def salt(layer: str) -> np.uint64:
    """What tells a layer from others."""
    return np.uint64(zlib.crc32(layer.encode()) << 20)


def pattern(states: np.ndarray, layer: str, heads: range, content: int) -> np.ndarray:
    """The bytes of positions with these states, of some of a model's heads: uint8 [heads, positions,
    content]."""
    numbers = np.arange(heads.start, heads.stop, dtype=np.uint64)
    cells = (numbers * _HEAD)[:, None, None] + np.arange(content, dtype=np.uint64)
    mixed = (states[None, :, None] ^ salt(layer)) * _MIX + cells * _STEP
    mixed ^= mixed >> np.uint64(29)
    return (mixed * _HEAD >> np.uint64(56)).astype(np.uint8)
