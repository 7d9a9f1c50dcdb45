"""What there is: status, ls, namespaces and how two of them differ."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from kvstore.admin.cache import Cache
from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceId
from kvstore.ports import Catalogue, Listing
from schemas.reports import (
    Amount,
    Backend,
    Difference,
    DiffReport,
    ListReport,
    NamespacesReport,
    NamespaceStatus,
    NamespaceSummary,
    SegmentSummary,
    SortKey,
    StatusReport,
)

#: Namespaces of more segments are not read through to learn when they were used: at 500 a page this
#: is 40 round trips, which a person doesn't notice and Redis neither.
SCAN_SEGMENTS = 20_000

_ORDER: dict[SortKey, Callable[[SegmentSummary], tuple[float, float]]] = {
    "last-use": lambda line: (line.last_use_s, line.created_s),
    "created": lambda line: (line.created_s, line.last_use_s),
    "bytes": lambda line: (line.stored_bytes, line.last_use_s),
}

#: What a namespace's field is, and why it may differ between engines that were to share.
_MEANINGS = {
    "format": "version of kvstore's formats; one release on every engine makes it equal",
    "kind": "kv: blocks of the KV cache; ec: encoder outputs. The two are never shared",
    "tenant": "identity.tenant of the settings: tenants never share",
    "model": "the model's name; set identity.model if one model is called differently on its machines",
    "revision": "the model's revision",
    "weights": "digest of the weights' files, or identity.weights: other weights, other results",
    "config": "digest of the model's configuration and its overrides (rope, heads, --hf-overrides)",
    "dtype": "the dtype that the model computes in (--dtype)",
    "quantization": "how the weights are quantised (--quantization)",
    "block_tokens": "tokens per block (--block-size)",
    "hash_algo": "--prefix-caching-hash-algo",
    "hash_root": "what the block hashes start from: PYTHONHASHSEED must be the same in every engine",
    "kv_dtype": "--kv-cache-dtype",
    "page_order": "the order of a slot's dimensions",
    "page_format": "what fills a page: vLLM's release, the device, the attention backend, a CPU's abilities",
    "groups": "shape of one block: layers, heads, tokens and content, as the model and the layout have it",
    "parallel": "the parallel layout (--tensor-parallel-size, --pipeline-parallel-size)",
    "codec": "segment.codec of the settings",
    "epoch": "identity.epoch of the settings: raising it forgets what was stored before",
}


def status(cache: Cache, now_s: float) -> StatusReport:
    """What is opened, whether it answers, and how much it holds. A failing backend is in the report."""
    index = cache.index_state()
    lines: tuple[NamespaceStatus, ...] = ()
    if index.state == "ok":
        try:
            lines = tuple(_statuses(cache))
        except KVStoreError as exc:
            index = Backend(url=index.url, state="unreachable", problem=str(exc))
    return StatusReport(
        at_s=now_s,
        index=index,
        payloads=cache.payloads_state(),
        fast=cache.fast_state(),
        capacity_bytes=cache.settings.capacity_bytes,
        total=None if index.state == "unreachable" else _sum(lines),
        namespaces=lines,
    )


def namespaces(cache: Cache) -> NamespacesReport:
    """Every namespace that the index knows, the largest first. Raises what the index raises."""
    return NamespacesReport(namespaces=tuple(_summaries(cache)))


def ls(cache: Cache, prefix: str | None, *, limit: int, sort: SortKey, now_s: float) -> ListReport:
    """The `limit` (0: all) most recent or largest segments, of one namespace or of all.

    Holds no more than `limit` of them at once. Raises UnknownName and what the index raises.
    """
    chosen = None if prefix is None else cache.namespace(prefix)
    found = 0

    def counted() -> Iterator[SegmentSummary]:
        nonlocal found
        for name in cache.namespaces() if chosen is None else [chosen]:
            for listing in [] if cache.index is None else cache.index.segments(name):
                found += 1
                yield summary_of_segment(name, listing)

    order = _ORDER[sort]
    if limit:
        segments = heapq.nlargest(limit, counted(), key=order)
    else:
        segments = sorted(counted(), key=order, reverse=True)
    return ListReport(
        at_s=now_s, namespace=chosen, sort=sort, limit=limit, found=found, segments=tuple(segments)
    )


def diff(cache: Cache, a: str, b: str) -> DiffReport:
    """Where two namespaces differ, field by field. Raises UnknownName and what the index raises."""
    known = cache.namespaces()
    first, second = cache.namespace(a), cache.namespace(b)
    differences = tuple(_differences("", json.loads(known[first]), json.loads(known[second])))
    return DiffReport(a=first, b=second, same=not differences, differences=differences)


def _differences(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(f"{path}.{key}" if path else key, a.get(key), b.get(key))
    elif _holds_mappings(a) and _holds_mappings(b):
        for i, (left, right) in enumerate(zip_longest(a, b)):
            yield from _differences(f"{path}.{i}", left, right)
    else:
        meaning = _MEANINGS.get(path.split(".")[0], "a field that this version doesn't know")
        yield Difference(path=path, a=a, b=b, meaning=meaning)


def _holds_mappings(value: Any) -> bool:
    # A list of numbers, such as a shape, is read as a whole.
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _statuses(cache: Cache) -> Iterator[NamespaceStatus]:
    assert cache.index is not None
    for summary in _summaries(cache):
        oldest, newest = _uses(cache.index, summary)
        yield NamespaceStatus(**dict(summary), oldest_use_s=oldest, newest_use_s=newest)


def _uses(catalogue: Catalogue, summary: NamespaceSummary) -> tuple[float | None, float | None]:
    if not 0 < summary.usage.segments <= SCAN_SEGMENTS:
        return None, None
    times = [listing.last_use_s for listing in catalogue.segments(NamespaceId(summary.id))]
    return (min(times), max(times)) if times else (None, None)


def _summaries(cache: Cache) -> list[NamespaceSummary]:
    lines = [summary_of_namespace(cache, name, text) for name, text in cache.namespaces().items()]
    return sorted(lines, key=lambda line: (-line.usage.stored_bytes, line.kind, line.model, line.id))


def summary_of_namespace(cache: Cache, name: NamespaceId, text: str) -> NamespaceSummary:
    """A line from stored JSON, which a newer version may have written: what is missing stays empty."""
    fields = json.loads(text)
    parallel = fields.get("parallel", {})
    return NamespaceSummary(
        id=name,
        **{
            key: str(fields.get(key, ""))
            for key in ("kind", "model", "revision", "tenant", "dtype", "kv_dtype", "codec")
        },
        block_tokens=fields.get("block_tokens", 0),
        tp=parallel.get("tp", 1),
        pp=parallel.get("pp", 1),
        epoch=fields.get("epoch", 0),
        usage=usage_of(cache, name),
    )


def usage_of(cache: Cache, name: NamespaceId) -> Amount:
    """What a namespace holds."""
    if cache.index is None:
        return Amount()
    usage = cache.index.usage(name)
    return Amount(segments=usage.segments, blocks=usage.blocks, stored_bytes=usage.nbytes)


def summary_of_segment(name: NamespaceId, listing: Listing) -> SegmentSummary:
    """A line from the index's record."""
    record = listing.record
    return SegmentSummary(
        namespace=name,
        segment=listing.segment.hex(),
        slots=record.slots,
        stored_bytes=record.nbytes,
        created_s=record.created_s,
        last_use_s=listing.last_use_s,
        depth=record.depth,
        codec=record.codec,
        ranks=len(record.parts),
    )


def _sum(lines: tuple[NamespaceStatus, ...]) -> Amount:
    return Amount(
        segments=sum(line.usage.segments for line in lines),
        blocks=sum(line.usage.blocks for line in lines),
        stored_bytes=sum(line.usage.stored_bytes for line in lines),
    )
