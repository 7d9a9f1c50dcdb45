"""quota: what the store, tenants and namespaces may hold, and what of it is used.

Setting a quota evicts nothing by itself: engines do when they save, and a janitor in its next round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.admin.cache import Cache, UnknownName
from kvstore.catalogue import Account
from kvstore.eviction import Scope
from kvstore.keys import NamespaceId
from kvstore.tending import quotas as tended
from schemas.reports import QuotaLine, QuotaState
from schemas.settings import Settings
from schemas.upkeep import QuotaReport, QuotasReport

_TENANT = Scope.tenant("")
_NAMESPACE = Scope.namespace("")


def quotas(cache: Cache, now_s: float) -> QuotasReport:
    """Every quota with what is used of it. Raises what the index raises."""
    accounts = cache.index.accounts() if cache.index else []
    given = cache.index.quotas() if cache.index else {}
    eviction = cache.settings.eviction
    lines = quota_lines(accounts, given, cache.settings)
    return QuotasReport(at_s=now_s, high=eviction.high, low=eviction.low, quotas=lines)


def set_quota(cache: Cache, scope: str, nbytes: int | None, *, applied: bool, now_s: float) -> QuotaReport:
    """Set the quota of a scope, or with None clear it; only a plan unless `applied`.

    Raises UnknownName for a scope that there can't be, and what the index raises. Makes the index if it is
    absent and the quota is set.
    """
    accounts = cache.index.accounts() if cache.index else []
    given = cache.index.quotas() if cache.index else {}
    scope = _full_scope(scope, accounts, given)
    if nbytes is None and scope not in given:
        raise UnknownName(f"no quota was set for {scope}; `cache-admin quota` lists what there is")
    after = {name: value for name, value in given.items() if name != scope}
    if nbytes is not None:
        after[scope] = nbytes
    line_before = _line(scope, quota_lines(accounts, given, cache.settings))
    line = _line(scope, quota_lines(accounts, after, cache.settings))
    held = line or line_before
    used, pinned = (held.used_bytes, held.pinned_bytes) if held else (0, 0)
    excess, problem = 0, ""
    if line is not None and line.state != "ok":
        wanted = used - int(line.quota_bytes * cache.settings.eviction.low)
        excess = min(wanted, used - pinned)
        if excess < wanted:
            problem = "what is pinned does not go: unpin, or give it more"
    if applied:
        cache.made_index().set_quota(scope, nbytes)
    return QuotaReport(
        at_s=now_s,
        applied=applied,
        scope=scope,
        known=held is not None and held.known,
        before_bytes=line_before.quota_bytes if line_before else None,
        after_bytes=line.quota_bytes if line else None,
        used_bytes=used,
        pinned_bytes=pinned,
        excess_bytes=excess,
        problem=problem,
    )


def quota_lines(
    accounts: Sequence[Account], given: Mapping[str, int], settings: Settings
) -> tuple[QuotaLine, ...]:
    """Every quota that there is, the smallest scopes first; `given` are those that operators have set."""
    lines = []
    for quota in tended(accounts, settings, given):
        lines.append(
            QuotaLine(
                scope=quota.scope,
                quota_bytes=quota.nbytes,
                used_bytes=quota.used,
                pinned_bytes=sum(member.usage.pinned_bytes for member in quota.members),
                source="set" if quota.scope in given else "settings",
                state=_state(quota.used, quota.nbytes, settings.eviction.high),
            )
        )
    there = {line.scope for line in lines}
    # Of tenants and namespaces that are still to come, or gone.
    lost = [
        QuotaLine(
            scope=scope,
            quota_bytes=nbytes,
            used_bytes=0,
            pinned_bytes=0,
            source="set",
            state="ok",
            known=False,
        )
        for scope, nbytes in sorted(given.items())
        if scope not in there
    ]
    return (*lost, *lines)


def quotas_of(account: Account, lines: Sequence[QuotaLine]) -> tuple[QuotaLine, ...]:
    """Those that bound one namespace."""
    scopes = {Scope.namespace(account.namespace), Scope.tenant(account.tenant), Scope.STORE}
    return tuple(line for line in lines if line.scope in scopes)


def _state(used: int, nbytes: int, high: float) -> QuotaState:
    if used > nbytes:
        return "over"
    return "high" if used > high * nbytes else "ok"


def _line(scope: str, lines: Sequence[QuotaLine]) -> QuotaLine | None:
    return next((line for line in lines if line.scope == scope), None)


def _full_scope(scope: str, accounts: Sequence[Account], given: Mapping[str, int]) -> str:
    """The scope as the index spells it. Raises UnknownName."""
    if scope == Scope.STORE or (scope.startswith(_TENANT) and scope != _TENANT):
        return scope
    prefix = scope.removeprefix(_NAMESPACE).lower()
    if not scope.startswith(_NAMESPACE) or not prefix:
        raise UnknownName(f"{scope!r} is no scope: store, tenant/NAME or namespace/ID (its start is enough)")
    known = {account.namespace for account in accounts}
    # A quota may outlive its namespace, and can then be cleared.
    known |= {NamespaceId(name.removeprefix(_NAMESPACE)) for name in given if name.startswith(_NAMESPACE)}
    found = sorted(name for name in known if name.startswith(prefix))
    if len(found) > 1:
        raise UnknownName(f"{len(found)} namespaces start with {prefix!r}: {', '.join(found)}")
    if not found:
        raise UnknownName(f"no namespace starts with {prefix!r}; `cache-admin namespaces` lists them")
    return Scope.namespace(found[0])
