"""The lines of a trace's file (kvstore.store.trace says what is in them)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvstore.keys import DIGEST_BYTES, NamespaceId

VERSION = 1
#: Bytes of a digest that a trace keeps, and the dtype by which they are read.
WORD_BYTES = 8
WORD = "<u8"

#: Blocks whose line is remembered. When there are more, all are forgotten and prefixes written once more.
_REMEMBERED = 1 << 17


class RecordedEntry(NamedTuple):
    """A request, or hints on a session, or costs: these have no digests."""

    namespace: NamespaceId
    #: Packed, or a function that packs them and returns None if it can't.
    digests: bytes | Callable[[], bytes | None]
    now_s: float
    #: The rest of the line, as JSON: a text that begins with a comma, or an empty one.
    more: str


class RecordedLines:
    """The lines of one file, which refer to each other."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._count = 0
        self._spaces: dict[NamespaceId, int] = {}
        #: Per space, a block's word -> the line on which it came first. Blocks are chained, so what precedes
        #: one there precedes it everywhere.
        self._seen: list[dict[int, int]] = []
        self._blocks = 0

    def head(self) -> bytes:
        self._count += 1
        return f'{{"kvstore_trace": {VERSION}, "began_s": {self._began_s:.3f}}}\n'.encode()

    def of(self, about: str, entry: RecordedEntry, digests: bytes) -> bytes:
        """Returns the line of an entry, and before it the line of its namespace if there is none yet."""
        out = ""
        space = self._spaces.get(entry.namespace)
        if space is None:
            space = self._spaces[entry.namespace] = len(self._spaces)
            self._seen.append({})
            out = f'{{"space": {space}, {about}\n'
            self._count += 1
        chain = ""
        if digests:
            words = np.frombuffer(digests, dtype=WORD)[1 :: DIGEST_BYTES // WORD_BYTES]
            like, line = self._known(self._seen[space], words.tolist())
            rest = base64.b64encode(words[like:].tobytes()).decode("ascii")
            chain = (f', "like": [{line}, {like}]' if like else "") + f', "d": "{rest}"'
        out += f'{{"t": {entry.now_s - self._began_s:.3f}, "n": {space}{chain}{entry.more}}}\n'
        self._count += 1
        return out.encode("ascii")

    def _known(self, seen: dict[int, int], words: list[int]) -> tuple[int, int]:
        """Returns how many leading blocks another line has, and which; remembers the rest as this one's."""
        known = 0
        if words[-1] in seen:
            known = len(words)
        else:
            # The remembered blocks of a chain begin with its first block, so the search finds their end. Even
            # if they did not, it would find blocks that the line has.
            beyond = len(words) - 1
            while known < beyond:
                middle = (known + beyond + 1) // 2
                if words[middle - 1] in seen:
                    known = middle
                else:
                    beyond = middle - 1
        line = seen[words[known - 1]] if known else 0
        fresh = words[known:]
        if self._blocks + len(fresh) > _REMEMBERED:
            for each in self._seen:
                each.clear()
            self._blocks, fresh = 0, words
        seen.update(dict.fromkeys(fresh, self._count))
        self._blocks += len(fresh)
        return known, line
