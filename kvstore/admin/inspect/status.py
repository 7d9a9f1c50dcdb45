"""status: the backends, whether they answer, and how much is stored of what may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kvstore.admin.backends import Cache
from kvstore.admin.counting import amount_of
from kvstore.admin.curate.quota import quota_lines
from kvstore.admin.inspect.namespaces import Overview, summaries, waiting_in
from kvstore.admin.inspect.reports import NamespaceStatus, StatusReport, TenantStatus
from kvstore.admin.reports import BackendState, FastBackend
from kvstore.errors import KVStoreError
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Account
from kvstore.keys import NamespaceId
from kvstore.store.rounds import is_at_work
from schemas.settings import Settings

#: How many namespaces, the largest, are asked what they would evict first: a round trip each.
ASKED_NAMESPACES = 50


def status(cache: Cache, now_s: float) -> StatusReport:
    """Returns the backends, whether they answer, and how much is stored of what may be.

    A failing backend is reported, not raised. Costs a few round trips, however much is stored.
    """
    index = cache.index_state()
    held = Overview()
    oldest: dict[NamespaceId, float] = {}
    if index.state == "ok" and cache.index is not None:
        try:
            held = Overview.of(cache.index)
            for account, _ in summaries(held)[:ASKED_NAMESPACES]:
                for first in cache.index.order(account.namespace, 1):
                    oldest[account.namespace] = first.used_s
        except KVStoreError as exc:
            index = BackendState(url=index.url, state="unreachable", problem=str(exc))
            held = Overview()
    return status_of(
        held,
        held.accounts,
        cache.settings,
        index=index,
        payloads=cache.payloads_state(),
        fast=cache.fast_state(),
        oldest=oldest,
        now_s=now_s,
    )


def status_of(
    held: Overview,
    named: Sequence[Account],
    settings: Settings,
    *,
    index: BackendState,
    payloads: BackendState,
    fast: FastBackend | None,
    oldest: Mapping[NamespaceId, float] = MappingProxyType({}),
    now_s: float,
) -> StatusReport:
    """Returns the report of what an index holds, with a line for each namespace of `named`. Does no I/O."""
    known = index.state != "unreachable"
    quotas = quota_lines(held.accounts, held.given, settings) if known else ()
    own = {line.scope: line.quota_bytes for line in quotas}
    return StatusReport(
        at_s=now_s,
        index=index,
        payloads=payloads,
        fast=fast,
        capacity_bytes=quotas[-1].quota_bytes if quotas else settings.capacity_bytes,
        total=amount_of(held.accounts) if known else None,
        upkeep=waiting_in(held.accounts),
        janitor=is_at_work(held.given, now_s),
        quotas=quotas,
        tenants=_tenants(held.accounts, own),
        namespaces=tuple(
            NamespaceStatus(
                **dict(summary),
                upkeep=waiting_in([account]),
                quota_bytes=own.get(Scope.namespace(account.namespace)),
                ttl_s=account.ttl_s or None,
                cost_s=account.usage.cost_us / 1e6,
                seen_s=account.seen_s or None,
                shards=account.shards,
                oldest_use_s=oldest.get(account.namespace),
            )
            for account, summary in summaries(replace(held, accounts=named))
        ),
    )


def _tenants(accounts: Sequence[Account], own: Mapping[str, int]) -> tuple[TenantStatus, ...]:
    members: dict[str, list[Account]] = defaultdict(list)
    for account in accounts:
        members[account.tenant].append(account)
    lines = [
        TenantStatus(
            tenant=tenant,
            namespaces=len(theirs),
            usage=amount_of(theirs),
            upkeep=waiting_in(theirs),
            quota_bytes=own.get(Scope.tenant(tenant)),
        )
        for tenant, theirs in members.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.usage.stored_bytes, line.tenant)))
