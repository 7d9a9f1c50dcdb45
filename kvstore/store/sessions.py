"""A process's reports to the index of clients' sessions in one namespace, and how much they may retain.

At most `sessions.retain_share` of every quota that bounds a namespace is retained: of its own, its tenant's,
the store's and, of what was saved under a salt, that salt's. Within a namespace the index holds to that.
Clients share it, as far as they can be told apart: a salt has at most SALT_SHARE of what a namespace may
retain, requests without a salt together UNSALTED_SHARE, and a session SESSION_SHARE.

Namespaces of one tenant share the tenant's quota, and all namespaces the store's. So once a minute a process
asks the index how much some of the other namespaces retain. Namespaces that it has not asked about yet count
as the others do on average.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.errors import KVStoreError
from kvstore.index.eviction import Scope
from kvstore.index.port import Run
from kvstore.index.sessions import NOTHING_RETAINED, Allowance, Hint, HintEffect
from kvstore.keys import NO_SALT, NamespaceId, SaltId, SegmentId, SessionId, namespace_id
from kvstore.store.backends import Backends
from schemas.namespace import Namespace

log = logging.getLogger(__name__)

#: Share that one salt may retain of what a namespace may.
SALT_SHARE = 0.5
#: Requests without a salt retain nothing more once this share is retained: the rest is for salted requests.
#: Without salts it is unknown which sessions are one client's.
UNSALTED_SHARE = 0.75
#: Share that one session may retain of what a namespace may.
SESSION_SHARE = 0.5
#: Seconds for which quotas, and what is retained elsewhere, are taken to be what they were.
_KNOWN_S = 60.0
#: Namespaces, beside its own, that a look asks at most.
_OTHERS = 64


class _Held(NamedTuple):
    """The bytes that another namespace retained at a look."""

    tenant: str
    nbytes: int
    asked_s: float


class SpaceSessions:
    """The sessions of one namespace, as its engines tell of them. Safe for threads."""

    def __init__(
        self,
        backends: Backends,
        namespace: Namespace,
        registered: Callable[[Callable[[], HintEffect]], HintEffect],
    ) -> None:
        self._backends = backends
        self._id = namespace_id(namespace)
        self._tenant = namespace.tenant
        self._registered = registered
        self._lock = threading.Lock()
        # The lock guards the fields below it.
        self._given: dict[str, int] = {}
        self._held: dict[NamespaceId, _Held] = {}
        #: Bytes retained in the tenant's other namespaces, and in all others, or None before the first look.
        self._elsewhere: tuple[int, int] | None = None
        self._looked_s = float("-inf")

    def tell(
        self, session: SessionId, segments: Sequence[SegmentId], hint: Hint, salt: SaltId
    ) -> HintEffect | None:
        """Records a use, and the hint that comes with it; see Space.session."""
        backends = self._backends
        try:
            allowance = self.allowance(session, salt)
            return self._registered(
                lambda: backends.index.session(self._id, session, segments, hint=hint, allowance=allowance)
            )
        except KVStoreError as exc:
            log.debug("session not reported: %s", exc)
        except Exception:
            log.exception("a session could not be reported: an unexpected failure")
        return None

    def owned(self, session: SessionId) -> list[Run] | None:
        """Returns the runs that only a session has used, or None if the index can't say; see Space.owned."""
        try:
            found = self._backends.index.owned(self._id, session)
        except KVStoreError as exc:
            log.debug("the segments of a session are unknown: %s", exc)
            return None
        except Exception:
            log.exception("the segments of a session are unknown: an unexpected failure")
            return None
        runs = [Run(record.depth, segment, 0, record.slots, record) for segment, record in found.items()]
        return sorted(runs, key=lambda run: run.start)

    def allowance(self, session: SessionId, salt: SaltId = NO_SALT) -> Allowance:
        """Returns what a session's requests may retain. Asks the index once a minute; never raises."""
        settings = self._backends.settings
        if not session or not settings.sessions.retain_share:
            return NOTHING_RETAINED
        self._look()
        eviction = settings.eviction
        with self._lock:
            given, elsewhere = self._given, self._elsewhere
        if elsewhere is None:
            return NOTHING_RETAINED
        of_tenant, of_all = elsewhere
        bounds = (
            (given.get(Scope.namespace(self._id), eviction.namespace_bytes), 0),
            (given.get(Scope.tenant(self._tenant), eviction.tenant_bytes), of_tenant),
            (given.get(Scope.STORE, settings.capacity_bytes), of_all),
        )
        share = settings.sessions.retain_share
        here = min(int(quota * share) - others for quota, others in bounds if quota is not None)
        here = max(0, here)
        session_bytes = int(here * SESSION_SHARE)
        if not salt:
            return Allowance(int(here * UNSALTED_SHARE), 0, session_bytes)
        of_salt, salt_bytes = given.get(Scope.salt(salt), eviction.salt_bytes), int(here * SALT_SHARE)
        if of_salt is not None:
            salt_bytes = min(salt_bytes, max(0, int(of_salt * share)))
        return Allowance(here, salt_bytes, session_bytes)

    def _look(self) -> None:
        now = self._backends.clock()
        with self._lock:
            if self._looked_s <= now < self._looked_s + _KNOWN_S:
                return
            self._looked_s = now
            before = self._held
        index = self._backends.maintenance
        try:
            given = index.quotas()
            with self._lock:
                self._given = given
            accounts, unreachable = index.reachable()
        except KVStoreError as exc:
            log.debug("the room for retained segments is unknown: %s", exc)
            return
        others = {
            one.namespace: one.tenant for one in accounts if one.namespace != self._id and one.usage.nbytes
        }
        known = {one: held for one, held in before.items() if one in others or unreachable is not None}
        others = {one: held.tenant for one, held in known.items()} | others
        for one in self._asked(others, known):
            try:
                nbytes = index.retained(one).get(NO_SALT, 0)
            except KVStoreError as exc:
                log.debug("the retained bytes of namespace %s are unknown: %s", one, exc)
            else:
                known[one] = _Held(others[one], nbytes, now)
        of_tenant, of_others = (
            _estimated(
                [held.nbytes for held in known.values() if (held.tenant == self._tenant) == mine],
                sum((tenant == self._tenant) == mine for tenant in others.values()),
            )
            for mine in (True, False)
        )
        with self._lock:
            self._held, self._elsewhere = known, (of_tenant, of_tenant + of_others)

    def _asked(
        self, others: Mapping[NamespaceId, str], known: Mapping[NamespaceId, _Held]
    ) -> list[NamespaceId]:
        """Returns the namespaces to ask about: half of them the tenant's, half others, oldest answers
        first."""
        order = sorted(others, key=lambda one: known[one].asked_s if one in known else float("-inf"))
        mine = [one for one in order if others[one] == self._tenant]
        rest = [one for one in order if others[one] != self._tenant]
        half = _OTHERS // 2
        return [*mine[:half], *rest[:half], *mine[half:], *rest[half:]][:_OTHERS]


def _estimated(known: Sequence[int], count: int) -> int:
    """Returns the sum of `count` numbers of which some are known."""
    return sum(known) * count // len(known) if known else 0
