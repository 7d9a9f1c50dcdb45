"""Sends KV events of the store, for routers that send a request to where its prefix is.

An engine announces what it has put into the store, when all ranks have committed it, and which of that it
finds missing or bad. Each engine tells only what it stores or finds itself. A router that listens to all
engines of a namespace knows what the store holds, except for evictions that no engine has noticed yet;
`ownership` names the namespace, so that the router knows which engines can load what one has stored.

Events name blocks by vLLM's own hashes, as routers do. Those of blocks behind multimodal items hold what
clients call the items, while the store's own names go by what they are (connectors.engine.names): a request
that calls another item so is sent to where it finds nothing, and no more.

An event is complete: it has the hashes, tokens, parent, group and kind for every block table of vLLM's that a
block has a part in. `extra_keys` are left out, as in vLLM's own offloading.

Memory is bounded by the saves under way, `MOST_ANNOUNCED` remembered blocks and `MOST_EVENTS` events between
two steps. Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from connectors.engine.guard import otherwise
from connectors.engine.layout import Group
from connectors.engine.step import RequestView
from connectors.kv.messages import GroupLoad, Save
from kvstore.index.port import Run
from kvstore.keys import SegmentId

#: Most announced blocks that are remembered, so that their loss can be announced; the oldest are forgotten.
MOST_ANNOUNCED: Final = 65536
#: Most events that wait to be taken; the oldest are dropped.
MOST_EVENTS: Final = 8192
#: Most removals in one event.
_BATCH = 1024


class Table(NamedTuple):
    """The properties of one KV cache group of vLLM's that events carry."""

    kind: str
    window: int | None


def tables_of(kv_cache_config: Any) -> list[Table]:
    """Returns the tables of all KV cache groups of an engine, in vLLM's order."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        Table(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs
    ]


class _Stored(NamedTuple):
    """A segment that is being saved, with all that its event needs of the request."""

    group: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None


class _Loading(NamedTuple):
    """Blocks of one group that are being loaded, from block `first` on, by vLLM's hashes."""

    group: int
    first: int
    hashes: list[bytes]
    runs: list[Run]


class NoEvents:
    """The calls that `Events` takes, without effect: for an engine without KV events."""

    def planned(self, request: RequestView, saves: Iterable[Save]) -> None:
        """Records that these blocks of a request are on their way to the store."""

    def ended(self, segment: SegmentId, *, written: bool) -> None:
        """Records that all ranks have ended their parts of a segment; `written`: it can be found now."""

    def loading(self, request: RequestView, groups: Sequence[GroupLoad]) -> None:
        """Records a planned load, which tells the blocks of a segment that turns out to be bad."""

    def load_ended(self, request_id: str) -> None:
        """Forgets a load that has ended."""

    def bad(self, segments: set[SegmentId]) -> None:
        """Announces the loss of these segments' blocks: they failed verification and are evicted."""

    def missing(self, hashes: Sequence[bytes], stored: Sequence[int], asked_at: float) -> None:
        """Announces the loss of blocks that the index lacked at the question of `asked_at`
        (`time.monotonic`): `stored[i]` is how many leading blocks of group i it had. A later block that this
        engine had announced before then has been evicted since."""

    def restart(self, ownership: str) -> None:
        """Announces the loss of all announced blocks: from now on blocks belong to another namespace."""

    def forget(self) -> None:
        """Does so of the same namespace."""

    @otherwise(tuple)
    def take(self) -> Sequence[BlockStored | BlockRemoved]:
        """Returns the events since the last call, in order."""
        return ()


class Events(NoEvents):
    """Collects the KV events of one engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        tables: Sequence[Table],
        hash_tokens: int,
        *,
        ownership: str,
        remote: bool,
    ) -> None:
        """`ownership` is the id of the namespace; `remote`: the store is elsewhere than the engine."""
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._tables = tables
        self._ownership = ownership
        self._locality = "REMOTE" if remote else "LOCAL"
        self._saving: dict[SegmentId, _Stored] = {}
        self._loading: dict[str, list[_Loading]] = {}
        #: (group, hash) -> when it was announced, oldest first.
        self._announced: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._events: deque[BlockStored | BlockRemoved] = deque(maxlen=MOST_EVENTS)

    # ---- what is stored -------------------------------------------------------------------------

    def planned(self, request: RequestView, saves: Iterable[Save]) -> None:
        lora = request.lora_request
        for save in saves:
            size = self._groups[save.group].rule.block_tokens
            before = save.first * size // self._hash_tokens
            # A partial block, which is handed over to another engine, has no hash that routers know.
            full = min(len(save.hashes), len(request.block_hashes) * self._hash_tokens // size - save.first)
            if full < 1:
                continue
            self._saving[save.segment] = _Stored(
                save.group,
                self._hashes(request, save.group, range(save.first, save.first + full)),
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

    def loading(self, request: RequestView, groups: Sequence[GroupLoad]) -> None:
        self._loading[request.request_id] = [
            _Loading(
                one.group,
                one.first,
                self._hashes(request, one.group, range(one.first, one.first + len(one.hashes))),
                one.runs,
            )
            for one in groups
        ]

    def _hashes(self, request: RequestView, group: int, blocks: range) -> list[bytes]:
        """Returns vLLM's hashes of those of a group's blocks that are full."""
        ratio = self._groups[group].rule.block_tokens // self._hash_tokens
        return list(request.block_hashes[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio])

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
        self._loading.clear()
        self._ownership = ownership

    def forget(self) -> None:
        self.restart(self._ownership)

    def take(self) -> Sequence[BlockStored | BlockRemoved]:
        if not self._events:
            return ()
        events = list(self._events)
        self._events.clear()
        return events
