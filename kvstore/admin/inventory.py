"""What there is: status, ls, namespaces and how two of them differ."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

from kvstore.admin.cache import Cache, UnknownName
from kvstore.admin.quotas import quota_lines, quotas_of
from kvstore.catalogue import Account, Listing, Maintenance, Usage
from kvstore.errors import KVStoreError
from kvstore.eviction import Scope
from kvstore.keys import NamespaceId
from kvstore.store import JANITOR
from schemas.reports import (
    Amount,
    Backend,
    Difference,
    DiffReport,
    ListReport,
    NamespaceReport,
    NamespacesReport,
    NamespaceStatus,
    NamespaceSummary,
    QuotaLine,
    SegmentSummary,
    SortKey,
    StatusReport,
    TenantStatus,
    Upkeep,
)

#: So many namespaces, the largest, are asked what they would evict first: a round trip each.
ASKED_NAMESPACES = 50

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
    """What is opened, whether it answers, and how much it holds of what it may. A failing backend is in the
    report. A few round trips, however much is stored."""
    index = cache.index_state()
    held = Held()
    lines: tuple[NamespaceStatus, ...] = ()
    if index.state == "ok" and cache.index is not None:
        try:
            held = Held.of(cache.index)
            lines = _statuses(cache.index, held, quota_lines(held.accounts, held.given, cache.settings))
        except KVStoreError as exc:
            index = Backend(url=index.url, state="unreachable", problem=str(exc))
            held = Held()
    known = index.state != "unreachable"
    quotas = quota_lines(held.accounts, held.given, cache.settings) if known else ()
    return StatusReport(
        at_s=now_s,
        index=index,
        payloads=cache.payloads_state(),
        fast=cache.fast_state(),
        capacity_bytes=quotas[-1].quota_bytes if quotas else cache.settings.capacity_bytes,
        total=amount_of(held.accounts) if known else None,
        upkeep=upkeep_of(held.accounts),
        janitor=held.janitor,
        quotas=quotas,
        tenants=_tenants(held.accounts, quotas),
        namespaces=lines,
    )


def namespaces(cache: Cache) -> NamespacesReport:
    """Every namespace that the index knows, the largest first. Raises what the index raises."""
    if cache.index is None:
        return NamespacesReport(namespaces=())
    held = Held.of(cache.index)
    return NamespacesReport(namespaces=tuple(summary for _, summary in _summaries(held)))


def namespace(cache: Cache, name: NamespaceId, now_s: float) -> NamespaceReport:
    """One namespace. Raises UnknownName if there is none of this id, and what the index raises."""
    assert cache.index is not None, "a namespace is known, so there is an index"
    held = Held.of(cache.index)
    account = next((account for account in held.accounts if account.namespace == name), None)
    if account is None:
        raise UnknownName(
            f"namespace {name} has just been dropped; `cache-admin namespaces` lists the others"
        )
    lines = quota_lines(held.accounts, held.given, cache.settings)
    return NamespaceReport(
        at_s=now_s,
        id=name,
        usage=amount_of([account]),
        upkeep=upkeep_of([account]),
        cost_s=account.usage.cost_us / 1e6,
        seen_s=account.seen_s or None,
        quotas=quotas_of(account, lines),
        namespace=json.loads(held.texts.get(name, "{}")),
    )


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


@dataclass(frozen=True, slots=True)
class Held:
    """What the index says of everything at once, in a few round trips."""

    accounts: Sequence[Account] = ()
    #: Canonical JSON by namespace.
    texts: Mapping[NamespaceId, str] = field(default_factory=dict)
    #: Quotas that operators have set.
    given: Mapping[str, int] = field(default_factory=dict)
    janitor: str | None = None

    @classmethod
    def of(cls, index: Maintenance) -> Self:
        """Ask. Raises what the index raises."""
        return cls(index.accounts(), index.namespaces(), index.quotas(), index.leaseholder(JANITOR))


def amount_of(accounts: Iterable[Account]) -> Amount:
    """What they hold together."""
    total = _sum(account.usage for account in accounts)
    return Amount(segments=total.segments, blocks=total.blocks, stored_bytes=total.nbytes)


def upkeep_of(accounts: Iterable[Account]) -> Upkeep:
    """What waits in them."""
    accounts = list(accounts)
    return Upkeep(
        pinned_bytes=sum(account.usage.pinned_bytes for account in accounts),
        trashed=sum(account.trashed for account in accounts),
        bygone=sum(account.bygone for account in accounts),
    )


def _sum(usages: Iterable[Usage]) -> Usage:
    usages = list(usages)
    return Usage(
        nbytes=sum(usage.nbytes for usage in usages),
        segments=sum(usage.segments for usage in usages),
        blocks=sum(usage.blocks for usage in usages),
    )


def _statuses(index: Maintenance, held: Held, quotas: Sequence[QuotaLine]) -> tuple[NamespaceStatus, ...]:
    own = {line.scope: line.quota_bytes for line in quotas}
    lines = []
    for number, (account, summary) in enumerate(_summaries(held)):
        first = index.order(account.namespace, 1) if number < ASKED_NAMESPACES else []
        lines.append(
            NamespaceStatus(
                **dict(summary),
                upkeep=upkeep_of([account]),
                quota_bytes=own.get(Scope.namespace(account.namespace)),
                cost_s=account.usage.cost_us / 1e6,
                seen_s=account.seen_s or None,
                oldest_use_s=first[0].used_s if first else None,
            )
        )
    return tuple(lines)


def _tenants(accounts: Sequence[Account], quotas: Sequence[QuotaLine]) -> tuple[TenantStatus, ...]:
    own = {line.scope: line.quota_bytes for line in quotas}
    members: dict[str, list[Account]] = defaultdict(list)
    for account in accounts:
        members[account.tenant].append(account)
    lines = [
        TenantStatus(
            tenant=tenant,
            namespaces=len(theirs),
            usage=amount_of(theirs),
            upkeep=upkeep_of(theirs),
            quota_bytes=own.get(Scope.tenant(tenant)),
        )
        for tenant, theirs in members.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.usage.stored_bytes, line.tenant)))


def _summaries(held: Held) -> list[tuple[Account, NamespaceSummary]]:
    """Each namespace, the largest first."""
    lines = [(each, _summary(each, held.texts.get(each.namespace, "{}"))) for each in held.accounts]
    return sorted(
        lines, key=lambda line: (-line[1].usage.stored_bytes, line[1].kind, line[1].model, line[1].id)
    )


def _summary(account: Account, text: str) -> NamespaceSummary:
    """A line from stored JSON, which a newer version may have written: what is missing stays empty."""
    fields = json.loads(text)
    parallel = fields.get("parallel", {})
    return NamespaceSummary(
        id=account.namespace,
        **{
            key: str(fields.get(key, ""))
            for key in ("kind", "model", "revision", "tenant", "dtype", "kv_dtype", "codec")
        },
        block_tokens=fields.get("block_tokens", 0),
        tp=parallel.get("tp", 1),
        pp=parallel.get("pp", 1),
        epoch=fields.get("epoch", 0),
        usage=amount_of([account]),
    )


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
        pinned=listing.pinned,
        cost_us=record.cost_us,
    )
