"""ttl: shows and sets how old what is stored may become, in the store, for tenants and for namespaces.

A shorter time holds at once: this verb tells every namespace that is registered, and a janitor, or an engine
that saves, tells those that come later. It evicts no more than a page itself; they do the rest. A longer one,
or none, holds from their next round on: they know the settings' time (eviction.ttl_s), which whoever runs
this verb may not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.counting import AmountSum
from kvstore.admin.curate.quota import full_scope
from kvstore.admin.remove.reports import TtlLine, TtlReport, TtlsReport
from kvstore.index.eviction import Lifetimes, Scope
from kvstore.index.maintenance import Account, FullIndex

#: The shortest and the longest that can be set: far longer than clocks may differ, or what one of them saves
#: would be too old already; and far below 2**31.
SHORTEST_S = 600
LONGEST_S = 100 * 365 * 86_400


def ttls(cache: Cache, now_s: float) -> TtlsReport:
    """Returns every time to live that is set. Raises what the index raises."""
    accounts, lifetimes = cache.accounts(), Lifetimes.of(cache.settings.eviction.ttl_s, cache.quotas())
    lines = [
        TtlLine(scope=scope, ttl_s=ttl_s, namespaces=len(_under(scope, accounts)), source="set")
        for scope, ttl_s in sorted(lifetimes.given.items())
    ]
    if lifetimes.every is not None:
        every = TtlLine(scope=Scope.STORE, ttl_s=lifetimes.every, namespaces=len(accounts), source="settings")
        lines.append(every)
    return TtlsReport(at_s=now_s, ttls=tuple(lines))


def set_ttl(cache: Cache, scope: str, ttl_s: int | None, *, applied: bool, now_s: float) -> TtlReport:
    """Sets the time to live of a scope, or with None clears it; only a plan unless `applied`.

    Reads through what the namespaces under it hold, to say how much is older. Creates the index if it is
    absent and the time is set. Raises UnknownName for a scope that can't exist, and what the index raises.
    """
    accounts, given = cache.accounts(), cache.quotas()
    before = Lifetimes.of(cache.settings.eviction.ttl_s, given)
    scope = _full_scope(scope, accounts, before.given)
    if ttl_s is None and scope not in before.given:
        raise UnknownName(f"no time to live was set for {scope}; `cache-admin ttl` lists what there is")
    changed = {name: seconds for name, seconds in before.given.items() if name != scope}
    after = Lifetimes(before.every, changed if ttl_s is None else {**changed, scope: ttl_s})
    under, older = _under(scope, accounts), AmountSum()
    for account in under:
        if (holds_s := after.of_account(account)) is None:
            continue
        for listing in cache.segments(account.namespace):
            if listing.record.created_s <= now_s - holds_s:
                older.add(listing.record.slots, listing.record.nbytes)
    if applied:
        cache.record("ttl", f"{scope}: {'none' if ttl_s is None else f'{ttl_s} s'}")
        index = cache.made_index()
        index.set_quota(Scope.ttl(scope), ttl_s)
        _shorten(cache, index, scope, now_s + cache.settings.grace_s)
    return TtlReport(
        at_s=now_s,
        applied=applied,
        scope=scope,
        before_s=before.given.get(scope),
        after_s=ttl_s,
        namespaces=len(under),
        older=older.amount,
    )


def _shorten(cache: Cache, index: FullIndex, scope: str, delete_after_s: float) -> None:
    """Tells the namespaces under a scope what is set by now, where that is shorter than what holds there."""
    lifetimes = Lifetimes.of(cache.settings.eviction.ttl_s, index.quotas())
    for account in _under(scope, index.accounts()):
        holds_s = lifetimes.of_account(account)
        if holds_s is not None and holds_s < (account.ttl_s or LONGEST_S + 1):
            index.age_out(account.namespace, holds_s, delete_after_s=delete_after_s)


def _under(scope: str, accounts: Sequence[Account]) -> list[Account]:
    return [
        one
        for one in accounts
        if scope in (Scope.STORE, Scope.tenant(one.tenant), Scope.namespace(one.namespace))
    ]


def _full_scope(scope: str, accounts: Sequence[Account], given: Mapping[str, int]) -> str:
    if scope.startswith("salt/"):
        raise UnknownName(
            "a salt has no time to live: store, tenant/NAME or namespace/ID; `erase` removes one"
        )
    return full_scope(scope, accounts, given)
