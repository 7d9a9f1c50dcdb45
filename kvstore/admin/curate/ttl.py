"""Times to live of a scope, for `quota`: how much is older, and what namespaces are told of a new one.

A shorter time holds at once: the verb tells every namespace that is registered, and a janitor, or an engine
that saves, tells those that come later. It evicts no more than a page itself; they do the rest. A longer one,
or none, holds from their next round on: they know the settings' time (eviction.ttl_s), which whoever runs
the verb may not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum
from kvstore.admin.reports import Amount
from kvstore.index.eviction import Lifetimes, Scope
from kvstore.index.maintenance import Account, FullIndex

#: The shortest and the longest that can be set: far longer than clocks may differ, or what one of them saves
#: would be too old already; and far below 2**31.
SHORTEST_S = 600
LONGEST_S = 100 * 365 * 86_400


def older(cache: Cache, accounts: Sequence[Account], lifetimes: Lifetimes, now_s: float) -> Amount:
    """Returns what these namespaces hold that is older than they may keep it. Reads through all of it, and
    raises what the index raises."""
    found = AmountSum()
    for account in accounts:
        if (holds_s := lifetimes.of_account(account)) is None:
            continue
        for listing in cache.segments(account.namespace):
            if listing.record.created_s <= now_s - holds_s:
                found.add(listing.record.slots, listing.record.nbytes)
    return found.amount


def shorten(cache: Cache, index: FullIndex, scope: str, delete_after_s: float) -> None:
    """Tells the namespaces under a scope what is set by now, where that is shorter than what holds there."""
    lifetimes = Lifetimes.of(cache.settings.eviction.ttl_s, index.quotas())
    for account in under(scope, index.accounts()):
        holds_s = lifetimes.of_account(account)
        if holds_s is not None and holds_s < (account.ttl_s or LONGEST_S + 1):
            index.age_out(account.namespace, holds_s, delete_after_s=delete_after_s)


def under(scope: str, accounts: Sequence[Account]) -> list[Account]:
    """Returns the namespaces under a scope."""
    return [
        one
        for one in accounts
        if scope in (Scope.STORE, Scope.tenant(one.tenant), Scope.namespace(one.namespace))
    ]
