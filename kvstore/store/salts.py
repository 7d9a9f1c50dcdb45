"""Quotas of salts: what requests with one `cache_salt` may hold, in each namespace.

A tenant behind a gateway that salts its requests is thus bounded like a tenant with a namespace of its own.
Every look at the quotas asks how much the salts hold. Segments are listed only for a salt that holds too
much. The segments used longest ago go first, tails before heads. Pinned segments stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvstore.index.eviction import Scope, watermarks
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId, SaltId, SegmentId
from kvstore.rules.units import batches
from schemas.settings import Settings

#: Segments evicted by one call of the index.
_STEP = 256


@dataclass(frozen=True, slots=True)
class SaltQuotas:
    """The quotas of salts in bytes: `given` to single ones by operators, the settings' for all others."""

    every: int | None
    given: Mapping[SaltId, int] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, given: Mapping[str, int]) -> SaltQuotas:
        """Returns the quotas of salts, with those that operators have set, by scope."""
        found = {salt: nbytes for name, nbytes in given.items() if (salt := Scope.salt_of(name))}
        return cls(settings.eviction.salt_bytes, found)

    def __bool__(self) -> bool:
        return self.every is not None or bool(self.given)

    @property
    def smallest(self) -> int:
        """The smallest of all quotas; there is one."""
        return min([*self.given.values(), *([] if self.every is None else [self.every])])

    def exceeded(self, index: FullIndex, namespace: NamespaceId) -> Iterator[tuple[SaltId, int]]:
        """Yields the salts that hold more of a namespace than their upper watermark, and their quota."""
        for salt, held in index.holdings(namespace, watermarks(self.smallest)[0]).items():
            quota = self.given.get(salt, self.every)
            if quota is not None and held > watermarks(quota)[0]:
                yield salt, quota


def evict_down_to(
    index: FullIndex,
    namespace: NamespaceId,
    salt: SaltId,
    nbytes: int,
    *,
    delete_after_s: float,
    proceed: Callable[[], None],
) -> int:
    """Evicts what a salt has in a namespace until it holds no more than `nbytes`, as far as it isn't pinned.
    Returns how many segments that took. Raises what the index raises.
    """
    listed = list(index.of_salt(namespace, salt))
    over = sum(one.record.nbytes for one in listed) - nbytes
    chosen: list[SegmentId] = []
    for one in sorted(listed, key=lambda one: (one.last_use_s, -one.record.depth, one.segment)):
        if over <= 0:
            break
        if not one.pinned:
            chosen.append(one.segment)
            over -= one.record.nbytes
    gone = 0
    for some in batches(chosen, _STEP):
        proceed()
        gone += index.evict(namespace, some, delete_after_s=delete_after_s, rule="salt_quota")
    return gone
