"""ShardedCatalogue: looks at namespaces in several shards: sums, and listings one after the other."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import TypeVar

from kvstore.errors import DamagedIndex, KVStoreError, TransientError
from kvstore.index.contract import check_salt, check_session
from kvstore.index.maintenance import (
    Account,
    Candidate,
    Entry,
    Listing,
    SegmentState,
    Usage,
)
from kvstore.index.sessions import SessionListing
from kvstore.index.sharding.leaf import Layout
from kvstore.index.sharding.names import ONE, base_of, layout_of, shard_names, shards_in
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.keys import NamespaceId, SaltId, SegmentId, SessionId

#: Sessions of a shard that the others are asked for at a time.
_PAGE = 200
#: How often `states` asks of a namespace that is moved meanwhile.
_LOOKS = 3

_LOST = (
    "the shards of namespace {} are there, but not what lays them out; an engine that registers it mends that"
)

_MOVING = (
    "a reshard brings namespace {0} into {1} shards and takes memory for both layouts; if no reshard runs, "
    "run `cache-admin rebuild {0} --shards {1} --apply`, which finishes it"
)

_T = TypeVar("_T")


class ShardedCatalogue(ShardedRequests):
    """The part of ShardedIndex that only reads, or looks after what reads have left."""

    def namespaces(self) -> dict[NamespaceId, str]:
        found = self._leaf.namespaces()
        return {base_of(name): found.get(base_of(name), text) for name, text in found.items()}

    def accounts(self) -> list[Account]:
        return _whole(self._leaf.accounts())

    def reachable(self) -> tuple[list[Account], KVStoreError | None]:
        """A namespace of which some shards answer is there with what these hold."""
        found, failure = self._leaf.reachable()
        return _whole(found), failure

    def _unknown(self, namespace: NamespaceId) -> Layout:
        """Goes by the names of the shards that there are: a namespace that has lost what lays it out must not
        look as if it was empty. Raises DamagedIndex if these are of several layouts.

        The list of names may have been on the same node. Then it is looked where this process would put it.
        """
        asked = shard_names(namespace, self._asked)
        names = self._named(namespace) or {one for one in asked if self._leaf.layout(one) is not None}
        if not names:
            return super()._unknown(namespace)
        if (layout := _agreed(names)) is None:
            raise DamagedIndex(f"{self._leaf!r}: {_LOST.format(namespace)}")
        one = self._leaf.layout(min(names))
        return Layout(layout, items=one is not None and one.items)

    def _named(self, namespace: NamespaceId) -> set[NamespaceId]:
        """Returns all shards of a namespace that are there, of whatever layout."""
        return {one for one in self._leaf.namespaces() if base_of(one) == namespace != one}

    def usage(self, namespace: NamespaceId) -> Usage:
        return summed(self._each(self._shards(namespace), self._leaf.usage))

    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        return self._walked(namespace, self._leaf.segments)

    def _walked(self, namespace: NamespaceId, walk: Callable[[NamespaceId], Iterator[_T]]) -> Iterator[_T]:
        """Walks through one shard after the other. Raises TransientError at the end if the namespace lies
        otherwise by then: what was walked through was being emptied."""
        shards = self._shards(namespace)
        for name in shards:
            yield from walk(name)
        with suppress(DamagedIndex):
            found = self._leaf.layout(namespace)
            if found is not None and shard_names(namespace, found.name) != shards:
                raise TransientError(
                    f"{self._leaf!r}: namespace {namespace} was brought from {len(shards)} shards into "
                    f"{found.shards} while it was listed: try again"
                )

    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        return self._gathered(self._shards(namespace), segments, self._leaf.get)

    def states(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentState | None]:
        """Goes by how the namespace lies before and after it was asked: what is unknown may be deleted.
        Raises TransientError if that changes each time.

        After a turn the trash lies in the shards before until it is brought over. They are asked first:
        what comes over meanwhile is found by the second question.
        """
        layout = self._now(namespace)
        for _ in range(_LOOKS):
            left: Sequence[SegmentState | None] = [None] * len(segments)
            if layout.left:
                left = self._gathered(shard_names(namespace, layout.left), segments, self._leaf.states)
            states = self._gathered(shard_names(namespace, layout.name), segments, self._leaf.states)
            before, layout = layout, self._now(namespace)
            if layout.name == before.name:
                return [one or other for one, other in zip(states, left, strict=True)]
        raise TransientError(
            f"{self._leaf!r}: a reshard brings namespace {namespace} into {layout.shards} shards: try again"
        )

    def _now(self, namespace: NamespaceId) -> Layout:
        """Returns how a namespace lies now, whatever was known. Raises what the leaf raises."""
        try:
            found = self._leaf.layout(namespace)
        except DamagedIndex:
            found = None
        return self._unknown(namespace) if found is None else found

    def entries(self, namespace: NamespaceId) -> Iterator[Entry]:
        return self._walked(namespace, self._leaf.entries)

    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        """Draws of each shard as many as its share of the segments makes likely."""
        shards = self._shards(namespace)
        if len(shards) == 1:
            return self._leaf.sample(shards[0], count)
        sizes = [one.segments for one in self._each(shards, self._leaf.usage)]
        drawn = random.sample(range(len(shards)), min(count, sum(sizes)), counts=sizes) if any(sizes) else []
        found: list[Listing] = []
        for place, some in Counter(drawn).items():
            found += self._leaf.sample(shards[place], some)
        return found

    def order(self, namespace: NamespaceId, limit: int) -> list[Candidate]:
        shards = self._shards(namespace)
        if len(shards) == 1:
            return self._leaf.order(shards[0], limit)
        return list(islice(merge(*self._orders(shards, limit).values(), key=in_order), max(0, limit)))

    def _orders(self, shards: Sequence[NamespaceId], limit: int) -> dict[NamespaceId, list[Candidate]]:
        """Returns what goes first in each shard that answers."""
        return self._answering(shards, lambda name: self._leaf.order(name, limit))

    def hottest(self, namespace: NamespaceId, limit: int) -> list[tuple[SegmentId, float]]:
        found = self._each(self._shards(namespace), lambda name: self._leaf.hottest(name, limit))
        return list(islice(merge(*found, key=lambda one: -one[1]), max(0, limit)))

    def cool(self, namespace: NamespaceId) -> None:
        self._each(self._shards(namespace), self._leaf.cool)

    def of_salt(self, namespace: NamespaceId, salt: SaltId) -> Iterator[Listing]:
        check_salt(salt)
        return self._walked(namespace, lambda name: self._leaf.of_salt(name, salt))

    def holdings(self, namespace: NamespaceId, over_bytes: int) -> dict[SaltId, int]:
        shards = self._shards(namespace)
        if len(shards) == 1:
            return self._leaf.holdings(shards[0], over_bytes)
        # Who holds more than that in all holds more than an equal part of it in some shard.
        least = over_bytes // len(shards)
        if not any(self._each(shards, lambda name: self._leaf.holdings(name, least))):
            return {}
        held: Counter[SaltId] = Counter()
        for some in self._each(shards, lambda name: self._leaf.holdings(name, min(0, over_bytes))):
            held.update(some)
        return {salt: nbytes for salt, nbytes in held.items() if nbytes > over_bytes}

    # Sessions

    def sessions(self, namespace: NamespaceId) -> Iterator[SessionListing]:
        """Yields a session of which several shards remember something once."""
        shards = self._shards(namespace)
        for place, name in enumerate(shards):
            page: list[SessionListing] = []
            for one in self._leaf.sessions(name):
                page.append(one)
                if len(page) == _PAGE:
                    yield from self._with_others(page, shards, place)
                    page = []
            yield from self._with_others(page, shards, place)

    def _with_others(
        self, page: Sequence[SessionListing], shards: Sequence[NamespaceId], place: int
    ) -> Iterator[SessionListing]:
        """Yields a page of one shard's sessions with what the later shards know of them, less those that an
        earlier one knows."""
        wanted = [one.session for one in page]
        others = [self._leaf.find_sessions(name, wanted) if wanted else [] for name in shards]
        for at, one in enumerate(page):
            if not any(others[number][at] for number in range(place)):
                yield _joined([one, *(others[number][at] for number in range(place + 1, len(shards)))])

    def find_sessions(
        self, namespace: NamespaceId, sessions: Sequence[SessionId]
    ) -> list[SessionListing | None]:
        for session in sessions:
            check_session(session)
        found = self._each(self._shards(namespace), lambda name: self._leaf.find_sessions(name, sessions))
        return [_joined(one) if any(one) else None for one in zip(*found, strict=True)]

    def owners(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SessionId]:
        return self._gathered(self._shards(namespace), segments, self._leaf.owners)

    def retained(self, namespace: NamespaceId) -> dict[SaltId, int]:
        held: Counter[SaltId] = Counter()
        for some in self._each(self._shards(namespace), self._leaf.retained):
            held.update(some)
        return dict(held)

    def expire(self, namespace: NamespaceId) -> int:
        return sum(self._answering(self._shards(namespace), self._leaf.expire).values())

    def _answering(
        self, names: Sequence[NamespaceId], call: Callable[[NamespaceId], _T]
    ) -> dict[NamespaceId, _T]:
        """Calls of each shard; those that don't answer are left out, unless none does: for upkeep."""
        answers, failure = dict[NamespaceId, _T](), None
        for name in names:
            try:
                answers[name] = call(name)
            except TransientError as exc:
                failure = failure or exc
        if failure is not None and not answers:
            raise failure
        return answers

    # The whole index

    def ping(self) -> None:
        self._leaf.ping()

    def memory(self) -> tuple[int, int] | None:
        return self._leaf.memory()

    def warnings(self) -> list[str]:
        names = set(self._leaf.namespaces())
        lost = sorted({base_of(one) for one in names} - names)
        moving = [one for one in self.reachable()[0] if one.to or one.left]
        return [
            *self._leaf.warnings(),
            *map(_LOST.format, lost),
            *(_MOVING.format(one.namespace, shards_in(one.to or one.layout)) for one in moving),
        ]


def in_order(one: Candidate) -> tuple[float, int, float, SegmentId]:
    """Returns what the order of eviction sorts by."""
    return one.keep_s, -one.depth, one.used_s, one.segment


def summed(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(one.nbytes for one in usages),
        sum(one.segments for one in usages),
        sum(one.blocks for one in usages),
        sum(one.pinned_bytes for one in usages),
        sum(one.cost_us for one in usages),
    )


def _whole(accounts: Sequence[Account]) -> list[Account]:
    """Returns an account for each namespace, with the sums over its shards. Shards of another layout than the
    namespace's are nobody's."""
    members = defaultdict[NamespaceId, list[Account]](list)
    for one in accounts:
        members[base_of(one.namespace)].append(one)
    return [_account(name, some) for name, some in sorted(members.items())]


def _account(name: NamespaceId, members: Sequence[Account]) -> Account:
    own = next((one for one in members if one.namespace == name), None)
    others = set() if own is None else {own.to, own.left}
    shards = [one for one in members if one.namespace != name and layout_of(one.namespace) not in others]
    if shards and (own is None or (own.problem and own.layout == ONE)):
        layout = _agreed([one.namespace for one in shards])
        if layout is None:
            return _together(name, replace(own or shards[0], problem=_LOST.format(name)), ONE, members)
        return _together(name, own or shards[0], layout, members)
    assert own is not None, "there is one at least"
    if own.layout == ONE:
        return own
    some = [one for one in members if one.namespace != name and layout_of(one.namespace) == own.layout]
    return _together(name, own, own.layout, [own, *some])


def _agreed(names: Iterable[NamespaceId]) -> str | None:
    """Returns of which layout all of these are; None if some are of another than others."""
    layouts = {layout_of(name) for name in names}
    return layouts.pop() if len(layouts) == 1 else None


def _together(name: NamespaceId, own: Account, layout: str, members: Sequence[Account]) -> Account:
    lives = [one.ttl_s for one in members if one.namespace != name]
    return replace(
        own,
        namespace=name,
        usage=summed([one.usage for one in members]),
        trashed=sum(one.trashed for one in members),
        bygone=sum(one.bygone for one in members),
        seen_s=max(one.seen_s for one in members),
        problem="; ".join(dict.fromkeys(one.problem for one in (own, *members) if one.problem)),
        # One that has lost what it was told makes the namespace one that has to be told again.
        ttl_s=max(lives) if lives and all(lives) else 0,
        layout=layout,
        summed=tuple(one.namespace for one in members if one.namespace != name),
    )


def _joined(found: Sequence[SessionListing | None]) -> SessionListing:
    """Returns what several shards know of a session, as one."""
    known = [one for one in found if one is not None]
    latest = max(known, key=lambda one: one.last_use_s)
    return SessionListing(
        latest.session,
        min((one.state for one in known), key=("retained", "live", "ended").index),
        max(one.until_s for one in known),
        latest.priority,
        latest.last_use_s,
        sum(one.segments for one in known),
        sum(one.nbytes for one in known),
    )
