"""The store that an import goes into: which segments it lets in, and how they become visible there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kvstore.format.segment import Header
from kvstore.index.port import CommitState
from kvstore.index.sharding.names import of_chain, of_segment, shard_names
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId, payload_name
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.verify.headers import digests_of, namespace_of
from kvstore.verify.returning import Returns
from kvstore.verify.segments import Whole, commit_whole
from schemas.records import SegmentRecord

#: The share of the capacity that is imported: more would evict what has just been imported.
_FILL_TO = 0.9


class Present(Exception):
    """All blocks of this segment are stored already, `slots` of them, in `nbytes` bytes of payload."""

    def __init__(self, slots: int, nbytes: int) -> None:
        super().__init__("it is stored already")
        self.slots = slots
        self.nbytes = nbytes


class NotLetIn(Exception):
    """This segment can't be imported now; the message says why."""


class NotNow(NotLetIn):
    """This segment may be imported a little later."""


class Untagged(NotLetIn):
    """This segment can't be imported where a namespace lies in several shards."""


class Erased(NotLetIn):
    """This segment can't be imported any more."""


class Intake:
    """Lets segments into a store, each of which is begun, has its payloads put, and is committed.

    For one thread. Besides what stands there, its methods raise what the store's backends raise.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._spaces: dict[NamespaceId, Space] = {}
        self._in_shards: dict[NamespaceId, int] = {}
        self._filled = 0
        self._returns = Returns(store.maintenance, store.backends.evidence)

    @cached_property
    def known(self) -> frozenset[NamespaceId]:
        """The namespaces that the store knew when this was asked first."""
        return frozenset(self._store.maintenance.namespaces())

    def holds(self, namespace: NamespaceId, digests: bytes) -> list[bool]:
        """Tells which of those blocks are visible; none if the namespace was never let in."""
        if namespace not in self._store.maintenance.namespaces():
            return [False] * (len(digests) // DIGEST_BYTES)
        return [run is not None for run in self._store.index.find(namespace, digests, digests)]

    def check_absent(self, namespace: NamespaceId, segment: SegmentId) -> None:
        """Raises Present if the segment is visible."""
        listing = self._store.maintenance.get(namespace, [segment])[0]
        if listing is not None:
            raise Present(listing.record.slots, listing.record.nbytes)

    def begin(self, segment: SegmentId, header: Header, record: SegmentRecord) -> None:
        """Claims a segment's blocks, given rank 0's header and the record of it.

        Raises Present if all of them are stored already, NotLetIn if there is no room, NotNow if another
        process saves them, Untagged, and Erased.
        """
        name = NamespaceId(header.meta.namespace_id)
        self._check_barred(name, segment, record)
        digests = digests_of(header)
        store, nbytes = self._store, record.nbytes * header.meta.ranks
        if self._filled + nbytes > store.settings.capacity_bytes * _FILL_TO:
            raise NotLetIn(
                f"no room: {self._filled} bytes are imported and capacity_bytes is "
                f"{store.settings.capacity_bytes}"
            )
        space = self._space(name, header)
        shards = shard_names(name, self._shards(name))
        if not record.depth and of_segment(shards, segment) != of_chain(shards, digests):
            raise Untagged(
                "an older release saved it, under an id that doesn't tell its shard, and its namespace lies "
                "in several here (redis.shards): nobody would find it"
            )
        ttl = store.settings.claim_ttl_s
        claim = space.registered(lambda: store.index.claim(space.id, digests, segment, ttl))
        if claim.present == record.slots:
            raise Present(record.slots, nbytes)
        if not claim.granted:
            raise NotNow("an engine is saving these blocks just now; import again for what is left")

    def _shards(self, name: NamespaceId) -> int:
        if name not in self._in_shards:
            accounts = self._store.maintenance.accounts()
            self._in_shards |= {account.namespace: account.shards for account in accounts}
        return self._in_shards.get(name, 1)

    def _space(self, name: NamespaceId, header: Header) -> Space:
        """Returns the header's namespace, which is opened and registered once."""
        if name not in self._spaces:
            space = self._store.open(namespace_of(header))
            space.register()
            self._spaces[name] = space
        return self._spaces[name]

    def put(
        self, namespace: NamespaceId, segment: SegmentId, rank: int, buffers: Sequence[memoryview]
    ) -> None:
        """Puts the payload of a rank."""
        self._store.payloads.put(payload_name(namespace, segment, rank), buffers)

    def commit(self, namespace: NamespaceId, segment: SegmentId, whole: Whole) -> None:
        """Makes a segment visible whose payloads are all put. Raises NotNow and Erased."""
        store = self._store
        if self._returns.barred(namespace, segment, whole.record) == "invalidated":
            # First: a follower evicts what it finds visible and barred.
            self._returns.readmit(namespace, segment)
        state = commit_whole(
            store.index,
            store.payloads,
            segment,
            whole,
            returns=self._returns,
            register=self._spaces[namespace].register,
            delete_after_s=store.clock() + store.settings.grace_s,
        )
        if state is CommitState.REFUSED:
            # It may have been erased, or condemned, while it came in.
            self._returns = Returns(store.maintenance, store.backends.evidence)
            self._check_barred(namespace, segment, whole.record)
            # The payloads stay: the trash deletes them, or another import needs them.
            raise NotNow(
                "it was evicted here a short time ago, or is stored differently; import again after "
                f"{store.settings.grace_s:g} s (grace_s)"
            )
        if state is CommitState.WAITING:
            # It was in the trash, and its payload was deleted between our put and our commit.
            raise NotNow("its old copy was deleted at the same moment; import again")
        # Without this its age would make it the first to be evicted.
        store.index.touch(namespace, [segment])
        self._filled += whole.record.nbytes
        store.rounds.committed(whole.record.nbytes)

    def _check_barred(self, name: NamespaceId, segment: SegmentId, record: SegmentRecord) -> None:
        """Raises Erased if it may not come back: then not even its payload may."""
        barred = self._returns.barred(name, segment, record)
        if barred == "condemned":
            raise Erased("an audit here found that it is wrong")
        if barred == "failed":
            raise Erased("its writer has failed here: others compute something else")
        if barred == "erased":
            raise Erased("its tenant or salt was erased here, and what was computed before stays so")

    def give_up(self, namespace: NamespaceId, segment: SegmentId, ranks: int) -> None:
        """Deletes the payloads of the first `ranks` ranks, unless the segment is visible."""
        if self._store.maintenance.get(namespace, [segment])[0] is None:
            self._store.payloads.delete([payload_name(namespace, segment, rank) for rank in range(ranks)])
