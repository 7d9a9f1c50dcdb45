"""status: the backends, whether they answer, and how much is stored of what may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvstore.admin.backends import Cache
from kvstore.admin.counting import amount_of
from kvstore.admin.curate.quota import quota_lines
from kvstore.admin.inspect.namespaces import Overview, summaries, waiting_in
from kvstore.admin.inspect.reports import NamespaceStatus, StatusReport, TenantStatus
from kvstore.admin.reports import BackendState, QuotaLine
from kvstore.errors import KVStoreError
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Account, FullIndex
from kvstore.store.rounds import is_at_work

#: How many namespaces, the largest, are asked what they would evict first: a round trip each.
ASKED_NAMESPACES = 50


def status(cache: Cache, now_s: float) -> StatusReport:
    """Returns the backends, whether they answer, and how much is stored of what may be.

    A failing backend is reported, not raised. Costs a few round trips, however much is stored.
    """
    index = cache.index_state()
    held = Overview()
    lines: tuple[NamespaceStatus, ...] = ()
    if index.state == "ok" and cache.index is not None:
        try:
            held = Overview.of(cache.index)
            lines = _statuses(cache.index, held, quota_lines(held.accounts, held.given, cache.settings))
        except KVStoreError as exc:
            index = BackendState(url=index.url, state="unreachable", problem=str(exc))
            held = Overview()
    known = index.state != "unreachable"
    quotas = quota_lines(held.accounts, held.given, cache.settings) if known else ()
    return StatusReport(
        at_s=now_s,
        index=index,
        payloads=cache.payloads_state(),
        fast=cache.fast_state(),
        capacity_bytes=quotas[-1].quota_bytes if quotas else cache.settings.capacity_bytes,
        total=amount_of(held.accounts) if known else None,
        upkeep=waiting_in(held.accounts),
        janitor=is_at_work(held.given, now_s),
        quotas=quotas,
        tenants=_tenants(held.accounts, quotas),
        namespaces=lines,
    )


def _statuses(index: FullIndex, held: Overview, quotas: Sequence[QuotaLine]) -> tuple[NamespaceStatus, ...]:
    own = {line.scope: line.quota_bytes for line in quotas}
    lines = []
    for number, (account, summary) in enumerate(summaries(held)):
        first = index.order(account.namespace, 1) if number < ASKED_NAMESPACES else []
        lines.append(
            NamespaceStatus(
                **dict(summary),
                upkeep=waiting_in([account]),
                quota_bytes=own.get(Scope.namespace(account.namespace)),
                ttl_s=account.ttl_s or None,
                cost_s=account.usage.cost_us / 1e6,
                seen_s=account.seen_s or None,
                shards=account.shards,
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
            upkeep=waiting_in(theirs),
            quota_bytes=own.get(Scope.tenant(tenant)),
        )
        for tenant, theirs in members.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.usage.stored_bytes, line.tenant)))
