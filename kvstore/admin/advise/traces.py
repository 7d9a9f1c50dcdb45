"""Reads traces of requests, our own (kvstore.store.trace) and Mooncake's, into chains of numbered blocks.

Mooncake's public traces are JSON lines as well (kvcache-ai/Mooncake, FAST25-release/traces):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

These are milliseconds, tokens, and one id per block of 512 tokens. The last id may stand for a block that
isn't full, which no cache holds, so only as many ids count as there are full blocks in `input_length`. Tools
that make such traces use other block sizes too, so the size is an option. `session_id` (text or a number),
which some of them add, says which requests are turns of one conversation. Beside it may stand what its
client says of the session when the request is served: "end", "retain" and "priority", as in our own traces.

A block here is a node of a tree: the block before it and its own name. Equal names in two places of the tree
are different blocks, so that whatever a file says, the replay sees chains with common prefixes.

Files are taken for hostile: lines are bounded, and a line that makes no sense is skipped and counted.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from kvstore.admin.progress import ProgressListener
from kvstore.errors import ConfigError
from kvstore.index.contract import MAX_RANKS
from kvstore.index.sessions import Priority
from kvstore.rules.text import readable
from kvstore.store.recorded import VERSION, WORD, WORD_BYTES

#: Bytes of the longest line that is read: a prompt of three million blocks.
MAX_LINE = 32 << 20
#: The most references to blocks in all files together: a replay holds them in memory, with eight bytes or
#: more each.
MAX_REFERENCES = 100_000_000
PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
#: What tells the files of one process apart.
_NUMBER = re.compile(r"\.\d+\.jsonl$")
_MAX_TOKENS = 1 << 20
_MAX_BYTES = 1 << 40
#: An hour for one token.
_MAX_US = 3.6e9


class BadTrace(ConfigError):
    """A file is no trace, or can't be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Assumptions for what a trace's file doesn't say."""

    #: Bytes of a block, all ranks together. None: the number in our own traces; for others 128 KiB per token.
    block_bytes: int | None = None
    #: Tokens of a block in Mooncake's format.
    block_tokens: int = 512

    @property
    def foreign_bytes(self) -> int:
        """Bytes of a block in a trace that doesn't say it."""
        return self.block_bytes or self.block_tokens * KV_BYTES_PER_TOKEN


#: Bytes of KV per token of a model such as Llama-3-8B in bf16.
KV_BYTES_PER_TOKEN = 128 << 10


@dataclass(frozen=True, slots=True)
class TracedSpace:
    """The properties of one namespace's blocks. `namespace` is "" if the trace names none."""

    namespace: str
    kind: str
    block_tokens: int
    block_bytes: int
    #: The number of payloads of a segment.
    parts: int = 1
    #: "" if the trace doesn't say.
    model: str = field(default="", compare=False)
    tenant: str = field(default="", compare=False)
    #: GPUs of an engine; None if the trace doesn't say.
    gpus: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a chain of blocks, by their numbers."""

    at_s: float
    space: int
    chain: list[int]
    #: What the trace calls the session, if it names one.
    session: str | int | None = None
    #: The number of leading blocks that the engine had itself; None: unknown.
    local: int | None = None


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """What computing a token of a prompt took an engine, in microseconds: the first one, and how much more
    for each token before it."""

    at_s: float
    space: int
    token_us: float
    depth_us: float


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of a session in one space: after all requests up to that moment."""

    at_s: float
    space: int
    session: str | int
    end: bool = False
    #: How long the session is to be retained, in seconds from `at_s` on.
    retain_s: float | None = None
    priority: Priority | None = None


@dataclass
class Trace:
    """Requests in the order of time, and the spaces of their blocks. Blocks are numbered from 0."""

    spaces: list[TracedSpace] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    #: What was said of sessions, in the order of time.
    said: list[Said] = field(default_factory=list)
    #: What computing cost, as far as engines have told.
    costs: list[TokenCosts] = field(default_factory=list)
    #: The number of each block's space.
    space_of: list[int] = field(default_factory=list)
    references: int = 0
    #: The times of the first request and of the last, by process that has recorded, or by file.
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: The number of lines that made no sense, a torn last one included.
    skipped: int = 0

    @property
    def blocks(self) -> int:
        """The number of different blocks."""
        return len(self.space_of)

    def weights(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the bytes of every block, as int64, shape (blocks,)."""
        sizes = np.array([space.block_bytes for space in self.spaces], dtype=np.int64)
        return sizes[np.array(self.space_of, dtype=np.int64)]

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all blocks, each counted once: a cache of this size evicts nothing."""
        return int(self.weights().sum()) if self.blocks else 0

    def since(self, from_s: float) -> Trace:
        """Returns the requests from `from_s` (the trace's own time) on, as if there had been none before.
        Their blocks are numbered anew; the costs of computing count from before as well. Raises BadTrace."""
        number: dict[int, int] = {}
        later = Trace(spaces=self.spaces, costs=self.costs, skipped=self.skipped)
        for request in self.requests:
            if request.at_s >= from_s:
                chain = [number.setdefault(block, len(number)) for block in request.chain]
                later.requests.append(replace(request, chain=chain))
                later.references += len(chain)
        if not later.requests:
            raise BadTrace("no request was recorded since then")
        later.space_of = [self.space_of[block] for block in number]
        later.said = [said for said in self.said if said.at_s >= from_s]
        later.spans = {
            name: (max(first, from_s), last) for name, (first, last) in self.spans.items() if last >= from_s
        }
        return later


def read_traces(paths: Sequence[Path], assumed: Assumed, progress: ProgressListener) -> Trace:
    """Reads trace files, and those named *.jsonl in folders. Raises BadTrace."""
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
        if times := [request.at_s for request in forest.trace.requests[before:]]:
            # A process goes on in another file when one is full.
            process = str(path.with_name(_NUMBER.sub("", path.name)))
            first, last = forest.trace.spans.get(process, (times[0], times[0]))
            forest.trace.spans[process] = min(first, *times), max(last, *times)
    if not forest.trace.requests:
        raise BadTrace(f"no request in {', '.join(map(str, paths))}")
    forest.trace.requests.sort(key=lambda request: request.at_s)
    forest.trace.said.sort(key=lambda said: said.at_s)
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


def _read(path: Path, forest: _Forest, progress: ProgressListener) -> int:
    """Reads one file, and returns how many lines were skipped."""
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
    """Trees of blocks, one for each space."""

    def __init__(self, trace: Trace, assumed: Assumed) -> None:
        self.trace = trace
        self.assumed = assumed
        self._numbers: dict[TracedSpace, int] = {}
        #: For each space the number of a block by its name, for the place in which that name was seen first.
        self._named: list[dict[int | str, int]] = []
        #: The number of a block by (the block before it, its name), for names that were seen in other places
        #: too.
        self._elsewhere: dict[tuple[int, int | str], int] = {}
        self._parent: list[int] = []

    def space(self, about: TracedSpace) -> int:
        """Returns the number of a space, which is added if it is new."""
        if about not in self._numbers:
            self._numbers[about] = len(self.trace.spaces)
            self.trace.spaces.append(about)
            self._named.append({})
        return self._numbers[about]

    def add(
        self,
        at_s: float,
        space: int,
        known: list[int],
        names: Sequence[int | str],
        session: str | int | None = None,
        local: int | None = None,
    ) -> list[int]:
        """Adds a request for the blocks `known`, followed by those of these names; returns its chain."""
        named, parent = self._named[space], self._parent
        chain = known
        # The roots of each space have a parent of their own, so that spaces don't share trees.
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
        self.trace.requests.append(Request(at_s, space, chain, session, local))
        self.trace.references += len(chain)
        return chain

    def _new(self, parent: int, space: int) -> int:
        self._parent.append(parent)
        self.trace.space_of.append(space)
        return len(self._parent) - 1


class _File:
    """A trace file that is being read, in either format."""

    def __init__(self, forest: _Forest) -> None:
        self._forest = forest
        self._began_s: float | None = None
        self._spaces: dict[int, int] = {}
        #: The space and chain of each line.
        self._lines: dict[int, tuple[int, list[int]]] = {}

    def take(self, number: int, line: bytes) -> bool:
        """Reads one line; returns False if it makes no sense."""
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
        gpus = item.get("gpus")
        if not (_within(parts, 1, MAX_RANKS) and (gpus is None or _within(gpus, 1, MAX_RANKS))):
            return False
        nbytes = self._forest.assumed.block_bytes or nbytes
        model, tenant = (readable(item.get(key, "")) for key in ("model", "tenant"))
        self._spaces[number] = self._forest.space(
            TracedSpace(name, kind, tokens, nbytes, parts, model, tenant, gpus)
        )
        return True

    def _request(self, number: int, item: dict[str, Any]) -> bool:
        at_s, space = _time(item["t"]), self._spaces.get(item.get("n", -1))
        if at_s is None or space is None or self._began_s is None:
            return False
        if "token_us" in item:
            return self._cost(item, self._began_s + at_s, space)
        data = base64.b64decode(item.get("d", ""), validate=True)
        session = item.get("session")
        if session is not None and len(base64.b64decode(session, validate=True)) != WORD_BYTES:
            return False
        said = _said(item, self._began_s + at_s, space, session)
        if said is not None and not ("d" in item or "like" in item):
            self._forest.trace.said.append(said)
            return True
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
        local = item.get("local")
        if local is not None and not _within(local, 0, len(known) + len(names)):
            return False
        at_s += self._began_s
        self._lines[number] = (space, self._forest.add(at_s, space, known, names, session, local))
        return True

    def _cost(self, item: dict[str, Any], at_s: float, space: int) -> bool:
        token_us, depth_us = _time(item["token_us"]), _time(item.get("depth_us", 0.0))
        if token_us is None or depth_us is None or not (0 < token_us <= _MAX_US and 0 <= depth_us <= _MAX_US):
            return False
        self._forest.trace.costs.append(TokenCosts(at_s, space, token_us, depth_us))
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
        session = item.get("session_id")
        if type(session) not in (int, str, type(None)):
            return False
        said = _said(item, at_ms / 1000, space, session)
        if names:
            self._forest.add(at_ms / 1000, space, [], names, session)
        if said is not None:
            self._forest.trace.said.append(said)
        return True


def _said(item: dict[str, Any], at_s: float, space: int, session: str | int | None) -> Said | None:
    """Returns what a line says of its session; None if that is nothing. Raises ValueError for nonsense."""
    end, retain_s, priority = (item.get(name) for name in ("end", "retain", "priority"))
    if session is None or (end is None and retain_s is None and priority is None):
        return None
    if type(end) not in (bool, type(None)) or priority not in (None, *PRIORITIES):
        raise ValueError("no hint")
    if retain_s is not None and (retain_s := _time(retain_s)) is None:
        raise ValueError("no time")
    return Said(at_s, space, session, bool(end), retain_s, priority)


def _time(value: Any) -> float | None:
    if type(value) not in (int, float) or not isfinite(value):
        return None
    return float(value)


def _within(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
