"""Times to live: how old what is stored may become, as retention rules ask for it.

The settings give one to all (`eviction.ttl_s`), operators give others to the store, tenants and namespaces
(`cache-admin ttl set`), and the shortest of those that a namespace is under holds: each is an upper bound.
Age counts from the second in which a segment was made; a use makes nothing younger, and computing the same
again makes new data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Account
from schemas.settings import Settings


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The times to live in seconds: that of the settings, and those that operators have set, by scope."""

    every: int | None = None
    given: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, given: Mapping[str, int]) -> Lifetimes:
        """Returns the times to live among what operators have set (`Quotas.quotas`), and the settings'."""
        every = settings.eviction.ttl_s
        found = {scope: seconds for name, seconds in given.items() if (scope := Scope.of_ttl(name))}
        return cls(None if every is None else max(1, int(every)), found)

    def of_account(self, account: Account) -> int | None:
        """Returns the shortest that a namespace is under; None: it is under none."""
        scopes = (Scope.STORE, Scope.tenant(account.tenant), Scope.namespace(account.namespace))
        known = [self.every, *(self.given.get(scope) for scope in scopes)]
        return min((one for one in known if one is not None), default=None)
