"""KV events of the store, for routers that send a request to where its prefix is.

An engine tells what it has put into the store, when all ranks have committed it, and what it finds missing or
bad of it. What other engines put there or find, they tell. Whoever listens to all engines of a namespace
knows what the store holds, but for what was evicted and not yet missed; `ownership` names the namespace, so
that it is known which engines can load what one has stored.

The payload is complete: hashes, tokens, parent, group and kind of every table of vLLM's that a block has a
part in. `extra_keys` are left out, as vLLM's own offloading does.

Bounded: stores under way, `MOST_ANNOUNCED` blocks remembered, `MOST_EVENTS` events between two steps. On the
scheduler's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from connectors.kv_types import GroupLoad, Save
from connectors.layout import Group
from kvstore.keys import SegmentId

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Blocks that this engine has announced and would announce the loss of; the oldest are forgotten.
MOST_ANNOUNCED: Final = 65536
#: Events that nobody has taken; the oldest are dropped.
MOST_EVENTS: Final = 8192
#: Removals in one event.
_BATCH = 1024


class Table(NamedTuple):
    """What a consumer is told of one KV cache group of vLLM's."""

    kind: str
    window: int | None


def tables_of(kv_cache_config: Any) -> list[Table]:
    """All of an engine's."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        Table(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs
    ]


class _Stored(NamedTuple):
    """A segment being saved: all that an event needs of its request."""

    group: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None


class NoEvents:
    """Nobody listens. What `Events` is told, and by whom, is what these are."""

    def planned(self, request: Request, saves: Iterable[Save]) -> None:
        """These blocks of a request are on their way to the store."""

    def ended(self, segment: SegmentId, *, written: bool) -> None:
        """All ranks have ended their part of a segment; `written`: it can be found now."""

    def loading(self, request_id: str, groups: Sequence[GroupLoad]) -> None:
        """A load has been planned: whose blocks they are, if a segment turns out to be bad."""

    def load_ended(self, request_id: str) -> None:
        """A load has ended."""

    def bad(self, segments: set[SegmentId]) -> None:
        """These segments failed verification and are evicted."""

    def missing(self, hashes: Sequence[bytes], stored: Sequence[int], asked_at: float) -> None:
        """At `asked_at` (`time.monotonic`) the index had so many leading blocks of each group of a request
        and not the next. If this engine had announced that, it has been evicted since."""

    def restart(self, ownership: str) -> None:
        """Blocks belong to another namespace from now on; this engine serves none of those announced."""

    def take(self) -> Sequence[BlockStored | BlockRemoved]:
        """What happened since the last call, in order."""
        return ()


class Events(NoEvents):
    """Of one engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        tables: Sequence[Table],
        hash_tokens: int,
        *,
        ownership: str,
        remote: bool,
    ) -> None:
        """`remote`: whether the store is elsewhere than the engine."""
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._tables = tables
        self._ownership = ownership
        self._locality = "REMOTE" if remote else "LOCAL"
        self._saving: dict[SegmentId, _Stored] = {}
        self._loading: dict[str, Sequence[GroupLoad]] = {}
        #: (group, hash) -> when it was announced, oldest first.
        self._announced: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._events: deque[BlockStored | BlockRemoved] = deque(maxlen=MOST_EVENTS)

    # ---- what is stored -------------------------------------------------------------------------

    def planned(self, request: Request, saves: Iterable[Save]) -> None:
        lora = getattr(request, "lora_request", None)
        for save in saves:
            size = self._groups[save.group].rule.block_tokens
            before = save.first * size // self._hash_tokens
            # A partial block, which is handed over to another engine, has no name that others know.
            full = min(len(save.hashes), len(request.block_hashes) * self._hash_tokens // size - save.first)
            if full < 1:
                continue
            self._saving[save.segment] = _Stored(
                save.group,
                save.hashes[:full],
                request.block_hashes[before - 1] if before else None,
                list(request.all_token_ids[save.first * size : (save.first + full) * size]),
                lora.adapter_id if lora is not None else None,
                lora.name if lora is not None else None,
            )

    def ended(self, segment: SegmentId, *, written: bool) -> None:
        stored = self._saving.pop(segment, None)
        if stored is None or not written:
            return
        now = time.monotonic()
        for block_hash in stored.hashes:
            self._announced[stored.group, block_hash] = now
            self._announced.move_to_end((stored.group, block_hash))
        while len(self._announced) > MOST_ANNOUNCED:
            self._announced.popitem(last=False)
        group = self._groups[stored.group]
        for table in group.tables:
            kind, window = self._tables[table]
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(one) for one in stored.hashes],
                    parent_block_hash=maybe_convert_block_hash(stored.parent) if stored.parent else None,
                    token_ids=stored.tokens,
                    block_size=group.rule.block_tokens,
                    lora_id=stored.lora_id,
                    lora_name=stored.lora_name,
                    medium=MEDIUM_STORAGE,
                    group_idx=table,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                    locality=self._locality,
                    ownership=self._ownership,
                )
            )

    # ---- what is gone ---------------------------------------------------------------------------

    def loading(self, request_id: str, groups: Sequence[GroupLoad]) -> None:
        self._loading[request_id] = groups

    def load_ended(self, request_id: str) -> None:
        self._loading.pop(request_id, None)

    def bad(self, segments: set[SegmentId]) -> None:
        gone: dict[int, dict[bytes, None]] = {}
        for groups in self._loading.values():
            for one in groups:
                for run in one.runs:
                    if run.segment in segments:
                        at = run.start - one.first
                        gone.setdefault(one.group, {}).update(dict.fromkeys(one.hashes[at : at + run.count]))
        self._removed({group: list(hashes) for group, hashes in gone.items()})

    def missing(self, hashes: Sequence[bytes], stored: Sequence[int], asked_at: float) -> None:
        gone: dict[int, list[bytes]] = {}
        for number, group in enumerate(self._groups):
            if group.rule.reach != "prefix":
                continue
            ratio = group.rule.block_tokens // self._hash_tokens
            for block_hash in hashes[(stored[number] + 1) * ratio - 1 :: ratio]:
                announced_at = self._announced.get((number, block_hash))
                if announced_at is None or announced_at >= asked_at:
                    break
                gone.setdefault(number, []).append(block_hash)
        self._removed(gone)

    def _removed(self, gone: Mapping[int, Sequence[bytes]]) -> None:
        for number, hashes in gone.items():
            for block_hash in hashes:
                self._announced.pop((number, block_hash), None)
            for at in range(0, len(hashes), _BATCH):
                converted = [maybe_convert_block_hash(one) for one in hashes[at : at + _BATCH]]
                for table in self._groups[number].tables:
                    self._events.append(
                        BlockRemoved(
                            block_hashes=converted,
                            medium=MEDIUM_STORAGE,
                            group_idx=table,
                            locality=self._locality,
                            ownership=self._ownership,
                        )
                    )

    def restart(self, ownership: str) -> None:
        self._events.clear()
        self._saving.clear()
        gone: dict[int, list[bytes]] = {}
        for number, block_hash in self._announced:
            gone.setdefault(number, []).append(block_hash)
        self._removed(gone)
        self._ownership = ownership

    def take(self) -> Sequence[BlockStored | BlockRemoved]:
        if not self._events:
            return ()
        events = list(self._events)
        self._events.clear()
        return events
