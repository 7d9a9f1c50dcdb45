"""ShardedRemoval: evicts, deletes and mends in namespaces that lie in several shards.

Upkeep goes on with the shards that answer: what a node that is down holds stays as it is, and
Catalogue.reachable says so. What somebody asked for by name (`evict`, `invalidate`, `erase`) fails if a shard
does, after all others have done it; asked for again, it is done in the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice, zip_longest

from kvstore.errors import CapacityExceeded, TransientError
from kvstore.index.contract import CULL_LOOKS
from kvstore.index.maintenance import (
    Candidate,
    Entry,
    Erased,
    Reconciled,
)
from kvstore.index.sharding.catalogue import ShardedCatalogue, in_order, summed
from kvstore.index.sharding.layouts import split
from kvstore.index.sharding.names import ONE, layout_of, shard_names
from kvstore.keys import NamespaceId, SaltId, SegmentId
from schemas.records import EvictionRule

#: How many more of each order a cull looks at than its equal part of twice what is to be evicted.
_FEW_LOOKS = 16


@dataclass(slots=True)
class _Part:
    """What one shard gives of what is to be evicted."""

    nbytes: int = 0
    segments: int = 0


class ShardedRemoval(ShardedCatalogue):
    """The part of ShardedIndex that changes what is there."""

    # Evictions

    def cull(
        self,
        namespace: NamespaceId,
        *,
        keep_bytes: int,
        delete_after_s: float,
        limit: int,
        rule: EvictionRule,
        spare_from_s: float | None = None,
        among: Collection[NamespaceId] = (),
    ) -> list[SegmentId]:
        """Looks at the orders first and at the usage after that, as kvstore.store.housekeeping does over
        namespaces: two that do this at once have one plan, or the second finds it carried out."""

        def cull(name: NamespaceId, keep: int, most: int) -> list[SegmentId]:
            return self._leaf.cull(
                name,
                keep_bytes=keep,
                delete_after_s=delete_after_s,
                limit=most,
                rule=rule,
                spare_from_s=spare_from_s,
            )

        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.name)

        def gone(culled: Collection[SegmentId]) -> None:
            for other in sorted(layout.others) if culled else ():
                for name, some in split(shard_names(namespace, other), list(culled)).items():
                    with suppress(TransientError):
                        self._leaf.evict(name, some, delete_after_s=delete_after_s, rule=rule)

        if len(shards) == 1:
            culled = cull(shards[0], keep_bytes, limit)
            gone(culled)
            return culled
        # What each leaf does in its own order, and here has to be done before any order is read.
        self.expire(namespace)
        some = [name for name in shards if not among or name in among]
        # Chains spread evenly, so about an equal part of each is looked at; of all of them more, if need be.
        looks, enough = _FEW_LOOKS + 2 * limit // len(shards), False
        while not enough:
            looks = min(looks, CULL_LOOKS)
            orders = self._orders(some, looks)
            usages = self._answering(some, self._leaf.usage)
            excess = sum(one.nbytes for one in usages.values()) - keep_bytes
            parts, enough = _plan(orders, looks, excess, limit, spare_from_s)
            enough, looks = enough or looks == CULL_LOOKS, 4 * looks
        found: set[SegmentId] = set()
        for name, part in parts.items():
            if name in usages:
                found.update(cull(name, max(0, usages[name].nbytes - part.nbytes), part.segments))
        gone(found)
        return [one.segment for one in merge(*orders.values(), key=in_order) if one.segment in found]

    def age_out(
        self, namespace: NamespaceId, ttl_s: int | None, *, delete_after_s: float, after: str = ""
    ) -> tuple[int, str]:
        """Goes through one shard after the other. The time to live is told to all of them first."""
        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.name)
        if (":" in after) == (len(shards) == 1):
            after = ""  # a pass that began in another layout begins anew
        for other in sorted(layout.others) if not after else ():
            for name in shard_names(namespace, other):
                with suppress(TransientError):
                    self._leaf.age_out(name, ttl_s, delete_after_s=delete_after_s)
        if len(shards) == 1:
            return self._leaf.age_out(shards[0], ttl_s, delete_after_s=delete_after_s, after=after)
        if not after:
            told = self._answering(
                shards, lambda name: self._leaf.age_out(name, ttl_s, delete_after_s=delete_after_s)
            )
            gone, place = sum(count for count, _ in told.values()), 0
            _, rest = told.get(shards[0], (0, ""))
        else:
            number, _, rest = after.partition(":")
            gone, place = 0, min(int(number), len(shards) - 1)
            try:
                gone, rest = self._leaf.age_out(
                    shards[place], ttl_s, delete_after_s=delete_after_s, after=rest
                )
            except TransientError:
                rest = ""  # its turn comes again in the next pass
        if rest:
            return gone, f"{place}:{rest}"
        return gone, f"{place + 1}:" if place + 1 < len(shards) else ""

    # Deletion

    def now(self, namespace: NamespaceId) -> float:
        return self._leaf.now(self._shards(namespace)[0])

    def reapable(
        self, namespace: NamespaceId, now_s: float | None, limit: int
    ) -> list[tuple[SegmentId, int]]:
        """Takes turns, so that payloads of one shard that can't be deleted don't keep the others' waiting."""
        found = self._answering(
            self._shards(namespace), lambda name: self._leaf.reapable(name, now_s, limit)
        ).values()
        turns = chain.from_iterable(zip_longest(*found))
        return list(islice((one for one in turns if one is not None), max(0, limit)))

    def reaped(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        parts = split(self._shards(namespace), segments)
        self._each(parts, lambda name: self._leaf.reaped(name, parts[name]))

    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        return self._in_turn(namespace, limit, self._leaf.sweep)

    def drain(self, namespace: NamespaceId, *, delete_after_s: float, limit: int) -> int:
        return self._in_turn(
            namespace,
            limit,
            lambda name, most: self._leaf.drain(name, delete_after_s=delete_after_s, limit=most),
        )

    def _in_turn(self, namespace: NamespaceId, limit: int, work: Callable[[NamespaceId, int], int]) -> int:
        """Works in one shard after the other up to a limit in all, beginning with any."""
        shards, done = self._shards(namespace), 0

        def some(name: NamespaceId) -> int:
            nonlocal done
            if done < limit:
                done += work(name, limit - done)
            return done

        self._answering(random.sample(shards, len(shards)), some)
        return done

    def invalidate(self, namespace: NamespaceId) -> int:
        """O(1) in each shard, one after the other. Each that held something writes an event of its own."""
        self._known.pop(namespace, None)
        return self._in_all(namespace, lambda shards: sum(self._each(shards, self._leaf.invalidate)))

    def erase(self, namespace: NamespaceId, limit: int) -> Erased:
        """Erases the shards, and then what says that there are any, if nobody has registered the namespace
        meanwhile (ShardedLayouts.register). Nothing goes if something is stored in one of them now, or as
        long as a reshard has not come to its end."""
        if self._now(namespace).others:
            return "in_use"
        self._leaf.begin_erasing(namespace)
        self.forget_layouts(namespace)
        shards = self._shards(namespace)
        if shards != (namespace,):
            if any(self._each(shards, self._leaf.is_in_use)):
                return "in_use"
            erased = self._each(shards, lambda name: self._leaf.erase(name, limit))
            if "in_use" in erased:
                return "in_use"
            if "more" in erased:
                return "more"
        self._known.pop(namespace, None)
        return self._leaf.erase(namespace, limit)

    def forget_layouts(self, namespace: NamespaceId) -> None:
        """Drops what lies in shards of another layout than the namespace's: it had lost what laid it out, and
        was registered with another number, or a reshard that filled them was killed. Nobody looks there.
        Payloads of theirs are strays, but for those that are stored again.
        """
        # Asked before the layout: a layout that has begun since then is not among them, and none comes back.
        names = sorted(self._leaf.listed(namespace))
        self._known.pop(namespace, None)
        if not names:
            return
        layout = self._now(namespace)
        for name in names:
            if layout_of(name) not in {layout.name, *layout.others}:
                self._leaf.forget(name)

    # Pins

    def pin(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, most_bytes: int) -> int:
        def pin(shards: Sequence[NamespaceId]) -> int:
            parts = split(shards, segments)
            return sum(
                self._each(parts, lambda name: self._leaf.pin(name, parts[name], most_bytes=most_bytes))
            )

        if len(self._shards(namespace)) > 1:  # each knows its own part alone
            some = list(dict.fromkeys(segments))
            fresh = [one for one in self.get(namespace, some) if one is not None and not one.pinned]
            whole = self.usage(namespace).pinned_bytes + sum(one.record.nbytes for one in fresh)
            if fresh and whole > most_bytes:
                raise CapacityExceeded(
                    f"{self._leaf!r}: pin: {whole} bytes of namespace {namespace} would be pinned; at most "
                    f"{most_bytes} may be"
                )
        return self._in_all(namespace, pin)

    def unpin(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        def unpin(shards: Sequence[NamespaceId]) -> int:
            parts = split(shards, segments)
            return sum(self._each(parts, lambda name: self._leaf.unpin(name, parts[name])))

        return self._in_all(namespace, unpin)

    # Salts

    def forbid(self, namespace: NamespaceId, salt: SaltId) -> float:
        """Writes it under the namespace's own id first, so that shards that begin later forbid it too."""
        until = self._leaf.forbid(namespace, salt)
        self._known.pop(namespace, None)

        def forbid(shards: Sequence[NamespaceId]) -> list[float]:
            # Under the id it is by now.
            others = [name for name in shards if name != namespace]
            return self._each(others, lambda name: self._leaf.forbid(name, salt))

        return min([until, *self._in_all(namespace, forbid)])

    def forbidden(self, namespace: NamespaceId) -> dict[SaltId, float]:
        return self._leaf.forbidden(namespace)

    # Repair

    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        def unlist(shards: Sequence[NamespaceId]) -> int:
            parts = split(shards, segments)
            return sum(self._each(parts, lambda name: self._leaf.unlist(name, parts[name])))

        return self._in_all(namespace, unlist)

    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        """Drops an entry wherever it stands: one that leads astray need not be where its segment is."""

        def unlink(shards: Sequence[NamespaceId]) -> int:
            return sum(self._each(shards, lambda name: self._leaf.unlink(name, entries)))

        return self._in_all(namespace, unlink)

    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        shards = self._shards(namespace)
        self.forget_layouts(namespace)
        if shards == (namespace,):
            return self._leaf.reconcile(namespace)
        # What a reshard has left under the id itself is not the namespace's.
        left = self._now(namespace).left == ONE
        found = self._each(shards if left else [namespace, *shards], self._leaf.reconcile)
        counted = [one.counted for one in found if one.counted is not None]
        return Reconciled(
            summed([one.recorded for one in found]),
            summed(counted) if len(counted) == len(found) else None,
            sum(one.mended for one in found),
            tuple(dict.fromkeys(name for one in found for name in one.replaced)),
        )


def _plan(
    orders: Mapping[NamespaceId, Sequence[Candidate]],
    looks: int,
    excess: int,
    limit: int,
    spare_from_s: float | None,
) -> tuple[dict[NamespaceId, _Part], bool]:
    """Returns what each shard gives so that together they give `excess` bytes, in the order over all of them
    and up to `limit` segments.

    Returns as well whether the orders tell enough: of each that has `looks` there may be more, and what comes
    after its last one can't be told.
    """
    last = {some[-1].segment for some in orders.values() if some and len(some) >= looks}

    def listed(name: NamespaceId) -> list[tuple[Candidate, NamespaceId]]:
        return [(one, name) for one in orders[name]]

    parts: dict[NamespaceId, _Part] = {}
    chosen = 0
    for one, name in islice(merge(*map(listed, orders), key=lambda item: in_order(item[0])), CULL_LOOKS):
        if excess <= 0 or chosen >= limit:
            break
        if spare_from_s is None or one.used_s < spare_from_s:
            part = parts.setdefault(name, _Part())
            part.nbytes, part.segments = part.nbytes + one.nbytes, part.segments + 1
            excess, chosen = excess - one.nbytes, chosen + 1
        if one.segment in last:
            return parts, excess <= 0 or chosen >= limit
    return parts, True
