"""Namespaces: what each holds, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.counting import amount_of
from kvstore.admin.curate.quota import quota_lines, quotas_of
from kvstore.admin.described import fields_of
from kvstore.admin.inspect.reports import (
    Difference,
    DiffReport,
    NamespaceReport,
    NamespacesReport,
    Waiting,
)
from kvstore.admin.reports import NamespaceSummary
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId

#: What each field of a namespace is, and why it may differ between engines that were meant to share.
_MEANINGS = {
    "format": "version of kvstore's formats; one release on every engine makes it equal",
    "kind": "kv: blocks of the KV cache; ec: encoder outputs. The two are never shared",
    "tenant": "identity.tenant of the settings: tenants never share",
    "model": "the model's name; set identity.model if one model is called differently on its machines",
    "revision": "the model's revision",
    "weights": "digest of the weights' files, or identity.weights: other weights, other results. An engine "
    "with unnamed-... doesn't know what it has loaded; its log says why",
    "config": "digest of the model's configuration, its overrides (rope, heads, --hf-overrides) and its code",
    "dtype": "the dtype that the model computes in (--dtype)",
    "quantization": "how the weights are quantised (--quantization)",
    "options": "an option of vLLM, or with $ a variable of its environment, that may change what is computed",
    "block_tokens": "tokens per block (--block-size)",
    "hash_algo": "--prefix-caching-hash-algo",
    "hash_root": "what the block hashes start from: PYTHONHASHSEED must be the same in every engine",
    "kv_dtype": "--kv-cache-dtype",
    "page_order": "the order of a slot's dimensions",
    "page_format": "what fills a page: vLLM's release, device, attention backend, packing, a CPU's abilities",
    "groups": "shape of one block: layers, heads, tokens and content, as the model and the layout have it",
    "parallel": "the parallel layout (--tensor-parallel-size, --pipeline-parallel-size)",
    "codec": "segment.codec of the settings",
    "epoch": "identity.epoch of the settings: raising it forgets what was stored before",
}


def namespaces(cache: Cache) -> NamespacesReport:
    """Returns every namespace that the index knows, the largest first. Raises what the index raises."""
    if cache.index is None:
        return NamespacesReport(namespaces=())
    held = Overview.of(cache.index)
    return NamespacesReport(namespaces=tuple(summary for _, summary in summaries(held)))


def namespace(cache: Cache, name: NamespaceId, now_s: float) -> NamespaceReport:
    """Returns the report of one namespace. Raises UnknownName if it is gone, and what the index raises."""
    assert cache.index is not None, "a namespace is known, so there is an index"
    held = Overview.of(cache.index)
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
        upkeep=waiting_in([account]),
        cost_s=account.usage.cost_us / 1e6,
        seen_s=account.seen_s or None,
        shards=account.shards,
        quotas=quotas_of(account, lines),
        namespace=fields_of(held.texts.get(name)),
    )


def diff(cache: Cache, a: str, b: str) -> DiffReport:
    """Returns where two namespaces differ, field by field. Raises UnknownName and what the index raises."""
    known = cache.namespaces()
    first, second = cache.namespace(a), cache.namespace(b)
    found = tuple(differences(fields_of(known[first]), fields_of(known[second])))
    return DiffReport(a=first, b=second, same=not found, differences=found)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Returns where the fields of two namespaces differ."""
    return list(_differences("", a, b))


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
class Overview:
    """What the index says of all namespaces at once, in a few round trips."""

    accounts: Sequence[Account] = ()
    #: Canonical JSON by namespace.
    texts: Mapping[NamespaceId, str] = field(default_factory=dict)
    #: Quotas that operators have set.
    given: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, index: FullIndex) -> Self:
        """Asks the index. Raises what it raises."""
        return cls(index.accounts(), index.namespaces(), index.quotas())


def waiting_in(accounts: Iterable[Account]) -> Waiting:
    """Returns how much is pinned, in the trash or invalidated in these accounts together."""
    accounts = list(accounts)
    return Waiting(
        pinned_bytes=sum(account.usage.pinned_bytes for account in accounts),
        trashed=sum(account.trashed for account in accounts),
        bygone=sum(account.bygone for account in accounts),
    )


def summaries(held: Overview) -> list[tuple[Account, NamespaceSummary]]:
    """Returns each account with its line in a report, the largest first."""
    lines = [(each, _summary(each, held.texts.get(each.namespace))) for each in held.accounts]
    return sorted(
        lines, key=lambda line: (-line[1].usage.stored_bytes, line[1].kind, line[1].model, line[1].id)
    )


def _summary(account: Account, text: str | None) -> NamespaceSummary:
    """Returns a namespace's line from its stored JSON.

    A newer version may have written that: fields that are missing stay empty.
    """
    fields = fields_of(text)
    parallel = fields.get("parallel")
    return NamespaceSummary(
        id=account.namespace,
        **{
            key: str(fields.get(key, ""))
            for key in ("kind", "model", "revision", "tenant", "dtype", "kv_dtype", "codec")
        },
        block_tokens=_number(fields, "block_tokens", 0),
        tp=_number(parallel, "tp", 1),
        pp=_number(parallel, "pp", 1),
        epoch=_number(fields, "epoch", 0),
        usage=amount_of([account]),
    )


def _number(fields: object, key: str, default: int) -> int:
    value = fields.get(key) if isinstance(fields, dict) else None
    return value if type(value) is int else default
