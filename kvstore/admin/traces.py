"""Traces of requests, read: our own (kvstore.trace) and Mooncake's, into chains of numbered blocks.

Mooncake's public traces are JSON lines as well (kvcache-ai/Mooncake, FAST25-release/traces):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

milliseconds, tokens, and one id per block of 512 tokens. The last id may stand for a block that isn't full,
which no cache holds, so as many ids count as there are full blocks in `input_length`. Tools that make such
traces use other block sizes too, so it is an option.

A block here is a node of a tree: the block before it and its own name. Equal names in two places of the tree
are different blocks, so that whatever a file says, what is replayed are chains with common prefixes.

Files are taken for hostile: lines are bounded, and what makes no sense is skipped and counted.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.admin.progress import Progress
from kvstore.errors import ConfigError
from kvstore.index.contract import MAX_RANKS
from kvstore.trace import VERSION, WORD, WORD_BYTES

#: The longest line that is looked at: a prompt of three million blocks.
MAX_LINE = 32 << 20
#: References to blocks in all files together: what replaying holds in memory, eight bytes each and more.
MAX_REFERENCES = 100_000_000
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_MAX_TOKENS = 1 << 20
_MAX_BYTES = 1 << 40


class BadTrace(ConfigError):
    """A file that is no trace, or can't be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a trace's file doesn't say."""

    #: Bytes of a block, of all ranks together. None: what our own traces say; for others 128 KiB a token.
    block_bytes: int | None = None
    #: Tokens of a block, for Mooncake's format.
    block_tokens: int = 512

    @property
    def foreign_bytes(self) -> int:
        """Bytes of a block of a trace that doesn't say."""
        return self.block_bytes or self.block_tokens * KV_BYTES_PER_TOKEN


#: Of a model such as Llama-3-8B in bf16.
KV_BYTES_PER_TOKEN = 128 << 10


@dataclass(frozen=True, slots=True)
class TracedSpace:
    """What the blocks of one namespace are. `namespace` is "" where a trace knows of none."""

    namespace: str
    kind: str
    block_tokens: int
    block_bytes: int
    #: Into how many payloads a segment is cut.
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a chain of blocks, by their numbers."""

    at_s: float
    space: int
    chain: list[int]


@dataclass
class Trace:
    """Requests in the order of time, and what their blocks are. Blocks are numbered from 0."""

    spaces: list[TracedSpace] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    #: Per block, the number of its space.
    space_of: list[int] = field(default_factory=list)
    references: int = 0
    #: Lines that made no sense, a torn last one included.
    skipped: int = 0

    @property
    def blocks(self) -> int:
        """How many different blocks there are."""
        return len(self.space_of)

    def weights(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of every block."""
        sizes = np.array([space.block_bytes for space in self.spaces], dtype=np.int64)
        return sizes[np.array(self.space_of, dtype=np.int64)]

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all blocks, each counted once: a cache of this size forgets nothing."""
        return int(self.weights().sum()) if self.blocks else 0


def read_traces(paths: Sequence[Path], assumed: Assumed, progress: Progress) -> Trace:
    """Read trace files, and those named *.jsonl in folders. Raises BadTrace."""
    files = list(_files(paths))
    try:
        total = sum(path.stat().st_size for path in files)
    except OSError as exc:
        raise BadTrace(f"trace {exc.filename}: {exc.strerror}") from exc
    progress.begin("reading the trace", total)
    forest = _Forest(Trace(), assumed)
    for path in files:
        before = len(forest.trace.requests)
        try:
            skipped = _read(path, forest, progress)
        except OSError as exc:
            raise BadTrace(f"trace {path}: {exc.strerror}") from exc
        if skipped and len(forest.trace.requests) == before:
            raise BadTrace(
                f"{path} is no trace: those are written by engines (settings: trace.folder), or have lines "
                'of Mooncake\'s form, {"timestamp": ..., "input_length": ..., "hash_ids": [...]}'
            )
        forest.trace.skipped += skipped
    if not forest.trace.requests:
        raise BadTrace(f"no request in {', '.join(map(str, paths))}")
    forest.trace.requests.sort(key=lambda request: request.at_s)
    return forest.trace


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise BadTrace(f"no file *.jsonl in {path}")
        yield from found


def _read(path: Path, forest: _Forest, progress: Progress) -> int:
    """Read one file; returns how many lines were skipped."""
    skipped = 0
    file = _File(forest)
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE):
            progress.advance(len(line))
            whole = len(line) < MAX_LINE or line.endswith(b"\n")
            if not whole:
                while rest := lines.readline(MAX_LINE):
                    progress.advance(len(rest))
                    if rest.endswith(b"\n"):
                        break
            if not (whole and (not line.strip() or file.take(number, line))):
                skipped += 1
            number += 1
            if forest.trace.references > MAX_REFERENCES:
                raise BadTrace(
                    f"more than {MAX_REFERENCES:,} references to blocks; give fewer files, or the head of one"
                )
    return skipped


class _Forest:
    """Trees of blocks, one per space."""

    def __init__(self, trace: Trace, assumed: Assumed) -> None:
        self.trace = trace
        self.assumed = assumed
        self._numbers: dict[TracedSpace, int] = {}
        #: Per space, a block's name -> its number, if it stands where that block was seen first.
        self._named: list[dict[int | str, int]] = []
        #: Names that are seen in several places: (the block before, name) -> number.
        self._elsewhere: dict[tuple[int, int | str], int] = {}
        self._parent: list[int] = []

    def space(self, about: TracedSpace) -> int:
        """The number of a space."""
        if about not in self._numbers:
            self._numbers[about] = len(self.trace.spaces)
            self.trace.spaces.append(about)
            self._named.append({})
        return self._numbers[about]

    def add(self, at_s: float, space: int, known: list[int], names: Sequence[int | str]) -> list[int]:
        """A request for the blocks `known`, followed by those of these names; returns its chain."""
        named, parent = self._named[space], self._parent
        chain = known
        # A root's parent is one of its space's own, so that spaces don't share trees.
        last = known[-1] if known else -1 - space
        for name in names:
            block = named.get(name)
            if block is None:
                block = named[name] = self._new(last, space)
            elif parent[block] != last:
                other = self._elsewhere.get((last, name))
                block = self._elsewhere[last, name] = self._new(last, space) if other is None else other
            chain.append(block)
            last = block
        self.trace.requests.append(Request(at_s, space, chain))
        self.trace.references += len(chain)
        return chain

    def _new(self, parent: int, space: int) -> int:
        self._parent.append(parent)
        self.trace.space_of.append(space)
        return len(self._parent) - 1


class _File:
    """One file as it is read, of either form."""

    def __init__(self, forest: _Forest) -> None:
        self._forest = forest
        self._began_s: float | None = None
        self._spaces: dict[int, int] = {}
        #: Line -> its space and chain.
        self._lines: dict[int, tuple[int, list[int]]] = {}

    def take(self, number: int, line: bytes) -> bool:
        """Read one line; False if it makes no sense."""
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(item, dict):
            return False
        try:
            if "t" in item:
                return self._request(number, item)
            if "hash_ids" in item:
                return self._foreign(item)
            if "space" in item:
                return self._space(item)
            return self._head(item)
        except (TypeError, OverflowError, ValueError):
            return False

    def _head(self, item: dict[str, Any]) -> bool:
        version = item.get("kvstore_trace")
        if isinstance(version, int) and version > VERSION:
            raise BadTrace(f"a trace of version {version}, and this release reads up to {VERSION}")
        began_s = _time(item.get("began_s")) if version == VERSION else None
        if began_s is not None:
            self._began_s = began_s
        return began_s is not None

    def _space(self, item: dict[str, Any]) -> bool:
        number, name, kind = item["space"], item.get("namespace"), item.get("kind")
        tokens, nbytes, parts = (item.get(key, -1) for key in ("block_tokens", "block_bytes", "parts"))
        if not (isinstance(number, int) and isinstance(name, str) and _NAMESPACE.fullmatch(name)):
            return False
        if not (_within(tokens, 0, _MAX_TOKENS) and _within(nbytes, 1, _MAX_BYTES) and kind in ("kv", "ec")):
            return False
        if not _within(parts, 1, MAX_RANKS):
            return False
        nbytes = self._forest.assumed.block_bytes or nbytes
        self._spaces[number] = self._forest.space(TracedSpace(name, kind, tokens, nbytes, parts))
        return True

    def _request(self, number: int, item: dict[str, Any]) -> bool:
        at_s, space = _time(item["t"]), self._spaces.get(item.get("n", -1))
        if at_s is None or space is None or self._began_s is None:
            return False
        data = base64.b64decode(item.get("d", ""), validate=True)
        known: list[int] = []
        if "like" in item:
            line, blocks = (*item["like"], None, None)[:2]
            of, chain = self._lines.get(line, (-1, []))
            if of != space or not _within(blocks, 1, len(chain)):
                return False
            known = chain[:blocks]
        if len(data) % WORD_BYTES or not (data or known):
            return False
        names = np.frombuffer(data, dtype=WORD).tolist()
        self._lines[number] = (space, self._forest.add(self._began_s + at_s, space, known, names))
        return True

    def _foreign(self, item: dict[str, Any]) -> bool:
        assumed = self._forest.assumed
        at_ms, names, tokens = _time(item.get("timestamp")), item["hash_ids"], item.get("input_length")
        if at_ms is None or not isinstance(names, list):
            return False
        if tokens is not None:
            if not _within(tokens, 0, 1 << 40):
                return False
            names = names[: tokens // assumed.block_tokens]
        if not all(type(name) is int or type(name) is str for name in names):
            return False
        space = self._forest.space(TracedSpace("", "kv", assumed.block_tokens, assumed.foreign_bytes))
        if names:
            self._forest.add(at_ms / 1000, space, [], names)
        return True


def _time(value: Any) -> float | None:
    if type(value) not in (int, float) or not isfinite(value):
        return None
    return float(value)


def _within(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
