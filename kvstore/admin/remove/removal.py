"""Removal of what one namespace holds: the steps that `drop` and `erase` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Literal

from kvstore.admin.backends import Cache
from kvstore.admin.counting import paged
from kvstore.errors import CorruptPayload, KVStoreError, UnreadablePayload
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NO_SALT, NamespaceId, SaltId, parse_payload_name, payload_name
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from kvstore.verify.payloads import read_header

#: What one call of the index removes.
_STEP = 4096

#: `waiting`: something of it is still in the trash, or incomplete. `in_use`: an engine has stored something
#: since. `erased`: the index has forgotten the namespace.
Forgotten = Literal["waiting", "in_use", "erased"]


class NamespaceRemoval:
    """Removes what a namespace holds. Every step may be repeated, and be cut off anywhere. For one thread.

    Steps raise what the backends raise; what was done until then stays done, and is counted.
    """

    def __init__(self, cache: Cache, index: FullIndex, name: NamespaceId, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._index = index
        self._name = name
        self._clock = clock
        self._far_s = 10 * cache.settings.grace_s + 86400.0
        self._failure: KVStoreError | None = None
        #: Segments made invisible by `hide`, and payloads deleted.
        self.invalidated = 0
        self.deleted = 0

    @cached_property
    def _housekeeping(self) -> Housekeeping:
        cache = self._cache
        return Housekeeping(
            self._index, cache.payloads, cache.settings, Counters(), self._clock, failed=self._failed
        )

    def hide(self) -> None:
        """Makes all of it invisible, also for an index that is made again from the payloads. That comes last:
        a bucket that doesn't answer then leaves nothing in sight."""
        if self._index.usage(self._name).segments:
            self.invalidated += self._index.invalidate(self._name)
        self._cache.evidence.refuse(self._name, {}, self._index.now(self._name))

    def drain(self, *, at_once: bool) -> None:
        """Puts what was invalidated into the trash: for the grace time, unless `at_once`."""
        self._housekeeping.drain(self._name, delete_after_s=0.0 if at_once else None)

    def reap(self) -> None:
        """Deletes the payloads in the trash whose grace time is over."""
        while reaped := self._housekeeping.reap(self._name):
            self.deleted += reaped
        if self._failure is not None:
            raise self._failure

    def reap_early(self) -> None:
        """Deletes the payloads in the trash whose grace time is not over."""
        while due := self._index.reapable(self._name, self._clock() + self._far_s, _STEP):
            self.delete([payload_name(self._name, one, rank) for one, ranks in due for rank in range(ranks)])
            self._index.reaped(self._name, [segment for segment, _ in due])

    def delete_strays(self, before_s: float) -> int:
        """Deletes payloads of before that time which the index never knew, or has forgotten. Returns how
        many."""
        before = self.deleted
        for page in paged(self._strays(before_s)):
            self.delete(page)
        return self.deleted - before

    def delete_evidence(self, salt: SaltId = NO_SALT) -> int:
        """Deletes what is kept of this namespace as evidence, or of a salt alone and what can't be read here.
        Returns how much."""
        evidence, keyring = self._cache.evidence, self._cache.keyring
        names = []
        for one in evidence.copies(self._name):
            if salt and not one.nbytes:
                # It says no more than that its segment may not come back.
                continue
            try:
                header = read_header(evidence.payloads, keyring, one.name, one.nbytes, self._name)
            except (CorruptPayload, UnreadablePayload):
                header = None
            if not salt or header is None or header.salt == salt:
                names.append(one.name)
        if salt:
            # An empty object goes on saying that its segment may not come back.
            for name in names:
                evidence.payloads.put(name, [memoryview(b"")])
        else:
            evidence.payloads.delete(names)
        return len(names)

    def _strays(self, before_s: float) -> Iterable[str]:
        for page in paged(self._cache.payloads.list(f"{self._name}/")):
            parsed = [
                (listed.name, parse_payload_name(listed.name))
                for listed in page
                if listed.modified_s <= before_s
            ]
            pairs = [(name, parts[1]) for name, parts in parsed if parts is not None]
            states = self._index.states(self._name, [segment for _, segment in pairs])
            yield from (name for (name, _), state in zip(pairs, states, strict=True) if state is None)

    def delete(self, names: list[str]) -> None:
        """Deletes payloads by their names."""
        self.deleted += self._cache.payloads.delete(names)

    def forget(self) -> Forgotten:
        """Forgets the namespace if it holds nothing."""
        while (done := self._index.erase(self._name, _STEP)) == "more":
            pass
        if done == "erased":
            return "erased"
        return "in_use" if self._index.usage(self._name).segments else "waiting"

    def _failed(self, exc: KVStoreError) -> None:
        self._failure = exc
