"""erase: forgets all of a tenant, or all that was saved under a salt, and proves it.

Order, so that a run that is cut off anywhere is finished by the next one:
    1. record    who erases what                            crash: nothing has happened
    2. forbid    commits of what was created up to now      crash: the same, and what is saved is refused
    3. hide      what can be matched: a tenant's by         crash: the rest of it can be matched until the
                 invalidation, a salt's by eviction                next run
    4. refuse    the same beside the payloads, for an       crash: the same as before
                 index that gets lost
    5. delete    payloads, at once: an erasure outranks     crash: what is in the trash is deleted by
                 loads under way, which find nothing               whoever tends the cache, the rest by fsck
                 and compute
    6. look      at all that is stored once more            crash: nothing is proved
    7. forget    a tenant's namespaces, with their journals crash: empty namespaces
Forbidding comes before hiding: between the two nothing can be added to what is to go. It is done in all
namespaces before anything is deleted in one.

What is under way while this happens: a save that put its payload before step 2 is refused when it commits,
and deletes it itself; if it dies before that, its payload is a stray that a look finds, here or by the next
run.

Payloads that the index does not show (strays, the trash) are told apart by the salt in their headers. A look
that finds none of the salt, and no segment of it in the index, is the proof; for a tenant it is one that
finds no payload of before step 2. A bucket that keeps former versions is asked last: nobody but a lifecycle
rule of its owner deletes them, and so the report says that they are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.admin.backends import Cache, Refused, UnknownName
from kvstore.admin.counting import AmountSum, amount_of
from kvstore.admin.described import fields_of
from kvstore.admin.operators import among
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.remove.looks import LookForSalt, former_versions, header_at, unasked_versions
from kvstore.admin.remove.removal import NamespaceRemoval
from kvstore.admin.remove.reports import ErasedNamespace, EraseReport, EraseState, VersionsReport
from kvstore.admin.repair.survey import Stock, take_stock
from kvstore.admin.reports import Amount, EndedEarly
from kvstore.admin.selection import needed_index
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NO_SALT, NamespaceId, SaltId, SegmentId, payload_name

#: Segments evicted by one call.
_EVICT_STEP = 256
#: Looks without `--wait`: what the first one finds and deletes, the second one must not find again.
_LOOKS = 3
#: Seconds from one look to the next, with `--wait`.
_PAUSE_S = 2.0
#: Headers that are tried to learn whose a namespace is that the index does not know.
_TRIES = 3

_UNREACHED = (
    "engines' own memory: blocks in vLLM's prefix cache until POST /reset_prefix_cache or a restart, "
    "requests under way until they end, and vLLM's own offloading to memory or other tiers",
    "encoder outputs that engines have fetched: they look once a second, while they work, and give them up",
    "folders in front of the bucket on nodes: they give up their copies in their next round; a node that is "
    "switched off keeps them until it runs again",
    "copies that were taken: archives of `cache-admin export`, replicas, snapshots and backups of the "
    "bucket, of Redis and of SQLite files. Nothing in them that was created before this erasure can be "
    "imported or rebuilt here",
    "buckets with soft delete: they keep deleted objects for a time, and no request of S3's tells of it",
    "uploads that were never completed and temporary files of saves that died: "
    "`cache-admin fsck --list --apply` deletes them when they are an hour old; "
    "traces (`trace.folder`), which hold parts of digests",
)
_UNREACHED_OF_SALT = (
    "the journal, until its rings have moved on: digests and sizes of what went, names of requests; "
    "`cache-admin drop` removes a whole namespace's",
    "what a release saved that did not record salts: nobody can tell whose it is. It is found by nobody "
    "without the salt, and goes with `cache-admin evict NAMESPACE --all`",
)


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be erased: all of a tenant, or what was saved under a salt, everywhere or in a namespace."""

    tenant: str = ""
    salt: SaltId = NO_SALT
    #: The start of the namespace's id.
    prefix: str | None = None

    def __post_init__(self) -> None:
        if bool(self.tenant) == bool(self.salt) or (self.tenant and self.prefix is not None):
            raise ValueError("a tenant, or a salt")

    def __str__(self) -> str:
        return f"tenant {self.tenant}" if self.tenant else f"salt {self.salt.hex()}"


def erase(
    cache: Cache,
    target: Target,
    *,
    apply: bool = False,
    wait_s: float = 0.0,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
) -> EraseReport:
    """Erases the target, and looks what is left.

    While something is, and for up to `wait_s`, it goes on. Ctrl-C and a backend that fails end it, and the
    report says so. Raises UnknownName if nothing is known of the tenant or the namespace, Refused without an
    index, and what the backends raise before anything is changed.
    """
    index = needed_index(cache)
    versions = unasked_versions(cache.settings)
    run = _Erasure(cache, index, target, wait_s, progress or Silent(), clock, sleep, versions)
    began = time.monotonic()
    run.plan()
    try:
        if apply:
            run.all()
        # Afterwards: a bucket that keeps none now has kept none of what was deleted.
        run.versions = former_versions(cache.settings)
    except KeyboardInterrupt:
        run.ended, run.problem = "cancelled", "cancelled; run it again to go on"
    except KVStoreError as exc:
        run.ended, run.problem = "failed", str(exc)
    return run.report(applied=apply, seconds=time.monotonic() - began)


@dataclass
class _Space:
    """One namespace of an erasure."""

    name: NamespaceId
    kind: str
    model: str
    tenant: str
    account: Account | None
    found: Amount
    removal: NamespaceRemoval
    until_s: float | None = None
    #: (Salt) Segments that this run evicted.
    evicted: set[SegmentId] = field(default_factory=set)
    look: LookForSalt | None = None
    remaining: int = 0
    state: EraseState = "kept"

    @property
    def unreadable(self) -> int:
        return self.look.unreadable if self.look is not None else 0

    @property
    def hidden(self) -> int:
        return self.removal.invalidated + len(self.evicted)

    @property
    def deleted(self) -> int:
        return self.removal.deleted


@dataclass
class _Erasure:
    cache: Cache
    index: FullIndex
    target: Target
    wait_s: float
    progress: ProgressListener
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    versions: VersionsReport
    ended: EndedEarly = "complete"
    problem: str = ""
    spaces: list[_Space] = field(default_factory=list)
    looks: int = 0
    #: Namespaces that have payloads, that the index doesn't know, and whose tenant nobody can tell.
    nobodys: list[str] = field(default_factory=list)

    # -- the plan ------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Finds the namespaces that are concerned; changes nothing."""
        target, texts = self.target, self.index.namespaces()
        accounts = {account.namespace: account for account in self.index.accounts()}
        one = None if target.prefix is None else self.cache.namespace(target.prefix)
        stocks = {} if one is not None else take_stock(self.cache.payloads, self.progress)
        for name in sorted({*texts, *stocks}):
            if one not in (None, name):
                continue
            fields = fields_of(texts.get(name)) or fields_of(self._told(name, stocks.get(name)))
            tenant = str(fields.get("tenant", ""))
            if target.tenant and target.tenant != tenant:
                if name not in texts and not fields:
                    self.nobodys.append(name)
                if name not in accounts or accounts[name].tenant != target.tenant:
                    continue
            if name in texts and name not in accounts:
                raise Refused(f"namespace {name} is a newer release's: use the cache-admin of that one")
            kind, model = str(fields.get("kind", "")), str(fields.get("model", ""))
            self.spaces.append(self._space(name, kind, model, tenant, accounts.get(name)))
        if target.tenant and not self.spaces:
            raise UnknownName(
                f"nothing is known of a tenant {target.tenant!r}: it is erased, or its name is another one; "
                "`cache-admin namespaces` lists them"
            )

    def _told(self, name: NamespaceId, stock: Stock | None) -> str | None:
        """Returns the namespace in the header of one of its payloads, if the index doesn't know it."""
        for number, stored in enumerate(stock.segments() if stock is not None else ()):
            if number == _TRIES:
                break
            if (header := header_at(self.cache, name, stored)) is not None:
                return header.meta.namespace
        return None

    def _space(
        self, name: NamespaceId, kind: str, model: str, tenant: str, account: Account | None
    ) -> _Space:
        found = amount_of([account] if account else ())
        if salt := self.target.salt:
            tally = AmountSum()
            for listing in self.index.of_salt(name, salt):
                tally.add(listing.record.slots, listing.record.nbytes)
            found = tally.amount
        removal = NamespaceRemoval(self.cache, self.index, name, self.clock)
        return _Space(name, kind, model, tenant, account, found, removal)

    # -- the work ------------------------------------------------------------------------------------------

    def all(self) -> None:
        """Erases; see the head of this module for the order."""
        names = among(space.name for space in self.spaces)
        self.cache.record(
            "erase", f"{self.target}: {self._found().segments} segments of {names or 'nothing'}"
        )
        end = time.monotonic() + self.wait_s
        for space in self.spaces:
            space.until_s = self.index.forbid(space.name, self.target.salt)
            space.state = "remains"
        self.progress.begin("hide")
        for space in self.spaces:
            self._hide(space)
        for space in self.spaces:
            self.cache.evidence.refuse(space.name, self.index.forbidden(space.name))
        while True:
            self.looks += 1
            for space in self.spaces:
                self.progress.begin(f"erase from {space.name}")
                self._clear(space)
            left = time.monotonic() < end
            for space in self.spaces:
                space.state = self._ended(space)
            if not any(space.state == "remains" for space in self.spaces):
                return
            if self.looks >= _LOOKS:
                if not left:
                    return
                self.sleep(max(0.0, min(_PAUSE_S, end - time.monotonic())))

    def _hide(self, space: _Space) -> None:
        if not self.target.salt:
            space.removal.hide()
            return
        assert space.until_s is not None, "it was forbidden before"
        # Once more after the last of them: a page of the walk may have missed one that came meanwhile.
        while visible := self._visible(space):
            for at in range(0, len(visible), _EVICT_STEP):
                some = visible[at : at + _EVICT_STEP]
                self.index.evict(space.name, some, delete_after_s=0, rule="erased")
                space.evicted.update(some)

    def _visible(self, space: _Space) -> list[SegmentId]:
        """Returns the segments of the salt that can be matched and were created before the erasure."""
        listed = self.index.of_salt(space.name, self.target.salt)
        return [one.segment for one in listed if one.record.created_s <= (space.until_s or 0)]

    def _clear(self, space: _Space) -> None:
        """Deletes what is out of sight, and then looks for what should be gone."""
        removal, salt = space.removal, self.target.salt
        assert space.until_s is not None, "it was forbidden before"
        if salt:
            self._hide(space)
        # Others' payloads keep their grace time.
        removal.drain(at_once=not salt)
        if not salt:
            removal.reap_early()
        removal.reap()
        if not salt:
            space.remaining = removal.delete_strays(space.until_s) + removal.delete_evidence()
            return
        if space.look is None:
            space.look = LookForSalt(self.cache, self.index, space.name, salt, space.until_s)
        met = space.look.again()
        for at in range(0, len(met), _EVICT_STEP):
            some = met[at : at + _EVICT_STEP]
            removal.delete(
                [payload_name(space.name, one.segment, rank) for one in some for rank in one.sizes]
            )
            self.index.reaped(space.name, [one.segment for one in some])
        space.remaining = len(met) + len(self._visible(space)) + removal.delete_evidence(salt)

    def _ended(self, space: _Space) -> EraseState:
        if space.remaining or space.unreadable:
            return "remains"
        if self.target.salt:
            return "erased"
        forgotten = space.removal.forget()
        return "remains" if forgotten == "waiting" else forgotten

    # -- the report ----------------------------------------------------------------------------------------

    def _found(self) -> Amount:
        found = [space.found for space in self.spaces]
        return Amount(
            segments=sum(one.segments for one in found),
            blocks=sum(one.blocks for one in found),
            stored_bytes=sum(one.stored_bytes for one in found),
        )

    def _state(self) -> EraseState:
        states = [space.state for space in self.spaces]
        for state in ("kept", "remains", "in_use"):
            if state in states:
                return state
        return "erased" if self.versions.state == "none" else "former_versions"

    def _unreached(self) -> Sequence[str]:
        found = [*_UNREACHED, *(_UNREACHED_OF_SALT if self.target.salt else ())]
        if self.nobodys:
            found.append(
                f"namespaces {among(self.nobodys)}: they have payloads, the index does not know them, and no "
                "header says whose they are; `cache-admin fsck --list --apply` deletes them"
            )
        return found

    def report(self, *, applied: bool, seconds: float) -> EraseReport:
        """Returns how far it came."""
        return EraseReport(
            at_s=self.clock(),
            applied=applied,
            ended=self.ended,
            problem=self.problem,
            tenant=self.target.tenant,
            salt=self.target.salt.hex(),
            namespaces=tuple(
                ErasedNamespace(
                    id=space.name,
                    kind=space.kind,
                    model=space.model,
                    tenant=space.tenant,
                    found=space.found,
                    trashed=space.account.trashed if space.account else 0,
                    bygone=space.account.bygone if space.account else 0,
                    forbidden_until_s=space.until_s,
                    hidden_segments=space.hidden,
                    deleted_payloads=space.deleted,
                    remaining=space.remaining,
                    unreadable=space.unreadable,
                    state=space.state,
                )
                for space in self.spaces
            ),
            found=self._found(),
            hidden_segments=sum(space.hidden for space in self.spaces),
            deleted_payloads=sum(space.deleted for space in self.spaces),
            looks=self.looks,
            state=self._state() if applied else "kept",
            versions=self.versions,
            unreached=tuple(self._unreached()),
            seconds=seconds,
        )
