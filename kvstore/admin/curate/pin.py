"""pin: protects segments from eviction by quotas.

At most `eviction.pinned_share` of every quota that bounds a namespace may be pinned. Heads of chains are
pinned first, because a tail without its head is of no use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum, LeftOut, summary_of_segment
from kvstore.admin.curate.quota import quota_lines, quotas_of
from kvstore.admin.curate.reports import PinReport, PinsReport
from kvstore.admin.inspect.show import find_segment
from kvstore.admin.operators import among
from kvstore.admin.reports import NAMED, EndedEarly
from kvstore.errors import CapacityExceeded, ConfigError, KVStoreError
from kvstore.index.maintenance import FullIndex, Listing
from kvstore.keys import NamespaceId, SegmentId, digests
from kvstore.rules.hashing import block_hashes, seed_for
from schemas.namespace import Namespace

_STEP = 256
_TOO_MUCH = (
    "more than eviction.pinned_share of a quota would be pinned; `pin --remove` something, or raise it "
    "(`cache-admin quota`)"
)


def pins(cache: Cache, prefix: str | None, now_s: float) -> PinsReport:
    """Returns what is pinned, in one namespace or in all. Reads through every namespace that has pins.

    Raises UnknownName and what the index raises.
    """
    found = pinned(cache, prefix)
    store = quota_lines([], cache.quotas(), cache.settings)[-1]
    return PinsReport(
        at_s=now_s,
        pinned=_amount(found).amount,
        most_bytes=int(store.quota_bytes * cache.settings.eviction.pinned_share),
        segments=tuple(summary_of_segment(*item) for item in found),
    )


def pinned(cache: Cache, prefix: str | None) -> list[tuple[NamespaceId, Listing]]:
    """Returns every pinned segment of one namespace or of all, heads first. Raises as `pins` does."""
    chosen = None if prefix is None else cache.namespace(prefix)
    found = [
        (account.namespace, listing)
        for account in cache.accounts(chosen)
        if account.usage.pinned_bytes
        for listing in cache.segments(account.namespace)
        if listing.pinned
    ]
    return sorted(found, key=lambda item: (item[0], item[1].record.depth, item[1].segment))


def choose(
    cache: Cache, segments: Sequence[str], prefix: str | None, depth: int | None
) -> list[tuple[NamespaceId, Listing]]:
    """Returns segments by the start of their ids or, if `segments` is empty, by their depth; heads first.

    The latter are all segments that begin within the first `depth` blocks of their chains (None: all), of one
    namespace or of all. Raises UnknownName and what the index raises.
    """
    names = list(cache.namespaces()) if prefix is None else [cache.namespace(prefix)]
    if segments:
        found = [find_segment(cache, each, names) for each in dict.fromkeys(segments)]
    else:
        found = [
            (name, listing)
            for name in names
            for listing in cache.segments(name)
            if depth is None or listing.record.depth < depth
        ]
    unique = {(name, listing.segment): (name, listing) for name, listing in found}
    return sorted(unique.values(), key=lambda item: (item[0], item[1].record.depth, item[1].segment))


def choose_prompt(
    cache: Cache, prefix: str, tokens: Sequence[int], *, seed: str | None, salt: str
) -> list[tuple[NamespaceId, Listing]]:
    """Returns all segments of a namespace that hold blocks of this prompt, heads first.

    Raises UnknownName, ConfigError if the digests of its blocks can't be computed, and what the index raises.
    """
    name = cache.namespace(prefix)
    assert cache.index is not None, "a namespace is known, so there is an index"
    try:
        space = Namespace.model_validate_json(cache.namespaces()[name])
    except ValidationError as exc:
        raise ConfigError(f"namespace {name} is of another version of kvstore") from exc
    if space.kind != "kv":
        raise ConfigError(f"namespace {name} holds encoder items; pin those by their segments")
    hashes = block_hashes(
        tokens,
        algorithm=space.hash_algo,
        block_tokens=space.block_tokens,
        seed=seed_for(space, seed),
        salt=salt,
    )
    found: dict[SegmentId, None] = {}
    for number, group in enumerate(space.groups):
        # A block that spans several hashes has the last one as its key.
        ratio = max(1, group.block_tokens // space.block_tokens)
        chain = digests(hashes[ratio - 1 :: ratio], number)
        runs = cache.index.find(name, chain, chain)
        found.update(dict.fromkeys(run.segment for run in runs if run is not None))
    listings = cache.index.get(name, list(found))
    chosen = [(name, listing) for listing in listings if listing is not None]
    return sorted(chosen, key=lambda item: (item[1].record.depth, item[1].segment))


def pin(
    cache: Cache, chosen: Sequence[tuple[NamespaceId, Listing]], *, applied: bool, now_s: float
) -> PinReport:
    """Pins the chosen segments that are not pinned yet, as far as allowed; only a plan unless `applied`.

    Raises what the index raises, unless something was pinned before.
    """
    change = _Change("pin", [item for item in chosen if not item[1].pinned])
    already = [item for item in chosen if item[1].pinned]
    index = cache.index
    if index is not None and change.planned:
        rooms = _rooms(cache, index, change)
        if applied and change.planned:
            cache.record("pin", change.words)
            change.apply(lambda name, group: index.pin(name, group, most_bytes=rooms[name]))
    return change.report(already, applied=applied, now_s=now_s)


def unpin(
    cache: Cache, chosen: Sequence[tuple[NamespaceId, Listing]], *, applied: bool, now_s: float
) -> PinReport:
    """Unpins the chosen segments that are pinned; only a plan unless `applied`. Raises as `pin` does."""
    change = _Change("unpin", [item for item in chosen if item[1].pinned])
    already = [item for item in chosen if not item[1].pinned]
    index = cache.index
    if index is not None and applied and change.planned:
        cache.record("pin", f"remove {change.words}")
        change.apply(index.unpin)
    return change.report(already, applied=applied, now_s=now_s)


@dataclass
class _Change:
    """A run of `pin`, with --remove or without: its plan, and what it has done."""

    action: Literal["pin", "unpin"]
    planned: list[tuple[NamespaceId, Listing]]
    left: LeftOut = field(default_factory=LeftOut)
    ended: EndedEarly = "complete"
    problem: str = ""
    changed: int = 0

    @property
    def words(self) -> str:
        """What is to be done, for the operations."""
        return f"{len(self.planned)} segments of {among(name for name, _ in self.planned)}"

    def leave_out(self, item: tuple[NamespaceId, Listing], reason: str) -> None:
        """Notes that this segment is left out."""
        self.left.add(item[0], item[1].segment, reason)

    def apply(self, change: Callable[[NamespaceId, Sequence[SegmentId]], int]) -> None:
        """Calls `change` for all that is planned, with some segments of one namespace at a time."""
        groups: dict[NamespaceId, list[tuple[NamespaceId, Listing]]] = defaultdict(list)
        for item in self.planned:
            groups[item[0]].append(item)
        try:
            for name, items in groups.items():
                for start in range(0, len(items), _STEP):
                    self._step(change, name, items[start : start + _STEP])
        except KeyboardInterrupt:
            self.ended, self.problem = "cancelled", "cancelled"
        except KVStoreError as exc:
            if not self.changed:
                raise
            self.ended, self.problem = "failed", str(exc)

    def _step(
        self,
        change: Callable[[NamespaceId, Sequence[SegmentId]], int],
        name: NamespaceId,
        items: Sequence[tuple[NamespaceId, Listing]],
    ) -> None:
        try:
            self.changed += change(name, [listing.segment for _, listing in items])
        except CapacityExceeded:
            # Another process has pinned something meanwhile.
            for item in items:
                self.leave_out(item, _TOO_MUCH)

    def report(
        self, already: Sequence[tuple[NamespaceId, Listing]], *, applied: bool, now_s: float
    ) -> PinReport:
        """Returns what was done, or would be."""
        return PinReport(
            at_s=now_s,
            action=self.action,
            applied=applied,
            ended=self.ended,
            problem=self.problem,
            planned=_amount(self.planned).amount,
            already=_amount(already).amount,
            changed=self.changed,
            segments=tuple(summary_of_segment(*item) for item in self.planned[:NAMED]),
            left_out=self.left.count,
            left=tuple(self.left.named),
        )


def _rooms(cache: Cache, index: FullIndex, change: _Change) -> dict[NamespaceId, int]:
    """Returns how much may be pinned in each namespace, and takes out of the plan what is too much."""
    accounts = {account.namespace: account for account in index.accounts()}
    lines = quota_lines(list(accounts.values()), index.quotas(), cache.settings)
    share = cache.settings.eviction.pinned_share
    #: Bytes that may still be pinned under each quota.
    free = {line.scope: int(line.quota_bytes * share) - line.pinned_bytes for line in lines}
    bounds = {name: [line.scope for line in quotas_of(account, lines)] for name, account in accounts.items()}
    pinned = {name: account.usage.pinned_bytes for name, account in accounts.items()}
    fitting, full = [], set()
    for item in change.planned:
        name, nbytes = item[0], item[1].record.nbytes
        # Once one is left out, those that follow in its chain would be of no use.
        if name in full or any(free[scope] < nbytes for scope in bounds.get(name, ())):
            full.add(name)
            change.leave_out(item, _TOO_MUCH)
            continue
        for scope in bounds.get(name, ()):
            free[scope] -= nbytes
        pinned[name] = pinned.get(name, 0) + nbytes
        fitting.append(item)
    change.planned = fitting
    return pinned


def _amount(items: Sequence[tuple[NamespaceId, Listing]]) -> AmountSum:
    tally = AmountSum()
    for _, listing in items:
        tally.add(listing.record.slots, listing.record.nbytes)
    return tally
