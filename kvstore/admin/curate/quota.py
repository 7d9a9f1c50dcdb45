"""quota: shows and sets how much the store, tenants and namespaces may hold, and for how long.

Setting a size evicts nothing by itself: engines evict when they save, and a janitor in its next round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.counting import amount_of
from kvstore.admin.curate import ttl
from kvstore.admin.curate.reports import PolicyLine, QuotaReport, QuotasReport
from kvstore.admin.reports import Amount, QuotaLine, QuotaState
from kvstore.index.eviction import Lifetimes, Scope, watermarks
from kvstore.index.maintenance import Account
from kvstore.keys import NamespaceId, SaltId
from kvstore.rules.units import size
from kvstore.store.housekeeping import quotas as effective_quotas
from kvstore.store.rounds import SIGNS
from kvstore.store.salts import SaltQuotas
from schemas.settings import Settings

_TENANT = Scope.tenant("")
_NAMESPACE = Scope.namespace("")
_SALT = "salt/"


class Unchanged(Enum):
    """No change, where None clears."""

    YES = 0


UNCHANGED: Final = Unchanged.YES


def quotas(cache: Cache, now_s: float) -> QuotasReport:
    """Returns every quota, how much of it is used, and every time to live. Raises what the index raises."""
    accounts, given = cache.accounts(), cache.quotas()
    lifetimes = Lifetimes.of(cache.settings.eviction.ttl_s, given)
    sizes = quota_lines(accounts, given, cache.settings, _held(cache, given))
    aged_alone = sorted({*lifetimes.given} - {line.scope for line in sizes})
    lines = [
        PolicyLine(
            scope=scope,
            quota_bytes=None,
            used_bytes=amount_of(under).stored_bytes,
            pinned_bytes=sum(one.usage.pinned_bytes for one in under),
            source="set",
            state="ok",
            known=bool(under),
            ttl_s=lifetimes.given[scope],
            ttl_source="set",
        )
        for scope in aged_alone
        for under in [ttl.under(scope, accounts)]
    ]
    return QuotasReport(at_s=now_s, quotas=(*lines, *(_with_age(line, lifetimes) for line in sizes)))


def _with_age(line: QuotaLine, lifetimes: Lifetimes) -> PolicyLine:
    ttl_s, every = lifetimes.given.get(line.scope), lifetimes.every
    source: Literal["settings", "set"] | None = None if ttl_s is None else "set"
    if line.scope == Scope.STORE and every is not None and (ttl_s is None or every < ttl_s):
        ttl_s, source = every, "settings"
    return PolicyLine(**dict(line), ttl_s=ttl_s, ttl_source=source)


@dataclass(frozen=True, slots=True)
class Change:
    """A scope's new size and time to live: None clears one, and one that is not given stays."""

    nbytes: int | Unchanged | None = UNCHANGED
    ttl_s: int | Unchanged | None = UNCHANGED


def set_quota(cache: Cache, scope: str, change: Change, *, applied: bool, now_s: float) -> QuotaReport:
    """Sets the size and the time to live of a scope, or clears them; only a plan unless `applied`.

    Where the time to live changes it reads through what the namespaces under the scope hold, to say how much
    is older. Creates the index if it is absent and something is set. Raises UnknownName for a scope that
    can't exist, and what the index raises.
    """
    accounts, given = cache.accounts(), cache.quotas()
    lifetimes = Lifetimes.of(cache.settings.eviction.ttl_s, given)
    scope = _full_scope(scope, accounts, {*given, *lifetimes.given})
    nbytes = change.nbytes if not isinstance(change.nbytes, Unchanged) else given.get(scope)
    ttl_s = change.ttl_s if not isinstance(change.ttl_s, Unchanged) else lifetimes.given.get(scope)
    if ttl_s is not None and scope.startswith(_SALT):
        raise UnknownName("a salt has no time to live; `erase` removes what was saved under one")
    if change.nbytes is None and scope not in given:
        raise UnknownName(f"no size was set for {scope}; `cache-admin quota` lists what there is")
    if change.ttl_s is None and scope not in lifetimes.given:
        raise UnknownName(f"no time to live was set for {scope}; `cache-admin quota` lists what there is")
    after = _with(given, scope, nbytes)
    in_use = _held(cache, {**given, **after})
    line_before = _line(scope, quota_lines(accounts, given, cache.settings, in_use))
    line = _line(scope, quota_lines(accounts, after, cache.settings, in_use))
    held = line or line_before
    used, pinned = (held.used_bytes, held.pinned_bytes) if held else (0, 0)
    excess, problem = 0, ""
    if line is not None and line.state != "ok":
        wanted = used - watermarks(line.quota_bytes)[1]
        excess = min(wanted, used - pinned)
        if excess < wanted:
            problem = "what is pinned does not go: `cache-admin pin --remove`, or give it more"
    under, old = ttl.under(scope, accounts), Amount()
    if not isinstance(change.ttl_s, Unchanged):
        old = ttl.older(cache, under, Lifetimes(lifetimes.every, _with(lifetimes.given, scope, ttl_s)), now_s)
    if applied:
        _apply(cache, scope, change, now_s)
    return QuotaReport(
        at_s=now_s,
        applied=applied,
        scope=scope,
        known=bool(under) or (held is not None and held.known),
        before_bytes=line_before.quota_bytes if line_before else None,
        after_bytes=line.quota_bytes if line else None,
        used_bytes=used,
        pinned_bytes=pinned,
        excess_bytes=excess,
        problem=problem,
        before_ttl_s=lifetimes.given.get(scope),
        after_ttl_s=ttl_s,
        older=old,
    )


def _apply(cache: Cache, scope: str, change: Change, now_s: float) -> None:
    words = []
    if not isinstance(change.nbytes, Unchanged):
        words.append("no size" if change.nbytes is None else size(change.nbytes))
    if not isinstance(change.ttl_s, Unchanged):
        words.append("no time to live" if change.ttl_s is None else f"{change.ttl_s} s")
    cache.record("quota", f"{scope}: {', '.join(words)}")
    index = cache.made_index()
    if not isinstance(change.nbytes, Unchanged):
        index.set_quota(scope, change.nbytes)
    if not isinstance(change.ttl_s, Unchanged):
        index.set_quota(Scope.ttl(scope), change.ttl_s)
        ttl.shorten(cache, index, scope, now_s + cache.settings.grace_s)


def _with(given: Mapping[str, int], scope: str, value: int | None) -> dict[str, int]:
    rest = {name: one for name, one in given.items() if name != scope}
    return rest if value is None else {**rest, scope: value}


def quota_lines(
    accounts: Sequence[Account],
    given: Mapping[str, int],
    settings: Settings,
    held: Mapping[SaltId, int] = MappingProxyType({}),
) -> tuple[QuotaLine, ...]:
    """Returns every quota, the smallest scopes first, but for that which the settings give to every salt.

    `given` are those that operators have set; `held` is what their salts hold, each in the namespace of which
    it holds most.
    """
    lines = [
        QuotaLine(
            scope=Scope.salt(salt),
            quota_bytes=nbytes,
            used_bytes=held.get(salt, 0),
            pinned_bytes=0,
            source="set",
            state=_state(held.get(salt, 0), nbytes),
        )
        for salt, nbytes in SaltQuotas.of(settings, given).given.items()
    ]
    for quota in effective_quotas(accounts, settings, given):
        lines.append(
            QuotaLine(
                scope=quota.scope,
                quota_bytes=quota.nbytes,
                used_bytes=quota.used,
                pinned_bytes=sum(member.usage.pinned_bytes for member in quota.members),
                source="set" if quota.scope in given else "settings",
                state=_state(quota.used, quota.nbytes),
            )
        )
    there = {line.scope for line in lines}
    # Quotas may also have been set for tenants and namespaces that are still to come, or gone.
    unknown = [
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
        if scope not in there and scope not in SIGNS and Scope.of_ttl(scope) is None
    ]
    return (*unknown, *lines)


def _held(cache: Cache, given: Mapping[str, int]) -> Mapping[SaltId, int]:
    """Returns what the salts with a quota of their own hold."""
    salts = SaltQuotas.of(cache.settings, given).given
    most: dict[SaltId, int] = {}
    index = cache.index
    if index is not None and salts:
        for account in index.accounts():
            for salt, nbytes in index.holdings(account.namespace, 0).items():
                if salt in salts:
                    most[salt] = max(nbytes, most.get(salt, 0))
    return most


def quotas_of(account: Account, lines: Sequence[QuotaLine]) -> tuple[QuotaLine, ...]:
    """Returns the quotas that bound one namespace."""
    scopes = {Scope.namespace(account.namespace), Scope.tenant(account.tenant), Scope.STORE}
    return tuple(line for line in lines if line.scope in scopes)


def _state(used: int, nbytes: int) -> QuotaState:
    if used > nbytes:
        return "over"
    return "high" if used > watermarks(nbytes)[0] else "ok"


def _line(scope: str, lines: Sequence[QuotaLine]) -> QuotaLine | None:
    return next((line for line in lines if line.scope == scope), None)


def _full_scope(scope: str, accounts: Sequence[Account], given: Collection[str]) -> str:
    """Returns a scope as the index spells it; `given` are those that something is set for.

    Raises UnknownName.
    """
    if scope.startswith(_SALT):
        if Scope.salt_of(scope.lower()) is None:
            raise UnknownName(f"{scope!r} is no scope: salt/ID has the 32 digits of a salt's id")
        return scope.lower()
    if scope == Scope.STORE or (scope.startswith(_TENANT) and scope != _TENANT):
        return scope
    prefix = scope.removeprefix(_NAMESPACE).lower()
    if not scope.startswith(_NAMESPACE) or not prefix:
        raise UnknownName(
            f"{scope!r} is no scope: store, tenant/NAME, salt/ID or namespace/ID (its start is enough)"
        )
    known = {account.namespace for account in accounts}
    # A quota may outlive its namespace, and can then be cleared.
    known |= {NamespaceId(name.removeprefix(_NAMESPACE)) for name in given if name.startswith(_NAMESPACE)}
    found = sorted(name for name in known if name.startswith(prefix))
    if len(found) > 1:
        raise UnknownName(f"{len(found)} namespaces start with {prefix!r}: {', '.join(found)}")
    if not found:
        raise UnknownName(f"no namespace starts with {prefix!r}; `cache-admin namespaces` lists them")
    return Scope.namespace(found[0])
